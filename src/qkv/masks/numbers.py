"""Whole numbers that a mask is given, laid beside the positions of a block."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.arrays import is_array, of, written
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.types import Array, Block, Shape, Span

FARTHEST = 2**29
"""No position lies beyond it, and the sum of three such is still a number of 32 bits."""


def whole_number(owner: str, name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise DtypeError(f"masks.{owner}: {name} must be a whole number, not {value!r}")
    if value < least:
        raise ArgumentError(f"masks.{owner}: {name} must be at least {least}, not {value}")
    return min(int(value), FARTHEST)


def whole_numbers(what: str, values: Any) -> Any:
    try:
        values = values if is_array(values) else written(values)
    except (TypeError, ValueError):
        told = "rows that differ in length, or no numbers"
        raise DtypeError(f"{what} must be whole numbers, not {told}") from None
    if "int" not in of(values).dtype(values) and 0 not in of(values).shape(values):
        told = values if values.ndim == 0 else of(values).dtype(values)
        raise DtypeError(f"{what} must be whole numbers, not {told}")
    return values


def on_host(values: Any) -> np.ndarray[Any, Any] | None:
    """The numbers on the host, where they are known and at hand."""
    if is_array(values):
        return of(values).concrete(values)
    try:
        return np.asarray(values)
    except ValueError:
        raise ShapeError("rows of a mask must be of equal length: these differ") from None


def copied_to_host(values: Any) -> np.ndarray[Any, Any] | None:
    """The numbers on the host, copied from any device; None where they are traced."""
    if not is_array(values):
        return on_host(values)
    return None if of(values).unknown(values) else of(values).to_numpy(values)


def beside(values: Any, block: Block) -> Array:
    """Positions as an array of the call's own framework; what lies beyond all is the farthest."""
    fw, kind = of(block.q), of(block.q).dtype(block.q)
    if not is_array(values) or of(values) is not fw:
        return fw.constant(np.clip(values, -FARTHEST, FARTHEST), block.q, kind)
    values = fw.beside(values, block.q)
    near, xp = fw.astype(values, kind), fw.xp
    if fw.dtype(values) != "int64" or kind == "int64":
        return near
    far = near * 0 + FARTHEST
    near = xp.where(values > FARTHEST, far, near)
    return xp.where(values < -FARTHEST, -far, near)


def check_rows(what: str, values: Any, lead: Shape, n: int, last: int | None) -> None:
    shape = tuple(values.shape)
    batch = lead[:1]
    good = [(*batch, n), (n,) if last is not None else batch]
    if shape not in good and None not in (*lead, n, *shape):
        told = " or ".join(dict.fromkeys(map(str, good)))
        raise ShapeError(f"{what} must have shape {told}, not {shape}")


def per_row(values: Any, block: Block) -> Array:
    """(B,) or (B, n) numbers as (B, 1, …, r or 1, 1), beside the queries of the block; (n,) as
    (r, 1) where there is no batch."""
    x = beside(values, block)
    if len(x.shape) == 2 or len(x.shape) > block.axes:
        x = of(x).cut(x, block.rows, -1)
    elif len(x.shape) == 1:
        x = x[:, None]
    return of(x).xp.expand_dims(_under_lead(x, block), axis=-1)  # no [..., None] of MXNet's ()


def per_position(values: Any, span: Span, block: Block) -> Array:
    """Ids of positions, (n,) or (B, n), which may need all their bits."""
    fw = of(block.q)
    if not is_array(values) or of(values) is not fw:
        values = fw.constant(values, block.q, fw.dtype(block.q))
    x = fw.cut(fw.beside(values, block.q), span, -1)
    return _under_lead(x, block) if len(x.shape) == 2 else x


def _under_lead(x: Array, block: Block) -> Array:
    """(B, r) as (B, 1, …, 1, r): B stays the first axis of the scores."""
    for _ in range(block.axes - 1):
        x = x[:, None, ...]
    return x
