"""What is written on the command line alone: a condition without quotes, `column=text`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from qkv.database.spelled import like, number
from qkv.errors import ArgumentError

# `column=text`, but none of ==, <=, >=, !=.
EQUALS = re.compile(r"\s*+([^=<>!'\"`]*[^=<>!'\"`\s])\s*=(?!=)\s*(.*)", re.DOTALL)


def check_text(text: str, what: str) -> None:
    """Refuse an argument whose bytes are no text in the terminal's encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{what} is not valid UTF-8: {text!a}") from None


def assignment(text: str, example: Mapping[str, Any]) -> tuple[str, Any]:
    """`column=text` as the column and its cell, of the kind that the example row has.

    >>> assignment("year=1988", {"year": 1965}), assignment("title=1984", {"title": "Emma"})
    (('year', 1988), ('title', '1984'))
    """
    column, equals, cell = text.partition("=")
    if not equals or not column:
        raise ArgumentError(f"--set: expected COLUMN=TEXT, not {text!r}")
    return column, like(cell, example.get(column), column)


def where(conditions: Sequence[str] | None) -> str | None:
    """All conditions as one expression; `column=text` needs no quotes.

    >>> where(["genre=science fiction", "year > 1950"])
    "(`genre` == 'science fiction') and (year > 1950)"
    >>> where(["genre = 'drama'"])
    "`genre` == 'drama'"
    """
    if not conditions:
        return None
    parts = []
    for condition in conditions:
        match = EQUALS.fullmatch(condition)
        if match is None:
            parts.append(condition)
            continue
        column, text = match.groups()
        if text[:1] in ("'", '"') and text[0] in text[1:]:  # quotes, as in SQL
            parts.append(f"`{column}` == {text}")
            continue
        found = number(text)
        # The column may hold numbers or digits as text.
        wish = f"== {text!r}" if found is None else f"in ({found!r}, {text!r})"
        parts.append(f"`{column}` {wish}")
    return parts[0] if len(parts) == 1 else " and ".join(f"({part})" for part in parts)
