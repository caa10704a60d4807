"""Where a program works: its rows, their keys, the tiles that they may see, and a tile's scores.

`pool`, `to_queries`, the searches and `mend` all go over the keys of a tile of rows by these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qkv.engines.triton.records import Keys, Rows, Spot, Strides
from qkv.engines.triton.score import gate_half, score
from qkv.engines.triton.support import LIST, is_listed
from qkv.engines.triton.tanh import side_of, tanh_scores, units_of
from qkv.engines.triton.tiles import (  # fmt: skip
    alive,
    bounds,
    described,
    fetch,
    length_of,
    listed,
    portion,
    products,
    products_described,
    row_hash,
    rows_at,
    ruled,
    ruling,
    width_of,
)


@triton.jit
def even(step, F):
    """A stride that is told to be a multiple of F.EVEN, where Triton knows of those of 16 alone: so
    rows are read 16 bytes at once."""
    if F.EVEN > 1:
        return step // F.EVEN * F.EVEN
    return step


@triton.jit
def known_steps(steps, F):
    """The strides, those of query, key and value `even`."""
    return Strides(
        even(steps.q_b, F), even(steps.q_h, F), even(steps.q_n, F), even(steps.k_b, F),
        even(steps.k_h, F), even(steps.k_m, F), even(steps.v_b, F), even(steps.v_h, F),
        even(steps.v_m, F), steps.bias_b, steps.bias_h, steps.gate_b, steps.gate_h, steps.p_b,
        steps.p_h, steps.p_n, steps.p_m, steps.o_b, steps.o_h, steps.o_n, steps.o_m, steps.a_b,
        steps.a_h, steps.a_n,
    )  # fmt: skip


@triton.jit
def program(tiles, z, F):
    """This program's part of a loop, its tile, and its lane."""
    pid = tl.program_id(0)
    part = 0
    if F.SPLIT:
        part = pid % z.splits
        pid = pid // z.splits
    if F.PAIRS:  # heads side by side read one piece of the mask's array
        lanes = tl.num_programs(0) // (tiles * z.splits)
        tile = pid // lanes
        lane = pid % lanes
    else:
        tile = pid % tiles
        lane = pid // tiles
    return part, tile, lane


@triton.jit
def found_of(given, line, F):
    """What was found of rows before: their thresholds, and the gate's half of the logit."""
    zero = line.to(tl.float32) * 0.0
    row_a = zero
    row_b = zero
    a = zero
    if given.row_a is not None:
        row_a = tl.load(given.row_a + line)
    if given.row_b is not None:
        row_b = tl.load(given.row_b + line)
    if F.GATE:
        a = gate_half(tl.load(given.gate_query + line), F.FAST)
    return row_a, row_b, a


