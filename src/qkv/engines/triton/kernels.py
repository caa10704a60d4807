"""out = Σⱼ α(s)ᵢⱼ vⱼ  with  s = (scale · φ(q)·ψ(k) + bias(k)) · σ(a(q) + b(k)), in tiles.

This file knows pointers; `ops.py` knows arrays. Five kernels do the work: `pool` the sum, `merge`
its parts when the keys were split, `to_keys` and `to_queries` the two halves of the gradient, and
`inner` what the latter two need of each row first. `mend` and `mend_queries` do over what another
kernel got wrong. No kernel uses atomics: a sum has one program.

Names that recur: i and j are positions of queries and keys, expanded so that they broadcast to a
tile; a *pair* is one batch and one head of keys, which `group` heads of queries share; tiles of
keys (queries, on the way to the keys) are counted from 0, and `at` lists them for a block layout.
Scores are in base 2 for softmax and top-k, where log₂e is in `scale` and in the bias.
"""

# One `if` is decided when compiling, the one inside it on the device.
# ruff: noqa: SIM102

# Decorators of an untyped library, and arguments that are pointers or tiles.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NONE = tl.constexpr(float("-inf"))
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def bounds(first, last, lower, upper, end, BLOCK: tl.constexpr, LOWER, UPPER):
    """Which tiles the rows first … last may see, if lower ≤ j − i ≤ upper and j < end.

    Some pair counts in tiles lo … hi, and every pair in tiles inner_lo … inner_hi.
    """
    lo = 0
    inner_lo = 0
    hi = (end + BLOCK - 1) // BLOCK
    inner_hi = end // BLOCK
    if LOWER:
        lo = tl.maximum(first + lower, 0) // BLOCK
        inner_lo = (tl.maximum(last + lower, 0) + BLOCK - 1) // BLOCK
    if UPPER:
        hi = tl.minimum(hi, (tl.maximum(last + upper + 1, 0) + BLOCK - 1) // BLOCK)
        inner_hi = tl.minimum(inner_hi, tl.maximum(first + upper + 1, 0) // BLOCK)
    lo = tl.minimum(lo, hi)
    inner_lo = tl.minimum(tl.maximum(inner_lo, lo), hi)
    inner_hi = tl.minimum(tl.maximum(inner_hi, inner_lo), hi)
    return lo, inner_lo, inner_hi, hi


@triton.jit
def clamp(x, lo, hi):
    return tl.minimum(tl.maximum(x, lo), hi)


@triton.jit
def alive(i, j, n, end, lower, upper, layout, size, columns, LOWER, UPPER, LAYOUT):
    """Which pairs of a tile count."""
    live = (i < n) & (j < end)
    if LOWER:
        live = live & (j - i >= lower)
    if UPPER:
        live = live & (j - i <= upper)
    if LAYOUT:
        cell = layout + (i // size) * columns + j // size
        live = live & (tl.load(cell, mask=live, other=0) != 0)
    return live


@triton.jit
def fetch(base, offset, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows at these offsets, (rows, BLOCK), with 0 beyond their width."""
    column = tl.arange(0, BLOCK)[None, :]
    if WIDTH == BLOCK:
        x = tl.load(base + offset[:, None] + column)
    elif WIDTH == 1:
        x = tl.where(column == 0, tl.load(base + offset)[:, None], 0.0)
    else:
        x = tl.load(base + offset[:, None] + column, mask=column < WIDTH, other=0.0)
    return x


@triton.jit
def described(base, rows, step, WIDTH, ROWS: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """A matrix as `rows_at` reads it: a descriptor for the copy engine, or the pointer itself."""
    if TMA:
        source = tl.make_tensor_descriptor(base, [rows, WIDTH], [step, 1], [ROWS, BLOCK])
    else:
        source = base
    return source


@triton.jit
def rows_at(source, start, step, here, WIDTH, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """The tile of rows that begins at `start`; beyond the last row it holds that row, or 0."""
    if TMA:
        x = source.load([start, 0])
    else:
        x = fetch(source + start * step, here * step, WIDTH, BLOCK)
    return x


@triton.jit
def products(
    left,
    left_offset,
    right,
    right_offset,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """left · rightᵀ, (ROWS, COLS), of rows too wide to hold: a chunk of the width at a time."""
    x = tl.zeros((ROWS, COLS), dtype=tl.float32)
    column = tl.arange(0, CHUNK)[None, :]
    for start in tl.range(0, WIDTH, CHUNK):
        if WIDTH % CHUNK == 0:
            a = tl.load(left + start + left_offset[:, None] + column)
            b = tl.load(right + start + right_offset[:, None] + column)
        else:
            inside = start + column < WIDTH
            a = tl.load(left + start + left_offset[:, None] + column, mask=inside, other=0.0)
            b = tl.load(right + start + right_offset[:, None] + column, mask=inside, other=0.0)
        x = tl.dot(a, tl.trans(b), x, input_precision=PRECISION)
    return x


@triton.jit
def products_described(
    left,
    left_start,
    right,
    right_start,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`products` of the rows that begin at these, copied by descriptors."""
    x = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in tl.range(0, WIDTH, CHUNK):
        a = left.load([left_start, start])
        b = right.load([right_start, start])
        x = tl.dot(a, tl.trans(b), x, input_precision=PRECISION)
    return x


@triton.jit
def gate_half(x, FAST: tl.constexpr):
    """A gate's half of the logit as `gate` wants it, so that the pair costs one addition."""
    if FAST:
        return x * 0.5
    return x * -LOG2E


TANH_PAIR = tl.constexpr("""
{
    .reg .b32 pair;
    .reg .b16 low, high;
    cvt.rn.f16x2.f32 pair, $3, $2;
    tanh.approx.f16x2 pair, pair;
    mov.b32 {low, high}, pair;
    cvt.f32.f16 $0, low;
    cvt.f32.f16 $1, high;
}
""")


@triton.jit
def gate(a, b, size, FAST: tl.constexpr):
    """size · σ of the sum of two halves; FAST takes two at a time, right to 11 bits."""
    if FAST:
        t = tl.inline_asm_elementwise(
            TANH_PAIR, "=f,=f,f,f", [a + b], dtype=tl.float32, is_pure=True, pack=2
        )
        half = size * 0.5
        return t * half + half
    return size / (1.0 + tl.exp2(a + b))


@triton.jit
def score(x, scale, bias, a, b, BIAS, GATE, FAST: tl.constexpr):
    """s and, if gated, its slope in φ·ψ; with a bias that without the scale."""
    if GATE and not BIAS:
        steep = gate(a, b, scale, FAST)
        s = x * steep
    else:
        s = x * scale
        steep = s
        if BIAS:
            s = s + bias
        if GATE:
            steep = gate(a, b, 1.0, FAST)
            s = s * steep
    return s, steep


@triton.jit
def pull_gate(ds, s, steep, scale, BIAS):
    """From a score's gradient that of the gate's logit, s σ(−logit), and of what is gated."""
    if BIAS:
        shut = 1.0 - steep
    else:
        shut = 1.0 - steep * (1.0 / tl.where(scale == 0, 1.0, scale))
    return ds * s * shut, ds * steep


@triton.jit
def chosen(s, j, least, position):
    """Whether a score is among the k largest; a NaN is not hidden."""
    beyond = least + s
    return (s > least) | ((s == least) & (j <= position)) | (beyond != beyond)


@triton.jit
def excess(s, threshold, alpha, POWER: tl.constexpr):
    """α = r^e and its lean r^(e − 1), where r = max(0, (alpha − 1) s − t), e = 1/(alpha − 1)."""
    r = s * (alpha - 1.0) - threshold
    on = r == r
    on = (r > 0) | (on == 0)
    if POWER == 1:
        return tl.where(on, r, 0.0), tl.where(on, 1.0 + 0.0 * r, 0.0)
    r = tl.where(on, r, 0.0)
    if POWER == 2:
        return r * r, r
    e = 1.0 / (alpha - 1.0)
    depth = tl.log2(tl.where(on, r, 1.0))
    return tl.where(on, tl.exp2(e * depth), 0.0), tl.where(on, tl.exp2((e - 1.0) * depth), 0.0)


@triton.jit
def weigh(
    s,
    j,
    live,
    top,
    share,
    row_a,
    row_b,
    alpha,
    WEIGHTING: tl.constexpr,
    POWER: tl.constexpr,
    APART: tl.constexpr,
    FAST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """α of a tile once its rows are known, and (of entmax) its lean.

    `share` is 1 / total, or 0 for an empty row. APART keeps it out of the exponent: `top` is then
    the largest score, and otherwise the logarithm of the sum, which at 1e8 has no digits left.
    """
    if WEIGHTING == "softmax" or WEIGHTING == "topk":
        if WEIGHTING == "topk":
            s = tl.where(chosen(s, j, row_a, row_b), s * LOG2E, NONE)
        if MASKED:
            s = tl.where(live, s, NONE)
        # Rounding may put a score above the top that another tile shape found.
        p = tl.exp2(tl.minimum(s - top, 0.0, propagate_nan=tl.PropagateNan.ALL))
        if APART:
            p = p * share
        lean = p
    else:
        if WEIGHTING == "average":
            p = share + 0.0 * j
        elif WEIGHTING == "sigmoid":
            # Not the fast one: a weight of 1/4096 would have no digit right.
            p = gate(gate_half(s, False), 0.0, 1.0, False)
        elif WEIGHTING == "normalized":
            p = s * share
        else:
            p = s
        lean = p
        if WEIGHTING == "entmax":
            p, lean = excess(s, row_a, alpha, POWER)
        if MASKED:
            p = tl.where(live, p, 0.0)
            lean = tl.where(live, lean, 0.0)
    return p, lean


@triton.jit
def slope(p, lean, along, centre, share, WEIGHTING: tl.constexpr):
    """The gradient of a tile's scores: `along` is ∂L/∂α."""
    if WEIGHTING == "softmax":
        return p * (along - centre)
    elif WEIGHTING == "topk":
        return tl.where(p == 0, 0.0, p * (along - centre))
    elif WEIGHTING == "entmax":
        return tl.where(lean == 0, 0.0, lean * (along - centre))
    elif WEIGHTING == "normalized":
        return (along - centre) * share
    elif WEIGHTING == "sigmoid":
        return p * (1.0 - p) * along
    return along


@triton.jit
def finite(x):
    return tl.abs(x.to(tl.float32)) < INFINITY


@triton.jit
def add_carefully(acc, p, v, counts, PRECISION: tl.constexpr):
    """acc + p · v, where a value that does not count cannot spoil the sum by being NaN or ∞."""
    odd = (finite(v) == 0).to(v.dtype)
    spoiled = tl.dot(counts.to(v.dtype), odd, input_precision=PRECISION)
    acc = tl.dot(p.to(v.dtype), tl.where(odd == 0, v, 0.0), acc, input_precision=PRECISION)
    return tl.where(spoiled > 0, float("nan"), acc)


@triton.jit
def pool_tiles(
    state,
    rows,
    keys,
    mask,
    numbers,
    lo,
    hi,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
    SPARSE: tl.constexpr,
    WEIGHTING: tl.constexpr,
    POWER: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    FOLD: tl.constexpr,
    LOWER: tl.constexpr,
    UPPER: tl.constexpr,
    LAYOUT: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """The state of the rows after tiles lo … hi of the keys: pooled values, top, total."""
    acc, top, total = state
    q, query, offset, i, a, row_a, row_b = rows
    key, k_m, value, v_m, bias, gate_key, at = keys
    n, m, end, lower, upper, layout, size, columns = mask
    scale, alpha = numbers
    ROWS: tl.constexpr = acc.shape[0]
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
        if WEIGHTING == "average":
            p = live.to(tl.float32) if MASKED else tl.full((ROWS, COLS), 1.0, tl.float32)
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
                s = tl.where(live, x, NONE) if MASKED else x
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
                if WEIGHTING == "softmax" or WEIGHTING == "topk":
                    if WEIGHTING == "topk":
                        s = tl.where(chosen(s, j, row_a, row_b), s * LOG2E, NONE)
                    if MASKED:
                        s = tl.where(live, s, NONE)
                    new = tl.maximum(top, tl.max(s, 1))
                    base = tl.where(new == NONE, 0.0, new)
                    p = tl.exp2(s - base[:, None])
                else:
                    p, _ = weigh(
                        s, j, live, 0.0, 1.0, row_a, row_b, alpha,
                        WEIGHTING, POWER, False, FAST, MASKED,
                    )  # fmt: skip
            if WEIGHTING == "softmax" or WEIGHTING == "topk":
                fade = tl.exp2(top - base)
                total = total * fade + tl.sum(p, 1)
                acc = acc * fade[:, None]
                top = new
            elif WEIGHTING == "normalized":
                total += tl.sum(p, 1)
        v = rows_at(value, start, v_m, here, D, BLOCK_D, TMA)
        if CAREFUL and SPARSE:
            acc = add_carefully(acc, p, v, p != 0, PRECISION)
        elif CAREFUL:
            acc = add_carefully(acc, p, v, live | (p != p), PRECISION)
        else:
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, top, total


@triton.jit
def pool(
    query, key, value, bias, gate_query, gate_key, row_a, row_b, lengths, layout, at, counts,
    out, lse, kept, scale, alpha,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, bias_b, bias_h, gate_b, gate_h, o_b, o_h, o_n,
    n, m, heads, group, rows_n, lower, upper, size, columns, at_columns, splits, span,
    W: tl.constexpr,
    D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    PACKED: tl.constexpr,
    WEIGHTING: tl.constexpr,
    POWER: tl.constexpr,
    FOLD: tl.constexpr,
    LOWER: tl.constexpr,
    UPPER: tl.constexpr,
    CUT: tl.constexpr,
    APART: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The output and log-sum-exp of one tile of queries; with SPLIT, of one part of the keys.

    `heads` are the query's, or with PACKED the key's, whose group is then stacked in the rows:
    row r is the query r mod n of head r div n. A part goes to `out` (splits, …) unfinished, with
    its top in `lse` and its total in `kept`.
    """
    BIAS: tl.constexpr = bias is not None
    GATE: tl.constexpr = gate_key is not None
    LAYOUT: tl.constexpr = layout is not None
    pid = tl.program_id(0)
    tiles = (rows_n + ROWS - 1) // ROWS
    part = 0
    if SPLIT:
        part = pid % splits
        pid = pid // splits
    tile = pid % tiles
    if UPPER:
        tile = tiles - 1 - tile  # a causal mask's longest rows first
    lane = pid // tiles
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
    pair_head = tl.cast(pair_head, tl.int64)
    key += batch * k_b + pair_head * k_h
    value += batch * v_b + pair_head * v_h
    if BIAS:
        bias += batch * bias_b + pair_head * bias_h
    end = m
    if lengths is not None:
        end = tl.minimum(tl.load(lengths + batch), m)
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
        lo = 0
        inner_lo = 0
        inner_hi = tl.load(counts + tile * 2)
        hi = inner_hi + tl.load(counts + tile * 2 + 1)
        if lengths is not None:
            inner_hi = 0
    else:
        lo, inner_lo, inner_hi, hi = bounds(first, last, lower, upper, end, COLS, LOWER, UPPER)
    if SPLIT:
        start = part * span
        stop = start + span
        lo = clamp(lo, start, stop)
        inner_lo = clamp(inner_lo, start, stop)
        inner_hi = clamp(inner_hi, start, stop)
        hi = clamp(hi, start, stop)
    fresh = (
        tl.zeros((ROWS, BLOCK_D), dtype=tl.float32),
        tl.full((ROWS,), NONE, dtype=tl.float32),
        tl.zeros((ROWS,), dtype=tl.float32),
    )
    FLAT: tl.constexpr = WIDE and TMA
    query = described(query, n - first, tl.cast(q_n, tl.int64), W, ROWS, BLOCK_W, FLAT)
    rows = (q, query, offset, i, a, first_a, first_b)
    k_m = tl.cast(k_m, tl.int64)
    v_m = tl.cast(v_m, tl.int64)
    key = described(key, m, k_m, W, COLS, BLOCK_W, TMA)
    value = described(value, m, v_m, D, COLS, BLOCK_D, TMA)
    keys = (key, k_m, value, v_m, bias, gate_key, at)
    mask = (n, m, end, lower, upper, layout, size, columns)
    numbers = (scale, alpha)
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
            W, D, BLOCK_W, BLOCK_D, FAST, PRECISION, TMA,
        )  # fmt: skip
    state = pool_tiles(
        state, rows, keys, mask, numbers, inner_lo, inner_hi, COLS, WIDE, False, False, SPARSE,
        WEIGHTING, POWER, BIAS, GATE, FOLD, LOWER, UPPER, LAYOUT,
        W, D, BLOCK_W, BLOCK_D, FAST, PRECISION, TMA,
    )  # fmt: skip
    if UPPER or CUT or LAYOUT:
        state = pool_tiles(
            state, rows, keys, mask, numbers, inner_hi, hi, COLS, WIDE, True, False, SPARSE,
            WEIGHTING, POWER, BIAS, GATE, FOLD, LOWER, UPPER, LAYOUT,
            W, D, BLOCK_W, BLOCK_D, FAST, PRECISION, TMA,
        )  # fmt: skip
    acc, top, total = state
    if LOWER or UPPER or CUT or LAYOUT or SPARSE:
        # A value that does not count was multiplied by 0. If the sum is not finite, that value
        # may be why: do it again and look at each.
        if tl.max(tl.max((finite(acc) == 0).to(tl.int32), 1), 0) > 0:
            acc, top, total = pool_tiles(
                fresh, rows, keys, mask, numbers, lo, hi, COLS, WIDE, True, True, SPARSE,
                WEIGHTING, POWER, BIAS, GATE, FOLD, LOWER, UPPER, LAYOUT,
                W, D, BLOCK_W, BLOCK_D, FAST, PRECISION, TMA,
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


@triton.jit
def finish(
    acc, top, total, line, place, inside, out, lse, kept, lines,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WEIGHTING: tl.constexpr,
    APART: tl.constexpr,
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
    tl.store(kept + line, top, mask=inside)
    tl.store(kept + lines + line, share, mask=inside)
    column = tl.arange(0, BLOCK_D)[None, :]
    where = out + place[:, None] + column
    tl.store(where, acc.to(out.dtype.element_ty), mask=inside[:, None] & (column < D))


@triton.jit
def merge(
    parts, tops, totals, out, lse, kept, lines, splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WEIGHTING: tl.constexpr,
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


@triton.jit
def inner(
    along, out, along_lse, centre, lines,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
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
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
    WEIGHTING: tl.constexpr,
    POWER: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    LOWER: tl.constexpr,
    UPPER: tl.constexpr,
    LAYOUT: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    APART: tl.constexpr,
    CENTRED: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys after tiles lo … hi of one head's queries."""
    dk, dv, dbias, dgate = state
    key, k, k_offset, v, j, added, b = keys
    query, q_n, along, at, ds_out, ds_line, ds_columns, stored = queries
    kept, centre, row_a, row_b, gate_query, lines, head_line = rows
    n, _, end, lower, upper, layout, size, columns = mask
    scale, alpha = numbers
    COLS: tl.constexpr = v.shape[0]
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
        line = head_line + start + here
        top, share, middle, first_a, first_b, a = known(
            kept, centre, row_a, row_b, gate_query, line, lines,
            WEIGHTING, GATE, APART, CENTRED, FAST,
        )  # fmt: skip
        do = rows_at(along, start, D, here, D, BLOCK_D, TMA)
        if WEIGHTING == "average":
            p, lean = weigh(
                i, j, live, 0.0, share[None, :], first_a, first_b, alpha,
                WEIGHTING, POWER, APART, FAST, MASKED,
            )  # fmt: skip
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
            p, lean = weigh(
                s, j, live, top[None, :], share[None, :], first_a[None, :], first_b[None, :], alpha,
                WEIGHTING, POWER, APART, FAST, MASKED,
            )  # fmt: skip
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            ds = slope(p, lean, dp, middle[None, :], share[None, :], WEIGHTING)
            if MASKED:
                ds = tl.where(live, ds, 0.0)
            if GATE:
                logit, ds = pull_gate(ds, s, steep, scale, BIAS)
                if MASKED:
                    logit = tl.where(live, logit, 0.0)
                dgate += tl.sum(logit, 1)
                if MASKED:
                    ds = tl.where(live, ds, 0.0)
            if BIAS:
                dbias += tl.sum(ds, 1)
            if WIDE:
                spot = ds_out + ds_line[:, None] * ds_columns + (g * n + start + near)[None, :]
                kept_pairs = stored[:, None] & (i < n)
                ds = (ds * left_over(scale, WEIGHTING, BIAS, GATE)).to(ds_out.dtype.element_ty)
                tl.store(spot, ds, mask=kept_pairs)
            else:
                if MASKED:
                    q = tl.where(finite(q), q, 0.0)
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv, dbias, dgate


@triton.jit
def left_over(scale, WEIGHTING: tl.constexpr, BIAS, GATE):
    """The factor still missing from a gradient of φ·ψ: the scale, without its log₂e."""
    factor = scale
    if GATE and not BIAS:
        factor = 1.0
    if WEIGHTING == "softmax":
        factor = factor * LN2
    return factor


@triton.jit
def to_keys(
    query, key, value, bias, gate_query, gate_key, row_a, row_b, lengths, layout, at, counts,
    along, centre, kept, dkey, dvalue, dbias, dgate, ds, scale, alpha,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, bias_b, bias_h, gate_b, gate_h,
    n, m, heads, group, lines, lower, upper, size, columns, at_columns, splits, span,
    first_pair, first_key, keys_n, parts_lines,
    W: tl.constexpr,
    D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    WEIGHTING: tl.constexpr,
    POWER: tl.constexpr,
    LOWER: tl.constexpr,
    UPPER: tl.constexpr,
    CUT: tl.constexpr,
    UNEVEN: tl.constexpr,
    APART: tl.constexpr,
    CENTRED: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and its values, from every query of the group.

    `heads` are the key's. With WIDE the gradient of φ·ψ is written to `ds` (pairs, keys,
    group · n) for a matrix product, and `dkey` is left alone. With SPLIT the queries are shared
    out, and each part is written by itself, as float32.
    """
    BIAS: tl.constexpr = bias is not None
    GATE: tl.constexpr = gate_key is not None
    LAYOUT: tl.constexpr = layout is not None
    pid = tl.program_id(0)
    tiles = (keys_n + COLS - 1) // COLS
    part = 0
    if SPLIT:
        part = pid % splits
        pid = pid // splits
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
    end = m
    if lengths is not None:
        end = tl.minimum(tl.load(lengths + batch), m)
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
        lo = 0
        inner_lo = 0
        inner_hi = tl.load(counts + tile * 2)
        hi = inner_hi + tl.load(counts + tile * 2 + 1)
        if lengths is not None:
            inner_hi = 0
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
        start = part * span
        stop = start + span
        lo = clamp(lo, start, stop)
        inner_lo = clamp(inner_lo, start, stop)
        inner_hi = clamp(inner_hi, start, stop)
        hi = clamp(hi, start, stop)
    HELD: tl.constexpr = 16 if WIDE else BLOCK_W
    state = (
        tl.zeros((COLS, HELD), dtype=tl.float32),
        tl.zeros((COLS, BLOCK_D), dtype=tl.float32),
        tl.zeros((COLS,), dtype=tl.float32),
        tl.zeros((COLS,), dtype=tl.float32),
    )
    keys = (key, k, k_offset, v, j, added, b)
    mask = (n, m, end, lower, upper, layout, size, columns)
    numbers = (scale, alpha)
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
            at,
            ds,
            ds_line,
            ds_columns,
            stored,
        )
        rows = (kept, centre, row_a, row_b, gate_query, lines, query_head * n)
        if (UPPER or CUT) and not LAYOUT:
            state = keys_tiles(
                state, keys, queries, rows, mask, numbers, lo, inner_lo, g, ROWS, WIDE, True,
                WEIGHTING, POWER, BIAS, GATE, LOWER, UPPER, LAYOUT,
                W, D, BLOCK_W, BLOCK_D, APART, CENTRED, FAST, PRECISION, TMA,
            )  # fmt: skip
        state = keys_tiles(
            state, keys, queries, rows, mask, numbers, inner_lo, inner_hi, g, ROWS, WIDE, False,
            WEIGHTING, POWER, BIAS, GATE, LOWER, UPPER, LAYOUT,
            W, D, BLOCK_W, BLOCK_D, APART, CENTRED, FAST, PRECISION, TMA,
        )  # fmt: skip
        if LOWER or UNEVEN or LAYOUT:
            state = keys_tiles(
                state, keys, queries, rows, mask, numbers, inner_hi, hi, g, ROWS, WIDE, True,
                WEIGHTING, POWER, BIAS, GATE, LOWER, UPPER, LAYOUT,
                W, D, BLOCK_W, BLOCK_D, APART, CENTRED, FAST, PRECISION, TMA,
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
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
    CENTRE: tl.constexpr,
    WEIGHTING: tl.constexpr,
    POWER: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    LOWER: tl.constexpr,
    UPPER: tl.constexpr,
    LAYOUT: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    APART: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of queries after tiles lo … hi of the keys."""
    dq, one, two = state
    q, query, offset, i, do, top, share, middle, first_a, first_b, a = rows
    key, k_m, value, v_m, bias, gate_key, at = keys
    n, m, end, lower, upper, layout, size, columns = mask
    scale, alpha = numbers
    ROWS: tl.constexpr = do.shape[0]
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
        p, lean = weigh(
            s, j, live, top, share, first_a, first_b, alpha,
            WEIGHTING, POWER, APART, FAST, MASKED,
        )  # fmt: skip
        v = rows_at(value, start, v_m, here, D, BLOCK_D, TMA)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if CENTRE:
            one += tl.sum(tl.where(lean == 0, 0.0, lean * dp), 1)
            two += tl.sum(lean, 1)
        else:
            ds = slope(p, lean, dp, middle, share, WEIGHTING)
            if MASKED:
                ds = tl.where(live, ds, 0.0)
            if GATE:
                logit, ds = pull_gate(ds, s, steep, scale, BIAS)
                if MASKED:
                    logit = tl.where(live, logit, 0.0)
                one += tl.sum(logit, 1)
                if MASKED:
                    ds = tl.where(live, ds, 0.0)
            if not WIDE:
                if MASKED:
                    k = tl.where(finite(k), k, 0.0)
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, one, two


@triton.jit
def to_queries(
    query, key, value, bias, gate_query, gate_key, row_a, row_b, lengths, layout, at, counts,
    along, centre, kept, dquery, one_out, two_out, scale, alpha,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, bias_b, bias_h, gate_b, gate_h, o_b, o_h, o_n,
    n, m, heads, group, lines, lower, upper, size, columns, at_columns, splits, span,
    W: tl.constexpr,
    D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    CENTRE: tl.constexpr,
    WEIGHTING: tl.constexpr,
    POWER: tl.constexpr,
    LOWER: tl.constexpr,
    UPPER: tl.constexpr,
    CUT: tl.constexpr,
    APART: tl.constexpr,
    CENTRED: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of queries and of their gate, which goes to `one_out`.

    With CENTRE instead the two sums of entmax's centre, Σ lean · ∂L/∂α and Σ lean. With WIDE
    the gradient of the query is not taken. `heads` are the query's.
    """
    BIAS: tl.constexpr = bias is not None
    GATE: tl.constexpr = gate_key is not None
    LAYOUT: tl.constexpr = layout is not None
    pid = tl.program_id(0)
    tiles = (n + ROWS - 1) // ROWS
    part = 0
    if SPLIT:
        part = pid % splits
        pid = pid // splits
    tile = pid % tiles
    if UPPER:
        tile = tiles - 1 - tile
    lane = pid // tiles
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
    end = m
    if lengths is not None:
        end = tl.minimum(tl.load(lengths + batch), m)
    top, share, middle, first_a, first_b, a = known(
        kept, centre, row_a, row_b, gate_query, line, lines, WEIGHTING, GATE, APART, CENTRED, FAST
    )
    i = (first + near)[:, None]
    q = i
    if not WIDE:
        q = fetch(query, offset, W, BLOCK_W)
    do = fetch(along, line * D, D, BLOCK_D)
    if LAYOUT:
        at += tl.cast(tile, tl.int64) * at_columns
        lo = 0
        inner_lo = 0
        inner_hi = tl.load(counts + tile * 2)
        hi = inner_hi + tl.load(counts + tile * 2 + 1)
        if lengths is not None:
            inner_hi = 0
    else:
        lo, inner_lo, inner_hi, hi = bounds(first, last, lower, upper, end, COLS, LOWER, UPPER)
    if SPLIT:
        start = part * span
        stop = start + span
        lo = clamp(lo, start, stop)
        inner_lo = clamp(inner_lo, start, stop)
        inner_hi = clamp(inner_hi, start, stop)
        hi = clamp(hi, start, stop)
    HELD: tl.constexpr = 16 if (WIDE or CENTRE) else BLOCK_W
    state = (
        tl.zeros((ROWS, HELD), dtype=tl.float32),
        tl.zeros((ROWS,), dtype=tl.float32),
        tl.zeros((ROWS,), dtype=tl.float32),
    )
    rows = (
        q, query, offset, i, do, top[:, None], share[:, None], middle[:, None],
        first_a[:, None], first_b[:, None], a[:, None],
    )  # fmt: skip
    k_m = tl.cast(k_m, tl.int64)
    v_m = tl.cast(v_m, tl.int64)
    key = described(key, m, k_m, W, COLS, BLOCK_W, TMA)
    value = described(value, m, v_m, D, COLS, BLOCK_D, TMA)
    keys = (key, k_m, value, v_m, bias, gate_key, at)
    mask = (n, m, end, lower, upper, layout, size, columns)
    numbers = (scale, alpha)
    if LOWER and not LAYOUT:
        state = queries_tiles(
            state, rows, keys, mask, numbers, lo, inner_lo, COLS, WIDE, True, CENTRE,
            WEIGHTING, POWER, BIAS, GATE, LOWER, UPPER, LAYOUT,
            W, D, BLOCK_W, BLOCK_D, APART, FAST, PRECISION, TMA,
        )  # fmt: skip
    state = queries_tiles(
        state, rows, keys, mask, numbers, inner_lo, inner_hi, COLS, WIDE, False, CENTRE,
        WEIGHTING, POWER, BIAS, GATE, LOWER, UPPER, LAYOUT,
        W, D, BLOCK_W, BLOCK_D, APART, FAST, PRECISION, TMA,
    )  # fmt: skip
    if UPPER or CUT or LAYOUT:
        state = queries_tiles(
            state, rows, keys, mask, numbers, inner_hi, hi, COLS, WIDE, True, CENTRE,
            WEIGHTING, POWER, BIAS, GATE, LOWER, UPPER, LAYOUT,
            W, D, BLOCK_W, BLOCK_D, APART, FAST, PRECISION, TMA,
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


@triton.jit
def sound(last, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Whether this row is finite."""
    column = tl.arange(0, BLOCK_D)
    x = tl.load(last + column, mask=column < D, other=0.0)
    return tl.max((finite(x) == 0).to(tl.int32), 0) == 0


@triton.jit
def mend(
    query, key, value, out, kept, scale,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n,
    n, m, heads, group, upper, parts,
    W: tl.constexpr,
    D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """One head's output over again, if its last row is not finite: softmax over j − i ≤ upper.

    `parts` programs share a head's tiles of rows. There are few programs, so that to look and
    return costs next to nothing; every tile is done with care, so that there is one loop to
    compile. `kept` is as `pool` fills it.
    """
    pid = tl.program_id(0)
    lane = tl.cast(pid // parts, tl.int64)
    batch = lane // heads
    head = lane % heads
    out += batch * o_b + head * o_h
    if sound(out + (n - 1) * tl.cast(o_n, tl.int64), D, BLOCK_D):
        return
    query += batch * q_b + head * q_h
    k_m = tl.cast(k_m, tl.int64)
    v_m = tl.cast(v_m, tl.int64)
    key += batch * k_b + head // group * k_h
    value += batch * v_b + head // group * v_h
    keys = (key, k_m, value, v_m, None, None, None)
    mask = (n, m, m, 0, upper, None, 0, 0)
    lines = tl.cast(tl.num_programs(0) // parts, tl.int64) * n
    for tile in tl.range(pid % parts, (n + ROWS - 1) // ROWS, parts):
        first = tile * ROWS
        r = first + tl.arange(0, ROWS)
        inside = r < n
        r = tl.minimum(r, n - 1)
        base = query + first * tl.cast(q_n, tl.int64)
        offset = (r - first) * q_n
        i = r[:, None]
        q = i
        if not WIDE:
            q = fetch(base, offset, W, BLOCK_W)
        lo, _, _, hi = bounds(first, first + ROWS - 1, 0, upper, m, COLS, False, True)
        state = (
            tl.zeros((ROWS, BLOCK_D), dtype=tl.float32),
            tl.full((ROWS,), NONE, dtype=tl.float32),
            tl.zeros((ROWS,), dtype=tl.float32),
        )
        acc, top, total = pool_tiles(
            state, (q, base, offset, i, i, i, i), keys, mask, (scale, 0.0), lo, hi,
            COLS, WIDE, True, True, False,
            "softmax", 0, False, False, False, False, True, False,
            W, D, BLOCK_W, BLOCK_D, False, "ieee", False,
        )  # fmt: skip
        finish(
            acc, top, total, lane * n + r, r * tl.cast(o_n, tl.int64), inside, out, None, kept,
            lines, D, BLOCK_D, "softmax", APART,
        )  # fmt: skip


@triton.jit
def mend_queries(
    query, key, value, out, along, kept, dquery, scale,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n,
    a_b, a_h, a_n, a_d, d_b, d_h, d_n,
    n, m, heads, group, upper, parts,
    W: tl.constexpr,
    D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """The gradient of one head's queries over again, if its last row of output is not finite.

    As `mend`, whose `out` and `kept` this takes; `along` may have any strides.
    """
    pid = tl.program_id(0)
    lane = tl.cast(pid // parts, tl.int64)
    batch = lane // heads
    head = lane % heads
    out += batch * o_b + head * o_h
    if sound(out + (n - 1) * tl.cast(o_n, tl.int64), D, BLOCK_D):
        return
    query += batch * q_b + head * q_h
    along += batch * a_b + head * a_h
    dquery += batch * d_b + head * d_h
    k_m = tl.cast(k_m, tl.int64)
    v_m = tl.cast(v_m, tl.int64)
    key += batch * k_b + head // group * k_h
    value += batch * v_b + head // group * v_h
    keys = (key, k_m, value, v_m, None, None, None)
    mask = (n, m, m, 0, upper, None, 0, 0)
    lines = tl.cast(tl.num_programs(0) // parts, tl.int64) * n
    column_d = tl.arange(0, BLOCK_D)[None, :]
    column_w = tl.arange(0, BLOCK_W)[None, :]
    for tile in tl.range(pid % parts, (n + ROWS - 1) // ROWS, parts):
        first = tile * ROWS
        r = first + tl.arange(0, ROWS)
        inside = r < n
        r = tl.minimum(r, n - 1)
        far = r.to(tl.int64)
        q = fetch(query, far * q_n, W, BLOCK_W)
        here = along + far[:, None] * a_n + column_d * a_d
        do = tl.load(here, mask=column_d < D, other=0.0)
        there = fetch(out, far * o_n, D, BLOCK_D).to(tl.float32)
        middle = tl.sum(do.to(tl.float32) * there, 1)
        top, share, zero, _, _, _ = known(
            kept, None, None, None, None, lane * n + far, lines,
            "softmax", False, APART, False, False,
        )  # fmt: skip
        i = r[:, None]
        rows = (
            q, query, far, i, do, top[:, None], share[:, None], middle[:, None], i, i, i,
        )  # fmt: skip
        lo, _, _, hi = bounds(first, first + ROWS - 1, 0, upper, m, COLS, False, True)
        state = (tl.zeros((ROWS, BLOCK_W), dtype=tl.float32), zero, zero)
        dq, _, _ = queries_tiles(
            state, rows, keys, mask, (scale, 0.0), lo, hi, COLS, False, True, False,
            "softmax", 0, False, False, False, True, False,
            W, D, BLOCK_W, BLOCK_D, APART, False, "ieee", False,
        )  # fmt: skip
        dq = dq * left_over(scale, "softmax", False, False)
        where = dquery + far[:, None] * d_n + column_w
        tl.store(where, dq.to(dquery.dtype.element_ty), mask=inside[:, None] & (column_w < W))
