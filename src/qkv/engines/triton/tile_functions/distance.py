"""Device functions for scores that are no dot product: windows, Laplace, exact match, constant.

- A window is a profile of r² = (‖q‖² − 2 q·k + ‖k‖²) / width². The product is that of the matrix
  units. Where the rounding of this sum could change the score, Σ (q − k)² replaces it.
- Laplace and exact match compare the columns one after the other (`F.BY_COLUMN`). They read φ and
  ψ with a column's rows side by side, as `row_terms.collect_row_terms` wrote them.
- The constant has no product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qkv.engines.triton.tile_functions.tanh import padded_rows


@triton.jit
def locate_terms(terms, lane, rows, F):
    """Return where the terms of a lane begin."""
    return terms + tl.cast(lane, tl.int64) * F.TERMS * padded_rows(rows, F)


@triton.jit
def compare_columns(own, others, at, F):
    """Return Σ |q − k| of a tile; for exact match, the number of columns that differ."""
    total = tl.zeros((own.near.shape[0], at.shape[0]), tl.float32)
    for c in tl.range(0, F.W, loop_unroll_factor=4):
        a = tl.load(own.terms + c * own.room + own.near[:, None])
        b = tl.load(others.terms + c * others.room + at[None, :])
        if F.FORM == "exact":
            total += tl.where(a == b, 0.0, 1.0)
        else:
            total += tl.abs(a - b)
    return total


@triton.jit
def clear_column_sums(sums, lane, start, rows, SIZE: tl.constexpr, F):
    """Set the sums (lanes, W, padded rows) of a tile of rows to 0; return their pointers."""
    room = padded_rows(rows, F)
    here = sums + tl.cast(lane, tl.int64) * F.W * room + start + tl.arange(0, SIZE)[:, None]
    for c in range(F.W):
        tl.store(here + c * room, tl.zeros((SIZE, 1), tl.float32))
    return here


@triton.jit
def add_column_gradients(sums, ds, own, others, at, F):
    """Add Σ ds · sign(q − k) over the columns of the tile to the sums of each column of φ.

    The sums are in memory that no other program uses: registers cannot be indexed by the loop
    variable. A key that is NaN and excluded adds 0.
    """
    for c in range(F.W):
        a = tl.load(own.terms + c * own.room + own.near[:, None])
        b = tl.load(others.terms + c * others.room + at[None, :])
        signed = tl.where(a > b, ds, tl.where(a < b, -ds, 0.0))
        there = sums + c * own.room
        tl.store(there, tl.load(there) + tl.sum(signed, 1, keep_dims=True))


@triton.jit
def _sum_squared_differences(own, others, start, here, F):
    """Return Σ (q − k)² of a tile, from rows in the dtype of the arrays."""
    total = tl.zeros((own.offset.shape[0], here.shape[0]), tl.float32)
    for c in range(F.W):
        a = tl.load(own.base + own.offset + c).to(tl.float32)[:, None]
        b = tl.load(others.base + start * others.step + here * others.step + c).to(tl.float32)
        difference = a - b[None, :]
        total += difference * difference
    return total


@triton.jit
def _is_certain(square, slack, F):
    """Return whether r² is precise enough for the score, given a bound of its rounding error.

    NaN is not: ∞ − ∞ in the expanded square may be a distance of ∞.
    """
    TOLERANCE: tl.constexpr = 2.0**-16 if F.APART else 2.0**-10  # of a score
    apart = square - 1.0
    outside = apart > slack
    if F.FORM == "boxcar":
        return outside | (apart < -slack)
    inside = apart < -slack
    if F.FORM == "epanechnikov":
        return outside | (inside & (slack <= TOLERANCE))
    # √ of r² has an error of slack / 2r. At r² < slack it has no correct digit.
    near = slack * slack <= (4 * TOLERANCE * TOLERANCE) * square
    return outside | (inside & near & (square > 4 * slack))


@triton.jit
def _window_square(x, own, others, start, here, scale, F):
    """Return r² of a tile from φ·ψ, exact for pairs whose score depends on the rounding.

    Whether a pair is computed again does not depend on its tile. So every pass finds the same
    score.
    """
    # A sum of at most 256 products is that precise; the squares are sums of at most as many.
    UNIT: tl.constexpr = (2.0**-21 if F.APART else 2.0**-22) * (1 if F.W <= 256 else 4)
    size = own.terms + tl.load(others.terms + start + here)[None, :]
    square = (size - 2.0 * x) * scale
    certain = _is_certain(square, size * (scale * UNIT), F)
    if tl.min(tl.min(certain.to(tl.int32), 1), 0) == 0:
        exact = _sum_squared_differences(own, others, start, here, F) * scale
        square = tl.where(certain, square, exact)
    return square


@triton.jit
def _window_profile(square, F):
    """Return the score at r², and its derivative in r²."""
    if F.FORM == "boxcar":
        s = tl.where(square != square, square, tl.where(square <= 1.0, 1.0, 0.0))
        slope = s * 0.0
    elif F.FORM == "triangular":
        inside = ((square > 0.0) & (square < 1.0)) | (square != square)
        r = tl.sqrt(tl.where(inside, square, 1.0))
        s = tl.where(square == 0.0, 1.0, 1.0 - r)
        slope = tl.where(inside, -0.5 / r, 0.0)
    else:
        s = 1.0 - square
        on = (s <= 0.0) == 0  # or NaN
        s = tl.where(on, s, 0.0)
        slope = tl.where(on, -1.0, 0.0)
    return s, slope


@triton.jit
def apply_distance_form(x, own, others, start, here, cap, scales, times, F):
    """Return s of a tile and its derivative in r² (for Laplace in Σ |q − k|), without the scale.

    With F.CAP < 0 each query has its own factor, `cap`, which is part of the derivative.
    """
    if F.WINDOW:
        square = _window_square(x, own, others, start, here, scales.square_scale, F)
        s, slope = _window_profile(square, F)
    elif F.FORM == "exact":
        s = tl.where(x == 0.0, 1.0, 0.0)
        slope = s
    else:
        s = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    if F.CAP < 0:
        return s * (cap * times), slope * cap
    return s * scales.scale, slope


@triton.jit
def finish_product_gradient(total, held, part, scales, F):
    """Return Σ g k of rows as the gradient of φ·ψ; for a window Σ g (q − k), with part = Σ g.

    In float32: both sums would lose the same digits if they were rounded first.
    """
    if F.WINDOW:
        some = part[:, None]
        total = total - tl.where(some == 0.0, 0.0, some * held.to(tl.float32))
        total = total * (-2.0 * scales.square_scale)
    return total
