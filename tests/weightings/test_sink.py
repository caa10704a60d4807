"""Attention sinks: beside the formula with one more column, and beside gpt-oss in transformers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import qkv
from qkv import masks, weightings
from qkv.errors import ArgumentError, CombinationError, DtypeError, ShapeError
from qkv.testing.checks import check_merging, check_without_key

LEAD, N, M, D = (2, 4), 5, 7, 3
rng = np.random.default_rng(0)
QUERY, KEY, VALUE = (rng.normal(size=(*LEAD, x, D)) for x in (N, M, M))
SINKS = np.array([0.5, -2.0, 0.0, 3.0])
ALLOWED = rng.random((N, M)) > 0.4
ALLOWED[1] = False


def expected(weighting, allowed=None):
    """The weights beside a column of scores for the sink, and the log-sum-exp."""
    scores = QUERY @ KEY.swapaxes(-2, -1) / math.sqrt(D)
    column = np.broadcast_to(np.reshape(weighting.sink, (-1, 1, 1)), (*LEAD, N, 1))
    scores = np.concatenate([scores, column], axis=-1)
    live = np.ones((N, M), bool) if allowed is None else allowed
    live = np.concatenate([live, np.ones((N, 1), bool)], axis=-1)
    plain = {x: y for x, y in vars(weighting).items() if x in ("temperature", "alpha")}
    kind = next(x for x in type(weighting).__mro__ if x in (weightings.Softmax, weightings.Entmax))
    alpha = kind(**plain)(scores, np.broadcast_to(live, scores.shape))[..., :-1]
    lse = np.log(np.exp(np.where(live, scores, -np.inf)).sum(-1))
    return alpha, lse


@pytest.mark.parametrize("allowed", [None, ALLOWED], ids=["all", "masked"])
@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize(
    "weighting",
    [
        weightings.Softmax(sink=0.0),
        weightings.Softmax(sink=SINKS),
        weightings.Entmax(1.5, sink=0.3),
        weightings.Entmax(np.array(1.3), sink=SINKS),
    ],
    ids=lambda x: repr(x)[:24],
)
def test_the_weights_are_those_beside_one_more_key(weighting, engine, allowed):
    alpha, lse = expected(weighting, allowed)
    options = {"weighting": weighting, "mask": allowed, "engine": engine}
    out, actual = qkv.attend(QUERY, KEY, VALUE, **options, return_weights=True)
    np.testing.assert_allclose(actual, alpha, atol=1e-12)
    np.testing.assert_allclose(out, alpha @ VALUE, atol=1e-12)
    assert (actual.sum(-1) < 1).any()
    if allowed is not None:
        assert (out[..., 1, :] == 0).all()
    if weighting.has_lse:
        actual = qkv.attend(QUERY, KEY, VALUE, **options, return_lse=True)[1]
        np.testing.assert_allclose(actual, lse, atol=1e-12)


def test_off_by_one():
    alpha = weightings.Softmax(sink=0)(np.log([[1.0, 2.0, 4.0]]))
    np.testing.assert_allclose(alpha, [[1 / 8, 2 / 8, 4 / 8]])


def test_the_temperature_divides_the_sink_too():
    alpha = weightings.Softmax(2.0, sink=np.log(9.0))(np.log([[4.0, 1.0]]))
    np.testing.assert_allclose(alpha, [[2 / 6, 1 / 6]])


@pytest.mark.parametrize(
    "weighting", [weightings.Softmax(0.7, sink=0.3), weightings.Entmax(1.5, sink=0.3)]
)
def test_it_is_counted_once_in_any_order_of_blocks(weighting):
    check_merging(weighting)
    check_without_key(weighting)


def test_the_derivative_of_the_log_sum_exp():
    torch = pytest.importorskip("torch")
    arrays = [torch.tensor(x, requires_grad=True) for x in (QUERY, KEY, VALUE, SINKS)]

    def loss(engine):
        query, key, value, sinks = arrays
        out, lse = qkv.attend(
            query,
            key,
            value,
            weighting=weightings.Softmax(0.8, sink=sinks),
            mask=masks.causal,
            engine=engine,
            return_lse=True,
        )
        return (out**2).sum() + lse.sin().sum()

    pairs = zip(*(torch.autograd.grad(loss(x), arrays) for x in ("dense", "streaming")))  # noqa: B905
    for dense, streaming in pairs:
        torch.testing.assert_close(streaming, dense)


def test_the_same_as_gpt_oss():
    torch = pytest.importorskip("torch")
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, x, 6, 8, requires_grad=True) for x in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=True)
    arrays, allowed = (query, key, value, sinks), torch.ones(6, 6, dtype=torch.bool).tril()

    class Module(torch.nn.Module):
        num_key_value_groups = 2

    module = Module().eval()
    module.sinks = sinks
    bias = torch.zeros(1, 1, 6, 6).masked_fill(~allowed, -torch.inf)
    theirs, alpha = gpt_oss.eager_attention_forward(module, query, key, value, bias, 8**-0.5)
    weighting = weightings.Softmax(sink=sinks)
    ours, weights = qkv.attend(
        query, key, value, weighting=weighting, mask="causal", return_weights=True
    )
    torch.testing.assert_close(ours.transpose(1, 2), theirs)
    torch.testing.assert_close(weights, alpha)
    pull = torch.randn_like(theirs)
    for engine in ("dense", "streaming"):
        ours = qkv.attend(query, key, value, weighting=weighting, mask="causal", engine=engine)
        gradients = torch.autograd.grad(ours.transpose(1, 2), arrays, pull)
        expected = torch.autograd.grad(theirs, arrays, pull, retain_graph=True)
        for actual, desired in zip(gradients, expected, strict=True):
            torch.testing.assert_close(actual, desired)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_the_same_as_flex_attention_with_its_log_sum_exp():
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    query, key, value = (torch.randn(2, 4, 20, 8) for _ in range(3))
    sinks = torch.randn(4)
    theirs, lse = flex(query, key, value, return_lse=True)
    theirs = theirs * torch.sigmoid(lse - sinks[:, None])[..., None]
    ours = qkv.attend(query, key, value, weighting=weightings.Softmax(sink=sinks))
    torch.testing.assert_close(ours, theirs)


def test_a_layer_learns_one_for_each_head():
    torch = pytest.importorskip("torch")
    sink = torch.nn.Parameter(torch.zeros(4))
    layer = qkv.nn.MultiHeadAttention(8, 4, weighting=weightings.Softmax(sink=sink))
    assert dict(layer.named_parameters())["weighting.sink"] is sink
    layer(*[torch.randn(2, 3, 8)] * 3)[0].sum().backward()
    assert (sink.grad != 0).all()


def test_a_changed_copy_keeps_it():
    weighting = replace(weightings.Softmax(sink=1.0), temperature=2.0)
    assert repr(weighting) == "Softmax(temperature=2.0, sink=1.0)"
    assert repr(weightings.Softmax(2.0)) == "Softmax(temperature=2.0)"
    assert repr(weightings.Entmax(1.5, sink=1.0)) == "Entmax(alpha=1.5, sink=1.0)"
    assert weighting != weightings.Softmax(2.0) != weightings.Softmax(2.0, sink=0.0)


class Mine(weightings.Softmax):
    """A subclass, whose formula may be another."""


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: weightings.Softmax(sink=math.inf), ArgumentError),
        (lambda: weightings.Softmax(sink="much"), DtypeError),
        (lambda: weightings.Softmax(sink=True), DtypeError),
        (lambda: replace(weightings.Softmax(sink=1.0), sink=None), DtypeError),
        (lambda: Mine(sink=1.0), CombinationError),
        (lambda: weightings.Sparsemax(sink=1.0), TypeError),
        (lambda: weightings.TopK(3, sink=1.0), TypeError),
        (
            lambda: qkv.attend(QUERY, KEY, VALUE, weighting=weightings.Softmax(sink=SINKS[:3])),
            ShapeError,
        ),
    ],
)
def test_what_a_sink_cannot_be(make, error):
    with pytest.raises(error, match="sink"):
        make()
