"""The rows of an answer as documents: a text and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from qkv.answer import Answer
from qkv.behind import Row
from qkv.database.queries import How, at_most
from qkv.errors import DtypeError, unknown
from qkv.told import jsonable


class Found(NamedTuple):
    """One row: its text, its metadata as JSON has them, and its weight."""

    text: str
    about: dict[str, Any]
    weight: float


def found(
    database: Any, query: str, top: int, content: str | None = None, **how: Any
) -> list[Found]:
    """The heaviest rows for a question, heaviest first; `how` is that of `ask`.

    >>> from qkv import Database
    >>> one = found(Database({"Li": "Mu", "Hu": "Rachel"}), "Lii", 1)[0]
    >>> one.text, one.about["key"]
    ('Mu', 'Li')
    """
    answer = database.ask(query, top=top, **how)
    if not isinstance(answer, Answer):
        raise DtypeError(f"a retriever is asked one question, not {query!r}")
    sure: dict[str, Any] = {"entropy": answer.entropy, "effective_rows": answer.effective_rows}
    if answer.coverage is not None:
        sure |= {"coverage": answer.coverage, "abstains": answer.abstains}
    return [_document(row, content, sure) for row in answer.rows]


def check(database: Any, top: Any, how: Mapping[str, Any]) -> None:
    if not hasattr(database, "ask") or not hasattr(database, "info"):
        raise DtypeError(
            f"database must be a qkv.Database or one of a qkv.Client, not {database!r}: "
            "qkv.open(path) opens one, and Client(url)[name] is one of a server"
        )
    at_most(top)
    for name in how:
        if name not in How.__optional_keys__:
            raise unknown("option of a retriever", name, ["top", "content", *How.__optional_keys__])


def _document(row: Row, content: str | None, sure: Mapping[str, Any]) -> Found:
    if content is not None and content not in row.record:
        raise unknown("column", content, row.record)
    own = {"key": jsonable(row.key), "weight": row.weight, "index": row.index, **sure}
    about: dict[str, Any] = {}
    for name, cell in row.record.items():
        if name == content or isinstance(cell, np.ndarray):
            continue  # a vector tells a language model nothing
        # A column that is called as one of these is another's.
        about[f"{name}_" if name in own else name] = jsonable(cell)
    return Found(
        _text(row.value if content is None else row.record[content]), own | about, row.weight
    )


def _text(value: Any) -> str:
    """A value as text; of several columns a line for each.

    >>> _text({"author": "Melville", "year": 1851})
    'author: Melville\\nyear: 1851'
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_text(x)}" for name, x in value.items() if x is not None)
    return "" if value is None else str(jsonable(value))
