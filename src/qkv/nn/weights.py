"""The output and the weights together, some queries at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from qkv import attention, weightings
from qkv.arrays import tree
from qkv.engines import dense, streaming, triton
from qkv.engines.call import Call
from qkv.types import Array, Span
from qkv.weightings import Hard, Normalized, Softmax

BLOCK = 2**20
"""Weights of all heads that are held at once where only their mean is wanted."""

BLOCK_CUDA = 2**23
"""The same on a device that a smaller block would leave idle."""


def with_weights(
    query: Array,
    key: Array,
    value: Array,
    score: Any,
    weighting: Any,
    mask: Any,
    dropout_p: float,
    weights: str,
) -> tuple[Array, Array]:
    """Σᵢ α(q, kᵢ) vᵢ and α (…, n, m), of every head or ("mean") averaged over them.

    The scores of all heads are never held, nor for the mean their weights; on the way back each
    piece is made again.
    """
    average = weights == "mean"
    weighting = weightings.resolve(weighting)
    if _is_made_of_several(weighting):
        out, alpha = attention.attend(
            query,
            key,
            value,
            score=score,
            weighting=weighting,
            mask=mask,
            dropout_p=dropout_p,
            return_weights=True,
        )
        return out, alpha.mean(-3) if average else alpha
    call = attention.request(query, key, value, score, weighting, mask, dropout_p, None, None)
    on_cuda = query.device.type == "cuda"
    found = triton.with_weights(call, average) if on_cuda else None
    if found is not None:
        return found
    if type(weighting) is Softmax:
        call = replace(call, weighting=Fused(weighting.temperature))
    most = BLOCK_CUDA if on_cuda else BLOCK
    size = max(most // max(math.prod(call.lead) * call.m, 1), 1)
    if call.n <= size or torch.compiler.is_compiling():
        return _some(call, Span(0, call.n), average)
    return _in_pieces(call, streaming.spans(call.fw, call.n, size), average)


def _some(call: Call, rows: Span, average: bool) -> tuple[Array, Array]:
    """The output and the weights of some queries."""
    out, _, alpha = dense.run(call, rows)
    alpha = alpha.mean(-3) if average else alpha
    return out.to(call.query.dtype), alpha.to(call.query.dtype)  # type: ignore[union-attr]


def _in_pieces(call: Call, spans: list[Span], average: bool) -> tuple[Array, Array]:
    fw = call.fw
    call = streaming.hoist(call, [(spans[0], [Span(0, call.m)])])
    leaves = tree.leaves(fw, call)
    learned = [i for i, x in enumerate(leaves) if x.requires_grad]

    def forward(*arrays: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        fresh = tree.rebuild(fw, call, arrays)
        lead = call.lead[:-1] if average else call.lead
        out = call.query.new_empty((*call.lead, call.n, call.value.shape[-1]))  # type: ignore[union-attr]
        alpha = call.query.new_empty((*lead, call.n, call.m))
        for rows in spans:
            at = slice(rows.start, rows.start + rows.size)
            out[..., at, :], alpha[..., at, :] = _some(fresh, rows, average)
        return (out, alpha), ()

    def backward(
        arrays: Sequence[Array], kept: Sequence[Array], gradients: Sequence[Array]
    ) -> tuple[Array | None, ...]:
        found: list[Array | None] = [None] * len(arrays)
        for rows in spans:

            def both(*chosen: Array, rows: Span = rows) -> Array:
                full = list(arrays)
                for i, x in zip(learned, chosen, strict=True):
                    full[i] = x
                parts = _some(tree.rebuild(fw, call, full), rows, average)
                return torch.cat([x.flatten() for x in parts])

            _, pull = fw.vjp(both, *(arrays[i] for i in learned))
            along = torch.cat([fw.cut(x, rows, -2).flatten() for x in gradients])
            for i, new in zip(learned, pull(along), strict=True):
                total = found[i]
                found[i] = new if total is None or new is None else total.add_(new)
        return tuple(found)

    def reference(*arrays: Array) -> tuple[Array, ...]:
        return _some(tree.rebuild(fw, call, arrays), Span(0, call.n), average)

    if not fw.needs_gradient(leaves):
        out, alpha = forward(*leaves)[0]
    else:
        out, alpha = fw.custom(forward, backward, reference, leaves)
    return out, alpha


class Fused(Softmax):
    """Softmax by torch's own kernel: one pass over the scores in place of five."""

    def weights(self, scores: Array, live: Array | None, k: Array) -> Array:
        if live is None:
            return scores.softmax(-1)
        dead = ~live
        # A row without a live key is NaN at first.
        return scores.masked_fill(dead, -math.inf).softmax(-1).masked_fill(dead, 0.0)


def _is_made_of_several(weighting: Any) -> bool:
    """Whether `attend` itself puts the weighting together from others."""
    hard = isinstance(weighting, Hard) and weighting.straight_through
    return hard or (isinstance(weighting, Normalized) and weighting.on_empty != "zero")
