"""Transforms of JAX and TensorFlow: each maps a function of arrays to another such function.

A framework's `found` differentiates such a function as `Asked` describes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

Function = Callable[..., Any]


class Asked(NamedTuple):
    """What to differentiate: Σ output · along. With `ways`, also the output along these directions;
    with `way`, also the gradient of the first array along it.
    """

    along: np.ndarray
    ways: list[np.ndarray]
    way: np.ndarray | None


class Found(NamedTuple):
    slopes: list[Any]
    push: Any
    bend: Any


class Jax:
    def __init__(self) -> None:
        import jax

        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_disable_most_optimizations", True)  # compiling is what takes long
        self.jax, self.np = jax, jax.numpy
        self.transforms: dict[str, Function] = {
            "plain": lambda f: f,
            "jit": jax.jit,
            "vmap": self.mapped,
            "jit of vmap": lambda f: jax.jit(self.mapped(f)),
            "vmap, other axes": self.mixed,
            "checkpoint": jax.checkpoint,
            "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
            "scan": self.scanned,
            "shard_map": self.sharded,
            "strict promotion": jax.jit,
            "x64 off": lambda f: f,
            "jit, x64 off": jax.jit,
        }

    def setting(self, transform: str) -> AbstractContextManager[Any]:
        if "x64 off" in transform:
            return self.jax.enable_x64(False)  # type: ignore[no-any-return]
        return nullcontext()

    def strict(self, transform: str) -> AbstractContextManager[Any]:
        if transform != "strict promotion":
            return nullcontext()
        from contextlib import ExitStack

        stack = ExitStack()
        stack.enter_context(self.jax.numpy_rank_promotion("raise"))
        stack.enter_context(self.jax.numpy_dtype_promotion("strict"))
        return stack

    def bends(self, transform: str) -> bool:
        return True

    def serves(self, transform: str, dtype: str) -> bool:
        return not ("x64 off" in transform and dtype == "float64")

    def array(self, x: np.ndarray, dtype: str) -> Any:
        return self.np.asarray(x) if x.dtype == bool else self.np.asarray(x, dtype)

    def numbers(self, x: Any) -> np.ndarray:
        return np.asarray(x).astype(float)

    def mapped(self, function: Function) -> Function:
        """Apply the function by vmap over three equal copies."""

        def call(*given: Any) -> Any:
            stacked = [self.np.stack([x] * 3) for x in given]
            return self.jax.vmap(function)(*stacked)[1]

        return call

    def mixed(self, function: Function) -> Function:
        """Map over every other array, along its last axis."""

        def call(*given: Any) -> Any:
            axes = [None if i % 2 else x.ndim for i, x in enumerate(given)]
            stacked = [
                x if axis is None else self.np.stack([x] * 2, axis)
                for x, axis in zip(given, axes, strict=True)
            ]
            return self.jax.vmap(function, tuple(axes))(*stacked)[0]

        return call

    def scanned(self, function: Function) -> Function:
        """Return the second of two scan steps with different queries."""

        def call(query: Any, *others: Any) -> Any:
            queries = self.np.stack([query * 2, query])
            step = lambda carry, x: (carry, function(x, *others))  # noqa: E731
            return self.jax.lax.scan(step, 0, queries)[1][1]

        return call

    def sharded(self, function: Function) -> Function:
        """Run on two devices with replicated arrays."""
        mesh = self.jax.make_mesh((2,), ("x",))
        spec = self.jax.sharding.PartitionSpec()

        def call(*given: Any) -> Any:
            shared = self.jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
            return shared(*given)

        return call

    def found(self, transform: str, function: Function, given: list[Any], ask: Asked) -> Found:
        """Compute everything in one compiled program, except for plain calls."""
        wide = "float64" if self.jax.config.jax_enable_x64 else "float32"
        along = self.np.asarray(ask.along, wide)

        def total(*given: Any) -> Any:
            return self.np.sum(function(*given).astype(wide) * along)

        def bend(first: Any, *others: Any) -> Any:
            way = self.np.asarray(ask.way, first.dtype)
            return self.jax.jvp(lambda x: self.jax.grad(total)(x, *others), (first,), (way,))[1]

        def everything(*given: Any) -> Any:
            slopes = self.jax.grad(total, tuple(range(len(given))))(*given)
            moved = tuple(
                self.np.asarray(t, x.dtype) for t, x in zip(ask.ways, given, strict=False)
            )
            push = self.jax.jvp(function, given, moved)[1] if moved else None
            return list(slopes), push, None if ask.way is None else bend(*given)

        once = everything if transform in ("plain", "x64 off") else self.jax.jit(everything)
        return Found(*once(*given))


class TensorFlow:
    def __init__(self) -> None:
        import tensorflow as tf

        tf.get_logger().setLevel("ERROR")
        self.tf = tf
        self.transforms: dict[str, Function] = {
            "plain": lambda f: f,
            "tf.function": lambda f: tf.function(f, autograph=False),
            "unknown lengths": lambda f: self.unknown(f, -2),
            "unknown batch": lambda f: self.unknown(f, 0),
            "nothing known": lambda f: self.unknown(f, None),
            "XLA": lambda f: tf.function(f, autograph=False, jit_compile=True),
            "AutoGraph": self.looped,
            "vectorized_map": self.mapped,
            "SavedModel": self.saved,
        }

    def setting(self, transform: str) -> AbstractContextManager[Any]:
        return nullcontext()

    strict = setting

    def serves(self, transform: str, dtype: str) -> bool:
        return True

    def bends(self, transform: str) -> bool:
        """Return whether TensorFlow itself has second derivatives, and forward ones, of `tf.cond`
        and `tf.while_loop`.
        """
        return transform in ("plain", "tf.function")

    def array(self, x: np.ndarray, dtype: str) -> Any:
        return self.tf.constant(x) if x.dtype == bool else self.tf.cast(self.tf.constant(x), dtype)

    def numbers(self, x: Any) -> np.ndarray:
        return np.asarray(x.numpy()).astype(float)

    def unknown(self, function: Any, axis: int | None) -> Function:
        """Run in a graph with one unknown axis of queries, keys, values and masks; or with only
        their last axis known, and no axis of the parameters.
        """
        tf = self.tf

        def shape(name: str, x: Any) -> list[int | None]:
            known = list(x.shape)
            if axis is None and name not in ("query", "key", "value"):
                return [None] * len(known)
            if name in ("query", "key", "value", "mask"):
                for i in range(len(known) - 1) if axis is None else [axis]:
                    known[i] = None
            return known

        graphs: list[Function] = []

        def call(*given: Any) -> Any:
            if not graphs:
                pairs = zip(function.names, given, strict=True)
                specs = [tf.TensorSpec(shape(name, x), x.dtype) for name, x in pairs]
                graphs.append(tf.function(function, input_signature=specs, autograph=False))
            return graphs[0](*given)

        return call

    def looped(self, function: Function) -> Function:
        """Put a loop and a branch on array values, which AutoGraph rewrites, around the call."""
        tf = self.tf

        def call(*given: Any) -> Any:
            total = function(*given)
            for i in tf.range(2):
                if i > 0:
                    total += function(*given)
            return total / 2

        return tf.function(call)  # type: ignore[no-any-return]

    def mapped(self, function: Function) -> Function:
        tf = self.tf

        def call(*given: Any) -> Any:
            stacked = [tf.stack([x] * 2) for x in given]
            return tf.vectorized_map(lambda x: function(*x), stacked)[1]

        return call

    def saved(self, function: Function) -> Function:
        tf = self.tf

        loaded: list[Any] = []

        def call(*given: Any) -> Any:
            if not loaded:
                module = tf.Module()
                specs = [tf.TensorSpec.from_tensor(x) for x in given]
                module.run = tf.function(function, input_signature=specs)
                with tempfile.TemporaryDirectory() as folder:
                    tf.saved_model.save(module, folder)
                    loaded.append(tf.saved_model.load(folder))
            return loaded[0].run(*given)

        return call

    def found(self, transform: str, function: Function, given: list[Any], ask: Asked) -> Found:
        tf = self.tf
        zero = {"unconnected_gradients": "zero"}

        def slopes() -> list[Any]:
            with tf.GradientTape() as tape:
                tape.watch(given)
                total = tf.reduce_sum(tf.cast(function(*given), "float64") * ask.along)
            return [tf.convert_to_tensor(x) for x in tape.gradient(total, given, **zero)]

        bend = push = None
        if ask.way is not None:
            with tf.GradientTape() as outer:
                outer.watch(given[0])
                turned = tf.reduce_sum(tf.cast(slopes()[0], "float64") * ask.way)
            bend = tf.convert_to_tensor(outer.gradient(turned, given[0], **zero))
        if ask.ways:
            moved = [tf.cast(tf.constant(t), x.dtype) for t, x in zip(ask.ways, given, strict=True)]
            with tf.autodiff.ForwardAccumulator(given, moved) as forward:
                out = function(*given)
            push = forward.jvp(out, **zero)
        return Found(slopes(), push, bend)
