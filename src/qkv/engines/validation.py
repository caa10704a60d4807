"""Validation of `attend`'s arguments: `build_call` returns one `Call`."""

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

ENCODE_TEXT_HINT = "encode text first, or use Database(keys, values).ask(query)"

PARAMETER_ARRAY_LABEL = "an array of the score or the weighting"

MAX_MASK_NUMBERS_CHECKED = 2**20
"""The most numbers in a float mask for which we check whether booleans were meant."""


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
    """Validate the arguments and return them as one `Call`.

    `lse` and `weights` are `return_lse` and `return_weights` of `attend`. `at` is the position of a
    shard in a larger call.
    """
    rule, bias = masks.resolve(mask)
    score, weighting = resolve_score_and_weighting(score, weighting, bias)
    if tolerance is not None and not (isinstance(tolerance, int | float) and tolerance >= 0):
        raise ArgumentError(f"tolerance must be None or a number of at least 0, not {tolerance!r}")
    p = validate_fraction("dropout_p", dropout_p)
    arrays = {"query": query, "key": key} | ({} if value is None else {"value": value})
    like = next((x for x in arrays.values() if is_array(x)), None)
    arrays = {name: as_array(name, x, like) for name, x in arrays.items()}
    fw = require_one_framework(arrays, score=score, weighting=weighting, mask=rule)
    arrays = {name: fw.apply_autocast(x) for name, x in arrays.items()}
    score, weighting = map_arrays(fw, fw.apply_autocast, (score, weighting))
    score, weighting = map_arrays(
        fw, lambda x: fw.as_plain_array(x, PARAMETER_ARRAY_LABEL), (score, weighting)
    )
    _check_parameters(fw, arrays["query"], score=score, weighting=weighting)
    for x in [] if rule is None else rule.list_arrays():
        _check_device(fw, arrays["query"], x, "mask is", "pass mask")
    if bias is not None:
        _warn_if_boolean_mask(fw, bias)
    lead = _check_arrays(fw, arrays)
    query, key, value = (arrays.get(name) for name in ("query", "key", "value"))
    n, m = fw.static_shape(query)[-2], fw.static_shape(key)[-2]
    score.check_shapes(fw.static_shape(query), fw.static_shape(key))
    weighting.check_shapes(lead, n)
    parts = query, key, value, score, weighting, cast_bias(fw, bias, query)
    if fw.has_empty_axis((*lead, n, m)):
        parts = map_arrays(fw, fw.with_zero_gradient, parts)
    query, key, value, score, weighting, bias = parts
    resolved_seed = resolve_seed(fw, seed, query) if p else None
    if lead != fw.static_shape(query)[:-2] or None in lead:  # an unknown length may turn out 1
        sizes = (*_resolve_lengths(fw, lead, arrays), *fw.dynamic_shape(query)[-2:])
        query = fw.xp.broadcast_to(query, sizes)
    call = Call(query, key, value, score, weighting, rule, bias, p, resolved_seed, tolerance, at=at)
    if rule is not None:
        masks.localize_mask(rule, at).check_shapes(lead, n, m)
    return (
        _with_requested_outputs(call, lse, weights)
        if lse is not False or weights is not False
        else call
    )


def _with_requested_outputs(call: Call, lse: Any, weights: Any) -> Call:
    """Return the call with the requested log-sum-exp and weights."""
    if not isinstance(lse, bool):
        raise DtypeError(f"return_lse must be True or False, not {lse!r}")
    if not isinstance(weights, bool) and not (isinstance(weights, str) and weights == "mean"):
        raise DtypeError(f'return_weights must be True, False or "mean", not {weights!r}')
    if lse and not call.weighting.has_lse:
        raise CombinationError(
            f"return_lse is not supported with weighting {type(call.weighting).__name__}: only "
            "softmax and TopK have a log-sum-exp"
        )
    if weights == "mean" and not call.lead:
        raise CombinationError(
            'return_weights="mean" averages over the heads (axis −3), but query has no such axis'
        )
    requested = "mean" if weights == "mean" else "heads" if weights else None
    return replace(call, wants_lse=lse, wants_weights=requested)


def resolve_score_and_weighting(
    score: ScoreLike, weighting: WeightingLike, bias: Array | None
) -> tuple[Score, Weighting]:
    """Return the score and weighting objects, after checking that they fit each other."""
    weighting = weightings.resolve(weighting)
    return weightings.pair_score_with_weighting(
        scores.resolve(score), weighting, bias is not None
    ), weighting


def cast_bias(fw: Framework, bias: Array | None, query: Array) -> Array | None:
    """Return a mask's bias in the dtype in which scores are summed."""
    dtype = "float64" if fw.dtype_name(query) == "float64" else "float32"
    return None if bias is None else fw.astype(bias, dtype)


def _warn_if_boolean_mask(fw: Framework, bias: Array) -> None:
    """Warn if a float mask holds only 0 and 1, and was probably meant as booleans."""
    view = bias if isinstance(bias, np.ndarray) else fw.as_numpy_view(bias)
    if (
        view is None
        or not 0 < view.size <= MAX_MASK_NUMBERS_CHECKED
        or not view.min() == 0 < view.max() == 1
    ):
        return
    if not ((view == 0) | (view == 1)).all():
        return
    warn_at_caller(
        "the float mask holds only 0 and 1, which are added to the scores and exclude no pair: if "
        "1 means that a query may attend, pass booleans, mask != 0",
        AddedMaskWarning,
    )


def resolve_seed(fw: Framework, seed: Any, query: Array) -> Array | None:
    """Return the dropout seed as an array; None: the framework's generator draws the dropout."""
    return None if seed is None and fw.has_random_generator else dropout.seed_array(fw, seed, query)


