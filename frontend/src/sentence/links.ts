/** Words on the left and on the right, with lines and weights between the chosen words and all words. */

import { formatBarWidth } from "../bars";
import { formatFixed, h, replaceChildren, s } from "../dom";
import { clamp } from "../numbers";
import type { ViewContext } from "../view";
import type { Rows } from "./activations";

export type Direction = "to" | "from";

const ROW_PIXELS = 30;

export const STYLE = `
.links { display: grid; grid-template-columns: minmax(3rem, max-content) minmax(2rem, 9rem) minmax(0, 1fr); column-gap: 0.5rem; grid-auto-rows: ${ROW_PIXELS}px; max-width: 44rem; }
.links > * { min-width: 0; }
.links button { border-color: transparent; padding: 0 0.5rem; text-align: end; grid-column: 1; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; max-width: 11rem; }
.links button:hover { background: var(--wash); }
.links button[aria-pressed="true"] { background: var(--wash); border-color: var(--accent); font-weight: 600; }
.links svg { grid-column: 2; grid-row: 1 / -1; width: 100%; height: 100%; overflow: visible; }
.links line { stroke: var(--accent); stroke-linecap: round; vector-effect: non-scaling-stroke; }
.links-key { grid-column: 3; display: grid; grid-template-columns: minmax(2.5rem, 7rem) minmax(1rem, 1fr) 3.5rem; gap: 0.6rem; align-items: center; }
@container page (max-width: 36rem) {
  .links { grid-template-columns: minmax(3rem, 7rem) minmax(2rem, 1fr) minmax(0, 9.5rem); }
  .links-key { grid-template-columns: minmax(0, 1fr) 3.2rem; }
  .links-key .bar { display: none; }
}
.links-key > span:first-child { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
`;

export class Links {
  readonly element: HTMLElement;
  readonly title = h("h3", { test: "links-title" });
  readonly sum = h("p", { class: "hint", test: "links-sum" });
  direction: Direction = "to";
  private names: string[] = [];
  private alpha: Rows = [];
  private selectedWords = new Set<number>([0]);
  private hoveredWord: number | null = null;
  private wordButtons: HTMLButtonElement[] = [];
  private keyCells: { bar: HTMLElement; number: HTMLElement }[] = [];
  private lines = s("svg", { preserveAspectRatio: "none", "aria-hidden": "true" });

  /** `onChange` is called with the selected words. */
  constructor(
    private readonly context: ViewContext,
    private readonly onChange: (words: number[]) => void,
  ) {
    this.element = h("div", { class: "links", on: { keydown: (event) => this.handleKey(event) } });
  }

  /** Shows other words and chooses the first one, or shows other weights of the same words. */
  show(names: string[], alpha: Rows) {
    this.alpha = alpha;
    if (names.length !== this.names.length || names.some((name, i) => name !== this.names[i])) {
      this.names = names;
      this.selectedWords = new Set(names.length ? [0] : []);
      this.hoveredWord = null;
      this.rebuild();
    }
    this.draw();
  }

  get current(): number[] {
    return this.hoveredWord === null ? [...this.selectedWords].sort((a, b) => a - b) : [this.hoveredWord];
  }

  private rebuild() {
    const hoverWord = (i: number | null) => () => {
      this.hoveredWord = i;
      this.draw();
    };
    this.wordButtons = this.names.map((name, i) =>
      h(
        "button",
        {
          type: "button",
          title: name,
          test: `word-${i}`,
          on: {
            click: () => this.toggleWord(i),
            mouseenter: hoverWord(i),
            mouseleave: hoverWord(null),
            focus: hoverWord(i),
            blur: hoverWord(null),
          },
          style: { "grid-row": String(i + 1) },
        },
        name,
      ),
    );
    this.keyCells = [];
    const keys = this.names.map((name, j) => {
      const [bar, number] = [h("i"), h("span", { class: "number", test: `weight-${j}` })];
      this.keyCells.push({ bar, number });
      const style = { "grid-row": String(j + 1) };
      return h("div", { class: "links-key", style }, h("span", { title: name }, name), h("span", { class: "bar" }, bar), number);
    });
    this.lines.setAttribute("viewBox", `0 0 1 ${Math.max(this.names.length, 1)}`);
    this.lines.style.setProperty("grid-row", `1 / span ${Math.max(this.names.length, 1)}`);
    replaceChildren(this.element, ...this.wordButtons, this.lines, ...keys);
  }

