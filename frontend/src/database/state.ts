/** The state of the view Database: rows, query, choices, and the answer computed from them. It has no DOM code. */

import {
  type Answer,
  type Computed,
  type Encoder,
  type Key,
  type Like,
  SCORES,
  type Vector,
  WEIGHTINGS,
  ask,
  encoders,
  liveRows,
} from "../equation";
import { pythonOnly } from "../registered";
import { type Backend, isTensor } from "../wire";
import type { Cell, Example } from "./examples";

/** A cell: the text in its field, and the value from the data, which is used until the text changes. */
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
  /** The rows that have a key, as positions in `lines`. */
  used: number[];
  encoder: string;
  /** Whether Python computed the numbers. */
  asked: boolean;
}

interface Vectors {
  keys: Vector[];
  query: Vector;
  score: Like;
}

/** Encoders that need Python. */
export const PYTHON = ["text", "words", "sentences"];

/** Text for a field of one line, with ⏎ for line breaks, and the inverse. */
export const inOneLine = (text: string) => text.replace(/\r\n|\r|\n/g, "⏎");
export const typed = (text: string) => text.replaceAll("⏎", "\n");

const nameOf = (like: Like) => (typeof like === "string" ? like : like.name);

export function spell(x: unknown): string {
  if (x === null || x === undefined) return "";
  if (typeof x === "string") return x;
  if (isTensor(x)) return JSON.stringify(Array.from(x.data, (y) => Number(y.toPrecision(6))));
  return typeof x === "object" ? JSON.stringify(x) : String(x);
}

const field = (given: unknown): Field => ({ text: spell(given), given });
const plain = (x: unknown) => (isTensor(x) ? Array.from(x.data as Float64Array) : x);

/** The number that a text is; null for other text. */
function parsed(text: string): number | null {
  const x = Number(text.replace("−", "-"));
  return text.trim() !== "" && Number.isFinite(x) ? x : null;
}

const isVector = (x: unknown): x is number[] => Array.isArray(x) && x.length > 0 && x.every((y) => typeof y === "number");

/** The vector that a text is: numbers separated by commas, with or without brackets. */
function listed(text: string): Vector {
  const parts = text.replace(/^\s*\[|\]\s*$/g, "").split(",").map(parsed);
  if (parts.every((x) => x !== null)) return parts as number[];
  throw new TypeError("The keys are vectors: type the query as numbers separated by commas.");
}

/** The encoder that the page uses instead of one that needs Python. */
function instead(keys: Key[]): string {
  const vectors = keys.every(isVector);
  return keys.some((key) => typeof key === "object") && !vectors ? "characters" : encoders.suits(keys);
}

