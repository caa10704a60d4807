/** The view Sentence: self-attention of a sentence, head by head and step by step. */

import { h, labelled, select } from "../dom";
import { entropy } from "../equation";
import { STYLE as HEADS, grid } from "../heads";
import { Heatmap } from "../heatmap";
import { counted } from "../numbers";
import { Links, STYLE as LINKS, type Way } from "../sentence/links";
import { MOST, type Read, type Rows, type Wired, byHand, merged, wired } from "../sentence/read";
import { STYLE as STEPS, Steps, flat } from "../sentence/steps";
import type { Given, View } from "../view";

const EXAMPLES = [
  "I like Natural Language Processing, a lot!",
  "When he saw his owner, the dog was happy, so he wagged his tail.",
];

const STYLE = `${HEADS}${LINKS}${STEPS}
.sentence-input { grid-column: 1 / -1; }
.sentence { display: grid; gap: 2rem 3rem; grid-template-columns: minmax(0, 1fr); margin-bottom: 2.5rem; }
@container page (min-width: 62rem) { .sentence { grid-template-columns: minmax(0, 1fr) minmax(0, 1.15fr); } }
.sentence > div { display: grid; gap: 0.75rem; align-content: start; min-width: 0; }
.sentence-pieces { display: flex; gap: 0.5rem; align-items: center; padding-bottom: 0.4rem; }
@container page (min-width: 36rem) { .sentence-model, .sentence-pieces { grid-column: span 2; } }
.steps { accent-color: var(--accent); margin-top: 1.5rem; }
`;

