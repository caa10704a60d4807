"""Masks that are arrays, learned temperatures, dropout, and additive scores of any weighting."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

import qkv
from bench import fuzz
from qkv import masks, scores, weightings
from qkv.engines import triton
from qkv.engines.triton.launching import tile_choice
from qkv.engines.triton.sparse import thresholds
from qkv.frameworks import get_framework, tree
from tests.engines.triton.formulas import DEVICE

pytestmark = [
    pytest.mark.sample_of_module(5),
    pytest.mark.skipif(not triton.is_interpreted(), reason="small sizes, in the interpreter"),
]

N, M = 5, 19
MADE = torch.Generator(DEVICE).manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=MADE)


def normal_with_infinities(*shape):
    """With −∞ here and there."""
    return normal(*shape).masked_fill(torch.rand(shape, generator=MADE) < 0.3, -torch.inf)


RULE = torch.rand((N, M), generator=MADE) > 0.3
CASES = {
    "a mask for all": {"mask": normal(N, M)},
    "a mask of its own for each": {
        "mask": normal_with_infinities(2, 4, N, M),
        "and": masks.causal("bottom_right"),
    },
    "a mask for each key": {"mask": normal_with_infinities(2, 1, 1, M)},
    "a mask for each query, by entmax": {"mask": normal(N, 1), "weighting": "entmax15"},
    "one number": {"mask": normal(1, 1), "weighting": "sigmoid"},
    "a mask and top-k": {"mask": normal_with_infinities(4, N, M), "weighting": weightings.TopK(3)},
    "a mask and a Gaussian": {"mask": normal_with_infinities(N, M), "score": "gaussian"},
    "a rule": {"mask": RULE, "weighting": "average"},
    "a rule and entmax": {"mask": RULE, "weighting": "entmax15"},
    "hard": {"mask": RULE, "weighting": "hard"},
    "blocks and sparsemax": {
        "and": masks.blocks(np.array([[1, 0, 1], [0, 1, 1]], bool), (4, 8)),
        "weighting": "sparsemax",
    },
    "no band": {"and": ~masks.causal("bottom_right")},
    "dropout": {"dropout_p": 0.4, "seed": 7},
    "dropout of a mask's, by entmax": {
        "mask": normal(N, M),
        "dropout_p": 0.4,
        "seed": 7,
        "weighting": "entmax15",
    },
    "a temperature": {"temperature": torch.tensor(0.7), "mask": normal(N, M)},
    "a temperature for each head": {"temperature": torch.rand((4, 1, 1), generator=MADE) + 0.5},
    "a temperature for each head, and a mask": {
        "temperature": torch.rand((4, 1, 1), generator=MADE) + 0.5,
        "mask": normal_with_infinities(N, M),
    },
    "a temperature for each head, of a Gaussian whose keys are shared": {
        "temperature": torch.rand((4, 1, 1), generator=MADE) + 0.5,
        "score": "gaussian",
    },
    "a temperature for each query": {"temperature": torch.rand((2, 4, N, 1), generator=MADE) + 0.5},
    "a temperature of a softcap": {"temperature": torch.tensor(0.7), "softcap": 2.0},
    "a temperature for each query of a softcap, and a mask": {
        "temperature": torch.rand((4, N, 1), generator=MADE) + 0.5,
        "softcap": 2.0,
        "mask": normal_with_infinities(N, M),
    },
    "a softcap for each head, and its temperature": {
        "softcap": torch.rand((4, 1, 1), generator=MADE) + 1,
        "temperature": torch.tensor([0.7]),
        "and": masks.causal("bottom_right"),
    },
    "a learned softcap and a number for its temperature": {
        "softcap": torch.tensor(2.0),
        "weighting": weightings.Softmax(0.7),
        "mask": normal_with_infinities(4, N, M),
    },
    "a learned softcap and entmax": {"softcap": torch.tensor(2.0), "weighting": "entmax15"},
    "a learned softcap and top-k": {"softcap": torch.tensor(1.0), "weighting": weightings.TopK(3)},
    "a learned softcap, hard": {"softcap": torch.tensor(1.0), "weighting": "hard"},
    "a gate over a softcap": {
        "score": scores.Gated(normal(8), normal(8), score=scores.ScaledDot(softcap=1.0)),
        "mask": normal_with_infinities(N, M),
    },
    "a gate over a softcap, by entmax": {
        "score": scores.Gated(normal(8), normal(8), score=scores.ScaledDot(softcap=1.0)),
        "weighting": "entmax15",
    },
    "a temperature for each query of a gate over a softcap": {
        "temperature": torch.rand((4, N, 1), generator=MADE) + 0.5,
        "score": scores.Gated(normal(8), normal(8), score=scores.ScaledDot(softcap=1.0)),
        "mask": normal_with_infinities(N, M),
    },
    "a gate over a Gaussian": {
        "score": scores.Gated(normal(8), normal(8), score=scores.Gaussian(1.5)),
        "mask": normal_with_infinities(N, M),
    },
    "a gate over a Gaussian, by sigmoid": {
        "score": scores.Gated(normal(8), normal(8), score="gaussian"),
        "weighting": "sigmoid",
        "and": masks.causal("bottom_right"),
    },
    "a temperature for each query of a gate": {
        "temperature": torch.rand((2, 4, N, 1), generator=MADE) + 0.5,
        "score": scores.Gated(normal(8), normal(8), torch.tensor(0.3)),
    },
    "a temperature for each query of a Gaussian": {
        "temperature": torch.rand((4, N, 1), generator=MADE) + 0.5,
        "score": scores.Gaussian(1.5),
        "mask": normal_with_infinities(N, M),
    },
    "a temperature for each query of an additive score": {
        "temperature": torch.rand((4, N, 1), generator=MADE) + 0.5,
        "score": scores.Additive(normal(4, 8) / 3, normal(4, 8) / 3, normal(4)),
    },
    "hard, with softmax's gradient": {
        "weighting": weightings.Hard(straight_through=True),
        "mask": normal_with_infinities(N, M),
    },
    "hard, with softmax's gradient, of a Gaussian": {
        "weighting": weightings.Hard(straight_through=True),
        "score": "gaussian",
        "dropout_p": 0.4,
        "seed": 7,
    },
    "a learned softcap and sigmoid": {
        "softcap": torch.rand((2, 1, 1, 1), generator=MADE) + 1,
        "weighting": "sigmoid",
        "mask": normal(N, 1),
    },
}


def results(arrays, options, engine, dtype):
    """The output and the gradients of all that floats."""
    options = dict(options)
    if "score" in options:
        own = scores.resolve(options["score"])
        options["score"] = tree.map_arrays(get_framework(arrays[0]), lambda x: x.to(dtype), own)
    floats = {
        name: options.pop(name).to(dtype).clone().requires_grad_()
        for name in ("mask", "temperature", "softcap")
        if torch.is_tensor(options.get(name)) and options[name].is_floating_point()
    }
    softcap = floats.get("softcap", options.pop("softcap", None))
    if softcap is not None:
        options["score"] = scores.ScaledDot(softcap=softcap)
    if "temperature" in floats:
        options["weighting"] = weightings.Softmax(floats["temperature"])
    mask, more = floats.get("mask", options.pop("mask", None)), options.pop("and", None)
    if more is not None:
        mask = more if mask is None else masks.array(mask) & more
    inputs = [x.to(dtype).clone().requires_grad_() for x in arrays]
    out = qkv.attend(*inputs, mask=mask, engine=engine, **options)
    along = torch.randn(out.shape, generator=torch.Generator(DEVICE).manual_seed(1)).to(dtype)
    expected = (*inputs, *floats.values())
    grads = torch.autograd.grad((out * along).sum(), expected, allow_unused=True)
    return out, *(
        torch.zeros_like(x) if g is None else g for x, g in zip(expected, grads, strict=True)
    )


@pytest.mark.sample(10, always=("[dropout]",))
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    make = torch.Generator(DEVICE).manual_seed(2)
    arrays = [torch.randn(x, generator=make) for x in ((2, 4, N, 8), (2, 2, M, 8), (2, 2, M, 8))]
    got = results(arrays, CASES[name], "triton", torch.float32)
    want = results(arrays, CASES[name], "dense", torch.float64)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("weighting", ["warm", "entmax15"])
@pytest.mark.parametrize("width", [8, 20])
def test_a_softcap_learns_in_16_bits_as_exactly_as_eager_code_does(width, weighting, monkeypatch):
    """Also where φ is too wide for one pass, and its own gradient is a product of matrices."""
    monkeypatch.setattr(tile_choice, "MAX_BACKWARD_TILE_WIDTH", 16)
    make = torch.Generator(DEVICE).manual_seed(4)
    shapes = ((2, 4, 3, width), (2, 2, 40, width), (2, 2, 40, 8))
    arrays = [torch.randn(x, generator=make).half() for x in shapes]
    options = {"softcap": torch.tensor([1.5, 2.0, 2.5, 3.0]).reshape(4, 1, 1)}
    options |= (
        {"temperature": torch.tensor(0.7)} if weighting == "warm" else {"weighting": weighting}
    )
    read = []
    search = thresholds._launch_search
    monkeypatch.setattr(
        thresholds,
        "_launch_search",
        lambda *args, **named: (read.append(args[1]), search(*args, **named)),
    )
    got = results(arrays, options, "triton", torch.float16)
    assert all(x.query.dtype == x.key.dtype for x in read)
    want = results([x.double() for x in arrays], options, "dense", torch.float64)
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y).norm() < 4e-3 * y.norm()


@pytest.mark.parametrize("weighting", ["softmax", "sigmoid"])
def test_shared_keys_under_bandwidths_of_each_head(weighting):
    make = torch.Generator(DEVICE).manual_seed(5)
    shapes = ((2, 4, N, 8), (2, 2, M, 8), (2, 2, M, 8), (4, 1, 1))
    arrays = [torch.randn(x, generator=make) for x in shapes]

    def compute(engine, dtype):
        *inputs, wide = (x.to(dtype).requires_grad_() for x in arrays)
        options = {"score": scores.Gaussian(wide.abs() + 1), "weighting": weighting}
        out = qkv.attend(*inputs, engine=engine, **options)
        return out, *torch.autograd.grad(out.square().sum(), (*inputs, wide))

    for x, y in zip(compute("triton", torch.float32), compute("dense", torch.float64), strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("width", [8, 20])
def test_a_temperature_learns_in_16_bits_as_exactly_as_eager_code_does(width, monkeypatch):
    """Its gradient is Σ ∂L/∂s · s, where rounding what a row's ∂L/∂s add up to would show."""
    monkeypatch.setattr(tile_choice, "MAX_BACKWARD_TILE_WIDTH", 16)
    make = torch.Generator(DEVICE).manual_seed(4)
    shapes = ((2, 4, 3, width), (2, 2, 40, width), (2, 2, 40, 8))
    arrays = [torch.randn(x, generator=make).half() for x in shapes]
    options = {"temperature": torch.tensor([0.5, 0.7, 1.0, 1.4]).reshape(4, 1, 1), "score": "dot"}
    got = results(arrays, options, "triton", torch.float16)
    want = results([x.double() for x in arrays], options, "dense", torch.float64)
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y).norm() < 2e-3 * y.norm()


