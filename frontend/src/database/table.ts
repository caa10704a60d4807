/** The table of rows: editable keys and values, with the score and the weights of each row. */

import { formatBarWidth, computeMaxWeight } from "../bars";
import { h, replaceChildren, createId } from "../dom";
import { formatCount, formatWeight, formatValue } from "../numbers";
import { isTensor } from "../wire";
import { type Outcome, type State, toOneLine, fromOneLine } from "./state";

/** Rows that are shown at first if they are sorted by weight. */
const FIRST_ROWS = 25;

const isRecord = (x: unknown) => typeof x === "object" && x !== null && !Array.isArray(x) && !isTensor(x);

/** Largest number of pasted rows. */
const MAX_PASTED_ROWS = 500;

/** The cells of text copied from a spreadsheet; null if it is a single cell. */
function parseClipboard(text: string): string[][] | null {
  const rows = text
    .split(/\r\n|\r|\n/)
    .filter((line) => line.trim() !== "")
    .map((line) => line.split("\t"));
  return rows.length > 1 || rows[0]?.length > 1 ? rows : null;
}

export interface TableView {
  element: HTMLElement;
  /** Redraws the rows; `isNewTable`: another table was opened. */
  draw(isNewTable: boolean): void;
  show(outcome: Outcome | null): void;
}

interface RowElements {
  row: HTMLTableRowElement;
  score: HTMLElement;
  soft: Meter;
  hard: Meter;
}

interface Meter {
  cell: HTMLElement;
  setWeight(weight: number | null, maxWeight: number): void;
}

function createMeter(name: string, kind: string): Meter {
  const part = h("i");
  const number = h("span", { class: "number", test: name });
  const cell = h("td", { class: `weight ${kind}` }, number, h("span", { class: `bar ${kind}`, "aria-hidden": "true" }, part));
  return {
    cell,
    setWeight(weight, maxWeight) {
      number.textContent = weight === null ? "" : formatWeight(weight);
      number.dataset.value = weight === null ? "" : String(weight);
      part.style.width = formatBarWidth(weight ?? 0, maxWeight);
    },
  };
}

