"""α = exp(s − lse) beside torch's kernel, from the log-sum-exp that it finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from qkv.engines import call as calls
from qkv.engines import dense, native
from qkv.engines.call import Call
from qkv.frameworks.torch import is_finite, should_copy_transpose
from qkv.util.caches import memoize
from qkv.util.types import Array, Arrays, Gradients

MAX_WEIGHTS_PER_BLOCK = 2**20
"""Weights of all heads that are held at once where only their mean is wanted."""


def has_equal_leads(call: Call) -> bool:
    """Whether the three have the same leading axes, and no 16-bit numbers."""
    leads = {tuple(x.shape[:-2]) for x in (call.query, call.key, call.value)}  # type: ignore[union-attr]
    return len(leads) == 1 and call.upcast() is call


def run_dense(call: Call) -> tuple[Array, Array] | None:
    """The equation under a mask, for arrays whose numbers nobody has looked at; None where one that
    is masked out has spoiled the output, or would spoil a gradient."""
    live = calls.compute_live_pairs(call, calls.make_block(call))
    return None if live is None else _bind_masked(call)(call.query, call.key, call.value, live)


def build_direct_runner(call: Call) -> Callable[..., tuple[Array, Array] | None]:
    """The same of the arrays as they were given, for a kind whose mask is one of them."""
    masked = _bind_masked(call)
    return lambda query, key, value, score, weighting, mask, seed: masked(query, key, value, mask)


def _bind_masked(call: Call) -> Callable[..., tuple[Array, Array] | None]:
    learning = call.fw.needs_gradient((call.query, call.key, call.value))
    average, scale = call.wants_weights == "mean", native.effective_scale(call)
    return partial(_run_masked, scale=scale, learning=learning, average=average)


def _run_masked(
    query: Array, key: Array, value: Array, live: Array, scale: float, learning: bool, average: bool
) -> tuple[Array, Array] | None:
    (*lead, n, d), m = query.shape, key.shape[-2]
    if live.ndim > 2:
        live = live.expand(*lead, *live.shape[-2:]).flatten(0, -3)
    query, key = query.reshape(-1, n, d), key.reshape(-1, m, d)
    value = value.reshape(-1, m, value.shape[-1])
    bias = live.to(query.dtype).log_()  # 0, or −∞
    s = torch.baddbmm(bias, query, key.mT if learning else _transpose_keys(query, key), alpha=scale)
    alpha = torch.softmax(s, -1)
    out = torch.bmm(alpha, value)
    # What leaks is NaN, and so is the row of a query that is not finite. Of such a key all scores
    # may be −∞, which does not show until 0 · ∞ spoils the gradient of a query that sees it not.
    if not (is_finite(out, key) if learning else out.max().item() < math.inf):
        return None
    alpha = alpha.view(*lead, n, m)
    return out.view(*lead, n, -1), alpha.mean(-3) if average else alpha


def run(call: Call) -> tuple[Array, Array] | None:
    """The output and α, of every head or their mean; None where torch's kernel does not give it.

    query (batch, heads, n, d), key and value (batch, heads, m, d), no mask.
    """
    if call.rule is not None or call.dropout or call.wants_lse or call.fw.is_traced(call.query):
        return None
    if call.query.device.type == "cuda":
        return run_on_device(call) if fits_flash_kernel(call) else None
    parts: list[Any] = [call.query, call.key, call.value]
    if not _has_equal_shapes(parts):
        return None
    query, scale, average = call.query, native.effective_scale(call), call.wants_weights == "mean"
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64):
        return None
    if not call.fw.needs_gradient(parts):
        seen: list[Array] = []
        out = _run_cpu_kernel(seen, scale, *parts)
        return out, _compute_weights(query, call.key, seen[0], scale, average)
    return _run_with_gradient(call, parts, scale, average)


def run_on_device(call: Call) -> tuple[Array, Array]:
    """The same on CUDA, where its kernel takes it."""
    from qkv.engines.triton.weights import compute_weights

    query, key, scale = call.query, call.key, native.effective_scale(call)
    flash = torch._scaled_dot_product_flash_attention
    out, lse, *_ = flash(query, key, call.value, 0.0, False, False, scale=scale)
    return out, compute_weights(query, key, lse.detach(), scale, None, call.wants_weights == "mean")


def _run_with_gradient(
    call: Call, parts: Sequence[Array], scale: float, average: bool
) -> tuple[Array, Array]:
    fw = call.fw
    held: list[Any] = []

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        found: list[Array] = []
        out, pull = fw.vjp(partial(_run_cpu_kernel, found, scale), *arrays)
        held[:] = [pull]  # with the kernel's own graph, for the way back
        return (out, _compute_weights(arrays[0], arrays[1], found[0], scale, average)), (found[0],)

    def backward(arrays: Arrays, kept: Arrays, gradients: Arrays) -> Gradients:
        along, slope = gradients
        dquery, dkey, dvalue = held[0](along)
        if slope.any():  # mostly nobody learns from the weights
            more = _weight_gradients(arrays[0], arrays[1], kept[0], scale, average, slope)
            dquery, dkey = dquery + more[0], dkey + more[1]
        return dquery, dkey, dvalue

    def reference(query: Array, key: Array, value: Array) -> Arrays:
        out, _, alpha = dense.run(Call(query, key, value, call.score, call.weighting))
        return out, alpha.mean(-3) if average else alpha

    out, alpha = fw.custom_gradient(forward, backward, reference, parts)
    return out, alpha


def _run_cpu_kernel(found: list[Array], scale: float, *parts: Array) -> Array:
    flash = torch._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(*parts, 0.0, False, scale=scale)
    found.append(lse.detach())
    return out


def _has_equal_shapes(parts: Sequence[Array]) -> bool:
    """Whether the three have four axes, of which only the lengths differ."""
    shapes = [tuple(x.shape) for x in parts]
    return len({(*x[:-2], x[-1]) for x in shapes}) == 1 and len(shapes[0]) == 4


def fits_flash_kernel(call: Call) -> bool:
    """Whether a device's kernel itself, which SDPA would prepare these for, takes them."""
    query, half = call.query, (torch.float16, torch.bfloat16)
    if (
        not _has_equal_shapes((query, call.key, call.value))
        or query.dtype not in half
        or not query.is_cuda
    ):
        return False
    fits = native.has_triton() and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return fits and _device_capability(query.device) >= (8, 0)


