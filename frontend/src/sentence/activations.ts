/** The activations of a model for a sentence: X, and for each head Q, K, V and the weights. */

import { weights } from "../equation";
import { characters } from "../equation/letters";
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

export interface Read {
  model: string;
  tokens: string[];
  /** The words, and for each token the number of its word. */
  words: string[];
  groups: number[];
  /** Heads in rows of `across`: a layer each, or all in one. */
  heads: Head[];
  across: number;
  layered: boolean;
  /** The head that is shown first. */
  first: number;
}

const WORD = /[\p{L}\p{N}_]+(?:['’-][\p{L}\p{N}_]+)*|[^\p{L}\p{N}_\s]/gu;
export const MOST = 60;

/** The numbers of X for the spelling of a word, and the frequencies that encode its position. */
const SPELLING = 16;
const TURNS = [1.6, 0.8, 0.4, 0.2];
const WIDTH = SPELLING + 2 * TURNS.length;

function product(a: Rows, b: Rows): Rows {
  return a.map((row) => {
    const out = new Float64Array(b[0].length);
    for (let k = 0; k < b.length; k++) for (let j = 0; j < out.length; j++) out[j] += row[k] * b[k][j];
    return out;
  });
}

export function transposed(a: Rows): Rows {
  return Array.from(a[0] ?? [], (_, j) => a.map((row) => row[j]));
}

/** QKᵀ. */
export function scores(q: Rows, k: Rows): Rows {
  return product(q, transposed(k));
}

/** αV. */
export function pooled(alpha: Rows, v: Rows): Rows {
  return product(alpha, v);
}

function zeros(): Float64Array[] {
  return Array.from({ length: WIDTH }, () => new Float64Array(SPELLING));
}

/** A projection on the spelling, scaled by `gain`. */
function spelling(gain: number): Rows {
  const w = zeros();
  for (let i = 0; i < SPELLING; i++) w[i][i] = gain;
  return w;
}

/** A projection on the position, shifted by `step` words: it rotates each pair of numbers. */
function place(gain: number, step: number): Rows {
  const w = zeros();
  TURNS.forEach((turn, i) => {
    const [cos, sin] = [gain * Math.cos(step * turn), gain * Math.sin(step * turn)];
    const [row, col] = [SPELLING + 2 * i, 2 * i];
    [w[row][col], w[row][col + 1]] = [cos, sin];
    [w[row + 1][col], w[row + 1][col + 1]] = [-sin, cos];
  });
  return w;
}

/** A random projection, as before training. */
function random(seed: number): Rows {
  let state = seed;
  const next = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32 - 0.5;
  };
  return zeros().map((row) => row.map(() => 1.5 * (next() + next() + next())));
}

const HEADS: [string, Rows, Rows][] = [
  ["same letters", spelling(4), spelling(4)],
  ["previous word", place(3, -1), place(3, 0)],
  ["next word", place(3, 1), place(3, 0)],
  ["random", random(3), random(8)],
];

/** A small model with hand-written projections; it needs neither training nor Python. */
export function byHand(text: string): Read {
  const tokens = (text.match(WORD) ?? []).slice(0, MOST);
  const x = tokens.map((word, at) => [
    ...characters(word, SPELLING),
    ...TURNS.flatMap((turn) => [Math.cos(at * turn), Math.sin(at * turn)]),
  ]);
  const heads = HEADS.map(([name, wq, wk]): Head => {
    const projections = { q: wq, k: wk, v: spelling(1) };
    const [q, k, v] = [product(x, wq), product(x, wk), product(x, projections.v)];
    return { name, x, q, k, v, projections, weights: weights(q, k) };
  });
  const groups = tokens.map((_, i) => i);
  return { model: "hand", tokens, words: tokens, groups, heads, across: heads.length, layered: false, first: 0 };
}

/** The data from Python: x (layers, n, d), q, k and v (layers, heads, n, d_Q), weights (layers, heads, n, n). */
export interface Wired {
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

function matrixAt(of: Tensor, at: number): Rows {
  const [rows, cols] = of.shape.slice(-2);
  const start = at * rows * cols;
  return Array.from({ length: rows }, (_, i) => of.data.subarray(start + i * cols, start + (i + 1) * cols));
}

export function wired(of: Wired): Read {
  const [layers, across] = of.weights.shape;
  const heads = Array.from({ length: layers * across }, (_, i): Head => {
    const layer = Math.floor(i / across);
    const [q, k, v, alpha] = [of.q, of.k, of.v, of.weights].map((x) => matrixAt(x, i));
    const name = `layer ${layer}, head ${i % across}`;
    return { name, x: matrixAt(of.x, layer), q, k, v, projections: null, weights: alpha };
  });
  return { ...of, heads, across, layered: true };
}

/** Weights between words: the mean of the rows and the sum of the columns of a word's tokens. */
export function merged(alpha: Rows, groups: number[], count: number): Rows {
  const out = Array.from({ length: count }, () => new Float64Array(count));
  const pieces = new Float64Array(count);
  for (const group of groups) pieces[group] += 1;
  groups.forEach((to, i) => groups.forEach((from, j) => (out[to][from] += alpha[i][j] / pieces[to])));
  return out;
}
