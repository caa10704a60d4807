"""Join the rows of two databases whose keys are similar but not equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from qkv.answer import Answer
from qkv.answer_backend import SAME_WEIGHT_TOLERANCE, Row
from qkv.database.interface import RowSource
from qkv.database.query.arguments import check_top
from qkv.database.query.inputs import Batch
from qkv.database.table.cells import is_missing
from qkv.errors import ArgumentError, DtypeError, QkvError
from qkv.frameworks import is_array
from qkv.util.types import ProgressCallback

QUERIES_PER_BATCH = 256
"""The number of left rows whose keys are the queries of one call."""

UNSURE_KEY_WEIGHT = 0.5
"""A match is unsure if its key has less than this weight."""


@dataclass
class JoinCounts:
    """How many left rows have matches to look at.

    The matched key is unsure, has other words than the left key (`unlike`), or has more rows.
    `unsure` counts text keys only: several numbers may be near. `example` is a left key with the
    unlike one that it matched. `hint` is that of the last left row that no row answers, such as
    "No rows match" a `where`.
    """

    unsure: int = 0
    unlike: int = 0
    repeated: int = 0
    example: tuple[Any, Any] | None = None
    hint: str = ""


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
    counts: JoinCounts | None = None,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yield each row of `left` with its `top` best rows of the database `right`.

    The key of the left row is the query, and `options` are those of `right.ask`. A left row is
    yielded once, with None in the columns of `right`, if its key can match nothing or if no
    key reaches `min_weight`. The weight of a key is that of all its rows together. `counts` is
    filled meanwhile.
    """
    check_top(top)
    if not isinstance(right, RowSource):
        raise DtypeError(
            f"join needs a database, not {type(right).__name__}: build one with Database(…)"
        )
    if not isinstance(min_weight, int | float) or not 0 <= min_weight <= 1:
        raise ArgumentError(f"min_weight must be a weight between 0 and 1, not {min_weight!r}")
    counts = JoinCounts() if counts is None else counts
    return _join_batches(left, right, top, min_weight, progress, counts, options)


def _join_batches(
    left: JoinInput,
    right: Any,
    top: int,
    min_weight: float,
    progress: ProgressCallback | None,
    counts: JoinCounts,
    options: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    right_columns = list(right.columns)
    names = joined_columns(left.columns, right_columns, top)
    rows, done = iter(left.rows), 0
    # A row without a value is a match too. A server has no way to ask for such rows.
    match_keys = getattr(right, "_match_keys", right.ask)
    while batch := list(islice(rows, QUERIES_PER_BATCH)):
        keys = [_get_key(row, left.key) for row in batch]
        with_key = [i for i, key in enumerate(keys) if can_match(key, right)]
        answers = (
            match_keys(Batch(keys[i] for i in with_key), top=max(top, 2), **options)
            if with_key
            else []
        )
        answer_of = dict(zip(with_key, answers, strict=True))
        for i, row in enumerate(batch):
            cells = [row.get(name) for name in left.columns]
            answer = answer_of.get(i)
            matched: list[Row] = []
            if answer is not None and answer.rows:
                same, key_weight = _rows_of_best_key(answer)
                matched = [
                    match
                    for match in answer.rows[:top]
                    if (key_weight if any(match is row for row in same) else match.weight)
                    >= min_weight
                ]
                if matched:
                    same_weight = sum(row.weight for row in same[:top])
                    counts.repeated += key_weight > same_weight * (1 + SAME_WEIGHT_TOLERANCE)
                    is_text = answer.is_normalized and isinstance(same[0].key, str)
                    is_unsure = is_text and key_weight < UNSURE_KEY_WEIGHT
                    counts.unsure += is_unsure
                    if not is_unsure and answer._has_other_words:
                        counts.unlike += 1
                        counts.example = counts.example or (answer.query, same[0].key)
            elif answer is not None:
                counts.hint = answer.hint
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


def _rows_of_best_key(answer: Answer) -> tuple[list[Row], float]:
    """Return the rows of an answer that have the best key, and the weight of all such rows."""
    best = answer.rows[0]
    same = [row for row in answer.rows if _is_same_key(row.key, best.key)]
    if len(same) == 1:
        return same, best.weight
    try:
        return same, answer._top_weight  # rows with equal keys have equal weights
    except QkvError:  # the answer of a server has only its rows
        return same, sum(row.weight for row in same)


def _is_same_key(key: Any, other: Any) -> bool:
    return bool(np.array_equal(key, other)) if is_array(key) else bool(key == other)


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
