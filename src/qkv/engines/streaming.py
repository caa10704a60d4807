"""The streaming engine: attention in blocks, with O(n + m) memory for any score and weighting.

Forward: for each span of queries, the blocks of keys are reduced to one state of the weighting.

Backward: the scores of each block are computed again. The weighting's `score_gradient` gives the
gradient of the scores. From it, the framework's vjp computes the gradients of the query, the key
and the score's arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from qkv import masks, scores
from qkv.engines import call as calls
from qkv.engines import dense, user_code
from qkv.engines.call import Call
from qkv.engines.out_of_core.backward import (
    SavedScores,
    choose_loops,
    load_all_rows,
    query_gradient_function,
)
from qkv.engines.out_of_core.key_terms import load_key_terms
from qkv.engines.sink_gradients import add_sink_gradients
from qkv.errors import format_count
from qkv.frameworks import threads, tree
from qkv.frameworks.base import Framework, Tiling
from qkv.frameworks.stored_rows import RowSpan, RowSpans, UnreadArray, to_framework_array
from qkv.scores import Additive, Modified, RelativeScore, user_functions
from qkv.scores.functions import EvaluatedScore
from qkv.scores.user_score import UserScore
from qkv.util.caches import create_table, insert_bounded
from qkv.util.types import Array, Arrays, Gradients, LiveMask, MergeFunction, Span
from qkv.weightings import State, Weighting
from qkv.weightings.base import weighting_for_rows

NAME = "streaming"
UPCASTS = True

MAX_NUMBERS_PER_BLOCK = 2**21
"""Numbers in memory for the scores of a block, including the score's intermediate arrays."""

MAX_FEW_QUERIES = 64
"""Queries, over all leading axes, up to which reading the keys takes longer than the arithmetic."""

MAX_KEY_NUMBERS_PER_READ = 2**22
"""The most numbers of the keys that a core reads at a time, if there are few queries."""

MAX_SEARCHED_NUMBERS_PER_BLOCK = 2**20
"""Numbers of a block whose rows are searched. A core reads such a block several times, so the block
must fit its cache."""

MIN_WIDE_QUERY_WIDTH = 512
"""Width of a query from which the matrix product dominates the time."""

MAX_NUMBERS_PER_DISTANCE = 2
"""Numbers per pair of a distance that needs no array of differences."""

MAX_DENSE_NUMBERS = 2**18
"""Numbers up to which the whole matrix fits one block, so that `dense` is as good."""

MAX_DENSE_EAGER_NUMBERS = 2**22
"""Numbers up to which the operations of the whole matrix run once, on a CPU. In blocks they would
run several times. They take long to start and to differentiate."""

MAX_DENSE_DEVICE_NUMBERS = 2**27
"""The most hidden units of all pairs of an additive score that `dense` computes on a GPU, where the
kernels need the range of the units. On an H200 that takes 2 ms, and the range 6 to 19 ms."""
MAX_DENSE_MASKED_PAIRS = 2**20
"""Pairs of query and key up to which the same holds under a mask, whose blocks may be skipped."""

MIN_DENSE_SHARE = 0.4
"""The same holds if blocks contain at least this share of the pairs."""

UNKNOWN_LENGTH_REASON = "a length is unknown until the graph runs, so there are no fixed blocks"


def unsupported_reason(call: Call) -> str | None:
    fw = call.fw
    if call.has_unknown_length:
        return UNKNOWN_LENGTH_REASON
    reason = call.weighting.missing_methods_reason(False)
    if reason is None and (reason := call.weighting.missing_methods_reason(True)):
        reason = reason if fw.needs_gradient(tree.array_leaves(fw, call)) else None
    if reason:
        return reason
    if any(fw.may_capture_arrays(function) for function in user_functions(call.score)):
        return (
            f"the score is a function that captures arrays, whose gradients {fw.name} would lose "
            "in blocks: make them fields of a frozen dataclass with __call__(query, key)"
        )
    return None


