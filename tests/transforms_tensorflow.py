"""TensorFlow's transforms, each as one check in the form of tests/transforms.py."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np

from tests.transforms import Check, Function, Make, N


def assert_close(got: Any, want: Any, atol: float = 1e-9) -> None:
    import tensorflow as tf

    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-7)


def compute_gradients(function: Function) -> Function:
    """The output, and the gradients of the sum of its squares."""
    import tensorflow as tf

    def both(*args: Any) -> Any:
        floats = [x for x in args if x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            out = function(*args)
            loss = tf.reduce_sum(out * out)
        return out, tape.gradient(loss, floats, unconnected_gradients="zero")

    return both


def _twice(function: Function) -> Function:
    """The gradient of the size of a gradient."""
    import tensorflow as tf

    def steep(*args: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(args[0])
            size = tf.reduce_sum(compute_gradients(function)(*args)[1][0] ** 2)
        return tape.gradient(size, args[0], unconnected_gradients="zero")

    return steep


def _function(**options: Any) -> Check:
    def check(function: Function, make: Make) -> None:
        import tensorflow as tf

        both = compute_gradients(function)
        assert_close(tf.function(both, **options)(*make(N)), both(*make(N)))

    return check


def _unknown(*lengths: int) -> Check:
    """One graph for batches and, where there are several, for lengths that only a run will tell."""

    def check(function: Function, make: Make) -> None:
        import tensorflow as tf

        def spec(place: int, *seen: Any) -> Any:
            sizes = [set(size) for size in zip(*(x.shape for x in seen), strict=True)]
            shape = [size.pop() if len(size) == 1 else None for size in sizes]
            return tf.TensorSpec([None, *shape[1:]] if place < 3 else shape, seen[0].dtype)

        both, inputs = compute_gradients(function), [make(n) for n in lengths]
        specs = [spec(i, *x) for i, x in enumerate(zip(*inputs, strict=True))]
        graph = tf.function(both, input_signature=specs)
        for x in inputs:
            assert_close(graph(*x), both(*x))

    return check


def _autograph(function: Function, make: Make) -> None:
    """A loop and a branch on numbers, which AutoGraph rewrites, around the call."""
    import tensorflow as tf

    @tf.function
    def looped(query: Any, *others: Any) -> Any:
        total = function(query, *others)
        for i in tf.range(2):
            if tf.reduce_sum(query) < 1e9:
                total += function(query * tf.cast(i, query.dtype), *others)
        return total

    query, *others = make(N)
    assert_close(looped(query, *others), sum(function(query * i, *others) for i in (1.0, 0.0, 1.0)))


def _second(function: Function, make: Make) -> None:
    import tensorflow as tf

    assert_close(tf.function(_twice(function))(*make(N)), _twice(function)(*make(N)))


def _mapped(function: Function, make: Make) -> None:
    import tensorflow as tf

    many = [[x * (1 + i / 4) if x.dtype.is_floating else x for x in make(N)] for i in range(3)]
    stacked = [tf.stack(x) for x in zip(*many, strict=True)]
    result = tf.vectorized_map(lambda inputs: function(*inputs), stacked)
    assert_close(result, tf.stack([function(*x) for x in many]))


def _saved(function: Function, make: Make) -> None:
    import tensorflow as tf

    module = tf.Module()
    module.run = tf.function(
        function, input_signature=[tf.TensorSpec.from_tensor(x) for x in make(N)]
    )
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder)
        assert_close(tf.saved_model.load(folder).run(*make(N)), function(*make(N)))


TENSORFLOW: dict[str, Check] = {
    "tf.function": _function(),
    "tf.function, unknown batch": _unknown(N),
    "tf.function, unknown lengths": _unknown(N, N + 3),
    "tf.function, AutoGraph": _autograph,
    "tf.function, XLA": _function(jit_compile=True),
    "second derivative": _second,
    "vectorized_map": _mapped,
    "SavedModel": _saved,
}
