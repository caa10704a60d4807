"""The Python array API standard (2023.12) over MXNet 2: functions, data types and constants.

Functions with a derivative are made of operators that `mx.autograd` records. Functions of integers
and booleans detach their arguments: MXNet would record them too, and a gradient that is an array of
booleans ends the process. Functions without a derivative that MXNet lacks run on NumPy.
"""

# Names of the standard replace builtins of Python here: use the module `builtins` for those.

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
from mxnet import np as mnp

from qkv.frameworks.base import is_dtype_of_kind
from qkv.util.types import Array

e, inf, nan, newaxis, pi = math.e, math.inf, math.nan, None, math.pi

bool = numpy.bool_
int8, int16, int32, int64 = numpy.int8, numpy.int16, numpy.int32, numpy.int64
uint8, uint16, uint32, uint64 = numpy.uint8, numpy.uint16, numpy.uint32, numpy.uint64
float16, float32, float64 = numpy.float16, numpy.float32, numpy.float64
complex64, complex128 = numpy.complex64, numpy.complex128


def _without_gradient(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return the function with its array arguments detached."""

    def call_detached(*args: Any, **options: Any) -> Array:
        flat = (x.detach() if isinstance(x, mnp.ndarray) else x for x in args)
        return function(*flat, **options)

    return call_detached


def _from_numpy(x: Any, like: Array) -> Array:
    x = numpy.asarray(x)
    return mnp.array(x, dtype=x.dtype, device=like.device)


def _on_numpy(function: Callable[..., Any]) -> Callable[..., Array]:
    """Return NumPy's function for MXNet arrays, without a gradient."""

    def call_numpy(*args: Any, **options: Any) -> Array:
        like = next(x for x in args if isinstance(x, mnp.ndarray))
        host = (x.asnumpy() if isinstance(x, mnp.ndarray) else x for x in args)
        return _from_numpy(function(*host, **options), like)

    return call_numpy


def _is_floating(x: Array) -> Any:
    return numpy.issubdtype(x.dtype, numpy.floating)


def _as_axes(x: Array, axis: Any) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(len(x.shape)))
    return axis if isinstance(axis, tuple) else (axis,)


# Element-wise functions

abs, negative, sign, square, sqrt = mnp.abs, mnp.negative, mnp.sign, mnp.square, mnp.sqrt
acos, asin, atan, atan2 = mnp.arccos, mnp.arcsin, mnp.arctan, mnp.arctan2
acosh, asinh, atanh = mnp.arccosh, mnp.arcsinh, mnp.arctanh
cos, sin, tan, cosh, sinh, tanh = mnp.cos, mnp.sin, mnp.tan, mnp.cosh, mnp.sinh, mnp.tanh
exp, expm1, log, log1p, log2, log10 = (
    mnp.exp, mnp.expm1, mnp.log, mnp.log1p, mnp.log2, mnp.log10,
)  # fmt: skip
add, subtract, multiply, divide, pow = (
    mnp.add, mnp.subtract, mnp.multiply, mnp.divide, mnp.power,
)  # fmt: skip
maximum, minimum, hypot, copysign = mnp.maximum, mnp.minimum, mnp.hypot, mnp.copysign
floor_divide, remainder = _without_gradient(mnp.floor_divide), _without_gradient(mnp.remainder)
equal, not_equal = _without_gradient(mnp.equal), _without_gradient(mnp.not_equal)
greater, greater_equal = _without_gradient(mnp.greater), _without_gradient(mnp.greater_equal)
less, less_equal = _without_gradient(mnp.less), _without_gradient(mnp.less_equal)
logical_and, logical_or = _without_gradient(mnp.logical_and), _without_gradient(mnp.logical_or)
logical_not, logical_xor = _without_gradient(mnp.logical_not), _without_gradient(mnp.logical_xor)
bitwise_and, bitwise_or = _without_gradient(mnp.bitwise_and), _without_gradient(mnp.bitwise_or)
bitwise_xor, bitwise_invert = _without_gradient(mnp.bitwise_xor), _without_gradient(mnp.bitwise_not)
bitwise_left_shift, bitwise_right_shift = _on_numpy(numpy.left_shift), _on_numpy(numpy.right_shift)
round, signbit = _on_numpy(numpy.rint), _on_numpy(numpy.signbit)  # MXNet rounds ties down


