/** Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ, with scores, weights and entropy. */

import { type Like, type Score, type Vector, resolve as scoreOf } from "./scores";
import { type Live, type Weighting, resolve as weightingOf } from "./weightings";

export interface How {
  score?: Like;
  weighting?: Like;
  live?: Live;
}

export interface Attended {
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

export function entropy(weights: Vector): number {
  let [sum, along] = [0, 0];
  for (let i = 0; i < weights.length; i++) {
    const size = Math.abs(weights[i]);
    sum += size;
    along += size * Math.log(size || 1);
  }
  if (!sum) return 0; // no weight, or NaN
  return Math.max(Math.log(sum) - along / sum, 0) || 0;
}

export function effective(weights: Vector): number {
  for (let i = 0; i < weights.length; i++) {
    if (Math.abs(weights[i]) > 0) return Math.exp(entropy(weights));
  }
  return 0;
}

/** Σᵢ αᵢ vᵢ; with `sparse`, values of weight 0 are skipped, so that their NaN has no effect. */
export function pool(weights: Vector, values: Vector[], sparse: boolean, live: Live = null): Float64Array {
  const out = new Float64Array(values[0]?.length ?? 0);
  for (let i = 0; i < weights.length; i++) {
    if ((sparse && weights[i] === 0) || (live && !live[i])) continue;
    for (let j = 0; j < out.length; j++) out[j] += weights[i] * values[i][j];
  }
  return out;
}

/** The score and the weighting; throws an error if they cannot be combined. */
export function paired(how: How): { score: Score; weighting: Weighting } {
  const score = scoreOf(how.score ?? "scaled_dot");
  const weighting = weightingOf(how.weighting ?? "softmax");
  const reason = weighting.refuses(score);
  if (reason) throw new RangeError(reason);
  const nearest = weighting.name === "normalized" && weighting.settings.on_empty === "nearest";
  if (nearest && score.closeness) score.at = score.closeness;
  return { score, weighting };
}

/** Weights, value and entropy of given scores. */
export function weigh(
  scores: Float64Array,
  values: Vector[] | null,
  weighting: Weighting,
  live: Live = null,
): Attended {
  const weights = weighting.weights(scores, live);
  return {
    scores,
    weights,
    value: values && pool(weights, values, weighting.sparse, live),
    entropy: entropy(weights),
    effective: effective(weights),
    lse: weighting.lse(scores, live),
  };
}

/** One query (d), keys (m, d), values (m, d_v) or null. */
export function attend(query: Vector, keys: Vector[], values: Vector[] | null = null, how: How = {}): Attended {
  const { score, weighting } = paired(how);
  const scores = Float64Array.from(keys, (key) => score.at(query, key));
  return weigh(scores, values, weighting, how.live);
}

/** α(q, k) of many queries, a row for each. */
export function weights(queries: Vector[], keys: Vector[], how: How = {}): Float64Array[] {
  const { score, weighting } = paired(how);
  return queries.map((query) =>
    weighting.weights(Float64Array.from(keys, (key) => score.at(query, key)), how.live),
  );
}
