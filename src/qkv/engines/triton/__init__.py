"""The engine `triton`: CUDA kernels for s = (scale φ·ψ + bias) σ(gate) and any weighting.

This file builds the functions that run the kernels; `unsupported` says which calls they support.
`call_arrays` turns a call into arrays; `attend_operator` launches the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from qkv.engines import call as calls
from qkv.engines import streaming
from qkv.engines.call import Call, ThreeArrayRunner
from qkv.engines.triton import residues
from qkv.engines.triton.call_arrays import (
    MaskBounds,
    as_four_axes,
    batch_and_heads,
    build_kernel_arrays,
    compiled_cap,
    count_key_heads,
    in_one_dtype,
    is_16bit_gaussian,
    is_shift_sensitive,
    kernel_lowering,
    rule_translation_error,
    split_mask,
    split_modified,
    split_score,
)
from qkv.engines.triton.distance_arrays import kernel_form
from qkv.engines.triton.sink import build_sink_runner
from qkv.engines.triton.unsupported import is_interpreted as is_interpreted
from qkv.engines.triton.unsupported import is_plain_additive, mask_too_large_reason
from qkv.engines.triton.unsupported import unsupported_reason as unsupported_reason
from qkv.frameworks import get_framework, is_array, tree
from qkv.masks import is_plain_causal
from qkv.masks.band import Band
from qkv.masks.base import ArrayMask
from qkv.scores import (
    Additive,
    Cosine,
    Dot,
    Modified,
    Multiplicative,
    RelativeScore,
    ScaledDot,
)
from qkv.scores.distance import ExpandedGaussian
from qkv.scores.functions import EvaluatedScore
from qkv.util.caches import create_table
from qkv.util.types import Array
from qkv.weightings import Hard, Softmax
from qkv.weightings.entmax import SinkEntmax
from qkv.weightings.softmax import SinkSoftmax

NAME = "triton"

MAX_VALUE_WIDTH = 256
TANH_FUNCTION_PAIRS = 8
"""Pairs of functions that approximate tanh in 16 bits."""
TANH_ERROR = 2.0**-7
"""The largest error of these pairs: about the error of tanh if W₁q + W₂k is rounded to bfloat16.
Without a gradient, 1.5 times this error is allowed."""
TANH_ERROR_FRACTION = {"bfloat16": 1.0, "float16": 0.125}
"""By dtype: fewer pairs are used if their error is at most this fraction of TANH_ERROR."""


def slower_reason(call: Call) -> str | None:
    if call.query.device.type != "cuda":
        return "Triton's interpreter is slow, for tests only"
    pairs = math.prod(call.lead) * call.n * call.m
    if isinstance(call.score, EvaluatedScore) and pairs <= streaming.MAX_DENSE_NUMBERS:
        return "the scores exist already, and are few: dense is as good"
    if not is_plain_additive(call) and streaming.has_short_tanh(call):
        return "the hidden units are few: dense computes them before their range is known"
    plain = type(call.weighting) is Softmax and not is_array(call.weighting.temperature)
    simple = type(call.score) in (Cosine, Multiplicative) and call.n > 64 and not call.wants_lse
    simple = simple and streaming.slower_reason(call) is None  # otherwise `dense` is chosen
    if plain and simple and not call.dropout and (call.rule is None or is_plain_causal(call.rule)):
        return "the framework's own kernel is faster: the score is a plain dot product"
    return None


def is_data_dependent(call: Call) -> bool:
    """Return whether array values decide if the score can be lowered; never in 16 bits."""
    score, _ = split_modified(call.score, call.n, call.m)
    if isinstance(score, Additive):
        return not is_plain_additive(call)
    return score.needs_range and call.fw.dtype_name(call.query) == "float32"


def describe(call: Call) -> str:
    if is_plain_additive(call):
        if call.fw.dtype_name(call.query) == "float32":
            return "exact tanh, tile by tile"
        return (
            f"tanh by up to {TANH_FUNCTION_PAIRS} pairs of functions, error at most "
            f"{TANH_ERROR:.1g}; exact tanh beyond their range"
        )
    if isinstance(call.score, EvaluatedScore):
        return "the function of the score runs once; the kernels read its scores like a float mask"
    parts = [_describe_scores(kernel_form(call.score))]
    if residues.find_step(call) is not None:
        parts.append("the positions of each remainder apart")
    if isinstance(call.score, Modified | RelativeScore):
        parts.append("score_mod compiled into the kernels")
    for rule in split_mask(call).rules:
        reason = None if isinstance(rule, ArrayMask) else rule_translation_error(call, rule)
        if reason is not None:
            parts.append(f"{rule!r} read as an array: {reason}")
    return "; ".join(parts)


def _describe_scores(form: str | None) -> str:
    if form == "constant":
        return "equal scores tile by tile, no n × m matrix"
    if form in ("laplace", "exact"):
        return "comparisons column by column, tile by tile, no n × m matrix"
    if form:
        return (
            "distances from dot products tile by tile, no n × m matrix; from differences where "
            "rounding could change a score"
        )
    return "dot products tile by tile, no n × m matrix"


def run(call: Call) -> tuple[Array, Array | None, None]:
    return build_runner(call)(call)


def build_runner(call: Call) -> Callable[[Call], tuple[Array, Array | None, None]]:
    """Return a function that runs calls like this one; lengths, batches and values may differ.

    If `is_data_dependent(call)`, the caller must check `unsupported_reason` before each call.
    """
    from qkv.engines.triton.launching import precompile

    if not is_interpreted() and not call.fw.is_traced(call.query):
        precompile.start_triton_setup()
    if getattr(call.weighting, "straight_through", False):
        return _build_straight_through_runner(call)
    if isinstance(call.weighting, SinkSoftmax):
        return build_sink_runner(call, build_runner)
    step = residues.find_step(call)
    run = (
        _build_plain_runner(call)
        if step is None
        else residues.build_split_runner(call, step, _build_plain_runner)
    )

    def run_precompiled(call: Call) -> tuple[Array, Array | None, None]:
        call = calls.ensure_seed(call)  # outside of the dry run, which must not draw a seed
        if call.fw.is_traced(call.query):
            return run(call)
        with precompile.compile_together(partial(_dry_run, run, call)):
            return run(call)

    return run_precompiled


def _build_plain_runner(call: Call) -> Callable[[Call], tuple[Array, Array | None, None]]:
    """Return the runner of `build_runner`, without compiling ahead and without drawing a seed."""
    from qkv.engines.triton import attend_operator
    from qkv.engines.triton.sparse import thresholds

    if is_plain_additive(call):
        return _build_additive_runner(call)
    expanded = is_16bit_gaussian(call)

    def run_plain(call: Call) -> tuple[Array, Array | None, None]:
        arrays, numbers, offset = build_kernel_arrays(call, expanded)
        arrays = thresholds.with_thresholds(arrays, numbers)
        found = _run_in_value_parts(
            arrays.value, lambda x: attend_operator.attend(*arrays._replace(value=x), *numbers)
        )
        return _shape_results(call, *found, offset)

    return run_plain


def _build_straight_through_runner(call: Call) -> Callable[[Call], tuple[Array, None, None]]:
    """Return a function for `hard` with softmax's gradient: hard + soft − detached soft output."""
    kinds = Hard(), Softmax()
    hard, soft = (build_runner(replace(call, weighting=x)) for x in kinds)

    def run_straight_through(call: Call) -> tuple[Array, None, None]:
        call = calls.ensure_seed(call)
        out: Any = hard(replace(call, weighting=kinds[0]))[0]
        if call.fw.needs_gradient(tree.array_leaves(call.fw, call)):
            value = call.fw.detach(call.value)
            like: Any = soft(replace(call, weighting=kinds[1], value=value))[0]
            out = out + (like - like.detach()).nan_to_num(0.0, 0.0, 0.0)
        return out, None, None

    return run_straight_through


