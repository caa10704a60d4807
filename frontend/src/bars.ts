/** The largest weights of one query as bars with numbers. */

import { formatFixed, h, replaceChildren } from "./dom";
import { clamp } from "./numbers";

/** The length of a weight's bar in CSS: the full length is 1, or the largest weight if that is more. */
export const formatBarWidth = (weight: number, maxWeight = 1) => `${100 * clamp(Math.abs(weight) / maxWeight || 0, 0, 1)}%`;
export const computeMaxWeight = (weights: Iterable<number>) => Array.from(weights).reduce((max, w) => (Math.abs(w) < Infinity ? Math.max(max, Math.abs(w)) : max), 1);

export interface Bar {
  name: string;
  weight: number;
}

/** A list of at most `maxBars` bars, and one bar for the sum of the others. */
export function createBars(maxBars: number, test: string): { element: HTMLElement; show(items: Bar[]): void } {
  const element = h("ol", { class: "weights", test });
  return {
    element,
    show(items) {
      const heaviest = [...items].sort((a, b) => b.weight - a.weight).slice(0, maxBars);
      const sumWeights = (selected: Bar[]) => selected.reduce((total, bar) => total + bar.weight, 0);
      const restWeight = sumWeights(items) - sumWeights(heaviest);
      const others = items.length - heaviest.length;
      const createLine = (name: string, weight: number, suffix: string) =>
        h(
          "li",
          { class: suffix === "rest" ? "weights-rest" : undefined },
          h("span", { class: "weights-name", title: name }, name),
          h("span", { class: "bar" }, h("i", { style: { width: formatBarWidth(weight) } })),
          h("span", { class: "number", test: `${test}-${suffix}` }, formatFixed(weight)),
        );
      replaceChildren(
        element,
        ...heaviest.map((bar, i) => createLine(bar.name, bar.weight, String(i))),
        others > 0 && createLine(`${others} more`, Math.max(restWeight, 0), "rest"),
      );
    },
  };
}
