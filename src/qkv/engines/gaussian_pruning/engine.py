"""The engine `near`: softmax of −‖q − k‖²/2σ² in few dimensions, on a CPU.

This is the Nadaraya–Watson estimator. Keys are sorted into boxes (`boxes.py`). Each query skips
boxes that provably hold at most `share` of its weight. `share` is the `tolerance`, or else the
precision of the dtype. Besides rounding, the error of the output is at most `share` times the
diameter of the values.
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
from qkv.engines.gaussian_pruning.boxes import (
    KEYS_PER_BOX,
    BackwardInputs,
    Boxes,
    Numbers,
    build_boxes,
    estimate_pair_cost,
    pack_points,
    pool_queries,
    query_gradients,
    select_boxes,
)
from qkv.errors import format_count
from qkv.frameworks import is_array, threads, tree
from qkv.frameworks.base import Tiling
from qkv.frameworks.numpy import FRAMEWORK as NUMPY
from qkv.scores import Gaussian
from qkv.util.types import Array, Arrays, Gradients, Span
from qkv.weightings import Softmax

NAME = "near"

MAX_DIMENSIONS = 8
"""Largest number of dimensions in which boxes exclude enough keys."""

MIN_QUERIES, MIN_PAIRS = 16, 2**22
"""The smallest call for which sorting the keys into boxes saves time."""

SAMPLED_QUERIES, SAMPLED_KEYS = 64, 2**13
"""Size of the sample that estimates how many pairs will be read."""

TRACED_REASON = "it reads array values, which are unknown while the call is traced"

MAX_QUERIES_PER_CHUNK = 1024
"""The most queries that one core processes together."""


def shape_based_reason(call: Call) -> str | None:
    """Return the reason against this engine that follows from shapes and types, or None."""
    if call.fw.name not in ("numpy", "torch") or type(call.score) is not Gaussian:
        return None  # `unsupported_reason` gives the reason
    if call.fw.is_traced(call.query):
        return TRACED_REASON
    d = call.fw.static_shape(call.key)[-1]
    if d > MAX_DIMENSIONS:
        return f"boxes exclude hardly any key in {d} dimensions"
    n = call.n * (math.prod(call.lead) if _shares_keys(call) else 1)
    if n < MIN_QUERIES or n * call.m < MIN_PAIRS:
        return (
            f"{format_count(n)} queries and {format_count(call.m)} keys are too few: "
            "sorting keys into boxes would take longer than it saves"
        )
    return None


def unsupported_reason(call: Call) -> str | None:
    fw = call.fw
    if fw.name not in ("numpy", "torch"):
        return f"it supports only NumPy and PyTorch on a CPU, not {fw.name}"
    if type(call.score) is not Gaussian:
        return f"it supports only the Gaussian score, not {type(call.score).__name__}"
    if type(call.weighting) is not Softmax:
        return f"it supports only softmax, not {tree.format_record(call.weighting)}"
    if call.rule is not None or call.bias is not None:
        return "it does not support a mask"
    if call.dropout or call.wants_weights:
        return "it does not store the weights, so it cannot return them or apply dropout"
    if fw.has_empty_axis((*call.lead, call.n, call.m, fw.static_shape(call.key)[-1])):
        return "an array is empty"
    widths = (call.score.bandwidth, call.weighting.temperature)
    learned = [x for x in widths if is_array(x)]
    if any(math.prod(fw.static_shape(x)) != 1 for x in learned):
        return "it supports only one bandwidth for all columns and batches"
    if fw.has_gradients and fw.needs_gradient(learned):
        return "it gives no gradient for a learned bandwidth or temperature"
    if fw.is_traced(call.query):
        return TRACED_REASON
    if any(fw.concrete_value(x) is None for x in (call.query, call.key, call.value)):
        return "the arrays are not on the CPU"
    scale = _inverse_width(call)
    query, key, value = (fw.to_numpy(x) for x in (call.query, call.key, call.value))
    # The comparison is False for NaN.
    in_range = all(float(np.max(np.abs(x))) * scale < 1e150 for x in (query, key))
    if not (in_range and math.isfinite(np.sum(value, dtype=np.float64))):
        return "an argument is not finite, or the bandwidth is too small for the range of the keys"
    return None


def slower_reason(call: Call) -> str | None:
    read, cost = estimate_work(call)
    if read * cost > 1 and not isinstance(call.lowering, str):
        return (
            f"it would read {_format_share(read)} of the pairs, more slowly than dot products "
            "compute all pairs"
        )
    return None


def is_data_dependent(call: Call) -> bool:
    """Return True: which boxes are skipped depends on the values."""
    return True


def describe(call: Call) -> str:
    """Return text for `explain`: the share of pairs to read, and how much weight may be dropped."""
    read = _format_share(estimate_work(call)[0])
    return (
        f"reads {read} of the pairs, drops at most {droppable_share(call):.2g} of each row's weight"
    )


def _format_share(read: float) -> str:
    return f"about {100 * read:.2g} %" if read < 0.99 else "nearly all"


def estimate_work(call: Call) -> tuple[float, float]:
    """Return the estimated share of the pairs that is read, and the relative cost of a pair.

    The estimate uses a sample of the queries, and a sample of the keys in smaller boxes.
    """
    call = call.upcast()
    query_step, key_step = max(call.n // SAMPLED_QUERIES, 1), max(call.m // SAMPLED_KEYS, 1)
    sample = replace(
        call,
        query=call.query[..., ::query_step, :],
        key=call.key[..., ::key_step, :],
        value=call.value[..., ::key_step, :1],  # type: ignore[index]
    )
    query, key, value = next(_split_problems(sample))[1:]
    query = query[:, :SAMPLED_QUERIES]
    share = droppable_share(call)
    boxes = build_boxes(key, value, max(KEYS_PER_BOX // key_step, 1))
    selection = select_boxes(query, boxes, share)
    return (
        float(selection.is_read.mean()),
        estimate_pair_cost(query, boxes, selection.is_read, share),
    )


def droppable_share(call: Call) -> float:
    """Return the share of a row's weight that may be skipped."""
    upcast = call.upcast()
    precision = float(np.finfo(upcast.fw.dtype_name(upcast.query)).eps)
    return max(call.tolerance or 0.0, precision)


