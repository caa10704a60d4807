"""The kernel family against its formula in float64."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch

from qkv.errors import ArgumentError, EngineError
from tests.engines.triton import formulas

pytest.importorskip("triton", reason="the kernels are written in Triton")
import triton.language as tl

from qkv.engines.triton import attend_operator, nan_repair
from qkv.engines.triton.backward import backward, backward_few_queries
from qkv.engines.triton.call_arrays import KERNEL_WEIGHTINGS
from qkv.engines.triton.launching import launch, tile_choice
from qkv.engines.triton.launching.kernel_call import LOG2E, Numbers
from qkv.engines.triton.pair_functions import tile_lists
from qkv.engines.triton.tile_functions.records import Arrays

# NumPy, which plays the device, warns of what is not finite.
pytestmark = [
    pytest.mark.sample_of_module(14),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

SMALL = tile_choice.Tile(16, 16, 16, 4, 2, 2)
LAYOUT = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 1, 1, 0]], dtype=torch.bool)
MASKS = {
    "open": {},
    "causal": {"upper": 0},
    "window": {"lower": -7, "upper": 3},
    "late": {"lower": 30},
    "lengths": {"lengths": torch.tensor([0, 29])},
    "layout": {"layout": LAYOUT, "layout_size": 8},
    "layout in a band": {"layout": LAYOUT, "layout_size": 8, "lower": -6, "upper": 20},
    "layout and lengths": {
        "layout": torch.ones(1, 1, dtype=torch.uint8),
        "layout_size": 64,
        "lengths": torch.tensor([16, 29]),
    },
}
RARE = ("causal", "late", "lengths", "layout in a band", "layout and lengths")
"""Masks that only some weightings are tried with."""
WEIGHTINGS = {
    "softmax": {},
    "average": {"weighting": "average"},
    "normalized": {"weighting": "normalized"},
    "raw": {"weighting": "raw"},
    "sigmoid": {"weighting": "sigmoid"},
    "sparsemax": {"weighting": "entmax", "alpha": 2.0},
    "entmax15": {"weighting": "entmax", "alpha": 1.5},
    "entmax": {"weighting": "entmax", "alpha": 1.3},
    "topk": {"weighting": "topk"},
}
WIDTHS = {"held": {"w": 16, "d": 16}, "tail": {"w": 40, "d": 5}, "wide": {"w": 72, "d": 20}}
SHAPE = {"h": 2, "hk": 1, "n": 21, "m": 37}


def battery():
    """Every weighting with every mask; widths, bias, gate and batches take turns."""
    parts = [{}, {"bias": True}, {"gate": True}, {"bias": True, "gate": True}]
    for i, (weighting, options) in enumerate(WEIGHTINGS.items()):
        for j, (mask, rule) in enumerate(MASKS.items()):
            if mask in RARE and weighting not in ("softmax", "average", "entmax15"):
                continue
            width = list(WIDTHS)[(i + j) % 3]
            extra = parts[(i + j // 2) % 4]
            shape = SHAPE | WIDTHS[width] | extra | {"b": 2 if "lengths" in mask else 1}
            name = f"{weighting}, {mask}, {width}, {'+'.join(extra) or 'plain'}"
            yield pytest.param(shape, options | rule, id=name)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles small enough that a small call has several, and φ counts as wide above 64 columns."""
    for name in ("pool", "split", "few_queries", "to_keys", "to_queries"):
        monkeypatch.setitem(tile_choice.TILE_OVERRIDES, name, SMALL)
    monkeypatch.setattr(launch, "MIN_ROWS_PER_PART", 1)
    monkeypatch.setattr(tile_choice, "MAX_FORWARD_TILE_WIDTH", 64)
    monkeypatch.setattr(tile_choice, "MAX_BACKWARD_TILE_WIDTH", 64)
    monkeypatch.setattr(launch, "count_processors", lambda device: 1)
    if not launch.is_interpreted():
        return
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    # A launch has made triton.language ready. The interpreter does it again for each function that
    # a kernel calls, and that is most of its time.
    slow = InterpretedFunction.__call__

    def quick(self, *args, **kwargs):
        if self.fn.__module__.startswith("qkv."):
            return self.rewrite()(*args, **kwargs)
        return slow(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "__call__", quick)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot(InterpreterBuilder.create_dot))


def dot(plain):
    """The interpreter's product, which takes the bits of a bfloat16 for a whole number."""
    import numpy as np

    def widened(x):
        if x.dtype.scalar.name == "bf16":
            bits = x.data.view(np.uint16).astype(np.uint32) << 16
            return type(x)(bits.view(np.float32), tl.float32)
        return x

    def product(self, a, b, *rest):
        return plain(self, widened(a), widened(b), *rest)

    return product


def split_loops(monkeypatch, processors=8):
    """Few programs for many processors, so that loops are split."""
    monkeypatch.setattr(launch, "count_processors", lambda device: processors)


def check_attend(shape, options, rtol=2e-5, attend=formulas.attend):
    arrays = formulas.arrays_of(**shape, positive=options.get("weighting") == "normalized")
    errors = formulas.compare(attend, arrays, **options)
    assert max(errors.values()) < rtol, errors


