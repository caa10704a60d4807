"""The base class of encoders, and helper functions for its subclasses."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
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
"""The learned arrays of an encoder by name. They are stored together with its settings (JSON)."""


class Encoder(ABC):
    """Turns m keys into vectors (m, width) float32, and n queries into vectors (n, width).

    Subclasses are frozen dataclasses. `fit` returns a copy that has learned from the keys. `build`
    makes the same encoder in another process from `settings` (JSON) and `arrays`. By default, both
    consist of the dataclass's fields.
    """

    kind: ClassVar[str]
    """The name of the encoder in settings, in `ENCODERS` and in `resolve`."""

    uses_cosine: ClassVar[bool] = False
    """Whether the encoder, as one of several heads, compares only the directions of its vectors."""

    int8_safe: bool = False
    """Whether vectors of 8 bits give the same answers.

    This is so for the directions of text vectors.
    """

    is_identity: ClassVar[bool] = False
    """Whether the keys are vectors already, which the encoder does not change."""

    reads_only_text: ClassVar[bool] = False
    """Whether a query must be text."""

    accepts_any_query: ClassVar[bool] = False
    """Whether queries may have another type than the keys."""

    encodes_in_parallel: bool = False
    """Whether several threads may encode at the same time, and are faster than one."""

    @property
    def min_fit_keys(self) -> int:
        """The number of keys that `fit` needs in order to learn anything."""
        return 0

    def fit(self, keys: Sequence[Any]) -> Encoder:
        """Return a copy that has learned from the keys. Most encoders learn nothing."""
        return self

    @abstractmethod
    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        """Return the vectors of keys, (m, width) float32."""

    def encode_query(self, queries: Sequence[Any]) -> np.ndarray:
        """Return the vectors of queries, (n, width) float32."""
        return self.encode(queries)

    def encode_sparse(self, keys: Sequence[Any], query: bool = False) -> Ragged | None:
        """Return sparse vectors in 2³² dimensions, which are added to the dense vectors.

        Return None if the encoder has none. See `qkv.frameworks.ragged` for the format.
        """
        return None

    def encode_pair(
        self, queries: Sequence[Any], keys: Sequence[Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return vectors of queries (n, w) and keys (m, w) that contain the sparse parts too."""
        query, key = self.encode_full_query(queries), self.encode(keys)
        sparse = self.encode_sparse(keys)
        if query.sparse_positions is None or sparse is None:
            return query.code, key
        return query.code, np.asarray(DenseAndSparse(key, sparse, query.sparse_positions))

    def encode_full_query(self, queries: Sequence[Any]) -> EncodedQuery:
        """Return the vectors of queries with their sparse parts, and the positions of those."""
        query, sparse = self.encode_query(queries), self.encode_sparse(queries, query=True)
        if sparse is None:
            return EncodedQuery(query)
        # Without `return_counts`, NumPy would import its masked arrays, which takes longer than a
        # query.
        positions, _ = np.unique(entry_positions(sparse), return_counts=True)
        return self.add_group_columns(
            np.asarray(DenseAndSparse(query, sparse, positions)), positions, queries
        )

    def add_group_columns(
        self, code: np.ndarray, positions: np.ndarray, queries: Sequence[Any]
    ) -> EncodedQuery:
        """Return the vectors of queries (n, d + w + 1), with columns for groups of words.

        An encoder may give more score to rows that have all words of a group; see `WordGroups`.
        """
        return EncodedQuery(code, positions)

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of elements of a dense vector."""

    def score_hint(self, query: Any, key: Any, flat: bool) -> str:
        """Return advice if the default score may surprise the user, else "".

        `key` is the key with the largest weight. `flat` says that all rows have about the same
        weight.
        """
        return ""

    def default_score(self, rows: int) -> Score:
        """Return the score that compares vectors by default, for this number of rows."""
        return ScaledDot(sharpness_for_rows(rows))

    def encode_head(self, keys: Sequence[Any], query: bool = False) -> np.ndarray:
        """Return vectors (m, head_width) whose dot product is the similarity of this head.

        With `uses_cosine`, the similarity is the cosine. Otherwise it is the score without its
        scale, because all heads share one scale. For a query of None, the vector is 0.
        """
        present = (
            [i for i, key in enumerate(keys) if key is not None] if query else range(len(keys))
        )
        if len(present) == len(keys) > 0:
            return self._encode_head(keys, query)
        out = np.zeros((len(keys), self.head_width), np.float32)
        if len(present):
            out[np.asarray(present)] = self._encode_head([keys[i] for i in present], query)
        return out

    def encode_head_sparse(self, keys: Sequence[Any], query: bool = False) -> Ragged | None:
        """Return the sparse vectors to add to those of `encode_head`; empty ones for None."""
        is_present = np.array([key is not None for key in keys], bool)
        present = keys if is_present.all() else [key for key in keys if key is not None]
        vectors = self.encode_sparse(present, query)
        if vectors is None:
            return None
        ends = np.concatenate([[0], np.cumsum(is_present)])
        return Ragged(vectors.flat, vectors.starts[ends])

    def _encode_head(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        """Return the vectors of `encode_head` for keys that are not None."""
        x = self.encode_query(keys) if query else self.encode(keys)
        if self.uses_cosine:
            return normalize_rows(x)
        form = self._product_form(x, 1)
        form = form if _has_shift(form) else form._replace(scale=1.0)
        return np.asarray(form.augmented_vectors()[0 if query else 1], np.float32)

    @property
    def head_width(self) -> int:
        """The number of elements of a vector of `encode_head`."""
        if self.uses_cosine:
            return self.width
        return int(
            self._product_form(np.zeros((1, self.width)), 1).augmented_vectors()[1].shape[-1]
        )

    def head_scale(self, rows: int) -> float:
        """Return the scale of the dot product for this many rows, if this is the only head."""
        form = self._product_form(np.zeros((1, self.width)), rows)
        return 1.0 if _has_shift(form) else form.scale

    def _product_form(self, x: np.ndarray, rows: int) -> DotProductForm:
        """Return the score as a dot product of functions of query and key.

        Raise if there is no such form.
        """
        score, x = self.default_score(rows), np.asarray(x, np.float64)
        # A form that depends on the range of these vectors would be wrong for other vectors. For
        # float16, a form has such a range only if the score always needs one.
        lowering = score.find_lowering(x, x, None, "float16")
        if isinstance(lowering, str) or lowering[0].needs_range:
            raise self._no_product_error(score)
        form = lowering[0].dot_product_form(x, x)
        if form.gate_query is not None:
            raise self._no_product_error(score)
        return form

    def _no_product_error(self, score: Score) -> CombinationError:
        """Return the error for an encoder whose score is not a dot product."""
        return CombinationError(
            f"{type(self).__name__} cannot be one of several heads: its score "
            f"{type(score).__name__} is not a dot product of a query vector and a key vector. Use "
            "the encoder without other heads, or give it a default_score such as ScaledDot, Cosine "
            "or Gaussian"
        )

    def standardize_query(self, query: Array) -> Array | None:
        """Encode queries of numbers, (n, columns), as vectors (n, width), with gradients.

        The queries may belong to any framework. The result is float32 or float64. Return None if
        the encoder is not differentiable.
        """
        return None

    def can_read_query(self, query: Any) -> bool:
        """Return whether the encoder can encode this query."""
        return not self.reads_only_text or isinstance(query, str)

    def settings(self) -> dict[str, Any]:
        """Return "kind" and the fields that are compared by `==`, as JSON values."""
        compared = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}  # type: ignore[arg-type]
        values = {name: list(x) if isinstance(x, tuple) else x for name, x in compared.items()}
        return {"kind": self.kind} | values

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the learned arrays by name: the fields that are NumPy arrays."""
        return {name: x for name, x in vars(self).items() if isinstance(x, np.ndarray)}

    @classmethod
    def build(cls, settings: EncoderSettings, arrays: EncoderArrays) -> Encoder:
        """Build the encoder from the settings and arrays that it returned."""
        return cls(**{name: x for name, x in settings.items() if name != "kind"}, **arrays)

    @classmethod
    def restore(
        cls, settings: EncoderSettings, arrays: EncoderArrays, user_encoder: Encoder | None
    ) -> Encoder:
        """Build the encoder of a store, which may be untrusted.

        Settings may name functions, folders and files. These come from `user_encoder`, the argument
        `encoder=` of the caller, if it has the same kind.
        """
        return cls.build(settings, arrays)


