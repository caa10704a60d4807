"""s = Σ_h v_h tanh(a_h + b_h) of a tile, literally, and what its gradient adds to each hidden unit.

tanh(a + b) = 1 − 2r with r = 1 / (1 + e²ᵃ·e²ᵇ). The exponentials are made once for each row, so a
pair costs a multiplication and half a reciprocal: 1/x + 1/y = (x + y) / xy. The slope of the tanh
is 4r(1 − r). Where a row's numbers are too large for that, r is computed from the sum itself.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

MAX_EXPONENTIAL_INPUT = tl.constexpr(40.0)
"""Up to this |a|, |b| the exponentials e²ᵃ, e²ᵇ are ordinary float32 numbers."""
MAX_DENOMINATOR = tl.constexpr(2.0**40)
"""What 1 + e²ᵃ·e²ᵇ is cut off at, so that the product of two is finite: r < 1e-12 counts as 0."""


UnitSide = namedtuple("UnitSide", "e peak v room")
"""Queries or keys of a head: e²ˣ (h + h % 2, room), the largest |x| of each BLOCK, and v."""


UnitTile = namedtuple("UnitTile", "e row room x near peak v total")
"""A tile of them: e²ˣ of all, its rows in it and the step from unit to unit, its own x and the rows
in that, the largest |x|, v, and Σ v."""


@triton.jit
def padded_rows(rows, F):
    return (rows + F.BLOCK - 1) // F.BLOCK * F.BLOCK


@triton.jit
def locate_side(e, peak, v, lane, rows, F):
    room = padded_rows(rows, F)
    lane = tl.cast(lane, tl.int64)
    return UnitSide(e + lane * (F.W + F.W % 2) * room, peak + lane * (room // F.BLOCK), v, room)


@triton.jit
def load_units(side, x, start, near, F):
    """The rows from start on, which in x are `near` it."""
    unit = tl.arange(0, F.UNITS)
    v = tl.load(side.v + unit, mask=unit < F.W, other=0.0).to(tl.float32)
    peak = tl.load(side.peak + start // F.BLOCK)
    # With the start in them, the rows' places differ by what is known when compiling.
    row = start + tl.arange(0, near.shape[0])
    return UnitTile(side.e, row, side.room, x, near, peak, side.v, tl.sum(v, 0))


@triton.jit
def is_disabled(given, F):
    """Whether what was done by features is not to be done again."""
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
    """e²ᵃ·e²ᵇ of unit c."""
    x = tl.load(one.e + c * one.room + one.row)[:, None]
    return x * tl.load(two.e + c * two.room + two.row)[None, :]


@triton.jit
def _logistic_from_sum(one, two, c, F):
    """r of unit c from a + b, where the exponentials would overflow."""
    x = tl.load(one.x + one.near * F.W + c).to(tl.float32)
    y = tl.load(two.x + two.near * F.W + c).to(tl.float32)
    return 1.0 / (1.0 + tl.exp(2 * (x[:, None] + y[None, :])))


@triton.jit
def tanh_scores(one, two, F):
    """Scores of a tile, `one` down and `two` across: Σ v − 2 Σ v·r."""
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
    """Where those of a BLOCK of a lane's rows lie in sums (lanes, W, room), set to 0."""
    room = padded_rows(rows, F)
    here = sums + tl.cast(lane, tl.int64) * F.W * room + start + tl.arange(0, F.ROWS)
    for c in range(F.W):
        tl.store(here + c * room, tl.zeros((F.ROWS,), tl.float32))
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
            # A key or a query behind the mask may be NaN, and 0 · NaN would bring it back.
            r = tl.where(ds != 0, _logistic_from_sum(one, two, c, F), 0.0)
        _add_to_memory(slopes + c * one.room, tl.sum(ds * (r - r * r), 1))
        if QUERY:
            _add_to_memory(along + c * one.room, tl.sum(ds * (1.0 - 2.0 * r), 1))


@triton.jit
def add_unit_gradients(slopes, along, ds, one, two, F, QUERY: tl.constexpr):
    """Add Σ ds·r(1 − r) over what is across, and for queries Σ ds·tanh, of each unit.

    To memory that no other program touches: a register tile has no index that is known only when
    the loop runs.
    """
    if tl.maximum(one.peak, two.peak) <= MAX_EXPONENTIAL_INPUT:
        _add_each_unit(slopes, along, ds, one, two, F, True, QUERY)
    else:
        _add_each_unit(slopes, along, ds, one, two, F, False, QUERY)
