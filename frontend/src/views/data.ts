/** The view Your data: open a file or a database of the server, choose its columns, and ask it. */

import { long } from "../bars";
import { type About, type Found, type Row, local, remote } from "../data/source";
import { clipped, fixed, h, labelled, put, select } from "../dom";
import { READ, counted, percent, short, formatValue } from "../numbers";
import { pythonOnly } from "../registered";
import type { View } from "../view";

const SCORES: [string, string][] = [
  ["", "encoder’s default"],
  ["cosine", "cosine"],
  ["gaussian", "Gaussian"],
  ["laplace", "Laplace"],
  ["dot", "dot product"],
];
const WEIGHTINGS: [string, string][] = [
  ["softmax", "softmax"],
  ["topk:3", "softmax of the best 3"],
  ["sparsemax", "sparsemax"],
  ["entmax15", "entmax 1.5"],
  ["hard", "hard: the best row"],
  ["average", "average: equal weights"],
];
/** The choice of all columns except the key. */
const REST = "";
/** Milliseconds after the last key press until the query is sent. */
const PAUSE = 250;
/** Where an opened file is stored. */
const STORED = {
  notebook: "It stays in memory until Python ends.",
  server: "The server keeps it in memory until it stops.",
  file: "It stays in this page and is not uploaded.",
};
/** Longest cell that is used as an example of a query. */
const LONG = 40;
/** Larger files take noticeable time to read. */
const LARGE = 5e6;
/** Names of columns that need no backticks in a condition. */
const PLAIN = /^(?!(and|as|class|for|from|global|if|in|is|not|or|pass|return|with)$)[A-Za-z_]\w*$/;

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
function opener(label: string, text: string, input: HTMLInputElement, hint: string): HTMLElement {
  const field = labelled(label, input, hint);
  const box = h("div", { class: "file" });
  input.replaceWith(box);
  box.append(input, h("span", { class: "face", "aria-hidden": "true" }, text));
  return field;
}

/** The first few row numbers as text. */
const listed = (rows: number[]) =>
  `${rows.length === 1 ? "row" : "rows"} ${rows.slice(0, 5).join(", ")}${rows.length > 5 ? ", …" : ""}`;

