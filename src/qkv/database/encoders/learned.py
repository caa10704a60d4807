"""What `learn` found: another encoder's heads, each with a projection and a pooling of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from qkv.database.encoders.base import Encoder, batch, sharpness, under, unit
from qkv.database.encoders.heads import Columns, Heads
from qkv.errors import ArgumentError
from qkv.scores import ScaledDot, Score

BLOCK = 4096
PLACES = 32
"""Tokens of a text whose place counts; those after share the last place."""

SIDES = ("query", "key")


class Bag(NamedTuple):
    """The tokens of m texts in one row: ids (t,), offsets (m + 1,), and each one's place (t,)."""

    ids: np.ndarray
    offsets: np.ndarray
    places: np.ndarray

    def take(self, texts: np.ndarray) -> Bag:
        """The bag of some of the texts."""
        lengths = self.offsets[texts + 1] - self.offsets[texts]
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        at = np.arange(offsets[-1]) + np.repeat(self.offsets[texts] - offsets[:-1], lengths)
        return Bag(self.ids[at], offsets, self.places[at])

    def thin(self, kept: np.ndarray) -> Bag:
        """The bag without the tokens where kept (t,) is False."""
        count = np.concatenate([[0], np.cumsum(kept)])
        return Bag(self.ids[kept], count[self.offsets], self.places[kept])


class Input(NamedTuple):
    """What a head has of m texts: tokens or vectors, and how long (m,) its vectors shall be."""

    x: Bag | np.ndarray
    length: np.ndarray | None = None

    def take(self, texts: np.ndarray) -> Input:
        x = self.x.take(texts) if isinstance(self.x, Bag) else self.x[texts]
        return Input(x, None if self.length is None else self.length[texts])


def bag(ids: np.ndarray, offsets: np.ndarray) -> Bag:
    """
    >>> bag(np.array([5, 7, 5]), np.array([0, 2, 2, 3])).places.tolist()
    [0, 1, 0]
    """
    places = np.arange(len(ids)) - np.repeat(offsets[:-1], np.diff(offsets))
    return Bag(ids, offsets, np.minimum(places, PLACES - 1))


