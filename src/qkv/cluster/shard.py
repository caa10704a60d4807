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

from qkv import attention, partial_attention
from qkv.cluster import stores
from qkv.database.database import Database
from qkv.database.database import open as open_database
from qkv.database.errors import (
    NotAStoreError,
    StoreDamagedError,
    StoreNotFoundError,
    StoreUnreadableError,
    VersionNotFoundError,
)
from qkv.database.query.executor import QueryExecutor
from qkv.database.query.scan import ScaledSquareSum
from qkv.database.storage import Snapshot, Store
from qkv.database.table.view import ROWS_PER_CHUNK, TableView
from qkv.errors import QkvError
from qkv.frameworks import load_framework, threads
from qkv.frameworks.stored_rows import StoredRows, WeighedRows
from qkv.scores import Score
from qkv.util.types import Arrays
from qkv.weightings import State, Weighting
from qkv.weightings.error_bound import ErrorBound

MAX_JOBS = 2
"""Jobs whose scores are held: that which is asked, and that which an answer is asked about."""

MAX_INLINE_ROWS = 64
"""Rows that a slice names without being asked for them."""

MAX_VIEWS_PER_STORE = 4
"""Versions of slices that are held."""


class Slice(NamedTuple):
    """The rows `start … stop` of one version of a store, which stand at `origin` among all."""

    source: int
    version: int
    start: int
    stop: int
    origin: int

    @property
    def row_count(self) -> int:
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
    excluded_position: int | None = None
    """The place of a row that is left out."""


class SoftmaxNormalizer(NamedTuple):
    """What is known of a softmax over all rows: its log-sum-exp (n,), and how near to the exact
    weights those of each slice are, if they need not be exact."""

    lse: np.ndarray
    tolerance: float | None

    def share_of(self, own: np.ndarray) -> np.ndarray:
        """What rows have of the weight (n,) whose own log-sum-exp is this."""
        with np.errstate(invalid="ignore"):
            found = np.exp(own - self.lse)
        return np.where(np.isfinite(found), found, 0.0)

    def rescale_weights(self, found: np.ndarray, i: int, own: Any) -> np.ndarray:
        """Those among all rows, of scores, so that equal ones weigh the same to the bit; or where
        `own` is a log-sum-exp, of the weights of rows that have it."""
        if own is None:
            some = np.exp(found.astype(float) - self.lse[i])
        else:
            some = found * np.exp(own - self.lse[i])
        return np.where(np.isfinite(some), some, 0.0).astype(found.dtype)


class SliceResult(NamedTuple):
    """What one slice has to say to n queries once their weights are known.

    `entropy_terms` (2, n) gives the entropy; `sums` the output; `places` and `weights` the heaviest
    rows of each query, or the scores of these, `scored`; `row_counts` the rows that were asked and
    those left out for want of a value; `best` is the best score; `rows` are the heaviest
    themselves, if few.
    """

    entropy_terms: np.ndarray
    sums: partial_attention.PooledSums
    places: list[np.ndarray]
    weights: list[np.ndarray]
    row_counts: tuple[int, int]
    best: np.ndarray
    rows: dict[int, dict[str, Any]]
    scored: bool = False

    def rescale_to(self, known: SoftmaxNormalizer, own: np.ndarray) -> SliceResult:
        """The same among all rows, of rows whose own log-sum-exp (n,) is this."""
        (mass, along), share = self.entropy_terms, known.share_of(own)
        log = np.log(np.where(share > 0, share, 1.0))
        share = share.astype(self.sums[0].dtype)
        pooled = [x.T * share for x in self.sums[:2]]
        return self._replace(
            entropy_terms=np.array([mass * share, (along + log * mass) * share]),
            sums=(*(x.T for x in pooled), *self.sums[2:]),
            weights=[
                known.rescale_weights(x, i, None if self.scored else own[i])
                for i, x in enumerate(self.weights)
            ],
        )


class SliceSoftmax(NamedTuple):
    """What one slice says of a softmax before others are known: its log-sum-exp (n,), how far its
    weights may be off from there on, how many keys were read in full, and its heaviest rows; and
    why its codes were not asked, though a tolerance allowed it."""

    lse: np.ndarray
    bound: ErrorBound | None
    keys_read: int
    result: SliceResult
    refused_reason: str = ""


