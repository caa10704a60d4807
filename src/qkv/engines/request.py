"""The arguments of a call, looked up, checked and put into one record."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any, Literal

import numpy as np

from qkv import arrays, masks, scores, weightings
from qkv.arrays import common, is_array, tree
from qkv.arrays.base import FLOATS, Framework
from qkv.arrays.tree import map_arrays
from qkv.engines import dropout
from qkv.engines.call import Call
from qkv.errors import (
    AddedMask,
    ArgumentError,
    CombinationError,
    DtypeError,
    ShapeError,
    fraction,
    warn,
)
from qkv.scores import Score, ScoreLike
from qkv.scores.base import differ
from qkv.types import Array, At, Shape
from qkv.weightings import Weighting, WeightingLike

TEXT = "text is encoded first, as Database(keys, values).ask(query) does"
"""The next step of who attends over words."""

HELD = "an array of the score or the weighting"

LOOKED_AT = 2**20
"""Numbers of a mask that are looked at."""


def request(
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
    at: At | None = None,
) -> Call:
    """The arguments as one checked record, with what is to be returned beside the output; `at`:
    where they lie in a larger call."""
    rule, bias = masks.resolve(mask)
    score, weighting = resolved(score, weighting, bias)
    if tolerance is not None and not (isinstance(tolerance, int | float) and tolerance >= 0):
        raise ArgumentError(f"tolerance must be None or a number of at least 0, not {tolerance!r}")
    p = fraction("dropout_p", dropout_p)
    given = {"query": query, "key": key} | ({} if value is None else {"value": value})
    like = next((x for x in given.values() if is_array(x)), None)
    given = {name: as_array(name, x, like) for name, x in given.items()}
    fw = one_framework(given, score=score, weighting=weighting, mask=rule)
    given = {name: fw.ambient(x) for name, x in given.items()}
    score, weighting = map_arrays(fw, fw.ambient, (score, weighting))
    score, weighting = map_arrays(fw, lambda x: fw.plain(x, HELD), (score, weighting))
    _check_parameters(fw, given["query"], score=score, weighting=weighting)
    for x in [] if rule is None else rule.arrays():
        _check_device(fw, given["query"], x, "mask is", "pass mask")
    if bias is not None:
        _told_apart(fw, bias)
    lead = _fitting(fw, given)
    query, key, value = (given.get(name) for name in ("query", "key", "value"))
    n, m = fw.shape(query)[-2], fw.shape(key)[-2]
    score.check(fw.shape(query), fw.shape(key))
    weighting.fits(lead, n)
    parts = query, key, value, score, weighting, bias_of(fw, bias, query)
    if fw.has_empty_axis((*lead, n, m)):
        parts = map_arrays(fw, fw.inert, parts)
    query, key, value, score, weighting, bias = parts
    drawn = seed_of(fw, seed, query) if p else None
    if lead != fw.shape(query)[:-2] or None in lead:  # what only a run will tell may be 1
        sizes = (*_lengths(fw, lead, given), *fw.sizes(query)[-2:])
        query = fw.xp.broadcast_to(query, sizes)
    call = Call(query, key, value, score, weighting, rule, bias, p, drawn, tolerance, at=at)
    if rule is not None:
        masks.seen(rule, at).check(lead, n, m)
    return _wanting(call, lse, weights) if lse is not False or weights is not False else call


def _wanting(call: Call, lse: Any, weights: Any) -> Call:
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


def resolved(
    score: ScoreLike, weighting: WeightingLike, bias: Array | None
) -> tuple[Score, Weighting]:
    """A score and a weighting from their names or themselves, if they go together."""
    weighting = weightings.resolve(weighting)
    return weightings.paired(scores.resolve(score), weighting, bias is not None), weighting


def bias_of(fw: Framework, bias: Array | None, query: Array) -> Array | None:
    """What a mask adds to the scores, in the precision that they are summed in."""
    wide = "float64" if fw.dtype(query) == "float64" else "float32"
    return None if bias is None else fw.astype(bias, wide)


def _told_apart(fw: Framework, bias: Array) -> None:
    """Warn of a mask of floats that was meant as one of booleans, where it can be looked at."""
    seen = bias if isinstance(bias, np.ndarray) else fw.lend(bias)
    if seen is None or not 0 < seen.size <= LOOKED_AT or not seen.min() == 0 < seen.max() == 1:
        return
    if not ((seen == 0) | (seen == 1)).all():
        return
    warn(
        "the mask's floats are 0 and 1, which are added to the scores and rule nothing out: if a 1 "
        "means that a query may look, pass booleans, mask != 0",
        AddedMask,
    )


def seed_of(fw: Framework, seed: Any, query: Array) -> Array | None:
    """The seed of a dropout; None where the framework's own generator serves as well."""
    return None if seed is None and fw.chance else dropout.seed_array(fw, seed, query)


