"""x / ‖x‖ and factor · ‖x‖² of each row, as PyTorch operators that read the memory once.

Rows are the last axis, of any width; the other axes may have any order in memory. Elements are
bfloat16, float16 or float32; the arithmetic is float32. A program holds a few whole rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.launching import launch, tile_choice, workspace
from qkv.engines.triton.launching.launch_replay import replay_launches
from qkv.engines.triton.launching.torch_operator import refuse_second_derivative, register_operator
from qkv.engines.triton.tile_functions.tiles import jit_kernel, lanes_and_rows

NUMBERS_PER_PROGRAM = 4096
"""Elements per program, unless one row is wider."""


@triton.jit
def _locate_rows(rows, F):
    """Return this program's rows, the offsets of their elements, and which elements exist."""
    row = tl.program_id(0).to(tl.int64) * F.ROWS + tl.arange(0, F.ROWS)
    column = tl.arange(0, F.BLOCK)[None, :]
    inside = (row < rows)[:, None]
    if F.W != F.BLOCK:
        inside = inside & (column < F.W)
    return row, row[:, None] * F.W + column, inside


@triton.jit
def _scale_to_range(x):
    """Return y = x · power with squares in range, 1 / ‖y‖ (1 if y is 0), and the power of 2."""
    x = x.to(tl.float32)
    top = tl.max(tl.abs(x), 1)
    power = tl.where(top > 1e15, 2.0**-90, 1.0)
    power = tl.where((top < 1e-15) & (top > 0), 2.0**100, power)
    x = x * power[:, None]
    total = tl.sum(x * x, 1)
    return x, 1.0 / tl.sqrt(tl.where(total == 0, 1.0, total)), power


@jit_kernel
def _normalize_kernel(x, out, rows, F: tl.constexpr):
    _, at, inside = _locate_rows(rows, F)
    y, short, _ = _scale_to_range(tl.load(x + at, mask=inside, other=0.0))
    tl.store(out + at, (y * short[:, None]).to(out.dtype.element_ty), mask=inside)


@jit_kernel
def _normalize_backward_kernel(g, x, dx, rows, F: tl.constexpr):
    _, at, inside = _locate_rows(rows, F)
    y, short, power = _scale_to_range(tl.load(x + at, mask=inside, other=0.0))
    along = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    u = y * short[:, None]
    across = along - u * tl.sum(u * along, 1)[:, None]
    across = across * short[:, None] * power[:, None]
    asked = tl.sum((along != 0).to(tl.int32), 1) > 0  # else 0, not 0 · NaN of a masked row
    across = tl.where(asked[:, None], across, 0.0)
    tl.store(dx + at, across.to(dx.dtype.element_ty), mask=inside)


