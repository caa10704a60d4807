"""Exactly over the wire: JSON in which a cell that it has no word for is tagged, as in a store.

Whoever sends or accepts this media type gets tuples, dates, bytes, vectors and NaN as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from qkv.answer import Answer
from qkv.behind import Behind, Row, Share
from qkv.database import cells
from qkv.errors import ArgumentError, CombinationError

ALWAYS = ("lse", "total", "missing", "engine", "score", "weighting", "version")
SOMETIMES = ("error_bound", "rows_read", "statistical", "shares", "coverage")
"""What an answer does not always say: a bound where none was asked for, nor what is newer than the
server."""

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
    except cells.NO_CELLS as error:
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


def answered(told: Mapping[str, Any], then: Callable[..., Any]) -> Answer:
    """The answer that `told` tells of; `then` asks the same again with more arguments."""
    return Answer(
        query=told["query"],
        value=told["value"],
        rows=[Row(**row) for row in told["rows"]],
        values=[Share(**share) for share in told["values"]],
        **{name: told[name] for name in ALWAYS},
        **{name: told[name] for name in SOMETIMES if name in told},
        _behind=Server(told, then),
    )


class Server(Behind):
    """Behind an answer of a server: itself, asked when something is looked at."""

    def __init__(self, told: Mapping[str, Any], then: Callable[..., Any]):
        self._told, self._then = told, then

    def weights(self) -> np.ndarray:
        found: np.ndarray = self._then(weights=True)["weights"]
        return found

    def entropy(self) -> float:
        return float(self._told["entropy"])

    def hint(self, rows: list[Row]) -> str:
        return str(self._told.get("hint", ""))

    def spread(self) -> Any:
        return self._then(spread=True)["spread"]

    def above(self, weight: float) -> list[Row]:
        count = int((self.weights() >= weight).sum())
        return [Row(**row) for row in self._then(top=count)["rows"]] if count else []

    def set(self) -> list[Row]:
        told = self._told
        if "set" in told:
            return [Row(**row) for row in told["set"]]
        raise CombinationError(
            f"the set has {told['set_rows']:,} rows, too many to travel: ask the database itself"
            if "coverage" in told
            else "the server promises no set: it was not calibrated, or not for such questions"
        )
