"""(1 + c u)^(1/c), with its limit exp(u) at c = 0 and the same digits on both sides of it; and how
weights of that kind lean."""

from __future__ import annotations

from typing import Any

from qkv.errors import ShapeError
from qkv.frameworks import get_framework, is_array
from qkv.util.types import Array, LiveMask, Shape

SERIES_LIMIT = 0.1
"""|x| below which log(1 + x)/x is summed as a series: its slope would have too few digits."""
MIN_ARGUMENT = -1e30
"""What lies below counts as this: 0 · ∞ is no number."""


def scaled_log1p(u: Array, c: Array, live: LiveMask) -> tuple[Array, Array]:
    """log(1 + c u)/c where that has a value, else 0; and where that is. c broadcasts to u."""
    fw = get_framework(u)
    xp, u = fw.xp, fw.fill_unless(u, live)
    never = u == -float("inf")
    u = fw.fill_unless(u, xp.logical_not(u < MIN_ARGUMENT), MIN_ARGUMENT)
    x = c * u
    some = xp.logical_not(xp.logical_or(x <= -1, never))
    some = some if live is None else xp.logical_and(some, live)
    short = xp.abs(x) < SERIES_LIMIT
    y = fw.fill_unless(x, short)
    ratio = y / (y + 2)
    square = ratio * ratio
    series = square / 13
    for k in (11, 9, 7, 5, 3):  # log(1 + y)/y = 2/(2 + y) · (1 + ratio²/3 + ratio⁴/5 + …)
        series = square * (series + 1 / k)
    far = fw.fill_unless(x, xp.logical_and(some, xp.logical_not(short)))
    log = xp.where(short, u * (series + 1) * 2 / (y + 2), xp.log(far + 1) / fw.safe_divisor(c))
    return fw.fill_unless(log, some), some


def expm1_ratio(y: Array) -> Array:
    """(eʸ − 1)/y"""
    fw, xp = get_framework(y), get_framework(y).xp
    return xp.where(
        xp.abs(y) < SERIES_LIMIT, 1 + y / 2 + y * y / 6, (xp.exp(y) - 1) / fw.safe_divisor(y)
    )


def entmax_gradient(weight: Any, along: Any, alpha: Any) -> Array:
    """The gradient of (alpha − 1) times the scores of whole rows from that of their weights."""
    lean = weight ** (2 - alpha) * (weight > 0)
    total = lean.sum(-1, keepdims=True)
    middle = (lean * along).sum(-1, keepdims=True) / (total + (total == 0))
    found: Array = lean * (along - middle) / (alpha - 1)
    return found


def broadcast_to_rows(number: Any, like: Array) -> Array:
    """A number, or an array of one, of one for each head (h,), or of one for each row (…, n, 1), as
    an array with as many axes as `like` (…, n, m)."""
    fw, axes = get_framework(like), len(like.shape)
    if not is_array(number):
        return fw.full((1,) * axes, float(number), like)
    shape = fw.static_shape(number)
    if not shape:
        return fw.xp.reshape(number, (1,) * axes)  # MXNet gives no new axes to a single number
    wide = len(_row_shape(shape))
    # By new axes: a graph may not know the sizes.
    return number[(None,) * (axes - wide) + (...,) + (None,) * (wide - len(shape))]


def check_row_shape(what: str, number: Any, lead: Shape, n: int) -> None:
    """Raise where such an array does not fit queries (*lead, n, d)."""
    wanted = (*lead, n, 1)
    shape = tuple(number.shape) if is_array(number) else ()
    wide = _row_shape(shape)
    pairs = zip(wide[::-1], wanted[::-1], strict=False)
    if len(wide) > len(wanted) or any(x not in (1, y) for x, y in pairs if x and y):
        raise ShapeError(
            f"{what} must be one number, one for each of the heads, axis −3, or broadcast to one "
            f"for each row {wanted}, not of shape {shape}"
        )


def _row_shape(shape: Shape) -> Shape:
    return (*shape, 1, 1) if len(shape) == 1 and shape != (1,) else shape
