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

from qkv.arrays import is_array, threads, tree
from qkv.arrays.base import Tiling
from qkv.arrays.numpy import FRAMEWORK as NUMPY
from qkv.engines import call as calls
from qkv.engines import dense, grid
from qkv.engines.call import Call
from qkv.engines.grid import Boxes, Numbers, Trace
from qkv.errors import count
from qkv.scores import Gaussian
from qkv.types import Array, Arrays, Slopes, Span
from qkv.weightings import Softmax

NAME = "near"

WIDTH = 8
"""Dimensions beyond which boxes rule hardly anything out."""

QUERIES, PAIRS = 16, 2**22
"""Fewer do not pay for putting the keys in boxes."""

QUERIED, SAMPLED = 64, 2**13
"""Queries and keys that are looked at to see what will be read."""

TRACED = "the numbers cannot be read while they are being traced"

CHUNK = 1024
"""Queries that go through the boxes together."""


def glance(call: Call) -> str | None:
    """A reason against it that takes no look at the numbers, which `cannot` takes."""
    if call.fw.name not in ("numpy", "torch") or type(call.score) is not Gaussian:
        return None  # `cannot` tells
    if call.fw.tracing(call.query):
        return TRACED
    d = call.fw.shape(call.key)[-1]
    if d > WIDTH:
        return f"boxes rule hardly a key out in {d} dimensions"
    n = call.n * (math.prod(call.lead) if _shared(call) else 1)
    if n < QUERIES or n * call.m < PAIRS:
        return f"{count(n)} queries of {count(call.m)} keys do not pay for putting them in boxes"
    return None


def cannot(call: Call) -> str | None:
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
    if fw.has_empty_axis((*call.lead, call.n, call.m, fw.shape(call.key)[-1])):
        return "there is nothing to compute"
    widths = (call.score.bandwidth, call.weighting.temperature)
    learned = [x for x in widths if is_array(x)]
    if any(math.prod(fw.shape(x)) != 1 for x in learned):
        return "it takes one bandwidth for all"
    if fw.gradients and fw.needs_gradient(learned):
        return "it gives no gradient for a learned bandwidth or temperature"
    if fw.tracing(call.query):
        return TRACED
    if any(fw.concrete(x) is None for x in (call.query, call.key, call.value)):
        return "the numbers are not on the host, where the boxes are laid out"
    narrow = _narrow(call)
    query, key, value = (fw.to_numpy(x) for x in (call.query, call.key, call.value))
    # A NaN is below nothing.
    in_range = all(float(np.max(np.abs(x))) * narrow < 1e150 for x in (query, key))
    if not (in_range and math.isfinite(np.sum(value, dtype=np.float64))):
        return "an argument is not finite, or the bandwidth too narrow for its range"
    return None


def declines(call: Call) -> str | None:
    read, cost = outlook(call)
    if read * cost > 1 and not isinstance(call.lowering, str):
        return f"{_part(read)} of the pairs count, in boxes that are slow to score"
    return None


def looks(call: Call) -> bool:
    """What the boxes rule out is for the numbers to say."""
    return True


def describe(call: Call) -> str:
    """What is read and what may be lost."""
    read = _part(outlook(call)[0])
    return f"reads {read} of the pairs, drops at most {share_of(call):.2g} of each row's weight"


def _part(read: float) -> str:
    return f"about {100 * read:.2g} %" if read < 0.99 else "nearly all"