@triton.jit
def place(given, steps, tile, lane, z, F):
    """The rows of a tile of a lane, and where they lie.

    `heads` are the query's, or with PACKED the key's, whose group is then stacked in the rows:
    row r is the query r mod n of head r div n. Beyond the last row stands that row.
    """
    batch = tl.cast(lane // z.heads, tl.int64)
    head = tl.cast(lane % z.heads, tl.int64)
    r = tile * F.ROWS + tl.arange(0, F.ROWS)
    inside = r < z.rows_n
    r = tl.minimum(r, z.rows_n - 1)
    # Rows of a pair's group follow each other.
    line = tl.cast(lane, tl.int64) * z.rows_n + r
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
            pairs = described(pairs, z.n, step, z.m, F.ROWS, F.COLS, True)
            at = first
        else:
            pairs += head * steps.p_h + first * tl.cast(steps.p_n, tl.int64)
            at = ((pos - first) * steps.p_n)[:, None]
    drawn = i
    if F.DROP:
        if F.PACKED:
            drawn = row_hash(given.seed, lane * z.group + r // z.n, pos, z.hashed)[:, None]
        else:
            drawn = row_hash(given.seed, lane, pos, z.hashed)[:, None]
    row_a, row_b, a = found_of(given, line, F)
    q = i
    if F.TANH:
        side = side_of(given.ea, given.peak_a, given.v, lane, z.n, F)
        q = units_of(side, query, first, pos - first, F)
    elif not F.WIDE and F.WEIGHTING != "average":
        q = fetch(query, offset, F.W, F.BLOCK_W)
    FLAT: tl.constexpr = F.WIDE and F.TMA
    step = tl.cast(steps.q_n, tl.int64)
    query = described(query, z.n - first, step, F.W, F.ROWS, F.BLOCK_W, FLAT)
    rows = Rows(query, offset, q, i, a[:, None], row_a[:, None], row_b[:, None], pairs, at, drawn)
    return rows, Spot(batch, own, shared, line, pos, inside, first, last)


@triton.jit
def keys_of(given, at, tile, steps, batch, shared, z, F):
    """The keys of a head, as a tile of rows looks at them.

    A function of Triton cannot return None: the key stands for what is not there.
    """
    key = given.key + batch * steps.k_b + shared * steps.k_h
    value = given.value + batch * steps.v_b + shared * steps.v_h
    bias = key
    gate_key = key
    layout = key
    listing = key
    if F.BIAS:
        bias = given.key_bias + batch * steps.bias_b + shared * steps.bias_h
    if F.GATE:
        gate_key = given.gate_key + batch * steps.gate_b + shared * steps.gate_h
    if F.LAYOUT:
        layout = given.layout
    if at is not None:
        listing = at + tl.cast(tile, tl.int64) * z.at_columns
    end = length_of(given.lengths, batch, z.m)
    width = width_of(given.width, F)
    k_m = tl.cast(steps.k_m, tl.int64)
    v_m = tl.cast(steps.v_m, tl.int64)
    side = key
    if F.TANH:
        lane = batch * (z.heads // z.group) + shared
        side = side_of(given.eb, given.peak_b, given.v, lane, z.m, F)
    key = described(key, z.m, k_m, F.W, F.COLS, F.BLOCK_W, F.TMA)
    value = described(value, z.m, v_m, F.D, F.COLS, F.BLOCK_D, F.TMA)
    return Keys(key, k_m, value, v_m, bias, gate_key, layout, listing, steps.p_m, end, side, width)


@triton.jit
def rows_program(given, at, counts, steps, z, F):
    """This program's rows, their keys, where they lie, and the tiles of keys that they may see."""
    steps = known_steps(steps, F)
    tiles = (z.rows_n + F.ROWS - 1) // F.ROWS
    part, tile, lane = program(tiles, z, F)
    if F.UPPER:
        tile = tiles - 1 - tile  # a causal mask's longest rows first
    rows, spot = place(given, steps, tile, lane, z, F)
    line = tile
    if F.LISTED:
        line = lane * tiles + tile
    keys = keys_of(given, at, line, steps, spot.batch, spot.shared, z, F)
    if F.LISTED == 2:
        edges = (0, 0, 0, (tl.load(keys.at).to(tl.int32) + F.COLS - 1) // F.COLS)
    elif F.LAYOUT:
        edges = listed(counts, tile, given.lengths)
    else:
        edges = bounds(spot.first, spot.last, z.lower, z.upper, keys.end, F.COLS, F.LOWER, F.UPPER)
    if F.EDGES:  # one loop for all tiles
        edges = (edges[0], edges[0], edges[0], edges[3])
    if F.SPLIT:
        edges = portion(edges, part, z.span)
    return rows, keys, spot, edges, part


@triton.jit
def left_out(at, z, F):
    """Whether this program's rows are those of the other walk: LISTED is 2 in that over lists, and
    1 in that over all keys, whose tiles are of MANY lists."""
    tiles = (z.rows_n + F.ROWS - 1) // F.ROWS
    _, tile, lane = program(tiles, z, F)
    if F.UPPER:
        tile = tiles - 1 - tile
    first = tile * (F.ROWS // LIST)
    count = (z.rows_n + LIST - 1) // LIST
    return is_listed(at, lane, first, count, z.at_columns, F.MANY) == (F.LISTED == 1)


@triton.jit
def tile_of(t, rows, keys, times, z, F, MASKED: tl.constexpr):
    """Tile t of the keys: its start, their positions j (1, COLS), how far each lies, and of its
    pairs which count and what the mask's array adds (ROWS, COLS)."""
    near = tl.arange(0, F.COLS)
    if F.LISTED == 2:
        start = 0
        near = tl.load(keys.at + LIST + t * F.COLS + near).to(tl.int32)
    elif F.LAYOUT:
        start = tl.load(keys.at + t) * F.COLS
    else:
        start = t * F.COLS
    j = (start + near)[None, :]
    here = near
    live = j
    if MASKED:
        here = tl.minimum(near, z.m - 1 - start)
        live = alive(rows.i, j, keys.end, keys.layout, z, F)
    extra = j
    if F.PAIRS:
        QUICK: tl.constexpr = F.QUICK and not MASKED
        if F.LAID:
            read = rows.pairs.load([rows.at, start])
            extra, live = ruling(read, live, times, F.PAIRS, MASKED, QUICK)
        else:
            spot = rows.pairs + start * tl.cast(keys.p_m, tl.int64)
            offset = rows.at + near[None, :] * keys.p_m
            extra, live = ruled(live, spot, offset, times, F.PAIRS, MASKED, QUICK)
    return start, j, here, live, extra


@triton.jit
def product(rows, keys, start, here, F):
    """φ(q)·ψ(k) of a tile, (ROWS, COLS), and ψ(k) (COLS, w), where it is held whole; or what
    stands for both in a score of tanh."""
    if F.TANH:
        k = units_of(keys.side, keys.key + start * keys.k_m, start, here, F)
        x = tanh_scores(rows.q, k, F)
    elif F.WIDE and F.TMA:
        x = products_described(
            rows.query, 0, keys.key, start, keys.width, F.ROWS, F.COLS, F.BLOCK_W, F.SCORES
        )
        k = x
    elif F.WIDE:
        there = keys.key + start * keys.k_m
        x = products(
            rows.query, rows.offset, there, here * keys.k_m, keys.width,
            F.ROWS, F.COLS, F.W, F.BLOCK_W, F.SCORES,
        )  # fmt: skip
        k = x
    else:
        k = rows_at(keys.key, start, keys.k_m, here, F.W, F.BLOCK_W, F.TMA)
        x = tl.dot(rows.q, tl.trans(k), input_precision=F.SCORES)
    return x, k


@triton.jit
def scored(x, rows, keys, start, here, scale, times, F):
    """s of a tile from φ(q)·ψ(k), and its slope; the bias is multiplied by `times`."""
    bias = here
    b = here
    if F.BIAS:
        bias = tl.load(keys.bias + start + here)[None, :] * times
    if F.GATE:
        b = gate_half(tl.load(keys.gate_key + start + here), F.FAST)[None, :]
    return score(x, scale, bias, rows.a, b, F)
