"""Latent attention beside DeepSeek-V3 of transformers, with the same parameters."""

from __future__ import annotations

import pytest
import torch

from qkv import nn
from qkv.errors import ArgumentError

X = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SIZES = {"kv_rank": 12, "head_dim": 8, "rotary_dim": 4, "value_dim": 6, "dtype": torch.float64}


@pytest.mark.parametrize("q_rank", [None, 20])
@pytest.mark.parametrize("interleaved", [True, False])
def test_it_is_that_of_deepseek(q_rank, interleaved):
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    torch.manual_seed(0)
    config = deepseek.DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=12,
        q_lora_rank=q_rank,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        rope_interleave=interleaved,
    )
    config._attn_implementation = "eager"
    theirs = deepseek.DeepseekV3Attention(config, layer_idx=0).double()
    rotary = None if interleaved else nn.Rotary(4)
    ours = nn.LatentAttention(32, 4, q_rank=q_rank, rotary=rotary, **SIZES)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    positions = [
        x.double() for x in deepseek.DeepseekV3RotaryEmbedding(config)(X, torch.arange(11)[None])
    ]
    shut = torch.full((11, 11), -torch.inf, dtype=torch.float64).triu(1)
    want = theirs(X, tuple(positions), shut[None, None])[0]
    for absorb in (False, True):
        out = ours(X, is_causal=True, absorb=absorb)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)  # its angles are float32
    with torch.no_grad():
        cache = nn.Cache()
        steps = [ours(part, is_causal=True, cache=cache) for part in X.split((8, 1, 2), 1)]
    torch.testing.assert_close(torch.cat(steps, 1), ours(X, is_causal=True).detach())
    assert [x.shape for x in cache._current_rows()] == [(2, 1, 11, 16), (2, 1, 11, 0)]


@pytest.mark.parametrize("weighting", ["softmax", "sparsemax"])
def test_both_forms_have_the_same_gradients(weighting):
    torch.manual_seed(0)
    layer = nn.LatentAttention(32, 4, weighting=weighting, **SIZES)
    losses = [layer(X, is_causal=True, absorb=x).square().sum() for x in (True, False)]
    slopes = [torch.autograd.grad(x, list(layer.parameters())) for x in losses]
    torch.testing.assert_close(*slopes)


def test_few_queries_read_the_latent_rows():
    layer = nn.LatentAttention(32, 4, kv_rank=512, head_dim=128, device="meta")
    assert layer._saves_products(1) and layer._saves_products(170)
    assert not layer._saves_products(171)


def test_a_rotary_of_another_width_is_refused():
    with pytest.raises(ArgumentError, match="rotary_dim is 4"):
        nn.LatentAttention(32, 4, rotary=nn.Rotary(8), **SIZES)
