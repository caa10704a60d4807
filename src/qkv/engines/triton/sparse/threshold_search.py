"""Kernels that search the thresholds of sparse weightings, without an n × m matrix.

Each pass over a row computes the scores s = (scale · φ(q)·ψ(k) + bias(k)) · σ(a(q) + b(k)) again,
tile by tile, with the functions of `forward.pool_kernel`. So all passes compute identical scores.

- entmax: the t with Σⱼ max(0, (alpha − 1) sⱼ − t)^(1/(alpha − 1)) = 1.
- top-k: the k-th largest score, and the position up to which equal scores count.
- hard (top-1): the largest score and its first key.

With few rows, `score_kernel` writes the scores once, and the search reads them (F.STORED).
"""

# Nested `if`: the outer one is decided at compile time, the inner one on the device.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from qkv.engines.triton.sparse.support_lists import (
    LIST_SHARE_DIVISOR,
    LIST_TILE,
    BitPointers,
    set_all_bits,
    set_tile_bits,
)
from qkv.engines.triton.tile_functions.program import (
    begin_row_program,
    compute_product,
    compute_tile_scores,
    is_skipped,
    tile_positions,
)
from qkv.engines.triton.tile_functions.records import Scales
from qkv.engines.triton.tile_functions.score_tile import modify_scores
from qkv.engines.triton.tile_functions.tiles import (
    NEG_INFINITY,
    PARTIAL_SUM_COLUMNS,
    apply_mask_array,
    apply_rule,
    fold_columns,
    jit_kernel,
    live_pairs,
)

MAX_NEWTON_STEPS = tl.constexpr(16)
"""The most passes for entmax's threshold. `_column_maxima` starts so close that two suffice."""
MAX_BRACKET_STEPS = tl.constexpr(28)
"""The most passes for the k-th score. The first LINEAR_BRACKET_STEPS split the range of scores, the
others split the range of their bit patterns."""
LINEAR_BRACKET_STEPS = tl.constexpr(8)
BRACKET_PARTS = tl.constexpr(4)
"""A pass for the k-th score counts the scores above BRACKET_PARTS − 1 cuts."""
COUNT_FIELD_SIZE = tl.constexpr(1024)
"""More than the number of keys in a tile, because one integer holds three counts of a row."""
LAST_POSITION = tl.constexpr(2**31 - 1)
"""A position after all others."""


@triton.jit
def _tile_scores(t, rows, keys, edges, scales, z, F):
    """Return the scores of tile t of the keys, (ROWS, COLS), with −∞ for excluded pairs.

    scales.share multiplies the bias. Partial and full tiles are distinguished at run time: one body
    for both compiles in a third of the time.
    """
    start, near = tile_positions(t, keys.at, F.COLS, F)
    j = (start + near)[None, :]
    if F.STORED:
        return tl.load(rows.pairs + (rows.at + j), mask=j < z.m, other=NEG_INFINITY)
    here = tl.minimum(near, z.m - 1 - start)
    x, _ = compute_product(rows, keys, start, here, F)
    s, _, _ = compute_tile_scores(x, rows, keys, start, here, scales, scales.share, F)
    s = modify_scores(s, rows.b, rows.h, rows.i, j, rows.captured, scales.times, z, F)
    if F.PAIRS:
        live = live_pairs(rows.i, j, keys.end, keys.layout, z, F)
        live = apply_rule(live, rows.b, rows.h, rows.i, j, rows.captured, z, F)
        if F.LAID:
            read = rows.pairs.load([rows.at, start])
        else:
            there = rows.pairs + start * tl.cast(keys.p_m, tl.int64)
            read = tl.load(there + (rows.at + near[None, :] * keys.p_m), mask=live, other=0)
        extra, live = apply_mask_array(read, live, scales.times, F, True)
        if F.PAIRS == 2:
            s = s + extra
        s = tl.where(live, s, NEG_INFINITY)
    elif (t < edges[1]) | (t >= edges[2]):
        live = live_pairs(rows.i, j, keys.end, keys.layout, z, F)
        live = apply_rule(live, rows.b, rows.h, rows.i, j, rows.captured, z, F)
        s = tl.where(live, s, NEG_INFINITY)
    return s


