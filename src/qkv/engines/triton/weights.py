"""αᵢⱼ = exp(scale · qᵢ·kⱼ − lseᵢ), of every head or their mean, in one pass over the pairs.

The log-sum-exp comes from the kernel that made the output, so no row is searched again, and of the
heads' n × m matrices none is written where only the mean is wanted.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton import launch
from qkv.engines.triton.arguments import Arguments, Numbers
from qkv.engines.triton.launch import Launch, Tile
from qkv.engines.triton.place import keys_of, place, product, tile_of
from qkv.engines.triton.records import Arrays, Scales, Sizes
from qkv.engines.triton.tiles import LOG2E, NONE, fetch, launched

ROWS, COLS = 64, 64
TILE = Tile(ROWS, COLS, COLS, 4, 3)


@triton.jit
def _alpha(t, rows, keys, x, top, scales, z, F):
    """The weights of tile t (ROWS, COLS), from φ(q)·ψ(k) and the rows' log-sum-exps (ROWS, 1)."""
    _, _, _, live, extra = tile_of(t, rows, keys, scales.times, z, F, True)
    s = x * scales.scale
    if F.PAIRS == 2:
        s += extra
    return tl.where(live & (top != NONE), tl.exp2((s - top) * LOG2E), 0.0)


@triton.jit
def _weighed(t, rows, keys, top, scales, z, F):
    """The weights of tile t, (ROWS, COLS), and its keys (COLS, d)."""
    here = tl.minimum(tl.arange(0, F.COLS), z.m - 1 - t * F.COLS)
    x, k = product(rows, keys, t * F.COLS, here, F)
    return _alpha(t, rows, keys, x, top, scales, z, F), k


@triton.jit
def _along(x, rows, t, a_row, a_col, share, z, F):
    """The gradient of the weights of tile t, (ROWS, COLS)."""
    col = (t * F.COLS + tl.arange(0, F.COLS))[None, :]
    places = rows.i.to(tl.int64) * a_row + col * a_col
    return tl.load(x + places, mask=col < z.m, other=0.0).to(tl.float32) * share


@launched
def weigh_pairs(given, lse, out, scales, steps, n, m, heads, group, upper, F: tl.constexpr):
    """A tile of the weights of each head of a batch, or of their mean."""
    z = Sizes(n, m, heads, group, n, 0, upper)
    batch = tl.program_id(2)
    t = tl.program_id(0)
    col = (t * F.COLS + tl.arange(0, F.COLS))[None, :]
    total = tl.zeros((F.ROWS, F.COLS), tl.float32)
    row = (tl.program_id(1) * F.ROWS + tl.arange(0, F.ROWS))[:, None]
    within = (row < n) & (col < m)
    there = row.to(tl.int64) * m + col
    for head in range(heads):
        lane = batch * heads + head
        rows, spot = place(given, steps, tl.program_id(1), lane, z, F)
        keys = keys_of(given, None, 0, steps, spot.batch, spot.shared, z, F)
        top = tl.load(lse + spot.line)[:, None]
        alpha, _ = _weighed(t, rows, keys, top, scales, z, F)
        if F.MEAN:
            total += alpha
        else:
            to = out + tl.cast(lane, tl.int64) * n * m + there
            tl.store(to, alpha.to(out.dtype.element_ty), mask=within)
    if F.MEAN:
        to = out + tl.cast(batch, tl.int64) * n * m + there
        tl.store(to, (total * scales.share).to(out.dtype.element_ty), mask=within)


