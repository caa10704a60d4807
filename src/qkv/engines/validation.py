"""The arguments of a call, looked up, checked and put into one record."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any, Literal

import numpy as np

from qkv import frameworks, masks, scores, weightings
from qkv.engines import dropout
from qkv.engines.call import Call
from qkv.errors import (
    AddedMaskWarning,
    ArgumentError,
    CombinationError,
    DtypeError,
    ShapeError,
    validate_fraction,
    warn_at_caller,
)
from qkv.frameworks import common_framework, is_array, tree
from qkv.frameworks.base import FLOAT_DTYPES, Framework
from qkv.frameworks.tree import map_arrays
from qkv.scores import Score, ScoreLike
from qkv.scores.base import sizes_differ
from qkv.util.types import Array, Shape, ShardPosition
from qkv.weightings import Weighting, WeightingLike

ENCODE_TEXT_HINT = "text is encoded first, as Database(keys, values).ask(query) does"
"""The next step of who attends over words."""

PARAMETER_ARRAY_LABEL = "an array of the score or the weighting"

MAX_MASK_NUMBERS_CHECKED = 2**20
"""Numbers of a mask that are looked at."""


def build_call(
    query: Array,
    key: Array,
    value: Array | None,
    score: ScoreLike = "scaled_dot",
    weighting: WeightingLike = "softmax",
    mask: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    tolerance: float | None = None,
    *,
    lse: bool = False,
    weights: bool | Literal["mean"] = False,
    at: ShardPosition | None = None,
) -> Call:
    """The arguments as one checked record, with what is to be returned beside the output; `at`:
    where they lie in a larger call."""
    rule, bias = masks.resolve(mask)
    score, weighting = resolve_score_and_weighting(score, weighting, bias)
    if tolerance is not None and not (isinstance(tolerance, int | float) and tolerance >= 0):
        raise ArgumentError(f"tolerance must be None or a number of at least 0, not {tolerance!r}")
    p = validate_fraction("dropout_p", dropout_p)
    given = {"query": query, "key": key} | ({} if value is None else {"value": value})
    like = next((x for x in given.values() if is_array(x)), None)
    given = {name: as_array(name, x, like) for name, x in given.items()}
    fw = require_one_framework(given, score=score, weighting=weighting, mask=rule)
    given = {name: fw.apply_autocast(x) for name, x in given.items()}
    score, weighting = map_arrays(fw, fw.apply_autocast, (score, weighting))
    score, weighting = map_arrays(
        fw, lambda x: fw.as_plain_array(x, PARAMETER_ARRAY_LABEL), (score, weighting)
    )
    _check_parameters(fw, given["query"], score=score, weighting=weighting)
    for x in [] if rule is None else rule.list_arrays():
        _check_device(fw, given["query"], x, "mask is", "pass mask")
    if bias is not None:
        _warn_if_boolean_mask(fw, bias)
    lead = _check_arrays(fw, given)
    query, key, value = (given.get(name) for name in ("query", "key", "value"))
    n, m = fw.static_shape(query)[-2], fw.static_shape(key)[-2]
    score.check_shapes(fw.static_shape(query), fw.static_shape(key))
    weighting.check_shapes(lead, n)
    parts = query, key, value, score, weighting, cast_bias(fw, bias, query)
    if fw.has_empty_axis((*lead, n, m)):
        parts = map_arrays(fw, fw.with_zero_gradient, parts)
    query, key, value, score, weighting, bias = parts
    drawn = resolve_seed(fw, seed, query) if p else None
    if lead != fw.static_shape(query)[:-2] or None in lead:  # what only a run will tell may be 1
        sizes = (*_resolve_lengths(fw, lead, given), *fw.dynamic_shape(query)[-2:])
        query = fw.xp.broadcast_to(query, sizes)
    call = Call(query, key, value, score, weighting, rule, bias, p, drawn, tolerance, at=at)
    if rule is not None:
        masks.localize_mask(rule, at).check_shapes(lead, n, m)
    return (
        _with_requested_outputs(call, lse, weights)
        if lse is not False or weights is not False
        else call
    )


def _with_requested_outputs(call: Call, lse: Any, weights: Any) -> Call:
    """The call with what is to be returned beside the output."""
    if not isinstance(lse, bool):
        raise DtypeError(f"return_lse must be True or False, not {lse!r}")
    if not isinstance(weights, bool) and not (isinstance(weights, str) and weights == "mean"):
        raise DtypeError(f'return_weights must be True, False or "mean", not {weights!r}')
    if lse and not call.weighting.has_lse:
        raise CombinationError(
            "return_lse asks for the log-sum-exp of a softmax, which "
            f"{type(call.weighting).__name__} has not: use weighting='softmax' or TopK"
        )
    if weights == "mean" and not call.lead:
        raise CombinationError('return_weights="mean" is over the heads, axis −3: there are none')
    wanted = "mean" if weights == "mean" else "heads" if weights else None
    return replace(call, wants_lse=lse, wants_weights=wanted)


def resolve_score_and_weighting(
    score: ScoreLike, weighting: WeightingLike, bias: Array | None
) -> tuple[Score, Weighting]:
    """A score and a weighting from their names or themselves, if they go together."""
    weighting = weightings.resolve(weighting)
    return weightings.pair_score_with_weighting(
        scores.resolve(score), weighting, bias is not None
    ), weighting


def cast_bias(fw: Framework, bias: Array | None, query: Array) -> Array | None:
    """What a mask adds to the scores, in the precision that they are summed in."""
    wide = "float64" if fw.dtype_name(query) == "float64" else "float32"
    return None if bias is None else fw.astype(bias, wide)


def _warn_if_boolean_mask(fw: Framework, bias: Array) -> None:
    """Warn of a mask of floats that was meant as one of booleans, where it can be looked at."""
    seen = bias if isinstance(bias, np.ndarray) else fw.as_numpy_view(bias)
    if (
        seen is None
        or not 0 < seen.size <= MAX_MASK_NUMBERS_CHECKED
        or not seen.min() == 0 < seen.max() == 1
    ):
        return
    if not ((seen == 0) | (seen == 1)).all():
        return
    warn_at_caller(
        "the mask's floats are 0 and 1, which are added to the scores and rule nothing out: if a 1 "
        "means that a query may look, pass booleans, mask != 0",
        AddedMaskWarning,
    )


def resolve_seed(fw: Framework, seed: Any, query: Array) -> Array | None:
    """The seed of a dropout; None where the framework's own generator serves as well."""
    return None if seed is None and fw.has_random_generator else dropout.seed_array(fw, seed, query)


