"""Which functions each hidden unit of an additive score takes, and where their columns lie.

See `features` for what a table, a grid, a fit and spans are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton import launch
from qkv.engines.triton.tiles import launched
from qkv.scores import separable

LOOK = 8192
"""Elements that a program takes which looks for the largest."""
LOOKS = 64
"""Programs, at most, that look for the largest of an array's columns."""
FEW = 8
"""The same, for arrays that so many can look through at once."""
SHARE = 16
"""Coefficients of a fit that a program takes."""
PLAIN = launch.Tile(1, 1, 1, 4, 3)
"""Warps and stages of these kernels."""
CHUNK = tl.constexpr(64)
"""Columns are counted in these."""
ALONE = tl.constexpr(4)
"""Columns of what is added for a or b alone."""
STEPS = tl.constexpr(4)
"""Powers at a time."""
SPANS = tl.constexpr(4)
"""Numbers of `spans` before the beginnings."""


@triton.jit
def _largest(x, parts, rows, h, START: tl.constexpr, F):
    """max |x| of each column over this program's share, ∞ where something is not finite."""
    flat = tl.program_id(1) * F.BLOCK_H + tl.arange(0, F.BLOCK_H)
    col = flat[None, :]
    top = tl.zeros((F.BLOCK_R, F.BLOCK_H), tl.float32)
    share = (tl.program_id(0) - START).to(tl.int64) * F.BLOCK_R
    for start in range(share, rows, F.LOOKS * F.BLOCK_R):
        row = start + tl.arange(0, F.BLOCK_R)[:, None]
        inside = (row < rows) & (col < h)
        seen = tl.abs(tl.load(x + row * h + col, mask=inside, other=0.0).to(tl.float32))
        top = tl.maximum(top, tl.where(seen < float("inf"), seen, float("inf")))
    tl.store(parts + tl.program_id(0) * h + flat, tl.max(top, 0), mask=flat < h)


@launched
def _reach_kernel(a, b, parts, rows_a, rows_b, h, F: tl.constexpr):
    if tl.program_id(0) < F.LOOKS:
        _largest(a, parts, rows_a, h, 0, F)
    else:
        _largest(b, parts, rows_b, h, F.LOOKS, F)


@triton.jit
def _first(parts, grid, col, h, G, F):
    """The row of the table for each of some units, G where none reaches."""
    part = tl.arange(0, F.COUNT)[:, None]
    seen = tl.load(parts + part * h + col[None, :], mask=(col < h)[None, :], other=0.0)
    reach = tl.max(seen, 0)
    at = tl.arange(0, F.BLOCK_G)
    half = tl.load(grid + at, mask=at < G, other=float("inf"))
    return tl.sum((half[:, None] < reach[None, :]).to(tl.int32), 0)


@triton.jit
def _ranked(parts, grid, block, h, G, F):
    """Of the units from `block` on their rows of the table and their places. Of all: how many have
    more than j pairs, whether some has no row, and the most powers."""
    j = tl.arange(0, F.BLOCK_J)
    more = tl.zeros((F.BLOCK_J,), tl.int32)
    before = tl.zeros((F.BLOCK_J,), tl.int32)
    own = tl.zeros((F.BLOCK_H, F.BLOCK_J), tl.int32)
    here = tl.zeros((F.BLOCK_H,), tl.int32)
    short = tl.zeros((F.BLOCK_H,), tl.int32)
    powers = tl.zeros((F.BLOCK_H,), tl.float32)
    for start in range(0, h, F.BLOCK_H):
        col = start + tl.arange(0, F.BLOCK_H)
        row = _first(parts, grid, col, h, G, F)
        short = tl.maximum(short, (row == G).to(tl.int32))
        row = tl.minimum(row, G - 1)
        pairs = tl.load(grid + G + row, mask=col < h, other=0.0).to(tl.int32)[:, None]
        powers = tl.maximum(powers, tl.load(grid + 2 * G + row, mask=col < h, other=0.0))
        alike = (pairs == j[None, :]).to(tl.int32)
        more += tl.sum((pairs > j[None, :]).to(tl.int32), 0)
        before += tl.where(start < block, tl.sum(alike, 0), 0)
        own = tl.where(start == block, alike, own)
        here = tl.where(start == block, row, here)
    place = tl.sum(own * (tl.cumsum(own, 0) - 1 + (before + more)[None, :]), 1)
    return here, place, more, tl.max(short, 0), tl.max(powers, 0).to(tl.int32)


