"""The gradients of `forward`, in tiles: `to_keys` and `to_queries` are its two halves, and `inner`
is what both need of each row first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton import launch
from qkv.engines.triton.arguments import ARRAYS, Arguments, Arrays
from qkv.engines.triton.launch import Tile
from qkv.engines.triton.score import gate_half, left_over, pull_gate, score
from qkv.engines.triton.tiles import (  # fmt: skip
    LN2,
    LOG2E,
    alive,
    bounds,
    described,
    fetch,
    finite,
    kept_share,
    launched,
    length_of,
    listed,
    portion,
    products,
    row_hash,
    rows_at,
    ruled,
)
from qkv.engines.triton.weigh import slope, weigh

SCRATCH = 64 * 2**20
"""Bytes of score gradients held at once where φ is too wide to be summed on chip."""


@launched
def inner(
    along, out, along_lse, centre, lines,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """centre = Σ ∂L/∂out · out − ∂L/∂lse, each row by itself."""
    line = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)[None, :]
    where = line[:, None] * D + column
    mask = (line < lines)[:, None] & (column < D)
    x = tl.load(along + where, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(out + where, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(x * y, 1)
    if along_lse is not None:
        total -= tl.load(along_lse + line, mask=line < lines, other=0.0)
    tl.store(centre + line, total, mask=line < lines)


@triton.jit
def known(
    kept, centre, row_a, row_b, gate_query, line, lines, WEIGHTING, GATE, APART, CENTRED, FAST
):
    """What the way back needs of the rows: top, share, centre, thresholds, gate."""
    zero = line.to(tl.float32) * 0.0
    top = zero
    share = zero
    middle = zero
    first_a = zero
    first_b = zero
    a = zero
    if WEIGHTING == "softmax" or WEIGHTING == "topk":
        top = tl.load(kept + line)
        if APART:
            share = tl.load(kept + lines + line)
    if WEIGHTING == "normalized" or WEIGHTING == "average":
        share = tl.load(kept + lines + line)
    if CENTRED:
        middle = tl.load(centre + line)
    if WEIGHTING == "entmax" or WEIGHTING == "topk":
        first_a = tl.load(row_a + line)
    if WEIGHTING == "topk":
        first_b = tl.load(row_b + line)
    if GATE:
        a = gate_half(tl.load(gate_query + line), FAST)
    return top, share, middle, first_a, first_b, a


@triton.jit
def keys_tiles(
    state, keys, queries, rows, mask, numbers, lo, hi, g,
    ROWS: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr, WEIGHTING: tl.constexpr,
    POWER: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr, LAYOUT: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr, APART: tl.constexpr, CENTRED: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, PAIRS: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys after tiles lo … hi of one head's queries."""
    dk, dv, dbias, dgate = state
    key, k, k_offset, v, j, added, b = keys
    query, q_n, along, at, ds_out, ds_line, ds_columns, stored = queries
    kept, centre, row_a, row_b, gate_query, lines, head_line, head_at, j_at, seed, lane = rows
    n, _, end, lower, upper, layout, size, columns, pairs, p_n = mask
    scale, alpha, times, dropped, kept_scale, hashed = numbers
    COLS: tl.constexpr = v.shape[0]
    RULED: tl.constexpr = MASKED or PAIRS > 0
    near = tl.arange(0, ROWS)
    for t in tl.range(lo, hi):
        if LAYOUT:
            start = tl.load(at + t) * ROWS
        else:
            start = t * ROWS
        i = (start + near)[None, :]
        here = near
        live = i
        if MASKED:
            here = tl.minimum(near, n - 1 - start)
            live = alive(i, j, n, end, lower, upper, layout, size, columns, LOWER, UPPER, LAYOUT)
        extra = i
        if PAIRS:
            place = pairs + head_at + start * tl.cast(p_n, tl.int64)
            extra, live = ruled(live, place, j_at + here[None, :] * p_n, times, PAIRS, MASKED)
        keep = i
        if DROP:
            keep = kept_share(row_hash(seed, lane, i, hashed), j, dropped, kept_scale)
        line = head_line + start + here
        top, share, middle, first_a, first_b, a = known(
            kept, centre, row_a, row_b, gate_query, line, lines,
            WEIGHTING, GATE, APART, CENTRED, FAST,
        )  # fmt: skip
        do = rows_at(along, start, D, here, D, BLOCK_D, TMA)
        if WEIGHTING == "average":
            p, lean = weigh(
                i, j, live, 0.0, share[None, :], first_a, first_b, alpha,
                WEIGHTING, POWER, APART, FAST, RULED,
            )  # fmt: skip
            if DROP:
                p = p * keep
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        else:
            if WIDE:
                there = query + start * q_n
                x = products(
                    key, k_offset, there, here * q_n, COLS, ROWS, W, BLOCK_W, PRECISION
                )  # fmt: skip
            else:
                q = rows_at(query, start, q_n, here, W, BLOCK_W, TMA)
                x = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            s, steep = score(x, scale, added, a[None, :], b, BIAS, GATE, FAST)
            gated = s
            if PAIRS == 2:
                s = s + extra
            p, lean = weigh(
                s, j, live, top[None, :], share[None, :], first_a[None, :], first_b[None, :], alpha,
                WEIGHTING, POWER, APART, FAST, RULED,
            )  # fmt: skip
            given = p
            if DROP:
                given = p * keep
            dv = tl.dot(given.to(do.dtype), do, dv, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            if DROP:
                dp = dp * keep
            ds = slope(p, lean, dp, middle[None, :], share[None, :], WEIGHTING)
            if RULED:
                ds = tl.where(live, ds, 0.0)
            if GATE:
                logit, ds = pull_gate(ds, gated, steep, scale, BIAS)
                if RULED:
                    logit = tl.where(live, logit, 0.0)
                dgate += tl.sum(logit, 1)
                if RULED:
                    ds = tl.where(live, ds, 0.0)
            if BIAS:
                dbias += tl.sum(ds, 1)
            if WIDE:
                spot = ds_out + ds_line[:, None] * ds_columns + (g * n + start + near)[None, :]
                kept_pairs = stored[:, None] & (i < n)
                ds = (ds * left_over(scale, WEIGHTING, BIAS, GATE)).to(ds_out.dtype.element_ty)
                tl.store(spot, ds, mask=kept_pairs)
            else:
                if RULED:
                    q = tl.where(finite(q), q, 0.0)
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv, dbias, dgate


@launched
def to_keys(
    query, key, value, bias, gate_query, gate_key, row_a, row_b, lengths, layout, pairs, seed,
    at, counts, along, centre, kept, dkey, dvalue, dbias, dgate, ds,
    scale, alpha, times, kept_scale,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, bias_b, bias_h, gate_b, gate_h,
    p_b, p_h, p_n, p_m,
    n, m, heads, group, lines, lower, upper, size, columns, dropped, hashed, at_columns, splits,
    span, first_pair, first_key, keys_n, parts_lines,
    W: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr,
    WEIGHTING: tl.constexpr, POWER: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
    CUT: tl.constexpr, UNEVEN: tl.constexpr, APART: tl.constexpr, CENTRED: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and its values, from every query of the group.

    `heads` are the key's. With WIDE the gradient of φ·ψ is written to `ds` (pairs, keys,
    group · n) for a matrix product, and `dkey` is left alone. With SPLIT the queries are shared
    out, and each part is written by itself, as float32.
    """
    BIAS: tl.constexpr = bias is not None
    GATE: tl.constexpr = gate_key is not None
    LAYOUT: tl.constexpr = layout is not None
    DROP: tl.constexpr = seed is not None
    pid = tl.program_id(0)
    tiles = (keys_n + COLS - 1) // COLS
    part = 0
    if SPLIT:
        part = pid % splits
        pid = pid // splits
    if PAIRS:  # heads side by side read one piece of the mask's array
        count = tl.num_programs(0) // (tiles * splits)
        tile = pid // count + first_key // COLS
        pair = pid % count + first_pair
    else:
        tile = pid % tiles + first_key // COLS
        pair = pid // tiles + first_pair
    batch = tl.cast(pair // heads, tl.int64)
    head = tl.cast(pair % heads, tl.int64)
    first = tile * COLS
    near = tl.arange(0, COLS)
    stored = (first + near < m) & (first + near < first_key + keys_n)
    here = tl.minimum(near, m - 1 - first)
    step = tl.cast(k_m, tl.int64)
    key += batch * k_b + head * k_h + first * step
    k_offset = here * k_m
    value += batch * v_b + head * v_h + first * tl.cast(v_m, tl.int64)
    end = length_of(lengths, batch, m)
    v = fetch(value, here * v_m, D, BLOCK_D)
    j = (first + near)[:, None]
    k = j
    if not WIDE and WEIGHTING != "average":
        k = fetch(key, k_offset, W, BLOCK_W)
    added = j
    if BIAS:
        added = tl.load(bias + batch * bias_b + head * bias_h + first + here)[:, None]
        if WEIGHTING == "softmax":
            added = added * LOG2E
    b = j
    if GATE:
        b = tl.load(gate_key + batch * gate_b + head * gate_h + first + here)
        b = gate_half(b, FAST)[:, None]
    if LAYOUT:
        at += tl.cast(tile, tl.int64) * at_columns
        lo, inner_lo, inner_hi, hi = listed(counts, tile, lengths)
    else:
        last = tl.minimum(first + COLS, end) - 1
        lo, inner_lo, inner_hi, hi = bounds(first, last, -upper, -lower, n, ROWS, UPPER, LOWER)
        if CUT:
            if first + COLS > end:
                inner_lo = hi
                inner_hi = hi
            if first >= end:
                lo = hi
    if SPLIT:
        lo, inner_lo, inner_hi, hi = portion((lo, inner_lo, inner_hi, hi), part, span)
    HELD: tl.constexpr = 16 if WIDE else BLOCK_W
    state = (
        tl.zeros((COLS, HELD), dtype=tl.float32),
        tl.zeros((COLS, BLOCK_D), dtype=tl.float32),
        tl.zeros((COLS,), dtype=tl.float32),
        tl.zeros((COLS,), dtype=tl.float32),
    )
    keys = (key, k, k_offset, v, j, added, b)
    mask = (n, m, end, lower, upper, layout, size, columns, pairs, p_n)
    numbers = (scale, alpha, times, dropped, kept_scale, hashed)
    ds_line = tl.cast(pair - first_pair, tl.int64) * keys_n + (first - first_key) + near
    ds_columns = tl.cast(group, tl.int64) * n
    lines = tl.cast(lines, tl.int64)
    q_step = tl.cast(q_n, tl.int64)
    for g in tl.range(0, group):
        query_head = batch * heads * group + head * group + g
        head_query = query + batch * q_b + (head * group + g) * q_h
        head_along = along + query_head * n * D
        queries = (
            described(head_query, n, q_step, W, ROWS, BLOCK_W, TMA),
            q_step,
            described(head_along, n, tl.cast(D, tl.int64), D, ROWS, BLOCK_D, TMA),
            at, ds, ds_line, ds_columns, stored,
        )  # fmt: skip
        head_at = batch * p_b + (head * group + g) * p_h + first * tl.cast(p_m, tl.int64)
        rows = (
            kept, centre, row_a, row_b, gate_query, lines, query_head * n, head_at,
            here[:, None] * p_m, seed, query_head,
        )  # fmt: skip
        if (UPPER or CUT) and not LAYOUT:
            state = keys_tiles(
                state, keys, queries, rows, mask, numbers, lo, inner_lo, g, ROWS, WIDE, True,
                WEIGHTING, POWER, BIAS, GATE, LOWER, UPPER, LAYOUT,
                W, D, BLOCK_W, BLOCK_D, APART, CENTRED, FAST, PRECISION, TMA, PAIRS, DROP,
            )  # fmt: skip
        state = keys_tiles(
            state, keys, queries, rows, mask, numbers, inner_lo, inner_hi, g, ROWS, WIDE, False,
            WEIGHTING, POWER, BIAS, GATE, LOWER, UPPER, LAYOUT,
            W, D, BLOCK_W, BLOCK_D, APART, CENTRED, FAST, PRECISION, TMA, PAIRS, DROP,
        )  # fmt: skip
        if LOWER or UNEVEN or LAYOUT:
            state = keys_tiles(
                state, keys, queries, rows, mask, numbers, inner_hi, hi, g, ROWS, WIDE, True,
                WEIGHTING, POWER, BIAS, GATE, LOWER, UPPER, LAYOUT,
                W, D, BLOCK_W, BLOCK_D, APART, CENTRED, FAST, PRECISION, TMA, PAIRS, DROP,
            )  # fmt: skip
    dk, dv, db, dg = state
    line = tl.cast(pair, tl.int64) * m + first + near
    if SPLIT:
        line += tl.cast(part, tl.int64) * parts_lines
    column = tl.arange(0, BLOCK_D)[None, :]
    where = dvalue + line[:, None] * D + column
    tl.store(where, dv.to(dvalue.dtype.element_ty), mask=stored[:, None] & (column < D))
    if WEIGHTING != "average":
        if not WIDE:
            dk = dk * left_over(scale, WEIGHTING, BIAS, GATE)
            column = tl.arange(0, BLOCK_W)[None, :]
            where = dkey + line[:, None] * W + column
            tl.store(where, dk.to(dkey.dtype.element_ty), mask=stored[:, None] & (column < W))
        if BIAS:
            tl.store(dbias + line, db, mask=stored)
        if GATE:
            if WEIGHTING == "softmax":
                dg = dg * LN2
            tl.store(dgate + line, dg, mask=stored)


@triton.jit
def queries_tiles(
    state, rows, keys, mask, numbers, lo, hi,
    COLS: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr, CENTRE: tl.constexpr,
    WEIGHTING: tl.constexpr, POWER: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, LAYOUT: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr, APART: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, PAIRS: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of queries after tiles lo … hi of the keys."""
    dq, one, two = state
    q, query, offset, i, do, top, share, middle, first_a, first_b, a, i_at, of_row = rows
    key, k_m, value, v_m, bias, gate_key, at = keys
    n, m, end, lower, upper, layout, size, columns, pairs, p_m = mask
    scale, alpha, times, dropped, kept_scale = numbers
    ROWS: tl.constexpr = do.shape[0]
    RULED: tl.constexpr = MASKED or PAIRS > 0
    near = tl.arange(0, COLS)
    for t in tl.range(lo, hi):
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
        if WIDE:
            x = products(
                query, offset, key + start * k_m, here * k_m, ROWS, COLS, W, BLOCK_W, PRECISION
            )
        else:
            k = rows_at(key, start, k_m, here, W, BLOCK_W, TMA)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        added = j
        if BIAS:
            added = tl.load(bias + start + here)[None, :]
            if WEIGHTING == "softmax":
                added = added * LOG2E
        b = j
        if GATE:
            b = gate_half(tl.load(gate_key + start + here), FAST)[None, :]
        s, steep = score(x, scale, added, a, b, BIAS, GATE, FAST)
        gated = s
        if PAIRS == 2:
            s = s + extra
        p, lean = weigh(
            s, j, live, top, share, first_a, first_b, alpha,
            WEIGHTING, POWER, APART, FAST, RULED,
        )  # fmt: skip
        v = rows_at(value, start, v_m, here, D, BLOCK_D, TMA)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if DROP:
            dp = dp * kept_share(of_row, j, dropped, kept_scale)
        if CENTRE:
            one += tl.sum(tl.where(lean == 0, 0.0, lean * dp), 1)
            two += tl.sum(lean, 1)
        else:
            ds = slope(p, lean, dp, middle, share, WEIGHTING)
            if RULED:
                ds = tl.where(live, ds, 0.0)
            if GATE:
                logit, ds = pull_gate(ds, gated, steep, scale, BIAS)
                if RULED:
                    logit = tl.where(live, logit, 0.0)
                one += tl.sum(logit, 1)
                if RULED:
                    ds = tl.where(live, ds, 0.0)
            if not WIDE:
                if RULED:
                    k = tl.where(finite(k), k, 0.0)
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, one, two


@launched
def to_queries(
    query, key, value, bias, gate_query, gate_key, row_a, row_b, lengths, layout, pairs, seed,
    at, counts, along, centre, kept, dquery, one_out, two_out, scale, alpha, times, kept_scale,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, bias_b, bias_h, gate_b, gate_h,
    p_b, p_h, p_n, p_m, o_b, o_h, o_n,
    n, m, heads, group, lines, lower, upper, size, columns, dropped, hashed, at_columns, splits,
    span,
    W: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr,
    CENTRE: tl.constexpr, WEIGHTING: tl.constexpr, POWER: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr, CUT: tl.constexpr, APART: tl.constexpr, CENTRED: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of queries and of their gate, which goes to `one_out`.

    With CENTRE instead the two sums of entmax's centre, Σ lean · ∂L/∂α and Σ lean. With WIDE
    the gradient of the query is not taken. `heads` are the query's.
    """
    BIAS: tl.constexpr = bias is not None
    GATE: tl.constexpr = gate_key is not None
    LAYOUT: tl.constexpr = layout is not None
    DROP: tl.constexpr = seed is not None
    pid = tl.program_id(0)
    tiles = (n + ROWS - 1) // ROWS
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
        tile = tiles - 1 - tile
    batch = tl.cast(lane // heads, tl.int64)
    head = tl.cast(lane % heads, tl.int64)
    pair_head = head // group
    first = tile * ROWS
    last = tl.minimum(first + ROWS, n) - 1
    near = tl.arange(0, ROWS)
    inside = first + near < n
    here = tl.minimum(near, n - 1 - first)
    query += batch * q_b + head * q_h + first * tl.cast(q_n, tl.int64)
    offset = here * q_n
    line = tl.cast(lane, tl.int64) * n + first + here
    lines = tl.cast(lines, tl.int64)
    key += batch * k_b + pair_head * k_h
    value += batch * v_b + pair_head * v_h
    if BIAS:
        bias += batch * bias_b + pair_head * bias_h
    if GATE:
        gate_key += batch * gate_b + pair_head * gate_h
    end = length_of(lengths, batch, m)
    top, share, middle, first_a, first_b, a = known(
        kept, centre, row_a, row_b, gate_query, line, lines, WEIGHTING, GATE, APART, CENTRED, FAST
    )
    i = (first + near)[:, None]
    i_at = i
    if PAIRS:
        pairs += batch * p_b + head * p_h + first * tl.cast(p_n, tl.int64)
        i_at = here[:, None] * p_n
    of_row = i
    if DROP:
        of_row = row_hash(seed, lane, i, hashed)
    q = i
    if not WIDE:
        q = fetch(query, offset, W, BLOCK_W)
    do = fetch(along, line * D, D, BLOCK_D)
    if LAYOUT:
        at += tl.cast(tile, tl.int64) * at_columns
        lo, inner_lo, inner_hi, hi = listed(counts, tile, lengths)
    else:
        lo, inner_lo, inner_hi, hi = bounds(first, last, lower, upper, end, COLS, LOWER, UPPER)
    if SPLIT:
        lo, inner_lo, inner_hi, hi = portion((lo, inner_lo, inner_hi, hi), part, span)
    HELD: tl.constexpr = 16 if (WIDE or CENTRE) else BLOCK_W
    state = (
        tl.zeros((ROWS, HELD), dtype=tl.float32),
        tl.zeros((ROWS,), dtype=tl.float32),
        tl.zeros((ROWS,), dtype=tl.float32),
    )
    rows = (
        q, query, offset, i, do, top[:, None], share[:, None], middle[:, None],
        first_a[:, None], first_b[:, None], a[:, None], i_at, of_row,
    )  # fmt: skip
    k_m = tl.cast(k_m, tl.int64)
    v_m = tl.cast(v_m, tl.int64)
    key = described(key, m, k_m, W, COLS, BLOCK_W, TMA)
    value = described(value, m, v_m, D, COLS, BLOCK_D, TMA)
    keys = (key, k_m, value, v_m, bias, gate_key, at)
    mask = (n, m, end, lower, upper, layout, size, columns, pairs, p_m)
    numbers = (scale, alpha, times, dropped, kept_scale)
    if LOWER and not LAYOUT:
        state = queries_tiles(
            state, rows, keys, mask, numbers, lo, inner_lo, COLS, WIDE, True, CENTRE,
            WEIGHTING, POWER, BIAS, GATE, LOWER, UPPER, LAYOUT,
            W, D, BLOCK_W, BLOCK_D, APART, FAST, PRECISION, TMA, PAIRS, DROP,
        )  # fmt: skip
    state = queries_tiles(
        state, rows, keys, mask, numbers, inner_lo, inner_hi, COLS, WIDE, False, CENTRE,
        WEIGHTING, POWER, BIAS, GATE, LOWER, UPPER, LAYOUT,
        W, D, BLOCK_W, BLOCK_D, APART, FAST, PRECISION, TMA, PAIRS, DROP,
    )  # fmt: skip
    if UPPER or CUT or LAYOUT:
        state = queries_tiles(
            state, rows, keys, mask, numbers, inner_hi, hi, COLS, WIDE, True, CENTRE,
            WEIGHTING, POWER, BIAS, GATE, LOWER, UPPER, LAYOUT,
            W, D, BLOCK_W, BLOCK_D, APART, FAST, PRECISION, TMA, PAIRS, DROP,
        )  # fmt: skip
    dq, one, two = state
    place = batch * o_b + head * o_h + (first + near) * tl.cast(o_n, tl.int64)
    if SPLIT:
        line += tl.cast(part, tl.int64) * lines
        place += part * lines * W
    if CENTRE:
        tl.store(one_out + line, one, mask=inside)
        tl.store(two_out + line, two, mask=inside)
    else:
        if GATE:
            if WEIGHTING == "softmax":
                one = one * LN2
            tl.store(one_out + line, one, mask=inside)
        if not WIDE:
            dq = dq * left_over(scale, WEIGHTING, BIAS, GATE)
            column = tl.arange(0, BLOCK_W)[None, :]
            where = dquery + place[:, None] + column
            tl.store(where, dq.to(dquery.dtype.element_ty), mask=inside[:, None] & (column < W))


@launched
def to_pairs(
    query, key, value, bias, gate_query, gate_key, row_a, row_b, lengths, layout, pairs, seed,
    along, centre, kept, dpairs, scale, alpha, times, kept_scale,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, bias_b, bias_h, gate_b, gate_h,
    p_b, p_h, p_n, p_m, o_b, o_h, o_n, o_m,
    n, m, heads, group, lines, lower, upper, size, columns, dropped, hashed, splits, span,
    rows_own, keys_own, lanes_own, batches_own, heads_own,
    W: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr, WEIGHTING: tl.constexpr,
    POWER: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, APART: tl.constexpr,
    CENTRED: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of a mask's array, from all batches and heads that share it.

    Where its rows or keys are shared too (`rows_own` or `keys_own` is 1), their tiles are looped
    over as well. A program has `span` of these steps, and of `splits` each writes a part by itself.
    """
    BIAS: tl.constexpr = bias is not None
    GATE: tl.constexpr = gate_key is not None
    LAYOUT: tl.constexpr = layout is not None
    DROP: tl.constexpr = seed is not None
    tiles_i = (n + ROWS - 1) // ROWS
    tiles_j = (m + COLS - 1) // COLS
    own_i = tl.where(rows_own > 1, tiles_i, 1)
    own_j = tl.where(keys_own > 1, tiles_j, 1)
    pid = tl.program_id(0)
    part = pid % splits
    pid = pid // splits
    tile_j = pid % own_j
    pid = pid // own_j
    tile_i = pid % own_i
    lane_own = pid // own_i
    loops_i = tiles_i // own_i
    loops_j = tiles_j // own_j
    others = batches_own * heads_own  # lanes that share the array's lane
    steps = others * loops_i * loops_j
    lines = tl.cast(lines, tl.int64)
    near_i = tl.arange(0, ROWS)
    near_j = tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    offset = near_i[:, None] * p_n + near_j[None, :] * p_m
    own_heads = heads // heads_own
    if ONCE:  # all that share the tile look at one and the same
        i = (tile_i * ROWS + near_i)[:, None]
        j = (tile_j * COLS + near_j)[None, :]
        inside = alive(i, j, n, m, lower, upper, layout, size, columns, LOWER, UPPER, LAYOUT)
        place = pairs + tl.cast(lane_own // own_heads, tl.int64) * p_b
        place += tl.cast(lane_own % own_heads, tl.int64) * p_h
        place += tile_i * ROWS * tl.cast(p_n, tl.int64) + tile_j * COLS * tl.cast(p_m, tl.int64)
        own_extra, own_live = ruled(inside, place, offset, times, PAIRS, True)
    for step in tl.range(part * span, tl.minimum(part * span + span, steps)):
        at_j = (tile_j + step % loops_j) * COLS
        at_i = (tile_i + step // loops_j % loops_i) * ROWS
        other = step // (loops_j * loops_i)
        batch = tl.cast(lane_own // own_heads * batches_own + other // heads_own, tl.int64)
        head = tl.cast(lane_own % own_heads * heads_own + other % heads_own, tl.int64)
        shared = head // group
        here_i = tl.minimum(near_i, n - 1 - at_i)
        here_j = tl.minimum(near_j, m - 1 - at_j)
        i = (at_i + near_i)[:, None]
        j = (at_j + near_j)[None, :]
        if ONCE:
            extra = own_extra
            live = own_live
            if lengths is not None:
                live = live & (j < length_of(lengths, batch, m))
        else:
            end = length_of(lengths, batch, m)
            live = alive(i, j, n, end, lower, upper, layout, size, columns, LOWER, UPPER, LAYOUT)
            place = pairs + batch * p_b + head * p_h
            place += at_i * tl.cast(p_n, tl.int64) + at_j * tl.cast(p_m, tl.int64)
            extra, live = ruled(live, place, offset, times, PAIRS, True)
        line = (batch * heads + head) * n + at_i + here_i
        top, share, middle, first_a, first_b, a = known(
            kept, centre, row_a, row_b, gate_query, line, lines, WEIGHTING, GATE, APART, CENTRED,
            FAST,
        )  # fmt: skip
        some_query = query + batch * q_b + head * q_h + at_i * tl.cast(q_n, tl.int64)
        some_key = key + batch * k_b + shared * k_h + at_j * tl.cast(k_m, tl.int64)
        some_along = along + ((batch * heads + head) * n + at_i) * D
        some_value = value + batch * v_b + shared * v_h + at_j * tl.cast(v_m, tl.int64)
        if WIDE:
            x = products(
                some_query, here_i * q_n, some_key, here_j * k_m, ROWS, COLS, W, BLOCK_W, PRECISION
            )
            dp = products(
                some_along, here_i * D, some_value, here_j * v_m, ROWS, COLS, D, BLOCK_W, PRECISION
            )
        else:
            q = fetch(some_query, here_i * q_n, W, BLOCK_W)
            k = fetch(some_key, here_j * k_m, W, BLOCK_W)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            do = fetch(some_along, here_i * D, D, BLOCK_D)
            v = fetch(some_value, here_j * v_m, D, BLOCK_D)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        added = j
        if BIAS:
            added = tl.load(bias + batch * bias_b + shared * bias_h + at_j + here_j)[None, :]
            if WEIGHTING == "softmax":
                added = added * LOG2E
        b = j
        if GATE:
            b = tl.load(gate_key + batch * gate_b + shared * gate_h + at_j + here_j)
            b = gate_half(b, FAST)[None, :]
        s, _ = score(x, scale, added, a[:, None], b, BIAS, GATE, FAST)
        p, lean = weigh(
            s + extra, j, live, top[:, None], share[:, None], first_a[:, None], first_b[:, None],
            alpha, WEIGHTING, POWER, APART, FAST, True,
        )  # fmt: skip
        if DROP:
            of_row = row_hash(seed, batch * heads + head, i, hashed)
            dp = dp * kept_share(of_row, j, dropped, kept_scale)
        ds = slope(p, lean, dp, middle[:, None], share[:, None], WEIGHTING)
        total += tl.where(live, ds, 0.0)
    factor = times
    if WEIGHTING == "softmax":
        factor = factor * LN2
    total = total * factor
    place = dpairs + tl.cast(part, tl.int64) * lanes_own * rows_own * keys_own
    place += tl.cast(lane_own // own_heads, tl.int64) * o_b
    place += tl.cast(lane_own % own_heads, tl.int64) * o_h
    row = tile_i * ROWS + near_i
    col = tile_j * COLS + near_j
    if rows_own == 1:
        if keys_own == 1:
            tl.store(place, tl.sum(tl.sum(total, 1), 0))
        else:
            tl.store(place + col * o_m, tl.sum(total, 0), mask=col < m)
    else:
        there = place + row * tl.cast(o_n, tl.int64)
        if keys_own == 1:
            tl.store(there, tl.sum(total, 1), mask=row < n)
        else:
            inside = (row < n)[:, None] & (col < m)[None, :]
            tl.store(there[:, None] + col[None, :] * o_m, total, mask=inside)


class _Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    key_bias: Tensor
    gate_query: Tensor
    gate_key: Tensor
    pairs: Tensor


def attend_backward(
    along: Tensor, along_lse: Tensor | None, out: Tensor, kept: Tensor, *rest: Any
) -> _Gradients:
    """Gradients of query, key, value, key_bias, gate_query, gate_key, pairs.

    After the results of `forward.attend` comes what that was given, and whether gradients are
    wanted for queries, for keys and for pairs. Where there is no such argument, or nobody wants the
    gradient, the array is empty.
    """
    *given, for_queries, for_keys, for_pairs = rest
    call = Arguments(*given)
    grads = _places(given, for_queries, for_keys, for_pairs)
    if out.numel() == 0 or call.m == 0:
        for x in grads:
            x.zero_()
        return grads
    along = along.contiguous()
    centred = call.weighting in ("softmax", "topk", "normalized", "entmax")
    call.facts = call.facts | {"CENTRED": centred}
    wide = call.w > launch.HELD_BACK or call.d > launch.HELD_BACK
    call.described = call.described and not wide
    centre = _centre(call, along, along_lse, out, kept, wide)
    if for_pairs and call.weighting != "average":
        _to_pairs(call, along, centre, kept, grads.pairs)
    if call.weighting == "average":
        for x in (*grads[:2], *grads[3:]):
            x.zero_()
        if for_keys:
            _to_keys(call, along, centre, kept, grads, False)
    elif wide:
        _through_scratch(call, along, centre, kept, grads, for_queries, for_keys)
        if for_queries and call.gate_query is not None:
            _to_queries(call, along, centre, kept, grads, True)
    else:
        if for_keys:
            _to_keys(call, along, centre, kept, grads, False)
        if for_queries:
            _to_queries(call, along, centre, kept, grads, False)
    return grads


def _places(given: Sequence[Any], for_queries: bool, for_keys: bool, for_pairs: bool) -> _Gradients:
    """Room for the gradients of these; none where there is no argument or no wish."""
    wishes = (for_queries, for_keys, for_keys, for_keys, for_queries, for_keys, for_pairs)
    arrays = Arrays(*given[:ARRAYS])
    learned = (*arrays[:6], arrays.pairs)
    return _Gradients(
        *(
            arrays.query.new_empty((0,)) if x is None or not wish else x.new_empty(x.shape)
            for x, wish in zip(learned, wishes, strict=True)
        )
    )


def fake(
    along: Tensor, along_lse: Tensor | None, out: Tensor, kept: Tensor, *rest: Any
) -> _Gradients:
    return _places(rest, *rest[-3:])


def _centre(
    call: Arguments, along: Tensor, along_lse: Tensor | None, out: Tensor, kept: Tensor, wide: bool
) -> Tensor | None:
    """c of ∂L/∂s = … (∂L/∂α − c), each row's own; None where the weighting has none."""
    if not call.facts["CENTRED"]:
        return None
    lines = call.b * call.h * call.n
    if call.weighting == "entmax":
        up, down = _to_queries(call, along, None, kept, None, wide)
        return up / torch.where(down == 0, 1.0, down)
    centre = call.new(lines)
    if call.weighting == "normalized":
        along_lse = None
    facts = {"D": call.d, "BLOCK_D": call.facts["BLOCK_D"], "ROWS": 64}
    arrays = (along, out, None if along_lse is None else along_lse.contiguous(), centre)
    launch.start(inner, -(-lines // 64), arrays, (), (lines,), facts, Tile(64, 1, 1, 4, 1))
    return centre


def _to_pairs(
    call: Arguments, along: Tensor, centre: Tensor | None, kept: Tensor, dpairs: Tensor
) -> None:
    """Fill the gradient of the mask's array, (B or 1, H or 1, n or 1, m or 1)."""
    batches, heads, rows, keys = dpairs.shape
    names = (
        "W", "D", "BLOCK_D", "WEIGHTING", "POWER", "LOWER", "UPPER", "APART", "CENTRED", "FAST",
        "PRECISION", "PAIRS",
    )  # fmt: skip

    def run(tile: Tile) -> None:
        tiles = -(-call.n // tile.rows), -(-call.m // tile.cols)
        own = [count if size > 1 else 1 for count, size in zip(tiles, (rows, keys), strict=True)]
        programs = batches * heads * own[0] * own[1]
        steps = call.b * call.h * tiles[0] * tiles[1] // programs
        room = launch.processors(dpairs.device) * tile.waves
        span = max(-(-steps * programs // room), min(steps, 4))
        splits = -(-steps // span)
        out = dpairs
        if splits > 1 or out.dtype != torch.float32 or not out.is_contiguous():
            out = call.new(splits, *dpairs.shape)
        facts = {name: call.facts[name] for name in names}
        wide = call.w > launch.HELD_BACK or call.d > launch.HELD_BACK or call.facts["APART"]
        facts |= {"BLOCK_W": call.block_w(tile, wide), "ROWS": tile.rows, "COLS": tile.cols}
        facts |= {"WIDE": wide, "ONCE": own == list(tiles)}
        arrays = (*call.inputs, along, centre, kept, out)
        whole = (
            *call.strides, *out.stride()[-4:], call.n, call.m, call.h, call.group,
            call.b * call.h * call.n, *call.bounds(splits, span), rows, keys, batches * heads,
            call.b // batches, call.h // heads,
        )  # fmt: skip
        launch.start(to_pairs, programs * splits, arrays, call.floats, whole, facts, tile)
        if out is not dpairs:
            dpairs.copy_(out.sum(0))

    call.fitting("to_pairs", call.n, run)


def _to_queries(
    call: Arguments,
    along: Tensor,
    centre: Tensor | None,
    kept: Tensor,
    grads: _Gradients | None,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """Fill the gradients of query and gate_query; with no place for them, the centre's sums."""
    lines = call.b * call.h * call.n
    one = two = kept

    def run(tile: Tile) -> None:
        nonlocal one, two
        programs = call.b * call.h * -(-call.n // tile.rows)
        splits, span = launch.parts(call.query.device, programs, call.m, tile.cols, tile.waves)
        one, two = call.new(splits, lines), call.new(splits, lines)
        dquery: Tensor | None = None
        if grads is not None and not wide:
            dquery = grads.query
            if splits > 1:
                dquery = call.new(splits * call.b, call.h, call.n, call.w)
        at, counts, at_columns = call.lists(tile)
        facts = call.known(tile, wide, splits) | {"CENTRE": grads is None}
        facts["CENTRED"] = facts["CENTRED"] and grads is not None
        arrays = (*call.inputs, at, counts, along, centre, kept, dquery, one, two)
        whole = (
            *call.strides, *((0, 0, 0) if dquery is None else dquery.stride()[:3]),
            call.n, call.m, call.h, call.group, lines,
            *call.bounds(at_columns, splits, span),
        )  # fmt: skip
        launch.start(to_queries, programs * splits, arrays, call.floats, whole, facts, tile)
        if dquery is not None and grads is not None and splits > 1:
            grads.query.copy_(dquery.view(splits, *grads.query.shape).sum(0))

    call.fitting("to_queries", call.n, run)
    if grads is not None:
        if call.gate_query is not None:
            grads.gate_query.copy_(one.sum(0).view(grads.gate_query.shape))
        return one, two
    return one.sum(0), two.sum(0)


def _to_keys(
    call: Arguments,
    along: Tensor,
    centre: Tensor | None,
    kept: Tensor,
    grads: _Gradients,
    wide: bool,
    pairs: tuple[int, int] | None = None,
    keys: tuple[int, int] | None = None,
    ds: Tensor | None = None,
) -> None:
    """Fill the gradients on the side of the keys; with `wide`, `ds` instead of the key's own.

    `pairs` and `keys` say which: the first, and how many.
    """
    first_pair, count = pairs or (0, call.b * call.hk)
    first_key, keys_n = keys or (0, call.m)
    lines = call.b * call.hk * call.m

    def run(tile: Tile) -> None:
        programs = count * -(-keys_n // tile.cols)
        splits, span = launch.parts(call.query.device, programs, call.n, tile.rows, tile.waves)
        at, counts, at_columns = call.lists(tile, by_key=True)
        targets = [grads.key, grads.value, grads.key_bias, grads.gate_key]
        if splits > 1:
            scored = call.weighting != "average"
            widths = (call.w, call.d, 1, 1)
            given = (not wide, True, call.key_bias is not None, call.gate_key is not None)
            given = (scored and given[0], True, scored and given[2], scored and given[3])
            targets = [
                call.new(splits, lines, width) if there else x
                for x, width, there in zip(targets, widths, given, strict=True)
            ]
        facts = call.known(tile, wide, splits) | {"UNEVEN": call.n % tile.rows != 0}
        arrays = (*call.inputs, at, counts, along, centre, kept, *targets, ds)
        whole = (
            *call.strides, call.n, call.m, call.hk, call.group, call.b * call.h * call.n,
            *call.bounds(at_columns, splits, span),
            first_pair, first_key, keys_n, lines,
        )  # fmt: skip
        launch.start(to_keys, programs * splits, arrays, call.floats, whole, facts, tile)
        if splits == 1:
            return
        places = (grads.key, grads.value, grads.key_bias, grads.gate_key)
        for place, part in zip(places, targets, strict=True):
            if part is place:
                continue
            part = part.view(splits, call.b * call.hk, call.m, -1)
            window = (slice(first_pair, first_pair + count), slice(first_key, first_key + keys_n))
            flat = place.view(call.b * call.hk, call.m, -1)
            flat[window] = part[:, *window].sum(0).to(place.dtype)

    call.fitting("to_keys", call.m, run)


def _through_scratch(
    call: Arguments,
    along: Tensor,
    centre: Tensor | None,
    kept: Tensor,
    grads: _Gradients,
    for_queries: bool,
    for_keys: bool,
) -> None:
    """∂L/∂φ = dS·ψ and ∂L/∂ψ = dSᵀ·φ by matrix products, of as many scores as SCRATCH holds."""
    pairs, wide_n = call.b * call.hk, call.group * call.n
    dtype, device = call.query.dtype, call.query.device
    room = SCRATCH // call.query.element_size()
    keys_n = call.m
    if wide_n * call.m > room:
        keys_n = max(room // wide_n // 256, 1) * 256
    count = max(min(room // (wide_n * min(keys_n, call.m)), pairs), 1)
    phi = call.query.reshape(pairs, wide_n, call.w)
    psi = call.key.reshape(pairs, call.m, call.w)
    whole = keys_n >= call.m
    target = grads if for_keys else _places(call.inputs, False, True, False)
    total: Tensor | None = None
    for pair in range(0, pairs, count):
        some = slice(pair, min(pair + count, pairs))
        size = some.stop - some.start
        if for_queries and not whole:
            total = torch.zeros((size, wide_n, call.w), dtype=torch.float32, device=device)
        for first in range(0, call.m, keys_n):
            span = slice(first, min(first + keys_n, call.m))
            width = span.stop - first
            make = torch.zeros if call.masked else torch.empty
            ds = make((size, width, wide_n), dtype=dtype, device=device)
            _to_keys(call, along, centre, kept, target, True, (pair, size), (first, width), ds)
            if for_keys:
                place = grads.key.view(pairs, call.m, call.w)[some, span]
                if whole:
                    torch.matmul(ds, _clean(call, phi[some]), out=place)
                else:
                    place.copy_(torch.matmul(ds, _clean(call, phi[some])))
            if for_queries:
                back, there = ds.transpose(1, 2), _clean(call, psi[some, span])
                place = grads.query.view(pairs, wide_n, call.w)[some]
                if total is None:
                    torch.matmul(back, there, out=place)
                else:
                    total += torch.matmul(back, there)
                del back
            del ds  # before the next is made
        if total is not None:
            grads.query.view(pairs, wide_n, call.w)[some] = total.to(dtype)


def _clean(call: Arguments, x: Tensor) -> Tensor:
    """x with 0 for what is not finite, since 0 · NaN would bring back what the mask ruled out."""
    return torch.where(torch.isfinite(x), x, 0.0) if call.masked else x
