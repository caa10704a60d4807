"""Squared distances from one matrix product, with exact ones where rounding would matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from qkv.util.types import Array

MAX_EXPANDED_SQUARE = 32.0
"""Largest ‖q‖² + ‖k‖² around the mean key at which the expanded square is precise enough."""

MIN_EXPANDED_COLUMNS = 8
"""Columns from which a product is faster than the differences, which are exact."""

MAX_EXACT_SHARE = 1 / 16
"""Share of the pairs up to which computing them once more takes less than computing all exactly."""

UNIT_BY_BYTES = {4: 2.0**-24, 8: 2.0**-53}
"""Half the distance from 1 to the next number, by the bytes of a float."""

NeedsExact = Callable[[Array, Any], Array | None]
"""needs_exact(square, error): which pairs must not have that error; None: all may."""


class SquareOperations(NamedTuple):
    """The operations of `expand_squares` that NumPy and PyTorch name differently.

    `sum_squares` returns ‖x‖² of each row, `clip_at_zero` replaces negative numbers in place by 0.
    """

    sum_squares: Callable[[Array], Array]
    find_true: Callable[[Array], tuple[Array, ...]]
    broadcast: Callable[[Array, tuple[int, ...]], Array]
    clip_at_zero: Callable[[Array], object]


def expand_squares(
    query: Array, key: Array, width: float, needs_exact: NeedsExact, operations: SquareOperations
) -> Array | None:
    """Return ‖q − k‖² / width² (…, n, m) of NumPy arrays or CPU tensors; None if it is not precise.

    The expanded square ‖q‖² + ‖k‖² − 2 q·k loses digits. `needs_exact` selects pairs whose square
    is computed from the differences.
    """
    d = query.shape[-1]
    if d < MIN_EXPANDED_COLUMNS:
        return None
    q, k, scale = query, key, 1.0 / (width * width)
    squares = operations.sum_squares(q), operations.sum_squares(k)
    # A comparison with NaN is false.
    most = sum(float(x.max()) for x in squares) * scale
    if not most <= MAX_EXPANDED_SQUARE:
        centre = key.reshape(-1, d).mean(0)
        q, k = query - centre, key - centre
        squares = operations.sum_squares(q), operations.sum_squares(k)
        most = sum(float(x.max()) for x in squares) * scale
        if not most <= MAX_EXPANDED_SQUARE:
            return None
    # In place: new memory takes longer than the arithmetic.
    total: Array = (q * (-2.0 * scale)) @ k.mT
    total += (squares[0] * scale)[..., :, None]
    total += (squares[1] * scale)[..., None, :]
    operations.clip_at_zero(total)
    exact = needs_exact(total, most * (d + 8) * UNIT_BY_BYTES[query.dtype.itemsize])
    if exact is None:
        return total
    at = operations.find_true(exact)
    if len(at[0]) > MAX_EXACT_SHARE * math.prod(total.shape):
        return None
    if len(at[0]):
        *lead, rows, cols = at
        shape = total.shape[:-2]
        query, key = (operations.broadcast(x, (*shape, *x.shape[-2:])) for x in (query, key))
        difference: Any = query[(*lead, rows)] - key[(*lead, cols)]
        difference = difference / width
        total[at] = (difference * difference).sum(-1)
    return total
