/** BLAKE2b, and the digest of a key as in qkv.database.table.cells.digest. */

const IV = [
  0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n,
];
const SIGMA = [
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
  [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
  [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
  [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
  [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
  [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
  [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
  [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
  [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
  [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
];
const MIX_INDICES = [
  [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
  [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14],
];

const toUint64 = (x: bigint) => BigInt.asUintN(64, x);
const rotateRight = (x: bigint, by: bigint) => toUint64((x >> by) | (x << (64n - by)));

/** The unkeyed BLAKE2b hash (RFC 7693) of `size` bytes. */
export function blake2b(text: Uint8Array, size: number): Uint8Array {
  const state = IV.slice();
  state[0] ^= 0x01010000n ^ BigInt(size);
  const blocks = Math.max(Math.ceil(text.length / 128), 1);
  const padded = new Uint8Array(blocks * 128);
  padded.set(text);
  const view = new DataView(padded.buffer);
  for (let block = 0; block < blocks; block++) {
    const last = block === blocks - 1;
    const v = [...state, ...IV];
    v[12] ^= BigInt(last ? text.length : (block + 1) * 128);
    if (last) v[14] = toUint64(~v[14]);
    const m = Array.from({ length: 16 }, (_, i) => view.getBigUint64(block * 128 + i * 8, true));
    for (let round = 0; round < 12; round++) {
      const order = SIGMA[round % 10];
      MIX_INDICES.forEach(([a, b, c, d], i) => {
        v[a] = toUint64(v[a] + v[b] + m[order[2 * i]]);
        v[d] = rotateRight(v[d] ^ v[a], 32n);
        v[c] = toUint64(v[c] + v[d]);
        v[b] = rotateRight(v[b] ^ v[c], 24n);
        v[a] = toUint64(v[a] + v[b] + m[order[2 * i + 1]]);
        v[d] = rotateRight(v[d] ^ v[a], 16n);
        v[c] = toUint64(v[c] + v[d]);
        v[b] = rotateRight(v[b] ^ v[c], 63n);
      });
    }
    for (let i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
  }
  const out = new DataView(new ArrayBuffer(64));
  state.forEach((x, i) => out.setBigUint64(i * 8, x, true));
  return new Uint8Array(out.buffer, 0, size);
}

/** A number as Python's JSON writes it; equal numbers have equal text. */
export function formatNumber(x: number): string {
  if (Number.isInteger(x)) return BigInt(x).toString();
  if (!Number.isFinite(x)) return `{"$float":"${x > 0 ? "inf" : "-inf"}"}`;
  if (Math.abs(x) >= 1e-4) return String(x);
  return x.toExponential().replace(/e-(\d)$/, "e-0$1");
}

/** The 16-byte digest of a text or a number; equal keys have equal digests. */
export function digest(key: string | number): Uint8Array {
  const text = typeof key === "string" ? `s${key}` : `j${formatNumber(key)}`;
  return blake2b(new TextEncoder().encode(text), 16);
}
