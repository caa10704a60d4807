"""The arrays inside a record: taken out in a fixed order, and put back.

A record is a frozen dataclass, a tuple, or a list; an array may stand at any depth. Everything
else (numbers, names, functions, arrays of another framework) stays where it is.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from qkv.arrays import is_array, of
from qkv.arrays.base import Framework
from qkv.types import Array

T = TypeVar("T")


class Record:
    """What a score, a weighting and a mask are: equal where their fields are, arrays by their
    numbers."""

    what: ClassVar[str] = ""
    """The argument of `attend` that it is given as."""

    also: ClassVar[tuple[str, ...]] = ()
    """What papers and books call it, for whoever asks for it by such a name."""

    known: ClassVar[tuple[str, ...]] = ()
    """The fields whose numbers say what is computed, so that they are never traced."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__eq__" not in vars(cls):  # `dataclass` would put one there that asks arrays for a bool
            setattr(cls, "__eq__", _is_equal)  # noqa: B010
        RECORDS.append(cls)
        if "jax" in sys.modules:  # else when its first array comes
            from qkv.arrays import pytrees

            pytrees.register()


RECORDS: list[type] = []
"""The classes of records that JAX has not been told of."""


def _is_equal(one: Any, other: object) -> bool:
    return same(one, other) if type(one) is type(other) else NotImplemented


def same(one: Any, other: Any) -> bool:
    """Whether two records, or what stands in them, are equal.

    >>> import numpy as np
    >>> same((np.ones(2), "name"), (np.ones(2), "name"))
    True
    """
    if one is other:
        return True
    if is_array(one) and is_array(other):
        fw = of(one)
        if of(other) is not fw or fw.dtype(one) != fw.dtype(other) or fw.tracing(one):
            return False
        return bool(np.array_equal(fw.to_numpy(one), fw.to_numpy(other)))
    if type(one) is not type(other) or is_array(one):
        return bool(not is_array(one) and not is_array(other) and one == other)
    if fields_of(one) is not None:
        compared = [f.name for f in dataclasses.fields(one) if f.compare]
        return all(same(getattr(one, name), getattr(other, name)) for name in compared)
    if type(one) in (tuple, list):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is dict:
        return one.keys() == other.keys() and all(same(x, other[name]) for name, x in one.items())
    return bool(one == other)


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
    if is_array(record):
        return function(record) if of(record) is fw else record
    names = fields_of(record)
    if names is not None:
        held = {name: getattr(record, name) for name in names}
        fresh = {
            name: map_arrays(fw, function, value)
            for name, value in held.items()
            if not isinstance(value, _PLAIN)
        }
        if all(fresh[name] is held[name] for name in fresh):
            return record
        # A copy that runs no __init__: the fields were checked when the record was built, and a
        # tracer in place of an array could not be checked again.
        copy = object.__new__(type(record))
        for name in names:  # no more than those: what is derived is from the arrays replaced
            object.__setattr__(copy, name, fresh.get(name, held[name]))
        return copy
    if type(record) in (tuple, list):
        return type(record)(map_arrays(fw, function, item) for item in record)  # type: ignore[call-arg,attr-defined]
    return record


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


class ArrayKind(NamedTuple):
    """An array without its numbers."""

    type: type
    dtype: Hashable
    shape: tuple[int, ...]
    learned: bool
    place: Hashable = None


class Unkind(Exception):
    """A record holds something whose kind does not say what it does, as a function."""


def kind(fw: Framework, record: Any) -> Hashable:
    """The record without the numbers of its arrays: equal for records that are treated alike.

    >>> import numpy as np
    >>> from qkv.arrays import framework
    >>> from qkv.scores import Multiplicative
    >>> one, two = (kind(framework("numpy"), Multiplicative(np.ones((2, 3)) * x)) for x in (1, 2))
    >>> one == two
    True
    """
    if type(record) in _PLAIN_TYPES:
        return record  # type: ignore[no-any-return]
    if type(record) in fw.kinds:  # no tracer, where the call's own arrays are none
        learned = getattr(record, "requires_grad", False)
        try:
            return ArrayKind(type(record), record.dtype, record.shape, learned, fw.place_of(record))
        except RuntimeError:  # a nested tensor, which is refused
            return ArrayKind(type(record), record.dtype, fw.shape(record), learned)
    held = getattr(record, "__dict__", None)
    if held is not None and KIND in held:
        return held[KIND]  # type: ignore[no-any-return]
    if is_array(record):
        if of(record).tracing(record):
            raise Unkind
        learned = getattr(record, "requires_grad", False)
        return ArrayKind(type(record), record.dtype, tuple(record.shape), learned)
    names = fields_of(record)
    if names is not None and held is not None and len(held) == len(names):
        found = (type(record), *[kind(fw, held[name]) for name in names])
        if not (ArrayKind in map(type, found) or has_arrays(found)):
            held[KIND] = found
        return found
    if type(record) is tuple:
        return tuple(kind(fw, item) for item in record)
    raise Unkind


def holds_others(fw: Framework, record: Any) -> bool:
    """Whether an array of another framework stands in the record."""
    if is_array(record):
        return of(record) is not fw
    if type(record) in (tuple, list):
        return any(holds_others(fw, item) for item in record)
    return any(holds_others(fw, getattr(record, name)) for name in fields_of(record) or ())


def has_arrays(kind: Hashable) -> bool:
    """Whether a record of this kind holds an array."""
    return bool(arrays_of(kind))


def arrays_of(kind: Hashable) -> list[ArrayKind]:
    """The arrays that a record of this kind holds."""
    if type(kind) is ArrayKind:
        return [kind]
    return [x for item in kind for x in arrays_of(item)] if isinstance(kind, tuple) else []


_PLAIN = (int, float, str, type(None))
_PLAIN_TYPES = frozenset((*_PLAIN, bool))
KIND = "_kind_in_calls"
"""Where a record that holds no array keeps its kind."""

# A plain dictionary, which torch.compile can read.
_NAMES: dict[type, tuple[str, ...] | None] = {type(None): None}


def fields_of(record: Any) -> tuple[str, ...] | None:
    """The names of a record's fields; None of what is no dataclass."""
    kind = type(record)
    if kind not in _NAMES:
        known = dataclasses.is_dataclass(record)
        _NAMES[kind] = tuple(f.name for f in dataclasses.fields(record)) if known else None
    return _NAMES[kind]
