"""Plans: what was chosen for a kind of call, kept so that the next of that kind need not choose.

A kind is what the choice hangs on: the arrays' types, dtypes, devices, leading shapes and widths,
their lengths by their number of binary digits, the score, the weighting, the mask, the flags, and
whether a gradient is wanted. No plan holds an array, and none is made while a framework traces.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from qkv import masks
from qkv.arrays import framework_of, tree
from qkv.arrays.tree import KIND
from qkv.engines.call import Bare, Call, results
from qkv.engines.choose import Choice
from qkv.engines.request import bias_of, resolved, seed_of
from qkv.errors import QkvError
from qkv.names import EDITION
from qkv.types import Array

MOST = 1024
"""Kinds that are remembered, and exact shapes; beyond, the tables start anew."""

Kind = tuple[Hashable, ...]


class Plan(NamedTuple):
    """`run(query, key, value, score, weighting, mask, seed)`: the results, or None: choose anew.
    `bare(query, key, value)` is the same where there is nothing else to know."""

    choice: Choice
    run: Callable[..., Any]
    bare: Callable[[Array, Array, Array], Any] | None = None


SEEN: dict[Kind | None, Plan] = {}
_KINDS: dict[Kind, Plan] = {}


def find(
    query: Array,
    key: Array,
    value: Array | None,
    score: Any,
    weighting: Any,
    mask: Any,
    flags: tuple[Hashable, ...],
    sign: Any = None,
) -> tuple[Kind | None, Plan | None]:
    """All that a choice hangs on, with exact shapes, None for what cannot be told by that; and the
    plan for calls of this kind, where one is kept. `sign` is the arrays' signature, if known."""
    fw = framework_of(query)
    if sign is None and fw is not None:
        sign = fw.signature(query, key, value)
    if fw is None or sign is None:
        return None, None
    try:
        if type(score) is not str:
            score = getattr(score, KIND, None) or tree.kind(fw, score)
        if type(weighting) is not str:
            weighting = getattr(weighting, KIND, None) or tree.kind(fw, weighting)
        if mask is not None:
            mask = getattr(mask, KIND, None) or tree.kind(fw, mask)
    except tree.Unkind:
        return None, None
    kind = sign, score, weighting, mask, flags, EDITION[0]
    try:
        plan = SEEN.get(kind)
    except TypeError:  # a flag that is none: the check of the arguments says so
        return None, None
    if plan is None:
        wide = _class_of(kind)
        plan = None if wide is None else _KINDS.get(wide)
        if plan is not None:
            _put(SEEN, kind, plan)
    return kind, plan


def first(call: Call, choice: Choice, kind: Kind | None, given: tuple[Any, ...]) -> Any:
    """The first call of a kind, by the plan kept of it, so that the next is rounded alike."""
    plan = None if kind is None else keep(kind, call, choice)
    found = None if plan is None else plan.run(*given)
    if found is not None:
        return found
    with call.fw.quiet(), call.fw.guard(call.query):
        return results(call, choice.run(call))


def keep(kind: Kind, call: Call, choice: Choice) -> Plan | None:
    """Remember what was chosen for a call, unless there is nothing to gain."""
    looks = getattr(choice.engine, "looks", None)
    if 0 in (*call.lead, call.n, call.m) or (looks is not None and looks(call)):
        return None
    if call.extreme or call.beyond:
        return None
    run = _bound(call, choice, kind)
    plan = Plan(choice, run) if not isinstance(run, Bare) else Plan(choice, run.run, run.of)
    _put(SEEN, kind, plan)
    wide = _class_of(kind)
    if wide is not None:
        _put(_KINDS, wide, plan)
    return plan


def _put(table: dict[Any, Plan], kind: Kind, plan: Plan) -> None:
    if len(table) >= MOST:
        table.clear()
    table[kind] = plan


def _class_of(kind: Kind) -> Kind | None:
    """The kind with lengths by their size alone; None where they do not fit each other."""
    sign, score, weighting, mask, *flags = kind
    (query, key, value), rest = sign[:3], sign[3:]  # type: ignore[index]
    if min(len(query), len(key)) < 2 or (value is not None and value[-2:-1] != key[-2:-1]):
        return None
    n, m = query[-2], key[-2]
    if type(mask) is tree.ArrayKind:
        shape = mask.shape
        if len(shape) < 2 or shape[-2] not in (1, n) or shape[-1] not in (1, m):
            return None
        mask = mask._replace(shape=(*shape[:-2], shape[-2] == 1, shape[-1] == 1))
    elif tree.has_arrays(mask):
        return None  # an array inside of a rule may be as long as the keys
    if any(tuple(x.shape[-2:]) == (n, 1) for x in tree.arrays_of(weighting)) and n != 1:
        return None  # and one inside of a weighting as the queries
    leads = query[:-2], key[:-2], None if value is None else value[:-2]
    widths = query[-1], key[-1], None if value is None else value[-1]
    return leads, widths, n.bit_length(), m.bit_length(), rest, score, weighting, mask, *flags


def _bound(call: Call, choice: Choice, kind: Kind) -> Callable[..., Any] | Bare:
    """The chosen engine as a function of the arguments of `attend`."""
    fw = call.fw
    learned, masked = tree.has_arrays(kind[1:3]), tree.has_arrays(kind[3])
    bare = type(kind[3]) is tree.ArrayKind
    plain = not (call.dropout or call.wants_lse) and (bare or not masked) and call.bias is None
    if plain and call.value is not None and not fw.equal_spans:
        direct: Callable[..., Any] | Bare | None = choice.direct(call)
        if direct is not None:
            return direct
    run = choice.bind(call)
    hollow = tree.map_arrays(fw, fw.outline, call)  # it must not keep the arrays
    run, fixed, lead = _compiled(hollow, run), dict(vars(hollow)), call.lead
    fixed["extreme"] = fixed["beyond"] = False
    if masked:
        fixed["rule"] = fixed["bias"] = None

    def attend(
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
            fields["bias"] = bias_of(fw, bias, query)
        if learned:
            fields["score"], fields["weighting"] = resolved(score, weighting, call.bias)
        if call.dropout:
            fields["seed"] = seed_of(fw, seed, query)
        with fw.quiet():
            found = run(call)
            return None if found is None else results(call, found)

    return attend


def _compiled(hollow: Call, run: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """`run` as one compiled function, in a framework that is slow step by step."""
    fw = hollow.fw
    quick = fw.compiled(lambda *leaves: run(tree.rebuild(fw, hollow, leaves)))
    if quick is None or tree.holds_others(fw, hollow.rule):
        return run

    def compiled(call: Call) -> Any:
        try:
            return quick(*tree.leaves(fw, call))
        except QkvError:  # it must look at numbers
            return run(call)

    return compiled
