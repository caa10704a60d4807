"""Records (scores, weightings, masks): list, replace and compare the arrays inside them.

A record is a frozen dataclass, a tuple or a list, with arrays at any depth. Functions of this
module leave everything else (numbers, names, functions, arrays of other frameworks) in place.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from qkv.frameworks import get_framework, is_array, load_framework
from qkv.frameworks.base import Framework
from qkv.util.caches import create_table
from qkv.util.types import Array

T = TypeVar("T")


class Record:
    """Base class of scores, weightings and masks: equal if their fields are equal.

    Arrays are compared by their values.
    """

    role: ClassVar[str] = ""
    function_field: ClassVar[str | None] = None
    """The field with a function of the caller that can be part of a signature."""
    """The argument of `attend` that takes this record: "score", "weighting" or "mask"."""

    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names of this record in papers and books, for suggestions in errors."""

    static_fields: ClassVar[tuple[str, ...]] = ()
    """Fields whose values decide what is computed, so that they are never traced."""

    # TensorFlow's protocol for nested structures: `tf.function` takes a record as an argument, and
    # `tf.Module` finds its variables.

    def __tf_flatten__(self) -> tuple[Any, tuple[Any, ...]]:
        names = field_names(self) or ()
        fixed = self.static_fields
        inner = tuple(x for x in names if x not in fixed and _holds_array(getattr(self, x)))
        others = tuple((x, _wrap_fixed(getattr(self, x))) for x in names if x not in inner)
        return (inner, others), tuple(getattr(self, x) for x in inner)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Any) -> Any:
        inner, others = metadata
        record = object.__new__(cls)  # no __init__: the fields are valid
        for name, x in (*zip(inner, components, strict=True), *others):
            object.__setattr__(record, name, x.values if isinstance(x, FixedArray) else x)
        return record

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__eq__" not in vars(cls):  # the `__eq__` that dataclasses generate fails on arrays
            setattr(cls, "__eq__", _is_equal)  # noqa: B010
        UNREGISTERED_RECORDS.append(cls)
        if "jax" in sys.modules:  # otherwise the adapter registers the class when it is loaded
            load_framework("jax").register_record_classes()


