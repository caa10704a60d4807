"""A weighted least-squares line around each query, computed from pooled moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Numbers = np.ndarray[Any, Any]
Pooled = Callable[[Numbers], Numbers]
"""A function from values (m, p) to Σⱼ αⱼ valueⱼ (n, p), for n queries."""


class LocalLine(NamedTuple):
    """v̄ + βᵀ(q − k̄) at each of n queries, for d features and p outputs.

    k̄ and v̄ are the means of keys and values under α, S is the covariance of the keys and λ a
    ridge. Then β = (S + λI)⁻¹ cov(k, v) is the least-squares line under α. It is linear in the
    values: value j has the weight αⱼ (1 − leverᵀ(kⱼ − k̄)), lever = (S + λI)⁻¹ (k̄ − q).
    """

    value: Numbers
    """(n, p)"""
    slope: Numbers
    """(n, d, p)"""
    lever: Numbers
    """(n, d)"""
    key: Numbers
    """k̄ (n, d)"""
    mean: Numbers
    """v̄ (n, p)"""
    explained: Numbers
    """The variance (n, p) of the values under α that the slope explains."""

    def variance(self, p: int) -> Numbers:
        """Return Σⱼ αⱼ (vⱼ − line)² (n, p), for p values v followed by their squares."""
        return self.mean[:, p:] - self.mean[:, :p] ** 2 - self.explained[:, :p]


def fit_line(
    pooled: Pooled, query: Numbers, key: Numbers, values: Numbers, ridge: float
) -> LocalLine:
    """Fit the line at queries (n, d) to values (m, p) at keys (m, d), both near the origin."""
    (n, d), p = query.shape, values.shape[1]
    one, two = np.triu_indices(d)
    pieces = [values, key, (key[:, :, None] * values[:, None]).reshape(len(key), -1)]
    found = pooled(np.concatenate([*pieces, key[:, one] * key[:, two]], axis=1))
    mean, middle, cross, square = np.split(found, np.cumsum([p, d, d * p]), axis=1)
    spread = np.empty((n, d, d))
    spread[:, one, two] = spread[:, two, one] = square
    spread -= middle[:, :, None] * middle[:, None]
    spread[:, range(d), range(d)] += ridge
    cross = cross.reshape(n, d, p) - middle[:, :, None] * mean[:, None]
    away = middle - query
    solved = np.linalg.solve(spread, np.concatenate([cross, away[..., None]], axis=2))
    slope, lever = solved[..., :-1], solved[..., -1]
    value = mean - np.einsum("nd,ndp->np", away, slope)
    explained = (slope * (cross + ridge * slope)).sum(1)
    return LocalLine(value, slope, lever, middle, mean, explained)
