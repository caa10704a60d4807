"""The estimators against the formulas, in float64, and in the places where people put them."""

from __future__ import annotations

import pickle
import sys
import tracemalloc

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.datasets import make_friedman1
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import qkv
from qkv.errors import ArgumentError, CombinationError, QkvError
from qkv.sklearn import AttentionClassifier, AttentionRegressor, AttentionTransformer
from qkv.weightings import Normalized, TopK

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
Y = np.sin(2 * X[:, 0]) + X[:, 1]
C = np.where(X[:, 0] > 0.5, "high", np.where(X[:, 1] > 0, "middle", "low"))
Q = RNG.normal(size=(7, 3))
WIDTH = np.array([0.6, 0.9, 1.4])
COUNTS = RNG.integers(0, 4, 40).astype(float)


def gaussian(query=Q, key=X, width=WIDTH):
    apart = (query[:, None] - key[None]) / width
    alpha = np.exp(-0.5 * (apart**2).sum(-1))
    return alpha / alpha.sum(1, keepdims=True)


def outside_share(query=Q, key=X, width=WIDTH):
    """1 − exp(−e²), where a query is e bandwidths outside the range of the keys."""
    above, below = query - key.max(axis=0), key.min(axis=0) - query
    excess = np.maximum(np.maximum(above, below), 0) / width
    return 1 - np.exp(-(excess**2).sum(axis=1))


def test_the_mean_is_nadaraya_watson():
    model = AttentionRegressor(WIDTH).fit(X, Y)
    result, deviation = model.predict(Q, return_std=True)
    np.testing.assert_allclose(model.predict(Q), gaussian() @ Y, rtol=1e-12)
    np.testing.assert_allclose(result, gaussian() @ Y, rtol=1e-12)
    spread = gaussian() @ Y**2 - (gaussian() @ Y) ** 2
    factor, noise = model._variance_fit[:, 0]
    outside = outside_share() * Y.var()
    assert (outside > 0).any() and (outside == 0).any()
    np.testing.assert_allclose(deviation, np.sqrt(factor * spread + noise + outside), rtol=1e-9)
    np.testing.assert_allclose(model.attention_weights(Q), gaussian(), rtol=1e-11)


def test_the_line_is_weighted_least_squares():
    y = np.stack([Y, X[:, 2] ** 2], axis=1)
    model = AttentionRegressor(WIDTH, degree=1).fit(X, y)
    result, deviation = model.predict(Q, return_std=True)
    parts = zip(Q, gaussian(), result, deviation, outside_share(), strict=True)
    for q, alpha, value, off, outside in parts:
        design = np.column_stack([np.ones(40), (X - q) / WIDTH])
        hold = model.ridge_ * np.diag([0, 1, 1, 1])
        line = np.linalg.solve(design.T @ (alpha[:, None] * design) + hold,
                               design.T @ (alpha[:, None] * y))  # fmt: skip
        np.testing.assert_allclose(value, line[0], rtol=1e-9)
        left = y - design @ line
        left -= alpha @ left  # the ridge moves it
        factor, noise = model._variance_fit
        variance = factor * (alpha @ left**2) + noise + outside * y.var(axis=0)
        np.testing.assert_allclose(off**2, variance, rtol=1e-6)


def test_a_straight_line_is_found_again_up_to_its_ends():
    x = np.linspace(0, 1, 30)[:, None]
    model = AttentionRegressor(0.1, degree=1).fit(x, 3 * x[:, 0] + 1)
    np.testing.assert_allclose(model.predict([[0.0], [1.0]]), [1.0, 4.0], atol=0.02)
    assert AttentionRegressor(0.1).fit(x, 3 * x[:, 0] + 1).predict([[0.0]])[0] > 1.1


def test_scott_is_scotts():
    want = X.std(0) * 40 ** (-1 / 7)
    np.testing.assert_allclose(AttentionRegressor("scott").fit(X, Y).bandwidth_, want)


def friedman(rows, seed):
    return make_friedman1(rows, noise=1.0, random_state=seed)


