/** The controls for encoder, score and weighting, with a slider for the number that each may have. */

import { h, labelled, put, select } from "../dom";
import { type Like, SCORES, WEIGHTINGS, encoders } from "../equation";
import { rounded } from "../numbers";
import { slider } from "../slider";
import { type Outcome, PYTHON, type State } from "./state";

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
const OWN = "own";
/** The setting that the slider changes, its range, and its start if that is not the default. */
const NUMBERS: Record<string, { setting: string; label: string; low: number; high: number; start?: number }> = {
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
const MOVED = ["dot", "scaled_dot", "cosine", "multiplicative", "additive", "gated"];

const KINDS: Record<string, { settings: Record<string, unknown> }> = { ...SCORES, ...WEIGHTINGS };

const nameOf = (like: Like) => (typeof like === "string" ? like : like.name);
const setting = (like: Like, name: string) => (typeof like === "string" ? undefined : like[name]);

export interface Choices {
  element: HTMLElement;
  formulas: HTMLElement;
  /** Redraws the controls after another table or encoder was chosen. */
  draw(): void;
  show(outcome: Outcome | null): void;
}

export function choices(state: State, changed: () => void): Choices {
  const element = h("div", { class: "controls" });
  const formulas = h("div", { class: "formulas", test: "formulas" });

  const number = (like: Like, test: string, own: number | undefined, set: (like: Like) => void) => {
    const name = nameOf(like);
    const about = NUMBERS[name];
    if (!about) return null;
    const chosenSetting = setting(like, about.setting);
    const start = typeof chosenSetting === "number" ? chosenSetting : (own ?? about.start ?? Number(KINDS[name].settings[about.setting]));
    const made = slider({
      label: about.label,
      // The range includes the start value, whatever its units.
      range: { low: name === "topk" ? 1 : Math.min(about.low, start / 10), high: Math.max(about.high, start * 10) },
      value: start,
      log: name !== "topk",
      whole: name === "topk",
      test,
      change(x) {
        set({ ...(typeof like === "string" ? { name } : like), [about.setting]: x });
        changed();
      },
    });
    if (typeof chosenSetting !== "number" && (own === undefined || name !== "scaled_dot")) set({ name, [about.setting]: start });
    return made.element;
  };

  /** The default bandwidth of the encoder for numbers, in the units of the keys. */
  const unitOf = (): number | undefined => {
    try {
      const keys = state.table().map((row) => row.key);
      if (state.encoder !== "numbers") return undefined;
      const found = encoders.fit("numbers", keys).score(keys.length).bandwidth;
      return typeof found === "number" ? Number(found.toPrecision(3)) : undefined;
    } catch {
      return undefined;
    }
  };

  const draw = () => {
    const numeric = state.table().every((row) => typeof row.key === "number");
    const here = encoders.NAMES.filter((name) =>
      name === "numbers" ? numeric : name === "arrays" ? state.encoder === "arrays" : true,
    );
    const python = state.backend && !numeric ? PYTHON : [];
    const all = new Set([...(state.given ? [state.given] : []), ...python, ...here, state.encoder]);
    const scoreName = state.score === null ? OWN : nameOf(state.score);
    const own = (name: string) => (["gaussian", "laplace", "boxcar", "triangular", "epanechnikov"].includes(name) ? unitOf() : undefined);
    const scoreNumber =
      state.score === null
        ? null
        : number(state.score, "score-setting", own(scoreName), (like) => {
            state.score = like;
          });
    const weightingNumber = number(state.weighting, "temperature", undefined, (like) => {
      state.weighting = like;
    });
    // Scores with learned arrays cannot be chosen by name.
    const plain = Object.keys(SCORES).filter((name) => !["multiplicative", "additive", "gated"].includes(name));
    const scores = new Map([...plain.map((name): [string, string] => [name, SCORES[name].title]), ...state.registered("scores")]);
    if (state.score && !scores.has(scoreName)) scores.set(scoreName, SCORES[scoreName]?.title ?? scoreName);
    const weightings = new Map([
      ...Object.entries(WEIGHTINGS).map(([name, { title }]): [string, string] => [name, title]),
      ...state.registered("weightings"),
    ]);
    const weightingName = nameOf(state.weighting);
    if (!weightings.has(weightingName)) weightings.set(weightingName, weightingName);
    const redraw = (test: string) => {
      draw();
      element.querySelector<HTMLElement>(`[data-testid="${test}"]`)?.focus();
      changed();
    };
    put(
      element,
      labelled(
        "Encoder",
        select([...all].map((name) => [name, ENCODERS[name] ?? name]), state.encoder, (name) => {
          state.encoder = name;
          redraw("encoder");
        }, { test: "encoder" }),
      ),
      labelled(
        "Score a(q, k)",
        select([[OWN, "encoder’s default"], ...scores], scoreName, (name) => {
          state.score = name === OWN ? null : name;
          redraw("score");
        }, { test: "score" }),
      ),
      scoreNumber,
      labelled(
        "Weighting α",
        select([...weightings], weightingName, (name) => {
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
      if (!outcome) return put(formulas);
      const used = outcome.soft.score;
      const score = SCORES[nameOf(used)];
      const weighting = WEIGHTINGS[nameOf(state.weighting)];
      const numbers = typeof used === "string" ? [] : Object.entries(used).filter(([, x]) => typeof x === "number");
      const scaled = nameOf(used) === "scaled_dot" && typeof setting(used, "scale") === "number";
      const formula = scaled ? "s = τ qᵀk" : score?.formula ?? (nameOf(used) && `s = ${nameOf(used)}(q, k)`);
      const symbol = NUMBERS[nameOf(used)];
      const named = numbers.map(([name, x]) => `${name === symbol?.setting ? symbol.label.split(" ").at(-1) : name} = ${rounded(x as number)}`);
      if (outcome.encoder === "numbers" && MOVED.includes(nameOf(used))) named.push("q and k minus the mean of the keys");
      put(
        formulas,
        h("span", {}, formula + (named.length ? `,  ${named.join(", ")}` : "")),
        h("span", { "aria-hidden": "true" }, "→"),
        h("span", {}, weighting?.formula ?? `α = ${nameOf(state.weighting)}(s)`),
        h("span", { "aria-hidden": "true" }, "→"),
        h("span", {}, outcome.soft.values.length ? "the value with the most weight" : "Σᵢ αᵢ vᵢ"),
      );
    },
  };
}
