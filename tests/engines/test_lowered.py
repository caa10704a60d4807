"""Scores as dot products: values and gradients against the formula, and the guaranteed bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import qkv
from qkv import masks, scores
from qkv.engines import lowered, streaming
from qkv.errors import EngineError
from qkv.frameworks import to_numpy
from qkv.scores.tanh_factors import find_factors
from tests import cases
from tests.cases import MASKS, SCORES, case
from tests.engines.test_battery import SPARSELY
from tests.installed_frameworks import FRAMEWORKS, WITH_GRADIENTS
from tests.sampling import sample

pytestmark = pytest.mark.sample_of_module(60)

LOWERED = ("multiplicative", "cosine", "learned_cosine", "gaussian", "learned_gaussian", "additive")
COVERING = [
    (score, weighting, mask)
    for score, weighting, mask in cases.covering()
    if score in LOWERED and weighting not in ("straight_through",)
]
NOT_TRACED = [fw for fw in WITH_GRADIENTS if fw.name != "jax"]
NEAR = 1e-7
"""The tolerance of a float64 score, without which Additive is not lowered."""


@pytest.fixture(autouse=True, params=[lowered.MAX_FEATURE_NUMBERS, 0], ids=["whole", "in blocks"])
def small_blocks(request, monkeypatch):
    """φ and ψ complete, or block by block; and blocks that do not divide the call."""
    monkeypatch.setattr(lowered, "MAX_FEATURE_NUMBERS", request.param)
    monkeypatch.setattr(streaming, "block_size", lambda call: (3, 4))
    monkeypatch.setattr(streaming, "MAX_DENSE_NUMBERS", 0)


def parametrize_cases(frameworks: list[Any]) -> Any:
    """Parametrize a test by framework and case, one case in so many where each takes long."""
    chosen = [
        pytest.param(fw, *names, id="-".join((fw.name, *names)))
        for fw in frameworks
        for names in sample(COVERING, len(COVERING) // SPARSELY.get(fw.name, 1))
    ]
    return pytest.mark.parametrize(("fw", "score", "weighting", "mask"), chosen)


@pytest.mark.sample(110)
@parametrize_cases(FRAMEWORKS)
def test_values(fw, score, weighting, mask):
    call = case(score, weighting, mask)
    out = call.attend(call.make_arrays(fw), engine="lowered", tolerance=NEAR)
    np.testing.assert_allclose(to_numpy(out), call.expected, atol=10 * NEAR)


@pytest.mark.sample(50)
@parametrize_cases(NOT_TRACED)
def test_gradients(fw, score, weighting, mask):
    """By the chain rule through φ and ψ; JAX traces what it differentiates, and is not lowered."""
    call = case(score, weighting, mask)

    def gradients(engine: str) -> list[np.ndarray]:
        return call.compute_gradients(fw, call.make_arrays(fw), engine, tolerance=NEAR)

    for name, got, want in zip(call.arrays, gradients("lowered"), gradients("dense"), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * (1 + np.abs(want).max()), err_msg=name)


def additive(dtype: str, wide: float = 1.0) -> tuple[list[np.ndarray], scores.Additive]:
    rng = np.random.default_rng(5)
    n, d, h = 60, 16, 24
    arrays = [rng.normal(size=(n, d)).astype(dtype) for _ in range(3)]
    matrices = [(wide * rng.normal(size=(h, d)) / 4).astype(dtype) for _ in range(2)]
    v, bias = (rng.normal(size=h).astype(dtype) for _ in range(2))
    return arrays, scores.Additive(*matrices, v, bias)


@pytest.mark.parametrize("wide", [0.01, 0.3, 1.0, 2.0])
def test_additive_keeps_the_accuracy_of_float32(wide):
    """Within 2e-6 of ‖v‖₁ of the float64 scores, and within the bound that it returned."""
    (query, key, _), score = additive("float32", wide)
    near = score.find_lowering(query, key, None, "float32")
    assert not isinstance(near, str)
    parts = [getattr(score, name).astype("float64") for name in ("w_query", "w_key", "v", "bias")]
    expected = scores.Additive(*parts)(query.astype("float64"), key.astype("float64"))
    off = np.abs(near[0](query, key) - expected).max()
    mass = np.abs(score.v).sum()
    assert near[1] <= 1e-6 * mass
    assert off <= 2e-6 * mass
    assert off <= near[1] + 1e-6 * mass


@pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-6, 1e-9])
def test_tolerance_bounds_the_error_of_a_score(tolerance):
    (query, key, _), score = additive("float64")
    near = score.find_lowering(query, key, tolerance, "float64")
    assert not isinstance(near, str)
    off = np.abs(near[0](query, key) - score(query, key)).max()
    assert off <= near[1] + 1e-12
    assert near[1] <= tolerance * (1 + 1e-9)
    assert near[0].dot_product_width(16) <= score.find_lowering(
        query, key, tolerance / 100, "float64"
    )[0].dot_product_width(16)


@pytest.mark.parametrize(
    "input_ranges", [(0.01, 0.01), (1.0, 1.0), (0.1, 9.0), (5.0, 5.0), (20.0, 20.0)]
)
@pytest.mark.parametrize("error", [1e-2, 1e-4, 1e-6, 1e-10])
def test_factors_keep_their_bound_everywhere(input_ranges, error):
    """Also at the corners, and at points that the fit never looked at."""
    result = find_factors(*input_ranges, error)
    assert result.error <= error
    rng = np.random.default_rng(0)
    a, b = (np.concatenate([[-r, r, 0.0], rng.uniform(-r, r, 200)]) for r in input_ranges)

    def functions(x: np.ndarray, side: int) -> np.ndarray:
        x = x / result.input_ranges[side]
        parts = []
        for odd, p in ((side, result.even[side]), (1 - side, result.odd[side])):
            y = np.polynomial.chebyshev.chebval(2 * x * x - 1, p.T)
            parts.append(y * x if odd else y)
        return np.concatenate(parts)

    near = functions(a, 0).T @ functions(b, 1)
    assert np.abs(near - np.tanh(a[:, None] + b)).max() <= result.error + 1e-14


def test_far_ranges_keep_tanh():
    arrays, score = additive("float32", 40.0)
    assert "tanh" in score.find_lowering(*arrays[:2], None, "float32")
    with pytest.raises(EngineError, match="slower than tanh"):
        qkv.attend(*arrays, score=score, engine="lowered")


def test_what_is_not_finite_keeps_the_formula():
    (query, key, value), score = additive("float32")
    key[3] = np.nan
    hidden = qkv.attend(query, key, value, score=score, mask=np.arange(60) != 3)
    assert np.isfinite(hidden).all()
    assert np.isnan(qkv.attend(query, key, value, score=score)).all()


@pytest.mark.parametrize("lead", [(), (0,)])
def test_of_nothing_no_range_is_looked_for(lead):
    score = scores.Additive(*(np.ones(s, np.float32) for s in ((2, 4), (2, 4), (2,))))
    query, key = np.ones((*lead, 0, 4), np.float32), np.ones((*lead, 3, 4), np.float32)
    with pytest.raises(EngineError, match="an array is empty"):
        qkv.attend(query, key, key, score=score, engine="lowered")
    assert qkv.attend(query, key, key, score=score).shape == query.shape


def test_float64_keeps_tanh_without_a_tolerance():
    arrays, score = additive("float64")
    assert "tolerance" in score.find_lowering(*arrays[:2], None, "float64")


@pytest.mark.parametrize("shift", [0.0, 100.0, 1e4])
def test_gaussian_far_from_the_origin(shift):
    """The expanded square is centred first, and left alone where it would lose its digits."""
    rng = np.random.default_rng(2)
    arrays = [(rng.normal(size=(50, 3)) + shift).astype("float32") for _ in range(2)]
    value = rng.normal(size=(50, 2)).astype("float32")
    want = qkv.attend(*(x.astype("float64") for x in (*arrays, value)), score="gaussian")
    got = qkv.attend(*arrays, value, score="gaussian")
    np.testing.assert_allclose(got, want, atol=1e-5)
    far = qkv.explain(*arrays, value, score=scores.Gaussian(0.01))
    assert far.engine == "streaming"
    assert "expanded square" in dict(far.refusals)["lowered"]


def test_nothing_is_lowered_twice_or_in_vain():
    x = np.ones((4, 3))
    for score, reason in (
        ("dot", "a dot product already"),
        ("laplace", "no dot product form"),
        (scores.ScaledDot(softcap=2.0), "softcap"),
        (scores.Gated(np.ones(3), np.ones(3)), "gate"),
    ):
        with pytest.raises(EngineError, match=reason):
            qkv.attend(x, x, x, score=score, engine="lowered")
    assert set(LOWERED) < set(SCORES) and "none" in MASKS


def test_lse_is_that_of_the_formula():
    (query, key, value), score = additive("float64")
    for kind in (score, scores.Gaussian(0.7)):
        options = {"score": kind, "return_lse": True, "mask": masks.causal}
        got = qkv.attend(query, key, value, **options, engine="lowered", tolerance=1e-8)[1]
        want = qkv.attend(query, key, value, **options, engine="dense")[1]
        np.testing.assert_allclose(got, want, atol=1e-7)


def test_explain_tells_how_wide_and_how_near(small_blocks):
    """The same whether φ and ψ are made whole or in blocks."""
    arrays, score = additive("float32")
    near = score.find_lowering(*arrays[:2], None, "float32")
    explanation = qkv.explain(*arrays, score=score, engine="lowered")
    assert f"dot products of width {near[0].dot_product_width(16):,}" in explanation.detail
    assert f"within {near[1]:.1g}" in explanation.detail


def test_a_short_additive_call_stays_as_it_is(monkeypatch):
    """Making functions of a row takes longer than a few hyperbolic tangents."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 8)).astype("float32")
    score = scores.Additive(*(rng.normal(size=s).astype("float32") for s in ((4, 8), (4, 8), (4,))))

    def explain_lowering():
        result = qkv.explain(x, x, x, score=score)
        return result.engine, dict(result.refusals).get("lowered", "")

    engine, why = explain_lowering()
    assert engine != "lowered"
    assert "200 queries and 200 keys" in why
    monkeypatch.setattr(lowered, "MAX_DIRECT_TANHS", 0)
    engine, why = explain_lowering()
    assert engine != "lowered"
    assert "functions of each hidden unit" in why
    monkeypatch.setattr(lowered, "MIN_PAIRS_PER_FUNCTION", 0)
    assert explain_lowering() == ("lowered", "")


@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
def test_bandwidths_of_each_head_over_keys_that_heads_share(fw):
    rng = np.random.default_rng(3)
    shapes = ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2))
    inputs = [fw.make_array(rng.normal(size=shape), "float64") for shape in shapes]
    score = scores.Gaussian(fw.make_array(rng.uniform(1, 2, size=(4, 1, 1)), "float64"))
    out, want = (qkv.attend(*inputs, score=score, engine=x) for x in ("lowered", "dense"))
    np.testing.assert_allclose(to_numpy(out), to_numpy(want), atol=1e-12)


def test_a_learned_gaussian_that_fits_one_block_is_lowered():
    """dense took it, whose differences take longer than dot products."""
    torch = pytest.importorskip("torch")
    q, k = (torch.zeros(1, 2, 512, 64) for _ in range(2))
    score = qkv.scores.Gaussian(torch.tensor(4.0))
    assert qkv.explain(q, k, k, score=score).engine == "lowered"
