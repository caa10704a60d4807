"""The regressor ŷ(x) = Σᵢ α(x, xᵢ) yᵢ, or a line through the yᵢ near x."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import MultiOutputMixin, RegressorMixin

from qkv.sklearn.base import MIN_ROWS_TO_LEARN, AttentionEstimator
from qkv.sklearn.columns import Numbers
from qkv.sklearn.deviation import fit_variance


class AttentionRegressor(MultiOutputMixin, RegressorMixin, AttentionEstimator):
    """ŷ(x) = Σᵢ α(x, xᵢ) yᵢ, or a line through the yᵢ near x, with any score and weighting.

    X is (m, d), y (m,) or (m, p). Keys and queries are divided by the `bandwidth` before they are
    compared. It may be:

    - "auto", the default: "learned" if the left-out rows are so much more likely under it that one
      number per column is justified (Akaike's criterion), else "loo".
    - "learned": one for each column, by gradient descent on the leave-one-out error. With a score
      other than the Gaussian, the ratios of the columns come from the Gaussian, and the common
      factor from "loo".
    - "loo": one multiple of the columns' standard deviations, or one number for all columns, with
      the smallest leave-one-out error.
    - "scott": standard deviation × m^(−1/(d + 4)).
    - a number, or one for each column; None means 1.

    `degree` 0 predicts the weighted mean. `degree` 1 fits a weighted least-squares line, with less
    bias on slopes and at the edges. None means 1 if the bandwidth is "auto" and X has at most 30
    columns, else 0.

    `weighting` None is softmax; for window scores it divides by the sum, and takes the nearest row
    if the window is empty. `categorical` lists columns, by name or index, that are compared for
    equality; all others must be numbers. Bandwidths are learned from at most `sample` rows, drawn
    with `random_state`. In `fit`, a row with `sample_weight` w counts w times.

    After `fit`, `bandwidth_` (d,) holds the bandwidths, `degree_` the degree and `ridge_` the ridge
    of the line in squared bandwidths.

    >>> import numpy as np
    >>> X = np.linspace(0, 4, 9)[:, None]
    >>> model = AttentionRegressor(bandwidth=0.2).fit(X, X[:, 0] ** 2)
    >>> model.predict([[1.0], [2.25]]).round(3)
    array([1.02 , 5.126])
    >>> mean, deviation = model.predict([[2.25]], return_std=True)
    >>> deviation.round(3)
    array([1.063])
    """

    _automatic_degree = 1

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> AttentionRegressor:
        """Store the rows X (m, d) and y (m,) or (m, p), and find the bandwidth."""
        X, y = self._validate_input(X, y=y, multi_output=True, y_numeric=True)
        return self._fit_values(X, y, self._check_sample_weight(sample_weight, X))

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> AttentionRegressor:
        """Add rows; the same as `fit` on all rows, so the bandwidth is found again."""
        if not hasattr(self, "_X"):
            return self.fit(X, y, sample_weight)
        X, y = self._validate_input(X, y=y, multi_output=True, y_numeric=True, reset=False)
        return self._fit_values(
            *self._append_rows(X, y, self._check_sample_weight(sample_weight, X))
        )

    def _fit_values(self, X: Any, y: Numbers, counts: Numbers) -> AttentionRegressor:
        values = y.reshape(len(y), -1).astype(np.float64)
        centre = np.average(values, axis=0, weights=counts)
        spread = np.sqrt(np.average((values - centre) ** 2, axis=0, weights=counts))
        unit = np.where(spread > 0, spread, 1)
        self._fit_rows(X, (values - centre) / unit, counts)
        self._y, self._values, self._centre = y, values[counts > 0], centre
        self._variance_fit = self._fit_deviation((self._values - centre) / unit, counts[counts > 0])
        self._variance_fit[1] *= unit**2
        self._value_variance = spread**2
        return self

    def _fit_deviation(self, value: Numbers, counts: Numbers) -> Numbers:
        """Return a and b (2, p) of the predicted variance σ² = a s² + b, by leave-one-out."""
        p, one = value.shape[1], np.ones(len(self.bandwidth_))
        fits = np.array([np.ones(p), np.zeros(p)])
        if not self._resolve_attention()["weighting"].is_convex:
            return fits
        # The keys are in bandwidths already, so the spread and the width are 1.
        rows, fewer = self._sample_examples(self._keys, value, counts, one)
        if len(rows.key) < MIN_ROWS_TO_LEARN:
            return fits
        predicted, variance = rows.left_out_variance(one / fewer, self.ridge_)
        for j in range(p):
            error = predicted[:, j] - rows.value[:, j]
            fits[:, j] = fit_variance(error, variance[:, j], rows.weight)
        return fits

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return ŷ (n,) or (n, p).

        With `return_std` also return the standard deviation of y at x: about 68 % of new values lie
        within ±1 and 95 % within ±2 of it. Its square is a Σᵢ αᵢ (yᵢ − ŷ)² + b, where a and b come
        from the errors of left-out rows. If x is outside the range of the rows by e bandwidths, the
        variance of y times 1 − exp(−e²) is added: no row says what y is there.
        """
        query = self._scale_queries(X)
        if return_std:
            self._require_convex("return_std=True")
        if not self._slope_mask.any() and not return_std:
            return self._restore_shape(self._pool_values(query, self._values))
        values, p = self._values - self._centre, self._values.shape[1]
        if return_std:
            values = np.concatenate([values, values**2], axis=1)
        found = list(self._fit_lines(query, values))
        value = np.concatenate([line.value[:, :p] for line in found]) + self._centre
        if not return_std:
            return self._restore_shape(value)
        variance = np.maximum(np.concatenate([line.variance(p) for line in found]), 0)
        factor, noise = self._variance_fit
        outside = self._outside_share(query)[:, None] * self._value_variance
        deviation = np.sqrt(factor * variance + noise + outside)
        return self._restore_shape(value), self._restore_shape(deviation)

    def _outside_share(self, query: Numbers) -> Numbers:
        """Return 1 − exp(−e²) (n,), where e is the distance of each query (n, D) from the range of
        the keys, in bandwidths; 0 inside."""
        low, high = self._keys.min(axis=0), self._keys.max(axis=0)
        excess = np.asarray(query - np.clip(query, low, high), np.float64)
        return np.asarray(-np.expm1(-np.square(np.minimum(np.abs(excess), 1e3)).sum(axis=1)))

    def _restore_shape(self, values: Numbers) -> Numbers:
        return values[:, 0] if self._y.ndim == 1 else values
