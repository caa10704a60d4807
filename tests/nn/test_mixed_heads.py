"""Differential attention beside DiffLlama, and talking heads beside the paper's formula."""

from __future__ import annotations

import pytest
import torch

from qkv import masks, nn, weightings
from qkv.errors import ArgumentError, ShapeError

X = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_differential_attention_is_that_of_diffllama(kv_heads):
    diffllama = pytest.importorskip("transformers.models.diffllama.modeling_diffllama")
    torch.manual_seed(0)
    config = diffllama.DiffLlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=8
    )
    config._attn_implementation = "eager"
    theirs = diffllama.DiffLlamaAttention(config, layer_idx=3).double()
    ours = nn.DifferentialAttention(
        32, 2, depth=3, num_kv_heads=kv_heads // 2, head_dim=8, rotary=True, dtype=torch.float64
    )
    missing = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert missing.missing_keys == ["norm.weight"] and not missing.unexpected_keys
    positions = diffllama.DiffLlamaRotaryEmbedding(config)(X, torch.arange(9)[None])
    shut = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)
    want = theirs(X, tuple(x.double() for x in positions), shut[None, None])[0]
    torch.testing.assert_close(ours(X, is_causal=True), want, rtol=1e-6, atol=1e-6)
    assert ours(X, is_causal=True).grad_fn is not None
    with torch.no_grad():
        cache = nn.Cache()
        steps = [ours(X[:, i : i + 1], is_causal=True, cache=cache) for i in range(9)]
        torch.testing.assert_close(torch.cat(steps, 1), ours(X, is_causal=True))


@pytest.mark.parametrize("weighting", ["softmax", "entmax15"])
def test_talking_heads_are_those_of_the_paper(weighting):
    torch.manual_seed(0)
    layer = nn.TalkingHeadsAttention(32, 4, weighting=weighting, dtype=torch.float64)
    plain = layer(X, is_causal=True)
    for matrix in (layer.mix_scores, layer.mix_weights):
        torch.nn.init.normal_(matrix)
    q, k, v = (p(X).unflatten(-1, (4, 8)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    # Shazeer et al. (2020), section 3: P_l mixes logits, P_w mixes weights.
    logits = torch.einsum("bnfd,bmfd->bfnm", q, k) / 8**0.5
    logits = torch.einsum("gf,bfnm->bgnm", layer.mix_scores, logits)
    logits = logits.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    alpha = weightings.resolve(weighting)(logits)
    alpha = torch.einsum("hg,bgnm->bhnm", layer.mix_weights, alpha)
    want = layer.o_proj(torch.einsum("bhnm,bmhd->bnhd", alpha, v).flatten(-2))
    out = layer(X, is_causal=True)
    torch.testing.assert_close(out, want)
    assert (out - plain).abs().max() > 0.1
    slopes = [torch.autograd.grad(x.square().sum(), list(layer.parameters())) for x in (out, want)]
    torch.testing.assert_close(*slopes)
    with torch.no_grad():
        cache = nn.Cache()
        steps = [layer(X[:, i : i + 3], masks.window(4), True, cache=cache) for i in (0,)]
        torch.testing.assert_close(steps[0], layer(X[:, :3], masks.window(4), True))


def test_talking_heads_start_as_plain_heads():
    torch.manual_seed(0)
    layer = nn.TalkingHeadsAttention(32, 4, dtype=torch.float64)
    other = nn.MultiHeadAttention(32, 4, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        parts = [x.weight for x in (layer.q_proj, layer.k_proj, layer.v_proj)]
        other.in_proj_weight.copy_(torch.cat(parts))
        other.out_proj.weight.copy_(layer.o_proj.weight)
    torch.testing.assert_close(layer(X), other(X, X, X)[0])


@pytest.mark.parametrize("kind", [nn.DifferentialAttention, nn.TalkingHeadsAttention])
def test_what_is_refused(kind):
    with pytest.raises(ArgumentError, match="multiple of"):
        kind(30, 4)
    with pytest.raises(ShapeError, match="width of this layer"):
        kind(16, 2)(torch.ones(1, 3, 8))
    with pytest.raises(ArgumentError, match="batch, n, 16"):
        kind(16, 2)(torch.ones(3, 16))
