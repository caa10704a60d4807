"""Softmax with an attention sink, from the kernels' log-sum-exp."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv import masks, weightings

pytestmark = pytest.mark.sample_of_module(8)


@pytest.mark.parametrize("wants_lse", [False, True])
def test_output_and_gradients(wants_lse):
    arrays = [torch.randn(1, x, 20, 8, requires_grad=True) for x in (4, 2, 2)]
    arrays.append(torch.randn(4, requires_grad=True))

    def compute(engine, dtype):
        query, key, value, sinks = (x.to(dtype) for x in arrays)
        result = qkv.attend(
            query,
            key,
            value,
            weighting=weightings.Softmax(0.7, sink=sinks),
            mask=masks.causal & masks.lengths([3 if wants_lse else 17]),
            return_lse=wants_lse,
            engine=engine,
        )
        out, lse = result if wants_lse else (result, torch.zeros(()))
        loss = (out**2).sum() + lse.sin().sum()
        return [out.float(), lse.float(), *torch.autograd.grad(loss, arrays)]

    pairs = zip(compute("triton", torch.float32), compute("dense", torch.float64), strict=True)
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_a_query_that_sees_no_key():
    query = torch.randn(1, 1, 3, 8, requires_grad=True)
    nothing = torch.zeros(3, 3, dtype=torch.bool)
    weighting = weightings.Softmax(sink=0.5)
    out, lse = qkv.attend(
        query, query, query, weighting=weighting, mask=nothing, return_lse=True, engine="triton"
    )
    assert (out == 0).all() and (lse == 0.5).all()
    assert (torch.autograd.grad(out.sum(), query)[0] == 0).all()


ENTMAX_CASES = {
    "1.5": (1.5, 0.3, None, {}),
    "1.3": (1.3, 0.3, masks.causal, {}),
    "2": (2.0, -0.2, masks.causal, {}),
    "heads": (1.5, "heads", None, {}),
    "rows": (1.5, "rows", masks.causal, {}),
    "gaussian": (1.5, -2.0, None, {"score": qkv.scores.Gaussian(1.5)}),
    "float mask": (1.5, 0.5, "float", {}),
}


@pytest.mark.parametrize(
    ("name", "n"), [*((name, 70) for name in ENTMAX_CASES), ("1.5", 3), ("heads", 3)]
)
def test_entmax_with_a_sink(name, n):
    alpha, sink, mask, options = ENTMAX_CASES[name]
    arrays = [torch.randn(2, x, n, 8, requires_grad=True) for x in (4, 2, 2)]
    if isinstance(sink, str):
        shape = {"heads": (4,), "rows": (2, 4, n, 1)}[sink]
        arrays.append(torch.randn(shape, requires_grad=True))
    if mask == "float":
        mask = torch.randn(n, n)

    def compute(engine, dtype):
        query, key, value, *sinks = (x.to(dtype) for x in arrays)
        weighting = weightings.Entmax(alpha, sink=sinks[0] if sinks else sink)
        own = mask.to(dtype) if isinstance(mask, torch.Tensor) else mask
        out = qkv.attend(query, key, value, weighting=weighting, mask=own, engine=engine, **options)
        return [out.float(), *torch.autograd.grad((out**2).sum(), arrays)]

    pairs = zip(compute("triton", torch.float32), compute("dense", torch.float64), strict=True)
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, atol=5e-5, rtol=5e-5)


def test_entmax_with_a_sink_of_few_queries():
    query, key = torch.randn(1, 2, 1, 8), torch.randn(1, 1, 700, 8)
    for sink in (-3.0, torch.tensor([-1.0, 0.7]), 30.0):
        options = {"weighting": weightings.Entmax(1.5, sink=sink)}
        got, want = (qkv.attend(query, key, key, engine=x, **options) for x in ("triton", "dense"))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert (got == 0).all()  # the sink has all the weight


def test_entmax_with_a_sink_and_without_a_batch():
    query, sink = torch.randn(2, 20, 8), torch.randn(2)
    options = {"weighting": weightings.Entmax(1.5, sink=sink)}
    got, want = (qkv.attend(query, query, query, engine=x, **options) for x in ("triton", "dense"))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_entmax_with_a_sink_and_a_query_that_sees_no_key():
    query = torch.randn(1, 1, 3, 8, requires_grad=True)
    nothing = torch.zeros(3, 3, dtype=torch.bool)
    weighting = weightings.Entmax(1.5, sink=0.5)
    out = qkv.attend(query, query, query, weighting=weighting, mask=nothing, engine="triton")
    assert (out == 0).all()
    assert (torch.autograd.grad(out.sum(), query)[0] == 0).all()


def test_entmax_with_a_sink_and_a_learned_alpha_is_refused():
    query = torch.randn(1, 1, 3, 8)
    weighting = weightings.Entmax(torch.tensor(1.5), sink=0.5)
    with pytest.raises(qkv.errors.EngineError, match="only for a fixed alpha"):
        qkv.attend(query, query, query, weighting=weighting, engine="triton")
