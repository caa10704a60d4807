"""A call's score as the kernels know it: which there are, and φ, ψ and what is added to them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.engines.triton.axes import as_aligned_rows, as_four_axes, batch_and_heads, count_key_heads
from qkv.engines.triton.masks import (
    add_row_offsets,
    build_mask_array,
    drop_row_constants,
    scale_mask_array,
    split_mask,
)
from qkv.frameworks import is_array, tree
from qkv.scores import Additive, Cosine, Gated, Gaussian, ScaledDot, Score
from qkv.scores.additive import SeparableAdditive
from qkv.scores.base import DotProductForm
from qkv.scores.distance import ExpandedGaussian
from qkv.util.types import Array
from qkv.weightings import Average, Entmax, Hard, Normalized, Raw, Sigmoid, Softmax, Sparsemax, TopK

KERNEL_WEIGHTINGS = {
    Softmax: "softmax",
    Average: "average",
    Normalized: "normalized",
    Raw: "raw",
    Sigmoid: "sigmoid",
    Entmax: "entmax",
    Sparsemax: "entmax",
    TopK: "topk",
    Hard: "topk",
}
SHIFT_INVARIANT_WEIGHTINGS = ("softmax", "average", "entmax", "topk")
"""The weightings that a shift of the whole row does not move."""


def kernel_lowering(call: Call) -> tuple[Any, float] | str:
    """The score as one with a form. For 16 bits nothing is looked at, so nothing waits, but for the
    range of an additive score."""
    dtype = call.fw.dtype_name(call.query)
    if compiled_cap(call):
        return call.score, 0.0
    if dtype == "float32" or isinstance(call.score, Additive):
        found = call.lowering
    else:
        found = call.score.find_lowering(call.query, call.key, call.tolerance, dtype)
    if isinstance(found, str):
        return found
    inner = getattr(found[0], "score", found[0])
    if type(inner) is Additive:
        return "the kernels know no gate on an additive score"
    return found


def compiled_cap(call: Call) -> float:
    """The softcap that kernels compile for; 0 for none, −1 where it or its temperature is learned
    and each row has its own (`capped_form`)."""
    cap = _score_softcap(call)
    if is_array(cap) or (cap and is_array(getattr(call.weighting, "temperature", 1.0))):
        return -1.0
    return cap or 0.0


def _score_softcap(call: Call) -> Any:
    inner = call.score.score if type(call.score) is Gated else call.score
    return inner.softcap if type(inner) is ScaledDot else None


def capped_form(call: Call, form: DotProductForm) -> tuple[DotProductForm, Any]:
    """The form of c · tanh(φ·ψ / c) / T as that of cap · tanh(φ·ψ), and the caps (…, n, 1), in
    float32: gradients of c and T are those of what stands for them."""
    given: Any = _score_softcap(call), getattr(call.weighting, "temperature", 1.0)
    cap, temperature = (x.float() if is_array(x) else x for x in given)
    if is_array(cap):
        form = form._replace(query=form.query.float() / cap)
    else:
        form = form._replace(scale=form.scale / cap)
    own = cap / temperature
    own = own.reshape(1, 1) if own.ndim < 2 else own
    return form, own.expand(*own.shape[:-2], call.n, 1)


def divide_by_temperature(x: Any, temperature: Any) -> Any:
    """x / temperature, in x's dtype, by float32."""
    if not is_array(temperature):
        return x if temperature == 1 else x * (1 / temperature)
    return (x.float() / temperature.float()).to(x.dtype)


def is_shift_sensitive(call: Call) -> bool:
    """Whether the weighting is one that a shift of the whole row moves."""
    return KERNEL_WEIGHTINGS[type(call.weighting)] not in SHIFT_INVARIANT_WEIGHTINGS


def needs_merged_squares(call: Call) -> bool:
    """Whether a Gaussian's squares must be numbers of φ and ψ: a gate multiplies them, or each
    query has a temperature of its own."""
    shape = getattr(getattr(call.weighting, "temperature", None), "shape", ())
    gated = isinstance(getattr(call.score, "score", None), Gaussian)
    return gated or (isinstance(call.score, Gaussian) and shape[-2:-1] not in ((), (1,)))


def call_with_form(call: Call) -> tuple[Call, DotProductForm]:
    """The call and its score's form: both in float32 where squares are numbers of φ and ψ."""
    if not needs_merged_squares(call):
        found = kernel_lowering(call)
        assert not isinstance(found, str)
        return call, build_form(call, found[0])
    wide = call.upcast()
    found = call.lowering
    if wide is not call:  # nothing is looked at in 16 bits
        dtype = call.fw.dtype_name(call.query)
        found = wide.score.find_lowering(wide.query, wide.key, call.tolerance, dtype)
    assert not isinstance(found, str)
    form = found[0].dot_product_form(wide.query, wide.key)
    query, key = form.augmented_vectors()
    return wide, DotProductForm(query, key, gate_query=form.gate_query, gate_key=form.gate_key)


def build_form(call: Call, score: Score) -> DotProductForm:
    """`score.dot_product_form`, with what it computes of each row in one pass over 16-bit rows."""
    if isinstance(score, SeparableAdditive):
        rows = (call.query, call.key)
        wide = score.dot_product_form(*[x.float() if is_16bit(call) else x for x in rows])
        return DotProductForm(*[_pad_width(x).to(call.query.dtype) for x in wide[:2]])
    if is_16bit(call):
        from qkv.engines.triton import norms

        if isinstance(score, Cosine) and not is_array(score.temperature):
            scale = 1 / score.temperature
            return DotProductForm(
                norms.normalize_rows(call.query), norms.normalize_rows(call.key), scale=scale
            )
        if isinstance(score, ExpandedGaussian) and not is_array(score.bandwidth):
            return expanded_form(call, score.bandwidth)
        if any(x.dtype != call.query.dtype for x in tree.array_leaves(call.fw, score)):
            form = score.dot_product_form(call.query.float(), call.key.float())  # rounded once
            dtype = call.query.dtype
            return form._replace(query=form.query.to(dtype), key=form.key.to(dtype))
    return score.dot_product_form(call.query, call.key)


