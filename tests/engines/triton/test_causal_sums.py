"""The kernels for causal sums, beside the equation in float64."""

from __future__ import annotations

import math

import pytest
import torch

import qkv
from qkv import scores
from qkv.engines.triton import causal_sums
from qkv.engines.triton.causal_sums import CausalSums
from qkv.scores.feature_map import FEATURES

pytestmark = pytest.mark.sample_of_module(10)


def sum_scores(query, key, value, rates, normalized, phi=None):
    if phi:
        query, key = FEATURES[phi](query), FEATURES[phi](key)
    s, at = query @ key.mT, torch.arange(query.shape[-2])
    if rates is not None:
        gap = (at[:, None] - at[None, :]).clamp(min=0)
        s = s * torch.exp(-rates.to(s.dtype)[:, None, None] * gap)
    s = s.tril()
    if not normalized:
        return s @ value
    total = s.sum(-1, keepdim=True)
    return s @ value / torch.where(total == 0, torch.inf, total)


def draw(n, w, d):
    return [torch.rand(1, 2, n, w) + 0.1, torch.rand(1, 2, n, w) + 0.1, torch.randn(1, 2, n, d)]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("phi", [None, "elu", "relu", "exp"])
@pytest.mark.parametrize(("n", "w", "d"), [(1, 3, 3), (64, 16, 20), (333, 5, 70), (256, 20, 16)])
def test_sums_and_gradients(n, w, d, decays, normalized, phi, monkeypatch):
    monkeypatch.setattr(causal_sums, "MIN_CHUNKS_PER_SEGMENT", 2)
    monkeypatch.setattr(causal_sums, "PROGRAMS_PER_PROCESSOR", 4)
    arrays = draw(n, w, d)
    if phi:
        arrays[:2] = [torch.randn_like(x) + 0.5 * (phi == "relu") for x in arrays[:2]]
    if decays:
        arrays.append(torch.tensor([0.01, 0.3]))
    arrays = [x.requires_grad_() for x in arrays]
    doubles = [x.detach().double().requires_grad_() for x in arrays]
    given = arrays if decays else [*arrays, None]
    out = CausalSums.apply(*given, normalized, phi, None)
    want = sum_scores(*(doubles if decays else [*doubles, None]), normalized, phi)
    along = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, arrays, along)]
    expected = [want, *torch.autograd.grad(want, doubles, along.double())]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(
            x.double(), y, atol=2e-5 * y.abs().max().item() + 1e-6, rtol=2e-5
        )


@pytest.mark.parametrize("phi", [None, "elu"])
def test_nan_reaches_later_rows_only(phi, monkeypatch):
    monkeypatch.setattr(causal_sums, "MIN_CHUNKS_PER_SEGMENT", 1)
    query, key, value = draw(200, 8, 8)
    clean = CausalSums.apply(query, key, value, None, True, phi, None)
    for x in (key, value):
        spoiled = x.clone()
        spoiled[0, :, 100, 3] = torch.nan
        given = [spoiled if y is x else y for y in (query, key, value)]
        found = CausalSums.apply(*given, None, True, phi, None)
        assert torch.equal(found[:, :, :100], clean[:, :, :100])
        assert found[:, :, 100:, 3].isnan().all()


@pytest.mark.parametrize("normalized", [False, True])
def test_nan_in_unseen_rows_does_not_reach_gradients(normalized):
    arrays = draw(200, 8, 8)
    for x in arrays[1:]:
        x[:, :, 150] = torch.nan
    clean = [x[:, :, :150].clone().requires_grad_() for x in arrays]
    arrays = [x.requires_grad_() for x in arrays]
    found, want = (CausalSums.apply(*x, None, normalized, None, None) for x in (arrays, clean))
    along = torch.randn_like(want)
    padded = torch.nn.functional.pad(along, (0, 0, 0, 50))
    given = torch.autograd.grad(found, arrays[0], padded)[0][:, :, :150]
    torch.testing.assert_close(given, torch.autograd.grad(want, clean[0], along)[0])


def positive(x):
    return torch.nn.functional.elu(x) + 1


CASES = {
    "normalized": ("normalized", scores.FeatureMap(positive)),
    "raw": ("raw", scores.FeatureMap(positive)),
    "decay": ("raw", scores.Decay(0.05, scores.FeatureMap(positive))),
    "elu": ("normalized", scores.FeatureMap()),
    "relu": ("raw", scores.FeatureMap("relu")),
    "rates": ("raw", scores.Decay(torch.tensor([0.1, 0.02]), "dot")),
    "scaled": ("raw", scores.Decay(0.1, "scaled_dot")),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("m", [300, 250, 330])
def test_attend(name, m, dtype):
    weighting, score = CASES[name]
    arrays = [torch.randn(2, *x).to(dtype).requires_grad_() for x in ((300, 16), (m, 16), (m, 8))]
    arrays[1:] = [x.detach()[:1].requires_grad_() for x in arrays[1:]]
    options = {"score": score, "weighting": weighting, "mask": "causal"}
    described = qkv.explain(*arrays, engine="linear", **options).detail
    assert "in kernels" in described
    out = qkv.attend(*arrays, engine="linear", **options)
    wide = [x.detach().float().requires_grad_() for x in arrays]
    want = qkv.attend(*wide, engine="dense", **options)
    assert out.dtype == dtype
    along = torch.randn(out.shape)
    found = [out, *torch.autograd.grad(out, arrays, along.to(dtype))]
    expected = [want, *torch.autograd.grad(want, wide, along)]
    for x, y in zip(found, expected, strict=True):
        assert (x.float() - y).norm() < 0.02 * y.norm()


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize(
    ("phi", "weighting"), [(None, "raw"), ("elu", "raw"), ("elu", "normalized")]
)
def test_learned_rates(phi, weighting, shape):
    arrays = [(0.2 + torch.rand(2, 2, 300, 16)).bfloat16() for _ in range(2)]
    arrays.append(torch.randn(2, 2, 300, 16).bfloat16())
    rate = torch.tensor([0.01, 0.2][: math.prod(shape)]).reshape(shape).requires_grad_()
    along = torch.randn(arrays[0].shape).bfloat16()
    given = [x.requires_grad_() for x in (*arrays, rate)]

    def gradients(query, key, value, rate, engine):
        score = scores.Decay(rate, scores.FeatureMap(phi) if phi else "dot")
        options = {"score": score, "weighting": weighting, "mask": "causal", "engine": engine}
        if engine == "linear":
            assert "in kernels" in qkv.explain(query, key, value, **options).detail
        out = qkv.attend(query, key, value, **options)
        return torch.autograd.grad(out, (query, key, value, rate), along.to(out.dtype))

    found = gradients(*given, "linear")
    want = gradients(*[x.detach().double().requires_grad_() for x in given], "dense")
    for x, y in zip(found, want, strict=True):
        assert x.shape == y.shape and x.dtype != torch.float64
        assert (x.double() - y).norm() < 0.02 * y.norm()


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
    options = {"weighting": "raw", "mask": "causal", "engine": "linear"}
    wide = torch.randn(2, 300, 130).bfloat16()
    assert "in kernels" not in qkv.explain(wide, wide, wide, score="dot", **options).detail
