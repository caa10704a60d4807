"""Scores of linear attention: dot products of nonlinear features of query and key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from qkv.errors import DtypeError, ShapeError, call_user_function, unknown_name_error
from qkv.frameworks import get_framework, is_array
from qkv.scores.base import DotProductForm, Score
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array


def elu_features(x: Array) -> Array:
    """Return elu(x) + 1: x + 1 above 0, exp(x) below."""
    fw = get_framework(x)
    below = fw.xp.exp(fw.fill_unless(x, fw.xp.logical_not(x > 0)))
    return fw.xp.where(x > 0, x + 1.0, below)


def relu_features(x: Array) -> Array:
    """Return max(0, x)."""
    return get_framework(x).fill_unless(x, get_framework(x).xp.logical_not(x < 0))


def exponential_features(x: Array) -> Array:
    """Return exp(x)."""
    return get_framework(x).xp.exp(x)


FEATURES: dict[str, Callable[[Array], Array]] = {
    "elu": elu_features,
    "relu": relu_features,
    "exp": exponential_features,
}


@suggest_keywords
@dataclass(frozen=True)
class FeatureMap(Score):
    """s = φ(q)·φ(k), for a map φ of rows: (…, n, d) → (…, n, r). The score of linear attention.

    `phi` is "elu" (elu(x) + 1), "relu", "exp" or a function. With `weighting="raw"` or
    "normalized", the sum over the keys is φ(q)·Σ φ(k) vᵀ: n queries and m keys take O(n + m) time,
    with a causal mask too. `explain` says when. "normalized" divides by φ(q)·Σ φ(k); then a
    function must not return negative numbers.

    >>> import numpy as np
    >>> FeatureMap()(np.array([[1.0, 0.0]]), np.array([[0.0, 2.0], [-1.0, 0.0]])).round(3)
    array([[5.   , 1.736]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("linear_attention", "performer", "kernel_feature_map")

    phi: str | Callable[[Array], Array] = "elu"

    def __post_init__(self) -> None:
        if isinstance(self.phi, str):
            if self.phi not in FEATURES:
                raise unknown_name_error("phi", self.phi, FEATURES)
        elif not callable(self.phi):
            raise DtypeError(
                "FeatureMap: phi must be a name or a function (…, n, d) → (…, n, r), not "
                f"{type(self.phi).__name__}"
            )

    @property
    def is_nonnegative(self) -> bool:  # type: ignore[override]
        return isinstance(self.phi, str)

    def __call__(self, query: Array, key: Array) -> Array:
        fw = get_framework(query)
        return fw.inner_products(self.map_rows(query), self.map_rows(key))

    def map_rows(self, x: Array) -> Array:
        """Return the features of rows."""
        if isinstance(self.phi, str):
            return FEATURES[self.phi](x)
        out = call_user_function(self.phi, x, takes="FeatureMap: phi must take one array")
        fw = get_framework(x)
        if not is_array(out) or get_framework(out) is not fw:
            raise DtypeError(f"FeatureMap: phi must return an array of {fw.name}")
        shape, expected = fw.static_shape(out), fw.static_shape(x)
        if shape[:-1] != expected[:-1]:
            raise ShapeError(
                f"FeatureMap: phi returned shape {shape} for rows {expected}; expected "
                f"{(*expected[:-1], 'r')}"
            )
        return fw.astype(out, fw.dtype_name(x))

    def dot_product_form(self, query: Array, key: Array) -> DotProductForm:
        return DotProductForm(self.map_rows(query), self.map_rows(key))

    def feature_width(self, query: Array) -> Any:
        """Return the number of features of rows like these."""
        if isinstance(self.phi, str):
            return query.shape[-1]
        return self.map_rows(query[..., :1, :]).shape[-1]
