"""Exact softmax attention with s = Σ_h v_h tanh(a_h + b_h), without an n × m array.

The kernels of all scores run with the scores of `tanh`. `prepare_kernel` computes its inputs per
row, and `finish_kernel` turns the sums per hidden unit into gradients.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.backward import backward
from qkv.engines.triton.forward import forward
from qkv.engines.triton.launching import launch, tile_choice
from qkv.engines.triton.launching.kernel_call import MIN_VALUE_COLUMNS, KernelCall, Numbers
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.tile_functions.records import Arrays
from qkv.engines.triton.tile_functions.tiles import INFINITY, jit_kernel

TILE_ROWS = 64
"""Queries or keys of a tile."""

ROW_TILE = Tile(TILE_ROWS, 1, 1, 4, 3)
"""The tile of kernels that process rows only."""

_untyped_namedtuple: Any = namedtuple  # mypy needs literal field names
ExactArrays = _untyped_namedtuple(
    "Given", (*Arrays._fields, "v", "ea", "eb", "peak_a", "peak_b", "when")
)
"""`Arrays` with a as query and b as key, then v, e²ᵃ and e²ᵇ, the largest |a| and |b| per BLOCK,
and `when`: 0 on the device means that there is nothing to do."""


@triton.jit
def _fill_exponentials(job, x, ex, peak, rows, padded, F):
    """Write e²ˣ (PAIRED, padded) of a tile of x (rows, W), and its largest |x|."""
    tiles = padded // F.BLOCK
    lead = (job // tiles).to(tl.int64)
    row = job % tiles * F.BLOCK + tl.arange(0, F.BLOCK)
    top = tl.zeros((F.BLOCK,), tl.float32)
    for start in range(0, F.PAIRED, F.BLOCK_H):
        col = start + tl.arange(0, F.BLOCK_H)
        inside = (row < rows)[None, :] & (col < F.W)[:, None]
        at = lead * rows * F.W + row[None, :] * F.W + col[:, None]
        one = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        seen = tl.where(tl.abs(one) < INFINITY, tl.abs(one), INFINITY)
        top = tl.maximum(top, tl.max(seen, 0))
        to = ex + (lead * F.PAIRED + col[:, None]) * padded + row[None, :]
        tl.store(to, tl.exp(2 * one), mask=(col < F.PAIRED)[:, None])
    tl.store(peak + job, tl.max(top, 0))


@jit_kernel
def prepare_kernel(
    a,
    b,
    ea,
    eb,
    peak_a,
    peak_b,
    when,
    lse,
    of_query,
    jobs_a,
    n,
    m,
    padded_a,
    padded_b,
    F: tl.constexpr,
):
    """Write the inputs of `tanh`; if `when` holds 0, add each row's offset to its lse instead."""
    job = tl.program_id(0)
    if when is not None and tl.load(when) == 0:
        if of_query is not None:
            tiles = padded_a // F.BLOCK
            row = job % tiles * F.BLOCK + tl.arange(0, F.BLOCK)
            at = (job // tiles).to(tl.int64) * n + row
            here = row < tl.where(job < jobs_a, n, 0)
            added = tl.load(lse + at, mask=here) + tl.load(of_query + at, mask=here)
            tl.store(lse + at, added, mask=here)
        return
    if job < jobs_a:
        _fill_exponentials(job, a, ea, peak_a, n, padded_a, F)
    else:
        _fill_exponentials(job - jobs_a, b, eb, peak_b, m, padded_b, F)


@triton.jit
def _finish_gradients(job, slopes, along, v, dx, parts, rows, padded, F):
    """Write dx = 4v Σ ds·r(1 − r) as (rows, W); for queries also parts of dv = Σ ds·tanh."""
    tiles = padded // F.BLOCK
    lead = (job // tiles).to(tl.int64)
    row = job % tiles * F.BLOCK + tl.arange(0, F.BLOCK)
    for start in range(0, F.W, F.BLOCK_H):
        col = start + tl.arange(0, F.BLOCK_H)
        inside = (col < F.W)[:, None] & (row < rows)[None, :]
        at = (lead * F.W + col[:, None]) * padded + row[None, :]
        slope = tl.load(slopes + at, mask=inside, other=0.0)
        if along is not None:
            part = tl.sum(tl.load(along + at, mask=inside, other=0.0), 1)
            tl.store(parts + job * F.W + col, part, mask=col < F.W)
        slope *= 4 * tl.load(v + col, mask=col < F.W, other=0.0).to(tl.float32)[:, None]
        to = dx + (lead * rows + row[:, None]) * F.W + col[None, :]
        tl.store(to, tl.trans(slope).to(dx.dtype.element_ty), mask=tl.trans(inside))


@jit_kernel
def finish_kernel(
    slopes_a,
    along,
    slopes_b,
    v,
    when,
    da,
    db,
    parts,
    jobs_a,
    n,
    m,
    padded_a,
    padded_b,
    F: tl.constexpr,
):
    if when is not None and tl.load(when) == 0:
        return
    job = tl.program_id(0)
    if job < jobs_a:
        _finish_gradients(job, slopes_a, along, v, da, parts, n, padded_a, F)
    else:
        _finish_gradients(job - jobs_a, slopes_b, None, v, db, parts, m, padded_b, F)


@triton.jit
def _sum_parts(parts, col, count, F):
    total = tl.zeros((F.BLOCK, F.UNITS), tl.float32)
    for start in range(0, count, F.BLOCK):
        row = start + tl.arange(0, F.BLOCK)[:, None]
        at = row.to(tl.int64) * F.W + col[None, :]
        total += tl.load(parts + at, mask=(row < count) & (col < F.W)[None, :], other=0.0)
    return tl.sum(total, 0)


@jit_kernel
def fold_kernel(parts, others, when, dv, count, others_count, F: tl.constexpr):
    """Write dv (W,), the sum of the parts (count, W) in a fixed order.

    If `when` holds 0, sum the parts in `others` instead.
    """
    col = tl.program_id(0) * F.UNITS + tl.arange(0, F.UNITS)
    if when is not None and tl.load(when) == 0:
        total = _sum_parts(others, col, others_count, F)
    else:
        total = _sum_parts(parts, col, count, F)
    tl.store(dv + col, total.to(dv.dtype.element_ty), mask=col < F.W)


class ExactKernelCall(KernelCall):
    """A call of the exact kernels: a (B, H, n, h), b (B, Hₖ, m, h), v (h,), value (B, Hₖ, m, d).

    The pair i, j counts if lower ≤ j − i ≤ upper and j < lengths[batch]. If `when` (1,) int32 holds
    0 on the device, the kernels only add the second of `moved` (B, H, n) to the first.
    """

    def __init__(
        self, a: Tensor, b: Tensor, v: Tensor, value: Tensor, lower: int | None = None,
        upper: int | None = None, lengths: Tensor | None = None, when: Tensor | None = None,
        moved: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:  # fmt: skip
        a, b, self.v, self.when = a.contiguous(), b.contiguous(), v.contiguous(), when
        numbers = Numbers(1.0, lower=lower, upper=upper)
        super().__init__(*Arrays(a, b, value, lengths=lengths), *numbers)
        by_ptx = a.is_cuda and not launch.is_interpreted() and torch.version.hip is None
        self.constexprs = self.constexprs | {
            "TANH": 1 + by_ptx,
            "EDGES": True,  # one loop, because each takes long to compile
            "BLOCK": TILE_ROWS,
            "UNITS": tile_choice.next_power_of_2(self.w),
            "BLOCK_D": max(self.constexprs["BLOCK_D"], MIN_VALUE_COLUMNS),
        }
        self.can_use_descriptors = False
        paired = self.w + self.w % 2
        tiles = -(-self.n // TILE_ROWS), -(-self.m // TILE_ROWS)
        self.padded_lengths = tiles[0] * TILE_ROWS, tiles[1] * TILE_ROWS
        self.job_counts = self.b * self.h * tiles[0], self.b * self.hk * tiles[1]
        ea, eb = self.allocate_units(paired)
        peaks = self.allocate_buffer(self.job_counts[0]), self.allocate_buffer(self.job_counts[1])
        self.inputs = ExactArrays(*self.inputs, self.v, ea, eb, *peaks, when)
        self.launch_rows(prepare_kernel, (a, b, ea, eb, *peaks, when, *moved))

    def allocate_units(self, units: int) -> tuple[Tensor, Tensor]:
        """Return float32 buffers (B, H, units, padded n) and (B, Hₖ, units, padded m)."""
        n, m = self.padded_lengths
        return self.allocate_buffer(self.b, self.h, units, n), self.allocate_buffer(
            self.b, self.hk, units, m
        )

    def choose_tile(self, name: str, rows: int) -> Tile:
        return Tile(TILE_ROWS, TILE_ROWS, 1, 8, 1)

    def split_loop(self, programs: int, rows: int, block: int, waves: int) -> tuple[int, int]:
        return 1, -(-rows // block)

    def launch_rows(self, kernel: Any, arrays: tuple[Tensor | None, ...]) -> None:
        facts = {"W": self.w, "PAIRED": self.w + self.w % 2, "BLOCK": TILE_ROWS, "BLOCK_H": 32}
        whole = (self.job_counts[0], self.n, self.m, *self.padded_lengths)
        launch.launch_kernel(kernel, sum(self.job_counts), arrays, (), whole, facts, ROW_TILE)


def launch_forward(call: ExactKernelCall, out: Tensor, lse: Tensor, kept: Tensor) -> None:
    """Fill the results of `forward.attend_forward`."""
    if lse.numel() and call.m:
        forward.launch_pool(call, out, lse, kept)
    else:
        out.zero_(), lse.fill_(-torch.inf), kept.zero_()


def launch_backward(
    call: ExactKernelCall, grad: Tensor, centre: Tensor, kept: Tensor, places: tuple[Tensor, ...],
    others: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Fill `places` (da, db and dvalue, contiguous); return dv.

    `centre` is `backward.compute_centre`. If `when` holds 0 on the device, nothing is filled, and
    dv is the sum of `others` (…, h).
    """
    da, db, dvalue = places
    if not (grad.numel() and call.m):
        for x in places:
            x.zero_()
        return torch.zeros_like(call.v)
    slopes = call.allocate_units(call.w)
    along = backward.units_backward(call, grad, centre, kept, slopes, dvalue)
    parts = call.allocate_buffer(call.job_counts[0], call.w)
    call.launch_rows(finish_kernel, (slopes[0], along, slopes[1], call.v, call.when, da, db, parts))
    dv = torch.empty_like(call.v)
    fold_parts(parts, others, call.when, dv)
    return dv


def fold_parts(parts: Tensor, others: Tensor | None, when: Tensor | None, total: Tensor) -> None:
    """Fill `total` with the sum of the parts (…, its length): see `fold_kernel`."""
    whole = (parts.shape[0], 0 if others is None else others.shape[0])
    facts, arrays = {"W": total.numel(), "BLOCK": 512, "UNITS": 8}, (parts, others, when, total)
    launch.launch_kernel(fold_kernel, -(-total.numel() // 8), arrays, (), whole, facts, ROW_TILE)
