"""The dense engine: the equation as written. Every other engine is tested against this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.engines.validation import resolve_score_and_weighting
from qkv.frameworks import tree
from qkv.util.types import Array, Arrays, Span

NAME = "dense"
UPCASTS = CHECKS_OVERFLOW = True


def unsupported_reason(call: Call) -> str | None:
    return None


def slower_reason(call: Call) -> str | None:
    return None


def describe(call: Call) -> str:
    return "the whole matrix at once"


def build_direct_runner(call: Call) -> Callable[..., Array] | None:
    """Return the equation as a function of `attend`'s arguments, or None.

    It handles calls without mask, dropout, upcast and shared heads.
    """
    fw = call.fw
    has_equal_leads = (
        call.lead == fw.static_shape(call.key)[:-2] == fw.static_shape(call.value)[:-2]
    )
    if call.rule is not None or call.upcast() is not call or not has_equal_leads:
        return None

    fixed_weighting = None if tree.array_leaves(fw, call.weighting) else call.weighting
    learned = fixed_weighting is None or tree.array_leaves(fw, call.score)
    fixed = None if learned else (call.score, call.weighting)

    def run_arrays(
        query: Array, key: Array, value: Array, score: Any, weighting: Any, mask: Any, seed: Any
    ) -> Array:
        score, weighting = fixed or resolve_score_and_weighting(
            score, fixed_weighting or weighting, None
        )
        with fw.use_own_settings():
            scores = fw.prevent_fusion(weighting.scale_scores(score(query, key)))
            at = fw.position_range(0, key.shape[-2], key)
            weights = weighting.weights(scores, None, at)
            out: Array = weighting.pool_values(weights, value, None, None)
            return out

    return run_arrays


def build_reference(call: Call) -> Callable[..., Arrays]:
    """Return the output and log-sum-exp as a function of the call's arrays.

    Frameworks differentiate this function for second derivatives, which no engine's own gradient
    has.
    """
    fw, dtype = call.fw, call.fw.dtype_name(call.query)

    def compute_reference(*arrays: Array) -> Arrays:
        results = run(tree.replace_arrays(fw, call, arrays))[:2]
        return tuple(fw.astype(x, dtype) for x in results if x is not None)

    return compute_reference


def run(call: Call, rows: Span | None = None) -> tuple[Array | None, Array | None, Array]:
    """Return Σᵢ α(q, kᵢ) vᵢ, the log-sum-exp and the weights; `rows` None: for all queries."""
    call = calls.slice_weighting_rows(call.upcast(), rows)
    block = calls.make_block(call, rows)
    live = calls.compute_live_pairs(call, block)
    scores = calls.compute_masked_scores(call, block, live)
    if call.may_exceed_float64:
        calls.check_scores_finite(call, scores, live)
    weights = call.weighting.weights(scores, live, block.k)
    lse = call.weighting.compute_lse(scores, live, block.k) if call.wants_lse else None

    dropout_mask = calls.dropout_factors(call, block, weights)
    out = None
    if call.value is not None:
        value = calls.repeat_shared_heads(call, calls.zero_masked_values(call, block, live))
        out = call.weighting.pool_values(weights, value, live, dropout_mask)
    return out, lse, weights if dropout_mask is None else weights * dropout_mask
