/** Encoders: keys as vectors, and their default scores. These encoders need no Python.
 *
 * Vectors are rounded to float32, as a database stores them. */

import { blake2b, digest, formatNumber } from "./digest";
import { encodeCharacters, countWords } from "./letters";
import type { NamedSettings, Vector } from "./scores";

export type Key = string | number | Vector;

export interface Encoder {
  name: string;
  encode(keys: Key[]): Vector[];
  encodeQueries(queries: Key[]): Vector[];
  /** The default score for a database of this many rows. */
  defaultScore(rows: number): NamedSettings;
}

/** τ(m) = 8 + 1.6 ln m: the factor between a cosine and a score. */
export function computeSharpness(rows: number): number {
  return 8 + 1.6 * Math.log(Math.max(rows, 1));
}

function formatKey(key: Key): string {
  if (typeof key === "string") return key;
  return typeof key === "number" ? formatNumber(key) : JSON.stringify(Array.from(key));
}

/** Rounds halves to even, as NumPy does. */
function roundHalfToEven(x: number): number {
  const nearest = Math.round(x);
  return nearest - x === 0.5 && nearest % 2 !== 0 ? nearest - 1 : nearest;
}

/** The vector of a key as a database stores it: vectors of text have 8 bits per number and a scale. */
function quantizeVector(x: Vector): Float32Array {
  const largest = Array.from(x).reduce((top, y) => Math.max(top, Math.abs(y)), 0);
  const scale = Math.fround(largest / 127);
  const inverse = Math.fround(1 / (scale || 1));
  return Float32Array.from(x, (y) => roundHalfToEven(Math.fround(y * inverse)) * scale);
}

function createSymmetricEncoder(name: string, encode: (key: Key) => Vector, defaultScore: (rows: number) => NamedSettings): Encoder {
  const encodeAll = (keys: Key[]) => keys.map(encode);
  return { name, encode: encodeAll, encodeQueries: encodeAll, defaultScore };
}

const DATE = /^(\d{4}-\d\d-\d\d|\d\d:\d\d)/;

/** Days since the year 1 of a date in ISO text, with the time as a fraction; in UTC if it has a zone. */
function parseDays(text: string): number {
  if (!DATE.test(text)) return NaN; // JavaScript also accepts a year alone
  const moment = /^\d\d:/.test(text) ? `0001-01-01T${text}` : text;
  const utc = /^[^T]*$|(Z|[+-]\d\d:\d\d)$/.test(moment) ? moment : `${moment}Z`;
  const day = new Date(moment.slice(0, 10));
  if (day.getUTCDate() !== Number(moment.slice(8, 10))) return NaN; // JavaScript reads 30 February as a day of March
  return Date.parse(utc) / 864e5 + 719162;
}

/** Percentiles, and the distance between them in a normal distribution with a deviation of 1. */
const QUANTILE_RANGES = [[0.25, 0.75, 1.349], [0.1, 0.9, 2.563], [0.025, 0.975, 3.92]];

/** The standard deviation of a column without far outliers; 1 if all numbers are equal. */
function measureSpread(column: number[], mean: number): number {
  const sorted = Array.from(column).sort((a, b) => a - b);
  const quantile = (share: number) => {
    const at = share * (sorted.length - 1);
    const low = sorted[Math.floor(at)];
    return low + (sorted[Math.ceil(at)] - low) * (at % 1);
  };
  const deviation = Math.sqrt(column.reduce((a, x) => a + (x - mean) ** 2, 0) / column.length);
  const ranges = QUANTILE_RANGES.map(([low, high, width]) => (quantile(high) - quantile(low)) / width);
  const spread = ranges.find((x) => x > 0) ?? deviation;
  return Math.min(spread, deviation) > 0 ? Math.min(spread, deviation) : 1;
}

