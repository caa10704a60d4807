"""∂L/∂φ = dSᵀ·ψ and ∂L/∂ψ = dS·φ, for a number of columns that is read on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.launching import launch, tile_choice
from qkv.engines.triton.tile_functions.tiles import jit_kernel, visible_tiles

TILE = tile_choice.Tile(256, 128, 64, 8, 4, uses_descriptors=True)
"""Rows and columns of a tile of the result, and terms per step (`chunk`)."""


@triton.jit
def _product_tile(
    ds, other, out, first, column, rows, terms, there, lo, hi, F, TURNED: tl.constexpr
):
    """Write a tile of ds · other, or with TURNED of dsᵀ · other.

    ds is (rows, terms), or (terms, rows) with TURNED; it is 0 outside of tiles lo … hi of terms.
    """
    if TURNED:
        left = tl.make_tensor_descriptor(ds, [terms, rows], [there, 1], [F.TERMS, F.ROWS])
    else:
        left = tl.make_tensor_descriptor(ds, [rows, terms], [there, 1], [F.ROWS, F.TERMS])
    right = tl.make_tensor_descriptor(other, [terms, F.W], [F.W, 1], [F.TERMS, F.COLS])
    total = tl.zeros((F.ROWS, F.COLS), tl.float32)
    for term in tl.range(lo * F.TERMS, hi * F.TERMS, F.TERMS):
        if TURNED:
            a = tl.trans(left.load([term, first]))
        else:
            a = left.load([first, term])
        total = tl.dot(a, right.load([term, column]), total)
    to = tl.make_tensor_descriptor(out, [rows, F.W], [F.W, 1], [F.ROWS, F.COLS])
    to.store([first, column], total.to(out.dtype.element_ty))


@jit_kernel
def wide_gradients_kernel(
    ds, phi, psi, dphi, dpsi, width, rows_a, rows_b, tiles_a, lower, upper, line, F: tl.constexpr
):
    column = tl.program_id(0) % F.ACROSS * F.COLS
    if column >= tl.load(width):
        return
    tile = tl.program_id(0) // F.ACROSS
    pair = tl.program_id(1).to(tl.int64)
    ds += pair * rows_b * line
    of_a = pair * rows_a * F.W
    of_b = pair * rows_b * F.W
    if tile < tiles_a:
        first = tile * F.ROWS
        last = first + F.ROWS - 1
        lo, _, _, hi = visible_tiles(first, last, lower, upper, rows_b, F.TERMS, F.LOWER, F.UPPER)
        _product_tile(
            ds, psi + of_b, dphi + of_a, first, column, rows_a, rows_b, line, lo, hi, F, True
        )
    else:
        first = (tile - tiles_a) * F.ROWS
        last = first + F.ROWS - 1
        lo, _, _, hi = visible_tiles(first, last, -upper, -lower, rows_a, F.TERMS, F.UPPER, F.LOWER)
        _product_tile(
            ds, phi + of_a, dpsi + of_b, first, column, rows_b, rows_a, line, lo, hi, F, False
        )


@jit_kernel
def clear_kernel(x, count, F: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * F.BLOCK
    at = first + tl.arange(0, F.BLOCK)
    zeros = tl.zeros((F.BLOCK,), x.dtype.element_ty)
    if first + F.BLOCK <= count:  # without a mask, 16 bytes are written at a time
        tl.store(x + at, zeros)
    else:
        tl.store(x + at, zeros, mask=at < count)


def fill_zeros(x: Tensor) -> Tensor:
    """Fill a contiguous x with 0 by a kernel, so that a replay repeats it; return x."""
    facts, count = {"BLOCK": 4096}, x.numel()
    launch.launch_kernel(
        clear_kernel, -(-count // 4096), (x,), (), (count,), facts, tile_choice.Tile(1, 1, 1, 4, 1)
    )
    return x


def fill_gradients(
    ds: Tensor, phi: Tensor, psi: Tensor, dphi: Tensor, dpsi: Tensor, width: Tensor,
    band: tuple[int | None, ...] = (None, None),
) -> None:  # fmt: skip
    """Fill the first `width` columns of the gradients of φ (P, n, W) and ψ (P, m, W).

    ds is (P, m, line); it is 0 for a key j and a query i unless j − i is in the band.
    """
    (pairs, n, w), (_, m, line), tile = phi.shape, ds.shape, TILE
    across, tiles_a, tiles_b = -(-w // tile.cols), -(-n // tile.rows), -(-m // tile.rows)
    facts = {"W": w, "ROWS": tile.rows, "COLS": tile.cols, "TERMS": tile.chunk, "ACROSS": across}
    facts |= {"LOWER": band[0] is not None, "UPPER": band[1] is not None}
    arrays = (ds, phi, psi, dphi, dpsi, width)
    whole = (n, m, tiles_a, band[0] or 0, band[1] or 0, line)
    programs = ((tiles_a + tiles_b) * across, pairs)
    launch.launch_kernel(wide_gradients_kernel, programs, arrays, (), whole, facts, tile)
