/** Nadaraya–Watson regression: points to drag, a kernel, a bandwidth, and the weights they make. */

import { AXES, type Range, around, axes, frame, path } from "../axes";
import { css, sequential } from "../colours";
import { fixed, h, labelled, put, s, select } from "../dom";
import * as equation from "../equation";
import type { Point } from "../equation";
import { Heatmap } from "../heatmap";
import { clamp, numeral } from "../numbers";
import type { Given, View } from "../view";
import { EXAMPLES, type Example } from "./points";

const KERNELS = ["gaussian", "laplace", "boxcar", "triangular", "epanechnikov", "constant"];
const EMPTY: [string, string][] = [
  ["nan", "no answer"],
  ["nearest", "the nearest key"],
  ["uniform", "the mean of all"],
  ["zero", "zero"],
];
/** Positions of the curve, of the heatmap's queries at most, and of the slider of the bandwidth. */
const CURVE = 240;
const QUERIES = 40;
const STEPS = 120;
/** Bandwidths that are tried: from 1/100 of the range of x to all of it. */
const NARROWEST = 0.01;
const TRIED = 41;
/** Points up to which all bandwidths are tried at every move. */
const MANY = 150;

function mount(at: HTMLElement, given: Given): () => void {
  const { data } = given;
  const own: Example | null = data.x?.length
    ? {
        name: data.name ?? "your points",
        x: data.xName ?? "x",
        y: data.yName ?? "y",
        points: Array.from(data.x as number[], (x, i) => ({ x, y: data.y[i] })),
        bandwidth: data.bandwidth,
      }
    : null;
  const examples = own ? [own, ...EXAMPLES] : EXAMPLES;

  let example = examples[0];
  let points: Point[] = [];
  let xs: Range = { low: 0, high: 1 };
  let ys: Range = { low: 0, high: 1 };
  let name = KERNELS.includes(data.score) ? (data.score as string) : "gaussian";
  let bandwidth = 1;
  let onEmpty = "nan";
  let query = 0;
  /** The point that the keyboard moves. */
  let active = 0;

  const span = () => xs.high - xs.low;
  const how = (width = bandwidth) => equation.kernel(name, width, onEmpty);
  const windowed = () => !["gaussian", "laplace", "constant"].includes(name);
  const toSlider = (width: number) => STEPS * (1 - Math.log(width / span()) / Math.log(NARROWEST));
  const fromSlider = (step: number) => span() * NARROWEST ** (1 - step / STEPS);

  // Controls.

  const slider = h("input", { type: "range", min: "0", max: String(STEPS), test: "regression-bandwidth" });
  const number = h("input", { type: "number", min: "0", step: "any", test: "regression-bandwidth-number" });
  slider.addEventListener("input", () => {
    bandwidth = Number(fromSlider(slider.valueAsNumber).toPrecision(3));
    draw();
  });
  number.addEventListener("change", () => {
    if (number.valueAsNumber > 0) bandwidth = number.valueAsNumber;
    draw();
  });
  const widthField = labelled("Bandwidth", slider);
  number.setAttribute("aria-label", "Bandwidth as a number");
  widthField.classList.add("double");
  widthField.append(h("div", { class: "pair" }, slider, number));

  const where = h("input", { type: "range", min: "0", max: "1000", test: "regression-query" });
  where.addEventListener("input", () => {
    query = xs.low + (span() * where.valueAsNumber) / 1000;
    draw();
  });
  const empty = select(EMPTY, onEmpty, (value) => {
    onEmpty = value;
    draw();
  }, { test: "regression-empty" });
  const kernels = select(
    KERNELS.map((k): [string, string] => [k, equation.SCORES[k].title]),
    name,
    (value) => {
      name = value;
      draw();
    },
    { test: "regression-kernel" },
  );
  const chosen = select(
    examples.map((e, i): [string, string] => [String(i), e.name]),
    "0",
    (value) => {
      load(examples[Number(value)]);
      given.announce(`${points.length} points of ${example.name}`);
    },
    { test: "regression-data" },
  );
  const best = h("button", { type: "button", test: "regression-best" }, "Use the best");
  const emptyField = labelled("Where no key is within", empty);

  // The plot.

  const plot = s("svg", { class: "plot points", role: "group", test: "regression-plot" });
  const back = s("g", { "aria-hidden": "true" });
  const shape = s("path", { class: "shape" });
  const curve = s("path", { class: "curve", test: "regression-curve" });
  const line = s("line", { class: "query" });
  const mark = s("circle", { class: "mark", r: 5 });
  const markText = s("text", { class: "value" });
  const dots = s("g");
  plot.append(back, shape, line, curve, dots, mark, markText);
  const bars = s("svg", { class: "plot", role: "img", test: "regression-bars" });
  let size = { width: 640, height: 380 };
  let view = frame(size, xs, ys);

  const value = h("output", { test: "regression-value" });
  const effective = h("output", { test: "regression-effective" });
  const error = h("output", { test: "regression-loo" });
  const formula = h("p", { class: "formula", test: "regression-formula" });

  // The weights, as numbers and bars.

  const body = h("tbody");
  let rows: { x: HTMLInputElement; y: HTMLInputElement; weight: HTMLElement; bar: HTMLElement }[] = [];
  const table = h(
    "table",
    { class: "points" },
    h(
      "thead",
      {},
      h("tr", {}, ...["key x", "value y", "weight α", ""].map((t) => h("th", { scope: "col" }, t))),
    ),
    body,
  );

  const tried = s("svg", { class: "plot tried", role: "img", test: "regression-tried" });
  let map: Heatmap | null = null;
  const mapAt = h("div");

  function load(next: Example) {
    example = next;
    points = next.points.map((p) => ({ ...p }));
    xs = around(points.map((p) => p.x));
    ys = around(points.map((p) => p.y), 0.12);
    bandwidth = next.bandwidth ?? Number((span() / 12).toPrecision(2));
    query = next.query ?? (xs.low + xs.high) / 2;
    active = 0;
    rebuild();
  }

  /** As many dots and rows as there are points. */
  function rebuild() {
    active = clamp(active, 0, points.length - 1);
    put(dots, ...points.map((_, i) => dot(i)));
    rows = points.map((_, i) => row(i));
    put(
      body,
      ...rows.map((r, i) =>
        h("tr", {}, h("td", {}, r.x), h("td", {}, r.y), h("td", { class: "number" }, r.weight), h("td", {}, r.bar),
          h("td", {}, h("button", {
            type: "button", class: "quiet", "aria-label": `Remove point ${i + 1}`, title: "Remove",
            disabled: points.length < 3, on: { click: () => remove(i) },
          }, "×"))),
      ),
    );
    draw();
  }

  function row(i: number) {
    const input = (axis: "x" | "y") =>
      h("input", {
        type: "number", step: "any", test: `point-${i}-${axis}`, "aria-label": `Point ${i + 1}, ${axis}`,
        on: {
          change: (event) => {
            const to = event.target.valueAsNumber;
            if (Number.isFinite(to)) move(i, axis === "x" ? { ...points[i], x: to } : { ...points[i], y: to }, true);
          },
        },
      });
    const weight = h("output", { test: `point-${i}-weight` });
    return { x: input("x"), y: input("y"), weight, bar: h("span", { class: "bar" }, h("i")) };
  }

  function move(i: number, to: Point, grow = false) {
    if (grow) {
      // A point that was typed may lie outside of what is shown.
      const reach = (range: Range, x: number) =>
        x < range.low || x > range.high ? around([range.low, range.high, x]) : range;
      [xs, ys] = [reach(xs, to.x), reach(ys, to.y)];
    }
    const digits = (range: Range) => Math.max(0, 2 - Math.floor(Math.log10((range.high - range.low) / 10)));
    points[i] = {
      x: grow ? to.x : Number(clamp(to.x, xs.low, xs.high).toFixed(digits(xs))),
      y: grow ? to.y : Number(clamp(to.y, ys.low, ys.high).toFixed(digits(ys))),
    };
    draw();
  }

  function insert(to: Point) {
    points.push(to);
    active = points.length - 1;
    rebuild();
    move(active, to);
    (dots.children[active] as SVGElement).focus();
    given.announce(`Point ${points.length} is new`);
  }

  function remove(i: number) {
    if (points.length < 3) return;
    points.splice(i, 1);
    rebuild();
    given.announce(`${points.length} points are left`);
  }

  function place(event: MouseEvent): Point {
    const { left, top } = plot.getBoundingClientRect();
    return { x: view.atX(event.clientX - left), y: view.atY(event.clientY - top) };
  }

  /** Follows the pointer from here until it lets go. */
  function follow(on: SVGElement, event: PointerEvent, act: (at: Point) => void) {
    on.setPointerCapture(event.pointerId);
    const moved = (e: PointerEvent) => act(place(e));
    const done = () => {
      on.removeEventListener("pointermove", moved);
      for (const end of ["pointerup", "pointercancel"] as const) on.removeEventListener(end, done);
    };
    on.addEventListener("pointermove", moved);
    for (const end of ["pointerup", "pointercancel"] as const) on.addEventListener(end, done);
  }

  function dot(i: number): SVGElement {
    const steps: Record<string, [number, number]> = {
      ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1],
    }; // prettier-ignore
    const press = (event: KeyboardEvent) => {
      const step = steps[event.key];
      const by = event.shiftKey ? 20 : 200;
      if (step) {
        const [dx, dy] = [(step[0] * span()) / by, (step[1] * (ys.high - ys.low)) / by];
        move(i, { x: points[i].x + dx, y: points[i].y + dy });
        given.announce(described(i));
      } else if (event.key === "PageDown" || event.key === "PageUp") {
        active = (i + (event.key === "PageDown" ? 1 : points.length - 1)) % points.length;
        draw();
        (dots.children[active] as SVGElement).focus();
      } else if (event.key === "Delete" || event.key === "Backspace") {
        remove(i);
        (dots.children[active] as SVGElement).focus();
      } else if (event.key === "+" || event.key === "Insert") {
        insert({ x: points[i].x + span() / 50, y: points[i].y });
      } else return;
      event.preventDefault();
    };
    return s("circle", {
      class: "dot",
      role: "application",
      "aria-roledescription": "movable point",
      test: `point-${i}`,
      on: {
        pointerdown: (event: PointerEvent) => {
          event.stopPropagation();
          active = i;
          (event.currentTarget as SVGElement).focus({ preventScroll: true });
          follow(event.currentTarget as SVGElement, event, (to) => move(i, to));
        },
        dblclick: (event) => event.stopPropagation(),
        focus: () => {
          active = i;
          draw();
        },
        keydown: press,
      },
    });
  }

  function described(i: number): string {
    return `Point ${i + 1}: x ${numeral(points[i].x)}, y ${numeral(points[i].y)}, weight ${rows[i].weight.textContent}`;
  }

  plot.addEventListener("pointerdown", (event) => {
    const to = (p: Point) => {
      query = clamp(p.x, xs.low, xs.high);
      draw();
    };
    if (event.button === 0) {
      to(place(event));
      follow(plot, event, to);
    }
  });
  plot.addEventListener("dblclick", (event) => insert(place(event)));

  // Drawing, once a frame.

  let waiting = 0;
  function draw() {
    waiting ||= requestAnimationFrame(() => {
      waiting = 0;
      paint();
    });
  }

  function paint() {
    const kernel = how();
    view = frame(size, xs, ys);
    plot.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    plot.setAttribute("height", String(size.height));
    put(back, ...axes(view, xs, ys, { x: example.x, y: example.y }));

    const line_ = Array.from({ length: CURVE + 1 }, (_, i) => xs.low + (span() * i) / CURVE);
    const fitted = line_.map((x) => equation.regress(points, x, kernel).value![0]);
    curve.setAttribute("d", path(line_.map((x, i) => [view.x(x), clampedY(fitted[i])])));

    // The kernel itself stands at the foot, around the query.
    const score = equation.score(kernel.score);
    const profile = (x: number) => (score.nonnegative ? score.at([query], [x]) : Math.exp(score.at([query], [x])));
    const foot = (x: number) => view.bottom - profile(x) * (view.bottom - view.top) * 0.2;
    const outline = path(line_.map((x) => [view.x(x), foot(x)]));
    shape.setAttribute("d", `${outline}L${view.right} ${view.bottom}L${view.left} ${view.bottom}Z`);

    const here = equation.regress(points, query, kernel);
    const y = here.value![0];
    const at = view.x(query);
    for (const [key, to] of [["x1", at], ["x2", at], ["y1", view.top], ["y2", view.bottom]] as const) {
      line.setAttribute(key, String(to));
    }
    const some = Number.isFinite(y);
    for (const part of [mark, markText]) part.style.setProperty("display", some ? "inline" : "none");
    if (some) {
      mark.setAttribute("cx", String(at));
      mark.setAttribute("cy", String(clampedY(y)));
      const left = at > (view.left + view.right) / 2;
      markText.setAttribute("x", String(at + (left ? -12 : 12)));
      markText.setAttribute("text-anchor", left ? "end" : "start");
      markText.setAttribute("y", String(clamp(clampedY(y) - 12, view.top + 14, view.bottom - 8)));
      markText.textContent = `f(q) = ${numeral(y)}`;
    }

    const colours = sequential(given.dark());
    const most = Math.max(...here.weights.map(Math.abs), 1e-300);
    points.forEach((p, i) => {
      const weight = here.weights[i];
      const share = Number.isFinite(weight) ? Math.abs(weight) / most : 0;
      const circle = dots.children[i] as SVGElement;
      circle.setAttribute("cx", String(view.x(p.x)));
      circle.setAttribute("cy", String(view.y(p.y)));
      circle.setAttribute("r", String(6 + 5 * Math.sqrt(share)));
      circle.style.setProperty("fill", css(colours, share * 0.85));
      circle.setAttribute("tabindex", i === active ? "0" : "-1");
      const r = rows[i];
      const root = at_root();
      if (root !== r.x) r.x.value = String(p.x);
      if (root !== r.y) r.y.value = String(p.y);
      r.weight.textContent = fixed(weight);
      (r.bar.firstChild as HTMLElement).style.setProperty("width", `${100 * clamp(weight || 0, 0, 1)}%`);
      circle.setAttribute("aria-label", described(i));
    });

    stand(here.weights);

    const { error: off, alone } = equation.heldOutError(points, kernel);
    value.textContent = some ? numeral(y) : "no answer";
    effective.textContent = `${fixed(here.effective, 2)} of ${points.length}`;
    error.textContent = numeral(off) + (alone ? `, ${alone} alone` : "");
    const weighting = equation.weighting(kernel.weighting).name;
    const lines = ["f(q) = Σᵢ α(q, kᵢ) vᵢ", equation.WEIGHTINGS[weighting].formula.replaceAll("/T", ""), equation.SCORES[name].formula];
    put(formula, ...lines.map((text) => h("span", {}, text)));
    plot.setAttribute(
      "aria-label",
      `${points.length} points and the fitted curve; at ${example.x} ${numeral(query)} it is ${value.textContent}. ` +
        "Arrow keys move a point, Page Up and Page Down choose another, plus adds one, Delete removes it.",
    );

    slider.disabled = number.disabled = best.disabled = name === "constant";
    emptyField.hidden = !windowed();
    slider.value = String(toSlider(bandwidth));
    slider.setAttribute("aria-valuetext", `${numeral(bandwidth)}, leave-one-out error ${error.textContent}`);
    if (at_root() !== number) number.value = String(Number(bandwidth.toPrecision(4)));
    where.value = String((1000 * (query - xs.low)) / span());
    where.setAttribute("aria-valuetext", `${numeral(query)}: ${value.textContent}`);
    compare(off);
    weigh(kernel);
  }

  /** The query's weights, each below its point. */
  function stand(weights: Float64Array) {
    const heaviest = weights.reduce((best, w, i) => (w > (weights[best] || 0) ? i : best), 0);
    const high = weights[heaviest] || 1;
    const box = { width: size.width, height: 96, margin: { top: 22, bottom: 8 } };
    const inside = frame(box, xs, { low: 0, high });
    bars.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    bars.setAttribute("height", String(box.height));
    const some = points.filter((_, i) => weights[i] > 0);
    const thick = clamp((inside.right - inside.left) / points.length / 2, 3, 12);
    put(
      bars,
      s("line", { class: "grid", x1: inside.left, x2: inside.right, y1: inside.bottom, y2: inside.bottom }),
      s("text", { class: "tick", x: inside.left - 8, y: inside.bottom + 4, "text-anchor": "end" }, "0"),
      s("text", { class: "axis", x: inside.left - 8, y: inside.top + 12, "text-anchor": "end" }, "α"),
      ...points.map((p, i) => {
        const top = inside.y(weights[i] || 0);
        return s("rect", {
          class: i === active && at_root() === dots.children[i] ? "bar-of active" : "bar-of",
          x: inside.x(p.x) - thick / 2, y: top, width: thick, height: Math.max(inside.bottom - top, 0),
        }, s("title", {}, `x ${p.x}: ${fixed(weights[i])}`));
      }),
      some.length > 0 &&
        s("text", { class: "tick", x: clamp(inside.x(points[heaviest].x), inside.left + 20, inside.right - 20), y: inside.top - 7, "text-anchor": "middle" }, fixed(high)),
    );
    bars.setAttribute(
      "aria-label",
      some.length
        ? `Weights of the query: ${some.length} points count, most the one at ${points[heaviest].x} with ${fixed(high)}`
        : "No point has a weight",
    );
  }

  /** The element with the focus, inside of the shadow. */
  function at_root(): Element | null {
    return (at.getRootNode() as ShadowRoot).activeElement;
  }

  function clampedY(y: number): number {
    return Number.isFinite(y) ? clamp(view.y(y), view.top - 1e3, view.bottom + 1e3) : NaN;
  }

  /** The error of each bandwidth, and which has the least. */
  let least = NaN;
  let compared = "";
  function compare(off: number) {
    const now = JSON.stringify([name, onEmpty, points, size.width]);
    const widths = Array.from({ length: TRIED }, (_, i) => fromSlider((STEPS * i) / (TRIED - 1)));
    if (now !== compared && points.length <= MANY && name !== "constant") {
      compared = now;
      errors = widths.map((width) => {
        const found = equation.heldOutError(points, how(width));
        return found.alone ? NaN : found.error;
      });
      const good = errors.map((e) => (Number.isNaN(e) ? Infinity : e));
      least = widths[good.indexOf(Math.min(...good))];
    }
    tried.parentElement!.hidden = name === "constant" || points.length > MANY;
    if (name === "constant" || points.length > MANY) return;
    const box = { width: tried.clientWidth || 280, height: 110, margin: { left: 44, bottom: 34, top: 14 } };
    const logs = { low: Math.log10(widths[0]), high: Math.log10(widths[TRIED - 1]) };
    const high = Math.max(...errors.filter(Number.isFinite), Number.isFinite(off) ? off : 0) || 1;
    const tall = around([...errors.filter(Number.isFinite), off].filter(Number.isFinite), 0.1);
    const inside = frame(box, logs, tall);
    tried.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    tried.setAttribute("height", String(box.height));
    const x = inside.x(Math.log10(bandwidth));
    put(
      tried,
      s("line", { class: "grid", x1: inside.left, x2: inside.right, y1: inside.bottom, y2: inside.bottom }),
      ...[widths[0], widths[TRIED - 1]].map((w, i) =>
        s("text", { class: "tick", x: i ? inside.right : inside.left, y: inside.bottom + 17, "text-anchor": i ? "end" : "start" }, numeral(w, 0, 2)),
      ),
      ...[Math.min(...errors.filter(Number.isFinite)), high].filter(Number.isFinite).map((e) =>
        s("text", { class: "tick", x: inside.left - 6, y: inside.y(e) + 4, "text-anchor": "end" }, numeral(e, 0, 2)),
      ),
      s("text", { class: "axis", x: (inside.left + inside.right) / 2, y: inside.bottom + 28, "text-anchor": "middle" }, "bandwidth"),
      s("path", { class: "curve", d: path(widths.map((w, i) => [inside.x(Math.log10(w)), inside.y(errors[i])])) }),
      Number.isFinite(least) && s("line", { class: "least", x1: inside.x(Math.log10(least)), x2: inside.x(Math.log10(least)), y1: inside.top, y2: inside.bottom }),
      Number.isFinite(off) && s("circle", { class: "mark", cx: clamp(x, inside.left, inside.right), cy: inside.y(off), r: 5 }),
    );
    tried.setAttribute("aria-label", `Leave-one-out error of each bandwidth; the least is at ${numeral(least, 0, 3)}`);
    best.textContent = `Use the best, ${numeral(least, 0, 3)}`;
    best.disabled = !Number.isFinite(least);
  }
  let errors: number[] = [];
  best.addEventListener("click", () => {
    bandwidth = Number(least.toPrecision(4));
    draw();
  });

  let queries: number[] = [];
  function weigh(kernel: equation.Kernel) {
    const order = Array.from(points.keys()).sort((i, j) => points[i].x - points[j].x);
    const count = clamp(points.length, 16, QUERIES);
    queries = Array.from({ length: count }, (_, i) => xs.low + (span() * (i + 0.5)) / count);
    const data = new Float64Array(count * points.length);
    queries.forEach((x, i) => {
      const { weights } = equation.regress(points, x, kernel);
      order.forEach((j, k) => {
        data[i * points.length + k] = weights[j];
      });
    });
    const matrix = { data, rows: count, cols: points.length };
    const names = {
      label: "Weights of every key for queries from left to right",
      rowNames: queries.map((x) => numeral(x, 0, 3)),
      colNames: order.map((j) => numeral(points[j].x, 0, 3)),
    };
    if (map) return map.update(matrix, names);
    map = new Heatmap({
      ...names,
      matrix,
      rowTitle: "query",
      colTitle: "key, by x",
      given,
      at,
      side: 360,
      test: "regression-weights",
      onCell: (cell) => {
        if (!cell) return;
        query = queries[cell.row];
        draw();
      },
    });
    mapAt.append(map.element);
  }

  const fact = (name: string, out: HTMLElement) => h("div", {}, h("dt", {}, name), h("dd", {}, out));
  at.append(
    h(
      "div",
      { class: "controls" },
      labelled("Data", chosen),
      labelled("Kernel", kernels),
      widthField,
      emptyField,
    ),
    h(
      "div",
      { class: "regression" },
      h(
        "section",
        { "aria-label": "Points and curve" },
        h("div", { class: "plot-box" }, plot, bars),
        labelled("Query", where),
        h(
          "dl",
          { class: "facts" },
          fact("f(q)", value),
          fact("effective rows", effective),
          fact("leave-one-out error", error),
        ),
        formula,
        h("p", { class: "hint" }, "Drag a point or the query. A double click adds a point."),
      ),
      h(
        "section",
        {},
        h("h3", {}, "Which bandwidth?"),
        h("p", { class: "hint" }, "Each point is predicted by the others; the error is the root of the mean square."),
        h("div", { class: "tried-box" }, tried),
        best,
        h("h3", { class: "next" }, "The weights of every query"),
        mapAt,
      ),
    ),
    h(
      "details",
      { test: "regression-points" },
      h("summary", {}, "The points and their weights as numbers"),
      h("div", { class: "scroll" }, table),
    ),
  );

  const box = plot.parentElement!;
  const observer = new ResizeObserver(() => {
    const width = box.clientWidth;
    if (!width || width === size.width) return;
    size = { width, height: clamp(width * 0.56, 260, 560) };
    draw();
  });
  observer.observe(box);
  at.addEventListener("theme", draw);
  load(example);
  return () => {
    observer.disconnect();
    at.removeEventListener("theme", draw);
    cancelAnimationFrame(waiting);
    map?.destroy();
    at.replaceChildren();
  };
}