@launched
def _fit_kernel(parts, table, grid, fit, beyond, spans, h, G, F: tl.constexpr):
    """A share of the coefficients of some units; the first also where the columns lie.

    Every program finds the rows again from the parts: that is quicker than one more launch.
    """
    share = tl.program_id(0)
    block = tl.program_id(1) * F.BLOCK_H
    col = block + tl.arange(0, F.BLOCK_H)
    row, place, more, short, powers = _ranked(parts, grid, block, h, G, F)
    c = share * F.SHARE + tl.arange(0, F.SHARE)[:, None]
    inside = (c < F.SIZE) & (col < h)[None, :]
    found = tl.load(table + row[None, :] * F.SIZE + c, mask=inside)
    tl.store(fit + (3 + c) * h + place[None, :], found, mask=inside)
    if share == 0:
        tl.store(fit + col, place.to(tl.float32), mask=col < h)
        tl.store(fit + h + place, col.to(tl.float32), mask=col < h)
        tl.store(fit + 2 * h + place, 1.0 / tl.load(grid + row), mask=col < h)
        if tl.program_id(1) == 0:
            wide = (more + 1) // 2 * 2
            used = 2 * tl.sum(wide, 0) + ALONE
            tl.store(beyond, short)
            tl.store(spans, tl.where(short == 1, 0, (used + CHUNK - 1) // CHUNK * CHUNK))
            tl.store(spans + 1, used)
            tl.store(spans + 2, tl.sum((more > 0).to(tl.int32), 0))
            tl.store(spans + 3, powers)
            begin = 2 * (tl.cumsum(wide, 0) - wide) + ALONE
            tl.store(spans + SPANS + tl.arange(0, F.BLOCK_J), begin)


def tables(pairs: int, error: float, most: float, device: Any) -> tuple[Tensor, Tensor]:
    """The table and grid of `separable.table`, on the device.

    Powers of y take half the steps that Chebyshev's recurrence does. Their coefficients are larger
    and cancel, but the series are short: float32 loses far less than the rounding to 16 bits.
    """
    reaches, counts, found = separable.table(pairs, error, most)
    order = -(-found.shape[-1] // STEPS.value) * STEPS.value
    found = np.pad(found, ((0, 0), (0, 0), (0, order - found.shape[-1])))
    powers = (found != 0).any(1).sum(-1)  # the highest that a row has
    found = np.concatenate(
        [found[:, :pairs] @ _powers(order, 1), found[:, pairs:] @ _powers(order, 2)], 1
    )
    grid = np.stack([reaches, counts, -(-powers // STEPS.value) * STEPS.value])
    table, grid = (torch.tensor(x, dtype=torch.float32, device=device) for x in (found, grid))
    return table, grid


def _powers(order: int, steep: int) -> np.ndarray:
    """T₂ₖ(x), or if steep is 2 T₂ₖ₊₁(x) / x, for k < order by powers of y.

    Both start from 1, go on with y or 2y − 1, and then pₖ₊₁ = 2y pₖ − pₖ₋₁.
    """
    found = np.zeros((max(order, 2), max(order, 2)))
    found[0, 0] = 1
    found[1, :2] = 1 - steep, steep
    for k in range(2, order):
        found[k, 1:] = 2 * found[k - 1, :-1]
        found[k] -= found[k - 2]
    return found[:order, :order]


@cache
def tile(h: int, size: int) -> tuple[int, int]:
    """Rows and columns of a program's tile."""
    wide = min(max(int(triton.next_power_of_2(h)), 2), 128)
    return max(size // wide, 1), wide


def rows_of(x: Tensor) -> int:
    return int(x.numel()) // int(x.shape[-1])


def pairs_of(table: Tensor) -> int:
    return int(table.shape[1]) // 2


def fit_of(
    a: Tensor, b: Tensor, table: Tensor, grid: Tensor, parts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`fit`, `beyond` and `spans` for a (…, h) and b (…, h), whose largest are found in `parts`
    (…, h), if given."""
    a, b = a.contiguous(), b.contiguous()
    h, (count, rows, order) = a.shape[-1], table.shape
    size, pairs = rows * order, pairs_of(table)
    tall, wide = tile(h, LOOK)
    if parts is None:
        parts = _looked(a, b, tall, wide)
    fit, beyond, spans = room(a, size, pairs)
    narrow = min(wide, 64)
    facts = {
        "SIZE": size,
        "SHARE": SHARE,
        "COUNT": parts.shape[0],
        "BLOCK_G": launch.power_of_2(count),
        "BLOCK_H": narrow,
        "BLOCK_J": launch.power_of_2(pairs + 1),
    }
    arrays = (parts, table, grid, fit, beyond, spans)
    programs = (-(-size // SHARE), -(-h // narrow))
    busy = PLAIN._replace(warps=8)
    launch.start(_fit_kernel, programs, arrays, (), (h, count), facts, busy)
    return fit, beyond, spans


def _looked(a: Tensor, b: Tensor, tall: int, wide: int) -> Tensor:
    """The largest |a| and |b| of each unit, in parts."""
    rows_a, rows_b, h = rows_of(a), rows_of(b), a.shape[-1]
    blocks = -(-h // wide)
    most = launch.power_of_2(max(LOOKS // blocks, 1))
    looks = most if max(rows_a, rows_b) > FEW * tall else min(FEW, most)  # two to compile
    parts = a.new_empty((2 * looks, h), dtype=torch.float32)
    facts = {"LOOKS": looks, "BLOCK_R": tall, "BLOCK_H": wide}
    launch.start(
        _reach_kernel, (2 * looks, blocks), (a, b, parts), (), (rows_a, rows_b, h), facts, PLAIN
    )
    return parts


def room(a: Tensor, size: int, pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    """For the results of `fit_of`, of a row of so many coefficients."""
    fit = a.new_empty((3 + size, a.shape[-1]), dtype=torch.float32)
    beyond = a.new_empty(1, dtype=torch.int32)
    return fit, beyond, a.new_empty(SPANS.value + launch.power_of_2(pairs + 1), dtype=torch.int32)