def has_text_extra() -> bool:
    """Return whether the packages of the extra `text` are installed, with vectors of words."""
    return find_spec("wordllama") is not None and find_spec("tokenizers") is not None


def _has_shift(form: DotProductForm) -> bool:
    """Return whether the form adds a term to the dot product, as that of a Gaussian does."""
    return form.bias is not None or form.offset is not None


SHARPNESS_COEFFICIENTS = (8.0, 1.6)
"""The numbers a and b in `sharpness_for_rows`.

With these values, a query with one typo gives most of the weight to the right key, and a vague
query spreads the weight. This holds among 6 names, 300 titles and 100,000 words.
"""


def sharpness_for_rows(rows: int) -> float:
    """Return τ(m) = a + b ln m, the factor by which a cosine is multiplied to get a score.

    The best key competes with m − 1 other rows. Its weight stays about the same if the difference
    of the cosines is scaled in proportion to ln m.

    >>> sharpness_for_rows(300) > sharpness_for_rows(6)
    True
    """
    base, slope = SHARPNESS_COEFFICIENTS
    return base + slope * math.log(max(rows, 1))


def normalize_rows(vectors: np.ndarray) -> np.ndarray:
    """Return x / ‖x‖ for each row x; a row of zeros stays 0.

    >>> normalize_rows(np.array([[0.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.0, 1.0], [0.0, 0.0]]
    """
    vectors = np.array(vectors, np.float32)
    length = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    length[length == 0] = 1.0
    vectors /= length[:, None].astype(np.float32)
    return vectors


def select_by_prefix(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with this prefix.

    In the result, the prefix is removed.
    """
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}


def check_batch(keys: Sequence[Any]) -> Sequence[Any]:
    """Return the keys; raise `DtypeError` for a single text, which is not a list."""
    if isinstance(keys, str | bytes):
        raise DtypeError(
            f"encode takes a list of keys, not one {type(keys).__name__}: put it in a list"
        )
    return keys


def to_texts(keys: Sequence[Any]) -> list[str]:
    """Return each key as text. A key that is not text becomes compact JSON.

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
    """Return a key as compact JSON with sorted names."""
    return json.dumps(
        cells.to_json_value(key), ensure_ascii=False, sort_keys=True, separators=(",", ":")
    )
