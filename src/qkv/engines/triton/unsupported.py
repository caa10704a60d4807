"""Which calls the kernels do not support, and why."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

from qkv.engines.call import Call
from qkv.engines.triton.call_arrays import (
    KERNEL_WEIGHTINGS,
    MaskBounds,
    is_shift_sensitive,
    kernel_lowering,
    rule_translation_error,
    split_mask,
    split_score,
    translate_functions,
)
from qkv.engines.triton.distance_arrays import kernel_form
from qkv.engines.triton.sink import without_sink
from qkv.engines.triton_import import triton_missing_reason
from qkv.frameworks import is_array
from qkv.masks.base import ArrayMask
from qkv.scores import Additive, Gaussian, Modified, RelativeScore
from qkv.scores.functions import EvaluatedScore
from qkv.weightings import Hard, Softmax
from qkv.weightings.entmax import MIN_QUICK_ALPHA, SinkEntmax, Tsallis
from qkv.weightings.softmax import SinkSoftmax

MAX_VECTOR_WIDTH = 4096
MAX_MASK_PAIRS = 2**28
"""The most pairs of a mask that is expanded to an array."""


def unsupported_reason(call: Call) -> str | None:
    fw = call.fw
    if fw.name != "torch":
        return f"Triton's kernels take torch tensors, not {fw.name}'s arrays"
    if call.query.device.type != "cuda" and not is_interpreted():
        return f"Triton's kernels run on CUDA, not on {call.query.device.type}"
    missing = triton_missing_reason()
    if missing:
        return missing
    if fw.dtype_name(call.query) == "float64":
        return "the kernels compute in float32, not in float64"
    if isinstance(call.weighting, SinkSoftmax):
        return unsupported_reason(without_sink(call))
    alpha = getattr(call.weighting, "alpha", 2.0)
    has_kernel_alpha = not is_array(alpha) and MIN_QUICK_ALPHA <= alpha <= 2
    if isinstance(call.weighting, Tsallis) and not (
        isinstance(call.weighting, SinkEntmax) and has_kernel_alpha
    ):
        return "the kernels support entmax only for a fixed alpha from 1.05 to 2"
    if fw.in_functional_transform():  # type: ignore[attr-defined]
        return "the kernels have no rules for torch.func and forward-mode derivatives"
    if type(call.weighting) not in KERNEL_WEIGHTINGS:
        return f"the kernels do not support the weighting {type(call.weighting).__name__}"
    if getattr(call.weighting, "on_empty", "zero") != "zero":
        return "the kernels support only on_empty='zero'"
    if getattr(call.weighting, "straight_through", False):
        return unsupported_reason(replace(call, weighting=Hard())) or unsupported_reason(
            replace(call, weighting=Softmax())
        )
    if call.fw.has_empty_axis((*call.lead, call.n, call.m)):
        return "there is nothing to compute"
    reason = mask_too_large_reason(call, split_mask(call))
    if reason:
        return reason
    if isinstance(call.score, Modified | RelativeScore):
        return _score_mod_reason(call)
    if is_plain_additive(call):
        return None
    if not (kernel_form(call.score) or isinstance(call.score, EvaluatedScore)):
        found = kernel_lowering(call)
        if isinstance(found, str):
            return found
    temperature: Any = getattr(call.weighting, "temperature", 1.0)
    if is_array(temperature):
        many = math.prod(temperature.shape) * math.prod(getattr(call.bias, "shape", (0,)))
        if many > MAX_MASK_PAIRS:
            return (
                f"a float mask with a learned temperature has {many} pairs; the kernels read at "
                f"most {MAX_MASK_PAIRS}"
            )
        return None
    if call.fw.static_shape(call.query)[-1] > MAX_VECTOR_WIDTH:
        return f"vectors have more than {MAX_VECTOR_WIDTH} dimensions"
    return None


def _score_mod_reason(call: Call) -> str | None:
    """Return why the kernels do not support the score_mods of a call, or the score inside."""
    from qkv.engines.triton.pair_functions.functions import TranslationError

    inner, score_mods = split_score(call)
    if call.fw.is_traced(call.query):
        return "a traced graph cannot contain functions, so kernels cannot include score_mod"
    if call.at is not None:
        return "the keys are spread over processes, and the kernels know only local positions"
    weighting = call.weighting
    if is_array(getattr(weighting, "temperature", 1.0)):
        weighting = Softmax()
    reason = unsupported_reason(replace(inner, weighting=weighting))
    if reason is None and isinstance(lowering := kernel_lowering(inner), str):
        reason = lowering
    if reason:
        return reason
    try:
        translate_functions(inner, split_mask(call), score_mods)
    except TranslationError as error:
        return f"score_mod has no translation to Triton: {error}"
    return None


def is_plain_additive(call: Call) -> bool:
    """Return whether the additive kernels support the call: softmax, with bands and lengths only.

    Other additive calls become products of functions, which depend on the range of the values.
    """
    if not isinstance(call.score, Additive) or type(call.weighting) is not Softmax or call.dropout:
        return False
    temperature, bounds = call.weighting.temperature, split_mask(call)
    cool = not is_array(temperature) and temperature == 1
    plain = not bounds.rules and bounds.layout is None and bounds.spans is None
    return bool(cool and plain)


def mask_too_large_reason(
    call: Call, bounds: MaskBounds, mask_as_array: bool = False
) -> str | None:
    """Return why the mask is too large to be expanded to an array; None: it is not.

    With `mask_as_array`, this includes the rules that kernels evaluate otherwise.
    """
    whole = isinstance(call.score, Gaussian) and is_shift_sensitive(call)  # each query adds to it
    leads = [
        x.values.shape[:-2] if isinstance(x, ArrayMask) and not whole else call.lead
        for x in (bounds.as_rules() if mask_as_array else bounds).rules
        if mask_as_array or rule_translation_error(call, x) is not None
    ]
    pairs = max([0, *[math.prod(lead) for lead in leads]]) * call.n * call.m
    if pairs > MAX_MASK_PAIRS:
        return f"the mask has {pairs} pairs; the kernels read at most {MAX_MASK_PAIRS} as an array"
    return None


def is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels in Python, on any device."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
