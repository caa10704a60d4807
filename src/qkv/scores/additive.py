"""The score of a network with one hidden layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qkv.arrays import of
from qkv.errors import ShapeError
from qkv.scores.base import Form, Lowering, Score, agree, array_of, differ, pairs
from qkv.scores.features import features
from qkv.scores.separable import Units, units
from qkv.types import Array, Shape

FARTHEST = 40.0
"""The range of W₁q + W₂k + b from which so many products are needed that tanh itself is faster."""

ACCURACY = {"float16": 2.0**-14, "bfloat16": 2.0**-11, "float32": 1e-6}
"""What each tanh may be off by where no tolerance is given; float64 keeps tanh. Its slope is off by
some eight times as much: gradients of 16 bits show that."""


@dataclass(frozen=True)
class Additive(Score):
    """s = vᵀ tanh(W₁q + W₂k + b), with w_query (h, d_q), w_key (h, d_k), v (h,), bias (h,).

    Without w_key the keys are W₂k already, (…, m, h): for those that many queries look at in turn.

    >>> import numpy as np
    >>> one = np.array([[1.0]])
    >>> Additive(one, one, np.array([2.0]))(np.array([[0.5]]), np.array([[-0.5], [30.0]]))
    array([[0., 2.]])
    """

    also: ClassVar[tuple[str, ...]] = ("bahdanau", "concat", "mlp")

    w_query: Array
    w_key: Array | None
    v: Array
    bias: Array | None = None
    ranged: ClassVar[bool] = True

    def __post_init__(self) -> None:
        sizes = {"w_query": array_of(self, "w_query", "h", "d_q")[-2]}
        if self.w_key is not None:
            sizes["w_key"] = array_of(self, "w_key", "h", "d_k")[-2]
        sizes["v"] = array_of(self, "v", "h")[-1]
        if self.bias is not None:
            sizes["bias"] = array_of(self, "bias", "h")[-1]
        agree(self, "the hidden width h, rows of w_query and w_key and numbers of v,", **sizes)

    def __call__(self, query: Array, key: Array) -> Array:
        fw = of(query)
        q, k = pairs(*self.hidden(query, key))
        return fw.dot(fw.tanh(q + k, spend=True), self.v)

    def hidden(self, query: Array, key: Array) -> tuple[Array, Array]:
        """W₁q + b (…, n, h) and W₂k (…, m, h)"""
        fw = of(query)
        from_query = fw.inner(query, self.w_query)
        if self.bias is not None:
            from_query = from_query + self.bias
        if self.w_key is not None:
            key = fw.inner(key, self.w_key)
        return from_query, key

    def lowered(self, query: Array, key: Array, tolerance: float | None, dtype: str) -> Lowering:
        fw = of(query)
        least = ACCURACY.get(dtype, 0.0)
        mass = float(fw.xp.sum(fw.xp.abs(fw.detach(self.v))))
        allowed = max(least, 0.0 if tolerance is None else tolerance / max(mass, 1e-30))
        if not allowed > 0:
            return "float64 keeps tanh itself: give a tolerance to trade digits for speed"
        reach = [_reach(x) for x in self.hidden(query, key)]
        farthest = max((a + b for a, b in zip(*reach, strict=True)), default=0.0)
        if not farthest <= FARTHEST:
            return (
                f"|W₁q + b| + |W₂k| reaches {farthest:.3g}: over so wide a range a sum of products "
                "is slower than tanh"
            )
        found = units(reach[0], reach[1], min(allowed, 0.1))
        error = float(np.sum(fw.to_numpy(fw.xp.abs(fw.detach(self.v))) * found.errors))
        return Separable(self.w_query, self.w_key, self.v, self.bias, found), error

    def check(self, query: Shape, key: Shape) -> None:
        if self.w_key is None and differ(key[-1], self.v.shape[-1]):
            raise ShapeError(
                f"Additive: without w_key the keys must be (…, m, h) = (…, m, {self.v.shape[-1]}), "
                f"not rows of {key[-1]} numbers"
            )
        for name, w, width in (("w_query", self.w_query, query), ("w_key", self.w_key, key)):
            if w is not None and differ(w.shape[-1], width[-1]):
                raise ShapeError(
                    f"Additive: {name} must be (h, {width[-1]}) for rows of {width[-1]} numbers, "
                    f"not {tuple(w.shape)}"
                )

    def footprint(self, width: int) -> int:
        return int(self.v.shape[-1] or width)  # a graph may not know it


@dataclass(frozen=True)
class Separable(Additive):
    """s = Σₕ vₕ Σⱼ fₕⱼ(aₕ) gₕⱼ(bₕ) ≈ vᵀ tanh(a + b), with a = W₁q + b and b = W₂k.

    One dot product, of as many numbers as the units have products together.
    """

    ranged: ClassVar[bool] = True
    units: Units | None = None

    def __call__(self, query: Array, key: Array) -> Array:
        return self.form(query, key).scores()

    def form(self, query: Array, key: Array) -> Form:
        a, b = self.hidden(query, key)
        assert self.units is not None
        return Form(features(self.units, 0, a), features(self.units, 1, b, self.v))

    def form_width(self, width: int) -> int:
        return 0 if self.units is None else self.units.width

    def footprint(self, width: int) -> int:
        return 1


def _reach(x: Array) -> list[float]:
    """The largest |x| of each unit (…, h)."""
    fw = of(x)
    largest = fw.xp.max(fw.xp.abs(fw.detach(x)), axis=tuple(range(len(x.shape) - 1)))
    return [float(y) for y in fw.to_numpy(largest)]