def _dry_run(run: Callable[[Call], Any], call: Call) -> None:
    from qkv.engines.triton.launching import precompile

    fw = call.fw
    precompile.run_forward_and_backward(
        lambda arrays: run(tree.replace_arrays(fw, call, arrays)), tree.array_leaves(fw, call)
    )


def find_missing_kernels(call: Call) -> dict[Any, Callable[[], Any]]:
    """Return the compile jobs of the kernels that the call and its gradient need."""
    from qkv.engines.triton.launching import precompile

    if is_interpreted() or call.fw.is_traced(call.query):
        return {}
    learns = call.fw.needs_gradient(tree.array_leaves(call.fw, call))
    return precompile.find_missing_kernels(partial(_dry_run, build_runner(call), call), learns)


def warm(call: Call) -> tuple[str, ...]:
    """Compile the missing kernels of a call, with a progress bar; return their names."""
    from qkv.engines.triton.launching import launch, precompile

    jobs = find_missing_kernels(call)
    precompile.compile_jobs(jobs, launch.COMPILED_KERNELS, "compiling")
    return tuple(str(key) for key in jobs)


def describe_pending_compilation(call: Call) -> str:
    """Return whether the next such call compiles kernels, and about how long that takes.

    The time assumes that Triton's cache on disk is empty.
    """
    count = len(find_missing_kernels(call))
    if not count:
        return "ready"
    seconds = math.ceil(1.5 + 0.2 * count)  # measured on a host with an H200
    return f"compiles {count} kernels now, about {seconds} s"


