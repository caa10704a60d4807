/** A plot of the points and the curve; points can be moved by mouse, touch and keyboard. */

import { type Frame, type Range, axes, frame, path } from "../axes";
import { css, sequential } from "../colours";
import { put, s } from "../dom";
import type { Point } from "../equation";
import { clamp, numeral } from "../numbers";

/** Callbacks for changes of the points. */
export interface Acts {
  move(i: number, to: Point): void;
  insert(to: Point): void;
  remove(i: number): void;
  choose(i: number): void;
  /** Announces the position of a point that was moved by the keyboard. */
  say(i: number): void;
  ask(x: number): void;
}

export interface Drawn {
  points: Point[];
  xs: Range;
  ys: Range;
  names: { x: string; y: string };
  /** The curve, and the kernel around the query, at these x. */
  fine: number[];
  fitted: number[];
  profile: number[];
  query: number;
  /** f(q); NaN if no key has weight. */
  value: number;
  weights: Float64Array;
  /** The point that the keyboard moves. */
  active: number;
  dark: boolean;
  describePoint(i: number): string;
}

/** Width in pixels of a letter of the text next to the mark. */
const LETTER = 8.5;
/** Radius of the largest point with its outline and some space. */
const DOT = 13;
const ARROWS: Record<string, [number, number]> = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, 1],
  ArrowDown: [0, -1],
};
/** Step of an arrow key as a fraction of the range; with Shift ten times as much. */
const STEP = 1 / 200;

export class Scatter {
  readonly element = s("svg", { class: "plot points", role: "group", test: "regression-plot" });
  width = 640;
  private readonly back = s("g", { "aria-hidden": "true" });
  private readonly shape = s("path", { class: "shape" });
  private readonly line = s("line", { class: "query" });
  private readonly curve = s("path", { class: "curve", test: "regression-curve" });
  private readonly dots = s("g");
  private readonly mark = s("circle", { class: "mark", r: 5 });
  private readonly text = s("text", { class: "value", test: "regression-label" });
  private view: Frame | null = null;
  private drawn: Drawn | null = null;