@pytest.mark.sample(16)
@pytest.mark.parametrize(("shape", "options"), list(battery()))
def test_values_and_gradients(shape, options):
    check_attend(shape, options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weighting", ["softmax", "sigmoid", "entmax15"])
def test_16_bits(weighting, dtype):
    shape = SHAPE | {"b": 1, "w": 40, "d": 16, "dtype": dtype, "bias": True, "gate": True}
    check_attend(shape, WEIGHTINGS[weighting] | {"upper": 3}, rtol=4e-2)


def test_16_bits_where_the_width_is_chunked():
    check_attend(
        SHAPE | {"b": 1, "w": 80, "d": 16, "dtype": torch.bfloat16}, {"upper": 3}, rtol=4e-2
    )


def test_even_sizes_need_no_mask():
    check_attend({"b": 1, "h": 1, "hk": 1, "n": 32, "m": 32, "w": 16, "d": 16}, {})


@pytest.mark.sample(4)
@pytest.mark.parametrize("w", [40, 72])
@pytest.mark.parametrize("mask", ["open", "window", "lengths", "layout in a band"])
def test_tiles_by_descriptors(mask, w, monkeypatch):
    """As on a device with a copy engine."""
    monkeypatch.setattr(launch, "has_tma", lambda device: True)
    for name in ("pool", "split", "to_keys", "to_queries"):
        monkeypatch.setitem(tile_choice.TILE_OVERRIDES, name, SMALL._replace(uses_descriptors=True))
    wide = w > tile_choice.MAX_FORWARD_TILE_WIDTH
    shape = SHAPE | {"b": 2, "w": w, "d": 8, "gate": not wide, "bias": wide, "hk": 1 + wide}
    seen = watch(monkeypatch, "TMA")
    check_attend(shape, MASKS[mask])
    assert seen == {True}


@pytest.mark.parametrize("copies", [True, False])
def test_a_wide_score_ends_by_its_bias(copies, monkeypatch):
    """Values beyond a length count for nothing, whatever they are, and the last key's ∞ does."""
    monkeypatch.setattr(launch, "has_tma", lambda device: copies)
    monkeypatch.setitem(tile_choice.TILE_OVERRIDES, "pool", SMALL._replace(uses_descriptors=True))
    arrays = formulas.arrays_of(b=2, h=2, hk=2, n=21, m=37, w=72, d=8, bias=True)
    lengths = torch.tensor([37, 29], device=formulas.DEVICE)
    query, key, value, bias = arrays.values()
    scores = (0.3 * query @ key.mT + bias[:, :, None]).double()
    scores[1, :, :, 29:] = -torch.inf
    want = scores.softmax(-1) @ value.double()
    value[0, :, 36, 2], want[0, ..., 2] = torch.inf, torch.nan
    value[1, :, 29:] = torch.nan
    seen = watch(monkeypatch, "ENDED")
    out, _ = formulas.attend(**arrays, scale=0.3, lengths=lengths)
    assert seen == {True}
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("lead", "upper"), [((1, 1), None), ((2, 4), 3)])
def test_a_float_mask_by_descriptors(lead, upper, monkeypatch):
    """Its tiles on the way to the keys, as they are without; some of its numbers are −∞."""
    monkeypatch.setitem(
        tile_choice.TILE_OVERRIDES, "to_keys", SMALL._replace(uses_descriptors=True)
    )
    arrays = formulas.arrays_of(b=2, h=4, hk=2, n=70, m=40)
    pairs = torch.randn(*lead, 70, 40)
    pairs[..., 3, 5:9] = -torch.inf
    seen, result = watch(monkeypatch, "LAID"), []
    for copies in (True, False):
        monkeypatch.setattr(launch, "has_tma", lambda device, copies=copies: copies)
        inputs = [x.detach().requires_grad_() for x in arrays.values()]
        out, _ = formulas.attend(*inputs, scale=0.3, upper=upper, pairs=pairs)
        result.append(torch.autograd.grad(out.square().sum(), inputs))
        assert seen >= {copies}
    for one, other in zip(*result, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("m", "band", "spoiled"), [(32, {}, True), (40, {"upper": 12}, True), (40, {}, False)]
)
@pytest.mark.parametrize("weighting", ["softmax", "sparsemax", "entmax15", "entmax"])
def test_a_float_mask_in_16_bits(weighting, m, band, spoiled, monkeypatch):
    """Softmax and entmax trust −∞ to rule a pair out; what is not finite there is found and done
    again. With the gradient of the mask, whose heads and batches share it."""
    monkeypatch.setattr(launch, "has_tma", lambda device: True)
    for name in ("pool", "to_keys", "to_queries", "to_pairs"):
        monkeypatch.setitem(tile_choice.TILE_OVERRIDES, name, SMALL._replace(uses_descriptors=True))
    arrays = formulas.arrays_of(b=2, h=2, hk=1, n=32, m=m, dtype=torch.float16)
    pairs = torch.randn(1, 1, 32, m).half()
    pairs[..., torch.rand(32, m) < 0.2] = -math.inf
    pairs[..., 5] = pairs[..., 20] = -math.inf
    pairs[..., 9, :] = -math.inf
    inputs = {name: x.double().requires_grad_() for name, x in (arrays | {"pairs": pairs}).items()}
    s = formulas.scores(scale=0.3, **{x: inputs[x] for x in inputs if x not in ("value", "pairs")})
    live = formulas.alive(s.shape, **band) & (pairs > -math.inf)
    s = s + inputs["pairs"].masked_fill(~live, 0.0)
    options, rows = WEIGHTINGS[weighting], {}
    if options:
        rows = {"row_a": formulas.entmax_threshold(s, live, options["alpha"]).float()}
    own = options or {"weighting": "softmax"}
    alpha, lse = formulas.weigh(s, live, **own, **{x: y.double() for x, y in rows.items()})
    along = torch.randn(2, 2, 32, 16).half()
    total = (alpha @ formulas.shared(inputs["value"], s) * along).sum()
    if not options:
        total = total + torch.where(lse > -math.inf, lse, 0.0).sum()
    right = torch.autograd.grad(total, list(inputs.values()))
    if spoiled:
        arrays["key"][..., 5, :] = math.nan
        arrays["key"][..., 20, 3] = math.inf
        arrays["value"][..., 20, :] = math.nan
    seen = watch(monkeypatch, "QUICK")
    ours = {x: y.detach().requires_grad_() for x, y in (arrays | {"pairs": pairs}).items()}
    out, lse = formulas.attend(**ours, scale=0.3, **options, **rows, **band)
    torch.testing.assert_close(
        out.double(), alpha @ formulas.shared(inputs["value"], s), rtol=2e-2, atol=1e-2
    )
    total = (out * along).sum()
    if not options:
        total = total + torch.where(lse > -math.inf, lse, 0.0).sum()
    for x, y in zip(torch.autograd.grad(total, list(ours.values())), right, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=4e-2, atol=2e-2)
    assert True in seen


