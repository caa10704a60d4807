"""Queries far outside the keys: their vectors for the scan, and what to say about them."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qkv.database.encoders.numbers import Numbers
from qkv.database.table.cells import cell_kind
from qkv.errors import ArgumentError, DtypeError
from qkv.frameworks import get_framework, is_array, to_numpy
from qkv.frameworks.ragged import EncodedQuery
from qkv.scores import Gaussian, Laplace, Score
from qkv.util.formatting import format_number, format_one_line
from qkv.weightings import Entmax, Hard, Softmax, Sparsemax, TopK, Weighting

if TYPE_CHECKING:
    from qkv.database.table.view import TableView

MAX_FLOAT32_BANDWIDTHS = 64
"""A query farther outside the keys is compared in float64, because float32 would lose the
differences between the keys."""

MAX_EXCESS = 2.0**20
"""A query is moved to this distance from the keys, in units of their range, if it is farther away.

At this distance, float64 still resolves differences of 1e-9 of the range.
"""

MIN_FAR_BANDWIDTHS = 4.0
"""Keys that are farther from a query than this hardly say anything about it."""

MIN_FAR_SPREADS = 0.1
"""A query whose nearest key is nearer than this many spreads of the keys is not far."""

MIN_HEAD_SPREADS = 2.0
"""A number that is nearer to the mean than this many spreads is not far outside its column."""

RANKING_WEIGHTINGS = (Softmax, TopK, Hard, Entmax, Sparsemax)
"""Weightings that give the largest weight to the row with the best score.

A constant that is added to all scores does not change their weights.
"""

MAX_HEAD_EXCESS = 64.0
"""A number in a query of several columns is moved to this distance, in units of the range."""

KeyBounds = tuple[np.ndarray, np.ndarray]
"""The smallest and the largest number of the keys' vectors in each column, both (d,)."""


def move_far_vectors(
    view: TableView, code: EncodedQuery, score: Score, weighting: Weighting
) -> EncodedQuery:
    """Return the vectors of queries that a scan compares with number keys; see `move_far_queries`.

    Queries or bandwidths that need a gradient are not moved.
    """
    if view.encoder.kind != "numbers" or not isinstance(score, Gaussian | Laplace):
        return code
    query, bandwidth = code.code, score.bandwidth
    fw, bounds = get_framework(query), view.key_bounds
    if bounds is not None and type(query) is np.ndarray and _is_inside(query, bounds):
        return code
    arrays = [query, bandwidth] if is_array(bandwidth) else [query]
    if fw.needs_gradient(arrays) or any(map(fw.is_abstract, arrays)) or bounds is None:
        return code
    widths = np.atleast_1d(to_numpy(bandwidth) if is_array(bandwidth) else bandwidth)
    host, is_ranking = to_numpy(query), type(weighting) in RANKING_WEIGHTINGS
    moved = move_far_queries(host, bounds, widths, is_ranking)
    if moved is host:
        return code
    wide = "float64" if fw.supports_float64(query) else "float32"
    return code._replace(
        code=moved if fw.name == "numpy" else fw.array_from_host(moved, query, wide)
    )


def move_far_queries(
    code: np.ndarray, bounds: KeyBounds, bandwidth: np.ndarray, move: bool
) -> np.ndarray:
    """Return the vectors of queries (n, d) so that the scores still tell the keys apart.

    If a query is far outside the keys, the result is float64. With `move`, a query that is even
    farther away is moved nearer, in the columns in which it is outside. The nearest keys are the
    same, and they still get all the weight. Only weightings that ignore a constant that is added
    to all scores allow that.

    >>> bounds = np.array([1900.0]), np.array([2020.0])
    >>> move_far_queries(np.array([[1e12]]), bounds, np.array([10.0]), True).tolist()
    [[125831140.0]]
    """
    low, high = bounds
    if _is_inside(code, bounds):
        return code
    if bandwidth.ndim > 1 or not np.isfinite(bandwidth).all() or not np.isfinite(code).all():
        return code
    wide = code.astype(np.float64)
    excess = wide - np.clip(wide, low, high)
    if not (np.abs(excess) > MAX_FLOAT32_BANDWIDTHS * bandwidth).any():
        return code
    if not move:
        return wide
    unit = np.maximum(high - low, bandwidth)
    factor = np.abs(excess / unit).max(axis=1, keepdims=True) / MAX_EXCESS
    return np.where(factor > 1, wide - excess + excess / np.maximum(factor, 1), wide)


def _is_inside(code: np.ndarray, bounds: KeyBounds) -> bool:
    """Return whether all vectors (n, d) are in the range of the keys."""
    return bool((code >= bounds[0]).all() and (code <= bounds[1]).all())


def find_number_columns(view: TableView, query: Any) -> Iterator[FarColumn]:
    """Yield the numbers of a query of several columns that may be far outside their column."""
    encoder: Any = view.encoder
    if encoder.kind != "columns":
        return
    try:
        cells = encoder.split_query(query)
    except (ArgumentError, DtypeError):  # the encoder raises the error with its context
        return
    if len(cells) != len(encoder.heads):
        return
    names = view.schema.key if len(view.schema.key) == len(cells) else None
    for i, (head, cell) in enumerate(zip(encoder.heads, cells, strict=True)):
        is_number = isinstance(cell, int | float | np.number) and not isinstance(cell, bool)
        if not (is_number and isinstance(head, Numbers) and head.mean and head.unit):
            continue
        number, spread = float(cell), (head.spread or (1.0,))[0] * head.unit[0]
        # Most numbers are near the mean, and the range need not be known.
        if not MIN_HEAD_SPREADS * spread < abs(number - head.mean[0]) < math.inf:
            continue
        ends = view.number_bounds(names[i]) if names else view.number_bounds(view.schema.key[0], i)
        if ends is not None:
            yield FarColumn(i, names[i] if names else "the number", number, ends, spread)


