/** Nadaraya–Watson regression: f(q) = Σᵢ α(q, kᵢ) vᵢ; the keys are x and the values y of points. */

import { type AttentionResult, resolvePair, attendScores } from "./attend";
import type { NameOrSettings } from "./scores";

export interface Point {
  x: number;
  y: number;
}

/** A kernel: a score, and the weighting that turns it into an estimator. */
export interface Kernel {
  score: NameOrSettings;
  weighting: NameOrSettings;
}

/** The kernel of a name: windows are divided by their sum, other scores go through a softmax.
 *
 * `onEmpty` is the rule for a query without keys in its window. */
export function createKernel(name: string, width: number, onEmpty = "nan"): Kernel {
  if (name === "gaussian" || name === "laplace") {
    return { score: { name, bandwidth: width }, weighting: "softmax" };
  }
  const score = name === "constant" ? name : { name, width };
  const usesNearest = name === "constant" && onEmpty === "nearest";
  return { score, weighting: { name: "normalized", on_empty: usesNearest ? "nan" : onEmpty } };
}

/** The regression function: the value at x and the weight of each point. */
export function createRegression(points: Point[], kernel: Kernel): (x: number) => AttentionResult {
  const { score, weighting } = resolvePair(kernel);
  const [keys, values] = [points.map((p) => [p.x]), points.map((p) => [p.y])];
  return (x) => attendScores(Float64Array.from(keys, (key) => score.compute([x], key)), values, weighting);
}

/** The prediction for each point from the other points. */
export function predictHeldOut(points: Point[], kernel: Kernel): Float64Array {
  const { score, weighting } = resolvePair(kernel);
  const keys = points.map((p) => [p.x]);
  return Float64Array.from(points, (_, i) => {
    const weights = weighting.weights(
      keys.map((key) => score.compute(keys[i], key)),
      points.map((_, j) => i !== j),
    );
    return weights.reduce((sum, w, j) => (w === 0 ? sum : sum + w * points[j].y), 0);
  });
}

/** The root mean squared error of `predictHeldOut`, and the number of points that no other point reaches. */
export function computeHeldOutError(points: Point[], kernel: Kernel): { error: number; isolated: number } {
  const predictions = predictHeldOut(points, kernel);
  let [sum, count] = [0, 0];
  predictions.forEach((y, i) => {
    if (Number.isNaN(y)) return;
    sum += (y - points[i].y) ** 2;
    count += 1;
  });
  return { error: count ? Math.sqrt(sum / count) : NaN, isolated: points.length - count };
}
