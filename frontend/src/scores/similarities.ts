/** The similarity functions that the view Scores shows, each with what can be set on it. */

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
  /** What to see in it. */
  note: string;
  settings: Record<string, Setting>;
  /** Its arrays are learned; here they hold one number each, so q and k are numbers. */
  learned?: boolean;
  like(values: Record<string, number>): Like;
}

const width = (label: string, value = 1): Setting => ({ label, range: { low: 0.05, high: 5 }, value, log: true });
const slope = (label: string, value: number): Setting => ({ label, range: { low: -3, high: 3 }, value });

function plain(name: string, note: string, settings: Record<string, Setting> = {}): Similarity {
  return { name, note, settings, like: (values) => ({ name, ...values }) };
}

export const SIMILARITIES: Similarity[] = [
  plain("dot", "Grows with both: long keys count more, whichever way the query looks."),
  plain(
    "scaled_dot",
    "The dot product over √d keeps scores of long vectors in bounds; a scale of one’s own takes its place.",
    { scale: { label: "Scale", range: { low: 0.05, high: 5 }, value: 0.5, log: true } },
  ),
  plain("cosine", "The direction alone counts: for numbers that is the sign, for angles the angle between them.", {
    temperature: width("Temperature τ", 0.5),
  }),
  {
    name: "multiplicative",
    note: "A learned W turns and stretches the key before it meets the query.",
    settings: { w: slope("W", -0.8) },
    learned: true,
    like: ({ w }) => ({ name: "multiplicative", w: [[w]] }),
  },
  {
    name: "additive",
    note: "A network with one hidden layer: the score flattens where tanh does.",
    settings: { w1: slope("W₁", 1), w2: slope("W₂", 1.5), b: slope("b", 0), v: slope("v", 1.5) },
    learned: true,
    like: ({ w1, w2, b, v }) => ({ name: "additive", w_query: [[w1]], w_key: [[w2]], v: [v], bias: [b] }),
  },
  {
    name: "gated",
    note: "A sigmoid of query and key opens and closes the dot product.",
    settings: { q: slope("w_q", 1), k: slope("w_k", 2), b: slope("b", 0) },
    learned: true,
    like: ({ q, k, b }) => ({ name: "gated", w_query: [q], w_key: [k], bias: b }),
  },
  plain("gaussian", "Falls with the square of the distance; its softmax is Nadaraya–Watson regression.", {
    bandwidth: width("Bandwidth σ", 0.6),
  }),
  plain("laplace", "Falls with the distance itself: sharper at the top, heavier far away.", {
    bandwidth: width("Bandwidth b", 0.6),
  }),
  plain("boxcar", "All keys within the width count alike.", { width: width("Width w") }),
  plain("triangular", "Falls in a straight line to the width’s edge.", { width: width("Width w", 1.5) }),
  plain("epanechnikov", "Falls as a parabola to the width’s edge.", { width: width("Width w", 1.5) }),
  plain("constant", "Every key matches every query: average pooling."),
  plain("exact", "The classical database: a key matches the query it equals, and no other."),
];

/** What can be set on a weighting. */
export const WEIGHTED: Record<string, Record<string, Setting>> = {
  softmax: { temperature: { label: "Temperature T", range: { low: 0.05, high: 10 }, value: 1, log: true } },
  topk: { k: { label: "k", range: { low: 1, high: 20 }, value: 3, whole: true } },
  entmax15: { alpha: { label: "alpha", range: { low: 1, high: 3 }, value: 1.5 } },
};

/** What q and k are: numbers, or angles of vectors of length 1. */
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
