/** Entry points of the page: notebook, server and HTML file. */

import * as equation from "./equation";
import { type PageOptions, mountShell } from "./shell";
import type { View } from "./view";
import { view as data } from "./views/data";
import { view as database } from "./views/database";
import { view as model } from "./views/model";
import { view as regression } from "./views/regression";
import { view as scores } from "./views/scores";
import { view as sentence } from "./views/sentence";
import { type Model, connectKernel, decodeFile, connectServer, unpack } from "./wire";

const VIEWS: View[] = [database, sentence, regression, scores, data, model];

/** Entry point in a notebook: anywidget calls it for each cell that shows the widget. */
function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const backend = connectKernel(model);
  const views = () => unpack(model.get("views"), model.get("buffers") ?? [], backend);
  let unmount = mountShell(el, { views: views(), backend, host: "notebook" }, VIEWS);
  const rerender = () => {
    unmount();
    unmount = mountShell(el, { views: views(), backend, host: "notebook" }, VIEWS);
  };
  model.on?.("change:views", rerender);
  return () => {
    model.off?.("change:views", rerender);
    unmount();
  };
}

/** Entry point on a server and in tests: shows views, with or without a backend. */
export function boot(el: HTMLElement, options: PageOptions): () => void {
  return mountShell(el, options, VIEWS);
}

/** Entry point in an HTML file: the data are in another element of the file. */
async function startFromFile(dataElement: HTMLElement): Promise<void> {
  const { views } = await decodeFile(dataElement.textContent ?? "");
  dataElement.remove();
  const el = document.createElement("main");
  document.body.append(el);
  boot(el, { views, backend: null, host: "file" });
}

// In a file this module is inline and has the address of the document; elsewhere it is imported.
if (import.meta.url === document.baseURI) {
  const dataElement = document.getElementById("qkv-page");
  if (dataElement) void startFromFile(dataElement);
}

export { equation, connectServer as server, unpack };
export default { render };
