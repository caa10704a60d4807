"""Packed sequences of different lengths, whose spans of keys the kernels read."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv import masks, scores, weightings
from qkv.scores import Alibi

pytestmark = pytest.mark.sample_of_module(8)

CU_Q = [0, 40, 40, 45, 100, 170]
CU_K = [0, 0, 5, 50, 100, 150]
CASES = {
    "softmax": {},
    "entmax15": {"weighting": "entmax15"},
    "top-k": {"weighting": weightings.TopK(5)},
    "hard": {"weighting": "hard"},
    "sigmoid": {"weighting": "sigmoid"},
    "gaussian": {"score": scores.Gaussian(2.0)},
    "laplace": {"score": scores.Laplace(2.0)},
    "sink": {"weighting": weightings.Softmax(sink=0.5)},
    "alibi": {"score": "alibi"},
}


def compute(engine, dtype, arrays, mask, options):
    given = [x.detach().to(dtype).requires_grad_() for x in arrays]
    if options.get("score") == "alibi":
        options = {"score": scores.Relative(Alibi(torch.tensor([0.1, 0.2], dtype=dtype)))}
    out = qkv.attend(*given, mask=mask, engine=engine, **options)
    along = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(out, given, along, materialize_grads=True)
    return [x.float() for x in (out, *gradients)]


def draw(n, m, heads=2, shared=1, width=8):
    torch.manual_seed(0)
    sizes = ((heads, n), (shared, m), (shared, m))
    return [torch.randn(1, h, x, width) for h, x in sizes]


def assert_agree(arrays, mask, options, atol=5e-5):
    pairs = zip(
        compute("triton", torch.float32, arrays, mask, options),
        compute("dense", torch.float64, arrays, mask, options),
        strict=True,
    )
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, atol=atol, rtol=atol)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter: −∞ − −∞
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients(name, causal):
    mask = masks.packed(CU_Q, CU_K, causal=causal)
    assert_agree(draw(170, 150), mask, CASES[name])


@pytest.mark.parametrize("other", ["documents", "window", "boolean", "float", "packed"])
def test_with_another_mask(other):
    ids = torch.arange(170) // 30
    more = {
        "documents": masks.documents(ids, ids[:150]),
        "window": masks.window(20, 7),
        "boolean": torch.rand(170, 150) > 0.3,
        "float": torch.randn(170, 150),
        "packed": masks.packed([0, 60, 170], [0, 60, 150]),
    }[other]
    assert_agree(draw(170, 150), masks.packed(CU_Q, CU_K) & more, {})


def test_queries_without_keys_and_nan_elsewhere():
    arrays = draw(170, 150)
    mask = masks.packed(CU_Q, CU_K)
    clean = compute("triton", torch.float32, arrays, mask, {})
    assert (clean[0][:, :, :40] == 0).all() and (clean[1][:, :, :40] == 0).all()
    for x in arrays[1:]:
        x[:, :, 110] = torch.nan  # a key of the last sequence
    spoiled = compute("triton", torch.float32, arrays, mask, {})
    for x, y in zip(clean[:3], spoiled[:3], strict=True):
        assert torch.equal(x[:, :, :100], y[:, :, :100])
    assert spoiled[0][:, :, 100:].isnan().all()


def test_few_queries_and_split_keys():
    mask = masks.packed([0, 1, 2, 3], [0, 400, 700, 1000])
    assert_agree(draw(3, 1000, 1, 1), mask, {})


def test_nothing_is_read_as_an_array():
    arrays = draw(170, 150)
    mask = masks.packed(CU_Q, CU_K)
    assert "read as an array" not in qkv.explain(*arrays, mask=mask, engine="triton").detail
