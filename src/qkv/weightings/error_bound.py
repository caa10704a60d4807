"""Error bounds of approximate weights. Bounds can be merged, like the states of weightings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ROUNDING_FACTOR = 1 + 1e-6
"""Allows for the rounding error of long sums and their quotients."""


class ErrorBound(NamedTuple):
    """Bounds on the distance between approximate weights ν and exact weights μ; fields are (n,).

    ν and μ are not normalized. The sum of ν is `total` · e^top. Summed over all rows and in units
    of e^top, μ exceeds ν by at most `gain` and falls short of it by at most `loss`. The weights are
    ν over its sum, and ½ Σ |α − α exact| ≤ `max_error`. `merge` joins the bounds of two sets of
    rows.

    >>> one = ErrorBound(np.zeros(1), np.full(1, 3.0), np.full(1, 0.03), np.full(1, 0.03))
    >>> unread = ErrorBound(np.full(1, -8.0), np.zeros(1), np.ones(1), np.zeros(1))
    >>> [float(x.max_error[0].round(3)) for x in (one, one.merge(one))]
    [0.01, 0.01]
    >>> one.merge(unread).max_error.round(4)
    array([0.0101])
    """

    top: np.ndarray
    total: np.ndarray
    gain: np.ndarray
    loss: np.ndarray

    def merge(self, other: ErrorBound) -> ErrorBound:
        top = np.maximum(self.top, other.top)
        unit = np.where(np.isfinite(top), top, 0.0)
        one, two = np.exp(self.top - unit), np.exp(other.top - unit)
        return ErrorBound(
            top, *(a * one + b * two for a, b in zip(self[1:], other[1:], strict=True))
        )

    @property
    def max_error(self) -> np.ndarray:
        """A bound on the total variation distance between the weights and the exact ones, (n,).

        With A = Σ (μ − ν)₊ and B = Σ (ν − μ)₊ the distance 1 − Σ min(μ/Σμ, ν/Σν) is at most
        max(A, B) / max(Σμ, Σν). A ≤ gain, B ≤ loss, and Σμ = Σν + A − B.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            left = np.maximum(self.total - self.loss, 0)
            # An unknown bound becomes NaN here, and 1 below.
            above = np.where(self.gain == 0, 0, self.gain / (left + self.gain))
            below = np.where(self.loss == 0, 0, self.loss / self.total)
            bound = np.maximum(above, below) * ROUNDING_FACTOR
        is_known = np.isfinite(bound) & np.isfinite(self.total + self.gain + self.loss)
        return np.where(is_known, np.minimum(bound, 1.0), 1.0)
