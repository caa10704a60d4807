"""Attention in blocks: any score and weighting in O(n + m) memory, forward and backward.

Forward, each span of queries folds the blocks of keys into the weighting's state. Backward, the
blocks are scored again: the weighting gives the gradient of a block's scores from what it kept of
the row, and the framework's own vjp carries that to the query, the key and every array inside
the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from qkv import masks, scores
from qkv.engines import call as calls
from qkv.engines import dense
from qkv.engines.block_passes import BlockOperands, BlockPasses, load_operands, load_value
from qkv.engines.call import Call
from qkv.engines.out_of_core.backward import (
    SavedScores,
    choose_loops,
    load_all_rows,
    query_gradient_function,
)
from qkv.errors import format_count
from qkv.frameworks import threads, tree
from qkv.frameworks.base import Framework, Tiling
from qkv.frameworks.stored_rows import RowSpans, UnreadArray
from qkv.scores import user_functions
from qkv.util.caches import create_table, insert_bounded
from qkv.util.types import Array, Arrays, Gradients, Span
from qkv.weightings import State, Weighting
from qkv.weightings.base import weighting_for_rows

NAME = "streaming"
UPCASTS = True

MAX_NUMBERS_PER_BLOCK = 2**21
"""Numbers held at once by a block's scores, or by what a score makes on the way to them."""

MAX_FEW_QUERIES = 64
"""Queries, over all leading axes, for which reading the keys takes longer than the arithmetic."""

MAX_KEY_NUMBERS_PER_READ = 2**22
"""Numbers of the keys that are read at a time for a few queries."""

MAX_SEARCHED_NUMBERS_PER_BLOCK = 2**20
"""The same where rows are searched: each core reads its block from the cache several times."""

MIN_WIDE_QUERY_WIDTH = 512
"""Numbers of a query from which its products outweigh all else."""

MAX_DENSE_NUMBERS = 2**18
"""Numbers below which the whole matrix is one block, and dense does it at once."""


UNKNOWN_LENGTH_REASON = "a length is unknown until the graph runs, so no blocks can be laid out"


def unsupported_reason(call: Call) -> str | None:
    fw = call.fw
    if call.has_unknown_length:
        return UNKNOWN_LENGTH_REASON
    lacks = call.weighting.missing_methods_reason(False)
    if lacks is None and (lacks := call.weighting.missing_methods_reason(True)):
        lacks = lacks if fw.needs_gradient(tree.array_leaves(fw, call)) else None
    if lacks:
        return lacks
    if any(fw.may_capture_arrays(function) for function in user_functions(call.score)):
        return (
            f"the score is a function that holds arrays, whose gradient {fw.name} would lose in "
            "blocks: make them fields of a frozen dataclass with __call__(query, key)"
        )
    return None


def slower_reason(call: Call) -> str | None:
    numbers = math.prod(call.lead) * call.n * call.m * numbers_per_pair(call)
    if call.fw.is_traced(call.query) and not call.fw.needs_equal_spans:
        return "a graph would hold every block, so it holds the equation, for any length"
    if numbers <= MAX_DENSE_NUMBERS:
        return (
            f"the call holds {format_count(numbers)} numbers in all: one block, which dense does "
            "at once"
        )
    return None


def is_data_dependent(call: Call) -> bool:
    """Whether it may run because the numbers forbid a faster engine."""
    return call.score.needs_range


def describe(call: Call) -> str:
    rows, cols = block_size(call)
    return f"blocks of {rows} queries × {cols} keys"


def numbers_per_pair(call: Call) -> int:
    return call.score.numbers_per_pair(call.fw.static_shape(call.key)[-1])


def run(call: Call, size: tuple[int, int] | None = None) -> tuple[Array, Array | None, None]:
    """The output and, where wanted, the log-sum-exp; `size` sets the block by hand."""
    call = calls.ensure_seed(call.upcast())
    fewer = call.weighting if call.m is None else call.weighting.limit_to_keys(call.m)
    call = call if fewer is call.weighting else replace(call, weighting=fewer)
    if call.fw.has_empty_axis((*call.lead, call.n, call.m)):
        return *dense.run(load_all_rows(call))[:2], None
    fw = call.fw
    tiling = build_tiling(call, *(size or block_size(call)))
    if not any(keys for _, keys in tiling):
        return *dense.run(call)[:2], None
    own = scores.has_user_code(call.score) or masks.has_user_functions(call.rule)
    call = hoist_captured_arrays(call, tiling)
    leaves = tree.array_leaves(fw, call)
    learning = fw.needs_gradient(leaves)
    held = SavedScores.create_for(call) if learning and len(tiling) == 1 else None

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        fresh = tree.replace_arrays(fw, call, arrays)
        lent = None if own else _as_numpy_call(fresh)
        if lent is None:
            return _run_forward(fresh, tiling, learning, held)
        outputs, kept = _run_forward(lent, tiling, learning, held)
        return tuple(map(fw.from_numpy_view, outputs)), tuple(map(fw.from_numpy_view, kept))

    def backward(arrays: Arrays, kept: Arrays, gradients: Arrays) -> Gradients:
        return run_backward(tree.replace_arrays(fw, call, arrays), tiling, kept, gradients, held)

    def reference(*arrays: Array) -> Arrays:
        out, lse, _ = dense.run(load_all_rows(tree.replace_arrays(fw, call, arrays)))
        return (out,) if lse is None else (out, lse)

    outputs = fw.run_differentiable(forward, backward, reference, leaves)
    return outputs[0], outputs[1] if call.wants_lse else None, None


