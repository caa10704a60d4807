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

    It handles calls without mask and dropout. All heads of key and value have the same axes.
    """
    fw, lead, own = call.fw, call.lead, call.fw.static_shape(call.key)[:-2]
    shares_heads = len(own) == len(lead) and own[:-1] == lead[:-1]
    if call.rule is not None or own != call.fw.static_shape(call.value)[:-2]:
        return None
    if call.exceeds_float32 or not (own == lead or shares_heads):
        return None

    fixed_weighting = None if tree.array_leaves(fw, call.weighting) else call.weighting
    learned = fixed_weighting is None or tree.array_leaves(fw, call.score)
    fixed = None if learned else (call.score, call.weighting)
    dtype, heads = fw.dtype_name(call.query), None if own == lead else lead[-1]
    is_16bit = dtype in ("float16", "bfloat16")

    def widen(x: Array) -> Array:
        return fw.astype(x, "float32") if fw.dtype_name(x) == dtype else x

    def run_arrays(
        query: Array, key: Array, value: Array, score: Any, weighting: Any, mask: Any, seed: Any
    ) -> Array:
        score, weighting = fixed or resolve_score_and_weighting(
            score, fixed_weighting or weighting, None
        )
        with fw.use_own_settings():
            if is_16bit:
                query, key, value = (fw.astype(x, "float32") for x in (query, key, value))
                score, weighting = fixed or tree.map_arrays(fw, widen, (score, weighting))
            if heads is not None:
                key, value = fw.repeat_heads(key, heads), fw.repeat_heads(value, heads)
            scores, at = score(query, key), fw.position_range(0, key.shape[-2], key)
            out: Array = weighting.pool_whole_rows(scores, None, at, value, None)
            return fw.astype(out, dtype) if is_16bit else out

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
