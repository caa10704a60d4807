"""Scores, weightings and masks as JAX's pytrees."""

from dataclasses import dataclass

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings

jax = pytest.importorskip("jax")
jnp = jax.numpy


def random_arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), "float32") for shape in shapes]


Q, K, V = random_arrays((2, 5, 3), (2, 6, 3), (2, 6, 4))
(W,) = random_arrays((3, 3))

HOW = {
    "bandwidth": {"score": scores.Gaussian(jnp.float32(0.7))},
    "within": {"score": scores.Gated(W[0], W[1], score=scores.Multiplicative(W))},
    "modified": {"score": scores.Modified(scores.Multiplicative(W), lambda s, b, h, q, k: s - k)},
    "temperature": {"weighting": weightings.Softmax(jnp.float32(0.5))},
    "lengths": {"mask": masks.causal & masks.lengths(jnp.array([3, 6]))},
    "layout": {"mask": masks.blocks(jnp.array([[1, 0], [1, 1]]), 3)},
}


@pytest.mark.parametrize("what", HOW)
def test_as_an_argument_of_jit(what):
    options = HOW[what]
    got = jax.jit(lambda options, q: qkv.attend(q, K, V, **options))(options, Q)
    host = jax.tree.map(np.asarray, (Q, K, V, options))
    np.testing.assert_allclose(got, qkv.attend(*host[:3], **host[3]), 1e-5, 1e-6)


def test_a_score_is_learned_step_by_step():
    """As an optimizer does it: state, gradient and step are trees of one structure."""
    aim = qkv.attend(Q, K, V, score=scores.Multiplicative(W + 0.5))

    def loss(score):
        return jnp.square(qkv.attend(Q, K, V, score=score) - aim).sum()

    @jax.jit
    def step(score, speed):
        value, slope = jax.value_and_grad(loss)(score)
        speed = jax.tree.map(lambda v, g: 0.9 * v + g, speed, slope)
        return jax.tree.map(lambda x, v: x - 0.02 * v, score, speed), speed, value

    score = scores.Multiplicative(W)
    speed = jax.tree.map(jnp.zeros_like, score)
    values = []
    for _ in range(30):
        score, speed, value = step(score, speed)
        values.append(value)
    assert isinstance(score, scores.Multiplicative) and values[-1] < values[0] / 4
    want = jax.grad(lambda w: loss(scores.Multiplicative(w)))(W)
    np.testing.assert_allclose(jax.grad(loss)(scores.Multiplicative(W)).w, want, 1e-5, 1e-6)


def test_mapped_over_and_chosen_by_a_tree_of_booleans():
    """Also where the score alone is traced."""
    many = scores.Gaussian(jnp.array([0.5, 1.0, 2.0], "float32"))

    def run(score, query):
        return qkv.attend(query, K, V, score=score)

    got = jax.vmap(run, (0, None))(many, Q)
    host = [np.asarray(x) for x in (Q, K, V)]
    want = [qkv.attend(*host, score=scores.Gaussian(x)) for x in (0.5, 1.0, 2.0)]
    np.testing.assert_allclose(got, np.stack(want), 1e-4, 1e-5)
    chosen = jax.tree.map(lambda _: True, many)
    doubled = jax.tree.map(lambda yes, x: 2 * x if yes else x, chosen, many)
    np.testing.assert_array_equal(doubled.bandwidth, 2 * many.bandwidth)


def test_a_path_names_the_field():
    paths = jax.tree_util.tree_flatten_with_path(HOW["within"]["score"])[0]
    named = [jax.tree_util.keystr(path) for path, _ in paths]
    assert named == [".w_query", ".w_key", ".score.w"]


def test_a_layout_is_part_of_the_structure():
    """So that what it rules out is still left out where the mask is an argument."""
    one, same, other = (masks.blocks([[1, x], [1, 1]], 3) for x in (0, 0, 1))
    assert not jax.tree.leaves(one)
    assert jax.tree.structure(one) == jax.tree.structure(same) != jax.tree.structure(other)


def test_a_class_that_is_made_later():
    @dataclass(frozen=True)
    class Mine(scores.Score):
        w: object
        power: float = 2.0

        def __call__(self, query, key):
            return scores.Multiplicative(self.w)(query, key) * self.power

    (leaf,) = jax.tree.leaves(Mine(W))
    assert leaf is W
