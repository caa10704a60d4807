"""NumPy: no gradients; loops over queries run on all cores."""

from __future__ import annotations

import math
import threading
import tracemalloc
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any

import numpy

from qkv.frameworks import squares, threads
from qkv.frameworks.base import Framework, Tiling
from qkv.frameworks.squares import NeedsExact, SquareOperations
from qkv.util.caches import create_table, get_or_compute, memoize
from qkv.util.types import Array, Arrays, LiveMask, MergeFunction, PartialStateFunction, Span

_DTYPE_NAMES: dict[Any, str] = create_table("frameworks.numpy_dtype_names")


def _array_namespace() -> Any:
    """Return the array namespace: NumPy from 2.1 on, else the slower array_api_compat."""
    if numpy.lib.NumpyVersion(numpy.__version__) >= "2.1.0":
        return numpy
    import array_api_compat.numpy

    return array_api_compat.numpy


MIN_ROW_FOR_NUMPY_REDUCTION = 64
"""From this many elements in a row, NumPy's own reduction along rows is fast enough."""

MAX_SUMMED_COLUMNS = 256
"""Columns up to which differences are added one column at a time: more would lose precision."""

MIN_SUMMED_PAIRS, MAX_SUMMED_NUMBERS = 2**12, 2**15
"""Adding one column at a time is faster than an array of differences from the first number of pairs
on. The second number of pairs fits the processor's cache."""

MIN_SUMMED_QUERIES, MAX_DIFFERENCES_PER_BLOCK = 8, 2**17
"""With fewer queries than the first number, the keys are not transposed, and differences are
computed for blocks of keys. The second is the number of differences in a block."""

MIN_EXPANDED_NUMBERS = 2**12
"""Numbers in an array of differences from which the expanded square is faster."""

MIN_NUMBERS_TO_FILL_BITS = 2**13
"""From this many numbers on, the bits of float32 are filled faster than `numpy.where` chooses."""

MIN_PRECISE_EXPONENT = -80.0
"""Down to this x, 1 / (1 + exp(−x)) is precise in float32."""

MAX_MEASURED_QUERIES, MAX_MEASURED_NUMBERS = 16, 2**20
"""A function is measured with this many queries n, and with n · m · d of this size."""

_PAIR_NUMBERS: dict[tuple[Any, ...], int | None] = create_table("frameworks.numpy_pair_numbers")
MAX_PAIR_NUMBERS_ENTRIES = 256

MAX_CACHED_POSITIONS = 1024
"""The longest range of positions that is cached."""


@memoize("frameworks.numpy_positions", 64)
def _cached_positions(size: int) -> Array:
    steps = numpy.arange(size, dtype=numpy.int32)
    steps.flags.writeable = False
    return steps


@memoize("frameworks.numpy_ones", 128)
def _cached_ones(size: int, dtype: Any) -> Array:
    column = numpy.ones((size, 1), dtype)
    column.flags.writeable = False
    return column


class _IgnoreFloatErrors:
    """`numpy.errstate(all="ignore")` with its settings built once.

    Building them at each entry would take a tenth of the time of a small call.
    """

    __slots__ = ("token",)

    def __enter__(self) -> None:
        self.token = _STATE.set(_IGNORE_ALL)

    def __exit__(self, *_: object) -> None:
        _STATE.reset(self.token)


try:
    from numpy._core.umath import _extobj_contextvar as _STATE
    from numpy._core.umath import _make_extobj

    _IGNORE_ALL = _make_extobj(all="ignore")
except (ImportError, TypeError):  # other versions of NumPy
    _IgnoreFloatErrors = partial(numpy.errstate, all="ignore")  # type: ignore[assignment,misc]


