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
from qkv.arrays import threads, tree
from qkv.arrays.base import Framework, Tiling
from qkv.arrays.rows import Cuts, Unread
from qkv.engines import call as calls
from qkv.engines import dense
from qkv.engines.call import Call
from qkv.engines.passes import Operands, Passes, operands, value_of
from qkv.engines.read import Held, loops_of, pulled, whole
from qkv.errors import count
from qkv.scores import functions_in
from qkv.types import Array, Arrays, Slopes, Span
from qkv.weightings import State, Weighting
from qkv.weightings.base import of_rows

NAME = "streaming"
WIDENS = True

BLOCK = 2**21
"""Numbers held at once by a block's scores, or by what a score makes on the way to them."""

FEW = 64
"""Queries, over all leading axes, for which reading the keys takes longer than the arithmetic."""

READ = 2**22
"""Numbers of the keys that are read at a time for a few queries."""

SEARCHED = 2**20
"""The same where rows are searched: each core reads its block from the cache several times."""

WIDE = 512
"""Numbers of a query from which its products outweigh all else."""

SMALL = 2**18
"""Numbers below which the whole matrix is one block, and dense does it at once."""


UNKNOWN = "a length is unknown until the graph runs, so no blocks can be laid out"


def cannot(call: Call) -> str | None:
    fw = call.fw
    if call.unsized:
        return UNKNOWN
    lacks = call.weighting.lacks(False)
    if lacks is None and (lacks := call.weighting.lacks(True)):
        lacks = lacks if fw.needs_gradient(tree.leaves(fw, call)) else None
    if lacks:
        return lacks
    if any(fw.captures_unseen(function) for function in functions_in(call.score)):
        return (
            f"the score is a function that holds arrays, whose gradient {fw.name} would lose in "
            "blocks: make them fields of a frozen dataclass with __call__(query, key)"
        )
    return None


def declines(call: Call) -> str | None:
    numbers = math.prod(call.lead) * call.n * call.m * footprint(call)
    if call.fw.tracing(call.query) and not call.fw.equal_spans:
        return "a graph would hold every block, so it holds the equation, for any length"
    if numbers <= SMALL:
        return (
            f"the call holds {count(numbers)} numbers in all: one block, which dense does at once"
        )
    return None


def looks(call: Call) -> bool:
    """Whether it may run because the numbers forbid a faster engine."""
    return call.score.ranged


def describe(call: Call) -> str:
    rows, cols = block_size(call)
    return f"blocks of {rows} queries × {cols} keys"


def footprint(call: Call) -> int:
    return call.score.footprint(call.fw.shape(call.key)[-1])


def run(call: Call, size: tuple[int, int] | None = None) -> tuple[Array, Array | None, None]:
    """The output and, where wanted, the log-sum-exp; `size` sets the block by hand."""
    call = calls.seeded(call.precise())
    fewer = call.weighting if call.m is None else call.weighting.among(call.m)
    call = call if fewer is call.weighting else replace(call, weighting=fewer)
    if call.fw.has_empty_axis((*call.lead, call.n, call.m)):
        return *dense.run(whole(call))[:2], None
    fw = call.fw
    tiling = tiling_of(call, *(size or block_size(call)))
    if not any(keys for _, keys in tiling):
        return *dense.run(call)[:2], None
    own = scores.is_open(call.score) or masks.has_functions(call.rule)
    call = hoist(call, tiling)
    leaves = tree.leaves(fw, call)
    learning = fw.needs_gradient(leaves)
    held = Held.of(call) if learning and len(tiling) == 1 else None

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        fresh = tree.rebuild(fw, call, arrays)
        lent = None if own else _lent(fresh)
        if lent is None:
            return _forward(fresh, tiling, learning, held)
        outputs, kept = _forward(lent, tiling, learning, held)
        return tuple(map(fw.take_back, outputs)), tuple(map(fw.take_back, kept))

    def backward(arrays: Arrays, kept: Arrays, gradients: Arrays) -> Slopes:
        return backward_of(tree.rebuild(fw, call, arrays), tiling, kept, gradients, held)

    def reference(*arrays: Array) -> Arrays:
        out, lse, _ = dense.run(whole(tree.rebuild(fw, call, arrays)))
        return (out,) if lse is None else (out, lse)

    outputs = fw.differentiable(forward, backward, reference, leaves)
    return outputs[0], outputs[1] if call.wants_lse else None, None


