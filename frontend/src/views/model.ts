/** The heads of a transformer: all of them small, one of them large. */

import { bars } from "../bars";
import { css, sequential } from "../colours";
import { fixed, h } from "../dom";
import { Heatmap } from "../heatmap";
import { type Matrix, thumbnail, value } from "../picture";
import type { Given, View } from "../view";
import type { Tensor } from "../wire";

interface Heads {
  /** The layers' names. */
  names: string[];
  /** (layers, heads, rows, columns), bytes: a weight is its byte's square times its head's scale. */
  weights: Tensor;
  scale: Tensor;
  /** Nats, a row's mean; NaN where the weights are not all there. */
  entropy: Tensor;
  /** Queries and keys, of which rows and columns may be fewer. */
  queries: number;
  keys: number;
  tokens?: string[];
  note?: string;
}

const SMALL = 56;

const STYLE = `
.heads { display: grid; gap: 0.35rem; width: max-content; align-items: end; }
.heads-layer, .heads-number { color: var(--soft); font-size: 0.85rem; font-variant-numeric: tabular-nums; }
.heads-layer { align-self: center; padding-inline-end: 0.5rem; white-space: nowrap; }
.heads-number { text-align: center; }
.heads button { padding: 3px; display: grid; gap: 2px; justify-items: center; border-color: transparent; }
.heads button[aria-pressed="true"] { border-color: var(--accent); box-shadow: 0 0 0 1px var(--accent); }
.heads canvas { width: ${SMALL}px; height: ${SMALL}px; object-fit: contain; image-rendering: pixelated; background: var(--raised); }
.heads .entropy { display: inline-flex; gap: 0.3rem; align-items: center; font-size: 0.75rem; color: var(--soft); font-variant-numeric: tabular-nums; }
.heads .entropy i { width: 0.7rem; height: 0.7rem; border: 1px solid var(--line); border-radius: 2px; }
.model { display: grid; gap: 2rem; grid-template-columns: minmax(0, max-content); }
@container page (min-width: 75rem) { .model { grid-template-columns: minmax(0, max-content) minmax(24rem, 1fr); } }
.head-large { display: grid; gap: 0.75rem; align-content: start; align-self: start; min-width: 0; position: sticky; top: 1rem; }
`;

