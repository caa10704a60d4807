"""The encoder that `learn` trains: for each head of a base encoder, a projection and a pooling."""

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
from qkv.database.encoders.registry import load
from qkv.database.encoders.text import Text
from qkv.errors import ArgumentError
from qkv.frameworks.ragged import Ragged, entry_positions, entry_values, sparse_products
from qkv.frameworks.ragged import build_sparse as sparse_of
from qkv.scores import ScaledDot, Score
from qkv.util.keyword_hints import suggest_keywords

TEXTS_PER_BLOCK = 4096
MAX_TOKEN_POSITIONS = 32
"""The number of token positions with a parameter of their own. Later tokens share the last one."""

SIDES = ("query", "key")


class TokenBag(NamedTuple):
    """The tokens of m texts.

    `ids` (t,) are all tokens, `offsets` (m + 1,) the start of each text and the end of the last,
    and `positions` (t,) the position of each token in its text.
    """

    ids: np.ndarray
    offsets: np.ndarray
    positions: np.ndarray

    def take_texts(self, texts: np.ndarray) -> TokenBag:
        """Return the tokens of these texts only."""
        lengths = self.offsets[texts + 1] - self.offsets[texts]
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        indices = np.arange(offsets[-1]) + np.repeat(self.offsets[texts] - offsets[:-1], lengths)
        return TokenBag(self.ids[indices], offsets, self.positions[indices])

    def drop_tokens(self, is_kept: np.ndarray) -> TokenBag:
        """Return only the tokens for which `is_kept` (t,) is True."""
        count = np.concatenate([[0], np.cumsum(is_kept)])
        return TokenBag(self.ids[is_kept], count[self.offsets], self.positions[is_kept])


class HeadInput(NamedTuple):
    """The input of a head for m texts: tokens, or sparse or dense vectors.

    The output vector of text i is multiplied by `length[i]`.
    """

    x: TokenBag | Ragged | np.ndarray
    length: np.ndarray | None = None

    def take_texts(self, texts: np.ndarray) -> HeadInput:
        """Return the input for these texts only."""
        x = self.x.take_texts(texts) if isinstance(self.x, TokenBag) else self.x[texts]
        return HeadInput(x, None if self.length is None else self.length[texts])


class ProjectedVectors(NamedTuple):
    """Dense vectors (m, width), and the sparse vectors to add to them, if any."""

    dense: np.ndarray
    sparse: Ragged | None

    def take_rows(self, rows: np.ndarray) -> ProjectedVectors:
        """Return the vectors of these rows only."""
        return ProjectedVectors(
            self.dense[rows], None if self.sparse is None else self.sparse[rows]
        )

    def compute_scores(self, key: ProjectedVectors) -> np.ndarray:
        """Return the dot products with the vectors of keys, (n, m)."""
        s: np.ndarray = self.dense @ key.dense.T
        if self.sparse is not None and key.sparse is not None:
            s += sparse_products(self.sparse, key.sparse)
        return s


def build_token_bag(ids: np.ndarray, offsets: np.ndarray) -> TokenBag:
    """Return the tokens with the position of each in its text.

    >>> build_token_bag(np.array([5, 7, 5]), np.array([0, 2, 2, 3])).positions.tolist()
    [0, 1, 0]
    """
    positions = np.arange(len(ids)) - np.repeat(offsets[:-1], np.diff(offsets))
    return TokenBag(ids, offsets, np.minimum(positions, MAX_TOKEN_POSITIONS - 1))


