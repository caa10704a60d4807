"""Every transform of TensorFlow, and every option where nothing but the widths is known."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import qkv
from tests.cases import MASKS, WEIGHTINGS, case, covering
from tests.sampling import sample
from tests.transforms import OPTIONS, build_arguments, cells
from tests.transforms_tensorflow import TENSORFLOW, assert_close, compute_gradients

pytestmark = [
    pytest.mark.sample_of_module(4),
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="no TensorFlow"),
]


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("transform", "option"), [*cells(TENSORFLOW, OPTIONS), ("tf.function, XLA", "entmax15")]
)
def test_tensorflow(transform, option):
    import tensorflow as tf

    TENSORFLOW[transform](OPTIONS[option].call, build_arguments(OPTIONS[option], tf.constant))


def _some():
    """Of the covering cases, enough for each weighting and each mask."""
    left = {*WEIGHTINGS, *MASKS}
    for names in covering():
        if left & {*names[1:]}:
            left -= {*names}
            yield names


@pytest.mark.sample(3)
@pytest.mark.parametrize("names", list(_some()), ids=" ".join)
def test_a_graph_that_knows_only_widths(names):
    """Batch and lengths unknown, keys shared among heads; values and gradients."""
    import tensorflow as tf

    drawn = case(*names)
    inputs = {name: tf.constant(x) for name, x in drawn.arrays.items()}

    def function(*x):
        now = dict(zip(inputs, x, strict=True))
        options = drawn.build_options(now)
        return qkv.attend(now["query"], now["key"], now["value"], **options)

    def spec(name, x):
        shape = [None] * len(x.shape)
        if name in ("query", "key", "value"):
            shape = (None, x.shape[1], None, x.shape[3])
        return tf.TensorSpec(shape, x.dtype)

    both = compute_gradients(function)
    graph = tf.function(both, input_signature=[spec(*item) for item in inputs.items()])
    assert_close(graph(*inputs.values()), both(*inputs.values()))


@pytest.mark.parametrize("option", ["multiplicative", "additive", "gated"])
def test_a_graph_that_knows_no_shape_of_a_learned_score(option):
    import tensorflow as tf

    inputs = build_arguments(OPTIONS[option], tf.constant)(5)
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in inputs[:3]]
    specs += [tf.TensorSpec([None] * len(x.shape), x.dtype) for x in inputs[3:]]
    both = compute_gradients(OPTIONS[option].call)
    assert_close(tf.function(both, input_signature=specs)(*inputs), both(*inputs))


def test_a_graph_that_knows_no_shape_of_a_bandwidth():
    import tensorflow as tf

    x, width = tf.constant(np.eye(4, 3)), tf.constant([0.5, 1.0, 2.0], tf.float64)
    specs = [tf.TensorSpec([None] * len(a.shape), a.dtype) for a in (x, width)]

    def call(x, width):
        return qkv.attend(x, x, x, score=qkv.scores.Gaussian(width))

    assert_close(tf.function(call, input_signature=specs)(x, width), call(x, width))


def test_gradients_of_blocks_that_are_mapped_over():
    import tensorflow as tf

    inputs = build_arguments(OPTIONS["sigmoid"], tf.constant)(5)

    def call(*x):
        return OPTIONS["sigmoid"].call(*x, engine="streaming")

    def mapped(*x):
        stacked = [tf.stack([y] * 2) for y in x]
        return tf.vectorized_map(lambda y: call(*y), stacked)[1]

    assert_close(compute_gradients(mapped)(*inputs), compute_gradients(call)(*inputs))


LOADED = """
import sys
import numpy as np
import tensorflow as tf

x = np.load(sys.argv[1] + "/x.npy")
for name in sys.argv[2:]:
    model = tf.saved_model.load(f"{sys.argv[1]}/{name}")
    given = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(given)
        out = model.run(given)
        loss = tf.reduce_sum(out**2)
    found = [out, *tape.gradient(loss, [given, *model.parameters])]
    np.savez(f"{sys.argv[1]}/{name}.npz", *[tf.convert_to_tensor(y).numpy() for y in found])
assert "qkv" not in sys.modules
"""
"""What a process that knows nothing of us makes of saved models: outputs and gradients."""


def test_saved_models_with_parameters_inside_a_score(tmp_path):
    """With custom gradients saved and without; the variables are attributes of the module too."""
    import tensorflow as tf

    from qkv import scores, weightings

    rng = np.random.default_rng(4)

    def drawn(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def attending(options):
        return lambda a: qkv.attend(a, a, a, **options)

    kinds = {
        "additive": lambda new: {"score": scores.Additive(*map(new, (W, W + 1, W[:, 0])))},
        "gaussian": lambda new: {"score": scores.Gaussian(new(np.float32(0.8)))},
        "entmax": lambda new: {"weighting": weightings.Entmax(new(np.float32(1.4)))},
    }
    W, x, want = drawn(6, 4), drawn(1, 2, 7, 4), {}
    np.save(tmp_path / "x.npy", x)
    for kind in sample(kinds, 1):
        build = kinds[kind]
        for new in (tf.Variable, tf.constant):
            for gradients in (False, True) if new is tf.Variable else (True,):
                settings, module = build(new), tf.Module()
                held = [y for record in settings.values() for y in vars(record).values()]
                module.parameters = [y for y in held if isinstance(y, tf.Variable)]
                module.run = tf.function(
                    attending(settings),
                    input_signature=[tf.TensorSpec((1, 2, None, 4), tf.float32)],
                )
                inputs = tf.constant(x)
                with tf.GradientTape() as tape:
                    tape.watch(inputs)
                    out = module.run(inputs)
                    loss = tf.reduce_sum(out**2)
                name = f"{kind} {new.__name__} {gradients}"
                want[name] = [out, *tape.gradient(loss, [inputs, *module.parameters])]
                options = tf.saved_model.SaveOptions(experimental_custom_gradients=gradients)
                tf.saved_model.save(module, str(tmp_path / name), options=options)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", LOADED, str(tmp_path), *want]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    for name, results in want.items():
        actual = np.load(tmp_path / f"{name}.npz")
        for one, other in zip(results, actual.values(), strict=True):
            np.testing.assert_allclose(tf.convert_to_tensor(one), other, rtol=1e-4, atol=1e-5)
