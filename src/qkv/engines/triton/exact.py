"""s = Σ_h v_h tanh(a_h + b_h), literally, and softmax of it: no n × m array, f32 arithmetic.

tanh(a + b) = 1 − 2r with r = 1 / (1 + e²ᵃ·e²ᵇ). The exponentials are made once for each row, so a
pair costs a multiplication and half a reciprocal: 1/x + 1/y = (x + y) / xy. The slope of the tanh
is 4r(1 − r). Where a row's numbers are too large for that, r is computed from the sum itself.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton import launch
from qkv.engines.triton.operators import operator, refuse
from qkv.engines.triton.tiles import launched, length_of

BLOCK = 64
"""Queries or keys of a tile."""
BUSY = launch.Tile(BLOCK, BLOCK, 1, 8, 1)
"""Warps and stages of the kernels that look at pairs, and of the others."""
PLAIN = launch.Tile(BLOCK, 1, 1, 4, 3)
REACH = tl.constexpr(40.0)
"""Up to this |a|, |b| the exponentials e²ᵃ, e²ᵇ are ordinary float32 numbers."""
CAP = tl.constexpr(2.0**40)
"""What 1 + e²ᵃ·e²ᵇ is cut off at, so that the product of two is finite: r < 1e-12 counts as 0."""
OPEN = 2**30
"""The bound of a band that has none."""
WAITING = 264
"""Programs, at most, of a kernel that may find nothing to do: two for each of 132 processors."""


@triton.jit
def _reciprocal(x, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _prepare(job, x, ex, peak, rows, padded, h, F):
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
        seen = tl.where(tl.abs(one) < float("inf"), tl.abs(one), float("inf"))
        top = tl.maximum(top, tl.max(seen, 0))
        to = ex + (lead * F.PAIRED + col[:, None]) * padded + row[None, :]
        tl.store(to, tl.exp(2 * one), mask=(col < F.PAIRED)[:, None])
    tl.store(peak + job, tl.max(top, 0))


@launched
def _prepare_kernel(
    a, b, ea, eb, peak_a, peak_b, when, jobs_a, jobs, n, m, pad_n, pad_m, h, F: tl.constexpr
):
    if when is not None and tl.load(when) == 0:
        return
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        if job < jobs_a:
            _prepare(job, a, ea, peak_a, n, pad_n, h, F)
        else:
            _prepare(job - jobs_a, b, eb, peak_b, m, pad_m, h, F)


@triton.jit
def _near(peak_one, peak_two):
    """Whether both tiles have exponentials."""
    return tl.maximum(tl.load(peak_one), tl.load(peak_two)) <= REACH


@triton.jit
def _far_r(one, two, c, row, col, rows, cols, h):
    """r of hidden unit c from a + b, where the exponentials would overflow."""
    x = tl.load(one + row.to(tl.int64) * h + c, mask=row < rows, other=0.0).to(tl.float32)
    y = tl.load(two + col.to(tl.int64) * h + c, mask=col < cols, other=0.0).to(tl.float32)
    return 1.0 / (1.0 + tl.exp(2 * (x[:, None] + y[None, :])))


@triton.jit
def _scores(
    near, e_one, e_two, one, two, v, total, row, col, rows, cols, pad_one, pad_two, h,
    F,
):  # fmt: skip
    """Scores of a tile, `one` down and `two` across: Σ v − 2 Σ v·r."""
    part = tl.zeros((F.BLOCK, F.BLOCK), tl.float32)
    if near:
        for c in range(0, F.PAIRED, 2):
            first = tl.load(v + c).to(tl.float32)
            second = tl.load(v + c + 1, mask=c + 1 < h, other=0.0).to(tl.float32)
            x = tl.load(e_one + c * pad_one + row)[:, None]
            x *= tl.load(e_two + c * pad_two + col)[None, :]
            y = tl.load(e_one + (c + 1) * pad_one + row)[:, None]
            y *= tl.load(e_two + (c + 1) * pad_two + col)[None, :]
            x = tl.minimum(x + 1.0, CAP)
            y = tl.minimum(y + 1.0, CAP)
            part += (first * y + second * x) * _reciprocal(x * y, F.ASM)
    else:
        for c in range(h):
            weight = tl.load(v + c).to(tl.float32)
            part += weight * _far_r(one, two, c, row, col, rows, cols, h)
    return total - 2 * part


@triton.jit
def _sum_of(v, h, F):
    hidden = tl.arange(0, F.BLOCK_H)
    return tl.sum(tl.load(v + hidden, mask=hidden < h, other=0.0).to(tl.float32), 0)


@triton.jit
def _rows_of_job(job, lengths, heads, group, n, m, pad_n, lower, upper, F):
    """The head of a job and that of its keys, its queries, and the keys that they may see."""
    tiles = pad_n // F.BLOCK
    first = job % tiles * F.BLOCK
    lead = (job // tiles).to(tl.int64)
    shared = lead // heads * (heads // group) + lead % heads // group
    length = length_of(lengths, lead // heads, m)
    begin = tl.maximum(first + lower, 0) // F.BLOCK * F.BLOCK
    end = tl.minimum(length, tl.minimum(first + F.BLOCK, n) + upper)
    return lead, shared, first + tl.arange(0, F.BLOCK), begin, end, length


@triton.jit
def _live(query, key, n, length, lower, upper):
    """Which pairs count; query and key positions already broadcast."""
    apart = key - query
    return (query < n) & (key < length) & (apart >= lower) & (apart <= upper)


@triton.jit
def _pool(weight, live, value, PRECISION: tl.constexpr):
    """weight·value, where a value that is not finite spoils only the rows that may look at it."""
    finite = tl.abs(value) < float("inf")
    clean = tl.where(finite, value, 0.0).to(value.dtype)
    pooled = tl.dot(weight.to(value.dtype), clean, input_precision=PRECISION)
    if tl.max(tl.where(finite, 0, 1)) > 0:
        spoil = tl.dot(live.to(tl.float16), tl.where(finite, 0.0, 1.0).to(tl.float16))
        pooled = tl.where(spoil > 0, float("nan"), pooled)
    return pooled


@launched
def _forward_kernel(
    ea, eb, peak_a, peak_b, a, b, v, value, lengths, when, out, lse, heads, group, n, m, pad_n,
    pad_m, h, d, lower, upper, jobs, F: tl.constexpr,
):  # fmt: skip
    if when is not None and tl.load(when) == 0:
        return
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        lead, shared, row, begin, end, length = _rows_of_job(
            job, lengths, heads, group, n, m, pad_n, lower, upper, F
        )
        ea_here = ea + lead * F.PAIRED * pad_n
        eb_here = eb + shared * F.PAIRED * pad_m
        a_here = a + lead * n * h
        b_here = b + shared * m * h
        value_here = value + shared * m * d
        at_d = tl.arange(0, F.BLOCK_D)
        total = _sum_of(v, h, F)

        top = tl.full((F.BLOCK,), -float("inf"), tl.float32)
        mass = tl.zeros((F.BLOCK,), tl.float32)
        pooled = tl.zeros((F.BLOCK, F.BLOCK_D), tl.float32)
        for start in range(begin, end, F.BLOCK):
            col = start + tl.arange(0, F.BLOCK)
            near = _near(peak_a + job, peak_b + shared * (pad_m // F.BLOCK) + start // F.BLOCK)
            s = _scores(
                near, ea_here, eb_here, a_here, b_here, v, total, row, col, n, m, pad_n, pad_m, h,
                F,
            )  # fmt: skip
            live = _live(row[:, None], col[None, :], n, length, lower, upper)
            s = tl.where(live, s, -float("inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            weight = tl.exp(s - base[:, None])
            fade = tl.exp(top - base)
            mass = mass * fade + tl.sum(weight, 1)
            within = (col < length)[:, None] & (at_d < d)[None, :]
            values = tl.load(value_here + col[:, None] * d + at_d[None, :], mask=within, other=0.0)
            pooled = pooled * fade[:, None] + _pool(weight, live, values, F.PRECISION)
            top = higher
        empty = mass == 0
        pooled /= tl.where(empty, 1.0, mass)[:, None]
        logsum = tl.where(empty, -float("inf"), top + tl.log(tl.where(empty, 1.0, mass)))
        to = out + (lead * n + row[:, None]) * d + at_d[None, :]
        inside = (row < n)[:, None] & (at_d < d)[None, :]
        tl.store(to, pooled.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + lead * n + row, logsum, mask=row < n)


@triton.jit
def _slope(s, live, lse, centre, grad, value, PRECISION: tl.constexpr, FLIP: tl.constexpr):
    """The weights of a tile and ∂L/∂s = α (∂L/∂α − centre); FLIP: keys down, queries across."""
    if FLIP:
        along = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
        weight = tl.where(live, tl.exp(s - lse[None, :]), 0.0)
        slope = tl.where(live, weight * (along - centre[None, :]), 0.0)
    else:
        along = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
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
    return do, tl.where(base == -float("inf"), 0.0, base), centre


@launched
def _query_grad_kernel(
    ea, eb, peak_a, peak_b, a, b, v, value, lengths, when, out, lse, grad, grad_lse, ones,
    squares, sums, heads, group, n, m, pad_n, pad_m, h, d, lower, upper, jobs, F: tl.constexpr,
):  # fmt: skip
    """Σⱼ ds·r, Σⱼ ds·r² for each hidden unit and query, (PAIRED, pad_n), and Σⱼ ds.

    The sums over the keys of a tile are added to memory that no other program touches: a register
    tile has no index that is known only when the loop runs.
    """
    if when is not None and tl.load(when) == 0:
        return
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        lead, shared, row, begin, end, length = _rows_of_job(
            job, lengths, heads, group, n, m, pad_n, lower, upper, F
        )
        ea_here = ea + lead * F.PAIRED * pad_n
        eb_here = eb + shared * F.PAIRED * pad_m
        a_here = a + lead * n * h
        b_here = b + shared * m * h
        value_here = value + shared * m * d
        ones_here = ones + lead * F.PAIRED * pad_n
        squares_here = squares + lead * F.PAIRED * pad_n
        at_d = tl.arange(0, F.BLOCK_D)
        total = _sum_of(v, h, F)
        do, base, centre = _rows_of(out, lse, grad, grad_lse, lead, row, n, at_d, d)

        whole = tl.zeros((F.BLOCK,), tl.float32)
        for c in range(h):
            tl.store(ones_here + c * pad_n + row, whole)
            tl.store(squares_here + c * pad_n + row, whole)
        for start in range(begin, end, F.BLOCK):
            col = start + tl.arange(0, F.BLOCK)
            near = _near(peak_a + job, peak_b + shared * (pad_m // F.BLOCK) + start // F.BLOCK)
            s = _scores(
                near, ea_here, eb_here, a_here, b_here, v, total, row, col, n, m, pad_n, pad_m, h,
                F,
            )  # fmt: skip
            live = _live(row[:, None], col[None, :], n, length, lower, upper)
            within = (col < length)[:, None] & (at_d < d)[None, :]
            values = tl.load(value_here + col[:, None] * d + at_d[None, :], mask=within, other=0.0)
            _, ds = _slope(s, live, base, centre, do, values, F.PRECISION, False)
            whole += tl.sum(ds, 1)
            if near:
                for c in range(h):
                    at = c * pad_n + row
                    x = tl.load(ea_here + at)[:, None] * tl.load(eb_here + c * pad_m + col)[None, :]
                    r = _reciprocal(1.0 + x, F.ASM)
                    tl.store(ones_here + at, tl.load(ones_here + at) + tl.sum(ds * r, 1))
                    tl.store(squares_here + at, tl.load(squares_here + at) + tl.sum(ds * r * r, 1))
            else:
                for c in range(h):
                    at = c * pad_n + row
                    # A key or a query behind the mask may be NaN, and 0 · NaN would bring it back.
                    r = tl.where(ds != 0, _far_r(a_here, b_here, c, row, col, n, m, h), 0.0)
                    tl.store(ones_here + at, tl.load(ones_here + at) + tl.sum(ds * r, 1))
                    tl.store(squares_here + at, tl.load(squares_here + at) + tl.sum(ds * r * r, 1))
        tl.store(sums + lead * pad_n + row, whole)


@launched
def _key_grad_kernel(
    ea, eb, peak_a, peak_b, a, b, v, value, lengths, when, out, lse, grad, grad_lse, slopes,
    dvalue, heads, group, n, m, pad_n, pad_m, h, d, lower, upper, jobs, F: tl.constexpr,
):  # fmt: skip
    """Σᵢ ds·r(1 − r) for each hidden unit and key, (PAIRED, pad_m), and dvalue = Σᵢ α dO.

    Both over all queries and heads that share the key. Tiles stand with keys down, so that the
    sums over queries stay within a warp.
    """
    if when is not None and tl.load(when) == 0:
        return
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        tiles = pad_m // F.BLOCK
        tile = job % tiles
        shared = (job // tiles).to(tl.int64)
        few = heads // group
        batch = shared // few
        eb_here = eb + shared * F.PAIRED * pad_m
        b_here = b + shared * m * h
        slopes_here = slopes + shared * F.PAIRED * pad_m
        length = length_of(lengths, batch, m)
        row = tile * F.BLOCK + tl.arange(0, F.BLOCK)
        at_d = tl.arange(0, F.BLOCK_D)
        total = _sum_of(v, h, F)
        begin = tl.maximum(tile * F.BLOCK - upper, 0) // F.BLOCK * F.BLOCK
        end = tl.minimum(n, tile * F.BLOCK + F.BLOCK - lower)
        end = tl.where(tile * F.BLOCK < length, end, 0)
        within = (row < length)[:, None] & (at_d < d)[None, :]
        values = tl.load(
            value + (shared * m + row[:, None]) * d + at_d[None, :], mask=within, other=0.0
        )

        pooled = tl.zeros((F.BLOCK, F.BLOCK_D), tl.float32)
        for c in range(h):
            tl.store(slopes_here + c * pad_m + row, tl.zeros((F.BLOCK,), tl.float32))
        for member in range(group):
            lead = batch * heads + shared % few * group + member
            e_query = ea + lead * F.PAIRED * pad_n
            query = a + lead * n * h
            for start in range(begin, end, F.BLOCK):
                col = start + tl.arange(0, F.BLOCK)
                do, base, centre = _rows_of(out, lse, grad, grad_lse, lead, col, n, at_d, d)
                near = _near(peak_b + job, peak_a + lead * (pad_n // F.BLOCK) + start // F.BLOCK)
                s = _scores(
                    near, eb_here, e_query, b_here, query, v, total, row, col, m, n, pad_m, pad_n,
                    h, F,
                )  # fmt: skip
                live = _live(col[None, :], row[:, None], n, length, lower, upper)
                weight, ds = _slope(s, live, base, centre, do, values, F.PRECISION, True)
                pooled += tl.dot(weight.to(do.dtype), do, input_precision=F.PRECISION)
                if near:
                    for c in range(h):
                        at = c * pad_m + row
                        x = (
                            tl.load(eb_here + at)[:, None]
                            * tl.load(e_query + c * pad_n + col)[None, :]
                        )
                        r = _reciprocal(1.0 + x, F.ASM)
                        tl.store(
                            slopes_here + at,
                            tl.load(slopes_here + at) + tl.sum(ds * (r - r * r), 1),
                        )
                else:
                    for c in range(h):
                        at = c * pad_m + row
                        r = tl.where(ds != 0, _far_r(b_here, query, c, row, col, m, n, h), 0.0)
                        tl.store(
                            slopes_here + at,
                            tl.load(slopes_here + at) + tl.sum(ds * (r - r * r), 1),
                        )
        to = dvalue + (shared * m + row[:, None]) * d + at_d[None, :]
        inside = (row < m)[:, None] & (at_d < d)[None, :]
        tl.store(to, pooled.to(dvalue.dtype.element_ty), mask=inside)


@triton.jit
def _finish(job, ones, squares, sums, v, dx, parts, rows, padded, h, QUERY: tl.constexpr, F):
    """dx = 4v (Σ ds·r − Σ ds·r²), turned to (rows, h); for the queries, parts of dv as well.

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
        first = tl.load(ones + at, mask=inside, other=0.0)
        slope = first
        if QUERY:
            slope -= tl.load(squares + at, mask=inside, other=0.0)
            whole = tl.load(sums + lead * padded + row, mask=row < rows, other=0.0)
            part = tl.sum(tl.where(inside, whole[None, :] - 2 * first, 0.0), 1)
            tl.store(parts + job * h + col, part, mask=col < h)
        slope *= 4 * tl.load(v + col, mask=col < h, other=0.0).to(tl.float32)[:, None]
        to = dx + (lead * rows + row[:, None]) * h + col[None, :]
        tl.store(to, tl.trans(slope).to(dx.dtype.element_ty), mask=tl.trans(inside))


