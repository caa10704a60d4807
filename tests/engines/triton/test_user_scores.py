"""Scores of the caller's functions, which the kernels read, against the formula."""

from __future__ import annotations

import threading

import pytest
import torch

import qkv
from qkv import masks, scores, weightings
from qkv.attention import build_call
from qkv.engines import triton as engine
from qkv.engines import user_code
from qkv.errors import EngineError
from qkv.frameworks.torch import Torch
from qkv.frameworks.torch_products import use_tensor_cores

pytestmark = [
    pytest.mark.sample_of_module(12),
    pytest.mark.skipif(
        not (engine.is_interpreted() or torch.cuda.is_available()), reason="no interpreter, no CUDA"
    ),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    """The interpreter computes on the CPU, where functions run in blocks otherwise."""
    monkeypatch.setattr(Torch, "device_block_numbers", lambda self, like: 2**27)


def draw_arrays(n=6, m=9, lead=(2, 4), few=2, dtype=torch.float32):
    torch.manual_seed(n + m)
    shapes = (*lead, n, 5), (*lead[:-1], few, m, 5), (*lead[:-1], few, m, 7)
    return [torch.randn(shape).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def compare_with_dense(arrays, captured=(), tolerance=2e-5, **options):
    """Compare output, log-sum-exp and gradients of all arrays with those of the formula."""
    results = []
    for name in ("triton", "dense"):
        out = qkv.attend(*arrays, **options, engine=name)
        found = out if isinstance(out, tuple) else (out,)
        loss = sum((x.float() * torch.linspace(0, 1, x.numel(), device=DEVICE).view(x.shape)).sum()
                   for x in found)  # fmt: skip
        learned = [x for x in (*arrays, *captured) if x.requires_grad]
        gradients = torch.autograd.grad(loss, learned, allow_unused=True) if learned else ()
        zeros = [torch.zeros_like(x) for x in learned]
        gradients = [z if g is None else g for g, z in zip(gradients, zeros, strict=True)]
        results.append([*found, *gradients])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * 10)


class Own(scores.Score):
    """A score without a dot-product form."""

    def __call__(self, query, key):
        return -(query[..., :, None, :] - key[..., None, :, :]).abs().amax(-1)


@pytest.mark.parametrize(
    "weighting",
    ["softmax", weightings.Softmax(0.5), weightings.Entmax(1.5), "sparsemax", weightings.TopK(3),
     "hard", "sigmoid", "raw", weightings.Hard(straight_through=True)],
)  # fmt: skip
@pytest.mark.parametrize("mask", [None, masks.causal, masks.lengths([4, 9])])
def test_a_function_with_any_weighting(weighting, mask):
    width = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.5], device=DEVICE, requires_grad=True)
    options = {"score": lambda q, k: (q * width) @ k.mT / 2, "weighting": weighting, "mask": mask}
    compare_with_dense(draw_arrays(), [width], **options)


@pytest.mark.parametrize("score", [Own(), scores.Modified(Own(), lambda s, b, h, i, j: s + h)])
def test_classes_without_a_form(score):
    compare_with_dense(draw_arrays(), score=score)


def test_a_float_mask_is_added():
    bias = torch.randn(4, 6, 9, device=DEVICE, requires_grad=True)
    arrays = draw_arrays()
    options = {"score": lambda q, k: q @ k.mT + 1, "weighting": weightings.Softmax(0.7)}
    compare_with_dense(arrays, [bias], mask=bias, **options)
    with torch.no_grad():
        bias[..., 2:4] = -torch.inf
    compare_with_dense(arrays, mask=bias.detach(), **options)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 2)])
def test_leading_axes(lead):
    arrays = draw_arrays(lead=lead, few=lead[-1]) if lead else [x[0, 0] for x in draw_arrays()]
    arrays = [x.detach().requires_grad_() for x in arrays]
    compare_with_dense(arrays, score=lambda q, k: q @ k.mT + 1, return_lse=True)


