"""Says which calls are a softmax of dot products, and with which scale."""

from __future__ import annotations

import math
from typing import Any

from qkv.engines.call import Call
from qkv.frameworks import is_array
from qkv.frameworks.tree import format_record
from qkv.scores import Dot, ScaledDot
from qkv.weightings import Softmax

MIN_MANY_KEYS = 2**14
"""From this many keys, with few queries, reading the keys dominates the time."""


def not_softmax_dot_reason(call: Call) -> str | None:
    """Return why the call is not a softmax of dot products, or None."""
    if type(call.score) not in (Dot, ScaledDot):
        return f"fused kernels support only dot products, not {type(call.score).__name__}"
    if getattr(call.score, "softcap", None) is not None:
        return "fused kernels do not support a softcap"
    if type(call.weighting) is not Softmax:
        return f"fused kernels support only softmax, not {format_record(call.weighting)}"
    if is_array(getattr(call.score, "scale", None)) or is_array(call.weighting.temperature):
        return "fused kernels give no gradient for a learned scale or temperature"
    if call.rule is not None and effective_scale(call) <= 0:
        return "the scale is not positive, and fused kernels multiply the −∞ of masked scores by it"
    return None


def effective_scale(call: Call) -> float:
    """Return the factor of qᵀk, including the temperature of the softmax."""
    scale: Any = 1.0
    if isinstance(call.score, ScaledDot):
        width = int(call.fw.static_shape(call.query)[-1] or 1)  # torch.compile may not know it yet
        scale = 1 / math.sqrt(width) if call.score.scale is None else call.score.scale
    return float(scale / call.weighting.temperature)  # type: ignore[attr-defined]
