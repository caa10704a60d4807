"""The gradients of `forward`, in tiles: `to_keys` and `to_queries` are its two halves, and `inner`
is what both need of each row first. `gradients` launches them.
"""

# One `if` is decided when compiling, the one inside it on the device.
# ruff: noqa: SIM102

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qkv.engines.triton.place import (  # fmt: skip
    found_of,
    known_steps,
    left_out,
    product,
    program,
    rows_program,
    scored,
    tile_of,
)
from qkv.engines.triton.records import Sizes
from qkv.engines.triton.score import gate_half, left_over, pull_gate, score
from qkv.engines.triton.support import LIST, is_listed
from qkv.engines.triton.tiles import (  # fmt: skip
    LN2,
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
    ruling,
)
from qkv.engines.triton.weigh import slope, weigh


class Back(NamedTuple):
    """What the way back knows of each row: ∂L/∂out, the centre, and the two lines of `kept`."""

    along: Any
    centre: Any
    kept: Any
    lines: Any


class Down(NamedTuple):
    """A tile of keys, down: ψ(k) (COLS, w), v (COLS, d), and of each (COLS, 1) its position, its
    place in the mask's array, its bias and the gate's half; which of them are written, and where
    in `ds`; the first of them."""

    key: Any
    offset: Any
    k: Any
    v: Any
    j: Any
    at: Any
    bias: Any
    b: Any
    end: Any
    stored: Any
    line: Any
    first: Any


class Across(NamedTuple):
    """The queries of one head, across: where φ, ∂L/∂out, the rows' lines and the mask's array
    begin, which lane and which of its group it is, and the list of tiles."""

    query: Any
    along: Any
    line: Any
    pairs: Any
    lane: Any
    member: Any
    at: Any