def positive(x: Array) -> Array:
    return x


conj = real = positive  # MXNet has no complex numbers


def imag(x: Array) -> Array:
    return mnp.zeros_like(x)


def ceil(x: Array) -> Array:
    return mnp.ceil(x) if _is_floating(x) else x


def floor(x: Array) -> Array:
    return mnp.floor(x) if _is_floating(x) else x


def trunc(x: Array) -> Array:
    return mnp.trunc(x) if _is_floating(x) else x


def clip(x: Array, min: Any = None, max: Any = None) -> Array:
    x = x if min is None else mnp.maximum(x, min)
    return x if max is None else mnp.minimum(x, max)


def isfinite(x: Array) -> Array:
    return mnp.isfinite(x.detach()) if _is_floating(x) else mnp.ones_like(x, dtype=bool)


def isinf(x: Array) -> Array:
    return mnp.isinf(x.detach()) if _is_floating(x) else mnp.zeros_like(x, dtype=bool)


def isnan(x: Array) -> Array:
    return mnp.isnan(x.detach()) if _is_floating(x) else mnp.zeros_like(x, dtype=bool)


def logaddexp(x1: Array, x2: Array) -> Array:
    large, small = mnp.maximum(x1, x2), mnp.minimum(x1, x2)
    gap = where(equal(large, small), mnp.zeros_like(large), small - large)  # not ∞ − ∞
    return large + mnp.log1p(mnp.exp(gap))


# Statistics

max, min = mnp.max, mnp.min


def _sum_dtype(x: Array, dtype: Any) -> Any:
    """Return the data type of a sum or product: at least 32 bits for integers."""
    if dtype is None and x.dtype.kind in "biu" and x.dtype.itemsize < 4:
        return numpy.uint32 if x.dtype.kind == "u" else numpy.int32
    return x.dtype if dtype is None else dtype


