"""The line through the values around a query, of pooled moments alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Numbers = np.ndarray[Any, Any]
Pooled = Callable[[Numbers], Numbers]
"""values (m, p) → Σⱼ αⱼ valueⱼ (n, p), for some queries."""


class LocalLine(NamedTuple):
    """v̄ + βᵀ(q − k̄) at each of n queries, for d places and p outputs.

    With k̄ and v̄ the means of keys and values under α, S their covariance and λ a ridge,
    β = (S + λI)⁻¹ cov(k, v): the line of least squares under α. It is linear in the values: the
    j-th counts αⱼ (1 − leverᵀ(kⱼ − k̄)), lever = (S + λI)⁻¹ (k̄ − q).
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
    """The part (n, p) of the values' variance under α that the slope takes away."""


def fit_line(
    pooled: Pooled, query: Numbers, key: Numbers, values: Numbers, ridge: float
) -> LocalLine:
    """The line at queries (n, d) through values (m, p) at keys (m, d), both near the origin."""
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
