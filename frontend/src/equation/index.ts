/** The formulas of the Python package in TypeScript, so that the page works without Python. Tests compare both. */

export { ask, findLiveRows } from "./ask";
export { attend, computeEffectiveRows, computeEntropy, poolValues, attendScores, computeWeights } from "./attend";
export * as encoders from "./encoders";
export { predictHeldOut, computeHeldOutError, createKernel, createRegression } from "./regression";
export { SCORES, resolveScore } from "./scores";
export { WEIGHTINGS, resolveWeighting } from "./weightings";
export type { Answer, Computed, Row } from "./ask";
export type { AttentionResult, AttendOptions } from "./attend";
export type { Encoder, Key } from "./encoders";
export type { Kernel, Point } from "./regression";
export type { NameOrSettings, NamedSettings, Score, Vector } from "./scores";
export type { Live, Weighting } from "./weightings";
