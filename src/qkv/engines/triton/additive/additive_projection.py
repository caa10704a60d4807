"""W₁q + b and W₂k of an additive score in one pass, with the range of each hidden unit.

Queries and keys may have any strides. A second kernel computes all gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.additive import additive_exact
from qkv.engines.triton.launching import launch, tile_choice, workspace
from qkv.engines.triton.launching.kernel_call import as_row_major
from qkv.engines.triton.launching.launch_replay import replay_launches
from qkv.engines.triton.launching.torch_operator import refuse_second_derivative, register_operator
from qkv.engines.triton.tile_functions.tiles import jit_kernel, lanes_and_rows

MAX_WIDTH = 128
"""The most columns of a row, and the most units, that a program holds at once."""
PROGRAMS_PER_SIDE = 128
"""Programs for queries, and as many for keys."""
TILE = tile_choice.Tile(64, 1, 1, 4, 3)


@triton.jit
def _load_matrix(w, h, F):
    """Load a whole matrix (h, D); return it, the offsets of its elements, and which exist."""
    unit = tl.arange(0, F.BLOCK_H)
    column = tl.arange(0, F.BLOCK_D)
    places = unit[:, None] * F.D + column[None, :]
    there = (unit < h)[:, None] & (column < F.D)[None, :]
    return tl.load(w + places, mask=there, other=0.0), places, there


@triton.jit
def _load_rows(x, first, x_b, x_h, x_n, heads, length, rows, F):
    """Load a tile of rows; return it, the row numbers, and which rows exist."""
    row = first + tl.arange(0, F.ROWS)
    column = tl.arange(0, F.BLOCK_D)[None, :]
    inside = (row < rows)[:, None]
    lane, own = lanes_and_rows(first, length, F.ROWS)
    at = (lane // heads).to(tl.int64) * x_b + (lane % heads).to(tl.int64) * x_h
    at += own.to(tl.int64) * x_n
    wide = inside & (column < F.D)
    return tl.load(x + at[:, None] + column, mask=wide, other=0.0), row[:, None], inside


@triton.jit
def _project_rows(
    x, w, bias, out, parts, x_b, x_h, x_n, heads, length, rows, h, FIRST: tl.constexpr, F
):
    unit = tl.arange(0, F.BLOCK_H)
    weight, _, _ = _load_matrix(w, h, F)
    added = tl.zeros((F.BLOCK_H,), tl.float32)
    if bias is not None:
        added += tl.load(bias + unit, mask=unit < h, other=0.0).to(tl.float32)
    top = tl.zeros((F.ROWS, F.BLOCK_H), tl.float32)
    begin = (tl.program_id(0) - FIRST).to(tl.int64) * F.ROWS
    for first in range(begin, rows, F.LOOKS * F.ROWS):
        given, row, inside = _load_rows(x, first, x_b, x_h, x_n, heads, length, rows, F)
        found = tl.dot(given, tl.trans(weight), input_precision=F.PRECISION) + added[None, :]
        found = found.to(out.dtype.element_ty)
        inside = inside & (unit < h)[None, :]
        tl.store(out + row * h + unit[None, :], found, mask=inside)
        seen = tl.where(inside, tl.abs(found.to(tl.float32)), 0.0)
        top = tl.maximum(top, tl.where(seen < float("inf"), seen, float("inf")))
    tl.store(parts + tl.program_id(0) * h + unit, tl.max(top, 0), mask=unit < h)


@jit_kernel
def _projection_kernel(
    query, key, w_query, w_key, bias, a, b, parts, q_b, q_h, q_n, k_b, k_h, k_m, heads, few, n, m,
    rows_a, rows_b, h, F: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < F.LOOKS:
        _project_rows(query, w_query, bias, a, parts, q_b, q_h, q_n, heads, n, rows_a, h, 0, F)
    else:
        _project_rows(key, w_key, None, b, parts, k_b, k_h, k_m, few, m, rows_b, h, F.LOOKS, F)


@triton.jit
def _project_rows_backward(
    along, x, w, dx, parts, sums, x_b, x_h, x_n, heads, length, rows, h, FIRST: tl.constexpr, F
):  # fmt: skip
    """Write dx = along · w, and for this program's rows alongᵀ · x and, if `sums`, Σ along."""
    unit = tl.arange(0, F.BLOCK_H)
    column = tl.arange(0, F.BLOCK_D)[None, :]
    weight, places, there = _load_matrix(w, h, F)
    total = tl.zeros((F.BLOCK_H, F.BLOCK_D), tl.float32)
    added = tl.zeros((F.BLOCK_H,), tl.float32)
    begin = (tl.program_id(0) - FIRST).to(tl.int64) * F.ROWS
    for first in range(begin, rows, F.LOOKS * F.ROWS):
        given, row, inside = _load_rows(x, first, x_b, x_h, x_n, heads, length, rows, F)
        mask = inside & (unit < h)[None, :]
        slope = tl.load(along + row * h + unit[None, :], mask=mask, other=0.0)
        found = tl.dot(slope, weight, input_precision=F.PRECISION)
        mask = inside & (column < F.D)
        tl.store(dx + row * F.D + column, found.to(dx.dtype.element_ty), mask=mask)
        total = tl.dot(tl.trans(slope), given, total, input_precision=F.PRECISION)
        if sums is not None:
            added += tl.sum(slope.to(tl.float32), 0)
    tl.store(parts + places, total, mask=there)
    if sums is not None:
        tl.store(sums + unit, added, mask=unit < h)


