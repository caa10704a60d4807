"""A score is what you write; a dot product is what runs.

The call is rewritten with φ(q) and ψ(k) in place of query and key, and an engine that knows dot
products runs it. Gradients reach the score's own arrays by the chain rule through φ and ψ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

from qkv.arrays import is_array
from qkv.engines import dense, native, streaming, triton
from qkv.engines.call import Call
from qkv.engines.triton.form import form_of
from qkv.errors import count
from qkv.scores import Additive, Dot, Gated, Gaussian, ScaledDot, Score
from qkv.scores.additive import Separable
from qkv.scores.base import Form
from qkv.scores.distance import MODERATE, Quick
from qkv.types import Array

NAME = "lowered"

ENGINES = (native, triton, streaming, dense)

ROOM = 2**26
"""Numbers that φ and ψ may have together; beyond, they are made block by block."""


SHORT = 2**24
"""Hyperbolic tangents up to which an additive score is quicker as it stands."""

DIFFERENCES = 2**14
"""Differences of a Gaussian from which on its products are quicker."""

PAIRS = 6
"""Pairs for each row of query and key that must pay for making one of its functions."""


def glance(call: Call) -> str | None:
    """A reason against it that takes no look at the numbers, which `cannot` takes."""
    if not isinstance(call.score, Additive):
        return None
    shape = (*call.lead, call.n, call.m)
    if not call.unsized and math.prod(shape) * streaming.footprint(call) < SHORT:
        few = f"{count(call.n)} queries and {count(call.m)} keys"
        return f"{few} do not pay for finding functions for tanh"
    return None


def cannot(call: Call) -> str | None:
    if type(call.score) in (Dot, ScaledDot) and not isinstance(call.lowering, str):
        return "the score is a dot product as it stands"
    if isinstance(call.score, Gated):
        return "a gate multiplies each pair's score: it is no dot product of vectors"
    if call.score.ranged and call.fw.has_empty_axis((*call.lead, call.n, call.m)):
        return "there is nothing to compute"
    return call.lowering if isinstance(call.lowering, str) else None


def declines(call: Call) -> str | None:
    if call.unsized:
        return streaming.UNKNOWN
    if _is_short(call):
        return None
    score = None if isinstance(call.lowering, str) else call.lowering[0]
    if isinstance(score, Separable):
        each = score.form_width(0) / max(streaming.footprint(call), 1)
        pairs = call.n * call.m / (call.n + call.m)
        if pairs < PAIRS * each:
            few = f"{count(call.n)} queries and {count(call.m)} keys"
            return f"{few} do not pay for making {each:.0f} functions of each hidden unit"
    return streaming.declines(call)


def looks(call: Call) -> bool:
    """Whether the numbers decide if the score can be lowered, so that it is asked in each call."""
    return call.score.ranged and not _is_short(call)


def direct(call: Call) -> Callable[..., Array] | None:
    """A short call by a score that looks at the numbers itself."""
    if not _is_short(call):
        return None
    return dense.direct(replace(call, score=Quick(call.score.bandwidth)))  # type: ignore[attr-defined]


def _is_short(call: Call) -> bool:
    """Whether a Gaussian's differences take longer than products, though all fit into one block."""
    fw, score = call.fw, call.score
    if fw.name != "torch" or not call.query.is_cpu or fw.tracing(call.query):
        return False
    if type(score) is not Gaussian or is_array(score.bandwidth) or call.precise() is not call:
        return False
    if call.value is None or not (call.rule is call.bias is None):
        return False
    if call.dropout or call.wants_lse or call.wants_weights or dense.direct(call) is None:
        return False
    if not MODERATE[0] <= score.bandwidth <= MODERATE[1] or not streaming.declines(call):
        return False
    return math.prod(call.lead) * call.n * call.m * streaming.footprint(call) >= DIFFERENCES


def describe(call: Call) -> str:
    if _is_short(call):
        return "its square as products, the whole matrix at once"
    rewritten = rewrite(call)
    width = rewritten.score.form_width(rewritten.fw.shape(rewritten.query)[-1])
    engine = _engine(rewritten)
    found = call.lowering
    assert not isinstance(found, str)
    about = f"scores within {found[1]:.1g}" if found[1] else "the same scores"
    return (
        f"dot products of {width:,} numbers, {about}; {engine.NAME}: {engine.describe(rewritten)}"
    )


def run(call: Call) -> tuple[Array, Array | None, None]:
    rewritten = rewrite(call)
    out, lse, _ = _engine(rewritten).run(rewritten)
    return out, lse, None


def rewrite(call: Call) -> Call:
    """The same call with a dot product for its score."""
    found = call.lowering
    assert not isinstance(found, str)
    score = found[0]
    if native.has_kernels(call):
        form = form_of(call, score) if call.fw.name == "torch" else _narrow(call, score)
        if form.bias is None and form.gate_query is None:
            query, key = form.query, form.key
            return replace(call, query=query, key=key, score=ScaledDot(form.scale))
    call = replace(call, score=score).precise()
    score = call.score
    shapes = [call.fw.shape(x) for x in (call.query, call.key)]
    if sum(math.prod(shape[:-1]) for shape in shapes) * score.form_width(shapes[0][-1]) > ROOM:
        return call
    query, key = score.form(call.query, call.key).products()
    return replace(call, query=query, key=key, score=Dot())


def _narrow(call: Call, score: Score) -> Form:
    """The form with φ and ψ rounded to the call's own 16 bits, once."""
    wide, dtype = call.precise(), call.fw.dtype(call.query)
    form = score.form(wide.query, wide.key)
    query, key = (call.fw.astype(x, dtype) for x in (form.query, form.key))
    return form._replace(query=query, key=key)


def _engine(call: Call) -> ModuleType:
    return next(e for e in ENGINES if not (e.cannot(call) or e.declines(call)))
