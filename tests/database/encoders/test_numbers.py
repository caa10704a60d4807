import datetime
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from qkv.database.encoders import Numbers
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.scores import Gaussian


def test_numbers_keep_their_own_unit() -> None:
    keys = [2.0, 3.0, 7.0]
    got = Numbers().fit(keys).encode([2, 3.0, 7, np.float32(4)])
    np.testing.assert_allclose(got[:, 0], np.array([2, 3, 7, 4]) - np.mean(keys), rtol=1e-6)


def neighbour_bandwidth(rows: np.ndarray) -> np.ndarray:
    """The rule in plain loops: the ⌊√m⌋-th nearest other key, in the median, in every spread."""
    quartiles = np.percentile(rows, (25, 75), axis=0)
    spread = np.minimum((quartiles[1] - quartiles[0]) / 1.349, rows.std(axis=0))
    assert (spread > 0).all()
    found = []
    for row in rows:
        distances = np.linalg.norm((rows - row) / spread, axis=1)
        others = np.sort(distances[distances > 0])
        if len(others):
            found.append(others[: math.isqrt(len(rows))][-1])
    return np.asarray(np.median(found) * spread / np.sqrt(rows.shape[1] + 3))


@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("count", [4, 30, 400])
def test_the_bandwidth_is_that_of_the_neighbours(columns: int, count: int) -> None:
    rng = np.random.default_rng(count)
    rows = np.round(rng.normal(size=(count, columns)) * 10, 1) * 10.0 ** np.arange(columns)
    score = Numbers().fit(rows).default_score(count)
    assert isinstance(score, Gaussian)
    np.testing.assert_allclose(score.bandwidth, neighbour_bandwidth(rows).squeeze(), rtol=1e-5)


def test_far_outliers_do_not_widen_the_bandwidth() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 2)) * [1, 50]
    far = rows.copy()
    far[:4] = [[1e6, 0], [0, -1e9], [1e5, 1e5], [-1e8, 0]]
    for keys, outliers in ((rows[:, 0], far[:, 0]), (rows, far)):
        plain, widened = (Numbers().fit(x).default_score(200).bandwidth for x in (keys, outliers))  # type: ignore[attr-defined]
        np.testing.assert_allclose(widened, plain, rtol=0.1)


def test_dates_have_the_bandwidth_of_their_neighbours() -> None:
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(days=2 * i) for i in range(100)]
    ancient = [datetime.date(1, 1, 1), datetime.date(9, 9, 9)]
    # The tenth nearest other day is ten days away, on one of two sides.
    assert Numbers().fit(days + ancient).default_score(102).bandwidth == pytest.approx(5)  # type: ignore[attr-defined]


def test_a_large_sample_has_nearly_the_bandwidth_of_all_keys() -> None:
    keys = np.random.default_rng(1).normal(size=(50_000, 2))
    score = Numbers().fit(keys).default_score(50_000)
    half = Numbers().fit(keys[:3000]).default_score(3000)
    # √m of m keys are within r: r² grows with 1/√m.
    np.testing.assert_allclose(
        score.bandwidth / half.bandwidth,  # type: ignore[attr-defined]
        (3000 / 50_000) ** 0.25,
        rtol=0.1,
    )


def test_columns_of_mixed_units_count_the_same() -> None:
    keys = [(3.1, 50_000), (3.5, 62_000), (3.9, 90_000), (2.8, 41_000)]

    def scored(keys: Any) -> Any:
        encoder = Numbers().fit(keys)
        x = encoder.encode(keys)
        return encoder.default_score(4)(x, x)

    rows = np.array(keys, float)
    bandwidth = neighbour_bandwidth(rows)
    expected = -(((rows[:, None] - rows) / bandwidth) ** 2).sum(axis=2) / 2
    np.testing.assert_allclose(scored(keys), expected, rtol=1e-4, atol=1e-6)
    scaled = [(gpa * 1000, salary / 7) for gpa, salary in keys]
    np.testing.assert_allclose(scored(scaled), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-100, 1e100])
