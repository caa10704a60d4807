"""Sums of differences and windows without the array of differences, against the plain formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from qkv import scores
from qkv.scores.distance import sum_differences

SHAPES = [
    ((7, 5), (9, 5)),
    ((2, 3, 70, 5), (1, 3, 80, 5)),
    ((70, 64), (4, 90, 64)),
    ((3, 1, 5, 1), (3, 2, 6, 1)),
    ((2, 0, 4), (2, 5, 4)),
    ((64, 256), (65, 256)),
    ((64, 257), (65, 257)),
]


def plain_sum(query: Any, key: Any, power: int) -> Any:
    difference = query[..., :, None, :] - key[..., None, :, :]
    return (abs(difference) if power == 1 else difference * difference).sum(-1)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_sum_differences(shapes: Any, power: int) -> None:
    q, k = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    ours, plain = sum_differences(q, k, power), plain_sum(q, k, power)
    torch.testing.assert_close(ours, plain)
    along = torch.randn_like(plain)
    gradients = (torch.autograd.grad(x, [q, k], along) for x in (ours, plain))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)
    for dtype, rtol in (("float64", 1e-12), ("float32", 1e-5)):
        arrays = [x.detach().numpy().astype(dtype) for x in (q, k)]
        want = plain_sum(*(x.astype("float64") for x in arrays), power)
        np.testing.assert_allclose(sum_differences(*arrays, power), want, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("power", [1, 2])
def test_derivatives_of_sum_differences(power: int) -> None:
    q, k = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 5))
    assert torch.autograd.gradcheck(lambda q, k: sum_differences(q, k, power), (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: sum_differences(q, k, power), (q, k))
    same = torch.autograd.grad(sum_differences(q, q.detach()[:1], power)[0, 0], q)[0]
    assert (same == 0).all(), "|x| and x² have slope 0 at 0"
    mapped = torch.vmap(lambda x: sum_differences(x, k.detach(), power))(q.detach()[:, None])
    torch.testing.assert_close(mapped[:, 0], plain_sum(q, k, power).detach())


WINDOWS = [scores.Boxcar, scores.Epanechnikov, scores.Triangular]
KEYS = ["normal", "narrow", "far from the origin", "integers", "not finite", "equal to queries"]


def window_formula(score: Any, query: Any, key: Any) -> Any:
    square = plain_sum(query, key, 2) / score.width**2
    if isinstance(score, scores.Boxcar):
        return np.where(np.isnan(square), np.nan, square <= 1)
    r = square if isinstance(score, scores.Epanechnikov) else np.sqrt(square)
    return np.maximum(0.0, 1.0 - r)


def pair_heads(query: Any, key: Any) -> list[tuple[Any, Any]]:
    """Return the matrices (n, d) and (m, d) of each head."""
    return [(q, k[0]) for k, heads in zip(key, query, strict=True) for q in heads]


def score_with_key_terms(score: Any, query: Any, key: Any) -> Any:
    """Return the scores as a database computes them: the squares of the keys are stored."""
    adapted = score.adapt_to_keys(key[:8])
    terms = adapted.key_terms(key)
    return score(query, key) if terms is None else adapted.score_with_key_terms(query, key, terms)


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(window: Any, kind: str) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 3, 60, 16)), rng.normal(size=(2, 1, 70, 16))
    score = window(0.05 if kind == "narrow" else 5.0)
    if kind == "far from the origin":
        q, k = q + 1000.0, k + 1000.0
    elif kind == "integers":  # many squares are exactly 1 after the division
        q, k, score = np.round(q), np.round(k), window(4.0)
    elif kind == "not finite":
        q[0, 0, 3], k[1, 0, 2] = np.nan, np.inf
    elif kind == "equal to queries":
        k[:, 0, :60] = q[:, 0]
    for dtype, most in (("float32", 5e-5), ("float64", 1e-12)):
        arrays = [x.astype(dtype) for x in (q, k)]
        with np.errstate(invalid="ignore"):
            want = window_formula(score, *(x.astype("float64") for x in arrays))
            got = [score(*arrays), score(*map(torch.tensor, arrays)).numpy()]
            got.append(np.stack([score_with_key_terms(score, *x) for x in pair_heads(*arrays)]))
            got[-1] = got[-1].reshape(want.shape)
        for x in got:
            np.testing.assert_allclose(x[want == want], want[want == want], rtol=0, atol=most)
            if kind != "not finite":
                assert not np.isnan(x).any()
            else:
                assert np.isnan(x[0, 0, 3]).all(), "NaN reaches the score"


@pytest.mark.parametrize("window", WINDOWS[1:])
def test_derivatives_of_windows(window: Any) -> None:
    q, k = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 5))
    assert torch.autograd.gradcheck(lambda q, k: window(4.0)(q, k), (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: window(4.0)(q, k), (q, k))


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("lead", [(), (3,), (2, 1)])
@pytest.mark.parametrize("n", [1, 7, 8])
def test_differences_of_few_queries_are_summed_in_blocks(power, lead, n, monkeypatch):
    """A query over many keys read them column by column, five times slower than the formula."""
    from qkv.frameworks import numpy as numpy_framework

    monkeypatch.setattr(numpy_framework, "MAX_DIFFERENCES_PER_BLOCK", 3000)
    rng = np.random.default_rng(0)
    query = rng.normal(size=(*lead, n, 5)).astype("f4")
    key = rng.normal(size=(3, 4100, 5)).astype("f4")
    actual = sum_differences(query, key, power)
    difference = query.astype(float)[..., :, None, :] - key.astype(float)[..., None, :, :]
    want = (np.abs(difference) ** power).sum(-1)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, want, rtol=1e-5)


@pytest.mark.parametrize("place", ["near", "far", "beyond"])
@pytest.mark.parametrize("n", [1, 4, 60])
def test_gaussians_of_products(n: int, place: str) -> None:
    """The square is expanded if that is precise, also for few queries, and around the mean key."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 3, n, 16)), rng.normal(size=(2, 1, 700, 16))
    if place != "near":
        q, k = q + 300.0, k + 300.0
    width = 0.5 if place == "beyond" else 4.0
    score = scores.Gaussian(width)
    for dtype, most in (("float32", 2e-4), ("float64", 1e-11)):
        arrays = [x.astype(dtype) for x in (q, k)]
        want = plain_sum(*(x.astype("float64") for x in arrays), 2) / (-2.0 * width**2)
        for x in (score(*arrays), score(*map(torch.tensor, arrays)).numpy()):
            assert x.dtype == dtype
            np.testing.assert_allclose(x, want, rtol=1e-5, atol=most)


def test_derivatives_of_gaussians() -> None:
    q, k = (torch.randn(n, 9, dtype=torch.float64, requires_grad=True) for n in (3, 5))
    for width in (6.0, torch.tensor(6.0, dtype=torch.float64, requires_grad=True)):
        score = lambda q, k, width=width: scores.Gaussian(width)(q, k)  # noqa: E731
        given = (q, k, width) if isinstance(width, torch.Tensor) else (q, k)
        assert torch.autograd.gradcheck(score, given)
        assert torch.autograd.gradgradcheck(score, given)
        torch.testing.assert_close(score(q, k), plain_sum(q, k, 2) / width**2 * -0.5)