def run(call: Call) -> tuple[Array, Array | None, None]:
    """Return the output (…, n, d_v) and, if requested, the log-sum-exp (…, n, 1)."""
    call = call.upcast()
    fw, share = call.fw, droppable_share(call)
    leaves = tree.array_leaves(fw, call)

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        fresh = tree.replace_arrays(fw, call, arrays)
        results = [
            _map_chunks(
                query,
                build_boxes(key, value),
                lambda q, boxes: pool_queries(q, boxes, share),
            )
            for _, query, key, value in _split_problems(fresh)
        ]
        rows = (np.concatenate(x) for x in zip(*results, strict=True))
        saved = [
            fw.array_from_host(x.reshape(*call.lead, call.n, -1), call.query, "float64")
            for x in rows
        ]
        outputs = (fw.astype(x, fw.dtype_name(call.query)) for x in saved[: 1 + call.wants_lse])
        return tuple(outputs), tuple(saved)

    def backward(arrays: Arrays, saved: Arrays, gradients: Arrays) -> Gradients:
        main = _run_backward(tree.replace_arrays(fw, call, arrays), share, saved, gradients)
        return (*main, *[None] * (len(arrays) - 3))

    outputs = fw.run_differentiable(forward, backward, dense.build_reference(call), leaves)
    return outputs[0], outputs[1] if call.wants_lse else None, None


def _inverse_width(call: Call) -> float:
    """Return 1 / σ√T. With vectors multiplied by this factor, the score is −‖q − k‖²/2."""
    sigma, temperature = (
        float(call.fw.to_numpy(x).reshape(())) if is_array(x) else float(x)
        for x in (call.score.bandwidth, call.weighting.temperature)  # type: ignore[attr-defined]
    )
    inside = sigma * math.sqrt(temperature) if temperature > 0 else math.nan
    return 1 / inside if inside > 0 else math.nan


def _split_problems(call: Call) -> Iterator[tuple[tuple[int, ...], Numbers, Numbers, Numbers]]:
    """Yield each problem: its index in the lead, queries (d, n), keys (d, m), values (m, d_v).

    Queries and keys are float64 in units of the bandwidth. If all queries share the keys, there is
    one problem.
    """
    fw, scale = call.fw, _inverse_width(call)

    def scale_points(x: Numbers) -> Numbers:
        return np.multiply(x.T, scale, dtype=np.float64, order="C")

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
    """Return whether all queries have the same keys and values."""
    return all(math.prod(call.fw.static_shape(x)[:-2]) == 1 for x in (call.key, call.value))


def _map_chunks(
    query: Numbers, boxes: Boxes, work: Callable[[Numbers, Boxes], tuple[Numbers, ...]]
) -> tuple[Numbers, ...]:
    """Apply work(queries (d, r), boxes) to chunks of neighbouring queries, on all cores.

    The results are in the order of the queries.
    """
    order, tiling = _group_neighbours(query, boxes)
    query = query[:, order]

    def process_chunk(rows: Span, _: Any) -> tuple[Numbers, ...]:
        return work(query[:, rows.start : rows.start + rows.size], boxes)

    results = NUMPY.map_tiles(process_chunk, tiling)
    for x in results:
        x[order] = x.copy()
    return results


