"""The standard deviation of a prediction, calibrated on rows that were left out.

The weighted variance s² of the values around a prediction is too small where few rows have weight.
So the variance is σ² = a s² + b. The numbers a and b are those under which the left-out values are
most likely, scaled so that about 68 % of them lie within 1 σ and 95 % within 2 σ.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize

from qkv.sklearn.columns import Numbers

MIN_RELATIVE_VARIANCE = 1e-12
"""A variance below this share of the mean squared error counts as 0."""

COVERED_SHARES = {1.0: 0.6827, 2.0: 0.9545}
"""The share of a normal distribution within so many standard deviations."""

LOG_BOUNDS = (-12.0, 4.0)


def fit_variance(error: Numbers, variance: Numbers, weight: Numbers) -> tuple[float, float]:
    """Return a and b of σ² = a s² + b, from errors (m,), variances s² (m,) and weights (m,).

    >>> rng = np.random.default_rng(0)
    >>> variance = rng.uniform(0, 2, 4000)
    >>> a, b = fit_variance(rng.normal(size=4000) * np.sqrt(variance + 1), variance, np.ones(4000))
    >>> round(a, 1), round(b, 1)
    (0.9, 1.1)
    """
    known = np.isfinite(error) & np.isfinite(variance) & (weight > 0)
    error, variance, weight = error[known], np.maximum(variance[known], 0), weight[known]
    if not len(error):
        return 1.0, 0.0
    unit = float(np.average(error**2, weights=weight))
    if unit <= 0:
        return 1.0, 0.0
    square, share = error**2 / unit, variance / unit
    weight = weight / weight.sum()

    def negative_log_likelihood(at: Numbers) -> tuple[float, Numbers]:
        a, b = np.exp(at)
        total = a * share + b + MIN_RELATIVE_VARIANCE
        pull = weight * (1 / total - square / total**2)
        value = float(weight @ (np.log(total) + square / total))
        return value, np.array([a * (pull @ share), b * pull.sum()])

    fits = [
        minimize(
            negative_log_likelihood, start, jac=True, method="L-BFGS-B", bounds=[LOG_BOUNDS] * 2
        )
        for start in ([0.0, -1.0], [-3.0, 0.0])
    ]
    a, b = np.exp(min(fits, key=lambda fit: fit.fun).x)
    ratio = np.sqrt(square / (a * share + b))
    scales = [_weighted_quantile(ratio, weight, q) / k for k, q in COVERED_SHARES.items()]
    scale = max(sum(scales) / len(scales), MIN_RELATIVE_VARIANCE)
    return float(a) * scale**2, float(b) * unit * scale**2


def _weighted_quantile(values: Numbers, weight: Numbers, share: float) -> float:
    """Return the smallest value below which at least this share of the weight lies."""
    order = np.argsort(values)
    below = np.cumsum(weight[order])
    at = min(int(np.searchsorted(below, share)), len(values) - 1)
    return float(values[order[at]])
