"""A call's score as the kernels know it: which there are, and φ, ψ and what is added to them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

from qkv.arrays import is_array, tree
from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.engines.triton.axes import batch_and_heads, four_axes, key_heads, rows_of
from qkv.engines.triton.masks import bounds_of, cooled, pairs_of, shifted, unmoved
from qkv.scores import Additive, Cosine, Gated, Gaussian, ScaledDot, Score
from qkv.scores.additive import Separable
from qkv.scores.base import Form
from qkv.scores.distance import Expanded
from qkv.types import Array
from qkv.weightings import Average, Entmax, Hard, Normalized, Raw, Sigmoid, Softmax, Sparsemax, TopK

WEIGHTINGS = {
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
UNMOVED = ("softmax", "average", "entmax", "topk")
"""The weightings that a shift of the whole row does not move."""


def lowering(call: Call) -> tuple[Any, float] | str:
    """The score as one with a form. For 16 bits nothing is looked at, so nothing waits, but for the
    range of an additive score."""
    dtype = call.fw.dtype(call.query)
    if cap_of(call):
        return call.score, 0.0
    if dtype == "float32" or isinstance(call.score, Additive):
        found = call.lowering
    else:
        found = call.score.lowered(call.query, call.key, call.tolerance, dtype)
    if isinstance(found, str):
        return found
    inner = getattr(found[0], "score", found[0])
    if type(inner) is Additive:
        return "the kernels know no gate on an additive score"
    return found


def cap_of(call: Call) -> float:
    """The softcap that kernels compile for; 0 for none, −1 where it or its temperature is learned
    and each row has its own (`bent`)."""
    cap = _cap(call)
    if is_array(cap) or (cap and is_array(getattr(call.weighting, "temperature", 1.0))):
        return -1.0
    return cap or 0.0


def _cap(call: Call) -> Any:
    inner = call.score.score if type(call.score) is Gated else call.score
    return inner.softcap if type(inner) is ScaledDot else None


def bent(call: Call, form: Form) -> tuple[Form, Any]:
    """The form of c · tanh(φ·ψ / c) / T as that of cap · tanh(φ·ψ), and the caps (…, n, 1), in
    float32: gradients of c and T are those of what stands for them."""
    given: Any = _cap(call), getattr(call.weighting, "temperature", 1.0)
    cap, temperature = (x.float() if is_array(x) else x for x in given)
    if is_array(cap):
        form = form._replace(query=form.query.float() / cap)
    else:
        form = form._replace(scale=form.scale / cap)
    own = cap / temperature
    own = own.reshape(1, 1) if own.ndim < 2 else own
    return form, own.expand(*own.shape[:-2], call.n, 1)


def over(x: Any, temperature: Any) -> Any:
    """x / temperature, in x's dtype, by float32."""
    if not is_array(temperature):
        return x if temperature == 1 else x * (1 / temperature)
    return (x.float() / temperature.float()).to(x.dtype)


def is_moved(call: Call) -> bool:
    """Whether the weighting is one that a shift of the whole row moves."""
    return WEIGHTINGS[type(call.weighting)] not in UNMOVED


def is_merged(call: Call) -> bool:
    """Whether a Gaussian's squares must be numbers of φ and ψ: a gate multiplies them, or each
    query has a temperature of its own."""
    shape = getattr(getattr(call.weighting, "temperature", None), "shape", ())
    gated = isinstance(getattr(call.score, "score", None), Gaussian)
    return gated or (isinstance(call.score, Gaussian) and shape[-2:-1] not in ((), (1,)))


def formed(call: Call) -> tuple[Call, Form]:
    """The call and its score's form: both in float32 where squares are numbers of φ and ψ."""
    if not is_merged(call):
        found = lowering(call)
        assert not isinstance(found, str)
        return call, form_of(call, found[0])
    wide = call.precise()
    found = call.lowering
    if wide is not call:  # nothing is looked at in 16 bits
        dtype = call.fw.dtype(call.query)
        found = wide.score.lowered(wide.query, wide.key, call.tolerance, dtype)
    assert not isinstance(found, str)
    form = found[0].form(wide.query, wide.key)
    query, key = form.products()
    return wide, Form(query, key, gate_query=form.gate_query, gate_key=form.gate_key)


def form_of(call: Call, score: Score) -> Form:
    """`score.form`, with what it computes of each row in one pass over 16-bit rows."""
    if isinstance(score, Separable):
        rows = (call.query, call.key)
        wide = score.form(*[x.float() if is_narrow(call) else x for x in rows])
        return Form(*[_widened(x).to(call.query.dtype) for x in wide[:2]])
    if is_narrow(call):
        from qkv.engines.triton import norms

        if isinstance(score, Cosine) and not is_array(score.temperature):
            scale = 1 / score.temperature
            return Form(norms.unit(call.query), norms.unit(call.key), scale=scale)
        if isinstance(score, Expanded) and not is_array(score.bandwidth):
            return expanded_form(call, score.bandwidth)
        if any(x.dtype != call.query.dtype for x in tree.leaves(call.fw, score)):
            form = score.form(call.query.float(), call.key.float())  # rounded once
            dtype = call.query.dtype
            return form._replace(query=form.query.to(dtype), key=form.key.to(dtype))
    return score.form(call.query, call.key)


