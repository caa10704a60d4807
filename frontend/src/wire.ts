/** The data of the page, and its calls to Python: the same interface in all hosts. */

/** The part of anywidget's model that the page uses. */
export interface Model {
  get(name: string): any;
  on?(event: string, callback: (...args: any[]) => void): void;
  off?(event: string, callback?: (...args: any[]) => void): void;
  send?(content: unknown, callbacks?: unknown, buffers?: ArrayBuffer[]): void;
}

/** Calls to Python; null in an HTML file. */
export interface Backend {
  call(name: string, args: Record<string, unknown>): Promise<any>;
  /** Uploads a file as a database with this name, and returns its description. */
  upload(args: { name: string; format: string }, file: Blob): Promise<any>;
}

export type Typed = Uint8Array | Uint16Array | Int32Array | Float32Array | Float64Array;
/** An array with its shape, rows first. */
export interface Tensor {
  data: Typed;
  shape: number[];
  /** Loads a part of a large tensor. Its `data` are empty, because they stay in Python until they are needed. */
  late?: (start: number, stop: number) => Promise<Typed>;
}

/** Numbers `start` to `stop` of a tensor, loaded if necessary. */
export async function part(of: Tensor, start: number, stop: number): Promise<Typed> {
  return of.late ? of.late(start, stop) : of.data.subarray(start, stop);
}

export interface Descriptor {
  view: string;
  title: string;
  data: any;
}

export type Host = "notebook" | "server" | "file";

const TYPES = {
  u8: Uint8Array,
  u16: Uint16Array,
  i32: Int32Array,
  f32: Float32Array,
  f64: Float64Array,
} as const;

type Bytes = ArrayBuffer | ArrayBufferView;

function bytes(of: Bytes): Uint8Array {
  return of instanceof ArrayBuffer
    ? new Uint8Array(of)
    : new Uint8Array(of.buffer, of.byteOffset, of.byteLength);
}

/** Replaces each `{"$": i, dtype, shape}` in JSON by a tensor with the i-th buffer. */
export function unpack(json: any, buffers: Bytes[], backend: Pick<Backend, "call"> | null = null): any {
  if (Array.isArray(json)) return json.map((item) => unpack(item, buffers, backend));
  if (json === null || typeof json !== "object") return json;
  if (typeof json.$ === "number") {
    const type = TYPES[json.dtype as keyof typeof TYPES];
    const size = type.BYTES_PER_ELEMENT;
    // A copy, because the received bytes may not be aligned.
    const data = new type(bytes(buffers[json.$]).slice().buffer);
    const tensor: Tensor = { data, shape: json.shape };
    if (!data.length && json.shape.every(Boolean) && backend) {
      tensor.late = async (start, stop) => {
        const found = await backend.call("part", { buffer: json.$, start: start * size, stop: stop * size });
        return new type(found.data.buffer);
      };
    }
    return tensor;
  }
  // Python adds a $ to names that begin with $.
  const pairs = Object.entries(json).map(([name, item]) => [
    name.startsWith("$") ? name.slice(1) : name,
    unpack(item, buffers, backend),
  ]);
  return Object.fromEntries(pairs);
}

export function isTensor(x: any): x is Tensor {
  return x !== null && typeof x === "object" && ArrayBuffer.isView(x.data) && Array.isArray(x.shape);
}

/** Calls to the kernel of a notebook by messages: `{id, call, args}` → `{id, result}` or `{id, error}`. */
export function kernel(model: Model): Backend | null {
  if (!model.send || !model.on) return null;
  const waiting = new Map<string, { done: (x: any) => void; fail: (e: Error) => void }>();
  // Two views of one widget receive each other's answers.
  const mine = Math.random().toString(36).slice(2);
  let last = 0;
  model.on("msg:custom", (message: any, buffers: Bytes[] = []) => {
    const who = waiting.get(message.id);
    if (!who) return;
    waiting.delete(message.id);
    if ("error" in message) who.fail(new Error(message.error));
    else who.done(unpack(message.result, buffers));
  });
  const backend: Backend = {
    async upload(args, file) {
      return backend.call("upload", { ...args, base64: toBase64(new Uint8Array(await file.arrayBuffer())) });
    },
    call(name, args) {
      last += 1;
      const id = `${mine}-${last}`;
      return new Promise((done, fail) => {
        waiting.set(id, { done, fail });
        model.send!({ id, call: name, args });
      });
    },
  };
  return backend;
}

function toBase64(data: Uint8Array): string {
  let text = "";
  for (let at = 0; at < data.length; at += 0x8000) text += String.fromCharCode(...data.subarray(at, at + 0x8000));
  return btoa(text);
}

export function fromBase64(text: string): Uint8Array {
  // New browsers have a built-in function, which is several times faster.
  const built: { fromBase64?(text: string): Uint8Array } = Uint8Array as any;
  if (built.fromBase64) return built.fromBase64(text);
  const raw = atob(text);
  const out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) out[i] = raw.charCodeAt(i);
  return out;
}

/** Calls to a server by HTTP: `POST <base>/call/<name>`. Files are sent unchanged. */
export function server(base: string, headers: Record<string, string> = {}): Backend {
  const post = async (path: string, type: string, body: BodyInit) => {
    const response = await fetch(path, { method: "POST", headers: { "Content-Type": type, ...headers }, body }).catch(() => {
      throw new Error("the server does not answer: check that it runs, and try again");
    });
    const answer = await response.json().catch(() => ({ error: `status ${response.status}` }));
    if ("error" in answer) throw new Error(String(answer.error));
    return answer;
  };
  return {
    upload: (args, file) => post(`/v1/databases?${new URLSearchParams(args)}`, "application/octet-stream", file),
    async call(name, args) {
      const answer = await post(`${base}/call/${encodeURIComponent(name)}`, "application/json", JSON.stringify(args));
      return unpack(answer.result, (answer.buffers ?? []).map(fromBase64));
    },
  };
}

async function squeezed(base64: string): Promise<ArrayBuffer> {
  const packed = new Blob([fromBase64(base64) as BlobPart]).stream();
  return new Response(packed.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

/** The data of an element of the file; waits until the file is loaded. */
async function held(id: string): Promise<Uint8Array> {
  if (!document.getElementById(id)?.nextElementSibling && document.readyState === "loading") {
    await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  }
  return new Uint8Array(await squeezed(document.getElementById(id)?.textContent ?? ""));
}

/** A file's data: base64 of the gzip of [length of the JSON, u32][JSON][buffers, one after another].
 *  Large buffers are separate elements, one for each part. */
export async function opened(base64: string): Promise<{ views: Descriptor[] }> {
  const all = await squeezed(base64);
  const length = new DataView(all).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(all, 4, length)));
  let at = 4 + length;
  const buffers = (head.sizes as number[]).map((size) => {
    at += size;
    return new Uint8Array(all, at - size, size);
  });
  const parts: Pick<Backend, "call"> = {
    call: async (_, { buffer, start }) => ({
      data: await held(`qkv-part-${buffer}-${Number(start) / head.parts[String(buffer)]}`),
    }),
  };
  return { views: unpack(head.views, buffers, parts) };
}
