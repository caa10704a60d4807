/** A plot of the points and the curve; points can be moved by mouse, touch and keyboard. */

import { type Frame, type Range, createAxes, createFrame, formatPath } from "../axes";
import { formatColour, getSequentialColours } from "../colours";
import { replaceChildren, s } from "../dom";
import type { Point } from "../equation";
import { clamp, formatSignificant } from "../numbers";

/** Callbacks for changes of the points. */
export interface ScatterActions {
  movePoint(i: number, to: Point): void;
  insertPoint(to: Point): void;
  removePoint(i: number): void;
  choosePoint(i: number): void;
  /** Announces the position of a point that was moved by the keyboard. */
  announcePoint(i: number): void;
  setQuery(x: number): void;
}

export interface ScatterData {
  points: Point[];
  xs: Range;
  ys: Range;
  names: { x: string; y: string };
  /** The curve, and the kernel around the query, at these x. */
  curveXs: number[];
  curveYs: number[];
  profile: number[];
  query: number;
  /** f(q); NaN if no key has weight. */
  value: number;
  weights: Float64Array;
  /** The point that the keyboard moves. */
  activePoint: number;
  isDark: boolean;
  describePoint(i: number): string;
}

/** Width in pixels of a letter of the text next to the mark. */
const LETTER_WIDTH_PIXELS = 8.5;
/** Radius of the largest point with its outline and some space. */
const DOT_RADIUS_PIXELS = 13;
const ARROW_STEPS: Record<string, [number, number]> = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, 1],
  ArrowDown: [0, -1],
};
/** Step of an arrow key as a fraction of the range; with Shift ten times as much. */
const STEP_FRACTION = 1 / 200;

export class Scatter {
  readonly element = s("svg", { class: "plot points", role: "group", test: "regression-plot" });
  width = 640;
  private readonly background = s("g", { "aria-hidden": "true" });
  private readonly kernelShape = s("path", { class: "shape" });
  private readonly queryLine = s("line", { class: "query" });
  private readonly curve = s("path", { class: "curve", test: "regression-curve" });
  private readonly dots = s("g");
  private readonly mark = s("circle", { class: "mark", r: 5 });
  private readonly text = s("text", { class: "value", test: "regression-label" });
  private frame: Frame | null = null;
  private data: ScatterData | null = null;