def test_stacked_heads_of_a_wide_score_have_no_descriptor(monkeypatch):
    """Their rows do not follow each other."""
    monkeypatch.setattr(launch, "has_tma", lambda device: True)
    for name in ("pool", "split"):
        monkeypatch.setitem(tile_choice.TILE_OVERRIDES, name, SMALL._replace(uses_descriptors=True))
    seen = watch(monkeypatch, "TMA")
    formulas.attend(**formulas.arrays_of(**SHAPE | {"b": 1, "w": 72, "d": 8}), scale=0.3)
    assert seen == {False}


@pytest.mark.parametrize(("waves", "most"), [(1, 5), (2, 7)])
def test_no_split_where_most_processors_are_busy(waves, most, monkeypatch):
    split_loops(monkeypatch)
    for name in ("pool", "split"):
        monkeypatch.setitem(tile_choice.TILE_OVERRIDES, name, SMALL._replace(waves=waves))
    seen = watch(monkeypatch, "SPLIT")
    for programs in (most, most + 1):
        formulas.attend(**formulas.arrays_of(b=programs, h=1, hk=1, n=16, m=96), scale=0.3)
        assert seen == {programs == most}
        seen.clear()


def test_rows_that_no_descriptor_fits(monkeypatch):
    monkeypatch.setattr(launch, "has_tma", lambda device: True)
    for name in ("pool", "to_keys", "to_queries"):
        monkeypatch.setitem(tile_choice.TILE_OVERRIDES, name, SMALL._replace(uses_descriptors=True))
    seen = watch(monkeypatch, "TMA")
    check_attend(SHAPE | {"b": 1, "w": 40, "d": 5}, {})
    assert seen == {False}


def watch(monkeypatch, name):
    """The values of a compile-time fact in the launches to come."""
    seen, start = set(), launch.launch_kernel

    def watched(kernel, *rest):
        facts = rest[-2]
        seen.update({facts[name]} if name in facts else ())
        start(kernel, *rest)

    monkeypatch.setattr(launch, "launch_kernel", watched)
    return seen


def test_one_column():
    check_attend({"b": 1, "h": 1, "hk": 1, "n": 17, "m": 19, "w": 1, "d": 1}, {"upper": 3})


def test_wide_values():
    check_attend({"b": 1, "h": 1, "hk": 1, "n": 17, "m": 19, "w": 16, "d": 300}, {"upper": 3})


def test_real_widths(monkeypatch):
    monkeypatch.undo()
    small = tile_choice.Tile(32, 32, 64, 4, 2)
    for name in ("pool", "split", "to_keys", "to_queries"):
        monkeypatch.setitem(tile_choice.TILE_OVERRIDES, name, small)
    check_attend({"b": 1, "h": 1, "hk": 1, "n": 33, "m": 40, "w": 320, "d": 64}, {"scale": 0.05})


@pytest.mark.sample(4, always=("[softmax]",))
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_split_over_keys(weighting, monkeypatch):
    split_loops(monkeypatch)
    shape = {"b": 1, "h": 2, "hk": 1, "n": 3, "m": 150, "w": 16, "d": 5, "gate": True}
    check_attend(shape, WEIGHTINGS[weighting] | {"upper": 140})