@launched
def inner(along, out, along_lse, centre, lines, F: tl.constexpr):
    """centre = Σ ∂L/∂out · out − ∂L/∂lse, each row by itself."""
    line = tl.cast(tl.program_id(0), tl.int64) * F.ROWS + tl.arange(0, F.ROWS)
    column = tl.arange(0, F.BLOCK_D)[None, :]
    where = line[:, None] * F.D + column
    mask = (line < lines)[:, None] & (column < F.D)
    x = tl.load(along + where, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(out + where, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(x * y, 1)
    if along_lse is not None:
        total -= tl.load(along_lse + line, mask=line < lines, other=0.0)
    tl.store(centre + line, total, mask=line < lines)


@triton.jit
def kept_of(back, line, F):
    """What the way there kept of rows: top, share, and the centre."""
    zero = line.to(tl.float32) * 0.0
    top = zero
    share = zero
    middle = zero
    if F.EXPONENTIAL:
        top = tl.load(back.kept + line)
    if F.WEIGHTING == "normalized" or F.WEIGHTING == "average" or (F.EXPONENTIAL and F.APART):
        share = tl.load(back.kept + back.lines + line)
    if F.CENTRED:
        middle = tl.load(back.centre + line)
    return top, share, middle


@triton.jit
def pulled(ds, live, gated, steep, scale, F, RULED: tl.constexpr):
    """From the scores' gradient that of the gate's logit, and of what is gated."""
    if RULED:
        ds = tl.where(live, ds, 0.0)
    logit = ds
    if F.GATE:
        logit, ds = pull_gate(ds, gated, steep, scale, F)
        if RULED:
            logit = tl.where(live, logit, 0.0)
            ds = tl.where(live, ds, 0.0)
    return logit, ds


@triton.jit
def keys_tiles(
    state, own, head, given, back, ds_out, scales, steps, z, lo, hi, F, MASKED: tl.constexpr
):
    """The gradients of a tile of keys after tiles lo … hi of one head's queries."""
    dk, dv, dbias, dgate = state
    RULED: tl.constexpr = MASKED or F.PAIRS > 0
    q_n = tl.cast(steps.q_n, tl.int64)
    for t in tl.range(lo, hi):
        near = tl.arange(0, F.ROWS)
        if F.LISTED == 2:
            start = 0
            near = tl.load(head.at + LIST + t * F.ROWS + near).to(tl.int32)
        elif F.LAYOUT:
            start = tl.load(head.at + t) * F.ROWS
        else:
            start = t * F.ROWS
        i = (start + near)[None, :]
        here = near
        live = i
        if MASKED:
            here = tl.minimum(near, z.n - 1 - start)
            live = alive(i, own.j, own.end, given.layout, z, F)
        extra = i
        if F.PAIRS:
            if F.LAID:
                read = tl.trans(head.pairs.load([start, own.first]))  # (COLS, ROWS)
                extra, live = ruling(read, live, scales.times, F.PAIRS, MASKED)
            else:
                there = head.pairs + start * tl.cast(steps.p_n, tl.int64)
                offset = own.at + here[None, :] * steps.p_n
                extra, live = ruled(live, there, offset, scales.times, F.PAIRS, MASKED)
        keep = i
        if F.DROP:
            drawn = row_hash(given.seed, head.lane, i, z.hashed)
            keep = kept_share(drawn, own.j, z.dropped, scales.share)
        line = head.line + start + here
        top, share, middle = kept_of(back, line, F)
        row_a, row_b, a = found_of(given, line, F)
        do = rows_at(head.along, start, F.D, here, F.D, F.BLOCK_D, F.TMA)  # (ROWS, d)
        if F.WEIGHTING == "average":
            p, lean = weigh(
                i, own.j, live, 0.0, share[None, :], row_a, row_b, scales.alpha, F, RULED
            )
            if F.DROP:
                p = p * keep
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=F.PRECISION)
        else:
            if F.WIDE:
                x = products(
                    own.key, own.offset, head.query + start * q_n, here * q_n,
                    F.COLS, F.ROWS, F.W, F.BLOCK_W, F.SCORES,
                )  # fmt: skip
            else:
                q = rows_at(head.query, start, q_n, here, F.W, F.BLOCK_W, F.TMA)  # (ROWS, w)
                x = tl.dot(own.k, tl.trans(q), input_precision=F.SCORES)
            gated, steep = score(x, scales.scale, own.bias, a[None, :], own.b, F)
            s = gated
            if F.PAIRS == 2:
                s = s + extra
            p, lean = weigh(
                s, own.j, live, top[None, :], share[None, :], row_a[None, :], row_b[None, :],
                scales.alpha, F, RULED,
            )  # fmt: skip
            weight = p
            if F.DROP:
                weight = p * keep
            dv = tl.dot(weight.to(do.dtype), do, dv, input_precision=F.PRECISION)
            dp = tl.dot(own.v, tl.trans(do), input_precision=F.PRECISION)
            if F.DROP:
                dp = dp * keep
            ds = slope(p, lean, dp, middle[None, :], share[None, :], F)
            logit, ds = pulled(ds, live, gated, steep, scales.scale, F, RULED)
            if F.GATE:
                dgate += tl.sum(logit, 1)
            if F.BIAS:
                dbias += tl.sum(ds, 1)
            if F.WIDE:
                spot = own.line[:, None] * tl.cast(steps.o_h, tl.int64)
                spot += (head.member * steps.o_n + start + near)[None, :]
                ds = (ds * left_over(scales.scale, F)).to(ds_out.dtype.element_ty)
                tl.store(ds_out + spot, ds, mask=own.stored[:, None] & (i < steps.o_n))
            else:
                if RULED:
                    q = tl.where(finite(q), q, 0.0)
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=F.PRECISION)
    return dk, dv, dbias, dgate


