import type { Backend, Host } from "./wire";

/** The context of a view. */
export interface ViewContext {
  data: any;
  backend: Backend | null;
  host: Host;
  /** Announces a sentence to screen readers. */
  announce(text: string): void;
  /** Reports whether the user has made changes that are lost when the page is closed. */
  setUnsaved(hasChanges: boolean): void;
  /** Whether the page is dark. The element of the view gets the event `theme` when that changes. */
  isDark(): boolean;
}

export interface View {
  name: string;
  /** The title of its tab if the descriptor has none. */
  title: string;
  /** Its stylesheet, added after that of `style.ts`. */
  style?: string;
  /** Draws the view into `container`, and returns a function that removes it. */
  mount(container: HTMLElement, context: ViewContext): () => void;
}
