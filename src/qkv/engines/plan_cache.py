"""The plan cache: the engine chosen for a signature, reused by later calls with that signature.

A signature holds everything that the choice depends on:

- the arrays' types, dtypes, devices, shapes, and whether a gradient is needed;
- the score, the weighting, the mask and the flags. A function in a score or a mask is compared by
  its code and by what it reads, on PyTorch, and by its code on NumPy, where a plan runs the
  function of each call. On other frameworks it has no signature.

If there is no plan for the exact n and m, a call uses a plan for lengths with the same numbers of
binary digits. A plan never holds an array. No plan is cached while a framework traces the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from qkv import masks
from qkv.engines import linear, lowered, streaming
from qkv.engines.call import RANGE_UNKNOWN, Call, ThreeArrayRunner, pack_results
from qkv.engines.choice import EngineChoice, choose_engine
from qkv.engines.validation import build_call, cast_bias, resolve_score_and_weighting, resolve_seed
from qkv.errors import QkvError
from qkv.frameworks import FRAMEWORK_BY_TYPE, find_framework, load_framework, tree
from qkv.frameworks.tree import SIGNATURE_ATTRIBUTE
from qkv.scores import Constant, Gaussian, Relative, ScaledDot
from qkv.util.caches import create_table, insert_bounded
from qkv.util.registry import REGISTRY_VERSION
from qkv.util.types import Array

MAX_CACHED_PLANS = 1024
"""The most plans in each table.

There is no eviction order: `insert_bounded` empties a full table before it inserts the next plan.
"""

MAX_UNSKIPPED_PAIRS = 2**26
"""Pairs up to which a mask's NumPy integers become arguments of the compiled function.

