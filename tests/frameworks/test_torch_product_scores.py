"""Functions that use dot products of rows, and functions that do not."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch")

from qkv.frameworks import load_framework  # noqa: E402
from qkv.frameworks.torch_product_scores import (  # noqa: E402
    find_product,
    find_product_rows,
    make_score_mod,
)

QUERY, KEY = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
WEIGHT, MATRIX, FACTOR = torch.rand(8) + 0.5, torch.randn(8, 4), torch.tensor(2.0)


def rms(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k: torch.tanh(q @ k.mT / 64) * 8,
        lambda q, k: 8 * (q @ k.mT).div(64).tanh(),
        lambda q, k: -(q @ k.mT),
        lambda q, k: (q @ k.mT) * FACTOR,
        lambda q, k: torch.nn.functional.softplus(torch.einsum("bhnd,bhmd->bhnm", q, k)),
        lambda q, k: torch.where((s := q @ k.mT) > 0, s, 0.1 * s),
        lambda q, k: 1 - (q @ k.mT).square().clamp(max=3.0) / k.shape[-2],
        lambda q, k: torch.tanh(q @ k.mT) * abs(q @ k.mT) ** 0.5,
    ],
)
def test_a_function_of_dot_products_is_a_score_mod(function):
    kind = find_product(function, QUERY, KEY)
    assert kind is not None
    assert not kind.has_own_rows
    score_mod = make_score_mod(function, QUERY, KEY)
    torch.testing.assert_close(score_mod(QUERY @ KEY.mT, 0, 0, 0, 0), function(QUERY, KEY))
    one = torch.tensor([[0.3]])
    assert score_mod(one, 0, 0, 0, 0).shape == one.shape


@pytest.mark.parametrize(
    ("function", "scale"),
    [
        (lambda q, k: (q * WEIGHT) @ k.mT / math.sqrt(q.shape[-1]), 8**-0.5),
        (lambda q, k: torch.einsum("bhnd,bhmd->bhnm", q @ MATRIX, k @ MATRIX), 1.0),
        (lambda q, k: rms(q) @ rms(k).transpose(-1, -2) * 4, 4.0),
        (lambda q, k: torch.tanh((q + 1) @ k.mT) * FACTOR, None),
        (lambda q, k: torch.nn.functional.normalize(q, dim=-1) @ (-k).mT, 1.0),
        (lambda q, k: torch.softmax(q, -1) @ torch.exp(k).mT, 1.0),
        (lambda q, k: torch.where(q > 0, q, WEIGHT) @ k.mT, 1.0),
    ],
)
def test_a_function_of_products_of_other_rows(function, scale):
    kind = find_product(function, QUERY, KEY)
    assert kind is not None
    assert kind.has_own_rows
    assert kind.scale == (None if scale is None else pytest.approx(scale))
    phi, psi = find_product_rows(function, QUERY, KEY)
    scores = make_score_mod(function, QUERY, KEY)(phi @ psi.mT, 0, 0, 0, 0)
    torch.testing.assert_close(scores, function(QUERY, KEY))


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k: torch.tanh(s := q @ k.mT) / s.shape[-1],
        lambda q, k: torch.tanh(s := q @ k.mT) / torch.numel(s),
        lambda q, k: (q @ k.mT).mul_(2),
        lambda q, k: torch.relu_(q @ k.mT),
        lambda q, k: torch.exp(s := q @ k.mT, out=s),
        lambda q, k: s.tanh() if isinstance(s := q @ k.mT, torch.Tensor) else s,
        lambda q, k: s.tanh() if (s := q @ k.mT).sum() > -1e9 else s,
        lambda q, k: next(x.tanh() for x in q @ k.mT),
        lambda q, k: (q @ k.mT).tanh()[..., :7],
        lambda q, k: (q @ k.mT).tanh() / q.norm(dim=-1, keepdim=True),
        lambda q, k: (q @ k.mT).tanh() * (1 + 1e-4 * random.random()),
        lambda q, k: (k @ q.mT).tanh(),
        lambda q, k: -torch.cdist(q, k),
        lambda q, k: -(q[..., None, :] - k[..., None, :, :]).abs().sum(-1),
        lambda q, k: (q @ k.mT).tanh() + (2 * q) @ k.mT,
        lambda q, k: (q + k[..., :1, :]) @ k.mT,
        lambda q, k: q[..., :3, :] @ k.mT,
        lambda q, k: q @ k.mT + q.sum(-1, keepdim=True),
        lambda q, k: q.mul_(2) @ k.mT,
        lambda q, k: q,
        lambda q, k: None,
    ],
)
def test_other_functions_have_no_score_mod(function):
    before = QUERY.clone()
    assert find_product(function, QUERY, KEY) is None
    assert torch.equal(before, QUERY)


def test_only_the_query_or_the_key_has_a_gradient():
    query, key = QUERY.clone().requires_grad_(), KEY.clone()
    weight = WEIGHT.clone().requires_grad_()

    def function(q, k):
        return torch.tanh((q * weight) @ k.mT)

    found = load_framework("torch").find_product_score(function, query, key)
    assert found is not None
    assert found.scale is None
    scores = found.score_mod(found.phi @ found.psi.mT, 0, 0, 0, 0)
    for x, y in zip(
        torch.autograd.grad(scores.square().sum(), [query, weight]),
        torch.autograd.grad(function(query, key).square().sum(), [query, weight]),
        strict=True,
    ):
        torch.testing.assert_close(x, y)
