/** The state of the view Database: rows, query, choices, and the answer computed from them. It has no DOM code. */

import {
  type Answer,
  type Computed,
  type Encoder,
  type Key,
  type NameOrSettings,
  SCORES,
  type Vector,
  WEIGHTINGS,
  ask,
  encoders,
  findLiveRows,
} from "../equation";
import { listPythonOnly } from "../registrations";
import { type Backend, isTensor } from "../wire";
import type { Cell, Example } from "./examples";

/** A cell: the text in its field, and the value from the data, which is used until the text changes. */
export interface Field {
  text: string;
  original: unknown;
}
export interface Line {
  key: Field;
  value: Field;
}

export interface Outcome {
  soft: Answer;
  hard: Answer;
  /** The rows that have a key, as positions in `lines`. */
  usedLines: number[];
  encoder: string;
  /** Whether Python computed the numbers. */
  isFromPython: boolean;
}

interface Vectors {
  keys: Vector[];
  query: Vector;
  score: NameOrSettings;
}

/** Encoders that need Python. */
export const PYTHON_ENCODERS = ["text", "words", "sentences"];

/** Text for a field of one line, with ⏎ for line breaks, and the inverse. */
export const toOneLine = (text: string) => text.replace(/\r\n|\r|\n/g, "⏎");
export const fromOneLine = (text: string) => text.replaceAll("⏎", "\n");

const getName = (like: NameOrSettings) => (typeof like === "string" ? like : like.name);

export function formatField(x: unknown): string {
  if (x === null || x === undefined) return "";
  if (typeof x === "string") return x;
  if (isTensor(x)) return JSON.stringify(Array.from(x.data, (y) => Number(y.toPrecision(6))));
  return typeof x === "object" ? JSON.stringify(x) : String(x);
}

const toField = (original: unknown): Field => ({ text: formatField(original), original });
const toPlain = (x: unknown) => (isTensor(x) ? Array.from(x.data as Float64Array) : x);

/** The number that a text is; null for other text. */
function parseNumber(text: string): number | null {
  const x = Number(text.replace("−", "-"));
  return text.trim() !== "" && Number.isFinite(x) ? x : null;
}

const isVector = (x: unknown): x is number[] => Array.isArray(x) && x.length > 0 && x.every((y) => typeof y === "number");

/** The vector that a text is: numbers separated by commas, with or without brackets. */
function parseVector(text: string): Vector {
  const parts = text.replace(/^\s*\[|\]\s*$/g, "").split(",").map(parseNumber);
  if (parts.every((x) => x !== null)) return parts as number[];
  throw new TypeError("The keys are vectors: type the query as numbers separated by commas.");
}

/** The encoder that the page uses instead of one that needs Python. */
function chooseFallbackEncoder(keys: Key[]): string {
  const vectors = keys.every(isVector);
  return keys.some((key) => typeof key === "object") && !vectors ? "characters" : encoders.suggestEncoder(keys);
}

/** The cells of a column: numbers if all of them are, else the values or the typed texts. */
function convertFields(fields: Field[], infersNumbers: boolean): unknown[] {
  const cells = fields.map((f) => (formatField(f.original) === f.text ? toPlain(f.original) : f.text));
  const texts = fields.filter((f) => f.text.trim() !== "");
  const numbers = texts.map((f) => parseNumber(f.text));
  const hasNumbers = cells.some((x) => typeof x === "number");
  if ((infersNumbers || hasNumbers) && texts.length && numbers.every((x) => x !== null)) {
    return fields.map((f) => parseNumber(f.text));
  }
  return cells;
}

export class State {
  lines: Line[] = [];
  query: Field = toField("");
  names = { key: "key", value: "value" };
  note = "";
  encoder = "characters";
  score: NameOrSettings | null = null;
  weighting: NameOrSettings = "softmax";
  /** Vectors of Python's encoder by the key's text, and of queries; one encoder at a time. */
  private keys = new Map<string, Vector>();
  private queries = new Map<string, Vector>();
  private pythonScore: NameOrSettings | null = null;
  private vectorsEncoder = "";
  private infersNumbers = true;
  private data: any = null;
  /** Whether the user changed rows; and the number of changes since the data came from Python. */
  isEdited = false;
  private changeCount = 0;
  /** Python's last result for a score or weighting that is not known here, and what it was computed from. */
  private lastComputed: { inputs: string; result: Computed } | null = null;
  private lastEncoding: { inputs: string; encoder: Encoder; keys: Vector[] } | null = null;

  /** `defaults`: the data of the view; the example tables take the registered names from them. */
  constructor(
    readonly backend: Backend | null,
    private readonly defaults: any = null,
  ) {}

  /** The number of rows that Python has and the page has not. */
  get otherRowCount(): number {
    return Math.max((this.data?.answer?.total ?? 0) - (this.data?.rows?.length ?? 0), 0);
  }

