"""The rows that queries look at, against all scores in float64."""

from __future__ import annotations

import numpy as np
import pytest

from qkv import Database
from qkv.database.memory_rows import (
    can_update_keys,
    encode_memory_query,
    find_memory_rows,
    forget_rows,
    update_memory_rows,
)
from qkv.errors import CombinationError

CHANCE = np.random.default_rng(0)
KEYS, VALUES = CHANCE.normal(size=(9, 3)).astype(np.float32), CHANCE.normal(size=(9, 2))
QUERY = CHANCE.normal(size=(4, 3))


@pytest.mark.parametrize("k", [1, 3, 20])
def test_the_best_rows_are_found_with_their_keys_and_values(k):
    result = find_memory_rows(Database(KEYS, VALUES), QUERY, k, "dot")
    best = np.argsort(-QUERY @ KEYS.T.astype(float), axis=-1, kind="stable")[:, :k]
    assert result.is_found.all()
    np.testing.assert_allclose(result.key[result.row_positions], KEYS[best])
    np.testing.assert_allclose(result.value[result.row_positions], VALUES[best])
    assert len(result.ids) == len(np.unique(best))


def test_numbers_are_compared_as_the_keys_are_and_rows_without_value_are_passed_by():
    database = Database([1.0, 2.0, 4.0], [10.0, None, 30.0])
    query = np.array([[2.2]])
    np.testing.assert_allclose(encode_memory_query(database, query), query - 7 / 3, rtol=1e-6)
    result = find_memory_rows(database, query, 3)
    assert result.is_found.tolist() == [[True, True, False]]  # there are but two
    assert result.value[result.row_positions][result.is_found].ravel().tolist() == [10.0, 30.0]


def test_words_are_not_pooled():
    with pytest.raises(CombinationError, match="only numbers can be pooled"):
        find_memory_rows(Database({"a": "b"}), np.ones((1, 3)), 1)


def test_rows_are_moved_and_those_that_went_do_not_come_back():
    database = Database(KEYS, VALUES)
    result = find_memory_rows(database, KEYS[:2].astype(float), 1, "gaussian")
    assert can_update_keys(database)
    database.remove([KEYS[0]])
    assert update_memory_rows(database, result.ids, result.key + 1, result.value * 2) == 1
    assert len(database) == 8
    np.testing.assert_allclose(database[result.key[1] + 1], VALUES[1] * 2)
    assert update_memory_rows(database, result.ids[:1], None, result.value[:1]) == 0


def test_what_was_learned_of_a_row_goes_with_it():
    texts = {"red apple": 1.0, "green apple": 2.0, "blue sky": 3.0}
    database, without = (
        Database(texts),
        Database({k: v for k, v in texts.items() if "sky" not in k}),
    )
    assert not can_update_keys(database)
    assert forget_rows(database, ["blue sky"]) == 1
    one, two = (x.ask("an apple").weights for x in (database, without))
    np.testing.assert_allclose(one, two)
