import { h } from "../dom";
import type { View } from "../view";

export const view: View = {
  name: "model",
  title: "Model",
  mount(at) {
    at.append(h("p", { class: "note" }, "This view is not built yet."));
    return () => at.replaceChildren();
  },
};
