/** Nadaraya–Watson regression: f(q) = Σᵢ α(q, kᵢ) vᵢ; the keys are x and the values y of points. */

import { type Attended, paired, weigh } from "./attend";
import type { Like } from "./scores";

export interface Point {
  x: number;
  y: number;
}

/** A kernel: a score, and the weighting that turns it into an estimator. */
export interface Kernel {
  score: Like;
  weighting: Like;
}

/** The kernel of a name: windows are divided by their sum, other scores go through a softmax.
 *
 * `onEmpty` is the rule for a query without keys in its window. */
export function kernel(name: string, width: number, onEmpty = "nan"): Kernel {
  if (name === "gaussian" || name === "laplace") {
    return { score: { name, bandwidth: width }, weighting: "softmax" };
  }
  const score = name === "constant" ? name : { name, width };
  const closest = name === "constant" && onEmpty === "nearest";
  return { score, weighting: { name: "normalized", on_empty: closest ? "nan" : onEmpty } };
}

/** The regression function: the value at x and the weight of each point. */
export function regress(points: Point[], how: Kernel): (x: number) => Attended {
  const { score, weighting } = paired(how);
  const [keys, values] = [points.map((p) => [p.x]), points.map((p) => [p.y])];
  return (x) => weigh(Float64Array.from(keys, (key) => score.at([x], key)), values, weighting);
}

/** The prediction for each point from the other points. */
export function heldOut(points: Point[], how: Kernel): Float64Array {
  const { score, weighting } = paired(how);
  const keys = points.map((p) => [p.x]);
  return Float64Array.from(points, (_, i) => {
    const weights = weighting.weights(
      keys.map((key) => score.at(keys[i], key)),
      points.map((_, j) => i !== j),
    );
    return weights.reduce((sum, w, j) => (w === 0 ? sum : sum + w * points[j].y), 0);
  });
}

/** The root mean squared error of `heldOut`, without the points that no other point reaches. */
export function heldOutError(points: Point[], how: Kernel): { error: number; alone: number } {
  const found = heldOut(points, how);
  let [sum, count] = [0, 0];
  found.forEach((y, i) => {
    if (Number.isNaN(y)) return;
    sum += (y - points[i].y) ** 2;
    count += 1;
  });
  return { error: count ? Math.sqrt(sum / count) : NaN, alone: points.length - count };
}
