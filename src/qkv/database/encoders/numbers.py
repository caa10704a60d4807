"""Encode numbers and dates, which are compared by their distance."""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders import neighbours
from qkv.database.encoders.base import Encoder, check_batch
from qkv.database.table.cells import to_python_datetime
from qkv.errors import ArgumentError, DtypeError, ShapeError, format_plural
from qkv.frameworks import get_framework, is_array, to_numpy
from qkv.scores import Gaussian, Score
from qkv.util.formatting import quote_cell
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array

MAX_FLOAT32 = float(np.finfo(np.float32).max)
MAX_SPREAD = 1e30
"""Vectors have the units of the keys if the spread is below this and above its inverse."""


@suggest_keywords
@dataclass(frozen=True)
class Numbers(Encoder):
    """x = (key − mean) / unit, compared by the Gaussian −Σ (q − k)² / 2h².

    Each column has its own h.

    A key is one number, or a tuple or vector of d numbers. Dates count as days. Vectors, and the
    widths of a score, have the units of the keys. `units` sets other units: one number, or one per
    column.

    The bandwidth h has the same units as the vectors. With `units`, its default is 1. Otherwise it
    comes from neighbours: measure each column in its `spread`, and let r be the distance of a key
    to its ⌊√m⌋-th nearest other key, in the median of the m keys. Then h = r · spread / √(d + 3).
    So about √m rows share the weight, and far outliers do not widen h. With one column, h = r / 2
    in the units of the keys. `spread` is the standard deviation, or the distance of the quartiles
    / 1.349 if that is smaller.

    As one of several heads, h is `spread`, because the common scale of the heads depends on m
    already.

    >>> encoder = Numbers().fit([2.0, 3.0, 4.0, 1000.0])
    >>> encoder.default_score(4)
    Gaussian(bandwidth=1.0)
    >>> encoder.encode([3.0]) - encoder.encode([2.0])
    array([[1.]], dtype=float32)
    """

    bandwidth: float | None = None
    units: float | tuple[float, ...] | None = None
    mean: tuple[float, ...] | None = None
    unit: tuple[float, ...] | None = None
    spread: tuple[float, ...] | None = None
    neighbour_distance: float | None = None
    kind: ClassVar[str] = "numbers"

    def __post_init__(self) -> None:
        if self.bandwidth is not None and not 0 < self.bandwidth < math.inf:
            raise ArgumentError(f"Numbers: bandwidth must be above 0, not {self.bandwidth!r}")
        for name in ("units", "mean", "unit", "spread"):
            numbers = getattr(self, name)
            if numbers is not None and not isinstance(numbers, int | float):
                object.__setattr__(self, name, tuple(map(float, numbers)))
        units = self.units if isinstance(self.units, tuple) else (self.units or 1.0,)
        if self.units == 0 or not all(0 < step < math.inf for step in units):
            raise ArgumentError(f"Numbers: units must be above 0, not {self.units!r}")

    @property
    def width(self) -> int:
        return len(self._require_fitted()[0])

    def fit(self, keys: Sequence[Any]) -> Numbers:
        rows = to_float64_matrix(keys)
        if not len(rows):
            raise ArgumentError("Numbers: fit needs at least one key")
        columns = rows.shape[1]
        with np.errstate(over="ignore", invalid="ignore"):
            mean, deviation = rows.mean(axis=0), rows.std(axis=0)
        neighbour_distance = None
        if self.units is None:
            if not np.isfinite(deviation).all():
                raise ArgumentError("the standard deviation of the keys overflows: pass units=")
            sample = rows[neighbours.sample_positions(len(rows), neighbours.MAX_SAMPLED_KEYS)]
            spread = neighbours.measure_spreads(sample)
            neighbour_distance = neighbours.fit_neighbour_distance(sample / spread, len(rows))
            # If float32 cannot represent the spread, the spread itself is the unit.
            unit = np.where((spread > 1 / MAX_SPREAD) & (spread < MAX_SPREAD), 1.0, spread)
            relative_spread = tuple((spread / unit).tolist())
        else:
            unit = np.asarray(self.units, np.float64)
            if unit.ndim and len(unit) != columns:
                raise ShapeError(
                    f"Numbers: there are {len(unit)} units, but keys have {columns} numbers: pass "
                    "one unit per number"
                )
            unit, relative_spread = np.broadcast_to(unit, (columns,)), None
        return replace(
            self,
            mean=tuple(mean.tolist()),
            unit=tuple(unit.tolist()),
            spread=relative_spread,
            neighbour_distance=neighbour_distance,
        )

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        mean, unit = self._require_fitted()
        if type(keys) is list and len(mean) == len(keys) == 1 and type(keys[0]) in (int, float):
            with contextlib.suppress(OverflowError):
                number = (float(keys[0]) - mean[0]) / unit[0]
                if abs(number) < MAX_FLOAT32:
                    return np.array([[number]], np.float32)
        rows = to_float64_matrix(keys, len(mean))
        with np.errstate(over="ignore"):
            out = ((rows - mean) / unit).astype(np.float32)
        if not np.isfinite(out).all():
            bad = ~np.isfinite(out).all(axis=1)
            raise ArgumentError(
                f"key {int(bad.argmax())} is too far from the mean for float32: leave that row out"
            )
        return out

    def default_score(self, rows: int) -> Score:
        return Gaussian(self._default_bandwidth(rows))

    def _default_bandwidth(self, rows: int) -> float | np.ndarray:
        """Return `bandwidth` if it was passed, 1 with `units`, and else that of neighbours.

        For one row, and as one of several heads, it is `spread`. Without neighbours, it is Scott's
        rule: spread · rows^(−1 / (width + 4)).
        """
        if self.bandwidth is not None:
            return float(self.bandwidth)
        if self.units is not None:
            return 1.0
        factor = float(max(rows, 1) ** (-1 / (self.width + 4)))
        if self.neighbour_distance is not None and rows > 1:
            factor = self.neighbour_distance / math.sqrt(self.width + 3)
        spread = self.spread or (1.0,)  # the unit is then the spread
        if len(spread) == 1:
            return factor * spread[0]
        return np.asarray(spread, np.float32) * np.float32(factor)

    def standardize_query(self, query: Array) -> Array | None:
        mean, unit = self._require_fitted()
        if len(query.shape) == 2 and query.shape[1] != len(mean):
            came = format_plural(query.shape[1], "number")
            raise ShapeError(f"query 0 has {came}, but the keys have {len(mean)} each")
        fw = get_framework(query)
        wide = "float64" if fw.supports_float64(query) else "float32"
        x = fw.astype(query, wide)
        # Subtract the mean in two parts: float32 would lose digits of keys far from 0.
        high = np.asarray(mean, np.float32).astype(float)
        low = np.asarray(mean) - high
        x = (x - fw.array_from_host(high, x, wide)) - fw.array_from_host(low, x, wide)
        x = x / fw.array_from_host(unit, x, wide)
        dtype = fw.dtype_name(query)
        return fw.astype(x, dtype if dtype in ("float32", "float64") else "float32")

    def can_read_query(self, query: Any) -> bool:
        try:
            to_float64_matrix([query], self.width)
        except (ArgumentError, DtypeError, ShapeError):
            return False
        return True

    def _require_fitted(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if self.mean is None or self.unit is None:
            raise ArgumentError("Numbers is not fitted: call fit(keys) first")
        return self.mean, self.unit


def to_float64_matrix(keys: Sequence[Any], columns: int | None = None) -> np.ndarray:
    """Return keys as an array (m, columns) of float64; an error names the first wrong row."""
    check_batch(keys)
    rows = to_numpy(keys) if is_array(keys) else _keys_to_array(keys)
    if rows.dtype.kind not in "iufb":
        raise DtypeError(f"Numbers takes real numbers, not {rows.dtype}")
    rows = rows.astype(np.float64)
    rows = rows[:, None] if rows.ndim == 1 else rows
    if columns is not None and not len(rows):
        rows = rows.reshape(0, columns)
    if rows.ndim != 2:
        raise ShapeError(f"an array of keys must be (rows, columns), not {rows.shape}")
    if columns is not None and rows.shape[1] != columns:
        came = format_plural(rows.shape[1], "number")
        raise ShapeError(f"key 0 has {came}, but the keys have {columns} each")
    bad = ~np.isfinite(rows).all(axis=1)
    if bad.any():
        raise ArgumentError(f"key {int(bad.argmax())} is not a finite number: leave that row out")
    return rows


def _keys_to_array(keys: Sequence[Any]) -> np.ndarray:
    """Return a list of keys as an array (m, d) of float64."""
    types = set(map(type, keys))
    if types <= {int, float}:
        try:
            return np.array(keys, np.float64)
        except OverflowError:
            pass  # the code below raises an error that names the row
    rows, first = [], None
    for i, key in enumerate(keys):
        parts = (
            key if isinstance(key, tuple | list) else np.atleast_1d(key) if is_array(key) else [key]
        )
        rows.append([_to_number(part, i) for part in parts])
        first = len(rows[0]) if first is None else first
        if len(rows[-1]) != first:
            came = format_plural(len(rows[-1]), "number")
            raise ShapeError(f"key {i} has {came} where key 0 has {first}")
    return np.array(rows, np.float64).reshape(len(rows), first or 0)


def _to_number(part: Any, row: int) -> float:
    """Return a number or a date as a float."""
    if isinstance(part, int | float | np.number | np.bool_ | Decimal):
        try:
            return float(part)
        except (OverflowError, TypeError, ValueError):
            raise ArgumentError(f"key {row} is {quote_cell(part)}: too large for a float") from None
    if is_array(part) and not part.shape:
        return float(part)
    if isinstance(part, np.datetime64):
        part = to_python_datetime(part)
    if isinstance(part, datetime.date | datetime.time):
        return _to_days(part)
    raise DtypeError(f"key {row} must be a number, not {quote_cell(part)}: leave that row out")


def _to_days(moment: datetime.date | datetime.time) -> float:
    """Return the days since the year 1, in UTC if there is a time zone.

    A time is a fraction of a day.
    """
    if isinstance(moment, datetime.datetime):
        offset = moment.utcoffset() or datetime.timedelta()
        since = moment.replace(tzinfo=None) - datetime.datetime(1, 1, 1) - offset
        return since / datetime.timedelta(days=1)
    if isinstance(moment, datetime.date):
        return float(moment.toordinal() - 1)
    return (
        moment.hour * 3600 + moment.minute * 60 + moment.second + moment.microsecond / 1e6
    ) / 86400
