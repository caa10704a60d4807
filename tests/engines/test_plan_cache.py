"""Repeated calls: the cached plan of an earlier call of the same kind changes no result."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.engines import plan_cache
from qkv.errors import QkvError, ShapeError
from qkv.frameworks import get_framework, to_numpy

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.sample_of_module(40)

TOLERANCE = {"float16": 1e-2, "bfloat16": 6e-2, "float32": 3e-5, "float64": 1e-10}
OPTION_SETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal},
    "last": {"mask": masks.causal(align="bottom_right")},
    "window": {"mask": masks.window(2)},
    "gaussian": {"score": "gaussian"},
    "softcap": {"score": scores.ScaledDot(0.3, softcap=2.0)},
    "entmax15": {"weighting": "entmax15"},
    "hard": {"weighting": "hard", "mask": masks.causal},
    "boxcar": {"score": scores.Boxcar(2.0), "weighting": "normalized"},
    "function": {"score": lambda q, k: scores.Dot()(q, k) * 0.5},
}
MAKE = {"numpy": np.asarray, "torch": torch.as_tensor}
with_every_option_set = pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS)
every_framework = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape)


def three(n: int, m: int, lead: tuple[int, ...] = (2, 2), d: int = 4) -> list[np.ndarray]:
    return [normal(*lead, n, d), normal(*lead, m, d, seed=1), normal(*lead, m, d, seed=2)]


def host(x: Any) -> np.ndarray:
    x = x.detach().double() if isinstance(x, torch.Tensor) else x
    return np.asarray(to_numpy(x), dtype=float)


def truth(inputs: Any, options: dict[str, Any]) -> np.ndarray:
    """The equation, literally, in float64 and on new arrays."""
    options = {k: x.numpy() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    return host(qkv.attend(*(host(x).copy() for x in inputs), **options, engine="dense"))


def check_attend(inputs: Any, options: dict[str, Any], **more: Any) -> Any:
    """`attend` is right on these arrays; what it gave."""
    result = qkv.attend(*inputs, **options, **more)
    within = TOLERANCE[get_framework(inputs[0]).dtype_name(inputs[0])]
    np.testing.assert_allclose(host(result), truth(inputs, options), atol=within, rtol=within)
    return result


# Lengths, dtypes, layouts, in turns


@every_framework
@with_every_option_set
def test_every_length(make, options):
    for n, m in [(1, m) for m in range(22)] + [(0, 3), (3, 0), (2, 40), (17, 5), (40, 40), (1, 1)]:
        check_attend([make(x) for x in three(n, m)], options)


@every_framework
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(align="bottom_right"),
        masks.causal(offset=2),
        masks.window(1, align="bottom_right"),
        masks.window(2, 0),
        masks.causal | masks.global_tokens(1),
        masks.dilated(2, 2),
        masks.strided(2),
    ],
    ids=repr,
)
def test_lengths_of_one_size_under_a_rule_of_positions(make, mask):
    sizes = [(5, 5), *itertools.product(range(4, 8), repeat=2), (5, 5)]
    for n, m in sizes:
        check_attend([make(x) for x in three(n, m)], {"mask": mask})


@with_every_option_set
def test_every_dtype(options):
    for _ in range(2):
        for dtype in (torch.float32, torch.float16, torch.float64, torch.bfloat16):
            check_attend([torch.as_tensor(x).to(dtype) for x in three(5, 6)], options)


@every_framework
@with_every_option_set
def test_every_rank_and_number_of_heads(make, options):
    q, k, v = three(5, 6, (2, 4))
    for heads in (4, 2, 1, 4):
        check_attend([make(q), make(k[:, :heads]), make(v[:, :heads])], options)
    check_attend([make(q[:1]), make(k), make(v)], options)
    check_attend([make(q[0]), make(k[0]), make(v[0])], options)
    check_attend([make(q[0, 0]), make(k[0, 0]), make(v[0, 0])], options)
    check_attend([make(q), make(k[0, 0]), make(v[0, 0])], options)
    check_attend([make(q[..., :3]), make(k[..., :3]), make(v)], options)


@every_framework
@with_every_option_set
def test_every_layout(make, options):
    q, k, v = (make(x) for x in three(6, 6, (3, 2)))
    check_attend([q, k, v], options)
    wide = make(np.concatenate(three(6, 6, (3, 2)), axis=-1))
    check_attend([wide[..., :4], wide[..., 4:8], wide[..., 8:]], options)  # cut from one
    check_attend([q[..., ::2, :], k[..., ::3, :], v[..., ::3, :]], options)
    check_attend([x.swapaxes(-3, -2) for x in (q, k, v)], options)  # (heads after positions)
    check_attend([x.swapaxes(-2, -1) for x in (q, k, v)], options)
    still = [np.broadcast_to(x, (3, *x.shape)) for x in three(4, 5)]
    check_attend([make(x.copy()) for x in still], options)
    if make is np.asarray:
        check_attend(still, options)  # of stride 0 and not to be written to


# What numbers there are


@every_framework
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("options", ["plain", "causal", "last", "gaussian", "softcap"])
def test_what_is_not_finite_is_seen_wherever_it_is(make, bad, options):
    options = OPTION_SETS[options]
    for m in (1, 2, 7, 15, 16, 17, 33):
        n = min(m, 3)
        check_attend([make(x) for x in three(n, m, (2,))], options)
        for which, at in itertools.product(range(3), (0, -1)):
            inputs = three(n, m, (2,))
            inputs[which][1, at, 2] = bad
            actual = qkv.attend(*(make(x) for x in inputs), **options)
            want = truth(inputs, options)
            lost = ~np.isfinite(want)
            assert (np.isnan(host(actual)) == np.isnan(want)).all(), (m, which, at)
            np.testing.assert_allclose(host(actual)[~lost], want[~lost], atol=1e-9)


@every_framework
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "float", "lengths", "a row"])
def test_what_is_masked_out_is_not_seen(make, bad, kind):
    for m in (3, 15, 16, 30):
        inputs = three(4, m, (2,))
        inputs[1][:, -1], inputs[2][:, -2] = bad, bad
        seen = np.ones((4, m), bool)
        seen[:, -2:] = False
        seen[0] = False
        mask = {
            "boolean": make(seen),
            "float": make(np.where(seen, 0.5, -np.inf)),
            "lengths": masks.lengths([m - 2, m - 2]),
            "a row": make(seen[-1:]),
        }[kind]
        result = host(qkv.attend(*(make(x) for x in inputs), mask=mask))
        clean = [np.nan_to_num(x, posinf=0) for x in inputs]
        rule = seen if kind in ("boolean", "float") else seen[-1:]
        np.testing.assert_allclose(result, truth(clean, {"mask": rule}), atol=1e-9)


def build_mask(kind: str, n: int, m: int) -> Any:
    """A mask of each form that torch's kernel takes as it is; no query sees the last key, and the
    second sees none."""
    seen = np.random.default_rng(n + m).random((n, m)) < 0.7
    seen[:, 0], seen[:, -1], seen[1] = True, False, False
    return {
        "causal": masks.causal,
        "two axes": torch.as_tensor(seen),
        "four axes": torch.as_tensor(np.stack([seen, ~seen])[:, None]),
        "a row": torch.as_tensor(seen[:1]),
        "a row for each": torch.as_tensor(np.stack([seen[:1], seen[2:3]])[:, None]),
    }[kind]


every_shown = pytest.mark.parametrize(
    "kind", ["causal", "two axes", "four axes", "a row", "a row for each"]
)
every_beside = pytest.mark.parametrize("weights", [False, True, "mean"])


@pytest.mark.sample(20)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@every_shown
@every_beside
def test_under_a_mask_of_torchs_own_form_too(bad, kind, weights):
    for n, m in ((5, 5), (5, 18), (18, 18)):
        options = {"mask": build_mask(kind, n, m), "return_weights": weights}
        for which, at in itertools.product(range(3), (0, 2, -1)):
            inputs = three(n, m)
            qkv.attend(*map(torch.as_tensor, inputs), **options)  # its plan is kept
            inputs[which][1, 1, at, 2] = bad
            actual, want = (
                qkv.attend(*map(torch.as_tensor, inputs), **options, **more)
                for more in ({}, {"engine": "dense"})
            )
            pairs = zip(actual, want, strict=True) if weights else [(actual, want)]
            for one, two in pairs:
                np.testing.assert_allclose(host(one), host(two), atol=1e-9, err_msg=f"{which} {at}")


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("lies", ["by rows", "by columns", "by columns of keys"])
@pytest.mark.parametrize("kernels", [["FLASH_ATTENTION", "MATH"], ["MATH"]], ids=str)
def test_nothing_leaks_past_a_causal_mask_whichever_kernel_torch_takes(kernels, lies, learned):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def laid(x: np.ndarray, which: int) -> Any:
        turned = lies == "by columns" or (lies == "by columns of keys" and which == 1)
        x = (
            torch.as_tensor(np.ascontiguousarray(x.swapaxes(-1, -2))).mT
            if turned
            else (torch.as_tensor(x))
        )
        return x.requires_grad_(learned)

    def run_attend(inputs: Any, **more: Any) -> np.ndarray:
        made = [laid(x, which) for which, x in enumerate(inputs)]
        return host(qkv.attend(*made, mask="causal", **more))

    order = [getattr(SDPBackend, name) for name in kernels]
    for n, m in ((18, 18), (20, 17)):
        for which, at in [(1, 9), (1, m - 1), *((2, at) for at in range(0, m, 2 - learned))]:
            bad = (np.nan, np.inf, -np.inf)[at % 3]
            inputs = three(n, m, (1, 2))
            inputs[which][0, 1, at, 2] = bad
            with sdpa_kernel(order, set_priority=len(order) > 1):
                got = run_attend(inputs)
            np.testing.assert_allclose(got, run_attend(inputs, engine="dense"), atol=1e-9)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@every_shown
@every_beside
def test_a_gradient_is_not_spoiled_by_what_is_masked_out(bad, kind, weights):
    for n, m in ((5, 6), (5, 18), (18, 19)):
        mask = build_mask(kind, n, m)
        clean, spoiled = three(n, m), three(n, m)
        if kind in ("two axes", "causal"):
            spoiled[0][:, :, 1] = spoiled[0][:, :, 1] if kind == "causal" else bad
        if kind != "four axes":  # where the other half sees the last key
            spoiled[1][:, :, -1], spoiled[2][:, :, -1] = bad, bad

        def compute_gradients(inputs: Any, mask: Any = mask, n: int = n, **more: Any) -> Any:
            leaves = [torch.as_tensor(x).requires_grad_() for x in inputs]
            result = qkv.attend(*leaves, mask=mask, return_weights=weights, **more)
            result = result if weights else (result,)
            along = [torch.as_tensor(normal(*x.shape, seed=7)) for x in result]
            return torch.autograd.grad(result, leaves, along)

        compute_gradients(clean)
        for one, two in zip(
            compute_gradients(spoiled), compute_gradients(clean, engine="dense"), strict=True
        ):
            np.testing.assert_allclose(host(one), host(two), atol=1e-9)


@every_framework
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_of_every_size_in_turns(make, dtype):
    w = [normal(*shape).astype(dtype) for shape in ((8, 4), (8, 4), (8,))]
    within = 5e-3 if dtype == "float32" else 1e-6
    for n, size in itertools.product((8, 300), (0.05, 1.0, 30.0, 1000.0, 0.05)):
        q, k, v = three(n, n, (1,))
        inputs = [x.astype(dtype) for x in (q * size, k * size + size, v)]
        wide = [x.astype(float) for x in inputs]
        for score, exact in (
            (scores.Additive(*map(make, w)), scores.Additive(*(x.astype(float) for x in w))),
            (scores.Gaussian(1.0), scores.Gaussian(1.0)),
        ):
            actual = qkv.attend(*map(make, inputs), score=score)
            want = truth(wide, {"score": exact})
            np.testing.assert_allclose(host(actual), want, atol=within, err_msg=f"{n} {size}")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_short_gaussian_looks_at_its_numbers_in_every_call(dtype):
    score, rng = scores.Gaussian(2.0), np.random.default_rng(0)
    # Of scores of about −3,000 float32 keeps three digits after the point, bent twice.
    within = {"float32": 1e-3, "float64": 1e-9}[dtype]
    inputs = rng.normal(size=(4, 1, 4, 16, 32))
    named = qkv.explain(*(torch.as_tensor(x.astype(dtype)) for x in inputs[:3]), score=score).engine
    assert named == "lowered"
    for size, away in ((1.0, 0.0), (1.0, 1e3), (20.0, 0.0), (1e-3, 0.0), (1.0, 0.0)):
        moved = [x.astype(dtype) for x in (*(inputs[:2] * size + away), inputs[2])]
        leaves = [torch.as_tensor(x).requires_grad_() for x in moved]
        exact = [torch.as_tensor(x.astype(float)).requires_grad_() for x in moved]
        out = qkv.attend(*leaves, score=score)
        want = qkv.attend(*exact, score=score, engine="dense")
        np.testing.assert_allclose(out.detach(), want.detach(), atol=within, err_msg=f"{size}")
        actual = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        slopes = torch.autograd.grad(want.square().sum(), exact, create_graph=True)
        bends = [
            torch.autograd.grad(sum(x.square().sum() for x in first), first_leaves)
            for first, first_leaves in ((actual, leaves), (slopes, exact))
        ]
        for one, two in (*zip(actual, slopes, strict=True), *zip(*bends, strict=True)):
            scale = 1 + two.detach().abs().max().item()
            np.testing.assert_allclose(one.detach(), two.detach(), atol=within * scale)
    spoiled = torch.as_tensor(inputs[0].astype(dtype))
    spoiled[0, 1, 3, 2] = float("nan")
    lost = qkv.attend(
        spoiled, *(torch.as_tensor(x.astype(dtype)) for x in inputs[1:3]), score=score
    )
    assert lost[0, 1, 3].isnan().all() and lost.isnan().sum() == lost.shape[-1]


@every_framework
def test_scores_beyond_every_range(make):
    q, k, v = three(3, 5)
    check_attend([make(q), make(k), make(v)], {})
    check_attend([make(q * 1e30), make(k), make(v)], {})
    check_attend([make(q * -1e30), make(k), make(v)], {"mask": masks.causal})


# What changes between two calls of one kind


@every_framework
@pytest.mark.parametrize("kind", ["boolean", "float", "one row", "per head"])
def test_a_mask_that_is_written_to(make, kind):
    inputs = [make(x) for x in three(4, 6)]
    shape = {"one row": (1, 6), "per head": (2, 1, 6)}.get(kind, (4, 6))
    mask = make(normal(*shape) if kind == "float" else np.ones(shape, bool))
    corner = np.tri(4, 6, dtype=bool)
    for step in range(4):
        check_attend(inputs, {"mask": mask})
        result = qkv.attend(*inputs, mask=masks.causal & mask)
        now = host(mask)
        both = np.where(corner, now, -np.inf) if kind == "float" else corner & (now > 0)
        np.testing.assert_allclose(host(result), truth(inputs, {"mask": both}), atol=1e-9)
        mask[..., step] = -np.inf if kind == "float" else False
    mask[...] = -np.inf if kind == "float" else False
    assert not host(qkv.attend(*inputs, mask=mask)).any()


@every_framework
def test_masks_of_other_shapes_and_kinds(make):
    inputs = [make(x) for x in three(4, 4)]
    seen = normal(2, 2, 4, 4) > -0.5
    for part in (seen, seen[0], seen[0, 0], seen[:, :1], seen[..., :1, :], seen[..., :1], seen):
        check_attend(inputs, {"mask": make(part)})
        check_attend(inputs, {"mask": make(np.where(part, 0.25, -np.inf))})
        actual = qkv.attend(*inputs, mask=masks.causal | ~masks.array(make(part)))
        want = truth(inputs, {"mask": np.tri(4, dtype=bool) | ~part})
        np.testing.assert_allclose(host(actual), want, atol=1e-9)


@every_framework
def test_rules_of_other_numbers(make):
    """The numbers are NumPy's, whatever the framework of the call."""
    inputs = [make(x) for x in three(4, 4)]
    for lengths in ([1, 4], [0, 0], [4, 2]):
        check_attend(inputs, {"mask": masks.lengths(lengths)})
        check_attend(inputs, {"mask": masks.causal & masks.lengths(lengths)})
    for ids in ([0, 0, 1, 1], [0, 1, 2, 3]):
        check_attend(inputs, {"mask": masks.documents(ids)})
    for layout in ([[1, 0], [0, 1]], [[1, 1], [0, 1]]):
        check_attend(inputs, {"mask": masks.blocks(layout, 2)})
    for offset in ([0, 1], [2, 3], [-1, 0]):
        check_attend(inputs, {"mask": masks.causal(offset=np.array(offset))})
    for limit in (1, 2):
        check_attend(inputs, {"mask": masks.custom(lambda b, h, i, j, limit=limit: i - j < limit)})
        check_attend(inputs, {"mask": masks.window(limit)})


