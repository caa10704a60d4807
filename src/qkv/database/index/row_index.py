"""The search over all rows of a version: candidates, and the estimated weight of all other rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from qkv.database.errors import IndexDamagedError, StoreDamagedError, reason
from qkv.database.index.metric import IndexMetric, MetricName
from qkv.database.index.segment_index import MappedLists, MergedLists, SegmentIndex
from qkv.database.storage.segments import SegmentEntry, index_file
from qkv.database.storage.snapshot import SegmentPart, Snapshot
from qkv.database.table.row_selection import RowSelection
from qkv.database.table.view import MAX_GATHERED_ROWS, TableView
from qkv.frameworks.stored_rows import RowChunk
from qkv.util import caches
from qkv.util.deadline import check_deadline
from qkv.util.logging import log_warning

MIN_USED_SHARE = 0.5
"""Lists that were loaded stay in memory while a version uses this share of their rows."""

MAX_SCORES_PER_SEARCH = 2**24
"""The most scores of lists in memory at a time, which limits the queries that search together."""

MAX_QUERIES_PER_CALL = 8
"""For more queries, a product of matrices finds the lists faster than FAISS."""

MAX_LOADED_BYTES = 2**29
"""If the codes of a version have more bytes, they stay in the files, which are mapped."""

MAX_READ_ALONE_SHARE = 0.05
"""If at most this share of the rows is allowed, only their vectors are read, not all codes.

FAISS tests every row of a list. For fewer allowed rows, this takes longer than to read vectors.
"""

MIN_RELATIVE_DENSITY = 0.7
"""If the lists near a query have fewer allowed rows than this share of the mean, more are read.

