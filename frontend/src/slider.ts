/** A number between two others, to slide or to type. */

import type { Range } from "./axes";
import { h, labelled } from "./dom";
import { clamp, numeral } from "./numbers";

export interface Slider {
  element: HTMLElement;
  /** What it stands at, and between which numbers; the number that is being typed stays. */
  set(value: number, range?: Range): void;
  able(able: boolean): void;
  /** What a screen reader hears beside the number. */
  say(more: string): void;
}

export interface Sliding {
  label: string;
  range: Range;
  value: number;
  /** Steps are factors. */
  log?: boolean;
  whole?: boolean;
  test: string;
  change(value: number): void;
}

const STEPS = 240;

export function slider({ label, range, value, log, whole, test, change }: Sliding): Slider {
  const line = h("input", { type: "range", min: "0", max: String(STEPS), step: "1", test });
  const typed = h("input", { type: "number", step: "any", test: `${test}-number`, "aria-label": `${label} as a number` });
  let [now, between, more] = [value, range, ""];
  const share = (x: number) => {
    const { low, high } = between;
    return log ? Math.log(x / low) / Math.log(high / low) : (x - low) / (high - low);
  };
  const at = (part: number) => {
    const { low, high } = between;
    const x = log ? low * (high / low) ** part : low + (high - low) * part;
    return whole ? Math.round(x) : Number(x.toPrecision(3));
  };
  const show = () => {
    line.value = String(Math.round(STEPS * clamp(share(now), 0, 1)));
    line.setAttribute("aria-valuetext", `${numeral(now)}${more}`);
    if ((typed.getRootNode() as ShadowRoot).activeElement !== typed) typed.value = String(Number(now.toPrecision(4)));
  };
  const trouble = h("span", { class: "hint error", role: "alert", test: `${test}-trouble`, hidden: true });
  const least = whole ? `a whole number from ${range.low}` : log ? "above 0" : "a number";
  const take = (x: number) => {
    now = x;
    trouble.hidden = true;
    show();
    change(x);
  };
  line.addEventListener("input", () => take(at(line.valueAsNumber / STEPS)));
  typed.addEventListener("change", () => {
    const x = whole ? Math.round(typed.valueAsNumber) : typed.valueAsNumber;
    if (Number.isFinite(x) && (!log || x > 0) && (!whole || x >= between.low)) take(x);
    else {
      trouble.textContent = `must be ${least}${typed.value && `, not ${typed.value}`}: it stays ${numeral(now)}`;
      trouble.hidden = false;
    }
    typed.value = String(Number(now.toPrecision(4)));
  });
  const element = labelled(label, line);
  element.classList.add("slider");
  element.append(h("div", { class: "pair" }, line, typed), trouble);
  show();
  return {
    element,
    set(to, range) {
      [now, between] = [to, range ?? between];
      show();
    },
    able(able) {
      line.disabled = typed.disabled = !able;
    },
    say(text) {
      more = text;
      show();
    },
  };
}
