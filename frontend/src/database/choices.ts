/** The controls for encoder, score and weighting, with a slider for the number that each may have. */

import { h, createField, replaceChildren, createSelect } from "../dom";
import { type NameOrSettings, SCORES, WEIGHTINGS, encoders } from "../equation";
import { formatRounded } from "../numbers";
import { createSlider } from "../slider";
import { type Outcome, PYTHON_ENCODERS, type State } from "./state";

const ENCODERS: Record<string, string> = {
  characters: "letters",
  lexical: "rare words (BM25)",
  exact: "exact keys only",
  numbers: "numbers",
  arrays: "vectors, unchanged",
  text: "letters and meaning",
  words: "meaning of words",
  sentences: "meaning (MiniLM)",
};
const DEFAULT_SCORE = "own";
/** The setting that the slider changes, its range, and its start if that is not the default. */
const SLIDERS: Record<string, { setting: string; label: string; low: number; high: number; start?: number }> = {
  scaled_dot: { setting: "scale", label: "Scale τ", low: 0.1, high: 100, start: 10 },
  cosine: { setting: "temperature", label: "Temperature τ", low: 0.01, high: 10 },
  gaussian: { setting: "bandwidth", label: "Bandwidth σ", low: 0.01, high: 10 },
  laplace: { setting: "bandwidth", label: "Bandwidth b", low: 0.01, high: 10 },
  boxcar: { setting: "width", label: "Width w", low: 0.01, high: 10 },
  triangular: { setting: "width", label: "Width w", low: 0.01, high: 10 },
  epanechnikov: { setting: "width", label: "Width w", low: 0.01, high: 10 },
  softmax: { setting: "temperature", label: "Temperature T", low: 0.05, high: 20 },
  topk: { setting: "k", label: "k rows", low: 1, high: 20 },
  entmax15: { setting: "alpha", label: "Order α", low: 1.01, high: 4 },
};

/** Scores that change if all keys and queries are shifted. */
const SHIFT_SENSITIVE_SCORES = ["dot", "scaled_dot", "cosine", "multiplicative", "additive", "gated"];

const KINDS: Record<string, { settings: Record<string, unknown> }> = { ...SCORES, ...WEIGHTINGS };

const getName = (spec: NameOrSettings) => (typeof spec === "string" ? spec : spec.name);
const getSetting = (spec: NameOrSettings, name: string) => (typeof spec === "string" ? undefined : spec[name]);

export interface Choices {
  element: HTMLElement;
  formulas: HTMLElement;
  /** Redraws the controls after another table or encoder was chosen. */
  draw(): void;
  show(outcome: Outcome | null): void;
}