def build_direct_runner(call: Call) -> Callable[..., Array | None] | ThreeArrayRunner | None:
    """Return a function that replays the launches of calls like this one; None: not possible.

    It is possible without a gradient if φ and ψ are q and k themselves.
    """
    rule = call.rule
    if not _can_replay(call):
        return None
    if rule is not None and not (isinstance(rule, Band) and rule.is_relative):
        return None
    score: Any = call.score
    if is_plain_additive(call):
        from qkv.engines.triton.additive import additive_projection

        held = [getattr(score, name) for name in ("w_query", "w_key", "bias")]
        return (
            _build_additive_replay(call)
            if additive_projection.is_supported(call.query, call.key, *held)
            else None
        )
    return ThreeArrayRunner(_build_replay(call)) if _has_own_form(call) else None


def build_replay_runner(call: Call) -> Callable[..., Array | None] | None:
    """Return a function that replays the launches of calls with a mask, a score_mod or a gradient.

    It takes query, key, value, score, mask, and a function that builds the call. It returns None if
    the mask or the score holds something that has no signature, that is on another device, or that
    needs a gradient. `build_replay_runner` returns None if launches never read the arrays as they
    are.
    """
    from qkv.engines.triton.launching import precompile
    from qkv.engines.triton.launching.gradient_replay import GradientReplay
    from qkv.engines.triton.launching.launch_replay import LaunchListCache, describe_arrays
    from qkv.engines.triton.launching.torch_operator import PLAIN_TENSOR_TYPES
    from qkv.engines.triton.pair_functions.signatures import MaskSignatureBuilder, NoSignatureError

    if (step := residues.find_step(call)) is not None:
        return residues.build_split_replay(call, step, build_replay_runner)
    inner, _ = split_score(call)
    is_straight_through = getattr(call.weighting, "straight_through", False)
    if is_straight_through or not (_can_replay(call, learns=True) and _has_own_form(inner)):
        return None
    fw, run, expanded = call.fw, _build_plain_runner(call), is_16bit_gaussian(call)
    learns = fw.needs_gradient((call.query, call.key, call.value))
    launch_lists, gradients = LaunchListCache(), GradientReplay()

    def run_or_replay(
        query: Any, key: Any, value: Any, score: Any, mask: Any, build: Callable[[], Call]
    ) -> Array | None:
        more = [mask]
        if type(mask) not in PLAIN_TENSOR_TYPES:
            score_mods = split_modified(score, query.shape[-2], key.shape[-2])[1]
            if score_mods or not (isinstance(mask, Band) and mask.is_relative):
                builder = MaskSignatureBuilder(lambda x: fw.cached_constant(x, query, "bool"))
                try:
                    builder.build((mask, score_mods))
                except NoSignatureError:
                    return None
                more = builder.tensors
            else:  # numbers, which are in the signature of the plan
                more = []
        if any(x.device != query.device for x in more) or fw.needs_gradient(more):
            return None
        arrays = query, key, value, *more

        def build_arrays() -> tuple[Any, Any, Callable[[], None]]:
            fresh = build()
            return *build_kernel_arrays(fresh, expanded)[:2], partial(_dry_run, run, fresh)

        def run_once() -> Any:
            return run(build())[0]

        if learns:
            return gradients(build_arrays, arrays)
        with precompile.compile_together(run_once):
            return launch_lists.replay_or_record(describe_arrays(arrays), run_once, arrays)

    return run_or_replay


