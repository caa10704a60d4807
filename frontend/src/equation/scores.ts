/** Scores a(q, k): how well a key matches a query. The same as qkv.scores, in float64. */

export type Vector = ArrayLike<number>;
type PairFunction = (query: Vector, key: Vector) => number;
export type NamedSettings = { name: string; [setting: string]: unknown };
/** A name, or a name with settings: `"gaussian"`, `{ name: "gaussian", bandwidth: 0.5 }`. */
export type NameOrSettings = string | NamedSettings;

export interface Score {
  name: string;
  settings: Record<string, unknown>;
  isNonnegative: boolean;
  /** It compares the keys themselves, which need not be vectors. */
  comparesKeys: boolean;
  compute: PairFunction;
  /** A variant that also ranks the keys outside of its window. */
  closeness?: PairFunction;
}

export interface ScoreKind {
  title: string;
  formula: string;
  /** Settings and their defaults; null for a setting that is required or derived. */
  settings: Record<string, number | null>;
  isNonnegative?: boolean;
  comparesKeys?: boolean;
  create(settings: any): PairFunction;
  /** r² of a score with a window. */
  createSquare?(settings: any): PairFunction;
}

function dot(q: Vector, k: Vector): number {
  let sum = 0;
  for (let i = 0; i < k.length; i++) sum += q[i] * k[i];
  return sum;
}

/** x / ‖x‖, and 0 for 0. It scales first, so that no square overflows. */
export function normalize(x: Vector): Float64Array {
  const out = Float64Array.from(x);
  const largest = out.reduce((top, y) => Math.max(top, Math.abs(y)), 0);
  if (!(largest > 0)) return out;
  for (let i = 0; i < out.length; i++) out[i] /= largest;
  const length = Math.sqrt(dot(out, out));
  for (let i = 0; i < out.length; i++) out[i] /= length;
  return out;
}

/** The i-th entry of an array, or the number itself. */
function entryAt(x: number | Vector, i: number): number {
  return typeof x === "number" ? x : x[i];
}

/** ‖q/w − k/w‖², scaled before it is squared, so that a narrow width does not underflow.
 *
 * float32 input is computed in float32, as in NumPy, so that ties are the same. */
function squaredDistance(width: number | Vector): PairFunction {
  return (q, k) => {
    const round = k instanceof Float32Array ? Math.fround : Number;
    let sum = 0;
    for (let i = 0; i < k.length; i++) {
      const divisor = round(entryAt(width, i));
      const difference = round(round(q[i] / divisor) - round(k[i] / divisor));
      sum = round(sum + round(difference * difference));
    }
    return sum;
  };
}

export function sigmoid(x: number): number {
  const exponential = Math.exp(-Math.abs(x));
  return (x < 0 ? exponential : 1) / (1 + exponential);
}

function createWindowScore(title: string, formula: string, profile: (square: number) => number): ScoreKind {
  const createSquare = ({ width }: any) => squaredDistance(width);
  return {
    title,
    formula,
    settings: { width: 1 },
    isNonnegative: true,
    createSquare,
    create: (settings) => {
      const computeSquare = createSquare(settings);
      return (q, k) => profile(computeSquare(q, k));
    },
  };
}