def test_a_temperature_that_has_changed_is_read_again():
    make = torch.Generator(DEVICE).manual_seed(6)
    x = torch.randn((1, 2, N, 8), generator=make)
    for warm in (1.0, 3.0):  # the second call of a kind has a plan
        weighting = weightings.Softmax(torch.tensor(warm))
        got = qkv.attend(x, x, x, weighting=weighting, engine="triton")
        want = qkv.attend(x, x, x, weighting=weightings.Softmax(warm), engine="dense")
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_values_wider_than_a_tile_come_in_parts(monkeypatch):
    monkeypatch.setattr(triton, "MAX_VALUE_WIDTH", 8)
    make = torch.Generator(DEVICE).manual_seed(5)
    arrays = [torch.randn(x, generator=make) for x in ((1, 2, N, 8), (1, 1, M, 8), (1, 1, M, 11))]
    options = {"weighting": "entmax15", "and": masks.window(6, align="bottom_right")}
    got = results(arrays, options, "triton", torch.float32)
    want = results(arrays, options, "dense", torch.float64)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=1e-4)


def test_values_wider_than_a_tile_work_with_an_additive_score(monkeypatch):
    monkeypatch.setattr(triton, "MAX_VALUE_WIDTH", 8)
    shapes = ((1, 2, N, 8), (1, 1, M, 8), (1, 1, M, 11), (4, 8), (4, 8), (4,))
    arrays, along = [torch.randn(x) for x in shapes], torch.randn(1, 2, N, 11)

    def compute(engine, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in arrays]
        out = qkv.attend(*inputs[:3], score=scores.Additive(*inputs[3:]), engine=engine)
        return out, *torch.autograd.grad(out, inputs, along.to(dtype))

    for x, y in zip(compute("triton", torch.float32), compute("dense", torch.float64), strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_additive_scores_of_other_weightings(dtype):
    make = torch.Generator(DEVICE).manual_seed(3)
    shapes = ((1, 2, N, 8), (1, 1, M, 8), (1, 1, M, 8), (4, 8), (4, 8), (4,))
    arrays = [torch.randn(x, generator=make).to(dtype) / (2 if len(x) == 2 else 1) for x in shapes]
    result = []
    for engine, wide in (("triton", dtype), ("dense", torch.float64)):
        inputs = [x.to(wide).requires_grad_() for x in arrays]
        options = {"score": scores.Additive(*inputs[3:]), "weighting": "entmax15", "mask": RULE}
        out = qkv.attend(*inputs[:3], engine=engine, **options)
        result.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    near = 1e-4 if dtype == torch.float32 else 4e-2
    for x, y in zip(*result, strict=True):
        torch.testing.assert_close(x.double(), y, atol=near, rtol=near)


def test_a_nan_that_a_mask_rules_out_stays_there():
    """In a key, a value or the mask's neighbourhood, forth and back."""
    make = torch.Generator(DEVICE).manual_seed(4)
    query, key, value = (torch.randn(1, 1, x, 8, generator=make) for x in (N, M, M))
    mask = normal(N, M)
    mask[:, 3] = -torch.inf
    full = [x.clone().requires_grad_() for x in (query, key, value)]
    key[..., 3, :] = value[..., 3, :] = torch.nan
    spoiled = [x.clone().requires_grad_() for x in (query, key, value)]
    for weighting in ("softmax", "entmax15"):
        result = []
        for inputs in (full, spoiled):
            out = qkv.attend(*inputs, mask=mask, weighting=weighting, engine="triton")
            result.append((out, *torch.autograd.grad(out.sum(), inputs)))
        for x, y in zip(*result, strict=True):
            torch.testing.assert_close(x, y)


def test_a_row_whose_mask_is_the_lowest_number_is_the_mean_of_what_it_leaves():
    """As by the formula, which has no number below it; log₂e times it is none in float32."""
    make = torch.Generator(DEVICE).manual_seed(4)
    arrays = [torch.randn(1, 2, x, 8, generator=make) for x in (N, M, M)]
    mask = normal_with_infinities(N, M)
    mask[1:3] = torch.finfo(torch.float32).min
    mask[2, :7] = -torch.inf
    got = results(arrays, {"mask": mask}, "triton", torch.float32)
    want = results(arrays, {"mask": mask}, "dense", torch.float64)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=1e-4)


