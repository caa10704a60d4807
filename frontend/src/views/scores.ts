/** The view Scores: similarity functions as surfaces over q and k, and the weights computed from them. */

import { computeRange, createAxes, createFrame, formatPath, formatTick } from "../axes";
import { drawStems } from "../stems";
import { formatBarWidth } from "../bars";
import { formatFixed, h, createField, throttleToFrame, replaceChildren, s, createSelect } from "../dom";
import * as equation from "../equation";
import { Heatmap } from "../heatmap";
import { clamp, formatSignificant } from "../numbers";
import { drawThumbnail } from "../picture";
import { type Slider, createSlider } from "../slider";
import { listPythonOnly } from "../registrations";
import type { ViewContext, View } from "../view";
import { SIMILARITIES, SPACES, type Setting, type Similarity, WEIGHTING_SETTINGS } from "../scores/similarities";

/** Rows and columns of a surface, points of the curve, and rows and columns of a small picture. */
const GRID_CELLS = 41;
const CURVE_POINTS = 240;
const THUMBNAIL_CELLS = 25;
/** The position of the first query. */
const START_INDEX = 26;

type Values = Record<string, number>;

/** All numbers that are shown, computed here or by Python. */
interface Numbers {
  /** Scores and weights of every query (row) and key (column); no weights if the weighting refuses the scores. */
  scores: Float64Array[];
  weights: Float64Array[];
  /** Why there are no weights, or null. */
  reason: string | null;
  /** Scores and weights of the chosen query, its scores along the axis, and the score of the marked key. */
  row: Float64Array;
  rowWeights: Float64Array | null;
  line: ArrayLike<number>;
  pair: number;
}


function computeGrid({ low, high }: { low: number; high: number }, count: number): number[] {
  return Array.from({ length: count }, (_, i) => Number((low + ((high - low) * i) / (count - 1)).toPrecision(6)));
}

