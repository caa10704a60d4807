"""JAX outside `jit`: a call compiles once for its kind, also under grad and vmap."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.engines import choice, plan_cache

jax = pytest.importorskip("jax")

pytestmark = pytest.mark.sample_of_module(10)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("pairs", [2**26, 0], ids=["arguments", "contents"])
@pytest.mark.parametrize("kind", ["lengths", "documents", "offset", "blocks", "both"])
def test_integers_of_numpy_in_a_mask(kind, pairs, chosen, monkeypatch):
    """The first mask compiles; a mask of other integers, or one that is written to, counts."""
    monkeypatch.setattr(plan_cache, "MAX_UNSKIPPED_PAIRS", pairs)
    inputs, rng = three(64, 64), np.random.default_rng(0)
    host = {
        "lengths": rng.integers(0, 65, 2),
        "documents": np.sort(rng.integers(0, 5, (2, 64))),
        "offset": rng.integers(-3, 60, 2),
        "blocks": rng.random((4, 4)) < 0.6,
        "both": rng.integers(5, 65, 2),
    }[kind]

    def build_mask() -> Any:
        if kind == "both":
            return masks.causal & masks.lengths(host)
        if kind == "offset":
            return masks.causal(offset=host)
        return masks.blocks(host, 16) if kind == "blocks" else getattr(masks, kind)(host)

    mask = build_mask()
    for step in range(3):
        for transform in (TRANSFORMS["call"], TRANSFORMS["grad"])[: 2 - bool(step)]:
            attend = partial(qkv.attend, mask=mask)
            actual = transform(attend)(*inputs)
            assert not chosen or not step
            want = transform(partial(attend, engine="dense"))(*inputs)
            for a, b in zip(*map(jax.tree.leaves, (actual, want)), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-9)
            chosen.clear()
        if step == 0 and kind != "blocks":  # a layout is copied when the mask is created
            host[...] = host[::-1]
        else:
            host[...] = np.roll(host, 1, -1)
            mask = build_mask()


@pytest.mark.sample(2)
@pytest.mark.parametrize("transform", ["call", "grad", "jvp", "vmap", "grad of grad"])
def test_a_gaussian_measures_its_range_in_every_call(transform, chosen):
    transformed = TRANSFORMS[transform]
    for away, size in ((0.0, 1.0), (1e6, 1.0), (0.0, 1.5), (0.0, 1e4), (0.0, 1.0)):
        q, k, v = three()
        arrays = [q * size + away, k * size + away, v]
        arrays = [x[:, None] for x in arrays] if "vmap" in transform else arrays
        chosen.clear()
        actual = transformed(lambda *x: qkv.attend(*x, score="gaussian"))(*arrays)
        want = transformed(lambda *x: qkv.attend(*x, score="gaussian", engine="dense"))(*arrays)
        for a, b in zip(*map(jax.tree.leaves, (actual, want)), strict=True):
            scale = 1 + np.abs(b).max()
            np.testing.assert_allclose(a, b, atol=1e-9 * scale, rtol=1e-7)
    assert not chosen  # the last call is in the range of the first


def test_a_learned_bandwidth_of_a_plan(chosen):
    inputs = three()

    def call(width: Any, engine: str | None = None) -> Any:
        out = qkv.attend(*inputs, score=scores.Gaussian(width), engine=engine)
        return jnp.sum(jnp.sin(out))

    for width in (1.0, 0.7, 1e-3):
        actual = jax.value_and_grad(call)(jnp.asarray(width))
        want = jax.value_and_grad(call)(jnp.asarray(width), "dense")
        np.testing.assert_allclose(actual, want, atol=1e-9, rtol=1e-9)


def test_a_short_additive_score_has_a_plan(chosen):
    """Its shapes alone exclude the engines that would look at values."""
    inputs = three()
    for factor in (1.0, 30.0):
        learned = scores.Additive(*(draw(*x, seed=4) * factor for x in ((5, 4), (5, 4), (5,))))
        chosen.clear()
        actual = qkv.attend(*inputs, score=learned)
        assert factor == 1.0 or not chosen
        want = qkv.attend(*inputs, score=learned, engine="dense")
        np.testing.assert_allclose(actual, want, atol=1e-9)


# Functions of the caller


class Scaled:
    """A callable object with an array that is replaced."""

    def __init__(self, w: Any) -> None:
        self.w = w

    def __call__(self, query: Any, key: Any) -> Any:
        return query @ self.w @ key.mT


class ScaledScore(scores.Score):
    """A score that is no dataclass, so no plan can be cached for it."""

    w: Any = None

    def __call__(self, query: Any, key: Any) -> Any:
        return query @ self.w @ key.mT


FUNCTIONS: dict[str, Any] = {
    "score": lambda c: {"score": lambda q, k: jnp.tanh(q @ k.mT) * c},
    "modified": lambda c: {
        "score": scores.Modified("dot", lambda s, b, h, i, j: s * c - 0.1 * abs(i - j) * (h + 1))
    },
    "modified function": lambda c: {
        "score": scores.Modified(lambda q, k: q @ k.mT * c, lambda s, b, h, i, j: s + b)
    },
    "mask": lambda c: {"mask": masks.custom(lambda b, h, i, j: (i - j) % 3 < c + h)},
    "part of a mask": lambda c: {
        "mask": masks.causal & ~masks.custom(lambda b, h, i, j: i - j == c) & masks.lengths([60])
    },
    "both": lambda c: {
        "score": lambda q, k: q @ k.mT * c,
        "mask": masks.custom(lambda b, h, i, j: i >= j) & masks.array(draw(70, 90)),
        "weighting": weightings.Entmax(1.3),
    },
    "reads values": lambda c: {"score": lambda q, k: q @ k.mT * (c if float(q.sum()) else 0.0)},
    "with dropout": lambda c: {
        "score": lambda q, k: q @ k.mT * c,
        "dropout_p": 0.3,
        "seed": 2,
        "mask": "causal",
    },
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("transform", ["call", "grad", "jvp", "vmap of grad", "grad of grad"])
def test_a_function_runs_as_it_is_and_the_rest_has_a_plan(transform, kind, chosen):
    if kind == "reads values" and "vmap" in transform:
        pytest.skip("vmap gives no values")
    q, k, v = (x[None] for x in three())
    inputs = [x[:, None] for x in (q, k[:, :1], v)] if "vmap" in transform else [q, k[:, :1], v]
    for c in (1, 2, 1):
        options = FUNCTIONS[kind](c)
        chosen.clear()
        actual = TRANSFORMS[transform](partial(qkv.attend, **options))(*inputs)
        assert not chosen or c == 1
        want = TRANSFORMS[transform](partial(qkv.attend, **options, engine="dense"))(*inputs)
        for a, b in zip(*map(jax.tree.leaves, (actual, want)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9)


@pytest.mark.parametrize("kind", [Scaled, ScaledScore])
def test_an_array_of_a_callable_is_replaced_and_gets_its_gradient(kind, chosen):
    inputs, score = three(), kind.__new__(kind)

    def call(w: Any, engine: str | None = None) -> Any:
        object.__setattr__(score, "w", w)
        return jnp.sum(jnp.sin(qkv.attend(*inputs, score=score, engine=engine)))

    for seed in range(3):
        chosen.clear()
        actual = jax.value_and_grad(call)(draw(4, 4, seed=seed))
        assert seed == 0 or not chosen
        want = jax.value_and_grad(call)(draw(4, 4, seed=seed), "dense")
        for a, b in zip(*map(jax.tree.leaves, (actual, want)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9)


def test_a_function_runs_once_in_every_call():
    seen: list[Any] = []

    def score(q, k):
        seen.append(q.shape)
        return q @ k.mT

    for count in range(3):
        qkv.attend(*three(), score=score)
        qkv.weights(*three()[:2], score=score)
        if not count:
            seen.clear()  # the first call also measures what the function holds
    assert seen == [(2, 70, 4)] * 4


def test_a_masked_nan_does_not_reach_a_function_of_the_caller():
    q, k, v = three(20, 20)
    k, v = k.at[:, 15].set(jnp.nan), v.at[:, 15].set(jnp.nan)
    for mask in (masks.lengths([15, 15]), masks.custom(lambda b, h, i, j: j < 15)):
        options = {"score": lambda q, k: q @ k.mT, "mask": mask}
        want = qkv.attend(q, k[:, :15], v[:, :15], score="dot")
        np.testing.assert_allclose(qkv.attend(q, k, v, **options), want, atol=1e-12)
        slope = jax.grad(loss(partial(qkv.attend, **options)), (0, 1, 2))(q, k, v)
        assert all(np.isfinite(x).all() for x in slope)


def test_all_results_of_a_function(chosen):
    inputs = three()
    options = {"score": lambda q, k: q @ k.mT, "return_lse": True, "return_weights": True}
    for _ in range(2):
        chosen.clear()
        actual = qkv.attend(*inputs, **options)
    assert not chosen
    for a, b in zip(actual, qkv.attend(*inputs, **options, engine="dense"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    alpha = qkv.weights(*inputs[:2], score=options["score"])
    np.testing.assert_allclose(alpha, actual[2], atol=1e-12)


def test_a_function_receives_16_bits_as_float32():
    kinds = []

    def score(q, k):
        kinds.append(str(q.dtype))
        return q @ k.mT

    inputs = [x.astype("bfloat16") for x in three()]
    out = qkv.attend(*inputs, score=score)
    want = qkv.attend(*(x.astype("float64") for x in inputs), score="dot")
    assert out.dtype == "bfloat16" and kinds[-1] == "float32"
    np.testing.assert_allclose(out.astype("float64"), want, atol=0.03)


def test_a_function_that_is_wrong_is_refused():
    inputs = three()
    for _ in range(2):
        with pytest.raises(qkv.QkvError, match="must take"):
            qkv.attend(*inputs, score=lambda q: q)
        with pytest.raises(qkv.QkvError, match=r"returned shape \(2, 90, 70\)"):
            qkv.attend(*inputs, score=lambda q, k: k @ q.mT)
        with pytest.raises(qkv.QkvError, match="must return booleans"):
            qkv.attend(*inputs, mask=masks.custom(lambda b, h, i, j: i - j))
        with pytest.raises(ZeroDivisionError):
            qkv.attend(*inputs, score=lambda q, k: 1 / 0)


def test_a_large_call_runs_its_function_in_compiled_blocks(monkeypatch):
    from qkv.engines import user_code

    inputs = three()
    score = lambda q, k: jnp.tanh(q @ k.mT)  # noqa: E731
    want = qkv.attend(*inputs, score=score)
    assert qkv.explain(*inputs, score=score).engine == "dense"
    monkeypatch.setattr(user_code, "MAX_EVALUATED_NUMBERS", 100)
    monkeypatch.setattr(qkv.engines.streaming, "MAX_DENSE_NUMBERS", 100)
    monkeypatch.setattr(qkv.engines.streaming, "MAX_DENSE_EAGER_NUMBERS", 100)
    assert qkv.explain(*inputs, score=score).engine == "streaming"
    np.testing.assert_allclose(qkv.attend(*inputs, score=score), want, atol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("weighting", ["softmax", "hard", "sigmoid", "raw"])
def test_keys_that_are_not_finite_are_found_by_their_scores(weighting, bad):
    """Few queries: the graph checks scores and outputs; transforms compute what is safe."""
    rng = np.random.default_rng(0)
    shapes = ((2, 3, 8), (2, 40, 8), (2, 40, 8))
    q, k, v = (jnp.asarray(rng.normal(size=shape), "float32") for shape in shapes)
    for place in (None, 35, 5):  # clean, masked, and live
        spoiled = [x if place is None else x.at[0, place].set(bad) for x in (k, v)]
        call: Any = partial(qkv.attend, mask=masks.lengths([30, 30]), weighting=weighting)
        want = qkv.attend(q, *(x[:, :30] for x in spoiled), weighting=weighting, engine="dense")
        for run in (call, call, jax.jit(call)):
            np.testing.assert_allclose(run(q, *spoiled), want, rtol=2e-5, atol=2e-6)
        if place != 5:
            slopes = jax.grad(loss(call), (0, 1, 2))(q, *spoiled)
            assert all(np.isfinite(x).all() for x in slopes)
            mapped = jax.vmap(partial(qkv.attend, mask=masks.lengths(30), weighting=weighting))
            np.testing.assert_allclose(mapped(q, *spoiled), want, rtol=2e-5, atol=2e-6)
