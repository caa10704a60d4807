/** A grid of small pictures of heads; a click or the arrow keys choose one. */

import { formatColour, getSequentialColours } from "./colours";
import { formatFixed, h } from "./dom";
import { clamp } from "./numbers";
import { type Matrix, drawThumbnail } from "./picture";
import type { ViewContext } from "./view";

export interface HeadGridOptions {
  /** The labels of rows and columns. */
  rows: string[];
  cols: string[];
  getMatrix(row: number, col: number): Matrix;
  /** The mean entropy of the rows in nats; NaN if it is unknown. */
  getEntropy(row: number, col: number): number;
  /** ln of the number of keys. */
  maxEntropy: number;
  getLabel(row: number, col: number): string;
  onChoose(row: number, col: number): void;
  /** The head that is chosen first. */
  initialHead?: [number, number];
  /** CSS pixels of a picture. */
  side?: number;
  context: ViewContext;
  /** The element of the view, which gets the event `theme`. */
  viewElement: EventTarget;
}

const DEFAULT_SIDE_PIXELS = 56;

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
export function createHeadGrid(options: HeadGridOptions): { element: HTMLElement; destroy(): void } {
  const side = options.side ?? DEFAULT_SIDE_PIXELS;
  let selectedHead: number[] = options.initialHead ?? [0, 0];
  const headByCanvas = new Map<Element, [number, number]>();
  const drawnCanvases = new Set<Element>();
  const drawHead = (canvas: Element) => {
    const [row, col] = headByCanvas.get(canvas) as [number, number];
    drawThumbnail(canvas as HTMLCanvasElement, options.getMatrix(row, col), side, options.context.isDark());
  };
  // Pictures are drawn when they become visible: a large model has a thousand heads.
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting || drawnCanvases.has(target)) continue;
      drawnCanvases.add(target);
      drawHead(target);
    }
  });

  const swatches: [HTMLElement, number][] = [];
  const buttons = options.rows.map((_, row) =>
    options.cols.map((_, col) => {
      const nats = options.getEntropy(row, col);
      const canvas = h("canvas", { "aria-hidden": "true" });
      headByCanvas.set(canvas, [row, col]);
      observer.observe(canvas);
      const swatch = h("i");
      swatches.push([swatch, nats]);
      const shownEntropy = Number.isNaN(nats) ? "" : formatFixed(nats, 2);
      return h(
        "button",
        {
          type: "button",
          test: `head-${row}-${col}`,
          tabindex: "-1",
          "aria-pressed": "false",
          "aria-label": `${options.getLabel(row, col)}${shownEntropy && `, entropy ${shownEntropy}`}`,
          on: { click: () => selectHead(row, col) },
        },
        canvas,
        shownEntropy && h("span", { class: "entropy" }, swatch, h("span", { test: `entropy-${row}-${col}` }, shownEntropy)),
      );
    }),
  );
  const setPressed = (isPressed: boolean) => {
    const button = buttons[selectedHead[0]][selectedHead[1]];
    button.setAttribute("aria-pressed", String(isPressed));
    button.tabIndex = isPressed ? 0 : -1;
  };
  const selectHead = (row: number, col: number) => {
    setPressed(false);
    selectedHead = [row, col];
    setPressed(true);
    options.onChoose(row, col);
  };
  const handleKey = (event: KeyboardEvent) => {
    const offset = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!offset) return;
    event.preventDefault();
    selectHead(clamp(selectedHead[0] + offset[0], 0, options.rows.length - 1), clamp(selectedHead[1] + offset[1], 0, options.cols.length - 1));
    buttons[selectedHead[0]][selectedHead[1]].focus();
  };
  const element = h(
    "div",
    {
      class: "heads",
      role: "group",
      "aria-label": "Heads: arrow keys move between them",
      style: {
        "grid-template-columns": `max-content repeat(${options.cols.length}, minmax(2.6rem, max-content))`,
        "--side": `${side}px`,
      },
      on: { keydown: handleKey },
    },
    h("span"),
    ...options.cols.map((name) => h("span", { class: "heads-col" }, name)),
    ...options.rows.flatMap((name, row) => [h("span", { class: "heads-row" }, name), ...buttons[row]]),
  );

  const colourSwatches = () => {
    const table = getSequentialColours(options.context.isDark());
    for (const [swatch, nats] of swatches) swatch.style.setProperty("background", formatColour(table, nats / options.maxEntropy));
  };
  const handleThemeChange = () => {
    colourSwatches();
    drawnCanvases.forEach(drawHead);
  };
  options.viewElement.addEventListener("theme", handleThemeChange);
  colourSwatches();
  setPressed(true);
  return {
    element,
    destroy() {
      observer.disconnect();
      options.viewElement.removeEventListener("theme", handleThemeChange);
    },
  };
}
