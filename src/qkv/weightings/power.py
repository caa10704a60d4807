"""The function (1 + c u)^(1/c), precise around its limit exp(u) at c = 0, and gradients of entmax.

Also the shapes of an entmax `alpha`: one number, one for each head, or one for each row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.errors import ShapeError
from qkv.frameworks import get_framework, is_array
from qkv.util.types import Array, LiveMask, Shape

SERIES_LIMIT = 0.1
"""Below this |x|, log(1 + x)/x is computed by a series: the formula's derivative is imprecise."""
MIN_ARGUMENT = -1e30
"""Smaller arguments are replaced by this one, because 0 · ∞ is NaN."""


def scaled_log1p(u: Array, c: Array, live: LiveMask) -> tuple[Array, Array]:
    """Return log(1 + c u)/c, or 0 where that is undefined, and a boolean array: is it defined?"""
    fw = get_framework(u)
    xp, u = fw.xp, fw.fill_unless(u, live)
    never = u == -float("inf")
    u = fw.fill_unless(u, xp.logical_not(u < MIN_ARGUMENT), MIN_ARGUMENT)
    x = c * u
    is_defined = xp.logical_not(xp.logical_or(x <= -1, never))
    is_defined = is_defined if live is None else xp.logical_and(is_defined, live)
    short = xp.abs(x) < SERIES_LIMIT
    y = fw.fill_unless(x, short)
    ratio = y / (y + 2)
    square = ratio * ratio
    series = square / 13
    for k in (11, 9, 7, 5, 3):  # log(1 + y)/y = 2/(2 + y) · (1 + ratio²/3 + ratio⁴/5 + …)
        series = square * (series + 1 / k)
    far = fw.fill_unless(x, xp.logical_and(is_defined, xp.logical_not(short)))
    log = xp.where(short, u * (series + 1) * 2 / (y + 2), xp.log(far + 1) / fw.safe_divisor(c))
    return fw.fill_unless(log, is_defined), is_defined


def expm1_ratio(y: Array) -> Array:
    """Return (eʸ − 1)/y."""
    fw, xp = get_framework(y), get_framework(y).xp
    return xp.where(
        xp.abs(y) < SERIES_LIMIT, 1 + y / 2 + y * y / 6, (xp.exp(y) - 1) / fw.safe_divisor(y)
    )


def entmax_gradient(weight: Any, weight_gradient: Any, alpha: Any) -> Array:
    """Return the gradient of (alpha − 1) · scores of whole rows, from that of their weights."""
    slope = weight ** (2 - alpha) * (weight > 0)
    total = slope.sum(-1, keepdims=True)
    centre = (slope * weight_gradient).sum(-1, keepdims=True) / (total + (total == 0))
    gradient: Array = slope * (weight_gradient - centre) / (alpha - 1)
    return gradient


MAX_SEARCHED_HEADS = 16
"""The most heads whose thresholds are searched one after the other."""


def is_quick_by_head(numbers: np.ndarray, least: float) -> bool:
    """Return whether an array (…, 1, 1) holds one alpha, or one for each of a few heads.

    All of them must be from `least` to 2.
    """
    by_head = numbers.ndim > 2 and numbers.shape[-3] == numbers.size <= MAX_SEARCHED_HEADS
    if not (numbers.size == 1 or by_head):
        return False
    return bool(least <= numbers.min() and numbers.max() <= 2)


def entmax_gradients(weight: Array, slope: Array, alpha: Array) -> tuple[Array, Array]:
    """Return the gradients of the scores and of alpha (…, 1, 1), from that of the weights.

    With p̃ᵢ = pᵢ^(2−α) / Σ p^(2−α) and hᵢ = −pᵢ log pᵢ, the derivative of pᵢ by α is
    (pᵢ − p̃ᵢ)/(α−1)² + (hᵢ − p̃ᵢ Σ h)/(α−1).
    """
    fw = get_framework(weight)
    c, some = alpha - 1, weight > 0
    log = fw.xp.log(fw.fill_unless(weight, some, 1.0))
    lean = fw.fill_unless(fw.xp.exp((1 - c) * log), some)
    total = fw.safe_divisor(fw.row_sum(lean))
    centre = fw.row_sum(lean * slope) / total
    entropy = weight * log * -1.0
    # Σᵢ slopeᵢ p̃ᵢ is the centre.
    rows = (fw.row_sum(slope * weight) - centre) / (c * c)
    rows = rows + (fw.row_sum(slope * entropy) - centre * fw.row_sum(entropy)) / c
    for axis, size in enumerate(fw.static_shape(alpha)):
        if size == 1 != rows.shape[axis]:
            rows = fw.xp.sum(rows, axis=axis, keepdims=True)
    return lean * (slope - centre), rows


def broadcast_to_rows(number: Any, like: Array) -> Array:
    """Return a number as an array with the axes of `like` (…, n, m).

    `number` is a float, or an array of one number, of one for each head (h,), or of one for each
    row (…, n, 1).
    """
    fw, axes = get_framework(like), len(like.shape)
    if not is_array(number):
        return fw.full((1,) * axes, float(number), like)
    shape = fw.static_shape(number)
    if not shape:
        return fw.xp.reshape(number, (1,) * axes)  # MXNet cannot index a scalar with None
    rank = len(_row_shape(shape))
    # Add axes by indexing: reshape needs the sizes, which a graph may not know.
    return number[(None,) * (axes - rank) + (...,) + (None,) * (rank - len(shape))]


def check_row_shape(what: str, number: Any, lead: Shape, n: int) -> None:
    """Raise ShapeError if an argument of `broadcast_to_rows` does not fit queries (*lead, n, d)."""
    expected = (*lead, n, 1)
    shape = tuple(number.shape) if is_array(number) else ()
    row_shape = _row_shape(shape)
    pairs = zip(row_shape[::-1], expected[::-1], strict=False)
    if len(row_shape) > len(expected) or any(x not in (1, y) for x, y in pairs if x and y):
        raise ShapeError(
            f"{what} must be one number, one for each head (axis −3), or broadcast to one "
            f"for each row {expected}, not an array of shape {shape}"
        )


def _row_shape(shape: Shape) -> Shape:
    return (*shape, 1, 1) if len(shape) == 1 and shape != (1,) else shape
