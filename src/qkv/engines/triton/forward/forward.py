"""out = Σⱼ α(s)ᵢⱼ vⱼ in tiles: `pool_kernel` sums, `merge_kernel` joins parts of split keys.

No kernel uses atomics: each sum is computed by one program.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.launching import launch, tile_choice, workspace
from qkv.engines.triton.launching.kernel_call import KernelCall, round_query
from qkv.engines.triton.launching.launch_replay import replay_launches
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.sparse import best_value
from qkv.engines.triton.tile_functions import tiles
from qkv.engines.triton.tile_functions.distance import (
    apply_distance_form,
    bounded_window_weights,
    find_doubts,
    mark_doubts,
    next_doubts,
    start_doubts,
    tiles_per_bit,
    window_square,
)
from qkv.engines.triton.tile_functions.program import (
    align_stride,
    align_strides,
    begin_row_program,
    compute_product,
    compute_tile_scores,
    is_skipped,
    load_mask_tile,
    locate_keys,
    locate_tile,
    rows_per_lane,
)
from qkv.engines.triton.tile_functions.records import NARROW_SIZES
from qkv.engines.triton.tile_functions.score_tile import (
    is_all_finite,
    keep_top_k,
    modify_scores,
    tile_weights,
)
from qkv.engines.triton.tile_functions.tiles import (
    INFINITY,
    LAST_POSITION,
    LN2,
    LOG2E,
    NEG_INFINITY,
    PARTIAL_SUM_COLUMNS,
    jit_kernel,
)
from qkv.util.caches import memoize


@triton.jit
def pool_tiles(
    state, rows, keys, some, scales, z, lo, hi, F,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr, EXACT: tl.constexpr = 0,
):  # fmt: skip
    """Return the state of the rows after tiles lo … hi of the keys.

    The state is the pooled values, top, total, and the bits of `distance.mark_doubts`. CAREFUL
    ignores NaN in excluded values, and pools only `some` columns: (pointer, count). With EXACT = 1,
    pairs of a window whose score is not certain are left out and marked. With EXACT = 2, only those
    pairs are added.
    """
    acc, top, total, doubts = state
    RULED: tl.constexpr = MASKED or (F.PAIRS > 0 and not (F.QUICK or F.SKIPS_PAIRS))
    ADDED: tl.constexpr = F.FOLD and F.PAIRS == 2
    scale = scales.scale
    times = scales.times
    if ADDED:  # add the mask unscaled, and multiply the sum by its factor
        scale = scales.scale / scales.times
        times = 1.0
    # LATE: multiply by the factor after a score_mod only in the exponent.
    LATE: tl.constexpr = F.HAS_MOD and F.WEIGHTING == "softmax" and F.PAIRS != 2
    after = times
    if LATE:
        after = 1.0
    # FLAT: one loop over tiles and chunks, so that the next tile loads meanwhile. The CAREFUL loop
    # is rare; without stages it compiles faster.
    FLAT: tl.constexpr = F.WIDE and F.TMA and not CAREFUL
    STAGES: tl.constexpr = 1 if CAREFUL or EXACT == 2 else None
    shift = 0
    if EXACT == 1:
        shift = tiles_per_bit(hi - lo)
    low = scale
    if F.BOUNDED:
        low = tl.exp2(0.0 - scale)
    tied = 0
    if F.WEIGHTING == "topk":
        tied = tl.max((rows.row_b != LAST_POSITION).to(tl.int32))
    for t in tl.range(lo, hi, flatten=FLAT, num_stages=STAGES):
        start, j, here, live, extra = load_mask_tile(t, rows, keys, times, z, F, MASKED)
        far = locate_tile(start, keys, z, F)
        if F.WEIGHTING == "average":
            p = live.to(tl.float32) if RULED else tl.full((F.ROWS, F.COLS), 1.0, tl.float32)
            total += tl.sum(p, 1)
        else:
            x, y = compute_product(rows, keys, far, here, F)
            if EXACT and F.BOUNDED:
                square, sure = window_square(
                    x, rows, keys, start, here, scales.square_scale, F, EXACT, EDGE=False
                )
                p = bounded_window_weights(square, low, scales.scale, F, EXACT)
                if EXACT == 1:
                    doubts = mark_doubts(doubts, sure, (t - lo) >> shift)
                    p = p * sure
                else:
                    p = tl.where(sure > 0.0, 0.0, p)
                if RULED:
                    p = tl.where(live, p, 0.0)
            elif F.FOLD:
                factor = scales.scale
                if ADDED:
                    x = x * scale + extra
                    factor = scales.times
                s = tl.where(live, x, NEG_INFINITY) if RULED else x
                new = tl.maximum(top, tl.max(s, 1) * factor)
                base = tl.where(new == NEG_INFINITY, 0.0, new)
                p = tiles.fast_exp2(s * factor - base[:, None], F.FAST)
            else:
                if EXACT:
                    s, _, sure = apply_distance_form(
                        x, rows, keys, start, here, rows.cap, scales, F.BASE, F, EXACT
                    )
                    if EXACT == 1:
                        doubts = mark_doubts(doubts, sure, (t - lo) >> shift)
                    own = (sure > 0.0) == (EXACT == 1)
                    live = live & own if RULED else own
                else:
                    s, _, _ = compute_tile_scores(x, rows, keys, start, here, scales, F.BASE, F)
                if F.SQUARES:
                    wide = y.to(tl.float32)
                    s += tl.sum(wide * wide, 1)[None, :] * (scales.square_scale * F.BASE)
                s = modify_scores(s, rows.b, rows.h, rows.i, j, rows.captured, after, z, F)
                if F.PAIRS == 2:
                    s = s + extra
                if F.EXPONENTIAL:
                    if F.WEIGHTING == "topk":
                        s = keep_top_k(s, j, rows.row_a, rows.row_b, tied)
                    if RULED or EXACT:
                        s = tl.where(live, s, NEG_INFINITY)
                    if F.TOPPED:
                        s = s * LOG2E
                        base = tl.sum(rows.top, 1)
                    elif F.BOUNDED:
                        base = tl.zeros((F.ROWS,), tl.float32) + scales.scale
                    elif F.WEIGHTING == "topk":  # compared in base e, like the thresholds
                        new = tl.maximum(top, tl.max(s, 1) * LOG2E)
                        s = s * LOG2E
                    elif LATE:
                        new = tl.maximum(top, tl.max(s, 1) * times)
                        s = s * times
                    else:
                        new = tl.maximum(top, tl.max(s, 1))
                    if not (F.BOUNDED or F.TOPPED):
                        base = tl.where(new == NEG_INFINITY, 0.0, new)
                    p = tiles.fast_exp2(s - base[:, None], F.FAST)
                else:
                    p, _ = tile_weights(
                        s, j, live, 0.0, 1.0, rows.row_a, rows.row_b, scales.alpha, F,
                        RULED or EXACT > 0,
                    )  # fmt: skip
            if F.TOPPED:
                total += tiles.fold_columns(p)
            elif F.BOUNDED:
                total += tl.sum(p, 1)
            elif F.EXPONENTIAL:
                fade = tl.exp2(top - base)
                total = total * fade + tl.sum(p, 1)
                acc = acc * fade[:, None]
                top = new
            elif F.WEIGHTING == "normalized":
                total += tl.sum(p, 1)
        if F.DROP:
            p = p * tiles.dropout_factor(rows.drawn, j, z.dropped, scales.share)
        if F.CODES:
            p = p * tl.load(keys.scales.value + far + here)[None, :]
        if CAREFUL:
            counts = p != 0 if F.SPARSE else live | (p != p)
            first, width = some
            v = tiles.load_some_columns(
                first + far * keys.v_m, here * keys.v_m, width, acc.shape[1]
            )
            if F.CODES:
                v = v.to(rows.held.dtype)
            acc = tiles.add_product_nan_safe(acc, p, v, counts, F.PRECISION)
        else:
            v = tiles.load_row_tile(
                keys.value, far, keys.v_m, here, F.D, F.BLOCK_D, F.TMA
            )  # (COLS, d)
            if F.CODES:
                v = v.to(rows.held.dtype)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=F.PRECISION)
    return acc, top, total, doubts


@triton.jit
def empty_state(F, WIDTH: tl.constexpr):
    """Return the state before the first tile, for values of this width."""
    return (
        tl.zeros((F.ROWS, WIDTH), dtype=tl.float32),
        tl.full((F.ROWS,), NEG_INFINITY, dtype=tl.float32),
        tl.zeros((F.ROWS, PARTIAL_SUM_COLUMNS) if F.TOPPED else (F.ROWS,), dtype=tl.float32),
        start_doubts(F.ROWS, F),
    )


@jit_kernel
def pool_kernel(
    given, at, counts, out, lse, kept, scales, steps, z, F: tl.constexpr
):  # fmt: skip
    """Compute the output and log-sum-exp of one tile of queries; with SPLIT, of one part of keys.

    A part is written to `out` (splits, …) unnormalized, with its top in `lse` and its total in
    `kept`.
    """
    if is_skipped(given, at, z, F):
        return
    rows, keys, spot, edges, part = begin_row_program(given, at, counts, steps, z, F)
    lo, inner_lo, inner_hi, hi = edges
    state = empty_state(F, F.BLOCK_D)
    if (F.LOWER or F.SPANS) and not F.TILED and not F.EDGES:
        state = pool_tiles(state, rows, keys, 0, scales, z, lo, inner_lo, F, True, False)
    if not F.EDGES:
        EXACT: tl.constexpr = 1 if F.FEW is not None else 0
        state = pool_tiles(
            state, rows, keys, 0, scales, z, inner_lo, inner_hi, F, False, False, EXACT
        )
        if EXACT:
            bits = find_doubts(state[3])
            shift = tiles_per_bit(inner_hi - inner_lo)
            SHARE: tl.constexpr = F.COLS // F.FEW.COLS
            few = locate_keys(
                given, None, 0, align_strides(steps, F), spot.batch, spot.shared, z, F.FEW
            )
            while bits != 0:
                first, last, bits = next_doubts(bits, shift, inner_lo, inner_hi)
                state = pool_tiles(
                    state, rows, few, 0, scales, z, first * SHARE, last * SHARE, F.FEW,
                    False, False, 2,
                )  # fmt: skip
    if F.QUICK and F.EXPONENTIAL:
        acc, top, total, doubts = state
        good = tl.max((tiles.is_finite(total) == 0).to(tl.int32), 0) == 0
        acc = tl.where(good, acc, 0.0)
        state = (acc, tl.where(good, top, NEG_INFINITY), tl.where(good, total, 0.0), doubts)
        inner_hi = tl.where(good, inner_hi, lo)  # else all tiles again, with comparisons
    if F.UPPER or F.SPANS or (F.CUT and not F.ENDED) or F.TILED or F.EDGES or F.QUICK:
        state = pool_tiles(state, rows, keys, 0, scales, z, inner_hi, hi, F, True, False)
    acc, top, total, _ = state
    if F.BOUNDED:
        top = tl.zeros((F.ROWS,), tl.float32) + scales.scale
    if F.TOPPED:
        top = tl.sum(rows.top, 1)
        total = tl.sum(total, 1)
    line = spot.line
    rows_n = rows_per_lane(z, F)
    lanes = tl.num_programs(0) // ((rows_n + F.ROWS - 1) // F.ROWS * z.splits)
    if F.SPLIT:
        line += tl.cast(part, tl.int64) * lanes * rows_n
        tl.store(lse + line, top, mask=spot.inside)
        tl.store(kept + line, total, mask=spot.inside)
        there = line * F.D
        share = tl.full(total.shape, 1.0, tl.float32)
    else:
        there = spot.batch * align_stride(steps.o_b, F) + spot.head * align_stride(steps.o_h, F)
        there += spot.row * tl.cast(align_stride(steps.o_n, F), tl.int64)
        lines = tl.cast(lanes, tl.int64) * rows_n
        share = finish_rows(top, total, line, spot.inside, lse, kept, lines, F)
    odd = False
    BANDED: tl.constexpr = F.LOWER or F.UPPER or F.CUT or F.SPANS
    if BANDED or F.LAYOUT or F.PAIRS or F.SPARSE or F.HAS_RULE:
        odd = is_all_finite(acc) == 0
    if odd:
        # An excluded value, multiplied by 0, may have made the sum NaN: repeat with CAREFUL, few
        # columns at a time, because that is less code to compile.
        FEW: tl.constexpr = min(F.BLOCK_D, 64)
        value = given.value + spot.batch * steps.v_b + spot.shared * steps.v_h
        for first in tl.range(0, F.D, FEW):
            some = (value + first, F.D - first)
            seen, _, _, _ = pool_tiles(
                empty_state(F, FEW), rows, keys, some, scales, z, lo, hi, F, True, True
            )
            store_rows(seen, share, out + first, there, spot.inside, F.D - first)
    else:
        store_rows(acc, share, out, there, spot.inside, F.D)


@triton.jit
def finish_rows(top, total, line, inside, lse, kept, lines, F):
    """Write the log-sum-exp (or total) and `kept`; return the factor of the pooled values."""
    share = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
    summary = total
    if F.EXPONENTIAL:
        top = tl.where(top == NEG_INFINITY, 0.0, top)
        logarithm = tl.log2(tl.where(total == 0, 1.0, total))
        summary = tl.where(total == 0, NEG_INFINITY, (top + logarithm) * LN2)
        if not F.APART:
            # With top = ∞, an empty row has weights 2^(−∞) = 0.
            top = tl.where(total == 0, INFINITY, top + logarithm)
    else:
        top = total * 0.0
    if lse is not None:
        tl.store(lse + line, summary, mask=inside)
    if kept is not None:
        tl.store(kept + line, top, mask=inside)
        tl.store(kept + lines + line, share, mask=inside)
    if F.WEIGHTING == "raw" or F.WEIGHTING == "sigmoid" or F.WEIGHTING == "entmax":
        share = tl.full(total.shape, 1.0, tl.float32)
    return share


@triton.jit
def store_rows(acc, share, out, there, inside, width):
    """Write the pooled values of rows, up to `width` columns."""
    column = tl.arange(0, acc.shape[1])[None, :]
    where = out + there[:, None] + column
    acc = (acc * share[:, None]).to(out.dtype.element_ty)
    tl.store(where, acc, mask=inside[:, None] & (column < width))


@jit_kernel
def merge_kernel(parts, tops, totals, out, lse, kept, lines, splits, F: tl.constexpr):
    """Join the parts of one row: scale each from its own top to the largest, and add."""
    line = tl.cast(tl.program_id(0), tl.int64)
    lines = tl.cast(lines, tl.int64)
    s = tl.arange(0, F.BLOCK_S)
    column = tl.arange(0, F.BLOCK_D)[None, :]
    top = tl.full((1,), NEG_INFINITY, dtype=tl.float32)
    if F.EXPONENTIAL:
        highest = tl.full((F.BLOCK_S,), NEG_INFINITY, dtype=tl.float32)
        for start in tl.range(0, splits, F.BLOCK_S):
            there = (start + s) * lines + line
            each = tl.load(tops + there, mask=start + s < splits, other=NEG_INFINITY)
            highest = tl.maximum(highest, each, propagate_nan=tl.PropagateNan.ALL)
        top = tl.maximum(top, tl.max(highest, 0))
    base = tl.where(top == NEG_INFINITY, 0.0, top)
    total = tl.zeros((F.BLOCK_S,), dtype=tl.float32)
    acc = tl.zeros((F.BLOCK_S, F.BLOCK_D), dtype=tl.float32)
    for start in tl.range(0, splits, F.BLOCK_S):
        there = (start + s) * lines + line
        inside = start + s < splits
        some = tl.load(totals + there, mask=inside, other=0.0)
        tile = tl.load(
            parts + there[:, None] * F.D + column,
            mask=inside[:, None] & (column < F.D),
            other=0.0,
        )
        if F.EXPONENTIAL:
            scale = tl.exp2(tl.load(tops + there, mask=inside, other=NEG_INFINITY) - base)
            some = some * scale
            tile = tile * scale[:, None]
        total += some
        acc += tile
    pooled = tl.sum(acc, 0)[None, :]
    whole = tl.sum(total, 0)[None]
    here = line + tl.arange(0, 1)
    share = finish_rows(top, whole, here, here >= 0, lse, kept, lines, F)
    store_rows(pooled, share, out, here * F.D, here >= 0, F.D)


@replay_launches
def attend_forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the log-sum-exp, and `kept`: top (in base 2) and 1 / total of each row.

    The arguments are those of `KernelCall`.
    """
    call = KernelCall(*round_query(given))
    out, lse, kept = allocate_outputs(call.query, call.key, call.value)
    if out.numel() == 0 or call.m == 0:
        empty = -math.inf if call.constexprs["EXPONENTIAL"] else 0.0
        return out.zero_(), lse.fill_(empty), kept.zero_()
    launch_pool(call, out, lse, kept)
    return out, lse, kept