Then the condition and the vectors are not independent of each other, as they are when measured.
"""

ReadKeys = Callable[[np.ndarray], np.ndarray]
"""Returns the vectors of the keys at some positions (c,), (c, d)."""


class ConditionalSearch(NamedTuple):
    """How to find the `best` rows under a condition.

    `find_needed_rows` returns how many rows of the nearest lists to read, for the share of them
    that is allowed, if condition and vectors are independent. If they are not, lists are read until
    the expected number of best rows in the others is at most `max_missed`.
    """

    find_needed_rows: Callable[[float], float]
    best: int
    max_missed: float


class ListMasses(NamedTuple):
    """The estimated weights of the lists, for n queries.

    - `log_unread` (n,): log Σ exp(score) over the rows of all lists that were not read
    - `log_read` (n,): the same for the lists that were read
    - `rows` (n,): the number of rows in the lists that were read
    """

    log_unread: np.ndarray
    log_read: np.ndarray
    rows: np.ndarray

    def estimate_rest(self, slope: float, nearness: np.ndarray) -> np.ndarray:
        """Return the estimated log Σ exp(score), (n,), over the rows that were not found.

        `nearness` (n, c) are the similarities of those that were found; −∞ fills up the end. In the
        lists that were read, no other row is nearer than the last one that was found.
        """
        is_found = nearness > -np.inf
        left = self.rows - is_found.sum(axis=1)
        last = nearness.min(axis=1, initial=np.inf, where=is_found).astype(float)
        with np.errstate(divide="ignore"):
            most = np.where(left > 0, np.log(np.maximum(left, 1e-300)) + slope * last, -np.inf)
        most = np.where(np.isfinite(last), most, np.inf)
        unread = np.where(left > 0, np.minimum(most, self.log_read), -np.inf)
        return np.asarray(np.logaddexp(self.log_unread, unread))


class FoundRows(NamedTuple):
    """The rows that a search has found, for n queries.

    - `positions` (n, c): for each query the positions of its rows, by their codes the nearest
      first; −1 fills up the end
    - `log_rest` (n,): the estimated log Σ exp(score) over all indexed rows that were not found
    - `nearness` (n, c): the similarities of the rows by their codes
    - `masses`: from which `log_rest` was estimated

    Without an estimate, `log_rest` is NaN, and the last two may be None.
    """

    positions: np.ndarray
    log_rest: np.ndarray
    nearness: np.ndarray | None = None
    masses: ListMasses | None = None

    def list_rests(self) -> list[Any]:
        """Return `log_rest` for each query."""
        rests: list[Any] = self.log_rest.tolist()
        return rests

    def list_positions(self) -> list[np.ndarray]:
        """Return for each query the positions of the rows that were found."""
        counts = (self.positions >= 0).sum(axis=1).tolist()
        return [row[:count] for row, count in zip(self.positions, counts, strict=True)]


class _AllowedRows(NamedTuple):
    """The rows that a search may return: `bits` of each group (None: all), and `counts` (L,).

    `log_counts` (L,) are the logarithms of the counts, and `limits` (L,) the largest deviations of
    as many normal numbers. If only the vectors of the allowed rows are read, `positions` (r,) are
    those of list 0, of list 1, … and `starts` (L + 1,) the place where each list starts.
    """

    bits: list[np.ndarray | None]
    counts: np.ndarray
    log_counts: np.ndarray
    limits: np.ndarray
    positions: np.ndarray | None
    starts: np.ndarray

    @property
    def are_all(self) -> bool:
        return all(bits is None for bits in self.bits)


class _IndexedPart(NamedTuple):
    """A segment with an index, as one version sees it.

    Its rows from `begin` on belong to the version. `live` marks those that are not deleted, or is
    None. Their positions among all rows start at `start`. Its lists start at `first_list`; segments
    with the same means share the numbers of their lists.
    """

    segment_index: SegmentIndex
    begin: int
    rows: int
    live: np.ndarray | None
    start: int
    live_count: int
    first_list: int

    def count_rows(self) -> np.ndarray:
        """Return the number of rows in each list (L,), with those that were deleted."""
        index = self.segment_index
        if self.rows == index.rows:
            return index.counts
        is_counted = np.zeros(index.rows, bool)
        is_counted[self.begin : self.begin + self.rows] = True
        return index.count_rows(is_counted)


class _IndexedGroup:
    """Segments whose lists are searched together, as one version sees them.

    `parts` are those of the segments of `lists`; None for a segment that the version does not have.
    """

    def __init__(self, lists: MergedLists, parts: list[_IndexedPart | None]) -> None:
        self.lists, self.parts = lists, parts
        self.present_parts = [part for part in parts if part is not None]
        self.first_list = self.present_parts[0].first_list
        starts = np.array([0 if part is None else part.start - part.begin for part in parts])
        self._offsets = starts - lists.first_numbers
        self._is_shifted = bool((self._offsets != self._offsets[0]).any())
        self._is_in_place = not self._offsets.any()

    @cached_property
    def _position_of_row(self) -> np.ndarray | None:
        """The position of each row by its number, or None if no row was deleted."""
        if all(part.live is None for part in self.present_parts):
            return None
        numbers, segments = self.lists.first_numbers, self.lists.segments
        positions = np.full(int(numbers[-1]) + segments[-1].rows, -1)
        for part, first in zip(self.parts, numbers.tolist(), strict=True):
            if part is not None:
                live = np.ones(part.rows, bool) if part.live is None else part.live
                begin = first + part.begin
                positions[begin : begin + part.rows] = part.start + np.cumsum(live) - 1
        return positions

    def to_positions(self, numbers: np.ndarray) -> np.ndarray:
        """Return the positions among all rows for the numbers of rows; −1 stays −1."""
        table = self._position_of_row
        if table is None and self._is_in_place:
            return numbers
        is_none = numbers < 0
        if table is not None:
            return np.asarray(np.where(is_none, -1, table[np.maximum(numbers, 0)]))
        if not self._is_shifted:
            return np.asarray(np.where(is_none, -1, numbers + self._offsets[0]))
        part = self.lists.first_numbers.searchsorted(numbers, side="right") - 1
        return np.asarray(np.where(is_none, -1, numbers + self._offsets[np.maximum(part, 0)]))

    def pack_bits(self, masks: list[np.ndarray | None]) -> np.ndarray | None:
        """Return the bits of the rows by their numbers, from the mask of each present part.

        A mask is None if all rows are allowed; so is the result.
        """
        if len(masks) == len(self.parts) and all(mask is None for mask in masks):
            return None
        left, bits = iter(masks), []
        for part, segment in zip(self.parts, self.lists.segments, strict=True):
            mask = np.zeros(segment.rows, bool) if part is None else next(left)
            mask = np.ones(segment.rows, bool) if mask is None else mask
            bits.append(np.packbits(mask, bitorder="little"))
        return np.concatenate(bits)


class RowIndex:
    """The indexes of all segments of a view that have one for this metric.

    `unindexed` are the positions of the rows that no index contains, ascending.
    """

    def __init__(self, view: TableView, metric: MetricName) -> None:
        self.parts: list[_IndexedPart] = []
        unindexed: list[np.ndarray] = []
        self.list_numbers = 0
        start = 0
        parts = view.snapshot.list_parts()
        loaded = _load_indexes(view.snapshot, parts, metric, view._vector_widths[0])
        groups: dict[MergedLists, list[_IndexedPart | None]] = {}
        for part in parts:
            live, rows = part.segment.live, len(part.segment.ids)
            count = rows if live is None else int(np.count_nonzero(live))
            found = None if part.entry is None else loaded.get(part.entry.file)
            if found is None:
                unindexed.append(np.arange(start, start + count))
            else:
                lists, number = found
                index = lists.segments[number]
                indexed = _IndexedPart(
                    index, part.begin, rows, live, start, count, self._number_lists(index)
                )
                self.parts.append(indexed)
                groups.setdefault(lists, [None] * len(lists.segments))[number] = indexed
            start += count
        self._groups = [_IndexedGroup(*item) for item in groups.items()]
        self.parts = [part for group in self._groups for part in group.present_parts]
        self.total = start
        self._share_of_version = view.snapshot.share_of_version
        self._part_counts = [part.count_rows() for part in self.parts]
        built = self._sum_over_parts(self._part_counts)
        self._numbers = np.flatnonzero(built)
        """The numbers of the lists that have rows. Others are never searched."""
        self._built_counts, self.list_count = built[self._numbers], len(self._numbers)
        self.unindexed = np.concatenate([np.zeros(0, np.int64), *unindexed])
        self._allowed: tuple[RowSelection | None, _AllowedRows] | None = None

    def _number_lists(self, index: SegmentIndex) -> int:
        """Return the first number of the lists of a segment."""
        for part in self.parts:
            if part.segment_index.has_same_means(index):
                return part.first_list
        first, self.list_numbers = self.list_numbers, self.list_numbers + index.list_count
        return first

    def _sum_over_parts(self, numbers: list[np.ndarray]) -> np.ndarray:
        """Return the sum over all parts of numbers (L,) of their lists."""
        total = np.zeros(self.list_numbers, np.result_type(np.int64, *numbers))
        for part, x in zip(self.parts, numbers, strict=True):
            total[part.first_list : part.first_list + len(x)] += x
        return total

    @cached_property
    def _list_means(self) -> np.ndarray:
        first = {part.first_list: part.segment_index.mean for part in self.parts}
        means = np.concatenate(list(first.values()))
        return means if len(means) == self.list_count else means[self._numbers]

    @cached_property
    def _list_spreads(self) -> np.ndarray:
        """The mean spread of each list, over all rows of all parts."""
        spreads = [part.segment_index.spread.astype(float) for part in self.parts]
        pairs = zip(spreads, self._part_counts, strict=True)
        total = self._sum_over_parts([spread * counts for spread, counts in pairs])
        return np.asarray(total[self._numbers] / self._built_counts)

    @cached_property
    def _list_deviations(self) -> np.ndarray:
        return np.asarray(np.sqrt(self._list_spreads))

    @cached_property
    def rows_per_list(self) -> float:
        """The mean number of rows of a list, with those that were deleted since it was built."""
        return float(self._built_counts.sum()) / max(self.list_count, 1)

    def scale_lists(self, lists: int, measured_rows: int) -> int:
        """Return as many lists as `lists` were when only `measured_rows` rows were indexed."""
        return math.ceil(lists * self.measure_growth(measured_rows))

    def measure_growth(self, measured_rows: int) -> float:
        """Return by which factor there are now more indexed rows than when they were measured."""
        return max((self.total - len(self.unindexed)) / max(measured_rows, 1), 1.0)

    def search(
        self,
        queries: np.ndarray,
        lists: int,
        count: int,
        metric: IndexMetric,
        selection: RowSelection | None = None,
        estimates_rest: bool = True,
        read_keys: ReadKeys | None = None,
        conditional: ConditionalSearch | None = None,
    ) -> FoundRows:
        """Return up to `count` near rows of each query (n, d), from the `lists` nearest lists.

        The queries are prepared for the metric. Only live rows of the selection are returned. If
        some rows are not, more lists are read: as `conditional` says, or, without it, lists
        that have as many selected rows. If few rows are selected, `read_keys` reads the
        vectors of those in the lists. Without `estimates_rest`, `log_rest` is NaN.
        """
        if not estimates_rest and len(queries) <= MAX_QUERIES_PER_CALL:
            positions = self.find_nearest(queries, lists, count, metric, selection)
            if positions is not None:
                return FoundRows(positions, np.array([np.nan] * len(queries)))
        step = max(MAX_SCORES_PER_SEARCH // max(self.list_count, 1), 1)
        found = [
            self._search_batch(
                queries[at : at + step],
                lists,
                count,
                metric,
                selection,
                estimates_rest,
                read_keys,
                conditional,
            )
            for at in range(0, len(queries), step)
        ]
        if len(found) == 1:
            return found[0]
        positions, log_rest, nearness, masses = zip(*found, strict=True)
        return FoundRows(
            np.concatenate(positions),
            np.concatenate(log_rest),
            np.concatenate(nearness),
            ListMasses(*map(np.concatenate, zip(*masses, strict=True))) if estimates_rest else None,
        )

    def _search_batch(
        self,
        queries: np.ndarray,
        lists: int,
        count: int,
        metric: IndexMetric,
        selection: RowSelection | None,
        estimates_rest: bool,
        read_keys: ReadKeys | None,
        conditional: ConditionalSearch | None,
    ) -> FoundRows:
        check_deadline()
        allowed = self._find_allowed_rows(selection)
        similarity = self._list_similarity(queries, metric)
        first = self.list_count - min(lists, self.list_count)
        is_read = None
        if allowed.are_all:
            nearest = similarity.argpartition(first, axis=1)[:, first:]
        else:
            nearest, is_read = self._choose_lists(similarity, lists, allowed.counts, conditional)
        search = queries, similarity, count, metric, allowed, read_keys
        positions, nearness = self._search_lists(nearest, is_read, *search)
        if is_read is not None and conditional is not None:
            # The lists of a dependent condition have as many allowed rows as without it.
            read = np.where(is_read, allowed.counts[nearest], 0).sum(axis=1)
            is_dependent = read >= lists * self.rows_per_list
            if is_dependent.any():
                self._extend_search(
                    np.flatnonzero(is_dependent),
                    nearest,
                    is_read,
                    positions,
                    nearness,
                    conditional,
                    search,
                )
        if not estimates_rest:
            return FoundRows(positions, np.full(len(queries), np.nan), nearness)
        masses = self._estimate_masses(queries, similarity, nearest, is_read, metric, allowed)
        return FoundRows(positions, masses.estimate_rest(metric.slope, nearness), nearness, masses)

    def _search_lists(
        self,
        nearest: np.ndarray,
        is_read: np.ndarray | None,
        queries: np.ndarray,
        similarity: np.ndarray,
        count: int,
        metric: IndexMetric,
        allowed: _AllowedRows,
        read_keys: ReadKeys | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions and similarities, (n, c), of the nearest rows in some lists.

        These are `nearest` (n, p), or those of them that `is_read` marks. `similarity` (n, L) are
        those of all lists.
        """
        if allowed.positions is not None and is_read is not None and read_keys is not None:
            return self._read_nearest(queries, nearest, is_read, count, metric, allowed, read_keys)
        at = np.arange(len(queries))[:, None]
        return self._search_codes(
            queries, nearest, is_read, similarity[at, nearest], count, allowed
        )

    def _extend_search(
        self,
        some: np.ndarray,
        nearest: np.ndarray,
        is_read: np.ndarray,
        positions: np.ndarray,
        nearness: np.ndarray,
        conditional: ConditionalSearch,
        search: tuple[Any, ...],
    ) -> None:
        """Search all lists again that may have one of the best rows of some queries.

        Write what is found into `positions` and `nearness` (n, c). The other arguments are those of
        `_search_lists`.
        """
        queries, similarity, count, metric, allowed, read_keys = search
        queries, similarity = queries[some], similarity[some]
        last = min(conditional.best, nearness.shape[1]) - 1
        worst = -np.partition(-nearness[some], last, axis=1)[:, last]
        mean, deviation = self._estimate_moments(queries, similarity, metric)
        # The expected number of rows of each list that are better than the worst of the best rows.
        expected = allowed.counts * upper_tail(
            (worst[:, None] - mean) / np.maximum(deviation, 1e-30)
        )
        is_in = np.zeros(expected.shape, bool)
        np.put_along_axis(is_in, nearest[some], is_read[some], axis=1)
        expected[is_in] = np.inf
        order = (-expected).argsort(axis=1)
        ordered = np.take_along_axis(expected, order, axis=1)
        # What is left behind each place.
        left = ordered[:, ::-1].cumsum(axis=1)[:, ::-1]
        is_read = left > conditional.max_missed
        width = int(is_read.sum(axis=1).max())
        order, is_read = order[:, :width], is_read[:, :width]
        found = self._search_lists(
            order, is_read, queries, similarity, count, metric, allowed, read_keys
        )
        positions[some], nearness[some] = found

    def _search_codes(
        self,
        queries: np.ndarray,
        nearest: np.ndarray,
        is_read: np.ndarray | None,
        closeness: np.ndarray,
        count: int,
        allowed: _AllowedRows,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions and similarities, (n, c), of the nearest rows by their codes.

        They are in the lists `nearest` (n, p), whose means have the similarities `closeness`.
        """
        numbers = nearest if self.list_count == self.list_numbers else self._numbers[nearest]
        at = np.arange(len(queries))[:, None]
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        for group, bits in zip(self._groups, allowed.bits, strict=True):
            local, lists_of_group = numbers, group.lists.list_count
            if is_read is not None or self.list_numbers > lists_of_group:
                local = numbers - group.first_list
                is_inside = (local >= 0) & (local < lists_of_group)
                local = np.where(is_inside if is_read is None else is_inside & is_read, local, -1)
            size = min(count, group.lists.rows)
            rows, nearness = group.lists.search(queries, local, closeness, size, bits)
            nearness[rows < 0] = -np.inf
            parts.append((group.to_positions(rows), nearness))
        positions, nearness = parts[0]
        if len(parts) > 1:
            positions, nearness = (np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
            order = (-nearness).argsort(axis=1, kind="stable")[:, :count]
            positions, nearness = positions[at, order], nearness[at, order]
        return positions, nearness

    def _read_nearest(
        self,
        queries: np.ndarray,
        nearest: np.ndarray,
        is_read: np.ndarray,
        count: int,
        metric: IndexMetric,
        allowed: _AllowedRows,
        read_keys: ReadKeys,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what `_search_codes` returns, from the vectors of the allowed rows."""
        assert allowed.positions is not None
        positions = np.full((len(queries), count), -1)
        nearness = np.full((len(queries), count), -np.inf, np.float32)
        for i, query in enumerate(queries):
            check_deadline()
            lists = nearest[i, is_read[i]]
            # The allowed rows of a list stand side by side.
            sizes = allowed.counts[lists]
            ends = sizes.cumsum()
            shifts = allowed.starts[lists] - ends + sizes
            rows = allowed.positions[np.arange(ends[-1]) + shifts.repeat(sizes)]
            rows.sort()  # several segments are read in one pass
            similarity = np.empty(len(rows), np.float32)
            for start in range(0, len(rows), MAX_GATHERED_ROWS):
                some = slice(start, start + MAX_GATHERED_ROWS)
                similarity[some] = metric.compare_vectors(query, read_keys(rows[some]))
            last = max(len(rows) - count, 0)
            best = similarity.argpartition(last)[last:] if last else np.arange(len(rows))
            best = best[(-similarity[best]).argsort(kind="stable")]
            positions[i, : len(best)], nearness[i, : len(best)] = rows[best], similarity[best]
        return positions, nearness

    def find_nearest(
        self,
        queries: np.ndarray,
        lists: int,
        count: int,
        metric: IndexMetric,
        selection: RowSelection | None,
    ) -> np.ndarray | None:
        """Return the positions (n, c) of near rows, as `search` does, or None if only it can.

        FAISS finds the lists of few queries faster, but far from the origin less precisely.
        """
        group = self._groups[0] if len(self._groups) == 1 else None
        if group is None or metric.is_distance or group.lists.list_count != self.list_count:
            return None
        if not self._find_allowed_rows(selection).are_all:
            return None
        check_deadline()
        size = min(count, group.lists.rows)
        return group.to_positions(group.lists.find_rows(queries, lists, size))

    def _choose_lists(
        self,
        similarity: np.ndarray,
        lists: int,
        counts: np.ndarray,
        conditional: ConditionalSearch | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the nearest lists of each query (n, p), and a mask (n, p) of those that it reads.

        They have as many of the allowed `counts` as `lists` lists have rows. They have fewer if
        there are enough rows for `conditional`. `similarity` (n, L) are those of all lists.
        """
        least, sizes = min(lists, self.list_count), self._built_counts
        if counts.sum() == sizes.sum():  # the mask only leaves out rows of other versions
            nearest = similarity.argpartition(-least, axis=1)[:, -least:]
            return nearest, np.ones(nearest.shape, bool)
        tried, needed, share = self.list_count, 0.0, 0.0
        if conditional is not None:
            share = float(counts.sum()) / float(sizes.sum())
            needed = conditional.find_needed_rows(share)
            # Few lists are sorted at first, and all of them only if these are not enough.
            tried = min(math.ceil(1.5 * needed / self.rows_per_list) + 2 * least, tried)
        while True:
            if tried < self.list_count:
                nearest = similarity.argpartition(-tried, axis=1)[:, -tried:]
                order = np.take_along_axis(similarity, nearest, axis=1).argsort(axis=1)
                nearest = np.take_along_axis(nearest, order[:, ::-1], axis=1)
            else:
                nearest = (-similarity).argsort(axis=1)
            allowed = counts[nearest].cumsum(axis=1)
            is_enough = allowed >= lists * self.rows_per_list
            if conditional is not None:
                rows = sizes[nearest].cumsum(axis=1)
                has_rows = rows >= needed
                # At the first place with enough rows, enough of them must be allowed.
                place = np.where(has_rows.any(axis=1), has_rows.argmax(axis=1), -1)[:, None]
                dense = MIN_RELATIVE_DENSITY * share * np.take_along_axis(rows, place, axis=1)
                is_enough |= has_rows & (np.take_along_axis(allowed, place, axis=1) >= dense)
            is_enough[:, : least - 1] = False
            if tried == self.list_count or is_enough.any(axis=1).all():
                break
            tried = self.list_count
        is_enough[:, -1] = True
        last = is_enough.argmax(axis=1)
        nearest = nearest[:, : int(last.max(initial=0)) + 1]
        # In a batch, each query reads what it would read alone.
        return nearest, np.arange(nearest.shape[1]) <= last[:, None]

    def count_rows_to_read(
        self, queries: np.ndarray, metric: IndexMetric, positions: np.ndarray
    ) -> np.ndarray:
        """Return how many rows a search for some rows reads: a number for each position (n, c).

        The search reads the nearest lists of each query (n, d), up to the list of the row. It reads
        no row to find one without an index.
        """
        order = (-self._list_similarity(queries, metric)).argsort(axis=1)
        rows = np.empty(order.shape, np.int64)
        np.put_along_axis(rows, order, self._built_counts[order].cumsum(axis=1), axis=1)
        lists = self._find_lists(positions)
        rows = np.take_along_axis(rows, np.maximum(lists, 0), axis=1)
        return np.where(lists < 0, 0, rows)

    def _find_lists(self, positions: np.ndarray) -> np.ndarray:
        """Return the list of the row at each position; −1 without an index."""
        lists = np.full(positions.shape, -1)
        for part in self.parts:
            is_inside = (positions >= part.start) & (positions < part.start + part.live_count)
            rows = positions[is_inside] - part.start
            rows = rows if part.live is None else np.flatnonzero(part.live)[rows]
            found = part.segment_index.lists_of_rows(rows + part.begin) + part.first_list
            lists[is_inside] = self._numbers.searchsorted(found)
        return lists

    def _list_similarity(self, queries: np.ndarray, metric: IndexMetric) -> np.ndarray:
        """Return the similarity of each query to the mean of each list, (n, L)."""
        if not metric.is_distance:
            return np.asarray(queries @ self._list_means.T)
        # Relative to the centre, the expanded square loses no precision far from the origin.
        centre, means, squares = self._centred_means
        offsets = queries - centre
        lengths = np.square(offsets).sum(axis=1)[:, None]
        return np.asarray(np.minimum(offsets @ means.T - (lengths + squares) / 2, 0))

    @cached_property
    def _centred_means(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The mean of all lists, the means relative to it, and their squared lengths."""
        centre = self._list_means.mean(axis=0)
        means = self._list_means - centre
        return centre, means, np.square(means).sum(axis=1)

    def _estimate_masses(
        self,
        queries: np.ndarray,
        similarity: np.ndarray,
        nearest: np.ndarray,
        is_read: np.ndarray | None,
        metric: IndexMetric,
        allowed: _AllowedRows,
    ) -> ListMasses:
        """Return the estimated weights of the lists that were read, and of all others.

        The rows of a list count as scattered evenly around its mean. The largest deviation of m
        such rows is about √(2 ln m) standard deviations, which limits the sum.
        """
        slope, at, counts = metric.slope, np.arange(len(queries))[:, None], allowed.counts
        log_mass, deviation = self._estimate_moments(queries, similarity, metric)
        log_mass *= slope
        deviation *= slope
        # x²/2, continued by its tangent beyond the limit: (x² − max(x − limit, 0)²) / 2
        excess = np.maximum(deviation - allowed.limits, 0)
        log_mass += allowed.log_counts + (deviation + excess) * (deviation - excess) / 2
        chosen = log_mass[at, nearest]
        if is_read is None:
            log_mass[at, nearest] = -np.inf
            rows = counts[nearest].sum(axis=1)
        else:
            log_mass[at, nearest] = np.where(is_read, -np.inf, chosen)
            chosen = np.where(is_read, chosen, -np.inf)
            rows = np.where(is_read, counts[nearest], 0).sum(axis=1)
        return ListMasses(log_sum_exp(log_mass), log_sum_exp(chosen), rows)

    def _estimate_moments(
        self, queries: np.ndarray, similarity: np.ndarray, metric: IndexMetric
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the deviation (n, L) of the similarities of each list's rows.

        `similarity` (n, L) are those of the means of the lists, around which the rows count as
        scattered evenly.
        """
        mean = similarity.astype(float)
        if metric.is_distance:
            # The variance of the similarities of a list is −2 · similarity · spread.
            deviation = np.sqrt(-2 * mean * self._list_spreads)
            mean -= self._list_spreads * (self._list_means.shape[1] / 2)
        else:
            length = np.sqrt(np.einsum("ij,ij->i", queries, queries, dtype=float))
            deviation = length[:, None] * self._list_deviations
        return mean, deviation

    def _find_allowed_rows(self, selection: RowSelection | None) -> _AllowedRows:
        if selection is not None and selection.mask is None:
            selection = None
        cached = self._allowed
        if cached is None or cached[0] is not selection:
            counts, bits = [], list[np.ndarray | None]()
            for group in self._groups:
                parts = group.present_parts
                masks = [_find_allowed_rows_of_part(part, selection) for part in parts]
                bits.append(group.pack_bits(masks))
                for part, mask in zip(parts, masks, strict=True):
                    index = part.segment_index
                    counts.append(index.counts if mask is None else index.count_rows(mask))
            total = self._sum_over_parts(counts)[self._numbers]
            log_counts = np.log(np.maximum(total, 1e-300))
            # The rest of a slice has the limits of its version, so that the rests can be added.
            limits = np.sqrt(2 * np.maximum(log_counts - math.log(self._share_of_version), 0))
            allowed = _AllowedRows(
                bits, total, log_counts, limits, *self._sort_by_list(selection, total)
            )
            self._allowed = cached = selection, allowed
        return cached[1]

    def _sort_by_list(
        self, selection: RowSelection | None, counts: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Return the positions of the allowed rows, sorted by their lists, and where these start.

        The positions are None if there are too many. `counts` (L,) are the numbers of rows.
        """
        starts = np.concatenate([[0], counts.cumsum()])
        if selection is None or starts[-1] > MAX_READ_ALONE_SHARE * self.total:
            return None, starts
        assert selection.mask is not None
        places = np.full(self.list_numbers, -1)
        places[self._numbers] = np.arange(self.list_count)
        positions, lists = list[np.ndarray](), list[np.ndarray]()
        for part in self.parts:
            mask = _find_allowed_rows_of_part(part, selection)
            chosen = selection.mask[part.start : part.start + part.live_count]
            positions.append(part.start + np.flatnonzero(chosen))
            assert mask is not None
            lists.append(places[part.first_list + part.segment_index.read_lists(mask)])
        order = np.concatenate(lists).argsort(kind="stable")
        return np.concatenate(positions)[order], starts


def log_sum_exp(x: np.ndarray) -> np.ndarray:
    """Return log Σ exp(x) over the last axis; −∞ if there is nothing.

    >>> log_sum_exp(np.array([[0.0, 0.0], [-np.inf, -np.inf]])).round(3).tolist()
    [0.693, -inf]
    """
    top = x.max(axis=-1, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(x - shift[..., None]).sum(axis=-1)) + shift)


def upper_tail(x: np.ndarray) -> np.ndarray:
    """Return about the probability that a normal number is larger than x.

    >>> upper_tail(np.array([-8.0, 0.0, 1.645])).round(2).tolist()
    [1.0, 0.5, 0.05]
    """
    size = np.abs(x)
    tail = np.exp(-(0.717 + 0.416 * size) * size) / 2
    return np.asarray(np.where(x < 0, 1 - tail, tail))


def open_row_index(view: TableView, metric: MetricName) -> RowIndex:
    """Return the row index of a view, which is cached with the view."""
    cached: RowIndex | None = view.index_cache.get(metric)
    if cached is None:
        view.index_cache[metric] = cached = RowIndex(view, metric)
    return cached


def read_part_vectors(
    part: SegmentPart, metric: IndexMetric, start: int, stop: int, live: np.ndarray | None = None
) -> np.ndarray:
    """Return the prepared vectors of the rows start … stop − 1 of a part, or its live rows."""
    tensors = part.segment.tensors
    rows: Any = slice(start, stop)
    scale = tensors["scale"][rows] if "scale" in tensors else None
    chunk = RowChunk(np.asarray(tensors["code"][rows]), scale=scale, live=live)
    return metric.prepare_vectors(chunk.live_vectors())


def _find_allowed_rows_of_part(
    part: _IndexedPart, selection: RowSelection | None
) -> np.ndarray | None:
    """Return a mask of the live and selected rows of a segment, or None if all rows are."""
    if selection is None and part.live is None and part.rows == part.segment_index.rows:
        return None
    allowed = np.zeros(part.segment_index.rows, bool)
    rows = allowed[part.begin : part.begin + part.rows]
    rows[:] = True if part.live is None else part.live
    if selection is not None and selection.mask is not None:
        rows[rows] = selection.mask[part.start : part.start + part.live_count]
    return allowed


_INDEXES_BY_STORE: WeakKeyDictionary[Any, list[tuple[MergedLists, list[str]]]] = WeakKeyDictionary()
"""For each store the loaded indexes, with the files of their segments."""

_DAMAGED_BY_STORE: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""For each store the segments whose index was damaged when a search read it."""

caches.register("database.segment_indexes", _INDEXES_BY_STORE)
caches.register("database.damaged_indexes", _DAMAGED_BY_STORE)


def _load_indexes(
    snapshot: Snapshot, parts: list[SegmentPart], metric: MetricName, width: int
) -> dict[str, tuple[MergedLists, int]]:
    """Return for each segment with a valid index its lists, and its number among their segments.

    Loaded indexes of which a version uses less than half are forgotten.
    """
    entries = {part.entry.file: part.entry for part in parts if part.entry is not None}
    damaged = _DAMAGED_BY_STORE.get(snapshot.store_identity, set())
    loaded, merged = list[tuple[MergedLists, list[str]]](), dict[str, tuple[MergedLists, int]]()
    for lists, files in _INDEXES_BY_STORE.get(snapshot.store_identity, []):
        rows = sum(x.rows for x, file in zip(lists.segments, files, strict=True) if file in entries)
        if rows >= MIN_USED_SHARE * lists.rows:
            loaded.append((lists, files))
            if lists.metric == metric:
                merged |= {file: (lists, i) for i, file in enumerate(files)}
    groups: list[list[tuple[str, SegmentIndex]]] = []
    is_mapped = sum(entry.rows for entry in entries.values()) * width > MAX_LOADED_BYTES
    for file, entry in entries.items():
        is_known = file in merged or file in damaged
        index = None if is_known else _load_index(snapshot, entry, metric, width, is_mapped)
        if index is not None:
            same = next((group for group in groups if index.has_same_codes(group[0][1])), None)
            if same is None:
                groups.append(same := [])
            else:
                index.mean = same[0][1].mean  # once in memory: the next segment reuses the other
            same.append((file, index))
    for group in groups:
        files, indexes = [file for file, _ in group], [index for _, index in group]
        are_mapped = all(index.file is not None for index in indexes)
        lists = MappedLists(indexes) if are_mapped else MergedLists(indexes)
        loaded.append((lists, files))
        merged |= {file: (lists, i) for i, file in enumerate(files)}
    _INDEXES_BY_STORE[snapshot.store_identity] = loaded
    return merged


def forget_indexes(snapshot: Snapshot) -> None:
    """Forget the loaded indexes of a store, because they were built again or removed."""
    _INDEXES_BY_STORE.pop(snapshot.store_identity, None)
    _DAMAGED_BY_STORE.pop(snapshot.store_identity, None)


def forget_damaged_index(view: TableView, error: IndexDamagedError) -> None:
    """Use an index no more that a search found to be damaged: its rows are scanned.

    Raise the error if the view has no such index.
    """
    identity, parts = view.snapshot.store_identity, view.snapshot.list_parts()
    files = [part.entry.file for part in parts if part.entry is not None]
    damaged = [file for file in files if index_file(file) == error.index_file]
    if not damaged:
        raise error
    log_warning("the index of %s is not used, and its rows are scanned (%s)", damaged[0], error)
    _DAMAGED_BY_STORE.setdefault(identity, set()).update(damaged)
    loaded = _INDEXES_BY_STORE.get(identity, [])
    _INDEXES_BY_STORE[identity] = [x for x in loaded if not {*damaged} & {*x[1]}]
    view.index_cache.clear()


def _load_index(
    snapshot: Snapshot, entry: SegmentEntry, metric: MetricName, width: int, is_mapped: bool
) -> SegmentIndex | None:
    """Read and check the index of a segment. A damaged one is logged and not used."""
    try:
        # The codes of a mapped index have checksums for each list, which a search compares.
        stored = snapshot.read_index(entry, is_mapped, checks_codes=not is_mapped)
        if stored is None or stored[1].get("metric") != metric:
            return None
        arrays, metadata = stored
        file = arrays if arrays.is_mapped else None
        return SegmentIndex(arrays.tensors, metadata, entry.rows, width, file)
    except (StoreDamagedError, KeyError, TypeError, ValueError) as error:
        text = reason(error) if isinstance(error, StoreDamagedError) else str(error)
        log_warning("the index of %s is not used, and its rows are scanned (%s)", entry.file, text)
        return None
