"""Keys that several processes hold: each folds its own into the weighting's state, and states
travel.

Where the queries are the same everywhere, states are merged over all processes, and on the way
back the gradients of the queries and of the score's arrays are summed. Where the queries are
sharded too, they go round a ring with their states, each process adds what its keys say, and on
the way back they go round with their gradients. Keys and values never leave their process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from qkv import masks
from qkv.arrays import tree
from qkv.arrays.base import Tiling
from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.engines.choose import choose
from qkv.engines.passes import Passes
from qkv.engines.streaming import BLOCK, backward_of, block_size, footprint, hoist, tiling_of
from qkv.errors import CombinationError
from qkv.scores import is_open
from qkv.types import Array, Arrays, At, Slopes, Span
from qkv.weightings import Softmax, State
from qkv.weightings.base import by_row

WIDE = 256
"""Keys at a time for rows that are searched together."""


ONE = Span(0, 1)


class Across(Protocol):
    """The processes that hold the keys; every method is called by all of them in one order."""

    rank: int
    rows: Sequence[int]
    """How many queries each process holds; empty where all hold the same."""

    def merged(self, state: State, merge: Callable[[State, State], State]) -> State:
        """The states of all, merged in the order of the processes, on each of them."""
        ...

    def summed(self, arrays: Sequence[Array]) -> Arrays:
        """The sums over all processes, on each of them."""
        ...

    def passed(self, arrays: Sequence[Array], rows: int) -> Arrays:
        """What the process before this one passes on, arrays (…, rows, ·) like these."""
        ...

    def gathered(self, array: Array) -> Array:
        """The rows (…, n_i, ·) of all, one process after the other."""
        ...


def run(call: Call, across: Across) -> tuple[Array, Array | None]:
    """The output and, where wanted, the log-sum-exp."""
    call = calls.seeded(call)
    fw = call.fw
    if across.rows and any(by_row(x, call.n) for x in tree.leaves(fw, call.weighting)):
        raise CombinationError(
            "weighting: an array of a number for each query cannot travel with sharded queries: "
            "pass the same queries everywhere, or one number for each head"
        )
    call = _hoisted(call)
    way = (Together if call.weighting.searches else Ring) if across.rows else Same
    leaves = tree.leaves(fw, call)
    steps = way(across, fw.needs_gradient(leaves))

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        fresh = tree.rebuild(fw, call, arrays)
        out, kept = steps.forward(fresh)
        if call.weighting.strict:
            call.weighting.check(kept)
        return ((out, call.weighting.lse(kept)) if call.wants_lse else (out,)), kept

    def backward(arrays: Arrays, kept: Arrays, gradients: Arrays) -> Slopes:
        return tuple(steps.backward(tree.rebuild(fw, call, arrays), kept, gradients))

    def reference(*arrays: Array) -> Arrays:
        raise CombinationError(
            "keys that several processes hold have first derivatives alone: for second ones, "
            "gather the keys and call attend"
        )

    outputs = fw.differentiable(forward, backward, reference, leaves)
    return outputs[0], outputs[1] if call.wants_lse else None


def _hoisted(call: Call) -> Call:
    """The call with the arrays of the caller's functions among its leaves, on a process without
    queries or keys too: for those, rows of zeros are looked at."""
    fw = call.fw

    def some(x: Array) -> Array:
        shape = fw.shape(x)
        return x if shape[-2] else fw.full((*shape[:-2], 1, shape[-1]), 0.0, x)

    found = hoist(replace(call, query=some(call.query), key=some(call.key)), [(ONE, [ONE])])
    return replace(call, score=found.score, rule=found.rule)


@dataclass(eq=False)
class Same:
    """Queries that are the same on all processes."""

    across: Across
    learning: bool
    back: Back | None = None
    """Waits for the gradients, so that nothing runs twice."""

    def forward(self, call: Call) -> tuple[Array, State]:
        single = alone(call) if self.learning else None
        if single is None:
            found, state = folded(call, self.across)
        else:
            found, (state, self.back) = (), opened(single)
        return finished(call, self.across.merged(state, call.weighting.merge), found)

    def backward(self, call: Call, kept: State, gradients: Arrays) -> list[Array | None]:
        slopes = pulled(call, kept, gradients, self.back)
        learned = [0, *range(3, 3 + len(tree.leaves(call.fw, (call.score, call.weighting))))]
        totals = iter(self.across.summed([slopes[i] for i in learned]))
        return [next(totals) if i in learned else x for i, x in enumerate(slopes)]


class Together(Same):
    """Sharded queries whose rows must be searched: a search asks all keys several times, so all
    processes look at all queries together."""

    def whole(self, call: Call) -> Call:
        assert call.at is not None
        query = self.across.gathered(call.query)
        return replace(call, query=query, at=call.at._replace(row=0))

    def own(self, call: Call, x: Array) -> Array:
        assert call.at is not None
        return x[..., call.at.row : call.at.row + call.n, :]

    def forward(self, call: Call) -> tuple[Array, State]:
        out, kept = super().forward(self.whole(call))
        return self.own(call, out), tuple(self.own(call, x) for x in kept)

    def backward(self, call: Call, kept: State, gradients: Arrays) -> list[Array | None]:
        every, whole = self.across.gathered, self.whole(call)
        kept, gradients = tuple(map(every, kept)), tuple(map(every, gradients))
        slopes = pulled(whole, kept, gradients)
        slopes[0] = self.own(call, self.across.summed(slopes[:1])[0])
        return slopes


@dataclass(eq=False)
class Ring:
    """Sharded queries that travel from process to process until they are home again."""

    across: Across
    learning: bool

    def visits(self, call: Call) -> list[At]:
        """Where the queries lie that come by, one's own first."""
        assert call.at is not None
        rows, rank = self.across.rows, self.across.rank
        owners = [(rank - step) % len(rows) for step in range(len(rows))]
        return [call.at._replace(row=sum(rows[:owner])) for owner in owners]

    def guest(self, call: Call, query: Array, at: At) -> Call:
        """The call of the queries that lie there."""
        bias = call.bias
        if bias is not None:
            bias = call.fw.cut(bias, Span(at.row, call.fw.shape(query)[-2]), -2)
        return replace(call, query=query, bias=bias, at=at)

    def due(self, step: int) -> int:
        """How many rows the next guests are."""
        rows = self.across.rows
        return rows[(self.across.rank - step - 1) % len(rows)]

    def forward(self, call: Call) -> tuple[Array, State]:
        query, state = call.query, None
        visits = self.visits(call)
        for step, at in enumerate(visits):
            _, mine = folded(self.guest(call, query, at), None)
            state = mine if state is None else call.weighting.merge(state, mine)
            home = step == len(visits) - 1
            travelling = state if home else (query, *state)
            arrived = self.across.passed(travelling, self.due(step))
            query, state = (call.query, arrived) if home else (arrived[0], arrived[1:])
        assert state is not None
        return finished(call, state, ())

    def backward(self, call: Call, kept: State, gradients: Arrays) -> list[Array | None]:
        fw, visits = call.fw, self.visits(call)
        counts = len(kept), len(gradients)
        query, dquery = call.query, fw.full(fw.shape(call.query), 0.0, wide(call, call.query))
        along = (*kept, *gradients)
        total: list[Array | None] | None = None
        for step, at in enumerate(visits):
            guest = self.guest(call, query, at)
            known, due = along[: counts[0]], along[counts[0] :]
            first, *rest = pulled(guest, known, due)
            dquery = dquery + first
            rest = self.spread(call, at, rest)
            total = rest if total is None else [*map(_sum, total, rest)]
            home = step == len(visits) - 1
            travelling = (dquery,) if home else (dquery, query, *along)
            dquery, *others = self.across.passed(travelling, self.due(step))
            query, along = (others[0], tuple(others[1:])) if others else (query, along)
        assert total is not None
        return [dquery, *total]

    def spread(self, call: Call, at: At, slopes: Sequence[Array | None]) -> list[Array | None]:
        """The gradients with that of the guests' rows of a bias among all its rows."""
        if call.bias is None:
            return list(slopes)
        fw = call.fw
        place = -1 - len(tree.leaves(fw, call.seed))
        some = slopes[place]
        whole = fw.accumulator(call.bias)
        if some is not None:
            whole = fw.add_at(whole, some, Span(at.row, some.shape[-2]), None)
        return [fw.total(whole) if i == len(slopes) + place else x for i, x in enumerate(slopes)]


