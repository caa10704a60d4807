"""Bandwidths of the columns: by a rule, or by the leave-one-out error.

    L(h) = Σᵢ wᵢ loss(ŷ₋ᵢ(xᵢ), yᵢ)        ŷ₋ᵢ: the prediction of row i from all others

L has a closed form in the weights αᵢⱼ. For the softmax of a Gaussian score so has its gradient:
with sᵢⱼ = −‖(xᵢ − xⱼ)/h‖²/2,  ∂ŷ₋ᵢ/∂sᵢⱼ = αᵢⱼ uᵢⱼ (rᵢⱼ − r̄ᵢ)  and  ∂sᵢⱼ/∂log hₖ = ((xᵢ −
xⱼ)ₖ/hₖ)². For the mean, u = 1 and r = yⱼ − ŷᵢ. `local_line.LocalLine` has both for the line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qkv.attention import weights
from qkv.scores import Score
from qkv.sklearn.columns import Features, Numbers
from qkv.sklearn.local_line import LocalLine, fit_line
from qkv.util.types import ProgressCallback
from qkv.weightings import Weighting

DEFAULT_RIDGE = 1e-2
"""The default ridge λ, in squared bandwidths."""

RIDGE_CANDIDATES = (1e-3, DEFAULT_RIDGE, 1e-1, 1.0)
"""The ridges that a search tries."""

MIN_PROBABILITY = 1e-3
"""The probability added to each class, because a line may fall below 0."""

LOG_BANDWIDTH_BOUNDS = (-4.0, 5.0)
"""Bounds of log h in standard deviations; at the upper one a column has no effect."""

PRIOR_ROWS = 0.5
"""The penalty, in rows, for a column that becomes e times wider or narrower.

With few rows, leave-one-out alone would select columns that matter by chance."""

MIN_RELATIVE_ERROR = 1e-12
"""An error below this share of the variance counts as 0."""

MAX_STEPS = 100
"""The most steps of the descent."""

MAX_WEIGHTS_PER_BLOCK = 2**20
"""The most weights that are held at once."""

Loss = Callable[[Numbers, Numbers, Numbers], tuple[float, Numbers]]
"""(predicted (n, p), value (n, p), weight (n,)) → its sum and ∂/∂predicted."""


def squared_error(predicted: Numbers, value: Numbers, weight: Numbers) -> tuple[float, Numbers]:
    """Return Σᵢ wᵢ ‖ŷᵢ − yᵢ‖² and its gradient."""
    gap = (predicted - value) * weight[:, None]
    return float(((predicted - value) * gap).sum()), 2 * gap


def log_loss(predicted: Numbers, value: Numbers, weight: Numbers) -> tuple[float, Numbers]:
    """Return −Σᵢ wᵢ log pᵢ of the true classes, and its gradient.

    `MIN_PROBABILITY` is added to each class, so that none is impossible.
    """
    p = np.maximum(predicted, 0) + MIN_PROBABILITY
    pull = -weight[:, None] * value / p
    return float(-(weight[:, None] * value * np.log(p)).sum()), np.where(predicted > 0, pull, 0)


@dataclass
class Examples:
    """Keys (m, D) in standard deviations, values (m, p), and the weight of each row (m,)."""

    key: Numbers
    value: Numbers
    weight: Numbers
    columns: Features
    loss: Loss
    slope_mask: Numbers
    """The features (D,) along which the fit has a slope."""
    score: Score
    weighting: Weighting

    def leave_one_out_error(self, width: Numbers, ridge: float = DEFAULT_RIDGE) -> float:
        """Return L(h) for any score and weighting, h (d,)."""
        total = self.loss(self.predict_left_out(width, ridge), self.value, self.weight)[0]
        return total / float(self.weight.sum())

    def predict_left_out(self, width: Numbers, ridge: float = DEFAULT_RIDGE) -> Numbers:
        """Return the leave-one-out predictions ŷ₋ᵢ(xᵢ) (m, p)."""
        return np.concatenate([line.value for *_, line in self._iterate_left_out(width, ridge)])

    def left_out_variance(self, width: Numbers, ridge: float) -> tuple[Numbers, Numbers]:
        """Return the leave-one-out predictions and the variance of the values around them (m, p).

        The values must be near 0 and of similar size.
        """
        p = self.value.shape[1]
        both = replace(self, value=np.concatenate([self.value, self.value**2], axis=1))
        lines = [line for *_, line in both._iterate_left_out(width, ridge)]
        predicted = np.concatenate([line.value[:, :p] for line in lines])
        return predicted, np.concatenate([line.variance(p) for line in lines])

    def error_gradient(
        self, width: Numbers, ridge: float = DEFAULT_RIDGE
    ) -> tuple[float, Numbers, float]:
        """Return L(h), ∂L/∂log h (d,) and ∂L/∂log λ, for the softmax of a Gaussian score."""
        total, by_place, by_ridge = 0.0, np.zeros(self.key.shape[1]), 0.0
        for rows, key, alpha, line in self._iterate_left_out(width, ridge):
            loss, pull = self.loss(line.value, self.value[rows], self.weight[rows])
            total += loss
            near, beta = key[:, self.slope_mask], np.einsum("np,ndp->nd", pull, line.slope)
            # Σₚ pullₚ rⱼₚ: one number per pair, however many outputs.
            change = pull @ self.value.T - (pull * line.mean).sum(1, keepdims=True)
            if self.slope_mask.any():
                change -= beta @ near.T - (beta * line.key).sum(1, keepdims=True)
                change *= 1 - line.lever @ near.T + (line.lever * line.key).sum(1, keepdims=True)
            held = ridge * (line.lever * beta).sum(0)
            by_place[self.slope_mask] += 2 * held  # the ridge is in units of the bandwidth
            by_ridge += float(held.sum())
            change *= alpha
            change -= alpha * change.sum(1, keepdims=True)
            # Σⱼ (qₖ − kⱼₖ)² changeⱼ, whose changes sum to 0
            by_place += ((change @ (key * key)) - 2 * key[rows] * (change @ key)).sum(0)
        size = float(self.weight.sum())
        return total / size, self.columns.sum_by_column(by_place) / size, by_ridge / size

    def _iterate_left_out(
        self, width: Numbers, ridge: float
    ) -> Iterator[tuple[slice, Numbers, Numbers, LocalLine]]:
        """Yield blocks of rows: the slice, the scaled keys, α of the others, and the prediction."""
        key, m = self.key / width[self.columns.source_column], len(self.key)
        near = key[:, self.slope_mask]
        step = max(MAX_WEIGHTS_PER_BLOCK // m, 1)
        for at in range(0, m, step):
            rows = slice(at, min(at + step, m))
            others = np.ones((rows.stop - at, m), dtype=bool)
            others[range(rows.stop - at), range(at, rows.stop)] = False
            alpha = weights(key[rows], key, score=self.score, weighting=self.weighting, mask=others)
            alpha = apply_row_weights(alpha, self.weight, self.weighting)
            line = fit_line(alpha.__matmul__, near[rows], near, self.value, ridge)
            yield rows, key, alpha, line


def apply_row_weights(alpha: Numbers, weight: Numbers, weighting: Weighting) -> Numbers:
    """Return α (n, m) with row j counted weightⱼ times; rows that summed to 1 still do."""
    alpha = alpha * weight
    total = alpha.sum(1, keepdims=True)
    return alpha / np.where(total > 0, total, 1) if weighting.is_convex else alpha


def scott_factor(m: float, d: int) -> float:
    """Return Scott's factor m^(−1/(d + 4)), in standard deviations."""
    return float(m ** (-1 / (d + 4)))


