"""Kernels that search the thresholds of sparse weightings, without an n × m matrix.

Each pass over a row computes the scores s = (scale · φ(q)·ψ(k) + bias(k)) · σ(a(q) + b(k)) again,
tile by tile, with the functions of `forward.pool_kernel`. So all passes compute identical scores.

- entmax: the t with Σⱼ max(0, (alpha − 1) sⱼ − t)^(1/(alpha − 1)) = 1. A sink is one more score.
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
    locate_tile,
    tile_positions,
)
from qkv.engines.triton.tile_functions.records import Scales
from qkv.engines.triton.tile_functions.score_tile import (
    modify_scores,
    power_of,
    sink_scores,
)
from qkv.engines.triton.tile_functions.tiles import (
    LAST_POSITION,
    LOWEST_FLOAT32,
    NEG_INFINITY,
    PARTIAL_SUM_COLUMNS,
    apply_mask_array,
    apply_rule,
    exceeds,
    fold_columns,
    fold_maxima,
    is_positive,
    jit_kernel,
    live_pairs,
)

MAX_NEWTON_STEPS = tl.constexpr(16)
"""The most passes for entmax's threshold. `_column_maxima` starts so close that two suffice."""
MAX_BRACKET_STEPS = tl.constexpr(28)
"""The most passes for the k-th score. The first LINEAR_BRACKET_STEPS split the range of scores, the
others split the range of their bit patterns."""
LINEAR_BRACKET_STEPS = tl.constexpr(8)
MAX_PEAK_STEPS = tl.constexpr(5)
"""The most passes that search the k-th score among the three largest of each column."""
SHARE_OF_PEAKS = tl.constexpr(0.2)
"""Where to cut between the k-th and the largest peak: for a normal distribution, about two thirds
of the k scores are above."""
DECIDED = tl.constexpr(1)
"""The state of a row whose threshold is known; 0 while its peaks are searched."""
DIFFERENT, EQUAL = tl.constexpr(1), tl.constexpr(2)
"""How the k-th peak and the next compare."""
OPEN = tl.constexpr(2)
"""The state of a row whose peaks do not decide its threshold."""
MAX_SCORES_PER_COLUMN = tl.constexpr(8)
"""With more of the k scores in a column than this, on average, one such pass is all there is."""
SAMPLE_DIVISOR = tl.constexpr(4)
"""A search for a large k first looks at one of so many tiles."""
CUT_SPACING = tl.constexpr(0.25)
"""The distance between the three cuts of `_estimate_cut`, as the logarithm of a ratio of ranks."""
MARGIN_OF_RANK = tl.constexpr(12)
"""How many of the k scores `_estimate_cut` leaves below its cut. Its error is about 4."""
MAX_GUESSES = tl.constexpr(3)
"""How often a cut below the k-th score is raised."""
MAX_CERTAIN_RANK = tl.constexpr(14)
"""Up to this rank, the three largest scores of each column nearly always hold all larger ones."""
MAX_RANK_STEPS = tl.constexpr(40)
"""The most halvings of a range of floats: eight of their range, then of their bit patterns."""
BRACKET_PARTS = tl.constexpr(4)
"""A pass for the k-th score counts the scores above BRACKET_PARTS − 1 cuts."""
COUNT_FIELD_SIZE = tl.constexpr(1024)
"""More than the number of keys in a tile, because one integer holds three counts of a row."""


@triton.jit
def _tile_scores(t, rows, keys, edges, scales, z, F, COMPARES: tl.constexpr = True):
    """Return the scores of tile t of the keys, (ROWS, COLS), with −∞ for excluded pairs.

    scales.share multiplies the bias. Partial and full tiles are distinguished at run time: one body
    for both compiles in a third of the time. Without COMPARES, a pair that a float mask excludes
    from a full tile has −∞ only if its dot product is finite.
    """
    start, near = tile_positions(t, keys.at, F.COLS, F)
    j = (start + near)[None, :]
    if F.STORED:
        return tl.load(rows.pairs + (rows.at + j), mask=j < z.m, other=NEG_INFINITY)
    here = tl.minimum(near, z.m - 1 - start)
    x, _ = compute_product(rows, keys, locate_tile(start, keys, z, F), here, F)
    s, _, _ = compute_tile_scores(x, rows, keys, start, here, scales, scales.share, F)
    s = modify_scores(s, rows.b, rows.h, rows.i, j, rows.captured, scales.times, z, F)
    partial = (t < edges[1]) | (t >= edges[2])
    if F.PAIRS:
        inside = j
        if F.LAID:
            read = rows.pairs.load([rows.at, start])
        else:
            inside = live_pairs(rows.i, j, keys.end, keys.layout, keys.spans, z, F)
            there = rows.pairs + start * tl.cast(keys.p_m, tl.int64)
            read = tl.load(there + (rows.at + near[None, :] * keys.p_m), mask=inside, other=0)
        extra, counts = apply_mask_array(read, inside, scales.times, F, False, True)
        if F.PAIRS == 2:
            counts = read.to(tl.float32) > NEG_INFINITY  # `extra` may be clipped
            s = s + extra
        if F.PAIRS == 1 or COMPARES:
            s = tl.where(counts, s, NEG_INFINITY)
        # A descriptor reads 0 outside of the array.
        partial = partial | F.HAS_RULE | F.LAYOUT
    if partial:
        live = live_pairs(rows.i, j, keys.end, keys.layout, keys.spans, z, F)
        live = apply_rule(live, rows.b, rows.h, rows.i, j, rows.captured, z, F)
        if F.PAIRS == 2 and not COMPARES:
            live = live & counts
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
        scales.scale * inner, scales.alpha, scales.times * factor, inner, scales.square_scale,
        scales.sink,
    )  # fmt: skip


