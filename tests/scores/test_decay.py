"""Decay: scores that shrink with the distance, beside RetNet's formula and lightning attention."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import qkv
from qkv import masks, scores
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks import get_framework, to_numpy
from tests.installed_frameworks import FRAMEWORKS, WITH_GRADIENTS

HEADS, N, D, DV = 4, 300, 3, 5
rng = np.random.default_rng(0)
QUERY, KEY = (rng.normal(size=(1, HEADS, N, D)) for _ in range(2))
VALUE = rng.normal(size=(1, HEADS, N, DV))
RATES = -np.log(1 - 2.0 ** (-5 - np.arange(HEADS)))


def compute_retention(query, key, value):
    """RetNet's parallel form: (QKᵀ/√d ⊙ D) V, with D_ij = γ^(i − j) for i ≥ j, else 0."""
    distance = np.arange(N)[:, None] - np.arange(N)
    gamma = 1 - 2.0 ** (-5 - np.arange(HEADS)[:, None, None])
    decay = np.where(distance >= 0, gamma ** np.maximum(distance, 0), 0)
    return query @ key.swapaxes(-2, -1) / D**0.5 * decay @ value


@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
def test_the_same_as_retention(fw):
    *arrays, rates = (fw.make_array(x) for x in (QUERY, KEY, VALUE, RATES))
    score = scores.Decay(rates, "scaled_dot")
    options = {"score": score, "weighting": "raw", "mask": "causal"}
    assert qkv.explain(*arrays, **options).engine == "linear"
    want = compute_retention(QUERY, KEY, VALUE)
    for engine in (None, "dense", "streaming"):
        out = to_numpy(qkv.attend(*arrays, **options, engine=engine))
        np.testing.assert_allclose(out, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("weighting", ["raw", "normalized"])
@pytest.mark.parametrize("fw", WITH_GRADIENTS, ids=lambda fw: fw.name)
def test_gradients_of_all_arrays_and_rates(fw, weighting):
    arrays = [fw.make_array(x) for x in (QUERY, KEY, VALUE, np.array([0.5, 0.01, 3.0, 0.0]))]
    along = fw.make_array(rng.normal(size=VALUE.shape))

    def loss(engine, *arrays):
        score = scores.Decay(arrays[3], scores.FeatureMap())
        options = {"score": score, "weighting": weighting, "mask": masks.causal}
        out = qkv.attend(*arrays[:3], **options, engine=engine)
        return get_framework(out).xp.sum(out * along)

    pairs = zip(
        *(fw.compute_gradients(partial(loss, engine), arrays) for engine in ("linear", "dense")),
        strict=True,
    )
    for actual, desired in pairs:
        np.testing.assert_allclose(to_numpy(actual), to_numpy(desired), rtol=1e-8, atol=1e-8)


def test_the_same_as_lightning_attention():
    torch = pytest.importorskip("torch")
    minimax = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = minimax.MiniMaxConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, head_dim=8, block_size=64
    )
    config.layer_types = ["linear_attention"] * 2
    layer = minimax.MiniMaxLightningAttention(config, layer_idx=0)
    x, outputs = torch.randn(2, 192, 32), []
    layer.norm.register_forward_pre_hook(lambda module, inputs: outputs.append(inputs[0]))
    layer(x, None, None)
    projected = layer.act_fn(layer.qkv_proj(x)).reshape(2, 192, 4, 24).transpose(1, 2)
    score = scores.Decay(layer.slope_rate[:, 0, 0])
    options = {"score": score, "weighting": "raw", "mask": "causal", "engine": "linear"}
    ours = qkv.attend(*projected.split(8, dim=-1), **options)
    theirs = outputs[0].reshape(2, 192, 4, 8).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_rate_of_zero_changes_nothing_and_both_sides_decay():
    options = {"weighting": "raw", "mask": "causal"}
    out = qkv.attend(QUERY, KEY, VALUE, score=scores.Decay(0.0), engine="linear", **options)
    np.testing.assert_allclose(out, qkv.attend(QUERY, KEY, VALUE, score="dot", **options))
    far = np.abs(np.arange(N)[:, None] - np.arange(N) + 0.0)
    want = QUERY @ KEY.swapaxes(-2, -1) * np.exp(-0.3 * far) @ VALUE
    explained = qkv.explain(QUERY, KEY, VALUE, score=scores.Decay(0.3), weighting="raw")
    assert "only sums with masks.causal" in dict(explained.refusals)["linear"]
    np.testing.assert_allclose(
        qkv.attend(QUERY, KEY, VALUE, score=scores.Decay(0.3), weighting="raw"), want
    )


def test_of_exponentials_it_is_alibi():
    alpha = np.exp(QUERY @ KEY.swapaxes(-2, -1) / D**0.5 - 0.3 * np.arange(N)[:, None])
    alpha = np.tril(alpha * np.exp(0.3 * np.arange(N)))
    out = qkv.attend(
        QUERY,
        KEY,
        VALUE,
        score=scores.Relative(scores.Alibi(np.full(HEADS, 0.3))),
        mask="causal",
    )
    np.testing.assert_allclose(out, alpha / alpha.sum(-1, keepdims=True) @ VALUE)


@pytest.mark.parametrize("score", [scores.Decay(0.5), scores.Relative(np.array([-3.0, 0, -3.0]))])
def test_rows_of_a_database_have_positions(score):
    answer = qkv.Database(KEY[0, 0], np.arange(N)).ask(QUERY[0, 0, 0], score=score, top=N)
    alpha = qkv.weights(QUERY[0, 0, :1], KEY[0, 0], score=score)[0]
    np.testing.assert_allclose(answer.weights, alpha, rtol=1e-5)  # keys are float32


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: scores.Decay(-1.0), ArgumentError, "at least 0"),
        (lambda: scores.Decay("fast"), DtypeError, "rate must be a number"),
        (lambda: scores.Decay(np.ones((4, 1))), ShapeError, "rate must be a number"),
        (lambda: scores.Decay(0.1, align="end"), ArgumentError, "align"),
        (
            lambda: qkv.attend(QUERY, KEY, VALUE, score=scores.Decay(np.ones(3))),
            ShapeError,
            "for 3 heads",
        ),
    ],
)
def test_what_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()
