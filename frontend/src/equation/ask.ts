/** The answer of a database to one query: the same as Database.ask in Python. */

import { type AttentionResult, computeEffectiveRows, computeEntropy, resolvePair, poolValues, attendScores } from "./attend";
import { type Encoder, type Key, fit, suggestEncoder } from "./encoders";
import type { NameOrSettings, Vector } from "./scores";
import { type Weighting, computedWeighting, resolveWeighting } from "./weightings";

export interface Row {
  key: Key;
  value: unknown;
}

/** What Python computed for a score or weighting that this page cannot compute. */
export interface Computed {
  scores: Float64Array;
  weights: Float64Array;
  isConvex: boolean;
  isSparse: boolean;
}

export interface AskOptions {
  /** A name, or a fitted encoder. */
  encoder?: string | Encoder;
  /** Vectors from Python, used instead of an encoder. */
  vectors?: { keys: Vector[]; query: Vector; score: NameOrSettings };
  score?: NameOrSettings | null;
  weighting?: NameOrSettings;
  /** Python's numbers, used instead of the page's own. A weighting of `hard` uses only the scores. */
  computed?: Computed | null;
  top?: number;
  /** Columns to pool, if the values are records of numbers. */
  columns?: string[] | null;
}

export interface Answer extends AttentionResult {
  query: Key;
  /** The value: `mean` if keys are numbers or vectors; else that of the best-matching key, the mean of its rows. For values that are not pooled, the one with the most weight. Null without weights. */
  shown: unknown;
  /** Σᵢ αᵢ vᵢ for numbers, vectors and records of `columns`; null for other values and without weights. */
  mean: unknown;
  valueIsMean: boolean;
  /** The rows with the most weight. */
  rows: { key: Key; value: unknown; weight: number; index: number }[];
  /** If values are not pooled: each value with its total weight, the largest first. */
  values: { value: unknown; weight: number }[];
  /** √(Σᵢ αᵢ (vᵢ − mean)²); null if the values are not numbers. */
  spread: number | null;
  /** Rows that have a value, and rows that are ignored because their value is missing. */
  total: number;
  missing: number;
  /** Whether the weights sum to 1; those of `raw` and `sigmoid` do not. */
  isNormalized: boolean;
  score: NameOrSettings;
}

const isMissing = (x: unknown) => x === null || x === undefined || (typeof x === "number" && Number.isNaN(x));
const isRecord = (x: unknown) => typeof x === "object" && x !== null && !Array.isArray(x);
const isVector = (x: unknown) => Array.isArray(x) && x.length > 0 && x.every((y) => typeof y === "number");

/** Values as vectors; null if they cannot be pooled. */
function toVectors(values: unknown[], live: boolean[], columns: string[] | null): Vector[] | null {
  const present = values.filter((_, i) => live[i]);
  if (columns) return values.map((x, i) => columns.map((name) => (live[i] ? (x as any)[name] : NaN)));
  if (present.every((x) => typeof x === "number")) return values.map((x, i) => [live[i] ? (x as number) : NaN]);
  if (present.every(isVector)) return values.map((x) => (x ?? []) as Vector);
  return null;
}

const isNumberKey = (x: unknown) => typeof x === "number" || ArrayBuffer.isView(x) || isVector(x);

/** The mean value of the rows that have the same key as the row with the best score. */
function averageBestKey(rows: Row[], scores: Float64Array, values: Vector[], live: boolean[]): number[] {
  const positions = Array.from(rows.keys()).filter((i) => live[i]);
  const best = positions.reduce((top, i) => (scores[i] > scores[top] ? i : top), positions[0]);
  const key = JSON.stringify(rows[best].key);
  const vectors = positions.filter((i) => JSON.stringify(rows[i].key) === key).map((i) => Array.from(values[i]));
  return vectors[0].map((_, j) => (vectors.every((x) => x[j] === vectors[0][j]) ? vectors[0][j] : vectors.reduce((sum, x) => sum + x[j], 0) / vectors.length));
}

/** The rows that have a value. A record that is pooled needs a value in each of its columns. */
export function findLiveRows(rows: Row[], columns?: string[] | null): boolean[] {
  const pooled = listPooledColumns(rows, columns);
  return rows.map(({ value }) => !isMissing(value) && !pooled?.some((name) => isMissing((value as any)[name])));
}

