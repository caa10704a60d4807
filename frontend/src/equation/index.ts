/** The formulas of the Python package in TypeScript, so that the page works without Python. Tests compare both. */

export { ask, liveRows } from "./ask";
export { attend, effective, entropy, pool, weigh, weights } from "./attend";
export * as encoders from "./encoders";
export { heldOut, heldOutError, kernel, regress } from "./regression";
export { SCORES, resolve as score } from "./scores";
export { WEIGHTINGS, resolve as weighting } from "./weightings";
export type { Answer, Computed, Row } from "./ask";
export type { Attended, How } from "./attend";
export type { Encoder, Key } from "./encoders";
export type { Kernel, Point } from "./regression";
export type { Like, Named, Score, Vector } from "./scores";
export type { Live, Weighting } from "./weightings";
