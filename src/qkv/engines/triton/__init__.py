"""The lowered form on CUDA, in Triton: s = (scale φ·ψ + bias) σ(gate), then any weighting.

This file turns a call into the arrays that the operators take; `ops` is their door, and behind it
stand the kernels, `forward` and `backward`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from qkv.arrays import is_array, tree
from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.engines.native import no_triton, scale_of
from qkv.masks import is_causal
from qkv.masks.band import Band
from qkv.masks.base import Both, Mask, Values
from qkv.masks.sequences import Blocks, Lengths
from qkv.scores import Additive, Cosine, Dot, Multiplicative, ScaledDot, Score
from qkv.scores.additive import Separable
from qkv.scores.base import Form
from qkv.scores.distance import Expanded
from qkv.types import Array
from qkv.weightings import Average, Entmax, Hard, Normalized, Raw, Sigmoid, Softmax, Sparsemax, TopK
from qkv.weightings.sparse import Tsallis

NAME = "triton"

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
SEARCHED = ("entmax", "topk")
"""Those that must know something of the whole row first."""
UNMOVED = ("softmax", "average", "entmax", "topk")
"""The weightings that a shift of the whole row does not move."""

WIDEST = 4096
WIDEST_RULE = 2**28
"""Pairs of a mask that is made an array: more would take more memory than what it saves."""
WIDEST_VALUE = 256
PAIRS = 8
"""Pairs of functions that stand for tanh in 16 bits."""
COARSE = 2.0**-7
"""What they may be off by, about what rounding W₁q + W₂k to bfloat16 does to tanh."""


def cannot(call: Call) -> str | None:
    fw = call.fw
    if fw.name != "torch":
        return f"Triton's kernels take torch tensors, not {fw.name}'s arrays"
    if call.query.device.type != "cuda" and not interpreted():
        return f"Triton's kernels run on CUDA, not on {call.query.device.type}"
    missing = no_triton()
    if missing:
        return missing
    if fw.dtype(call.query) == "float64":
        return "the kernels sum in float32"
    if isinstance(call.weighting, Tsallis):
        return "the kernels know an alpha between 1 and 2 that is not learned"
    if fw.functional(call.query):  # type: ignore[attr-defined]
        return "torch.func and forward mode ask for rules that the kernels have not"
    if type(call.weighting) not in WEIGHTINGS:
        return f"the kernels do not know {type(call.weighting).__name__}"
    if getattr(call.weighting, "on_empty", "zero") != "zero":
        return "the kernels give 0 to a row without weights"
    if getattr(call.weighting, "straight_through", False):
        return "the kernels have no gradient of other weights than those that pool"
    if 0 in (*call.lead, call.n, call.m):
        return "there is nothing to compute"
    if call.fw.shape(call.value)[-1] > WIDEST_VALUE:
        return f"values are wider than the {WIDEST_VALUE} numbers that a tile holds"
    bounds = bounds_of(call)
    reason = _unread(call, bounds)
    if reason:
        return reason
    if _is_plain_additive(call):
        return None
    found = lowering(call)
    if isinstance(found, str):
        return found
    temperature = getattr(call.weighting, "temperature", 1.0)
    if is_array(temperature):
        return _untempered(call, temperature, found[0])
    if call.fw.shape(call.query)[-1] > WIDEST:
        return f"vectors are wider than {WIDEST} numbers"
    return None


def _is_plain_additive(call: Call) -> bool:
    """Whether it is what the additive kernels know: softmax under bands and lengths alone. Others
    have it as products of functions whose range must be looked at."""
    if not isinstance(call.score, Additive) or type(call.weighting) is not Softmax or call.dropout:
        return False
    temperature, bounds = call.weighting.temperature, bounds_of(call)
    cool = not is_array(temperature) and temperature == 1
    return bool(cool and not bounds.rules and bounds.layout is None)


def _unread(call: Call, bounds: Bounds) -> str | None:
    """Why the mask cannot be read as an array, where it must."""
    leads = [x.values.shape[:-2] if isinstance(x, Values) else call.lead for x in bounds.rules]
    pairs = max([0, *[math.prod(lead) for lead in leads]]) * call.n * call.m
    if pairs > WIDEST_RULE:
        return f"the mask is one of {pairs} pairs: as an array the kernels read {WIDEST_RULE}"
    return None


def _untempered(call: Call, temperature: Array, score: Score) -> str | None:
    """Why scores cannot be divided by this temperature in the query."""
    shape = tuple(temperature.shape)
    if shape[-1:] not in ((), (1,)):
        return "a temperature of each key cannot be divided out of the query"
    each = shape[-2:-1] not in ((), (1,))
    if each and not isinstance(score, Dot | ScaledDot | Cosine | Multiplicative):
        return "a temperature of each query cannot be divided out of what is added for each key"
    shared = _key_heads(call) < _batch_and_heads(call)[1]
    if shared and math.prod(shape[-3:]) > 1 and isinstance(score, Expanded):
        return "a temperature of each head cannot be divided out of what heads share"
    if call.bias is not None and math.prod(shape) > 1:
        return "a float mask would be divided by each of several temperatures"
    return None


def declines(call: Call) -> str | None:
    if call.query.device.type != "cuda":
        return "Triton's interpreter is for tests"
    plain = type(call.weighting) is Softmax and not call.wants_lse and call.n > 64
    simple = type(call.score) in (Cosine, Multiplicative)
    if plain and simple and (call.rule is None or is_causal(call.rule)):
        return "as a plain dot product it runs in the framework's own kernel, which is faster"
    return None


def looks(call: Call) -> bool:
    """Whether the numbers decide if the score can be lowered: in 16 bits nothing is looked at."""
    if isinstance(call.score, Additive):
        return not _is_plain_additive(call)
    return call.score.ranged and call.fw.dtype(call.query) == "float32"


def describe(call: Call) -> str:
    if _is_plain_additive(call):
        if call.fw.dtype(call.query) == "float32":
            return "tanh itself, tile by tile"
        return f"{PAIRS} pairs of functions for each tanh, within {COARSE:.1g}; beyond, tanh itself"
    return "dot products tile by tile, no n × m matrix"


def run(call: Call) -> tuple[Array, Array | None, None]:
    return bind(call)(call)


def bind(call: Call) -> Callable[[Call], tuple[Array, Array | None, None]]:
    """What runs calls of this kind; they may differ in lengths, batches and numbers.

    Where numbers decide (a score that is `ranged`, in float32), `cannot` must be asked each time.
    """
    from qkv.engines.triton import ops
    from qkv.engines.triton.arguments import Numbers
    from qkv.engines.triton.records import Arrays

    if _is_plain_additive(call):
        return _together(_additive)
    weighting = WEIGHTINGS[type(call.weighting)]
    searched = weighting in SEARCHED
    found = lowering(call)
    expanded = _is_narrow(call) and isinstance(found[0], Expanded)

    def bound(call: Call) -> tuple[Array, Array | None, None]:
        bounds = bounds_of(call)
        if expanded and not is_array(call.score.bandwidth):  # type: ignore[attr-defined]
            form = _expanded(call, call.score.bandwidth)  # type: ignore[attr-defined]
        else:
            found = lowering(call)
            assert not isinstance(found, str)
            form = form_of(call, found[0])
        temperature: Any = getattr(call.weighting, "temperature", 1.0)
        share = 1.0 if is_array(temperature) else 1 / temperature
        if is_array(temperature):
            form = form._replace(query=_over(form.query, temperature))
        if isinstance(call.weighting, Hard):  # flat: no gradient reaches the scores
            held: Any = form
            form = Form(*(x.detach() if is_array(x) else x for x in held))
        (_, heads), few = _batch_and_heads(call), _key_heads(call)
        query, key = _four_axes(call, form.query, heads), _four_axes(call, form.key, few)
        parts = (
            _rows(call, form.bias if form.bias is None else _over(form.bias, temperature), few),
            _rows(call, form.gate_query, heads),
            _rows(call, form.gate_key, few),
        )
        lower, upper, lengths, layout, size, _ = bounds
        scale, times, alpha, rows = form.scale * share, share, 0.0, (None, None)
        pairs = _pairs(call, bounds)
        if pairs is not None and is_array(temperature) and pairs.is_floating_point():
            pairs = pairs / temperature.reshape(())
        if searched:
            band = (scale, *parts, lower, upper, lengths, pairs, times)
            alpha, rows = _searched(call, query, key, band)
        out, lse, _ = ops.pooled(
            *Arrays(
                query, key, _four_axes(call, call.value, few), *parts, *rows, lengths, layout,
                pairs, call.seed if call.dropout else None,
            ),
            *Numbers(
                scale, weighting, alpha, lower, upper, size, False, times, call.dropout,
                heads if len(call.lead) > 1 else math.prod(call.lead),
            ),
        )  # fmt: skip
        if form.offset is not None and call.wants_lse:
            lse = lse[..., None] + _rows(call, _over(form.offset, temperature), heads)
        return _as_asked(call, out, lse)

    return _together(bound)


def _over(x: Any, temperature: Any) -> Any:
    """x / temperature, in x's dtype, by float32."""
    if not is_array(temperature):
        return x if temperature == 1 else x * (1 / temperature)
    return (x.float() / temperature.float()).to(x.dtype)


