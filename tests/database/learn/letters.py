"""A made-up language, and an encoder of letters to learn it with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders import (
    Encoder,
)
from qkv.database.encoders.learned import (
    pool_tokens,
)

ENGLISH = ["cat", "dog", "house", "tree", "water", "bread", "night", "milk", "book", "hand"]
MADE_UP = ["zub", "kip", "hoam", "drev", "vada", "klib", "natt", "lait", "knig", "ruka"]
PAIRS = list(zip(MADE_UP, ENGLISH, strict=True))


@dataclass(frozen=True)
class Letters(Encoder):
    """Each letter a token: an encoder with tokens that needs nothing installed."""

    kind: ClassVar[str] = "letters"

    @property
    def table(self) -> np.ndarray:
        return np.random.default_rng(5).normal(size=(128, 12)).astype(np.float32)

    @property
    def width(self) -> int:
        return 12

    def tokens(self, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        lists = [[min(ord(x), 127) for x in key] for key in keys]
        offsets = np.cumsum([0, *map(len, lists)])
        return np.array([x for one in lists for x in one], np.int32), offsets

    def encode(self, keys: Any) -> np.ndarray:
        ids, offsets = self.tokens(keys)
        x = pool_tokens(self.table, np.ones(len(ids), np.float32), ids, offsets)
        length = np.linalg.norm(x, axis=1, keepdims=True)
        return x / np.where(length == 0, 1, length)

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind}

    @classmethod
    def build(cls, settings: Any, arrays: Any) -> Letters:
        return cls()


def top(encoder: Encoder, queries: list[Any], keys: list[Any]) -> list[int]:
    scores = encoder.default_score(len(keys))(encoder.encode_query(queries), encoder.encode(keys))
    return np.asarray(scores).argmax(axis=1).tolist()
