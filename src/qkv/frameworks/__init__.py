"""One namespace over NumPy, PyTorch, JAX, TensorFlow and MXNet.

An array is known by the module it came from; a framework that the caller has not imported is
never imported for him. `of(x)` gives the framework of x, with `xp`, the array namespace of the
standard, and the few verbs that the standard lacks.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.errors import DtypeError, FrameworkError, ShapeError
from qkv.util.types import Array

if TYPE_CHECKING:
    from qkv.frameworks.base import Framework

FRAMEWORK_BY_ROOT_MODULE = {
    "numpy": "numpy",
    "torch": "torch",
    "jax": "jax",
    "jaxlib": "jax",
    "tensorflow": "tensorflow",
    "mxnet": "mxnet",
    "array_api_strict": "array_api_strict",
}


# Plain dictionaries, which torch.compile can read; a functools.cache it can not. Nor can it look
# into a number that it does not know yet.
_FRAMEWORK_NAME_BY_TYPE: dict[type, str | None] = dict.fromkeys(
    (int, float, bool, str, tuple, list, type(None))
)
_FRAMEWORKS: dict[str, Framework] = {}
FRAMEWORK_BY_TYPE: dict[type, Framework | None] = {type(None): None}


def _framework_name(x: object) -> str | None:
    """The framework of an array, None for anything else; NumPy's scalars are plain numbers."""
    kind = type(x)
    if kind not in _FRAMEWORK_NAME_BY_TYPE:
        shaped = hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, np.generic)
        _FRAMEWORK_NAME_BY_TYPE[kind] = _framework_of_type(kind) if shaped else None
    return _FRAMEWORK_NAME_BY_TYPE[kind]


def _framework_of_type(kind: type) -> str | None:
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next(
        (FRAMEWORK_BY_ROOT_MODULE[root] for root in roots if root in FRAMEWORK_BY_ROOT_MODULE), None
    )


def load_framework(name: str) -> Framework:
    """The adapter of a framework by name."""
    if name not in _FRAMEWORKS:
        if name != "numpy":  # known before a graph is made, which asks how many are
            load_framework("numpy")
        _FRAMEWORKS[name] = _import_adapter(name)
        _FRAMEWORK_NAME_BY_TYPE.update(dict.fromkeys(_FRAMEWORKS[name].array_types, name))
        FRAMEWORK_BY_TYPE.update(dict.fromkeys(_FRAMEWORKS[name].array_types, _FRAMEWORKS[name]))
    return _FRAMEWORKS[name]


def _import_adapter(name: str) -> Framework:
    if name == "torch":  # by a statement: import_module is nothing that torch.compile would trace
        from qkv.frameworks.torch import FRAMEWORK

        return FRAMEWORK
    if name == "numpy":  # a mask may hold its arrays
        from qkv.frameworks.numpy import FRAMEWORK as HOST

        return HOST
    found: Framework = importlib.import_module(f"qkv.frameworks.{name}").FRAMEWORK
    return found


def is_array(x: object) -> bool:
    """Whether x is an array of a known framework."""
    return _framework_name(x) is not None


def find_framework(x: object) -> Framework | None:
    """The framework an array belongs to, None for anything else."""
    found = FRAMEWORK_BY_TYPE.get(type(x))
    if found is None:
        name = _framework_name(x)
        if name is not None:
            found = FRAMEWORK_BY_TYPE[type(x)] = load_framework(name)
    return found


def get_framework(x: Array) -> Framework:
    """The framework an array belongs to.

    >>> get_framework(np.ones(3)).name
    'numpy'
    """
    found = FRAMEWORK_BY_TYPE.get(type(x)) or find_framework(x)
    if found is None:
        step = "pass np.asarray(…)" if isinstance(x, list | tuple) else "convert it first"
        raise DtypeError(
            "expected an array of "
            f"{', '.join(sorted(set(FRAMEWORK_BY_ROOT_MODULE.values()) - {'array_api_strict'}))}, "
            f"not {type(x).__module__}.{type(x).__qualname__}: {step}"
        )
    return found


def array_from_literal(numbers: Any) -> Array:
    """Numbers that a person wrote down as NumPy's array; as torch's while it compiles the call, for
    it cannot ask one of NumPy's for its dtype.

    >>> array_from_literal([3, 5])
    array([3, 5])
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        return torch.tensor(numbers)
    return np.asarray(numbers)


def common_framework(**arrays: Array) -> Framework:
    """The one framework of all the named arrays, or an error that names the odd one out."""
    found = {name: get_framework(x) for name, x in arrays.items() if is_array(x)}
    first, fw = next(iter(found.items()))
    for name, other in found.items():
        if other is not fw:
            raise FrameworkError(
                f"{first} is an array of {fw.name} but {name} is one of {other.name}: "
                f"convert {name} to {fw.name}, one call takes one framework"
            )
    return fw


def as_plain_array(x: Array, name: str) -> Array:
    """x as its framework computes with it, whatever class of arrays it came in."""
    if isinstance(x, np.ndarray) and type(x) is not np.ndarray and np.ma.is_masked(x):
        raise DtypeError(
            f"{name} is a masked array, and what it masks would count: fill it, {name}.filled(0), "
            "and rule its rows out"
        )
    if not hasattr(x, "__getitem__"):
        raise DtypeError(
            f"{name} must be an array of rows, and a {type(x).__name__} has none to read: pass its "
            "numbers as an array, or trace where a shape alone is known"
        )
    if hasattr(x, "row_lengths"):
        raise DtypeError(
            f"{name} is ragged, its rows differ in length: fill them up, {name}.to_tensor(), and "
            f"rule that out, masks.lengths({name}.row_lengths())"
        )
    x = get_framework(x).as_plain_array(
        x, name
    )  # first: what it refuses may have no shape to be asked for
    if getattr(x.shape, "rank", 2) is None:
        raise ShapeError(f"{name} must have a known number of axes: say so, tf.ensure_shape")
    return x


def divide_unless_one(x: Array, divisor: Any) -> Array:
    """x / divisor; x itself where that is the number 1."""
    return x if type(divisor) in (float, int) and divisor == 1 else x / divisor


def to_numpy(x: Array) -> np.ndarray[Any, Any]:
    """Any array, or nested lists of numbers, as NumPy: detached, on the host, bfloat16 widened, and
    NaN where a number is masked.

    >>> to_numpy([[1.0, 2.0]]).shape
    (1, 2)
    """
    return get_framework(x).to_numpy(x) if is_array(x) else np.asarray(x)
