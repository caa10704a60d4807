"""A part of the keys as a call of its own, by whichever engine is fastest for it.

Softmax is all that is needed: the state of a part is its output and its log-sum-exp, and with the
share w that the part has in the whole, L's gradients of those are w ∂L/∂out and
w (∂L/∂out · (own − out) + ∂L/∂lse).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from qkv import masks
from qkv.arrays import tree
from qkv.engines.call import Call
from qkv.engines.choose import choose
from qkv.scores import is_open
from qkv.types import Array, Arrays, Span
from qkv.weightings import Softmax, State

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


def state_of(call: Call) -> State:
    """Softmax's state of all the keys of such a call."""
    return _state(call, *choose(call).run(call)[:2])


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
