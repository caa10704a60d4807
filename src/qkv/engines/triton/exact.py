"""Softmax of s = Σ_h v_h tanh(a_h + b_h), by the kernels of `tanh`: no n × m array."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.engines.triton import launch, tanh

BLOCK = 64
"""Queries or keys of a tile."""
BUSY = launch.Tile(BLOCK, BLOCK, 1, 8, 1)
"""Warps and stages of the kernels that look at pairs, and of the others."""
PLAIN = launch.Tile(BLOCK, 1, 1, 4, 3)
OPEN = 2**30
"""The bound of a band that has none."""
WAITING = 264
"""Programs, at most, of a kernel that may find nothing to do: two for each of 132 processors."""


class Asked(NamedTuple):
    """a (B, H, n, h), b (B, Hₖ, m, h), v (h,), value (B, Hₖ, m, d). The pair i, j counts if
    lower ≤ j − i ≤ upper and j < lengths[batch]. Where `when` (1,) int32 holds 0, nothing is done.
    """

    a: Tensor
    b: Tensor
    v: Tensor
    value: Tensor
    lower: int | None = None
    upper: int | None = None
    lengths: Tensor | None = None
    when: Tensor | None = None


class _Call:
    """What the kernels of one call share."""

    def __init__(self, given: Asked) -> None:
        a, b, v, value = (x.contiguous() for x in given[:4])
        lower, upper, lengths, when = given[4:]
        self.v, self.when = v, when
        _, heads, n, self.h = a.shape
        few, m = b.shape[1:3]
        on_device = a.is_cuda and not launch.interpreted()
        self.paired = self.h + self.h % 2
        (ea, peak_a), (eb, peak_b) = self.room(a), self.room(b)
        self.queries, self.keys = ea, eb
        self.query_tiles, self.key_tiles = peak_a.numel(), peak_b.numel()
        self.inputs = tanh.Inputs(
            ea, eb, peak_a, peak_b, a, b, v, value,
            None if lengths is None else lengths.to(torch.int32), when,
        )  # fmt: skip
        self.sizes = (
            heads, heads // few, n, m, ea.shape[-1], eb.shape[-1], self.h, value.shape[-1],
            -OPEN if lower is None else max(lower, -OPEN),
            OPEN if upper is None else min(upper, OPEN),
        )  # fmt: skip
        self.facts: dict[str, Any] = {
            "PAIRED": self.paired,
            "ASM": on_device and torch.version.hip is None,
            "PRECISION": "tf32x3" if on_device else "ieee",
            "LOWER": True,
            "UPPER": True,
            "LAYOUT": False,
            "BLOCK": BLOCK,
            "BLOCK_H": launch.power_of_2(self.h),
            "BLOCK_D": max(launch.power_of_2(value.shape[-1]), 16),
        }
        arrays = (a, b, ea, eb, peak_a, peak_b, when)
        self.each_row(tanh.prepare, arrays, (n, m, ea.shape[-1], eb.shape[-1], self.h))

    def room(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For e²ˣ (B, H, paired, padded rows) in float32, and the largest |x| of each tile."""
        *lead, rows, _ = x.shape
        padded = -(-rows // BLOCK) * BLOCK
        ex = x.new_empty((*lead, self.paired, padded), dtype=torch.float32)
        return ex, x.new_empty((*lead, padded // BLOCK), dtype=torch.float32)

    def programs(self, jobs: int) -> int:
        """One for each job; few that share them where it is likely that there is nothing to do."""
        return jobs if self.when is None else min(jobs, WAITING)

    def each_pair(self, kernel: Any, arrays: tuple[Tensor | None, ...], jobs: int) -> None:
        whole = (*self.sizes, jobs)
        given = (self.inputs, *arrays)
        launch.start(kernel, self.programs(jobs), given, (), whole, self.facts, BUSY)

    def each_row(
        self, kernel: Any, arrays: tuple[Tensor | None, ...], sizes: tuple[int, ...]
    ) -> None:
        jobs = self.query_tiles + self.key_tiles
        facts = {"PAIRED": self.paired, "BLOCK": BLOCK, "BLOCK_H": 32}
        whole = (self.query_tiles, jobs, *sizes)
        launch.start(kernel, self.programs(jobs), arrays, (), whole, facts, PLAIN)


def forward(given: Asked, out: Tensor, lse: Tensor) -> None:
    """Fill `out` (B, H, n, d) and the log-sum-exp `lse` (B, H, n)."""
    if lse.numel():
        call = _Call(given)
        call.each_pair(tanh.forward, (out, lse), call.query_tiles)


def backward(
    given: Asked,
    grad: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    places: tuple[Tensor, ...],
    others: Tensor | None = None,
) -> None:
    """Fill da, db, dv and dvalue, contiguous and shaped as their arrays.

    Where `when` holds 0, dv is the sum of the others (…, h), and nothing else is filled.
    """
    da, db, dv, dvalue = places
    if not (lse.numel() and given.b.numel()):
        for x in places:
            x.zero_()
        return
    call = _Call(given)
    known = (out, lse, grad.contiguous(), None if grad_lse is None else grad_lse.contiguous())
    slopes_a, ones, slopes_b = (
        torch.empty_like(x) for x in (call.queries, call.queries, call.keys)
    )
    sums = ones.new_empty((*given.a.shape[:2], ones.shape[-1]))
    parts = ones.new_empty((call.query_tiles, call.h))
    call.each_pair(tanh.query_grad, (*known, slopes_a, ones, sums), call.query_tiles)
    call.each_pair(tanh.key_grad, (*known, slopes_b, dvalue), call.key_tiles)
    arrays = (slopes_a, ones, sums, slopes_b, call.v, given.when, da, db, parts)
    sizes = (given.a.shape[2], given.b.shape[2], ones.shape[-1], slopes_b.shape[-1], call.h)
    call.each_row(tanh.finish, arrays, sizes)
    whole = (call.query_tiles, 0 if others is None else others.shape[0], call.h)
    facts, folded = {"BLOCK": 512, "UNITS": 8}, (parts, others, given.when, dv)
    launch.start(tanh.fold, -(-call.h // 8), folded, (), whole, facts, PLAIN)
