"""Which kernels of `search` are launched for what a sparse weighting must know of its rows, how."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.engines.triton import launch, support
from qkv.engines.triton.arguments import Arguments, Numbers
from qkv.engines.triton.launch import Launch, Tile
from qkv.engines.triton.operators import operator
from qkv.engines.triton.records import Arrays
from qkv.engines.triton.search import NOWHERE, entmax_kernel, topk_kernel
from qkv.engines.triton.support import SHARED

FACTS = (
    "W", "D", "BLOCK_D", "WEIGHTING", "POWER", "LOWER", "UPPER", "FAST", "SCORES", "PAIRS",
    "BIAS", "GATE", "LAYOUT", "DROP", "EVEN",
)  # fmt: skip
"""Those of a call that both kernels are compiled for."""
PLAIN = {"SPLIT": False, "PACKED": False, "TMA": False}


def _tile(query: Tensor, kernel: Any, banded: bool, phase: int) -> Tile:
    w = query.shape[-1]
    if phase:
        return Tile(SHARED, SHARED, 64, 4, 3, registers=128 if w <= 64 else 168)
    if query.element_size() == 4:
        return Tile(64, 64, 16, 4, 2)
    entmax = kernel is entmax_kernel
    if w > 128 or (entmax and not banded):
        return Tile(128, 64, 64, 8, 3 if w <= 128 else 2)
    return Tile(64, 64, 64, 4, 2 if entmax and w <= 64 else 3)


def _run(
    kernel: Any,
    given: Arrays,
    numbers: Numbers,
    outs: tuple[Tensor | None, ...],
    whole: tuple[int, ...] = (),
    phase: int = 0,
) -> None:
    """Launch with the largest tile that the device holds."""
    about = (kernel, *launch.kinds(*given[:2], *given[3:]), *numbers[1:], *whole, phase)
    made = launch.MADE.get(about)
    if made is not None and made.again((*given, *outs), numbers.floats):
        return
    call = Arguments(*given, *numbers)
    columns = 0 if outs[-1] is None else outs[-1].shape[-1]
    sizes = (call.n, call.m, call.h, call.group, call.lower, call.upper, columns, *whole)
    # A product in float32 is written out as one instruction for each of its terms, in each loop
    # over the keys: the compiler takes long over a whole width. The order of the sum is the same.
    wide = call.w > launch.HELD or call.query.dtype == torch.float32
    facts = {name: call.facts[name] for name in FACTS} | PLAIN | {"WIDE": wide}
    facts |= {"PHASE": phase, "LISTED": phase if phase == 2 else 0, "MANY": 1}

    def run(tile: Tile) -> Launch | None:
        known = facts | {
            "ROWS": tile.rows,
            "COLS": tile.cols,
            "BLOCK_W": tile.chunk if wide else max(16, launch.power_of_2(call.w)),
        }
        programs = call.b * call.h * -(-call.n // tile.rows)
        arrays = (call.inputs, *outs)
        return launch.start(
            kernel, programs, arrays, call.floats, (call.steps(), *sizes), known, tile
        )

    need = (kernel, *facts.values())
    tile = _tile(call.query, kernel, facts["LOWER"] or facts["UPPER"], phase)
    made = launch.fitting(tile, call.query.device, need, run)
    launch.keep(about, None if call.copied else made)


def _rows(query: Tensor, dtype: torch.dtype) -> Tensor:
    """A number for each query."""
    return query.new_empty(query.shape[:3], dtype=dtype)


def _support(query: Tensor, key: Tensor, listed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the lists and the bits of `support`, of queries and of keys; empty without any."""
    if not listed:
        none = query.new_empty((0,), dtype=torch.int32)
        return none, none.clone(), none
    marks, across = support.bits(query, key)
    at = support.places(query, key.shape[2], support.tiles(query.shape[2]))
    return at, across, marks


def _entmax_fake(
    query: Tensor, key: Tensor, alpha: float, scale: float, listed: bool = False, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    return _rows(query, torch.float32), *_support(query, key, listed)[:2]


def _topk_fake(
    query: Tensor, key: Tensor, k: int, scale: float, listed: bool = False, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    return _rows(query, torch.float32), _rows(query, torch.int32), *_support(query, key, listed)[:2]


@operator(_entmax_fake)
def entmax_threshold(
    query: Tensor,
    key: Tensor,
    alpha: float,
    scale: float,
    listed: bool = False,
    key_bias: Tensor | None = None,
    gate_query: Tensor | None = None,
    gate_key: Tensor | None = None,
    lower: int | None = None,
    upper: int | None = None,
    lengths: Tensor | None = None,
    pairs: Tensor | None = None,
    times: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """t (B, H, n) with Σⱼ max(0, (alpha − 1) sⱼ − t)^(1/(alpha − 1)) = 1, for alpha in (1, 2].

    query (B, H, n, w), key (B, Hₖ, m, w) and the rest as in `ops.attend`, whose `row_a` it is.
    0 for a row with nothing to look at; NaN where a score is NaN or +∞. No gradient. Then come
    `lists` and `marks` of `support`, if they are to be `listed`, or else empty.
    """
    out = _rows(query, torch.float32)
    lists, across, marks = _support(query, key, listed)
    if not (out.numel() and key.shape[2]):
        return out.zero_(), lists, across
    given = Arrays(query, key, key, key_bias, gate_query, gate_key, lengths=lengths, pairs=pairs)
    numbers = Numbers(scale, "entmax", alpha, lower, upper, 0, False, times)
    if not listed:
        _run(entmax_kernel, given, numbers, (out, None, None, None))
        return out, lists, across
    _run(entmax_kernel, given, numbers, (out, marks, across, lists), phase=1)
    support.listed(marks, lists, key.shape[2])
    _run(entmax_kernel, given, numbers, (out, None, None, lists), phase=2)
    return out, lists, across


@operator(_topk_fake)
def topk_threshold(
    query: Tensor,
    key: Tensor,
    k: int,
    scale: float,
    listed: bool = False,
    key_bias: Tensor | None = None,
    gate_query: Tensor | None = None,
    gate_key: Tensor | None = None,
    lower: int | None = None,
    upper: int | None = None,
    lengths: Tensor | None = None,
    pairs: Tensor | None = None,
    times: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """least (B, H, n) and position (B, H, n) int32: the k largest scores of a row are those with
    s > least, or s = least at a key up to the position.

    Arguments and results as in `ops.attend`. Where the k-th score has equals that do not count,
    least is that score; else it may lie below it, above the next. A row with no more than k scores
    above −∞ has least −∞ and position 2³¹ − 1; one with a NaN or +∞ has least NaN. No gradient.
    Then come `lists` and `marks`, as for entmax.
    """
    least, position = _rows(query, torch.float32), _rows(query, torch.int32)
    lists, across, marks = _support(query, key, listed)
    if not (least.numel() and key.shape[2]):
        return least.fill_(-torch.inf), position.fill_(NOWHERE.value), lists, across
    given = Arrays(query, key, key, key_bias, gate_query, gate_key, lengths=lengths, pairs=pairs)
    numbers = Numbers(scale, "topk", 0.0, lower, upper, 0, False, times)
    if not listed:
        _run(topk_kernel, given, numbers, (least, position, None, None, None), (k,))
        return least, position, lists, across
    _run(topk_kernel, given, numbers, (least, position, marks, across, lists), (k,), phase=1)
    support.listed(marks, lists, key.shape[2])
    return least, position, lists, across
