"""Weights from the log-sum-exp, against softmax in float64."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.errors import OutOfResources

import qkv
from qkv import attention, masks, weightings
from qkv.engines import triton
from qkv.engines.triton.launching import launch, tile_choice
from qkv.engines.triton.weights import compute_weights, weights_kernel

pytestmark = pytest.mark.sample_of_module(6)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


RULE = torch.arange(9 * 20, device=DEVICE).reshape(9, 20) % 7 != 3
ADDED = torch.where(RULE, torch.sin(torch.arange(20.0, device=DEVICE)), -torch.inf)


def arrays(few=3, n=70, m=90, d=12, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (2, 3, n, d), (2, few, m, d), (2, few, m, 5)
    return [torch.randn(s, dtype=dtype, device=DEVICE, requires_grad=True) for s in shapes]


def call_of(query, key, value, mask=None, **options):
    options = {"score": "scaled_dot", "weighting": "softmax"} | options
    inputs = options["score"], options["weighting"], mask, 0.0, None, None
    return attention.build_call(query, key, value, *inputs)


@pytest.mark.sample(4)
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("few", [3, 1])
@pytest.mark.parametrize("mask", [None, masks.causal, masks.causal(offset=-5)], ids=str)
def test_output_weights_and_slopes(few, mask, mean):
    check(arrays(few), mask, mean)


@pytest.mark.parametrize(("mask", "mean"), [(masks.causal & RULE, True), (ADDED, False)])
def test_masks_that_are_arrays(mask, mean):
    check(arrays(1, *RULE.shape), mask, mean)


def test_rows_wider_than_a_tile_holds_in_backward():
    check(arrays(1, 9, 20, 160), None, True)


def test_a_device_too_small_for_the_tile_gets_a_smaller_one(monkeypatch):
    """float32 rows of more than 128 numbers do not fit an H200 in three stages."""
    tried, start = [], launch.launch_kernel

    def small(*args):
        if args[0] is weights_kernel:
            tried.append(args[-1].stages)
            if tried[-1] == 3:
                raise OutOfResources(393216, 232448, "shared memory")
        return start(*args)

    monkeypatch.setattr(tile_choice, "SHRUNK_TILES", {})
    monkeypatch.setattr(launch, "launch_kernel", small)
    check(arrays(1, 9, 20, 40), None, False)
    assert tried == [3, 2]


def check(inputs, mask, mean):
    """Against the equation in float64: the output, α, and their gradients."""
    temperature = weightings.Softmax(0.7)
    actual = triton.run_with_weights(call_of(*inputs, mask, weighting=temperature), mean)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    mask = mask.double() if isinstance(mask, torch.Tensor) else mask
    out, alpha = qkv.attend(
        *wide, weighting=temperature, mask=mask, return_weights=True, engine="dense"
    )
    alpha = alpha.mean(-3) if mean else alpha
    marks = [torch.randn_like(x) for x in (out, alpha)]

    def slopes(results, leaves):
        loss = sum((x.double() * mark).sum() for x, mark in zip(results, marks, strict=True))
        return torch.autograd.grad(loss, leaves)

    for got, want in zip(actual, (out, alpha), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    for got, want in zip(slopes(actual, inputs), slopes((out, alpha), wide), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_the_weights_alone_have_their_whole_gradient():
    query, key, _ = arrays()
    lse = (query.detach() @ key.detach().mT).logsumexp(-1)
    actual = compute_weights(query, key, lse, 1.0, None, False)
    want = (query @ key.mT).softmax(-1)
    mark = torch.randn_like(want)
    for got, right in zip(
        torch.autograd.grad((actual * mark).sum(), (query, key)),
        torch.autograd.grad((want * mark).sum(), (query, key)),
        strict=True,
    ):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_sixteen_bits_and_strides():
    query, key, _ = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in arrays(d=16))
    low = [x.to(torch.bfloat16) for x in (query, key)]
    lse = (low[0].float() @ low[1].float().mT).logsumexp(-1)
    actual = compute_weights(*low, lse, 1.0, None, True)
    assert actual.dtype == torch.bfloat16
    want = (low[0].double() @ low[1].double().mT).softmax(-1).mean(1)
    torch.testing.assert_close(actual.double(), want, rtol=1e-2, atol=1e-3)


def test_a_row_without_keys_gives_zeros():
    inputs = arrays()
    _, alpha = triton.run_with_weights(call_of(*inputs, masks.causal(offset=-5)), False)
    assert (alpha[..., :5, :] == 0).all()
    assert torch.isfinite(torch.autograd.grad(alpha.sum(), inputs[:2])[0]).all()


@pytest.mark.parametrize(
    "options",
    [
        {"score": "gaussian"},
        {"weighting": "sparsemax"},
        {"score": qkv.scores.ScaledDot(softcap=3.0)},
        {"mask": masks.window(3)},
        {"mask": torch.zeros(70, 90, device=DEVICE, requires_grad=True)},
    ],
    ids=str,
)
def test_calls_of_another_kind_are_left_to_others(options):
    assert triton.run_with_weights(call_of(*arrays(), **options), True) is None
