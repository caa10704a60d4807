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
from qkv.engines.triton.arguments import kind_of, shared_strides
from qkv.engines.triton.launch import Launch, Tile
from qkv.engines.triton.tiles import LOG2E, ruled

ROWS, COLS = 64, 64
TILE = Tile(ROWS, COLS, COLS, 4, 3)


@triton.jit
def _alpha(q, k, top, row, col, n, m, upper, scale, rule, F):
    """The weights of a tile: rows q (R, d), columns k (d, C), the rows' log-sum-exps.

    `rule` is a head's part of the mask's array, its strides, and what it is multiplied by.
    """
    live = (row[:, None] < n) & (col[None, :] < m) & (top[:, None] != -float("inf"))
    if F.BOUND:
        live = live & (col[None, :] - row[:, None] <= upper)
    s = tl.dot(q, k, input_precision=F.PRECISION) * scale
    if F.PAIRS:
        place, p_n, p_m, times = rule
        offset = row[:, None].to(tl.int64) * p_n + col[None, :].to(tl.int64) * p_m
        extra, live = ruled(live, place, offset, times, F.PAIRS, True)
        if F.PAIRS == 2:
            s += extra
    return tl.where(live, tl.exp2((s - top[:, None]) * LOG2E), 0.0)


@triton.jit
def _own(pairs, other, offset):
    """A head's part of the mask's array; a function of Triton cannot return None."""
    return other if pairs is None else pairs + offset


@triton.jit
def _read(x, row, stride, n, at, D: tl.constexpr):
    """Rows of x, (R, d)."""
    places = row[:, None].to(tl.int64) * stride + at[None, :]
    return tl.load(x + places, mask=(row[:, None] < n) & (at[None, :] < D), other=0.0)


