"""Derivatives as the frameworks check them: gradcheck, second order, jit, vmap, tf.function."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.frameworks import to_numpy
from tests.cases import SCORES, WEIGHTINGS

pytestmark = pytest.mark.sample_of_module(12)

N, M, D, DV = 3, 5, 2, 2
rng = np.random.default_rng(11)
QUERY, KEY, VALUE = rng.normal(size=(N, D)), rng.normal(size=(M, D)), rng.normal(size=(M, DV))
W = {
    "multiplicative": lambda xp: scores.Multiplicative(xp(rng_w(D, D))),
    "additive": lambda xp: scores.Additive(xp(rng_w(3, D)), xp(rng_w(3, D, seed=1)), xp(rng_w(3))),
    "gated": lambda xp: scores.Gated(xp(rng_w(D)), xp(rng_w(D, seed=1))),
}


def rng_w(*shape, seed=0):
    return np.random.default_rng(seed + len(shape)).normal(size=shape)


SMOOTH = [
    *((name, "softmax") for name in ("dot", "scaled_dot", "cosine", "gaussian", "laplace", *W)),
    ("softcap", "softmax"),
    ("modified", "softmax"),
    *(("triangular", name) for name in ("normalized", "raw")),
    ("epanechnikov", "normalized"),
    *(
        ("dot", name)
        for name in WEIGHTINGS
        if WEIGHTINGS[name].is_differentiable and not WEIGHTINGS[name].needs_nonnegative
    ),
]
SMOOTH.remove(("dot", "straight_through"))  # its gradient is meant to be another weighting's


def score_of(name, xp):
    return W[name](xp) if name in W else SCORES[name][1]({})


@pytest.fixture(params=["dense", "streaming"])
def engine(request, monkeypatch):
    from qkv.engines import streaming

    monkeypatch.setattr(streaming, "block_size", lambda call: (2, 2))
    return request.param


def torch_call(score, weighting, engine, with_lse=False):
    torch = pytest.importorskip("torch")
    from qkv.frameworks import load_framework, tree

    fw = load_framework("torch")
    built = scores.resolve(score_of(score, torch.tensor))
    inside = tree.array_leaves(fw, built)
    main = [torch.tensor(x) for x in (QUERY, KEY, VALUE)]

    def function(query, key, value, *arrays):
        options = {
            "score": tree.replace_arrays(fw, built, arrays),
            "weighting": WEIGHTINGS[weighting],
            "mask": masks.causal(align="bottom_right"),
        }
        return qkv.attend(query, key, value, **options, engine=engine, return_lse=with_lse)

    return function, [x.clone().requires_grad_() for x in (*main, *inside)]


@pytest.mark.sample(24)
@pytest.mark.parametrize(("score", "weighting"), SMOOTH)
def test_gradcheck(score, weighting, engine):
    torch = pytest.importorskip("torch")
    assert torch.autograd.gradcheck(*torch_call(score, weighting, engine))


@pytest.mark.sample(14)
@pytest.mark.parametrize(("score", "weighting"), SMOOTH)
def test_gradgradcheck(score, weighting, engine):
    torch = pytest.importorskip("torch")
    assert torch.autograd.gradgradcheck(*torch_call(score, weighting, engine))


@pytest.mark.parametrize("weighting", ["softmax", "top3"])
def test_the_log_sum_exp_has_gradients(weighting, engine):
    torch = pytest.importorskip("torch")
    call = torch_call("dot", weighting, engine, with_lse=True)
    assert torch.autograd.gradcheck(*call)
    assert torch.autograd.gradgradcheck(*call)


NATIVE = [
    None,
    masks.causal,
    masks.window(1),
    masks.causal(align="bottom_right"),
    masks.window(0) | masks.global_tokens(1),
    masks.causal(offset=1),
]


def test_each_sequence_may_have_its_own_offset():
    torch = pytest.importorskip("torch")
    arrays = [torch.tensor(np.stack([x, 2 * x])) for x in (QUERY, KEY, VALUE)]
    mask = masks.causal(offset=np.array([1, -1]))
    torch.testing.assert_close(
        qkv.attend(*arrays, mask=mask), qkv.attend(*arrays, mask=mask, engine="dense")
    )


@pytest.mark.parametrize("mask", NATIVE, ids=str)
def test_the_native_kernel_has_two_derivatives(mask):
    torch = pytest.importorskip("torch")
    inputs = [torch.tensor(x, requires_grad=True) for x in (QUERY, KEY, VALUE)]

    def function(*arrays):
        return qkv.attend(*arrays, mask=mask, engine="native")

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def shared(x, w, v, **options):
    """Query, key and value of one array, and one matrix for both sides of the score."""
    return qkv.attend(x, x, 2 * x, score=scores.Additive(w, w, v), weighting="entmax15", **options)


def test_one_array_in_several_places(engine):
    torch = pytest.importorskip("torch")
    inputs = [torch.tensor(x).requires_grad_() for x in (KEY, rng_w(3, D), rng_w(3))]

    def function(*args):
        return shared(*args, engine=engine)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("way", ["native", "streaming"])
def test_a_gradient_to_be_differentiated_is_the_gradient(way):
    """Also where key and value are, or were made of, the query."""
    torch = pytest.importorskip("torch")
    x = torch.tensor(KEY[None, None]).requires_grad_()

    def slope(make, **options):
        out = qkv.attend(*make(x), engine=way)
        return torch.autograd.grad(out.square().sum(), x, **options)[0]

    for make in (lambda x: (x, x, x), lambda x: (x, 2 * x, x), lambda x: (2 * x, x, x)):
        torch.testing.assert_close(slope(make, create_graph=True), slope(make))


def test_one_array_in_several_places_on_tensorflow(monkeypatch):
    tf = pytest.importorskip("tensorflow")
    from qkv.engines import streaming

    monkeypatch.setattr(streaming, "block_size", lambda call: (2, 2))
    inputs = [tf.constant(x) for x in (KEY, rng_w(3, D), rng_w(3))]

    def both(engine):
        with tf.GradientTape() as outer:
            outer.watch(inputs)
            with tf.GradientTape() as inner:
                inner.watch(inputs)
                total = tf.reduce_sum(shared(*inputs, engine=engine) ** 2)
            first = inner.gradient(total, inputs)
            size = sum(tf.reduce_sum(x**2) for x in first)
        return [*first, *outer.gradient(size, inputs)]

    for actual, want in zip(both("streaming"), both("dense"), strict=True):
        np.testing.assert_allclose(actual, want, rtol=1e-8, atol=1e-8)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("score", "weighting"),
    [
        ("gaussian", "softmax"),
        ("additive", "softmax"),
        ("dot", "sparsemax"),
        ("dot", "entmax15"),
        ("dot", "top3"),
        ("dot", "sigmoid"),
        ("epanechnikov", "normalized"),
    ],
)
def test_jax_has_two_derivatives(score, weighting, engine):
    """The Hessian forwards and backwards, against finite differences of the gradient."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    built = score_of(score, jax.numpy.asarray)
    value = jax.numpy.asarray(VALUE)

    def loss(query, key):
        out = qkv.attend(
            query, key, value, score=built, weighting=WEIGHTINGS[weighting], engine=engine
        )
        return (out * out).sum()

    query, key = jax.numpy.asarray(QUERY), jax.numpy.asarray(KEY)
    hessian = jax.jit(jax.hessian(loss))(query, key)
    along = np.random.default_rng(2).normal(size=QUERY.shape)
    slope = jax.jit(jax.grad(loss))
    step = 1e-5
    want = (slope(query + step * along, key) - slope(query - step * along, key)) / (2 * step)
    got = np.tensordot(hessian, along, axes=2)
    np.testing.assert_allclose(got, want, atol=1e-5)
    reverse = jax.jit(jax.grad(lambda q: (slope(q, key) * along).sum()))(query)
    np.testing.assert_allclose(reverse, want, atol=1e-5)


