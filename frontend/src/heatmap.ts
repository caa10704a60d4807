/** A heatmap of a matrix, with panning, zooming and reading of cells by pointer and keyboard. */

import { ink as inkOn } from "./colours";
import { h, onceAFrame } from "./dom";
import { addGestures } from "./gestures";
import { clamp, numeral, roundUp } from "./numbers";
import { blur, Picture, value, type Matrix } from "./picture";
import type { Given } from "./view";

export interface Options {
  /** The label for screen readers. */
  label: string;
  matrix: Matrix;
  /** A name for each row and column; by default their numbers. */
  rowNames?: string[];
  colNames?: string[];
  rowTitle?: string;
  colTitle?: string;
  given: Pick<Given, "announce" | "dark">;
  /** The element of the view, which gets the event `theme`. */
  at: EventTarget;
  /** Called with the cell under the cursor; null if there is none. */
  onCell?(cell: { row: number; col: number; value: number } | null): void;
  /** The longest side of the picture in CSS pixels. */
  side?: number;
  test?: string;
}

const FONT = 12;
const LONGEST = 16;
/** The smallest cell (CSS pixels) that shows its number, and the largest cell. */
const ROOMY = 38;
const LARGEST = 72;
const KEYS =
  "Arrow keys move the cell, Home and End go to the row's ends, plus and minus zoom, " +
  "0 shows all, Shift and arrow keys pan.";

const short = (text: string) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);

export class Heatmap {
  readonly element: HTMLElement;
  private picture: Picture;
  private readonly canvas: HTMLCanvasElement;
  private readonly readout: HTMLElement;
  private readonly foot: HTMLElement;
  private readonly note: HTMLElement;
  private readonly bar: HTMLCanvasElement;
  private readonly low: HTMLElement;
  private readonly high: HTMLElement;
  private readonly observer: ResizeObserver;
  private readonly turned = () => this.redraw();
  /** The zoom factor, and the row and column at the top left corner. */
  private zoom = 1;
  private top = 0;
  private left = 0;
  private cursor: { row: number; col: number } | null = null;
  /** Redraws the heatmap in the next frame. */
  readonly redraw = onceAFrame(() => this.element.isConnected && this.draw());
  /** The picture inside the canvas, in CSS pixels. */
  private box = { x: 0, y: 0, width: 1, height: 1 };

  constructor(private readonly options: Options) {
    const test = options.test ?? "heatmap";
    this.picture = new Picture(options.matrix);
    this.canvas = h("canvas", {
      tabindex: "0",
      role: "application",
      "aria-roledescription": "heatmap",
      test,
    });
    this.readout = h("span", { class: "heatmap-readout", test: `${test}-readout` });
    this.note = h("span", { class: "heatmap-note", test: `${test}-note` });
    this.bar = h("canvas", { class: "heatmap-bar", width: "256", height: "1", "aria-hidden": "true" });
    this.low = h("span", { test: `${test}-low` });
    this.high = h("span", { test: `${test}-high` });
    const button = (text: string, label: string, act: () => void) =>
      h("button", { type: "button", "aria-label": label, title: label, on: { click: act } }, text);
    const tools = h(
      "span",
      { class: "heatmap-tools" },
      button("−", "Zoom out", () => this.scale(1 / 1.5)),
      button("+", "Zoom in", () => this.scale(1.5)),
      button("all", "Show all", () => this.fit()),
    );
    const scale = h("span", { class: "heatmap-scale" }, this.low, this.bar, this.high);
    this.foot = h("div", { class: "heatmap-foot" }, this.readout, scale, tools);
    this.element = h("div", { class: "heatmap" }, this.canvas, this.foot, this.note);
    addGestures(this.canvas, {
      hover: (x, y) => this.hover(x, y),
      leave: () => this.leave(),
      drag: (x, y) => this.pan(-y / this.pitch.y, -x / this.pitch.x),
      scale: (factor, x, y) => this.scale(factor, x, y),
      press: (key, shift) => this.press(key, shift),
    });
    this.describe();
    this.observer = new ResizeObserver(() => this.redraw());
    this.observer.observe(this.element);
    options.at.addEventListener("theme", this.turned);
  }