def test_the_default_fits_a_line_with_learned_bandwidths_where_columns_differ():
    x, y = friedman(400, 0)
    model = AttentionRegressor().fit(x, y)
    assert model.degree_ == 1
    # The last five of ten columns are noise.
    assert model.bandwidth_[:5].max() < model.bandwidth_[5:].min()
    learned = AttentionRegressor("learned", degree=1).fit(x, y)
    np.testing.assert_array_equal(model.bandwidth_, learned.bandwidth_)
    assert model.score(*friedman(400, 1)) > 0.88


def test_the_default_takes_one_common_width_where_columns_are_alike():
    x = np.random.default_rng(3).normal(size=(200, 4))
    y = (x**2).sum(1) + np.random.default_rng(4).normal(size=200)
    model = AttentionRegressor(degree=0).fit(x, y)
    common = AttentionRegressor("loo", degree=0).fit(x, y)
    np.testing.assert_array_equal(model.bandwidth_, common.bandwidth_)


def test_the_default_degree():
    wide = np.random.default_rng(0).normal(size=(50, 31))
    assert AttentionRegressor().fit(wide, wide[:, 0]).degree_ == 0
    assert AttentionRegressor(weighting="raw", kernel="cosine").fit(X, Y).degree_ == 0
    assert AttentionRegressor("loo").fit(X, Y).degree_ == 0
    assert AttentionClassifier().fit(X, C).degree_ == 0
    for wrong in (2, True, 0.5):
        with pytest.raises(ArgumentError, match="degree must be 0"):
            AttentionRegressor(degree=wrong).fit(X, Y)


@pytest.mark.parametrize("noise", ["even", "uneven"])
def test_the_deviation_covers_new_values(noise):
    rng = np.random.default_rng(5)

    def draw(rows):
        x = rng.uniform(0, 5, (rows, 1))
        scale = 0.5 if noise == "even" else 0.1 + 0.3 * x[:, 0]
        return x, 2 * np.sin(x[:, 0]) + rng.normal(size=rows) * scale

    for model in (AttentionRegressor(), AttentionRegressor(0.05), AttentionRegressor("scott")):
        value, deviation = model.fit(*draw(400)).predict((test := draw(2000))[0], return_std=True)
        apart = np.abs(test[1] - value) / deviation
        assert abs(np.mean(apart < 1) - 0.68) < 0.06
        assert abs(np.mean(apart < 2) - 0.95) < 0.03


def test_the_deviation_grows_outside_the_rows():
    rng = np.random.default_rng(5)
    x = rng.uniform(0, 5, (200, 1))
    y = np.stack([np.sin(x[:, 0]), 100 * np.cos(x[:, 0])], axis=1)
    model = AttentionRegressor(0.5).fit(x, y + rng.normal(size=y.shape) * [0.1, 10])
    _, deviation = model.predict([[2.5], [5.0], [5.3], [6], [1e9], [-1e9]], return_std=True)
    assert (deviation[:2] < 0.5 * y.std(axis=0)).all()
    assert (np.diff(deviation[1:5], axis=0) > 0).all()
    assert (deviation[4:] >= model._y.std(axis=0)).all()


def test_the_deviation_of_rows_that_fit_exactly_is_zero():
    flat = AttentionRegressor(1.0).fit(X, np.ones(40))
    value, deviation = flat.predict(Q, return_std=True)
    np.testing.assert_allclose(value, 1)
    np.testing.assert_allclose(deviation, 0, atol=1e-7)


