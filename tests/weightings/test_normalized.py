"""Normalized: what a row without weights gets, whole, in blocks, and as a function of scores."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import qkv
from qkv import scores, weightings
from qkv.engines import streaming
from qkv.errors import ArgumentError, CombinationError, FrameworkError
from tests.installed_frameworks import FRAMEWORKS, WITH_GRADIENTS
from tests.sampling import FULL

NAN = np.nan
QUERY = np.array([[0.0], [5.0], [5.0], [7.0]])
KEY = np.array([[0.0], [3.0], [9.0], [0.5], [3.0]])
VALUE = np.arange(10.0).reshape(5, 2) + 1
LIVE = np.ones((4, 5), bool)
LIVE[1, 0] = False
LIVE[2] = False
"""Query 0 has two keys in its window, 1 and 3 have none, 2 may not look at all."""

ROWS = {
    "zero": [[0.0] * 5, [0.0] * 5],
    "nan": [[0.0, NAN, NAN, NAN, NAN], [NAN] * 5],
    "uniform": [[0.0, 0.25, 0.25, 0.25, 0.25], [0.2] * 5],
    "nearest": [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0]],
}
WINDOWS = ["boxcar", "triangular", "epanechnikov"]


def expected_weights(score, on_empty):
    inside = scores.resolve(score)(QUERY[:1], KEY)
    return np.array([(inside / inside.sum())[0], ROWS[on_empty][0], [0.0] * 5, ROWS[on_empty][1]])


def attend(fw, score, on_empty, engine="streaming", **options):
    arrays = [fw.make_array(x) for x in (QUERY, KEY, VALUE)]
    weighting = weightings.Normalized(on_empty)
    return qkv.attend(
        *arrays,
        score=score,
        weighting=weighting,
        mask=fw.make_array(LIVE),
        engine=engine,
        **options,
    )


@pytest.mark.sample(30)
@pytest.mark.applies(
    lambda fw, on_empty, score, **_: (
        FULL or fw.name not in ("jax", "tensorflow") or score == WINDOWS[len(on_empty) % 3]
    )
)
@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize(("on_empty", "score"), list(itertools.product(ROWS, WINDOWS)))
def test_rows_without_weights(fw, engine, on_empty, score, monkeypatch):
    monkeypatch.setattr(streaming, "block_size", lambda call: (3, 2))
    monkeypatch.setattr(streaming, "MAX_NUMBERS_PER_BLOCK", 10)
    out, alpha = attend(fw, score, on_empty, engine, return_weights=True)
    want = expected_weights(score, on_empty)
    np.testing.assert_allclose(qkv.frameworks.to_numpy(alpha), want, atol=1e-12)
    np.testing.assert_allclose(qkv.frameworks.to_numpy(out), want @ VALUE, atol=1e-12)


@pytest.mark.sample(3)
@pytest.mark.parametrize("fw", WITH_GRADIENTS, ids=lambda fw: fw.name)
@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize("on_empty", ["zero", "uniform", "nearest"])
def test_no_gradient_through_the_scores_of_such_a_row(fw, engine, on_empty, monkeypatch):
    monkeypatch.setattr(streaming, "block_size", lambda call: (2, 2))
    width, along = np.array(2.0), np.ones((4, 2))

    def loss(query, width):
        options = {"mask": fw.make_array(LIVE), "engine": engine}
        options |= {
            "score": scores.Epanechnikov(width),
            "weighting": weightings.Normalized(on_empty),
        }
        out = qkv.attend(query, fw.make_array(KEY), fw.make_array(VALUE), **options)
        return qkv.frameworks.get_framework(out).xp.sum(out * fw.make_array(along))

    dq, dwidth = fw.compute_gradients(loss, [fw.make_array(QUERY), fw.make_array(width)])
    assert dq[0] != 0 and not dq[1:].any()

    def alone(width):
        s = scores.Epanechnikov(width)(QUERY[:1], KEY)
        return (s / s.sum() @ VALUE).sum()

    slope = (alone(width + 1e-6) - alone(width - 1e-6)) / 2e-6
    np.testing.assert_allclose(dwidth, slope, atol=1e-7)


@pytest.mark.sample(2)
@pytest.mark.parametrize("fw", WITH_GRADIENTS, ids=lambda fw: fw.name)
@pytest.mark.parametrize("engine", ["dense", "streaming"])
def test_a_row_of_nan_spoils_no_gradient_of_others(fw, engine, monkeypatch):
    monkeypatch.setattr(streaming, "block_size", lambda call: (2, 2))
    actual = []
    for on_empty in ("nan", "zero"):

        def loss(*arrays, on_empty=on_empty):
            options = {
                "score": scores.Epanechnikov(2.0),
                "weighting": weightings.Normalized(on_empty),
            }
            out = qkv.attend(*arrays, mask=fw.make_array(LIVE), engine=engine, **options)
            return qkv.frameworks.get_framework(out).xp.sum(out[:1, :])

        actual.append(fw.compute_gradients(loss, [fw.make_array(x) for x in (QUERY, KEY, VALUE)]))
    for got, want in zip(*actual, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("on_empty", ["zero", "nan", "uniform", "nearest"])
def test_as_a_function_of_scores(on_empty):
    """Below 0 a score says how far outside its key lies; of equals the lowest row."""
    s = np.array([[1.0, 3.0, 0.0], [-2.0, -1.0, -1.0] if on_empty == "nearest" else [0.0] * 3])
    alpha = weightings.Normalized(on_empty)(s)
    empty = {"zero": [0.0] * 3, "nan": [NAN] * 3, "uniform": [1 / 3] * 3, "nearest": [0, 1, 0]}
    np.testing.assert_allclose(alpha, [[0.25, 0.75, 0.0], empty[on_empty]])


@pytest.mark.sample(4)
@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
@pytest.mark.parametrize("engine", ["dense", "streaming"])
def test_raise_counts_the_queries(fw, engine, monkeypatch):
    monkeypatch.setattr(streaming, "block_size", lambda call: (1, 2))
    monkeypatch.setattr(streaming, "MAX_NUMBERS_PER_BLOCK", 5)
    for more in ({}, {"return_weights": True}):
        with pytest.raises(ArgumentError, match=r"2 queries have no key.*nearest"):
            attend(fw, "boxcar", "raise", engine, **more)
    out = attend(fw, scores.Boxcar(9.0), "raise", engine)
    want = attend(fw, scores.Boxcar(9.0), "zero", "dense")
    np.testing.assert_allclose(*map(qkv.frameworks.to_numpy, (out, want)))


def test_raise_says_that_a_trace_has_no_numbers():
    jax = pytest.importorskip("jax")
    with pytest.raises(FrameworkError, match=r"traced.*'nan'"):
        jax.jit(
            lambda q: qkv.attend(q, q, q, score="boxcar", weighting=weightings.Normalized("raise"))
        )(jax.numpy.ones((2, 1)))


def test_it_says_what_it_refuses():
    weighting = weightings.Normalized("nearest")
    assert weighting.incompatible_reason(scores.Boxcar(), biased=False) is None
    assert "can be negative" in weighting.incompatible_reason(scores.Dot(), biased=False)
    assert "boolean mask" in weighting.incompatible_reason(scores.Boxcar(), biased=True)
    assert "distance" in weighting.incompatible_reason(scores.Constant(), biased=False)
    with pytest.raises(CombinationError, match=r"distance.*Constant"):
        qkv.attend(QUERY, KEY, VALUE, score="constant", weighting=weighting)


@pytest.mark.parametrize(("dtype", "within"), [("float32", 2e-6), ("float64", 1e-14)])
def test_a_small_sigmoid_keeps_its_digits(dtype, within):
    s = np.array([[0.0, 9.0, 800.0, -9.0, -20.0, -36.9, -37.1, -60.0, -80.0]], dtype)
    want = [[1 / (1 + math.exp(-x)) for x in s[0].tolist()]]
    np.testing.assert_allclose(weightings.Sigmoid()(s), want, rtol=within)
    edges = np.array([[-np.inf, -1e30, 1e30, np.inf]], dtype)
    assert weightings.Sigmoid()(edges).tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize("engine", ["dense", "streaming"])
def test_so_does_its_slope(engine):
    torch = pytest.importorskip("torch")
    x = torch.tensor([0.0, 9.0, 800.0, -20.0, -60.0, -800.0, 1e30], dtype=torch.float64)
    q, one = x[:, None].clone().requires_grad_(), torch.ones(1, 1, dtype=torch.float64)
    qkv.attend(q, one, one, score="dot", weighting="sigmoid", engine=engine).sum().backward()
    want = torch.sigmoid(x) * torch.sigmoid(-x)
    torch.testing.assert_close(q.grad[:, 0], want, rtol=1e-12, atol=1e-16)


def test_a_row_of_small_weight_is_named():
    D = qkv.Database(np.array([[-20.0], [-25.0]]), [1.0, 2.0])
    answer = D.ask([1.0], score="dot", weighting="sigmoid")
    assert [row.index for row in answer.rows] == [0, 1]
    assert answer.rows[0].weight == pytest.approx(math.exp(-20), rel=1e-5)
