"""Calls of `Database.ask` and `attend`, each with the NumPy formula over the same arrays."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import qkv
from bench._calls import SCORES, WEIGHTINGS, Pairs, Score, Size
from bench._pairwise import Case, cover_pairs, list_single_steps
from bench._plain import Array, Arrays, Plain

WITHOUT = ("relative", "alibi", "relative table", "new function", "learned scale")
"""Scores that need positions, or differ from others by an array of a framework only."""
WHERE = {"none": 100.0, "1 %": 1.0, "10 %": 10.0, "50 %": 50.0}
ROWS = {
    "20,000 × 256": (20_000, 256),
    "50,000 × 64": (50_000, 64),
    "100,000 × 128": (100_000, 128),
    "100,000 × 256": (100_000, 256),
}
TEST_ROWS = {"300 × 8": (300, 8), "200 × 16": (200, 16)}
FACTORS: dict[str, tuple[str, ...]] = {
    "score": ("default", *(name for name in SCORES if name not in WITHOUT)),
    "weighting": tuple(x for x in WEIGHTINGS if x not in ("learned entmax", "straight_through")),
    "where": tuple(WHERE),
    "tolerance": ("none", "0.01"),
    "queries": ("1", "16"),
    "method": ("ask", "attend"),
    "place": ("memory", "disk"),
}

USUAL = {"score": "default", "weighting": "softmax", "where": "none", "tolerance": "none"}


def is_valid(case: Case) -> bool:
    """Return whether these options, perhaps not all of a call, go together."""
    score, weighting = SCORES.get(case.get("score", "")), WEIGHTINGS.get(case.get("weighting", ""))
    if weighting is not None and weighting.needs_nonnegative and "score" in case:
        if score is None or not score.is_nonnegative:
            return False
        if case["weighting"] == "normalized(nearest)" and case["score"] in ("constant", "exact"):
            return False
    return not (case.get("score") == "exact" and case.get("method") == "attend")


def draw_cases(seed: int, rows: dict[str, tuple[int, int]]) -> list[Case]:
    factors = {**FACTORS, "rows": tuple(rows)}
    steps = list_single_steps(factors, is_valid, seed, USUAL)
    return cover_pairs(factors, is_valid, seed, USUAL, steps)


class PlainRows(Plain):
    """NumPy's functions; facts about stored keys that a user would compute once are given."""

    def __init__(self, key: np.ndarray) -> None:
        super().__init__()
        self.key, self.units, self.squares = key, super().unit(key), (key * key).sum(-1)

    def unit(self, x: Array) -> Array:
        return self.units if x is self.key else super().unit(x)

    def square_distance(self, q: Array, k: Array) -> Array:
        if k is not self.key:
            return super().square_distance(q, k)
        square = (q * q).sum(-1)[:, None] + self.squares - 2 * self.dot(q, k)
        return self.positive(square)


class Stored(NamedTuple):
    """A database, and the arrays in it: keys (m, d), values (m,), part (m,) in 0 to 100."""

    database: Any
    o: PlainRows
    value: np.ndarray
    part: np.ndarray


