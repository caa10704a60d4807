"""W₁q + b and W₂k of an additive score in one pass over queries and keys as they lie, and how far
each hidden unit reaches."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton import launch
from qkv.engines.triton.arguments import row_major
from qkv.engines.triton.kept import by_launches
from qkv.engines.triton.operators import operator
from qkv.engines.triton.tiles import launched

WIDEST = 128
"""Numbers of a row, and units, that a program holds whole."""
LOOKS = 128
"""Programs of each side."""
TILE = launch.Tile(128, 1, 1, 8, 3)


@triton.jit
def _fill(x, w, bias, out, parts, x_b, x_h, x_n, heads, length, rows, h, FIRST: tl.constexpr, F):
    unit = tl.arange(0, F.BLOCK_H)
    column = tl.arange(0, F.BLOCK_D)
    wide = (column < F.D)[None, :]
    places = unit[:, None] * F.D + column[None, :]
    weight = tl.load(w + places, mask=(unit < h)[:, None] & wide, other=0.0)
    added = tl.zeros((F.BLOCK_H,), tl.float32)
    if bias is not None:
        added += tl.load(bias + unit, mask=unit < h, other=0.0).to(tl.float32)
    top = tl.zeros((F.ROWS, F.BLOCK_H), tl.float32)
    begin = (tl.program_id(0) - FIRST).to(tl.int64) * F.ROWS
    for first in range(begin, rows, F.LOOKS * F.ROWS):
        row = first + tl.arange(0, F.ROWS)
        inside = (row < rows)[:, None]
        lane = row // length
        at = lane // heads * x_b + lane % heads * x_h + row % length * x_n
        given = tl.load(x + at[:, None] + column[None, :], mask=inside & wide, other=0.0)
        found = tl.dot(given, tl.trans(weight), input_precision=F.PRECISION) + added[None, :]
        found = found.to(out.dtype.element_ty)
        inside = inside & (unit < h)[None, :]
        tl.store(out + row[:, None] * h + unit[None, :], found, mask=inside)
        seen = tl.where(inside, tl.abs(found.to(tl.float32)), 0.0)
        top = tl.maximum(top, tl.where(seen < float("inf"), seen, float("inf")))
    tl.store(parts + tl.program_id(0) * h + unit, tl.max(top, 0), mask=unit < h)


@launched
def _hidden_kernel(
    query, key, w_query, w_key, bias, a, b, parts, q_b, q_h, q_n, k_b, k_h, k_m, heads, few, n, m,
    rows_a, rows_b, h, F: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < F.LOOKS:
        _fill(query, w_query, bias, a, parts, q_b, q_h, q_n, heads, n, rows_a, h, 0, F)
    else:
        _fill(key, w_key, None, b, parts, k_b, k_h, k_m, few, m, rows_b, h, F.LOOKS, F)


def knows(query: Any, key: Any, w_query: Any, w_key: Any, bias: Any) -> bool:
    """Whether `hidden` takes these: rows of 16 bits on four axes, of one width."""
    if w_key is None:
        return False
    arrays = [x for x in (query, key, w_query, w_key, bias) if x is not None]
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    alike = all(x.dtype == query.dtype for x in arrays) and w_query.shape == w_key.shape
    four = query.ndim == key.ndim == 4 and query.shape[0] == key.shape[0] and w_query.ndim == 2
    fits = max(*w_query.shape, 1) <= WIDEST and query.shape[-1] == key.shape[-1]
    return narrow and alike and four and fits


def _fake(
    query: Tensor, key: Tensor, w_query: Tensor, *rest: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    h = w_query.shape[0]
    a, b = (launch.new(x, (*x.shape[:3], h), x.dtype) for x in (query, key))
    return a, b, launch.new(query, (2 * LOOKS, h))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, da: Tensor | None, db: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    query, key, w_query, w_key, bias = ctx.saved_tensors
    wants = ctx.needs_input_grad
    found: list[Tensor | None] = [None] * 5
    for i, (along, x, w) in enumerate(((da, query, w_query), (db, key, w_key))):
        if along is None:
            continue
        flat = along.reshape(-1, along.shape[-1])
        if wants[i]:
            found[i] = (flat @ w).view(x.shape)
        if wants[2 + i]:
            found[2 + i] = flat.mT @ x.reshape(flat.shape[0], -1)
        if i == 0 and bias is not None and wants[4]:
            found[4] = flat.sum(0)
    return tuple(found)


@operator(_fake, _differentiate, _save)
@by_launches
def hidden(
    query: Tensor, key: Tensor, w_query: Tensor, w_key: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """query (B, H, n, d), key (B, Hₖ, m, d) → W₁q + b (B, H, n, h), W₂k (B, Hₖ, m, h), and parts
    (…, h) whose largest is the largest |·| of each unit over both."""
    query, key = row_major(query), row_major(key)
    a, b, parts = _fake(query, key, w_query)
    h, d = w_query.shape
    w_query, w_key, bias = (x if x is None else x.contiguous() for x in (w_query, w_key, bias))
    (heads, n), (few, m) = query.shape[1:3], key.shape[1:3]
    facts = {
        "D": d,
        "BLOCK_D": max(launch.power_of_2(d), 16),
        "BLOCK_H": max(launch.power_of_2(h), 16),
        "ROWS": TILE.rows,
        "LOOKS": LOOKS,
        "PRECISION": "ieee",
    }
    strides, rows = (*query.stride()[:3], *key.stride()[:3]), [x.numel() // h for x in (a, b)]
    whole = (*strides, heads, few, n, m, *rows, h)
    arrays = (query, key, w_query, w_key, bias, a, b, parts)
    with launch.on(query.device):
        launch.start(_hidden_kernel, 2 * LOOKS, arrays, (), whole, facts, TILE)
    return a, b, parts
