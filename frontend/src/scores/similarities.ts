/** The scores of the view Scores, with a note and the settings of each. */

import type { Like, Vector } from "../equation";
import type { Range } from "../axes";

export interface Setting {
  label: string;
  range: Range;
  value: number;
  log?: boolean;
  whole?: boolean;
}

export interface Similarity {
  name: string;
  /** A sentence that describes the score. */
  note: string;
  settings: Record<string, Setting>;
  /** It has learned arrays. Here they hold one number each, so q and k must be numbers. */
  learned?: boolean;
  like(values: Record<string, number>): Like;
}

const width = (label: string, value = 1): Setting => ({ label, range: { low: 0.05, high: 5 }, value, log: true });
const slope = (label: string, value: number): Setting => ({ label, range: { low: -3, high: 3 }, value });

function plain(name: string, note: string, settings: Record<string, Setting> = {}): Similarity {
  return { name, note, settings, like: (values) => ({ name, ...values }) };
}

export const SIMILARITIES: Similarity[] = [
  plain("dot", "Grows with the length of both vectors: long keys get more weight."),
  plain(
    "scaled_dot",
    "The dot product divided by √d, so that scores do not grow with the width. A scale replaces 1/√d.",
    { scale: { label: "Scale", range: { low: 0.05, high: 5 }, value: 0.5, log: true } },
  ),
  plain("cosine", "Only the direction matters: for numbers their sign, for angles the angle between them.", {
    temperature: width("Temperature τ", 0.5),
  }),
  {
    name: "multiplicative",
    note: "A learned matrix W transforms the key before the dot product.",
    settings: { w: slope("W", -0.8) },
    learned: true,
    like: ({ w }) => ({ name: "multiplicative", w: [[w]] }),
  },
  {
    name: "additive",
    note: "A network with one hidden layer: the score saturates where tanh does.",
    settings: { w1: slope("W₁", 1), w2: slope("W₂", 1.5), b: slope("b", 0), v: slope("v", 1.5) },
    learned: true,
    like: ({ w1, w2, b, v }) => ({ name: "additive", w_query: [[w1]], w_key: [[w2]], v: [v], bias: [b] }),
  },
  {
    name: "gated",
    note: "The dot product times a sigmoid gate of query and key.",
    settings: { q: slope("w_q", 1), k: slope("w_k", 2), b: slope("b", 0) },
    learned: true,
    like: ({ q, k, b }) => ({ name: "gated", w_query: [q], w_key: [k], bias: b }),
  },
  plain("gaussian", "Decreases with the squared distance; its softmax is Nadaraya–Watson regression.", {
    bandwidth: width("Bandwidth σ", 0.6),
  }),
  plain("laplace", "Decreases with the distance: a sharper peak and heavier tails.", {
    bandwidth: width("Bandwidth b", 0.6),
  }),
  plain("boxcar", "All keys within the width get the same score.", { width: width("Width w") }),
  plain("triangular", "Decreases linearly to 0 at the width.", { width: width("Width w", 1.5) }),
  plain("epanechnikov", "Decreases as a parabola to 0 at the width.", { width: width("Width w", 1.5) }),
  plain("constant", "The same score for every key: average pooling."),
  plain("exact", "A classical look-up: 1 for a key equal to the query, else 0."),
];

/** The settings of the weightings. */
export const WEIGHTED: Record<string, Record<string, Setting>> = {
  softmax: { temperature: { label: "Temperature T", range: { low: 0.05, high: 10 }, value: 1, log: true } },
  topk: { k: { label: "k", range: { low: 1, high: 20 }, value: 3, whole: true } },
  entmax15: { alpha: { label: "alpha", range: { low: 1, high: 3 }, value: 1.5 } },
};

/** The space of q and k: numbers, or unit vectors given by their angles. */
export interface Space {
  name: string;
  title: string;
  range: Range;
  vector(x: number): Vector;
}

export const SPACES: Space[] = [
  { name: "numbers", title: "numbers", range: { low: -3, high: 3 }, vector: (x) => [x] },
  {
    name: "angles",
    title: "angles, in degrees",
    range: { low: -180, high: 180 },
    vector: (x) => [Math.cos((x * Math.PI) / 180), Math.sin((x * Math.PI) / 180)],
  },
];
