"""scikit-learn's own checks, all of them."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

from sklearn.utils.estimator_checks import parametrize_with_checks

from qkv.sklearn import AttentionClassifier, AttentionRegressor, AttentionTransformer

pytestmark = pytest.mark.sample_of_module(120)


@parametrize_with_checks(
    [
        AttentionRegressor(),
        AttentionRegressor("loo", degree=1),
        AttentionRegressor("learned"),
        AttentionClassifier(),
        AttentionClassifier("learned", degree=1),
        AttentionTransformer(),
    ]
)
def test_checks(estimator, check):
    check(estimator)
