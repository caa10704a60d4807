"""Short calls on a CPU: keys that no query sees, cached masks, products of 16 bits."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.engines import plan_cache, visible_keys

torch = pytest.importorskip("torch")

MAKERS = [pytest.param(np.asarray, id="numpy"), pytest.param(torch.as_tensor, id="torch")]
every_framework = pytest.mark.parametrize("make", MAKERS)
N, M = 4, 30


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


def three(heads=2):
    return draw((3, 4, N, 5), (3, heads, M, 5), (3, heads, M, 6))


def nearer(s, b, h, i, j):
    return s - abs(i - j) * 0.1


MASKS = {
    "causal": lambda make: masks.causal,
    "window": lambda make: masks.window(2),
    "to the end": lambda make: masks.causal(align="bottom_right") & masks.window(6),
    "lengths": lambda make: masks.lengths(make(np.array([3, 20, 11]))),
    "documents": lambda make: masks.documents(
        make(np.array([0, 0, 2, 2])), make(np.repeat([0, 1, 2], 10))
    ),
    "blocks": lambda make: masks.blocks(np.eye(2, 15, dtype=bool), 2),
    "function": lambda make: masks.custom(lambda b, h, i, j: (j > 3 + h) & (j < 12 + b)),
    "booleans": lambda make: make(np.arange(M) % 16 > 12),
    "floats": lambda make: make(np.where(np.arange(M) < 9, 0.3, -np.inf)[None] + np.zeros((N, 1))),
    "nothing": lambda make: make(np.zeros((N, M), bool)),
}
OPTIONS = [
    {},
    {"score": "gaussian"},
    {"weighting": weightings.TopK(4), "score": scores.ScaledDot(softcap=2.0)},
    {"weighting": "average"},
    {"weighting": "sigmoid", "score": scores.Modified(scores.ScaledDot(), nearer)},
    {"weighting": "entmax15", "score": lambda q, k: q[..., :2] @ k[..., :2].swapaxes(-1, -2)},
    {"weighting": "raw", "score": "constant"},
    {"weighting": weightings.Normalized("nearest"), "score": scores.Triangular(2.5)},
    {"weighting": weightings.Normalized("uniform"), "score": scores.Boxcar(1.0)},
    {"weighting": "softmax", "dropout_p": 0.4, "seed": 3, "score": "cosine"},
    {"weighting": "hard"},
]


def skip_invalid(mask, options):
    if mask == "floats" and isinstance(options.get("weighting"), weightings.Normalized):
        pytest.skip("Normalized refuses float masks")


def assert_close(actual, want):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(want), atol=1e-9)


@every_framework
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda x: str(x.get("weighting", x.get("score", "softmax")))[:18]
)
def test_values_are_those_of_dense(make, mask, options):
    skip_invalid(mask, options)
    arrays, rule = [make(x) for x in three()], MASKS[mask](make)
    for _ in range(2):  # the second call runs a cached plan, with a cached mask
        out, alpha = qkv.attend(*arrays, mask=rule, return_weights=True, **options)
        only_out = qkv.attend(*arrays, mask=rule, **options)
        mean = qkv.attend(*arrays, mask=rule, return_weights="mean", **options)[1]
        want = qkv.attend(*arrays, mask=rule, engine="dense", **options)
        assert_close(out, want)
        assert_close(only_out, want)
        want_alpha = qkv.weights(*arrays[:2], mask=rule, **options)
        assert alpha.shape == (3, 4, N, M) and mean.shape == (3, N, M)
        assert_close(alpha, want_alpha)
        assert_close(mean, np.asarray(want_alpha).mean(-3))


@every_framework
@pytest.mark.parametrize("mask", ["causal", "window", "lengths", "function", "floats"])
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda x: str(x.get("weighting", x.get("score", "softmax")))[:18]
)
def test_nan_in_a_masked_key_or_value_reaches_no_output(make, mask, options):
    skip_invalid(mask, options)
    query, key, value = three()
    rule = MASKS[mask](make)
    want = qkv.attend(*map(make, (query, key, value)), mask=rule, **options)
    # No query sees the last keys.
    key, value = key.copy(), value.copy()
    key[:, :, -5:], value[:, :, -4:] = np.nan, np.inf
    for _ in range(2):
        assert_close(qkv.attend(*map(make, (query, key, value)), mask=rule, **options), want)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda x: str(x.get("weighting", x.get("score", "softmax")))[:18]
)
def test_gradients_are_those_of_dense(mask, options):
    skip_invalid(mask, options)
    rule = MASKS[mask](torch.as_tensor)

    def gradients(**more):
        leaves = [torch.as_tensor(x).requires_grad_() for x in three()]
        out = qkv.attend(*leaves, mask=rule, **options, **more)
        along = torch.as_tensor(draw((3, 4, N, 6), seed=1)[0])
        if not out.requires_grad:
            return []
        found = torch.autograd.grad(out, leaves, along, allow_unused=True)
        return [torch.zeros_like(y) if x is None else x for x, y in zip(found, leaves, strict=True)]

    for _ in range(2):
        for x, y in zip(gradients(), gradients(engine="dense"), strict=True):
            assert_close(x, y)


@pytest.mark.parametrize("mask", ["lengths", "documents", "blocks", "booleans"])
def test_calls_with_arrays_in_the_mask_have_plans(mask):
    arrays, rule = [torch.as_tensor(x).float() for x in three(4)], MASKS[mask](torch.as_tensor)
    for options in ({}, {"weighting": "sigmoid"}):
        for _ in range(2):
            qkv.attend(*arrays, mask=rule, **options)
        flags = (0.0, True, None, None)
        weighting = options.get("weighting", "softmax")
        plan = plan_cache.find_plan(*arrays, "scaled_dot", weighting, rule, flags)[1]
        assert plan is not None


def test_what_a_mask_function_captures_may_change():
    limit, arrays = 5, [torch.as_tensor(x) for x in three()]

    def allow(b, h, i, j):
        return j < limit

    for other in (5, 9, 5):
        limit = other
        out = qkv.attend(*arrays, score="cosine", mask=masks.custom(allow))
        seen = [arrays[0], *(x[:, :, :limit] for x in arrays[1:])]
        assert_close(out, qkv.attend(*seen, score="cosine"))


def test_a_random_mask_is_drawn_in_each_call():
    arrays = [torch.as_tensor(x) for x in three()]
    rule = masks.custom(lambda b, h, i, j: torch.rand(N, M) > 0.5)
    outs = [qkv.attend(*arrays, score="cosine", mask=rule) for _ in range(2)]
    assert not torch.equal(*outs)


def test_cached_masks_are_few_and_can_be_cleared():
    arrays = [np.asarray(x) for x in three()]
    for i in range(visible_keys.MAX_CACHED_MASKS + 2):
        qkv.attend(*arrays, score="cosine", mask=masks.window(i))
    assert 0 < len(visible_keys._FIXED_PAIRS) <= visible_keys.MAX_CACHED_MASKS
    qkv.clear_caches()
    assert not visible_keys._FIXED_PAIRS


BFLOAT16_MASKS = {
    "none": None,
    "causal": "causal",
    "booleans": torch.rand(2, 1, 64, 64) > 0.3,
    "floats": torch.randn(64, 64),
    "nothing": torch.zeros(64, 64, dtype=torch.bool),
}


@pytest.mark.parametrize("mask", BFLOAT16_MASKS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score": scores.ScaledDot(softcap=5.0)},
        {"weighting": weightings.TopK(8)},
        {"score": scores.Modified(scores.Dot(), nearer), "weighting": "sigmoid"},
        {"weighting": "average"},
    ],
    ids=["softmax", "softcap", "top-k", "modified", "average"],
)
def test_bfloat16_is_as_close_as_its_rounding(mask, options):
    arrays = [torch.randn(2, h, 64, 16).bfloat16() for h in (4, 2, 2)]
    along = torch.randn(2, 4, 64, 16).bfloat16()
    rule = BFLOAT16_MASKS[mask]
    is_float = isinstance(rule, torch.Tensor) and rule.is_floating_point()

    def run(dtype, **more):
        leaves = [x.to(dtype).requires_grad_() for x in arrays]
        chosen = rule.bfloat16().to(dtype) if is_float else rule
        out = qkv.attend(*leaves, mask=chosen, **options, **more)
        found = torch.autograd.grad(out, leaves, along.to(dtype), allow_unused=True)
        return [out.detach().double(), *(x.double() for x in found if x is not None)]

    for _ in range(2):
        for x, y in zip(run(torch.bfloat16), run(torch.float64, engine="dense"), strict=True):
            assert torch.linalg.norm(x - y) <= 0.008 * torch.linalg.norm(y) + 1e-6


def test_a_masked_nan_in_bfloat16_reaches_no_output():
    arrays = [torch.randn(2, h, 64, 16).bfloat16() for h in (4, 2, 2)]
    rule = masks.lengths(torch.tensor([50, 60]))
    for options in ({}, {"weighting": "entmax15"}, {"weighting": "average"}):
        want = qkv.attend(*arrays, mask=rule, **options)
        key, value = (x.clone() for x in arrays[1:])
        key[:, :, 60:], value[:, :, 60:] = torch.nan, torch.inf
        out = qkv.attend(arrays[0], key, value, mask=rule, **options)
        torch.testing.assert_close(out, want, atol=0.01, rtol=0.02)


def test_a_gradient_in_bfloat16_can_be_differentiated_again():
    arrays = [torch.randn(1, 2, 8, 16).bfloat16() for _ in range(3)]

    def second(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in arrays]
        out = qkv.attend(*leaves, mask="causal")
        first = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), leaves)

    for x, y in zip(second(torch.bfloat16), second(torch.float64), strict=True):
        assert torch.linalg.norm(x.double() - y) <= 0.05 * torch.linalg.norm(y)
