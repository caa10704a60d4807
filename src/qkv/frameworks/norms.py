"""Upper bounds of vector norms: rounding never makes them too small."""

from __future__ import annotations

import numpy as np

MIN_SQUARABLE = 1e-12
"""Below this, a square in float32 loses digits (with a safety margin)."""


def row_norms(x: np.ndarray) -> np.ndarray:
    """Return an upper bound of ‖x‖ for rows (m, d), within rounding."""
    most = float(max(x.max(initial=0.0), -x.min(initial=0.0)))
    safe = not most or MIN_SQUARABLE < most < 1 / MIN_SQUARABLE
    found = np.einsum("ij,ij->i", x, x, dtype=x.dtype if safe else float)
    width, kind = x.shape[1], np.finfo(found.dtype)
    return np.asarray(np.sqrt(found) * (1 + width * kind.eps) + np.sqrt(width * kind.tiny))


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