@every_framework
def test_an_array_in_a_score_that_is_written_to(make):
    inputs = [make(x) for x in three(4, 6)]
    w, sigma = make(normal(4, 4)), make(np.array(1.5))
    score_records = scores.Multiplicative(w), scores.Gaussian(sigma)
    for _ in range(3):
        for score in score_records:
            inside = {k: host(x) for k, x in vars(score).items()}
            actual = qkv.attend(*inputs, score=score)
            want = truth(inputs, {"score": type(score)(**inside)})
            np.testing.assert_allclose(host(actual), want, atol=1e-9)
        w[...] = w * -0.5
        sigma[...] = sigma * 0.7


@every_framework
def test_a_function_whose_closure_changes(make):
    inputs = [make(x) for x in three(4, 6)]
    factor = 1.0

    def score(query, key):
        return scores.Dot()(query, key) * factor

    def rule(b, h, i, j):
        return i - j < limit

    for factor, limit in ((1.0, 1), (-2.0, 2), (0.0, 1)):
        actual = qkv.attend(*inputs, score=score, mask=masks.custom(rule))
        options = {"score": scores.ScaledDot(factor), "mask": masks.window(np.inf, np.inf)}
        seen = np.subtract.outer(np.arange(4), np.arange(6)) < limit
        want = truth(inputs, {**options, "mask": seen})
        np.testing.assert_allclose(host(actual), want, atol=1e-9)


