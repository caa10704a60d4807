"""The value of each query's best key, and its gradient: `hard`, which is top-k with k = 1.

`thresholds` finds the best key. Its weight is 1, so the scores and their inputs have gradient 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.launching import tile_choice
from qkv.engines.triton.launching.kernel_call import KernelCall
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.tile_functions import tiles
from qkv.engines.triton.tile_functions.records import Sizes
from qkv.engines.triton.tile_functions.tiles import LOG2E, jit_kernel

ROWS_PER_TILE = 64


@triton.jit
def _dropout_factors(given, lane, i, j, scales, z):
    """Return the factor of the weight of query i and key j."""
    drawn = tiles.row_hash(given.seed, lane, i, z.hashed)
    return tiles.dropout_factor(drawn, j, z.dropped, scales.share)


@jit_kernel
def take_kernel(given, out, lse, kept, scales, steps, z, lines, F: tl.constexpr):
    """Copy the best key's value of each query of a tile; write its score as log-sum-exp."""
    count = (z.n + F.ROWS - 1) // F.ROWS
    lane = tl.program_id(0) // count
    batch = tl.cast(lane // z.heads, tl.int64)
    head = tl.cast(lane % z.heads, tl.int64)
    i = tl.program_id(0) % count * F.ROWS + tl.arange(0, F.ROWS)
    inside = i < z.n
    line = tl.cast(lane, tl.int64) * z.n + i
    top = tl.load(given.row_a + line, mask=inside, other=0.0)
    best = tl.load(given.row_b + line, mask=inside, other=0)
    found = inside & (best < z.m)
    value = given.value + batch * steps.v_b + head // z.group * steps.v_h
    there = tl.where(found, best, 0) * tl.cast(steps.v_m, tl.int64)
    column = tl.arange(0, F.BLOCK_D)[None, :]
    some = found[:, None] & (column < F.D)
    v = tl.load(value + there[:, None] + column, mask=some, other=0.0).to(tl.float32)
    if F.DROP:
        factor = _dropout_factors(given, lane, i, best, scales, z)[:, None]
        v = tl.where(factor == 0, 0.0, v * factor)
    v = tl.where((top == top)[:, None], v, float("nan"))
    where = out + line[:, None] * F.D + column
    tl.store(where, v.to(out.dtype.element_ty), mask=inside[:, None] & (column < F.D))
    tl.store(lse + line, top, mask=inside)
    tl.store(kept + line, top * LOG2E, mask=inside)
    tl.store(kept + lines + line, tl.full((F.ROWS,), 1.0, tl.float32), mask=inside)


@jit_kernel
def scatter_kernel(given, along, dvalue, scales, steps, z, F: tl.constexpr):
    """Sum ∂L/∂out over the queries of each best key of a tile, in all heads of a group."""
    count = (z.m + F.COLS - 1) // F.COLS
    pair = tl.program_id(0) // count
    first = tl.program_id(0) % count * F.COLS
    key_heads = z.heads // z.group
    j = first + tl.arange(0, F.COLS)[:, None]
    near = tl.arange(0, F.ROWS)
    column = tl.arange(0, F.BLOCK_D)[None, :]
    last = tl.minimum(first + F.COLS, z.m) - 1
    lo, _, _, hi = tiles.visible_tiles(
        first, last, -z.upper, -z.lower, z.n, F.ROWS, F.UPPER, F.LOWER
    )
    if F.SPANS:
        edges = (lo, lo, hi, hi)
        lo, _, _, hi = tiles.clip_to_spans(edges, given.query_spans, first, last, z.m, F.ROWS)
    total = tl.zeros((F.COLS, F.BLOCK_D), tl.float32)
    for g in tl.range(0, z.group):
        lane = pair // key_heads * z.heads + pair % key_heads * z.group + g
        for t in tl.range(lo, hi):
            i = t * F.ROWS + near
            line = tl.cast(lane, tl.int64) * z.n + i
            best = tl.load(given.row_b + line, mask=i < z.n, other=-1)
            p = (best[None, :] == j).to(tl.float32)
            if F.DROP:
                p = p * _dropout_factors(given, lane, i[None, :], j, scales, z)
            inside = (i < z.n)[:, None] & (column < F.D)
            x = tl.load(along + line[:, None] * F.D + column, mask=inside, other=0.0)
            total = tl.dot(p.to(x.dtype), x, total, input_precision=F.PRECISION)
    where = dvalue + (tl.cast(pair, tl.int64) * z.m + j) * F.D + column
    tl.store(where, total.to(dvalue.dtype.element_ty), mask=(j < z.m) & (column < F.D))


def _plain_sizes(call: KernelCall) -> Sizes:
    """Return the sizes without those of a mask, so that one kernel serves all masks."""
    return Sizes(*call.base_sizes[: len(Sizes._fields)])


def take_best_values(call: KernelCall, out: Tensor, lse: Tensor, kept: Tensor) -> None:
    """Fill out, lse and kept with the best key's value and score of each query."""

    def run_tile(tile: Tile) -> None:
        facts = call.constexprs | {"ROWS": tile.rows}
        programs = call.b * call.h * -(-call.n // tile.rows)
        sizes = (_plain_sizes(call), kept.stride(0))
        call.launch_kernel(take_kernel, programs, (out, lse, kept), None, sizes, facts, tile)

    call.run_with_fitting_tile("take", Tile(ROWS_PER_TILE, 1, 1, 4, 1), run_tile)


def scatter_gradient(call: KernelCall, along: Tensor, dvalue: Tensor) -> None:
    """Fill dvalue (B, Hₖ, m, d) with the sums of `along` over the queries of each best key."""

    def run_tile(tile: Tile) -> None:
        facts = call.constexprs | {"ROWS": tile.rows, "COLS": tile.cols}
        programs = call.b * call.hk * -(-call.m // tile.cols)
        arrays, sizes = (along, dvalue), (_plain_sizes(call),)
        call.launch_kernel(scatter_kernel, programs, arrays, None, sizes, facts, tile)

    wide = call.d > tile_choice.MAX_BACKWARD_TILE_WIDTH
    rows = ROWS_PER_TILE // 2 if wide or call.query.element_size() == 4 else ROWS_PER_TILE
    call.run_with_fitting_tile("scatter", Tile(rows, ROWS_PER_TILE, 1, 4, 2), run_tile)
