"""Every engine × score × weighting × mask × dtype × framework against the dense float64 answer."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import scores, weightings
from qkv.arrays import to_numpy
from qkv.engines import streaming
from qkv.errors import EngineError
from tests import cases
from tests.cases import ALONG, KEY, MASKS, QUERY, SCORES, VALUE, WEIGHTINGS
from tests.frameworks import FRAMEWORKS, WITH_GRADIENTS

COVERING = cases.covering()
FULL = bool(os.environ.get("QKV_FULL"))
SPARSELY = (
    {} if FULL else {"jax": 16, "strict": 4, "tensorflow": 4, "mxnet": 4}
)  # one case in so many: each takes its time

frameworks = pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
differentiating = pytest.mark.parametrize("fw", WITH_GRADIENTS, ids=lambda fw: fw.name)
combinations = pytest.mark.parametrize(
    ("score", "weighting", "mask"), cases.product() if FULL else COVERING
)


def leaves(score: str, mask: str) -> dict[str, np.ndarray]:
    inside = {f"score.{k}": x for k, x in SCORES[score][0].items()}
    inside |= {f"mask.{k}": x for k, x in MASKS[mask][0].items()}
    return {"query": QUERY, "key": KEY, "value": VALUE, **inside}


def arguments(arrays: dict[str, Any], score: str, weighting: str, mask: str) -> dict[str, Any]:
    def part(prefix: str) -> dict[str, Any]:
        return {k.partition(".")[2]: x for k, x in arrays.items() if k.startswith(prefix)}

    return {
        "score": SCORES[score][1](part("score.")),
        "weighting": WEIGHTINGS[weighting],
        "mask": MASKS[mask][1](part("mask.")),
    }


def attend(arrays: dict[str, Any], how: dict[str, Any], **more: Any) -> Any:
    return qkv.attend(arrays["query"], arrays["key"], arrays["value"], **how, **more)


@functools.cache
def expected(score: str, weighting: str, mask: str) -> np.ndarray:
    arrays = leaves(score, mask)
    return attend(arrays, arguments(arrays, score, weighting, mask), engine="dense")


@functools.cache
def expected_slopes(score: str, weighting: str, mask: str) -> dict[str, tuple[np.ndarray, float]]:
    """Along one random direction for each leaf, the slope of the loss by finite differences."""
    soft = "softmax" if weighting == "straight_through" else weighting
    base = leaves(score, mask)
    rng = np.random.default_rng(1)

    def loss(arrays: dict[str, np.ndarray], how: str) -> float:
        return float(np.sum(attend(arrays, arguments(arrays, score, how, mask)) * ALONG))

    out = {}
    for name, x in base.items():
        if x.dtype.kind != "f":
            continue
        along, step = rng.normal(size=x.shape), 1e-6
        how = weighting if name == "value" else soft  # straight-through: scores as by softmax
        ahead, behind = (loss({**base, name: x + s * step * along}, how) for s in (1, -1))
        out[name] = (along, (ahead - behind) / (2 * step))
    return out


def thinned(fw: Any, *case: str) -> None:
    every = SPARSELY.get(fw.name, 1)
    if case in COVERING and COVERING.index(case) % every:
        pytest.skip("in make test-full")


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that do not divide the call, so that each boundary is crossed."""
    monkeypatch.setattr(streaming, "block_size", lambda call: (3, 4))
    monkeypatch.setattr(streaming, "BLOCK", 2 * 8 * cases.M)


