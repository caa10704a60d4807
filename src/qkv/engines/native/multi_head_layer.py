"""A whole self-attention layer, including its projections, as one operator of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qkv.frameworks import load_framework
from qkv.frameworks.torch import HALF_DTYPES, HAS_MKL
from qkv.util.types import Array

TORCH = load_framework("torch")

MAX_CPU_QUERIES, MAX_PROJECTION_PRODUCTS = 64, 2**22
"""Limits on a CPU: for more queries, separate steps are faster than the operator. Without MKL and
weights, they are also faster from this many multiplications in a projection."""


def run(
    x: Array,
    heads: int,
    parameters: Sequence[Array | None],
    mask: Array | None,
    padding: bool,
    weights: str | None,
) -> tuple[Array, Array | None] | None:
    """Return the output and α, or None.

    None if the operator does not support the arrays, if separate steps are faster, or if a masked
    NaN reached the output.
    """
    on_cpu = x.is_cpu
    if not on_cpu and not (mask is weights is None):  # the check for NaN would wait for the GPU
        return None
    if not _is_supported(x, heads, parameters):
        return None
    if (
        on_cpu
        and weights is None
        and not HAS_MKL
        and x.numel() * x.shape[-1] >= MAX_PROJECTION_PRODUCTS
    ):
        return None
    if mask is not None:
        fits = tuple(mask.shape) == (x.shape[0 if padding else 1], x.shape[1])
        if not fits or mask.dtype != torch.bool or mask.device != x.device:
            return None
    operator: Any = torch._native_multi_head_attention
    out, alpha = operator(
        *(x, x, x, x.shape[-1], heads, *parameters, mask, weights is not None),
        *(weights != "heads", None if mask is None else int(padding)),
    )
    if on_cpu and not TORCH.is_surely_finite(out):
        return None
    return out, None if weights is None else alpha


def _is_supported(x: Array, heads: int, parameters: Sequence[Array | None]) -> bool:
    """Return whether the operator supports x and is faster than separate steps.

    This is so for 16-bit arrays on CUDA, and for small arrays of other dtypes on a CPU.
    """
    if x.is_nested or TORCH.apply_autocast(x) is not x:
        return False
    shape, dtype = x.shape, x.dtype
    first = parameters[0]
    if first is None or len(shape) != 3 or shape[-1] != first.shape[-1] or 0 in shape or heads % 2:
        return False
    half = dtype in HALF_DTYPES
    if half or shape[1] > MAX_CPU_QUERIES if x.is_cpu else not (half and x.is_cuda):
        return False
    return all(y is not None and y.dtype is dtype for y in parameters)
