/** A table in a file that a browser reads itself: comma-, semicolon- or tab-separated text. */

export interface Table {
  columns: string[];
  rows: Record<string, Cell>[];
}
export type Cell = string | number | null;

/** What a missing cell is called in the tables of others, as Python reads them. */
const MISSING = new Set(
  "#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|null|".split("|"),
);
/** "007" and "+1" are text, and with them their column. */
const NUMBER = /^-?(0|[1-9]\d{0,14})(\.\d{1,16})?([eE][+-]?\d{1,3})?$/;

/** The cells of a text, line by line; a cell in quotes may hold anything, "" for a quote. */
function cells(text: string, mark: string): string[][] {
  const lines: string[][] = [];
  let line: string[] = [];
  let at = 0;
  while (at <= text.length) {
    let cell = "";
    if (text[at] === '"') {
      for (;;) {
        const end = text.indexOf('"', at + 1);
        if (end < 0) throw new Error(`line ${lines.length + 1}: a quote is never closed`);
        cell += text.slice(at + 1, end);
        at = end + 1;
        if (text[at] !== '"') break;
        cell += '"';
      }
    }
    const start = at;
    while (at < text.length && text[at] !== mark && text[at] !== "\n" && text[at] !== "\r") at += 1;
    line.push(cell + text.slice(start, at));
    if (text[at] === mark) {
      at += 1;
      continue;
    }
    if (text[at] === "\r" && text[at + 1] === "\n") at += 1;
    at += 1;
    if (line.length > 1 || line[0] !== "") lines.push(line);
    line = [];
  }
  return lines;
}

function column(texts: string[]): Cell[] {
  const bare = texts.map((text) => text.trim());
  const present = bare.filter((text) => !MISSING.has(text));
  const numbers = present.length > 0 && present.every((text) => NUMBER.test(text));
  return bare.map((text, i) => (MISSING.has(text) ? null : numbers ? Number(text) : texts[i]));
}

/** The table of a text whose first line names the columns. */
export function parse(text: string): Table {
  const whole = text.replace(/^\ufeff/, "");
  const first = whole.slice(0, whole.search(/[\r\n]|$/));
  const count = (mark: string) => first.split(mark).length;
  const mark = [",", "\t", ";"].reduce((best, next) => (count(next) > count(best) ? next : best));
  const [columns, ...lines] = cells(whole, mark);
  if (!columns?.length || !lines.length) throw new Error("the file has no rows below its first line");
  if (columns.length < 2) throw new Error("the file has one column: a key and a value are two");
  if (new Set(columns).size < columns.length) throw new Error("two columns have the same name");
  const odd = lines.findIndex((line) => line.length !== columns.length);
  if (odd >= 0) throw new Error(`row ${odd + 1} has ${lines[odd].length} cells, the first line ${columns.length}`);
  const read = columns.map((_, i) => column(lines.map((line) => line[i])));
  const rows = lines.map((_, i) => Object.fromEntries(columns.map((name, j) => [name, read[j][i]])));
  return { columns, rows };
}