def test_a_dropout_without_a_seed_is_drawn_once(monkeypatch):
    x = torch.ones(1, 1, 4, 8)
    outs = []
    for _ in range(2):
        torch.manual_seed(1)
        outs.append(qkv.attend(x, x, x, dropout_p=0.5, engine="triton"))
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("what", ["temperature", "mask"])
def test_what_moves_whole_rows_has_a_gradient_as_near_as_eager_code(what):
    """Scores of 20 and more: the terms of its sum are large, and the sum is small or 0."""
    make = torch.Generator(DEVICE).manual_seed(0)
    query, key, value, along = (
        torch.randn(1, 1, rows, width, generator=make)
        for rows, width in ((32, 128), (48, 128), (48, 32), (32, 32))
    )
    moves = torch.randn((32, 1) if what == "mask" else (), generator=make).abs() + 0.5

    def slope(dtype, engine):
        x = moves.to(dtype).requires_grad_()
        options = {"mask": x} if what == "mask" else {"weighting": weightings.Softmax(x)}
        arrays = [y.to(dtype) for y in (query, key, value)]
        out = qkv.attend(*arrays, score="dot", engine=engine, **options)
        parts = (out * along.to(dtype)).sum(-1).flatten()
        return torch.stack([torch.autograd.grad(y, x, retain_graph=True)[0] for y in parts])

    want = slope(torch.float64, "dense")
    got, usual = (slope(torch.float32, x).double() for x in ("triton", "dense"))
    assert (got - want).norm() <= 2 * (usual - want).norm()


def test_some_random_calls():
    """`python -m bench.fuzz` has more of them, on a GPU."""
    calls = fuzz.run(Random(5), "cpu", True, "triton")
    assert not [wrong for (_, wrong), _ in zip(calls, range(6), strict=False) if wrong]
