"""Asking: one reading of the rows for a batch of queries, made into answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv import attention, parts, weightings
from qkv.answer import Answer
from qkv.arrays import is_array, to_numpy
from qkv.arrays.ragged import Query
from qkv.arrays.rows import Weighed
from qkv.behind import Behind, Row, Share, Source
from qkv.database import cells
from qkv.database.encoding import at_words
from qkv.database.view import CHUNK, View
from qkv.database.where import as_text
from qkv.deadline import check_deadline
from qkv.errors import ArgumentError, CombinationError, counted, few
from qkv.scores import Score
from qkv.told import short
from qkv.weightings import Weighting, WeightingLike

if TYPE_CHECKING:
    from qkv.database.conformal import Promise

AT_ONCE = 2**26
"""Scores that are held together: a batch of queries is cut to this."""

WORDY = 64
"""Queries that are asked together where keys have words: each word is a column of its own."""

HELD = 2**24
"""Weights of a batch that its answers keep; beyond it an answer finds them again when asked."""

RUN = 512
"""Neighbouring rows of which only the heaviest is looked at first."""

SHARES = 1024
"""Rows whose values are compared to find the heaviest value."""

FLAT = 0.98
"""The share of the rows that takes part where as good as all do alike."""

Scatter = tuple[np.ndarray, np.ndarray]
"""A sum of squares, and the square root of what it is counted in."""


class Asked:
    """A score, a weighting and the rows that may answer; `answers` asks them."""

    where: Any = None
    """The condition that these rows pass."""

    def __init__(
        self,
        view: View,
        score: Score,
        weighting: WeightingLike,
        live: np.ndarray | None,
        top: int,
        tolerance: float | None,
        promise: Promise | str = "",
        library: str | None = None,
        confidence: float | None = None,
    ):
        self.view, self.score, self.weighting = view, score, weightings.resolve(weighting)
        self.top, self.tolerance, self.promise = top, tolerance, promise
        self.library, self.confidence = library, confidence
        self.live, self.missing = view.having_values(live)
        self.total = len(view.ids) if self.live is None else int(np.count_nonzero(self.live))
        # Where few rows may answer, weights are of those alone.
        self.asked = view.picked(self.live)[1]
        self.places = None
        if self.live is not None and self.asked < len(view.ids):
            self.places = np.flatnonzero(self.live)

    @cached_property
    def named(self) -> dict[str, str]:
        """The score and the weighting, as an answer tells of them."""
        return {"score": named(self.score), "weighting": named(self.weighting)}

    @cached_property
    def _scanned(self) -> str:
        return f"{counted(self.asked, 'row')} in {counted(self.view.pieces, 'piece')}"

    def answers(self, queries: Any) -> list[Answer]:
        pools, found = self.view.schema.pools, []
        keep = len(queries) * len(self.view) <= HELD
        for some, weighed, engine in self.batches(queries, pools):
            for i, query in enumerate(some):
                check_deadline()
                found.append(self._answer(query, weighed, i, keep, engine=engine, **self.named))
        return found

    def batches(
        self, queries: Any, value: bool, most: int = AT_ONCE
    ) -> Iterator[tuple[Any, Weighed, str]]:
        """Queries that are asked together, what is known of them, and how that was found."""
        step = max(min(AT_ONCE // len(self.view), most), 1)
        step = min(step, WORDY) if self.view.wordy else step
        for start in range(0, len(queries), step):
            check_deadline()
            some = queries[start : start + step]
            yield some, *self.weighed(some, value)

    def but(self, place: int) -> Asked:
        """The same had the row at this place not been there."""
        live = np.ones(len(self.view.ids), bool) if self.live is None else self.live.copy()
        live[place] = False
        how = (self.top, self.tolerance, self.promise, self.library, self.confidence)
        made = Asked(self.view, self.score, self.weighting, live, *how)
        made.missing, made.where = self.missing, self.where
        return made

    def weighed(self, queries: Any, value: bool) -> tuple[Weighed, str]:
        view, code, matches = self.view, Query(None), None
        if self.score.compares_keys:
            matches, engine = self.matches(queries), "exact index"
        else:
            code, engine = self._encoded(queries), f"scan of {self._scanned}"
        found = attention.weigh(
            view.vectors(self.live, value=value, asked=code.asked),
            code.code,
            score=self.score,
            weighting=self.weighting,
            tolerance=self.tolerance,
            confidence=self.confidence,
            matches=matches,
        )
        if found.bound is not None:
            engine = f"codes of {self._scanned}, {found.read:,} of them read in full"
        elif found.refused:
            engine += f", exactly: {found.refused}"
        return found, engine

    def matches(self, queries: Any) -> np.ndarray:
        """1 where a row's key is the query, else 0, (n, m)."""
        ids = self.view.ids if self.places is None else self.view.ids[self.places]
        found = np.zeros((len(queries), len(ids)))
        for i, key in enumerate(queries):
            found[i, np.isin(ids, self.view.find(key))] = 1.0
        return found

    def _encoded(self, queries: Any) -> Query:
        given = is_array(queries) and self.view.schema.key_kind != "vector"  # not a text: a vector
        if not given:
            return self.view.encoded(queries)
        code = to_numpy(queries)
        self.view.check(Query(code))
        if not np.isfinite(code).all():
            bad = int(np.isfinite(code).all(axis=1).argmin())
            raise ArgumentError(f"query {bad} holds NaN or infinity: no row is near it")
        return Query(np.ascontiguousarray(code, dtype=np.result_type(code, np.float32)))

    def _answer(self, query: Any, found: Weighed, at: int, keep: bool, **told: Any) -> Answer:
        alpha, pooled = found.weights[at], found.out[at] if self.view.schema.pools else None
        error = found.error
        if isinstance(query, np.ndarray) and query.ndim == 0:
            query = query.item()
        top = self.top if pooled is not None else max(self.top, SHARES)
        places, weights = self.heaviest(alpha, top)
        records = self._records(places)
        rows = self.rows_at(places[: self.top], weights[: self.top], records)
        value, values = None, []
        if pooled is not None and (rows or np.isnan(pooled).any()):
            value = self.value(pooled)
        elif records:
            held = self.view.schema.values_of(records[:SHARES])
            values = _shares(held, weights.tolist())
            value = values[0].value
        entropy = None if found.entropy is None else float(found.entropy[at])
        fits = isinstance(self.promise, str) or found.best[at] >= self.promise.best
        answer: Answer = object.__new__(Answer)  # which sets its fields one by one, as it is frozen
        vars(answer).update(
            query=query,
            value=value,
            rows=rows,
            values=values,
            total=self.total,
            missing=self.missing,
            shares=self.weighting.convex,
            version=self.view.version,
            lse=None if found.lse is None else float(found.lse[at]),
            error_bound=float(error if isinstance(error, float) else error[at]),
            rows_read=found.read,
            statistical=found.statistical,
            coverage=None if isinstance(self.promise, str) else self.promise.coverage,
            **told,
            _behind=InProcess(self, query, alpha if keep else None, value, entropy, fits),
            _library=self.library,
        )
        return answer

    def source(self, query: Any, alpha: np.ndarray, most: int) -> Source:
        view, order = self.view, np.arange(len(alpha))
        if self.places is None and self.live is not None:
            order = np.flatnonzero(self.live)
        if len(order) > most:
            order = np.sort(self.order(alpha, most))
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
            rows=self.rows_in(alpha, order),
            keys=keys,
            query=code,
            encoder=view.encoder,
            score=self.score,
            weighting=self.weighting,
            names=(", ".join(schema.key), ", ".join(schema.value)),
        )

    def lacking(self, query: Any) -> str:
        """That the query is a key, where no row that has it has a value; else empty."""
        schema = self.view.schema
        if is_array(query) and schema.key_kind != "vector":
            return ""
        rows = self.view.rows(self.view.find(query))
        lacks = [[name for name in schema.value if cells.is_missing(row[name])] for row in rows]
        if not rows or not all(x if schema.pools else len(x) == len(schema.value) for x in lacks):
            return ""
        return f"{short(query)} is a key, but its row lacks {few(lacks[-1])} and is left out"

    def weights(self, queries: Any) -> np.ndarray:
        """α of every row for each query, (n, m), 0 for those that were not asked."""
        return self.of_all(self.weighed(queries, value=False)[0].weights)

    def of_all(self, alpha: np.ndarray) -> np.ndarray:
        """Numbers (…, m) of all rows, 0 for those that were not asked."""
        if self.places is None:
            return alpha
        out = np.zeros((*alpha.shape[:-1], len(self.view.ids)), alpha.dtype)
        out[..., self.places] = alpha
        return out

    def order(self, alpha: np.ndarray, top: int) -> np.ndarray:
        """Places of the heaviest rows; of equal ones the lowest comes first."""
        size = alpha if self.weighting.convex else np.abs(alpha)
        if top >= len(size):
            near = (-size).argsort(kind="stable")
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
        found: np.ndarray = near[: np.count_nonzero(size[near] > 0)]  # NaN comes last
        return found

    def heaviest(self, alpha: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
        """The places of the heaviest rows, and their weights."""
        order = self.order(alpha, top)
        return order if self.places is None else self.places[order], alpha[order]

    def rows_in(self, alpha: np.ndarray, order: np.ndarray) -> list[Row]:
        """The rows of these weights in an order of their places."""
        return self.rows_at(order if self.places is None else self.places[order], alpha[order])

    def rows_at(
        self, places: np.ndarray, weights: np.ndarray, records: list[dict[str, Any]] | None = None
    ) -> list[Row]:
        """The rows at some places, with these weights; the first records are theirs, if known."""
        records = self._records(places) if records is None else records
        records, schema = records[: len(places)], self.view.schema
        told = (schema.keys_in(records), schema.values_of(records), weights.tolist())
        return list(map(Row, *told, places.tolist(), records))

    def _records(self, places: np.ndarray) -> list[dict[str, Any]]:
        return self.view.rows(self.view.ids[places].tolist())

    def value(self, pooled: np.ndarray) -> Any:
        if self.view.schema.value_kind == "number":
            return float(pooled[0])
        if self.view.schema.value_kind == "numbers":
            return dict(zip(self.view.schema.value, map(float, pooled), strict=True))
        return pooled

    def scatter(self, alpha: np.ndarray, mean: np.ndarray) -> Scatter:
        """Σᵢ αᵢ (vᵢ − mean)² / 4, in units of the square of the second array."""
        total = np.zeros_like(np.atleast_1d(mean), dtype=float)
        found = total, np.full_like(total, np.finfo(float).tiny)
        with np.errstate(invalid="ignore"):
            for group in self.view.vectors(self.live, value=True).cuts(CHUNK, ahead=("value",)):
                for cut in group:
                    some = alpha[cut.start : cut.start + cut.size]
                    used = np.flatnonzero(some)
                    # Halves, over the largest so far: no square goes beyond a float.
                    far = cut.value(used).astype(float) / 2 - mean / 2
                    size = np.maximum(np.abs(far).max(axis=0, initial=0), found[1])
                    found = farther(found, (some[used] @ (far / size) ** 2, size))
        return found


class InProcess(Behind):
    """The weights `alpha` of one query and their entropy, None where they are found when asked
    for; its set is empty where the query does not `fit` what was promised."""

    def __init__(
        self, asked: Asked, query: Any, alpha: Any, value: Any, entropy: float | None, fits: bool
    ):
        self.asked, self.query, self.alpha, self.value = asked, query, alpha, value
        self.told, self.fits = entropy, fits

    def _alpha(self) -> Any:
        if self.alpha is not None:
            return self.alpha
        return self.asked.weighed(one(self.query), value=False)[0].weights[0]

    def weights(self) -> np.ndarray:
        return self.asked.of_all(np.asarray(self._alpha()))

    def entropy(self) -> float:
        if self.told is not None:
            return self.told
        return float(parts.entropy(np.asarray(self._alpha())[None])[0])

    def spread(self) -> Any:
        asked, value = self.asked, self.value
        if value is None or not asked.view.schema.pools:
            return None
        mean = np.asarray(list(value.values()) if isinstance(value, dict) else value)
        total, size = asked.scatter(self._alpha(), mean)
        return asked.value(2 * size * np.sqrt(np.maximum(total, 0)))

    def above(self, weight: float) -> list[Row]:
        alpha = np.asarray(self._alpha())
        some = np.where(alpha >= weight, alpha, 0)
        count = max(int(np.count_nonzero(some)), 1)
        return self.asked.rows_at(*self.asked.heaviest(some, count))

    def set(self) -> list[Row]:
        asked = self.asked
        if not self.fits:
            return []
        if isinstance(asked.promise, str):
            raise CombinationError(f"the database promises no set: {asked.promise}")
        alpha = np.asarray(self._alpha())
        fits = alpha >= asked.promise.weight
        if asked.live is not None and asked.places is None:
            fits &= asked.live
        some = np.flatnonzero(fits)
        return asked.rows_in(alpha, some[np.argsort(-alpha[some], kind="stable")])

    def without(self, place: int) -> Answer:
        asked, rows = self.asked, len(self.asked.view.ids)
        if not 0 <= place < rows:
            raise ArgumentError(f"row {place}: there are the rows 0 to {rows - 1:,}")
        if not (asked.live is None or asked.live[place]):
            raise ArgumentError(f"row {place} was not asked, so the answer is the same without it")
        return asked.but(place).answers(one(self.query))[0]

    def influence(self) -> Any:
        from qkv.database.influence import influence

        return influence(self.asked, self.query, np.asarray(self._alpha()), self.value)

    def hint(self, rows: list[Row]) -> str:
        asked = self.asked
        if not asked.total and asked.where is not None:
            if asked.missing:
                match = "matches" if asked.missing == 1 else "match"
                told = f"{counted(asked.missing, 'row')} {match} {as_text(asked.where)}"
                return f"{told}, but none of them has a value"
            return asked.view.why_none_pass(asked.where)
        if asked.missing and (told := asked.lacking(self.query)):
            return told
        if not rows or asked.score is not asked.view.score(None):
            return ""
        several = asked.weighting.convex and asked.total > 1
        flat = several and self.entropy() > math.log(asked.total * FLAT)
        if flat and not _tells_apart(asked.weighting):
            return ""
        return asked.view.encoder.hint(self.query, rows[0].key, flat)

    def source(self, most: int) -> Source:
        return self.asked.source(self.query, np.asarray(self._alpha()), most)


def _tells_apart(weighting: Weighting) -> bool:
    """Whether scores that are 1 apart have other weights: else rows look alike by its own doing."""
    found = np.asarray(weighting(np.array([[0.0, 1.0]])))
    return bool((parts.entropy(found) < math.log(2 * FLAT)).all())


def farther(one: Scatter, two: Scatter) -> Scatter:
    """The sum of both, in the larger units."""
    size = np.maximum(one[1], two[1])
    return one[0] * (one[1] / size) ** 2 + two[0] * (two[1] / size) ** 2, size


def _shares(values: list[Any], weights: list[float]) -> list[Share]:
    """The weight of each value, heaviest first."""
    total: dict[Any, float] = {}
    first: dict[Any, Any] = {}
    for value, weight in zip(values, weights, strict=False):
        name = value if type(value) is str else mark(value)
        total[name] = total.get(name, 0.0) + weight
        first.setdefault(name, value)
    return sorted(map(Share, first.values(), total.values()), key=itemgetter(1), reverse=True)


def mark(value: Any) -> Any:
    """What two values have in common if they are the same."""
    if type(value) is str:
        return value
    if type(value) is dict and _SIMPLE.issuperset(map(type, value.values())):
        return tuple((type(x), x) for x in value.values())
    return cells.dumps({"value": value}).encode()


_SIMPLE = {str, int, bool, type(None)}


def one(query: Any) -> Any:
    """A query as a batch of one."""
    return query[None] if is_array(query) else [query]


def _largest(x: np.ndarray, k: int) -> Any:
    """The k-th largest number of x, or the least where there are fewer."""
    k = min(k, len(x))
    return np.partition(x, len(x) - k)[len(x) - k]


def named(thing: Any) -> str:
    """The name of a score or weighting, with the numbers in it that are not its own defaults."""
    told = [
        f"{field.name}={number:.4g}"
        for field in getattr(thing, "__dataclass_fields__", {}).values()
        if (number := getattr(thing, field.name)) is not field.default
        and isinstance(number, int | float)
        and number != field.default
    ]
    return f"{type(thing).__name__}({', '.join(told)})" if told else type(thing).__name__
