/** The view Database: rows and a query, scores → weights → value, with a soft and a hard answer. */

import { alsoBest, alsoHeaviest, card } from "../database/cards";
import { choices } from "../database/choices";
import { EXAMPLES } from "../database/examples";
import { type Outcome, State, inOneLine, spell, typed } from "../database/state";
import { table } from "../database/table";
import { fixed, h, labelled } from "../dom";
import { counted, figure, percent, formatValue } from "../numbers";
import type { View } from "../view";

/** Milliseconds after the last key press until Python is asked or a sentence is announced. */
const PAUSE = 200;

/** Milliseconds until the page reports that Python has not answered. */
const LATE = 10_000;

/** A query with more letters gets its own line. */
const LONG = 24;

const STYLE = `
.database .examples { margin-bottom: 1.25rem; }
.database .examples button[aria-pressed="true"] { border-color: var(--accent); box-shadow: inset 0 0 0 1px var(--accent); font-weight: 600; }
.database .about { max-width: none; }
.database .asking { display: grid; grid-template-columns: minmax(0, 2fr) minmax(0, 5fr); gap: 0.75rem 1.5rem; align-items: start; margin-bottom: 0.9rem; }
.database .controls { margin: 0; align-items: start; grid-template-columns: repeat(auto-fill, minmax(min(12rem, 100%), 1fr)); }
.database .query input { font-size: 1.2rem; font-weight: 600; }
.database :is(.query input, .controls select) { height: 2.5rem; }
.database .formulas { display: flex; flex-wrap: wrap; gap: 0.25rem 0.9rem; font-family: var(--mono); font-size: 0.9rem; color: var(--soft); margin-bottom: 1.25rem; }
.database .answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: var(--gap); margin-bottom: 1.5rem; }
.database .answer { border-top: 4px solid var(--accent); min-width: 0; }
.database .answer.hard { border-top-color: var(--second); }
.database .answer h3 { margin: 0; }
.database .value { font-size: clamp(1.6rem, 4cqi, 2.4rem); line-height: 1.2; font-weight: 650; margin: 0.35rem 0 0.6rem; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.database .value.long { font-size: 1.1rem; line-height: 1.4; }
.database dl { display: flex; flex-wrap: wrap; gap: 0.25rem 2rem; margin: 0.75rem 0 0; }
.database dl div { display: flex; gap: 0.6rem; align-items: baseline; }
.database dt { color: var(--soft); font-size: 0.85rem; }
.database dd { margin: 0; }
.database .shares { display: flex; height: 1.1rem; border-radius: 2px; overflow: hidden; background: var(--wash); gap: 1px; }
.database .shares i { height: 100%; transition: width 0.15s ease-out; }
.database .legend { overflow-wrap: anywhere; list-style: none; margin: 0.5rem 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: 0.15rem 1.25rem; font-size: 0.9rem; }
.database .legend .clip { -webkit-line-clamp: 2; max-width: none; }
.database .legend li { display: flex; gap: 0.4rem; align-items: center; }
.database .legend .number { white-space: nowrap; }
.database .legend i { width: 0.75rem; height: 0.75rem; border-radius: 2px; flex: none; }
.database .share-0 { background: light-dark(#1b62a5, #6cb2ea); }
.database .share-1 { background: light-dark(#00795c, #4fc9a4); }
.database .share-2 { background: light-dark(#9c4f7e, #dd9cc2); }
.database .share-3 { background: light-dark(#8a6d00, #d9bf4a); }
.database .share-4 { background: light-dark(#5f4b9b, #ada0e0); }
.database .share-5 { background: light-dark(#6b4f3a, #c9ab92); }
.database .share-6 { background: light-dark(#9aa5b0, #5c6874); }
.database .hard .share-0 { background: var(--second); }
.database .line { width: 100%; height: auto; max-height: 5.5rem; display: block; }
.database .line .axis { stroke: var(--line); stroke-width: 2; }
.database .line .dot { fill: var(--accent); fill-opacity: 0.45; stroke: var(--accent); }
.database .hard .line .dot { fill: var(--second); stroke: var(--second); }
.database .line .mark { stroke: var(--ink); stroke-width: 3; }
.database .ends { display: flex; justify-content: space-between; gap: 0.75rem; text-align: center; padding-inline: 2%; font-size: 0.8rem; color: var(--soft); }
.database .rows { margin-bottom: 0.75rem; }
.database .order { justify-content: flex-end; font-size: 0.85rem; color: var(--soft); gap: 0.4rem; }
.database .rows td { padding-block: 0.15rem; }
.database .rows td.cell input { border-color: transparent; background: none; padding: 0.25rem 0.4rem; margin-inline-start: -0.4rem; text-overflow: ellipsis; }
.database .rows td.cell input:hover { border-color: var(--line); }
.database .rows td.cell input:focus { border-color: var(--accent); background: var(--paper); }
.database .rows .best td.cell:first-child input { font-weight: 650; }
.database .rows td.weight { white-space: nowrap; }
.database .rows td.weight > * { display: inline-block; vertical-align: middle; }
.database .rows td.weight .number { width: 3.2rem; text-align: start; }
.database .rows td.weight .bar { width: calc(100% - 4rem); margin-inline-start: 0.4rem; }
.database .rows.wide td.weight.first .number { width: 7rem; }
.database .rows.wide td.weight.first .bar { width: calc(100% - 7.8rem); min-width: 1.2rem; }
.database .rows th:is(:nth-child(1), :nth-child(2), .weight) { width: 20%; }
.database .rows th:nth-child(3) { width: 6rem; }
.database .rows td.score { padding-inline-end: 1.5rem; }
.database .rows th.number { padding-inline-end: 1.5rem; }
.database .rows th:nth-child(6) { width: 2.5rem; }
.database .rows td.end { text-align: end; padding-inline-end: 0; }
.database .rows td.end button { padding: 0 0.5rem; }
.database .asking.long { grid-template-columns: minmax(0, 1fr); }
@container page (max-width: 60rem) { .database .asking { grid-template-columns: minmax(0, 1fr); } }
@container page (max-width: 44rem) {
  .database .controls { grid-template-columns: repeat(auto-fill, minmax(min(9rem, 100%), 1fr)); }
  .database .rows thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .database .rows, .database .rows tbody { display: block; }
  .database .rows tr { display: grid; grid-template-columns: 1fr 1fr auto; border-top: 1px solid var(--line); padding: 0.35rem 0; }
  .database .rows td { border: 0; padding: 0.05rem 0.3rem 0.05rem 0; }
  .database .rows td.end { grid-area: 1 / 3; }
  .database .rows td.score { grid-area: 2 / 3; min-width: 3.2rem; padding: 0; font-size: 0.85rem; color: var(--soft); align-self: center; }
  .database .rows td.weight { grid-row: 2; font-size: 0.9rem; }
  .database .rows :is(td.weight, td.score)::before { color: var(--soft); font-size: 0.8rem; margin-inline-end: 0.3rem; }
  .database .rows td.weight.first::before { content: "soft"; }
  .database .rows td.weight.second::before { content: "hard"; }
  .database .rows td.score::before { content: "s"; }
  .database .rows td.weight .number { width: 2.8rem; }
  .database .rows td.weight .bar { width: calc(100% - 5.6rem); min-width: 1.2rem; }
  .database .rows.wide tr { grid-template-columns: 3fr 2fr auto; }
  .database .rows.wide td.score { grid-area: 3 / 1 / 4 / 4; text-align: start; }
  .database .rows.wide td.weight.first .bar { width: calc(100% - 9.8rem); }
}
`;

