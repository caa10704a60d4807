/** The view Database: rows and a query, scores → weights → value, with a soft and a hard answer. */

import { describeScoreTies, describeWeightTies, createCard } from "../database/cards";
import { createChoices } from "../database/choices";
import { EXAMPLES } from "../database/examples";
import { type Outcome, State, toOneLine, formatField, fromOneLine } from "../database/state";
import { createTable } from "../database/table";
import { formatFixed, h, createField } from "../dom";
import { formatCount, formatWeight, formatPercent, formatValue } from "../numbers";
import type { View } from "../view";

/** Milliseconds after the last key press until Python is asked or a sentence is announced. */
const DELAY_MS = 200;

/** Milliseconds until the page reports that Python has not answered. */
const ANSWER_TIMEOUT_MS = 10_000;

/** A query with more letters gets its own line. */
const MAX_INLINE_QUERY_LETTERS = 24;

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
  mount(container, context) {
    const state = new State(context.backend, context.data);
    const hasRows = Array.isArray(context.data.rows);
    const startOptions = [
      ...(hasRows ? [{ name: "given", title: "Your rows", open: () => state.loadData(context.data) }] : []),
      ...(context.data.examples === false ? [] : EXAMPLES).map((example) => ({
        name: example.name,
        title: example.title,
        open: () => state.loadExample(example),
      })),
    ];
    let timer: ReturnType<typeof setTimeout> | undefined;
    let isRemoved = false;

    const tableNote = h("p", { class: "note about", test: "about" });
    const errorText = h("p", { class: "error", role: "alert", test: "trouble", hidden: true });
    const sourceNote = h("p", { class: "note", test: "note", hidden: true });
    const query = h("input", {
      type: "text",
      test: "query",
      autocomplete: "off",
      spellcheck: "false",
      on: {
        input: () => {
          state.query.text = fromOneLine(query.value);
          handleChange(false);
        },
      },
    });
    const soft = createCard("answer", "Soft", "all rows, weighted by how similar their keys are to the query", describeWeightTies);
    const hard = createCard("hard", "Hard", "only the row with the largest score", describeScoreTies);
    soft.element.classList.add("soft");

    const showOutcome = () => {
      if (state.isWaiting) {
        // The last answer stays until Python sends the next one.
        errorText.hidden = true;
        sourceNote.textContent = "Waiting for Python …";
        sourceNote.hidden = false;
        return;
      }
      let outcome: Outcome | null = null;
      errorText.hidden = true;
      try {
        outcome = state.computeOutcome();
      } catch (error) {
        errorText.textContent = error instanceof Error ? error.message : String(error);
        errorText.hidden = false;
      }
      rowTable.show(outcome);
      controls.show(outcome);
      if (!outcome) {
        clearAnswers();
        return;
      }
      const values = state.getRows().map((row) => row.value);
      soft.showAnswer(outcome.soft, values);
      hard.showAnswer(outcome.hard, values);
      sourceNote.textContent = describeSource(state, outcome);
      sourceNote.hidden = sourceNote.textContent === "";
      announceOutcome(outcome);
    };
    const clearAnswers = () => {
      soft.clear();
      hard.clear();
      rowTable.show(null);
      sourceNote.hidden = true;
    };
    const announceOutcome = (outcome: Outcome) => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        if (isRemoved) return;
        const [first] = outcome.soft.rows;
        const value = typeof outcome.soft.shown === "number" ? formatFixed(outcome.soft.shown, 2) : formatValue(outcome.soft.shown);
        context.announce(
          first
            ? `${value}. ${formatField(first.key)} ${outcome.soft.isNormalized ? `has ${formatPercent(first.weight)} of the weight` : `has weight ${formatWeight(first.weight)}`}; effective rows ${formatFixed(outcome.soft.effective, 1)} of ${outcome.soft.total}.`
            : "No row matches the query: all weights are 0.",
        );
      }, 3 * DELAY_MS);
    };
    const handleChange = (structure: boolean, isNewTable = false, edited = false) => {
      if (!isNewTable) state.recordChange(edited);
      context.setUnsaved(state.isEdited);
      if (structure) {
        query.value = toOneLine(state.query.text);
        // The layout does not change while the user types.
        queryRow.classList.toggle("long", query.value.length > MAX_INLINE_QUERY_LETTERS);
        rowTable.draw(isNewTable);
        controls.draw();
      }
      showOutcome();
      if (state.needsPython && state.backend) void scheduleRequest();
    };
    let requestTimer: ReturnType<typeof setTimeout> | undefined;
    const scheduleRequest = () => {
      clearTimeout(requestTimer);
      requestTimer = setTimeout(async () => {
        // The last answer must not stay visible next to a different query.
        const timeout = setTimeout(() => {
          if (isRemoved || !state.isWaiting) return;
          clearAnswers();
          const kernelHint = context.host === "notebook" ? " If the kernel was restarted, run the cell again." : "";
          errorText.textContent = `Python has not answered yet. It may be busy.${kernelHint}`;
          errorText.hidden = false;
        }, ANSWER_TIMEOUT_MS);
        try {
          if ((await state.fetchFromPython()) && !isRemoved) rowTable.draw(false);
        } catch (error) {
          if (isRemoved) return;
          if (state.isWaiting) clearAnswers();
          errorText.textContent = `Python: ${error instanceof Error ? error.message : error}`;
          errorText.hidden = false;
          return;
        } finally {
          clearTimeout(timeout);
        }
        if (isRemoved) return;
        showOutcome();
        if (state.needsPython) scheduleRequest();
      }, DELAY_MS);
    };

    const rowTable = createTable(state, (structure, edited = true) => handleChange(structure, false, edited));
    const controls = createChoices(state, () => handleChange(false));
    const buttons = startOptions.map(({ name, title, open }) =>
      h(
        "button",
        {
          test: `example-${name}`,
          "aria-pressed": "false",
          on: {
            click: () => {
              open();
              for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.testid === `example-${name}`));
              tableNote.textContent = state.note;
              tableNote.hidden = !state.note;
              handleChange(true, true);
            },
          },
        },
        title,
      ),
    );
    const queryRow = h("div", { class: "asking" }, h("div", { class: "query" }, createField("Query q", query)), controls.element);
    const element = h(
      "div",
      { class: "database" },
      startOptions.length > 1 ? h("div", { class: "row examples", role: "group", "aria-label": "Start from" }, ...buttons) : null,
      tableNote,
      queryRow,
      controls.formulas,
      errorText,
      sourceNote,
      h("div", { class: "answers" }, soft.element, hard.element),
      rowTable.element,
    );
    container.append(element);
    buttons[0].click();
    return () => {
      isRemoved = true;
      clearTimeout(timer);
      clearTimeout(requestTimer);
      element.remove();
    };
  },
};