def search_coarse(error: Callable[[Numbers], float], widths: Sequence[Numbers]) -> Numbers:
    """Return the h = c · width with the smallest error, c on a grid of powers of e."""
    tried = [np.exp(c) * width for width in widths for c in np.arange(-3.0, 3.1)]
    return tried[int(np.nanargmin([error(width) for width in tried]))]


def search_common_width(
    error: Callable[[Numbers, float], float], widths: Sequence[Numbers], ridges: Sequence[float]
) -> tuple[Numbers, float]:
    """Return the best h = c · width, with c to two digits, and the best ridge."""
    from scipy.optimize import minimize_scalar

    near = search_coarse(lambda width: error(width, DEFAULT_RIDGE), widths)
    errors = [error(near, ridge) for ridge in ridges]
    ridge = ridges[int(np.nanargmin(errors))]
    options = {"xatol": 0.02, "maxiter": 8}
    found = minimize_scalar(
        lambda c: error(np.exp(c) * near, ridge), bounds=(-1, 1), method="bounded", options=options
    )
    return near * np.exp(found.x if found.fun < min(errors) else 0), ridge


def learn_widths(
    rows: Examples, width: Numbers, progress: ProgressCallback | None = None
) -> tuple[Numbers, float]:
    """Return h (d,) and λ by L-BFGS, starting at `width`; a useless column gets a large h.

    Minimizes −log likelihood/m + PRIOR_ROWS/m Σₖ log² (hₖ/widthₖ). The first term is L for classes,
    and ½ log L for values, whose noise is unknown.
    """
    from scipy.optimize import minimize

    d, prior = len(width), PRIOR_ROWS / len(rows.key)

    def penalized_loss(at: Numbers) -> tuple[float, Numbers]:
        value, by_width, by_ridge = rows.error_gradient(np.exp(at[:d]), float(np.exp(at[d])))
        slope = np.append(by_width, by_ridge)
        if rows.loss is squared_error:
            value, slope = (
                0.5 * np.log(value + MIN_RELATIVE_ERROR),
                0.5 * slope / (value + MIN_RELATIVE_ERROR),
            )
        apart = at[:d] - np.log(width)
        slope[:d] += 2 * prior * apart
        return value + prior * float(apart @ apart), slope

    bounds = [LOG_BANDWIDTH_BOUNDS] * d + [(np.log(1e-6), np.log(1e2))]
    start = np.append(np.clip(np.log(width), *LOG_BANDWIDTH_BOUNDS), np.log(DEFAULT_RIDGE))
    options, steps = {"maxiter": MAX_STEPS, "ftol": 1e-5}, itertools.count(1)

    def report_step(_: Numbers) -> None:
        if progress is not None:
            progress(next(steps), MAX_STEPS)

    found = minimize(
        penalized_loss,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options=options,
        callback=report_step,
    )
    return np.exp(found.x[:d]), float(np.exp(found.x[d]))
