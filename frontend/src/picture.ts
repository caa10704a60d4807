/** A matrix as pictures of several resolutions, each coloured once and cached. */

import { getDivergingColours, getSequentialColours, type ColourTable } from "./colours";
import type { TypedArray } from "./wire";

/** Numbers, rows first. */
export interface Matrix {
  data: TypedArray;
  rows: number;
  cols: number;
  /** A byte b stands for b × scale, or with `hasRootScale` for b² × scale. */
  scale?: number;
  /** Whether the colour scale is a square root, which separates small numbers. All numbers are ≥ 0. */
  hasRootScale?: boolean;
  /** The largest number of the colours; by default the matrix's own. */
  high?: number;
}

export function readValue(matrix: Matrix, i: number, j: number): number {
  const x = matrix.data[i * matrix.cols + j];
  return (matrix.hasRootScale && matrix.data instanceof Uint8Array ? x * x : x) * (matrix.scale ?? 1);
}

/** The rounding error of a number that is stored as a byte. */
export function getRoundingError(matrix: Matrix, i: number, j: number): number {
  if (!(matrix.data instanceof Uint8Array)) return 0;
  return (matrix.scale ?? 1) * (matrix.hasRootScale ? matrix.data[i * matrix.cols + j] + 0.25 : 0.5);
}

interface Level {
  bytes: Uint8Array;
  rows: number;
  cols: number;
  canvas?: OffscreenCanvas;
}

export class Picture {
  readonly low: number;
  readonly high: number;
  readonly isSigned: boolean;
  /** `levels[k]` has a cell for 2ᵏ × 2ᵏ of the matrix: the one farthest from 0. */
  private levels: Level[];
  private missing: number[] = [];
  private dark = false;

  constructor(readonly matrix: Matrix) {
    const { data, rows, cols } = matrix;
    const scale = matrix.scale ?? 1;
    if (data instanceof Uint8Array && matrix.high === undefined) {
      this.isSigned = false;
      this.low = 0;
      this.high = (matrix.hasRootScale ? 255 ** 2 : 255) * scale;
      this.levels = [{ bytes: data, rows, cols }];
      return;
    }
    let [min, max] = [0, 0];
    for (let i = 0; i < data.length; i++) {
      const x = data[i];
      if (x < min && x > -Infinity) min = x;
      else if (x > max && x < Infinity) max = x;
    }
    // Rounding may leave weights slightly below 0; they need no second colour.
    this.isSigned = min < -1e-6 * max;
    this.high = matrix.high ?? (Math.max(max, this.isSigned ? -min : 0) * scale || 1);
    this.low = this.isSigned ? -this.high : 0;
    const bytes = new Uint8ClampedArray(data.length);
    for (let i = 0; i < data.length; i++) {
      if (Number.isNaN(data[i])) this.missing.push(i);
      const fraction = (data[i] * scale - this.low) / (this.high - this.low);
      bytes[i] = 255 * (matrix.hasRootScale ? Math.sqrt(fraction) : fraction);
    }
    this.levels = [{ bytes: new Uint8Array(bytes.buffer), rows, cols }];
  }

  getColours(dark: boolean): ColourTable {
    return this.isSigned ? getDivergingColours(dark) : getSequentialColours(dark);
  }

  byteAt(i: number, j: number): number {
    return this.levels[0].bytes[i * this.matrix.cols + j];
  }

  /** The coarsest level with cells of at most one pixel, if a cell of level 0 has this many pixels. */
  levelFor(pixels: number): number {
    let k = 0;
    while (pixels * 2 ** k < 1 && Math.max(this.getLevel(k).rows, this.getLevel(k).cols) > 1) k += 1;
    return k;
  }

  /** Level k in colour. */
  getCanvas(k: number, dark: boolean): OffscreenCanvas {
    if (dark !== this.dark) for (const level of this.levels) delete level.canvas;
    this.dark = dark;
    const level = this.getLevel(k);
    if (!level.canvas) {
      level.canvas = new OffscreenCanvas(level.cols, level.rows);
      const image = new ImageData(level.cols, level.rows);
      const pixels = new Uint32Array(image.data.buffer);
      const colours = new Uint32Array(this.getColours(dark).buffer);
      const { bytes } = level;
      for (let i = 0; i < bytes.length; i++) pixels[i] = colours[bytes[i]];
      if (k === 0) for (const i of this.missing) pixels[i] = 0;
      level.canvas.getContext("2d")!.putImageData(image, 0, 0);
    }
    return level.canvas;
  }

  private getLevel(k: number): Level {
    while (this.levels.length <= k) this.levels.push(this.halveLevel(this.levels.at(-1)!));
    return this.levels[k];
  }

  private halveLevel(level: Level): Level {
    const [rows, cols] = [Math.ceil(level.rows / 2), Math.ceil(level.cols / 2)];
    const bytes = new Uint8Array(rows * cols);
    const source = level.bytes;
    for (let i = 0; i < rows; i++) {
      const top = 2 * i * level.cols;
      const below = Math.min(2 * i + 1, level.rows - 1) * level.cols;
      for (let j = 0; j < cols; j++) {
        const left = 2 * j;
        const right = Math.min(left + 1, level.cols - 1);
        const max = Math.max(source[top + left], source[top + right], source[below + left], source[below + right]);
        bytes[i * cols + j] = max;
        if (!this.isSigned) continue;
        const min = Math.min(source[top + left], source[top + right], source[below + left], source[below + right]);
        if (255 - min > max) bytes[i * cols + j] = min;
      }
    }
    return { bytes, rows, cols };
  }
}

/** A matrix drawn small into a canvas of `size` CSS pixels: each pixel the largest number in it. */
export function drawThumbnail(canvas: HTMLCanvasElement, matrix: Matrix, size: number, dark: boolean) {
  const side = Math.round(size * Math.min(devicePixelRatio || 1, 2));
  const cells = Math.max(matrix.rows, matrix.cols);
  canvas.width = Math.max(1, Math.round((side * matrix.cols) / cells));
  canvas.height = Math.max(1, Math.round((side * matrix.rows) / cells));
  const picture = new Picture(matrix);
  const context = canvas.getContext("2d")!;
  context.imageSmoothingEnabled = false;
  const level = picture.getCanvas(picture.levelFor(side / cells), dark);
  context.drawImage(level, 0, 0, canvas.width, canvas.height);
}