def test_no_split_of_a_few_tiles(monkeypatch):
    split_loops(monkeypatch)
    monkeypatch.setattr(launch, "MIN_ROWS_PER_PART", 4 * 16)
    seen = watch(monkeypatch, "SPLIT")
    for m in (7 * 16, 8 * 16):
        formulas.attend(**formulas.arrays_of(b=1, h=1, n=1, m=m), scale=0.3)
        assert seen == {m == 8 * 16}
        seen.clear()


def test_split_without_groups(monkeypatch):
    split_loops(monkeypatch)
    check_attend({"b": 1, "h": 1, "hk": 1, "n": 1, "m": 96, "w": 16, "d": 16, "bias": True}, {})


def test_split_of_a_layout_and_a_wide_score(monkeypatch):
    split_loops(monkeypatch)
    shape = {"b": 1, "h": 2, "hk": 1, "n": 21, "m": 37, "w": 72, "d": 16}
    check_attend(shape | {"bias": True, "gate": True}, MASKS["layout"])


@pytest.mark.parametrize("options", [{}, {"weighting": "average"}], ids=str)
def test_split_over_queries(options, monkeypatch):
    split_loops(monkeypatch)
    shape = {"b": 1, "h": 2, "hk": 1, "n": 90, "m": 16, "w": 16, "d": 16, "bias": True}
    check_attend(shape, options | {"lower": -80})


@pytest.mark.parametrize("scratch_bytes", [2**20, 2 * 300 * 20 * 4, 20 * 256 * 4])
def test_score_gradients_in_pieces(scratch_bytes, monkeypatch):
    """All at once, two pairs at a time, and one pair 256 keys at a time."""
    monkeypatch.setattr(backward, "MAX_SCRATCH_BYTES", scratch_bytes)
    for name in ("pool", "to_keys"):
        monkeypatch.setitem(tile_choice.TILE_OVERRIDES, name, tile_choice.Tile(32, 64, 32, 4, 2))
    check_attend({"b": 3, "h": 1, "hk": 1, "n": 20, "m": 300, "w": 72, "d": 16}, {"upper": 290})