@pytest.mark.parametrize(
    "kernel, weighting",
    [
        ("laplace", "softmax"),
        ("epanechnikov", None),
        ("boxcar", Normalized("uniform")),
        ("gaussian", TopK(3)),
        ("dot", "sparsemax"),
        ("cosine", "raw"),
        ("gaussian", "hard"),
        (lambda q, k: -abs(q[..., :1] - k[..., 0]), "entmax15"),
    ],
)
def test_any_kernel_and_weighting_is_one_call_of_attend(kernel, weighting):
    model = AttentionRegressor(WIDTH, kernel=kernel, weighting=weighting).fit(X, Y)
    inside = Normalized("nearest") if weighting is None else weighting
    keys = Q / WIDTH, X / WIDTH
    want = qkv.attend(*keys, Y[:, None], score=kernel, weighting=inside, engine="dense")
    np.testing.assert_allclose(model.predict(Q), want[:, 0], rtol=1e-9, atol=1e-12)
    alpha = model.attention_weights(Q)
    np.testing.assert_allclose(alpha @ Y, want[:, 0], rtol=1e-9, atol=1e-12)


def test_a_query_beyond_all_windows_is_answered_by_the_nearest():
    model = AttentionRegressor(0.1, kernel="boxcar").fit([[0.0], [1.0]], [10.0, 20.0])
    np.testing.assert_array_equal(model.predict([[0.05], [0.9], [7.0]]), [10.0, 20.0, 20.0])


def test_classes_are_pooled_by_the_same_weights():
    model = AttentionClassifier(WIDTH).fit(X, C)
    want = gaussian() @ (C[:, None] == model.classes_)
    np.testing.assert_allclose(model.predict_proba(Q), want, rtol=1e-10)
    np.testing.assert_array_equal(model.predict(Q), model.classes_[want.argmax(1)])


def test_classes_by_a_line_are_sharpened_by_leave_one_out():
    model = AttentionClassifier(WIDTH, degree=1).fit(X, C)
    ones = (C[:, None] == model.classes_).astype(float)
    line = AttentionRegressor(WIDTH, degree=1).fit(X, ones).predict(Q)
    p = np.maximum(line, 0) + 1e-3
    want = p / p.sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(Q), want, rtol=1e-9)
    tuned = AttentionClassifier("loo", degree=1).fit(X, C)
    assert tuned.power_ != 1.0
    np.testing.assert_allclose(tuned.predict_proba(Q).sum(1), 1)
    both = AttentionClassifier("loo", degree=1).fit(X, np.column_stack([C, C]))
    assert both.power_ == pytest.approx(tuned.power_, rel=1e-4)
    np.testing.assert_array_equal(both.predict(Q)[:, 1], tuned.predict(Q))


def test_two_questions_at_once_are_answered_as_each_alone():
    both = np.column_stack([C, np.where(Y > 0, "up", "down")])
    model = AttentionClassifier(WIDTH).fit(X, both)
    for j in range(2):
        alone = AttentionClassifier(WIDTH).fit(X, both[:, j])
        np.testing.assert_allclose(model.predict_proba(Q)[j], alone.predict_proba(Q), rtol=1e-12)
        np.testing.assert_array_equal(model.predict(Q)[:, j], alone.predict(Q))


@pytest.mark.parametrize("kind", [AttentionRegressor, AttentionClassifier])
def test_a_kernel_that_the_weighting_does_not_take_is_refused_by_fit(kind):
    with pytest.raises(CombinationError, match="Gaussian can be negative: use"):
        kind(1.0, kernel="gaussian", weighting="normalized").fit([[0.0], [1.0]], [0, 1])


def test_a_query_without_an_answer_has_all_classes_alike():
    model = AttentionClassifier(0.1, kernel="boxcar", weighting="normalized").fit([[0.0]], ["a"])
    model.partial_fit([[1.0]], ["b"])
    np.testing.assert_array_equal(model.predict_proba([[9.0]]), [[0.5, 0.5]])


@pytest.mark.parametrize("bandwidth", ["auto", "scott", "loo", "learned"])
@pytest.mark.parametrize("degree", [0, 1])
def test_weights_are_repeated_rows(bandwidth, degree):
    twice = COUNTS.astype(int)
    one = AttentionRegressor(bandwidth, degree=degree).fit(X, Y, sample_weight=COUNTS)
    two = AttentionRegressor(bandwidth, degree=degree).fit(X.repeat(twice, 0), Y.repeat(twice))
    for x, y in zip(one.predict(Q, True), two.predict(Q, True), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9)
    alpha = one.attention_weights(Q)
    assert (alpha[:, COUNTS == 0] == 0).all()
    np.testing.assert_allclose(alpha.sum(1), 1)
    many = AttentionClassifier(bandwidth).fit(X.repeat(twice, 0), C.repeat(twice))
    few = AttentionClassifier(bandwidth).fit(X, C, COUNTS)
    np.testing.assert_allclose(few.predict_proba(Q), many.predict_proba(Q), rtol=1e-10)


