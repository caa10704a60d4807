"""The equation, literally. Every other engine is tested against this one."""

from __future__ import annotations

from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.types import Array, Span

NAME = "dense"


def cannot(call: Call) -> str | None:
    return None


def declines(call: Call) -> str | None:
    return None


def describe(call: Call) -> str:
    return "the whole matrix at once"


def run(call: Call, rows: Span | None = None) -> tuple[Array | None, Array | None, Array]:
    """Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ, its log-sum-exp and its weights, for some rows or all."""
    call = call.precise()
    block = calls.place(call, rows or calls.all_rows(call), calls.all_cols(call))
    live = calls.live(call, block)
    query = calls.clean_queries(call, call.fw.cut(call.query, block.rows, -2), live)
    key = calls.clean(call, call.key, live)
    bias = None if call.bias is None else call.fw.cut(call.bias, block.rows, -2)

    scores = calls.scores(call, query, key, bias, block)
    weights = call.weighting.weights(scores, live, block.k)
    lse = call.weighting.lse_of(scores, live, block.k) if call.wants_lse else None

    keep = calls.dropped(call, block)
    out = None
    if call.value is not None:
        value = calls.share_heads(call, calls.clean(call, call.value, live))
        out = call.weighting.pool(weights, value, live, keep)
    return out, lse, weights if keep is None else weights * keep
