"""Device functions on tiles: which tiles a row sees, which pairs count, how rows are loaded.

Names: i and j are positions of queries and keys, shaped to broadcast to a tile. A *pair* is one
batch and one head of keys, which `group` heads of queries share. Tiles of keys (of queries in
`backward_keys`) are numbered from 0; `at` lists them for a block layout.
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

from qkv.engines.triton.launching.precompile import NotifyingKernel

# Import these by name: Triton's cache key covers functions, but not constants of a module.
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INFINITY = tl.constexpr(float("-inf"))
INFINITY = tl.constexpr(float("inf"))
LOWEST_FLOAT32 = tl.constexpr(-3e38)
"""Nearly the lowest float32, so that adding a score does not make it −∞."""
PARTIAL_SUM_COLUMNS = tl.constexpr(8)
LAST_POSITION = tl.constexpr(2**31 - 1)
"""A position after all others."""

UNSPECIALIZED_NAMES = (
    "n", "m", "rows", "rows_a", "rows_b", "length", "length_out", "lines", "lower", "upper",
    "at_columns", "splits", "parts", "parts_lines", "count", "first_pair", "first_key", "keys_n",
    "top_k", "tiles_a", "jobs_a", "others_count", "words", "rows_own", "keys_own", "lanes_own",
    "batches_own", "heads_own", "rows_tiles", "keys_tiles", "batches_shared", "first_lane",
    "first_row", "rows_n",
    "batches_shared", "first_lane", "first_row", "rows_n",
)  # fmt: skip
"""Names of integer parameters that change between calls and are not part of `records.Sizes`."""

jit_kernel = partial(
    triton.jit if triton.knobs.runtime.interpret else NotifyingKernel,
    do_not_specialize=UNSPECIALIZED_NAMES,
)
"""Decorator of kernels. A kernel is compiled once for all values of these parameters; Triton would
compile again for 1 and for multiples of 16. Strides stay specialized: aligned rows are read 16
bytes at a time."""


@triton.jit
def visible_tiles(first, last, lower, upper, end, BLOCK: tl.constexpr, LOWER, UPPER):
    """Return which tiles the rows first … last see, with lower ≤ j − i ≤ upper and j < end.

    Some pair counts in tiles lo … hi − 1, and every pair in tiles inner_lo … inner_hi − 1.
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
def listed_tiles(counts, line):
    """Return `visible_tiles` of a tile list: full tiles come first."""
    whole = tl.load(counts + line * 2)
    return 0, 0, whole, whole + tl.load(counts + line * 2 + 1)


@triton.jit
def wait_for_previous_launch(F):
    """Wait until the previous launch has ended, if this one may have started early."""
    if F.EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def lanes_and_rows(first, length, ROWS: tl.constexpr):
    """Return the lane of each of ROWS rows from `first` on, and its row within that lane.

    A lane has `length` rows. The function makes one 64-bit division: one per row would take longer
    than reading the row.
    """
    lane = first // length
    near = (first - lane * length).to(tl.int32) + tl.arange(0, ROWS)
    return lane.to(tl.int32) + near // length, near % length


@triton.jit
def clamp(x, lo, hi):
    return tl.minimum(tl.maximum(x, lo), hi)


@triton.jit
def clip_to_part(edges, part, span):
    """Return these tile bounds clipped to one part of a split loop."""
    lo, inner_lo, inner_hi, hi = edges
    start = part * span
    stop = start + span
    lo = clamp(lo, start, stop)
    inner_lo = clamp(inner_lo, start, stop)
    inner_hi = clamp(inner_hi, start, stop)
    return lo, inner_lo, inner_hi, clamp(hi, start, stop)


@triton.jit
def load_length(lengths, batch, m):
    """Return how many of a batch's m keys count."""
    end = m
    if lengths is not None:
        end = tl.minimum(tl.load(lengths + batch), m).to(tl.int32)
    return end


