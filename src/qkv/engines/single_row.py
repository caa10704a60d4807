"""The single-row engine: computes one query where all queries have the same weights.

The weights of a query do not depend on its vector if the score is constant, or if the weighting
ignores the scores. Without a mask all rows of the result are equal, so one is enough.
"""

from __future__ import annotations

from dataclasses import replace

from qkv.engines import dense
from qkv.engines.call import Call
from qkv.frameworks import tree
from qkv.frameworks.stored_rows import UnreadArray
from qkv.scores import Constant
from qkv.util.types import Array

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
