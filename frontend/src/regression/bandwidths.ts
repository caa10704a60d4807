/** A plot of the leave-one-out error over the bandwidth, with its minimum. */

import { type Range, around, frame, path } from "../axes";
import { h, put, s } from "../dom";
import { type Kernel, type Point, heldOutError } from "../equation";
import { alike, clamp, numeral } from "../numbers";

/** The number of bandwidths, and the number of points up to which all are recomputed at every move. */
const TRIED = 41;
const MANY = 150;
const HEIGHT = 110;

export class Bandwidths {
  readonly element: HTMLElement;
  private readonly plot = s("svg", { class: "plot", role: "img", test: "regression-tried" });
  private readonly best = h("button", { type: "button", test: "regression-best" });
  private compared = "";
  private widths: number[] = [];
  private errors: number[] = [];
  private least = NaN;

  constructor(use: (bandwidth: number) => void) {
    this.best.addEventListener("click", () => use(Number(this.least.toPrecision(4))));
    this.element = h(
      "section",
      { class: "bandwidths", "aria-label": "Leave-one-out error" },
      h("h3", {}, "Which bandwidth?"),
      h("p", { class: "hint" }, "Each point is predicted from the others. The error is the root mean square."),
      this.plot,
      this.best,
    );
  }

  /** `how` returns the kernel of a width; `now` is the current width with its error. */
  paint(points: Point[], range: Range, how: ((width: number) => Kernel) | null, now: { width: number; error: number }) {
    this.element.hidden = !how || points.length > MANY;
    if (!how || points.length > MANY) return;
    const mark = JSON.stringify([points, range, how(1)]);
    if (mark !== this.compared) {
      this.compared = mark;
      this.widths = Array.from({ length: TRIED }, (_, i) => range.low * (range.high / range.low) ** (i / (TRIED - 1)));
      this.errors = this.widths.map((width) => {
        const { error, alone } = heldOutError(points, how(width));
        return alone ? NaN : error;
      });
      const good = this.errors.map((error) => (Number.isNaN(error) ? Infinity : error));
      const least = Math.min(...good);
      this.least = least < Infinity ? this.widths[good.indexOf(least)] : NaN;
    }
    this.draw(range, now);
  }

  private draw(range: Range, now: { width: number; error: number }) {
    const size = { width: this.plot.clientWidth || 280, height: HEIGHT, margin: { left: 44, bottom: 34, top: 14 } };
    const known = [...this.errors, now.error].filter(Number.isFinite);
    const xs = { low: Math.log(range.low), high: Math.log(range.high) };
    const inside = frame(size, xs, around(known.length ? known : [0, 1], 0.1));
    const at = (width: number) => clamp(inside.x(Math.log(width)), inside.left, inside.right);
    const tick = (x: number, y: number, anchor: string, text: string) =>
      s("text", { class: "tick", x, y, "text-anchor": anchor }, text);
    const below = inside.bottom + 17;
    const ends = known.length ? [Math.min(...known), Math.max(...known)] : [];
    this.plot.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    this.plot.setAttribute("height", String(size.height));
    put(
      this.plot,
      s("line", { class: "grid", x1: inside.left, x2: inside.right, y1: inside.bottom, y2: inside.bottom }),
      tick(inside.left, below, "start", numeral(range.low, 0, 2)),
      tick(inside.right, below, "end", numeral(range.high, 0, 2)),
      s("text", { class: "axis", x: (inside.left + inside.right) / 2, y: below, "text-anchor": "middle" }, "bandwidth"),
      ...ends.map((error, i) => tick(inside.left - 6, inside.y(error) + 4, "end", alike(ends, 2)[i])),
      s("path", { class: "curve", d: path(this.widths.map((w, i) => [at(w), inside.y(this.errors[i])])) }),
      Number.isFinite(this.least) &&
        s("line", { class: "least", x1: at(this.least), x2: at(this.least), y1: inside.top, y2: inside.bottom }),
      Number.isFinite(now.error) && s("circle", { class: "mark", cx: at(now.width), cy: inside.y(now.error), r: 5 }),
    );
    const some = Number.isFinite(this.least);
    const leastText = some ? numeral(this.least, 0, 3) : "none";
    this.plot.setAttribute("aria-label", `Leave-one-out error of each bandwidth; the least is at ${leastText}`);
    this.best.textContent = some ? `Use the best, ${leastText}` : "No bandwidth predicts every point";
    this.best.disabled = !some;
  }
}

export const BANDWIDTHS = `
.bandwidths { margin-bottom: 1.5rem; }
svg.plot .least { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 3 3; }
`;
