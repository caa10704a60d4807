"""What TensorFlow's own operations do not do as they say."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.frameworks import load_framework

tf = pytest.importorskip("tensorflow")


@pytest.mark.parametrize("lead", [(), (1,), (1, 1)])
def test_one_matrix_for_a_batch_of_one_head(lead):
    rng = np.random.default_rng(0)
    query = rng.normal(size=(3, 1, 10, 8)).astype("float32")
    key, value = (rng.normal(size=(*lead, 8, size)).astype("float32") for size in (8, 6))
    want = qkv.attend(query, key, value)
    attend = tf.function(qkv.attend, autograph=False)
    arrays = [tf.constant(x) for x in (query, key, value)]
    for run in (*[qkv.attend] * 20, attend):
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            out = run(*arrays)
        np.testing.assert_allclose(out, want, atol=1e-5)
        slopes = tape.gradient(out, arrays)
        np.testing.assert_allclose(slopes[2], _slope(query, key, value), atol=1e-4)


def _slope(query, key, value):
    """The gradient of the sum of all outputs by the values: the weights that each row had."""
    alpha = qkv.weights(query, key)
    rows = alpha.reshape(-1, alpha.shape[-1]).sum(0)
    return np.broadcast_to(rows[:, None], value.shape)


@pytest.mark.parametrize("score", ["gaussian", "laplace", "exact"])
def test_pairs_of_vectors_on_five_axes(score):
    # TensorFlow compares no two arrays of six axes that are 1 here and there by turns.
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.integers(0, 2, shape).astype("float64")
        for shape in ((2, 3, 4, 2, 3), (2, 1, 4, 5, 3), (2, 1, 4, 5, 2))
    )
    want = qkv.attend(query, key, value, score=score)
    arrays = [tf.constant(x) for x in (query, key, value)]
    np.testing.assert_allclose(qkv.attend(*arrays, score=score), want, atol=1e-12)
    one = qkv.scores.resolve(score)
    np.testing.assert_allclose(one(arrays[1], arrays[0]), one(key, query), atol=1e-12)


def test_a_batch_that_only_a_run_tells_may_be_one():
    rng = np.random.default_rng(0)
    shapes = {"query": (1, 1, 2, 3), "key": (3, 2, 4, 3), "value": (1, 2, 4, 5)}
    query, key, value = (rng.normal(size=shape) for shape in shapes.values())
    mask = rng.random((3, 1, 2, 4)) > 0.3
    unknown = [tf.TensorSpec([None, None, None, shape[-1]], "float64") for shape in shapes.values()]
    unknown.append(tf.TensorSpec([None, 1, None, None], "bool"))

    @tf.function(autograph=False, input_signature=unknown)
    def attend(query, key, value, mask):
        return qkv.attend(query, key, value, mask=mask)

    want = qkv.attend(query, key, value, mask=mask)
    np.testing.assert_allclose(attend(query, key, value, mask), want, atol=1e-12)


def test_the_mean_of_the_heads():
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 4))
    want = qkv.attend(x, x, x, mask="causal", return_weights="mean")

    def both(x):
        return qkv.attend(x, x, x, mask="causal", return_weights="mean")

    for call in (both, tf.function(both), tf.function(both, jit_compile=True)):
        for got, truth in zip(call(tf.constant(x)), want, strict=True):
            np.testing.assert_allclose(got, truth, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mask": np.ones((3, 5), bool)}, qkv.errors.FrameworkError),
        ({"mask": qkv.masks.lengths([1, 2, 3])}, qkv.errors.ShapeError),
        ({"score": "dots"}, qkv.errors.ArgumentError),
    ],
)
def test_an_error_within_a_graph_is_of_its_class(options, error):
    """AutoGraph puts an error of its own in the place of one that it cannot make again."""
    x = tf.ones((2, 5, 4))

    @tf.function
    def call(x):
        return qkv.attend(x, x, x, **options)

    with pytest.raises(error, match="in user code"):
        call(x)


def test_an_error_for_ragged_rows_names_the_next_step():
    rows = tf.ragged.constant([[[1.0, 2.0]], [[1.0, 2.0], [3.0, 4.0]]], ragged_rank=1)
    for inputs in ((rows,) * 3, (tf.ones((2, 3, 2)), rows, rows)):
        with pytest.raises(qkv.errors.DtypeError, match=r"to_tensor\(\).*masks.lengths"):
            qkv.attend(*inputs)
    key = rows.to_tensor()
    result = qkv.attend(key, key, key, mask=qkv.masks.lengths(rows.row_lengths()))
    np.testing.assert_allclose(result[0, 0], [1.0, 2.0])


def test_a_rank_that_only_a_run_tells_is_refused():
    call = tf.function(lambda x: qkv.attend(x, x, x), input_signature=[tf.TensorSpec(None)])
    with pytest.raises(qkv.errors.ShapeError, match=r"query.*number of axes.*ensure_shape"):
        call(tf.eye(2))


RECORDS = {
    "variable": lambda: scores.Gaussian(tf.Variable(0.8)),
    "constant": lambda: scores.Gaussian(tf.constant(0.8)),
    "number": lambda: scores.Gaussian(0.8),
    "inside another": lambda: scores.Gated(
        tf.ones(4), tf.ones(4), score=scores.Gaussian(tf.constant(1.0))
    ),
    "function": lambda: scores.Modified(scores.Dot(), lambda s, b, h, i, j: s * 2),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RECORDS)
def test_a_tf_function_takes_a_score_a_weighting_and_a_mask(name):
    made = [RECORDS[name](), weightings.Entmax(tf.constant(1.4)), masks.blocks([[1, 0], [1, 1]], 3)]
    x = tf.constant(np.random.default_rng(0).normal(size=(1, 2, 6, 4)).astype(np.float32))
    traces = []

    @tf.function
    def attended(a, score, weighting, mask):
        traces.append(1)
        return qkv.attend(a, a, a, score=score, weighting=weighting, mask=mask)

    want = qkv.attend(x, x, x, score=made[0], weighting=made[1], mask=made[2])
    np.testing.assert_allclose(attended(x, *made), want, atol=1e-5)
    again = [
        RECORDS[name]() if name != "function" else made[0],
        weightings.Entmax(tf.constant(1.9)),
    ]
    want = qkv.attend(x, x, x, score=again[0], weighting=again[1], mask=made[2])
    np.testing.assert_allclose(attended(x, *again, made[2]), want, atol=1e-5)
    if name in ("constant", "number", "function"):  # other numbers, the same graph
        assert len(traces) == 1
    assert tf.nest.pack_sequence_as(made[0], tf.nest.flatten(made[0])) == made[0]


def test_a_module_finds_the_variables_inside_a_score():
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.score = scores.Additive(
                *map(tf.Variable, (np.eye(3, 4), np.eye(3, 4), np.ones(3)))
            )
            self.weighting = weightings.Entmax(tf.Variable(1.5))

    model = Model()
    held = [*vars(model.score).values(), model.weighting.alpha]
    assert {id(x) for x in model.trainable_variables} == {id(x) for x in held if x is not None}


@pytest.mark.parametrize("offset", [0.0, 3.0, 1e4])
@pytest.mark.parametrize(
    "score", [scores.Gaussian(2.0), scores.Triangular(6.0), scores.Boxcar(5.0)]
)
def test_distances_of_float32_are_those_of_the_differences(score, offset):
    """Also of equal vectors, far from the origin, and of keys that the heads share."""
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=s).astype(np.float32) for s in ((2, 3, 7, 16), (2, 1, 9, 16)))
    key[:, 0, :5] = query[:, 1, :5]
    query, key = query + np.float32(offset), key + np.float32(offset)
    square = ((query[..., :, None, :] - key[..., None, :, :]).astype(float) ** 2).sum(-1)
    width = score.bandwidth if type(score) is scores.Gaussian else score.width
    ratio = square / width**2
    want = {
        scores.Gaussian: lambda: -ratio / 2,
        scores.Triangular: lambda: np.maximum(0, 1 - np.sqrt(ratio)),
        scores.Boxcar: lambda: (ratio <= 1).astype(float),
    }[type(score)]()
    for call in (score, tf.function(score)):
        s = call(tf.constant(query), tf.constant(key)).numpy()
        off = np.abs(s - want)[np.abs(ratio - 1) > 1e-3]  # rounding may move a key over the edge
        assert off.max() <= 3e-6 + 1e-7 * offset


def test_a_key_on_the_edge_of_a_window_counts():
    rng = np.random.default_rng(0)
    key = rng.integers(-2, 3, (200, 8)).astype(np.float32)
    want = ((key**2).sum(-1) <= 16).astype(float)
    assert (want != ((key**2).sum(-1) < 16)).any()
    got = scores.Boxcar(4.0)(tf.zeros((1, 8)), tf.constant(key))
    np.testing.assert_array_equal(got[0], want)


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_gradients_of_distances_of_float32(offset):
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=s).astype(np.float32) + np.float32(offset)
        for s in ((2, 3, 7, 16), (2, 1, 9, 16))
    ]
    along = rng.normal(size=(2, 3, 7, 9))

    def differentiate(dtype, score):
        query, key = (tf.constant(x.astype(dtype)) for x in arrays)
        with tf.GradientTape() as outer:
            outer.watch((query, key))
            with tf.GradientTape() as inner:
                inner.watch((query, key))
                loss = tf.reduce_sum(tf.sin(score(query, key)) * along.astype(dtype))
            first = inner.gradient(loss, (query, key))
            total = sum(tf.reduce_sum(x**2) for x in first)
        return [*first, *outer.gradient(total, (query, key))]

    score = scores.Gaussian(4.0)
    wants = differentiate("float64", score)
    for actual, want in zip(differentiate("float32", score), wants, strict=True):
        np.testing.assert_allclose(actual, want, atol=2e-5)


def test_a_nan_in_a_vector_stays_in_its_distances():
    query, key = np.zeros((4, 8), np.float32), np.ones((5, 8), np.float32)
    key[3, 2] = np.nan
    square = -2 * scores.Gaussian(1.0)(tf.constant(query), tf.constant(key))
    want = np.full((4, 5), 8.0)
    want[:, 3] = np.nan
    np.testing.assert_allclose(square, want, atol=1e-6)
    assert scores.Gaussian(1.0)(tf.zeros((0, 8)), tf.constant(key)).shape == (0, 5)


@pytest.mark.parametrize("k", [1, 3, 40, 50])
def test_the_first_of_equal_elements_is_among_the_largest(k):
    fw, rng = load_framework("tensorflow"), np.random.default_rng(0)
    x = np.round(rng.normal(size=(3, 2, 40)), 1).astype("f4")
    x[0, 0, 5:9], x[1, 1, 7] = -np.inf, np.inf
    want = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    best, at = fw.stable_topk(tf.constant(x), k)
    np.testing.assert_array_equal(at, want)
    np.testing.assert_array_equal(best, np.take_along_axis(x, want, -1))
    by_unknown_length = tf.function(lambda x: fw.stable_topk(x, k)).get_concrete_function(
        tf.TensorSpec((None, 2, None), tf.float32)
    )
    np.testing.assert_array_equal(by_unknown_length(tf.constant(x))[1], want)


@pytest.mark.parametrize("score", ["gaussian", "window", "narrow", "equal", "far"])
def test_squares_of_products_in_float32(score):
    """Where the expanded square is not precise enough, it is computed in float64."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, n, 16)).astype("f4") for n in (30, 40))
    if score == "equal":
        k[:, :30] = q
    if score == "far":
        q, k = q + np.float32(1000), k + np.float32(1000)
    kind = {"gaussian": scores.Gaussian(6.0), "narrow": scores.Gaussian(0.05)}.get(score)
    kind = kind or scores.Triangular(9.0)
    difference = q[:, :, None, :].astype(float) - k[:, None, :, :]
    square = (difference**2).sum(-1)
    want = -square / (2 * kind.bandwidth**2) if isinstance(kind, scores.Gaussian) else np.maximum(
        1 - np.sqrt(square) / kind.width, 0
    )  # fmt: skip
    np.testing.assert_allclose(kind(tf.constant(q), tf.constant(k)), want, rtol=1e-5, atol=5e-5)
    with tf.GradientTape() as tape:
        query = tf.Variable(q)
        loss = tf.reduce_sum(kind(query, tf.constant(k)))
    if score in ("gaussian", "narrow"):
        slope = -difference.sum(2) / kind.bandwidth**2
        np.testing.assert_allclose(tape.gradient(loss, query), slope, rtol=2e-4, atol=2e-4)