def test_weights_of_windows_and_without_a_sum():
    model = AttentionRegressor(2.0, kernel="epanechnikov").fit(X, Y, COUNTS)
    alpha = model.attention_weights(Q)
    np.testing.assert_allclose(alpha @ Y, model.predict(Q), rtol=1e-10)
    raw = AttentionRegressor(2.0, kernel="epanechnikov", weighting="raw").fit(X, Y, COUNTS)
    np.testing.assert_allclose(raw.attention_weights(Q) @ Y, raw.predict(Q), rtol=1e-10)


def test_more_rows_are_as_if_they_had_been_there():
    full = AttentionRegressor("loo", degree=1).fit(X, Y, COUNTS + 1)
    parts = AttentionRegressor("loo", degree=1)
    for at in (slice(15), slice(15, 16), slice(16, None)):
        parts.partial_fit(X[at], Y[at], COUNTS[at] + 1)
    np.testing.assert_array_equal(parts.predict(Q), full.predict(Q))
    first = AttentionClassifier().partial_fit(X[:20], C[:20], classes=["never", *set(C)])
    assert "never" in first.classes_
    first.partial_fit(X[20:], C[20:])
    both = AttentionClassifier().fit(X, C)
    np.testing.assert_array_equal(first.predict(Q), both.predict(Q))
    holes = np.where(RNG.random(X.shape) < 0.2, np.nan, X)
    one = AttentionTransformer().partial_fit(holes[:20]).partial_fit(holes[20:]).transform(holes)
    np.testing.assert_array_equal(one, AttentionTransformer().fit(holes).transform(holes))


def test_categories_count_by_equality():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": X[:, 0], "town": np.resize(["Ulm", "Bonn", "Jena"], 40)})
    model = AttentionRegressor([0.5, 0.7], categorical=["town"]).fit(frame, Y)
    query = pandas.DataFrame({"x": [0.1, 0.1], "town": ["Bonn", "Köln"]})
    apart = ((0.1 - X[:, 0]) / 0.5) ** 2 + (frame["town"] != "Bonn") / 0.7**2
    alpha = np.exp(-0.5 * apart)
    assert model.predict(query)[0] == pytest.approx(alpha @ Y / alpha.sum())
    plain = np.exp(-0.5 * ((0.1 - X[:, 0]) / 0.5) ** 2)
    assert model.predict(query)[1] == pytest.approx(plain @ Y / plain.sum())
    line = AttentionRegressor("learned", degree=1, categorical=[False, True]).fit(frame, Y)
    assert line.bandwidth_.shape == (2,)
    assert np.isfinite(line.predict(query)).all()


def test_a_missing_cell_is_predicted_from_the_cells_of_its_row():
    holes = X.copy()
    holes[3, 1] = np.nan
    result = AttentionTransformer(WIDTH).fit(X).transform(holes[:5])
    alpha = gaussian(X[3:4, [0, 2]], X[:, [0, 2]], WIDTH[[0, 2]])[0]
    assert result[3, 1] == pytest.approx(alpha @ X[:, 1])
    result[3, 1] = np.nan
    np.testing.assert_array_equal(result, holes[:5])


def test_a_hole_among_the_rows_counts_for_nothing():
    rows = np.array([[0.0, 10.0], [0.1, np.nan], [5.0, 50.0]])
    model = AttentionTransformer(0.5).fit(rows)
    np.testing.assert_allclose(model.transform([[0.1, np.nan]]), [[0.1, 10.0]], rtol=1e-9)
    np.testing.assert_allclose(model.transform([[np.nan, np.nan]]), [[1.7, 30.0]])