New integers then need no new compilation, but no block is skipped by their values.
"""

MAX_CONTENTS_PER_PLAN = 16
"""The most compiled functions of a plan whose mask holds NumPy arrays, one for each contents."""

Signature = tuple[Hashable, ...]


class Plan(NamedTuple):
    """The chosen engine and a function that runs it without validation or choice.

    `run(query, key, value, score, weighting, mask, seed)` returns the results of `attend`, or None
    if the engine does not support these values. `run_arrays(query, key, value)` does the same, for
    engines that need no other argument.
    """

    choice: EngineChoice
    run: Callable[..., Any]
    run_arrays: Callable[[Array, Array, Array], Any] | None = None


PLANS_BY_SIGNATURE: dict[Signature, Plan] = create_table("engines.plans_by_signature")
_PLANS_BY_SIZE_CLASS: dict[Signature, Plan] = create_table("engines.plans_by_size_class")


def find_plan(
    query: Array,
    key: Array,
    value: Array | None,
    score: Any,
    weighting: Any,
    mask: Any,
    flags: tuple[Hashable, ...],
) -> tuple[Signature | None, Plan | None]:
    """Return the signature of a call and the cached plan for that signature.

    The signature is None if no plan may be cached. The plan is None if none is cached yet.

    No other function builds a signature. This function runs in every call. To save a function call,
    it reads the signatures that scores, weightings and masks hold as an attribute.
    """
    fw = FRAMEWORK_BY_TYPE.get(type(query)) or find_framework(query)
    arrays = None if fw is None else fw.array_signature(query, key, value)
    if fw is None or arrays is None:
        return None, None
    try:
        if type(score) is FunctionType and fw.device_block_numbers(query) is None:
            # On a GPU, `user_code` evaluates functions before the choice of an engine.
            score = tree.FunctionSignature.create(fw, score)
        elif type(score) is not str:
            score = getattr(score, SIGNATURE_ATTRIBUTE, None) or tree.record_signature(fw, score)
        if type(weighting) is not str:
            weighting = getattr(weighting, SIGNATURE_ATTRIBUTE, None) or tree.record_signature(
                fw, weighting
            )
        if mask is not None and type(mask) is not str:
            mask = getattr(mask, SIGNATURE_ATTRIBUTE, None) or tree.record_signature(fw, mask)
        signature = (arrays, score, weighting, mask, flags, REGISTRY_VERSION[0])
        plan = PLANS_BY_SIGNATURE.get(signature)
    except tree.UncacheableError:
        return None, None
    except TypeError:  # a flag is not hashable; `build_call` raises the error for it
        return None, None
    if plan is None:
        size_class = _size_class(signature)
        plan = None if size_class is None else _PLANS_BY_SIZE_CLASS.get(size_class)
        if plan is not None:
            insert_bounded(PLANS_BY_SIGNATURE, signature, plan, MAX_CACHED_PLANS)
    return signature, plan


def run_first_call(
    call: Call, choice: EngineChoice, signature: Signature | None, arguments: tuple[Any, ...]
) -> Any:
    """Cache a plan for the signature if possible, run the call through it, return the results.

    Since later calls run through the same plan, their results equal the first bit by bit.
    """
    with call.fw.plan_quietly():
        plan = None if signature is None else cache_plan(signature, call, choice)
    results = None if plan is None else plan.run(*arguments)
    if results is not None:
        return results
    with call.fw.use_own_settings(), call.fw.translate_errors(call.query):
        return pack_results(call, choice.run(call))


def cache_plan(signature: Signature, call: Call, choice: EngineChoice) -> Plan | None:
    """Cache and return a plan with the chosen engine; return None if no plan may be cached."""
    if 0 in (*call.lead, call.n, call.m):
        return None
    if call.exceeds_float32 or call.may_exceed_float64:
        return None
    run: Callable[..., Any] | ThreeArrayRunner
    if _depends_on_values(call, choice):
        if not _can_compile_range_check(call, choice):
            return None
        run = _build_range_plan(call, signature)
    else:
        run = _build_plan_function(call, choice, signature)
    plan = (
        Plan(choice, run.run, run.function)
        if isinstance(run, ThreeArrayRunner)
        else Plan(choice, run)
    )
    insert_bounded(PLANS_BY_SIGNATURE, signature, plan, MAX_CACHED_PLANS)
    # The factor of a function that computes a dot product may be one of the lengths.
    is_exact = type(call.score) is ScaledDot and _replaces_score(call, signature)
    size_class = None if is_exact else _size_class(signature)
    if size_class is not None:
        insert_bounded(_PLANS_BY_SIZE_CLASS, size_class, plan, MAX_CACHED_PLANS)
    return plan


def _size_class(signature: Signature) -> Signature | None:
    """Return the signature with the number of binary digits of n and m in place of n and m.

    None if a plan for one length may be wrong for another: the shapes do not agree, or an array
    inside the mask or the weighting has one entry for each key or query.
    """
    arrays, score, weighting, mask, *flags = signature
    (query, key, value), other = arrays[:3], arrays[3:]  # type: ignore[index]
    if min(len(query), len(key)) < 2 or (value is not None and value[-2:-1] != key[-2:-1]):
        return None
    n, m = query[-2], key[-2]
    if type(mask) is tree.ArraySignature:
        shape = mask.shape
        if len(shape) < 2 or shape[-2] not in (1, n) or shape[-1] not in (1, m):
            return None
        mask = mask._replace(shape=(*shape[:-2], shape[-2] == 1, shape[-1] == 1))
    elif tree.has_arrays(mask):
        return None
    if any(tuple(x.shape[-2:]) == (n, 1) for x in tree.array_signatures(weighting)) and n != 1:
        return None
    leads = query[:-2], key[:-2], None if value is None else value[:-2]
    widths = query[-1], key[-1], None if value is None else value[-1]
    return leads, widths, n.bit_length(), m.bit_length(), other, score, weighting, mask, *flags


def _replaces_score(call: Call, signature: Signature) -> bool:
    """Return whether the call has another score than its arguments: see `simplify_score`."""
    is_simple = type(call.score) in (ScaledDot, Constant)
    return (
        is_simple and tree.holds_values(signature[1]) and not tree.array_leaves(call.fw, call.score)
    )


def _build_plan_function(
    call: Call, choice: EngineChoice, signature: Signature
) -> Callable[..., Any] | ThreeArrayRunner:
    """Return `run_plan`, which runs the chosen engine, or the engine's own direct runner."""
    fw = call.fw
    _, score_signature, weighting_signature, mask_signature, *_ = signature
    fixed_score = call.score if _replaces_score(call, signature) else None
    if fixed_score is not None:
        score_signature = None
    has_parameters = tree.holds_values((score_signature, weighting_signature))
    mask_has_values = tree.holds_values(mask_signature)
    mask_is_array = type(mask_signature) is tree.ArraySignature
    returns_output = not (call.dropout or call.wants_lse) and call.value is not None
    is_plain = (
        (mask_is_array or not mask_has_values)
        and call.bias is None
        and not tree.has_functions(score_signature)
    )
    replay: Callable[..., Any] | None = None
    if returns_output and not fw.compiles_calls:
        direct: Callable[..., Any] | ThreeArrayRunner | None = None
        if is_plain:
            direct = choice.build_direct_runner(call)
        if direct is not None:
            return direct
        replay = choice.build_replay_runner(call)
    run = choice.build_runner(call)
    # A plan must not hold arrays, since their memory could not be freed.
    call_without_data = tree.map_arrays(fw, fw.without_data, call)
    run, lead = _compile_runner(call_without_data, run), call.lead
    # Later entries replace earlier ones: here, and when `run_plan` adds the arguments of a call.
    fixed_fields = {
        **vars(call_without_data),
        "exceeds_float32": False,
        "may_exceed_float64": False,
        "fw": fw,
        "lead": lead,
    }
    if mask_has_values:
        fixed_fields["rule"] = fixed_fields["bias"] = None
    if has_parameters:
        fixed_fields["score"] = fixed_fields["weighting"] = None

    call_ignores_scores = call.weighting.ignores_scores

    def build_later_call(
        query: Array,
        key: Array,
        value: Array | None,
        score: Any,
        weighting: Any,
        mask: Any,
        seed: Any,
    ) -> Call:
        if query.shape[:-2] != lead:
            query = fw.xp.broadcast_to(query, (*lead, *query.shape[-2:]))
        fields = {**fixed_fields, "query": query, "key": key, "value": value}
        if mask_has_values:
            fields["rule"], bias = masks.resolve(mask)
            # The rule holds the −∞ of a float mask, which is all that an average needs.
            is_needed = bias is not None and not call_ignores_scores
            fields["bias"] = cast_bias(fw, bias, query) if is_needed else None
        if has_parameters:
            fields["score"], fields["weighting"] = resolve_score_and_weighting(
                score if fixed_score is None else fixed_score, weighting, fields["bias"]
            )
        if fields["dropout"]:
            fields["seed"] = resolve_seed(fw, seed, query)
        return Call.from_validated_fields(fields)

    def run_plan(*arguments: Any) -> Any:
        call = build_later_call(*arguments)
        with fw.use_own_settings():
            results = run(call)
            return None if results is None else pack_results(call, results)

    def run_replayed_plan(
        query: Array, key: Array, value: Array, score: Any, weighting: Any, mask: Any, seed: Any
    ) -> Any:
        if isinstance(score, Relative):  # launches know arrays by pointer: derive them once
            score = score.with_distance_table()
        arguments = query, key, value, score, weighting, mask, seed
        assert replay is not None
        output = replay(query, key, value, score, mask, lambda: build_later_call(*arguments))
        return run_plan(*arguments) if output is None else output

    return run_plan if replay is None else run_replayed_plan


