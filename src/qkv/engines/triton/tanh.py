"""s = Σ_h v_h tanh(a_h + b_h), literally, and softmax of it: no n × m array, f32 arithmetic.

tanh(a + b) = 1 − 2r with r = 1 / (1 + e²ᵃ·e²ᵇ). The exponentials are made once for each row, so a
pair costs a multiplication and half a reciprocal: 1/x + 1/y = (x + y) / xy. The slope of the tanh
is 4r(1 − r). Where a row's numbers are too large for that, r is computed from the sum itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.records import Sizes
from qkv.engines.triton.tiles import INFINITY, NONE, alive, launched, length_of

REACH = tl.constexpr(40.0)
"""Up to this |a|, |b| the exponentials e²ᵃ, e²ᵇ are ordinary float32 numbers."""
CAP = tl.constexpr(2.0**40)
"""What 1 + e²ᵃ·e²ᵇ is cut off at, so that the product of two is finite: r < 1e-12 counts as 0."""


class Inputs(NamedTuple):
    """e²ᵃ and e²ᵇ, the largest |a| and |b| of each tile, what they are of, v, the values, how many
    keys there are, and whether anything is done."""

    ea: Tensor
    eb: Tensor
    peak_a: Tensor
    peak_b: Tensor
    a: Tensor
    b: Tensor
    v: Tensor
    value: Tensor
    lengths: Tensor | None
    when: Tensor | None


class Side(NamedTuple):
    """Queries or keys of a head: e²ˣ (PAIRED, padded), x (rows, h), the largest |x| of tiles."""

    e: Any
    x: Any
    peak: Any
    rows: Any
    padded: Any


@triton.jit
def _reciprocal(x, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _exponentials(job, x, ex, peak, rows, padded, h, F):
    """e²ˣ (PAIRED, padded) of a tile of x (rows, h), and its largest |x|."""
    tiles = padded // F.BLOCK
    tile = job % tiles
    lead = (job // tiles).to(tl.int64)
    row = tile * F.BLOCK + tl.arange(0, F.BLOCK)
    top = tl.zeros((F.BLOCK,), tl.float32)
    for start in range(0, F.PAIRED, F.BLOCK_H):
        col = start + tl.arange(0, F.BLOCK_H)
        inside = (row < rows)[None, :] & (col < h)[:, None]
        at = lead * rows * h + row[None, :] * h + col[:, None]
        one = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        seen = tl.where(tl.abs(one) < INFINITY, tl.abs(one), INFINITY)
        top = tl.maximum(top, tl.max(seen, 0))
        to = ex + (lead * F.PAIRED + col[:, None]) * padded + row[None, :]
        tl.store(to, tl.exp(2 * one), mask=(col < F.PAIRED)[:, None])
    tl.store(peak + job, tl.max(top, 0))


@launched
def prepare(
    a, b, ea, eb, peak_a, peak_b, when, jobs_a, jobs, n, m, pad_n, pad_m, h, F: tl.constexpr
):
    if when is not None and tl.load(when) == 0:
        return
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        if job < jobs_a:
            _exponentials(job, a, ea, peak_a, n, pad_n, h, F)
        else:
            _exponentials(job - jobs_a, b, eb, peak_b, m, pad_m, h, F)


@triton.jit
def _side(e, x, peak, lead, rows, padded, h, F):
    here = x + lead * rows * h
    return Side(e + lead * F.PAIRED * padded, here, peak + lead * (padded // F.BLOCK), rows, padded)


@triton.jit
def _near(one, row, two, col, F):
    """Whether the tiles that begin at these both have exponentials."""
    peak = tl.maximum(tl.load(one.peak + row // F.BLOCK), tl.load(two.peak + col // F.BLOCK))
    return peak <= REACH


@triton.jit
def _near_r(one, two, c, row, col, F):
    """r of hidden unit c, by the exponentials."""
    x = tl.load(one.e + c * one.padded + row)[:, None]
    x *= tl.load(two.e + c * two.padded + col)[None, :]
    return _reciprocal(1.0 + x, F.ASM)


@triton.jit
def _far_r(one, two, c, row, col, h):
    """The same from a + b, where the exponentials would overflow."""
    x = tl.load(one.x + row.to(tl.int64) * h + c, mask=row < one.rows, other=0.0).to(tl.float32)
    y = tl.load(two.x + col.to(tl.int64) * h + c, mask=col < two.rows, other=0.0).to(tl.float32)
    return 1.0 / (1.0 + tl.exp(2 * (x[:, None] + y[None, :])))


@triton.jit
def _sum_of(v, h, F):
    hidden = tl.arange(0, F.BLOCK_H)
    return tl.sum(tl.load(v + hidden, mask=hidden < h, other=0.0).to(tl.float32), 0)


@triton.jit
def _scores(near, one, two, v, total, row, col, h, F):
    """Scores of a tile, `one` down and `two` across: Σ v − 2 Σ v·r."""
    part = tl.zeros((F.BLOCK, F.BLOCK), tl.float32)
    if near:
        for c in range(0, F.PAIRED, 2):
            first = tl.load(v + c).to(tl.float32)
            second = tl.load(v + c + 1, mask=c + 1 < h, other=0.0).to(tl.float32)
            x = tl.load(one.e + c * one.padded + row)[:, None]
            x *= tl.load(two.e + c * two.padded + col)[None, :]
            y = tl.load(one.e + (c + 1) * one.padded + row)[:, None]
            y *= tl.load(two.e + (c + 1) * two.padded + col)[None, :]
            x = tl.minimum(x + 1.0, CAP)
            y = tl.minimum(y + 1.0, CAP)
            part += (first * y + second * x) * _reciprocal(x * y, F.ASM)
    else:
        for c in range(h):
            part += tl.load(v + c).to(tl.float32) * _far_r(one, two, c, row, col, h)
    return total - 2 * part


@triton.jit
def _queries_of(job, given, pad_n, pad_m, h, z, F):
    """The queries of a job and their keys, which heads those are, and which keys may be seen."""
    tiles = pad_n // F.BLOCK
    first = job % tiles * F.BLOCK
    lead = (job // tiles).to(tl.int64)
    shared = lead // z.heads * (z.heads // z.group) + lead % z.heads // z.group
    length = length_of(given.lengths, lead // z.heads, z.m)
    begin = tl.maximum(first + z.lower, 0) // F.BLOCK * F.BLOCK
    end = tl.minimum(length, tl.minimum(first + F.BLOCK, z.n) + z.upper)
    queries = _side(given.ea, given.a, given.peak_a, lead, z.n, pad_n, h, F)
    keys = _side(given.eb, given.b, given.peak_b, shared, z.m, pad_m, h, F)
    return queries, keys, lead, shared, first, begin, end, length


@triton.jit
def _values(value, shared, m, col, length, d, F):
    """(BLOCK, d), 0 beyond the last key."""
    at_d = tl.arange(0, F.BLOCK_D)
    within = (col < length)[:, None] & (at_d < d)[None, :]
    place = value + (shared * m + col[:, None]) * d + at_d[None, :]
    return tl.load(place, mask=within, other=0.0)


@triton.jit
def _pool(weight, live, value, F):
    """weight·value, where a value that is not finite spoils only the rows that may look at it."""
    finite = tl.abs(value) < INFINITY
    clean = tl.where(finite, value, 0.0).to(value.dtype)
    pooled = tl.dot(weight.to(value.dtype), clean, input_precision=F.PRECISION)
    if tl.max(tl.where(finite, 0, 1)) > 0:
        spoil = tl.dot(live.to(tl.float16), tl.where(finite, 0.0, 1.0).to(tl.float16))
        pooled = tl.where(spoil > 0, float("nan"), pooled)
    return pooled


@launched
def forward(
    given, out, lse, heads, group, n, m, pad_n, pad_m, h, d, lower, upper, jobs, F: tl.constexpr
):
    if given.when is not None and tl.load(given.when) == 0:
        return
    z = Sizes(n, m, heads, group, n, lower, upper)
    total = _sum_of(given.v, h, F)
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        queries, keys, lead, shared, first, begin, end, length = _queries_of(
            job, given, pad_n, pad_m, h, z, F
        )
        row = first + tl.arange(0, F.BLOCK)
        top = tl.full((F.BLOCK,), NONE, tl.float32)
        mass = tl.zeros((F.BLOCK,), tl.float32)
        pooled = tl.zeros((F.BLOCK, F.BLOCK_D), tl.float32)
        for start in range(begin, end, F.BLOCK):
            col = start + tl.arange(0, F.BLOCK)
            near = _near(queries, first, keys, start, F)
            s = _scores(near, queries, keys, given.v, total, row, col, h, F)
            live = alive(row[:, None], col[None, :], length, None, z, F)
            s = tl.where(live, s, NONE)
            higher = tl.maximum(top, tl.max(s, 1))
            base = tl.where(higher == NONE, 0.0, higher)
            weight = tl.exp(s - base[:, None])
            fade = tl.exp(top - base)
            mass = mass * fade + tl.sum(weight, 1)
            values = _values(given.value, shared, m, col, length, d, F)
            pooled = pooled * fade[:, None] + _pool(weight, live, values, F)
            top = higher
        empty = mass == 0
        pooled /= tl.where(empty, 1.0, mass)[:, None]
        logsum = tl.where(empty, NONE, top + tl.log(tl.where(empty, 1.0, mass)))
        at_d = tl.arange(0, F.BLOCK_D)
        to = out + (lead * n + row[:, None]) * d + at_d[None, :]
        inside = (row < n)[:, None] & (at_d < d)[None, :]
        tl.store(to, pooled.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + lead * n + row, logsum, mask=row < n)


@triton.jit
def _slope(s, live, lse, centre, grad, value, F, FLIP: tl.constexpr):
    """The weights of a tile and ∂L/∂s = α (∂L/∂α − centre); FLIP: keys down, queries across."""
    if FLIP:
        along = tl.dot(value, tl.trans(grad), input_precision=F.PRECISION)
        weight = tl.where(live, tl.exp(s - lse[None, :]), 0.0)
        slope = tl.where(live, weight * (along - centre[None, :]), 0.0)
    else:
        along = tl.dot(grad, tl.trans(value), input_precision=F.PRECISION)
        weight = tl.where(live, tl.exp(s - lse[:, None]), 0.0)
        slope = tl.where(live, weight * (along - centre[:, None]), 0.0)
    return weight, slope


@triton.jit
def _rows_of(out, lse, grad, grad_lse, lead, row, n, at_d, d):
    """dO of some queries, their log-sum-exp (0 for an empty row) and the centre Σ dO·O − dlse."""
    inside = (row < n)[:, None] & (at_d < d)[None, :]
    at = (lead * n + row[:, None]) * d + at_d[None, :]
    do = tl.load(grad + at, mask=inside, other=0.0)
    o = tl.load(out + at, mask=inside, other=0.0)
    centre = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    if grad_lse is not None:
        centre -= tl.load(grad_lse + lead * n + row, mask=row < n, other=0.0)
    base = tl.load(lse + lead * n + row, mask=row < n, other=0.0)
    return do, tl.where(base == NONE, 0.0, base), centre


@triton.jit
def _add(place, x):
    tl.store(place, tl.load(place) + x)


@triton.jit
def _add_units(slopes, ones, ds, one, two, row, col, h, F, NEAR: tl.constexpr, QUERY: tl.constexpr):
    """Add Σ ds·r(1 − r) over what is across, and for queries Σ ds·r, of each hidden unit.

    To memory that no other program touches: a register tile has no index that is known only when
    the loop runs.
    """
    for c in range(h):
        if NEAR:
            r = _near_r(one, two, c, row, col, F)
        else:
            # A key or a query behind the mask may be NaN, and 0 · NaN would bring it back.
            r = tl.where(ds != 0, _far_r(one, two, c, row, col, h), 0.0)
        _add(slopes + c * one.padded, tl.sum(ds * (r - r * r), 1))
        if QUERY:
            _add(ones + c * one.padded, tl.sum(ds * r, 1))


@launched
def query_grad(
    given, out, lse, grad, grad_lse, slopes, ones, sums,
    heads, group, n, m, pad_n, pad_m, h, d, lower, upper, jobs, F: tl.constexpr,
):  # fmt: skip
    """Σⱼ ds·r(1 − r), Σⱼ ds·r for each hidden unit and query, (PAIRED, pad_n), and Σⱼ ds."""
    if given.when is not None and tl.load(given.when) == 0:
        return
    z = Sizes(n, m, heads, group, n, lower, upper)
    total = _sum_of(given.v, h, F)
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        queries, keys, lead, shared, first, begin, end, length = _queries_of(
            job, given, pad_n, pad_m, h, z, F
        )
        row = first + tl.arange(0, F.BLOCK)
        slopes_here = slopes + lead * F.PAIRED * pad_n + row
        ones_here = ones + lead * F.PAIRED * pad_n + row
        at_d = tl.arange(0, F.BLOCK_D)
        do, base, centre = _rows_of(out, lse, grad, grad_lse, lead, row, n, at_d, d)
        whole = tl.zeros((F.BLOCK,), tl.float32)
        for c in range(h):
            tl.store(slopes_here + c * pad_n, whole)
            tl.store(ones_here + c * pad_n, whole)
        for start in range(begin, end, F.BLOCK):
            col = start + tl.arange(0, F.BLOCK)
            near = _near(queries, first, keys, start, F)
            s = _scores(near, queries, keys, given.v, total, row, col, h, F)
            live = alive(row[:, None], col[None, :], length, None, z, F)
            values = _values(given.value, shared, m, col, length, d, F)
            _, ds = _slope(s, live, base, centre, do, values, F, False)
            whole += tl.sum(ds, 1)
            if near:
                _add_units(slopes_here, ones_here, ds, queries, keys, row, col, h, F, True, True)
            else:
                _add_units(slopes_here, ones_here, ds, queries, keys, row, col, h, F, False, True)
        tl.store(sums + lead * pad_n + row, whole)


@launched
def key_grad(
    given, out, lse, grad, grad_lse, slopes, dvalue,
    heads, group, n, m, pad_n, pad_m, h, d, lower, upper, jobs, F: tl.constexpr,
):  # fmt: skip
    """Σᵢ ds·r(1 − r) for each hidden unit and key, (PAIRED, pad_m), and dvalue = Σᵢ α dO.

    Both over all queries and heads that share the key. Tiles stand with keys down, so that the
    sums over queries stay within a warp.
    """
    if given.when is not None and tl.load(given.when) == 0:
        return
    z = Sizes(n, m, heads, group, n, lower, upper)
    total = _sum_of(given.v, h, F)
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        tiles = pad_m // F.BLOCK
        first = job % tiles * F.BLOCK
        shared = (job // tiles).to(tl.int64)
        few = heads // group
        batch = shared // few
        keys = _side(given.eb, given.b, given.peak_b, shared, m, pad_m, h, F)
        length = length_of(given.lengths, batch, m)
        row = first + tl.arange(0, F.BLOCK)
        slopes_here = slopes + shared * F.PAIRED * pad_m + row
        at_d = tl.arange(0, F.BLOCK_D)
        begin = tl.maximum(first - upper, 0) // F.BLOCK * F.BLOCK
        end = tl.minimum(n, first + F.BLOCK - lower)
        end = tl.where(first < length, end, 0)
        values = _values(given.value, shared, m, row, length, d, F)
        pooled = tl.zeros((F.BLOCK, F.BLOCK_D), tl.float32)
        for c in range(h):
            tl.store(slopes_here + c * pad_m, tl.zeros((F.BLOCK,), tl.float32))
        for member in range(group):
            lead = batch * heads + shared % few * group + member
            queries = _side(given.ea, given.a, given.peak_a, lead, n, pad_n, h, F)
            for start in range(begin, end, F.BLOCK):
                col = start + tl.arange(0, F.BLOCK)
                do, base, centre = _rows_of(out, lse, grad, grad_lse, lead, col, n, at_d, d)
                near = _near(keys, first, queries, start, F)
                s = _scores(near, keys, queries, given.v, total, row, col, h, F)
                live = alive(col[None, :], row[:, None], length, None, z, F)
                weight, ds = _slope(s, live, base, centre, do, values, F, True)
                pooled += tl.dot(weight.to(do.dtype), do, input_precision=F.PRECISION)
                if near:
                    _add_units(slopes_here, None, ds, keys, queries, row, col, h, F, True, False)
                else:
                    _add_units(slopes_here, None, ds, keys, queries, row, col, h, F, False, False)
        to = dvalue + (shared * m + row[:, None]) * d + at_d[None, :]
        inside = (row < m)[:, None] & (at_d < d)[None, :]
        tl.store(to, pooled.to(dvalue.dtype.element_ty), mask=inside)


@triton.jit
def _slopes(job, slopes, ones, sums, v, dx, parts, rows, padded, h, QUERY: tl.constexpr, F):
    """dx = 4v Σ ds·r(1 − r), turned to (rows, h); for the queries, parts of dv as well.

    dv = Σ ds − 2 Σ ds·r, over all pairs.
    """
    tiles = padded // F.BLOCK
    tile = job % tiles
    lead = (job // tiles).to(tl.int64)
    row = tile * F.BLOCK + tl.arange(0, F.BLOCK)
    for start in range(0, h, F.BLOCK_H):
        col = start + tl.arange(0, F.BLOCK_H)
        inside = (col < h)[:, None] & (row < rows)[None, :]
        at = (lead * F.PAIRED + col[:, None]) * padded + row[None, :]
        slope = tl.load(slopes + at, mask=inside, other=0.0)
        if QUERY:
            first = tl.load(ones + at, mask=inside, other=0.0)
            whole = tl.load(sums + lead * padded + row, mask=row < rows, other=0.0)
            part = tl.sum(tl.where(inside, whole[None, :] - 2 * first, 0.0), 1)
            tl.store(parts + job * h + col, part, mask=col < h)
        slope *= 4 * tl.load(v + col, mask=col < h, other=0.0).to(tl.float32)[:, None]
        to = dx + (lead * rows + row[:, None]) * h + col[None, :]
        tl.store(to, tl.trans(slope).to(dx.dtype.element_ty), mask=tl.trans(inside))


@launched
def finish(
    slopes_a, ones, sums, slopes_b, v, when, da, db, parts, jobs_a, jobs, n, m, pad_n, pad_m, h,
    F: tl.constexpr,
):  # fmt: skip
    if when is not None and tl.load(when) == 0:
        return
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        if job < jobs_a:
            _slopes(job, slopes_a, ones, sums, v, da, parts, n, pad_n, h, True, F)
        else:
            _slopes(job - jobs_a, slopes_b, None, None, v, db, parts, m, pad_m, h, False, F)


@triton.jit
def _fold(parts, dv, count, h, F):
    col = tl.program_id(0) * F.UNITS + tl.arange(0, F.UNITS)
    total = tl.zeros((F.BLOCK, F.UNITS), tl.float32)
    for start in range(0, count, F.BLOCK):
        row = start + tl.arange(0, F.BLOCK)[:, None]
        inside = (row < count) & (col < h)[None, :]
        total += tl.load(parts + row.to(tl.int64) * h + col[None, :], mask=inside, other=0.0)
    tl.store(dv + col, tl.sum(total, 0).to(dv.dtype.element_ty), mask=col < h)


@launched
def fold(parts, others, when, dv, count, others_count, h, F: tl.constexpr):
    """dv (h,), the sum of the parts (count, h) in a fixed order; if `when` is 0 of the others."""
    if when is not None and tl.load(when) == 0:
        if others is not None:
            _fold(others, dv, others_count, h, F)
    else:
        _fold(parts, dv, count, h, F)
