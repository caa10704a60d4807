"""What an encoder is: keys of one type as vectors, and how such vectors are compared."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np

from qkv.database.table import cells
from qkv.errors import ArgumentError, CombinationError, DtypeError
from qkv.frameworks.ragged import DenseAndSparse, EncodedQuery, Ragged, entry_positions
from qkv.scores import ScaledDot, Score
from qkv.scores.base import DotProductForm
from qkv.util.types import Array

EncoderSettings = Mapping[str, Any]
EncoderArrays = Mapping[str, np.ndarray]
"""What a store has of an encoder: its settings as JSON, and what it has learned as arrays."""


class Encoder(ABC):
    """k ↦ vector: keys (m of them) → (m, width) float32, queries (n) → (n, width).

    Subclasses are frozen dataclasses. `fit` returns a copy that knows the keys; `settings` (JSON)
    and `arrays` together are enough for `build` to make the same encoder in another process. By
    default they are its fields.
    """

    kind: ClassVar[str]
    """Its name in settings, in `ENCODERS` and in `resolve`."""

    uses_cosine: ClassVar[bool] = False
    """Whether, as one of several heads, it goes by the direction of its vectors alone."""

    int8_safe: bool = False
    """Whether its vectors, kept in 8 bits, lose no answer by it: those that are made of text here,
    as directions."""

    is_identity: ClassVar[bool] = False
    """Whether the keys are vectors, and these are they."""

    reads_only_text: ClassVar[bool] = False
    """Whether a query that is no text means nothing to it."""

    accepts_any_query: ClassVar[bool] = False
    """Whether only it knows what it may be asked: a query need not be text where the keys are."""

    encodes_in_parallel: bool = False
    """Whether several threads may encode with it at once, and gain by that."""

    @property
    def min_fit_keys(self) -> int:
        """Keys from which `fit` learns anything; with fewer it waits for so many."""
        return 0

    def fit(self, keys: Sequence[Any]) -> Encoder:
        """A copy that has learned what it needs from the keys (most need nothing)."""
        return self

    @abstractmethod
    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        """(m, width) float32."""

    def encode_query(self, queries: Sequence[Any]) -> np.ndarray:
        """(n, width) float32."""
        return self.encode(queries)

    def encode_sparse(self, keys: Sequence[Any], query: bool = False) -> Ragged | None:
        """Vectors (m of them) in 2³² dimensions with few numbers each, which lie beside those of
        `encode` or `encode_query`: see `qkv.frameworks.ragged`. None where there are none."""
        return None

    def encode_pair(
        self, queries: Sequence[Any], keys: Sequence[Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Whole vectors of queries (n, w) and keys (m, w), to be compared with each other."""
        query, key, beside = (
            self.encode_full_query(queries),
            self.encode(keys),
            self.encode_sparse(keys),
        )
        if query.sparse_positions is None or beside is None:
            return query.code, key
        return query.code, np.asarray(DenseAndSparse(key, beside, query.sparse_positions))

    def encode_full_query(self, queries: Sequence[Any]) -> EncodedQuery:
        """Whole vectors of queries, and which places of sparse ones they ask."""
        query, beside = self.encode_query(queries), self.encode_sparse(queries, query=True)
        if beside is None:
            return EncodedQuery(query)
        # Without the counts NumPy would load its masked arrays, which takes longer than an ask.
        at, _ = np.unique(entry_positions(beside), return_counts=True)
        return EncodedQuery(np.asarray(DenseAndSparse(query, beside, at)), at)

    @property
    @abstractmethod
    def width(self) -> int:
        """Numbers in each vector."""

    def score_hint(self, query: Any, key: Any, flat: bool) -> str:
        """What to ask by instead, where its own score may not have done what was meant: it gave the
        most weight to this key, or all rows alike."""
        return ""

    def default_score(self, rows: int) -> Score:
        """How its vectors are compared unless the caller says otherwise, in so many rows."""
        return ScaledDot(sharpness_for_rows(rows))

    def encode_head(self, keys: Sequence[Any], query: bool = False) -> np.ndarray:
        """Vectors (m, head_width) whose plain dot product is this encoder's similarity.

        That is the cosine where `uses_cosine` says so, else its score, without the scale of a
        product: what many heads share takes its place. It is 0 for the query None, which asks
        nothing.
        """
        asked = [i for i, key in enumerate(keys) if key is not None] if query else range(len(keys))
        if len(asked) == len(keys) > 0:
            return self._encode_head(keys, query)
        out = np.zeros((len(keys), self.head_width), np.float32)
        if len(asked):
            out[np.asarray(asked)] = self._encode_head([keys[i] for i in asked], query)
        return out

    def encode_head_sparse(self, keys: Sequence[Any], query: bool = False) -> Ragged | None:
        """The sparse vectors beside those of `encode_head`."""
        given = np.array([key is not None for key in keys], bool)
        some = keys if given.all() else [key for key in keys if key is not None]
        found = self.encode_sparse(some, query)
        if found is None:
            return None
        ends = np.concatenate([[0], np.cumsum(given)])  # who asks nothing has an empty row
        return Ragged(found.flat, found.starts[ends])

    def _encode_head(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        x = self.encode_query(keys) if query else self.encode(keys)
        if self.uses_cosine:
            return normalize_rows(x)
        form = self._product_form(x, 1)
        form = form if _has_shift(form) else form._replace(scale=1.0)
        return np.asarray(form.augmented_vectors()[0 if query else 1], np.float32)

    @property
    def head_width(self) -> int:
        if self.uses_cosine:
            return self.width
        return int(
            self._product_form(np.zeros((1, self.width)), 1).augmented_vectors()[1].shape[-1]
        )

    def head_scale(self, rows: int) -> float:
        """What a head's product is stretched by where it is the only one, in so many rows."""
        form = self._product_form(np.zeros((1, self.width)), rows)
        return 1.0 if _has_shift(form) else form.scale

    def _product_form(self, x: np.ndarray, rows: int) -> DotProductForm:
        """The score as a product of something of a query and something of a key."""
        score, x = self.default_score(rows), np.asarray(x, np.float64)
        # Where a form is fitted to the vectors at hand, those of another call would not fit it;
        # for 16 bits none is that need not be.
        found = score.find_lowering(x, x, None, "float16")
        if isinstance(found, str) or found[0].needs_range:
            raise self._no_product_error(score)
        form = found[0].dot_product_form(x, x)
        if form.gate_query is not None:
            raise self._no_product_error(score)
        return form

    def _no_product_error(self, score: Score) -> CombinationError:
        return CombinationError(
            f"{type(self).__name__} cannot be one of several heads: its score "
            f"{type(score).__name__} is no dot product of a query's and a key's vector. Use it "
            "alone, or let its score be one, such as ScaledDot, Cosine or Gaussian"
        )

    def standardize_query(self, query: Array) -> Array | None:
        """Keys of numbers, (n, columns), of any framework as vectors (n, width), with gradients;
        None where arithmetic alone does not make them. They have 32 or 64 bits."""
        return None

    def can_read_query(self, query: Any) -> bool:
        """Whether a query of this type means something to it."""
        return not self.reads_only_text or isinstance(query, str)

    def settings(self) -> dict[str, Any]:
        """What JSON can keep of it, "kind" among it: the fields that make it equal to another."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}  # type: ignore[arg-type]
        told = {name: list(x) if isinstance(x, tuple) else x for name, x in own.items()}
        return {"kind": self.kind} | told

    def arrays(self) -> dict[str, np.ndarray]:
        """What it has learned: the fields that are arrays."""
        return {name: x for name, x in vars(self).items() if isinstance(x, np.ndarray)}

    @classmethod
    def build(cls, settings: EncoderSettings, arrays: EncoderArrays) -> Encoder:
        """The encoder of these settings and arrays."""
        return cls(**{name: x for name, x in settings.items() if name != "kind"}, **arrays)

    @classmethod
    def restore(
        cls, settings: EncoderSettings, arrays: EncoderArrays, given: Encoder | None
    ) -> Encoder:
        """The encoder of what a store tells, which may be a stranger's.

        Functions, folders and files that it names are taken from the encoder that the caller has
        `given`, where that is of this kind.
        """
        return cls.build(settings, arrays)


def _has_shift(form: DotProductForm) -> bool:
    """Whether more than a product is in it, as the squares of a Gaussian are."""
    return form.bias is not None or form.offset is not None


SHARPNESS_COEFFICIENTS = (8.0, 1.6)
"""a and b, chosen so that among 6 names, 300 titles and 100,000 words alike one slip of the hand
leaves most of the weight on the right key, and a vague query leaves it spread."""


def sharpness_for_rows(rows: int) -> float:
    """τ(m) = a + b ln m: the factor between a cosine and a score.

    Among m rows a key must outweigh m − 1 others, so its lead over them, a cosine, must be
    stretched in proportion to ln m for its weight to stay the same.

    >>> sharpness_for_rows(300) > sharpness_for_rows(6)
    True
    """
    base, slope = SHARPNESS_COEFFICIENTS
    return base + slope * math.log(max(rows, 1))


def normalize_rows(vectors: np.ndarray) -> np.ndarray:
    """x / ‖x‖ for each row, and 0 for 0.

    >>> normalize_rows(np.array([[0.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.0, 1.0], [0.0, 0.0]]
    """
    vectors = np.array(vectors, np.float32)
    length = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    length[length == 0] = 1.0
    vectors /= length[:, None].astype(np.float32)
    return vectors


def select_by_prefix(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays whose names begin so, by the rest of their names."""
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}


def check_batch(keys: Sequence[Any]) -> Sequence[Any]:
    """The keys, refused if they are one text: a sequence of letters is never what was meant."""
    if isinstance(keys, str | bytes):
        raise DtypeError(f"encode takes a list of keys, not one {type(keys).__name__}: wrap it")
    return keys


def to_texts(keys: Sequence[Any]) -> list[str]:
    """Each key as text: text as it is, anything else as compact JSON.

    >>> to_texts(["Li", {"b": 1, "a": [2]}, 3])
    ['Li', '{"a":[2],"b":1}', '3']
    """
    keys = list(check_batch(keys))
    if set(map(type, keys)) <= {str}:
        return keys
    for row, key in enumerate(keys):
        if key is None:
            raise ArgumentError(f"key {row} must not be None: leave that row out")
    return [key if isinstance(key, str) else to_compact_json(key) for key in keys]


def to_compact_json(key: Any) -> str:
    """A key that is no text as JSON text, names in order."""
    return json.dumps(
        cells.to_json_value(key), ensure_ascii=False, sort_keys=True, separators=(",", ":")
    )
