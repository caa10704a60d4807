"""Device functions for scores that are no dot product: windows, Laplace, exact match, constant.

- A window is a profile of r² = (‖q‖² − 2 q·k + ‖k‖²) / width². The product is that of the matrix
  units. Where the rounding of this sum could change the score, Σ (q − k)² replaces it. Loops over
  whole tiles leave such pairs out, and note their tiles (`mark_doubts`); a second loop adds them.
- Laplace and exact match compare the columns one after the other (`F.BY_COLUMN`). They read φ and
  ψ as `row_terms.collect_row_terms` wrote them: in tiles of F.BLOCK rows, column by column.
- The constant has no product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qkv.engines.triton.tile_functions.tanh import padded_rows
from qkv.engines.triton.tile_functions.tiles import (
    PARTIAL_SUM_COLUMNS,
    compare_to_halves,
    exceeds,
    fast_exp2,
    fold_columns,
    is_apart,
    is_positive,
    limited_product,
)

SUMMING_COLUMNS = tl.constexpr(16)
"""The columns of a product with ones that gives row sums; all are equal."""
SUMMED_COLUMNS = tl.constexpr(4)
"""How many columns `add_column_gradients` sums at a time."""


@triton.jit
def locate_terms(terms, lane, rows, F):
    """Return where the terms of a lane begin."""
    return terms + tl.cast(lane, tl.int64) * F.TERMS * padded_rows(rows, F)


@triton.jit
def locate_columns(start, near, F, LISTED: tl.constexpr):
    """Return where the first column of the rows start + near is; columns are F.BLOCK apart.

    Unless they are LISTED, all these rows are in one tile of F.BLOCK.
    """
    if not F.BY_COLUMN:
        return start + near
    if LISTED:
        row = start + near
        return row // F.BLOCK * (F.BLOCK * F.W) + row % F.BLOCK
    inside = start % F.BLOCK // 16 * 16  # so that the compiler knows it is aligned
    return start // F.BLOCK * (F.BLOCK * F.W) + inside + near


@triton.jit
def _zero_tile(rows, at):
    """Return zeros (ROWS, COLS) in the layout of a product of the matrix units.

    A tile of zeros that no product computed would have one row per warp, and each thread would load
    a whole column. Here a thread has two rows and a quarter of the columns. The factor depends on
    `at`, which is never negative, so that the compiler keeps the product inside the loop: zeros
    that outlive an iteration would occupy as many registers as the tile.
    """
    left = tl.zeros((rows.shape[0], 16), tl.float16)
    right = tl.where(at < 0, 1.0, 0.0).to(tl.float16)
    return tl.dot(left, tl.broadcast_to(right[None, :], (16, at.shape[0])))


@triton.jit
def _load_columns(c, own, others, at, F):
    """Return column c of the rows (ROWS, 1) and of the others (1, COLS)."""
    a = tl.load(own.terms + c * F.BLOCK + own.near[:, None])
    b = tl.load(others.terms + c * F.BLOCK + at[None, :])
    return a, b


@triton.jit
def compare_columns(own, others, at, F):
    """Return Σ |q − k| of a tile; for exact match, the number of columns that differ."""
    total = _zero_tile(own.near, at)
    for c in tl.range(0, F.W, loop_unroll_factor=4):
        a, b = _load_columns(c, own, others, at, F)
        if F.FORM == "exact":
            total += tl.where(a == b, 0.0, 1.0)
        else:
            total += tl.abs(a - b)
    return total


@triton.jit
def clear_column_sums(sums, lane, start, rows, SIZE: tl.constexpr, F):
    """Set the sums of a tile of SIZE rows to 0; return the pointer to them."""
    sums += tl.cast(lane, tl.int64) * F.W * padded_rows(rows, F)
    sums += locate_columns(start, 0, F, False)
    column = tl.arange(0, SUMMED_COLUMNS)[None, :]
    here = sums + column * F.BLOCK + tl.arange(0, SIZE)[:, None]
    for c in range(0, F.W, SUMMED_COLUMNS):
        tl.store(here + c * F.BLOCK, tl.zeros(here.shape, tl.float32), mask=c + column < F.W)
    return sums


@triton.jit
def _sum_signed(c, ds, whole, own, others, at, F):
    """Return Σ ds · sign(q − k) of each row in column c; `whole` is Σ ds."""
    a, b = _load_columns(tl.minimum(c, F.W - 1), own, others, at, F)
    if F.FAST:
        return 2.0 * tl.sum(ds * compare_to_halves(a - b), 1) - whole
    return tl.sum(tl.where(a > b, ds, tl.where(a < b, -ds, 0.0)), 1)


@triton.jit
def add_column_gradients(sums, ds, own, others, at, F):
    """Add Σ ds · sign(q − k) over the columns of the tile to the sums of each column of φ.

    The sums are in memory that no other program uses: registers cannot be indexed by the loop
    variable. Several columns share one exchange of data between threads. A key that is NaN and
    excluded adds 0.
    """
    column = tl.arange(0, SUMMED_COLUMNS)[None, :]
    here = sums + column * F.BLOCK + tl.arange(0, ds.shape[0])[:, None]
    whole = tl.sum(ds, 1)
    for c in tl.range(0, F.W, SUMMED_COLUMNS):
        even = tl.join(
            _sum_signed(c, ds, whole, own, others, at, F),
            _sum_signed(c + 2, ds, whole, own, others, at, F),
        )
        odd = tl.join(
            _sum_signed(c + 1, ds, whole, own, others, at, F),
            _sum_signed(c + 3, ds, whole, own, others, at, F),
        )
        more = tl.reshape(tl.join(even, odd), here.shape)
        inside = c + column < F.W
        there = here + c * F.BLOCK
        tl.store(there, tl.load(there, mask=inside, other=0.0) + more, mask=inside)


@triton.jit
def _sum_squared_differences(own, others, start, here, F):
    """Return Σ (q − k)² of a tile, from rows in the dtype of the arrays."""
    total = tl.zeros((own.offset.shape[0], here.shape[0]), tl.float32)
    for c in range(F.W):
        a = tl.load(own.base + own.offset + c).to(tl.float32)[:, None]
        b = tl.load(others.source + start * others.step + here * others.step + c).to(tl.float32)
        difference = a - b[None, :]
        total += difference * difference
    return total


@triton.jit
def _is_sure(square, a, total, F, EDGE: tl.constexpr):
    """Return 1.0 where r² from the expanded square is precise enough for the score, else 0.0.

    `total` is (‖q‖² + ‖k‖²) / width², to which the rounding error of r² is proportional, and `a`
    the part of the tile's rows. Both depend on the pair alone, not on its tile. Without EDGE, the
    edge at r = 1 does not matter: there, triangular and Epanechnikov scores are 0 to within the
    error.
    """
    # A sum of at most 256 products is that precise; the squares are sums of at most as many.
    UNIT: tl.constexpr = (2.0**-21 if F.APART else 2.0**-22) * (1 if F.W <= 256 else 4)
    TOLERANCE: tl.constexpr = 2.0**-16 if F.APART else 2.0**-10  # of a score
    if EDGE or F.FORM == "boxcar":
        # Where r is about 1, ‖k‖ / width is at most ‖q‖ / width + 1.
        reach = tl.sqrt(a) + 1.0
        slack = (a + reach * reach) * (1.01 * UNIT)
        sure = is_apart(square - 1.0, tl.broadcast_to(slack, square.shape), F.FAST)
        if F.FORM == "epanechnikov":
            sure = sure * exceeds(TOLERANCE / UNIT, total, F.FAST)
    elif F.FORM == "epanechnikov":
        total += square * 0.0  # so that the compiler computes it where the products are
        sure = exceeds(TOLERANCE / UNIT, total, F.FAST)
    if F.FORM == "triangular":
        # √ of r² has an error of UNIT · total / 2r. At r² < UNIT · total it has no correct digit.
        if F.APART:
            SLOPE: tl.constexpr = 0.5 * UNIT / TOLERANCE
            floor = tl.maximum((total * total) * (SLOPE * SLOPE), total * (4.0 * UNIT))
        else:  # at least that, up to a total for which all scores are 0 where r² is above
            floor = total * 2.0**-13
        if F.FAST:
            known = limited_product(square - floor, 3e38, True)
        else:
            known = tl.where(square > floor, 1.0, 0.0)
        if EDGE:
            sure = sure * known
        else:
            sure = known
    return sure


@triton.jit
def window_square(
    x, own, others, start, here, scale, F, EXACT: tl.constexpr, EDGE: tl.constexpr = True
):
    """Return r² of a tile from φ·ψ, and 1.0 where that is precise enough for the score, else 0.0.

    NaN is not: ∞ − ∞ in the expanded square may be a distance of ∞. Where it is not, r² is
    Σ (q − k)², except with EXACT = 1, which leaves it wrong. A loop uses

    - with EXACT = 0 all pairs;
    - with EXACT = 1 those that are sure;
    - with EXACT = 2 the others.

    EDGE is that of `_is_sure`.
    """
    a = own.terms * scale
    if F.LINED:
        b = others.squares.load([start])
    else:
        b = tl.load(others.terms + start + here)
    total = a + (b * scale)[None, :]
    square = x * (-2.0 * scale) + total
    sure = _is_sure(square, a, total, F, EDGE)
    if EXACT != 1:  # noqa: SIM102
        if tl.min(tl.min(sure, 1), 0) == 0.0:
            exact = _sum_squared_differences(own, others, start, here, F) * scale
            square = tl.where(sure > 0.0, square, exact)
    return square, sure


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def start_doubts(ROWS: tl.constexpr, F):
    """Return no bits for `mark_doubts`."""
    if F.WINDOW:
        return tl.zeros((ROWS, PARTIAL_SUM_COLUMNS), tl.int32)
    else:
        return tl.zeros((1, 1), tl.int32)


@triton.jit
def mark_doubts(doubts, sure, bit):
    """Return the bits, with this one set in a tile with a pair that is not sure.

    A thread sets the bits of its own pairs. `find_doubts` joins them after the loop; doing so in
    each tile would make all threads wait.
    """
    count: tl.constexpr = sure.shape[1] // PARTIAL_SUM_COLUMNS
    return doubts | tl.where(fold_columns(sure) < count, 1 << bit, 0)


@triton.jit
def find_doubts(doubts):
    """Return the bits that a thread has set."""
    return tl.reduce(tl.reduce(doubts, 1, _or), 0, _or)


@triton.jit
def tiles_per_bit(count):
    """Return the binary logarithm of how many of `count` tiles share one of 32 bits."""
    shift = 0
    while (count - 1) >> shift >= 32:
        shift += 1
    return shift


@triton.jit
def leave_out_unsure(p, lean, sure, EXACT: tl.constexpr):
    """Return the weights of the pairs of this loop (see `window_square`), and 0 for the others."""
    if EXACT == 1:
        p = p * sure
        lean = lean * sure
    else:
        p = tl.where(sure > 0.0, 0.0, p)
        lean = tl.where(sure > 0.0, 0.0, lean)
    return p, lean


@triton.jit
def next_doubts(bits, shift, lo, hi):
    """Return the tiles of the lowest bit, within lo … hi, and the other bits."""
    lowest = bits & -bits
    number = 0
    while (lowest >> number) & 1 == 0:
        number += 1
    first = lo + (number << shift)
    return first, tl.minimum(first + (1 << shift), hi), bits ^ lowest


@triton.jit
def _inverse_root(x, FAST: tl.constexpr):
    """Return 1 / √x."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / tl.sqrt(x)


