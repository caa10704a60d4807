"""The additive score with keys that were projected beforehand."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv.errors import ShapeError
from qkv.scores import Additive

rng = np.random.default_rng(0)
QUERY, KEY, VALUE = (rng.normal(size=s).astype("float32") for s in ((6, 4), (9, 5), (9, 3)))
W1, W2, V, B = (rng.normal(size=s).astype("float32") for s in ((7, 4), (7, 5), (7,), (7,)))


@pytest.mark.parametrize("engine", ["dense", "streaming", "lowered"])
def test_projected_keys_give_the_same(engine):
    want = qkv.attend(QUERY, KEY, VALUE, score=Additive(W1, W2, V, B), engine="dense")
    got = qkv.attend(QUERY, KEY @ W2.T, VALUE, score=Additive(W1, None, V, B), engine=engine)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_gradients_reach_the_projection():
    torch = pytest.importorskip("torch")
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (W1, W2, V)]
    query, key, value = (torch.tensor(x, dtype=torch.float64) for x in (QUERY, KEY, VALUE))

    def slopes(beforehand):
        w1, w2, v = leaves
        keys = key @ w2.T if beforehand else key
        score = Additive(w1, None if beforehand else w2, v)
        return torch.autograd.grad(qkv.attend(query, keys, value, score=score).sum(), leaves)

    for got, want in zip(slopes(True), slopes(False), strict=True):
        torch.testing.assert_close(got, want)


def test_keys_of_another_width_are_refused():
    with pytest.raises(ShapeError, match="without w_key"):
        qkv.attend(QUERY, KEY, VALUE, score=Additive(W1, None, V))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_have_the_slope_of_tanh_as_near_as_the_dtype_rounds(dtype):
    torch = pytest.importorskip("torch")
    one = torch.ones(1, 1, dtype=torch.float64)
    tanh = Additive(one, one, one[0])
    a, b = (torch.linspace(-3, 3, n, dtype=torch.float64)[:, None] for n in (201, 41))
    actual = tanh.find_lowering(a, b, None, dtype)[0]
    a.requires_grad_()
    for key in b:  # the slope in a of each pair
        got, want = (
            torch.autograd.grad(score(a, key[None]).sum(), a)[0] for score in (actual, tanh)
        )
        assert (got - want).abs().max() <= torch.finfo(getattr(torch, dtype)).eps / 2


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_an_empty_axis(shape):
    # Float32, whose tanh may be a sum of products: that needs the range of the hidden terms.
    torch = pytest.importorskip("torch")
    batch, n, m = shape
    query, key = torch.ones(batch, n, 8), torch.ones(batch, m, 8)
    for score in (Additive(torch.eye(8), None, torch.ones(8)), "gaussian"):
        out = qkv.attend(query, key, key, score=score)
        assert out.shape == (batch, n, 8)
        assert not out.any()
        gradient = torch.func.grad(
            lambda q, score=score: qkv.attend(q, key, key, score=score).sum()
        )
        assert gradient(query).shape == query.shape
