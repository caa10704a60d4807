"""Does `value_of_rows` find wrong labels? Digits of scikit-learn with some random labels.

Every twentieth of 1,000 rows has a wrong label. Half of the other 797 digits, with right labels,
give the value of each row. The other half is queried before and after the 50 worst rows are
removed.

    python -m bench.worth [--write]
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import qkv
from bench._results import write

ROWS, EVERY, WIDTH = 1000, 20, 8.0


def main() -> None:
    rng = np.random.default_rng(0)
    pictures, digits = load_digits(return_X_y=True)
    order = rng.permutation(len(digits))
    pictures, digits = pictures[order], digits[order]
    said = digits.copy()
    wrong = np.arange(0, ROWS, EVERY)
    said[wrong] = (said[wrong] + rng.integers(1, 10, len(wrong))) % 10
    D = qkv.Database(pictures[:ROWS], [str(x) for x in said[:ROWS]])
    pairs = list(zip(pictures[ROWS:], map(str, digits[ROWS:]), strict=True))
    pairs, others = pairs[::2], pairs[1::2]
    began = time.perf_counter()
    found = D.value_of_rows(pairs, score=qkv.scores.Gaussian(WIDTH))
    seconds = time.perf_counter() - began
    worst = [row.index for row in found.worst(len(wrong))]
    after = qkv.Database(*kept(pictures, said, ~np.isin(np.arange(ROWS), worst)))
    right = {
        "share of the worst that is wrong": float(np.isin(worst, wrong).mean()),
        "share of the wrong below 0": float((found.worth[wrong] < 0).mean()),
        "answers right": hits(D, others),
        "answers right, without the worst": hits(after, others),
    }
    row: dict[str, Any] = {
        "work": f"valuate: {len(wrong)} wrong labels among {ROWS:,} digits, {len(pairs)} pairs",
        "found": right,
        "seconds": seconds,
        "goals": [],
    }
    print(*(f"{name}: {x:.3g}" for name, x in right.items()), f"{seconds:.1f} s", sep="\n")
    if "--write" in sys.argv:
        write("worth", [row], replace=True)


def kept(pictures: np.ndarray, said: np.ndarray, some: np.ndarray) -> tuple[np.ndarray, list[str]]:
    return pictures[:ROWS][some], [str(x) for x in said[:ROWS][some]]


def hits(D: qkv.Database, pairs: list[tuple[np.ndarray, str]]) -> float:
    answers = D.ask(np.stack([query for query, _ in pairs]), score=qkv.scores.Gaussian(WIDTH))
    return float(np.mean([x.value == y for x, (_, y) in zip(answers, pairs, strict=True)]))


if __name__ == "__main__":
    main()
