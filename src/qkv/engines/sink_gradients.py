"""The gradient of an attention sink in the streaming engine: that of one more key of value 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qkv.engines.call import Call
from qkv.frameworks import tree
from qkv.util.types import Array, Gradients, Span
from qkv.weightings import State
from qkv.weightings.base import weighting_for_rows
from qkv.weightings.sink import SinkWeighting


def add_sink_gradients(
    call: Call,
    rows: Span,
    weigh_block: Callable[..., tuple[Array, Callable[[Array], Gradients] | None]],
    centre: Array,
    row_facts: State,
    parameters: Sequence[Array],
) -> list[Array]:
    """Return the gradients of the parameters with those that the sink adds for some queries.

    `parameters` are the gradients so far, of the arrays of the score and then of the weighting.
    `weigh_block` returns the weights of scores, and their vjp to the weighting's arrays. `centre`
    and `row_facts` are those of `Weighting.score_gradient`.
    """
    fw, weighting = call.fw, call.weighting
    leaves = tree.array_leaves(fw, weighting)
    is_first_shard = call.at is None or call.at.col == 0
    if not (isinstance(weighting, SinkWeighting) and leaves and is_first_shard):
        return list(parameters)

    def compute_sink_scores(*arrays: Array) -> Array:
        changed: Any = tree.replace_arrays(fw, weighting, arrays)
        return weighting_for_rows(fw, changed, rows, call.n).sink_scores(centre)  # type: ignore[attr-defined]

    fresh = None  # the queries that an overlapping span did not count
    if rows.first_new is not None:
        fresh = fw.position_range(rows.start, rows.size, centre)[:, None] >= rows.first_new
    s, score_vjp = fw.vjp(compute_sink_scores, *leaves)
    weight, weight_vjp = weigh_block(rows, s, None, weighting.sink_position(centre), row_facts)
    changed = weighting_for_rows(fw, weighting, rows, call.n)
    none = fw.full(fw.static_shape(centre), 0.0, centre)
    slope = changed.score_gradient(s, weight, none, centre, row_facts)
    new = [score_vjp(fw.fill_unless(slope, fresh))]
    if weight_vjp is not None:
        new.append(weight_vjp(fw.fill_unless(-centre, fresh)))
    totals = list(parameters)
    start = len(totals) - len(leaves)
    for i, gradients in enumerate(zip(*new, strict=True)):
        for gradient in gradients:
            if gradient is not None:
                totals[start + i] = totals[start + i] + gradient
    return totals