def test_all_cells_pooled_are_a_step_of_mean_shift():
    model = AttentionTransformer(WIDTH, cells="all").fit(X)
    np.testing.assert_allclose(model.transform(Q), gaussian() @ X, rtol=1e-10)


def test_loo_imputes_better_than_the_rule():
    t = RNG.uniform(0, 6, 120)
    full = np.column_stack([np.sin(t), np.cos(t), t])
    holes = full.copy()
    gone = RNG.random(full.shape) < 0.1
    holes[gone] = np.nan
    errors = [
        np.abs(AttentionTransformer(rule).fit_transform(holes) - full)[gone].mean()
        for rule in ("loo", "scott")
    ]
    assert errors[0] < 0.8 * errors[1]


def test_frames_keep_their_names():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=list("abc"), index=range(100, 140))
    model = AttentionTransformer().set_output(transform="pandas")
    result = model.fit_transform(frame)
    assert list(result.columns) == list("abc") and list(result.index) == list(frame.index)
    assert list(model.get_feature_names_out()) == list("abc")
    fitted = AttentionRegressor().fit(frame, Y)
    np.testing.assert_array_equal(fitted.feature_names_in_, list("abc"))
    with pytest.raises(ValueError, match="feature names"):
        fitted.predict(frame[["c", "b", "a"]])


def test_in_a_pipeline_a_grid_a_clone_and_a_pickle():
    steps = make_pipeline(AttentionTransformer(), StandardScaler(), AttentionRegressor())
    grid = {"attentionregressor__bandwidth": [0.1, 0.5, 5.0], "attentionregressor__degree": [0, 1]}
    search = GridSearchCV(steps, grid, cv=2).fit(X, Y)
    assert search.best_params_["attentionregressor__bandwidth"] < 5
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(again.predict(Q), search.predict(Q))
    copy = clone(AttentionClassifier("loo", kernel="laplace", random_state=3))
    assert copy.get_params()["kernel"] == "laplace" and copy.random_state == 3


@pytest.mark.parametrize("degree", [0, 1])
def test_predicting_holds_no_matrix_of_all_pairs(degree):
    x = RNG.normal(size=(8000, 9))
    model = AttentionRegressor(1.0, degree=degree).fit(x, x[:, 0])
    model.predict(x[:10])
    tracemalloc.start()
    model.predict(x[:2000])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2000 * 8000 * 8 / 3


def test_the_precision_of_x_is_kept():
    thin = AttentionTransformer(cells="all").fit_transform(X.astype(np.float32))
    assert thin.dtype == np.float32
    np.testing.assert_allclose(thin, AttentionTransformer(cells="all").fit_transform(X), atol=1e-5)
    line = AttentionRegressor("scott", degree=1).fit(X.astype(np.float32), Y)
    want = AttentionRegressor("scott", degree=1).fit(X, Y).predict(Q)
    np.testing.assert_allclose(line.predict(Q.astype(np.float32)), want, rtol=1e-4)


