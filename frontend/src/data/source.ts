/** The tables of the view Your data: in Python if there is a backend, else in the page. */

import { type Key, type NameOrSettings, ask } from "../equation";
import { formatCount, formatOneLine } from "../numbers";
import type { Backend } from "../wire";
import { type Cell, type Table, parseTable } from "./csv";
import { createTar } from "./tar";

export interface TableInfo {
  name: string;
  rows: number;
  columns: string[];
  key: string[];
  value: string[];
  /** The kind of the keys, such as "text"; null if there is no row. */
  key_kind: string | null;
  version: number;
  /** Rows of a file that were skipped, and why; the first row is 1. */
  skipped?: { why: string; rows: number[] }[];
}
export interface AskRequest {
  query: string;
  score: string;
  weighting: string;
  where: string;
  at: number | null;
}
/** The selection of rows that are shown without a query. */
export type RowSelection = Pick<AskRequest, "where" | "at">;
export type Row = Record<string, unknown>;
export interface TableAnswer {
  value: unknown;
  rows: { key: unknown; value: unknown; weight: number }[];
  effective_rows: number;
  entropy: number;
  total: number;
  explained: string;
  /** How sure the answer is, in words; only from Python. */
  confidence_text?: string;
  /** Advice, such as another score; only from Python. */
  hint?: string;
}
export interface Version {
  number: number;
  time: string;
  what: string;
  rows: number;
}

/** Rows that an answer lists, and that are shown without a query. */
const ROW_LIMIT = 10;
/** Most rows that the page reads without Python; each may be a vector of a thousand numbers. */
const MAX_PAGE_ROWS = 5000;
const FORMATS = ["csv", "tsv", "jsonl", "parquet", "arrow"];

export interface Source {
  tables: TableInfo[];
  /** Whether conditions and versions are supported. */
  supportsConditions: boolean;
  formats: string[];
  askTable(table: TableInfo, request: AskRequest): Promise<TableAnswer>;
  /** The first rows with all their columns. */
  readRows(table: TableInfo, selection: RowSelection): Promise<Row[]>;
  /** The same rows with other key and value columns; without a value, all columns except the key. */
  selectColumns(table: TableInfo, key: string, value: string | null): Promise<TableInfo>;
  listVersions(table: TableInfo): Promise<Version[]>;
  uploadFile(file: File): Promise<TableInfo>;
  /** Opens the folder of a database; null without Python. */
  uploadFolder: ((files: File[]) => Promise<TableInfo>) | null;
}

/** A valid name of a database from the name of a file. */
function chooseName(file: string, isTaken: (name: string) => boolean): string {
  const stem = file.replace(/\.[^.]*$/, "").replace(/[^A-Za-z0-9_.-]+/g, "_").slice(0, 48);
  const name = /^[A-Za-z0-9_]/.test(stem) ? stem : `table${stem}`;
  return isTaken(name) ? `${name}-upload` : name;
}

function getFormat(file: File): string {
  const extension = file.name.split(".").at(-1)!.toLowerCase();
  if (!FORMATS.includes(extension)) {
    const advice = "save a spreadsheet as CSV, decompress archives, or use qkv import, which reads more formats";
    throw new Error(`${file.name}: the name must end in .${FORMATS.join(", .")}: ${advice}`);
  }
  return extension;
}