class Loose(scores.Score):
    """A score that is no dataclass: its number changes."""

    factor = 1.0

    def __call__(self, query, key):
        return scores.Dot()(query, key) * self.factor


@dataclass(frozen=True)
class Alike(scores.Score):
    """A score that equals others that it is not like."""

    factor: float = field(default=1.0, compare=False)

    def __call__(self, query, key):
        return scores.Dot()(query, key) * self.factor


@dataclass(frozen=True)
class Listed(scores.Score):
    """A score that cannot be hashed."""

    factors: list[float] = field(default_factory=lambda: [1.0])

    def __call__(self, query, key):
        return scores.Dot()(query, key) * self.factors[0]


@dataclass(frozen=True)
class Warm(weightings.Softmax):
    """A weighting that equals others that it is not like."""

    heat: float = field(default=1.0, compare=False)

    def scale_scores(self, scores):
        return scores / self.heat


class Warmer(weightings.Softmax):
    """A dataclass by its parent alone, with a number that is no field."""

    def __init__(self, heat):
        super().__init__()
        object.__setattr__(self, "heat", heat)

    def scale_scores(self, scores):
        return scores / self.heat


@every_framework
def test_scores_and_weightings_that_differ_only_in_their_code(make):
    inputs = [make(x) for x in three(4, 6)]
    loose, listed = Loose(), Listed()
    for factor in (1.0, -2.0, 0.5):
        loose.factor = listed.factors[0] = factor
        want = truth(inputs, {"score": scores.ScaledDot(factor)})
        for score in (loose, listed, Alike(factor)):
            actual = qkv.attend(*inputs, score=score)
            np.testing.assert_allclose(host(actual), want, atol=1e-9)
        heat = abs(factor)
        want = truth(inputs, {"weighting": weightings.Softmax(heat)})
        for weighting in (Warm(heat=heat), Warmer(heat)):
            actual = qkv.attend(*inputs, weighting=weighting)
            np.testing.assert_allclose(host(actual), want, atol=1e-9)


