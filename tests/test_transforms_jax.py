"""Every transform of JAX, each with another option, in blocks; tests/transforms.py has the form."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import qkv
from qkv import scores, weightings
from qkv.engines import streaming
from tests.transforms import OPTIONS, build_arguments, cells

jax = pytest.importorskip("jax")

from tests.transforms_jax import JAX  # noqa: E402

pytestmark = pytest.mark.sample_of_module(4)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    jax.config.update("jax_enable_x64", True)
    monkeypatch.setattr(streaming, "block_size", lambda call: (3, 4))


# Additional outputs come from another engine.
IN_BLOCKS = {name: option for name, option in OPTIONS.items() if option.family != "weights"}
PAIRS = list(zip(JAX, [*[*IN_BLOCKS][1::2], *IN_BLOCKS], strict=False))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("transform", "option"), PAIRS)
def test_jax(transform, option):
    option = IN_BLOCKS[option]

    def function(*x):
        return option.call(*x, engine="streaming")

    JAX[transform](function, build_arguments(option, jax.numpy.asarray, lead=(2,)))


@pytest.mark.sample(10)
@pytest.mark.parametrize(("transform", "option"), cells(JAX, OPTIONS))
def test_as_a_user_calls(transform, option):
    JAX[transform](
        OPTIONS[option].call, build_arguments(OPTIONS[option], jax.numpy.asarray, lead=(2,))
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("option", ["causal", "entmax15", "top 3", "log-sum-exp", "weights"])
def test_forwards_as_backwards(option):
    JAX["jvp"](OPTIONS[option].call, build_arguments(OPTIONS[option], jax.numpy.asarray, lead=(2,)))


def test_forwards_no_matrix_is_held():
    x = jax.ShapeDtypeStruct((4096, 8), "float32")

    def push(*x):
        return jax.jvp(qkv.attend, x, x)

    held = jax.jit(push).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes
    assert held < 4096 * 4096


@pytest.mark.parametrize("learned", ["value", "bandwidth"])
def test_a_compiled_function_may_hold_queries_and_keys(learned):
    xp = jax.numpy
    query, key, value = (xp.sin(xp.arange(size * 3.0)).reshape(size, 3) for size in (4, 5, 5))
    inputs = value if learned == "value" else xp.asarray(0.7)

    def call(x):
        width, rows = (1.0, x) if learned == "value" else (x, value)
        return qkv.attend(query, key, rows, score=scores.Gaussian(width))

    slopes = [f(jax.grad(lambda x: (call(x) ** 2).sum()))(inputs) for f in (jax.jit, lambda f: f)]
    np.testing.assert_allclose(jax.jit(call)(inputs), call(inputs), atol=1e-12)
    np.testing.assert_allclose(*slopes, atol=1e-12)
    looped = jax.lax.scan(lambda none, x: (none, call(x)), None, inputs[None])[1][0]
    np.testing.assert_allclose(looped, call(inputs), atol=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("weighting", ["sparsemax", "entmax15"])
def test_a_threshold_is_searched_in_each_shard(weighting):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = jax.sharding.PartitionSpec("data")
    x = jax.numpy.asarray(np.random.default_rng(0).standard_normal((3, 2, 5, 4)))

    def loss(attend, query):
        return (attend(query, x[1], x[2]) ** 2).sum()

    attend = partial(qkv.attend, weighting=weighting)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    actual, slope = jax.value_and_grad(partial(loss, sharded))(x[0])
    want, truth = jax.value_and_grad(partial(loss, attend))(x[0])
    np.testing.assert_allclose(actual, want, rtol=1e-6)
    np.testing.assert_allclose(slope, truth, rtol=1e-5, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("score", "weighting", "shared"),
    [("gaussian", "softmax", False), ("gaussian", "entmax15", True), ("cosine", "hard", True)],
)
def test_blocks_in_each_shard(score, weighting, shared):
    """Forward and backward, compared with one process; a key that all share gets all gradients."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    heads, rows = (jax.sharding.PartitionSpec("data", *x, "model") for x in ((), (None,)))
    full = jax.sharding.PartitionSpec("data")
    specs = (rows, full, full) if shared else (heads,) * 3
    draw = np.random.default_rng(0).standard_normal
    inputs, along = ([jax.numpy.asarray(draw((2, 2, n, 3))) for n in (4, 7, 7)] for _ in "ab")

    def both(attend, inputs, along):
        slopes = jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2))(*inputs)
        return *jax.jvp(attend, inputs, along), slopes

    attend = partial(qkv.attend, score=score, weighting=weighting)
    mapped = jax.vmap(partial(attend, engine="streaming"))
    shards = jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=specs[0])
    actual = jax.jit(partial(both, shards))(inputs, along)
    want = jax.jit(partial(both, partial(attend, engine="dense")))(inputs, along)
    for a, b in zip(*map(jax.tree.leaves, (actual, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_export_of_lengths_that_are_symbols():
    """A program made for any lengths gives what NumPy does."""
    batch, n, m = jax.export.symbolic_shape("b, n, m")
    w = np.cos(np.arange(24.0)).reshape(3, 8)

    def function(*x):
        learned = scores.Additive(*(x[0].__array_namespace__().asarray(y) for y in (w, w, w[:, 0])))
        ways = (
            {"mask": "causal"},
            {"weighting": weightings.TopK(3)},
            {"score": "cosine"},
            {"score": learned},
        )
        return [qkv.attend(*x, **options) for options in ways]

    shapes = [(batch, 4, n, 8), (batch, 2, m, 8), (batch, 2, m, 5)]
    inputs = [jax.ShapeDtypeStruct(shape, "float64") for shape in shapes]
    program = jax.export.export(jax.jit(function))(*inputs)
    made = [(2, 4, 5, 8), (2, 2, 2, 8), (2, 2, 2, 5)]
    arrays = [np.sin(np.arange(np.prod(x)) + k).reshape(x) for k, x in enumerate(made)]
    for got, want in zip(program.call(*arrays), function(*arrays), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)
