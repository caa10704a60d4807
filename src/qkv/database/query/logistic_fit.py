"""Fit a bias and a slope, so that logits become probabilities: Platt scaling."""

from __future__ import annotations

import math

import numpy as np

PRIOR_WEIGHT = 3.0
"""How strongly a = 0 and b = 1 are preferred; it matters for fewer than about 30 pairs."""

MAX_STEPS = 50


def fit_logit(logit: np.ndarray, is_right: np.ndarray) -> tuple[float, float]:
    """Return a and b so that σ(a + b logit) is the probability of `is_right`, both (n,).

    The log loss has the penalty `PRIOR_WEIGHT` (a² + (b − 1)²) / 2. The slope is at least 0.

    >>> fit_logit(np.zeros(0), np.zeros(0))
    (0.0, 1.0)
    >>> bias, slope = fit_logit(np.full(100, 3.0), np.arange(100) < 50)
    >>> bool(abs(bias + 3 * slope) < 0.2)
    True
    """
    x = np.stack([np.ones_like(logit), logit], axis=1)
    prior = np.array([0.0, 1.0])

    def loss(c: np.ndarray) -> float:
        z = x @ c
        penalty = PRIOR_WEIGHT / 2 * float(np.sum((c - prior) ** 2))
        return float(np.sum(np.logaddexp(0, z) - is_right * z)) + penalty

    coefficients, last = prior, loss(prior)
    for _ in range(MAX_STEPS):  # Newton's method, with shorter steps where it overshoots
        p = 0.5 * (1 + np.tanh(x @ coefficients / 2))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + PRIOR_WEIGHT * np.eye(2)
        gradient = x.T @ (p - is_right) + PRIOR_WEIGHT * (coefficients - prior)
        step = np.linalg.solve(hessian, gradient)
        while (now := loss(coefficients - step)) > last and np.abs(step).max() > 1e-9:
            step = step / 2
        coefficients, last = coefficients - step, min(now, last)
        if np.abs(step).max() < 1e-6:
            break
    if coefficients[1] > 0:
        return float(coefficients[0]), float(coefficients[1])
    # The logits do not tell which answers are right.
    count = float(is_right.sum())
    return math.log((count + 1) / (len(is_right) - count + 1)), 0.0
