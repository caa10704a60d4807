"""JAX outside `jit`: a call compiles once for its kind, also under grad and vmap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.engines import choice, plan_cache

jax = pytest.importorskip("jax")
jnp = jax.numpy


@pytest.fixture(autouse=True)
def doubles():
    jax.config.update("jax_enable_x64", True)


def draw(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape))


def three(n: int = 70, m: int = 90, d: int = 4) -> list[Any]:
    return [draw(2, n, d), draw(2, m, d, seed=1), draw(2, m, d, seed=2)]


OPTION_SETS: dict[str, Any] = {
    "plain": lambda: {},
    "causal": lambda: {"mask": masks.causal},
    "float": lambda: {"mask": draw(70, 90)},
    "entmax 1.3": lambda: {"weighting": weightings.Entmax(1.3)},
    "top 3": lambda: {"weighting": weightings.TopK(3)},
    "multiplicative": lambda: {"score": scores.Multiplicative(draw(4, 4, seed=3))},
    "dropout": lambda: {"dropout_p": 0.3, "seed": 5},
    "boolean": lambda: {"mask": draw(70, 90) > 0},
}


def loss(call: Any) -> Any:
    return lambda *x: jnp.sum(jnp.sin(call(*x)))


def forget_plans() -> None:
    plan_cache.PLANS_BY_SIGNATURE.clear()
    plan_cache._PLANS_BY_SIZE_CLASS.clear()


@pytest.fixture
def chosen(monkeypatch) -> list[str]:
    """The engines that were chosen: a call with a plan chooses none."""
    names: list[str] = []
    choose = choice.choose_engine

    def note(*arguments: Any) -> Any:
        result = choose(*arguments)
        names.append(result.engine.NAME)
        return result

    monkeypatch.setattr(qkv.attention, "choose_engine", note)
    forget_plans()
    return names


TRANSFORMS = {
    "call": lambda f: f,
    "grad": lambda f: jax.grad(loss(f), (0, 1, 2)),
    "value and grad of the values": lambda f: jax.value_and_grad(loss(f), 2),
    "vjp": lambda f: lambda *x: (lambda out, pull: pull(out))(*jax.vjp(f, *x)),
    "jvp": lambda f: lambda *x: jax.jvp(f, x, x),
    "vmap": lambda f: jax.vmap(f),
    "vmap of grad": lambda f: jax.vmap(jax.grad(loss(f), (0, 1))),
    "grad of grad": lambda f: jax.grad(lambda *x: jnp.sum(jax.grad(loss(f))(*x) ** 2), 1),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("transform", "option"), list(zip(TRANSFORMS, OPTION_SETS, strict=True)))
def test_a_second_call_runs_the_plan_of_the_first(transform, option, chosen):
    transformed, options = TRANSFORMS[transform], OPTION_SETS[option]()
    inputs = [x[:, None] for x in three()] if "vmap" in transform else three()
    dense = jax.jit(transformed(lambda *x: qkv.attend(*x, **options, engine="dense")))
    for factor in (1.0, -0.5):
        arrays = [x * factor for x in inputs]
        actual = transformed(lambda *x: qkv.attend(*x, **options))(*arrays)
        if factor != 1.0:
            assert not chosen
        for a, b in zip(*map(jax.tree.leaves, (actual, dense(*arrays))), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9, rtol=1e-9)
        chosen.clear()


def test_a_parameter_of_a_plan_is_an_argument(chosen):
    """Its gradient arrives, and a changed one counts."""
    inputs = three()

    def call(w: Any, engine: str | None = None) -> Any:
        return jnp.sum(jnp.sin(qkv.attend(*inputs, score=scores.Multiplicative(w), engine=engine)))

    for seed in range(3):
        w = draw(4, 4, seed=seed)
        actual = jax.grad(call)(w)
        assert bool(chosen) == (seed == 0)
        np.testing.assert_allclose(actual, jax.grad(call)(w, "dense"), atol=1e-9)
        chosen.clear()


def test_a_call_inside_jit_has_no_plan_and_leaks_no_tracer(chosen):
    inputs = three()
    plain = qkv.attend(*inputs)
    np.testing.assert_allclose(jax.jit(qkv.attend)(*inputs), plain, atol=1e-12)
    slope = jax.jit(jax.grad(loss(qkv.attend)))(*inputs)
    np.testing.assert_allclose(jax.grad(loss(qkv.attend))(*inputs), slope, atol=1e-12)
    np.testing.assert_allclose(qkv.attend(*inputs), plain, atol=0)