def in_one_dtype(call: Call) -> Call:
    """The call with the arrays of its score in the dtype of its 16-bit queries."""
    leaves = tree.leaves(call.fw, call.score)
    if not is_narrow(call) or all(x.dtype == call.query.dtype for x in leaves):
        return call
    score = tree.map_arrays(call.fw, lambda x: x.to(call.query.dtype), call.score)
    return replace(call, score=score)


def _widened(x: Any) -> Any:
    """Rows with zeros up to one of eight widths an octave: how many products an additive score has
    is a matter of its numbers, and each width is compiled for."""
    import torch

    width = x.shape[-1]
    step = max(2 ** (width.bit_length() - 4), 64 if width > 64 else 16)
    return torch.nn.functional.pad(x, (0, -width % step))


def expanded_form(call: Call, bandwidth: float, share: float = 1.0) -> Form:
    """The form of `Expanded` without a centre: its squares are exact enough in float32. The bias is
    multiplied by `share`."""
    from qkv.engines.triton import norms

    scale = 1 / bandwidth**2
    shown = call.wants_lse or is_moved(call)
    offset = norms.square(call.query, -scale / 2) if shown else None
    bias = norms.square(call.key, -scale * share / 2)
    return Form(call.query, call.key, bias, offset, scale=scale)


def is_narrow(call: Call) -> bool:
    return call.fw.dtype(call.query) in ("float16", "bfloat16")


def is_expanded(call: Call) -> bool:
    """Whether it is a Gaussian of 16-bit rows, whose form no numbers decide."""
    return is_narrow(call) and isinstance(lowering(call)[0], Expanded)


def arrays_of(call: Call, expanded: bool) -> tuple[Any, Any, Array | None]:
    """The call's `records.Arrays` and `arguments.Numbers`, as `ops.pooled` takes them, and what its
    form leaves out of the log-sum-exp of each row (B, H, n, 1)."""
    from qkv.engines.triton.arguments import Numbers
    from qkv.engines.triton.records import Arrays

    bounds, score = bounds_of(call), cast(Any, call.score)
    expanded = expanded and not is_array(score.bandwidth) and not is_merged(call)
    if not expanded:
        call, form = formed(call)
    weighting: Any = call.weighting
    temperature: Any = getattr(weighting, "temperature", 1.0)
    share, cap = 1.0 if is_array(temperature) else 1 / temperature, cap_of(call)
    if expanded:
        form = expanded_form(call, score.bandwidth, share)
    scale = form.scale * share
    caps: Any = None
    if cap < 0:
        form, caps = bent(call, form)
        scale = form.scale
    elif is_array(temperature):  # in float32, whose gradient is that of the temperature
        form = form._replace(query=over(form.query.float(), temperature))
    if isinstance(weighting, Hard):  # flat: no gradient reaches the scores
        form = Form(*(x.detach() if is_array(x) else x for x in cast(Any, form)))
        caps = caps if caps is None else caps.detach()
    (_, heads), few, bias = batch_and_heads(call), key_heads(call), form.bias
    if form.key.shape[-3:-2] not in ((), (1,), (few,)):  # ψ is each query head's own
        few = heads
    if bias is not None:
        if is_array(temperature) and math.prod(temperature.shape) > 1:  # heads share no more
            few, bias = heads, calls.share_heads(call, bias)
        bias = bias if expanded and not is_array(temperature) else over(bias, temperature)
    query, key = four_axes(call, form.query, heads), four_axes(call, form.key, few)
    parts = (
        rows_of(call, bias, few),
        rows_of(call, form.gate_query, heads),
        rows_of(call, form.gate_key, few),
    )
    lower, upper, lengths, layout, size, _ = bounds
    pairs: Any = pairs_of(call, bounds)
    added = pairs is not None and pairs.is_floating_point()
    if added and is_array(temperature):
        pairs = cooled(call, pairs, temperature)
    if is_moved(call):
        pairs = shifted(call, pairs, form.offset)
    elif added and pairs.shape[-1] == 1 and not call.wants_lse:
        query, pairs = unmoved(query, pairs)
    value, seed = four_axes(call, call.value, few), call.seed if call.dropout else None
    chosen = weighting.alpha if isinstance(weighting, Entmax) else getattr(weighting, "k", 1)
    numbers = Numbers(
        scale, WEIGHTINGS[type(weighting)], float(chosen), lower, upper, size,
        is_array(temperature) or cap < 0,
        share, call.dropout, heads if len(call.lead) > 1 else math.prod(call.lead),
        cap * share if cap > 0 else cap,
    )  # fmt: skip
    arrays = Arrays(query, key, value, *parts, None, None, lengths, layout, pairs, seed)
    offset = form.offset if call.wants_lse else None
    offset = rows_of(call, None if offset is None else over(offset, temperature), heads)
    return arrays._replace(caps=rows_of(call, caps, heads)), numbers, offset
