"""Relative biases: beside plain loops, and beside Bloom, MPT and T5 in transformers."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import qkv
from qkv import masks, scores
from qkv.engines import streaming
from qkv.errors import ArgumentError, CombinationError, DtypeError, ShapeError

HEADS, N, M, D = 4, 5, 9, 3
rng = np.random.default_rng(0)
QUERY, KEY, VALUE = (rng.normal(size=(2, HEADS, x, D)) for x in (N, M, M))
TABLE = rng.normal(size=(HEADS, 7))


def expected(bias):
    """The output for biases (h, n, m)."""
    s = QUERY @ KEY.swapaxes(-2, -1) / D**0.5 + bias
    return qkv.weightings.Softmax()(s) @ VALUE


@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_a_table_is_read_by_distance(align, engine, monkeypatch):
    monkeypatch.setattr(streaming, "block_size", lambda call: (2, 4))
    start = M - N if align == "bottom_right" else 0
    bias = np.zeros((HEADS, N, M))
    for h, i, j in np.ndindex(bias.shape):
        bias[h, i, j] = TABLE[h, min(max(j - i - start, -3), 3) + 3]
    options = {"score": scores.Relative(TABLE, align=align), "engine": engine}
    np.testing.assert_allclose(qkv.attend(QUERY, KEY, VALUE, **options), expected(bias))


def test_a_function_of_the_distance():
    far = -0.3 * np.abs(np.arange(M) - np.arange(N)[:, None])

    def bias(distance, head):
        return -0.3 * abs(distance) + 0 * head

    out = qkv.attend(QUERY, KEY, VALUE, score=scores.Relative(bias))
    np.testing.assert_allclose(out, expected(far))


def test_a_function_of_the_caller_has_gradients_of_what_it_captures():
    torch = pytest.importorskip("torch")
    slope = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    arrays = [torch.tensor(x, requires_grad=True) for x in (QUERY, KEY, VALUE)]
    gradients = []
    for bias in (lambda x, h: -slope * x.abs(), scores.Alibi(slope.repeat(HEADS))):
        for engine in ("dense", "streaming"):
            out = qkv.attend(*arrays, score=scores.Relative(bias), engine=engine)
            gradients.append(torch.autograd.grad((out**2).sum(), [slope, *arrays]))
    for other in gradients[1:]:
        for actual, desired in zip(other, gradients[0], strict=True):
            torch.testing.assert_close(actual, desired)


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8, 12, 20])
def test_the_slopes_are_those_of_bloom_and_mpt(heads):
    torch = pytest.importorskip("torch")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    slopes = scores.alibi_slopes(heads)
    bias = bloom.build_alibi_tensor(torch.ones(1, 4), heads, torch.float32)
    np.testing.assert_allclose(slopes, bias[:, 0, 1].numpy(), rtol=1e-6)
    bias = mpt.build_mpt_alibi_tensor(heads, 4)
    np.testing.assert_allclose(slopes, -bias[:, 0, -2].numpy(), rtol=1e-6)


def test_the_same_as_bloom():
    torch = pytest.importorskip("torch")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    query, key, value = (torch.randn(2, 6, 7, 8) for _ in range(3))
    bias = bloom.build_alibi_tensor(torch.ones(2, 7), 6, torch.float32).reshape(2, 6, 1, 7)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    s = (query @ key.mT / 8**0.5 + bias).masked_fill(future, -torch.inf)
    slopes = torch.tensor(scores.alibi_slopes(6), dtype=torch.float32)
    ours = qkv.attend(
        query, key, value, score=scores.Relative(scores.Alibi(slopes)), mask=masks.causal
    )
    torch.testing.assert_close(ours, s.softmax(-1) @ value)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_the_same_as_t5(is_decoder):
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(d_model=32, d_kv=8, num_heads=4, is_decoder=is_decoder)
    layer = t5.T5Attention(config, has_relative_attention_bias=True)
    query, key, value = (torch.randn(1, 4, 300, 8) for _ in range(3))
    s = query @ key.mT + layer.compute_bias(300, 300)
    table = layer.relative_attention_bias.weight
    bias = scores.T5Bias(table.T, bidirectional=not is_decoder)
    ours = qkv.attend(query, key, value, score=scores.Relative(bias, "dot"))
    theirs = s.softmax(-1) @ value
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    pull = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, table, pull)[0],
        torch.autograd.grad(theirs, table, pull)[0],
        atol=1e-4,
        rtol=1e-4,
    )


def test_the_same_as_the_windows_of_swin():
    torch = pytest.importorskip("torch")
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    bias = swin.SwinRelativePositionBias(4, (3, 5))
    torch.nn.init.normal_(bias.relative_position_bias_table)
    query, key, value = (torch.randn(6, 4, 15, 8) for _ in range(3))
    table = bias.relative_position_bias_table

    def add_bias(s, b, h, i, j):
        return s + table.T.view(4, 5, 9)[h, i // 5 - j // 5 + 2, i % 5 - j % 5 + 4]

    ours = qkv.attend(query, key, value, score=scores.Modified("scaled_dot", add_bias))
    theirs = (query @ key.mT / 8**0.5 + bias()).softmax(-1) @ value
    torch.testing.assert_close(ours, theirs)
    pull = torch.randn_like(ours)
    expected = torch.autograd.grad(theirs, table, pull)[0]
    torch.testing.assert_close(torch.autograd.grad(ours, table, pull)[0], expected)


def test_it_goes_around_any_score_and_compiles():
    torch = pytest.importorskip("torch")
    table = torch.randn(2, 5, requires_grad=True)
    query, key, value = (torch.randn(1, 2, 6, 3) for _ in range(3))

    def attend(query, key, value, table):
        score = scores.Relative(table, scores.Gaussian(0.5))
        return qkv.attend(query, key, value, score=score, weighting="entmax15")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    arrays = query, key, value, table
    torch.testing.assert_close(compiled(*arrays), attend(*arrays))


def test_equality_and_copies():
    one = scores.Relative(TABLE)
    assert copy.deepcopy(one) == one != scores.Relative(TABLE + 1)
    assert scores.Relative(TABLE) == scores.Relative(scores.relative.DistanceTable(TABLE))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: scores.Relative(np.zeros(4)), ShapeError, r"\(2r \+ 1,\)"),
        (lambda: scores.Relative(0.5), DtypeError, "bias must be an array"),
        (lambda: scores.Relative(TABLE, align="left"), ArgumentError, "align"),
        (lambda: scores.Alibi(0.5), DtypeError, "alibi_slopes"),
        (lambda: scores.T5Bias(np.zeros((4, 5))), ShapeError, "even number of buckets"),
        (lambda: scores.T5Bias(np.zeros((4, 32)), max_distance=8), ArgumentError, "above 8"),
        (
            lambda: qkv.attend(QUERY, KEY, VALUE, score=scores.Relative(TABLE[:3])),
            ShapeError,
            "for 3 heads",
        ),
        (  # a kernel would read past the end of the table
            lambda: qkv.attend(QUERY, KEY, VALUE, score=scores.Relative(TABLE[:1])),
            ShapeError,
            "for 1 heads",
        ),
        (
            lambda: qkv.attend(QUERY, KEY, VALUE, score=scores.Relative(lambda x: x)),
            DtypeError,
            r"\(distance, head\)",
        ),
        (
            lambda: scores.Gated(np.zeros(3), np.zeros(3), score=scores.Relative(TABLE)),
            CombinationError,
            "put the gate inside",
        ),
    ],
)
def test_what_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()