/** How far the ⌊√m⌋-th nearest other row is from a row, in the median of the m rows; null if all rows are equal. */
function measureNeighbourDistance(rows: number[][]): number | null {
  const rank = Math.min(Math.floor(Math.sqrt(rows.length)), rows.length - 1);
  const distances: number[] = [];
  for (const row of rank ? rows : []) {
    const others = rows.map((other) => Math.sqrt(other.reduce((sum, x, j) => sum + (x - row[j]) ** 2, 0)));
    const nearest = others.filter((x) => x > 0).sort((a, b) => a - b).slice(0, rank);
    if (nearest.length) distances.push(nearest[nearest.length - 1]);
  }
  if (!distances.length) return null;
  distances.sort((a, b) => a - b);
  const middle = distances.length >> 1;
  return distances.length % 2 ? distances[middle] : (distances[middle - 1] + distances[middle]) / 2;
}

/** x = key − mean, compared by the Gaussian with a bandwidth from neighbours in each column. */
function createNumbersEncoder(keys: Key[]): Encoder {
  const isDate = keys.some((key) => typeof key === "string" && DATE.test(key));
  const kind = isDate ? "date" : "number";
  const expected = isDate ? `date such as ${Array.isArray(keys[0]) ? keys[0].find((part) => typeof part === "string") : keys[0]}` : "number, as the column is";
  const parseRow = (key: Key, formatRefusal: (part: unknown) => string): number[] => {
    const parts = typeof key === "object" ? Array.from(key) : [key];
    return parts.map((part) => {
      const x = typeof part === "number" ? part : part.trim() === "" ? NaN : isDate ? parseDays(part.trim()) : Number(part);
      if (!Number.isFinite(x)) throw new TypeError(formatRefusal(part));
      return x;
    });
  };
  const formatKeyRefusal = (i: number) => (part: unknown) => `key ${i} must be a ${kind}, not ${part}: leave that row out`;
  const rows = keys.map((key, i) => parseRow(key, formatKeyRefusal(i)));
  if (!rows.length) throw new RangeError("numbers needs at least one key to learn its units from");
  const columns = rows[0].map((_, j) => rows.map((x) => x[j]));
  const mean = columns.map((column) => column.reduce((a, b) => a + b, 0) / column.length);
  const spread = columns.map((column, j) => measureSpread(column, mean[j]));
  const neighbourDistance = measureNeighbourDistance(rows.map((row) => row.map((x, j) => x / spread[j])));
  const unit = spread.map((x) => (x > 1e-30 && x < 1e30 ? 1 : x));
  const relativeSpread = spread.map((x, j) => x / unit[j]);
  const encodeRow = (numbers: number[]) => Float32Array.from(numbers, (x, j) => (x - mean[j]) / unit[j]);
  return {
    name: "numbers",
    encode: (newKeys) => newKeys.map((key, i) => encodeRow(parseRow(key, formatKeyRefusal(i)))),
    encodeQueries: (queries) => queries.map((key) => encodeRow(parseRow(key, (part) => `the query must be a ${expected}, not '${part}'`))),
    defaultScore(count) {
      const width = relativeSpread.length;
      const isKnown = neighbourDistance !== null && count > 1;
      const factor = isKnown ? neighbourDistance / Math.sqrt(width + 3) : Math.max(count, 1) ** (-1 / (width + 4));
      if (width === 1) return { name: "gaussian", bandwidth: factor * relativeSpread[0] };
      return { name: "gaussian", bandwidth: Float32Array.from(relativeSpread, (x) => Math.fround(x) * Math.fround(factor)) };
    },
  };
}

/** BM25 as a dot product: φ(q) holds the idf of the query's words, ψ(k) the count of each word in the key.
 *
 * There is a column for each word of the keys, and a last one for the length of all others. */
