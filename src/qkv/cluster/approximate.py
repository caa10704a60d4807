"""Approximate answers of a cluster.

Each slice searches its own indexes. It scans the rows that no index contains, and sends only the
best of them. The vectors of all rows that were found are read and weighed here, as for a single
database.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from qkv.answer_backend import MissingWeight
from qkv.cluster.shard_set import SentJob
from qkv.cluster.slice_search import SliceSearch
from qkv.database.errors import LostShardError
from qkv.database.index.approximate import (
    SearchPlan,
    SearchRefusedError,
    ShardedExecutor,
    choose_efforts,
    choose_metric,
)
from qkv.database.index.calibration import Effort, IndexReport
from qkv.database.index.metric import scale_by_temperature
from qkv.database.index.row_index import ListMasses
from qkv.database.query.executor import QueryExecutor
from qkv.errors import format_plural
from qkv.frameworks.ragged import EncodedQuery
from qkv.frameworks.stored_rows import WeighedRows
from qkv.weightings import Softmax


class ShardRests(NamedTuple):
    """What is known about the rows that were not found for one query.

    `log_rest` (S,) are the estimated log Σ exp(score) over these rows of each store. `is_exact`
    (S,) says whether they are exact, because all rows were scanned. `rows_read` is the number of
    rows that were read in full, and `text` says how all slices have searched. `row_counts` are the
    numbers of rows that may take part, and of those without a value.
    """

    log_rest: np.ndarray
    is_exact: np.ndarray
    rows_read: int
    text: str
    row_counts: tuple[int, int]


class ShardedFoundRows(NamedTuple):
    """The rows that all slices have found for n queries, as in `FoundRows`."""

    positions: np.ndarray
    rests: list[ShardRests]

    def list_rests(self) -> list[ShardRests]:
        return self.rests

    def list_positions(self) -> list[np.ndarray]:
        return [row[row >= 0] for row in self.positions]


class StoreIndex(NamedTuple):
    """The index of a store: `efforts` are the searches that it tries in turn.

    `first_row` is the position of the first row of the store. `has_interval` says whether the
    measured intervals hold. `min_score` is the best score that nearly all measured queries have at
    least. Without a valid index there are no efforts.
    """

    first_row: int
    efforts: tuple[Effort, ...] = ()
    has_interval: bool = False
    min_score: float = 0.0

    def get_effort(self, number: int) -> Effort:
        """Return an effort by its number among those of the cluster."""
        return self.efforts[min(number, len(self.efforts) - 1)]


@dataclass(frozen=True)
class ShardedSearchPlan(SearchPlan):
    """How to find rows with the indexes of all stores of a cluster.

    `requested` is the argument `approximate`.
    """

    executor: Any
    stores: tuple[StoreIndex, ...]
    requested: float

    @property
    def total(self) -> int:
        return len(self.executor.view)

    @property
    def unindexed(self) -> np.ndarray:
        """No rows: the slices have compared them already."""
        return np.zeros(0, np.int64)

    def _number_of(self, effort: Effort) -> int:
        return next(i for i, x in enumerate(self.efforts) if x is effort)

    def search(self, view: Any, queries: np.ndarray, effort: Effort) -> Any:
        executor, snapshot = self.executor, view.snapshot
        code = EncodedQuery(queries)
        job = view.build_job(code, None, executor.score, executor.weighting, executor.where)
        number = self._number_of(effort)
        try:
            found = SentJob(snapshot, job).run_on_slices(
                "search_index", self.requested, number, effort.rows
            )
        except LostShardError:
            if not snapshot.shard_set.partial:
                raise
            raise SearchRefusedError("a shard is lost") from None
        refusals = [x.refusal for x in found]
        if all(refusals):
            raise SearchRefusedError(refusals[0])
        counts = tuple(np.sum([x.row_counts for x in found], axis=0).tolist())
        of_store: list[list[SliceSearch]] = [[] for _ in self.stores]
        for x, (_, slice) in zip(found, snapshot.slices, strict=True):
            of_store[slice.source].append(x)
        is_exact = np.array([all(x.refusal for x in searches) for searches in of_store])
        positions = [x.scanned for x in found]
        log_rest = np.full((len(queries), len(self.stores)), -np.inf)
        for s, searches in enumerate(of_store):
            for x in searches:
                log_rest[:, s] = np.logaddexp(log_rest[:, s], x.log_rest)
            indexed = [x for x in searches if not x.refusal]
            if indexed:
                kept, log_others = self._merge_slices(self.stores[s], number, indexed)
                positions.append(kept)
                with np.errstate(invalid="ignore"):  # without an estimate, it is NaN
                    log_rest[:, s] = np.logaddexp(log_rest[:, s], log_others)
        read = np.sum([x.rows_read for x in found], axis=0).tolist()
        text = describe_searches(found)
        rests = [
            ShardRests(x, is_exact, y, text, counts) for x, y in zip(log_rest, read, strict=True)
        ]
        return ShardedFoundRows(np.concatenate(positions, axis=1), rests)

    def _merge_slices(
        self, store: StoreIndex, number: int, searches: list[SliceSearch]
    ) -> tuple[np.ndarray, Any]:
        """Return the rows (n, c) that the slices of a store have found, and the rest (n,).

        The rest is log Σ exp(score) over the other rows; NaN without an estimate. As many rows are
        kept as were measured, because the intervals hold only for them.
        """
        positions = np.concatenate([x.positions for x in searches], axis=1)
        if self.missing_weight is None:
            return positions, np.nan
        nearness = np.concatenate([x.nearness for x in searches], axis=1)
        rows = store.get_effort(number).rows
        if positions.shape[1] > rows:
            order = (-nearness).argsort(axis=1, kind="stable")[:, :rows]
            positions, nearness = (
                np.take_along_axis(x, order, axis=1) for x in (positions, nearness)
            )
        masses = [x.masses for x in searches if x.masses is not None]
        merged = ListMasses(
            np.logaddexp.reduce([x.log_unread for x in masses]),
            np.logaddexp.reduce([x.log_read for x in masses]),
            np.sum([x.rows for x in masses], axis=0),
        )
        return positions, merged.estimate_rest(self.metric.slope, nearness)

    def count_rows(self, executor: QueryExecutor, rest: ShardRests) -> tuple[int, int]:
        return rest.row_counts

    def count_rows_read(self, candidates: int, rest: ShardRests) -> int:
        return rest.rows_read

    def describe(self, effort: Effort, rows: int, total: int, rest: Any = None) -> str:
        return f"{rest.text}; {rows:,} of {total:,} rows read"

    def estimate_missing_weight(
        self, effort: Effort, candidates: np.ndarray, rest: ShardRests, weighed: WeighedRows, i: int
    ) -> MissingWeight:
        """Return the estimated weight of the rows other than the candidates of query i.

        The weight of a store that was scanned is exact. The interval of each other store is that of
        its index, and the ends of all intervals are added up.
        """
        assert weighed.lse is not None
        lse, number = float(weighed.lse[i]), self._number_of(effort)
        weights = np.asarray(weighed.weights[i], float)
        store_of_row = np.searchsorted([x.first_row for x in self.stores], candidates, "right") - 1
        # All sums are relative to that of the candidates.
        total = np.zeros(3)
        for s, store in enumerate(self.stores):
            with np.errstate(over="ignore"):
                missing = float(np.exp(rest.log_rest[s] - lse))
            own = weights[store_of_row == s]
            found, best = float(own.sum()), float(own.max(initial=0))
            if rest.is_exact[s] or not missing:
                total += missing
                continue
            share = missing / (missing + found) if math.isfinite(missing) else 1.0
            # For a query unlike the keys, the measured ratios mean nothing.
            is_like_keys = best > 0 and math.log(best) + lse >= store.min_score
            has_interval = store.has_interval and is_like_keys
            ends = store.get_effort(number).correct_estimate(share, has_interval)
            total += [found * x / (1 - x) if x < 1 else math.inf for x in ends]
        return MissingWeight(*(x / (1 + x) if math.isfinite(x) else 1.0 for x in total.tolist()))


def describe_searches(found: list[SliceSearch]) -> str:
    """Return the text that says how the slices have searched."""
    searches = [x.lists for x in found if not x.refusal]
    refusals = [x.refusal for x in found if x.refusal]
    lists, all_lists = (sum(x) for x in zip(*searches, strict=True))
    text = f"index, {lists:,} of {all_lists:,} lists in {format_plural(len(searches), 'shard')}"
    if refusals:
        text += f", exactly in {len(refusals):,}: {refusals[0]}"
    return text


def plan_sharded_search(
    executor: ShardedExecutor, missing_weight: float
) -> ShardedSearchPlan | str:
    """Return how to find rows with the indexes of the stores, or why all rows must be scanned."""
    view: Any = executor.view
    weighting = executor.weighting
    metric = choose_metric(view, executor.score, weighting)
    if isinstance(metric, str):
        return metric
    stores, refusals, first_row = list[StoreIndex](), list[str](), 0
    for profile in view.snapshot.profiles:
        report = IndexReport.parse_settings(profile.settings)
        encoded = profile.settings.get("encoded", 0)
        efforts = choose_efforts(report, encoded, metric, weighting, missing_weight)
        if isinstance(efforts, str):
            refusals.append(efforts)
            stores.append(StoreIndex(first_row))
        else:
            scaled = scale_by_temperature(metric, weighting)
            assert report is not None and scaled is not None
            has_interval = executor.where is None and report.has_interval(
                profile.last_id, profile.rows, scaled.slope
            )
            min_score = report.min_similarity * scaled.slope
            stores.append(StoreIndex(first_row, efforts, has_interval, min_score))
        first_row += profile.rows
    if len(refusals) == len(stores):
        return refusals[0]
    scaled = scale_by_temperature(metric, weighting)
    assert scaled is not None
    indexed = [store for store in stores if store.efforts]
    merged = []
    for number in range(max(len(store.efforts) for store in indexed)):
        efforts_of_stores = [store.get_effort(number) for store in indexed]
        merged.append(
            replace(
                efforts_of_stores[0],
                rows=max(x.rows for x in efforts_of_stores),
                recall=min(x.recall for x in efforts_of_stores),
            )
        )
    return ShardedSearchPlan(
        row_index=None,  # type: ignore[arg-type]
        metric=scaled,
        selection=executor.selection,
        efforts=tuple(merged),
        missing_weight=missing_weight if type(weighting) is Softmax else None,
        has_interval=False,
        min_best_score=-math.inf,
        has_few_best_rows=False,
        conditional=None,
        executor=executor,
        stores=tuple(stores),
        requested=missing_weight,
    )
