"""The seeds' models, what `describe` says of a model, and what `capture` sees in it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import qkv  # noqa: E402
from qkv import scores  # noqa: E402
from qkv.errors import ArgumentError, QkvError, ShapeError  # noqa: E402
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
    TransformerDecoder,
    TransformerEncoder,
    capture,
    describe,
)

F64 = {"dtype": torch.float64}


def test_bahdanau_is_its_formula():
    torch.manual_seed(0)
    decoder = BahdanauDecoder(vocabulary=7, embed_dim=3, hidden=4, memory_dim=5).double()
    tokens, memory = torch.tensor([[1, 2, 6], [0, 3, 3]]), torch.randn(2, 6, 5, **F64)
    mask = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    logits, last, weights = decoder(tokens, memory, mask)
    score = decoder.score
    s = torch.tanh(decoder.start(memory[:, 0]))
    for i in range(3):
        y = decoder.embedding(tokens[:, i])
        e = torch.tanh((s @ score.w_query.T)[:, None] + memory @ score.w_key.T + score.bias)
        alpha = torch.softmax((e @ score.v).masked_fill(mask, -torch.inf), -1)
        c = (alpha[..., None] * memory).sum(1)
        s = decoder.cell(torch.cat((y, c), -1), s)
        torch.testing.assert_close(weights[:, i], alpha)
        torch.testing.assert_close(logits[:, i], decoder.head(torch.cat((s, c, y), -1)))
    torch.testing.assert_close(last, s)


def test_bahdanau_goes_on_from_a_state():
    decoder = BahdanauDecoder(7, 3, 4, 5)
    tokens, memory = torch.tensor([[1, 2, 6]]), torch.randn(1, 6, 5)
    whole = decoder(tokens, memory)[0]
    first, state, _ = decoder(tokens[:, :2], memory)
    rest = decoder(tokens[:, 2:], memory, state=state)[0]
    torch.testing.assert_close(torch.cat((first, rest), 1), whole)


def test_bahdanau_learns_to_reverse():
    torch.manual_seed(0)
    encoder = torch.nn.GRU(6, 16, batch_first=True, bidirectional=True)
    decoder = BahdanauDecoder(6, 8, 16, 32)
    source = torch.randint(1, 6, (32, 4))
    goal = source.flip(1)
    fed = torch.cat((torch.zeros(32, 1, dtype=torch.long), goal[:, :-1]), 1)
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-2)
    for _ in range(80):
        memory = encoder(torch.nn.functional.one_hot(source, 6).float())[0]
        logits = decoder(fed, memory)[0]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), goal.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float((logits.argmax(-1) == goal).float().mean()) > 0.9


def test_squeeze_excitation_is_its_formula():
    layer = SqueezeExcitation(8, reduction=2).double()
    x = torch.randn(3, 8, 4, 5, **F64, requires_grad=True)
    gate = torch.sigmoid(layer.fc2(layer.fc1(x.mean((2, 3))).relu()))
    want = x * gate[..., None, None]
    torch.testing.assert_close(layer(x), want)
    torch.testing.assert_close(layer.gate(x), gate)
    wanted = [x, *layer.parameters()]
    for a, b in zip(
        *(torch.autograd.grad(y.square().sum(), wanted) for y in (layer(x), want)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_kernel_regression_is_nadaraya_watson():
    key, value, query = torch.randn(20, 3, **F64), torch.randn(20, **F64), torch.randn(5, 3, **F64)
    model = KernelRegression(key, value, bandwidth=0.8)
    near = torch.exp(-(torch.cdist(query, key) ** 2) / (2 * 0.8**2))
    torch.testing.assert_close(model(query), near @ value / near.sum(1))
    near = torch.exp(-(torch.cdist(key, key) ** 2) / (2 * 0.8**2)).fill_diagonal_(0)
    torch.testing.assert_close(model.held_out(), near @ value / near.sum(1))


def test_kernel_regression_learns_which_features_count():
    torch.manual_seed(0)
    key = torch.rand(200, 2)
    value = torch.stack(((6 * key[:, 0]).sin(), key[:, 0]), 1)
    model = KernelRegression(key, value, bandwidth=0.5, features=True)
    told = []
    losses = model.fit(60, told=told.append)
    assert losses[-1] < 0.2 * losses[0]
    assert told == losses
    useful, useless = model.score.bandwidth.tolist()
    assert useful < 0.2 < 0.5 < useless
    again = KernelRegression(key, value, features=True)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(key), model(key))


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: KernelRegression(torch.zeros(3), torch.zeros(3)), "key"),
        (lambda: KernelRegression(torch.zeros(3, 1), torch.zeros(4)), "value"),
        (lambda: SqueezeExcitation(8)(torch.zeros(1, 4, 2)), "x must be"),
        (lambda: SqueezeExcitation(0), "channels"),
        (lambda: BahdanauDecoder(5, 2, 0, 2), "hidden"),
        (
            lambda: BahdanauDecoder(5, 2, 2, 2)(torch.zeros(1, 3).long(), torch.zeros(2, 2)),
            "memory",
        ),
        (
            lambda: BahdanauDecoder(5, 2, 2, 2)(
                torch.zeros(1, 3).long(), torch.zeros(1, 4, 2), torch.zeros(1, 3).bool()
            ),
            "mask",
        ),
        (lambda: describe("model"), "module"),
        (lambda: describe(torch.nn.Linear(1, 1), length=0), "length"),
    ],
)
def test_what_is_wrong_is_refused(call, match):
    with pytest.raises(QkvError, match=match):
        call()


# describe


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
    found = describe(model, length=1024)
    engines = {layer.name: layer.engine for layer in found.layers}
    zeros = torch.zeros(1, 4, 1024, 16)
    score = scores.Additive(torch.zeros(8, 16), torch.zeros(8, 16), torch.zeros(8), torch.zeros(8))
    assert engines["plain"] == "native"
    assert engines["additive"] == qkv.explain(zeros, zeros, zeros, score=score).engine
    assert engines["sparse"] == "streaming"
    assert engines["out"] == ""
    assert found.parameters == sum(x.numel() for x in model.parameters())
    assert sum(layer.parameters for layer in found.layers) == found.parameters
    text = str(found)
    assert "4 heads of 16·16 → 16, 2 of keys" in text
    assert "AdditiveScore → Softmax" in text


def test_describe_counts_every_parameter_once():
    for model in (
        Transformer(8, 2, 1, 1, dim_feedforward=16),
        BahdanauDecoder(7, 3, 4, 5),
        KernelRegression(torch.randn(30, 2), torch.randn(30)),
        SqueezeExcitation(4),
    ):
        found = describe(model, length=8)
        assert sum(layer.parameters for layer in found.layers) == found.parameters
        assert str(found)


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
    given = (x,) if isinstance(layer, SelfAttention) else (x, x, x)
    with capture(layer) as seen:
        layer(*given)
    torch.testing.assert_close(seen["(itself)"].sum(-1), torch.ones(seen["(itself)"].shape[:-1]))


def test_a_capture_is_told_in_a_line_for_each_layer():
    model = torch.nn.Sequential(TransformerEncoder(1, 8, 2, dim_feedforward=8), SelfAttention(8))
    with capture(model) as seen:
        assert repr(seen) == "Seen: nothing yet"
        model(torch.randn(3, 5, 8))
    lines = ["0.layers.0.self_attn: (3, 2, 5, 5), 2 heads", "1: (3, 5, 5)"]
    assert repr(seen).splitlines() == ["Seen, by layer:", *(f"  {x}" for x in lines)]


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


def test_each_layer_of_a_stack_has_a_score_of_its_own():
    model = TransformerDecoder(2, 8, 2, dim_feedforward=16, score=AdditiveScore(4, 4, 6))
    found = [
        getattr(layer, name).score
        for layer in model.layers
        for name in ("self_attn", "multihead_attn")
    ]
    assert len({id(score.w_key) for score in found}) == 4
    assert not torch.equal(found[0].w_key, found[1].w_key)
