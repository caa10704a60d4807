"""A compiled call has the mask of a rule on positions as a constant."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import masks
from qkv.engines import call as calls

LAYOUT = np.array([[1, 0, 1], [1, 1, 0]], bool)
RULES = {
    "causal": masks.causal,
    "bottom right": masks.causal(align="bottom_right"),
    "offset": masks.causal(offset=2),
    "window": masks.window(1),
    "open": masks.window(float("inf")),
    "all": masks.window(20),
    "strided": masks.strided(2),
    "dilated": masks.dilated(1, 2),
    "global": masks.global_tokens(1) | masks.window(1),
    "blocks": masks.blocks(LAYOUT, (3, 3)),
    "blocks of heads": masks.blocks(np.stack([LAYOUT, ~LAYOUT]), (3, 3)),
    "not": ~masks.causal,
    "and lengths": masks.causal & masks.lengths(np.array([4, 7])),
    "or documents": masks.window(1) | masks.documents(np.arange(6) // 4, np.arange(8) // 4),
    "and array": masks.causal & (np.arange(48).reshape(6, 8) % 5 > 0),
}
STATIC = set(RULES) - {"and lengths", "or documents", "and array"}


def draw_arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, 2, length, 4)).astype(np.float32) for length in (6, 8, 8, 6)]


def compile_both(framework: str, rule: masks.Mask):
    """Return a compiled function of query, key, value and cotangent: the output, and gradients."""
    if framework == "jax":
        jax = pytest.importorskip("jax")

        def run(query, key, value, along):
            arrays = (query, key, value)
            out, pull_back = jax.vjp(lambda *x: qkv.attend(*x, mask=rule), *arrays)
            return (out, *pull_back(along))

        return jax.jit(run), jax.numpy.asarray
    tf = pytest.importorskip("tensorflow")

    def run_tape(query, key, value, along):
        arrays = [query, key, value]
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            out = qkv.attend(*arrays, mask=rule)
        return (out, *tape.gradient(out, arrays, along))

    return tf.function(run_tape, autograph=False), tf.constant


@pytest.mark.sample(8)
@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("poisoned", [False, True])
def test_a_constant_mask(monkeypatch, framework, name, poisoned) -> None:
    """Also with NaN in a key that some rules hide from every query."""
    arrays, rule = draw_arrays(), RULES[name]
    if poisoned:
        arrays[1][:, :, 7] = arrays[2][:, :, 7] = np.nan
    assert rule.is_static == (name in STATIC)
    results = []
    for most in (2**20, -1):
        monkeypatch.setattr(calls, "MAX_STATIC_PAIRS", most)
        run, convert = compile_both(framework, rule)
        results.append([np.asarray(x) for x in run(*map(convert, arrays))])
    np.testing.assert_allclose(results[0][0], qkv.attend(*arrays[:3], mask=rule), atol=1e-5)
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
