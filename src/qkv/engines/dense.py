"""The equation, literally. Every other engine is tested against this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qkv.arrays import tree
from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.engines.request import resolved
from qkv.types import Array, Arrays, Span

NAME = "dense"
WIDENS = MINDS = True


def cannot(call: Call) -> str | None:
    return None


def declines(call: Call) -> str | None:
    return None


def describe(call: Call) -> str:
    return "the whole matrix at once"


def direct(call: Call) -> Callable[..., Array] | None:
    """The equation where there is no mask, no dropout and no shared head."""
    fw = call.fw
    alike = call.lead == fw.shape(call.key)[:-2] == fw.shape(call.value)[:-2]
    if call.rule is not None or call.precise() is not call or not alike:
        return None

    fixed_weighting = None if tree.leaves(fw, call.weighting) else call.weighting
    learned = fixed_weighting is None or tree.leaves(fw, call.score)
    fixed = None if learned else (call.score, call.weighting)

    def attend(
        query: Array, key: Array, value: Array, score: Any, weighting: Any, mask: Any, seed: Any
    ) -> Array:
        score, weighting = fixed or resolved(score, fixed_weighting or weighting, None)
        with fw.quiet():
            scores = fw.settle(weighting.scale(score(query, key)))
            at = fw.positions(0, key.shape[-2], key)
            out: Array = weighting.pool(weighting.weights(scores, None, at), value, None, None)
            return out

    return attend


def reference(call: Call) -> Callable[..., Arrays]:
    """The output and, where wanted, the log-sum-exp as a function of the call's arrays: what a
    gradient of another engine's own is differentiated by."""
    fw, dtype = call.fw, call.fw.dtype(call.query)

    def function(*arrays: Array) -> Arrays:
        found = run(tree.rebuild(fw, call, arrays))[:2]
        return tuple(fw.astype(x, dtype) for x in found if x is not None)

    return function


def run(call: Call, rows: Span | None = None) -> tuple[Array | None, Array | None, Array]:
    """Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ, its log-sum-exp and its weights, for some rows or all."""
    call = calls.some_rows(call.precise(), rows)
    block = calls.place(call, rows)
    live = calls.live(call, block)
    query = calls.clean_queries(call, call.fw.cut(call.query, block.rows, -2), live)
    key = calls.clean(call, call.key, live)
    bias = None if call.bias is None else call.fw.cut(call.bias, block.rows, -2)

    scores = calls.scores(call, query, key, bias, block)
    if call.beyond:
        calls.held(call, scores, live)
    weights = call.weighting.weights(scores, live, block.k)
    lse = call.weighting.lse_of(scores, live, block.k) if call.wants_lse else None

    keep = calls.dropped(call, block, weights)
    out = None
    if call.value is not None:
        value = calls.share_heads(call, calls.clean(call, call.value, live))
        out = call.weighting.pool(weights, value, live, keep)
    return out, lse, weights if keep is None else weights * keep
