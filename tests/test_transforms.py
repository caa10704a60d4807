"""Every option under every transform gives what plain calls give."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.errors import EngineError
from tests import cases
from tests.transforms import OPTIONS, TORCH, arrays, build_arguments, cells
from tests.transforms_layers import GAPS, LAYERS, PEER

pytestmark = pytest.mark.sample_of_module(7)

torch = pytest.importorskip("torch")


ALL = {**OPTIONS, **LAYERS, **PEER}


# Of torch's own attention under vmap, and of parameters passed to functional_call.
@pytest.mark.sample(26)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize(("transform", "option"), cells(TORCH, ALL))
def test_torch(transform, option):
    refused = option in GAPS.get(transform, ())
    with (
        pytest.raises((EngineError, NotImplementedError, RuntimeError))
        if refused
        else nullcontext()
    ):
        TORCH[transform](ALL[option].call, build_arguments(ALL[option], torch.tensor))


@pytest.mark.parametrize("transform", GAPS)
def test_no_gap_that_torch_fills(transform):
    assert {*PEER} <= {*GAPS[transform]}


FIRST = """
import torch, qkv
x = torch.randn(3, 2, requires_grad=True)
plain = lambda x: qkv.attend(x, x, x, weighting="entmax15").square().sum()
compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
slopes = [torch.autograd.grad(f(x), x) for f in (compiled, plain)]
torch.testing.assert_close(*slopes)
"""


def test_the_first_call_of_a_process_may_be_compiled_with_its_gradient():
    subprocess.run([sys.executable, "-c", FIRST], check=True)


@pytest.mark.parametrize("weighting", ["softmax", "hard", "entmax15", "sigmoid"])
def test_shapes_without_numbers(weighting):
    x = torch.empty(2, 5, 4, device="meta", requires_grad=True)
    out = qkv.attend(x, x, x, weighting=weighting, mask="causal")
    assert out.shape == x.shape and out.is_meta
    out.sum().backward()


COVERING = cases.covering()


@pytest.mark.sample(8)
@pytest.mark.parametrize("transform", ["vmap", "vmap of grad", "jvp"])
@pytest.mark.parametrize("mask", cases.MASKS)
def test_torch_takes_every_two_of_score_weighting_and_mask(mask, transform):
    for names in COVERING:
        if names[2] != mask:
            continue
        case = cases.case(*names)
        order = sorted(case.arrays, key=lambda name: case.arrays[name].dtype.kind != "f")
        TORCH[transform](
            lambda *x, case=case, order=order: case.attend(dict(zip(order, x, strict=True))),
            lambda n, case=case, order=order: [torch.tensor(case.arrays[x]) for x in order],
        )


HOLDS = {
    "dilated": masks.dilated(1, 2) | masks.global_tokens(1),
    "strided": ~masks.strided(2),
    "bottom right": masks.causal(align="bottom_right") & masks.window(3),
    "blocks": masks.blocks(np.arange(100).reshape(10, 10) % 3 > 0, 4),
    "custom": masks.custom(lambda b, h, i, j: (i + j + h) % 2 == 0),
    "lengths": masks.lengths([3, 5]),
    "offset": masks.causal(offset=np.array([1, -1])),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("mask", HOLDS)
def test_every_mask_compiles_for_new_lengths(mask):
    TORCH["compile, new lengths"](
        lambda *x: qkv.attend(*x, mask=HOLDS[mask]),
        lambda n: [torch.tensor(x) for x in arrays(n)],
    )


def test_masks_may_be_written_where_torch_compiles():
    def attend_with(x, seen):
        mask = masks.lengths([3, 5]) & masks.documents([[0, 0, 1, 1, 1]] * 2) & masks.array(seen)
        return qkv.attend(x, x, x, mask=mask | masks.causal(offset=[-1, 0]))

    x, seen = torch.randn(2, 5, 4), torch.eye(5) < 1
    got = torch.compile(attend_with, backend="eager", fullgraph=True)(x, seen)
    torch.testing.assert_close(got, attend_with(x, seen))


def test_masks_may_meet_tensors_where_torch_compiles():
    def attend_with(x, seen):
        either = (masks.causal & seen) | (seen.T & masks.window(2))
        mask = (seen & (masks.causal | seen.T)) | (either | seen)
        return qkv.attend(x, x, x, mask=mask & seen.float().exp())

    x, seen = torch.randn(2, 5, 4), torch.arange(25).reshape(5, 5) % 3 > 0
    got = torch.compile(attend_with, backend="eager", fullgraph=True)(x, seen)
    torch.testing.assert_close(got, attend_with(x, seen))


def test_a_gate_may_be_written_where_torch_compiles():
    def attend_with(x, w):
        return qkv.attend(x, x, x, score=scores.Gated(w, -w))

    x, w = torch.randn(2, 5, 4), torch.randn(4)
    got = torch.compile(attend_with, backend="eager", fullgraph=True)(x, w)
    torch.testing.assert_close(got, attend_with(x, w))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, number: qkv.scaled_dot_product_attention(x, x, x, scale=number),
        lambda x, number: qkv.attend(x, x, x, weighting=weightings.Softmax(number)),
    ],
    ids=["scale", "temperature"],
)
def test_a_number_may_be_left_open_where_torch_compiles(function):
    compiled, x = (
        torch.compile(function, backend="eager", fullgraph=True, dynamic=True),
        arrays(5)[0],
    )
    for number in (0.5, 2.5):
        torch.testing.assert_close(
            compiled(torch.tensor(x), number), function(torch.tensor(x), number)
        )


@pytest.mark.parametrize("options", [{"weighting": "sparsemax"}, {"score": "gaussian"}])
def test_compiled_values_that_do_not_count_may_be_anything(options):
    rng = np.random.default_rng(4)
    inputs = [torch.tensor(rng.normal(size=(2, 6, 3)), requires_grad=True) for _ in range(3)]
    inputs[2].data[[0, 1, 1], [2, 4, 5], [1, 0, 2]] = torch.tensor(
        [np.nan, np.inf, -np.inf]
    ).double()
    seen = torch.tensor(rng.random((2, 6, 6)) > 0.4)

    def plain(*x):
        return qkv.attend(*x, mask=seen, **options)

    def both(function):
        out = function(*inputs)
        return [out, *torch.autograd.grad(out.where(out.isfinite(), 0).square().sum(), inputs)]

    compiled = both(torch.compile(plain, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(compiled, both(plain), equal_nan=True)
    assert not compiled[0].isfinite().all() and all(x.isfinite().all() for x in compiled[1:])