def in_one_dtype(call: Call) -> Call:
    """The call with the arrays of its score in the dtype of its 16-bit queries."""
    leaves = tree.array_leaves(call.fw, call.score)
    if not is_16bit(call) or all(x.dtype == call.query.dtype for x in leaves):
        return call
    score = tree.map_arrays(call.fw, lambda x: x.to(call.query.dtype), call.score)
    return replace(call, score=score)


def _pad_width(x: Any) -> Any:
    """Rows with zeros up to one of eight widths an octave: how many products an additive score has
    is a matter of its numbers, and each width is compiled for."""
    import torch

    width = x.shape[-1]
    step = max(2 ** (width.bit_length() - 4), 64 if width > 64 else 16)
    return torch.nn.functional.pad(x, (0, -width % step))


def expanded_form(call: Call, bandwidth: float, share: float = 1.0) -> DotProductForm:
    """The form of `ExpandedGaussian` without a centre: its squares are exact enough in float32.
    The bias is multiplied by `share`."""
    from qkv.engines.triton import norms

    scale = 1 / bandwidth**2
    shown = call.wants_lse or is_shift_sensitive(call)
    offset = norms.squared_norms(call.query, -scale / 2) if shown else None
    bias = norms.squared_norms(call.key, -scale * share / 2)
    return DotProductForm(call.query, call.key, bias, offset, scale=scale)


def is_16bit(call: Call) -> bool:
    return call.fw.dtype_name(call.query) in ("float16", "bfloat16")


def is_16bit_gaussian(call: Call) -> bool:
    """Whether it is a Gaussian of 16-bit rows, whose form no numbers decide."""
    return is_16bit(call) and isinstance(kernel_lowering(call)[0], ExpandedGaussian)


def build_kernel_arrays(call: Call, expanded: bool) -> tuple[Any, Any, Array | None]:
    """The call's `Arrays` and `Numbers`, as `attend_operator.attend` takes them, and what its
    form leaves out of the log-sum-exp of each row (B, H, n, 1)."""
    from qkv.engines.triton.kernel_call import Numbers
    from qkv.engines.triton.records import Arrays

    bounds, score = split_mask(call), cast(Any, call.score)
    expanded = expanded and not is_array(score.bandwidth) and not needs_merged_squares(call)
    if not expanded:
        call, form = call_with_form(call)
    weighting: Any = call.weighting
    temperature: Any = getattr(weighting, "temperature", 1.0)
    share, cap = 1.0 if is_array(temperature) else 1 / temperature, compiled_cap(call)
    if expanded:
        form = expanded_form(call, score.bandwidth, share)
    scale = form.scale * share
    caps: Any = None
    if cap < 0:
        form, caps = capped_form(call, form)
        scale = form.scale
    elif is_array(temperature):  # in float32, whose gradient is that of the temperature
        form = form._replace(query=divide_by_temperature(form.query.float(), temperature))
    if isinstance(weighting, Hard):  # flat: no gradient reaches the scores
        form = DotProductForm(*(x.detach() if is_array(x) else x for x in cast(Any, form)))
        caps = caps if caps is None else caps.detach()
    (_, heads), few, bias = batch_and_heads(call), count_key_heads(call), form.bias
    if form.key.shape[-3:-2] not in ((), (1,), (few,)):  # ψ is each query head's own
        few = heads
    if bias is not None:
        if is_array(temperature) and math.prod(temperature.shape) > 1:  # heads share no more
            few, bias = heads, calls.repeat_shared_heads(call, bias)
        bias = (
            bias
            if expanded and not is_array(temperature)
            else divide_by_temperature(bias, temperature)
        )
    query, key = as_four_axes(call, form.query, heads), as_four_axes(call, form.key, few)
    parts = (
        as_aligned_rows(call, bias, few),
        as_aligned_rows(call, form.gate_query, heads),
        as_aligned_rows(call, form.gate_key, few),
    )
    lower, upper, lengths, layout, size, _ = bounds
    pairs: Any = build_mask_array(call, bounds)
    added = pairs is not None and pairs.is_floating_point()
    if added and is_array(temperature):
        pairs = scale_mask_array(call, pairs, temperature)
    if is_shift_sensitive(call):
        pairs = add_row_offsets(call, pairs, form.offset)
    elif added and pairs.shape[-1] == 1 and not call.wants_lse:
        query, pairs = drop_row_constants(query, pairs)
    value, seed = as_four_axes(call, call.value, few), call.seed if call.dropout else None
    chosen = weighting.alpha if isinstance(weighting, Entmax) else getattr(weighting, "k", 1)
    numbers = Numbers(
        scale, KERNEL_WEIGHTINGS[type(weighting)], float(chosen), lower, upper, size,
        is_array(temperature) or cap < 0,
        share, call.dropout, heads if len(call.lead) > 1 else math.prod(call.lead),
        cap * share if cap > 0 else cap,
    )  # fmt: skip
    arrays = Arrays(query, key, value, *parts, None, None, lengths, layout, pairs, seed)
    offset = form.offset if call.wants_lse else None
    offset = as_aligned_rows(
        call, None if offset is None else divide_by_temperature(offset, temperature), heads
    )
    return arrays._replace(caps=as_aligned_rows(call, caps, heads)), numbers, offset
