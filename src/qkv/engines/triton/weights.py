"""The weights αᵢⱼ = exp(scale · qᵢ·kⱼ − lseᵢ) per head, or their mean, in one pass over the pairs.

The log-sum-exp comes from the kernel that computed the output. For the mean, no n × m matrix of a
single head is written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.backward import backward
from qkv.engines.triton.launching import tile_choice
from qkv.engines.triton.launching.kernel_call import KernelCall, Numbers
from qkv.engines.triton.launching.launch_replay import replay_launches
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.tile_functions.program import (
    compute_product,
    compute_tile_scores,
    load_mask_tile,
    load_query_tile,
    locate_keys,
)
from qkv.engines.triton.tile_functions.records import Arrays
from qkv.engines.triton.tile_functions.score_tile import (
    SavedRows,
    load_row_statistics,
    tile_weights,
)
from qkv.engines.triton.tile_functions.tiles import jit_kernel

TILE = Tile(64, 64, 64, 4, 3)
BASE_CONSTEXPRS = dict.fromkeys(("WIDE", "PACKED", "TMA", "CENTRED", "QUICK"), False)


@jit_kernel
def weights_kernel(given, lse, out, scales, steps, z, F: tl.constexpr):
    """Write a tile of the weights of each head of a batch, or of their mean."""
    batch = tl.program_id(2)
    t = tl.program_id(0)
    col = (t * F.COLS + tl.arange(0, F.COLS))[None, :]
    total = tl.zeros((F.ROWS, F.COLS), tl.float32)
    row = (tl.program_id(1) * F.ROWS + tl.arange(0, F.ROWS))[:, None]
    within = row < z.n
    if F.CUT:  # without this condition, a store writes 16 bytes at a time
        within = within & (col < z.m)
    # 32-bit offsets from one 64-bit pointer: 64-bit offsets need so many registers that only two
    # programs share a processor.
    first = tl.program_id(1) * F.ROWS * tl.cast(steps.o_n, tl.int64) + t * F.COLS
    out += tl.cast(batch, tl.int64) * steps.o_b + first
    near = tl.arange(0, F.ROWS)[:, None] * steps.o_n + tl.arange(0, F.COLS)[None, :]
    for head in range(z.heads):
        lane = batch * z.heads + head
        rows, spot = load_query_tile(given, steps, tl.program_id(1), lane, z, F)
        keys = locate_keys(given, None, 0, steps, spot.batch, spot.shared, z, F)
        top, share, _ = load_row_statistics(SavedRows(None, None, lse, None), spot.line, F)
        start, j, here, live, extra = load_mask_tile(t, rows, keys, scales.times, z, F, True)
        x, _ = compute_product(rows, keys, start, here, F)
        s, _, _ = compute_tile_scores(x, rows, keys, start, here, scales, F.BASE, F)
        if F.PAIRS == 2:
            s += extra
        alpha, _ = tile_weights(
            s, j, live, top[:, None], share[:, None], rows.row_a, rows.row_b, scales.alpha, F, True
        )
        if F.MEAN:
            total += alpha
        else:
            to = out + head * tl.cast(steps.o_h, tl.int64)
            tl.store(to + near, alpha.to(out.dtype.element_ty), mask=within)
    if F.MEAN:
        tl.store(out + near, (total * scales.share).to(out.dtype.element_ty), mask=within)


def compute_weights(
    query: Tensor, key: Tensor, lse: Tensor, scale: float, upper: int | None, mean: bool,
    pairs: Tensor | None = None, times: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return the weights (B, H, n, m), or with `mean` their mean over heads (B, n, m).

    query (B, H, n, d), key (B, Hₖ, m, d), lse (B, H, n). With `upper`, the pair i, j counts if
    j − i ≤ upper; `pairs` is that of `attend_operator`. `lse` must be the log-sum-exp of these
    scores, because the gradient includes the part that goes through the log-sum-exp.
    """
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    given = (query, key, lse.float().contiguous(), pairs, scale, upper, times, mean)
    learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    found: Tensor = (_WeightsFunction.apply if learns else _launch_weights)(*given)
    return found.squeeze(1) if mean else found


def _build_call(
    query: Tensor, key: Tensor, lse: Tensor, pairs: Tensor | None, scale: float,
    upper: int | None, times: float, mean: bool,
) -> KernelCall:  # fmt: skip
    arrays, numbers = Arrays(query, key, key, pairs=pairs), Numbers(scale, upper=upper, times=times)
    call = KernelCall(*arrays, *numbers)
    call.scales = call.scales._replace(share=1 / call.h if mean else 1.0)
    return call


@replay_launches
def _launch_weights(*given: Any) -> Tensor:
    call, lse, mean = _build_call(*given), given[2], given[-1]
    out = call.query.new_empty((call.b, 1 if mean else call.h, call.n, call.m))
    wide = max(tile_choice.next_power_of_2(call.w), 16)
    own = {"MEAN": mean, "BLOCK_W": wide, "BLOCK_D": wide, "ALONG": True}
    call.constexprs = call.constexprs | BASE_CONSTEXPRS | own

    def run_tile(tile: Tile) -> None:
        facts = {"ROWS": tile.rows, "COLS": tile.cols, "CUT": call.m % tile.cols != 0}
        grid = -(-call.m // tile.cols), -(-call.n // tile.rows), call.b
        call.launch_kernel(
            weights_kernel,
            grid,
            (lse, out),
            out,
            (call.build_sizes(),),
            call.constexprs | facts,
            tile,
        )

    call.run_with_fitting_tile("weigh_pairs", TILE, run_tile)
    return out


@replay_launches
def _launch_weights_backward(*given: Any) -> tuple[Tensor, Tensor]:
    *arguments, along = given
    return backward.weights_backward(_build_call(*arguments), along, given[2])


class _WeightsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        ctx.save_for_backward(*given[:4])
        ctx.numbers = given[4:]
        found: Tensor = _launch_weights(*given)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, along: Tensor) -> tuple[Any, ...]:
        dquery, dkey = _launch_weights_backward(*ctx.saved_tensors, *ctx.numbers, along)
        return dquery, dkey, *(None,) * 6
