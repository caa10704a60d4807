"""Does every certified answer keep its bound? Random scores, weightings, rows, filters, tolerances.

Each case asks a database with a tolerance and without one, and compares both with the formula in
float64. `python -m bench.sweep_certified 20000` runs so many cases; `tests/engines` runs a few.

A certified answer passes if

- its bound is at most the tolerance;
- its weights lie within the bound of the answer without a tolerance, or within the bound of the
  weights in float64. Where the bound is 0 they are those of the answer without a tolerance;
- `attend` gives the same output as `ask`, to the same bound.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

import qkv
from qkv import scores, weightings
from qkv.errors import CombinationError

WIDTHS = (32, 48)
ROUNDED = 2e-5
"""The rounding error of float32 in weights and outputs, in addition to the bound."""


class Case(NamedTuple):
    """One query: rows (m, d), values (m,), a filter, a query (d,), and its options."""

    seed: int
    shape: str
    keys: np.ndarray
    values: np.ndarray
    group: np.ndarray
    where: str | None
    query: np.ndarray
    score: Any
    weighting: Any
    tolerance: float
    precision: str | None

    def __str__(self) -> str:
        rows = f"{len(self.keys)} rows, {self.shape}"
        arguments = ", ".join(
            f"{x:.17g}" for x in vars(self.score).values() if isinstance(x, float)
        )
        score = f"{type(self.score).__name__}({arguments})"
        how = f"{score}, {self.weighting}, tolerance={self.tolerance:g}"
        return f"seed {self.seed}: {rows}, where={self.where!r}, {how}, {self.precision}"


SHAPES = ("plain", "duplicates", "one row", "edge", "far", "near ties", "of all sizes", "clusters")


def draw_case(seed: int) -> Case:
    """Draw the case of a seed."""
    rng = np.random.default_rng(seed)
    width = int(rng.choice(WIDTHS))
    shape = str(rng.choice(SHAPES))
    count = 1 if shape == "one row" else int(rng.choice([2, 3, 7, 40, 300]))
    keys = rng.normal(size=(count, width)) * 10.0 ** rng.uniform(-2, 3)
    if shape == "duplicates":
        keys = keys[rng.integers(0, max(count // 3, 1), count)]
    elif shape == "far":
        keys += 10.0 ** rng.uniform(2, 5)
    elif shape == "near ties":
        keys = keys[:1] * (1 + 1e-7 * rng.normal(size=keys.shape))
    elif shape == "of all sizes":
        keys *= 10.0 ** rng.uniform(-3, 1, (count, 1))
    elif shape == "clusters":
        keys = keys[rng.integers(0, 3, count) % count] + 1e-3 * keys
    keys = keys.astype(np.float32)
    query = keys[rng.integers(count)].astype(float)
    moved = rng.normal(size=width)
    query = query + moved * rng.choice([0, 1e-6, 0.01, 1, 30]) * np.abs(query).mean()
    query = query.astype(np.float32)
    far = np.linalg.norm(keys.astype(float) - query.astype(float), axis=1)
    # At the edge of the window lies a row; else some rows are in it.
    reach = rng.choice(far) if shape == "edge" or rng.random() < 0.4 else np.quantile(far, 0.3)
    reach = float(reach) or float(np.abs(query).mean()) or 1.0
    if rng.random() < 0.3:
        reach *= float(rng.choice([1 - 1e-7, 1 + 1e-7, 1 + 1e-4, 0.5, 3]))
    if rng.random() < 0.2:  # the edge is a whole number
        query = keys[0].copy()
        query[0] += np.float32(reach := max(round(reach), 1))
        reach = float(reach)
    score = [
        scores.Boxcar(reach),
        scores.Triangular(reach),
        scores.Epanechnikov(reach),
        scores.Constant(),
        scores.Dot(),
        scores.ScaledDot(),
        scores.Cosine(float(rng.choice([0.01, 0.1, 1]))),
        scores.Gaussian(reach / float(rng.choice([0.3, 1, 3]))),
        scores.Laplace(reach),
        scores.Multiplicative(np.diag(np.linspace(-1, 1, width))),
        scores.Gated(np.linspace(-1, 1, width), np.linspace(0.5, -0.2, width), -1.0),
    ]
    chosen = score[rng.integers(len(score)) if rng.random() < 0.5 else rng.integers(3)]
    soft = [
        weightings.Softmax(float(rng.choice([0.01, 1, 100]))),
        weightings.Hard(),
        weightings.TopK(3),
        weightings.Average(),
        weightings.Sparsemax(),
        weightings.Entmax(1.5),
        weightings.Sigmoid(),
        weightings.Raw(),
    ]
    empty = str(rng.choice(["zero", "uniform", "nearest"]))
    if not chosen.is_nonnegative:
        weighting = soft[rng.integers(len(soft)) if rng.random() < 0.5 else rng.integers(3)]
    elif rng.random() < 0.3:
        weighting = soft[rng.integers(len(soft))]
    else:
        empty = empty if chosen.ranking_score is not None else "zero"
        weighting = weightings.Normalized(empty)
    group = rng.integers(0, 2, count)
    return Case(
        seed,
        shape,
        keys,
        rng.normal(size=count),
        group,
        str(rng.choice(["g == 1", "g == 0"])) if rng.random() < 0.4 else None,
        query,
        chosen,
        weighting,
        float(rng.choice([0.5, 0.2, 0.01, 1e-4])),
        "int8" if rng.random() < 0.15 else None,
    )


def compute_oracle(case: Case) -> np.ndarray:
    """Return the weights (m,) by the formula in float64."""
    live = np.ones(len(case.keys), bool)
    if case.where is not None:
        live = case.group == int(case.where[-1])
    out = np.zeros(len(case.keys))
    if live.any():
        score = case.weighting.adapt_score(case.score)
        s = score(case.query.astype(float)[None], case.keys[live].astype(float))
        out[live] = case.weighting.limit_to_keys(int(live.sum()))(s)[0]
    return out


def distance(one: np.ndarray, two: np.ndarray) -> float:
    """Return ½ Σ |difference|; weights that do not sum to 1 are divided by the larger sum."""
    return float(0.5 * np.abs(np.asarray(one, float) - two).sum() / max(1.0, np.abs(two).sum()))


def check(case: Case) -> str:
    """Return what is wrong with the answers to a case, or an empty text. "refused" means that 8-bit
    keys cannot prove the tolerance.
    """
    columns = {"key": list(case.keys), "v": case.values, "g": case.group.tolist()}
    made = qkv.Database.from_columns(columns, key="key", value="v", precision=case.precision)
    how = {"score": case.score, "weighting": case.weighting, "where": case.where}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = made.ask(case.query, **how)
        try:
            near = made.ask(case.query, **how, tolerance=case.tolerance)
        except CombinationError as error:
            if case.precision == "int8" and "proven" in str(error):
                return "refused"
            return f"{type(error).__name__}: {error}"
        true, bound = compute_oracle(case), near.error_bound
        to_exact, to_true = distance(near.weights, exact.weights), distance(near.weights, true)
        if not bound <= case.tolerance:
            return f"the bound {bound:g} is above the tolerance"
        if bound == 0 and to_exact > ROUNDED and to_true > ROUNDED:
            return f"the bound is 0, and the answer is off by {to_exact:g} (float64: {to_true:g})"
        if min(to_exact, to_true) > bound + ROUNDED:
            return f"the bound is {bound:g}, and the answer is off by {to_exact:g}, {to_true:g}"
        window = hasattr(case.score, "profile")
        if case.precision == "int8" and to_true > bound + ROUNDED:  # of the vectors as given
            return f"the bound is {bound:g}, and the answer is off by {to_true:g} of float64"
        if window and case.precision is None and to_exact > bound + ROUNDED:
            return f"the bound is {bound:g}, and the answer without a tolerance is {to_exact:g} off"
        out = made.attend(case.query, **how, tolerance=case.tolerance)
        pooled = float(near.weights @ case.values)
        reach = np.abs(case.values).max() * max(1.0, float(np.abs(true).sum()))
        if abs(float(out[0]) - pooled) > 2 * (case.tolerance + ROUNDED) * reach:
            return f"attend gives {float(out[0]):g}, and ask {pooled:g}"
    return ""


def run(first: int, count: int) -> tuple[Counter[str], list[str]]:
    """Return how many cases of each kind passed, and the failures."""
    passed: Counter[str] = Counter()
    failed = []
    for seed in range(first, first + count):
        case = draw_case(seed)
        wrong = check(case)
        if wrong not in ("", "refused"):
            failed.append(f"{case}: {wrong}")
        passed["refused" if wrong == "refused" else "failed" if wrong else "passed"] += 1
    return passed, failed


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    passed, failed = run(0, count)
    print("\n".join(failed[:50]))
    print(f"{count:,} cases: {dict(passed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
