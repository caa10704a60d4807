"""Relative biases as functions of the kernels, with their gradients."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv import masks, scores


def make_bias(kind, table):
    if kind == "alibi":
        return scores.Alibi(table[:, 0])
    return scores.T5Bias(table[:, :6], max_distance=9) if kind == "t5" else table


@pytest.mark.parametrize("kind", ["table", "shared", "alibi", "t5", "decay"])
def test_output_and_gradients(kind):
    arrays = [torch.randn(1, x, 20, 8, requires_grad=True) for x in (4, 2, 2)]
    arrays.append(torch.randn(4, 7, requires_grad=True))

    def compute(engine, dtype):
        query, key, value, table = (x.to(dtype) for x in arrays)
        bias = table[0] if kind == "shared" else make_bias(kind, table)
        score = (
            scores.Decay(table[:, 0].abs(), "scaled_dot")
            if kind == "decay"
            else scores.Relative(bias)
        )
        options = {"score": score, "mask": masks.causal, "engine": engine}
        out = qkv.attend(query, key, value, **options)
        return [out.float(), *torch.autograd.grad((out**2).sum(), arrays)]

    pairs = zip(compute("triton", torch.float32), compute("dense", torch.float64), strict=True)
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
