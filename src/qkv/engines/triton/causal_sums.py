"""Causal sums of dot products in O(n): outᵢ = Σ_{j ≤ i} (φ(aᵢ)·φ(bⱼ)) cⱼ, by chunks.

The rows of a lane (one batch and head) are divided into segments. `segment_kernel` computes the sum
Σ φ(b) cᵀ of each segment. `sum_kernel` adds those of the segments before its own, and goes through
its chunks: within a chunk the scores are computed as they are. φ is computed in the kernels.

- *Normalized*: outᵢ is divided by totalᵢ = Σ_{j ≤ i} φ(aᵢ)·φ(bⱼ).
- *Decay*: a score is multiplied by exp(−rate·(i − j)).

Backward, with G = ∂L/∂out:

- `query_gradient_kernel` goes through the chunks in the same order, with the sums of the forward
  pass. In a normalized sum, dφ(aᵢ) = (Σⱼ (Gᵢ·cⱼ) bⱼ − δᵢ Σⱼ bⱼ) / totalᵢ. The output does not
  depend on the length of φ(aᵢ), so φ(aᵢ)·dφ(aᵢ) = 0, which gives δᵢ without the output.
- `segment_kernel`, from the last row to the first, sums φ(a) Gᵀ / total.
- `key_value_kernel` goes through the chunks in that order.

The derivative by a rate is −Σ (i − j) of each pair's part of G·out. Sums of keys have a second sum
for it, in which each key counts as often as its distance.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.causal_sums import chunk_size, sum_any_causally
from qkv.engines.triton.launching import launch
from qkv.engines.triton.launching.tile_choice import Tile, next_power_of_2
from qkv.engines.triton.tile_functions.tiles import LOG2E, is_finite, jit_kernel
from qkv.scores.feature_map import FEATURES
from qkv.weightings.normalized import divisor_or_infinity

CHUNK = 64
COLUMNS_PER_PROGRAM = 64
"""Columns of the output per program, so that its sums fit into registers."""
PROGRAMS_PER_PROCESSOR = 8
MIN_CHUNKS_PER_SEGMENT = 4
IDENTITY, ELU, RELU, EXP = (tl.constexpr(x) for x in range(4))
FEATURE_CODES = {None: IDENTITY.value, "elu": ELU.value, "relu": RELU.value, "exp": EXP.value}
TILES = {
    "segment": Tile(CHUNK, CHUNK, CHUNK, 4, 2),
    "sum": Tile(CHUNK, CHUNK, CHUNK, 4, 2),
    "query_gradient": Tile(CHUNK, CHUNK, CHUNK, 4, 2),
    "key_value": Tile(CHUNK, CHUNK, CHUNK, 4, 2),
}


@triton.jit
def _load_rows(base, step, row, n, width, BLOCK: tl.constexpr, IS_FULL: tl.constexpr, F):
    """Return a chunk of rows, in float32 if their products are."""
    column = tl.arange(0, BLOCK)[None, :]
    at = base + row[:, None] * tl.cast(step, tl.int64) + column
    if F.EVEN and IS_FULL:
        x = tl.load(at)
    elif IS_FULL:
        x = tl.load(at, mask=(row < n)[:, None], other=0.0)
    else:
        x = tl.load(at, mask=(row < n)[:, None] & (column < width), other=0.0)
    if F.WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit
def _map_rows(x, F):
    """Return φ of rows (CHUNK, BLOCK_W). Columns from W on stay 0."""
    if F.PHI == 0:
        return x
    wide = x.to(tl.float32)
    if F.PHI == 1:
        wide = tl.where(wide > 0, wide + 1.0, tl.exp2(tl.where(wide > 0, 0.0, wide) * LOG2E))
    elif F.PHI == 2:
        wide = tl.where(wide < 0, 0.0, wide)
    else:
        wide = tl.exp2(wide * LOG2E)
    if F.W != F.BLOCK_W:
        wide = tl.where((tl.arange(0, F.BLOCK_W) < F.W)[None, :], wide, 0.0)
    return wide.to(x.dtype)


@triton.jit
def _scale_by_slope(gradient, x, F):
    """Return ∂L/∂x for ∂L/∂φ(x)."""
    wide = x.to(tl.float32)
    if F.PHI == 1:
        gradient *= tl.where(wide > 0, 1.0, tl.exp2(tl.where(wide > 0, 0.0, wide) * LOG2E))
    elif F.PHI == 2:
        gradient = tl.where(wide < 0, 0.0, gradient)
    elif F.PHI == 3:
        gradient *= tl.exp2(wide * LOG2E)
    return gradient


@triton.jit
def _load_line(base, line, row, n):
    return tl.load(base + line * n + row, mask=row < n, other=0.0)


@triton.jit
def _store_rows(x, value, line, row, n, WIDTH: tl.constexpr, column, F):
    """Write rows of a contiguous array (lanes, n, WIDTH)."""
    at = x + (line * n + row)[:, None] * WIDTH + column[None, :]
    inside = (row < n)[:, None] & (column < WIDTH)[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _lead(x, lane, heads, step_b, step_h, first):
    """Return the pointer to column `first` of a lane's rows."""
    at = tl.cast(lane // heads, tl.int64) * step_b + tl.cast(lane % heads, tl.int64) * step_h
    return x + at + first


@triton.jit
def _chunk_rows(chunk, chunks, F):
    """Return the rows of a chunk in the order of the sum, and how many come after each."""
    near = tl.arange(0, F.CHUNK)
    if F.REVERSED:
        return (chunks - 1 - chunk) * F.CHUNK + near, near.to(tl.float32)
    return chunk * F.CHUNK + near, (F.CHUNK - 1 - near).to(tl.float32)


@triton.jit
def _add_products(acc, s, rows, before, SAFE: tl.constexpr, F):
    """Return acc + s · rows. With SAFE, NaN in rows of pairs that do not count has no effect."""
    if SAFE:
        odd = tl.where(is_finite(rows), 0.0, 1.0).to(rows.dtype)
        seen = tl.where(before, 1.0, 0.0).to(rows.dtype)
        spoiled = tl.dot(seen, odd, input_precision=F.PRECISION)
        acc = tl.where(spoiled > 0, float("nan"), acc)
        rows = tl.where(odd > 0, 0.0, rows).to(rows.dtype)
    return tl.dot(s.to(rows.dtype), rows, acc, input_precision=F.PRECISION)


@triton.jit
def _add_sums(state, y, c, weight, rate, after, F):
    """Return the sums with those of one chunk, whose rows are `after` rows before its end.

    Sums: Σ y cᵀ (W, D) and Σ y weight (W,), and with F.MOMENTS the same of rows times their
    distance to the end. All decay by the rows of the chunk.
    """
    total, starts, moment, moment_starts = state
    if F.DECAYS:
        whole = tl.exp2(-rate * F.CHUNK)
        fade = tl.exp2(-rate * after)
        if F.MOMENTS:
            moment = (moment + F.CHUNK * total) * whole
            late = (c.to(tl.float32) * (fade * after)[:, None]).to(c.dtype)
            moment = tl.dot(tl.trans(y), late, moment, input_precision=F.PRECISION)
            if F.TOTALS:
                moment_starts = (moment_starts + F.CHUNK * starts) * whole
                moment_starts += tl.sum(y.to(tl.float32) * (fade * after)[:, None], 0)
        total = total * whole
        if F.TOTALS:
            starts = starts * whole
        c = (c.to(tl.float32) * fade[:, None]).to(c.dtype)
        weight = weight * fade
    total = tl.dot(tl.trans(y), c, total, input_precision=F.PRECISION)
    if F.TOTALS:
        starts += tl.sum(y.to(tl.float32) * weight[:, None], 0)
    return total, starts, moment, moment_starts


@triton.jit
def _no_sums(COLUMNS: tl.constexpr, F):
    """Return sums of no rows."""
    total = tl.zeros((F.BLOCK_W, COLUMNS), tl.float32)
    starts = tl.zeros((F.BLOCK_W,), tl.float32)
    if F.MOMENTS:
        return total, starts, total, starts
    else:
        return total, starts, starts, starts


@triton.jit
def _locate(splits, PARTS: tl.constexpr):
    """Return the lane, the segment, and the part of the columns of this program."""
    pid = tl.program_id(0)
    return pid // PARTS // splits, pid // PARTS % splits, pid % PARTS


@triton.jit
def _load_sums(totals, starts, moments, moment_starts, line, splits, segment, first,
               keys_tiles, rate, COLUMNS: tl.constexpr, F):  # fmt: skip
    """Return the sums of the segments before `segment`, and whether its own are not finite."""
    i = tl.arange(0, F.BLOCK_W)
    spot = i[:, None] * F.ALL_D + (first + tl.arange(0, COLUMNS))[None, :]
    total, of_y, moment, moment_of_y = _no_sums(COLUMNS, F)
    for before in tl.range(0, segment):
        at = line * splits + before
        one = tl.load(totals + at * (F.BLOCK_W * F.ALL_D) + spot)
        fade = 1.0
        gap = ((segment - 1 - before) * keys_tiles * F.CHUNK).to(tl.float32)
        if F.DECAYS:
            fade = tl.exp2(-rate * gap)
        total += one * fade
        if F.MOMENTS:
            late = tl.load(moments + at * (F.BLOCK_W * F.ALL_D) + spot)
            moment += (late + gap * one) * fade
        if F.TOTALS:
            two = tl.load(starts + at * F.BLOCK_W + i)
            of_y += two * fade
            if F.MOMENTS:
                moment_of_y += (tl.load(moment_starts + at * F.BLOCK_W + i) + gap * two) * fade
    if F.FIRST_LOOP == 1:
        is_odd = segment >= 0
    else:
        own = tl.load(totals + (line * splits + segment) * (F.BLOCK_W * F.ALL_D) + spot)
        is_odd = tl.max(tl.max(tl.where(is_finite(own), 0, 1), 1), 0) > 0
    return (total, of_y, moment, moment_of_y), is_odd


@triton.jit
def _split_loop(segment, keys_tiles, rows_tiles, is_odd):
    """Return the chunks of a segment: start and end, and the end of those with finite rows."""
    start = segment * keys_tiles
    end = tl.minimum(start + keys_tiles, rows_tiles)
    return start, tl.where(is_odd, start, end), end


@jit_kernel
def segment_kernel(
    y, c, inverse, delta, rates, totals, starts, moments, moment_starts, heads, y_b, y_h, y_n, c_b,
    c_h, c_n, n, rows_tiles, keys_tiles, splits, F: tl.constexpr,
):  # fmt: skip
    """Write the sums of one segment of `keys_tiles` chunks, of `rows_tiles` chunks in all.

    With F.DIVIDED, the rows c are those of queries: they are divided by the totals, and `delta`
    weighs the rows y.
    """
    lane, segment, part = _locate(splits, F.PARTS)
    first = part * F.BLOCK_D
    own_y = _lead(y, lane, heads, y_b, y_h, 0)
    own_c = _lead(c, lane, heads, c_b, c_h, first)
    line = tl.cast(lane, tl.int64)
    rate = 0.0
    if F.DECAYS:
        rate = tl.load(rates + lane % heads) * LOG2E
    state = _no_sums(F.BLOCK_D, F)
    end = tl.minimum((segment + 1) * keys_tiles, rows_tiles)
    for chunk in tl.range(segment * keys_tiles, end):
        row, after = _chunk_rows(chunk, rows_tiles, F)
        rows_y = _map_rows(_load_rows(own_y, y_n, row, n, F.W, F.BLOCK_W, F.W == F.BLOCK_W, F), F)
        rows_c = _load_rows(own_c, c_n, row, n, F.D - first, F.BLOCK_D, F.D == F.ALL_D, F)
        weight = tl.full((F.CHUNK,), 1.0, tl.float32)
        if F.DIVIDED:
            one = _load_line(inverse, line, row, n)
            weight = -one * _load_line(delta, line, row, n)
            rows_c = (rows_c.to(tl.float32) * one[:, None]).to(rows_c.dtype)
        state = _add_sums(state, rows_y, rows_c, weight, rate, after, F)
    total, of_y, moment, moment_of_y = state
    at = line * splits + segment
    i = tl.arange(0, F.BLOCK_W)
    spot = i[:, None] * F.ALL_D + (first + tl.arange(0, F.BLOCK_D))[None, :]
    tl.store(totals + at * (F.BLOCK_W * F.ALL_D) + spot, total)
    if F.MOMENTS:
        tl.store(moments + at * (F.BLOCK_W * F.ALL_D) + spot, moment)
    if F.TOTALS:
        tl.store(starts + at * F.BLOCK_W + i, of_y)
        if F.MOMENTS:
            tl.store(moment_starts + at * F.BLOCK_W + i, moment_of_y)


@jit_kernel
def sum_kernel(
    x, y, c, rates, totals, starts, out, heads, x_b, x_h, x_n, y_b, y_h, y_n, c_b, c_h, c_n, n,
    rows_tiles, keys_tiles, splits, F: tl.constexpr,
):  # fmt: skip
    """Write the output rows of one segment. The arguments are those of `segment_kernel`."""
    lane, segment, part = _locate(splits, F.PARTS)
    first = part * F.BLOCK_D
    own_x = _lead(x, lane, heads, x_b, x_h, 0)
    own_y = _lead(y, lane, heads, y_b, y_h, 0)
    own_c = _lead(c, lane, heads, c_b, c_h, first)
    line = tl.cast(lane, tl.int64)
    rate = 0.0
    if F.DECAYS:
        rate = tl.load(rates + lane % heads) * LOG2E
    state, is_odd = _load_sums(
        totals, starts, None, None, line, splits, segment, first, keys_tiles, rate, F.BLOCK_D, F
    )
    near = tl.arange(0, F.CHUNK)
    far = (near[:, None] - near[None, :]).to(tl.float32)
    before = far >= 0
    start, middle, end = _split_loop(segment, keys_tiles, rows_tiles, is_odd)
    for SAFE in tl.static_range(F.FIRST_LOOP, 2):
        for chunk in tl.range(middle if SAFE else start, end if SAFE else middle):
            row, after = _chunk_rows(chunk, rows_tiles, F)
            rows_x = _map_rows(
                _load_rows(own_x, x_n, row, n, F.W, F.BLOCK_W, F.W == F.BLOCK_W, F), F
            )
            rows_y = _map_rows(
                _load_rows(own_y, y_n, row, n, F.W, F.BLOCK_W, F.W == F.BLOCK_W, F), F
            )
            rows_c = _load_rows(own_c, c_n, row, n, F.D - first, F.BLOCK_D, F.D == F.ALL_D, F)
            total, of_y, _, _ = state
            acc = tl.dot(rows_x, total.to(rows_x.dtype), input_precision=F.PRECISION)
            s = tl.dot(rows_x, tl.trans(rows_y), input_precision=F.PRECISION)
            fade = tl.full((F.CHUNK,), 1.0, tl.float32)
            if F.DECAYS:
                s = s * tl.exp2(-rate * far)
                fade = tl.exp2(-rate * (F.CHUNK - after))
                acc = acc * fade[:, None]
            s = tl.where(before, s, 0.0)
            acc = _add_products(acc, s, rows_c, before, SAFE, F)
            if F.TOTALS:
                whole = tl.sum(rows_x.to(tl.float32) * of_y[None, :], 1) * fade + tl.sum(s, 1)
                acc = (
                    acc * tl.where(whole == 0, 0.0, 1.0 / tl.where(whole == 0, 1.0, whole))[:, None]
                )
            _store_rows(out, acc, line, row, n, F.D, first + tl.arange(0, F.BLOCK_D), F)
            weight = tl.full((F.CHUNK,), 1.0, tl.float32)
            state = _add_sums(state, rows_y, rows_c, weight, rate, after, F)


@jit_kernel
def query_gradient_kernel(
    x, y, c, along, rates, totals, starts, moments, moment_starts, dx, inverse, delta, drates,
    heads, x_b, x_h, x_n, y_b, y_h, y_n, c_b, c_h, c_n, g_b, g_h, g_n, n, rows_tiles, keys_tiles,
    splits, F: tl.constexpr,
):  # fmt: skip
    """Write ∂L/∂x of one segment; with totals also 1 / total and δ, with moments ∂L/∂rate."""
    lane, segment, _part = _locate(splits, 1)
    own_x = _lead(x, lane, heads, x_b, x_h, 0)
    own_y = _lead(y, lane, heads, y_b, y_h, 0)
    own_c = _lead(c, lane, heads, c_b, c_h, 0)
    own_g = _lead(along, lane, heads, g_b, g_h, 0)
    line = tl.cast(lane, tl.int64)
    rate = 0.0
    if F.DECAYS:
        rate = tl.load(rates + lane % heads) * LOG2E
    state, is_odd = _load_sums(
        totals, starts, moments, moment_starts, line, splits, segment, 0, keys_tiles, rate,
        F.ALL_D, F,
    )  # fmt: skip
    near = tl.arange(0, F.CHUNK)
    far = (near[:, None] - near[None, :]).to(tl.float32)
    before = far >= 0
    drate = 0.0
    start, middle, end = _split_loop(segment, keys_tiles, rows_tiles, is_odd)
    for SAFE in tl.static_range(F.FIRST_LOOP, 2):
        for chunk in tl.range(middle if SAFE else start, end if SAFE else middle):
            row, after = _chunk_rows(chunk, rows_tiles, F)
            given_x = _load_rows(own_x, x_n, row, n, F.W, F.BLOCK_W, F.W == F.BLOCK_W, F)
            rows_y = _map_rows(
                _load_rows(own_y, y_n, row, n, F.W, F.BLOCK_W, F.W == F.BLOCK_W, F), F
            )
            rows_c = _load_rows(own_c, c_n, row, n, F.D, F.ALL_D, F.D == F.ALL_D, F)
            rows_g = _load_rows(own_g, g_n, row, n, F.D, F.ALL_D, F.D == F.ALL_D, F)
            total, of_y, moment, moment_of_y = state
            acc = tl.dot(rows_g, tl.trans(total).to(rows_g.dtype), input_precision=F.PRECISION)
            nearer = acc
            ds = tl.dot(rows_g, tl.trans(rows_c), input_precision=F.PRECISION)
            fade = tl.full((F.CHUNK,), 1.0, tl.float32)
            count = tl.where(before, 1.0, 0.0)
            if F.DECAYS:
                count = tl.where(before, tl.exp2(-rate * far), 0.0)
                fade = tl.exp2(-rate * (F.CHUNK - after))
                acc = acc * fade[:, None]
            ds = tl.where(before, ds * count, 0.0)
            acc = _add_products(acc, ds, rows_y, before, SAFE, F)
            if F.TOTALS or F.MOMENTS:
                rows_x = _map_rows(given_x, F)
                wide_x = rows_x.to(tl.float32)
            if F.TOTALS:
                sums = tl.zeros((F.CHUNK, F.BLOCK_W), tl.float32) + of_y[None, :] * fade[:, None]
                sums = _add_products(sums, count, rows_y, before, SAFE, F)
                whole = tl.sum(wide_x * sums, 1)
                one = tl.where(whole == 0, 0.0, 1.0 / tl.where(whole == 0, 1.0, whole))
                two = tl.sum(wide_x * acc, 1) * one
                acc = (acc - two[:, None] * sums) * one[:, None]
                tl.store(inverse + line * n + row, one, mask=row < n)
                tl.store(delta + line * n + row, two, mask=row < n)
            if F.MOMENTS:
                local = F.CHUNK - after
                s = tl.dot(rows_x, tl.trans(rows_y), input_precision=F.PRECISION)
                late = tl.trans(moment).to(rows_g.dtype)
                farther = tl.dot(rows_g, late, input_precision=F.PRECISION)
                farther = (farther + local[:, None] * nearer) * fade[:, None]
                share = tl.sum(wide_x * farther, 1)
                if F.TOTALS:
                    ds = ds - two[:, None] * count
                    of_rows = moment_of_y[None, :] + local[:, None] * of_y[None, :]
                    share -= two * tl.sum(wide_x * of_rows, 1) * fade
                share += tl.sum(tl.where(before, far * s * ds, 0.0), 1)
                if F.TOTALS:
                    share = share * one
                drate -= tl.sum(tl.where(row < n, share, 0.0), 0)
            acc = _scale_by_slope(acc, given_x, F)
            _store_rows(dx, acc, line, row, n, F.W, tl.arange(0, F.BLOCK_W), F)
            weight = tl.full((F.CHUNK,), 1.0, tl.float32)
            state = _add_sums(state, rows_y, rows_c, weight, rate, after, F)
    if F.MOMENTS:
        tl.store(drates + line * splits + segment, drate)


@jit_kernel
def key_value_kernel(
    x, y, c, along, inverse, delta, rates, totals, starts, dy, dc, heads, x_b, x_h, x_n, y_b, y_h,
    y_n, c_b, c_h, c_n, g_b, g_h, g_n, n, rows_tiles, keys_tiles, splits, F: tl.constexpr,
):  # fmt: skip
    """Write ∂L/∂y and ∂L/∂c of one segment, from its last row to its first."""
    lane, segment, _part = _locate(splits, 1)
    own_x = _lead(x, lane, heads, x_b, x_h, 0)
    own_y = _lead(y, lane, heads, y_b, y_h, 0)
    own_c = _lead(c, lane, heads, c_b, c_h, 0)
    own_g = _lead(along, lane, heads, g_b, g_h, 0)
    line = tl.cast(lane, tl.int64)
    rate = 0.0
    if F.DECAYS:
        rate = tl.load(rates + lane % heads) * LOG2E
    state, is_odd = _load_sums(
        totals, starts, None, None, line, splits, segment, 0, keys_tiles, rate, F.ALL_D, F
    )
    near = tl.arange(0, F.CHUNK)
    far = (near[None, :] - near[:, None]).to(tl.float32)
    before = far >= 0
    start, middle, end = _split_loop(segment, keys_tiles, rows_tiles, is_odd)
    for SAFE in tl.static_range(F.FIRST_LOOP, 2):
        for chunk in tl.range(middle if SAFE else start, end if SAFE else middle):
            row, after = _chunk_rows(chunk, rows_tiles, F)
            given_y = _load_rows(own_y, y_n, row, n, F.W, F.BLOCK_W, F.W == F.BLOCK_W, F)
            rows_y = _map_rows(given_y, F)
            rows_c = _load_rows(own_c, c_n, row, n, F.D, F.ALL_D, F.D == F.ALL_D, F)
            rows_x = _map_rows(
                _load_rows(own_x, x_n, row, n, F.W, F.BLOCK_W, F.W == F.BLOCK_W, F), F
            )
            rows_g = _load_rows(own_g, g_n, row, n, F.D, F.ALL_D, F.D == F.ALL_D, F)
            total, of_x, _, _ = state
            fade = tl.full((F.CHUNK,), 1.0, tl.float32)
            weight = tl.full((F.CHUNK,), 1.0, tl.float32)
            if F.TOTALS:
                one = _load_line(inverse, line, row, n)
                two = _load_line(delta, line, row, n)
                weight = -one * two
            s = tl.dot(rows_y, tl.trans(rows_x), input_precision=F.PRECISION)
            ds = tl.dot(rows_c, tl.trans(rows_g), input_precision=F.PRECISION)
            if F.TOTALS:
                s = s * one[None, :]
                ds = (ds - two[None, :]) * one[None, :]
            dc_rows = tl.dot(rows_y, total.to(rows_y.dtype), input_precision=F.PRECISION)
            dy_rows = tl.dot(rows_c, tl.trans(total).to(rows_c.dtype), input_precision=F.PRECISION)
            if F.TOTALS:
                dy_rows = dy_rows + of_x[None, :]
            if F.DECAYS:
                fade = tl.exp2(-rate * (F.CHUNK - after))
                dc_rows = dc_rows * fade[:, None]
                dy_rows = dy_rows * fade[:, None]
                count = tl.exp2(-rate * far)
                s = s * count
                ds = ds * count
            s = tl.where(before, s, 0.0)
            ds = tl.where(before, ds, 0.0)
            dc_rows = _add_products(dc_rows, s, rows_g, before, SAFE, F)
            _store_rows(dc, dc_rows, line, row, n, F.D, tl.arange(0, F.ALL_D), F)
            dy_rows = _add_products(dy_rows, ds, rows_x, before, SAFE, F)
            dy_rows = _scale_by_slope(dy_rows, given_y, F)
            _store_rows(dy, dy_rows, line, row, n, F.W, tl.arange(0, F.BLOCK_W), F)
            if F.TOTALS:
                rows_g = (rows_g.to(tl.float32) * one[:, None]).to(rows_g.dtype)
            state = _add_sums(state, rows_x, rows_g, weight, rate, after, F)


def _list_steps(*arrays: Tensor) -> tuple[int, ...]:
    return tuple(step for x in arrays for step in x.stride()[:3])


class Plan:
    """The segments of a sum, and the constants of its kernels."""

    def __init__(
        self, x: Tensor, c: Tensor, rates: Tensor | None, is_normalized: bool, phi: str | None,
        learns_rates: bool,
    ) -> None:  # fmt: skip
        (b, self.heads, self.n, w), d = x.shape, c.shape[-1]
        self.lanes, self.rates, self.device = b * self.heads, rates, x.device
        block_w = max(next_power_of_2(w), 16)
        block_d = min(max(next_power_of_2(d), 16), COLUMNS_PER_PROGRAM)
        self.parts, self.chunks = -(-d // block_d), -(-self.n // CHUNK)
        programs = launch.count_processors(x.device) * PROGRAMS_PER_PROCESSOR
        wanted = -(-programs // (self.lanes * self.parts))
        self.span = -(-self.chunks // max(min(wanted, self.chunks // MIN_CHUNKS_PER_SEGMENT), 1))
        self.splits = -(-self.chunks // self.span)
        self.facts: dict[str, Any] = {
            "W": w, "D": d, "BLOCK_W": block_w, "BLOCK_D": block_d, "ALL_D": self.parts * block_d,
            "CHUNK": CHUNK, "PARTS": self.parts, "PHI": FEATURE_CODES[phi],
            "TOTALS": is_normalized, "DIVIDED": False, "REVERSED": False,
            "DECAYS": rates is not None, "MOMENTS": learns_rates, "WIDE": x.dtype == torch.float16,
            "EVEN": self.n % CHUNK == 0, "FIRST_LOOP": int(self.splits == 1),
            "PRECISION": "tf32" if x.dtype == torch.float16 else "ieee",
        }  # fmt: skip

    def run(
        self, kernel: Any, name: str, parts: int, arrays: tuple[Any, ...], steps: tuple[int, ...],
        **facts: bool,
    ) -> None:  # fmt: skip
        sizes = self.n, self.chunks, self.span, self.splits
        launch.launch_kernel(
            kernel, self.lanes * self.splits * parts, arrays, (), (self.heads, *steps, *sizes),
            self.facts | facts, TILES[name],
        )  # fmt: skip

    def sum_segments(
        self, y: Tensor, c: Tensor, inverse: Tensor | None = None, delta: Tensor | None = None,
        **facts: bool,
    ) -> list[Tensor | None]:  # fmt: skip
        """Return Σ y cᵀ and Σ y of each segment, and the same times the distance to its end."""
        counts = self.lanes, self.splits, self.facts["BLOCK_W"]
        has_moments = facts.get("MOMENTS", self.facts["MOMENTS"])
        sums: list[Tensor | None] = []
        for exists in (True, has_moments):
            for shape in ((*counts, self.facts["ALL_D"]), counts):
                exists = exists and (len(shape) == 4 or self.facts["TOTALS"])
                sums.append(y.new_empty(shape, dtype=torch.float32) if exists else None)
        totals, starts, moments, moment_starts = sums
        arrays = y, c, inverse, delta, self.rates, totals, starts, moments, moment_starts
        if self.splits > 1:
            self.run(segment_kernel, "segment", self.parts, arrays, _list_steps(y, c), **facts)
        return sums


class CausalSums(torch.autograd.Function):
    """outᵢ = Σ_{j ≤ i} (φ(xᵢ)·φ(yⱼ)) cⱼ of rows (B, H, n, w), (B, H, n, w) and (B, H, n, d).

    `rates` (H,) are float32 or None. `reference` computes the same differentiably.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, c: Tensor, rates: Tensor | None, is_normalized: bool,
        phi: str | None, reference: Any,
    ) -> Tensor:  # fmt: skip
        x, y, c = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, y, c))
        out = c.new_empty((*x.shape[:-1], c.shape[-1]))
        plan = Plan(x, c, rates, is_normalized, phi, ctx.needs_input_grad[3])
        sums: list[Tensor | None] = [None] * 4
        if out.numel():
            with launch.use_device(x.device):
                sums = plan.sum_segments(y, c)
                arrays = x, y, c, rates, *sums[:2], out
                steps = _list_steps(x, y, c)
                plan.run(sum_kernel, "sum", plan.parts, arrays, steps, MOMENTS=False)
        ctx.save_for_backward(x, y, c, rates, *sums)
        ctx.plan, ctx.reference = plan, reference
        return out

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> Any:
        x, y, c, rates, *sums = ctx.saved_tensors
        needs = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():  # a second derivative
            again, arrays = ctx.reference(x, y, c, rates), (x, y, c, rates)
            chosen = [t for t, is_needed in zip(arrays, needs, strict=True) if is_needed]
            found = iter(torch.autograd.grad(again, chosen, along, create_graph=True))
            return (*(next(found) if is_needed else None for is_needed in needs), *[None] * 3)
        gradients = _differentiate_sums(ctx.plan, x, y, c, along, sums, needs)
        return (*gradients, *[None] * 3)


def _differentiate_sums(
    plan: Plan, x: Tensor, y: Tensor, c: Tensor, along: Tensor, sums: list[Tensor | None],
    needs: tuple[bool, ...],
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of x, y, c and the rates; None for those that are not needed."""
    along = along if along.stride(-1) == 1 else along.contiguous()
    is_normalized, learns_rates = plan.facts["TOTALS"], needs[3]
    dx, dy, dc = (t.new_empty(t.shape) for t in (x, y, c))
    drates = x.new_empty((plan.lanes, plan.splits), dtype=torch.float32) if learns_rates else None
    inverse, delta = (
        x.new_empty((plan.lanes, plan.n), dtype=torch.float32) if is_normalized else None
        for _ in range(2)
    )
    if not along.numel():
        zeros = [t.zero_() for t in (dx, dy, dc)]
        return [*zeros, x.new_zeros(plan.heads, dtype=torch.float32) if learns_rates else None]
    steps = _list_steps(x, y, c, along)
    with launch.use_device(x.device):
        if needs[0] or learns_rates or is_normalized:
            arrays = x, y, c, along, plan.rates, *sums, dx, inverse, delta, drates
            plan.run(query_gradient_kernel, "query_gradient", 1, arrays, steps)
        if needs[1] or needs[2]:
            facts = {"REVERSED": True, "MOMENTS": False}
            late = plan.sum_segments(x, along, inverse, delta, DIVIDED=is_normalized, **facts)
            arrays = x, y, c, along, inverse, delta, plan.rates, *late[:2], dy, dc
            plan.run(key_value_kernel, "key_value", 1, arrays, steps, **facts)
    drate = None if drates is None else drates.sum(1).view(-1, plan.heads).sum(0)
    return [
        g if is_needed else None for g, is_needed in zip((dx, dy, dc, drate), needs, strict=True)
    ]


def sum_rows(
    query: Tensor, key: Tensor, value: Tensor, lead: tuple[int, ...], rates: Any,
    is_normalized: bool, phi: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the causal sums (*lead, n, d) of rows whose leading axes broadcast to `lead`.

    `rates` is None, a number, or (h, 1, 1). `phi` is a name in `FEATURES`, or None.
    """
    n = query.shape[-2]
    axes = (1, 1, *lead)[-max(len(lead), 2) :]
    rows = []
    for x in (query, key, value):
        x = x[..., :n, :]
        if x.shape[-2] < n:
            x = torch.nn.functional.pad(x, (0, 0, 0, n - x.shape[-2]))
        rows.append(x.expand(*axes, *x.shape[-2:]).reshape(-1, *axes[-1:], *x.shape[-2:]))
    each: Tensor | None = None
    if rates is not None:
        flat = torch.as_tensor(rates, dtype=torch.float32, device=query.device).reshape(-1)
        each = flat.expand(axes[-1]).contiguous()

    def reference(query: Tensor, key: Tensor, value: Tensor, each: Tensor | None) -> Tensor:
        return _sum_differentiably(query, key, value, each, is_normalized, phi)

    out: Tensor = CausalSums.apply(*rows, each, is_normalized, phi, reference)
    return out.reshape(*lead, n, out.shape[-1])


def _sum_differentiably(
    query: Tensor, key: Tensor, value: Tensor, rates: Tensor | None, is_normalized: bool,
    phi: str | None,
) -> Tensor:  # fmt: skip
    """Return the sums by PyTorch's operations, which have all derivatives."""
    dtype = value.dtype
    query, key, value = (x.float() for x in (query, key, value))
    if phi is not None:
        query, key = FEATURES[phi](query), FEATURES[phi](key)
    if is_normalized:
        value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    size = chunk_size(query.shape[-1], value.shape[-1])
    rate = None if rates is None else rates[:, None, None]
    out: Any = sum_any_causally(query, key, value, size, rate)
    if is_normalized:
        out = out[..., :-1] / divisor_or_infinity(out[..., -1:])
    summed: Tensor = out.to(dtype)
    return summed