@triton.jit
def _without_scale(scales):
    """Return the scales of scores that keep their order without their factor."""
    return Scales(
        1.0, scales.alpha, scales.times, scales.share, scales.square_scale, scales.sink
    )  # fmt: skip


@triton.jit
def _choose_unit(scales, F):
    """Return the unit of entmax's scores, and scales for scores in that unit.

    It saves a multiplication for each pair: by the factor after a score_mod and of a float mask
    (UNIT = 1), or by the scale (2), which must be above 0.
    """
    unit = 1.0
    if F.UNIT == 1:
        unit = scales.times
        less = 1.0 if F.HAS_MOD else 1.0 / unit  # a score_mod needs the scores themselves
        scales = Scales(
            scales.scale * less, scales.alpha, 1.0, scales.share * less, scales.square_scale,
            scales.sink,
        )  # fmt: skip
    elif F.UNIT == 2:
        unit = scales.scale
        scales = _without_scale(scales)
    return unit, scales


@triton.jit
def _column_maxima(rows, keys, edges, scales, z, F, SECOND: tl.constexpr):
    """Return the maxima of every COLS-th score, (ROWS, COLS); SECOND: also the second largest.

    These few scores include the row's largest, so bounds computed from them are tight.
    """
    peaks = tl.full((F.ROWS, F.COLS), NEG_INFINITY, tl.float32)
    second = tl.full((F.ROWS, F.COLS if SECOND else 1), NEG_INFINITY, tl.float32)
    for t in tl.range(edges[0], edges[3]):
        s = _tile_scores(t, rows, keys, edges, scales, z, F, False)
        if SECOND:
            second = tl.maximum(second, tl.minimum(peaks, s))
        peaks = tl.maximum(peaks, s, propagate_nan=tl.PropagateNan.ALL)
    return peaks, second


@triton.jit
def _has_nan_or_inf(peaks):
    """Return whether a row has a score that is NaN or +∞."""
    return tl.sum(tl.where(peaks < float("inf"), 0.0, 1.0), 1) > 0


@triton.jit
def _entmax_powers(r, alpha, POWER: tl.constexpr, FAST: tl.constexpr):
    """Return rᵉ, rᵉ⁻¹ and, for e ≥ 2, rᵉ⁻², for r ≥ 0 and e = 1/(alpha − 1); 0 for r = 0.

    A power 0 is 1 where r > 0, to within 1e-30.
    """
    e = 1.0 / (alpha - 1.0)
    if POWER == 1:
        lean = is_positive(r, FAST)
        return r, lean, lean
    elif POWER == 2:
        return r * r, r, is_positive(r, FAST)
    elif POWER == 3:
        bend = power_of(r, e - 2.0, FAST)
        return bend * r * r, bend * r, bend
    else:
        lean = power_of(r, e - 1.0, FAST)
        return lean * r, lean, lean


@triton.jit
def _newton_step(mass, slope, bend, alpha, POWER: tl.constexpr):
    """Return the next step of t towards ‖r‖ₑ = 1.

    Newton's step is (S₀ − S₀^(1 − 1/e)) / S₁, with S₀ = Σ rᵉ and S₁ = Σ rᵉ⁻¹; it never passes the
    root from below. For e > 2 it is divided by 1 − f·f″/(2f′²), which makes it Halley's: for
    f = ‖r‖ₑ − 1 and S₂ = Σ rᵉ⁻², f·f″/f′² = (e − 1) (1 − S₀^(−1/e)) (S₀S₂ − S₁²) / S₁².
    """
    on = mass > 0
    some = tl.where(on, mass, 1.0)
    slope = tl.where(slope > 0, slope, 1.0)
    if POWER == 1:
        size = 1.0
    elif POWER == 2:
        size = tl.sqrt(some)
    else:
        size = tl.exp2((2.0 - alpha) * tl.log2(some))
    step = (mass - size) / slope
    if POWER == 3:
        spread = tl.maximum(some * bend / (slope * slope) - 1.0, 0.0)
        less = 0.5 * (1.0 / (alpha - 1.0) - 1.0) * (1.0 - size / some) * spread
        # Far from the root this says little, so the step is at most doubled.
        step = step / tl.maximum(1.0 - less, 0.5)
    return tl.where(on, step, 0.0)


