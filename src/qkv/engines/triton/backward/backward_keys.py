"""The kernel for the gradients of keys, values, key bias and key gate, in tiles."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from qkv.engines.triton.sparse.support_lists import LIST_TILE, has_list
from qkv.engines.triton.tile_functions import score_tile, tiles
from qkv.engines.triton.tile_functions.distance import (
    SUMMING_COLUMNS,
    add_column_gradients,
    add_row_sums,
    apply_distance_form,
    clear_column_sums,
    find_doubts,
    finish_product_gradient,
    leave_out_unsure,
    locate_columns,
    locate_terms,
    mark_doubts,
    next_doubts,
    product_factor,
    start_doubts,
    tiles_per_bit,
)
from qkv.engines.triton.tile_functions.program import (
    align_strides,
    compute_product,
    load_row_inputs,
    locate_program,
    tile_positions,
)
from qkv.engines.triton.tile_functions.tanh import (
    add_unit_gradients,
    clear_unit_sums,
    is_disabled,
    load_units,
    locate_side,
)
from qkv.engines.triton.tile_functions.tiles import LN2, jit_kernel

KeyTile = namedtuple(
    "KeyTile", "base offset held v j at bias b end stored line first width terms near"
)
"""A tile of keys, as rows.

- base, offset: pointer (or descriptor) of ψ and the offset of each row.
- held: ψ(k) (COLS, w) or a `tanh.UnitTile`. v: (COLS, d). width: columns of ψ.
- (COLS, 1) each: j position, at offset in the mask array, bias, b gate half.
- end: keys from here on do not count. stored: which keys are written. line: their rows in `ds`.
- first: the first key.
- terms, near: those of `records.QueryTile`.
"""


QueryRange = namedtuple(
    "QueryRange", "base step along line pairs lane member at top middle side terms source squares"
)
"""The queries of one head, as columns: pointers to φ, ∂L/∂out, the rows' statistics and the mask
array; the lane and the index in its group (member); the list of tiles (at); with LINED, descriptors
of top and centre; a `tanh.UnitSide`; and the terms of `records.KeyRange`."""


@triton.jit
def accumulate_key_gradients(
    state, own, head, call, z, lo, hi, F, MASKED: tl.constexpr, EXACT: tl.constexpr = 0
):
    """Return the gradients of a tile of keys after tiles lo … hi of one head's queries.

    `call` holds what all programs share, and the output of score gradients. EXACT is that of
    `forward.pool_tiles`.
    """
    dk, dv, dbias, dgate, doubts = state
    given, back, ds_out, scales, steps = call
    QUICK: tl.constexpr = F.QUICK and not MASKED
    RULED: tl.constexpr = MASKED or (F.PAIRS > 0 and not (F.QUICK or F.SKIPS_PAIRS))
    b = head.lane // z.hashed
    h = head.lane % z.hashed
    shift = 0
    if EXACT == 1:
        shift = tiles_per_bit(hi - lo)
    for t in tl.range(lo, hi, num_stages=1 if EXACT == 2 else None):
        start, near = tile_positions(t, head.at, F.ROWS, F)
        i = (start + near)[None, :]
        here = near
        live = i
        if MASKED:
            here = tl.minimum(near, z.n - 1 - start)
            live = tiles.live_pairs(i, own.j, own.end, given.layout, given.key_spans, z, F)
            live = tiles.apply_rule(live, b, h, i, own.j, given, z, F)
        extra = i
        if F.PAIRS and (MASKED or not F.SKIPS_PAIRS):
            if F.LAID:
                read = tl.trans(head.pairs.load([start, own.first]))  # (COLS, ROWS)
            elif F.ROW_PAIRS:  # one row for all queries
                read = tl.broadcast_to(tl.load(head.pairs + own.at), (F.COLS, F.ROWS))
            else:
                there = head.pairs + start * tl.cast(steps.p_n, tl.int64)
                there += own.at + here[None, :] * steps.p_n
                read = tl.load(there, mask=live, other=0) if MASKED else tl.load(there)
            extra, live = tiles.apply_mask_array(read, live, scales.times, F, MASKED, QUICK)
        keep = i
        if F.DROP:
            drawn = tiles.row_hash(given.seed, head.lane, i, z.hashed)
            keep = tiles.dropout_factor(drawn, own.j, z.dropped, scales.share)
        line = head.line + start + here
        if F.LINED:
            spot = (head.line + start).to(tl.int32)
            top = head.top.load([spot])
            middle = head.middle.load([spot])
            share = top
        else:
            top, share, middle = score_tile.load_row_statistics(back, line, F)
        row_a, row_b, a, cap = load_row_inputs(given, line, F)
        if not F.ALONG:
            do = tiles.load_row_tile(
                head.along, start, F.D, here, F.D, F.BLOCK_D, F.TMA
            )  # (ROWS, d)
        if F.WEIGHTING == "average":
            p, lean = score_tile.tile_weights(
                i, own.j, live, 0.0, share[None, :], row_a, row_b, scales.alpha, F, RULED
            )
            if F.DROP:
                p = p * keep
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=F.PRECISION)
        else:
            x, q = compute_product(own, head, start, here, F)
            if F.FORM == "product":
                gated, steep, bend = score_tile.apply_score_form(
                    x, scales.scale, own.bias, a[None, :], own.b, cap[None, :], F.BASE, F
                )
            else:
                gated, bend, sure = apply_distance_form(
                    x, own, head, start, here, cap[None, :], scales, F.BASE, F, EXACT
                )
                steep = gated
                if EXACT == 1:
                    doubts = mark_doubts(doubts, sure, (t - lo) >> shift)
            s = score_tile.modify_scores(gated, b, h, i, own.j, given, scales.times, z, F)
            peak = top[None, :]
            if QUICK and F.EXPONENTIAL:
                peak = peak - extra
            elif F.PAIRS == 2:
                s = s + extra
            p, lean = score_tile.tile_weights(
                s, own.j, live, peak, share[None, :], row_a[None, :], row_b[None, :],
                scales.alpha, F, RULED,
            )  # fmt: skip
            if EXACT:
                p, lean = leave_out_unsure(p, lean, sure, EXACT)
            if F.ALONG:
                there = head.along + (start + here)[None, :] * tl.cast(steps.a_n, tl.int64)
                there += tl.minimum(own.j, z.m - 1) if MASKED else own.j
                dp = tl.load(there).to(tl.float32) * scales.share
            else:
                weight = p
                if F.DROP:
                    weight = p * keep
                dv = tl.dot(weight.to(do.dtype), do, dv, input_precision=F.PRECISION)
                dp = tl.dot(own.v, tl.trans(do), input_precision=F.PRECISION)
            if F.DROP:
                dp = dp * keep
            ds = score_tile.score_gradients(p, lean, dp, middle[None, :], share[None, :], F)
            if EXACT and not F.VANISHES:
                ds, _ = leave_out_unsure(ds, ds, sure, EXACT)
            ds = score_tile.modified_gradients(ds, gated, b, h, i, own.j, given, scales.times, z, F)
            logit, _, ds = score_tile.product_gradients(
                ds, live, gated, steep, bend, scales.scale, F, RULED
            )
            if F.GATE:
                dgate += tl.sum(logit, 1)
            if F.BIAS:
                dbias += tl.sum(ds, 1)
            if F.TANH:
                add_unit_gradients(ds_out, None, ds, own.held, q, F, False)
            elif F.BY_COLUMN:
                if F.SLOPED:
                    there = locate_columns(start, here, F, F.LISTED == 2)
                    add_column_gradients(ds_out, ds, own, head, there, F)
            elif F.WIDE and F.SLOPED:
                spot = own.line[:, None] * tl.cast(steps.o_h, tl.int64)
                spot += (head.member * steps.o_n + start + near)[None, :]
                ds = ds * score_tile.remaining_scale(scales.scale, F)
                if F.WINDOW:
                    ds = ds * product_factor(scales, F)
                ds = ds.to(ds_out.dtype.element_ty)
                tl.store(ds_out + spot, ds, mask=own.stored[:, None] & (i < steps.o_n))
            elif F.SLOPED:
                if RULED:
                    q = tl.where(tiles.is_finite(q), q, 0.0)
                ds = ds.to(q.dtype)
                if F.WINDOW:
                    dbias = add_row_sums(dbias, ds, F)
                dk = tl.dot(ds, q, dk, input_precision=F.PRECISION)
    return dk, dv, dbias, dgate, doubts


@triton.jit
def zero_key_gradients(F):
    """Return zero gradients of a tile of keys."""
    HELD: tl.constexpr = 16 if F.WIDE else F.BLOCK_W
    return (
        tl.zeros((F.COLS, HELD), dtype=tl.float32),
        tl.zeros((F.COLS, F.BLOCK_D), dtype=tl.float32),
        tl.zeros((F.COLS, SUMMING_COLUMNS) if F.WINDOW else (F.COLS,), dtype=tl.float32),
        tl.zeros((F.COLS,), dtype=tl.float32),
        start_doubts(F.COLS, F),
    )


@triton.jit
def locate_queries(given, back, listing, pair, g, first, steps, z, F):
    """Return the queries of head g of a pair's group."""
    batch = tl.cast(pair // z.heads, tl.int64)
    head = tl.cast(pair % z.heads, tl.int64) * z.group + g
    lane = tl.cast(pair, tl.int64) * z.group + g
    q_n = tl.cast(steps.q_n, tl.int64)
    query = given.query + batch * steps.q_b + head * steps.q_h
    pairs = given.pairs
    if F.PAIRS:
        pairs += batch * steps.p_b + head * steps.p_h
        if F.LAID:  # loaded with queries as rows, and transposed on chip
            p_n = tl.cast(steps.p_n, tl.int64)
            pairs = tiles.make_descriptor(pairs, z.n, p_n, z.m, F.ROWS, F.COLS, True)
        else:
            pairs += first * tl.cast(steps.p_m, tl.int64)
    else:
        pairs = query  # a Triton function cannot return None
    if listing is None:
        listing = query
    top = query
    middle = query
    if F.LINED:  # reads 16 bytes at a time, which Triton cannot infer for pointers
        top = tl.make_tensor_descriptor(back.kept, [back.lines], [1], [F.ROWS])
        middle = tl.make_tensor_descriptor(back.centre, [back.lines], [1], [F.ROWS])
    terms = query
    if F.TERMS:
        terms = locate_terms(given.query_terms, lane, z.n, F)
    side = query
    if F.TANH:
        side = locate_side(given.ea, given.peak_a, given.v, lane, z.n, F)
    source = query
    query = tiles.make_descriptor(query, z.n, q_n, F.W, F.ROWS, F.BLOCK_W, F.TMA)
    if F.ALONG:
        along = back.along + batch * steps.a_b + head * steps.a_h
    else:
        d = tl.cast(F.D, tl.int64)
        along = back.along + lane * z.n * F.D
        along = tiles.make_descriptor(along, z.n, d, F.D, F.ROWS, F.BLOCK_D, F.TMA)
    return QueryRange(
        query,
        q_n,
        along,
        lane * z.n,
        pairs,
        lane,
        g,
        listing,
        top,
        middle,
        side,
        terms,
        source,
        terms,
    )


@jit_kernel
def backward_keys_kernel(
    given, at, counts, along, centre, kept, dkey, dvalue, dbias, dgate, ds, scales, steps, z,
    lines, first_pair, first_key, keys_n, parts_lines, F: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one tile of keys and values over every query of the group.

    `heads` is the number of key heads. With WIDE, the gradient of φ·ψ is written to `ds` (pairs,
    keys, group, padded n) for a matrix product, and `dkey` is not written. With SPLIT, each program
    has a part of the queries and writes its own sum, in float32.
    """
    if is_disabled(given, F):
        return
    steps = align_strides(steps, F)
    part, tile, pair = locate_program((keys_n + F.COLS - 1) // F.COLS, z, F)
    tile += first_key // F.COLS
    pair += first_pair
    if F.LISTED:
        all_listed = True
        for g in tl.range(0, z.group):
            first = tile * (F.COLS // LIST_TILE)
            count = (z.m + LIST_TILE - 1) // LIST_TILE
            some = has_list(at, pair * z.group + g, first, count, z.at_columns, F.MANY)
            all_listed = all_listed & some
        if all_listed == (F.LISTED == 1):
            return
    batch = tl.cast(pair // z.heads, tl.int64)
    head = tl.cast(pair % z.heads, tl.int64)
    first = tile * F.COLS
    near = tl.arange(0, F.COLS)
    stored = (first + near < z.m) & (first + near < first_key + keys_n)
    here = tl.minimum(near, z.m - 1 - first)
    k_m = tl.cast(steps.k_m, tl.int64)
    key = given.key + batch * steps.k_b + head * steps.k_h + first * k_m
    value = given.value + batch * steps.v_b + head * steps.v_h
    value += first * tl.cast(steps.v_m, tl.int64)
    end = tiles.load_length(given.lengths, batch, z.m)
    v = tiles.load_rows(value, here * steps.v_m, F.D, F.BLOCK_D)  # (COLS, d)
    j = (first + near)[:, None]
    k = j
    if F.TANH:
        side = locate_side(given.eb, given.peak_b, given.v, pair, z.m, F)
        k = load_units(side, key, first, here, F)
        ds = clear_unit_sums(dkey, pair, first, z.m, F)
    elif not F.WIDE and F.WEIGHTING != "average":
        k = tiles.load_rows(key, here * steps.k_m, F.W, F.BLOCK_W)  # (COLS, w)
    terms = j
    near_terms = first + here
    if F.TERMS:
        near_terms = locate_columns(first, here, F, False)
        terms = locate_terms(given.key_terms, pair, z.m, F)
        if F.WINDOW:
            terms = tl.load(terms + first + here)[:, None]
        elif F.SLOPED and F.WEIGHTING != "average":
            ds = clear_column_sums(dkey, pair, first, z.m, F.COLS, F)
    bias = j
    if F.BIAS:
        there = given.key_bias + batch * steps.bias_b + head * steps.bias_h
        bias = tl.load(there + first + here)[:, None] * F.BASE
    b = j
    if F.GATE:
        there = given.gate_key + batch * steps.gate_b + head * steps.gate_h
        b = score_tile.scale_gate_term(tl.load(there + first + here), F.FAST)[:, None]
    if F.TILED:  # each head of the group has its own list
        lo, inner_lo, inner_hi, hi = 0, 0, 0, 0
    else:
        last = tl.minimum(first + F.COLS, end) - 1
        lo, inner_lo, inner_hi, hi = tiles.visible_tiles(
            first, last, -z.upper, -z.lower, z.n, F.ROWS, F.UPPER, F.LOWER
        )
        if F.SPANS:
            edges = (lo, inner_lo, inner_hi, hi)
            last = tl.maximum(last, first)
            lo, inner_lo, inner_hi, hi = tiles.clip_to_spans(
                edges, given.query_spans, first, last, z.m, F.ROWS
            )
        if F.CUT:
            if first >= end:
                lo = hi
            if first + F.COLS > end:  # no tile is full: all are in the masked loop
                inner_lo = hi if F.UPPER or F.SPANS else lo
                inner_hi = inner_lo
    if F.EDGES:
        inner_hi = lo
    if F.SPLIT and not F.TILED:
        lo, inner_lo, inner_hi, hi = tiles.clip_to_part((lo, inner_lo, inner_hi, hi), part, z.span)
    state = zero_key_gradients(F)
    ds_line = tl.cast(pair - first_pair, tl.int64) * keys_n + (first - first_key) + near
    at_pairs = here[:, None] * steps.p_m
    FLAT: tl.constexpr = F.WIDE and F.TMA
    key = tiles.make_descriptor(key, z.m - first, k_m, F.W, F.COLS, F.BLOCK_W, FLAT)
    own = KeyTile(
        key, here * steps.k_m, k, v, j, at_pairs, bias, b, end, stored, ds_line, first,
        tiles.load_width(given.width, F), terms, near_terms,
    )  # fmt: skip
    back = score_tile.SavedRows(along, centre, kept, tl.cast(lines, tl.int64))
    call = (given, back, ds, scales, steps)
    for g in tl.range(0, z.group):
        listing = at
        if F.LISTED == 2:
            lane = pair * tl.cast(z.group, tl.int64) + g
            listing += (lane * ((z.m + LIST_TILE - 1) // LIST_TILE) + tile) * z.at_columns
            inner_hi = 0
            hi = (tl.load(listing).to(tl.int32) + F.ROWS - 1) // F.ROWS
        if F.TILED:
            line = (batch * z.list_b + (head * z.group + g) * z.list_h).to(tl.int32)
            line = line * ((z.m + F.COLS - 1) // F.COLS) + tile
            listing += tl.cast(line, tl.int64) * z.at_columns
            edges = tiles.listed_tiles(counts, line)
            if F.SPLIT:
                edges = tiles.clip_to_part(edges, part, z.span)
            lo, inner_lo, inner_hi, hi = edges
        queries = locate_queries(given, back, listing, pair, g, first, steps, z, F)
        if (F.UPPER or F.SPANS) and not F.TILED and not F.EDGES:
            state = accumulate_key_gradients(state, own, queries, call, z, lo, inner_lo, F, True)
        if not F.EDGES:
            EXACT: tl.constexpr = 1 if F.FEW is not None else 0
            state = accumulate_key_gradients(
                state, own, queries, call, z, inner_lo, inner_hi, F, False, EXACT
            )
            if EXACT:
                bits = find_doubts(state[4])
                shift = tiles_per_bit(inner_hi - inner_lo)
                SHARE: tl.constexpr = F.ROWS // F.FEW.ROWS
                few = locate_queries(given, back, at, pair, g, first, steps, z, F.FEW)
                while bits != 0:
                    begin, stop, bits = next_doubts(bits, shift, inner_lo, inner_hi)
                    state = accumulate_key_gradients(
                        state, own, few, call, z, begin * SHARE, stop * SHARE, F.FEW, False, 2
                    )
                dk, dv, db, dg, _ = state
                state = (dk, dv, db, dg, start_doubts(F.COLS, F))
        ENDS: tl.constexpr = F.LOWER or F.SPANS or F.UNEVEN or F.TILED or F.EDGES
        if ENDS or (F.CUT and not F.UPPER):
            state = accumulate_key_gradients(state, own, queries, call, z, inner_hi, hi, F, True)
    dk, dv, db, dg, _ = state
    if F.QUICK:
        good = (
            score_tile.is_all_finite(dk)
            & score_tile.is_all_finite(dv)
            & score_tile.is_all_finite(db[:, None])
            & score_tile.is_all_finite(dg[:, None])
        )
        if good == 0:  # all again, with comparisons
            state = zero_key_gradients(F)
            for g in tl.range(0, z.group):
                queries = locate_queries(given, back, at, pair, g, first, steps, z, F)
                state = accumulate_key_gradients(state, own, queries, call, z, lo, hi, F, True)
            dk, dv, db, dg, _ = state
    line = tl.cast(pair, tl.int64) * z.m + first + near
    if F.SPLIT:
        line += tl.cast(part, tl.int64) * parts_lines
    column = tl.arange(0, F.BLOCK_D)[None, :]
    if not F.ALONG:
        where = dvalue + line[:, None] * F.D + column
        tl.store(where, dv.to(dvalue.dtype.element_ty), mask=stored[:, None] & (column < F.D))
    if F.WEIGHTING != "average":
        if not F.WIDE:
            if F.WINDOW:
                db = tl.sum(db, 1) * (1 / SUMMING_COLUMNS)
            dk = finish_product_gradient(dk, k, db, scales, F)
            dk = dk * score_tile.remaining_scale(scales.scale, F)
            column = tl.arange(0, F.BLOCK_W)[None, :]
            where = dkey + line[:, None] * F.W + column
            tl.store(where, dk.to(dkey.dtype.element_ty), mask=stored[:, None] & (column < F.W))
        if F.BIAS:
            tl.store(dbias + line, db, mask=stored)
        if F.GATE:
            if F.WEIGHTING == "softmax" and not F.HAS_MOD:
                dg = dg * LN2
            tl.store(dgate + line, dg, mask=stored)
