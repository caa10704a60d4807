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

from qkv.frameworks import tree

Structure = tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]
"""The names of the fields that are leaves or hold some; the others, with what stands there."""

LEAVES_ATTRIBUTE = "_leaves_in_trees"
"""Where a record whose leaves are no arrays, as a tree of booleans, keeps which of them are."""


class HashableArray:
    """An array in a structure: equal and hashed by its numbers."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashableArray) and tree.records_equal(self.values, other.values)

    def __hash__(self) -> int:
        return hash((self.values.shape, self.values.tobytes()))


def register_records() -> None:
    """Let JAX take the records of new classes apart and put them together."""
    while tree.UNREGISTERED_RECORDS:
        with suppress(IndexError):  # another thread may have had the last
            kind = tree.UNREGISTERED_RECORDS.pop()
            _register_class(kind)


def _register_class(kind: type) -> None:
    def unflatten_record(about: Structure, children: Sequence[Any]) -> Any:
        names, others = about
        # No __init__: it would check what JAX puts in place of an array.
        record: Any = object.__new__(kind)
        for name, value in (*zip(names, children, strict=True), *others):
            object.__setattr__(
                record, name, value.values if type(value) is HashableArray else value
            )
        if _leaf_field_names(record) != names:
            object.__setattr__(record, LEAVES_ATTRIBUTE, names)
        return record

    register_pytree_with_keys(kind, _flatten_with_keys, unflatten_record, _flatten_record)


def _flatten_record(record: Any) -> tuple[tuple[Any, ...], Structure]:
    names = _leaf_field_names(record)
    others = {x: getattr(record, x) for x in tree.field_names(record) or () if x not in names}
    others.update({name: HashableArray(others[name]) for name in record.static_fields})
    return tuple(getattr(record, name) for name in names), (names, tuple(others.items()))


def _flatten_with_keys(record: Any) -> tuple[tuple[tuple[GetAttrKey, Any], ...], Structure]:
    children, about = _flatten_record(record)
    return tuple(zip(map(GetAttrKey, about[0]), children, strict=True)), about


def _leaf_field_names(record: Any) -> tuple[str, ...]:
    kept: tuple[str, ...] | None = getattr(record, LEAVES_ATTRIBUTE, None)
    if kept is not None:
        return kept
    fields = tree.field_names(record) or ()
    return tuple(
        x for x in fields if x not in record.static_fields and _is_child(getattr(record, x))
    )


def _is_child(value: Any) -> bool:
    """Whether arrays are there, or what JAX puts in their place."""
    if isinstance(value, tuple | list):
        return any(map(_is_child, value))
    if isinstance(value, tree.Record):
        return True
    return not (isinstance(value, _STATIC_TYPES) or callable(value))


_STATIC_TYPES = (int, float, complex, str, np.generic, type(None))
