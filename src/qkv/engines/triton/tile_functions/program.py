"""Device functions of a program: its rows, their keys, the tiles they see, a tile's scores.

The kernels of `forward`, `backward_queries`, `threshold_search` and `nan_repair` use them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qkv.engines.triton.sparse.support_lists import LIST_TILE, has_list
from qkv.engines.triton.tile_functions import tiles
from qkv.engines.triton.tile_functions.distance import (
    apply_distance_form,
    compare_columns,
    locate_columns,
    locate_terms,
)
from qkv.engines.triton.tile_functions.records import (
    CapturedPointers,
    KeyRange,
    QueryTile,
    RowScales,
    Strides,
    TilePosition,
)
from qkv.engines.triton.tile_functions.score_tile import apply_score_form, scale_gate_term
from qkv.engines.triton.tile_functions.tanh import (
    is_disabled,
    load_units,
    locate_side,
    padded_rows,
    tanh_scores,
)


@triton.jit
def align_stride(step, F):
    """Return the stride, marked as a multiple of F.EVEN, so that 16 bytes are read at a time.

    Triton itself only recognizes multiples of 16.
    """
    if F.EVEN > 1:
        return step // F.EVEN * F.EVEN
    return step


@triton.jit
def align_strides(steps, F):
    """Return the strides, with `align_stride` of query, key and value."""
    return Strides(
        align_stride(steps.q_b, F), align_stride(steps.q_h, F), align_stride(steps.q_n, F),
        align_stride(steps.k_b, F), align_stride(steps.k_h, F), align_stride(steps.k_m, F),
        align_stride(steps.v_b, F), align_stride(steps.v_h, F), align_stride(steps.v_m, F),
        steps.bias_b, steps.bias_h, steps.gate_b, steps.gate_h, steps.p_b,
        steps.p_h, steps.p_n, steps.p_m, steps.o_b, steps.o_h, steps.o_n, steps.o_m, steps.a_b,
        steps.a_h, steps.a_n,
    )  # fmt: skip


@triton.jit
def rows_per_lane(z, F):
    """Return the rows of a lane: its queries; with PACKED, of all heads that share its keys."""
    return z.rows_n if F.PACKED else z.n


@triton.jit
def locate_program(count, z, F):
    """Return this program's part of a split loop, its tile out of `count`, and its lane."""
    pid = tl.program_id(0)
    part = 0
    if F.SPLIT:
        part = pid % z.splits
        pid = pid // z.splits
    if F.PAIRS:  # consecutive programs share a piece of the mask array
        lanes = tl.num_programs(0) // (count * z.splits)
        tile = pid // lanes
        lane = pid % lanes
    else:
        tile = pid % count
        lane = pid // count
    return part, tile, lane


@triton.jit
def load_row_inputs(given, line, F):
    """Load the thresholds, the gate half and the cap of rows."""
    zero = line.to(tl.float32) * 0.0
    row_a = zero
    row_b = zero
    a = zero
    if given.row_a is not None:
        row_a = tl.load(given.row_a + line)
    if given.row_b is not None:
        row_b = tl.load(given.row_b + line)
    if F.GATE:
        a = scale_gate_term(tl.load(given.gate_query + line), F.FAST)
    cap = zero
    if F.CAP < 0 or F.SINK == 2:
        cap = tl.load(given.caps + line)
    return row_a, row_b, a, cap


@triton.jit
def load_top(given, line, i, z, F):
    """Return the largest score of rows in base 2, which the search of top-k wrote; 0 if none."""
    top = i
    if F.TOPPED:
        count = (rows_per_lane(z, F) + F.ROWS - 1) // F.ROWS
        lanes = tl.num_programs(0) // (count * z.splits)
        lines = tl.cast(lanes, tl.int64) * rows_per_lane(z, F)
        top = tl.load(given.row_a + lines + line)[:, None]
        top = tl.where(top == tiles.NEG_INFINITY, 0.0, top * tiles.LOG2E)
    return top


