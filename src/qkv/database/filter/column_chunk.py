"""Rows that lie together, and their columns as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.database.filter.comparisons import DistinctTexts, read_distinct_texts
from qkv.database.storage.segments import Segment
from qkv.database.table import columns
from qkv.database.table.cells import load_row
from qkv.database.table.columns import MISSING, OTHER, Column
from qkv.errors import ArgumentError

if TYPE_CHECKING:
    from qkv.database.table.view import TableView

RECORDS_PER_READ = 8192
"""Records that are read together."""

MAX_TEXT_CACHE_BYTES = 2**27
"""Bytes of columns of text that are kept, once a condition has read them."""


class ColumnChunk:
    """Rows that lie together, whose columns are looked at."""

    def __init__(
        self, view: TableView, part: Segment, census: Callable[[str], np.ndarray] | None = None
    ):
        self._view, self._segment, self.cell_kind_counts = (
            view,
            part,
            census or view.cell_kind_counts,
        )
        self.ids = part.ids if part.live is None else part.ids[part.live]

    def __len__(self) -> int:
        return len(self.ids)

    def read_cells(self, name: str, at: np.ndarray | slice) -> list[Any]:
        """The cells themselves of the rows at these places."""
        ids, found = self.ids[at], []
        for start in range(0, len(ids), RECORDS_PER_READ):
            texts = self._view.snapshot.read_records(ids[start : start + RECORDS_PER_READ])
            found += [load_row(text).get(name) for text in texts]
        return found

    def read_column(self, name: str) -> Column:
        if name in self._view.schema.vector_columns:
            raise ArgumentError(
                f"where: column {name!r} holds vectors, and text, numbers and dates are compared: "
                "ask for the vectors nearest to yours"
            )
        return self._stored_column(name)

    def read_texts(self, name: str) -> DistinctTexts:
        """As `read_distinct_texts` has them, kept."""
        kept, mark = self._view.text_cache, (name, int(self.ids[0]) if len(self) else -1, len(self))
        found = kept.get(mark)
        if found is None:
            found = read_distinct_texts(self, name)
            if sum(some.size_bytes for some in (*kept.values(), found)) <= MAX_TEXT_CACHE_BYTES:
                kept[mark] = found
        return found

    def cell_kinds(self, name: str) -> np.ndarray:
        """What each cell is, of a column of vectors too: of the keys none is missing."""
        if self._view.schema.vector_columns.get(name) == "key":
            return np.full(len(self), OTHER, np.uint8)
        return self._stored_column(name).kinds

    def _stored_column(self, name: str) -> Column:
        found, live = columns.read_column(self._segment.tensors, name), self._segment.live
        return found if live is None else found.take_rows(live)

    def compute_value_mask(self) -> np.ndarray:
        """Which rows have a value."""
        schema = self._view.schema
        missing = [self.cell_kinds(name) == MISSING for name in schema.value]
        join = np.logical_or if schema.can_pool_values else np.logical_and
        return np.asarray(~join.reduce(missing))


def has_any_value(view: TableView) -> bool:
    """Whether any row has a value; the first that has one tells."""
    parts = view.snapshot.iterate_segments(window=RECORDS_PER_READ)
    return any(bool(ColumnChunk(view, part).compute_value_mask().any()) for part in parts)