@triton.jit
def _sum_powers(peaks, second, t, alpha, F, SECOND: tl.constexpr):
    """Return Σ rᵉ, Σ rᵉ⁻¹ and Σ rᵉ⁻² of these scores."""
    r = tl.maximum(peaks - t[:, None], 0.0)
    some, lean, more = _entmax_powers(r, alpha, F.POWER, F.FAST)
    mass, slope, bend = fold_columns(some), fold_columns(lean), fold_columns(more)
    if SECOND:
        r = tl.maximum(second - t[:, None], 0.0)
        some, lean, more = _entmax_powers(r, alpha, F.POWER, F.FAST)
        mass, slope = mass + fold_columns(some), slope + fold_columns(lean)
        bend = bend + fold_columns(more)
    return tl.sum(mass, 1), tl.sum(slope, 1), tl.sum(bend, 1)


@triton.jit
def _add_sink(mass, slope, bend, t, rows, scales, F):
    """Return the sums of `_sum_powers` with those of the sink."""
    if F.SINK:
        r = tl.maximum(sink_scores(rows, scales, F) * (scales.alpha - 1.0) - t, 0.0)
        some, lean, more = _entmax_powers(r, scales.alpha, F.POWER, F.FAST)
        mass, slope, bend = mass + some, slope + lean, bend + more
    return mass, slope, bend


@triton.jit
def _sum_row_powers(t, unit, rows, keys, edges, scales, own, z, F, MARKED: tl.constexpr):
    """Return Σ rᵉ, Σ rᵉ⁻¹, Σ rᵉ⁻² (for e ≥ 2) and the number of r > 0 of each row.

    The scores are in a unit. MARKED sets the bits of r > 0; without it, the number is left out.
    """
    cut = (t / unit)[:, None]
    mass = tl.zeros((F.ROWS, PARTIAL_SUM_COLUMNS), tl.float32)
    slope = tl.zeros((F.ROWS, PARTIAL_SUM_COLUMNS), tl.float32)
    bend = tl.zeros((F.ROWS, PARTIAL_SUM_COLUMNS), tl.float32)
    count = tl.zeros((F.ROWS, PARTIAL_SUM_COLUMNS), tl.float32)
    for tile in tl.range(edges[0], edges[3]):
        s = _tile_scores(tile, rows, keys, edges, scales, z, F, False)
        r = tl.maximum(s - cut, 0.0)
        some, lean, more = _entmax_powers(r, scales.alpha, F.POWER, F.FAST)
        mass += fold_columns(some)
        slope += fold_columns(lean)
        if F.POWER >= 2:
            bend += fold_columns(more)
        if MARKED:
            count += fold_columns(is_positive(r, F.FAST))
            set_tile_bits(r > 0, own, tile, F)
    mass, slope, bend = tl.sum(mass, 1), tl.sum(slope, 1), tl.sum(bend, 1)
    if F.UNIT > 0:
        if F.POWER == 1:
            mass = mass * unit
        elif F.POWER == 2:
            mass = mass * (unit * unit)
            slope = slope * unit
        else:
            factor = tl.exp2(tl.log2(unit) / (scales.alpha - 1.0))
            mass = mass * factor
            slope = slope * (factor / unit)
            bend = bend * (factor / unit / unit)
    sums = _add_sink(mass, slope, bend, t, rows, scales, F)
    return sums[0], sums[1], sums[2], tl.sum(count, 1)


