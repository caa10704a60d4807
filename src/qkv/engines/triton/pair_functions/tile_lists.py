"""Lists of the tiles that a mask does not exclude: first the full ones, then the partial ones.

`classify_tiles_kernel` evaluates the mask once: its band, lengths, layout, rule and boolean array.
`write_tile_lists_kernel` turns the kinds of tiles into lists. A kernel then visits the tiles of a
list, and evaluates the mask only in partial tiles. Each call builds new lists, because a mask may
read arrays whose numbers change. Evaluating the rule once is cheap compared with the attention.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.launching import launch, workspace
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.tile_functions import tiles
from qkv.engines.triton.tile_functions.tiles import jit_kernel

MIN_LISTED_LENGTH = 256
"""Fewest queries and keys for which lists are built: below, the mask is evaluated in every tile."""
KINDS_PER_STEP = 128
"""Kinds of tiles that are read at a time."""


@jit_kernel
def classify_tiles_kernel(given, kinds, scales, steps, z, list_heads, F: tl.constexpr):
    """Write whether all (2), some (1) or none (0) of the pairs of one tile count."""
    tile_j = tl.program_id(0)
    tile_i = tl.program_id(1)
    lane = tl.program_id(2)
    batch = lane // list_heads
    head = lane % list_heads
    first_i = tile_i * F.ROWS
    first_j = tile_j * F.COLS
    end = tiles.load_length(given.lengths, batch, z.m)
    seen = first_j < end
    if F.UPPER:
        seen = seen & (first_j - first_i - (F.ROWS - 1) <= z.upper)
    if F.LOWER:
        seen = seen & (first_j + (F.COLS - 1) - first_i >= z.lower)
    kind = tile_i * 0
    if seen:
        i = (first_i + tl.arange(0, F.ROWS))[:, None]
        j = (first_j + tl.arange(0, F.COLS))[None, :]
        live = tiles.live_pairs(i, j, end, given.layout, given.key_spans, z, F)
        each = batch * z.heads + head
        live = tiles.apply_rule(live, each // z.hashed, each % z.hashed, i, j, given, z, F)
        if F.PAIRS == 1:
            there = given.pairs + batch * tl.cast(steps.p_b, tl.int64)
            there += head * tl.cast(steps.p_h, tl.int64)
            there += first_i * tl.cast(steps.p_n, tl.int64)
            there += first_j * tl.cast(steps.p_m, tl.int64)
            near = tl.arange(0, F.ROWS)[:, None] * steps.p_n
            near += tl.arange(0, F.COLS)[None, :] * steps.p_m
            live = live & (tl.load(there + near, mask=live, other=0) != 0)
        on = live.to(tl.int32)
        kind = tl.min(tl.min(on, 1), 0) + tl.max(tl.max(on, 1), 0)
    count_i = (z.n + F.ROWS - 1) // F.ROWS
    count_j = (z.m + F.COLS - 1) // F.COLS
    at = (tl.cast(lane, tl.int64) * count_i + tile_i) * count_j + tile_j
    tl.store(kinds + at, kind.to(kinds.dtype.element_ty))


@jit_kernel
def write_tile_lists_kernel(kinds, at, counts, rows_tiles, keys_tiles, F: tl.constexpr):
    """Write the list of one tile of queries, or with BY_KEY of keys: `at` (lines, tiles).

    `counts` (lines, 2) are the numbers of full and partial tiles. With IN_ORDER, all count as
    partial and are listed in order.
    """
    line = tl.program_id(0)
    own_count = rows_tiles
    others = keys_tiles
    if F.BY_KEY:
        own_count = keys_tiles
        others = rows_tiles
    lane = line // own_count
    own = line % own_count
    kinds += tl.cast(lane, tl.int64) * rows_tiles * keys_tiles
    if F.BY_KEY:
        kinds += own
        step = keys_tiles
    else:
        kinds += own * keys_tiles
        step = 1
    near = tl.arange(0, F.BLOCK)
    full = line * 0
    if not F.IN_ORDER:
        for first in tl.range(0, others, F.BLOCK):
            t = first + near
            kind = tl.load(kinds + t * step, mask=t < others, other=0).to(tl.int32)
            full += tl.sum((kind == 2).to(tl.int32), 0)
    at += tl.cast(line, tl.int64) * others
    at_full = line * 0
    at_partial = full
    for first in tl.range(0, others, F.BLOCK):
        t = first + near
        kind = tl.load(kinds + t * step, mask=t < others, other=0).to(tl.int32)
        is_full = (kind == 2).to(tl.int32)
        is_partial = (kind == 1).to(tl.int32)
        if F.IN_ORDER:
            is_partial = is_partial + is_full
            is_full = is_full * 0
        slot = tl.where(
            is_full == 1, at_full + tl.cumsum(is_full, 0), at_partial + tl.cumsum(is_partial, 0)
        )
        tl.store(at + slot - 1, t, mask=kind > 0)
        at_full += tl.sum(is_full, 0)
        at_partial += tl.sum(is_partial, 0)
    tl.store(counts + line * 2, full)
    tl.store(counts + line * 2 + 1, at_partial - full)


class TileLists:
    """The tile lists of a call; lanes for which the mask is the same share them."""

    def __init__(self, call: Any, hashed: int) -> None:
        self.call = call
        pairs = None if call.pairs is None or call.pairs.is_floating_point() else call.pairs
        functions = call.functions
        positions = frozenset() if functions is None else functions.rule_positions
        self.has_rules = call.layout is not None or (
            functions is not None and functions.rule is not None
        )
        self.is_possible = (self.has_rules or pairs is not None) and (
            min(call.n, call.m) >= MIN_LISTED_LENGTH
        )
        self.is_one_axis = hashed != call.h
        own_batches, own_heads = self.own_lanes(positions)
        shape = (1, 1) if pairs is None else pairs.shape[:2]
        by_batch = own_batches > 1 or call.lengths is not None or shape[0] > 1
        by_head = own_heads > 1 or shape[1] > 1
        self.batches, self.heads = call.b if by_batch else 1, call.h if by_head else 1
        self._kinds: dict[tuple[int, int], Tensor] = {}

    def own_lanes(self, positions: frozenset[str]) -> tuple[int, int]:
        """Return the batches and heads for which a function of these positions may differ."""
        by_batch, by_head = "b" in positions, "h" in positions
        if self.is_one_axis:  # a single leading axis is the batch here, and the heads of a function
            by_batch = by_head = by_batch or by_head
        return self.call.b if by_batch else 1, self.call.h if by_head else 1

    @property
    def strides(self) -> tuple[int, int]:
        """The steps between the lists of two batches and of two heads, in lists of one lane."""
        return self.heads if self.batches > 1 else 0, int(self.heads > 1)

    def fill_lists(
        self, rows: int, cols: int, by_key: bool, in_order: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the lists of each tile of queries (or keys), and the counts of each list."""
        call = self.call
        count_i, count_j = -(-call.n // rows), -(-call.m // cols)
        kinds = self._classify(rows, cols, count_i, count_j)
        own, others = (count_j, count_i) if by_key else (count_i, count_j)
        lines = self.batches * self.heads * own
        at = call.allocate_buffer(lines, others, dtype=torch.int32)
        counts = call.allocate_buffer(lines, 2, dtype=torch.int32)
        facts = {"BY_KEY": by_key, "IN_ORDER": in_order, "BLOCK": KINDS_PER_STEP}
        launch.launch_kernel(
            write_tile_lists_kernel, lines, (kinds, at, counts), (), (count_i, count_j), facts,
            Tile(1, 1, 1, 1, 1),
        )  # fmt: skip
        return at, counts

    def _classify(self, rows: int, cols: int, count_i: int, count_j: int) -> Tensor:
        """Return the kinds of all tiles of a size; passes with equal tiles share them."""
        if (rows, cols) in self._kinds:
            return self._kinds[rows, cols]
        call = self.call
        lanes = self.batches * self.heads
        kinds = workspace.allocate_buffer(call.query, (lanes, count_i, count_j), torch.int8)
        names = ("LOWER", "UPPER", "LAYOUT", "SPANS", "PAIRS", "HAS_RULE", "RULE", "FAST", "SHORT")
        facts = {"ROWS": rows, "COLS": cols} | {name: call.constexprs[name] for name in names}
        grid = count_j, count_i, lanes
        sizes = call.build_sizes(), self.heads
        call.launch_kernel(
            classify_tiles_kernel, grid, (kinds,), None, sizes, facts, Tile(rows, cols, 1, 4, 1)
        )
        self._kinds[rows, cols] = kinds
        return kinds
