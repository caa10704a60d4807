"""Text by its letters, its meaning and its words: its encoder unless the caller says how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders.base import Encoder, batch, sharpness, texts
from qkv.database.encoders.calibrate import calibrated
from qkv.database.encoders.characters import Characters
from qkv.database.encoders.heads import Heads
from qkv.database.encoders.lexical import Lexical
from qkv.database.encoders.words import Words
from qkv.errors import ArgumentError
from qkv.scores import ScaledDot, Score

LEXICAL = 0.8
"""What the words themselves count beside a cosine."""

ENOUGH = 64
"""Keys from which it is fitted: fewer say little of which words are rare."""


@dataclass(frozen=True)
class Text(Heads):
    """s(q, k) = √(c_q c_k) cos_letters + √((1 − c_q)(1 − c_k)) cos_words + 0.8 lexical.

    c = 1 / (1 + length/half) is the part of the letters: they tell names and titles apart, slips
    included, where a sentence is known by its words. At `half` letters both count the same. The
    words themselves count in so far as they are rare (`Lexical`), from 64 keys on. Then the
    temperature is fitted too, `sharp` times what it is by the number of rows alone, so that the
    heaviest weight is about the chance that its row is right.

    >>> keys = ["The Alchemist", "A shepherd travels to Egypt in search of a treasure"]
    >>> encoder = Text()
    >>> queries = encoder.query(["the alchmist", "a young man looks for hidden gold"])
    >>> (queries @ encoder.encode(keys).T).argmax(axis=1).tolist()
    [0, 1]
    """

    heads: Any = ()
    half: float = 30.0
    sharp: float = 1.0
    kind: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        if not self.heads:
            heads = {"characters": Characters(), "words": Words(), "lexical": Lexical()}
            object.__setattr__(self, "heads", heads)
        super().__post_init__()
        count = len(self.heads)
        if count not in (2, 3) or self.weights != (1 / count,) * count:
            raise ArgumentError("Text has its own heads, weighed by length: use Heads for others")
        if not self.half > 0:
            raise ArgumentError(f"Text: half must be above 0, not {self.half!r}")
        if not self.sharp > 0:
            raise ArgumentError(f"Text: sharp must be above 0, not {self.sharp!r}")

    @property
    def begins(self) -> int:
        return ENOUGH

    def fit(self, keys: Sequence[Any]) -> Text:
        if len(batch(keys)) < ENOUGH:
            return self
        made = replace(self, heads=tuple(head.fit(keys) for head in self.heads), sharp=1.0)
        return replace(made, sharp=calibrated(made, texts(keys)))

    def score(self, rows: int) -> Score:
        return ScaledDot(self.sharp * sharpness(rows))

    def shares(self, keys: Sequence[Any]) -> np.ndarray:
        length = np.array([len(text) for text in texts(keys)], np.float64)
        letters = 1 / (1 + length / self.half)
        found = [letters, 1 - letters, np.full(len(length), LEXICAL)]
        return np.stack(found[: len(self.heads)], axis=1)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"half": self.half, "sharp": self.sharp}

    @classmethod
    def restore(
        cls, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray], given: Encoder | None
    ) -> Text:
        heads = Heads.restore(settings, arrays, given)
        told = settings["half"], settings.get("sharp", 1.0)
        return cls(heads.heads, heads.weights, heads.names, *told)
