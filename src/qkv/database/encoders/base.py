"""What an encoder is: keys of one type as vectors, and how such vectors are compared."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from qkv.database import cells
from qkv.errors import ArgumentError, DtypeError
from qkv.scores import ScaledDot, Score


class Encoder(ABC):
    """k ↦ vector: keys (m of them) → (m, width) float32, queries (n) → (n, width).

    Subclasses are frozen dataclasses. `fit` returns a copy that knows the keys; `settings` (JSON)
    and `arrays` together are enough for `build` to make the same encoder in another process.
    """

    kind: ClassVar[str]
    """Its name in settings, in `ENCODERS` and in `resolve`."""

    def fit(self, keys: Sequence[Any]) -> Encoder:
        """A copy that has learned what it needs from the keys (most need nothing)."""
        return self

    @abstractmethod
    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        """(m, width) float32."""

    def query(self, queries: Sequence[Any]) -> np.ndarray:
        """(n, width) float32."""
        return self.encode(queries)

    @property
    @abstractmethod
    def width(self) -> int:
        """Numbers in each vector."""

    def score(self, rows: int) -> Score:
        """How its vectors are compared unless the caller says otherwise, in so many rows."""
        return ScaledDot(sharpness(rows))

    def head(self, keys: Sequence[Any], query: bool = False) -> np.ndarray:
        """Vectors (m, head_width) whose plain dot product is this encoder's similarity: a cosine.

        It is 0 for the query None, which asks nothing of this head.
        """
        asked = [i for i, key in enumerate(keys) if key is not None] if query else range(len(keys))
        out = np.zeros((len(keys), self.head_width), np.float32)
        if len(asked):
            some = keys if len(asked) == len(keys) else [keys[i] for i in asked]
            out[np.asarray(asked)] = self._head(some, query)
        return out

    def _head(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        return unit(self.query(keys) if query else self.encode(keys))

    @property
    def head_width(self) -> int:
        return self.width

    def reads(self, query: Any) -> bool:
        """Whether a query of this type means something to it."""
        return True

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What JSON can keep of it; "kind" among it."""

    def arrays(self) -> dict[str, np.ndarray]:
        """What it has learned, as arrays."""
        return {}

    @classmethod
    @abstractmethod
    def build(cls, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Encoder:
        """The encoder of these settings and arrays."""


SHARPNESS = (8.0, 1.6)
"""a and b, chosen so that among 6 names, 300 titles and 100,000 words alike one slip of the hand
leaves most of the weight on the right key, and a vague query leaves it spread."""


def sharpness(rows: int) -> float:
    """τ(m) = a + b ln m: the factor between a cosine and a score.

    Among m rows a key must outweigh m − 1 others, so its lead over them, a cosine, must be
    stretched in proportion to ln m for its weight to stay the same.

    >>> sharpness(300) > sharpness(6)
    True
    """
    base, slope = SHARPNESS
    return base + slope * math.log(max(rows, 1))


def unit(vectors: np.ndarray) -> np.ndarray:
    """x / ‖x‖ for each row, and 0 for 0.

    >>> unit(np.array([[0.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.0, 1.0], [0.0, 0.0]]
    """
    vectors = np.array(vectors, np.float32)
    length = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    length[length == 0] = 1.0
    vectors /= length[:, None].astype(np.float32)
    return vectors


def batch(keys: Sequence[Any]) -> Sequence[Any]:
    """The keys, refused if they are one text: a sequence of letters is never what was meant."""
    if isinstance(keys, str | bytes):
        raise DtypeError(f"encode takes a list of keys, not one {type(keys).__name__}: wrap it")
    return keys


def texts(keys: Sequence[Any]) -> list[str]:
    """Each key as text: text as it is, anything else as compact JSON.

    >>> texts(["Li", {"b": 1, "a": [2]}, 3])
    ['Li', '{"a":[2],"b":1}', '3']
    """
    keys = list(batch(keys))
    if set(map(type, keys)) <= {str}:
        return keys
    for row, key in enumerate(keys):
        if key is None:
            raise ArgumentError(f"key {row} must not be None: leave that row out")
    return [key if isinstance(key, str) else compact(key) for key in keys]


def compact(key: Any) -> str:
    """A key that is no text as JSON text, names in order."""
    return json.dumps(cells.plain(key), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
