"""What an encoder is: keys of one type as vectors, and how such vectors are compared."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np

from qkv.arrays.ragged import Query, Ragged, Wide, places
from qkv.database import cells
from qkv.errors import ArgumentError, CombinationError, DtypeError
from qkv.scores import ScaledDot, Score
from qkv.scores.base import Form
from qkv.types import Array

Told = Mapping[str, Any]
Held = Mapping[str, np.ndarray]
"""What a store has of an encoder: its settings as JSON, and what it has learned as arrays."""


class Encoder(ABC):
    """k ↦ vector: keys (m of them) → (m, width) float32, queries (n) → (n, width).

    Subclasses are frozen dataclasses. `fit` returns a copy that knows the keys; `settings` (JSON)
    and `arrays` together are enough for `build` to make the same encoder in another process. By
    default they are its fields.
    """

    kind: ClassVar[str]
    """Its name in settings, in `ENCODERS` and in `resolve`."""

    cosine: ClassVar[bool] = False
    """Whether, as one of several heads, it goes by the direction of its vectors alone."""

    rounds: bool = False
    """Whether its vectors, kept in 8 bits, lose no answer by it: those that are made of text here,
    as directions."""

    itself: ClassVar[bool] = False
    """Whether the keys are vectors, and these are they."""

    only_text: ClassVar[bool] = False
    """Whether a query that is no text means nothing to it."""

    any_query: ClassVar[bool] = False
    """Whether only it knows what it may be asked: a query need not be text where the keys are."""

    parallel: bool = False
    """Whether several threads may encode with it at once, and gain by that."""

    @property
    def begins(self) -> int:
        """Keys from which `fit` learns anything; with fewer it waits for so many."""
        return 0

    def fit(self, keys: Sequence[Any]) -> Encoder:
        """A copy that has learned what it needs from the keys (most need nothing)."""
        return self

    @abstractmethod
    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        """(m, width) float32."""

    def query(self, queries: Sequence[Any]) -> np.ndarray:
        """(n, width) float32."""
        return self.encode(queries)

    def sparse(self, keys: Sequence[Any], query: bool = False) -> Ragged | None:
        """Vectors (m of them) in 2³² dimensions with few numbers each, which lie beside those of
        `encode` or `query`: see `qkv.arrays.ragged`. None where there are none."""
        return None

    def pair(self, queries: Sequence[Any], keys: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Whole vectors of queries (n, w) and keys (m, w), to be compared with each other."""
        query, key, beside = self.asked(queries), self.encode(keys), self.sparse(keys)
        if query.asked is None or beside is None:
            return query.code, key
        return query.code, np.asarray(Wide(key, beside, query.asked))

    def asked(self, queries: Sequence[Any]) -> Query:
        """Whole vectors of queries, and which places of sparse ones they ask."""
        query, beside = self.query(queries), self.sparse(queries, query=True)
        if beside is None:
            return Query(query)
        # Without the counts NumPy would load its masked arrays, which takes longer than an ask.
        at, _ = np.unique(places(beside), return_counts=True)
        return Query(np.asarray(Wide(query, beside, at)), at)

    @property
    @abstractmethod
    def width(self) -> int:
        """Numbers in each vector."""

    def hint(self, query: Any, key: Any, flat: bool) -> str:
        """What to ask by instead, where its own score may not have done what was meant: it gave the
        most weight to this key, or all rows alike."""
        return ""

    def score(self, rows: int) -> Score:
        """How its vectors are compared unless the caller says otherwise, in so many rows."""
        return ScaledDot(sharpness(rows))

    def head(self, keys: Sequence[Any], query: bool = False) -> np.ndarray:
        """Vectors (m, head_width) whose plain dot product is this encoder's similarity.

        That is the cosine where `cosine` says so, else its score, without the scale of a product:
        what many heads share takes its place. It is 0 for the query None, which asks nothing.
        """
        asked = [i for i, key in enumerate(keys) if key is not None] if query else range(len(keys))
        if len(asked) == len(keys) > 0:
            return self._head(keys, query)
        out = np.zeros((len(keys), self.head_width), np.float32)
        if len(asked):
            out[np.asarray(asked)] = self._head([keys[i] for i in asked], query)
        return out

    def head_sparse(self, keys: Sequence[Any], query: bool = False) -> Ragged | None:
        """The sparse vectors beside those of `head`."""
        given = np.array([key is not None for key in keys], bool)
        some = keys if given.all() else [key for key in keys if key is not None]
        found = self.sparse(some, query)
        if found is None:
            return None
        ends = np.concatenate([[0], np.cumsum(given)])  # who asks nothing has an empty row
        return Ragged(found.flat, found.starts[ends])

    def _head(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        x = self.query(keys) if query else self.encode(keys)
        if self.cosine:
            return unit(x)
        form = self._form(x, 1)
        form = form if _shifted(form) else form._replace(scale=1.0)
        return np.asarray(form.products()[0 if query else 1], np.float32)

    @property
    def head_width(self) -> int:
        if self.cosine:
            return self.width
        return int(self._form(np.zeros((1, self.width)), 1).products()[1].shape[-1])

    def head_scale(self, rows: int) -> float:
        """What a head's product is stretched by where it is the only one, in so many rows."""
        form = self._form(np.zeros((1, self.width)), rows)
        return 1.0 if _shifted(form) else form.scale

    def _form(self, x: np.ndarray, rows: int) -> Form:
        """The score as a product of something of a query and something of a key."""
        score, x = self.score(rows), np.asarray(x, np.float64)
        # Where a form is fitted to the vectors at hand, those of another call would not fit it;
        # for 16 bits none is that need not be.
        found = score.lowered(x, x, None, "float16")
        if isinstance(found, str) or found[0].ranged:
            raise self._no_product(score)
        form = found[0].form(x, x)
        if form.gate_query is not None:
            raise self._no_product(score)
        return form

    def _no_product(self, score: Score) -> CombinationError:
        return CombinationError(
            f"{type(self).__name__} cannot be one of several heads: its score "
            f"{type(score).__name__} is no dot product of a query's and a key's vector. Use it "
            "alone, or let its score be one, such as ScaledDot, Cosine or Gaussian"
        )

    def moved(self, query: Array) -> Array | None:
        """Keys of numbers, (n, columns), of any framework as vectors (n, width), with gradients;
        None where arithmetic alone does not make them. They have 32 or 64 bits."""
        return None

    def reads(self, query: Any) -> bool:
        """Whether a query of this type means something to it."""
        return not self.only_text or isinstance(query, str)

    def settings(self) -> dict[str, Any]:
        """What JSON can keep of it, "kind" among it: the fields that make it equal to another."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}  # type: ignore[arg-type]
        told = {name: list(x) if isinstance(x, tuple) else x for name, x in own.items()}
        return {"kind": self.kind} | told

    def arrays(self) -> dict[str, np.ndarray]:
        """What it has learned: the fields that are arrays."""
        return {name: x for name, x in vars(self).items() if isinstance(x, np.ndarray)}

    @classmethod
    def build(cls, settings: Told, arrays: Held) -> Encoder:
        """The encoder of these settings and arrays."""
        return cls(**{name: x for name, x in settings.items() if name != "kind"}, **arrays)

    @classmethod
    def restore(cls, settings: Told, arrays: Held, given: Encoder | None) -> Encoder:
        """The encoder of what a store tells, which may be a stranger's.

        Functions, folders and files that it names are taken from the encoder that the caller has
        `given`, where that is of this kind.
        """
        return cls.build(settings, arrays)


def _shifted(form: Form) -> bool:
    """Whether more than a product is in it, as the squares of a Gaussian are."""
    return form.bias is not None or form.offset is not None


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


def under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays whose names begin so, by the rest of their names."""
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}


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
