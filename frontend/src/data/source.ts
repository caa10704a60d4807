/** The tables of the view Your data: in Python if there is a backend, else in the page. */

import { type Key, type Like, ask } from "../equation";
import { counted, short } from "../numbers";
import type { Backend } from "../wire";
import { type Cell, type Table, parse } from "./csv";
import { tar } from "./tar";

export interface About {
  name: string;
  rows: number;
  columns: string[];
  key: string[];
  value: string[];
  version: number;
  /** Rows of a file that were skipped, and why; the first row is 1. */
  skipped?: { why: string; rows: number[] }[];
}
export interface Asked {
  query: string;
  score: string;
  weighting: string;
  where: string;
  at: number | null;
}
/** The selection of rows that are shown without a query. */
export type Look = Pick<Asked, "where" | "at">;
export type Row = Record<string, unknown>;
export interface Found {
  value: unknown;
  rows: { key: unknown; value: unknown; weight: number }[];
  effective_rows: number;
  entropy: number;
  total: number;
  explained: string;
}
export interface Version {
  number: number;
  time: string;
  what: string;
  rows: number;
}

/** Rows that an answer lists, and that are shown without a query. */
const TOP = 10;
/** Most rows that the page reads without Python; each may be a vector of a thousand numbers. */
const MOST = 5000;
const FORMATS = ["csv", "tsv", "jsonl", "parquet", "arrow"];

export interface Source {
  about: About[];
  /** Whether conditions and versions are supported. */
  whole: boolean;
  formats: string[];
  ask(of: About, asked: Asked): Promise<Found>;
  /** The first rows with all their columns. */
  rows(of: About, look: Look): Promise<Row[]>;
  /** The same rows with other key and value columns; without a value, all columns except the key. */
  by(of: About, key: string, value: string | null): Promise<About>;
  versions(of: About): Promise<Version[]>;
  upload(file: File): Promise<About>;
  /** Opens the folder of a database; null without Python. */
  folder: ((files: File[]) => Promise<About>) | null;
}

/** A valid name of a database from the name of a file. */
function named(file: string, taken: (name: string) => boolean): string {
  const plain = file.replace(/\.[^.]*$/, "").replace(/[^A-Za-z0-9_.-]+/g, "_").slice(0, 48);
  const name = /^[A-Za-z0-9_]/.test(plain) ? plain : `table${plain}`;
  return taken(name) ? `${name}-upload` : name;
}

function format(file: File): string {
  const ending = file.name.split(".").at(-1)!.toLowerCase();
  if (!FORMATS.includes(ending)) {
    const step = "save a spreadsheet as CSV, decompress archives, or use qkv import, which reads more formats";
    throw new Error(`${file.name}: the name must end in .${FORMATS.join(", .")}: ${step}`);
  }
  return ending;
}