export function createChoices(state: State, onChange: () => void): Choices {
  const element = h("div", { class: "controls" });
  const formulas = h("div", { class: "formulas", test: "formulas" });

  const createSettingSlider = (spec: NameOrSettings, test: string, defaultValue: number | undefined, setSpec: (spec: NameOrSettings) => void) => {
    const name = getName(spec);
    const sliderInfo = SLIDERS[name];
    if (!sliderInfo) return null;
    const chosenSetting = getSetting(spec, sliderInfo.setting);
    const start = typeof chosenSetting === "number" ? chosenSetting : (defaultValue ?? sliderInfo.start ?? Number(KINDS[name].settings[sliderInfo.setting]));
    const settingSlider = createSlider({
      label: sliderInfo.label,
      // The range includes the start value, whatever its units.
      range: { low: name === "topk" ? 1 : Math.min(sliderInfo.low, start / 10), high: Math.max(sliderInfo.high, start * 10) },
      value: start,
      isLogarithmic: name !== "topk",
      isInteger: name === "topk",
      test,
      onChange(x) {
        setSpec({ ...(typeof spec === "string" ? { name } : spec), [sliderInfo.setting]: x });
        onChange();
      },
    });
    if (typeof chosenSetting !== "number" && (defaultValue === undefined || name !== "scaled_dot")) setSpec({ name, [sliderInfo.setting]: start });
    return settingSlider.element;
  };

  /** The default bandwidth of the encoder for numbers, in the units of the keys. */
  const getDefaultBandwidth = (): number | undefined => {
    try {
      const keys = state.getRows().map((row) => row.key);
      if (state.encoder !== "numbers") return undefined;
      const bandwidth = encoders.fit("numbers", keys).defaultScore(keys.length).bandwidth;
      return typeof bandwidth === "number" ? Number(bandwidth.toPrecision(3)) : undefined;
    } catch {
      return undefined;
    }
  };

  const draw = () => {
    const hasNumericKeys = state.getRows().every((row) => typeof row.key === "number");
    const pageEncoders = encoders.NAMES.filter((name) =>
      name === "numbers" ? hasNumericKeys : name === "arrays" ? state.encoder === "arrays" : true,
    );
    const pythonEncoders = state.backend && !hasNumericKeys ? PYTHON_ENCODERS : [];
    const encoderNames = new Set([...(state.pythonEncoder ? [state.pythonEncoder] : []), ...pythonEncoders, ...pageEncoders, state.encoder]);
    const scoreName = state.score === null ? DEFAULT_SCORE : getName(state.score);
    const getDefaultSetting = (name: string) => (["gaussian", "laplace", "boxcar", "triangular", "epanechnikov"].includes(name) ? getDefaultBandwidth() : undefined);
    const scoreNumber =
      state.score === null
        ? null
        : createSettingSlider(state.score, "score-setting", getDefaultSetting(scoreName), (spec) => {
            state.score = spec;
          });
    const weightingNumber = createSettingSlider(state.weighting, "temperature", undefined, (spec) => {
      state.weighting = spec;
    });
    // Scores with learned arrays cannot be chosen by name.
    const scoreNames = Object.keys(SCORES).filter((name) => !["multiplicative", "additive", "gated"].includes(name));
    const scores = new Map([...scoreNames.map((name): [string, string] => [name, SCORES[name].title]), ...state.listRegistered("scores")]);
    if (state.score && !scores.has(scoreName)) scores.set(scoreName, SCORES[scoreName]?.title ?? scoreName);
    const weightings = new Map([
      ...Object.entries(WEIGHTINGS).map(([name, { title }]): [string, string] => [name, title]),
      ...state.listRegistered("weightings"),
    ]);
    const weightingName = getName(state.weighting);
    if (!weightings.has(weightingName)) weightings.set(weightingName, weightingName);
    const redraw = (test: string) => {
      draw();
      element.querySelector<HTMLElement>(`[data-testid="${test}"]`)?.focus();
      onChange();
    };
    replaceChildren(
      element,
      createField(
        "Encoder",
        createSelect([...encoderNames].map((name) => [name, ENCODERS[name] ?? name]), state.encoder, (name) => {
          state.encoder = name;
          redraw("encoder");
        }, { test: "encoder" }),
      ),
      createField(
        "Score a(q, k)",
        createSelect([[DEFAULT_SCORE, "encoder’s default"], ...scores], scoreName, (name) => {
          state.score = name === DEFAULT_SCORE ? null : name;
          redraw("score");
        }, { test: "score" }),
      ),
      scoreNumber,
      createField(
        "Weighting α",
        createSelect([...weightings], weightingName, (name) => {
          state.weighting = name;
          redraw("weighting");
        }, { test: "weighting" }),
      ),
      weightingNumber,
    );
  };

  return {
    element,
    formulas,
    draw,
    show(outcome) {
      if (!outcome) return replaceChildren(formulas);
      const usedScore = outcome.soft.score;
      const score = SCORES[getName(usedScore)];
      const weighting = WEIGHTINGS[getName(state.weighting)];
      const numbers = typeof usedScore === "string" ? [] : Object.entries(usedScore).filter(([, x]) => typeof x === "number");
      const usesScale = getName(usedScore) === "scaled_dot" && typeof getSetting(usedScore, "scale") === "number";
      const formula = usesScale ? "s = τ qᵀk" : score?.formula ?? (getName(usedScore) && `s = ${getName(usedScore)}(q, k)`);
      const sliderInfo = SLIDERS[getName(usedScore)];
      const settingTexts = numbers.map(([name, x]) => `${name === sliderInfo?.setting ? sliderInfo.label.split(" ").at(-1) : name} = ${formatRounded(x as number)}`);
      if (outcome.encoder === "numbers" && SHIFT_SENSITIVE_SCORES.includes(getName(usedScore))) settingTexts.push("q and k minus the mean of the keys");
      replaceChildren(
        formulas,
        h("span", {}, formula + (settingTexts.length ? `,  ${settingTexts.join(", ")}` : "")),
        h("span", { "aria-hidden": "true" }, "→"),
        h("span", {}, weighting?.formula ?? `α = ${getName(state.weighting)}(s)`),
        h("span", { "aria-hidden": "true" }, "→"),
        h("span", {}, outcome.soft.values.length ? "the value with the most weight" : "Σᵢ αᵢ vᵢ"),
      );
    },
  };
}
