"""Scores that fall with the distance between a query and a key."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.arrays import namespace
from qkv.errors import positive
from qkv.scores.base import Score, pairs
from qkv.types import Array


def squared_distance(query: Array, key: Array) -> Array:
    """‖q − k‖², by differences: the expanded square loses its digits far from the origin."""
    q, k = pairs(query, key)
    difference = q - k
    return namespace(query).sum(difference * difference, axis=-1)


@dataclass(frozen=True)
class Gaussian(Score):
    """s = −‖q − k‖² / 2σ²; its softmax is the Nadaraya–Watson estimator.

    >>> import numpy as np
    >>> Gaussian(0.5)(np.array([[1.0]]), np.array([[1.0], [2.0]]))
    array([[-0., -2.]])
    """

    bandwidth: float | Array = 1.0

    def __post_init__(self) -> None:
        positive(self, "bandwidth")

    def __call__(self, query: Array, key: Array) -> Array:
        # Scaled before it is squared: a narrow bandwidth must not underflow.
        return squared_distance(query / self.bandwidth, key / self.bandwidth) * -0.5

    def footprint(self, width: int) -> int:
        return max(width, 1)


@dataclass(frozen=True)
class Laplace(Score):
    """s = −‖q − k‖₁ / b

    >>> import numpy as np
    >>> Laplace()(np.array([[1.0, 1.0]]), np.array([[1.0, 3.0]]))
    array([[-2.]])
    """

    bandwidth: float | Array = 1.0

    def __post_init__(self) -> None:
        positive(self, "bandwidth")

    def __call__(self, query: Array, key: Array) -> Array:
        xp = namespace(query)
        q, k = pairs(query, key)
        return xp.sum(xp.abs(q - k), axis=-1) / self.bandwidth * -1.0

    def footprint(self, width: int) -> int:
        return max(width, 1)
