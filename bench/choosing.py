"""Which score, which weighting? Compare them on three real tables, for docs/choosing.md.

The tables are scikit-learn's diabetes (442 patients, ten measurements, progress after a year), wine
(178 wines, 13 measurements, three growers) and digits (1,797 images of 8 × 8 pixels). There are
five folds, and columns are in standard deviations. The width or temperature is the best of ten by
leave-one-out on the training folds.

    python -m bench.choosing
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn import datasets
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

import qkv
from qkv import scores, weightings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "choosing.md"
MARKED = re.compile(r"(?<=<!-- measured -->\n).*(?=<!-- /measured -->)", re.DOTALL)
WIDTHS = np.geomspace(0.1, 4, 10)
Way = Callable[[float], tuple[Any, Any]]
"""From a width to a score and a weighting."""


def window(score: Callable[[float], Any], width: float) -> tuple[Any, Any]:
    return score(4 * width), weightings.Normalized(on_empty="nearest")


def softmax(score: Callable[[float], Any], width: float) -> tuple[Any, Any]:
    return score(width), "softmax"


def gaussian(weighting: Any, width: float) -> tuple[Any, Any]:
    return scores.Gaussian(width), weighting


BY_SCORE: dict[str, Way] = {
    "`Gaussian`": partial(softmax, scores.Gaussian),
    "`Laplace`": partial(softmax, lambda width: scores.Laplace(width)),
    "`Cosine`": partial(softmax, lambda width: scores.Cosine(width / 10)),
    "`Dot`": lambda width: (scores.Dot(), weightings.Softmax(width)),
    "`Epanechnikov`": partial(window, scores.Epanechnikov),
    "`Triangular`": partial(window, scores.Triangular),
    "`Boxcar`": partial(window, scores.Boxcar),
}
BY_WEIGHTING: dict[str, Way] = {
    "`softmax`": partial(gaussian, "softmax"),
    "`entmax15`": partial(gaussian, "entmax15"),
    "`sparsemax`": partial(gaussian, "sparsemax"),
    "`TopK(10)`": partial(gaussian, weightings.TopK(10)),
    "`hard`": partial(gaussian, "hard"),
    "`average`": partial(gaussian, "average"),
}


class Table(NamedTuple):
    name: str
    x: np.ndarray
    y: np.ndarray  # a column of numbers, or a one-hot row for each class

    @property
    def classes(self) -> bool:
        return self.y.shape[1] > 1

    def folds(self) -> list[Any]:
        kind = StratifiedKFold if self.classes else KFold
        by = self.y.argmax(1) if self.classes else self.y[:, 0]
        return list(kind(5, shuffle=True, random_state=0).split(self.x, by))


def tables() -> list[Table]:
    x, y = datasets.load_diabetes(return_X_y=True, scaled=False)
    found = [Table("diabetes", x, y[:, None])]
    for name, load in (("wine", datasets.load_wine), ("digits", datasets.load_digits)):
        x, y = load(return_X_y=True)
        found.append(Table(name, x, np.eye(int(y.max()) + 1)[y]))
    return found


def split(table: Table, fold: Any) -> tuple[np.ndarray, ...]:
    """Return keys, values, queries and targets; columns are in standard deviations, over √d."""
    known, held = fold
    mean, spread = table.x[known].mean(0), table.x[known].std(0)
    unit = np.where(spread > 0, spread, 1.0) * np.sqrt(table.x.shape[1])
    x = (table.x - mean) / unit
    return x[known], table.y[known], x[held], table.y[held]


def answered(table: Table, way: Way) -> np.ndarray:
    """Return the answer for every row from the folds that do not contain it."""
    out = np.zeros_like(table.y, dtype=float)
    for fold in table.folds():
        key, value, query, _ = split(table, fold)
        others = ~np.eye(len(key), dtype=bool)
        errors = []
        for width in WIDTHS:
            score, weighting = way(width)
            guess = qkv.attend(key, key, value, score=score, weighting=weighting, mask=others)
            errors.append(np.mean((guess - value) ** 2))
        score, weighting = way(WIDTHS[int(np.argmin(errors))])
        out[fold[1]] = qkv.attend(query, key, value, score=score, weighting=weighting)
    return out


def neighbours(table: Table) -> np.ndarray:
    """Return the same for k nearest neighbours, with k chosen in the same way."""
    out = np.zeros_like(table.y, dtype=float)
    kind = KNeighborsClassifier if table.classes else KNeighborsRegressor
    for fold in table.folds():
        key, value, query, _ = split(table, fold)
        order = np.argsort(((key[:, None] - key) ** 2).sum(-1) + 1e9 * np.eye(len(key)), 1)
        near = value[order[:, :40]].cumsum(1) / np.arange(1, 41)[:, None]
        k = int(((near - value[:, None]) ** 2).mean((0, 2)).argmin()) + 1
        model = kind(k).fit(key, value.argmax(1) if table.classes else value)
        out[fold[1]] = (model.predict_proba if table.classes else model.predict)(query)
    return out


def figures(table: Table, out: np.ndarray) -> str:
    if not table.classes:
        return f"{np.sqrt(np.mean((out - table.y) ** 2)):.1f}"
    right = (out.argmax(1) == table.y.argmax(1)).mean()
    loss = -np.log(np.clip((out * table.y).sum(1), 1e-3, 1)).mean()
    return f"{right:.1%}, {loss:.3f}"


def written(first: str, ways: dict[str, Way], given: list[Table]) -> str:
    lines = [f"| {first} | {' | '.join(table.name for table in given)} |", "|---|---|---|---|"]
    for name, way in ways.items():
        cells = [figures(table, answered(table, way)) for table in given]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    given = tables()
    by_score = written("score", BY_SCORE, given)
    peer = " | ".join(figures(table, neighbours(table)) for table in given)
    by_weighting = written("weighting", BY_WEIGHTING, given)
    text = f"{by_score}\n| k nearest neighbours | {peer} |\n\n{by_weighting}\n"
    print(text)
    PAGE.write_text(MARKED.sub(lambda _: text, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
