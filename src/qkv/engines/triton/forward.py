"""out = Σⱼ α(s)ᵢⱼ vⱼ in tiles: `pool` does the sum, `merge` joins its parts if the keys were split.

No kernel uses atomics: a sum has one program.
"""

# One `if` is decided when compiling, the one inside it on the device.
# ruff: noqa: SIM102

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton import launch
from qkv.engines.triton.arguments import ARRAYS, Arguments, Numbers
from qkv.engines.triton.launch import Launch, Tile
from qkv.engines.triton.score import gate_half, score
from qkv.engines.triton.tiles import (  # fmt: skip
    INFINITY,
    LN2,
    LOG2E,
    NONE,
    add_carefully,
    alive,
    bounds,
    described,
    fetch,
    finite,
    kept_share,
    launched,
    launched_by_rows,
    length_of,
    listed,
    portion,
    products,
    products_described,
    row_hash,
    rows_at,
    ruled,
)
from qkv.engines.triton.weigh import chosen, weigh


@triton.jit
def pool_tiles(
    state, rows, keys, mask, numbers, lo, hi,
    COLS: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr,
    SPARSE: tl.constexpr, WEIGHTING: tl.constexpr, POWER: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, FOLD: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
    LAYOUT: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    PAIRS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """The state of the rows after tiles lo … hi of the keys: pooled values, top, total."""
    acc, top, total = state
    q, query, offset, i, a, row_a, row_b, i_at, of_row = rows
    key, k_m, value, v_m, bias, gate_key, at = keys
    n, m, end, lower, upper, layout, size, columns, pairs, p_m = mask
    scale, alpha, times, dropped, share = numbers
    ROWS: tl.constexpr = acc.shape[0]
    RULED: tl.constexpr = MASKED or PAIRS > 0
    near = tl.arange(0, COLS)
    # As one loop with that over the chunks, so that the next tile is on its way meanwhile.
    FLAT: tl.constexpr = WIDE and TMA
    for t in tl.range(lo, hi, flatten=FLAT):
        if LAYOUT:
            start = tl.load(at + t) * COLS
        else:
            start = t * COLS
        j = (start + near)[None, :]
        here = near
        live = j
        if MASKED:
            here = tl.minimum(near, m - 1 - start)
            live = alive(i, j, n, end, lower, upper, layout, size, columns, LOWER, UPPER, LAYOUT)
        extra = j
        if PAIRS:
            place = pairs + start * tl.cast(p_m, tl.int64)
            extra, live = ruled(live, place, i_at + near[None, :] * p_m, times, PAIRS, MASKED)
        if WEIGHTING == "average":
            p = live.to(tl.float32) if RULED else tl.full((ROWS, COLS), 1.0, tl.float32)
            total += tl.sum(p, 1)
        else:
            if FLAT:
                x = products_described(query, 0, key, start, ROWS, COLS, W, BLOCK_W, PRECISION)
            elif WIDE:
                x = products(
                    query, offset, key + start * k_m, here * k_m, ROWS, COLS, W, BLOCK_W, PRECISION
                )
            else:
                k = rows_at(key, start, k_m, here, W, BLOCK_W, TMA)
                x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if FOLD:
                s = tl.where(live, x, NONE) if RULED else x
                new = tl.maximum(top, tl.max(s, 1) * scale)
                base = tl.where(new == NONE, 0.0, new)
                p = tl.exp2(s * scale - base[:, None])
            else:
                added = j
                if BIAS:
                    added = tl.load(bias + start + here)[None, :]
                    if WEIGHTING == "softmax":
                        added = added * LOG2E
                b = j
                if GATE:
                    b = gate_half(tl.load(gate_key + start + here), FAST)[None, :]
                s, _ = score(x, scale, added, a, b, BIAS, GATE, FAST)
                if PAIRS == 2:
                    s = s + extra
                if WEIGHTING == "softmax" or WEIGHTING == "topk":
                    if WEIGHTING == "topk":
                        s = tl.where(chosen(s, j, row_a, row_b), s * LOG2E, NONE)
                    if RULED:
                        s = tl.where(live, s, NONE)
                    new = tl.maximum(top, tl.max(s, 1))
                    base = tl.where(new == NONE, 0.0, new)
                    p = tl.exp2(s - base[:, None])
                else:
                    p, _ = weigh(
                        s, j, live, 0.0, 1.0, row_a, row_b, alpha,
                        WEIGHTING, POWER, False, FAST, RULED,
                    )  # fmt: skip
            if WEIGHTING == "softmax" or WEIGHTING == "topk":
                fade = tl.exp2(top - base)
                total = total * fade + tl.sum(p, 1)
                acc = acc * fade[:, None]
                top = new
            elif WEIGHTING == "normalized":
                total += tl.sum(p, 1)
        if DROP:
            p = p * kept_share(of_row, j, dropped, share)
        v = rows_at(value, start, v_m, here, D, BLOCK_D, TMA)
        if CAREFUL and SPARSE:
            acc = add_carefully(acc, p, v, p != 0, PRECISION)
        elif CAREFUL:
            acc = add_carefully(acc, p, v, live | (p != p), PRECISION)
        else:
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, top, total


@launched
def pool(
    query, key, value, bias, gate_query, gate_key, row_a, row_b, lengths, layout,
    pairs, seed, at, counts, out, lse, kept, scale, alpha, times, share,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, bias_b, bias_h, gate_b, gate_h,
    p_b, p_h, p_n, p_m, o_b, o_h, o_n,
    n, m, heads, group, rows_n, lower, upper, size, columns, dropped, hashed, at_columns, splits,
    span,
    W: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr,
    PACKED: tl.constexpr, WEIGHTING: tl.constexpr, POWER: tl.constexpr, FOLD: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, CUT: tl.constexpr, APART: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The output and log-sum-exp of one tile of queries; with SPLIT, of one part of the keys.

    `heads` are the query's, or with PACKED the key's, whose group is then stacked in the rows:
    row r is the query r mod n of head r div n. A part goes to `out` (splits, …) unfinished, with
    its top in `lse` and its total in `kept`.
    """
    BIAS: tl.constexpr = bias is not None
    GATE: tl.constexpr = gate_key is not None
    LAYOUT: tl.constexpr = layout is not None
    DROP: tl.constexpr = seed is not None
    pid = tl.program_id(0)
    tiles = (rows_n + ROWS - 1) // ROWS
    part = 0
    if SPLIT:
        part = pid % splits
        pid = pid // splits
    if PAIRS:  # heads side by side read one piece of the mask's array
        lanes = tl.num_programs(0) // (tiles * splits)
        tile = pid // lanes
        lane = pid % lanes
    else:
        tile = pid % tiles
        lane = pid // tiles
    if UPPER:
        tile = tiles - 1 - tile  # a causal mask's longest rows first
    batch = tl.cast(lane // heads, tl.int64)
    head = lane % heads
    r = tile * ROWS + tl.arange(0, ROWS)
    inside = r < rows_n
    r = tl.minimum(r, rows_n - 1)
    if PACKED:
        pos = r % n
        offset = (r // n) * tl.cast(q_h, tl.int64) + pos * q_n
        query += batch * q_b + tl.cast(head * group, tl.int64) * q_h
        first = 0
        last = n - 1
        pair_head = head
        place = (head * group + r // n) * tl.cast(o_h, tl.int64)
    else:
        pos = r
        first = tile * ROWS
        last = tl.minimum(first + ROWS, n) - 1
        query += batch * q_b + tl.cast(head, tl.int64) * q_h + tl.cast(first, tl.int64) * q_n
        offset = (pos - first) * q_n
        pair_head = head // group
        place = head * tl.cast(o_h, tl.int64)
    place += batch * o_b + pos * tl.cast(o_n, tl.int64)
    # Rows of lse and its like: those of a pair's group follow each other.
    line = tl.cast(lane, tl.int64) * rows_n + r
    i_at = pos[:, None]
    of_row = pos[:, None]
    if DROP:
        if PACKED:
            of_row = row_hash(seed, lane * group + r // n, pos, hashed)[:, None]
        else:
            of_row = row_hash(seed, lane, pos, hashed)[:, None]
    if PAIRS:
        if PACKED:
            pairs += batch * p_b + tl.cast(head * group, tl.int64) * p_h
            i_at = ((r // n) * tl.cast(p_h, tl.int64) + pos * p_n)[:, None]
        else:
            pairs += batch * p_b + head * tl.cast(p_h, tl.int64) + first * tl.cast(p_n, tl.int64)
            i_at = ((pos - first) * p_n)[:, None]
    pair_head = tl.cast(pair_head, tl.int64)
    key += batch * k_b + pair_head * k_h
    value += batch * v_b + pair_head * v_h
    if BIAS:
        bias += batch * bias_b + pair_head * bias_h
    end = length_of(lengths, batch, m)
    i = pos[:, None]
    a = i
    if GATE:
        gate_key += batch * gate_b + pair_head * gate_h
        a = gate_half(tl.load(gate_query + line), FAST)[:, None]
    first_a = i
    first_b = i
    if WEIGHTING == "entmax" or WEIGHTING == "topk":
        first_a = tl.load(row_a + line)[:, None]
    if WEIGHTING == "topk":
        first_b = tl.load(row_b + line)[:, None]
    q = i
    if not WIDE and WEIGHTING != "average":
        q = fetch(query, offset, W, BLOCK_W)
    if LAYOUT:
        at += tl.cast(tile, tl.int64) * at_columns
        lo, inner_lo, inner_hi, hi = listed(counts, tile, lengths)
    else:
        lo, inner_lo, inner_hi, hi = bounds(first, last, lower, upper, end, COLS, LOWER, UPPER)
    if SPLIT:
        lo, inner_lo, inner_hi, hi = portion((lo, inner_lo, inner_hi, hi), part, span)
    fresh = (
        tl.zeros((ROWS, BLOCK_D), dtype=tl.float32),
        tl.full((ROWS,), NONE, dtype=tl.float32),
        tl.zeros((ROWS,), dtype=tl.float32),
    )
    FLAT: tl.constexpr = WIDE and TMA
    query = described(query, n - first, tl.cast(q_n, tl.int64), W, ROWS, BLOCK_W, FLAT)
    rows = (q, query, offset, i, a, first_a, first_b, i_at, of_row)
    k_m = tl.cast(k_m, tl.int64)
    v_m = tl.cast(v_m, tl.int64)
    key = described(key, m, k_m, W, COLS, BLOCK_W, TMA)
    value = described(value, m, v_m, D, COLS, BLOCK_D, TMA)
    keys = (key, k_m, value, v_m, bias, gate_key, at)
    mask = (n, m, end, lower, upper, layout, size, columns, pairs, p_m)
    numbers = (scale, alpha, times, dropped, share)
    SPARSE: tl.constexpr = (
        WEIGHTING == "normalized"
        or WEIGHTING == "raw"
        or WEIGHTING == "entmax"
        or WEIGHTING == "topk"
    )
    state = fresh
    if LOWER and not LAYOUT:
        state = pool_tiles(
            state, rows, keys, mask, numbers, lo, inner_lo, COLS, WIDE, True, False, SPARSE,
            WEIGHTING, POWER, BIAS, GATE, FOLD, LOWER, UPPER, LAYOUT,
            W, D, BLOCK_W, BLOCK_D, FAST, PRECISION, TMA, PAIRS, DROP,
        )  # fmt: skip
    state = pool_tiles(
        state, rows, keys, mask, numbers, inner_lo, inner_hi, COLS, WIDE, False, False, SPARSE,
        WEIGHTING, POWER, BIAS, GATE, FOLD, LOWER, UPPER, LAYOUT,
        W, D, BLOCK_W, BLOCK_D, FAST, PRECISION, TMA, PAIRS, DROP,
    )  # fmt: skip
    if UPPER or CUT or LAYOUT:
        state = pool_tiles(
            state, rows, keys, mask, numbers, inner_hi, hi, COLS, WIDE, True, False, SPARSE,
            WEIGHTING, POWER, BIAS, GATE, FOLD, LOWER, UPPER, LAYOUT,
            W, D, BLOCK_W, BLOCK_D, FAST, PRECISION, TMA, PAIRS, DROP,
        )  # fmt: skip
    acc, top, total = state
    if LOWER or UPPER or CUT or LAYOUT or PAIRS or SPARSE:
        # A value that does not count was multiplied by 0. If the sum is not finite, that value
        # may be why: do it again and look at each.
        if tl.max(tl.max((finite(acc) == 0).to(tl.int32), 1), 0) > 0:
            acc, top, total = pool_tiles(
                fresh, rows, keys, mask, numbers, lo, hi, COLS, WIDE, True, True, SPARSE,
                WEIGHTING, POWER, BIAS, GATE, FOLD, LOWER, UPPER, LAYOUT,
                W, D, BLOCK_W, BLOCK_D, FAST, PRECISION, TMA, PAIRS, DROP,
            )  # fmt: skip
    column = tl.arange(0, BLOCK_D)[None, :]
    if SPLIT:
        lanes = tl.num_programs(0) // (tiles * splits)
        line += tl.cast(part, tl.int64) * lanes * rows_n
        tl.store(lse + line, top, mask=inside)
        tl.store(kept + line, total, mask=inside)
        tl.store(out + line[:, None] * D + column, acc, mask=inside[:, None] & (column < D))
    else:
        lines = tl.cast(tl.num_programs(0) // tiles, tl.int64) * rows_n
        finish(
            acc, top, total, line, place, inside, out, lse, kept, lines,
            D, BLOCK_D, WEIGHTING, APART,
        )  # fmt: skip


pool_narrow = launched_by_rows(pool.fn)
"""`pool` of values that do not fill their tile."""


@triton.jit
def finish(
    acc, top, total, line, place, inside, out, lse, kept, lines,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WEIGHTING: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Write the output, the log-sum-exp (or the total), and what the gradient needs of the row."""
    share = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
    summary = total
    if WEIGHTING == "softmax" or WEIGHTING == "topk":
        top = tl.where(top == NONE, 0.0, top)
        logarithm = tl.log2(tl.where(total == 0, 1.0, total))
        summary = tl.where(total == 0, NONE, (top + logarithm) * LN2)
        if not APART:
            # An empty row has weights of 2^(−∞).
            top = tl.where(total == 0, INFINITY, top + logarithm)
    else:
        top = total * 0.0
    if WEIGHTING != "raw" and WEIGHTING != "sigmoid" and WEIGHTING != "entmax":
        acc = acc * share[:, None]
    if lse is not None:
        tl.store(lse + line, summary, mask=inside)
    if kept is not None:
        tl.store(kept + line, top, mask=inside)
        tl.store(kept + lines + line, share, mask=inside)
    column = tl.arange(0, BLOCK_D)[None, :]
    where = out + place[:, None] + column
    tl.store(where, acc.to(out.dtype.element_ty), mask=inside[:, None] & (column < D))


@launched
def merge(
    parts, tops, totals, out, lse, kept, lines, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, WEIGHTING: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """One row's parts joined: each is scaled from its own top to the largest, and added."""
    line = tl.cast(tl.program_id(0), tl.int64)
    lines = tl.cast(lines, tl.int64)
    s = tl.arange(0, BLOCK_S)
    column = tl.arange(0, BLOCK_D)[None, :]
    top = tl.full((1,), NONE, dtype=tl.float32)
    EXPONENTIAL: tl.constexpr = WEIGHTING == "softmax" or WEIGHTING == "topk"
    if EXPONENTIAL:
        highest = tl.full((BLOCK_S,), NONE, dtype=tl.float32)
        for start in tl.range(0, splits, BLOCK_S):
            there = (start + s) * lines + line
            each = tl.load(tops + there, mask=start + s < splits, other=NONE)
            highest = tl.maximum(highest, each, propagate_nan=tl.PropagateNan.ALL)
        top = tl.maximum(top, tl.max(highest, 0))
    base = tl.where(top == NONE, 0.0, top)
    total = tl.zeros((BLOCK_S,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
    for start in tl.range(0, splits, BLOCK_S):
        there = (start + s) * lines + line
        inside = start + s < splits
        some = tl.load(totals + there, mask=inside, other=0.0)
        tile = tl.load(
            parts + there[:, None] * D + column,
            mask=inside[:, None] & (column < D),
            other=0.0,
        )
        if EXPONENTIAL:
            scale = tl.exp2(tl.load(tops + there, mask=inside, other=NONE) - base)
            some = some * scale
            tile = tile * scale[:, None]
        total += some
        acc += tile
    pooled = tl.sum(acc, 0)[None, :]
    whole = tl.sum(total, 0)[None]
    here = line + tl.arange(0, 1)
    finish(
        pooled, top, whole, here, here * D, here >= 0, out, lse, kept, lines,
        D, BLOCK_D, WEIGHTING, APART,
    )  # fmt: skip


def attend(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the log-sum-exp, and of each row its top (in base 2) and 1 / total.

    What is given is that of `Arguments`.
    """
    arrays, numbers = given[:ARRAYS], Numbers(*given[ARRAYS:])
    query, value, scale, weighting = arrays[0], arrays[2], numbers.scale, numbers.weighting
    rows = query.shape[:3]
    out = query.new_empty((*rows, value.shape[3]), dtype=value.dtype)
    lse = query.new_empty(rows, dtype=torch.float32)
    kept = query.new_empty((2, *rows), dtype=torch.float32)
    if out.numel() == 0 or value.shape[2] == 0:
        exponential = weighting in ("softmax", "topk")
        return out.zero_(), lse.fill_(-math.inf if exponential else 0.0), kept.zero_()
    about = (attend, *launch.kinds(*arrays), scale > 0, *numbers[1:])
    made = launch.MADE.get(about)
    if made is None or not made.again((*arrays, None, None, out, lse, kept), numbers.floats):
        call = Arguments(*given)
        made = _pool(call, out, lse, kept)
        launch.keep(about, None if call.copied else made)
    return out, lse, kept


def _pool(call: Arguments, out: Tensor, lse: Tensor, kept: Tensor) -> Launch | None:
    """Fill out, lse and kept; the launch, if it is one and none of its arrays are made for it."""
    packed = call.n * call.group <= launch.FEW and call.group > 1 and call.layout is None
    rows = call.n * call.group if packed else call.n
    lanes = call.b * (call.hk if packed else call.h)

    def run(tile: Tile) -> Launch | None:
        programs = lanes * -(-rows // tile.rows)
        splits, span = launch.parts(call.query.device, programs, call.m, tile.cols, tile.waves)
        wide = call.w > launch.HELD
        at, counts, at_columns = call.lists(tile)
        targets = (out, lse, kept)
        if splits > 1:
            shape = (splits, lanes * rows)
            targets = (call.new(*shape, call.d), call.new(*shape), call.new(*shape))
        facts = call.known(tile, wide, splits) | {"PACKED": packed, "FOLD": call.fold}
        if wide and packed:
            facts["TMA"] = False  # stacked rows do not follow each other
        arrays = (*call.inputs, at, counts, *targets)
        whole = (
            *call.strides, *out.stride()[:3],
            call.n, call.m, call.hk if packed else call.h, call.group, rows,
            *call.bounds(at_columns, splits, span),
        )  # fmt: skip
        kernel = pool if call.d == facts["BLOCK_D"] else pool_narrow
        made = launch.start(kernel, programs * splits, arrays, call.floats, whole, facts, tile)
        if splits > 1:
            joined = {name: facts[name] for name in ("D", "BLOCK_D", "WEIGHTING", "APART")}
            joined["BLOCK_S"] = max(16, min(64, 8192 // joined["BLOCK_D"]))
            parts = (*targets, out, lse, kept)
            launch.start(
                merge, lanes * rows, parts, (), (lanes * rows, splits), joined,
                Tile(1, 1, 1, 4, 2),
            )  # fmt: skip
        return made if splits == 1 and at is None else None

    few = lanes < launch.processors(out.device) and rows <= launch.FEW
    return call.fitting("split" if few else "pool", rows, run)


def fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    b, h, n, _ = query.shape
    rows = query.new_empty((b, h, n), dtype=torch.float32)
    kept = query.new_empty((2, b, h, n), dtype=torch.float32)
    return query.new_empty((b, h, n, value.shape[3]), dtype=value.dtype), rows, kept
