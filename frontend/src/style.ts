/** The stylesheet of the page. Colours are variables with a light and a dark value. */
export const STYLE = `
:host {
  color-scheme: light dark;
  --paper: light-dark(#ffffff, #14181d);
  --raised: light-dark(#f5f7f9, #1c2229);
  --line: light-dark(#d9dfe5, #333c46);
  --ink: light-dark(#17202a, #e8edf2);
  --soft: light-dark(#566370, #9dabb9);
  --accent: light-dark(#1b62a5, #6cb2ea);
  --on-accent: light-dark(#ffffff, #0d1318);
  --second: light-dark(#b3540a, #f0a14a);
  --wash: light-dark(#e3eef9, #12293f);
  --bad: light-dark(#a1260d, #ff9b85);
  --gap: 1rem;
  --radius: 6px;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  display: block;
  container: page / inline-size;
  font: 400 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  color: var(--ink);
  background: var(--paper);
  text-align: start;
  -webkit-text-size-adjust: 100%;
}
:host([data-theme="light"]) { color-scheme: light; }
:host([data-theme="dark"]) { color-scheme: dark; }
*, *::before, *::after { box-sizing: border-box; }
[hidden] { display: none !important; }

.page { padding: clamp(0.75rem, 2.5cqi, 2.5rem); max-width: 110rem; margin: 0 auto; }
.top { display: flex; align-items: center; gap: 1rem; border-bottom: 1px solid var(--line); margin-bottom: 1.5rem; }
.top .title { flex: 1 1 0; min-width: 0; overflow-wrap: anywhere; padding: 0.4rem 0; font-size: 1.15rem; }
.tabs { display: flex; flex: 1 1 0; min-width: 0; overflow-x: auto; gap: 0.25rem; margin-bottom: -1px; scrollbar-width: none; }
.tabs button { font: inherit; color: var(--soft); background: none; border: 0; border-bottom: 3px solid transparent; padding: 0.55rem 0.9rem; white-space: nowrap; cursor: pointer; border-radius: 0; }
.tabs button:hover { color: var(--ink); }
.tabs button[aria-selected="true"] { color: var(--ink); font-weight: 600; border-bottom-color: var(--accent); }
.theme { margin-inline-start: auto; }
@container page (max-width: 40rem) {
  .top { align-items: start; gap: 0.25rem; }
  .tabs { flex-wrap: wrap; gap: 0; }
  .tabs button { padding: 0.4rem 0.55rem; }
}

h2 { font-size: 1.45rem; line-height: 1.25; font-weight: 650; margin: 0 0 0.25rem; }
h3 { font-size: 1.05rem; font-weight: 600; margin: 0 0 0.5rem; }
p { margin: 0 0 0.75rem; max-width: 70ch; }
.note, .hint { color: var(--soft); }
.hint { font-size: 0.85rem; }
.error { color: var(--bad); }
.formula { font-family: var(--mono); font-size: 0.95rem; overflow-wrap: anywhere; }
.formula > span { display: inline-block; margin-inline-end: 2rem; }
.number, td.number, th.number, output { font-variant-numeric: tabular-nums; }
.number { text-align: end; }

button, select, input, textarea { font: inherit; color: inherit; }
input, textarea, td, .value, .clip { unicode-bidi: plaintext; }
button { background: var(--paper); border: 1px solid var(--line); border-radius: var(--radius); padding: 0.35rem 0.8rem; cursor: pointer; }
button:hover { border-color: var(--soft); }
button.main { background: var(--accent); color: var(--on-accent); border-color: var(--accent); }
button.quiet { border-color: transparent; background: none; color: var(--soft); }
button.quiet:hover { color: var(--ink); border-color: var(--line); }
button:disabled { opacity: 0.5; cursor: default; }
select, input[type="text"], input[type="number"], input[type="search"], textarea {
  background: var(--paper); border: 1px solid var(--line); border-radius: var(--radius); padding: 0.4rem 0.6rem; width: 100%; min-width: 0;
}
input[type="range"] { width: 100%; accent-color: var(--accent); margin: 0.45rem 0; }
input[type="checkbox"], input[type="radio"] { accent-color: var(--accent); }
:is(button, select, input, textarea, [tabindex]):focus-visible { outline: 3px solid var(--accent); outline-offset: 1px; }
.tabs button:focus-visible { outline-offset: -3px; }

.field { display: flex; flex-direction: column; gap: 0.15rem; min-width: 0; }
.field > label, .field > .label { font-size: 0.85rem; color: var(--soft); }
.controls { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(11rem, 100%), 1fr)); gap: 0.75rem 1rem; align-items: end; margin-bottom: 1.25rem; }
.row { display: flex; flex-wrap: wrap; gap: 0.5rem 0.75rem; align-items: center; }
.panel { border: 1px solid var(--line); border-radius: var(--radius); padding: var(--gap); }
.scroll { overflow-x: auto; }

table { border-collapse: collapse; width: 100%; }
th { text-align: start; font-weight: 400; font-size: 0.85rem; color: var(--soft); padding: 0.25rem 0.6rem 0.25rem 0; }
td { padding: 0.25rem 0.6rem 0.25rem 0; border-top: 1px solid var(--line); vertical-align: middle; }
th.number { text-align: end; }

.clip { overflow-wrap: anywhere; max-width: 32rem; cursor: pointer; }
.clip:not(:focus) { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 3; overflow: hidden; }

.bar { display: block; height: 0.85rem; background: var(--wash); border-radius: 2px; overflow: hidden; min-width: 3rem; }
.bar > i { display: block; height: 100%; background: var(--accent); transition: width 0.15s ease-out; }
.bar.second > i { background: var(--second); }
canvas { display: block; }

.heatmap { display: block; min-width: 0; accent-color: var(--accent); }
.heatmap > canvas { touch-action: pan-y; cursor: crosshair; }
.heatmap-foot { display: flex; flex-wrap: wrap; gap: 0.5rem 1.25rem; align-items: center; margin-top: 0.5rem; }
.heatmap-readout { flex: 1 1 14ch; font-variant-numeric: tabular-nums; white-space: pre-wrap; overflow-wrap: anywhere; }
.heatmap-scale { display: inline-flex; gap: 0.5rem; align-items: center; font-variant-numeric: tabular-nums; color: var(--soft); font-size: 0.85rem; }
.heatmap-bar { width: 5rem; height: 0.6rem; border: 1px solid var(--line); }
.heatmap-tools { display: inline-flex; gap: 0.25rem; }
.heatmap-tools button { min-width: 2rem; padding: 0.1rem 0.5rem; color: var(--soft); }
.heatmap-note { display: block; min-height: 1.4em; color: var(--soft); font-size: 0.85rem; }

.weights { list-style: none; margin: 0; padding: 0; max-width: 34rem; }
.weights li { display: grid; grid-template-columns: minmax(4rem, 9rem) minmax(3rem, 1fr) 4rem; gap: 0.75rem; align-items: center; }
.weights-name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.weights-rest { color: var(--soft); }
.weights-rest .bar > i { background: var(--line); }

svg.plot { display: block; width: 100%; overflow: visible; touch-action: pan-y; font-size: 13px; font-variant-numeric: tabular-nums; }
svg.plot .grid { stroke: var(--line); stroke-width: 1; opacity: 0.7; }
svg.plot .tick { fill: var(--soft); }
svg.plot .axis { fill: var(--soft); font-style: italic; }
svg.plot .curve { fill: none; stroke: var(--accent); stroke-width: 3; stroke-linejoin: round; pointer-events: none; }
svg.plot .query { stroke: var(--second); stroke-width: 2; stroke-dasharray: 5 4; }
svg.plot .mark { fill: var(--second); stroke: var(--paper); stroke-width: 1.5; pointer-events: none; }
svg.plot .weight { fill: var(--accent); }
svg.plot .weight.marked { fill: var(--second); }

.pair { display: flex; gap: 0.75rem; align-items: center; }
.pair > input[type="number"] { flex: 0 0 5.25rem; font-variant-numeric: tabular-nums; }
.controls.several { align-items: start; }
@container page (min-width: 30rem) { .controls.several > .slider { grid-column: span 2; } }
.facts { display: flex; flex-wrap: wrap; gap: 0.5rem 2.5rem; margin: 0.75rem 0; }
.facts dt { font-size: 0.85rem; color: var(--soft); }
.facts dd { margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; color: var(--soft); margin: 1.5rem 0 0.5rem; }

.unseen { position: absolute; width: 1px; height: 1px; margin: -1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
@media print {
  :host, :host([data-theme]) { color-scheme: light; }
  * { print-color-adjust: exact; }
}
@media (prefers-reduced-motion: reduce) { *, *::before { transition: none !important; animation: none !important; } }
@media (forced-colors: active) { .bar > i { forced-color-adjust: none; } }
`;
