"""x / ‖x‖ and factor · ‖x‖² of each row, and their gradients, against float64."""

from __future__ import annotations

import pytest
import torch

from qkv.engines.triton import norms
from qkv.errors import EngineError
from qkv.scores import product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(7,), (5, 1), (3, 5, 16), (2, 3, 37, 40), (2, 5000), (0, 8), (3, 0)]
CLOSE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random_tensor(shape, dtype=torch.float32, seed=0):
    x = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    return x.to(dtype)


def compute_expected(function, x, grad):
    """The value and the gradient of a function, in float64."""
    x = x.detach().double().requires_grad_()
    out = function(x)
    return out.detach(), torch.autograd.grad(out, x, grad.double())[0]


def assert_close(got, want, dtype, size=0.0):
    """Equal but for rounding, of numbers as large as `size` that may have cancelled."""
    size = max(want.abs().max().item(), size) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want, rtol=CLOSE[dtype], atol=CLOSE[dtype] * size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unit(shape, dtype):
    x, grad = random_tensor(shape, dtype).requires_grad_(), random_tensor(shape, dtype, 1)
    out = norms.normalize_rows(x)
    assert out.dtype == dtype
    want, slope = compute_expected(product.unit_vectors, x, grad)
    assert_close(out.detach(), want, dtype)
    # Of one number alone the gradient is g / ‖x‖ less itself, 0 but for the rounding.
    size = (grad.double() / x.detach().double()).abs().max().item() if shape[-1] == 1 else 0.0
    assert_close(torch.autograd.grad(out, x, grad)[0], slope, dtype, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_square(shape, dtype):
    x, grad = random_tensor(shape, dtype).requires_grad_(), random_tensor((*shape[:-1], 1), seed=1)
    out = norms.squared_norms(x, -0.5)
    assert out.dtype == torch.float32
    want, slope = compute_expected(lambda x: -0.5 * (x * x).sum(-1, keepdim=True), x, grad)
    assert_close(out.detach(), want, torch.float32)
    assert_close(torch.autograd.grad(out, x, grad)[0], slope, dtype)


@pytest.mark.parametrize("size", [1e38, 1e16, 1e-16, 1e-30, 1e-42])
def test_unit_of_what_has_no_square(size):
    x = (random_tensor((4, 24)).clamp(-2, 2) * size).requires_grad_()
    grad = random_tensor((4, 24), seed=1)
    out = norms.normalize_rows(x)
    want, slope = compute_expected(product.unit_vectors, x, grad)
    assert_close(out.detach(), want, torch.float32)
    if size > 1e-38:  # else the slope is beyond float32
        assert_close(torch.autograd.grad(out, x, grad)[0] * size, slope * size, torch.float32)


def test_unit_of_zero():
    x = random_tensor((3, 24))
    x[1] = 0
    grad = random_tensor((3, 24), seed=1)
    x.requires_grad_()
    out = norms.normalize_rows(x)
    assert (out[1] == 0).all()
    slope = compute_expected(product.unit_vectors, x, grad)[1]
    assert_close(torch.autograd.grad(out, x, grad)[0], slope, torch.float32)


def test_a_row_that_is_not_finite_hides_nothing():
    x = random_tensor((3, 24))
    x[1, 5] = float("nan")
    out = norms.normalize_rows(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    assert norms.squared_norms(x, 1.0)[:, 0].isnan().tolist() == [False, True, False]


@pytest.mark.filterwarnings("ignore:invalid value")  # 0 · ∞ of the row
@pytest.mark.parametrize("of", [norms.normalize_rows, lambda x: norms.squared_norms(x, 1.0)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_nothing_asks_for_has_no_gradient_whatever_it_holds(of, bad):
    x = random_tensor((3, 24))
    exact = torch.autograd.grad(of(x.requires_grad_()).sum(), x)[0]
    x = x.detach().clone()
    x[1, 5] = bad
    out = of(x.requires_grad_())
    grad = torch.ones_like(out)
    grad[1] = 0
    slope = torch.autograd.grad(out, x, grad)[0]
    assert (slope[1] == 0).all()
    assert torch.equal(slope[[0, 2]], exact[[0, 2]])
    spoiled = torch.ones_like(out)
    spoiled[0, 0] = float("nan")
    assert not torch.autograd.grad(of(x), x, spoiled)[0][:2].isfinite().all(-1).any()


def test_heads_side_by_side_are_not_copied():
    x = random_tensor((2, 9, 3, 16)).transpose(1, 2).requires_grad_()
    grad = random_tensor((2, 3, 9, 16), seed=1)
    out = norms.normalize_rows(x)
    assert out.stride() == x.stride()
    want, slope = compute_expected(product.unit_vectors, x, grad)
    assert_close(out.detach(), want, torch.float32)
    assert_close(torch.autograd.grad(out, x, grad)[0], slope, torch.float32)
    total = norms.squared_norms(x, 2.0)
    want, slope = compute_expected(lambda x: 2 * (x * x).sum(-1, keepdim=True), x, grad[..., :1])
    assert_close(total.detach(), want, torch.float32)
    assert_close(torch.autograd.grad(total, x, grad[..., :1])[0], slope, torch.float32)


def test_a_view_with_gaps_and_an_expanded_gradient():
    x = random_tensor((4, 6, 16))[:, ::2, 3:11].requires_grad_()
    want, slope = compute_expected(product.unit_vectors, x, torch.ones(x.shape, device=DEVICE))
    out = norms.normalize_rows(x)
    assert_close(out.detach(), want, torch.float32)
    assert_close(torch.autograd.grad(out.sum(), x)[0], slope, torch.float32)


@pytest.mark.parametrize("shape", [(3, 5, 16), (2, 24)])
def test_operators(shape):
    x = random_tensor(shape).requires_grad_()
    torch.library.opcheck(norms.normalize_rows.node, (x,))
    torch.library.opcheck(norms.squared_norms.node, (x, 0.5))
    crossed = random_tensor((2, 9, 3, 16)).transpose(1, 2)
    kinds = ("test_schema", "test_faketensor")
    torch.library.opcheck(norms.normalize_rows.node, (crossed,), test_utils=kinds)
    torch.library.opcheck(norms.squared_norms.node, (crossed, 0.5), test_utils=kinds)


@pytest.mark.parametrize("function", [norms.normalize_rows, lambda x: norms.squared_norms(x, 1.0)])
def test_second_derivatives_are_refused(function):
    x = random_tensor((3, 8)).requires_grad_()
    grad = torch.autograd.grad((function(x) ** 2).sum(), x, create_graph=True)[0]
    with pytest.raises(EngineError, match="no second derivatives"):
        grad.sum().backward()