export function createTable(state: State, onChange: (rows: boolean, edited?: boolean) => void): TableView {
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
  let rowElements: RowElements[] = [];
  let lastOutcome: Outcome | null = null;
  let showsAll = false;

  const pasteText = h("span", { test: "pasted" });
  const undoButton = h("button", { test: "undo-paste", on: { click: () => restoreRows() } }, "Undo");
  const pasteNote = h("p", { class: "hint", hidden: true }, pasteText, " ", undoButton);
  /** Undoes the last paste, until something else changes. The browser can undo only single fields. */
  let undoPaste: (() => void) | null = null;
  const handleEdit = (rows: boolean) => {
    undoPaste = null;
    undoButton.hidden = true;
    onChange(rows);
  };
  const restoreRows = () => {
    undoPaste?.();
    undoPaste = null;
    undoButton.hidden = true;
    pasteText.textContent = "The paste was undone.";
    onChange(true, false);
    (rowElements[0]?.row.querySelector("input") ?? addButton).focus();
  };
  /** Pastes cells, beginning at row `i` and going right and down. */
  const pasteCells = (cells: string[][], column: "key" | "value", i: number) => {
    const columns = column === "key" ? 2 : 1;
    const createBlank = () => ({ text: "", original: "" });
    const usedRows = cells.slice(0, MAX_PASTED_ROWS);
    undoPaste = state.snapshotRows();
    usedRows.forEach((cell, j) => {
      const line = (state.lines[i + j] ??= { key: createBlank(), value: createBlank() });
      const fields = cell.slice(0, columns).map((text) => ({ text: text.trim(), original: "" }));
      if (column === "value") line.value = fields[0];
      else [line.key, line.value] = [fields[0], fields[1] ?? line.value];
    });
    onChange(true);
    const width = Math.max(...usedRows.map((cell) => cell.length));
    const rows = cells.length > MAX_PASTED_ROWS ? `The first ${MAX_PASTED_ROWS} of ${cells.length.toLocaleString("en")} rows` : formatCount(cells.length, "row");
    const cutNote = width > columns ? `; only the first ${columns > 1 ? `${columns} of their ${width} columns were` : `of their ${width} columns was`} used` : "";
    pasteText.textContent = `${rows} ${cells.length > 1 ? "were" : "was"} pasted${cutNote}.`;
    pasteNote.hidden = undoButton.hidden = false;
    rowElements[i].row.querySelector<HTMLInputElement>(column === "key" ? "td:first-child input" : "td:nth-child(2) input")!.focus();
  };

  const createInput = (field: { text: string; original: unknown }, column: "key" | "value", i: number) =>
    h("input", {
      type: "text",
      value: toOneLine(isRecord(field.original) ? formatValue(field.original) : field.text),
      autocomplete: "off",
      spellcheck: "false",
      "aria-label": `${column} of row ${i + 1}`,
      test: `row-${i}-${column}`,
      readonly: field.original !== null && typeof field.original === "object",
      on: {
        input: (event) => {
          field.text = fromOneLine(event.target.value);
          handleEdit(false);
        },
        paste: (event: ClipboardEvent) => {
          const cells = parseClipboard(event.clipboardData?.getData("text/plain") ?? "");
          if (!cells) return;
          event.preventDefault();
          pasteCells(cells, column, i);
        },
      },
    });

  const removeRow = (i: number) => {
    const position = Array.from(body.rows).indexOf(rowElements[i].row);
    state.lines.splice(i, 1);
    handleEdit(true);
    const next = body.rows[Math.min(position, body.rows.length - 1)];
    (next?.querySelector("input") ?? addButton).focus();
  };

  const sortBox = h("input", { type: "checkbox", id: createId("sorted"), test: "sorted", on: { change: () => sortRows() } });
  const moreButton = h("button", {
    class: "quiet",
    test: "more",
    on: {
      click: () => {
        showsAll = !showsAll;
        sortRows();
      },
    },
  });

  /** Sorts the rows by weight if the box is checked, but not while the user types in one of them. */
  const sortRows = () => {
    const weights = lastOutcome?.soft.weights;
    const weight = new Map(lastOutcome?.usedLines.map((line, i) => [line, Math.abs(weights![i])]));
    const order = rowElements.map((_, i) => i);
    if (sortBox.checked) order.sort((i, j) => (weight.get(j) ?? -1) - (weight.get(i) ?? -1) || i - j);
    const hidesRows = sortBox.checked && !showsAll && rowElements.length > FIRST_ROWS;
    order.forEach((i, position) => {
      rowElements[i].row.hidden = hidesRows && position >= FIRST_ROWS;
    });
    moreButton.hidden = !sortBox.checked || rowElements.length <= FIRST_ROWS;
    moreButton.textContent = hidesRows ? `Show all ${rowElements.length} rows` : `Show the ${FIRST_ROWS} rows with the most weight`;
    const current = Array.from(body.rows);
    if (order.some((i, position) => current[position] !== rowElements[i].row) && !body.matches(":focus-within")) {
      body.append(...order.map((i) => rowElements[i].row));
    }
  };

  const draw = (isNewTable: boolean) => {
    if (isNewTable) undoPaste = null;
    if (isNewTable) pasteNote.hidden = true;
    if (isNewTable) sortBox.checked = state.lines.length > FIRST_ROWS;
    names.key.textContent = state.names.key === "key" ? "" : `(${state.names.key})`;
    names.value.textContent = state.names.value === "value" ? "" : `(${state.names.value})`;
    rowElements = state.lines.map((line, i) => {
      const score = h("td", { class: "number score", test: `row-${i}-score` });
      const soft = createMeter(`row-${i}-weight`, "first");
      const hard = createMeter(`row-${i}-hard`, "second");
      const row = h(
        "tr",
        {},
        h("td", { class: "cell" }, createInput(line.key, "key", i)),
        h("td", { class: "cell" }, createInput(line.value, "value", i)),
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
              on: { click: () => removeRow(i) },
            },
            "×",
          ),
        ),
      );
      return { row, score, soft, hard };
    });
    replaceChildren(body, ...rowElements.map(({ row }) => row));
  };

  const addButton = h(
    "button",
    {
      test: "add-row",
      on: {
        click: () => {
          state.lines.push({ key: { text: "", original: "" }, value: { text: "", original: "" } });
          handleEdit(true);
          const { row } = rowElements[rowElements.length - 1];
          row.hidden = false;
          row.querySelector("input")!.focus();
        },
      },
    },
    "Add a row",
  );
  const swapButton = h(
    "button",
    {
      test: "swap",
      on: {
        click: () => {
          state.swapColumns();
          handleEdit(true);
        },
      },
    },
    "Swap keys and values",
  );

  const tableElement = h("table", { class: "rows" }, h("caption", { class: "unseen" }, "The rows of the database with their scores and weights"), head, body);
  return {
    element: h(
      "div",
      {
        on: {
          keydown: (event: KeyboardEvent) => {
            if (!undoPaste || event.shiftKey || event.altKey || !(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "z") return;
            event.preventDefault();
            restoreRows();
          },
        },
      },
      h("div", { class: "row order" }, sortBox, h("label", { for: sortBox.id }, "sort by weight")),
      tableElement,
      h("div", { class: "row" }, addButton, swapButton, moreButton),
      pasteNote,
    ),
    draw,
    show(outcome) {
      lastOutcome = outcome;
      const positionByLine = new Map(outcome?.usedLines.map((line, i) => [line, i]));
      const maxWeight = computeMaxWeight(outcome?.soft.weights ?? []);
      tableElement.classList.toggle("wide", maxWeight >= 100);
      let bestIndex = -1;
      if (outcome) {
        const { weights } = outcome.soft;
        weights.forEach((w, i) => {
          if (Math.abs(w) > (bestIndex < 0 ? 0 : Math.abs(weights[bestIndex]))) bestIndex = i;
        });
      }
      rowElements.forEach(({ row, score, soft, hard }, i) => {
        const index = positionByLine.get(i);
        const rowOutcome = outcome && index !== undefined ? outcome : null;
        score.textContent = rowOutcome ? formatWeight(rowOutcome.soft.scores[index!], 2) : "";
        score.dataset.value = rowOutcome ? String(rowOutcome.soft.scores[index!]) : "";
        soft.setWeight(rowOutcome ? rowOutcome.soft.weights[index!] : null, maxWeight);
        hard.setWeight(rowOutcome ? rowOutcome.hard.weights[index!] : null, 1);
        row.classList.toggle("best", rowOutcome !== null && index === bestIndex);
      });
      sortRows();
    },
  };
}