def slower_reason(call: Call) -> str | None:
    numbers = math.prod(call.lead) * call.n * call.m * numbers_per_pair(call)
    if isinstance(call.score, EvaluatedScore):
        return "the scores of the whole matrix exist already"
    if user_code.evaluates_scores(call):
        return (
            f"{call.fw.name} would compile the function of the score in every call; "
            "dense calls it once, on the whole matrix"
        )
    if call.fw.is_in_fixed_graph(call.query):
        return "a traced graph would contain every block; dense is shorter and fits any length"
    limit = max(MAX_DENSE_NUMBERS, call.fw.eager_block_numbers)
    if _has_slow_blocks(call) or _is_short_average(call):
        limit = max(limit, MAX_DENSE_EAGER_NUMBERS)
    if has_short_tanh(call):
        limit = numbers
    if numbers <= limit:
        return (
            f"the scores need only {format_count(numbers)} numbers, which fit one block: dense is "
            "as good"
        )
    return None


def _is_short_average(call: Call) -> bool:
    """Return whether the whole matrix needs one product on a CPU, as its weights are the mask."""
    fw = call.fw
    if not call.weighting.ignores_scores or fw.compiles_calls:
        return False
    return fw.device_block_numbers(call.query) is None and not isinstance(call.key, UnreadArray)


def has_short_tanh(call: Call) -> bool:
    """Return whether a device computes all hidden units of an additive score in a short time.

    A choice that depends on the range of the hidden units would take the host longer.
    """
    score: Any = call.score
    while isinstance(score, Modified | RelativeScore):
        score = score.score
    if not isinstance(score, Additive) or call.fw.device_block_numbers(call.query) is None:
        return False
    numbers = math.prod(call.lead) * call.n * call.m * numbers_per_pair(call)
    return numbers <= MAX_DENSE_DEVICE_NUMBERS


def _has_slow_blocks(call: Call) -> bool:
    """Return whether the operations of each block take long to start, on a CPU.

    A mask that skips many blocks saves more. NumPy computes blocks on all cores, and one operation
    on one core only; so it computes the searches of other frameworks.
    """
    if call.fw.name == "numpy" or call.fw.device_block_numbers(call.query) is not None:
        return False
    if scores.has_user_code(call.score):
        return True
    if call.fw.name != "torch" or _skips_many_blocks(call):
        return False
    is_lowered = not (call.score.is_linear or isinstance(call.lowering, str))
    if is_lowered and not isinstance(call.score, Additive):
        return False  # dot products in blocks are faster than the score itself
    learns = call.fw.needs_gradient(tree.array_leaves(call.fw, call))
    return learns or not call.weighting.needs_search


def _skips_many_blocks(call: Call) -> bool:
    """Return whether blocks save time under a mask. Values of a mask's arrays do not decide."""
    if call.rule is None:
        return False
    if math.prod(call.lead) * call.n * call.m > MAX_DENSE_MASKED_PAIRS:
        return True
    if not call.rule.is_relative:
        return False
    tiling = build_tiling(call, *block_size(call))
    visible = sum(rows.size * span.size for rows, keys in tiling for span in keys)
    return visible < MIN_DENSE_SHARE * call.n * call.m


def is_data_dependent(call: Call) -> bool:
    """Return whether values may have excluded a faster engine."""
    return call.score.needs_range


def describe(call: Call) -> str:
    rows, cols = block_size(call)
    return f"blocks of {rows} queries × {cols} keys"


def numbers_per_pair(call: Call) -> int:
    """Return how many numbers a score holds at once for one query and key.

    A user's function is measured once, if the framework can run it without data.
    """
    if isinstance(call.score, UserScore):
        key, fw = call.key, call.fw
        is_stored = isinstance(key, UnreadArray)
        if is_stored or fw.static_shape(key)[:-2] != call.lead:
            # A placeholder that needs no memory: the function receives keys with all heads.
            shape = key.shape if is_stored else (*call.lead, *fw.static_shape(key)[-2:])
            one = fw.full((1, shape[-1]), 0.0, call.query)
            key = fw.xp.broadcast_to(one, shape)
        measured = tree.measure_pair_numbers(fw, call.score.function, call.query, key)
        if measured is not None:
            return measured
    width = call.fw.static_shape(call.key)[-1]
    if call.score.uses_sum_differences and call.fw.has_sum_differences(call.query):
        return min(width, MAX_NUMBERS_PER_DISTANCE)
    return call.score.numbers_per_pair(width)