@triton.jit
def clip_to_spans(edges, spans, first, last, length, BLOCK: tl.constexpr):
    """Return these tile bounds clipped to the tiles that the rows first … last see.

    Row i sees spans[i] … spans[length + i] − 1. Neither the starts nor the ends decrease.
    """
    lo, inner_lo, inner_hi, hi = edges
    spans_end = spans + length
    lo = tl.maximum(lo, tl.load(spans + first) // BLOCK)
    hi = tl.maximum(tl.minimum(hi, (tl.load(spans_end + last) + BLOCK - 1) // BLOCK), lo)
    inner_lo = tl.maximum(inner_lo, (tl.load(spans + last) + BLOCK - 1) // BLOCK)
    inner_lo = clamp(inner_lo, lo, hi)
    inner_hi = clamp(tl.minimum(inner_hi, tl.load(spans_end + first) // BLOCK), inner_lo, hi)
    return lo, inner_lo, inner_hi, hi


@triton.jit
def live_pairs(i, j, end, layout, spans, z, F):
    """Return which pairs of a tile count."""
    live = (i < z.n) & (j < end)
    if F.SPANS:
        near = tl.minimum(i, z.n - 1)
        live = live & (j >= tl.load(spans + near)) & (j < tl.load(spans + (z.n + near)))
    if F.LOWER:
        live = live & (j - i >= z.lower)
    if F.UPPER:
        live = live & (j - i <= z.upper)
    if F.LAYOUT:
        cell = layout + (i // z.size) * z.columns + j // z.size
        live = live & (tl.load(cell, mask=live, other=0) != 0)
    return live


@triton.jit
def apply_rule(live, b, h, i, j, given, z, F):
    """Return which of the live pairs of a tile the rule of the mask allows."""
    if F.HAS_RULE:
        live = live & F.RULE(b, h, i, j, given, z, F)
    return live


@triton.jit
def apply_mask_array(read, live, times, F, MASKED: tl.constexpr, QUICK: tl.constexpr = False):
    """Return what a tile of the mask array adds to the scores, and which pairs then count.

    With QUICK, adding −∞ excludes a pair without a comparison, as long as its score is finite.
    """
    if F.PAIRS == 1:
        added = read
        counts = read != 0
    else:
        added = read.to(tl.float32)
        counts = live
        if not QUICK:
            counts = added > NEG_INFINITY
    if MASKED:
        counts = counts & live
    if F.PAIRS == 2:
        if F.APART:  # log₂e times the lowest float would be −∞
            added = tl.maximum(added, LOWEST_FLOAT32 / tl.maximum(times, 1.0))
        added = added * times
        if not QUICK:
            added = tl.where(counts, added, 0.0)
    return added, counts


@triton.jit
def mix_bits(x):
    """Return the hash lowbias32 (Wellons) of uint32, as in `qkv.engines.dropout`."""
    x = (x ^ (x >> 16)) * tl.cast(0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.cast(0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def row_hash(seed, lane, i, hashed):
    """Return the dropout hash of rows i of a lane; `hashed` lanes make a batch."""
    x = mix_bits(tl.load(seed).to(tl.uint32, bitcast=True))
    x = mix_bits(x ^ tl.cast(lane // hashed, tl.uint32))
    x = mix_bits(x ^ tl.cast(lane % hashed, tl.uint32))
    return mix_bits(x ^ tl.cast(i, tl.uint32))


@triton.jit
def dropout_factor(of_row, j, dropped, share):
    """Return 0 for dropped weights of a tile, `share` for the others."""
    x = mix_bits(of_row ^ tl.cast(j, tl.uint32)) & tl.cast(0x7FFFFFFF, tl.uint32)
    return tl.where(x >= tl.cast(dropped, tl.uint32), share, 0.0)


@triton.jit
def load_rows(base, offset, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows at these offsets, (rows, BLOCK), with 0 beyond their width."""
    column = tl.arange(0, BLOCK)[None, :]
    if WIDTH == BLOCK:
        x = tl.load(base + offset[:, None] + column)
    elif WIDTH == 1:
        x = tl.where(column == 0, tl.load(base + offset)[:, None], 0.0)
    else:
        x = tl.load(base + offset[:, None] + column, mask=column < WIDTH, other=0.0)
    return x


@triton.jit
def load_some_columns(base, offset, width, BLOCK: tl.constexpr):
    """Load rows as `load_rows` does, with a width that is known only at run time."""
    column = tl.arange(0, BLOCK)[None, :]
    return tl.load(base + offset[:, None] + column, mask=column < width, other=0.0)


@triton.jit
def make_descriptor(
    base, rows, step, WIDTH, ROWS: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr
):
    """Return a matrix as `load_row_tile` reads it: a TMA descriptor, or the pointer itself."""
    if TMA:
        source = tl.make_tensor_descriptor(base, [rows, WIDTH], [step, 1], [ROWS, BLOCK])
    else:
        source = base
    return source


@triton.jit
def load_row_tile(source, start, step, here, WIDTH, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """Load the tile of rows from `start` on; beyond the last row it repeats that row, or has 0."""
    if TMA:
        x = source.load([start, 0])
    else:
        x = load_rows(source + start * step, here * step, WIDTH, BLOCK)
    return x


@triton.jit
def load_width(width, F):
    """Return the columns of φ and ψ, from device memory if only the device knows them."""
    columns = F.W
    if width is not None:
        columns = tl.load(width)
    return columns


@triton.jit
def add_wide_product(
    x, left, left_at, right, right_at, width,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr = False,
):  # fmt: skip
    """Return x + left · rightᵀ for wide rows, one chunk of the width at a time.

    left_at and right_at are offsets of the rows; with TMA, the first rows of descriptors.
    """
    for start in tl.range(0, width, CHUNK):
        if TMA:
            a = left.load([left_at, start])
            b = right.load([right_at, start])
        elif WIDTH % CHUNK == 0:
            a = load_rows(left + start, left_at, CHUNK, CHUNK)
            b = load_rows(right + start, right_at, CHUNK, CHUNK)
        else:
            a = load_some_columns(left + start, left_at, WIDTH - start, CHUNK)
            b = load_some_columns(right + start, right_at, WIDTH - start, CHUNK)
        x = tl.dot(a, tl.trans(b), x, input_precision=PRECISION)
    return x


@triton.jit
def fold_columns(x):
    """Return the sums of every eighth column, (rows, 8), which add up to the row sums.

    One thread holds such columns, so a loop that accumulates them needs no exchange of data. A
    single row is spread over all threads; its sum is returned in eight equal parts.
    """
    if x.shape[0] == 1:
        share = tl.sum(x, 1)[:, None] * (1 / PARTIAL_SUM_COLUMNS)
        return tl.broadcast_to(share, (1, PARTIAL_SUM_COLUMNS))
    return tl.sum(
        tl.reshape(x, (x.shape[0], x.shape[1] // PARTIAL_SUM_COLUMNS, PARTIAL_SUM_COLUMNS)), 1
    )


@triton.jit
def fold_maxima(x):
    """Return the maxima of every eighth column, as `fold_columns` does for sums."""
    if x.shape[0] == 1:
        return tl.broadcast_to(tl.max(x, 1)[:, None], (1, PARTIAL_SUM_COLUMNS))
    return tl.max(
        tl.reshape(x, (x.shape[0], x.shape[1] // PARTIAL_SUM_COLUMNS, PARTIAL_SUM_COLUMNS)), 1
    )


@triton.jit
def fast_exp2(x, FAST: tl.constexpr):
    """Return 2ˣ; FAST rounds results below the smallest normal number to 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def fast_log2(x, FAST: tl.constexpr):
    """Return log₂ x; FAST is correct to 22 bits, and takes subnormal numbers for 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


EXCESS_PTX = tl.constexpr("""
{
    .reg .f32 more;
    sub.ftz.f32 more, $1, $2;
    mul.ftz.sat.f32 $0, more, 0f7F61B1E6;
}
""")


@triton.jit
def exceeds(x, cut, FAST: tl.constexpr):
    """Return 1.0 where x > cut, else 0.0.

    FAST multiplies the difference by 3e38 and limits it to 0 … 1. These instructions run twice as
    fast as a comparison. They take subnormal differences for 0.
    """
    if FAST:
        return tl.inline_asm_elementwise(
            EXCESS_PTX, "=f,f,f", [x, cut], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.where(x > cut, 1.0, 0.0)


@triton.jit
def is_positive(x, FAST: tl.constexpr):
    """Return 1.0 for x > 0, else 0.0, to within 1e-30; in one instruction if FAST."""
    if FAST:
        return tl.inline_asm_elementwise(
            "mul.ftz.sat.f32 $0, $1, 0f7149F2CA;", "=f,f", [x],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.minimum(tl.maximum(x * 1e30, 0.0), 1.0)


APART_PTX = tl.constexpr("""
{
    .reg .f32 size, more;
    abs.ftz.f32 size, $1;
    sub.ftz.f32 more, size, $2;
    mul.ftz.sat.f32 $0, more, 0f7F61B1E6;
}
""")


@triton.jit
def is_apart(x, slack, FAST: tl.constexpr):
    """Return 1.0 where |x| > slack, else 0.0; see `exceeds`."""
    if FAST:
        return tl.inline_asm_elementwise(
            APART_PTX, "=f,f,f", [x, slack], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.where(tl.abs(x) > slack, 1.0, 0.0)


@triton.jit
def limited_product(x, y, FAST: tl.constexpr):
    """Return x · y limited to 0 … 1; 0 for NaN."""
    if FAST:
        return tl.inline_asm_elementwise(
            "mul.ftz.sat.f32 $0, $1, $2;", "=f,f,f", [x, y],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.minimum(tl.maximum(x * y, 0.0), 1.0)


@triton.jit
def compare_to_halves(x):
    """Return 1 for x > 0, ½ for 0, and 0 for x < 0 or NaN, in one instruction of NVIDIA GPUs.

    It multiplies x by 2¹²⁶, adds ½, and limits the sum to 0 … 1. So it is exact for every x that is
    not subnormal.
    """
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, 0f7E800000, 0f3F000000;", "=f,f", [x],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def gather(source, at, F):
    """Return the numbers at these places of a small array.

    FAST loads each number where its score is. Triton would load them in the order of memory, and
    exchange them between threads, stages ahead: four times slower.
    """
    if F.FAST and source.dtype.element_ty == tl.float32:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [(source + at).to(tl.int64)],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.load(source + at)


FLOAT_BITS_OF_2_23 = tl.constexpr(0x4B000000)
"""The bits of 2²³ as float32. The last 23 bits of a float count from there in steps of 1."""


@triton.jit
def float_position(x, F):
    """Return positions as float32.

    Short positions (F.SHORT) become the last bits of 2²³ + x, which is faster than a conversion.
    """
    if F.SHORT:
        bits = x.to(tl.int32) | FLOAT_BITS_OF_2_23
        return bits.to(tl.float32, bitcast=True) - 8388608.0
    else:
        return x.to(tl.float32)


@triton.jit
def is_finite(x):
    return tl.abs(x.to(tl.float32)) < INFINITY


@triton.jit
def add_product_nan_safe(acc, p, v, counts, PRECISION: tl.constexpr):
    """Return acc + p · v; NaN and ∞ in values that do not count have no effect."""
    odd = (is_finite(v) == 0).to(v.dtype)
    spoiled = tl.dot(counts.to(v.dtype), odd, input_precision=PRECISION)
    acc = tl.dot(p.to(v.dtype), tl.where(odd == 0, v, 0.0), acc, input_precision=PRECISION)
    return tl.where(spoiled > 0, float("nan"), acc)