  /** The number of rows that Python ignored because their value is missing. */
  get ignoredRowCount(): number {
    return this.data?.answer?.missing ?? 0;
  }

  /** The score and weighting of Python's answer, if they have no name and the page cannot compute them. */
  get unnamedChoices(): string | null {
    const answer = this.data?.answer;
    return answer && this.data.is_named === false ? `${answer.score} and ${answer.weighting}` : null;
  }

  /** How sure Python's answer is, as long as nothing was changed. */
  get confidence(): string {
    return (this.changeCount === 0 && this.data?.answer?.confidence_text) || "";
  }

  /** The advice of Python's answer, as long as nothing was changed. */
  get hint(): string {
    return (this.changeCount === 0 && this.data?.answer?.hint) || "";
  }

  /** The names of the chosen score and weighting that have no formula in TypeScript, in words. */
  get pythonOnlyNames(): string[] {
    const score = this.score ?? (this.vectorsEncoder === this.encoder ? this.pythonScore : null);
    const names: string[] = [];
    if (score && !Object.hasOwn(SCORES, getName(score))) names.push(`score “${getName(score)}”`);
    if (!Object.hasOwn(WEIGHTINGS, getName(this.weighting))) names.push(`weighting “${getName(this.weighting)}”`);
    return names;
  }

  /** Scores and weightings that are registered in Python and not known here, by name: their titles. */
  listRegistered(kind: "scores" | "weightings"): [string, string][] {
    return listPythonOnly({ backend: this.backend, data: this.data ?? this.defaults }, kind);
  }

  /** Python's encoder of the data, if its vectors came with them. */
  get pythonEncoder(): string | null {
    return this.data?.vectors?.encoder ?? null;
  }

  loadExample(example: Example): void {
    this.reset();
    this.lines = example.rows.map(([key, value]) => ({ key: toField(key), value: toField(value) }));
    this.query = toField(example.query);
    this.names = { key: example.key, value: example.value };
    this.note = example.note;
    this.encoder = encoders.suggestEncoder(this.getRows().map((row) => row.key));
  }

  /** Loads the data of a view descriptor. */
  loadData(data: any): void {
    this.reset();
    this.data = data;
    this.infersNumbers = false;
    this.lines = (data.rows ?? []).map((row: any) => ({ key: toField(row.key), value: toField(row.value) }));
    this.query = toField(data.query ?? "");
    this.names = { ...this.names, ...data.names };
    this.score = data.score ?? null;
    this.weighting = data.weighting ?? "softmax";
    if (data.temperature) this.weighting = { name: "softmax", temperature: data.temperature };
    this.encoder = data.encoder ?? this.pythonEncoder ?? encoders.suggestEncoder(this.getRows().map((row) => row.key));
    const vectors = data.vectors;
    if (vectors) this.storeVectors(vectors.encoder, this.lines, this.query.text, vectors);
  }

  private reset(): void {
    [this.data, this.score, this.weighting, this.pythonScore] = [null, null, "softmax", null];
    [this.changeCount, this.isEdited, this.infersNumbers] = [0, false, true];
    [this.vectorsEncoder, this.note, this.names] = ["", "", { key: "key", value: "value" }];
    this.keys.clear();
    this.queries.clear();
  }

  private storeVectors(encoder: string, lines: Line[], query: string, vectors: any): void {
    // Vectors have a column for each word of these keys, so vectors of other keys cannot be compared with them.
    const hasOtherKeys = lines.length !== this.keys.size || lines.some((line) => !this.keys.has(line.key.text));
    if (this.vectorsEncoder !== encoder || (vectors.keys && hasOtherKeys)) {
      this.keys.clear();
      this.queries.clear();
    }
    this.vectorsEncoder = encoder;
    this.pythonScore = vectors.score ?? null;
    const sliceRow = (tensor: any, i: number): Vector => {
      const width = tensor.shape.at(-1);
      return tensor.data.subarray(i * width, (i + 1) * width);
    };
    if (vectors.keys) lines.forEach((line, i) => this.keys.set(line.key.text, sliceRow(vectors.keys, i)));
    if (vectors.query) this.queries.set(query, sliceRow(vectors.query, 0));
  }

  /** Records a change; after a change of `rows` the answer is computed from the rows in the page. */
  recordChange(rows: boolean): void {
    this.changeCount += 1;
    this.isEdited ||= rows;
  }

  /** Returns a function that restores the current rows. */
  snapshotRows(): () => void {
    const { isEdited: edited } = this;
    const lines = this.lines.map(({ key, value }) => ({ key: { ...key }, value: { ...value } }));
    return () => {
      [this.lines, this.isEdited] = [lines, edited];
    };
  }