@launched
def weigh_queries(
    given, lse, along, dquery, centre, scales, steps, a_b, a_h, a_n, a_m,
    n, m, heads, group, upper, F: tl.constexpr,
):  # fmt: skip
    """∂L/∂q of a tile of rows of one head, and Σⱼ αⱼ gⱼ of each, with g = ∂L/∂α."""
    z = Sizes(n, m, heads, group, n, 0, upper)
    lane = tl.program_id(2) * heads + tl.program_id(1)
    rows, spot = place(given, steps, tl.program_id(0), lane, z, F)
    keys = keys_of(given, None, 0, steps, spot.batch, spot.shared, z, F)
    top = tl.load(lse + spot.line)[:, None]
    end = m
    if F.UPPER:
        end = tl.minimum(m, spot.first + F.ROWS + upper)
    tiles = (end + F.COLS - 1) // F.COLS
    along += spot.batch * a_b + spot.head * a_h
    middle = tl.zeros((F.ROWS,), tl.float32)
    for t in range(0, tiles):
        alpha, _ = _weighed(t, rows, keys, top, scales, z, F)
        middle += tl.sum(alpha * _along(along, rows, t, a_n, a_m, scales.share, z, F), 1)
    total = tl.zeros((F.ROWS, F.BLOCK_W), tl.float32)
    for t in range(0, tiles):
        alpha, k = _weighed(t, rows, keys, top, scales, z, F)
        g = _along(along, rows, t, a_n, a_m, scales.share, z, F)
        slope = (alpha * (g - middle[:, None])).to(k.dtype)
        total += tl.dot(slope, k, input_precision=F.PRECISION)
    at = tl.arange(0, F.BLOCK_W)[None, :]
    to = dquery + spot.batch * steps.o_b + spot.head * steps.o_h
    to += rows.i.to(tl.int64) * steps.o_n + at
    inside = spot.inside[:, None] & (at < F.W)
    tl.store(to, (total * scales.scale).to(dquery.dtype.element_ty), mask=inside)
    tl.store(centre + spot.line, middle, mask=spot.inside)


@launched
def weigh_keys(
    given, lse, along, dkey, centre, scales, steps, a_b, a_h, a_n, a_m,
    n, m, heads, group, upper, F: tl.constexpr,
):  # fmt: skip
    """∂L/∂k of a tile of columns of one head of keys, over all the heads that share it."""
    z = Sizes(n, m, heads, group, n, 0, upper)
    t = tl.program_id(0)
    few = tl.program_id(1)
    batch = tl.cast(tl.program_id(2), tl.int64)
    keys = keys_of(given, None, 0, steps, batch, tl.cast(few, tl.int64), z, F)
    first = t * F.COLS
    here = tl.minimum(tl.arange(0, F.COLS), m - 1 - first)
    k = fetch(keys.key + first * keys.k_m, here * keys.k_m, F.W, F.BLOCK_W)  # (COLS, d)
    begin = 0
    if F.UPPER:
        begin = tl.maximum(0, first - upper) // F.ROWS
    total = tl.zeros((F.COLS, F.BLOCK_W), tl.float32)
    for head in range(few * group, few * group + group):
        slopes = along + batch * a_b + head * a_h
        for tile in range(begin, (n + F.ROWS - 1) // F.ROWS):
            rows, spot = place(given, steps, tile, tl.program_id(2) * heads + head, z, F)
            top = tl.load(lse + spot.line)[:, None]
            middle = tl.load(centre + spot.line)[:, None]
            x = tl.dot(rows.q, tl.trans(k), input_precision=F.PRECISION)
            alpha = _alpha(t, rows, keys, x, top, scales, z, F)
            g = _along(slopes, rows, t, a_n, a_m, scales.share, z, F)
            slope = tl.where(spot.inside[:, None], alpha * (g - middle), 0.0).to(k.dtype)
            total += tl.dot(tl.trans(slope), rows.q, input_precision=F.PRECISION)
    at = tl.arange(0, F.BLOCK_W)[None, :]
    col = (first + tl.arange(0, F.COLS))[:, None]
    to = dkey + batch * steps.o_b + few * tl.cast(steps.o_h, tl.int64)
    to += col.to(tl.int64) * steps.o_n + at
    tl.store(to, (total * scales.scale).to(dkey.dtype.element_ty), mask=(col < m) & (at < F.W))


def weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    scale: float,
    upper: int | None,
    mean: bool,
    pairs: Tensor | None = None,
    times: float = 1.0,
) -> Tensor:
    """query (B, H, n, d), key (B, Hₖ, m, d), lse (B, H, n) → (B, n, m), or of heads (B, H, n, m).

    With `upper` the pair i, j counts if j − i ≤ upper; `pairs` are those of `ops.attend`.
    The gradient is the whole one: that of the log-sum-exp, which must be the one of these scores,
    is part of it.
    """
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    lse = lse.float().contiguous()
    if not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)):
        return _weights(query, key, lse, pairs, scale, upper, mean, times)
    found: Tensor = _Weights.apply(query, key, lse, pairs, scale, upper, mean, times)
    return found


