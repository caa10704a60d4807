"""The additive score: a network with one hidden layer."""

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
"""Largest |W₁q + b| + |W₂k| at which a sum of products is faster than tanh itself."""

TANH_TOLERANCE = {"float16": 2.0**-14, "bfloat16": 2.0**-11, "float32": 1e-6}
"""Default error of each tanh, by dtype; in float64, tanh itself is computed. The error of the
derivative is about eight times as large, which shows in 16-bit gradients."""


@suggest_keywords
@dataclass(frozen=True)
class Additive(Score):
    """s = vᵀ tanh(W₁q + W₂k + b), with w_query (h, d_q), w_key (h, d_k), v (h,), bias (h,).

    With w_key=None the keys must already be W₂k, (…, m, h). This saves the projection when the
    same keys serve many calls.

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
            self, "the hidden widths (rows of w_query and w_key, length of v and bias)", **sizes
        )

    def __call__(self, query: Array, key: Array) -> Array:
        fw = get_framework(query)
        q, k = broadcast_pairs(*self.hidden_terms(query, key))
        return fw.dot_vector(fw.tanh(q + k, spend=True), self.v)

    def hidden_terms(self, query: Array, key: Array) -> tuple[Array, Array]:
        """Return W₁q + b (…, n, h) and W₂k (…, m, h)."""
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
            return "float64 computes tanh exactly: pass tolerance= to allow a faster approximation"
        ranges = [_max_abs_per_unit(x) for x in self.hidden_terms(query, key)]
        farthest = max((a + b for a, b in zip(*ranges, strict=True)), default=0.0)
        if not farthest <= MAX_TANH_RANGE:
            return (
                f"|W₁q + b| + |W₂k| reaches {farthest:.3g}: over such a range a sum of products "
                "is slower than tanh"
            )
        units = build_units(ranges[0], ranges[1], min(allowed, 0.1))
        error = float(np.sum(fw.to_numpy(fw.xp.abs(fw.detach(self.v))) * units.errors))
        return SeparableAdditive(self.w_query, self.w_key, self.v, self.bias, units), error

    def check_shapes(self, query: Shape, key: Shape) -> None:
        if self.w_key is None and sizes_differ(key[-1], self.v.shape[-1]):
            raise ShapeError(
                f"Additive: without w_key, key must be (…, m, h) = (…, m, {self.v.shape[-1]}), "
                f"but it has {key[-1]} columns"
            )
        for name, w, width in (("w_query", self.w_query, query), ("w_key", self.w_key, key)):
            if w is not None and sizes_differ(w.shape[-1], width[-1]):
                raise ShapeError(
                    f"Additive: {name} must be (h, {width[-1]}) for vectors of width {width[-1]}, "
                    f"not {tuple(w.shape)}"
                )

    def numbers_per_pair(self, width: int) -> int:
        return int(self.v.shape[-1] or width)  # None in a graph with unknown widths


@dataclass(frozen=True)
class SeparableAdditive(Additive, new_formula=True):
    """s = Σₕ vₕ Σⱼ fₕⱼ(aₕ) gₕⱼ(bₕ) ≈ vᵀ tanh(a + b), with a = W₁q + b and b = W₂k.

    This is one dot product. Its width is the number of products of all units.
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
    """Return the largest |x| of each unit, over all axes but the last of x (…, h)."""
    fw = get_framework(x)
    largest = fw.xp.max(fw.xp.abs(fw.detach(x)), axis=tuple(range(len(x.shape) - 1)))
    return [float(y) for y in fw.to_numpy(largest)]
