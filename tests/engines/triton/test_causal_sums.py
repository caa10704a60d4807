"""The kernels for causal sums, beside the equation in float64."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv import scores
from qkv.engines.triton import causal_sums
from qkv.engines.triton.causal_sums import CausalSums

pytestmark = pytest.mark.sample_of_module(10)


def sum_scores(query, key, value, rates, normalized):
    s, at = query @ key.mT, torch.arange(query.shape[-2])
    if rates is not None:
        gap = (at[:, None] - at[None, :]).clamp(min=0)
        s = s * torch.exp(-rates.to(s.dtype)[:, None, None] * gap)
    s = s.tril()
    return s @ value / s.sum(-1, keepdim=True) if normalized else s @ value


def draw(n, w, d):
    return [torch.rand(1, 2, n, w) + 0.1, torch.rand(1, 2, n, w) + 0.1, torch.randn(1, 2, n, d)]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize(("n", "w", "d"), [(1, 3, 3), (64, 16, 20), (333, 5, 70)])
def test_sums_and_gradients(n, w, d, decays, normalized, monkeypatch):
    monkeypatch.setattr(causal_sums, "MIN_CHUNKS_PER_SEGMENT", 2)
    arrays = [x.requires_grad_() for x in draw(n, w, d)]
    doubles = [x.detach().double().requires_grad_() for x in arrays]
    rates = torch.tensor([0.01, 0.3]) if decays else None
    out = CausalSums.apply(*arrays, rates, normalized, None)
    want = sum_scores(*doubles, rates, normalized)
    along = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, arrays, along)]
    expected = [want, *torch.autograd.grad(want, doubles, along.double())]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(
            x.double(), y, atol=1e-5 * y.abs().max().item() + 1e-6, rtol=1e-5
        )


def test_nan_reaches_later_rows_only(monkeypatch):
    monkeypatch.setattr(causal_sums, "MIN_CHUNKS_PER_SEGMENT", 1)
    query, key, value = draw(200, 8, 8)
    clean = causal_sums.compute_sums(query, key, value, totals=True)[0]
    for x in (key, value):
        spoiled = x.clone()
        spoiled[0, :, 100, 3] = torch.nan
        given = [spoiled if y is x else y for y in (query, key, value)]
        found = causal_sums.compute_sums(*given, totals=True)[0]
        assert torch.equal(found[:, :, :100], clean[:, :, :100])
        assert found[:, :, 100:, 3].isnan().all()


def positive(x):
    return torch.nn.functional.elu(x) + 1


CASES = {
    "normalized": ("normalized", scores.FeatureMap(positive)),
    "raw": ("raw", scores.FeatureMap(positive)),
    "decay": ("raw", scores.Decay(0.05, scores.FeatureMap(positive))),
    "rates": ("raw", scores.Decay(torch.tensor([0.1, 0.02]), "dot")),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("m", [300, 250, 330])
def test_attend(name, m):
    weighting, score = CASES[name]
    arrays = [torch.randn(2, *x).bfloat16().requires_grad_() for x in ((300, 16), (m, 16), (m, 8))]
    arrays[1:] = [x.detach()[:1].requires_grad_() for x in arrays[1:]]
    options = {"score": score, "weighting": weighting, "mask": "causal"}
    described = qkv.explain(*arrays, engine="linear", **options).detail
    assert "in kernels" in described
    out = qkv.attend(*arrays, engine="linear", **options)
    wide = [x.detach().float().requires_grad_() for x in arrays]
    want = qkv.attend(*wide, engine="dense", **options)
    assert out.dtype == torch.bfloat16
    along = torch.randn(out.shape)
    found = [out, *torch.autograd.grad(out, arrays, along.bfloat16())]
    expected = [want, *torch.autograd.grad(want, wide, along)]
    for x, y in zip(found, expected, strict=True):
        assert (x.float() - y).norm() < 0.02 * y.norm()


def test_second_derivative():
    query = torch.randn(1, 1, 100, 8).bfloat16().requires_grad_()
    options = {"score": scores.FeatureMap(positive), "weighting": "normalized", "mask": "causal"}

    def norm_of_gradient(query, engine):
        out = qkv.attend(query, query, query, engine=engine, **options)
        (first,) = torch.autograd.grad((out.float() ** 2).sum(), query, create_graph=True)
        return torch.autograd.grad((first.float() ** 2).sum(), query)[0].float()

    found = norm_of_gradient(query, "linear")
    want = norm_of_gradient(query.detach().float().requires_grad_(), "dense")
    assert (found - want).norm() < 0.05 * want.norm()


def test_what_the_kernels_do_not_sum():
    query = torch.randn(2, 300, 16).bfloat16()
    score = scores.Decay(torch.tensor([0.1, 0.2], requires_grad=True), "dot")
    options = {"weighting": "raw", "mask": "causal", "engine": "linear"}
    assert "in kernels" not in qkv.explain(query, query, query, score=score, **options).detail
    wide = torch.randn(2, 300, 130).bfloat16()
    assert "in kernels" not in qkv.explain(wide, wide, wide, score="dot", **options).detail
