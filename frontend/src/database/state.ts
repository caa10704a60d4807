/** The table, the query and the choices, and what the equation makes of them. No element is touched here. */

import { type Answer, type Encoder, type Key, type Like, type Vector, ask, encoders } from "../equation";
import { type Backend, isTensor } from "../wire";
import type { Cell, Example } from "./examples";

/** A cell as it was given, until somebody types into it. */
export interface Field {
  text: string;
  given: unknown;
}
export interface Line {
  key: Field;
  value: Field;
}

export interface Outcome {
  soft: Answer;
  hard: Answer;
  /** The rows that took part, as places in `lines`. */
  used: number[];
  encoder: string;
  /** Whether the numbers are Python's own, of more rows than are here. */
  asked: boolean;
}

interface Vectors {
  keys: Vector[];
  query: Vector;
  score: Like;
}

/** Encoders that need Python, as a reader knows them. */
export const PYTHON = ["text", "words", "sentences"];

/** A text as a field of one line shows it, and what somebody typed there as the text it stands for. */
export const inOneLine = (text: string) => text.replace(/\r\n|\r|\n/g, "⏎");
export const typed = (text: string) => text.replaceAll("⏎", "\n");

/** A score or weighting as Python reads it: `gaussian:0.5`. */
function written(like: Like): string {
  if (typeof like === "string") return like;
  const number = Object.values(like).find((x) => typeof x === "number");
  return number === undefined ? like.name : `${like.name}:${number}`;
}

export function spell(x: unknown): string {
  if (x === null || x === undefined) return "";
  if (typeof x === "string") return x;
  if (isTensor(x)) return JSON.stringify(Array.from(x.data, (y) => Number(y.toPrecision(6))));
  return typeof x === "object" ? JSON.stringify(x) : String(x);
}

const field = (given: unknown): Field => ({ text: spell(given), given });
const plain = (x: unknown) => (isTensor(x) ? Array.from(x.data as Float64Array) : x);

/** A number as it is typed; null for what is none. */
function parsed(text: string): number | null {
  const x = Number(text.replace("−", "-"));
  return text.trim() !== "" && Number.isFinite(x) ? x : null;
}

const isVector = (x: unknown): x is number[] => Array.isArray(x) && x.length > 0 && x.every((y) => typeof y === "number");

/** A vector as it is typed: numbers with commas between, in brackets or not. */
function listed(text: string): Vector {
  const parts = text.replace(/^\s*\[|\]\s*$/g, "").split(",").map(parsed);
  if (parts.every((x) => x !== null)) return parts as number[];
  throw new TypeError("the keys are vectors: type the query as numbers with commas between");
}

/** The encoder that runs here in the place of one that does not. */
function instead(keys: Key[]): string {
  const vectors = keys.every(isVector);
  return keys.some((key) => typeof key === "object") && !vectors ? "characters" : encoders.suits(keys);
}

/** A column of cells: numbers where all are, else as they were given or typed. */
function column(fields: Field[], inferred: boolean): unknown[] {
  const typed = fields.map((f) => (spell(f.given) === f.text ? plain(f.given) : f.text));
  const texts = fields.filter((f) => f.text.trim() !== "");
  const numbers = texts.map((f) => parsed(f.text));
  const given = typed.some((x) => typeof x === "number");
  if ((inferred || given) && texts.length && numbers.every((x) => x !== null)) {
    return fields.map((f) => parsed(f.text));
  }
  return typed;
}

export class State {
  lines: Line[] = [];
  query: Field = field("");
  names = { key: "key", value: "value" };
  note = "";
  encoder = "characters";
  score: Like | null = null;
  weighting: Like = "softmax";
  /** Vectors of Python's encoder by the key's text, and of queries; one encoder at a time. */
  private keys = new Map<string, Vector>();
  private queries = new Map<string, Vector>();
  private own: Like | null = null;
  private of = "";
  private inferred = true;
  private data: any = null;
  /** Whether rows were changed by hand; and how often anything was since it was opened, or since Python answered. */
  edited = false;
  private touched = 0;
  private made: { mark: string; encoder: Encoder; keys: Vector[] } | null = null;

  constructor(readonly backend: Backend | null) {}

  /** Rows that Python answered from, of which only the heaviest are here. */
  get others(): number {
    return Math.max((this.data?.answer?.total ?? 0) - (this.data?.rows?.length ?? 0), 0);
  }

  /** Rows that Python left out, since their value is missing; they are not here. */
  get leftOut(): number {
    return this.data?.answer?.missing ?? 0;
  }

