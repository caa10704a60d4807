/** Weightings α: how the scores of a row become weights. The same as qkv.weightings, in float64. */

import { type NameOrSettings, SCORES, type Score, type Vector, resolveSettings, sigmoid } from "./scores";

/** The keys that have weight; null means all. */
export type Live = ArrayLike<boolean | number> | null;

export interface Weighting {
  name: string;
  settings: Record<string, unknown>;
  /** The weights of a row are nonnegative and sum to one. */
  isConvex: boolean;
  /** Weights may be exactly 0; the value of such a row has no influence, not even NaN. */
  isSparse: boolean;
  weights(scores: Vector, live?: Live): Float64Array;
  /** log Σ exp(score), −∞ if no key is allowed; null if the weighting has none. */
  lse(scores: Vector, live?: Live): number | null;
  /** Why this weighting cannot be used with a score, or null. */
  refusalReason(score: Score): string | null;
}

interface WeightingKind {
  title: string;
  formula: string;
  settings: Record<string, number | string | null>;
  isConvex?: boolean;
  isSparse?: boolean;
  weights(s: Float64Array, settings: any): Float64Array;
  /** The scores that enter the log-sum-exp. */
  lseScores?(s: Float64Array, settings: any): Float64Array;
}

/** The largest number; NaN if there is a NaN, −∞ if there are no numbers. */
function findLargest(s: Vector): number {
  let top = -Infinity;
  for (let i = 0; i < s.length; i++) top = Math.max(top, s[i]);
  return top;
}

function computeSum(x: Vector): number {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += x[i];
  return sum;
}

const finiteOrZero = (x: number) => (Number.isFinite(x) ? x : 0);
/** A divisor: 1 in place of 0. NaN stays NaN. */
const nonzeroOrOne = (x: number) => (x === 0 ? 1 : x);

function softmaxWeights(s: Float64Array): Float64Array {
  const top = finiteOrZero(findLargest(s));
  const e = s.map((x) => Math.exp(x - top));
  const sum = nonzeroOrOne(computeSum(e));
  return e.map((x) => x / sum);
}

function logSumExp(s: Float64Array): number {
  const top = finiteOrZero(findLargest(s));
  const sum = computeSum(s.map((x) => Math.exp(x - top)));
  return sum === 0 ? -Infinity : top + Math.log(sum);
}

/** 1 at the first largest score; a NaN is not hidden. */
function hardWeights(s: Float64Array): Float64Array {
  const top = findLargest(s);
  if (Number.isNaN(top)) return s.map((x) => x * 0);
  const best = top > -Infinity ? s.indexOf(top) : -1;
  return s.map((_, i) => Number(i === best));
}

/** The scores, with all but the k largest set to −∞; of equal scores the first rows count. */
function keepLargest(s: Float64Array, k: number): Float64Array {
  const order = Array.from(s.keys()).sort((i, j) => s[j] - s[i] || i - j);
  if (s.some(Number.isNaN)) return s;
  const out = s.map(() => -Infinity);
  for (const i of order.slice(0, k)) out[i] = s[i];
  return out;
}

/** αᵢ = e^−λ (1 + c zᵢ e^cλ)^(1/c), c = alpha − 1, z = s − top: the λ that makes them sum to one.
 *
 * λ = −ln of the largest weight, so it is between 0 and ln m. The sum decreases with λ. At c = 0 this is softmax, and λ its log-sum-exp; at c = 1 sparsemax. */
function entmaxWeights(s: Float64Array, alpha: number): Float64Array {
  const top = findLargest(s);
  if (Number.isNaN(top)) return s.map(() => NaN);
  if (top === -Infinity) return s.map(() => 0);
  const c = alpha - 1;
  const weights = (lambda: number) => {
    const growth = Math.exp(c * lambda);
    return s.map((x) => {
      const u = (x - top) * growth;
      if (c * u <= -1) return 0;
      return Math.exp((c === 0 ? u : Math.log1p(c * u) / c) - lambda);
    });
  };
  let [low, high] = [0, Math.log(s.length) + 1e-9];
  for (;;) {
    const middle = (low + high) / 2;
    if (middle <= low || middle >= high) break;
    if (computeSum(weights(middle)) > 1) low = middle;
    else high = middle;
  }
  const result = weights(low);
  const sum = computeSum(result); // for a large alpha no λ gives exactly 1
  return result.map((x) => x / sum);
}

