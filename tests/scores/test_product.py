"""Scores by dot products, where the widths are told late."""

import numpy as np
import pytest

import qkv
from qkv import scores


@pytest.mark.parametrize("score", [scores.ScaledDot(), scores.ScaledDot(softcap=2.0)])
def test_the_scale_of_a_width_that_only_a_run_tells(score):
    tf = pytest.importorskip("tensorflow")
    unknown = tf.TensorSpec((None, None), tf.float64)
    graph = tf.function(lambda *x: qkv.attend(*x, score=score), input_signature=[unknown] * 3)
    for width in (1, 3, 8):
        x = np.random.default_rng(width).normal(size=(5, width))
        want = qkv.attend(x, x, x, score=score, engine="dense")
        np.testing.assert_allclose(graph(*map(tf.constant, (x, x, x))), want, atol=1e-12)
