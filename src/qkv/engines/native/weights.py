"""Output and weights from PyTorch's kernel: α = exp(s − lse), with the kernel's log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from qkv.engines import call as calls
from qkv.engines import dense
from qkv.engines.call import Call
from qkv.engines.native.softmax_dot import effective_scale
from qkv.engines.triton_import import has_triton
from qkv.frameworks.torch import HALF_DTYPES, is_finite, should_copy_transpose
from qkv.util.caches import memoize
from qkv.util.types import Array, Arrays, Gradients

MAX_WEIGHTS_PER_BLOCK = 2**20
"""Weights of all heads in memory at once if only their mean is requested."""


def has_matching_leads(call: Call) -> bool:
    """Return whether query, key and value have the same leading axes, except for shared heads."""
    query, key, value = (tuple(x.shape[:-2]) for x in (call.query, call.key, call.value))  # type: ignore[union-attr]
    if call.exceeds_float32 or key != value:
        return False
    shares_heads = len(query) == len(key) == 2 and query[0] == key[0] and 0 not in key
    return query == key or shares_heads


def run_dense(call: Call) -> tuple[Array, Array] | None:
    """Return output and weights of a call by the equation, or None.

    None if a masked NaN or infinity reached the output, or would reach a gradient.
    """
    live = calls.compute_live_pairs(call, calls.make_block(call))
    return _build_dense_runner(call)(call.query, call.key, call.value, live)


def build_direct_runner(call: Call) -> Callable[..., tuple[Array, Array] | None]:
    """Return `run_dense` as a function of `attend`'s arguments, for an array mask or none."""
    run = _build_dense_runner(call)
    return lambda query, key, value, score, weighting, mask, seed: run(query, key, value, mask)


def _build_dense_runner(call: Call) -> Callable[..., tuple[Array, Array] | None]:
    needs_gradient = call.fw.needs_gradient((call.query, call.key, call.value))
    average, scale = call.wants_weights == "mean", effective_scale(call)
    return partial(_run_dense, scale=scale, needs_gradient=needs_gradient, average=average)


