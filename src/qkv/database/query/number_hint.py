"""A hint where a text query and the best key differ in their numbers, which letters hardly see."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"(?<!\w)[-−+]?\d+(?:[.,]\d+)*|\d+")
DIGITS = re.compile(r"\d+")
MAX_TEXT = 80
"""Longer texts often have numbers that do not matter."""

WHOLE_NUMBER = re.compile(r"(?<!\w)\d+(?:[.,]\d+)*(?!\w)")
"""A number that is not a part of a code such as 82576NS, in which typos split numbers."""
DIFFERENT_NUMBERS_FACTOR = 0.5
"""The confidence is multiplied by this if `have_different_whole_numbers`."""


def find_numbers(text: str) -> list[str]:
    """Return the numbers in a text, with a sign if a space or nothing is before it.

    >>> find_numbers("-5 C in room A-12, 3.5 m")
    ['-5', '12', '3.5']
    """
    return [x.replace("−", "-").removeprefix("+") for x in NUMBER.findall(text)]


def is_reversed_date(query: str, key: str) -> bool:
    """Return whether two texts are the same date, with the year first and last.

    >>> is_reversed_date("2011-05-03", "3.5.2011"), is_reversed_date("2011-05-03", "5.3.2011")
    (True, False)
    """
    asked, found = ([int(x) for x in DIGITS.findall(text)] for text in (query, key))
    return len(asked) == 3 and max(asked) >= 1000 and asked == found[::-1]


def different_numbers_hint(query: Any, key: Any) -> str:
    """Return a hint if each of two short texts has a number that the other lacks; else "".

    >>> different_numbers_hint("Room 250", "Room 150")
    'the best key has the number 150, the query 250'
    >>> different_numbers_hint("Room 150, please", "Room 150")
    ''
    """
    if not (
        isinstance(query, str) and isinstance(key, str) and max(len(query), len(key)) <= MAX_TEXT
    ):
        return ""
    if is_reversed_date(query, key):
        return ""
    asked, found = find_numbers(query), find_numbers(key)
    only_asked = [x for x in asked if x not in found]
    only_found = [x for x in found if x not in asked]
    if not (only_asked and only_found):
        return ""
    return f"the best key has the number {only_found[0]}, the query {only_asked[0]}"


def have_different_whole_numbers(query: Any, key: Any) -> bool:
    """Return whether each of two short texts has a number, as a word, that the other lacks.

    >>> have_different_whole_numbers("Room 250", "Room 150")
    True
    >>> have_different_whole_numbers("Intel 82r76NS", "Intel 82576NS")
    False
    """
    if not different_numbers_hint(query, key):
        return False
    asked, found = (set(WHOLE_NUMBER.findall(text)) for text in (query, key))
    return bool(asked - found and found - asked)
