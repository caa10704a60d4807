"""Which kernels of `search` are launched for what a sparse weighting must know of its rows, how."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.engines.triton import launch, rooms, support
from qkv.engines.triton.arguments import GIVEN, Arguments, Numbers, rounded
from qkv.engines.triton.kept import by_launches
from qkv.engines.triton.launch import Tile
from qkv.engines.triton.operators import operator
from qkv.engines.triton.records import ARRAYS, Arrays
from qkv.engines.triton.search import NOWHERE, entmax_kernel, topk_kernel
from qkv.engines.triton.support import SHARED


def _tile(query: Tensor, kernel: Any, phase: int) -> Tile:
    w = query.shape[-1]
    if phase:
        return Tile(SHARED, SHARED, 64, 4, 3, registers=128 if w <= 64 else 168)
    if query.element_size() == 4:
        return Tile(64, 64, 16, 4, 2)
    if w > 128:
        return Tile(128, 64, 64, 8, 2)
    # With no more registers than these, four programs share a processor (three of wide entmax).
    few = w <= 64 or kernel is topk_kernel
    return Tile(64, 64, 64, 4, 3, described=True, registers=128 if few else 168)


def _run(
    kernel: Any, given: Arrays, numbers: Numbers, outs: tuple[Tensor | None, ...], *whole: int,
    phase: int = 0,
) -> None:  # fmt: skip
    """Launch with the largest tile that the device holds."""
    call = Arguments(*given, *numbers)
    sizes = call.sizes(at_columns=0 if outs[-1] is None else outs[-1].shape[-1])
    # A product in float32 is written out as one instruction for each of its terms, in each loop
    # over the keys: the compiler takes long over a whole width. The order of the sum is the same.
    wide = call.w > launch.HELD or call.query.dtype == torch.float32
    listed = phase if phase == 2 else 0
    call.facts = call.facts | {"WIDE": wide, "PHASE": phase, "LISTED": listed, "MANY": 1}
    call.facts |= {"SPLIT": False, "PACKED": False}

    def run(tile: Tile) -> None:
        known = call.facts | {
            "ROWS": tile.rows,
            "COLS": tile.cols,
            "TMA": tile.described and call.described,
            "BLOCK_W": tile.chunk if wide else max(16, launch.power_of_2(call.w)),
        }
        programs = call.b * call.h * -(-call.n // tile.rows)
        call.start(kernel, programs, outs, None, (sizes, *whole), known, tile)

    call.fitting(kernel.__name__, _tile(call.query, kernel, phase), run)


def _room(query: Tensor, key: Tensor, weighting: str, listed: bool) -> tuple[Tensor, ...]:
    """For the results of `found`, and the bits of queries from which lists are made."""
    rows, none = query.shape[:3], query.new_empty((0,), dtype=torch.int32)
    row_a = rooms.new(query, rows)
    row_b = none if weighting == "entmax" else rooms.new(query, rows, torch.int32)
    if not listed:
        return row_a, row_b, none.clone(), none.clone(), none
    marks, across = support.bits(query, key)
    at = support.places(query, key.shape[2], support.tiles(query.shape[2]))
    return row_a, row_b, at, across, marks


def _fake(query: Tensor, key: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    numbers = Numbers(*rest[ARRAYS - 2 : -1])
    return _room(query, key, numbers.weighting, rest[-1])[:4]


@operator(_fake, schema=f"({GIVEN}, bool listed) -> (Tensor, Tensor, Tensor, Tensor)")
@by_launches
def found(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`row_a` and `row_b` of `ops.pooled`, whose arguments these are, without a gradient; then
    `lists` and `marks` of `support`, if they are to be `listed`, or else empty.

    query (B, H, n, w), key (B, Hₖ, m, w) → (B, H, n). For entmax, alpha is in (1, 2] and row_a the
    t with Σⱼ max(0, (alpha − 1) sⱼ − t)^(1/(alpha − 1)) = 1: 0 for a row with nothing to look at,
    NaN where a score is NaN or +∞. row_b is empty.

    For top-k it is k. The k largest scores of a row are those with s > row_a, or s = row_a at a key
    up to the position row_b, int32. Where the k-th score has equals that do not count, row_a is
    that score; else it may lie below it, above the next. A row with no more than k scores above −∞
    has −∞ and position 2³¹ − 1; one with a NaN or +∞ has NaN.
    """
    arrays, numbers = Arrays(*rounded(given[:ARRAYS])), Numbers(*given[ARRAYS:-1])
    listed = given[-1]
    query, key = arrays[:2]
    row_a, row_b, lists, across, marks = _room(query, key, numbers.weighting, listed)
    entmax = numbers.weighting == "entmax"
    kernel, more = (entmax_kernel, ()) if entmax else (topk_kernel, (int(numbers.alpha),))
    if not (row_a.numel() and key.shape[2]):
        return row_a.fill_(0 if entmax else -torch.inf), row_b.fill_(NOWHERE.value), lists, across
    outs: tuple[Tensor, ...] = (row_a,) if entmax else (row_a, row_b)
    bits = (marks, across, lists) if listed else (None, None, None)
    _run(kernel, arrays, numbers, (*outs, *bits), *more, phase=int(listed))
    if listed:
        support.listed(marks, lists, key.shape[2])
    if listed and entmax:
        _run(kernel, arrays, numbers, (row_a, None, None, lists), phase=2)
    return row_a, row_b, lists, across


def searched(arrays: Arrays, numbers: Numbers) -> Arrays:
    """The arrays with what the weighting must know of rows: row_a and row_b, lists and marks."""
    if numbers.weighting not in ("entmax", "topk"):
        return arrays
    entmax, banded = numbers.weighting == "entmax", (numbers.lower, numbers.upper) != (None, None)
    listed = support.pays(arrays.query, arrays.key, banded or not entmax)
    # Values, blocks and dropped weights do not count here, and are not compiled for.
    given = arrays._replace(value=arrays.key, layout=None, seed=None)
    row_a, row_b, lists, marks = found(*given, *numbers._replace(whole=False, dropout=0.0), listed)
    arrays = arrays._replace(row_a=row_a, row_b=None if entmax else row_b)
    return arrays._replace(lists=lists, marks=marks) if listed else arrays
