"""The scan of the rows: it computes the weights of all rows for a batch of queries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from qkv import attention, weightings
from qkv.answer_backend import Row
from qkv.database.query.far_queries import move_far_cells, move_far_vectors
from qkv.database.table import cells
from qkv.database.table.row_selection import RowSelection
from qkv.database.table.view import ROWS_PER_CHUNK, TableView
from qkv.errors import ArgumentError, format_plural
from qkv.frameworks import is_array, to_numpy
from qkv.frameworks.ragged import EncodedQuery
from qkv.frameworks.stored_rows import StoredRows, WeighedRows
from qkv.scores import Score
from qkv.util.deadline import check_deadline
from qkv.weightings import WeightingLike

MAX_SCORES_PER_BATCH = 2**26
"""The number of scores in memory at a time, which limits the number of queries in a batch."""

MAX_SPARSE_QUERIES_PER_BATCH = 64
"""The number of queries in a batch if keys have sparse vectors.

Each word of the batch becomes a column of the keys.
"""

ROWS_PER_RUN = 512
"""The ranking divides the rows into runs of this length, and first compares only their maxima."""

ScaledSquareSum = tuple[np.ndarray, np.ndarray]
"""A sum of squares and a scale: the sum is divided by scale²."""


class RowScan:
    """Computes the weights of the rows that pass a condition, for batches of queries."""

    where: Any = None
    """The condition that the rows must pass."""

    def __init__(
        self,
        view: TableView,
        score: Score,
        weighting: WeightingLike,
        selection: RowSelection,
        tolerance: float | None = None,
        confidence: float | None = None,
    ):
        self.view, self.score, self.weighting = view, score, weightings.resolve(weighting)
        self.tolerance, self.confidence, self.selection = tolerance, confidence, selection
        self.row_count, self.missing_value_count = selection.row_count, selection.missing_count
        self._opened_vectors: dict[bool, StoredRows] = {}

    @property
    def allowed_rows(self) -> np.ndarray | None:
        """The mask (m,) of the rows that are scored, or None if all rows are."""
        return self.selection.mask

    @property
    def candidate_count(self) -> int:
        """The number of rows in arrays of weights: all, or only the selected rows if few are."""
        return self.selection.read_count

    @property
    def candidate_positions(self) -> np.ndarray | None:
        """The positions of the rows in arrays of weights, or None for all rows."""
        return self.selection.positions

    @cached_property
    def _scan_text(self) -> str:
        """The number of rows and segments to scan, as text."""
        return (
            f"{format_plural(self.candidate_count, 'row')} in "
            f"{format_plural(self.view.chunk_count, 'segment')}"
        )

    def without_row(self, position: int) -> RowScan:
        """Return a scan of the same rows without the row at this position."""
        selection = self._selection_without(position)
        args = (self.view, self.score, self.weighting, selection, self.tolerance, self.confidence)
        scan = RowScan(*args)
        scan.missing_value_count, scan.where = self.missing_value_count, self.where
        return scan

    def _selection_without(self, position: int) -> RowSelection:
        """Return the selected rows without the row at this position."""
        allowed = self.allowed_rows
        passed = np.ones(len(self.view.ids), bool) if allowed is None else allowed.copy()
        passed[position] = False
        return self.view.select_mask(passed)

    def run_batches(
        self, queries: Any, value: bool, max_queries: int = MAX_SCORES_PER_BATCH
    ) -> Iterator[tuple[Any, WeighedRows, str]]:
        """Yield (queries, their weights, engine text) for each batch of queries.

        With `value`, the values are pooled too. A batch has at most `max_queries` queries.
        """
        size = max(min(MAX_SCORES_PER_BATCH // len(self.view), max_queries), 1)
        size = min(size, MAX_SPARSE_QUERIES_PER_BATCH) if self.view.has_sparse_vectors else size
        for start in range(0, len(queries), size):
            check_deadline()
            batch = queries[start : start + size]
            yield batch, *self.compute_weights(batch, value)

    def compute_weights(self, queries: Any, value: bool) -> tuple[WeighedRows, str]:
        """Return the weights for a batch of queries, and the text that describes the engine."""
        code, matches = EncodedQuery(None), None
        if self.score.compares_keys:
            matches, engine = self.match_keys(queries), "exact index"
        else:
            code, engine = self._encode_queries(queries), f"scan of {self._scan_text}"
        weighed = attention.weigh_rows(
            self._open_vectors(value, code.sparse_positions),
            code.code,
            score=self.score,
            weighting=self.weighting,
            tolerance=self.tolerance,
            confidence=self.confidence,
            matches=matches,
        )
        if weighed.bound is not None:
            engine = f"codes of {self._scan_text}, {weighed.rows_read:,} of them read in full"
        elif weighed.refusal:
            engine += f", exactly: {weighed.refusal}"
        return weighed, engine

    def _open_vectors(self, value: bool, sparse_positions: Any) -> StoredRows:
        """Return the vectors of the selected rows; those without sparse columns are cached."""
        rows = self._opened_vectors.get(value) if sparse_positions is None else None
        if rows is None:
            rows = self.view.open_vectors(
                self.selection, value=value, sparse_positions=sparse_positions
            )
            if sparse_positions is None:
                self._opened_vectors[value] = rows
        return rows

    def match_keys(self, queries: Any) -> np.ndarray:
        """Return an array (n, m): 1 if the row's key equals the query, else 0."""
        ids = self.view.ids
        if self.candidate_positions is not None:
            ids = ids[self.candidate_positions]
        matches = np.zeros((len(queries), len(ids)))
        for i, key in enumerate(queries):
            matches[i, np.isin(ids, self.view.find_ids(key))] = 1.0
        return matches

    def _encode_queries(self, queries: Any) -> EncodedQuery:
        """Return the vectors of queries, which are moved nearer if they are far from the keys."""
        encoded = self._encode_valid_queries(move_far_cells(self.view, queries))
        return move_far_vectors(self.view, encoded, self.score, self.weighting)

    def _encode_valid_queries(self, queries: Any) -> EncodedQuery:
        """Return the vectors of queries; check queries that are already encoded."""
        is_encoded = is_array(queries) and self.view.schema.key_kind != "vector"
        if not is_encoded:
            return self.view.encode_queries(queries)
        code = to_numpy(queries)
        self.view.check_query(EncodedQuery(code))
        if not np.isfinite(code).all():
            bad = int(np.isfinite(code).all(axis=1).argmin())
            raise ArgumentError(
                f"query {bad} contains NaN or infinity, so no row is near it: pass finite numbers"
            )
        return EncodedQuery(np.ascontiguousarray(code, dtype=np.result_type(code, np.float32)))

    def compute_full_weights(self, queries: Any) -> np.ndarray:
        """Return the weights of all rows for each query, (n, m). Rows that do not pass have 0."""
        return self.expand_to_all_rows(self.compute_weights(queries, value=False)[0].weights)

    def expand_to_all_rows(self, weights: np.ndarray) -> np.ndarray:
        """Expand numbers for the scanned rows, (…, candidates), to all rows, (…, m).

        Others get 0.
        """
        if self.candidate_positions is None:
            return weights
        out = np.zeros((*weights.shape[:-1], len(self.view.ids)), weights.dtype)
        out[..., self.candidate_positions] = weights
        return out

    def rank_rows(self, weights: np.ndarray, top: int) -> np.ndarray:
        """Return the indices of the `top` largest weights, the largest first.

        Among equal weights, the lowest index comes first. Rows without weight are left out.
        """
        size = weights if self.weighting.is_convex else np.abs(weights)
        if top >= len(size) or len(size) <= ROWS_PER_RUN:
            order = (-size).argsort(kind="stable")[:top]
        else:
            order = find_top_candidates(size, top)
            if len(order) > top:
                order = order[size[order] >= _kth_largest(size[order], top)]
            order = order[np.argsort(-size[order], kind="stable")][:top]
        # NaN is sorted to the end.
        positive: np.ndarray = order[: np.count_nonzero(size[order] > 0)]
        return positive

    def find_heaviest(self, weights: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the `top` heaviest rows among all rows, and their weights."""
        order = self.rank_rows(weights, top)
        return self._row_positions(order), weights[order]

    def rows_in_order(self, weights: np.ndarray, order: np.ndarray) -> list[Row]:
        """Return the rows at the indices `order` of the weights."""
        return self.rows_at_positions(self._row_positions(order), weights[order])

    def _row_positions(self, order: np.ndarray) -> np.ndarray:
        """Return the positions among all rows for indices of the weights."""
        return order if self.candidate_positions is None else self.candidate_positions[order]

    def rows_at_positions(
        self,
        positions: np.ndarray,
        weights: np.ndarray,
        records: list[dict[str, Any]] | None = None,
    ) -> list[Row]:
        """Return the rows at these positions.

        `records` are their cells, if they were read before.
        """
        records = self._read_records(positions) if records is None else records
        records, schema = records[: len(positions)], self.view.schema
        keys, values = schema.keys_from_rows(records), schema.values_from_rows(records)
        return list(map(Row, keys, values, weights.tolist(), positions.tolist(), records))

    def _read_records(self, positions: np.ndarray) -> list[dict[str, Any]]:
        return self.view.read_rows_at(positions)

    def unpack_value(self, pooled: np.ndarray) -> Any:
        """Return a pooled value (d_v,) for users: a float, a mapping of columns, or a vector."""
        if self.view.schema.value_kind == "number":
            return float(pooled[0])
        if self.view.schema.value_kind == "numbers":
            return dict(zip(self.view.schema.value, map(float, pooled), strict=True))
        return pooled

    def sum_squared_deviations(self, weights: np.ndarray, mean: np.ndarray) -> ScaledSquareSum:
        """Return Σᵢ αᵢ (vᵢ − mean)² / 4, with a scale that prevents overflow."""
        zero = np.zeros_like(np.atleast_1d(mean), dtype=float)
        total = zero, np.full_like(zero, np.finfo(float).tiny)
        with np.errstate(invalid="ignore"):
            for group in self.view.open_vectors(self.selection, value=True).iter_spans(
                ROWS_PER_CHUNK, prefetch_fields=("value",)
            ):
                for cut in group:
                    chunk_weights = weights[cut.start : cut.start + cut.size]
                    used = np.flatnonzero(chunk_weights)
                    half = cut.read_values(used).astype(float) / 2 - mean / 2
                    scale = np.maximum(np.abs(half).max(axis=0, initial=0), total[1])
                    squares = chunk_weights[used] @ (half / scale) ** 2
                    total = merge_square_sums(total, (squares, scale))
        return total


def merge_square_sums(first: ScaledSquareSum, second: ScaledSquareSum) -> ScaledSquareSum:
    """Return the sum of two scaled sums of squares."""
    scale = np.maximum(first[1], second[1])
    return first[0] * (first[1] / scale) ** 2 + second[0] * (second[1] / scale) ** 2, scale


def identify_value(value: Any) -> Any:
    """Return a hashable object that is equal for equal values."""
    if type(value) is str:
        return value
    if type(value) is dict and _SCALAR_TYPES.issuperset(map(type, value.values())):
        return tuple((type(x), x) for x in value.values())
    return cells.dump_row({"value": value}).encode()


_SCALAR_TYPES = {str, int, bool, type(None)}


def as_batch(query: Any) -> Any:
    """Return a single query as a batch of one query."""
    return query[None] if is_array(query) else [query]


def find_top_candidates(x: np.ndarray, top: int) -> np.ndarray:
    """Return ascending indices of positive numbers of x (m,), among them the `top` largest.

    Of equal numbers, those with the lowest indices are among them.

    >>> find_top_candidates(np.array([0.1, 0.3, 0.0, 0.2]), 2).tolist()
    [1, 3]
    """

    def find_at_least(part: np.ndarray, least: Any) -> np.ndarray:
        return np.flatnonzero(part >= least if least > 0 else part > 0)  # also if least is NaN

    count = len(x) // ROWS_PER_RUN
    if top > count:
        # NaN would count as largest.
        return find_at_least(x, 0 if math.isnan(x.sum()) else _kth_largest(x, top))
    runs, rest = np.split(x, [count * ROWS_PER_RUN])
    runs = runs.reshape(count, ROWS_PER_RUN)
    best = np.maximum.reduce(runs, axis=1)
    if math.isnan(best.sum()):
        return find_at_least(x, 0)
    # The largest numbers are in those runs that have the largest maxima. Of runs with equal maxima,
    # the first ones suffice.
    chosen = np.sort((-best).argsort(kind="stable")[:top])
    least = best[chosen].min()
    at = find_at_least(runs[chosen], least)
    found = chosen[at // ROWS_PER_RUN] * ROWS_PER_RUN + at % ROWS_PER_RUN
    return np.concatenate([found, find_at_least(rest, least) + count * ROWS_PER_RUN])


def _kth_largest(x: np.ndarray, k: int) -> Any:
    """Return the k-th largest number of x, or the smallest number if x has fewer than k."""
    k = min(k, len(x))
    return np.partition(x, len(x) - k)[len(x) - k]
