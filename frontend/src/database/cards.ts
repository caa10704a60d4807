/** The answer, soft beside hard: the value, where it came from, and how many rows took part. */

import { fixed, h, put, s } from "../dom";
import type { Answer } from "../equation";
import { percent, rounded } from "../numbers";
import { spell } from "./state";

/** Values that are told apart by colour; the rest share one. */
const SHARES = 6;

export interface Card {
  element: HTMLElement;
  /** `colours`: the place of each value, by its text, so that it looks the same in both cards. */
  show(answer: Answer, values: unknown[], colours: Map<string, number>): void;
  fail(): void;
}

function told(value: unknown): string {
  if (value === null || value === undefined) return "nothing";
  if (typeof value === "number") return rounded(value);
  if (ArrayBuffer.isView(value)) return Array.from(value as Float64Array, rounded).join(", ");
  return spell(value);
}

export function card(name: string, title: string, hint: string): Card {
  const heading = h("h3", {}, title);
  const value = h("p", { class: "value", test: `${name}-value` });
  const source = h("div", { class: "source" });
  const entropy = h("output", { test: `${name}-entropy` });
  const effective = h("output", { test: `${name}-effective` });
  const element = h(
    "section",
    { class: `panel answer ${name}`, "aria-label": title },
    heading,
    h("p", { class: "hint" }, hint),
    value,
    source,
    h(
      "dl",
      {},
      h("div", {}, h("dt", {}, "entropy −Σ α ln α"), h("dd", {}, entropy)),
      h("div", {}, h("dt", {}, "effective rows e^entropy"), h("dd", {}, effective)),
    ),
  );
  const figure = (at: HTMLOutputElement, x: number, text: string) => {
    at.textContent = text;
    at.dataset.value = String(x);
  };
  return {
    element,
    show(answer, values, colours) {
      value.textContent = told(answer.pooled);
      value.dataset.value = spell(answer.pooled);
      figure(entropy, answer.entropy, fixed(answer.entropy));
      figure(effective, answer.effective, `${fixed(answer.effective, 2)} of ${answer.total.toLocaleString("en")}`);
      if (answer.values.length) put(source, ...shares(answer, colours));
      else if (answer.spread !== null) put(source, line(answer, values as number[]), spread(answer));
      else put(source);
    },
    fail() {
      value.textContent = "–";
      put(source);
      for (const at of [entropy, effective]) figure(at, Number.NaN, "–");
    },
  };
}

function spread(answer: Answer): HTMLElement | null {
  const far = answer.spread!;
  return far > 0
    ? h("p", { class: "hint" }, `the values that were pooled lie ± ${Number(far.toPrecision(3))} around it`)
    : null;
}

/** Values that cannot be pooled: the weight of each, as parts of one bar. */
function shares(answer: Answer, colours: Map<string, number>): HTMLElement[] {
  const all = answer.values.map(({ value, weight }) => ({ text: spell(value), weight }));
  const most = all.length > SHARES ? SHARES - 1 : SHARES;
  const told = all.slice(0, most).map((share) => ({ ...share, colour: Math.min(colours.get(share.text) ?? SHARES, SHARES) }));
  const rest = all.slice(most).reduce((sum, share) => sum + share.weight, 0);
  if (rest > 0.0005) told.push({ text: `${all.length - most} others`, weight: rest, colour: SHARES });
  const whole = told.reduce((sum, share) => sum + Math.max(share.weight, 0), 0) || 1;
  return [
    h(
      "div",
      { class: "shares", "aria-hidden": "true" },
      ...told.filter(({ weight }) => weight >= 0.002 * whole).map(({ weight, colour }) =>
        h("i", { class: `share-${colour}`, style: { width: `${(100 * Math.max(weight, 0)) / whole}%` } }),
      ),
    ),
    h(
      "ul",
      { class: "legend" },
      ...told
        .filter(({ weight }, i) => i < 1 || weight >= 0.005)
        .map(({ text, weight, colour }) =>
          h(
            "li",
            {},
            h("i", { class: `share-${colour}`, "aria-hidden": "true" }),
            h("span", {}, text),
            h("span", { class: "number" }, percent(weight)),
          ),
        ),
    ),
  ];
}

/** Values that are numbers: each row a dot on their line, as large as its weight; the answer a mark. */
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
  const ends = [low, high].map((x) => h("span", {}, rounded(x)));
  return h("div", {}, drawn, h("div", { class: "ends", "aria-hidden": "true" }, ...ends));
}
