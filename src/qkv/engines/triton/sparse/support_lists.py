"""Lists of the pairs to which a sparse weighting gives weight, so that later passes skip the rest.

The first pass of the threshold search gives a lower bound of each threshold. If few scores exceed
it, the second pass sets bits: one for each key that some query of a tile may use, and one for each
query that may use some key of a tile. `fill_lists` turns the bits into lists. The loops for the
output and for the gradients of queries run over the keys of a list. The loop for the gradients of
keys runs over queries.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.launching import launch, tile_choice
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.tile_functions.tiles import jit_kernel

ROWS_PER_LIST = 64
"""Queries, or keys, that share a list."""
MIN_LENGTH_FOR_LISTS = 8192
"""Fewest queries and keys for which lists are faster."""
LIST_TILE = tl.constexpr(ROWS_PER_LIST)
LIST_SHARE_DIVISOR = tl.constexpr(4)
"""Lists are used if they hold at most 1 / LIST_SHARE_DIVISOR of the positions."""
BITS_PER_WORD = tl.constexpr(32)


def lists_pay_off(query: Tensor, key: Tensor, banded: bool) -> bool:
    """Return whether lists are faster: for many long 16-bit rows that fit into a tile.

    `banded` is True for top-k. Entmax needs a band: without one, the search with larger tiles was
    faster than lists.
    """
    (b, h, n, w), m = query.shape, key.shape[2]
    if not all(isinstance(x, int) for x in (b, h, n, m)):  # symbolic lengths of a graph
        return False
    if not banded or query.element_size() != 2 or w > tile_choice.MAX_BACKWARD_TILE_WIDTH:
        return False
    enough = b * h * count_tiles(n) >= launch.count_processors(query.device)
    return bool(min(n, m) >= MIN_LENGTH_FOR_LISTS and enough)


def count_tiles(length: int) -> int:
    return -(-length // ROWS_PER_LIST)


def allocate_bits(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return zeroed bits: one per (tile of queries, key), and one per (tile of keys, query)."""
    (b, h, n, _), m = query.shape, key.shape[2]
    words = ROWS_PER_LIST // BITS_PER_WORD.value
    return (
        query.new_zeros((b, h, count_tiles(n), count_tiles(m) * words), dtype=torch.int32),
        query.new_zeros((b, h, count_tiles(m), count_tiles(n) * words), dtype=torch.int32),
    )


