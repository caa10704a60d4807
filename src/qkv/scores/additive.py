"""The score of a network with one hidden layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qkv.errors import ShapeError
from qkv.frameworks import get_framework
from qkv.scores.base import (
    DotProductForm,
    Lowering,
    Score,
    broadcast_pairs,
    check_equal_sizes,
    require_array_field,
    sizes_differ,
)
from qkv.scores.tanh_factors import HiddenUnits, build_units
from qkv.scores.tanh_features import evaluate_features
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array, Shape

MAX_TANH_RANGE = 40.0
"""The range of W₁q + W₂k + b from which so many products are needed that tanh itself is faster."""

TANH_TOLERANCE = {"float16": 2.0**-14, "bfloat16": 2.0**-11, "float32": 1e-6}
"""What each tanh may be off by where no tolerance is given; float64 keeps tanh. Its slope is off by
some eight times as much: gradients of 16 bits show that."""


@suggest_keywords
@dataclass(frozen=True)
class Additive(Score):
    """s = vᵀ tanh(W₁q + W₂k + b), with w_query (h, d_q), w_key (h, d_k), v (h,), bias (h,).

    Without w_key the keys are W₂k already, (…, m, h): for those that many queries look at in turn.

    >>> import numpy as np
    >>> one = np.array([[1.0]])
    >>> Additive(one, one, np.array([2.0]))(np.array([[0.5]]), np.array([[-0.5], [30.0]]))
    array([[0., 2.]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("bahdanau", "concat", "mlp")

    w_query: Array
    w_key: Array | None
    v: Array
    bias: Array | None = None
    needs_range: ClassVar[bool] = True

    def __post_init__(self) -> None:
        sizes = {"w_query": require_array_field(self, "w_query", "h", "d_q")[-2]}
        if self.w_key is not None:
            sizes["w_key"] = require_array_field(self, "w_key", "h", "d_k")[-2]
        sizes["v"] = require_array_field(self, "v", "h")[-1]
        if self.bias is not None:
            sizes["bias"] = require_array_field(self, "bias", "h")[-1]
        check_equal_sizes(
            self, "the hidden width h, rows of w_query and w_key and numbers of v,", **sizes
        )

    def __call__(self, query: Array, key: Array) -> Array:
        fw = get_framework(query)
        q, k = broadcast_pairs(*self.hidden_terms(query, key))
        return fw.dot_vector(fw.tanh(q + k, spend=True), self.v)

    def hidden_terms(self, query: Array, key: Array) -> tuple[Array, Array]:
        """W₁q + b (…, n, h) and W₂k (…, m, h)"""
        fw = get_framework(query)
        from_query = fw.inner_products(query, self.w_query)
        if self.bias is not None:
            from_query = from_query + self.bias
        if self.w_key is not None:
            key = fw.inner_products(key, self.w_key)
        return from_query, key

    def find_lowering(
        self, query: Array, key: Array, tolerance: float | None, dtype: str
    ) -> Lowering:
        fw = get_framework(query)
        least = TANH_TOLERANCE.get(dtype, 0.0)
        mass = float(fw.xp.sum(fw.xp.abs(fw.detach(self.v))))
        allowed = max(least, 0.0 if tolerance is None else tolerance / max(mass, 1e-30))
        if not allowed > 0:
            return "float64 keeps tanh itself: give a tolerance to trade digits for speed"
        reach = [_max_abs_per_unit(x) for x in self.hidden_terms(query, key)]
        farthest = max((a + b for a, b in zip(*reach, strict=True)), default=0.0)
        if not farthest <= MAX_TANH_RANGE:
            return (
                f"|W₁q + b| + |W₂k| reaches {farthest:.3g}: over so wide a range a sum of products "
                "is slower than tanh"
            )
        found = build_units(reach[0], reach[1], min(allowed, 0.1))
        error = float(np.sum(fw.to_numpy(fw.xp.abs(fw.detach(self.v))) * found.errors))
        return SeparableAdditive(self.w_query, self.w_key, self.v, self.bias, found), error

    def check_shapes(self, query: Shape, key: Shape) -> None:
        if self.w_key is None and sizes_differ(key[-1], self.v.shape[-1]):
            raise ShapeError(
                f"Additive: without w_key the keys must be (…, m, h) = (…, m, {self.v.shape[-1]}), "
                f"not rows of {key[-1]} numbers"
            )
        for name, w, width in (("w_query", self.w_query, query), ("w_key", self.w_key, key)):
            if w is not None and sizes_differ(w.shape[-1], width[-1]):
                raise ShapeError(
                    f"Additive: {name} must be (h, {width[-1]}) for rows of {width[-1]} numbers, "
                    f"not {tuple(w.shape)}"
                )

    def numbers_per_pair(self, width: int) -> int:
        return int(self.v.shape[-1] or width)  # a graph may not know it


@dataclass(frozen=True)
class SeparableAdditive(Additive):
    """s = Σₕ vₕ Σⱼ fₕⱼ(aₕ) gₕⱼ(bₕ) ≈ vᵀ tanh(a + b), with a = W₁q + b and b = W₂k.

    One dot product, of as many numbers as the units have products together.
    """

    needs_range: ClassVar[bool] = True
    units: HiddenUnits | None = None

    def __call__(self, query: Array, key: Array) -> Array:
        return self.dot_product_form(query, key).compute_scores()

    def dot_product_form(self, query: Array, key: Array) -> DotProductForm:
        a, b = self.hidden_terms(query, key)
        assert self.units is not None
        return DotProductForm(
            evaluate_features(self.units, 0, a), evaluate_features(self.units, 1, b, self.v)
        )

    def dot_product_width(self, width: int) -> int:
        return 0 if self.units is None else self.units.width

    def numbers_per_pair(self, width: int) -> int:
        return 1


def _max_abs_per_unit(x: Array) -> list[float]:
    """The largest |x| of each unit (…, h)."""
    fw = get_framework(x)
    largest = fw.xp.max(fw.xp.abs(fw.detach(x)), axis=tuple(range(len(x.shape) - 1)))
    return [float(y) for y in fw.to_numpy(largest)]