def pooling(logits: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """softmax over each text's tokens: logits (t,) → weights (t,).

    >>> pooling(np.array([1.0, 1.0, 7.0]), np.array([0, 2, 2, 3])).tolist()
    [0.5, 0.5, 1.0]
    """
    lengths = np.diff(offsets)
    starts = offsets[:-1][lengths > 0]
    if not len(starts):
        return np.zeros_like(logits)
    lengths = lengths[lengths > 0]
    e = np.exp(logits - np.repeat(np.maximum.reduceat(logits, starts), lengths))
    return e / np.repeat(np.add.reduceat(e, starts), lengths)  # type: ignore[no-any-return]


def pooled(
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
    `parameters` holds them as "head.side.name", and ln τw_h as "scales". `learn` makes one;
    W = 1 and a = b = 0, where it begins, give what `base` gives.

    >>> from qkv.database.encoders import Characters
    >>> encoder = Learned.begin(Characters(64), rows=3)
    >>> bool(np.allclose(encoder.encode(["Li"]), Characters(64).encode(["Li"])))
    True
    """

    base: Encoder
    rows: int
    cosines: tuple[bool, ...]
    parameters: Mapping[str, np.ndarray] = field(compare=False, repr=False)
    kind: ClassVar[str] = "learned"

    @classmethod
    def begin(cls, base: Encoder, rows: int, vectors: bool = False) -> Learned:
        """Where learning begins: what `base` does. A `base` that has learned goes on from there."""
        if isinstance(base, Learned):
            parameters, cosines = dict(base.parameters), base.cosines
            base = base.base
        else:
            heads = leaves(base)
            # Where a head is no cosine, its vectors must keep their lengths.
            cosines = tuple(head.cosine or has_tokens(head) for head, _ in heads)
            shared = isinstance(base, Heads) or all(cosines)
            start = sharpness(rows) if shared else base.head_scale(rows)
            scales = [math.log(max(start * weight, 1e-3)) for _, weight in heads]
            parameters = {"scales": np.array(scales, np.float32)}
        for i, (head, _) in enumerate(leaves(base)):
            for side in SIDES:
                own = f"{i}.{side}."
                parameters.setdefault(own + "w", np.eye(head.head_width, dtype=np.float32))
                if has_tokens(head):
                    table = table_of(head)
                    parameters.setdefault(own + "logits", np.zeros(len(table), np.float32))
                    parameters.setdefault(own + "places", np.zeros(PLACES, np.float32))
                    if vectors:
                        parameters.setdefault(own + "vectors", table)
        return cls(base, rows, cosines, parameters)

    @property
    def width(self) -> int:
        return sum(head.head_width for head, _ in leaves(self.base))

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
        return self._vectors(keys, "key")

    def query(self, queries: Sequence[Any]) -> np.ndarray:
        return self._vectors(queries, "query")

    def _head(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        return self._vectors(keys, "query" if query else "key")

    def _vectors(self, keys: Sequence[Any], side: str) -> np.ndarray:
        out = np.empty((len(batch(keys)), self.width), np.float32)
        for start in range(0, len(keys), BLOCK):
            some = keys[start : start + BLOCK]
            out[start : start + BLOCK] = self.project(features(self.base, some, side), side)
        return out

    def project(self, found: Sequence[Input], side: str) -> np.ndarray:
        """The vectors (m, width) of what `features` found, heads end to end."""
        parts = []
        for i, ((x, length), (head, _), weight) in enumerate(
            zip(found, leaves(self.base), self.weights, strict=True)
        ):
            own = f"{i}.{side}."
            if isinstance(x, Bag):
                logits = self.parameters[own + "logits"][x.ids]
                alpha = pooling(logits + self.parameters[own + "places"][x.places], x.offsets)
                table = self.parameters.get(own + "vectors")
                x = pooled(table_of(head) if table is None else table, alpha, x.ids, x.offsets)
            y = x @ self.parameters[own + "w"].T
            y = unit(y) if self.cosines[i] else y
            y *= np.float32(math.sqrt(weight))
            parts.append(y if length is None else y * length[:, None])
        return np.concatenate(parts, axis=1)

    def score(self, rows: int) -> Score:
        return ScaledDot(self.sharpness * sharpness(rows) / sharpness(self.rows))

    def reads(self, query: Any) -> bool:
        return self.base.reads(query)

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
        heads = leaves(self.base)
        for name, array in self.parameters.items():
            if name.endswith(".vectors"):
                own = table_of(heads[int(name.partition(".")[0])][0])
                moved = np.flatnonzero((array != own).any(axis=1))
                found[f"moved.{name}"], array = moved, array[moved]
            found[f"learned.{name}"] = array
        return found

    @classmethod
    def build(cls, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Learned:
        return cls.restore(settings, arrays, None)

    @classmethod
    def restore(
        cls, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray], given: Encoder | None
    ) -> Learned:
        from qkv.database.encoders import load

        given = given.base if isinstance(given, cls) else given
        base = load(settings["base"], under("base.", arrays), given)
        parameters = under("learned.", arrays)
        for name, rows in under("moved.", arrays).items():
            table = table_of(leaves(base)[int(name.partition(".")[0])][0]).copy()
            table[rows] = parameters[name]
            parameters[name] = table
        expected = cls.begin(base, settings["rows"]).parameters
        for name, array in expected.items():
            if name not in parameters or parameters[name].shape != array.shape:
                raise ArgumentError(
                    f"Learned: its array {name!r} does not fit the encoder {base!r} it was "
                    "learned on: learn again"
                )
        return cls(base, settings["rows"], tuple(settings["cosines"]), parameters)


def leaves(encoder: Encoder) -> list[tuple[Encoder, float]]:
    """The heads of an encoder, those of its heads among them, each with its weight.

    >>> from qkv.database.encoders import Characters, Exact
    >>> inner = Heads([Characters(64), Exact(64)])
    >>> [weight for _, weight in leaves(Heads([inner, Characters(64)]))]
    [0.25, 0.25, 0.5]
    """
    if not isinstance(encoder, Heads):
        return [(encoder, 1.0)]
    return [
        (leaf, weight * inner)
        for head, weight in zip(encoder.heads, encoder.weights, strict=True)
        for leaf, inner in leaves(head)
    ]


def features(encoder: Encoder, keys: Sequence[Any], side: str) -> list[Input]:
    """What each head has before anything learned: its tokens, or its vectors (m, head_width)."""
    if not isinstance(encoder, Heads):
        if not has_tokens(encoder):
            return [Input(encoder.head(keys, side == "query"))]
        texts = ["" if key is None else key for key in keys]
        return [Input(bag(*encoder.tokens(texts)))]  # type: ignore[attr-defined]
    lengths = _lengths(encoder, keys, side)
    found = []
    for i, part in enumerate(encoder._parts(keys, side == "query")):
        for x, length in features(encoder.heads[i], part, side):
            if lengths is not None:
                length = lengths[:, i] * (1 if length is None else length)
            found.append(Input(x, length))
    return found


def _lengths(heads: Heads, keys: Sequence[Any], side: str) -> np.ndarray | None:
    """How long (m, h) the heads' vectors are beside √weight, or None where they are just that."""
    if isinstance(heads, Columns):
        if side == "key":
            return None
        whole = np.array([[heads.whole(query)] for query in keys], np.float32)
        return np.repeat(1 / whole, len(heads.heads), axis=1)
    if type(heads).shares is Heads.shares:
        return None
    given = np.array([key is not None for key in keys])
    out = np.zeros((len(keys), len(heads.heads)), np.float32)
    if given.any():
        shares = heads.shares([key for key in keys if key is not None])
        out[given] = np.sqrt(shares / np.maximum(heads.weights, 1e-12))
    return out


def has_tokens(encoder: Encoder) -> bool:
    """Whether its vectors are pooled from a table of tokens, as those of `Words` are."""
    return callable(getattr(encoder, "tokens", None)) and hasattr(encoder, "table")


def table_of(head: Encoder) -> np.ndarray:
    """The vectors (vocabulary, width) of a head's tokens."""
    return head.table  # type: ignore[attr-defined, no-any-return]