/** The cells of a column: numbers if all of them are, else the values or the typed texts. */
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
  /** Whether the user changed rows; and the number of changes since the data came from Python. */
  edited = false;
  private touched = 0;
  /** Python's last result for a score or weighting that is not known here, and what it was computed from. */
  private computed: { mark: string; result: Computed } | null = null;
  private made: { mark: string; encoder: Encoder; keys: Vector[] } | null = null;

  /** `defaults` are the data of the view, from which an example takes the registered names. */
  constructor(
    readonly backend: Backend | null,
    private readonly defaults: any = null,
  ) {}

  /** The number of rows that Python has and the page has not. */
  get others(): number {
    return Math.max((this.data?.answer?.total ?? 0) - (this.data?.rows?.length ?? 0), 0);
  }

  /** The number of rows that Python ignored because their value is missing. */
  get leftOut(): number {
    return this.data?.answer?.missing ?? 0;
  }

  /** The score and weighting of Python's answer, if they have no name and the page cannot compute them. */
  get foreign(): string | null {
    const answer = this.data?.answer;
    return answer && this.data.is_named === false ? `${answer.score} and ${answer.weighting}` : null;
  }

  /** The names of the chosen score and weighting that have no formula in TypeScript, in words. */
  get pythonOnly(): string[] {
    const score = this.score ?? (this.of === this.encoder ? this.own : null);
    const names: string[] = [];
    if (score && !Object.hasOwn(SCORES, nameOf(score))) names.push(`score “${nameOf(score)}”`);
    if (!Object.hasOwn(WEIGHTINGS, nameOf(this.weighting))) names.push(`weighting “${nameOf(this.weighting)}”`);
    return names;
  }

  /** Scores and weightings that are registered in Python and not known here, by name: their titles. */
  registered(kind: "scores" | "weightings"): [string, string][] {
    return pythonOnly({ backend: this.backend, data: this.data ?? this.defaults }, kind);
  }

  /** Python's encoder of the data, if its vectors came with them. */
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

  /** Loads the data of a view descriptor. */
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
    // Vectors have a column for each word of these keys, so vectors of other keys cannot be compared with them.
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

  /** Records a change; after a change of `rows` the answer is computed from the rows in the page. */
  touch(rows: boolean): void {
    this.touched += 1;
    this.edited ||= rows;
  }

  /** Returns a function that restores the current rows. */
  mark(): () => void {
    const { edited } = this;
    const lines = this.lines.map(({ key, value }) => ({ key: { ...key }, value: { ...value } }));
    return () => Object.assign(this, { lines, edited });
  }

  /** Whether Python has more rows than the page, and can answer from all of them. */
  private get whole(): boolean {
    const { data } = this;
    return this.backend !== null && data?.database !== undefined && this.others > 0 && !this.edited && this.encoder === data.encoder;
  }

  /** Whether the rows shown are those of an earlier question, until Python has answered this one. */
  get stale(): boolean {
    return this.whole && this.touched > 0;
  }

  /** Whether only Python can compute what is shown next, and has not done so yet. */
  get waiting(): boolean {
    if (this.stale) return true;
    if (!this.backend || !this.pythonOnly.length || !this.table().length) return false;
    try {
      return !this.fromPython();
    } catch {
      return false; // `outcome` reports the error
    }
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

  /** The rows that have a key, with their positions in `lines`. */
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

  /** The query, converted to the type of the keys. */
  private asks(rows: { key: Key }[]): Key {
    const given = spell(this.query.given) === this.query.text ? plain(this.query.given) : this.query.text;
    const numbers = rows.length > 0 && rows.every((row) => typeof row.key === "number");
    if (numbers) return (parsed(this.query.text) ?? given) as Key;
    const vectors = rows.length > 0 && rows.every((row) => isVector(row.key));
    return (vectors && typeof given === "string" ? listed(given) : given) as Key;
  }

  /** Whether the page has Python's vectors of the query and of all keys. */
  private get known(): boolean {
    if (this.of !== this.encoder || !this.queries.has(this.query.text)) return false;
    return this.lines.every((line) => line.key.text === "" || this.keys.has(line.key.text));
  }

  /** Whether the page's own version of the chosen encoder gives the same vectors as Python's. */
  private get here(): boolean {
    return encoders.can(this.encoder) && (this.encoder !== this.given || this.data.vectors.twin);
  }

  /** Whether Python must be asked for an answer, for weights or for vectors. */
  get wants(): boolean {
    return this.pythonOnly.length ? this.waiting : this.stale || (!this.known && !this.here);
  }

  /** Asks Python; returns true if the rows changed. */
  async fetch(): Promise<boolean> {
    if (!this.stale) {
      await (this.pythonOnly.length ? this.weigh() : this.encode());
      return false;
    }
    const { touched, data } = this;
    const found = await this.backend!.call("answer", {
      database: data.database,
      query: this.query.text,
      score: this.score,
      weighting: this.weighting,
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
    const found = await this.backend!.call("encode", this.encoding(rows));
    this.learn(encoder, lines, query, found);
  }

  /** What Python needs to encode these rows as the database does. */
  private encoding(rows: { key: Key }[]): Record<string, unknown> {
    return {
      encoder: this.encoder,
      database: this.encoder === this.given ? (this.data.database ?? null) : null,
      keys: rows.map((row) => row.key),
      query: this.asks(rows),
    };
  }

  /** The arguments with which Python computes scores and weights of the rows here. */
  private weighing(): Record<string, unknown> {
    const rows = this.table();
    const live = liveRows(rows, this.data?.columns);
    return { ...this.encoding(rows), score: this.score, weighting: this.weighting, live };
  }

  private async weigh(): Promise<void> {
    const args = this.weighing();
    const found = await this.backend!.call("weigh", args);
    const { scores, weights, is_convex: convex, is_sparse: sparse } = found;
    this.computed = { mark: JSON.stringify(args), result: { scores: scores.data, weights: weights.data, convex, sparse } };
  }

  /** Python's scores and weights of the rows here; null if they must be requested. */
  private fromPython(): Computed | null {
    const answer = this.data?.answer;
    if (this.touched === 0 && answer?.scores && answer.scores.data.length === this.table().length) {
      return { scores: answer.scores.data, weights: answer.weights.data, convex: answer.shares, sparse: true };
    }
    return this.computed?.mark === JSON.stringify(this.weighing()) ? this.computed.result : null;
  }

  /** Says why a score or weighting that needs Python cannot be computed here. */
  private needsPython(): string {
    const names = this.pythonOnly.join(" and the ");
    const many = this.pythonOnly.length > 1;
    return `The ${names} ${many ? "need" : "needs"} Python, and this page runs without it. Choose ${many ? "others" : "another one"}, or open the database in a notebook or with qkv serve.`;
  }

  /** Computes scores → weights → value, soft and hard; throws an error if that is impossible. */
  outcome(): Outcome {
    const rows = this.table();
    const query = this.asks(rows);
    const used = rows.map((row) => row.place);
    let encoder = this.encoder;
    let vectors: Vectors | undefined;
    let computed: Computed | null = null;
    if (rows.length && (this.pythonOnly.length || (this.foreign && this.touched === 0))) {
      computed = this.fromPython();
      if (!computed && this.pythonOnly.length) throw new RangeError(this.needsPython());
    }
    if (this.known) {
      const keys = used.map((i) => this.keys.get(this.lines[i].key.text)!);
      vectors = { keys, query: this.queries.get(this.query.text)!, score: this.own ?? "scaled_dot" };
    } else if (rows.length && !computed) {
      const keys = rows.map((row) => row.key);
      if (!this.here) encoder = instead(keys);
      vectors = this.encoded(encoder, keys, query);
    }
    const how = { vectors, computed, score: this.score, top: rows.length, columns: this.data?.columns };
    const soft = ask(rows, query, { ...how, weighting: this.weighting });
    const hard = ask(rows, query, { ...how, weighting: "hard" });
    const asked = this.touched === 0 && (this.others > 0 || this.foreign !== null);
    if (asked) this.python(soft, hard, used);
    return { soft, hard, used, encoder, asked };
  }

  /** Encodes keys and query in the page; the vectors of the keys are cached. */
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

  /** Replaces the page's numbers by those that Python computed from all rows. */
  private python(soft: Answer, hard: Answer, used: number[]): void {
    const { answer, best } = this.data;
    soft.weights = Float64Array.from(used, (i) => answer.weights.data[i]);
    for (const row of soft.rows) row.weight = soft.weights[row.index];
    Object.assign(soft, { pooled: plain(answer.value), entropy: answer.entropy, effective: answer.effective_rows });
    Object.assign(soft, { total: answer.total, missing: answer.missing, spread: answer.spread ?? null });
    soft.values = answer.values ?? [];
    Object.assign(hard, { total: answer.total, missing: answer.missing });
    if (!best) return;
    hard.weights = Float64Array.from(used, (i) => Number(i === best.at));
    hard.pooled = plain(best.value);
    if (hard.values.length) hard.values = [{ value: best.value, weight: 1 }];
    // If the best row is not in the page, ties with it are unknown.
    if (best.at === null) hard.rows = [];
  }
}

export type { Cell };
