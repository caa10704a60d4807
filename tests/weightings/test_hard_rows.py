"""Hard takes the row of the best key; the sum over one-hot weights says which."""

from __future__ import annotations

import numpy as np
import pytest

import qkv

torch = pytest.importorskip("torch")

FRAMEWORKS = {"numpy": np.asarray, "torch": torch.as_tensor}


def draw_inputs() -> dict[str, np.ndarray]:
    """Small integers, so that many scores are equal; heads share keys, a batch shares values."""
    rng = np.random.default_rng(0)
    shapes = {"query": (2, 4, 50, 3), "key": (2, 2, 70, 3), "value": (1, 2, 70, 5)}
    arrays = {name: rng.integers(-2, 3, shape).astype(float) for name, shape in shapes.items()}
    arrays["mask"] = rng.random((2, 1, 50, 70)) < 0.1
    arrays["mask"][0, 0, 7] = False
    return arrays


def compute_reference(query, key, value, mask):
    key, value = (np.repeat(x, 2, 1) for x in (key, value))
    s = np.where(mask, query @ key.swapaxes(-1, -2), -np.inf)
    one_hot = np.arange(70) == s.argmax(-1)[..., None]
    return one_hot * mask, (one_hot * mask) @ value


@pytest.mark.parametrize("engine", ["dense", "streaming", "weights"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_first_of_equal_scores_and_empty_rows(name, engine, monkeypatch):
    monkeypatch.setattr("qkv.engines.streaming.MAX_NUMBERS_PER_BLOCK", 2**10)
    inputs = draw_inputs()
    alpha, want = compute_reference(**inputs)
    arrays = {x: FRAMEWORKS[name](y) for x, y in inputs.items()}
    options = {"score": "dot", "weighting": "hard", "engine": engine}
    got = qkv.attend(**arrays, **options, return_weights=engine == "weights")
    if engine == "weights":
        got, weights = got
        np.testing.assert_array_equal(weights, alpha)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_nan_in_keys_and_values(name, engine):
    """A NaN score spoils its rows; a NaN value only the rows that take it."""
    inputs = draw_inputs()
    alpha, want = compute_reference(**inputs)
    inputs["value"][0, 0, 3] = np.nan
    inputs["key"][0, 0, 9] = np.nan
    want = np.where(alpha[..., 3:4] * (np.arange(4)[:, None, None] < 2) > 0, np.nan, want)
    spoiled = np.broadcast_to(inputs["mask"][..., 9:10], (2, 4, 50, 1)).copy()
    spoiled[1], spoiled[0, 2:] = False, False
    want = np.where(spoiled, np.nan, want)
    arrays = [FRAMEWORKS[name](inputs[x]) for x in ("query", "key", "value")]
    mask = FRAMEWORKS[name](inputs["mask"])
    got = qkv.attend(*arrays, mask=mask, score="dot", weighting="hard", engine=engine)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_dropout_of_the_best_key(name):
    inputs = draw_inputs()
    arrays = {x: FRAMEWORKS[name](y) for x, y in inputs.items()}
    options = {"score": "dot", "weighting": "hard", "dropout_p": 0.4, "seed": 3}
    outputs = [qkv.attend(**arrays, **options, engine=x) for x in ("dense", "streaming")]
    np.testing.assert_array_equal(*outputs)
    _, full = compute_reference(**inputs)
    kept = np.asarray(outputs[0]) != 0
    np.testing.assert_allclose(np.asarray(outputs[0])[kept], full[kept] / 0.6)
    assert 0.3 < kept.mean() / (full != 0).mean() < 0.9


def test_gradients_reach_the_values_only():
    inputs = {x: torch.as_tensor(y) for x, y in draw_inputs().items()}
    slopes = []
    for engine in ("dense", "streaming"):
        arrays = [inputs[x].clone().requires_grad_() for x in ("query", "key", "value")]
        out = qkv.attend(*arrays, mask=inputs["mask"], score="dot", weighting="hard", engine=engine)
        out.sin().sum().backward()
        slopes.append([x.grad for x in arrays])
    for a, b in zip(*slopes, strict=True):
        if a is not None and b is not None:
            np.testing.assert_allclose(a, b, atol=1e-12)
    assert slopes[1][2].abs().sum() > 0