@launched
def to_keys(
    given, at, counts, along, centre, kept, dkey, dvalue, dbias, dgate, ds, scales, steps,
    n, m, heads, group, lines, lower, upper, size, columns, dropped, hashed, at_columns, splits,
    span, first_pair, first_key, keys_n, parts_lines, F: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and its values, from every query of the group.

    `heads` are the key's. With WIDE the gradient of φ·ψ is written to `ds` (pairs, keys, group,
    n and room) for a matrix product, and `dkey` is left alone. With SPLIT the queries are shared
    out, and each part is written by itself, as float32.
    """
    z = Sizes(
        n, m, heads, group, n, lower, upper, size, columns, dropped, hashed, at_columns, splits,
        span,
    )  # fmt: skip
    steps = known_steps(steps, F)
    part, tile, pair = program((keys_n + F.COLS - 1) // F.COLS, z, F)
    tile += first_key // F.COLS
    pair += first_pair
    if F.LISTED:
        all_listed = True
        for g in tl.range(0, group):
            first = tile * (F.COLS // LIST)
            count = (m + LIST - 1) // LIST
            some = is_listed(at, pair * group + g, first, count, at_columns, F.MANY)
            all_listed = all_listed & some
        if all_listed == (F.LISTED == 1):
            return
    batch = tl.cast(pair // heads, tl.int64)
    head = tl.cast(pair % heads, tl.int64)
    first = tile * F.COLS
    near = tl.arange(0, F.COLS)
    stored = (first + near < m) & (first + near < first_key + keys_n)
    here = tl.minimum(near, m - 1 - first)
    key = given.key + batch * steps.k_b + head * steps.k_h + first * tl.cast(steps.k_m, tl.int64)
    value = given.value + batch * steps.v_b + head * steps.v_h
    value += first * tl.cast(steps.v_m, tl.int64)
    end = length_of(given.lengths, batch, m)
    v = fetch(value, here * steps.v_m, F.D, F.BLOCK_D)  # (COLS, d)
    j = (first + near)[:, None]
    k = j
    if not F.WIDE and F.WEIGHTING != "average":
        k = fetch(key, here * steps.k_m, F.W, F.BLOCK_W)  # (COLS, w)
    bias = j
    if F.BIAS:
        there = given.key_bias + batch * steps.bias_b + head * steps.bias_h
        bias = tl.load(there + first + here)[:, None] * F.BASE
    b = j
    if F.GATE:
        there = given.gate_key + batch * steps.gate_b + head * steps.gate_h
        b = gate_half(tl.load(there + first + here), F.FAST)[:, None]
    if F.LAYOUT:
        at += tl.cast(tile, tl.int64) * at_columns
        lo, inner_lo, inner_hi, hi = listed(counts, tile, given.lengths)
    else:
        last = tl.minimum(first + F.COLS, end) - 1
        lo, inner_lo, inner_hi, hi = bounds(
            first, last, -upper, -lower, n, F.ROWS, F.UPPER, F.LOWER
        )
        if F.CUT:
            if first + F.COLS > end:
                inner_lo = hi
                inner_hi = hi
            if first >= end:
                lo = hi
    if F.SPLIT:
        lo, inner_lo, inner_hi, hi = portion((lo, inner_lo, inner_hi, hi), part, span)
    HELD: tl.constexpr = 16 if F.WIDE else F.BLOCK_W
    state = (
        tl.zeros((F.COLS, HELD), dtype=tl.float32),
        tl.zeros((F.COLS, F.BLOCK_D), dtype=tl.float32),
        tl.zeros((F.COLS,), dtype=tl.float32),
        tl.zeros((F.COLS,), dtype=tl.float32),
    )
    ds_line = tl.cast(pair - first_pair, tl.int64) * keys_n + (first - first_key) + near
    own = Down(
        key,
        here * steps.k_m,
        k,
        v,
        j,
        here[:, None] * steps.p_m,
        bias,
        b,
        end,
        stored,
        ds_line,
        first,
    )
    back = Back(along, centre, kept, tl.cast(lines, tl.int64))
    q_n = tl.cast(steps.q_n, tl.int64)
    for g in tl.range(0, group):
        lane = batch * heads * group + head * group + g
        query = given.query + batch * steps.q_b + (head * group + g) * steps.q_h
        pairs = given.pairs
        if F.PAIRS:
            pairs += batch * steps.p_b + (head * group + g) * steps.p_h
            if F.LAID:  # read with queries down, as it lies, and turned on chip
                pairs = described(pairs, n, tl.cast(steps.p_n, tl.int64), m, F.ROWS, F.COLS, True)
            else:
                pairs += first * tl.cast(steps.p_m, tl.int64)
        listing = at
        if F.LISTED == 2:
            listing += (lane * ((m + LIST - 1) // LIST) + tile) * at_columns
            inner_hi = 0
            hi = (tl.load(listing).to(tl.int32) + F.ROWS - 1) // F.ROWS
        queries = Across(
            described(query, n, q_n, F.W, F.ROWS, F.BLOCK_W, F.TMA),
            described(
                along + lane * n * F.D, n, tl.cast(F.D, tl.int64), F.D, F.ROWS, F.BLOCK_D, F.TMA
            ),
            lane * n, pairs, lane, g, listing,
        )  # fmt: skip
        if (F.UPPER or F.CUT) and not F.LAYOUT and F.LISTED < 2:
            state = keys_tiles(
                state, own, queries, given, back, ds, scales, steps, z, lo, inner_lo, F, True
            )
        if F.LISTED < 2:
            state = keys_tiles(
                state, own, queries, given, back, ds, scales, steps, z, inner_lo, inner_hi, F, False
            )
        if F.LOWER or F.UNEVEN or F.LAYOUT or F.LISTED == 2:
            state = keys_tiles(
                state, own, queries, given, back, ds, scales, steps, z, inner_hi, hi, F, True
            )
    dk, dv, db, dg = state
    line = tl.cast(pair, tl.int64) * m + first + near
    if F.SPLIT:
        line += tl.cast(part, tl.int64) * parts_lines
    column = tl.arange(0, F.BLOCK_D)[None, :]
    where = dvalue + line[:, None] * F.D + column
    tl.store(where, dv.to(dvalue.dtype.element_ty), mask=stored[:, None] & (column < F.D))
    if F.WEIGHTING != "average":
        if not F.WIDE:
            dk = dk * left_over(scales.scale, F)
            column = tl.arange(0, F.BLOCK_W)[None, :]
            where = dkey + line[:, None] * F.W + column
            tl.store(where, dk.to(dkey.dtype.element_ty), mask=stored[:, None] & (column < F.W))
        if F.BIAS:
            tl.store(dbias + line, db, mask=stored)
        if F.GATE:
            if F.WEIGHTING == "softmax":
                dg = dg * LN2
            tl.store(dgate + line, dg, mask=stored)


@triton.jit
def queries_tiles(
    state, rows, do, top, share, middle, keys, scales, z, lo, hi, F, MASKED: tl.constexpr
):
    """The gradients of a tile of queries after tiles lo … hi of the keys."""
    dq, one, two, lent = state
    RULED: tl.constexpr = MASKED or F.PAIRS > 0
    for t in tl.range(lo, hi):
        start, j, here, live, extra = tile_of(t, rows, keys, scales.times, z, F, MASKED)
        x, k = product(rows, keys, start, here, F)
        gated, steep = scored(x, rows, keys, start, here, scales.scale, F.BASE, F)
        s = gated
        if F.PAIRS == 2:
            s = s + extra
        p, lean = weigh(s, j, live, top, share, rows.row_a, rows.row_b, scales.alpha, F, RULED)
        v = rows_at(keys.value, start, keys.v_m, here, F.D, F.BLOCK_D, F.TMA)  # (COLS, d)
        dp = tl.dot(do, tl.trans(v), input_precision=F.PRECISION)
        if F.DROP:
            dp = dp * kept_share(rows.drawn, j, z.dropped, scales.share)
        if F.CENTRE == 1:
            one += tl.sum(tl.where(lean == 0, 0.0, lean * dp), 1)
            two += tl.sum(lean, 1)
        elif F.CENTRE == 2:
            ds = slope(p, lean, dp, middle, share, F)
            one += tl.sum(ds, 1)
            two += tl.sum(lean, 1)
            if RULED:
                k = tl.where(finite(k), k, 0.0)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=F.PRECISION)
            lent = tl.dot(lean.to(k.dtype), k, lent, input_precision=F.PRECISION)
        else:
            ds = slope(p, lean, dp, middle, share, F)
            logit, ds = pulled(ds, live, gated, steep, scales.scale, F, RULED)
            if F.GATE:
                one += tl.sum(logit, 1)
            if not F.WIDE:
                if RULED:
                    k = tl.where(finite(k), k, 0.0)
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=F.PRECISION)
    return dq, one, two, lent


@launched
def to_queries(
    given, at, counts, along, centre, kept, dquery, one_out, two_out, scales, steps,
    n, m, heads, group, lines, lower, upper, size, columns, dropped, hashed, at_columns, splits,
    span, F: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of queries and of their gate, which goes to `one_out`.

    If CENTRE is 1, instead the two sums of entmax's centre, Σ lean · ∂L/∂α and Σ lean. If it is 2,
    the centre given is a number near it, and the gradient is taken from there: the rest of the
    centre times Σ lean · ψ is subtracted at the end, and the centre goes to `one_out`. With WIDE
    the gradient of the query is not taken. `heads` are the query's.
    """
    z = Sizes(
        n, m, heads, group, n, lower, upper, size, columns, dropped, hashed, at_columns, splits,
        span,
    )  # fmt: skip
    if F.LISTED:
        if left_out(at, z, F):
            return
    rows, keys, spot, edges, part = rows_program(given, at, counts, steps, z, F)
    lo, inner_lo, inner_hi, hi = edges
    lines = tl.cast(lines, tl.int64)
    top, share, middle = kept_of(Back(along, centre, kept, lines), spot.line, F)
    top, share, middle = top[:, None], share[:, None], middle[:, None]
    do = fetch(along, spot.line * F.D, F.D, F.BLOCK_D)  # (ROWS, d)
    HELD: tl.constexpr = 16 if (F.WIDE or F.CENTRE == 1) else F.BLOCK_W
    LENT: tl.constexpr = F.BLOCK_W if F.CENTRE == 2 else 16
    state = (
        tl.zeros((F.ROWS, HELD), dtype=tl.float32),
        tl.zeros((F.ROWS,), dtype=tl.float32),
        tl.zeros((F.ROWS,), dtype=tl.float32),
        tl.zeros((F.ROWS, LENT), dtype=tl.float32),
    )
    if F.LOWER and not F.LAYOUT and F.LISTED < 2:
        state = queries_tiles(
            state, rows, do, top, share, middle, keys, scales, z, lo, inner_lo, F, True
        )
    if F.LISTED < 2:
        state = queries_tiles(
            state, rows, do, top, share, middle, keys, scales, z, inner_lo, inner_hi, F, False
        )
    if F.UPPER or F.CUT or F.LAYOUT or F.LISTED == 2:
        state = queries_tiles(
            state, rows, do, top, share, middle, keys, scales, z, inner_hi, hi, F, True
        )
    dq, one, two, lent = state
    line = spot.line
    there = spot.batch * steps.o_b + spot.head * steps.o_h
    there += spot.row * tl.cast(steps.o_n, tl.int64)
    if F.SPLIT:
        line += tl.cast(part, tl.int64) * lines
        there += part * lines * F.W
    if F.CENTRE == 1:
        tl.store(one_out + line, one, mask=spot.inside)
        tl.store(two_out + line, two, mask=spot.inside)
    else:
        if F.CENTRE == 2:
            rest = (one / tl.where(two == 0, 1.0, two))[:, None]
            dq = dq - rest * lent
            tl.store(one_out + line[:, None], middle + rest, mask=spot.inside[:, None])
        if F.GATE:
            if F.WEIGHTING == "softmax":
                one = one * LN2
            tl.store(one_out + line, one, mask=spot.inside)
        if not F.WIDE:
            dq = dq * left_over(scales.scale, F)
            column = tl.arange(0, F.BLOCK_W)[None, :]
            where = dquery + there[:, None] + column
            inside = spot.inside[:, None] & (column < F.W)
            tl.store(where, dq.to(dquery.dtype.element_ty), mask=inside)