@pytest.mark.sample(4)
@pytest.mark.parametrize("w", [16, 72])
@pytest.mark.parametrize(
    "expected", ["query", "key", "value", "gate_query", "gate_key", "key_bias"]
)
def test_one_gradient_alone(expected, w):
    arrays = formulas.arrays_of(**SHAPE | {"b": 1, "w": w, "d": 16}, bias=True, gate=True)
    every = {name: x.clone().requires_grad_() for name, x in arrays.items()}
    want = torch.autograd.grad(formulas.reference(every, scale=0.3)[0].sum(), every[expected])[0]
    one = arrays | {expected: arrays[expected].clone().requires_grad_()}
    got = torch.autograd.grad(formulas.attend(**one, scale=0.3)[0].sum(), one[expected])[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_expanded_and_strided_arguments():
    arrays = formulas.arrays_of(**SHAPE | {"b": 2, "w": 16, "d": 16}, bias=True, gate=True)
    arrays["key_bias"] = arrays["key_bias"][:1].expand(2, 1, 37)
    arrays["gate_key"] = arrays["gate_key"].mT.contiguous().mT
    arrays["query"] = arrays["query"].transpose(1, 2).contiguous().transpose(1, 2)
    arrays["key"] = arrays["key"].mT.contiguous().mT
    got = formulas.attend(**arrays, scale=-0.3)
    want = formulas.reference(arrays, scale=-0.3)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


def test_the_same_twice():
    arrays = formulas.arrays_of(**SHAPE | {"b": 1, "w": 16, "d": 16}, gate=True)
    runs = []
    for _ in range(2):
        inputs = {name: x.clone().requires_grad_() for name, x in arrays.items()}
        out, lse = formulas.attend(**inputs, scale=0.3, upper=4)
        runs.append((out, lse, *torch.autograd.grad(out.sum(), tuple(inputs.values()))))
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


# What is not a number, what is not there


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_nothing_to_look_at(weighting):
    """Output 0, log-sum-exp −∞, gradients 0."""
    options = WEIGHTINGS[weighting] | {"upper": -5, "lengths": torch.tensor([0, 4])}
    arrays = formulas.arrays_of(b=2, n=20, m=20, positive=True)
    rows = formulas.thresholds(
        arrays, 0.3, options.get("weighting"), options.get("alpha"), 5, {"upper": -5}
    )
    inputs = {name: x.requires_grad_() for name, x in arrays.items()}
    out, lse = formulas.attend(**inputs, scale=0.3, **options, **rows)
    empty = torch.ones(2, 1, 20, dtype=torch.bool)
    empty[1, :, 5:] = False
    empty = empty.expand(2, 2, 20)
    assert (out[empty] == 0).all()
    if weighting in ("softmax", "topk"):
        assert (lse[empty] == -math.inf).all()
    for grad in torch.autograd.grad(out.sum() + lse[~empty].sum(), tuple(inputs.values())):
        assert torch.isfinite(grad).all()
        assert (grad[0] == 0).all()


@pytest.mark.parametrize(("n", "m"), [(0, 5), (5, 0)])
@pytest.mark.parametrize("weighting", ["softmax", "raw"])
def test_no_queries_or_no_keys(n, m, weighting):
    arrays = formulas.arrays_of(n=n, m=m)
    inputs = {name: x.requires_grad_() for name, x in arrays.items()}
    out, lse = formulas.attend(**inputs, scale=0.3, weighting=weighting)
    assert out.shape == (2, 2, n, 16)
    assert (out == 0).all()
    assert (lse == (-math.inf if weighting == "softmax" else 0)).all()
    for grad in torch.autograd.grad(out.sum(), tuple(inputs.values())):
        assert (grad == 0).all()


@pytest.mark.sample(5)
@pytest.mark.parametrize("w", [16, 72])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("where", ["key", "value", "query"])
def test_what_is_masked_stays_out(where, bad, w):
    """Row 12, which the mask keeps apart from everything, is as good as 0."""
    shape, rule = ({"n": 8, "m": 20}, {"upper": 3})
    if where == "query":
        shape, rule = ({"n": 20, "m": 12}, {"lower": 5})
    results = []
    for filler in (bad, 0.0):
        inputs = formulas.arrays_of(b=1, w=w, gate=True, **shape)
        inputs[where][..., 12, :] = filler
        inputs = {name: x.requires_grad_() for name, x in inputs.items()}
        out, lse = formulas.attend(**inputs, scale=0.3, **rule)
        loss = out.sum() + lse[:, :, :7].sum()
        results.append((out, lse, *torch.autograd.grad(loss, tuple(inputs.values()))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.applies(lambda where, weighting: (where, weighting) != ("key", "average"))
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_not_a_number_is_not_hidden(where, weighting):
    """Row 12 reaches those that may look at it, and no others."""
    arrays = formulas.arrays_of(b=1, h=1, n=20, m=20, positive=True)
    options = WEIGHTINGS[weighting]
    rows = formulas.thresholds(
        arrays, 0.3, options.get("weighting"), options.get("alpha"), 20, {"upper": 0}
    )
    want = formulas.attend(**arrays, scale=0.3, upper=0, **options, **rows)[0]
    counts = torch.ones(20, dtype=torch.bool)
    if where == "value" and options.get("weighting") == "entmax":
        s = formulas.scores(arrays["query"], arrays["key"], 0.3)
        counts = ((options["alpha"] - 1) * s[0, 0, :, 12] - rows["row_a"][0, 0]) > 0
    arrays[where][..., 12, :] = math.nan
    got = formulas.attend(**arrays, scale=0.3, upper=0, **options, **rows)[0]
    spoiled = (torch.arange(20) >= 12) & counts
    assert torch.isnan(got[0, 0, spoiled]).all()
    torch.testing.assert_close(got[0, 0, ~spoiled], want[0, 0, ~spoiled])


@pytest.mark.parametrize("weighting", ["topk", "entmax15", "raw", "normalized"])
def test_a_weight_of_zero_keeps_its_value_out(weighting):
    arrays = formulas.arrays_of(b=1, h=1, n=16, m=32, positive=True)
    arrays["key"][..., 20, :] = -5.0 if weighting in ("topk", "entmax15") else 0.0
    rows = formulas.thresholds(
        arrays, 0.3, *(WEIGHTINGS[weighting].get(x) for x in ("weighting", "alpha")), 5, {}
    )
    want = formulas.attend(**arrays, scale=0.3, **WEIGHTINGS[weighting], **rows)[0]
    arrays["value"][..., 20, :] = math.nan
    got = formulas.attend(**arrays, scale=0.3, **WEIGHTINGS[weighting], **rows)[0]
    torch.testing.assert_close(got, want)


def test_ties_count_up_to_a_position():
    arrays = formulas.arrays_of(b=1, h=1, n=4, m=40)
    arrays |= {"query": torch.ones(1, 1, 4, 16), "key": torch.ones(1, 1, 40, 16)}
    rows = {
        "row_a": torch.full((1, 1, 4), 16.0),
        "row_b": torch.tensor([[[0, 3, 20, 39]]], dtype=torch.int32),
    }
    out, lse = formulas.attend(**arrays, scale=1.0, weighting="topk", **rows)
    for i, last in enumerate((0, 3, 20, 39)):
        want = arrays["value"][0, 0, : last + 1].mean(0)
        torch.testing.assert_close(out[0, 0, i], want, rtol=1e-5, atol=1e-6)
        assert lse[0, 0, i].item() == pytest.approx(16 + math.log(last + 1), rel=1e-6)


@pytest.mark.xfail(
    not launch.is_interpreted(),
    reason="a multiply-add keeps what rounding takes from s · scale, beyond 1e9 too much for 2^x",
)
@pytest.mark.parametrize("size", [1e30, -1e30])
def test_huge_scores(size):
    """Three keys share the largest score: a third of the weight each, and finite gradients."""
    arrays = formulas.arrays_of(b=1, h=1, n=5, m=20)
    arrays["query"] = torch.ones(1, 1, 5, 16)
    arrays["key"] = torch.full((1, 1, 20, 16), -size / 16)
    best = slice(4, 7) if size > 0 else slice(0, 20)
    arrays["key"][:, :, 4:7] = size / 16
    if size < 0:
        arrays["key"][:] = size / 16
    inputs = {name: x.requires_grad_() for name, x in arrays.items()}
    out, _ = formulas.attend(**inputs, scale=1.0)
    want = arrays["value"][:, :, best].mean(2, keepdim=True).expand(1, 1, 5, 16)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad(out.sum(), tuple(inputs.values()))
    assert all(torch.isfinite(x).all() for x in grads)
    torch.testing.assert_close(
        grads[2][0, 0, best].mean(), torch.tensor(5 / (best.stop - best.start))
    )


# The operator in torch


def arguments(**options):
    arrays = formulas.arrays_of(b=1, n=5, m=7, bias=True, gate=True)
    arrays = [x.requires_grad_() for x in arrays.values()]
    return (*Arrays(*arrays), *Numbers(0.3, **options))


@pytest.mark.parametrize("options", [{}, {"upper": 1, "weighting": "sigmoid"}], ids=str)
def test_opcheck(options):
    torch.library.opcheck(attend_operator.attend.node, arguments(**options))


@pytest.mark.filterwarnings("ignore")
def test_compiles_whole():
    def layer(query, key, value, bias):
        out, lse = formulas.attend(query * 2, key, value, scale=0.3, key_bias=bias, upper=2)
        return (out.sin().sum() + lse.sum()) * 2

    torch._dynamo.reset()
    arrays = [x.requires_grad_() for x in formulas.arrays_of(b=1, n=9, m=11, bias=True).values()]
    want = torch.autograd.grad(layer(*arrays), arrays)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for x, y in zip(torch.autograd.grad(compiled(*arrays), arrays), want, strict=True):
        torch.testing.assert_close(x, y)


def test_fake_tensors_have_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        query, key = torch.empty(2, 4, 9, 16), torch.empty(2, 2, 11, 16)
        out, lse = formulas.attend(query, key, torch.empty(2, 2, 11, 3), scale=1.0)
    assert out.shape == (2, 4, 9, 3)
    assert lse.shape == (2, 4, 9)


def test_second_derivatives_are_refused():
    arrays = {name: x.requires_grad_() for name, x in formulas.arrays_of(b=1, n=5, m=7).items()}
    out, _ = formulas.attend(**arrays, scale=0.3)
    grad = torch.autograd.grad(out.sum(), arrays["query"], create_graph=True)[0]
    with pytest.raises(EngineError, match="no second derivatives"):
        grad.sum().backward()


# Repair


def spoiled_by_zero(query, key, value, scale):
    """Causal attention as a kernel does it that multiplies what is ruled out by 0."""
    s = query @ formulas.shared(key, query).mT * scale
    s = s.masked_fill(~formulas.alive(s.shape, upper=0), -math.inf)
    return s.softmax(-1) @ formulas.shared(value, query)


@pytest.mark.parametrize(
    ("h", "hk", "w", "bad", "where", "processors"),
    [
        (3, 3, 16, math.nan, "value", 1),
        (4, 2, 20, math.inf, "value", 64),
        (2, 2, 300, math.nan, "value", 4),
        (3, 3, 16, math.nan, "key", 1),
    ],
)
def test_repair(monkeypatch, h, hk, w, bad, where, processors):
    """Head 1 of the keys has a number that rows before it must not see; the others are sound."""
    split_loops(monkeypatch, processors)
    monkeypatch.setitem(tile_choice.TILE_OVERRIDES, "repair", SMALL)
    arrays = formulas.arrays_of(b=2, h=h, hk=hk, n=37, m=37, w=w, d=8)
    arrays[where][0, 1, 20, 3] = bad
    inputs = [x.requires_grad_() for x in arrays.values()]
    query = inputs[0]
    out = spoiled_by_zero(*inputs, 0.3)
    along = torch.randn(out.shape, generator=torch.Generator(out.device).manual_seed(1))
    dquery = torch.autograd.grad(out, query, along)[0]
    want, _ = formulas.attend(*inputs, scale=0.3, upper=0)
    expected = torch.autograd.grad(want, query, along)[0]
    sick = torch.zeros(2, h, dtype=torch.bool)
    sick[0, h // hk : 2 * (h // hk)] = True
    assert not torch.isfinite((out if where == "value" else dquery)[sick][:, :20]).all()
    # The rows of heads side by side, as a fused kernel may write them.
    healed = out.detach().transpose(1, 2).contiguous().transpose(1, 2)
    mended = dquery.transpose(1, 2).contiguous().transpose(1, 2)
    repaired = nan_repair.repair_output(healed, *(x.detach() for x in inputs), scale=0.3)
    strided = along.mT.contiguous().mT
    nan_repair.repair_query_gradient(
        mended, strided, healed, repaired, *(x.detach() for x in inputs), scale=0.3
    )
    for got, before, right in ((healed, out.detach(), want), (mended, dquery, expected)):
        assert torch.equal(got[~sick], before[~sick])
        torch.testing.assert_close(got[sick], right[sick].detach(), equal_nan=True)
        assert torch.isfinite(got[sick][:, :20]).all()


def test_repair_compiles():
    arrays = list(formulas.arrays_of(b=1, h=1, n=5, m=5).values())
    torch.library.opcheck(
        nan_repair.repair_output.node,
        (arrays[0].clone(), *arrays, 0.3),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_repair_where_the_last_row_does_not_see_all():
    arrays = formulas.arrays_of(b=1, h=1, n=5, m=7)
    with pytest.raises(ArgumentError, match="7 keys for 5 queries"):
        nan_repair.repair_output(torch.zeros(1, 1, 5, 16), **arrays, scale=0.3)


# Tiles


def test_a_tile_that_does_not_fit_is_made_smaller(monkeypatch):
    import triton

    seen = []

    def crowded(*args):
        tile = args[-1]
        seen.append((tile.rows, tile.cols, tile.stages))
        if tile.cols > 32:
            raise triton.runtime.errors.OutOfResources(300, 200, "shared memory")

    monkeypatch.setattr(launch, "launch_kernel", crowded)
    monkeypatch.setattr(tile_choice, "SHRUNK_TILES", {})
    monkeypatch.setitem(tile_choice.TILE_OVERRIDES, "pool", tile_choice.Tile(128, 128, 64, 8, 3))
    arrays = formulas.arrays_of(b=1, n=200, m=200)
    formulas.attend(**arrays, scale=0.3)
    assert seen == [(128, 128, 3), (128, 128, 2), (128, 64, 2), (64, 64, 2), (64, 32, 2)]
    seen.clear()
    formulas.attend(**arrays, scale=0.3)
    assert seen == [(64, 32, 2)], "the tile that fitted is remembered"


def test_every_branch_of_the_kernels_is_reached(monkeypatch):
    """The compile-time facts of the calls above, with nothing run, as the interpreter has them."""
    if not launch.is_interpreted():
        pytest.skip("a device has instructions that the interpreter has not")
    seen = defaultdict(set)

    def record(kernel, programs, arrays, floats, integers, facts, tile):
        records = isinstance(arrays[0], tuple)
        known = len(arrays) + (1 if records else len(floats)) + len(integers)
        assert len(kernel.arg_names) == known + 1 and kernel.arg_names[-1] == "F"
        inputs = dict(zip(kernel.arg_names, arrays, strict=False))
        inputs |= arrays[0]._asdict() if records else {}
        for name, x in facts.items():
            if name not in ("W", "D", "ROWS", "COLS", "BLOCK_W", "BLOCK_D"):
                seen[kernel.__name__, name].add(x > 1 if name == "EVEN" else x)
        for name in ("lengths", "along_lse"):
            if name in inputs:
                seen[kernel.__name__, name].add(inputs[name] is not None)
        for width, block in (("W", "BLOCK_W"), ("D", "BLOCK_D")):
            if width in facts and block in facts:
                seen[kernel.__name__, width].add(facts[width] % facts[block] == 0)

    def fill_both(*given):
        fill(*given)
        backward.fill_by_sides(*given, True, True, False, False)

    fill = backward_few_queries.fill_gradients
    monkeypatch.setattr(backward_few_queries, "fill_gradients", fill_both)
    monkeypatch.setattr(launch, "launch_kernel", record)
    monkeypatch.setattr(tile_lists, "MIN_LISTED_LENGTH", 32)
    for name in ("pool", "split", "few_queries", "to_keys", "to_queries", "to_pairs"):
        monkeypatch.setitem(tile_choice.TILE_OVERRIDES, name, SMALL._replace(uses_descriptors=True))
    for dtype, w, d in ((torch.float32, 16, 16), (torch.bfloat16, 20, 20), (torch.float16, 320, 8)):
        plain = list(formulas.arrays_of(b=1, h=1, n=9, m=9, w=w, d=d, dtype=dtype).values())
        repaired = nan_repair.repair_output(plain[2].clone(), *plain, scale=0.3)
        nan_repair.repair_query_gradient(
            plain[0].clone(), plain[2], plain[2], repaired, *plain, scale=0.3
        )
    for case in battery():
        shape, options = case.values
        for dtype in (torch.float32, torch.bfloat16):
            for processors in (1, 64):
                split_loops(monkeypatch, processors)
                monkeypatch.setattr(launch, "has_tma", lambda device, yes=processors == 1: yes)
                for n, m in ((21, 37), (32, 48)):
                    arrays = formulas.arrays_of(**shape | {"n": n, "m": m}, dtype=dtype)
                    inputs = {name: x.requires_grad_() for name, x in arrays.items()}
                    rule = dict(options)
                    if "layout" in rule:
                        rule["layout"] = torch.ones(-(-n // 8), -(-m // 8), dtype=torch.bool)
                        rule["layout_size"] = 8
                    rows = {}
                    if rule.get("weighting") in ("entmax", "topk"):
                        rows = {"row_a": torch.zeros(arrays["query"].shape[:3])}
                    if rule.get("weighting") == "topk":
                        rows["row_b"] = torch.zeros(arrays["query"].shape[:3], dtype=torch.int32)
                    out, lse = formulas.attend(
                        **inputs, scale=0.3, whole=processors == 1, **rule, **rows
                    )
                    loss = out.sum() + (lse.sum() if m == 48 else 0)
                    torch.autograd.grad(loss, tuple(inputs.values()), allow_unused=True)
                    lines = n if m == 48 else 1  # one for all queries is summed over them
                    pairs = torch.ones(1, 1, lines, m, requires_grad=True)
                    for rule["pairs"] in (pairs, pairs.detach().to(torch.uint8)):
                        drop = {"dropout": 0.3, "seed": torch.zeros(1, dtype=torch.int64)}
                        more = drop if processors == 1 and dtype == torch.float32 else {}
                        more["whole"] = processors == 1
                        out, lse = formulas.attend(**inputs, scale=0.3, **rule, **rows, **more)
                        moved = [x for x in (*inputs.values(), rule["pairs"]) if x.requires_grad]
                        torch.autograd.grad(out.sum() + lse.sum(), moved, allow_unused=True)
    monkeypatch.setattr(launch, "has_tma", lambda device: True)
    inputs = formulas.arrays_of(b=1, h=1, n=32, m=48, dtype=torch.bfloat16)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    out, _ = formulas.attend(**inputs, scale=0.3, pairs=torch.ones(1, 1, 32, 48))  # heads apart
    torch.autograd.grad(out.sum(), tuple(inputs.values()))
    with torch.no_grad():
        formulas.attend(**inputs, scale=0.3, adds_squares=True)
    both = {True, False}
    every = {
        "PAIRS": {0, 1, 2},
        "WEIGHTING": set(KERNEL_WEIGHTINGS.values()),
        "POWER": {0, 1, 2, 3},
        "CENTRE": {0, 1, 2},
        "PRECISION": {"ieee"},  # likewise
        "SCORES": {"ieee"},
        "FAST": {False},  # one instruction of the device, which the interpreter has not
        "BLOCK_S": {64},
        "BLOCK": {4096},
        "BASE": {1.0, LOG2E},
        "LISTED": {0},  # test_support has lists
        "MANY": {0},
        "ALONG": {0},  # test_weights
        "CAP": {0},  # test_engine
        "SPANS": {False},  # test_packed
        "PAGE": {0},  # test_paged
        "CODES": {False},
        "SINK": {0},  # test_sink
        "LINED": {False},  # of column tiles: test_distance
        "FEW": {None},
        "BOUNDED": {False},
        "TANH": {0},  # test_exact, where all tiles are edges
        "SQUARES": {False},  # but in the pass without a gradient
        "FORM": {"product"},  # test_distance has the other forms
        "WINDOW": {False},
        "BY_COLUMN": {False},
        "TERMS": {0},
        "SLOPED": {True},
        "HAS_RULE": {False},  # test_pair_functions has them
        "HAS_MOD": {False},
        "SHORT": {False},
        "CAPTURED_SUMS": {0},  # test_user_scores has them
        "CAPTURED_GRADIENT": {None},
        "TOPPED": {False},  # test_threshold_search
        "RULE": {None},
        "MOD": {None},
        "MOD_GRADIENT": {None},
        "ENDED": {False},  # of wide rows, which have a test of their own
    }
    narrower = {
        ("pool_kernel", "SQUARES"): both,
        ("backward_keys_kernel", "LINED"): both,
        ("backward_keys_kernel", "CENTRED"): both,
        ("backward_queries_kernel", "WEIGHTING"): set(KERNEL_WEIGHTINGS.values()) - {"average"},
        ("backward_mask_kernel", "WEIGHTING"): set(KERNEL_WEIGHTINGS.values()) - {"average"},
        ("backward_mask_kernel", "PAIRS"): {2},
        **{("backward_mask_kernel", name): {False} for name in ("TILED", "EDGES", "SKIPS_PAIRS")},
    }
    fixed = {
        "backward_queries_kernel": {"PACKED"},
        "backward_mask_kernel": {"PACKED", "TMA", "LAID"},
    }
    few_queries = {
        "WEIGHTING": {"softmax", "sigmoid", "entmax", "topk", "normalized"},
        "POWER": {0, 2, 3},
        "PAIRS": {0, 1, 2},
    }
    names = "MASKED SPLIT PACKED CENTRE CENTRED FROM_OUTPUT BIAS LOWER UPPER LAYOUT DROP TMA"
    few_queries |= dict.fromkeys(names.split(), both)
    for name, values in few_queries.items():
        assert seen["backward_few_queries_kernel", name] == values, name
    for (kernel, name), values in seen.items():
        if kernel in ("classify_tiles_kernel", "write_tile_lists_kernel"):  # test_tile_lists
            continue
        if kernel in ("backward_few_queries_kernel", "join_parts_kernel"):
            continue
        want = narrower.get((kernel, name), every.get(name, both))
        if (kernel, name) in {("centre_kernel", "D"), ("merge_kernel", "D")}:
            continue
        if name in fixed.get(kernel, ()) or (kernel.startswith("repair") and len(values) == 1):
            continue
        assert values == want, (kernel, name, values)
    kernels = {
        "pool_kernel",
        "merge_kernel",
        "centre_kernel",
        "backward_few_queries_kernel",
        "backward_keys_kernel",
        "backward_queries_kernel",
        "backward_mask_kernel",
        "join_parts_kernel",
        "clear_kernel",
        "classify_tiles_kernel",
        "write_tile_lists_kernel",
        "repair_kernel",
        "repair_queries_kernel",
    }
    assert {kernel for kernel, _ in seen} == kernels
