"""Scores by dot products whose widths are known late."""

from dataclasses import dataclass

import numpy as np
import pytest

import qkv
from qkv import scores
from qkv.errors import DtypeError, EngineError

KNOWN = [scores.Dot, scores.ScaledDot, scores.Cosine, scores.Gaussian, scores.Epanechnikov]


@pytest.mark.parametrize("known", KNOWN)
def test_who_writes_another_formula_inherits_no_other_way_to_it(known):
    @dataclass(frozen=True)
    class Sharper(known, new_formula=True):
        def __call__(self, query, key):
            return super().__call__(query, key) * 3

    rng, score = np.random.default_rng(0), Sharper()
    query, key, value = (rng.normal(size=(300, d)) for d in (4, 4, 2))
    options = {"weighting": "normalized"} if score.is_nonnegative else {}
    want = qkv.attend(query, key, value, score=score, engine="dense", **options)
    np.testing.assert_allclose(
        qkv.attend(query, key, value, score=score, **options), want, atol=1e-12
    )
    with pytest.raises(EngineError, match="Sharper has no dot product form"):
        qkv.attend(query, key, value, score=score, engine="lowered", **options)
    actual = qkv.Database(key, value).attend(query, score=score, tolerance=1e-6, **options)
    np.testing.assert_allclose(actual, want, atol=1e-5)


@pytest.mark.parametrize("score", [scores.ScaledDot(), scores.ScaledDot(softcap=2.0)])
def test_the_scale_of_a_width_that_only_a_run_tells(score):
    tf = pytest.importorskip("tensorflow")
    unknown = tf.TensorSpec((None, None), tf.float64)
    graph = tf.function(lambda *x: qkv.attend(*x, score=score), input_signature=[unknown] * 3)
    for width in (1, 3, 8):
        x = np.random.default_rng(width).normal(size=(5, width))
        want = qkv.attend(x, x, x, score=score, engine="dense")
        np.testing.assert_allclose(graph(*map(tf.constant, (x, x, x))), want, atol=1e-12)


def test_a_new_formula_may_not_inherit_the_description_of_another():
    """Overriding `__call__` alone would leave dot_product_form and others to the base."""
    with pytest.raises(DtypeError, match=r"Cube overrides __call__ .*dot_product_form"):

        class Cube(scores.Dot):
            def __call__(self, query, key):
                return super().__call__(query, key) ** 3

    class ResetCube(scores.Dot, new_formula=True):
        def __call__(self, query, key):
            return super().__call__(query, key) ** 3

    x = np.array([[2.0]])
    assert not ResetCube().is_linear and ResetCube().affine_form(x, x[0]) is None
    assert isinstance(ResetCube().find_lowering(x, x, None, "float64"), str)
    np.testing.assert_array_equal(qkv.weights(x, np.eye(1), score=ResetCube(), weighting="raw"), 8)


@pytest.mark.parametrize("n", [1, 4, 40])
@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25, "zero", "nan"])
def test_cosine_of_few_and_many_queries(n, size):
    """Few queries divide their scores by the norms of the keys, where these are in range."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, n, 16)), rng.normal(size=(2, 30, 16))
    if isinstance(size, float):
        k *= size
    else:
        k[0, 3] = {"zero": 0.0, "nan": np.nan}[size]
    norms = [np.linalg.norm(x, axis=-1) for x in (q, k)]
    products = norms[0][..., :, None] * norms[1][..., None, :] * 0.5
    want = q @ k.swapaxes(-1, -2) / np.where(products == 0, 1.0, products)
    for dtype, most in (("float32", 3e-6), ("float64", 1e-13)):
        for make in (np.asarray, torch.tensor):
            got = scores.Cosine(0.5)(*(make(x.astype(dtype)) for x in (q, k)))
            np.testing.assert_allclose(np.asarray(got), want, atol=most)
