"""What `capture` sees in a model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from qkv.errors import ArgumentError, ShapeError  # noqa: E402
from qkv.nn import (  # noqa: E402
    Attention,
    MultiHeadAttention,
    SelfAttention,
    TransformerDecoder,
    TransformerEncoder,
    capture,
)


def test_capture_records_the_weights_of_a_normal_pass():
    model = TransformerDecoder(2, 8, 2, dim_feedforward=16, dropout=0.5, weighting="entmax15")
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
    padded = torch.tensor([[False] * 4, [False, False, True, True]])
    with capture(model) as seen:
        model(x, memory, memory_key_padding_mask=padded)
    assert list(seen) == [
        f"layers.{i}.{name}" for i in range(2) for name in ("self_attn", "multihead_attn")
    ]
    assert all(part.training for part in model.modules())
    first = seen["layers.0.self_attn"]
    eager = model.layers[0].self_attn.eval()
    want = eager(x, x, x, is_causal=True, average_attn_weights=False)[1]
    torch.testing.assert_close(first, want.detach())
    looked = seen["layers.1.multihead_attn"]
    torch.testing.assert_close(looked.sum(-1), torch.ones(2, 2, 5))
    assert not looked[1, ..., 2:].any()
    before = dict(seen)
    model(x, memory)  # outside of the context nothing is recorded
    assert seen == before


@pytest.mark.parametrize(
    "layer", [Attention("gaussian"), SelfAttention(8), MultiHeadAttention(8, 2, batch_first=True)]
)
def test_capture_of_one_layer(layer):
    x = torch.randn(1, 5, 8)
    inputs = (x,) if isinstance(layer, SelfAttention) else (x, x, x)
    with capture(layer) as seen:
        layer(*inputs)
    torch.testing.assert_close(seen["(itself)"].sum(-1), torch.ones(seen["(itself)"].shape[:-1]))


def test_a_capture_prints_a_line_for_each_layer():
    model = torch.nn.Sequential(TransformerEncoder(1, 8, 2, dim_feedforward=8), SelfAttention(8))
    with capture(model) as seen:
        assert repr(seen) == "CapturedAttention: nothing recorded yet"
        model(torch.randn(3, 5, 8))
    lines = ["0.layers.0.self_attn: (3, 2, 5, 5), 2 heads", "1: (3, 5, 5)"]
    assert repr(seen).splitlines() == ["CapturedAttention, by layer:", *(f"  {x}" for x in lines)]


def test_capture_draws_and_refuses():
    model = TransformerEncoder(2, 8, 2, dim_feedforward=16)
    with capture(model) as seen:
        with pytest.raises(ArgumentError, match="nothing was recorded"):
            seen.plot()
        model(torch.randn(1, 3, 8))
    titles = [axes.get_title() for axes in seen.plot().axes]
    assert titles[:2] == ["layers.0.self_attn, head 0", "layers.0.self_attn, head 1"]
    with pytest.raises(ArgumentError, match="no attention layer"), capture(torch.nn.Linear(2, 2)):
        pass
    decoder = TransformerDecoder(1, 8, 2, dim_feedforward=16, cross=False)
    with capture(decoder), pytest.raises(ArgumentError, match="cache"):
        decoder(torch.randn(1, 1, 8), cache=decoder.cache())
    mixed = torch.nn.ModuleList([Attention(), Attention()])
    with capture(mixed) as seen:
        for layer, n in zip(mixed, (2, 3), strict=True):
            layer(*[torch.randn(n, 4)] * 3)
    with pytest.raises(ShapeError, match="one shape"):
        seen.plot()
