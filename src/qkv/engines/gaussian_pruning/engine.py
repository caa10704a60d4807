"""Softmax of −‖q − k‖²/2σ² in few dimensions, over the keys near enough to count.

The Nadaraya–Watson estimator on a CPU. Keys are put in boxes (`grid`), and each query leaves out
the boxes that provably hold no more than `share` of its weight: `tolerance`, or the dtype's own
accuracy. Its output is then off by at most share × the diameter of the values, beside rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from qkv.engines import call as calls
from qkv.engines import dense
from qkv.engines.call import Call
from qkv.engines.gaussian_pruning import boxes as grid
from qkv.engines.gaussian_pruning.boxes import BackwardInputs, Boxes, Numbers
from qkv.errors import format_count
from qkv.frameworks import is_array, threads, tree
from qkv.frameworks.base import Tiling
from qkv.frameworks.numpy import FRAMEWORK as NUMPY
from qkv.scores import Gaussian
from qkv.util.types import Array, Arrays, Gradients, Span
from qkv.weightings import Softmax

NAME = "near"

MAX_DIMENSIONS = 8
"""Dimensions beyond which boxes rule hardly anything out."""

MIN_QUERIES, MIN_PAIRS = 16, 2**22
"""Fewer do not pay for putting the keys in boxes."""

SAMPLED_QUERIES, SAMPLED_KEYS = 64, 2**13
"""Queries and keys that are looked at to see what will be read."""

TRACED_REASON = "the numbers cannot be read while they are being traced"

MAX_QUERIES_PER_CHUNK = 1024
"""Queries that go through the boxes together."""


def shape_based_reason(call: Call) -> str | None:
    """A reason against it that takes no look at the numbers, which `unsupported_reason` takes."""
    if call.fw.name not in ("numpy", "torch") or type(call.score) is not Gaussian:
        return None  # `unsupported_reason` tells
    if call.fw.is_traced(call.query):
        return TRACED_REASON
    d = call.fw.static_shape(call.key)[-1]
    if d > MAX_DIMENSIONS:
        return f"boxes rule hardly a key out in {d} dimensions"
    n = call.n * (math.prod(call.lead) if _shares_keys(call) else 1)
    if n < MIN_QUERIES or n * call.m < MIN_PAIRS:
        return (
            f"{format_count(n)} queries of {format_count(call.m)} keys do not pay for putting "
            "them in boxes"
        )
    return None


def unsupported_reason(call: Call) -> str | None:
    fw = call.fw
    if fw.name not in ("numpy", "torch"):
        return f"it is written for NumPy and PyTorch on a CPU, not {fw.name}"
    if type(call.score) is not Gaussian:
        return f"boxes bound the Gaussian score only, not {type(call.score).__name__}"
    if type(call.weighting) is not Softmax:
        return f"its bound is on a softmax's weights, not those of {type(call.weighting).__name__}"
    if call.rule is not None or call.bias is not None:
        return "a mask would change the mass of a box"
    if call.dropout or call.wants_weights:
        return "it keeps no weights, to return or to drop"
    if fw.has_empty_axis((*call.lead, call.n, call.m, fw.static_shape(call.key)[-1])):
        return "there is nothing to compute"
    widths = (call.score.bandwidth, call.weighting.temperature)
    learned = [x for x in widths if is_array(x)]
    if any(math.prod(fw.static_shape(x)) != 1 for x in learned):
        return "it takes one bandwidth for all"
    if fw.has_gradients and fw.needs_gradient(learned):
        return "it gives no gradient for a learned bandwidth or temperature"
    if fw.is_traced(call.query):
        return TRACED_REASON
    if any(fw.concrete_value(x) is None for x in (call.query, call.key, call.value)):
        return "the numbers are not on the host, where the boxes are laid out"
    narrow = _inverse_width(call)
    query, key, value = (fw.to_numpy(x) for x in (call.query, call.key, call.value))
    # A NaN is below nothing.
    in_range = all(float(np.max(np.abs(x))) * narrow < 1e150 for x in (query, key))
    if not (in_range and math.isfinite(np.sum(value, dtype=np.float64))):
        return "an argument is not finite, or the bandwidth too narrow for its range"
    return None


def slower_reason(call: Call) -> str | None:
    read, cost = estimate_work(call)
    if read * cost > 1 and not isinstance(call.lowering, str):
        return f"{_format_share(read)} of the pairs count, in boxes that are slow to score"
    return None


def is_data_dependent(call: Call) -> bool:
    """What the boxes rule out is for the numbers to say."""
    return True


def describe(call: Call) -> str:
    """What is read and what may be lost."""
    read = _format_share(estimate_work(call)[0])
    return (
        f"reads {read} of the pairs, drops at most {droppable_share(call):.2g} of each row's weight"
    )


def _format_share(read: float) -> str:
    return f"about {100 * read:.2g} %" if read < 0.99 else "nearly all"


def estimate_work(call: Call) -> tuple[float, float]:
    """The part of the pairs that will be read, and the cost of one in plain products.

    A few queries, and boxes of fewer keys, stand for all.
    """
    call = call.upcast()
    few, some = max(call.n // SAMPLED_QUERIES, 1), max(call.m // SAMPLED_KEYS, 1)
    part = replace(
        call,
        query=call.query[..., ::few, :],
        key=call.key[..., ::some, :],
        value=call.value[..., ::some, :1],  # type: ignore[index]
    )
    query, key, value = next(_split_problems(part))[1:]
    share = droppable_share(call)
    boxes = grid.build_boxes(key, value, max(grid.KEYS_PER_BOX // some, 1))
    found = grid.select_boxes(query[:, :SAMPLED_QUERIES], boxes, share)
    return float(found.keep.mean()), grid.estimate_pair_cost(
        query[:, :SAMPLED_QUERIES], boxes, found.keep, share
    )


def droppable_share(call: Call) -> float:
    """The share of a row's weight that may be left out."""
    wide = call.upcast()
    own = float(np.finfo(wide.fw.dtype_name(wide.query)).eps)
    return max(call.tolerance or 0.0, own)


