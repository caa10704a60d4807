"""TensorFlow, eager and inside `tf.function`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from qkv.frameworks import tensorflow_namespace
from qkv.frameworks.base import (
    BackwardFunction,
    ForwardFunction,
    Framework,
    ReferenceFunction,
    captures_arrays,
)
from qkv.util.types import Array, ArrayFunction, Arrays, PartialStateFunction, PullBack, Shape, Span


class TensorFlow(Framework):
    name = "tensorflow"
    xp = tensorflow_namespace
    has_gradients = needs_disjoint_spans = True

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

    def array_from_host(self, data: Any, like: Array, dtype: str) -> Array:
        return tf.cast(tf.constant(np.asarray(data)), getattr(tf, dtype))

    def device_of(self, x: Array) -> Any:
        return None

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