@triton.jit
def _update_threshold(t, low, high, sums, alpha, idle, F):
    """Return the next t, its bounds, and the largest change of mass of a row."""
    mass, slope, bend, _ = sums
    move = _newton_step(mass, slope, bend, alpha, F.POWER)
    if F.POWER == 2:
        low = tl.where(mass >= 1, t, low)
        high = tl.where(mass <= 1, t, high)
        inside = slope * slope - bend * (mass - 1)
        root = (slope - tl.sqrt(tl.maximum(inside, 0.0))) / tl.maximum(bend, 1.0)
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
    leaves an error of third order, on either side. So do Halley's steps for smaller alpha. For
    larger alpha, Newton's steps leave an error of second order.

    In PHASE 1 the first step sets the bits of `support_lists` if that pays off, and the search
    stops. PHASE 2 continues over the lists.
    """
    if is_skipped(given, lists, z, F):
        return
    rows, keys, spot, edges, _ = begin_row_program(given, lists, counts, steps, z, F)
    unit, scales = _choose_unit(_scale_scores(scales, F), F)
    if F.PHASE == 2:
        t = tl.load(out + spot.line)
        bad = t != t
        empty = bad
        low = t - 1.0  # no weight is above 1
        high = t + 1.0
    else:
        # A pass that sets bits has no registers left for the second largest.
        SECOND: tl.constexpr = F.PHASE == 0
        peaks, second = _column_maxima(rows, keys, edges, scales, z, F, SECOND)
        bad = _has_nan_or_inf(peaks * unit)
        if F.PAIRS == 2 and not F.STORED:
            if tl.max(bad.to(tl.int32), 0) > 0:  # perhaps of excluded pairs: compare all
                edges = (edges[0], edges[3], edges[3], edges[3])
                peaks, second = _column_maxima(rows, keys, edges, scales, z, F, SECOND)
                bad = _has_nan_or_inf(peaks * unit)
        peaks = peaks * unit
        second = second * unit
        top = tl.max(peaks, 1)
        empty = top == NEG_INFINITY
        top = tl.where(empty | bad, 0.0, top)
        if F.SINK:
            top = tl.maximum(top, sink_scores(rows, scales, F) * (scales.alpha - 1.0))
        t = top - 1.0
        for _ in range(3 if F.POWER == 3 else (4 if F.POWER == 2 else 8)):
            mass, slope, bend = _sum_powers(peaks, second, t, scales.alpha, F, SECOND)
            mass, slope, bend = _add_sink(mass, slope, bend, t, rows, scales, F)
            t += _newton_step(mass, slope, bend, scales.alpha, F.POWER)
        t = tl.where(bad, 0.0, t)
        low = t
        high = top
    # A step of this size leaves an error of about its third power, Newton's of its second.
    ROUGH: tl.constexpr = 0.05 if given.query.dtype.element_ty == tl.bfloat16 else 0.02
    NEAR: tl.constexpr = ROUGH if F.POWER >= 2 else 1e-3
    far = 1.0
    step = 0
    last = MAX_NEWTON_STEPS
    if F.PHASE == 1:
        found = tl.sum((peaks > t[:, None]).to(tl.int32), 1)
        own, marking = _locate_bits(marks, across, lists, spot, edges, found, bad, z, F)
        if marking:
            sums = _sum_row_powers(t, unit, rows, keys, edges, scales, own, z, F, True)
            t, low, high, far = _update_threshold(t, low, high, sums, scales.alpha, empty | bad, F)
            # Stop after this pass if the list is certain to fit.
            marking = tl.sum(sums[3], 0) <= z.at_columns - LIST_TILE
            step = 1
        else:
            set_all_bits(own, edges[0], edges[3])
        last = tl.where(marking, 0, MAX_NEWTON_STEPS)
    while (far > NEAR) & (step < last):
        sums = _sum_row_powers(t, unit, rows, keys, edges, scales, keys, z, F, False)
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


@triton.jit
def _exclude_lowest(x):
    """Return −∞ where x is about LOWEST_FLOAT32."""
    return tl.where(x < LOWEST_FLOAT32 / 2, NEG_INFINITY, x)


@triton.jit
def _find_column_peaks(cut, rows, keys, edges, last, scales, z, F):
    """Return the three largest scores of every column, the largest other score of each row (or a
    bound of it), and the number of scores of each row.

    A column is every COLS-th score, so the peaks are (ROWS, COLS). With a cut, they are the largest
    that are not above it, and the number is of the scores above it. Without one, the number is of
    the scores that are not −∞, or that of the keys if no pair is excluded.
    """
    EXCLUDES: tl.constexpr = F.STORED or F.PAIRS or F.HAS_RULE or F.HAS_MOD or F.BIAS or F.LAYOUT
    COUNTED: tl.constexpr = EXCLUDES or F.LOWER or F.UPPER or F.TILED or F.SPANS
    first = tl.full((F.ROWS, F.COLS), NEG_INFINITY, tl.float32)
    second = tl.full((F.ROWS, F.COLS), NEG_INFINITY, tl.float32)
    third = tl.full((F.ROWS, F.COLS), NEG_INFINITY, tl.float32)
    hidden = tl.full((F.ROWS, PARTIAL_SUM_COLUMNS), NEG_INFINITY, tl.float32)
    count = tl.zeros((F.ROWS, PARTIAL_SUM_COLUMNS), tl.float32)
    scale = 1.0
    if cut is None and F.UNIT == 2:
        scale = scales.scale
        scales = _without_scale(scales)
    for t in tl.range(edges[0], last):
        s = _tile_scores(t, rows, keys, edges, scales, z, F)
        if cut is not None:
            high = tl.broadcast_to(cut[:, None], s.shape)
            more = exceeds(s, high, F.FAST)
            count += fold_columns(more)
            if F.FAST:  # one instruction, where a choice takes two that are half as fast
                s = s + more * LOWEST_FLOAT32
            else:
                s = tl.where(s > high, NEG_INFINITY, s)
        elif COUNTED:
            count += fold_columns(tl.where(s > NEG_INFINITY, 1.0, 0.0))
        less = tl.minimum(first, s)
        first = tl.maximum(first, s, propagate_nan=tl.PropagateNan.ALL)
        least = tl.minimum(second, less)
        second = tl.maximum(second, less)
        if F.HIDES:
            hidden = tl.maximum(hidden, fold_maxima(tl.minimum(third, least)))
        third = tl.maximum(third, least)
    total = tl.sum(count, 1).to(tl.int32)
    if cut is None and not COUNTED:
        total += keys.end
    if cut is None and F.UNIT == 2:
        first, second = first * scale, second * scale
        third, hidden = third * scale, hidden * scale
    if cut is not None and F.FAST:
        first, second = _exclude_lowest(first), _exclude_lowest(second)
        third, hidden = _exclude_lowest(third), _exclude_lowest(hidden)
    if F.HIDES:
        others = tl.max(hidden, 1)
    else:  # no other score is larger than the least peak of its column
        others = tl.max(third, 1)
    return first, second, third, others, total


@triton.jit
def _lowest_finite(x):
    return tl.min(tl.where(x > NEG_INFINITY, x, float("inf")), 1)


@triton.jit
def _count_peaks(first, second, third, cut, FAST: tl.constexpr):
    """Return the number of peaks of each row above the cut."""
    cut = tl.broadcast_to(cut[:, None], first.shape)
    found = exceeds(first, cut, FAST) + exceeds(second, cut, FAST) + exceeds(third, cut, FAST)
    return tl.sum(found, 1).to(tl.int32)


@triton.jit
def _split_peaks(first, second, third, rank, idle, FAST: tl.constexpr):
    """Return the rank-th largest peak of each row, the next lower one, and what is known of them.

    The latter is DIFFERENT, EQUAL, or 0 for idle rows and rows with fewer peaks. The next lower one
    is −∞ if there is none.
    """
    finite = (first > NEG_INFINITY).to(tl.int32)
    count = tl.sum(finite + (second > NEG_INFINITY) + (third > NEG_INFINITY), 1)
    idle = idle | (count < rank)
    wide = tl.sum(finite, 1) < rank
    lowest = _lowest_finite(first)
    lowest = tl.where(wide, tl.minimum(lowest, _lowest_finite(second)), lowest)
    lowest = tl.where(wide, tl.minimum(lowest, _lowest_finite(third)), lowest)
    lowest = tl.where(idle, 0.0, lowest)  # infinite in a row without peaks
    lowest -= tl.abs(lowest) * 1e-6 + 1e-30  # below all peaks, also if they are 0
    low = _float_to_ordered_int(lowest)
    high = _float_to_ordered_int(tl.where(idle, 0.0, tl.max(first, 1)))
    count = rank * 0
    count_high = count
    # Triton 3.6 fails on a loop with a condition that the loop itself does not use.
    left = MAX_RANK_STEPS
    while left > 0:
        middle = _bracket_cut(low, high, BRACKET_PARTS // 2, 0 - left + MAX_RANK_STEPS)
        found = _count_peaks(first, second, third, _ordered_int_to_float(middle), FAST)
        pending = (count != rank) & (count_high != rank - 1)
        over = pending & (found < rank)
        high = tl.where(over, middle, high)
        count_high = tl.where(over, found, count_high)
        low = tl.where(pending & (found >= rank), middle, low)
        count = tl.where(pending & (found >= rank), found, count)
        unsure = (count != rank) & (count_high != rank - 1) & (high - low > 1) & (idle == 0)
        left = tl.where(tl.max(unsure.to(tl.int32), 0) > 0, left - 1, 0)
    # If rank − 1 peaks are above `high`, the next one is the largest of the others.
    near = (count != rank) & (count_high == rank - 1)
    cut = tl.broadcast_to(_ordered_int_to_float(high)[:, None], first.shape)
    next_peak = tl.where(first > cut, NEG_INFINITY, first)
    next_peak = tl.maximum(next_peak, tl.where(second > cut, NEG_INFINITY, second))
    next_peak = tl.max(tl.maximum(next_peak, tl.where(third > cut, NEG_INFINITY, third)), 1)
    next_peak = tl.where(near & (next_peak > NEG_INFINITY), next_peak, 0.0)
    low = tl.where(near, _float_to_ordered_int(next_peak) - 1, low)
    found = _count_peaks(first, second, third, _ordered_int_to_float(low), FAST)
    count = tl.where(near, found, count)
    cut = tl.broadcast_to(_ordered_int_to_float(low)[:, None], first.shape)
    infinite = tl.full(first.shape, float("inf"), tl.float32)
    least = tl.where(first > cut, first, infinite)
    least = tl.minimum(least, tl.where(second > cut, second, infinite))
    least = tl.min(tl.minimum(least, tl.where(third > cut, third, infinite)), 1)
    after = tl.where(first > cut, NEG_INFINITY, first)
    after = tl.maximum(after, tl.where(second > cut, NEG_INFINITY, second))
    after = tl.max(tl.maximum(after, tl.where(third > cut, NEG_INFINITY, third)), 1)
    return least, after, tl.where(idle, 0, tl.where(count == rank, DIFFERENT, EQUAL))


@triton.jit
def _choose_rank(wanted, COLS: tl.constexpr):
    """Return the rank of a peak that fewer than `wanted` scores are nearly certain to exceed.

    The peaks leave out the fourth of a column. The formula is fitted to scores in random columns,
    so that less than one row of 100,000 has `wanted` or more scores above that peak.
    """
    load = wanted.to(tl.float32) / COLS
    less = (wanted.to(tl.float32) / (1.2 + 0.04 * load * load)).to(tl.int32)
    return tl.where(wanted <= MAX_CERTAIN_RANK, wanted, tl.maximum(less, 1))


COUNT_PTX = tl.constexpr("""
{{
    .reg .b32 many, less, more;
    mov.b32 many, 0x6C006C00;
    mov.b32 less, {0};
    fma.rn.sat.f16x2 more, $1, many, less;
    add.rn.f16x2 $0, $2, more;
}}
""")
# The bits of 4096 times the negative cut, twice.
COUNT_A_PTX = tl.constexpr(COUNT_PTX.value.format("0x64006400"))
COUNT_B_PTX = tl.constexpr(COUNT_PTX.value.format("0x00000000"))
COUNT_C_PTX = tl.constexpr(COUNT_PTX.value.format("0xE400E400"))


@triton.jit
def _add_counts(counts, y, CUT: tl.constexpr, PTX: tl.constexpr, FAST: tl.constexpr):
    """Return counts + 1 where y > CUT, in float16.

    FAST computes two at a time, as (y − CUT) · 4096 limited to 0 … 1.
    """
    if FAST:
        return tl.inline_asm_elementwise(
            PTX, "=r,r,r", [y, counts], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return counts + tl.where(y > CUT, 1.0, 0.0).to(tl.float16)


@triton.jit
def _sum_counts(counts):
    return tl.sum(fold_columns(counts.to(tl.float32)), 1)


@triton.jit
def _interpolate(cut, count, lower_cut, lower_count, wanted):
    """Return the cut above which there are `wanted` scores, on a line in the count's logarithm."""
    fall = tl.maximum(lower_count - count, 1e-3)
    return lower_cut + tl.minimum((lower_count - wanted) / fall, 4.0) * (cut - lower_cut)


