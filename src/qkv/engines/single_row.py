"""The single-row engine: computes one query where all queries have the same weights.

The weights of a query do not depend on its vector if the score is constant, or if the weighting
ignores the scores. Without a mask all rows of the result are equal, so one is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qkv.engines import dense
from qkv.engines.call import Call
from qkv.frameworks import tree
from qkv.frameworks.stored_rows import UnreadArray
from qkv.scores import Constant
from qkv.util.types import Array
from qkv.weightings import Average, Softmax

NAME = "single_row"


def unsupported_reason(call: Call) -> str | None:
    if not (isinstance(call.score, Constant) or call.weighting.ignores_scores):
        return "the weights depend on the query"
    if call.rule is not None or call.bias is not None:
        return "the mask may differ between queries"
    if call.dropout:
        return "each query has its own dropout"
    if call.at is not None or isinstance(call.key, UnreadArray):
        return "the keys are stored rows, or are split over processes"
    if call.has_unknown_length or call.fw.has_empty_axis((*call.lead, call.n, call.m)):
        return "a length is 0, or unknown until the graph runs"
    if tree.array_leaves(call.fw, call.weighting):
        return "the weighting has arrays, which may differ between queries"
    return None


def slower_reason(call: Call) -> str | None:
    return None


def describe(call: Call) -> str:
    return "one query, repeated for the others"


def build_direct_runner(call: Call) -> Callable[..., Array] | None:
    """Return the mean of the values as a function of `attend`'s arguments, or None.

    Values may have fewer heads than queries. Sums of 16-bit values are float32.
    """
    if call.wants_weights:
        return None
    equal = type(call.weighting) is Average
    equal = equal or (type(call.weighting) is Softmax and isinstance(call.score, Constant))
    if not equal or call.value is None or call.exceeds_float32:
        return None
    fw, lead, own = call.fw, call.lead, call.fw.static_shape(call.value)[:-2]
    dtype = fw.dtype_name(call.query)
    is_16bit = dtype in ("float16", "bfloat16")
    if len(own) != len(lead) or own[:-1] != lead[:-1]:
        return None
    heads = None if own == lead else lead[-1]

    def run_arrays(query: Array, key: Array, value: Array, *_: Any) -> Array:
        n, m = query.shape[-2], value.shape[-2]
        with fw.use_own_settings():
            value = fw.astype(value, "float32") if is_16bit else value
            # A sum of large values may overflow, a product with 1 / m does not.
            mean = fw.matmul(fw.full((1, m), 1.0 / m, value), value)
            mean = fw.astype(mean, dtype) if is_16bit else mean
            mean = mean if heads is None else fw.repeat_heads(mean, heads)
            return mean + fw.full((n, 1), 0.0, mean)  # a broadcast array could not be written to

    return run_arrays


def run(call: Call) -> tuple[Array | None, ...]:
    """Return the output, the log-sum-exp and the weights of one query, repeated n times."""
    fw = call.fw
    query = fw.full((*call.lead, 1, 1), 0.0, call.query)
    key = fw.full((*fw.static_shape(call.key)[:-1], 1), 0.0, call.key)
    one = replace(call, query=query, key=key, score=Constant())
    out, lse, weights = dense.run(one)
    if call.wants_weights == "mean":
        weights = fw.xp.mean(weights, axis=-3)

    def repeat(x: Array | None) -> Array | None:
        # A sum is a new array. A broadcast one could not be written to.
        return None if x is None else x + fw.full((call.n, 1), 0.0, x)

    return repeat(out), repeat(lse), repeat(weights) if call.wants_weights else None