function listPooledColumns(rows: Row[], columns?: string[] | null): string[] | null {
  return columns && rows.every((row) => isRecord(row.value) || isMissing(row.value)) ? columns : null;
}

export function ask(rows: Row[], query: Key, options: AskOptions = {}): Answer {
  if (!rows.length) throw new RangeError("The database is empty: add rows first.");
  const keys = rows.map((row) => row.key);
  const { vectors: precomputed, computed } = options;
  let encoder: Encoder | null = null;
  if (!precomputed && !computed) {
    encoder = typeof options.encoder === "object" ? options.encoder : fit(options.encoder ?? suggestEncoder(keys), keys);
  }
  const chosenScore = options.score ?? precomputed?.score ?? encoder?.defaultScore(rows.length) ?? "";
  let scores: Float64Array;
  let weighting: Weighting;
  let comparesKeys = false;
  if (computed) {
    scores = computed.scores;
    weighting = options.weighting === "hard" ? resolveWeighting("hard") : computedWeighting(computed.weights, computed.isConvex, computed.isSparse);
  } else {
    const pair = resolvePair({ score: chosenScore, weighting: options.weighting });
    weighting = pair.weighting;
    comparesKeys = pair.score.comparesKeys;
    if (comparesKeys) scores = Float64Array.from(keys, (key) => Number(key === query));
    else {
      const queryVector = precomputed ? precomputed.query : encoder!.encodeQueries([query])[0];
      scores = Float64Array.from(precomputed ? precomputed.keys : encoder!.encode(keys), (key) => pair.score.compute(queryVector, key));
    }
  }
  const columns = listPooledColumns(rows, options.columns);
  const live = findLiveRows(rows, columns);
  const values = toVectors(rows.map((row) => row.value), live, columns);
  const attended = attendScores(scores, values, weighting, live);
  const { weights } = attended;
  const magnitudes = weighting.isConvex ? weights : weights.map(Math.abs);
  const order = Array.from(keys.keys())
    .filter((i) => magnitudes[i] > 0)
    .sort((i, j) => magnitudes[j] - magnitudes[i] || i - j);
  const heaviest = order.map((i) => ({ key: keys[i], value: rows[i].value, weight: weights[i], index: i }));
  const answer: Answer = {
    ...attended,
    query,
    shown: null,
    mean: null,
    valueIsMean: values !== null && !comparesKeys && keys.every(isNumberKey),
    rows: heaviest.slice(0, options.top ?? 5),
    values: [],
    spread: null,
    total: live.filter(Boolean).length,
    missing: live.filter((x) => !x).length,
    entropy: computeEntropy(weights),
    effective: computeEffectiveRows(weights),
    isNormalized: weighting.isConvex,
    score: chosenScore,
  };
  if (values && (order.length || attended.value!.some(Number.isNaN))) {
    let out = poolValues(weights, values, true, live);
    const weightSum = weights.reduce((a, b) => a + b, 0);
    if (weighting.isConvex && weightSum > 0) out = out.map((x) => x / weightSum);
    answer.value = out;
    const isNumeric = rows.some((row) => typeof row.value === "number");
    const unpack = (x: ArrayLike<number>) => (columns ? Object.fromEntries(columns.map((name, j) => [name, x[j]])) : isNumeric ? x[0] : x);
    answer.mean = unpack(out);
    answer.shown = answer.valueIsMean || !order.length ? answer.mean : unpack(averageBestKey(rows, scores, values, live));
    if (isNumeric) {
      const square = order.reduce((sum, i) => sum + weights[i] * (values[i][0] - out[0]) ** 2, 0);
      answer.spread = Math.sqrt(Math.max(square, 0));
    }
  } else if (!values && order.length) {
    const weightByValue = new Map<string, { value: unknown; weight: number }>();
    for (const { value, weight } of heaviest) {
      const text = JSON.stringify(value);
      const entry = weightByValue.get(text) ?? { value, weight: 0 };
      entry.weight += weight;
      weightByValue.set(text, entry);
    }
    answer.values = Array.from(weightByValue.values()).sort((a, b) => b.weight - a.weight);
    answer.shown = answer.values[0].value;
  }
  return answer;
}
