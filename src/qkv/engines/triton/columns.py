"""A Gaussian without a gradient by torch's own kernel, which on a Hopper is faster than ours.

Its score q·k − ‖k‖²/2, times a scale, is the product of [q | 1 1 1] and [k | b₀ b₁ b₂], where the
three add up to −‖k‖²/2: see `norms.widened`. The way back is quicker by our kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qkv.arrays import is_array
from qkv.engines.call import Call
from qkv.engines.native import backends
from qkv.engines.triton import launch, norms
from qkv.scores import Gaussian
from qkv.types import Array
from qkv.weightings import Softmax

WIDTH = 128
"""The width of queries, keys and values at which it was seen to be faster."""


def bound(call: Call) -> Callable[..., Array] | None:
    """Query, key and value of calls of this kind to their output; None where ours is as fast."""
    score, weighting = call.score, call.weighting
    if type(score) is not Gaussian or type(weighting) is not Softmax or not _pays(call):
        return None
    if is_array(score.bandwidth) or is_array(weighting.temperature):
        return None
    scale = 1 / (score.bandwidth**2 * weighting.temperature)
    return lambda query, key, value, *_: attend(query, key, value, scale)


def _pays(call: Call) -> bool:
    arrays: list[Any] = [call.query, call.key, call.value]
    if call.dropout or call.wants_lse or call.rule is not None or call.bias is not None:
        return False
    if call.fw.tracing(call.query) or call.fw.needs_gradient(arrays):
        return False
    (b, h), shapes = (*call.lead, 0, 0)[:2], [x.shape for x in arrays]
    if len(call.lead) != 2 or any(len(x) != 4 or (x[0], x[3]) != (b, WIDTH) for x in shapes):
        return False
    if shapes[0][1] != h or shapes[1][1] != shapes[2][1]:
        return False
    large = call.query.numel() * call.m >= backends.WORTH
    narrow = all(x.dtype == torch.bfloat16 for x in arrays)
    return large and narrow and launch.copy_engine(call.query.device)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """softmax(scale · (q·k − ‖k‖²/2)) v: query (B, H, n, w), w a power of 2 → (B, H, n, d)."""
    if query.stride(-1) != 1 or key.stride(-1) != 1:
        query, key = query.contiguous(), key.contiguous()
    parts: Any = norms.widened(query, False), norms.widened(key, True), value
    return backends.sdpa(parts, None, False, scale)
