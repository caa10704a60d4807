"""Join the rows of two databases whose keys are similar but not equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from qkv.database.interface import RowSource
from qkv.database.query.arguments import check_top
from qkv.database.query.inputs import Batch
from qkv.database.table.cells import is_missing
from qkv.errors import ArgumentError, DtypeError
from qkv.util.types import ProgressCallback

QUERIES_PER_BATCH = 256
"""The number of left rows whose keys are the queries of one call."""


def joined_columns(left: Iterable[str], right: Iterable[str], top: int) -> list[str]:
    """Return the columns of the joined rows: the left ones, the right ones, weight and rank.

    A name that is taken gets the suffix `_right`.

    >>> joined_columns(["name", "year"], ["name", "price"], 1)
    ['name', 'year', 'name_right', 'price', 'weight']
    """
    names = list(left)
    for name in [*right, "weight", *(["rank"] if top > 1 else [])]:
        while name in names:
            name += "_right"
        names.append(name)
    return names


class JoinInput(NamedTuple):
    """The rows whose keys are queries, and the names of their columns and key columns."""

    rows: Iterable[Mapping[str, Any]]
    columns: Sequence[str]
    key: Sequence[str]
    row_count: int


def join_rows(
    left: JoinInput,
    right: Any,
    *,
    top: int = 1,
    min_weight: float = 0.0,
    progress: ProgressCallback | None = None,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yield each row of `left` with its `top` best rows of the database `right`.

    The key of the left row is the query, and `options` are those of `right.ask`. A left row is
    yielded once, with None in the columns of `right`, if its key can match nothing or if no
    weight reaches `min_weight`.
    """
    check_top(top)
    if not isinstance(right, RowSource):
        raise DtypeError(
            f"join needs a database, not {type(right).__name__}: build one with Database(…)"
        )
    if not isinstance(min_weight, int | float) or not 0 <= min_weight <= 1:
        raise ArgumentError(f"min_weight must be a weight between 0 and 1, not {min_weight!r}")
    return _join_batches(left, right, top, min_weight, progress, options)


def _join_batches(
    left: JoinInput,
    right: Any,
    top: int,
    min_weight: float,
    progress: ProgressCallback | None,
    options: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    right_columns = list(right.columns)
    names = joined_columns(left.columns, right_columns, top)
    rows, done = iter(left.rows), 0
    while batch := list(islice(rows, QUERIES_PER_BATCH)):
        keys = [_get_key(row, left.key) for row in batch]
        with_key = [i for i, key in enumerate(keys) if can_match(key, right)]
        answers = (
            right.ask(Batch(keys[i] for i in with_key), top=top, **options) if with_key else []
        )
        matches = {i: answer.rows for i, answer in zip(with_key, answers, strict=True)}
        for i, row in enumerate(batch):
            cells = [row.get(name) for name in left.columns]
            matched = [match for match in matches.get(i, []) if match.weight >= min_weight]
            if not matched:
                yield dict.fromkeys(names) | dict(zip(left.columns, cells, strict=True))
            for rank, match in enumerate(matched, start=1):
                record = match.record
                right_cells = [record.get(name) for name in right_columns]
                numbers = [match.weight, rank] if top > 1 else [match.weight]
                yield dict(zip(names, [*cells, *right_cells, *numbers], strict=True))
        done += len(batch)
        if progress is not None:
            progress(done, left.row_count)


def _get_key(row: Mapping[str, Any], columns: Sequence[str]) -> Any:
    """Return the key of a row: a cell, or a tuple of cells for a key of several columns."""
    return row[columns[0]] if len(columns) == 1 else tuple(row[name] for name in columns)


def can_match(key: Any, database: Any) -> bool:
    """Return whether a key may match rows of a database.

    A missing key matches nothing. Nor does text without a visible character, unless some key of the
    database equals it.
    """
    if isinstance(key, tuple):
        return not any(is_missing(cell) for cell in key)
    is_blank = isinstance(key, str) and not key.strip()
    return not is_missing(key) and (not is_blank or key in database)
