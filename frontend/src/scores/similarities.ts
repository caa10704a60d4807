/** The scores of the view Scores, with a note and the settings of each. */

import type { NameOrSettings, Vector } from "../equation";
import type { Range } from "../axes";

export interface Setting {
  label: string;
  range: Range;
  value: number;
  isLogarithmic?: boolean;
  isInteger?: boolean;
}

export interface Similarity {
  name: string;
  /** A sentence that describes the score. */
  note: string;
  settings: Record<string, Setting>;
  /** It has learned arrays. Here they hold one number each, so q and k must be numbers. */
  isLearned?: boolean;
  toScore(values: Record<string, number>): NameOrSettings;
}

const widthSetting = (label: string, value = 1): Setting => ({ label, range: { low: 0.05, high: 5 }, value, isLogarithmic: true });
const slopeSetting = (label: string, value: number): Setting => ({ label, range: { low: -3, high: 3 }, value });

function createSimilarity(name: string, note: string, settings: Record<string, Setting> = {}): Similarity {
  return { name, note, settings, toScore: (values) => ({ name, ...values }) };
}

export const SIMILARITIES: Similarity[] = [
  createSimilarity("dot", "Grows with the length of both vectors: long keys get more weight."),
  createSimilarity(
    "scaled_dot",
    "The dot product divided by √d, so that scores do not grow with the width. A scale replaces 1/√d.",
    { scale: { label: "Scale", range: { low: 0.05, high: 5 }, value: 0.5, isLogarithmic: true } },
  ),
  createSimilarity("cosine", "Only the direction matters: for numbers their sign, for angles the angle between them.", {
    temperature: widthSetting("Temperature τ", 0.5),
  }),
  {
    name: "multiplicative",
    note: "A learned matrix W transforms the key before the dot product.",
    settings: { w: slopeSetting("W", -0.8) },
    isLearned: true,
    toScore: ({ w }) => ({ name: "multiplicative", w: [[w]] }),
  },
  {
    name: "additive",
    note: "A network with one hidden layer: the score saturates where tanh does.",
    settings: { w1: slopeSetting("W₁", 1), w2: slopeSetting("W₂", 1.5), b: slopeSetting("b", 0), v: slopeSetting("v", 1.5) },
    isLearned: true,
    toScore: ({ w1, w2, b, v }) => ({ name: "additive", w_query: [[w1]], w_key: [[w2]], v: [v], bias: [b] }),
  },
  {
    name: "gated",
    note: "The dot product times a sigmoid gate of query and key.",
    settings: { q: slopeSetting("w_q", 1), k: slopeSetting("w_k", 2), b: slopeSetting("b", 0) },
    isLearned: true,
    toScore: ({ q, k, b }) => ({ name: "gated", w_query: [q], w_key: [k], bias: b }),
  },
  createSimilarity("gaussian", "Decreases with the squared distance; its softmax is Nadaraya–Watson regression.", {
    bandwidth: widthSetting("Bandwidth σ", 0.6),
  }),
  createSimilarity("laplace", "Decreases with the distance: a sharper peak and heavier tails.", {
    bandwidth: widthSetting("Bandwidth b", 0.6),
  }),
  createSimilarity("boxcar", "All keys within the width get the same score.", { width: widthSetting("Width w") }),
  createSimilarity("triangular", "Decreases linearly to 0 at the width.", { width: widthSetting("Width w", 1.5) }),
  createSimilarity("epanechnikov", "Decreases as a parabola to 0 at the width.", { width: widthSetting("Width w", 1.5) }),
  createSimilarity("constant", "The same score for every key: average pooling."),
  createSimilarity("exact", "A classical look-up: 1 for a key equal to the query, else 0."),
];

/** The settings of the weightings. */
export const WEIGHTING_SETTINGS: Record<string, Record<string, Setting>> = {
  softmax: { temperature: { label: "Temperature T", range: { low: 0.05, high: 10 }, value: 1, isLogarithmic: true } },
  topk: { k: { label: "k", range: { low: 1, high: 20 }, value: 3, isInteger: true } },
  entmax15: { alpha: { label: "alpha", range: { low: 1, high: 3 }, value: 1.5 } },
};

/** The space of q and k: numbers, or unit vectors given by their angles. */
export interface Space {
  name: string;
  title: string;
  range: Range;
  toVector(x: number): Vector;
}

export const SPACES: Space[] = [
  { name: "numbers", title: "numbers", range: { low: -3, high: 3 }, toVector: (x) => [x] },
  {
    name: "angles",
    title: "angles, in degrees",
    range: { low: -180, high: 180 },
    toVector: (x) => [Math.cos((x * Math.PI) / 180), Math.sin((x * Math.PI) / 180)],
  },
];
