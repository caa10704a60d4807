"""Choose a kernel's tile: its rows and columns, and the options of its launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from qkv.errors import EngineError
from qkv.util.caches import create_table, memoize

MIN_BLOCK_COLUMNS = 64
MAX_FORWARD_TILE_WIDTH = 256
"""The widest φ that a forward tile holds at once; a wider one is read in chunks."""
MAX_BACKWARD_TILE_WIDTH = 128
"""The widest φ that a backward tile holds at once. Such a tile also holds the gradients."""
EXACT_TILE_COLUMNS = 16
"""Columns of a tile that sums (q − k)². A thread needs registers for their addresses."""
MAX_PACKED_ROWS = 64
"""The most query rows, over all heads that share the keys, that one tile stacks."""


class Tile(NamedTuple):
    """The shape of a kernel's tiles and its launch options.

    - rows, cols: queries and keys of a tile.
    - chunk: columns of φ read at a time.
    - warps, stages: Triton's `num_warps` and `num_stages`.
    - waves: programs per processor that a split loop aims at.
    - uses_descriptors: copy rows by TMA descriptors, on devices that have them.
    - registers: the most registers per thread; None: the compiler decides.
    - early: start while the previous launch ends; the kernel calls
      `tiles.wait_for_previous_launch`.
    """

    rows: int
    cols: int
    chunk: int
    warps: int
    stages: int
    waves: int = 4
    uses_descriptors: bool = False
    registers: int | None = None
    early: bool = False


TILE_OVERRIDES: dict[str, Tile] = {}
"""Tiles set by hand, for tests and benchmarks, by pass: "pool", "split", "few_queries",
"to_keys", "to_queries", "to_pairs", "repair"."""
# Registers are limited where the NaN-safe loop would use more, so that more programs run at once.
FLOAT_MASK_TILE = Tile(64, 64, 64, 4, 3, uses_descriptors=True)
TALL_FLOAT_MASK_TILE = FLOAT_MASK_TILE._replace(rows=128, warps=8, registers=128)
FLOAT_MASK_TILES = {
    "pool": (TALL_FLOAT_MASK_TILE, TALL_FLOAT_MASK_TILE._replace(stages=2)),
    "to_keys": (FLOAT_MASK_TILE, FLOAT_MASK_TILE._replace(stages=2, registers=168)),
    "to_queries": (TALL_FLOAT_MASK_TILE, FLOAT_MASK_TILE),
    "to_pairs": (FLOAT_MASK_TILE._replace(stages=2, registers=168),) * 2,
}
"""Tiles of the fast path for float masks (`F.QUICK`), for mask elements of 2 and of 4 bytes and
widths up to 64."""
WINDOW_POOL_TILE = Tile(64, 128, 64, 4, 2, uses_descriptors=True, registers=168)
"""The tile of the output of windows in 16 bits, for widths up to 64."""
TOPPED_POOL_TILE = Tile(64, 64, 64, 4, 3, registers=128)
"""The tile of the output of top-k in 16 bits, for widths up to 64, if the largest scores of its
rows are known."""
SHRUNK_TILES: dict[tuple[Any, ...], Tile] = create_table("triton.shrunk_tiles")
"""The smaller tile that replaces one which does not fit into the device's shared memory."""