@memoize("triton.hopper_module")
def _hopper_module(device: torch.device) -> Any:
    """Return the module `hopper`; None on other GPUs and for other versions of Gluon."""
    known = [3, 6] <= [int(x) for x in triton.__version__.split(".")[:2]] <= [3, 9]
    if not known or launch.is_interpreted() or device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None
    from qkv.engines.triton.forward import hopper

    return hopper


def launch_pool(call: KernelCall, out: Tensor, lse: Tensor, kept: Tensor) -> None:
    """Fill out, lse and kept."""
    if call.is_hard:
        best_value.take_best_values(call, out, lse, kept)
        return
    hopper = None if call.key_bias is None else _hopper_module(out.device)
    if hopper is not None and hopper.is_supported(call):
        hopper.launch_pool(call, out, lse, kept)
        return
    packed = call.n * call.group <= tile_choice.MAX_PACKED_ROWS and call.group > 1
    packed = packed and not call.constexprs["TANH"]
    rows = call.n * call.group if packed else call.n
    lanes = call.b * (call.hk if packed else call.h)

    def run_tile(tile: Tile) -> None:
        programs = lanes * -(-rows // tile.rows)
        splits, span = call.split_loop(programs, call.m, tile.cols, tile.waves)
        # Scores summed term by term are much code: read the width in chunks.
        wide = call.w > tile_choice.MAX_FORWARD_TILE_WIDTH or (
            call.w > 64 and call.constexprs["SCORES"] != call.constexprs["PRECISION"]
        )
        wide = wide or not call.has_product
        targets = (out, lse, kept)
        if splits > 1:
            shape = (splits, lanes * rows)
            targets = (
                call.allocate_buffer(*shape, call.d),
                call.allocate_buffer(*shape),
                call.allocate_buffer(*shape),
            )
        for own, at, counts, at_columns, more in call.tile_loops(tile, splits):
            facts = (
                call.pass_constexprs(own, wide, splits)
                | {"PACKED": packed, "FOLD": call.folds_scale, "TOPPED": call.has_tops}
                | more
            )
            if (
                call.float_mask_bytes and max(call.w, call.d) > 64
            ):  # a tile of the mask and wide rows do not fit
                facts |= {"QUICK": False, "FOLD": False}
            facts["LAID"] = facts["LAID"] and facts["QUICK"] and not packed
            if wide and packed:
                facts["TMA"] = False  # stacked rows are not contiguous
            others = (call.gate_key, call.pairs, call.layout, call.functions, *call.band)
            others = (*others, call.inputs.key_spans)
            added = call.constexprs["BIAS"] and call.weighting == "softmax"
            if wide and facts["CUT"] and added and all(x is None for x in others):
                # A bias of −∞ beyond the last key, where TMA loads 0, needs only one loop.
                cut = call.lengths is not None or not facts["TMA"]
                facts |= {"ENDED": True, "CUT": cut}
            facts |= call.exact_tile_constexprs(facts, "COLS")
            sizes = call.build_sizes(
                heads=lanes // call.b, rows_n=rows, at_columns=at_columns, splits=splits, span=span
            )
            if call.d != facts["BLOCK_D"]:  # values that do not fill their tile
                sizes = NARROW_SIZES[type(sizes)](*sizes)
            grid = lanes * -(-rows // own.rows) * splits
            call.launch_kernel(pool_kernel, grid, (at, counts, *targets), out, (sizes,), facts, own)
        if splits > 1:
            names = ("D", "BLOCK_D", "WEIGHTING", "EXPONENTIAL", "APART")
            joined = {name: facts[name] for name in names}
            joined["BLOCK_S"] = max(16, min(64, 8192 // joined["BLOCK_D"]))
            parts = (*targets, out, lse, kept)
            launch.launch_kernel(
                merge_kernel, lanes * rows, parts, (), (lanes * rows, splits), joined,
                Tile(1, 1, 1, 4, 2),
            )  # fmt: skip

    # In float32 a tile of few rows also takes less time to compute and to compile.
    few = lanes < launch.count_processors(out.device) or call.query.element_size() == 4
    few = few and rows <= tile_choice.MAX_PACKED_ROWS
    name = "split" if few else "pool"
    call.run_with_fitting_tile(name, call.choose_tile(name, rows), run_tile)


def allocate_outputs(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty arrays for the results of `attend_forward`."""
    rows = query.shape[:3]
    dtype = query.dtype if value.element_size() == 1 else value.dtype
    out = query.new_empty((*rows, value.shape[3]), dtype=dtype)
    return out, workspace.allocate_buffer(query, rows), workspace.allocate_buffer(query, (2, *rows))
