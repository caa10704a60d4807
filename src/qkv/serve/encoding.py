"""Exactly over the wire: JSON in which a cell that it has no word for is tagged, as in a store.

Whoever sends or accepts this media type gets tuples, dates, bytes, vectors and NaN as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from qkv.answer import Answer
from qkv.answer_backend import AnswerBackend, Row, ValueWeight
from qkv.database.table import cells
from qkv.errors import ArgumentError, CombinationError
from qkv.util.formatting import quote_cell

REQUIRED_FIELDS = ("lse", "total", "missing", "engine", "score", "weighting", "version")
OPTIONAL_FIELDS = {
    "error_bound": "error_bound",
    "rows_read": "rows_read",
    "statistical": "bound_is_probabilistic",
    "shares": "is_normalized",
    "coverage": "coverage",
}
"""What an answer does not always say, and the attribute that has it: a bound where none was asked
for, nor what is newer than the server."""

CELLS_MEDIA_TYPE = "application/vnd.qkv.cells+json"


def dumps(found: Any) -> str:
    """A result, cells and all, as text from which `restored(json.loads(text))` makes it again.

    >>> dumps({"key": ("Li", 1)})
    '{"key": {"$tuple": ["Li", 1]}}'
    """
    return json.dumps(cells.to_json_value(found))


def loads(text: str) -> Any:
    """What `dumps` wrote, of whoever wrote it."""
    try:
        return restore_cells(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{quote_cell(text)} is not a cell: {error}") from None


def restore_cells(body: Any) -> Any:
    """The same of what was read of the text."""
    try:
        return cells.from_json_value(body)
    except cells.CELL_ERRORS as error:
        raise ArgumentError(f"the body has a cell that is not one: {error}") from None


def answer_to_dict(answer: Answer, records: bool) -> dict[str, Any]:
    """All that an answer says of itself but the weights of every row; `records` with the columns of
    the heaviest."""

    def row_to_dict(told: Row) -> dict[str, Any]:
        found = {"key": told.key, "value": told.value, "weight": told.weight, "index": told.index}
        return found | ({"record": dict(told.record)} if records else {})

    return {
        **answer._to_fields(row_to_dict),
        "values": [share._asdict() for share in answer.values],
        "lse": answer.lse,
        "shares": answer.is_normalized,
        "score": answer.score,
        "weighting": answer.weighting,
        "version": answer.version,
    }


def answer_from_dict(told: Mapping[str, Any], then: Callable[..., Any]) -> Answer:
    """The answer that `answer_to_dict` tells of; `then` asks the same again with more arguments."""
    return Answer(
        query=told["query"],
        value=told["value"],
        rows=[Row(**row) for row in told["rows"]],
        values=[ValueWeight(**share) for share in told["values"]],
        **{name: told[name] for name in REQUIRED_FIELDS},
        **{name: told[field] for field, name in OPTIONAL_FIELDS.items() if field in told},
        _backend=ServerBackend(told, then),
    )


class ServerBackend(AnswerBackend):
    """Behind an answer of a server: itself, asked when something is looked at."""

    def __init__(self, told: Mapping[str, Any], then: Callable[..., Any]):
        self._answer_data, self._ask_again = told, then

    def compute_weights(self) -> np.ndarray:
        found: np.ndarray = self._ask_again(weights=True)["weights"]
        return found

    def compute_entropy(self) -> float:
        return float(self._answer_data["entropy"])

    def compute_hint(self, rows: list[Row]) -> str:
        return str(self._answer_data.get("hint", ""))

    def compute_spread(self) -> Any:
        return self._ask_again(spread=True)["spread"]

    def rows_above(self, weight: float) -> list[Row]:
        count = int((self.compute_weights() >= weight).sum())
        return [Row(**row) for row in self._ask_again(top=count)["rows"]] if count else []

    def prediction_set(self) -> list[Row]:
        told = self._answer_data
        if "set" in told:
            return [Row(**row) for row in told["set"]]
        raise CombinationError(
            f"the set has {told['set_rows']:,} rows, too many to travel: ask the database itself"
            if "coverage" in told
            else "the server promises no set: it was not calibrated, or not for such questions"
        )
