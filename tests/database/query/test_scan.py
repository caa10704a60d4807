"""The rows of an answer are the heaviest, in the order of a stable sort."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv.database.query.scan import ROWS_PER_RUN


@pytest.mark.parametrize("top", [1, 2, 7, 40])
def test_rows_are_ranked_by_the_size_of_their_weight_and_then_by_their_place(top: int) -> None:
    """Over several runs of rows whose maxima are equal, and with weights of both signs."""
    rng = np.random.default_rng(3)
    keys = rng.integers(-2, 3, size=(3 * ROWS_PER_RUN - 50, 2)).astype(np.float32)
    query = np.array([3.0, 1.0], np.float32)
    weights = keys @ query
    database = qkv.Database(keys, np.arange(float(len(keys))))
    actual = database.ask(query, score="dot", weighting="raw", top=top)
    want = np.argsort(-np.abs(weights), kind="stable")[:top]
    assert [row.index for row in actual.rows] == want.tolist()
    np.testing.assert_allclose([row.weight for row in actual.rows], weights[want])


def test_a_filter_reuses_the_squares_of_the_keys():
    """Each filter took another mean key, for which the squares of all keys were computed again."""
    rng = np.random.default_rng(0)
    key, value, part = rng.normal(size=(3000, 8)), rng.normal(size=3000), np.arange(3000) % 10
    columns = {"key": list(key), "value": value, "part": part}
    D = qkv.Database.from_columns(columns, key="key", value="value")
    options = {"score": qkv.scores.Gaussian(2.0), "weighting": "softmax"}
    whole = D.ask(key[5], **options).weights
    before = dict(D._view._key_terms_cache[False])
    for most in (2, 5, 9):
        kept = part < most
        got = D.ask(key[5], where=f"part < {most}", **options).weights
        np.testing.assert_allclose(got, np.where(kept, whole, 0) / whole[kept].sum(), atol=1e-6)
    after = D._view._key_terms_cache[False]
    assert {x: id(y) for x, y in after.items()} == {x: id(y) for x, y in before.items()}
    np.testing.assert_array_equal(D.ask(key[5], **options).weights, whole)
