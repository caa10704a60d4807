"""One shard: it evaluates jobs on its rows. This module does not import Ray."""

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
from qkv.cluster.slice_search import SliceSearch, search_slice
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
from qkv.frameworks.ragged import SparseColumns
from qkv.frameworks.stored_rows import StoredRows, WeighedRows
from qkv.scores import Score
from qkv.util.types import Arrays
from qkv.weightings import State, Weighting
from qkv.weightings.error_bound import ErrorBound

MAX_JOBS = 2
"""The number of jobs whose scores are cached.

One job is the current query; the other belongs to an answer whose details are still being read.
"""

MAX_INLINE_ROWS = 64
"""A slice adds up to this many rows to its result, so that no further request fetches them."""

MAX_VIEWS_PER_STORE = 4
"""The number of slices and versions that an actor keeps open for each store."""


class Slice(NamedTuple):
    """The rows start … stop − 1 of one version of a store.

    `source` is the index of the store. `origin` is the position of the first row among all rows of
    the cluster.
    """

    source: int
    version: int
    start: int
    stop: int
    origin: int

    @property
    def row_count(self) -> int:
        return self.stop - self.start


class Job(NamedTuple):
    """A query as every slice receives it.

    It is complete, so that a restarted actor can evaluate it.

    `query` (n, d) are vectors, and `words` are the columns of their sparse parts. For a score
    that compares keys, `keys` are the queries instead. `total` is the number of rows of all slices.
    `token` identifies the job.
    """

    token: str
    query: Any
    words: SparseColumns | None
    keys: Any
    score: Score
    weighting: Weighting
    where: Any
    total: int
    pools: bool
    excluded_position: int | None = None
    """Position of a row to leave out, among all rows of the cluster."""
    rows: str = "rows"
    """Which rows that pass `where` are meant: "rows" with a value, "rows_without_value" or
    "all_rows"."""


class SoftmaxNormalizer(NamedTuple):
    """The log-sum-exp (n,) of a softmax over all rows of the cluster.

    The slices computed their weights with this `tolerance`.
    """

    lse: np.ndarray
    tolerance: float | None

    def share_of(self, slice_lse: np.ndarray) -> np.ndarray:
        """Return the share (n,) of all weight that belongs to a slice with this log-sum-exp."""
        with np.errstate(invalid="ignore"):
            share = np.exp(slice_lse - self.lse)
        return np.where(np.isfinite(share), share, 0.0)

    def rescale_weights(self, values: np.ndarray, i: int, slice_lse: Any) -> np.ndarray:
        """Convert the `values` of a slice to weights of query i among all rows.

        If `slice_lse` is None, `values` are scores; then equal scores get exactly equal weights.
        Otherwise `values` are weights within the slice, and `slice_lse` is its log-sum-exp.
        """
        if slice_lse is None:
            weights = np.exp(values.astype(float) - self.lse[i])
        else:
            weights = values * np.exp(slice_lse - self.lse[i])
        return np.where(np.isfinite(weights), weights, 0.0).astype(values.dtype)


class SliceResult(NamedTuple):
    """The result of one slice for n queries.

    - `entropy_terms` (2, n): the slice's terms of the entropy
    - `sums`: the slice's terms of the output
    - `places`, `weights`: the positions (in the cluster) and weights of each query's heaviest rows;
      if `scored`, `weights` are scores instead
    - `row_counts`: the number of rows that took part, and the number of rows without a value
    - `best`: the best score of each query
    - `rows`: the cells of the heaviest rows by position, unless there are too many rows
    """

    entropy_terms: np.ndarray
    sums: partial_attention.PooledSums
    places: list[np.ndarray]
    weights: list[np.ndarray]
    row_counts: tuple[int, int]
    best: np.ndarray
    rows: dict[int, dict[str, Any]]
    scored: bool = False

    def rescale_to(self, normalizer: SoftmaxNormalizer, slice_lse: np.ndarray) -> SliceResult:
        """Return this result with weights among all rows of the cluster.

        `slice_lse` (n,) is the log-sum-exp of this slice.
        """
        (mass, along), share = self.entropy_terms, normalizer.share_of(slice_lse)
        log = np.log(np.where(share > 0, share, 1.0))
        share = share.astype(self.sums[0].dtype)
        pooled = [x.T * share for x in self.sums[:2]]
        return self._replace(
            entropy_terms=np.array([mass * share, (along + log * mass) * share]),
            sums=(*(x.T for x in pooled), *self.sums[2:]),
            weights=[
                normalizer.rescale_weights(x, i, None if self.scored else slice_lse[i])
                for i, x in enumerate(self.weights)
            ],
        )