def _together(run: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """`run`, whose kernels are compiled side by side, with those of its gradient."""
    from qkv.engines.triton import ahead

    def bound(call: Call) -> Any:
        call = calls.seeded(call)  # here, so that a dry run draws none
        with ahead.together(partial(_dry, run, call)):
            return run(call)

    return bound


def _dry(run: Callable[[Call], Any], call: Call) -> None:
    from qkv.engines.triton import ahead

    fw = call.fw
    ahead.there_and_back(lambda arrays: run(tree.rebuild(fw, call, arrays)), tree.leaves(fw, call))


def missing(call: Call) -> dict[Any, Callable[[], Any]]:
    """What compiles each kernel that the call and its gradient need and that is not compiled."""
    from qkv.engines.triton import ahead

    if interpreted() or call.fw.tracing(call.query):
        return {}
    learns = call.fw.needs_gradient(tree.leaves(call.fw, call))
    return ahead.missing(partial(_dry, bind(call), call), learns)


def warm(call: Call) -> tuple[str, ...]:
    """Compile these, side by side, with a bar; what they are."""
    from qkv.engines.triton import ahead, launch

    jobs = missing(call)
    ahead.compile_jobs(jobs, launch.COMPILED, "compiling")
    return tuple(str(key) for key in jobs)


def waits(call: Call) -> str:
    """Whether the next such call compiles first, and how long that takes where Triton's own cache
    on disk has nothing."""
    count = len(missing(call))
    if not count:
        return "ready"
    # Seen beside an H200. In float32 a product is written out term by term.
    seconds = (1.5 + 0.2 * count) * (1 if _is_narrow(call) else 4)
    return f"compiles {count} kernels now, about {math.ceil(seconds)} s"


def direct(call: Call) -> Callable[..., Array] | None:
    """What makes the launches of calls without a gradient again, where φ and ψ are q and k."""
    from qkv.engines.triton.operators import PLAIN

    arrays: tuple[Any, ...] = (call.query, call.key, call.value)
    rule, weighting = call.rule, WEIGHTINGS[type(call.weighting)]
    if call.fw.needs_gradient(arrays) or any(type(x) not in PLAIN for x in arrays):
        return None
    if len({x.dtype for x in arrays}) > 1 or any(x.ndim != 4 for x in arrays):
        return None
    (_, heads), few = _batch_and_heads(call), _key_heads(call)
    if any(
        x.shape[:2] != (call.lead[0], y) for x, y in zip(arrays, (heads, few, few), strict=True)
    ):
        return None
    if rule is not None and not (isinstance(rule, Band) and rule.relative):
        return None
    found = lowering(call)
    score = found[0]
    if type(score) not in (Dot, ScaledDot, Expanded):
        return None
    form = score.form(call.query, call.key)  # type: ignore[union-attr]
    if form.query is not call.query or form.key is not call.key:
        return None
    from qkv.engines.triton.repeat import Repeat

    scale = form.scale / getattr(call.weighting, "temperature", 1.0)
    factor = None if form.bias is None else -scale / 2
    number = getattr(call.weighting, "k", 1)
    if isinstance(call.weighting, Entmax):
        number = float(call.weighting.alpha)
    return Repeat(weighting, number, scale, factor, partial(_band, rule))


def _as_asked(call: Call, out: Array, lse: Array) -> tuple[Array, Array | None, None]:
    """The results with the call's own leading axes, and the log-sum-exp only if it is wanted."""
    if len(call.lead) != 2:
        out = out.reshape(*call.lead, call.n, out.shape[-1])
    return out, lse.reshape(*call.lead, call.n, 1) if call.wants_lse else None, None


def with_weights(call: Call, mean: bool) -> tuple[Array, Array] | None:
    """The output and α, of every head or their mean, for softmax of dot products; None for calls
    of any other kind."""
    bounds = bounds_of(call)
    dot = type(call.score) is Dot or (
        type(call.score) is ScaledDot
        and call.score.softcap is None
        and not is_array(call.score.scale)
    )
    if not dot or type(call.weighting) is not Softmax or len(call.lead) < 2:
        return None
    if is_array(call.weighting.temperature):
        return None
    told = Bounds(upper=bounds.upper, rules=bounds.rules)
    if bounds != told or call.dropout or cannot(call):
        return None
    if call.bias is not None and call.fw.needs_gradient([call.bias]):
        return None
    if call.fw.tracing(call.query) or call.fw.shape(call.query)[-1] > WIDEST_VALUE:
        return None
    from qkv.engines.triton import ops, weights

    (_, heads), few, scale = _batch_and_heads(call), _key_heads(call), scale_of(call)
    query = _four_axes(call, call.query, heads)
    key, value = (_four_axes(call, x, few) for x in (call.key, call.value))
    pairs, times = _pairs(call, bounds), 1 / call.weighting.temperature
    how: dict[str, Any] = {"upper": bounds.upper, "pairs": pairs, "times": times}
    out, lse = ops.attend(query, key, value, scale=scale, **how)
    alpha = weights.weights(query, key, lse.detach(), scale, mean=mean, **how)
    lead = call.lead[:-1] if mean else call.lead
    return out.reshape(*call.lead, call.n, -1), alpha.reshape(*lead, call.n, call.m)


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on any device."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def lowering(call: Call) -> tuple[Any, float] | str:
    """The score as one with a form. For 16 bits nothing is looked at, so nothing waits, but for the
    range of an additive score."""
    dtype = call.fw.dtype(call.query)
    if dtype == "float32" or isinstance(call.score, Additive):
        found = call.lowering
    else:
        found = call.score.lowered(call.query, call.key, call.tolerance, dtype)
    if isinstance(found, str):
        return found
    inner = getattr(found[0], "score", found[0])
    if type(inner) is Additive:
        return "the kernels know no gate on an additive score"
    moved = WEIGHTINGS[type(call.weighting)] not in UNMOVED or found[0] is not inner
    if moved and isinstance(inner, Expanded):
        return "the kernels add no number to the score of a whole row"
    return found


def form_of(call: Call, score: Score) -> Form:
    """`score.form`, with what it computes of each row in one pass over 16-bit rows."""
    if _is_narrow(call) and isinstance(score, Separable):
        wide = score.form(call.query.float(), call.key.float())
        return wide._replace(**{x: getattr(wide, x).to(call.query.dtype) for x in ("query", "key")})
    if _is_narrow(call):
        from qkv.engines.triton import norms

        if isinstance(score, Cosine) and not is_array(score.temperature):
            scale = 1 / score.temperature
            return Form(norms.unit(call.query), norms.unit(call.key), scale=scale)
        if isinstance(score, Expanded) and not is_array(score.bandwidth):
            return _expanded(call, score.bandwidth)
    return score.form(call.query, call.key)


def _expanded(call: Call, bandwidth: float) -> Form:
    """The form of `Expanded` without a centre: its squares are exact enough in float32."""
    from qkv.engines.triton import norms

    scale = 1 / bandwidth**2
    offset = norms.square(call.query, -scale / 2) if call.wants_lse else None
    return Form(call.query, call.key, norms.square(call.key, -scale / 2), offset, scale=scale)


def _is_narrow(call: Call) -> bool:
    return call.fw.dtype(call.query) != "float32"


class Bounds(NamedTuple):
    """Which pairs count: lower ≤ j − i ≤ upper, j < lengths, the layout's blocks, and what rules
    of other kinds leave, which are read as one array."""

    lower: int | None = None
    upper: int | None = None
    lengths: Array | None = None
    layout: Array | None = None
    layout_size: int = 0
    rules: tuple[Mask, ...] = ()


def bounds_of(call: Call) -> Bounds:
    return Bounds() if call.rule is None else _bounds(call, call.rule)


def _bounds(call: Call, rule: Mask) -> Bounds:
    import torch

    device = call.query.device
    if isinstance(rule, Both):
        one, two = _bounds(call, rule.one), _bounds(call, rule.two)
        if one.layout is not None and two.layout is not None:
            two = Bounds(rules=(rule.two,))
        return _both(one, two)
    if isinstance(rule, Band) and rule.relative:
        return Bounds(*_band(rule, call.n, call.m))
    if isinstance(rule, Lengths) and len(rule.valid.shape) == 1:
        valid = torch.as_tensor(rule.valid, dtype=torch.int32, device=device)
        batch, _ = _batch_and_heads(call)
        return Bounds(lengths=valid.repeat_interleave(batch // call.lead[0]))
    searched = WEIGHTINGS[type(call.weighting)] in SEARCHED
    if isinstance(rule, Blocks) and rule.layout.ndim == 2 and not searched:
        size = rule.size[0]
        if size == rule.size[1]:
            layout = rule.layout[: -(-call.n // size), : -(-call.m // size)]
            return Bounds(layout=torch.as_tensor(layout, device=device), layout_size=size)
    return Bounds(rules=(rule,))


def _pairs(call: Call, bounds: Bounds) -> Array | None:
    """(B or 1, H or 1, n or 1, m or 1): what the rules add, −∞ where they rule out, or if they add
    nothing 0 there, as bytes."""
    import torch

    allowed, bias = None, None
    for rule in bounds.rules:
        if isinstance(rule, Values) and rule.is_bias:
            bias = rule.values if rule.values.dtype != torch.float64 else rule.values.float()
            continue
        some = rule.allowed(calls.place(call, calls.all_rows(call), calls.all_cols(call)))
        if some is not None:
            some = torch.as_tensor(some, device=call.query.device)
            allowed = some if allowed is None else allowed & some
    if bias is None:
        return None if allowed is None else _own_axes(call, allowed).view(torch.uint8)
    return _own_axes(call, bias if allowed is None else bias.where(allowed, -math.inf))


def _own_axes(call: Call, x: Any) -> Any:
    """(…, n or 1, m or 1) on four axes; an axis that all share stays 1."""
    x = x[(None,) * (len(call.lead) + 2 - x.ndim)]
    if len(call.lead) < 2:
        return x[:, None] if call.lead else x[None, None]
    if math.prod(x.shape[:-3]) > 1 and len(call.lead) > 2:
        x = x.expand(*call.lead[:-1], *x.shape[-3:])
    return x.reshape(-1, *x.shape[-3:])


def _band(rule: Any, n: int, m: int) -> tuple[int | None, int | None]:
    """The least and the largest j − i that count; None sets no bound."""
    if rule is None:
        return None, None
    shift = rule.offset
    if shift is None:
        shift = m - n if rule.align == "bottom_right" else 0
    left, right = rule.left, rule.right
    return None if left is None else shift - left, None if right is None else shift + right


def _both(one: Bounds, two: Bounds) -> Bounds:
    lower = [x.lower for x in (one, two) if x.lower is not None]
    upper = [x.upper for x in (one, two) if x.upper is not None]
    lengths = [x.lengths for x in (one, two) if x.lengths is not None]
    return Bounds(
        max(lower, default=None),
        min(upper, default=None),
        lengths[0].minimum(lengths[-1]) if lengths else None,
        one.layout if two.layout is None else two.layout,
        one.layout_size or two.layout_size,
        one.rules + two.rules,
    )


def _batch_and_heads(call: Call) -> tuple[int, int]:
    """The leading axes as two; one alone is the batch, so that lengths are those of its rows."""
    lead = call.lead
    if len(lead) == 2:
        return lead
    return (lead[0], 1) if len(lead) == 1 else (math.prod(lead[:-1]), lead[-1] if lead else 1)


def _key_heads(call: Call) -> int:
    """The heads that keys and values keep, or all of the query's where they differ."""
    both: tuple[Any, ...] = (call.key, call.value)
    one, two = (x.shape[-3] if x.ndim > 2 else 1 for x in both)
    return one if one == two and len(call.lead) > 1 else _batch_and_heads(call)[1]


def _four_axes(call: Call, x: Any, heads: int) -> Any:
    """(…, rows, width) as (batch, heads, rows, width), the last axis contiguous."""
    lead, shape = call.lead, x.shape
    if len(lead) == 2 and len(shape) == 4 and shape[0] == lead[0] and shape[1] == heads:
        pass
    elif len(lead) < 2:
        x = calls.share_heads(call, x).expand(*lead, *shape[-2:])
        x = x.reshape(lead[0] if lead else 1, 1, *shape[-2:])
    else:
        if len(shape) > 2 and shape[-3] not in (1, heads):
            x = calls.share_heads(call, x)
        x = x.expand(*lead[:-1], heads, *shape[-2:])
        x = x.reshape(-1, *x.shape[-3:])
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(call: Call, x: Any, heads: int, factor: float = 1.0) -> Any:
    """(…, rows, 1) as float32 (batch, heads, rows, 1), each head's at a multiple of 16."""
    if x is None:
        return None
    from qkv.engines.triton.launch import evenly

    return evenly(_four_axes(call, x.float() if factor == 1 else x.float() * factor, heads))


def _searched(call: Call, query: Array, key: Array, band: tuple[Any, ...]) -> tuple[Any, ...]:
    """alpha, and what a sparse weighting must know of each row first."""
    from qkv.engines.triton import search

    if isinstance(call.weighting, Entmax):
        alpha = float(call.weighting.alpha)
        return alpha, (search.entmax_threshold(query, key, alpha, *band), None)
    return 0.0, search.topk_threshold(query, key, getattr(call.weighting, "k", 1), *band)


_TABLES: dict[Any, tuple[Array, ...]] = {}


def _additive(call: Call) -> tuple[Array, Array | None, None]:
    from qkv.engines.triton.additive import additive
    from qkv.engines.triton.features import tables

    bounds = bounds_of(call)
    assert isinstance(call.score, Additive)
    a, b = call.score.hidden(call.query, call.key)
    heads = _key_heads(call)
    a, b = _four_axes(call, a, _batch_and_heads(call)[1]), _four_axes(call, b, heads)
    value = _four_axes(call, call.value, heads)
    device = call.query.device
    if device not in _TABLES:
        _TABLES[device] = tables(PAIRS, COARSE, device)
    coefficients, grid = _TABLES[device]
    lower, upper, lengths, *_ = bounds
    found = additive(a, b, call.score.v, value, coefficients, grid, lower, upper, lengths)
    return _as_asked(call, *found)