def test_what_float32_cannot_hold_is_counted_in_spreads(scale: float) -> None:
    encoder = Numbers().fit([2 * scale, 3 * scale, 4 * scale])
    np.testing.assert_allclose(encoder.encode([4 * scale]), [[1.349]], rtol=1e-6)
    np.testing.assert_allclose(encoder.default_score(3).bandwidth, 1.349 / 2, rtol=1e-6)  # type: ignore[attr-defined]


def test_settings_of_before_mean_what_they_meant() -> None:
    settings = {"kind": "numbers", "bandwidth": None, "units": None, "mean": [3.0], "unit": [0.5]}
    encoder = Numbers.build(settings, {})
    assert encoder.encode([4.0]).tolist() == [[2.0]]
    assert encoder.default_score(32) == Gaussian(0.5)


def test_arrays_tuples_and_lists_are_alike() -> None:
    keys = [(1.0, 5.0), (2.0, 9.0), (4.0, 1.0)]
    encoder = Numbers().fit(keys)
    for same in (np.array(keys), [list(key) for key in keys], [np.array(key) for key in keys]):
        np.testing.assert_array_equal(encoder.encode(same), encoder.encode(keys))


def test_the_bandwidth_is_half_the_distance_of_two_keys_unless_given() -> None:
    for low, high in ((1.0, 3.0), (10.0, 30.0)):
        score = Numbers().fit([low, high]).default_score(32)
        assert score.bandwidth == pytest.approx((high - low) / 2)  # type: ignore[attr-defined]
    two = Numbers().fit([(1.0, 20.0), (3.0, 40.0)]).default_score(64)
    assert isinstance(two, Gaussian)
    # In spreads of 1/1.349 of the difference, the keys are √2 · 1.349 apart.
    expected = np.array([2, 20]) * np.sqrt(2 / 5)
    np.testing.assert_allclose(two.bandwidth, expected, rtol=1e-6)
    alike = Numbers().fit([5.0, 5.0, 5.0]).default_score(32)
    assert alike == Gaussian(0.5)  # no neighbours: Scott's rule
    columns: Any = Numbers().fit([(5.0, 7.0), (5.0, 7.0)]).default_score(64)
    np.testing.assert_allclose(columns.bandwidth, 64 ** (-1 / 6), rtol=1e-6)
    assert Numbers(0.25).fit([1.0, 2.0]).default_score(1000) == Gaussian(0.25)


def test_units_replace_the_standard_deviation() -> None:
    encoder = Numbers(units=(0.1, 5000)).fit([(3.0, 50_000), (4.0, 60_000)])
    np.testing.assert_allclose(
        np.diff(encoder.encode([(3, 50_000), (3.1, 55_000)]), axis=0), 1, rtol=1e-4
    )
    assert encoder.default_score(1000) == Gaussian(1.0)
    assert Numbers(2.0, units=0.1).fit([3.0]).default_score(1000) == Gaussian(2.0)


def test_a_column_of_one_value_is_compared_in_its_own_unit() -> None:
    x = Numbers().fit([(1.0, 7.0), (2.0, 7.0)]).encode([(1.0, 7.0), (1.0, 9.0)])
    assert x[:, 1].tolist() == [0.0, 2.0]


def test_far_from_zero_no_digit_is_lost() -> None:
    keys = [1e9 + i for i in range(5)]
    x = Numbers().fit(keys).encode(keys)[:, 0]
    np.testing.assert_allclose(np.diff(x), 1, rtol=1e-6)


def test_dates_count_as_days() -> None:
    day = datetime.date
    keys = [day(2024, 2, 28), day(2024, 3, 1), datetime.datetime(2024, 3, 2, 12)]
    x = Numbers(units=1).fit(keys).encode(keys)[:, 0]
    np.testing.assert_allclose(np.diff(x), [2, 1.5], rtol=1e-5)
    zone = datetime.timezone(datetime.timedelta(hours=6))
    pair = [datetime.datetime(2024, 3, 2, 12, tzinfo=zone), datetime.datetime(2024, 3, 2, 6)]
    x = Numbers(units=1).fit(keys).encode(pair)[:, 0]
    assert x[0] == x[1]
    first, last = datetime.datetime.min, datetime.datetime.max  # which UTC has not
    ends = [first.replace(tzinfo=zone), first, last, last.replace(tzinfo=datetime.UTC)]
    result = Numbers(units=1).fit([first]).encode(ends)
    assert result[0, 0] == result[1, 0] - 0.25 and result[2, 0] == result[3, 0]
    clock = Numbers(units=1).fit([datetime.time(0)]).encode([datetime.time(18)])
    assert clock.tolist() == [[0.75]]


