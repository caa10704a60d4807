"""The output and the weights together, some queries at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from qkv import attention, weightings
from qkv.arrays import framework, tree
from qkv.engines import dense, native, streaming, triton
from qkv.engines.call import Call
from qkv.scores import ScaledDot
from qkv.types import Array, Span
from qkv.weightings import Softmax

BLOCK = 2**20
"""Weights of all heads that are held at once where only their mean is wanted."""

BLOCK_CUDA = 2**23
"""The same on a device that a smaller block would leave idle."""


HALF = (torch.float16, torch.bfloat16)


def plain_with_weights(
    query: Array, key: Array, value: Array, scale: float, average: bool
) -> tuple[Array, Array] | None:
    """Softmax of scale · q·k over all keys, (batch, heads, n, d): the output by torch's kernel, and
    α = exp(s − lse) from the log-sum-exp that it finds. None where there is no such kernel."""
    if query.device.type == "cuda":
        if query.dtype not in HALF or not _flashes(query):
            return None
        from qkv.engines.triton.weights import weights as on_chip

        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = kernel(query, key, value, 0.0, False, False, scale=scale)
        return out, on_chip(query, key, lse.detach(), scale, None, average)
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64):
        return None
    fw, parts = framework("torch"), (query, key, value)
    held: list[Any] = []

    def kernel_of(found: list[Array], *x: Array) -> Array:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(*x, 0.0, False, scale=scale)
        found.append(lse.detach())
        return out

    def forward(*arrays: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        found: list[Array] = []
        out, pull = fw.vjp(partial(kernel_of, found), *arrays)
        held[:] = [pull]  # with the kernel's own graph, for the way back
        return (out, _alpha(arrays[0], arrays[1], found[0], scale, average)), (found[0],)

    def backward(
        arrays: Sequence[Array], kept: Sequence[Array], gradients: Sequence[Array]
    ) -> tuple[Array | None, ...]:
        along, slope = gradients
        dquery, dkey, dvalue = held[0](along)
        if slope.any():  # mostly nobody learns from the weights
            more = _alpha_slopes(arrays[0], arrays[1], kept[0], scale, average, slope)
            dquery, dkey = dquery + more[0], dkey + more[1]
        return dquery, dkey, dvalue

    def reference(query: Array, key: Array, value: Array) -> tuple[Array, ...]:
        call = Call(query, key, value, ScaledDot(scale), Softmax())
        return _some(call, Span(0, call.n), average)

    if fw.needs_gradient(parts):
        return fw.custom(forward, backward, reference, parts)  # type: ignore[return-value]
    seen: list[Array] = []
    out = kernel_of(seen, *parts)
    return out, _alpha(query, key, seen[0], scale, average)


def _flashes(query: Array) -> bool:
    """Whether the kernel itself, which SDPA would prepare these for, takes such vectors here."""
    fits = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256 and native.has_triton()
    return fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _pieces(query: Array, key: Array) -> Iterator[slice]:
    """Rows whose weights of all heads are held at once."""
    size = max(BLOCK // max(query[:, :, 0, 0].numel() * key.shape[-2], 1), 1)
    return (slice(at, at + size) for at in range(0, query.shape[-2], size))


def _alpha(query: Array, key: Array, lse: Array, scale: float, average: bool) -> Array:
    batch, heads, n, _ = query.shape
    lead = (batch,) if average else (batch, heads)
    out = query.new_empty(*lead, n, key.shape[-2])
    for some in _pieces(query, key):
        alpha = _exponentials(query[:, :, some], key, lse[:, :, some], scale)
        out[..., some, :] = alpha.mean(1) if average else alpha
    return out


def _exponentials(query: Array, key: Array, lse: Array, scale: float) -> Array:
    return (query * scale @ key.mT).sub_(lse[..., None]).exp_()


def _alpha_slopes(
    query: Array, key: Array, lse: Array, scale: float, average: bool, slope: Array
) -> tuple[Array, Array]:
    """∂L/∂q and ∂L/∂k of the weights alone: with g = ∂L/∂α, ∂L/∂s = α (g − Σ α g)."""
    dquery, dkey = torch.empty_like(query), torch.zeros_like(key)
    for some in _pieces(query, key):
        q = query[:, :, some]
        alpha = _exponentials(q, key, lse[:, :, some], scale)
        g = slope[:, None, some] / query.shape[1] if average else slope[:, :, some]
        along = g * alpha
        along.addcmul_(alpha, along.sum(-1, keepdim=True), value=-1)
        dquery[:, :, some] = along @ key * scale
        dkey += along.mT @ (q * scale)
    return dquery, dkey


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
    call = attention.request(query, key, value, score, weighting, mask, dropout_p, None, None)
    if _is_plain(call):
        found = plain_with_weights(query, key, value, native.scale_of(call), average)
        if found is not None:
            return found
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


def _is_plain(call: Call) -> bool:
    """Whether torch's kernel takes the call as it is: dot products, softmax, all keys."""
    if call.rule is not None or call.bias is not None or torch.compiler.is_compiling():
        return False
    shapes = [tuple(x.shape) for x in (call.query, call.key, call.value) if x is not None]
    alike = len({(*shape[:-2], shape[-1]) for shape in shapes}) == 1 and len(shapes[0]) == 4
    return alike and native.cannot(call) is None


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
