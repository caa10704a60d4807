/** Scores and weightings that are registered in Python and have no formula in TypeScript. */

import { SCORES, WEIGHTINGS } from "./equation";
import type { Given } from "./view";

/** Their names and titles, if there is a Python that can compute them. */
export function pythonOnly({ backend, data }: Pick<Given, "backend" | "data">, kind: "scores" | "weightings"): [string, string][] {
  if (!backend) return [];
  const known = kind === "scores" ? SCORES : WEIGHTINGS;
  const all = Object.entries(data?.registered?.[kind] ?? {}) as [string, string][];
  return all.filter(([name]) => !Object.hasOwn(known, name));
}