/** The weights of a row whose scores are all 0. */
const EMPTY_ROW_WEIGHTS: Record<string, (s: Float64Array) => Float64Array> = {
  zero: (s) => s.map(() => 0),
  nan: (s) => s.map(() => NaN),
  uniform: (s) => s.map(() => 1 / s.length),
  nearest: hardWeights,
  raise: () => {
    throw new RangeError("1 query has no key within the window: use a larger width, or Normalized(on_empty='nearest')");
  },
};

function normalizeScores(s: Float64Array, onEmpty: string): Float64Array {
  const inside = onEmpty === "nearest" ? s.map((x) => (x <= 0 ? 0 : x)) : s;
  const sum = computeSum(inside);
  if (sum === 0) return s.length ? EMPTY_ROW_WEIGHTS[onEmpty](s) : s;
  return inside.map((x) => x / sum);
}

export const WEIGHTINGS: Record<string, WeightingKind> = {
  softmax: {
    title: "Softmax",
    formula: "αᵢ = exp(sᵢ/T) / Σⱼ exp(sⱼ/T)",
    settings: { temperature: 1 },
    isConvex: true,
    weights: (s, { temperature }) => softmaxWeights(s.map((x) => x / temperature)),
    lseScores: (s, { temperature }) => s.map((x) => x / temperature),
  },
  topk: {
    title: "Top k",
    formula: "softmax over the k largest scores, 0 elsewhere",
    settings: { k: 2 },
    isConvex: true,
    isSparse: true,
    weights: (s, { k }) => softmaxWeights(keepLargest(s, k)),
    lseScores: (s, { k }) => keepLargest(s, k),
  },
  hard: {
    title: "Hard",
    formula: "αᵢ = 1 at the largest score, else 0",
    settings: {},
    isConvex: true,
    isSparse: true,
    weights: hardWeights,
  },
  average: {
    title: "Average",
    formula: "αᵢ = 1 / m",
    settings: {},
    isConvex: true,
    weights: (s) => s.map(() => 1 / s.length),
  },
  normalized: {
    title: "Normalized",
    formula: "αᵢ = sᵢ / Σⱼ sⱼ",
    settings: { on_empty: "zero" },
    isConvex: true,
    isSparse: true,
    weights: (s, { on_empty }) => normalizeScores(s, on_empty),
  },
  raw: { title: "Raw", formula: "αᵢ = sᵢ", settings: {}, isSparse: true, weights: (s) => s.slice() },
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
    isConvex: true,
    isSparse: true,
    weights: (s) => entmaxWeights(s, 2),
  },
  entmax15: {
    title: "Entmax",
    formula: "α = argmax pᵀs + H(p), H Tsallis’ entropy of order alpha",
    settings: { alpha: 1.5 },
    isConvex: true,
    isSparse: true,
    weights: (s, { alpha }) => entmaxWeights(s, alpha),
  },
};

/** The weighting with this name and these settings. */
export function resolveWeighting(spec: NameOrSettings): Weighting {
  const { name, ...settings } = resolveSettings("weighting", WEIGHTINGS, spec);
  const kind = WEIGHTINGS[name];
  if (name === "topk" && !(Number.isInteger(settings.k) && Number(settings.k) >= 1)) {
    throw new RangeError(`topk: k must be a whole number of at least 1, not ${settings.k}`);
  }
  if (name === "normalized" && !Object.hasOwn(EMPTY_ROW_WEIGHTS, String(settings.on_empty))) {
    const known = Object.keys(EMPTY_ROW_WEIGHTS).join(", ");
    throw new RangeError(`normalized: on_empty must be one of ${known}, not "${settings.on_empty}"`);
  }
  const selectLive = (scores: Vector, live?: Live) =>
    Float64Array.from(live ? Array.from(scores).filter((_, i) => live[i]) : scores);
  return {
    name,
    settings,
    isConvex: Boolean(kind.isConvex),
    isSparse: Boolean(kind.isSparse),
    weights(scores, live = null) {
      const liveWeights = kind.weights(selectLive(scores, live), settings);
      if (!live) return liveWeights;
      let next = 0;
      return Float64Array.from(scores, (_, i) => (live[i] ? liveWeights[next++] : 0));
    },
    lse: (scores, live = null) => (kind.lseScores ? logSumExp(kind.lseScores(selectLive(scores, live), settings)) : null),
    refusalReason(score) {
      if (name !== "normalized") return null;
      if (!score.isNonnegative) {
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
export function computedWeighting(weights: Float64Array, isConvex: boolean, isSparse: boolean): Weighting {
  return { name: "", settings: {}, isConvex, isSparse, weights: () => weights, lse: () => null, refusalReason: () => null };
}