function mount(container: HTMLElement, context: ViewContext): () => void {
  const extraScores = new Map(listPythonOnly(context, "scores"));
  const extraWeightings = new Map(listPythonOnly(context, "weightings"));
  const similarities: Similarity[] = [
    ...SIMILARITIES,
    ...Array.from(extraScores.keys(), (name) => ({ name, note: "Computed by Python.", settings: {}, toScore: () => name })),
  ];
  const titleOf = (name: string) => equation.SCORES[name]?.title ?? extraScores.get(name) ?? name;
  const formulaOf = (name: string) => equation.SCORES[name]?.formula ?? `s = ${name}(q, k)`;
  let selectedIndex = Math.max(similarities.findIndex((x) => x.name === context.data.score), 0);
  let space = SPACES[0];
  let weighting = "softmax";
  let q = computeGrid(space.range, GRID_CELLS)[START_INDEX];
  let k = q;
  /** The settings of each score or weighting, by its name. */
  const settingsByName = new Map<string, Values>();
  const getSettings = (name: string, settings: Record<string, Setting>): Values => {
    let savedValues = settingsByName.get(name);
    if (!savedValues) {
      savedValues = Object.fromEntries(Object.entries(settings).map(([key, { value }]) => [key, value]));
      settingsByName.set(name, savedValues);
    }
    return savedValues;
  };
  const getScore = () => similarities[selectedIndex].toScore(getSettings(similarities[selectedIndex].name, similarities[selectedIndex].settings));
  const getWeighting = (): equation.NameOrSettings => ({ name: weighting, ...getSettings(weighting, WEIGHTING_SETTINGS[weighting] ?? {}) });
  const getCells = () => computeGrid(space.range, GRID_CELLS);

  // Controls.

  const cards = similarities.map(({ name }, i) => {
    const picture = h("canvas", { "aria-hidden": "true" });
    const title = titleOf(name);
    const button = h(
      "button",
      { type: "button", class: "card", test: `score-${name}`, on: { click: () => selectScore(i) } },
      picture,
      h("span", {}, title),
    );
    return { button, picture };
  });

  function selectScore(i: number) {
    selectedIndex = i;
    if (similarities[i].isLearned && space !== SPACES[0]) {
      space = SPACES[0];
      q = k = getCells()[START_INDEX];
    }
    rebuild();
    context.announce(`${titleOf(similarities[i].name)}: ${formulaOf(similarities[i].name)}`);
  }

  const spaceSelect = createSelect(
    SPACES.map(({ name, title }): [string, string] => [name, title]),
    space.name,
    (newValue) => {
      space = SPACES.find(({ name }) => name === newValue)!;
      q = k = getCells()[START_INDEX];
      rebuild();
    },
    { test: "scores-space" },
  );
  const weightingSelect = createSelect(
    [...Object.entries(equation.WEIGHTINGS).map(([name, { title }]): [string, string] => [name, title]), ...extraWeightings],
    weighting,
    (newValue) => {
      weighting = newValue;
      rebuild();
    },
    { test: "scores-weighting" },
  );
  const querySlider: Slider = createSlider({
    label: "Query q",
    range: space.range,
    value: q,
    test: "scores-q",
    onChange: (newValue) => {
      q = newValue;
      draw();
    },
  });
  const scoreSettings = h("div", { class: "controls" });
  const weightSettings = h("div", { class: "controls" });

  function createSliders(name: string, all: Record<string, Setting>): HTMLElement[] {
    const current = getSettings(name, all);
    return Object.entries(all).map(
      ([key, setting]) =>
        createSlider({
          ...setting,
          value: current[key],
          test: `setting-${key}`,
          onChange: (newValue) => {
            current[key] = newValue;
            draw();
          },
        }).element,
    );
  }

  // Output.

  const title = h("h2", { test: "scores-title" });
  const formula = h("p", { class: "formula", test: "scores-formula" });
  const note = h("p", { class: "note" });
  const alpha = h("p", { class: "formula", test: "scores-alpha" });
  const refusal = h("p", { class: "error", role: "status", test: "scores-refusal" });
  const scoreMap = h("div");
  const weightMap = h("div");
  let maps: Heatmap[] = [];
  const sectionPlot = s("svg", { class: "plot", role: "img", test: "scores-section" });
  const weightBars = s("svg", { class: "plot", role: "img", test: "scores-bars" });
  const plotBox = h("div", { class: "plot-box" }, sectionPlot, weightBars);
  const effective = h("output", { test: "scores-effective" });
  const entropy = h("output", { test: "scores-entropy" });
  const pairOutput = h("output", { test: "scores-pair" });
  const body = h("tbody");
  const table = h(
    "table",
    { class: "keys" },
    h("thead", {}, h("tr", {}, ...["key k", "score s", "weight α", ""].map((t) => h("th", { scope: "col" }, t)))),
    body,
  );

  /** Redraws everything after another score, weighting or space was chosen. */
  function rebuild() {
    const { name, note: explanation, settings: defaults, isLearned } = similarities[selectedIndex];
    title.textContent = titleOf(name);
    note.textContent = explanation;
    spaceSelect.value = space.name;
    spaceSelect.disabled = Boolean(isLearned);
    replaceChildren(scoreSettings, ...createSliders(name, defaults));
    replaceChildren(weightSettings, ...createSliders(weighting, WEIGHTING_SETTINGS[weighting] ?? {}));
    querySlider.setValue(q, space.range);
    cards.forEach(({ button }, i) => button.setAttribute("aria-pressed", String(i === selectedIndex)));
    for (const map of maps) map.destroy();
    maps = [];
    replaceChildren(scoreMap);
    replaceChildren(weightMap);
    drawThumbnails();
    draw();
  }

  function drawThumbnails() {
    const axis = computeGrid(SPACES[0].range, THUMBNAIL_CELLS);
    cards.forEach(({ picture }, i) => {
      const { name, toScore: like, settings: defaults } = similarities[i];
      if (extraScores.has(name)) return void drawPythonThumbnail(name, axis, picture);
      const score = equation.resolveScore(like(getSettings(name, defaults)));
      const data = Float64Array.from({ length: THUMBNAIL_CELLS ** 2 }, (_, c) =>
        score.compute([axis[Math.floor(c / THUMBNAIL_CELLS)]], [axis[c % THUMBNAIL_CELLS]]),
      );
      drawThumbnail(picture, { data, rows: THUMBNAIL_CELLS, cols: THUMBNAIL_CELLS }, 56, context.isDark());
    });
  }

  async function drawPythonThumbnail(name: string, axis: number[], picture: HTMLCanvasElement) {
    const vectors = axis.map((x) => [x]);
    const result = await context.backend!.call("grid", { queries: vectors, keys: vectors, score: name }).catch(() => null);
    if (result && picture.isConnected) drawThumbnail(picture, { data: result.scores.data, rows: THUMBNAIL_CELLS, cols: THUMBNAIL_CELLS }, 56, context.isDark());
  }

  const draw = throttleToFrame(paint);

  let isRemoved = false;
  let [isAsking, asksAgain] = [false, false];

  /** Computes the numbers here, or asks Python for them, one question at a time. */
  function paint() {
    if (!extraScores.has(similarities[selectedIndex].name) && !extraWeightings.has(weighting)) return showNumbers(computeNumbers());
    asksAgain = isAsking;
    if (isAsking) return;
    isAsking = true;
    const inputs = JSON.stringify([getScore(), getWeighting(), space.name]);
    fetchNumbers()
      .then((numbers) => {
        if (!isRemoved && inputs === JSON.stringify([getScore(), getWeighting(), space.name])) showNumbers(numbers);
        else asksAgain = true;
      })
      .catch((error) => {
        refusal.textContent = `Python: ${error instanceof Error ? error.message : error}`;
        refusal.hidden = false;
      })
      .finally(() => {
        isAsking = false;
        if (asksAgain && !isRemoved) draw();
      });
  }

  const getCurveXs = () => computeGrid(space.range, CURVE_POINTS);

  function computeNumbers(): Numbers {
    const score = equation.resolveScore(getScore());
    const resolvedWeighting = equation.resolveWeighting(getWeighting());
    const vectors = getCells().map(space.toVector);
    const queryVector = space.toVector(q);
    const scores = vectors.map((a) => Float64Array.from(vectors, (b) => score.compute(a, b)));
    const row = Float64Array.from(vectors, (b) => score.compute(queryVector, b));
    const reason = resolvedWeighting.refusalReason(score);
    return {
      scores,
      weights: reason ? [] : scores.map((each) => resolvedWeighting.weights(each)),
      reason,
      row,
      rowWeights: reason ? null : resolvedWeighting.weights(row),
      line: getCurveXs().map((x) => score.compute(queryVector, space.toVector(x))),
      pair: score.compute(queryVector, space.toVector(k)),
    };
  }

  async function fetchNumbers(): Promise<Numbers> {
    const backend = context.backend!;
    const queryVector = Array.from(space.toVector(q));
    const keys = getCells().map((x) => Array.from(space.toVector(x)));
    const args = { queries: [...keys, queryVector], keys, score: getScore() };
    const axis = [...getCurveXs(), k].map((x) => Array.from(space.toVector(x)));
    let reason: string | null = null;
    const weightedGrid = backend.call("grid", { ...args, weighting: getWeighting() }).catch((error) => {
      reason = error instanceof Error ? error.message : String(error);
      return backend.call("grid", args);
    });
    const [grid, lineGrid] = await Promise.all([weightedGrid, backend.call("grid", { ...args, queries: [queryVector], keys: axis })]);
    const splitRows = ({ data }: { data: Float64Array }) =>
      Array.from(args.queries, (_, i) => data.subarray(i * keys.length, (i + 1) * keys.length));
    const scores = splitRows(grid.scores);
    const weights = reason ? [] : splitRows(grid.weights);
    const row = scores.pop()!;
    const rowWeights = weights.pop() ?? null;
    const line: Float64Array = lineGrid.scores.data;
    return { scores, weights, reason, row, rowWeights, line: line.subarray(0, -1), pair: line[line.length - 1] };
  }

  function showNumbers({ scores, weights, reason, row, rowWeights, line, pair: pairScore }: Numbers) {
    const keys = getCells();
    refusal.textContent = reason ?? "";
    refusal.hidden = !reason;
    weightMap.hidden = Boolean(reason);

    const flatten = (rows: Float64Array[]) => Float64Array.from(rows.flatMap((each) => Array.from(each)));
    const toMatrix = (rows: Float64Array[]) => ({ data: flatten(rows), rows: GRID_CELLS, cols: GRID_CELLS });
    if (maps.length) {
      maps[0].update(toMatrix(scores));
      if (!reason) maps[1]?.update(toMatrix(weights));
    }
    if (!maps[0]) maps[0] = createSurface(scoreMap, "Score of every query and key", "scores-surface", toMatrix(scores));
    if (!maps[1] && !reason) {
      maps[1] = createSurface(weightMap, "Weight of every query and key", "scores-weights", toMatrix(weights));
    }

    drawSection(line, keys, row, rowWeights);
    effective.textContent = rowWeights ? `${formatFixed(equation.computeEffectiveRows(rowWeights), 2)} of ${GRID_CELLS}` : "none";
    entropy.textContent = rowWeights ? formatFixed(equation.computeEntropy(rowWeights)) : "none";
    pairOutput.textContent = formatSignificant(pairScore);
    (pairOutput.closest("div")!.firstChild as HTMLElement).textContent = `s(${formatTick(q)}, ${formatTick(k)})`;

    const { name: score, isLearned, settings: defaults } = similarities[selectedIndex];
    const settingTexts = Object.entries(isLearned ? {} : defaults).map(([key, { label }]) => {
      const name = label.split(" ").at(-1);
      return `${name} = ${formatSignificant(getSettings(score, {})[key], 0, 3)}`;
    });
    const base = score === "scaled_dot" ? "s = qᵀk · scale" : formulaOf(score);
    replaceChildren(formula, ...[base, ...settingTexts].map((text) => h("span", {}, text)));
    alpha.textContent = equation.WEIGHTINGS[weighting]?.formula ?? `α = ${weighting}(s)`;
    querySlider.setValue(q);
    updateRows(keys, row, rowWeights);
  }

  function createSurface(parent: HTMLElement, label: string, test: string, matrix: any): Heatmap {
    const names = getCells().map(formatTick);
    const map = new Heatmap({
      label,
      matrix,
      rowNames: names,
      colNames: names,
      rowTitle: "query q",
      colTitle: "key k",
      context,
      viewElement: container,
      side: 400,
      test,
      onCell: (cell) => {
        if (!cell) return;
        [q, k] = [getCells()[cell.row], getCells()[cell.col]];
        draw();
      },
    });
    parent.append(map.element);
    return map;
  }

  /** Draws the scores of one query: a section through the surface. */
  function drawSection(line: ArrayLike<number>, keys: number[], rowScores: Float64Array, weights: Float64Array | null) {
    const size = { width: plotBox.clientWidth || 480, height: clamp((plotBox.clientWidth || 480) * 0.5, 200, 320) };
    const xs = computeRange(keys, 0.02);
    const ys = computeRange([...Array.from(line), ...rowScores, 0].filter(Number.isFinite), 0.1);
    const inside = createFrame(size, xs, ys);
    sectionPlot.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    sectionPlot.setAttribute("height", String(size.height));
    replaceChildren(
      sectionPlot,
      ...createAxes(inside, xs, ys, { x: "key k", y: `s(${formatTick(q)}, k)` }),
      s("line", { class: "query", x1: inside.x(q), x2: inside.x(q), y1: inside.top, y2: inside.bottom }),
      s("path", { class: "curve", d: formatPath(getCurveXs().map((x, i) => [inside.x(x), inside.y(line[i])])) }),
      ...keys.map((x, i) => s("circle", { class: "key", cx: inside.x(x), cy: inside.y(rowScores[i]), r: 3 })),
    );
    const bestIndex = rowScores.indexOf(Math.max(...rowScores));
    sectionPlot.setAttribute(
      "aria-label",
      `Scores of the query ${formatTick(q)}: the highest is ${formatSignificant(rowScores[bestIndex])}, at key ${formatTick(keys[bestIndex])}`,
    );
    weightBars.style.setProperty("display", weights ? "block" : "none");
    if (weights) drawStems(weightBars, { width: size.width, xs, positions: keys, weights, highlighted: keys.indexOf(k) });
  }

  function updateRows(keys: number[], rowScores: Float64Array, weights: Float64Array | null) {
    if (body.children.length !== keys.length) {
      replaceChildren(
        body,
        ...keys.map((_, i) =>
          h(
            "tr",
            {},
            h("td", { class: "number" }),
            h("td", { class: "number", test: `key-${i}-score` }),
            h("td", { class: "number", test: `key-${i}-weight` }),
            h("td", {}, h("span", { class: "bar" }, h("i"))),
          ),
        ),
      );
    }
    Array.from(body.children).forEach((row, i) => {
      const weight = weights?.[i] ?? NaN;
      row.children[0].textContent = formatTick(keys[i]);
      row.children[1].textContent = formatFixed(rowScores[i]);
      row.children[2].textContent = formatFixed(weight);
      const bar = row.querySelector("i")!;
      bar.style.setProperty("width", formatBarWidth(weight));
    });
  }

  const createFact = (name: string, out: HTMLElement) => h("div", {}, h("dt", {}, name), h("dd", {}, out));
  container.append(
    h("div", { class: "cards", role: "group", "aria-label": "Score" }, ...cards.map(({ button }) => button)),
    h(
      "div",
      { class: "surfaces" },
      h(
        "section",
        {},
        title,
        formula,
        scoreMap,
        note,
        h("div", { class: "controls" }, createField("q and k are", spaceSelect)),
        scoreSettings,
      ),
      h(
        "section",
        {},
        h("h2", {}, "Weights"),
        alpha,
        refusal,
        weightMap,
        h("p", { class: "note" }, `One row per query, over the same ${GRID_CELLS} keys.`),
        h("div", { class: "controls" }, createField("Weighting", weightingSelect)),
        weightSettings,
      ),
      h(
        "section",
        { class: "wide" },
        h("h2", {}, "One query"),
        h("p", { class: "hint" }, "To choose a query, point at a surface or move the cell with the arrow keys."),
        plotBox,
        querySlider.element,
        h("dl", { class: "facts" }, createFact("s", pairOutput), createFact("effective rows", effective), createFact("entropy", entropy)),
      ),
    ),
    h(
      "details",
      { test: "scores-keys" },
      h("summary", {}, "Keys, scores and weights as numbers"),
      h("div", { class: "scroll" }, table),
    ),
  );

  let width = 0;
  const observer = new ResizeObserver(() => {
    if (plotBox.clientWidth && plotBox.clientWidth !== width) draw();
    width = plotBox.clientWidth;
  });
  observer.observe(plotBox);
  const handleThemeChange = () => {
    drawThumbnails();
    draw();
  };
  container.addEventListener("theme", handleThemeChange);
  rebuild();
  return () => {
    isRemoved = true;
    observer.disconnect();
    container.removeEventListener("theme", handleThemeChange);
    draw.stop();
    for (const map of maps) map.destroy();
    container.replaceChildren();
  };
}

