/** The view Scores: similarity functions as surfaces over q and k, and the weights computed from them. */

import { around, axes, frame, path, said } from "../axes";
import { stems } from "../stems";
import { long } from "../bars";
import { fixed, h, labelled, onceAFrame, put, s, select } from "../dom";
import * as equation from "../equation";
import { Heatmap } from "../heatmap";
import { clamp, numeral } from "../numbers";
import { thumbnail } from "../picture";
import { type Slider, slider } from "../slider";
import { pythonOnly } from "../registered";
import type { Given, View } from "../view";
import { SIMILARITIES, SPACES, type Setting, type Similarity, WEIGHTED } from "../scores/similarities";

/** Rows and columns of a surface, points of the curve, and rows and columns of a small picture. */
const CELLS = 41;
const CURVE = 240;
const SMALL = 25;
/** The position of the first query. */
const START = 26;

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


function grid({ low, high }: { low: number; high: number }, count: number): number[] {
  return Array.from({ length: count }, (_, i) => Number((low + ((high - low) * i) / (count - 1)).toPrecision(6)));
}

function mount(at: HTMLElement, given: Given): () => void {
  const extraScores = new Map(pythonOnly(given, "scores"));
  const extraWeightings = new Map(pythonOnly(given, "weightings"));
  const similarities: Similarity[] = [
    ...SIMILARITIES,
    ...Array.from(extraScores.keys(), (name) => ({ name, note: "Computed by Python.", settings: {}, like: () => name })),
  ];
  const titleOf = (name: string) => equation.SCORES[name]?.title ?? extraScores.get(name) ?? name;
  const formulaOf = (name: string) => equation.SCORES[name]?.formula ?? `s = ${name}(q, k)`;
  let chosen = Math.max(similarities.findIndex((x) => x.name === given.data.score), 0);
  let space = SPACES[0];
  let weighting = "softmax";
  let q = grid(space.range, CELLS)[START];
  let k = q;
  /** The settings of each score or weighting, by its name. */
  const kept = new Map<string, Values>();
  const values = (name: string, settings: Record<string, Setting>): Values => {
    let found = kept.get(name);
    if (!found) {
      found = Object.fromEntries(Object.entries(settings).map(([key, { value }]) => [key, value]));
      kept.set(name, found);
    }
    return found;
  };
  const like = () => similarities[chosen].like(values(similarities[chosen].name, similarities[chosen].settings));
  const weighed = (): equation.Like => ({ name: weighting, ...values(weighting, WEIGHTED[weighting] ?? {}) });
  const cells = () => grid(space.range, CELLS);

  // Controls.

  const cards = similarities.map(({ name }, i) => {
    const picture = h("canvas", { "aria-hidden": "true" });
    const title = titleOf(name);
    const button = h(
      "button",
      { type: "button", class: "card", test: `score-${name}`, on: { click: () => choose(i) } },
      picture,
      h("span", {}, title),
    );
    return { button, picture };
  });

  function choose(i: number) {
    chosen = i;
    if (similarities[i].learned && space !== SPACES[0]) {
      space = SPACES[0];
      q = k = cells()[START];
    }
    arrange();
    given.announce(`${titleOf(similarities[i].name)}: ${formulaOf(similarities[i].name)}`);
  }

  const spaces = select(
    SPACES.map(({ name, title }): [string, string] => [name, title]),
    space.name,
    (to) => {
      space = SPACES.find(({ name }) => name === to)!;
      q = k = cells()[START];
      arrange();
    },
    { test: "scores-space" },
  );
  const weightings = select(
    [...Object.entries(equation.WEIGHTINGS).map(([name, { title }]): [string, string] => [name, title]), ...extraWeightings],
    weighting,
    (to) => {
      weighting = to;
      arrange();
    },
    { test: "scores-weighting" },
  );
  const query: Slider = slider({
    label: "Query q",
    range: space.range,
    value: q,
    test: "scores-q",
    change: (to) => {
      q = to;
      draw();
    },
  });
  const scoreSettings = h("div", { class: "controls" });
  const weightSettings = h("div", { class: "controls" });

  function settings(of: string, all: Record<string, Setting>): HTMLElement[] {
    const now = values(of, all);
    return Object.entries(all).map(
      ([key, setting]) =>
        slider({
          ...setting,
          value: now[key],
          test: `setting-${key}`,
          change: (to) => {
            now[key] = to;
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
  const section = s("svg", { class: "plot", role: "img", test: "scores-section" });
  const weightBars = s("svg", { class: "plot", role: "img", test: "scores-bars" });
  const box = h("div", { class: "plot-box" }, section, weightBars);
  const effective = h("output", { test: "scores-effective" });
  const entropy = h("output", { test: "scores-entropy" });
  const pair = h("output", { test: "scores-pair" });
  const body = h("tbody");
  const table = h(
    "table",
    { class: "keys" },
    h("thead", {}, h("tr", {}, ...["key k", "score s", "weight α", ""].map((t) => h("th", { scope: "col" }, t)))),
    body,
  );

  /** Redraws everything after another score, weighting or space was chosen. */
  function arrange() {
    const { name, note: explanation, settings: own, learned } = similarities[chosen];
    title.textContent = titleOf(name);
    note.textContent = explanation;
    spaces.value = space.name;
    spaces.disabled = Boolean(learned);
    put(scoreSettings, ...settings(name, own));
    put(weightSettings, ...settings(weighting, WEIGHTED[weighting] ?? {}));
    query.set(q, space.range);
    cards.forEach(({ button }, i) => button.setAttribute("aria-pressed", String(i === chosen)));
    for (const map of maps) map.destroy();
    maps = [];
    put(scoreMap);
    put(weightMap);
    pictures();
    draw();
  }

  function pictures() {
    const side = grid(SPACES[0].range, SMALL);
    cards.forEach(({ picture }, i) => {
      const { name, like, settings: own } = similarities[i];
      if (extraScores.has(name)) return void pythonPicture(name, side, picture);
      const score = equation.score(like(values(name, own)));
      const data = Float64Array.from({ length: SMALL ** 2 }, (_, c) =>
        score.at([side[Math.floor(c / SMALL)]], [side[c % SMALL]]),
      );
      thumbnail(picture, { data, rows: SMALL, cols: SMALL }, 56, given.dark());
    });
  }

  async function pythonPicture(name: string, side: number[], picture: HTMLCanvasElement) {
    const vectors = side.map((x) => [x]);
    const found = await given.backend!.call("grid", { queries: vectors, keys: vectors, score: name }).catch(() => null);
    if (found && picture.isConnected) thumbnail(picture, { data: found.scores.data, rows: SMALL, cols: SMALL }, 56, given.dark());
  }

  const draw = onceAFrame(paint);

  let gone = false;
  let [asking, again] = [false, false];

  /** Computes the numbers here, or asks Python for them, one question at a time. */
  function paint() {
    if (!extraScores.has(similarities[chosen].name) && !extraWeightings.has(weighting)) return show(compute());
    again = asking;
    if (asking) return;
    asking = true;
    const before = JSON.stringify([like(), weighed(), space.name]);
    fetchNumbers()
      .then((numbers) => {
        if (!gone && before === JSON.stringify([like(), weighed(), space.name])) show(numbers);
        else again = true;
      })
      .catch((error) => {
        refusal.textContent = `Python: ${error instanceof Error ? error.message : error}`;
        refusal.hidden = false;
      })
      .finally(() => {
        asking = false;
        if (again && !gone) draw();
      });
  }

  const fine = () => grid(space.range, CURVE);

  function compute(): Numbers {
    const score = equation.score(like());
    const how = equation.weighting(weighed());
    const vectors = cells().map(space.vector);
    const here = space.vector(q);
    const scores = vectors.map((a) => Float64Array.from(vectors, (b) => score.at(a, b)));
    const row = Float64Array.from(vectors, (b) => score.at(here, b));
    const reason = how.refuses(score);
    return {
      scores,
      weights: reason ? [] : scores.map((each) => how.weights(each)),
      reason,
      row,
      rowWeights: reason ? null : how.weights(row),
      line: fine().map((x) => score.at(here, space.vector(x))),
      pair: score.at(here, space.vector(k)),
    };
  }

  async function fetchNumbers(): Promise<Numbers> {
    const backend = given.backend!;
    const here = Array.from(space.vector(q));
    const keys = cells().map((x) => Array.from(space.vector(x)));
    const args = { queries: [...keys, here], keys, score: like() };
    const axis = [...fine(), k].map((x) => Array.from(space.vector(x)));
    let reason: string | null = null;
    const weighted = backend.call("grid", { ...args, weighting: weighed() }).catch((error) => {
      reason = error instanceof Error ? error.message : String(error);
      return backend.call("grid", args);
    });
    const [found, along] = await Promise.all([weighted, backend.call("grid", { ...args, queries: [here], keys: axis })]);
    const rows = ({ data }: { data: Float64Array }) =>
      Array.from(args.queries, (_, i) => data.subarray(i * keys.length, (i + 1) * keys.length));
    const scores = rows(found.scores);
    const weights = reason ? [] : rows(found.weights);
    const row = scores.pop()!;
    const rowWeights = weights.pop() ?? null;
    const line: Float64Array = along.scores.data;
    return { scores, weights, reason, row, rowWeights, line: line.subarray(0, -1), pair: line[line.length - 1] };
  }

  function show({ scores, weights, reason, row, rowWeights, line, pair: marked }: Numbers) {
    const keys = cells();
    refusal.textContent = reason ?? "";
    refusal.hidden = !reason;
    weightMap.hidden = Boolean(reason);

    const flat = (rows: Float64Array[]) => Float64Array.from(rows.flatMap((each) => Array.from(each)));
    const matrix = (rows: Float64Array[]) => ({ data: flat(rows), rows: CELLS, cols: CELLS });
    if (maps.length) {
      maps[0].update(matrix(scores));
      if (!reason) maps[1]?.update(matrix(weights));
    }
    if (!maps[0]) maps[0] = surface(scoreMap, "Score of every query and key", "scores-surface", matrix(scores));
    if (!maps[1] && !reason) {
      maps[1] = surface(weightMap, "Weight of every query and key", "scores-weights", matrix(weights));
    }

    cut(line, keys, row, rowWeights);
    effective.textContent = rowWeights ? `${fixed(equation.effective(rowWeights), 2)} of ${CELLS}` : "none";
    entropy.textContent = rowWeights ? fixed(equation.entropy(rowWeights)) : "none";
    pair.textContent = numeral(marked);
    (pair.closest("div")!.firstChild as HTMLElement).textContent = `s(${said(q)}, ${said(k)})`;

    const { name: score, learned, settings: own } = similarities[chosen];
    const settingTexts = Object.entries(learned ? {} : own).map(([key, { label }]) => {
      const name = label.split(" ").at(-1);
      return `${name} = ${numeral(values(score, {})[key], 0, 3)}`;
    });
    const base = score === "scaled_dot" ? "s = qᵀk · scale" : formulaOf(score);
    put(formula, ...[base, ...settingTexts].map((text) => h("span", {}, text)));
    alpha.textContent = equation.WEIGHTINGS[weighting]?.formula ?? `α = ${weighting}(s)`;
    query.set(q);
    rows(keys, row, rowWeights);
  }

  function surface(into: HTMLElement, label: string, test: string, matrix: any): Heatmap {
    const names = cells().map(said);
    const map = new Heatmap({
      label,
      matrix,
      rowNames: names,
      colNames: names,
      rowTitle: "query q",
      colTitle: "key k",
      given,
      at,
      side: 400,
      test,
      onCell: (cell) => {
        if (!cell) return;
        [q, k] = [cells()[cell.row], cells()[cell.col]];
        draw();
      },
    });
    into.append(map.element);
    return map;
  }

  /** Draws the scores of one query: a section through the surface. */
  function cut(line: ArrayLike<number>, keys: number[], found: Float64Array, weights: Float64Array | null) {
    const size = { width: box.clientWidth || 480, height: clamp((box.clientWidth || 480) * 0.5, 200, 320) };
    const xs = around(keys, 0.02);
    const ys = around([...Array.from(line), ...found, 0].filter(Number.isFinite), 0.1);
    const inside = frame(size, xs, ys);
    section.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    section.setAttribute("height", String(size.height));
    put(
      section,
      ...axes(inside, xs, ys, { x: "key k", y: `s(${said(q)}, k)` }),
      s("line", { class: "query", x1: inside.x(q), x2: inside.x(q), y1: inside.top, y2: inside.bottom }),
      s("path", { class: "curve", d: path(fine().map((x, i) => [inside.x(x), inside.y(line[i])])) }),
      ...keys.map((x, i) => s("circle", { class: "key", cx: inside.x(x), cy: inside.y(found[i]), r: 3 })),
    );
    const top = found.indexOf(Math.max(...found));
    section.setAttribute(
      "aria-label",
      `Scores of the query ${said(q)}: the highest is ${numeral(found[top])}, at key ${said(keys[top])}`,
    );
    weightBars.style.setProperty("display", weights ? "block" : "none");
    if (weights) stems(weightBars, { width: size.width, xs, at: keys, weights, marked: keys.indexOf(k) });
  }

  function rows(keys: number[], found: Float64Array, weights: Float64Array | null) {
    if (body.children.length !== keys.length) {
      put(
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
      row.children[0].textContent = said(keys[i]);
      row.children[1].textContent = fixed(found[i]);
      row.children[2].textContent = fixed(weight);
      const bar = row.querySelector("i")!;
      bar.style.setProperty("width", long(weight));
    });
  }

  const fact = (name: string, out: HTMLElement) => h("div", {}, h("dt", {}, name), h("dd", {}, out));
  at.append(
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
        h("div", { class: "controls" }, labelled("q and k are", spaces)),
        scoreSettings,
      ),
      h(
        "section",
        {},
        h("h2", {}, "Weights"),
        alpha,
        refusal,
        weightMap,
        h("p", { class: "note" }, `One row per query, over the same ${CELLS} keys.`),
        h("div", { class: "controls" }, labelled("Weighting", weightings)),
        weightSettings,
      ),
      h(
        "section",
        { class: "wide" },
        h("h2", {}, "One query"),
        h("p", { class: "hint" }, "To choose a query, point at a surface or move the cell with the arrow keys."),
        box,
        query.element,
        h("dl", { class: "facts" }, fact("s", pair), fact("effective rows", effective), fact("entropy", entropy)),
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
    if (box.clientWidth && box.clientWidth !== width) draw();
    width = box.clientWidth;
  });
  observer.observe(box);
  const turned = () => {
    pictures();
    draw();
  };
  at.addEventListener("theme", turned);
  arrange();
  return () => {
    gone = true;
    observer.disconnect();
    at.removeEventListener("theme", turned);
    draw.stop();
    for (const map of maps) map.destroy();
    at.replaceChildren();
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