export const SCORES: Record<string, ScoreKind> = {
  dot: { title: "Dot product", formula: "s = qᵀk", settings: {}, create: () => dot },
  scaled_dot: {
    title: "Scaled dot product",
    formula: "s = qᵀk / √d",
    settings: { scale: null, softcap: null },
    create: ({ scale, softcap }) => (q, k) => {
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
    create: ({ temperature }) => (q, k) => dot(normalize(q), normalize(k)) / temperature,
  },
  multiplicative: {
    title: "Multiplicative",
    formula: "s = qᵀWk",
    settings: { w: null },
    create: ({ w }: { w: Vector[] }) => (q, k) => {
      let sum = 0;
      for (let i = 0; i < w.length; i++) sum += q[i] * dot(w[i], k);
      return sum;
    },
  },
  additive: {
    title: "Additive",
    formula: "s = vᵀ tanh(W₁q + W₂k + b)",
    settings: { w_query: null, w_key: null, v: null, bias: null },
    create: ({ w_query, w_key, v, bias }) => (q, k) => {
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
    create: ({ w_query, w_key, bias, score = "dot" }) => {
      const inner = resolveScore(score).compute;
      return (q, k) => sigmoid(dot(w_query, q) + dot(w_key, k) + (bias ?? 0)) * inner(q, k);
    },
  },
  gaussian: {
    title: "Gaussian",
    formula: "s = −‖q − k‖² / 2σ²",
    settings: { bandwidth: 1 },
    create: ({ bandwidth }) => {
      const square = squaredDistance(bandwidth);
      return (q, k) => square(q, k) * -0.5;
    },
  },
  laplace: {
    title: "Laplace",
    formula: "s = −‖q − k‖₁ / b",
    settings: { bandwidth: 1 },
    create: ({ bandwidth }) => (q, k) => {
      let sum = 0;
      for (let i = 0; i < k.length; i++) sum += Math.abs(q[i] - k[i]);
      return -sum / bandwidth;
    },
  },
  boxcar: createWindowScore("Boxcar", "s = 1 where ‖q − k‖ ≤ w, else 0", (square) =>
    Number.isNaN(square) ? square : Number(square <= 1),
  ),
  triangular: createWindowScore("Triangular", "s = max(0, 1 − ‖q − k‖ / w)", (square) =>
    square >= 1 ? 0 : 1 - Math.sqrt(square),
  ),
  epanechnikov: createWindowScore("Epanechnikov", "s = max(0, 1 − ‖q − k‖² / w²)", (square) =>
    1 - square <= 0 ? 0 : 1 - square,
  ),
  constant: { title: "Constant", formula: "s = 1", settings: {}, isNonnegative: true, create: () => () => 1 },
  exact: {
    title: "Exact",
    formula: "s = 1 where k = q, else 0",
    settings: {},
    isNonnegative: true,
    comparesKeys: true,
    create: () => (q, k) => {
      for (let i = 0; i < k.length; i++) if (q[i] !== k[i]) return 0;
      return 1;
    },
  },
};

const POSITIVE = ["bandwidth", "width", "temperature", "softcap", "alpha"];

/** A name with all its settings; throws an error for invalid ones. */
export function resolveSettings(kindName: string, kinds: Record<string, { settings: object }>, spec: NameOrSettings): NamedSettings {
  const named = typeof spec === "string" ? { name: spec } : spec;
  const kind = Object.hasOwn(kinds, named.name) ? kinds[named.name] : undefined;
  if (!kind) {
    throw new RangeError(`no ${kindName} is named "${named.name}"; the page knows ${Object.keys(kinds).join(", ")}`);
  }
  const resolved = { ...kind.settings, ...named };
  for (const [name, value] of Object.entries(resolved)) {
    if (POSITIVE.includes(name) && typeof value === "number" && !(value > 0 && value < Infinity)) {
      throw new RangeError(`${named.name}: ${name} must be above 0, not ${value}`);
    }
  }
  return resolved;
}

/** The score with this name and these settings. */
export function resolveScore(spec: NameOrSettings): Score {
  const { name, ...settings } = resolveSettings("score", SCORES, spec);
  const kind = SCORES[name];
  const compute = kind.create(settings);
  const score: Score = {
    name,
    settings,
    compute,
    isNonnegative: Boolean(kind.isNonnegative),
    comparesKeys: Boolean(kind.comparesKeys),
  };
  if (kind.createSquare) {
    const computeSquare = kind.createSquare(settings);
    score.closeness = (q, k) => compute(q, k) || -computeSquare(q, k);
  }
  return score;
}
