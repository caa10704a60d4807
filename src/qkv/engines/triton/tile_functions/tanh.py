"""Exact s = Σ_h v_h tanh(a_h + b_h) of a tile, and its gradient per hidden unit.

tanh(a + b) = 1 − 2r with r = 1 / (1 + e²ᵃ·e²ᵇ). The exponentials are computed once per row, so a
pair costs a multiplication and half a reciprocal: 1/x + 1/y = (x + y) / xy. The derivative of tanh
is 4r(1 − r). If e²ᵃ or e²ᵇ would overflow, r is computed from a + b.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

MAX_EXPONENTIAL_INPUT = tl.constexpr(40.0)
"""Up to this |a|, |b|, e²ᵃ and e²ᵇ are normal float32 numbers."""
MAX_DENOMINATOR = tl.constexpr(2.0**40)
"""The limit of 1 + e²ᵃ·e²ᵇ, so that the product of two is finite: r < 1e-12 counts as 0."""


UnitSide = namedtuple("UnitSide", "e peak v padded")
"""Queries or keys of a head: e²ˣ (h + h % 2, padded rows), the largest |x| per BLOCK, v, and the
number of padded rows (`padded`)."""


UnitTile = namedtuple("UnitTile", "e row padded x near peak v total")
"""A tile of a `UnitSide`: e²ˣ of all rows, the tile's rows in it, the stride from unit to unit, x
and the tile's rows in it (near), the largest |x|, v, and Σ v."""


@triton.jit
def padded_rows(rows, F):
    return (rows + F.BLOCK - 1) // F.BLOCK * F.BLOCK


@triton.jit
def locate_side(e, peak, v, lane, rows, F):
    padded = padded_rows(rows, F)
    lane = tl.cast(lane, tl.int64)
    return UnitSide(
        e + lane * (F.W + F.W % 2) * padded, peak + lane * (padded // F.BLOCK), v, padded
    )


@triton.jit
def load_units(side, x, start, near, F):
    """Return the tile of rows that begins at row `start`; x + `near` addresses its rows."""
    unit = tl.arange(0, F.UNITS)
    v = tl.load(side.v + unit, mask=unit < F.W, other=0.0).to(tl.float32)
    peak = tl.load(side.peak + start // F.BLOCK)
    # Rows that include the start differ by compile-time constants.
    row = start + tl.arange(0, near.shape[0])
    return UnitTile(side.e, row, side.padded, x, near, peak, side.v, tl.sum(v, 0))


@triton.jit
def is_disabled(given, F):
    """Return whether the exact kernels have nothing to do, because features were sufficient."""
    idle = False
    if F.TANH and given.when is not None:
        idle = tl.load(given.when) == 0
    return idle


@triton.jit
def _fast_reciprocal(x, F):
    if F.TANH == 2:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _exponential_product(one, two, c):
    """Return e²ᵃ·e²ᵇ of unit c."""
    x = tl.load(one.e + c * one.padded + one.row)[:, None]
    return x * tl.load(two.e + c * two.padded + two.row)[None, :]


@triton.jit
def _logistic_from_sum(one, two, c, F):
    """Return r of unit c from a + b, for values whose exponentials would overflow."""
    x = tl.load(one.x + one.near * F.W + c).to(tl.float32)
    y = tl.load(two.x + two.near * F.W + c).to(tl.float32)
    return 1.0 / (1.0 + tl.exp(2 * (x[:, None] + y[None, :])))


@triton.jit
def tanh_scores(one, two, F):
    """Return the scores of a tile, rows `one` and columns `two`: Σ v − 2 Σ v·r."""
    part = tl.zeros((one.near.shape[0], two.near.shape[0]), tl.float32)
    if tl.maximum(one.peak, two.peak) <= MAX_EXPONENTIAL_INPUT:
        for c in range(0, F.W, 2):
            first = tl.load(one.v + c).to(tl.float32)
            second = tl.load(one.v + c + 1, mask=c + 1 < F.W, other=0.0).to(tl.float32)
            x = tl.minimum(_exponential_product(one, two, c) + 1.0, MAX_DENOMINATOR)
            y = tl.minimum(_exponential_product(one, two, c + 1) + 1.0, MAX_DENOMINATOR)
            part += (first * y + second * x) * _fast_reciprocal(x * y, F)
    else:
        for c in range(F.W):
            part += tl.load(one.v + c).to(tl.float32) * _logistic_from_sum(one, two, c, F)
    return one.total - 2 * part


@triton.jit
def clear_unit_sums(sums, lane, start, rows, F):
    """Set the sums (lanes, W, padded rows) of a tile of rows to 0; return their pointers."""
    padded = padded_rows(rows, F)
    here = sums + tl.cast(lane, tl.int64) * F.W * padded + start + tl.arange(0, F.ROWS)
    for c in range(F.W):
        tl.store(here + c * padded, tl.zeros((F.ROWS,), tl.float32))
    return here


@triton.jit
def _add_to_memory(place, x):
    tl.store(place, tl.load(place) + x)


@triton.jit
def _add_each_unit(slopes, along, ds, one, two, F, NEAR: tl.constexpr, QUERY: tl.constexpr):
    for c in range(F.W):
        if NEAR:
            r = _fast_reciprocal(1.0 + _exponential_product(one, two, c), F)
        else:
            # A masked key or query may be NaN, and 0 · NaN is NaN.
            r = tl.where(ds != 0, _logistic_from_sum(one, two, c, F), 0.0)
        _add_to_memory(slopes + c * one.padded, tl.sum(ds * (r - r * r), 1))
        if QUERY:
            _add_to_memory(along + c * one.padded, tl.sum(ds * (1.0 - 2.0 * r), 1))


@triton.jit
def add_unit_gradients(slopes, along, ds, one, two, F, QUERY: tl.constexpr):
    """Add Σ ds·r(1 − r) over the columns, and for queries Σ ds·tanh, of each unit.

    The sums are in memory that no other program uses: registers cannot be indexed by the loop
    variable.
    """
    if tl.maximum(one.peak, two.peak) <= MAX_EXPONENTIAL_INPUT:
        _add_each_unit(slopes, along, ds, one, two, F, True, QUERY)
    else:
        _add_each_unit(slopes, along, ds, one, two, F, False, QUERY)
