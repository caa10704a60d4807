"""αᵢⱼ = exp(scale · qᵢ·kⱼ − lseᵢ), of every head or their mean, in one pass over the pairs.

The log-sum-exp comes from the kernel that made the output, so no row is searched again, and of the
heads' n × m matrices none is written where only the mean is wanted.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634
ROWS, COLS = 64, 64
PIECE = 2**22
"""Weights that are made again at once on the way back."""


@triton.jit
def _weights_kernel(
    query, key, lse, out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, l_batch, l_head,
    n, m, heads, group, upper, scale, share,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    BOUND: tl.constexpr, MEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    at = tl.arange(0, BLOCK_D)
    within = (row[:, None] < n) & (col[None, :] < m)
    live = within
    if BOUND:
        live = live & (col[None, :] - row[:, None] <= upper)
    total = tl.zeros((ROWS, COLS), tl.float32)
    place = row[:, None].to(tl.int64) * m + col[None, :]
    for head in range(heads):
        q = tl.load(
            query + batch * q_batch + head * q_head + row[:, None] * q_row + at[None, :],
            mask=(row[:, None] < n) & (at[None, :] < D), other=0.0,
        )  # fmt: skip
        k = tl.load(
            key + batch * k_batch + (head // group) * k_head + col[None, :] * k_row + at[:, None],
            mask=(col[None, :] < m) & (at[:, None] < D), other=0.0,
        )  # fmt: skip
        top = tl.load(lse + batch * l_batch + head * l_head + row, mask=row < n, other=0.0)
        s = tl.dot(q, k, input_precision=PRECISION) * scale - top[:, None] * 1.4426950408889634
        alpha = tl.where(live & (top[:, None] != -float("inf")), tl.exp2(s), 0.0)
        if MEAN:
            total += alpha
        else:
            to = out + (batch * heads + head) * n * m + place
            tl.store(to, alpha.to(out.dtype.element_ty), mask=within)
    if MEAN:
        tl.store(out + batch * n * m + place, (total * share).to(out.dtype.element_ty), mask=within)


def weights(
    query: Tensor, key: Tensor, lse: Tensor, scale: float, upper: int | None, mean: bool
) -> Tensor:
    """query (B, H, n, d), key (B, Hₖ, m, d), lse (B, H, n) → (B, n, m), or of heads (B, H, n, m).

    With `upper` the pair i, j counts if j − i ≤ upper. The gradient is the whole one: that of the
    log-sum-exp, which must be the one of these scores, is part of it.
    """
    found: Tensor = _Weights.apply(query, key, lse, scale, upper, mean)
    return found


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        lse: Tensor,
        scale: float,
        upper: int | None,
        mean: bool,
    ) -> Tensor:
        ctx.save_for_backward(query, key, lse)
        ctx.how = scale, upper, mean
        (b, h, n, d), m = query.shape, key.shape[2]
        query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
        lse = lse.float()
        lse = lse if lse.stride(-1) == 1 else lse.contiguous()
        out = query.new_empty((b, n, m) if mean else (b, h, n, m))
        grid = (triton.cdiv(m, COLS), triton.cdiv(n, ROWS), b)
        _weights_kernel[grid](
            query, key, lse, out,
            *query.stride()[:3], *key.stride()[:3], *lse.stride()[:2],
            n, m, h, h // key.shape[1], 0 if upper is None else upper, scale * LOG2E, 1 / h,
            D=d, BLOCK_D=max(triton.next_power_of_2(d), 16), ROWS=ROWS, COLS=COLS,
            BOUND=upper is not None, MEAN=mean,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=4,
        )  # fmt: skip
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, along: Tensor) -> tuple[Any, ...]:
        query, key, lse = ctx.saved_tensors
        scale, upper, mean = ctx.how
        (b, h, n, _), (few, m) = query.shape, key.shape[1:3]
        dquery, dkey = torch.empty_like(query), torch.zeros_like(key, dtype=torch.float32)
        wide = key if few == h else key.repeat_interleave(h // few, 1)
        step = max(PIECE // max(b * h * m, 1), 16)
        for start in range(0, n, step):
            some = slice(start, start + step)
            q, top = query[:, :, some], lse[:, :, some, None].float()
            s = (q @ wide.mT).float() * scale - top
            dead = top == -torch.inf
            if upper is not None:
                row = torch.arange(start, start + q.shape[2], device=q.device)[:, None]
                dead = dead | (torch.arange(m, device=q.device) - row > upper)
            alpha = s.exp_().masked_fill_(dead, 0)
            g = along[:, None, some].float() / h if mean else along[:, :, some].float()
            slope = alpha * (g - (alpha * g).sum(-1, keepdim=True)) * scale
            slope = slope.to(query.dtype)
            dquery[:, :, some] = slope @ wide
            found = slope.mT @ q
            dkey += found.unflatten(1, (few, -1)).sum(2) if few != h else found
        return dquery, dkey.to(key.dtype), None, None, None, None
