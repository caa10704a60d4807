"""The transformer x̂ⱼ = Σᵢ α(x, xᵢ) xᵢⱼ: cells pooled from similar rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from sklearn.base import OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from qkv.errors import ArgumentError, unknown_name_error
from qkv.sklearn.bandwidth import DEFAULT_RIDGE, Examples, scott_factor, search_common_width
from qkv.sklearn.base import AttentionEstimator
from qkv.sklearn.columns import Features, Numbers

CELL_CHOICES = ("missing", "all")


def cross_column_error(rows: Examples, width: Numbers, ridge: float) -> float:
    """Return the sum of the columns' errors, each column predicted from the others.

    `value` (m, d) is the weight of each cell.
    """
    columns, flat = Features.from_table(rows.key[:, 1:], []), rows.slope_mask[1:]
    total = 0.0
    for j in range(len(width)):
        key, weight = np.delete(rows.key, j, axis=1), rows.value[:, j]
        part = replace(
            rows, key=key, value=rows.key[:, [j]], weight=weight, columns=columns, slope_mask=flat
        )
        total += part.leave_one_out_error(np.delete(width, j), ridge)
    return total


class AttentionTransformer(OneToOneFeatureMixin, TransformerMixin, AttentionEstimator):
    """x̂ⱼ = Σᵢ α(x, xᵢ) xᵢⱼ: cells pooled from similar rows.

    `cells` selects the cells of X (n, d) that are replaced:

    - "missing": NaN cells are filled, by the columns that the row has (soft imputation).
    - "all": every cell is replaced, which averages noise out. On the fitted rows, each call is a
      step of mean shift.

    A row without a cell does not count for that column. If no row counts, the result is the
    column's mean.

    `bandwidth` is a number, one for each column, "scott", or "loo": the multiple of the columns'
    standard deviations that best predicts each cell from the rest of its row.

    >>> import numpy as np
    >>> X = np.array([[1.0, 10.0], [2.0, 20.0], [9.0, 90.0]])
    >>> AttentionTransformer(bandwidth=1.0).fit(X).transform([[1.5, np.nan]])
    array([[ 1.5, 15. ]])
    """

    def __init__(
        self,
        bandwidth: Any = "scott",
        *,
        cells: str = "missing",
        kernel: Any = "gaussian",
        weighting: Any = None,
        sample: int = 500,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            bandwidth,
            degree=0,
            kernel=kernel,
            weighting=weighting,
            sample=sample,
            random_state=random_state,
        )
        self.cells = cells

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> AttentionTransformer:
        """Store the rows X (m, d), whose cells may be NaN, and find the bandwidth."""
        X = self._validate_input(X)
        return self._fit_cells(X, self._check_sample_weight(sample_weight, X))

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> AttentionTransformer:
        """Add rows; the same as `fit` on all rows."""
        if not hasattr(self, "_X"):
            return self.fit(X, y, sample_weight)
        X = self._validate_input(X, reset=False)
        counts = self._check_sample_weight(sample_weight, X)
        return self._fit_cells(np.concatenate([self._X, X]), np.concatenate([self._counts, counts]))

    def _fit_cells(self, X: Numbers, counts: Numbers) -> AttentionTransformer:
        if self.cells not in CELL_CHOICES:
            raise unknown_name_error("cells", self.cells, CELL_CHOICES)
        has_weight = counts > 0
        self._observed = ~np.isnan(X[has_weight])
        if not self._observed.any(0).all():
            empty = int(np.argmin(self._observed.any(0)))
            name = getattr(self, "feature_names_in_", range(X.shape[1]))[empty]
            raise ArgumentError(f"X: column {name!r} has no value in any row: leave it out")
        shares = counts[has_weight, None] * self._observed
        self._values = np.where(self._observed, X[has_weight], 0)
        self._means = (self._values * shares).sum(0) / shares.sum(0)
        filled = X.copy()
        filled[has_weight] = np.where(self._observed, X[has_weight], self._means)
        self._fit_rows(filled, filled, counts)
        if not self._observed.all():  # filled with means first, then from each other
            self._keys = self._scale_vectors(self._fill_cells(X[has_weight], "missing"))
        self._X = X
        return self

    def _find_bandwidth(
        self, key: Numbers, value: Numbers, counts: Numbers, spread: Numbers
    ) -> tuple[Numbers, float]:
        share = (counts[:, None] * self._observed).sum(0) / counts.sum()
        # Cells that were filled with the mean do not contribute to the spread.
        return super()._find_bandwidth(
            key, self._observed * counts[:, None], counts, spread / np.sqrt(share)
        )

    def _search_bandwidth(
        self, rows: Examples, fewer: float, spread: Numbers
    ) -> tuple[Numbers, float]:
        if self.bandwidth == "learned":
            raise ArgumentError('bandwidth "learned" needs a y to learn from: choose "loo"')
        if len(spread) == 1:
            return spread * scott_factor(rows.weight.sum(), 1) * fewer, DEFAULT_RIDGE
        units = [np.ones(len(spread))]
        found, ridge = search_common_width(
            partial(cross_column_error, rows), units, (DEFAULT_RIDGE,)
        )
        return spread * found * fewer, ridge

    def transform(self, X: Any) -> Numbers:
        """Return X (n, d) with its missing cells filled, or with all cells pooled."""
        check_is_fitted(self)
        return self._fill_cells(self._validate_input(X, reset=False), self.cells)

    def _fill_cells(self, X: Numbers, cells: str) -> Numbers:
        missing, out = np.isnan(X), X.copy()
        patterns, which = np.unique(missing, axis=0, return_inverse=True)
        for i, gone in enumerate(patterns):
            if cells == "missing" and not gone.any():
                continue
            rows = which.ravel() == i
            found = self._predict_columns(X[rows], ~gone)
            out[rows] = found if cells == "all" else np.where(gone, found, X[rows])
        return out

    def _predict_columns(self, X: Numbers, seen: Numbers) -> Numbers:
        """Return all columns (n, d) of rows of which only the columns `seen` are known."""
        if not seen.any():
            return np.broadcast_to(self._means, X.shape)
        values = np.concatenate([self._values, self._observed], axis=1)
        found = self._pool_values(self._scale_vectors(X)[:, seen], values, seen)
        pooled, shares = np.split(found, 2, axis=1)
        return np.where(shares > 0, pooled / np.where(shares > 0, shares, 1), self._means)

    def _validate_input(self, X: Any, **options: Any) -> Any:
        return super()._validate_input(X, ensure_all_finite="allow-nan", **options)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
