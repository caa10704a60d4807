"""Scores of linear attention: dot products of nonlinear features of query and key."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from qkv.errors import (
    DtypeError,
    ShapeError,
    call_user_function,
    unknown_name_error,
    validate_sizes,
)
from qkv.frameworks import get_framework, is_array
from qkv.scores.base import DotProductForm, Score
from qkv.util.caches import memoize
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

    aliases: ClassVar[tuple[str, ...]] = ("linear_attention", "kernel_feature_map")

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


@suggest_keywords
@dataclass(frozen=True)
class Performer(FeatureMap):
    """s = φ(q)·φ(k) ≈ exp(q·k/√d), by positive random features. Linear time for a softmax.

    φ(x) = exp(Wx' − ‖x'‖²/2) / √features with x' = x / d^¼, and rows of W from a Gaussian,
    orthogonal in blocks of d. With `weighting="normalized"` this is an estimate of the softmax of
    scaled dot products; its expected error is `estimate_error`. The same seed gives the same W on
    every framework. `scale` replaces 1/√d.

    >>> x = np.array([[0.3, -0.2]])
    >>> Performer(4096)(x, x).round(2), np.exp(x @ x.T / np.sqrt(2)).round(2)
    (array([[1.1]]), array([[1.1]]))
    """

    aliases: ClassVar[tuple[str, ...]] = ("favor", "random_features")

    features: int = 256
    seed: int = 0
    scale: float | None = None
    phi: str = field(default="performer", init=False, repr=False)

    def __post_init__(self) -> None:
        validate_sizes(features=self.features)
        if not isinstance(self.seed, int) or self.seed < 0:
            raise DtypeError(f"Performer: seed must be a whole number ≥ 0, not {self.seed!r}")
        if self.scale is not None and not (
            isinstance(self.scale, int | float) and 0 < self.scale < math.inf
        ):
            raise DtypeError(f"Performer: scale must be a number above 0, not {self.scale!r}")

    def map_rows(self, x: Array) -> Array:
        fw = get_framework(x)
        x = x * self._scale_of(x) ** 0.5
        directions = draw_directions(x.shape[-1], self.features, self.seed)
        products = fw.matmul(x, fw.cached_constant(directions, x, fw.dtype_name(x)))
        return fw.xp.exp(products - (0.5 * fw.row_sum(x * x) + 0.5 * math.log(self.features)))

    def feature_width(self, query: Array) -> Any:
        return self.features

    def estimate_error(self, query: Array, key: Array) -> Array:
        """Return the expected relative error of each score, (…, n, m).

        √((exp(‖q' + k'‖²) − 1) / features): the root of the mean square over seeds for independent
        rows of W. Orthogonal rows have less. Four times the features halve it.

        >>> x = np.array([[0.3, -0.2]])
        >>> (
        ...     Performer(100).estimate_error(x, x).round(3),
        ...     Performer(400).estimate_error(x, x).round(3),
        ... )
        (array([[0.067]]), array([[0.033]]))
        """
        fw = get_framework(query)
        norms = fw.row_sum(query * query) + fw.xp.matrix_transpose(fw.row_sum(key * key))
        squares = norms + 2 * fw.inner_products(query, key)
        return fw.xp.sqrt((fw.xp.exp(self._scale_of(query) * squares) - 1.0) / self.features)

    def _scale_of(self, x: Array) -> float:
        return x.shape[-1] ** -0.5 if self.scale is None else self.scale


def draw_directions(width: int, features: int, seed: int) -> np.ndarray[Any, Any]:
    """Return (width, features) Gaussian columns, orthogonal in blocks of `width`."""
    return _draw_directions(width, features, seed)


# torch.compile calls the function once and holds its result, as by `assume_constant_result`.
draw_directions._dynamo_marked_constant = True  # type: ignore[attr-defined]


@memoize("scores.performer_directions", 64)
def _draw_directions(width: int, features: int, seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(-(-features // width)):
        orthogonal, triangular = np.linalg.qr(rng.normal(size=(width, width)))
        lengths = np.linalg.norm(rng.normal(size=(width, width)), axis=0)
        blocks.append(orthogonal * np.sign(np.diag(triangular)) * lengths)
    directions: np.ndarray[Any, Any] = np.concatenate(blocks, axis=1)[:, :features].copy()
    return directions
