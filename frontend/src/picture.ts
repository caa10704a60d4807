/** A matrix as pictures of several resolutions, each coloured once and cached. */

import { diverging, sequential, type Table } from "./colours";
import type { Typed } from "./wire";

/** Numbers, rows first. */
export interface Matrix {
  data: Typed;
  rows: number;
  cols: number;
  /** A byte b stands for b × scale, or with `root` for b² × scale. */
  scale?: number;
  /** Whether the colour scale is a square root, which separates small numbers. All numbers are ≥ 0. */
  root?: boolean;
  /** The largest number of the colours; by default the matrix's own. */
  high?: number;
}

export function value(of: Matrix, i: number, j: number): number {
  const x = of.data[i * of.cols + j];
  return (of.root && of.data instanceof Uint8Array ? x * x : x) * (of.scale ?? 1);
}

/** The rounding error of a number that is stored as a byte. */
export function blur(of: Matrix, i: number, j: number): number {
  if (!(of.data instanceof Uint8Array)) return 0;
  return (of.scale ?? 1) * (of.root ? of.data[i * of.cols + j] + 0.25 : 0.5);
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
  readonly signed: boolean;
  /** `levels[k]` has a cell for 2ᵏ × 2ᵏ of the matrix: the one farthest from 0. */
  private levels: Level[];
  private missing: number[] = [];
  private dark = false;

  constructor(readonly matrix: Matrix) {
    const { data, rows, cols } = matrix;
    const scale = matrix.scale ?? 1;
    if (data instanceof Uint8Array && matrix.high === undefined) {
      this.signed = false;
      this.low = 0;
      this.high = (matrix.root ? 255 ** 2 : 255) * scale;
      this.levels = [{ bytes: data, rows, cols }];
      return;
    }
    let [least, most] = [0, 0];
    for (let i = 0; i < data.length; i++) {
      const x = data[i];
      if (x < least && x > -Infinity) least = x;
      else if (x > most && x < Infinity) most = x;
    }
    // Rounding may leave weights slightly below 0; they need no second colour.
    this.signed = least < -1e-6 * most;
    this.high = matrix.high ?? (Math.max(most, this.signed ? -least : 0) * scale || 1);
    this.low = this.signed ? -this.high : 0;
    const bytes = new Uint8ClampedArray(data.length);
    for (let i = 0; i < data.length; i++) {
      if (Number.isNaN(data[i])) this.missing.push(i);
      const share = (data[i] * scale - this.low) / (this.high - this.low);
      bytes[i] = 255 * (matrix.root ? Math.sqrt(share) : share);
    }
    this.levels = [{ bytes: new Uint8Array(bytes.buffer), rows, cols }];
  }

  colours(dark: boolean): Table {
    return this.signed ? diverging(dark) : sequential(dark);
  }

  byte(i: number, j: number): number {
    return this.levels[0].bytes[i * this.matrix.cols + j];
  }

  /** The coarsest level with cells of at most one pixel, if a cell of level 0 has this many pixels. */
  levelFor(pixels: number): number {
    let k = 0;
    while (pixels * 2 ** k < 1 && Math.max(this.at(k).rows, this.at(k).cols) > 1) k += 1;
    return k;
  }

  /** Level k in colour. */
  canvas(k: number, dark: boolean): OffscreenCanvas {
    if (dark !== this.dark) for (const level of this.levels) delete level.canvas;
    this.dark = dark;
    const level = this.at(k);
    if (!level.canvas) {
      level.canvas = new OffscreenCanvas(level.cols, level.rows);
      const image = new ImageData(level.cols, level.rows);
      const pixels = new Uint32Array(image.data.buffer);
      const colours = new Uint32Array(this.colours(dark).buffer);
      const { bytes } = level;
      for (let i = 0; i < bytes.length; i++) pixels[i] = colours[bytes[i]];
      if (k === 0) for (const i of this.missing) pixels[i] = 0;
      level.canvas.getContext("2d")!.putImageData(image, 0, 0);
    }
    return level.canvas;
  }

  private at(k: number): Level {
    while (this.levels.length <= k) this.levels.push(this.halved(this.levels.at(-1)!));
    return this.levels[k];
  }

  private halved(of: Level): Level {
    const [rows, cols] = [Math.ceil(of.rows / 2), Math.ceil(of.cols / 2)];
    const bytes = new Uint8Array(rows * cols);
    const all = of.bytes;
    for (let i = 0; i < rows; i++) {
      const top = 2 * i * of.cols;
      const below = Math.min(2 * i + 1, of.rows - 1) * of.cols;
      for (let j = 0; j < cols; j++) {
        const left = 2 * j;
        const right = Math.min(left + 1, of.cols - 1);
        const most = Math.max(all[top + left], all[top + right], all[below + left], all[below + right]);
        bytes[i * cols + j] = most;
        if (!this.signed) continue;
        const least = Math.min(all[top + left], all[top + right], all[below + left], all[below + right]);
        if (255 - least > most) bytes[i * cols + j] = least;
      }
    }
    return { bytes, rows, cols };
  }
}

/** A matrix drawn small into a canvas of `size` CSS pixels: each pixel the largest number in it. */
export function thumbnail(canvas: HTMLCanvasElement, matrix: Matrix, size: number, dark: boolean) {
  const side = Math.round(size * Math.min(devicePixelRatio || 1, 2));
  const cells = Math.max(matrix.rows, matrix.cols);
  canvas.width = Math.max(1, Math.round((side * matrix.cols) / cells));
  canvas.height = Math.max(1, Math.round((side * matrix.rows) / cells));
  const picture = new Picture(matrix);
  const context = canvas.getContext("2d")!;
  context.imageSmoothingEnabled = false;
  const level = picture.canvas(picture.levelFor(side / cells), dark);
  context.drawImage(level, 0, 0, canvas.width, canvas.height);
}
