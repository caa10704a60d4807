/** The twin of the core's formulas. */

/** softmax(s / T): αᵢ = exp(sᵢ/T) / Σⱼ exp(sⱼ/T). */
export function softmax(scores: ArrayLike<number>, temperature = 1): Float64Array {
  const s = Float64Array.from(scores, (x) => x / temperature);
  const top = Math.max(...s);
  const e = s.map((x) => Math.exp(x - top));
  const sum = e.reduce((a, b) => a + b, 0);
  return e.map((x) => x / sum);
}
