"""What `learn` found: another encoder's heads, each with a projection and a pooling of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from qkv.database.encoders.base import (
    Encoder,
    EncoderArrays,
    EncoderSettings,
    check_batch,
    normalize_rows,
    select_by_prefix,
    sharpness_for_rows,
)
from qkv.database.encoders.heads import Heads, merge_sparse_heads
from qkv.database.encoders.lexical import Lexical
from qkv.database.encoders.text import Text
from qkv.errors import ArgumentError
from qkv.frameworks.ragged import Ragged, entry_positions, entry_values, sparse_products
from qkv.frameworks.ragged import build_sparse as sparse_of
from qkv.scores import ScaledDot, Score

TEXTS_PER_BLOCK = 4096
MAX_TOKEN_POSITIONS = 32
"""Tokens of a text whose place counts; those after share the last place."""

SIDES = ("query", "key")


class TokenBag(NamedTuple):
    """The tokens of m texts in one row: ids (t,), offsets (m + 1,), and each one's place (t,)."""

    ids: np.ndarray
    offsets: np.ndarray
    positions: np.ndarray

    def take_texts(self, texts: np.ndarray) -> TokenBag:
        """The bag of some of the texts."""
        lengths = self.offsets[texts + 1] - self.offsets[texts]
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        at = np.arange(offsets[-1]) + np.repeat(self.offsets[texts] - offsets[:-1], lengths)
        return TokenBag(self.ids[at], offsets, self.positions[at])

    def drop_tokens(self, kept: np.ndarray) -> TokenBag:
        """The bag without the tokens where kept (t,) is False."""
        count = np.concatenate([[0], np.cumsum(kept)])
        return TokenBag(self.ids[kept], count[self.offsets], self.positions[kept])


class HeadInput(NamedTuple):
    """What a head has of m texts: tokens, sparse vectors or vectors, and how long (m,) these shall
    be."""

    x: TokenBag | Ragged | np.ndarray
    length: np.ndarray | None = None

    def take_texts(self, texts: np.ndarray) -> HeadInput:
        x = self.x.take_texts(texts) if isinstance(self.x, TokenBag) else self.x[texts]
        return HeadInput(x, None if self.length is None else self.length[texts])


class ProjectedVectors(NamedTuple):
    """Vectors (m, width), and the sparse ones beside them."""

    dense: np.ndarray
    sparse: Ragged | None

    def take_rows(self, some: np.ndarray) -> ProjectedVectors:
        return ProjectedVectors(
            self.dense[some], None if self.sparse is None else self.sparse[some]
        )

    def compute_scores(self, key: ProjectedVectors) -> np.ndarray:
        """The products with keys, (n, m)."""
        s: np.ndarray = self.dense @ key.dense.T
        if self.sparse is not None and key.sparse is not None:
            s += sparse_products(self.sparse, key.sparse)
        return s


def build_token_bag(ids: np.ndarray, offsets: np.ndarray) -> TokenBag:
    """
    >>> build_token_bag(np.array([5, 7, 5]), np.array([0, 2, 2, 3])).positions.tolist()
    [0, 1, 0]
    """
    places = np.arange(len(ids)) - np.repeat(offsets[:-1], np.diff(offsets))
    return TokenBag(ids, offsets, np.minimum(places, MAX_TOKEN_POSITIONS - 1))