@pytest.mark.sample(1)
def test_jax_transforms_agree(engine):
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    jnp = jax.numpy
    queries = jnp.asarray(rng.normal(size=(4, N, D)))
    valid = jnp.asarray([5, 3, 1, 0])
    key, value, w = jnp.asarray(KEY), jnp.asarray(VALUE), jnp.asarray([0.7])

    def one(query, count, w):
        score = scores.Gaussian(w)
        mask = masks.custom(lambda b, h, i, j: j < count)
        return qkv.attend(query, key, value, score=score, mask=mask, engine=engine)

    plain = jnp.stack([one(q, c, w) for q, c in zip(queries, valid, strict=True)])
    mapped = jax.vmap(one, in_axes=(0, 0, None))
    np.testing.assert_allclose(jax.jit(mapped)(queries, valid, w), plain, atol=1e-12)

    def total(w, run):
        return run(queries, valid, w).sum()

    compiled = jax.jit(jax.grad(lambda w: total(w, mapped)))(w)

    def loop(q, c, w):
        return jnp.stack([one(*x, w) for x in zip(q, c, strict=True)])

    looped = jax.jit(jax.grad(lambda w: total(w, loop)))(w)
    np.testing.assert_allclose(compiled, looped, atol=1e-12)


@pytest.mark.sample(3)
@pytest.mark.parametrize("weighting", ["softmax", "entmax15", "hard", "normalized"])
def test_tensorflow_graphs_agree(weighting, engine):
    tf = pytest.importorskip("tensorflow")
    score = "epanechnikov" if weighting == "normalized" else "dot"
    options = {"score": score, "weighting": weighting, "mask": masks.causal, "engine": engine}
    arrays = [tf.constant(x) for x in (QUERY, KEY, VALUE)]

    def function(*arrays):
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            loss = tf.reduce_sum(qkv.attend(*arrays, **options) ** 2)
        return loss, tape.gradient(loss, arrays, unconnected_gradients="zero")

    want, got = function(*arrays), tf.function(function)(*arrays)
    np.testing.assert_allclose(got[0], want[0], atol=1e-12)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_tensorflow_serves_a_batch_of_unknown_size():
    tf = pytest.importorskip("tensorflow")
    spec = tf.TensorSpec((None, None, D), tf.float64)
    batch = [tf.constant(np.stack([x, 2 * x])) for x in (QUERY, KEY, VALUE)]

    @tf.function(input_signature=[spec, spec, spec])
    def function(query, key, value):
        return qkv.attend(query, key, value, score="gaussian", mask=masks.causal)

    want = qkv.attend(*batch, score="gaussian", mask=masks.causal)
    np.testing.assert_allclose(function(*batch), want, atol=1e-12)