_device_capability = memoize("engines.device_capabilities")(torch.cuda.get_device_capability)


def _row_slices(query: Array, key: Array) -> Iterator[slice]:
    """Rows whose weights of all heads are held at once."""
    size = max(MAX_WEIGHTS_PER_BLOCK // max(query[:, :, 0, 0].numel() * key.shape[-2], 1), 1)
    return (slice(at, at + size) for at in range(0, query.shape[-2], size))


def _compute_weights(query: Array, key: Array, lse: Array, scale: float, average: bool) -> Array:
    batch, heads, n, _ = query.shape
    lead = (batch,) if average else (batch, heads)
    out = query.new_empty(*lead, n, key.shape[-2])
    for some in _row_slices(query, key):
        alpha = _exponential_weights(query[:, :, some], key, lse[:, :, some], scale)
        out[..., some, :] = alpha.mean(1) if average else alpha
    return out


def _exponential_weights(query: Array, key: Array, lse: Array, scale: float) -> Array:
    return (query * scale @ _transpose_keys(query, key)).sub_(lse[..., None]).exp_()


def _transpose_keys(query: Array, key: Array) -> Array:
    """Kᵀ, for a product with queries whose gradient nobody wants."""
    return key.mT.contiguous() if should_copy_transpose(query, key) else key.mT


def _weight_gradients(
    query: Array, key: Array, lse: Array, scale: float, average: bool, slope: Array
) -> tuple[Array, Array]:
    """∂L/∂q and ∂L/∂k of the weights alone: with g = ∂L/∂α, ∂L/∂s = α (g − Σ α g)."""
    dquery, dkey = torch.empty_like(query), torch.zeros_like(key)
    for some in _row_slices(query, key):
        q = query[:, :, some]
        alpha = _exponential_weights(q, key, lse[:, :, some], scale)
        g = slope[:, None, some] / query.shape[1] if average else slope[:, :, some]
        along = g * alpha
        along.addcmul_(alpha, along.sum(-1, keepdim=True), value=-1)
        dquery[:, :, some] = along @ key * scale
        dkey += along.mT @ (q * scale)
    return dquery, dkey
