"""tanh(a + b) ≈ Σⱼ σⱼ [eⱼ(a) oⱼ(b) + oⱼ(a) eⱼ(b)]: the additive score as a dot product.

eⱼ are even and oⱼ odd polynomials, good for |a|, |b| ≤ A. A `table` (G, 2, J, K) holds them for a
`grid` (G,) of ascending half-ranges A: [:, 0] is √σⱼ·eⱼ on T₀, T₂, T₄ … of x = a/A, [:, 1] is
√σⱼ·oⱼ on T₁, T₃, T₅ …. Which row of the table suits the data is found on the device and never
leaves it: `index` (2,) holds the first with A ≥ max |a|, |b|, or G where none is; then 1, else 0.
"""

# Decorators of an untyped library, and arguments that are pointers or tiles.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Elements of x that a program takes."""
LOOKS = 256
"""Programs, at most, that look for the largest of an array."""


@triton.jit
def _largest(x, size, START: tl.constexpr, STOP: tl.constexpr, BLOCK: tl.constexpr):
    """max |x| over this program's share, ∞ where something is not finite."""
    top = tl.zeros((BLOCK,), tl.float32)
    share = (tl.program_id(0) - START).to(tl.int64) * BLOCK
    for start in range(share, size, (STOP - START) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        seen = tl.abs(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32))
        top = tl.maximum(top, tl.where(seen < float("inf"), seen, float("inf")))
    return tl.max(top, 0)


@triton.jit
def _reach_kernel(a, b, parts, size_a, size_b, LOOKS: tl.constexpr, BLOCK: tl.constexpr):
    if tl.program_id(0) < LOOKS:
        top = _largest(a, size_a, 0, LOOKS, BLOCK)
    else:
        top = _largest(b, size_b, LOOKS, 2 * LOOKS, BLOCK)
    tl.store(parts + tl.program_id(0), top)


@triton.jit
def _index_kernel(parts, grid, index, G, COUNT: tl.constexpr, BLOCK_G: tl.constexpr):
    reach = tl.max(tl.load(parts + tl.arange(0, COUNT)), 0)
    at = tl.arange(0, BLOCK_G)
    short = tl.load(grid + at, mask=at < G, other=float("inf")) < reach
    first = tl.sum(short.to(tl.int32), 0)
    tl.store(index, first)
    tl.store(index + 1, (first == G).to(tl.int32))


@triton.jit
def _series(row, y, K: tl.constexpr, ODD: tl.constexpr):
    """Σₖ cₖ T₂ₖ(x), or if ODD Σₖ cₖ T₂ₖ₊₁(x) / x, by Clenshaw's recurrence in y = T₂(x).

    Both start from 1 and go on with y or 2y − 1.
    """
    one = tl.zeros_like(y)
    two = tl.zeros_like(y)
    for i in tl.static_range(K - 1):
        next = tl.load(row + K - 1 - i) + 2 * y * one - two
        two = one
        one = next
    second = 2 * y - 1 if ODD else y
    return tl.load(row) + second * one - two


@triton.jit
def _series_slope(row, y, K: tl.constexpr, ODD: tl.constexpr):
    """The value of `_series` and its slope in y."""
    one = tl.zeros_like(y)
    two = tl.zeros_like(y)
    slope_one = tl.zeros_like(y)
    slope_two = tl.zeros_like(y)
    for i in tl.static_range(K - 1):
        slope = 2 * y * slope_one + 2 * one - slope_two
        next = tl.load(row + K - 1 - i) + 2 * y * one - two
        two = one
        one = next
        slope_two = slope_one
        slope_one = slope
    second = 2 * y - 1 if ODD else y
    steep = 2 if ODD else 1
    value = tl.load(row) + second * one - two
    return value, second * slope_one + steep * one - slope_two


