/** Parses text files with columns separated by commas, semicolons, tabs or bars. */

export interface Table {
  columns: string[];
  rows: Record<string, Cell>[];
}
export type Cell = string | number | null;

/** Texts that mean a missing value, as in Python. */
const MISSING = new Set(
  "#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|null|".split("|"),
);
/** "007" and "+1" are text; a column with such a cell is a column of text. */
const NUMBER = /^-?(0|[1-9]\d{0,14}|(?=\.))(\.\d{1,16})?([eE][+-]?\d{1,3})?$/;
/** Numbers with a decimal comma, with or without points between thousands; and such whole numbers. */
const COMMA = /^-?(0|[1-9]\d*|[1-9]\d{0,2}(\.\d{3})+)(,\d+([eE][+-]?\d{1,3})?)?$/;
/** Numbers with a decimal point, with or without commas between thousands. */
const GROUPED = /^-?(0|[1-9]\d*|[1-9]\d{0,2}(,\d{3})+)(\.\d+)?$/;
const THOUSANDS = /^-?[1-9]\d{0,2},\d{3}$/;
/** A number with one or two digits after its comma, which cannot separate thousands. */
const PRICE = /^(([€$£¥%]|[A-Z]{3})\s*-?\d[\d.]*,\d\d?|-?\d[\d.]*,\d\d?\s*([€$£¥%]|[A-Z]{3}))$/;
const DELIMITERS = [",", ";", "\t", "|"];

/** The cells of a text by lines. A quoted cell may contain anything; "" is a quote. */
function parseCells(text: string, delimiter: string): string[][] {
  const lines: string[][] = [];
  let line: string[] = [];
  let at = 0;
  while (at <= text.length) {
    let cell = "";
    if (text[at] === '"') {
      for (;;) {
        const end = text.indexOf('"', at + 1);
        if (end < 0) throw new Error(`line ${lines.length + 1}: a quote is not closed`);
        cell += text.slice(at + 1, end);
        at = end + 1;
        if (text[at] !== '"') break;
        cell += '"';
      }
    }
    const start = at;
    while (at < text.length && text[at] !== delimiter && text[at] !== "\n" && text[at] !== "\r") at += 1;
    line.push(cell + text.slice(start, at));
    if (text[at] === delimiter) {
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

/** The delimiter for which most lines have the same number of cells as the first, and the cells. */
function detectDelimiter(text: string): { delimiter: string; lines: string[][] } {
  const candidates = DELIMITERS.flatMap((delimiter) => {
    try {
      const lines = parseCells(text, delimiter);
      const width = lines[0]?.length ?? 0;
      const sameWidthShare = lines.filter((line) => line.length === width).length / Math.max(lines.length, 1);
      return [{ delimiter, lines, fits: [Number(width > 1), sameWidthShare, width] }];
    } catch {
      return []; // with this delimiter a quote is not closed
    }
  });
  if (!candidates.length) parseCells(text, ",");
  const compareFits = (a: number[], b: number[]) => a.map((x, i) => x - b[i]).find((x) => x !== 0) ?? 0;
  return candidates.reduce((best, next) => (compareFits(next.fits, best.fits) > 0 ? next : best));
}

/** Columns with numbers normalized: a decimal point, and nothing between thousands. With semicolons as delimiters a
 * comma is the decimal point; otherwise it separates thousands if one cell of the table proves it. */
function normalizeNumbers(columns: string[][], delimiter: string): string[][] {
  const hasDecimalComma = delimiter === ";";
  const present = columns.map((texts) => texts.map((text) => text.trim()).filter((text) => !MISSING.has(text)));
  const fits = present.map((texts) => texts.every((text) => (hasDecimalComma ? COMMA : GROUPED).test(text)));
  const commas = present.filter((_, i) => fits[i]).flat().filter((text) => text.includes(","));
  const isProven = commas.some((text) => (hasDecimalComma ? !THOUSANDS.test(text) : text.includes(".")));
  if (!isProven && !(hasDecimalComma && present.flat().some((text) => PRICE.test(text)))) return columns;
  const toPlain = (text: string) => (hasDecimalComma ? text.replaceAll(".", "").replace(",", ".") : text.replaceAll(",", ""));
  return columns.map((texts, i) => (fits[i] ? texts.map((text) => (MISSING.has(text.trim()) ? text : toPlain(text))) : texts));
}

function convertColumn(texts: string[]): Cell[] {
  const trimmed = texts.map((text) => text.trim());
  const present = trimmed.filter((text) => !MISSING.has(text));
  const numbers = present.length > 0 && present.every((text) => NUMBER.test(text));
  return trimmed.map((text, i) => (MISSING.has(text) ? null : numbers ? Number(text) : texts[i]));
}

/** Parses a text whose first line has the names of the columns. */
export function parseTable(text: string): Table {
  const { delimiter, lines: allLines } = detectDelimiter(text.replace(/^\ufeff/, ""));
  const [columns, ...lines] = allLines;
  if (!columns?.length || !lines.length) throw new Error("the file has no rows after its header line");
  if (columns.length < 2) throw new Error("the file has only one column; a key and a value need two");
  if (new Set(columns).size < columns.length) throw new Error("two columns have the same name");
  const odd = lines.findIndex((line) => line.length !== columns.length);
  if (odd >= 0) throw new Error(`row ${odd + 1} has ${lines[odd].length} cells, and the header line has ${columns.length}`);
  const converted = normalizeNumbers(columns.map((_, i) => lines.map((line) => line[i])), delimiter).map(convertColumn);
  const rows = lines.map((_, i) => Object.fromEntries(columns.map((name, j) => [name, converted[j][i]])));
  return { columns, rows };
}
