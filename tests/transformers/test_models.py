"""Models that take their attention by name say what they said; the others are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qkv.errors import ArgumentError
from tests.transformers.models import EAGER, assert_close, build, llama, tokens

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
ours = pytest.importorskip("qkv.transformers")
get_family = pytest.importorskip("qkv.transformers.models").get_family

# Each computes its attention by itself, or chooses it among classes of its own.
ALONE = [
    "Bark", "Bloom", "CodeGen", "Falcon", "GPTJ", "GPTNeo", "Git", "Luke", "MPNet", "MegatronBert",
    "Mvp", "RemBert", "RoFormer", "SqueezeBert", "XGLM", "XLNet",
]  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("implementation", ["qkv", "qkv-entmax"])
def test_models_that_would_not_be_reached_are_refused(name: str, implementation: str) -> None:
    ours.register("qkv-entmax", weighting="entmax15")
    kind = getattr(hf, f"{name}SemanticModel" if name == "Bark" else f"{name}Model")
    config = kind.config_class(vocab_size=9)
    with pytest.raises(ArgumentError, match=rf"{name}.*by itself.*'{implementation}'.*\"eager\""):
        kind._from_config(config, attn_implementation=implementation)
    assert not get_family(config).uses_interface


SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def text(name: str, **options: Any) -> Any:
    """A small model of texts, by its name."""

    def make() -> Any:
        config = getattr(hf, f"{name}Config")(**(SIZES | options))
        return config, getattr(hf, f"{name}Model")

    make.__name__ = name
    return make


def mpnet() -> Any:
    return text("MPNet")()


def opt() -> Any:
    return text("OPT", ffn_dim=32, word_embed_proj_dim=32, dropout=0.0)()


def gpt2() -> Any:
    config = hf.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None
    )
    return config, hf.GPT2Model


def pegasus() -> Any:
    """An encoder that computes its attention by itself, a decoder that does not, one config."""
    config = hf.BigBirdPegasusConfig(
        vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, encoder_attention_heads=4, decoder_attention_heads=4,
        attention_type="original_full", max_position_embeddings=40, dropout=0.0, pad_token_id=0,
    )  # fmt: skip
    return config, hf.BigBirdPegasusModel


# What each of them does that others do not: masks of numbers, a layer that does not say whether
# it is causal, or says so wrongly; weights that are collected outside the layers.
TAKEN = [
    text("AlignText"),
    text("ClapText"),
    text("Aimv2Text", eos_token_id=49),
    text("Bert"),
    text("SiglipText"),
    text("Qwen2", num_key_value_heads=2),
    opt,
    gpt2,
]


@torch.no_grad()
@pytest.mark.parametrize("make", TAKEN)
def test_every_way_of_masking_is_eagers(make: Any) -> None:
    theirs, mine = build(make, "eager", torch.float32), build(make, "qkv", torch.float32)
    ids = tokens(2)
    for dead in (slice(0, 0), slice(8, None), slice(0, 3), None):
        live = torch.ones_like(ids)
        if dead is not None:
            live[1, dead] = 0
        options = {} if dead is None else {"attention_mask": live}
        want = theirs(ids, **options, output_attentions=True)
        actual = mine(ids, **options, output_attentions=True)
        rows = live.bool()
        assert_close(actual.last_hidden_state[rows], want.last_hidden_state[rows], 20 * EAGER)
        assert len(actual.attentions) == len(want.attentions) == 2
        for one, two in zip(actual.attentions, want.attentions, strict=True):
            assert_close(one.mT.swapaxes(1, 3)[rows], two.mT.swapaxes(1, 3)[rows], 20 * EAGER)


@torch.no_grad()
@pytest.mark.parametrize("make", [*TAKEN, pegasus])
def test_a_capture_changes_nothing_and_sees_what_eager_tells(make: Any) -> None:
    model, ids = build(make, "eager", torch.float32), tokens()
    options = {"decoder_input_ids": ids[:, :6]} if make is pegasus else {}
    want = model(ids, **options, output_attentions=True)
    with ours.capture(model) as seen:
        actual = model(ids, **options)
    assert_close(actual.last_hidden_state, want.last_hidden_state, 20 * EAGER)
    alpha = want.decoder_attentions if make is pegasus else want.attentions
    layers = seen.select("self_attn") if make is pegasus else seen
    np.testing.assert_allclose(layers.weights, torch.cat(alpha).numpy(), atol=EAGER)


def test_a_name_that_is_set_afterwards() -> None:
    model = build(mpnet, "eager", torch.float32)
    want = model(tokens()).last_hidden_state
    model.set_attn_implementation("qkv")  # transformers warns, and leaves it alone
    assert_close(model(tokens()).last_hidden_state, want, 0)
    model.config._attn_implementation = "qkv"
    with pytest.raises(ArgumentError, match=r"MPNetConfig.*\"eager\""):
        model(tokens())


def test_a_part_that_is_named_by_its_config() -> None:
    config = hf.SamConfig(
        vision_config={"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "mlp_dim": 8, "image_size": 16, "patch_size": 8, "output_channels": 8,
                       "global_attn_indexes": [0], "window_size": 0, "num_pos_feats": 4},
        prompt_encoder_config={"hidden_size": 8, "image_size": 16, "patch_size": 8},
        mask_decoder_config={"hidden_size": 8, "num_attention_heads": 2, "mlp_dim": 8,
                             "num_hidden_layers": 1, "iou_head_hidden_dim": 8},
    )  # fmt: skip
    with pytest.raises(ArgumentError, match=r"SamVisionEncoder .*vision_config"):
        hf.SamModel._from_config(config, attn_implementation="qkv")
    parts = {"": "qkv", "vision_config": "eager"}
    model = hf.SamModel._from_config(config, attn_implementation=parts).eval()
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    points = torch.tensor([[[[3.0, 4.0]]]])
    with torch.no_grad():
        result = model(pixel_values=pixels, input_points=points).pred_masks
        with ours.capture(model) as seen:
            assert_close(model(pixel_values=pixels, input_points=points).pred_masks, result, 1e-6)
    assert seen.layers and not any("vision" in layer.name for layer in seen.layers)


def test_models_whose_source_is_not_known() -> None:
    class Mine(hf.LlamaConfig):  # type: ignore[misc, name-defined]
        pass

    def mine() -> Any:
        config, kind = llama()
        return Mine(**config.to_dict()), kind

    ids = tokens(2)
    live = torch.ones_like(ids)
    live[1, 8:] = 0
    with torch.no_grad():
        one, two = (build(x, "qkv")(ids, attention_mask=live).logits for x in (llama, mine))
    assert_close(one[live.bool()], two[live.bool()])


def test_keys_that_a_model_has_chosen() -> None:
    x = torch.randn(1, 2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chosen = torch.tensor([[[0, 0], [0, 1], [1, 2], [0, 3], [2, 4]]])
    live = torch.zeros(1, 1, 5, 5, dtype=torch.bool).scatter_(-1, chosen[:, None], True)
    seen = torch.ones(5, 5).tril().bool()[None, None]
    module = build(llama, "qkv").model.layers[0].self_attn
    attend = hf.AttentionInterface()["qkv"]
    want = attend(module, x, x, x, live & seen)[0]
    numbers = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~seen, torch.finfo(x.dtype).min)
    for mask in (seen, numbers, None):
        assert_close(attend(module, x, x, x, mask, indices=chosen)[0], want, 1e-12)
    with pytest.raises(ArgumentError, match="LlamaAttention passes block_indices"):
        attend(module, x, x, x, seen, block_indices=chosen)


def test_a_row_of_the_least_float_is_the_mean_as_in_eager_and_sdpa() -> None:
    x = torch.randn(1, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 1, 5, 5)
    mask[..., 2, :] = mask[..., 3, 1:] = torch.finfo(x.dtype).min
    module = build(llama, "qkv", num_key_value_heads=4).model.layers[0].self_attn
    ours, sdpa = (hf.AttentionInterface()[name] for name in ("qkv", "sdpa"))
    result = ours(module, x, x, x, mask)[0]
    assert_close(result, sdpa(module, x, x, x, mask)[0], 1e-6)
    assert_close(result[0, 2], x[0].mean(-2), 1e-6)
    none = ours(module, x, x, x, mask == 0)[0]
    assert (none[0, 2] == 0).all()
