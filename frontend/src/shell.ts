/** The frame around the views: a shadow root, tabs, the theme, and announcements for screen readers. */

import { h, createId } from "./dom";
import { STYLE } from "./style";
import type { View } from "./view";
import type { Backend, Descriptor, Host } from "./wire";

export interface PageOptions {
  views: Descriptor[];
  backend: Backend | null;
  host: Host;
}

type Theme = "auto" | "light" | "dark";
const THEMES: Theme[] = ["auto", "light", "dark"];

function createStyleSheet(css: string): CSSStyleSheet {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(css);
  return sheet;
}

/** Whether the surrounding notebook (JupyterLab or VS Code) is dark; null outside of a notebook. */
function isNotebookDark(): boolean | null {
  const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
  if (jpThemeLight) return jpThemeLight === "false";
  if (vscodeThemeKind) return !vscodeThemeKind.endsWith("light");
  return null;
}

/** Shows views in `el`, and returns a function that removes them. */
export function mountShell(el: HTMLElement, options: PageOptions, knownViews: View[]): () => void {
  // Without this, a notebook would treat keys as commands (x cuts the cell): it sees only this
  // element, not the input field inside of the shadow root.
  const box = h("div", { "data-lm-suppress-shortcuts": "true", on: { keydown: (e) => e.stopPropagation() } });
  el.append(box);
  const root = box.attachShadow({ mode: "open" });
  root.adoptedStyleSheets = [createStyleSheet(STYLE), ...knownViews.flatMap((v) => (v.style ? [createStyleSheet(v.style)] : []))];

  const system = matchMedia("(prefers-color-scheme: dark)");
  const initialTheme: Theme = el.dataset.theme === "dark" || el.dataset.theme === "light" ? el.dataset.theme : "auto";
  let theme = initialTheme;
  const isDark = () => (theme === "auto" ? (isNotebookDark() ?? system.matches) : theme === "dark");

  const liveRegion = h("div", { class: "unseen", role: "status", "aria-live": "polite", test: "announce" });
  const panels: { tab: HTMLButtonElement; panel: HTMLElement; mount(): void; unmount(): void }[] = [];
  const applyTheme = () => {
    if (theme === "auto" && isNotebookDark() === null) delete box.dataset.theme;
    else box.dataset.theme = isDark() ? "dark" : "light";
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
        applyTheme();
      },
    },
  });

  // If the page fills the window, the fragment of its address names the open view, for links and history.
  const ownsWindow = options.host !== "notebook";
  const formatHash = (i: number) => new URL(`#${encodeURIComponent(panels[i].tab.textContent!)}`, location.href).hash;
  const findOpenTab = () => panels.findIndex(({ tab }) => tab.getAttribute("aria-selected") === "true");
  const findLinkedTab = () => (ownsWindow ? Math.max(panels.findIndex((_, i) => formatHash(i) === location.hash), 0) : 0);
  const followHash = () => {
    // Several tabs may have the same title.
    if (formatHash(findLinkedTab()) !== formatHash(findOpenTab())) showPanel(findLinkedTab());
  };
  const openTab = (i: number, focus = false) => {
    showPanel(i, focus);
    if (ownsWindow) location.hash = formatHash(i);
  };
  const showPanel = (i: number, focus = false) => {
    panels.forEach(({ tab, panel }, j) => {
      tab.setAttribute("aria-selected", String(i === j));
      tab.tabIndex = i === j ? 0 : -1;
      panel.hidden = i !== j;
    });
    panels[i].mount();
    if (focus) panels[i].tab.focus();
  };

  // The browser asks before it closes a page with changes. In a notebook the cell can be run again.
  const changedViews = new Set<number>();
  const confirmLeaving = (event: BeforeUnloadEvent) => {
    if (changedViews.size) event.preventDefault();
  };

  const countByView = new Map<string, number>();
  options.views.forEach((descriptor, i) => {
    const view = knownViews.find((v) => v.name === descriptor.view);
    const earlierCount = countByView.get(descriptor.view) ?? 0;
    countByView.set(descriptor.view, earlierCount + 1);
    const name = earlierCount ? `${descriptor.view}-${earlierCount}` : descriptor.view;
    const ids = [createId("tab"), createId("panel")];
    const tab = h(
      "button",
      {
        role: "tab",
        id: ids[0],
        "aria-controls": ids[1],
        test: `tab-${name}`,
        on: { click: () => openTab(i) },
      },
      descriptor.title || view?.title || descriptor.view,
    );
    const panel = h("div", {
      role: "tabpanel",
      id: ids[1],
      "aria-labelledby": ids[0],
      test: `view-${name}`,
      hidden: true,
    });
    let unmountView: (() => void) | null = null;
    panels.push({
      tab,
      panel,
      mount() {
        if (unmountView) return;
        if (!view) {
          panel.append(h("p", { class: "error" }, `This page has no view named ${descriptor.view}.`));
          unmountView = () => panel.replaceChildren();
          return;
        }
        unmountView = view.mount(panel, {
          data: descriptor.data ?? {},
          backend: options.backend,
          host: options.host,
          announce: (text) => {
            liveRegion.textContent = text;
          },
          setUnsaved: (hasChanges) => (hasChanges ? changedViews.add(i) : changedViews.delete(i)),
          isDark,
        });
      },
      unmount: () => unmountView?.(),
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
          const now = findOpenTab();
          const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: -1 }[event.key];
          if (next === undefined) return;
          event.preventDefault();
          openTab((next + panels.length) % panels.length, true);
        },
      },
    },
    ...panels.map(({ tab }) => tab),
  );
  tabs.hidden = panels.length < 2;
  const title = panels.length === 1 ? h("h2", { class: "title", test: "title" }, panels[0].tab.textContent) : null;
  system.addEventListener("change", applyTheme);
  const themeObserver = new MutationObserver(applyTheme);
  themeObserver.observe(document.body, { attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
  root.append(
    h("div", { class: "page" }, h("div", { class: "top" }, tabs, title, toggle), ...panels.map((p) => p.panel)),
    liveRegion,
  );
  applyTheme();
  if (panels.length) showPanel(findLinkedTab());
  if (panels.length && ownsWindow) addEventListener("hashchange", followHash);
  if (ownsWindow) addEventListener("beforeunload", confirmLeaving);
  return () => {
    removeEventListener("hashchange", followHash);
    removeEventListener("beforeunload", confirmLeaving);
    system.removeEventListener("change", applyTheme);
    themeObserver.disconnect();
    for (const panel of panels) panel.unmount();
    box.remove();
  };
}