  constructor(private readonly acts: Acts) {
    this.element.append(this.back, this.shape, this.line, this.curve, this.dots, this.mark, this.text);
    this.element.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      acts.ask(this.place(event).x);
      this.follow(this.element, event, (to) => acts.ask(to.x));
    });
    this.element.addEventListener("dblclick", (event) => acts.insert(this.place(event)));
  }

  /** Creates a dot for each point. */
  build(count: number) {
    put(this.dots, ...Array.from({ length: count }, (_, i) => this.dot(i)));
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

  private place(event: MouseEvent): Point {
    const { left, top } = this.element.getBoundingClientRect();
    return { x: this.view!.atX(event.clientX - left), y: this.view!.atY(event.clientY - top) };
  }

  /** Follows the pointer until it is released. */
  private follow(on: SVGElement, event: PointerEvent, act: (at: Point) => void) {
    on.setPointerCapture(event.pointerId);
    const moved = (e: PointerEvent) => act(this.place(e));
    const done = () => {
      on.removeEventListener("pointermove", moved);
      for (const end of ["pointerup", "pointercancel"] as const) on.removeEventListener(end, done);
    };
    on.addEventListener("pointermove", moved);
    for (const end of ["pointerup", "pointercancel"] as const) on.addEventListener(end, done);
  }

  private dot(i: number): SVGElement {
    return s("circle", {
      class: "dot",
      role: "application",
      "aria-roledescription": "movable point",
      test: `point-${i}`,
      on: {
        pointerdown: (event: PointerEvent) => {
          event.stopPropagation();
          this.focus(i);
          this.follow(event.currentTarget as SVGElement, event, (to) => this.acts.move(i, to));
        },
        dblclick: (event) => event.stopPropagation(),
        focus: () => this.acts.choose(i),
        keydown: (event: KeyboardEvent) => {
          if (this.press(i, event)) event.preventDefault();
        },
      },
    });
  }

  private press(i: number, { key, shiftKey }: KeyboardEvent): boolean {
    const { points, xs, ys } = this.drawn!;
    const { x, y } = points[i];
    const [wide, high] = [xs.high - xs.low, ys.high - ys.low];
    const step = ARROWS[key];
    if (step) {
      const by = shiftKey ? 10 * STEP : STEP;
      this.acts.move(i, { x: x + step[0] * wide * by, y: y + step[1] * high * by });
      this.acts.say(i);
    } else if (key === "PageDown") this.focus((i + 1) % points.length);
    else if (key === "PageUp") this.focus((i + points.length - 1) % points.length);
    else if (key === "Delete" || key === "Backspace") this.acts.remove(i);
    else if (key === "+" || key === "Insert") this.acts.insert({ x: x + wide / 50, y });
    else return false;
    return true;
  }

  paint(drawn: Drawn) {
    this.drawn = drawn;
    const { points, xs, ys, fine, fitted, profile, query, value, weights } = drawn;
    const size = { width: this.width, height: clamp(this.width * 0.56, 260, 560) };
    const view = frame(size, xs, ys);
    this.view = view;
    const { left, right, top, bottom } = view;
    this.element.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    this.element.setAttribute("height", String(size.height));
    put(this.back, ...axes(view, xs, ys, drawn.names));

    const height = (y: number) => (Number.isFinite(y) ? clamp(view.y(y), top - 1e3, bottom + 1e3) : NaN);
    this.curve.setAttribute("d", path(fine.map((x, i) => [view.x(x), height(fitted[i])])));
    const outline = path(fine.map((x, i) => [view.x(x), bottom - profile[i] * (bottom - top) * 0.2]));
    this.shape.setAttribute("d", `${outline}L${right} ${bottom}L${left} ${bottom}Z`);

    const at = view.x(query);
    set(this.line, { x1: at, x2: at, y1: top, y2: bottom });
    const some = Number.isFinite(value);
    for (const part of [this.mark, this.text]) part.style.setProperty("display", some ? "inline" : "none");
    if (some) {
      const y = height(value);
      set(this.mark, { cx: at, cy: y });
      this.text.textContent = `f(q) = ${numeral(value)}`;
      set(this.text, free(this.text.textContent.length, at, y, view, points));
    }

    const colours = sequential(drawn.dark);
    const most = Math.max(...weights.map(Math.abs), 1e-300);
    points.forEach((p, i) => {
      const share = Number.isFinite(weights[i]) ? Math.abs(weights[i]) / most : 0;
      const circle = this.dots.children[i] as SVGElement;
      set(circle, {
        cx: view.x(p.x),
        cy: view.y(p.y),
        r: 6 + 5 * Math.sqrt(share),
        tabindex: i === drawn.active ? 0 : -1,
        "aria-label": drawn.describePoint(i),
      });
      circle.style.setProperty("fill", css(colours, share * 0.85));
    });
  }
}

function set(element: SVGElement, attributes: Record<string, string | number>) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
}

/** The position next to (x, y) at which a label of this many letters covers the fewest points. */
function free(letters: number, x: number, y: number, { left, right, top, bottom, ...view }: Frame, points: Point[]) {
  const wide = LETTER * letters;
  const far = x > (left + right) / 2;
  const places = [y - 12, y + 24, top + 14, bottom - 24].flatMap((high) =>
    [far, !far].map((end) => ({ x: x + (end ? -12 : 12), y: clamp(high, top + 14, bottom - 8), end })),
  );
  const covered = places.map((place) => {
    const from = place.end ? place.x - wide : place.x;
    if (from < left || from + wide > right) return Infinity;
    const within = (at: number, low: number, high: number) => at > low - DOT && at < high + DOT;
    return points.filter((p) => within(view.x(p.x), from, from + wide) && within(view.y(p.y), place.y - 14, place.y + 3)).length;
  });
  const best = places[covered.indexOf(Math.min(...covered))];
  return { x: best.x, y: best.y, "text-anchor": best.end ? "end" : "start" };
}

export const SCATTER = `
svg.points { cursor: ew-resize; user-select: none; -webkit-user-select: none; }
svg.points .shape { fill: var(--second); opacity: 0.18; stroke: none; pointer-events: none; }
svg.points .value { fill: var(--ink); font-size: 15px; font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 4px; pointer-events: none; }
svg.points .dot { stroke: var(--ink); stroke-width: 1.5; cursor: move; touch-action: none; }
svg.points .dot:focus-visible { outline: none; stroke: var(--accent); stroke-width: 4; }
`;
