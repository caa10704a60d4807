"""What came in, by its shapes."""

from __future__ import annotations

from typing import Any

from qkv.errors import DtypeError, ShapeError
from qkv.types import Shape


def three(given: Any, name: str = "inputs") -> tuple[Any, Any, Any]:
    """[query, value] or [query, value, key] as three."""
    listed = isinstance(given, list | tuple) and not any(isinstance(x, int) for x in given)
    if not listed or len(given) not in (2, 3):
        what = f"{len(given)} of them" if listed else type(given).__name__
        raise DtypeError(
            f"{name} must be a list, [query, value] or [query, value, key], not {what}"
        )
    query, value, *key = given
    return query, value, key[0] if key else value


def check_shapes(query: Shape, value: Shape, key: Shape) -> None:
    for name, shape in (("query", query), ("value", value), ("key", key)):
        if shape is None:
            raise DtypeError(f"{name} must be an array, not None")
        if len(shape) < 3:
            raise ShapeError(f"{name} must have the axes (batch, …, rows, width), not {shape}")
        width(name, shape)
    if None not in (value[-2], key[-2]) and value[-2] != key[-2]:
        raise ShapeError(
            f"key and value must have one row each per pair, but key has {key[-2]} and value "
            f"{value[-2]}"
        )


def sequence(name: str, shape: Shape) -> Shape:
    if len(shape) != 3:
        raise ShapeError(f"{name} must have the axes (batch, rows, width), not {tuple(shape)}")
    width(name, shape)
    return tuple(shape)


def width(name: str, shape: Shape) -> int:
    if shape[-1] is None:
        raise ShapeError(f"{name} must have a known width, its last axis, not {tuple(shape)}")
    return shape[-1]
