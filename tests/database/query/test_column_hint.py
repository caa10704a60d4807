"""A number or a date that is compared with the text of the keys."""

from __future__ import annotations

import datetime

import pytest

import qkv

COLUMNS = {
    "note": ["alpha", "beta", "gamma", "2024-05-05"],
    "day": [datetime.date(2024, month, 5) for month in (1, 2, 3, 4)],
    "price": [3.0, 4.0, 5.0, None],
}


@pytest.mark.parametrize(
    ("query", "hint"),
    [
        ("2024-02-06", "to search the dates of day, use it as the key"),
        ("4.2", "to search the numbers of price, use it as the key"),
        ("alpha", ""),
        ("2024-05-05", ""),
        ("beta 4", ""),
    ],
)
def test_hint(query: str, hint: str) -> None:
    """The rows of a table whose first column is text were compared with a date, silently."""
    where = None if query == "2024-05-05" else "note != '2024-05-05'"
    answer = qkv.Database.from_columns(COLUMNS).ask(query, where=where)
    assert answer.hint == (hint and f"{query} is compared with the text of note: {hint}")
    assert answer.to_dict()["hint"] == answer.hint


def test_no_other_column() -> None:
    D = qkv.Database({"alpha": "x", "beta": "y"})
    assert all("use it as the key" not in D.ask(query).hint for query in ("2024-02-06", "4"))


def test_a_key_with_a_number_is_compared_with_numbers() -> None:
    D = qkv.Database.from_columns({"room": ["Room 101", "Room 102"], "seats": [12.0, 30.0]})
    assert D.ask("105").hint == "the best key has the number 101, the query 105"
