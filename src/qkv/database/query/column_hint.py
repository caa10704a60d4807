"""A hint where a number or a date is compared with the text of the keys, which does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkv.database.parsing import parse_moment, parse_number
from qkv.database.query.number_hint import find_numbers
from qkv.database.table.cells import cell_kind
from qkv.util.formatting import format_one_line


def other_column_hint(
    query: Any, key: Any, record: Mapping[str, Any], key_columns: tuple[str, ...]
) -> str:
    """Return a hint if the whole query is a number or date, which another column has; else "".

    `record` is the best row, `key` its key. A key with as many numbers as the query fits it.

    >>> record = {"note": "paid", "day": "2024-02-07", "price": 4.0}
    >>> other_column_hint("4", "paid", record, ("note",))
    '4 is compared with the text of note: to search the numbers of price, use it as the key'
    >>> other_column_hint("paid", "paid", record, ("note",))
    ''
    """
    if not (isinstance(query, str) and isinstance(key, str)):
        return ""
    numbers = find_numbers(query)
    if not numbers or len(find_numbers(key)) >= len(numbers):
        return ""
    kind = "number" if parse_number(query) is not None else "date"
    if kind == "date" and parse_moment(query) is None:
        return ""
    others = [
        name
        for name, cell in record.items()
        if name not in key_columns and cell_kind(cell) == kind and not isinstance(cell, bool)
    ]
    if not others:
        return ""
    return (
        f"{format_one_line(query)} is compared with the text of {', '.join(key_columns)}: to "
        f"search the {kind}s of {others[0]}, use it as the key"
    )
