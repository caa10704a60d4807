"""∂L/∂φ = dSᵀ·ψ and ∂L/∂ψ = dS·φ, of as many columns as the device alone knows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton import launch
from qkv.engines.triton.tiles import launched

TILE = launch.Tile(256, 128, 64, 8, 4, described=True)
"""Rows and columns of a tile of the result, terms at a time."""


@triton.jit
def _product(ds, other, out, first, column, rows, terms, there, F, TURNED: tl.constexpr):
    """A tile of ds · other, or with TURNED of dsᵀ · other: ds (rows, terms) or (terms, rows)."""
    if TURNED:
        left = tl.make_tensor_descriptor(ds, [terms, rows], [there, 1], [F.TERMS, F.ROWS])
    else:
        left = tl.make_tensor_descriptor(ds, [rows, terms], [there, 1], [F.ROWS, F.TERMS])
    right = tl.make_tensor_descriptor(other, [terms, F.W], [F.W, 1], [F.TERMS, F.COLS])
    total = tl.zeros((F.ROWS, F.COLS), tl.float32)
    for term in tl.range(0, terms, F.TERMS):
        if TURNED:
            a = tl.trans(left.load([term, first]))
        else:
            a = left.load([first, term])
        total = tl.dot(a, right.load([term, column]), total)
    to = tl.make_tensor_descriptor(out, [rows, F.W], [F.W, 1], [F.ROWS, F.COLS])
    to.store([first, column], total.to(out.dtype.element_ty))


@launched
def grads_kernel(ds, phi, psi, dphi, dpsi, width, rows_a, rows_b, tiles_a, line, F: tl.constexpr):
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
        _product(ds, psi + of_b, dphi + of_a, first, column, rows_a, rows_b, line, F, True)
    else:
        first = (tile - tiles_a) * F.ROWS
        _product(ds, phi + of_a, dpsi + of_b, first, column, rows_b, rows_a, line, F, False)


@launched
def clear(x, count, F: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * F.BLOCK + tl.arange(0, F.BLOCK)
    tl.store(x + at, tl.zeros((F.BLOCK,), x.dtype.element_ty), mask=at < count)


def cleared(x: Tensor) -> Tensor:
    """x (…) without gaps, filled with 0 by a launch, which is made again as others are."""
    facts, count = {"BLOCK": 4096}, x.numel()
    launch.start(clear, -(-count // 4096), (x,), (), (count,), facts, launch.Tile(1, 1, 1, 4, 1))
    return x


def fill(ds: Tensor, phi: Tensor, psi: Tensor, dphi: Tensor, dpsi: Tensor, width: Tensor) -> None:
    """ds (P, m, line), φ (P, n, W), ψ (P, m, W) → the first columns of their gradients."""
    (pairs, n, w), (_, m, line), tile = phi.shape, ds.shape, TILE
    across, tiles_a, tiles_b = -(-w // tile.cols), -(-n // tile.rows), -(-m // tile.rows)
    facts = {"W": w, "ROWS": tile.rows, "COLS": tile.cols, "TERMS": tile.chunk, "ACROSS": across}
    arrays, whole = (ds, phi, psi, dphi, dpsi, width), (n, m, tiles_a, line)
    programs = ((tiles_a + tiles_b) * across, pairs)
    launch.start(grads_kernel, programs, arrays, (), whole, facts, tile)