  constructor(private readonly actions: ScatterActions) {
    this.element.append(this.background, this.kernelShape, this.queryLine, this.curve, this.dots, this.mark, this.text);
    this.element.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      actions.setQuery(this.pointAt(event).x);
      this.followPointer(this.element, event, (to) => actions.setQuery(to.x));
    });
    this.element.addEventListener("dblclick", (event) => actions.insertPoint(this.pointAt(event)));
  }

  /** Creates a dot for each point. */
  createDots(count: number) {
    replaceChildren(this.dots, ...Array.from({ length: count }, (_, i) => this.createDot(i)));
  }

  focus(i: number) {
    (this.dots.children[i] as SVGElement).focus({ preventScroll: true });
  }

  /** The point with the focus, or null. */
  get focused(): number | null {
    const root = this.element.getRootNode() as ShadowRoot;
    const at = Array.from(this.dots.children).indexOf(root.activeElement!);
    return at < 0 ? null : at;
  }

  private pointAt(event: MouseEvent): Point {
    const { left, top } = this.element.getBoundingClientRect();
    return { x: this.frame!.invertX(event.clientX - left), y: this.frame!.invertY(event.clientY - top) };
  }

  /** Follows the pointer until it is released. */
  private followPointer(element: SVGElement, event: PointerEvent, onMove: (at: Point) => void) {
    element.setPointerCapture(event.pointerId);
    const handleMove = (e: PointerEvent) => onMove(this.pointAt(e));
    const stop = () => {
      element.removeEventListener("pointermove", handleMove);
      for (const eventName of ["pointerup", "pointercancel"] as const) element.removeEventListener(eventName, stop);
    };
    element.addEventListener("pointermove", handleMove);
    for (const eventName of ["pointerup", "pointercancel"] as const) element.addEventListener(eventName, stop);
  }

  private createDot(i: number): SVGElement {
    return s("circle", {
      class: "dot",
      role: "application",
      "aria-roledescription": "movable point",
      test: `point-${i}`,
      on: {
        pointerdown: (event: PointerEvent) => {
          event.stopPropagation();
          this.focus(i);
          this.followPointer(event.currentTarget as SVGElement, event, (to) => this.actions.movePoint(i, to));
        },
        dblclick: (event) => event.stopPropagation(),
        focus: () => this.actions.choosePoint(i),
        keydown: (event: KeyboardEvent) => {
          if (this.handleKey(i, event)) event.preventDefault();
        },
      },
    });
  }

  private handleKey(i: number, { key, shiftKey }: KeyboardEvent): boolean {
    const { points, xs, ys } = this.data!;
    const { x, y } = points[i];
    const [xSpan, ySpan] = [xs.high - xs.low, ys.high - ys.low];
    const direction = ARROW_STEPS[key];
    if (direction) {
      const fraction = shiftKey ? 10 * STEP_FRACTION : STEP_FRACTION;
      this.actions.movePoint(i, { x: x + direction[0] * xSpan * fraction, y: y + direction[1] * ySpan * fraction });
      this.actions.announcePoint(i);
    } else if (key === "PageDown") this.focus((i + 1) % points.length);
    else if (key === "PageUp") this.focus((i + points.length - 1) % points.length);
    else if (key === "Delete" || key === "Backspace") this.actions.removePoint(i);
    else if (key === "+" || key === "Insert") this.actions.insertPoint({ x: x + xSpan / 50, y });
    else return false;
    return true;
  }

  paint(data: ScatterData) {
    this.data = data;
    const { points, xs, ys, curveXs, curveYs, profile, query, value, weights } = data;
    const size = { width: this.width, height: clamp(this.width * 0.56, 260, 560) };
    const frame = createFrame(size, xs, ys);
    this.frame = frame;
    const { left, right, top, bottom } = frame;
    this.element.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    this.element.setAttribute("height", String(size.height));
    replaceChildren(this.background, ...createAxes(frame, xs, ys, data.names));

    const clampY = (y: number) => (Number.isFinite(y) ? clamp(frame.y(y), top - 1e3, bottom + 1e3) : NaN);
    this.curve.setAttribute("d", formatPath(curveXs.map((x, i) => [frame.x(x), clampY(curveYs[i])])));
    const outline = formatPath(curveXs.map((x, i) => [frame.x(x), bottom - profile[i] * (bottom - top) * 0.2]));
    this.kernelShape.setAttribute("d", `${outline}L${right} ${bottom}L${left} ${bottom}Z`);

    const queryX = frame.x(query);
    setAttributes(this.queryLine, { x1: queryX, x2: queryX, y1: top, y2: bottom });
    const hasValue = Number.isFinite(value);
    for (const part of [this.mark, this.text]) part.style.setProperty("display", hasValue ? "inline" : "none");
    if (hasValue) {
      const y = clampY(value);
      setAttributes(this.mark, { cx: queryX, cy: y });
      this.text.textContent = `f(q) = ${formatSignificant(value)}`;
      setAttributes(this.text, findLabelPosition(this.text.textContent.length, queryX, y, frame, points));
    }

    const colours = getSequentialColours(data.isDark);
    const maxWeight = Math.max(...weights.map(Math.abs), 1e-300);
    points.forEach((p, i) => {
      const fraction = Number.isFinite(weights[i]) ? Math.abs(weights[i]) / maxWeight : 0;
      const circle = this.dots.children[i] as SVGElement;
      setAttributes(circle, {
        cx: frame.x(p.x),
        cy: frame.y(p.y),
        r: 6 + 5 * Math.sqrt(fraction),
        tabindex: i === data.activePoint ? 0 : -1,
        "aria-label": data.describePoint(i),
      });
      circle.style.setProperty("fill", formatColour(colours, fraction * 0.85));
    });
  }
}

function setAttributes(element: SVGElement, attributes: Record<string, string | number>) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
}

/** The position next to (x, y) at which a label of this many letters covers the fewest points. */
function findLabelPosition(letterCount: number, x: number, y: number, { left, right, top, bottom, ...frame }: Frame, points: Point[]) {
  const labelWidth = LETTER_WIDTH_PIXELS * letterCount;
  const isRightHalf = x > (left + right) / 2;
  const candidates = [y - 12, y + 24, top + 14, bottom - 24].flatMap((labelY) =>
    [isRightHalf, !isRightHalf].map((end) => ({ x: x + (end ? -12 : 12), y: clamp(labelY, top + 14, bottom - 8), end })),
  );
  const coveredCounts = candidates.map((candidate) => {
    const start = candidate.end ? candidate.x - labelWidth : candidate.x;
    if (start < left || start + labelWidth > right) return Infinity;
    const isWithin = (x: number, low: number, high: number) => x > low - DOT_RADIUS_PIXELS && x < high + DOT_RADIUS_PIXELS;
    return points.filter((p) => isWithin(frame.x(p.x), start, start + labelWidth) && isWithin(frame.y(p.y), candidate.y - 14, candidate.y + 3)).length;
  });
  const best = candidates[coveredCounts.indexOf(Math.min(...coveredCounts))];
  return { x: best.x, y: best.y, "text-anchor": best.end ? "end" : "start" };
}

export const SCATTER_STYLE = `
svg.points { cursor: ew-resize; user-select: none; -webkit-user-select: none; }
svg.points .shape { fill: var(--second); opacity: 0.18; stroke: none; pointer-events: none; }
svg.points .value { fill: var(--ink); font-size: 15px; font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 4px; pointer-events: none; }
svg.points .dot { stroke: var(--ink); stroke-width: 1.5; cursor: move; touch-action: none; }
svg.points .dot:focus-visible { outline: none; stroke: var(--accent); stroke-width: 4; }
`;
