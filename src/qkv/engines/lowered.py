"""The lowered engine: rewrites a score as a dot product, then calls another engine.

φ(q) and ψ(k) replace query and key. The framework computes them, so gradients reach the score's
arrays by the chain rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

from qkv.engines import dense, native, streaming, triton
from qkv.engines.call import Call
from qkv.engines.triton.call_arrays import build_dot_product_form
from qkv.errors import format_count
from qkv.frameworks import is_array
from qkv.scores import Additive, Dot, Gated, Gaussian, ScaledDot, Score
from qkv.scores.additive import SeparableAdditive
from qkv.scores.base import DotProductForm
from qkv.scores.distance import SAFE_BANDWIDTHS, QuickGaussian
from qkv.util.types import Array

NAME = "lowered"

ENGINES = (native, triton, streaming, dense)

MAX_FEATURE_NUMBERS = 2**26
"""Most numbers of φ and ψ together; larger forms are computed block by block."""

MAX_DIRECT_TANHS = 2**24
"""The number of tanh evaluations below which the additive score is faster without lowering."""

MIN_EXPANDED_DIFFERENCES = 2**14
"""The number of differences q − k from which dot products compute a small Gaussian faster."""

MIN_PAIRS_PER_FUNCTION = 6
"""The pairs per row and function from which lowering an additive score is faster.

Lowering evaluates some functions of each row of query and key, and saves a tanh for each pair.
"""


def shape_based_reason(call: Call) -> str | None:
    """Return the reason against this engine that follows from shapes and types, or None."""
    if not isinstance(call.score, Additive):
        return None
    shape = (*call.lead, call.n, call.m)
    if (
        not call.has_unknown_length
        and math.prod(shape) * streaming.numbers_per_pair(call) < MAX_DIRECT_TANHS
    ):
        size = f"{format_count(call.n)} queries and {format_count(call.m)} keys"
        return f"{size} are too few: a factorization of tanh would take longer than it saves"
    return None


def unsupported_reason(call: Call) -> str | None:
    if type(call.score) in (Dot, ScaledDot) and not isinstance(call.lowering, str):
        return "the score is a dot product already"
    if isinstance(call.score, Gated):
        return "the gate multiplies each score, so the score is not a dot product"
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
            size = f"{format_count(call.n)} queries and {format_count(call.m)} keys"
            return (
                f"{size} are too few: computing {each:.0f} functions of each hidden unit would "
                "take longer than it saves"
            )
    return streaming.slower_reason(call)


def is_data_dependent(call: Call) -> bool:
    """Return whether array values decide if the score can be lowered."""
    return call.score.needs_range and not _is_short_gaussian(call)


def build_direct_runner(call: Call) -> Callable[..., Array] | None:
    """Return a function of `attend`'s arguments for small Gaussian calls, or None.

    The array values need no check here, because `QuickGaussian` checks them in each call.
    """
    if not _is_short_gaussian(call):
        return None
    return dense.build_direct_runner(replace(call, score=QuickGaussian(call.score.bandwidth)))  # type: ignore[attr-defined]


def _is_short_gaussian(call: Call) -> bool:
    """Return whether the call is Gaussian, fits one block, and is faster by dot products."""
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
    differences = math.prod(call.lead) * call.n * call.m * call.query.shape[-1]
    return bool(differences >= MIN_EXPANDED_DIFFERENCES)


def describe(call: Call) -> str:
    if _is_short_gaussian(call):
        return "the expanded square, the whole matrix at once"
    rewritten = rewrite_as_dot(call)
    width = rewritten.score.dot_product_width(rewritten.fw.static_shape(rewritten.query)[-1])
    engine = _choose_inner_engine(rewritten)
    assert not isinstance(call.lowering, str)
    error = call.lowering[1]
    accuracy = f"scores within {error:.1g}" if error else "the same scores"
    return (
        f"dot products of width {width:,}, {accuracy}; {engine.NAME}: {engine.describe(rewritten)}"
    )


def run(call: Call) -> tuple[Array, Array | None, None]:
    rewritten = rewrite_as_dot(call)
    out, lse, _ = _choose_inner_engine(rewritten).run(rewritten)
    return out, lse, None


def rewrite_as_dot(call: Call) -> Call:
    """Return the call with a dot product as its score."""
    assert not isinstance(call.lowering, str)
    score = call.lowering[0]
    if native.has_fused_kernels(call):
        form = (
            build_dot_product_form(call, score)
            if call.fw.name == "torch"
            else _narrow_form(call, score)
        )
        if form.bias is None and form.gate_query is None:
            query, key = form.query, form.key
            return replace(call, query=query, key=key, score=ScaledDot(form.scale))
    call = replace(call, score=score).upcast()
    score = call.score
    shapes = [call.fw.static_shape(x) for x in (call.query, call.key)]
    if (
        sum(math.prod(shape[:-1]) for shape in shapes) * score.dot_product_width(shapes[0][-1])
        > MAX_FEATURE_NUMBERS
    ):
        return call
    query, key = score.dot_product_form(call.query, call.key).augmented_vectors()
    return replace(call, query=query, key=key, score=Dot())


def _narrow_form(call: Call, score: Score) -> DotProductForm:
    """Return the form with φ and ψ computed in float32 and rounded once to the call's dtype."""
    upcast, dtype = call.upcast(), call.fw.dtype_name(call.query)
    form = score.dot_product_form(upcast.query, upcast.key)
    query, key = (call.fw.astype(x, dtype) for x in (form.query, form.key))
    return form._replace(query=query, key=key)


def _choose_inner_engine(call: Call) -> ModuleType:
    return next(e for e in ENGINES if not (e.unsupported_reason(call) or e.slower_reason(call)))
