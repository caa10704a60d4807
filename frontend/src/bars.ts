/** The largest weights of one query as bars with numbers. */

import { fixed, h, put } from "./dom";
import { clamp } from "./numbers";

/** The length of a weight's bar in CSS: the full length is 1, or the largest weight if that is more. */
export const long = (weight: number, whole = 1) => `${100 * clamp(Math.abs(weight) / whole || 0, 0, 1)}%`;
export const wholeOf = (weights: Iterable<number>) => Array.from(weights).reduce((most, w) => (Math.abs(w) < Infinity ? Math.max(most, Math.abs(w)) : most), 1);

export interface Bar {
  name: string;
  weight: number;
}

/** A list of at most `most` bars, and one bar for the sum of the others. */
export function bars(most: number, test: string): { element: HTMLElement; show(of: Bar[]): void } {
  const element = h("ol", { class: "weights", test });
  return {
    element,
    show(of) {
      const heaviest = [...of].sort((a, b) => b.weight - a.weight).slice(0, most);
      const sum = (some: Bar[]) => some.reduce((total, bar) => total + bar.weight, 0);
      const rest = sum(of) - sum(heaviest);
      const others = of.length - heaviest.length;
      const line = (name: string, weight: number, at: string) =>
        h(
          "li",
          { class: at === "rest" ? "weights-rest" : undefined },
          h("span", { class: "weights-name", title: name }, name),
          h("span", { class: "bar" }, h("i", { style: { width: long(weight) } })),
          h("span", { class: "number", test: `${test}-${at}` }, fixed(weight)),
        );
      put(
        element,
        ...heaviest.map((bar, i) => line(bar.name, bar.weight, String(i))),
        others > 0 && line(`${others} more`, Math.max(rest, 0), "rest"),
      );
    },
  };
}
