"""How long vectors are, alone and together: never less than they are."""

from __future__ import annotations

import numpy as np

MIN_SQUARABLE = 1e-12
"""The least number whose square float32 holds with all its digits, and room to spare."""


def row_norms(x: np.ndarray) -> np.ndarray:
    """‖x‖ of rows (m, d), not less than it is."""
    most = float(max(x.max(initial=0.0), -x.min(initial=0.0)))
    safe = not most or MIN_SQUARABLE < most < 1 / MIN_SQUARABLE
    found = np.einsum("ij,ij->i", x, x, dtype=x.dtype if safe else float)
    width, kind = x.shape[1], np.finfo(found.dtype)
    return np.asarray(np.sqrt(found) * (1 + width * kind.eps) + np.sqrt(width * kind.tiny))


def residual_spread(left: np.ndarray, size: float) -> float:
    """√λ, or a few hundredths more, of the largest λ of G = Σ r rᵀ over residuals (m, d), the
    longest of this `size`. They are overwritten.

    λ ≤ ‖G³²‖ᶠ to the power 1/32, which five products give in less time than eigenvalues take.
    """
    rows, width = left.shape
    if not size or not np.isfinite(size):
        return float(size)
    left /= left.dtype.type(size)
    gram = left.T @ left if rows > width else left @ left.T
    unit, whole = float(np.finfo(left.dtype).eps), float(np.trace(gram))
    if not whole:  # of vectors that are their codes
        return float(size)
    power, most = 1, 1.0
    for _ in range(5):
        trace = float(np.trace(gram))
        gram = gram / left.dtype.type(trace)
        most *= trace ** (1 / power)
        gram, power = gram @ gram, 2 * power
    most *= float(np.linalg.norm(gram)) ** (1 / power)
    lost = 32 * unit * max(min(rows, width), 4) + 1e-6  # by the products of G
    most = most * (1 + lost) + unit * max(rows, width) * whole
    return float(size * np.sqrt(min(most, whole * (1 + 1e-6 + unit * rows))))
