/** The table of rows: editable keys and values, with the score and the weights of each row. */

import { long, wholeOf } from "../bars";
import { h, put, unique } from "../dom";
import { counted, figure, formatValue } from "../numbers";
import { isTensor } from "../wire";
import { type Outcome, type State, inOneLine, typed } from "./state";

/** Rows that are shown at first if they are sorted by weight. */
const FIRST = 25;

const isRecord = (x: unknown) => typeof x === "object" && x !== null && !Array.isArray(x) && !isTensor(x);

/** Largest number of pasted rows. */
const PASTED = 500;

/** The cells of text copied from a spreadsheet; null if it is a single cell. */
function cellsOf(text: string): string[][] | null {
  const rows = text
    .split(/\r\n|\r|\n/)
    .filter((line) => line.trim() !== "")
    .map((line) => line.split("\t"));
  return rows.length > 1 || rows[0]?.length > 1 ? rows : null;
}

export interface Table {
  element: HTMLElement;
  /** Redraws the rows; `fresh` means that another table was opened. */
  draw(fresh: boolean): void;
  show(outcome: Outcome | null): void;
}

interface Shown {
  row: HTMLTableRowElement;
  score: HTMLElement;
  soft: Meter;
  hard: Meter;
}

interface Meter {
  cell: HTMLElement;
  set(weight: number | null, whole: number): void;
}

function meter(name: string, kind: string): Meter {
  const part = h("i");
  const number = h("span", { class: "number", test: name });
  const cell = h("td", { class: `weight ${kind}` }, number, h("span", { class: `bar ${kind}`, "aria-hidden": "true" }, part));
  return {
    cell,
    set(weight, whole) {
      number.textContent = weight === null ? "" : figure(weight);
      number.dataset.value = weight === null ? "" : String(weight);
      part.style.width = long(weight ?? 0, whole);
    },
  };
}

