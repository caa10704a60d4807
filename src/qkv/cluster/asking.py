"""Answers from shards: the same as a database's, of which no shard has seen all rows."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any
from uuid import uuid4

import numpy as np

from qkv import parts
from qkv.arrays import framework, is_array, to_numpy
from qkv.arrays.ragged import Query
from qkv.arrays.rows import Weighed
from qkv.behind import Source
from qkv.cluster.fleet import Many, Sent
from qkv.cluster.shard import First, Heaviest, Job, Summed
from qkv.database.ask import AT_ONCE, SHARES, Asked, Scatter, farther
from qkv.database.conformal import Promise
from qkv.database.faults import LostShard
from qkv.database.view import View
from qkv.database.where import Among
from qkv.errors import CombinationError, counted
from qkv.scores import Score
from qkv.weightings import State, Weighting, WeightingLike
from qkv.weightings.bound import Bound
from qkv.weightings.softmax import Softmax

FAR = 1e6
"""A log-sum-exp from which on a float has too few digits left for the sum of its exponentials."""


class Spread(View):
    """One version of rows that shards hold; what looks at all of them is done by the shards."""

    snapshot: Many  # type: ignore[assignment]

    @cached_property
    def _listed(self) -> tuple[np.ndarray, int]:
        return np.arange(len(self)), len(self.snapshot.slices)

    def find(self, key: Any) -> list[int]:
        return self.snapshot.find(to_numpy(key) if is_array(key) else key) if self.begun else []

    def value(self, key: Any, default: Any) -> Any:
        found = self.find(key)
        return self.values(found[-1:])[0] if found else default

    def where(self, wish: Any) -> np.ndarray | None:
        return self._marked("where", self._among(wish))

    def _among(self, wish: Any, without: Collection[int] = ()) -> Any:
        """A condition as the leaves are told it: what may be compared is the same for all."""
        if wish is None or callable(wish):
            return wish
        return Among(wish, self._counted(without) if without else self._kinds)

    @cached_property
    def _kinds(self) -> dict[str, np.ndarray]:
        return self._counted()

    def _counted(self, without: Collection[int] = ()) -> dict[str, np.ndarray]:
        """The census of every column but those of vectors."""
        schema = self.schema if self.begun else None
        names = [x for x in schema.columns if x not in schema.vectors] if schema else []
        found = self.snapshot.each("censuses", names, without=without)
        return {name: sum(each[name] for each in found) for name in names}

    @cached_property
    def present(self) -> np.ndarray | None:
        return self._marked("present")

    def _marked(self, name: str, *args: Any) -> np.ndarray | None:
        """Which rows the leaves mark, (m,); None where all do."""
        found = zip(self.snapshot.each("viewed", name, *args), self.snapshot.slices, strict=True)
        parts = [
            (np.ones(slice.rows, bool), False) if some is None else (some, True)
            for some, (_, slice) in found
        ]
        return np.concatenate([some for some, _ in parts]) if any(x for _, x in parts) else None

    def census(self, name: str) -> np.ndarray:
        if name in self._kinds:
            return self._kinds[name]
        return sum(each[name] for each in self.snapshot.each("censuses", [name]))  # type: ignore[no-any-return]

    def whole(self, name: str, bits: int = 64) -> bool:
        return all(self.snapshot.each("viewed", "whole", name, bits))

    def dated(self, name: str) -> bool:
        return any(self.snapshot.each("viewed", "dated", name))

    @cached_property
    def _widths(self) -> tuple[int, int]:
        code, value = (self.snapshot.kind(name) for name in ("code", "value"))
        return code[1][0], 0 if value is None else value[1][0]

    def vectors(self, *_: Any, **__: Any) -> Any:
        raise CombinationError("the rows lie in shards: open the database itself for this")

    def job(
        self,
        code: Query,
        keys: Any,
        score: Score,
        weighting: Weighting,
        where: Any,
        but: int | None = None,
        without: Collection[int] = (),
    ) -> Job:
        return Job(
            uuid4().hex,
            code.code,
            code.asked,
            keys,
            score,
            weighting,
            self._among(where, without),
            len(self),
            self.schema.pools,
            but,
        )


class One:
    """The weights of one query's answer: those of its heaviest rows are here, others are asked."""

    def __init__(
        self, asked: Sent, known: State | Summed, i: int, found: list[Heaviest], convex: bool
    ):
        self.asked, self.known, self.i = asked, known, i
        places = np.concatenate([some.places[i] for some in found])
        weights = np.concatenate([some.weights[i] for some in found])
        size = weights if convex else np.abs(weights)
        order = np.lexsort((places, -size))[: np.count_nonzero(size)]
        self.places, self.weights = places[order], weights[order]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        lost = self.asked.without
        found = iter(self.asked.each("weights", self.known, self.i))
        slices = self.asked.many.slices
        every = [np.zeros(s.rows) if shard in lost else next(found) for shard, s in slices]
        return np.concatenate(every).astype(dtype or self.weights.dtype, copy=False)


