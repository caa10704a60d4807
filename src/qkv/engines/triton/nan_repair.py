"""Recompute output rows of PyTorch's kernel that are NaN because of a masked NaN or ∞.

Under a causal mask, PyTorch's kernel multiplies masked values by 0, and 0 · NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton.backward.backward_queries import accumulate_query_gradients
from qkv.engines.triton.forward.forward import empty_state, finish_rows, pool_tiles, store_rows
from qkv.engines.triton.launching import launch, tile_choice
from qkv.engines.triton.launching.kernel_call import KernelCall, Numbers
from qkv.engines.triton.launching.launch_replay import replay_launches
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.launching.torch_operator import register_operator
from qkv.engines.triton.tile_functions.distance import start_doubts
from qkv.engines.triton.tile_functions.program import load_query_tile, locate_keys
from qkv.engines.triton.tile_functions.records import Arrays
from qkv.engines.triton.tile_functions.score_tile import (
    SavedRows,
    load_row_statistics,
    remaining_scale,
)
from qkv.engines.triton.tile_functions.tiles import (
    is_finite,
    jit_kernel,
    load_rows,
    visible_tiles,
    wait_for_previous_launch,
)
from qkv.errors import ArgumentError

BASE_CONSTEXPRS = dict.fromkeys(("SPLIT", "PACKED", "TMA", "FOLD", "CENTRED"), False) | {
    "CENTRE": 0,
    "EVEN": 1,
}


@triton.jit
def _locate_head(out, parts, steps, z, F):
    """Return this program's lane, batch, head and output, and whether its last row is finite."""
    lane = tl.program_id(0) // parts
    batch = tl.cast(lane // z.heads, tl.int64)
    head = tl.cast(lane % z.heads, tl.int64)
    out += batch * steps.o_b + head * steps.o_h
    column = tl.arange(0, F.BLOCK_D)
    wait_for_previous_launch(F)
    last = out + (z.n - 1) * tl.cast(steps.o_n, tl.int64)
    x = tl.load(last + column, mask=column < F.D, other=0.0)
    return lane, batch, head, out, tl.max((is_finite(x) == 0).to(tl.int32), 0) == 0


@jit_kernel
def repair_kernel(given, out, kept, scales, steps, z, parts, F: tl.constexpr):
    """Recompute one head's output if its last row is not finite: softmax over j − i ≤ upper.

    `parts` programs share a head's row tiles. There are few programs, so the check costs almost
    nothing. Every tile is NaN-safe, so there is one loop to compile. `kept` may be None; it is
    filled as by `pool_kernel`.
    """
    lane, batch, head, out, sound = _locate_head(out, parts, steps, z, F)
    if sound:
        return
    keys = locate_keys(given, None, 0, steps, batch, head // z.group, z, F)
    value = given.value + batch * steps.v_b + head // z.group * steps.v_h
    lines = tl.cast(tl.num_programs(0) // parts, tl.int64) * z.n
    for tile in tl.range(tl.program_id(0) % parts, (z.n + F.ROWS - 1) // F.ROWS, parts):
        rows, spot = load_query_tile(given, steps, tile, lane, z, F)
        lo, _, _, hi = visible_tiles(
            spot.first, spot.first + F.ROWS - 1, 0, z.upper, z.m, F.COLS, False, True
        )
        acc, top, total, _ = pool_tiles(
            empty_state(F, F.BLOCK_D), rows, keys, (value, F.D), scales, z, lo, hi, F, True, True
        )
        share = finish_rows(top, total, spot.line, spot.inside, None, kept, lines, F)
        there = spot.row * tl.cast(steps.o_n, tl.int64)
        store_rows(acc, share, out, there, spot.inside, F.D)


@jit_kernel
def repair_queries_kernel(
    given, out, along, kept, dquery, scales, steps, z, parts,
    a_b, a_h, a_n, a_d, d_b, d_h, d_n, F: tl.constexpr,
):  # fmt: skip
    """Recompute the gradient of one head's queries if the last row of its output is not finite.

    It takes `out` and `kept` of `repair_kernel`; `along` may have any strides.
    """
    lane, batch, head, out, sound = _locate_head(out, parts, steps, z, F)
    if sound:
        return
    along += batch * a_b + head * a_h
    dquery += batch * d_b + head * d_h
    keys = locate_keys(given, None, 0, steps, batch, head // z.group, z, F)
    back = SavedRows(along, None, kept, tl.cast(tl.num_programs(0) // parts, tl.int64) * z.n)
    column_d = tl.arange(0, F.BLOCK_D)[None, :]
    column_w = tl.arange(0, F.BLOCK_W)[None, :]
    for tile in tl.range(tl.program_id(0) % parts, (z.n + F.ROWS - 1) // F.ROWS, parts):
        rows, spot = load_query_tile(given, steps, tile, lane, z, F)
        far = spot.row.to(tl.int64)
        here = along + far[:, None] * a_n + column_d * a_d
        do = tl.load(here, mask=column_d < F.D, other=0.0)  # (ROWS, d)
        there = load_rows(out, far * steps.o_n, F.D, F.BLOCK_D).to(tl.float32)
        middle = tl.sum(do.to(tl.float32) * there, 1)[:, None]
        top, share, zero = load_row_statistics(back, spot.line, F)
        lo, _, _, hi = visible_tiles(
            spot.first, spot.first + F.ROWS - 1, 0, z.upper, z.m, F.COLS, False, True
        )
        none = start_doubts(F.ROWS, F)
        state = (tl.zeros((F.ROWS, F.BLOCK_W), dtype=tl.float32), zero, zero, zero, none)
        known = (do, top[:, None], share[:, None], middle, do, do)
        dq, _, _, _, _ = accumulate_query_gradients(
            state, rows, keys, known, scales, z, lo, hi, F, True
        )
        dq = dq * remaining_scale(scales.scale, F)
        where = dquery + far[:, None] * d_n + column_w
        inside = spot.inside[:, None] & (column_w < F.W)
        tl.store(where, dq.to(dquery.dtype.element_ty), mask=inside)


def _launch_repair(
    call: KernelCall, kernel: Any, arrays: tuple[Tensor | None, ...], wide: bool, *strides: int
) -> None:
    """Launch a repair kernel with one program per head, or several if processors are free.

    The first array is the output; `strides` are those of the others.
    """
    lanes, early = call.b * call.h, launch.has_tma(call.query.device)

    def run_tile(tile: Tile) -> None:
        tile = tile._replace(early=early)
        tiles = -(-call.n // tile.rows)
        parts = max(min(launch.count_processors(call.query.device) // lanes, tiles), 1)
        facts = call.constexprs | BASE_CONSTEXPRS | {"ROWS": tile.rows, "COLS": tile.cols}
        facts |= {"BLOCK_W": call.product_block_width(tile, wide), "WIDE": wide, "EARLY": early}
        sizes = (call.build_sizes(), parts, *strides)
        call.launch_kernel(kernel, lanes * parts, arrays, arrays[0], sizes, facts, tile)

    call.run_with_fitting_tile("repair", call.choose_tile("repair", call.n), run_tile)


def _fake_repair(out: Tensor, query: Tensor, *rest: Any) -> Tensor:
    return query.new_empty((2, *query.shape[:3]), dtype=torch.float32)


@replay_launches
def repair_in_place(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, kept: Tensor | None = None
) -> None:
    """Repair the output in place, without checks and outside of transforms: see `repair_output`."""
    if out.numel() and key.shape[2]:
        call = KernelCall(*Arrays(query, key, value), *Numbers(scale, upper=0))
        _launch_repair(
            call, repair_kernel, (out, kept), call.w > tile_choice.MAX_FORWARD_TILE_WIDTH
        )


@register_operator(_fake_repair, mutates=("out",))
def repair_output(out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Repair in place the output of a kernel that multiplies causally masked values by 0.

    out (B, H, n, d), arguments as in `attend_operator`, with softmax and j ≤ i. A value that is not
    finite turns rows that must not see it into NaN. The last row sees every key, so a head needs a
    repair only if its last row is not finite. Other heads are not written.

    Programs need no synchronization: each checks its head's last row. That row sees the value and
    stays not finite after the repair, so late and early programs agree.

    Return `kept` for `repair_query_gradient`; only the rows of repaired heads are filled.
    """
    n, m = query.shape[2], key.shape[2]
    if m > n:
        raise ArgumentError(
            f"{m} keys for {n} queries, but the last query must see all keys: pass {n} keys"
        )
    kept = _fake_repair(out, query)
    repair_in_place(out, query, key, value, scale, kept)
    return kept


@register_operator(lambda *given: None, mutates=("dquery",))
def repair_query_gradient(
    dquery: Tensor, along: Tensor, out: Tensor, kept: Tensor,
    query: Tensor, key: Tensor, value: Tensor, scale: float,
) -> None:  # fmt: skip
    """Repair in place the gradient of the query from the kernel that `repair_output` describes.

    `along` is ∂L/∂out, `out` the repaired output and `kept` the result of `repair_output`. The
    gradients of key and value need no repair: the last row sees every key, so they are not finite
    anyway. Nothing is copied: `along` and `out` may have any strides, except that the last stride
    of `out` is 1.
    """
    call = KernelCall(*Arrays(query, key, value), *Numbers(scale, upper=0))
    if out.numel() and call.m:
        strides = (*along.stride(), *dquery.stride()[:3])
        _launch_repair(call, repair_queries_kernel, (out, along, kept, dquery), False, *strides)