def allocate_lists(query: Tensor, length: int, count: int) -> Tensor:
    """Return empty lists (B, H, count, columns) for a share of `length` positions.

    Column 0 is the number of positions, or −1: use all. The positions start at column
    ROWS_PER_LIST.
    """
    columns = ROWS_PER_LIST * (1 + -(-count_tiles(length) // LIST_SHARE_DIVISOR.value))
    dtype = torch.int16 if length < 2**15 else torch.int32
    return query.new_empty((*query.shape[:2], count, columns), dtype=dtype)


@jit_kernel
def write_list_kernel(marks, at, length, at_columns, words, lines, lower, upper, F: tl.constexpr):
    """Write the list of one row of bits, padded with `length`.

    Lists of keys that start with −1 are not written. Lists of queries are used if they hold a small
    share of the queries that see the keys.
    """
    line = tl.cast(tl.program_id(0), tl.int64)
    marks += line * words
    at += line * at_columns
    max_count = at_columns - LIST_TILE
    if F.BY_KEY:
        first = (tl.program_id(0) % lines) * LIST_TILE
        begin = 0
        end = length
        if F.UPPER:
            begin = tl.maximum(first - upper, 0)
        if F.LOWER:
            end = tl.minimum(first + LIST_TILE - lower, length)
        max_count = tl.minimum(max_count, (end - begin) // LIST_SHARE_DIVISOR)
    elif tl.load(at) < 0:
        return
    near = tl.arange(0, F.BLOCK * BITS_PER_WORD)
    count = tl.program_id(0) * 0
    start = 0
    while (start < words) & (count <= max_count):
        word = start + tl.arange(0, F.BLOCK)
        some = tl.load(marks + word, mask=word < words, other=0)
        on = tl.reshape(
            (some[:, None] >> tl.arange(0, BITS_PER_WORD)[None, :]) & 1, (F.BLOCK * BITS_PER_WORD,)
        )
        slot = count + LIST_TILE + tl.cumsum(on, 0) - on
        fits = (on > 0) & (slot < at_columns)
        tl.store(at + slot, (near + start * BITS_PER_WORD).to(at.dtype.element_ty), mask=fits)
        count += tl.sum(on, 0)
        start += F.BLOCK
    slot = count + LIST_TILE + tl.arange(0, LIST_TILE)
    rest = (slot < at_columns) & (slot < (count + 2 * LIST_TILE - 1) // LIST_TILE * LIST_TILE)
    tl.store(at + slot, tl.full((LIST_TILE,), 0, at.dtype.element_ty) + length, mask=rest)
    tl.store(at, tl.where(count <= max_count, count, -1).to(at.dtype.element_ty))


def fill_lists(marks: Tensor, at: Tensor, length: int, band: tuple[Any, ...] = ()) -> Tensor:
    """Fill `at` with the positions below `length` whose bits are set in `marks`; return it.

    Lists of queries need `band`: the bounds (lower, upper) of j − i. Lists of keys have none.
    """
    lower, upper = band or (None, None)
    whole = (length, at.shape[-1], marks.shape[-1], at.shape[2], lower or 0, upper or 0)
    facts = {"LOWER": lower is not None, "UPPER": upper is not None, "BY_KEY": bool(band)}
    tile = Tile(1, 1, 1, 4, 1)
    lines = at.shape[:3].numel()
    launch.launch_kernel(
        write_list_kernel, lines, (marks, at), (), whole, facts | {"BLOCK": 64}, tile
    )
    return at


BitPointers = namedtuple("BitPointers", "at keys queries words")
"""Pointers of a row tile: its list, its bits of keys and of queries; and words per key tile."""


@triton.jit
def _or_pairwise(a, b, c, d, e, f, g, h):
    return a | e, b | f, c | g, d | h


@triton.jit
def set_tile_bits(on, own, t, F):
    """Set the bits of a tile of pairs.

    The bits of a row differ, so their sum equals their bitwise OR.
    """
    column = tl.arange(0, F.COLS)[None, :]
    row = tl.arange(0, F.ROWS)
    bit = tl.full((1, F.COLS), 1, tl.int32) << (column % BITS_PER_WORD)
    low = tl.sum(tl.where(on & (column < BITS_PER_WORD), bit, 0), 1)
    high = tl.sum(tl.where(on & (column >= BITS_PER_WORD), bit, 0), 1)
    some = tl.where((low | high) != 0, tl.full((F.ROWS,), 1, tl.int32) << (row % BITS_PER_WORD), 0)
    parts = (
        low,
        high,
        tl.where(row < BITS_PER_WORD, some, 0),
        tl.where(row < BITS_PER_WORD, 0, some),
    )
    low_key, high_key, low_row, high_row = tl.reduce(parts, 0, _or_pairwise)
    tl.store(own.keys + t * 2, low_key)
    tl.store(own.keys + t * 2 + 1, high_key)
    across = own.queries + tl.cast(t, tl.int64) * own.words
    tl.store(across, low_row)
    tl.store(across + 1, high_row)


@triton.jit
def set_all_bits(own, lo, hi):
    """Set the bits of all queries of a tile for the tiles lo … hi of the keys."""
    for start in tl.range(lo, hi, LIST_TILE):
        t = start + tl.arange(0, LIST_TILE)
        across = own.queries + t.to(tl.int64) * own.words
        tl.store(across, t * 0 - 1, mask=t < hi)
        tl.store(across + 1, t * 0 - 1, mask=t < hi)


@triton.jit
def has_list(at, lane, tile, count, at_columns, MANY: tl.constexpr):
    """Return whether all MANY list tiles of a lane's larger tile have a list."""
    at += tl.cast(lane, tl.int64) * count * at_columns
    least = tl.load(at + tl.cast(tile, tl.int64) * at_columns).to(tl.int32)
    if MANY == 2:
        other = tl.minimum(tile ^ 1, count - 1)
        least = tl.minimum(least, tl.load(at + tl.cast(other, tl.int64) * at_columns).to(tl.int32))
    return least >= 0
