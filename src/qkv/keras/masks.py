"""Conversion of Keras's masks to one mask of `qkv.masks`."""

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
    """Combine Keras's masks into one, for the scores of query (batch, …, d) with value.

    `heads` is the number of heads in the scores, or None if they have no axis of heads.
    """
    rules: list[masks.Mask] = [masks.causal] if causal else []
    if window is not None:
        rules.append(masks.window(window - 1))
    if rules and len(axes.attended) > 1:
        raise ArgumentError(
            "use_causal_mask and sliding_window need one attention axis, not "
            f"{len(axes.attended)}: pass an attention_mask"
        )
    for name, mask, like in (
        ("query_mask", query_mask, query),
        ("value_mask", value_mask, value),
        ("key_mask", key_mask, value),
    ):
        if mask is not None:
            mask = row_mask(name, mask, like, axes)
            rules.append(masks.array(axes.expand_row_mask(mask, name != "query_mask", heads)))
    if isinstance(attention_mask, str | masks.Mask):
        rules.append(masks.array(attention_mask))
    elif attention_mask is not None:
        full = axes.scores_shape(tuple(query.shape), tuple(value.shape), heads)
        cut = len(full) - 2 * len(axes.attended)
        shapes = [(*full[:count], *full[cut:]) for count in range(1, cut + 1)]
        mask = _as_boolean("attention_mask", attention_mask, *shapes)
        now = axes.scores_shape(ops.shape(query), ops.shape(value), heads)
        rules.append(masks.array(axes.expand_pair_mask(mask, now)))
    return reduce(and_, rules) if rules else None


def row_mask(name: str, mask: Any, like: Array, axes: Axes) -> Array:
    """Return the mask of the rows of `like` as booleans (batch, …) or (batch, rows)."""
    lead, rows = axes.split_shape(tuple(like.shape))
    shapes = [tuple(like.shape[:-1]), *([(lead[0], *rows)] if len(rows) == 1 else [])]
    return _as_boolean(name, mask, *shapes, exact=True)


def _as_boolean(name: str, mask: Any, *shapes: Shape, exact: bool = False) -> Array:
    """Return the mask as booleans; its shape must equal, or broadcast to, one of `shapes`.

    Ones and zeros may be floats, as in Keras. A negative number means that the mask is to be added
    to the scores: that raises an error, unless the array is traced and has no known values.
    """
    mask = ops.convert_to_tensor(mask)
    dtype = keras.backend.standardize_dtype(mask.dtype)
    known = get_framework(mask).concrete_value(mask) if "float" in dtype else None
    if known is not None and (known < 0).any():
        raise DtypeError(
            f"{name} is an additive mask, {dtype} with negative numbers: pass booleans, or ones "
            "and zeros, True where a query may attend"
        )
    shape = tuple(mask.shape)
    if not any(_shape_fits(shape, full, exact) for full in shapes):
        expected = " or ".join(str(x) for x in dict.fromkeys(shapes))
        raise ShapeError(f"{name} must have the shape {expected}, not {shape}")
    return ops.cast(mask, "bool")


def _shape_fits(shape: Shape, full: Shape, exact: bool) -> bool:
    if len(shape) > len(full) or (exact and len(shape) < len(full)):
        return False
    sizes = zip(shape[::-1], full[::-1], strict=False)
    return all(a == b or a is None or b is None or (a == 1 and not exact) for a, b in sizes)