def sum(x: Array, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Array:
    return mnp.sum(astype(x, _sum_dtype(x, dtype)), axis=axis, keepdims=keepdims)


def prod(x: Array, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Array:
    return mnp.prod(astype(x, _sum_dtype(x, dtype)), axis=axis, keepdims=keepdims)


def cumulative_sum(
    x: Array, axis: int | None = None, dtype: Any = None, include_initial: Any = False
) -> Array:
    axis = 0 if axis is None else axis
    out = mnp.cumsum(astype(x, _sum_dtype(x, dtype)), axis=axis)
    if not include_initial:
        return out
    shape = list(out.shape)
    shape[axis] = 1
    return mnp.concatenate([mnp.zeros(shape, dtype=out.dtype, device=x.device), out], axis=axis)


def mean(x: Array, axis: Any = None, keepdims: Any = False) -> Array:
    count = math.prod(x.shape[i] for i in _as_axes(x, axis))
    return mnp.sum(x, axis=axis, keepdims=keepdims) / count  # mx.np.mean sums float64 in float32


def var(x: Array, axis: Any = None, correction: float = 0.0, keepdims: Any = False) -> Array:
    off = x - mean(x, axis, True)
    count = math.prod(x.shape[i] for i in _as_axes(x, axis))
    return mnp.sum(off * off, axis=axis, keepdims=keepdims) / (count - correction)


def std(x: Array, axis: Any = None, correction: float = 0.0, keepdims: Any = False) -> Array:
    return mnp.sqrt(var(x, axis, correction, keepdims))


all, any = _without_gradient(mnp.all), _without_gradient(mnp.any)


# Searching, sorting and sets


def where(condition: Array, x1: Array, x2: Array) -> Array:
    shape = numpy.broadcast_shapes(condition.shape, x1.shape, x2.shape)
    if 0 in shape:  # mx.np.where ends the process on an empty array
        return mnp.broadcast_to(x1 + x2, shape)
    return mnp.where(condition.detach(), x1, x2)


def _arg_extreme(function: Any, x: Array, axis: int | None, keepdims: Any) -> Array:
    at = function(x.asnumpy(), axis=axis)
    if keepdims:
        at = numpy.reshape(at, [1] * len(x.shape)) if axis is None else numpy.expand_dims(at, axis)
    return _from_numpy(numpy.asarray(at, numpy.int64), x)


def argmax(x: Array, axis: int | None = None, keepdims: Any = False) -> Array:
    return _arg_extreme(numpy.argmax, x, axis, keepdims)


def argmin(x: Array, axis: int | None = None, keepdims: Any = False) -> Array:
    return _arg_extreme(numpy.argmin, x, axis, keepdims)


def nonzero(x: Array) -> tuple[Array, ...]:
    return tuple(_from_numpy(at, x) for at in numpy.nonzero(x.asnumpy()))


def searchsorted(x1: Array, x2: Array, side: Any = "left", sorter: Array | None = None) -> Array:
    order = None if sorter is None else sorter.asnumpy()
    return _from_numpy(numpy.searchsorted(x1.asnumpy(), x2.asnumpy(), side, order), x1)


def argsort(x: Array, axis: int = -1, descending: Any = False, stable: Any = True) -> Array:
    # MXNet's sort is not stable. Positions have no gradient, so NumPy can sort.
    host = x.asnumpy()
    order = numpy.argsort(-host if descending else host, axis=axis, kind="stable")
    return mnp.array(order, dtype="int64", device=x.device)


def sort(x: Array, axis: int = -1, descending: Any = False, stable: Any = True) -> Array:
    return take_along_axis(x, argsort(x, axis, descending), axis)


class UniqueAll(NamedTuple):
    values: Array
    indices: Array
    inverse_indices: Array
    counts: Array


class UniqueCounts(NamedTuple):
    values: Array
    counts: Array


class UniqueInverse(NamedTuple):
    values: Array
    inverse_indices: Array


def unique_all(x: Array) -> UniqueAll:
    values, indices, inverse, counts = numpy.unique(
        x.asnumpy(), return_index=True, return_inverse=True, return_counts=True
    )
    parts = (values, indices, inverse.reshape(x.shape), counts)
    return UniqueAll(*(_from_numpy(part, x) for part in parts))


def unique_counts(x: Array) -> UniqueCounts:
    unique = unique_all(x)
    return UniqueCounts(unique.values, unique.counts)


def unique_inverse(x: Array) -> UniqueInverse:
    unique = unique_all(x)
    return UniqueInverse(unique.values, unique.inverse_indices)


unique_values = _on_numpy(numpy.unique)


# Shapes and positions

broadcast_to, flip, moveaxis = mnp.broadcast_to, mnp.flip, mnp.moveaxis
permute_dims, repeat, roll, squeeze, tile = (
    mnp.transpose, mnp.repeat, mnp.roll, mnp.squeeze, mnp.tile,
)  # fmt: skip


def broadcast_arrays(*arrays: Array) -> list[Array]:
    shape = numpy.broadcast_shapes(*(x.shape for x in arrays))
    return [mnp.broadcast_to(x, shape) for x in arrays]


def expand_dims(x: Array, axis: int = 0) -> Array:
    return mnp.expand_dims(x, axis)


def reshape(x: Array, shape: Any, copy: Any = None) -> Array:
    return mnp.reshape(x, shape)


def concat(arrays: Sequence[Array], axis: int | None = 0) -> Array:
    if axis is None:
        return mnp.concatenate([x.reshape(-1) for x in arrays], axis=0)
    return mnp.concatenate(list(arrays), axis=axis)


def stack(arrays: Sequence[Array], axis: int = 0) -> Array:
    return mnp.stack(list(arrays), axis=axis)


def unstack(x: Array, axis: int = 0) -> tuple[Array, ...]:
    first = mnp.moveaxis(x, axis, 0)
    return tuple(first[i] for i in range(first.shape[0]))


def matrix_transpose(x: Array) -> Array:
    if x.dtype == numpy.bool_:  # mx.np.swapaxes does not support booleans
        return mnp.swapaxes(x.astype("int8"), -1, -2).astype("bool")
    return mnp.swapaxes(x, -1, -2)


def take(x: Array, indices: Array, axis: int | None = None) -> Array:
    axis = 0 if axis is None else axis
    if x.dtype == numpy.bool_:  # mx.np.take does not support booleans
        return mnp.take(x.detach().astype("int32"), indices, axis=axis) != 0
    return mnp.take(x, indices, axis=axis)


def take_along_axis(x: Array, indices: Array, axis: int = -1) -> Array:
    # mx.np has no take_along_axis with a gradient, so this is one flat gather.
    if axis not in (-1, len(x.shape) - 1):
        x, indices = mnp.moveaxis(x, axis, -1), mnp.moveaxis(indices, axis, -1)
        return mnp.moveaxis(take_along_axis(x, indices), -1, axis)
    width = x.shape[-1]
    lines = mnp.arange(x.size // (width or 1), dtype="int64", device=x.device)
    at = lines.reshape((*x.shape[:-1], 1)) * width + indices.astype("int64")
    return mnp.take(x.reshape(-1), at)


# Linear algebra

tensordot = mnp.tensordot


def matmul(x1: Array, x2: Array) -> Array:
    if len(x2.shape) != 2 or len(x1.shape) <= 2:
        return mnp.matmul(x1, x2)
    # One product for all rows; mx.np.matmul ends the process on six axes.
    rows = mnp.matmul(x1.reshape(math.prod(x1.shape[:-1]), x1.shape[-1]), x2)
    return rows.reshape((*x1.shape[:-1], x2.shape[-1]))


def vecdot(x1: Array, x2: Array, axis: int = -1) -> Array:
    return mnp.sum(x1 * x2, axis=axis)


# New arrays

asarray, arange, from_dlpack = mnp.array, mnp.arange, mnp.from_dlpack
ones_like, zeros_like, tril, triu = mnp.ones_like, mnp.zeros_like, mnp.tril, mnp.triu


def full(shape: Any, fill_value: Any, dtype: Any = None, device: Any = None) -> Array:
    return mnp.full(shape, fill_value, dtype=dtype, device=device)


def zeros(shape: Any, dtype: Any = None, device: Any = None) -> Array:
    return mnp.zeros(shape, dtype=dtype, device=device)


def ones(shape: Any, dtype: Any = None, device: Any = None) -> Array:
    return mnp.ones(shape, dtype=dtype, device=device)


empty, empty_like = zeros, mnp.zeros_like


def full_like(x: Array, fill_value: Any, dtype: Any = None, device: Any = None) -> Array:
    return mnp.full(x.shape, fill_value, dtype=dtype or x.dtype, device=device or x.device)


def eye(
    n_rows: int, n_cols: int | None = None, k: int = 0, dtype: Any = None, device: Any = None
) -> Array:
    return mnp.array(numpy.eye(n_rows, n_cols, k), dtype=dtype or numpy.float32, device=device)


def linspace(
    start: Any, stop: Any, num: int, dtype: Any = None, device: Any = None, endpoint: Any = True
) -> Array:
    points = numpy.linspace(start, stop, num, endpoint=endpoint)
    return mnp.array(points, dtype=dtype or numpy.float32, device=device)


def meshgrid(*arrays: Array, indexing: Any = "xy") -> list[Array]:
    grids = numpy.meshgrid(*[x.asnumpy() for x in arrays], indexing=indexing)
    return [_from_numpy(x, arrays[0]) for x in grids]


# Data types

can_cast, finfo, iinfo = numpy.can_cast, numpy.finfo, numpy.iinfo


def astype(x: Array, dtype: Any, copy: Any = True, device: Any = None) -> Array:
    if x.dtype == dtype:
        return x
    smooth = builtins.all(numpy.issubdtype(kind, numpy.floating) for kind in (x.dtype, dtype))
    return (x if smooth else x.detach()).astype(dtype)


def isdtype(dtype: Any, kind: Any) -> Any:
    if isinstance(kind, tuple):
        return builtins.any(isdtype(dtype, x) for x in kind)
    dtype = numpy.dtype(dtype)
    return is_dtype_of_kind(dtype.kind, kind) if isinstance(kind, str) else dtype == kind


def result_type(*arrays_and_dtypes: Any) -> Any:
    # A data type is a class here, whose own `dtype` is an unbound property.
    return numpy.result_type(
        *(x if isinstance(x, type) else getattr(x, "dtype", x) for x in arrays_and_dtypes)
    )