def require_one_framework(arrays: dict[str, Array], **records: Any) -> Framework:
    """Return the framework of all arrays, including those of score, weighting and mask."""
    for name, record in records.items():
        for x in _collect_arrays(record):
            common_framework(query=arrays["query"], **{name: x})
    return common_framework(**arrays)


def _check_parameters(fw: Framework, query: Array, **records: Any) -> None:
    """Check device and dtype of the arrays inside score and weighting.

    float32 parameters with 16-bit queries are accepted, because the sums run in float32.
    """
    query_dtype = fw.dtype_name(query)
    accepted: tuple[str, ...] = (query_dtype,)
    if query_dtype in ("float16", "bfloat16"):
        accepted = (query_dtype, "float32")
    for what, record in records.items():
        for x in tree.array_leaves(fw, record):
            named = f"an array {tuple(x.shape)} of the {what} is"
            _check_device(fw, query, x, named, f"move the {what}'s arrays by ")
            is_parameter = "float" in fw.dtype_name(x) or not scores.has_user_code(record)
            if is_parameter and fw.dtype_name(x) not in accepted:
                raise DtypeError(
                    f"query is {query_dtype} but {named} {fw.dtype_name(x)}: cast one of them"
                )


def _check_device(fw: Framework, query: Array, x: Array, named: str, step: str) -> None:
    """Raise ArgumentError if an array is on another device than the query."""
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


def _check_arrays(fw: Framework, arrays: dict[str, Array]) -> Shape:
    """Check shapes, dtypes and devices of query, key and value; return their leading shape."""
    dtypes = {name: fw.dtype_name(x) for name, x in arrays.items()}
    for name, dtype in dtypes.items():
        if dtype not in FLOAT_DTYPES:
            to = "float()" if hasattr(arrays[name], "float") else "astype('float32')"
            is_text = dtype.startswith(("object", "<U"))
            step = ENCODE_TEXT_HINT if is_text else f"cast it, {name}.{to}"
            raise DtypeError(
                f"{name} is an array of {dtype}; expected floats of 16, 32 or 64 bits: {step}"
            )
        if dtype != dtypes["query"]:
            to = "to" if hasattr(arrays[name], "to") else "astype"
            raise DtypeError(
                f"query is {dtypes['query']} but {name} is {dtype}: cast one of them, "
                f"{name}.{to}(query.dtype)"
            )
        query_device, device = (fw.device_of(arrays[x]) for x in ("query", name))
        if query_device != device:
            raise ArgumentError(
                f"query is on {query_device} but {name} on {device}: pass {name}.to(query.device)"
            )
    shapes = {name: fw.static_shape(x) for name, x in arrays.items()}
    for name, shape in shapes.items():
        if len(shape) < 2:
            raise ShapeError(
                f"{name} must have at least two axes (…, rows, width), not shape {shape}: pass "
                f"{name}[None, :] for one row, {name}[:, None] for one column"
            )
    query, key, *value = shapes.values()
    if value and sizes_differ(key[-2], value[0][-2]):
        raise ShapeError(
            f"key and value must have the same number of rows, but key has {key[-2]} and value "
            f"{value[0][-2]}"
        )
    lead = query[:-2]
    for name, shape in shapes.items():
        lead = _broadcast_leads(lead, shape[:-2], query, name, shape)
    return lead


def _resolve_lengths(fw: Framework, lead: Shape, arrays: dict[str, Array]) -> list[Any]:
    """Return the leading shape, with a scalar of the graph for each unknown length.

    The scalar is the first length, of query, key and value, that is not 1 when the graph runs.
    """
    lengths: list[Any] = list(lead)
    for axis in (-1 - i for i, size in enumerate(lead[::-1]) if size is None):
        at = axis - 2
        candidates = [x for x in arrays.values() if len(x.shape) >= -at and x.shape[at] != 1]
        sizes = [fw.axis_length(x, at) for x in candidates]
        lengths[axis] = reduce(lambda size, other: fw.xp.where(size == 1, other, size), sizes)
    return lengths


def as_array(name: str, x: Any, like: Array | None = None) -> Array:
    """Return an array unchanged, and nested lists as an array of floats.

    The lists get the framework, dtype and device of `like`; without `like`, NumPy and float64.
    """
    if isinstance(x, list | tuple):
        try:
            host = np.asarray(x, dtype=float)
        except (TypeError, ValueError) as error:
            reason = f"{error}; {ENCODE_TEXT_HINT}"
            if "inhomogeneous" in str(error):
                reason = "its rows differ in length: pad them and pass mask=masks.lengths(…)"
            raise DtypeError(f"{name} is not a rectangular array of numbers: {reason}") from None
        if like is None:
            return host
        fw = frameworks.get_framework(like)
        return fw.array_from_host(host, like, fw.dtype_name(like))
    if not frameworks.is_array(x):
        step = f"; {ENCODE_TEXT_HINT}" if isinstance(x, str) else ""
        step = f": pass {name}.to_numpy()" if hasattr(x, "to_numpy") else step
        raise DtypeError(f"{name} must be an array or nested lists, not {type(x).__name__}{step}")
    return frameworks.as_plain_array(x, name)


def _broadcast_leads(lead: Shape, other: Shape, query: Shape, name: str, shape: Shape) -> Shape:
    """Return the common leading shape. Its last axis is the heads; `other` may have fewer."""
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
                f"query {query} and {name} {shape} do not broadcast: leading axes must be equal "
                f"or 1" + (f", or the query's heads a multiple of the {name}'s" if heads else "")
            )
    return tuple(joined)
