/** A heatmap of a matrix, with panning, zooming and reading of cells by pointer and keyboard. */

import { chooseTextColour } from "./colours";
import { h, throttleToFrame } from "./dom";
import { addGestures } from "./gestures";
import { clamp, formatSignificant, roundUp } from "./numbers";
import { getRoundingError, Picture, readValue, type Matrix } from "./picture";
import type { ViewContext } from "./view";

export interface HeatmapOptions {
  /** The label for screen readers. */
  label: string;
  matrix: Matrix;
  /** A name for each row and column; by default their numbers. */
  rowNames?: string[];
  colNames?: string[];
  rowTitle?: string;
  colTitle?: string;
  context: Pick<ViewContext, "announce" | "isDark">;
  /** The element of the view, which gets the event `theme`. */
  viewElement: EventTarget;
  /** Called with the cell under the cursor; null if there is none. */
  onCell?(cell: { row: number; col: number; value: number } | null): void;
  /** The longest side of the picture in CSS pixels. */
  side?: number;
  test?: string;
}

const FONT_PIXELS = 12;
const MAX_NAME_LETTERS = 16;
/** The smallest cell (CSS pixels) that shows its number, and the largest cell. */
const MIN_NUMBERED_CELL_PIXELS = 38;
const MAX_CELL_PIXELS = 72;
const KEYBOARD_HELP =
  "Arrow keys move the cell, Home and End go to the row's ends, plus and minus zoom, " +
  "0 shows all, Shift and arrow keys pan.";

