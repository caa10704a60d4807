/** The view Model: the heads of a transformer, all of them small and one of them large. */

import { bars } from "../bars";
import { fixed, h, labelled } from "../dom";
import { STYLE as HEADS, grid } from "../heads";
import { Heatmap } from "../heatmap";
import { type Matrix, value } from "../picture";
import type { Given, View } from "../view";
import { type Tensor, part } from "../wire";

interface Heads {
  /** The layers' names. */
  names: string[];
  /** Bytes (layers, heads, rows, columns): a weight is byte² × the scale of its head. */
  weights: Tensor;
  /** The heads reduced to at most 64 × 64: the maximum of each block. */
  small: Tensor;
  scale: Tensor;
  /** The mean entropy of the rows in nats; NaN if not all weights were captured. */
  entropy: Tensor;
  /** The numbers of queries and keys; there may be fewer rows and columns. */
  queries: number;
  keys: number;
  tokens?: string[];
  note?: string;
}

const STYLE = `${HEADS}
.model-ask { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 0.75rem; align-items: end; margin-bottom: 1rem; }
@container page (max-width: 32rem) { .model-ask { grid-template-columns: minmax(0, 1fr); } }
.model { display: grid; gap: 2rem; grid-template-columns: minmax(0, max-content); }
@container page (min-width: 75rem) { .model { grid-template-columns: minmax(0, max-content) minmax(24rem, 1fr); } }
.head-large { display: grid; gap: 0.75rem; align-content: start; align-self: start; min-width: 0; position: sticky; top: 1rem; }
`;

/** Without a captured model: asks Python for the heads of the bundled MiniLM for a sentence. */
function asking(at: HTMLElement, given: Given): () => void {
  const note = "No model was captured. In Python: with qkv.transformers.capture(model) as heads: …, then heads.show().";
  if (!given.backend) {
    at.append(h("p", { class: "note" }, note));
    return () => at.replaceChildren();
  }
  const { backend } = given;
  let undo = () => {};
  const found = h("div");
  const trouble = h("p", { class: "note", role: "status", test: "model-status" });
  const text = h("input", { type: "text", test: "model-text", value: "The animal did not cross the street because it was tired." });
  let asked = 0;
  const read = async () => {
    const mine = ++asked;
    if (text.value.trim() === "") {
      trouble.textContent = "Type a sentence first.";
      return;
    }
    trouble.textContent = "Waiting for MiniLM …";
    try {
      const data = await backend.call("model", { text: text.value });
      if (mine !== asked) return;
      undo();
      found.replaceChildren();
      undo = mount(found, { ...given, data });
      trouble.textContent = "";
    } catch (error) {
      if (mine === asked) trouble.textContent = error instanceof Error ? error.message : String(error);
    }
  };
  const form = h(
    "form",
    {
      class: "model-ask",
      on: {
        submit: (event: Event) => {
          event.preventDefault();
          void read();
        },
      },
    },
    labelled("Sentence", text),
    h("button", { class: "main", test: "model-read" }, "Show the heads of MiniLM"),
  );
  at.append(form, trouble, found);
  // On a server the example is shown at once; in a notebook only on request.
  if (given.host === "server") void read();
  const themed = () => found.dispatchEvent(new CustomEvent("theme"));
  at.addEventListener("theme", themed);
  return () => {
    asked += 1;
    undo();
    at.removeEventListener("theme", themed);
    at.replaceChildren();
  };
}

function mount(at: HTMLElement, given: Given): () => void {
  const all: Heads = given.data;
  if (!all.weights) return asking(at, given);
  const [layers, heads, rows, cols] = all.weights.shape;
  const matrix = async (layer: number, head: number): Promise<Matrix> => {
    const i = layer * heads + head;
    const data = await part(all.weights, i * rows * cols, (i + 1) * rows * cols);
    return { data, rows, cols, scale: all.scale.data[i], root: true };
  };
  const small = (layer: number, head: number): Matrix => {
    const [rows, cols] = all.small.shape.slice(2);
    const i = layer * heads + head;
    const data = all.small.data.subarray(i * rows * cols, (i + 1) * rows * cols);
    return { data, rows, cols, scale: all.scale.data[i], root: true };
  };
  const names = (count: number, of: number) => {
    if (all.tokens?.length === count) return all.tokens;
    if (count === of) return undefined;
    return Array.from({ length: count }, (_, i) => String(Math.ceil((i * of) / count)));
  };
  const [rowNames, colNames] = [names(rows, all.queries), names(cols, all.keys)];
  const most = Math.log(all.keys);
  const entropy = (layer: number, head: number) => all.entropy.data[layer * heads + head];

  let chosen = small(0, 0);
  let asked = 0;
  const title = h("h3", { test: "head-title" });
  const about = h("p", { class: "note", test: "head-entropy" });
  const whose = h("p", { class: "hint", test: "head-row" });
  const list = bars(8, "head-bars");
  const row = (i: number) => {
    whose.textContent = `${rowNames ? `“${rowNames[i]}”` : `Query ${i}`} attends to`;
    const name = (j: number) => colNames?.[j] ?? String(j);
    list.show(Array.from({ length: cols }, (_, j) => ({ name: name(j), weight: value(chosen, i, j) })));
  };
  const large = new Heatmap({
    label: "Weights of one head",
    matrix: chosen,
    rowNames,
    colNames,
    rowTitle: "query",
    colTitle: "key",
    given,
    at,
    side: 520,
    test: "head",
    onCell: (cell) => cell && row(cell.row),
  });
  const choose = async (layer: number, head: number) => {
    const mine = ++asked;
    const nats = entropy(layer, head);
    title.textContent = `Layer ${layer}, head ${head}`;
    about.textContent = Number.isNaN(nats)
      ? "Entropy: unknown, because not all weights were captured."
      : `Entropy ${fixed(nats)} of at most ${fixed(most)}: about ${fixed(Math.exp(nats), 1)} of ${all.keys} keys.`;
    const found = await matrix(layer, head);
    if (mine !== asked) return;
    chosen = found;
    large.update(chosen, { rowNames, colNames, label: `Weights of layer ${layer}, head ${head}` });
    row(0);
  };
  const pictures = grid({
    rows: Array.from({ length: layers }, (_, i) => `layer ${i}`),
    cols: Array.from({ length: heads }, (_, j) => String(j)),
    matrix: small,
    entropy,
    most,
    label: (layer, head) => `Layer ${layer}, head ${head}`,
    choose: (layer, head) => {
      void choose(layer, head);
      given.announce(`${title.textContent}. ${about.textContent}`);
    },
    given,
    at,
  });

  const sentences = [
    `${layers} layers × ${heads} heads, ${all.queries} queries × ${all.keys} keys.`,
    "Each picture has its own scale, from 0 to its largest weight. The number below it is the mean entropy of its rows,",
    `from 0 (one key) to ${fixed(most, 2)} (all ${all.keys} keys equally).`,
    all.note ?? "",
  ];
  at.append(
    h("h2", {}, "Attention weights of all heads"),
    h("p", { class: "note", test: "model-about" }, sentences.join(" ")),
    h(
      "div",
      { class: "model" },
      h("div", { class: "scroll" }, pictures.element),
      h("div", { class: "head-large" }, h("div", {}, title, about), large.element, h("div", {}, whose, list.element)),
    ),
  );
  void choose(0, 0);
  return () => {
    asked += 1;
    pictures.destroy();
    large.destroy();
    at.replaceChildren();
  };
}

export const view: View = { name: "model", title: "Model", style: STYLE, mount };
