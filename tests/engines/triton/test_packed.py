"""Packed sequences of different lengths, whose rules are translated to Triton."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv import masks


@pytest.mark.parametrize("cu_k", [None, [0, 8, 9, 21]])
def test_output_and_gradients(cu_k):
    m = 20 if cu_k is None else 21
    arrays = [torch.randn(4, x, 8, requires_grad=True) for x in (20, m, m)]
    mask = masks.packed([0, 5, 9, 20], cu_k, causal=True)

    def compute(engine, dtype):
        out = qkv.attend(*(x.to(dtype) for x in arrays), mask=mask, engine=engine)
        return [out.float(), *torch.autograd.grad((out**2).sum(), arrays)]

    pairs = zip(compute("triton", torch.float32), compute("dense", torch.float64), strict=True)
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    described = qkv.explain(*(x.detach() for x in arrays), mask=mask, engine="triton").detail
    assert "read as an array" not in described