@jit_kernel
def score_kernel(given, out, scales, steps, z, line_stride, F: tl.constexpr):
    """Write the scores of one tile of rows and one part of the keys to `out`, −∞ for excluded ones.

    The line of a row has `line_stride` numbers, a multiple of 16. Scores of entmax are multiplied
    by alpha − 1.
    """
    rows, keys, spot, edges, part = begin_row_program(given, None, None, steps, z, F)
    scales = _scale_scores(scales, F)
    line = out + (spot.line * (line_stride // 16 * 16))[:, None]
    near = tl.arange(0, F.COLS)[None, :]
    first = 0
    last = (z.m + F.COLS - 1) // F.COLS
    if F.SPLIT:
        first = part * z.span
        last = tl.minimum(first + z.span, last)
    nothing = tl.full((F.ROWS, F.COLS), NEG_INFINITY, tl.float32)
    for t in tl.range(first, tl.minimum(edges[0], last)):
        j = t * F.COLS + near
        tl.store(line + j, nothing, mask=spot.inside[:, None] & (j < z.m))
    for t in tl.range(edges[0], edges[3]):
        j = t * F.COLS + near
        s = _tile_scores(t, rows, keys, edges, scales, z, F)
        tl.store(line + j, s, mask=spot.inside[:, None] & (j < z.m))
    for t in tl.range(tl.maximum(edges[3], first), last):
        j = t * F.COLS + near
        tl.store(line + j, nothing, mask=spot.inside[:, None] & (j < z.m))


@triton.jit
def _scale_scores(scales, F):
    """Return the scales of the scores: entmax multiplies them by alpha − 1, after a score_mod."""
    factor = 1.0
    if F.WEIGHTING == "entmax":
        factor = scales.alpha - 1.0
    inner = 1.0 if F.HAS_MOD else factor  # a score_mod gets the scores themselves
    return Scales(
        scales.scale * inner, scales.alpha, scales.times * factor, inner, scales.square_scale
    )


@triton.jit
def _column_maxima(rows, keys, edges, scales, z, F, SECOND: tl.constexpr, COUNT: tl.constexpr):
    """Return the maxima of every COLS-th score, (ROWS, COLS).

    SECOND also computes the second largest. COUNT also computes the lowest score and the number of
    scores. These few scores include the row's largest, so bounds computed from them are tight.
    """
    peaks = tl.full((F.ROWS, F.COLS), NEG_INFINITY, tl.float32)
    second = tl.full((F.ROWS, F.COLS if SECOND else 1), NEG_INFINITY, tl.float32)
    floor = tl.full((F.ROWS,), float("inf"), tl.float32)
    count = tl.zeros((F.ROWS,), tl.float32)
    for t in tl.range(edges[0], edges[3]):
        s = _tile_scores(t, rows, keys, edges, scales, z, F)
        if COUNT:
            on = s > NEG_INFINITY
            floor = tl.minimum(floor, tl.min(tl.where(on, s, float("inf")), 1))
            count += tl.sum(on.to(tl.float32), 1)
        if SECOND:
            second = tl.maximum(second, tl.minimum(peaks, s))
        peaks = tl.maximum(peaks, s, propagate_nan=tl.PropagateNan.ALL)
    return peaks, second, floor, count


@triton.jit
def _has_nan_or_inf(peaks):
    """Return whether a row has a score that is NaN or +∞."""
    return tl.sum(tl.where(peaks < float("inf"), 0.0, 1.0), 1) > 0


@triton.jit
def _fast_log2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _entmax_powers(r, alpha, POWER: tl.constexpr, FAST: tl.constexpr):
    """Return rᵉ and rᵉ⁻¹ for r ≥ 0, e = 1/(alpha − 1); 0 for r = 0."""
    if POWER == 1:
        return r, tl.where(r > 0, 1.0, 0.0)
    elif POWER == 2:
        return r * r, r
    else:
        on = r > 0
        depth = _fast_log2(tl.where(on, r, 1.0), FAST)
        lean = tl.where(on, tl.exp2((1.0 / (alpha - 1.0) - 1.0) * depth), 0.0)
        return lean * r, lean


@triton.jit
def _newton_step(mass, slope, alpha, POWER: tl.constexpr):
    """Return Newton's step of t for ‖r‖ₑ = 1, which never passes the root from below."""
    on = mass > 0
    some = tl.where(on, mass, 1.0)
    if POWER == 1:
        size = 1.0
    elif POWER == 2:
        size = tl.sqrt(some)
    else:
        size = tl.exp2((2.0 - alpha) * tl.log2(some))
    return tl.where(on, (mass - size) / tl.where(slope > 0, slope, 1.0), 0.0)


@triton.jit
def _sum_powers(peaks, second, t, alpha, F, SECOND: tl.constexpr):
    """Return Σ rᵉ and Σ rᵉ⁻¹ of these scores."""
    some, lean = _entmax_powers(tl.maximum(peaks - t[:, None], 0.0), alpha, F.POWER, F.FAST)
    mass, slope = fold_columns(some), fold_columns(lean)
    if SECOND:
        some, lean = _entmax_powers(tl.maximum(second - t[:, None], 0.0), alpha, F.POWER, F.FAST)
        mass, slope = mass + fold_columns(some), slope + fold_columns(lean)
    return tl.sum(mass, 1), tl.sum(slope, 1)


@triton.jit
def _sum_row_powers(t, rows, keys, edges, scales, own, z, F, MARKED: tl.constexpr):
    """Return Σ rᵉ, Σ rᵉ⁻¹ and the number of r > 0 of each row; MARKED sets the bits of r > 0."""
    mass = tl.zeros((F.ROWS, PARTIAL_SUM_COLUMNS), tl.float32)
    slope = tl.zeros((F.ROWS, PARTIAL_SUM_COLUMNS), tl.float32)
    count = tl.zeros((F.ROWS, PARTIAL_SUM_COLUMNS), tl.float32)
    for tile in tl.range(edges[0], edges[3]):
        s = _tile_scores(tile, rows, keys, edges, scales, z, F)
        r = tl.maximum(s - t[:, None], 0.0)
        some, lean = _entmax_powers(r, scales.alpha, F.POWER, F.FAST)
        mass += fold_columns(some)
        slope += fold_columns(lean)
        if F.POWER == 2 or MARKED:
            count += fold_columns(tl.minimum(r * 1e30, 1.0))  # of r > 0
        if MARKED:
            set_tile_bits(r > 0, own, tile, F)
    return tl.sum(mass, 1), tl.sum(slope, 1), tl.sum(count, 1)


@triton.jit
def _update_threshold(t, low, high, sums, alpha, idle, F):
    """Return the next t, its bounds, and the largest change of mass of a row."""
    mass, slope, count = sums
    move = _newton_step(mass, slope, alpha, F.POWER)
    if F.POWER == 2:
        low = tl.where(mass >= 1, t, low)
        high = tl.where(mass <= 1, t, high)
        inside = slope * slope - count * (mass - 1)
        root = (slope - tl.sqrt(tl.maximum(inside, 0.0))) / tl.maximum(count, 1.0)
        move = tl.where(inside >= 0, root, move)
        off = (t + move < low) | (t + move > high)
        move = tl.where(off, 0.5 * (low + high) - t, move)
    move = tl.where(idle, 0.0, move)
    return t + move, low, high, tl.max(tl.abs(move) * slope, 0)


@triton.jit
def _locate_bits(marks, across, lists, spot, edges, found, bad, z, F):
    """Return the pointers to a row tile's list and bits, and whether to set the bits.

    They are not set if a row has NaN or +∞, or if `found`, the number of scores above the bound, is
    more than a share of the keys.
    """
    tile = spot.first // F.ROWS
    lane = spot.batch * z.heads + spot.head
    line = lane * ((z.n + LIST_TILE - 1) // LIST_TILE) + tile
    keys = (z.m + LIST_TILE - 1) // LIST_TILE
    seen = (edges[3] - edges[0]) * F.COLS
    marking = (tl.sum(found, 0) * LIST_SHARE_DIVISOR <= seen) & (tl.max(bad.to(tl.int32), 0) == 0)
    words = (z.n + LIST_TILE - 1) // LIST_TILE * 2
    own = BitPointers(
        lists + line * z.at_columns, marks + line * keys * 2,
        across + lane * keys * words + tile * 2, words,
    )  # fmt: skip
    return own, marking


@jit_kernel
def entmax_kernel(
    given, out, marks, across, lists, counts, scales, steps, z, F: tl.constexpr
):  # fmt: skip
    """Find the thresholds of one tile of rows: a first pass for the start, then steps.

    As long as the same scores count, the mass of a row at alpha = 1.5 is a quadratic in t; its root
    leaves an error of third order, on either side. Otherwise Newton's steps leave an error of
    second order.

    In PHASE 1 the first step sets the bits of `support_lists` if that pays off, and the search
    stops. PHASE 2 continues over the lists.
    """
    if is_skipped(given, lists, z, F):
        return
    rows, keys, spot, edges, _ = begin_row_program(given, lists, counts, steps, z, F)
    scales = _scale_scores(scales, F)
    if F.PHASE == 2:
        t = tl.load(out + spot.line)
        bad = t != t
        empty = bad
        low = t - 1.0  # no weight is above 1
        high = t + 1.0
    else:
        # A pass that sets bits has no registers left for the second largest.
        SECOND: tl.constexpr = F.PHASE == 0
        peaks, second, _, _ = _column_maxima(rows, keys, edges, scales, z, F, SECOND, False)
        bad = _has_nan_or_inf(peaks)
        top = tl.max(peaks, 1)
        empty = top == NEG_INFINITY
        top = tl.where(empty | bad, 0.0, top)
        t = top - 1.0
        for _ in range(4 if F.POWER == 2 else 8):
            mass, slope = _sum_powers(peaks, second, t, scales.alpha, F, SECOND)
            t += _newton_step(mass, slope, scales.alpha, F.POWER)
        t = tl.where(bad, 0.0, t)
        low = t
        high = top
    # A step of this size leaves an error of about its third power (for the quadratic).
    ROUGH: tl.constexpr = 0.05 if given.query.dtype.element_ty == tl.bfloat16 else 0.02
    NEAR: tl.constexpr = ROUGH if F.POWER == 2 else 1e-3
    far = 1.0
    step = 0
    last = MAX_NEWTON_STEPS
    if F.PHASE == 1:
        found = tl.sum((peaks > t[:, None]).to(tl.int32), 1)
        own, marking = _locate_bits(marks, across, lists, spot, edges, found, bad, z, F)
        if marking:
            sums = _sum_row_powers(t, rows, keys, edges, scales, own, z, F, True)
            t, low, high, far = _update_threshold(t, low, high, sums, scales.alpha, empty | bad, F)
            # Stop after this pass if the list is certain to fit.
            marking = tl.sum(sums[2], 0) <= z.at_columns - LIST_TILE
            step = 1
        else:
            set_all_bits(own, edges[0], edges[3])
        last = tl.where(marking, 0, MAX_NEWTON_STEPS)
    while (far > NEAR) & (step < last):
        sums = _sum_row_powers(t, rows, keys, edges, scales, keys, z, F, False)
        t, low, high, far = _update_threshold(t, low, high, sums, scales.alpha, empty | bad, F)
        step += 1
    t = tl.where(bad, float("nan"), tl.where(empty, 0.0, t))
    tl.store(out + spot.line, t, mask=spot.inside)
    if F.PHASE == 1:
        tl.store(own.at, tl.where(marking, 0, -1).to(lists.dtype.element_ty))


@jit_kernel
def best_kernel(
    given, out, position, marks, across, lists, counts, scales, steps, z, F: tl.constexpr
):  # fmt: skip
    """Find the largest score of each row of a tile, and the first key that has it, in one pass.

    Each column of the tile keeps its largest score and where that was. Keys come in their order, so
    a later equal score does not replace an earlier one.
    """
    rows, keys, spot, edges, _ = begin_row_program(given, lists, counts, steps, z, F)
    scales = _scale_scores(scales, F)
    peaks = tl.full((F.ROWS, F.COLS), NEG_INFINITY, tl.float32)
    starts = tl.zeros((F.ROWS, F.COLS), tl.int32)
    for t in tl.range(edges[0], edges[3]):
        s = _tile_scores(t, rows, keys, edges, scales, z, F)
        starts = tl.where(s > peaks, tile_positions(t, keys.at, F.COLS, F)[0], starts)
        peaks = tl.maximum(peaks, s, propagate_nan=tl.PropagateNan.ALL)
    bad = _has_nan_or_inf(peaks)
    top = tl.max(peaks, 1)
    j = starts + tl.arange(0, F.COLS)[None, :]
    first = tl.min(tl.where(peaks == top[:, None], j, LAST_POSITION), 1)
    first = tl.where(bad | (top == NEG_INFINITY), LAST_POSITION, first)
    tl.store(out + spot.line, tl.where(bad, float("nan"), top), mask=spot.inside)
    tl.store(position + spot.line, first, mask=spot.inside)


@triton.jit
def _reorder_sign_bits(x):
    """Map float bits to integers of the same order, and back: the map is its own inverse."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_to_ordered_int(x):
    return _reorder_sign_bits(x.to(tl.int32, bitcast=True))


@triton.jit
def _ordered_int_to_float(bits):
    return _reorder_sign_bits(bits).to(tl.float32, bitcast=True)


@triton.jit
def _bracket_cut(low, high, c: tl.constexpr, look):
    """Return the c-th of BRACKET_PARTS − 1 cuts strictly between two ordered integers."""
    span = (high - low).to(tl.uint32, bitcast=True)
    even = tl.maximum(span // BRACKET_PARTS, 1) * c
    x = _ordered_int_to_float(low)
    share = (tl.minimum(_ordered_int_to_float(high), 3e38) - x) * (c / BRACKET_PARTS)
    spaced = (tl.maximum(_float_to_ordered_int(x + share), low) - low).to(tl.uint32, bitcast=True)
    some = tl.where(look < LINEAR_BRACKET_STEPS, spaced, even)
    some = tl.minimum(tl.maximum(some, 1), tl.maximum(span, 2) - 1)
    return low + some.to(tl.int32, bitcast=True)


@triton.jit
def _narrow_bracket(bracket, cut, above, top_k):
    """Return the narrowed bracket and the counts of scores ≥ its ends; `above` are ≥ the cut."""
    low, high, count, count_high = bracket
    raised = (above >= top_k) & (cut > low)
    lowered = (above < top_k) & (cut < high)
    return (
        tl.where(raised, cut, low),
        tl.where(lowered, cut, high),
        tl.where(raised, above, count),
        tl.where(lowered, above, count_high),
    )


@triton.jit
def _count_fitting_columns(equal, max_ties):
    """Return how many leading columns of a tile hold at most `max_ties` ones, (ROWS,).

    By bisection: a running sum needs more code, and as much shared memory as the keys.
    """
    COLS: tl.constexpr = equal.shape[1]
    column = tl.arange(0, COLS)[None, :]
    fit = max_ties * 0
    step = COLS
    while step > 0:
        ones = tl.sum(tl.where(column < (fit + step)[:, None], equal, 0), 1)
        fit = tl.where(ones <= max_ties, fit + step, fit)
        step = step // 2
    return tl.minimum(fit, COLS)


@jit_kernel
def topk_kernel(
    given, out, position, marks, across, lists, counts, scales, steps, z, top_k,
    F: tl.constexpr,
):  # fmt: skip
    """Find the k-th score of one tile of rows by narrowing a bracket until k scores are ≥ low.

    At least k scores are ≥ low and fewer than k are ≥ high; both are ordered integers of floats. If
    they are neighbours and more than k scores are ≥ low, the k-th score has ties, and the last pass
    finds the position up to which they count. In PHASE 1 that pass sets the bits of
    `support_lists`.
    """
    rows, keys, spot, edges, _ = begin_row_program(given, lists, counts, steps, z, F)
    scales = _scale_scores(scales, F)
    peaks, _, floor, count = _column_maxima(rows, keys, edges, scales, z, F, False, True)
    bad = _has_nan_or_inf(peaks)
    few = count <= top_k
    idle = bad | few
    top = tl.where(idle, 0.0, tl.max(peaks, 1))
    floor = tl.where(idle, 0.0, floor)
    low = _float_to_ordered_int(floor)
    high = _float_to_ordered_int(top) + 1
    # The k-th largest of some scores is a lower bound of the k-th largest of all.
    for look in range(10):
        middle = _bracket_cut(low, high, BRACKET_PARTS // 2, look)
        above = tl.sum((peaks >= _ordered_int_to_float(middle)[:, None]).to(tl.int32), 1) >= top_k
        low = tl.where(above, middle, low)
    count = tl.full((F.ROWS,), z.m, tl.int32) + top_k
    count_high = tl.zeros((F.ROWS,), tl.int32)
    going = 1
    look = 0
    while (going > 0) & (look < MAX_BRACKET_STEPS):
        one = _bracket_cut(low, high, 1, look)
        two = _bracket_cut(low, high, 2, look)
        three = _bracket_cut(low, high, 3, look)
        first, second, third = (
            _ordered_int_to_float(one)[:, None],
            _ordered_int_to_float(two)[:, None],
            _ordered_int_to_float(three)[:, None],
        )
        above_one = tl.zeros((F.ROWS,), tl.int32)
        above_two = tl.zeros((F.ROWS,), tl.int32)
        above_three = tl.zeros((F.ROWS,), tl.int32)
        for tile in tl.range(edges[0], edges[3]):
            s = _tile_scores(tile, rows, keys, edges, scales, z, F)
            if F.COLS < COUNT_FIELD_SIZE:
                three_counts = tl.where(s >= first, 1, 0)
                three_counts += tl.where(s >= second, COUNT_FIELD_SIZE, 0)
                three_counts += tl.where(s >= third, COUNT_FIELD_SIZE * COUNT_FIELD_SIZE, 0)
                tile_counts = tl.sum(three_counts, 1)
                above_one += tile_counts % COUNT_FIELD_SIZE
                above_two += tile_counts // COUNT_FIELD_SIZE % COUNT_FIELD_SIZE
                above_three += tile_counts // (COUNT_FIELD_SIZE * COUNT_FIELD_SIZE)
            else:
                above_one += tl.sum((s >= first).to(tl.int32), 1)
                above_two += tl.sum((s >= second).to(tl.int32), 1)
                above_three += tl.sum((s >= third).to(tl.int32), 1)
        bracket = (low, high, count, count_high)
        bracket = _narrow_bracket(bracket, one, above_one, top_k)
        bracket = _narrow_bracket(bracket, two, above_two, top_k)
        low, high, count, count_high = _narrow_bracket(bracket, three, above_three, top_k)
        unsure = (count != top_k) & (high - low != 1) & (idle == 0)
        going = tl.max(unsure.to(tl.int32), 0)
        look += 1

    foot = _ordered_int_to_float(low)
    ties = tl.max(((count != top_k) & (idle == 0)).to(tl.int32), 0)
    max_ties = top_k - count_high
    count = tl.zeros((F.ROWS,), tl.int32)
    seen = tl.zeros((F.ROWS,), tl.int32)
    last = tl.full((F.ROWS,), -1, tl.int32)
    least = tl.full((F.ROWS,), float("inf"), tl.float32)
    below = tl.full((F.ROWS,), NEG_INFINITY, tl.float32)
    if F.PHASE == 1:
        found = tl.full((F.ROWS,), top_k, tl.int32)
        own, marking = _locate_bits(marks, across, lists, spot, edges, found, bad, z, F)
        if marking == 0:
            set_all_bits(own, edges[0], edges[3])
        tl.store(own.at, tl.where(marking, 0, -1).to(lists.dtype.element_ty))
    for tile in tl.range(edges[0], edges[3]):
        s = _tile_scores(tile, rows, keys, edges, scales, z, F)
        above = s >= foot[:, None]
        if F.PHASE == 1:
            if marking:
                set_tile_bits(above | (few[:, None] & (s > NEG_INFINITY)), own, tile, F)
        count += tl.sum(above.to(tl.int32), 1)
        least = tl.minimum(least, tl.min(tl.where(above, s, float("inf")), 1))
        below = tl.maximum(below, tl.max(tl.where(above, NEG_INFINITY, s), 1))
        if ties > 0:
            equal = (s == foot[:, None]).to(tl.int32)
            fit = _count_fitting_columns(equal, max_ties - seen)
            start = tile_positions(tile, keys.at, F.COLS, F)[0]
            last = tl.where(seen <= max_ties, start + fit - 1, last)
            seen += tl.sum(equal, 1)
    # Half way to the next score, so that rounding in another tile shape cannot exclude the k-th.
    half = 0.5 * least + 0.5 * tl.where(below == NEG_INFINITY, least, below)
    half = tl.where((half > below) & (half < least), half, least)
    tied = (count > top_k) & (idle == 0)
    least = tl.where(tied, foot, half)
    least = tl.where(bad, float("nan"), tl.where(few, NEG_INFINITY, least))
    found = tl.where(tied, last, LAST_POSITION)
    tl.store(out + spot.line, least, mask=spot.inside)
    tl.store(position + spot.line, found, mask=spot.inside)