function mount(at: HTMLElement, given: Given): () => void {
  const all: Heads = given.data;
  if (!all.weights) {
    at.append(h("p", { class: "note" }, "No model was captured: qkv.transformers.capture(model), then .show()."));
    return () => at.replaceChildren();
  }
  const [layers, heads, rows, cols] = all.weights.shape;
  const size = rows * cols;
  const matrix = (layer: number, head: number): Matrix => {
    const i = layer * heads + head;
    const data = all.weights.data.subarray(i * size, (i + 1) * size);
    return { data, rows, cols, scale: all.scale.data[i], root: true };
  };
  const names = (count: number, of: number) =>
    all.tokens?.length === count
      ? all.tokens
      : count < of
        ? Array.from({ length: count }, (_, i) => String(Math.ceil((i * of) / count)))
        : undefined;
  const [rowNames, colNames] = [names(rows, all.queries), names(cols, all.keys)];
  const most = Math.log(all.keys);

  let chosen = [0, 0];
  const title = h("h3", { test: "head-title" });
  const about = h("p", { class: "note", test: "head-entropy" });
  const row = h("p", { class: "hint", test: "head-row" }, "Point at a cell, or move to it by arrow keys: its row is shown here.");
  const list = bars(8, "head-bars");
  const large = new Heatmap({
    label: "Weights of one head",
    matrix: matrix(0, 0),
    rowNames,
    colNames,
    rowTitle: "query",
    colTitle: "key",
    given,
    at,
    side: 520,
    test: "head",
    onCell: (cell) => cell && showRow(cell.row),
  });
  const showRow = (i: number) => {
    const shown = matrix(chosen[0], chosen[1]);
    row.textContent = `${rowNames?.[i] ?? `Query ${i}`} looks at`;
    list.show(
      Array.from({ length: cols }, (_, j) => ({ name: colNames?.[j] ?? String(j), weight: value(shown, i, j) })),
    );
  };

  const canvases = new Map<Element, [number, number]>();
  const draw = (canvas: Element) => {
    const [layer, head] = canvases.get(canvas) as [number, number];
    thumbnail(canvas as HTMLCanvasElement, matrix(layer, head), SMALL, given.dark());
  };
  const drawn = new Set<Element>();
  // Drawn as they come into sight: a large model has a thousand.
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting || drawn.has(target)) continue;
      drawn.add(target);
      draw(target);
    }
  });

  const buttons: HTMLButtonElement[][] = [];
  const swatches: [HTMLElement, number][] = [];
  const grid = h("div", {
    class: "heads",
    role: "group",
    "aria-label": "Heads: arrow keys move between them",
    style: { "grid-template-columns": `max-content repeat(${heads}, max-content)` },
    on: {
      keydown: (event: KeyboardEvent) => {
        const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
        if (!step) return;
        event.preventDefault();
        const layer = Math.min(Math.max(chosen[0] + step[0], 0), layers - 1);
        const head = Math.min(Math.max(chosen[1] + step[1], 0), heads - 1);
        choose(layer, head);
        buttons[layer][head].focus();
      },
    },
  });
  grid.append(h("span"), ...Array.from({ length: heads }, (_, j) => h("span", { class: "heads-number" }, String(j))));
  for (let i = 0; i < layers; i += 1) {
    grid.append(h("span", { class: "heads-layer", title: all.names[i] ?? "" }, `layer ${i}`));
    buttons.push([]);
    for (let j = 0; j < heads; j += 1) {
      const nats = all.entropy.data[i * heads + j];
      const canvas = h("canvas", { "aria-hidden": "true" });
      canvases.set(canvas, [i, j]);
      const swatch = h("i");
      swatches.push([swatch, nats]);
      const known = !Number.isNaN(nats);
      const button = h(
        "button",
        {
          type: "button",
          test: `head-${i}-${j}`,
          tabindex: "-1",
          "aria-label": `Layer ${i}, head ${j}${known ? `, entropy ${fixed(nats, 2)}` : ""}`,
          on: { click: () => choose(i, j) },
        },
        canvas,
        known && h("span", { class: "entropy" }, swatch, h("span", { test: `entropy-${i}-${j}` }, fixed(nats, 2))),
      );
      buttons[i].push(button);
      grid.append(button);
      watcher.observe(canvas);
    }
  }

  const choose = (layer: number, head: number) => {
    const [before, old] = chosen;
    buttons[before][old].setAttribute("aria-pressed", "false");
    buttons[before][old].tabIndex = -1;
    buttons[layer][head].setAttribute("aria-pressed", "true");
    buttons[layer][head].tabIndex = 0;
    chosen = [layer, head];
    const nats = all.entropy.data[layer * heads + head];
    title.textContent = `Layer ${layer}, head ${head}`;
    about.textContent = Number.isNaN(nats)
      ? "Entropy: not known, since not all weights were kept."
      : `Entropy ${fixed(nats)} of at most ${fixed(most)}: as many as ${fixed(Math.exp(nats), 1)} of ${all.keys} keys.`;
    large.update(matrix(layer, head), { rowNames, colNames, label: `Weights of layer ${layer}, head ${head}` });
    showRow(0);
    given.announce(`Layer ${layer}, head ${head}. ${about.textContent}`);
  };

  const coloured = () => {
    const table = sequential(given.dark());
    for (const [swatch, nats] of swatches) swatch.style.setProperty("background", css(table, nats / most));
  };
  const themed = () => {
    coloured();
    drawn.forEach(draw);
  };
  at.addEventListener("theme", themed);
  coloured();

  at.append(
    h("h2", {}, "What the heads look at"),
    h(
      "p",
      { class: "note", test: "model-about" },
      `${layers} layers × ${heads} heads, ${all.queries} queries × ${all.keys} keys. `,
      "Each picture has its own scale, from 0 to its largest weight. Below it: the entropy of a row, in the mean, ",
      "from 0 (one key) to ",
      fixed(most, 2),
      ` (all ${all.keys} alike).`,
      all.note ? ` ${all.note}` : "",
    ),
    h(
      "div",
      { class: "model" },
      h("div", { class: "scroll" }, grid),
      h("div", { class: "head-large" }, h("div", {}, title, about), large.element, h("div", {}, row, list.element)),
    ),
  );
  choose(0, 0);
  return () => {
    watcher.disconnect();
    large.destroy();
    at.removeEventListener("theme", themed);
    at.replaceChildren();
  };
}

export const view: View = { name: "model", title: "Model", style: STYLE, mount };
