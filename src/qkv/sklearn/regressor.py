"""The regressor ŷ(x) = Σᵢ α(x, xᵢ) yᵢ, or a line through the yᵢ near x."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import MultiOutputMixin, RegressorMixin

from qkv.sklearn.base import AttentionEstimator
from qkv.sklearn.columns import Numbers


class AttentionRegressor(MultiOutputMixin, RegressorMixin, AttentionEstimator):
    """ŷ(x) = Σᵢ α(x, xᵢ) yᵢ: the Nadaraya–Watson estimator, with any score and weighting.

    X is (m, d), y (m,) or (m, p). Keys and queries are divided by the `bandwidth` before they are
    compared. It may be:

    - a number, or one for each column; None means 1.
    - "scott": standard deviation × m^(−1/(d + 4)).
    - "loo": one multiple of the columns' standard deviations, or one number for all columns, with
      the smallest leave-one-out error.
    - "learned": one for each column, by gradient descent on the leave-one-out error. With a score
      other than the Gaussian, the ratios of the columns come from the Gaussian, and the common
      factor from "loo".

    `degree` 0 predicts the weighted mean. `degree` 1 fits a weighted least-squares line, with less
    bias on slopes and at the edges.

    `weighting` None is softmax; for window scores it divides by the sum, and takes the nearest row
    if the window is empty. `categorical` lists columns, by name or index, that are compared for
    equality; all others must be numbers. Bandwidths are learned from at most `sample` rows, drawn
    with `random_state`. In `fit`, a row with `sample_weight` w counts w times.

    After `fit`, `bandwidth_` (d,) holds the bandwidths and `ridge_` the ridge of the line in
    squared bandwidths.

    >>> import numpy as np
    >>> X = np.linspace(0, 4, 9)[:, None]
    >>> model = AttentionRegressor(bandwidth=0.2).fit(X, X[:, 0] ** 2)
    >>> model.predict([[1.0], [2.25]]).round(3)
    array([1.02 , 5.126])
    >>> mean, deviation = model.predict([[2.25]], return_std=True)
    >>> deviation.round(3)
    array([1.134])
    """

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
        self._fit_rows(X, (values - centre) / np.where(spread > 0, spread, 1), counts)
        self._y, self._values, self._centre = y, values[counts > 0], centre
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return ŷ (n,) or (n, p).

        With `return_std` also return √Σᵢ αᵢ (yᵢ − ŷᵢ)², the weighted standard deviation of the
        values around their mean or line.
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
        variance = [x.mean[:, p:] - x.mean[:, :p] ** 2 - x.explained[:, :p] for x in found]
        deviation = np.sqrt(np.maximum(np.concatenate(variance), 0))
        return self._restore_shape(value), self._restore_shape(deviation)

    def _restore_shape(self, values: Numbers) -> Numbers:
        return values[:, 0] if self._y.ndim == 1 else values
