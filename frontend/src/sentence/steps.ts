/** softmax(QKᵀ / √d_Q) V step by step, each matrix with its dimensions. */

import { formatFixed, h, replaceChildren } from "../dom";
import { clamp, formatSignificant } from "../numbers";
import { type Matrix, Picture } from "../picture";
import type { ViewContext } from "../view";
import { type Head, type Rows, poolValues, computeScores, transpose } from "./activations";

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
const CELL_PIXELS = 14;
const MAX_MATRIX_PIXELS = 160;

interface MatrixTile {
  name: string;
  rows: number;
  cols: number;
  /** null if the model does not provide them. */
  numbers: Rows | null;
  /** Whether its rows are the words of the sentence. */
  hasWordRows: boolean;
}

interface Step {
  title: string;
  text: string;
  /** Lines of matrices, and signs between them. */
  lines: (MatrixTile | string)[][];
  /** A description of the word's row in the last matrix. */
  row: string;
}

export function toMatrix(rows: Rows): Matrix {
  const cols = rows[0]?.length ?? 0;
  const data = new Float64Array(rows.length * cols);
  rows.forEach((row, i) => data.set(Array.from(row), i * cols));
  return { data, rows: rows.length, cols };
}

const createTile = (name: string, numbers: Rows, hasWordRows = true): MatrixTile => ({
  name,
  rows: numbers.length,
  cols: numbers[0]?.length ?? 0,
  numbers,
  hasWordRows,
});

function buildSteps(head: Head, headCount: number, hasLayers: boolean): Step[] {
  const { x, q, k, v, projections, weights } = head;
  const [n, d, dq, dv] = [x.length, x[0].length, q[0].length, v[0].length];
  const raw = computeScores(q, k);
  const root = Math.sqrt(dq);
  const scaled = raw.map((row) => Array.from(row, (s) => s / root));
  const projectionTile = (name: "q" | "k" | "v", cols: number): MatrixTile => ({
    name: `W_${name.toUpperCase()}`,
    rows: d,
    cols,
    numbers: projections?.[name] ?? null,
    hasWordRows: false,
  });
  const createProjectionLine = (name: "q" | "k" | "v", out: Rows) => [
    createTile("X", x), "·", projectionTile(name, out[0].length), hasLayers ? "+ b =" : "=", createTile(name.toUpperCase(), out),
  ]; // prettier-ignore
  return [
    {
      title: "X",
      text: `Each word is a vector of d = ${d} numbers. X has one row for each of the ${n} words.`,
      lines: [[createTile("X", x)]],
      row: "its vector",
    },
    {
      title: "Q, K, V",
      text: `Q = X W_Q, K = X W_K, V = X W_V: (${n} × ${d}) · (${d} × ${dq}) = ${n} × ${dq}. Each word has a query, a key and a value.`,
      lines: [createProjectionLine("q", q), createProjectionLine("k", k), createProjectionLine("v", v)],
      row: "its value",
    },
    {
      title: "QKᵀ",
      text: `The dot products of all queries and keys: (${n} × ${dq}) · (${dq} × ${n}) = ${n} × ${n}.`,
      lines: [[createTile("Q", q), "·", createTile("Kᵀ", transpose(k), false), "=", createTile("QKᵀ", raw)]],
      row: "its scores",
    },
    {
      title: "÷ √d",
      text: `Divided by √d_Q = √${dq} = ${formatSignificant(root, 0, 3)}, so that scores do not grow with the width.`,
      lines: [[createTile("QKᵀ", raw), `÷ ${formatSignificant(root, 0, 3)} =`, createTile("QKᵀ/√d_Q", scaled)]],
      row: "its scores",
    },
    {
      title: "softmax",
      text: `exp(sⱼ) / Σ exp(sⱼ) in each row: ${n} × ${n} weights, and each row sums to 1.`,
      lines: [[createTile("QKᵀ/√d_Q", scaled), "→", createTile("α", weights)]],
      row: "its weights",
    },
    {
      title: "S = αV",
      text:
        `The weighted sum of the values: (${n} × ${n}) · (${n} × ${dv}) = ${n} × ${dv}. ` +
        `All ${headCount} heads together: ${n} × ${headCount * dv}.`,
      lines: [[createTile("α", weights), "·", createTile("V", v), "=", createTile("S", poolValues(weights, v))]],
      row: "its output",
    },
  ];
}

