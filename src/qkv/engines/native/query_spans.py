"""Runs PyTorch's kernel on each span of queries and the keys that the mask allows for it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from qkv.engines import call as calls
from qkv.engines import dense, streaming
from qkv.engines.call import Call
from qkv.engines.native.sdpa_kernel import MIN_KEYS_SHOWING_NAN, kernel_mask, run_kernel
from qkv.frameworks import tree
from qkv.util.types import Array, Arrays, Gradients, Span

QUERIES_PER_SPAN = 64
"""Queries per kernel call under a mask that allows only some of the keys."""

MAX_MASK_NUMBERS = 2**24
"""Largest mask that is passed to the kernel in one call."""

MAX_VISIBLE_SHARE = 0.75
"""If the mask allows at least this share of the pairs, one call with the whole mask is used."""


PAIRS_PER_CALL = 2**17
"""Pairs of query and key that the kernel computes while one more call of it starts."""


def spans_pay_off(call: Call, tiling: Any) -> bool:
    """Return whether one kernel call per span is faster than one call with the whole mask."""
    mask_arrays = call.rule.list_arrays()  # type: ignore[union-attr]
    lead = max((math.prod(x.shape[:-2]) for x in mask_arrays), default=1)
    if lead * call.n * call.m > MAX_MASK_NUMBERS:
        return True
    heads, visible = math.prod(call.lead), 0
    calls_of_kernel = 0
    for group in _group_equal_spans(call, tiling):
        visible += sum(rows.size * span.size for rows, keys in group for span in keys)
        calls_of_kernel += 1
    started = calls_of_kernel * PAIRS_PER_CALL
    return bool(heads * visible + started < MAX_VISIBLE_SHARE * heads * call.n * call.m)


def can_trim_keys(call: Call) -> bool:
    """Return whether `trim_keys` supports the call: a mask that is the same for all queries."""
    inputs = (call.query, call.key, call.value)
    if not (call.query.is_cpu and call.rule.is_shared_by_queries):  # type: ignore[union-attr]
        return False
    return not (call.fw.is_traced(call.query) or call.fw.needs_gradient(inputs))


def trim_keys(call: Call) -> tuple[list[Any], Array | None]:
    """Return (query, key, value) and mask, without the masked keys at both ends."""
    mask = kernel_mask(call, calls.make_block(call))
    inputs: list[Any] = [call.query, call.key, call.value]
    if mask is None or mask.shape[-1] != call.m:
        return inputs, mask
    allowed = (mask if mask.dtype == torch.bool else mask != -math.inf).numpy()
    at = allowed.reshape(-1, call.m).any(0).nonzero()[0]
    if at.size == 0:
        return inputs, mask
    start = max(min(at[0], call.m - MIN_KEYS_SHOWING_NAN), 0)
    visible = slice(start, max(at[-1] + 1, start + MIN_KEYS_SHOWING_NAN))
    if visible.stop - start >= MAX_VISIBLE_SHARE * call.m:
        return inputs, mask
    return [call.query, *(x[..., visible, :] for x in inputs[1:])], mask[..., visible]


def build_tiling(call: Call) -> Any:
    start, end = call.rule.key_extent(Span(call.n // 2, 1), call.n, call.m)  # type: ignore[union-attr]
    keys_per_span = (
        call.m if end - start < call.m else QUERIES_PER_SPAN
    )  # either one contiguous range of keys, or blocks of keys of which some are skipped
    return streaming.build_tiling(call, min(QUERIES_PER_SPAN, call.n), min(keys_per_span, call.m))


def run_spans(call: Call, tiling: Any) -> Array:
    """Return softmax(qkᵀ) v, computed for each span of queries and its allowed keys."""
    fw = call.fw
    if not fw.needs_gradient((call.query, call.key, call.value)):
        return _run_rows(tiling, call)[0]

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        return (
            _run_rows(tiling, tree.replace_arrays(fw, call, [x.detach() for x in arrays]))[0],
        ), ()

    def backward(arrays: Arrays, saved: Arrays, gradients: Arrays) -> Gradients:
        fresh = tree.replace_arrays(fw, call, [x.detach() for x in arrays])
        main = _run_rows(tiling, fresh, gradients[0])[1] or []
        return (*main, *[None] * (len(arrays) - 3))

    return fw.custom_gradient(
        forward, backward, dense.build_reference(call), tree.array_leaves(fw, call)
    )[0]


def _run_rows(
    tiling: Any, call: Call, gradient: Array | None = None
) -> tuple[Array, list[Array] | None]:
    """Run the kernel on each span of queries and its allowed keys; return the output.

    Given the gradient of the output, return the gradients of query, key and value instead.
    """
    value: Any = call.value
    outs: list[Array] = []
    totals = None
    if gradient is not None:
        totals = [torch.zeros_like(x) for x in (call.query, call.key, value)]
    for group in _group_equal_spans(call, tiling):
        rows, runs = group[0]
        rows = Span(rows.start, sum(span.size for span, _ in group))
        if not runs:
            outs.append(call.query.new_zeros((*call.lead, rows.size, value.shape[-1])))
            continue
        first, last = runs[-1], group[-1][1][-1]
        key_count = last.start + last.size - first.start
        runs = [*runs[:-1], Span(first.start, key_count, is_unmasked=first.is_unmasked)]
        inputs = [
            call.fw.slice_span(call.query, rows, -2),
            _gather_rows(call.key, runs),
            _gather_rows(value, runs),
        ]
        if totals is None:
            outs.append(_run_group(call, group, inputs))
            continue
        inputs = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            out = _run_group(call, group, inputs)
        gradients = torch.autograd.grad(out, inputs, call.fw.slice_span(gradient, rows, -2))
        call.fw.add_to_span(totals[0], gradients[0], rows, None)
        for total, new in zip(totals[1:], gradients[1:], strict=True):
            at = 0
            for run in runs:
                call.fw.add_to_span(total, new[..., at : at + run.size, :], run, None)
                at += run.size
    return (torch.cat(outs, -2) if totals is None else call.query), totals


SpanGroup = list[tuple[Span, list[Span]]]


def _group_equal_spans(call: Call, tiling: Any) -> list[SpanGroup]:
    """Return the tiling in groups; each group is one kernel call.

    A mask on distances is the same for every span along the diagonal, so neighbouring spans with
    equally many keys form one group.
    """
    groups: list[SpanGroup] = []
    for rows, keys in tiling:
        runs = _join_spans(keys)
        if groups and call.rule.is_relative and call.bias is None:  # type: ignore[union-attr]
            (last_rows, last_runs), step = groups[-1][-1], rows.size
            if len(runs) == len(last_runs) == 1 and last_rows.size == step:
                moved = last_runs[0]._replace(start=last_runs[0].start + step)
                if runs[0] == moved:
                    groups[-1].append((rows, runs))
                    continue
        groups.append([(rows, runs)])
    return groups


def _run_group(call: Call, group: SpanGroup, inputs: list[Array]) -> Array:
    """Run the kernel on a group of spans, with the spans as one more batch axis."""
    rows, runs = group[0]
    mask = None
    if call.bias is not None or not all(run.is_unmasked for run in runs):
        mask = _concat_masks(
            [kernel_mask(call, calls.make_block(call, rows, run)) for run in runs], runs
        )
    if len(group) == 1:
        return run_kernel(call, inputs, mask, False)
    count, size, key_count = len(group), rows.size, runs[0].size
    query, key, value = inputs
    lead = (*call.lead, count)
    query = query.reshape(*lead, size, query.shape[-1])
    key, value = (
        calls.repeat_shared_heads(call, x).unfold(-2, key_count, size).transpose(-1, -2)
        for x in (key, value)
    )
    inputs = [query, key, value]
    return run_kernel(replace(call, query=query), inputs, mask, False).flatten(-3, -2)


def _concat_masks(blocks: list[Array | None], runs: list[Span]) -> Array:
    """Return the masks of several key spans as one mask. None in `blocks` allows all pairs."""
    first = next(x for x in blocks if x is not None)
    filled = [
        first.new_ones(1, run.size, dtype=torch.bool) if x is None else x
        for x, run in zip(blocks, runs, strict=True)
    ]
    if len(filled) == 1:
        return first
    shape = torch.broadcast_shapes(*(x.shape[:-1] for x in filled))
    return torch.cat([x.to(first).expand(*shape, x.shape[-1]) for x in filled], -1)


def _join_spans(keys: list[Span]) -> list[Span]:
    """Return the spans with adjacent ones joined."""
    runs = keys[:1]
    for span in keys[1:]:
        last = runs[-1]
        if last.start + last.size == span.start:
            runs[-1] = Span(
                last.start, last.size + span.size, is_unmasked=last.is_unmasked and span.is_unmasked
            )
        else:
            runs.append(span)
    return runs


def _gather_rows(x: Array, runs: list[Span]) -> Array:
    pieces = [x[..., run.start : run.start + run.size, :] for run in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -2)
