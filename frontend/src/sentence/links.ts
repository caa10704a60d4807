/** Words on the left and on the right, with lines and weights between the chosen words and all words. */

import { long } from "../bars";
import { fixed, h, put, s } from "../dom";
import { clamp } from "../numbers";
import type { Given } from "../view";
import type { Rows } from "./read";

export type Way = "to" | "from";

const ROW = 30;

export const STYLE = `
.links { display: grid; grid-template-columns: minmax(3rem, max-content) minmax(2rem, 9rem) minmax(0, 1fr); column-gap: 0.5rem; grid-auto-rows: ${ROW}px; max-width: 44rem; }
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
  way: Way = "to";
  private names: string[] = [];
  private alpha: Rows = [];
  private chosen = new Set<number>([0]);
  private pointed: number | null = null;
  private words: HTMLButtonElement[] = [];
  private keys: { bar: HTMLElement; number: HTMLElement }[] = [];
  private lines = s("svg", { preserveAspectRatio: "none", "aria-hidden": "true" });

  /** `changed` is called with the chosen words. */
  constructor(
    private readonly given: Given,
    private readonly changed: (words: number[]) => void,
  ) {
    this.element = h("div", { class: "links", on: { keydown: (event) => this.step(event) } });
  }

  /** Shows other words and chooses the first one, or shows other weights of the same words. */
  show(names: string[], alpha: Rows) {
    this.alpha = alpha;
    if (names.length !== this.names.length || names.some((name, i) => name !== this.names[i])) {
      this.names = names;
      this.chosen = new Set(names.length ? [0] : []);
      this.pointed = null;
      this.build();
    }
    this.draw();
  }

  get current(): number[] {
    return this.pointed === null ? [...this.chosen].sort((a, b) => a - b) : [this.pointed];
  }

  private build() {
    const point = (i: number | null) => () => {
      this.pointed = i;
      this.draw();
    };
    this.words = this.names.map((name, i) =>
      h(
        "button",
        {
          type: "button",
          title: name,
          test: `word-${i}`,
          on: {
            click: () => this.toggle(i),
            mouseenter: point(i),
            mouseleave: point(null),
            focus: point(i),
            blur: point(null),
          },
          style: { "grid-row": String(i + 1) },
        },
        name,
      ),
    );
    this.keys = [];
    const keys = this.names.map((name, j) => {
      const [bar, number] = [h("i"), h("span", { class: "number", test: `weight-${j}` })];
      this.keys.push({ bar, number });
      const style = { "grid-row": String(j + 1) };
      return h("div", { class: "links-key", style }, h("span", { title: name }, name), h("span", { class: "bar" }, bar), number);
    });
    this.lines.setAttribute("viewBox", `0 0 1 ${Math.max(this.names.length, 1)}`);
    this.lines.style.setProperty("grid-row", `1 / span ${Math.max(this.names.length, 1)}`);
    put(this.element, ...this.words, this.lines, ...keys);
  }

  private toggle(i: number) {
    if (!this.chosen.delete(i)) this.chosen.add(i);
    if (!this.chosen.size) this.chosen.add(i);
    // A click shows the chosen words, not the word below the pointer.
    this.pointed = null;
    this.draw();
    this.given.announce(`${this.title.textContent}: ${this.heaviest()}`);
  }

  private step(event: KeyboardEvent) {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const at = this.words.indexOf(event.target as HTMLButtonElement);
    if (!by || at < 0) return;
    event.preventDefault();
    this.words[clamp(at + by, 0, this.words.length - 1)].focus();
    this.given.announce(`${this.title.textContent}: ${this.heaviest()}`);
  }

  private weight(j: number): number {
    return this.current.reduce((sum, i) => sum + (this.way === "to" ? this.alpha[i][j] : this.alpha[j][i]), 0);
  }

  private heaviest(): string {
    const found = this.names.map((name, j) => ({ name, weight: this.weight(j) }));
    found.sort((a, b) => b.weight - a.weight);
    return found.slice(0, 3).map(({ name, weight }) => `${name} ${fixed(weight)}`).join(", ");
  }

  draw() {
    const { current, names } = this;
    const many = current.length > 1;
    const who = current.map((i) => `“${names[i]}”`).join(" + ");
    const verb = this.way === "to" ? (many ? "attend to" : "attends to") : many ? "are attended by" : "is attended by";
    this.title.textContent = who && `${who} ${verb}`;
    const each = names.map((_, j) => this.weight(j));
    const total = each.reduce((a, b) => a + b, 0);
    const of = this.way === "to" ? "row" : "column";
    this.sum.textContent = many
      ? `Sum of ${current.length} ${of}s: ${fixed(total)} in total.`
      : `One ${of}: ${fixed(total)} in total.`;
    // For several words the bar shows the mean, which is at most 1.
    each.forEach((weight, j) => {
      this.keys[j].bar.style.setProperty("width", long(weight / current.length));
      this.keys[j].number.textContent = fixed(weight);
    });
    const roving = current.includes(this.words.findIndex((word) => word.tabIndex === 0)) ? -1 : current[0];
    this.words.forEach((word, i) => {
      word.setAttribute("aria-pressed", String(this.chosen.has(i)));
      if (roving >= 0) word.tabIndex = i === roving ? 0 : -1;
    });
    const largest = Math.max(...current.flatMap((i) => names.map((_, j) => this.one(i, j))), 1e-9);
    const lines = current.flatMap((i) =>
      names.map((_, j) => {
        const share = this.one(i, j) / largest;
        if (share < 0.02) return null;
        const look = { "stroke-width": `${1 + 5 * share}px`, opacity: String(0.12 + 0.88 * share) };
        return s("line", { x1: "0", y1: String(i + 0.5), x2: "1", y2: String(j + 0.5), style: look });
      }),
    );
    put(this.lines, ...lines);
    this.changed(current);
  }

  private one(i: number, j: number): number {
    return this.way === "to" ? this.alpha[i][j] : this.alpha[j][i];
  }
}
