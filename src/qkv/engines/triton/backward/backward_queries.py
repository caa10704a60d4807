"""The kernel for the gradients of queries, query gate and caps, in tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from qkv.engines.triton.tile_functions import tiles
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
    mark_doubts,
    next_doubts,
    start_doubts,
    tiles_per_bit,
)
from qkv.engines.triton.tile_functions.program import (
    align_strides,
    begin_row_program,
    compute_product,
    compute_tile_scores,
    is_skipped,
    load_mask_tile,
    locate_keys,
)
from qkv.engines.triton.tile_functions.score_tile import (
    SavedRows,
    is_all_finite,
    load_row_statistics,
    modified_gradients,
    modify_scores,
    product_gradients,
    remaining_scale,
    score_gradients,
    sink_lean,
    tile_weights,
)
from qkv.engines.triton.tile_functions.tanh import add_unit_gradients, clear_unit_sums
from qkv.engines.triton.tile_functions.tiles import LN2, PARTIAL_SUM_COLUMNS, jit_kernel


@triton.jit
def captured_gradients(ds, s, live, rows, j, scales, z, F, RULED: tl.constexpr):
    """Return what the gradients `ds` of a tile's scores add to that of a captured number."""
    factor = scales.times
    if F.WEIGHTING == "softmax":
        factor = factor * LN2
    own = F.CAPTURED_GRADIENT(
        ds * factor, s, rows.b, rows.h, rows.i, j, rows.captured, z, F
    )  # fmt: skip
    if RULED:  # the derivative of an excluded pair may not be finite
        own = tl.where(live, own, 0.0)
    return own


@triton.jit
def accumulate_query_gradients(
    state, rows, keys, back, scales, z, lo, hi, F, MASKED: tl.constexpr, EXACT: tl.constexpr = 0
):
    """Return the gradients of a tile of queries after tiles lo … hi of the keys.

    `back` holds ∂L/∂out (ROWS, d), top, share and centre (ROWS, 1); with TANH also pointers to the
    sums per unit, to which gradients are added. EXACT is that of `forward.pool_tiles`.
    """
    dq, one, two, lean_keys, doubts = state
    do, top, share, middle, slopes, along = back
    QUICK: tl.constexpr = F.QUICK and not MASKED
    RULED: tl.constexpr = MASKED or (F.PAIRS > 0 and not (F.QUICK or F.SKIPS_PAIRS))
    shift = 0
    if EXACT == 1:
        shift = tiles_per_bit(hi - lo)
    for t in tl.range(lo, hi, num_stages=1 if EXACT == 2 else None):
        start, j, here, live, extra = load_mask_tile(t, rows, keys, scales.times, z, F, MASKED)
        x, k = compute_product(rows, keys, start, here, F)
        if EXACT:
            gated, bend, sure = apply_distance_form(
                x, rows, keys, start, here, rows.cap, scales, F.BASE, F, EXACT
            )
            steep = gated
            if EXACT == 1:
                doubts = mark_doubts(doubts, sure, (t - lo) >> shift)
        else:
            gated, steep, bend = compute_tile_scores(x, rows, keys, start, here, scales, F.BASE, F)
        s = modify_scores(gated, rows.b, rows.h, rows.i, j, rows.captured, scales.times, z, F)
        peak = top
        if QUICK and F.EXPONENTIAL:
            peak = top - extra
        elif F.PAIRS == 2:
            s = s + extra
        p, lean = tile_weights(
            s, j, live, peak, share, rows.row_a, rows.row_b, scales.alpha, F, RULED
        )
        if EXACT:
            p, lean = leave_out_unsure(p, lean, sure, EXACT)
        if F.ALONG:
            dp = tl.load(do + start + here[None, :]).to(tl.float32) * scales.share
        else:
            v = tiles.load_row_tile(
                keys.value, start, keys.v_m, here, F.D, F.BLOCK_D, F.TMA
            )  # (COLS, d)
            dp = tl.dot(do, tl.trans(v), input_precision=F.PRECISION)
        if F.DROP:
            dp = dp * tiles.dropout_factor(rows.drawn, j, z.dropped, scales.share)
        if F.CENTRE == 1:
            one += tiles.fold_columns(tl.where(lean == 0, 0.0, lean * dp))
            two += tiles.fold_columns(lean)
        elif F.CENTRE == 2:
            ds = score_gradients(p, lean, dp, middle, share, F)
            one += tiles.fold_columns(ds)
            two += tiles.fold_columns(lean)
            if F.HAS_MOD:
                ds = modified_gradients(
                    ds, gated, rows.b, rows.h, rows.i, j, rows.captured, scales.times, z, F
                )
                lean = modified_gradients(
                    lean, gated, rows.b, rows.h, rows.i, j, rows.captured, scales.times, z, F
                )
                if RULED:  # the derivative of an excluded pair may not be finite
                    ds = tl.where(live, ds, 0.0)
                    lean = tl.where(live, lean, 0.0)
            if RULED:
                k = tl.where(tiles.is_finite(k), k, 0.0)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=F.PRECISION)
            lean_keys = tl.dot(lean.to(k.dtype), k, lean_keys, input_precision=F.PRECISION)
        else:
            ds = score_gradients(p, lean, dp, middle, share, F)
            if EXACT and not F.VANISHES:
                ds, _ = leave_out_unsure(ds, ds, sure, EXACT)
            if F.CAPTURED_SUMS > 0:
                own = captured_gradients(ds, gated, live, rows, j, scales, z, F, RULED)
                one += tiles.fold_columns(own)
                if F.CAPTURED_SUMS == 2:
                    own = captured_gradients(lean, gated, live, rows, j, scales, z, F, RULED)
                    two += tiles.fold_columns(own)
                    lean_keys += tiles.fold_columns(tl.where(live, ds, 0.0) if RULED else ds)
            ds = modified_gradients(
                ds, gated, rows.b, rows.h, rows.i, j, rows.captured, scales.times, z, F
            )
            logit, own, ds = product_gradients(ds, live, gated, steep, bend, scales.scale, F, RULED)
            if F.GATE:
                one += tl.sum(logit, 1)[:, None]
            if F.CAP < 0:
                two += tl.sum(own, 1)[:, None]
            if F.TANH:
                add_unit_gradients(slopes, along, ds, rows.held, k, F, True)
            elif F.BY_COLUMN:
                if F.SLOPED:
                    there = locate_columns(start, here, F, F.LISTED == 2)
                    add_column_gradients(slopes, ds, rows, keys, there, F)
            elif F.SLOPED and not F.WIDE:
                if RULED:
                    k = tl.where(tiles.is_finite(k), k, 0.0)
                ds = ds.to(k.dtype)
                if F.WINDOW:
                    one = add_row_sums(one, ds, F)
                dq = tl.dot(ds, k, dq, input_precision=F.PRECISION)
    return dq, one, two, lean_keys, doubts