def softmax_by_text(logits: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the softmax of the logits (t,) over the tokens of each text: weights (t,).

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
    """Return Σ_t weights[t] table[ids[t]] over the tokens t of each text, (m, width).

    The sum of an empty text is 0.
    """
    out = np.zeros((len(offsets) - 1, table.shape[1]), table.dtype)
    nonempty = np.flatnonzero(np.diff(offsets))
    if len(nonempty):
        out[nonempty] = np.add.reduceat(table[ids] * weights[:, None], offsets[nonempty], axis=0)
    return out


@suggest_keywords
@dataclass(frozen=True)
class Learned(Encoder):
    """s(q, k) = τ Σ_h w_h cos(W_Qʰ x_h(q), W_Kʰ x_h(k)), with Σ w_h = 1.

    x_h is the vector of head h of `base`. A head with tokens pools them with an attention:
    x = Σ_t softmax_t(a[token t] + b[position t]) E[token t]. Queries and keys have their own W (w),
    a (logits), b (places) and, if learned, E (vectors). `parameters` contains them under the names
    "head.side.name", and ln τw_h under "scales".

    A sparse head has no W. Instead, each word of the keys has a weight: Σ_w e^(g_w) φ_w ψ_w.
    `parameters` contains g under "head.words".

    `learn` trains such an encoder. It starts with W = 1 and a = b = g = 0, which gives the vectors
    of `base`.

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
        """Return the encoder at the start of training. It has the same vectors as `base`.

        `base` may itself be a `Learned`; training then continues. With `vectors`, the token vectors
        are parameters too.
        """
        if isinstance(base, Learned):
            parameters, cosines = dict(base.parameters), base.cosines
            base = base.base
        else:
            heads = leaf_heads(base)
            # If a head does not use the cosine, its vectors must keep their lengths.
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
                prefix = f"{i}.{side}."
                parameters.setdefault(prefix + "w", np.eye(head.head_width, dtype=np.float32))
                if has_tokens(head):
                    table = token_table(head)
                    parameters.setdefault(prefix + "logits", token_logits(head))
                    parameters.setdefault(
                        prefix + "places", np.zeros(MAX_TOKEN_POSITIONS, np.float32)
                    )
                    if vectors:
                        parameters.setdefault(prefix + "vectors", table)
        return cls(base, rows, cosines, parameters)

    @property
    def width(self) -> int:
        return sum(head.head_width for head, _ in leaf_heads(self.base))

    @property
    def int8_safe(self) -> bool:  # type: ignore[override]
        return self.base.int8_safe

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights w_h of the heads."""
        scales = np.exp(self.parameters["scales"].astype(np.float64))
        return tuple((scales / scales.sum()).tolist())

    @property
    def sharpness(self) -> float:
        """The scale τ for the number of rows that training had."""
        return float(np.exp(self.parameters["scales"].astype(np.float64)).sum())

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        return self._encode_vectors(keys, "key")

    def encode_query(self, queries: Sequence[Any]) -> np.ndarray:
        return self._encode_vectors(queries, "query")

    def encode_sparse(self, keys: Sequence[Any], query: bool = False) -> Ragged | None:
        if not any(is_sparse(head) for head, _ in leaf_heads(self.base)):
            return None
        side = "query" if query else "key"
        words = self.project_sparse(
            extract_features(self.base, check_batch(keys), side, is_sparse), side
        )
        if isinstance(self.base, Text):
            return self.base.add_full_text_positions(words, keys)
        return words

    def _encode_head(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        return self._encode_vectors(keys, "query" if query else "key")

    def _encode_vectors(self, keys: Sequence[Any], side: str) -> np.ndarray:
        """Return the dense vectors of keys or queries, block by block."""
        out = np.empty((len(check_batch(keys)), self.width), np.float32)
        for start in range(0, len(keys), TEXTS_PER_BLOCK):
            block = keys[start : start + TEXTS_PER_BLOCK]
            out[start : start + TEXTS_PER_BLOCK] = self.project_dense(
                extract_features(self.base, block, side), side
            )
        return out

    def project_inputs(self, features: Sequence[HeadInput], side: str) -> ProjectedVectors:
        """Return the dense and sparse vectors for the inputs that `extract_features` returned."""
        return ProjectedVectors(
            self.project_dense(features, side), self.project_sparse(features, side)
        )

    def project_sparse(self, features: Sequence[HeadInput], side: str) -> Ragged | None:
        """Return the sparse vectors of all heads; None if no head is sparse.

        The vectors of queries contain the learned weights of words.
        """
        vectors_by_head, stretch = {}, {}
        for i, ((x, length), (head, _), weight) in enumerate(
            zip(features, leaf_heads(self.base), self.weights, strict=True)
        ):
            if isinstance(x, Ragged):
                vectors_by_head[i] = self._weight_words(x, head, i) if side == "query" else x
                stretch[i] = np.sqrt(weight) * (np.ones(len(x)) if length is None else length)
        return merge_sparse_heads(vectors_by_head, stretch) if vectors_by_head else None

    def _weight_words(self, vectors: Ragged, head: Encoder, i: int) -> Ragged:
        """Return sparse vectors of queries, multiplied by the learned weights of their words."""
        words, positions = word_places(head), entry_positions(vectors)
        indices = np.searchsorted(words, positions).clip(max=max(len(words) - 1, 0))
        learned = np.exp(self.parameters[f"{i}.words"])
        factor = (
            np.where(words[indices] == positions, learned[indices], 1)
            if len(words)
            else np.ones(len(indices))
        )
        row = np.repeat(np.arange(len(vectors)), np.diff(vectors.starts))
        return sparse_of(row, positions, entry_values(vectors) * factor, len(vectors))

    def project_dense(self, features: Sequence[HeadInput], side: str) -> np.ndarray:
        """Return the dense vectors (m, width) of all heads, concatenated."""
        parts = []
        for i, ((x, length), (head, _), weight) in enumerate(
            zip(features, leaf_heads(self.base), self.weights, strict=True)
        ):
            prefix = f"{i}.{side}."
            if isinstance(x, Ragged):
                parts.append(np.zeros((len(x), 0), np.float32))
                continue
            if isinstance(x, TokenBag):
                logits = self.parameters[prefix + "logits"][x.ids]
                alpha = softmax_by_text(
                    logits + self.parameters[prefix + "places"][x.positions], x.offsets
                )
                table = self.parameters.get(prefix + "vectors")
                x = pool_tokens(
                    token_table(head) if table is None else table, alpha, x.ids, x.offsets
                )
            y = x @ self.parameters[prefix + "w"].T
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
        """Return the parameters by name.

        Of token vectors, only those that training changed are included.
        """
        arrays = {f"base.{name}": array for name, array in self.base.arrays().items()}
        heads = leaf_heads(self.base)
        for name, array in self.parameters.items():
            if name.endswith(".vectors"):
                original = token_table(heads[int(name.partition(".")[0])][0])
                moved = np.flatnonzero((array != original).any(axis=1))
                arrays[f"moved.{name}"], array = moved, array[moved]
            arrays[f"learned.{name}"] = array
        return arrays

    @classmethod
    def build(cls, settings: EncoderSettings, arrays: EncoderArrays) -> Learned:
        return cls.restore(settings, arrays, None)

    @classmethod
    def restore(
        cls, settings: EncoderSettings, arrays: EncoderArrays, user_encoder: Encoder | None
    ) -> Learned:
        user_encoder = user_encoder.base if isinstance(user_encoder, cls) else user_encoder
        base = load(settings["base"], select_by_prefix("base.", arrays), user_encoder)
        parameters = select_by_prefix("learned.", arrays)
        for name, rows in select_by_prefix("moved.", arrays).items():
            table = token_table(leaf_heads(base)[int(name.partition(".")[0])][0]).copy()
            table[rows] = parameters[name]
            parameters[name] = table
        expected = cls.from_base(base, settings["rows"]).parameters
        for name, array in expected.items():
            if name not in parameters or parameters[name].shape != array.shape:
                raise ArgumentError(
                    f"Learned: the array {name!r} does not have the shape that the base encoder "
                    f"{base!r} needs: run learn again"
                )
        return cls(base, settings["rows"], tuple(settings["cosines"]), parameters)


def leaf_heads(encoder: Encoder) -> list[tuple[Encoder, float]]:
    """Return all heads of an encoder with their weights. Heads inside heads are included.

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
    """Return the input of each head: its tokens, or its vectors (m, head_width).

    A head gets empty vectors if `wanted(head)` is False.
    """
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
    inputs = []
    for i, part in enumerate(encoder._split_keys(keys, side == "query")):
        for x, length in extract_features(encoder.heads[i], part, side, wanted):
            if lengths is not None:
                length = lengths[:, i] * (1 if length is None else length)
            inputs.append(HeadInput(x, length))
    return inputs


def _vector_lengths(heads: Heads, keys: Sequence[Any], side: str) -> np.ndarray | None:
    """Return the numbers (m, h) to multiply the vectors of the heads by, relative to √weight.

    Return None if all of them are 1.
    """
    if (type(heads).head_shares, type(heads)._head_factors) == (
        Heads.head_shares,
        Heads._head_factors,
    ):
        return None
    is_present = np.array([key is not None for key in keys], bool)
    out = np.zeros((len(keys), len(heads.heads)), np.float32)
    if is_present.any():
        present = [key for key in keys if key is not None]
        usual = np.sqrt(np.maximum(heads.weights, 1e-12))
        out[is_present] = heads._head_factors(present, side == "query") / usual
    return out


def is_sparse(encoder: Encoder) -> bool:
    """Return whether the vectors of an encoder are sparse, with a number for each word."""
    return isinstance(encoder, Lexical)


def word_places(head: Encoder) -> np.ndarray:
    """Return the positions of the words that a sparse head knows from `fit`, ascending."""
    codes: np.ndarray | None = head.codes  # type: ignore[attr-defined]
    return np.zeros(0, np.uint32) if codes is None else codes


def has_tokens(encoder: Encoder) -> bool:
    """Return whether the encoder pools the vectors of tokens, as `Words` does."""
    return callable(getattr(encoder, "tokens", None)) and hasattr(encoder, "table")


def token_logits(head: Encoder) -> np.ndarray:
    """Return the logits (vocabulary,) with which the pooled vectors have the head's direction."""
    weights: np.ndarray | None = getattr(head, "token_weights", None)
    if weights is None:
        return np.zeros(len(token_table(head)), np.float32)
    return np.log(np.maximum(weights.astype(np.float32), 1e-4))


def token_table(head: Encoder) -> np.ndarray:
    """Return the token vectors (vocabulary, width) of a head."""
    return head.table  # type: ignore[attr-defined, no-any-return]
