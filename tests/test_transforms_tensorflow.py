"""Every transform of TensorFlow, and every option where nothing but the widths is known."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

import qkv
from tests.cases import MASKS, WEIGHTINGS, case, covering
from tests.transforms import OPTIONS, cells, made
from tests.transforms_tensorflow import TENSORFLOW, close, slopes

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="no TensorFlow")


@pytest.mark.parametrize(
    ("transform", "option"), [*cells(TENSORFLOW, OPTIONS), ("tf.function, XLA", "entmax15")]
)
def test_tensorflow(transform, option):
    import tensorflow as tf

    TENSORFLOW[transform](OPTIONS[option].call, made(OPTIONS[option], tf.constant))


def _some():
    """Of the covering cases, enough for each weighting and each mask."""
    left = {*WEIGHTINGS, *MASKS}
    for names in covering():
        if left & {*names[1:]}:
            left -= {*names}
            yield names


@pytest.mark.parametrize("names", list(_some()), ids=" ".join)
def test_a_graph_that_knows_only_widths(names):
    """Batch and lengths unknown, keys shared among heads; values and gradients."""
    import tensorflow as tf

    drawn = case(*names)
    given = {name: tf.constant(x) for name, x in drawn.arrays.items()}

    def function(*x):
        now = dict(zip(given, x, strict=True))
        how = drawn.how(now)
        return qkv.attend(now["query"], now["key"], now["value"], **how)

    def spec(name, x):
        shape = [None] * len(x.shape)
        if name in ("query", "key", "value"):
            shape = (None, x.shape[1], None, x.shape[3])
        return tf.TensorSpec(shape, x.dtype)

    both = slopes(function)
    graph = tf.function(both, input_signature=[spec(*item) for item in given.items()])
    close(graph(*given.values()), both(*given.values()))


@pytest.mark.parametrize("option", ["multiplicative", "additive", "gated"])
def test_a_graph_that_knows_no_shape_of_a_learned_score(option):
    import tensorflow as tf

    given = made(OPTIONS[option], tf.constant)(5)
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in given[:3]]
    specs += [tf.TensorSpec([None] * len(x.shape), x.dtype) for x in given[3:]]
    both = slopes(OPTIONS[option].call)
    close(tf.function(both, input_signature=specs)(*given), both(*given))


def test_a_graph_that_knows_no_shape_of_a_bandwidth():
    import tensorflow as tf

    x, width = tf.constant(np.eye(4, 3)), tf.constant([0.5, 1.0, 2.0], tf.float64)
    specs = [tf.TensorSpec([None] * len(a.shape), a.dtype) for a in (x, width)]

    def call(x, width):
        return qkv.attend(x, x, x, score=qkv.scores.Gaussian(width))

    close(tf.function(call, input_signature=specs)(x, width), call(x, width))


def test_gradients_of_blocks_that_are_mapped_over():
    import tensorflow as tf

    given = made(OPTIONS["sigmoid"], tf.constant)(5)

    def call(*x):
        return OPTIONS["sigmoid"].call(*x, engine="streaming")

    def mapped(*x):
        stacked = [tf.stack([y] * 2) for y in x]
        return tf.vectorized_map(lambda y: call(*y), stacked)[1]

    close(slopes(mapped)(*given), slopes(call)(*given))
