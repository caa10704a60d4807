"""Plans: what was chosen for a kind of call, kept so that the next of that kind need not choose.

A kind is what the choice hangs on: the arrays' types, dtypes, devices, leading shapes and widths,
their lengths by their number of binary digits, the score, the weighting, the mask, the flags, and
whether a gradient is wanted. No plan holds an array, and none is made while a framework traces.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from qkv import masks
from qkv.engines.call import Call, ThreeArrayRunner, pack_results
from qkv.engines.choice import EngineChoice
from qkv.engines.validation import cast_bias, resolve_score_and_weighting, resolve_seed
from qkv.errors import QkvError
from qkv.frameworks import find_framework, tree
from qkv.frameworks.tree import SIGNATURE_ATTRIBUTE
from qkv.util.caches import create_table, insert_bounded
from qkv.util.registry import REGISTRY_VERSION
from qkv.util.types import Array

MAX_CACHED_PLANS = 1024
"""Kinds that are remembered, and exact shapes; beyond, the tables start anew."""

Signature = tuple[Hashable, ...]


class Plan(NamedTuple):
    """`run(query, key, value, score, weighting, mask, seed)`: the results, or None: choose anew.
    `bare(query, key, value)` is the same where there is nothing else to know."""

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
    sign: Any = None,
) -> tuple[Signature | None, Plan | None]:
    """All that a choice hangs on, with exact shapes, None for what cannot be told by that; and the
    plan for calls of this kind, where one is kept. `sign` is the arrays' signature, if known."""
    fw = find_framework(query)
    if sign is None and fw is not None:
        sign = fw.array_signature(query, key, value)
    if fw is None or sign is None:
        return None, None
    try:
        if type(score) is not str:
            score = getattr(score, SIGNATURE_ATTRIBUTE, None) or tree.record_signature(fw, score)
        if type(weighting) is not str:
            weighting = getattr(weighting, SIGNATURE_ATTRIBUTE, None) or tree.record_signature(
                fw, weighting
            )
        if mask is not None:
            mask = getattr(mask, SIGNATURE_ATTRIBUTE, None) or tree.record_signature(fw, mask)
    except tree.UncacheableError:
        return None, None
    kind = sign, score, weighting, mask, flags, REGISTRY_VERSION[0]
    try:
        plan = PLANS_BY_SIGNATURE.get(kind)
    except TypeError:  # a flag that is none: the check of the arguments says so
        return None, None
    if plan is None:
        wide = _size_class(kind)
        plan = None if wide is None else _PLANS_BY_SIZE_CLASS.get(wide)
        if plan is not None:
            insert_bounded(PLANS_BY_SIGNATURE, kind, plan, MAX_CACHED_PLANS)
    return kind, plan


def run_first_call(
    call: Call, choice: EngineChoice, kind: Signature | None, given: tuple[Any, ...]
) -> Any:
    """The first call of a kind, by the plan kept of it, so that the next is rounded alike."""
    plan = None if kind is None else cache_plan(kind, call, choice)
    found = None if plan is None else plan.run(*given)
    if found is not None:
        return found
    with call.fw.compute_context(), call.fw.translate_errors(call.query):
        return pack_results(call, choice.run(call))


def cache_plan(kind: Signature, call: Call, choice: EngineChoice) -> Plan | None:
    """Remember what was chosen for a call, unless there is nothing to gain."""
    looks = getattr(choice.engine, "is_data_dependent", None)
    if 0 in (*call.lead, call.n, call.m) or (looks is not None and looks(call)):
        return None
    if call.exceeds_float32 or call.may_exceed_float64:
        return None
    run = _build_plan_function(call, choice, kind)
    plan = (
        Plan(choice, run)
        if not isinstance(run, ThreeArrayRunner)
        else Plan(choice, run.run, run.function)
    )
    insert_bounded(PLANS_BY_SIGNATURE, kind, plan, MAX_CACHED_PLANS)
    wide = _size_class(kind)
    if wide is not None:
        insert_bounded(_PLANS_BY_SIZE_CLASS, wide, plan, MAX_CACHED_PLANS)
    return plan