@triton.jit
def _features_kernel(
    x,
    v,
    table,
    grid,
    index,
    out,
    rows,
    h,
    G,
    J: tl.constexpr,
    K: tl.constexpr,
    KEY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    col = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    inside = (row < rows) & (col < h)
    to = out + row * (2 * J * h) + col
    g = tl.load(index)
    if g < G:
        scale = 1.0 / tl.load(grid + g)
        z = tl.load(x + row * h + col, mask=inside, other=0.0).to(tl.float32) * scale
        y = 2 * z * z - 1
        even = table + g * (2 * J * K)
        factor = tl.full((1, BLOCK_H), 1.0, tl.float32)
        if KEY:
            factor = tl.load(v + col, mask=col < h, other=0.0).to(tl.float32)
        for j in range(J):
            e = factor * _series(even + j * K, y, K, False)
            o = factor * (z * _series(even + (J + j) * K, y, K, True))
            first = o if KEY else e
            second = e if KEY else o
            tl.store(to + j * h, first.to(out.dtype.element_ty), mask=inside)
            tl.store(to + (J + j) * h, second.to(out.dtype.element_ty), mask=inside)
    else:
        nothing = tl.zeros((BLOCK_R, BLOCK_H), out.dtype.element_ty)
        for j in range(2 * J):
            tl.store(to + j * h, nothing, mask=inside)


@triton.jit
def _features_grad_kernel(
    grad,
    x,
    v,
    table,
    grid,
    index,
    dx,
    dv,
    rows,
    h,
    G,
    J: tl.constexpr,
    K: tl.constexpr,
    KEY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    flat = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    col = flat[None, :]
    inside = (row < rows) & (col < h)
    at = grad + row * (2 * J * h) + col
    along = tl.zeros((BLOCK_R, BLOCK_H), tl.float32)
    weighed = tl.zeros((BLOCK_R, BLOCK_H), tl.float32)
    g = tl.load(index)
    if g < G:
        scale = 1.0 / tl.load(grid + g)
        z = tl.load(x + row * h + col, mask=inside, other=0.0).to(tl.float32) * scale
        y = 2 * z * z - 1
        even = table + g * (2 * J * K)
        for j in range(J):
            first = tl.load(at + j * h, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(at + (J + j) * h, mask=inside, other=0.0).to(tl.float32)
            de = second if KEY else first
            do = first if KEY else second
            e, e_slope = _series_slope(even + j * K, y, K, False)
            o, o_slope = _series_slope(even + (J + j) * K, y, K, True)
            along += de * e_slope * (4 * z) + do * (o + 4 * z * z * o_slope)
            if KEY:
                weighed += de * e + do * (z * o)
        along *= scale
        if KEY:
            along *= tl.load(v + col, mask=col < h, other=0.0).to(tl.float32)
    tl.store(dx + row * h + col, along.to(dx.dtype.element_ty), mask=inside)
    if KEY:
        tl.store(dv + tl.program_id(0) * h + flat, tl.sum(weighed, 0), mask=flat < h)


def _tile(rows: int, h: int, size: int = TILE) -> tuple[int, int, tuple[int, int]]:
    """Rows and columns of a program's tile, and the programs of each."""
    wide = min(triton.next_power_of_2(h), 128)
    tall = max(size // wide, 1)
    return tall, wide, (triton.cdiv(rows, tall), triton.cdiv(h, wide))


def index_of(a: Tensor, b: Tensor, grid: Tensor) -> Tensor:
    """Which row of the table holds all of a and b, and whether none does: (2,) int32."""
    a, b = a.contiguous(), b.contiguous()
    tiles = triton.cdiv(max(a.numel(), b.numel(), 1), TILE)
    looks = triton.next_power_of_2(min(tiles, LOOKS))
    parts = a.new_empty(2 * looks, dtype=torch.float32)
    index = a.new_empty(2, dtype=torch.int32)
    _reach_kernel[(2 * looks,)](a, b, parts, a.numel(), b.numel(), looks, TILE)
    count = grid.numel()
    block = triton.next_power_of_2(count)
    _index_kernel[(1,)](parts, grid, index, count, 2 * looks, block, num_warps=1)
    return index


def features_of(x: Tensor, v: Tensor | None, table: Tensor, grid: Tensor, index: Tensor) -> Tensor:
    """φ(x) = [e₁ … e_J | o₁ … o_J] for a query, ψ(x) = [v∘o₁ … | v∘e₁ …] for a key, which has v.

    x (…, rows, h) → (…, rows, 2·J·h) in x's dtype, computed in float32; each eⱼ(x) is h wide.
    Then φ(a)·ψ(b) ≈ Σ_h v_h tanh(a_h + b_h). All 0 where the index says that no range suits.
    """
    x = x.contiguous()
    h = x.shape[-1]
    count, _, pairs, order = table.shape
    out = x.new_empty((*x.shape[:-1], 2 * pairs * h))
    if x.numel():
        rows = x.numel() // h
        tall, wide, programs = _tile(rows, h)
        _features_kernel[programs](
            x, x if v is None else v, table, grid, index, out, rows, h, count, pairs, order,
            v is not None, tall, wide,
        )  # fmt: skip
    return out


def features_grad(
    grad: Tensor, x: Tensor, v: Tensor | None, table: Tensor, grid: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """dx = Σⱼ eⱼ′(x) dEⱼ + oⱼ′(x) dOⱼ, for a key times v; and dv (h,), empty for a query."""
    grad, x = grad.contiguous(), x.contiguous()
    h = x.shape[-1]
    count, _, pairs, order = table.shape
    dx = torch.empty_like(x)
    wanted = 0 if v is None else h
    if not x.numel():
        return dx, x.new_zeros(wanted, dtype=torch.float32)
    rows = x.numel() // h
    tall, wide, programs = _tile(rows, h, TILE // 2)  # a slope has twice the registers
    parts = x.new_empty((programs[0], wanted), dtype=torch.float32)
    _features_grad_kernel[programs](
        grad, x, x if v is None else v, table, grid, index, dx, parts, rows, h, count, pairs,
        order, v is not None, tall, wide,
    )  # fmt: skip
    return dx, parts.sum(0)


additive_index = torch.library.custom_op("qkv::additive_index", index_of, mutates_args=())
additive_features = torch.library.custom_op("qkv::additive_features", features_of, mutates_args=())
additive_features_backward = torch.library.custom_op(
    "qkv::additive_features_backward", features_grad, mutates_args=()
)


@additive_index.register_fake
def _(a: Tensor, b: Tensor, grid: Tensor) -> Tensor:
    return a.new_empty(2, dtype=torch.int32)


@additive_features.register_fake
def _(x: Tensor, v: Tensor | None, table: Tensor, *rest: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 2 * table.shape[2] * x.shape[-1]))


@additive_features_backward.register_fake
def _(grad: Tensor, x: Tensor, v: Tensor | None, *rest: Tensor) -> tuple[Tensor, Tensor]:
    dv = x.new_empty(0 if v is None else x.shape[-1], dtype=torch.float32)
    return x.new_empty(x.shape), dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, v, *rest = ctx.saved_tensors
    dx, dv = additive_features_backward(grad, x, v, *rest)
    return dx, None if v is None else dv.to(v.dtype), None, None, None


additive_features.register_autograd(_differentiate, setup_context=_save)