export const view: View = {
  name: "database",
  title: "Database",
  style: STYLE,
  mount(at, given) {
    const state = new State(given.backend, given.data);
    const own = Array.isArray(given.data.rows);
    const starts = [
      ...(own ? [{ name: "given", title: "Your rows", open: () => state.open(given.data) }] : []),
      ...(given.data.examples === false ? [] : EXAMPLES).map((example) => ({
        name: example.name,
        title: example.title,
        open: () => state.example(example),
      })),
    ];
    let timer: ReturnType<typeof setTimeout> | undefined;
    let gone = false;

    const about = h("p", { class: "note about", test: "about" });
    const trouble = h("p", { class: "error", role: "alert", test: "trouble", hidden: true });
    const asked = h("p", { class: "note", test: "note", hidden: true });
    const query = h("input", {
      type: "text",
      test: "query",
      autocomplete: "off",
      spellcheck: "false",
      on: {
        input: () => {
          state.query.text = typed(query.value);
          changed(false);
        },
      },
    });
    const soft = card("answer", "Soft", "all rows, weighted by how similar their keys are to the query", alsoHeaviest);
    const hard = card("hard", "Hard", "only the row with the largest score", alsoBest);
    soft.element.classList.add("soft");

    const show = () => {
      if (state.waiting) {
        // The last answer stays until Python sends the next one.
        trouble.hidden = true;
        asked.textContent = "Waiting for Python …";
        asked.hidden = false;
        return;
      }
      let outcome: Outcome | null = null;
      trouble.hidden = true;
      try {
        outcome = state.outcome();
      } catch (error) {
        trouble.textContent = error instanceof Error ? error.message : String(error);
        trouble.hidden = false;
      }
      rows.show(outcome);
      chosen.show(outcome);
      if (!outcome) {
        fail();
        return;
      }
      const values = state.table().map((row) => row.value);
      soft.show(outcome.soft, values);
      hard.show(outcome.hard, values);
      asked.textContent = remark(state, outcome);
      asked.hidden = asked.textContent === "";
      speak(outcome);
    };
    const fail = () => {
      soft.fail();
      hard.fail();
      rows.show(null);
      asked.hidden = true;
    };
    const speak = (outcome: Outcome) => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        if (gone) return;
        const [first] = outcome.soft.rows;
        const value = typeof outcome.soft.pooled === "number" ? fixed(outcome.soft.pooled, 2) : formatValue(outcome.soft.pooled);
        given.announce(
          first
            ? `${value}. ${spell(first.key)} ${outcome.soft.shares ? `has ${percent(first.weight)} of the weight` : `has weight ${figure(first.weight)}`}; effective rows ${fixed(outcome.soft.effective, 1)} of ${outcome.soft.total}.`
            : "No row matches the query: all weights are 0.",
        );
      }, 3 * PAUSE);
    };
    const changed = (structure: boolean, fresh = false, edited = false) => {
      if (!fresh) state.touch(edited);
      given.unsaved(state.edited);
      if (structure) {
        query.value = inOneLine(state.query.text);
        // The layout does not change while the user types.
        asking.classList.toggle("long", query.value.length > LONG);
        rows.draw(fresh);
        chosen.draw();
      }
      show();
      if (state.wants && state.backend) void ask();
    };
    let waiting: ReturnType<typeof setTimeout> | undefined;
    const ask = () => {
      clearTimeout(waiting);
      waiting = setTimeout(async () => {
        // The last answer must not stay visible next to a different query.
        const late = setTimeout(() => {
          if (gone || !state.waiting) return;
          fail();
          const again = given.host === "notebook" ? " If the kernel was restarted, run the cell again." : "";
          trouble.textContent = `Python has not answered yet. It may be busy.${again}`;
          trouble.hidden = false;
        }, LATE);
        try {
          if ((await state.fetch()) && !gone) rows.draw(false);
        } catch (error) {
          if (gone) return;
          if (state.waiting) fail();
          trouble.textContent = `Python: ${error instanceof Error ? error.message : error}`;
          trouble.hidden = false;
          return;
        } finally {
          clearTimeout(late);
        }
        if (gone) return;
        show();
        if (state.wants) ask();
      }, PAUSE);
    };

    const rows = table(state, (structure, edited = true) => changed(structure, false, edited));
    const chosen = choices(state, () => changed(false));
    const buttons = starts.map(({ name, title, open }) =>
      h(
        "button",
        {
          test: `example-${name}`,
          "aria-pressed": "false",
          on: {
            click: () => {
              open();
              for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.testid === `example-${name}`));
              about.textContent = state.note;
              about.hidden = !state.note;
              changed(true, true);
            },
          },
        },
        title,
      ),
    );
    const asking = h("div", { class: "asking" }, h("div", { class: "query" }, labelled("Query q", query)), chosen.element);
    const element = h(
      "div",
      { class: "database" },
      starts.length > 1 ? h("div", { class: "row examples", role: "group", "aria-label": "Start from" }, ...buttons) : null,
      about,
      asking,
      chosen.formulas,
      trouble,
      asked,
      h("div", { class: "answers" }, soft.element, hard.element),
      rows.element,
    );
    at.append(element);
    buttons[0].click();
    return () => {
      gone = true;
      clearTimeout(timer);
      clearTimeout(waiting);
      element.remove();
    };
  },
};

/** Says where the numbers come from, if that is not obvious. */
function remark(state: State, outcome: Outcome): string {
  const parts: string[] = [];
  if (state.others) {
    const here = state.lines.length.toLocaleString("en");
    const all = (state.lines.length + state.others).toLocaleString("en");
    parts.push(
      outcome.asked
        ? `Computed from all ${all} rows. The table shows the ${here} with the most weight.`
        : `Computed from the ${here} rows in this table, not from all ${all}.`,
    );
  }
  if (state.foreign) {
    parts.push(
      outcome.asked
        ? `Python computed these numbers with ${state.foreign}, which the page cannot compute.`
        : `Python used ${state.foreign}. The page now uses the score and the weighting chosen above.`,
    );
  }
  if (outcome.encoder !== state.encoder) {
    parts.push(
      state.backend
        ? `Waiting for Python to encode with “${state.encoder}”. Until then the page compares letters.`
        : `The encoder “${state.encoder}” needs Python, and this page runs without it. The page compares letters instead.`,
    );
  }
  const missing = outcome.soft.missing + (outcome.asked ? 0 : state.leftOut);
  if (missing) parts.push(`${counted(missing, "row")} without a value ${missing === 1 ? "is" : "are"} ignored.`);
  return parts.join(" ");
}
