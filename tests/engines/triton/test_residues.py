"""Strided masks, whose remainders are calls of their own, against the equation."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv import masks, scores
from qkv.engines import triton as engine
from qkv.engines.triton import residues

pytestmark = pytest.mark.skipif(
    not (engine.is_interpreted() or torch.cuda.is_available()), reason="no interpreter, no CUDA"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(residues, "MIN_SPLIT_PAIRS", 1)


def draw_arrays(n, m, heads=2, few=2):
    shapes = (2, heads, n, 8), (2, few, m, 8), (2, few, m, 5)
    return [torch.randn(x, device=DEVICE).requires_grad_() for x in shapes]


def compare_with_dense(arrays, **options):
    results = []
    for name in ("triton", "dense"):
        out = qkv.attend(*arrays, **options, engine=name)
        results.append([out, *torch.autograd.grad(out.square().sum(), arrays)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mask", "n", "m", "options"),
    [
        (masks.strided(4), 24, 24, {}),
        (masks.strided(3), 12, 21, {"weighting": "entmax15"}),
        (masks.dilated(2, 4), 40, 40, {}),
        (masks.dilated(1, 2), 18, 30, {"score": scores.Gaussian(2.0)}),
    ],
)
def test_values_and_gradients(mask, n, m, options):
    arrays = draw_arrays(n, m)
    assert "remainder" in str(qkv.explain(*arrays, mask=mask, engine="triton", **options))
    for _ in range(2):  # the first call, and one by its plan
        compare_with_dense(arrays, mask=mask, **options)


def test_lengths_of_one_plan_that_the_step_does_not_divide():
    for n in (24, 25, 28, 30):
        compare_with_dense(draw_arrays(n, n), mask=masks.strided(4))


def test_other_calls_stay_whole():
    arrays = draw_arrays(24, 24, heads=4)
    assert "remainder" not in str(qkv.explain(*arrays, mask=masks.strided(4), engine="triton"))
    compare_with_dense(arrays, mask=masks.strided(4))
    compare_with_dense(draw_arrays(24, 24), mask=masks.strided(4) & masks.causal)
    modified = scores.Modified(scores.ScaledDot(), lambda s, b, h, i, j: s + i - j)
    compare_with_dense(draw_arrays(24, 24), mask=masks.strided(4), score=modified)


def test_a_nan_reaches_only_its_remainder():
    query, key, value = (x.detach() for x in draw_arrays(24, 24))
    value[:, :, 5] = torch.nan
    out = qkv.attend(query, key, value, mask=masks.strided(4), engine="triton")
    assert out[:, :, 1::4].isnan().all()
    assert all(out[:, :, i::4].isfinite().all() for i in (0, 2, 3))
