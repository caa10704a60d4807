"""Learned scores against the objects of `qkv.scores`, and in every layer that takes them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch.nn.modules import module  # noqa: E402

import qkv  # noqa: E402
from qkv import masks, scores  # noqa: E402
from qkv.errors import ArgumentError, QkvError  # noqa: E402
from qkv.nn import (  # noqa: E402
    AdditiveScore,
    Attention,
    BahdanauDecoder,
    FeedForward,
    GatedScore,
    GaussianScore,
    KernelRegression,
    LearnedScore,
    MultiHeadAttention,
    MultiplicativeScore,
    SelfAttention,
    Transformer,
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


@pytest.mark.parametrize("layer", [AdditiveScore(4, 4), GaussianScore(), FeedForward(4)])
def test_a_call_names_the_nearest_keyword(layer):
    name, x = type(layer).__name__, torch.zeros(3, 4)
    known = "x" if name == "FeedForward" else "key, query"
    with pytest.raises(TypeError, match=rf"^{name}\.forward\(\) .* 'mask'.* Known: {known}\.$"):
        layer(*[x] * (1 + known.count(",")), mask=None)


def test_widths_that_do_not_fit_are_refused():
    with pytest.raises(QkvError, match="w_query"):
        MultiHeadAttention(8, 2, score=AdditiveScore(8, 8, 4))(*torch.zeros(3, 5, 1, 8))


# Learned scores by their names, and by their classes

LEARNED = {"additive": AdditiveScore, "multiplicative": MultiplicativeScore, "gated": GatedScore}
GIVEN = {**{name: name for name in LEARNED}, **{f"{k} class": v for k, v in LEARNED.items()}}
GIVEN["gaussian class"] = GaussianScore


def plain(score):
    """The same score as an object over copies of the module's parameters."""
    own = {name: x.detach().clone().requires_grad_() for name, x in score.named_parameters()}
    kinds = {AdditiveScore: scores.Additive, GatedScore: scores.Gated}
    if isinstance(score, GaussianScore):
        return scores.Gaussian(own["log_bandwidth"].exp()), own
    return kinds.get(type(score), scores.Multiplicative)(**own), own


@pytest.mark.parametrize("spec", GIVEN.values(), ids=GIVEN)
def test_a_layer_makes_a_learned_score_of_its_name(spec):
    torch.manual_seed(0)
    layer = SelfAttention(6, d_qk=4, d_v=3, score=spec, **F64)
    assert type(layer.score) is LEARNED.get(spec, spec)
    x = torch.randn(2, 5, 6, **F64)
    score, own = plain(layer.score)
    want = qkv.attend(
        x @ layer.w_query, x @ layer.w_key, x @ layer.w_value, score=score, engine="dense"
    )
    out = layer(x)
    torch.testing.assert_close(out, want)
    want = torch.autograd.grad(want.square().sum(), list(own.values()))
    actual = torch.autograd.grad(out.square().sum(), list(layer.score.parameters()))
    for a, b in zip(actual, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("score", GIVEN.values(), ids=GIVEN)
def test_heads_make_a_learned_score_of_its_name(score, tmp_path):
    def make():
        return MultiHeadAttention(8, 2, batch_first=True, score=score, **F64)

    layer, other = make(), make()
    x = torch.randn(2, 5, 8, **F64)
    q, k, v = (
        part.unflatten(-1, (2, 4)).transpose(1, 2)
        for part in (x @ layer.in_proj_weight.T + layer.in_proj_bias).chunk(3, -1)
    )
    heads = qkv.attend(q, k, v, score=plain(layer.score)[0], mask=masks.causal, engine="dense")
    want = layer.out_proj(heads.transpose(1, 2).flatten(-2))
    out, _ = layer(x, x, x, is_causal=True)
    torch.testing.assert_close(out, want)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    torch.testing.assert_close(other(x, x, x, is_causal=True)[0], out)


def test_hidden_is_the_width_of_a_head():
    layer = MultiHeadAttention(8, 2, score="additive", dtype=torch.float64)
    assert layer.score.w_query.shape == layer.score.w_key.shape == (4, 4)
    assert {x.dtype for x in layer.parameters()} == {torch.float64}
    assert AdditiveScore(3, 5).w_key.shape == (3, 5)
    inner = MultiHeadAttention(8, 2, score=GatedScore(4, 4, "additive")).score.score
    assert inner.w_query.shape == (4, 4)


def test_a_learned_score_of_ones_own_goes_by_its_class():
    class Scaled(LearnedScore):
        def __init__(self, d_q, d_k):
            super().__init__()
            self.by = torch.nn.Parameter(torch.full((), 1 / d_q))

        def build(self, dtype):
            return scores.ScaledDot(self.by.to(dtype))

    layer = SelfAttention(4, score=Scaled)
    x = torch.randn(5, 4)
    want = SelfAttention(4, score=scores.ScaledDot(0.25))
    want.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(layer(x), want(x))


def test_first_values_of_the_layer_are_those_of_torchs():
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(8, 2)
    torch.manual_seed(0)
    ours = MultiHeadAttention(8, 2, score="additive")
    for name, x in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], x)