def require_one_framework(given: dict[str, Array], **records: Any) -> Framework:
    """The framework of the arrays, unless a score or a mask holds an array of another."""
    for what, record in records.items():
        for x in _collect_arrays(record):
            common_framework(query=given["query"], **{what: x})
    return common_framework(**given)


def _check_parameters(fw: Framework, query: Array, **records: Any) -> None:
    """Refuse arrays inside a score or a weighting that are on another device than the query, or of
    another precision. float32 beside 16-bit queries is accepted: the sums run in float32."""
    own = fw.dtype_name(query)
    accepted = (own, "float32") if own in ("float16", "bfloat16") else (own,)
    for what, record in records.items():
        for x in tree.array_leaves(fw, record):
            named = f"an array {tuple(x.shape)} of the {what} is"
            _check_device(fw, query, x, named, f"move the {what}'s arrays by ")
            learned = "float" in fw.dtype_name(x) or not scores.has_user_code(record)
            if learned and fw.dtype_name(x) not in accepted:
                raise DtypeError(f"query is {own} but {named} {fw.dtype_name(x)}: cast one of them")


def _check_device(fw: Framework, query: Array, x: Array, named: str, step: str) -> None:
    """Refuse an array that no operation with the query takes, because of its device."""
    if not fw.shares_device(x, query):
        raise ArgumentError(
            f"query is on {fw.device_of(query)} but {named} on {fw.device_of(x)}: "
            f"{step}.to(query.device)"
        )


def _collect_arrays(record: Any) -> list[Array]:
    if is_array(record):
        return [record]
    if isinstance(record, masks.Mask):
        return record.list_arrays()
    names = getattr(type(record), "__dataclass_fields__", ())
    return [x for name in names for x in _collect_arrays(getattr(record, name))]


