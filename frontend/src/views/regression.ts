/** The view Regression: Nadaraya–Watson regression with draggable points, a kernel and a bandwidth. */

import { type Range, computeRange } from "../axes";
import { formatBarWidth } from "../bars";
import { formatFixed, h, createField, throttleToFrame, replaceChildren, s, createSelect } from "../dom";
import * as equation from "../equation";
import type { Point } from "../equation";
import { Heatmap } from "../heatmap";
import { formatAxisNumbers, clamp, formatCount, formatSignificant } from "../numbers";
import { createSlider } from "../slider";
import { drawStems } from "../stems";
import type { ViewContext, View } from "../view";
import { isTensor } from "../wire";
import { BANDWIDTHS_STYLE, Bandwidths } from "../regression/bandwidths";
import { EXAMPLES, type Example } from "../regression/points";
import { SCATTER_STYLE, Scatter } from "../regression/scatter";

const KERNELS = ["gaussian", "laplace", "boxcar", "triangular", "epanechnikov", "constant"];
const EMPTY_WINDOW_OPTIONS: [string, string][] = [
  ["nan", "no value"],
  ["nearest", "the nearest key"],
  ["uniform", "the mean of all keys"],
  ["zero", "zero"],
];
/** Points of the curve, and the smallest and largest number of queries of the heatmap. */
const CURVE_POINTS = 240;
const QUERY_COUNTS: [number, number] = [16, 40];
/** The smallest bandwidth, as a fraction of the range of x. */
const MIN_RELATIVE_BANDWIDTH = 0.01;
/** Leave-one-out needs at least this many points. */
const MIN_POINTS = 2;
const KEYBOARD_HELP =
  "Arrow keys move a point, Page Up and Page Down choose another, plus adds one, Delete removes it.";

/** The points from Python. */
function readPoints({ x, y, name, names, bandwidth }: any): Example[] {
  const [keys, values] = [x, y].map((array) => (isTensor(array) ? array.data : array) as ArrayLike<number>);
  if (!keys?.length) return [];
  const points = Array.from(keys, (key, i) => ({ x: key, y: values[i] }));
  return [{ name: name ?? "your points", x: names?.[0] ?? "x", y: names?.[1] ?? "y", points, bandwidth }];
}

