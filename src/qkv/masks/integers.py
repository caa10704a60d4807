"""Whole numbers that a mask is given, laid beside the positions of a block."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks import array_from_literal, get_framework, is_array
from qkv.util.types import Array, Block, Shape, Span

MAX_POSITION = 2**29
"""No position lies beyond it, and the sum of three such is still a number of 32 bits."""


def validate_integer(owner: str, name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise DtypeError(f"masks.{owner}: {name} must be a whole number, not {value!r}")
    if value < least:
        raise ArgumentError(f"masks.{owner}: {name} must be at least {least}, not {value}")
    return min(int(value), MAX_POSITION)


def validate_integers(what: str, values: Any) -> Any:
    try:
        values = values if is_array(values) else array_from_literal(values)
    except (TypeError, ValueError):
        told = "rows that differ in length, or no numbers"
        raise DtypeError(f"{what} must be whole numbers, not {told}") from None
    if "int" not in get_framework(values).dtype_name(values) and 0 not in get_framework(
        values
    ).static_shape(values):
        told = values if values.ndim == 0 else get_framework(values).dtype_name(values)
        raise DtypeError(f"{what} must be whole numbers, not {told}")
    return values


def host_values(values: Any) -> np.ndarray[Any, Any] | None:
    """The numbers on the host, where they are known and at hand."""
    if is_array(values):
        return get_framework(values).concrete_value(values)
    try:
        return np.asarray(values)
    except ValueError:
        raise ShapeError("rows of a mask must be of equal length: these differ") from None


def copied_to_host(values: Any) -> np.ndarray[Any, Any] | None:
    """The numbers on the host, copied from any device; None where they are traced."""
    if not is_array(values):
        return host_values(values)
    return (
        None
        if get_framework(values).is_abstract(values)
        else get_framework(values).to_numpy(values)
    )


def as_positions(values: Any, block: Block) -> Array:
    """Positions as an array of the call's own framework; what lies beyond all is the farthest."""
    fw, kind = get_framework(block.q), get_framework(block.q).dtype_name(block.q)
    if not is_array(values) or get_framework(values) is not fw:
        return fw.array_from_host(np.clip(values, -MAX_POSITION, MAX_POSITION), block.q, kind)
    values = fw.to_device_of(values, block.q)
    near, xp = fw.astype(values, kind), fw.xp
    if fw.dtype_name(values) != "int64" or kind == "int64":
        return near
    far = near * 0 + MAX_POSITION
    near = xp.where(values > MAX_POSITION, far, near)
    return xp.where(values < -MAX_POSITION, -far, near)


def check_row_shape(what: str, values: Any, lead: Shape, n: int, last: int | None) -> None:
    shape = tuple(values.shape)
    batch = lead[:1]
    good = [(*batch, n), (n,) if last is not None else batch]
    if shape not in good and None not in (*lead, n, *shape):
        told = " or ".join(dict.fromkeys(map(str, good)))
        raise ShapeError(f"{what} must have shape {told}, not {shape}")


def per_row(values: Any, block: Block) -> Array:
    """(B,) or (B, n) numbers as (B, 1, …, r or 1, 1), beside the queries of the block; (n,) as
    (r, 1) where there is no batch."""
    x = as_positions(values, block)
    if len(x.shape) == 2 or len(x.shape) > block.lead_axes:
        x = get_framework(x).slice_span(x, block.rows, -1)
    elif len(x.shape) == 1:
        x = x[:, None]
    return get_framework(x).xp.expand_dims(
        _insert_lead_axes(x, block), axis=-1
    )  # no [..., None] of MXNet's ()


def per_position(values: Any, span: Span, block: Block) -> Array:
    """Ids of positions, (n,) or (B, n), which may need all their bits."""
    fw = get_framework(block.q)
    if not is_array(values) or get_framework(values) is not fw:
        values = fw.array_from_host(values, block.q, fw.dtype_name(block.q))
    x = fw.slice_span(fw.to_device_of(values, block.q), span, -1)
    return _insert_lead_axes(x, block) if len(x.shape) == 2 else x


def _insert_lead_axes(x: Array, block: Block) -> Array:
    """(B, r) as (B, 1, …, 1, r): B stays the first axis of the scores."""
    for _ in range(block.lead_axes - 1):
        x = x[:, None, ...]
    return x
