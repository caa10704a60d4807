"""Cached results of conditions: never stale, and shared by versions where the rows are the same."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import qkv
from qkv.database.filter import results
from qkv.database.table import columns
from qkv.errors import DtypeError
from qkv.util import caches

rng = np.random.default_rng(0)


@pytest.fixture
def evaluated(monkeypatch):
    """The number of rows that each comparison with an order read, call by call."""
    counts = []
    original = columns.read_column

    def counted(tensors, name):
        column = original(tensors, name)
        counts.append((name, len(column.kinds)))
        return column

    monkeypatch.setattr(columns, "read_column", counted)
    return counts


def passing_keys(database, where):
    return sorted(row["key"] for row in database.rows(where=where))


def expected_keys(table, passes):
    return sorted(key for key, n in table.items() if passes(n))


@pytest.mark.parametrize("on_disk", [False, True])
def test_no_result_is_stale_after_writes(tmp_path, on_disk):
    """Random writes between the same conditions, each compared with a plain dict."""
    table = {f"row {i}": int(n) for i, n in enumerate(rng.integers(0, 100, 40))}
    columns = {"key": list(table), "value": list(table.values())}
    path = tmp_path / "d.qkv" if on_disk else None
    conditions = {
        "value < 50": lambda n: n < 50,
        "value  <  50": lambda n: n < 50,
        "not value < 50 and value != 70": lambda n: n >= 50 and n != 70,
    }
    with qkv.Database.from_columns(columns, key="key", value="value", path=path) as database:
        versions = {}
        for step in range(12):
            for where, passes in conditions.items():
                want = expected_keys(table, passes)
                assert passing_keys(database, where) == want
                assert database.count(where) == len(want)
                answer = database.ask("row 1", where=where, weighting="average", top=1000)
                assert sorted(row.key for row in answer.rows) == want
                got = database.attend("row 1", where=where, weighting="average")
                np.testing.assert_allclose(got, [np.mean([table[key] for key in want])])
            versions[database.version] = expected_keys(table, conditions["value < 50"])
            key = list(table)[int(rng.integers(len(table)))]
            match step % 4:
                case 0:
                    database.add(f"new {step}", step)
                    table[f"new {step}"] = step
                case 1:
                    table[key] = 99 - table[key]
                    database.update(key, table[key])
                case 2:
                    database.remove(key)
                    del table[key]
                case 3 if step == 7:
                    database.compact()
        old = database.at(database.version)
        assert passing_keys(old, "value < 50") == expected_keys(table, conditions["value < 50"])


def test_an_older_version_keeps_its_own_rows():
    with qkv.Database({"a": 1, "b": 2, "c": 3}) as database:
        version = database.version
        assert passing_keys(database, "value > 1") == ["b", "c"]
        database.update("a", 5)
        database.remove("c")
        assert passing_keys(database, "value > 1") == ["a", "b"]
        assert passing_keys(database.at(version), "value > 1") == ["b", "c"]


def test_a_new_version_evaluates_only_what_changed(evaluated, tmp_path):
    keys, numbers = [f"{i}" for i in range(30_000)], list(range(30_000))
    with qkv.Database.from_columns(
        {"key": keys, "n": numbers}, key="key", value="n", encoder="exact", path=tmp_path / "d.qkv"
    ) as database:
        assert database.count("n >= 29000") == 1000
        evaluated.clear()
        assert database.count("n>=29000") == 1000  # the same condition in another spelling
        assert evaluated == []
        database.add("new", 29_500)
        assert database.count("n >= 29000") == 1001
        sizes = [size for name, size in evaluated if name == "n"]
        assert sizes.count(30_000) <= 1  # the kinds of the cells are counted, once
        assert sizes.count(1) >= 2


def test_a_comparison_that_new_rows_make_an_error_is_one():
    columns = {"key": ["a", "b"], "value": [1, 2], "m": [1, 2]}
    with qkv.Database.from_columns(columns, key="key", value="value") as database:
        assert database.count("m > 1") == 1
        database.extend([{"key": "c", "value": 3, "m": "text"}])
        with pytest.raises(DtypeError, match="cannot be compared with numbers"):
            database.count("m > 1")
        database.remove("c")
        assert database.count("m > 1") == 1


def test_quoted_names_are_not_confused():
    database = qkv.Database.from_columns(
        {"k": ["a", "b", "c"], "x y": [1, 2, 3], "x z": [3, 2, 2]}, key="k", value="x y"
    )
    assert database.count("`x y` > 2") == 1
    assert database.count("`x z` > 2") == 1
    assert database.count("`x y` >= 2 and `x z` >= 2") == 2
    assert database.count("`x z` >= 2 and `x y` >= 1") == 3


def test_the_cache_is_bounded_and_registered(monkeypatch):
    database = qkv.Database({f"{i}": i for i in range(100)})
    monkeypatch.setattr(results, "MAX_RESULT_BYTES", 350)
    for _ in range(2):
        for i in range(10):
            assert database.count(f"value < {i}") == i
    cache = results.results_of_store(database._view.snapshot.store_identity)
    assert 0 < cache._size <= 350
    assert caches.describe_caches()["database.filter_results"] > 0
    caches.clear_caches()
    assert caches.describe_caches()["database.filter_results"] == 0
    assert database.count("value < 5") == 5
    count = len(results._RESULTS_BY_STORE)
    del cache, database
    gc.collect()
    assert len(results._RESULTS_BY_STORE) < count  # the results end with their store