class Gathered(Asked):
    """A score, a weighting and a condition; `answers` asks the shards."""

    view: Spread

    def __init__(
        self,
        view: Spread,
        score: Score,
        weighting: WeightingLike,
        where: Any,
        top: int,
        tolerance: float | None,
        promise: Promise | str = "",
        library: str | None = None,
        confidence: float | None = None,
        but: int | None = None,
    ):
        self.view, self.score, self.where, self.top = view, score, where, top
        self._read_as, known = parts.resolved(score, weighting, None)
        self.weighting, self.tolerance = known.among(len(view)), tolerance
        self.promise, self.library, self._but = promise, library, but
        self._rounded = tolerance is not None and view.rounded and view.kept.coded
        if self._rounded and type(self.weighting) is not Softmax:
            raise CombinationError(
                "tolerance: shards prove it for softmax alone, and the vectors are kept in 8 bits. "
                "Ask without one, or keep them as float32"
            )
        self.live = self.places = None
        self.refused = ""
        self.total = self.missing = 0
        self._rows_of: dict[int, dict[str, Any]] = {}

    def but(self, place: int) -> Gathered:
        how = (self.top, self.tolerance, self.promise, self.library, None, place)
        return Gathered(self.view, self.score, self.weighting, self.where, *how)

    def weighed(self, queries: Any, value: bool) -> tuple[Weighed, str]:
        many, lost = self.view.snapshot, dict[int, LostShard]()
        while True:
            try:
                with framework("numpy").quiet():
                    return self._gathered(queries, lost)
            except LostShard as fault:
                held = {shard for shard, _ in many.slices}
                if not many.fleet.partial or held <= {*lost, fault.shard}:
                    raise
                lost[fault.shard] = fault

    def _gathered(
        self, queries: Any, lost: dict[int, LostShard], wide: bool = False
    ) -> tuple[Weighed, str]:
        view, weighting = self.view, self.weighting
        keyed = self.score.compares_keys
        code = Query(None) if keyed else self._encoded(queries)
        code = code._replace(code=code.code.astype(float)) if wide else code
        keys = queries if keyed else None
        job = view.job(code, keys, self._read_as, weighting, self.where, self._but, lost)
        asked = Sent(view.snapshot, job, lost)
        top = self.top if view.schema.pools else max(self.top, SHARES)
        near = None if keyed or (lost and not self._rounded) else self.tolerance
        known, found, bound, read = self._found(asked, top, near, code.code)
        self.total, self.missing = np.sum([some.counts for some in found], axis=0).tolist()
        if lost and near is None:
            bound = self._bound(asked, code.code, lost)
        each = [One(asked, known, i, found, weighting.convex) for i in range(len(queries))]
        self._read(each, top, found)
        weighed = Weighed(
            parts.averaged(parts.merged([some.sums for some in found], parts.both)),
            each,  # type: ignore[arg-type]
            parts.entropy_of(*parts.merged([some.told for some in found], np.add)),
            self._lse(known),
            np.max([some.best for some in found], axis=0),
            bound,
            self.total if read is None else read,
        )
        told = weighed.best if weighed.lse is None else weighed.best + weighed.lse
        if self.total and not (keyed or wide or np.isfinite(told).all()):
            return self._gathered(queries, lost, wide=True)  # float32 does not hold the scores
        return weighed, self._engine(lost, read)

    def _found(
        self, asked: Sent, top: int, tolerance: float | None, query: Any
    ) -> tuple[State | Summed, list[Heaviest], Any, int | None]:
        """What is known of the weights, and the heaviest; how far they may be off, and the keys
        that were read for it: None where they are exact."""
        found: list[First] = []
        if type(self.weighting) is Softmax:
            found = asked.each("first", tolerance, top)
        error: Any = 0.0
        if found and tolerance is not None:
            # Each keeps to the tolerance, and so do all: quotients of sums lie between theirs.
            bound = parts.merged([x.bound for x in found if x.bound is not None], Bound.merge)
            if not self._rounded and not (bound.error <= tolerance).all():
                return self._found(asked, top, None, query)
            error = (bound.merge(self._unread(asked, query)) if asked.without else bound).error
        if not found or any((np.abs(x.lse[np.isfinite(x.lse)]) > FAR).any() for x in found):
            state = parts.finished(asked, self.weighting)[1]
            return state, asked.each("heaviest", state, top), error if self._rounded else 0.0, None
        read = None
        if tolerance is not None:
            self.refused = found[0].refused if all(x.refused for x in found) else ""
            read = None if self.refused else sum(x.read for x in found)
        known = Summed(parts.merged([x.lse for x in found], np.logaddexp), tolerance)
        return known, [x.heaviest.among(known, x.lse) for x in found], error, read

    def attended(self, code: Query) -> np.ndarray | None:
        """The output (n, d_v) within the tolerance; None where none is proven."""
        if type(self.weighting) is not Softmax:
            return None
        query, outs = np.asarray(code.code), list[np.ndarray]()
        query = query.astype(np.result_type(query, np.float32), copy=False)
        step = max(AT_ONCE // len(self.view), 1)
        for at in range(0, len(query), step):
            some = Query(query[at : at + step], code.asked)
            job = self.view.job(some, None, self._read_as, self.weighting, self.where)
            asked = Sent(self.view.snapshot, job)
            found = self._found(asked, 1, self.tolerance, some.code)[1]
            outs.append(parts.averaged(parts.merged([some.sums for some in found], parts.both)))
        return np.concatenate(outs)

    def _lse(self, known: State | Summed) -> Any:
        if isinstance(known, Summed):
            return known.lse
        return self.weighting.lse(known)[:, 0] if self.weighting.has_lse else None

    def _engine(self, lost: dict[int, LostShard], read: int | None) -> str:
        slices = self.view.snapshot.slices
        shards = len({shard for shard, _ in slices} - lost.keys())
        kind = "exact index" if self.score.compares_keys else f"scan of {self.total:,} rows"
        if read is not None:
            kind = f"codes of {self.total:,} rows, {read:,} of them read in full,"
        told = f"{kind} by {counted(shards, 'shard')}"
        told += f", exactly: {self.refused}" if self.refused else ""
        if not lost:
            return told
        rows = sum(slice.rows for shard, slice in slices if shard in lost)
        return f"{told}; {rows:,} rows are lost ({'; '.join(map(str, lost.values()))})"

    def _bound(self, asked: Sent, query: Any, lost: dict[int, LostShard]) -> np.ndarray:
        """The largest share that the rows of lost shards can have."""
        balls = asked.many.lost(lost)
        if self.score.compares_keys or self.view.wordy:
            most = np.full(len(asked.job.keys if query is None else query), np.inf)
        else:
            most = np.max([ball.most(query, self._read_as) for ball in balls], axis=0)
        return parts.share(asked, self.weighting, sum(ball.rows for ball in balls), most)

    def _unread(self, asked: Sent, query: Any) -> Bound:
        """What the rows of lost shards can have, before they were kept in 8 bits."""
        balls = asked.many.lost(asked.without)
        most = np.max([ball.before().most(query, self._read_as) for ball in balls], axis=0)
        top = self.weighting.scale(most[:, None])[:, 0] + np.log(sum(ball.rows for ball in balls))
        none = np.zeros(len(top))
        return Bound(top, none, none + 1, none)

    def _read(self, each: list[One], top: int, found: list[Heaviest]) -> None:
        """Bring the rows that answers name, all at once."""
        known = {place: row for some in found for place, row in some.rows.items()}
        named = np.unique(np.concatenate([one.places[:top] for one in each])).tolist()
        new = [place for place in named if place not in known]
        self._rows_of = known | (dict(zip(new, self.view.rows(new), strict=True)) if new else {})

    def heaviest(self, alpha: Any, top: int) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(alpha, One):
            return super().heaviest(alpha, top)
        some = alpha.weights[:top]
        return alpha.places[: len(some)], some

    def _records(self, places: np.ndarray) -> list[dict[str, Any]]:
        known, wanted = self._rows_of, places.tolist()
        new = [place for place in wanted if place not in known]
        rows = known | (dict(zip(new, self.view.rows(new), strict=True)) if new else {})
        return [rows[place] for place in wanted]

    def scatter(self, alpha: Any, mean: np.ndarray) -> Scatter:
        found: list[Scatter] = alpha.asked.each("scatter", alpha.known, alpha.i, mean)
        return parts.merged(found, farther)

    def source(self, query: Any, alpha: Any, most: int) -> Source:
        view = self.view
        self.live, _ = view.having_values(view.where(self.where))
        return super().source(query, alpha, most)
