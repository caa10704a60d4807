/** Packs files into one tar, so that a folder can be uploaded as one body. */

const BLOCK = 512;

function header(name: string, size: number): Uint8Array {
  const head = new Uint8Array(BLOCK);
  const put = (at: number, text: string) => head.set(new TextEncoder().encode(text), at);
  const octal = (x: number, digits: number) => x.toString(8).padStart(digits, "0");
  put(0, name.slice(0, 99));
  put(100, "0000600\0");
  put(108, "0000000\0");
  put(116, "0000000\0");
  put(124, `${octal(size, 11)}\0`);
  put(136, "00000000000\0");
  put(148, "        "); // the checksum counts its own field as spaces
  put(156, "0");
  put(257, "ustar\u000000");
  put(148, `${octal(head.reduce((sum, byte) => sum + byte, 0), 6)}\0 `);
  return head;
}

export function tar(files: File[]): Blob {
  const parts = files.flatMap((file) => [
    header(file.name, file.size) as BlobPart,
    file,
    new Uint8Array((BLOCK - (file.size % BLOCK)) % BLOCK),
  ]);
  return new Blob([...parts, new Uint8Array(2 * BLOCK)]);
}
