"""Rows of different lengths in one flat array, and sparse vectors stored as such rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

HALF_BITS = np.uint64(32)
MAX_PRODUCTS_HELD = 1 << 24
"""The most products in memory at a time."""
MIN_PAIRS_TO_PREFILTER = 4096
"""From this many pairs of entries and positions, a 16-bit filter runs before the search."""


class Ragged:
    """m rows of different lengths: row i is flat[starts[i] : starts[i + 1]].

    >>> rows = Ragged(np.array([7, 8, 9]), np.array([0, 2, 2, 3]))
    >>> [row.tolist() for row in rows[np.array([0, 2])].split_rows()]
    [[7, 8], [9]]
    """

    def __init__(self, flat: np.ndarray, starts: np.ndarray):
        self.flat, self.starts = flat, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.flat.dtype

    @property
    def nbytes(self) -> int:
        return int(self.starts[-1] - self.starts[0]) * self.dtype.itemsize + self.starts.nbytes

    def __getitem__(self, rows: slice | np.ndarray) -> Ragged:
        if isinstance(rows, slice):
            begin, end, _ = rows.indices(len(self))
            return Ragged(self.flat, self.starts[begin : max(begin, end) + 1])
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        first, lengths = self.starts[rows], np.diff(self.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        at = np.arange(starts[-1]) + np.repeat(first - starts[:-1], lengths)
        return Ragged(self.flat[at], starts)

    def trim_flat(self) -> Ragged:
        """Return the same rows, with a flat array that holds only these rows."""
        begin, end = self.starts[0], self.starts[-1]
        if not begin and end == len(self.flat):
            return self
        return Ragged(self.flat[begin:end], self.starts - begin)

    def copy(self) -> Ragged:
        own = self.trim_flat()
        return Ragged(own.flat.copy(), own.starts)

    def split_rows(self) -> list[np.ndarray]:
        """Return the rows as a list of arrays."""
        ends = self.starts[1:]
        return [self.flat[a:b] for a, b in zip(self.starts, ends, strict=False)]


def concat_ragged(parts: Sequence[Ragged]) -> Ragged:
    """Return the rows of all parts, one after another.

    >>> part = Ragged(np.array([7, 8, 9]), np.array([0, 2, 3]))
    >>> concat_ragged([part[1:], part]).starts.tolist()
    [0, 1, 3, 4]
    """
    own = [part.trim_flat() for part in parts]
    lengths = np.concatenate([np.zeros(1, np.int64), *(np.diff(part.starts) for part in own)])
    return Ragged(np.concatenate([part.flat for part in own]), np.cumsum(lengths))


def concat_rowwise(one: Ragged, two: Ragged) -> Ragged:
    """Return row i of `one` followed by row i of `two`, for every i.

    >>> part = Ragged(np.array([7, 8, 9]), np.array([0, 2, 3]))
    >>> [row.tolist() for row in concat_rowwise(part, part).split_rows()]
    [[7, 8, 7, 8], [9, 9]]
    """
    lengths = [np.diff(part.starts) for part in (one, two)]
    row = np.concatenate([np.repeat(np.arange(len(one)), some) for some in lengths])
    flat = np.concatenate([one.trim_flat().flat, two.trim_flat().flat])
    starts = np.concatenate([[0], np.cumsum(sum(lengths))])
    return Ragged(flat[np.argsort(row, kind="stable")], starts)


def build_sparse(row: np.ndarray, place: np.ndarray, number: np.ndarray, count: int) -> Ragged:
    """Return `count` sparse vectors in 2³² dimensions from entries (t,) sorted by row.

    Each entry is 64 bits: its position in the high half, a float32 in the low half.

    >>> two = build_sparse(np.array([0, 1, 1]), np.array([5, 5, 9]), np.array([1.0, 3.0, 4.0]), 2)
    >>> gather_columns(two, np.array([5], np.uint32)).tolist()
    [[1.0, 0.0], [3.0, 4.0]]
    """
    bits = number.astype("<f4").view("<u4")
    flat = (place.astype(np.uint64) << HALF_BITS) | bits
    return Ragged(flat, np.searchsorted(row, np.arange(count + 1)))


def entry_positions(vectors: Ragged) -> np.ndarray:
    """Return the position of each entry, (t,) uint32."""
    return vectors.trim_flat().flat.view("<u4")[1::2]


def entry_values(vectors: Ragged) -> np.ndarray:
    """Return the value of each entry, (t,) float32."""
    return vectors.trim_flat().flat.view("<f4")[::2]


def gather_columns(vectors: Ragged, positions: SparseColumns) -> np.ndarray:
    """Return dense vectors (m, w + 1): the values at w positions, and the norm of all others.

    Positions ascend. With a query that is 0 at all other positions, the dense vectors have the same
    dot products and distances as the sparse vectors. Columns of groups are before the last one.
    """
    if isinstance(positions, WordGroups):
        plain = gather_columns(vectors, positions.positions)
        groups = positions.build_columns(plain[:, :-1], np.diff(vectors.starts))
        return np.concatenate([plain[:, :-1], groups, plain[:, -1:]], axis=1)
    number, starts = entry_values(vectors), vectors.trim_flat().starts
    out = np.zeros((len(vectors), len(positions) + 1), np.float32)
    row, column, at = find_entries(vectors, positions)
    out[row, column] = number[at]
    square = number * number
    square[at] = 0
    some = np.flatnonzero(np.diff(starts))
    if len(some):
        out[some, -1] = np.sqrt(np.add.reduceat(square, starts[some]))
    return out


def find_entries(
    vectors: Ragged, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the e entries at these positions: rows, indices into `positions`, entry numbers.

    Each result is (e,).

    >>> find_entries(
    ...     build_sparse(np.array([0, 1]), np.array([5, 9]), np.ones(2), 2),
    ...     np.array([9], np.uint32),
    ... )
    (array([1]), array([0]), array([1]))
    """
    vectors = vectors.trim_flat()
    place = vectors.flat.view("<u4")[1::2]
    if len(place) * len(positions) < MIN_PAIRS_TO_PREFILTER:
        at, column = (place[:, None] == positions).nonzero()
    else:  # the low 16 bits exclude nearly all entries
        near = np.zeros(1 << 16, bool)
        near[positions & np.uint32(0xFFFF)] = True
        at = np.flatnonzero(near[place & np.uint32(0xFFFF)])
        column = positions.searchsorted(place[at])
        same = column < len(positions)
        same[same] = positions[column[same]] == place[at[same]]
        at, column = at[same], column[same]
    row = vectors.starts.searchsorted(at, side="right") - 1 if len(at) else at
    return row, column, at


