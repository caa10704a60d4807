/** The weights of a query as bars, each at the place of its key. */

import { type Range, frame } from "./axes";
import { fixed, put, s } from "./dom";
import { clamp } from "./numbers";

export interface Stems {
  width: number;
  xs: Range;
  /** Where the keys lie, and what each counts. */
  at: number[];
  weights: Float64Array;
  /** The one that stands out. */
  marked?: number | null;
}

const HEIGHT = 96;

export function stems(svg: SVGSVGElement, { width, xs, at, weights, marked }: Stems): void {
  const sizes = Array.from(weights, (w) => (Number.isFinite(w) ? w : 0));
  const [low, high] = [Math.min(0, ...sizes), Math.max(0, ...sizes) || (sizes.some((w) => w < 0) ? 0 : 1)];
  const inside = frame({ width, height: HEIGHT, margin: { top: 22, bottom: 8 } }, xs, { low, high });
  const thick = clamp((inside.right - inside.left) / at.length / 2, 2, 12);
  const zero = inside.y(0);
  const heaviest = sizes.reduce((best, w, i) => (Math.abs(w) > Math.abs(sizes[best]) ? i : best), 0);
  const some = sizes.filter((w) => w !== 0).length;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.setAttribute("height", String(HEIGHT));
  put(
    svg,
    s("line", { class: "grid", x1: inside.left, x2: inside.right, y1: zero, y2: zero }),
    s("text", { class: "tick", x: inside.left - 8, y: zero + 4, "text-anchor": "end" }, "0"),
    zero - inside.top > 24 && s("text", { class: "axis", x: inside.left - 8, y: inside.top + 8, "text-anchor": "end" }, "α"),
    ...at.map((x, i) =>
      s(
        "rect",
        {
          class: i === marked ? "weight marked" : "weight",
          x: inside.x(x) - thick / 2,
          y: Math.min(zero, inside.y(sizes[i])),
          width: thick,
          height: Math.abs(zero - inside.y(sizes[i])),
        },
        s("title", {}, `${x}: ${fixed(weights[i])}`),
      ),
    ),
    some > 0 &&
      s(
        "text",
        {
          class: "tick",
          x: clamp(inside.x(at[heaviest]), inside.left + 20, inside.right - 20),
          y: sizes[heaviest] < 0 ? zero - 7 : inside.top - 7,
          "text-anchor": "middle",
        },
        fixed(sizes[heaviest]),
      ),
  );
  svg.setAttribute(
    "aria-label",
    some
      ? `Weights of the query: ${some} of ${at.length} keys count, most the one at ${at[heaviest]} with ${fixed(sizes[heaviest])}`
      : "No key has a weight",
  );
}