export class Steps {
  readonly element: HTMLElement;
  private currentStep = 0;
  private markedWord = 0;
  private head: Head | null = null;
  private steps: Step[] = [];
  private tokens: string[] = [];
  private readonly bar = h("div", { class: "steps-bar", role: "group", "aria-label": "Steps" });
  private readonly textElement = h("p", { test: "step-says" });
  private readonly body = h("div");
  private readonly row = h("p", { class: "formula", test: "step-row" });
  private readonly readout = h("p", { class: "hint steps-readout", test: "step-readout" });

  constructor(private readonly context: ViewContext) {
    this.element = h("div", {}, this.bar, this.textElement, this.body, this.readout, this.row);
  }

  show(head: Head, tokens: string[], headCount: number, hasLayers: boolean) {
    this.head = head;
    this.tokens = tokens;
    this.steps = buildSteps(head, headCount, hasLayers);
    this.markedWord = clamp(this.markedWord, 0, tokens.length - 1);
    const showStep = (i: number) => () => {
      this.currentStep = i;
      this.draw();
      this.context.announce(this.textElement.textContent ?? "");
    };
    replaceChildren(
      this.bar,
      ...this.steps.map((step, i) =>
        h("button", { type: "button", test: `step-${i}`, on: { click: showStep(i) } }, `${i + 1}  ${step.title}`),
      ),
    );
    this.draw();
  }

  /** The word whose row is marked. */
  markWord(word: number) {
    if (word === this.markedWord || word >= this.tokens.length) return;
    this.markedWord = word;
    this.draw();
  }

  draw() {
    if (!this.head) return;
    const step = this.steps[this.currentStep];
    [...this.bar.children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === this.currentStep)));
    this.textElement.textContent = step.text;
    replaceChildren(
      this.body,
      ...step.lines.map((line) =>
        h("div", { class: "steps-line" }, ...line.map((x) => (typeof x === "string" ? h("span", { class: "steps-sign" }, x) : this.drawTile(x)))),
      ),
    );
    const lastTile = step.lines.at(-1)?.at(-1) as MatrixTile;
    const row = Array.from(lastTile.numbers?.[this.markedWord] ?? []);
    const more = row.length > 12 ? ` … (${row.length})` : "";
    this.row.textContent = `${this.tokens[this.markedWord]}, ${step.row}: ${row.slice(0, 12).map((x) => formatFixed(x)).join("  ")}${more}`;
    this.readout.textContent = "";
  }

  private drawTile(tile: MatrixTile): HTMLElement {
    const name = h("span", { class: "tile-name" }, `${tile.name}  ${tile.rows} × ${tile.cols}`);
    const width = clamp(tile.cols * CELL_PIXELS, CELL_PIXELS, MAX_MATRIX_PIXELS);
    const height = clamp(tile.rows * CELL_PIXELS, CELL_PIXELS, MAX_MATRIX_PIXELS);
    const size = { width: `${width}px`, "aspect-ratio": `${width} / ${height}` };
    if (!tile.numbers) return h("div", { class: "tile" }, h("div", { class: "learned", style: size }, "learned"), name);
    const ratio = devicePixelRatio || 1;
    const canvas = h("canvas", {
      width: String(Math.round(width * ratio)),
      height: String(Math.round(height * ratio)),
      role: "img",
      "aria-label": `${tile.name}, ${tile.rows} by ${tile.cols}`,
      style: size,
    });
    const picture = new Picture(toMatrix(tile.numbers));
    const ctx = canvas.getContext("2d") as CanvasRenderingContext2D;
    ctx.imageSmoothingEnabled = false;
    const [x, y] = [canvas.width / tile.cols, canvas.height / tile.rows];
    const levelIndex = picture.levelFor(Math.min(x, y));
    const level = picture.getCanvas(levelIndex, this.context.isDark());
    ctx.drawImage(level, 0, 0, level.width * 2 ** levelIndex * x, level.height * 2 ** levelIndex * y);
    if (tile.hasWordRows) {
      ctx.strokeStyle = getComputedStyle(this.element).getPropertyValue("accent-color") || "#000";
      ctx.lineWidth = 2 * ratio;
      ctx.strokeRect(ratio, this.markedWord * y + ratio, canvas.width - 2 * ratio, Math.max(y - 2 * ratio, 2));
    }
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const i = clamp(Math.floor(((event.clientY - box.top) / box.height) * tile.rows), 0, tile.rows - 1);
      const j = clamp(Math.floor(((event.clientX - box.left) / box.width) * tile.cols), 0, tile.cols - 1);
      const row = tile.hasWordRows ? this.tokens[i] : String(i);
      this.readout.textContent = `${tile.name}[${row}, ${j}] = ${formatSignificant(tile.numbers?.[i][j] ?? Number.NaN)}`;
    });
    return h("div", { class: "tile" }, canvas, name);
  }
}
