/** The activations of a model for a sentence: X, and for each head Q, K, V and the weights. */

import { computeWeights } from "../equation";
import { encodeCharacters } from "../equation/letters";
import type { Tensor } from "../wire";

/** Numbers in rows. */
export type Rows = ArrayLike<number>[];

export interface Head {
  name: string;
  /** X (n, d) → Q, K (n, d_Q) and V (n, d_V); W_Q, W_K, W_V if they are known. */
  x: Rows;
  q: Rows;
  k: Rows;
  v: Rows;
  projections: { q: Rows; k: Rows; v: Rows } | null;
  /** α (n, n). */
  weights: Rows;
}

export interface Activations {
  model: string;
  tokens: string[];
  /** The words, and for each token the number of its word. */
  words: string[];
  groups: number[];
  /** Rows of `headsPerLayer` heads: a row per layer, or one row. */
  heads: Head[];
  headsPerLayer: number;
  hasLayers: boolean;
  /** The head that is shown first. */
  first: number;
}

const WORD = /[\p{L}\p{N}_]+(?:['’-][\p{L}\p{N}_]+)*|[^\p{L}\p{N}_\s]/gu;
export const MAX_WORDS = 60;

/** The numbers of X for the spelling of a word, and the frequencies that encode its position. */
const SPELLING_WIDTH = 16;
const FREQUENCIES = [1.6, 0.8, 0.4, 0.2];
const WIDTH = SPELLING_WIDTH + 2 * FREQUENCIES.length;

function multiply(a: Rows, b: Rows): Rows {
  return a.map((row) => {
    const out = new Float64Array(b[0].length);
    for (let k = 0; k < b.length; k++) for (let j = 0; j < out.length; j++) out[j] += row[k] * b[k][j];
    return out;
  });
}

export function transpose(a: Rows): Rows {
  return Array.from(a[0] ?? [], (_, j) => a.map((row) => row[j]));
}

/** QKᵀ. */
export function computeScores(q: Rows, k: Rows): Rows {
  return multiply(q, transpose(k));
}

/** αV. */
export function poolValues(alpha: Rows, v: Rows): Rows {
  return multiply(alpha, v);
}

function createZeros(): Float64Array[] {
  return Array.from({ length: WIDTH }, () => new Float64Array(SPELLING_WIDTH));
}

/** A projection on the spelling, scaled by `gain`. */
function createSpellingProjection(gain: number): Rows {
  const w = createZeros();
  for (let i = 0; i < SPELLING_WIDTH; i++) w[i][i] = gain;
  return w;
}

/** A projection on the position, shifted by `step` words: it rotates each pair of numbers. */
function createPositionProjection(gain: number, step: number): Rows {
  const w = createZeros();
  FREQUENCIES.forEach((frequency, i) => {
    const [cos, sin] = [gain * Math.cos(step * frequency), gain * Math.sin(step * frequency)];
    const [row, col] = [SPELLING_WIDTH + 2 * i, 2 * i];
    [w[row][col], w[row][col + 1]] = [cos, sin];
    [w[row + 1][col], w[row + 1][col + 1]] = [-sin, cos];
  });
  return w;
}

/** A random projection, as before training. */
function createRandomProjection(seed: number): Rows {
  let state = seed;
  const next = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32 - 0.5;
  };
  return createZeros().map((row) => row.map(() => 1.5 * (next() + next() + next())));
}

const HEADS: [string, Rows, Rows][] = [
  ["same letters", createSpellingProjection(4), createSpellingProjection(4)],
  ["previous word", createPositionProjection(3, -1), createPositionProjection(3, 0)],
  ["next word", createPositionProjection(3, 1), createPositionProjection(3, 0)],
  ["random", createRandomProjection(3), createRandomProjection(8)],
];

/** A small model with hand-written projections; it needs neither training nor Python. */
export function computeByHand(text: string): Activations {
  const tokens = (text.match(WORD) ?? []).slice(0, MAX_WORDS);
  const x = tokens.map((word, position) => [
    ...encodeCharacters(word, SPELLING_WIDTH),
    ...FREQUENCIES.flatMap((frequency) => [Math.cos(position * frequency), Math.sin(position * frequency)]),
  ]);
  const heads = HEADS.map(([name, wq, wk]): Head => {
    const projections = { q: wq, k: wk, v: createSpellingProjection(1) };
    const [q, k, v] = [multiply(x, wq), multiply(x, wk), multiply(x, projections.v)];
    return { name, x, q, k, v, projections, weights: computeWeights(q, k) };
  });
  const groups = tokens.map((_, i) => i);
  return { model: "hand", tokens, words: tokens, groups, heads, headsPerLayer: heads.length, hasLayers: false, first: 0 };
}

/** The data from Python: x (layers, n, d), q, k and v (layers, heads, n, d_Q), weights (layers, heads, n, n). */
export interface WireActivations {
  model: string;
  tokens: string[];
  words: string[];
  groups: number[];
  x: Tensor;
  q: Tensor;
  k: Tensor;
  v: Tensor;
  weights: Tensor;
  first: number;
}

function matrixAt(tensor: Tensor, index: number): Rows {
  const [rows, cols] = tensor.shape.slice(-2);
  const start = index * rows * cols;
  return Array.from({ length: rows }, (_, i) => tensor.data.subarray(start + i * cols, start + (i + 1) * cols));
}

export function decodeActivations(data: WireActivations): Activations {
  const [layers, headsPerLayer] = data.weights.shape;
  const heads = Array.from({ length: layers * headsPerLayer }, (_, i): Head => {
    const layer = Math.floor(i / headsPerLayer);
    const [q, k, v, alpha] = [data.q, data.k, data.v, data.weights].map((x) => matrixAt(x, i));
    const name = `layer ${layer}, head ${i % headsPerLayer}`;
    return { name, x: matrixAt(data.x, layer), q, k, v, projections: null, weights: alpha };
  });
  return { ...data, heads, headsPerLayer, hasLayers: true };
}

/** Weights between words: the mean of the rows and the sum of the columns of a word's tokens. */
export function mergeTokens(alpha: Rows, groups: number[], count: number): Rows {
  const out = Array.from({ length: count }, () => new Float64Array(count));
  const tokenCounts = new Float64Array(count);
  for (const group of groups) tokenCounts[group] += 1;
  groups.forEach((to, i) => groups.forEach((from, j) => (out[to][from] += alpha[i][j] / tokenCounts[to])));
  return out;
}
