"""tanh(a + b) ≈ m(a) + m(b) + Σⱼ eⱼ(a) oⱼ(b) + oⱼ(a) eⱼ(b): the additive score as a dot product.

The functions eⱼ are even, oⱼ and m are odd. They are valid for |a|, |b| ≤ A. bent(x) is
x / √(1 + x²/25).

- `table` (G, 2·J + 1, K): coefficients of e, o / x and m / x for G half-ranges A, in powers
  1, y, y² … of y = 2x² − 1 with x = bent(a) / bent(A).
- `grid` (1 + J, G): A, ascending, then the error of the first j pairs relative to the limit.

The device chooses for every hidden unit the first A ≥ max |a|, |b| over its rows. The choice stays
on the device:

- `fit` (1 + (2·J + 1)·K, h): 1 / bent(A) of each unit, then its row of the table. Neighbouring
  units are adjacent.
- `beyond` (1,): 1 if some unit has no such A.
- `width` (1,): columns of φ and ψ, for as few pairs as are precise enough; units count by |v|.

    φ(a) = [e₁ | o₁ | e₂ | o₂ …]   ψ(b) = [v∘o₁ | v∘e₁ | v∘o₂ | v∘e₂ …]   each h wide
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.launching import launch, tile_choice, workspace
from qkv.engines.triton.tile_functions.tiles import jit_kernel
from qkv.scores import tanh_factors
from qkv.util.caches import memoize

ELEMENTS_PER_PROGRAM = 1024
"""Elements of x per program."""
COEFFICIENTS_PER_PROGRAM = 16
"""Coefficients of a fit per program."""
KERNEL_TILE = tile_choice.Tile(1, 1, 1, 4, 3)
"""The tile of these kernels: only its warps and stages are used."""
COLUMN_CHUNK = tl.constexpr(64)
"""The width is a multiple of this."""

FeatureInputs = namedtuple("FeatureInputs", "a b v fit beyond width pairs")
"""Rows a and b (…, h), v (h,), the results of `fit_units`, and J (`pairs`)."""


@triton.jit
def _squash(x):
    """Return bent(x) = x / √(1 + x²/25) and r = 1 / √(1 + x²/25); its derivative is r³."""
    r = tl.rsqrt(1 + x * x * 0.04)
    return x * r, r


@triton.jit
def _find_table_row(parts, grid, col, h, G, F):
    """Return the row of the table for each unit; G if no row covers its range."""
    part = tl.arange(0, F.COUNT)[:, None]
    seen = tl.load(parts + part * h + col[None, :], mask=(col < h)[None, :], other=0.0)
    reach = tl.max(seen, 0)
    at = tl.arange(0, F.BLOCK_G)
    half = tl.load(grid + at, mask=at < G, other=float("inf"))
    return tl.sum((half[:, None] < reach[None, :]).to(tl.int32), 0)


@jit_kernel
def _fit_kernel(parts, table, grid, v, fit, beyond, width, h, G, F: tl.constexpr):
    """Write a share of the coefficients of some units; the last share writes beyond and width.

    Every program finds the table rows again from the parts: that is faster than another launch.
    """
    share = tl.program_id(0)
    unit = tl.arange(0, F.BLOCK_H)
    col = tl.program_id(1) * F.BLOCK_H + unit
    if share * F.SHARE < F.SIZE:
        row = tl.minimum(_find_table_row(parts, grid, col, h, G, F), G - 1)
        if share == 0:
            tl.store(fit + col, 1.0 / _squash(tl.load(grid + row))[0], mask=col < h)
        c = share * F.SHARE + tl.arange(0, F.SHARE)[:, None]
        inside = (c < F.SIZE) & (col < h)[None, :]
        found = tl.load(table + row[None, :] * F.SIZE + c, mask=inside)
        tl.store(fit + (1 + c) * h + col[None, :], found, mask=inside)
    elif tl.program_id(1) == 0:
        short = tl.zeros((F.BLOCK_H,), tl.int32)
        over = tl.zeros((F.J, F.BLOCK_H), tl.float32)
        pair = tl.arange(0, F.J)[:, None]
        for start in range(0, h, F.BLOCK_H):
            col = start + unit
            found = _find_table_row(parts, grid, col, h, G, F)
            short = tl.maximum(short, (found == G).to(tl.int32))
            row = tl.minimum(found, G - 1)[None, :]
            counts = tl.abs(tl.load(v + col, mask=col < h, other=0.0).to(tl.float32))[None, :]
            over += counts * (tl.load(grid + (1 + pair) * G + row) - 1.0)
        pairs = 1 + tl.sum((tl.sum(over, 1) > 0).to(tl.int32), 0)
        pairs = tl.where(tl.max(short, 0) == 0, pairs, 0)
        columns = (2 * h * pairs + COLUMN_CHUNK - 1) // COLUMN_CHUNK * COLUMN_CHUNK
        tl.store(beyond, tl.max(short, 0))
        tl.store(width, tl.minimum(tl.maximum(columns, F.LEAST), 2 * h * F.J))


@triton.jit
def _evaluate_series(row, there, y, F):
    """Return Σₖ cₖ yᵏ and its derivative in y. `row` points to c₀ of each unit."""
    value = tl.load(row + (F.K - 1) * F.H, mask=there, other=0.0) + tl.zeros_like(y)
    slope = tl.zeros_like(y)
    for i in tl.static_range(1, F.K):
        slope = slope * y + value
        value = value * y + tl.load(row + (F.K - 1 - i) * F.H, mask=there, other=0.0)
    return value, slope


@triton.jit
def _tile_columns(start, F):
    """Return the columns of a tile. With many rows, each thread has two columns.

    So a thread loads a coefficient once for all its rows. Triton does not infer two columns for a
    constant start.
    """
    col = start + tl.program_id(1) * F.BLOCK_H + tl.arange(0, F.BLOCK_H)
    return tl.max_contiguous(col, 2 if F.BLOCK_H > 1 else 1)


@triton.jit
def _is_unit(col, F):
    """Return which columns hold units. If units fill their tiles, Triton knows that all do."""
    if F.H % F.BLOCK_H == 0:
        return tl.full(col.shape, True, tl.int1)
    return col < F.H


@triton.jit
def _load_tile(x, v, fit, row, col, there, inside, F):
    """Return z = bent(x) / bent(A) of a tile of x, y = 2z² − 1, pointers to the series of its
    units, their v, and the derivative of z."""
    scale = tl.load(fit + col, mask=there, other=0.0)
    z, r = _squash(tl.load(x + row * F.H + col, mask=inside, other=0.0).to(tl.float32))
    z *= scale
    factor = tl.load(v + col, mask=there, other=0.0).to(tl.float32)
    return z, 2 * z * z - 1, fit + F.H + col, factor, scale * (r * r * r)


@triton.jit
def _fill_features(tile, x, v, fit, beyond, width, out, alone, rows, KEY: tl.constexpr, F):
    row = tile.to(tl.int64) * F.BLOCK_R + tl.arange(0, F.BLOCK_R)[:, None]
    pairs = (tl.load(width) + 2 * F.H - 1) // (2 * F.H)
    live = tl.load(beyond) == 0
    added = tl.zeros((F.BLOCK_R,), tl.float32)
    for start in tl.static_range(0, F.H, F.BLOCK_H):
        col = _tile_columns(start, F)[None, :]
        there = _is_unit(col, F)
        inside = (row < rows) & there
        to = out + row * (2 * F.J * F.H) + col
        if live:
            z, y, even, factor, _ = _load_tile(x, v, fit, row, col, there, inside, F)
            main, _ = _evaluate_series(even + 2 * F.J * F.K * F.H, there, y, F)
            added += tl.sum(factor * (z * main), 1)
            for j in range(pairs):
                first, _ = _evaluate_series(even + j * F.K * F.H, there, y, F)
                second, _ = _evaluate_series(even + (F.J + j) * F.K * F.H, there, y, F)
                second = z * second
                if KEY:
                    first, second = factor * second, factor * first
                tl.store(to + 2 * j * F.H, first.to(out.dtype.element_ty), mask=inside)
                tl.store(to + (2 * j + 1) * F.H, second.to(out.dtype.element_ty), mask=inside)
        else:
            nothing = tl.zeros((F.BLOCK_R, F.BLOCK_H), out.dtype.element_ty)
            for j in range(2 * pairs):
                tl.store(to + j * F.H, nothing, mask=inside)
    tl.store(alone + row, added[:, None], mask=row < rows)


@jit_kernel
def _features_kernel(
    a, b, v, fit, beyond, width, phi, psi, alone_a, alone_b, rows_a, rows_b, tiles_a,
    F: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tiles_a:
        _fill_features(tile, a, v, fit, beyond, width, phi, alone_a, rows_a, False, F)
    else:
        tile -= tiles_a
        _fill_features(tile, b, v, fit, beyond, width, psi, alone_b, rows_b, True, F)


@triton.jit
def _fill_feature_gradients(
    tile, grad, moved, x, v, fit, beyond, width, dx, dv, rows, KEY: tl.constexpr, F
):
    row = tile.to(tl.int64) * F.BLOCK_R + tl.arange(0, F.BLOCK_R)[:, None]
    flat = _tile_columns(0, F)
    col = flat[None, :]
    there = _is_unit(col, F)
    inside = (row < rows) & there
    at = grad + row * (2 * F.J * F.H) + col
    along = tl.zeros((F.BLOCK_R, F.BLOCK_H), tl.float32)
    weighed = tl.zeros((F.BLOCK_R, F.BLOCK_H), tl.float32)
    if tl.load(beyond) == 0:
        columns = tl.load(width)
        z, y, even, factor, steep = _load_tile(x, v, fit, row, col, there, inside, F)
        for j in range((columns + 2 * F.H - 1) // (2 * F.H)):
            one = inside
            two = inside
            if F.H % 32 > 0:  # else there are whole pairs
                left = columns - 2 * j * F.H
                one = inside & (col < left)
                two = inside & (col + F.H < left)
            first = tl.load(at + 2 * j * F.H, mask=one, other=0.0)
            second = tl.load(at + (2 * j + 1) * F.H, mask=two, other=0.0)
            de = (second if KEY else first).to(tl.float32)
            do = (first if KEY else second).to(tl.float32)
            e, e_slope = _evaluate_series(even + j * F.K * F.H, there, y, F)
            o, o_slope = _evaluate_series(even + (F.J + j) * F.K * F.H, there, y, F)
            along += de * e_slope * (4 * z) + do * (o + 4 * z * z * o_slope)
            if KEY:
                weighed += de * e + do * (z * o)
        if KEY:
            along *= factor
        if moved is not None:
            of_row = tl.load(moved + row, mask=row < rows, other=0.0)
            m, m_slope = _evaluate_series(even + 2 * F.J * F.K * F.H, there, y, F)
            along += of_row * factor * (m + 4 * z * z * m_slope)
            weighed += of_row * (z * m)
        along *= steep
    tl.store(dx + row * F.H + col, along.to(dx.dtype.element_ty), mask=inside)
    if moved is not None:
        tl.store(dv + tl.program_id(0) * F.H + flat, tl.sum(weighed, 0), mask=flat < F.H)


@jit_kernel
def _features_grad_kernel(
    dphi, dpsi, moved_a, moved_b, a, b, v, fit, beyond, width, da, db, dv, rows_a, rows_b, tiles_a,
    F: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) - (tl.num_programs(0) - tiles_a)
    if tile >= 0:
        _fill_feature_gradients(
            tile, dphi, moved_a, a, v, fit, beyond, width, da, dv, rows_a, False, F
        )
    else:
        tile = tl.program_id(0)
        _fill_feature_gradients(
            tile, dpsi, moved_b, b, v, fit, beyond, width, db, dv, rows_b, True, F
        )


def build_tables(pairs: int, error: float, fine: float, device: Any) -> tuple[Tensor, ...]:
    """Return the table of `tanh_factors.build_pair_table` on the device, and two grids.

    The second grid includes the error of derivatives. Fewer pairs are enough within `fine` times
    the error.

    Powers of y take half the steps of Chebyshev's recurrence. Their coefficients are larger and
    cancel, but the series are short: float32 loses far less than the rounding to 16 bits.
    """
    grid, off, found = tanh_factors.build_pair_table(pairs, error)
    order = found.shape[-1]
    powers = np.zeros((order, order))
    for k in range(order):
        powers[k, : k + 1] = np.polynomial.chebyshev.cheb2poly(np.eye(order)[k, : k + 1])
    grids = [np.concatenate([grid[None], x.T / fine]).copy("C") for x in off]
    return tuple(
        torch.tensor(x, dtype=torch.float32, device=device) for x in (found @ powers, *grids)
    )


@memoize("triton.feature_tiles")
def _tile_shape(h: int) -> tuple[int, int]:
    """Return the rows and columns of a program's tile."""
    wide = min(tile_choice.next_power_of_2(h), 128)
    return max(ELEMENTS_PER_PROGRAM // wide, 1), wide


def _count_rows(x: Tensor) -> int:
    return int(x.numel()) // int(x.shape[-1])


def count_pairs(table: Tensor) -> int:
    return int(table.shape[1]) // 2


def allocate_fit(a: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty arrays for `fit`, `beyond` and `width`."""
    fit = workspace.allocate_buffer(a, (1 + table.shape[1] * table.shape[2], a.shape[-1]))
    return (
        fit,
        workspace.allocate_buffer(a, (1,), torch.int32),
        workspace.allocate_buffer(a, (1,), torch.int32),
    )


def unit_ranges(a: Tensor, b: Tensor) -> Tensor:
    """Return the largest |a| and |b| of each unit (2, h); ∞ if one is not finite."""
    rows = [
        x.reshape(-1, x.shape[-1]) if x.numel() else x.new_zeros(1, x.shape[-1]) for x in (a, b)
    ]
    tops = [torch.linalg.vector_norm(x, math.inf, 0, dtype=torch.float32) for x in rows]
    return torch.stack(tops).nan_to_num(math.inf, math.inf)


def fit_units(
    parts: Tensor, v: Tensor, table: Tensor, grid: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `fit`, `beyond` and `width` for units with these ranges."""
    h, (count, rows, order), pairs = parts.shape[-1], table.shape, count_pairs(table)
    size, narrow = rows * order, min(tile_choice.next_power_of_2(h), 64)
    whole = 2 * pairs * h <= tile_choice.MAX_FORWARD_TILE_WIDTH  # a tile holds all columns
    facts = {
        "SIZE": size,
        "SHARE": COEFFICIENTS_PER_PROGRAM,
        "COUNT": parts.shape[0],
        "BLOCK_G": tile_choice.next_power_of_2(count),
        "BLOCK_H": narrow,
        "J": pairs,
        "LEAST": tile_choice.MAX_FORWARD_TILE_WIDTH if whole else COLUMN_CHUNK.value,
    }
    found = allocate_fit(parts, table)
    programs = (1 + -(-size // COEFFICIENTS_PER_PROGRAM), -(-h // narrow))
    arrays, tile = (parts, table, grid, v, *found), KERNEL_TILE._replace(warps=8)
    launch.launch_kernel(_fit_kernel, programs, arrays, (), (h, count), facts, tile)
    return found


def kernel_width(h: int, pairs: int, width: Tensor) -> Tensor | None:
    """Return the width for the kernels; None if a tile holds all columns of φ and ψ."""
    return None if 2 * pairs * h <= tile_choice.MAX_FORWARD_TILE_WIDTH else width


def compute_features(known: FeatureInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return φ(a), ψ(b), Σ v∘m(a) and Σ v∘m(b), computed in float32.

    (…, rows, h) → (…, rows, 2·J·h) in the dtype of a and (…, rows) in float32. Their product and
    sums approximate Σ_h v_h tanh(a_h + b_h). Columns beyond the width are not filled. All results
    are 0 if some unit is beyond the table.
    """
    rows = [x.contiguous() for x in known[:2]]
    columns = 2 * known.pairs * known.a.shape[-1]
    phi, psi = (workspace.allocate_buffer(x, (*x.shape[:-1], columns), x.dtype) for x in rows)
    alone = tuple(workspace.allocate_buffer(x, x.shape[:-1]) for x in rows)
    _launch_tiles(_features_kernel, known, (*rows, *known[2:6], phi, psi, *alone), 1)
    return phi, psi, *alone


def fill_gradients(
    dphi: Tensor, dpsi: Tensor, moved_a: Tensor | None, moved_b: Tensor, known: FeatureInputs,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Fill `into`: da = Σⱼ eⱼ′(a) dEⱼ + oⱼ′(a) dOⱼ + v∘m′(a) dM, db likewise, and parts of dv.

    The parts are (`count_gradient_parts`, h). `moved_a` and `moved_b` are the gradients of the row
    sums of `compute_features`; None means 0.
    """
    dphi, dpsi, a, b, moved_b = (x.contiguous() for x in (dphi, dpsi, *known[:2], moved_b))
    moved = (None if moved_a is None else moved_a.contiguous(), moved_b)
    arrays = (dphi, dpsi, *moved, a, b, *known[2:6], *into)
    h = a.shape[-1]
    _launch_tiles(_features_grad_kernel, known, arrays, -(-h // _tile_shape(h)[1]))


def count_gradient_parts(a: Tensor, b: Tensor, moved_a: Tensor | None) -> int:
    """Return the number of parts of dv."""
    tall = _tile_shape(a.shape[-1])[0]
    return -(-_count_rows(b) // tall) + (0 if moved_a is None else -(-_count_rows(a) // tall))


def _launch_tiles(
    kernel: Any, known: FeatureInputs, arrays: tuple[Tensor | None, ...], across: int
) -> None:
    """Launch a kernel with one program per tile of a or b; `across` is the tiles per row."""
    rows_a, rows_b, h, pairs = (
        _count_rows(known.a),
        _count_rows(known.b),
        known.a.shape[-1],
        known.pairs,
    )
    tall, wide = _tile_shape(h)
    tiles_a, tiles_b = -(-rows_a // tall), -(-rows_b // tall)
    if tiles_a + tiles_b:
        order = (known.fit.shape[0] - 1) // (2 * pairs + 1)
        facts = {"H": h, "J": pairs, "K": order, "BLOCK_R": tall, "BLOCK_H": wide}
        whole = (rows_a, rows_b, tiles_a)
        launch.launch_kernel(
            kernel, (tiles_a + tiles_b, across), arrays, (), whole, facts, KERNEL_TILE
        )
