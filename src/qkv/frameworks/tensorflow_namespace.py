"""The Python array API standard (2023.12) over TensorFlow: functions, data types and constants.

Functions work eagerly and inside `tf.function`. Results have TensorFlow's data types. `device`
arguments are accepted and ignored: TensorFlow places arrays itself.
"""

# Names of the standard replace builtins of Python here: use the module `builtins` for those.

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from qkv.frameworks.base import is_dtype_of_kind
from qkv.util.types import Array

e, inf, nan, newaxis, pi = math.e, math.inf, math.nan, None, math.pi

bool = tf.bool
int8, int16, int32, int64 = tf.int8, tf.int16, tf.int32, tf.int64
uint8, uint16, uint32, uint64 = tf.uint8, tf.uint16, tf.uint32, tf.uint64
float16, bfloat16, float32, float64 = tf.float16, tf.bfloat16, tf.float32, tf.float64
complex64, complex128 = tf.complex64, tf.complex128

_INT_BY_SIZE = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def dynamic_shape(x: Array) -> tuple[Any, ...]:
    """Return the length of every axis: an int, or a tensor if only a run of the graph knows it."""
    return tuple(tf.shape(x)[i] if n is None else n for i, n in enumerate(x.shape))


# Element-wise functions

abs, negative, sign, square, sqrt, round = (
    tf.abs, tf.negative, tf.sign, tf.square, tf.sqrt, tf.round,
)  # fmt: skip
acos, asin, atan, atan2 = tf.acos, tf.asin, tf.atan, tf.atan2
acosh, asinh, atanh = tf.acosh, tf.asinh, tf.atanh
cos, sin, tan, cosh, sinh, tanh = tf.cos, tf.sin, tf.tan, tf.cosh, tf.sinh, tf.tanh
exp, expm1, log, log1p = tf.exp, tf.math.expm1, tf.math.log, tf.math.log1p
add, subtract, multiply, divide, pow = tf.add, tf.subtract, tf.multiply, tf.divide, tf.pow
floor_divide, remainder = tf.math.floordiv, tf.math.floormod
maximum, minimum = tf.maximum, tf.minimum
equal, not_equal = tf.equal, tf.not_equal
greater, greater_equal, less, less_equal = tf.greater, tf.greater_equal, tf.less, tf.less_equal
logical_and, logical_or, logical_not = tf.logical_and, tf.logical_or, tf.logical_not
logical_xor = tf.math.logical_xor
bitwise_left_shift, bitwise_right_shift = tf.bitwise.left_shift, tf.bitwise.right_shift
conj, real, imag = tf.math.conj, tf.math.real, tf.math.imag


def positive(x: Array) -> Array:
    return x


def bitwise_and(x1: Array, x2: Array) -> Array:
    return (tf.logical_and if x1.dtype.is_bool else tf.bitwise.bitwise_and)(x1, x2)


def bitwise_or(x1: Array, x2: Array) -> Array:
    return (tf.logical_or if x1.dtype.is_bool else tf.bitwise.bitwise_or)(x1, x2)


def bitwise_xor(x1: Array, x2: Array) -> Array:
    return (tf.math.logical_xor if x1.dtype.is_bool else tf.bitwise.bitwise_xor)(x1, x2)


def bitwise_invert(x: Array) -> Array:
    return (tf.logical_not if x.dtype.is_bool else tf.bitwise.invert)(x)


def ceil(x: Array) -> Array:
    return tf.math.ceil(x) if x.dtype.is_floating else x


def floor(x: Array) -> Array:
    return tf.math.floor(x) if x.dtype.is_floating else x


def trunc(x: Array) -> Array:
    return tf.where(x < 0, tf.math.ceil(x), tf.math.floor(x)) if x.dtype.is_floating else x


def clip(x: Array, min: Any = None, max: Any = None) -> Array:
    x = x if min is None else tf.maximum(x, tf.cast(min, x.dtype))
    return x if max is None else tf.minimum(x, tf.cast(max, x.dtype))


def signbit(x: Array) -> Array:
    return tf.bitcast(x, _INT_BY_SIZE[x.dtype.size]) < 0


def copysign(x1: Array, x2: Array) -> Array:
    return tf.where(signbit(x2), -tf.abs(x1), tf.abs(x1))


def hypot(x1: Array, x2: Array) -> Array:
    # Scaled by the larger side, so that no square overflows or underflows.
    x1, x2 = tf.abs(x1), tf.abs(x2)
    large, small = tf.maximum(x1, x2), tf.minimum(x1, x2)
    ratio = small / tf.where(large == 0, tf.ones_like(large), large)
    infinite = tf.logical_or(tf.math.is_inf(x1), tf.math.is_inf(x2))
    return tf.where(infinite, tf.cast(inf, large.dtype), large * tf.sqrt(1 + ratio * ratio))


