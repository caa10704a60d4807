/** The frame around the views: a shadow root, tabs, the theme, and announcements for screen readers. */

import { h, unique } from "./dom";
import { STYLE } from "./style";
import type { View } from "./view";
import type { Backend, Descriptor, Host } from "./wire";

export interface Shown {
  views: Descriptor[];
  backend: Backend | null;
  host: Host;
}

type Theme = "auto" | "light" | "dark";
const THEMES: Theme[] = ["auto", "light", "dark"];

function sheet(css: string): CSSStyleSheet {
  const made = new CSSStyleSheet();
  made.replaceSync(css);
  return made;
}

/** Whether the surrounding notebook (JupyterLab or VS Code) is dark; null outside of a notebook. */
function around(): boolean | null {
  const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
  if (jpThemeLight) return jpThemeLight === "false";
  if (vscodeThemeKind) return !vscodeThemeKind.endsWith("light");
  return null;
}

/** Shows views in `el`, and returns a function that removes them. */
export function shell(el: HTMLElement, shown: Shown, known: View[]): () => void {
  // Without this, a notebook would treat keys as commands (x cuts the cell): it sees only this
  // element, not the input field inside of the shadow root.
  const box = h("div", { "data-lm-suppress-shortcuts": "true", on: { keydown: (e) => e.stopPropagation() } });
  el.append(box);
  const root = box.attachShadow({ mode: "open" });
  root.adoptedStyleSheets = [sheet(STYLE), ...known.flatMap((v) => (v.style ? [sheet(v.style)] : []))];

  const system = matchMedia("(prefers-color-scheme: dark)");
  const start: Theme = el.dataset.theme === "dark" || el.dataset.theme === "light" ? el.dataset.theme : "auto";
  let theme = start;
  const dark = () => (theme === "auto" ? (around() ?? system.matches) : theme === "dark");

  const voice = h("div", { class: "unseen", role: "status", "aria-live": "polite", test: "announce" });
  const panels: { tab: HTMLButtonElement; panel: HTMLElement; mount(): void; unmount(): void }[] = [];
  const themed = () => {
    if (theme === "auto" && around() === null) delete box.dataset.theme;
    else box.dataset.theme = dark() ? "dark" : "light";
    toggle.textContent = { auto: "◐", light: "○", dark: "●" }[theme];
    toggle.setAttribute("aria-label", `Theme: ${theme}`);
    toggle.title = `Theme: ${theme}`;
    for (const { panel } of panels) panel.dispatchEvent(new CustomEvent("theme"));
  };
  const toggle = h("button", {
    class: "quiet theme",
    test: "theme",
    on: {
      click: () => {
        theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
        themed();
      },
    },
  });

  // If the page is the whole window, the fragment of its address names the open view, for links and history.
  const alone = shown.host !== "notebook";
  const address = (i: number) => new URL(`#${encodeURIComponent(panels[i].tab.textContent!)}`, location.href).hash;
  const open = () => panels.findIndex(({ tab }) => tab.getAttribute("aria-selected") === "true");
  const linked = () => (alone ? Math.max(panels.findIndex((_, i) => address(i) === location.hash), 0) : 0);
  const follow = () => {
    // Several tabs may have the same title.
    if (address(linked()) !== address(open())) choose(linked());
  };
  const turn = (i: number, focus = false) => {
    choose(i, focus);
    if (alone) location.hash = address(i);
  };
  const choose = (i: number, focus = false) => {
    panels.forEach(({ tab, panel }, j) => {
      tab.setAttribute("aria-selected", String(i === j));
      tab.tabIndex = i === j ? 0 : -1;
      panel.hidden = i !== j;
    });
    panels[i].mount();
    if (focus) panels[i].tab.focus();
  };

  // The browser asks before it closes a page with changes. In a notebook the cell can be run again.
  const unsaved = new Set<number>();
  const stay = (event: BeforeUnloadEvent) => {
    if (unsaved.size) event.preventDefault();
  };

  const times = new Map<string, number>();
  shown.views.forEach((given, i) => {
    const view = known.find((v) => v.name === given.view);
    const seen = times.get(given.view) ?? 0;
    times.set(given.view, seen + 1);
    const name = seen ? `${given.view}-${seen}` : given.view;
    const ids = [unique("tab"), unique("panel")];
    const tab = h(
      "button",
      {
        role: "tab",
        id: ids[0],
        "aria-controls": ids[1],
        test: `tab-${name}`,
        on: { click: () => turn(i) },
      },
      given.title || view?.title || given.view,
    );
    const panel = h("div", {
      role: "tabpanel",
      id: ids[1],
      "aria-labelledby": ids[0],
      test: `view-${name}`,
      hidden: true,
    });
    let undo: (() => void) | null = null;
    panels.push({
      tab,
      panel,
      mount() {
        if (undo) return;
        if (!view) {
          panel.append(h("p", { class: "error" }, `This page has no view named ${given.view}.`));
          undo = () => panel.replaceChildren();
          return;
        }
        undo = view.mount(panel, {
          data: given.data ?? {},
          backend: shown.backend,
          host: shown.host,
          announce: (text) => {
            voice.textContent = text;
          },
          unsaved: (is) => (is ? unsaved.add(i) : unsaved.delete(i)),
          dark,
        });
      },
      unmount: () => undo?.(),
    });
  });

  const tabs = h(
    "div",
    {
      class: "tabs",
      role: "tablist",
      "aria-label": "Views",
      on: {
        keydown: (event: KeyboardEvent) => {
          const now = open();
          const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: -1 }[event.key];
          if (next === undefined) return;
          event.preventDefault();
          turn((next + panels.length) % panels.length, true);
        },
      },
    },
    ...panels.map(({ tab }) => tab),
  );
  tabs.hidden = panels.length < 2;
  const title = panels.length === 1 ? h("h2", { class: "title", test: "title" }, panels[0].tab.textContent) : null;
  system.addEventListener("change", themed);
  const turned = new MutationObserver(themed);
  turned.observe(document.body, { attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
  root.append(
    h("div", { class: "page" }, h("div", { class: "top" }, tabs, title, toggle), ...panels.map((p) => p.panel)),
    voice,
  );
  themed();
  if (panels.length) choose(linked());
  if (panels.length && alone) addEventListener("hashchange", follow);
  if (alone) addEventListener("beforeunload", stay);
  return () => {
    removeEventListener("hashchange", follow);
    removeEventListener("beforeunload", stay);
    system.removeEventListener("change", themed);
    turned.disconnect();
    for (const panel of panels) panel.unmount();
    box.remove();
  };
}
