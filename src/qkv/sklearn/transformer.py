"""x̂ⱼ = Σᵢ α(x, xᵢ) xᵢⱼ: cells from the rows that are like theirs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from sklearn.base import OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from qkv.errors import ArgumentError, unknown
from qkv.sklearn.bandwidth import RIDGE, Examples, common, scott
from qkv.sklearn.base import Attentive
from qkv.sklearn.columns import Features, Numbers

CELLS = ("missing", "all")


def each_by_the_others(rows: Examples, width: Numbers, ridge: float) -> float:
    """The sum of the columns' errors, each told by the other columns; `value` (m, d) says how much
    a cell counts."""
    columns, flat = Features.of(rows.key[:, 1:], []), rows.sloped[1:]
    total = 0.0
    for j in range(len(width)):
        key, weight = np.delete(rows.key, j, axis=1), rows.value[:, j]
        part = replace(
            rows, key=key, value=rows.key[:, [j]], weight=weight, columns=columns, sloped=flat
        )
        total += part.error(np.delete(width, j), ridge)
    return total


class AttentionTransformer(OneToOneFeatureMixin, TransformerMixin, Attentive):
    """x̂ⱼ = Σᵢ α(x, xᵢ) xᵢⱼ: cells pooled from the rows that are like theirs.

    Of X (n, d) the `cells` that are "missing" (NaN) are filled, by the columns that are there: soft
    imputation. Or "all" are replaced: noise is averaged away, and on the rows that were fitted each
    call is a step of mean shift. Rows that lack a cell do not count for it; where none counts, the
    column's mean stands.

    `bandwidth` is a number, one for each column, "scott", or "loo": the multiple of the columns'
    standard deviations that tells each cell best by the rest of its row.

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
            bandwidth, kernel=kernel, weighting=weighting, sample=sample, random_state=random_state
        )
        self.cells = cells

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> AttentionTransformer:
        """Keep the rows X (m, d), in which cells may be NaN, and find the bandwidth."""
        X = self._checked(X)
        return self._fit(X, self._counted(sample_weight, X))

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> AttentionTransformer:
        """More rows: the same as `fit` on all."""
        if not hasattr(self, "_X"):
            return self.fit(X, y, sample_weight)
        X = self._checked(X, reset=False)
        counts = self._counted(sample_weight, X)
        return self._fit(np.concatenate([self._X, X]), np.concatenate([self._counts, counts]))

    def _fit(self, X: Numbers, counts: Numbers) -> AttentionTransformer:
        if self.cells not in CELLS:
            raise unknown("cells", self.cells, CELLS)
        kept = counts > 0
        self._there = ~np.isnan(X[kept])
        if not self._there.any(0).all():
            empty = int(np.argmin(self._there.any(0)))
            name = getattr(self, "feature_names_in_", range(X.shape[1]))[empty]
            raise ArgumentError(f"X: column {name!r} has no value in any row: leave it out")
        shares = counts[kept, None] * self._there
        self._values = np.where(self._there, X[kept], 0)
        self._means = (self._values * shares).sum(0) / shares.sum(0)
        filled = X.copy()
        filled[kept] = np.where(self._there, X[kept], self._means)
        self._keep(filled, filled, counts)
        if not self._there.all():  # by their means at first, by each other then
            self._keys = self._scaled(self._filled(X[kept], "missing"))
        self._X = X
        return self

    def _width(
        self, key: Numbers, value: Numbers, counts: Numbers, spread: Numbers
    ) -> tuple[Numbers, float]:
        share = (counts[:, None] * self._there).sum(0) / counts.sum()
        # The cells that were filled with the mean have no spread of their own.
        return super()._width(key, self._there * counts[:, None], counts, spread / np.sqrt(share))

    def _searched(self, rows: Examples, fewer: float, spread: Numbers) -> tuple[Numbers, float]:
        if self.bandwidth == "learned":
            raise ArgumentError('bandwidth "learned" needs a y to learn from: choose "loo"')
        if len(spread) == 1:
            return spread * scott(rows.weight.sum(), 1) * fewer, RIDGE
        units = [np.ones(len(spread))]
        found, ridge = common(partial(each_by_the_others, rows), units, (RIDGE,))
        return spread * found * fewer, ridge

    def transform(self, X: Any) -> Numbers:
        """X (n, d) with its missing cells filled, or with all of them pooled."""
        check_is_fitted(self)
        return self._filled(self._checked(X, reset=False), self.cells)

    def _filled(self, X: Numbers, cells: str) -> Numbers:
        missing, out = np.isnan(X), X.copy()
        patterns, which = np.unique(missing, axis=0, return_inverse=True)
        for i, gone in enumerate(patterns):
            if cells == "missing" and not gone.any():
                continue
            rows = which.ravel() == i
            found = self._told(X[rows], ~gone)
            out[rows] = found if cells == "all" else np.where(gone, found, X[rows])
        return out

    def _told(self, X: Numbers, seen: Numbers) -> Numbers:
        """All columns (n, d) of rows of which some columns are seen."""
        if not seen.any():
            return np.broadcast_to(self._means, X.shape)
        values = np.concatenate([self._values, self._there], axis=1)
        found = self._pooled(self._scaled(X)[:, seen], values, seen)
        pooled, shares = np.split(found, 2, axis=1)
        return np.where(shares > 0, pooled / np.where(shares > 0, shares, 1), self._means)

    def _checked(self, X: Any, **options: Any) -> Any:
        return super()._checked(X, ensure_all_finite="allow-nan", **options)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
