"""The search of one slice for approximate answers: its indexes, and a scan of all other rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qkv.database.errors import IndexDamagedError
from qkv.database.index import approximate
from qkv.database.index.metric import IndexMetric, scale_by_temperature
from qkv.database.index.row_index import ListMasses, forget_damaged_index, log_sum_exp
from qkv.database.table.row_selection import RowSelection
from qkv.database.table.view import TableView
from qkv.scores import Score
from qkv.util.deadline import check_deadline
from qkv.weightings import Weighting

ROWS_PER_SCAN = 2**15
"""The number of rows that are compared at a time if no index contains them."""


class SliceSearch(NamedTuple):
    """The rows that a slice has found for n queries.

    - `positions` (n, c): their positions in the cluster; −1 fills up the end
    - `scanned` (n, c): those of rows without an index, from a scan of all of them
    - `log_rest` (n,): log Σ exp(score) over the other rows without an index
    - `nearness` (n, c) and `masses`: as in `FoundRows`
    - `rows_read` (n,): how many rows were read in full
    - `row_counts`: the number of rows that may take part, and of those without a value
    - `lists`: the number of lists that were searched, and that of all lists
    - `refusal`: why all rows were scanned, or ""
    """

    positions: np.ndarray
    scanned: np.ndarray
    log_rest: np.ndarray
    nearness: np.ndarray
    masses: ListMasses | None
    rows_read: np.ndarray
    row_counts: tuple[int, int]
    lists: tuple[int, int]
    refusal: str


def search_slice(
    view: TableView,
    selection: RowSelection,
    code: np.ndarray,
    score: Score,
    weighting: Weighting,
    missing_weight: float,
    effort: int,
    count: int,
) -> SliceSearch:
    """Return about `count` near rows of a slice for queries with the vectors `code` (n, d).

    `effort` is the number of the search among those that the index of its store tries in turn.
    """
    metric = _scale_metric(view, score, weighting)
    queries = metric.prepare_vectors(code)
    while True:
        plan = approximate.plan_search(view, score, weighting, selection, missing_weight)
        if isinstance(plan, str):
            allowed = selection.mask
            rows = np.arange(len(view.ids)) if allowed is None else np.flatnonzero(allowed)
            found, lists, refusal = None, (0, 0), plan
            break
        try:
            chosen = plan.efforts[min(effort, len(plan.efforts) - 1)]
            found = plan.search(view, queries, chosen)
        except IndexDamagedError as error:
            forget_damaged_index(view, error)
            continue
        rows, lists, refusal = plan.unindexed, (chosen.lists, plan.row_index.list_count), ""
        break
    scanned, log_rest = scan_rows(view, metric, queries, rows, count)
    none = np.zeros((len(code), 0), np.int64)
    positions = none if found is None else found.positions
    nearness = None if found is None else found.nearness
    return SliceSearch(
        positions=positions,
        scanned=scanned,
        log_rest=log_rest,
        nearness=none.astype(np.float32) if nearness is None else nearness,
        masses=None if found is None else found.masses,
        rows_read=(positions >= 0).sum(axis=1) + len(rows),
        row_counts=(selection.row_count, selection.missing_count),
        lists=lists,
        refusal=refusal,
    )


def _scale_metric(view: TableView, score: Score, weighting: Weighting) -> IndexMetric:
    metric = approximate.choose_metric(view, score, weighting)
    assert not isinstance(metric, str)  # the cluster has checked it
    scaled = scale_by_temperature(metric, weighting)
    assert scaled is not None
    return scaled


def scan_rows(
    view: TableView, metric: IndexMetric, queries: np.ndarray, rows: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the best rows for prepared queries (n, d), (n, c), and the weight of the others.

    `rows` are the ascending positions of the rows to compare. The weight is log Σ exp(score), (n,).
    """
    n = len(queries)
    best_rows, best = np.zeros((n, 0), np.int64), np.zeros((n, 0), np.float32)
    log_rest = np.full(n, -np.inf)
    for start in range(0, len(rows), ROWS_PER_SCAN):
        check_deadline()
        some = rows[start : start + ROWS_PER_SCAN]
        key = view.read_key_vectors_at(some)
        near = np.stack([metric.compare_vectors(query, key) for query in queries])
        positions = np.concatenate([best_rows, np.broadcast_to(some, near.shape)], axis=1)
        near = np.concatenate([best, near], axis=1)
        # Of equal scores, the row at the lowest position is the best.
        order = (-near).argsort(axis=1, kind="stable")
        left = np.take_along_axis(near, order[:, count:], axis=1)
        log_rest = np.logaddexp(log_rest, log_sum_exp(metric.slope * left.astype(float)))
        order = order[:, :count]
        best_rows, best = (np.take_along_axis(x, order, axis=1) for x in (positions, near))
    return best_rows, log_rest