@jit_kernel
def _square_kernel(x, out, factor, x_b, x_h, x_m, heads, length, length_out, rows, F: tl.constexpr):
    """Write factor · ‖x‖² of rows of x (B, H, m, W) with any strides.

    The results are contiguous per head; heads are `length_out` elements apart.
    """
    row, _, inside = _locate_rows(rows, F)
    lane, own = lanes_and_rows(tl.program_id(0).to(tl.int64) * F.ROWS, length, F.ROWS)
    at = (lane // heads).to(tl.int64) * x_b + (lane % heads).to(tl.int64) * x_h
    at += own.to(tl.int64) * x_m
    column = tl.arange(0, F.BLOCK)[None, :]
    y = tl.load(x + at[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    at = lane.to(tl.int64) * length_out + own
    tl.store(out + at, factor * tl.sum(y * y, 1), mask=row < rows)


@jit_kernel
def _square_backward_kernel(g, x, dx, factor, rows, F: tl.constexpr):
    row, at, inside = _locate_rows(rows, F)
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    steep = 2.0 * factor * tl.load(g + row, mask=row < rows, other=0.0)
    slope = tl.where((steep != 0)[:, None], y * steep[:, None], 0.0)  # not 0 · NaN
    tl.store(dx + at, slope.to(dx.dtype.element_ty), mask=inside)


def _as_dense(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x, or a contiguous copy if it has gaps, and an empty array with the same strides.

    A transposed x has no gaps and is not copied.
    """
    out = torch.empty_like(x)
    if out.stride() != x.stride() or x.stride(-1) != 1:
        x = x.contiguous()
        out = torch.empty_like(x)
    return x, out


def _match_layout(grad: Tensor, x: Tensor, width: int) -> Tensor:
    """Return the gradient, of `width` elements per row, in the memory order of x's rows."""
    steps = [step // max(x.shape[-1], 1) * width for step in x.stride()[:-1]]
    if grad.stride() == (*steps, 1):
        return grad
    return grad.new_empty_strided(grad.shape, (*steps, 1)).copy_(grad)


def _launch_rows(
    kernel: Any, x: Tensor, arrays: tuple[Tensor, ...], numbers: tuple[float, ...] = (),
    *whole: int, each: int = NUMBERS_PER_PROGRAM,
) -> None:  # fmt: skip
    """Launch a kernel on arrays of x's size, or with one number per row.

    `each` is the number of elements per program.
    """
    if not x.numel():
        return
    w = x.shape[-1]
    rows = x.numel() // w
    block = tile_choice.next_power_of_2(w)
    tall = max(each // block, 1)
    tile = tile_choice.Tile(
        tall, block, block, 4 if block <= NUMBERS_PER_PROGRAM else min(block // 1024, 16), 1
    )
    facts = {"W": w, "ROWS": tall, "BLOCK": block}
    with launch.use_device(x.device):
        launch.launch_kernel(kernel, -(-rows // tall), arrays, numbers, (*whole, rows), facts, tile)


def _fake_rows(x: Tensor, factor: float) -> Tensor:
    return workspace.allocate_aligned(x, x.shape[:-1])[..., None]


def _fake_gradient(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return _as_dense(x)[1]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.numbers = inputs[1:]


@register_operator(_fake_gradient, refuse_second_derivative)
@replay_launches
def _normalize_rows_backward(grad: Tensor, x: Tensor) -> Tensor:
    x, dx = _as_dense(x)
    _launch_rows(_normalize_backward_kernel, x, (_match_layout(grad, x, x.shape[-1]), x, dx))
    return dx


@register_operator(
    lambda x: _as_dense(x)[1],
    lambda ctx, grad: _normalize_rows_backward(grad, *ctx.saved_tensors),
    _save_for_backward,
)
@replay_launches
def normalize_rows(x: Tensor) -> Tensor:
    """Return x / ‖x‖ of each row, 0 for a row of 0: (…, width) in x's dtype.

    No square overflows or underflows. With u = x / ‖x‖ the gradient is (g − u (u·g)) / ‖x‖; it is g
    for a row of 0.
    """
    x, out = _as_dense(x)
    _launch_rows(_normalize_kernel, x, (x, out))
    return out


@register_operator(_fake_gradient, refuse_second_derivative)
@replay_launches
def _squared_norms_backward(grad: Tensor, x: Tensor, factor: float) -> Tensor:
    x, dx = _as_dense(x)
    _launch_rows(_square_backward_kernel, x, (_match_layout(grad, x, 1), x, dx), (factor,))
    return dx


@register_operator(
    _fake_rows,
    lambda ctx, grad: (_squared_norms_backward(grad, *ctx.saved_tensors, *ctx.numbers), None),
    _save_for_backward,
)
@replay_launches
def squared_norms(x: Tensor, factor: float) -> Tensor:
    """Return factor · ‖x‖² of each row, (…, 1) float32, with gradient 2 · factor · g · x."""
    out = _fake_rows(x, factor)
    if not x.shape[-1]:
        return out.zero_()
    if x.ndim > 4 or x.stride(-1) != 1:
        x = x.contiguous()
        x = x.flatten(0, -4) if x.ndim > 4 else x
    missing = 4 - x.ndim
    strides, (_, heads, length) = (0,) * missing + x.stride()[:-1], (1,) * missing + x.shape[:-1]
    out_length = out.stride(-3) if out.ndim > 2 else length
    sizes = (*strides, heads, length, out_length)
    _launch_rows(_square_kernel, x, (x, out), (factor,), *sizes, each=2 * NUMBERS_PER_PROGRAM)
    return out