class FixedArray:
    """An array as part of a hashable structure: equal if the values are equal."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedArray) and records_equal(self.values, other.values)

    def __hash__(self) -> int:
        return hash(tuple(self.values.shape))


def _wrap_fixed(x: Any) -> Any:
    return FixedArray(x) if is_array(x) else x


def _holds_array(x: Any) -> bool:
    if is_array(x):
        return True
    if type(x) in (tuple, list):
        return any(map(_holds_array, x))
    return any(_holds_array(getattr(x, name)) for name in field_names(x) or ())


UNREGISTERED_RECORDS: list[type] = []
"""Record classes that are not registered with JAX yet."""


def _is_equal(one: Any, other: object) -> bool:
    return records_equal(one, other) if type(one) is type(other) else NotImplemented


def records_equal(one: Any, other: Any) -> bool:
    """Return whether two records, or two of their fields, are equal.

    >>> import numpy as np
    >>> records_equal((np.ones(2), "name"), (np.ones(2), "name"))
    True
    """
    if one is other:
        return True
    if is_array(one) and is_array(other):
        fw = get_framework(one)
        if (
            get_framework(other) is not fw
            or fw.dtype_name(one) != fw.dtype_name(other)
            or fw.is_traced(one)
        ):
            return False
        return bool(np.array_equal(fw.to_numpy(one), fw.to_numpy(other)))
    if type(one) is not type(other) or is_array(one):
        return bool(not is_array(one) and not is_array(other) and one == other)
    if field_names(one) is not None:
        compared = [f.name for f in dataclasses.fields(one) if f.compare]
        return all(records_equal(getattr(one, name), getattr(other, name)) for name in compared)
    if type(one) in (tuple, list):
        return len(one) == len(other) and all(map(records_equal, one, other))
    if type(one) is dict:
        return one.keys() == other.keys() and all(
            records_equal(x, other[name]) for name, x in one.items()
        )
    return bool(one == other)


def array_leaves(fw: Framework, record: Any) -> list[Array]:
    """Return every array of the framework in the record, depth first.

    >>> import numpy as np
    >>> from qkv.frameworks import load_framework
    >>> [
    ...     x.shape
    ...     for x in array_leaves(load_framework("numpy"), (np.ones(2), "name", (np.ones(3),)))
    ... ]
    [(2,), (3,)]
    """
    arrays: list[Array] = []

    def collect_array(x: Array) -> Array:
        arrays.append(x)
        return x

    map_arrays(fw, collect_array, record)
    return arrays


def replace_arrays(fw: Framework, record: T, arrays: Iterable[Array]) -> T:
    """Return the record with `arrays` in place of its own, in the order of `array_leaves`."""
    fresh = iter(arrays)
    return map_arrays(fw, lambda _: next(fresh), record)


def map_arrays(fw: Framework, function: Callable[[Array], Array], record: T) -> T:
    """Return the record with `function` applied to each array."""
    if is_array(record):
        return function(record) if get_framework(record) is fw else record
    names = field_names(record)
    if names is not None:
        values = {name: getattr(record, name) for name in names}
        fresh = {
            name: map_arrays(fw, function, value)
            for name, value in values.items()
            if not isinstance(value, _SCALAR_TYPES)
        }
        if all(fresh[name] is values[name] for name in fresh):
            return record
        # No __init__: the fields are valid, and a tracer in place of an array cannot be validated.
        copy = object.__new__(type(record))
        for name in names:  # only fields: cached attributes depend on the old arrays
            object.__setattr__(copy, name, fresh.get(name, values[name]))
        return copy
    if type(record) in (tuple, list):
        return type(record)(map_arrays(fw, function, item) for item in record)  # type: ignore[call-arg,attr-defined]
    return record


def format_record(record: Any) -> str:
    """Return the record as source code, with shapes in place of arrays.

    >>> import numpy as np
    >>> from qkv.scores import Multiplicative
    >>> format_record(Multiplicative(np.ones((2, 3))))
    'Multiplicative(w=(2, 3))'
    """
    if is_array(record):
        return str(tuple(record.shape))
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        return getattr(record, "__name__", None) or repr(record)
    fields = ((f.name, getattr(record, f.name)) for f in dataclasses.fields(record))
    arguments = ", ".join(
        f"{name}={format_record(value)}" for name, value in fields if value is not None
    )
    return f"{type(record).__name__}({arguments})"


class ArraySignature(NamedTuple):
    """The cache key of an array: everything except its values."""

    type: type
    dtype: Hashable
    shape: tuple[int, ...]
    needs_gradient: bool
    place: Hashable = None


class FunctionSignature(NamedTuple):
    """The cache key of a caller's function: its code and all that it reads but arrays' values."""

    key: Hashable

    @classmethod
    def create(cls, fw: Framework, function: Any) -> FunctionSignature:
        key = fw.function_signature(function)
        if key is None:
            raise UncacheableError
        return cls(key)


class UncacheableError(Exception):
    """A record holds something without a signature, such as a function."""


def record_signature(fw: Framework, record: Any) -> Hashable:
    """Return the cache key of a record: equal for records that differ only in array values.

    >>> import numpy as np
    >>> from qkv.frameworks import load_framework
    >>> from qkv.scores import Multiplicative
    >>> one, two = (
    ...     record_signature(load_framework("numpy"), Multiplicative(np.ones((2, 3)) * x))
    ...     for x in (1, 2)
    ... )
    >>> one == two
    True
    """
    if type(record) in _SCALAR_TYPE_SET:
        return record  # type: ignore[no-any-return]
    if type(record) in fw.array_types:  # the arrays of a call with a signature are not traced
        learned = getattr(record, "requires_grad", False)
        try:
            return ArraySignature(
                type(record), record.dtype, record.shape, learned, fw.place_of(record)
            )
        except RuntimeError:  # a nested tensor, which is rejected later
            return ArraySignature(type(record), record.dtype, fw.static_shape(record), learned)
    attributes = getattr(record, "__dict__", None)
    if attributes is not None and SIGNATURE_ATTRIBUTE in attributes:
        return attributes[SIGNATURE_ATTRIBUTE]  # type: ignore[no-any-return]
    if is_array(record):
        if get_framework(record).is_compiling(record):
            raise UncacheableError
        learned = getattr(record, "requires_grad", False)
        return ArraySignature(type(record), record.dtype, tuple(record.shape), learned)
    names = field_names(record)
    if names is not None and attributes is not None and _has_only_fields(attributes, names):
        is_own = type(record).__module__.partition(".")[0] == "qkv"
        if fw.reruns_user_code and not is_own:
            raise UncacheableError
        function_field = getattr(record, "function_field", None) if is_own else None
        signature = (
            type(record),
            *[
                FunctionSignature.create(fw, attributes[name])
                if name == function_field and not _is_record(attributes[name])
                else record_signature(fw, attributes[name])
                for name in names
            ],
        )
        # Another framework may need to know that the class is the caller's.
        if is_own and not (ArraySignature in map(type, signature) or holds_values(signature)):
            attributes[SIGNATURE_ATTRIBUTE] = signature
        return signature
    if type(record) is tuple:
        return tuple(record_signature(fw, item) for item in record)
    raise UncacheableError


def _has_only_fields(attributes: dict[str, Any], names: Sequence[str]) -> bool:
    """Return whether an object has no attributes but its fields and a cached signature."""
    return len(attributes) - (PAIRS_SIGNATURE_ATTRIBUTE in attributes) == len(names)


def code_signature(fw: Framework, function: Any) -> Hashable:
    """Return a hashable that is equal for functions with the same code, as in a new lambda.

    For an object that can be called: its own signature if it is a record, else the object itself.
    """
    code = getattr(function, "__code__", None)
    if code is not None:
        return code  # type: ignore[no-any-return]
    try:
        return record_signature(fw, function)
    except UncacheableError:
        return function  # type: ignore[no-any-return]


def measure_pair_numbers(fw: Framework, function: Any, query: Array, key: Array) -> int | None:
    """Return how many numbers `function(query, key)` needs in memory for each query and key.

    None if the framework can measure it only by running the function on data.
    """
    return fw.measure_pair_numbers(function, code_signature(fw, function), query, key)


def _is_record(x: Any) -> bool:
    return is_array(x) or isinstance(x, Record)


def has_foreign_arrays(fw: Framework, record: Any) -> bool:
    """Return whether the record holds an array of another framework."""
    if is_array(record):
        return get_framework(record) is not fw
    if type(record) in (tuple, list):
        return any(has_foreign_arrays(fw, item) for item in record)
    return any(has_foreign_arrays(fw, getattr(record, name)) for name in field_names(record) or ())


def foreign_contents(fw: Framework, record: Any) -> Hashable:
    """Return a hashable copy of the NumPy arrays in the record.

    Raise UncacheableError if the record holds arrays of a framework other than `fw` and NumPy, or
    more than MAX_CONTENT_BYTES of one array.
    """
    if is_array(record):
        owner = get_framework(record)
        if owner is fw:
            return None
        if owner.name != "numpy" or record.dtype.hasobject or record.nbytes > MAX_CONTENT_BYTES:
            raise UncacheableError
        return record.dtype.str, record.shape, record.tobytes()
    if type(record) in (tuple, list):
        return tuple(foreign_contents(fw, item) for item in record)
    names = field_names(record)
    return names and tuple(foreign_contents(fw, getattr(record, name)) for name in names)


def has_arrays(kind: Hashable) -> bool:
    """Return whether records with this signature hold an array."""
    return bool(array_signatures(kind))


def has_functions(kind: Hashable) -> bool:
    """Return whether records with this signature hold a function of the caller."""
    if type(kind) is FunctionSignature:
        return True
    return isinstance(kind, tuple) and any(map(has_functions, kind))


def holds_values(kind: Hashable) -> bool:
    """Return whether records with this signature may compute different things."""
    return has_arrays(kind) or has_functions(kind)


def array_signatures(kind: Hashable) -> list[ArraySignature]:
    """Return the signatures of the arrays in a record's signature."""
    if type(kind) is ArraySignature:
        return [kind]
    if type(kind) is FunctionSignature or not isinstance(kind, tuple):
        return []
    return [x for item in kind for x in array_signatures(item)]


MAX_CONTENT_BYTES = 2**16
"""The largest NumPy array whose elements may be part of a cache key."""

_SCALAR_TYPES = (int, float, str, type(None))
_SCALAR_TYPE_SET = frozenset((*_SCALAR_TYPES, bool))
SIGNATURE_ATTRIBUTE = "_kind_in_calls"
"""The attribute in which a record without arrays caches its signature."""
PAIRS_SIGNATURE_ATTRIBUTE = "_pairs_signature"
"""The attribute in which a mask caches the signature of its pairs, if they cannot change."""

# A plain dictionary: torch.compile can read it.
_FIELD_NAMES_BY_TYPE: dict[type, tuple[str, ...] | None] = create_table("frameworks.field_names")


def field_names(record: Any) -> tuple[str, ...] | None:
    """Return the names of a dataclass's fields; None for anything else."""
    kind = type(record)
    if kind not in _FIELD_NAMES_BY_TYPE:
        known = dataclasses.is_dataclass(record)
        _FIELD_NAMES_BY_TYPE[kind] = (
            tuple(f.name for f in dataclasses.fields(record)) if known else None
        )
    return _FIELD_NAMES_BY_TYPE[kind]
