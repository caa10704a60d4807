"""Models that attend by qkv say what they said before."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv import masks
from qkv.errors import ArgumentError, CombinationError, ShapeError
from tests.transformers.models import (
    DECODERS,
    EAGER,
    SENTENCE,
    TINY,
    assert_close,
    build,
    gemma,
    like,
    llama,
    minilm,
    qwen,
    sinks,
    t5,
    tokens,
)

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
ours = pytest.importorskip("qkv.transformers")


@torch.no_grad()
def test_minilm_says_what_it_says_in_eager(folder: Path, tokenizer: Any, eager: Any) -> None:
    model = minilm(folder, "qkv")
    inputs = tokenizer([SENTENCE, "A dog."], padding=True, return_tensors="pt")
    ours, theirs = model(**inputs), eager(**inputs)
    live = inputs["attention_mask"].bool()
    assert_close(ours.last_hidden_state[live], theirs.last_hidden_state[live], 1e-5)
    assert_close(ours.pooler_output, theirs.pooler_output, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("make", DECODERS)
def test_logits_are_the_models_own(make: Any) -> None:
    name, atol = like(make)
    theirs, mine = build(make, name), build(make, "qkv")
    ids = tokens(2)
    assert_close(mine(ids).logits, theirs(ids).logits, atol)
    live = torch.ones_like(ids)
    live[1, 8:] = 0
    one, two = (model(ids, attention_mask=live).logits[live.bool()] for model in (mine, theirs))
    assert_close(one, two, atol)


@torch.no_grad()
@pytest.mark.parametrize("make", DECODERS)
def test_generation_with_a_cache_gives_the_same_tokens(make: Any) -> None:
    # In float32, for transformers' least float64 is −∞ to eager, and its padding NaN.
    theirs, mine = (build(make, name, torch.float32) for name in (like(make)[0], "qkv"))
    ids = tokens(2, 6)
    live = torch.ones_like(ids)
    live[0, :2] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": live, "pad_token_id": 0}
    assert torch.equal(mine.generate(ids, **options), theirs.generate(ids, **options))


@torch.no_grad()
def test_generation_with_a_static_cache() -> None:
    ids = tokens(2, 6)
    model = build(llama, "qkv")
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    for dead in ([], [0, 0], [0, 1]):  # none, the same in both, in one of them
        live = torch.ones_like(ids)
        for row, column in enumerate(dead):
            live[row, : 2 - column] = 0
        inputs = {"attention_mask": live, **options}
        plain = model.generate(ids, **inputs)
        assert torch.equal(model.generate(ids, cache_implementation="static", **inputs), plain)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_token_builds_no_mask_and_no_score(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def attend(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return qkv.attend(*args, **options)

    monkeypatch.setattr("qkv.transformers.implementation.attend", attend)
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
    build(llama, "qkv").generate(tokens(), disable_compile=True, **options)
    assert len({id(x["score"]) for x in calls}) == 1
    assert [x["mask"] for x in calls[:2]] == [masks.causal] * 2
    # In a cache of fixed length, the keys of a token are cut out.
    assert {x["mask"] for x in calls[2:]} == {None}


@torch.no_grad()
@pytest.mark.filterwarnings("error")
def test_a_compiled_model_is_one_graph() -> None:
    model = build(llama, "qkv")
    result = torch.compile(model, backend="eager", fullgraph=True)(tokens(), use_cache=False)
    assert_close(result.logits, model(tokens()).logits)


@pytest.mark.parametrize("make", DECODERS)
def test_gradients_of_a_training_step_are_the_models_own(make: Any) -> None:
    ids = tokens(2)
    result = {}
    name, atol = like(make)
    for implementation in (name, "qkv"):
        model = build(make, implementation)
        model(ids, labels=ids).loss.backward()
        result[implementation] = {
            name: x.grad for name, x in model.named_parameters() if x.grad is not None
        }
    assert result["qkv"].keys() == result[name].keys()
    for parameter, gradient in result[name].items():
        assert_close(result["qkv"][parameter], gradient, max(1.0, gradient.abs().max()) * 10 * atol)


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
    inputs = mask if kind == "float" else allowed
    assert_close(build(llama, "qkv")(ids, attention_mask=inputs[None, None]).logits, theirs, EAGER)
    # A rule and a weighting that no float can be added to.
    ours.register("qkv-boxes", score="boxcar", weighting="normalized")
    boxes = build(llama, "qkv-boxes")(ids, attention_mask=inputs[None, None]).logits
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
    assert_close(results[1], results[0])
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
    assert_close(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() > 1e-6
    assert_close(model.eval()(tokens()).logits, build(llama, "sdpa")(tokens()).logits)


@torch.no_grad()
def test_output_attentions() -> None:
    ours = build(llama, "qkv")(tokens(), output_attentions=True).attentions
    theirs = build(llama, "eager")(tokens(), output_attentions=True).attentions
    assert_close(ours, theirs, EAGER)


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
    assert_close(call(name, q, k, v)[0], expected.transpose(1, 2))
    ours.register("qkv-near", score="gaussian", weighting="hard")
    nearest = distance.argmin(-1)[..., None].expand(-1, -1, -1, 3)
    assert_close(call("qkv-near", q, k, v)[0], v.gather(2, nearest).transpose(1, 2))


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
    out, result = call("qkv", q, k, v, module=Layer(True), **options)
    assert_close(result, alpha)
    assert_close(out, (alpha @ v.repeat_interleave(2, 1)).transpose(1, 2))


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


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_without_its_packages(name: str) -> None:
    code = f"import sys; sys.modules[{name!r}] = None; import qkv.transformers"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert "MissingExtraError: qkv.transformers needs torch and transformers 5" in run.stderr
    assert run.stderr.count("Traceback") == 1
