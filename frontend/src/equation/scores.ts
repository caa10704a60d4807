/** Scores a(q, k): how well a key matches a query. The same as qkv.scores, in float64. */

export type Vector = ArrayLike<number>;
type Pair = (query: Vector, key: Vector) => number;
export type Named = { name: string; [setting: string]: unknown };
/** A name, or a name with settings: `"gaussian"`, `{ name: "gaussian", bandwidth: 0.5 }`. */
export type Like = string | Named;

export interface Score {
  name: string;
  settings: Record<string, unknown>;
  nonnegative: boolean;
  /** It compares the keys themselves, which need not be vectors. */
  comparesKeys: boolean;
  at: Pair;
  /** A variant that also ranks the keys outside of its window. */
  closeness?: Pair;
}

export interface Kind {
  title: string;
  formula: string;
  /** Settings and their defaults; null for a setting that is required or derived. */
  settings: Record<string, number | null>;
  nonnegative?: boolean;
  comparesKeys?: boolean;
  make(settings: any): Pair;
  /** r² of a score with a window. */
  square?(settings: any): Pair;
}

function dot(q: Vector, k: Vector): number {
  let sum = 0;
  for (let i = 0; i < k.length; i++) sum += q[i] * k[i];
  return sum;
}

/** x / ‖x‖, and 0 for 0. It scales first, so that no square overflows. */
export function unit(x: Vector): Float64Array {
  const out = Float64Array.from(x);
  const largest = out.reduce((top, y) => Math.max(top, Math.abs(y)), 0);
  if (!(largest > 0)) return out;
  for (let i = 0; i < out.length; i++) out[i] /= largest;
  const length = Math.sqrt(dot(out, out));
  for (let i = 0; i < out.length; i++) out[i] /= length;
  return out;
}

/** The i-th entry of an array, or the number itself. */
function nth(x: number | Vector, i: number): number {
  return typeof x === "number" ? x : x[i];
}

/** ‖q/w − k/w‖², scaled before it is squared, so that a narrow width does not underflow.
 *
 * float32 input is computed in float32, as in NumPy, so that ties are the same. */
function squaredDistance(width: number | Vector): Pair {
  return (q, k) => {
    const round = k instanceof Float32Array ? Math.fround : Number;
    let sum = 0;
    for (let i = 0; i < k.length; i++) {
      const by = round(nth(width, i));
      const apart = round(round(q[i] / by) - round(k[i] / by));
      sum = round(sum + round(apart * apart));
    }
    return sum;
  };
}

export function sigmoid(x: number): number {
  const small = Math.exp(-Math.abs(x));
  return (x < 0 ? small : 1) / (1 + small);
}

function window(title: string, formula: string, profile: (square: number) => number): Kind {
  const square = ({ width }: any) => squaredDistance(width);
  return {
    title,
    formula,
    settings: { width: 1 },
    nonnegative: true,
    square,
    make: (settings) => {
      const of = square(settings);
      return (q, k) => profile(of(q, k));
    },
  };
}

