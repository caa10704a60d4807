"""Blocks and stacks against torch's, with caches, masks and other scores."""

from __future__ import annotations

import copy
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from qkv import masks  # noqa: E402
from qkv.errors import ArgumentError, QkvError  # noqa: E402
from qkv.nn import (  # noqa: E402
    AdditiveScore,
    FeedForward,
    Transformer,
    TransformerBlock,
    TransformerDecoder,
    TransformerEncoder,
)

D, H, HIDDEN, N, L, M = 8, 2, 16, 2, 5, 4
PADDED = torch.tensor([[False] * L, [False] * 3 + [True] * 2])
MEMORY = torch.tensor([[False] * M, [False] * 2 + [True] * 2])


def build_layer(kind, cross, **options):
    torch.manual_seed(4)
    if kind is TransformerBlock:
        return kind(D, H, HIDDEN, cross=cross, dtype=torch.float64, **options)
    return kind(D, H, HIDDEN, batch_first=True, dtype=torch.float64, **options)


def compute_gradients(out, layer, x):
    torch.manual_seed(6)
    return torch.autograd.grad((out * torch.randn_like(out)).sum(), [x, *layer.parameters()])


def draw(length):
    return torch.randn(N, length, D, dtype=torch.float64).requires_grad_()


OPTIONS = [
    {},
    {"norm_first": True},
    {"activation": "gelu", "bias": False},
    {"norm_first": True, "layer_norm_eps": 0.1},
]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_encoder_block_equals_torch(options, train):
    theirs = build_layer(torch.nn.TransformerEncoderLayer, False, dropout=0.0, **options).train(
        train
    )
    ours = build_layer(TransformerBlock, False, dropout=0.0, **options).train(train)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    for a, b in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    x = draw(L)
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    hidden_by = {"src_mask": hidden, "src_key_padding_mask": PADDED}
    for want, got in (
        (theirs(x), ours(x)),
        (theirs(x, **hidden_by), ours(x, key_padding_mask=PADDED, is_causal=True)),
        (theirs(x, src_mask=hidden), ours(x, mask=masks.causal)),
        (theirs(x[0]), ours(x[0])),
    ):
        torch.testing.assert_close(got, want)
        for a, b in zip(
            compute_gradients(got, ours, x), compute_gradients(want, theirs, x), strict=True
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decoder_block_equals_torch(options):
    theirs = build_layer(torch.nn.TransformerDecoderLayer, True, dropout=0.0, **options)
    ours = build_layer(TransformerBlock, True, dropout=0.0, **options)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    x, memory = draw(L), draw(M)
    want = theirs(
        x,
        memory,
        tgt_mask=torch.ones(L, L, dtype=torch.bool).triu(1),
        memory_key_padding_mask=MEMORY,
    )
    got = ours(x, memory, is_causal=True, memory_key_padding_mask=MEMORY)
    torch.testing.assert_close(got, want)
    for a, b in zip(
        compute_gradients(got, ours, x), compute_gradients(want, theirs, x), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_state_dicts_go_both_ways():
    theirs = torch.nn.TransformerEncoderLayer(D, H, HIDDEN, batch_first=True).eval()
    ours = TransformerBlock(D, H, HIDDEN).eval()
    x = torch.randn(N, L, D)
    for source, target in ((theirs, ours), (ours, theirs)):
        with torch.no_grad():
            for weight in source.parameters():
                weight.mul_(1.5)
        target.load_state_dict(source.state_dict())
        torch.testing.assert_close(target(x), source(x), rtol=1e-6, atol=1e-6)


def test_encoder_decoder_equals_torch():
    kinds = {"dim_feedforward": HIDDEN, "dropout": 0.0, "dtype": torch.float64}
    theirs = torch.nn.Transformer(D, H, 2, 2, batch_first=True, **kinds)
    ours = Transformer(D, H, 2, 2, **kinds)
    ours.load_state_dict(theirs.state_dict())
    source, target = draw(M), draw(L)
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    want = theirs(
        source,
        target,
        tgt_mask=causal,
        src_key_padding_mask=MEMORY,
        memory_key_padding_mask=MEMORY,
    )
    got = ours(source, target, source_key_padding_mask=MEMORY)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("options", [{}, {"rotary": True, "num_kv_heads": 1}], ids=str)
@pytest.mark.parametrize("cross", [True, False])
def test_decoding_with_a_cache_equals_the_full_pass(cross, options):
    decoder = TransformerDecoder(2, D, H, cross=cross, norm=True, dim_feedforward=HIDDEN, **options)
    decoder.eval().double()
    x, memory = draw(12), draw(M) if cross else None
    hidden = {"memory_key_padding_mask": MEMORY} if cross else {}
    want = decoder(x, memory, **hidden)
    cache = decoder.cache()
    with torch.no_grad():
        for start, size in ((0, 3), *((i, 1) for i in range(3, 12))):
            out = decoder(x[:, start : start + size], memory, cache=cache, **hidden)
            torch.testing.assert_close(out, want[:, start : start + size])
    assert all(len(far) == (M if cross else 0) for _, far in cache)


def test_an_encoder_learns():
    torch.manual_seed(0)
    model = TransformerEncoder(2, D, H, dim_feedforward=HIDDEN, dropout=0.0, weighting="entmax15")
    x = torch.randn(16, L, D)
    goal = x.flip(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (model(x) - goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_feed_forward_is_its_formula():
    layer = FeedForward(4, 6, "silu").double()
    x = torch.randn(3, 4, dtype=torch.float64)
    inner = torch.nn.functional.silu(x @ layer.linear1.weight.T + layer.linear1.bias)
    torch.testing.assert_close(layer(x), inner @ layer.linear2.weight.T + layer.linear2.bias)


class Adapted(torch.nn.Module):
    """A linear layer with an addition of low rank, which knows no `in_features`."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.down = torch.nn.Linear(layer.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("make", [lambda: FeedForward(D), lambda: TransformerBlock(D, H, HIDDEN)])
def test_another_layer_in_the_place_of_a_linear_one(make):
    layer = make().eval()
    layer.linear1, layer.linear2 = map(Adapted, (layer.linear1, layer.linear2))
    x = torch.randn(N, L, D)
    out = layer(x)
    out.sum().backward()
    assert all(p.grad is not None for p in layer.linear1.parameters())
    with torch.no_grad():
        torch.testing.assert_close(layer(x), out.detach())
    with pytest.raises(ValueError, match=rf"x must be \(…, {D}\)"):
        FeedForward(D)(torch.randn(N, D + 1))


def test_a_block_can_be_copied():
    block = TransformerBlock(D, H, HIDDEN, cross=True).eval()
    x, memory = torch.randn(N, L, D), torch.randn(N, M, D)
    torch.testing.assert_close(copy.deepcopy(block)(x, memory), block(x, memory))


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda x: TransformerBlock(D, H, cross=True)(x), "memory.* pass it, or .*cross=False"),
        (lambda x: TransformerBlock(D, H)(x, x), "memory.* has no cross-attention.*cross=True"),
        (lambda x: TransformerBlock(D, 3), "embed_dim"),
        (lambda x: TransformerEncoder(0, D, H), "num_layers"),
        (lambda x: FeedForward(D, activation="gello"), "gelu"),
        (lambda x: FeedForward(D, activation=3), "activation"),
        (
            lambda x: TransformerDecoder(1, D, H, cross=False)(
                x, cache=TransformerDecoder(2, D, H).cache()
            ),
            "cache",
        ),
    ],
)
def test_what_is_wrong_is_refused(call, match):
    with pytest.raises(QkvError, match=match):
        call(torch.zeros(N, L, D))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (TransformerBlock, {"causal": True}, r"'causal'.*is_causal=True in the call"),
        (TransformerBlock, {"batch_first": True}, "'batch_first'"),
        (TransformerBlock, {"batch_first": True, "causal": True}, r"'batch_first'.*[^d]\.$"),
        (partial(TransformerEncoder, 1), {"scor": "dot"}, "'scor': did you mean 'score'"),
        (partial(TransformerDecoder, 1), {"is_causal": True}, "is_causal=True in the call"),
        (Transformer, {"kdim": 3}, "'kdim'"),
    ],
)
def test_an_error_for_a_keyword_names_the_class_called(kind, options, message):
    name = getattr(kind, "func", kind).__name__
    with pytest.raises(TypeError, match=rf"^{name} got an unexpected keyword argument.*{message}"):
        kind(D, H, **options)


def test_a_cache_of_another_model_is_refused():
    one, two = (TransformerDecoder(1, D, H, cross=False) for _ in range(2))
    cache, x = one.cache(), torch.zeros(1, 1, D)
    one(x, cache=cache)
    with pytest.raises(ArgumentError, match=r"cache .* another"):
        two(x, cache=cache)


def test_each_layer_of_a_stack_has_a_score_of_its_own():
    model = TransformerDecoder(2, 8, 2, dim_feedforward=16, score=AdditiveScore(4, 4, 6))
    result = [
        getattr(layer, name).score
        for layer in model.layers
        for name in ("self_attn", "multihead_attn")
    ]
    assert len({id(score.w_key) for score in result}) == 4
    assert not torch.equal(result[0].w_key, result[1].w_key)