@pytest.fixture
def known() -> Iterator[None]:
    """What is registered in a test is forgotten after it."""
    before = dict(scores.NAMES)
    yield
    for name in set(scores.NAMES) - set(before):
        del scores.NAMES[name]


@every_framework
@pytest.mark.usefixtures("known")
def test_a_name_that_is_registered_again(make):
    inputs = [make(x) for x in three(4, 6)]
    for factor in (1.0, -2.0):

        @scores.register("ours")
        @dataclass(frozen=True)
        class Ours(scores.Score):
            by: float = factor

            def __call__(self, query, key):
                return scores.Dot()(query, key) * self.by

        for _ in range(2):
            actual = qkv.attend(*inputs, score="ours")
            want = truth(inputs, {"score": scores.ScaledDot(factor)})
            np.testing.assert_allclose(host(actual), want, atol=1e-9)


@every_framework
def test_numbers_that_are_equal_and_not_the_same(make):
    inputs = [make(x) for x in three(4, 6)]
    for number in (1, 1.0, np.float32(1.0), np.float64(1.0), True, np.float64(2.0), 2):
        if number is not True:
            check_attend(inputs, {"score": scores.ScaledDot(number)})
            check_attend(inputs, {"weighting": weightings.Softmax(number)})
            check_attend(inputs, {"score": scores.Gaussian(number)})
    for zero in (0.0, -0.0, 0):
        check_attend(inputs, {"score": scores.ScaledDot(zero)})


