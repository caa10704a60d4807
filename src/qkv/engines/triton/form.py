"""A call's score as the kernels know it: which there are, and φ, ψ and what is added to them."""

from __future__ import annotations

from typing import Any

from qkv.arrays import is_array
from qkv.engines.call import Call
from qkv.scores import Additive, Cosine, Gated, Gaussian, ScaledDot, Score
from qkv.scores.additive import Separable
from qkv.scores.base import Form
from qkv.scores.distance import Expanded
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
    return score.form(call.query, call.key)


def _widened(x: Any) -> Any:
    """Rows with zeros up to one of eight widths an octave: how many products an additive score has
    is a matter of its numbers, and each width is compiled for."""
    import torch

    width = x.shape[-1]
    step = max(2 ** (width.bit_length() - 4), 64 if width > 64 else 16)
    return torch.nn.functional.pad(x, (0, -width % step))


def expanded_form(call: Call, bandwidth: float) -> Form:
    """The form of `Expanded` without a centre: its squares are exact enough in float32."""
    from qkv.engines.triton import norms

    scale = 1 / bandwidth**2
    shown = call.wants_lse or is_moved(call)
    offset = norms.square(call.query, -scale / 2) if shown else None
    return Form(call.query, call.key, norms.square(call.key, -scale / 2), offset, scale=scale)


def is_narrow(call: Call) -> bool:
    return call.fw.dtype(call.query) in ("float16", "bfloat16")
