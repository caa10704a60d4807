/** The view Your data: open a file or a database of the server, choose its columns, and ask it. */

import { formatBarWidth } from "../bars";
import { suggestQuestion } from "../data/question";
import { type TableInfo, type TableAnswer, type Row, createLocalSource, createRemoteSource } from "../data/source";
import { clipText, formatFixed, h, createField, replaceChildren, createSelect } from "../dom";
import { MAX_LARGE_FONT_LETTERS, formatCount, formatPercent, formatOneLine, formatValue } from "../numbers";
import { listPythonOnly } from "../registrations";
import type { View } from "../view";
import { view as databaseView } from "./database";

const SCORE_OPTIONS: [string, string][] = [
  ["", "encoder’s default"],
  ["cosine", "cosine"],
  ["gaussian", "Gaussian"],
  ["laplace", "Laplace"],
  ["dot", "dot product"],
];
const WEIGHTING_OPTIONS: [string, string][] = [
  ["softmax", "softmax"],
  ["topk:3", "softmax of the best 3"],
  ["sparsemax", "sparsemax"],
  ["entmax15", "entmax 1.5"],
  ["hard", "hard: the best row"],
  ["average", "average: equal weights"],
];
/** The choice of all columns except the key. */
const ALL_OTHER_COLUMNS = "";
const LIVE_LABEL = "Edit rows, compare soft and hard";
/** Milliseconds after the last key press until the query is sent. */
const QUERY_DELAY_MS = 250;
/** Where the page or Python stores an opened file. */
const STORAGE_NOTES = {
  notebook: "It stays in memory until Python ends.",
  server: "The server keeps it in memory until it stops.",
  file: "It stays in this page and is not uploaded.",
};
/** A cell of one word with at most this many letters, such as an id, stays on one line. */
const MAX_WORD_LETTERS = 24;
/** Longest cell that is used as an example of a query. */
const MAX_EXAMPLE_LETTERS = 40;
/** Larger files take noticeable time to read. */
const LARGE_FILE_BYTES = 5e6;
/** Names of columns that need no backticks in a condition. */
const PLAIN_NAME = /^(?!(and|as|class|for|from|global|if|in|is|not|or|pass|return|with)$)[A-Za-z_]\w*$/;

const STYLE = `
.data .drop { border: 2px dashed var(--line); border-radius: var(--radius); padding: 1rem; display: flex; flex-wrap: wrap; gap: 0.75rem 1.5rem; align-items: start; margin-bottom: 1.25rem; }
.data .drop.over { border-color: var(--accent); background: var(--wash); }
.data .drop > * { flex: 1 1 14rem; }
.data .file { position: relative; }
.data .file input { position: absolute; inset: 0; width: 100%; height: 100%; opacity: 0; cursor: pointer; font-size: 0; }
.data .file .face { display: block; border: 1px solid var(--line); border-radius: var(--radius); padding: 0.4rem 0.8rem; background: var(--paper); text-align: center; }
.data .file:hover .face { border-color: var(--soft); }
.data .file input:focus-visible + .face { outline: 3px solid var(--accent); outline-offset: 1px; }
.data .controls { grid-template-columns: repeat(auto-fill, minmax(min(13rem, 100%), 1fr)); }
.data .query input { font-size: 1.2rem; font-weight: 600; }
.data .value { font-size: clamp(1.6rem, 4cqi, 2.4rem); line-height: 1.2; font-weight: 650; margin: 0.35rem 0 0.6rem; overflow-wrap: anywhere; }
.data .value.long { font-size: 1.1rem; line-height: 1.4; }
.data .first .clip { min-width: 18rem; max-width: 40rem; }
.data td.wide { overflow-wrap: anywhere; min-width: 6.5rem; }
.data td.word { white-space: nowrap; }
.data .about { display: flex; flex-wrap: wrap; gap: 0.5rem 1.5rem; justify-content: space-between; align-items: center; margin-bottom: 1rem; }
.data .about p { margin: 0; }
.data [hidden] { display: none; }
.data .stale { opacity: 0.4; }
.data .advice { font-weight: 600; }
.data .controls { align-items: start; }
.data .first td { vertical-align: top; }
.data input::placeholder { font-weight: 400; color: var(--soft); }
@container page (max-width: 44rem) { .data .controls { grid-template-columns: repeat(auto-fill, minmax(min(9rem, 100%), 1fr)); } }
.data .query { margin-bottom: 1.25rem; }
.data th.number { width: 4.5rem; }
.data th.share { width: 25%; }
@container page (max-width: 30rem) { .data .share { display: none; } }
`;