class NumPy(Framework):
    name = "numpy"
    array_types = (numpy.ndarray,)
    supports_masked_gather = has_fast_argmax = True
    xp = _array_namespace()

    def dtype_name(self, x: Array) -> str:
        if x.dtype not in _DTYPE_NAMES:  # NumPy builds the name at each access
            _DTYPE_NAMES[x.dtype] = super().dtype_name(x)
        return _DTYPE_NAMES[x.dtype]

    def to_numpy(self, x: Array) -> numpy.ndarray[Any, Any]:
        if type(x) is not numpy.ndarray and x.dtype.kind in "biuf" and numpy.ma.is_masked(x):
            x = x.astype(x.dtype if x.dtype.kind == "f" else float).filled(numpy.nan)
        return x.astype(numpy.float32) if self.dtype_name(x) == "bfloat16" else numpy.asarray(x)

    def astype(self, x: Array, dtype: str) -> Array:
        return x if self.dtype_name(x) == dtype else x.astype(dtype)  # xp lacks bfloat16

    def as_plain_array(self, x: Array, name: str = "x") -> Array:
        x = x if type(x) is numpy.ndarray else numpy.asarray(x)  # np.matrix has another `*`
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))

    def array_signature(self, query: Array, key: Array, value: Array | None) -> Any:
        last = key if value is None else value
        if not type(query) is type(key) is type(last) is numpy.ndarray:
            return None
        kinds = query.dtype, key.dtype, last.dtype
        if not (kinds[0].isnative and kinds[1].isnative and kinds[2].isnative):
            return None
        return query.shape, key.shape, None if value is None else value.shape, kinds

    def function_signature(self, function: Any) -> Any:
        # No plan reads what a function captures: NumPy runs the function of each call.
        return function.__code__ if type(function) is FunctionType else None

    def without_data(self, x: Array) -> Array:
        return numpy.empty(0, x.dtype)

    def use_own_settings(self) -> AbstractContextManager[object]:
        return _IgnoreFloatErrors()

    def map_tiles(self, pool: Callable[..., Arrays], tiling: Tiling) -> Arrays:
        def pool_tile(item: tuple[Span, list[Span]]) -> Arrays:
            with self.use_own_settings():
                return pool(*item)

        if len(tiling) == 1:
            return pool_tile(tiling[0])
        outs: list[Array] = []
        lock = threading.Lock()
        total = sum(span.size for span, _ in tiling)

        def fill_tile(item: tuple[Span, list[Span]]) -> None:
            parts = pool_tile(item)
            with lock:  # the first finished tile gives the shapes of the outputs
                if not outs:
                    shapes = [(*x.shape[:-2], total, x.shape[-1]) for x in parts]
                    shaped_parts = zip(shapes, parts, strict=True)
                    outs.extend(numpy.empty(shape, x.dtype) for shape, x in shaped_parts)
            at = slice(item[0].start, item[0].start + item[0].size)
            for out, part in zip(outs, parts, strict=True):
                out[..., at, :] = part

        with threads.single_threaded_blas():
            threads.map_parallel(fill_tile, tiling)
        return tuple(outs)

    def reduce_spans(
        self, lift: PartialStateFunction, merge: MergeFunction, start: Any, spans: Sequence[Span]
    ) -> Any:
        """Reduce groups of spans in parallel on all cores, unless this is a worker thread."""
        if len(spans) < 2 or threads.CORE_COUNT < 2 or threads.is_worker_thread():
            return super().reduce_spans(lift, merge, start, spans)

        def lift_span(span: Span) -> Any:
            with self.use_own_settings():
                return lift(span)

        with threads.single_threaded_blas():
            return threads.reduce_parallel(lift_span, merge, start, spans)

    def stable_topk(self, x: Array, k: int) -> tuple[Array, Array]:
        m = x.shape[-1]
        runs = max(4 * k, 128)
        if m < 16 * runs:
            order = _argsort_descending(x)[..., :k]
        else:
            # The k largest maxima of runs are k elements: the k-th largest element is not smaller
            # than the least of them.
            best = x[..., : m // runs * runs].reshape(*x.shape[:-1], m // runs, runs).max(axis=-2)
            least = numpy.partition(best, runs - k, axis=-1)[..., runs - k, None]
            is_candidate = numpy.logical_not(x < least)  # NaN counts as largest
            order = numpy.empty((*x.shape[:-1], k), numpy.intp)
            for at in numpy.ndindex(*x.shape[:-1]):
                candidates = numpy.flatnonzero(is_candidate[at])
                order[at] = candidates[_argsort_descending(x[at][candidates])[:k]]
        return numpy.take_along_axis(x, order, axis=-1), order

    def untied_top_mask(self, x: Array, k: int) -> Array | None:
        m = x.shape[-1]
        k = min(k, m)
        if k == 0:
            return None
        least = numpy.partition(x, m - k, axis=-1)[..., m - k, None]
        chosen = x >= least
        is_tied = (numpy.count_nonzero(chosen, -1, keepdims=True) != k) & (least != -math.inf)
        return None if is_tied.any() or math.isnan(numpy.add.reduce(x, None)) else chosen

    def fused_softmax(self, x: Array, live: Array | None) -> Array | None:
        results = self._shifted_exponentials(x, live)
        if results is None:
            return None
        _, out, total = results
        out /= total
        return out

    def fused_softmax_and_lse(self, x: Array, live: Array | None) -> tuple[Array, Array] | None:
        results = self._shifted_exponentials(x, live)
        if results is None:
            return None
        top, out, total = results
        out /= total
        return out, top + numpy.log(total)

    def _shifted_exponentials(self, x: Array, live: Array | None) -> Arrays | None:
        """Return each row's maximum, exp(x − maximum) and its sum; None if a sum is not finite."""
        if not x.shape[-1]:
            return None
        x = self.fill_unless(x, live, -math.inf)
        top = numpy.maximum.reduce(x, axis=-1, keepdims=True)
        out = x - top
        numpy.exp(out, out)
        total = numpy.add.reduce(out, axis=-1, keepdims=True)
        return (top, out, total) if math.isfinite(numpy.vdot(total, total)) else None

    # Faster versions of the methods of the base class, without its temporary arrays.

    def inner_products(self, query: Array, key: Array) -> Array:
        return query @ key.swapaxes(-1, -2)

    def position_range(self, start: Any, size: int, like: Array) -> Array:
        if start == 0 and size <= MAX_CACHED_POSITIONS:
            return _cached_positions(size)
        return numpy.arange(start, start + size, dtype=numpy.int32)

    def fill_unless(self, x: Array, live: LiveMask, other: float = 0.0) -> Array:
        if live is None:
            return x
        if x.dtype.kind != "f":
            return super().fill_unless(x, live, other)
        if x.size >= MIN_NUMBERS_TO_FILL_BITS and x.dtype == numpy.float32:
            return _fill_bits_unless(x, live, other)
        return numpy.where(live, x, x.dtype.type(other))

    def replace_nonfinite(self, x: Array, other: float = 0.0) -> Array:
        return x if self.is_surely_finite(x) else super().replace_nonfinite(x, other)

    def safe_divisor(self, x: Array) -> Array:
        return x if numpy.logical_and.reduce(x, None) else super().safe_divisor(x)

    def is_surely_finite(self, x: Array) -> bool:
        return math.isfinite(numpy.add.reduce(x, None))

    def value_range(self, x: Array) -> tuple[float, float]:
        return float(numpy.minimum.reduce(x, None)), float(numpy.maximum.reduce(x, None))

    def sigmoid(self, x: Array) -> Array:
        if x.dtype.kind != "f" or x.size == 0 or not x.min() >= MIN_PRECISE_EXPONENT:
            return super().sigmoid(x)
        out = numpy.negative(x)
        numpy.exp(out, out)
        out += 1
        return numpy.reciprocal(out, out)

    # NumPy reduces row by row. For many short rows the overhead exceeds the arithmetic.

    def row_max(self, x: Array) -> Array:
        short = x.shape[-1]
        if (
            not 0 < short < MIN_ROW_FOR_NUMPY_REDUCTION
            or x.size < MIN_ROW_FOR_NUMPY_REDUCTION * short
        ):
            return numpy.maximum.reduce(x, axis=-1, keepdims=True)
        columns = x.reshape(-1, short).T.copy()
        return numpy.maximum.reduce(columns, axis=0).reshape(*x.shape[:-1], 1)

    def row_sum(self, x: Array) -> Array:
        short = x.shape[-1]
        if (
            not 0 < short < MIN_ROW_FOR_NUMPY_REDUCTION
            or x.size < MIN_ROW_FOR_NUMPY_REDUCTION * short
            or x.dtype.kind != "f"
        ):
            return numpy.add.reduce(x, axis=-1, keepdims=True)
        return numpy.matmul(x, _cached_ones(short, x.dtype))

    def squared_norms(self, x: Array) -> Array:
        return numpy.einsum("...d,...d->...", x, x)

    def tanh(self, x: Array, spend: bool = False) -> Array:
        return numpy.tanh(x, out=x if spend else None)

    def exp_shifted(self, x: Array, top: Array, live: LiveMask, spend: bool = False) -> Array:
        x = numpy.subtract(x, top, out=x if spend else None)
        numpy.exp(x, out=x)
        return x if live is None else _zero_unless(x, live)

    def excess_over_threshold(self, x: Array, top: Array, tau: Array, live: LiveMask) -> Array:
        x = x - top
        x -= tau
        numpy.maximum(x, 0, out=x)
        return x if live is None else _zero_unless(x, live)

    def masked_gather(self, x: Array, mask: Array, top: Array) -> tuple[Array, Any]:
        positions = numpy.flatnonzero(mask)
        rows = mask.size // (mask.shape[-1] or 1)
        counts = numpy.bincount(positions // (mask.shape[-1] or 1), minlength=rows)
        width = int(counts.max(initial=0))
        filled = numpy.arange(width) < counts[:, None]
        out = numpy.full((rows, width), -numpy.inf, x.dtype)
        out[filled] = numpy.broadcast_to(x, mask.shape).reshape(-1)[positions]
        out = out.reshape(*mask.shape[:-1], width)
        out -= top
        return out, (positions, filled, mask.shape)

    def masked_scatter(self, picked: Array, at: Any, into: Array | None = None) -> Array:
        positions, filled, shape = at
        if into is None or into.shape != shape or not into.flags.carray:
            into = numpy.zeros(shape, picked.dtype)
        else:
            into.fill(0)
        into.reshape(-1)[positions] = picked.reshape(filled.shape)[filled]
        return into

    def sum_differences(self, query: Array, key: Array, power: int) -> Array | None:
        shapes, (d, width) = (query.shape[:-2], key.shape[:-2]), (query.shape[-1], key.shape[-1])
        if not 2 <= d == width <= MAX_SUMMED_COLUMNS or query.dtype != key.dtype:
            return None
        lead, n, m = numpy.broadcast_shapes(*shapes), query.shape[-2], key.shape[-2]
        pairs = math.prod((*lead, n, m))
        if pairs < MIN_SUMMED_PAIRS or query.dtype.kind != "f":
            return None
        if n < MIN_SUMMED_QUERIES:
            return _sum_differences_of_few(query, key, power, (*lead, n, m))
        columns = numpy.ascontiguousarray(numpy.moveaxis(key, -1, 0))[..., None, :]
        total = numpy.empty((*lead, n, m), query.dtype)
        rows = max(MAX_SUMMED_NUMBERS * n // pairs, 1)
        raise_to_power = numpy.abs if power == 1 else numpy.square
        for start in range(0, n, rows):
            part = total[..., start : start + rows, :]
            numpy.subtract(query[..., start : start + rows, :1], columns[0], out=part)
            raise_to_power(part, out=part)
            difference = numpy.empty_like(part, subok=False)
            for at in range(1, d):
                numbers = query[..., start : start + rows, at : at + 1]
                numpy.subtract(numbers, columns[at], out=difference)
                part += raise_to_power(difference, out=difference)
        return total

    def has_sum_differences(self, query: Array) -> bool:
        return bool(2 <= query.shape[-1] <= MAX_SUMMED_COLUMNS)

    def expand_squares(
        self, query: Array, key: Array, width: float, needs_exact: NeedsExact
    ) -> Array | None:
        is_float = query.dtype == key.dtype and query.dtype in (numpy.float32, numpy.float64)
        if not is_float or key.shape[-1] != query.shape[-1] or 0 in (*query.shape, *key.shape):
            return None
        if not all(isinstance(x, numpy.ndarray) for x in (query, key)):
            return None
        if key.size * query.shape[-2] < MIN_EXPANDED_NUMBERS:
            return None
        with self.use_own_settings():
            return squares.expand_squares(query, key, width, needs_exact, _SQUARE_OPERATIONS)

    def array_from_host(self, data: Any, like: Array, dtype: str) -> Array:
        return numpy.asarray(data, dtype=dtype)

    def measure_pair_numbers(
        self, function: Any, code: Hashable, query: Array, key: Array
    ) -> int | None:
        signature = code, query.shape[-1], key.shape[-1], query.dtype
        return get_or_compute(
            _PAIR_NUMBERS,
            signature,
            lambda: _count_pair_numbers(function, query, key),
            MAX_PAIR_NUMBERS_ENTRIES,
        )


def _sum_differences_of_few(query: Array, key: Array, power: int, shape: tuple[int, ...]) -> Array:
    """Return Σ |q − k|ᵖ (…, n, m) for few queries, in blocks of keys that fit the cache.

    Each key is read once. The dot product of a difference with itself is a fast sum of squares.
    """
    *_, m = shape
    total = numpy.empty(shape, query.dtype)
    step = max(MAX_DIFFERENCES_PER_BLOCK * m // max(total.size * query.shape[-1], 1), 1)
    ones = numpy.ones((query.shape[-1], 1), query.dtype)
    for start in range(0, m, step):
        keys = key[..., start : start + step, :]
        difference = query[..., :, None, :] - keys[..., None, :, :]
        if power == 1:
            sums = numpy.abs(difference, out=difference) @ ones
        else:
            sums = (difference[..., None, :] @ difference[..., :, None])[..., 0]
        total[..., start : start + step] = sums[..., 0]
    return total


def _count_pair_numbers(function: Any, query: Array, key: Array) -> int | None:
    """Run a score on a few rows of zeros and return the numbers that it holds per query and key.

    None if the memory cannot be measured, or if the function needs other data.
    """
    if tracemalloc.is_tracing():  # the caller measures: do not disturb it
        return None
    width = max(query.shape[-1], key.shape[-1], 1)
    rows = MAX_MEASURED_QUERIES, max(MAX_MEASURED_NUMBERS // MAX_MEASURED_QUERIES // width, 16)
    arrays = [
        numpy.zeros((size, x.shape[-1]), numpy.result_type(x, numpy.float32))
        for size, x in zip(rows, (query, key), strict=True)
    ]
    tracemalloc.start()
    try:
        with numpy.errstate(all="ignore"):
            function(*arrays)
        peak = tracemalloc.get_traced_memory()[1]
    except Exception:  # the caller's function may need other data
        return None
    finally:
        tracemalloc.stop()
    size: int = arrays[0].dtype.itemsize
    return max(round(peak / size / math.prod(rows)), 1)


def _argsort_descending(x: Array) -> Array:
    """Return the order of the last axis, largest first; ties: lowest position first."""
    # NumPy only sorts in ascending order. Two flips keep ties in order.
    upwards = numpy.argsort(numpy.flip(x, -1), axis=-1, kind="stable")
    return x.shape[-1] - 1 - numpy.flip(upwards, -1)


def _fill_bits_unless(x: Array, live: Array, other: float) -> Array:
    """Return float32 x where `live` (booleans) is True, and `other` elsewhere.

    `numpy.where` branches at each number. It takes several times longer if the branches are not
    predictable.
    """
    kept = numpy.negative(numpy.asarray(live).view(numpy.int8), dtype=numpy.int32)  # −1 keeps x
    if other == 0 and not math.copysign(1, other) < 0:
        filled = numpy.bitwise_and(x.view(numpy.int32), kept)
    else:
        bits = x.dtype.type(other).view(numpy.int32)
        filled = numpy.bitwise_xor(x.view(numpy.int32), bits)
        fits = numpy.broadcast_shapes(filled.shape, kept.shape) == filled.shape
        filled = numpy.bitwise_and(filled, kept, out=filled if fits else None)
        numpy.bitwise_xor(filled, bits, out=filled)
    return filled.view(x.dtype)


def _zero_unless(x: Array, live: Array) -> Array:
    numpy.copyto(x, 0, where=~live)
    return x


FRAMEWORK = NumPy()
_SQUARE_OPERATIONS = SquareOperations(
    FRAMEWORK.squared_norms,
    numpy.nonzero,
    numpy.broadcast_to,
    lambda x: numpy.maximum(x, 0, out=x),
)
