/** The view Regression: Nadaraya–Watson regression with draggable points, a kernel and a bandwidth. */

import { type Range, around } from "../axes";
import { long } from "../bars";
import { fixed, h, labelled, onceAFrame, put, s, select } from "../dom";
import * as equation from "../equation";
import type { Point } from "../equation";
import { Heatmap } from "../heatmap";
import { alike, clamp, counted, numeral } from "../numbers";
import { slider } from "../slider";
import { stems } from "../stems";
import type { Given, View } from "../view";
import { isTensor } from "../wire";
import { BANDWIDTHS, Bandwidths } from "../regression/bandwidths";
import { EXAMPLES, type Example } from "../regression/points";
import { SCATTER, Scatter } from "../regression/scatter";

const KERNELS = ["gaussian", "laplace", "boxcar", "triangular", "epanechnikov", "constant"];
const EMPTY: [string, string][] = [
  ["nan", "no value"],
  ["nearest", "the nearest key"],
  ["uniform", "the mean of all keys"],
  ["zero", "zero"],
];
/** Points of the curve, and the smallest and largest number of queries of the heatmap. */
const CURVE = 240;
const QUERIES: [number, number] = [16, 40];
/** The smallest bandwidth, as a fraction of the range of x. */
const NARROWEST = 0.01;
/** Leave-one-out needs at least this many points. */
const FEWEST = 2;
const KEYS =
  "Arrow keys move a point, Page Up and Page Down choose another, plus adds one, Delete removes it.";

/** The points from Python. */
function own({ x, y, name, names, bandwidth }: any): Example[] {
  const [keys, values] = [x, y].map((some) => (isTensor(some) ? some.data : some) as ArrayLike<number>);
  if (!keys?.length) return [];
  const points = Array.from(keys, (key, i) => ({ x: key, y: values[i] }));
  return [{ name: name ?? "your points", x: names?.[0] ?? "x", y: names?.[1] ?? "y", points, bandwidth }];
}