/** A button for a file input. The browser's own button covers it, invisible. */
function createFileButton(label: string, text: string, input: HTMLInputElement, hint: string): HTMLElement {
  const field = createField(label, input, hint);
  const box = h("div", { class: "file" });
  input.replaceWith(box);
  box.append(input, h("span", { class: "face", "aria-hidden": "true" }, text));
  return field;
}

/** A cell of a table: empty if it is missing. */
function createCell(cell: unknown, test: string): HTMLElement {
  const text = cell === null || cell === undefined ? "" : formatValue(cell);
  const isWord = text.length <= MAX_WORD_LETTERS && !/\s/.test(text);
  return h("td", { class: isWord ? "word" : "wide", test }, clipText(text));
}

/** The first few row numbers as text. */
const formatRowNumbers = (rows: number[]) =>
  `${rows.length === 1 ? "row" : "rows"} ${rows.slice(0, 5).join(", ")}${rows.length > 5 ? ", …" : ""}`;

const haveSameNames = (first: string[], second: string[]) => first.length === second.length && first.every((name) => second.includes(name));

/** Whether both tables can read the same queries. The kinds of the parts of a key of several columns are not known. */
const haveSameKeys = (first: TableInfo, second: TableInfo) =>
  haveSameNames(first.key, second.key) && first.key_kind === second.key_kind && (first.key.length === 1 || first.name === second.name);

