"""Rows that another kernel spoiled, multiplying what a causal mask rules out by 0, done over."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.triton import launch
from qkv.engines.triton.arguments import Arguments, Arrays, Numbers
from qkv.engines.triton.backward import known, queries_tiles
from qkv.engines.triton.forward import finish, pool_tiles
from qkv.engines.triton.launch import Launch, Tile
from qkv.engines.triton.operators import operator, watched
from qkv.engines.triton.ops import check
from qkv.engines.triton.score import left_over
from qkv.engines.triton.tiles import NONE, bounds, fetch, finite, launched
from qkv.errors import ArgumentError


@triton.jit
def sound(last, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Whether this row is finite."""
    column = tl.arange(0, BLOCK_D)
    x = tl.load(last + column, mask=column < D, other=0.0)
    return tl.max((finite(x) == 0).to(tl.int32), 0) == 0


@launched
def mend(
    query, key, value, out, kept, scale,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n,
    n, m, heads, group, upper, parts,
    W: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """One head's output over again, if its last row is not finite: softmax over j − i ≤ upper.

    `parts` programs share a head's tiles of rows. There are few programs, so that to look and
    return costs next to nothing; every tile is done with care, so that there is one loop to
    compile. `kept` is as `pool` fills it, if it is given.
    """
    pid = tl.program_id(0)
    lane = tl.cast(pid // parts, tl.int64)
    batch = lane // heads
    head = lane % heads
    out += batch * o_b + head * o_h
    if sound(out + (n - 1) * tl.cast(o_n, tl.int64), D, BLOCK_D):
        return
    query += batch * q_b + head * q_h
    k_m = tl.cast(k_m, tl.int64)
    v_m = tl.cast(v_m, tl.int64)
    key += batch * k_b + head // group * k_h
    value += batch * v_b + head // group * v_h
    keys = (key, k_m, value, v_m, None, None, None)
    mask = (n, m, m, 0, upper, None, 0, 0, None, 0)
    lines = tl.cast(tl.num_programs(0) // parts, tl.int64) * n
    for tile in tl.range(pid % parts, (n + ROWS - 1) // ROWS, parts):
        first = tile * ROWS
        r = first + tl.arange(0, ROWS)
        inside = r < n
        r = tl.minimum(r, n - 1)
        base = query + first * tl.cast(q_n, tl.int64)
        offset = (r - first) * q_n
        i = r[:, None]
        q = i
        if not WIDE:
            q = fetch(base, offset, W, BLOCK_W)
        lo, _, _, hi = bounds(first, first + ROWS - 1, 0, upper, m, COLS, False, True)
        state = (
            tl.zeros((ROWS, BLOCK_D), dtype=tl.float32),
            tl.full((ROWS,), NONE, dtype=tl.float32),
            tl.zeros((ROWS,), dtype=tl.float32),
        )
        acc, top, total = pool_tiles(
            state, (q, base, offset, i, i, i, i, i, i), keys, mask, (scale, 0.0, 0.0, 0, 0.0),
            lo, hi, COLS, WIDE, True, True, False,
            "softmax", 0, False, False, False, False, True, False,
            W, D, BLOCK_W, BLOCK_D, False, "ieee", False, 0, False,
        )  # fmt: skip
        finish(
            acc, top, total, lane * n + r, r * tl.cast(o_n, tl.int64), inside, out, None, kept,
            lines, D, BLOCK_D, "softmax", APART,
        )  # fmt: skip


@launched
def mend_queries(
    query, key, value, out, along, kept, dquery, scale,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, o_b, o_h, o_n,
    a_b, a_h, a_n, a_d, d_b, d_h, d_n,
    n, m, heads, group, upper, parts,
    W: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The gradient of one head's queries over again, if its last row of output is not finite.

    As `mend`, whose `out` and `kept` this takes; `along` may have any strides.
    """
    pid = tl.program_id(0)
    lane = tl.cast(pid // parts, tl.int64)
    batch = lane // heads
    head = lane % heads
    out += batch * o_b + head * o_h
    if sound(out + (n - 1) * tl.cast(o_n, tl.int64), D, BLOCK_D):
        return
    query += batch * q_b + head * q_h
    along += batch * a_b + head * a_h
    dquery += batch * d_b + head * d_h
    k_m = tl.cast(k_m, tl.int64)
    v_m = tl.cast(v_m, tl.int64)
    key += batch * k_b + head // group * k_h
    value += batch * v_b + head // group * v_h
    keys = (key, k_m, value, v_m, None, None, None)
    mask = (n, m, m, 0, upper, None, 0, 0, None, 0)
    lines = tl.cast(tl.num_programs(0) // parts, tl.int64) * n
    column_d = tl.arange(0, BLOCK_D)[None, :]
    column_w = tl.arange(0, BLOCK_W)[None, :]
    for tile in tl.range(pid % parts, (n + ROWS - 1) // ROWS, parts):
        first = tile * ROWS
        r = first + tl.arange(0, ROWS)
        inside = r < n
        r = tl.minimum(r, n - 1)
        far = r.to(tl.int64)
        q = fetch(query, far * q_n, W, BLOCK_W)
        here = along + far[:, None] * a_n + column_d * a_d
        do = tl.load(here, mask=column_d < D, other=0.0)
        there = fetch(out, far * o_n, D, BLOCK_D).to(tl.float32)
        middle = tl.sum(do.to(tl.float32) * there, 1)
        top, share, zero, _, _, _ = known(
            kept, None, None, None, None, lane * n + far, lines,
            "softmax", False, APART, False, False,
        )  # fmt: skip
        i = r[:, None]
        rows = (
            q, query, far, i, do, top[:, None], share[:, None], middle[:, None], i, i, i,
            i, i,
        )  # fmt: skip
        lo, _, _, hi = bounds(first, first + ROWS - 1, 0, upper, m, COLS, False, True)
        state = (tl.zeros((ROWS, BLOCK_W), dtype=tl.float32), zero, zero)
        dq, _, _ = queries_tiles(
            state, rows, keys, mask, (scale, 0.0, 0.0, 0, 0.0), lo, hi, COLS, False, True, False,
            "softmax", 0, False, False, False, True, False,
            W, D, BLOCK_W, BLOCK_D, APART, False, "ieee", False, 0, False,
        )  # fmt: skip
        dq = dq * left_over(scale, "softmax", False, False)
        where = dquery + far[:, None] * d_n + column_w
        tl.store(where, dq.to(dquery.dtype.element_ty), mask=inside[:, None] & (column_w < W))


def _healing(query: Tensor, key: Tensor, value: Tensor, scale: float, upper: int) -> Arguments:
    return Arguments(*Arrays(query, key, value), *Numbers(scale, upper=upper))


def _mend(
    call: Arguments,
    kernel: Any,
    arrays: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
    wide: bool,
    facts: dict[str, Any],
) -> Launch | None:
    """One launch, of a program for each head, or of several where processors are left over."""
    lanes = call.b * call.h

    def run(tile: Tile) -> Launch | None:
        tiles = -(-call.n // tile.rows)
        parts = max(min(launch.processors(call.query.device) // lanes, tiles), 1)
        known = {name: call.facts[name] for name in ("W", "D", "BLOCK_D", "APART")} | {
            "BLOCK_W": call.block_w(tile, wide),
            "ROWS": tile.rows,
            "COLS": tile.cols,
        }
        whole = (
            *call.strides[:9], *strides, call.n, call.m, call.h, call.group, call.upper, parts,
        )  # fmt: skip
        floats = call.floats[:1]
        return launch.start(kernel, lanes * parts, arrays, floats, whole, known | facts, tile)

    return call.fitting("mend", call.n, run)


def _heal_fake(out: Tensor, query: Tensor, *rest: Any) -> Tensor:
    return query.new_empty((2, *query.shape[:3]), dtype=torch.float32)


@operator(_heal_fake, mutates=("out",))
def _heal(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, upper: int
) -> Tensor:
    kept = query.new_empty((2, *query.shape[:3]), dtype=torch.float32)
    _repair(out, query, key, value, kept, scale, upper)
    return kept


def _repair(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Tensor | None,
    scale: float,
    upper: int,
) -> None:
    if not (out.numel() and key.shape[2]):
        return
    arrays = (query, key, value, out, kept)
    about = (mend, *launch.kinds(*arrays[:4]), kept is None, upper)
    made = launch.MADE.get(about)
    if made is None or not made.again(arrays, Numbers(scale).floats[:1]):
        call = _healing(query, key, value, scale, upper)
        wide = call.w > launch.HELD
        given = (*call.inputs[:3], out, kept)
        made = _mend(call, mend, given, out.stride()[:3], wide, {"WIDE": wide})
        launch.keep(about, None if call.copied else made)


def repair(out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
    """`heal` for no gradient, of arrays that are known to fit and to be causal."""
    if watched():
        heal(out, query, key, value, scale)
    else:
        _repair(out, query, key, value, None, scale, 0)


def heal(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, upper: int = 0
) -> Tensor:
    """Repair in place the output of a kernel that multiplies what a causal mask rules out by 0.

    out (B, H, n, d), arguments as in `attend`, with softmax and j − i ≤ upper. A value that is
    not finite makes NaN of rows that must not see it. The last row sees every key, so a head is
    spoiled only if its last row is not finite; the other heads are not touched. Without a
    synchronisation: every program looks at its head's last row. That row sees the value by right
    and does not become finite, so a program that comes late finds what an early one found.

    Returns what `heal_backward` needs of the rows of spoiled heads; the rest of it means nothing.
    """
    if key.shape[2] > query.shape[2] + upper:
        raise ArgumentError(
            f"the last of {query.shape[2]} queries must see all keys: pass the first "
            f"{query.shape[2] + upper} of {key.shape[2]}"
        )
    check(query, key, value, "softmax", 0.0)
    kept: Tensor = _heal(out, query, key, value, scale, upper)
    return kept


@operator(lambda *given: None, mutates=("dquery",))
def heal_backward(
    dquery: Tensor,
    along: Tensor,
    out: Tensor,
    kept: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    upper: int = 0,
) -> None:
    """Repair in place the gradient of the query that such a kernel gives.

    `along` is ∂L/∂out, `out` the healed output and `kept` what `heal` returned. Those of key and
    value are as they should be: the last row sees every key, and its own gradient is not finite.
    Nothing is copied: `along` and `out` may have any strides, but for the last of `out`, 1.
    """
    call = _healing(query, key, value, scale, upper)
    if not (out.numel() and call.m):
        return
    arrays = (call.query, call.key, call.value, out, along, kept, dquery)
    strides = (*out.stride()[:3], *along.stride(), *dquery.stride()[:3])
    _mend(call, mend_queries, arrays, strides, False, {})