def _lent(call: Call) -> Call | None:
    """The call on NumPy's arrays over the same memory, where its search picks scores by a mask.

    NumPy does that several times faster than others, and for some rows on each core.
    """
    fw = call.fw
    if fw.picks or not call.weighting.searches or call.weighting.has_lse:
        return None
    lent = [fw.lend(x) for x in tree.leaves(fw, call)]
    return None if any(x is None for x in lent) else tree.rebuild(fw, call, lent)


def is_few(call: Call) -> bool:
    """Whether there is little to do for each key but read it."""
    return math.prod(call.lead) * call.n <= FEW and call.m > FEW


def hoist(call: Call, tiling: Tiling) -> Call:
    """The call with the arrays that the caller's functions hold among its leaves."""
    in_score, in_rule = functions_in(call.score), masks.has_functions(call.rule)
    if not (in_score or in_rule):
        return call
    rows, keys = next((rows, keys) for rows, keys in tiling if keys)
    cols: Any = next(iter(keys))[0] if isinstance(keys, Cuts) else keys[0]

    row, col = call.at[:2] if call.at else (0, 0)

    def place(rows: Span, cols: Span) -> Any:
        rows, cols = (x._replace(start=x.start - at) for x, at in ((rows, row), (cols, col)))
        return calls.place(call, rows, cols)

    part = operands(call, rows, cols)
    score, rule = call.score, call.rule
    if in_score:
        key = calls.share_heads(call, part.key)
        score = scores.hoisted(score, part.query, key, part.block, place)
    if in_rule and rule is not None:
        rule = masks.hoisted(rule, part.block, place)
    return replace(call, score=score, rule=rule)


# Blocks


