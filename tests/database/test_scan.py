"""Reading pieces gives what the equation gives on all rows at once, gradients included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import qkv
from qkv import scores, weightings
from qkv.database import scan
from qkv.errors import FrameworkError

rng = np.random.default_rng(0)
ROWS, D = 700, 6
KEY, VALUE = rng.normal(size=(ROWS, D)), rng.normal(size=(ROWS, 3))
LIVE = rng.random(ROWS) > 0.2
LIVE[:250] = True
QUERY = rng.normal(size=(4, D))
ALONG = rng.normal(size=(4, 3))


def read():
    for start in range(0, ROWS, 250):
        rows = slice(start, start + 250)
        yield scan.Piece(KEY[rows], VALUE[rows], LIVE[rows] if start else None)


def learned():
    return scores.Multiplicative(torch.tensor(rng.normal(size=(D, D)), requires_grad=True))


SCORES = [
    scores.Dot(),
    scores.ScaledDot(),
    scores.ScaledDot(0.3),
    scores.ScaledDot(softcap=2.0),
    scores.Gaussian(0.8),
    scores.Cosine(0.2),
    learned(),
]
WEIGHTINGS = [
    weightings.Softmax(),
    weightings.Softmax(2.5),
    weightings.Entmax(1.5),
    weightings.Hard(),
    weightings.Sigmoid(),
    weightings.TopK(5),
    weightings.Average(),
]


@pytest.mark.parametrize("narrow", [0, 8])
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
@pytest.mark.parametrize("score", SCORES, ids=lambda s: type(s).__name__)
def test_attend_and_its_gradients_are_those_of_all_rows_at_once(
    score, weighting, narrow, monkeypatch
):
    monkeypatch.setattr(scan, "NARROW", narrow)
    found, true = [], []
    for outs, function in (
        (found, lambda q: scan.attend(read, q, score, weighting)),
        (
            true,
            lambda q: qkv.attend(
                q,
                torch.tensor(KEY[LIVE]),
                torch.tensor(VALUE[LIVE]),
                score=score,
                weighting=weighting,
                engine="dense",
            ),
        ),
    ):
        q = torch.tensor(QUERY, requires_grad=True)
        parameters = [x for x in vars(score).values() if isinstance(x, torch.Tensor)]
        out = function(q)
        outs.append(out.detach())
        if weighting.smooth:
            outs += torch.autograd.grad(out, [q, *parameters], torch.tensor(ALONG))
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("narrow", [0, 8])
def test_gradients_in_jax(narrow, monkeypatch):
    monkeypatch.setattr(scan, "NARROW", narrow)
    with jax.enable_x64(True):
        q = jnp.asarray(QUERY)

        def loss(q):
            return (scan.attend(read, q, scores.ScaledDot(), weightings.Softmax()) * ALONG).sum()

        def true(q):
            return (qkv.attend(q, jnp.asarray(KEY[LIVE]), jnp.asarray(VALUE[LIVE])) * ALONG).sum()

        np.testing.assert_allclose(jax.grad(loss)(q), jax.grad(true)(q), rtol=1e-9)
        with pytest.raises(FrameworkError, match="outside of jit"):
            jax.jit(loss)(q)


def test_the_gradient_for_k_equal_v_is_the_covariance_of_the_keys():
    """∇_q Attention = Cov_p[k], of the seeds."""
    pieces = [scan.Piece(KEY, KEY)]
    q = torch.tensor(QUERY[:1], requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(
        lambda q: scan.attend(lambda: pieces, q, scores.Dot(), weightings.Softmax()), q
    )[0, :, 0]
    p = np.exp(KEY @ QUERY[0])
    p /= p.sum()
    centred = KEY - p @ KEY
    np.testing.assert_allclose(jacobian, (centred * p[:, None]).T @ centred, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("narrow", "forth", "back"), [(8, 2, 0), (0, 2, 1)])
def test_how_often_the_rows_are_read(narrow, forth, back, monkeypatch):
    monkeypatch.setattr(scan, "NARROW", narrow)
    reads = []

    def counted():
        reads.append(0)
        for piece in read():
            reads[-1] += 1
            yield piece

    q = torch.tensor(QUERY, requires_grad=True)
    out = scan.attend(counted, q, scores.Dot(), weightings.Softmax())
    assert reads == [1, 3]  # a look at the first piece, and one reading
    out.sum().backward()
    assert len(reads) == forth + back


def test_second_derivatives():
    q = torch.tensor(QUERY[:2], requires_grad=True)
    for narrow in (0, 8):
        scan_narrow, scan.NARROW = scan.NARROW, narrow
        try:
            assert torch.autograd.gradgradcheck(
                lambda q: scan.attend(read, q, scores.Dot(), weightings.Softmax()), q
            )
        finally:
            scan.NARROW = scan_narrow


@pytest.mark.parametrize("apart", [True, False])
def test_scores_and_pooling_of_live_rows_only(apart):
    s = scan.score_all(read, QUERY, scores.Dot(), int(LIVE.sum()), apart)
    np.testing.assert_allclose(s, QUERY @ KEY[LIVE].T)
    alpha = rng.random((4, int(LIVE.sum())))
    np.testing.assert_allclose(scan.pool_all(read, alpha, apart), alpha @ VALUE[LIVE])


def test_pieces_apart_are_done_with_before_the_next():
    done = []

    class Watched(scores.Dot):
        def __call__(self, query, key):
            done.append(len(key))
            return super().__call__(query, key)

    def lazily():
        for i, piece in enumerate(read()):
            assert len(done) == i
            yield piece

    scan.score_all(lazily, QUERY, Watched(), int(LIVE.sum()), True)


def test_a_value_that_does_not_count_cannot_spoil_the_sum():
    value = np.array([[1.0], [np.nan], [3.0]])
    pieces = [scan.Piece(np.zeros((3, 1)), value)]
    np.testing.assert_array_equal(
        scan.pool_all(lambda: pieces, np.array([[0.5, 0.0, 0.5]])), [[2.0]]
    )
    assert np.isnan(scan.pool_all(lambda: pieces, np.array([[0.5, 0.1, 0.4]]))).all()


def test_nothing_to_read():
    q = torch.tensor(QUERY, requires_grad=True)
    for weighting in (weightings.Softmax(), weightings.Hard()):
        assert scan.attend(list, q, scores.Dot(), weighting).shape == (4, 0)


def test_every_row_dead_gives_nought():
    pieces = [scan.Piece(KEY, VALUE, np.zeros(ROWS, bool))]
    for narrow in (0, 8):
        old, scan.NARROW = scan.NARROW, narrow
        q = torch.tensor(QUERY, requires_grad=True)
        out = scan.attend(lambda: pieces, q, scores.Dot(), weightings.Softmax())
        out.sum().backward()
        scan.NARROW = old
        assert (out == 0).all()
        assert (q.grad == 0).all()