@every_framework
def test_weights_and_lse_are_returned_with_the_output(make):
    inputs = [make(x) for x in three(4, 6)]
    options = {"mask": masks.causal}
    want, lse, alpha = qkv.attend(
        *(host(x) for x in inputs), **options, engine="dense", return_lse=True, return_weights=True
    )
    for _ in range(2):
        np.testing.assert_allclose(host(check_attend(inputs, options)), want, atol=1e-9)
        for flags in itertools.product([False, True], repeat=2):
            actual = qkv.attend(*inputs, **options, return_lse=flags[0], return_weights=flags[1])
            actual = actual if isinstance(actual, tuple) else (actual,)
            expected = [want, *(x for x, flag in zip((lse, alpha), flags, strict=True) if flag)]
            for a, b in zip(actual, expected, strict=True):
                np.testing.assert_allclose(host(a), b, atol=1e-9)
        np.testing.assert_allclose(host(qkv.weights(*inputs[:2], **options)), alpha, atol=1e-9)


@every_framework
def test_dropout_comes_and_goes(make):
    inputs = [make(x) for x in three(4, 6)]
    once = host(qkv.attend(*inputs, dropout_p=0.5, seed=3))
    check_attend(inputs, {})
    assert (host(qkv.attend(*inputs, dropout_p=0.5, seed=3)) == once).all()
    assert (host(qkv.attend(*inputs, dropout_p=0.5, seed=4)) != once).any()
    check_attend(inputs, {})
    assert not host(qkv.attend(*inputs, dropout_p=1.0, seed=0)).any()