  /** Shows another matrix; zoom and position stay if its shape is the same. */
  update(matrix: Matrix, names: Pick<Options, "rowNames" | "colNames" | "label"> | null = null) {
    const { rows, cols } = this.picture.matrix;
    this.picture = new Picture(matrix);
    if (names) Object.assign(this.options, names);
    if (matrix.rows !== rows || matrix.cols !== cols) {
      this.zoom = 1;
      this.top = this.left = 0;
      this.cursor = null;
    }
    this.describe();
    this.redraw();
  }

  /** The cell under the cursor. */
  point(row: number, col: number) {
    this.cursor = { row, col };
    this.tell();
  }

  destroy() {
    this.observer.disconnect();
    this.options.at.removeEventListener("theme", this.turned);
    this.redraw.stop();
  }

  private name(side: "row" | "col", at: number): string {
    const names = side === "row" ? this.options.rowNames : this.options.colNames;
    return names?.[at] ?? String(at);
  }

  private describe() {
    const { rows, cols } = this.picture.matrix;
    const { label } = this.options;
    this.canvas.setAttribute("aria-label", `${label}: ${rows} rows, ${cols} columns. ${KEYS}`);
    this.low.textContent = numeral(this.picture.low, 0, 3);
    this.high.textContent = numeral(this.picture.high, 0, 3);
    if (this.cursor) this.tell();
    else this.readout.textContent = `${rows} × ${cols}`;
  }

  private sentence(): string {
    const { row, col } = this.cursor!;
    const { matrix } = this.picture;
    const number = numeral(value(matrix, row, col), blur(matrix, row, col));
    return `${this.name("row", row)} → ${this.name("col", col)}  ${number}`;
  }

  private tell() {
    const { row, col } = this.cursor!;
    this.readout.textContent = this.sentence();
    this.options.onCell?.({ row, col, value: value(this.picture.matrix, row, col) });
    this.redraw();
  }

  // Geometry: `pitch` CSS pixels a cell.

  private get pitch() {
    const { rows, cols } = this.picture.matrix;
    return { x: (this.zoom * this.box.width) / cols, y: (this.zoom * this.box.height) / rows };
  }

  private fit() {
    this.zoom = 1;
    this.top = this.left = 0;
    this.redraw();
  }

  /** Zooms about a point of the canvas; by default about the cursor or the centre. */
  private scale(factor: number, x?: number, y?: number) {
    const { box, pitch, cursor } = this;
    if (x === undefined || y === undefined) {
      x = cursor ? box.x + (cursor.col + 0.5 - this.left) * pitch.x : box.x + box.width / 2;
      y = cursor ? box.y + (cursor.row + 0.5 - this.top) * pitch.y : box.y + box.height / 2;
    }
    const [col, row] = [this.left + (x - box.x) / pitch.x, this.top + (y - box.y) / pitch.y];
    const { rows, cols } = this.picture.matrix;
    const most = Math.max(1, LARGEST / Math.max(box.width / cols, box.height / rows));
    this.zoom = clamp(this.zoom * factor, 1, most);
    this.left = col - (x - box.x) / this.pitch.x;
    this.top = row - (y - box.y) / this.pitch.y;
    this.limitPosition();
  }

  private pan(rows: number, cols: number) {
    this.top += rows;
    this.left += cols;
    this.limitPosition();
  }

  /** Limits the position to the matrix, and redraws. */
  private limitPosition() {
    const { rows, cols } = this.picture.matrix;
    this.top = clamp(this.top, 0, rows - rows / this.zoom);
    this.left = clamp(this.left, 0, cols - cols / this.zoom);
    this.redraw();
  }

  private cellAt(x: number, y: number) {
    const { box, pitch } = this;
    const { rows, cols } = this.picture.matrix;
    const col = Math.floor(this.left + (x - box.x) / pitch.x);
    const row = Math.floor(this.top + (y - box.y) / pitch.y);
    const inside = x >= box.x && y >= box.y && x < box.x + box.width && y < box.y + box.height;
    return inside && row >= 0 && row < rows && col >= 0 && col < cols ? { row, col } : null;
  }

  // Input.

  private hover(x: number, y: number) {
    const found = this.cellAt(x, y);
    if (!found) {
      if (!this.canvas.matches(":focus")) this.leave();
    } else if (found.row !== this.cursor?.row || found.col !== this.cursor.col) {
      this.point(found.row, found.col);
    }
  }

  private leave() {
    if (!this.cursor) return;
    this.cursor = null;
    this.describe();
    this.options.onCell?.(null);
    this.redraw();
  }

