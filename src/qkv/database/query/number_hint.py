"""A hint where a text query and the best key differ in their numbers, which letters hardly see."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"(?<!\w)[-−+]?\d+(?:[.,]\d+)*|\d+")
DIGITS = re.compile(r"\d+")
MAX_TEXT = 80
"""Longer texts often have numbers that do not matter."""

MIN_PHONE_DIGITS = 6
"""So many last digits identify a phone number without its prefix."""

WHOLE_NUMBER = re.compile(r"(?<!\w)\d+(?:[.,]\d+)*(?!\w)")
"""A number that is not a part of a code such as 82576NS, in which typos split numbers."""
MEASURE = re.compile(r"(?<![\w.,])(\d{1,4}(?:[.,]\d+)?)\s?([^\W\d]{1,3}|%)(?!\w)")
"""A number with its unit, such as 75W or 2.5 L."""
GROUPED_NUMBER = re.compile(r"[-−+]?\d{1,3}(?:([., '’\u00a0\u202f])\d{3})(?:\1\d{3})*(?![.,]?\d)")
"""A number with separators of thousands, such as 3,645,000."""
MIN_LONG_NUMBER = 3
"""A number of so many characters identifies a key better than a word does."""

DIFFERENT_NUMBERS_FACTOR = 0.5
"""The confidence is multiplied by this if `have_different_whole_numbers`."""


def find_numbers(text: str) -> list[str]:
    """Return the numbers in a text, with a sign if a space or nothing is before it.

    >>> find_numbers("-5 C in room A-12, 3.5 m")
    ['-5', '12', '3.5']
    """
    return [x.replace("−", "-").removeprefix("+") for x in NUMBER.findall(text)]


def _normalize_number(number: str) -> str:
    """Return a number without leading zeros.

    >>> _normalize_number("007"), _normalize_number("-5"), _normalize_number("0.5")
    ('7', '-5', '0.5')
    """
    return re.sub(r"^(-?)0+(?=\d)", r"\1", number)


def _join_thousands(text: str) -> str:
    """Return the text without separators of thousands.

    >>> _join_thousands("3,645,000 or 1 472 000"), _join_thousands("1.5 or 12,50")
    ('3645000 or 1472000', '1.5 or 12,50')
    """
    return GROUPED_NUMBER.sub(lambda found: found[0].replace(found[1], ""), text)


def _have_same_digits(query: str, key: str) -> bool:
    """Return whether all digits of one text end those of the other, as in phone numbers."""
    asked, found = ("".join(DIGITS.findall(text)) for text in (query, key))
    shorter, longer = sorted((asked, found), key=len)
    return len(shorter) >= MIN_PHONE_DIGITS and longer.endswith(shorter)


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
    asked, found = find_numbers(query), find_numbers(key)
    only_asked, only_found = _other_numbers(asked, found), _other_numbers(found, asked)
    if not (only_asked and only_found):
        return ""
    if is_reversed_date(query, key) or _have_same_digits(query, key):
        return ""
    joined = [find_numbers(_join_thousands(text)) for text in (query, key)]
    if not _other_numbers(*joined) or not _other_numbers(*joined[::-1]):
        return ""
    return f"the best key has the number {only_found[0]}, the query {only_asked[0]}"


def _other_numbers(numbers: list[str], others: list[str]) -> list[str]:
    """Return the numbers that are not among the others, whatever their leading zeros."""
    known = {*map(_normalize_number, others)}
    return [x for x in numbers if _normalize_number(x) not in known]


def has_same_numbers(query: Any, key: Any) -> bool:
    """Return whether a text key has every whole number of the query, one of at least three digits.

    Shorter numbers alone are frequent in texts.

    >>> has_same_numbers("novelist born 1912", "American novelist (1912-1989)")
    True
    >>> has_same_numbers("room 150 or 151", "Room 150"), has_same_numbers("B 12", "Vitamin B 12")
    (False, False)
    """
    if not (isinstance(query, str) and isinstance(key, str)):
        return False
    asked = set(WHOLE_NUMBER.findall(query))
    if max(map(len, asked), default=0) < MIN_LONG_NUMBER:
        return False
    return asked <= set(WHOLE_NUMBER.findall(key))


def have_different_whole_numbers(query: Any, key: Any) -> bool:
    """Return whether each of two short texts has a number, as a word, that the other lacks.

    A number with a unit is compared with one of the same unit.

    >>> have_different_whole_numbers("Room 250", "Room 150")
    True
    >>> have_different_whole_numbers("Intel 82r76NS", "Intel 82576NS")
    False
    """
    if not different_numbers_hint(query, key):
        return False
    asked, found = (set(WHOLE_NUMBER.findall(text)) for text in (query, key))
    if asked - found and found - asked:
        return True
    asked, found = (set(MEASURE.findall(text)) for text in (query, key))
    units = {unit for _, unit in asked - found} & {unit for _, unit in found - asked}
    return bool(units)
