"""What `describe` says of a model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import qkv  # noqa: E402
from qkv import scores  # noqa: E402
from qkv.errors import QkvError  # noqa: E402
from qkv.nn import (  # noqa: E402
    AdditiveScore,
    Attention,
    BahdanauDecoder,
    GaussianScore,
    KernelRegression,
    MultiHeadAttention,
    SelfAttention,
    SqueezeExcitation,
    Transformer,
    describe,
)


def test_describe_tells_each_layer_and_its_engine():
    model = torch.nn.ModuleDict(
        {
            "plain": MultiHeadAttention(64, 4, num_kv_heads=2),
            "additive": MultiHeadAttention(64, 4, score=AdditiveScore(16, 16, 8)),
            "sparse": SelfAttention(8, 4, 2, weighting="entmax15"),
            "free": Attention(GaussianScore()),
            "out": torch.nn.Linear(4, 2),
        }
    )
    result = describe(model, length=1024)
    engines = {layer.name: layer.engine for layer in result.layers}
    zeros = torch.zeros(1, 4, 1024, 16)
    score = scores.Additive(torch.zeros(8, 16), torch.zeros(8, 16), torch.zeros(8), torch.zeros(8))
    assert engines["plain"] == "native"
    assert engines["additive"] == qkv.explain(zeros, zeros, zeros, score=score).engine
    assert engines["sparse"] == "streaming"
    assert engines["out"] == ""
    assert result.parameters == sum(x.numel() for x in model.parameters())
    assert sum(layer.parameters for layer in result.layers) == result.parameters
    text = str(result)
    assert "4 heads of 16·16 → 16, 2 of keys" in text
    assert "AdditiveScore → Softmax" in text


def test_describe_counts_every_parameter_once():
    for model in (
        Transformer(8, 2, 1, 1, dim_feedforward=16),
        BahdanauDecoder(7, 3, 4, 5),
        KernelRegression(torch.randn(30, 2), torch.randn(30)),
        SqueezeExcitation(4),
    ):
        result = describe(model, length=8)
        assert sum(layer.parameters for layer in result.layers) == result.parameters
        assert str(result)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: describe("model"), "module"),
        (lambda: describe(torch.nn.Linear(1, 1), length=0), "length"),
    ],
)
def test_what_is_wrong_is_refused(call, match):
    with pytest.raises(QkvError, match=match):
        call()
