/** Weightings α: how the scores of a row become weights. The same as qkv.weightings, in float64. */

import { type Like, SCORES, type Score, type Vector, resolveSettings, sigmoid } from "./scores";

/** The keys that have weight; null means all. */
export type Live = ArrayLike<boolean | number> | null;

export interface Weighting {
  name: string;
  settings: Record<string, unknown>;
  /** The weights of a row are nonnegative and sum to one. */
  convex: boolean;
  /** Weights may be exactly 0; the value of such a row has no influence, not even NaN. */
  sparse: boolean;
  weights(scores: Vector, live?: Live): Float64Array;
  /** log Σ exp(score), −∞ if no key is allowed; null if the weighting has none. */
  lse(scores: Vector, live?: Live): number | null;
  /** Why this weighting cannot be used with a score, or null. */
  refuses(score: Score): string | null;
}

interface Kind {
  title: string;
  formula: string;
  settings: Record<string, number | string | null>;
  convex?: boolean;
  sparse?: boolean;
  weights(s: Float64Array, settings: any): Float64Array;
  /** The scores that enter the log-sum-exp. */
  logs?(s: Float64Array, settings: any): Float64Array;
}

/** The largest number; NaN if there is a NaN, −∞ if there are no numbers. */
function largest(s: Vector): number {
  let top = -Infinity;
  for (let i = 0; i < s.length; i++) top = Math.max(top, s[i]);
  return top;
}

function total(x: Vector): number {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += x[i];
  return sum;
}

const finite = (x: number) => (Number.isFinite(x) ? x : 0);
/** A divisor: 1 in place of 0. NaN stays NaN. */
const nonzero = (x: number) => (x === 0 ? 1 : x);

function softmax(s: Float64Array): Float64Array {
  const top = finite(largest(s));
  const e = s.map((x) => Math.exp(x - top));
  const sum = nonzero(total(e));
  return e.map((x) => x / sum);
}

function logSumExp(s: Float64Array): number {
  const top = finite(largest(s));
  const sum = total(s.map((x) => Math.exp(x - top)));
  return sum === 0 ? -Infinity : top + Math.log(sum);
}

/** 1 at the first largest score; a NaN is not hidden. */
function hard(s: Float64Array): Float64Array {
  const top = largest(s);
  if (Number.isNaN(top)) return s.map((x) => x * 0);
  const at = top > -Infinity ? s.indexOf(top) : -1;
  return s.map((_, i) => Number(i === at));
}

/** The scores, with all but the k largest set to −∞; of equal scores the first rows count. */
function best(s: Float64Array, k: number): Float64Array {
  const order = Array.from(s.keys()).sort((i, j) => s[j] - s[i] || i - j);
  if (s.some(Number.isNaN)) return s;
  const out = s.map(() => -Infinity);
  for (const i of order.slice(0, k)) out[i] = s[i];
  return out;
}

/** αᵢ = e^−λ (1 + c zᵢ e^cλ)^(1/c), c = alpha − 1, z = s − top: the λ that makes them sum to one.
 *
 * λ = −ln of the largest weight, so it is between 0 and ln m. The sum decreases with λ. At c = 0 this is softmax, and λ its log-sum-exp; at c = 1 sparsemax. */
function entmax(s: Float64Array, alpha: number): Float64Array {
  const top = largest(s);
  if (Number.isNaN(top)) return s.map(() => NaN);
  if (top === -Infinity) return s.map(() => 0);
  const c = alpha - 1;
  const weights = (at: number) => {
    const grown = Math.exp(c * at);
    return s.map((x) => {
      const u = (x - top) * grown;
      if (c * u <= -1) return 0;
      return Math.exp((c === 0 ? u : Math.log1p(c * u) / c) - at);
    });
  };
  let [low, high] = [0, Math.log(s.length) + 1e-9];
  for (;;) {
    const middle = (low + high) / 2;
    if (middle <= low || middle >= high) break;
    if (total(weights(middle)) > 1) low = middle;
    else high = middle;
  }
  const found = weights(low);
  const sum = total(found); // for a large alpha no λ gives exactly 1
  return found.map((x) => x / sum);
}

/** The weights of a row whose scores are all 0. */
const INSTEAD: Record<string, (s: Float64Array) => Float64Array> = {
  zero: (s) => s.map(() => 0),
  nan: (s) => s.map(() => NaN),
  uniform: (s) => s.map(() => 1 / s.length),
  nearest: hard,
  raise: () => {
    throw new RangeError("1 query has no key within the window: use a larger width, or Normalized(on_empty='nearest')");
  },
};