  /** Whether Python has more rows than the page, and can answer from all of them. */
  private get canAskPython(): boolean {
    const { data } = this;
    return this.backend !== null && data?.database !== undefined && this.otherRowCount > 0 && !this.isEdited && this.encoder === data.encoder;
  }

  /** Whether the rows shown are those of an earlier question, until Python has answered this one. */
  get isStale(): boolean {
    return this.canAskPython && this.changeCount > 0;
  }

  /** Whether only Python can compute what is shown next, and has not done so yet. */
  get isWaiting(): boolean {
    if (this.isStale) return true;
    if (!this.backend || !this.pythonOnlyNames.length || !this.getRows().length) return false;
    try {
      return !this.getComputed();
    } catch {
      return false; // `computeOutcome` reports the error
    }
  }

  swapColumns(): void {
    for (const line of this.lines) [line.key, line.value] = [line.value, line.key];
    this.names = { key: this.names.value, value: this.names.key };
    const first = this.lines[0]?.key;
    if (first) this.query = { ...first };
    const keys = this.getRows().map((row) => row.key);
    if (!PYTHON_ENCODERS.includes(this.encoder)) this.encoder = encoders.suggestEncoder(keys);
    this.score = null;
    this.recordChange(true);
  }

  /** The rows that have a key, with their positions in `lines`. */
  getRows(): { key: Key; value: unknown; lineIndex: number }[] {
    const keys = convertFields(this.lines.map((line) => line.key), this.infersNumbers);
    const values = convertFields(this.lines.map((line) => line.value), this.infersNumbers);
    return this.lines
      .map((line, i) => ({
        key: keys[i] as Key,
        value: line.value.text === "" ? null : values[i],
        lineIndex: i,
      }))
      .filter((_, i) => this.lines[i].key.text !== "");
  }

  /** The query, converted to the type of the keys. */
  private parseQuery(rows: { key: Key }[]): Key {
    const text = formatField(this.query.original) === this.query.text ? toPlain(this.query.original) : this.query.text;
    const numbers = rows.length > 0 && rows.every((row) => typeof row.key === "number");
    if (numbers) return (parseNumber(this.query.text) ?? text) as Key;
    const vectors = rows.length > 0 && rows.every((row) => isVector(row.key));
    return (vectors && typeof text === "string" ? parseVector(text) : text) as Key;
  }

  /** Whether the page has Python's vectors of the query and of all keys. */
  private get hasVectors(): boolean {
    if (this.vectorsEncoder !== this.encoder || !this.queries.has(this.query.text)) return false;
    return this.lines.every((line) => line.key.text === "" || this.keys.has(line.key.text));
  }

  /** Whether the page's own version of the chosen encoder gives the same vectors as Python's. */
  private get canEncodeHere(): boolean {
    return encoders.isAvailable(this.encoder) && (this.encoder !== this.pythonEncoder || this.data.vectors.twin);
  }

  /** Whether Python must be asked for an answer, for weights or for vectors. */
  get needsPython(): boolean {
    return this.pythonOnlyNames.length ? this.isWaiting : this.isStale || (!this.hasVectors && !this.canEncodeHere);
  }

  /** Asks Python; returns true if the rows changed. */
  async fetchFromPython(): Promise<boolean> {
    if (!this.isStale) {
      await (this.pythonOnlyNames.length ? this.requestWeights() : this.requestVectors());
      return false;
    }
    const { changeCount: touched, data } = this;
    const vectors = await this.backend!.call("answer", {
      database: data.database,
      query: this.query.text,
      score: this.score,
      weighting: this.weighting,
    });
    if (touched !== this.changeCount || data !== this.data) return false;
    this.data = { ...vectors, database: data.database };
    this.changeCount = 0;
    this.lines = vectors.rows.map((row: any) => ({ key: toField(row.key), value: toField(row.value) }));
    if (vectors.vectors) this.storeVectors(vectors.vectors.encoder, this.lines, this.query.text, vectors.vectors);
    return true;
  }

  private async requestVectors(): Promise<void> {
    const lines = this.lines.filter((line) => line.key.text !== "");
    const rows = this.getRows();
    const { encoder } = this;
    const query = this.query.text;
    const vectors = await this.backend!.call("encode", this.buildEncodeArgs(rows));
    this.storeVectors(encoder, lines, query, vectors);
  }

  /** What Python needs to encode these rows as the database does. */
  private buildEncodeArgs(rows: { key: Key }[]): Record<string, unknown> {
    return {
      encoder: this.encoder,
      database: this.encoder === this.pythonEncoder ? (this.data.database ?? null) : null,
      keys: rows.map((row) => row.key),
      query: this.parseQuery(rows),
    };
  }

  /** The arguments with which Python computes scores and weights of the rows here. */
  private buildWeighArgs(): Record<string, unknown> {
    const rows = this.getRows();
    const live = findLiveRows(rows, this.data?.columns);
    return { ...this.buildEncodeArgs(rows), score: this.score, weighting: this.weighting, live };
  }