@triton.jit
def _weights_kernel(
    query, key, lse, pairs, out, scale, share, times, q_batch, q_head, q_row, k_batch, k_head,
    k_row, l_batch, l_head, p_b, p_h, p_n, p_m, n, m, heads, group, upper, F: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * F.ROWS + tl.arange(0, F.ROWS)
    col = tl.program_id(0) * F.COLS + tl.arange(0, F.COLS)
    at = tl.arange(0, F.BLOCK_D)
    within = (row[:, None] < n) & (col[None, :] < m)
    place = row[:, None].to(tl.int64) * m + col[None, :]
    total = tl.zeros((F.ROWS, F.COLS), tl.float32)
    for head in range(heads):
        q = _read(query + batch * q_batch + head * q_head, row, q_row, n, at, F.D)
        k = tl.trans(_read(key + batch * k_batch + head // group * k_head, col, k_row, m, at, F.D))
        top = tl.load(lse + batch * l_batch + head * l_head + row, mask=row < n, other=0.0)
        rule = (_own(pairs, query, batch * p_b + head * p_h), p_n, p_m, times)
        alpha = _alpha(q, k, top, row, col, n, m, upper, scale, rule, F)
        if F.MEAN:
            total += alpha
        else:
            to = out + (batch * heads + head) * n * m + place
            tl.store(to, alpha.to(out.dtype.element_ty), mask=within)
    if F.MEAN:
        tl.store(out + batch * n * m + place, (total * share).to(out.dtype.element_ty), mask=within)


@triton.jit
def _along(x, row, col, stride_row, stride_col, n, m, share):
    """The gradient of the weights of a tile."""
    places = row[:, None].to(tl.int64) * stride_row + col[None, :] * stride_col
    within = (row[:, None] < n) & (col[None, :] < m)
    return tl.load(x + places, mask=within, other=0.0).to(tl.float32) * share


@triton.jit
def _query_kernel(
    query, key, lse, pairs, along, dquery, centre, scale, share, times, q_batch, q_head, q_row,
    k_batch, k_head, k_row, l_batch, l_head, p_b, p_h, p_n, p_m, a_batch, a_head, a_row, a_col,
    d_batch, d_head, d_row, n, m, heads, group, upper, F: tl.constexpr,
):  # fmt: skip
    """∂L/∂q of a tile of rows of one head, and Σⱼ αⱼ gⱼ of each, with g = ∂L/∂α."""
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    first = tl.program_id(0) * F.ROWS
    row, at = first + tl.arange(0, F.ROWS), tl.arange(0, F.BLOCK_D)
    q = _read(query + batch * q_batch + head * q_head, row, q_row, n, at, F.D)
    top = tl.load(lse + batch * l_batch + head * l_head + row, mask=row < n, other=0.0)
    end = m
    if F.BOUND:
        end = min(m, first + F.ROWS + upper)
    key += batch * k_batch + head // group * k_head
    along += batch * a_batch + head * a_head
    rule = (_own(pairs, query, batch * p_b + head * p_h), p_n, p_m, times)
    middle = tl.zeros((F.ROWS,), tl.float32)
    for start in range(0, end, F.COLS):
        col = start + tl.arange(0, F.COLS)
        k = tl.trans(_read(key, col, k_row, m, at, F.D))
        alpha = _alpha(q, k, top, row, col, n, m, upper, scale, rule, F)
        middle += tl.sum(alpha * _along(along, row, col, a_row, a_col, n, m, share), 1)
    total = tl.zeros((F.ROWS, F.BLOCK_D), tl.float32)
    for start in range(0, end, F.COLS):
        col = start + tl.arange(0, F.COLS)
        rows = _read(key, col, k_row, m, at, F.D)
        alpha = _alpha(q, tl.trans(rows), top, row, col, n, m, upper, scale, rule, F)
        g = _along(along, row, col, a_row, a_col, n, m, share)
        slope = (alpha * (g - middle[:, None])).to(rows.dtype)
        total += tl.dot(slope, rows, input_precision=F.PRECISION)
    to = dquery + batch * d_batch + head * d_head + row[:, None].to(tl.int64) * d_row + at[None, :]
    within = (row[:, None] < n) & (at[None, :] < F.D)
    tl.store(to, (total * scale).to(dquery.dtype.element_ty), mask=within)
    tl.store(centre + (batch * heads + head) * n + row, middle, mask=row < n)


@triton.jit
def _key_kernel(
    query, key, lse, pairs, along, dkey, centre, scale, share, times, q_batch, q_head, q_row,
    k_batch, k_head, k_row, l_batch, l_head, p_b, p_h, p_n, p_m, a_batch, a_head, a_row, a_col,
    d_batch, d_head, d_row, n, m, heads, group, upper, F: tl.constexpr,
):  # fmt: skip
    """∂L/∂k of a tile of columns of one head of keys, over all the heads that share it."""
    batch, few = tl.program_id(2).to(tl.int64), tl.program_id(1)
    first = tl.program_id(0) * F.COLS
    col, at = first + tl.arange(0, F.COLS), tl.arange(0, F.BLOCK_D)
    k = tl.trans(_read(key + batch * k_batch + few * k_head, col, k_row, m, at, F.D))
    begin = 0
    if F.BOUND:
        begin = max(0, first - upper) // F.ROWS * F.ROWS
    total = tl.zeros((F.COLS, F.BLOCK_D), tl.float32)
    for head in range(few * group, few * group + group):
        for start in range(begin, n, F.ROWS):
            row = start + tl.arange(0, F.ROWS)
            q = _read(query + batch * q_batch + head * q_head, row, q_row, n, at, F.D)
            top = tl.load(lse + batch * l_batch + head * l_head + row, mask=row < n, other=0.0)
            place = centre + (batch * heads + head) * n + row
            middle = tl.load(place, mask=row < n, other=0.0)
            rule = (_own(pairs, query, batch * p_b + head * p_h), p_n, p_m, times)
            alpha = _alpha(q, k, top, row, col, n, m, upper, scale, rule, F)
            here = along + batch * a_batch + head * a_head
            g = _along(here, row, col, a_row, a_col, n, m, share)
            slope = (alpha * (g - middle[:, None])).to(q.dtype)
            total += tl.dot(tl.trans(slope), q, input_precision=F.PRECISION)
    to = dkey + batch * d_batch + few * d_head + col[:, None].to(tl.int64) * d_row + at[None, :]
    within = (col[:, None] < m) & (at[None, :] < F.D)
    tl.store(to, (total * scale).to(dkey.dtype.element_ty), mask=within)


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
    arrays, floats = (query, key, lse, pairs, out), (scale, 1 / h if mean else 1.0, times)
    about = (_weights_kernel, *launch.kinds(query, key, pairs), upper, mean)
    made = launch.MADE.get(about)
    if made is None or not made.again(arrays, floats):
        grid = triton.cdiv(m, COLS), triton.cdiv(n, ROWS), b
        whole, facts = _arguments(query, key, lse, pairs, (), upper)
        made = _start(_weights_kernel, grid, arrays, floats, whole, facts | {"MEAN": mean})
        launch.keep(about, made)
    return out


def _start(
    kernel: Any,
    grid: tuple[int, ...],
    arrays: tuple[Tensor | None, ...],
    floats: tuple[float, ...],
    whole: tuple[int, ...],
    facts: dict[str, Any],
) -> Launch | None:
    with launch.on(arrays[0].device):  # type: ignore[union-attr]
        return launch.start(kernel, grid, arrays, floats, whole, facts, TILE)


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        lse: Tensor,
        pairs: Tensor | None,
        *how: Any,
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
        kernels, floats = (_query_kernel, _key_kernel), (scale, 1 / h if mean else 1.0, times)
        for kernel, grid, slopes in zip(kernels, grids, found, strict=True):
            places = (*strides, *slopes.stride()[:3])
            whole, facts = _arguments(query, key, lse, pairs, places, upper)
            arrays = (query, key, lse, pairs, along, slopes, centre)
            _start(kernel, grid, arrays, floats, whole, facts)
        return *found, *(None,) * 6


def _arguments(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    pairs: Tensor | None,
    more: tuple[int, ...],
    upper: int | None,
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """What all kernels are told: whole numbers, and what they are compiled for."""
    (_, h, n, d), m = query.shape, key.shape[2]
    strides = *query.stride()[:3], *key.stride()[:3], *lse.stride()[:2]
    strides = *strides, *shared_strides(pairs), *more
    whole = (*strides, n, m, h, h // key.shape[1], 0 if upper is None else upper)
    facts = {
        "D": d,
        "BLOCK_D": max(triton.next_power_of_2(d), 16),
        "ROWS": ROWS,
        "COLS": COLS,
        "BOUND": upper is not None,
        "PAIRS": kind_of(pairs),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }
    return whole, facts