def _depends_on_values(call: Call, choice: EngineChoice) -> bool:
    """Return whether array values may have decided the choice of an engine."""
    is_data_dependent = getattr(choice.engine, "is_data_dependent", None)
    if is_data_dependent is None or not is_data_dependent(call):
        return False
    # On JAX, values decide only whether these engines can rewrite the score.
    by_shape = (engine.shape_based_reason(call) for engine in (linear, lowered))
    return not (call.fw.compiles_calls and choice.engine is streaming and all(by_shape))


def _can_compile_range_check(call: Call, choice: EngineChoice) -> bool:
    """Return whether only the range of a Gaussian score decides between compiled plans."""
    narrow = call.fw.dtype_name(call.query) in ("float16", "bfloat16")
    is_named = not choice.refusals  # then the range does not change the engine
    return call.fw.compiles_calls and type(call.score) is Gaussian and not (narrow or is_named)


def _build_range_plan(call: Call, signature: Signature) -> Callable[..., Any]:
    """Return a plan that measures the range of queries and keys and runs the plan for it."""
    fw, width, dtype = call.fw, call.query.shape[-1], call.fw.dtype_name(call.query)
    gaussian: Any = tree.map_arrays(fw, fw.without_data, call.score)
    dropout, tolerance = call.dropout, call.tolerance
    lse, weights = call.wants_lse, _requested_weights(call)
    plans_by_range: dict[bool, Callable[..., Any]] = {}

    def measure_range(query: Array, key: Array, *leaves: Array) -> Any:
        with fw.use_own_settings():
            return tree.replace_arrays(fw, gaussian, leaves).measure_range(query, key)

    compiled = fw.compile_function(measure_range)
    assert compiled is not None

    def run_plan(
        query: Array, key: Array, value: Array, score: Any, weighting: Any, mask: Any, seed: Any
    ) -> Any:
        values = query, key, *tree.array_leaves(fw, score)
        values = tuple(map(fw.untraced_value, values))
        check: float | str = RANGE_UNKNOWN
        if all(x is not None for x in values):
            check = gaussian.error_in_range(compiled(*values), width, tolerance, dtype)
        is_in_range = not isinstance(check, str)
        plan = plans_by_range.get(is_in_range)
        if plan is None:
            first = build_call(
                *(query, key, value, score, weighting, mask, dropout, seed, tolerance),
                lse=lse,
                weights=weights,
            )
            # Engines ask only whether the score is in range.
            first = replace(first, range_check=0.0 if is_in_range else RANGE_UNKNOWN)
            built = _build_plan_function(first, choose_engine(first), signature)
            assert not isinstance(built, ThreeArrayRunner)
            plan = plans_by_range[is_in_range] = built
        return plan(query, key, value, score, weighting, mask, seed)

    return run_plan


