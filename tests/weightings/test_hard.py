"""Hard with straight_through: hard forward, the softmax's slope backward, whole and in blocks."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import weightings
from qkv.engines import streaming
from tests.installed_frameworks import WITH_GRADIENTS

rng = np.random.default_rng(11)
QUERY, KEY, VALUE = rng.normal(size=(3, 2)), rng.normal(size=(7, 2)), rng.normal(size=(7, 4))
ALONG = rng.normal(size=(3, 4))
LIVE = rng.random((3, 7)) < 0.7
LIVE[1] = False


def gradients(fw, weighting, **options):
    def loss(*arrays):
        out = qkv.attend(*arrays, weighting=weighting, mask=fw.make_array(LIVE), **options)
        return qkv.frameworks.get_framework(out).xp.sum(out * fw.make_array(ALONG))

    return fw.compute_gradients(loss, [fw.make_array(x) for x in (QUERY, KEY, VALUE)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("fw", WITH_GRADIENTS, ids=lambda fw: fw.name)
@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.4, "seed": 3}], ids=["plain", "dropout"])
def test_the_scores_have_the_softmax_s_gradient(fw, engine, dropout, monkeypatch):
    monkeypatch.setattr(streaming, "block_size", lambda call: (2, 3))
    got = gradients(fw, weightings.Hard(straight_through=True), engine=engine, **dropout)
    soft = gradients(fw, weightings.Softmax(), engine="dense", **dropout)
    hard = gradients(fw, weightings.Hard(), engine="dense", **dropout)
    for actual, want in zip(got, (*soft[:2], hard[2]), strict=True):
        np.testing.assert_allclose(actual, want, atol=1e-12)


def test_the_weights_are_a_function_of_scores():
    torch = pytest.importorskip("torch")
    s = torch.tensor(rng.normal(size=(3, 5)), requires_grad=True)
    along = torch.tensor(rng.normal(size=(3, 5)))
    alpha = weightings.Hard(straight_through=True)(s)
    assert torch.equal(alpha, weightings.Hard()(s))
    want = torch.autograd.grad(s.softmax(-1), s, along)[0]
    np.testing.assert_allclose(torch.autograd.grad(alpha, s, along)[0], want, atol=1e-12)


@pytest.mark.parametrize("engine", ["dense", "streaming"])
def test_an_infinite_score_wins(engine, monkeypatch):
    """The straight-through softmax has no slope there, and must not change the answer."""
    monkeypatch.setattr(streaming, "block_size", lambda call: (1, 2))
    key = np.array([[0.0], [np.inf], [1.0]])
    options = {
        "score": "dot",
        "weighting": weightings.Hard(straight_through=True),
        "engine": engine,
    }
    assert qkv.attend(np.ones((1, 1)), key, np.eye(3), **options).tolist() == [[0.0, 1.0, 0.0]]
