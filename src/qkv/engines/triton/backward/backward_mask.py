"""The gradient of a float mask: `backward_mask_kernel`, one program per tile or part of a tile."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.launching import launch, tile_choice
from qkv.engines.triton.launching.kernel_call import KernelCall
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.tile_functions import tiles
from qkv.engines.triton.tile_functions.program import (
    compute_product,
    compute_tile_scores,
    load_query_tile,
    locate_keys,
)
from qkv.engines.triton.tile_functions.score_tile import (
    SavedRows,
    is_all_finite,
    load_row_statistics,
    modify_scores,
    score_gradients,
    tile_weights,
)
from qkv.engines.triton.tile_functions.tiles import LN2, NEG_INFINITY, jit_kernel


@triton.jit
def sum_shared_tile(
    given, back, extra, row, tile_i, tile_j, lane_own, lo, hi, steps, scales, own, z, F
):
    """Return ΣP ∘ (∂L/∂α − c) of a tile over the heads lo … hi that share it, read by TMA.

    `extra` is the mask's tile in base 2, −∞ for excluded pairs. As long as all scores are finite,
    their weight is 0 without a comparison.
    """
    batches, batches_own, heads_own = own
    own_heads = z.heads // heads_own
    count = tl.cast(z.heads * z.n, tl.int64) * F.D
    query = tl.make_tensor_descriptor(
        given.query, [batches, z.heads, z.n, F.W], [steps.q_b, steps.q_h, steps.q_n, 1],
        [1, 1, F.ROWS, F.BLOCK_W],
    )  # fmt: skip
    key = tl.make_tensor_descriptor(
        given.key, [batches, z.heads // z.group, z.m, F.W], [steps.k_b, steps.k_h, steps.k_m, 1],
        [1, 1, F.COLS, F.BLOCK_W],
    )  # fmt: skip
    value = tl.make_tensor_descriptor(
        given.value, [batches, z.heads // z.group, z.m, F.D], [steps.v_b, steps.v_h, steps.v_m, 1],
        [1, 1, F.COLS, F.BLOCK_D],
    )  # fmt: skip
    along = tl.make_tensor_descriptor(
        back.along, [batches, z.heads, z.n, F.D], [count, tl.cast(z.n, tl.int64) * F.D, F.D, 1],
        [1, 1, F.ROWS, F.BLOCK_D],
    )  # fmt: skip
    total = tl.zeros((F.ROWS, F.COLS), dtype=tl.float32)
    for other in tl.range(lo, hi):
        batch = lane_own // own_heads * batches_own + other // heads_own
        head = lane_own % own_heads * heads_own + other % heads_own
        shared = head // z.group
        q = query.load([batch, head, tile_i * F.ROWS, 0]).reshape(F.ROWS, F.BLOCK_W)
        k = key.load([batch, shared, tile_j * F.COLS, 0]).reshape(F.COLS, F.BLOCK_W)
        do = along.load([batch, head, tile_i * F.ROWS, 0]).reshape(F.ROWS, F.BLOCK_D)
        v = value.load([batch, shared, tile_j * F.COLS, 0]).reshape(F.COLS, F.BLOCK_D)
        line = tl.cast(batch * z.heads + head, tl.int64) * z.n + row
        top, share, middle = load_row_statistics(back, line, F)
        s = tl.dot(q, tl.trans(k)) * scales.scale
        peak = top[:, None]
        cut = s
        if F.EXPONENTIAL:
            peak = peak - extra
        else:
            s = s + extra
            cut = tl.load(given.row_a + line)[:, None]
        p, lean = tile_weights(
            s, s, s, peak, share[:, None], cut, s, scales.alpha, F, False
        )  # fmt: skip
        dp = tl.dot(do, tl.trans(v))
        total += score_gradients(p, lean, dp, middle[:, None], share[:, None], F)
    return total


@jit_kernel
def backward_mask_kernel(
    given, along, centre, kept, dpairs, scales, steps, z, lines, rows_own, keys_own, lanes_own,
    batches_own, heads_own, F: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one tile of the mask array over all lanes that share it.

    If rows or keys are shared too (`rows_own` or `keys_own` is 1), the program also loops over
    their tiles. If the loop is split (`z.splits` > 1), each program runs `z.span` of its steps and
    writes a partial sum.
    """
    tiles_i = (z.n + F.ROWS - 1) // F.ROWS
    tiles_j = (z.m + F.COLS - 1) // F.COLS
    own_i = tl.where(rows_own > 1, tiles_i, 1)
    own_j = tl.where(keys_own > 1, tiles_j, 1)
    pid = tl.program_id(0)
    part = pid % z.splits
    pid = pid // z.splits
    tile_j = pid % own_j
    pid = pid // own_j
    tile_i = pid % own_i
    lane_own = pid // own_i
    loops_i = tiles_i // own_i
    loops_j = tiles_j // own_j
    others = batches_own * heads_own  # lanes that share the array's lane
    rounds = others * loops_i * loops_j
    near_i = tl.arange(0, F.ROWS)
    near_j = tl.arange(0, F.COLS)
    total = tl.zeros((F.ROWS, F.COLS), dtype=tl.float32)
    offset = near_i[:, None] * steps.p_n + near_j[None, :] * steps.p_m
    back = SavedRows(along, centre, kept, tl.cast(lines, tl.int64))
    own_heads = z.heads // heads_own
    if F.ONCE:  # all lanes that share the tile read the same mask
        i = (tile_i * F.ROWS + near_i)[:, None]
        j = (tile_j * F.COLS + near_j)[None, :]
        inside = tiles.live_pairs(i, j, z.m, given.layout, given.key_spans, z, F)
        there = given.pairs + tl.cast(lane_own // own_heads, tl.int64) * steps.p_b
        there += tl.cast(lane_own % own_heads, tl.int64) * steps.p_h
        there += tile_i * F.ROWS * tl.cast(steps.p_n, tl.int64)
        there += tile_j * F.COLS * tl.cast(steps.p_m, tl.int64)
        read = tl.load(there + offset, mask=inside, other=0)
        own_extra, own_live = tiles.apply_mask_array(read, inside, scales.times, F, True)
        added = own_extra
        if F.QUICK:
            if F.EDGED:
                added = tl.where(own_live, own_extra, NEG_INFINITY)
            else:
                added = tl.load(there + offset).to(tl.float32) * scales.times
    begin = part * z.span
    end = tl.minimum(begin + z.span, rounds)
    if F.QUICK:
        own = (lanes_own * others // z.heads, batches_own, heads_own)
        row = tl.minimum(tile_i * F.ROWS + near_i, z.n - 1)
        total = sum_shared_tile(
            given, back, added, row, tile_i, tile_j, lane_own, begin, end, steps, scales, own, z, F
        )
        good = is_all_finite(total)
        total = tl.where(good, total, 0.0)
        begin = tl.where(good, end, begin)  # else all again, with comparisons
    for step in tl.range(begin, end):
        at_j = (tile_j + step % loops_j) * F.COLS
        at_i = (tile_i + step // loops_j % loops_i) * F.ROWS
        other = step // (loops_j * loops_i)
        batch = lane_own // own_heads * batches_own + other // heads_own
        head = lane_own % own_heads * heads_own + other % heads_own
        rows, spot = load_query_tile(given, steps, at_i // F.ROWS, batch * z.heads + head, z, F)
        keys = locate_keys(given, None, 0, steps, spot.batch, spot.shared, z, F)
        here_j = tl.minimum(near_j, z.m - 1 - at_j)
        j = (at_j + near_j)[None, :]
        if F.ONCE:
            extra = own_extra
            live = own_live
            if given.lengths is not None:
                live = live & (j < keys.end)
        else:
            i = (at_i + near_i)[:, None]
            live = tiles.live_pairs(i, j, keys.end, given.layout, given.key_spans, z, F)
            there = rows.pairs + at_j * tl.cast(steps.p_m, tl.int64)
            read = tl.load(there + offset, mask=live, other=0)
            extra, live = tiles.apply_mask_array(read, live, scales.times, F, True)
        live = tiles.apply_rule(live, rows.b, rows.h, rows.i, j, given, z, F)
        top, share, middle = load_row_statistics(back, spot.line, F)
        x, _ = compute_product(rows, keys, at_j, here_j, F)
        at, value, at_value = spot.line * F.D, keys.value + at_j * keys.v_m, here_j * keys.v_m
        if F.WIDE:
            dp = tl.zeros((F.ROWS, F.COLS), tl.float32)
            dp = tiles.add_wide_product(
                dp, along, at, value, at_value, F.D, F.D, F.BLOCK_W, F.PRECISION
            )
        else:
            do = tiles.load_rows(along, at, F.D, F.BLOCK_D)  # (ROWS, d)
            v = tiles.load_rows(value, at_value, F.D, F.BLOCK_D)  # (COLS, d)
            dp = tl.dot(do, tl.trans(v), input_precision=F.PRECISION)
        s, _, _ = compute_tile_scores(x, rows, keys, at_j, here_j, scales, F.BASE, F)
        s = modify_scores(s, rows.b, rows.h, rows.i, j, given, scales.times, z, F)
        p, lean = tile_weights(
            s + extra, j, live, top[:, None], share[:, None], rows.row_a, rows.row_b,
            scales.alpha, F, True,
        )  # fmt: skip
        if F.DROP:
            dp = dp * tiles.dropout_factor(rows.drawn, j, z.dropped, scales.share)
        ds = score_gradients(p, lean, dp, middle[:, None], share[:, None], F)
        total += tl.where(live, ds, 0.0)
    factor = scales.times
    if F.WEIGHTING == "softmax":
        factor = factor * LN2
    total = total * factor
    there = dpairs + tl.cast(part, tl.int64) * lanes_own * rows_own * keys_own
    there += tl.cast(lane_own // own_heads, tl.int64) * steps.o_b
    there += tl.cast(lane_own % own_heads, tl.int64) * steps.o_h
    row = tile_i * F.ROWS + near_i
    col = tile_j * F.COLS + near_j
    if rows_own == 1:
        if keys_own == 1:
            tl.store(there, tl.sum(tl.sum(total, 1), 0))
        else:
            tl.store(there + col * steps.o_m, tl.sum(total, 0), mask=col < z.m)
    else:
        down = there + row * tl.cast(steps.o_n, tl.int64)
        if keys_own == 1:
            tl.store(down, tl.sum(total, 1), mask=row < z.n)
        else:
            inside = (row < z.n)[:, None] & (col < z.m)[None, :]
            tl.store(down[:, None] + col[None, :] * steps.o_m, total, mask=inside)


def fill_mask_gradient(
    call: KernelCall, along: Tensor, centre: Tensor | None, kept: Tensor, dpairs: Tensor
) -> None:
    """Fill the gradient of the mask's array, (B or 1, H or 1, n or 1, m or 1)."""
    batches, heads, rows, keys = dpairs.shape

    def run_tile(tile: Tile) -> None:
        tiles = -(-call.n // tile.rows), -(-call.m // tile.cols)
        own = [count if size > 1 else 1 for count, size in zip(tiles, (rows, keys), strict=True)]
        programs = batches * heads * own[0] * own[1]
        steps = call.b * call.h * tiles[0] * tiles[1] // programs
        max_programs = launch.count_processors(dpairs.device) * tile.waves
        span = max(-(-steps * programs // max_programs), min(steps, 4))
        splits = -(-steps // span)
        out = dpairs
        if splits > 1 or not out.is_contiguous():
            out = call.allocate_buffer(splits, *dpairs.shape)
        # Scores summed term by term are much code at full width. Otherwise compute scores as the
        # pass that computed the centre.
        much = call.constexprs["APART"] and call.weighting == "topk"
        wide = max(call.w, call.d) > tile_choice.MAX_BACKWARD_TILE_WIDTH or much
        wide = wide or not call.has_product
        facts = call.constexprs | {"ROWS": tile.rows, "COLS": tile.cols}
        facts |= {
            "WIDE": wide,
            "BLOCK_W": call.product_block_width(tile, wide),
            "ONCE": own == list(tiles),
        }
        facts |= {"TMA": False, "PACKED": False}
        facts["QUICK"] = call.float_mask_bytes > 0 and facts["ONCE"] and tile.uses_descriptors
        facts["EDGED"] = (
            call.constexprs["LOWER"] or call.constexprs["UPPER"] or call.constexprs["SPANS"]
            or call.layout is not None
            or call.n % tile.rows != 0 or call.m % tile.cols != 0
        )  # fmt: skip
        arrays, lines = (along, centre, kept, out), call.b * call.h * call.n
        own_sizes = (rows, keys, batches * heads, call.b // batches, call.h // heads)
        sizes = (call.build_sizes(splits=splits, span=span), lines, *own_sizes)
        call.launch_kernel(backward_mask_kernel, programs * splits, arrays, out, sizes, facts, tile)
        if out is not dpairs:
            dpairs.copy_(out.sum(0))

    call.run_with_fitting_tile("to_pairs", call.choose_tile("to_pairs", call.n), run_tile)
