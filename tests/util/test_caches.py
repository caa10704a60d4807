"""The registry of caches: what it lists, what it clears, and how a full table is emptied."""

import ast
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import qkv
from qkv.util import caches

SOURCE = Path(caches.__file__).parents[1]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(caches, "_CACHES", dict(caches._CACHES))


def test_a_table_is_listed_with_its_entries_and_cleared():
    table = caches.create_table("test.table")
    assert type(table) is dict  # hot paths and torch.compile read a plain dict
    table.update(a=1, b=2)
    assert caches.describe_caches()["test.table"] == 2
    caches.clear_caches()
    assert table == {} and caches.describe_caches()["test.table"] == 0


def test_a_memoized_function_is_listed_and_cleared():
    calls = []

    @caches.memoize("test.squares", max_entries=2)
    def square(x):
        calls.append(x)
        return x * x

    assert [square(3), square(3), square(4)] == [9, 9, 16] and calls == [3, 4]
    assert caches.describe_caches()["test.squares"] == 2
    square(5)
    assert caches.describe_caches()["test.squares"] == 2  # the limit
    caches.clear_caches()
    assert square(4) == 16 and calls == [3, 4, 5, 4]


def test_a_full_table_is_emptied_before_an_insert():
    table = {}
    for i in range(3):
        caches.insert_bounded(table, i, str(i), 3)
    assert table == {0: "0", 1: "1", 2: "2"}
    caches.insert_bounded(table, 3, "3", 3)
    assert table == {3: "3"}


def test_a_missing_entry_is_computed_once():
    table, computed = {}, []

    def compute():
        computed.append(len(computed))

    for _ in range(2):  # None is an entry too
        assert caches.get_or_compute(table, "key", compute, 1) is None
    assert computed == [0] and table == {"key": None}
    assert caches.get_or_compute(table, "other", lambda: 5, 1) == 5 and table == {"other": 5}
    assert caches.get_or_compute(table, ["no hash"], lambda: 5, 1) is None


def test_clearing_changes_no_result():
    x = np.random.default_rng(0).normal(size=(5, 3))
    for options in ({}, {"score": "gaussian", "mask": qkv.masks.causal}):
        before = qkv.attend(x, x, x, **options)
        qkv.clear_caches()
        np.testing.assert_array_equal(qkv.attend(x, x, x, **options), before)


def test_every_cache_has_a_name_of_its_own():
    pattern = re.compile(r'(?:create_table|memoize|caches\.register)\(\s*"([^"]+)"')
    names = Counter(
        name
        for path in SOURCE.rglob("*.py")
        if path.name != "caches.py"
        for name in pattern.findall(path.read_text(encoding="utf-8"))
    )
    assert len(names) > 10 and [name for name, count in names.items() if count > 1] == []


# These use functools.cache to start threads once: state, which must not be cleared.
RUN_ONCE = ("engines/triton/launching/precompile.py", "frameworks/threads.py")


def test_no_module_memoizes_outside_of_the_registry():
    result = []
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        if name == "util/caches.py" or name in RUN_ONCE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "functools":
                used = {x.name for x in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "functools":
                used = {node.attr}
            else:
                continue
            result += [f"{name}:{node.lineno} {x}" for x in used & {"cache", "lru_cache"}]
    assert result == []
