"""What a sparse weighting must know of a row before its values are pooled: no n × m matrix.

Scores s = (scale · φ(q)·ψ(k) + bias(k)) · σ(a(q) + b(k)) are computed again for each look at the
row, tile by tile, by the functions of `forward.pool_kernel`: so they are equal to the last bit.

- entmax: the t with Σⱼ max(0, (alpha − 1) sⱼ − t)^(1/(alpha − 1)) = 1.
- top-k: the k-th largest score, and up to which position its equals count.
"""

# One `if` is decided when compiling, the one inside it on the device.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from qkv.engines.triton.program import (
    begin_row_program,
    compute_product,
    compute_tile_scores,
    is_skipped,
    tile_positions,
)
from qkv.engines.triton.records import Scales
from qkv.engines.triton.support_lists import (
    LIST_SHARE_DIVISOR,
    LIST_TILE,
    BitPointers,
    set_all_bits,
    set_tile_bits,
)
from qkv.engines.triton.tiles import (
    NEG_INFINITY,
    PARTIAL_SUM_COLUMNS,
    apply_mask_array,
    fold_columns,
    jit_kernel,
    live_pairs,
)

MAX_NEWTON_STEPS = tl.constexpr(16)
"""Looks at the row for entmax's threshold. From the start that `_column_maxima` gives, one or two
do."""
MAX_BRACKET_STEPS = tl.constexpr(28)
"""Looks for the k-th score: those before SPACED split the range of scores, the rest their bits."""
LINEAR_BRACKET_STEPS = tl.constexpr(8)
BRACKET_PARTS = tl.constexpr(4)
"""A look for the k-th score counts the scores above CUTS − 1 cuts."""
COUNT_FIELD_SIZE = tl.constexpr(1024)
"""More than the keys of a tile: the three counts of a row of it stand in one integer."""
LAST_POSITION = tl.constexpr(2**31 - 1)
"""The position behind all others."""


@triton.jit
def _tile_scores(t, rows, keys, edges, scales, z, F):
    """Scores of tile t of the keys, (ROWS, COLS), −∞ where a pair does not count.

    The `share` of the scales multiplies the bias. A tile that counts in part is told from a whole
    one when the kernel runs: one body for both compiles in a third of the time.
    """
    start, near = tile_positions(t, keys.at, F.COLS, F)
    j = (start + near)[None, :]
    here = tl.minimum(near, z.m - 1 - start)
    x, _ = compute_product(rows, keys, start, here, F)
    s, _, _ = compute_tile_scores(x, rows, keys, start, here, scales.scale, scales.share, F)
    if F.PAIRS:
        live = live_pairs(rows.i, j, keys.end, keys.layout, z, F)
        there = rows.pairs + start * tl.cast(keys.p_m, tl.int64)
        read = tl.load(there + (rows.at + near[None, :] * keys.p_m), mask=live, other=0)
        extra, live = apply_mask_array(read, live, scales.times, F, True)
        if F.PAIRS == 2:
            s = s + extra
        s = tl.where(live, s, NEG_INFINITY)
    elif (t < edges[1]) | (t >= edges[2]):
        s = tl.where(live_pairs(rows.i, j, keys.end, keys.layout, z, F), s, NEG_INFINITY)
    return s


@triton.jit
def _column_maxima(rows, keys, edges, scales, z, F, SECOND: tl.constexpr, COUNT: tl.constexpr):
    """The largest of every COLS-th score, (ROWS, COLS), if SECOND the second largest too, and if
    COUNT the lowest score of the row and how many there are.

    They are a few of the scores, but the row's large ones: a bound from them is near the truth.
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
    """Whether a row has a score that is NaN or +∞."""
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
    """rᵉ and rᵉ⁻¹ for r ≥ 0, e = 1/(alpha − 1), and 0 for r = 0."""
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
    """The step of t that solves ‖r‖ₑ = 1 were it linear, which never passes the root from below."""
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
    """Σ rᵉ and Σ rᵉ⁻¹ of these scores."""
    some, lean = _entmax_powers(tl.maximum(peaks - t[:, None], 0.0), alpha, F.POWER, F.FAST)
    mass, slope = fold_columns(some), fold_columns(lean)
    if SECOND:
        some, lean = _entmax_powers(tl.maximum(second - t[:, None], 0.0), alpha, F.POWER, F.FAST)
        mass, slope = mass + fold_columns(some), slope + fold_columns(lean)
    return tl.sum(mass, 1), tl.sum(slope, 1)


@triton.jit
def _sum_row_powers(t, rows, keys, edges, scales, own, z, F, MARKED: tl.constexpr):
    """Σ rᵉ, Σ rᵉ⁻¹ and how many r > 0 there are, of each row; MARKED sets the bits of these."""
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
    """The next t, its bounds, and how far the slowest row has moved."""
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
    """Where a tile of rows has its list and its bits, of keys and of queries, and whether they are
    set: not if a row is bad, or the rows have `found` more scores than a share of their keys."""
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
    given, out, marks, across, lists, scales, steps, z, F: tl.constexpr
):  # fmt: skip
    """One tile of rows: a first look for the start, then steps until the slowest row is there.

    With few powers the mass of the row is known exactly as long as the same scores count. At
    alpha = 1.5 it is a quadratic in t, whose root leaves an error of third order, on either side;
    else Newton's steps leave one of second order.

    In PHASE 1 the first look sets the bits of `support_lists` where that pays; no other is taken:
    those follow in PHASE 2, over the lists of these.
    """
    if is_skipped(given, lists, z, F):
        return
    rows, keys, spot, edges, _ = begin_row_program(given, lists, None, steps, z, F)
    slim = scales.alpha - 1.0
    scales = Scales(scales.scale * slim, scales.alpha, scales.times * slim, slim)
    if F.PHASE == 2:
        t = tl.load(out + spot.line)
        bad = t != t
        empty = bad
        low = t - 1.0  # all weights are in it, as none is above 1
        high = t + 1.0
    else:
        # Where the first look sets bits, the registers of the second largest are wanted for those.
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
    # A step of this size leaves an error of the mass of about its third power (of a quadratic).
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
            # The first look alone, if what it found is sure to fit.
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
    tl.store(out + spot.line, t)
    if F.PHASE == 1:
        tl.store(own.at, tl.where(marking, 0, -1).to(lists.dtype.element_ty))


@triton.jit
def _reorder_sign_bits(x):
    """An integer for each float, in the same order, and back: its own inverse but for the type."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_to_ordered_int(x):
    return _reorder_sign_bits(x.to(tl.int32, bitcast=True))