@triton.jit
def _estimate_cut(rows, keys, edges, scales, z, top_k, F):
    """Return a cut above which there are a few less than k scores; the largest score of each
    column; how much to raise the cut if they are more; and the number of scores of each row.

    The k-th score is first estimated from a sample. Then all scores are counted above three cuts
    around it, in float16. So the result is no more than a good guess.
    """
    EXCLUDES: tl.constexpr = F.STORED or F.PAIRS or F.HAS_RULE or F.HAS_MOD or F.BIAS or F.LAYOUT
    COUNTED: tl.constexpr = EXCLUDES or F.LOWER or F.UPPER or F.TILED or F.SPANS
    first = tl.full((F.ROWS, F.COLS), NEG_INFINITY, tl.float32)
    second = tl.full((F.ROWS, F.COLS), NEG_INFINITY, tl.float32)
    third = tl.full((F.ROWS, F.COLS), NEG_INFINITY, tl.float32)
    scale = 1.0
    if F.UNIT == 2:
        scale = scales.scale
        scales = _without_scale(scales)
    for t in tl.range(edges[0], edges[3], SAMPLE_DIVISOR):
        s = _tile_scores(t, rows, keys, edges, scales, z, F)
        less = tl.minimum(first, s)
        first = tl.maximum(first, s)
        least = tl.minimum(second, less)
        second = tl.maximum(second, less)
        third = tl.maximum(third, least)
    tiles = edges[3] - edges[0]
    share = ((tiles + SAMPLE_DIVISOR - 1) // SAMPLE_DIVISOR).to(tl.float32) / tl.maximum(tiles, 1)
    rank = tl.zeros((F.ROWS,), tl.int32) + tl.maximum((top_k * share + 0.5).to(tl.int32), 2)
    middle, _, _ = _split_peaks(first, second, third, rank, rank < 0, F.FAST)
    middle = tl.where(middle < float("inf"), middle, 0.0)
    # Ranks fall e-fold about every `unit`; 1.3 is the factor of a normal distribution.
    unit = (tl.max(first, 1) - middle) * (1.3 / tl.log(rank.to(tl.float32)))
    unit = tl.maximum(unit, tl.abs(middle) * 1e-6 + 1e-20)
    unit = tl.where(unit < float("inf"), unit, 1.0)
    factor = (1.0 / unit)[:, None]
    offset = (middle / unit)[:, None]
    counts_a = tl.zeros((F.ROWS, F.COLS), tl.float16)
    counts_b = tl.zeros((F.ROWS, F.COLS), tl.float16)
    counts_c = tl.zeros((F.ROWS, F.COLS), tl.float16)
    first = tl.full((F.ROWS, F.COLS), NEG_INFINITY, tl.float32)
    count = tl.zeros((F.ROWS, PARTIAL_SUM_COLUMNS), tl.float32)
    for t in tl.range(edges[0], edges[3]):
        s = _tile_scores(t, rows, keys, edges, scales, z, F)
        if COUNTED:
            count += fold_columns(tl.where(s > NEG_INFINITY, 1.0, 0.0))
        first = tl.maximum(first, s, propagate_nan=tl.PropagateNan.ALL)
        y = (s * factor - offset).to(tl.float16)
        counts_a = _add_counts(counts_a, y, -CUT_SPACING, COUNT_A_PTX, F.FAST)
        counts_b = _add_counts(counts_b, y, 0.0, COUNT_B_PTX, F.FAST)
        counts_c = _add_counts(counts_c, y, CUT_SPACING, COUNT_C_PTX, F.FAST)
    total = tl.sum(count, 1).to(tl.int32)
    if not COUNTED:
        total += keys.end
    a = tl.log(tl.maximum(_sum_counts(counts_a), 0.5))
    b = tl.log(tl.maximum(_sum_counts(counts_b), 0.5))
    c = tl.log(tl.maximum(_sum_counts(counts_c), 0.5))
    wanted = tl.log(top_k * 1.0 - MARGIN_OF_RANK)
    at = _interpolate(0.0, b, -CUT_SPACING, a, wanted)
    at = tl.where(b > wanted, _interpolate(CUT_SPACING, c, 0.0, b, wanted), at)
    cut = (middle + at * unit) * scale
    return cut, first * scale, (unit * scale) * (3.0 * MARGIN_OF_RANK) / top_k, total


@triton.jit
def _half_way(least, below):
    """Return a number in (below, least], half way if that is possible.

    So rounding in another tile shape cannot exclude `least`.
    """
    half = 0.5 * least + 0.5 * tl.where(below == NEG_INFINITY, least, below)
    return tl.where((half > below) & (half < least), half, least)


@triton.jit
def _lowest_scores(rows, keys, edges, last, scales, z, F):
    """Return the lowest score of each row that is not −∞, up to the `last` tile of keys."""
    lowest = tl.full((F.ROWS,), float("inf"), tl.float32)
    for t in tl.range(edges[0], last):
        s = _tile_scores(t, rows, keys, edges, scales, z, F)
        lowest = tl.minimum(lowest, _lowest_finite(s))
    return lowest


@jit_kernel
def topk_kernel(
    given, out, position, marks, across, lists, counts, scales, steps, z, top_k,
    F: tl.constexpr,
):  # fmt: skip
    """Find the k-th score of one tile of rows among the largest scores of its columns.

    A pass keeps the three largest scores of each column, and the largest of all others. Peaks above
    that one are the largest scores of the row. If they are k or more, the k-th of them is the k-th
    score. Otherwise the next pass counts the c scores above a cut at a smaller rank, and keeps the
    peaks that are not above it. It is nearly certain that c < k, and the k − c scores that are left
    to find are few. A large k needs several such passes.

    Rows that this does not decide narrow a bracket until k scores are ≥ low: at least k scores are
    ≥ low and fewer than k are ≥ high; both are ordered integers of floats. If they are neighbours
    and more than k scores are ≥ low, the k-th score has ties, and the last pass finds the position
    up to which they count. In PHASE 1 that pass sets the bits of `support_lists`.
    """
    rows, keys, spot, edges, _ = begin_row_program(given, lists, counts, steps, z, F)
    scales = _scale_scores(scales, F)
    none = tl.zeros((F.ROWS,), tl.int32)
    last_tile = edges[3]
    if F.SAMPLED:
        guess, first, raise_by, total = _estimate_cut(rows, keys, edges, scales, z, top_k, F)
        second = first
        third = first
        hidden = tl.max(first, 1)
        guesses = none + MAX_GUESSES
    else:
        first, second, third, hidden, total = _find_column_peaks(
            None, rows, keys, edges, last_tile, scales, z, F
        )
    bad = _has_nan_or_inf(first)
    few = (total <= top_k) & (bad == 0)
    found = tl.where(bad, float("nan"), NEG_INFINITY)
    state = (bad | few).to(tl.int32)
    highest = tl.where(bad, float("nan"), tl.max(first, 1))
    top = tl.where(state > 0, 0.0, highest)
    cut = top
    foot = tl.full((F.ROWS,), NEG_INFINITY, tl.float32)
    count_high = none
    left = tl.where(top_k <= MAX_SCORES_PER_COLUMN * F.COLS, MAX_PEAK_STEPS, 1)
    while left > 0:
        wanted = tl.maximum(top_k - count_high, 1)
        rank = _choose_rank(wanted, F.COLS)
        if F.HIDES:
            known = _count_peaks(first, second, third, hidden, F.FAST)
            rank = tl.where(known < wanted, tl.maximum(rank, known), wanted)
        idle = state > 0
        if F.SAMPLED:  # a row that guesses has no peaks yet
            idle = idle | (guesses > 0)
        least, after, split = _split_peaks(first, second, third, rank, idle, F.FAST)
        below = tl.maximum(after, hidden) if F.HIDES else after  # the next lower score
        half = _half_way(least, below)  # or `least`, if the two are neighbouring floats
        sure = (split == DIFFERENT) & (rank == wanted) & (hidden < least)
        # If the k-th score has ties, a cut at that score confirms it.
        tied = (split == EQUAL) & (rank == wanted) & (least == cut)
        lower = tl.where(half < least, half, after)
        if F.HIDES:
            upper = hidden
        else:
            base = tl.where(split == 0, 0.0, least)  # infinite in a row without peaks
            upper = base + SHARE_OF_PEAKS * (tl.max(first, 1) - base)
        cut = tl.where(split == EQUAL, least, tl.where(rank == wanted, upper, lower))
        if F.SAMPLED:
            sure = sure & (guesses == 0)
            tied = tied & (guesses == 0)
            split = tl.where(guesses == 0, split, DIFFERENT)
            cut = tl.where(guesses == 0, cut, guess)
        found = tl.where(sure, half, found)
        foot = tl.where(tied, least, foot)
        next_state = tl.where(sure, DECIDED, tl.where(tied | (split == 0), OPEN, 0))
        state = tl.where(state > 0, state, next_state)
        left = tl.where(tl.max((state == 0).to(tl.int32), 0) > 0, left - 1, 0)
        last_tile = tl.where(left > 0, edges[3], edges[0])  # no tiles after the last look
        first, second, third, hidden, above = _find_column_peaks(
            cut, rows, keys, edges, last_tile, scales, z, F
        )
        seen = (state == 0) & (left > 0)
        hit = seen & (above == top_k)
        # The next float: scores equal to the cut do not count. −0.0 + 0.0 = 0.0.
        found = tl.where(hit, _ordered_int_to_float(_float_to_ordered_int(cut + 0.0) + 1), found)
        top = tl.where(seen & (above < top_k), cut, top)
        count_high = tl.where(seen & (above < top_k), above, count_high)
        over = seen & (above > top_k)
        if F.SAMPLED:
            again = over & (guesses > 1)
            over = over & (again == 0)
            guess = cut + raise_by
            raise_by *= 4.0
            guesses = tl.where(again, guesses - 1, 0)
        state = tl.where(hit, DECIDED, tl.where(over, OPEN, state))

    # From here, a loop for which no row is left has no tiles.
    idle = state == DECIDED
    pending = tl.max((idle == 0).to(tl.int32), 0)
    last_tile = tl.where(pending > 0, edges[3], edges[0])
    lowest = _lowest_scores(rows, keys, edges, last_tile, scales, z, F)
    low = _float_to_ordered_int(tl.where(idle, 0.0, tl.maximum(lowest, foot)))
    high = _float_to_ordered_int(tl.where(idle, 0.0, top)) + 1
    count = none + (z.m + top_k)
    going = pending
    look = 0
    while (going > 0) & (look < MAX_BRACKET_STEPS):
        one = _bracket_cut(low, high, 1, look)
        two = _bracket_cut(low, high, 2, look)
        three = _bracket_cut(low, high, 3, look)
        cuts = (
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
                three_counts = tl.where(s >= cuts[0], 1, 0)
                three_counts += tl.where(s >= cuts[1], COUNT_FIELD_SIZE, 0)
                three_counts += tl.where(s >= cuts[2], COUNT_FIELD_SIZE * COUNT_FIELD_SIZE, 0)
                tile_counts = tl.sum(three_counts, 1)
                above_one += tile_counts % COUNT_FIELD_SIZE
                above_two += tile_counts // COUNT_FIELD_SIZE % COUNT_FIELD_SIZE
                above_three += tile_counts // (COUNT_FIELD_SIZE * COUNT_FIELD_SIZE)
            else:
                above_one += tl.sum((s >= cuts[0]).to(tl.int32), 1)
                above_two += tl.sum((s >= cuts[1]).to(tl.int32), 1)
                above_three += tl.sum((s >= cuts[2]).to(tl.int32), 1)
        bracket = (low, high, count, count_high)
        bracket = _narrow_bracket(bracket, one, above_one, top_k)
        bracket = _narrow_bracket(bracket, two, above_two, top_k)
        low, high, count, count_high = _narrow_bracket(bracket, three, above_three, top_k)
        unsure = (count != top_k) & (high - low != 1) & (idle == 0)
        going = tl.max(unsure.to(tl.int32), 0)
        look += 1

    threshold = found
    last = none + LAST_POSITION
    if F.PHASE == 1:
        own, marking = _locate_bits(marks, across, lists, spot, edges, none + top_k, bad, z, F)
        if marking == 0:
            set_all_bits(own, edges[0], edges[3])
        tl.store(own.at, tl.where(marking, 0, -1).to(lists.dtype.element_ty))
        last_tile = tl.where((pending > 0) | marking, edges[3], edges[0])
    foot = tl.where(idle, threshold, _ordered_int_to_float(low))
    ties = tl.max(((count != top_k) & (idle == 0)).to(tl.int32), 0)
    max_ties = top_k - count_high
    count = none
    seen = none
    end = none - 1
    least = tl.full((F.ROWS,), float("inf"), tl.float32)
    below = tl.full((F.ROWS,), NEG_INFINITY, tl.float32)
    for tile in tl.range(edges[0], last_tile):
        s = _tile_scores(tile, rows, keys, edges, scales, z, F)
        high_enough = s >= foot[:, None]
        if F.PHASE == 1:
            if marking:
                set_tile_bits(high_enough & (s > NEG_INFINITY), own, tile, F)
        if pending > 0:
            count += tl.sum(high_enough.to(tl.int32), 1)
            least = tl.minimum(least, tl.min(tl.where(high_enough, s, float("inf")), 1))
            below = tl.maximum(below, tl.max(tl.where(high_enough, NEG_INFINITY, s), 1))
        if ties > 0:
            equal = (s == foot[:, None]).to(tl.int32)
            fit = _count_fitting_columns(equal, max_ties - seen)
            start = tile_positions(tile, keys.at, F.COLS, F)[0]
            end = tl.where(seen <= max_ties, start + fit - 1, end)
            seen += tl.sum(equal, 1)
    tied = (count > top_k) & (idle == 0)
    least = tl.where(tied, foot, _half_way(least, below))
    threshold = tl.where(idle, threshold, least)
    last = tl.where(tied, end, last)
    lines = tl.num_programs(0) // ((z.n + F.ROWS - 1) // F.ROWS) * tl.cast(z.n, tl.int64)
    tl.store(out + spot.line, threshold, mask=spot.inside)
    tl.store(out + lines + spot.line, highest, mask=spot.inside)
    tl.store(position + spot.line, last, mask=spot.inside)