/** The file as text; an error if it is not UTF-8. */
async function readUtf8(file: File): Promise<string> {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not UTF-8 text: save it as CSV UTF-8`);
  }
}

/** Databases in Python, and files that are uploaded to it. */
export function createRemoteSource(backend: Backend, initialTables: TableInfo[]): Source {
  const uploadedNames = new Set<string>();
  const isTaken = (name: string) => source.tables.some((other) => other.name === name) && !uploadedNames.has(name);
  const addTable = (about: TableInfo) => {
    uploadedNames.add(about.name);
    source.tables = [...source.tables.filter((other) => other.name !== about.name), about];
    return about;
  };
  const source: Source = {
    tables: initialTables,
    supportsConditions: true,
    formats: FORMATS,
    askTable: (table, request) =>
      backend.call("ask", {
        ...request,
        database: table.name,
        top: ROW_LIMIT,
        score: request.score || null,
        where: request.where.trim() || null,
      }),
    readRows: (table, selection) => backend.call("rows", { ...selection, database: table.name, where: selection.where.trim() || null }),
    async selectColumns(table, key, value) {
      const name = uploadedNames.has(table.name) ? table.name : chooseName(`${table.name}-by-${key}`, () => false);
      const columns = { key: [key], ...(value === null ? {} : { value: [value] }) };
      return addTable(await backend.call("columns", { database: table.name, name, ...columns }));
    },
    listVersions: (table) => backend.call("versions", { database: table.name }),
    async uploadFile(file) {
      return addTable(await backend.upload({ name: chooseName(file.name, isTaken), format: getFormat(file) }, file));
    },
    async uploadFolder(files) {
      const [folder] = files[0].webkitRelativePath.split("/");
      if (!files.some((file) => file.name === "catalogue.sqlite")) throw new Error(`${folder} is not the folder of a database: choose a folder such as books.qkv`);
      const parts = files.filter((file) => !file.name.endsWith("-shm"));
      return addTable(await backend.upload({ name: chooseName(folder, isTaken), format: "qkv" }, createTar(parts)));
    },
  };
  return source;
}

/** Files that are read in the page, without Python. */
export function createLocalSource(): Source {
  const tables = new Map<string, Table>();
  /** The description of the rows that have a key, as in Python. */
  const describeTable = (about: Omit<TableInfo, "key_kind">): TableInfo => {
    const { rows } = tables.get(about.name)!;
    const rowsWithoutKey = rows.flatMap((row, i) => (row[about.key[0]] === null ? [i + 1] : []));
    const verb = rowsWithoutKey.length === 1 ? "has" : "have";
    const reason = `${rowsWithoutKey.length} of ${formatCount(rows.length, "row")} ${verb} no key (column ${about.key[0]}): skipped`;
    const key_kind = rows.some((row) => typeof row[about.key[0]] === "string") ? "text" : "number";
    return { ...about, key_kind, rows: rows.length - rowsWithoutKey.length, skipped: rowsWithoutKey.length ? [{ why: reason, rows: rowsWithoutKey }] : [] };
  };
  const source: Source = {
    tables: [],
    supportsConditions: false,
    formats: ["csv", "tsv"],
    async askTable(table, request) {
      const { rows } = tables.get(table.name)!;
      const pickValue = (row: Record<string, Cell>) =>
        table.value.length === 1 ? row[table.value[0]] : Object.fromEntries(table.value.map((name) => [name, row[name]]));
      const pairs = rows
        .filter((row) => row[table.key[0]] !== null)
        .map((row) => ({ key: row[table.key[0]] as Key, value: pickValue(row) }));
      const hasNumbers = table.value.length > 1 && table.value.every((name) => rows.every((row) => row[name] === null || typeof row[name] === "number"));
      const options = { score: parseSpec(request.score), weighting: parseSpec(request.weighting) ?? "softmax", top: ROW_LIMIT, columns: hasNumbers ? table.value : null };
      const answer = ask(pairs, request.query, options);
      const [first] = answer.rows;
      const shareText = first && `${formatOneLine(first.key)} has ${(100 * first.weight).toPrecision(3)} % of the weight. `;
      return {
        ...answer,
        value: answer.shown,
        effective_rows: answer.effective,
        explained: `${shareText ? `Of ${formatCount(answer.total, "row")}, ${shareText}` : ""}Computed in this page, by letters and numbers.`,
      };
    },
    readRows: async (table) => tables.get(table.name)!.rows.slice(0, ROW_LIMIT),
    async selectColumns(table, key, value) {
      const about = describeTable({ ...table, key: [key], value: value === null ? table.columns.filter((name) => name !== key) : [value] });
      source.tables = source.tables.map((other) => (other.name === table.name ? about : other));
      return about;
    },
    listVersions: async () => [],
    uploadFolder: null,
    async uploadFile(file) {
      if (!["csv", "tsv"].includes(getFormat(file))) throw new Error(`${file.name}: without Python the page reads only .csv and .tsv; use qkv serve for other formats`);
      const table = parseTable(await readUtf8(file));
      if (table.rows.length > MAX_PAGE_ROWS) throw new Error(`${file.name} has ${table.rows.length} rows; without Python the page reads at most ${MAX_PAGE_ROWS}`);
      const name = chooseName(file.name, () => false);
      const textColumn = table.columns.find((column) => table.rows.some((row) => typeof row[column] === "string"));
      const key = textColumn ?? table.columns[0];
      tables.set(name, table);
      const value = table.columns.filter((column) => column !== key);
      const about = describeTable({ name, rows: table.rows.length, columns: table.columns, key: [key], value, version: 1 });
      source.tables = [...source.tables.filter((other) => other.name !== name), about];
      return about;
    },
  };
  return source;
}

/** The settings of a text such as `topk:3`. */
function parseSpec(text: string): NameOrSettings | null {
  if (!text) return null;
  const [name, number] = text.split(":");
  return number ? { name, k: Number(number) } : name;
}
