"""The gradients of the numbers that a score_mod loads from captured tensors.

Each number has an index that depends on some of the positions b, h, q and k. If one does not depend
on k, the pass for the gradients of queries sums its gradient over the keys (`F.CAPTURED_SUMS`).
Other gradients are summed in three steps, each in a fixed order, so that results repeat:

1. `captured_gradients_kernel` sums over the positions that the index does not depend on.
2. If the index depends on q and k only through q − k, `sum_distances_kernel` sums diagonals.
3. `captured_index_kernel` writes the indices, and PyTorch adds the sums of equal indices.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.launching import launch, precompile, tile_choice
from qkv.engines.triton.launching.kernel_call import KernelCall
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.pair_functions.functions import CapturedGradient
from qkv.engines.triton.tile_functions import tiles
from qkv.engines.triton.tile_functions.program import (
    compute_product,
    compute_tile_scores,
    load_query_tile,
    locate_keys,
)
from qkv.engines.triton.tile_functions.score_tile import (
    SavedRows,
    load_row_statistics,
    modify_scores,
    score_gradients,
    tile_weights,
)
from qkv.engines.triton.tile_functions.tiles import LN2, jit_kernel

MAX_PAIRS_PER_LAUNCH = 2**26
"""Pairs whose gradients are in memory at once, if an index depends on q and k."""
INDICES_PER_PROGRAM = 1024
DISTANCES_PER_PROGRAM = 128
ROWS_PER_STEP = 32


@jit_kernel
def captured_gradients_kernel(
    given, along, centre, kept, sums, scales, steps, z, lines, rows_own, keys_own, heads_own,
    batches_shared, first_lane, first_row, rows_tiles, F: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the sums over all lanes, rows and keys that share an index.

    `sums` is (splits, lanes, rows, keys) of this launch, whose lanes and rows start at `first_lane`
    and `first_row`. If `rows_own` (or `keys_own`) is 1, all rows (or keys) share the index.
    """
    tiles_i = (z.n + F.ROWS - 1) // F.ROWS
    tiles_j = (z.m + F.COLS - 1) // F.COLS
    own_j = tl.where(keys_own > 1, tiles_j, 1)
    loops_i = tl.where(rows_own > 1, 1, tiles_i)
    loops_j = tiles_j // own_j
    pid = tl.program_id(0)
    part = pid % z.splits
    pid = pid // z.splits
    tile_j = pid % own_j
    pid = pid // own_j
    tile_i = pid % rows_tiles
    lane = pid // rows_tiles
    heads_shared = z.heads // heads_own
    lanes_shared = batches_shared * heads_shared
    own = lane + first_lane
    near_i = tl.arange(0, F.ROWS)
    near_j = tl.arange(0, F.COLS)
    total = tl.zeros((F.ROWS, F.COLS), dtype=tl.float32)
    back = SavedRows(along, centre, kept, tl.cast(lines, tl.int64))
    factor = scales.times
    if F.WEIGHTING == "softmax":
        factor = factor * LN2
    begin = part * z.span
    end = tl.minimum(begin + z.span, lanes_shared * loops_i * loops_j)
    for step in tl.range(begin, end):
        at_j = (tile_j + step % loops_j) * F.COLS
        at_i = first_row + (tile_i + step // loops_j % loops_i) * F.ROWS
        other = step // (loops_j * loops_i)
        batch = own // heads_own * batches_shared + other // heads_shared
        head = own % heads_own * heads_shared + other % heads_shared
        seen = at_i < z.n
        if F.UPPER:
            seen = seen & (at_j - at_i - (F.ROWS - 1) <= z.upper)
        if F.LOWER:
            seen = seen & (at_j + (F.COLS - 1) - at_i >= z.lower)
        if F.SPANS:
            last_i = tl.minimum(at_i + F.ROWS, z.n) - 1
            seen = seen & (tl.load(given.key_spans + tl.minimum(at_i, last_i)) < at_j + F.COLS)
            seen = seen & (tl.load(given.key_spans + (z.n + last_i)) > at_j)
        if seen:
            rows, spot = load_query_tile(given, steps, at_i // F.ROWS, batch * z.heads + head, z, F)
            keys = locate_keys(given, None, 0, steps, spot.batch, spot.shared, z, F)
            here = tl.minimum(near_j, z.m - 1 - at_j)
            i = (at_i + near_i)[:, None]
            j = (at_j + near_j)[None, :]
            live = tiles.live_pairs(i, j, keys.end, given.layout, given.key_spans, z, F)
            live = tiles.apply_rule(live, rows.b, rows.h, i, j, given, z, F)
            extra = j
            if F.PAIRS:
                there = rows.pairs + at_j * tl.cast(steps.p_m, tl.int64)
                read = tl.load(there + rows.at + near_j[None, :] * steps.p_m, mask=live, other=0)
                extra, live = tiles.apply_mask_array(read, live, scales.times, F, True)
            top, share, middle = load_row_statistics(back, spot.line, F)
            x, _ = compute_product(rows, keys, at_j, here, F)
            at, value, at_value = spot.line * F.D, keys.value + at_j * keys.v_m, here * keys.v_m
            if F.WIDE:
                dp = tl.zeros((F.ROWS, F.COLS), tl.float32)
                dp = tiles.add_wide_product(
                    dp, along, at, value, at_value, F.D, F.D, F.BLOCK_W, F.PRECISION
                )
            else:
                do = tiles.load_rows(along, at, F.D, F.BLOCK_D)  # (ROWS, d)
                v = tiles.load_rows(value, at_value, F.D, F.BLOCK_D)  # (COLS, d)
                dp = tl.dot(do, tl.trans(v), input_precision=F.PRECISION)
            before, _, _ = compute_tile_scores(x, rows, keys, at_j, here, scales, F.BASE, F)
            s = modify_scores(before, rows.b, rows.h, rows.i, j, given, scales.times, z, F)
            if F.PAIRS == 2:
                s = s + extra
            p, lean = tile_weights(
                s, j, live, top[:, None], share[:, None], rows.row_a, rows.row_b, scales.alpha, F,
                True,
            )  # fmt: skip
            if F.DROP:
                dp = dp * tiles.dropout_factor(rows.drawn, j, z.dropped, scales.share)
            ds = score_gradients(p, lean, dp, middle[:, None], share[:, None], F) * factor
            ds = F.CAPTURED_GRADIENT(ds, before, rows.b, rows.h, rows.i, j, given, z, F)
            total += tl.where(live, ds, 0.0)
    rows_n = tl.where(rows_own > 1, z.n - first_row, 1)
    rows_n = tl.minimum(rows_n, rows_tiles * F.ROWS)
    lanes = tl.num_programs(0) // (z.splits * own_j * rows_tiles)
    sums += (tl.cast(part, tl.int64) * lanes + lane) * rows_n * keys_own
    row = tile_i * F.ROWS + near_i
    col = tile_j * F.COLS + near_j
    if rows_own == 1:
        if keys_own == 1:
            tl.store(sums, tl.sum(tl.sum(total, 1), 0))
        else:
            tl.store(sums + col, tl.sum(total, 0), mask=col < keys_own)
    else:
        down = sums + row * tl.cast(keys_own, tl.int64)
        if keys_own == 1:
            tl.store(down, tl.sum(total, 1), mask=row < rows_n)
        else:
            inside = (row < rows_n)[:, None] & (col < keys_own)[None, :]
            tl.store(down[:, None] + col[None, :], total, mask=inside)


@jit_kernel
def sum_distances_kernel(sums, out, first_row, rows_n, keys_n, length, F: tl.constexpr):
    """Add the sums of pairs (lanes, rows, keys) with equal q − k to `out` (lanes, n + m − 1).

    Distance q − k is at q − k + keys − 1.
    """
    blocks = (length + F.BLOCK - 1) // F.BLOCK
    lane = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks) * F.BLOCK + tl.arange(0, F.BLOCK)
    distance = (at - (keys_n - 1))[None, :]
    sums += tl.cast(lane, tl.int64) * rows_n * keys_n
    total = tl.zeros((F.ROWS, F.BLOCK), dtype=tl.float32)
    for start in tl.range(0, rows_n, F.ROWS):
        row = start + tl.arange(0, F.ROWS)[:, None]
        key = first_row + row - distance
        inside = (row < rows_n) & (key >= 0) & (key < keys_n)
        total += tl.load(sums + row * tl.cast(keys_n, tl.int64) + key, mask=inside, other=0.0)
    there = out + tl.cast(lane, tl.int64) * length + at
    known = tl.load(there, mask=at < length, other=0.0)
    tl.store(there, known + tl.sum(total, 0), mask=at < length)


@jit_kernel
def captured_index_kernel(
    given, out, scales, steps, z, count, rows_own, keys_own, heads_own, first_lane, first_row,
    F: tl.constexpr,
):  # fmt: skip
    """Write the index of each number of `captured_gradients_kernel`, or of each distance."""
    at = tl.program_id(0) * F.BLOCK + tl.arange(0, F.BLOCK)
    j = at % keys_own
    i = at // keys_own % rows_own + first_row
    lane = at // keys_own // rows_own + first_lane
    if F.BY_DISTANCE:
        distance = j - (z.m - 1)
        i = tl.maximum(distance, 0)
        j = i - distance
    each = lane // heads_own * z.heads + lane % heads_own
    index = F.CAPTURED_INDEX(each // z.hashed, each % z.hashed, i, j, given, z, F)
    tl.store(out + at, index + at * 0, mask=at < count)


def fill_captured_gradient(
    call: KernelCall, along: Tensor, centre: Tensor | None, kept: Tensor, gradient: Tensor,
    known: tuple[CapturedGradient | None, Tensor | None] = (None, None),
) -> None:  # fmt: skip
    """Fill the gradient of `captured_floats`.

    `known` is a captured number and its gradients summed over the keys, (parts, B · H · n).
    """
    sums = torch.zeros(gradient.shape, dtype=torch.float32, device=gradient.device)
    for captured in call.functions.captured if call.functions is not None else ():
        if captured is known[0] and known[1] is not None:
            _add_row_sums(call, captured, known[1], sums)
        else:
            _add_gradient(call, captured, along, centre, kept, sums)
    gradient.copy_(sums)


def _add_row_sums(
    call: KernelCall, captured: CapturedGradient, row_sums: Tensor, sums: Tensor
) -> None:
    """Add the gradients of a number whose index does not depend on the key."""
    batches, heads = call.tile_lists.own_lanes(captured.positions)
    shape = batches, call.b // batches, heads, call.h // heads, call.n
    found = row_sums.sum(0).view(shape).sum((1, 3))
    rows = call.n if "q" in captured.positions else 1
    if rows == 1:
        found = found.sum(-1)
    _scatter(call, captured, found.contiguous(), (rows, 1, heads, 0, 0), sums)


def _add_gradient(
    call: KernelCall, captured: CapturedGradient, along: Tensor, centre: Tensor | None,
    kept: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    batches, heads = call.tile_lists.own_lanes(captured.positions)
    rows, keys = (
        count if name in captured.positions else 1 for name, count in (("q", call.n), ("k", call.m))
    )

    def run_tile(tile: Tile) -> None:
        total = torch.zeros_like(sums)
        lanes = batches * heads
        some_rows = rows
        if rows * keys > MAX_PAIRS_PER_LAUNCH:
            some_rows = max(MAX_PAIRS_PER_LAUNCH // keys // tile.rows, 1) * tile.rows
        some_lanes = max(MAX_PAIRS_PER_LAUNCH // (some_rows * keys), 1)
        for first_lane in range(0, lanes, some_lanes):
            count = min(some_lanes, lanes - first_lane)
            by_distance: Tensor | None = None
            if captured.by_distance:
                by_distance = sums.new_zeros((count, call.n + call.m - 1))
            for first_row in range(0, rows, some_rows):
                rows_n = min(some_rows, rows - first_row)
                found = _launch_sums(
                    call, captured, tile, along, centre, kept,
                    (rows, keys, heads, call.b // batches, first_lane, first_row), count, rows_n,
                )  # fmt: skip
                if by_distance is None:
                    own = rows_n, keys, heads, first_lane, first_row
                    _scatter(call, captured, found, own, total)
                    continue
                length = by_distance.shape[1]
                launch.launch_kernel(
                    sum_distances_kernel, count * -(-length // DISTANCES_PER_PROGRAM),
                    (found, by_distance), (), (first_row, rows_n, keys, length),
                    {"BLOCK": DISTANCES_PER_PROGRAM, "ROWS": ROWS_PER_STEP}, Tile(1, 1, 1, 4, 1),
                )  # fmt: skip
            if by_distance is not None:
                own = 1, by_distance.shape[1], heads, first_lane, 0
                _scatter(call, captured, by_distance, own, total)
        sums.add_(total)

    call.run_with_fitting_tile("to_pairs", call.choose_tile("to_pairs", call.n), run_tile)


def _launch_sums(
    call: KernelCall, captured: CapturedGradient, tile: Tile, along: Tensor,
    centre: Tensor | None, kept: Tensor, own: tuple[int, ...], lanes: int, rows_n: int,
) -> Tensor:  # fmt: skip
    """Return the sums (lanes, rows, keys) of some lanes and rows."""
    rows, keys, heads, batches_shared, *_ = own
    count_i, count_j = -(-call.n // tile.rows), -(-call.m // tile.cols)
    rows_tiles = -(-rows_n // tile.rows)
    programs = lanes * rows_tiles * (count_j if keys > 1 else 1)
    rounds = batches_shared * (call.h // heads)
    rounds *= (1 if rows > 1 else count_i) * (1 if keys > 1 else count_j)
    room = launch.count_processors(call.query.device) * tile.waves
    span = max(-(-rounds * programs // room), min(rounds, 4))
    splits = -(-rounds // span)
    found = call.allocate_buffer(splits, lanes, rows_n, keys)
    much = call.constexprs["APART"] and call.weighting == "topk"
    wide = max(call.w, call.d) > tile_choice.MAX_BACKWARD_TILE_WIDTH or much
    assert call.functions is not None
    facts = call.constexprs | {
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "WIDE": wide,
        "BLOCK_W": call.product_block_width(tile, wide),
        "TMA": False,
        "PACKED": False,
        "QUICK": False,
        "CAPTURED_GRADIENT": call.functions.function(captured.gradient_function),
    }
    sizes = (
        call.build_sizes(splits=splits, span=span), call.b * call.h * call.n, *own, rows_tiles,
    )  # fmt: skip
    arrays = (along, centre, kept, found)
    call.launch_kernel(
        captured_gradients_kernel, programs * splits, arrays, None, sizes, facts, tile
    )
    return found.sum(0) if splits > 1 else found[0]


def _scatter(
    call: KernelCall, captured: CapturedGradient, found: Tensor, own: tuple[int, ...],
    total: Tensor,
) -> None:  # fmt: skip
    """Add the sums to the numbers at their indices; PyTorch sorts equal indices."""
    count = found.numel()
    index = call.allocate_buffer(count, dtype=torch.int64)
    assert call.functions is not None
    facts: dict[str, Any] = {
        "BLOCK": INDICES_PER_PROGRAM,
        "BY_DISTANCE": captured.by_distance,
        "CAPTURED_INDEX": call.functions.function(captured.index_function),
        "FAST": False,
        "SHORT": call.constexprs["SHORT"],
    }
    call.launch_kernel(
        captured_index_kernel, -(-count // INDICES_PER_PROGRAM), (index,), None,
        (call.build_sizes(), count, *own), facts, Tile(1, 1, 1, 4, 1),
    )  # fmt: skip
    if precompile.DRY_RUN_JOBS.get() is None:  # a dry run writes no indices
        total.index_put_((index,), found.reshape(-1), accumulate=True)