  /** What Python scored and weighed by, where that has no name here. */
  get foreign(): string | null {
    const told = this.data?.answer;
    return told && this.data.told === false ? `${told.score} and ${told.weighting}` : null;
  }

  /** Python's encoder of the data, whose vectors came with them. */
  get given(): string | null {
    return this.data?.vectors?.encoder ?? null;
  }

  example(of: Example): void {
    this.reset();
    this.lines = of.rows.map(([key, value]) => ({ key: field(key), value: field(value) }));
    this.query = field(of.query);
    this.names = { key: of.key, value: of.value };
    this.note = of.note;
    this.encoder = encoders.suits(this.table().map((row) => row.key));
  }

  /** What a descriptor holds. */
  open(data: any): void {
    this.reset();
    this.data = data;
    this.inferred = false;
    this.lines = (data.rows ?? []).map((row: any) => ({ key: field(row.key), value: field(row.value) }));
    this.query = field(data.query ?? "");
    this.names = { ...this.names, ...data.names };
    this.score = data.score ?? null;
    this.weighting = data.weighting ?? "softmax";
    if (data.temperature) this.weighting = { name: "softmax", temperature: data.temperature };
    this.encoder = data.encoder ?? this.given ?? encoders.suits(this.table().map((row) => row.key));
    const found = data.vectors;
    if (found) this.learn(found.encoder, this.lines, this.query.text, found);
  }

  private reset(): void {
    Object.assign(this, { data: null, score: null, weighting: "softmax", touched: 0, edited: false, inferred: true });
    Object.assign(this, { own: null, of: "", note: "", names: { key: "key", value: "value" } });
    this.keys.clear();
    this.queries.clear();
  }

  private learn(encoder: string, lines: Line[], query: string, found: any): void {
    // Vectors have a column for each word of these keys: those of others cannot be compared with them.
    const others = lines.length !== this.keys.size || lines.some((line) => !this.keys.has(line.key.text));
    if (this.of !== encoder || (found.keys && others)) {
      this.keys.clear();
      this.queries.clear();
    }
    this.of = encoder;
    this.own = found.score ?? null;
    const cut = (tensor: any, i: number): Vector => {
      const width = tensor.shape.at(-1);
      return tensor.data.subarray(i * width, (i + 1) * width);
    };
    if (found.keys) lines.forEach((line, i) => this.keys.set(line.key.text, cut(found.keys, i)));
    if (found.query) this.queries.set(query, cut(found.query, 0));
  }

  /** Says that something was changed; where rows were, the numbers are of these rows from here on. */
  touch(rows: boolean): void {
    this.touched += 1;
    this.edited ||= rows;
  }

  /** What puts the rows back as they are now. */
  mark(): () => void {
    const { edited } = this;
    const lines = this.lines.map(({ key, value }) => ({ key: { ...key }, value: { ...value } }));
    return () => Object.assign(this, { lines, edited });
  }

  /** Whether Python has rows that are not here, and can be asked for all of them. */
  private get whole(): boolean {
    const { data } = this;
    return this.backend !== null && data?.database !== undefined && this.others > 0 && !this.edited && this.encoder === data.encoder;
  }

  /** Whether what is shown is not the answer to what is asked now, until Python has found that. */
  get stale(): boolean {
    return this.whole && this.touched > 0;
  }

  swap(): void {
    for (const line of this.lines) [line.key, line.value] = [line.value, line.key];
    this.names = { key: this.names.value, value: this.names.key };
    const first = this.lines[0]?.key;
    if (first) this.query = { ...first };
    const keys = this.table().map((row) => row.key);
    if (!PYTHON.includes(this.encoder)) this.encoder = encoders.suits(keys);
    this.score = null;
    this.touch(true);
  }

  /** The rows that have a key, with the place of each. */
  table(): { key: Key; value: unknown; place: number }[] {
    const keys = column(this.lines.map((line) => line.key), this.inferred);
    const values = column(this.lines.map((line) => line.value), this.inferred);
    return this.lines
      .map((line, i) => ({
        key: keys[i] as Key,
        value: line.value.text === "" ? null : values[i],
        place: i,
      }))
      .filter((_, i) => this.lines[i].key.text !== "");
  }

  /** The query as the keys are: a number among numbers. */
  private asks(rows: { key: Key }[]): Key {
    const given = spell(this.query.given) === this.query.text ? plain(this.query.given) : this.query.text;
    const numbers = rows.length > 0 && rows.every((row) => typeof row.key === "number");
    if (numbers) return (parsed(this.query.text) ?? given) as Key;
    const vectors = rows.length > 0 && rows.every((row) => isVector(row.key));
    return (vectors && typeof given === "string" ? listed(given) : given) as Key;
  }