def _weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    pairs: Tensor | None,
    scale: float,
    upper: int | None,
    mean: bool,
    times: float,
) -> Tensor:
    (b, h, n, _), m = query.shape, key.shape[2]
    out = query.new_empty((b, n, m) if mean else (b, h, n, m))
    given = Arrays(query, key, key, pairs=pairs)
    scales = Scales(scale, 0.0, times, 1 / h if mean else 1.0)
    about = (weigh_pairs, *launch.kinds(query, key, pairs), upper, mean)
    made = launch.MADE.get(about)
    if made is None or not made.again((*given, lse, out), scales):
        call = Arguments(*given, *Numbers(scale, upper=upper))
        grid = triton.cdiv(m, COLS), triton.cdiv(n, ROWS), b
        made = _start(weigh_pairs, grid, call, (lse, out), scales, (call.steps(),), MEAN=mean)
        launch.keep(about, made)
    return out


def _start(
    kernel: Any,
    grid: tuple[int, ...],
    call: Arguments,
    arrays: tuple[Tensor, ...],
    scales: Scales,
    strides: tuple[Any, ...],
    **more: bool,
) -> Launch | None:
    wide = max(triton.next_power_of_2(call.w), 16)
    facts = call.facts | {"ROWS": ROWS, "COLS": COLS, "BLOCK_W": wide, "BLOCK_D": wide} | more
    precision = "ieee" if call.facts["APART"] else "tf32"
    facts |= {"PRECISION": precision, "SCORES": precision}
    facts |= {"WIDE": False, "PACKED": False, "TMA": False, "LAID": False, "QUICK": False}
    whole = (*strides, call.n, call.m, call.h, call.group, call.upper)
    with launch.on(call.query.device):
        return launch.start(kernel, grid, (call.inputs, *arrays), scales, whole, facts, TILE)


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, lse: Tensor, pairs: Tensor | None, *how: Any
    ) -> Tensor:
        ctx.save_for_backward(query, key, lse, pairs)
        ctx.how = how
        return _weights(query, key, lse, pairs, *how)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, along: Tensor) -> tuple[Any, ...]:
        query, key, lse, pairs = ctx.saved_tensors
        scale, upper, mean, times = ctx.how
        (b, h, n, _), (few, m) = query.shape, key.shape[1:3]
        found = torch.empty_like(query), torch.empty_like(key)
        centre = lse.new_empty(b, h, n)
        strides = (along.stride(0), 0, *along.stride()[1:]) if mean else along.stride()
        grids = (triton.cdiv(n, ROWS), h, b), (triton.cdiv(m, COLS), few, b)
        call = Arguments(*Arrays(query, key, key, pairs=pairs), *Numbers(scale, upper=upper))
        scales = Scales(scale, 0.0, times, 1 / h if mean else 1.0)
        for kernel, grid, slopes in zip((weigh_queries, weigh_keys), grids, found, strict=True):
            arrays = (lse, along, slopes, centre)
            _start(kernel, grid, call, arrays, scales, (call.steps(slopes), *strides))
        return *found, *(None,) * 6
