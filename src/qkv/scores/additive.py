"""The score of a network with one hidden layer."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.arrays import namespace
from qkv.errors import ShapeError
from qkv.scores.base import Score, agree, array_of, pairs
from qkv.types import Array, Shape


@dataclass(frozen=True)
class Additive(Score):
    """s = vᵀ tanh(W₁q + W₂k + b), with w_query (h, d_q), w_key (h, d_k), v (h,), bias (h,).

    >>> import numpy as np
    >>> one = np.array([[1.0]])
    >>> Additive(one, one, np.array([2.0]))(np.array([[0.5]]), np.array([[-0.5], [30.0]]))
    array([[0., 2.]])
    """

    w_query: Array
    w_key: Array
    v: Array
    bias: Array | None = None

    def __post_init__(self) -> None:
        sizes = {
            "w_query": array_of(self, "w_query", "h", "d_q")[-2],
            "w_key": array_of(self, "w_key", "h", "d_k")[-2],
            "v": array_of(self, "v", "h")[-1],
        }
        if self.bias is not None:
            sizes["bias"] = array_of(self, "bias", "h")[-1]
        agree(self, "the hidden width h", **sizes)

    def __call__(self, query: Array, key: Array) -> Array:
        xp = namespace(query)
        from_query = xp.matmul(query, xp.matrix_transpose(self.w_query))
        if self.bias is not None:
            from_query = from_query + self.bias
        q, k = pairs(from_query, xp.matmul(key, xp.matrix_transpose(self.w_key)))
        return xp.matmul(xp.tanh(q + k), self.v[..., :, None])[..., 0]

    def check(self, query: Shape, key: Shape) -> None:
        for name, w, width in (("w_query", self.w_query, query), ("w_key", self.w_key, key)):
            if w.shape[-1] != width[-1]:
                raise ShapeError(
                    f"Additive: {name} must be (h, {width[-1]}) for rows of {width[-1]} numbers, "
                    f"not {tuple(w.shape)}"
                )

    def footprint(self, width: int) -> int:
        return int(self.v.shape[-1])
