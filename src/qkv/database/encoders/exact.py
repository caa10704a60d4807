"""An encoder with which only equal keys match."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders.base import Encoder, check_batch
from qkv.database.table import cells
from qkv.errors import ArgumentError
from qkv.scores import ScaledDot, Score
from qkv.util.keyword_hints import suggest_keywords


@suggest_keywords
@dataclass(frozen=True)
class Exact(Encoder):
    """x = ±1/√width; the signs are the bits of a digest of the key.

    Equal keys have the dot product 1. Other keys have about 0 (± 1/√width). Different keys have
    different vectors, so `scores.Exact()` can be used too. The default score gives nearly all the
    weight to an equal key. If there is none, the weight is spread over all rows.

    >>> a, b, c = Exact().encode(["Li", "Li", b"Li"])
    >>> float(a @ b), bool(abs(a @ c) < 0.3)
    (1.0, True)
    """

    width: int = 256
    kind: ClassVar[str] = "exact"
    uses_cosine: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.width < 64 or self.width > 512 or self.width % 8:
            raise ArgumentError(
                f"Exact: width must be a multiple of 8 from 64 to 512, not {self.width}"
            )

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        size = self.width // 8
        codes = b"".join(
            blake2b(digest, digest_size=size).digest()
            for digest in cells.key_digests(check_batch(keys))
        )
        bits = np.unpackbits(np.frombuffer(codes, np.uint8)).reshape(len(keys), self.width)
        return (bits * np.float32(2) - 1) / np.float32(math.sqrt(self.width))

    def default_score(self, rows: int) -> Score:
        # An equal key gets e^τ = m e⁶, the other m − 1 rows about e^0 each: less than 1 % in total.
        return ScaledDot(math.log(max(rows, 1)) + 6)
