/** Similarity functions as surfaces over q and k, and the weights that are made of them. */

import { around, axes, frame, path, said } from "../axes";
import { stems } from "../stems";
import { long } from "../bars";
import { fixed, h, labelled, onceAFrame, put, s, select } from "../dom";
import * as equation from "../equation";
import { Heatmap } from "../heatmap";
import { clamp, numeral } from "../numbers";
import { thumbnail } from "../picture";
import { type Slider, slider } from "../slider";
import type { Given, View } from "../view";
import { SIMILARITIES, SPACES, type Setting, WEIGHTED } from "../scores/similarities";

/** Queries and keys of a surface, positions of the curve, and cells of a small picture. */
const CELLS = 41;
const CURVE = 240;
const SMALL = 25;
/** The cell of the first query. */
const START = 26;

type Values = Record<string, number>;

function grid({ low, high }: { low: number; high: number }, count: number): number[] {
  return Array.from({ length: count }, (_, i) => Number((low + ((high - low) * i) / (count - 1)).toPrecision(6)));
}

function mount(at: HTMLElement, given: Given): () => void {
  let chosen = Math.max(SIMILARITIES.findIndex((x) => x.name === given.data.score), 0);
  let space = SPACES[0];
  let weighting = "softmax";
  let q = grid(space.range, CELLS)[START];
  let k = q;
  /** What was set, by the name of the score or weighting. */
  const kept = new Map<string, Values>();
  const values = (name: string, settings: Record<string, Setting>): Values => {
    let found = kept.get(name);
    if (!found) {
      found = Object.fromEntries(Object.entries(settings).map(([key, { value }]) => [key, value]));
      kept.set(name, found);
    }
    return found;
  };
  const like = () => SIMILARITIES[chosen].like(values(SIMILARITIES[chosen].name, SIMILARITIES[chosen].settings));
  const weighed = (): equation.Like => ({ name: weighting, ...values(weighting, WEIGHTED[weighting] ?? {}) });
  const cells = () => grid(space.range, CELLS);

  // What is chosen.

  const cards = SIMILARITIES.map(({ name }, i) => {
    const picture = h("canvas", { "aria-hidden": "true" });
    const title = equation.SCORES[name].title;
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
    if (SIMILARITIES[i].learned && space !== SPACES[0]) {
      space = SPACES[0];
      q = k = cells()[START];
    }
    arrange();
    given.announce(`${equation.SCORES[SIMILARITIES[i].name].title}: ${equation.SCORES[SIMILARITIES[i].name].formula}`);
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
    Object.entries(equation.WEIGHTINGS).map(([name, { title }]): [string, string] => [name, title]),
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

  // What is seen.

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

  /** Another score, weighting or space: controls and small pictures anew. */
  function arrange() {
    const { name, note: told, settings: own, learned } = SIMILARITIES[chosen];
    title.textContent = equation.SCORES[name].title;
    note.textContent = told;
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
      const { name, like, settings: own } = SIMILARITIES[i];
      const score = equation.score(like(values(name, own)));
      const data = Float64Array.from({ length: SMALL ** 2 }, (_, c) =>
        score.at([side[Math.floor(c / SMALL)]], [side[c % SMALL]]),
      );
      thumbnail(picture, { data, rows: SMALL, cols: SMALL }, 56, given.dark());
    });
  }

  const draw = onceAFrame(paint);

  function paint() {
    const score = equation.score(like());
    const how = equation.weighting(weighed());
    const keys = cells();
    const vectors = keys.map(space.vector);
    const scores = vectors.map((a) => Float64Array.from(vectors, (b) => score.at(a, b)));
    const reason = how.refuses(score);
    refusal.textContent = reason ?? "";
    refusal.hidden = !reason;
    weightMap.hidden = Boolean(reason);

    const flat = (rows: Float64Array[]) => Float64Array.from(rows.flatMap((row) => Array.from(row)));
    const matrix = (rows: Float64Array[]) => ({ data: flat(rows), rows: CELLS, cols: CELLS });
    const weights = reason ? [] : scores.map((row) => how.weights(row));
    if (maps.length) {
      maps[0].update(matrix(scores));
      if (!reason) maps[1]?.update(matrix(weights));
    }
    if (!maps[0]) maps[0] = surface(scoreMap, "Score of every query and key", "scores-surface", matrix(scores));
    if (!maps[1] && !reason) {
      maps[1] = surface(weightMap, "Weight of every query and key", "scores-weights", matrix(weights));
    }

    const here = space.vector(q);
    const found = Float64Array.from(vectors, (b) => score.at(here, b));
    const mine = reason ? null : equation.weigh(found, null, how);
    cut(score, keys, found, mine?.weights ?? null);
    effective.textContent = mine ? `${fixed(mine.effective, 2)} of ${CELLS}` : "none";
    entropy.textContent = mine ? fixed(mine.entropy) : "none";
    pair.textContent = numeral(score.at(here, space.vector(k)));
    (pair.closest("div")!.firstChild as HTMLElement).textContent = `s(${said(q)}, ${said(k)})`;

    const { learned, settings: own } = SIMILARITIES[chosen];
    const told = Object.entries(learned ? {} : own).map(([key, { label }]) => {
      const name = label.split(" ").at(-1);
      return `${name} = ${numeral(values(score.name, {})[key], 0, 3)}`;
    });
    const base = score.name === "scaled_dot" ? "s = qᵀk · scale" : equation.SCORES[score.name].formula;
    put(formula, ...[base, ...told].map((text) => h("span", {}, text)));
    alpha.textContent = equation.WEIGHTINGS[weighting].formula;
    query.set(q);
    rows(keys, found, mine?.weights ?? null);
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

  /** The scores of one query: a line through the surface. */
  function cut(score: equation.Score, keys: number[], found: Float64Array, weights: Float64Array | null) {
    const size = { width: box.clientWidth || 480, height: clamp((box.clientWidth || 480) * 0.5, 200, 320) };
    const xs = around(keys, 0.02);
    const fine = grid(space.range, CURVE);
    const here = space.vector(q);
    const line = fine.map((x) => score.at(here, space.vector(x)));
    const ys = around([...line, ...found, 0].filter(Number.isFinite), 0.1);
    const inside = frame(size, xs, ys);
    section.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    section.setAttribute("height", String(size.height));
    put(
      section,
      ...axes(inside, xs, ys, { x: "key k", y: `s(${said(q)}, k)` }),
      s("line", { class: "query", x1: inside.x(q), x2: inside.x(q), y1: inside.top, y2: inside.bottom }),
      s("path", { class: "curve", d: path(fine.map((x, i) => [inside.x(x), inside.y(line[i])])) }),
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
        h("p", { class: "note" }, `Each query weighs the same ${CELLS} keys.`),
        h("div", { class: "controls" }, labelled("Weighting", weightings)),
        weightSettings,
      ),
      h(
        "section",
        { class: "wide" },
        h("h2", {}, "One query"),
        h("p", { class: "hint" }, "Point at a surface, or choose a cell by the arrow keys, to move it."),
        box,
        query.element,
        h("dl", { class: "facts" }, fact("s", pair), fact("effective rows", effective), fact("entropy", entropy)),
      ),
    ),
    h(
      "details",
      { test: "scores-keys" },
      h("summary", {}, "The keys, their scores and weights as numbers"),
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
