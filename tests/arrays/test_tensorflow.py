"""What TensorFlow's own operations do not do as they say."""

from __future__ import annotations

import numpy as np
import pytest

import qkv

tf = pytest.importorskip("tensorflow")


@pytest.mark.parametrize("lead", [(), (1,), (1, 1)])
def test_one_matrix_for_a_batch_of_one_head(lead):
    rng = np.random.default_rng(0)
    query = rng.normal(size=(3, 1, 10, 8)).astype("float32")
    key, value = (rng.normal(size=(*lead, 8, size)).astype("float32") for size in (8, 6))
    want = qkv.attend(query, key, value)
    attend = tf.function(qkv.attend, autograph=False)
    arrays = [tf.constant(x) for x in (query, key, value)]
    for run in (*[qkv.attend] * 20, attend):
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            out = run(*arrays)
        np.testing.assert_allclose(out, want, atol=1e-5)
        slopes = tape.gradient(out, arrays)
        np.testing.assert_allclose(slopes[2], _slope(query, key, value), atol=1e-4)


def _slope(query, key, value):
    """The gradient of the sum of all outputs by the values: the weights that each row had."""
    alpha = qkv.weights(query, key)
    rows = alpha.reshape(-1, alpha.shape[-1]).sum(0)
    return np.broadcast_to(rows[:, None], value.shape)
