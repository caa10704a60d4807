/** Scores and weightings that are registered in Python and have no formula in TypeScript. */

import { SCORES, WEIGHTINGS } from "./equation";
import type { ViewContext } from "./view";

/** Their names and titles, if there is a Python that can compute them. */
export function listPythonOnly({ backend, data }: Pick<ViewContext, "backend" | "data">, kind: "scores" | "weightings"): [string, string][] {
  if (!backend) return [];
  const builtIn = kind === "scores" ? SCORES : WEIGHTINGS;
  const registered = Object.entries(data?.registered?.[kind] ?? {}) as [string, string][];
  return registered.filter(([name]) => !Object.hasOwn(builtIn, name));
}
