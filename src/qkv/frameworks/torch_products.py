"""PyTorch: products of numbers that had 16 bits, on tensor cores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