export function table(state: State, changed: (rows: boolean, edited?: boolean) => void): Table {
  const body = h("tbody");
  const names = { key: h("span"), value: h("span") };
  const head = h(
    "thead",
    {},
    h(
      "tr",
      {},
      h("th", { scope: "col" }, "key k ", names.key),
      h("th", { scope: "col" }, "value v ", names.value),
      h("th", { scope: "col", class: "number" }, "score s"),
      h("th", { scope: "col", class: "weight" }, "soft α"),
      h("th", { scope: "col", class: "weight" }, "hard α"),
      h("th", { scope: "col" }, h("span", { class: "unseen" }, "remove")),
    ),
  );
  let shown: Shown[] = [];
  let last: Outcome | null = null;
  let all = false;

  const said = h("span", { test: "pasted" });
  const undo = h("button", { test: "undo-paste", on: { click: () => restore() } }, "Undo");
  const pasted = h("p", { class: "hint", hidden: true }, said, " ", undo);
  /** Undoes the last paste, until something else changes. The browser can undo only single fields. */
  let back: (() => void) | null = null;
  const edit = (rows: boolean) => {
    back = null;
    undo.hidden = true;
    changed(rows);
  };
  const restore = () => {
    back?.();
    back = null;
    undo.hidden = true;
    said.textContent = "The paste was undone.";
    changed(true, false);
    (shown[0]?.row.querySelector("input") ?? add).focus();
  };
  /** Pastes cells, beginning at row `i` and going right and down. */
  const paste = (cells: string[][], what: "key" | "value", i: number) => {
    const columns = what === "key" ? 2 : 1;
    const blank = () => ({ text: "", given: "" });
    const taken = cells.slice(0, PASTED);
    back = state.mark();
    taken.forEach((cell, j) => {
      const line = (state.lines[i + j] ??= { key: blank(), value: blank() });
      const fields = cell.slice(0, columns).map((text) => ({ text: text.trim(), given: "" }));
      Object.assign(line, what === "value" ? { value: fields[0] } : { key: fields[0], value: fields[1] ?? line.value });
    });
    changed(true);
    const wide = Math.max(...taken.map((cell) => cell.length));
    const rows = cells.length > PASTED ? `The first ${PASTED} of ${cells.length.toLocaleString("en")} rows` : counted(cells.length, "row");
    const left = wide > columns ? `; only the first ${columns > 1 ? `${columns} of their ${wide} columns were` : `of their ${wide} columns was`} used` : "";
    said.textContent = `${rows} ${cells.length > 1 ? "were" : "was"} pasted${left}.`;
    pasted.hidden = undo.hidden = false;
    shown[i].row.querySelector<HTMLInputElement>(what === "key" ? "td:first-child input" : "td:nth-child(2) input")!.focus();
  };

  const input = (of: { text: string; given: unknown }, what: "key" | "value", i: number) =>
    h("input", {
      type: "text",
      value: inOneLine(isRecord(of.given) ? formatValue(of.given) : of.text),
      autocomplete: "off",
      spellcheck: "false",
      "aria-label": `${what} of row ${i + 1}`,
      test: `row-${i}-${what}`,
      readonly: of.given !== null && typeof of.given === "object",
      on: {
        input: (event) => {
          of.text = typed(event.target.value);
          edit(false);
        },
        paste: (event: ClipboardEvent) => {
          const cells = cellsOf(event.clipboardData?.getData("text/plain") ?? "");
          if (!cells) return;
          event.preventDefault();
          paste(cells, what, i);
        },
      },
    });

  const remove = (i: number) => {
    const at = Array.from(body.rows).indexOf(shown[i].row);
    state.lines.splice(i, 1);
    edit(true);
    const next = body.rows[Math.min(at, body.rows.length - 1)];
    (next?.querySelector("input") ?? add).focus();
  };

  const sorted = h("input", { type: "checkbox", id: unique("sorted"), test: "sorted", on: { change: () => arrange() } });
  const more = h("button", {
    class: "quiet",
    test: "more",
    on: {
      click: () => {
        all = !all;
        arrange();
      },
    },
  });

  /** Sorts the rows by weight if the box is checked, but not while the user types in one of them. */
  const arrange = () => {
    const by = last?.soft.weights;
    const weight = new Map(last?.used.map((line, i) => [line, Math.abs(by![i])]));
    const order = shown.map((_, i) => i);
    if (sorted.checked) order.sort((i, j) => (weight.get(j) ?? -1) - (weight.get(i) ?? -1) || i - j);
    const few = sorted.checked && !all && shown.length > FIRST;
    order.forEach((i, place) => {
      shown[i].row.hidden = few && place >= FIRST;
    });
    more.hidden = !sorted.checked || shown.length <= FIRST;
    more.textContent = few ? `Show all ${shown.length} rows` : `Show the ${FIRST} rows with the most weight`;
    const now = Array.from(body.rows);
    if (order.some((i, place) => now[place] !== shown[i].row) && !body.matches(":focus-within")) {
      body.append(...order.map((i) => shown[i].row));
    }
  };

  const draw = (fresh: boolean) => {
    if (fresh) back = null;
    if (fresh) pasted.hidden = true;
    if (fresh) sorted.checked = state.lines.length > FIRST;
    names.key.textContent = state.names.key === "key" ? "" : `(${state.names.key})`;
    names.value.textContent = state.names.value === "value" ? "" : `(${state.names.value})`;
    shown = state.lines.map((line, i) => {
      const score = h("td", { class: "number score", test: `row-${i}-score` });
      const soft = meter(`row-${i}-weight`, "first");
      const hard = meter(`row-${i}-hard`, "second");
      const row = h(
        "tr",
        {},
        h("td", { class: "cell" }, input(line.key, "key", i)),
        h("td", { class: "cell" }, input(line.value, "value", i)),
        score,
        soft.cell,
        hard.cell,
        h(
          "td",
          { class: "end" },
          h(
            "button",
            {
              class: "quiet",
              "aria-label": `Remove row ${i + 1}, ${line.key.text}`,
              test: `row-${i}-remove`,
              on: { click: () => remove(i) },
            },
            "×",
          ),
        ),
      );
      return { row, score, soft, hard };
    });
    put(body, ...shown.map(({ row }) => row));
  };

  const add = h(
    "button",
    {
      test: "add-row",
      on: {
        click: () => {
          state.lines.push({ key: { text: "", given: "" }, value: { text: "", given: "" } });
          edit(true);
          const { row } = shown[shown.length - 1];
          row.hidden = false;
          row.querySelector("input")!.focus();
        },
      },
    },
    "Add a row",
  );
  const swap = h(
    "button",
    {
      test: "swap",
      on: {
        click: () => {
          state.swap();
          edit(true);
        },
      },
    },
    "Swap keys and values",
  );

  const rows = h("table", { class: "rows" }, h("caption", { class: "unseen" }, "The rows of the database with their scores and weights"), head, body);
  return {
    element: h(
      "div",
      {
        on: {
          keydown: (event: KeyboardEvent) => {
            if (!back || event.shiftKey || event.altKey || !(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "z") return;
            event.preventDefault();
            restore();
          },
        },
      },
      h("div", { class: "row order" }, sorted, h("label", { for: sorted.id }, "sort by weight")),
      rows,
      h("div", { class: "row" }, add, swap, more),
      pasted,
    ),
    draw,
    show(outcome) {
      last = outcome;
      const place = new Map(outcome?.used.map((line, i) => [line, i]));
      const whole = wholeOf(outcome?.soft.weights ?? []);
      rows.classList.toggle("wide", whole >= 100);
      let best = -1;
      if (outcome) {
        const { weights } = outcome.soft;
        weights.forEach((w, i) => {
          if (Math.abs(w) > (best < 0 ? 0 : Math.abs(weights[best]))) best = i;
        });
      }
      shown.forEach(({ row, score, soft, hard }, i) => {
        const at = place.get(i);
        const found = outcome && at !== undefined ? outcome : null;
        score.textContent = found ? figure(found.soft.scores[at!], 2) : "";
        score.dataset.value = found ? String(found.soft.scores[at!]) : "";
        soft.set(found ? found.soft.weights[at!] : null, whole);
        hard.set(found ? found.hard.weights[at!] : null, 1);
        row.classList.toggle("best", found !== null && at === best);
      });
      arrange();
    },
  };
}
