"""tanh(a + b) ≈ Σⱼ σⱼ [eⱼ(a) oⱼ(b) + oⱼ(a) eⱼ(b)]: the additive score as a dot product.

eⱼ are even and oⱼ odd polynomials, good for |a|, |b| ≤ A. A `table` (G, 2, J, K) holds them for a
`grid` (G,) of ascending half-ranges A, by the powers 1, y, y² … of y = 2x² − 1, x = a/A: [:, 0] is
√σⱼ·eⱼ, [:, 1] is √σⱼ·oⱼ/x. Every hidden unit has the first A ≥ max |a|, |b| over its own rows,
found on the device, which it never leaves. `fit` (1 + 2·J·K, h) holds 1/A of each unit, then its
row of the table, so that neighbouring units lie side by side; `beyond` (1,) is 1 if some unit has
no such A.
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

TILE = 2048
"""Elements of x that a program takes."""
LOOK = 8192
"""The same, of one that looks for the largest."""
LOOKS = 64
"""Programs, at most, that look for the largest of an array's columns."""
FEW = 8
"""The same, for arrays that so many can look through at once."""
SHARE = 16
"""Coefficients of a fit that a program takes."""
PLAIN = launch.Tile(1, 1, 1, 4, 3)
"""Warps and stages of these kernels."""


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


@launched
def _fit_kernel(parts, table, grid, fit, beyond, h, G, F: tl.constexpr):
    """A share of the coefficients of some units; after the last, whether some unit has none.

    Every program finds the rows again from the parts: that is quicker than one more launch.
    """
    share = tl.program_id(0)
    unit = tl.arange(0, F.BLOCK_H)
    col = tl.program_id(1) * F.BLOCK_H + unit
    if share * F.SHARE < F.SIZE:
        row = tl.minimum(_first(parts, grid, col, h, G, F), G - 1)
        if share == 0:
            tl.store(fit + col, 1.0 / tl.load(grid + row), mask=col < h)
        c = share * F.SHARE + tl.arange(0, F.SHARE)[:, None]
        inside = (c < F.SIZE) & (col < h)[None, :]
        found = tl.load(table + row[None, :] * F.SIZE + c, mask=inside)
        tl.store(fit + (1 + c) * h + col[None, :], found, mask=inside)
    elif tl.program_id(1) == 0:
        short = tl.zeros((F.BLOCK_H,), tl.int32)
        for start in range(0, h, F.BLOCK_H):
            found = _first(parts, grid, start + unit, h, G, F)
            short = tl.maximum(short, (found == G).to(tl.int32))
        tl.store(beyond, tl.max(short, 0))


@triton.jit
def _series(row, h, inside, y, K: tl.constexpr):
    """Σₖ cₖ yᵏ. `row` points to c₀ of each unit."""
    value = tl.load(row + (K - 1) * h, mask=inside, other=0.0) + tl.zeros_like(y)
    for i in tl.static_range(1, K):
        value = value * y + tl.load(row + (K - 1 - i) * h, mask=inside, other=0.0)
    return value


@triton.jit
def _series_slope(row, h, inside, y, K: tl.constexpr):
    """The value of `_series` and its slope in y."""
    value = tl.load(row + (K - 1) * h, mask=inside, other=0.0) + tl.zeros_like(y)
    slope = tl.zeros_like(y)
    for i in tl.static_range(1, K):
        slope = slope * y + value
        value = value * y + tl.load(row + (K - 1 - i) * h, mask=inside, other=0.0)
    return value, slope


@triton.jit
def _fill(tile, x, v, fit, beyond, out, rows, h, KEY: tl.constexpr, F):
    row = tile.to(tl.int64) * F.BLOCK_R + tl.arange(0, F.BLOCK_R)[:, None]
    # Two columns and many rows for each thread: a coefficient is loaded once for all its rows.
    col = tl.program_id(1) * F.BLOCK_H + tl.arange(0, F.BLOCK_H)
    col = tl.max_contiguous(col, 2 if F.BLOCK_H > 1 else 1)[None, :]
    inside = (row < rows) & (col < h)
    to = out + row * (2 * F.J * h) + col
    if tl.load(beyond) == 0:
        scale = tl.load(fit + col, mask=col < h, other=0.0)
        z = tl.load(x + row * h + col, mask=inside, other=0.0).to(tl.float32) * scale
        y = 2 * z * z - 1
        even = fit + h + col
        factor = tl.full((1, F.BLOCK_H), 1.0, tl.float32)
        if KEY:
            factor = tl.load(v + col, mask=col < h, other=0.0).to(tl.float32)
        for j in range(F.J):
            e = factor * _series(even + j * F.K * h, h, col < h, y, F.K)
            o = factor * (z * _series(even + (F.J + j) * F.K * h, h, col < h, y, F.K))
            first = o if KEY else e
            second = e if KEY else o
            tl.store(to + j * h, first.to(out.dtype.element_ty), mask=inside)
            tl.store(to + (F.J + j) * h, second.to(out.dtype.element_ty), mask=inside)
    else:
        nothing = tl.zeros((F.BLOCK_R, F.BLOCK_H), out.dtype.element_ty)
        for j in range(2 * F.J):
            tl.store(to + j * h, nothing, mask=inside)