@memoize("triton.tiles")
def choose_tile(
    name: str, w: int, d: int, size: int, rows: int, plain: bool, banded: bool, ruled: bool = False,
    gated: bool = False, quick: int = 0,
) -> Tile:  # fmt: skip
    """Return the tile of a pass for φ of width w, values of width d and elements of `size` bytes.

    Each tile is the fastest one measured on an H200, at widths 64, 128 and (in chunks) 768.
    `plain`: no bias and no gate. `ruled`: a mask array is read. `quick`: bytes of a mask element on
    the fast path (`F.QUICK`), else 0.
    """
    wide = max(w, d)
    if quick and wide <= 64 and name in FLOAT_MASK_TILES:
        return FLOAT_MASK_TILES[name][quick == 4]
    if name == "repair":
        # Small: most programs return after one check, and a large tile takes longer to start.
        if wide * size > 256:
            return Tile(16, 16, 32, 4, 1)
        return Tile(64 if size == 2 else 32, 32, 32, 4, 1)
    if name == "split":
        block = max(16, next_power_of_2(min(rows, MAX_PACKED_ROWS)))
        if w > MAX_FORWARD_TILE_WIDTH or size == 4:
            return Tile(block, 64, 32, 4, 2)
        if wide > 128:
            return Tile(block, 32, 64, 4, 3)
        if block == 16:
            return Tile(16, 256, 64, 8, 2, 1, True)
        return Tile(block, 128, 64, 8, 3, 1, True) if wide > 64 else Tile(block, 64, 64, 4, 3)
    if name == "few_queries":
        block = max(16, next_power_of_2(rows))
        if size == 4:
            return Tile(block, 32, 32, 4, 2)
        if block > MAX_PACKED_ROWS:
            return Tile(block, 32, 64, 4, 2)
        return (
            Tile(block, 128, 64, 8, 3) if block == 16 and wide > 64 else Tile(block, 64, 64, 4, 3)
        )
    if name == "to_pairs":
        if size == 4:
            return Tile(64, 64 if wide > MAX_BACKWARD_TILE_WIDTH else 32, 32, 4, 2)
        return Tile(64, 64, 64, 4, 3)
    if size == 4:
        if name == "pool":
            return Tile(64, 64, 32, 4, 2) if wide <= 128 else Tile(32, 32, 32, 4, 2)
        if wide > MAX_BACKWARD_TILE_WIDTH:
            # With values of width 16, eight warps read out of bounds (Triton 3.6).
            return Tile(64, 32, 32, 8 if d > 32 else 4, 1)
        return Tile(64, 32, 32, 4, 2) if wide <= 64 else Tile(32, 32, 32, 4, 1)
    if name == "pool":
        if w > MAX_FORWARD_TILE_WIDTH:
            return Tile(128, 256 if d <= 64 else 128, 64, 8, 3, 1, uses_descriptors=d <= 128)
        if d > 256:
            return Tile(64, 32, 64, 8, 2)
        if wide > 128:
            return Tile(128, 64, 64, 8, 2)
        if wide > 64:
            return Tile(64, 64, 64, 4, 3, uses_descriptors=plain)
        return Tile(128, 64, 64, 4, 3, uses_descriptors=ruled)
    if w > MAX_BACKWARD_TILE_WIDTH or d > MAX_BACKWARD_TILE_WIDTH:
        if d > 128:
            return Tile(64, 64, 64, 8, 2)
        return Tile(128, 64, 64, 4, 3, uses_descriptors=name == "to_keys")
    biased = not (plain or gated or ruled or banded)
    if name == "to_queries":
        return Tile(128, 64, 64, 8, 3 + biased) if wide > 64 else Tile(64, 64, 64, 4, 3)
    if ruled and wide <= 64:
        return Tile(64, 64, 64, 4, 2, uses_descriptors=True)
    if wide > 64:
        if biased:
            return Tile(64, 64, 64, 4, 2, uses_descriptors=True)
        if not plain or ruled:
            return Tile(32, 64, 64, 4, 4, uses_descriptors=True)
        tile = Tile(64, 128, 64, 8, 3) if banded else Tile(64, 64, 64, 4, 2)
        return tile._replace(uses_descriptors=True)
    if banded or gated:  # with 128 queries a gate spills registers: five times slower
        return Tile(64, 64, 64, 4, 3)
    return Tile(128, 64, 64, 4, 2, uses_descriptors=True)


def choose_column_tile(name: str, rows: int, d: int = 0, size: int = 2) -> Tile:
    """Return the tile of a pass that compares rows column by column.

    Threads have the pairs that a product of the matrix units would give them: two rows and a
    quarter of the columns. The pass "search" needs a tile of 64 rows. With 128 registers more
    programs read at once, which was the fastest; wide values (d) need more.
    """
    if name == "split":
        return Tile(max(16, next_power_of_2(min(rows, MAX_PACKED_ROWS))), 64, 16, 4, 1)
    is_limited = name in ("pool", "to_keys") and d <= 128 and size == 2
    return Tile(64, 64, 16, 4, 1, registers=128 if is_limited else None)


def shrink_tile(tile: Tile) -> Tile:
    """Return the next smaller tile, for a device with too little shared memory."""
    if tile.stages > 2:
        return tile._replace(stages=tile.stages - 1)
    if tile.cols > 32 and tile.cols >= tile.rows:
        return tile._replace(cols=tile.cols // 2)
    if tile.rows > 32:
        return tile._replace(rows=tile.rows // 2, warps=4)
    if tile.stages > 1:
        return tile._replace(stages=1)
    raise EngineError(
        "no tile fits into this device's shared memory: pass engine='streaming' instead"
    )


def next_power_of_2(x: int) -> int:
    return 1 << (x - 1).bit_length()


def block_width(width: int, dtype: torch.dtype) -> int:
    """Return the columns of a tile that holds rows of this width.

    On an H200 (Triton 3.6), values of width 1 in 16 bits were wrong in a tile of 16 columns and
    right in one of 64.
    """
    return max(next_power_of_2(width), 16 if dtype == torch.float32 else MIN_BLOCK_COLUMNS)
