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

export type TypedArray = Uint8Array | Uint16Array | Int32Array | Float32Array | Float64Array;
/** An array with its shape, rows first. */
export interface Tensor {
  data: TypedArray;
  shape: number[];
  /** Loads a part of a large tensor. Its `data` are empty, because they stay in Python until they are needed. */
  loadRange?: (start: number, stop: number) => Promise<TypedArray>;
}

/** Numbers `start` to `stop` of a tensor, loaded if necessary. */
export async function loadPart(tensor: Tensor, start: number, stop: number): Promise<TypedArray> {
  return tensor.loadRange ? tensor.loadRange(start, stop) : tensor.data.subarray(start, stop);
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

function toBytes(buffer: Bytes): Uint8Array {
  return buffer instanceof ArrayBuffer
    ? new Uint8Array(buffer)
    : new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength);
}

/** Replaces each `{"$": i, dtype, shape}` in JSON by a tensor with the i-th buffer. */
export function unpack(json: any, buffers: Bytes[], backend: Pick<Backend, "call"> | null = null): any {
  if (Array.isArray(json)) return json.map((item) => unpack(item, buffers, backend));
  if (json === null || typeof json !== "object") return json;
  if (typeof json.$ === "number") {
    const type = TYPES[json.dtype as keyof typeof TYPES];
    const size = type.BYTES_PER_ELEMENT;
    // A copy, because the received bytes may not be aligned.
    const data = new type(toBytes(buffers[json.$]).slice().buffer);
    const tensor: Tensor = { data, shape: json.shape };
    if (!data.length && json.shape.every(Boolean) && backend) {
      tensor.loadRange = async (start, stop) => {
        const answer = await backend.call("part", { buffer: json.$, start: start * size, stop: stop * size });
        return new type(answer.data.buffer);
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

export function isTensor(decode: any): decode is Tensor {
  return decode !== null && typeof decode === "object" && ArrayBuffer.isView(decode.data) && Array.isArray(decode.shape);
}

/** Calls to the kernel of a notebook by messages: `{id, call, args}` → `{id, result}` or `{id, error}`. */
export function connectKernel(model: Model): Backend | null {
  if (!model.send || !model.on) return null;
  const pendingCalls = new Map<string, { resolve: (decode: any) => void; reject: (e: Error) => void }>();
  // Two views of one widget receive each other's answers.
  const prefix = Math.random().toString(36).slice(2);
  let lastId = 0;
  model.on("msg:custom", (message: any, buffers: Bytes[] = []) => {
    const pendingCall = pendingCalls.get(message.id);
    if (!pendingCall) return;
    pendingCalls.delete(message.id);
    if ("error" in message) pendingCall.reject(new Error(message.error));
    else pendingCall.resolve(unpack(message.result, buffers));
  });
  const backend: Backend = {
    async upload(args, file) {
      return backend.call("upload", { ...args, base64: toBase64(new Uint8Array(await file.arrayBuffer())) });
    },
    call(name, args) {
      lastId += 1;
      const id = `${prefix}-${lastId}`;
      return new Promise((resolve, reject) => {
        pendingCalls.set(id, { resolve, reject });
        model.send!({ id, call: name, args });
      });
    },
  };
  return backend;
}

function toBase64(data: Uint8Array): string {
  let text = "";
  for (let start = 0; start < data.length; start += 0x8000) text += String.fromCharCode(...data.subarray(start, start + 0x8000));
  return btoa(text);
}

export function fromBase64(text: string): Uint8Array {
  // New browsers have a built-in function, which is several times faster.
  const native: { fromBase64?(text: string): Uint8Array } = Uint8Array as any;
  if (native.fromBase64) return native.fromBase64(text);
  const raw = atob(text);
  const out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) out[i] = raw.charCodeAt(i);
  return out;
}

/** Calls to a server by HTTP: `POST <base>/call/<name>`. Files are sent unchanged. */
export function connectServer(base: string, headers: Record<string, string> = {}): Backend {
  const postRequest = async (path: string, type: string, body: BodyInit) => {
    const response = await fetch(path, { method: "POST", headers: { "Content-Type": type, ...headers }, body }).catch(() => {
      throw new Error("the server does not answer: check that it runs, and try again");
    });
    const answer = await response.json().catch(() => ({ error: `status ${response.status}` }));
    if ("error" in answer) throw new Error(String(answer.error));
    return answer;
  };
  return {
    upload: (args, file) => postRequest(`/v1/databases?${new URLSearchParams(args)}`, "application/octet-stream", file),
    async call(name, args) {
      const answer = await postRequest(`${base}/call/${encodeURIComponent(name)}`, "application/json", JSON.stringify(args));
      return unpack(answer.result, (answer.buffers ?? []).map(fromBase64));
    },
  };
}

async function decompress(base64: string): Promise<ArrayBuffer> {
  const packed = new Blob([fromBase64(base64) as BlobPart]).stream();
  return new Response(packed.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

/** The data of an element of the file; waits until the file is loaded. */
async function readElement(id: string): Promise<Uint8Array> {
  if (!document.getElementById(id)?.nextElementSibling && document.readyState === "loading") {
    await new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve, { once: true }));
  }
  return new Uint8Array(await decompress(document.getElementById(id)?.textContent ?? ""));
}

/** A file's data: base64 of the gzip of [length of the JSON, u32][JSON][buffers, one after another].
 *  Large buffers are separate elements, one for each part. */
export async function decodeFile(base64: string): Promise<{ views: Descriptor[] }> {
  const content = await decompress(base64);
  const length = new DataView(content).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(content, 4, length)));
  let offset = 4 + length;
  const buffers = (header.sizes as number[]).map((size) => {
    offset += size;
    return new Uint8Array(content, offset - size, size);
  });
  const parts: Pick<Backend, "call"> = {
    call: async (_, { buffer, start }) => ({
      data: await readElement(`qkv-part-${buffer}-${Number(start) / header.parts[String(buffer)]}`),
    }),
  };
  return { views: unpack(header.views, buffers, parts) };
}
