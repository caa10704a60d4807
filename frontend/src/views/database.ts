import { fixed, h } from "../dom";
import type { View } from "../view";

export const view: View = {
  name: "database",
  title: "Database",
  mount(at, { data }) {
    const rows = (data.answer?.rows ?? data.rows ?? []) as { key: unknown; value: unknown; weight?: number }[];
    at.append(
      h("h2", { test: "answer-value" }, String(data.answer?.value ?? "")),
      h(
        "table",
        {},
        ...rows.map((row, i) =>
          h(
            "tr",
            {},
            h("td", { class: "number", test: `row-${i}-weight` }, fixed(row.weight ?? 0)),
            h("td", {}, String(row.key)),
            h("td", {}, String(row.value)),
          ),
        ),
      ),
    );
    return () => at.replaceChildren();
  },
};
