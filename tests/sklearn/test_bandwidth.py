"""Leave-one-out, against a loop that leaves rows out, and its gradient against differences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("sklearn")

from qkv.errors import QkvError
from qkv.scores import Gaussian, Laplace
from qkv.sklearn import AttentionClassifier, AttentionRegressor
from qkv.sklearn.bandwidth import DEFAULT_RIDGE, Examples, learn_widths, log_loss, squared_error
from qkv.sklearn.columns import Features
from qkv.weightings import Softmax

M, D = 24, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(M, D))
Y = np.stack([np.sin(2 * X[:, 0]) + 0.1 * X[:, 1], X[:, 2] ** 2], axis=1)
COUNTS = RNG.uniform(0.5, 2.0, M)
FLAT, SLOPED = np.zeros(D, dtype=bool), np.ones(D, dtype=bool)


def rows_of(loss=squared_error, sloped=FLAT, value=Y, score=None):
    return Examples(X, value, COUNTS, Features.from_table(X, []), loss, sloped, score or Gaussian(),
                Softmax())  # fmt: skip


def alone(i, width, ridge, degree):
    """Row i from the others: weighted least squares of a mean or a line, as a textbook has it."""
    others = np.arange(M) != i
    apart = (X[others] - X[i]) / width
    alpha = np.exp(-0.5 * (apart**2).sum(1)) * COUNTS[others]
    alpha /= alpha.sum()
    design = np.concatenate([np.ones((M - 1, 1)), apart[:, : D * degree]], axis=1)
    hold = ridge * np.eye(design.shape[1])
    hold[0, 0] = 0
    normal = design.T @ (alpha[:, None] * design) + hold
    return np.linalg.solve(normal, design.T @ (alpha[:, None] * Y[others]))[0]


@pytest.mark.parametrize("degree", [0, 1])
def test_leave_one_out_is_the_loop(degree):
    width, ridge = np.array([0.7, 1.3, 0.9]), 0.05
    predicted = np.stack([alone(i, width, ridge, degree) for i in range(M)])
    want = (COUNTS[:, None] * (predicted - Y) ** 2).sum() / COUNTS.sum()
    rows = rows_of(sloped=SLOPED if degree else FLAT)
    assert rows.leave_one_out_error(width, ridge) == pytest.approx(want, rel=1e-10)
    assert rows.error_gradient(width, ridge)[0] == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize(
    "rows",
    [
        rows_of(),
        rows_of(sloped=SLOPED),
        rows_of(sloped=np.array([True, False, True])),
        rows_of(log_loss, value=np.eye(2)[(X[:, 0] > 0).astype(int)]),
    ],
    ids=["mean", "line", "line in two columns", "classes"],
)
def test_the_gradient_is_that_of_differences(rows):
    at = np.array([-0.3, 0.2, 0.1, -2.0])

    def loss(t):
        return rows.leave_one_out_error(np.exp(t[:D]), np.exp(t[D]))

    _, by_width, by_ridge = rows.error_gradient(np.exp(at[:D]), np.exp(at[D]))
    steps = 1e-5 * np.eye(D + 1)
    want = [(loss(at + step) - loss(at - step)) / 2e-5 for step in steps]
    np.testing.assert_allclose([*by_width, by_ridge], want, rtol=1e-6, atol=1e-9)


def test_categories_share_the_gradient_of_their_column():
    table = np.column_stack([X[:, 0], RNG.integers(0, 3, M)])
    columns = Features.from_table(table, [1])
    rows = replace(
        rows_of(), key=columns.to_vectors(table), columns=columns, slope_mask=np.zeros(4, bool)
    )
    at, step = np.array([0.8, 0.6]), np.array([0.0, 1e-5])
    around = [rows.leave_one_out_error(at * np.exp(sign * step)) for sign in (1, -1)]
    assert rows.error_gradient(at)[1].shape == (2,)
    assert rows.error_gradient(at)[1][1] == pytest.approx((around[0] - around[1]) / 2e-5, rel=1e-6)


def test_blocks_of_rows_make_no_difference(monkeypatch):
    rows, width = rows_of(sloped=SLOPED), np.ones(D)
    want = rows.error_gradient(width)
    monkeypatch.setattr("qkv.sklearn.bandwidth.MAX_WEIGHTS_PER_BLOCK", 5 * M)
    for one, two in zip(rows.error_gradient(width), want, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12)


def test_learned_lowers_the_error_and_finds_what_counts():
    x = RNG.uniform(-2, 2, (150, 3))
    y = np.sin(2 * x[:, 0]) + 0.05 * RNG.normal(size=150)
    model = AttentionRegressor("learned", degree=1).fit(x, y)
    useful, *useless = model.bandwidth_
    assert 3 * useful < min(useless)
    rule = AttentionRegressor("scott", degree=1).fit(x, y)
    q = RNG.uniform(-1.5, 1.5, (80, 3))
    errors = [np.abs(m.predict(q) - np.sin(2 * q[:, 0])).mean() for m in (model, rule)]
    assert errors[0] < 0.5 * errors[1]
    again = learn_widths(rows_of(), np.ones(D))
    assert rows_of().leave_one_out_error(*again) < rows_of().leave_one_out_error(
        np.ones(D), DEFAULT_RIDGE
    )


@pytest.mark.parametrize("kernel", [Laplace(), Gaussian(0.5)])
def test_other_kernels_are_as_wide_as_leave_one_out_says(kernel):
    model = AttentionRegressor("learned", kernel=kernel).fit(X, Y)
    spread, centred = X.std(0), (Y - Y.mean(0)) / Y.std(0)
    rows = rows_of(value=centred, score=kernel)
    rows = replace(rows, key=X / spread, weight=np.ones(M))
    result = model.bandwidth_ / spread
    assert rows.leave_one_out_error(result) < min(
        rows.leave_one_out_error(0.8 * result), rows.leave_one_out_error(1.25 * result)
    )


def test_loo_takes_one_number_for_columns_that_are_alike():
    x = RNG.normal(size=(120, 3)) * (2.0, 0.02, 0.02)  # the small columns are noise
    model = AttentionRegressor("loo").fit(x, np.sin(x[:, 0]))
    assert np.ptp(model.bandwidth_) == pytest.approx(0, abs=1e-12)


def test_a_sample_is_drawn_by_the_state_and_widths_shrink_to_all_rows():
    x = RNG.normal(size=(300, 2))
    y = (x[:, 0] > 0).astype(int)

    def widths(state):
        return AttentionClassifier("loo", sample=60, random_state=state).fit(x, y).bandwidth_

    np.testing.assert_array_equal(widths(0), widths(0))
    assert not np.array_equal(widths(0), widths(1))


@pytest.mark.parametrize(
    "bandwidth, match",
    [
        ("scot", "unknown bandwidth 'scot': did you mean 'scott'"),
        (-1.0, "bandwidth must be above 0"),
        ([1.0, 2.0], "bandwidth has shape .2,., but X has 3 columns"),
        ([[1.0], 2.0], "bandwidth must be a number"),
    ],
)
def test_a_bandwidth_that_means_nothing_is_refused(bandwidth, match):
    with pytest.raises(QkvError, match=match):
        AttentionRegressor(bandwidth).fit(X, Y)
