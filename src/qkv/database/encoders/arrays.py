"""The encoder for keys that are vectors already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders.base import Encoder, EncoderArrays, EncoderSettings, check_batch
from qkv.errors import ArgumentError, DtypeError, ShapeError, format_plural
from qkv.frameworks import is_array, to_numpy
from qkv.scores import ScaledDot, Score
from qkv.util.keyword_hints import suggest_keywords

KEYS_PER_BLOCK = 512
"""The number of keys that are checked at a time, so that they fit the processor's cache."""

MAX_ROUNDING_RATIO = 1 + 1e-5
"""A ratio above this is not due to rounding."""
LONG_KEY_HINT = (
    "the dot product favours long vectors, so a key equal to the query would not rank first: use "
    "score='cosine' to compare directions, or score='gaussian' to compare distances"
)
SIMILAR_KEYS_HINT = (
    "q·k/√d gives these keys nearly equal weights: use score=scores.Cosine(0.05), which compares "
    "directions more sharply"
)


@suggest_keywords
@dataclass(frozen=True)
class Arrays(Encoder):
    """x = the key, which is a vector already. Vectors are compared by qᵀk/√d.

    Keys are vectors of one length, or the rows of an array (m, width) of any framework.

    >>> Arrays().fit([[1.0, 2.0]]).encode(np.array([[3, 4], [5, 6]])).tolist()
    [[3.0, 4.0], [5.0, 6.0]]
    """

    size: int | None = None
    kind: ClassVar[str] = "arrays"
    uses_cosine: ClassVar[bool] = True
    is_identity: ClassVar[bool] = True

    @property
    def width(self) -> int:
        if self.size is None:
            raise ArgumentError("Arrays has no width before it is fitted: call fit(keys)")
        return self.size

    def fit(self, keys: Sequence[Any]) -> Arrays:
        return replace(self, size=int(to_float32_matrix(keys[:1]).shape[1]))

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        out = to_float32_matrix(keys) if len(keys) else np.empty((0, self.width), np.float32)
        if out.shape[1] != self.width:
            came = format_plural(out.shape[1], "number")
            raise ShapeError(f"key 0 has {came}, but the keys are vectors of {self.width} numbers")
        return out

    def default_score(self, rows: int) -> Score:
        return ScaledDot()

    def score_hint(self, query: Any, key: Any, flat: bool) -> str:
        # If q·k > ‖q‖², this key ranks above a key equal to the query.
        if np.dot(query, key) > np.dot(query, query) * MAX_ROUNDING_RATIO:
            return LONG_KEY_HINT
        return SIMILAR_KEYS_HINT if flat else ""

    def can_read_query(self, query: Any) -> bool:
        return not isinstance(query, str | bytes) and hasattr(query, "__len__")

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "width": self.size}

    @classmethod
    def build(cls, settings: EncoderSettings, arrays: EncoderArrays) -> Arrays:
        return cls(settings["width"])


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
