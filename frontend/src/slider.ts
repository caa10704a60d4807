/** A slider with a number field: a number within a range. */

import type { Range } from "./axes";
import { h, createField } from "./dom";
import { clamp, formatSignificant } from "./numbers";

export interface Slider {
  element: HTMLElement;
  /** Set the value and the range. A number field that has the focus keeps its text. */
  setValue(value: number, range?: Range): void;
  setEnabled(enabled: boolean): void;
  /** Set the text that a screen reader reads after the number. */
  setDescription(text: string): void;
}

export interface SliderOptions {
  label: string;
  range: Range;
  value: number;
  /** Whether the scale is logarithmic. */
  isLogarithmic?: boolean;
  isInteger?: boolean;
  test: string;
  onChange(value: number): void;
}

const STEP_COUNT = 240;

export function createSlider({ label, range, value, isLogarithmic, isInteger, test, onChange }: SliderOptions): Slider {
  const track = h("input", { type: "range", min: "0", max: String(STEP_COUNT), step: "1", test });
  const field = h("input", { type: "number", step: "any", test: `${test}-number`, "aria-label": `${label} as a number` });
  let [current, limits, description] = [value, range, ""];
  const fractionOf = (x: number) => {
    const { low, high } = limits;
    return isLogarithmic ? Math.log(x / low) / Math.log(high / low) : (x - low) / (high - low);
  };
  const valueAt = (fraction: number) => {
    const { low, high } = limits;
    const x = isLogarithmic ? low * (high / low) ** fraction : low + (high - low) * fraction;
    return isInteger ? Math.round(x) : Number(x.toPrecision(3));
  };
  const updateDisplay = () => {
    track.value = String(Math.round(STEP_COUNT * clamp(fractionOf(current), 0, 1)));
    track.setAttribute("aria-valuetext", `${formatSignificant(current)}${description}`);
    if ((field.getRootNode() as ShadowRoot).activeElement !== field) field.value = String(Number(current.toPrecision(4)));
  };
  const message = h("span", { class: "hint error", role: "alert", test: `${test}-trouble`, hidden: true });
  const expected = isInteger ? `a whole number from ${range.low}` : isLogarithmic ? "above 0" : "a number";
  const acceptValue = (x: number) => {
    current = x;
    message.hidden = true;
    updateDisplay();
    onChange(x);
  };
  track.addEventListener("input", () => acceptValue(valueAt(track.valueAsNumber / STEP_COUNT)));
  field.addEventListener("change", () => {
    const x = isInteger ? Math.round(field.valueAsNumber) : field.valueAsNumber;
    if (Number.isFinite(x) && (!isLogarithmic || x > 0) && (!isInteger || x >= limits.low)) acceptValue(x);
    else {
      message.textContent = `must be ${expected}${field.value && `, not ${field.value}`}: it stays ${formatSignificant(current)}`;
      message.hidden = false;
    }
    field.value = String(Number(current.toPrecision(4)));
  });
  const element = createField(label, track);
  element.classList.add("slider");
  element.append(h("div", { class: "pair" }, track, field), message);
  updateDisplay();
  return {
    element,
    setValue(newValue, range) {
      [current, limits] = [newValue, range ?? limits];
      updateDisplay();
    },
    setEnabled(enabled) {
      track.disabled = field.disabled = !enabled;
    },
    setDescription(text) {
      description = text;
      updateDisplay();
    },
  };
}