def test_tensorflow_tells_heads_apart_in_a_batch_of_unknown_size():
    tf = pytest.importorskip("tensorflow")
    x = tf.constant(np.stack([np.stack([QUERY, QUERY])] * 2))  # batch, heads, rows, width
    score = scores.Modified("dot", lambda s, b, h, q, k: s + tf.cast((b + 2 * h) * k, s.dtype))
    options = {"score": score, "dropout_p": 0.5, "seed": 1}
    spec = tf.TensorSpec((None, 2, *QUERY.shape), tf.float64)
    function = tf.function(lambda x: qkv.attend(x, x, x, **options), input_signature=[spec])
    np.testing.assert_allclose(function(x), qkv.attend(x, x, x, **options), atol=1e-12)


def test_a_module_as_a_score_learns_on_torch(engine):
    """What a function captured receives its gradient too, in blocks as in the whole."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = torch.nn.Bilinear(D, D, 1).double()

    def score(query, key):
        n, m = query.shape[-2], key.shape[-2]
        q, k = query[:, None, :].expand(n, m, D), key[None, :, :].expand(n, m, D)
        return layer(q.contiguous(), k.contiguous())[..., 0]

    arrays = [torch.tensor(x) for x in (QUERY, KEY, VALUE)]
    result = {}
    for name in (engine, "dense"):
        layer.zero_grad()
        qkv.attend(*arrays, score=score, engine=name).square().sum().backward()
        result[name] = [p.grad.clone() for p in layer.parameters()]
        assert result[name][0].abs().sum() > 0
    for a, b in zip(result[engine], result["dense"], strict=True):
        torch.testing.assert_close(a, b)


def test_a_module_as_a_score_learns_through_the_weights(monkeypatch):
    torch = pytest.importorskip("torch")
    from qkv.engines import streaming

    w = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    query, key, _ = (torch.tensor(x) for x in (QUERY, KEY, VALUE))
    result = []
    for block in (2**20, 4 * M):
        monkeypatch.setattr(streaming, "MAX_NUMBERS_PER_BLOCK", block)
        alpha = qkv.weights(query, key, score=lambda q, k: (q * w) @ k.T)
        result.append(torch.autograd.grad(alpha.square().sum(), w)[0])
    assert result[0].abs().sum() > 0
    torch.testing.assert_close(*result)


def test_a_tensorflow_function_that_holds_a_variable_falls_to_dense():
    tf = pytest.importorskip("tensorflow")
    w = tf.Variable(0.5, dtype=tf.float64)
    arrays = [tf.constant(np.repeat(x, 400, axis=0)) for x in (QUERY, KEY, VALUE)]

    def score(query, key):
        return scores.Dot()(query * w, key)

    explanation = qkv.explain(*arrays, score=score)
    assert explanation.engine == "dense"
    assert "whose gradients tensorflow would lose in blocks" in str(explanation)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(qkv.attend(*arrays, score=score) ** 2)
    assert abs(float(tape.gradient(loss, w))) > 0


def test_torch_compiles_the_native_path():
    torch = pytest.importorskip("torch")
    arrays = [torch.tensor(x, dtype=torch.float32) for x in (QUERY, KEY, VALUE)]
    compiled = torch.compile(lambda q, k, v: qkv.attend(q, k, v), backend="eager")
    torch.testing.assert_close(compiled(*arrays), qkv.attend(*arrays, engine="dense"))


def test_learned_temperature(engine):
    torch = pytest.importorskip("torch")
    t = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    arrays = [torch.tensor(x) for x in (QUERY, KEY, VALUE)]
    assert torch.autograd.gradcheck(
        lambda t: qkv.attend(*arrays, weighting=weightings.Softmax(t), engine=engine), [t]
    )


def test_weights_have_gradients_in_rows(monkeypatch):
    """α itself, made some rows at a time, differentiates as the whole does."""
    torch = pytest.importorskip("torch")
    from qkv.engines import streaming

    monkeypatch.setattr(streaming, "MAX_NUMBERS_PER_BLOCK", 2 * M)
    inputs = [torch.tensor(x, requires_grad=True) for x in (QUERY, KEY)]
    assert torch.autograd.gradcheck(lambda q, k: qkv.weights(q, k, weighting="entmax15"), inputs)
    assert torch.autograd.gradgradcheck(lambda q, k: qkv.weights(q, k), inputs)
    assert to_numpy(qkv.weights(*inputs)).sum() == pytest.approx(N)
