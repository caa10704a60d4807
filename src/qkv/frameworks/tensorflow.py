"""TensorFlow, eager and inside `tf.function`."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tensorflow_context
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.pywrap_tfe import TFE_Py_TapeSetIsEmpty

from qkv.frameworks import squares, tensorflow_namespace
from qkv.frameworks.base import (
    BackwardFunction,
    ForwardFunction,
    Framework,
    ReferenceFunction,
    Tiling,
    captures_arrays,
    exclude_transforms,
)
from qkv.frameworks.squares import MIN_EXPANDED_COLUMNS, NeedsExact
from qkv.util.caches import memoize
from qkv.util.types import Array, ArrayFunction, Arrays, PartialStateFunction, PullBack, Shape, Span


class TensorFlow(Framework):
    name = "tensorflow"
    xp = tensorflow_namespace
    has_gradients = needs_disjoint_spans = compiles_calls = reruns_user_code = True
    has_immutable_arrays = True
    eager_block_numbers = 2**22

    def matmul(self, x: Array, y: Array) -> Array:
        return tensorflow_namespace.matmul(x, y)

    def sigmoid(self, x: Array) -> Array:
        return tf.sigmoid(x)

    def dtype_name(self, x: Array) -> str:
        return str(x.dtype.name)

    def axis_length(self, x: Array, axis: int) -> Any:
        known = x.shape[axis]
        return tf.shape(x)[axis] if known is None else known

    def dynamic_shape(self, x: Array) -> tuple[Any, ...]:
        return tensorflow_namespace.dynamic_shape(x)

    def full(self, shape: Shape, value: float, like: Array) -> Array:
        if None in shape:  # lengths of `like` that are unknown until the graph runs
            shape = tuple(
                self.axis_length(like, i) if n is None else n for i, n in enumerate(shape)
            )
        return super().full(shape, value, like)

    def as_plain_array(self, x: Array, name: str = "x") -> Array:
        return tf.convert_to_tensor(x)  # reads a Variable once

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        x = tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else x
        return np.asarray(x.numpy())

    def concrete_value(self, x: Array) -> np.ndarray[Any, Any] | None:
        return None if self.is_traced(x) else self.to_numpy(x)

    def is_traced(self, x: Array) -> bool:
        return not hasattr(x, "numpy")

    def is_in_fixed_graph(self, x: Array) -> bool:
        return self.is_traced(x) and not _PLAN.is_traced

    def array_signature(self, query: Array, key: Array, value: Array | None) -> Any:
        if not tf.executing_eagerly():
            return None
        arrays = (query, key) if value is None else (query, key, value)
        kinds = tuple(map(type, arrays))
        if not _EAGER_TYPES.issuperset(kinds):
            return None
        shapes = [tuple(x.shape) for x in arrays]
        return *shapes, *[None] * (3 - len(shapes)), kinds, *(x.dtype for x in arrays)

    def without_data(self, x: Array) -> Array:
        return tf.TensorSpec(x.shape, x.dtype)

    def compile_function(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        return _CompiledFunction(function)

    def array_from_host(self, data: Any, like: Array, dtype: str) -> Array:
        return tf.cast(tf.constant(np.asarray(data)), getattr(tf, dtype))

    def device_of(self, x: Array) -> Any:
        return None

    def zero_rows_if_nonfinite(self, x: Array, zero_rows: ArrayFunction) -> Array:
        if not self._has_branches(x) or math.prod(x.shape) < MIN_NUMBERS_FOR_BRANCH:
            return zero_rows(x)

        def run(x: Array) -> Array:
            is_finite = tf.math.is_finite(tf.reduce_sum(x))
            return tf.cond(is_finite, lambda: x, lambda: zero_rows(x))

        # A gradient that is not finite must not reach these rows, either.
        return tf.custom_gradient(lambda x: (run(x), run))(x)

    def _has_branches(self, x: Array) -> bool:
        """Return whether branches and their gradients cost little: not in `vectorized_map`, and not
        for unknown lengths in XLA."""
        return None not in x.shape and "loop_body" not in tf.get_current_name_scope()

    def fused_softmax(self, x: Array, live: Array | None) -> Array | None:
        if not self._has_branches(x) or 0 in x.shape:
            return None
        x = self.fill_unless(x, live, -math.inf)
        top = tf.reduce_max(tf.stop_gradient(x), axis=-1, keepdims=True)
        is_finite = tf.math.is_finite(top)

        def compute_safely() -> Array:
            e = tf.exp(x - tf.where(is_finite, top, tf.zeros_like(top)))
            return e / self.safe_divisor(tf.reduce_sum(e, axis=-1, keepdims=True))

        return tf.cond(tf.reduce_all(is_finite), lambda: tf.nn.softmax(x), compute_safely)

    def sum_differences(self, query: Array, key: Array, power: int) -> Array | None:
        if power != 2 or not self._has_plain_rows(query, key):
            return None
        return _sum_squares(query, key, None)

    def expand_squares(
        self, query: Array, key: Array, width: float, needs_exact: NeedsExact
    ) -> Array | None:
        if not self._has_plain_rows(query, key):
            return None
        query, key = (x if width == 1 else x / width for x in (query, key))
        return _sum_squares(query, key, needs_exact)

    def _has_plain_rows(self, query: Array, key: Array) -> bool:
        if not (self.has_sum_differences(query) and self.has_sum_differences(key)):
            return False
        leads = (*query.shape[:-2], *key.shape[:-2])
        return query.shape[-1] == key.shape[-1] and None not in leads

    def has_sum_differences(self, query: Array) -> bool:
        is_wide = query.dtype == tf.float32 and (query.shape[-1] or 0) >= MIN_EXPANDED_COLUMNS
        return is_wide and len(query.shape) <= 4

    def stable_topk(self, x: Array, k: int) -> tuple[Array, Array]:
        known = x.shape[-1]
        most = tf.minimum(k, tf.shape(x)[-1]) if known is None else min(k, known)
        best, at = tf.math.top_k(x, most)  # of equal elements, the first comes first
        return best, at

    def draw_seed(self, like: Array) -> Any:
        return tf.random.uniform((), maxval=2**31 - 1, dtype=tf.int32)

    def seed_from_generator(self, generator: Any) -> Any:
        if isinstance(generator, tf.random.Generator):
            return generator.uniform((), maxval=2**31 - 1, dtype=tf.int32)
        return generator if tf.is_tensor(generator) else super().seed_from_generator(generator)

    def detach(self, x: Array) -> Array:
        return tf.stop_gradient(x)

    def new_accumulator(self, like: Array) -> Any:
        return _TileAccumulator(self.static_shape(like), like.dtype)

    def add_to_span(self, total: Any, piece: Array, rows: Span | None, cols: Span | None) -> Any:
        total.add_tile(piece, rows, cols)
        return total

    def accumulator_total(self, accumulator: Any) -> Array:
        return accumulator.join_tiles()

    def map_tiles(self, pool: Callable[..., Arrays], tiling: Tiling) -> Arrays:
        _PLAN.check_length(tiling)
        return super().map_tiles(pool, tiling)

    def fold_tiles(self, step: Callable[[Any, Span, Any], Any], carry: Any, tiling: Tiling) -> Any:
        _PLAN.check_length(tiling)
        return super().fold_tiles(step, carry, tiling)

    def cond(self, condition: Array, yes: ArrayFunction, no: ArrayFunction, *args: Array) -> Array:
        # XLA cannot differentiate a branch with an axis of unknown length.
        unknown = any(None in x.shape for x in args)
        if unknown and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            return no(*args)
        return tf.cond(condition, lambda: yes(*args), lambda: no(*args))

    def loop_until(
        self, done: ArrayFunction, step: PartialStateFunction, state: Any, limit: int
    ) -> Any:
        if not self.is_traced(done(state)):
            return super().loop_until(done, step, state, limit)
        return tf.while_loop(
            lambda *s: tf.logical_not(done(s)), lambda *s: step(s), state, maximum_iterations=limit
        )

    def may_capture_arrays(self, function: Callable[..., Any]) -> bool:
        return captures_arrays(function, "tensorflow")

    def vjp(self, function: ArrayFunction, *args: Array) -> tuple[Array, PullBack]:
        args = _distinct_tensors(args)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(args)
            out = function(*args)
        return out, lambda gradient: tuple(tape.gradient(out, args, gradient))

    def custom_gradient(
        self,
        forward: ForwardFunction,
        backward: BackwardFunction,
        reference: ReferenceFunction,
        leaves: Sequence[Array],
    ) -> Arrays:
        if "loop_body" in tf.get_current_name_scope():  # vectorized_map ignores custom gradients
            return reference(*leaves)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def run_forward(*leaves: Array) -> Any:
            # Without stop_gradient an outer tape would record and keep every block.
            outputs, kept = forward(*map(tf.stop_gradient, leaves))
            return outputs, lambda *gradients: _leaf_gradients(
                backward, reference, leaves, kept, gradients
            )

        out = run_forward(*leaves)
        return tuple(out) if isinstance(out, list | tuple) else (out,)


class _PlanState(threading.local):
    """Whether this thread traces a plan."""

    is_traced = False

    def check_length(self, tiling: Tiling) -> None:
        if self.is_traced and sum(max(len(cols), 1) for _, cols in tiling) > MAX_BLOCKS_PER_GRAPH:
            raise _LongGraphError


class _LongGraphError(Exception):
    """A plan has so many blocks that a graph of them saves little and takes long to trace."""


_PLAN = _PlanState()
_EAGER_TYPES = frozenset((type(tf.constant(0.0)), ResourceVariable))

MIN_NUMBERS_FOR_BRANCH = 2**16
"""An operation on fewer numbers takes less time than a branch."""

MAX_BLOCKS_PER_GRAPH = 8
"""The most blocks of a plan that is traced. The operations of a block take longer than Python."""

MAX_GRAPHS_PER_PLAN = 64
"""The most shapes for which a plan keeps a graph. Calls with other shapes run without one."""

MAX_SHAPES_PER_PLAN = 1024
"""The most shapes that a plan recognizes when they come again."""


class _CompiledFunction:
    """A function of arrays that becomes a graph when it is called again with the same shapes.

    Tracing takes about ten times as long as a call. So a loop over growing lengths traces nothing.
    The graph runs the operations of the first call as they are, so its results have the same bits.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.runs: dict[Any, Callable[..., Any] | None] = {}
        self.graph_count = 0

    def __call__(self, *arrays: Array) -> Any:
        if not tf.executing_eagerly() or tf.config.functions_run_eagerly():
            return self.function(*arrays)
        arrays = tuple(map(tf.convert_to_tensor, arrays))  # reads each variable once
        if TFE_Py_TapeSetIsEmpty():
            with exclude_transforms():
                return self._run(arrays, True)
        return self._run(arrays, False)

    def _run(self, arrays: Sequence[Array], is_forward: bool) -> Any:
        signature = (is_forward, *[(tuple(x.shape), x.dtype) for x in arrays])
        run = self.runs.get(signature)
        if run is None:
            has_come_before = signature in self.runs
            if has_come_before and self.graph_count < MAX_GRAPHS_PER_PLAN:
                run = self._trace(arrays)
            if len(self.runs) < MAX_SHAPES_PER_PLAN:
                self.runs[signature] = run
        return (run or self.function)(*arrays)

    def _trace(self, arrays: Sequence[Array]) -> Callable[..., Any]:
        """Return the graph; the function itself if it reads values or has many blocks."""
        before, _PLAN.is_traced = _PLAN.is_traced, True
        try:
            specs = [tf.TensorSpec(x.shape, x.dtype) for x in arrays]
            graph = tf.function(self.function, autograph=False).get_concrete_function(*specs)
        except Exception:  # whatever it is: eager operations are what the caller asked for
            return self.function
        finally:
            _PLAN.is_traced = before
        self.graph_count += 1

        def run_graph(*arrays: Array) -> Any:
            context = tensorflow_context.context()
            options = context.function_call_options
            context.function_call_options = _options_without_rewriting()
            try:
                return graph(*arrays)
            finally:
                context.function_call_options = options

        return run_graph


