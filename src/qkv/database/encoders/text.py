"""Text by its letters, its meaning and its words: its encoder unless the caller says how."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np

from qkv.arrays.ragged import Ragged, abreast, sparse
from qkv.database.encoders.base import Encoder, batch, sharpness, texts
from qkv.database.encoders.calibrate import calibrated
from qkv.database.encoders.characters import Characters
from qkv.database.encoders.heads import Heads
from qkv.database.encoders.lexical import Lexical
from qkv.database.encoders.words import Words
from qkv.errors import ArgumentError
from qkv.scores import ScaledDot, Score

OLDER = 0.8
"""What words counted before a store said so."""

OWN = ("half", "sharp", "rare", "flat", "exact")
"""The fields that are numbers."""

DOUBT = 2.0
"""How much less words count beside others that no key has, which may be misspelled."""

PLACES = 2
"""Places of a whole text: where another shares one of them, that is not enough to decide."""

ENOUGH = 64
"""Keys from which it is fitted: fewer say little of which words are rare."""


@dataclass(frozen=True)
class Text(Heads):
    """s = √(c_q c_k) cos_letters + √((1−c_q)(1−c_k)) cos_meaning + `rare` lexical + `exact` [q=k].

    c = 1 / (1 + length/half) is the part of the letters: they tell names and titles apart, slips
    included, where a sentence is known by its words. At `half` letters both count the same. The
    words themselves count in so far as they are rare (`Lexical`), from 64 keys on. Then the
    temperature is fitted too, so that the heaviest weight is about the chance that its row is
    right: scores are stretched `sharp` e^(−`flat` r²) times as much as by the number of rows alone,
    where r is the share of the query that is in words of some key (`Lexical.known`). What has only
    letters to go by differs by less. And a query that is a key, to the letter, decides: it has two
    places of its own in the sparse vectors, by its digest.

    >>> keys = ["The Alchemist", "A shepherd travels to Egypt in search of a treasure"]
    >>> encoder = Text()
    >>> query, key = encoder.pair(["the alchmist", "a young man looks for hidden gold"], keys)
    >>> (query @ key.T).argmax(axis=1).tolist()
    [0, 1]
    """

    heads: Any = ()
    half: float = 40.0
    sharp: float = 1.0
    rare: float = 2.0
    flat: float = 0.6
    exact: float = 1.0
    kind: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        if not self.heads:
            lexical = Lexical(doubt=DOUBT)
            heads = {"characters": Characters(), "words": Words(), "lexical": lexical}
            object.__setattr__(self, "heads", heads)
        super().__post_init__()
        count = len(self.heads)
        if count not in (2, 3) or self.weights != (1 / count,) * count:
            raise ArgumentError("Text has its own heads, weighed by length: use Heads for others")
        if not self.half > 0:
            raise ArgumentError(f"Text: half must be above 0, not {self.half!r}")
        if not self.sharp > 0:
            raise ArgumentError(f"Text: sharp must be above 0, not {self.sharp!r}")
        for name in ("rare", "flat", "exact"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ArgumentError(f"Text: {name} must be 0 or more, not {getattr(self, name)!r}")

    @property
    def begins(self) -> int:
        return ENOUGH

    def fit(self, keys: Sequence[Any]) -> Text:
        if len(batch(keys)) < ENOUGH:
            return self
        made = replace(self, heads=tuple(head.fit(keys) for head in self.heads), sharp=1.0)
        return replace(made, sharp=calibrated(made, texts(keys)))

    def sparse(self, keys: Sequence[Any], query: bool = False) -> Ragged | None:
        return self.decided(super().sparse(keys, query), keys)

    def decided(self, found: Ragged | None, keys: Sequence[Any]) -> Ragged | None:
        """Sparse vectors of keys or queries, with the places of the whole texts after them."""
        if found is None or not self.exact:
            return found
        codes = [
            blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4 * PLACES).digest()
            for text in texts(keys)
        ]
        row = np.repeat(np.arange(len(codes)), PLACES)
        number = np.full(len(row), math.sqrt(self.exact / PLACES))
        return abreast(
            found, sparse(row, np.frombuffer(b"".join(codes), "<u4"), number, len(codes))
        )

    def _known(self, queries: Sequence[Any]) -> np.ndarray:
        """r of each query, (n,)."""
        if len(self.heads) < 3:
            return np.zeros(len(queries))
        return np.asarray(self.heads[2].known(queries))

    def _stretch(self, keys: Sequence[Any], query: bool) -> np.ndarray:
        stretch = super()._stretch(keys, query)
        if not query or not self.flat:
            return stretch
        flatter = np.exp(-self.flat * self._known(keys) ** 2)
        return np.asarray(stretch * flatter[:, None], np.float32)

    def score(self, rows: int) -> Score:
        return ScaledDot(self.sharp * sharpness(rows))

    def shares(self, keys: Sequence[Any]) -> np.ndarray:
        length = np.array([len(text) for text in texts(keys)], np.float64)
        letters = 1 / (1 + length / self.half)
        found = [letters, 1 - letters, np.full(len(length), self.rare)]
        return np.stack(found[: len(self.heads)], axis=1)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {name: getattr(self, name) for name in OWN}

    @classmethod
    def restore(
        cls, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray], given: Encoder | None
    ) -> Text:
        heads = Heads.restore(settings, arrays, given)
        told = {"sharp": 1.0, "rare": OLDER, "flat": 0.0, "exact": 0.0} | {
            name: settings[name] for name in OWN if name in settings
        }
        return cls(heads.heads, heads.weights, heads.names, **told)
