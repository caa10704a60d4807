/** Packs files into one tar, so that a folder can be uploaded as one body. */

const BLOCK = 512;

function createHeader(name: string, size: number): Uint8Array {
  const header = new Uint8Array(BLOCK);
  const writeText = (offset: number, text: string) => header.set(new TextEncoder().encode(text), offset);
  const formatOctal = (x: number, digits: number) => x.toString(8).padStart(digits, "0");
  writeText(0, name.slice(0, 99));
  writeText(100, "0000600\0");
  writeText(108, "0000000\0");
  writeText(116, "0000000\0");
  writeText(124, `${formatOctal(size, 11)}\0`);
  writeText(136, "00000000000\0");
  writeText(148, "        "); // the checksum counts its own field as spaces
  writeText(156, "0");
  writeText(257, "ustar\u000000");
  writeText(148, `${formatOctal(header.reduce((sum, byte) => sum + byte, 0), 6)}\0 `);
  return header;
}

export function createTar(files: File[]): Blob {
  const parts = files.flatMap((file) => [
    createHeader(file.name, file.size) as BlobPart,
    file,
    new Uint8Array((BLOCK - (file.size % BLOCK)) % BLOCK),
  ]);
  return new Blob([...parts, new Uint8Array(2 * BLOCK)]);
}