def isfinite(x: Array) -> Array:
    return tf.math.is_finite(x) if x.dtype.is_floating else tf.ones_like(x, tf.bool)


def isinf(x: Array) -> Array:
    return tf.math.is_inf(x) if x.dtype.is_floating else tf.zeros_like(x, tf.bool)


def isnan(x: Array) -> Array:
    return tf.math.is_nan(x) if x.dtype.is_floating else tf.zeros_like(x, tf.bool)


def log2(x: Array) -> Array:
    return tf.math.log(x) / tf.cast(math.log(2), x.dtype)


def log10(x: Array) -> Array:
    return tf.math.log(x) / tf.cast(math.log(10), x.dtype)


def logaddexp(x1: Array, x2: Array) -> Array:
    large, small = tf.maximum(x1, x2), tf.minimum(x1, x2)
    gap = tf.where(large == small, tf.zeros_like(large), small - large)  # not ∞ − ∞
    return large + tf.math.log1p(tf.exp(gap))


# Statistics

max, min = tf.reduce_max, tf.reduce_min


def _sum_dtype(x: Array, dtype: Any) -> Any:
    """Return the data type of a sum or product: at least 32 bits for integers."""
    if dtype is None and ((x.dtype.is_integer and x.dtype.size < 4) or x.dtype.is_bool):
        return tf.uint32 if x.dtype.is_unsigned else tf.int32
    return x.dtype if dtype is None else dtype


