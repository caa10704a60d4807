/** A plot of a query's weights: one bar at the position of each key. */

import { type Range, createFrame } from "./axes";
import { formatFixed, replaceChildren, s } from "./dom";
import { clamp } from "./numbers";

export interface StemPlot {
  width: number;
  xs: Range;
  /** Positions of the keys, and their weights. */
  positions: number[];
  weights: Float64Array;
  /** Index of the highlighted bar. */
  highlighted?: number | null;
}

const HEIGHT_PIXELS = 96;

export function drawStems(svg: SVGSVGElement, { width, xs, positions, weights, highlighted }: StemPlot): void {
  const sizes = Array.from(weights, (w) => (Number.isFinite(w) ? w : 0));
  const [low, high] = [Math.min(0, ...sizes), Math.max(0, ...sizes) || (sizes.some((w) => w < 0) ? 0 : 1)];
  const axes = createFrame({ width, height: HEIGHT_PIXELS, margin: { top: 22, bottom: 8 } }, xs, { low, high });
  const barWidth = clamp((axes.right - axes.left) / positions.length / 2, 2, 12);
  const zero = axes.y(0);
  const heaviest = sizes.reduce((best, w, i) => (Math.abs(w) > Math.abs(sizes[best]) ? i : best), 0);
  const nonzero = sizes.filter((w) => w !== 0).length;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT_PIXELS}`);
  svg.setAttribute("height", String(HEIGHT_PIXELS));
  replaceChildren(
    svg,
    s("line", { class: "grid", x1: axes.left, x2: axes.right, y1: zero, y2: zero }),
    s("text", { class: "tick", x: axes.left - 8, y: zero + 4, "text-anchor": "end" }, "0"),
    zero - axes.top > 24 && s("text", { class: "axis", x: axes.left - 8, y: axes.top + 8, "text-anchor": "end" }, "α"),
    ...positions.map((x, i) =>
      s(
        "rect",
        {
          class: i === highlighted ? "weight marked" : "weight",
          x: axes.x(x) - barWidth / 2,
          y: Math.min(zero, axes.y(sizes[i])),
          width: barWidth,
          height: Math.abs(zero - axes.y(sizes[i])),
        },
        s("title", {}, `${x}: ${formatFixed(weights[i])}`),
      ),
    ),
    nonzero > 0 &&
      s(
        "text",
        {
          class: "tick",
          x: clamp(axes.x(positions[heaviest]), axes.left + 20, axes.right - 20),
          y: sizes[heaviest] < 0 ? zero - 7 : axes.top - 7,
          "text-anchor": "middle",
        },
        formatFixed(sizes[heaviest]),
      ),
  );
  svg.setAttribute(
    "aria-label",
    nonzero
      ? `Weights of the query: ${nonzero} of ${positions.length} keys have a weight; the largest is ${formatFixed(sizes[heaviest])} at ${positions[heaviest]}`
      : "No key has a weight",
  );
}