function normalized(s: Float64Array, onEmpty: string): Float64Array {
  const inside = onEmpty === "nearest" ? s.map((x) => (x <= 0 ? 0 : x)) : s;
  const sum = total(inside);
  if (sum === 0) return s.length ? INSTEAD[onEmpty](s) : s;
  return inside.map((x) => x / sum);
}

export const WEIGHTINGS: Record<string, Kind> = {
  softmax: {
    title: "Softmax",
    formula: "αᵢ = exp(sᵢ/T) / Σⱼ exp(sⱼ/T)",
    settings: { temperature: 1 },
    convex: true,
    weights: (s, { temperature }) => softmax(s.map((x) => x / temperature)),
    logs: (s, { temperature }) => s.map((x) => x / temperature),
  },
  topk: {
    title: "Top k",
    formula: "softmax over the k largest scores, 0 elsewhere",
    settings: { k: 2 },
    convex: true,
    sparse: true,
    weights: (s, { k }) => softmax(best(s, k)),
    logs: (s, { k }) => best(s, k),
  },
  hard: {
    title: "Hard",
    formula: "αᵢ = 1 at the largest score, else 0",
    settings: {},
    convex: true,
    sparse: true,
    weights: hard,
  },
  average: {
    title: "Average",
    formula: "αᵢ = 1 / m",
    settings: {},
    convex: true,
    weights: (s) => s.map(() => 1 / s.length),
  },
  normalized: {
    title: "Normalized",
    formula: "αᵢ = sᵢ / Σⱼ sⱼ",
    settings: { on_empty: "zero" },
    convex: true,
    sparse: true,
    weights: (s, { on_empty }) => normalized(s, on_empty),
  },
  raw: { title: "Raw", formula: "αᵢ = sᵢ", settings: {}, sparse: true, weights: (s) => s.slice() },
  sigmoid: {
    title: "Sigmoid",
    formula: "αᵢ = 1 / (1 + exp(−sᵢ))",
    settings: {},
    weights: (s) => s.map(sigmoid),
  },
  sparsemax: {
    title: "Sparsemax",
    formula: "α = the point of the simplex nearest to s",
    settings: {},
    convex: true,
    sparse: true,
    weights: (s) => entmax(s, 2),
  },
  entmax15: {
    title: "Entmax",
    formula: "α = argmax pᵀs + H(p), H Tsallis’ entropy of order alpha",
    settings: { alpha: 1.5 },
    convex: true,
    sparse: true,
    weights: (s, { alpha }) => entmax(s, alpha),
  },
};

/** The weighting with this name and these settings. */
export function resolve(like: Like): Weighting {
  const { name, ...settings } = resolveSettings("weighting", WEIGHTINGS, like);
  const kind = WEIGHTINGS[name];
  if (name === "topk" && !(Number.isInteger(settings.k) && Number(settings.k) >= 1)) {
    throw new RangeError(`topk: k must be a whole number of at least 1, not ${settings.k}`);
  }
  if (name === "normalized" && !Object.hasOwn(INSTEAD, String(settings.on_empty))) {
    const known = Object.keys(INSTEAD).join(", ");
    throw new RangeError(`normalized: on_empty must be one of ${known}, not "${settings.on_empty}"`);
  }
  const some = (scores: Vector, live?: Live) =>
    Float64Array.from(live ? Array.from(scores).filter((_, i) => live[i]) : scores);
  return {
    name,
    settings,
    convex: Boolean(kind.convex),
    sparse: Boolean(kind.sparse),
    weights(scores, live = null) {
      const found = kind.weights(some(scores, live), settings);
      if (!live) return found;
      let at = 0;
      return Float64Array.from(scores, (_, i) => (live[i] ? found[at++] : 0));
    },
    lse: (scores, live = null) => (kind.logs ? logSumExp(kind.logs(some(scores, live), settings)) : null),
    refuses(score) {
      if (name !== "normalized") return null;
      if (!score.nonnegative) {
        return `Normalized divides scores by their sum, but ${SCORES[score.name].title} can be negative: use softmax, or a score that is never negative (boxcar, triangular, epanechnikov, constant, exact)`;
      }
      if (settings.on_empty === "nearest" && !score.closeness) {
        return `on_empty nearest needs a score with a distance (boxcar, triangular, epanechnikov), not ${SCORES[score.name].title}`;
      }
      return null;
    },
  };
}

/** A weighting that Python computed for one row of scores: `weights` are its result. */
export function computedWeighting(weights: Float64Array, convex: boolean, sparse: boolean): Weighting {
  return { name: "", settings: {}, convex, sparse, weights: () => weights, lse: () => null, refuses: () => null };
}
