"""Linear attention: `FeatureMap` with raw and normalized weights, beside the formula in float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.engines import causal_sums
from qkv.errors import ArgumentError, CombinationError, DtypeError, ShapeError
from qkv.frameworks import get_framework, to_numpy
from tests.installed_frameworks import FRAMEWORKS, WITH_GRADIENTS

HEADS, N, D, DV = 4, 300, 3, 5
rng = np.random.default_rng(0)
QUERY = rng.normal(size=(2, HEADS, N, D))
KEY, VALUE = rng.normal(size=(2, 2, N, D)), rng.normal(size=(2, 2, N, DV))


def compute_features(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def expected(weighting, mask, query=QUERY, key=KEY, value=VALUE):
    key, value = (np.repeat(x, HEADS // x.shape[-3], axis=-3) for x in (key, value))
    alpha = compute_features(query) @ compute_features(key).swapaxes(-2, -1)
    if mask == "causal":
        alpha = np.tril(alpha)
    if weighting == "normalized":
        alpha = alpha / alpha.sum(-1, keepdims=True)
    return alpha @ value


def options_of(weighting, mask):
    return {"score": scores.FeatureMap(), "weighting": weighting, "mask": mask}


each_call = pytest.mark.parametrize(
    ("weighting", "mask"),
    [("raw", None), ("normalized", None), ("raw", "causal"), ("normalized", "causal")],
)
each_framework = partial(pytest.mark.parametrize, "fw", ids=lambda fw: fw.name)


@each_call
@each_framework(FRAMEWORKS)
def test_values(fw, weighting, mask):
    arrays, options = [fw.make_array(x) for x in (QUERY, KEY, VALUE)], options_of(weighting, mask)
    assert qkv.explain(*arrays, **options).engine == "linear"
    out = to_numpy(qkv.attend(*arrays, **options))
    np.testing.assert_allclose(out, expected(weighting, mask), rtol=1e-11, atol=1e-11)


@each_call
@each_framework(WITH_GRADIENTS)
def test_gradients(fw, weighting, mask):
    arrays = [fw.make_array(x[:1]) for x in (QUERY, KEY, VALUE)]
    along = fw.make_array(rng.normal(size=(1, HEADS, N, DV)))

    def loss(engine, *arrays):
        out = qkv.attend(*arrays, **options_of(weighting, mask), engine=engine)
        return get_framework(out).xp.sum(out * along)

    pairs = zip(
        *(fw.compute_gradients(partial(loss, engine), arrays) for engine in ("linear", "dense")),
        strict=True,
    )
    for actual, desired in pairs:
        np.testing.assert_allclose(to_numpy(actual), to_numpy(desired), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("m", [1, 63, 64, 65, 290, 400])
@pytest.mark.parametrize("score", ["dot", "scaled_dot"])
def test_dot_products_by_chunks_for_fewer_and_more_keys(m, score):
    query, key, value = (rng.normal(size=(2, x, D)) for x in (N, m, m))
    options = {"score": score, "weighting": "raw", "mask": "causal"}
    out = qkv.attend(query, key, value, engine="linear", **options)
    want = qkv.attend(query, key, value, engine="dense", **options)
    np.testing.assert_allclose(out, want, atol=1e-11)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_later_keys_that_are_not_finite_do_not_reach_a_query(special):
    key, value = KEY.copy(), VALUE.copy()
    key[..., 200, :], value[..., 250, 0] = special, special
    options = options_of("normalized", "causal")
    out = qkv.attend(QUERY, key, value, engine="linear", **options)
    np.testing.assert_allclose(out[..., :200, :], expected("normalized", "causal")[..., :200, :])
    np.testing.assert_array_equal(out, qkv.attend(QUERY, key, value, engine="streaming", **options))


def test_a_query_without_weights_gets_zero():
    key = np.abs(KEY)
    key[..., :5, :] = -1.0  # relu gives 0
    options = {"score": scores.FeatureMap("relu"), "weighting": "normalized", "mask": "causal"}
    out = qkv.attend(QUERY, key, VALUE, engine="linear", **options)
    assert (out[..., :5, :] == 0).all()
    np.testing.assert_allclose(out, qkv.attend(QUERY, key, VALUE, engine="dense", **options))


def test_a_mask_of_lengths():
    key = KEY.copy()
    key[..., 100:, :] = np.nan
    options = options_of("normalized", masks.lengths([100, 100]))
    out = qkv.attend(QUERY, key, VALUE, engine="linear", **options)
    want = expected("normalized", None, key=key[..., :100, :], value=VALUE[..., :100, :])
    np.testing.assert_allclose(out, want)


def test_a_function_with_parameters_of_its_own():
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(D, 7, dtype=torch.float64)
    arrays = [torch.tensor(x, requires_grad=True) for x in (QUERY, KEY, VALUE)]

    def features(x):
        return torch.nn.functional.softplus(layer(x))

    gradients = []
    for engine in (None, "dense", "streaming"):
        options = {"score": scores.FeatureMap(features), "weighting": "normalized"}
        if engine is None:
            explained = qkv.explain(*arrays, **options)
            assert explained.engine == "linear" and "7 × 5" in repr(explained)
        out = qkv.attend(*arrays, **options, mask="causal", engine=engine)
        gradients.append(torch.autograd.grad((out**2).sum(), [*arrays, *layer.parameters()]))
    for other in gradients[1:]:
        for actual, desired in zip(other, gradients[0], strict=True):
            torch.testing.assert_close(actual, desired)


def test_no_scores_are_computed_and_the_memory_is_that_of_the_vectors():
    for width in (4, 64, 65, 300):
        size = causal_sums.chunk_size(width, width)
        assert size >= 64 and width <= size < 2 * max(width, 64)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: scores.FeatureMap("softmax"), ArgumentError, "phi"),
        (lambda: scores.FeatureMap(3), DtypeError, "phi must be a name or a function"),
        (
            lambda: qkv.attend(QUERY, KEY, VALUE, score=scores.FeatureMap(lambda x: x[..., :2, :])),
            ShapeError,
            "phi returned shape",
        ),
        (
            lambda: qkv.attend(QUERY, KEY, VALUE, score="dot", weighting="normalized"),
            CombinationError,
            "Dot can be negative",
        ),
    ],
)
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_another_weighting_has_its_own_meaning():
    s = compute_features(QUERY) @ np.repeat(compute_features(KEY), 2, axis=-3).swapaxes(-2, -1)
    alpha = weightings.Softmax()(s)
    np.testing.assert_allclose(qkv.weights(QUERY, KEY, score="feature_map"), alpha)
