"""The lowered form on CUDA, in Triton: s = (scale φ·ψ + bias) σ(gate), then any weighting.

This file turns a call into the arrays that the operators take; `ops` is their door, and behind it
stand the kernels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from qkv.arrays import is_array, of, tree
from qkv.engines import call as calls
from qkv.engines import streaming
from qkv.engines.call import Bare, Call
from qkv.engines.native import no_triton
from qkv.engines.triton.axes import batch_and_heads, four_axes, key_heads
from qkv.engines.triton.form import (
    WEIGHTINGS,
    arrays_of,
    cap_of,
    in_one_dtype,
    is_expanded,
    is_moved,
    lowering,
)
from qkv.engines.triton.masks import Bounds, bounds_of
from qkv.masks import is_causal
from qkv.masks.band import Band
from qkv.masks.base import Values
from qkv.scores import Additive, Cosine, Dot, Gaussian, Multiplicative, ScaledDot
from qkv.scores.distance import Expanded
from qkv.types import Array
from qkv.weightings import Hard, Softmax
from qkv.weightings.sparse import Tsallis

NAME = "triton"

WIDEST = 4096
WIDEST_RULE = 2**28
"""Pairs of a mask that is made an array: more would take more memory than what it saves."""
WIDEST_VALUE = 256
PAIRS = 8
"""Pairs of functions that stand for tanh in 16 bits."""
COARSE = 2.0**-7
"""What they may be off by, about what rounding W₁q + W₂k to bfloat16 does to tanh; half as much
again where nobody asks for a gradient."""
FINE = {"bfloat16": 1.0, "float16": 0.125}
"""Of that, how near fewer pairs must come to be taken."""


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
        return "the kernels know an alpha from 1.05 to 2 that is not learned"
    if fw.functional():  # type: ignore[attr-defined]
        return "torch.func and forward mode ask for rules that the kernels have not"
    if type(call.weighting) not in WEIGHTINGS:
        return f"the kernels do not know {type(call.weighting).__name__}"
    if getattr(call.weighting, "on_empty", "zero") != "zero":
        return "the kernels give 0 to a row without weights"
    if getattr(call.weighting, "straight_through", False):
        return cannot(replace(call, weighting=Hard())) or cannot(replace(call, weighting=Softmax()))
    if call.fw.has_empty_axis((*call.lead, call.n, call.m)):
        return "there is nothing to compute"
    reason = _unread(call, bounds_of(call))
    if reason:
        return reason
    if _is_plain_additive(call):
        return None
    found = lowering(call)
    if isinstance(found, str):
        return found
    temperature: Any = getattr(call.weighting, "temperature", 1.0)
    if is_array(temperature):
        many = math.prod(temperature.shape) * math.prod(getattr(call.bias, "shape", (0,)))
        if many > WIDEST_RULE:
            return f"a float mask for each temperature is an array of more than {WIDEST_RULE} pairs"
        return None
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
    whole = isinstance(call.score, Gaussian) and is_moved(call)  # each query adds to it
    leads = [
        x.values.shape[:-2] if isinstance(x, Values) and not whole else call.lead
        for x in bounds.rules
    ]
    pairs = max([0, *[math.prod(lead) for lead in leads]]) * call.n * call.m
    if pairs > WIDEST_RULE:
        return f"the mask is one of {pairs} pairs: as an array the kernels read {WIDEST_RULE}"
    return None


def declines(call: Call) -> str | None:
    if call.query.device.type != "cuda":
        return "Triton's interpreter is for tests"
    plain = type(call.weighting) is Softmax and not is_array(call.weighting.temperature)
    simple = type(call.score) in (Cosine, Multiplicative) and call.n > 64 and not call.wants_lse
    simple = simple and streaming.declines(call) is None  # else `dense` would have it
    if plain and simple and not call.dropout and (call.rule is None or is_causal(call.rule)):
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
        told = f"up to {PAIRS} pairs of functions for each tanh, within {COARSE:.1g}"
        return f"{told}; beyond, tanh itself"
    return "dot products tile by tile, no n × m matrix"


def run(call: Call) -> tuple[Array, Array | None, None]:
    return bind(call)(call)


def bind(call: Call) -> Callable[[Call], tuple[Array, Array | None, None]]:
    """What runs calls of this kind; they may differ in lengths, batches and numbers.

    Where numbers decide (a score that is `ranged`, in float32), `cannot` must be asked each time.
    """
    from qkv.engines.triton import ahead

    if not interpreted() and not call.fw.tracing(call.query):
        ahead.begun()
    if getattr(call.weighting, "straight_through", False):
        return _straight(call)
    run = _run_of(call)

    def bound(call: Call) -> tuple[Array, Array | None, None]:
        call = calls.seeded(call)  # here, so that a dry run draws none
        if call.fw.tracing(call.query):
            return run(call)
        with ahead.together(partial(_dry, run, call)):  # compiled side by side
            return run(call)

    return bound


def _run_of(call: Call) -> Callable[[Call], tuple[Array, Array | None, None]]:
    """The same without a thought of what must be compiled, nor of a seed."""
    from qkv.engines.triton import ops, thresholds

    if _is_plain_additive(call):
        return _additive_of(call)
    expanded = is_expanded(call)

    def run(call: Call) -> tuple[Array, Array | None, None]:
        arrays, numbers, offset = arrays_of(call, expanded)
        arrays = thresholds.searched(arrays, numbers)
        found = _in_parts(arrays.value, lambda x: ops.pooled(*arrays._replace(value=x), *numbers))
        return _as_asked(call, *found, offset)

    return run


def _straight(call: Call) -> Callable[[Call], tuple[Array, None, None]]:
    """`hard`, with the gradient that softmax in its place has: Σ hard v + (Σ soft v − itself)."""
    kinds = Hard(), Softmax()
    hard, soft = (bind(replace(call, weighting=x)) for x in kinds)

    def bound(call: Call) -> tuple[Array, None, None]:
        call = calls.seeded(call)
        out: Any = hard(replace(call, weighting=kinds[0]))[0]
        if call.fw.needs_gradient(tree.leaves(call.fw, call)):
            value = call.fw.detach(call.value)
            like: Any = soft(replace(call, weighting=kinds[1], value=value))[0]
            out = out + (like - like.detach()).nan_to_num(0.0, 0.0, 0.0)
        return out, None, None

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
    seconds = math.ceil(1.5 + 0.2 * count)  # seen beside an H200
    return f"compiles {count} kernels now, about {seconds} s"


def direct(call: Call) -> Callable[..., Array | None] | Bare | None:
    """What makes the launches of calls without a gradient again, where φ and ψ are q and k."""
    from qkv.engines.triton.operators import PLAIN

    arrays: tuple[Any, ...] = (call.query, call.key, call.value)
    rule, leaves = call.rule, tree.leaves(call.fw, call)
    if call.fw.needs_gradient(leaves) or any(type(x) not in PLAIN for x in leaves):
        return None
    if in_one_dtype(call) is not call:
        return None
    wide = not 0 < arrays[2].shape[-1] <= WIDEST_VALUE or not arrays[0].shape[-1]
    if wide or len({x.dtype for x in arrays}) > 1 or any(x.ndim != 4 for x in arrays):
        return None
    (_, heads), few = batch_and_heads(call), key_heads(call)
    if any(
        x.shape[:2] != (call.lead[0], y) for x, y in zip(arrays, (heads, few, few), strict=True)
    ):
        return None
    if rule is not None and not (isinstance(rule, Band) and rule.relative):
        return None
    score: Any = call.score
    if _is_plain_additive(call):
        from qkv.engines.triton import hidden

        held = [getattr(score, name) for name in ("w_query", "w_key", "bias")]
        return _additive_again(call) if hidden.knows(*arrays[:2], *held) else None
    score = lowering(call)[0]
    if type(score) not in (Dot, ScaledDot, Expanded):
        return None
    form = score.form(call.query, call.key)
    learned = is_array(getattr(call.weighting, "temperature", 1.0)) or is_array(form.scale)
    other = cap_of(call) or (form.bias is not None and is_moved(call))
    if learned or other or form.query is not call.query or form.key is not call.key:
        return None
    return Bare(_again(call))


def _again(call: Call) -> Callable[..., Any]:
    """The output of such calls by launches alone, of their arrays in the order of `tree.leaves`."""
    from qkv.engines.triton.kept import Repeat

    fw, run, count = call.fw, _run_of(call), len(tree.leaves(call.fw, call))
    hollow = tree.map_arrays(fw, fw.outline, call)  # it must not keep the arrays
    return Repeat(lambda *arrays: run(tree.rebuild(fw, hollow, arrays[:count]))[0])


def _additive_again(call: Call) -> Callable[..., Array | None]:
    again, tables, at = _again(call), _tables(call.query, False), call.query.get_device()

    def bound(query: Any, key: Any, value: Any, score: Any, *_: Any) -> Array | None:
        held = [score.w_query, score.w_key, score.v, *([] if score.bias is None else [score.bias])]
        if any(x.get_device() != at for x in held):  # which no kind tells
            return None
        return again(query, key, value, *held, *tables)

    return bound


def _in_parts(value: Any, run: Callable[[Any], Any]) -> tuple[Array, Array]:
    """The output and the log-sum-exp; values wider than a tile come in parts, each with the weights
    found again."""
    if value.shape[-1] <= WIDEST_VALUE:
        return run(value)[:2]  # type: ignore[no-any-return]
    pooled = [run(x) for x in value.split(WIDEST_VALUE, -1)]
    return of(value).xp.concat([x[0] for x in pooled], axis=-1), pooled[0][1]


def _as_asked(
    call: Call, out: Array, lse: Array, offset: Array | None = None
) -> tuple[Array, Array | None, None]:
    """The results with the call's own leading axes, and the log-sum-exp only if it is wanted, with
    what each row (B, H, n, 1) has left out."""
    if len(call.lead) != 2:
        out = out.reshape(*call.lead, call.n, out.shape[-1])
    if not call.wants_lse:
        return out, None, None
    lse = lse if offset is None else lse[..., None] + offset
    return out, lse.reshape(*call.lead, call.n, 1), None


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
    told = Bounds(upper=bounds.upper, rules=bounds.rules)
    if is_array(call.weighting.temperature) or bounds != told or call.dropout or cannot(call):
        return None
    learned = call.bias is not None and call.fw.needs_gradient([call.bias])
    widest = max(call.fw.shape(x)[-1] for x in (call.query, call.value))
    if learned or call.fw.tracing(call.query) or widest > WIDEST_VALUE:
        return None
    from qkv.engines.triton import ops, weights

    arrays, numbers, _ = arrays_of(call, False)
    out, lse, _ = ops.pooled(*arrays, *numbers)
    how = (numbers.scale, numbers.upper, mean, arrays.pairs, numbers.times)
    alpha = weights.weights(arrays.query, arrays.key, lse.detach(), *how)
    lead = call.lead[:-1] if mean else call.lead
    return out.reshape(*call.lead, call.n, -1), alpha.reshape(*lead, call.n, call.m)


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on any device."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


_TABLES: dict[Any, tuple[Array, ...]] = {}


def _tables(like: Any, learns: bool) -> tuple[Any, Any]:
    """The table and the grid of `features` for arrays like this."""
    from qkv.engines.triton.features import tables

    about = (like.device, FINE.get(str(like.dtype).removeprefix("torch."), 1.0))
    if about not in _TABLES:
        _TABLES[about] = tables(PAIRS, COARSE, about[1], about[0])
    table, *grids = _TABLES[about]
    return table, grids[learns]


def _additive_of(call: Call) -> Callable[[Call], tuple[Array, Array | None, None]]:
    """What runs calls of an additive score of this kind."""
    from qkv.engines.triton import hidden
    from qkv.engines.triton.additive import additive

    def given(call: Call) -> tuple[Any, ...]:
        query = four_axes(call, call.query, batch_and_heads(call)[1])
        key, score = four_axes(call, call.key, key_heads(call)), call.score
        return query, key, *(getattr(score, name) for name in ("w_query", "w_key", "bias"))

    call = in_one_dtype(call)
    learns, known = call.fw.needs_gradient(tree.leaves(call.fw, call)), hidden.knows(*given(call))

    def run(call: Call) -> tuple[Array, Array | None, None]:
        call = in_one_dtype(call)
        bounds, score, few, parts = bounds_of(call), call.score, key_heads(call), None
        assert isinstance(score, Additive)
        if known:
            a, b, parts = hidden.hidden(*given(call))
        else:
            a, b = score.hidden(call.query, call.key)
            a, b = four_axes(call, a, batch_and_heads(call)[1]), four_axes(call, b, few)
        value, table = four_axes(call, call.value, few), _tables(a, learns)
        found = _in_parts(value, lambda x: additive(a, b, score.v, x, *table, *bounds[:3], parts))
        return _as_asked(call, *found)

    return run
