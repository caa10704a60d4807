"""scikit-learn's own checks, all of them."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402

from qkv.sklearn import (  # noqa: E402
    AttentionClassifier,
    AttentionRegressor,
    AttentionTransformer,
)


# Leave-one-out leaves a row out whole, whatever its weight. Of a row that is there twice, one stays:
# a bandwidth found by it differs between the two, the pooling does not (test_weights.py).
LEFT_OUT = {
    "check_sample_weight_equivalence_on_dense_data": "leave-one-out leaves out all of a row's weight"
}


def expected(estimator):
    return {} if estimator.bandwidth == "scott" else LEFT_OUT


@parametrize_with_checks(
    [
        AttentionRegressor(),
        AttentionRegressor("loo", degree=1),
        AttentionClassifier(),
        AttentionTransformer(),
    ],
    expected_failed_checks=expected,
)
def test_checks(estimator, check):
    check(estimator)