@triton.jit
def _ordered_int_to_float(bits):
    return _reorder_sign_bits(bits).to(tl.float32, bitcast=True)


@triton.jit
def _bracket_cut(low, high, c: tl.constexpr, look):
    """The c-th of CUTS − 1 cuts between two images, as an image strictly between them."""
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
    """The bracket low, high with how many scores are ≥ each, once so many are ≥ the cut."""
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
def _count_fitting_columns(equal, room):
    """How many columns of the tile have no more 1s than there is room for, (ROWS,).

    By halves: a running sum along the row needs more code, and as much fast memory as the keys.
    """
    COLS: tl.constexpr = equal.shape[1]
    column = tl.arange(0, COLS)[None, :]
    fit = room * 0
    step = COLS
    while step > 0:
        ones = tl.sum(tl.where(column < (fit + step)[:, None], equal, 0), 1)
        fit = tl.where(ones <= room, fit + step, fit)
        step = step // 2
    return tl.minimum(fit, COLS)


@jit_kernel
def topk_kernel(
    given, out, position, marks, across, lists, scales, steps, z, top_k, F: tl.constexpr
):  # fmt: skip
    """One tile of rows: a bracket of the k-th score, cut in CUTS until k scores are above its foot.

    At least k scores are ≥ low and fewer than k are ≥ high, both images of floats. Where the two
    are neighbours and more than k scores are ≥ low, the k-th has equals, and the last look finds
    the position up to which they count. In PHASE 1 that look sets the bits of `support_lists`.
    """
    rows, keys, spot, edges, _ = begin_row_program(given, lists, None, steps, z, F)
    scales = Scales(scales.scale, scales.alpha, scales.times, 1.0)
    peaks, _, floor, count = _column_maxima(rows, keys, edges, scales, z, F, False, True)
    bad = _has_nan_or_inf(peaks)
    few = count <= top_k
    idle = bad | few
    top = tl.where(idle, 0.0, tl.max(peaks, 1))
    floor = tl.where(idle, 0.0, floor)
    low = _float_to_ordered_int(floor)
    high = _float_to_ordered_int(top) + 1
    # The k-th largest of some scores is a bound of that of all.
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
            three_counts = tl.where(s >= first, 1, 0)
            three_counts += tl.where(s >= second, COUNT_FIELD_SIZE, 0)
            three_counts += tl.where(s >= third, COUNT_FIELD_SIZE * COUNT_FIELD_SIZE, 0)
            counts = tl.sum(three_counts, 1)
            above_one += counts % COUNT_FIELD_SIZE
            above_two += counts // COUNT_FIELD_SIZE % COUNT_FIELD_SIZE
            above_three += counts // (COUNT_FIELD_SIZE * COUNT_FIELD_SIZE)
        bracket = (low, high, count, count_high)
        bracket = _narrow_bracket(bracket, one, above_one, top_k)
        bracket = _narrow_bracket(bracket, two, above_two, top_k)
        low, high, count, count_high = _narrow_bracket(bracket, three, above_three, top_k)
        unsure = (count != top_k) & (high - low != 1) & (idle == 0)
        going = tl.max(unsure.to(tl.int32), 0)
        look += 1

    foot = _ordered_int_to_float(low)
    ties = tl.max(((count != top_k) & (idle == 0)).to(tl.int32), 0)
    room = top_k - count_high
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
            fit = _count_fitting_columns(equal, room - seen)
            last = tl.where(seen <= room, tile * F.COLS + fit - 1, last)
            seen += tl.sum(equal, 1)
    # Half way to the next score: so another tile's rounding cannot shut the k-th out.
    half = 0.5 * least + 0.5 * tl.where(below == NEG_INFINITY, least, below)
    half = tl.where((half > below) & (half < least), half, least)
    tied = (count > top_k) & (idle == 0)
    least = tl.where(tied, foot, half)
    least = tl.where(bad, float("nan"), tl.where(few, NEG_INFINITY, least))
    found = tl.where(tied, last, LAST_POSITION)
    tl.store(out + spot.line, least)
    tl.store(position + spot.line, found)
