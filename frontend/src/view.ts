import type { Backend, Host } from "./wire";

/** What a view is handed. */
export interface Given {
  data: any;
  backend: Backend | null;
  host: Host;
  /** Says a sentence to a screen reader. */
  announce(text: string): void;
  /** Says whether there is what somebody made by hand, which goes when the page goes. */
  unsaved(is: boolean): void;
  /** Whether the page is dark now; `at` hears the event `theme` when that changes. */
  dark(): boolean;
}

export interface View {
  name: string;
  /** What its tab says where the descriptor has no title. */
  title: string;
  /** Rules of its own, after those of `style.ts`. */
  style?: string;
  /** Draws into `at`, and returns what undoes it. */
  mount(at: HTMLElement, given: Given): () => void;
}