def sparse_products(one: Ragged, two: Ragged) -> np.ndarray:
    """Return the dot products of two sets of sparse vectors, (n, m) float32."""
    asked = np.unique(entry_positions(one))
    left = np.ascontiguousarray(gather_columns(one, asked)[:, :-1].T)
    row, column, at = find_entries(two, asked)
    return sum_entries_by_row(left, row, column, entry_values(two)[at], len(two))


def sum_entries_by_row(
    left: np.ndarray, row: np.ndarray, column: np.ndarray, number: np.ndarray, count: int
) -> np.ndarray:
    """Return Σ left[column] · number over the entries of each row: (n, count).

    The entries (e,) are sorted by row; left is (w, n).
    """
    out = np.zeros((count, left.shape[1]), left.dtype)
    for some in entry_blocks(len(row), left.shape[1]):
        begins = np.flatnonzero(np.diff(row[some], prepend=-1))
        each = left[column[some]] * number[some, None]
        out[row[some][begins]] += np.add.reduceat(each, begins, axis=0)
    return out.T


def entry_blocks(entries: int, width: int) -> Iterator[slice]:
    """Yield slices of the entries, each with at most MAX_PRODUCTS_HELD products in rows of width
    `width`."""
    step = max(1, MAX_PRODUCTS_HELD // max(width, 1))
    return (slice(at, at + step) for at in range(0, entries, step))


@dataclass(eq=False)
class WordGroups:
    """Positions (w,) of sparse vectors, and groups of them that a row may contain completely.

    `is_member` (g, w) says which positions belong to a group, and `sizes` (g,) how many positions
    the group has; some of them may be missing in `positions`. The column of a group is 0 for a row
    that lacks one of them, else `value` times 1 + `share_factor` · the share of the row's entries
    that are in the group. So a short row that has all words is above a long one.
    """

    positions: np.ndarray
    is_member: np.ndarray
    sizes: np.ndarray
    value: float
    share_factor: float = 0.0

    def build_columns(self, word_columns: np.ndarray, entry_counts: np.ndarray) -> np.ndarray:
        """Return the columns of the groups (m, g), from those of the positions (m, w).

        `entry_counts` (m,) are the numbers of entries of the rows.

        >>> groups = WordGroups(np.array([5, 9]), np.array([[True, True]]), np.array([2]), 0.5, 1.0)
        >>> words = np.array([[3.0, 1.0], [0.0, 2.0], [1.0, 1.0]])
        >>> groups.build_columns(words, np.array([2, 1, 4])).tolist()
        [[1.0], [0.0], [0.75]]
        """
        counts = (word_columns != 0).astype(np.float32) @ self.is_member.T.astype(np.float32)
        share = self.sizes / np.maximum(entry_counts, 1)[:, None]
        column = self.value * (1 + self.share_factor * share)
        return np.where(counts > self.sizes - 0.5, column, 0).astype(np.float32)


def group_words(
    positions: np.ndarray, row: np.ndarray, members: np.ndarray, value: float, share_factor: float
) -> WordGroups:
    """Return the groups of the distinct entries (e,) of `members`; `row` (e,) ascends.

    >>> rows, members = np.array([0, 2]), np.array([9, 7])
    >>> group_words(np.array([5, 9]), rows, members, 0.5, 1.0).is_member.tolist()
    [[False, True], [False, False]]
    """
    is_first = np.diff(row, prepend=-1) != 0
    first, group = np.flatnonzero(is_first), np.cumsum(is_first) - 1
    is_member = np.zeros((len(first), len(positions)), bool)
    if len(positions):
        at = np.minimum(np.searchsorted(positions, members), len(positions) - 1)
        known = positions[at] == members
        is_member[group[known], at[known]] = True
    sizes = np.diff(np.append(first, len(row)))
    return WordGroups(positions, is_member, sizes, value, share_factor)


SparseColumns = np.ndarray | WordGroups
"""The columns of the sparse part of a vector: one for each position, and then for each group."""


class EncodedQuery(NamedTuple):
    """Queries as vectors (n, d), or (n, d + w + 1) with a sparse part.

    The sparse part has w columns, see `SparseColumns`, and one for all other entries.
    """

    code: Any
    sparse_positions: SparseColumns | None = None


def sparse_width(asked: SparseColumns | None) -> int:
    """Return the number of columns of the sparse part of an `EncodedQuery`."""
    if isinstance(asked, WordGroups):
        return len(asked.positions) + len(asked.sizes) + 1
    return 0 if asked is None else len(asked) + 1


@dataclass(eq=False)
class DenseAndSparse:
    """Dense vectors (m, d), optionally times `scale` (m,), with sparse columns: (m, d + w + 1).

    The full array is built only when NumPy reads it. `gather_columns` describes the sparse columns.

    >>> one = build_sparse(np.array([0]), np.array([5]), np.array([3.0]), 1)
    >>> np.asarray(DenseAndSparse(np.ones((1, 2)), one, np.array([5], np.uint32))).tolist()
    [[1.0, 1.0, 3.0, 0.0]]
    """

    dense: np.ndarray
    sparse_vectors: Ragged
    sparse_positions: SparseColumns
    scale: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.dense)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.dense), self.dense.shape[1] + sparse_width(self.sparse_positions)

    def __getitem__(self, rows: slice | np.ndarray) -> DenseAndSparse:
        scale = None if self.scale is None else self.scale[rows]
        return DenseAndSparse(
            self.dense[rows], self.sparse_vectors[rows], self.sparse_positions, scale
        )

    def inner_products(self, query: np.ndarray) -> np.ndarray:
        """Return the dot products with queries (n, d + w + 1) without building the array: (n, m).

        >>> one = build_sparse(np.array([0, 0]), np.array([5, 9]), np.array([3.0, 4.0]), 1)
        >>> wide = DenseAndSparse(np.ones((1, 2)), one, np.array([5], np.uint32))
        >>> wide.inner_products(np.array([[1.0, 1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 1.0]])).tolist()
        [[8.0], [4.0]]
        """
        width = self.dense.shape[1]
        dense = self.dense if self.dense.dtype == query.dtype else self.dense.astype(query.dtype)
        out: np.ndarray = query[:, :width] @ dense.T
        if self.scale is not None:
            out *= self.scale
        columns = self.sparse_positions
        if np.count_nonzero(query[:, -1]):
            sparse_columns = gather_columns(self.sparse_vectors, columns)
        else:
            groups = columns if isinstance(columns, WordGroups) else None
            positions = columns if groups is None else groups.positions
            row, column, at = find_entries(self.sparse_vectors, positions)  # type: ignore[arg-type]
            if not len(at):
                return out
            sparse_columns = np.zeros((len(self), query.shape[1] - width), np.float32)
            sparse_columns[row, column] = entry_values(self.sparse_vectors)[at]
            if groups is not None:
                word_columns = sparse_columns[:, : len(groups.positions)]
                sparse_columns[:, word_columns.shape[1] : -1] = groups.build_columns(
                    word_columns, np.diff(self.sparse_vectors.starts)
                )
        out += query[:, width:] @ sparse_columns.T.astype(query.dtype, copy=False)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        out = np.empty(self.shape, np.float32 if dtype is None else dtype)
        width = self.dense.shape[1]
        out[:, :width] = self.dense
        if self.scale is not None:
            out[:, :width] *= self.scale[:, None]
        out[:, width:] = gather_columns(self.sparse_vectors, self.sparse_positions)
        return out