@every_framework
def test_what_is_wrong_is_refused_the_second_time_too(make):
    q, k, v = (make(x) for x in three(4, 6))
    check_attend([q, k, v], {})
    for bad in ((q[..., :3], k, v), (q, k, v[..., :5, :]), (q, k[:, :0], v), (q[0, 0, 0], k, v)):
        with pytest.raises(ShapeError):
            qkv.attend(*bad)
    with pytest.raises(QkvError):
        qkv.attend(q, k, v, mask=make(np.ones((4, 5), bool)))
    with pytest.raises(QkvError):
        qkv.attend(q, k, v, mask=make(np.ones((4, 6), int)))
    with pytest.raises(QkvError):
        qkv.attend(q, host(k) if make is not np.asarray else torch.as_tensor(k), v)
    for wrong in (
        {"score": "gausian"},
        {"engine": "fast"},
        {"engine": ["dense"]},
        {"dropout_p": [0.1]},
        {"tolerance": [1.0]},
        {"score": "dot", "weighting": "normalized"},
        {"weighting": "hard", "return_lse": True},
        {"return_lse": 1},
        {"return_weights": 1},
        {"return_lse": 0},
    ):
        qkv.attend(q, k, v, return_lse=True)
        qkv.attend(q, k, v, return_weights=True)
        for _ in range(2):
            with pytest.raises(QkvError):
                qkv.attend(q, k, v, **wrong)
    for _ in range(2):
        with pytest.raises(QkvError, match="no key"):
            qkv.attend(q + 99.0, k, v, score="boxcar", weighting=weightings.Normalized("raise"))
        qkv.attend(k, k, v, score="boxcar", weighting=weightings.Normalized("raise"))
    check_attend([q, k, v], {})


# Gradients wanted and not


def compute_gradients(out: Any, leaves: list[Any]) -> list[Any]:
    """The gradients of Σ out² for the leaves, 0 where the output does not move with one."""
    result: Any = [None] * len(leaves)
    if out.requires_grad:
        result = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    return [torch.zeros_like(x) if y is None else y for x, y in zip(leaves, result, strict=True)]


