from typing import Any

import numpy as np
import pytest

from qkv.database.encoders import Arrays
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.scores import ScaledDot


def test_vectors_stay_themselves() -> None:
    keys = [[1, 2, 3], np.array([0.5, 0.25, -1]), (7.0, 8.0, 9.0)]
    encoder = Arrays().fit(keys)
    np.testing.assert_array_equal(encoder.encode(keys), [[1, 2, 3], [0.5, 0.25, -1], [7, 8, 9]])
    assert encoder.width == 3
    assert encoder.default_score(10) == ScaledDot()


def test_any_frameworks_array_will_do() -> None:
    torch = pytest.importorskip("torch")
    keys = torch.arange(6.0).reshape(3, 2)
    encoder = Arrays().fit(keys)
    np.testing.assert_array_equal(encoder.encode(keys), [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(encoder.encode_query([keys[1]]), [[2, 3]])


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        ([[1.0, 2.0], [1.0]], ShapeError, "key 1 has 1 number where key 0 has 2"),
        ([[1.0, 2.0], "ab"], DtypeError, "key 1 must be a vector of numbers, not 'ab'"),
        ([[1.0, 2.0], 3.0], DtypeError, "key 1"),
        ([[1.0, 2.0], [1.0, float("nan")]], ArgumentError, "key 1 contains NaN"),
        ([[1.0, 1e300]], ArgumentError, "key 0.*too large for float32"),
        ([[1.0, 2.0]] * 700 + [[1.0, float("inf")]], ArgumentError, "key 700 contains NaN"),
        (np.ones(3), ShapeError, r"\(rows, width\)"),
        (np.ones((2, 2), complex), DtypeError, "real"),
        ([[1.0, 2.0, 3.0]], ShapeError, "key 0 has 3 numbers, but the keys are vectors of 2"),
    ],
)
def test_what_is_no_such_vector_is_refused(keys: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Arrays(2).encode(keys)


def test_it_must_be_fitted() -> None:
    with pytest.raises(ArgumentError, match="fitted"):
        Arrays().encode([[1.0]])
