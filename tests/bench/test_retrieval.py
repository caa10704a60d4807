"""The measures of `bench.retrieval`, on draws with a known answer."""

from __future__ import annotations

import numpy as np
import pytest

from bench.answers import calibration_error
from bench.retrieval import Task, debiased_error, draw


@pytest.mark.parametrize("count", [200, 20_000])
def test_few_queries_do_not_raise_the_debiased_error(count: int) -> None:
    """The plain error of a perfect confidence is far above 0 if the queries are few."""
    rng = np.random.default_rng(1)
    squares, plain = [], []
    for _ in range(50):
        said = rng.random(count)
        is_right = rng.random(count) < said
        squares.append(debiased_error(said, is_right) ** 2)
        plain.append(calibration_error(said, is_right))
    assert np.mean(squares) < 0.6 / count
    assert (np.mean(plain) > 0.05) == (count == 200)


def test_the_debiased_error_of_a_wrong_confidence() -> None:
    rng = np.random.default_rng(2)
    said = np.full(20_000, 0.75)
    assert debiased_error(said, rng.random(20_000) < 0.55) == pytest.approx(0.2, abs=0.01)


def test_the_right_key_of_a_query() -> None:
    pairs = [(f"key {i}", f"query {i}") for i in range(50)]
    keys, asked, right = draw(Task(pairs), seed=3)
    assert sorted(keys) == sorted(key for key, _ in pairs) and len(asked) == 50
    assert [keys[i] for i in right] == [query.replace("query", "key") for query in asked]
