/** The answer of a database to one query: the same as Database.ask in Python. */

import { type Attended, effective, entropy, paired, pool, weigh } from "./attend";
import { type Encoder, type Key, fit, suits } from "./encoders";
import type { Like, Vector } from "./scores";
import { type Weighting, computedWeighting, resolve as weightingOf } from "./weightings";

export interface Row {
  key: Key;
  value: unknown;
}

/** What Python computed for a score or weighting that this page cannot compute. */
export interface Computed {
  scores: Float64Array;
  weights: Float64Array;
  convex: boolean;
  sparse: boolean;
}

export interface Asking {
  /** A name, or a fitted encoder. */
  encoder?: string | Encoder;
  /** Vectors from Python, used instead of an encoder. */
  vectors?: { keys: Vector[]; query: Vector; score: Like };
  score?: Like | null;
  weighting?: Like;
  /** Python's numbers, used instead of the page's own. A weighting of `hard` uses only the scores. */
  computed?: Computed | null;
  top?: number;
  /** Columns to pool, if the values are records of numbers. */
  columns?: string[] | null;
}

export interface Answer extends Attended {
  query: Key;
  /** Σᵢ αᵢ vᵢ for numbers, vectors and records of `columns`; else the value with the most weight; null without weights. */
  pooled: unknown;
  /** The rows with the most weight. */
  rows: { key: Key; value: unknown; weight: number; index: number }[];
  /** If values are not pooled: each value with its total weight, the largest first. */
  values: { value: unknown; weight: number }[];
  /** √(Σᵢ αᵢ (vᵢ − value)²); null if the values are not numbers. */
  spread: number | null;
  /** Rows that have a value, and rows that are ignored because their value is missing. */
  total: number;
  missing: number;
  /** Whether the weights sum to 1; those of `raw` and `sigmoid` do not. */
  shares: boolean;
  score: Like;
}

const isMissing = (x: unknown) => x === null || x === undefined || (typeof x === "number" && Number.isNaN(x));
const isRecord = (x: unknown) => typeof x === "object" && x !== null && !Array.isArray(x);
const isVector = (x: unknown) => Array.isArray(x) && x.length > 0 && x.every((y) => typeof y === "number");

/** Values as vectors; null if they cannot be pooled. */
function vectors(values: unknown[], live: boolean[], columns: string[] | null): Vector[] | null {
  const some = values.filter((_, i) => live[i]);
  if (columns) return values.map((x, i) => columns.map((name) => (live[i] ? (x as any)[name] : NaN)));
  if (some.every((x) => typeof x === "number")) return values.map((x, i) => [live[i] ? (x as number) : NaN]);
  if (some.every(isVector)) return values.map((x) => (x ?? []) as Vector);
  return null;
}

/** The rows that have a value. A record that is pooled needs a value in each of its columns. */
export function liveRows(rows: Row[], columns?: string[] | null): boolean[] {
  const pooled = pooledColumns(rows, columns);
  return rows.map(({ value }) => !isMissing(value) && !pooled?.some((name) => isMissing((value as any)[name])));
}

function pooledColumns(rows: Row[], columns?: string[] | null): string[] | null {
  return columns && rows.every((row) => isRecord(row.value) || isMissing(row.value)) ? columns : null;
}

export function ask(rows: Row[], query: Key, how: Asking = {}): Answer {
  if (!rows.length) throw new RangeError("The database is empty: add rows first.");
  const keys = rows.map((row) => row.key);
  const { vectors: given, computed } = how;
  let encoder: Encoder | null = null;
  if (!given && !computed) {
    encoder = typeof how.encoder === "object" ? how.encoder : fit(how.encoder ?? suits(keys), keys);
  }
  const chosen = how.score ?? given?.score ?? encoder?.score(rows.length) ?? "";
  let scores: Float64Array;
  let weighting: Weighting;
  if (computed) {
    scores = computed.scores;
    weighting = how.weighting === "hard" ? weightingOf("hard") : computedWeighting(computed.weights, computed.convex, computed.sparse);
  } else {
    const pair = paired({ score: chosen, weighting: how.weighting });
    weighting = pair.weighting;
    if (pair.score.comparesKeys) scores = Float64Array.from(keys, (key) => Number(key === query));
    else {
      const code = given ? given.query : encoder!.query([query])[0];
      scores = Float64Array.from(given ? given.keys : encoder!.encode(keys), (key) => pair.score.at(code, key));
    }
  }
  const columns = pooledColumns(rows, how.columns);
  const live = liveRows(rows, columns);
  const values = vectors(rows.map((row) => row.value), live, columns);
  const found = weigh(scores, values, weighting, live);
  const { weights } = found;
  const size = weighting.convex ? weights : weights.map(Math.abs);
  const order = Array.from(keys.keys())
    .filter((i) => size[i] > 0)
    .sort((i, j) => size[j] - size[i] || i - j);
  const heaviest = order.map((i) => ({ key: keys[i], value: rows[i].value, weight: weights[i], index: i }));
  const answer: Answer = {
    ...found,
    query,
    pooled: null,
    rows: heaviest.slice(0, how.top ?? 5),
    values: [],
    spread: null,
    total: live.filter(Boolean).length,
    missing: live.filter((x) => !x).length,
    entropy: entropy(weights),
    effective: effective(weights),
    shares: weighting.convex,
    score: chosen,
  };
  if (values && (order.length || found.value!.some(Number.isNaN))) {
    let out = pool(weights, values, true, live);
    const mass = weights.reduce((a, b) => a + b, 0);
    if (weighting.convex && mass > 0) out = out.map((x) => x / mass);
    answer.value = out;
    const plain = rows.some((row) => typeof row.value === "number");
    answer.pooled = columns ? Object.fromEntries(columns.map((name, j) => [name, out[j]])) : plain ? out[0] : out;
    if (plain) {
      const square = order.reduce((sum, i) => sum + weights[i] * (values[i][0] - out[0]) ** 2, 0);
      answer.spread = Math.sqrt(Math.max(square, 0));
    }
  } else if (!values && order.length) {
    const shares = new Map<string, { value: unknown; weight: number }>();
    for (const { value, weight } of heaviest) {
      const mark = JSON.stringify(value);
      const share = shares.get(mark) ?? { value, weight: 0 };
      share.weight += weight;
      shares.set(mark, share);
    }
    answer.values = Array.from(shares.values()).sort((a, b) => b.weight - a.weight);
    answer.pooled = answer.values[0].value;
  }
  return answer;
}