def _check_arrays(fw: Framework, given: dict[str, Array]) -> Shape:
    """The leading shape of query, key and value, whose shapes, dtypes and devices fit."""
    dtypes = {name: fw.dtype_name(x) for name, x in given.items()}
    for name, dtype in dtypes.items():
        if dtype not in FLOAT_DTYPES:
            to = "float()" if hasattr(given[name], "float") else "astype('float32')"
            step = (
                ENCODE_TEXT_HINT
                if dtype.startswith(("object", "<U"))
                else f"so cast it, {name}.{to}"
            )
            raise DtypeError(
                f"{name} is an array of {dtype}: attention needs floats of 16, 32 or 64 bits, "
                + step
            )
        if dtype != dtypes["query"]:
            to = "to" if hasattr(given[name], "to") else "astype"
            raise DtypeError(
                f"query is {dtypes['query']} but {name} is {dtype}: cast one of them, "
                f"{name}.{to}(query.dtype)"
            )
        here, there = (fw.device_of(given[x]) for x in ("query", name))
        if here != there:
            raise ArgumentError(
                f"query is on {here} but {name} on {there}: pass {name}.to(query.device)"
            )
    shapes = {name: fw.static_shape(x) for name, x in given.items()}
    for name, shape in shapes.items():
        if len(shape) < 2:
            raise ShapeError(
                f"{name} must have at least two axes (…, rows, width), not shape {shape}; "
                f"one row is {name}[None, :], one column {name}[:, None]"
            )
    query, key, *value = shapes.values()
    if value and sizes_differ(key[-2], value[0][-2]):
        raise ShapeError(
            f"key and value must have one row each per pair, but key has {key[-2]} and value "
            f"{value[0][-2]}"
        )
    lead = query[:-2]
    for name, shape in shapes.items():
        lead = _broadcast_leads(lead, shape[:-2], query, name, shape)
    return lead


def _resolve_lengths(fw: Framework, lead: Shape, given: dict[str, Array]) -> list[Any]:
    """The leading shape, with what only a run will tell from the first array that has not 1."""
    found: list[Any] = list(lead)
    for axis in (-1 - i for i, size in enumerate(lead[::-1]) if size is None):
        at = axis - 2
        having = [x for x in given.values() if len(x.shape) >= -at and x.shape[at] != 1]
        sizes = [fw.axis_length(x, at) for x in having]
        found[axis] = reduce(lambda size, other: fw.xp.where(size == 1, other, size), sizes)
    return found


def as_array(name: str, x: Any, like: Array | None = None) -> Array:
    """x, where nested lists of numbers become floats like those beside them, or NumPy's."""
    if isinstance(x, list | tuple):
        try:
            host = np.asarray(x, dtype=float)
        except (TypeError, ValueError) as error:
            why = f"{error}; {ENCODE_TEXT_HINT}"
            if "inhomogeneous" in str(error):
                why = "its rows differ in length; fill them up, and rule that out by masks.lengths"
            raise DtypeError(f"{name} is no rectangle of numbers: {why}") from None
        if like is None:
            return host
        fw = frameworks.get_framework(like)
        return fw.array_from_host(host, like, fw.dtype_name(like))
    if not frameworks.is_array(x):
        step = f"; {ENCODE_TEXT_HINT}" if isinstance(x, str) else ""
        step = f": take its numbers, {name}.to_numpy()" if hasattr(x, "to_numpy") else step
        raise DtypeError(f"{name} must be an array or nested lists, not {type(x).__name__}{step}")
    return frameworks.as_plain_array(x, name)


def _broadcast_leads(lead: Shape, other: Shape, query: Shape, name: str, shape: Shape) -> Shape:
    """The leading shape of both; the last axis, the heads, may be shared."""
    size = max(len(lead), len(other))
    a, b = ((1,) * (size - len(x)) + tuple(x) for x in (lead, other))
    joined = []
    for axis, (x, y) in enumerate(zip(a, b, strict=True)):
        heads = axis == size - 1
        if x == y or y == 1:
            joined.append(x)
        elif x == 1:
            joined.append(y)
        elif x is None or y is None:
            joined.append(y if x is None and not heads else x)
        elif heads and y and x % y == 0:
            joined.append(x)
        else:
            raise ShapeError(
                f"query {query} and {name} {shape} do not go together: leading axes must be equal "
                f"or 1" + (", or the query's heads a multiple of the other's" if heads else "")
            )
    return tuple(joined)
