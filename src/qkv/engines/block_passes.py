"""The passes over one span of queries: its blocks scored, searched and lifted into one state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.engines.out_of_core.backward import SavedScores, choose_loops
from qkv.frameworks.stored_rows import RowSpan, RowSpans, to_framework_array
from qkv.util.types import Array, LiveMask, MergeFunction, Span
from qkv.weightings import State, Weighting
from qkv.weightings.base import weighting_for_rows


class BlockOperands(NamedTuple):
    """The arrays of one block."""

    block: Any
    live: LiveMask
    query: Array
    key: Array
    bias: Array | None


def load_operands(call: Call, rows: Span, cols: Any) -> BlockOperands:
    fw = call.fw
    block = calls.make_block(call, rows, cols)
    if isinstance(cols, RowSpan):
        live, key = (
            cols.allowed_mask(fw, call.query),
            to_framework_array(fw, cols.read_keys(), call.query),
        )
    else:
        live, key = calls.compute_live_pairs(call, block), fw.slice_span(call.key, cols, -2)
    key = calls.zero_dead_rows(call, key, live)
    bias = call.bias
    if bias is not None:
        bias = fw.slice_span(fw.slice_span(bias, rows, -2), cols, -1)
    query = calls.zero_dead_queries(call, fw.slice_span(call.query, rows, -2), live)
    return BlockOperands(block, live, query, key, bias)


def load_value(call: Call, cols: Any, live: LiveMask) -> Array:
    fw = call.fw
    stored = isinstance(cols, RowSpan)
    value = (
        to_framework_array(fw, cols.read_values(), call.query)
        if stored
        else fw.slice_span(call.value, cols, -2)
    )
    return calls.zero_dead_rows(call, value, live)


class BlockPasses:
    """Some queries and their keys, block by block.

    Where rows are searched, or are one block, no pass scores a block again.
    """

    def __init__(self, call: Call, rows: Span, keys: Any, held: SavedScores | None = None):
        self.call, self.rows, self.keys, self.saved_scores = call, rows, keys, held
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
        part = load_operands(call, self.rows, cols)
        s = calls.compute_scores(calls.slice_weighting_rows(call, self.rows), *part[2:], part.block)
        found = s, part.live, part.block.k, part.block
        if self._caches_scores:
            self._score_cache[at] = found
        return found

    def fold(self, lift: Callable[..., State], merge: MergeFunction, init: Any) -> State:
        """What `Weighting.search` asks of the scores."""

        def lift_block(cols: Any) -> State:
            return lift(*self._score_block(cols)[:3])

        return self._reduce(lift_block, merge, init(self.template), self.keys)  # type: ignore[no-any-return]

    def state(self, found: State) -> State:
        """All keys in the weighting's state, once the search has found what it must know."""
        call, weighting = self.call, self.weighting

        def lift_values(cols: Any) -> State:
            s, live, k, block = self._score_block(cols)
            if self.saved_scores is not None:
                self.saved_scores.add_block(cols.start, s)
            value = calls.repeat_shared_heads(call, load_value(call, cols, live))
            return weighting.partial_state(
                s, live, k, found, value, calls.dropout_factors(call, block)
            )

        start = weighting.init(self.template, call.fw.static_shape(call.value)[-1])
        return self._reduce(lift_values, weighting.merge, start, self.keys)  # type: ignore[no-any-return]


def compute_output(blocks: Any, weighting: Weighting) -> tuple[Array, State, Array | None]:
    """What `Weighting.finish` gives of rows whose blocks are folded and lifted by the methods of
    `BlockPasses`, once they are checked."""
    found = weighting.find_threshold(blocks.fold)
    out, known, centre = weighting.finish(blocks.state(found), found)
    weighting.check_row_state(known)
    return out, known, centre
