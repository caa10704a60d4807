"""Learned scores against the objects of `qkv.scores`, and in every layer that takes them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import qkv  # noqa: E402
from qkv import masks, scores  # noqa: E402
from qkv.errors import ArgumentError, QkvError  # noqa: E402
from qkv.nn import (  # noqa: E402
    AdditiveScore,
    Attention,
    GatedScore,
    GaussianScore,
    MultiHeadAttention,
    MultiplicativeScore,
)

F64 = {"dtype": torch.float64}
MAKE = {
    "additive": lambda d=4, **o: AdditiveScore(d, d, 6, **o),
    "additive, no bias": lambda d=4, **o: AdditiveScore(d, d, 6, bias=False, **o),
    "multiplicative": lambda d=4, **o: MultiplicativeScore(d, d, **o),
    "gated": lambda d=4, **o: GatedScore(d, d, **o),
    "gated additive": lambda d=4, **o: GatedScore(d, d, AdditiveScore(d, d, 6, **o), **o),
    "gaussian": lambda d=4, **o: GaussianScore(0.7, **o),
    "gaussian by feature": lambda d=4, **o: GaussianScore(0.7, features=d, **o),
}
FORMULAS = {
    "additive": lambda s, q, k: (
        torch.tanh((q @ s.w_query.T)[:, None] + (k @ s.w_key.T)[None] + s.bias) @ s.v
    ),
    "multiplicative": lambda s, q, k: q @ s.w @ k.T,
    "gated": lambda s, q, k: (
        torch.sigmoid((q @ s.w_query)[:, None] + (k @ s.w_key)[None] + s.bias) * (q @ k.T)
    ),
    "gaussian": lambda s, q, k: -(((q[:, None] - k[None]) / s.bandwidth) ** 2).sum(-1) / 2,
    "gaussian by feature": lambda s, q, k: (
        -(((q[:, None] - k[None]) / s.bandwidth) ** 2).sum(-1) / 2
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_and_gradients(name):
    torch.manual_seed(0)
    score = MAKE[name](**F64)
    with torch.no_grad():
        for x in score.parameters():
            x.add_(torch.randn_like(x), alpha=0.3)
    q, k, v = torch.randn(3, 4, **F64), torch.randn(5, 4, **F64), torch.randn(5, 2, **F64)
    s = FORMULAS[name](score, q, k)
    torch.testing.assert_close(score(q, k), s)
    out, want = Attention(score)(q, k, v), torch.softmax(s, -1) @ v
    torch.testing.assert_close(out, want)
    parameters = list(score.parameters())
    slopes = (torch.autograd.grad(x.square().sum(), parameters) for x in (out, want))
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_every_score_serves_many_heads(make):
    layer = MultiHeadAttention(8, 2, batch_first=True, score=make())
    assert any(name.startswith("score.") for name in layer.state_dict())
    x = torch.randn(2, 70, 8)
    out, alpha = layer(x, x, x, is_causal=True)
    torch.testing.assert_close(out, layer(x, x, x, need_weights=False, is_causal=True)[0])
    assert not alpha.triu(1).any()
    out.square().sum().backward()
    # softmax is not moved by the gate's bias or the query's half alone, but the rest must learn
    assert all(x.grad is not None for x in layer.parameters())
    assert any(x.grad.any() for x in layer.score.parameters())


def test_attention_takes_names_objects_and_functions():
    q, k, v = torch.randn(3, 5, 4, **F64)
    want = qkv.attend(q, k, v, score="gaussian", weighting="sparsemax", mask=masks.causal)
    for score in ("gaussian", scores.Gaussian(), lambda q, k: scores.Gaussian()(q, k)):
        layer = Attention(score, "sparsemax")
        torch.testing.assert_close(layer(q, k, v, masks.causal), want)
        out, alpha = layer(q, k, v, masks.causal, need_weights=True)
        torch.testing.assert_close(alpha @ v, out)


def test_a_network_of_ones_own_is_a_score():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.eye(4))

        def forward(self, query, key):
            return query @ self.w @ key.mT

    layer = Attention(Own())
    q, k, v = torch.randn(3, 5, 4)
    out = layer(q, k, v)
    torch.testing.assert_close(out, qkv.attend(q, k, v, score="dot"))
    out.sum().backward()
    assert layer.score.w.grad.any()


def test_dropout_acts_while_training_alone():
    layer = Attention(dropout=0.5)
    q = torch.randn(50, 4)
    assert 0.4 < float((layer(q, q, q, need_weights=True)[1] == 0).float().mean()) < 0.6
    torch.testing.assert_close(layer.eval()(q, q, q), qkv.attend(q, q, q))


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: AdditiveScore(4, 4, 0), "hidden"),
        (lambda: MultiplicativeScore(4, 2.0), "d_k"),
        (lambda: GatedScore(0, 1), "d_q"),
        (lambda: GaussianScore(-1.0), "bandwidth"),
        (lambda: GaussianScore(1.0, features=0), "features"),
        (lambda: GatedScore(1, 1, score="dott"), "dot"),
    ],
)
def test_wrong_scores_are_refused(make, match):
    with pytest.raises(ArgumentError, match=match):
        make()


def test_widths_that_do_not_fit_are_refused():
    with pytest.raises(QkvError, match="w_query"):
        MultiHeadAttention(8, 2, score=AdditiveScore(8, 8, 4))(*torch.zeros(3, 5, 1, 8))