/** Says where the numbers come from, if that is not obvious. */
function describeSource(state: State, outcome: Outcome): string {
  const parts: string[] = state.hint ? [state.hint] : [];
  if (state.confidence) parts.unshift(`How sure: ${state.confidence}.`);
  if (state.otherRowCount) {
    const pageRows = state.lines.length.toLocaleString("en");
    const allRows = (state.lines.length + state.otherRowCount).toLocaleString("en");
    parts.push(
      outcome.isFromPython
        ? `Computed from all ${allRows} rows. The table shows the ${pageRows} with the most weight.`
        : `Computed from the ${pageRows} rows in this table, not from all ${allRows}.`,
    );
  }
  if (state.unnamedChoices) {
    parts.push(
      outcome.isFromPython
        ? `Python computed these numbers with ${state.unnamedChoices}, which the page cannot compute.`
        : `Python used ${state.unnamedChoices}. The page now uses the score and the weighting chosen above.`,
    );
  }
  if (outcome.encoder !== state.encoder) {
    parts.push(
      state.backend
        ? `Waiting for Python to encode with “${state.encoder}”. Until then the page compares letters.`
        : `The encoder “${state.encoder}” needs Python, and this page runs without it. The page compares letters instead.`,
    );
  }
  const missing = outcome.soft.missing + (outcome.isFromPython ? 0 : state.ignoredRowCount);
  if (missing) parts.push(`${formatCount(missing, "row")} without a value ${missing === 1 ? "is" : "are"} ignored.`);
  return parts.join(" ");
}
