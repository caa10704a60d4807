/** The view Model: the heads of a transformer, all of them small and one of them large. */

import { createBars } from "../bars";
import { formatFixed, h, createField } from "../dom";
import { STYLE as HEADS_STYLE, createHeadGrid } from "../heads";
import { Heatmap } from "../heatmap";
import { type Matrix, readValue } from "../picture";
import type { ViewContext, View } from "../view";
import { type Tensor, loadPart } from "../wire";

interface HeadsData {
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

const STYLE = `${HEADS_STYLE}
.model-ask { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 0.75rem; align-items: end; margin-bottom: 1rem; }
@container page (max-width: 32rem) { .model-ask { grid-template-columns: minmax(0, 1fr); } }
.model { display: grid; gap: 2rem; grid-template-columns: minmax(0, max-content); }
@container page (min-width: 75rem) { .model { grid-template-columns: minmax(0, max-content) minmax(24rem, 1fr); } }
.head-large { display: grid; gap: 0.75rem; align-content: start; align-self: start; min-width: 0; position: sticky; top: 1rem; }
`;

/** Without a captured model: asks Python for the heads of the bundled MiniLM for a sentence. */
function mountModelForm(container: HTMLElement, context: ViewContext): () => void {
  const note = "No model was captured. In Python: with qkv.transformers.capture(model) as heads: …, then heads.show().";
  if (!context.backend) {
    container.append(h("p", { class: "note" }, note));
    return () => container.replaceChildren();
  }
  const { backend } = context;
  let unmount = () => {};
  const result = h("div");
  const status = h("p", { class: "note", role: "status", test: "model-status" });
  const text = h("input", { type: "text", test: "model-text", value: "The animal did not cross the street because it was tired." });
  let lastRequest = 0;
  const fetchHeads = async () => {
    const request = ++lastRequest;
    if (text.value.trim() === "") {
      status.textContent = "Type a sentence first.";
      return;
    }
    status.textContent = "Waiting for MiniLM …";
    try {
      const data = await backend.call("model", { text: text.value });
      if (request !== lastRequest) return;
      unmount();
      result.replaceChildren();
      unmount = mount(result, { ...context, data });
      status.textContent = "";
    } catch (error) {
      if (request === lastRequest) status.textContent = error instanceof Error ? error.message : String(error);
    }
  };
  const form = h(
    "form",
    {
      class: "model-ask",
      on: {
        submit: (event: Event) => {
          event.preventDefault();
          void fetchHeads();
        },
      },
    },
    createField("Sentence", text),
    h("button", { class: "main", test: "model-read" }, "Show the heads of MiniLM"),
  );
  container.append(form, status, result);
  // On a server the example is shown at once; in a notebook only on request.
  if (context.host === "server") void fetchHeads();
  const forwardTheme = () => result.dispatchEvent(new CustomEvent("theme"));
  container.addEventListener("theme", forwardTheme);
  return () => {
    lastRequest += 1;
    unmount();
    container.removeEventListener("theme", forwardTheme);
    container.replaceChildren();
  };
}

function mount(container: HTMLElement, context: ViewContext): () => void {
  const headsData: HeadsData = context.data;
  if (!headsData.weights) return mountModelForm(container, context);
  const [layers, heads, rows, cols] = headsData.weights.shape;
  const getMatrix = async (layer: number, head: number): Promise<Matrix> => {
    const i = layer * heads + head;
    const data = await loadPart(headsData.weights, i * rows * cols, (i + 1) * rows * cols);
    return { data, rows, cols, scale: headsData.scale.data[i], hasRootScale: true };
  };
  const getThumbnail = (layer: number, head: number): Matrix => {
    const [rows, cols] = headsData.small.shape.slice(2);
    const i = layer * heads + head;
    const data = headsData.small.data.subarray(i * rows * cols, (i + 1) * rows * cols);
    return { data, rows, cols, scale: headsData.scale.data[i], hasRootScale: true };
  };
  const getNames = (count: number, total: number) => {
    if (headsData.tokens?.length === count) return headsData.tokens;
    if (count === total) return undefined;
    return Array.from({ length: count }, (_, i) => String(Math.ceil((i * total) / count)));
  };
  const [rowNames, colNames] = [getNames(rows, headsData.queries), getNames(cols, headsData.keys)];
  const maxEntropy = Math.log(headsData.keys);
  const getEntropy = (layer: number, head: number) => headsData.entropy.data[layer * heads + head];

  let selectedMatrix = getThumbnail(0, 0);
  let lastRequest = 0;
  const title = h("h3", { test: "head-title" });
  const entropyText = h("p", { class: "note", test: "head-entropy" });
  const rowCaption = h("p", { class: "hint", test: "head-row" });
  const barList = createBars(8, "head-bars");
  const showRow = (i: number) => {
    rowCaption.textContent = `${rowNames ? `“${rowNames[i]}”` : `Query ${i}`} attends to`;
    const getName = (j: number) => colNames?.[j] ?? String(j);
    barList.show(Array.from({ length: cols }, (_, j) => ({ name: getName(j), weight: readValue(selectedMatrix, i, j) })));
  };
  const heatmap = new Heatmap({
    label: "Weights of one head",
    matrix: selectedMatrix,
    rowNames,
    colNames,
    rowTitle: "query",
    colTitle: "key",
    context,
    viewElement: container,
    side: 520,
    test: "head",
    onCell: (cell) => cell && showRow(cell.row),
  });
  const selectHead = async (layer: number, head: number) => {
    const request = ++lastRequest;
    const nats = getEntropy(layer, head);
    title.textContent = `Layer ${layer}, head ${head}`;
    entropyText.textContent = Number.isNaN(nats)
      ? "Entropy: unknown, because not all weights were captured."
      : `Entropy ${formatFixed(nats)} of at most ${formatFixed(maxEntropy)}: about ${formatFixed(Math.exp(nats), 1)} of ${headsData.keys} keys.`;
    const loaded = await getMatrix(layer, head);
    if (request !== lastRequest) return;
    selectedMatrix = loaded;
    heatmap.update(selectedMatrix, { rowNames, colNames, label: `Weights of layer ${layer}, head ${head}` });
    showRow(0);
  };
  const headGrid = createHeadGrid({
    rows: Array.from({ length: layers }, (_, i) => `layer ${i}`),
    cols: Array.from({ length: heads }, (_, j) => String(j)),
    getMatrix: getThumbnail,
    getEntropy,
    maxEntropy,
    getLabel: (layer, head) => `Layer ${layer}, head ${head}`,
    onChoose: (layer, head) => {
      void selectHead(layer, head);
      context.announce(`${title.textContent}. ${entropyText.textContent}`);
    },
    context,
    viewElement: container,
  });

  const sentences = [
    `${layers} layers × ${heads} heads, ${headsData.queries} queries × ${headsData.keys} keys.`,
    "Each picture has its own scale, from 0 to its largest weight. The number below it is the mean entropy of its rows,",
    `from 0 (one key) to ${formatFixed(maxEntropy, 2)} (all ${headsData.keys} keys equally).`,
    headsData.note ?? "",
  ];
  container.append(
    h("h2", {}, "Attention weights of all heads"),
    h("p", { class: "note", test: "model-about" }, sentences.join(" ")),
    h(
      "div",
      { class: "model" },
      h("div", { class: "scroll" }, headGrid.element),
      h("div", { class: "head-large" }, h("div", {}, title, entropyText), heatmap.element, h("div", {}, rowCaption, barList.element)),
    ),
  );
  void selectHead(0, 0);
  return () => {
    lastRequest += 1;
    headGrid.destroy();
    heatmap.destroy();
    container.replaceChildren();
  };
}

export const view: View = { name: "model", title: "Model", style: STYLE, mount };
