"""The arrays inside a record: taken out in a fixed order, and put back.

A record is a frozen dataclass, a tuple, or a list; an array may stand at any depth. Everything
else (numbers, names, functions, arrays of another framework) stays where it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from qkv.arrays import is_array, of
from qkv.arrays.base import Framework
from qkv.types import Array

T = TypeVar("T")


def leaves(fw: Framework, record: Any) -> list[Array]:
    """Every array of the framework in the record, depth first.

    >>> import numpy as np
    >>> from qkv.arrays import framework
    >>> [x.shape for x in leaves(framework("numpy"), (np.ones(2), "name", (np.ones(3),)))]
    [(2,), (3,)]
    """
    found: list[Array] = []

    def note(x: Array) -> Array:
        found.append(x)
        return x

    map_arrays(fw, note, record)
    return found


def rebuild(fw: Framework, record: T, arrays: Iterable[Array]) -> T:
    """The same record with its arrays replaced, in the order of `leaves`."""
    fresh = iter(arrays)
    return map_arrays(fw, lambda _: next(fresh), record)


def map_arrays(fw: Framework, function: Callable[[Array], Array], record: T) -> T:
    """The same record with `function` applied to each array."""
    return _map(fw, function, record)  # type: ignore[no-any-return]


def brief(record: Any) -> str:
    """The record as one would write it, with the shapes of its arrays in place of their numbers.

    >>> import numpy as np
    >>> from qkv.scores import Multiplicative
    >>> brief(Multiplicative(np.ones((2, 3))))
    'Multiplicative(w=(2, 3))'
    """
    if is_array(record):
        return str(tuple(record.shape))
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        return getattr(record, "__name__", None) or repr(record)
    fields = ((f.name, getattr(record, f.name)) for f in dataclasses.fields(record))
    told = ", ".join(f"{name}={brief(value)}" for name, value in fields if value is not None)
    return f"{type(record).__name__}({told})"


def _map(fw: Framework, function: Callable[[Array], Array], record: Any) -> Any:
    if is_array(record):
        return function(record) if of(record) is fw else record
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        # A copy that runs no __init__: the fields were checked when the record was built, and a
        # tracer in place of an array could not be checked again.
        copy = object.__new__(type(record))
        copy.__dict__.update(
            (name, value)
            for name, value in record.__dict__.items()
            if not isinstance(getattr(type(record), name, None), functools.cached_property)
        )
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            object.__setattr__(copy, field.name, _map(fw, function, value))
        return copy
    if type(record) in (tuple, list):
        return type(record)(_map(fw, function, item) for item in record)
    return record
