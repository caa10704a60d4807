/** Tables of 256 colours. Their lightness is monotonic, so that they also work for colour-blind
 *  readers and in grey. */

const LIGHT = ["#fbfdff", "#e3eef9", "#c3dbef", "#96c3e1", "#62a5d1", "#3884bf", "#1b62a5", "#0a4480", "#08264f"];
const DARK = ["#14181d", "#12293f", "#134066", "#1a598c", "#2b76b0", "#4c96cd", "#7cb6e1", "#b3d6f1", "#eef7ff"];
const SIGNED_LIGHT = ["#7f3b08", "#be630a", "#ef9e3c", "#fed7a2", "#fbfbfb", "#c3dbef", "#62a5d1", "#1b62a5", "#08264f"];
const SIGNED_DARK = ["#ffd9a8", "#f0a14a", "#b8690f", "#5f3708", "#14181d", "#134066", "#2b76b0", "#7cb6e1", "#eef7ff"];

/** 256 colours as bytes r, g, b, a. */
export type ColourTable = Uint8ClampedArray;

function interpolateColours(stops: string[]): ColourTable {
  const rgb = stops.map((s) => [1, 3, 5].map((i) => Number.parseInt(s.slice(i, i + 2), 16)));
  const out = new Uint8ClampedArray(256 * 4);
  for (let i = 0; i < 256; i += 1) {
    const x = (i / 255) * (rgb.length - 1);
    const left = Math.min(Math.floor(x), rgb.length - 2);
    for (let c = 0; c < 3; c += 1) {
      out[4 * i + c] = rgb[left][c] + (x - left) * (rgb[left + 1][c] - rgb[left][c]);
    }
    out[4 * i + 3] = 255;
  }
  return out;
}

const tableCache = new Map<string, ColourTable>();
function getTable(name: string, stops: string[]): ColourTable {
  let cached = tableCache.get(name);
  if (!cached) tableCache.set(name, (cached = interpolateColours(stops)));
  return cached;
}

/** Colours of weights: 0 has the colour of the page. */
export function getSequentialColours(dark: boolean): ColourTable {
  return dark ? getTable("dark", DARK) : getTable("light", LIGHT);
}

/** Colours of scores: orange below 0, blue above 0, and the colour of the page at 0. */
export function getDivergingColours(dark: boolean): ColourTable {
  return dark ? getTable("signed dark", SIGNED_DARK) : getTable("signed light", SIGNED_LIGHT);
}

/** One colour of a table for x from 0 to 1, as CSS. */
export function formatColour(table: ColourTable, x: number): string {
  const i = 4 * Math.round(255 * Math.min(Math.max(x, 0), 1));
  return `rgb(${table[i]} ${table[i + 1]} ${table[i + 2]})`;
}

/** Black or white, whichever is legible on this colour. */
export function chooseTextColour(table: ColourTable, x: number): string {
  const i = 4 * Math.round(255 * Math.min(Math.max(x, 0), 1));
  return 0.299 * table[i] + 0.587 * table[i + 1] + 0.114 * table[i + 2] > 140 ? "#000" : "#fff";
}

/** Colours that colour-blind readers can distinguish (Okabe and Ito), for lines and heads. */
export const DISTINCT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f"];