function mount(container: HTMLElement, context: ViewContext): () => void {
  const examples = [...readPoints(context.data), ...EXAMPLES];
  let example = examples[0];
  let points: Point[] = [];
  let xs: Range = { low: 0, high: 1 };
  let ys: Range = { low: 0, high: 1 };
  let kernelName = KERNELS.includes(context.data.score) ? (context.data.score as string) : "gaussian";
  let bandwidth = 1;
  let onEmpty = "nan";
  let query = 0;
  let active = 0;

  const getSpan = () => xs.high - xs.low;
  const getBandwidthRange = () => ({ low: getSpan() * MIN_RELATIVE_BANDWIDTH, high: getSpan() });
  const getKernel = (width = bandwidth) => equation.createKernel(kernelName, width, onEmpty);

  // Controls.

  const bandwidthSlider = createSlider({
    label: "Bandwidth",
    range: getBandwidthRange(),
    value: bandwidth,
    isLogarithmic: true,
    test: "regression-bandwidth",
    onChange: (newValue) => {
      bandwidth = newValue;
      draw();
    },
  });
  const querySlider = createSlider({
    label: "Query",
    range: xs,
    value: query,
    test: "regression-query",
    onChange: (newValue) => {
      query = newValue;
      draw();
    },
  });
  const exampleSelect = createSelect(
    examples.map((e, i): [string, string] => [String(i), e.name]),
    "0",
    (newValue) => {
      loadExample(examples[Number(newValue)]);
      context.announce(`${points.length} points of ${example.name}`);
    },
    { test: "regression-data" },
  );
  const kernelSelect = createSelect(
    KERNELS.map((k): [string, string] => [k, equation.SCORES[k].title]),
    kernelName,
    (newValue) => {
      kernelName = newValue;
      draw();
    },
    { test: "regression-kernel" },
  );
  const emptySelect = createSelect(
    EMPTY_WINDOW_OPTIONS,
    onEmpty,
    (newValue) => {
      onEmpty = newValue;
      draw();
    },
    { test: "regression-empty" },
  );
  const emptyField = createField("If no key is in the window", emptySelect);

  // Output.

  const scatterPlot = new Scatter({
    movePoint: (i, point) => movePoint(i, { x: clamp(point.x, xs.low, xs.high), y: clamp(point.y, ys.low, ys.high) }),
    insertPoint,
    removePoint,
    choosePoint: (i) => {
      active = i;
      draw();
    },
    announcePoint: (i) => context.announce(describePosition(i)),
    setQuery: (x) => {
      query = clamp(x, xs.low, xs.high);
      draw();
    },
  });
  const bandwidthPlot = new Bandwidths((best) => {
    bandwidth = best;
    draw();
  });
  const barPlot = s("svg", { class: "plot", role: "img", test: "regression-bars" });
  const value = h("output", { test: "regression-value" });
  const effective = h("output", { test: "regression-effective" });
  const error = h("output", { test: "regression-loo" });
  const formula = h("p", { class: "formula", test: "regression-formula" });
  const body = h("tbody");
  let rows: { x: HTMLInputElement; y: HTMLInputElement; weight: HTMLElement; bar: HTMLElement }[] = [];
  const mapContainer = h("div");
  let heatmap: Heatmap | null = null;
  let queries: number[] = [];

  // Changes of the points.

  function loadExample(next: Example) {
    example = next;
    points = next.points.map((p) => ({ ...p }));
    xs = computeRange(points.map((p) => p.x));
    ys = computeRange(points.map((p) => p.y), 0.12);
    bandwidth = next.bandwidth ?? Number((getSpan() / 12).toPrecision(2));
    query = next.query ?? (xs.low + xs.high) / 2;
    active = 0;
    context.setUnsaved(false);
    rebuildRows();
  }

  /** Creates a dot and a table row for each point. */
  function rebuildRows() {
    active = clamp(active, 0, points.length - 1);
    scatterPlot.createDots(points.length);
    rows = points.map((_, i) => createRow(i));
    replaceChildren(
      body,
      ...rows.map((r, i) => {
        const removeButton = h(
          "button",
          {
            type: "button",
            class: "quiet",
            "aria-label": `Remove point ${i + 1}`,
            disabled: points.length <= MIN_POINTS,
            on: { click: () => removePoint(i) },
          },
          "×",
        );
        const cells = [r.x, r.y, r.weight, r.bar, removeButton];
        return h("tr", {}, ...cells.map((cell) => h("td", { class: cell === r.weight ? "number" : undefined }, cell)));
      }),
    );
    draw();
  }

  function createRow(i: number) {
    const createInput = (axis: "x" | "y") =>
      h("input", {
        type: "number",
        step: "any",
        test: `point-${i}-${axis}`,
        "aria-label": `Point ${i + 1}, ${axis}`,
        on: {
          change: (event) => {
            const newValue = event.target.valueAsNumber;
            if (!Number.isFinite(newValue)) return;
            // A typed number may be outside of the visible range.
            const extendRange = (range: Range) =>
              newValue < range.low || newValue > range.high ? computeRange([range.low, range.high, newValue]) : range;
            if (axis === "x") xs = extendRange(xs);
            else ys = extendRange(ys);
            points[i] = { ...points[i], [axis]: newValue };
            context.setUnsaved(true);
            draw();
          },
        },
      });
    return {
      x: createInput("x"),
      y: createInput("y"),
      weight: h("output", { test: `point-${i}-weight` }),
      bar: h("span", { class: "bar" }, h("i")),
    };
  }

  function movePoint(i: number, point: Point) {
    const countDigits = (range: Range) => clamp(3 - Math.floor(Math.log10(range.high - range.low)), 0, 20);
    points[i] = { x: Number(point.x.toFixed(countDigits(xs))), y: Number(point.y.toFixed(countDigits(ys))) };
    context.setUnsaved(true);
    draw();
  }

  function insertPoint(point: Point) {
    points.push(point);
    active = points.length - 1;
    rebuildRows();
    movePoint(active, { x: clamp(point.x, xs.low, xs.high), y: clamp(point.y, ys.low, ys.high) });
    scatterPlot.focus(active);
    context.announce(`${describePosition(active)} is new`);
  }

  function removePoint(i: number) {
    if (points.length <= MIN_POINTS) return;
    const hadFocus = scatterPlot.focused !== null;
    points.splice(i, 1);
    context.setUnsaved(true);
    rebuildRows();
    if (hadFocus) scatterPlot.focus(active);
    context.announce(`${points.length} points are left`);
  }

  const describePosition = (i: number) => `Point ${i + 1}: x ${formatSignificant(points[i].x)}, y ${formatSignificant(points[i].y)}`;

  // Drawing, once a frame.

  const draw = throttleToFrame(paint);

  function paint() {
    const kernel = getKernel();
    const f = equation.createRegression(points, kernel);
    const result = f(query);
    const y = result.value![0];
    const heldOutResult = equation.computeHeldOutError(points, kernel);
    value.textContent = Number.isFinite(y) ? formatSignificant(y) : "no value";
    effective.textContent = `${formatFixed(result.effective, 2)} of ${points.length}`;
    error.textContent = formatSignificant(heldOutResult.error) + (heldOutResult.isolated ? `, without ${formatCount(heldOutResult.isolated, "isolated point")}` : "");
    const lines = [
      "f(q) = Σᵢ α(q, kᵢ) vᵢ",
      equation.WEIGHTINGS[equation.resolveWeighting(kernel.weighting).name].formula.replaceAll("/T", ""),
      equation.SCORES[kernelName].formula,
    ];
    replaceChildren(formula, ...lines.map((text) => h("span", {}, text)));

    const constant = kernelName === "constant";
    bandwidthSlider.setEnabled(!constant);
    bandwidthSlider.setDescription(`, leave-one-out error ${error.textContent}`);
    bandwidthSlider.setValue(bandwidth, getBandwidthRange());
    querySlider.setDescription(`: ${value.textContent}`);
    querySlider.setValue(query, xs);
    emptyField.hidden = constant || kernelName === "gaussian" || kernelName === "laplace";
    updateRows(result.weights);
    drawScatter(kernel, f, result);
    drawStems(barPlot, { width: scatterPlot.width, xs, positions: points.map((p) => p.x), weights: result.weights, highlighted: scatterPlot.focused });
    bandwidthPlot.paint(points, getBandwidthRange(), constant ? null : getKernel, { width: bandwidth, error: heldOutResult.error });
    drawWeights(f);
  }

  function updateRows(weights: Float64Array) {
    const focused = (container.getRootNode() as ShadowRoot).activeElement;
    rows.forEach(({ x, y, weight, bar }, i) => {
      if (focused !== x) x.value = String(points[i].x);
      if (focused !== y) y.value = String(points[i].y);
      weight.textContent = formatFixed(weights[i]);
      (bar.firstChild as HTMLElement).style.setProperty("width", formatBarWidth(weights[i]));
    });
  }

  function drawScatter(kernel: equation.Kernel, f: (x: number) => equation.AttentionResult, result: equation.AttentionResult) {
    const curveXs = Array.from({ length: CURVE_POINTS + 1 }, (_, i) => xs.low + (getSpan() * i) / CURVE_POINTS);
    const score = equation.resolveScore(kernel.score);
    const getScore = (x: number) => score.compute([query], [x]);
    scatterPlot.paint({
      points,
      xs,
      ys,
      names: { x: example.x, y: example.y },
      curveXs,
      curveYs: curveXs.map((x) => f(x).value![0]),
      profile: curveXs.map((x) => (score.isNonnegative ? getScore(x) : Math.exp(getScore(x)))),
      query,
      value: result.value![0],
      weights: result.weights,
      activePoint: active,
      isDark: context.isDark(),
      describePoint: (i) => `${describePosition(i)}, weight ${formatFixed(result.weights[i])}`,
    });
    scatterPlot.element.setAttribute(
      "aria-label",
      `${points.length} points and the fitted curve, at ${example.x} ${formatSignificant(query)} ${value.textContent}. ${KEYBOARD_HELP}`,
    );
  }

  /** Draws the weights of queries from left to right. */
  function drawWeights(f: (x: number) => equation.AttentionResult) {
    const order = Array.from(points.keys()).sort((i, j) => points[i].x - points[j].x);
    const count = clamp(points.length, ...QUERY_COUNTS);
    queries = Array.from({ length: count }, (_, i) => xs.low + (getSpan() * (i + 0.5)) / count);
    const queryWeights = queries.map((x) => f(x).weights);
    const data = Float64Array.from(queryWeights.flatMap((weights) => order.map((j) => weights[j])));
    const matrix = { data, rows: count, cols: points.length };
    const names = {
      label: "Weights of every key for queries from left to right",
      rowNames: formatAxisNumbers(queries),
      colNames: formatAxisNumbers(order.map((j) => points[j].x)),
    };
    if (heatmap) return heatmap.update(matrix, names);
    heatmap = new Heatmap({
      ...names,
      matrix,
      rowTitle: "query",
      colTitle: "key, by x",
      context,
      viewElement: container,
      side: 360,
      test: "regression-weights",
      onCell: (cell) => {
        if (!cell) return;
        query = queries[cell.row];
        draw();
      },
    });
    mapContainer.append(heatmap.element);
  }

  const createFact = (title: string, out: HTMLElement) => h("div", {}, h("dt", {}, title), h("dd", {}, out));
  const plotBox = h("div", {}, scatterPlot.element, barPlot);
  const headerCells = ["key x", "value y", "weight α", "", ""].map((text) => h("th", { scope: "col" }, text));
  container.append(
    h(
      "div",
      { class: "controls several" },
      createField("Data", exampleSelect),
      createField("Kernel", kernelSelect),
      bandwidthSlider.element,
      emptyField,
    ),
    h(
      "div",
      { class: "regression" },
      h(
        "section",
        { "aria-label": "Points and curve" },
        plotBox,
        querySlider.element,
        h(
          "dl",
          { class: "facts" },
          createFact("f(q)", value),
          createFact("effective rows", effective),
          createFact("leave-one-out error", error),
        ),
        formula,
        h("p", { class: "hint" }, "Drag a point or the query. A double click adds a point."),
      ),
      h("div", {}, bandwidthPlot.element, h("section", {}, h("h3", {}, "The weights of every query"), mapContainer)),
    ),
    h(
      "details",
      { test: "regression-points" },
      h("summary", {}, "Points and weights as numbers"),
      h("div", { class: "scroll" }, h("table", { class: "numbers" }, h("thead", {}, h("tr", {}, ...headerCells)), body)),
    ),
  );
  const observer = new ResizeObserver(() => {
    if (!plotBox.clientWidth || plotBox.clientWidth === scatterPlot.width) return;
    scatterPlot.width = plotBox.clientWidth;
    draw();
  });
  observer.observe(plotBox);
  container.addEventListener("theme", draw);
  loadExample(example);
  return () => {
    observer.disconnect();
    container.removeEventListener("theme", draw);
    draw.stop();
    heatmap?.destroy();
    container.replaceChildren();
  };
}

export const view: View = {
  name: "regression",
  title: "Regression",
  style: `${SCATTER_STYLE}${BANDWIDTHS_STYLE}
.regression { display: grid; grid-template-columns: minmax(0, 1.8fr) minmax(17rem, 1fr); gap: 1.5rem 2.5rem; }
@container page (max-width: 56rem) { .regression { grid-template-columns: minmax(0, 1fr); } }
table.numbers { max-width: 40rem; }
table.numbers input { padding: 0.15rem 0.35rem; min-width: 4.5rem; font-variant-numeric: tabular-nums; }
table.numbers td { padding: 0.15rem 0.5rem 0.15rem 0; }
`,
  mount,
};