@triton.jit
def bounded_window_weights(square, low, scale, F, EXACT: tl.constexpr):
    """Return 2^(s − scale) for r², where `scale` is the score at r = 0, and `low` is 2^−scale.

    With EXACT = 1, pairs that are not sure may have any weight up to 1.
    """
    if F.FORM == "boxcar":
        if EXACT == 1:
            return exceeds(1.0, square, F.FAST) * (1.0 - low) + low
        p = tl.where(square <= 1.0, 1.0, low)
        return tl.where(square != square, square, p)
    if EXACT == 1:
        root = tl.full(square.shape, 1.0, tl.float32)
        if F.FORM == "triangular":
            root = _inverse_root(square, F.FAST)
        r = limited_product(square, root, F.FAST)
    else:
        r = square
        if F.FORM == "triangular":
            r = tl.sqrt(square)
        r = tl.minimum(r, 1.0, propagate_nan=tl.PropagateNan.ALL)
    return fast_exp2(r * -scale, F.FAST)


@triton.jit
def _window_profile(square, F, EXACT: tl.constexpr):
    """Return the score at r², and its derivative in r² without the factor of `product_factor`.

    With EXACT = 1, pairs that are not sure may have any finite score and derivative.
    """
    if F.FORM == "boxcar":
        if EXACT == 1:
            s = exceeds(1.0, square, F.FAST)
        else:
            s = tl.where(square <= 1.0, 1.0, 0.0)
            s = tl.where(square != square, square, s)
        slope = s * 0.0
    elif F.FORM == "triangular":
        if EXACT == 1:
            root = _inverse_root(tl.maximum(square, 1e-30), F.FAST)
            s = 1.0 - limited_product(square, root, F.FAST)
            slope = is_positive(s, F.FAST) * root
        else:
            inside = ((square > 0.0) & (square < 1.0)) | (square != square)
            r = tl.sqrt(tl.where(inside, square, 1.0))
            s = tl.where(square == 0.0, 1.0, 1.0 - r)
            slope = tl.where(inside, 1.0 / r, 0.0)
    elif EXACT == 1:
        s = 1.0 - limited_product(square, 1.0, F.FAST)
        slope = is_positive(s, F.FAST)
    else:
        s = 1.0 - square
        on = (s <= 0.0) == 0  # or NaN
        s = tl.where(on, s, 0.0)
        slope = tl.where(on, 1.0, 0.0)
    return s, slope