def block_size(call: Call) -> tuple[int, int]:
    """Queries and keys per block: near a square, within BLOCK numbers for all leading axes."""
    each = max(math.prod(call.lead) * footprint(call), 1)
    area = max(BLOCK // each, 1)
    if isinstance(call.key, Unread):  # whatever is read serves as many queries as it can
        rows = max(min(call.n, area // 512), 1)
        return rows, max(min(area // rows, 4 * READ // max(call.key.shape[-1], 1)), 512)
    if call.weighting.searches and call.m <= area:  # searched in one go
        numbers = each * call.n * call.m
        parts = -(-numbers // (SEARCHED if call.fw.name in ("numpy", "torch") else BLOCK))
        parts += min(-parts % threads.CORES, numbers // SMALL)  # every core has as many
        return max(-(-call.n // max(parts, 1)), 1), max(call.m, 1)
    side = 2 ** int(math.log2(math.sqrt(area))) if area > 1 else 1
    wide = call.fw.shape(call.query)[-1] >= WIDE
    if wide and call.fw.name == "torch":  # its product is the work, and the larger the better
        side, area = 4 * side, 2 * area
    rows = max(min(side, 1024 if wide else 256, call.n), 1)
    if call.rule is not None:
        # No more queries at once than share most of their keys.
        start, end = call.rule.extent(Span(call.n // 2, 1), call.n, call.m)
        rows = min(rows, max(end - start, 64))
    cols = max(min(area // rows, call.m), 1)
    if is_few(call):
        cols = min(cols, max(READ // max(call.fw.shape(call.key)[-1], 1), 512))
    return rows, cols


def spans(fw: Framework, total: int, size: int, start: int = 0) -> list[Span]:
    size = max(min(size, total - start), 1)
    starts = range(start, total, size)
    if not fw.equal_spans:
        return [Span(at, min(size, total - at)) for at in starts]
    return [Span(min(at, total - size), size, at if total % size else None) for at in starts]


_TILINGS: dict[tuple[Any, ...], Tiling] = {}


def tiling_of(call: Call, rows: int, cols: int) -> Tiling:
    """The blocks that the mask leaves, and whether it must be looked at inside them.

    That of a rule on distances is kept: a loop asks for it again and again.
    """
    fw, rule, n, m = call.fw, call.rule, call.n, call.m
    if isinstance(call.key, Unread):
        cuts: Any = call.key.rows.cuts(cols)
        return [(Span(at, min(rows, n - at)), cuts) for at in range(0, n, rows)]
    if rule is None:
        keys = spans(fw, m, cols)
        return [(span, keys) for span in spans(fw, n, rows)]
    if not rule.relative:
        return _tiled(fw, rule, (n, m), rows, cols)
    about = (fw.name, rule, n, m, rows, cols)
    if about not in _TILINGS:
        if len(_TILINGS) >= 64:
            _TILINGS.clear()
        _TILINGS[about] = _tiled(fw, rule, (n, m), rows, cols)
    return _TILINGS[about]


def _tiled(fw: Framework, rule: masks.Mask, size: tuple[int, int], rows: int, cols: int) -> Tiling:
    n, m = size
    grid = spans(fw, m, cols) if fw.on_grid else []

    def left(queries: Span) -> list[Span]:
        start, end = rule.extent(queries, n, m)
        if fw.on_grid:
            near = [span for span in grid if span.start < end and start < span.start + span.size]
        else:
            near = spans(fw, end, cols, start)
        told = ((span, rule.verdict(queries, span, n, m)) for span in near)
        return [span._replace(open=yes is True) for span, yes in told if yes is not False]

    return [(span, left(span)) for span in spans(fw, n, rows)]


# Forward


def _forward(call: Call, tiling: Tiling, learning: bool, held: Held | None) -> tuple[State, State]:
    """The outputs, and what is kept of each row for the way back where there is one."""
    fw, loops = call.fw, loops_of(call)
    unscaled = replace(call, weighting=Weighting())
    keeps = learning or call.wants_lse or call.weighting.strict

    def pooled(rows: Span, keys: Any) -> Arrays:
        weighting = of_rows(fw, call.weighting, rows, call.n)
        if isinstance(keys, list) and len(keys) == 1 and call.weighting.searches and not keeps:
            part = operands(call, rows, keys[0])
            s = calls.scores(unscaled, part.query, part.key, part.bias, part.block)
            value = calls.share_heads(call, value_of(call, keys[0], part.live))
            keep = calls.dropped(call, part.block)
            return (weighting.whole(s, part.live, part.block.k, value, keep),)
        passes = Passes(call, rows, keys, held)
        found = weighting.search(passes.fold)
        out, found_all, centre = weighting.finish(passes.state(found), found)
        if not keeps:
            return (out,)
        return out, *found_all, *(() if centre is None else (centre,))

    out, *kept = loops.tiled(pooled, tiling)
    if call.weighting.strict:
        call.weighting.check(tuple(kept))
    outputs = (out, call.weighting.lse(tuple(kept))) if call.wants_lse else (out,)
    return outputs, (*kept, *(() if held is None else held.leave()))


# Backward


def backward_of(
    call: Call,
    tiling: Tiling,
    kept: Sequence[Array],
    gradients: Sequence[Array],
    held: Held | None,
) -> Slopes:
    """One gradient for each leaf of the call."""
    kept, known = (kept, {}) if held is None else held.found(kept)
    fw, weighting, loops = call.fw, call.weighting, loops_of(call)
    parameters = tree.leaves(fw, (call.score, weighting))
    stored = isinstance(call.key, Unread)

    def scores_of(part: Operands, rows: Span) -> tuple[Array, Callable[[Array], Slopes]]:
        """The scores of a block, and their gradients to gradients of what `moves` in it."""
        moves = part.query, None if stored else part.key, part.bias, call.score, weighting

        def function(*arrays: Array) -> Array:
            query, key, bias, score, weighting = tree.rebuild(fw, moves, arrays)
            changed = replace(call, score=score, weighting=of_rows(fw, weighting, rows, call.n))
            return calls.scores(changed, query, part.key if stored else key, bias, part.block)

        return fw.vjp(function, *tree.leaves(fw, moves))

    def weights_of(rows: Span, *given: Any) -> tuple[Array, Callable[[Array], Slopes] | None]:
        """The weights of a block, and their gradients to those of arrays that act in `weight`."""
        if not weighting.bends:
            return of_rows(fw, weighting, rows, call.n).weight(*given), None

        def function(*arrays: Array) -> Array:
            bent = tree.rebuild(fw, weighting, arrays)
            return of_rows(fw, bent, rows, call.n).weight(*given)

        return fw.vjp(function, *tree.leaves(fw, weighting))

    def added(total: Any, new: Array | None, rows: Span, cols: Span | None = None) -> Any:
        return total if new is None else fw.add_at(total, new, rows, cols)

    def sweep(totals: Any, rows: Span, keys: Any) -> Any:
        found = tuple(fw.cut(x, rows, -2) for x in kept)
        along_out = fw.cut(gradients[0], rows, -2)
        centre = fw.full((*call.lead, rows.size, 1), 0.0, call.query)
        if weighting.centred:
            found, middle = found[:-1], found[-1]
            centre = fw.xp.sum(middle * along_out, axis=-1, keepdims=True)
        if call.wants_lse:
            centre = centre - fw.cut(gradients[1], rows, -2)

        def step(totals: Any, cols: Span) -> Any:
            dq, dk, dv, dbias, dparameters = totals
            part = operands(call, rows, cols)
            live, keep = part.live, calls.dropped(call, part.block)
            if known and cols.start in known:  # a traced start has no hash
                s, pull = known[cols.start], pulled(call, part.query, part.key)
            elif weighting.smooth:
                s, pull = scores_of(part, rows)
            else:
                s = calls.scores(call, *part[2:], part.block)
            weight, bend = weights_of(rows, s, live, part.block.k, found)
            value = value_of(call, cols, live)
            if not stored:
                spread = weighting.moving(weight)
                spread = spread if keep is None else spread * keep
                gained = fw.xp.matmul(fw.xp.matrix_transpose(spread), along_out)
                dv = fw.add_at(dv, calls.fold_heads(call, gained, value.shape[:-2]), cols, None)
            if weighting.smooth:
                shared = calls.share_heads(call, value)
                along = fw.xp.matmul(along_out, fw.xp.matrix_transpose(shared))
                along = along if keep is None else along * keep
                slope = of_rows(fw, weighting, rows, call.n).slope(s, weight, along, centre, found)
                new = iter(pull(fw.keep(slope, live)))
                dq = added(dq, next(new), rows)
                dk = dk if stored else added(dk, next(new), cols)
                dbias = dbias if call.bias is None else added(dbias, next(new), rows, cols)
                bent = () if bend is None else bend(fw.keep(along - centre, live))
                more = [None] * (len(dparameters) - len(bent)) + [*bent]
                parts = zip(dparameters, new, more, strict=True)
                dparameters = [sum(y for y in x if y is not None) for x in parts]
            return [dq, dk, dv, dbias, dparameters]

        return loops.fold(step, totals, keys)

    none = fw.full((1, 1), 0.0, call.query)
    start = [
        fw.accumulator(call.query),
        fw.accumulator(none if stored else call.key),
        fw.accumulator(none if stored else call.value),
        fw.accumulator(none if call.bias is None else call.bias),
        [fw.full(fw.shape(x), 0.0, x) for x in parameters],
    ]
    dq, dk, dv, dbias, dparameters = loops.sweep(sweep, start, tiling)
    return _in_order(call, [fw.total(x) for x in (dq, dk, dv, dbias)], dparameters)


def _in_order(call: Call, main: list[Array], parameters: list[Array]) -> Slopes:
    """The gradients in the order of the call's leaves; positions and seeds have none."""
    dq, dk, dv, dbias = main
    stored = isinstance(call.key, Unread)
    out: list[Array | None] = [dq, *(() if stored else (dk, dv)), *parameters]
    out += [None] * len(tree.leaves(call.fw, call.rule))
    out += [] if call.bias is None else [dbias]
    return (*out, *[None] * len(tree.leaves(call.fw, call.seed)))