@launched
def _finish_kernel(
    ones, squares, sums, slopes, v, when, da, db, parts, jobs_a, jobs, n, m, pad_n, pad_m, h,
    F: tl.constexpr,
):  # fmt: skip
    if when is not None and tl.load(when) == 0:
        return
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        if job < jobs_a:
            _finish(job, ones, squares, sums, v, da, parts, n, pad_n, h, True, F)
        else:
            _finish(
                job - jobs_a, slopes, slopes, slopes, v, db, parts, m, pad_m, h, False, F,
            )  # fmt: skip


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
def _fold_kernel(parts, others, when, dv, count, others_count, h, F: tl.constexpr):
    """dv (h,), the sum of the parts (count, h) in a fixed order; if `when` is 0 of the others."""
    if when is None:
        _fold(parts, dv, count, h, F)
    else:
        if tl.load(when) != 0:
            _fold(parts, dv, count, h, F)
        elif others is not None:
            _fold(others, dv, others_count, h, F)


class _Call:
    """What the kernels of one call share."""

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        v: Tensor,
        value: Tensor,
        lower: int | None,
        upper: int | None,
        lengths: Tensor | None,
        when: Tensor | None,
    ) -> None:
        a, b, v, value = (x.contiguous() for x in (a, b, v, value))
        self.v, self.when = v, when
        _, heads, n, self.h = a.shape
        few, m = b.shape[1:3]
        on_device = a.is_cuda and not launch.interpreted()
        self.paired = self.h + self.h % 2
        (ea, peak_a), (eb, peak_b) = self.room(a), self.room(b)
        self.queries, self.keys = ea, eb
        self.query_tiles, self.key_tiles = peak_a.numel(), peak_b.numel()
        self.inputs = (
            ea, eb, peak_a, peak_b, a, b, v, value,
            None if lengths is None else lengths.to(torch.int32), when,
        )  # fmt: skip
        self.sizes = (
            heads, heads // few, n, m, ea.shape[-1], eb.shape[-1], self.h, value.shape[-1],
            -OPEN if lower is None else max(lower, -OPEN),
            OPEN if upper is None else min(upper, OPEN),
        )  # fmt: skip
        self.facts: dict[str, Any] = {
            "PAIRED": self.paired,
            "ASM": on_device and torch.version.hip is None,
            "PRECISION": "tf32x3" if on_device else "ieee",
            "BLOCK": BLOCK,
            "BLOCK_H": launch.power_of_2(self.h),
            "BLOCK_D": max(launch.power_of_2(value.shape[-1]), 16),
        }
        arrays = (a, b, ea, eb, peak_a, peak_b, when)
        self.each_row(_prepare_kernel, arrays, (n, m, ea.shape[-1], eb.shape[-1], self.h))

    def room(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For e²ˣ (B, H, paired, padded rows) in float32, and the largest |x| of each tile."""
        *lead, rows, _ = x.shape
        padded = -(-rows // BLOCK) * BLOCK
        ex = x.new_empty((*lead, self.paired, padded), dtype=torch.float32)
        return ex, x.new_empty((*lead, padded // BLOCK), dtype=torch.float32)

    def programs(self, jobs: int) -> int:
        """One for each job; few that share them where it is likely that there is nothing to do."""
        return jobs if self.when is None else min(jobs, WAITING)

    def each_pair(self, kernel: Any, arrays: tuple[Tensor | None, ...], jobs: int) -> None:
        whole = (*self.sizes, jobs)
        given = (*self.inputs, *arrays)
        launch.start(kernel, self.programs(jobs), given, (), whole, self.facts, BUSY)

    def each_row(
        self, kernel: Any, arrays: tuple[Tensor | None, ...], sizes: tuple[int, ...]
    ) -> None:
        jobs = self.query_tiles + self.key_tiles
        facts = {"PAIRED": self.paired, "BLOCK": BLOCK, "BLOCK_H": 32}
        whole = (self.query_tiles, jobs, *sizes)
        launch.start(kernel, self.programs(jobs), arrays, (), whole, facts, PLAIN)


def forward(
    a: Tensor,
    b: Tensor,
    v: Tensor,
    value: Tensor,
    lower: int | None,
    upper: int | None,
    lengths: Tensor | None,
    when: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Fill `out` (B, H, n, d) and `lse` (B, H, n) as `additive_exact` says."""
    if not lse.numel():
        return
    call = _Call(a, b, v, value, lower, upper, lengths, when)
    call.each_pair(_forward_kernel, (out, lse), call.query_tiles)


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    a: Tensor,
    b: Tensor,
    v: Tensor,
    value: Tensor,
    lower: int | None,
    upper: int | None,
    lengths: Tensor | None,
    when: Tensor | None,
    out: Tensor,
    lse: Tensor,
    da: Tensor,
    db: Tensor,
    dv: Tensor,
    dvalue: Tensor,
    others: Tensor | None = None,
) -> None:
    """Fill da, db, dv and dvalue, contiguous and shaped as their arrays.

    Where `when` holds 0, dv is the sum of the others (…, h), if given, and nothing else is filled.
    """
    if not (lse.numel() and b.numel()):
        for x in (da, db, dv, dvalue):
            x.zero_()
        return
    call = _Call(a, b, v, value, lower, upper, lengths, when)
    known = (out, lse, grad.contiguous(), None if grad_lse is None else grad_lse.contiguous())
    ones, squares = torch.empty_like(call.queries), torch.empty_like(call.queries)
    sums = ones.new_empty((*a.shape[:2], ones.shape[-1]))
    slopes = torch.empty_like(call.keys)
    parts = ones.new_empty((call.query_tiles, call.h))
    call.each_pair(_query_grad_kernel, (*known, ones, squares, sums), call.query_tiles)
    call.each_pair(_key_grad_kernel, (*known, slopes, dvalue), call.key_tiles)
    arrays = (ones, squares, sums, slopes, call.v, when, da, db, parts)
    sizes = (a.shape[2], b.shape[2], ones.shape[-1], slopes.shape[-1], call.h)
    call.each_row(_finish_kernel, arrays, sizes)
    whole = (call.query_tiles, 0 if others is None else others.shape[0], call.h)
    facts = {"BLOCK": 512, "UNITS": 8}
    launch.start(_fold_kernel, -(-call.h // 8), (parts, others, when, dv), (), whole, facts, PLAIN)


def fake_backward(grad: Tensor, grad_lse: Tensor | None, *arrays: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in arrays[:4])


@operator(fake_backward, refuse)
def additive_exact_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    a: Tensor,
    b: Tensor,
    v: Tensor,
    value: Tensor,
    lower: int | None,
    upper: int | None,
    lengths: Tensor | None,
    when: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """da, db, dv, dvalue."""
    new = torch.empty_like if when is None else torch.zeros_like
    places = [new(x, memory_format=torch.contiguous_format) for x in (a, b, v, value)]
    with launch.on(a.device):
        backward(grad, grad_lse, a, b, v, value, lower, upper, lengths, when, out, lse, *places)
    return tuple(places)


def _fake(a: Tensor, b: Tensor, v: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = value.new_empty((*a.shape[:3], value.shape[3]))
    return out, a.new_empty(a.shape[:3], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, b, v, value, ctx.lower, ctx.upper, lengths, when = inputs
    ctx.save_for_backward(a, b, v, value, lengths, when, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    a, b, v, value, lengths, when, out, lse = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(out)
    grads = additive_exact_backward(
        grad, grad_lse, a, b, v, value, ctx.lower, ctx.upper, lengths, when, out, lse
    )
    return *grads, None, None, None, None


@operator(_fake, _differentiate, _save)
def additive_exact(
    a: Tensor,
    b: Tensor,
    v: Tensor,
    value: Tensor,
    lower: int | None = None,
    upper: int | None = None,
    lengths: Tensor | None = None,
    when: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention with s = Σ_h v_h tanh(a_h + b_h), and its log-sum-exp.

    a (B, H, n, h), b (B, Hₖ, m, h), v (h,), value (B, Hₖ, m, d) → (B, H, n, d), (B, H, n) float32.
    The pair i, j counts if lower ≤ j − i ≤ upper and j < lengths[batch]. Where `when` (1,) int32
    holds 0, nothing is computed and everything is 0.
    """
    new = torch.empty if when is None else torch.zeros
    out = new((*a.shape[:3], value.shape[3]), dtype=value.dtype, device=a.device)
    lse = new(a.shape[:3], dtype=torch.float32, device=a.device)
    with launch.on(a.device):
        forward(a, b, v, value, lower, upper, lengths, when, out, lse)
    return out, lse
