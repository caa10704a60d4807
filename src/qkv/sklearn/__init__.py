"""scikit-learn estimators: the rows of X are keys, and those of y are values.

    ŷ(x) = Σᵢ α(x, xᵢ) yᵢ

- `AttentionRegressor` is the Nadaraya–Watson estimator with any score and weighting. With
  `degree=1` it fits a line to the rows near x.
- `AttentionClassifier` pools the classes of the rows.
- `AttentionTransformer` pools the columns of X: missing cells, or all cells.
"""

from __future__ import annotations

from qkv.errors import require_extra

with require_extra("sklearn", "qkv.sklearn needs scikit-learn"):
    import sklearn.base  # noqa: F401

from qkv.sklearn.classifier import AttentionClassifier
from qkv.sklearn.regressor import AttentionRegressor
from qkv.sklearn.transformer import AttentionTransformer

__all__ = ["AttentionClassifier", "AttentionRegressor", "AttentionTransformer"]
