/** What a database says to one query: the twin of Database.ask and of its Answer. */

import { type Attended, effective, entropy, paired, pool, weigh } from "./attend";
import { type Encoder, type Key, fit, suits } from "./encoders";
import type { Like, Vector } from "./scores";

export interface Row {
  key: Key;
  value: unknown;
}

export interface Asking {
  /** A name, or one that is fitted already. */
  encoder?: string | Encoder;
  /** Vectors that came from Python, in the place of an encoder's. */
  vectors?: { keys: Vector[]; query: Vector; score: Like };
  score?: Like | null;
  weighting?: Like;
  top?: number;
  /** The columns of values that are records of numbers, each to be pooled. */
  columns?: string[] | null;
}

export interface Answer extends Attended {
  query: Key;
  /** Σᵢ αᵢ vᵢ where values are numbers, vectors or records of `columns`, else the heaviest value; null: no row answers. */
  pooled: unknown;
  /** The heaviest rows. */
  rows: { key: Key; value: unknown; weight: number; index: number }[];
  /** Where values are not pooled: each with the weight of all rows that hold it, heaviest first. */
  values: { value: unknown; weight: number }[];
  /** √(Σᵢ αᵢ (vᵢ − value)²), null where values are not numbers. */
  spread: number | null;
  /** Rows that were asked, and those that were left out because their value is missing. */
  total: number;
  missing: number;
  /** Whether the weights share out one whole: those of `raw` and `sigmoid` do not. */
  shares: boolean;
  score: Like;
}

const isMissing = (x: unknown) => x === null || x === undefined || (typeof x === "number" && Number.isNaN(x));
const isRecord = (x: unknown) => typeof x === "object" && x !== null && !Array.isArray(x);
const isVector = (x: unknown) => Array.isArray(x) && x.length > 0 && x.every((y) => typeof y === "number");

/** Values as vectors, where they can be pooled. */
function vectors(values: unknown[], live: boolean[], columns: string[] | null): Vector[] | null {
  const some = values.filter((_, i) => live[i]);
  if (columns) return values.map((x, i) => columns.map((name) => (live[i] ? (x as any)[name] : NaN)));
  if (some.every((x) => typeof x === "number")) return values.map((x, i) => [live[i] ? (x as number) : NaN]);
  if (some.every(isVector)) return values.map((x) => (x ?? []) as Vector);
  return null;
}

export function ask(rows: Row[], query: Key, how: Asking = {}): Answer {
  if (!rows.length) throw new RangeError("the database is empty, so it has no answer: add rows first");
  const keys = rows.map((row) => row.key);
  const given = how.vectors;
  let encoder: Encoder | null = null;
  if (!given) {
    encoder = typeof how.encoder === "object" ? how.encoder : fit(how.encoder ?? suits(keys), keys);
  }
  const chosen = how.score ?? given?.score ?? encoder!.score(rows.length);
  const { score, weighting } = paired({ score: chosen, weighting: how.weighting });
  let scores: Float64Array;
  if (score.comparesKeys) scores = Float64Array.from(keys, (key) => Number(key === query));
  else {
    const code = given ? given.query : encoder!.query([query])[0];
    scores = Float64Array.from(given ? given.keys : encoder!.encode(keys), (key) => score.at(code, key));
  }
  const columns = how.columns && rows.every((row) => isRecord(row.value) || isMissing(row.value)) ? how.columns : null;
  // A record that is to be pooled lacks a value where one column does.
  const live = rows.map(({ value }) => !isMissing(value) && !columns?.some((name) => isMissing((value as any)[name])));
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