def _run_dense(
    query: Array,
    key: Array,
    value: Array,
    live: Array | None,
    scale: float,
    needs_gradient: bool,
    average: bool,
) -> tuple[Array, Array] | None:
    (*lead, n, d), m, dtype = query.shape, key.shape[-2], query.dtype
    if dtype in HALF_DTYPES:
        query, key, value = query.float(), key.float(), value.float()
    if key.shape[:-2] != query.shape[:-2]:
        key, value = (x.repeat_interleave(lead[1] // x.shape[1], 1) for x in (key, value))
    query, key = query.reshape(-1, n, d), key.reshape(-1, m, d)
    value = value.reshape(-1, m, value.shape[-1])
    keys = key.mT if needs_gradient else _transpose_keys(query, key)
    if live is None:
        s = torch.bmm(query * scale, keys)
    else:
        if live.ndim > 2:
            live = live.expand(*lead, *live.shape[-2:]).flatten(0, -3)
        bias = live.to(query.dtype).log_()  # 0, or −∞
        s = torch.baddbmm(bias, query, keys, alpha=scale)
    alpha = torch.softmax(s, -1)
    out = torch.bmm(alpha, value)
    # A masked NaN or infinity makes the output NaN, and so does a query that is not finite. But if
    # all scores of an infinite key are −∞, only the gradient shows the key, as 0 · ∞.
    if not (is_finite(out, key) if needs_gradient else out.max().item() < math.inf):
        return None
    alpha = alpha.view(*lead, n, m)
    alpha = alpha.mean(-3) if average else alpha
    return out.view(*lead, n, -1).to(dtype), alpha.to(dtype)


def run(call: Call) -> tuple[Array, Array] | None:
    """Return the output and α of every head, or their mean; None if the kernel does not support it.

    Shapes: query (batch, heads, n, d), key and value (batch, heads, m, d). There is no mask.
    """
    if call.rule is not None or call.dropout or call.wants_lse or call.fw.is_traced(call.query):
        return None
    if call.query.device.type == "cuda":
        return run_on_device(call) if fits_flash_kernel(call) else None
    inputs: list[Any] = [call.query, call.key, call.value]
    if not _has_equal_shapes(inputs):
        return None
    query, scale, average = call.query, effective_scale(call), call.wants_weights == "mean"
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64):
        return None
    if not call.fw.needs_gradient(inputs):
        lse_out: list[Array] = []
        out = _run_cpu_kernel(lse_out, scale, *inputs)
        return out, _compute_weights(query, call.key, lse_out[0], scale, average)
    return _run_with_gradient(call, inputs, scale, average)


def run_on_device(call: Call) -> tuple[Array, Array]:
    """Return the output and α on CUDA, for calls that fit the flash kernel."""
    from qkv.engines.triton.weights import compute_weights

    query, key, scale = call.query, call.key, effective_scale(call)
    flash = torch._scaled_dot_product_flash_attention
    out, lse, *_ = flash(query, key, call.value, 0.0, False, False, scale=scale)
    return out, compute_weights(query, key, lse.detach(), scale, None, call.wants_weights == "mean")


def _run_with_gradient(
    call: Call, inputs: Sequence[Array], scale: float, average: bool
) -> tuple[Array, Array]:
    fw = call.fw
    graph: list[Any] = []

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        lse_out: list[Array] = []
        out, pull = fw.vjp(partial(_run_cpu_kernel, lse_out, scale), *arrays)
        graph[:] = [pull]  # backward needs the kernel's autograd graph
        return (out, _compute_weights(arrays[0], arrays[1], lse_out[0], scale, average)), (
            lse_out[0],
        )

    def backward(arrays: Arrays, saved: Arrays, gradients: Arrays) -> Gradients:
        output_gradient, weight_gradient = gradients
        dquery, dkey, dvalue = graph[0](output_gradient)
        if weight_gradient.any():  # usually the loss does not depend on the weights
            extra = _weight_gradients(
                arrays[0], arrays[1], saved[0], scale, average, weight_gradient
            )
            dquery, dkey = dquery + extra[0], dkey + extra[1]
        return dquery, dkey, dvalue

    def reference(query: Array, key: Array, value: Array) -> Arrays:
        out, _, alpha = dense.run(Call(query, key, value, call.score, call.weighting))
        return out, alpha.mean(-3) if average else alpha

    out, alpha = fw.custom_gradient(forward, backward, reference, inputs)
    return out, alpha


def _run_cpu_kernel(lse_out: list[Array], scale: float, *inputs: Array) -> Array:
    flash = torch._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(*inputs, 0.0, False, scale=scale)
    lse_out.append(lse.detach())
    return out


def _has_equal_shapes(inputs: Sequence[Array]) -> bool:
    """Return whether the three arrays have four axes and differ only in their lengths."""
    shapes = [tuple(x.shape) for x in inputs]
    return len({(*x[:-2], x[-1]) for x in shapes}) == 1 and len(shapes[0]) == 4


def fits_flash_kernel(call: Call) -> bool:
    """Return whether the CUDA flash kernel supports the arrays without SDPA's preparation."""
    query, half = call.query, (torch.float16, torch.bfloat16)
    if (
        not _has_equal_shapes((query, call.key, call.value))
        or query.dtype not in half
        or not query.is_cuda
    ):
        return False
    fits = has_triton() and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return fits and _device_capability(query.device) >= (8, 0)


_device_capability = memoize("engines.device_capabilities")(torch.cuda.get_device_capability)


def _row_slices(query: Array, key: Array) -> Iterator[slice]:
    """Yield slices of the queries with at most MAX_WEIGHTS_PER_BLOCK weights in all heads."""
    size = max(MAX_WEIGHTS_PER_BLOCK // max(query[:, :, 0, 0].numel() * key.shape[-2], 1), 1)
    return (slice(at, at + size) for at in range(0, query.shape[-2], size))


def _compute_weights(query: Array, key: Array, lse: Array, scale: float, average: bool) -> Array:
    batch, heads, n, _ = query.shape
    lead = (batch,) if average else (batch, heads)
    out = query.new_empty(*lead, n, key.shape[-2])
    for rows in _row_slices(query, key):
        alpha = _exponential_weights(query[:, :, rows], key, lse[:, :, rows], scale)
        out[..., rows, :] = alpha.mean(1) if average else alpha
    return out


def _exponential_weights(query: Array, key: Array, lse: Array, scale: float) -> Array:
    return (query * scale @ _transpose_keys(query, key)).sub_(lse[..., None]).exp_()


def _transpose_keys(query: Array, key: Array) -> Array:
    """Return Kᵀ, for a product that needs no gradient."""
    return key.mT.contiguous() if should_copy_transpose(query, key) else key.mT


def _weight_gradients(
    query: Array, key: Array, lse: Array, scale: float, average: bool, weight_gradient: Array
) -> tuple[Array, Array]:
    """Return ∂L/∂q and ∂L/∂k through the weights: with g = ∂L/∂α, ∂L/∂s = α (g − Σ α g)."""
    dquery, dkey = torch.empty_like(query), torch.zeros_like(key)
    for rows in _row_slices(query, key):
        q = query[:, :, rows]
        alpha = _exponential_weights(q, key, lse[:, :, rows], scale)
        g = (
            weight_gradient[:, None, rows] / query.shape[1]
            if average
            else weight_gradient[:, :, rows]
        )
        score_gradient = g * alpha
        score_gradient.addcmul_(alpha, score_gradient.sum(-1, keepdim=True), value=-1)
        dquery[:, :, rows] = score_gradient @ key * scale
        dkey += score_gradient.mT @ (q * scale)
    return dquery, dkey
