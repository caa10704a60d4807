"""The columns of the rows of one segment, in the form that conditions read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from qkv.database.storage import Snapshot
from qkv.database.storage.segments import Segment
from qkv.database.table import columns
from qkv.database.table.cells import load_row
from qkv.database.table.columns import MISSING, OTHER, TEXT, Column
from qkv.database.table.schema import Schema
from qkv.errors import ArgumentError

RECORDS_PER_READ = 8192
"""The number of records that are read together."""

MAX_TEXT_CACHE_BYTES = 2**27
"""The size of the cache for distinct texts that conditions have read."""


class DistinctTexts(NamedTuple):
    """The distinct texts of a column.

    `dates` has a date for each text that is the ISO form of a date cell, and None for the others.
    It is empty if no cell is a date. `text_index` (m,) is the index of the text of each row; −1 if
    the row has no text. `size_bytes` is approximate.
    """

    texts: list[str]
    dates: list[Any]
    text_index: np.ndarray
    size_bytes: int


TextCache = dict[tuple[str, int, int], DistinctTexts]
"""Distinct texts, by column name, first row id and number of rows."""


class ColumnChunk:
    """The live rows of one segment. Columns are read when they are needed."""

    def __init__(
        self,
        snapshot: Snapshot,
        schema: Schema,
        segment: Segment,
        cell_kind_counts: Callable[[str], np.ndarray],
        text_cache: TextCache,
    ):
        self._snapshot, self._schema, self._segment = snapshot, schema, segment
        self.cell_kind_counts, self._text_cache = cell_kind_counts, text_cache
        self.ids = segment.ids if segment.live is None else segment.ids[segment.live]

    def __len__(self) -> int:
        return len(self.ids)

    def read_cells(self, name: str, positions: np.ndarray | slice) -> list[Any]:
        """Return the cells of a column in the rows at these positions."""
        ids, cells = self.ids[positions], []
        for start in range(0, len(ids), RECORDS_PER_READ):
            records = self._snapshot.read_records(ids[start : start + RECORDS_PER_READ])
            cells += [load_row(record).get(name) for record in records]
        return cells

    def read_column(self, name: str) -> Column:
        """Return a column as kinds and codes; raise `ArgumentError` for a column of vectors."""
        if name in self._schema.vector_columns:
            raise ArgumentError(
                f"where: column {name!r} holds vectors, but a condition can compare only text, "
                "numbers and dates: use ask to find the nearest vectors"
            )
        return self._stored_column(name)

    def read_texts(self, name: str) -> DistinctTexts:
        """Return the distinct texts of a column. They are cached."""
        cache = self._text_cache
        cache_key = (name, int(self.ids[0]) if len(self) else -1, len(self))
        texts = cache.get(cache_key)
        if texts is None:
            texts = read_distinct_texts(self, name)
            if sum(each.size_bytes for each in (*cache.values(), texts)) <= MAX_TEXT_CACHE_BYTES:
                cache[cache_key] = texts
        return texts

    def cell_kinds(self, name: str) -> np.ndarray:
        """Return the kinds of the cells in a column (m,), which may be a column of vectors."""
        if self._schema.vector_columns.get(name) == "key":  # keys are never missing
            return np.full(len(self), OTHER, np.uint8)
        return self._stored_column(name).kinds

    def _stored_column(self, name: str) -> Column:
        column, live_mask = columns.read_column(self._segment.tensors, name), self._segment.live
        return column if live_mask is None else column.take_rows(live_mask)

    def compute_value_mask(self) -> np.ndarray:
        """Return a mask (m,) of the rows that have a value."""
        missing = [self.cell_kinds(name) == MISSING for name in self._schema.value]
        join = np.logical_or if self._schema.can_pool_values else np.logical_and
        return np.asarray(~join.reduce(missing))


def read_distinct_texts(chunk: ColumnChunk, name: str) -> DistinctTexts:
    """Read the distinct texts of a column from the records."""
    column = chunk.read_column(name)
    positions = np.flatnonzero(column.kinds == TEXT)
    _, first, inverse = np.unique(column.codes[positions], return_index=True, return_inverse=True)
    text_index = np.full(len(chunk), -1, np.int32)
    text_index[positions] = inverse
    cells = chunk.read_cells(name, positions[first])
    texts = [str(columns.normalize_cell(x)) for x in cells]
    dates = [None if isinstance(x, str) else x for x in cells]
    dates = dates if any(dates) else []
    size_bytes = text_index.nbytes + sum(map(sys.getsizeof, (*texts, *dates)))
    return DistinctTexts(texts, dates, text_index, size_bytes)


def has_any_value(snapshot: Snapshot, schema: Schema) -> bool:
    """Return whether any row has a value. Only the rows up to the first value are read."""
    segments = snapshot.iterate_segments(window=RECORDS_PER_READ)
    chunks = (ColumnChunk(snapshot, schema, each, _no_counts, {}) for each in segments)
    return any(bool(chunk.compute_value_mask().any()) for chunk in chunks)


def _no_counts(name: str) -> np.ndarray:
    raise AssertionError(name)