def run(call: Call) -> tuple[Array, Array | None, None]:
    """The output (…, n, d_v) and, where wanted, the log-sum-exp (…, n, 1)."""
    call = call.upcast()
    fw, share = call.fw, droppable_share(call)
    leaves = tree.array_leaves(fw, call)

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        given = tree.replace_arrays(fw, call, arrays)
        found = [
            _map_chunks(
                query,
                grid.build_boxes(key, value),
                lambda q, boxes: grid.pool_queries(q, boxes, share),
            )
            for _, query, key, value in _split_problems(given)
        ]
        rows = (np.concatenate(x) for x in zip(*found, strict=True))
        kept = [
            fw.array_from_host(x.reshape(*call.lead, call.n, -1), call.query, "float64")
            for x in rows
        ]
        own = (fw.astype(x, fw.dtype_name(call.query)) for x in kept[: 1 + call.wants_lse])
        return tuple(own), tuple(kept)

    def backward(arrays: Arrays, kept: Arrays, gradients: Arrays) -> Gradients:
        found = _run_backward(tree.replace_arrays(fw, call, arrays), share, kept, gradients)
        return (*found, *[None] * (len(arrays) - 3))

    outputs = fw.run_differentiable(forward, backward, dense.build_reference(call), leaves)
    return outputs[0], outputs[1] if call.wants_lse else None, None


def _inverse_width(call: Call) -> float:
    """1 / σ√T, the factor that makes the score −‖q − k‖²/2."""
    sigma, temperature = (
        float(call.fw.to_numpy(x).reshape(())) if is_array(x) else float(x)
        for x in (call.score.bandwidth, call.weighting.temperature)  # type: ignore[attr-defined]
    )
    inside = sigma * math.sqrt(temperature) if temperature > 0 else math.nan
    return 1 / inside if inside > 0 else math.nan


def _split_problems(call: Call) -> Iterator[tuple[tuple[int, ...], Numbers, Numbers, Numbers]]:
    """The problems in the call: where in the lead, queries (d, n), keys (d, m), values (m, d_v).

    Queries and keys are float64 and in units of the bandwidth. Keys that all share are boxed once.
    """
    fw, narrow = call.fw, _inverse_width(call)

    def scale_points(x: Numbers) -> Numbers:
        return np.multiply(x.T, narrow, dtype=np.float64, order="C")

    query = fw.to_numpy(call.query)
    key, value = (fw.to_numpy(calls.repeat_shared_heads(call, x)) for x in (call.key, call.value))
    if _shares_keys(call):
        flat = query.reshape(-1, query.shape[-1])
        yield (
            (),
            scale_points(flat),
            scale_points(key.reshape(key.shape[-2:])),
            value.reshape(value.shape[-2:]),
        )
        return
    key, value = (np.broadcast_to(x, (*call.lead, *x.shape[-2:])) for x in (key, value))
    for at in np.ndindex(call.lead):
        yield at, scale_points(query[at]), scale_points(key[at]), value[at]


def _shares_keys(call: Call) -> bool:
    """Whether all queries look at the same keys and values."""
    return all(math.prod(call.fw.static_shape(x)[:-2]) == 1 for x in (call.key, call.value))