@launched
def _features_kernel(a, b, v, fit, beyond, phi, psi, rows_a, rows_b, tiles_a, h, F: tl.constexpr):
    tile = tl.program_id(0)
    if tile < tiles_a:
        _fill(tile, a, v, fit, beyond, phi, rows_a, h, False, F)
    else:
        tile -= tiles_a
        _fill(tile, b, v, fit, beyond, psi, rows_b, h, True, F)


@triton.jit
def _fill_grad(tile, grad, x, v, fit, beyond, dx, dv, rows, h, KEY: tl.constexpr, F):
    row = tile.to(tl.int64) * F.BLOCK_R + tl.arange(0, F.BLOCK_R)[:, None]
    flat = tl.program_id(1) * F.BLOCK_H + tl.arange(0, F.BLOCK_H)
    flat = tl.max_contiguous(flat, 2 if F.BLOCK_H > 1 else 1)
    col = flat[None, :]
    inside = (row < rows) & (col < h)
    at = grad + row * (2 * F.J * h) + col
    along = tl.zeros((F.BLOCK_R, F.BLOCK_H), tl.float32)
    weighed = tl.zeros((F.BLOCK_R, F.BLOCK_H), tl.float32)
    if tl.load(beyond) == 0:
        scale = tl.load(fit + col, mask=col < h, other=0.0)
        z = tl.load(x + row * h + col, mask=inside, other=0.0).to(tl.float32) * scale
        y = 2 * z * z - 1
        even = fit + h + col
        for j in range(F.J):
            first = tl.load(at + j * h, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(at + (F.J + j) * h, mask=inside, other=0.0).to(tl.float32)
            de = second if KEY else first
            do = first if KEY else second
            e, e_slope = _series_slope(even + j * F.K * h, h, col < h, y, F.K)
            o, o_slope = _series_slope(even + (F.J + j) * F.K * h, h, col < h, y, F.K)
            along += de * e_slope * (4 * z) + do * (o + 4 * z * z * o_slope)
            if KEY:
                weighed += de * e + do * (z * o)
        along *= scale
        if KEY:
            along *= tl.load(v + col, mask=col < h, other=0.0).to(tl.float32)
    tl.store(dx + row * h + col, along.to(dx.dtype.element_ty), mask=inside)
    if KEY:
        tl.store(dv + tile * h + flat, tl.sum(weighed, 0), mask=flat < h)


@launched
def _features_grad_kernel(
    dphi, dpsi, a, b, v, fit, beyond, da, db, dv, rows_a, rows_b, tiles_a, h, F: tl.constexpr
):
    tile = tl.program_id(0)
    if tile < tiles_a:
        _fill_grad(tile, dphi, a, v, fit, beyond, da, dv, rows_a, h, False, F)
    else:
        tile -= tiles_a
        _fill_grad(tile, dpsi, b, v, fit, beyond, db, dv, rows_b, h, True, F)


def tables(pairs: int, error: float, device: Any) -> tuple[Tensor, Tensor]:
    """The table and grid of `separable.table`, on the device, less orders that do not count.

    Powers of y take half the steps that Chebyshev's recurrence does. Their coefficients are larger
    and cancel, but the series are short: float32 loses far less than the rounding to 16 bits.
    """
    grid, found = separable.table(pairs, error)
    after = np.abs(found)[..., ::-1].cumsum(-1)[..., ::-1].max((0, 1, 2))
    order = int((after > error / 32).sum())
    found = found[..., :order]
    found = np.stack([found[:, 0] @ _powers(order, 1), found[:, 1] @ _powers(order, 2)], 1)
    table, halves = (torch.tensor(x, dtype=torch.float32, device=device) for x in (found, grid))
    return table, halves


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
def _tile(h: int, size: int = TILE) -> tuple[int, int]:
    """Rows and columns of a program's tile."""
    wide = min(int(triton.next_power_of_2(h)), 128)
    return max(size // wide, 1), wide


def _rows(x: Tensor) -> int:
    return int(x.numel()) // int(x.shape[-1])


def fit_of(a: Tensor, b: Tensor, table: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """`fit` and `beyond` for a (…, h) and b (…, h), of which some number is not finite or large."""
    a, b = a.contiguous(), b.contiguous()
    h, (count, _, pairs, order) = a.shape[-1], table.shape
    size = 2 * pairs * order
    tall, wide = _tile(h, LOOK)
    blocks = -(-h // wide)
    rows_a, rows_b = _rows(a), _rows(b)
    most = launch.power_of_2(max(LOOKS // blocks, 1))
    looks = most if max(rows_a, rows_b) > FEW * tall else min(FEW, most)  # two to compile
    parts = a.new_empty((2 * looks, h), dtype=torch.float32)
    fit = a.new_empty((1 + size, h), dtype=torch.float32)
    beyond = a.new_empty(1, dtype=torch.int32)
    facts = {"LOOKS": looks, "BLOCK_R": tall, "BLOCK_H": wide}
    launch.start(
        _reach_kernel, (2 * looks, blocks), (a, b, parts), (), (rows_a, rows_b, h), facts, PLAIN
    )
    narrow = min(wide, 32)
    facts = {
        "SIZE": size,
        "SHARE": SHARE,
        "COUNT": 2 * looks,
        "BLOCK_G": launch.power_of_2(count),
        "BLOCK_H": narrow,
    }
    arrays = (parts, table, grid, fit, beyond)
    programs = (1 + -(-size // SHARE), -(-h // narrow))
    launch.start(_fit_kernel, programs, arrays, (), (h, count), facts, PLAIN)
    return fit, beyond


def features_of(
    a: Tensor, b: Tensor, v: Tensor, fit: Tensor, beyond: Tensor, pairs: int
) -> tuple[Tensor, Tensor]:
    """φ(a) = [e₁ … e_J | o₁ … o_J] and ψ(b) = [v∘o₁ … | v∘e₁ …], computed in float32.

    (…, rows, h) → (…, rows, 2·J·h) in the dtype given; each eⱼ is h wide. Then
    φ(a)·ψ(b) ≈ Σ_h v_h tanh(a_h + b_h). All 0 where some unit is beyond the table.
    """
    a, b = a.contiguous(), b.contiguous()
    h = a.shape[-1]
    phi, psi = (x.new_empty((*x.shape[:-1], 2 * pairs * h)) for x in (a, b))
    _each_tile(_features_kernel, (a, b, v, fit, beyond, phi, psi), a, b, fit, pairs, *_tile(h))
    return phi, psi


def features_grad(
    dphi: Tensor,
    dpsi: Tensor,
    a: Tensor,
    b: Tensor,
    v: Tensor,
    fit: Tensor,
    beyond: Tensor,
    pairs: int,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """da = Σⱼ eⱼ′(a) dEⱼ + oⱼ′(a) dOⱼ, db likewise times v, and parts (…, h) whose sum is dv.

    da and db are the two contiguous arrays of `into`, if given.
    """
    dphi, dpsi, a, b = (x.contiguous() for x in (dphi, dpsi, a, b))
    h = a.shape[-1]
    da, db = into or (torch.empty_like(a), torch.empty_like(b))
    tall, wide = _tile(h, TILE // 2)  # a slope has twice the registers
    parts = a.new_empty((-(-_rows(b) // tall), h), dtype=torch.float32)
    arrays = (dphi, dpsi, a, b, v, fit, beyond, da, db, parts)
    _each_tile(_features_grad_kernel, arrays, a, b, fit, pairs, tall, wide)
    return da, db, parts


def _each_tile(
    kernel: Any,
    arrays: tuple[Tensor, ...],
    a: Tensor,
    b: Tensor,
    fit: Tensor,
    pairs: int,
    tall: int,
    wide: int,
) -> None:
    """Launch a kernel whose programs have each a tile of a or of b."""
    rows_a, rows_b, h = _rows(a), _rows(b), a.shape[-1]
    tiles_a, tiles_b = -(-rows_a // tall), -(-rows_b // tall)
    if tiles_a + tiles_b:
        order = (fit.shape[0] - 1) // (2 * pairs)
        facts = {"J": pairs, "K": order, "BLOCK_R": tall, "BLOCK_H": wide}
        whole = (rows_a, rows_b, tiles_a, h)
        launch.start(kernel, (tiles_a + tiles_b, -(-h // wide)), arrays, (), whole, facts, PLAIN)
