"""One shard: rows of one or more stores, read where they lie. It knows nothing of who asks."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qkv import attention, parts
from qkv.arrays import framework, threads
from qkv.arrays.rows import Rows, Weighed
from qkv.cluster import stores
from qkv.database.ask import Asked, Scatter
from qkv.database.database import Database
from qkv.database.database import open as open_database
from qkv.database.faults import Damaged, NoStore, NotAStore, UnknownVersion, Unreadable
from qkv.database.store import Snapshot, Store
from qkv.database.view import CHUNK, View
from qkv.errors import QkvError
from qkv.scores import Score
from qkv.types import Arrays
from qkv.weightings import State, Weighting
from qkv.weightings.bound import Bound

JOBS = 2
"""Jobs whose scores are held: that which is asked, and that which an answer is asked about."""

FEW = 64
"""Rows that a slice names without being asked for them."""

VIEWS = 4
"""Versions of slices that are held."""


class Slice(NamedTuple):
    """The rows `start … stop` of one version of a store, which stand at `origin` among all."""

    source: int
    version: int
    start: int
    stop: int
    origin: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Job(NamedTuple):
    """What is asked of every slice; it is sent once, and whoever restarts finds all of it here.

    `query` (n, d) are vectors, with the `words` that were asked beside them; where the score
    compares keys, `keys` are the queries. `total` rows are asked in all.
    """

    token: str
    query: Any
    words: np.ndarray | None
    keys: Any
    score: Score
    weighting: Weighting
    where: Any
    total: int
    pools: bool
    but: int | None = None
    """The place of a row that is left out."""


class Summed(NamedTuple):
    """What is known of a softmax over all rows: its log-sum-exp (n,), and how near to the exact
    weights those of each slice are, if they need not be exact."""

    lse: np.ndarray
    tolerance: float | None

    def share(self, own: np.ndarray) -> np.ndarray:
        """What rows have of the weight (n,) whose own log-sum-exp is this."""
        with np.errstate(invalid="ignore"):
            found = np.exp(own - self.lse)
        return np.where(np.isfinite(found), found, 0.0)

    def weights(self, found: np.ndarray, i: int, own: Any) -> np.ndarray:
        """Those among all rows, of scores, so that equal ones weigh the same to the bit; or where
        `own` is a log-sum-exp, of the weights of rows that have it."""
        if own is None:
            some = np.exp(found.astype(float) - self.lse[i])
        else:
            some = found * np.exp(own - self.lse[i])
        return np.where(np.isfinite(some), some, 0.0).astype(found.dtype)


class Heaviest(NamedTuple):
    """What one slice has to say to n queries once their weights are known.

    `told` (2, n) gives the entropy; `sums` the output; `places` and `weights` the heaviest rows of
    each query, or the scores of these, `scored`; `counts` the rows that were asked and those left
    out for want of a value; `best` is the best score; `rows` are the heaviest themselves, if few.
    """

    told: np.ndarray
    sums: parts.Sums
    places: list[np.ndarray]
    weights: list[np.ndarray]
    counts: tuple[int, int]
    best: np.ndarray
    rows: dict[int, dict[str, Any]]
    scored: bool = False

    def among(self, known: Summed, own: np.ndarray) -> Heaviest:
        """The same among all rows, of rows whose own log-sum-exp (n,) is this."""
        (mass, along), share = self.told, known.share(own)
        log = np.log(np.where(share > 0, share, 1.0))
        share = share.astype(self.sums[0].dtype)
        pooled = [x.T * share for x in self.sums[:2]]
        return self._replace(
            told=np.array([mass * share, (along + log * mass) * share]),
            sums=(*(x.T for x in pooled), *self.sums[2:]),
            weights=[
                known.weights(x, i, None if self.scored else own[i])
                for i, x in enumerate(self.weights)
            ],
        )


class First(NamedTuple):
    """What one slice says of a softmax before others are known: its log-sum-exp (n,), how far its
    weights may be off from there on, how many keys were read in full, and its heaviest rows; and
    why its codes were not asked, though a tolerance allowed it."""

    lse: np.ndarray
    bound: Bound | None
    read: int
    heaviest: Heaviest
    refused: str = ""


class Leaf:
    """One slice, and what was asked of it. Every method may be called again, in a new process."""

    def __init__(self, view: View, slice: Slice, job: Job | None):
        self.view, self.slice, self._job = view, slice, job
        self._alpha: np.ndarray | None = None
        self._scored = False  # whether scores stand in their place
        self._lse: np.ndarray | None = None  # with which the weights of these rows alone sum to 1

    @property
    def job(self) -> Job:
        assert self._job is not None
        return self._job

    @cached_property
    def asked(self) -> Asked:
        job, view = self.job, self.view
        live = view.where(job.where)
        at = -1 if job.but is None else job.but - self.slice.origin
        if 0 <= at < self.slice.rows:
            live = np.ones(self.slice.rows, bool) if live is None else live.copy()
            live[at] = False
        return Asked(view, job.score, job.weighting, live, 1, None)

    @property
    def part(self) -> parts.Part:
        return self._scores[0]

    @cached_property
    def _scores(self) -> tuple[parts.Part, np.ndarray]:
        job = self.job
        return parts.scored(
            self.view.vectors(self.asked.live, asked=job.words),
            job.query,
            score=job.score,
            weighting=job.weighting,
            origin=self.slice.origin,
            matches=self._matches,
        )

    @cached_property
    def _held(self) -> parts.Portion:
        job, view = self.job, self.view
        allowed = view.having_values(view.where(job.where))[0]
        rows = view.vectors(allowed, value=True, asked=job.words)
        at = (self.slice.origin, job.total)
        return parts.Portion(rows, job.query, job.score, job.weighting, *at)

    # With weights

    def fold(self, lift: Any, merge: Any, init: Any) -> State:
        return self.part.fold(lift, merge, init)

    def state(self, found: State, width: int = 0) -> State:
        return self.part.state(found, width)

    def first(self, tolerance: float | None, top: int) -> First:
        """A softmax over these rows alone: others leave its weights in proportion, so that nobody
        need be asked twice."""
        job, bound = self.job, None
        how: dict[str, Any] = {"score": job.score, "weighting": job.weighting}
        how |= {"tolerance": tolerance, "matches": self._matches, "part": True}
        found = attention.weigh(self._rows, job.query, **how)
        self._lse = lse = _fine(found, job.weighting)
        if tolerance is not None:
            none = np.zeros(len(lse))
            bound = found.bound or Bound(none, none + 1, none, none)
            bound = Bound(lse, *(x / bound.total for x in bound[1:]))
        told = parts.sums_by(found.weights.sum(axis=1), parts.entropy_in(found))
        heaviest = self._heaviest(told, found.sums, found.weights, found.best, top, found.scaled)
        return First(lse, bound, found.read, heaviest, found.refused)

    def heaviest(self, known: State, top: int) -> Heaviest:
        part, best = self._scores
        told, alpha = part.weigh(known), part.s
        del self._scores  # they are weights now
        sums = parts.sums(self._rows, alpha, mean=self.job.weighting.convex)
        return self._heaviest(told, sums, alpha, best, top)

    @property
    def _rows(self) -> Rows:
        job = self.job
        return self.view.vectors(self.asked.live, value=job.pools, asked=job.words)

    @property
    def _matches(self) -> np.ndarray | None:
        """The scores, where no vectors are compared."""
        return self.asked.matches(self.job.keys) if self.job.score.compares_keys else None

    def _heaviest(
        self,
        told: np.ndarray,
        sums: parts.Sums,
        alpha: np.ndarray,
        best: np.ndarray,
        top: int,
        scaled: np.ndarray | None = None,
    ) -> Heaviest:
        asked, origin, scored = self.asked, self.slice.origin, scaled is not None
        self._alpha, self._scored = alpha if scaled is None else scaled, scored
        orders = [asked.order(some, top) for some in alpha]
        places = [
            origin + (order if asked.places is None else asked.places[order]) for order in orders
        ]
        weights = [some[order] for some, order in zip(self._alpha, orders, strict=True)]
        counts, read = (asked.total, asked.missing), dict[int, dict[str, Any]]()
        if sum(map(len, places)) <= FEW:  # which saves another call
            named = np.unique(np.concatenate(places))
            found = self.view.rows(self._ids(named).tolist())
            read = dict(zip(named.tolist(), found, strict=True))
        return Heaviest(told, sums, places, weights, counts, best, read, scored)

    def _weights(self, known: State | Summed, i: int) -> np.ndarray:
        if isinstance(known, Summed):
            if self._alpha is None or self._lse is None:
                self.first(known.tolerance, 1)
            assert self._lse is not None and self._alpha is not None
            return known.weights(self._alpha[i], i, None if self._scored else self._lse[i])
        if self._alpha is None:
            self.heaviest(known, 1)
        assert self._alpha is not None
        return np.asarray(self._alpha[i])

    def weights(self, known: State | Summed, i: int) -> np.ndarray:
        return self.asked.of_all(self._weights(known, i))

    def scatter(self, known: State | Summed, i: int, mean: np.ndarray) -> Scatter:
        return self.asked.scatter(self._weights(known, i), mean)

    # With gradients

    @cached_property
    def passes(self) -> Any:
        return self._held.passes()

    def search(self, lift: Any, merge: Any, init: Any) -> State:
        return self.passes.fold(lift, merge, init)  # type: ignore[no-any-return]

    def pooled(self, found: State, width: int = 0) -> State:
        state: State = self.passes.state(found)
        del self.passes  # a weighting may have written over its scores
        return state

    def slopes(self, kept: State, gradients: Arrays) -> list[Any]:
        return self._held.slopes(kept, gradients)

    # Without a job

    def ball(self) -> parts.Ball:
        return parts.Ball.around(self.view.vectors())

    def find(self, key: Any) -> list[int]:
        return (self.slice.origin + self._at(self.view.find(key))).tolist()  # type: ignore[no-any-return]

    def has(self, digests: list[bytes]) -> list[int]:
        """Which of the keys are here, by their digests."""
        return [i for i, digest in enumerate(digests) if self.view.snapshot.find(digest)]

    def _at(self, ids: Any) -> np.ndarray:
        return np.searchsorted(self.view.ids, np.asarray(ids, np.int64))

    def _ids(self, places: Any) -> np.ndarray:
        return np.asarray(self.view.ids[np.asarray(places, np.int64) - self.slice.origin])

    def records(self, places: Any) -> list[str]:
        return self.view.snapshot.records(self._ids(places))

    def tensor(self, name: str, places: Any) -> Any:
        return self.view.snapshot.tensor(name, self._ids(places))

    def page(self, start: int) -> list[str]:
        """The records of some rows from one on."""
        return self.view.snapshot.records(self.view.ids[start : start + CHUNK])

    def censuses(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: self.view.census(name) for name in names}

    def viewed(self, name: str, *args: Any) -> Any:
        """What the view of these rows has by a name, or says by it."""
        found = getattr(self.view, name)
        return found(*args) if callable(found) else found


def _fine(found: Weighed, weighting: Weighting) -> np.ndarray:
    """The log-sum-exp (n,) of a softmax in float64, since shards are weighed by differences of it:
    that of scores in the thousands has lost its last digits. The best row's weight is e^(s − lse).
    """
    assert found.lse is not None
    lse = found.lse.astype(float)
    if found.bound is None:
        top = weighting.scale(found.best[:, None])[:, 0].astype(float)
        most = found.weights.max(axis=1, initial=0).astype(float)
        known = (most > 0) & np.isfinite(lse)
        lse[known] = top[known] - np.log(most[known])
    return lse


class Profile(NamedTuple):
    """What is to be known of a store to ask it: of one version."""

    version: int
    rows: int
    settings: dict[str, Any]
    names: tuple[str, ...]
    kinds: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Shard:
    """What one actor does: it opens its stores when it is first asked, and maps their segments."""

    def __init__(self, sources: dict[int, str], cache: str | None, cores: int):
        threads.CORES = cores
        self._sources, self._cache = sources, cache
        self._stores: dict[int, Store] = {}
        self._writers: dict[int, Database] = {}
        self._views: OrderedDict[Slice, View] = OrderedDict()
        self._leaves: OrderedDict[tuple[Slice, str], Leaf] = OrderedDict()

    def _path(self, source: int) -> Path:
        place = self._sources[source]
        return stores.local(place, self._cache) if stores.is_url(place) else Path(place)

    def _store(self, source: int) -> Store:
        if source not in self._stores:
            try:
                self._stores[source] = Store(self._path(source), create=False)
            except (QkvError, OSError) as fault:
                if isinstance(fault, NoStore | NotAStore) or not isinstance(fault, QkvError):
                    raise Unreadable(str(fault)) from None
                raise
        return self._stores[source]

    def _at(self, source: int, version: int | None) -> Snapshot:
        try:
            return self._store(source).at(version)
        except UnknownVersion:
            if not stores.is_url(self._sources[source]):
                raise
            del self._stores[source]  # an actor that began later has copied a newer state
            return self._store(source).at(version)

    def versions(self) -> dict[int, int]:
        """The newest version of each store."""
        return {source: self._store(source).version for source in self._sources}

    def process(self) -> tuple[int, float]:
        """Its number, and the seconds that it has worked."""
        return os.getpid(), time.process_time()

    def history(self, source: int) -> list[Any]:
        return self._store(source).versions()

    def about(self, source: int, version: int | None = None) -> Profile:
        snapshot = self._at(source, version)
        kinds = {name: snapshot.kind(name) for name in snapshot.names}
        settings, arrays = snapshot.settings, snapshot.arrays()
        return Profile(
            snapshot.version, len(snapshot), settings, tuple(snapshot.names), kinds, arrays
        )

    def _view(self, slice: Slice) -> View:
        view = self._views.pop(slice, None)
        if view is None:
            snapshot = self._at(slice.source, slice.version)
            view = View(snapshot.between(slice.start, slice.stop))
        self._views[slice] = view
        while len(self._views) > VIEWS * max(len(self._sources), 1):
            self._views.popitem(last=False)
        return view

    def _leaf(self, slice: Slice, job: Job | None) -> Leaf:
        if job is None:
            return Leaf(self._view(slice), slice, None)
        leaf = self._leaves.pop((slice, job.token), None) or Leaf(self._view(slice), slice, job)
        self._leaves[slice, job.token] = leaf
        while len({token for _, token in self._leaves}) > JOBS:
            self._leaves.popitem(last=False)
        return leaf

    def run(self, slices: list[Slice], job: Job | None, name: str, *args: Any) -> list[Any]:
        """A method of each of the slices' leaves."""
        try:
            with framework("numpy").quiet():  # what is ruled out may be larger than a float
                return [getattr(self._leaf(slice, job), name)(*args) for slice in slices]
        except (Damaged, OSError) as fault:
            self._stores.clear()
            self._views.clear()
            self._leaves.clear()
            raise Unreadable(str(fault)) from None

    def write(self, source: int, name: str, *args: Any) -> None:
        """A method of the database that changes it."""
        if source not in self._writers:
            self._writers[source] = open_database(self._path(source), create=False)
        getattr(self._writers[source], name)(*args)