export const view: View = {
  name: "regression",
  title: "Regression",
  style: `${AXES}
.regression { display: grid; grid-template-columns: minmax(0, 1.8fr) minmax(17rem, 1fr); gap: 1.5rem 2.5rem; }
@container page (min-width: 30rem) { .controls > .double { grid-column: span 2; } }
.regression .field { padding: 0 4px 0 40px; }
.pair { display: flex; gap: 0.75rem; align-items: center; }
.pair > input[type="number"] { flex: 0 0 5.5rem; }
@container page (max-width: 56rem) { .regression { grid-template-columns: minmax(0, 1fr); } }
.regression h3.next { margin-top: 1.5rem; }
table.points { max-width: 40rem; }
table.points input { padding: 0.15rem 0.35rem; min-width: 4.5rem; font-variant-numeric: tabular-nums; }
table.points td { padding: 0.15rem 0.5rem 0.15rem 0; }
summary { cursor: pointer; color: var(--soft); margin: 1.5rem 0 0.5rem; }
.formula > span { display: inline-block; margin-inline-end: 2rem; }
.facts { display: flex; flex-wrap: wrap; gap: 0.5rem 2.5rem; margin: 0.75rem 0; }
.facts dt { font-size: 0.85rem; color: var(--soft); }
.facts dd { margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
svg.plot .curve { fill: none; stroke: var(--accent); stroke-width: 3; stroke-linejoin: round; pointer-events: none; }
svg.plot .shape { fill: var(--second); opacity: 0.18; stroke: none; pointer-events: none; }
svg.plot .query { stroke: var(--second); stroke-width: 2; stroke-dasharray: 5 4; }
svg.plot .least { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 3 3; }
svg.plot .mark { fill: var(--second); stroke: var(--paper); stroke-width: 1.5; pointer-events: none; }
svg.plot .value { fill: var(--ink); font-size: 15px; font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 4px; pointer-events: none; }
svg.plot .bar-of { fill: var(--accent); }
svg.plot .bar-of.active { fill: var(--second); }
svg.points { cursor: ew-resize; user-select: none; -webkit-user-select: none; }
svg.points .dot { stroke: var(--ink); stroke-width: 1.5; cursor: move; touch-action: none; }
svg.points .dot:focus-visible { outline: none; stroke: var(--accent); stroke-width: 4; }
`,
  mount,
};
