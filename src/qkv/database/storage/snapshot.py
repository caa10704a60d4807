"""Snapshots: one version of a store, which later commits and compactions do not change."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from qkv.database.errors import RowNotFoundError, SkippedRowsWarning, StoreDamagedError
from qkv.database.storage import limits
from qkv.database.storage.blob_storage import SegmentIndexData
from qkv.database.storage.catalog import Catalog, VersionEntry, is_buffered_row_intact
from qkv.database.storage.lock import VersionPins
from qkv.database.storage.records import MAX_IDS_PER_LOOP, RecordStore
from qkv.database.storage.segments import (
    RAGGED_DIMS,
    Layout,
    Segment,
    SegmentEntry,
    prefetch_segments,
)
from qkv.errors import ArgumentError, warn_at_caller
from qkv.frameworks.ragged import Ragged, concat_ragged
from qkv.util.types import Closable


class _Listing(NamedTuple):
    """Where the tensors of a version are stored, and which ids are deleted."""

    entries: list[SegmentEntry]
    buffered_rows: Segment
    dead_ids: np.ndarray
    damaged_count: int
    """The number of live buffered rows that are damaged and were skipped with a warning."""


class SegmentPart(NamedTuple):
    """The rows of a segment that belong to a snapshot.

    `segment` has the rows from `begin` on of the file of `entry`; `segment.live` marks the live
    ones. `entry` is None for buffered rows.
    """

    entry: SegmentEntry | None
    begin: int
    segment: Segment


class _SegmentMovedError(Exception):
    """A compaction has replaced this segment by another one."""


class Snapshot(Closable):
    """The rows of one version of a store; see `Store.open_snapshot`.

    No compaction drops the version until `close` is called.

    >>> from qkv.database.storage import Store
    >>> store = Store()
    >>> ids = store.commit(records=["one"], digests=[b"1"], tensors={"key": np.ones((1, 2))}).ids
    >>> with store.open_snapshot() as snapshot:
    ...     _ = store.commit(remove=ids)
    ...     now = store.open_snapshot()
    ...     snapshot.read_records(snapshot.find_ids(b"1")), len(snapshot), len(now)
    (['one'], 1, 0)
    """

    def __init__(
        self,
        owner: object,
        record_store: RecordStore,
        pins: VersionPins,
        version_entry: VersionEntry,
        skip_damaged: bool,
    ) -> None:
        self._owner = (
            owner  # this reference keeps the store open: a store without references closes itself
        )
        self._record_store, self._catalog, self._blob_storage = (
            record_store,
            record_store.catalog,
            record_store.blob_storage,
        )
        self._version_entry = version_entry
        self._first_id = 0
        self._skip_damaged = skip_damaged
        self._open_segments: dict[str, Segment] = {}
        self._cached_listing: _Listing | None = None
        self._ids: np.ndarray | None = None
        self._cached_layout: Layout | None = None
        self._settings: dict[str, Any] | None = None
        # Register the release before pinning, so that every pin is released.
        pin = version_entry.number, object()
        self._finalizer = weakref.finalize(self, pins.release_version, *pin)
        # At the end of the process, the system releases its locks anyway.
        self._finalizer.atexit = False
        self.is_pinned = pins.pin_version(*pin)

    def slice_rows(self, start: int, stop: int) -> Snapshot:
        """Return a snapshot with only the live rows at the positions start … stop − 1."""
        ids, part = self.live_ids()[start:stop], copy.copy(self)
        part._owner, part._cached_listing, part._ids = self, None, ids
        first, last = (int(ids[0]), int(ids[-1])) if len(ids) else (0, -1)
        part._first_id, part._version_entry = (
            first,
            self._version_entry._replace(last=last, rows=len(ids)),
        )
        return part

    @property
    def share_of_version(self) -> float:
        """The share of the rows of its version that a snapshot has; below 1 for a slice."""
        rows = len(self._owner) if isinstance(self._owner, Snapshot) else len(self)
        return len(self) / rows if len(self) else 1.0

    @property
    def _live_span(self) -> tuple[int, int, int]:
        return self._first_id, self._version_entry.last, self._version_entry.number

    @property
    def store_identity(self) -> object:
        """An object that all snapshots of an open store share."""
        return self._catalog

    @property
    def version(self) -> int:
        return self._version_entry.number

    @property
    def last_id(self) -> int:
        """The largest row id that was used up to this version; −1 if there was no row."""
        return self._version_entry.last

    @property
    def settings(self) -> dict[str, Any]:
        if self._settings is None:
            self._settings = self._catalog.read_settings(self._version_entry.settings)
        return copy.deepcopy(self._settings)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return self._read_layout().tensor_names

    def tensor_type(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
        """Return the type of a tensor and the shape of one row; None if there is no such tensor."""
        return next((field[1:] for field in self._read_layout().fields if field[0] == name), None)

    def __len__(self) -> int:
        return self._version_entry.rows

    def close(self) -> None:
        """Allow compactions to drop this version. Data that was already read stays valid."""
        self._finalizer()

    def find_ids(self, digest: bytes) -> list[int]:
        """Return the ids of the live rows with this digest, oldest first."""
        return self._record_store.find_ids(digest, self._live_span)

    def find_newest(self, digest: bytes) -> tuple[int, str] | None:
        """Return (id, record) of the newest live row with this digest, or None."""
        line = self._record_store.find_newest(digest, self._live_span)
        return None if line is None else self._record_store.check_row(line)

    def find_latest_record(self, digest: bytes) -> tuple[int, str] | None:
        """Return (id, record) of the newest row with this digest in the newest version, or None.

        The newest version may be newer than this snapshot.
        """
        return self._record_store.find_latest_record(digest)

    def read_records(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the records of live rows in the order of the ids; raise for other ids."""
        if len(ids) <= MAX_IDS_PER_LOOP and type(ids) is list:
            records = self._record_store.read_records(ids, self._live_span)
            if records is not None:
                return records
        return [record for _, record in self._read_rows(ids)]

    def read_digests(self, ids: Sequence[int] | np.ndarray) -> list[bytes]:
        """Return the digests of live rows in the order of the ids; raise for other ids."""
        return [digest for digest, _ in self._read_rows(ids)]

    def _read_rows(self, ids: Sequence[int] | np.ndarray) -> list[tuple[bytes, str]]:
        """Return (digest, record) of live rows in the order of the ids."""
        lines = self._record_store.read_rows(ids, self._live_span)
        check_row = self._record_store.check_row
        try:
            return [(line[1], check_row(line)[1]) for line in map(lines.__getitem__, ids)]
        except KeyError as error:
            raise self._unknown_row_error(error.args[0]) from None

    def iterate_rows(self, ids: np.ndarray | None = None) -> Iterator[tuple[int, str]]:
        """Yield (id, record) of all live rows, or of the rows with these ids, by ascending id."""
        ids = self.live_ids() if ids is None else ids
        for start in range(0, len(ids), limits.ROWS_PER_PAGE):
            page = self._record_store.read_rows(
                ids[start : start + limits.ROWS_PER_PAGE], self._live_span
            )
            for row in sorted(page):
                try:
                    yield self._record_store.check_row(page[row])
                except StoreDamagedError as error:
                    if not self._skip_damaged:
                        raise
                    warn_at_caller(f"1 row was skipped: {error}", SkippedRowsWarning)

    def live_ids(self) -> np.ndarray:
        """Return the ids of the live rows (m,), ascending."""
        if self._ids is None:
            self._ids = self._ids_from_segments()
            if self._ids is None:
                self._ids = self._record_store.live_ids(self._live_span)
            self._ids.flags.writeable = False
        return self._ids

    def iterate_segments(
        self,
        window: int | None = None,
        resident: int = limits.MAX_RESIDENT_BYTES,
        prefetch_fields: Collection[str] = (),
    ) -> Iterator[Segment]:
        """Yield all rows by ascending id, one segment at a time, or `window` rows at a time.

        If the tensors have more than `resident` bytes, the rows come in small windows. The memory
        of a window is released when the next window is read, and `prefetch_fields` are prefetched.
        """
        exceeds = self.exceeds_memory(resident)
        if window is None and exceeds:
            window = max(1, limits.WINDOW_BYTES // max(1, self._segment_bytes()[1]))
        for segment, after, dead in self._iterate_segments():
            windows = self._split_windows(segment, dead, after, window)
            for part in prefetch_segments(windows, prefetch_fields if exceeds else ()):
                part.check_not_truncated()
                yield part
                if exceeds:
                    part.release_pages()

    def list_parts(self) -> list[SegmentPart]:
        """Return all rows by ascending id: one part per segment, then the buffered rows."""
        parts, entries = [], {entry.first: entry for entry in self._read_listing().entries}
        for segment, after, dead in self._iterate_segments():
            begin = int(np.searchsorted(segment.ids, after, side="right"))
            entry = entries.get(int(segment.ids[0])) if len(segment.ids) else None
            if entry is not None and (entry.rows, entry.last) != (
                len(segment.ids),
                int(segment.ids[-1]),
            ):
                entry = None
            parts += [
                SegmentPart(entry, begin, part)
                for part in self._split_windows(segment, dead, after, None)
            ]
        return parts

    def read_index(
        self, entry: SegmentEntry, is_mapped: bool = False, checks_codes: bool = True
    ) -> SegmentIndexData | None:
        """Return the arrays and the metadata of a segment's index, or None if it has none.

        Without `checks_codes`, the codes are not compared with their checksum.
        """
        return self._blob_storage.read_index(entry, is_mapped, checks_codes)

    def exceeds_memory(self, resident: int = limits.MAX_RESIDENT_BYTES) -> bool:
        """Return whether the tensors have more than `resident` bytes."""
        return self._segment_bytes()[0] > resident

    def read_tensor(self, name: str, ids: Sequence[int] | np.ndarray) -> Any:
        """Return one tensor of the rows with these ids, in their order: (len(ids), …) or ragged."""
        wanted = np.asarray(ids, np.int64).reshape(-1)
        fields = {field[0]: field for field in self._read_layout().fields}
        if name not in fields:
            raise ArgumentError(f"no tensor {name!r}: the store has {', '.join(fields) or 'none'}")
        _, dtype, dims = fields[name]
        ragged = dims == RAGGED_DIMS
        result = np.empty((len(wanted), *(() if ragged else dims)), np.int64 if ragged else dtype)
        ragged_parts, count = [Ragged(np.empty(0, dtype), np.zeros(1, np.int64))], 0
        order = np.argsort(wanted, kind="stable")
        ascending = wanted[order]
        live = live_mask(ascending, self._read_listing().dead_ids)
        if live is not None:
            raise self._unknown_row_error(int(ascending[live.argmin()]))
        is_read = np.zeros(len(wanted), bool)

        def needs_entry(entry: SegmentEntry) -> bool:
            begin, end = np.searchsorted(ascending, (entry.first, entry.last + 1))
            return bool(begin < end and not is_read[begin:end].all())

        for segment, _, _ in self._iterate_segments(needs_entry, strict=True):
            if not len(segment.ids):
                continue
            begin, end = np.searchsorted(ascending, (segment.ids[0], segment.ids[-1] + 1))
            needed = ascending[begin:end]
            positions = np.searchsorted(segment.ids, needed)
            is_here = segment.ids[positions] == needed
            rows = segment.tensors[name][positions[is_here]]
            if ragged:  # for a ragged tensor, `result` gets positions in ragged_parts
                ragged_parts.append(rows)
                rows = count + np.arange(len(rows))
                count += len(rows)
            result[order[begin:end][is_here]] = rows
            is_read[begin:end] |= is_here
        is_read &= ascending <= self._version_entry.last
        if not is_read.all():
            row = int(ascending[is_read.argmin()])
            raise (
                self._lost_vectors_error(row)
                if self._record_store.read_rows([row], self._live_span)
                else self._unknown_row_error(row)
            )
        return concat_ragged(ragged_parts)[result] if ragged else result

    def read_arrays(self) -> dict[str, np.ndarray]:
        """Return the encoder's arrays of this version, read-only, by name."""
        files = self._catalog.list_array_files(self._version_entry.generation)
        return self._blob_storage.read_arrays(*files[0][:2]) if files else {}

    def check_complete(self, ids: np.ndarray) -> np.ndarray:
        """Return `ids`, the rows whose tensors were found.

        If live rows are missing from them, raise, or warn if damaged rows are skipped.
        """
        lost = len(self) - len(ids)
        if lost > 0 and not self._skip_damaged:
            live = self._record_store.live_ids(self._live_span)
            raise self._lost_vectors_error(
                int(np.setdiff1d(live, ids, assume_unique=True)[0]), lost
            )
        # Warnings for skipped files and skipped buffered rows were given before.
        lost -= self._read_listing().damaged_count if lost > 0 else 0
        if lost > 0 and all(
            entry.file in self._open_segments for entry in self._read_listing().entries
        ):
            warn_at_caller(f"rows with lost vectors were skipped: {lost:,}", SkippedRowsWarning)
        return ids

    def _lost_vectors_error(self, row: int, rows: int = 1) -> StoreDamagedError:
        return StoreDamagedError(
            f"{self._catalog.path} is damaged: the vectors of row {row}"
            f"{f' and {rows - 1:,} more' if rows > 1 else ''} are lost. Restore it from a "
            "backup, encode the keys again with D.encode() unless they are vectors, or open the "
            "store with skip_damaged=True to use the other rows"
        )

    def _unknown_row_error(self, row: int) -> RowNotFoundError:
        return RowNotFoundError(
            f"row {row} is not in version {self.version}: find_ids() and live_ids() return its rows"
        )

    def _read_layout(self) -> Layout:
        if self._cached_layout is None:
            layout = self._catalog.read_layout(self._version_entry.generation)
            self._cached_layout = layout or Layout()
        return self._cached_layout

    def _read_listing(self, fresh: bool = False) -> _Listing:
        """Return where the tensors of this version are stored. With `fresh`, ignore the cache.

        All parts are read in one transaction.
        """
        with self._catalog.lock:
            if self._cached_listing is None or fresh:
                layout = self._read_layout()
                version_entry = self._version_entry
                with self._catalog.read_transaction():
                    entries = self._catalog.list_segments(version_entry.generation)
                    buffered = self._catalog.fetch_all(
                        "SELECT id, tensors, crc FROM resting WHERE generation = ? AND id <= ?"
                        " ORDER BY id",
                        version_entry.generation,
                        version_entry.last,
                    )
                    dead = self._record_store.dead_ids(version_entry.number)
                intact = build_buffered_segment(self._catalog, layout, buffered, self._skip_damaged)
                damaged = (
                    {row for row, _, _ in buffered} if len(intact.ids) < len(buffered) else set()
                )
                damaged -= {*intact.ids.tolist(), *dead.tolist()} if damaged else set()
                entries = [entry for entry in entries if entry.first <= version_entry.last]
                self._cached_listing = _Listing(entries, intact, dead, len(damaged))
            return self._cached_listing

    def _iterate_segments(
        self, wanted: Callable[[SegmentEntry], bool] = lambda entry: True, strict: bool = False
    ) -> Iterator[tuple[Segment, int, np.ndarray]]:
        """Yield the `wanted` segments by ascending id, then the buffered rows.

        Each item is (segment, last id yielded before, deleted ids). With `strict`, damaged segments
        are never skipped.
        """
        after = self._first_id - 1
        while True:
            listing = self._read_listing()
            for entry in listing.entries:
                if entry.last <= after or not wanted(entry):
                    continue
                try:
                    segment = self._open_segment(entry, strict)
                except _SegmentMovedError:
                    break  # read the listing again, with the segments that replaced this one
                if segment is not None:
                    yield segment, after, listing.dead_ids
                    after = entry.last
            else:
                yield listing.buffered_rows, after, listing.dead_ids
                return

    def _open_segment(self, entry: SegmentEntry, strict: bool = False) -> Segment | None:
        """Open a segment. Return None if it is damaged and damaged files are skipped."""
        segment = self._open_segments.get(entry.file)
        if segment is None or segment.is_truncated:
            try:
                segment = self._blob_storage.read_segment(entry, self._read_layout())
            except (StoreDamagedError, KeyError) as error:
                if entry not in self._read_listing(fresh=True).entries:
                    raise _SegmentMovedError from None
                if strict or not self._skip_damaged:
                    raise
                warn_at_caller(f"{entry.rows:,} rows were skipped: {error}", SkippedRowsWarning)
                return None
            self._open_segments[entry.file] = segment
        return segment

    def _split_windows(
        self, segment: Segment, dead: np.ndarray, after: int, window: int | None
    ) -> Iterator[Segment]:
        """Yield the rows of a segment with ids above `after`, in windows of `window` rows."""
        begin = int(np.searchsorted(segment.ids, after, side="right"))
        end = int(np.searchsorted(segment.ids, self._version_entry.last, side="right"))
        step = window or max(1, end - begin)
        for start in range(begin, end, step):
            part = segment[start : min(start + step, end)]
            part.live = live_mask(part.ids, dead)
            yield part

    def _segment_bytes(self) -> tuple[int, int]:
        """Return the size of all segments, and the size of one row, in bytes."""
        width = self._read_layout().row_bytes + 8
        entries = (entry for entry in self._read_listing().entries if entry.last >= self._first_id)
        return sum(entry.size for entry in entries), width

    def _ids_from_segments(self) -> np.ndarray | None:
        """Return the live ids, read from the segments, which is fast.

        Return None if a segment is damaged.
        """
        parts: list[Segment] = []
        try:
            listing = self._read_listing()
            for entry in listing.entries:
                segment = self._blob_storage.read_segment(entry, self._read_layout())
                parts.extend(self._split_windows(segment, listing.dead_ids, -1, None))
            parts.extend(self._split_windows(listing.buffered_rows, listing.dead_ids, -1, None))
        except (StoreDamagedError, KeyError):
            return None
        live = [part.ids if part.live is None else part.ids[part.live] for part in parts]
        ids = np.concatenate(live) if live else np.zeros(0, np.int64)
        return ids if len(ids) == len(self) else None


def build_buffered_segment(
    catalog: Catalog,
    layout: Layout,
    rows: Sequence[tuple[int, bytes, int]],
    skip_damaged: bool = False,
) -> Segment:
    """Return buffered rows, each (id, tensors, crc), as a segment in memory."""
    is_intact = [is_buffered_row_intact(*line) and layout.is_row_size(line[1]) for line in rows]
    intact = [line for line, ok in zip(rows, is_intact, strict=True) if ok]
    if len(intact) < len(rows):
        row = rows[is_intact.index(False)][0]
        error = catalog.damaged_error(f"the tensors of row {row} are not what was written")
        if not skip_damaged:
            raise error
        skipped = len(rows) - len(intact)
        warn_at_caller(f"{skipped:,} rows were skipped: {error}", SkippedRowsWarning)
    ids = np.fromiter((row for row, _, _ in intact), np.int64, len(intact))
    return Segment(ids, layout.unpack_rows([packed for _, packed, _ in intact]))


def live_mask(ids: np.ndarray, dead: np.ndarray) -> np.ndarray | None:
    """Return a mask of the ids that are not deleted; None if all are live.

    `ids` and `dead`, the deleted ids, are ascending.

    >>> (
    ...     live_mask(np.array([1, 4, 6]), np.array([2, 4])).tolist(),
    ...     live_mask(np.array([1]), np.array([2])),
    ... )
    ([True, False, True], None)
    """
    if not len(ids) or not len(dead):
        return None
    begin, end = np.searchsorted(dead, (ids[0], ids[-1] + 1))
    if begin == end:
        return None
    nearby = dead[begin:end]
    positions = np.minimum(np.searchsorted(nearby, ids), len(nearby) - 1)
    live: np.ndarray = nearby[positions] != ids
    return None if live.all() else live