ROWS = {
    "finite": [1.0, -2.0, 0.5, 3.0],
    "infinite": [1.0, np.inf, 0.5, 3.0],
    "none": [-np.inf] * 4,
    "nan": [1.0, np.nan, 0.5, 3.0],
    "large": [3e38, -3e38, 3e38, 0.0],
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("live", [None, [True, False, True, True], [False] * 4])
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_the_softmax_of_a_row_that_is_not_finite(monkeypatch, name, live, mode):
    """TensorFlow's softmax gives NaN where the weights of qkv are 0."""
    rows = tf.constant([ROWS["finite"], ROWS[name]], tf.float32)
    allowed = None if live is None else tf.constant([[True] * 4, live])
    along = tf.constant(np.arange(8.0, dtype=np.float32).reshape(2, 4))

    def run(rows):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            out = weightings.Softmax().weights(rows, allowed, tf.range(4)[None])
        return out, tape.gradient(out, rows, along)

    def run_mode():
        graph = tf.function(run, autograph=False, jit_compile=mode == "xla")
        return run(rows) if mode == "eager" else graph(rows)

    got = run_mode()
    monkeypatch.setattr(type(load_framework("tensorflow")), "fused_softmax", lambda *_: None)
    for x, y in zip(got, run_mode(), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("where", ["nothing", "key", "value", "query", "gradient"])
def test_nonfinite_numbers_do_not_reach_hidden_keys(monkeypatch, where):
    """Keys that no query may see are set to 0 only if a number is not finite."""
    rng = np.random.default_rng(0)
    shapes = {"query": (1, 2, 3, 4), "key": (1, 2, 6, 4), "value": (1, 2, 6, 4)}
    arrays = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    arrays["gradient"] = rng.normal(size=(1, 2, 3, 4)).astype("float32")
    if where != "nothing":
        arrays[where][0, 0, -1] = np.nan
    live = tf.constant(np.arange(6) < 4)

    def run():
        *inputs, along = (tf.constant(x) for x in arrays.values())

        @tf.function(autograph=False)
        def graph(*inputs):
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                out = qkv.attend(*inputs, mask=live)
            return out, *tape.gradient(out, inputs, along)

        return [x.numpy() for x in graph(*inputs)]

    want = run()
    module = "qkv.frameworks.tensorflow.MIN_NUMBERS_FOR_BRANCH"
    monkeypatch.setattr(module, 0)
    for got, expected in zip(run(), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    assert not np.isnan(want[2][:, :, 4:]).any() and not np.isnan(want[3][:, :, 4:]).any()