@frameworks
@pytest.mark.parametrize("engine", ["dense", "streaming"])
@combinations
def test_values(fw, engine, score, weighting, mask, monkeypatch):
    thinned(fw, score, weighting, mask)
    small_blocks(monkeypatch)
    arrays = {name: fw.make(x) for name, x in leaves(score, mask).items()}
    how = arguments(arrays, score, weighting, mask)
    try:
        out, alpha = attend(arrays, how, engine=engine, return_weights=True)
    except EngineError:
        assert score == "own_function" and fw.name in ("tensorflow", "mxnet")
        return
    np.testing.assert_allclose(to_numpy(out), expected(score, weighting, mask), atol=1e-10)
    shared = np.repeat(VALUE, cases.LEAD[1] // cases.KV_HEADS, axis=1)
    np.testing.assert_allclose(to_numpy(alpha) @ shared, to_numpy(out), atol=1e-10)


@differentiating
@pytest.mark.parametrize("engine", ["dense", "streaming"])
@combinations
def test_gradients(fw, engine, score, weighting, mask, monkeypatch):
    thinned(fw, score, weighting, mask)
    small_blocks(monkeypatch)
    base = leaves(score, mask)
    names, along = list(base), fw.make(ALONG)

    def loss(*given: Any) -> Any:
        arrays = dict(zip(names, given, strict=True))
        how = arguments(arrays, score, weighting, mask)
        out = attend(arrays, how, engine=engine) * along
        return qkv.arrays.namespace(out).sum(out)

    try:
        found = fw.grads(loss, [fw.make(x) for x in base.values()])
    except EngineError:
        assert score == "own_function" and fw.name in ("tensorflow", "mxnet")
        return
    for name, gradient in zip(names, found, strict=True):
        assert np.isfinite(gradient).all(), name
        if name in expected_slopes(score, weighting, mask):
            direction, slope = expected_slopes(score, weighting, mask)[name]
            size = np.abs(gradient * direction).sum() + 1
            assert abs((gradient * direction).sum() - slope) < 1e-7 * size, name


TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2, "float32": 2e-5}
EACH = [(s, "softmax", "causal_window") for s in SCORES] + [
    ("scaled_dot" if not w.needs_nonnegative else "triangular", name, "lengths")
    for name, w in WEIGHTINGS.items()
]


@frameworks
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize(("score", "weighting", "mask"), EACH)
def test_dtypes(fw, engine, dtype, score, weighting, mask, monkeypatch):
    """Sums run in float32 at least: the error is that of rounding the arguments and the result."""
    if dtype not in fw.dtypes or EACH.index((score, weighting, mask)) % SPARSELY.get(fw.name, 1):
        pytest.skip("no such dtype, or in make test-full")
    small_blocks(monkeypatch)
    arrays = {name: fw.make(x, dtype) for name, x in leaves(score, mask).items()}
    rounded = {name: to_numpy(x).astype("float64") for name, x in arrays.items()}
    want = attend(rounded, arguments(rounded, score, weighting, mask), engine="dense")
    try:
        out = attend(arrays, arguments(arrays, score, weighting, mask), engine=engine)
    except EngineError:
        assert score == "own_function" and fw.name in ("tensorflow", "mxnet")
        return
    assert qkv.arrays.of(out).dtype(out) == dtype
    scale = np.abs(want).max() + 1
    np.testing.assert_allclose(to_numpy(out), want, atol=TOLERANCE[dtype] * scale)


@differentiating
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize(("score", "weighting", "mask"), EACH)
def test_gradients_of_each_dtype(fw, engine, dtype, score, weighting, mask, monkeypatch):
    """As near to the gradients in float64 as rounding the arguments allows."""
    every = 3 * SPARSELY.get(fw.name, 1 / 3)
    if dtype not in fw.dtypes or EACH.index((score, weighting, mask)) % every:
        pytest.skip("no such dtype, or in make test-full")
    small_blocks(monkeypatch)
    base = {name: fw.make(x, dtype) for name, x in leaves(score, mask).items()}
    wide = {name: fw.make(to_numpy(x).astype("float64")) for name, x in base.items()}

    def gradients(given: dict[str, Any], how: str) -> list[np.ndarray]:
        along = fw.make(ALONG, "float64" if given is wide else dtype)

        def loss(*arrays: Any) -> Any:
            named = dict(zip(base, arrays, strict=True))
            out = attend(named, arguments(named, score, weighting, mask), engine=how) * along
            return qkv.arrays.namespace(out).sum(out)

        return fw.grads(loss, list(given.values()))

    try:
        found = gradients(base, engine)
    except EngineError:
        assert score == "own_function" and fw.name in ("tensorflow", "mxnet")
        return
    for name, got, want in zip(base, found, gradients(wide, "dense"), strict=True):
        size = np.linalg.norm(want) + 1
        assert np.linalg.norm(got - want) < 2 * TOLERANCE[dtype] * size, name


def test_every_score_and_weighting_is_listed():
    built = {type(scores.resolve(make(arrays))) for arrays, make in SCORES.values()}
    assert {*scores.NAMES.values()} <= built
    assert {*weightings.NAMES.values()} <= {type(w) for w in WEIGHTINGS.values()}