def run(call: Call, size: tuple[int, int] | None = None) -> tuple[Array, Array | None, None]:
    """Return the output and, if requested, the log-sum-exp; `size` overrides the block size."""
    call = calls.ensure_seed(call.upcast())
    limited = call.weighting if call.m is None else call.weighting.limit_to_keys(call.m)
    if type(call.m) is int and call.at is None and not isinstance(call.key, UnreadArray):
        limited = limited.simplify_for_keys(call.m)
    call = call if limited is call.weighting else replace(call, weighting=limited)
    if call.fw.has_empty_axis((*call.lead, call.n, call.m)):
        return *dense.run(load_all_rows(call))[:2], None
    fw = call.fw
    tiling = build_tiling(call, *(size or block_size(call)))
    if not any(keys for _, keys in tiling):
        return *dense.run(call)[:2], None
    has_user_code = scores.has_user_code(call.score) or masks.has_user_functions(call.rule)
    call = hoist_captured_arrays(call, tiling)
    leaves = tree.array_leaves(fw, call)
    learning = fw.needs_gradient(leaves)
    saved_scores = SavedScores.create_for(call) if learning and len(tiling) == 1 else None

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        fresh = tree.replace_arrays(fw, call, arrays)
        numpy_call = None if has_user_code else _as_numpy_call(fresh)
        if numpy_call is None:
            return _run_forward(fresh, tiling, learning, saved_scores)
        outputs, saved = _run_forward(numpy_call, tiling, learning, saved_scores)
        return tuple(map(fw.from_numpy_view, outputs)), tuple(map(fw.from_numpy_view, saved))

    def backward(arrays: Arrays, saved: Arrays, gradients: Arrays) -> Gradients:
        fresh = tree.replace_arrays(fw, call, arrays)
        return run_backward(fresh, tiling, saved, gradients, saved_scores)

    def reference(*arrays: Array) -> Arrays:
        out, lse, _ = dense.run(load_all_rows(tree.replace_arrays(fw, call, arrays)))
        return (out,) if lse is None else (out, lse)

    outputs = fw.run_differentiable(forward, backward, reference, leaves)
    return outputs[0], outputs[1] if call.wants_lse else None, None


def _as_numpy_call(call: Call) -> Call | None:
    """Return the call with NumPy views in place of its arrays, or None.

    This is for weightings that gather scores by a mask: NumPy does so several times faster than
    other frameworks, and on all cores.
    """
    fw = call.fw
    if fw.supports_masked_gather or not call.weighting.needs_search or call.weighting.has_lse:
        return None
    views = [fw.as_numpy_view(x) for x in tree.array_leaves(fw, call)]
    return None if any(x is None for x in views) else tree.replace_arrays(fw, call, views)


def has_few_queries(call: Call) -> bool:
    """Return whether there are so few queries that reading the keys takes most of the time."""
    return math.prod(call.lead) * call.n <= MAX_FEW_QUERIES and call.m > MAX_FEW_QUERIES