def _size_class(kind: Signature) -> Signature | None:
    """The kind with lengths by their size alone; None where they do not fit each other."""
    sign, score, weighting, mask, *flags = kind
    (query, key, value), rest = sign[:3], sign[3:]  # type: ignore[index]
    if min(len(query), len(key)) < 2 or (value is not None and value[-2:-1] != key[-2:-1]):
        return None
    n, m = query[-2], key[-2]
    if type(mask) is tree.ArraySignature:
        shape = mask.shape
        if len(shape) < 2 or shape[-2] not in (1, n) or shape[-1] not in (1, m):
            return None
        mask = mask._replace(shape=(*shape[:-2], shape[-2] == 1, shape[-1] == 1))
    elif tree.has_arrays(mask):
        return None  # an array inside of a rule may be as long as the keys
    if any(tuple(x.shape[-2:]) == (n, 1) for x in tree.array_signatures(weighting)) and n != 1:
        return None  # and one inside of a weighting as the queries
    leads = query[:-2], key[:-2], None if value is None else value[:-2]
    widths = query[-1], key[-1], None if value is None else value[-1]
    return leads, widths, n.bit_length(), m.bit_length(), rest, score, weighting, mask, *flags


def _build_plan_function(
    call: Call, choice: EngineChoice, kind: Signature
) -> Callable[..., Any] | ThreeArrayRunner:
    """The chosen engine as a function of the arguments of `run_plan`."""
    fw = call.fw
    learned, masked = tree.has_arrays(kind[1:3]), tree.has_arrays(kind[3])
    bare = type(kind[3]) is tree.ArraySignature
    plain = not (call.dropout or call.wants_lse) and (bare or not masked) and call.bias is None
    if plain and call.value is not None and not fw.needs_equal_spans:
        direct: Callable[..., Any] | ThreeArrayRunner | None = choice.build_direct_runner(call)
        if direct is not None:
            return direct
    run = choice.build_runner(call)
    hollow = tree.map_arrays(fw, fw.without_data, call)  # it must not keep the arrays
    run, fixed, lead = _compile_runner(hollow, run), dict(vars(hollow)), call.lead
    fixed["exceeds_float32"] = fixed["may_exceed_float64"] = False
    if masked:
        fixed["rule"] = fixed["bias"] = None

    def run_plan(
        query: Array,
        key: Array,
        value: Array | None,
        score: Any,
        weighting: Any,
        mask: Any,
        seed: Any,
    ) -> Any:
        call: Call = object.__new__(Call)  # its fields fit, so nothing is checked again
        fields = call.__dict__
        fields.update(fixed)
        fields["fw"], fields["lead"] = fw, lead
        fields["key"], fields["value"] = key, value
        if query.shape[:-2] != lead:
            query = fw.xp.broadcast_to(query, (*lead, *query.shape[-2:]))
        fields["query"] = query
        if masked:
            fields["rule"], bias = masks.resolve(mask)
            fields["bias"] = cast_bias(fw, bias, query)
        if learned:
            fields["score"], fields["weighting"] = resolve_score_and_weighting(
                score, weighting, call.bias
            )
        if call.dropout:
            fields["seed"] = resolve_seed(fw, seed, query)
        with fw.compute_context():
            found = run(call)
            return None if found is None else pack_results(call, found)

    return run_plan


def _compile_runner(hollow: Call, run: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """`run` as one compiled function, in a framework that is slow step by step."""
    fw = hollow.fw
    quick = fw.compile_function(lambda *leaves: run(tree.replace_arrays(fw, hollow, leaves)))
    if quick is None or tree.has_foreign_arrays(fw, hollow.rule):
        return run

    def run_compiled(call: Call) -> Any:
        try:
            return quick(*tree.array_leaves(fw, call))
        except QkvError:  # it must look at numbers
            return run(call)

    return run_compiled
