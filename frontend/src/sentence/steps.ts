/** softmax(QKᵀ / √d_Q) V step by step, each matrix with its dimensions. */

import { fixed, h, put } from "../dom";
import { clamp, numeral } from "../numbers";
import { type Matrix, Picture } from "../picture";
import type { Given } from "../view";
import { type Head, type Rows, pooled, scores, transposed } from "./read";

export const STYLE = `
.steps-bar { display: flex; flex-wrap: wrap; gap: 0.35rem; margin: 0.5rem 0 1rem; }
.steps-bar button[aria-pressed="true"] { border-color: var(--accent); outline: 1px solid var(--accent); font-weight: 600; }
.steps-bar button { padding-inline: 0.55rem; }
.steps-line { display: flex; gap: 0.5rem 0.6rem; align-items: center; margin-bottom: 1rem; }
.steps-sign { white-space: nowrap; font-size: 1.25rem; color: var(--soft); }
.tile { display: grid; grid-template-columns: minmax(0, auto); gap: 0.25rem; justify-items: start; min-width: 0; }
.tile > :first-child { max-width: 100%; }
.tile canvas { border: 1px solid var(--line); image-rendering: pixelated; cursor: crosshair; }
.tile .learned { display: grid; place-items: center; border: 1px dashed var(--line); color: var(--soft); font-size: 0.85rem; }
.tile-name { font-family: var(--mono); font-size: 0.9rem; }
.steps-readout { min-height: 1.5em; font-variant-numeric: tabular-nums; }
`;

/** CSS pixels per number, and the largest side of a matrix. */
const CELL = 14;
const LARGEST = 160;

interface Tile {
  name: string;
  rows: number;
  cols: number;
  /** null if the model does not provide them. */
  numbers: Rows | null;
  /** Whether its rows are the words of the sentence. */
  worded: boolean;
}

interface Step {
  title: string;
  says: string;
  /** Lines of matrices, and signs between them. */
  lines: (Tile | string)[][];
  /** A description of the word's row in the last matrix. */
  row: string;
}

export function flat(rows: Rows): Matrix {
  const cols = rows[0]?.length ?? 0;
  const data = new Float64Array(rows.length * cols);
  rows.forEach((row, i) => data.set(Array.from(row), i * cols));
  return { data, rows: rows.length, cols };
}

const tile = (name: string, numbers: Rows, worded = true): Tile => ({
  name,
  rows: numbers.length,
  cols: numbers[0]?.length ?? 0,
  numbers,
  worded,
});

function stepsOf(head: Head, heads: number, layered: boolean): Step[] {
  const { x, q, k, v, projections, weights } = head;
  const [n, d, dq, dv] = [x.length, x[0].length, q[0].length, v[0].length];
  const raw = scores(q, k);
  const root = Math.sqrt(dq);
  const scaled = raw.map((row) => Array.from(row, (s) => s / root));
  const w = (name: "q" | "k" | "v", cols: number): Tile => ({
    name: `W_${name.toUpperCase()}`,
    rows: d,
    cols,
    numbers: projections?.[name] ?? null,
    worded: false,
  });
  const project = (name: "q" | "k" | "v", out: Rows) => [
    tile("X", x), "·", w(name, out[0].length), layered ? "+ b =" : "=", tile(name.toUpperCase(), out),
  ]; // prettier-ignore
  return [
    {
      title: "X",
      says: `Each word is a vector of d = ${d} numbers. X has one row for each of the ${n} words.`,
      lines: [[tile("X", x)]],
      row: "its vector",
    },
    {
      title: "Q, K, V",
      says: `Q = X W_Q, K = X W_K, V = X W_V: (${n} × ${d}) · (${d} × ${dq}) = ${n} × ${dq}. Each word has a query, a key and a value.`,
      lines: [project("q", q), project("k", k), project("v", v)],
      row: "its value",
    },
    {
      title: "QKᵀ",
      says: `The dot products of all queries and keys: (${n} × ${dq}) · (${dq} × ${n}) = ${n} × ${n}.`,
      lines: [[tile("Q", q), "·", tile("Kᵀ", transposed(k), false), "=", tile("QKᵀ", raw)]],
      row: "its scores",
    },
    {
      title: "÷ √d",
      says: `Divided by √d_Q = √${dq} = ${numeral(root, 0, 3)}, so that scores do not grow with the width.`,
      lines: [[tile("QKᵀ", raw), `÷ ${numeral(root, 0, 3)} =`, tile("QKᵀ/√d_Q", scaled)]],
      row: "its scores",
    },
    {
      title: "softmax",
      says: `exp(sⱼ) / Σ exp(sⱼ) in each row: ${n} × ${n} weights, and each row sums to 1.`,
      lines: [[tile("QKᵀ/√d_Q", scaled), "→", tile("α", weights)]],
      row: "its weights",
    },
    {
      title: "S = αV",
      says:
        `The weighted sum of the values: (${n} × ${n}) · (${n} × ${dv}) = ${n} × ${dv}. ` +
        `All ${heads} heads together: ${n} × ${heads * dv}.`,
      lines: [[tile("α", weights), "·", tile("V", v), "=", tile("S", pooled(weights, v))]],
      row: "its output",
    },
  ];
}

