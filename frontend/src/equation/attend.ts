/** Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ, with scores, weights and entropy. */

import { type NameOrSettings, type Score, type Vector, resolveScore } from "./scores";
import { type Live, type Weighting, resolveWeighting } from "./weightings";

export interface AttendOptions {
  score?: NameOrSettings;
  weighting?: NameOrSettings;
  live?: Live;
}

export interface AttentionResult {
  scores: Float64Array;
  weights: Float64Array;
  /** Σᵢ αᵢ vᵢ; null without values. */
  value: Float64Array | null;
  /** −Σ pᵢ ln pᵢ of p = |α| / Σ |α|; 0 if all weights are 0. */
  entropy: number;
  /** e^entropy, the effective number of rows; 0 if all weights are 0. */
  effective: number;
  /** log Σ exp(score); null for a weighting that has none. */
  lse: number | null;
}

export function computeEntropy(weights: Vector): number {
  let [sum, weightedLogSum] = [0, 0];
  for (let i = 0; i < weights.length; i++) {
    const size = Math.abs(weights[i]);
    sum += size;
    weightedLogSum += size * Math.log(size || 1);
  }
  if (!sum) return 0; // no weight, or NaN
  return Math.max(Math.log(sum) - weightedLogSum / sum, 0) || 0;
}

export function computeEffectiveRows(weights: Vector): number {
  for (let i = 0; i < weights.length; i++) {
    if (Math.abs(weights[i]) > 0) return Math.exp(computeEntropy(weights));
  }
  return 0;
}

/** Σᵢ αᵢ vᵢ; with `isSparse`, values of weight 0 are skipped, so that their NaN has no effect. */
export function poolValues(weights: Vector, values: Vector[], isSparse: boolean, live: Live = null): Float64Array {
  const out = new Float64Array(values[0]?.length ?? 0);
  for (let i = 0; i < weights.length; i++) {
    if ((isSparse && weights[i] === 0) || (live && !live[i])) continue;
    for (let j = 0; j < out.length; j++) out[j] += weights[i] * values[i][j];
  }
  return out;
}

/** The score and the weighting; throws an error if they cannot be combined. */
export function resolvePair(options: AttendOptions): { score: Score; weighting: Weighting } {
  const score = resolveScore(options.score ?? "scaled_dot");
  const weighting = resolveWeighting(options.weighting ?? "softmax");
  const reason = weighting.refusalReason(score);
  if (reason) throw new RangeError(reason);
  const nearest = weighting.name === "normalized" && weighting.settings.on_empty === "nearest";
  if (nearest && score.closeness) score.compute = score.closeness;
  return { score, weighting };
}

/** Weights, value and entropy of given scores. */
export function attendScores(
  scores: Float64Array,
  values: Vector[] | null,
  weighting: Weighting,
  live: Live = null,
): AttentionResult {
  const weights = weighting.weights(scores, live);
  return {
    scores,
    weights,
    value: values && poolValues(weights, values, weighting.isSparse, live),
    entropy: computeEntropy(weights),
    effective: computeEffectiveRows(weights),
    lse: weighting.lse(scores, live),
  };
}

/** One query (d), keys (m, d), values (m, d_v) or null. */
export function attend(query: Vector, keys: Vector[], values: Vector[] | null = null, options: AttendOptions = {}): AttentionResult {
  const { score, weighting } = resolvePair(options);
  const scores = Float64Array.from(keys, (key) => score.compute(query, key));
  return attendScores(scores, values, weighting, options.live);
}

/** α(q, k) of many queries, a row for each. */
export function computeWeights(queries: Vector[], keys: Vector[], options: AttendOptions = {}): Float64Array[] {
  const { score, weighting } = resolvePair(options);
  return queries.map((query) =>
    weighting.weights(Float64Array.from(keys, (key) => score.compute(query, key)), options.live),
  );
}