class SliceEvaluator:
    """One slice, and what was asked of it. Every method may be called again, in a new process."""

    def __init__(self, view: TableView, slice: Slice, job: Job | None):
        self.view, self.slice, self._job = view, slice, job
        self._alpha: np.ndarray | None = None
        self._scored = False  # whether scores stand in their place
        self._lse: np.ndarray | None = None  # with which the weights of these rows alone sum to 1

    @property
    def job(self) -> Job:
        assert self._job is not None
        return self._job

    @cached_property
    def executor(self) -> QueryExecutor:
        job, view = self.job, self.view
        live = view.filter_rows(job.where)
        at = -1 if job.excluded_position is None else job.excluded_position - self.slice.origin
        if 0 <= at < self.slice.row_count:
            live = np.ones(self.slice.row_count, bool) if live is None else live.copy()
            live[at] = False
        return QueryExecutor(view, job.score, job.weighting, live, 1, None)

    @property
    def scored_part(self) -> partial_attention.ScorePasses:
        return self._part_and_best[0]

    @cached_property
    def _part_and_best(self) -> tuple[partial_attention.ScorePasses, np.ndarray]:
        job = self.job
        return partial_attention.score_part(
            self.view.open_vectors(self.executor.allowed_rows, asked=job.words),
            job.query,
            score=job.score,
            weighting=job.weighting,
            origin=self.slice.origin,
            matches=self._key_matches,
        )

    @cached_property
    def _portion(self) -> partial_attention.ShardCall:
        job, view = self.job, self.view
        allowed = view.mask_missing_values(view.filter_rows(job.where))[0]
        rows = view.open_vectors(allowed, value=True, asked=job.words)
        at = (self.slice.origin, job.total)
        return partial_attention.ShardCall(rows, job.query, job.score, job.weighting, *at)

    # With weights

    def fold(self, lift: Any, merge: Any, init: Any) -> State:
        return self.scored_part.fold(lift, merge, init)

    def state(self, found: State, width: int = 0) -> State:
        return self.scored_part.state(found, width)

    def run_softmax(self, tolerance: float | None, top: int) -> SliceSoftmax:
        """A softmax over these rows alone: others leave its weights in proportion, so that nobody
        need be asked twice."""
        job, bound = self.job, None
        how: dict[str, Any] = {"score": job.score, "weighting": job.weighting}
        how |= {"tolerance": tolerance, "matches": self._key_matches, "part": True}
        found = attention.weigh_rows(self._live_rows, job.query, **how)
        self._lse = lse = _precise_lse(found, job.weighting)
        if tolerance is not None:
            none = np.zeros(len(lse))
            bound = found.bound or ErrorBound(none, none + 1, none, none)
            bound = ErrorBound(lse, *(x / bound.total for x in bound[1:]))
        told = partial_attention.sums_from_entropy(
            found.weights.sum(axis=1), partial_attention.get_entropy(found)
        )
        heaviest = self._build_result(
            told, found.partial_sums, found.weights, found.best_score, top, found.scaled_scores
        )
        return SliceSoftmax(lse, bound, found.rows_read, heaviest, found.refusal)

    def finish_result(self, known: State, top: int) -> SliceResult:
        part, best = self._part_and_best
        told, alpha = part.replace_scores_with_weights(known), part.scores
        del self._part_and_best  # they are weights now
        sums = partial_attention.pool_values(
            self._live_rows, alpha, mean=self.job.weighting.is_convex
        )
        return self._build_result(told, sums, alpha, best, top)

    @property
    def _live_rows(self) -> StoredRows:
        job = self.job
        return self.view.open_vectors(self.executor.allowed_rows, value=job.pools, asked=job.words)

    @property
    def _key_matches(self) -> np.ndarray | None:
        """The scores, where no vectors are compared."""
        return self.executor.match_keys(self.job.keys) if self.job.score.compares_keys else None

    def _build_result(
        self,
        told: np.ndarray,
        sums: partial_attention.PooledSums,
        alpha: np.ndarray,
        best: np.ndarray,
        top: int,
        scaled: np.ndarray | None = None,
    ) -> SliceResult:
        asked, origin, scored = self.executor, self.slice.origin, scaled is not None
        self._alpha, self._scored = alpha if scaled is None else scaled, scored
        orders = [asked.rank_rows(some, top) for some in alpha]
        places = [
            origin
            + (order if asked.candidate_positions is None else asked.candidate_positions[order])
            for order in orders
        ]
        weights = [some[order] for some, order in zip(self._alpha, orders, strict=True)]
        counts, read = (asked.row_count, asked.missing_value_count), dict[int, dict[str, Any]]()
        if sum(map(len, places)) <= MAX_INLINE_ROWS:  # which saves another call
            named = np.unique(np.concatenate(places))
            found = self.view.read_rows(self._ids_at(named).tolist())
            read = dict(zip(named.tolist(), found, strict=True))
        return SliceResult(told, sums, places, weights, counts, best, read, scored)

    def _local_weights(self, known: State | SoftmaxNormalizer, i: int) -> np.ndarray:
        if isinstance(known, SoftmaxNormalizer):
            if self._alpha is None or self._lse is None:
                self.run_softmax(known.tolerance, 1)
            assert self._lse is not None and self._alpha is not None
            return known.rescale_weights(self._alpha[i], i, None if self._scored else self._lse[i])
        if self._alpha is None:
            self.finish_result(known, 1)
        assert self._alpha is not None
        return np.asarray(self._alpha[i])

    def all_weights(self, known: State | SoftmaxNormalizer, i: int) -> np.ndarray:
        return self.executor.expand_to_all_rows(self._local_weights(known, i))

    def sum_squared_deviations(
        self, known: State | SoftmaxNormalizer, i: int, mean: np.ndarray
    ) -> ScaledSquareSum:
        return self.executor.sum_squared_deviations(self._local_weights(known, i), mean)

    # With gradients

    @cached_property
    def block_passes(self) -> Any:
        return self._portion.block_passes()

    def fold_passes(self, lift: Any, merge: Any, init: Any) -> State:
        return self.block_passes.fold(lift, merge, init)  # type: ignore[no-any-return]

    def pool_values(self, found: State, width: int = 0) -> State:
        state: State = self.block_passes.state(found)
        del self.block_passes  # a weighting may have written over its scores
        return state

    def compute_gradients(self, kept: State, gradients: Arrays) -> list[Any]:
        return self._portion.compute_gradients(kept, gradients)

    # Without a job

    def bounding_ball(self) -> partial_attention.KeyBall:
        return partial_attention.KeyBall.enclose_rows(self.view.open_vectors())

    def find_positions(self, key: Any) -> list[int]:
        return (self.slice.origin + self._positions_of(self.view.find_ids(key))).tolist()  # type: ignore[no-any-return]

    def find_digests(self, digests: list[bytes]) -> list[int]:
        """Which of the keys are here, by their digests."""
        return [i for i, digest in enumerate(digests) if self.view.snapshot.find_ids(digest)]

    def _positions_of(self, ids: Any) -> np.ndarray:
        return np.searchsorted(self.view.ids, np.asarray(ids, np.int64))

    def _ids_at(self, places: Any) -> np.ndarray:
        return np.asarray(self.view.ids[np.asarray(places, np.int64) - self.slice.origin])

    def read_records(self, places: Any) -> list[str]:
        return self.view.snapshot.read_records(self._ids_at(places))

    def read_tensor(self, name: str, places: Any) -> Any:
        return self.view.snapshot.read_tensor(name, self._ids_at(places))

    def read_page(self, start: int) -> list[str]:
        """The records of some rows from one on."""
        return self.view.snapshot.read_records(self.view.ids[start : start + ROWS_PER_CHUNK])

    def count_cell_kinds(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: self.view.cell_kind_counts(name) for name in names}

    def read_view(self, name: str, *args: Any) -> Any:
        """What the view of these rows has by a name, or says by it."""
        found = getattr(self.view, name)
        return found(*args) if callable(found) else found