export class Steps {
  readonly element: HTMLElement;
  private at = 0;
  private word = 0;
  private head: Head | null = null;
  private steps: Step[] = [];
  private tokens: string[] = [];
  private readonly bar = h("div", { class: "steps-bar", role: "group", "aria-label": "Steps" });
  private readonly says = h("p", { test: "step-says" });
  private readonly body = h("div");
  private readonly row = h("p", { class: "formula", test: "step-row" });
  private readonly readout = h("p", { class: "hint steps-readout", test: "step-readout" });

  constructor(private readonly given: Given) {
    this.element = h("div", {}, this.bar, this.says, this.body, this.readout, this.row);
  }

  show(head: Head, tokens: string[], heads: number, layered: boolean) {
    this.head = head;
    this.tokens = tokens;
    this.steps = stepsOf(head, heads, layered);
    this.word = clamp(this.word, 0, tokens.length - 1);
    const go = (i: number) => () => {
      this.at = i;
      this.draw();
      this.given.announce(this.says.textContent ?? "");
    };
    put(
      this.bar,
      ...this.steps.map((step, i) =>
        h("button", { type: "button", test: `step-${i}`, on: { click: go(i) } }, `${i + 1}  ${step.title}`),
      ),
    );
    this.draw();
  }

  /** The word whose row is marked. */
  point(word: number) {
    if (word === this.word || word >= this.tokens.length) return;
    this.word = word;
    this.draw();
  }

  draw() {
    if (!this.head) return;
    const step = this.steps[this.at];
    [...this.bar.children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === this.at)));
    this.says.textContent = step.says;
    put(
      this.body,
      ...step.lines.map((line) =>
        h("div", { class: "steps-line" }, ...line.map((x) => (typeof x === "string" ? h("span", { class: "steps-sign" }, x) : this.tile(x)))),
      ),
    );
    const last = step.lines.at(-1)?.at(-1) as Tile;
    const row = Array.from(last.numbers?.[this.word] ?? []);
    const more = row.length > 12 ? ` … (${row.length})` : "";
    this.row.textContent = `${this.tokens[this.word]}, ${step.row}: ${row.slice(0, 12).map((x) => fixed(x)).join("  ")}${more}`;
    this.readout.textContent = "";
  }

  private tile(of: Tile): HTMLElement {
    const name = h("span", { class: "tile-name" }, `${of.name}  ${of.rows} × ${of.cols}`);
    const width = clamp(of.cols * CELL, CELL, LARGEST);
    const height = clamp(of.rows * CELL, CELL, LARGEST);
    const size = { width: `${width}px`, "aspect-ratio": `${width} / ${height}` };
    if (!of.numbers) return h("div", { class: "tile" }, h("div", { class: "learned", style: size }, "learned"), name);
    const ratio = devicePixelRatio || 1;
    const canvas = h("canvas", {
      width: String(Math.round(width * ratio)),
      height: String(Math.round(height * ratio)),
      role: "img",
      "aria-label": `${of.name}, ${of.rows} by ${of.cols}`,
      style: size,
    });
    const picture = new Picture(flat(of.numbers));
    const pen = canvas.getContext("2d") as CanvasRenderingContext2D;
    pen.imageSmoothingEnabled = false;
    const [x, y] = [canvas.width / of.cols, canvas.height / of.rows];
    const k = picture.levelFor(Math.min(x, y));
    const level = picture.canvas(k, this.given.dark());
    pen.drawImage(level, 0, 0, level.width * 2 ** k * x, level.height * 2 ** k * y);
    if (of.worded) {
      pen.strokeStyle = getComputedStyle(this.element).getPropertyValue("accent-color") || "#000";
      pen.lineWidth = 2 * ratio;
      pen.strokeRect(ratio, this.word * y + ratio, canvas.width - 2 * ratio, Math.max(y - 2 * ratio, 2));
    }
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const i = clamp(Math.floor(((event.clientY - box.top) / box.height) * of.rows), 0, of.rows - 1);
      const j = clamp(Math.floor(((event.clientX - box.left) / box.width) * of.cols), 0, of.cols - 1);
      const row = of.worded ? this.tokens[i] : String(i);
      this.readout.textContent = `${of.name}[${row}, ${j}] = ${numeral(of.numbers?.[i][j] ?? Number.NaN)}`;
    });
    return h("div", { class: "tile" }, canvas, name);
  }
}
