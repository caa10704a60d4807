"""Upper bounds of vector norms, which hold despite rounding."""

from __future__ import annotations

import numpy as np

MIN_SQUARABLE = 1e-12
"""The square of a smaller number loses digits in float32 (with a safety margin)."""


def row_norms(x: np.ndarray) -> np.ndarray:
    """Return an upper bound (m,) of the norm of each row (m, d), tight up to rounding."""
    most = float(max(x.max(initial=0.0), -x.min(initial=0.0)))
    safe = not most or MIN_SQUARABLE < most < 1 / MIN_SQUARABLE
    squares = np.einsum("ij,ij->i", x, x, dtype=x.dtype if safe else float)
    width, kind = x.shape[1], np.finfo(squares.dtype)
    return np.asarray(np.sqrt(squares) * (1 + width * kind.eps) + np.sqrt(width * kind.tiny))


def residual_spread(left: np.ndarray, size: float) -> float:
    """Return √λ, or a few percent more, for the largest eigenvalue λ of G = Σ r rᵀ.

    The residuals r (m, d) are overwritten; `size` is the norm of the longest. The bound is
    λ ≤ ‖G³²‖_F^(1/32), whose five products are faster than an eigenvalue solver.
    """
    rows, width = left.shape
    if not size or not np.isfinite(size):
        return float(size)
    left /= left.dtype.type(size)
    gram = left.T @ left if rows > width else left @ left.T
    unit, full_trace = float(np.finfo(left.dtype).eps), float(np.trace(gram))
    if not full_trace:  # all residuals are 0
        return float(size)
    power, most = 1, 1.0
    for _ in range(5):
        trace = float(np.trace(gram))
        gram = gram / left.dtype.type(trace)
        most *= trace ** (1 / power)
        gram, power = gram @ gram, 2 * power
    most *= float(np.linalg.norm(gram)) ** (1 / power)
    lost = 32 * unit * max(min(rows, width), 4) + 1e-6  # rounding in the products
    most = most * (1 + lost) + unit * max(rows, width) * full_trace
    return float(size * np.sqrt(min(most, full_trace * (1 + 1e-6 + unit * rows))))