def _group_neighbours(query: Numbers, boxes: Boxes) -> tuple[Numbers, Tiling]:
    """Return an order of the queries in which neighbours are adjacent, and the chunks of it."""
    n = query.shape[1]
    size = max(
        min(MAX_QUERIES_PER_CHUNK, -(-n // threads.CORE_COUNT), 2**20 // len(boxes.counts)), 16
    )
    order, c = pack_points(query, size)
    order = order[order < n]
    return order, [(Span(at, min(c, n - at)), []) for at in range(0, n, c)]


# Backward


def _run_backward(
    call: Call, share: float, saved: Sequence[Array], gradients: Sequence[Array]
) -> list[Array]:
    """Return the gradients of query, key and value, over the pairs that the forward pass read."""
    fw, n, m = call.fw, call.n, call.m
    output_gradient = fw.to_numpy(gradients[0]).astype(np.float64)
    inputs = [*(fw.to_numpy(x) for x in saved), output_gradient]
    inputs.append(fw.to_numpy(gradients[1]) if call.wants_lse else np.zeros_like(inputs[1]))
    gradient_parts: list[list[Numbers]] = [[], [], []]
    problems = list(_split_problems(call))
    for at, query, key, value in problems:
        rows = [x.reshape(-1, x.shape[-1]) if not at else x[at] for x in inputs]
        boxes = build_boxes(key, value)
        problem_gradients = _problem_gradients(query, boxes, share, BackwardInputs(*rows))
        for parts, new in zip(gradient_parts, problem_gradients, strict=True):
            parts.append(new)
    scale = _inverse_width(call)
    lead = call.lead if len(problems) > 1 else ()
    d_query = np.concatenate(gradient_parts[0]).reshape(*call.lead, n, -1) * scale
    d_key = np.stack(gradient_parts[1]).reshape(*lead, m, -1) * scale
    d_value = np.stack(gradient_parts[2]).reshape(*lead, m, -1)
    out = [
        fw.array_from_host(x, call.query, fw.dtype_name(call.query))
        for x in (d_query, d_key, d_value)
    ]
    for i, x in ((1, call.key), (2, call.value)):
        shape = fw.static_shape(x)
        if lead:
            out[i] = calls.sum_shared_heads(call, out[i], shape[:-2])
        out[i] = fw.xp.reshape(out[i], shape)
    return out


def _problem_gradients(
    query: Numbers, boxes: Boxes, share: float, inputs: BackwardInputs
) -> tuple[Numbers, ...]:
    """Return the gradients of queries (n, d), keys (m, d) and values (m, d_v) of one problem.

    Each core sums the gradients of keys and values over a fixed part of the queries, so that every
    run gives the same result.
    """
    order, tiling = _group_neighbours(query, boxes)
    query, inputs = query[:, order], BackwardInputs(*(x[order] for x in inputs))
    d, _, c = boxes.points.shape
    value_width = boxes.values.shape[-1] - 1
    each = -(-len(tiling) // threads.CORE_COUNT)
    groups = [tiling[at : at + each] for at in range(0, len(tiling), each)]
    totals = [
        (np.zeros((len(boxes.counts), c, d)), np.zeros((len(boxes.counts), c, value_width)))
        for _ in groups
    ]
    d_query = np.empty((query.shape[1], d))

    def add_group_gradients(rows: Span, _: Any) -> tuple[Numbers]:
        for chunk, _ in groups[rows.start]:
            at = slice(chunk.start, chunk.start + chunk.size)
            part = BackwardInputs(*(x[at] for x in inputs))
            d_query[at] = query_gradients(query[:, at], boxes, share, part, totals[rows.start])
        return (np.empty((1, 1)),)

    NUMPY.map_tiles(add_group_gradients, [(Span(i, 1), []) for i in range(len(groups))])
    is_key = boxes.order < boxes.counts.sum()  # other entries are padding
    out = [np.empty_like(d_query)]
    out[0][order] = d_query
    for pair in zip(*totals, strict=True):
        total = sum(pair[1:], start=pair[0])
        in_key_order = np.empty((int(boxes.counts.sum()), total.shape[-1]))
        in_key_order[boxes.order[is_key]] = total.reshape(-1, total.shape[-1])[is_key]
        out.append(in_key_order)
    return tuple(out)