  private toggleWord(i: number) {
    if (!this.selectedWords.delete(i)) this.selectedWords.add(i);
    if (!this.selectedWords.size) this.selectedWords.add(i);
    // A click shows the chosen words, not the word below the pointer.
    this.hoveredWord = null;
    this.draw();
    this.context.announce(`${this.title.textContent}: ${this.describeHeaviest()}`);
  }

  private handleKey(event: KeyboardEvent) {
    const offset = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const index = this.wordButtons.indexOf(event.target as HTMLButtonElement);
    if (!offset || index < 0) return;
    event.preventDefault();
    this.wordButtons[clamp(index + offset, 0, this.wordButtons.length - 1)].focus();
    this.context.announce(`${this.title.textContent}: ${this.describeHeaviest()}`);
  }

  private sumWeights(j: number): number {
    return this.current.reduce((sum, i) => sum + (this.direction === "to" ? this.alpha[i][j] : this.alpha[j][i]), 0);
  }

  private describeHeaviest(): string {
    const weights = this.names.map((name, j) => ({ name, weight: this.sumWeights(j) }));
    weights.sort((a, b) => b.weight - a.weight);
    return weights.slice(0, 3).map(({ name, weight }) => `${name} ${formatFixed(weight)}`).join(", ");
  }

  draw() {
    const { current, names } = this;
    const isMultiple = current.length > 1;
    const subject = current.map((i) => `“${names[i]}”`).join(" + ");
    const verb = this.direction === "to" ? (isMultiple ? "attend to" : "attends to") : isMultiple ? "are attended by" : "is attended by";
    this.title.textContent = subject && `${subject} ${verb}`;
    const wordWeights = names.map((_, j) => this.sumWeights(j));
    const total = wordWeights.reduce((a, b) => a + b, 0);
    const unit = this.direction === "to" ? "row" : "column";
    this.sum.textContent = isMultiple
      ? `Sum of ${current.length} ${unit}s: ${formatFixed(total)} in total.`
      : `One ${unit}: ${formatFixed(total)} in total.`;
    // For several words the bar shows the mean, which is at most 1.
    wordWeights.forEach((weight, j) => {
      this.keyCells[j].bar.style.setProperty("width", formatBarWidth(weight / current.length));
      this.keyCells[j].number.textContent = formatFixed(weight);
    });
    const focusIndex = current.includes(this.wordButtons.findIndex((word) => word.tabIndex === 0)) ? -1 : current[0];
    this.wordButtons.forEach((word, i) => {
      word.setAttribute("aria-pressed", String(this.selectedWords.has(i)));
      if (focusIndex >= 0) word.tabIndex = i === focusIndex ? 0 : -1;
    });
    const largest = Math.max(...current.flatMap((i) => names.map((_, j) => this.weightBetween(i, j))), 1e-9);
    const lines = current.flatMap((i) =>
      names.map((_, j) => {
        const fraction = this.weightBetween(i, j) / largest;
        if (fraction < 0.02) return null;
        const style = { "stroke-width": `${1 + 5 * fraction}px`, opacity: String(0.12 + 0.88 * fraction) };
        return s("line", { x1: "0", y1: String(i + 0.5), x2: "1", y2: String(j + 0.5), style });
      }),
    );
    replaceChildren(this.lines, ...lines);
    this.onChange(current);
  }

  private weightBetween(i: number, j: number): number {
    return this.direction === "to" ? this.alpha[i][j] : this.alpha[j][i];
  }
}