export const SCORES: Record<string, Kind> = {
  dot: { title: "Dot product", formula: "s = qᵀk", settings: {}, make: () => dot },
  scaled_dot: {
    title: "Scaled dot product",
    formula: "s = qᵀk / √d",
    settings: { scale: null, softcap: null },
    make: ({ scale, softcap }) => (q, k) => {
      const factor = scale ?? (k.length || 1) ** -0.5;
      let sum = 0;
      for (let i = 0; i < k.length; i++) sum += q[i] * factor * k[i];
      return softcap == null ? sum : Math.tanh(sum / softcap) * softcap;
    },
  },
  cosine: {
    title: "Cosine",
    formula: "s = qᵀk / (‖q‖ ‖k‖ τ)",
    settings: { temperature: 1 },
    make: ({ temperature }) => (q, k) => dot(unit(q), unit(k)) / temperature,
  },
  multiplicative: {
    title: "Multiplicative",
    formula: "s = qᵀWk",
    settings: { w: null },
    make: ({ w }: { w: Vector[] }) => (q, k) => {
      let sum = 0;
      for (let i = 0; i < w.length; i++) sum += q[i] * dot(w[i], k);
      return sum;
    },
  },
  additive: {
    title: "Additive",
    formula: "s = vᵀ tanh(W₁q + W₂k + b)",
    settings: { w_query: null, w_key: null, v: null, bias: null },
    make: ({ w_query, w_key, v, bias }) => (q, k) => {
      let sum = 0;
      for (let i = 0; i < v.length; i++) {
        const hidden = dot(w_query[i], q) + (bias?.[i] ?? 0) + (w_key ? dot(w_key[i], k) : k[i]);
        sum += v[i] * Math.tanh(hidden);
      }
      return sum;
    },
  },
  gated: {
    title: "Gated",
    formula: "s = σ(w_q·q + w_k·k + b) · qᵀk",
    settings: { w_query: null, w_key: null, bias: 0 },
    make: ({ w_query, w_key, bias, score = "dot" }) => {
      const inner = resolve(score).at;
      return (q, k) => sigmoid(dot(w_query, q) + dot(w_key, k) + (bias ?? 0)) * inner(q, k);
    },
  },
  gaussian: {
    title: "Gaussian",
    formula: "s = −‖q − k‖² / 2σ²",
    settings: { bandwidth: 1 },
    make: ({ bandwidth }) => {
      const square = squaredDistance(bandwidth);
      return (q, k) => square(q, k) * -0.5;
    },
  },
  laplace: {
    title: "Laplace",
    formula: "s = −‖q − k‖₁ / b",
    settings: { bandwidth: 1 },
    make: ({ bandwidth }) => (q, k) => {
      let sum = 0;
      for (let i = 0; i < k.length; i++) sum += Math.abs(q[i] - k[i]);
      return -sum / bandwidth;
    },
  },
  boxcar: window("Boxcar", "s = 1 where ‖q − k‖ ≤ w, else 0", (square) =>
    Number.isNaN(square) ? square : Number(square <= 1),
  ),
  triangular: window("Triangular", "s = max(0, 1 − ‖q − k‖ / w)", (square) =>
    square >= 1 ? 0 : 1 - Math.sqrt(square),
  ),
  epanechnikov: window("Epanechnikov", "s = max(0, 1 − ‖q − k‖² / w²)", (square) =>
    1 - square <= 0 ? 0 : 1 - square,
  ),
  constant: { title: "Constant", formula: "s = 1", settings: {}, nonnegative: true, make: () => () => 1 },
  exact: {
    title: "Exact",
    formula: "s = 1 where k = q, else 0",
    settings: {},
    nonnegative: true,
    comparesKeys: true,
    make: () => (q, k) => {
      for (let i = 0; i < k.length; i++) if (q[i] !== k[i]) return 0;
      return 1;
    },
  },
};

const POSITIVE = ["bandwidth", "width", "temperature", "softcap", "alpha"];

/** A name with all its settings; throws an error for invalid ones. */
export function resolveSettings(what: string, kinds: Record<string, { settings: object }>, like: Like): Named {
  const given = typeof like === "string" ? { name: like } : like;
  const kind = Object.hasOwn(kinds, given.name) ? kinds[given.name] : undefined;
  if (!kind) {
    throw new RangeError(`no ${what} is named "${given.name}"; the page knows ${Object.keys(kinds).join(", ")}`);
  }
  const resolved = { ...kind.settings, ...given };
  for (const [name, value] of Object.entries(resolved)) {
    if (POSITIVE.includes(name) && typeof value === "number" && !(value > 0 && value < Infinity)) {
      throw new RangeError(`${given.name}: ${name} must be above 0, not ${value}`);
    }
  }
  return resolved;
}

/** The score with this name and these settings. */
export function resolve(like: Like): Score {
  const { name, ...settings } = resolveSettings("score", SCORES, like);
  const kind = SCORES[name];
  const at = kind.make(settings);
  const score: Score = {
    name,
    settings,
    at,
    nonnegative: Boolean(kind.nonnegative),
    comparesKeys: Boolean(kind.comparesKeys),
  };
  if (kind.square) {
    const square = kind.square(settings);
    score.closeness = (q, k) => at(q, k) || -square(q, k);
  }
  return score;
}