export const view: View = {
  name: "scores",
  title: "Scores",
  style: `
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(5.3rem, 1fr)); gap: 0.4rem; margin-bottom: 1.75rem; max-width: 78rem; }
.card { display: flex; flex-direction: column; align-items: center; gap: 0.35rem; padding: 0.5rem 0.1rem; font-size: 0.68rem; line-height: 1.2; color: var(--soft); }
.card canvas { width: 56px; height: 56px; border: 1px solid var(--line); }
.card[aria-pressed="true"] { border-color: var(--accent); color: var(--ink); box-shadow: inset 0 0 0 1px var(--accent); }
.surfaces { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 2rem 2.25rem; }
.surfaces .controls { grid-template-columns: minmax(0, 1fr); }
.surfaces .formula { min-height: 3em; margin-bottom: 0.25rem; }
@container page (max-width: 68rem) {
  .surfaces { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .surfaces .wide { grid-column: 1 / -1; }
}
.surfaces .controls { grid-template-columns: minmax(0, 1fr); }
@container page (max-width: 56rem) { .surfaces { grid-template-columns: minmax(0, 1fr); } }
svg.plot .key { fill: var(--paper); stroke: var(--accent); stroke-width: 1.5; }
table.keys { max-width: 34rem; }
`,
  mount,
};
