"""The classifier p(class | x) = Σᵢ α(x, xᵢ) [yᵢ = class]."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets

from qkv.errors import ArgumentError
from qkv.sklearn.bandwidth import MIN_PROBABILITY, Examples, log_loss
from qkv.sklearn.base import LEARNED_DECIMALS, AttentionEstimator
from qkv.sklearn.columns import Numbers


class AttentionClassifier(ClassifierMixin, AttentionEstimator):
    """p(c | x) = Σᵢ α(x, xᵢ) [yᵢ = c]: the share of weight of the rows with class c.

    X is (m, d), y (m,), or (m, p) for p outputs; then `classes_` and `predict_proba` are lists. The
    parameters are those of `AttentionRegressor`, but `degree` None always means 0. A bandwidth by
    leave-one-out minimizes the log loss of the rows left out.

    With `degree=1` the lines may rise above 1 or fall below 0. Negative values are set to 0, each
    class gets 0.001, and all are raised to the power `power_`, also found by leave-one-out, and
    divided by their sum.

    >>> X, y = [[0.0], [0.2], [1.0], [1.2]], ["low", "low", "high", "high"]
    >>> model = AttentionClassifier(bandwidth=0.5).fit(X, y)
    >>> model.predict([[0.3]])
    array(['low'], dtype='<U4')
    >>> model.predict_proba([[0.3]]).round(2), model.classes_
    (array([[0.24, 0.76]]), array(['high', 'low'], dtype='<U4'))
    """

    _loss = staticmethod(log_loss)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> AttentionClassifier:
        """Store the rows X (m, d) and their classes y, and find the bandwidth."""
        X, y = self._validate_input(X, y=y, multi_output=True)
        return self._fit_classes(X, y, self._check_sample_weight(sample_weight, X), None)

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> AttentionClassifier:
        """Add rows, and fit all again. `classes` may name classes that no row has yet."""
        first = not hasattr(self, "_X")
        X, y = self._validate_input(X, y=y, multi_output=True, reset=first)
        counts = self._check_sample_weight(sample_weight, X)
        if first:
            return self._fit_classes(X, y, counts, classes)
        _check_same_kind("y is", y, "the classes so far are", self._y)
        if classes is None:
            classes = self.classes_
        return self._fit_classes(*self._append_rows(X, y, counts), classes)

    def _fit_classes(
        self, X: Any, y: Numbers, counts: Numbers, classes: Any
    ) -> AttentionClassifier:
        check_classification_targets(y)
        self._y, columns = y, y.reshape(len(y), -1).T
        known = [None] * len(columns) if classes is None else classes
        known = [known] if y.ndim == 1 and classes is not None else known
        if len(known) != len(columns):
            raise ArgumentError(
                f"classes has {len(known)} lists, but y has {len(columns)} columns: "
                "pass one list for each column"
            )
        if classes is not None:
            for column, names_given in zip(columns, known, strict=True):
                _check_same_kind("classes are", np.asarray(names_given), "y is", column)
        all_names = [np.unique(column) if names_given is None else np.union1d(column, names_given)
                 for column, names_given in zip(columns, known, strict=True)]  # fmt: skip
        self.classes_ = all_names[0] if y.ndim == 1 else all_names
        ones = [column[:, None] == names for column, names in zip(columns, all_names, strict=True)]
        values = np.concatenate(ones, axis=1).astype(np.float64)
        self.power_ = 1.0
        self._fit_rows(X, values, counts)
        self._values = values[counts > 0]
        return self

    def _search_bandwidth(
        self, rows: Examples, fewer: float, spread: Numbers
    ) -> tuple[Numbers, float]:
        """Return the bandwidth and the ridge.

        For lines, also set the power with the smallest log loss; their probabilities alone are too
        soft.
        """
        from scipy.optimize import minimize_scalar

        width, ridge = super()._search_bandwidth(rows, fewer, spread)
        if not rows.slope_mask.any():
            return width, ridge
        predicted = rows.predict_left_out(width / spread / fewer, ridge).round(LEARNED_DECIMALS)
        targets = rows.weight[:, None] * rows.value

        def power_loss(power: float) -> float:
            return -float(
                (
                    targets * np.log(np.concatenate(self._normalize_classes(predicted, power), 1))
                ).sum()
            )

        self.power_ = float(minimize_scalar(power_loss, bounds=(0.5, 20), method="bounded").x)
        return width, ridge

    def predict_proba(self, X: Any) -> Any:
        """Return p (n, classes), or a list for several outputs; equal shares if no row answers."""
        query = self._scale_queries(X)
        if self._slope_mask.any():
            lines = self._fit_lines(query, self._values)
            parts = self._normalize_classes(np.concatenate([x.value for x in lines]), self.power_)
        else:
            parts = self._normalize_classes(self._pool_values(query, self._values))
        return parts[0] if self._y.ndim == 1 else parts

    def _normalize_classes(self, predicted: Numbers, power: float | None = None) -> list[Numbers]:
        """Divide the classes of each output by their sum; for lines, after clipping and power."""
        many = [self.classes_] if self._y.ndim == 1 else self.classes_
        predicted = np.maximum(predicted, 0)
        if power is not None:
            predicted = (predicted + MIN_PROBABILITY) ** power
        ends = np.cumsum([len(names) for names in many])[:-1]
        return [_normalize_rows(part) for part in np.split(predicted, ends, axis=1)]

    def predict(self, X: Any) -> Numbers:
        """Return the most probable class (n,), or (n, p)."""
        probabilities = self.predict_proba(X)
        if self._y.ndim == 1:
            return np.asarray(self.classes_[probabilities.argmax(1)])
        both = zip(self.classes_, probabilities, strict=True)
        return np.stack([names[p.argmax(1)] for names, p in both], axis=1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _check_same_kind(
    first: str, first_classes: Numbers, second: str, second_classes: Numbers
) -> None:
    """Raise if some classes are numbers and others text: they would never be equal."""
    kinds = [
        "numbers" if x.dtype.kind in "biuf" else "text" for x in (first_classes, second_classes)
    ]
    if kinds[0] != kinds[1] and "O" not in (first_classes.dtype.kind, second_classes.dtype.kind):
        examples = [x.flat[0].item() if x.size else None for x in (first_classes, second_classes)]
        raise ArgumentError(
            f"{first} {kinds[0]}, such as {examples[0]!r}, "
            f"but {second} {kinds[1]}, such as {examples[1]!r}: "
            "use numbers for both, or text for both"
        )


def _normalize_rows(shares: Numbers) -> Numbers:
    total = shares.sum(1, keepdims=True)
    return np.where(total > 0, shares / np.where(total > 0, total, 1), 1 / shares.shape[1])