  private async requestWeights(): Promise<void> {
    const args = this.buildWeighArgs();
    const vectors = await this.backend!.call("weigh", args);
    const { scores, weights, is_convex: convex, is_sparse: sparse } = vectors;
    this.lastComputed = { inputs: JSON.stringify(args), result: { scores: scores.data, weights: weights.data, isConvex: convex, isSparse: sparse } };
  }

  /** Python's scores and weights of the rows here; null if they must be requested. */
  private getComputed(): Computed | null {
    const answer = this.data?.answer;
    if (this.changeCount === 0 && answer?.scores && answer.scores.data.length === this.getRows().length) {
      return { scores: answer.scores.data, weights: answer.weights.data, isConvex: answer.shares, isSparse: true };
    }
    return this.lastComputed?.inputs === JSON.stringify(this.buildWeighArgs()) ? this.lastComputed.result : null;
  }

  /** Says why a score or weighting that needs Python cannot be computed here. */
  private explainPythonNeed(): string {
    const names = this.pythonOnlyNames.join(" and the ");
    const many = this.pythonOnlyNames.length > 1;
    return `The ${names} ${many ? "need" : "needs"} Python, and this page runs without it. Choose ${many ? "others" : "another one"}, or open the database in a notebook or with qkv serve.`;
  }

  /** Computes scores → weights → value, soft and hard; throws an error if that is impossible. */
  computeOutcome(): Outcome {
    const rows = this.getRows();
    const query = this.parseQuery(rows);
    const usedLines = rows.map((row) => row.lineIndex);
    let encoder = this.encoder;
    let vectors: Vectors | undefined;
    let computed: Computed | null = null;
    if (rows.length && (this.pythonOnlyNames.length || (this.unnamedChoices && this.changeCount === 0))) {
      computed = this.getComputed();
      if (!computed && this.pythonOnlyNames.length) throw new RangeError(this.explainPythonNeed());
    }
    if (this.hasVectors) {
      const keys = usedLines.map((i) => this.keys.get(this.lines[i].key.text)!);
      vectors = { keys, query: this.queries.get(this.query.text)!, score: this.pythonScore ?? "scaled_dot" };
    } else if (rows.length && !computed) {
      const keys = rows.map((row) => row.key);
      if (!this.canEncodeHere) encoder = chooseFallbackEncoder(keys);
      vectors = this.encodeHere(encoder, keys, query);
    }
    const options = { vectors, computed, score: this.score, top: rows.length, columns: this.data?.columns };
    const soft = ask(rows, query, { ...options, weighting: this.weighting });
    const hard = ask(rows, query, { ...options, weighting: "hard" });
    const isFromPython = this.changeCount === 0 && (this.otherRowCount > 0 || this.unnamedChoices !== null);
    if (isFromPython) this.applyPython(soft, hard, usedLines);
    return { soft, hard, usedLines, encoder, isFromPython };
  }

  /** Encodes keys and query in the page; the vectors of the keys are cached. */
  private encodeHere(name: string, keys: Key[], query: Key): Vectors {
    const inputs = JSON.stringify([name, keys]);
    if (this.lastEncoding?.inputs !== inputs) {
      const encoder = encoders.fit(name, keys);
      this.lastEncoding = { inputs, encoder, keys: encoder.encode(keys) };
    }
    const { encoder, keys: keyVectors } = this.lastEncoding;
    const own = this.pythonScore && name === this.vectorsEncoder ? this.pythonScore : encoder.defaultScore(keys.length);
    return { keys: keyVectors, query: encoder.encodeQueries([query])[0], score: own };
  }

  /** Replaces the page's numbers by those that Python computed from all rows. */
  private applyPython(soft: Answer, hard: Answer, usedLines: number[]): void {
    const { answer, best } = this.data;
    soft.weights = Float64Array.from(usedLines, (i) => answer.weights.data[i]);
    for (const row of soft.rows) row.weight = soft.weights[row.index];
    Object.assign(soft, { shown: toPlain(answer.value), mean: toPlain(answer.mean), valueIsMean: answer.value_is_mean, entropy: answer.entropy, effective: answer.effective_rows });
    Object.assign(soft, { total: answer.total, missing: answer.missing, spread: answer.spread ?? null });
    soft.values = answer.values ?? [];
    Object.assign(hard, { total: answer.total, missing: answer.missing });
    if (!best) return;
    hard.weights = Float64Array.from(usedLines, (i) => Number(i === best.at));
    hard.shown = toPlain(best.value);
    if (hard.values.length) hard.values = [{ value: best.value, weight: 1 }];
    // If the best row is not in the page, ties with it are unknown.
    if (best.at === null) hard.rows = [];
  }
}

export type { Cell };
