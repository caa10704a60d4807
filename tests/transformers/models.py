"""Small models of transformers with random weights, the same for every implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def llama(**options: Any) -> Any:
    return hf.LlamaConfig(**(TINY | options)), hf.LlamaForCausalLM


def mistral() -> Any:
    return hf.MistralConfig(**TINY, sliding_window=4), hf.MistralForCausalLM


def gemma() -> Any:
    return (
        hf.Gemma2Config(
            **TINY,
            head_dim=8,
            sliding_window=4,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=8,
        ),
        hf.Gemma2ForCausalLM,
    )


def qwen() -> Any:
    return hf.Qwen3Config(**TINY, head_dim=8), hf.Qwen3ForCausalLM


def sinks() -> Any:
    options = TINY | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    kinds = ["sliding_attention", "full_attention"]
    config = hf.GptOssConfig(**options, sliding_window=4, layer_types=kinds)
    return config, hf.GptOssForCausalLM


def gpt2() -> Any:
    config = hf.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None
    )
    return config, hf.GPT2LMHeadModel


DECODERS = [llama, mistral, gemma, qwen, sinks, gpt2]


def t5() -> Any:
    config = hf.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return config, hf.T5ForConditionalGeneration


def build(make: Any, implementation: str, dtype: Any = torch.float64, **options: Any) -> Any:
    """The same random weights for every implementation."""
    config, kind = make(**options)
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # the only one for float64
    model = kind._from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # so that attention is far from even
    return model.to(dtype)


def tokens(batch: int = 1, n: int = 11) -> Any:
    return torch.randint(2, 50, (batch, n), generator=torch.Generator().manual_seed(1))


def assert_close(one: Any, two: Any, atol: float = 1e-9) -> None:
    torch.testing.assert_close(one, two, atol=atol, rtol=0)


# transformers' eager takes its softmax in float32 whatever the model's type.
EAGER = 1e-5


def like(make: Any) -> tuple[str, float]:
    """What is compared with, and how exact that is itself."""
    return ("eager", EAGER) if make in (gemma, sinks) else ("sdpa", 1e-9)


SENTENCE = "When he saw his owner, the dog was happy, so he wagged his tail"


def minilm(folder: Path, implementation: str) -> Any:
    return hf.AutoModel.from_pretrained(
        folder, attn_implementation=implementation, local_files_only=True
    ).eval()