@memoize("frameworks.tensorflow_call_options")
def _options_without_rewriting() -> Any:
    """Return options for calls of graphs: the optimizer of graphs would change the rounding."""
    config = tensorflow_context.context().config
    config.allow_soft_placement = True
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return tensorflow_context.FunctionCallOptions(config_proto=config)


MAX_EXPANDED_SQUARE = 2.0**10
"""Largest ‖q‖² + ‖k‖² around the mean key at which float64 expands a square of float32 arrays."""


def _sum_squares(query: Array, key: Array, needs_exact: NeedsExact | None) -> Array:
    """Return ‖q − k‖² (…, n, m) of float32 arrays, from a matrix product in float64.

    Its error is less than the rounding of the result to float32, or 1e-11. If the arrays have a
    larger range or NaN, the differences are squared. The gradient is a matrix product too. With
    `needs_exact` the product is in float32, by the rule of `squares.expand_squares`; if a pair
    needs its exact square, all are computed in float64.
    """

    def expand_square(q: Array, k: Array, norms: Array, query: Array, key: Array) -> Array:
        total = norms - 2.0 * tensorflow_namespace.matmul(q, tf.linalg.matrix_transpose(k))
        unit = 2.0**-53 * (query.shape[-1] + 8)
        return tf.cast(tf.where(total > norms * unit, total, tf.zeros_like(total)), tf.float32)

    def square_differences(q: Array, k: Array, norms: Array, query: Array, key: Array) -> Array:
        difference = query[..., :, None, :] - key[..., None, :, :]
        return tf.reduce_sum(difference * difference, -1)

    def centre_rows(query: Array, key: Array) -> tuple[Array, Array, Array, Array]:
        """Return both around the mean key, ‖q‖² + ‖k‖² of all pairs, and the largest such sum."""
        centre = tf.reduce_mean(tf.reshape(key, (-1, key.shape[-1])), 0)
        q, k = query - centre, key - centre
        sums = [tf.reduce_sum(x * x, -1, keepdims=True) for x in (q, k)]
        norms = sums[0] + tf.linalg.matrix_transpose(sums[1])
        return q, k, norms, sum(tf.reduce_max(x) for x in sums)

    def compute_wide(query: Array, key: Array) -> Array:
        q, k, norms, most = centre_rows(tf.cast(query, tf.float64), tf.cast(key, tf.float64))
        in_range = most <= MAX_EXPANDED_SQUARE  # not for NaN
        return FRAMEWORK.cond(in_range, expand_square, square_differences, q, k, norms, query, key)

    def compute_narrow(query: Array, key: Array, needs_exact: NeedsExact) -> Array:
        q, k, norms, most = centre_rows(query, key)
        product = tensorflow_namespace.matmul(q, tf.linalg.matrix_transpose(k))
        total = tf.nn.relu(norms - 2.0 * product)
        error = norms * (squares.UNIT_BY_BYTES[4] * (query.shape[-1] + 8))
        exact, is_precise = needs_exact(total, error), most <= squares.MAX_EXPANDED_SQUARE
        if exact is not None:
            is_precise = tf.logical_and(is_precise, tf.logical_not(tf.reduce_any(exact)))
        return FRAMEWORK.cond(
            is_precise,
            lambda total, *_: total,
            lambda _, *arrays: compute_wide(*arrays),
            *(total, query, key),
        )

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(query: Array, key: Array) -> Any:
        total = (
            compute_wide(query, key)
            if needs_exact is None
            else compute_narrow(query, key, needs_exact)
        )

        def pull_back(gradient: Array) -> tuple[Array, Array]:
            # Σ 2 (q − k) g, around the mean key, where the products lose fewest digits.
            middle = tf.reduce_mean(tf.reshape(key, (-1, key.shape[-1])), 0)
            q, k = query - middle, key - middle
            sums = [tf.reduce_sum(gradient, axis, keepdims=True) for axis in (-1, -2)]
            across = tf.linalg.matrix_transpose(gradient)
            return (
                2.0 * _sum_to_shape(q * sums[0] - tensorflow_namespace.matmul(gradient, k), query),
                2.0
                * _sum_to_shape(
                    k * tf.linalg.matrix_transpose(sums[1])
                    - tensorflow_namespace.matmul(across, q),
                    key,
                ),
            )

        return total, pull_back

    out: Array = run(query, key)
    return out