class SliceSoftmax(NamedTuple):
    """The softmax of one slice: its log-sum-exp (n,), error bound, keys read in full, and result.

    If a tolerance was passed but the 8-bit codes were not used, `refused_reason` says why.
    """

    lse: np.ndarray
    bound: ErrorBound | None
    keys_read: int
    result: SliceResult
    refused_reason: str = ""


class SliceEvaluator:
    """Evaluates a job on one slice.

    A method may be called again with the same result, also in a new process.
    """

    def __init__(self, view: TableView, slice: Slice, job: Job | None):
        self.view, self.slice, self._job = view, slice, job
        self._alpha: np.ndarray | None = None
        self._scored = False  # whether _alpha contains scores
        self._lse: np.ndarray | None = None  # the log-sum-exp of this slice

    @property
    def job(self) -> Job:
        assert self._job is not None
        return self._job

    @cached_property
    def executor(self) -> QueryExecutor:
        """The executor for the rows of this slice that pass the job's condition."""
        job, view = self.job, self.view
        selection = getattr(view, f"select_{job.rows}")(job.where)
        excluded = (
            -1 if job.excluded_position is None else job.excluded_position - self.slice.origin
        )
        if 0 <= excluded < self.slice.row_count:
            passed = view.filter_rows(job.where)
            passed = np.ones(self.slice.row_count, bool) if passed is None else passed.copy()
            passed[excluded] = False
            selection = view.select_mask(passed)
        return QueryExecutor(view, job.score, job.weighting, selection, 1, None)

    @property
    def scored_part(self) -> partial_attention.ScorePasses:
        """The scores of the slice, with the passes over them that a weighting needs."""
        return self._part_and_best[0]

    @cached_property
    def _part_and_best(self) -> tuple[partial_attention.ScorePasses, np.ndarray]:
        job = self.job
        return partial_attention.score_part(
            self.view.open_vectors(self.executor.selection, sparse_positions=job.words),
            job.query,
            score=job.score,
            weighting=job.weighting,
            origin=self.slice.origin,
            matches=self._key_matches,
        )

    @cached_property
    def _shard_call(self) -> partial_attention.ShardCall:
        """The job on the rows of this slice that have a value, for outputs with gradients."""
        job, view = self.job, self.view
        selection = view.select_rows(job.where)
        rows = view.open_vectors(selection, value=True, sparse_positions=job.words)
        location = (self.slice.origin, job.total)
        return partial_attention.ShardCall(rows, job.query, job.score, job.weighting, *location)

    # Weights

    def fold(self, lift: Any, merge: Any, init: Any) -> State:
        return self.scored_part.fold(lift, merge, init)

    def state(self, threshold: State, width: int = 0) -> State:
        return self.scored_part.state(threshold, width)

    def run_softmax(self, tolerance: float | None, top: int, ranked: int) -> SliceSoftmax:
        """Compute the softmax over the rows of this slice only; see `_build_result`.

        One request per slice is enough: the caller rescales the weights to all slices.
        """
        job, bound = self.job, None
        weighed = attention.weigh_rows(
            self._live_rows,
            job.query,
            score=job.score,
            weighting=job.weighting,
            tolerance=tolerance,
            matches=self._key_matches,
            part=True,
        )
        self._lse = lse = _precise_lse(weighed, job.weighting)
        if tolerance is not None:
            none = np.zeros(len(lse))
            bound = weighed.bound or ErrorBound(none, none + 1, none, none)
            bound = ErrorBound(lse, *(x / bound.total for x in bound[1:]))
        entropy_terms = partial_attention.sums_from_entropy(
            weighed.weights.sum(axis=1), partial_attention.get_entropy(weighed)
        )
        heaviest = self._build_result(
            entropy_terms,
            weighed.partial_sums,
            weighed.weights,
            weighed.best_score,
            (top, ranked),
            weighed.scaled_scores,
        )
        return SliceSoftmax(lse, bound, weighed.rows_read, heaviest, weighed.refusal)

    def search_index(self, missing_weight: float, effort: int, count: int) -> SliceSearch:
        """Return the rows that the indexes of this slice find; see `search_slice`."""
        job = self.job
        found = search_slice(
            self.view,
            self.executor.selection,
            job.query,
            job.score,
            job.weighting,
            missing_weight,
            effort,
            count,
        )
        origin = self.slice.origin
        return found._replace(
            positions=np.where(found.positions < 0, -1, found.positions + origin),
            scanned=found.scanned + origin,
        )

    def finish_result(self, state: State, top: int, ranked: int) -> SliceResult:
        """Return the slice's result; `state` is the weighting's merged state of all slices."""
        part, best = self._part_and_best
        entropy_terms, alpha = part.replace_scores_with_weights(state), part.scores
        del self._part_and_best  # the weights have overwritten its scores
        sums = partial_attention.pool_values(
            self._live_rows, alpha, mean=self.job.weighting.is_convex
        )
        return self._build_result(entropy_terms, sums, alpha, best, (top, ranked))

    @property
    def _live_rows(self) -> StoredRows:
        job = self.job
        return self.view.open_vectors(
            self.executor.selection, value=job.pools, sparse_positions=job.words
        )

    @property
    def _key_matches(self) -> np.ndarray | None:
        """The scores of a score that compares keys: 1 for equal keys, else 0.

        None for other scores.
        """
        return self.executor.match_keys(self.job.keys) if self.job.score.compares_keys else None

    def _build_result(
        self,
        entropy_terms: np.ndarray,
        sums: partial_attention.PooledSums,
        alpha: np.ndarray,
        best: np.ndarray,
        counts: tuple[int, int],
        scaled: np.ndarray | None = None,
    ) -> SliceResult:
        """Return the result with the heaviest rows of each query.

        `counts` are the numbers of rows with cells, and of positions with weights, per query.
        `alpha` (n, rows) are the weights, and `scaled` the scaled scores if they are known.
        """
        executor, origin, scored = self.executor, self.slice.origin, scaled is not None
        self._alpha, self._scored = alpha if scaled is None else scaled, scored
        top, ranked = counts
        orders = [executor.rank_rows(weights, ranked) for weights in alpha]
        positions = [
            origin
            + (
                order
                if executor.candidate_positions is None
                else executor.candidate_positions[order]
            )
            for order in orders
        ]
        weights = [row[order] for row, order in zip(self._alpha, orders, strict=True)]
        row_counts = (executor.row_count, executor.missing_value_count)
        rows: dict[int, dict[str, Any]] = {}
        heaviest = [x[:top] for x in positions]
        if sum(map(len, heaviest)) <= MAX_INLINE_ROWS:
            distinct = np.unique(np.concatenate(heaviest))
            read = self.view.read_rows(self._ids_at(distinct).tolist())
            rows = dict(zip(distinct.tolist(), read, strict=True))
        return SliceResult(entropy_terms, sums, positions, weights, row_counts, best, rows, scored)

    def _local_weights(self, normalizer: State | SoftmaxNormalizer, i: int) -> np.ndarray:
        """Return the weights of query i for the rows of this slice that pass the condition."""
        if isinstance(normalizer, SoftmaxNormalizer):
            if self._alpha is None or self._lse is None:
                self.run_softmax(normalizer.tolerance, 1, 1)
            assert self._lse is not None and self._alpha is not None
            return normalizer.rescale_weights(
                self._alpha[i], i, None if self._scored else self._lse[i]
            )
        if self._alpha is None:
            self.finish_result(normalizer, 1, 1)
        assert self._alpha is not None
        return np.asarray(self._alpha[i])

    def all_weights(self, normalizer: State | SoftmaxNormalizer, i: int) -> np.ndarray:
        """Return the weights of query i for all rows of this slice, 0 for rows that do not pass."""
        return self.executor.expand_to_all_rows(self._local_weights(normalizer, i))

    def sum_squared_deviations(
        self, normalizer: State | SoftmaxNormalizer, i: int, mean: np.ndarray
    ) -> ScaledSquareSum:
        return self.executor.sum_squared_deviations(self._local_weights(normalizer, i), mean)

    # Gradients

    @cached_property
    def block_passes(self) -> Any:
        return self._shard_call.block_passes()

    def fold_passes(self, lift: Any, merge: Any, init: Any) -> State:
        return self.block_passes.fold(lift, merge, init)  # type: ignore[no-any-return]

    def pool_values(self, threshold: State, width: int = 0) -> State:
        state: State = self.block_passes.state(threshold)
        del self.block_passes  # the weighting may have overwritten the cached scores
        return state

    def compute_gradients(self, state: State, gradients: Arrays) -> list[Any]:
        return self._shard_call.compute_gradients(state, gradients)

    # Methods that need no job

    def bounding_ball(self) -> partial_attention.KeyBall:
        """Return a ball that contains the keys of all rows of the slice."""
        return partial_attention.KeyBall.enclose_rows(self.view.open_vectors())

    def find_positions(self, key: Any) -> list[int]:
        """Return the positions (in the cluster) of the rows with this key."""
        return (self.slice.origin + self._positions_of(self.view.find_ids(key))).tolist()  # type: ignore[no-any-return]

    def find_digests(self, digests: list[bytes]) -> list[int]:
        """Return the indices of those digests that rows of this slice have."""
        return [i for i, digest in enumerate(digests) if self.view.snapshot.find_ids(digest)]

    def _positions_of(self, ids: Any) -> np.ndarray:
        return np.searchsorted(self.view.ids, np.asarray(ids, np.int64))

    def _ids_at(self, positions: Any) -> np.ndarray:
        return np.asarray(self.view.ids[np.asarray(positions, np.int64) - self.slice.origin])

    def read_records(self, positions: Any) -> list[str]:
        return self.view.snapshot.read_records(self._ids_at(positions))

    def read_tensor(self, name: str, positions: Any) -> Any:
        return self.view.snapshot.read_tensor(name, self._ids_at(positions))

    def read_page(self, start: int) -> list[str]:
        """Return the records of up to `ROWS_PER_CHUNK` rows of the slice, from row `start` on."""
        return self.view.snapshot.read_records(self.view.ids[start : start + ROWS_PER_CHUNK])

    def count_cell_kinds(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: self.view.cell_kind_counts(name) for name in names}

    def read_view(self, name: str, *args: Any) -> Any:
        """Return the view's attribute `name`; if it is a method, call it with `args`."""
        attribute = getattr(self.view, name)
        return attribute(*args) if callable(attribute) else attribute


