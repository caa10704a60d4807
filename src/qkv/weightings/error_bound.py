"""How far weights may lie from the true ones: a monoid, as the states of weightings are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ROUNDING_FACTOR = 1 + 1e-6
"""What sums of many numbers and their quotients may have lost."""


class ErrorBound(NamedTuple):
    """A measure ν that is known, and how far the true one, μ, may lie from it: each (n,).

    ν has the sum `total` · e^top; μ lies above it by `gain` and below it by `loss` at most, summed
    over all rows, in the same unit. The weights are ν over its sum, and ½ Σ |α − α true| ≤
    `max_error`. What was computed of one part of the rows is merged with what was of another.

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
        """The largest total variation between the weights and the true ones, (n,).

        With A = Σ (μ − ν)₊ and B = Σ (ν − μ)₊ it is 1 − Σ min(μ/Σμ, ν/Σν), which is at most
        max(A, B) / max(Σμ, Σν); A and B are no larger than gain and loss, and Σμ = Σν + A − B.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            left = np.maximum(self.total - self.loss, 0)
            # What is not known is no 0: it becomes NaN here, and 1 below.
            above = np.where(self.gain == 0, 0, self.gain / (left + self.gain))
            below = np.where(self.loss == 0, 0, self.loss / self.total)
            found = np.maximum(above, below) * ROUNDING_FACTOR
        known = np.isfinite(found) & np.isfinite(self.total + self.gain + self.loss)
        return np.where(known, np.minimum(found, 1.0), 1.0)
