"""The passes over one span of queries: its blocks scored, searched and lifted into one state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from qkv.arrays.rows import Cut, Cuts, taken
from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.engines.read import Held, loops_of
from qkv.types import Array, Live, Merge, Span
from qkv.weightings import State, Weighting
from qkv.weightings.base import of_rows


class Operands(NamedTuple):
    """The arrays of one block."""

    block: Any
    live: Live
    query: Array
    key: Array
    bias: Array | None


def operands(call: Call, rows: Span, cols: Any) -> Operands:
    fw = call.fw
    block = calls.place(call, rows, cols)
    if isinstance(cols, Cut):
        live, key = cols.counts(fw, call.query), taken(fw, cols.key(), call.query)
    else:
        live, key = calls.live(call, block), fw.cut(call.key, cols, -2)
    key = calls.clean(call, key, live)
    bias = call.bias
    if bias is not None:
        bias = fw.cut(fw.cut(bias, rows, -2), cols, -1)
    query = calls.clean_queries(call, fw.cut(call.query, rows, -2), live)
    return Operands(block, live, query, key, bias)


def value_of(call: Call, cols: Any, live: Live) -> Array:
    fw = call.fw
    stored = isinstance(cols, Cut)
    value = taken(fw, cols.value(), call.query) if stored else fw.cut(call.value, cols, -2)
    return calls.clean(call, value, live)


class Passes:
    """Some queries and their keys, block by block.

    Where rows are searched, or are one block, no pass scores a block again.
    """

    def __init__(self, call: Call, rows: Span, keys: Any, held: Held | None = None):
        self.call, self.rows, self.keys, self.held = call, rows, keys, held
        self.weighting = of_rows(call.fw, call.weighting, rows, call.n)
        self.template = call.fw.full((*call.lead, rows.size, 1), 0.0, call.query)
        self._reduce = loops_of(call).reduce
        self._stored = isinstance(keys, Cuts)
        one = isinstance(keys, list) and len(keys) == 1
        self._keeps = one or (self._stored and call.weighting.searches)
        self._known: dict[int, tuple[Array, Live, Array, Any]] = {}

    def _scored(self, cols: Any) -> tuple[Array, Live, Array, Any]:
        call, at = self.call, cols.start if self._stored else 0
        if at in self._known:
            return self._known[at]
        part = operands(call, self.rows, cols)
        s = calls.scores(calls.some_rows(call, self.rows), *part[2:], part.block)
        found = s, part.live, part.block.k, part.block
        if self._keeps:
            self._known[at] = found
        return found

    def fold(self, lift: Callable[..., State], merge: Merge, init: Any) -> State:
        """What `Weighting.search` asks of the scores."""

        def lifted(cols: Any) -> State:
            return lift(*self._scored(cols)[:3])

        return self._reduce(lifted, merge, init(self.template), self.keys)  # type: ignore[no-any-return]

    def state(self, found: State) -> State:
        """All keys in the weighting's state, once the search has found what it must know."""
        call, weighting = self.call, self.weighting

        def lift(cols: Any) -> State:
            s, live, k, block = self._scored(cols)
            if self.held is not None:
                self.held.put(cols.start, s)
            value = calls.share_heads(call, value_of(call, cols, live))
            return weighting.lift(s, live, k, found, value, calls.dropped(call, block))

        start = weighting.init(self.template, call.fw.shape(call.value)[-1])
        return self._reduce(lift, weighting.merge, start, self.keys)  # type: ignore[no-any-return]


def finished(blocks: Any, weighting: Weighting) -> tuple[Array, State, Array | None]:
    """What `Weighting.finish` gives of rows whose blocks are folded and lifted by the methods of
    `Passes`, once they are checked."""
    found = weighting.search(blocks.fold)
    out, known, centre = weighting.finish(blocks.state(found), found)
    weighting.check(known)
    return out, known, centre