@jit_kernel
def backward_queries_kernel(
    given, at, counts, along, centre, kept, dquery, one_out, two_out, scales, steps, z, lines,
    F: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one tile of queries, of their gate (`one_out`) and caps (`two_out`).

    - CENTRE = 1: compute only entmax's centre, Σ lean · ∂L/∂α / Σ lean; with SPLIT both sums.
    - CENTRE = 2: `centre` is an approximation. At the end, subtract the difference from the exact
      centre times Σ lean · ψ, and write the exact centre to `one_out`.
    - WIDE: do not compute the gradient of the query.
    - CAPTURED_SUMS: write the sums over the keys of the gradients of a captured number to
      `one_out`. With 2, they are those of the exact centre, which the weights of a row, of sum 1,
      give.

    `heads` is the number of query heads.
    """
    if is_skipped(given, at, z, F):
        return
    rows, keys, spot, edges, part = begin_row_program(given, at, counts, steps, z, F)
    lo, inner_lo, inner_hi, hi = edges
    lines = tl.cast(lines, tl.int64)
    known = SavedRows(along, centre, kept, lines)
    top, share, middle = load_row_statistics(known, spot.line, F)
    middle = middle[:, None]
    lane = spot.batch * z.heads + spot.head
    if F.ALONG:
        do = along + spot.batch * steps.a_b + spot.head * steps.a_h  # (ROWS, 1)
        do += rows.i * tl.cast(steps.a_n, tl.int64)
    else:
        do = tiles.load_rows(along, spot.line * F.D, F.D, F.BLOCK_D)  # (ROWS, d)
    slopes = do
    ones = do
    if F.TANH:
        slopes = clear_unit_sums(dquery, lane, spot.first, z.n, F)
        ones = clear_unit_sums(one_out, lane, spot.first, z.n, F)
    if F.BY_COLUMN and F.SLOPED and F.CENTRE == 0:
        slopes = clear_column_sums(dquery, lane, spot.first, z.n, F.ROWS, F)
    back = (do, top[:, None], share[:, None], middle, slopes, ones)
    HELD: tl.constexpr = 16 if (F.WIDE or F.CENTRE == 1) else F.BLOCK_W
    FOLDED: tl.constexpr = F.CENTRE > 0 or F.CAPTURED_SUMS > 0
    PARTS: tl.constexpr = (
        PARTIAL_SUM_COLUMNS if FOLDED else (SUMMING_COLUMNS if F.WINDOW else 1)
    )  # of sums: those of a gate spill in parts
    LEAN_COLUMNS: tl.constexpr = (
        F.BLOCK_W if F.CENTRE == 2 else (PARTIAL_SUM_COLUMNS if F.CAPTURED_SUMS == 2 else 16)
    )
    state = (
        tl.zeros((F.ROWS, HELD), dtype=tl.float32),
        tl.zeros((F.ROWS, PARTS), dtype=tl.float32),
        tl.zeros((F.ROWS, PARTS), dtype=tl.float32),
        tl.zeros((F.ROWS, LEAN_COLUMNS), dtype=tl.float32),
        start_doubts(F.ROWS, F),
    )
    if (F.LOWER or F.SPANS) and not F.TILED and not F.EDGES:
        state = accumulate_query_gradients(
            state, rows, keys, back, scales, z, lo, inner_lo, F, True
        )
    if not F.EDGES:
        EXACT: tl.constexpr = 1 if F.FEW is not None else 0
        state = accumulate_query_gradients(
            state, rows, keys, back, scales, z, inner_lo, inner_hi, F, False, EXACT
        )
        if EXACT:
            SHARE: tl.constexpr = F.COLS // F.FEW.COLS
            few = locate_keys(
                given, None, 0, align_strides(steps, F), spot.batch, spot.shared, z, F.FEW
            )
            bits = find_doubts(state[4])
            shift = tiles_per_bit(inner_hi - inner_lo)
            while bits != 0:
                first, last, bits = next_doubts(bits, shift, inner_lo, inner_hi)
                state = accumulate_query_gradients(
                    state, rows, few, back, scales, z, first * SHARE, last * SHARE, F.FEW,
                    False, 2,
                )  # fmt: skip
    if F.QUICK:
        dq, one, two, lean_keys, doubts = state
        good = is_all_finite(dq) & is_all_finite(one) & is_all_finite(two)
        dq = tl.where(good, dq, 0.0)
        lean_keys = tl.where(good, lean_keys, 0.0)
        state = (dq, tl.where(good, one, 0.0), tl.where(good, two, 0.0), lean_keys, doubts)
        inner_hi = tl.where(good, inner_hi, lo)  # else all tiles again, with comparisons
    if F.UPPER or F.SPANS or F.CUT or F.TILED or F.EDGES or F.QUICK:
        state = accumulate_query_gradients(
            state, rows, keys, back, scales, z, inner_hi, hi, F, True
        )
    dq, one, two, lean_keys, _ = state
    one, two = tl.sum(one, 1), tl.sum(two, 1)
    if F.WINDOW and F.CENTRE == 0:  # all columns hold the same sums
        one, two = one * (1 / SUMMING_COLUMNS), two * (1 / SUMMING_COLUMNS)
    lean = one
    if F.SINK:  # the sink has no value, so its ∂L/∂α is 0
        lean = sink_lean(rows, scales, F)
        if F.CENTRE == 2:
            one -= lean * tl.sum(middle, 1)
        if F.CENTRE > 0:
            two += tl.where(part == 0, lean, 0.0)
    line = spot.line
    there = spot.batch * steps.o_b + spot.head * steps.o_h
    there += spot.row * tl.cast(steps.o_n, tl.int64)
    if F.SPLIT:
        line += tl.cast(part, tl.int64) * lines
        there += part * lines * F.W
    if F.CENTRE == 1:
        if F.SPLIT:
            tl.store(two_out + line, two, mask=spot.inside)
        else:
            one = one / tl.where(two == 0, 1.0, two)
        tl.store(one_out + line, one, mask=spot.inside)
    else:
        if F.SINK == 2:
            exact = tl.sum(middle, 1)
            if F.CENTRE == 2:
                exact += one / tl.where(two == 0, 1.0, two)
            tl.store(two_out + line, tl.where(part == 0, -lean * exact, 0.0), mask=spot.inside)
        if F.CENTRE == 2:
            rest = (one / tl.where(two == 0, 1.0, two))[:, None]
            dq = dq - rest * lean_keys
            tl.store(one_out + line[:, None], middle + rest, mask=spot.inside[:, None])
        if F.CAPTURED_SUMS > 0:
            if F.CAPTURED_SUMS == 2:
                one -= tl.sum(lean_keys, 1) * two
            tl.store(one_out + line, one, mask=spot.inside)
        if F.GATE:
            if F.WEIGHTING == "softmax" and not F.HAS_MOD:
                one = one * LN2
            tl.store(one_out + line, one, mask=spot.inside)
        if F.CAP < 0:
            cap = tl.sum(rows.cap, 1) * F.BASE
            two = two / tl.where(cap == 0, 1.0, cap)
            tl.store(two_out + line, two, mask=spot.inside)
        if not F.WIDE:
            dq = finish_product_gradient(dq, rows.held, one, scales, F)
            dq = dq * remaining_scale(scales.scale, F)
            column = tl.arange(0, F.BLOCK_W)[None, :]
            where = dquery + there[:, None] + column
            inside = spot.inside[:, None] & (column < F.W)
            tl.store(where, dq.to(dquery.dtype.element_ty), mask=inside)
