"""Combine several encoders: one dot product is the weighted sum of their similarities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders.base import (
    Encoder,
    EncoderArrays,
    EncoderSettings,
    check_batch,
    select_by_prefix,
)
from qkv.database.encoders.characters import mix_hash
from qkv.database.encoders.registry import load, resolve_single
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks.ragged import Ragged, build_sparse, entry_positions, entry_values
from qkv.util.formatting import quote_cell
from qkv.util.keyword_hints import suggest_keywords


@suggest_keywords
@dataclass(frozen=True)
class Heads(Encoder):
    """s(q, k) = Σ_h w_h s_h(q, k), with Σ w_h = 1: each head encodes the complete key.

    s_h is a cosine, or −‖q − k‖²/2h² for `Numbers`, or the default score of a user's encoder. The
    vectors of the heads are multiplied by √w_h and concatenated. One dot product of the result is
    the sum s.

    `heads` is a list of encoders or their names, or a mapping from names that you choose to
    encoders. By default, all weights are equal.

    >>> from qkv.database.encoders import Characters, Exact
    >>> both = Heads([Characters(), Exact()], weights=[3, 1])
    >>> a, b = both.encode(["Li", "Lee"])
    >>> bool(abs(a @ a - 1) < 1e-6), both.width
    (True, 512)
    """

    heads: Any
    weights: Any = None
    names: tuple[str, ...] = field(default=(), compare=False)
    kind: ClassVar[str] = "heads"

    def __post_init__(self) -> None:
        heads, names, class_name = self.heads, self.names, type(self).__name__
        if isinstance(heads, Mapping):
            names, heads = tuple(map(str, heads)), tuple(heads.values())
        if isinstance(heads, str) or not isinstance(heads, Sequence) or not heads:
            raise DtypeError(
                f"{class_name}: heads must be a list or a mapping of encoders, not {heads!r}"
            )
        heads = tuple(resolve(head) for head in heads)
        weights = self.weights
        if isinstance(weights, Mapping):
            if set(weights) - set(names):
                raise ArgumentError(
                    f"{class_name}: weights has the names {', '.join(map(str, weights))}, but the "
                    f"heads are {', '.join(names) or 'a list without names'}"
                )
            weights = [weights.get(name, 1.0) for name in names]
        weights = [1.0] * len(heads) if weights is None else [float(w) for w in weights]
        if len(weights) != len(heads):
            raise ShapeError(
                f"{class_name}: there are {len(weights)} weights but {len(heads)} heads: pass one "
                "weight per head"
            )
        if not all(0 <= w < math.inf for w in weights) or not sum(weights):
            raise ArgumentError(
                f"{class_name}: weights must be 0 or more, and not all 0, not {weights}"
            )
        object.__setattr__(self, "heads", heads)
        object.__setattr__(self, "weights", tuple(w / sum(weights) for w in weights))
        object.__setattr__(self, "names", tuple(names) or tuple(map(str, range(len(heads)))))

    @property
    def width(self) -> int:
        return sum(head.head_width for head in self.heads)

    @property
    def int8_safe(self) -> bool:  # type: ignore[override]
        return all(head.int8_safe for head in self.heads)

    @property
    def encodes_in_parallel(self) -> bool:  # type: ignore[override]
        return all(head.encodes_in_parallel for head in self.heads)

    @property
    def min_fit_keys(self) -> int:
        return max(int(head.min_fit_keys) for head in self.heads)

    def fit(self, keys: Sequence[Any]) -> Heads:
        parts = self._split_keys(check_batch(keys), False)
        return replace(self, heads=tuple(h.fit(p) for h, p in zip(self.heads, parts, strict=True)))

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        return self._encode_vectors(keys, False)

    def encode_query(self, queries: Sequence[Any]) -> np.ndarray:
        return self._encode_vectors(queries, True)

    def _encode_vectors(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        """Return the dense vectors (m, width) of all heads, concatenated."""
        out = np.empty((len(check_batch(keys)), self.width), np.float32)
        parts = self._split_keys(keys, query)
        stretch = self._head_factors(keys, query)
        start = 0
        for i, (head, part) in enumerate(zip(self.heads, parts, strict=True)):
            stop = start + head.head_width
            np.multiply(
                head.encode_head(part, query), stretch[..., i : i + 1], out=out[:, start:stop]
            )
            start = stop
        return out

    def encode_sparse(self, keys: Sequence[Any], query: bool = False) -> Ragged | None:
        parts = self._split_keys(check_batch(keys), query)
        stretch = self._head_factors(keys, query)
        vectors_by_head: dict[int, Ragged] = {}
        for i, (head, part) in enumerate(zip(self.heads, parts, strict=True)):
            vectors = head.encode_head_sparse(part, query)
            if vectors is not None:
                vectors_by_head[i] = vectors
        every = np.broadcast_to(stretch, (len(keys), len(self.heads)))
        return (
            merge_sparse_heads(vectors_by_head, {i: every[:, i] for i in vectors_by_head})
            if vectors_by_head
            else None
        )

    def _head_factors(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        """Return the numbers to multiply the vectors of the heads by, (h,) or (m, h)."""
        return np.asarray(np.sqrt(self.head_shares(keys)), np.float32)

    def head_shares(self, keys: Sequence[Any]) -> np.ndarray:
        """Return the weights of the heads: (h,) if all keys have the same weights, else (m, h)."""
        return np.asarray(self.weights)

    def _encode_head(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        return self.encode_query(keys) if query else self.encode(keys)

    def _split_keys(self, keys: Sequence[Any], query: bool) -> list[Sequence[Any]]:
        """Return, for each head, the keys that it encodes."""
        return [keys] * len(self.heads)

    def can_read_query(self, query: Any) -> bool:
        return all(head.can_read_query(query) for head in self.heads)

    def settings(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "names": list(self.names),
            "weights": list(self.weights),
            "heads": [head.settings() for head in self.heads],
        }

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            f"{i}.{name}": array
            for i, head in enumerate(self.heads)
            for name, array in head.arrays().items()
        }

    @classmethod
    def build(cls, settings: EncoderSettings, arrays: EncoderArrays) -> Heads:
        return cls.restore(settings, arrays, None)

    @classmethod
    def restore(
        cls, settings: EncoderSettings, arrays: EncoderArrays, user_encoder: Encoder | None
    ) -> Heads:
        user_heads = user_encoder.heads if isinstance(user_encoder, Heads) else ()
        heads = [
            load(
                head_settings,
                select_by_prefix(f"{i}.", arrays),
                user_heads[i] if i < len(user_heads) else None,
            )
            for i, head_settings in enumerate(settings["heads"])
        ]
        return cls(tuple(heads), tuple(settings["weights"]), tuple(settings["names"]))


def resolve(encoder: Any) -> Encoder:
    """Return the encoder for a name, an encoder, a function, "module:function" or several heads.

    >>> resolve("exact")
    Exact(width=256)
    """
    if isinstance(encoder, list | tuple | Mapping):
        return Heads(encoder)
    return resolve_single(encoder)


def salt_positions(positions: np.ndarray, head: int) -> np.ndarray:
    """Return the positions that a head's sparse positions have in the vector of all heads."""
    salted: np.ndarray = mix_hash(positions ^ np.uint32(head * 0x9E3779B9 & 0xFFFFFFFF))
    return salted


