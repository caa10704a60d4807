"""Attention as scikit-learn estimators: the rows of X are keys, those of y are values.

    ŷ(x) = Σᵢ α(x, xᵢ) yᵢ

`AttentionRegressor` is the Nadaraya–Watson estimator with any score and any weighting, and with
`degree=1` the line through the rows near x; `AttentionClassifier` pools the classes;
`AttentionTransformer` pools the columns of X themselves: missing cells, or all of them.
"""

from __future__ import annotations

from qkv.errors import require_extra

with require_extra("sklearn", "qkv.sklearn needs scikit-learn"):
    import sklearn.base  # noqa: F401

from qkv.sklearn.classifier import AttentionClassifier
from qkv.sklearn.regressor import AttentionRegressor
from qkv.sklearn.transformer import AttentionTransformer

__all__ = ["AttentionClassifier", "AttentionRegressor", "AttentionTransformer"]