def _as_numpy_call(call: Call) -> Call | None:
    """The call on NumPy's arrays over the same memory, where its search picks scores by a mask.

    NumPy does that several times faster than others, and for some rows on each core.
    """
    fw = call.fw
    if fw.supports_masked_gather or not call.weighting.needs_search or call.weighting.has_lse:
        return None
    lent = [fw.as_numpy_view(x) for x in tree.array_leaves(fw, call)]
    return None if any(x is None for x in lent) else tree.replace_arrays(fw, call, lent)


def has_few_queries(call: Call) -> bool:
    """Whether there is little to do for each key but read it."""
    return math.prod(call.lead) * call.n <= MAX_FEW_QUERIES and call.m > MAX_FEW_QUERIES


def hoist_captured_arrays(call: Call, tiling: Tiling) -> Call:
    """The call with the arrays that the caller's functions hold among its leaves."""
    in_score, in_rule = user_functions(call.score), masks.has_user_functions(call.rule)
    if not (in_score or in_rule):
        return call
    rows, keys = next((rows, keys) for rows, keys in tiling if keys)
    cols: Any = next(iter(keys))[0] if isinstance(keys, RowSpans) else keys[0]

    row, col = call.at[:2] if call.at else (0, 0)

    def make_local_block(rows: Span, cols: Span) -> Any:
        rows, cols = (x._replace(start=x.start - at) for x, at in ((rows, row), (cols, col)))
        return calls.make_block(call, rows, cols)

    part = load_operands(call, rows, cols)
    score, rule = call.score, call.rule
    if in_score:
        key = calls.repeat_shared_heads(call, part.key)
        score = scores.hoist_score(score, part.query, key, part.block, make_local_block)
    if in_rule and rule is not None:
        rule = masks.hoist_mask(rule, part.block, make_local_block)
    return replace(call, score=score, rule=rule)


# Blocks