def merge_sparse_heads(heads: Mapping[int, Ragged], stretch: Mapping[int, np.ndarray]) -> Ragged:
    """Merge the sparse vectors of several heads into one vector per row.

    Each head has its own salt, so that the positions of different heads differ. `stretch` (m,) are
    the numbers to multiply the values of a head by.
    """
    rows, entries = [], []
    for i, vectors in heads.items():
        row = np.repeat(np.arange(len(vectors)), np.diff(vectors.starts))
        rows.append(row)
        positions = salt_positions(entry_positions(vectors), i)
        entries.append((positions, entry_values(vectors) * stretch[i][row]))
    row, (positions, values) = np.concatenate(rows), map(np.concatenate, zip(*entries, strict=True))
    order = np.argsort(row, kind="stable") if len(heads) > 1 else slice(None)
    return build_sparse(row[order], positions[order], values[order], len(vectors))


@suggest_keywords
@dataclass(frozen=True)
class Columns(Heads):
    """s(q, k) = Σ_c w_c s_c(q_c, k_c): each head encodes one column of a key that is a tuple.

    A query is a tuple, a mapping from column names to values, or a single value. None in a tuple
    leaves a column out; its weight goes to the others. A single value is compared with every column
    that can encode it, and needs to match only one of them.

    >>> from qkv.database.encoders import Characters, Numbers
    >>> books = [("Dracula", 1897), ("Emma", 1815)]
    >>> both = Columns({"title": Characters(), "year": Numbers()}).fit(books)
    >>> queries = both.encode_query([("Dracla", None), {"year": 1820}, "Ema"])
    >>> (queries @ both.encode(books).T).argmax(axis=1).tolist()
    [0, 1, 1]
    """

    kind: ClassVar[str] = "columns"

    def _split_keys(self, keys: Sequence[Any], query: bool) -> list[Sequence[Any]]:
        count = len(self.heads)
        rows = [self.split_query(key) if query else key for key in keys]
        for i, row in enumerate(rows):
            if not isinstance(row, tuple | list) or len(row) != count:
                raise ShapeError(
                    f"key {i} must be a tuple of {count} columns, not {quote_cell(row)}"
                )
        return [[row[c] for row in rows] for c in range(count)]

    def _head_factors(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        stretch = super()._head_factors(keys, query)
        if not query:
            return stretch
        query_weights = np.array([self.query_weight(key) for key in keys], np.float32)
        return np.asarray(stretch / query_weights[:, None], np.float32)

    def query_weight(self, query: Any) -> float:
        """Return the total weight of the columns that a query uses.

        Scores are divided by this weight, so that a query with few columns is as sharp as one with
        all. A single value needs to match only one column. So the largest weight of a column that
        can encode the value counts.
        """
        parts = zip(self.weights, self.split_query(query), strict=True)
        used = [weight for weight, part in parts if part is not None]
        several = isinstance(query, tuple | list | Mapping)
        return (sum(used) if several else max(used, default=0.0)) or 1.0

    def split_query(self, query: Any) -> Any:
        """Return a query as a tuple with one part for each column.

        None for a column that is left out.
        """
        if isinstance(query, tuple | list) and len(query) == len(self.heads):
            return query
        if isinstance(query, Mapping):
            unknown = sorted(set(query) - set(self.names))
            if unknown:
                raise ArgumentError(
                    f"no column {unknown[0]!r}: columns are {', '.join(self.names)}"
                )
            return tuple(query.get(name) for name in self.names)
        if isinstance(query, tuple):
            return query
        spread = tuple(query if head.can_read_query(query) else None for head in self.heads)
        if all(part is None for part in spread):
            raise DtypeError(
                f"no column can encode the query {quote_cell(query)}: pass a tuple with a value "
                "for each column"
            )
        return spread

    def can_read_query(self, query: Any) -> bool:
        return isinstance(query, tuple) or any(head.can_read_query(query) for head in self.heads)