def test_learned_temperature_and_dropout():
    temperature = torch.full((6, 1), 0.8, device=DEVICE, requires_grad=True)
    compare_with_dense(
        draw_arrays(), [temperature], score=lambda q, k: q @ k.mT + 1,
        weighting=weightings.Softmax(temperature), return_lse=True, dropout_p=0.3, seed=4,
    )  # fmt: skip


def test_masked_rows_may_be_nan():
    query, key, value = (x.detach() for x in draw_arrays())
    key[1, :, 4:] = value[1, :, 4:] = torch.nan
    arrays = [x.requires_grad_() for x in (query, key, value)]
    mask = masks.lengths([9, 4])
    compare_with_dense(arrays, score=lambda q, k: (q @ k.mT).tanh(), mask=mask)


def test_sixteen_bits():
    arrays = draw_arrays(dtype=torch.bfloat16)
    compare_with_dense(arrays, score=lambda q, k: q @ k.mT / 2 + 1, tolerance=2e-2)


@pytest.mark.parametrize("mask", [None, masks.causal])
def test_a_scaled_dot_product_is_recognized(mask):
    arrays = draw_arrays(dtype=torch.bfloat16)
    options = {"mask": mask, "weighting": "entmax15", "return_lse": False}
    results = []
    for score in (lambda q, k: q @ k.mT / 2, scores.ScaledDot(0.5)):
        assert "ScaledDot(scale=0.5)" in str(qkv.explain(*arrays, score=score, mask=mask))
        out = qkv.attend(*arrays, score=score, **options)
        alpha = qkv.weights(*arrays[:2], score=score, mask=mask)
        results.append([out, alpha, *torch.autograd.grad(out.float().square().sum(), arrays)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


SCALE = torch.tensor([0.7], device=DEVICE, requires_grad=True)


@pytest.mark.parametrize(
    ("score", "options"),
    [
        (lambda q, k: torch.tanh(q @ k.mT / 4) * 3, {}),
        (lambda q, k: torch.sigmoid((q @ k.mT) * SCALE) * 4, {"return_lse": True}),
        (lambda q, k: (q @ k.mT).abs().clamp(max=2.0), {"weighting": "entmax15"}),
        (lambda q, k: torch.nn.functional.softplus(q @ k.mT), {"mask": masks.causal}),
        (lambda q, k: torch.tanh((q * SCALE) @ k.exp().mT) * 3, {"weighting": "sparsemax"}),
    ],
)
def test_a_function_of_dot_products_has_no_array_of_scores(score, options, monkeypatch):
    monkeypatch.setattr(user_code, "_evaluate_on_device", None)
    arrays = draw_arrays(few=4)
    explained = str(qkv.explain(*arrays, score=score, engine="triton", **options))
    assert "score_mod compiled into the kernels" in explained
    compare_with_dense(arrays, [SCALE], score=score, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_that_changes_rows_runs_as_a_scaled_dot_product(dtype, monkeypatch):
    monkeypatch.setattr(user_code, "_evaluate_on_device", None)
    width = torch.rand(5, device=DEVICE, requires_grad=True)
    arrays = draw_arrays(few=4, dtype=dtype)
    results = []
    for function in (lambda q, k: (q * width) @ k.mT / 2, None):
        query = arrays[0] if function else (arrays[0].float() * width).to(dtype)
        score = function or scores.ScaledDot(0.5)
        out = qkv.attend(query, *arrays[1:], score=score)
        loss = out.float().square().sum()
        results.append([out, *torch.autograd.grad(loss, [*arrays, width])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_a_masked_row_may_be_nan_where_a_function_changes_rows():
    query, key, value = (x.detach() for x in draw_arrays(few=4))
    key[1, :, 4:] = value[1, :, 4:] = torch.nan
    width = torch.rand(5, device=DEVICE, requires_grad=True)
    arrays = [x.requires_grad_() for x in (query, key, value)]
    mask = masks.lengths([9, 4])
    compare_with_dense(arrays, [width], score=lambda q, k: q @ (k * width).mT, mask=mask)


def test_a_function_of_dot_products_whose_weights_are_returned():
    arrays = draw_arrays()
    results = [
        qkv.attend(*arrays, score=lambda q, k: (q @ k.mT).tanh(), return_weights=True, engine=name)
        for name in (None, "dense")
    ]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_the_function_keeps_its_array():
    """Some functions return an array that they use again."""
    kept = torch.randn(2, 4, 6, 9, device=DEVICE)
    before = kept.clone()
    with torch.no_grad():
        qkv.attend(*draw_arrays(), score=lambda q, k: kept, engine="triton")
    assert torch.equal(kept, before)


def test_the_function_runs_once(monkeypatch):
    arrays = [x.detach() for x in draw_arrays()]
    calls = []

    def score(query, key):
        calls.append(query.shape)
        return query @ key.mT + 1

    qkv.attend(*arrays, score=score, engine="triton")
    assert calls.count((2, 4, 6, 5)) == 1
    explained = qkv.explain(*arrays, score=score, engine="triton")
    assert "runs once" in str(explained)
    monkeypatch.setattr(user_code, "MAX_DEVICE_NUMBERS", 100)
    with pytest.raises(EngineError, match="UserScore"):
        qkv.attend(*arrays, score=score, engine="triton", mask=masks.causal)
    assert qkv.explain(*arrays, score=score).engine in ("streaming", "dense")


@pytest.mark.parametrize("lse", [False, True])
def test_many_queries_are_several_calls(monkeypatch, lse):
    monkeypatch.setattr(user_code, "MAX_DEVICE_NUMBERS", 2 * 4 * 9 * 4)  # four of six queries
    arrays = [x.detach() for x in draw_arrays()]
    seen = []

    def score(query, key):
        seen.append(query.shape[-2])
        return query @ key.mT + 1

    compare_with_dense(arrays, score=score, return_lse=lse)
    assert {4, 2} <= set(seen)


@pytest.mark.parametrize("engine_name", [None, "triton"])
def test_later_calls_have_a_plan(engine_name):
    arrays = draw_arrays()
    for scale in (1.0, 2.0):  # the function is new, and captures another number
        compare_with_dense(arrays, score=lambda q, k, scale=scale: scale * q @ k.mT + 1)
        out = qkv.attend(*arrays, score=lambda q, k, s=scale: s * q @ k.mT + 1, engine=engine_name)
        assert torch.isfinite(out).all()


def test_a_gradient_that_needs_all_rows():
    """Arrays of the function that fit only the whole call keep their gradients, in 16 bits too."""
    table = torch.randn(6, 9, device=DEVICE, requires_grad=True)
    arrays = draw_arrays(dtype=torch.bfloat16)
    compare_with_dense(arrays, [table], score=lambda q, k: q @ k.mT + table, tolerance=2e-2)


def test_second_derivatives_in_sixteen_bits():
    query, key, _ = draw_arrays(dtype=torch.bfloat16)
    call = build_call(
        query, key, key, lambda q, k: (q @ k.mT) ** 2 + 0 * q[..., :1], "softmax", None, 0.0, None,
        None,
    )  # fmt: skip
    (once,) = torch.autograd.grad(
        user_code.evaluate_functions(call)[0].values.sum(), query, create_graph=True
    )
    (twice,) = torch.autograd.grad(once.float().sum(), query)
    wide = query.detach().double().requires_grad_()
    shared = key.detach().double().repeat_interleave(2, 1)
    (once,) = torch.autograd.grad(((wide @ shared.mT) ** 2).sum(), wide, create_graph=True)
    (expected,) = torch.autograd.grad(once.sum(), wide)
    torch.testing.assert_close(twice.double(), expected, rtol=3e-2, atol=0.3)


def test_the_setting_of_products_is_restored():
    """By the last of several threads that use it."""
    read = torch._C._get_cublas_allow_tf32
    before = read()
    inside, leave = threading.Event(), threading.Event()

    def use_for_long():
        with use_tensor_cores():
            inside.set()
            leave.wait()

    other = threading.Thread(target=use_for_long)
    with use_tensor_cores():
        other.start()
        inside.wait()
        assert read()
    assert read()
    leave.set()
    other.join()
    assert read() == before
    with pytest.raises(ValueError, match="stop"), use_tensor_cores():
        raise ValueError("stop")
    assert read() == before
