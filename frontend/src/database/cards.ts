/** The cards of the soft and the hard answer: the value, its sources, entropy and effective rows. */

import { clipped, fixed, h, put, s } from "../dom";
import type { Answer } from "../equation";
import { READ, figure as weighed, percent, rounded, short, formatValue } from "../numbers";
import { spell } from "./state";

/** Values with their own colour; the others share one. */
const SHARES = 6;
/** Values that are named in a tie. */
const NAMED = 3;

export interface Card {
  element: HTMLElement;
  show(answer: Answer, values: unknown[]): void;
  fail(): void;
}

/** Names the values that have as much weight as the one that is shown. */
export function alsoHeaviest({ values }: Answer): string {
  const [first, ...others] = values;
  const equal = others.filter(({ weight }) => weight > (1 - 1e-6) * first.weight).map(({ value }) => short(value));
  if (!equal.length) return "";
  const named = equal.length > NAMED ? `${equal.length} others` : equal.join(" and ");
  return `${named} ${equal.length > 1 ? "have" : "has"} the same weight.`;
}

/** Says how many rows share the largest score. */
export function alsoBest({ scores, rows }: Answer): string {
  const top = rows.length ? scores[rows[0].index] : NaN;
  const tied = scores.filter((score) => score === top).length;
  return tied > 1 ? `${tied} rows have the largest score; the first one is used.` : "";
}

/** `tie` returns a note about ties. */
export function card(name: string, title: string, hint: string, tie: (answer: Answer) => string): Card {
  const heading = h("h3", {}, title);
  const value = h("p", { class: "value", test: `${name}-value` });
  const tied = h("p", { class: "hint", test: `${name}-tie`, hidden: true });
  const source = h("div", { class: "source" });
  const entropy = h("output", { test: `${name}-entropy` });
  const effective = h("output", { test: `${name}-effective` });
  const element = h(
    "section",
    { class: `panel answer ${name}`, "aria-label": title },
    heading,
    h("p", { class: "hint" }, hint),
    value,
    tied,
    source,
    h(
      "dl",
      {},
      h("div", {}, h("dt", {}, "entropy −Σ α ln α"), h("dd", {}, entropy)),
      h("div", {}, h("dt", {}, "effective rows exp(entropy)"), h("dd", {}, effective)),
    ),
  );
  const figure = (at: HTMLOutputElement, x: number, text: string) => {
    at.textContent = text;
    at.dataset.value = String(x);
  };
  return {
    element,
    show(answer, values) {
      value.textContent = formatValue(answer.pooled);
      value.classList.toggle("long", value.textContent.length > READ);
      value.dataset.value = spell(answer.pooled);
      tied.textContent = tie(answer);
      tied.hidden = !tied.textContent;
      figure(entropy, answer.entropy, fixed(answer.entropy));
      figure(effective, answer.effective, `${fixed(answer.effective, 2)} of ${answer.total.toLocaleString("en")}`);
      if (answer.values.length) put(source, ...shares(answer));
      else if (typeof answer.spread === "number") put(source, line(answer, values as number[]), spread(answer));
      else put(source);
    },
    fail() {
      value.textContent = "–";
      tied.hidden = true;
      put(source);
      for (const at of [entropy, effective]) figure(at, Number.NaN, "–");
    },
  };
}

function spread(answer: Answer): HTMLElement | null {
  const far = answer.spread!;
  return answer.shares && far > 0
    ? h("p", { class: "hint" }, `standard deviation of the values: ± ${Number(far.toPrecision(3))}`)
    : null;
}

/** Values that are not numbers: the weight of each, as parts of one bar. */
function shares(answer: Answer): HTMLElement[] {
  const all = answer.values.map(({ value, weight }) => ({ text: formatValue(value), weight }));
  const most = all.length > SHARES ? SHARES - 1 : SHARES;
  const parts = all.slice(0, most).map((share, colour) => ({ ...share, colour }));
  const rest = all.slice(most).reduce((sum, share) => sum + share.weight, 0);
  if (rest > 0.0005) parts.push({ text: `${all.length - most} others`, weight: rest, colour: SHARES });
  const whole = parts.reduce((sum, share) => sum + Math.max(share.weight, 0), 0) || 1;
  return [
    h(
      "div",
      { class: "shares", "aria-hidden": "true" },
      ...parts.filter(({ weight }) => weight >= 0.002 * whole).map(({ weight, colour }) =>
        h("i", { class: `share-${colour}`, style: { width: `${(100 * Math.max(weight, 0)) / whole}%` } }),
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
            h("span", {}, clipped(text)),
            h("span", { class: "number" }, (answer.shares ? percent : weighed)(weight)),
          ),
        ),
    ),
  ];
}

/** Values that are numbers: a dot on a line for each row, sized by its weight, and a mark for the answer. */
function line(answer: Answer, values: number[]): HTMLElement {
  const known = values.filter((x) => Number.isFinite(x));
  const pooled = answer.pooled as number;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const [wide, pad] = [600, 16];
  const at = (x: number) => pad + ((x - low) / (high - low || 1)) * (wide - 2 * pad);
  const top = Math.max(...answer.weights.map(Math.abs), 1e-12);
  const inside = Number.isFinite(pooled) && pooled >= low && pooled <= high;
  const drawn = s(
    "svg",
    { viewBox: `0 0 ${wide} 50`, class: "line", role: "img", "aria-label": `values from ${rounded(low)} to ${rounded(high)}, the answer at ${rounded(pooled)}` },
    s("line", { x1: pad, x2: wide - pad, y1: 25, y2: 25, class: "axis" }),
    ...values.map((x, i) =>
      Number.isFinite(x)
        ? s("circle", { cx: at(x), cy: 25, r: 2.5 + 11 * Math.sqrt(Math.abs(answer.weights[i]) / top), class: "dot" })
        : null,
    ),
    inside ? s("line", { x1: at(pooled), x2: at(pooled), y1: 3, y2: 47, class: "mark" }) : null,
  );
  const ends = [rounded(low), "values of the rows; the size of a dot is its weight", rounded(high)].map((text) => h("span", {}, text));
  return h("div", {}, drawn, h("div", { class: "ends", "aria-hidden": "true" }, ...ends));
}