def test_decimals_and_booleans_are_numbers() -> None:
    assert Numbers(units=1).fit([0]).encode([Decimal("1.5"), True]).tolist() == [[1.5], [1.0]]


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        ([1.0, math.nan], ArgumentError, "key 1 is not a finite"),
        ([1.0, 2.0, math.inf], ArgumentError, "key 2"),
        ([1.0, None], DtypeError, "key 1 must be a number, not None"),
        ([1.0, "3"], DtypeError, "key 1 must be a number, not '3'"),
        ([(1, 2), (1,)], ShapeError, "key 1 has 1 number where key 0 has 2"),
        ([(1, 2), (1, None)], DtypeError, "key 1"),
        ([1, 10**400], ArgumentError, "key 1"),
        (np.array([1.0, np.nan]), ArgumentError, "key 1"),
        (np.array(["1"]), DtypeError, "real numbers"),
        (np.zeros((2, 2, 2)), ShapeError, "rows, columns"),
        ([], ArgumentError, "at least one"),
        ([1e308, -1e308], ArgumentError, "standard deviation"),
    ],
)
def test_what_is_no_number_is_refused_with_its_row(
    keys: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Numbers().fit(keys)


def test_keys_must_fit_what_was_fitted() -> None:
    with pytest.raises(ArgumentError, match="fitted"):
        Numbers().encode([1.0])
    encoder = Numbers().fit([(1.0, 2.0)])
    with pytest.raises(ShapeError, match="key 0 has 1 number, but the keys have 2 each"):
        encoder.encode([1.0])
    with pytest.raises(ShapeError, match="3 units, but keys have 2"):
        Numbers(units=(1, 2, 3)).fit([(1.0, 2.0)])
    with pytest.raises(ArgumentError, match="too far"):
        Numbers(units=1e-30).fit([0.0]).encode([1e20])


@pytest.mark.parametrize(
    "bad", [{"bandwidth": 0}, {"bandwidth": -1.0}, {"units": 0}, {"units": (1, -1)}]
)
def test_bad_parameters_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(bad))} must be above 0"):
        Numbers(**bad)


@pytest.mark.parametrize("bandwidth", [None, 0.5])
def test_as_a_head_its_product_is_the_gaussian(bandwidth: float | None) -> None:
    keys = [(1.0, 20.0), (3.0, 10.0), (-2.0, 0.0)]
    encoder = Numbers(bandwidth).fit(keys)
    queries = [(0.0, 5.0), (9.0, 9.0)]
    got = encoder.encode_head(queries, query=True) @ encoder.encode_head(keys).T
    want = encoder.default_score(1)(encoder.encode(queries), encoder.encode(keys))
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_what_it_reads() -> None:
    encoder = Numbers().fit([1.0, 2.0])
    assert encoder.can_read_query(3) and encoder.can_read_query(2.5)
    assert (
        not encoder.can_read_query("3")
        and not encoder.can_read_query((1, 2))
        and not encoder.can_read_query(None)
    )


@pytest.mark.parametrize("number", [3, 2.5, -1e30, True, 1e308, 10**400, math.inf, math.nan])
def test_one_number_is_encoded_like_one_of_several(number):
    """One number takes a shorter way."""

    def encode(keys):
        try:
            code = Numbers().fit([1.0, 2.5, 4.0]).encode(keys)
        except ArgumentError as error:
            return str(error)
        return code.dtype, code.shape, code.tobytes()

    assert encode([number]) == encode((number,))