function mount(at: HTMLElement, given: Given): () => void {
  const kept: Read | null = given.data.read ? wired(given.data.read as Wired) : null;
  let text: string = given.data.text ?? EXAMPLES[0];
  let read = kept ?? byHand(text);
  let chosen = read.first;
  let whole = true;
  let asked = 0;

  const input = h("input", {
    type: "text",
    value: text,
    maxlength: "600",
    test: "sentence",
    on: { input: () => read.model === "hand" && start(), change: () => start() },
  });
  const fail = h("p", { class: "error", role: "alert", test: "sentence-error", hidden: true });
  const models: [string, string][] = [["hand", "Four hand-written heads"]];
  if (given.backend || kept) models.push(["minilm", "MiniLM: 6 layers × 12 heads"]);
  const model = select(models, kept ? "minilm" : "hand", () => start(), { test: "sentence-model" });
  const examples = select(
    [["", "choose …"], ...EXAMPLES.map((x): [string, string] => [x, x])],
    "",
    (value) => {
      if (!value) return;
      input.value = value;
      start();
    },
    { test: "sentence-examples" },
  );
  const merge = h("input", {
    type: "checkbox",
    checked: true,
    test: "sentence-merge",
    on: { change: () => ((whole = merge.checked), draw()) },
  });
  const pieces = h("label", { class: "sentence-pieces", hidden: true }, merge, "Merge sub-tokens into words: rows averaged, columns summed");
  const ways: [Way, string][] = [["to", "attends to (row)"], ["from", "is attended by (column)"]]; // prettier-ignore
  const way = select(ways, "to", (value) => {
    links.way = value as Way;
    links.draw();
  }, { test: "sentence-way" }); // prettier-ignore
  const about = h("p", { class: "note", test: "sentence-about" });
  const headTitle = h("h3", { test: "head-title" });
  const gridBox = h("div", { class: "scroll" });
  let small: { element: HTMLElement; destroy(): void } | null = null;

  const names = () => (whole ? read.words : read.tokens);
  const alpha = (i: number): Rows =>
    whole ? merged(read.heads[i].weights, read.groups, read.words.length) : read.heads[i].weights;

  const steps = new Steps(given);
  const links = new Links(given, ([first]) => {
    if (first === undefined) return;
    steps.point(whole ? read.groups.indexOf(first) : first);
  });
  const large = new Heatmap({
    label: "Weights from word to word",
    matrix: flat(alpha(0)),
    rowTitle: "query",
    colTitle: "key",
    given,
    at,
    side: 520,
    test: "map",
  });

  const choose = (i: number) => {
    chosen = i;
    const head = read.heads[i];
    headTitle.textContent = read.layered ? `Head: ${head.name}` : `Head ${i + 1}: ${head.name}`;
    const weights = alpha(i);
    large.update(flat(weights), { rowNames: names(), colNames: names(), label: `Weights of ${head.name}` });
    links.show(names(), weights);
    steps.show(head, read.tokens, read.across, read.layered);
    steps.point(whole ? read.groups.indexOf(links.current[0]) : links.current[0]);
  };

  const draw = () => {
    small?.destroy();
    const { across, layered, heads, tokens, words } = read;
    if (!tokens.length) return;
    const each = heads.map((_, i) => alpha(i));
    small = grid({
      rows: layered ? Array.from({ length: heads.length / across }, (_, i) => `layer ${i}`) : [""],
      cols: layered ? Array.from({ length: across }, (_, j) => String(j)) : heads.map((head) => head.name),
      matrix: (i, j) => ({ ...flat(each[i * across + j]), root: true }),
      entropy: (i, j) => each[i * across + j].reduce((sum, row) => sum + entropy(row), 0) / names().length,
      most: Math.log(Math.max(names().length, 2)),
      label: (i, j) => heads[i * across + j].name,
      choose: (i, j) => choose(i * across + j),
      start: [Math.floor(chosen / across), chosen % across],
      side: layered ? 36 : undefined,
      given,
      at,
    });
    gridBox.replaceChildren(small.element);
    pieces.hidden = words.length === tokens.length;
    about.textContent = layered
      ? `${counted(tokens.length, "token")}, ${counted(words.length, "word")} in ${read.model}.`
      : `${counted(tokens.length, "word")}. X holds the spelling of each word (16 numbers) and its position (8). The projections are written by hand; those of the last head are random, as before training.`;
    choose(chosen);
  };

  /** Shows another result; the chosen head stays if the model is the same. */
  const turn = (to: Read) => {
    if (to.model !== read.model) chosen = to.first;
    read = to;
    draw();
  };

  const tell = (error: string) => {
    fail.hidden = !error;
    fail.textContent = error;
  };

  /** Computes the chosen model: in the page, or in Python. */
  async function start() {
    text = input.value;
    const mine = ++asked;
    tell("");
    if (model.value === "hand") {
      const found = byHand(text);
      if (!found.tokens.length) return tell("Type at least one word.");
      if (found.tokens.length === MOST) tell(`Only the first ${MOST} words are used.`);
      input.disabled = false;
      return turn(found);
    }
    if (!given.backend) {
      // A file has the result for one sentence, and cannot run the model again.
      input.value = given.data.text;
      input.disabled = true;
      return turn(kept as Read);
    }
    about.textContent = "Waiting for the model …";
    try {
      const found = wired(await given.backend.call("sentence", { text }));
      if (mine !== asked) return;
      turn(found);
    } catch (error) {
      if (mine === asked) tell((error as Error).message);
    }
  }

  const how = h("div", { class: "steps" }, h("h3", {}, "Step by step: S = softmax(QKᵀ / √d_Q) V"), steps.element);
  const themed = () => steps.draw();
  at.addEventListener("theme", themed);
  at.append(
    h("h2", {}, "Self-attention of a sentence"),
    h(
      "div",
      { class: "controls" },
      h("div", { class: "sentence-input" }, labelled("Sentence", input)),
      labelled("Examples", examples),
      h("div", { class: "sentence-model" }, labelled("Model", model)),
      labelled("Each word", way),
      pieces,
    ),
    fail,
    about,
    h(
      "div",
      { class: "sentence" },
      h("div", {}, links.title, links.element, links.sum, h("p", { class: "hint" }, "Point at a word, or use the arrow keys. Click several words to add their weights."), how),
      h("div", {}, headTitle, gridBox, h("p", { class: "hint" }, "The number below each picture is the mean entropy of its rows."), large.element),
    ),
  );
  if (kept && !given.backend) input.disabled = true;
  draw();
  return () => {
    asked += 1;
    small?.destroy();
    large.destroy();
    at.removeEventListener("theme", themed);
    at.replaceChildren();
  };
}

export const view: View = { name: "sentence", title: "Sentence", style: STYLE, mount };