@jit_kernel
def _projection_backward_kernel(
    da, db, query, key, w_query, w_key, dquery, dkey, parts, q_b, q_h, q_n, k_b, k_h, k_m, heads,
    few, n, m, rows_a, rows_b, h, columns, F: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of both sides.

    Each program has a row in `parts`: for w_query, for w_key, and with BIASED for the bias.
    """
    if tl.program_id(0) < F.LOOKS:
        parts += tl.program_id(0) * columns
        sums = parts + 2 * h * F.D if F.BIASED else None
        _project_rows_backward(
            da, query, w_query, dquery, parts, sums, q_b, q_h, q_n, heads, n, rows_a, h, 0, F
        )  # fmt: skip
    else:
        parts += (tl.program_id(0) - F.LOOKS) * columns + h * F.D
        _project_rows_backward(
            db, key, w_key, dkey, parts, None, k_b, k_h, k_m, few, m, rows_b, h, F.LOOKS, F
        )  # fmt: skip


def is_supported(query: Any, key: Any, w_query: Any, w_key: Any, bias: Any) -> bool:
    """Return whether `project_hidden` supports these: 16-bit rows on four axes, of one width."""
    if w_key is None:
        return False
    arrays = [x for x in (query, key, w_query, w_key, bias) if x is not None]
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    alike = all(x.dtype == query.dtype for x in arrays) and w_query.shape == w_key.shape
    four = query.ndim == key.ndim == 4 and query.shape[0] == key.shape[0] and w_query.ndim == 2
    fits = max(*w_query.shape, 1) <= MAX_WIDTH and query.shape[-1] == key.shape[-1]
    return narrow and alike and four and fits


def _fake_projection(
    query: Tensor, key: Tensor, w_query: Tensor, *rest: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    h = w_query.shape[0]
    a, b = (workspace.allocate_buffer(x, (*x.shape[:3], h), x.dtype) for x in (query, key))
    return a, b, workspace.allocate_buffer(query, (2 * PROGRAMS_PER_SIDE, h))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _compute_gradients(
    ctx: Any, da: Tensor | None, db: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    query, key, w_query, w_key, bias = ctx.saved_tensors
    h, d = w_query.shape
    da, db = (
        x.new_zeros((*x.shape[:3], h)) if along is None else along
        for x, along in ((query, da), (key, db))
    )
    dquery, dkey, rest = _project_hidden_backward(
        da, db, query, key, w_query, w_key, bias is not None
    )
    more = rest.split([h * d, h * d, *[h] * (bias is not None)])
    found = (dquery, dkey, more[0].view(h, d), more[1].view(h, d), *more[2:], None)
    return tuple(
        x if is_needed else None for x, is_needed in zip(found, ctx.needs_input_grad, strict=False)
    )


def _fake_projection_backward(
    da: Tensor, db: Tensor, query: Tensor, key: Tensor, w_query: Tensor, w_key: Tensor, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    h, d = w_query.shape
    dquery, dkey = (workspace.allocate_buffer(x, x.shape, x.dtype) for x in (query, key))
    return dquery, dkey, workspace.allocate_buffer(w_query, (h * (2 * d + biased),), w_query.dtype)


def _projection_constexprs(w: Tensor) -> dict[str, Any]:
    h, d = w.shape
    return {
        "D": d,
        "BLOCK_D": max(tile_choice.next_power_of_2(d), 16),
        "BLOCK_H": max(tile_choice.next_power_of_2(h), 16),
        "ROWS": TILE.rows,
        "LOOKS": PROGRAMS_PER_SIDE,
        "PRECISION": "ieee",
    }


def _projection_sizes(query: Tensor, key: Tensor, h: int) -> tuple[int, ...]:
    """Return strides, heads, lengths and row counts of query and key, and the number of units."""
    (b, heads, n, _), (few, m) = query.shape, key.shape[1:3]
    strides = (*query.stride()[:3], *key.stride()[:3])
    return (*strides, heads, few, n, m, b * heads * n, b * few * m, h)


@register_operator(_fake_projection_backward, refuse_second_derivative)
@replay_launches
def _project_hidden_backward(
    da: Tensor, db: Tensor, query: Tensor, key: Tensor, w_query: Tensor, w_key: Tensor, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query and key, and of w_query, w_key and bias as one vector.

    The vector is a sum of parts in a fixed order.
    """
    da, db, w_query, w_key = (x.contiguous() for x in (da, db, w_query, w_key))
    query, key = as_row_major(query), as_row_major(key)
    dquery, dkey, rest = _fake_projection_backward(da, db, query, key, w_query, w_key, biased)
    parts, columns = (
        workspace.allocate_buffer(query, (PROGRAMS_PER_SIDE, rest.shape[0])),
        rest.shape[0],
    )
    arrays = (da, db, query, key, w_query, w_key, dquery, dkey, parts)
    whole = (*_projection_sizes(query, key, w_query.shape[0]), columns)
    facts = _projection_constexprs(w_query) | {"BIASED": biased}
    with launch.use_device(query.device):
        launch.launch_kernel(
            _projection_backward_kernel, 2 * PROGRAMS_PER_SIDE, arrays, (), whole, facts, TILE
        )
        additive_exact.fold_parts(parts, None, None, rest)
    return dquery, dkey, rest


@register_operator(_fake_projection, _compute_gradients, _save_for_backward)
@replay_launches
def project_hidden(
    query: Tensor, key: Tensor, w_query: Tensor, w_key: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return W₁q + b (B, H, n, h), W₂k (B, Hₖ, m, h), and parts (…, h).

    query (B, H, n, d), key (B, Hₖ, m, d). The maximum of the parts is the largest |·| of each unit.
    """
    query, key = as_row_major(query), as_row_major(key)
    a, b, parts = _fake_projection(query, key, w_query)
    w_query, w_key, bias = (x if x is None else x.contiguous() for x in (w_query, w_key, bias))
    arrays, whole = (
        (query, key, w_query, w_key, bias, a, b, parts),
        _projection_sizes(query, key, a.shape[-1]),
    )
    with launch.use_device(query.device):
        launch.launch_kernel(
            _projection_kernel,
            2 * PROGRAMS_PER_SIDE,
            arrays,
            (),
            whole,
            _projection_constexprs(w_query),
            TILE,
        )
    return a, b, parts
