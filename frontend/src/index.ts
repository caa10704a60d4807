/** Entry points of the page: notebook, server and HTML file. */

import * as equation from "./equation";
import { type Shown, shell } from "./shell";
import type { View } from "./view";
import { view as data } from "./views/data";
import { view as database } from "./views/database";
import { view as model } from "./views/model";
import { view as regression } from "./views/regression";
import { view as scores } from "./views/scores";
import { view as sentence } from "./views/sentence";
import { type Model, kernel, opened, server, unpack } from "./wire";

const VIEWS: View[] = [database, sentence, regression, scores, data, model];

/** Entry point in a notebook: anywidget calls it for each cell that shows the widget. */
function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const backend = kernel(model);
  const views = () => unpack(model.get("views"), model.get("buffers") ?? [], backend);
  let undo = shell(el, { views: views(), backend, host: "notebook" }, VIEWS);
  const again = () => {
    undo();
    undo = shell(el, { views: views(), backend, host: "notebook" }, VIEWS);
  };
  model.on?.("change:views", again);
  return () => {
    model.off?.("change:views", again);
    undo();
  };
}

/** Entry point on a server and in tests: shows views, with or without a backend. */
export function boot(el: HTMLElement, shown: Shown): () => void {
  return shell(el, shown, VIEWS);
}

/** Entry point in an HTML file: the data are in another element of the file. */
async function start(at: HTMLElement): Promise<void> {
  const { views } = await opened(at.textContent ?? "");
  at.remove();
  const el = document.createElement("main");
  document.body.append(el);
  boot(el, { views, backend: null, host: "file" });
}

// In a file this module is inline and has the address of the document; elsewhere it is imported.
if (import.meta.url === document.baseURI) {
  const at = document.getElementById("qkv-page");
  if (at) void start(at);
}

export { equation, server, unpack };
export default { render };
