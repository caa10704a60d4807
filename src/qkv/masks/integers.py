"""Integer arguments of masks: validation, and broadcasting to the positions of a block."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks import array_from_literal, get_framework, is_array
from qkv.util.types import Array, Block, Shape, Span

MAX_POSITION = 2**29
"""Larger numbers are clipped to this. Positions are smaller; three such numbers sum to < 2³¹."""


def validate_integer(owner: str, name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise DtypeError(f"masks.{owner}: {name} must be an integer, not {value!r}")
    if value < least:
        raise ArgumentError(f"masks.{owner}: {name} must be at least {least}, not {value}")
    return min(int(value), MAX_POSITION)


def validate_integers(what: str, values: Any) -> Any:
    try:
        values = values if is_array(values) else array_from_literal(values)
    except (TypeError, ValueError):
        reason = "the rows differ in length, or are not numbers"
        raise DtypeError(f"{what} must be integers: {reason}") from None
    fw = get_framework(values)
    if "int" not in fw.dtype_name(values) and 0 not in fw.static_shape(values):
        received = values if values.ndim == 0 else fw.dtype_name(values)
        raise DtypeError(f"{what} must be integers, not {received}")
    return values


def host_values(values: Any) -> np.ndarray[Any, Any] | None:
    """Return the values as a NumPy array; None if they are traced or on a device."""
    if is_array(values):
        return get_framework(values).concrete_value(values)
    try:
        return np.asarray(values)
    except ValueError:
        raise ShapeError("mask: the rows of the nested list differ in length") from None


def copied_to_host(values: Any) -> np.ndarray[Any, Any] | None:
    """Return the values as a NumPy array, copied from any device; None if they are traced."""
    if not is_array(values):
        return host_values(values)
    fw = get_framework(values)
    return None if fw.is_abstract(values) else fw.to_numpy(values)


def as_positions(values: Any, block: Block) -> Array:
    """Return positions as an array like the block's, clipped to ±MAX_POSITION."""
    fw, kind = get_framework(block.q), get_framework(block.q).dtype_name(block.q)
    if not is_array(values) or get_framework(values) is not fw:
        return fw.array_from_host(np.clip(values, -MAX_POSITION, MAX_POSITION), block.q, kind)
    values = fw.to_device_of(values, block.q)
    positions, xp = fw.astype(values, kind), fw.xp
    if fw.dtype_name(values) != "int64" or kind == "int64":
        return positions
    limit = positions * 0 + MAX_POSITION
    positions = xp.where(values > MAX_POSITION, limit, positions)
    return xp.where(values < -MAX_POSITION, -limit, positions)


def to_framework_integers(values: Any, like: Array, clips: bool = True) -> Array:
    """Return integers of another framework as int32 of the framework of `like`.

    With `clips` they are clipped to ±MAX_POSITION. Integers of the same framework stay as they are.
    """
    fw = get_framework(like)
    if is_array(values) and get_framework(values) is fw:
        return values
    if clips:
        values = np.clip(values, -MAX_POSITION, MAX_POSITION)
    return fw.array_from_host(values, like, "int32")


def check_row_shape(what: str, values: Any, lead: Shape, n: int, last: int | None) -> None:
    """Raise ShapeError unless values are (B,) or (B, n); with `last`, (n,) in place of (B,)."""
    shape = tuple(values.shape)
    batch = lead[:1]
    accepted = [(*batch, n), (n,) if last is not None else batch]
    if shape not in accepted and None not in (*lead, n, *shape):
        expected = " or ".join(dict.fromkeys(map(str, accepted)))
        raise ShapeError(f"{what} must have shape {expected}, not {shape}")


def per_row(values: Any, block: Block) -> Array:
    """Return numbers (B,) or (B, n) as (B, 1, …, r or 1, 1), which broadcasts to the scores.

    Without a batch axis, (n,) becomes (r, 1).
    """
    x = as_positions(values, block)
    if len(x.shape) == 2 or len(x.shape) > block.lead_axes:
        x = get_framework(x).slice_span(x, block.rows, -1)
    elif len(x.shape) == 1:
        x = x[:, None]
    # expand_dims because MXNet cannot index a scalar with [..., None].
    return get_framework(x).xp.expand_dims(_insert_lead_axes(x, block), axis=-1)


def per_position(values: Any, span: Span, block: Block) -> Array:
    """Return the span of ids (n,) or (B, n), in a shape that broadcasts. Ids are not clipped."""
    fw = get_framework(block.q)
    if not is_array(values) or get_framework(values) is not fw:
        values = fw.array_from_host(values, block.q, fw.dtype_name(block.q))
    x = fw.slice_span(fw.to_device_of(values, block.q), span, -1)
    return _insert_lead_axes(x, block) if len(x.shape) == 2 else x


def _insert_lead_axes(x: Array, block: Block) -> Array:
    """Return (B, r) as (B, 1, …, 1, r), because B is the first axis of the scores."""
    for _ in range(block.lead_axes - 1):
        x = x[:, None, ...]
    return x