  private press(key: string, shift: boolean): boolean {
    const { rows, cols } = this.picture.matrix;
    const steps: Record<string, [number, number]> = {
      ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -Infinity], End: [0, Infinity],
    }; // prettier-ignore
    const step = steps[key];
    if (key === "+" || key === "=") this.scale(1.5);
    else if (key === "-") this.scale(1 / 1.5);
    else if (key === "0") this.fit();
    else if (step && shift && key.startsWith("Arrow")) {
      this.pan((step[0] * rows) / this.zoom / 8, (step[1] * cols) / this.zoom / 8);
    } else if (step) {
      const from = this.cursor ?? { row: Math.floor(this.top), col: Math.floor(this.left) };
      const at = this.cursor ? step : [0, 0];
      const row = clamp(from.row + at[0], 0, rows - 1);
      const col = clamp(from.col + at[1], 0, cols - 1);
      this.top = clamp(this.top, row + 1 - rows / this.zoom, row);
      this.left = clamp(this.left, col + 1 - cols / this.zoom, col);
      this.point(row, col);
      this.options.given.announce(this.sentence());
    } else return false;
    return true;
  }

  // Drawing.

  private draw() {
    const { canvas, picture, options } = this;
    const { rows, cols } = picture.matrix;
    const style = getComputedStyle(this.element);
    const dark = options.given.dark();
    // Colours are read from elements, because a CSS variable may hold the colours of both themes.
    const accent = style.accentColor;
    const [soft, line] = [getComputedStyle(this.note).color, getComputedStyle(this.bar).borderColor];
    const pen = canvas.getContext("2d")!;
    const family = style.fontFamily;
    pen.font = `${FONT}px ${family}`;

    const wide = (names: string[] | undefined, count: number) =>
      names
        ? Math.max(...names.slice(0, 4096).map((name) => pen.measureText(short(name)).width))
        : pen.measureText(String(count)).width;
    const [rowWidth, colWidth] = [wide(options.rowNames, rows), wide(options.colNames, cols)];
    const width = this.element.clientWidth || 320;
    const margin = Math.ceil(rowWidth) + 8 + (options.rowTitle ? FONT + 6 : 0);
    const available = Math.min(width - margin - 2, options.side ?? 560);
    // Cells are square unless the matrix is very long.
    const shape = clamp(rows / cols, 1 / 6, 2);
    const plot = Math.max(32, Math.min(available, (options.side ?? 560) / shape, cols * LARGEST));
    const lies = colWidth + 6 < (this.zoom * plot) / cols;
    const above = (lies ? FONT + 6 : Math.ceil(colWidth) + 8) + (options.colTitle ? FONT + 6 : 0);
    this.box = { x: margin, y: above, width: plot, height: plot * shape };
    const { box, pitch } = this;

    const ratio = devicePixelRatio || 1;
    const [outer, height] = [margin + plot + 2, above + box.height + 2];
    canvas.width = Math.round(outer * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.setProperty("width", `${outer}px`);
    canvas.style.setProperty("height", `${height}px`);
    this.foot.style.setProperty("max-width", `${Math.max(outer, 360)}px`);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);

    const k = picture.levelFor(Math.min(pitch.x, pitch.y) * ratio);
    const part = 2 ** k;
    pen.save();
    pen.beginPath();
    pen.rect(box.x, box.y, box.width, box.height);
    pen.clip();
    pen.imageSmoothingEnabled = false;
    const level = picture.canvas(k, dark);
    // The whole picture is drawn and clipped, so that partial cells at the edges are visible.
    pen.drawImage(
      level,
      box.x - this.left * pitch.x,
      box.y - this.top * pitch.y,
      level.width * part * pitch.x,
      level.height * part * pitch.y,
    );
    this.numbers(pen, family, dark);
    if (this.cursor) {
      const { row, col } = this.cursor;
      const x = box.x + (col - this.left) * pitch.x;
      const y = box.y + (row - this.top) * pitch.y;
      pen.strokeStyle = accent;
      pen.globalAlpha = 0.35;
      pen.strokeRect(box.x - 2, y, box.width + 4, Math.max(pitch.y, 1));
      pen.strokeRect(x, box.y - 2, Math.max(pitch.x, 1), box.height + 4);
      pen.globalAlpha = 1;
      pen.lineWidth = 2;
      pen.strokeRect(x, y, Math.max(pitch.x, 2), Math.max(pitch.y, 2));
    }
    pen.restore();
    pen.strokeStyle = line;
    pen.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
    this.names(pen, style.color, soft, lies);

    const coarse = `Each dot shows the largest of ${part} × ${part} numbers. Zoom in to see all.`;
    const bent = `The colour scale is a square root: its middle is ${numeral(picture.high / 4, 0, 3)}.`;
    this.note.textContent = [picture.matrix.root ? bent : "", k > 0 ? coarse : ""].join(" ").trim();
    const image = new ImageData(256, 1);
    image.data.set(picture.colours(dark));
    this.bar.getContext("2d")!.putImageData(image, 0, 0);
  }

  /** The visible rows or columns. */
  private seen(side: "row" | "col"): [number, number] {
    const { rows, cols } = this.picture.matrix;
    const [start, count] = side === "row" ? [this.top, rows] : [this.left, cols];
    return [Math.floor(start), Math.min(count, Math.ceil(start + count / this.zoom))];
  }

  private numbers(pen: CanvasRenderingContext2D, family: string, dark: boolean) {
    const { box, pitch, picture } = this;
    if (Math.min(pitch.x, pitch.y * 1.8) < ROOMY) return;
    const colours = picture.colours(dark);
    pen.font = `11px ${family}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const digits = clamp(1 - Math.floor(Math.log10(0.99 * picture.high)), 0, 4);
    for (let row = this.seen("row")[0]; row < this.seen("row")[1]; row++) {
      for (let col = this.seen("col")[0]; col < this.seen("col")[1]; col++) {
        const x = value(picture.matrix, row, col);
        if (Number.isNaN(x)) continue;
        pen.fillStyle = inkOn(colours, picture.byte(row, col) / 255);
        const text = x === 0 ? "0" : x.toFixed(digits).replace("-", "−");
        const at = [box.x + (col + 0.5 - this.left) * pitch.x, box.y + (row + 0.5 - this.top) * pitch.y];
        pen.fillText(text, at[0], at[1]);
      }
    }
  }

  /** Draws the names of rows and columns: all of them, or as many as are legible. */
  private names(pen: CanvasRenderingContext2D, ink: string, soft: string, lies: boolean) {
    const { box, pitch, cursor, options } = this;
    const family = getComputedStyle(this.element).fontFamily;
    const write = (text: string, x: number, y: number, turn: number, align: CanvasTextAlign, on: boolean) => {
      pen.save();
      pen.translate(x, y);
      pen.rotate(turn);
      pen.font = `${on ? "600 " : ""}${FONT}px ${family}`;
      pen.fillStyle = on ? ink : soft;
      pen.textAlign = align;
      pen.textBaseline = "middle";
      pen.fillText(text, 0, 0);
      pen.restore();
    };
    const each = (side: "row" | "col", cell: number, put: (at: number, on: boolean) => void) => {
      const step = roundUp(Math.max(1, (FONT + 3) / cell));
      const current = cursor?.[side];
      const [start, stop] = this.seen(side);
      for (let at = Math.ceil(start / step) * step; at < stop; at += step) {
        // The name at the cursor replaces the names next to it.
        if (current === undefined || Math.abs(at - current) * cell > FONT + 2) put(at, false);
      }
      if (current !== undefined && current >= start && current < stop) put(current, true);
    };
    each("row", pitch.y, (row, on) => {
      const y = box.y + (row + 0.5 - this.top) * pitch.y;
      if (y > box.y - 1 && y < box.y + box.height + 1)
        write(short(this.name("row", row)), box.x - 6, y, 0, "right", on);
    });
    each("col", lies ? Infinity : pitch.x, (col, on) => {
      const x = box.x + (col + 0.5 - this.left) * pitch.x;
      if (x < box.x - 1 || x > box.x + box.width + 1) return;
      const text = short(this.name("col", col));
      if (lies) write(text, x, box.y - FONT / 2 - 3, 0, "center", on);
      else write(text, x, box.y - 6, -Math.PI / 2, "left", on);
    });
    if (options.rowTitle) write(options.rowTitle, FONT / 2 + 1, box.y + box.height / 2, -Math.PI / 2, "center", false);
    if (options.colTitle) write(options.colTitle, box.x + box.width / 2, FONT / 2 + 1, 0, "center", false);
  }
}