@triton.jit
def apply_distance_form(
    x, own, others, start, here, cap, scales, times, F, EXACT: tl.constexpr = 0
):
    """Return s of a tile and its derivative, without the scale.

    The derivative of a window is that of `_window_profile`, of Laplace that in Σ |q − k|. With
    F.CAP < 0 each query has its own factor, `cap`, which is part of the derivative. The third
    result and EXACT are those of `window_square`.
    """
    sure = x
    if F.WINDOW:
        square, sure = window_square(x, own, others, start, here, scales.square_scale, F, EXACT)
        s, slope = _window_profile(square, F, EXACT)
    elif F.FORM == "exact":
        s = tl.where(x == 0.0, 1.0, 0.0)
        slope = s
    else:
        s = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    if F.CAP < 0:
        return s * (cap * times), slope * cap, sure
    return s * scales.scale, slope, sure


@triton.jit
def add_row_sums(total, ds, F):
    """Add the row sums of a tile to each column of `total` (ROWS, SUMMING_COLUMNS).

    They are sums of the rounded gradients, so that Σ g (q − k) has no other error. As a product of
    the matrix units they need no conversion back to float32.
    """
    ones = tl.full((ds.shape[1], SUMMING_COLUMNS), 1.0, ds.dtype)
    return tl.dot(ds, ones, total, input_precision=F.PRECISION)


@triton.jit
def finish_product_gradient(total, held, part, scales, F):
    """Return Σ g k of rows as the gradient of φ·ψ; for a window Σ g (q − k), with part = Σ g.

    In float32: both sums would lose the same digits if they were rounded first.
    """
    if F.WINDOW:
        some = part[:, None]
        total = total - tl.where(some == 0.0, 0.0, some * held.to(tl.float32))
        total = total * product_factor(scales, F)
    return total


@triton.jit
def product_factor(scales, F):
    """Return the factor of a gradient of φ·ψ that `_window_profile` leaves out."""
    FACTOR: tl.constexpr = 1.0 if F.FORM == "triangular" else 2.0
    return scales.square_scale * FACTOR
