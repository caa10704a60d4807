"""The gradients of few queries and of their keys and values, in one pass over the keys.

A tile holds all queries of the heads that share keys. So one program has all that the gradient of
its keys needs: keys and values are read once, and their gradients are written once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.launching import launch, tile_choice
from qkv.engines.triton.launching.kernel_call import KernelCall
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.tile_functions import tiles
from qkv.engines.triton.tile_functions.program import (
    begin_row_program,
    compute_product,
    compute_tile_scores,
    load_mask_tile,
)
from qkv.engines.triton.tile_functions.score_tile import (
    SavedRows,
    load_row_statistics,
    modified_gradients,
    modify_scores,
    product_gradients,
    remaining_scale,
    score_gradients,
    tile_weights,
)
from qkv.engines.triton.tile_functions.tiles import jit_kernel

NUMBERS_PER_STEP = 256
"""Numbers that a program adds at a time where parts are joined."""


@triton.jit
def store_key_gradients(dk, dv, db, start, own, targets, scales, z, F):
    """Write the gradients of a tile of keys, of their values and of their bias."""
    dkey, dvalue, dbias = targets
    near = tl.arange(0, F.COLS)
    stored = start + near < z.m
    line = own + start + near
    column = tl.arange(0, F.BLOCK_W)[None, :]
    dk = (dk * remaining_scale(scales.scale, F)).to(dkey.dtype.element_ty)
    tl.store(dkey + line[:, None] * F.W + column, dk, mask=stored[:, None] & (column < F.W))
    column = tl.arange(0, F.BLOCK_D)[None, :]
    dv = dv.to(dvalue.dtype.element_ty)
    tl.store(dvalue + line[:, None] * F.D + column, dv, mask=stored[:, None] & (column < F.D))
    if F.BIAS:
        tl.store(dbias + line, db, mask=stored)


@triton.jit
def store_zeros(lo, hi, own, targets, scales, z, F):
    """Write the gradients of tiles lo … hi of the keys, which no query sees."""
    dk = tl.zeros((F.COLS, F.BLOCK_W), dtype=tl.float32)
    dv = tl.zeros((F.COLS, F.BLOCK_D), dtype=tl.float32)
    db = tl.zeros((F.COLS,), dtype=tl.float32)
    for t in tl.range(lo, hi):
        store_key_gradients(dk, dv, db, t * F.COLS, own, targets, scales, z, F)


@jit_kernel
def backward_few_queries_kernel(
    given, along, out, along_lse, centre, kept, dquery, dkey, dvalue, dbias, one_out, two_out,
    scales, steps, z, lines, F: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a lane's queries, keys, values and key bias over a part of its keys.

    With SPLIT, each part writes its own sum of query gradients, in float32. With CENTRE, only the
    two sums of the centre are computed. With FROM_OUTPUT, the centre comes from `out` and
    `along_lse`.
    """
    MASKED: tl.constexpr = F.MASKED
    rows, keys, spot, edges, part = begin_row_program(given, None, None, steps, z, F)
    lines = tl.cast(lines, tl.int64)
    do = tiles.load_rows(along, spot.line * F.D, F.D, F.BLOCK_D)  # (ROWS, d)
    do = tl.where(spot.inside[:, None], do, 0.0)  # the tile repeats the last row
    top, share, middle = load_row_statistics(SavedRows(along, centre, kept, lines), spot.line, F)
    if F.FROM_OUTPUT:
        y = tiles.load_rows(out, spot.line * F.D, F.D, F.BLOCK_D)
        middle = tl.sum(do.to(tl.float32) * y.to(tl.float32), 1)
        if along_lse is not None:
            middle -= tl.load(along_lse + spot.line)
    middle = tl.where(spot.inside, middle, 0.0)[:, None]
    top = top[:, None]
    share = share[:, None]
    q = rows.held
    if MASKED:
        q = tl.where(tiles.is_finite(q), q, 0.0)
    dq = tl.zeros((F.ROWS, F.BLOCK_W), dtype=tl.float32)
    one = tl.zeros((F.ROWS,), dtype=tl.float32)
    two = tl.zeros((F.ROWS,), dtype=tl.float32)
    own = (spot.batch * z.heads + spot.shared) * z.m
    targets = (dkey, dvalue, dbias)
    lo = edges[0]
    hi = edges[3]
    begin = part * z.span
    end = tl.minimum(begin + z.span, (z.m + F.COLS - 1) // F.COLS)
    if MASKED and not F.CENTRE:
        hi = tl.maximum(lo, hi)
        store_zeros(begin, lo, own, targets, scales, z, F)
        store_zeros(hi, end, own, targets, scales, z, F)
    for t in tl.range(lo, hi):
        start, j, here, live, extra = load_mask_tile(t, rows, keys, scales.times, z, F, MASKED)
        x, k = compute_product(rows, keys, start, here, F)
        gated, steep, bend = compute_tile_scores(x, rows, keys, start, here, scales, F.BASE, F)
        s = modify_scores(gated, rows.b, rows.h, rows.i, j, rows.captured, scales.times, z, F)
        if F.PAIRS == 2:
            s = s + extra
        p, lean = tile_weights(
            s, j, live, top, share, rows.row_a, rows.row_b, scales.alpha, F, MASKED
        )
        v = tiles.load_row_tile(keys.value, start, keys.v_m, here, F.D, F.BLOCK_D, F.TMA)
        dp = tl.dot(do, tl.trans(v), input_precision=F.PRECISION)
        if F.DROP:
            keep = tiles.dropout_factor(rows.drawn, j, z.dropped, scales.share)
            dp = dp * keep
        if F.CENTRE:
            one += tl.sum(tl.where(lean == 0, 0.0, lean * dp), 1)
            two += tl.sum(lean, 1)
        else:
            if F.DROP:
                weight = p * keep
            else:
                weight = p
            ds = score_gradients(p, lean, dp, middle, share, F)
            ds = modified_gradients(
                ds, gated, rows.b, rows.h, rows.i, j, rows.captured, scales.times, z, F
            )
            ds = product_gradients(ds, live, gated, steep, bend, scales.scale, F, MASKED)[2]
            if MASKED:
                k = tl.where(tiles.is_finite(k), k, 0.0)
            db = tl.sum(ds, 0)
            ds = ds.to(k.dtype)
            dq = tl.dot(ds, k, dq, input_precision=F.PRECISION)
            dk = tl.dot(tl.trans(ds), q, input_precision=F.PRECISION)
            dv = tl.dot(tl.trans(weight.to(do.dtype)), do, input_precision=F.PRECISION)
            store_key_gradients(dk, dv, db, start, own, targets, scales, z, F)
    line = spot.line
    if F.SPLIT:
        line += tl.cast(part, tl.int64) * lines
    if F.CENTRE:
        tl.store(one_out + line, one, mask=spot.inside)
        tl.store(two_out + line, two, mask=spot.inside)
    else:
        dq = (dq * remaining_scale(scales.scale, F)).to(dquery.dtype.element_ty)
        column = tl.arange(0, F.BLOCK_W)[None, :]
        inside = spot.inside[:, None] & (column < F.W)
        tl.store(dquery + line[:, None] * F.W + column, dq, mask=inside)


@jit_kernel
def join_parts_kernel(one, two, out, count, parts, F: tl.constexpr):
    """Write the sum over the parts of each of `count` numbers; with two arrays, their quotient."""
    at = tl.program_id(0) * F.BLOCK + tl.arange(0, F.BLOCK)
    inside = at < count
    total = tl.zeros((F.BLOCK,), dtype=tl.float32)
    other = tl.zeros((F.BLOCK,), dtype=tl.float32)
    for part in tl.range(0, parts):
        there = tl.cast(part, tl.int64) * count + at
        total += tl.load(one + there, mask=inside, other=0.0)
        if two is not None:
            other += tl.load(two + there, mask=inside, other=0.0)
    if two is not None:
        total = total / tl.where(other == 0, 1.0, other)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def fits_one_tile(call: KernelCall) -> bool:
    """Return whether one tile holds all queries of the heads that share keys."""
    facts = call.constexprs
    if call.form != "product" or call.weighting == "average" or facts["TANH"]:
        return False
    if call.gate_query is not None or facts["CAP"] or facts["SINK"] or call.width is not None:
        return False
    if max(call.w, call.d) > tile_choice.MAX_BACKWARD_TILE_WIDTH or call.is_hard:
        return False
    return bool(call.n * call.group <= _max_rows(call))


def _max_rows(call: KernelCall) -> int:
    """Return the most rows of a tile: twice as many for one narrow head in 16 bits."""
    narrow = max(call.w, call.d) <= 64 and call.query.element_size() == 2 and call.group == 1
    return tile_choice.MAX_PACKED_ROWS * (2 if narrow else 1)


def _sum_centre(call: KernelCall, along: Tensor, kept: Tensor) -> Tensor:
    """Return Σ lean · ∂L/∂α / Σ lean of each row, from a pass over the keys."""
    lines = call.b * call.h * call.n
    centre = call.allocate_buffer(call.b, call.h, call.n)

    def run_tile(tile: Tile) -> None:
        splits, span = _split_keys(call, tile)
        one, two = (call.allocate_buffer(splits, lines) for _ in range(2))
        arrays = (along, None, None, None, kept, None, None, None, None, one, two)
        _launch(call, tile, splits, span, arrays, {"CENTRE": True, "CENTRED": False})
        _join_parts(one, two, centre, splits)

    call.run_with_fitting_tile("few_queries", _choose_tile(call), run_tile)
    return centre


def fill_gradients(
    call: KernelCall, along: Tensor, along_lse: Tensor | None, out: Tensor, kept: Tensor,
    centre: Tensor | None, exact: bool, grads: Any,
) -> None:  # fmt: skip
    """Fill the gradients of query, key, value and key_bias.

    The arguments are those of `backward.fill_by_sides`; `centre` is None if it is not known.
    """
    centred = call.constexprs["CENTRED"]
    along_lse = None if along_lse is None else along_lse.contiguous()
    if exact and call.weighting in ("softmax", "entmax"):
        centre = _sum_centre(call, along, kept)
        if along_lse is not None:
            centre = centre - along_lse.reshape(centre.shape)
    known = centred and centre is not None
    facts = {"CENTRE": False, "FROM_OUTPUT": centred and not known, "CENTRED": known}
    bias = None if call.key_bias is None else grads.key_bias

    def run_tile(tile: Tile) -> None:
        splits, span = _split_keys(call, tile)
        dquery = grads.query
        if splits > 1:
            dquery = call.allocate_buffer(splits, *grads.query.shape)
        arrays = (
            along, out, along_lse, centre, kept, dquery, grads.key, grads.value, bias, None, None,
        )  # fmt: skip
        _launch(call, tile, splits, span, arrays, facts)
        if splits > 1:
            _join_parts(dquery, None, grads.query, splits)

    call.run_with_fitting_tile("few_queries", _choose_tile(call), run_tile)


def _choose_tile(call: KernelCall) -> Tile:
    return call.choose_tile("few_queries", call.n * call.group)


def _split_keys(call: KernelCall, tile: Tile) -> tuple[int, int]:
    return call.split_loop(call.b * call.hk, call.m, tile.cols, tile.waves)


def _launch(
    call: KernelCall, tile: Tile, splits: int, span: int, arrays: tuple[Any, ...],
    facts: dict[str, Any],
) -> None:  # fmt: skip
    rows, lanes = call.n * call.group, call.b * call.hk
    tile = tile._replace(rows=max(16, tile_choice.next_power_of_2(rows)))
    masked = call.is_masked or call.m % tile.cols != 0
    own = {"FROM_OUTPUT": False, "MASKED": masked, "PACKED": call.group > 1, "EDGES": True}
    own |= {"QUICK": False, "LAID": False, "MANY": 0} | facts
    facts = call.pass_constexprs(tile, False, splits) | own
    sizes = call.build_sizes(heads=call.hk, rows_n=rows, splits=splits, span=span)
    lines = call.b * call.h * call.n
    call.launch_kernel(
        backward_few_queries_kernel, lanes * splits, arrays, None, (sizes, lines), facts, tile
    )


def _join_parts(one: Tensor, two: Tensor | None, out: Tensor, parts: int) -> None:
    facts, count = {"BLOCK": NUMBERS_PER_STEP}, out.numel()
    launch.launch_kernel(
        join_parts_kernel, -(-count // NUMBERS_PER_STEP), (one, two, out), (), (count, parts),
        facts, Tile(1, 1, 1, 2, 2),
    )  # fmt: skip
