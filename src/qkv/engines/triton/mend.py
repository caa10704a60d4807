"""Rows that another kernel spoiled, multiplying what a causal mask rules out by 0, done over."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton import launch
from qkv.engines.triton.arguments import Arguments, Numbers
from qkv.engines.triton.forward import finish, nothing, pool_tiles, put
from qkv.engines.triton.kept import by_launches
from qkv.engines.triton.launch import Tile
from qkv.engines.triton.operators import operator
from qkv.engines.triton.place import keys_of, place
from qkv.engines.triton.records import Arrays
from qkv.engines.triton.tiles import bounds, fetch, finite, launched, wait
from qkv.engines.triton.to_queries import queries_tiles
from qkv.engines.triton.weigh import Back, kept_of, left_over
from qkv.errors import ArgumentError

PLAIN = dict.fromkeys(("SPLIT", "PACKED", "TMA", "FOLD", "CENTRED", "CENTRE"), False) | {"EVEN": 1}


@triton.jit
def _head_of(out, parts, steps, z, F):
    """This program's lane, its batch and head, their output, and whether its last row is finite."""
    lane = tl.program_id(0) // parts
    batch = tl.cast(lane // z.heads, tl.int64)
    head = tl.cast(lane % z.heads, tl.int64)
    out += batch * steps.o_b + head * steps.o_h
    column = tl.arange(0, F.BLOCK_D)
    wait(F)
    last = out + (z.n - 1) * tl.cast(steps.o_n, tl.int64)
    x = tl.load(last + column, mask=column < F.D, other=0.0)
    return lane, batch, head, out, tl.max((finite(x) == 0).to(tl.int32), 0) == 0


@launched
def mend(given, out, kept, scales, steps, z, parts, F: tl.constexpr):
    """One head's output over again, if its last row is not finite: softmax over j − i ≤ upper.

    `parts` programs share a head's tiles of rows. There are few programs, so that to look and
    return costs next to nothing; every tile is done with care, so that there is one loop to
    compile. `kept` is as `pool` fills it, if it is given.
    """
    lane, batch, head, out, sound = _head_of(out, parts, steps, z, F)
    if sound:
        return
    keys = keys_of(given, None, 0, steps, batch, head // z.group, z, F)
    value = given.value + batch * steps.v_b + head // z.group * steps.v_h
    lines = tl.cast(tl.num_programs(0) // parts, tl.int64) * z.n
    for tile in tl.range(tl.program_id(0) % parts, (z.n + F.ROWS - 1) // F.ROWS, parts):
        rows, spot = place(given, steps, tile, lane, z, F)
        lo, _, _, hi = bounds(
            spot.first, spot.first + F.ROWS - 1, 0, z.upper, z.m, F.COLS, False, True
        )
        acc, top, total = pool_tiles(
            nothing(F, F.BLOCK_D), rows, keys, (value, F.D), scales, z, lo, hi, F, True, True
        )
        share = finish(top, total, spot.line, spot.inside, None, kept, lines, F)
        there = spot.row * tl.cast(steps.o_n, tl.int64)
        put(acc, share, out, there, spot.inside, F.D)


@launched
def mend_queries(
    given, out, along, kept, dquery, scales, steps, z, parts,
    a_b, a_h, a_n, a_d, d_b, d_h, d_n, F: tl.constexpr,
):  # fmt: skip
    """The gradient of one head's queries over again, if its last row of output is not finite.

    As `mend`, whose `out` and `kept` this takes; `along` may have any strides.
    """
    lane, batch, head, out, sound = _head_of(out, parts, steps, z, F)
    if sound:
        return
    along += batch * a_b + head * a_h
    dquery += batch * d_b + head * d_h
    keys = keys_of(given, None, 0, steps, batch, head // z.group, z, F)
    back = Back(along, None, kept, tl.cast(tl.num_programs(0) // parts, tl.int64) * z.n)
    column_d = tl.arange(0, F.BLOCK_D)[None, :]
    column_w = tl.arange(0, F.BLOCK_W)[None, :]
    for tile in tl.range(tl.program_id(0) % parts, (z.n + F.ROWS - 1) // F.ROWS, parts):
        rows, spot = place(given, steps, tile, lane, z, F)
        far = spot.row.to(tl.int64)
        here = along + far[:, None] * a_n + column_d * a_d
        do = tl.load(here, mask=column_d < F.D, other=0.0)  # (ROWS, d)
        there = fetch(out, far * steps.o_n, F.D, F.BLOCK_D).to(tl.float32)
        middle = tl.sum(do.to(tl.float32) * there, 1)[:, None]
        top, share, zero = kept_of(back, spot.line, F)
        lo, _, _, hi = bounds(
            spot.first, spot.first + F.ROWS - 1, 0, z.upper, z.m, F.COLS, False, True
        )
        state = (tl.zeros((F.ROWS, F.BLOCK_W), dtype=tl.float32), zero, zero, zero)
        known = (do, top[:, None], share[:, None], middle, do, do)
        dq, _, _, _ = queries_tiles(state, rows, keys, known, scales, z, lo, hi, F, True)
        dq = dq * left_over(scales.scale, F)
        where = dquery + far[:, None] * d_n + column_w
        inside = spot.inside[:, None] & (column_w < F.W)
        tl.store(where, dq.to(dquery.dtype.element_ty), mask=inside)


def _mend(
    call: Arguments, kernel: Any, arrays: tuple[Tensor | None, ...], wide: bool, *strides: int
) -> None:
    """One launch, of a program for each head, or of several where processors are left over.

    The first of the arrays is the output; the strides are those of the others.
    """
    lanes, early = call.b * call.h, launch.copy_engine(call.query.device)

    def run(tile: Tile) -> None:
        tile = tile._replace(early=early)
        tiles = -(-call.n // tile.rows)
        parts = max(min(launch.processors(call.query.device) // lanes, tiles), 1)
        facts = call.facts | PLAIN | {"ROWS": tile.rows, "COLS": tile.cols}
        facts |= {"BLOCK_W": call.block_w(tile, wide), "WIDE": wide, "EARLY": early}
        sizes = (call.sizes(), parts, *strides)
        call.start(kernel, lanes * parts, arrays, arrays[0], sizes, facts, tile)

    call.fitting("mend", call.tile("mend", call.n), run)


def _heal_fake(out: Tensor, query: Tensor, *rest: Any) -> Tensor:
    return query.new_empty((2, *query.shape[:3]), dtype=torch.float32)


@by_launches
def repair(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, kept: Tensor | None = None
) -> None:
    """`heal` of arrays that are known to fit, where no transform looks on."""
    if out.numel() and key.shape[2]:
        call = Arguments(*Arrays(query, key, value), *Numbers(scale, upper=0))
        _mend(call, mend, (out, kept), call.w > launch.HELD)


@operator(_heal_fake, mutates=("out",))
def heal(out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Repair in place the output of a kernel that multiplies what a causal mask rules out by 0.

    out (B, H, n, d), arguments as in `ops`, with softmax and j ≤ i. A value that is not finite
    makes NaN of rows that must not see it. The last row sees every key, so a head is spoiled only
    if its last row is not finite; the other heads are not touched. Without a synchronisation: every
    program looks at its head's last row. That row sees the value by right and does not become
    finite, so a program that comes late finds what an early one found.

    Returns what `heal_backward` needs of the rows of spoiled heads; the rest of it means nothing.
    """
    n, m = query.shape[2], key.shape[2]
    if m > n:
        raise ArgumentError(f"the last of {n} queries must see all keys: pass the first {n} of {m}")
    kept = _heal_fake(out, query)
    repair(out, query, key, value, scale, kept)
    return kept


@operator(lambda *given: None, mutates=("dquery",))
def heal_backward(
    dquery: Tensor, along: Tensor, out: Tensor, kept: Tensor,
    query: Tensor, key: Tensor, value: Tensor, scale: float,
) -> None:  # fmt: skip
    """Repair in place the gradient of the query that such a kernel gives.

    `along` is ∂L/∂out, `out` the healed output and `kept` what `heal` returned. Those of key and
    value are as they should be: the last row sees every key, and its own gradient is not finite.
    Nothing is copied: `along` and `out` may have any strides, but for the last of `out`, 1.
    """
    call = Arguments(*Arrays(query, key, value), *Numbers(scale, upper=0))
    if out.numel() and call.m:
        strides = (*along.stride(), *dquery.stride()[:3])
        _mend(call, mend_queries, (out, along, kept, dquery), False, *strides)
