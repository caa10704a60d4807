"""A score is what you write; a dot product is what runs.

The call is rewritten with φ(q) and ψ(k) in place of query and key, and an engine that knows dot
products runs it. Gradients reach the score's own arrays by the chain rule through φ and ψ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

from qkv.engines import dense, native, streaming, triton
from qkv.engines.call import Call
from qkv.engines.triton.call_arrays import build_form
from qkv.errors import format_count
from qkv.frameworks import is_array
from qkv.scores import Additive, Dot, Gated, Gaussian, ScaledDot, Score
from qkv.scores.additive import SeparableAdditive
from qkv.scores.base import DotProductForm
from qkv.scores.distance import SAFE_BANDWIDTHS, QuickGaussian
from qkv.util.types import Array

NAME = "lowered"

ENGINES = (native, triton, streaming, dense)

MAX_FORM_NUMBERS = 2**26
"""Numbers that φ and ψ may have together; beyond, they are made block by block."""


MAX_DIRECT_TANHS = 2**24
"""Hyperbolic tangents up to which an additive score is quicker as it stands."""

MIN_PRODUCT_DIFFERENCES = 2**14
"""Differences of a Gaussian from which on its products are quicker."""

MIN_PAIRS_PER_FUNCTION = 6
"""Pairs for each row of query and key that must pay for making one of its functions."""


def shape_based_reason(call: Call) -> str | None:
    """A reason against it that takes no look at the numbers, which `unsupported_reason` takes."""
    if not isinstance(call.score, Additive):
        return None
    shape = (*call.lead, call.n, call.m)
    if (
        not call.has_unknown_length
        and math.prod(shape) * streaming.numbers_per_pair(call) < MAX_DIRECT_TANHS
    ):
        few = f"{format_count(call.n)} queries and {format_count(call.m)} keys"
        return f"{few} do not pay for finding functions for tanh"
    return None


def unsupported_reason(call: Call) -> str | None:
    if type(call.score) in (Dot, ScaledDot) and not isinstance(call.lowering, str):
        return "the score is a dot product as it stands"
    if isinstance(call.score, Gated):
        return "a gate multiplies each pair's score: it is no dot product of vectors"
    if call.score.needs_range and call.fw.has_empty_axis((*call.lead, call.n, call.m)):
        return "there is nothing to compute"
    return call.lowering if isinstance(call.lowering, str) else None


def slower_reason(call: Call) -> str | None:
    if call.has_unknown_length:
        return streaming.UNKNOWN_LENGTH_REASON
    if _is_short_gaussian(call):
        return None
    score = None if isinstance(call.lowering, str) else call.lowering[0]
    if isinstance(score, SeparableAdditive):
        each = score.dot_product_width(0) / max(streaming.numbers_per_pair(call), 1)
        pairs = call.n * call.m / (call.n + call.m)
        if pairs < MIN_PAIRS_PER_FUNCTION * each:
            few = f"{format_count(call.n)} queries and {format_count(call.m)} keys"
            return f"{few} do not pay for making {each:.0f} functions of each hidden unit"
    return streaming.slower_reason(call)


def is_data_dependent(call: Call) -> bool:
    """Whether the numbers decide if the score can be lowered, so that it is asked in each call."""
    return call.score.needs_range and not _is_short_gaussian(call)


def build_direct_runner(call: Call) -> Callable[..., Array] | None:
    """A short call by a score that looks at the numbers itself."""
    if not _is_short_gaussian(call):
        return None
    return dense.build_direct_runner(replace(call, score=QuickGaussian(call.score.bandwidth)))  # type: ignore[attr-defined]


def _is_short_gaussian(call: Call) -> bool:
    """Whether a Gaussian's differences take longer than products, though all fit into one block."""
    fw, score = call.fw, call.score
    if fw.name != "torch" or not call.query.is_cpu or fw.is_traced(call.query):
        return False
    if type(score) is not Gaussian or is_array(score.bandwidth) or call.upcast() is not call:
        return False
    if call.value is None or not (call.rule is call.bias is None):
        return False
    if (
        call.dropout
        or call.wants_lse
        or call.wants_weights
        or dense.build_direct_runner(call) is None
    ):
        return False
    if not SAFE_BANDWIDTHS[0] <= score.bandwidth <= SAFE_BANDWIDTHS[
        1
    ] or not streaming.slower_reason(call):
        return False
    return (
        math.prod(call.lead) * call.n * call.m * streaming.numbers_per_pair(call)
        >= MIN_PRODUCT_DIFFERENCES
    )


def describe(call: Call) -> str:
    if _is_short_gaussian(call):
        return "its square as products, the whole matrix at once"
    rewritten = rewrite_as_dot(call)
    width = rewritten.score.dot_product_width(rewritten.fw.static_shape(rewritten.query)[-1])
    engine = _choose_inner_engine(rewritten)
    found = call.lowering
    assert not isinstance(found, str)
    about = f"scores within {found[1]:.1g}" if found[1] else "the same scores"
    return (
        f"dot products of {width:,} numbers, {about}; {engine.NAME}: {engine.describe(rewritten)}"
    )


def run(call: Call) -> tuple[Array, Array | None, None]:
    rewritten = rewrite_as_dot(call)
    out, lse, _ = _choose_inner_engine(rewritten).run(rewritten)
    return out, lse, None


def rewrite_as_dot(call: Call) -> Call:
    """The same call with a dot product for its score."""
    found = call.lowering
    assert not isinstance(found, str)
    score = found[0]
    if native.has_fused_kernels(call):
        form = build_form(call, score) if call.fw.name == "torch" else _narrow_form(call, score)
        if form.bias is None and form.gate_query is None:
            query, key = form.query, form.key
            return replace(call, query=query, key=key, score=ScaledDot(form.scale))
    call = replace(call, score=score).upcast()
    score = call.score
    shapes = [call.fw.static_shape(x) for x in (call.query, call.key)]
    if (
        sum(math.prod(shape[:-1]) for shape in shapes) * score.dot_product_width(shapes[0][-1])
        > MAX_FORM_NUMBERS
    ):
        return call
    query, key = score.dot_product_form(call.query, call.key).augmented_vectors()
    return replace(call, query=query, key=key, score=Dot())


def _narrow_form(call: Call, score: Score) -> DotProductForm:
    """The form with φ and ψ rounded to the call's own 16 bits, once."""
    wide, dtype = call.upcast(), call.fw.dtype_name(call.query)
    form = score.dot_product_form(wide.query, wide.key)
    query, key = (call.fw.astype(x, dtype) for x in (form.query, form.key))
    return form._replace(query=query, key=key)


def _choose_inner_engine(call: Call) -> ModuleType:
    return next(e for e in ENGINES if not (e.unsupported_reason(call) or e.slower_reason(call)))
