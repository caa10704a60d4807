"""Functions that are a scaled dot product, and functions that are not."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch")

import qkv  # noqa: E402
from qkv import scores, weightings  # noqa: E402
from qkv.frameworks import load_framework  # noqa: E402
from qkv.frameworks.torch_dot_scale import find_dot_scale  # noqa: E402

QUERY, KEY = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
WEIGHT, FACTOR = torch.eye(8), torch.tensor(2.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k: q @ k.mT / 8,
        lambda q, k: 2 * (q @ k.mT),
        lambda q, k: torch.matmul(q, k.transpose(-1, -2)) * 0.5,
        lambda q, k: q @ k.swapaxes(3, 2) / math.sqrt(q.shape[-1]),
        lambda q, k: torch.einsum("bhnd,bhmd->bhnm", q, k) / q.size(-1) ** 0.5,
        lambda q, k: torch.einsum("... n d, ... m d -> ... n m", q / 2, k * 3),
        lambda q, k: torch.einsum("bhmd,bhnd->bhnm", k, q),
        lambda q, k: (k @ q.mT).mT,
        lambda q, k: torch.mul(q @ k.mT, 0.3),
    ],
)
def test_scaled_dot_products_are_recognized(function):
    scale = find_dot_scale(function, QUERY, KEY)
    assert scale is not None
    torch.testing.assert_close(scale * (QUERY @ KEY.mT), function(QUERY, KEY))


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k: -(q @ k.mT),
        lambda q, k: q @ WEIGHT @ k.mT,
        lambda q, k: (q @ k.mT) * FACTOR,
        lambda q, k: (q @ k.mT) * True,
        lambda q, k: (q @ k.mT).tanh(),
        lambda q, k: (q @ k.mT) ** 2,
        lambda q, k: 8 / (q @ k.mT),
        lambda q, k: q @ k.mT + 1,
        lambda q, k: (q @ k.mT).mul_(2),
        lambda q, k: q @ k.mT if q.is_cpu else 2 * (q @ k.mT),
        lambda q, k: q @ k.mT * float("inf"),
        lambda q, k: q @ k.mT * random.random(),
        lambda q, k: -torch.cdist(q, k),
        lambda q, k: torch.einsum("bhnd,bhmd->bhmn", q, k),
        lambda q, k: q @ k.mT + q @ k.mT,
        lambda q, k: k @ q.mT,
        lambda q, k: q,
        lambda q, k: None,
    ],
)
def test_other_functions_are_not_recognized(function):
    assert find_dot_scale(function, QUERY, KEY) is None


def test_what_a_function_captures_belongs_to_its_signature():
    torch_framework, factor = load_framework("torch"), 2.0

    def score(q, k):
        return q @ k.mT * factor

    assert torch_framework.find_dot_scale(score, QUERY, KEY) == 2.0
    factor = 3.0
    assert torch_framework.find_dot_scale(score, QUERY, KEY) == 3.0


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_function_on_a_cpu_runs_as_a_scaled_dot_product(mask, dtype):
    def score(q, k):
        return q @ k.mT / 4

    arrays = [torch.randn(2, h, n, 8).to(dtype) for h, n in ((4, 5), (2, 7), (2, 7))]
    assert qkv.explain(*arrays, score=score, mask=mask).engine == "native"
    for _ in range(3):  # the later calls run a cached plan
        leaves = [[x.clone().requires_grad_() for x in arrays] for _ in range(2)]
        outputs = [
            qkv.attend(*x, score=s, mask=mask)
            for x, s in zip(leaves, (score, scores.ScaledDot(0.25)), strict=True)
        ]
        assert torch.equal(*outputs)
        gradients = [
            torch.autograd.grad(y.float().square().sum(), x)
            for y, x in zip(outputs, leaves, strict=True)
        ]
        assert all(map(torch.equal, *gradients))


def test_the_factor_of_a_product_function_may_be_a_length_or_change():
    query = torch.randn(3, 8)
    for m in (9, 10, 11, 9):  # lengths with as many binary digits
        key = torch.randn(m, 8)
        out = qkv.attend(query, key, key, score=lambda q, k: q @ k.mT / k.shape[-2])
        want = torch.softmax(query @ key.mT / m, -1) @ key
        torch.testing.assert_close(out, want)
    factor = 1.0

    def score(q, k):
        return q @ k.mT * factor

    for other in (1.0, 2.0, 0.5):
        factor = other
        out = qkv.attend(query, key, key, score=score)
        torch.testing.assert_close(out, torch.softmax(query @ key.mT * factor, -1) @ key)


def test_a_product_function_with_a_learned_temperature_has_its_gradient():
    query, key = torch.randn(3, 8), torch.randn(9, 8)
    for _ in range(2):
        temperature = torch.tensor(1.5, requires_grad=True)
        softmax = weightings.Softmax(temperature)
        out = qkv.attend(query, key, key, score=lambda q, k: q @ k.mT / 4, weighting=softmax)
        want = torch.softmax(query @ key.mT / 4 / temperature, -1) @ key
        torch.testing.assert_close(out, want)
        gradients = [torch.autograd.grad(x.square().sum(), temperature)[0] for x in (out, want)]
        torch.testing.assert_close(*gradients)
