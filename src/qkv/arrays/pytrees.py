"""JAX: scores, weightings and masks as pytrees, whose leaves are their arrays.

So `jax.jit`, `grad` and `vmap` take one as an argument, and an optimizer steps it. Numbers, names,
functions and the arrays of fields that are `known` are part of its structure, as they are of the
formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from qkv.arrays import tree

Structure = tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]
"""The names of the fields that are leaves or hold some; the others, with what stands there."""

LEAVES = "_leaves_in_trees"
"""Where a record whose leaves are no arrays, as a tree of booleans, keeps which of them are."""


class Known:
    """An array in a structure: equal and hashed by its numbers."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and tree.same(self.values, other.values)

    def __hash__(self) -> int:
        return hash((self.values.shape, self.values.tobytes()))


def register() -> None:
    """Let JAX take the records of new classes apart and put them together."""
    while tree.RECORDS:
        with suppress(IndexError):  # another thread may have had the last
            kind = tree.RECORDS.pop()
            _register(kind)


def _register(kind: type) -> None:
    def put(about: Structure, children: Sequence[Any]) -> Any:
        names, others = about
        # No __init__: it would check what JAX puts in place of an array.
        record: Any = object.__new__(kind)
        for name, value in (*zip(names, children, strict=True), *others):
            object.__setattr__(record, name, value.values if type(value) is Known else value)
        if _names(record) != names:
            object.__setattr__(record, LEAVES, names)
        return record

    register_pytree_with_keys(kind, _keyed, put, _apart)


def _apart(record: Any) -> tuple[tuple[Any, ...], Structure]:
    names = _names(record)
    others = {x: getattr(record, x) for x in tree.fields_of(record) or () if x not in names}
    others.update({name: Known(others[name]) for name in record.known})
    return tuple(getattr(record, name) for name in names), (names, tuple(others.items()))


def _keyed(record: Any) -> tuple[tuple[tuple[GetAttrKey, Any], ...], Structure]:
    children, about = _apart(record)
    return tuple(zip(map(GetAttrKey, about[0]), children, strict=True)), about


def _names(record: Any) -> tuple[str, ...]:
    kept: tuple[str, ...] | None = getattr(record, LEAVES, None)
    if kept is not None:
        return kept
    fields = tree.fields_of(record) or ()
    return tuple(x for x in fields if x not in record.known and _is_child(getattr(record, x)))


def _is_child(value: Any) -> bool:
    """Whether arrays are there, or what JAX puts in their place."""
    if isinstance(value, tuple | list):
        return any(map(_is_child, value))
    if isinstance(value, tree.Record):
        return True
    return not (isinstance(value, _SETTINGS) or callable(value))


_SETTINGS = (int, float, complex, str, np.generic, type(None))
