"""A score times a gate that opens and closes with its query and key."""

from __future__ import annotations

from dataclasses import dataclass, field

from qkv.arrays import is_array, namespace
from qkv.errors import ShapeError
from qkv.scores.base import Score, array_of, inner_score
from qkv.scores.product import Dot
from qkv.types import Array, Shape


def sigmoid(x: Array) -> Array:
    """1 / (1 + e⁻ˣ), written so that nothing overflows."""
    return (namespace(x).tanh(x * 0.5) + 1.0) * 0.5


@dataclass(frozen=True)
class Gated(Score):
    """s = σ(w_query·q + w_key·k + bias) · score(q, k), with w_query (d_q,), w_key (d_k,).

    >>> import numpy as np
    >>> zero = np.zeros(2)
    >>> Gated(zero, zero)(np.array([[1.0, 2.0]]), np.array([[3.0, 4.0]]))
    array([[5.5]])
    """

    w_query: Array
    w_key: Array
    bias: float | Array | None = None
    score: Score = field(default_factory=Dot)

    def __post_init__(self) -> None:
        array_of(self, "w_query", "d_q")
        array_of(self, "w_key", "d_k")
        inner_score(self)
        if is_array(self.bias) and tuple(self.bias.shape) not in ((), (1,)):  # type: ignore[union-attr]
            raise ShapeError("Gated: bias is one number, not an array of many")

    def __call__(self, query: Array, key: Array) -> Array:
        xp = namespace(query)
        logit = xp.matmul(query, self.w_query[..., :, None])
        logit = logit + xp.matrix_transpose(xp.matmul(key, self.w_key[..., :, None]))
        if self.bias is not None:
            logit = logit + self.bias
        return sigmoid(logit) * self.score(query, key)

    def check(self, query: Shape, key: Shape) -> None:
        for name, w, width in (("w_query", self.w_query, query), ("w_key", self.w_key, key)):
            if w.shape[-1] != width[-1]:
                raise ShapeError(
                    f"Gated: {name} must be ({width[-1]},) for rows of {width[-1]} numbers, "
                    f"not {tuple(w.shape)}"
                )
        self.score.check(query, key)

    def footprint(self, width: int) -> int:
        return self.score.footprint(width) + 1