def _can_replay(call: Call, learns: bool = False) -> bool:
    """Return whether launches read the arrays of calls like this one as they are.

    With `learns`, query, key and value may need a gradient.
    """
    from qkv.engines.triton.launching.torch_operator import PLAIN_TENSOR_TYPES

    arrays: tuple[Any, ...] = (call.query, call.key, call.value)
    leaves = tree.array_leaves(call.fw, call)
    if isinstance(call.weighting, SinkSoftmax) or (call.fw.needs_gradient(leaves) and not learns):
        return False
    if isinstance(call.weighting, SinkEntmax) and is_array(call.weighting.sink):
        return False
    if any(type(x) not in PLAIN_TENSOR_TYPES for x in leaves):
        return False
    if in_one_dtype(call) is not call:
        return False
    wide = not 0 < arrays[2].shape[-1] <= MAX_VALUE_WIDTH or not arrays[0].shape[-1]
    if wide or len({x.dtype for x in arrays}) > 1 or any(x.ndim != 4 for x in arrays):
        return False
    (_, heads), few = batch_and_heads(call), count_key_heads(call)
    shapes = zip(arrays, (heads, few, few), strict=True)
    return all(x.shape[:2] == (call.lead[0], y) for x, y in shapes)


def _has_own_form(call: Call) -> bool:
    """Return whether φ and ψ are the query and the key themselves, and nothing is learned."""
    if kernel_form(call.score) or isinstance(call.score, EvaluatedScore):
        return False
    found = kernel_lowering(call)
    score: Any = None if isinstance(found, str) else found[0]
    if type(score) not in (Dot, ScaledDot, ExpandedGaussian):
        return False
    # Without a gradient: a checkpoint counts what is saved for one. Only first calls are here.
    query, key = call.query.detach(), call.key.detach()
    form = score.dot_product_form(query, key)
    learned = is_array(getattr(call.weighting, "temperature", 1.0)) or is_array(form.scale)
    other = compiled_cap(call) or (form.bias is not None and is_shift_sensitive(call))
    return not (learned or other) and form.query is query and form.key is key


def _build_replay(call: Call) -> Callable[..., Any]:
    """Return a function of a call's arrays, in the order of `tree.array_leaves`, that replays its
    launches and returns the output."""
    from qkv.engines.triton.launching.launch_replay import ReplayedCall

    fw, run, count = call.fw, _build_plain_runner(call), len(tree.array_leaves(call.fw, call))
    hollow = tree.map_arrays(fw, fw.without_data, call)  # does not keep the arrays alive
    return ReplayedCall(lambda *arrays: run(tree.replace_arrays(fw, hollow, arrays[:count]))[0])


def _build_additive_replay(call: Call) -> Callable[..., Array | None]:
    again, tables, at = _build_replay(call), _get_tables(call.query, False), call.query.get_device()

    def replay_additive(query: Any, key: Any, value: Any, score: Any, *_: Any) -> Array | None:
        held = [score.w_query, score.w_key, score.v, *([] if score.bias is None else [score.bias])]
        if any(x.get_device() != at for x in held):  # the signature does not hold their device
            return None
        return again(query, key, value, *held, *tables)

    return replay_additive


def _run_in_value_parts(value: Any, run: Callable[[Any], Any]) -> tuple[Array, Array]:
    """Return the output and the log-sum-exp; values wider than a tile are pooled in parts.

    Each part computes the weights again.
    """
    if value.shape[-1] <= MAX_VALUE_WIDTH:
        return run(value)[:2]  # type: ignore[no-any-return]
    pooled = [run(x) for x in value.split(MAX_VALUE_WIDTH, -1)]
    return get_framework(value).xp.concat([x[0] for x in pooled], axis=-1), pooled[0][1]


