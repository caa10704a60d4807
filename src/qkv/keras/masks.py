"""Keras's masks as one of ours."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import Any

import keras
from keras import ops

from qkv import masks
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks import get_framework
from qkv.keras.axes import Axes
from qkv.util.types import Array, Shape


def merge_masks(
    query: Array,
    value: Array,
    heads: int | None,
    axes: Axes,
    *,
    query_mask: Any = None,
    value_mask: Any = None,
    key_mask: Any = None,
    attention_mask: Any = None,
    causal: bool = False,
    window: int | None = None,
) -> masks.Mask | None:
    """Keras's masks as one, for scores of query (batch, …, d) and value; `heads` None: no axis."""
    rules: list[masks.Mask] = [masks.causal] if causal else []
    if window is not None:
        rules.append(masks.window(window - 1))
    if rules and len(axes.attended) > 1:
        raise ArgumentError(
            "use_causal_mask and sliding_window go by the order of one axis, and "
            f"{len(axes.attended)} are attended over: pass an attention_mask"
        )
    for name, mask, like in (
        ("query_mask", query_mask, query),
        ("value_mask", value_mask, value),
        ("key_mask", key_mask, value),
    ):
        if mask is not None:
            lead, rows = axes.split_shape(tuple(like.shape))
            due = [tuple(like.shape[:-1]), *([(lead[0], *rows)] if len(rows) == 1 else [])]
            mask = _as_boolean(name, mask, *due, exact=True)
            rules.append(masks.array(axes.expand_row_mask(mask, name != "query_mask", heads)))
    if isinstance(attention_mask, str | masks.Mask):
        rules.append(masks.array(attention_mask))
    elif attention_mask is not None:
        full = axes.scores_shape(tuple(query.shape), tuple(value.shape), heads)
        cut = len(full) - 2 * len(axes.attended)
        due = [(*full[:count], *full[cut:]) for count in range(1, cut + 1)]
        mask = _as_boolean("attention_mask", attention_mask, *due)
        now = axes.scores_shape(ops.shape(query), ops.shape(value), heads)
        rules.append(masks.array(axes.expand_pair_mask(mask, now)))
    return reduce(and_, rules) if rules else None


def _as_boolean(name: str, mask: Any, *due: Shape, exact: bool = False) -> Array:
    """The mask as booleans, if its shape is due or broadcasts to what is.

    Ones and zeros may be floats, as in Keras; numbers to be added, which are negative where nothing
    is to be seen, are refused where they can be looked at.
    """
    mask = ops.convert_to_tensor(mask)
    dtype = keras.backend.standardize_dtype(mask.dtype)
    known = get_framework(mask).concrete_value(mask) if "float" in dtype else None
    if known is not None and (known < 0).any():
        raise DtypeError(
            f"{name} is an array of {dtype} with negative numbers, as if to be added: pass "
            "booleans, or ones and zeros, True where a query may attend"
        )
    shape = tuple(mask.shape)
    if not any(_shape_fits(shape, full, exact) for full in due):
        told = " or ".join(str(x) for x in dict.fromkeys(due))
        raise ShapeError(f"{name} must have the shape {told}, not {shape}")
    return ops.cast(mask, "bool")


def _shape_fits(shape: Shape, full: Shape, exact: bool) -> bool:
    if len(shape) > len(full) or (exact and len(shape) < len(full)):
        return False
    sizes = zip(shape[::-1], full[::-1], strict=False)
    return all(a == b or a is None or b is None or (a == 1 and not exact) for a, b in sizes)
