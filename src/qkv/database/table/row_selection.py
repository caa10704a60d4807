"""The rows of a table that take part in a query."""

from __future__ import annotations

from functools import cached_property

import numpy as np

MAX_READ_ALONE_SHARE = 0.25
"""If at most this share of the rows is selected, only the selected rows are read.

Otherwise all rows are read, and a mask marks the selected rows.
"""


class RowSelection:
    """The rows of a table that pass a condition and have a value.

    `mask` (m,) is True for these rows, or None if all m rows are selected. `missing_count` is the
    number of rows that pass the condition but have no value.

    >>> RowSelection(5, np.array([True, False, False, False, False])).positions
    array([0])
    >>> RowSelection(2, np.array([True, False])).positions is None  # all rows are read
    True
    """

    def __init__(self, total: int, mask: np.ndarray | None = None, missing_count: int = 0):
        self.row_count = total if mask is None else int(np.count_nonzero(mask))
        self.mask = None if self.row_count == total else mask
        self.total, self.missing_count = total, missing_count

    @cached_property
    def positions(self) -> np.ndarray | None:
        """The positions (r,) of the selected rows if only they are read.

        None if all rows are read.
        """
        if self.mask is None or not 0 < self.row_count <= MAX_READ_ALONE_SHARE * self.total:
            return None
        return np.flatnonzero(self.mask)

    def are_selected(self, positions: np.ndarray) -> np.ndarray:
        """Return whether the rows at these positions are selected."""
        return np.ones(len(positions), bool) if self.mask is None else self.mask[positions]

    @property
    def read_count(self) -> int:
        """The number of rows that are read."""
        return self.total if self.positions is None else len(self.positions)

    @property
    def read_mask(self) -> np.ndarray | None:
        """A mask of the selected rows among the rows that are read.

        None if all of them are selected.
        """
        return self.mask if self.positions is None else None


class CandidateRows(RowSelection):
    """The rows at some ascending positions, chosen for one query. Only they are read.

    >>> rows = CandidateRows(4, np.array([1, 3]))
    >>> rows.row_count, rows.mask.tolist()
    (2, [False, True, False, True])
    """

    def __init__(self, total: int, positions: np.ndarray, missing_count: int = 0):
        self.row_count, self.total, self.missing_count = len(positions), total, missing_count
        self._positions = positions

    def are_selected(self, positions: np.ndarray) -> np.ndarray:
        return np.isin(positions, self._positions)

    @cached_property
    def mask(self) -> np.ndarray:  # type: ignore[override]
        mask = np.zeros(self.total, bool)
        mask[self._positions] = True
        return mask

    @property
    def positions(self) -> np.ndarray:
        return self._positions