def _precise_lse(weighed: WeighedRows, weighting: Weighting) -> np.ndarray:
    """Return the log-sum-exp (n,) of a softmax in float64.

    The differences of these numbers are the logarithms of the shards' shares. If scores are in the
    thousands, float32 would lose digits. The best row gives a precise number, because its weight is
    e^(s − lse).
    """
    assert weighed.lse is not None
    lse = weighed.lse.astype(float)
    if weighed.bound is None:
        top = weighting.scale_scores(weighed.best_score[:, None])[:, 0].astype(float)
        most = weighed.weights.max(axis=1, initial=0).astype(float)
        is_known = (most > 0) & np.isfinite(lse)
        lse[is_known] = top[is_known] - np.log(most[is_known])
    return lse


class StoreProfile(NamedTuple):
    """The metadata of one version of a store that a cluster needs."""

    version: int
    rows: int
    settings: dict[str, Any]
    last_id: int
    tensor_names: tuple[str, ...]
    tensor_types: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Shard:
    """The state of one actor: its open stores, views and evaluators.

    A store is opened when the first request needs it. Segments are mapped into memory.
    """

    def __init__(self, sources: dict[int, str], cache: str | None, cores: int):
        threads.CORE_COUNT = cores
        self._sources, self._cache = sources, cache
        self._stores: dict[int, Store] = {}
        self._writers: dict[int, Database] = {}
        self._views: OrderedDict[Slice, TableView] = OrderedDict()
        self._evaluators: OrderedDict[tuple[Slice, str], SliceEvaluator] = OrderedDict()

    def _local_path(self, source: int) -> Path:
        location = self._sources[source]
        return (
            stores.fetch_local_copy(location, self._cache)
            if stores.is_url(location)
            else Path(location)
        )

    def _open_store(self, source: int) -> Store:
        if source not in self._stores:
            try:
                self._stores[source] = Store(self._local_path(source), create=False)
            except (QkvError, OSError) as error:
                if isinstance(error, StoreNotFoundError | NotAStoreError) or not isinstance(
                    error, QkvError
                ):
                    raise StoreUnreadableError(str(error)) from None
                raise
        return self._stores[source]

    def _snapshot_at(self, source: int, version: int | None) -> Snapshot:
        """Return a snapshot of a version of a store; None means the newest version."""
        try:
            return self._open_store(source).open_snapshot(version)
        except VersionNotFoundError:
            if not stores.is_url(self._sources[source]):
                raise
            # An actor that started later copied a newer state of the store.
            del self._stores[source]
            return self._open_store(source).open_snapshot(version)

    def newest_versions(self) -> dict[int, int]:
        """Return the newest version of each store of this shard, by the store's index."""
        return {source: self._open_store(source).version for source in self._sources}

    def process_stats(self) -> tuple[int, float]:
        """Return the process id, and the CPU seconds that the process has used."""
        return os.getpid(), time.process_time()

    def list_versions(self, source: int) -> list[Any]:
        return self._open_store(source).versions()

    def profile_store(self, source: int, version: int | None = None) -> StoreProfile:
        snapshot = self._snapshot_at(source, version)
        return StoreProfile(
            version=snapshot.version,
            rows=len(snapshot),
            settings=snapshot.settings,
            last_id=snapshot.last_id,
            tensor_names=tuple(snapshot.tensor_names),
            tensor_types={name: snapshot.tensor_type(name) for name in snapshot.tensor_names},
            arrays=snapshot.read_arrays(),
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
        evaluator = self._evaluators.pop((slice, job.token), None) or SliceEvaluator(
            self._get_view(slice), slice, job
        )
        self._evaluators[slice, job.token] = evaluator
        while len({token for _, token in self._evaluators}) > MAX_JOBS:
            self._evaluators.popitem(last=False)
        return evaluator

    def run(self, slices: list[Slice], job: Job | None, name: str, *args: Any) -> list[Any]:
        """Call the method `name` of the evaluator of each slice; return the results in order."""
        try:
            # The context silences overflows, because masked scores may exceed the largest float.
            with load_framework("numpy").use_own_settings():
                return [getattr(self._get_evaluator(slice, job), name)(*args) for slice in slices]
        except (StoreDamagedError, OSError) as error:
            self._stores.clear()
            self._views.clear()
            self._evaluators.clear()
            raise StoreUnreadableError(str(error)) from None

    def write_store(self, source: int, name: str, *args: Any) -> None:
        """Call the method `name` of the database of a store; the method writes to disk."""
        if source not in self._writers:
            self._writers[source] = open_database(self._local_path(source), create=False)
        getattr(self._writers[source], name)(*args)
