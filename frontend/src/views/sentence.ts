/** The view Sentence: self-attention of a sentence, head by head and step by step. */

import { h, createField, createSelect } from "../dom";
import { computeEntropy } from "../equation";
import { STYLE as HEADS_STYLE, createHeadGrid } from "../heads";
import { Heatmap } from "../heatmap";
import { formatCount } from "../numbers";
import { Links, STYLE as LINKS_STYLE, type Direction } from "../sentence/links";
import { MAX_WORDS, type Activations, type Rows, type WireActivations, computeByHand, mergeTokens, decodeActivations } from "../sentence/activations";
import { STYLE as STEPS_STYLE, Steps, toMatrix } from "../sentence/steps";
import type { ViewContext, View } from "../view";

const EXAMPLES = [
  "I like Natural Language Processing, a lot!",
  "When he saw his owner, the dog was happy, so he wagged his tail.",
];

const STYLE = `${HEADS_STYLE}${LINKS_STYLE}${STEPS_STYLE}
.sentence-input { grid-column: 1 / -1; }
.sentence { display: grid; gap: 2rem 3rem; grid-template-columns: minmax(0, 1fr); margin-bottom: 2.5rem; }
@container page (min-width: 62rem) { .sentence { grid-template-columns: minmax(0, 1fr) minmax(0, 1.15fr); } }
.sentence > div { display: grid; gap: 0.75rem; align-content: start; min-width: 0; }
.sentence-pieces { display: flex; gap: 0.5rem; align-items: center; padding-bottom: 0.4rem; }
@container page (min-width: 36rem) { .sentence-model, .sentence-pieces { grid-column: span 2; } }
.steps { accent-color: var(--accent); margin-top: 1.5rem; }
`;