const truncateName = (text: string) => (text.length > MAX_NAME_LETTERS ? `${text.slice(0, MAX_NAME_LETTERS - 1)}…` : text);

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
  private readonly handleThemeChange = () => this.redraw();
  /** The zoom factor, and the row and column at the top left corner. */
  private zoom = 1;
  private top = 0;
  private left = 0;
  private cursor: { row: number; col: number } | null = null;
  /** Redraws the heatmap in the next frame. */
  readonly redraw = throttleToFrame(() => this.element.isConnected && this.draw());
  /** The picture inside the canvas, in CSS pixels. */
  private box = { x: 0, y: 0, width: 1, height: 1 };

  constructor(private readonly options: HeatmapOptions) {
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
    const createButton = (text: string, label: string, action: () => void) =>
      h("button", { type: "button", "aria-label": label, title: label, on: { click: action } }, text);
    const tools = h(
      "span",
      { class: "heatmap-tools" },
      createButton("−", "Zoom out", () => this.zoomBy(1 / 1.5)),
      createButton("+", "Zoom in", () => this.zoomBy(1.5)),
      createButton("all", "Show all", () => this.showAll()),
    );
    const scale = h("span", { class: "heatmap-scale" }, this.low, this.bar, this.high);
    this.foot = h("div", { class: "heatmap-foot" }, this.readout, scale, tools);
    this.element = h("div", { class: "heatmap" }, this.canvas, this.foot, this.note);
    addGestures(this.canvas, {
      hover: (x, y) => this.handleHover(x, y),
      leave: () => this.clearCursor(),
      drag: (x, y) => this.pan(-y / this.pitch.y, -x / this.pitch.x),
      scale: (factor, x, y) => this.zoomBy(factor, x, y),
      press: (key, shift) => this.handleKey(key, shift),
    });
    this.describeMatrix();
    this.observer = new ResizeObserver(() => this.redraw());
    this.observer.observe(this.element);
    options.viewElement.addEventListener("theme", this.handleThemeChange);
  }

  /** Shows another matrix; zoom and position stay if its shape is the same. */
  update(matrix: Matrix, names: Pick<HeatmapOptions, "rowNames" | "colNames" | "label"> | null = null) {
    const { rows, cols } = this.picture.matrix;
    this.picture = new Picture(matrix);
    if (names) Object.assign(this.options, names);
    if (matrix.rows !== rows || matrix.cols !== cols) {
      this.zoom = 1;
      this.top = this.left = 0;
      this.cursor = null;
    }
    this.describeMatrix();
    this.redraw();
  }

  /** The cell under the cursor. */
  moveCursor(row: number, col: number) {
    this.cursor = { row, col };
    this.reportCell();
  }

  destroy() {
    this.observer.disconnect();
    this.options.viewElement.removeEventListener("theme", this.handleThemeChange);
    this.redraw.stop();
  }

  private nameOf(side: "row" | "col", index: number): string {
    const names = side === "row" ? this.options.rowNames : this.options.colNames;
    return names?.[index] ?? String(index);
  }

  private describeMatrix() {
    const { rows, cols } = this.picture.matrix;
    const { label } = this.options;
    this.canvas.setAttribute("aria-label", `${label}: ${rows} rows, ${cols} columns. ${KEYBOARD_HELP}`);
    this.low.textContent = formatSignificant(this.picture.low, 0, 3);
    this.high.textContent = formatSignificant(this.picture.high, 0, 3);
    if (this.cursor) this.reportCell();
    else this.readout.textContent = `${rows} × ${cols}`;
  }

  private formatCell(): string {
    const { row, col } = this.cursor!;
    const { matrix } = this.picture;
    const number = formatSignificant(readValue(matrix, row, col), getRoundingError(matrix, row, col));
    return `${this.nameOf("row", row)} → ${this.nameOf("col", col)}  ${number}`;
  }

  private reportCell() {
    const { row, col } = this.cursor!;
    this.readout.textContent = this.formatCell();
    this.options.onCell?.({ row, col, value: readValue(this.picture.matrix, row, col) });
    this.redraw();
  }

  // Geometry: `pitch` CSS pixels per cell.

  private get pitch() {
    const { rows, cols } = this.picture.matrix;
    return { x: (this.zoom * this.box.width) / cols, y: (this.zoom * this.box.height) / rows };
  }

  private showAll() {
    this.zoom = 1;
    this.top = this.left = 0;
    this.redraw();
  }

  /** Zooms about a point of the canvas; by default about the cursor or the centre. */
  private zoomBy(factor: number, x?: number, y?: number) {
    const { box, pitch, cursor } = this;
    if (x === undefined || y === undefined) {
      x = cursor ? box.x + (cursor.col + 0.5 - this.left) * pitch.x : box.x + box.width / 2;
      y = cursor ? box.y + (cursor.row + 0.5 - this.top) * pitch.y : box.y + box.height / 2;
    }
    const [col, row] = [this.left + (x - box.x) / pitch.x, this.top + (y - box.y) / pitch.y];
    const { rows, cols } = this.picture.matrix;
    const maxZoom = Math.max(1, MAX_CELL_PIXELS / Math.max(box.width / cols, box.height / rows));
    this.zoom = clamp(this.zoom * factor, 1, maxZoom);
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

  private handleHover(x: number, y: number) {
    const cell = this.cellAt(x, y);
    if (!cell) {
      if (!this.canvas.matches(":focus")) this.clearCursor();
    } else if (cell.row !== this.cursor?.row || cell.col !== this.cursor.col) {
      this.moveCursor(cell.row, cell.col);
    }
  }

  private clearCursor() {
    if (!this.cursor) return;
    this.cursor = null;
    this.describeMatrix();
    this.options.onCell?.(null);
    this.redraw();
  }

  private handleKey(key: string, shift: boolean): boolean {
    const { rows, cols } = this.picture.matrix;
    const steps: Record<string, [number, number]> = {
      ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -Infinity], End: [0, Infinity],
    }; // prettier-ignore
    const step = steps[key];
    if (key === "+" || key === "=") this.zoomBy(1.5);
    else if (key === "-") this.zoomBy(1 / 1.5);
    else if (key === "0") this.showAll();
    else if (step && shift && key.startsWith("Arrow")) {
      this.pan((step[0] * rows) / this.zoom / 8, (step[1] * cols) / this.zoom / 8);
    } else if (step) {
      const origin = this.cursor ?? { row: Math.floor(this.top), col: Math.floor(this.left) };
      const offset = this.cursor ? step : [0, 0];
      const row = clamp(origin.row + offset[0], 0, rows - 1);
      const col = clamp(origin.col + offset[1], 0, cols - 1);
      this.top = clamp(this.top, row + 1 - rows / this.zoom, row);
      this.left = clamp(this.left, col + 1 - cols / this.zoom, col);
      this.moveCursor(row, col);
      this.options.context.announce(this.formatCell());
    } else return false;
    return true;
  }

  // Drawing.

  private draw() {
    const { canvas, picture, options } = this;
    const { rows, cols } = picture.matrix;
    const style = getComputedStyle(this.element);
    const dark = options.context.isDark();
    // Colours are read from elements, because a CSS variable may hold the colours of both themes.
    const accent = style.accentColor;
    const [softColour, lineColour] = [getComputedStyle(this.note).color, getComputedStyle(this.bar).borderColor];
    const ctx = canvas.getContext("2d")!;
    const family = style.fontFamily;
    ctx.font = `${FONT_PIXELS}px ${family}`;

    const measureNames = (names: string[] | undefined, count: number) =>
      names
        ? Math.max(...names.slice(0, 4096).map((name) => ctx.measureText(truncateName(name)).width))
        : ctx.measureText(String(count)).width;
    const [rowWidth, colWidth] = [measureNames(options.rowNames, rows), measureNames(options.colNames, cols)];
    const width = this.element.clientWidth || 320;
    const leftMargin = Math.ceil(rowWidth) + 8 + (options.rowTitle ? FONT_PIXELS + 6 : 0);
    const available = Math.min(width - leftMargin - 2, options.side ?? 560);
    // Cells are square unless the matrix is very long.
    const aspectRatio = clamp(rows / cols, 1 / 6, 2);
    const plotWidth = Math.max(32, Math.min(available, (options.side ?? 560) / aspectRatio, cols * MAX_CELL_PIXELS));
    const isHorizontal = colWidth + 6 < (this.zoom * plotWidth) / cols;
    const topMargin = (isHorizontal ? FONT_PIXELS + 6 : Math.ceil(colWidth) + 8) + (options.colTitle ? FONT_PIXELS + 6 : 0);
    this.box = { x: leftMargin, y: topMargin, width: plotWidth, height: plotWidth * aspectRatio };
    const { box, pitch } = this;

    const ratio = devicePixelRatio || 1;
    const [outer, height] = [leftMargin + plotWidth + 2, topMargin + box.height + 2];
    canvas.width = Math.round(outer * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.setProperty("width", `${outer}px`);
    canvas.style.setProperty("height", `${height}px`);
    this.foot.style.setProperty("max-width", `${Math.max(outer, 360)}px`);
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);

    const levelIndex = picture.levelFor(Math.min(pitch.x, pitch.y) * ratio);
    const cellsPerDot = 2 ** levelIndex;
    ctx.save();
    ctx.beginPath();
    ctx.rect(box.x, box.y, box.width, box.height);
    ctx.clip();
    ctx.imageSmoothingEnabled = false;
    const level = picture.getCanvas(levelIndex, dark);
    // The complete picture is drawn and clipped, so that partial cells at the edges are visible.
    ctx.drawImage(
      level,
      box.x - this.left * pitch.x,
      box.y - this.top * pitch.y,
      level.width * cellsPerDot * pitch.x,
      level.height * cellsPerDot * pitch.y,
    );
    this.drawNumbers(ctx, family, dark);
    if (this.cursor) {
      const { row, col } = this.cursor;
      const x = box.x + (col - this.left) * pitch.x;
      const y = box.y + (row - this.top) * pitch.y;
      ctx.strokeStyle = accent;
      ctx.globalAlpha = 0.35;
      ctx.strokeRect(box.x - 2, y, box.width + 4, Math.max(pitch.y, 1));
      ctx.strokeRect(x, box.y - 2, Math.max(pitch.x, 1), box.height + 4);
      ctx.globalAlpha = 1;
      ctx.lineWidth = 2;
      ctx.strokeRect(x, y, Math.max(pitch.x, 2), Math.max(pitch.y, 2));
    }
    ctx.restore();
    ctx.strokeStyle = lineColour;
    ctx.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
    this.drawNames(ctx, style.color, softColour, isHorizontal);

    const coarseNote = `Each dot shows the largest of ${cellsPerDot} × ${cellsPerDot} numbers. Zoom in to see all.`;
    const rootNote = `The colour scale is a square root: its middle is ${formatSignificant(picture.high / 4, 0, 3)}.`;
    this.note.textContent = [picture.matrix.hasRootScale ? rootNote : "", levelIndex > 0 ? coarseNote : ""].join(" ").trim();
    const image = new ImageData(256, 1);
    image.data.set(picture.getColours(dark));
    this.bar.getContext("2d")!.putImageData(image, 0, 0);
  }

  /** The visible rows or columns. */
  private getVisibleRange(side: "row" | "col"): [number, number] {
    const { rows, cols } = this.picture.matrix;
    const [start, count] = side === "row" ? [this.top, rows] : [this.left, cols];
    return [Math.floor(start), Math.min(count, Math.ceil(start + count / this.zoom))];
  }

  private drawNumbers(ctx: CanvasRenderingContext2D, family: string, dark: boolean) {
    const { box, pitch, picture } = this;
    if (Math.min(pitch.x, pitch.y * 1.8) < MIN_NUMBERED_CELL_PIXELS) return;
    const colours = picture.getColours(dark);
    ctx.font = `11px ${family}`;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    const digits = clamp(1 - Math.floor(Math.log10(0.99 * picture.high)), 0, 4);
    for (let row = this.getVisibleRange("row")[0]; row < this.getVisibleRange("row")[1]; row++) {
      for (let col = this.getVisibleRange("col")[0]; col < this.getVisibleRange("col")[1]; col++) {
        const x = readValue(picture.matrix, row, col);
        if (Number.isNaN(x)) continue;
        ctx.fillStyle = chooseTextColour(colours, picture.byteAt(row, col) / 255);
        const text = x === 0 ? "0" : x.toFixed(digits).replace("-", "−");
        const position = [box.x + (col + 0.5 - this.left) * pitch.x, box.y + (row + 0.5 - this.top) * pitch.y];
        ctx.fillText(text, position[0], position[1]);
      }
    }
  }

  /** Draws the names of rows and columns: all of them, or as many as are legible. */
  private drawNames(ctx: CanvasRenderingContext2D, textColour: string, softColour: string, isHorizontal: boolean) {
    const { box, pitch, cursor, options } = this;
    const family = getComputedStyle(this.element).fontFamily;
    const writeText = (text: string, x: number, y: number, angle: number, align: CanvasTextAlign, isHighlighted: boolean) => {
      ctx.save();
      ctx.translate(x, y);
      ctx.rotate(angle);
      ctx.font = `${isHighlighted ? "600 " : ""}${FONT_PIXELS}px ${family}`;
      ctx.fillStyle = isHighlighted ? textColour : softColour;
      ctx.textAlign = align;
      ctx.textBaseline = "middle";
      ctx.fillText(text, 0, 0);
      ctx.restore();
    };
    const drawEach = (side: "row" | "col", cell: number, drawName: (index: number, isHighlighted: boolean) => void) => {
      const step = roundUp(Math.max(1, (FONT_PIXELS + 3) / cell));
      const current = cursor?.[side];
      const [start, stop] = this.getVisibleRange(side);
      for (let index = Math.ceil(start / step) * step; index < stop; index += step) {
        // The name at the cursor replaces the names next to it.
        if (current === undefined || Math.abs(index - current) * cell > FONT_PIXELS + 2) drawName(index, false);
      }
      if (current !== undefined && current >= start && current < stop) drawName(current, true);
    };
    drawEach("row", pitch.y, (row, isHighlighted) => {
      const y = box.y + (row + 0.5 - this.top) * pitch.y;
      if (y > box.y - 1 && y < box.y + box.height + 1)
        writeText(truncateName(this.nameOf("row", row)), box.x - 6, y, 0, "right", isHighlighted);
    });
    drawEach("col", isHorizontal ? Infinity : pitch.x, (col, isHighlighted) => {
      const x = box.x + (col + 0.5 - this.left) * pitch.x;
      if (x < box.x - 1 || x > box.x + box.width + 1) return;
      const text = truncateName(this.nameOf("col", col));
      if (isHorizontal) writeText(text, x, box.y - FONT_PIXELS / 2 - 3, 0, "center", isHighlighted);
      else writeText(text, x, box.y - 6, -Math.PI / 2, "left", isHighlighted);
    });
    if (options.rowTitle) writeText(options.rowTitle, FONT_PIXELS / 2 + 1, box.y + box.height / 2, -Math.PI / 2, "center", false);
    if (options.colTitle) writeText(options.colTitle, box.x + box.width / 2, FONT_PIXELS / 2 + 1, 0, "center", false);
  }
}
