"""Raw weights of dot products, rearranged as φ(q)·Σ ψ(k) vᵀ: the same sums in another order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import attention, masks, scores
from qkv.engines import linear
from qkv.errors import EngineError
from qkv.frameworks import get_framework, to_numpy
from qkv.frameworks.stored_rows import RowChunk, StoredRows
from tests.installed_frameworks import FRAMEWORKS, WITH_GRADIENTS

pytestmark = pytest.mark.sample_of_module(45)

rng = np.random.default_rng(0)
N, M, D = 310, 290, 5
QUERY, KEY, VALUE = (rng.normal(size=(size, D)) for size in (N, M, M))
W = rng.normal(size=(D, D))
SCORES: dict[str, Any] = {
    "dot": lambda w: scores.Dot(),
    "scaled": lambda w: scores.ScaledDot(0.3),
    "cosine": lambda w: scores.Cosine(w[0, 0] * w[0, 0] + 0.5),
    "multiplicative": scores.Multiplicative,
    "gaussian": lambda w: scores.Gaussian(2.0),
}
RAW = {"weighting": "raw"}
each_score = pytest.mark.parametrize("name", SCORES)


def ids(fw):
    return fw.name


@each_score
@pytest.mark.parametrize("fw", FRAMEWORKS, ids=ids)
def test_values(fw, name):
    query, key, value, w = map(fw.make_array, (QUERY, KEY, VALUE, W))
    options = {"score": SCORES[name](w), **RAW}
    assert qkv.explain(query, key, value, **options).engine == "linear"
    out, want = (
        to_numpy(qkv.attend(query, key, value, engine=engine, **options))
        for engine in (None, "dense")
    )
    np.testing.assert_allclose(out, want, rtol=1e-9, atol=1e-9)


@each_score
@pytest.mark.parametrize("fw", WITH_GRADIENTS, ids=ids)
def test_gradients(fw, name):
    arrays = [fw.make_array(x) for x in (QUERY, KEY, VALUE, W)]
    along = fw.make_array(rng.normal(size=(N, D)))
    actual = []
    for engine in ("linear", "dense"):

        def loss(query, key, value, w, engine=engine):
            out = qkv.attend(query, key, value, score=SCORES[name](w), engine=engine, **RAW)
            xp = get_framework(out).xp
            return xp.sum(out * along) + 0.0 * xp.sum(w)

        if name == "gaussian" and fw.name == "jax" and engine == "linear":
            with pytest.raises(EngineError, match="range of the arguments"):
                fw.compute_gradients(loss, arrays)
            return
        actual.append(fw.compute_gradients(loss, arrays))
    for got, want in zip(*actual, strict=True):
        np.testing.assert_allclose(to_numpy(got), to_numpy(want), rtol=1e-8, atol=1e-8)


def test_float32_is_as_accurate_as_the_formula():
    query, key, value = (rng.normal(size=(size, 64)).astype("f4") for size in (2000, 3000, 3000))
    want = (query.astype(float) @ key.T.astype(float)) @ value.astype(float)
    eager = np.abs((query @ key.T) @ value - want).max()
    out = qkv.attend(query, key, value, score="dot", engine="linear", **RAW)
    assert np.abs(out - want).max() <= 4 * eager


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_16_bit_arrays_run_in_float32(dtype):
    torch = pytest.importorskip("torch")
    arrays = [torch.tensor(x + 1).to(getattr(torch, dtype)) for x in (QUERY, KEY, VALUE)]
    options = {"score": "dot", **RAW}
    out = qkv.attend(*arrays, engine="linear", **options)
    want = qkv.attend(*(x.double() for x in arrays), engine="dense", **options)
    assert out.dtype == arrays[0].dtype
    torch.testing.assert_close(out.double(), want, rtol=0.01, atol=0)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("value_heads", [1, 2, 4])
def test_shared_heads_and_a_mask_of_lengths(key_heads, value_heads):
    query = rng.normal(size=(2, 4, 30, D))
    key = rng.normal(size=(2, key_heads, 20, D))
    value = rng.normal(size=(2, value_heads, 20, 3))
    key[0, :, 12:], value[0, :, 12:] = np.nan, np.inf
    mask = masks.lengths([12, 0])
    options = {"score": scores.Cosine(0.5), "mask": mask, **RAW}
    out = qkv.attend(query, key, value, engine="linear", **options)
    np.testing.assert_allclose(out, qkv.attend(query, key, value, engine="dense", **options))
    assert not out[1].any()


def test_one_key_for_a_batch_with_lengths():
    query, key, value = rng.normal(size=(3, 30, D)), KEY[:20], VALUE[:20]
    options = {"score": "dot", "mask": masks.lengths([4, 20, 11]), **RAW}
    out = qkv.attend(query, key, value, engine="linear", **options)
    np.testing.assert_allclose(out, qkv.attend(query, key, value, engine="dense", **options))


@pytest.mark.parametrize("fw", FRAMEWORKS, ids=ids)
@pytest.mark.parametrize("special", [np.inf, np.nan])
def test_values_that_are_not_finite_count_as_in_the_formula(fw, special):
    query, key, value = QUERY[:4].copy(), KEY.copy(), VALUE.copy()
    value[3, 1] = special
    query[1] = 0  # a weight of 0: the value does not reach the output
    arrays = list(map(fw.make_array, (query, key, value)))
    with np.errstate(invalid="ignore"):  # array-api-strict shows the warnings of NumPy
        out, want = (
            to_numpy(qkv.attend(*arrays, score="dot", engine=engine, **RAW))
            for engine in ("linear", "dense")
        )
    np.testing.assert_allclose(out, want, atol=1e-9)
    assert (out[1] == 0).all() and not np.isfinite(out[0, 1])


def test_jax_traces_it():
    jax = pytest.importorskip("jax")
    attend = jax.jit(lambda *x: qkv.attend(*x, score="dot", engine="linear", **RAW))
    value = VALUE.astype("f4")
    for special in (0.0, np.inf):
        value[0, 0] = special
        arrays = [x.astype("f4") for x in (QUERY, KEY, value)]
        want = qkv.attend(*arrays, score="dot", engine="dense", **RAW)
        np.testing.assert_allclose(attend(*arrays), want, rtol=1e-4, atol=1e-4)


def test_second_derivatives():
    torch = pytest.importorskip("torch")
    arrays = [torch.tensor(x[:4], requires_grad=True) for x in (QUERY, KEY, VALUE)]
    assert torch.autograd.gradgradcheck(
        lambda *x: qkv.attend(*x, score="dot", engine="linear", **RAW), arrays
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weighting": "softmax"}, "weights of Softmax are not the scores"),
        ({"dropout_p": 0.5}, "dropout changes each weight"),
        ({"mask": masks.window(3)}, "differs between queries"),
        ({"mask": np.zeros((N, M))}, "float mask"),
        ({"score": scores.Gated(np.ones(D), np.ones(D))}, "the gate multiplies"),
        ({"score": "laplace"}, "no dot product form"),
        ({"score": scores.ScaledDot(softcap=2.0)}, "softcap"),
    ],
)
def test_calls_that_are_refused(options, reason):
    settings = {"score": "dot", **RAW, **options}
    explained = qkv.explain(QUERY, KEY, VALUE, **settings)
    assert explained.engine != "linear" and reason in dict(explained.refusals)["linear"]
    with pytest.raises(EngineError, match="does not support"):
        qkv.attend(QUERY, KEY, VALUE, engine="linear", **settings)


def test_weights_and_a_log_sum_exp_are_refused():
    with pytest.raises(EngineError, match="never computes the weights"):
        qkv.attend(QUERY, KEY, VALUE, score="dot", return_weights=True, engine="linear", **RAW)
    call = replace(attention.build_call(QUERY, KEY, VALUE, "dot", "raw"), wants_lse=True)
    assert "log-sum-exp" in linear.unsupported_reason(call)


def test_it_runs_where_it_is_faster(monkeypatch):
    def refusal(*arrays):
        explained = qkv.explain(*arrays, score="dot", **RAW)
        return dict(explained.refusals).get("linear", explained.engine)

    assert "too few" in refusal(QUERY[:9], KEY, VALUE)
    wide = rng.normal(size=(M, 4000))
    assert "take longer" in refusal(*(rng.normal(size=(m, 400)) for m in (N, M)), wide)
    assert refusal(QUERY, KEY, VALUE) == "linear"
    explained = str(qkv.explain(QUERY, KEY, VALUE, score="dot", **RAW))
    assert "engine: linear (φ(q)·Σ ψ(k) vᵀ, rearranged: one sum of 5 × 5 numbers" in explained
    monkeypatch.setattr(linear, "MAX_FORM_NUMBERS", 100)
    assert "in memory" in refusal(QUERY, KEY, VALUE)


LINEAR = {"score": scores.FeatureMap(), "weighting": "normalized"}


@pytest.mark.parametrize("mask", [None, "causal"])
def test_a_compiled_graph_of_torch(mask):
    torch = pytest.importorskip("torch")
    options = {**LINEAR, "mask": mask}
    compiled = torch.compile(
        lambda *x: qkv.attend(*x, **options), backend="aot_eager", fullgraph=True
    )
    # The graph of the second length has symbols for lengths.
    for size in (N, N - 10):
        arrays = [torch.tensor(x[:size], requires_grad=True) for x in (QUERY, KEY, VALUE)]
        want = qkv.attend(*arrays, engine="dense", **options)
        out = compiled(*arrays)
        torch.testing.assert_close(out, want)
        slopes = [torch.autograd.grad(x, arrays, torch.ones_like(out)) for x in (out, want)]
        torch.testing.assert_close(*slopes)


def test_a_compiled_graph_keeps_no_scores():
    torch = pytest.importorskip("torch")
    sizes = []

    def note_sizes(graph, inputs):
        nodes = (x.meta.get("example_value") for x in graph.graph.nodes)
        sizes.extend(x.numel() for x in nodes if isinstance(x, torch.Tensor))
        return graph.forward

    arrays = [torch.ones(2048, D) for _ in range(3)]
    options = {**LINEAR, "mask": "causal"}
    torch.compile(lambda *x: qkv.attend(*x, **options), backend=note_sizes, fullgraph=True)(*arrays)
    assert max(sizes) <= 2048 * linear.chunk_size(D, D)


def test_an_exported_program_takes_any_length():
    torch = pytest.importorskip("torch")

    class Layer(torch.nn.Module):
        def forward(self, *arrays):
            return qkv.attend(*arrays, **LINEAR)

    arrays = tuple(torch.tensor(x[:M]) for x in (QUERY, KEY, VALUE))
    length = {0: torch.export.Dim("length", min=2)}
    program = torch.export.export(Layer(), arrays, dynamic_shapes={"arrays": (length,) * 3})
    for size in (M, 7):
        arrays = [torch.tensor(x[:size]) for x in (QUERY, KEY, VALUE)]
        want = qkv.attend(*arrays, engine="dense", **LINEAR)
        torch.testing.assert_close(program.module()(*arrays), want)


def test_a_graph_of_tensorflow():
    tf = pytest.importorskip("tensorflow")
    arrays = [tf.constant(x) for x in (QUERY, KEY, VALUE)]
    options = {**LINEAR, "mask": "causal"}

    @tf.function(autograph=False)
    def differentiate(*arrays):
        out = qkv.attend(*arrays, **options)
        return out, tf.gradients(out, list(arrays))

    largest = max(
        math.prod(x.shape)
        for step in differentiate.get_concrete_function(*arrays).graph.get_operations()
        for x in step.outputs
        if None not in tuple(x.shape)
    )
    assert largest < N * M
    out, slopes = differentiate(*arrays)
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        want = qkv.attend(*arrays, engine="dense", **options)
    wanted = (want, *tape.gradient(want, arrays))
    for got, right in zip((out, *slopes), wanted, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("score", [scores.FeatureMap(), scores.Decay(0.1, scores.FeatureMap())])
@pytest.mark.parametrize("weighting", ["raw", "normalized"])
def test_without_a_check_nan_reaches_no_earlier_query(score, weighting, monkeypatch):
    # A traced graph and a GPU cannot choose by the numbers of their sums.
    monkeypatch.setattr(linear, "_checks_sums", lambda call: False)
    key, value = KEY[:200].copy(), VALUE[:200].copy()
    value[70, 1], value[150, 0], key[180, 2] = np.nan, np.inf, np.nan
    options = {"score": score, "weighting": weighting, "mask": "causal"}
    out = qkv.attend(QUERY, key, value, engine="linear", **options)
    with np.errstate(invalid="ignore"):
        want = qkv.attend(QUERY, key, value, engine="dense", **options)
    np.testing.assert_allclose(np.isfinite(out), np.isfinite(want))
    np.testing.assert_allclose(out[np.isfinite(out)], want[np.isfinite(out)])


def test_on_a_gpu_kernels_run_first_where_they_are_faster(monkeypatch):
    torch = pytest.importorskip("torch")
    fw = type(get_framework(torch.zeros(1)))
    monkeypatch.setattr(fw, "device_block_numbers", lambda self, like: 2**26)
    x = torch.zeros(2, 4096, 64, device="meta")
    monkeypatch.setattr(linear.triton, "unsupported_reason", lambda call: None)
    reasons = dict(qkv.explain(x, x, x, score="dot", weighting="raw", mask="causal").refusals)
    assert "fused kernel computes the scores of 4,096 queries" in reasons["linear"]
    monkeypatch.setattr(linear.triton, "unsupported_reason", lambda call: "no kernel")
    explained = qkv.explain(x, x, x, mask="causal", **LINEAR)
    assert explained.engine == "linear"


# Stored rows


def store_rows(key=KEY, value=VALUE, allowed=None):
    parts = [RowChunk(*x) for x in zip(np.split(key, 2), np.split(value, 2), strict=True)]
    return StoredRows(lambda: parts, key.shape, value.shape[1], allowed)


@pytest.mark.parametrize("name", ["dot", "scaled", "cosine", "multiplicative", "gaussian"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fw", ["numpy", *WITH_GRADIENTS], ids=lambda fw: getattr(fw, "name", fw))
def test_stored_rows(fw, name, masked, monkeypatch):
    from qkv.engines import streaming

    used, run = [], streaming.run
    monkeypatch.setattr(streaming, "run", lambda *a: used.append(1) or run(*a))
    make = np.asarray if fw == "numpy" else fw.make_array
    key, value, allowed = KEY.copy(), VALUE.copy(), None
    if masked:
        allowed = rng.random(M) > 0.5
        key[~allowed] = np.nan
    live = slice(None) if allowed is None else allowed

    def attend(query, w):
        score = SCORES[name](w)
        return attention.attend_rows(store_rows(key, value, allowed), query, score=score, **RAW)

    def dense(query, w):
        arrays = make(key[live]), make(value[live])
        return qkv.attend(query, *arrays, score=SCORES[name](w), engine="dense", **RAW)

    query, w = make(QUERY), make(W)
    np.testing.assert_allclose(to_numpy(attend(query, w)), to_numpy(dense(query, w)), atol=1e-8)
    assert bool(used) == (name == "gaussian")
    if fw == "numpy" or (fw.name != "torch" and name != "multiplicative"):
        return

    def loss(attend):
        def total(query, w):
            xp = get_framework(query).xp
            return xp.sum(attend(query, w) * make(QUERY)) + 0.0 * xp.sum(w)

        return total

    if fw.name == "jax":
        import jax

        slopes = [jax.grad(loss(x), argnums=(0, 1))(query, w) for x in (attend, dense)]
    else:
        slopes = [fw.compute_gradients(loss(x), [query, w]) for x in (attend, dense)]
    for one, two in zip(*slopes, strict=True):
        np.testing.assert_allclose(to_numpy(one), to_numpy(two), rtol=1e-8, atol=1e-8)


def test_few_queries_and_sums_that_are_not_finite_need_the_scores():
    value = VALUE.copy()
    value[5] = np.inf
    for query, values in ((QUERY[:2], VALUE), (QUERY, value)):
        rows = store_rows(value=values)
        call = attention.Call(query, rows.key, rows.value, scores.Dot(), qkv.weightings.Raw())
        with call.fw.use_own_settings():
            assert linear.run_stored(call) is None
        out = attention.attend_rows(rows, query, score="dot", **RAW)
        want = qkv.attend(query, KEY, values, score="dot", engine="dense", **RAW)
        np.testing.assert_allclose(out, want, atol=1e-9)


def test_a_database():
    database = qkv.Database(KEY, VALUE)
    out = database.attend(QUERY, score="dot", weighting="raw", where=None)
    np.testing.assert_allclose(out, QUERY @ KEY.T @ VALUE, rtol=1e-4, atol=1e-3)
