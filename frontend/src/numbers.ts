/** Numbers and cells as text. */

import { formatFixed } from "./dom";
import { isTensor } from "./wire";

/** A value with more letters is shown in a smaller font. */
export const MAX_LARGE_FONT_LETTERS = 60;
/** Numbers of a vector that are shown if it is one cell of several. */
const MAX_VECTOR_NUMBERS = 8;

export function clamp(x: number, low: number, high: number): number {
  return Math.min(Math.max(x, low), high);
}

/** The smallest of …, 0.5, 1, 2, 5, 10, 20, … that is not smaller, up to rounding. */
export function roundUp(step: number): number {
  const power = 10 ** Math.floor(Math.log10(step));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= step * (1 - 1e-9))!;
}

/** A number with the digits that its `error` allows, or with `maxDigits` digits. */
export function formatSignificant(x: number, error = 0, maxDigits = 4): string {
  if (Number.isNaN(x)) return "missing";
  if (x === 0 && !error) return "0";
  const size = Math.abs(error || x);
  if (size < 1e-6 || size >= 1e6) return x.toExponential(maxDigits - 1).replace("-", "−");
  const digits = clamp((error ? 1 : maxDigits - 1) - Math.floor(Math.log10(size)), 0, 8);
  const text = x.toFixed(digits).replace("-", "−");
  return error ? `${text} ± ${error.toFixed(digits)}` : text;
}

/** Numbers of one axis, all with the decimals that its `maxDigits` leading digits need. */
export function formatAxisNumbers(xs: number[], maxDigits = 3): string[] {
  const span = Math.max(...xs) - Math.min(...xs);
  if (!(span > 1e-6 && span < 1e6)) return xs.map((x) => formatSignificant(x, 0, maxDigits));
  return xs.map((x) => formatFixed(x, clamp(maxDigits - 1 - Math.floor(Math.log10(span)), 0, 8)));
}

/** A number with six digits, or with all digits before the point if those are more. */
export function formatRounded(x: number): string {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "missing" : x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  const formatPlain = () => (size < 1e6 ? String(Number(x.toPrecision(6))) : x.toFixed(0));
  const text = size >= 1e15 || (size > 0 && size < 1e-3) ? x.toExponential(3) : formatPlain();
  return text.replaceAll("-", "−");
}

/** A weight or score with its decimals, or with four digits if it is large. */
export function formatWeight(x: number, digits = 3): string {
  return Math.abs(x) < 1e4 || !Number.isFinite(x) ? formatFixed(x, digits) : x.toExponential(3).replaceAll("-", "−");
}

/** `1 row`, `2,000 rows`. */
export function formatCount(count: number, noun: string): string {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

/** A fraction as a percentage; small ones with one more digit. */
export function formatPercent(x: number): string {
  return `${formatFixed(100 * x, x > 0 && x < 0.0995 ? 1 : 0)} %`;
}

/** A cell of a record; only the first numbers of a long vector. */
function formatCell(x: unknown): string {
  const isCut = isTensor(x) && x.data.length > MAX_VECTOR_NUMBERS;
  return isCut ? `${formatValue(x.data.slice(0, MAX_VECTOR_NUMBERS))}, …` : formatValue(x);
}

/** A cell as one line. */
export function formatValue(x: unknown): string {
  if (x === null || x === undefined) return "nothing";
  if (Number.isSafeInteger(x)) return String(x).replace("-", "−");
  if (typeof x === "number") return formatRounded(x);
  if (ArrayBuffer.isView(x)) return formatValue(Array.from(x as Float64Array));
  if (Array.isArray(x)) return x.map(formatValue).join(", ");
  if (isTensor(x)) return formatValue(x.data);
  if (typeof x === "object") return Object.entries(x).map(([name, cell]) => `${name}: ${formatCell(cell)}`).join(", ");
  return String(x);
}

/** A cell in a sentence: one line of at most `maxLetters` letters, as Python's `format_one_line`. */
export function formatOneLine(x: unknown, maxLetters = 40): string {
  const letters = Array.from(formatValue(x).trim().replace(/\s+/g, " "));
  return letters.length > maxLetters ? `${letters.slice(0, maxLetters - 1).join("")}…` : letters.join("");
}
