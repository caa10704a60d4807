"""One interface to NumPy, PyTorch, JAX, TensorFlow and MXNet.

`get_framework(x)` returns the adapter of an array's framework. Its `xp` has the functions of the
Python array API standard; its methods add what the standard lacks. A framework is recognized by the
module that defines the array's class. qkv never imports a framework that the caller has not
imported.
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


# These are registries and not caches: `load_framework` adds the array types of a framework, which a
# tracer cannot look up. They are plain dicts, because torch.compile cannot read a functools.cache.
_FRAMEWORK_NAME_BY_TYPE: dict[type, str | None] = dict.fromkeys(
    (int, float, bool, str, tuple, list, type(None))
)
_FRAMEWORKS: dict[str, Framework] = {}
FRAMEWORK_BY_TYPE: dict[type, Framework | None] = {type(None): None}


def _framework_name(x: object) -> str | None:
    """Return the name of an array's framework; None for anything else, and for NumPy scalars."""
    kind = type(x)
    if kind not in _FRAMEWORK_NAME_BY_TYPE:
        shaped = hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, np.generic)
        if not shaped and kind.__module__[:5] == "torch":
            return None  # torch.compile cannot read a dictionary with the key torch.Generator
        _FRAMEWORK_NAME_BY_TYPE[kind] = _framework_of_type(kind) if shaped else None
    return _FRAMEWORK_NAME_BY_TYPE[kind]


def _framework_of_type(kind: type) -> str | None:
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next(
        (FRAMEWORK_BY_ROOT_MODULE[root] for root in roots if root in FRAMEWORK_BY_ROOT_MODULE), None
    )


def load_framework(name: str) -> Framework:
    """Return the adapter of the framework with this name, and import it at the first call."""
    if name not in _FRAMEWORKS:
        if name != "numpy":
            # Load NumPy now: if the registry grew later, torch.compile would recompile.
            load_framework("numpy")
        _FRAMEWORKS[name] = _import_adapter(name)
        _FRAMEWORK_NAME_BY_TYPE.update(dict.fromkeys(_FRAMEWORKS[name].array_types, name))
        FRAMEWORK_BY_TYPE.update(dict.fromkeys(_FRAMEWORKS[name].array_types, _FRAMEWORKS[name]))
    return _FRAMEWORKS[name]


def _import_adapter(name: str) -> Framework:
    if name == "torch":  # an import statement: torch.compile cannot trace import_module
        from qkv.frameworks.torch import FRAMEWORK

        return FRAMEWORK
    if name == "numpy":  # torch.compile traces this too, since masks hold NumPy arrays
        from qkv.frameworks.numpy import FRAMEWORK as HOST

        return HOST
    adapter: Framework = importlib.import_module(f"qkv.frameworks.{name}").FRAMEWORK
    return adapter


def is_array(x: object) -> bool:
    """Return whether x is an array of a supported framework."""
    return _framework_name(x) is not None


def find_framework(x: object) -> Framework | None:
    """Return the adapter of an array's framework; None for anything else."""
    fw = FRAMEWORK_BY_TYPE.get(type(x))
    if fw is None:
        name = _framework_name(x)
        if name is not None:
            fw = FRAMEWORK_BY_TYPE[type(x)] = load_framework(name)
    return fw


def get_framework(x: Array) -> Framework:
    """Return the adapter of an array's framework; raise DtypeError for anything else.

    >>> get_framework(np.ones(3)).name
    'numpy'
    """
    fw = FRAMEWORK_BY_TYPE.get(type(x)) or find_framework(x)
    if fw is None:
        step = "pass np.asarray(…)" if isinstance(x, list | tuple) else "convert it to an array"
        raise DtypeError(
            "expected an array of "
            f"{', '.join(sorted(set(FRAMEWORK_BY_ROOT_MODULE.values()) - {'array_api_strict'}))}, "
            f"not {type(x).__module__}.{type(x).__qualname__}: {step}"
        )
    return fw


def array_from_literal(numbers: Any) -> Array:
    """Return numbers from source code as a NumPy array, or as a tensor if torch.compile is tracing.

    torch.compile cannot read the dtype of a NumPy array.

    >>> array_from_literal([3, 5])
    array([3, 5])
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        return torch.tensor(numbers)
    return np.asarray(numbers)


def common_framework(**arrays: Array) -> Framework:
    """Return the framework of the named arrays; raise FrameworkError if they differ."""
    frameworks = {name: get_framework(x) for name, x in arrays.items() if is_array(x)}
    first, fw = next(iter(frameworks.items()))
    for name, other in frameworks.items():
        if other is not fw:
            raise FrameworkError(
                f"{first} is an array of {fw.name} but {name} is one of {other.name}: "
                f"convert {name} to {fw.name}; all arrays of a call must be of the same framework"
            )
    return fw


def as_plain_array(x: Array, name: str) -> Array:
    """Return x in the plain array class of its framework; errors call it `name`."""
    if isinstance(x, np.ndarray) and type(x) is not np.ndarray and np.ma.is_masked(x):
        raise DtypeError(
            f"{name} is a masked array, and qkv would use its masked elements: pass "
            f"{name}.filled(0), and exclude its rows with a mask"
        )
    if not hasattr(x, "__getitem__"):
        raise DtypeError(
            f"{name} must be an array with values; a {type(x).__name__} has only a shape: pass an "
            "array, or call inside a transform of the framework"
        )
    if hasattr(x, "row_lengths"):
        raise DtypeError(
            f"{name} is ragged, its rows differ in length: pass {name}.to_tensor() and the mask "
            f"masks.lengths({name}.row_lengths())"
        )
    # Convert before reading the shape: this rejects arrays that have no shape.
    x = get_framework(x).as_plain_array(x, name)
    if getattr(x.shape, "rank", 2) is None:
        raise ShapeError(f"{name} must have a known number of axes: set it with tf.ensure_shape")
    return x


def divide_unless_one(x: Array, divisor: Any) -> Array:
    """Return x / divisor; x itself if the divisor is the number 1."""
    return x if type(divisor) in (float, int) and divisor == 1 else x / divisor


def to_numpy(x: Array) -> np.ndarray[Any, Any]:
    """Return an array of any framework, or nested lists, as a NumPy array.

    The result is detached and on the host. bfloat16 becomes float32; masked elements become NaN.

    >>> to_numpy([[1.0, 2.0]]).shape
    (1, 2)
    """
    return get_framework(x).to_numpy(x) if is_array(x) else np.asarray(x)
