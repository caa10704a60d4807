"""Scores that fall with the distance between a query and a key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from qkv.arrays import is_array, of, over, tree
from qkv.scores.base import Affine, Form, Lowering, Score, pairs
from qkv.types import Array


def squared_distance(query: Array, key: Array, width: float | Array) -> Array:
    """‖q − k‖² / width², by differences: the expanded square loses its digits far from the origin.

    Scaled before it is squared: a narrow width must not underflow."""
    fw, _ = of(query), of(key)  # a list is refused in our words
    q, k = pairs(over(query, width), over(key, width))
    difference = q - k
    return fw.xp.sum(difference * difference, axis=-1)


@dataclass(frozen=True)
class Gaussian(Score):
    """s = −‖q − k‖² / 2σ²; its softmax is the Nadaraya–Watson estimator.

    >>> import numpy as np
    >>> Gaussian(0.5)(np.array([[1.0]]), np.array([[1.0], [2.0]]))
    array([[-0., -2.]])
    """

    also: ClassVar[tuple[str, ...]] = ("rbf", "l2", "euclidean", "nadaraya_watson")

    bandwidth: float | Array = 1.0
    numbers: ClassVar[dict[str, bool]] = {"bandwidth": True}
    by_number: ClassVar[bool] = True
    ranged: ClassVar[bool] = True

    def __call__(self, query: Array, key: Array) -> Array:
        return squared_distance(query, key, self.bandwidth) * -0.5

    @property
    def radial(self) -> bool:
        return not is_array(self.bandwidth)

    def affine(self, query: Array, norm: Array) -> Affine | None:
        return square(query, norm, self.bandwidth, 0.5) if self.radial else None

    def lowered(self, query: Array, key: Array, tolerance: float | None, dtype: str) -> Lowering:
        fw = of(query)
        if dtype in ("float16", "bfloat16"):
            # Products of 16-bit numbers are exact in float32, and its sums lose less than the
            # rounding to 16 bits has lost already, however far the range.
            return Expanded(self.bandwidth), 0.0
        if 0 in (*query.shape, *key.shape):
            return "there is nothing to compare"
        rows = fw.xp.reshape(fw.detach(key), (-1, key.shape[-1]))
        expanded = Expanded(self.bandwidth, fw.xp.sum(rows, axis=0) / rows.shape[0])
        looked = tree.map_arrays(fw, fw.detach, expanded)  # an activation checkpoint counts nodes
        reach = sum(
            math.sqrt(float(fw.xp.max(fw.xp.sum(x * x, axis=-1))))
            for x in (looked.scaled(fw.detach(x)) for x in (query, key))
        )
        unit = 2.0**-53 if dtype == "float64" else 2.0**-24
        near = reach * reach * unit
        error = near * (query.shape[-1] + 3)
        if near <= unit * LENGTH or (tolerance is not None and error <= tolerance):
            return expanded, error
        return (
            f"queries and keys lie up to {reach:.3g} bandwidths from their middle, where the "
            f"expanded square is off by up to {error:.1g}"
        )


LENGTH = 2.0**10
"""(‖q‖ + ‖k‖)² / σ² up to which the expanded square keeps its digits as well as a dot product."""


@dataclass(frozen=True)
class Expanded(Score):
    """s = q′ᵀk′ − ‖q′‖²/2 − ‖k′‖²/2, with x′ = (x − centre) / σ: the Gaussian's as a product.

    >>> import numpy as np
    >>> Expanded(0.5, np.zeros(1))(np.array([[1.0]]), np.array([[1.0], [2.0]]))
    array([[ 0., -2.]])
    """

    bandwidth: float | Array
    centre: Array | None = None

    def __call__(self, query: Array, key: Array) -> Array:
        return self.form(query, key).scores()

    def scaled(self, x: Array) -> Array:
        if self.centre is not None:
            x = x - self.centre[(*[None] * (len(x.shape) - 1), ...)]  # JAX may forbid to add axes
        return over(_each_head(x, self.bandwidth), self.bandwidth)

    def form(self, query: Array, key: Array) -> Form:
        if self.centre is None and not is_array(self.bandwidth):
            scale = 1 / self.bandwidth**2  # 16-bit vectors as they stand, and the rest in float32
            bias, offset = (_square(x, -0.5 * scale) for x in (key, query))
            return Form(query, key, bias, offset, scale=scale)
        query, key = self.scaled(query), self.scaled(key)
        return Form(query, key, _square(key, -0.5), _square(query, -0.5))


MODERATE = (1e-6, 1e6)
"""Bandwidths whose squares no dtype loses."""


@dataclass(frozen=True)
class Quick(Gaussian):
    """The Gaussian's scores as products where these queries and keys lose no digits by it, else by
    differences: for a call so short that choosing between the two would take longest.

    >>> import numpy as np
    >>> Quick(0.5)(np.array([[1.0]]), np.array([[1.0], [2.0]]))
    array([[ 0., -2.]])
    """

    def __call__(self, query: Array, key: Array) -> Array:
        fw, scale = of(query), self.bandwidth**-2
        squares = [fw.row_sum(x * x) for x in (query, key)]
        reach = sum(math.sqrt(float(fw.detach(x).max())) for x in squares)
        if not reach * reach * scale <= LENGTH:
            return super().__call__(query, key)
        half = (squares[0] + fw.xp.matrix_transpose(squares[1])) * 0.5
        return (fw.inner(query, key) - half) * scale


def _each_head(x: Array, bandwidth: float | Array) -> Array:
    """x (…, few, r, d) with each head repeated for those that share it, where (…, h, 1, 1)
    bandwidths are of more heads."""
    heads = tuple(getattr(bandwidth, "shape", ()))[-3:-2]
    few = x.shape[-3:-2]
    if () in (heads, few) or heads[0] == 1 or few[0] in (1, heads[0]):
        return x
    return of(x).each_head(x, heads[0])


def _square(x: Array, factor: float) -> Array:
    """‖x‖² · factor (…, r, 1), in float32 at least."""
    fw = of(x)
    x = fw.astype(x, "float32") if fw.dtype(x) in ("float16", "bfloat16") else x
    return fw.xp.sum(x * x, axis=-1, keepdims=True) * factor


def square(query: Array, norm: Array, width: float, factor: float) -> Affine | None:
    """−factor ‖q − k‖² / width², expanded; None where a float does not hold the square."""
    if not 1e-150 < width < 1e150:
        return None
    factor /= width**2
    offset = of(query).xp.sum(query * query, axis=-1)
    return Affine(query * (2 * factor), None, norm * norm * -factor, offset * -factor)


@dataclass(frozen=True)
class Laplace(Score):
    """s = −‖q − k‖₁ / b

    >>> import numpy as np
    >>> Laplace()(np.array([[1.0, 1.0]]), np.array([[1.0, 3.0]]))
    array([[-2.]])
    """

    also: ClassVar[tuple[str, ...]] = ("l1", "manhattan", "laplacian")

    bandwidth: float | Array = 1.0
    numbers: ClassVar[dict[str, bool]] = {"bandwidth": False}
    by_number: ClassVar[bool] = True

    def __call__(self, query: Array, key: Array) -> Array:
        xp = of(query).xp
        q, k = pairs(query, key)
        return xp.sum(xp.abs(q - k), axis=-1) / self.bandwidth * -1.0