/** The file as text; an error if it is not UTF-8. */
async function utf8(file: File): Promise<string> {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not UTF-8 text: save it as CSV UTF-8`);
  }
}

/** Databases in Python, and files that are uploaded to it. */
export function remote(backend: Backend, given: About[]): Source {
  const own = new Set<string>();
  const taken = (name: string) => source.about.some((one) => one.name === name) && !own.has(name);
  const keep = (about: About) => {
    own.add(about.name);
    source.about = [...source.about.filter((one) => one.name !== about.name), about];
    return about;
  };
  const source: Source = {
    about: given,
    whole: true,
    formats: FORMATS,
    ask: (of, asked) =>
      backend.call("ask", {
        ...asked,
        database: of.name,
        top: TOP,
        score: asked.score || null,
        where: asked.where.trim() || null,
      }),
    rows: (of, look) => backend.call("rows", { ...look, database: of.name, where: look.where.trim() || null }),
    async by(of, key, value) {
      const name = own.has(of.name) ? of.name : named(`${of.name}-by-${key}`, () => false);
      const columns = { key: [key], ...(value === null ? {} : { value: [value] }) };
      return keep(await backend.call("columns", { database: of.name, name, ...columns }));
    },
    versions: (of) => backend.call("versions", { database: of.name }),
    async upload(file) {
      return keep(await backend.upload({ name: named(file.name, taken), format: format(file) }, file));
    },
    async folder(files) {
      const [folder] = files[0].webkitRelativePath.split("/");
      if (!files.some((file) => file.name === "catalogue.sqlite")) throw new Error(`${folder} is not the folder of a database: choose a folder such as books.qkv`);
      const parts = files.filter((file) => !file.name.endsWith("-shm"));
      return keep(await backend.upload({ name: named(folder, taken), format: "qkv" }, tar(parts)));
    },
  };
  return source;
}

/** Files that are read in the page, without Python. */
export function local(): Source {
  const tables = new Map<string, Table>();
  /** The description without the rows that have no key, as in Python. */
  const known = (about: About): About => {
    const { rows } = tables.get(about.name)!;
    const none = rows.flatMap((row, i) => (row[about.key[0]] === null ? [i + 1] : []));
    const has = none.length === 1 ? "has" : "have";
    const why = `${none.length} of ${counted(rows.length, "row")} ${has} no key (column ${about.key[0]}): skipped`;
    return { ...about, rows: rows.length - none.length, skipped: none.length ? [{ why, rows: none }] : [] };
  };
  const source: Source = {
    about: [],
    whole: false,
    formats: ["csv", "tsv"],
    async ask(of, asked) {
      const { rows } = tables.get(of.name)!;
      const pick = (row: Record<string, Cell>) =>
        of.value.length === 1 ? row[of.value[0]] : Object.fromEntries(of.value.map((name) => [name, row[name]]));
      const pairs = rows
        .filter((row) => row[of.key[0]] !== null)
        .map((row) => ({ key: row[of.key[0]] as Key, value: pick(row) }));
      const pools = of.value.length > 1 && of.value.every((name) => rows.every((row) => row[name] === null || typeof row[name] === "number"));
      const how = { score: like(asked.score), weighting: like(asked.weighting) ?? "softmax", top: TOP, columns: pools ? of.value : null };
      const found = ask(pairs, asked.query, how);
      const [first] = found.rows;
      const share = first && `${short(first.key)} has ${(100 * first.weight).toPrecision(3)} % of the weight. `;
      return {
        ...found,
        value: found.pooled,
        effective_rows: found.effective,
        explained: `${share ? `Of ${counted(found.total, "row")}, ${share}` : ""}Computed in this page, by letters and numbers.`,
      };
    },
    rows: async (of) => tables.get(of.name)!.rows.slice(0, TOP),
    async by(of, key, value) {
      const about = known({ ...of, key: [key], value: value === null ? of.columns.filter((name) => name !== key) : [value] });
      source.about = source.about.map((one) => (one.name === of.name ? about : one));
      return about;
    },
    versions: async () => [],
    folder: null,
    async upload(file) {
      if (!["csv", "tsv"].includes(format(file))) throw new Error(`${file.name}: without Python the page reads only .csv and .tsv; use qkv serve for other formats`);
      const table = parse(await utf8(file));
      if (table.rows.length > MOST) throw new Error(`${file.name} has ${table.rows.length} rows; without Python the page reads at most ${MOST}`);
      const name = named(file.name, () => false);
      const text = table.columns.find((column) => table.rows.some((row) => typeof row[column] === "string"));
      const key = text ?? table.columns[0];
      tables.set(name, table);
      const value = table.columns.filter((column) => column !== key);
      const about = known({ name, rows: table.rows.length, columns: table.columns, key: [key], value, version: 1 });
      source.about = [...source.about.filter((one) => one.name !== name), about];
      return about;
    },
  };
  return source;
}

/** The settings of a text such as `topk:3`. */
function like(text: string): Like | null {
  if (!text) return null;
  const [name, number] = text.split(":");
  return number ? { name, k: Number(number) } : name;
}
