"""Blocks for functions of the caller: sized by what the function holds."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import qkv  # noqa: E402
from qkv.attention import build_call  # noqa: E402
from qkv.engines import streaming  # noqa: E402
from qkv.frameworks import torch as torch_framework  # noqa: E402


def products(q, k):
    return (q @ k.mT) / 8


def distances(q, k):
    return -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1)


def reads_data(q, k):
    return products(q, k) * float(q.sum())


def arrays(needs_gradient=False):
    rng = np.random.default_rng(0)
    draw = lambda: torch.tensor(rng.normal(size=(2, 30, 6)), requires_grad=needs_gradient)  # noqa: E731
    return draw(), draw(), draw()


@pytest.mark.parametrize(
    ("function", "forward", "with_gradients"), [(products, 1, 3), (distances, 6, 14)]
)
def test_numbers_per_pair_are_those_that_the_function_holds(function, forward, with_gradients):
    for needs_gradient, numbers in ((False, forward), (True, with_gradients)):
        call = build_call(*arrays(needs_gradient), score=function)
        assert streaming.numbers_per_pair(call) == numbers


def test_a_function_that_needs_data_is_assumed_to_compare_number_by_number():
    assert streaming.numbers_per_pair(build_call(*arrays(), score=reads_data)) == 12


def test_a_captured_array_does_not_hinder_the_measurement():
    scale = torch.ones(6, dtype=torch.float64)
    call = build_call(*arrays(), score=lambda q, k: (q * scale) @ k.mT)
    assert streaming.numbers_per_pair(call) == 1


def test_lambdas_of_one_place_are_measured_once(monkeypatch):
    calls, measure = [], torch_framework.count_pair_numbers
    monkeypatch.setattr(
        torch_framework, "count_pair_numbers", lambda *a: calls.append(1) or measure(*a)
    )
    q, k, v = arrays()
    for factor in (1.0, 2.0, 3.0):
        qkv.attend(q, k, v, score=lambda a, b, c=factor: c * (a @ b.mT), engine="streaming")
    assert len(calls) == 1


def test_blocks_on_a_device_fill_it(monkeypatch):
    monkeypatch.setattr(
        type(build_call(*arrays()).fw), "device_block_numbers", lambda self, like: 2 * 30 * 10
    )
    call = build_call(*arrays(), score=products)
    assert streaming.block_size(call) == (10, 30)
    q, k, v = arrays()
    want = torch.softmax(products(q, k), -1) @ v
    torch.testing.assert_close(qkv.attend(q, k, v, score=products, engine="streaming"), want)


def test_numpy_functions_are_measured_on_a_few_rows():
    x = np.zeros((30, 6), "f4")
    inner = lambda q, k: q @ k.mT  # noqa: E731
    outer = lambda q, k: ((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(-1)  # noqa: E731
    assert streaming.numbers_per_pair(build_call(x, x, x, score=inner)) == 1
    assert 6 <= streaming.numbers_per_pair(build_call(x, x, x, score=outer)) <= 14
    fails = lambda q, k: q @ k[:30].mT if len(k) == 30 else 1 / 0  # noqa: E731
    assert streaming.numbers_per_pair(build_call(x, x, x, score=fails)) == 12


@dataclass(frozen=True)
class Scaled:
    """A score with an array, which cannot be hashed."""

    w: Any

    def __call__(self, query, key):
        return (query * self.w) @ key.swapaxes(-1, -2)


def test_a_dataclass_is_measured_as_its_function_is():
    x = np.zeros((30, 6), "f4")
    assert streaming.numbers_per_pair(build_call(x, x, x, score=Scaled(np.ones(6, "f4")))) == 1
    t = torch.zeros(30, 6)
    assert streaming.numbers_per_pair(build_call(t, t, t, score=Scaled(torch.ones(6)))) == 1


def test_a_measurement_does_not_disturb_that_of_the_caller():
    x = np.zeros((30, 6), "f4")
    tracemalloc.start()
    try:
        call = build_call(x, x, x, score=lambda q, k: q @ k.mT + 1)
        assert streaming.numbers_per_pair(call) == 12 and tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("weights", [True, "mean"])
def test_a_captured_tensor_of_16_bits_has_its_gradient_with_weights(weights):
    """1,024 queries are computed in blocks, whose captured tensors become arguments."""
    q, k, v = (torch.randn(1, 2, 1024, 16, dtype=torch.bfloat16) for _ in range(3))
    slopes = torch.tensor([0.1, 0.05], dtype=torch.bfloat16, requires_grad=True)
    score = qkv.scores.Modified(
        qkv.scores.ScaledDot(), lambda s, b, h, i, j: s + slopes[h] * (j - i).to(s.dtype)
    )
    gradients = []
    for engine in (None, "dense"):
        out = qkv.attend(q, k, v, score=score, return_weights=weights, engine=engine)[0]
        gradients += torch.autograd.grad(out.float().sin().sum(), slopes)
    torch.testing.assert_close(*gradients, rtol=0.05, atol=1.0)


def test_a_function_is_measured_with_as_many_heads_as_it_receives():
    """With fewer heads of keys it failed, and its blocks were 16 times too small."""
    q, k = torch.zeros(2, 4, 50, 32), torch.zeros(2, 2, 60, 32)
    assert streaming.numbers_per_pair(build_call(q, k, k, score=lambda q, k: q @ k.mT)) <= 2