function mount(at: HTMLElement, given: Given): () => void {
  const examples = [...own(given.data), ...EXAMPLES];
  let example = examples[0];
  let points: Point[] = [];
  let xs: Range = { low: 0, high: 1 };
  let ys: Range = { low: 0, high: 1 };
  let name = KERNELS.includes(given.data.score) ? (given.data.score as string) : "gaussian";
  let bandwidth = 1;
  let onEmpty = "nan";
  let query = 0;
  let active = 0;

  const span = () => xs.high - xs.low;
  const widths = () => ({ low: span() * NARROWEST, high: span() });
  const kernel = (width = bandwidth) => equation.kernel(name, width, onEmpty);

  // Controls.

  const width = slider({
    label: "Bandwidth",
    range: widths(),
    value: bandwidth,
    log: true,
    test: "regression-bandwidth",
    change: (to) => {
      bandwidth = to;
      draw();
    },
  });
  const where = slider({
    label: "Query",
    range: xs,
    value: query,
    test: "regression-query",
    change: (to) => {
      query = to;
      draw();
    },
  });
  const chosen = select(
    examples.map((e, i): [string, string] => [String(i), e.name]),
    "0",
    (to) => {
      load(examples[Number(to)]);
      given.announce(`${points.length} points of ${example.name}`);
    },
    { test: "regression-data" },
  );
  const kernels = select(
    KERNELS.map((k): [string, string] => [k, equation.SCORES[k].title]),
    name,
    (to) => {
      name = to;
      draw();
    },
    { test: "regression-kernel" },
  );
  const empty = select(
    EMPTY,
    onEmpty,
    (to) => {
      onEmpty = to;
      draw();
    },
    { test: "regression-empty" },
  );
  const emptyField = labelled("If no key is in the window", empty);

  // Output.

  const plot = new Scatter({
    move: (i, to) => move(i, { x: clamp(to.x, xs.low, xs.high), y: clamp(to.y, ys.low, ys.high) }),
    insert,
    remove,
    choose: (i) => {
      active = i;
      draw();
    },
    say: (i) => given.announce(placed(i)),
    ask: (x) => {
      query = clamp(x, xs.low, xs.high);
      draw();
    },
  });
  const errors = new Bandwidths((best) => {
    bandwidth = best;
    draw();
  });
  const bars = s("svg", { class: "plot", role: "img", test: "regression-bars" });
  const value = h("output", { test: "regression-value" });
  const effective = h("output", { test: "regression-effective" });
  const error = h("output", { test: "regression-loo" });
  const formula = h("p", { class: "formula", test: "regression-formula" });
  const body = h("tbody");
  let rows: { x: HTMLInputElement; y: HTMLInputElement; weight: HTMLElement; bar: HTMLElement }[] = [];
  const mapAt = h("div");
  let map: Heatmap | null = null;
  let queries: number[] = [];

  // Changes of the points.

  function load(next: Example) {
    example = next;
    points = next.points.map((p) => ({ ...p }));
    xs = around(points.map((p) => p.x));
    ys = around(points.map((p) => p.y), 0.12);
    bandwidth = next.bandwidth ?? Number((span() / 12).toPrecision(2));
    query = next.query ?? (xs.low + xs.high) / 2;
    active = 0;
    given.unsaved(false);
    rebuild();
  }

  /** Creates a dot and a table row for each point. */
  function rebuild() {
    active = clamp(active, 0, points.length - 1);
    plot.build(points.length);
    rows = points.map((_, i) => row(i));
    put(
      body,
      ...rows.map((r, i) => {
        const away = h(
          "button",
          {
            type: "button",
            class: "quiet",
            "aria-label": `Remove point ${i + 1}`,
            disabled: points.length <= FEWEST,
            on: { click: () => remove(i) },
          },
          "×",
        );
        const cells = [r.x, r.y, r.weight, r.bar, away];
        return h("tr", {}, ...cells.map((cell) => h("td", { class: cell === r.weight ? "number" : undefined }, cell)));
      }),
    );
    draw();
  }

  function row(i: number) {
    const input = (axis: "x" | "y") =>
      h("input", {
        type: "number",
        step: "any",
        test: `point-${i}-${axis}`,
        "aria-label": `Point ${i + 1}, ${axis}`,
        on: {
          change: (event) => {
            const to = event.target.valueAsNumber;
            if (!Number.isFinite(to)) return;
            // A typed number may be outside of the visible range.
            const wider = (range: Range) =>
              to < range.low || to > range.high ? around([range.low, range.high, to]) : range;
            if (axis === "x") xs = wider(xs);
            else ys = wider(ys);
            points[i] = { ...points[i], [axis]: to };
            given.unsaved(true);
            draw();
          },
        },
      });
    return {
      x: input("x"),
      y: input("y"),
      weight: h("output", { test: `point-${i}-weight` }),
      bar: h("span", { class: "bar" }, h("i")),
    };
  }

  function move(i: number, to: Point) {
    const digits = (range: Range) => clamp(3 - Math.floor(Math.log10(range.high - range.low)), 0, 20);
    points[i] = { x: Number(to.x.toFixed(digits(xs))), y: Number(to.y.toFixed(digits(ys))) };
    given.unsaved(true);
    draw();
  }

  function insert(to: Point) {
    points.push(to);
    active = points.length - 1;
    rebuild();
    move(active, { x: clamp(to.x, xs.low, xs.high), y: clamp(to.y, ys.low, ys.high) });
    plot.focus(active);
    given.announce(`${placed(active)} is new`);
  }

  function remove(i: number) {
    if (points.length <= FEWEST) return;
    const held = plot.focused !== null;
    points.splice(i, 1);
    given.unsaved(true);
    rebuild();
    if (held) plot.focus(active);
    given.announce(`${points.length} points are left`);
  }

  const placed = (i: number) => `Point ${i + 1}: x ${numeral(points[i].x)}, y ${numeral(points[i].y)}`;

  // Drawing, once a frame.

  const draw = onceAFrame(paint);

  function paint() {
    const how = kernel();
    const f = equation.regress(points, how);
    const here = f(query);
    const y = here.value![0];
    const off = equation.heldOutError(points, how);
    value.textContent = Number.isFinite(y) ? numeral(y) : "no value";
    effective.textContent = `${fixed(here.effective, 2)} of ${points.length}`;
    error.textContent = numeral(off.error) + (off.alone ? `, without ${counted(off.alone, "isolated point")}` : "");
    const lines = [
      "f(q) = Σᵢ α(q, kᵢ) vᵢ",
      equation.WEIGHTINGS[equation.weighting(how.weighting).name].formula.replaceAll("/T", ""),
      equation.SCORES[name].formula,
    ];
    put(formula, ...lines.map((text) => h("span", {}, text)));

    const constant = name === "constant";
    width.setEnabled(!constant);
    width.describe(`, leave-one-out error ${error.textContent}`);
    width.set(bandwidth, widths());
    where.describe(`: ${value.textContent}`);
    where.set(query, xs);
    emptyField.hidden = constant || name === "gaussian" || name === "laplace";
    list(here.weights);
    scatter(how, f, here);
    stems(bars, { width: plot.width, xs, at: points.map((p) => p.x), weights: here.weights, marked: plot.focused });
    errors.paint(points, widths(), constant ? null : kernel, { width: bandwidth, error: off.error });
    weigh(f);
  }

  function list(weights: Float64Array) {
    const typed = (at.getRootNode() as ShadowRoot).activeElement;
    rows.forEach(({ x, y, weight, bar }, i) => {
      if (typed !== x) x.value = String(points[i].x);
      if (typed !== y) y.value = String(points[i].y);
      weight.textContent = fixed(weights[i]);
      (bar.firstChild as HTMLElement).style.setProperty("width", long(weights[i]));
    });
  }

  function scatter(how: equation.Kernel, f: (x: number) => equation.Attended, here: equation.Attended) {
    const fine = Array.from({ length: CURVE + 1 }, (_, i) => xs.low + (span() * i) / CURVE);
    const score = equation.score(how.score);
    const shape = (x: number) => score.at([query], [x]);
    plot.paint({
      points,
      xs,
      ys,
      names: { x: example.x, y: example.y },
      fine,
      fitted: fine.map((x) => f(x).value![0]),
      profile: fine.map((x) => (score.nonnegative ? shape(x) : Math.exp(shape(x)))),
      query,
      value: here.value![0],
      weights: here.weights,
      active,
      dark: given.dark(),
      describePoint: (i) => `${placed(i)}, weight ${fixed(here.weights[i])}`,
    });
    plot.element.setAttribute(
      "aria-label",
      `${points.length} points and the fitted curve, at ${example.x} ${numeral(query)} ${value.textContent}. ${KEYS}`,
    );
  }

  /** Draws the weights of queries from left to right. */
  function weigh(f: (x: number) => equation.Attended) {
    const order = Array.from(points.keys()).sort((i, j) => points[i].x - points[j].x);
    const count = clamp(points.length, ...QUERIES);
    queries = Array.from({ length: count }, (_, i) => xs.low + (span() * (i + 0.5)) / count);
    const found = queries.map((x) => f(x).weights);
    const data = Float64Array.from(found.flatMap((weights) => order.map((j) => weights[j])));
    const matrix = { data, rows: count, cols: points.length };
    const names = {
      label: "Weights of every key for queries from left to right",
      rowNames: alike(queries),
      colNames: alike(order.map((j) => points[j].x)),
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

  const fact = (title: string, out: HTMLElement) => h("div", {}, h("dt", {}, title), h("dd", {}, out));
  const box = h("div", {}, plot.element, bars);
  const heads = ["key x", "value y", "weight α", "", ""].map((text) => h("th", { scope: "col" }, text));
  at.append(
    h(
      "div",
      { class: "controls several" },
      labelled("Data", chosen),
      labelled("Kernel", kernels),
      width.element,
      emptyField,
    ),
    h(
      "div",
      { class: "regression" },
      h(
        "section",
        { "aria-label": "Points and curve" },
        box,
        where.element,
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
      h("div", {}, errors.element, h("section", {}, h("h3", {}, "The weights of every query"), mapAt)),
    ),
    h(
      "details",
      { test: "regression-points" },
      h("summary", {}, "Points and weights as numbers"),
      h("div", { class: "scroll" }, h("table", { class: "numbers" }, h("thead", {}, h("tr", {}, ...heads)), body)),
    ),
  );
  const observer = new ResizeObserver(() => {
    if (!box.clientWidth || box.clientWidth === plot.width) return;
    plot.width = box.clientWidth;
    draw();
  });
  observer.observe(box);
  at.addEventListener("theme", draw);
  load(example);
  return () => {
    observer.disconnect();
    at.removeEventListener("theme", draw);
    draw.stop();
    map?.destroy();
    at.replaceChildren();
  };
}

export const view: View = {
  name: "regression",
  title: "Regression",
  style: `${SCATTER}${BANDWIDTHS}
.regression { display: grid; grid-template-columns: minmax(0, 1.8fr) minmax(17rem, 1fr); gap: 1.5rem 2.5rem; }
@container page (max-width: 56rem) { .regression { grid-template-columns: minmax(0, 1fr); } }
table.numbers { max-width: 40rem; }
table.numbers input { padding: 0.15rem 0.35rem; min-width: 4.5rem; font-variant-numeric: tabular-nums; }
table.numbers td { padding: 0.15rem 0.5rem 0.15rem 0; }
`,
  mount,
};
