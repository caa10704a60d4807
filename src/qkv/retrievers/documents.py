"""Convert an answer's rows to documents with text and metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from qkv.answer import Answer
from qkv.answer_backend import Row
from qkv.database.query.arguments import DatabaseAttendOptions, check_top
from qkv.errors import DtypeError, unknown_name_error
from qkv.util.formatting import to_jsonable


class RetrievedDocument(NamedTuple):
    """One row as a document. The cells in `metadata` are converted to JSON types."""

    text: str
    metadata: dict[str, Any]
    weight: float


def retrieve_documents(
    database: Any, query: str, top: int, content: str | None = None, **options: Any
) -> list[RetrievedDocument]:
    """Return the heaviest rows for a question, heaviest first.

    `content` names the column with the text, by default the value. `options` are those of `ask`.

    >>> from qkv import Database
    >>> one = retrieve_documents(Database({"Li": "Mu", "Hu": "Rachel"}), "Lii", 1)[0]
    >>> one.text, one.metadata["key"]
    ('Mu', 'Li')
    """
    answer = database.ask(query, top=top, **options)
    if not isinstance(answer, Answer):
        raise DtypeError(f"query must be a single question, not {query!r}")
    sure: dict[str, Any] = {"entropy": answer.entropy, "effective_rows": answer.effective_rows}
    if answer.confidence is not None:
        sure["confidence"] = answer.confidence
    if answer.coverage is not None:
        sure |= {"coverage": answer.coverage, "abstains": answer.abstains}
    return [_build_document(row, content, sure) for row in answer.rows]


def check_arguments(database: Any, top: Any, options: Mapping[str, Any]) -> None:
    """Check the arguments of a retriever; raise an error that names the wrong one."""
    if not hasattr(database, "ask") or not hasattr(database, "info"):
        raise DtypeError(
            f"database must be a qkv.Database or a database of a qkv.Client, not "
            f"{database!r}: pass qkv.open(path) or qkv.Client(url)[name]"
        )
    check_top(top)
    for name in options:
        if name not in DatabaseAttendOptions.__optional_keys__:
            raise unknown_name_error(
                "option of a retriever",
                name,
                ["top", "content", *DatabaseAttendOptions.__optional_keys__],
            )


def _build_document(
    row: Row, content: str | None, certainty: Mapping[str, Any]
) -> RetrievedDocument:
    """Return a row as a document; `certainty` is added to the metadata."""
    if content is not None and content not in row.record:
        raise unknown_name_error("column", content, row.record)
    reserved = {"key": to_jsonable(row.key), "weight": row.weight, "index": row.index, **certainty}
    columns: dict[str, Any] = {}
    for name, cell in row.record.items():
        if name == content or isinstance(cell, np.ndarray):
            continue  # a language model cannot use a vector
        # A column with a reserved name gets an underscore.
        columns[f"{name}_" if name in reserved else name] = to_jsonable(cell)
    return RetrievedDocument(
        _format_text(row.value if content is None else row.record[content]),
        reserved | columns,
        row.weight,
    )


def _format_text(value: Any) -> str:
    """Return a value as text. Several columns get a line each.

    >>> _format_text({"author": "Melville", "year": 1851})
    'author: Melville\\nyear: 1851'
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_format_text(x)}" for name, x in value.items() if x is not None)
    return "" if value is None else str(to_jsonable(value))