/** An example of a condition that some of these rows pass. */
function suggestCondition(rows: Row[], columns: string[]): string {
  const quoteName = (column: string) => (PLAIN_NAME.test(column) ? column : `\`${column.replaceAll("`", "``")}\``);
  const cellsByColumn = columns.map((column) => [column, rows.map((row) => row[column]).filter((x) => x !== null)] as const);
  const numberColumn = cellsByColumn.find(([, values]) => values.length && values.every((x) => typeof x === "number"));
  if (numberColumn) return `${quoteName(numberColumn[0])} <= ${(numberColumn[1] as number[]).sort((a, b) => a - b)[(numberColumn[1].length - 1) >> 1]}`;
  const textColumn = cellsByColumn.find(([, [x]]) => typeof x === "string" && /^[^"\\\d]+$/.test(x) && x.length <= MAX_EXAMPLE_LETTERS);
  return textColumn ? `${quoteName(textColumn[0])} == "${textColumn[1][0]}"` : "";
}

export const view: View = {
  name: "data",
  title: "Your data",
  style: STYLE,
  mount(container, context) {
    const source = context.backend ? createRemoteSource(context.backend, context.data.databases ?? []) : createLocalSource();
    let currentTable: TableInfo | null = source.tables[0] ?? null;
    let [isRemoved, lastRequest] = [false, 0];
    let timer: ReturnType<typeof setTimeout> | undefined;
    /** The question that the page asks of a new table; the first rows are shown with it. */
    let suggestedQuery = "";

    const errorText = h("p", { class: "error", role: "alert", test: "data-error", hidden: true });
    const tableNote = h("p", { class: "note", test: "data-about" });
    const answerSection = h("section", { "aria-label": "Answer", test: "data-answer" });
    const firstRowsSection = h("section", { "aria-label": "First rows", test: "data-first-rows" });
    const columnControls = h("div", { class: "controls" });
    const tableControls = h("div");
    const createInput = (test: string, props = {}) =>
      h("input", { type: "text", test, autocomplete: "off", spellcheck: "false", on: { input: () => scheduleShow() }, ...props });
    const query = createInput("data-query");
    const where = createInput("data-where");
    const score = createSelect([...SCORE_OPTIONS, ...listPythonOnly(context, "scores")], "", () => void showAnswer(), { test: "data-score" });
    const weighting = createSelect([...WEIGHTING_OPTIONS, ...listPythonOnly(context, "weightings")], "softmax", () => void showAnswer(), { test: "data-weighting" });
    const liveBox = h("div", { test: "data-live-view", hidden: true });
    let removeLive: (() => void) | null = null;
    const liveButton = h(
      "button",
      { test: "data-live", hidden: true, "aria-expanded": "false", on: { click: () => void (removeLive ? closeLive() : openLive()) } },
      LIVE_LABEL,
    );
    /** Shows the rows of the table and the current query in the view Database, where both can be edited. */
    const openLive = () =>
      runAction(async () => {
        const table = currentTable;
        if (!table || !context.backend) return;
        const data = await context.backend.call("live", { database: table.name, query: query.value.trim() });
        if (isRemoved || currentTable !== table || removeLive) return;
        switchLive(true);
        removeLive = databaseView.mount(liveBox, { ...context, data });
      });
    const closeLive = () => {
      removeLive?.();
      removeLive = null;
      switchLive(false);
      context.setUnsaved(false);
    };
    /** Shows the view Database or the answer, but not two queries at the same time. */
    const switchLive = (isLive: boolean) => {
      liveBox.hidden = !isLive;
      for (const part of [columnControls, queryRow, answerSection, firstRowsSection]) part.hidden = isLive;
      liveButton.textContent = isLive ? "Back to the answer" : LIVE_LABEL;
      liveButton.setAttribute("aria-expanded", String(isLive));
    };
    let version: HTMLSelectElement | null = null;
    let queue: Promise<void> = Promise.resolve();

    const showError = (error: unknown) => {
      errorText.textContent = error instanceof Error ? error.message : String(error);
      errorText.hidden = false;
    };
    const runAction = async (action: () => Promise<void>) => {
      errorText.hidden = true;
      try {
        await action();
      } catch (error) {
        if (!isRemoved) showError(error);
      }
    };

    const scheduleShow = () => {
      clearTimeout(timer);
      timer = setTimeout(() => void showAnswer(), QUERY_DELAY_MS);
    };
    const showAnswer = () =>
      runAction(async () => {
        const table = currentTable;
        lastRequest += 1;
        const requestNumber = lastRequest;
        const sections = [answerSection, firstRowsSection];
        if (!table) return sections.forEach((section) => replaceChildren(section));
        const selection = { where: where.value, at: version?.value ? Number(version.value) : null };
        const isOutdated = () => isRemoved || requestNumber !== lastRequest;
        const queryText = query.value;
        const [hasQuery, hasPreview] = [queryText.trim() !== "", [suggestedQuery, ""].includes(queryText.trim())];
        try {
          const request = { query: queryText, score: score.value, weighting: weighting.value, ...selection };
          const result = hasQuery ? await source.askTable(table, request) : null;
          const firstRows = hasPreview ? await source.readRows(table, selection) : null;
          if (isOutdated()) return;
          sections.forEach((section) => section.classList.remove("stale"));
          if (result) drawAnswer(result, table);
          else replaceChildren(answerSection);
          if (firstRows) drawFirstRows(firstRows, table);
          else replaceChildren(firstRowsSection);
          if (!result) return;
          const value = formatValue(result.value);
          context.announce(result.rows.length ? `${value}. ${formatOneLine(result.rows[0].key)} has ${formatPercent(result.rows[0].weight)} of the weight.` : "No row matches the query.");
        } catch (error) {
          if (isOutdated()) return;
          sections.forEach((section) => section.classList.add("stale")); // they belong to another query
          throw error;
        } finally {
          if (!isOutdated()) Object.assign(answerSection.dataset, { query: queryText, request: String(requestNumber) });
        }
      });

    const drawAnswer = (result: TableAnswer, table: TableInfo) => {
      const value = result.rows.length ? formatValue(result.value) : "nothing";
      replaceChildren(
        answerSection,
        h("p", { class: value.length > MAX_LARGE_FONT_LETTERS ? "value long" : "value", test: "data-value-found" }, value),
        result.rows.length > 0 && result.confidence_text ? h("p", { test: "data-confidence" }, `How sure: ${result.confidence_text}`) : null,
        result.hint ? h("p", { class: "advice", test: "data-hint" }, result.hint) : null,
        h("p", { class: "note", test: "data-explained" }, result.explained),
        h(
          "table",
          {},
          h(
            "thead",
            {},
            h("tr", {}, h("th", { class: "number" }, "weight"), h("th", { class: "share" }), h("th", {}, table.key.join(", ")), h("th", {}, table.value.join(", "))),
          ),
          h(
            "tbody",
            {},
            ...result.rows.map((row, i) =>
              h(
                "tr",
                {},
                h("td", { class: "number", test: `data-row-${i}-weight`, "data-value": row.weight }, formatFixed(row.weight)),
                h("td", { class: "share" }, h("span", { class: "bar" }, h("i", { style: { width: formatBarWidth(row.weight) } }))),
                createCell(row.key, `data-row-${i}-key`),
                createCell(row.value, `data-row-${i}-value`),
              ),
            ),
          ),
        ),
        h("p", { class: "note" }, "effective rows ", h("output", { test: "data-effective" }, formatFixed(result.effective_rows, 2)), ` of ${result.total.toLocaleString("en")}`),
      );
    };

    /** Shows the first rows, and an example of a query. */
    const drawFirstRows = (firstRows: Row[], table: TableInfo) => {
      const pickCells = (row: Row, names: string[]) => names.map((name) => row[name]);
      const [example] = firstRows.map((row) => formatValue(pickCells(row, table.key)));
      query.placeholder = example && example.length <= MAX_EXAMPLE_LETTERS ? `${example}, or something similar` : `${table.key.join(", ")}, or something similar`;
      if (firstRows.length) where.placeholder = suggestCondition(firstRows, table.columns);
      const shownColumns = [...table.key, ...table.value];
      replaceChildren(
        firstRowsSection,
        h("p", { class: "note" }, firstRows.length ? `First ${firstRows.length === 1 ? "row" : `${firstRows.length} rows`}:` : "No rows match."),
        firstRows.length > 0 &&
          h(
            "div",
            { class: "scroll" },
            h(
              "table",
              { class: "first" },
              h("thead", {}, h("tr", {}, ...shownColumns.map((name) => h("th", { scope: "col" }, name)))),
              h(
                "tbody",
                {},
                ...firstRows.map((row, i) => h("tr", {}, ...shownColumns.map((name) => createCell(row[name], `data-first-${i}-${name}`)))),
              ),
            ),
          ),
      );
    };

    const selectTable = (name: string) => {
      where.value = ""; // it refers to columns of the previous table
      void openTable(source.tables.find((candidate) => candidate.name === name)!);
    };
    /** Clears what was written for other columns: a table with other keys may refuse it. */
    const clearOutdatedInputs = (previous: TableInfo | null, table: TableInfo) => {
      clearTimeout(timer);
      if (!previous) return;
      if (!haveSameNames(previous.columns, table.columns)) where.value = "";
      if (!haveSameKeys(previous, table)) query.value = suggestedQuery = "";
    };
    /** Asks a first question of a table that was just opened, if the query is empty or the last suggestion. */
    const suggestQuery = async (table: TableInfo) => {
      if (query.value.trim() !== suggestedQuery) return;
      const firstRows = table.key.length === 1 ? await source.readRows(table, { where: "", at: null }) : [];
      if (isRemoved || currentTable !== table || query.value.trim() !== suggestedQuery) return;
      query.value = suggestedQuery = suggestQuestion(firstRows.map((row) => row[table.key[0]]));
      if (query.matches(":focus")) query.select(); // the next letter replaces it
    };
    /** Opens a table and redraws the controls for it. */
    const openTable = (table: TableInfo | null) =>
      runAction(async () => {
        if (table) clearOutdatedInputs(currentTable, table);
        currentTable = table;
        closeLive();
        liveButton.hidden = !table || !context.backend;
        replaceChildren(answerSection);
        replaceChildren(firstRowsSection);
        replaceChildren(
          tableControls,
          source.tables.length
            ? createField(
                "Table",
                createSelect(source.tables.map((candidate) => candidate.name), table?.name ?? "", selectTable, { test: "data-table" }),
              )
            : h("p", { class: "note" }, "No table yet: open a file, or drop one here."),
        );
        if (!table) return replaceChildren(columnControls);
        const skippedNotes = (table.skipped ?? []).map(({ why, rows }) => `. ${why}${rows.length ? `: ${formatRowNumbers(rows)}` : ""}`);
        tableNote.textContent = `${table.name}: ${formatCount(table.rows, "row")}, ${table.key.join(", ")} → ${table.value.join(", ")}${skippedNotes.join("")}`;
        const applyColumns = () => {
          const [keyColumn, valueColumn] = [keySelect.value, valueSelect.value === keySelect.value ? ALL_OTHER_COLUMNS : valueSelect.value];
          // One after the other: the new tables have the same name, and the last choice must win.
          queue = queue.then(() => runAction(async () => openTable(await source.selectColumns(table, keyColumn, valueColumn || null))));
          return queue;
        };
        const keySelect = createSelect(table.columns, table.key[0], () => void applyColumns(), { test: "data-key" });
        const allOthers: [string, string] = [ALL_OTHER_COLUMNS, "all other columns"];
        const valueSelect = createSelect([allOthers, ...table.columns.map((name): [string, string] => [name, name])], table.value.length === 1 ? table.value[0] : ALL_OTHER_COLUMNS, () => void applyColumns(), { test: "data-value" });
        const versions = await source.listVersions(table);
        if (isRemoved || currentTable !== table) return;
        const newestOption: [string, string] = ["", "the newest"];
        const versionOptions = versions.map((version): [string, string] => [String(version.number), `${version.number}: ${version.what}, ${formatCount(version.rows, "row")}`]);
        version = versions.length > 1 ? createSelect([newestOption, ...versionOptions.reverse()], "", () => void showAnswer(), { test: "data-version" }) : null;
        replaceChildren(
          columnControls,
          createField("Key", keySelect),
          createField("Value", valueSelect),
          createField("Score", score),
          createField("Weighting", weighting),
          source.supportsConditions && createField("Only rows where", where, "a condition in Python’s syntax, with and, or, in"),
          version && createField("Version", version),
        );
        await suggestQuery(table);
        await showAnswer();
      });

    const readFiles = (files: FileList | null | undefined, upload = (chosenFiles: File[]) => source.uploadFile(chosenFiles[0])) =>
      runAction(async () => {
        const selectedFiles = Array.from(files ?? []);
        if (!selectedFiles.length) return;
        const size = selectedFiles.reduce((sum, file) => sum + file.size, 0);
        const previousNote = tableNote.textContent;
        const isSlow = source.supportsConditions && size > LARGE_FILE_BYTES;
        tableNote.textContent = isSlow ? `Reading ${Math.round(size / 1e6)} MB, which takes a while. A database made by qkv import opens at once.` : "Reading …";
        try {
          const table = await upload(selectedFiles);
          await openTable(table);
          context.announce(`${table.name} is open.`);
        } catch (error) {
          tableNote.textContent = previousNote;
          throw error;
        }
      });
    const fileInput = h("input", {
      type: "file",
      test: "data-file",
      accept: source.formats.map((ending) => `.${ending}`).join(","),
      on: { change: () => void readFiles(fileInput.files) },
    });
    const folderInput = h("input", {
      type: "file",
      test: "data-folder",
      webkitdirectory: true,
      on: { change: () => void readFiles(folderInput.files, source.uploadFolder!) },
    });
    const dropZone = h(
      "div",
      {
        class: "drop",
        test: "data-drop",
        on: {
          dragover: (event: DragEvent) => {
            event.preventDefault();
            dropZone.classList.add("over");
          },
          dragleave: () => dropZone.classList.remove("over"),
          drop: (event: DragEvent) => {
            event.preventDefault();
            dropZone.classList.remove("over");
            void readFiles(event.dataTransfer?.files);
          },
        },
      },
      tableControls,
      createFileButton(
        "File",
        "Open a file, or drop it here",
        fileInput,
        `${source.formats.join(", ")}. ${STORAGE_NOTES[context.backend ? context.host : "file"]}`,
      ),
      source.uploadFolder && createFileButton("Database", "Open a folder", folderInput, "For example books.qkv."),
    );
    const queryRow = h("div", { class: "query" }, createField("Query", query));
    const element = h(
      "div",
      { class: "data" },
      dropZone,
      h("div", { class: "about" }, tableNote, liveButton),
      columnControls,
      queryRow,
      errorText,
      liveBox,
      answerSection,
      firstRowsSection,
    );
    container.append(element);
    // The element of the view gets the event when the theme changes.
    container.addEventListener("theme", () => liveBox.dispatchEvent(new CustomEvent("theme")));
    void openTable(currentTable);
    // In a notebook the focus stays in the cell.
    if (context.host !== "notebook") query.focus({ preventScroll: true });
    return () => {
      isRemoved = true;
      clearTimeout(timer);
      closeLive();
      element.remove();
    };
  },
};