def softmax_by_text(logits: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """softmax over each text's tokens: logits (t,) → weights (t,).

    >>> softmax_by_text(np.array([1.0, 1.0, 7.0]), np.array([0, 2, 2, 3])).tolist()
    [0.5, 0.5, 1.0]
    """
    lengths = np.diff(offsets)
    starts = offsets[:-1][lengths > 0]
    if not len(starts):
        return np.zeros_like(logits)
    lengths = lengths[lengths > 0]
    e = np.exp(logits - np.repeat(np.maximum.reduceat(logits, starts), lengths))
    return e / np.repeat(np.add.reduceat(e, starts), lengths)  # type: ignore[no-any-return]


def pool_tokens(
    table: np.ndarray, weights: np.ndarray, ids: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    """Σ_t weights[t] table[ids[t]] over each text: (m, width); 0 for a text of no tokens."""
    out = np.zeros((len(offsets) - 1, table.shape[1]), table.dtype)
    some = np.flatnonzero(np.diff(offsets))
    if len(some):
        out[some] = np.add.reduceat(table[ids] * weights[:, None], offsets[some], axis=0)
    return out


@dataclass(frozen=True)
class Learned(Encoder):
    """s(q, k) = τ Σ_h w_h cos(W_Qʰ x_h(q), W_Kʰ x_h(k)), with Σ w_h = 1.

    x_h is the vector that head h of `base` gives. Where it has tokens, their pooling is an
    attention of its own, x = Σ_t softmax_t(a[token t] + b[place t]) E[token t]. Queries and keys
    each have their W (w), a (logits), b (places) and, where they were learned, E (vectors).
    `parameters` holds them as "head.side.name", and ln τw_h as "scales". A head of sparse vectors
    has no W but a weight for each word of the keys, Σ_w e^(g_w) φ_w ψ_w, with g as "head.words".
    `learn` makes one; W = 1 and a = b = g = 0, where it begins, give what `base` gives.

    >>> from qkv.database.encoders import Characters
    >>> encoder = Learned.from_base(Characters(64), rows=3)
    >>> bool(np.allclose(encoder.encode(["Li"]), Characters(64).encode(["Li"])))
    True
    """

    base: Encoder
    rows: int
    cosines: tuple[bool, ...]
    parameters: Mapping[str, np.ndarray] = field(compare=False, repr=False)
    kind: ClassVar[str] = "learned"

    @classmethod
    def from_base(cls, base: Encoder, rows: int, vectors: bool = False) -> Learned:
        """Where learning begins: what `base` does. A `base` that has learned goes on from there."""
        if isinstance(base, Learned):
            parameters, cosines = dict(base.parameters), base.cosines
            base = base.base
        else:
            heads = leaf_heads(base)
            # Where a head is no cosine, its vectors must keep their lengths.
            cosines = tuple(head.uses_cosine or has_tokens(head) for head, _ in heads)
            shared = isinstance(base, Heads) or all(cosines)
            start = sharpness_for_rows(rows) if shared else base.head_scale(rows)
            scales = [math.log(max(start * weight, 1e-3)) for _, weight in heads]
            parameters = {"scales": np.array(scales, np.float32)}
        for i, (head, _) in enumerate(leaf_heads(base)):
            if is_sparse(head):
                parameters.setdefault(f"{i}.words", np.zeros(len(word_places(head)), np.float32))
                continue
            for side in SIDES:
                own = f"{i}.{side}."
                parameters.setdefault(own + "w", np.eye(head.head_width, dtype=np.float32))
                if has_tokens(head):
                    table = token_table(head)
                    parameters.setdefault(own + "logits", np.zeros(len(table), np.float32))
                    parameters.setdefault(own + "places", np.zeros(MAX_TOKEN_POSITIONS, np.float32))
                    if vectors:
                        parameters.setdefault(own + "vectors", table)
        return cls(base, rows, cosines, parameters)

    @property
    def width(self) -> int:
        return sum(head.head_width for head, _ in leaf_heads(self.base))

    @property
    def int8_safe(self) -> bool:  # type: ignore[override]
        return self.base.int8_safe

    @property
    def weights(self) -> tuple[float, ...]:
        """w_h: how much each head counts."""
        scales = np.exp(self.parameters["scales"].astype(np.float64))
        return tuple((scales / scales.sum()).tolist())

    @property
    def sharpness(self) -> float:
        """τ, for as many rows as it was learned with."""
        return float(np.exp(self.parameters["scales"].astype(np.float64)).sum())

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        return self._encode_vectors(keys, "key")

    def encode_query(self, queries: Sequence[Any]) -> np.ndarray:
        return self._encode_vectors(queries, "query")

    def encode_sparse(self, keys: Sequence[Any], query: bool = False) -> Ragged | None:
        if not any(is_sparse(head) for head, _ in leaf_heads(self.base)):
            return None
        side = "query" if query else "key"
        found = self.project_sparse(
            extract_features(self.base, check_batch(keys), side, is_sparse), side
        )
        return self.base.add_exact_places(found, keys) if isinstance(self.base, Text) else found

    def _encode_head(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        return self._encode_vectors(keys, "query" if query else "key")

    def _encode_vectors(self, keys: Sequence[Any], side: str) -> np.ndarray:
        out = np.empty((len(check_batch(keys)), self.width), np.float32)
        for start in range(0, len(keys), TEXTS_PER_BLOCK):
            some = keys[start : start + TEXTS_PER_BLOCK]
            out[start : start + TEXTS_PER_BLOCK] = self.project_dense(
                extract_features(self.base, some, side), side
            )
        return out

    def project_inputs(self, found: Sequence[HeadInput], side: str) -> ProjectedVectors:
        """The vectors of what `extract_features` found, and the sparse ones beside them."""
        return ProjectedVectors(self.project_dense(found, side), self.project_sparse(found, side))

    def project_sparse(self, found: Sequence[HeadInput], side: str) -> Ragged | None:
        """The sparse vectors, with what was learned of each word on the side of the query."""
        own, stretch = {}, {}
        for i, ((x, length), (head, _), weight) in enumerate(
            zip(found, leaf_heads(self.base), self.weights, strict=True)
        ):
            if isinstance(x, Ragged):
                own[i] = self._weight_words(x, head, i) if side == "query" else x
                stretch[i] = np.sqrt(weight) * (np.ones(len(x)) if length is None else length)
        return merge_sparse_heads(own, stretch) if own else None

    def _weight_words(self, vectors: Ragged, head: Encoder, i: int) -> Ragged:
        words, place = word_places(head), entry_positions(vectors)
        at = np.searchsorted(words, place).clip(max=max(len(words) - 1, 0))
        learned = np.exp(self.parameters[f"{i}.words"])
        factor = np.where(words[at] == place, learned[at], 1) if len(words) else np.ones(len(at))
        row = np.repeat(np.arange(len(vectors)), np.diff(vectors.starts))
        return sparse_of(row, place, entry_values(vectors) * factor, len(vectors))

    def project_dense(self, found: Sequence[HeadInput], side: str) -> np.ndarray:
        """The vectors (m, width) of what `extract_features` found, heads end to end."""
        parts = []
        for i, ((x, length), (head, _), weight) in enumerate(
            zip(found, leaf_heads(self.base), self.weights, strict=True)
        ):
            own = f"{i}.{side}."
            if isinstance(x, Ragged):
                parts.append(np.zeros((len(x), 0), np.float32))
                continue
            if isinstance(x, TokenBag):
                logits = self.parameters[own + "logits"][x.ids]
                alpha = softmax_by_text(
                    logits + self.parameters[own + "places"][x.positions], x.offsets
                )
                table = self.parameters.get(own + "vectors")
                x = pool_tokens(
                    token_table(head) if table is None else table, alpha, x.ids, x.offsets
                )
            y = x @ self.parameters[own + "w"].T
            y = normalize_rows(y) if self.cosines[i] else y
            y *= np.float32(math.sqrt(weight))
            parts.append(y if length is None else y * length[:, None])
        return np.concatenate(parts, axis=1)

    def default_score(self, rows: int) -> Score:
        return ScaledDot(self.sharpness * sharpness_for_rows(rows) / sharpness_for_rows(self.rows))

    def can_read_query(self, query: Any) -> bool:
        return self.base.can_read_query(query)

    def settings(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "base": self.base.settings(),
            "rows": self.rows,
            "cosines": list(self.cosines),
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """The parameters; of a table of vectors only the rows that were moved."""
        found = {f"base.{name}": array for name, array in self.base.arrays().items()}
        heads = leaf_heads(self.base)
        for name, array in self.parameters.items():
            if name.endswith(".vectors"):
                own = token_table(heads[int(name.partition(".")[0])][0])
                moved = np.flatnonzero((array != own).any(axis=1))
                found[f"moved.{name}"], array = moved, array[moved]
            found[f"learned.{name}"] = array
        return found

    @classmethod
    def build(cls, settings: EncoderSettings, arrays: EncoderArrays) -> Learned:
        return cls.restore(settings, arrays, None)

    @classmethod
    def restore(
        cls, settings: EncoderSettings, arrays: EncoderArrays, given: Encoder | None
    ) -> Learned:
        from qkv.database.encoders import load

        given = given.base if isinstance(given, cls) else given
        base = load(settings["base"], select_by_prefix("base.", arrays), given)
        parameters = select_by_prefix("learned.", arrays)
        for name, rows in select_by_prefix("moved.", arrays).items():
            table = token_table(leaf_heads(base)[int(name.partition(".")[0])][0]).copy()
            table[rows] = parameters[name]
            parameters[name] = table
        expected = cls.from_base(base, settings["rows"]).parameters
        for name, array in expected.items():
            if name not in parameters or parameters[name].shape != array.shape:
                raise ArgumentError(
                    f"Learned: its array {name!r} does not fit the encoder {base!r} it was "
                    "learned on: learn again"
                )
        return cls(base, settings["rows"], tuple(settings["cosines"]), parameters)


def leaf_heads(encoder: Encoder) -> list[tuple[Encoder, float]]:
    """The heads of an encoder, those of its heads among them, each with its weight.

    >>> from qkv.database.encoders import Characters, Exact
    >>> inner = Heads([Characters(64), Exact(64)])
    >>> [weight for _, weight in leaf_heads(Heads([inner, Characters(64)]))]
    [0.25, 0.25, 0.5]
    """
    if not isinstance(encoder, Heads):
        return [(encoder, 1.0)]
    return [
        (leaf, weight * inner)
        for head, weight in zip(encoder.heads, encoder.weights, strict=True)
        for leaf, inner in leaf_heads(head)
    ]


def extract_features(
    encoder: Encoder,
    keys: Sequence[Any],
    side: str,
    wanted: Callable[[Encoder], bool] = lambda head: True,
) -> list[HeadInput]:
    """What each head has before anything learned: its tokens, or its vectors (m, head_width); of
    heads that are not wanted, nothing."""
    if not isinstance(encoder, Heads):
        if not wanted(encoder):
            return [HeadInput(np.zeros((len(keys), 0), np.float32))]
        if is_sparse(encoder):
            return [HeadInput(encoder.encode_head_sparse(keys, side == "query"))]  # type: ignore[arg-type]
        if not has_tokens(encoder):
            return [HeadInput(encoder.encode_head(keys, side == "query"))]
        texts = ["" if key is None else key for key in keys]
        return [HeadInput(build_token_bag(*encoder.tokens(texts)))]  # type: ignore[attr-defined]
    lengths = _vector_lengths(encoder, keys, side)
    found = []
    for i, part in enumerate(encoder._split_keys(keys, side == "query")):
        for x, length in extract_features(encoder.heads[i], part, side, wanted):
            if lengths is not None:
                length = lengths[:, i] * (1 if length is None else length)
            found.append(HeadInput(x, length))
    return found


def _vector_lengths(heads: Heads, keys: Sequence[Any], side: str) -> np.ndarray | None:
    """How long (m, h) the heads' vectors are beside √weight, or None where they are just that."""
    if (type(heads).head_shares, type(heads)._head_factors) == (
        Heads.head_shares,
        Heads._head_factors,
    ):
        return None
    given = np.array([key is not None for key in keys], bool)
    out = np.zeros((len(keys), len(heads.heads)), np.float32)
    if given.any():
        some = [key for key in keys if key is not None]
        usual = np.sqrt(np.maximum(heads.weights, 1e-12))
        out[given] = heads._head_factors(some, side == "query") / usual
    return out


def is_sparse(encoder: Encoder) -> bool:
    """Whether its vectors are sparse, with a number for each word that it knows."""
    return isinstance(encoder, Lexical)


def word_places(head: Encoder) -> np.ndarray:
    """The places of the words that such a head was fitted to, ascending."""
    codes: np.ndarray | None = head.codes  # type: ignore[attr-defined]
    return np.zeros(0, np.uint32) if codes is None else codes


def has_tokens(encoder: Encoder) -> bool:
    """Whether its vectors are pooled from a table of tokens, as those of `Words` are."""
    return callable(getattr(encoder, "tokens", None)) and hasattr(encoder, "table")


def token_table(head: Encoder) -> np.ndarray:
    """The vectors (vocabulary, width) of a head's tokens."""
    return head.table  # type: ignore[attr-defined, no-any-return]
