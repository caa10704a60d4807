"""A key of the table whose own value is not the answer's: a hint says so."""

from __future__ import annotations

import datetime

import numpy as np

import qkv


def test_other_rows_outweigh_the_row_of_a_number() -> None:
    """Ids are numbers, but not a scale: neighbours say nothing about them."""
    statuses = ["paid", "open", "open"]
    D = qkv.Database([(100_000 + 7 * i, statuses[i % 3]) for i in range(90)])
    answer = D.ask(100_021)
    assert (answer.value, D[100_021]) == ("open", "paid")
    assert answer.hint == (
        "100021 is a key whose own value is 'paid', but this answer also weighs other keys: look "
        "it up with D[key] or qkv get"
    )
    assert answer.to_dict()["hint"] == answer.hint
    assert D.ask(100_022).hint == "" and D.ask(100_014).hint == ""


def test_the_mean_near_a_number_is_not_its_own_value() -> None:
    rng = np.random.default_rng(0)
    totals = rng.uniform(5, 500, 100)
    D = qkv.Database([(1000 + i, float(x)) for i, x in enumerate(totals)])
    i = int(np.argmax(totals))
    own = f"{1000 + i} is a key whose own value is {totals[i]:.6g}, but"
    assert D.ask(1000 + i).hint.startswith(own)
    smooth = qkv.Database([(float(x), 3.0 + 0.01 * x) for x in range(100)])
    assert smooth.ask(50.0).hint == ""


def test_several_rows_of_a_key_agree_with_the_answer_or_not() -> None:
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(i) for i in range(60)]
    D = qkv.Database([(day, "wet" if i % 20 else "dry") for i, day in enumerate(days)])
    assert "own value is 'dry'" in D.ask(days[20]).hint or D.ask(days[20]).value == "dry"
    assert D.ask(days[21]).hint == ""


def test_rows_of_one_name_with_nearly_equal_numbers_are_named() -> None:
    """Three towns of one name are not one town in the middle."""
    D = qkv.Database([("Springfield", x) for x in (39.8, 37.21, 42.1)] + [("Berlin", 52.52)])
    assert D.ask("Springfeild").hint == "3 rows have this key, with values from 37.21 to 42.1"
    same = qkv.Database([("Springfield", 39.8), ("Springfield", 39.81), ("Berlin", 52.52)])
    assert same.ask("Springfeild").hint == ""


def test_an_answer_with_the_value_of_its_own_key_is_sure():
    days = {datetime.date(2024, 1, day): float(day % 5) for day in range(1, 31)}
    books = {year: f"book {year}" for year in range(1900, 1950)}
    for rows, query, between in ((days, "2024-01-07", "2024-01-07T06:00"), (books, 1910, 1910.4)):
        D = qkv.Database(rows)
        for top in (1, 5):
            answer = D.ask(query, top=top)
            assert answer.confidence == 0.99 and answer.hint == ""
            assert D.ask(between, top=top).confidence < 0.5
        assert D.ask(query, score="gaussian").confidence < 0.99
    several = qkv.Database([1.0, 1.0, 2.0, 3.0], ["a", "b", "c", "d"])
    assert several.ask(1.0).confidence < 0.6 and several.ask(2.0).confidence == 0.99