@triton.jit
def load_query_tile(given, steps, tile, lane, z, F):
    """Return a tile of a lane's rows, and its position.

    `heads` is the number of query heads. With PACKED, it is the number of key heads, and the rows
    are the stacked queries of a group: row r is query r mod n of head r div n. Beyond the last row
    the tile repeats the last row.
    """
    batch = tl.cast(lane // z.heads, tl.int64)
    head = tl.cast(lane % z.heads, tl.int64)
    r = tile * F.ROWS + tl.arange(0, F.ROWS)
    inside = r < rows_per_lane(z, F)
    r = tl.minimum(r, rows_per_lane(z, F) - 1)
    # The rows of a group are consecutive.
    line = tl.cast(lane, tl.int64) * rows_per_lane(z, F) + r
    query = given.query + batch * steps.q_b
    pos = r
    own = head
    if F.PACKED:
        pos = r % z.n
        own = head * z.group + r // z.n
        shared = head
        first = 0
        last = z.n - 1
        query += head * z.group * steps.q_h
        offset = (r // z.n) * tl.cast(steps.q_h, tl.int64) + pos * steps.q_n
    else:
        shared = head // z.group
        first = tile * F.ROWS
        last = tl.minimum(first + F.ROWS, z.n) - 1
        query += head * steps.q_h + first * tl.cast(steps.q_n, tl.int64)
        offset = (pos - first) * steps.q_n
    i = pos[:, None]
    pairs = query
    at = i
    if F.PAIRS:
        pairs = given.pairs + batch * steps.p_b
        if F.PACKED:
            pairs += head * z.group * steps.p_h
            at = ((r // z.n) * tl.cast(steps.p_h, tl.int64) + pos * steps.p_n)[:, None]
        elif F.LAID:
            pairs += head * steps.p_h
            step = tl.cast(steps.p_n, tl.int64)
            pairs = tiles.make_descriptor(pairs, z.n, step, z.m, F.ROWS, F.COLS, True)
            at = first
        else:
            pairs += head * steps.p_h + first * tl.cast(steps.p_n, tl.int64)
            at = ((pos - first) * steps.p_n)[:, None]
    drawn = i
    if F.DROP:
        if F.PACKED:
            drawn = tiles.row_hash(given.seed, lane * z.group + r // z.n, pos, z.hashed)[:, None]
        else:
            drawn = tiles.row_hash(given.seed, lane, pos, z.hashed)[:, None]
    b = i
    h = i
    if F.HAS_RULE or F.HAS_MOD:
        each = lane
        if F.PACKED:
            each = (lane * z.group + r // z.n)[:, None]
        b = each // z.hashed
        h = each % z.hashed
    floats = given.query  # a Triton function cannot return None
    integers = given.query
    if given.captured_floats is not None:
        floats = given.captured_floats
    if given.captured_integers is not None:
        integers = given.captured_integers
    row_a, row_b, a, cap = load_row_inputs(given, line, F)
    q = i
    if F.TANH:
        side = locate_side(given.ea, given.peak_a, given.v, lane, z.n, F)
        q = load_units(side, query, first, pos - first, F)
    elif not F.WIDE and F.WEIGHTING != "average":
        q = tiles.load_rows(query, offset, F.W, F.BLOCK_W)
    terms = i
    near = pos
    if F.TERMS:
        if F.PACKED:
            near = locate_columns(0, pos, F, True)
            terms = locate_terms(given.query_terms, lane * z.group + r // z.n, z.n, F)
        else:
            near = locate_columns(first, pos - first, F, False)
            terms = locate_terms(given.query_terms, lane, z.n, F)
        if F.WINDOW:
            terms = tl.load(terms + pos)[:, None]
        elif F.PACKED:
            terms = terms[:, None]
    FLAT: tl.constexpr = F.WIDE and F.TMA
    step = tl.cast(steps.q_n, tl.int64)
    query = tiles.make_descriptor(query, z.n - first, step, F.W, F.ROWS, F.BLOCK_W, FLAT)
    rows = QueryTile(
        query, offset, q, i, a[:, None], cap[:, None], row_a[:, None], row_b[:, None], pairs, at,
        drawn, tiles.load_width(given.width, F), b, h,
        CapturedPointers(floats, integers), terms, near, load_top(given, line, i, z, F),
    )  # fmt: skip
    return rows, TilePosition(batch, own, shared, line, pos, inside, first, last)


@triton.jit
def locate_keys(given, at, tile, steps, batch, shared, z, F):
    """Return the keys of a head for a tile of rows.

    A Triton function cannot return None: the key pointer replaces missing arrays.
    """
    key = given.key + batch * steps.k_b + shared * steps.k_h
    value = given.value + batch * steps.v_b + shared * steps.v_h
    bias = key
    gate_key = key
    layout = key
    spans = key
    listing = key
    if F.BIAS:
        bias = given.key_bias + batch * steps.bias_b + shared * steps.bias_h
    if F.GATE:
        gate_key = given.gate_key + batch * steps.gate_b + shared * steps.gate_h
    if F.LAYOUT:
        layout = given.layout
    if F.SPANS:
        spans = given.key_spans
    if at is not None:
        listing = at + tl.cast(tile, tl.int64) * z.at_columns
    end = tiles.load_length(given.lengths, batch, z.m)
    k_m = tl.cast(steps.k_m, tl.int64)
    v_m = tl.cast(steps.v_m, tl.int64)
    side = key
    if F.TANH:
        lane = batch * (z.heads // z.group) + shared
        side = locate_side(given.eb, given.peak_b, given.v, lane, z.m, F)
    terms = key
    if F.TERMS:
        heads = z.heads
        if not F.PACKED:
            heads = z.heads // z.group
        terms = locate_terms(given.key_terms, batch * heads + shared, z.m, F)
    pages = key
    scales = RowScales(key, value)
    rows = z.m
    if F.PAGE:
        pages = given.pages + batch * (z.m // F.PAGE)
        rows = tiles.LAST_POSITION  # all rows of a pool: each page is there
        if F.CODES:
            scales = RowScales(given.key_scales, given.value_scales)
    source = key
    squares = terms
    if F.WINDOW and F.LINED:
        squares = tl.make_tensor_descriptor(terms, [padded_rows(z.m, F)], [1], [F.COLS])
    key = tiles.make_descriptor(key, rows, k_m, F.W, F.COLS, F.BLOCK_W, F.TMA)
    value = tiles.make_descriptor(value, rows, v_m, F.D, F.COLS, F.BLOCK_D, F.TMA)
    return KeyRange(
        key,
        k_m,
        value,
        v_m,
        bias,
        gate_key,
        layout,
        spans,
        listing,
        steps.p_m,
        end,
        side,
        terms,
        source,
        squares,
        pages,
        shared,
        scales,
    )


@triton.jit
def locate_row_tile(z, F):
    """Return this program's part of a split loop, its row tile, the tile count, and its lane."""
    count = (rows_per_lane(z, F) + F.ROWS - 1) // F.ROWS
    part, tile, lane = locate_program(count, z, F)
    if F.UPPER:
        tile = count - 1 - tile  # a causal mask's longest rows first
    return part, tile, count, lane


@triton.jit
def begin_row_program(given, at, counts, steps, z, F):
    """Return this program's rows, keys, position, visible tiles of keys, and part of the loop."""
    steps = align_strides(steps, F)
    part, tile, count, lane = locate_row_tile(z, F)
    rows, spot = load_query_tile(given, steps, tile, lane, z, F)
    line = tile
    if F.LISTED:
        line = lane * count + tile
    if F.TILED:
        line += (spot.batch * z.list_b + spot.head * z.list_h).to(tl.int32) * count
    keys = locate_keys(given, at, line, steps, spot.batch, spot.shared, z, F)
    if F.LISTED == 2:
        edges = (0, 0, 0, (tl.load(keys.at).to(tl.int32) + F.COLS - 1) // F.COLS)
    elif F.TILED:
        edges = tiles.listed_tiles(counts, line)
    else:
        first, last = spot.first, spot.last
        edges = tiles.visible_tiles(
            first, last, z.lower, z.upper, keys.end, F.COLS, F.LOWER, F.UPPER
        )
        if F.SPANS:
            edges = tiles.clip_to_spans(edges, keys.spans, first, last, z.n, F.COLS)
    if F.ENDED:
        edges = (edges[0], edges[1], edges[3], edges[3])
    if F.EDGES:  # one loop for all tiles
        edges = (edges[0], edges[0], edges[0], edges[3])
    if F.SPLIT:
        edges = tiles.clip_to_part(edges, part, z.span)
    return rows, keys, spot, edges, part


@triton.jit
def is_skipped(given, at, z, F):
    """Return whether this program has nothing to do.

    With lists there are two launches, and each row tile belongs to one of them: LISTED is 2 in the
    launch over lists and 1 in the one over all keys, whose tiles span MANY lists.
    """
    idle = is_disabled(given, F)
    if F.LISTED:
        _, tile, _, lane = locate_row_tile(z, F)
        first = tile * (F.ROWS // LIST_TILE)
        count = (rows_per_lane(z, F) + LIST_TILE - 1) // LIST_TILE
        idle = has_list(at, lane, first, count, z.at_columns, F.MANY) == (F.LISTED == 1)
    return idle


@triton.jit
def tile_positions(t, at, SIZE: tl.constexpr, F):
    """Return the start of tile t of SIZE keys (or queries), and their offsets from it."""
    near = tl.arange(0, SIZE)
    if F.LISTED == 2:
        start = 0
        near = tl.load(at + LIST_TILE + t * SIZE + near).to(tl.int32)
    elif F.TILED:
        start = tl.load(at + t) * SIZE
    else:
        start = t * SIZE
    return start, near


@triton.jit
def load_mask_tile(t, rows, keys, times, z, F, MASKED: tl.constexpr):
    """Load the mask of tile t of the keys.

    Return its start, the positions j (1, COLS), the offsets of the keys, which pairs count, and
    what the mask array adds (ROWS, COLS).
    """
    start, near = tile_positions(t, keys.at, F.COLS, F)
    j = (start + near)[None, :]
    here = near
    live = j
    if MASKED or F.ENDED:
        here = tl.minimum(near, z.m - 1 - start)
    if MASKED:
        live = tiles.live_pairs(rows.i, j, keys.end, keys.layout, keys.spans, z, F)
        live = tiles.apply_rule(live, rows.b, rows.h, rows.i, j, rows.captured, z, F)
    extra = j
    if F.PAIRS and (MASKED or not F.SKIPS_PAIRS):
        if F.LAID:
            read = rows.pairs.load([rows.at, start])
        elif F.ROW_PAIRS:  # one row for all queries
            there = rows.pairs + (start + near)[None, :] * tl.cast(keys.p_m, tl.int64)
            read = tl.load(there, mask=j < z.m, other=0) if MASKED else tl.load(there)
            read = tl.broadcast_to(read, (F.ROWS, F.COLS))
        else:
            there = rows.pairs + start * tl.cast(keys.p_m, tl.int64)
            there += rows.at + near[None, :] * keys.p_m
            read = tl.load(there, mask=live, other=0) if MASKED else tl.load(there)
        extra, live = tiles.apply_mask_array(read, live, times, F, MASKED, F.QUICK and not MASKED)
    return start, j, here, live, extra


@triton.jit
def locate_tile(start, keys, z, F):
    """Return the row of the key array where the tile of keys from `start` on begins."""
    far = start
    if F.PAGE:
        heads = z.heads
        if not F.PACKED:
            heads = z.heads // z.group
        page = tl.load(keys.pages + start // F.PAGE)
        far = (page * heads + keys.head.to(tl.int32)) * F.PAGE + start % F.PAGE
    return far


@triton.jit
def compute_product(own, others, start, here, F):
    """Return φ·ψ of a tile (`own` rows × the `here` others), and the loaded others.

    With TANH: the exact additive score, and the `UnitTile` of the others. With BY_COLUMN: what
    `compare_columns` returns. For the constant: 1.
    """
    if F.TANH:
        y = load_units(others.side, others.base + start * others.step, start, here, F)
        x = tanh_scores(own.held, y, F)
    elif F.BY_COLUMN:
        x = compare_columns(own, others, locate_columns(start, here, F, F.LISTED == 2), F)
        y = x
    elif F.FORM == "constant":
        x = tl.full((own.offset.shape[0], here.shape[0]), 1.0, tl.float32)
        y = x
    elif F.WIDE:
        x = tl.zeros((own.offset.shape[0], here.shape[0]), tl.float32)
        if F.TMA:
            at, first, far = 0, others.base, start
        else:
            at, first, far = own.offset, others.base + start * others.step, here * others.step
        x = tiles.add_wide_product(
            x, own.base, at, first, far, own.width, F.W, F.BLOCK_W, F.SCORES, F.TMA
        )
        y = x
    else:
        y = tiles.load_row_tile(others.base, start, others.step, here, F.W, F.BLOCK_W, F.TMA)
        if F.CODES:
            y = y.to(own.held.dtype)
        x = tl.dot(own.held, tl.trans(y), input_precision=F.SCORES)
        if F.CODES:
            x = x * tl.load(others.scales.key + start + here)[None, :]
    return x, y


@triton.jit
def compute_tile_scores(x, rows, keys, start, here, scales, times, F):
    """Return s of a tile from φ(q)·ψ(k), and its two derivatives (`apply_score_form`).

    Bias and cap are multiplied by `times`. With ENDED, keys beyond the end have bias −∞.
    """
    if F.FORM != "product":
        s, bend, _ = apply_distance_form(x, rows, keys, start, here, rows.cap, scales, times, F)
        return s, s, bend
    bias = here
    b = here
    if F.BIAS:
        if F.ENDED:
            there = start + tl.arange(0, F.COLS)
            bias = tl.load(keys.bias + there, mask=there < keys.end, other=tiles.NEG_INFINITY)
        else:
            bias = tl.load(keys.bias + start + here)
        bias = bias[None, :] * times
    if F.GATE:
        b = scale_gate_term(tl.load(keys.gate_key + start + here), F.FAST)[None, :]
    return apply_score_form(x, scales.scale, bias, rows.a, b, rows.cap, times, F)