@pytest.mark.parametrize("score", ["additive", AdditiveScore, AdditiveScore(4, 4)], ids=str)
def test_each_layer_of_a_stack_draws_its_own(score):
    model = Transformer(8, 2, 2, 2, dim_feedforward=8, score=score)
    result = [part.score for part in model.modules() if isinstance(part, MultiHeadAttention)]
    assert len({id(x) for x in result}) == len(result) == 6
    first = result[0].v
    assert not any(torch.equal(x.v, first) for x in result[1:])


def test_compiled_heads_with_a_learned_score_are_eager_ones():
    layer = MultiHeadAttention(8, 2, batch_first=True, score="additive", **F64)
    x = torch.randn(1, 5, 8, **F64)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, x, x)[0], layer(x, x, x)[0])


def test_models_make_a_learned_score_of_its_name():
    decoder = BahdanauDecoder(7, 3, 4, 5, score="multiplicative")
    assert decoder.score.w.shape == (4, 5)
    model = KernelRegression(torch.randn(6, 3, **F64), torch.randn(6, **F64), score="additive")
    assert model.score.w_key.shape == (3, 3) and model.score.w_key.dtype == torch.float64


def test_a_layer_without_widths_says_what_to_pass():
    for score in ("additive", AdditiveScore):
        with pytest.raises(ArgumentError, match=r"pass AdditiveScore\(d_query, d_key\)"):
            Attention(score)
    assert isinstance(Attention(GaussianScore).score, GaussianScore)
    assert Attention("gaussian").score == scores.Gaussian(1.0)


@pytest.mark.parametrize("name", MAKE)
def test_hooks_on_a_score_run(name):
    """They see the scores, and what they return counts; without them nothing is called."""
    torch.manual_seed(0)
    score = MAKE[name]()
    layer = MultiHeadAttention(8, 2, batch_first=True, score=score)
    x = torch.randn(2, 5, 8, requires_grad=True)
    plain = layer(x, x, x, need_weights=False, is_causal=True)[0]
    seen = []
    first = score.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    then = score.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    out = layer(x, x, x, need_weights=False, is_causal=True)[0]
    assert seen == [(2, 2, 5, 4), (2, 2, 5, 5)]
    torch.testing.assert_close(out, plain)
    weights = list(score.parameters())
    actual = (torch.autograd.grad(y.sum(), [x, *weights]) for y in (out, plain))
    for got, want in zip(*actual, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    first.remove()
    then.remove()
    layer(x, x, x, need_weights=False, is_causal=True)
    assert len(seen) == 2
    with score.register_forward_hook(lambda module, inputs, out: out * 0):
        flat = layer(x, x, x)[1]
    torch.testing.assert_close(flat, torch.full_like(flat, 1 / 5))


def test_hooks_on_an_inner_score_and_a_decoder_s_run():
    seen = []
    score = GatedScore(4, 4, "additive")
    score.score.register_forward_hook(lambda module, inputs, out: seen.append(tuple(out.shape)))
    Attention(score)(*torch.randn(3, 1, 5, 4))
    assert seen == [(1, 5, 5)]
    decoder = BahdanauDecoder(7, 2, 3, 4)
    tokens, memory = torch.tensor([[1, 2]]), torch.randn(1, 5, 4)
    plain = decoder(tokens, memory)[0]
    seen.clear()
    decoder.score.register_forward_hook(lambda module, inputs, out: seen.append(tuple(out.shape)))
    torch.testing.assert_close(decoder(tokens, memory)[0], plain)
    assert set(seen) == {(1, 1, 5)}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of tokens, by torch
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_on_all_modules_see_a_score(kind):
    """As those of a profiler: every module that runs, the last layer of the heads too."""
    seen: set[type] = set()
    layer = MultiHeadAttention(8, 2, batch_first=True, score="additive")
    plain = MultiHeadAttention(8, 2, batch_first=True)
    decoder = BahdanauDecoder(7, 2, 3, 4)
    x = torch.randn(2, 5, 8, requires_grad=True)
    with getattr(module, f"register_module_{kind}")(lambda part, *args: seen.add(type(part))):
        layer(x, x, x)[0].sum().backward()
        assert {AdditiveScore, type(layer.out_proj), MultiHeadAttention} <= seen
        seen.clear()
        decoder(torch.tensor([[1, 2]]), torch.randn(1, 5, 4))[0].sum().backward()
        assert AdditiveScore in seen
        seen.clear()
        with torch.no_grad():
            plain(x, x, x)
        assert (type(plain.out_proj) in seen) == (kind != "full_backward_hook")