def _precise_lse(found: WeighedRows, weighting: Weighting) -> np.ndarray:
    """The log-sum-exp (n,) of a softmax in float64, since shards are weighed by differences of it:
    that of scores in the thousands has lost its last digits. The best row's weight is e^(s − lse).
    """
    assert found.lse is not None
    lse = found.lse.astype(float)
    if found.bound is None:
        top = weighting.scale_scores(found.best_score[:, None])[:, 0].astype(float)
        most = found.weights.max(axis=1, initial=0).astype(float)
        known = (most > 0) & np.isfinite(lse)
        lse[known] = top[known] - np.log(most[known])
    return lse


class StoreProfile(NamedTuple):
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
        threads.CORE_COUNT = cores
        self._sources, self._cache = sources, cache
        self._stores: dict[int, Store] = {}
        self._writers: dict[int, Database] = {}
        self._views: OrderedDict[Slice, TableView] = OrderedDict()
        self._evaluators: OrderedDict[tuple[Slice, str], SliceEvaluator] = OrderedDict()

    def _local_path(self, source: int) -> Path:
        place = self._sources[source]
        return stores.fetch_local_copy(place, self._cache) if stores.is_url(place) else Path(place)

    def _open_store(self, source: int) -> Store:
        if source not in self._stores:
            try:
                self._stores[source] = Store(self._local_path(source), create=False)
            except (QkvError, OSError) as fault:
                if isinstance(fault, StoreNotFoundError | NotAStoreError) or not isinstance(
                    fault, QkvError
                ):
                    raise StoreUnreadableError(str(fault)) from None
                raise
        return self._stores[source]

    def _snapshot_at(self, source: int, version: int | None) -> Snapshot:
        try:
            return self._open_store(source).open_snapshot(version)
        except VersionNotFoundError:
            if not stores.is_url(self._sources[source]):
                raise
            del self._stores[source]  # an actor that began later has copied a newer state
            return self._open_store(source).open_snapshot(version)

    def newest_versions(self) -> dict[int, int]:
        """The newest version of each store."""
        return {source: self._open_store(source).version for source in self._sources}

    def process_stats(self) -> tuple[int, float]:
        """Its number, and the seconds that it has worked."""
        return os.getpid(), time.process_time()

    def list_versions(self, source: int) -> list[Any]:
        return self._open_store(source).versions()

    def profile_store(self, source: int, version: int | None = None) -> StoreProfile:
        snapshot = self._snapshot_at(source, version)
        kinds = {name: snapshot.tensor_type(name) for name in snapshot.tensor_names}
        settings, arrays = snapshot.settings, snapshot.read_arrays()
        return StoreProfile(
            snapshot.version, len(snapshot), settings, tuple(snapshot.tensor_names), kinds, arrays
        )

    def _get_view(self, slice: Slice) -> TableView:
        view = self._views.pop(slice, None)
        if view is None:
            snapshot = self._snapshot_at(slice.source, slice.version)
            view = TableView(snapshot.slice_rows(slice.start, slice.stop))
        self._views[slice] = view
        while len(self._views) > MAX_VIEWS_PER_STORE * max(len(self._sources), 1):
            self._views.popitem(last=False)
        return view

    def _get_evaluator(self, slice: Slice, job: Job | None) -> SliceEvaluator:
        if job is None:
            return SliceEvaluator(self._get_view(slice), slice, None)
        leaf = self._evaluators.pop((slice, job.token), None) or SliceEvaluator(
            self._get_view(slice), slice, job
        )
        self._evaluators[slice, job.token] = leaf
        while len({token for _, token in self._evaluators}) > MAX_JOBS:
            self._evaluators.popitem(last=False)
        return leaf

    def run(self, slices: list[Slice], job: Job | None, name: str, *args: Any) -> list[Any]:
        """A method of each of the slices' leaves."""
        try:
            with load_framework(
                "numpy"
            ).compute_context():  # what is ruled out may be larger than a float
                return [getattr(self._get_evaluator(slice, job), name)(*args) for slice in slices]
        except (StoreDamagedError, OSError) as fault:
            self._stores.clear()
            self._views.clear()
            self._evaluators.clear()
            raise StoreUnreadableError(str(fault)) from None

    def write_store(self, source: int, name: str, *args: Any) -> None:
        """A method of the database that changes it."""
        if source not in self._writers:
            self._writers[source] = open_database(self._local_path(source), create=False)
        getattr(self._writers[source], name)(*args)
