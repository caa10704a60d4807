"""Softmax with an attention sink, from the kernels' log-sum-exp."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv import masks, weightings


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


def test_entmax_with_a_sink_is_refused():
    query = torch.randn(1, 1, 3, 8)
    with pytest.raises(qkv.errors.EngineError, match="a sink only with softmax"):
        qkv.attend(query, query, query, weighting=weightings.Entmax(1.5, sink=0.5), engine="triton")
