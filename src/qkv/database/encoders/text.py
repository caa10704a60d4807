"""Text by its letters and by its meaning: what text is encoded by unless the caller says how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders.base import Encoder, texts
from qkv.database.encoders.characters import Characters
from qkv.database.encoders.heads import Heads
from qkv.database.encoders.words import Words
from qkv.errors import ArgumentError


@dataclass(frozen=True)
class Text(Heads):
    """s(q, k) = √(c_q c_k) cos_letters + √((1 − c_q)(1 − c_k)) cos_words.

    c = 1 / (1 + length/half) is the part of the letters: they tell names and titles apart, slips
    included, where a sentence is known by its words. At `half` letters both count the same.

    >>> keys = ["The Alchemist", "A shepherd travels to Egypt in search of a treasure"]
    >>> encoder = Text()
    >>> queries = encoder.query(["the alchmist", "a young man looks for hidden gold"])
    >>> (queries @ encoder.encode(keys).T).argmax(axis=1).tolist()
    [0, 1]
    """

    heads: Any = ()
    half: float = 30.0
    kind: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        if not self.heads:
            heads = {"characters": Characters(), "words": Words()}
            object.__setattr__(self, "heads", heads)
        super().__post_init__()
        if len(self.heads) != 2 or self.weights != (0.5, 0.5):
            raise ArgumentError("Text has two heads, weighed by length: use Heads for others")
        if not self.half > 0:
            raise ArgumentError(f"Text: half must be above 0, not {self.half!r}")

    def shares(self, keys: Sequence[Any]) -> np.ndarray:
        length = np.array([len(text) for text in texts(keys)], np.float64)
        letters = 1 / (1 + length / self.half)
        return np.stack([letters, 1 - letters], axis=1)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"half": self.half}

    @classmethod
    def restore(
        cls, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray], given: Encoder | None
    ) -> Text:
        heads = Heads.restore(settings, arrays, given)
        return cls(heads.heads, heads.weights, heads.names, settings["half"])