  /** Whether Python's vectors of the chosen encoder are all there. */
  private get known(): boolean {
    if (this.of !== this.encoder || !this.queries.has(this.query.text)) return false;
    return this.lines.every((line) => line.key.text === "" || this.keys.has(line.key.text));
  }

  /** Whether the chosen encoder runs here, just as it does in Python. */
  private get here(): boolean {
    return encoders.can(this.encoder) && (this.encoder !== this.given || this.data.vectors.twin);
  }

  /** Whether Python must be asked: for an answer, or for vectors. */
  get wants(): boolean {
    return this.stale || (!this.known && !this.here);
  }

  /** Asks it; true where other rows came. */
  async fetch(): Promise<boolean> {
    if (!this.stale) {
      await this.encode();
      return false;
    }
    const { touched, data } = this;
    const found = await this.backend!.call("answer", {
      database: data.database,
      query: this.query.text,
      score: this.score && written(this.score),
      weighting: written(this.weighting),
    });
    if (touched !== this.touched || data !== this.data) return false;
    this.data = { ...found, database: data.database };
    this.touched = 0;
    this.lines = found.rows.map((row: any) => ({ key: field(row.key), value: field(row.value) }));
    if (found.vectors) this.learn(found.vectors.encoder, this.lines, this.query.text, found.vectors);
    return true;
  }

  private async encode(): Promise<void> {
    const lines = this.lines.filter((line) => line.key.text !== "");
    const rows = this.table();
    const { encoder } = this;
    const query = this.query.text;
    const found = await this.backend!.call("encode", {
      encoder,
      database: encoder === this.given ? (this.data.database ?? null) : null,
      keys: rows.map((row) => row.key),
      query: this.asks(rows),
    });
    this.learn(encoder, lines, query, found);
  }

  /** Scores → weights → value, soft and hard; an error where that means nothing. */
  outcome(): Outcome {
    const rows = this.table();
    const query = this.asks(rows);
    const used = rows.map((row) => row.place);
    let encoder = this.encoder;
    let vectors: Vectors | undefined;
    if (this.known) {
      const keys = used.map((i) => this.keys.get(this.lines[i].key.text)!);
      vectors = { keys, query: this.queries.get(this.query.text)!, score: this.own ?? "scaled_dot" };
    } else if (rows.length) {
      const keys = rows.map((row) => row.key);
      if (!this.here) encoder = instead(keys);
      vectors = this.encoded(encoder, keys, query);
    }
    const how = { vectors, score: this.score, top: rows.length, columns: this.data?.columns };
    const soft = ask(rows, query, { ...how, weighting: this.weighting });
    const hard = ask(rows, query, { ...how, weighting: "hard" });
    const asked = this.touched === 0 && (this.others > 0 || this.foreign !== null);
    if (asked) this.python(soft, hard, used);
    return { soft, hard, used, encoder, asked };
  }

  /** What an encoder that runs here makes of them; the keys' vectors are kept while they stay. */
  private encoded(name: string, keys: Key[], query: Key): Vectors {
    const mark = JSON.stringify([name, keys]);
    if (this.made?.mark !== mark) {
      const encoder = encoders.fit(name, keys);
      this.made = { mark, encoder, keys: encoder.encode(keys) };
    }
    const { encoder, keys: found } = this.made;
    const own = this.own && name === this.of ? this.own : encoder.score(keys.length);
    return { keys: found, query: encoder.query([query])[0], score: own };
  }

  /** The numbers that Python found among all its rows, in the place of ours. */
  private python(soft: Answer, hard: Answer, used: number[]): void {
    const { answer: told, best } = this.data;
    soft.weights = Float64Array.from(used, (i) => told.weights.data[i]);
    for (const row of soft.rows) row.weight = soft.weights[row.index];
    Object.assign(soft, { pooled: plain(told.value), entropy: told.entropy, effective: told.effective_rows });
    Object.assign(soft, { total: told.total, missing: told.missing, spread: told.spread ?? null });
    soft.values = told.values ?? [];
    Object.assign(hard, { total: told.total, missing: told.missing });
    if (!best) return;
    hard.weights = Float64Array.from(used, (i) => Number(i === best.at));
    hard.pooled = plain(best.value);
    if (hard.values.length) hard.values = [{ value: best.value, weight: 1 }];
    // A row that is not here cannot be told from others that tie with it.
    if (best.at === null) hard.rows = [];
  }
}

export type { Cell };