def sum(x: Array, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Array:
    return tf.reduce_sum(tf.cast(x, _sum_dtype(x, dtype)), axis, keepdims)


def prod(x: Array, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Array:
    return tf.reduce_prod(tf.cast(x, _sum_dtype(x, dtype)), axis, keepdims)


def cumulative_sum(
    x: Array, axis: int | None = None, dtype: Any = None, include_initial: Any = False
) -> Array:
    axis = 0 if axis is None else axis
    out = tf.cumsum(tf.cast(x, _sum_dtype(x, dtype)), axis)
    if include_initial:
        lengths = list(dynamic_shape(out))
        lengths[axis] = 1
        out = tf.concat([tf.zeros(lengths, out.dtype), out], axis)
    return out


mean = tf.reduce_mean


def var(x: Array, axis: Any = None, correction: float = 0.0, keepdims: Any = False) -> Array:
    out = tf.math.reduce_variance(x, axis, keepdims)
    if not correction:
        return out
    axes = range(len(x.shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    count = tf.cast(functools.reduce(operator.mul, [dynamic_shape(x)[i] for i in axes]), x.dtype)
    return out * (count / (count - tf.cast(correction, x.dtype)))


def std(x: Array, axis: Any = None, correction: float = 0.0, keepdims: Any = False) -> Array:
    return tf.sqrt(var(x, axis, correction, keepdims))


def all(x: Array, axis: Any = None, keepdims: Any = False) -> Array:
    return tf.reduce_all(tf.cast(x, tf.bool), axis, keepdims)


def any(x: Array, axis: Any = None, keepdims: Any = False) -> Array:
    return tf.reduce_any(tf.cast(x, tf.bool), axis, keepdims)


# Searching, sorting and sets

where = tf.where


def _arg_extreme(function: Any, x: Array, axis: int | None, keepdims: Any) -> Array:
    flat = tf.reshape(x, [-1]) if axis is None else x
    at = function(flat, 0 if axis is None else axis, output_type=tf.int64)
    if not keepdims:
        return at
    return tf.reshape(at, [1] * len(x.shape)) if axis is None else tf.expand_dims(at, axis)


def argmax(x: Array, axis: int | None = None, keepdims: Any = False) -> Array:
    return _arg_extreme(tf.argmax, x, axis, keepdims)


def argmin(x: Array, axis: int | None = None, keepdims: Any = False) -> Array:
    return _arg_extreme(tf.argmin, x, axis, keepdims)


def nonzero(x: Array) -> tuple[Array, ...]:
    return tuple(tf.unstack(tf.where(tf.cast(x, tf.bool)), axis=1))


def searchsorted(x1: Array, x2: Array, side: str = "left", sorter: Array | None = None) -> Array:
    x1 = x1 if sorter is None else tf.gather(x1, sorter)
    positions = tf.searchsorted(x1, tf.reshape(x2, [-1]), side=side, out_type=tf.int64)
    return tf.reshape(positions, dynamic_shape(x2))


def _direction(descending: Any) -> str:
    return "DESCENDING" if descending else "ASCENDING"


def argsort(x: Array, axis: int = -1, descending: Any = False, stable: Any = True) -> Array:
    return tf.argsort(x, axis=axis, direction=_direction(descending), stable=stable)


def sort(x: Array, axis: int = -1, descending: Any = False, stable: Any = True) -> Array:
    return tf.sort(x, axis=axis, direction=_direction(descending))


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
    flat = tf.reshape(x, [-1])
    values = tf.sort(tf.unique(flat).y)
    inverse = tf.searchsorted(values, flat, out_type=tf.int64)
    size = tf.size(values)
    indices = tf.math.unsorted_segment_min(tf.range(tf.size(flat, tf.int64)), inverse, size)
    counts = tf.math.unsorted_segment_sum(tf.ones_like(inverse), inverse, size)
    return UniqueAll(values, indices, tf.reshape(inverse, dynamic_shape(x)), counts)


def unique_counts(x: Array) -> UniqueCounts:
    unique = unique_all(x)
    return UniqueCounts(unique.values, unique.counts)


def unique_inverse(x: Array) -> UniqueInverse:
    unique = unique_all(x)
    return UniqueInverse(unique.values, unique.inverse_indices)


def unique_values(x: Array) -> Array:
    return tf.sort(tf.unique(tf.reshape(x, [-1])).y)


# Shapes and positions

broadcast_to, expand_dims = tf.broadcast_to, tf.expand_dims


def broadcast_arrays(*arrays: Array) -> list[Array]:
    shape = functools.reduce(tf.broadcast_dynamic_shape, map(tf.shape, arrays))
    return [tf.broadcast_to(x, shape) for x in arrays]


def reshape(x: Array, shape: Any, copy: Any = None) -> Array:
    return tf.reshape(x, shape)


def concat(arrays: Sequence[Array], axis: int | None = 0) -> Array:
    if axis is None:
        return tf.concat([tf.reshape(x, [-1]) for x in arrays], 0)
    return tf.concat(list(arrays), axis)


def stack(arrays: Sequence[Array], axis: int = 0) -> Array:
    return tf.stack(list(arrays), axis)


def unstack(x: Array, axis: int = 0) -> tuple[Array, ...]:
    return tuple(tf.unstack(x, axis=axis))


def flip(x: Array, axis: Any = None) -> Array:
    axes = range(len(x.shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return tf.reverse(x, list(axes))


def moveaxis(x: Array, source: Any, destination: Any) -> Array:
    return tf.experimental.numpy.moveaxis(x, source, destination)


def permute_dims(x: Array, axes: Sequence[int]) -> Array:
    return tf.transpose(x, axes)


def matrix_transpose(x: Array) -> Array:
    return tf.linalg.matrix_transpose(x)


def repeat(x: Array, repeats: Any, axis: int | None = None) -> Array:
    return tf.repeat(x, repeats, axis)


def roll(x: Array, shift: Any, axis: Any = None) -> Array:
    if axis is None:
        return tf.reshape(tf.roll(tf.reshape(x, [-1]), shift, 0), dynamic_shape(x))
    return tf.roll(x, shift, axis)


def squeeze(x: Array, axis: Any) -> Array:
    return tf.squeeze(x, axis)


def tile(x: Array, repetitions: Sequence[int]) -> Array:
    repetitions = tuple(repetitions)
    missing = len(repetitions) - len(x.shape)
    x = tf.reshape(x, (*[1] * builtins.max(missing, 0), *dynamic_shape(x)))
    return tf.tile(x, (*[1] * builtins.max(-missing, 0), *repetitions))


def take(x: Array, indices: Array, axis: int | None = None) -> Array:
    return tf.gather(x, indices, axis=0 if axis is None else axis)


def take_along_axis(x: Array, indices: Array, axis: int = -1) -> Array:
    return tf.experimental.numpy.take_along_axis(x, indices, axis)


# Linear algebra


def matmul(x1: Array, x2: Array) -> Array:
    if len(x1.shape) == 1 or len(x2.shape) == 1:
        return _matmul_vector(x1, x2)
    if not len(x2.shape) <= len(x1.shape) > 3 or builtins.any(n != 1 for n in x2.shape[:-2]):
        return tf.matmul(x1, x2)
    # x2 is one matrix. With x1 (b, 1, n, d), oneDNN's product would write outside its memory.
    *rows, d = dynamic_shape(x1)
    width = dynamic_shape(x2)[-1]
    count = functools.reduce(operator.mul, rows)
    out = tf.matmul(tf.reshape(x1, (count, d)), tf.reshape(x2, (d, width)))
    return tf.reshape(out, (*rows, width))


def _matmul_vector(x1: Array, x2: Array) -> Array:
    left = x1[None, :] if len(x1.shape) == 1 else x1
    right = x2[:, None] if len(x2.shape) == 1 else x2
    out = tf.matmul(left, right)
    out = out if len(x1.shape) > 1 else out[..., 0, :]
    return out if len(x2.shape) > 1 else out[..., 0]


def tensordot(x1: Array, x2: Array, axes: Any = 2) -> Array:
    return tf.tensordot(x1, x2, axes)


def vecdot(x1: Array, x2: Array, axis: int = -1) -> Array:
    return tf.reduce_sum(tf.math.conj(x1) * x2, axis)


# New arrays


def asarray(x: Any, dtype: Any = None, device: Any = None, copy: Any = None) -> Array:
    return tf.convert_to_tensor(x, dtype=dtype)


def arange(
    start: Any, stop: Any = None, step: Any = 1, dtype: Any = None, device: Any = None
) -> Array:
    start, stop = (0, start) if stop is None else (start, stop)
    return tf.range(start, stop, step, dtype)


def linspace(
    start: Any,
    stop: Any,
    num: int,
    dtype: Any = None,
    device: Any = None,
    endpoint: Any = True,
) -> Array:
    points = np.linspace(start, stop, num, endpoint=endpoint)
    return tf.constant(points, tf.float32 if dtype is None else dtype)


def empty(shape: Any, dtype: Any = None, device: Any = None) -> Array:
    return zeros(shape, dtype)


def full(shape: Any, fill_value: Any, dtype: Any = None, device: Any = None) -> Array:
    value = tf.convert_to_tensor(fill_value) if dtype is None else tf.cast(fill_value, dtype)
    return tf.fill(shape, value)


def ones(shape: Any, dtype: Any = None, device: Any = None) -> Array:
    return tf.ones(shape, tf.float32 if dtype is None else dtype)


def zeros(shape: Any, dtype: Any = None, device: Any = None) -> Array:
    return tf.zeros(shape, tf.float32 if dtype is None else dtype)


def empty_like(x: Array, dtype: Any = None, device: Any = None) -> Array:
    return tf.zeros_like(x, dtype)


def full_like(x: Array, fill_value: Any, dtype: Any = None, device: Any = None) -> Array:
    return tf.fill(dynamic_shape(x), tf.cast(fill_value, x.dtype if dtype is None else dtype))


def ones_like(x: Array, dtype: Any = None, device: Any = None) -> Array:
    return tf.ones_like(x, dtype)


def zeros_like(x: Array, dtype: Any = None, device: Any = None) -> Array:
    return tf.zeros_like(x, dtype)


def eye(
    n_rows: int, n_cols: int | None = None, k: int = 0, dtype: Any = None, device: Any = None
) -> Array:
    return tf.constant(np.eye(n_rows, n_cols, k), tf.float32 if dtype is None else dtype)


def meshgrid(*arrays: Array, indexing: str = "xy") -> list[Array]:
    return list(tf.meshgrid(*arrays, indexing=indexing))


def _keep_diagonals(x: Array, k: int, lower: Any) -> Array:
    rows, columns = dynamic_shape(x)[-2:]
    offset = tf.range(columns)[None, :] - tf.range(rows)[:, None]
    return tf.where(offset <= k if lower else offset >= k, x, tf.zeros_like(x))


def tril(x: Array, k: int = 0) -> Array:
    return _keep_diagonals(x, k, True)


def triu(x: Array, k: int = 0) -> Array:
    return _keep_diagonals(x, k, False)


def from_dlpack(x: Any, device: Any = None, copy: Any = None) -> Array:
    return tf.experimental.dlpack.from_dlpack(x.__dlpack__())


# Data types


def astype(x: Array, dtype: Any, copy: Any = True, device: Any = None) -> Array:
    return tf.cast(x, dtype)


def _numpy_dtype(x: Any) -> np.dtype[Any]:
    return np.dtype(tf.as_dtype(getattr(x, "dtype", x)).as_numpy_dtype)


def can_cast(from_: Any, to: Any) -> Any:
    return np.can_cast(_numpy_dtype(from_), _numpy_dtype(to))


def finfo(type: Any) -> Any:
    dtype = _numpy_dtype(type)
    if dtype.kind in "fc":
        return np.finfo(dtype)
    import ml_dtypes

    return ml_dtypes.finfo(dtype)


def iinfo(type: Any) -> Any:
    return np.iinfo(_numpy_dtype(type))


def isdtype(dtype: Any, kind: Any) -> Any:
    if isinstance(kind, tuple):
        return builtins.any(isdtype(dtype, x) for x in kind)
    dtype = tf.as_dtype(dtype)
    if not isinstance(kind, str):
        return dtype == kind
    return is_dtype_of_kind("f" if dtype == tf.bfloat16 else _numpy_dtype(dtype).kind, kind)


def result_type(*arrays_and_dtypes: Any) -> Any:
    return tf.as_dtype(np.result_type(*map(_numpy_dtype, arrays_and_dtypes)))