def one_framework(given: dict[str, Array], **records: Any) -> Framework:
    """The framework of the arrays, unless a score or a mask holds an array of another."""
    for what, record in records.items():
        for x in _all_arrays(record):
            common(query=given["query"], **{what: x})
    return common(**given)


def _check_parameters(fw: Framework, query: Array, **records: Any) -> None:
    """Refuse arrays inside a score or a weighting that are on another device than the query, or of
    another precision. float32 beside 16-bit queries is accepted: the sums run in float32."""
    own = fw.dtype(query)
    accepted = (own, "float32") if own in ("float16", "bfloat16") else (own,)
    for what, record in records.items():
        for x in tree.leaves(fw, record):
            named = f"an array {tuple(x.shape)} of the {what} is"
            _check_device(fw, query, x, named, f"move the {what}'s arrays by ")
            learned = "float" in fw.dtype(x) or not scores.is_open(record)
            if learned and fw.dtype(x) not in accepted:
                raise DtypeError(f"query is {own} but {named} {fw.dtype(x)}: cast one of them")


def _check_device(fw: Framework, query: Array, x: Array, named: str, step: str) -> None:
    """Refuse an array that no operation with the query takes, because of its device."""
    if not fw.shares_device(x, query):
        raise ArgumentError(
            f"query is on {fw.device(query)} but {named} on {fw.device(x)}: {step}.to(query.device)"
        )


def _all_arrays(record: Any) -> list[Array]:
    if is_array(record):
        return [record]
    if isinstance(record, masks.Mask):
        return record.arrays()
    names = getattr(type(record), "__dataclass_fields__", ())
    return [x for name in names for x in _all_arrays(getattr(record, name))]


def _fitting(fw: Framework, given: dict[str, Array]) -> Shape:
    """The leading shape of query, key and value, whose shapes, dtypes and devices fit."""
    dtypes = {name: fw.dtype(x) for name, x in given.items()}
    for name, dtype in dtypes.items():
        if dtype not in FLOATS:
            to = "float()" if hasattr(given[name], "float") else "astype('float32')"
            step = TEXT if dtype.startswith(("object", "<U")) else f"so cast it, {name}.{to}"
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
        here, there = (fw.device(given[x]) for x in ("query", name))
        if here != there:
            raise ArgumentError(
                f"query is on {here} but {name} on {there}: pass {name}.to(query.device)"
            )
    shapes = {name: fw.shape(x) for name, x in given.items()}
    for name, shape in shapes.items():
        if len(shape) < 2:
            raise ShapeError(
                f"{name} must have at least two axes (…, rows, width), not shape {shape}; "
                f"one row is {name}[None, :], one column {name}[:, None]"
            )
    query, key, *value = shapes.values()
    if value and differ(key[-2], value[0][-2]):
        raise ShapeError(
            f"key and value must have one row each per pair, but key has {key[-2]} and value "
            f"{value[0][-2]}"
        )
    lead = query[:-2]
    for name, shape in shapes.items():
        lead = _join_leads(lead, shape[:-2], query, name, shape)
    return lead


def _lengths(fw: Framework, lead: Shape, given: dict[str, Array]) -> list[Any]:
    """The leading shape, with what only a run will tell from the first array that has not 1."""
    found: list[Any] = list(lead)
    for axis in (-1 - i for i, size in enumerate(lead[::-1]) if size is None):
        at = axis - 2
        having = [x for x in given.values() if len(x.shape) >= -at and x.shape[at] != 1]
        sizes = [fw.length(x, at) for x in having]
        found[axis] = reduce(lambda size, other: fw.xp.where(size == 1, other, size), sizes)
    return found


def as_array(name: str, x: Any, like: Array | None = None) -> Array:
    """x, where nested lists of numbers become floats like those beside them, or NumPy's."""
    if isinstance(x, list | tuple):
        try:
            host = np.asarray(x, dtype=float)
        except (TypeError, ValueError) as error:
            why = f"{error}; {TEXT}"
            if "inhomogeneous" in str(error):
                why = "its rows differ in length; fill them up, and rule that out by masks.lengths"
            raise DtypeError(f"{name} is no rectangle of numbers: {why}") from None
        if like is None:
            return host
        fw = arrays.of(like)
        return fw.constant(host, like, fw.dtype(like))
    if not arrays.is_array(x):
        step = f"; {TEXT}" if isinstance(x, str) else ""
        step = f": take its numbers, {name}.to_numpy()" if hasattr(x, "to_numpy") else step
        raise DtypeError(f"{name} must be an array or nested lists, not {type(x).__name__}{step}")
    return arrays.plain(x, name)


def _join_leads(lead: Shape, other: Shape, query: Shape, name: str, shape: Shape) -> Shape:
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
