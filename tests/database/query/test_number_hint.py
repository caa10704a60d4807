import pytest

import qkv
from qkv.database.query.number_hint import (
    MAX_TEXT,
    different_numbers_hint,
    find_numbers,
    has_same_numbers,
    have_different_whole_numbers,
)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("INV-2023-0300", ["2023", "0300"]),
        ("-5 C or +3.5 C, −2", ["-5", "3.5", "-2"]),
        ("11:15", ["11", "15"]),
        ("A4 and B12", ["4", "12"]),
        ("no digits", []),
    ],
)
def test_numbers_of_a_text(text, numbers):
    assert find_numbers(text) == numbers


@pytest.mark.parametrize(
    ("query", "key", "hint"),
    [
        ("Room 250", "Room 150", "the best key has the number 150, the query 250"),
        ("5 C", "-5 C", "the best key has the number -5, the query 5"),
        ("Room 150 please", "Room 150", ""),
        ("Room", "Room 150", ""),
        ("Room 150", "Room", ""),
        ("Room 1" + "x" * MAX_TEXT, "Room 2", ""),
        (250, "Room 150", ""),
        ("2011-05-03", "03.05.2011", ""),
        ("37", "00037-B", ""),
        ("3645000", "3,645,000", ""),
        ("1 472 000", "1.472.000", ""),
        ("5550102", "+1 555 0102", ""),
        ("1.5 m", "15 m", "the best key has the number 15, the query 1.5"),
        ("2011-05-03", "04.05.2011", "the best key has the number 04.05.2011, the query 2011"),
    ],
)
def test_hint(query, key, hint):
    assert different_numbers_hint(query, key) == hint


def test_an_answer_says_that_its_key_has_another_number():
    """Letters hardly see it: the answer is as sure as for a typo."""
    rooms = qkv.Database([(f"Room {number}", f"plan {number}") for number in range(100, 200)])
    answer = rooms.ask("Room 250")
    assert answer.hint == f"the best key has the number {answer.rows[0].key[5:]}, the query 250"
    assert answer.to_dict()["hint"] == answer.hint
    assert rooms.ask("rom 150").hint == ""


@pytest.mark.parametrize(
    ("query", "key", "differ"),
    [
        ("LED bulb 75W", "LED bulb 60W", True),
        ("paint 10 L", "paint 5 L", True),
        ("drill bit 6mm", "drill bit 8mm", True),
        ("75W", "60 cm", False),
        ("sandpaper P180", "sandpaper P80", False),
        ("Intel 82r76NS", "Intel 82576NS", False),
        ("room 7", "room 007", False),
    ],
)
def test_numbers_with_a_unit_differ(query, key, differ):
    assert have_different_whole_numbers(query, key) == differ


@pytest.mark.parametrize(
    ("query", "key", "same"),
    [
        ("novelist born 1912", "American novelist (1912-1989)", True),
        ("1912 and 1989", "American novelist (1912-1989)", True),
        ("1912 and 1990", "American novelist (1912-1989)", False),
        ("gcc 12.2.0-14", "2022 gcc 12.2.0-14: new version", True),
        ("vitamin 12", "vitamin 12", False),  # short numbers are frequent
        ("Intel 82576NS", "Intel 82576NS", False),  # a number inside a code
        ("novelist", "novelist (1912)", False),
        (1912.0, 1912.0, False),
        ("", "1912", False),
    ],
)
def test_same_numbers(query: object, key: object, same: bool) -> None:
    assert has_same_numbers(query, key) == same
