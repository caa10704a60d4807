"""Performer beside the formula of the paper, and its error beside the expected one."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import scores
from qkv.errors import QkvError
from qkv.frameworks import to_numpy
from qkv.scores.feature_map import draw_directions
from tests.installed_frameworks import FRAMEWORKS

rng = np.random.default_rng(0)
N, D = 300, 16
QUERY, KEY, VALUE = (0.3 * rng.normal(size=(N, D)) for _ in range(3))


@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
def test_values_are_those_of_the_paper(fw):
    # Choromanski et al. (2021), lemma 1: exp(ωᵀx − ‖x‖²/2) for each row ω.
    directions = draw_directions(D, 12, 3)
    features = [
        np.exp(x / D**0.25 @ directions - (x * x).sum(1, keepdims=True) / D**0.5 / 2)
        for x in (QUERY, KEY)
    ]
    alpha = np.tril(features[0] @ features[1].T)
    want = alpha / alpha.sum(1, keepdims=True) @ VALUE
    options = {"score": scores.Performer(12, 3), "weighting": "normalized", "mask": "causal"}
    arrays = [fw.make_array(x) for x in (QUERY, KEY, VALUE)]
    assert qkv.explain(*arrays, **options).engine == "linear"
    np.testing.assert_allclose(to_numpy(qkv.attend(*arrays, **options)), want, rtol=1e-9)


def test_torch_compiles_it():
    torch = pytest.importorskip("torch")
    arrays = [torch.tensor(x) for x in (QUERY, KEY, VALUE)]
    options = {"score": scores.Performer(12), "weighting": "normalized"}
    compiled = torch.compile(
        lambda *x: qkv.attend(*x, **options), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(*arrays), qkv.attend(*arrays, **options))


def test_rows_are_orthogonal_and_gaussian():
    directions = draw_directions(8, 8 * 2000, 0)
    products = directions[:, :8].T @ directions[:, :8]
    np.testing.assert_allclose(products - np.diag(np.diag(products)), 0, atol=1e-12)
    np.testing.assert_allclose(np.cov(directions), np.eye(8), atol=0.05)
    assert (directions[:, :5] == draw_directions(8, 5, 0)).all()
    assert (directions[:, :5] != draw_directions(8, 5, 1)).all()


@pytest.mark.parametrize("scale", [None, 0.1])
def test_the_error_is_the_expected_one(scale):
    exact = np.exp(QUERY @ KEY.T * (scale or D**-0.5))
    errors = []
    for features in (64, 256):
        drawn = [scores.Performer(features, seed, scale) for seed in range(20)]
        errors.append(np.mean([(x(QUERY, KEY) / exact - 1) ** 2 for x in drawn], 0) ** 0.5)
        ratio = np.median(errors[-1] / drawn[0].estimate_error(QUERY, KEY))
        assert 0.6 < ratio < 1.05  # orthogonal rows have less than independent ones
    assert 0.4 < np.median(errors[1] / errors[0]) < 0.6


def test_the_output_comes_near_softmax():
    want = qkv.attend(QUERY, KEY, VALUE)
    out = qkv.attend(QUERY, KEY, VALUE, score=scores.Performer(4096), weighting="normalized")
    assert np.abs(out - want).max() < 0.03 * np.abs(want).max()


@pytest.mark.parametrize("options", [{"features": 0}, {"seed": -1}, {"seed": 0.5}, {"scale": 0.0}])
def test_what_is_refused(options):
    with pytest.raises(QkvError, match=next(iter(options))):
        scores.Performer(**options)