@with_every_option_set
def test_gradients_come_and_go(options):
    inputs = [torch.as_tensor(x) for x in three(5, 6)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    want = compute_gradients(qkv.attend(*leaves, **options, engine="dense"), leaves)
    for flags in itertools.product([False, True], repeat=3):
        leaves = [x.clone().requires_grad_(flag) for x, flag in zip(inputs, flags, strict=True)]
        with torch.no_grad():
            assert not check_attend(leaves, options).requires_grad
        with torch.inference_mode():
            check_attend([x.clone() for x in inputs], options)
        correct = [x for x in leaves if x.requires_grad]
        expected = [x for x, flag in zip(want, flags, strict=True) if flag]
        for a, b in zip(
            compute_gradients(check_attend(leaves, options), correct), expected, strict=True
        ):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_gradients_of_a_mask_and_of_a_score_come_and_go():
    inputs = [torch.as_tensor(x) for x in three(4, 6)]

    def calls(bias, sigma, **engine):
        caught = lambda q, k: scores.Dot()(q, k) * sigma  # noqa: E731
        yield qkv.attend(*inputs, mask=bias, **engine)
        yield qkv.attend(*inputs, score=scores.Gaussian(sigma), **engine)
        yield qkv.attend(*inputs, score=caught, **engine)

    for flag in (False, True, False, True):
        leaves = [
            torch.as_tensor(normal(4, 6)).requires_grad_(flag),
            torch.tensor(1.5, dtype=torch.double, requires_grad=flag),
        ]
        for out, want in zip(calls(*leaves), calls(*leaves, engine="dense"), strict=True):
            assert out.requires_grad == flag
            torch.testing.assert_close(out, want)
            for a, b in zip(
                compute_gradients(out, leaves), compute_gradients(want, leaves), strict=True
            ):
                torch.testing.assert_close(a, b)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", ["plain", "gaussian"])
def test_compiling_comes_and_goes(options):
    options = OPTION_SETS[options]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: qkv.attend(*x, **options), backend="aot_eager", fullgraph=True
    )
    for seed in range(3):
        inputs = [torch.as_tensor(x).float() + seed for x in three(5, 6)]
        want = check_attend(inputs, options)
        torch.testing.assert_close(compiled(*inputs), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(check_attend(inputs, options), want)
    leaves = [x.clone().requires_grad_() for x in inputs]
    actual = torch.autograd.grad(compiled(*leaves).sum(), leaves)
    want = torch.autograd.grad(qkv.attend(*leaves, **options).sum(), leaves)
    torch.testing.assert_close(actual, want, atol=1e-5, rtol=1e-5)


@pytest.mark.sample(2)
@with_every_option_set
def test_compiling_takes_every_length_in_two_graphs(options):
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda *x: qkv.attend(*x, **options), backend=backend, fullgraph=True)
    for n in (5, 6, 7, 9):
        inputs = [torch.as_tensor(x).float() for x in three(n, n)]
        torch.testing.assert_close(
            compiled(*inputs), check_attend(inputs, options), atol=1e-5, rtol=1e-5
        )
    assert len(graphs) == 2  # the first length as it stands, then any