/** An example of a condition that some of these rows pass. */
function condition(rows: Row[], columns: string[]): string {
  const name = (column: string) => (PLAIN.test(column) ? column : `\`${column.replaceAll("`", "``")}\``);
  const cells = columns.map((column) => [column, rows.map((row) => row[column]).filter((x) => x !== null)] as const);
  const number = cells.find(([, some]) => some.length && some.every((x) => typeof x === "number"));
  if (number) return `${name(number[0])} <= ${(number[1] as number[]).sort((a, b) => a - b)[(number[1].length - 1) >> 1]}`;
  const text = cells.find(([, [x]]) => typeof x === "string" && /^[^"\\\d]+$/.test(x) && x.length <= LONG);
  return text ? `${name(text[0])} == "${text[1][0]}"` : "";
}

export const view: View = {
  name: "data",
  title: "Your data",
  style: STYLE,
  mount(at, given) {
    const source = given.backend ? remote(given.backend, given.data.databases ?? []) : local();
    let chosen: About | null = source.about[0] ?? null;
    let [gone, last] = [false, 0];
    let timer: ReturnType<typeof setTimeout> | undefined;

    const trouble = h("p", { class: "error", role: "alert", test: "data-error", hidden: true });
    const about = h("p", { class: "note", test: "data-about" });
    const answer = h("section", { "aria-label": "Answer", test: "data-answer" });
    const columns = h("div", { class: "controls" });
    const tables = h("div");
    const input = (test: string, props = {}) =>
      h("input", { type: "text", test, autocomplete: "off", spellcheck: "false", on: { input: () => later() }, ...props });
    const query = input("data-query");
    const where = input("data-where");
    const score = select([...SCORES, ...pythonOnly(given, "scores")], "", () => void show(), { test: "data-score" });
    const weighting = select([...WEIGHTINGS, ...pythonOnly(given, "weightings")], "softmax", () => void show(), { test: "data-weighting" });
    let version: HTMLSelectElement | null = null;
    let turn: Promise<void> = Promise.resolve();

    const fail = (error: unknown) => {
      trouble.textContent = error instanceof Error ? error.message : String(error);
      trouble.hidden = false;
    };
    const attempt = async (what: () => Promise<void>) => {
      trouble.hidden = true;
      try {
        await what();
      } catch (error) {
        if (!gone) fail(error);
      }
    };

    const later = () => {
      clearTimeout(timer);
      timer = setTimeout(() => void show(), PAUSE);
    };
    const show = () =>
      attempt(async () => {
        const of = chosen;
        last += 1;
        const mine = last;
        if (!of) return put(answer);
        const look = { where: where.value, at: version?.value ? Number(version.value) : null };
        const late = (error: unknown) => {
          if (mine !== last) return null;
          put(answer); // the visible answer belongs to another query
          throw error;
        };
        if (query.value.trim() === "") {
          const first = await source.rows(of, look).catch(late);
          if (first && !gone && mine === last) begin(first, of);
          return;
        }
        const asked = { query: query.value, score: score.value, weighting: weighting.value, ...look };
        const found = await source.ask(of, asked).catch(late);
        if (!found || gone || mine !== last) return;
        draw(found, of);
        const value = formatValue(found.value);
        given.announce(found.rows.length ? `${value}. ${short(found.rows[0].key)} has ${percent(found.rows[0].weight)} of the weight.` : "No row matches the query.");
      });

    const draw = (found: Found, of: About) => {
      const value = found.rows.length ? formatValue(found.value) : "nothing";
      put(
        answer,
        h("p", { class: value.length > READ ? "value long" : "value", test: "data-value-found" }, value),
        h("p", { class: "note", test: "data-explained" }, found.explained),
        h(
          "table",
          {},
          h(
            "thead",
            {},
            h("tr", {}, h("th", { class: "number" }, "weight"), h("th", { class: "share" }), h("th", {}, of.key.join(", ")), h("th", {}, of.value.join(", "))),
          ),
          h(
            "tbody",
            {},
            ...found.rows.map((row, i) =>
              h(
                "tr",
                {},
                h("td", { class: "number", test: `data-row-${i}-weight`, "data-value": row.weight }, fixed(row.weight)),
                h("td", { class: "share" }, h("span", { class: "bar" }, h("i", { style: { width: long(row.weight) } }))),
                h("td", { class: "wide", test: `data-row-${i}-key` }, clipped(formatValue(row.key))),
                h("td", { class: "wide", test: `data-row-${i}-value` }, clipped(formatValue(row.value))),
              ),
            ),
          ),
        ),
        h("p", { class: "note" }, "effective rows ", h("output", { test: "data-effective" }, fixed(found.effective_rows, 2)), ` of ${found.total.toLocaleString("en")}`),
      );
    };

    /** Without a query: shows the first rows, and an example of a query. */
    const begin = (first: Row[], of: About) => {
      const cells = (row: Row, names: string[]) => names.map((name) => row[name]);
      const [one] = first.map((row) => formatValue(cells(row, of.key)));
      query.placeholder = one && one.length <= LONG ? `${one}, or something similar` : `${of.key.join(", ")}, or something similar`;
      if (first.length) where.placeholder = condition(first, of.columns);
      const shown = [...of.key, ...of.value];
      put(
        answer,
        h("p", { class: "note" }, first.length ? `First ${first.length === 1 ? "row" : `${first.length} rows`}:` : "No rows match."),
        first.length > 0 &&
          h(
            "div",
            { class: "scroll" },
            h(
              "table",
              { class: "first" },
              h("thead", {}, h("tr", {}, ...shown.map((name) => h("th", { scope: "col" }, name)))),
              h(
                "tbody",
                {},
                ...first.map((row, i) => h("tr", {}, ...shown.map((name) => h("td", { class: row[name] === null ? "note" : undefined, test: `data-first-${i}-${name}` }, clipped(formatValue(row[name])))))),
              ),
            ),
          ),
      );
    };

    const pick = (name: string) => {
      where.value = ""; // it refers to columns of the previous table
      void open(source.about.find((one) => one.name === name)!);
    };
    /** Opens a table and redraws the controls for it. */
    const open = (of: About | null) =>
      attempt(async () => {
        chosen = of;
        put(answer);
        put(
          tables,
          source.about.length
            ? labelled(
                "Table",
                select(source.about.map((one) => one.name), of?.name ?? "", pick, { test: "data-table" }),
              )
            : h("p", { class: "note" }, "No table yet: open a file, or drop one here."),
        );
        if (!of) return put(columns);
        const left = (of.skipped ?? []).map(({ why, rows }) => `. ${why}${rows.length ? `: ${listed(rows)}` : ""}`);
        about.textContent = `${of.name}: ${counted(of.rows, "row")}, ${of.key.join(", ")} → ${of.value.join(", ")}${left.join("")}`;
        const change = () => {
          const [by, to] = [key.value, value.value === key.value ? REST : value.value];
          // One after the other: the new tables have the same name, and the last choice must win.
          turn = turn.then(() => attempt(async () => open(await source.by(of, by, to || null))));
          return turn;
        };
        const key = select(of.columns, of.key[0], () => void change(), { test: "data-key" });
        const all: [string, string] = [REST, "all other columns"];
        const value = select([all, ...of.columns.map((name): [string, string] => [name, name])], of.value.length === 1 ? of.value[0] : REST, () => void change(), { test: "data-value" });
        const past = await source.versions(of);
        if (gone || chosen !== of) return;
        const newest: [string, string] = ["", "the newest"];
        const known = past.map((one): [string, string] => [String(one.number), `${one.number}: ${one.what}, ${counted(one.rows, "row")}`]);
        version = past.length > 1 ? select([newest, ...known.reverse()], "", () => void show(), { test: "data-version" }) : null;
        put(
          columns,
          labelled("Key", key),
          labelled("Value", value),
          labelled("Score", score),
          labelled("Weighting", weighting),
          source.whole && labelled("Only rows where", where, "a condition in Python’s syntax, with and, or, in"),
          version && labelled("Version", version),
        );
        await show();
      });

    const take = (files: FileList | null | undefined, read = (some: File[]) => source.upload(some[0])) =>
      attempt(async () => {
        const some = Array.from(files ?? []);
        if (!some.length) return;
        const size = some.reduce((sum, one) => sum + one.size, 0);
        const before = about.textContent;
        const waits = source.whole && size > LARGE;
        about.textContent = waits ? `Reading ${Math.round(size / 1e6)} MB, which takes a while. A database made by qkv import opens at once.` : "Reading …";
        try {
          const of = await read(some);
          await open(of);
          given.announce(`${of.name} is open.`);
        } catch (error) {
          about.textContent = before;
          throw error;
        }
      });
    const file = h("input", {
      type: "file",
      test: "data-file",
      accept: source.formats.map((ending) => `.${ending}`).join(","),
      on: { change: () => void take(file.files) },
    });
    const folder = h("input", {
      type: "file",
      test: "data-folder",
      webkitdirectory: true,
      on: { change: () => void take(folder.files, source.folder!) },
    });
    const drop = h(
      "div",
      {
        class: "drop",
        test: "data-drop",
        on: {
          dragover: (event: DragEvent) => {
            event.preventDefault();
            drop.classList.add("over");
          },
          dragleave: () => drop.classList.remove("over"),
          drop: (event: DragEvent) => {
            event.preventDefault();
            drop.classList.remove("over");
            void take(event.dataTransfer?.files);
          },
        },
      },
      tables,
      opener(
        "File",
        "Open a file, or drop it here",
        file,
        `${source.formats.join(", ")}. ${STORED[given.backend ? given.host : "file"]}`,
      ),
      source.folder && opener("Database", "Open a folder", folder, "For example books.qkv."),
    );
    const element = h(
      "div",
      { class: "data" },
      drop,
      about,
      columns,
      h("div", { class: "query" }, labelled("Query", query)),
      trouble,
      answer,
    );
    at.append(element);
    void open(chosen);
    // In a notebook the focus stays in the cell.
    if (given.host !== "notebook") query.focus({ preventScroll: true });
    return () => {
      gone = true;
      clearTimeout(timer);
      element.remove();
    };
  },
};
