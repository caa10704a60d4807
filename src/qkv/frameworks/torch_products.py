"""PyTorch: products of numbers that have or had 16 bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from qkv.util.types import Array

_SETTING_LOCK = threading.Lock()
_earlier_settings: list[bool] = []
"""One entry per thread inside `use_tensor_cores`: the setting before the first of them."""


@contextmanager
def use_tensor_cores() -> Iterator[None]:
    """Let float32 products run on tensor cores, for arguments that come from 16-bit arrays.

    A product of two such numbers is exact in TF32, and sums are float32. Without TF32 it takes ten
    times longer. The setting belongs to the process, so the last of several threads restores it.
    """
    with _SETTING_LOCK:
        earlier = _earlier_settings[0] if _earlier_settings else torch._C._get_cublas_allow_tf32()
        _earlier_settings.append(earlier)
        torch._C._set_cublas_allow_tf32(True)
    try:
        yield
    finally:
        with _SETTING_LOCK:
            earlier = _earlier_settings.pop()
            if not _earlier_settings:
                torch._C._set_cublas_allow_tf32(earlier)


HAS_FAST_BFLOAT16: bool = torch.backends.mkldnn.is_available() and bool(
    getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
)
"""Whether the processor multiplies bfloat16 numbers, with float32 sums."""

MAX_CONVERTED_NUMBERS = 2**17
"""Numbers of the keys that are converted at a time: they fit the processor's cache."""

MAX_QUERIES_PER_CONVERSION = 8
"""Up to this many queries, converting the keys takes longer than the products."""


MAX_TRANSPOSED_ROWS = 512
"""Rows of x up to which xᵀ y is faster than (yᵀ x)ᵀ, whose result is not contiguous."""


class Product16Bit(torch.autograd.Function):  # type: ignore[misc]
    """x y for float32 x, rounded to 16 bits, and 16-bit y (…, c, d); the gradient of x is float32.

    Both have the same leading axes.
    """

    @staticmethod
    def forward(ctx: Any, x: Array, y: Array) -> Array:
        rounded = x.to(y.dtype)
        ctx.save_for_backward(rounded, y, x)
        return rounded @ y

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> Any:
        (rounded, y, x), (slope,) = ctx.saved_tensors, gradients
        wants_x, wants_y = ctx.needs_input_grad
        if torch.is_grad_enabled():  # for a second derivative
            x_slope = slope.to(x.dtype) @ y.to(x.dtype).mT if wants_x else None
            return x_slope, (x.mT @ slope.to(x.dtype)).to(y.dtype) if wants_y else None
        x_slope = slope.to(x.dtype) @ y.to(x.dtype).mT if wants_x else None
        return x_slope, _multiply_transposed(rounded, slope) if wants_y else None


class KeyProduct16Bit(torch.autograd.Function):  # type: ignore[misc]
    """x yᵀ in float32, for float32 x and 16-bit y; its backward rounds to 16 bits.

    Both have the same leading axes.
    """

    @staticmethod
    def forward(ctx: Any, x: Array, y: Array) -> Array:
        ctx.save_for_backward(x, y)
        return _multiply_keys(x, y)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> Any:
        (x, y), (slope,) = ctx.saved_tensors, gradients
        wants_x, wants_y = ctx.needs_input_grad
        if torch.is_grad_enabled():  # for a second derivative
            x_slope = slope @ y.to(x.dtype) if wants_x else None
            return x_slope, (slope.mT @ x).to(y.dtype) if wants_y else None
        rounded = slope.to(y.dtype)
        x_slope = (rounded @ y).to(x.dtype) if wants_x else None
        return x_slope, _multiply_transposed(rounded, x.to(y.dtype)) if wants_y else None


def softmax_gradients(
    inputs: Sequence[Array], bias: Array | None, is_causal: bool, scale: float, slope: Array
) -> tuple[Array, Array, Array]:
    """Return the gradients of softmax(scale · q kᵀ + bias) v for arrays of 16 bits."""
    query, key, value = inputs
    scores = multiply_keys_16bit(query.float().mul_(scale), key, False)
    if bias is not None:
        scores += bias
    if is_causal:
        n, m = scores.shape[-2:]
        scores.masked_fill_(torch.ones(n, m, dtype=torch.bool).triu_(1), -torch.inf)
    is_empty = None if bias is None else scores.amax(-1, keepdim=True) == -torch.inf
    # Each row is read before it is written, so the results may take the place of the arguments.
    weights = torch.softmax(scores, -1, out=scores)
    if is_empty is not None:
        weights.masked_fill_(is_empty, 0.0)
    rounded = weights.to(value.dtype)
    gradient = multiply_keys_16bit(slope.float(), value, False)
    torch._softmax_backward_data(gradient, weights, -1, torch.float32, grad_input=gradient)
    value_gradient = _multiply_transposed(rounded, slope)
    rounded.copy_(gradient)
    query_gradient = (rounded @ key).mul_(scale)
    return query_gradient, _multiply_transposed(rounded, query).mul_(scale), value_gradient


def _multiply_transposed(x: Array, y: Array) -> Array:
    """Return xᵀ y for 16 bits. A long transposed first factor takes several times longer."""
    return x.mT @ y if x.shape[-2] <= MAX_TRANSPOSED_ROWS else (y.mT @ x).mT


def multiply_keys_16bit(x: Array, y: Array, learns: bool) -> Array:
    """Return x yᵀ in float32, for float32 x and 16-bit y."""
    if not learns:
        return _multiply_keys(x, y)
    if x.shape[:-2] != y.shape[:-2]:
        return x @ y.to(x.dtype).mT
    out: Array = KeyProduct16Bit.apply(x, y)
    return out


def _multiply_keys(x: Array, y: Array) -> Array:
    """Return x yᵀ. For few rows x, the rows y are converted in parts that fit the cache."""
    few = x.shape[-2] <= MAX_QUERIES_PER_CONVERSION and x.shape[:-2] == y.shape[:-2]
    step = MAX_CONVERTED_NUMBERS // max(y.shape[-1], 1)
    if not few or y.shape[-2] < 2 * step:
        return x @ y.to(x.dtype).mT
    out = x.new_empty(*x.shape[:-1], y.shape[-2])
    buffer = x.new_empty(step, y.shape[-1])
    for rows, keys, scores in zip(_matrices(x), _matrices(y), _matrices(out), strict=True):
        for at in range(0, len(keys), step):
            part = keys[at : at + step]
            converted = buffer[: len(part)]
            converted.copy_(part)
            torch.mm(rows, converted.mT, out=scores[:, at : at + step])
    return out


def _matrices(x: Array) -> Array:
    return x.reshape(-1, *x.shape[-2:]) if x.ndim != 3 else x
