"""JAX: squared distances from a matrix product, with exact ones where rounding would matter."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import qkv
from qkv import scores

jax = pytest.importorskip("jax")

pytestmark = pytest.mark.sample_of_module(5)
jnp = jax.numpy

SCORES = {
    "gaussian": scores.Gaussian(2.0),
    "boxcar": scores.Boxcar(5.0),
    "triangular": scores.Triangular(6.0),
    "epanechnikov": scores.Epanechnikov(6.0),
}
PROFILES = {
    "gaussian": lambda ratio: -ratio / 2,
    "boxcar": lambda ratio: (ratio <= 1).astype(float),
    "triangular": lambda ratio: np.maximum(0, 1 - np.sqrt(ratio)),
    "epanechnikov": lambda ratio: np.maximum(0, 1 - ratio),
}


@pytest.fixture(autouse=True)
def doubles():
    jax.config.update("jax_enable_x64", True)


def draw_vectors(dtype: str, offset: float = 0.0) -> list[np.ndarray]:
    """Queries, and keys that the heads share; some are equal."""
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=s).astype(dtype) for s in ((2, 3, 7, 16), (2, 1, 9, 16)))
    key[:, 0, :5] = query[:, 1, :5]
    return [x + np.asarray(offset, dtype) for x in (query, key)]


def compute_ratio(query: np.ndarray, key: np.ndarray, score: scores.Score) -> np.ndarray:
    width = getattr(score, "width", None) or score.bandwidth
    square = ((query[..., :, None, :] - key[..., None, :, :]).astype(float) ** 2).sum(-1)
    return square / width**2


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("offset", [0.0, 3.0, 1e4])
@pytest.mark.parametrize("name", SCORES)
def test_values(name, offset, dtype):
    query, key = draw_vectors(dtype, offset)
    score = SCORES[name]
    ratio = compute_ratio(query, key, score)
    for call in (jax.jit(score), jax.vmap(score)):
        s = np.asarray(call(jnp.asarray(query), jnp.asarray(key)))
        assert s.dtype == dtype
        off = np.abs(s - PROFILES[name](ratio))[np.abs(ratio - 1) > 1e-3]
        assert off.max() <= (3e-6 + 1e-7 * offset if dtype == "float32" else 1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [0, 3, 40])
def test_pairs_on_the_edge_of_a_window(count):
    """`count` keys of a row lie exactly on the edge: more than are computed once more, or fewer."""
    rng = np.random.default_rng(0)
    key = rng.normal(size=(100, 8)).astype(np.float32)
    key[:count] = 4.0 * np.eye(8, dtype=np.float32)[rng.integers(0, 8, count)]
    query = np.zeros((5, 8), np.float32)
    want = compute_ratio(query, key, scores.Boxcar(4.0)) <= 1
    assert want[:, :count].all()
    for call in (scores.Boxcar(4.0), jax.jit(scores.Boxcar(4.0))):
        np.testing.assert_array_equal(call(jnp.asarray(query), jnp.asarray(key)), want)


def test_nan_and_infinity_stay_in_their_pairs():
    query, key = np.zeros((4, 8), np.float32), np.full((5, 8), 0.5, np.float32)
    key[3, 2], key[1, 1] = np.nan, np.inf
    for name, score in SCORES.items():
        s = np.asarray(score(jnp.asarray(query), jnp.asarray(key)))
        assert np.isnan(s[:, 3]).all()
        other = PROFILES[name](compute_ratio(query, key[[0, 2, 4]], score))
        np.testing.assert_allclose(s[:, [0, 2, 4]], other, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gaussian", "triangular", "epanechnikov"])
def test_derivatives_are_those_of_the_differences(name):
    query, key = (jnp.asarray(x) for x in draw_vectors("float64", 0.5))
    width = getattr(SCORES[name], "width", 2.0)

    def formula(q, k):
        square = jnp.sum((q[..., :, None, :] - k[..., None, :, :]) ** 2, -1) / width**2
        if name == "gaussian":
            return -square / 2
        inside = (square > 0) & (square < 1)
        if name == "epanechnikov":
            return jnp.where(square < 1, 1 - square, 0.0)
        r = jnp.sqrt(jnp.where(inside, square, 1.0))
        return jnp.where(square == 0, 1.0, jnp.where(inside, 1 - r, 0.0))

    def loss(call, q, k):
        return jnp.sum(jnp.sin(3 * call(q, k)))

    def derive(call):
        grad = jax.grad(partial(loss, call), (0, 1))
        yield from grad(query, key)
        yield jax.jvp(lambda q, k: call(q, k), (query, key), (jnp.cos(query), jnp.sin(key)))[1]
        yield from jax.grad(lambda q, k: sum(jnp.sum(x**2) for x in grad(q, k)), (0, 1))(query, key)

    shifted = key + 0.3  # equal vectors have no second derivative of √
    for a, b in zip(derive(SCORES[name]), derive(formula), strict=True):
        if name != "triangular":
            np.testing.assert_allclose(a, b, atol=1e-8)
    grads = [jax.grad(partial(loss, x), (0, 1))(query, shifted) for x in (SCORES[name], formula)]
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)


def test_attention_with_windows_in_blocks():
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(2, n, 8)).astype(np.float32)) for n in (300, 700, 700)]
    for name in ("boxcar", "triangular"):
        options = {"score": SCORES[name], "weighting": "normalized"}
        ratio = compute_ratio(*(np.asarray(x) for x in arrays[:2]), SCORES[name])
        s = PROFILES[name](ratio)
        want = s / s.sum(-1, keepdims=True) @ np.asarray(arrays[2], float)

        def attend(*arrays, engine=None, options=options):
            return qkv.attend(*arrays, **options, engine=engine)

        def loss(*arrays, engine=None, attend=attend):
            return jnp.sum(attend(*arrays, engine=engine) ** 2)

        np.testing.assert_allclose(attend(*arrays), want, atol=2e-2 if name == "boxcar" else 2e-5)
        if name == "boxcar":  # has no gradient
            continue
        slopes = [
            jax.grad(partial(loss, engine=x), (0, 1, 2))(*arrays) for x in ("streaming", "dense")
        ]
        for a, b in zip(*slopes, strict=True):
            np.testing.assert_allclose(a, b, atol=5e-3)
