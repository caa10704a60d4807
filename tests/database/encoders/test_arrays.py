from typing import Any

import numpy as np
import pytest

from qkv.database.encoders import Arrays
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.scores import Cosine, Gaussian
from tests.database.vector_kinds import VECTOR_KINDS


def test_vectors_stay_themselves() -> None:
    keys = [[1, 2, 3], np.array([0.5, 0.25, -1]), (7.0, 8.0, 9.0)]
    encoder = Arrays().fit(keys)
    np.testing.assert_array_equal(encoder.encode(keys), [[1, 2, 3], [0.5, 0.25, -1], [7, 8, 9]])
    assert encoder.width == 3


@pytest.mark.parametrize("kind", VECTOR_KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_keys_choose_direction_or_distance(kind: str, seed: int) -> None:
    make, metric = VECTOR_KINDS[kind]
    keys = make(np.random.default_rng(seed))
    encoder = Arrays().fit(keys)
    assert encoder.metric == metric
    assert encoder == Arrays().fit(keys.tolist())
    assert encoder == Arrays.build(encoder.settings(), {})
    score = encoder.default_score(len(keys))
    if metric == "cosine":
        assert score == Cosine(encoder.temperature)
    else:
        assert isinstance(score, Gaussian)
        np.testing.assert_allclose(score.bandwidth, encoder.bandwidth, rtol=1e-6)


def test_columns_in_different_units_have_their_own_bandwidths() -> None:
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(500, 3)) * [1e-3, 1.0, 1e6] + [0, 300, 1e7]
    one, two, three = Arrays().fit(keys).bandwidth  # type: ignore[misc]
    np.testing.assert_allclose([one * 1e3, three / 1e6], two, rtol=0.3)


def test_the_largest_temperature_leaves_a_key_three_quarters_of_the_weight() -> None:
    keys = np.eye(5)
    encoder = Arrays().fit(keys)
    # Four other keys with the cosine 0: 4 e^(−1/τ) = 1/3.
    np.testing.assert_allclose(encoder.temperature, 1 / np.log(12), rtol=0.01)
    line = Arrays().fit([[0.0, 1.0], [2.0, 1.0]])
    # One other key at the distance 2: e^(−2²/2h²) = 1/3.
    np.testing.assert_allclose(line.bandwidth, np.sqrt(2 / np.log(3)), rtol=0.01)


def test_far_outliers_and_near_duplicates_change_little() -> None:
    rng = np.random.default_rng(1)
    keys = rng.normal(size=(600, 4)) * [1, 20, 300, 4000]
    plain = Arrays().fit(keys)
    far = keys.copy()
    far[:6] *= 1e6
    np.testing.assert_allclose(Arrays().fit(far).bandwidth, plain.bandwidth, rtol=0.2)
    near = keys.copy()
    near[:4] = near[4:8] * (1 + 1e-5)
    np.testing.assert_allclose(Arrays().fit(near).bandwidth, plain.bandwidth, rtol=0.5)


@pytest.mark.parametrize("keys", [[[1.0, 2.0]], [[1.0, 2.0]] * 9, [[0.0, 0.0]] * 3])
def test_keys_without_neighbours_have_a_score_too(keys: Any) -> None:
    encoder = Arrays().fit(keys)
    assert encoder.settings() == {"kind": "arrays", "width": 2}
    weights = encoder.default_score(len(keys))(np.array([[1.0, 2.0]]), encoder.encode(keys))
    np.testing.assert_allclose(weights, weights[0, 0])


def test_vectors_that_cannot_be_encoded_do_not_break_the_fit() -> None:
    assert Arrays().fit([[1.0, 2.0], [1.0, np.nan]]).width == 2


def test_a_metric_must_be_known() -> None:
    with pytest.raises(ArgumentError, match="'cosine' or 'gaussian'"):
        Arrays(2, metric="dot")


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
