/** A grid of small pictures of heads; a click or the arrow keys choose one. */

import { css, sequential } from "./colours";
import { fixed, h } from "./dom";
import { clamp } from "./numbers";
import { type Matrix, thumbnail } from "./picture";
import type { Given } from "./view";

export interface Grid {
  /** The labels of rows and columns. */
  rows: string[];
  cols: string[];
  matrix(row: number, col: number): Matrix;
  /** The mean entropy of the rows in nats; NaN if it is unknown. */
  entropy(row: number, col: number): number;
  /** ln of the number of keys. */
  most: number;
  label(row: number, col: number): string;
  choose(row: number, col: number): void;
  /** The head that is chosen first. */
  start?: [number, number];
  /** CSS pixels of a picture. */
  side?: number;
  given: Given;
  /** The element of the view, which gets the event `theme`. */
  at: EventTarget;
}

const SIDE = 56;

export const STYLE = `
.heads { display: grid; gap: 0.35rem 0.15rem; padding: 2px; width: fit-content; max-width: 100%; align-items: end; }
.heads-row, .heads-col { color: var(--soft); font-size: 0.85rem; font-variant-numeric: tabular-nums; }
.heads-row { align-self: center; padding-inline-end: 0.5rem; white-space: nowrap; }
.heads-col { text-align: center; max-width: 4rem; line-height: 1.2; justify-self: center; }
.heads button { padding: 3px 1px; display: grid; grid-template-columns: minmax(0, 1fr); gap: 2px; justify-items: center; border-color: transparent; }
.heads button[aria-pressed="true"] { border-color: var(--accent); outline: 1px solid var(--accent); }
.heads canvas { width: var(--side); max-width: 100%; height: auto; aspect-ratio: 1; object-fit: contain; image-rendering: pixelated; background: var(--raised); }
.heads .entropy { display: inline-flex; gap: 0.2rem; align-items: center; font-size: 0.7rem; color: var(--soft); font-variant-numeric: tabular-nums; }
.heads .entropy i { width: 0.6rem; height: 0.6rem; flex: none; border: 1px solid var(--line); border-radius: 2px; }
`;

/** Creates the grid; `destroy` removes its listeners. */
export function grid(of: Grid): { element: HTMLElement; destroy(): void } {
  const side = of.side ?? SIDE;
  let chosen: number[] = of.start ?? [0, 0];
  const small = new Map<Element, [number, number]>();
  const drawn = new Set<Element>();
  const draw = (canvas: Element) => {
    const [row, col] = small.get(canvas) as [number, number];
    thumbnail(canvas as HTMLCanvasElement, of.matrix(row, col), side, of.given.dark());
  };
  // Pictures are drawn when they become visible: a large model has a thousand heads.
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting || drawn.has(target)) continue;
      drawn.add(target);
      draw(target);
    }
  });

  const swatches: [HTMLElement, number][] = [];
  const buttons = of.rows.map((_, row) =>
    of.cols.map((_, col) => {
      const nats = of.entropy(row, col);
      const canvas = h("canvas", { "aria-hidden": "true" });
      small.set(canvas, [row, col]);
      watcher.observe(canvas);
      const swatch = h("i");
      swatches.push([swatch, nats]);
      const shownEntropy = Number.isNaN(nats) ? "" : fixed(nats, 2);
      return h(
        "button",
        {
          type: "button",
          test: `head-${row}-${col}`,
          tabindex: "-1",
          "aria-pressed": "false",
          "aria-label": `${of.label(row, col)}${shownEntropy && `, entropy ${shownEntropy}`}`,
          on: { click: () => choose(row, col) },
        },
        canvas,
        shownEntropy && h("span", { class: "entropy" }, swatch, h("span", { test: `entropy-${row}-${col}` }, shownEntropy)),
      );
    }),
  );
  const mark = (on: boolean) => {
    const button = buttons[chosen[0]][chosen[1]];
    button.setAttribute("aria-pressed", String(on));
    button.tabIndex = on ? 0 : -1;
  };
  const choose = (row: number, col: number) => {
    mark(false);
    chosen = [row, col];
    mark(true);
    of.choose(row, col);
  };
  const step = (event: KeyboardEvent) => {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by) return;
    event.preventDefault();
    choose(clamp(chosen[0] + by[0], 0, of.rows.length - 1), clamp(chosen[1] + by[1], 0, of.cols.length - 1));
    buttons[chosen[0]][chosen[1]].focus();
  };
  const element = h(
    "div",
    {
      class: "heads",
      role: "group",
      "aria-label": "Heads: arrow keys move between them",
      style: {
        "grid-template-columns": `max-content repeat(${of.cols.length}, minmax(2.6rem, max-content))`,
        "--side": `${side}px`,
      },
      on: { keydown: step },
    },
    h("span"),
    ...of.cols.map((name) => h("span", { class: "heads-col" }, name)),
    ...of.rows.flatMap((name, row) => [h("span", { class: "heads-row" }, name), ...buttons[row]]),
  );

  const coloured = () => {
    const table = sequential(of.given.dark());
    for (const [swatch, nats] of swatches) swatch.style.setProperty("background", css(table, nats / of.most));
  };
  const themed = () => {
    coloured();
    drawn.forEach(draw);
  };
  of.at.addEventListener("theme", themed);
  coloured();
  mark(true);
  return {
    element,
    destroy() {
      watcher.disconnect();
      of.at.removeEventListener("theme", themed);
    },
  };
}
