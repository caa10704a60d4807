"""Keras's masks as one of ours."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import Any

import keras
from keras import ops

from qkv import masks
from qkv.errors import DtypeError, ShapeError
from qkv.types import Array, Shape


def merged(
    full: Shape,
    *,
    query_mask: Any,
    value_mask: Any,
    key_mask: Any,
    attention_mask: Any,
    causal: bool,
    window: int | None = None,
) -> masks.Mask | None:
    """Keras's masks as one, for scores of shape `full`, (batch, …, n, m)."""
    rules: list[masks.Mask] = [masks.causal] if causal else []
    if window is not None:
        rules.append(masks.window(window - 1))
    batch, *between, n, m = full
    ones = (1,) * len(between)
    for name, mask, due, shape in (
        ("query_mask", query_mask, (batch, n), (*ones, -1, 1)),
        ("value_mask", value_mask, (batch, m), (*ones, 1, -1)),
        ("key_mask", key_mask, (batch, m), (*ones, 1, -1)),
    ):
        if mask is not None:
            mask = _boolean(name, mask, due, exact=True)
            rules.append(masks.array(ops.reshape(mask, (ops.shape(mask)[0], *shape))))
    if isinstance(attention_mask, str):
        rules.append(masks.array(attention_mask))
    elif attention_mask is not None:
        mask = _boolean("attention_mask", attention_mask, (batch, n, m), full)
        while 2 < len(mask.shape) < len(full):
            mask = ops.expand_dims(mask, -3)  # the heads
        rules.append(masks.array(mask))
    return reduce(and_, rules) if rules else None


def _boolean(name: str, mask: Any, *due: Shape, exact: bool = False) -> Array:
    """The mask as booleans, if its shape is due or broadcasts to what is."""
    mask = ops.convert_to_tensor(mask)
    dtype = keras.backend.standardize_dtype(mask.dtype)
    if "float" in dtype:
        raise DtypeError(
            f"{name} is an array of {dtype}: pass booleans, True where a query may attend"
        )
    shape = tuple(mask.shape)
    if not any(_fits(shape, full, exact) for full in due):
        told = " or ".join(str(x) for x in dict.fromkeys(due))
        raise ShapeError(f"{name} must have the shape {told}, not {shape}")
    return ops.cast(mask, "bool")


def _fits(shape: Shape, full: Shape, exact: bool) -> bool:
    if len(shape) > len(full) or (exact and len(shape) < len(full)):
        return False
    sizes = zip(shape[::-1], full[::-1], strict=False)
    return all(a == b or a is None or b is None or (a == 1 and not exact) for a, b in sizes)