class Stores:
    """The databases of a sweep, built when they are first asked for."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="qkv-floor-")
        self._made: dict[tuple[int, int, str], Stored] = {}

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *_: object) -> None:
        for stored in self._made.values():
            stored.database.close()
        self._folder.cleanup()

    def get_store(self, m: int, d: int, place: str) -> Stored:
        if (m, d, place) not in self._made:
            rng = np.random.default_rng(m + d)
            key = rng.standard_normal((m, d), np.float32)
            value, part = rng.standard_normal(m), rng.uniform(0, 100, m)
            columns = {"key": list(key), "value": value, "part": part}
            path = Path(self._folder.name) / f"{m}x{d}.qkv" if place == "disk" else None
            made = qkv.Database.from_columns(columns, key="key", value="value", path=path)
            self._made[m, d, place] = Stored(made, PlainRows(key), value.astype("float32"), part)
        return self._made[m, d, place]


@dataclass
class StoredCall:
    case: Case
    stored: Stored

    def __post_init__(self) -> None:
        self.count = int(self.case["queries"])
        d = self.stored.o.key.shape[1]
        rng = np.random.default_rng(3)
        size = Size(1, 1, 1, self.count, len(self.stored.value), d)

        def draw(*shape: int) -> np.ndarray:
            return np.asarray(rng.standard_normal(shape, np.float32))

        self.query = draw(self.count, d)
        self.score: Score | None = SCORES.get(self.case["score"])
        self.weighting = WEIGHTINGS[self.case["weighting"]]
        self.arrays: Arrays = {"query": self.query}
        if self.case["score"] == "exact":
            self.query[:] = self.stored.o.key[: self.count]
        parts = [("weighting", self.weighting.arrays)]
        parts += [("score", self.score.arrays)] if self.score is not None else []
        for part, make in parts:
            made = make(self.stored.o, draw, size)
            self.arrays |= {f"{part}.{name}": np.float32(x) for name, x in made.items()}
        self.fresh = itertools.count()

    @property
    def share(self) -> float:
        """The bound of `where`; a new one in each call, so that no filter is cached."""
        return WHERE[self.case["where"]] + 1e-9 * next(self.fresh)

    def options(self) -> dict[str, Any]:
        how: dict[str, Any] = {"weighting": self.weighting.build(self.arrays)}
        if self.score is not None:
            how["score"] = self.score.build(self.stored.o, self.arrays)
        if self.case["where"] != "none":
            how["where"] = f"part < {self.share!r}"
        if self.case["tolerance"] != "none":
            how["tolerance"] = float(self.case["tolerance"])
        return how

    def run(self) -> Any:
        database = self.stored.database
        query = self.query[0] if self.count == 1 else self.query
        method: Callable[..., Any] = getattr(database, self.case["method"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hints about scores that fit other keys
            return method(query, **self.options())

    def formula(self) -> tuple[Array, Array, Array | None]:
        """Return the output, the weights, and which rows count."""
        o, case = self.stored.o, self.case
        k, v, kept = o.key, self.stored.value, None
        if case["where"] != "none":
            kept = self.stored.part < self.share
            k, v = k[kept], v[kept]
        if self.score is None:
            view = self.stored.database._view
            s = view.resolve_score(None)(self.query, k)
        else:
            s = self.score.formula(o, self.query, k, self.arrays)
        w = self.weighting.weigh(Pairs(o, s, None, self.arrays, lambda: o.distance(self.query, k)))
        if case["method"] == "ask":
            np.argpartition(-w, min(5, w.shape[1] - 1), -1)[:, :5]  # the rows of the answer
        return w @ v, w, kept

    def check_results(self, got: Any) -> str | None:
        """Return what is wrong with the results, or None."""
        case, (out, w, kept) = self.case, self.formula()
        if self.score is not None and self.score.has_ties and case["weighting"].startswith("topk"):
            return None
        edge = self.weighting.has_edge or (self.score is not None and self.score.has_edge)
        slack = 0.0 if case["tolerance"] == "none" else float(case["tolerance"])
        if case["method"] == "attend":
            got = np.reshape(got, out.shape)
            reach = np.abs(self.stored.value).max() * max(1.0, float(np.abs(w).sum(-1).max()))
            error, close = float(np.abs(got - out).max()), (2 * slack + 2e-4) * reach
        else:
            found = np.stack([x.weights for x in (got if isinstance(got, list) else [got])])
            if found.shape[1] != w.shape[1] and kept is not None:
                found = found[:, kept]
            total = np.maximum(1.0, np.abs(w).sum(-1))
            error = float((0.5 * np.abs(found - w).sum(-1) / total).max())
            close = slack + 1e-3
        return None if error <= close or (edge and error <= 0.2) else f"off by {error:.2g}"

    def describe(self) -> str:
        case = self.case
        parts = [f"{case['method']}: {case['score']}", case["weighting"]]
        parts += [f"where {case['where']}"] * (case["where"] != "none")
        parts += [f"tolerance {case['tolerance']}"] * (case["tolerance"] != "none")
        queries = "1 query" if self.count == 1 else f"{self.count} queries"
        return f"{' · '.join(parts)} · {queries}, {case['rows']} in {case['place']}"


def iterate_calls(
    seed: int, rows: dict[str, tuple[int, int]], most: int | None = None
) -> Iterator[tuple[int, int, Callable[[], StoredCall], Case]]:
    """Yield the number of each call, the number of all, a function that makes it, and its case."""
    cases = draw_cases(seed, rows)[:most]
    with Stores() as stores:
        for i, case in enumerate(cases):

            def make(case: Case = case) -> StoredCall:
                return StoredCall(case, stores.get_store(*rows[case["rows"]], case["place"]))

            yield i, len(cases), make, case
