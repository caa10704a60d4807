/** Functions that create elements. Text is always inserted as text, never parsed as markup. */

export type Child = Node | string | number | null | undefined | false;
type Handler = (event: any) => void;
export interface Props {
  class?: string;
  /** `data-testid`, by which tests find the element. */
  test?: string;
  style?: Record<string, string>;
  on?: Record<string, Handler>;
  [attribute: string]: unknown;
}

/** Names set as properties: an attribute would set only the default. */
const PROPERTIES = new Set(["value", "checked", "disabled", "selected", "hidden", "open"]);

function fillElement<E extends Element>(element: E, props: Props, children: Child[]): E {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name === "on") {
      for (const [event, handler] of Object.entries(value as Record<string, Handler>)) {
        element.addEventListener(event, handler);
      }
    } else if (name === "style") {
      // Set by the object model, because the content security policy forbids the attribute.
      const elementStyle = (element as unknown as HTMLElement).style;
      for (const [key, v] of Object.entries(value as Record<string, string>)) elementStyle.setProperty(key, v);
    } else if (name === "test") element.setAttribute("data-testid", String(value));
    else if (PROPERTIES.has(name)) (element as any)[name] = value;
    else if (name.startsWith("on")) throw new Error(`${name}: a handler goes into on: { … }`);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false) element.setAttribute(name, String(value));
  }
  appendChildren(element, ...children);
  // A select accepts its value only after its options were added.
  if ("value" in props && element instanceof HTMLSelectElement) element.value = String(props.value);
  return element;
}

/** `h("p", { class: "note" }, "text")`: an element of HTML. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return fillElement(document.createElement(tag), props, children);
}

/** `s("line", { x1: 0 })`: an element of SVG. */
export function s<K extends keyof SVGElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return fillElement(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

export function appendChildren(element: Element, ...children: Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/** Replaces all children. */
export function replaceChildren(element: Element, ...children: Child[]): void {
  element.replaceChildren();
  appendChildren(element, ...children);
}

let idCount = 0;
/** A unique id for `for`, `aria-labelledby` and similar attributes. */
export function createId(prefix: string): string {
  idCount += 1;
  return `qkv-${prefix}-${idCount}`;
}

/** Calls `paint` at most once per frame; `stop` cancels it. */
export function throttleToFrame(paint: () => void): { (): void; stop(): void } {
  let requestId = 0;
  const requestPaint = () => {
    requestId ||= requestAnimationFrame(() => {
      requestId = 0;
      paint();
    });
  };
  return Object.assign(requestPaint, { stop: () => cancelAnimationFrame(requestId) });
}

/** A control below its label. */
export function createField(label: string, control: HTMLElement, hint?: string): HTMLElement {
  control.id ||= createId("control");
  return h(
    "div",
    { class: "field" },
    h("label", { for: control.id }, label),
    control,
    hint ? h("span", { class: "hint" }, hint) : null,
  );
}

/** A list to choose from: `[value, text]` or the value alone. */
export function createSelect(
  options: (string | [string, string])[],
  value: string,
  onChange: (value: string) => void,
  props: Props = {},
): HTMLSelectElement {
  const items = options.map((o) => (typeof o === "string" ? [o, o] : o));
  return h(
    "select",
    { ...props, value, on: { change: (e) => onChange(e.target.value) } },
    ...items.map(([v, text]) => h("option", { value: v }, text)),
  );
}

/** Longest text that is shown in full, in letters. */
const MAX_UNCLIPPED_LETTERS = 100;

/** A text that shows only its first lines if it is long; with the focus it shows all. */
export function clipText(text: string): Child {
  return text.length > MAX_UNCLIPPED_LETTERS ? h("div", { class: "clip", tabindex: 0 }, text) : text;
}

/** A number with `digits` decimals, never −0. */
export function formatFixed(x: number, digits = 3): string {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "none" : x > 0 ? "∞" : "−∞";
  const text = x.toFixed(digits);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
}