def _requested_weights(call: Call) -> Any:
    """Return the argument `return_weights` of `attend` for this call."""
    return "mean" if call.wants_weights == "mean" else call.wants_weights is not None


def _compile_runner(call_without_data: Call, run: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """Return `run`, compiled if the framework is slow when it runs single operations."""
    fw = call_without_data.fw

    def compile_like(template: Call) -> Callable[..., Any] | None:
        return fw.compile_function(lambda *leaves: run(tree.replace_arrays(fw, template, leaves)))

    compiled = compile_like(call_without_data)
    if compiled is None:
        return run

    def run_compiled(call: Call, function: Callable[..., Any] = compiled) -> Any:
        try:
            return function(*tree.array_leaves(fw, call))
        except QkvError:  # the engine must read array values, which a traced array does not have
            return run(call)

    if not tree.has_foreign_arrays(fw, call_without_data.rule):
        return run_compiled
    shape = (*call_without_data.lead, call_without_data.n, call_without_data.m)
    is_small = math.prod(shape) <= MAX_UNSKIPPED_PAIRS
    functions_by_contents: dict[Any, Callable[..., Any]] = {}

    def run_with_host_arrays(call: Call) -> Any:
        if is_small and call.rule is not None:
            call = replace(call, rule=call.rule.with_arrays_like(call.query))
        try:
            contents = tree.foreign_contents(fw, call.rule)
        except tree.UncacheableError:
            return run(call)
        function = functions_by_contents.get(contents)
        if function is None:
            # A copy, because the caller may write to the arrays, and JAX may trace again.
            rule = tree.map_arrays(load_framework("numpy"), np.array, call.rule)
            template = tree.map_arrays(fw, fw.without_data, replace(call, rule=rule))
            function = compile_like(template)
            assert function is not None
            insert_bounded(functions_by_contents, contents, function, MAX_CONTENTS_PER_PLAN)
        return run_compiled(call, function)

    return run_with_host_arrays
