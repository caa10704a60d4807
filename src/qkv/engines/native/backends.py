"""The fastest SDPA backend of PyTorch, measured once for each signature of a large CUDA call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from qkv.frameworks import load_framework
from qkv.frameworks.torch import without_saved_tensor_hooks
from qkv.util.caches import create_table, insert_bounded
from qkv.util.types import Array

MIN_PRODUCTS_TO_MEASURE = 2**34
"""The number of multiplications in QKᵀ from which measuring the backends may save time."""

SDPA: Any = torch._C._nn.scaled_dot_product_attention
"""PyTorch's operator itself. A program may have replaced the public
`torch.nn.functional.scaled_dot_product_attention` by `qkv.scaled_dot_product_attention`."""

_FASTEST_BACKENDS: dict[tuple[Any, ...], Any] = create_table("engines.fastest_sdpa_backends")
MAX_CACHED_BACKENDS = 4096
UNMEASURED = object()
"""Marks a signature that has not been measured. The entry None means: let PyTorch choose."""


def run_sdpa(
    inputs: Sequence[Array], mask: Array | None, is_causal: bool, scale: float, dropout: float = 0.0
) -> Array:
    """Return SDPA of arrays (batch, heads, rows, width), by the backend measured as the fastest."""
    query, key, value = inputs
    is_grouped = False
    if key.shape[1] != query.shape[1]:  # torch.compile needs a branch here, not a boolean
        is_grouped = True

    def call_sdpa() -> Array:
        out: Array = SDPA(
            query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=is_grouped
        )
        return out

    if query.device.type != "cuda" or mask is not None or load_framework("torch").is_traced(query):
        return call_sdpa()
    if query.numel() * key.shape[-2] < MIN_PRODUCTS_TO_MEASURE or dropout:
        return call_sdpa()
    signature = _backend_signature(query, key, value, is_causal)
    backend = _FASTEST_BACKENDS.get(signature, UNMEASURED)
    if backend is UNMEASURED:
        if torch.cuda.is_current_stream_capturing():
            return call_sdpa()
        backend = _measure_fastest(call_sdpa, inputs)
        insert_bounded(_FASTEST_BACKENDS, signature, backend, MAX_CACHED_BACKENDS)
    if backend is None:
        return call_sdpa()
    with sdpa_kernel(backend):
        return call_sdpa()


def describe_backend(inputs: Sequence[Array], is_causal: bool) -> str:
    """Return text for `explain` that names the fastest measured backend, or an empty text."""
    query, key, value = inputs
    backend = _FASTEST_BACKENDS.get(_backend_signature(query, key, value, is_causal))
    return "" if backend is None else f", by {backend.name.lower()}, measured as the fastest"


def _backend_signature(query: Array, key: Array, value: Array, is_causal: bool) -> tuple[Any, ...]:
    needs_gradient = load_framework("torch").needs_gradient((query, key, value))
    shapes = (tuple(query.shape), tuple(key.shape), tuple(value.shape))
    return (*shapes, query.dtype, query.device, is_causal, needs_gradient)


def _measure_fastest(attend: Callable[[], Array], inputs: Sequence[Array]) -> Any:
    """Return the backend that is clearly faster than PyTorch's default, or None."""
    differentiable = [x for x in inputs if x.requires_grad and torch.is_grad_enabled()]

    def best_time_ms() -> float:
        times: list[float] = []
        for _ in range(6):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            with without_saved_tensor_hooks():
                out = attend()
                if differentiable:
                    torch.autograd.grad(out, differentiable, out.detach())
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times[1:])

    best, best_time = None, best_time_ms() * 0.97
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns if a backend is unsupported
                time = best_time_ms()
        except RuntimeError:
            continue
        if time < best_time:
            best, best_time = backend, time
    return best