function createLexicalEncoder(keys: Key[], k1 = 1.2, b = 0.75): Encoder {
  const counts = new Map<number, number>();
  let totalWords = 0;
  for (const key of keys) {
    for (const [code, f] of countWords(formatKey(key))) {
      counts.set(code, (counts.get(code) ?? 0) + 1);
      totalWords += f;
    }
  }
  const m = Math.max(keys.length, 1);
  const mean = Math.max(totalWords / m, 1);
  const idf = (count: number) => Math.log1p((m - count + 0.5) / (count + 0.5));
  let meanIdf = 0;
  for (const count of counts.values()) meanIdf += (count * idf(count)) / m;
  const sumOver = (wordCounts: Map<number, number>, weightOf: (code: number) => number) =>
    Array.from(wordCounts).reduce((total, [code, f]) => total + f * weightOf(code), 0);
  const column = new Map(Array.from(counts.keys()).sort((one, two) => one - two).map((code, i) => [code, i]));
  const toVector = (entries: [number, number][]) => {
    const out = new Float32Array(column.size + 1);
    let rest = 0;
    for (const [code, x] of entries) {
      if (column.has(code)) out[column.get(code)!] = x;
      else rest += x * x;
    }
    out[column.size] = Math.sqrt(rest);
    return out;
  };
  return {
    name: "lexical",
    encode: (newKeys) =>
      newKeys.map((key) => {
        const wordCounts = countWords(formatKey(key));
        const relativeLength = sumOver(wordCounts, () => 1) / mean;
        const computeWeight = (f: number) => (f * (k1 + 1)) / (f + k1 * (1 - b + b * relativeLength));
        return toVector(Array.from(wordCounts, ([code, f]) => [code, computeWeight(f)]));
      }),
    encodeQueries: (queries) =>
      queries.map((key) => {
        const wordCounts = countWords(formatKey(key));
        // Words that no key has still count in the norm of the query.
        const total = sumOver(wordCounts, (code) => idf(counts.get(code) ?? 0));
        const scale = 1 / (total + meanIdf || 1);
        return toVector(Array.from(wordCounts, ([code, f]) => [code, f * idf(counts.get(code) ?? 0) * scale]));
      }),
    defaultScore: (rows) => ({ name: "scaled_dot", scale: computeSharpness(rows) }),
  };
}

/** x = ±1/16, the signs being the bits of the key's digest. */
function computeSignVector(key: Key, width = 256): Float32Array {
  const hash = blake2b(digest(key as string | number), width / 8);
  const size = Math.fround(1 / Math.fround(Math.sqrt(width)));
  return Float32Array.from({ length: width }, (_, i) => ((hash[i >> 3] >> (7 - (i & 7))) & 1 ? size : -size));
}

const ENCODER_FACTORIES: Record<string, (keys: Key[]) => Encoder> = {
  numbers: createNumbersEncoder,
  lexical: createLexicalEncoder,
  characters: () => {
    const defaultScore = (rows: number) => ({ name: "scaled_dot", scale: computeSharpness(rows) });
    const encoder = createSymmetricEncoder("characters", (key) => encodeCharacters(formatKey(key)), defaultScore);
    return { ...encoder, encode: (keys) => encoder.encode(keys).map(quantizeVector) };
  },
  exact: () =>
    createSymmetricEncoder("exact", (key) => computeSignVector(key), (rows) => ({
      name: "scaled_dot",
      scale: Math.log(Math.max(rows, 1)) + 6,
    })),
  arrays: () => createSymmetricEncoder("arrays", (key) => Float32Array.from(key as Vector), (rows) => ({ name: "cosine", temperature: 1 / computeSharpness(rows) })),
};

/** The encoders that need no Python. */
export const NAMES = Object.keys(ENCODER_FACTORIES);

/** Whether the page has this encoder. Vectors of the others come from Python. */
export function isAvailable(name: string): boolean {
  return Object.hasOwn(ENCODER_FACTORIES, name);
}

/** An encoder, fitted to the keys. */
export function fit(name: string, keys: Key[]): Encoder {
  if (isAvailable(name)) return ENCODER_FACTORIES[name](keys);
  throw new RangeError(`the encoder ${name} needs Python; the page has ${NAMES.join(", ")}`);
}

/** The default encoder for the type of the keys. */
export function suggestEncoder(keys: Key[]): string {
  if (keys.length && keys.every((key) => typeof key === "number")) return "numbers";
  if (keys.length && keys.every((key) => typeof key === "object")) return "arrays";
  return "characters";
}
