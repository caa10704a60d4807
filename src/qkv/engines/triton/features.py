"""tanh(a + b) ≈ m(a) + m(b) + Σⱼ eⱼ(a) oⱼ(b) + oⱼ(a) eⱼ(b): the additive score as a dot product.

eⱼ are even and oⱼ and m odd polynomials, good for |a|, |b| ≤ A. A `table` (G, 2·J + 1, K) holds e,
then o / x, then m / x for half-ranges A, by the powers 1, y, y² … of y = 2x² − 1, x = a/A; the
`grid` (3, G) holds A, ascending, how many pairs of functions each A takes, and of how many powers.
Every hidden unit has the first A ≥ max |a|, |b| over its own rows, found on the device, which it
never leaves: so the device alone knows how wide the product is.

`fit` (3 + (2·J + 1)·K, h) holds the place of each unit among those in order of their pairs, most
first, and in that order which unit it is, 1/A, and its row of the table, so that neighbours lie
side by side. `beyond` (1,) is 1 if some unit has no such A. `spans` are whole numbers: how many
columns there are, in whole chunks (0 if beyond), how many hold something, the most pairs and powers
of a unit, and where the columns of each pair begin.

    φ(a) = [64 64 mₐ mₐ′ | e₁ … | o₁ … | e₂ … | o₂ …]
    ψ(b) = [m_b m_b′ 64 64 | v∘o₁ … | v∘e₁ … | v∘o₂ … | v∘e₂ …]

of the units that have such a pair, an even number with one of zeros, where mₐ + mₐ′ is
Σ v∘m(a) / 64: two of 16 bits, to be exact.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton import launch
from qkv.engines.triton.fit import ALONE, CHUNK, PLAIN, SPANS, STEPS, rows_of, tile
from qkv.engines.triton.tiles import launched

TILE = 2048
"""Elements of x that a program takes."""
UNIT = tl.constexpr(64.0)
"""What is added for a or b alone is divided by, so that the numbers of float16 reach far."""


@triton.jit
def _series(row, h, there, y, powers):
    """Σₖ cₖ yᵏ. `row` points to c₀ of each unit."""
    value = tl.zeros_like(y)
    at = row + (powers - 1) * h
    for _ in range(0, powers, STEPS):
        for i in tl.static_range(STEPS):
            value = value * y + tl.load(at - i * h, mask=there, other=0.0)
        at -= STEPS * h
    return value


@triton.jit
def _series_slope(row, h, there, y, powers):
    """The value of `_series` and its slope in y."""
    value = tl.zeros_like(y)
    slope = tl.zeros_like(y)
    at = row + (powers - 1) * h
    for _ in range(0, powers, STEPS):
        for i in tl.static_range(STEPS):
            slope = slope * y + value
            value = value * y + tl.load(at - i * h, mask=there, other=0.0)
        at -= STEPS * h
    return value, slope


@triton.jit
def _halves(spans, j):
    """Where the two halves of a pair's columns begin, and how many each has."""
    first = tl.multiple_of(tl.load(spans + SPANS + j), 2)
    wide = tl.multiple_of((tl.load(spans + SPANS + j + 1) - first) // 2, 2)
    return first, first + wide, wide


@triton.jit
def _read(x, row, rows, col, unit, h, F):
    """Numbers of rows (BLOCK_R, BLOCK_H) in the order of the units' places. They are read as they
    lie and put in order on chip: so a thread has two columns, as of the coefficients."""
    if F.WHOLE:
        found = tl.load(x + row * h + col, mask=(row < rows) & (col < h), other=0.0)
        found = found.to(tl.float32)
        found = tl.gather(found, tl.broadcast_to(unit, found.shape), 1)
    else:
        found = tl.load(x + row * h + unit, mask=(row < rows) & (col < h), other=0.0)
        found = found.to(tl.float32)
    return found


@triton.jit
def _near(start, F):
    """Columns, two for each thread with many rows: a coefficient is loaded once for all of them."""
    col = start + tl.arange(0, F.BLOCK_H)
    return tl.max_contiguous(tl.multiple_of(col, 2), 2)[None, :]


@triton.jit
def _fill(tile, x, v, fit, spans, out, rows, h, KEY: tl.constexpr, F):
    first_row = tile.to(tl.int64) * F.BLOCK_R
    x += first_row * h
    row = tl.arange(0, F.BLOCK_R)[:, None]
    rows = tl.minimum(rows - first_row, F.BLOCK_R).to(tl.int32)
    to = out + first_row * F.W + row * F.W
    width = tl.load(spans)
    most = tl.load(spans + 2)
    powers = tl.load(spans + 3)
    alone = tl.zeros((F.BLOCK_R,), tl.float32)
    for start in range(0, h, F.BLOCK_H):
        col = _near(start, F)
        there = col < h
        unit = tl.load(fit + h + col, mask=there, other=0.0).to(tl.int32)
        scale = tl.load(fit + 2 * h + col, mask=there, other=0.0)
        z = _read(x, row, rows, col, unit, h, F) * scale
        y = 2 * z * z - 1
        even = fit + 3 * h + col
        odd = even + F.J * F.K * h
        factor = tl.load(v + unit, mask=there, other=0.0).to(tl.float32)
        alone += tl.sum(factor * (z * _series(odd + F.J * F.K * h, h, there, y, powers)), 1)
        for j in range(most):
            e = _series(even + j * F.K * h, h, there, y, powers)
            o = z * _series(odd + j * F.K * h, h, there, y, powers)
            if KEY:
                e, o = factor * o, factor * e
            first, second, wide = _halves(spans, j)
            own = (row < rows) & (col < wide)
            tl.store(to + first + col, e.to(out.dtype.element_ty), mask=own)
            tl.store(to + second + col, o.to(out.dtype.element_ty), mask=own)
    alone = alone[:, None] / UNIT
    near = alone.to(out.dtype.element_ty)
    rest = (alone - near.to(tl.float32)).to(out.dtype.element_ty)
    at = tl.arange(0, ALONE)[None, :]
    FROM: tl.constexpr = 0 if KEY else 2
    both = tl.where(at == FROM, near, tl.where(at == FROM + 1, rest, UNIT))
    tl.store(to + at, both.to(out.dtype.element_ty), mask=row < rows)
    left = tl.load(spans + 1) + tl.arange(0, CHUNK)[None, :]
    nothing = tl.zeros((F.BLOCK_R, CHUNK), out.dtype.element_ty)
    tl.store(to + left, nothing, mask=(row < rows) & (left < width))


@launched
def _features_kernel(a, b, v, fit, spans, phi, psi, rows_a, rows_b, tiles_a, h, F: tl.constexpr):
    if tl.load(spans) == 0:
        return
    tile = tl.program_id(0)
    if tile < tiles_a:
        _fill(tile, a, v, fit, spans, phi, rows_a, h, False, F)
    else:
        tile -= tiles_a
        _fill(tile, b, v, fit, spans, psi, rows_b, h, True, F)


@triton.jit
def _fill_grad(tile, grad, grad_lse, x, v, fit, spans, dx, dv, rows, h, KEY: tl.constexpr, F):
    first_row = tile.to(tl.int64) * F.BLOCK_R
    x += first_row * h
    dx += first_row * h
    row = tl.arange(0, F.BLOCK_R)[:, None]
    rows = tl.minimum(rows - first_row, F.BLOCK_R).to(tl.int32)
    col = _near(tl.program_id(1) * F.BLOCK_H, F)
    there = col < h
    inside = (row < rows) & there
    unit = tl.load(fit + h + col, mask=there, other=0.0).to(tl.int32)
    from_row = grad + first_row * F.W + row * F.W
    along = tl.zeros((F.BLOCK_R, F.BLOCK_H), tl.float32)
    weighed = tl.zeros((F.BLOCK_R, F.BLOCK_H), tl.float32)
    if tl.load(spans) > 0:
        most = tl.load(spans + 2)
        powers = tl.load(spans + 3)
        scale = tl.load(fit + 2 * h + col, mask=there, other=0.0)
        z = _read(x, row, rows, col, unit, h, F) * scale
        y = 2 * z * z - 1
        even = fit + 3 * h + col
        odd = even + F.J * F.K * h
        factor = tl.load(v + unit, mask=there, other=0.0).to(tl.float32)
        for j in range(most):
            first, second, wide = _halves(spans, j)
            own = (row < rows) & (col < wide)
            de = tl.load(from_row + first + col, mask=own, other=0.0).to(tl.float32)
            do = tl.load(from_row + second + col, mask=own, other=0.0).to(tl.float32)
            if KEY:
                de, do = do, de
            e, e_slope = _series_slope(even + j * F.K * h, h, there, y, powers)
            o, o_slope = _series_slope(odd + j * F.K * h, h, there, y, powers)
            along += de * e_slope * (4 * z) + do * (o + 4 * z * z * o_slope)
            if KEY:
                weighed += de * e + do * (z * o)
        if KEY:
            along *= factor
        # A row of weights adds up to 1: what is added to all its scores moves its logarithm alone.
        if KEY or grad_lse is not None:
            if KEY:
                of_row = tl.load(from_row, mask=row < rows, other=0.0).to(tl.float32) / UNIT
            else:
                of_row = tl.load(grad_lse + first_row + row, mask=row < rows, other=0.0)
            m, m_slope = _series_slope(odd + F.J * F.K * h, h, there, y, powers)
            along += of_row * factor * (m + 4 * z * z * m_slope)
            weighed += of_row * z * m
        along *= scale
    if F.WHOLE:
        place = tl.load(fit + col, mask=there, other=0.0).to(tl.int32)
        along = tl.gather(along, tl.broadcast_to(place, along.shape), 1)
        tl.store(dx + row * h + col, along.to(dx.dtype.element_ty), mask=inside)
    else:
        tl.store(dx + row * h + unit, along.to(dx.dtype.element_ty), mask=inside)
    if KEY or grad_lse is not None:
        total = tl.sum(weighed, 0)[None, :]
        tl.store(dv + tl.program_id(0) * h + unit, total, mask=there)


@launched
def _features_grad_kernel(
    dphi, dpsi, grad_lse, a, b, v, fit, spans, da, db, dv, rows_a, rows_b, tiles_b, h,
    F: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tiles_b:
        _fill_grad(tile, dpsi, None, b, v, fit, spans, db, dv, rows_b, h, True, F)
    else:
        tile -= tiles_b
        _fill_grad(tile, dphi, grad_lse, a, v, fit, spans, da, dv, rows_a, h, False, F)


def width_of(h: int, pairs: int) -> int:
    """Columns that φ and ψ of h units have at most."""
    return -(-(int(ALONE) + 2 * pairs * (h + h % 2)) // int(CHUNK)) * int(CHUNK)


def features_of(
    a: Tensor, b: Tensor, v: Tensor, fit: Tensor, spans: Tensor, pairs: int
) -> tuple[Tensor, Tensor]:
    """φ(a) and ψ(b), computed in float32: (…, rows, h) → (…, rows, W) in the dtype given.

    φ(a)·ψ(b) ≈ Σ_h v_h tanh(a_h + b_h), of as many columns as `spans` says. The others are not
    filled.
    """
    a, b = a.contiguous(), b.contiguous()
    h = a.shape[-1]
    phi, psi = (x.new_empty((*x.shape[:-1], width_of(h, pairs))) for x in (a, b))
    arrays, (tall, wide) = (a, b, v, fit, spans, phi, psi), tile(h, TILE)
    tiles_a, tiles_b = -(-rows_of(a) // tall), -(-rows_of(b) // tall)
    if tiles_a + tiles_b:
        facts, whole = _known(fit, pairs, h, tall, wide), (rows_of(a), rows_of(b), tiles_a, h)
        busy = PLAIN._replace(warps=8)
        launch.start(_features_kernel, tiles_a + tiles_b, arrays, (), whole, facts, busy)
    return phi, psi


def features_grad(
    dphi: Tensor,
    dpsi: Tensor,
    grad_lse: Tensor | None,
    a: Tensor,
    b: Tensor,
    v: Tensor,
    fit: Tensor,
    spans: Tensor,
    pairs: int,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """da = v∘m′(a) ∂L/∂lse + Σⱼ eⱼ′(a) dEⱼ + oⱼ′(a) dOⱼ, db likewise, and parts (…, h) of dv.

    `grad_lse` (…,) is what the score gradients of each row of a add up to, None if 0. da and db are
    the two contiguous arrays of `into`, if given.
    """
    dphi, dpsi, a, b = (x.contiguous() for x in (dphi, dpsi, a, b))
    h = a.shape[-1]
    da, db = into or (torch.empty_like(a), torch.empty_like(b))
    tall, wide = tile(h, TILE // 2)  # a slope has twice the registers
    tiles_a, tiles_b = -(-rows_of(a) // tall), -(-rows_of(b) // tall)
    tiles = tiles_a + tiles_b
    parts = a.new_empty((tiles_b if grad_lse is None else tiles, h), dtype=torch.float32)
    arrays = (dphi, dpsi, grad_lse, a, b, v, fit, spans, da, db, parts)
    if tiles:
        facts, whole = _known(fit, pairs, h, tall, wide), (rows_of(a), rows_of(b), tiles_b, h)
        programs = (tiles, -(-h // wide))
        launch.start(_features_grad_kernel, programs, arrays, (), whole, facts, PLAIN)
    return da, db, parts


def _known(fit: Tensor, pairs: int, h: int, tall: int, wide: int) -> dict[str, Any]:
    order = (fit.shape[0] - 3) // (2 * pairs + 1)
    return {
        "J": pairs,
        "K": order,
        "W": width_of(h, pairs),
        "BLOCK_R": tall,
        "BLOCK_H": wide,
        "WHOLE": h <= wide,
    }