def block_size(call: Call) -> tuple[int, int]:
    """Queries and keys per block: near a square, within BLOCK numbers for all leading axes."""
    each = max(math.prod(call.lead) * numbers_per_pair(call), 1)
    area = max(MAX_NUMBERS_PER_BLOCK // each, 1)
    if isinstance(call.key, UnreadArray):  # whatever is read serves as many queries as it can
        rows = max(min(call.n, area // 512), 1)
        return rows, max(
            min(area // rows, 4 * MAX_KEY_NUMBERS_PER_READ // max(call.key.shape[-1], 1)), 512
        )
    if call.weighting.needs_search and call.m <= area:  # searched in one go
        numbers = each * call.n * call.m
        parts = -(
            -numbers
            // (
                MAX_SEARCHED_NUMBERS_PER_BLOCK
                if call.fw.name in ("numpy", "torch")
                else MAX_NUMBERS_PER_BLOCK
            )
        )
        parts += min(
            -parts % threads.CORE_COUNT, numbers // MAX_DENSE_NUMBERS
        )  # every core has as many
        return max(-(-call.n // max(parts, 1)), 1), max(call.m, 1)
    side = 2 ** int(math.log2(math.sqrt(area))) if area > 1 else 1
    wide = call.fw.static_shape(call.query)[-1] >= MIN_WIDE_QUERY_WIDTH
    if wide and call.fw.name == "torch":  # its product is the work, and the larger the better
        side, area = 4 * side, 2 * area
    rows = max(min(side, 1024 if wide else 256, call.n), 1)
    if call.rule is not None:
        # No more queries at once than share most of their keys.
        start, end = call.rule.key_extent(Span(call.n // 2, 1), call.n, call.m)
        rows = min(rows, max(end - start, 64))
    cols = max(min(area // rows, call.m), 1)
    if has_few_queries(call):
        cols = min(
            cols, max(MAX_KEY_NUMBERS_PER_READ // max(call.fw.static_shape(call.key)[-1], 1), 512)
        )
    return rows, cols


def split_spans(fw: Framework, total: int, size: int, start: int = 0) -> list[Span]:
    size = max(min(size, total - start), 1)
    starts = range(start, total, size)
    if not fw.needs_equal_spans:
        return [Span(at, min(size, total - at)) for at in starts]
    return [Span(min(at, total - size), size, at if total % size else None) for at in starts]


_TILINGS: dict[tuple[Any, ...], Tiling] = create_table("engines.streaming_tilings")
MAX_CACHED_TILINGS = 64


def build_tiling(call: Call, rows: int, cols: int) -> Tiling:
    """The blocks that the mask leaves, and whether it must be looked at inside them.

    That of a rule on distances is kept: a loop asks for it again and again.
    """
    fw, rule, n, m = call.fw, call.rule, call.n, call.m
    if isinstance(call.key, UnreadArray):
        cuts: Any = call.key.rows.iter_spans(cols)
        return [(Span(at, min(rows, n - at)), cuts) for at in range(0, n, rows)]
    if rule is None:
        keys = split_spans(fw, m, cols)
        return [(span, keys) for span in split_spans(fw, n, rows)]
    if not rule.is_relative:
        return _build_masked_tiling(fw, rule, (n, m), rows, cols)
    signature = (fw.name, rule, n, m, rows, cols)
    tiling = _TILINGS.get(signature)
    if tiling is None:
        tiling = _build_masked_tiling(fw, rule, (n, m), rows, cols)
        insert_bounded(_TILINGS, signature, tiling, MAX_CACHED_TILINGS)
    return tiling


def _build_masked_tiling(
    fw: Framework, rule: masks.Mask, size: tuple[int, int], rows: int, cols: int
) -> Tiling:
    n, m = size
    grid = split_spans(fw, m, cols) if fw.needs_disjoint_spans else []

    def visible_spans(queries: Span) -> list[Span]:
        start, end = rule.key_extent(queries, n, m)
        if fw.needs_disjoint_spans:
            near = [span for span in grid if span.start < end and start < span.start + span.size]
        else:
            near = split_spans(fw, end, cols, start)
        told = ((span, rule.block_verdict(queries, span, n, m)) for span in near)
        return [span._replace(is_unmasked=yes is True) for span, yes in told if yes is not False]

    return [(span, visible_spans(span)) for span in split_spans(fw, n, rows)]


# Forward


def _run_forward(
    call: Call, tiling: Tiling, learning: bool, held: SavedScores | None
) -> tuple[State, State]:
    """The outputs, and what is kept of each row for the way back where there is one."""
    fw, loops = call.fw, choose_loops(call)
    unscaled = replace(call, weighting=Weighting())
    keeps = learning or call.wants_lse or call.weighting.raises_on_empty

    def pool_rows(rows: Span, keys: Any) -> Arrays:
        weighting = weighting_for_rows(fw, call.weighting, rows, call.n)
        if isinstance(keys, list) and len(keys) == 1 and call.weighting.needs_search and not keeps:
            part = load_operands(call, rows, keys[0])
            s = calls.compute_scores(unscaled, part.query, part.key, part.bias, part.block)
            value = calls.repeat_shared_heads(call, load_value(call, keys[0], part.live))
            keep = calls.dropout_factors(call, part.block)
            return (weighting.pool_whole_rows(s, part.live, part.block.k, value, keep),)
        passes = BlockPasses(call, rows, keys, held)
        found = weighting.find_threshold(passes.fold)
        out, found_all, centre = weighting.finish(passes.state(found), found)
        if not keeps:
            return (out,)
        return out, *found_all, *(() if centre is None else (centre,))

    out, *kept = loops.map_tiles(pool_rows, tiling)
    if call.weighting.raises_on_empty:
        call.weighting.check_row_state(tuple(kept))
    outputs = (out, call.weighting.lse_from_state(tuple(kept))) if call.wants_lse else (out,)
    return outputs, (*kept, *(() if held is None else held.take_blocks()))


# Backward


def run_backward(
    call: Call,
    tiling: Tiling,
    kept: Sequence[Array],
    gradients: Sequence[Array],
    held: SavedScores | None,
) -> Gradients:
    """One gradient for each leaf of the call."""
    kept, known = (kept, {}) if held is None else held.split_saved(kept)
    fw, weighting, loops = call.fw, call.weighting, choose_loops(call)
    parameters = tree.array_leaves(fw, (call.score, weighting))
    stored = isinstance(call.key, UnreadArray)

    def score_block(part: BlockOperands, rows: Span) -> tuple[Array, Callable[[Array], Gradients]]:
        """The scores of a block, and their gradients to gradients of what `moves` in it."""
        moves = part.query, None if stored else part.key, part.bias, call.score, weighting

        def compute_block_scores(*arrays: Array) -> Array:
            query, key, bias, score, weighting = tree.replace_arrays(fw, moves, arrays)
            changed = replace(
                call, score=score, weighting=weighting_for_rows(fw, weighting, rows, call.n)
            )
            return calls.compute_scores(
                changed, query, part.key if stored else key, bias, part.block
            )

        return fw.vjp(compute_block_scores, *tree.array_leaves(fw, moves))

    def weigh_block(rows: Span, *given: Any) -> tuple[Array, Callable[[Array], Gradients] | None]:
        """The weights of a block, and their gradients to those of arrays that act in `weight`."""
        if not weighting.has_learned_shape:
            return weighting_for_rows(fw, weighting, rows, call.n).block_weights(*given), None

        def compute_block_weights(*arrays: Array) -> Array:
            bent = tree.replace_arrays(fw, weighting, arrays)
            return weighting_for_rows(fw, bent, rows, call.n).block_weights(*given)

        return fw.vjp(compute_block_weights, *tree.array_leaves(fw, weighting))

    def add_gradient(total: Any, new: Array | None, rows: Span, cols: Span | None = None) -> Any:
        return total if new is None else fw.add_to_span(total, new, rows, cols)

    def sweep_keys(totals: Any, rows: Span, keys: Any) -> Any:
        found = tuple(fw.slice_span(x, rows, -2) for x in kept)
        along_out = fw.slice_span(gradients[0], rows, -2)
        centre = fw.full((*call.lead, rows.size, 1), 0.0, call.query)
        if weighting.needs_centre:
            found, middle = found[:-1], found[-1]
            centre = fw.xp.sum(middle * along_out, axis=-1, keepdims=True)
        if call.wants_lse:
            centre = centre - fw.slice_span(gradients[1], rows, -2)

        def add_block(totals: Any, cols: Span) -> Any:
            dq, dk, dv, dbias, dparameters = totals
            part = load_operands(call, rows, cols)
            live, keep = part.live, calls.dropout_factors(call, part.block)
            if known and cols.start in known:  # a traced start has no hash
                s, pull = known[cols.start], query_gradient_function(call, part.query, part.key)
            elif weighting.is_differentiable:
                s, pull = score_block(part, rows)
            else:
                s = calls.compute_scores(call, *part[2:], part.block)
            weight, bend = weigh_block(rows, s, live, part.block.k, found)
            value = load_value(call, cols, live)
            if not stored:
                spread = weighting.value_gradient_weights(weight)
                spread = spread if keep is None else spread * keep
                gained = fw.xp.matmul(fw.xp.matrix_transpose(spread), along_out)
                dv = fw.add_to_span(
                    dv, calls.sum_shared_heads(call, gained, value.shape[:-2]), cols, None
                )
            if weighting.is_differentiable:
                shared = calls.repeat_shared_heads(call, value)
                along = fw.xp.matmul(along_out, fw.xp.matrix_transpose(shared))
                along = along if keep is None else along * keep
                slope = weighting_for_rows(fw, weighting, rows, call.n).score_gradient(
                    s, weight, along, centre, found
                )
                new = iter(pull(fw.fill_unless(slope, live)))
                dq = add_gradient(dq, next(new), rows)
                dk = dk if stored else add_gradient(dk, next(new), cols)
                dbias = dbias if call.bias is None else add_gradient(dbias, next(new), rows, cols)
                bent = () if bend is None else bend(fw.fill_unless(along - centre, live))
                more = [None] * (len(dparameters) - len(bent)) + [*bent]
                parts = zip(dparameters, new, more, strict=True)
                dparameters = [sum(y for y in x if y is not None) for x in parts]
            return [dq, dk, dv, dbias, dparameters]

        return loops.fold_spans(add_block, totals, keys)

    none = fw.full((1, 1), 0.0, call.query)
    start = [
        fw.new_accumulator(call.query),
        fw.new_accumulator(none if stored else call.key),
        fw.new_accumulator(none if stored else call.value),
        fw.new_accumulator(none if call.bias is None else call.bias),
        [fw.full(fw.static_shape(x), 0.0, x) for x in parameters],
    ]
    dq, dk, dv, dbias, dparameters = loops.fold_tiles(sweep_keys, start, tiling)
    return _order_gradients(
        call, [fw.accumulator_total(x) for x in (dq, dk, dv, dbias)], dparameters
    )


def _order_gradients(call: Call, main: list[Array], parameters: list[Array]) -> Gradients:
    """The gradients in the order of the call's leaves; positions and seeds have none."""
    dq, dk, dv, dbias = main
    stored = isinstance(call.key, UnreadArray)
    out: list[Array | None] = [dq, *(() if stored else (dk, dv)), *parameters]
    out += [None] * len(tree.array_leaves(call.fw, call.rule))
    out += [] if call.bias is None else [dbias]
    return (*out, *[None] * len(tree.array_leaves(call.fw, call.seed)))
