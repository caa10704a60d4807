"""Launch the kernels of `threshold_search` for a sparse weighting."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qkv.engines.triton.launching import launch, tile_choice, workspace
from qkv.engines.triton.launching.kernel_call import (
    SCHEMA_ARGUMENTS,
    KernelCall,
    Numbers,
    is_tma_readable,
    round_query,
)
from qkv.engines.triton.launching.launch_replay import replay_launches
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.launching.torch_operator import register_operator
from qkv.engines.triton.sparse import support_lists
from qkv.engines.triton.sparse.support_lists import ROWS_PER_LIST
from qkv.engines.triton.sparse.threshold_search import (
    best_kernel,
    entmax_kernel,
    score_kernel,
    topk_kernel,
)
from qkv.engines.triton.tile_functions.records import ARRAY_COUNT, Arrays
from qkv.engines.triton.tile_functions.tiles import LAST_POSITION

MAX_STORED_BYTES = 2**28
"""The most bytes of scores that a search writes and reads, instead of computing them again."""
MAX_HIDING_RANK = 128
"""The largest k for which a search keeps the largest score that is no peak."""
MIN_KEYS_PER_CHOSEN = 8
"""The fewest keys per k for which the top-k search guesses from a sample: the three largest of
every fourth scores of a column hold that share."""
MAX_POWER_DIGITS = 20
"""The most digits before or after the point of a power of a score, so that sums stay in float32."""
MIN_STORED_KEYS = 512
"""The fewest keys for which writing the scores is worth its launch."""
MAX_STORED_COLUMNS = 4096
"""The most scores of a row that a search of stored scores reads at a time."""
STORED_TILES = 4
"""Into how many parts such a row is divided at least, so that few threads need wait for another."""


def _choose_tile(query: Tensor, kernel: Any, phase: int, by_column: bool = False) -> Tile:
    w = query.shape[-1]
    if by_column:
        return tile_choice.choose_column_tile("search", ROWS_PER_LIST)
    if phase:
        few = w <= 64 and kernel is not topk_kernel
        return Tile(ROWS_PER_LIST, ROWS_PER_LIST, 64, 4, 3, registers=128 if few else 168)
    if query.element_size() == 4:
        return Tile(64, 64, 16, 4, 2)
    if w > 128:
        return Tile(128, 64, 64, 8, 2)
    # With 128 registers four programs share a processor (three with 168, for wide entmax).
    # The three largest scores of each column fill 96 of them.
    few = kernel is best_kernel or (w <= 64 and kernel is entmax_kernel)
    registers = 128 if few else (None if kernel is topk_kernel else 168)
    return Tile(64, 64, 64, 4, 3, uses_descriptors=True, registers=registers)


def _keeps_hidden(kernel: Any, numbers: Numbers) -> bool:
    """Return whether a search keeps the largest score that is no peak (`F.HIDES`).

    The scores above it are known after one pass. A large k needs several passes anyway.
    """
    return kernel is topk_kernel and numbers.alpha <= MAX_HIDING_RANK


def _samples(kernel: Any, numbers: Numbers, m: int) -> bool:
    """Return whether a search guesses the k-th score from a sample (`F.SAMPLED`).

    That takes two passes for a large k among many keys.
    """
    k = numbers.alpha
    return kernel is topk_kernel and k > MAX_HIDING_RANK and k * MIN_KEYS_PER_CHOSEN <= m


def _choose_unit(call: KernelCall) -> int:
    """Return which factor a search leaves out of its scores (`F.UNIT`); top-k only knows 2."""
    facts = call.constexprs
    if call.form != "product" or facts["CAP"] != 0:
        return 0
    if facts["PAIRS"] == 2 or facts["HAS_MOD"]:
        return int(_is_summable_unit(call, call.scales.times))
    return 2 if call.is_plain_product and _is_summable_unit(call, call.scales.scale) else 0


def _is_summable_unit(call: KernelCall, factor: float) -> bool:
    """Return whether powers of entmax's scores in units of the factor are no over- or underflow."""
    if factor <= 0 or call.weighting != "entmax":
        return factor > 0
    less = call.scales.alpha - 1
    return abs(math.log10(factor * less)) / less <= MAX_POWER_DIGITS