def _map_chunks(
    query: Numbers, boxes: Boxes, work: Callable[[Numbers, Boxes], tuple[Numbers, ...]]
) -> tuple[Numbers, ...]:
    """work(queries (d, r), boxes) on neighbours together, on all cores, put back in order."""
    order, tiling = _group_neighbours(query, boxes)
    query = query[:, order]

    def process_chunk(rows: Span, _: Any) -> tuple[Numbers, ...]:
        return work(query[:, rows.start : rows.start + rows.size], boxes)

    found = NUMPY.map_tiles(process_chunk, tiling)
    for x in found:
        x[order] = x.copy()
    return found


def _group_neighbours(query: Numbers, boxes: Boxes) -> tuple[Numbers, Tiling]:
    """An order in which neighbours stand together, and chunks of it."""
    n = query.shape[1]
    size = max(
        min(MAX_QUERIES_PER_CHUNK, -(-n // threads.CORE_COUNT), 2**20 // len(boxes.counts)), 16
    )
    order, c = grid.pack_points(query, size)
    order = order[order < n]
    return order, [(Span(at, min(c, n - at)), []) for at in range(0, n, c)]


# Backward


def _run_backward(
    call: Call, share: float, kept: Sequence[Array], gradients: Sequence[Array]
) -> list[Array]:
    """The gradients of query, key and value, over the pairs that the forward pass read."""
    fw, n, m = call.fw, call.n, call.m
    along = fw.to_numpy(gradients[0]).astype(np.float64)
    given = [*(fw.to_numpy(x) for x in kept), along]
    given.append(fw.to_numpy(gradients[1]) if call.wants_lse else np.zeros_like(given[1]))
    found: list[list[Numbers]] = [[], [], []]
    parts = list(_split_problems(call))
    for at, query, key, value in parts:
        rows = [x.reshape(-1, x.shape[-1]) if not at else x[at] for x in given]
        boxes = grid.build_boxes(key, value)
        for total, new in zip(
            found, _problem_gradients(query, boxes, share, BackwardInputs(*rows)), strict=True
        ):
            total.append(new)
    narrow = _inverse_width(call)
    lead = call.lead if len(parts) > 1 else ()
    d_query = np.concatenate(found[0]).reshape(*call.lead, n, -1) * narrow
    d_key = np.stack(found[1]).reshape(*lead, m, -1) * narrow
    d_value = np.stack(found[2]).reshape(*lead, m, -1)
    made = [
        fw.array_from_host(x, call.query, fw.dtype_name(call.query))
        for x in (d_query, d_key, d_value)
    ]
    for i, x in ((1, call.key), (2, call.value)):
        shape = fw.static_shape(x)
        if lead:
            made[i] = calls.sum_shared_heads(call, made[i], shape[:-2])
        made[i] = fw.xp.reshape(made[i], shape)
    return made


def _problem_gradients(
    query: Numbers, boxes: Boxes, share: float, kept: BackwardInputs
) -> tuple[Numbers, ...]:
    """The gradients of queries (n, d), keys (m, d) and values (m, d_v) of one problem.

    Each core sums those of keys and values over a fixed part of the queries, so that a second run
    gives the same digits.
    """
    order, tiling = _group_neighbours(query, boxes)
    query, kept = query[:, order], BackwardInputs(*(x[order] for x in kept))
    d, _, c = boxes.points.shape
    wide = boxes.values.shape[-1] - 1
    each = -(-len(tiling) // threads.CORE_COUNT)
    groups = [tiling[at : at + each] for at in range(0, len(tiling), each)]
    totals = [
        (np.zeros((len(boxes.counts), c, d)), np.zeros((len(boxes.counts), c, wide)))
        for _ in groups
    ]
    gained = np.empty((query.shape[1], d))

    def add_group_gradients(rows: Span, _: Any) -> tuple[Numbers]:
        for chunk, _ in groups[rows.start]:
            at = slice(chunk.start, chunk.start + chunk.size)
            part = BackwardInputs(*(x[at] for x in kept))
            gained[at] = grid.query_gradients(query[:, at], boxes, share, part, totals[rows.start])
        return (np.empty((1, 1)),)

    NUMPY.map_tiles(add_group_gradients, [(Span(i, 1), []) for i in range(len(groups))])
    real = boxes.order < boxes.counts.sum()
    back = [np.empty_like(gained)]
    back[0][order] = gained
    for pair in zip(*totals, strict=True):
        total = sum(pair[1:], start=pair[0])
        summed = np.empty((int(boxes.counts.sum()), total.shape[-1]))
        summed[boxes.order[real]] = total.reshape(-1, total.shape[-1])[real]
        back.append(summed)
    return tuple(back)
