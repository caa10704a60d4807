"""The encoder for keys that are vectors already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders import neighbours
from qkv.database.encoders.base import (
    Encoder,
    EncoderArrays,
    EncoderSettings,
    check_batch,
    sharpness_for_rows,
)
from qkv.errors import ArgumentError, DtypeError, QkvError, ShapeError, format_plural
from qkv.frameworks import is_array, to_numpy
from qkv.scores import Cosine, Gaussian, Score
from qkv.util.keyword_hints import suggest_keywords

KEYS_PER_BLOCK = 512
"""The number of keys that are checked at a time, so that they fit the processor's cache."""

ESTIMATED_SETTINGS = ("metric", "temperature", "bandwidth")
"""The settings that do not change the vectors, but only how they are compared."""

DIRECTION_HINT = (
    "the query has about the same angle to all keys: use score='gaussian' to compare distances"
)
ZERO_HINT = "the query is a zero vector, which has no angle to any key"
DISTANCE_HINT = (
    "the query has about the same distance to all keys: use score='cosine' to compare directions"
)


@suggest_keywords
@dataclass(frozen=True)
class Arrays(Encoder):
    """x = the key, which is a vector already.

    Keys are vectors of one length, or the rows of an array (m, width) of any framework. `fit`
    chooses how they are compared:

    - `metric` "cosine": by direction, with a `temperature`. For embeddings and sparse vectors.
    - `metric` "gaussian": by distance, with a `bandwidth`, or one for each column if the columns
      have different spreads. For measurements.

    A sample of the keys gives temperature and bandwidth: a key gets at least 3/4 of the weight,
    except for 2.5 % of the keys.

    >>> encoder = Arrays().fit(np.eye(2))
    >>> encoder.metric, encoder.encode(np.array([[3, 4], [5, 6]])).tolist()
    ('cosine', [[3.0, 4.0], [5.0, 6.0]])
    >>> Arrays().fit([[1.0, 200.0], [2.0, 900.0], [4.0, 500.0]]).metric
    'gaussian'
    """

    size: int | None = None
    metric: str | None = None
    temperature: float | None = None
    bandwidth: float | tuple[float, ...] | None = None
    kind: ClassVar[str] = "arrays"
    uses_cosine: ClassVar[bool] = True
    is_identity: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.metric not in (None, "cosine", "gaussian"):
            raise ArgumentError(f"Arrays: metric must be 'cosine' or 'gaussian', not {self.metric}")

    @property
    def width(self) -> int:
        if self.size is None:
            raise ArgumentError("Arrays has no width before it is fitted: call fit(keys)")
        return self.size

    def fit(self, keys: Sequence[Any]) -> Arrays:
        fitted = replace(self, size=int(to_float32_matrix(keys[:1]).shape[1]))
        at = neighbours.sample_positions(len(keys), neighbours.MAX_SAMPLED_KEYS)
        sample = to_numpy(keys)[at] if is_array(keys) else [keys[i] for i in at.tolist()]
        try:
            rows = to_float32_matrix(sample)
        except QkvError:  # `encode` raises the error that names the row
            return fitted
        return fitted.fit_metric(rows, len(keys))

    def fit_metric(self, rows: np.ndarray, count: int) -> Arrays:
        """Return the encoder with the metric for `count` keys, of which `rows` is a sample."""
        rows = rows.astype(float)
        if neighbours.compares_direction(rows):
            temperature = neighbours.fit_direction(rows, count)
            if temperature is not None:
                return replace(self, metric="cosine", temperature=temperature, bandwidth=None)
        widths = neighbours.fit_distance(rows, count)
        if widths is None:
            return replace(self, metric=None, temperature=None, bandwidth=None)
        bandwidth = float(widths[0]) if len(widths) == 1 else tuple(widths.tolist())
        return replace(self, metric="gaussian", temperature=None, bandwidth=bandwidth)

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        out = to_float32_matrix(keys) if len(keys) else np.empty((0, self.width), np.float32)
        if out.shape[1] != self.width:
            came = format_plural(out.shape[1], "number")
            raise ShapeError(f"key 0 has {came}, but the keys are vectors of {self.width} numbers")
        return out

    def default_score(self, rows: int) -> Score:
        if self.bandwidth is not None:
            is_common = isinstance(self.bandwidth, float)
            return Gaussian(self.bandwidth if is_common else np.array(self.bandwidth, np.float32))
        return Cosine(self.temperature or 1 / sharpness_for_rows(rows))

    def head_scale(self, rows: int) -> float:
        return 1 / self.temperature if self.temperature else sharpness_for_rows(rows)

    def score_hint(self, query: Any, key: Any, flat: bool) -> str:
        if not flat:
            return ""
        if self.metric == "gaussian":
            return DISTANCE_HINT
        return DIRECTION_HINT if np.any(to_numpy(query)) else ZERO_HINT

    def can_read_query(self, query: Any) -> bool:
        return not isinstance(query, str | bytes) and hasattr(query, "__len__")

    def settings(self) -> dict[str, Any]:
        fitted = {name: getattr(self, name) for name in ESTIMATED_SETTINGS}
        listed = {name: list(x) if isinstance(x, tuple) else x for name, x in fitted.items()}
        return {"kind": self.kind, "width": self.size} | {
            name: x for name, x in listed.items() if x is not None
        }

    @classmethod
    def build(cls, settings: EncoderSettings, arrays: EncoderArrays) -> Arrays:
        numbers = {name: settings.get(name) for name in ESTIMATED_SETTINGS}
        if isinstance(numbers["bandwidth"], list):
            numbers["bandwidth"] = tuple(map(float, numbers["bandwidth"]))
        return cls(settings["width"], **numbers)


def to_float32_matrix(keys: Sequence[Any]) -> np.ndarray:
    """Return vectors as an array (m, width) of float32; an error names the first wrong row."""
    check_batch(keys)
    if is_array(keys):
        array = to_numpy(keys)
        if array.ndim != 2:
            raise ShapeError(f"an array of keys must be (rows, width), not {array.shape}")
        rows = array
    else:
        first = None
        vectors = []
        for i, key in enumerate(keys):
            vector = to_numpy(key) if is_array(key) else np.asarray(key)
            if vector.dtype.kind not in "iufb" or vector.ndim != 1:
                raise DtypeError(f"key {i} must be a vector of numbers, not {_shorten_repr(key)}")
            first = len(vector) if first is None else first
            if len(vector) != first:
                came = format_plural(len(vector), "number")
                raise ShapeError(f"key {i} has {came} where key 0 has {first}")
            vectors.append(vector)
        rows = np.stack(vectors)
    if rows.dtype.kind not in "iufb":
        raise DtypeError(f"vectors must hold real numbers, not {rows.dtype}")
    if rows.dtype == np.float32:
        out = np.ascontiguousarray(rows)
    else:
        with np.errstate(over="ignore"):
            out = np.ascontiguousarray(rows, np.float32)
    for start in range(0, len(out), KEYS_PER_BLOCK):
        fine = np.isfinite(out[start : start + KEYS_PER_BLOCK])
        if not fine.all():
            bad = start + int(fine.all(axis=1).argmin())
            raise ArgumentError(
                f"key {bad} contains NaN or a number too large for float32: leave that row out"
            )
    return out


def _shorten_repr(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= 40 else f"{text[:40]}…"