def _shape_results(
    call: Call, out: Array, lse: Array, offset: Array | None = None
) -> tuple[Array, Array | None, None]:
    """Return the results with the call's leading axes, and the log-sum-exp if it is requested.

    `offset` (B, H, n, 1) was left out of each row's scores, and is added to the log-sum-exp.
    """
    if len(call.lead) != 2:
        out = out.reshape(*call.lead, call.n, out.shape[-1])
    if not call.wants_lse:
        return out, None, None
    lse = lse if offset is None else lse[..., None] + offset
    return out, lse.reshape(*call.lead, call.n, 1), None


def run_with_weights(call: Call, mean: bool) -> tuple[Array, Array] | None:
    """Return the output and α, per head or their mean, for softmax of dot products.

    None: the call is of another kind.
    """
    bounds = split_mask(call)
    dot = type(call.score) is Dot or (
        type(call.score) is ScaledDot
        and call.score.softcap is None
        and not is_array(call.score.scale)
    )
    if not dot or type(call.weighting) is not Softmax or len(call.lead) < 2:
        return None
    supported_bounds = MaskBounds(upper=bounds.upper, rules=bounds.rules, spans=bounds.spans)
    if (
        is_array(call.weighting.temperature)
        or bounds != supported_bounds
        or call.dropout
        or unsupported_reason(call)
        or mask_too_large_reason(call, bounds, mask_as_array=True)
    ):
        return None
    learned = call.bias is not None and call.fw.needs_gradient([call.bias])
    widest = max(call.fw.static_shape(x)[-1] for x in (call.query, call.value))
    if learned or call.fw.is_traced(call.query) or widest > MAX_VALUE_WIDTH:
        return None
    from qkv.engines.triton import attend_operator, weights

    arrays, numbers, _ = build_kernel_arrays(call, False, mask_as_array=True)
    out, lse, _ = attend_operator.attend(*arrays, *numbers)
    how = (numbers.scale, numbers.upper, mean, arrays.pairs, numbers.times)
    alpha = weights.compute_weights(arrays.query, arrays.key, lse.detach(), *how)
    lead = call.lead[:-1] if mean else call.lead
    return out.reshape(*call.lead, call.n, -1), alpha.reshape(*lead, call.n, call.m)


_TABLE_CACHE: dict[Any, tuple[Array, ...]] = create_table("triton.tanh_tables")


def _get_tables(like: Any, learns: bool) -> tuple[Any, Any]:
    """Return the table and the grid of `additive_features` for the device and dtype of `like`."""
    from qkv.engines.triton.additive.additive_features import build_tables

    about = (like.device, TANH_ERROR_FRACTION.get(str(like.dtype).removeprefix("torch."), 1.0))
    if about not in _TABLE_CACHE:
        _TABLE_CACHE[about] = build_tables(TANH_FUNCTION_PAIRS, TANH_ERROR, about[1], about[0])
    table, *grids = _TABLE_CACHE[about]
    return table, grids[learns]


def _build_additive_runner(call: Call) -> Callable[[Call], tuple[Array, Array | None, None]]:
    """Return a function that runs calls with an additive score like this one."""
    from qkv.engines.triton.additive import additive_projection
    from qkv.engines.triton.additive.additive import attend_additive

    def projection_inputs(call: Call) -> tuple[Any, ...]:
        query = as_four_axes(call, call.query, batch_and_heads(call)[1])
        key, score = as_four_axes(call, call.key, count_key_heads(call)), call.score
        return query, key, *(getattr(score, name) for name in ("w_query", "w_key", "bias"))

    call = in_one_dtype(call)
    learns, known = (
        call.fw.needs_gradient(tree.array_leaves(call.fw, call)),
        additive_projection.is_supported(*projection_inputs(call)),
    )

    def run_additive(call: Call) -> tuple[Array, Array | None, None]:
        call = in_one_dtype(call)
        bounds, score, few, parts = split_mask(call), call.score, count_key_heads(call), None
        assert isinstance(score, Additive)
        if known:
            a, b, parts = additive_projection.project_hidden(*projection_inputs(call))
        else:
            a, b = score.hidden_terms(call.query, call.key)
            a, b = as_four_axes(call, a, batch_and_heads(call)[1]), as_four_axes(call, b, few)
        value, table = as_four_axes(call, call.value, few), _get_tables(a, learns)
        found = _run_in_value_parts(
            value, lambda x: attend_additive(a, b, score.v, x, *table, *bounds[:3], parts)
        )
        return _shape_results(call, *found)

    return run_additive
