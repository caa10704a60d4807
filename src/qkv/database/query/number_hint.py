"""A hint where a text query and the best key differ in their numbers, which letters hardly see."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"(?<!\w)[-−+]?\d+(?:[.,]\d+)*|\d+")
MAX_TEXT = 80
"""Longer texts often have numbers that do not matter."""

DIFFERENT_NUMBERS_FACTOR = 2 / 3
"""Such answers are right this often, relative to what their weights say (`bench.retrieval`)."""


def find_numbers(text: str) -> list[str]:
    """Return the numbers in a text, with a sign if a space or nothing is before it.

    >>> find_numbers("-5 C in room A-12, 3.5 m")
    ['-5', '12', '3.5']
    """
    return [x.replace("−", "-").removeprefix("+") for x in NUMBER.findall(text)]


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
    asked, found = find_numbers(query), find_numbers(key)
    only_asked = [x for x in asked if x not in found]
    only_found = [x for x in found if x not in asked]
    if not (only_asked and only_found):
        return ""
    return f"the best key has the number {only_found[0]}, the query {only_asked[0]}"