class FarColumn(NamedTuple):
    """A number in a query of several columns, and the numbers of the same column of the keys."""

    position: int
    name: str
    number: float
    ends: tuple[float, float]
    spread: float

    @property
    def excess(self) -> float:
        """How far the number is outside the range, with a sign."""
        return self.number - min(max(self.number, self.ends[0]), self.ends[1])

    @property
    def far_ratio(self) -> float:
        return abs(self.excess) / self.spread

    @property
    def moved_number(self) -> float:
        """The number, moved nearer to the range if it is far away."""
        limit = MAX_HEAD_EXCESS * max(self.ends[1] - self.ends[0], self.spread)
        return self.number - self.excess + min(max(self.excess, -limit), limit)

    def describe(self) -> str:
        """Return a hint that the number is far outside the range."""
        low, high = map(format_number, self.ends)
        range_text = low if low == high else f"{low} to {high}"
        return f"{self.name} {format_one_line(self.number)} is far outside the keys, {range_text}"


def move_far_cells(view: TableView, queries: Any) -> Any:
    """Return queries of several columns with numbers that float32 can compare with the keys."""
    encoder: Any = view.encoder
    if encoder.kind != "columns" or is_array(queries):
        return queries
    moved: list[Any] = []
    for query in queries:
        far = [x for x in find_number_columns(view, query) if x.moved_number != x.number]
        if far:
            cells = list(encoder.split_query(query))
            for column in far:
                cells[column.position] = column.moved_number
            query = tuple(cells)
        moved.append(query)
    return moved


def far_ratio(encoder: Numbers, score: Gaussian, best_score: float) -> float:
    """Return the distance of a query from the nearest key, relative to that of a far query.

    A ratio above 1 means that the query is far from every key. `score` is the default score of the
    encoder.

    >>> encoder = Numbers().fit([1.0, 2.0, 3.0, 4.0])
    >>> far_ratio(encoder, encoder.default_score(4), -18.0)  # 6 bandwidths
    1.5
    """
    distance = math.sqrt(max(-2.0 * best_score, 0.0))
    spread = np.asarray(encoder.spread or 1.0) / np.asarray(score.bandwidth)
    limit = max(MIN_FAR_BANDWIDTHS, MIN_FAR_SPREADS * float(np.max(spread)))
    return distance / limit


def gap_ratio(encoder: Numbers, score: Gaussian, best_score: float) -> float:
    """Return the distance of a query from the nearest key, relative to a usual one.

    Above 1, the nearest key says less about the query. In several columns, the usual distance is
    r, the distance of neighbours that gives the bandwidth. In one column it is r / 2, because a
    query between two keys that are r apart is not farther than that from one of them.

    >>> encoder = Numbers().fit([10.0, 20.0, 30.0, 40.0])
    >>> round(gap_ratio(encoder, encoder.default_score(4), -2.0), 2)  # 2 bandwidths
    2.0
    """
    columns = np.size(encoder.spread or 1.0)
    usual = 1.0 if columns == 1 else math.sqrt(columns + 3)
    relative = MIN_FAR_BANDWIDTHS / usual
    return far_ratio(encoder, score, best_score) * relative


def describe_far_query(view: TableView, query: Any, code: EncodedQuery, nearest: Any) -> str:
    """Return a hint about a query that is far from every key; `nearest` is the nearest key.

    Return "" if the range of the keys is unknown.
    """
    if view.key_bounds is None:
        return ""
    low, high = view.key_bounds
    named = f"({format_one_line(query)})" if len(low) > 1 else format_one_line(query)
    x = np.asarray(code.code, np.float64)[0]
    if (x >= low).all() and (x <= high).all():
        return f"the query {named} is far from every key; the nearest is {format_one_line(nearest)}"
    column = int(np.argmax(np.maximum(low - x, x - high) / np.maximum(high - low, 1e-300)))
    names, cell = view.schema.key, nearest[column] if isinstance(nearest, tuple) else nearest
    if cell_kind(cell) == "date":
        encoder: Any = view.encoder
        days = [
            float(ends[column]) * encoder.unit[column] + encoder.mean[column]
            for ends in (low, high)
        ]
        ends = [_format_days(day, cell) for day in days]
    else:
        is_named = len(names) == len(low)
        numbers = view.number_bounds(names[column if is_named else 0], None if is_named else column)
        ends = [format_number(number) for number in numbers or ()]
    range_text = " to ".join(dict.fromkeys(ends))
    name = names[column] if len(names) == len(low) else f"number {column + 1}"
    where = f", {range_text}" if len(low) == 1 else f", where {name} is {range_text}"
    return f"the query {named} is far outside the keys{where}"


def _format_days(days: float, cell: Any) -> str:
    """Return the days since the year 1 as a date, or as a time of day if the cell is one."""
    if isinstance(cell, datetime.time):
        seconds = min(max(round(days * 86400), 0), 86399)
        return str(datetime.time(seconds // 3600, seconds // 60 % 60, seconds % 60))
    return str(datetime.date.fromordinal(min(max(math.floor(days + 1e-3), 0), 3652058) + 1))
