"""Squared distances from one matrix product, with exact ones where rounding would matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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


def expand_squares(
    query: Array,
    key: Array,
    needs_exact: NeedsExact,
    find_true: Callable[[Array], tuple[Array, ...]],
    broadcast: Callable[[Array, tuple[int, ...]], Array],
    clip_at_zero: Callable[[Array], object],
) -> Array | None:
    """Return ‖q − k‖² (…, n, m) of NumPy arrays or CPU tensors, or None if that is not precise.

    The expanded square ‖q‖² + ‖k‖² − 2 q·k loses digits. `needs_exact` selects pairs whose square
    is computed from the differences. `clip_at_zero` replaces negative numbers in place by 0.
    """
    d = query.shape[-1]
    if d < MIN_EXPANDED_COLUMNS:
        return None
    centre = key.reshape(-1, d).mean(0)
    q, k = query - centre, key - centre
    squares = (q * q).sum(-1)[..., :, None], (k * k).sum(-1)[..., None, :]
    # A comparison with NaN is false.
    most = sum(float(x.max()) for x in squares)
    if not most <= MAX_EXPANDED_SQUARE:
        return None
    total: Array = (q * -2.0) @ k.mT  # in place: new memory takes longer than the arithmetic
    total += squares[0]
    total += squares[1]
    clip_at_zero(total)
    exact = needs_exact(total, most * (d + 8) * UNIT_BY_BYTES[query.dtype.itemsize])
    if exact is None:
        return total
    at = find_true(exact)
    if len(at[0]) > MAX_EXACT_SHARE * math.prod(total.shape):
        return None
    if len(at[0]):
        *lead, rows, cols = at
        shape = total.shape[:-2]
        query, key = (broadcast(x, (*shape, *x.shape[-2:])) for x in (query, key))
        difference: Any = query[(*lead, rows)] - key[(*lead, cols)]
        total[at] = (difference * difference).sum(-1)
    return total