def _sum(one: Array | None, two: Array | None) -> Array | None:
    return two if one is None else one if two is None else one + two


def tiling(call: Call) -> Tiling:
    """The blocks of the keys that are here; rows that are searched are laid out alike everywhere,
    as all processes search them together."""
    if call.rule is not None:
        call = replace(call, rule=masks.seen(call.rule, call.at))
    if not call.weighting.searches:
        return tiling_of(call, *block_size(call))
    each = max(math.prod(call.lead) * footprint(call), 1)
    rows = max(min(8 * BLOCK // (each * WIDE), call.n), 1)
    cols = max(8 * BLOCK // (each * rows), WIDE)
    return tiling_of(call, rows, cols)


def folded(call: Call, across: Across | None) -> tuple[State, State]:
    """What a search over all processes has found, and the state of the keys that are here."""
    single = alone(call)
    if single is not None:
        return (), _state(single, *choose(single).run(single)[:2])
    call = call.precise()
    counts: set[int] = set()

    def pooled(rows: Span, keys: list[Span]) -> Arrays:
        passes = Passes(call, rows, keys)

        def fold(lift: Any, merge: Any, init: Any) -> State:
            assert across is not None
            return across.merged(passes.fold(lift, merge, init), merge)

        found = passes.weighting.search(fold)
        counts.add(len(found))
        return *found, *passes.state(found)

    everything = call.fw.tiled(pooled, tiling(call) or [(Span(0, 0), [])])
    (count,) = counts
    return everything[:count], everything[count:]


def pulled(
    call: Call, kept: State, gradients: Arrays, back: Back | None = None
) -> list[Array | None]:
    """One gradient for each array of the call, from the keys that are here."""
    if back is None:
        single = alone(call)
        back = None if single is None else opened(single)[1]
    if back is None:
        call = call.precise()
        return list(backward_of(call, tiling(call), kept, gradients, None))
    return [*back(kept, gradients), *[None] * len(tree.leaves(call.fw, call.rule))]


def finished(call: Call, state: State, found: State) -> tuple[Array, State]:
    """The output, and what is kept of each row for the way back."""
    out, known, centre = call.weighting.finish(state, found)
    return out, (*known, *(() if centre is None else (centre,)))


Back = Callable[[State, Arrays], Arrays]
"""From what is kept of the whole rows, and L's gradients, to the gradients of a call's arrays."""


def alone(call: Call) -> Call | None:
    """The call without its place in a larger one; None where something asks for that."""
    placed = call.dropout or call.bias is not None or is_open(call.score)
    if type(call.weighting) is not Softmax or placed or 0 in (*call.lead, call.n, call.m):
        return None
    rule, at = call.rule, call.at
    if rule is not None and at is not None:
        inside = masks.seen(rule, at).verdict(Span(0, call.n), Span(0, call.m), call.n, call.m)
        if inside is not True and not (masks.is_causal(rule) and at.row == at.col):
            return None
        rule = None if inside else rule
    return replace(call, rule=rule, at=None, wants_lse=True)


def opened(call: Call) -> tuple[State, Back]:
    """The same, and the way back through it."""
    fw, leaves = call.fw, tree.leaves(call.fw, call)

    def function(*arrays: Array) -> Array:
        fresh = tree.rebuild(fw, call, arrays)
        found = choose(fresh).run(fresh)
        return fw.xp.concat([wide(call, x) for x in found[:2]], axis=-1)

    found, pull = fw.vjp(function, *leaves)
    own, lse = found[..., :-1], found[..., -1:]

    def back(kept: State, gradients: Arrays) -> Arrays:
        top, total, out = kept
        share = fw.xp.exp(lse - fw.finite(top)) / fw.nonzero(total)
        bent = fw.row_sum((own - out) * gradients[0])
        if len(gradients) > 1:
            bent = bent + gradients[1]
        slopes = pull(fw.xp.concat([share * gradients[0], share * bent], axis=-1))
        pairs = ((wide(call, x), slope) for x, slope in zip(leaves, slopes, strict=True))
        return tuple(
            fw.full(fw.shape(x), 0.0, x) if slope is None else wide(call, slope)
            for x, slope in pairs
        )

    return _state(call, own, lse), back


def _state(call: Call, out: Array | None, lse: Array | None) -> State:
    fw = call.fw
    assert out is not None and lse is not None
    lse = wide(call, lse)
    return lse, fw.astype(lse > -float("inf"), fw.dtype(lse)), wide(call, out)


def wide(call: Call, x: Array) -> Array:
    """x in the precision that sums run in."""
    fw = call.fw
    return fw.astype(x, "float32") if fw.dtype(x) in ("float16", "bfloat16") else x
