"""`hard` in the kernels: the best key is found in one pass, and its value is copied."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

import qkv
from qkv import masks, scores, weightings
from qkv.engines.triton.sparse import best_value
from qkv.engines.triton.tile_functions.records import Sizes

# NumPy, which the interpreter runs on, warns of infinities that are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MASKS = {
    "none": lambda: None,
    "causal": lambda: "causal",
    "window": lambda: masks.window(9, 4),
    "lengths": lambda: masks.lengths(torch.tensor([31, 0], device=DEVICE)),
    "documents": lambda: masks.documents(torch.arange(40, device=DEVICE) // 7) & masks.causal,
    "float": lambda: torch.linspace(-3, 3, 1600, device=DEVICE).view(40, 40).sin(),
}


def draw_arrays(dtype, heads=2, few=1, d=8, seed=0):
    """Return arrays whose rows are small whole numbers: many scores are equal."""
    made = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, 40, 16), (2, few, 40, 16), (2, few, 40, d))
    q, k, v = (torch.randint(-2, 3, x, generator=made).to(DEVICE, dtype) for x in shapes)
    return q, k, v + 0.25


def attend_both(arrays, **options):
    """Return the results and gradients of the kernels, and those of the dense engine."""
    found = []
    for engine, dtype in (("triton", arrays[0].dtype), ("dense", torch.float64)):
        given = [x.to(dtype).requires_grad_() for x in arrays]
        mask = options.get("mask")
        if isinstance(mask, torch.Tensor):
            options = options | {"mask": mask.to(dtype)}
        results = qkv.attend(*given, engine=engine, **options)
        outputs = results if isinstance(results, tuple) else (results,)
        loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
        for x in outputs:
            along = torch.linspace(-1, 1, x.numel(), device=DEVICE).view(x.shape).to(dtype)
            loss = loss + (x.nan_to_num(neginf=0.0).double() * along.double()).sum()
        gradients = torch.autograd.grad(loss, given, allow_unused=True)
        pairs = zip(gradients, given, strict=True)
        found.append([*outputs, *(torch.zeros_like(x) if g is None else g for g, x in pairs)])
    return zip(*found, strict=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hard_is_that_of_the_dense_engine(mask, dtype):
    for got, want in attend_both(draw_arrays(dtype), weighting="hard", mask=MASKS[mask]()):
        torch.testing.assert_close(got.double(), want.double(), atol=4e-2, rtol=1e-2)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("d", [1, 8, 40])
def test_heads_and_widths(heads, d):
    arrays = draw_arrays(torch.bfloat16, *heads, d)
    for got, want in attend_both(arrays, weighting=weightings.TopK(1), score="dot"):
        torch.testing.assert_close(got.double(), want.double(), atol=4e-2, rtol=1e-2)


@pytest.mark.parametrize(
    "score", ["dot", scores.Gaussian(2.0), scores.Laplace(3.0), scores.ScaledDot(softcap=4.0)],
    ids=str,
)  # fmt: skip
def test_the_log_sum_exp_and_its_gradient(score):
    arrays = [x + 0.01 * torch.randn_like(x) for x in draw_arrays(torch.float32)]  # no ties
    options = {"score": score, "weighting": weightings.TopK(1), "return_lse": True}
    options["mask"] = masks.window(9, 9)
    for got, want in attend_both(arrays, **options):
        torch.testing.assert_close(got.double(), want.double(), atol=1e-3, rtol=1e-3)


def test_dropout_is_that_of_the_dense_engine():
    arrays = draw_arrays(torch.float32)
    for got, want in attend_both(arrays, weighting="hard", dropout_p=0.4, seed=3):
        torch.testing.assert_close(got.double(), want.double(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_bad_row_or_value_stays_where_it_is(bad):
    q, k, v = draw_arrays(torch.float32, few=2)
    q[0, 0, 3, 0], v[1, 1, 5, 2] = bad, bad
    got = qkv.attend(q, k, v, weighting="hard", engine="triton")
    want = qkv.attend(q, k, v, weighting="hard", engine="dense")
    rows = torch.ones(q.shape[:3], dtype=torch.bool, device=DEVICE)
    rows[0, 0, 3] = False
    assert torch.equal(got[rows].nan_to_num(7.0), want[rows].nan_to_num(7.0))
    assert got[0, 0, 3].isnan().all()


def test_kernels_take_the_same_sizes_under_every_mask(monkeypatch):
    """A kernel is compiled once for all masks, so it must not receive the sizes of one."""
    kinds, launch = [], best_value.KernelCall.launch_kernel

    def launch_noted(call, kernel, programs, arrays, out, sizes, *rest):
        if kernel in (best_value.take_kernel, best_value.scatter_kernel):
            kinds.append(type(sizes[0]))
        launch(call, kernel, programs, arrays, out, sizes, *rest)

    monkeypatch.setattr(best_value.KernelCall, "launch_kernel", launch_noted)
    q, k, v = draw_arrays(torch.float32)
    for mask in (None, masks.blocks(torch.ones(5, 5), 8) & masks.documents(torch.arange(40) // 9)):
        out = qkv.attend(q, k, v.requires_grad_(), weighting="hard", mask=mask, engine="triton")
        torch.autograd.grad(out.sum(), v)
    assert kinds == [Sizes] * 4