def test_a_compiled_call_may_be_the_first_of_a_process():
    code = """
import torch, qkv
x = torch.ones(2, 3)
print(torch.compile(lambda x: qkv.attend(x, x, x), backend="eager", fullgraph=True)(x).tolist())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert result.stdout == "[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]\n"


def test_autocast_comes_and_goes():
    inputs = [torch.as_tensor(x).float() for x in three(5, 6)]
    want = check_attend(inputs, {})
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            actual = qkv.attend(*inputs)
        torch.testing.assert_close(actual.float(), want, atol=0.05, rtol=0.05)
        torch.testing.assert_close(check_attend(inputs, {}), want)


def test_calls_under_autocast_have_plans(monkeypatch):
    q, k, v = (torch.randn(2, 5, 8, requires_grad=True) for _ in range(3))
    score, score_mod = scores.ScaledDot(torch.tensor(0.3, requires_grad=True)), lambda s, *_: s / 2
    for options in ({"score": score}, {"score": scores.Modified(scores.Dot(), score_mod)}, {}):
        results = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                out = qkv.attend(q, k, v, mask="causal", **options)
            assert out.dtype == torch.bfloat16
            results += [out, *torch.autograd.grad(out.sum(), (q, k, v))]
            assert results[1].dtype == torch.float32
            monkeypatch.setattr(plan_cache, "run_first_call", None)
        monkeypatch.undo()
        assert all(map(torch.equal, results[:4], results[4:]))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [(), (0,), (2,), (0, 1), (0, 1, 2)], ids=str)
def test_autocast_casts_as_torch_does(wide, narrow):
    """Norms and rotations in float32 leave some of the three wider than others."""
    inputs = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    inputs = [x if i in wide else x.to(narrow) for i, x in enumerate(inputs)]
    score = scores.Multiplicative(torch.eye(8))
    with torch.autocast("cpu", narrow):
        want = torch.nn.functional.scaled_dot_product_attention(*inputs)
        for actual in (qkv.scaled_dot_product_attention(*inputs), qkv.attend(*inputs)):
            assert actual.dtype == want.dtype == narrow
            torch.testing.assert_close(actual, want, atol=2e-2, rtol=2e-2)
        assert qkv.attend(*inputs, score=score, weighting="entmax15").dtype == narrow
    if 0 < len(wide) < 3:
        with pytest.raises(qkv.QkvError, match="cast one of them"):
            qkv.attend(*inputs)


# Threads, and what is kept


def test_threads_of_different_kinds():
    kinds = [(make, options, n, m) for make in MAKE.values() for options in OPTION_SETS.values()
             for n, m in ((1, 5), (4, 6), (6, 18))]  # fmt: skip
    wrong: list[Any] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(kinds))
        start.wait()
        for i in order:
            make, options, n, m = kinds[i]
            try:
                check_attend([make(x) for x in three(n, m)], options)
            except Exception as error:
                wrong.append((i, error))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@every_framework
@with_every_option_set
def test_no_array_is_kept_alive(make, options):
    if make is np.asarray:  # a NumPy array of its own memory can be watched
        make = np.array
    inputs = [make(x) for x in three(5, 6)]
    mask = make(np.tri(5, 6, dtype=bool))
    w = make(normal(4, 4))
    ids = np.arange(5)
    gc.freeze()  # a million older objects need not be looked at
    watched = [weakref.ref(x) for x in (*inputs, mask, w, ids)]
    for _ in range(3):
        qkv.attend(*inputs, **options)
        qkv.attend(*inputs, mask=mask)
        qkv.attend(*inputs, mask=masks.documents(ids, np.arange(6)))
        qkv.attend(*inputs, score=scores.Multiplicative(w))
        qkv.attend(*inputs, score=lambda q, k, w=w: scores.Dot()(q @ w, k))
    del inputs, mask, w, ids
    gc.collect()
    gc.unfreeze()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_jax_in_turns():
    jax = pytest.importorskip("jax")
    for m in (5, 6):
        inputs = [jax.numpy.asarray(x, "float32") for x in three(3, m, (2,))]
        for seen in (True, np.tri(3, m, 1, dtype=bool)):

            def call(*x, seen=seen):
                mask = None if seen is True else jax.numpy.asarray(seen)
                return qkv.attend(*x, mask=mask)

            want = truth(inputs, {"mask": None if seen is True else seen})
            for actual in (call(*inputs), jax.jit(call)(*inputs), call(*inputs)):
                np.testing.assert_allclose(actual, want, atol=3e-5)
            slope = jax.grad(lambda *x, call=call: call(*x).sum())(*inputs)
            assert np.isfinite(slope).all()


def test_a_first_call_in_a_checkpoint_saves_what_the_second_does():
    """Choosing looks at numbers; of that the graph keeps nothing."""
    from torch.utils.checkpoint import checkpoint

    inputs = [
        torch.from_numpy(x).requires_grad_() for x in three(5, 7, (2, 3, 1))
    ]  # none had these
    width = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)

    def loss(*args, engine=None):
        return qkv.attend(*args, score=scores.Gaussian(width), engine=engine).square().sum()

    got = torch.autograd.grad(checkpoint(loss, *inputs, use_reentrant=False), [*inputs, width])
    want = torch.autograd.grad(loss(*inputs, engine="dense"), [*inputs, width])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("table", ["PLANS_BY_SIGNATURE", "_PLANS_BY_SIZE_CLASS"])
def test_the_plan_cache_evicts_when_it_is_full(table, monkeypatch):
    """Calls with ever new signatures leave at most MAX_CACHED_PLANS entries in each table."""
    plan_cache.PLANS_BY_SIGNATURE.clear()
    plan_cache._PLANS_BY_SIZE_CLASS.clear()
    monkeypatch.setattr(plan_cache, "MAX_CACHED_PLANS", 5)
    counts = []
    for i in range(12):
        qkv.attend(*three(1, 2, d=1 + i))
        counts.append(len(getattr(plan_cache, table)))
    assert counts == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]


def test_a_plan_serves_lengths_of_one_size_and_no_other_width():
    plan_cache.PLANS_BY_SIGNATURE.clear()
    plan_cache._PLANS_BY_SIZE_CLASS.clear()
    qkv.attend(*three(5, 9, d=4))
    cached = {
        (n, m, d): qkv.explain(*three(n, m, d=d)).is_plan_cached
        for n, m, d in ((5, 9, 4), (6, 11, 4), (5, 9, 8), (5, 17, 4), (9, 9, 4))
    }
    assert [*cached.values()] == [True, True, False, False, False], cached


def test_torch_caches_plans_for_functions():
    """New function objects with the same code share a plan, which reads their own tensors."""
    torch = pytest.importorskip("torch")
    inputs = [torch.as_tensor(x) for x in three(4, 6)]
    for i in range(3):
        w = torch.rand(4, dtype=torch.float64)
        score = lambda q, k, w=w: (q * w) @ k.mT  # noqa: E731
        assert qkv.explain(*inputs, score=score).is_plan_cached == (i > 0)
        want = torch.softmax((inputs[0] * w) @ inputs[1].mT, -1) @ inputs[2]
        torch.testing.assert_close(qkv.attend(*inputs, score=score), want)