@pytest.mark.parametrize(
    "work, match",
    [
        (lambda: AttentionRegressor(degree=2).fit(X, Y), "degree must be 0"),
        (lambda: AttentionRegressor(degree=np.ones(2)).fit(X, Y), "degree must be 0"),
        (lambda: AttentionRegressor(kernel="gausian").fit(X, Y), "did you mean 'gaussian'"),
        (lambda: AttentionRegressor(kernel="dot", weighting="raw", degree=1).fit(X, Y), "sum to"),
        (lambda: AttentionRegressor(kernel="dot", weighting="raw").fit(X, Y).predict(Q, True),
         "return_std=True needs weights that sum to 1"),
        (lambda: AttentionRegressor().fit(X, Y, -COUNTS), "sample_weight must not be negative"),
        (lambda: AttentionRegressor().fit(X, Y, [1.0]), "sample_weight has shape"),
        (lambda: AttentionRegressor().fit(X, Y).partial_fit(X, np.ones((40, 2))), "y has shape"),
        (lambda: AttentionRegressor(categorical=["a"]).fit(X, Y), "X has no names"),
        (lambda: AttentionRegressor(categorical=[3]).fit(X, Y), "no column 3"),
        (lambda: AttentionRegressor(categorical="a").fit(X, Y), "must list columns"),
        (lambda: AttentionRegressor(categorical=[0]).fit(X * np.nan, Y), "NaN or infinity"),
        (lambda: AttentionRegressor(categorical=[0]).fit([["a", "b"], ["a", "c"]], [1, 2]),
         "name it in categorical="),
        (lambda: AttentionRegressor().fit([["1", "b"], ["2", "c"]], [1, 2]),
         r"column 1 holds text, such as 'b': name it, categorical=\[1\]"),
        (lambda: AttentionTransformer().fit([["a", 1.0], ["b", 2.0]]), "column 0 .* numbers first"),
        (lambda: AttentionClassifier().partial_fit(X, C, classes=[1, 2]),
         r"classes are numbers, such as 1, but y is text, such as '\w+'"),
        (lambda: AttentionClassifier().fit(X, C).partial_fit(X, np.ones(40)),
         "y is numbers, such as 1.0, but the classes so far are text"),
        (lambda: AttentionClassifier().partial_fit(X, np.c_[C, C], classes=["low"]),
         "classes has 1 lists, but y has 2 columns"),
        (lambda: AttentionTransformer(cells="some").fit(X), "unknown cells 'some'"),
        (lambda: AttentionTransformer("learned").fit(X), "needs a y"),
        (lambda: AttentionTransformer().fit(X * [1, np.nan, 1]), "column 1 has no value"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(work, match):
    with pytest.raises(QkvError, match=match):
        work()


def test_columns_of_any_size_are_looked_at_alike():
    want = AttentionRegressor("loo").fit(X, Y).predict(Q)
    for size in (1e-200, 1e200):
        actual = AttentionRegressor("loo").fit(X * size, Y).predict(Q * size)
        np.testing.assert_allclose(actual, want, rtol=1e-6)


def test_a_bandwidth_that_32_bits_do_not_hold():
    thin, far = X.astype(np.float32), Q.astype(np.float32)
    for width in (1e-60, 1e60):
        want = AttentionRegressor(width).fit(X.astype(np.float32).astype(float), Y)
        actual = AttentionRegressor(width).fit(thin, Y).predict(far)
        np.testing.assert_allclose(actual, want.predict(far.astype(float)), rtol=1e-5)


def test_dates_are_distinguished_from_numbers():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1.0, 2.0], "day": pandas.date_range("2020-01-01", periods=2)})
    with pytest.raises(QkvError, match=r"column 'day' holds dates, such as .*2020.*numbers"):
        AttentionRegressor().fit(frame, [1, 2])
    with pytest.raises(QkvError, match=r"column 'day' holds dates"):
        AttentionRegressor(categorical=["x"]).fit(frame, [1, 2])
    with pytest.raises(QkvError, match="column 1 holds dates"):
        AttentionRegressor(categorical=["x"]).fit(frame.astype(object), [1, 2])


def test_names_of_columns_are_looked_up():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"town": ["a", "b", "c"], "x": [1.0, 2.0, 3.0]})
    with pytest.raises(QkvError, match=r"X: column 'town' .* categorical=\['town'\]"):
        AttentionRegressor().fit(frame, [1, 2, 3])
    with pytest.raises(QkvError, match="did you mean 'town'"):
        AttentionRegressor(categorical=["towm"]).fit(frame, [1, 2, 3])


def test_a_missing_extra_is_one_line(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("qkv.sklearn")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(qkv.QkvError, match=r'^qkv.sklearn needs scikit-learn: pip install "qkv'):
        __import__("qkv.sklearn")


def test_one_number_as_a_table_is_refused_as_elsewhere():
    with pytest.raises(ValueError, match="Expected 2D array, got scalar"):
        AttentionRegressor().fit(3.0, Y)
