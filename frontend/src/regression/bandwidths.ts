/** A plot of the leave-one-out error over the bandwidth, with its minimum. */

import { type Range, computeRange, createFrame, formatPath } from "../axes";
import { h, replaceChildren, s } from "../dom";
import { type Kernel, type Point, computeHeldOutError } from "../equation";
import { formatAxisNumbers, clamp, formatSignificant } from "../numbers";

/** The number of bandwidths, and the number of points up to which all are recomputed at every move. */
const BANDWIDTH_COUNT = 41;
const MAX_POINTS = 150;
const HEIGHT_PIXELS = 110;

export class Bandwidths {
  readonly element: HTMLElement;
  private readonly plot = s("svg", { class: "plot", role: "img", test: "regression-tried" });
  private readonly bestButton = h("button", { type: "button", test: "regression-best" });
  private lastInputs = "";
  private widths: number[] = [];
  private errors: number[] = [];
  private bestWidth = NaN;

  constructor(onUse: (bandwidth: number) => void) {
    this.bestButton.addEventListener("click", () => onUse(Number(this.bestWidth.toPrecision(4))));
    this.element = h(
      "section",
      { class: "bandwidths", "aria-label": "Leave-one-out error" },
      h("h3", {}, "Which bandwidth?"),
      h("p", { class: "hint" }, "Each point is predicted from the others. The error is the root mean square."),
      this.plot,
      this.bestButton,
    );
  }

  /** `kernelOf` returns the kernel of a width; `current` is the current width with its error. */
  paint(points: Point[], range: Range, kernelOf: ((width: number) => Kernel) | null, current: { width: number; error: number }) {
    this.element.hidden = !kernelOf || points.length > MAX_POINTS;
    if (!kernelOf || points.length > MAX_POINTS) return;
    const inputs = JSON.stringify([points, range, kernelOf(1)]);
    if (inputs !== this.lastInputs) {
      this.lastInputs = inputs;
      this.widths = Array.from({ length: BANDWIDTH_COUNT }, (_, i) => range.low * (range.high / range.low) ** (i / (BANDWIDTH_COUNT - 1)));
      this.errors = this.widths.map((width) => {
        const { error, isolated } = computeHeldOutError(points, kernelOf(width));
        return isolated ? NaN : error;
      });
      const finiteErrors = this.errors.map((error) => (Number.isNaN(error) ? Infinity : error));
      const minError = Math.min(...finiteErrors);
      this.bestWidth = minError < Infinity ? this.widths[finiteErrors.indexOf(minError)] : NaN;
    }
    this.draw(range, current);
  }

  private draw(range: Range, current: { width: number; error: number }) {
    const size = { width: this.plot.clientWidth || 280, height: HEIGHT_PIXELS, margin: { left: 44, bottom: 34, top: 14 } };
    const known = [...this.errors, current.error].filter(Number.isFinite);
    const xs = { low: Math.log(range.low), high: Math.log(range.high) };
    const frame = createFrame(size, xs, computeRange(known.length ? known : [0, 1], 0.1));
    const xOf = (width: number) => clamp(frame.x(Math.log(width)), frame.left, frame.right);
    const createTick = (x: number, y: number, anchor: string, text: string) =>
      s("text", { class: "tick", x, y, "text-anchor": anchor }, text);
    const labelY = frame.bottom + 17;
    const ends = known.length ? [Math.min(...known), Math.max(...known)] : [];
    this.plot.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    this.plot.setAttribute("height", String(size.height));
    replaceChildren(
      this.plot,
      s("line", { class: "grid", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }),
      createTick(frame.left, labelY, "start", formatSignificant(range.low, 0, 2)),
      createTick(frame.right, labelY, "end", formatSignificant(range.high, 0, 2)),
      s("text", { class: "axis", x: (frame.left + frame.right) / 2, y: labelY, "text-anchor": "middle" }, "bandwidth"),
      ...ends.map((error, i) => createTick(frame.left - 6, frame.y(error) + 4, "end", formatAxisNumbers(ends, 2)[i])),
      s("path", { class: "curve", d: formatPath(this.widths.map((w, i) => [xOf(w), frame.y(this.errors[i])])) }),
      Number.isFinite(this.bestWidth) &&
        s("line", { class: "least", x1: xOf(this.bestWidth), x2: xOf(this.bestWidth), y1: frame.top, y2: frame.bottom }),
      Number.isFinite(current.error) && s("circle", { class: "mark", cx: xOf(current.width), cy: frame.y(current.error), r: 5 }),
    );
    const hasBest = Number.isFinite(this.bestWidth);
    const bestText = hasBest ? formatSignificant(this.bestWidth, 0, 3) : "none";
    this.plot.setAttribute("aria-label", `Leave-one-out error of each bandwidth; the least is at ${bestText}`);
    this.bestButton.textContent = hasBest ? `Use the best, ${bestText}` : "No bandwidth predicts every point";
    this.bestButton.disabled = !hasBest;
  }
}

export const BANDWIDTHS_STYLE = `
.bandwidths { margin-bottom: 1.5rem; }
svg.plot .least { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 3 3; }
`;