def outlook(call: Call) -> tuple[float, float]:
    """The part of the pairs that will be read, and the cost of one in plain products.

    A few queries, and boxes of fewer keys, stand for all.
    """
    call = call.precise()
    few, some = max(call.n // QUERIED, 1), max(call.m // SAMPLED, 1)
    part = replace(
        call,
        query=call.query[..., ::few, :],
        key=call.key[..., ::some, :],
        value=call.value[..., ::some, :1],  # type: ignore[index]
    )
    query, key, value = next(_parts(part))[1:]
    share = share_of(call)
    boxes = grid.boxed(key, value, max(grid.LEAF // some, 1))
    found = grid.reach(query[:, :QUERIED], boxes, share)
    return float(found.keep.mean()), grid.cost(query[:, :QUERIED], boxes, found.keep, share)


def share_of(call: Call) -> float:
    """The share of a row's weight that may be left out."""
    wide = call.precise()
    own = float(np.finfo(wide.fw.dtype(wide.query)).eps)
    return max(call.tolerance or 0.0, own)


def run(call: Call) -> tuple[Array, Array | None, None]:
    """The output (…, n, d_v) and, where wanted, the log-sum-exp (…, n, 1)."""
    call = call.precise()
    fw, share = call.fw, share_of(call)
    leaves = tree.leaves(fw, call)

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        given = tree.rebuild(fw, call, arrays)
        found = [
            _in_chunks(query, grid.boxed(key, value), lambda q, boxes: grid.pooled(q, boxes, share))
            for _, query, key, value in _parts(given)
        ]
        rows = (np.concatenate(x) for x in zip(*found, strict=True))
        kept = [fw.constant(x.reshape(*call.lead, call.n, -1), call.query, "float64") for x in rows]
        own = (fw.astype(x, fw.dtype(call.query)) for x in kept[: 1 + call.wants_lse])
        return tuple(own), tuple(kept)

    def backward(arrays: Arrays, kept: Arrays, gradients: Arrays) -> Slopes:
        found = _backward(tree.rebuild(fw, call, arrays), share, kept, gradients)
        return (*found, *[None] * (len(arrays) - 3))

    outputs = fw.differentiable(forward, backward, dense.reference(call), leaves)
    return outputs[0], outputs[1] if call.wants_lse else None, None


def _narrow(call: Call) -> float:
    """1 / σ√T, the factor that makes the score −‖q − k‖²/2."""
    sigma, temperature = (
        float(call.fw.to_numpy(x).reshape(())) if is_array(x) else float(x)
        for x in (call.score.bandwidth, call.weighting.temperature)  # type: ignore[attr-defined]
    )
    inside = sigma * math.sqrt(temperature) if temperature > 0 else math.nan
    return 1 / inside if inside > 0 else math.nan


def _parts(call: Call) -> Iterator[tuple[tuple[int, ...], Numbers, Numbers, Numbers]]:
    """The problems in the call: where in the lead, queries (d, n), keys (d, m), values (m, d_v).

    Queries and keys are float64 and in units of the bandwidth. Keys that all share are boxed once.
    """
    fw, narrow = call.fw, _narrow(call)

    def scaled(x: Numbers) -> Numbers:
        return np.multiply(x.T, narrow, dtype=np.float64, order="C")

    query = fw.to_numpy(call.query)
    key, value = (fw.to_numpy(calls.share_heads(call, x)) for x in (call.key, call.value))
    if _shared(call):
        flat = query.reshape(-1, query.shape[-1])
        yield (), scaled(flat), scaled(key.reshape(key.shape[-2:])), value.reshape(value.shape[-2:])
        return
    key, value = (np.broadcast_to(x, (*call.lead, *x.shape[-2:])) for x in (key, value))
    for at in np.ndindex(call.lead):
        yield at, scaled(query[at]), scaled(key[at]), value[at]


def _shared(call: Call) -> bool:
    """Whether all queries look at the same keys and values."""
    return all(math.prod(call.fw.shape(x)[:-2]) == 1 for x in (call.key, call.value))


def _in_chunks(
    query: Numbers, boxes: Boxes, work: Callable[[Numbers, Boxes], tuple[Numbers, ...]]
) -> tuple[Numbers, ...]:
    """work(queries (d, r), boxes) on neighbours together, on all cores, put back in order."""
    order, tiling = _neighbours(query, boxes)
    query = query[:, order]

    def some(rows: Span, _: Any) -> tuple[Numbers, ...]:
        return work(query[:, rows.start : rows.start + rows.size], boxes)

    found = NUMPY.tiled(some, tiling)
    for x in found:
        x[order] = x.copy()
    return found


def _neighbours(query: Numbers, boxes: Boxes) -> tuple[Numbers, Tiling]:
    """An order in which neighbours stand together, and chunks of it."""
    n = query.shape[1]
    size = max(min(CHUNK, -(-n // threads.CORES), 2**20 // len(boxes.counts)), 16)
    order, c = grid.packed(query, size)
    order = order[order < n]
    return order, [(Span(at, min(c, n - at)), []) for at in range(0, n, c)]


# Backward


def _backward(
    call: Call, share: float, kept: Sequence[Array], gradients: Sequence[Array]
) -> list[Array]:
    """The gradients of query, key and value, over the pairs that the forward pass read."""
    fw, n, m = call.fw, call.n, call.m
    along = fw.to_numpy(gradients[0]).astype(np.float64)
    given = [*(fw.to_numpy(x) for x in kept), along]
    given.append(fw.to_numpy(gradients[1]) if call.wants_lse else np.zeros_like(given[1]))
    found: list[list[Numbers]] = [[], [], []]
    parts = list(_parts(call))
    for at, query, key, value in parts:
        rows = [x.reshape(-1, x.shape[-1]) if not at else x[at] for x in given]
        boxes = grid.boxed(key, value)
        for total, new in zip(found, _pulled(query, boxes, share, Trace(*rows)), strict=True):
            total.append(new)
    narrow = _narrow(call)
    lead = call.lead if len(parts) > 1 else ()
    d_query = np.concatenate(found[0]).reshape(*call.lead, n, -1) * narrow
    d_key = np.stack(found[1]).reshape(*lead, m, -1) * narrow
    d_value = np.stack(found[2]).reshape(*lead, m, -1)
    made = [fw.constant(x, call.query, fw.dtype(call.query)) for x in (d_query, d_key, d_value)]
    for i, x in ((1, call.key), (2, call.value)):
        shape = fw.shape(x)
        if lead:
            made[i] = calls.fold_heads(call, made[i], shape[:-2])
        made[i] = fw.xp.reshape(made[i], shape)
    return made


def _pulled(query: Numbers, boxes: Boxes, share: float, kept: Trace) -> tuple[Numbers, ...]:
    """The gradients of queries (n, d), keys (m, d) and values (m, d_v) of one problem.

    Each core sums those of keys and values over a fixed part of the queries, so that a second run
    gives the same digits.
    """
    order, tiling = _neighbours(query, boxes)
    query, kept = query[:, order], Trace(*(x[order] for x in kept))
    d, _, c = boxes.points.shape
    wide = boxes.values.shape[-1] - 1
    each = -(-len(tiling) // threads.CORES)
    groups = [tiling[at : at + each] for at in range(0, len(tiling), each)]
    totals = [
        (np.zeros((len(boxes.counts), c, d)), np.zeros((len(boxes.counts), c, wide)))
        for _ in groups
    ]
    gained = np.empty((query.shape[1], d))

    def some(rows: Span, _: Any) -> tuple[Numbers]:
        for chunk, _ in groups[rows.start]:
            at = slice(chunk.start, chunk.start + chunk.size)
            part = Trace(*(x[at] for x in kept))
            gained[at] = grid.pulled(query[:, at], boxes, share, part, totals[rows.start])
        return (np.empty((1, 1)),)

    NUMPY.tiled(some, [(Span(i, 1), []) for i in range(len(groups))])
    real = boxes.order < boxes.counts.sum()
    back = [np.empty_like(gained)]
    back[0][order] = gained
    for pair in zip(*totals, strict=True):
        total = sum(pair[1:], start=pair[0])
        summed = np.empty((int(boxes.counts.sum()), total.shape[-1]))
        summed[boxes.order[real]] = total.reshape(-1, total.shape[-1])[real]
        back.append(summed)
    return tuple(back)
