"""Answers with the k best rows that an index finds. The queries of a batch are processed together.

An answer holds the cells of its rows. It makes its `rows` of them when they are first read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from qkv.answer import Answer
from qkv.attention import pool_weighed_values
from qkv.database.index.metric import IndexMetric
from qkv.database.query.executor import LocalBackend, QueryExecutor
from qkv.database.table.view import TableView
from qkv.util.deadline import check_deadline
from qkv.util.types import lazy_property

MAX_BEST_ROWS = 256
"""The largest k. Weightings of more rows are computed as for all other weightings."""

MAX_GATHERED_FLOATS = 2**18
"""The number of key elements that are gathered and scored at a time, so that they stay cached."""

MAX_ROWS_PER_LOOP = 128
"""More scores of a query are ranked by NumPy."""

QUERIES_PER_BATCH = 256
"""The answers of a batch share the memory of their rows, so a batch is small."""

MIN_SQUARE, MAX_SQUARE = 1e-24, 1e24
"""The squared lengths of vectors that are precise in float32."""


def find_slopes(metric: IndexMetric, query: np.ndarray) -> Any:
    """Return the factors of the inner products or distances of queries (n, d) in their scores.

    Return None if the square of a length may overflow or underflow.
    """
    if metric.name != "cosine":
        return metric.slope
    squares = np.vecdot(query, query)
    least, most = (squares.min(), squares.max()) if len(squares) > 1 else (squares[0], squares[0])
    if not (least > MIN_SQUARE and most < MAX_SQUARE):
        return None
    return metric.slope / np.sqrt(squares)[:, None]


def score_rows(
    view: TableView,
    metric: IndexMetric,
    query: np.ndarray,
    slopes: Any,
    positions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Return the exact scores (n, c) of queries (n, d) and the rows at their positions (n, c).

    Also return the key vectors (n, c, d) if there are few. Return None if a score is not finite.
    """
    step = max(MAX_GATHERED_FLOATS // max(positions.shape[1] * query.shape[1], 1), 1)
    scores = np.empty(positions.shape, query.dtype)
    for start in range(0, len(query), step):
        check_deadline()
        some = slice(start, start + step)
        at, q, out = positions[some], query[some], scores[some]
        stored = view.read_key_vectors_at(at)
        key = stored.astype(query.dtype, copy=False)
        if metric.is_distance:
            offset = key - q[:, None]
            np.einsum("ncd,ncd->nc", offset, offset, out=out)
            out *= -0.5
            continue
        np.matmul(key, q[:, :, None], out=out[:, :, None])
        if metric.name == "cosine":
            # Cached key terms would take memory for all rows.
            squares = np.vecdot(key, key)
            if not (squares.min() > MIN_SQUARE and squares.max() < MAX_SQUARE):
                return None
            out /= np.sqrt(squares)
    scores *= slopes
    if not np.isfinite(scores).all():
        return None
    return scores, stored if step >= len(query) else None


def rank_rows_of_one_query(
    view: TableView,
    metric: IndexMetric,
    query: np.ndarray,
    square: float,
    positions: np.ndarray,
    k: int,
) -> BestRowsOfOneQuery | None:
    """Return the k best of the rows at ascending positions (c,) for a query vector (d,).

    `square` is the square of the query's length. Return None if the length of a key may overflow or
    underflow. For so few numbers, a call of NumPy takes longer than a loop.
    """
    stored = view.read_key_vectors_at(positions)
    key, slope = stored.astype(query.dtype, copy=False), metric.slope
    if metric.is_distance:
        offset = key - query
        scores = [-0.5 * slope * x for x in np.vecdot(offset, offset).tolist()]
    elif metric.name == "cosine":
        squares = np.vecdot(key, key).tolist()
        if not (min(squares) > MIN_SQUARE and max(squares) < MAX_SQUARE):
            return None
        slope /= math.sqrt(square)
        products = key.dot(query).tolist()
        scores = [slope * x / math.sqrt(y) for x, y in zip(products, squares, strict=True)]
    else:
        scores = [slope * x for x in key.dot(query).tolist()]
    if not math.isfinite(sum(scores)):
        return None
    return BestRowsOfOneQuery(positions, scores, stored, query.dtype, k)


class BestRows:
    """The k best rows for each of n queries.

    - `candidates` (n, c): the ascending positions of the rows that were found
    - `order` (n, k): the columns of the best rows in `candidates`, the best first
    - `positions` (n, k), `weights` (n, k), `lse` (n,), `best_score` (n,) of the best rows
    - `key` (n, c, d): the key vectors of the candidates, or None
    """

    def __init__(
        self, candidates: np.ndarray, scores: np.ndarray, key: np.ndarray | None, k: int
    ) -> None:
        self.candidates, self.key = candidates, key
        # Of equal scores, the row at the lowest position is the best.
        self.order = (-scores).argsort(axis=1, kind="stable")[:, :k]
        at = np.arange(len(scores))[:, None]
        self.positions, best = candidates[at, self.order], scores[at, self.order]
        weights = np.exp(best - best[:, :1])
        total = weights.sum(axis=1)
        self.weights = weights / total[:, None]
        self.best_score = best[:, 0]
        self.lse = self.best_score + np.log(total)

    def read_records(self, view: TableView, count: int) -> list[dict[str, Any]]:
        """Return the cells of the `count` best rows of each query, one query after the other."""
        shown = self.positions[:, :count].reshape(-1)
        if self.key is None:
            return view.read_rows_at(shown)
        at = np.arange(len(self.key))[:, None]
        return view.read_rows_at(shown, self.key[at, self.order[:, :count]].reshape(len(shown), -1))


class BestRowsOfOneQuery(BestRows):
    """The k best rows for a single query, from the `scores` of its candidates.

    Most arrays are made when they are first read.
    """

    def __init__(
        self,
        candidates: np.ndarray,
        scores: list[float],
        key: np.ndarray,
        dtype: np.dtype[Any],
        k: int,
    ) -> None:
        # The keys of a store in 16 bits are less precise than the weights.
        self._positions_found, self._key, self._dtype = candidates, key, dtype
        # The order is stable: of equal scores, the row at the lowest position is the best.
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[:k]
        best = scores[order[0]]
        weights = [math.exp(scores[i] - best) for i in order]
        self._columns, self._total = np.array(order), sum(weights)
        self._weights, self._best_score = weights, best
        self.positions = candidates.take(self._columns)[None]
        self.lse = np.array([best + math.log(self._total)], dtype)

    @lazy_property
    def candidates(self) -> np.ndarray:
        return self._positions_found[None]

    @lazy_property
    def key(self) -> np.ndarray:
        return self._key[None]

    @lazy_property
    def order(self) -> np.ndarray:
        return self._columns[None]

    @lazy_property
    def weights(self) -> np.ndarray:
        return np.array([[x / self._total for x in self._weights]], self._dtype)

    @lazy_property
    def best_score(self) -> np.ndarray:
        return np.array([self._best_score], self._dtype)

    def read_records(self, view: TableView, count: int) -> list[dict[str, Any]]:
        vectors = self._key.take(self._columns[:count], 0)
        return view.read_rows_at(self.positions[0, :count], vectors)


class BestRowsBackend(LocalBackend):
    """Computes the attributes of answer i of a batch from its k best rows.

    `records` are the cells of the rows that the answer shows. `mean` is None if it is computed from
    them, or if values are not pooled.
    """

    def __init__(
        self,
        make_executor: Callable[[np.ndarray], QueryExecutor],
        exact_executor: QueryExecutor,
        query: Any,
        best: BestRows,
        i: int,
        records: list[dict[str, Any]],
        mean: Any,
    ) -> None:
        self._make_executor, self._exact_executor = make_executor, exact_executor
        self._best, self._i, self._records, self._mean = best, i, records, mean
        self.query, self.known_entropy, self.is_familiar = query, None, True

    @lazy_property
    def executor(self) -> QueryExecutor:
        return self._make_executor(self._best.candidates[self._i])

    @lazy_property
    def best_score(self) -> float:
        return float(self._best.best_score[self._i])

    @lazy_property
    def cached_weights(self) -> np.ndarray:
        best, i = self._best, self._i
        weights = np.zeros(best.candidates.shape[1], best.weights.dtype)
        weights[best.order[i]] = best.weights[i]
        return weights

    @lazy_property
    def best_key_rows(self) -> np.ndarray:
        return self._best.positions[self._i, :0]

    @lazy_property
    def heavy_rows(self) -> tuple[np.ndarray, np.ndarray]:
        best, i = self._best, self._i
        count = 0 if self._exact_executor.value_is_mean else self._count_rows()
        return best.positions[i, :count], best.weights[i, :count]

    @lazy_property
    def mean(self) -> Any:
        schema = self._exact_executor.view.schema
        if self._mean is not None or not schema.can_pool_values:
            return self._mean
        if schema.value_kind == "vector":
            value = np.stack([row[schema.value[0]] for row in self._records])
        else:
            columns = {name: [row[name] for row in self._records] for name in schema.value}
            value = np.asarray(schema.build_value_array(columns))
        pooled = pool_batch(self._best.weights[self._i : self._i + 1], value[None])
        return self._exact_executor.unpack_value(pooled[0])

    @lazy_property
    def value(self) -> Any:
        return self.mean if self.mean is not None else self.build_fields()["value"]

    def _count_rows(self) -> int:
        """Return the number of rows that have a weight."""
        return int(np.count_nonzero(self._best.weights[self._i]))

    def build_fields(self) -> dict[str, Any]:
        executor, best, i = self._exact_executor, self._best, self._i
        records = self._records[: self._count_rows()]
        shown = slice(0, min(executor.top, len(records)))
        weights = best.weights[i, : len(records)]
        rows = executor.rows_at_positions(best.positions[i, shown], weights[shown], records)
        fields = {"rows": rows, "values": [], "mean": self.mean, "value": self.mean}
        if self.mean is None:
            fields["values"] = values = executor.sum_values(records, weights)
            fields["value"] = values[0].value
        return fields


def pool_batch(weights: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the means (n, d_v) of values (n, k, d_v) with the weights (n, k)."""
    total = weights.sum(axis=1, dtype=np.result_type(weights, value))
    with np.errstate(all="ignore"):
        output = np.asarray((weights[:, None] @ value)[:, 0] / total[:, None])
    is_simple = np.isfinite(output) & (weights[:, -1:] > 0)
    # The mean of equal numbers is exactly this number.
    is_simple &= value[:, 0] != value[:, -1]
    if not is_simple.all():
        for i in np.flatnonzero(~is_simple.all(axis=1)).tolist():
            used = weights[i] > 0
            output[i] = pool_weighed_values(weights[i : i + 1, used], value[i, used], True)[0]
    return output


def build_answers(
    executor: QueryExecutor,
    queries: Any,
    best: BestRows,
    make_executor: Callable[[np.ndarray], QueryExecutor],
    fields: dict[str, Any],
) -> list[Answer]:
    """Return one answer for each query; `fields` are the same in all.

    The answers hold the cells of their rows, and make the rows and the mean of them when these are
    first read.
    """
    view, (n, k) = executor.view, best.positions.shape
    count = min(executor.rows_to_read, k)
    records = best.read_records(view, count)
    means: list[Any] = [None] * n
    if count < k and view.schema.can_pool_values:
        pooled = pool_batch(best.weights, view.read_values_at(best.positions))
        means = list(map(executor.unpack_value, pooled))
    answers = []
    for i, (query, mean, lse) in enumerate(zip(queries, means, best.lse.tolist(), strict=True)):
        own = records if n == 1 else records[i * count : (i + 1) * count]
        answer: Answer = object.__new__(Answer)
        backend = BestRowsBackend(make_executor, executor, query, best, i, own, mean)
        vars(answer).update(fields, query=query, lse=lse, _backend=backend)
        answers.append(answer)
    return answers
