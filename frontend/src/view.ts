import type { Backend, Host } from "./wire";

/** The context of a view. */
export interface Given {
  data: any;
  backend: Backend | null;
  host: Host;
  /** Announces a sentence to screen readers. */
  announce(text: string): void;
  /** Reports whether the user has made changes that are lost when the page is closed. */
  unsaved(is: boolean): void;
  /** Whether the page is dark. The element of the view gets the event `theme` when that changes. */
  dark(): boolean;
}

export interface View {
  name: string;
  /** The title of its tab if the descriptor has none. */
  title: string;
  /** Its stylesheet, added after that of `style.ts`. */
  style?: string;
  /** Draws the view into `at`, and returns a function that removes it. */
  mount(at: HTMLElement, given: Given): () => void;
}
