"""The terms of each row that distance kernels read (‖x‖² or columns), and gradients by column.

The rows of a head are divided into tiles of `TILE_ROWS`. Within a tile, a column's rows lie side by
side, so that a program reads one column of all its rows at a time. All columns of a tile are
consecutive: at a distance of all rows, they would share few lines of a processor's cache.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.launching import launch, tile_choice, workspace
from qkv.engines.triton.launching.kernel_call import PADDED_ROWS
from qkv.engines.triton.launching.launch_replay import replay_launches
from qkv.engines.triton.launching.torch_operator import register_operator
from qkv.engines.triton.tile_functions.tanh import padded_rows
from qkv.engines.triton.tile_functions.tiles import jit_kernel

TILE_ROWS = PADDED_ROWS
"""Rows of a program."""
TILE = tile_choice.Tile(TILE_ROWS, 1, 64, 4, 1)


@triton.jit
def _locate_tile(rows, F):
    """Return this program's lane, the first of its rows, and their number in the tile."""
    count = padded_rows(rows, F) // F.BLOCK
    lane = (tl.program_id(0) // count).to(tl.int64)
    return lane, tl.program_id(0) % count * F.BLOCK, tl.arange(0, F.BLOCK)


@jit_kernel
def collect_kernel(x, out, x_b, x_h, x_n, lanes_own, rows, F: tl.constexpr):
    """Write ‖x‖² or the columns of a tile of rows of x (B, H, rows, W), which has any strides."""
    lane, first, near = _locate_tile(rows, F)
    row = first + near
    x += lane // lanes_own * x_b + lane % lanes_own * x_h
    there = x + row[:, None] * tl.cast(x_n, tl.int64)
    total = tl.zeros((F.BLOCK,), tl.float32)
    for start in range(0, F.W, F.BLOCK_W):
        column = start + tl.arange(0, F.BLOCK_W)[None, :]
        inside = (row < rows)[:, None] & (column < F.W)
        y = tl.load(there + column, mask=inside, other=0.0).to(tl.float32)
        if F.SQUARED:
            total += tl.sum(y * y, 1)
        else:
            to = out + tl.program_id(0).to(tl.int64) * (F.BLOCK * F.W)
            tl.store(to + column * F.BLOCK + near[:, None], y, mask=column < F.W)
    if F.SQUARED:
        tl.store(out + tl.program_id(0).to(tl.int64) * F.BLOCK + near, total)


@jit_kernel
def restore_kernel(columns, out, factor, rows, F: tl.constexpr):
    """Write factor · columns (lanes, tiles, W, TILE_ROWS) as rows (lanes, rows, W)."""
    lane, first, near = _locate_tile(rows, F)
    row = first + near
    for start in range(0, F.W, F.BLOCK_W):
        column = start + tl.arange(0, F.BLOCK_W)[None, :]
        inside = (row < rows)[:, None] & (column < F.W)
        there = columns + tl.program_id(0).to(tl.int64) * (F.BLOCK * F.W)
        y = tl.load(there + column * F.BLOCK + near[:, None], mask=inside, other=0.0) * factor
        to = out + (lane * rows + row[:, None]) * F.W + column
        tl.store(to, y.to(out.dtype.element_ty), mask=inside)


def allocate_columns(like: Tensor) -> Tensor:
    """Return an empty float32 buffer (B, H, tiles, W, TILE_ROWS) for x (B, H, rows, W)."""
    b, h, rows, w = like.shape
    return workspace.allocate_buffer(like, (b, h, -(-rows // TILE_ROWS), w, TILE_ROWS))


def _fake_terms(x: Tensor, squared: bool) -> Tensor:
    if not squared:
        return allocate_columns(x)
    b, h, rows, _ = x.shape
    return workspace.allocate_buffer(x, (b, h, -(-rows // TILE_ROWS) * TILE_ROWS))


@register_operator(_fake_terms)
@replay_launches
def collect_row_terms(x: Tensor, squared: bool) -> Tensor:
    """Return ‖x‖² (B, H, padded rows) or the columns (B, H, tiles, W, TILE_ROWS), in float32.

    x is (B, H, rows, W) with a contiguous last axis. There is no gradient.
    """
    out = _fake_terms(x, squared)
    b, h, rows, w = x.shape
    programs = b * h * -(-rows // TILE_ROWS)
    if programs:
        facts = {"W": w, "BLOCK": TILE_ROWS, "BLOCK_W": _block_width(w), "SQUARED": squared}
        with launch.use_device(x.device):
            launch.launch_kernel(
                collect_kernel, programs, (x, out), (), (*x.stride()[:3], h, rows), facts, TILE
            )
    return out


def restore_rows(columns: Tensor, factor: float, out: Tensor) -> None:
    """Fill the contiguous `out` (B, H, rows, W) from `columns`, times a factor."""
    b, h, rows, w = out.shape
    facts: dict[str, Any] = {"W": w, "BLOCK": TILE_ROWS, "BLOCK_W": _block_width(w)}
    programs = b * h * columns.shape[2]
    launch.launch_kernel(restore_kernel, programs, (columns, out), (factor,), (rows,), facts, TILE)


def _block_width(w: int) -> int:
    return min(max(tile_choice.next_power_of_2(w), 16), 64)
