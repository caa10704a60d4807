"""Conditions on columns."""

from __future__ import annotations

import pytest

from qkv.database.where import condition
from qkv.errors import ArgumentError, DtypeError

ROW = {"title": "The Alchemist", "year": 1988, "genre": "fiction", "stock": None, "first name": "P"}


@pytest.mark.parametrize(
    ("where", "passes"),
    [
        ({}, True),
        ({"genre": "fiction"}, True),
        ({"genre": "fiction", "year": 1987}, False),
        ({"genre": ["poetry", "fiction"]}, True),
        ({"stock": None}, True),
        ("year == 1988", True),
        ("1980 <= year < 1988", False),
        ("year > -5 and not genre == 'poetry'", True),
        ("genre in ['poetry', 'fiction']", True),
        ("genre not in ('poetry',)", True),
        ("'chem' in title", True),
        ("stock > 3", False),
        ("stock is None", True),
        ("stock is not None or year != 1988", False),
        ("title < 5", False),
        ("year in 5", False),
        ("`first name` == 'P'", True),
        (lambda row: row["year"] % 2 == 0, True),
        (lambda row: 0, False),
    ],
)
def test_conditions(where, passes):
    found = condition(where, list(ROW))
    assert found is not None
    assert found(ROW) is passes


def test_none_lets_all_pass():
    assert condition(None, ["a"]) is None


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ({"yaer": 1}, ArgumentError, "did you mean 'year'"),
        ("yaer > 3", ArgumentError, "did you mean 'year'"),
        ("year > > 3", ArgumentError, "cannot read 'year > > 3' at character 8"),
        ("", ArgumentError, "cannot read"),
        ("year > \0", ArgumentError, "cannot read"),
        ("__import__('os')", ArgumentError, "not understood"),
        ("title.lower() == 'a'", ArgumentError, "not understood"),
        ("year + 1 > 3", ArgumentError, "not understood"),
        ("(lambda: 1)()", ArgumentError, "not understood"),
        ("`year > 3", ArgumentError, "not closed"),
        (3, DtypeError, "must be a mapping"),
    ],
)
def test_what_is_not_understood_is_said(where, error, says):
    with pytest.raises(error, match=says):
        condition(where, list(ROW))
