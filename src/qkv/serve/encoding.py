"""JSON with tags for the types that JSON lacks: tuples, dates, bytes, vectors and NaN.

The tags are the same as in a store. A client requests them with the media type `CELLS_MEDIA_TYPE`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from qkv.answer import Answer
from qkv.answer_backend import AnswerBackend, MissingWeight, Row, ValueWeight
from qkv.database.table import cells
from qkv.errors import ArgumentError, CombinationError
from qkv.util.formatting import quote_cell

REQUIRED_FIELDS = ("lse", "total", "missing", "engine", "score", "weighting", "version")
OPTIONAL_FIELDS = {
    "mean": "mean",
    "value_is_mean": "value_is_mean",
    "error_bound": "error_bound",
    "rows_read": "rows_read",
    "statistical": "bound_is_probabilistic",
    "shares": "is_normalized",
    "coverage": "coverage",
    "recall": "recall",
}
"""Fields that a response may lack, and the attributes of `Answer` for them.

A server that is older than the client does not send the newer fields.
"""

LAZY_FIELDS = ("confidence", "confidence_text")
"""Fields that the server computes, although `Answer` computes them when they are read."""

CELLS_MEDIA_TYPE = "application/vnd.qkv.cells+json"


def dumps(result: Any) -> str:
    """Return a result as JSON text with tagged cells; `loads` parses it.

    >>> dumps({"key": ("Li", 1)})
    '{"key": {"$tuple": ["Li", 1]}}'
    """
    return json.dumps(cells.to_json_value(result))


def loads(text: str) -> Any:
    """Parse JSON text with tagged cells. The text may come from an untrusted client."""
    try:
        return restore_cells(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{quote_cell(text)} is not a valid cell: {error}") from None


def restore_cells(body: Any) -> Any:
    """Convert the tagged cells in parsed JSON to Python values."""
    try:
        return cells.from_json_value(body)
    except cells.CELL_ERRORS as error:
        raise ArgumentError(f"the body contains an invalid cell: {error}") from None


def answer_to_dict(answer: Answer, records: bool) -> dict[str, Any]:
    """Return the fields of an answer, without the weights of all rows.

    With `records`, each row has the cells of all columns.
    """

    def row_to_dict(row: Row) -> dict[str, Any]:
        fields = {"key": row.key, "value": row.value, "weight": row.weight, "index": row.index}
        return fields | ({"record": dict(row.record)} if records else {})

    return {
        **answer._to_fields(row_to_dict),
        "values": [share._asdict() for share in answer.values],
        "lse": answer.lse,
        "shares": answer.is_normalized,
        "score": answer.score,
        "weighting": answer.weighting,
        "version": answer.version,
    }


def answer_from_dict(fields: Mapping[str, Any], ask_again: Callable[..., Any]) -> Answer:
    """Rebuild an answer from the fields of `answer_to_dict`.

    `ask_again(**options)` sends the query again with more options, and returns the new fields.
    """
    missing = fields.get("missing_weight")
    answer = Answer(
        query=fields["query"],
        value=fields["value"],
        rows=[Row(**row) for row in fields["rows"]],
        values=[ValueWeight(**share) for share in fields["values"]],
        **{name: fields[name] for name in REQUIRED_FIELDS},
        **{name: fields[field] for field, name in OPTIONAL_FIELDS.items() if field in fields},
        missing_weight=None if missing is None else MissingWeight(*map(float, missing)),
        _backend=ServerBackend(fields, ask_again),
    )
    # The server has more rows than the answer, so its texts are used.
    vars(answer).update({name: fields[name] for name in LAZY_FIELDS if name in fields})
    return answer


class ServerBackend(AnswerBackend):
    """The backend of an answer from a server. It requests further data when they are read."""

    def __init__(self, fields: Mapping[str, Any], ask_again: Callable[..., Any]):
        self._answer_data, self._ask_again = fields, ask_again

    def compute_weights(self) -> np.ndarray:
        weights: np.ndarray = self._ask_again(weights=True)["weights"]
        return weights

    def compute_entropy(self) -> float:
        return float(self._answer_data["entropy"])

    def compute_hint(self, rows: list[Row]) -> str:
        return str(self._answer_data.get("hint", ""))

    def compute_expected_error(self) -> Any:
        return self._answer_data.get("expected_error")

    def compute_spread(self) -> Any:
        return self._ask_again(spread=True)["spread"]

    def rows_above(self, weight: float) -> list[Row]:
        count = int((self.compute_weights() >= weight).sum())
        return [Row(**row) for row in self._ask_again(top=count)["rows"]] if count else []

    def prediction_set(self) -> list[Row]:
        fields = self._answer_data
        if "set" in fields:
            return [Row(**row) for row in fields["set"]]
        raise CombinationError(
            f"the prediction set has {fields['set_rows']:,} rows, too many for a response: call "
            "ask with qkv.open(path) on the server's machine"
            if "coverage" in fields
            else "no prediction set: the server's database is not calibrated for these options"
        )