function mount(container: HTMLElement, context: ViewContext): () => void {
  const captured: Activations | null = context.data.read ? decodeActivations(context.data.read as WireActivations) : null;
  let text: string = context.data.text ?? EXAMPLES[0];
  let activations = captured ?? computeByHand(text);
  let selectedHead = activations.first;
  let mergesTokens = true;
  let lastRequest = 0;

  const input = h("input", {
    type: "text",
    value: text,
    maxlength: "600",
    test: "sentence",
    on: { input: () => activations.model === "hand" && computeActivations(), change: () => computeActivations() },
  });
  const errorText = h("p", { class: "error", role: "alert", test: "sentence-error", hidden: true });
  const models: [string, string][] = [["hand", "Four hand-written heads"]];
  if (context.backend || captured) models.push(["minilm", "MiniLM: 6 layers × 12 heads"]);
  const model = createSelect(models, captured ? "minilm" : "hand", () => computeActivations(), { test: "sentence-model" });
  const examples = createSelect(
    [["", "choose …"], ...EXAMPLES.map((x): [string, string] => [x, x])],
    "",
    (value) => {
      if (!value) return;
      input.value = value;
      computeActivations();
    },
    { test: "sentence-examples" },
  );
  const mergeBox = h("input", {
    type: "checkbox",
    checked: true,
    test: "sentence-merge",
    on: { change: () => ((mergesTokens = mergeBox.checked), draw()) },
  });
  const mergeLabel = h("label", { class: "sentence-pieces", hidden: true }, mergeBox, "Merge sub-tokens into words: rows averaged, columns summed");
  const directions: [Direction, string][] = [["to", "attends to (row)"], ["from", "is attended by (column)"]]; // prettier-ignore
  const directionSelect = createSelect(directions, "to", (value) => {
    links.direction = value as Direction;
    links.draw();
  }, { test: "sentence-way" }); // prettier-ignore
  const note = h("p", { class: "note", test: "sentence-about" });
  const headTitle = h("h3", { test: "head-title" });
  const gridBox = h("div", { class: "scroll" });
  let headGrid: { element: HTMLElement; destroy(): void } | null = null;

  const getNames = () => (mergesTokens ? activations.words : activations.tokens);
  const getWeights = (i: number): Rows =>
    mergesTokens ? mergeTokens(activations.heads[i].weights, activations.groups, activations.words.length) : activations.heads[i].weights;

  const steps = new Steps(context);
  const links = new Links(context, ([first]) => {
    if (first === undefined) return;
    steps.markWord(mergesTokens ? activations.groups.indexOf(first) : first);
  });
  const heatmap = new Heatmap({
    label: "Weights from word to word",
    matrix: toMatrix(getWeights(0)),
    rowTitle: "query",
    colTitle: "key",
    context,
    viewElement: container,
    side: 520,
    test: "map",
  });

  const selectHead = (i: number) => {
    selectedHead = i;
    const head = activations.heads[i];
    headTitle.textContent = activations.hasLayers ? `Head: ${head.name}` : `Head ${i + 1}: ${head.name}`;
    const weights = getWeights(i);
    heatmap.update(toMatrix(weights), { rowNames: getNames(), colNames: getNames(), label: `Weights of ${head.name}` });
    links.show(getNames(), weights);
    steps.show(head, activations.tokens, activations.headsPerLayer, activations.hasLayers);
    steps.markWord(mergesTokens ? activations.groups.indexOf(links.current[0]) : links.current[0]);
  };

  const draw = () => {
    headGrid?.destroy();
    const { headsPerLayer: across, hasLayers: layered, heads, tokens, words } = activations;
    if (!tokens.length) return;
    const headWeights = heads.map((_, i) => getWeights(i));
    headGrid = createHeadGrid({
      rows: layered ? Array.from({ length: heads.length / across }, (_, i) => `layer ${i}`) : [""],
      cols: layered ? Array.from({ length: across }, (_, j) => String(j)) : heads.map((head) => head.name),
      getMatrix: (i, j) => ({ ...toMatrix(headWeights[i * across + j]), hasRootScale: true }),
      getEntropy: (i, j) => headWeights[i * across + j].reduce((sum, row) => sum + computeEntropy(row), 0) / getNames().length,
      maxEntropy: Math.log(Math.max(getNames().length, 2)),
      getLabel: (i, j) => heads[i * across + j].name,
      onChoose: (i, j) => selectHead(i * across + j),
      initialHead: [Math.floor(selectedHead / across), selectedHead % across],
      side: layered ? 36 : undefined,
      context,
      viewElement: container,
    });
    gridBox.replaceChildren(headGrid.element);
    mergeLabel.hidden = words.length === tokens.length;
    note.textContent = layered
      ? `${formatCount(tokens.length, "token")}, ${formatCount(words.length, "word")} in ${activations.model}.`
      : `${formatCount(tokens.length, "word")}. X holds the spelling of each word (16 numbers) and its position (8). The projections are written by hand; those of the last head are random, as before training.`;
    selectHead(selectedHead);
  };

  /** Shows another result; the chosen head stays if the model is the same. */
  const showActivations = (next: Activations) => {
    if (next.model !== activations.model) selectedHead = next.first;
    activations = next;
    draw();
  };

  const showError = (error: string) => {
    errorText.hidden = !error;
    errorText.textContent = error;
  };

  /** Computes the chosen model: in the page, or in Python. */
  async function computeActivations() {
    text = input.value;
    const request = ++lastRequest;
    showError("");
    if (model.value === "hand") {
      const result = computeByHand(text);
      if (!result.tokens.length) return showError("Type at least one word.");
      if (result.tokens.length === MAX_WORDS) showError(`Only the first ${MAX_WORDS} words are used.`);
      input.disabled = false;
      return showActivations(result);
    }
    if (!context.backend) {
      // A file has the result for one sentence, and cannot run the model again.
      input.value = context.data.text;
      input.disabled = true;
      return showActivations(captured as Activations);
    }
    note.textContent = "Waiting for the model …";
    try {
      const result = decodeActivations(await context.backend.call("sentence", { text }));
      if (request !== lastRequest) return;
      showActivations(result);
    } catch (error) {
      if (request === lastRequest) showError((error as Error).message);
    }
  }

  const stepsSection = h("div", { class: "steps" }, h("h3", {}, "Step by step: S = softmax(QKᵀ / √d_Q) V"), steps.element);
  const redrawSteps = () => steps.draw();
  container.addEventListener("theme", redrawSteps);
  container.append(
    h("h2", {}, "Self-attention of a sentence"),
    h(
      "div",
      { class: "controls" },
      h("div", { class: "sentence-input" }, createField("Sentence", input)),
      createField("Examples", examples),
      h("div", { class: "sentence-model" }, createField("Model", model)),
      createField("Each word", directionSelect),
      mergeLabel,
    ),
    errorText,
    note,
    h(
      "div",
      { class: "sentence" },
      h("div", {}, links.title, links.element, links.sum, h("p", { class: "hint" }, "Point at a word, or use the arrow keys. Click several words to add their weights."), stepsSection),
      h("div", {}, headTitle, gridBox, h("p", { class: "hint" }, "The number below each picture is the mean entropy of its rows."), heatmap.element),
    ),
  );
  if (captured && !context.backend) input.disabled = true;
  draw();
  return () => {
    lastRequest += 1;
    headGrid?.destroy();
    heatmap.destroy();
    container.removeEventListener("theme", redrawSteps);
    container.replaceChildren();
  };
}

export const view: View = { name: "sentence", title: "Sentence", style: STYLE, mount };