def hoist_captured_arrays(call: Call, tiling: Tiling) -> Call:
    """Return a call whose leaves include the arrays that the user's functions capture."""
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
    """Return queries and keys per block: about a square of MAX_NUMBERS_PER_BLOCK numbers."""
    each = max(math.prod(call.lead) * numbers_per_pair(call), 1)
    on_device = call.fw.device_block_numbers(call.query)
    large = on_device or call.fw.eager_block_numbers
    area = max((large or MAX_NUMBERS_PER_BLOCK) // each, 1)
    if isinstance(call.key, UnreadArray):  # as many queries as possible share what is read
        rows = max(min(call.n, area // 512), 1)
        return rows, max(
            min(area // rows, 4 * MAX_KEY_NUMBERS_PER_READ // max(call.key.shape[-1], 1)), 512
        )
    if large:  # few large operations: a launch takes longer than a small block
        cols = max(min(call.m, area), 1)
        rows = max(min(call.n, area // cols), 1)
        if call.rule is not None:  # as below, but in blocks that fill the device
            start, end = call.rule.key_extent(Span(call.n // 2, 1), call.n, call.m)
            side = max(end - start, 1024)
            cols = cols if on_device else min(cols, side)
            rows = min(max(min(call.n, area // cols), 1), side)
        return rows, cols
    if call.weighting.needs_search and call.m <= area:  # whole rows in one block
        numbers = each * call.n * call.m
        parts = -(
            -numbers
            // (
                MAX_SEARCHED_NUMBERS_PER_BLOCK
                if call.fw.name in ("numpy", "torch")
                else MAX_NUMBERS_PER_BLOCK
            )
        )
        # The same number of blocks for every core.
        parts += min(-parts % threads.CORE_COUNT, numbers // MAX_DENSE_NUMBERS)
        return max(-(-call.n // max(parts, 1)), 1), max(call.m, 1)
    side = 2 ** int(math.log2(math.sqrt(area))) if area > 1 else 1
    wide = call.fw.static_shape(call.query)[-1] >= MIN_WIDE_QUERY_WIDTH
    if wide and call.fw.name == "torch":  # larger matrix products run faster
        side, area = 4 * side, 2 * area
    rows = max(min(side, 1024 if wide else 256, call.n), 1)
    if call.rule is not None:
        # Queries of a block should share most of their keys.
        start, end = call.rule.key_extent(Span(call.n // 2, 1), call.n, call.m)
        rows = min(rows, max(end - start, 64))
    cols = max(min(area // rows, call.m), 1)
    if has_few_queries(call):
        cols = min(
            cols, max(MAX_KEY_NUMBERS_PER_READ // max(call.fw.static_shape(call.key)[-1], 1), 512)
        )
    return rows, cols


def split_spans(fw: Framework, total: int, size: int, start: int = 0) -> list[Span]:
    """Return spans that cover start … total − 1.

    If the framework needs spans of equal size, the last one overlaps the one before.
    """
    size = max(min(size, total - start), 1)
    starts = range(start, total, size)
    if not fw.needs_equal_spans:
        return [Span(at, min(size, total - at)) for at in starts]
    return [Span(min(at, total - size), size, at if total % size else None) for at in starts]


_TILINGS: dict[tuple[Any, ...], Tiling] = create_table("engines.streaming_tilings")
MAX_CACHED_TILINGS = 64


def build_tiling(call: Call, rows: int, cols: int) -> Tiling:
    """Return the blocks that the mask does not exclude, and where the mask must be evaluated.

    Tilings of masks on distances are cached, because loops request them again and again.
    """
    fw, rule, n, m = call.fw, call.rule, call.n, call.m
    if isinstance(call.key, UnreadArray):
        key_spans: Any = call.key.rows.iter_spans(cols)
        return [(Span(at, min(rows, n - at)), key_spans) for at in range(0, n, rows)]
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
            spans = [span for span in grid if span.start < end and start < span.start + span.size]
        else:
            spans = split_spans(fw, end, cols, start)
        verdicts = zip(spans, rule.block_verdicts(queries, spans, n, m), strict=True)
        return [
            span._replace(is_unmasked=verdict is True)
            for span, verdict in verdicts
            if verdict is not False
        ]

    return [(span, visible_spans(span)) for span in split_spans(fw, n, rows)]


# Passes over the blocks of one span of queries


class BlockOperands(NamedTuple):
    """The arrays of one block; `key_terms` are those of stored keys, if their score has any."""

    block: Any
    live: LiveMask
    query: Array
    key: Array
    bias: Array | None
    key_terms: Array | None = None

    def compute_scores(self, call: Call) -> Array:
        """Return the scaled scores of the block."""
        return calls.compute_scores(
            call, self.query, self.key, self.bias, self.block, self.key_terms
        )


def load_operands(call: Call, rows: Span, cols: Any, keeps_masked: bool = False) -> BlockOperands:
    """Return the arrays of a block. Masked keys and queries are 0: their NaN must not spread.

    With `keeps_masked` the keys are left as they are, which saves a pass over them.
    """
    fw = call.fw
    block = calls.make_block(call, rows, cols)
    key_terms = None
    if isinstance(cols, RowSpan):
        live, stored = cols.allowed_mask(fw, call.query), cols.read_keys()
        key = to_framework_array(fw, stored, call.query)
        dtype = fw.dtype_name(call.query)
        key_terms = load_key_terms(call.key.rows, call.score, cols, stored, dtype)
        if key_terms is not None:
            key_terms = to_framework_array(fw, key_terms, call.query)
    else:
        live, key = calls.compute_live_pairs(call, block), fw.slice_span(call.key, cols, -2)
    key = key if keeps_masked else calls.zero_masked_rows(call, key, live)
    bias = call.bias
    if bias is not None:
        bias = fw.slice_span(fw.slice_span(bias, rows, -2), cols, -1)
    query = calls.zero_masked_queries(call, fw.slice_span(call.query, rows, -2), live)
    return BlockOperands(block, live, query, key, bias, key_terms)


def load_value(call: Call, cols: Any, live: LiveMask) -> Array:
    """Return the values of a block, with 0 in rows that no query may see."""
    fw = call.fw
    stored = isinstance(cols, RowSpan)
    value = (
        to_framework_array(fw, cols.read_values(), call.query)
        if stored
        else fw.slice_span(call.value, cols, -2)
    )
    return calls.zero_masked_rows(call, value, live, is_value=True)


class BlockPasses:
    """The passes over the key blocks of one span of queries.

    Scores are cached between passes if there is one block, or if stored rows are searched.
    """

    def __init__(self, call: Call, rows: Span, keys: Any, saved_scores: SavedScores | None = None):
        self.call, self.rows, self.keys, self.saved_scores = call, rows, keys, saved_scores
        self.weighting = weighting_for_rows(call.fw, call.weighting, rows, call.n)
        self.template = call.fw.full((*call.lead, rows.size, 1), 0.0, call.query)
        self._reduce = choose_loops(call).reduce_spans
        self._is_out_of_core = isinstance(keys, RowSpans)
        one = isinstance(keys, list) and len(keys) == 1
        self._caches_scores = one or (self._is_out_of_core and call.weighting.needs_search)
        self._score_cache: dict[int, tuple[Array, LiveMask, Array, Any]] = {}

    def _score_block(self, cols: Any) -> tuple[Array, LiveMask, Array, Any]:
        call, at = self.call, cols.start if self._is_out_of_core else 0
        if at in self._score_cache:
            return self._score_cache[at]
        # One row of stored keys serves few queries, whose scores are cheaper to fill.
        fills_scores = self._is_out_of_core and not scores.has_user_code(call.score)
        part = load_operands(call, self.rows, cols, keeps_masked=fills_scores)
        s = part.compute_scores(calls.slice_weighting_rows(call, self.rows))
        s = call.fw.fill_unless(s, part.live) if fills_scores else s
        scored = s, part.live, part.block.k, part.block
        if self._caches_scores:
            self._score_cache[at] = scored
        return scored

    def fold(self, lift: Callable[..., State], merge: MergeFunction, init: Any) -> State:
        """Reduce the scores of all blocks to one state. `Weighting.find_threshold` calls it."""

        def lift_block(cols: Any) -> State:
            return lift(*self._score_block(cols)[:3])

        return self._reduce(lift_block, merge, init(self.template), self.keys)  # type: ignore[no-any-return]

    def state(self, row_facts: State) -> State:
        """Return the weighting's state over all keys, given the result of `find_threshold`."""
        call, weighting = self.call, self.weighting

        def lift_values(cols: Any) -> State:
            s, live, k, block = self._score_block(cols)
            if self.saved_scores is not None:
                self.saved_scores.add_block(cols.start, s)
            value = calls.repeat_shared_heads(call, load_value(call, cols, live))
            return weighting.partial_state(
                s, live, k, row_facts, value, calls.dropout_factors(call, block)
            )

        start = weighting.init(self.template, call.fw.static_shape(call.value)[-1])
        return self._reduce(lift_values, weighting.merge, start, self.keys)  # type: ignore[no-any-return]


def compute_output(blocks: Any, weighting: Weighting) -> tuple[Array, State, Array | None]:
    """Run both passes and `Weighting.finish`; `blocks` has the methods of `BlockPasses`.

    Return the output, the row facts and the centre.
    """
    threshold = weighting.find_threshold(blocks.fold)
    out, row_facts, centre = weighting.finish(blocks.state(threshold), threshold)
    weighting.check_row_state(row_facts)
    return out, row_facts, centre


# Forward


def _run_forward(
    call: Call, tiling: Tiling, learning: bool, saved_scores: SavedScores | None
) -> tuple[State, State]:
    """Return the outputs, and the row facts that the backward pass needs."""
    fw, loops = call.fw, choose_loops(call)
    unscaled = replace(call, weighting=Weighting())
    needs_row_facts = learning or call.wants_lse or call.weighting.raises_on_empty

    def pool_rows(rows: Span, keys: Any) -> Arrays:
        weighting = weighting_for_rows(fw, call.weighting, rows, call.n)
        is_one_block = isinstance(keys, list) and len(keys) == 1
        if is_one_block and call.weighting.needs_search and not needs_row_facts:
            part = load_operands(call, rows, keys[0])
            s = part.compute_scores(unscaled)
            value = calls.repeat_shared_heads(call, load_value(call, keys[0], part.live))
            dropout_mask = calls.dropout_factors(call, part.block)
            return (weighting.pool_whole_rows(s, part.live, part.block.k, value, dropout_mask),)
        passes = BlockPasses(call, rows, keys, saved_scores)
        threshold = weighting.find_threshold(passes.fold)
        out, row_facts, centre = weighting.finish(passes.state(threshold), threshold)
        if not needs_row_facts:
            return (out,)
        return out, *row_facts, *(() if centre is None else (centre,))

    out, *saved = loops.map_tiles(pool_rows, tiling)
    if call.weighting.raises_on_empty:
        call.weighting.check_row_state(tuple(saved))
    outputs = (out, call.weighting.lse_from_state(tuple(saved))) if call.wants_lse else (out,)
    return outputs, (*saved, *(() if saved_scores is None else saved_scores.take_blocks()))


# Backward


def run_backward(
    call: Call,
    tiling: Tiling,
    saved: Sequence[Array],
    gradients: Sequence[Array],
    saved_scores: SavedScores | None,
) -> Gradients:
    """Return one gradient for each leaf of the call."""
    saved, known_scores = (saved, {}) if saved_scores is None else saved_scores.split_saved(saved)
    fw, weighting, loops = call.fw, call.weighting, choose_loops(call)
    parameters = tree.array_leaves(fw, (call.score, weighting))
    stored = isinstance(call.key, UnreadArray)

    def score_block(part: BlockOperands, rows: Span) -> tuple[Array, Callable[[Array], Gradients]]:
        """Return the scores of a block and their vjp to the leaves of `inputs`."""
        inputs = part.query, None if stored else part.key, part.bias, call.score, weighting

        def compute_block_scores(*arrays: Array) -> Array:
            query, key, bias, score, weighting = tree.replace_arrays(fw, inputs, arrays)
            changed = replace(
                call, score=score, weighting=weighting_for_rows(fw, weighting, rows, call.n)
            )
            operands = part._replace(query=query, key=part.key if stored else key, bias=bias)
            return operands.compute_scores(changed)

        return fw.vjp(compute_block_scores, *tree.array_leaves(fw, inputs))

    def weigh_block(rows: Span, *block: Any) -> tuple[Array, Callable[[Array], Gradients] | None]:
        """Return the weights of a block, and their vjp to the weighting's arrays or None."""
        if not weighting.has_learned_shape:
            return weighting_for_rows(fw, weighting, rows, call.n).block_weights(*block), None

        def compute_block_weights(*arrays: Array) -> Array:
            changed = tree.replace_arrays(fw, weighting, arrays)
            return weighting_for_rows(fw, changed, rows, call.n).block_weights(*block)

        return fw.vjp(compute_block_weights, *tree.array_leaves(fw, weighting))

    def add_gradient(total: Any, new: Array | None, rows: Span, cols: Span | None = None) -> Any:
        return total if new is None else fw.add_to_span(total, new, rows, cols)

    def sweep_keys(totals: Any, rows: Span, keys: Any) -> Any:
        row_facts = tuple(fw.slice_span(x, rows, -2) for x in saved)
        output_gradient = fw.slice_span(gradients[0], rows, -2)
        centre = fw.full((*call.lead, rows.size, 1), 0.0, call.query)
        if weighting.needs_centre:
            row_facts, row_centre = row_facts[:-1], row_facts[-1]
            centre = fw.xp.sum(row_centre * output_gradient, axis=-1, keepdims=True)
        if call.wants_lse:
            centre = centre - fw.slice_span(gradients[1], rows, -2)

        def add_block(totals: Any, cols: Span) -> Any:
            dq, dk, dv, dbias, dparameters = totals
            part = load_operands(call, rows, cols)
            live, dropout_mask = part.live, calls.dropout_factors(call, part.block)
            if known_scores and cols.start in known_scores:  # a traced start has no hash
                s = known_scores[cols.start]
                score_vjp = query_gradient_function(call, part.query, part.key)
            elif weighting.is_differentiable:
                s, score_vjp = score_block(part, rows)
            else:
                s = part.compute_scores(call)
            weight, weight_vjp = weigh_block(rows, s, live, part.block.k, row_facts)
            value = load_value(call, cols, live)
            if not stored:
                factors = weighting.value_gradient_weights(weight)
                factors = factors if dropout_mask is None else factors * dropout_mask
                new_dv = fw.xp.matmul(fw.xp.matrix_transpose(factors), output_gradient)
                dv = fw.add_to_span(
                    dv, calls.sum_shared_heads(call, new_dv, value.shape[:-2]), cols, None
                )
            if weighting.is_differentiable:
                shared = calls.repeat_shared_heads(call, value)
                weight_gradient = fw.xp.matmul(output_gradient, fw.xp.matrix_transpose(shared))
                weight_gradient = (
                    weight_gradient if dropout_mask is None else weight_gradient * dropout_mask
                )
                ds = weighting_for_rows(fw, weighting, rows, call.n).score_gradient(
                    s, weight, weight_gradient, centre, row_facts
                )
                new = iter(score_vjp(fw.fill_unless(ds, live)))
                dq = add_gradient(dq, next(new), rows)
                dk = dk if stored else add_gradient(dk, next(new), cols)
                dbias = dbias if call.bias is None else add_gradient(dbias, next(new), rows, cols)
                shape_gradients = (
                    ()
                    if weight_vjp is None
                    else weight_vjp(fw.fill_unless(weight_gradient - centre, live))
                )
                # The weighting's arrays are the last of the parameters.
                padding = [None] * (len(dparameters) - len(shape_gradients))
                parts = zip(dparameters, new, [*padding, *shape_gradients], strict=True)
                dparameters = [sum(y for y in x if y is not None) for x in parts]
            return [dq, dk, dv, dbias, dparameters]

        totals = loops.fold_spans(add_block, totals, keys)
        dparameters = add_sink_gradients(call, rows, weigh_block, centre, row_facts, totals[-1])
        return [*totals[:-1], dparameters]

    unused = fw.full((1, 1), 0.0, call.query)
    start = [
        fw.new_accumulator(call.query),
        fw.new_accumulator(unused if stored else call.key),
        fw.new_accumulator(unused if stored else call.value),
        fw.new_accumulator(unused if call.bias is None else call.bias),
        [fw.full(fw.static_shape(x), 0.0, x) for x in parameters],
    ]
    dq, dk, dv, dbias, dparameters = loops.fold_tiles(sweep_keys, start, tiling)
    return _order_gradients(
        call, [fw.accumulator_total(x) for x in (dq, dk, dv, dbias)], dparameters
    )


def _order_gradients(call: Call, main: list[Array], parameters: list[Array]) -> Gradients:
    """Return the gradients in the order of the call's leaves; masks and seeds have none."""
    dq, dk, dv, dbias = main
    stored = isinstance(call.key, UnreadArray)
    out: list[Array | None] = [dq, *(() if stored else (dk, dv)), *parameters]
    out += [None] * len(tree.array_leaves(call.fw, call.rule))
    out += [] if call.bias is None else [dbias]
    return (*out, *[None] * len(tree.array_leaves(call.fw, call.seed)))
