"""Exactly over the wire: JSON in which a cell that it has no word for is tagged, as in a store.

Whoever sends or accepts this media type gets tuples, dates, bytes, vectors and NaN as they are.
"""

from __future__ import annotations

import json
from typing import Any

from qkv.answer import Answer, Row
from qkv.database import cells
from qkv.errors import ArgumentError

CELLS = "application/vnd.qkv.cells+json"


def dumps(found: Any) -> str:
    """A result, cells and all, as text from which `restored(json.loads(text))` makes it again.

    >>> dumps({"key": ("Li", 1)})
    '{"key": {"$tuple": ["Li", 1]}}'
    """
    return json.dumps(cells.plain(found))


def loads(text: str) -> Any:
    """What `dumps` wrote, of whoever wrote it."""
    try:
        return restored(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{cells.shown(text)} is not a cell: {error}") from None


def restored(body: Any) -> Any:
    """The same of what was read of the text."""
    try:
        return cells.restored(body)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise ArgumentError(f"the body has a cell that is not one: {error}") from None


def told(answer: Answer, records: bool) -> dict[str, Any]:
    """All that an answer says of itself but the weights of every row; `records` with the columns of
    the heaviest."""

    def row(told: Row) -> dict[str, Any]:
        found = {"key": told.key, "value": told.value, "weight": told.weight, "index": told.index}
        return found | ({"record": dict(told.record)} if records else {})

    return {
        **answer.told(row),
        "values": [share._asdict() for share in answer.values],
        "lse": answer.lse,
        "shares": answer.shares,
        "score": answer.score,
        "weighting": answer.weighting,
        "version": answer.version,
    }
