"""TensorFlow outside `tf.function`: the second call with the same shapes runs a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.engines import plan_cache, streaming

tf = pytest.importorskip("tensorflow")

from qkv.frameworks import tensorflow as adapter  # noqa: E402

pytestmark = pytest.mark.sample_of_module(10)


def draw(*shape: int, seed: int = 0) -> Any:
    return tf.constant(np.random.default_rng((seed, *shape)).normal(size=shape))


def three(n: int = 30, m: int = 40, d: int = 4) -> list[Any]:
    return [draw(2, n, d), draw(2, m, d, seed=1), draw(2, m, d, seed=2)]


@pytest.fixture(autouse=True)
def no_plans() -> None:
    plan_cache.PLANS_BY_SIGNATURE.clear()
    plan_cache._PLANS_BY_SIZE_CLASS.clear()


@pytest.fixture
def traced(monkeypatch) -> list[Any]:
    """The shapes for which a plan was traced."""
    shapes: list[Any] = []
    trace = adapter._CompiledFunction._trace

    def note(self: Any, arrays: Any) -> Any:
        shapes.append([tuple(x.shape) for x in arrays])
        return trace(self, arrays)

    monkeypatch.setattr(adapter._CompiledFunction, "_trace", note)
    return shapes


def differentiate(call: Any, arrays: list[Any]) -> list[Any]:
    """Return the output of a call and the gradients of a loss."""
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        out = call(*arrays)
        loss = tf.reduce_sum(tf.sin(out))
    return [out, *tape.gradient(loss, arrays)]


@dataclass(frozen=True)
class Scaled:
    w: Any

    def __call__(self, query: Any, key: Any) -> Any:
        return tf.matmul(query * self.w, key, transpose_b=True)


OPTION_SETS: dict[str, Any] = {
    "plain": lambda: {},
    "causal": lambda: {"mask": "causal"},
    "window": lambda: {"mask": masks.window(3)},
    "float": lambda: {"mask": draw(30, 40)},
    "boolean": lambda: {"mask": draw(30, 40) > 0},
    "lengths": lambda: {"mask": masks.lengths([40, 25])},
    "gaussian": lambda: {"score": "gaussian"},
    "laplace": lambda: {"score": "laplace"},
    "learned": lambda: {"score": scores.Multiplicative(draw(4, 4, seed=3))},
    "entmax15": lambda: {"weighting": "entmax15"},
    "entmax 1.3": lambda: {"weighting": weightings.Entmax(1.3)},
    "top 3": lambda: {"weighting": weightings.TopK(3)},
    "hard": lambda: {"weighting": "hard"},
    "normalized": lambda: {"score": scores.Boxcar(2.0), "weighting": "normalized"},
    "raw": lambda: {"weighting": "raw"},
    "dropout": lambda: {"dropout_p": 0.3, "seed": 5},
    "function": lambda: {"score": lambda q, k: tf.matmul(q, k, transpose_b=True) / 3},
    "dataclass": lambda: {"score": Scaled(draw(4, seed=4))},
    "modified": lambda: {"score": scores.Modified("dot", lambda s, b, h, i, j: s / 2)},
    "custom": lambda: {"mask": masks.custom(lambda b, h, i, j: (i + j) % 3 > 0)},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", OPTION_SETS)
def test_a_graph_gives_the_values_and_gradients_of_the_first_call(name, traced):
    options = OPTION_SETS[name]()

    def attend(*arrays: Any) -> Any:
        return qkv.attend(*arrays, **options)

    for factor in (1.0, -0.5, 1.0):
        arrays = [x * factor for x in three()]
        want = differentiate(lambda *x: qkv.attend(*x, **options, engine="dense"), arrays)
        for actual, expected in zip(differentiate(attend, arrays), want, strict=True):
            assert (actual is None) == (expected is None)  # a constant score has no gradient
            if expected is not None:
                np.testing.assert_allclose(actual, expected, atol=1e-9)
    assert traced
    outputs = [attend(*three()) for _ in range(3)]
    assert all(np.array_equal(outputs[0], x) for x in outputs[1:])


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(adapter.TensorFlow, "eager_block_numbers", 2**12)
    monkeypatch.setattr(streaming, "MAX_DENSE_NUMBERS", 0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["plain", "causal", "entmax15", "gaussian"])
def test_a_graph_keeps_the_blocks_of_its_engine(name, traced, small_blocks):
    options = OPTION_SETS[name]()
    arrays = [tf.cast(x, tf.float32) for x in three(100, 100)]
    assert qkv.explain(*arrays, **options).engine in ("streaming", "lowered")
    outputs = [qkv.attend(*arrays, **options) for _ in range(3)]
    assert traced
    assert all(np.array_equal(outputs[0], x) for x in outputs[1:])
    exact = qkv.attend(*(np.asarray(x, float) for x in arrays), **options, engine="dense")
    np.testing.assert_allclose(outputs[0], exact, atol=2e-5)


def test_many_blocks_are_not_traced(monkeypatch, small_blocks):
    monkeypatch.setattr(adapter, "MAX_BLOCKS_PER_GRAPH", 1)
    arrays = three(100, 100)
    want = qkv.attend(*(x.numpy() for x in arrays), engine="dense")
    for _ in range(3):
        np.testing.assert_allclose(qkv.attend(*arrays), want, atol=1e-9)


def test_growing_lengths_trace_nothing(traced):
    for m in range(33, 60):
        query, key, value = three(1, m)
        want = qkv.attend(query.numpy(), key.numpy(), value.numpy())
        np.testing.assert_allclose(qkv.attend(query, key, value), want, atol=1e-12)
    assert not traced


def test_a_plan_keeps_a_bounded_number_of_graphs(traced, monkeypatch):
    monkeypatch.setattr(adapter, "MAX_GRAPHS_PER_PLAN", 3)
    for _ in range(3):
        for m in range(33, 40):
            query, key, value = three(1, m)
            want = qkv.attend(query.numpy(), key.numpy(), value.numpy())
            np.testing.assert_allclose(qkv.attend(query, key, value), want, atol=1e-12)
    assert len(traced) == 3


@pytest.mark.parametrize("kind", ["function", "dataclass", "subclass", "mask", "mod"])
def test_a_changed_state_of_the_callers_code_counts(kind):
    state = {"factor": 1.0, "limit": 10}

    @dataclass(frozen=True)
    class Own:
        def __call__(self, query: Any, key: Any) -> Any:
            return tf.matmul(query, key, transpose_b=True) * state["factor"]

    @dataclass(frozen=True)
    class OwnScore(scores.Score):
        def __call__(self, query: Any, key: Any) -> Any:
            return tf.matmul(query, key, transpose_b=True) * state["factor"]

    options: dict[str, Any] = {
        "function": {"score": lambda q, k: tf.matmul(q, k, transpose_b=True) * state["factor"]},
        "dataclass": {"score": Own()},
        "subclass": {"score": OwnScore()},
        "mask": {"mask": masks.custom(lambda b, h, i, j: j < state["limit"]), "score": "dot"},
        "mod": {"score": scores.Modified("dot", lambda s, b, h, i, j: s * state["factor"])},
    }[kind]
    arrays = three()
    query, key, value = (x.numpy() for x in arrays)
    if kind == "subclass":
        qkv.weights(query, key, score="dot")
    for factor, limit in ((1.0, 10), (1.0, 10), (1.0, 10), (2.0, 20), (0.5, 5)):
        state |= {"factor": factor, "limit": limit}
        s = query @ key.swapaxes(-1, -2) * (1 if kind == "mask" else factor)
        if kind == "mask":
            s[..., limit:] = -np.inf
        alpha = np.exp(s - s.max(-1, keepdims=True))
        want = alpha / alpha.sum(-1, keepdims=True) @ value
        np.testing.assert_allclose(qkv.attend(*arrays, **options), want, atol=1e-12)


def test_an_array_in_a_captured_dictionary_gets_its_gradient():
    arrays, held = three(70, 70), {"w": draw(4, seed=3)}
    options = {"score": lambda q, k: tf.matmul(q * held["w"], k, transpose_b=True)}
    for engine in (None, "weights", "streaming", "dense"):
        found = []
        if engine == "streaming":
            with pytest.raises(qkv.errors.EngineError, match="captures arrays"):
                qkv.attend(*arrays, **options, engine=engine)
            continue
        for _ in range(3):
            with tf.GradientTape() as tape:
                tape.watch(held["w"])
                out, alpha = qkv.attend(*arrays, **options, engine=engine, return_weights=True)
                loss = tf.reduce_sum(tf.sin(out)) + tf.reduce_sum(alpha**2)
            found.append(tape.gradient(loss, held["w"]))
        with tf.GradientTape() as tape:
            tape.watch(held["w"])
            s = tf.matmul(arrays[0] * held["w"], arrays[1], transpose_b=True)
            alpha = tf.nn.softmax(s)
            loss = tf.reduce_sum(tf.sin(alpha @ arrays[2])) + tf.reduce_sum(alpha**2)
        want = tape.gradient(loss, held["w"])
        for slope in found:
            np.testing.assert_allclose(slope, want, atol=1e-9)


@pytest.mark.parametrize("watch", [True, False])
def test_variables_of_a_plan(watch):
    """A new value counts, and the gradient reaches the variable."""
    query, key, value = (tf.Variable(x) for x in three())
    width = tf.Variable(tf.constant(1.0, tf.float64))
    for step in range(4):
        width.assign(1.0 + step / 2)
        query.assign_add(0.1 * tf.ones_like(query))
        with tf.GradientTape() as tape:
            out = qkv.attend(query, key, value, score=scores.Gaussian(width))
            loss = tf.reduce_sum(tf.sin(out))
        with tf.GradientTape() as reference:
            square = tf.reduce_sum((query[:, :, None] - key[:, None]) ** 2, -1)
            want = tf.nn.softmax(-square / (2 * width**2)) @ value
            total = tf.reduce_sum(tf.sin(want))
        np.testing.assert_allclose(out, want, atol=1e-9)
        if watch:
            both = [width, query, key, value]
            slopes = zip(tape.gradient(loss, both), reference.gradient(total, both), strict=True)
            for a, b in slopes:
                np.testing.assert_allclose(a, b, atol=1e-8)


def test_second_derivatives_and_jacobians_of_a_plan():
    query, key, value = three(5, 6)

    def curve(call: Any) -> list[Any]:
        with tf.GradientTape(persistent=True) as outer:
            outer.watch((query, key))
            with tf.GradientTape() as inner:
                inner.watch(query)
                loss = tf.reduce_sum(tf.sin(call(query, key, value)))
            slope = inner.gradient(loss, query)
            out = call(query, key, value)
            total = tf.reduce_sum(slope**2)
        return [*outer.gradient(total, (query, key)), outer.jacobian(out, query)]

    def formula(query: Any, key: Any, value: Any) -> Any:
        return tf.nn.softmax(tf.matmul(query, key, transpose_b=True) / 2) @ value

    want = curve(formula)
    for _ in range(3):
        for a, b in zip(curve(qkv.attend), want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9)


def test_forward_mode_of_a_plan():
    query, key, value = three(5, 6)
    found = []
    for _ in range(3):
        with tf.autodiff.ForwardAccumulator(query, tf.ones_like(query)) as push:
            out = qkv.attend(query, key, value)
        found.append(push.jvp(out))
    with tf.autodiff.ForwardAccumulator(query, tf.ones_like(query)) as push:
        out = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) / 2) @ value
    for slope in found:
        np.testing.assert_allclose(slope, push.jvp(out), atol=1e-9)


def test_a_plan_is_not_used_inside_a_graph_of_the_caller(traced):
    arrays = three()
    want = qkv.attend(*arrays)
    graph = tf.function(lambda *x: qkv.attend(*x))
    mapped = tf.vectorized_map(lambda x: qkv.attend(x[0], x[1], x[2]), tuple(arrays))
    np.testing.assert_allclose(graph(*arrays), want, atol=1e-12)
    np.testing.assert_allclose(mapped, want, atol=1e-12)
    assert not traced


def test_functions_that_run_eagerly_are_not_traced(traced):
    tf.config.run_functions_eagerly(True)
    try:
        outputs = [qkv.attend(*three()) for _ in range(3)]
    finally:
        tf.config.run_functions_eagerly(False)
    assert not traced and np.array_equal(outputs[0], outputs[2])


def test_a_row_that_must_not_be_empty_is_found_in_every_call():
    query, key, value = three()
    options = {"score": scores.Boxcar(3.0), "weighting": weightings.Normalized("raise")}
    near = tf.zeros_like(query), tf.zeros_like(key), value
    for _ in range(3):
        np.testing.assert_allclose(
            qkv.attend(*near, **options)[0, 0], tf.reduce_mean(value[0], 0), atol=1e-12
        )
        with pytest.raises(qkv.errors.ArgumentError, match="no key within the window"):
            qkv.attend(near[0] + 10.0, *near[1:], **options)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("weighting", ["softmax", "hard", "sigmoid", "raw"])
def test_keys_that_are_not_finite_are_found_by_their_scores(weighting, bad):
    """Few queries: the graph checks scores and outputs; a tape records what is safe."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, n, 8)).astype("f4") for n in (3, 40, 40))
    for place in (None, 35, 5):  # clean, masked, and live
        if place is not None:
            k[0, 35], v[0, 35] = (1.0, 1.0) if place == 5 else (bad, bad)
            k[0, 5], v[0, 5] = (bad, bad) if place == 5 else (k[0, 5], v[0, 5])
        given = [tf.constant(x) for x in (q, k, v)]
        cut = [given[0], *(x[:, :30] for x in given[1:])]
        want = qkv.attend(*cut, weighting=weighting, engine="dense")
        options = {"mask": masks.lengths([30, 30]), "weighting": weighting}
        for _ in range(3):  # the second is traced
            got = qkv.attend(*given, **options)
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
        if place != 5:
            for _ in range(2):
                with tf.GradientTape() as tape:
                    tape.watch(given)
                    loss = tf.reduce_sum(qkv.attend(*given, **options))
                slopes = [x for x in tape.gradient(loss, given) if x is not None]
                assert slopes and all(np.isfinite(x).all() for x in slopes)
