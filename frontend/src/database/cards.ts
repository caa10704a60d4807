/** The cards of the soft and the hard answer: the value, its sources, entropy and effective rows. */

import { clipText, formatFixed, h, replaceChildren, s } from "../dom";
import type { Answer } from "../equation";
import { MAX_LARGE_FONT_LETTERS, formatWeight, formatPercent, formatRounded, formatOneLine, formatValue } from "../numbers";
import { formatField } from "./state";

/** Values with their own colour; the others share one. */
const MAX_SHARES = 6;
/** Values that are named in a tie. */
const MAX_NAMED_TIES = 3;

export interface Card {
  element: HTMLElement;
  showAnswer(answer: Answer, values: unknown[]): void;
  clear(): void;
}

/** Names the values that have as much weight as the one that is shown. */
export function describeWeightTies({ values }: Answer): string {
  const [first, ...others] = values;
  const equal = others.filter(({ weight }) => weight > (1 - 1e-6) * first.weight).map(({ value }) => formatOneLine(value));
  if (!equal.length) return "";
  const names = equal.length > MAX_NAMED_TIES ? `${equal.length} others` : equal.join(" and ");
  return `${names} ${equal.length > 1 ? "have" : "has"} the same weight.`;
}

/** Says how many rows share the largest score. */
export function describeScoreTies({ scores, rows }: Answer): string {
  const top = rows.length ? scores[rows[0].index] : NaN;
  const tiedCount = scores.filter((score) => score === top).length;
  return tiedCount > 1 ? `${tiedCount} rows have the largest score; the first one is used.` : "";
}

/** `describeTies` returns a note about ties. */
export function createCard(name: string, title: string, hint: string, describeTies: (answer: Answer) => string): Card {
  const heading = h("h3", {}, title);
  const value = h("p", { class: "value", test: `${name}-value` });
  const tieNote = h("p", { class: "hint", test: `${name}-tie`, hidden: true });
  const source = h("div", { class: "source" });
  const entropy = h("output", { test: `${name}-entropy` });
  const effective = h("output", { test: `${name}-effective` });
  const element = h(
    "section",
    { class: `panel answer ${name}`, "aria-label": title },
    heading,
    h("p", { class: "hint" }, hint),
    value,
    tieNote,
    source,
    h(
      "dl",
      {},
      h("div", {}, h("dt", {}, "entropy −Σ α ln α"), h("dd", {}, entropy)),
      h("div", {}, h("dt", {}, "effective rows exp(entropy)"), h("dd", {}, effective)),
    ),
  );
  const showNumber = (output: HTMLOutputElement, x: number, text: string) => {
    output.textContent = text;
    output.dataset.value = String(x);
  };
  return {
    element,
    showAnswer(answer, values) {
      value.textContent = formatValue(answer.shown);
      value.classList.toggle("long", value.textContent.length > MAX_LARGE_FONT_LETTERS);
      value.dataset.value = formatField(answer.shown);
      tieNote.textContent = describeTies(answer);
      tieNote.hidden = !tieNote.textContent;
      showNumber(entropy, answer.entropy, formatFixed(answer.entropy));
      showNumber(effective, answer.effective, `${formatFixed(answer.effective, 2)} of ${answer.total.toLocaleString("en")}`);
      if (answer.values.length) replaceChildren(source, ...createShares(answer));
      else if (typeof answer.spread === "number") replaceChildren(source, createDotLine(answer, values as number[]), createSpreadNote(answer));
      else replaceChildren(source);
    },
    clear() {
      value.textContent = "–";
      tieNote.hidden = true;
      replaceChildren(source);
      for (const output of [entropy, effective]) showNumber(output, Number.NaN, "–");
    },
  };
}

function createSpreadNote(answer: Answer): HTMLElement | null {
  const deviation = answer.spread!;
  if (!answer.isNormalized || !(deviation > 0)) return null;
  const spread = `± ${Number(deviation.toPrecision(3))}`;
  const text = answer.valueIsMean ? `standard deviation of the values: ${spread}` : `mean of all rows: ${formatRounded(answer.mean as number)} ${spread}`;
  return h("p", { class: "hint" }, text);
}

/** Values that are not numbers: the weight of each, as parts of one bar. */
function createShares(answer: Answer): HTMLElement[] {
  const all = answer.values.map(({ value, weight }) => ({ text: formatValue(value), weight }));
  const limit = all.length > MAX_SHARES ? MAX_SHARES - 1 : MAX_SHARES;
  const parts = all.slice(0, limit).map((share, colour) => ({ ...share, colour }));
  const restWeight = all.slice(limit).reduce((sum, share) => sum + share.weight, 0);
  if (restWeight > 0.0005) parts.push({ text: `${all.length - limit} others`, weight: restWeight, colour: MAX_SHARES });
  const totalWeight = parts.reduce((sum, share) => sum + Math.max(share.weight, 0), 0) || 1;
  return [
    h(
      "div",
      { class: "shares", "aria-hidden": "true" },
      ...parts.filter(({ weight }) => weight >= 0.002 * totalWeight).map(({ weight, colour }) =>
        h("i", { class: `share-${colour}`, style: { width: `${(100 * Math.max(weight, 0)) / totalWeight}%` } }),
      ),
    ),
    h(
      "ul",
      { class: "legend" },
      ...parts
        .filter(({ weight }, i) => i < 1 || Math.abs(weight) >= 0.005)
        .map(({ text, weight, colour }) =>
          h(
            "li",
            {},
            h("i", { class: `share-${colour}`, "aria-hidden": "true" }),
            h("span", {}, clipText(text)),
            h("span", { class: "number" }, (answer.isNormalized ? formatPercent : formatWeight)(weight)),
          ),
        ),
    ),
  ];
}

/** Values that are numbers: a dot on a line for each row, sized by its weight, and a mark for the answer. */
function createDotLine(answer: Answer, values: number[]): HTMLElement {
  const known = values.filter((x) => Number.isFinite(x));
  const shown = answer.shown as number;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const [width, pad] = [600, 16];
  const xOf = (x: number) => pad + ((x - low) / (high - low || 1)) * (width - 2 * pad);
  const top = Math.max(...answer.weights.map(Math.abs), 1e-12);
  const isInside = Number.isFinite(shown) && shown >= low && shown <= high;
  const plot = s(
    "svg",
    { viewBox: `0 0 ${width} 50`, class: "line", role: "img", "aria-label": `values from ${formatRounded(low)} to ${formatRounded(high)}, the answer at ${formatRounded(shown)}` },
    s("line", { x1: pad, x2: width - pad, y1: 25, y2: 25, class: "axis" }),
    ...values.map((x, i) =>
      Number.isFinite(x)
        ? s("circle", { cx: xOf(x), cy: 25, r: 2.5 + 11 * Math.sqrt(Math.abs(answer.weights[i]) / top), class: "dot" })
        : null,
    ),
    isInside ? s("line", { x1: xOf(shown), x2: xOf(shown), y1: 3, y2: 47, class: "mark" }) : null,
  );
  const labels = [formatRounded(low), "values of the rows; the size of a dot is its weight", formatRounded(high)].map((text) => h("span", {}, text));
  return h("div", {}, plot, h("div", { class: "ends", "aria-hidden": "true" }, ...labels));
}
