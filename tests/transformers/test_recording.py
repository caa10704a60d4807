"""A model's weights, recorded while it runs, are those of eager."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv import plot
from qkv.errors import ArgumentError, CombinationError, DtypeError, ShapeError
from tests.interrupt import stopped
from tests.transformers.models import (
    SENTENCE,
    TINY,
    assert_close,
    build,
    gemma,
    llama,
    minilm,
    mistral,
    sinks,
    t5,
    tokens,
)

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
ours = pytest.importorskip("qkv.transformers")


def run_model(model: Any, ids: Any, **options: Any) -> Any:
    with torch.no_grad(), ours.capture(model, **options) as seen:
        model(ids)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "qkv"])
def test_the_grid_of_heads_is_the_models_own(
    folder: Path, tokenizer: Any, eager: Any, implementation: str
) -> None:
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    expected = torch.cat(eager(**inputs, output_attentions=True).attentions).numpy()
    model = minilm(folder, implementation)
    before = model(**inputs).last_hidden_state
    with ours.capture(model) as seen:
        during = model(**inputs).last_hidden_state
    assert seen.weights.shape == (6, 12, 19, 19)
    np.testing.assert_allclose(seen.weights, expected, atol=1e-5)
    assert_close(during, before, 1e-5)
    assert model.config._attn_implementation == implementation
    assert [layer.name for layer in seen.layers][1] == "encoder.layer.1.attention.self"


def test_a_wrapper_with_a_model_inside(folder: Path) -> None:
    sentences = pytest.importorskip("sentence_transformers")
    model = sentences.SentenceTransformer(str(folder), local_files_only=True)
    with ours.capture(model) as seen:
        model.encode([SENTENCE], show_progress_bar=False)
    assert seen.weights.shape == (6, 12, 19, 19)


@pytest.mark.parametrize("make", [llama, mistral, gemma, sinks])
def test_a_decoders_weights_are_eagers(make: Any) -> None:
    ids = tokens()
    with torch.no_grad():
        result = build(make, "eager")(ids, output_attentions=True).attentions
    seen = run_model(build(make, "sdpa" if make is llama else "eager"), ids)
    np.testing.assert_allclose(seen.weights, torch.cat(result).numpy(), atol=1e-6)


def test_a_capture_keeps_the_models_own_weighting() -> None:
    ours.register("qkv-one", weighting="hard")
    seen = run_model(build(llama, "qkv-one"), tokens())
    assert set(np.unique(seen.weights)) == {0.0, 1.0}


def test_top_and_pool_and_budget() -> None:
    model, ids = build(llama, "sdpa"), tokens(1, 40)
    full = run_model(model, ids).weights
    assert full.shape == (2, 4, 40, 40)

    top = run_model(model, ids, top=3)
    alpha, keys = top.top
    assert alpha.shape == keys.shape == (2, 4, 40, 3)
    np.testing.assert_allclose(alpha, np.sort(full, -1)[..., ::-1][..., :3], atol=1e-7)
    np.testing.assert_allclose(np.take_along_axis(full, keys, -1), alpha, atol=1e-7)
    truncated = full * (full >= alpha[..., -1:])
    np.testing.assert_allclose(top.weights, truncated, atol=1e-7)
    assert top.plot(layer=0, head=0).axes

    pooled = run_model(model, ids, pool=10)
    np.testing.assert_allclose(
        pooled.weights, full.reshape(2, 4, 10, 4, 10, 4).max((3, 5)), atol=1e-7
    )
    figure = pooled.plot(layer=0, head=0)
    assert len(figure.axes[0].get_yticklabels()) > 1
    assert figure.get_suptitle() == "pooled: max of up to 4 × 4"
    assert plot.heads(pooled).axes[0].get_title() == "pooled: max of up to 4 × 4"
    assert not plot.heads(top).axes[0].get_title()
    with pytest.raises(ArgumentError, match="largest weight of each block of 4 × 4"):
        plot.data.entropy(pooled)

    small = run_model(model, ids, budget=2 * 4 * 4 * 20 * 20)
    assert small.weights.shape == (2, 4, 20, 20)
    assert small.nbytes <= 2 * 4 * 4 * 20 * 20
    np.testing.assert_allclose(
        small.weights, full.reshape(2, 4, 20, 2, 20, 2).max((3, 5)), atol=1e-7
    )
    with pytest.raises(ArgumentError, match="pooled"):
        small.words(None, ids)
    with pytest.raises(ArgumentError, match="top"):
        _ = small.top


def test_a_small_budget_works_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(gemma, "eager"), tokens(1, 23)
    full = run_model(model, ids)
    monkeypatch.setattr("qkv.transformers.recording.MAX_WORKING_BYTES", 4 * 4 * 23 * 5)
    np.testing.assert_allclose(run_model(model, ids).weights, full.weights, atol=1e-7)
    pooled = run_model(model, ids, pool=4)
    groups = np.arange(23) * 4 // 23
    for i, j in np.ndindex(4, 4):
        block = full.weights[..., groups == i, :][..., groups == j]
        np.testing.assert_allclose(pooled.weights[..., i, j], block.max((-2, -1)), atol=1e-7)


def test_budget_that_cannot_be_kept() -> None:
    model = build(llama, "sdpa")
    for options, hint in (({"top": 11}, "smaller top"), ({"pool": 11}, "smaller pool"), ({}, "")):
        with pytest.raises(ArgumentError, match=f"larger budget.*{hint}"):
            run_model(model, tokens(), budget=8, **options)
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
    np.testing.assert_allclose(run_model(model, ids).weights, expected, atol=1e-6)
    budget = 4 * 4 * 4 * 8 * 8
    small = run_model(model, ids, budget=budget)
    assert small.nbytes <= budget
    halves = expected.reshape(4, 4, 8, 2, 8, 2).max((3, 5))
    np.testing.assert_allclose(small.weights, halves, atol=1e-6)


def test_encoder_and_decoder_apart() -> None:
    model = build(t5, "eager")
    with torch.no_grad():
        inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(1, 5)}
        expected = model(**inputs, output_attentions=True)
        with ours.capture(model) as seen:
            model(**inputs)
    for name, actual in (
        ("encoder.", expected.encoder_attentions),
        ("SelfAttention", expected.decoder_attentions),
        ("EncDecAttention", expected.cross_attentions),
    ):
        part = seen.select("decoder.") if name == "SelfAttention" else seen
        np.testing.assert_allclose(part.select(name).weights, torch.cat(actual).numpy(), atol=1e-6)
    with pytest.raises(ShapeError, match=r"11 × 11.*5 × 11"):
        _ = seen.weights
    with pytest.raises(ShapeError, match="5 queries and 11 keys"):
        seen.select("EncDec").words(None, [1])
    with pytest.raises(ArgumentError, match="'vision'"):
        seen.select("vision")


def test_the_last_pass_counts() -> None:
    model = build(llama, "sdpa")
    with torch.no_grad(), ours.capture(model) as seen:
        assert repr(seen) == "CapturedAttention(nothing recorded yet)"
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


def test_an_interrupt_while_a_capture_begins_leaves_the_model_as_it_was() -> None:
    from qkv.transformers import recording

    model = build(llama, "sdpa")
    for after in itertools.count():
        begun = ours.capture(model)
        if not stopped(begun.__enter__, after, recording.__file__):
            begun.__exit__(None, None, None)
            break
        assert not model._forward_hooks and not model._forward_pre_hooks
        assert model.config._attn_implementation == "sdpa" and not recording._SWITCHED_CONFIGS
    assert after > 10


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
    barrier, result, faults = threading.Barrier(3), {}, []

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
                    result[n] = seen.weights.shape
        except Exception as fault:
            faults.append(fault)

    threads = [
        threading.Thread(target=work, args=shape) for shape in ((4, True), (6, True), (9, False))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert result == {4: (2, 4, 4, 4), 6: (2, 4, 6, 6)}
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
        assert_close(x.grad, gradient, 1e-8)


def test_models_that_cannot_be_captured() -> None:
    with pytest.raises(DtypeError, match=r"pipeline pass pipeline\.model"), ours.capture("bert"):
        pass
    with (
        pytest.raises(ArgumentError, match="Linear that contains no"),
        ours.capture(torch.nn.Linear(1, 1)),
    ):
        pass
    own = hf.XLNetModel(hf.XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=2, d_inner=8))
    with (
        pytest.raises(ArgumentError, match="XLNetModel has no attention, or computes it by itself"),
        ours.capture(own),
    ):
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


def linear() -> Any:
    kinds = ["linear_attention", "full_attention"]
    options = TINY | {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    return hf.MiniMaxConfig(**options, layer_types=kinds, block_size=4), hf.MiniMaxModel


def test_what_attends_in_a_way_of_its_own_is_named() -> None:
    seen = run_model(build(linear, "eager", torch.float32), tokens(5))
    assert [layer.name for layer in seen.layers] == ["layers.1.self_attn"]
    assert seen.unseen == seen.select("layers.1").unseen == ("layers.0.self_attn",)
    assert repr(seen).endswith("; not recorded: layers.0.self_attn)")
    assert not run_model(build(llama, "eager"), tokens(5)).unseen