def _launch_search(
    kernel: Any, given: Arrays, numbers: Numbers, outs: tuple[Tensor | None, ...], *whole: int,
    phase: int = 0,
) -> None:  # fmt: skip
    """Launch a search kernel with the largest tile that the device supports."""
    call = KernelCall(*given, *numbers)
    # A float32 product is one instruction per term in each loop, which compiles slowly at full
    # width. In chunks, the order of the sum is the same.
    wide = call.w > tile_choice.MAX_FORWARD_TILE_WIDTH or call.query.dtype == torch.float32
    wide = wide or not call.has_product
    listed = phase if phase == 2 else 0
    call.constexprs = call.constexprs | {"WIDE": wide, "PHASE": phase, "LISTED": listed, "MANY": 1}
    call.constexprs |= {"SPLIT": False, "PACKED": False, "STORED": False}
    sampled = _samples(kernel, numbers, call.m)
    call.constexprs |= {"HIDES": sampled or _keeps_hidden(kernel, numbers), "SAMPLED": sampled}
    call.constexprs |= {"UNIT": _choose_unit(call)}
    # Without a descriptor, each thread would read the mask number by number.
    laid = not listed and call.can_use_descriptors and is_tma_readable(call.pairs)

    def run_tile(tile: Tile) -> None:
        *others, lists = outs
        counts: Tensor | None = None
        own: dict[str, Any] = {}
        if lists is None:  # ties count in the order of the keys
            _, lists, counts, _, own = call.listed_loop(tile, in_order=kernel is not entmax_kernel)
        sizes = call.build_sizes(at_columns=0 if lists is None else lists.shape[-1])
        known = (
            call.constexprs
            | own
            | {
                "ROWS": tile.rows,
                "COLS": tile.cols,
                "TMA": tile.uses_descriptors and call.can_use_descriptors,
                "LAID": laid,
                "BLOCK_W": tile.chunk if wide else max(16, tile_choice.next_power_of_2(call.w)),
            }
        )
        programs = call.b * call.h * -(-call.n // tile.rows)
        arrays = (*others, lists, counts)
        if laid and call.pairs is not None and call.pairs.dtype == torch.bool:
            call.inputs = call.inputs._replace(pairs=call.pairs.view(torch.uint8))
        call.launch_kernel(kernel, programs, arrays, None, (sizes, *whole), known, tile)

    tile = _choose_tile(call.query, kernel, phase, call.constexprs["BY_COLUMN"])
    call.run_with_fitting_tile(kernel.__name__, tile, run_tile)


def is_stored(arrays: Arrays, numbers: Numbers) -> bool:
    """Return whether the scores of all rows are few enough to be stored, as for a decoding step."""
    (b, h, n, _), (_, hk, m, _) = arrays.query.shape, arrays.key.shape
    if arrays.pages is not None:
        m *= arrays.pages.shape[1]
    return numbers.form == "product" and is_stored_shape(b, h, n, m, n * (h // max(hk, 1)))


def is_stored_shape(b: int, h: int, n: int, m: int, rows: int) -> bool:
    """Return `is_stored` of dot products, for `rows` queries of all heads that share their keys."""
    few_rows = rows <= tile_choice.MAX_PACKED_ROWS
    return few_rows and m >= MIN_STORED_KEYS and 4 * b * h * n * m <= MAX_STORED_BYTES


def _store_scores(given: Arrays, numbers: Numbers) -> Tensor:
    """Return the scores (B, H, n, m) in float32, −∞ for excluded pairs; see `score_kernel`."""
    call = KernelCall(*given, *numbers)
    scores = workspace.allocate_aligned(call.query, (call.b, call.h, call.n, call.m))
    packed = call.group > 1
    rows = call.n * call.group if packed else call.n
    lanes = call.b * (call.hk if packed else call.h)

    def run_tile(tile: Tile) -> None:
        wide = call.w > tile_choice.MAX_FORWARD_TILE_WIDTH or (
            call.w > 64 and call.constexprs["SCORES"] != call.constexprs["PRECISION"]
        )
        programs = lanes * -(-rows // tile.rows)
        splits, span = call.split_loop(programs, call.m, tile.cols, tile.waves)
        known = call.pass_constexprs(tile, wide, splits) | call.listed_loop(tile).constexprs
        known |= {"PHASE": 0, "STORED": False, "PACKED": packed, "LAID": False}
        known["TMA"] = known["TMA"] and not (wide and packed)  # stacked rows are not contiguous
        sizes = call.build_sizes(heads=lanes // call.b, rows_n=rows, splits=splits, span=span)
        whole = (sizes, scores.stride(2))
        call.launch_kernel(score_kernel, programs * splits, (scores,), None, whole, known, tile)

    call.run_with_fitting_tile("split", call.choose_tile("split", rows), run_tile)
    return scores


def _search_stored(
    kernel: Any, given: Arrays, numbers: Numbers, scores: Tensor,
    outs: tuple[Tensor, ...], *whole: int,
) -> None:  # fmt: skip
    """Launch a search kernel over stored scores, with one program per row."""
    query, key = given[:2]
    if given.pages is not None:  # only the shape of the gathered keys matters
        shape = query.shape[0], key.shape[1], scores.shape[-1], query.shape[-1]
        key = query.as_strided(shape, (0, 0, 0, 1))
    few = Numbers(1.0, numbers.weighting, numbers.alpha, sink=numbers.sink)
    caps = given.caps if numbers.sink is not None and numbers.cap >= 0 else None
    call = KernelCall(*Arrays(query, key, key, pairs=scores, caps=caps), *few)
    columns = tile_choice.next_power_of_2(call.m) // STORED_TILES
    columns = min(max(columns, 16), MAX_STORED_COLUMNS)
    tile = Tile(1, columns, 16, max(columns // 256, 4), 2)
    known = call.constexprs | {
        "ROWS": 1,
        "COLS": columns,
        "WIDE": True,
        "STORED": True,
        "HIDES": _keeps_hidden(kernel, numbers),
        "SAMPLED": False,
        "BLOCK_W": 16,
        **dict.fromkeys(("PHASE", "LISTED", "MANY", "UNIT"), 0),
        **dict.fromkeys(("SPLIT", "PACKED", "TMA", "LAID", "EDGES"), False),
    }
    arrays = (*outs, None, None, None, None)
    with launch.use_device(query.device):
        call.launch_kernel(
            kernel,
            call.b * call.h * call.n,
            arrays,
            None,
            (call.build_sizes(), *whole),
            known,
            tile,
        )


def _allocate_outputs(
    query: Tensor, key: Tensor, weighting: str, listed: bool, has_tops: bool
) -> tuple[Tensor, ...]:
    """Return empty results of `find_thresholds`, and the bits from which lists are built."""
    rows, none = query.shape[:3], query.new_empty((0,), dtype=torch.int32)
    row_a = workspace.allocate_buffer(query, (2, *rows) if has_tops else rows)
    row_b = none if weighting == "entmax" else workspace.allocate_buffer(query, rows, torch.int32)
    if not listed:
        return row_a, row_b, none.clone(), none.clone(), none
    marks, across = support_lists.allocate_bits(query, key)
    at = support_lists.allocate_lists(
        query, key.shape[2], support_lists.count_tiles(query.shape[2])
    )
    return row_a, row_b, at, across, marks


def _fake_thresholds(query: Tensor, key: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    numbers = Numbers(*rest[ARRAY_COUNT - 2 : -1])
    has_tops = numbers.weighting == "topk" and not numbers.is_hard
    return _allocate_outputs(query, key, numbers.weighting, rest[-1], has_tops)[:4]


@register_operator(
    _fake_thresholds,
    schema=f"({SCHEMA_ARGUMENTS}, bool listed) -> (Tensor, Tensor, Tensor, Tensor)",
)
@replay_launches
def find_thresholds(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return row_a and row_b of `attend_operator`, and the lists and bits of `support_lists`.

    The arguments are those of `attend_operator`, then a boolean that says whether to make lists. If
    it is False, the last two results are empty. No result has a gradient. query (B, H, n, w),
    key (B, Hₖ, m, w) → (B, H, n).

    *Entmax*, alpha in (1, 2]: row_a is the t with
    Σⱼ max(0, (alpha − 1) sⱼ − t)^(1/(alpha − 1)) = 1. It is 0 for an empty row, and NaN if a score
    is NaN or +∞. row_b is empty.

    *Top-k*, alpha = k: the k largest scores of a row are those with s > row_a, or s = row_a at a
    key up to the position row_b (int32). If the k-th score has ties that do not count, row_a is
    that score; otherwise it is between the k-th score and the next. A row with at most k scores
    above −∞ has row_a = −∞ and row_b = 2³¹ − 1. A row with NaN or +∞ has row_a = NaN. row_a is
    (2, B, H, n): the second half holds the largest score of each row, −∞ if it has none.

    *Hard*, top-k with k = 1: row_a (B, H, n) is the largest score and row_b its first key. A row
    that is empty or has NaN or +∞ has row_b = 2³¹ − 1.
    """
    arrays, numbers = Arrays(*round_query(given[:ARRAY_COUNT])), Numbers(*given[ARRAY_COUNT:-1])
    kernel: Any = entmax_kernel
    more: tuple[int, ...] = ()
    if numbers.weighting == "topk":
        kernel, more = (
            (best_kernel, ()) if numbers.is_hard else (topk_kernel, (int(numbers.alpha),))
        )
    return _search(kernel, more, arrays, numbers, given[-1])


def find_tolerant_thresholds(arrays: Arrays, numbers: Numbers) -> tuple[Tensor, ...]:
    """Return row_a and row_b of top-k for `hard` too, as passes with other tiles need them."""
    return _search(topk_kernel, (int(numbers.alpha),), arrays, numbers, False)[:2]


def _search(
    kernel: Any, more: tuple[int, ...], arrays: Arrays, numbers: Numbers, listed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `find_thresholds` from this kernel, which takes the integers `more`."""
    query, key = arrays[:2]
    row_a, row_b, lists, across, marks = _allocate_outputs(
        query, key, numbers.weighting, listed, kernel is topk_kernel
    )
    entmax = numbers.weighting == "entmax"
    if not (row_a.numel() and key.shape[2]):
        return (
            row_a.fill_(0 if entmax else -torch.inf),
            row_b.fill_(LAST_POSITION.value),
            lists,
            across,
        )
    outs: tuple[Tensor, ...] = (row_a,) if entmax else (row_a, row_b)
    if not listed and is_stored(arrays, numbers):
        _search_stored(kernel, arrays, numbers, _store_scores(arrays, numbers), outs, *more)
        return row_a, row_b, lists, across
    bits = (marks, across, lists) if listed else (None, None, None)
    _launch_search(kernel, arrays, numbers, (*outs, *bits), *more, phase=int(listed))
    if listed:
        support_lists.fill_lists(marks, lists, key.shape[2])
    if listed and entmax:
        _launch_search(kernel, arrays, numbers, (row_a, None, None, lists), phase=2)
    return row_a, row_b, lists, across


def with_thresholds(arrays: Arrays, numbers: Numbers) -> Arrays:
    """Return the arrays with the thresholds of a sparse weighting: row_a, row_b, lists, marks."""
    if numbers.weighting not in ("entmax", "topk"):
        return arrays
    entmax, banded = numbers.weighting == "entmax", (numbers.lower, numbers.upper) != (None, None)
    ruled = arrays.layout is not None or numbers.functions is not None
    ruled = ruled or arrays.key_spans is not None
    listed = not (ruled or numbers.is_hard) and support_lists.lists_pay_off(
        arrays.query, arrays.key, banded or not entmax
    )
    # Values and dropout do not matter here, so kernels are not compiled for them.
    given = arrays._replace(value=arrays.key, seed=None)
    row_a, row_b, lists, marks = find_thresholds(
        *given, *numbers._replace(whole=False, dropout=0.0), listed
    )
    arrays = arrays._replace(row_a=row_a, row_b=None if entmax else row_b)
    return arrays._replace(lists=lists, marks=marks) if listed else arrays