def _sum_to_shape(x: Array, like: Array) -> Array:
    """Return x summed over the axes along which `like` was broadcast."""
    extra = len(x.shape) - len(like.shape)
    x = tf.reduce_sum(x, list(range(extra))) if extra else x
    axes = [i for i, n in enumerate(like.shape) if n == 1 and x.shape[i] != 1]
    return tf.reduce_sum(x, axes, keepdims=True) if axes else x


def _distinct_tensors(arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Return a copy of each array's handle, so that each has its own gradient."""
    return tuple(map(tf.identity, arrays))


def _leaf_gradients(
    backward: Any,
    reference: Any,
    leaves: Sequence[Array],
    saved: Sequence[Array],
    gradients: Sequence[Array],
) -> list[Array | None]:
    """Return the gradients of the leaves. They can be differentiated again."""
    count = len(leaves)
    smooth = [i for i, x in enumerate(leaves) if x.dtype.is_floating]
    unconnected = tf.UnconnectedGradients.ZERO

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def first_gradients(*arrays: Array) -> Any:
        fixed = [tf.stop_gradient(x) for x in arrays]
        slopes = backward(fixed[:count], saved, fixed[count:])
        slopes = [tf.zeros_like(leaves[i]) if slopes[i] is None else slopes[i] for i in smooth]

        def second_gradients(*along: Array) -> list[Array]:
            own = _distinct_tensors(arrays)
            with tf.GradientTape() as outer:
                outer.watch(own)
                with tf.GradientTape() as inner:
                    inner.watch(own)
                    outputs = reference(*own[:count])
                first = inner.gradient(
                    outputs,
                    [own[i] for i in smooth],
                    list(own[count:]),
                    unconnected_gradients=unconnected,
                )
            return list(outer.gradient(first, own, list(along), unconnected_gradients=unconnected))

        return slopes, second_gradients

    out: list[Array | None] = [None] * count
    for i, slope in zip(smooth, first_gradients(*leaves, *gradients), strict=True):
        out[i] = slope
    return out


class _TileAccumulator:
    """A sum of pieces at spans of the last two axes; TensorFlow's arrays are immutable."""

    def __init__(self, shape: Shape, dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype
        self.tiles: dict[tuple[int, int, int, int], Array] = {}

    def add_tile(self, piece: Array, rows: Span | None, cols: Span | None) -> None:
        at = (*self._span_bounds(rows, -2), *self._span_bounds(cols, -1))
        self.tiles[at] = self.tiles[at] + piece if at in self.tiles else piece

    def _span_bounds(self, span: Span | None, axis: int) -> tuple[int, int]:
        if span is None or self.shape[axis] == 1:
            return 0, self.shape[axis]
        return span.start, span.start + span.size

    def join_tiles(self) -> Array:
        def tile_edges(axis: int, low: int) -> list[int]:
            cuts = {edge for at in self.tiles for edge in at[low : low + 2]}
            return sorted(cuts | {0, self.shape[axis]})

        tops, lefts = tile_edges(-2, 0), tile_edges(-1, 2)
        lines = []
        for top, bottom in itertools.pairwise(tops):
            cells = [
                self._tile_at(top, bottom, left, right) for left, right in itertools.pairwise(lefts)
            ]
            lines.append(tf.concat(cells, -1))
        return tf.concat(lines, -2) if lines else tf.zeros(self.shape, self.dtype)

    def _tile_at(self, top: int, bottom: int, left: int, right: int) -> Array:
        found = self.tiles.get((top, bottom, left, right))
        if found is None:
            return tf.zeros((*self.shape[:-2], bottom - top, right - left), self.dtype)
        return found


FRAMEWORK = TensorFlow()
