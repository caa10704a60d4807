/** A slider with a number field: a number within a range. */

import type { Range } from "./axes";
import { h, labelled } from "./dom";
import { clamp, numeral } from "./numbers";

export interface Slider {
  element: HTMLElement;
  /** Set the value and the range. A number field that has the focus keeps its text. */
  set(value: number, range?: Range): void;
  setEnabled(enabled: boolean): void;
  /** Set the text that a screen reader reads after the number. */
  describe(text: string): void;
}

export interface SliderOptions {
  label: string;
  range: Range;
  value: number;
  /** Whether the scale is logarithmic. */
  log?: boolean;
  whole?: boolean;
  test: string;
  change(value: number): void;
}

const STEP_COUNT = 240;

export function slider({ label, range, value, log, whole, test, change }: SliderOptions): Slider {
  const track = h("input", { type: "range", min: "0", max: String(STEP_COUNT), step: "1", test });
  const field = h("input", { type: "number", step: "any", test: `${test}-number`, "aria-label": `${label} as a number` });
  let [current, limits, description] = [value, range, ""];
  const fractionOf = (x: number) => {
    const { low, high } = limits;
    return log ? Math.log(x / low) / Math.log(high / low) : (x - low) / (high - low);
  };
  const valueAt = (fraction: number) => {
    const { low, high } = limits;
    const x = log ? low * (high / low) ** fraction : low + (high - low) * fraction;
    return whole ? Math.round(x) : Number(x.toPrecision(3));
  };
  const show = () => {
    track.value = String(Math.round(STEP_COUNT * clamp(fractionOf(current), 0, 1)));
    track.setAttribute("aria-valuetext", `${numeral(current)}${description}`);
    if ((field.getRootNode() as ShadowRoot).activeElement !== field) field.value = String(Number(current.toPrecision(4)));
  };
  const message = h("span", { class: "hint error", role: "alert", test: `${test}-trouble`, hidden: true });
  const expected = whole ? `a whole number from ${range.low}` : log ? "above 0" : "a number";
  const accept = (x: number) => {
    current = x;
    message.hidden = true;
    show();
    change(x);
  };
  track.addEventListener("input", () => accept(valueAt(track.valueAsNumber / STEP_COUNT)));
  field.addEventListener("change", () => {
    const x = whole ? Math.round(field.valueAsNumber) : field.valueAsNumber;
    if (Number.isFinite(x) && (!log || x > 0) && (!whole || x >= limits.low)) accept(x);
    else {
      message.textContent = `must be ${expected}${field.value && `, not ${field.value}`}: it stays ${numeral(current)}`;
      message.hidden = false;
    }
    field.value = String(Number(current.toPrecision(4)));
  });
  const element = labelled(label, track);
  element.classList.add("slider");
  element.append(h("div", { class: "pair" }, track, field), message);
  show();
  return {
    element,
    set(to, range) {
      [current, limits] = [to, range ?? limits];
      show();
    },
    setEnabled(enabled) {
      track.disabled = field.disabled = !enabled;
    },
    describe(text) {
      description = text;
      show();
    },
  };
}
