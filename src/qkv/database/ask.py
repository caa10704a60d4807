"""Asking: one reading of the rows for a batch of queries, made into answers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from qkv import attention
from qkv.answer import Answer, Row, Share, Source
from qkv.arrays import is_array, to_numpy
from qkv.arrays.ragged import Query
from qkv.arrays.rows import Weighed
from qkv.database import cells
from qkv.database.encoding import at_words
from qkv.database.view import CHUNK, View
from qkv.errors import ArgumentError
from qkv.scores import Score
from qkv.weightings import Weighting

RUN = 512
"""Neighbouring rows of which only the heaviest is looked at first."""

SHARES = 1024
"""Rows whose values are compared to find the heaviest value."""


class Asked:
    """A score, a weighting and the rows that may answer; `answers` asks them."""

    def __init__(
        self,
        view: View,
        score: Score,
        weighting: Weighting,
        live: np.ndarray | None,
        top: int,
        tolerance: float | None,
    ):
        self.view, self.score, self.weighting = view, score, weighting
        self.top, self.tolerance = top, tolerance
        self.live, self.missing = view.having_values(live)
        self.total = len(view.ids) if self.live is None else int(np.count_nonzero(self.live))
        # Where few rows may answer, weights are of those alone.
        self.asked = view.vectors(self.live).key.shape[0]
        self.places = None
        if self.live is not None and self.asked < len(view.ids):
            self.places = np.flatnonzero(self.live)

    def answers(self, queries: Any, keep: bool) -> list[Answer]:
        pools = self.view.schema.pools
        found, engine = self._weighed(queries, pools)
        sums = [None] * len(queries) if found.lse is None else found.lse.tolist()
        told = {"engine": engine, "score": _named(self.score), "weighting": _named(self.weighting)}
        each = zip(queries, found.weights, found.entropy.tolist(), sums, found.out, strict=True)
        return [
            self._answer(
                query, alpha, out if pools else None, keep, entropy=entropy, lse=lse, **told
            )
            for query, alpha, entropy, lse, out in each
        ]

    def _weighed(self, queries: Any, value: bool) -> tuple[Weighed, str]:
        view, code, matches = self.view, Query(None), None
        if self.score.compares_keys:
            ids = view.ids if self.places is None else view.ids[self.places]
            matches = np.zeros((len(queries), len(ids)))
            for i, key in enumerate(queries):
                matches[i, np.isin(ids, view.find(key))] = 1.0
            engine = "exact index"
        else:
            code = self._encoded(queries)
            pieces = f"{view.pieces} piece{'s' if view.pieces > 1 else ''}"
            engine = f"scan of {self.asked:,} rows in {pieces}"
        found = attention.weigh(
            view.vectors(self.live, value=value, asked=code.asked),
            code.code,
            score=self.score,
            weighting=self.weighting,
            tolerance=self.tolerance,
            matches=matches,
        )
        return found, engine

    def _encoded(self, queries: Any) -> Query:
        given = is_array(queries) and self.view.schema.key_kind != "vector"  # not a text: a vector
        found = Query(to_numpy(queries)) if given else self.view.encoded(queries)
        self.view.check(found)
        code = found.code
        if given and not np.isfinite(code).all():
            bad = int(np.isfinite(code).all(axis=1).argmin())
            raise ArgumentError(f"query {bad} holds NaN or infinity: no row is near it")
        code = np.ascontiguousarray(code, dtype=np.result_type(code, np.float32))
        return Query(code, found.asked)

    def _answer(
        self,
        query: Any,
        alpha: np.ndarray,
        pooled: np.ndarray | None,
        keep: bool,
        **told: Any,
    ) -> Answer:
        if isinstance(query, np.ndarray) and query.ndim == 0:
            query = query.item()
        rows = self._heaviest(alpha, self.top if pooled is not None else max(self.top, SHARES))
        value, values = None, []
        if pooled is not None and (rows or np.isnan(pooled).any()):
            value = self._value(pooled)
        elif rows:
            values = _shares(rows[:SHARES])
            value, rows = values[0].value, rows[: self.top]
        given = partial(np.asarray, alpha) if keep else partial(self._again, query)

        def above(weight: float) -> list[Row]:
            found = given()
            return self._heaviest(np.where(found >= weight, found, 0), len(found))

        return Answer(
            query=query,
            value=value,
            rows=rows,
            values=values,
            total=self.total,
            missing=self.missing,
            version=self.view.version,
            **told,
            _weights=lambda: self._of_all(given()),
            _spread=lambda: self._spread(given(), value),
            _above=above,
            _source=lambda most: self._source(query, given(), most),
        )

    def _source(self, query: Any, alpha: np.ndarray, most: int) -> Source:
        view, order = self.view, np.arange(len(alpha))
        if self.places is None and self.live is not None:
            order = np.flatnonzero(self.live)
        if len(order) > most:
            order = np.sort(self._order(alpha, most))
        keys = code = None
        if not self.score.compares_keys:
            places = order if self.places is None else self.places[order]
            ids = view.ids[places]
            keys = view.codes(ids)
            code = self._encoded(query[None]).code if is_array(query) else None
            if code is None:
                words = view.snapshot.tensor("sparse", ids) if view.wordy else None
                code, keys = at_words(view.encoder, [query], keys, words)
            code = code[0]
        schema = view.schema
        return Source(
            rows=self._rows(alpha, order),
            keys=keys,
            query=code,
            encoder=view.encoder,
            score=self.score,
            weighting=self.weighting,
            names=(", ".join(schema.key), ", ".join(schema.value)),
        )

    def _again(self, query: Any) -> np.ndarray:
        queries = query[None] if is_array(query) else [query]
        return np.asarray(self._weighed(queries, value=False)[0].weights[0])

    def _of_all(self, alpha: np.ndarray) -> np.ndarray:
        """The weights of all rows, 0 for those that were not asked."""
        if self.places is None:
            return alpha
        out = np.zeros(len(self.view.ids), alpha.dtype)
        out[self.places] = alpha
        return out

    def _order(self, alpha: np.ndarray, top: int) -> np.ndarray:
        """Places of the heaviest rows; of equal ones the lowest comes first."""
        size = alpha if self.weighting.convex else np.abs(alpha)
        if top >= len(size):
            near = np.arange(len(size))
        else:
            # The heaviest lie where the maxima of short runs are among the largest.
            starts = np.arange(0, len(size), RUN)
            best = np.maximum.reduceat(size, starts)
            runs = starts[(best >= _largest(best, top)) & (best > 0)]
            near = (runs[:, None] + np.arange(RUN)).reshape(-1)
            near = near[near < len(size)]
            if len(near):
                near = near[size[near] >= _largest(size[near], top)]
        near = near[np.argsort(-size[near], kind="stable")][:top]
        return np.asarray(near[size[near] > 0])

    def _heaviest(self, alpha: np.ndarray, top: int) -> list[Row]:
        return self._rows(alpha, self._order(alpha, top))

    def _rows(self, alpha: np.ndarray, order: np.ndarray) -> list[Row]:
        if not len(order):
            return []
        places = order if self.places is None else self.places[order]
        schema, rows = self.view.schema, self.view.rows(self.view.ids[places].tolist())
        return [
            Row(schema.key_of(r), schema.value_of(r), float(alpha[i]), int(place), r)
            for i, place, r in zip(order, places, rows, strict=True)
        ]

    def _value(self, pooled: np.ndarray) -> Any:
        if self.view.schema.value_kind == "number":
            return float(pooled[0])
        if self.view.schema.value_kind == "numbers":
            return dict(zip(self.view.schema.value, map(float, pooled), strict=True))
        return pooled

    def _spread(self, alpha: np.ndarray, value: Any) -> Any:
        if value is None or not self.view.schema.pools:
            return None
        mean = np.asarray(list(value.values()) if isinstance(value, dict) else value)
        total = np.zeros_like(np.atleast_1d(mean), dtype=float)
        size = np.full_like(total, np.finfo(float).tiny)
        with np.errstate(invalid="ignore"):
            for group in self.view.vectors(self.live, value=True).cuts(CHUNK):
                for cut in group:
                    some = alpha[cut.start : cut.start + cut.size]
                    used = np.flatnonzero(some)
                    # Halves, over the largest so far: no square goes beyond a float.
                    far = cut.value(used).astype(float) / 2 - mean / 2
                    largest = np.abs(far).max(axis=0, initial=0)
                    larger = np.maximum(size, largest)
                    total *= (size / larger) ** 2
                    total += some[used] @ (far / larger) ** 2
                    size = larger
            return self._value(2 * size * np.sqrt(np.maximum(total, 0)))


def _shares(rows: list[Row]) -> list[Share]:
    """The weight of each value, heaviest first."""
    total: dict[Any, list[Any]] = {}
    for row in rows:
        total.setdefault(_mark(row.value), [row.value, 0.0])[1] += row.weight
    found = [Share(value, weight) for value, weight in total.values()]
    return sorted(found, key=lambda share: -share.weight)


def _mark(value: Any) -> Any:
    """What two values have in common if they are the same."""
    if type(value) is str:
        return value
    if type(value) is dict and _SIMPLE.issuperset(map(type, value.values())):
        return tuple((type(x), x) for x in value.values())
    return cells.dumps({"value": value}).encode()


_SIMPLE = {str, int, bool, type(None)}


def _largest(x: np.ndarray, k: int) -> Any:
    """The k-th largest number of x, or the least where there are fewer."""
    k = min(k, len(x))
    return np.partition(x, len(x) - k)[len(x) - k]


def _named(thing: Any) -> str:
    """The name of a score or weighting, with the numbers in it that are not its own defaults."""
    told = [
        f"{field.name}={getattr(thing, field.name):.4g}"
        for field in getattr(thing, "__dataclass_fields__", {}).values()
        if isinstance(getattr(thing, field.name), int | float)
        and getattr(thing, field.name) != field.default
    ]
    return f"{type(thing).__name__}({', '.join(told)})" if told else type(thing).__name__
