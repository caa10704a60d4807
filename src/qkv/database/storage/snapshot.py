"""A snapshot: one version of a store, which no later commit or compaction changes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from qkv.database.errors import RowNotFoundError, SkippedRowsWarning, StoreDamagedError
from qkv.database.storage import catalog_queries, limits
from qkv.database.storage.catalog import Catalog, VersionEntry
from qkv.database.storage.layout import RAGGED_DIMS, Layout
from qkv.database.storage.lock import VersionPins
from qkv.database.storage.records import RecordStore
from qkv.database.storage.segments import Segment, SegmentEntry, prefetch_segments
from qkv.errors import ArgumentError, warn_at_caller
from qkv.frameworks.ragged import Ragged, concat_ragged
from qkv.util.types import Closable


class _Listing(NamedTuple):
    """Where the tensors of a version are, and which of its ids are dead."""

    entries: list[SegmentEntry]
    buffered_rows: Segment
    dead_ids: np.ndarray
    damaged_count: int
    """Resting rows that are live and were left out, and told of."""


class _SegmentMovedError(Exception):
    """A compaction put another segment in this one's place."""


class Snapshot(Closable):
    """The rows of one version; get one from `Store.at`. Its version is kept until `close`.

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
        lines: RecordStore,
        pins: VersionPins,
        edition: VersionEntry,
        skip_damaged: bool,
    ) -> None:
        self._owner = owner  # a store that nobody holds closes itself
        self._record_store, self._catalog, self._blob_storage = (
            lines,
            lines.catalog,
            lines.blob_storage,
        )
        self._version_entry = edition
        self._first_id = 0
        self._skip_damaged = skip_damaged
        self._open_segments: dict[str, Segment] = {}
        self._cached_listing: _Listing | None = None
        self._ids: np.ndarray | None = None
        self._cached_layout: Layout | None = None
        self._settings: dict[str, Any] | None = None
        # Before the hold, so that nothing is held which nobody lets go of.
        pin = edition.number, object()
        self._finalizer = weakref.finalize(self, pins.release_version, *pin)
        # At the end of the process its locks go by themselves.
        self._finalizer.atexit = False
        self.is_pinned = pins.pin_version(*pin)

    def slice_rows(self, start: int, stop: int) -> Snapshot:
        """The live rows from the one numbered `start` to that before `stop`, and no others."""
        ids, some = self.live_ids()[start:stop], copy.copy(self)
        some._owner, some._cached_listing, some._ids = self, None, ids
        first, last = (int(ids[0]), int(ids[-1])) if len(ids) else (0, -1)
        some._first_id, some._version_entry = (
            first,
            self._version_entry._replace(last=last, rows=len(ids)),
        )
        return some

    @property
    def _live_span(self) -> tuple[int, int, int]:
        return self._first_id, self._version_entry.last, self._version_entry.number

    @property
    def version(self) -> int:
        return self._version_entry.number

    @property
    def last_id(self) -> int:
        """The id of the youngest row that was ever born, −1 before the first."""
        return self._version_entry.last

    @property
    def settings(self) -> dict[str, Any]:
        if self._settings is None:
            self._settings = self._catalog.read_settings(self._version_entry.settings)
        return copy.deepcopy(self._settings)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of the tensors."""
        return self._read_layout().tensor_names

    def tensor_type(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
        """The type of a tensor, and its shape in one row; None where there is none."""
        return next((field[1:] for field in self._read_layout().fields if field[0] == name), None)

    def __len__(self) -> int:
        return self._version_entry.rows

    def close(self) -> None:
        """Let a compaction drop this version; what was read stays valid."""
        self._finalizer()

    def find_ids(self, digest: bytes) -> list[int]:
        """The ids of the live rows with this digest, oldest first."""
        return self._record_store.find_ids(digest, self._live_span)

    def find_newest(self, digest: bytes) -> tuple[int, str] | None:
        """The id and the record of the last live row with this digest; None where there is none."""
        found = self._record_store.find_newest(digest, self._live_span)
        return None if found is None else self._record_store.check_row(found)

    def find_latest_record(self, digest: bytes) -> tuple[int, str] | None:
        """The same in the newest version of the store, whichever this one is."""
        return self._record_store.find_latest_record(digest)

    def read_records(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The records of live rows, in the order of the ids."""
        return [record for _, record in self._read_rows(ids)]

    def read_digests(self, ids: Sequence[int] | np.ndarray) -> list[bytes]:
        """What they are found by, likewise."""
        return [digest for digest, _ in self._read_rows(ids)]

    def _read_rows(self, ids: Sequence[int] | np.ndarray) -> list[tuple[bytes, str]]:
        lines = self._record_store.read_rows(ids, self._live_span)
        found = {
            row: (line[1], self._record_store.check_row(line)[1]) for row, line in lines.items()
        }
        try:
            return [found[int(row)] for row in ids]
        except KeyError as error:
            raise self._unknown_row_error(error.args[0]) from None

    def iterate_rows(self, ids: np.ndarray | None = None) -> Iterator[tuple[int, str]]:
        """The live rows, or those of these ids, by id, (id, record), some at a time."""
        ids = self.live_ids() if ids is None else ids
        for start in range(0, len(ids), limits.ROWS_PER_PAGE):
            page = self._record_store.read_rows(
                ids[start : start + limits.ROWS_PER_PAGE], self._live_span
            )
            for row in sorted(page):
                try:
                    yield self._record_store.check_row(page[row])
                except StoreDamagedError as fault:
                    if not self._skip_damaged:
                        raise
                    warn_at_caller(f"1 row was left out: {fault}", SkippedRowsWarning)

    def live_ids(self) -> np.ndarray:
        """The ids of the live rows (m,), ascending."""
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
        ahead: Collection[str] = (),
    ) -> Iterator[Segment]:
        """All rows by id, a segment at a time, or `window` rows at a time.

        Where the tensors take more than `resident` bytes, the windows are small, and when the
        next one is asked for, the system may take back the memory of the last; the tensors that
        are named are read `ahead` of that.
        """
        scarce = self.exceeds_memory(resident)
        if window is None and scarce:
            window = max(1, limits.WINDOW_BYTES // max(1, self._segment_bytes()[1]))
        for segment, after, dead in self._iterate_segments():
            windows = self._split_windows(segment, dead, after, window)
            for part in prefetch_segments(windows, ahead if scarce else ()):
                part.check_not_truncated()
                yield part
                if scarce:
                    part.release_pages()

    def exceeds_memory(self, resident: int = limits.MAX_RESIDENT_BYTES) -> bool:
        """Whether the tensors take more than so many bytes."""
        return self._segment_bytes()[0] > resident

    def read_tensor(self, name: str, ids: Sequence[int] | np.ndarray) -> Any:
        """The rows of one tensor for these ids, in their order: (len(ids), …), or ragged."""
        wanted = np.asarray(ids, np.int64).reshape(-1)
        fields = {field[0]: field for field in self._read_layout().fields}
        if name not in fields:
            raise ArgumentError(f"no tensor {name!r}: there are {', '.join(fields) or 'none'}")
        _, dtype, dims = fields[name]
        ragged = dims == RAGGED_DIMS
        result = np.empty((len(wanted), *(() if ragged else dims)), np.int64 if ragged else dtype)
        held, count = [Ragged(np.empty(0, dtype), np.zeros(1, np.int64))], 0
        order = np.argsort(wanted, kind="stable")
        ascending = wanted[order]
        live = live_mask(ascending, self._read_listing().dead_ids)
        if live is not None:
            raise self._unknown_row_error(int(ascending[live.argmin()]))
        done = np.zeros(len(wanted), bool)

        def needs_entry(entry: SegmentEntry) -> bool:
            begin, end = np.searchsorted(ascending, (entry.first, entry.last + 1))
            return bool(begin < end and not done[begin:end].all())

        for segment, _, _ in self._iterate_segments(needs_entry, strict=True):
            if not len(segment.ids):
                continue
            begin, end = np.searchsorted(ascending, (segment.ids[0], segment.ids[-1] + 1))
            some = ascending[begin:end]
            at = np.searchsorted(segment.ids, some)
            there = segment.ids[at] == some
            rows = segment.tensors[name][at[there]]
            if ragged:  # its places among those that are held
                held.append(rows)
                rows = count + np.arange(len(rows))
                count += len(rows)
            result[order[begin:end][there]] = rows
            done[begin:end] |= there
        done &= ascending <= self._version_entry.last
        if not done.all():
            row = int(ascending[done.argmin()])
            raise (
                self._lost_vectors_error(row)
                if self._record_store.read_rows([row], self._live_span)
                else self._unknown_row_error(row)
            )
        return concat_ragged(held)[result] if ragged else result

    def read_arrays(self) -> dict[str, np.ndarray]:
        """The arrays that were fixed with this version's generation, read-only."""
        found = catalog_queries.list_array_files(self._catalog, self._version_entry.generation)
        return self._blob_storage.read_arrays(*found[0][:2]) if found else {}

    def check_complete(self, ids: np.ndarray) -> np.ndarray:
        """The rows whose tensors are there again, if they are all; else an error, or a warning."""
        lost = len(self) - len(ids)
        if lost > 0 and not self._skip_damaged:
            live = self._record_store.live_ids(self._live_span)
            raise self._lost_vectors_error(
                int(np.setdiff1d(live, ids, assume_unique=True)[0]), lost
            )
        # What is in a file that was skipped is told of already, and what rests.
        lost -= self._read_listing().damaged_count if lost > 0 else 0
        if lost > 0 and all(
            entry.file in self._open_segments for entry in self._read_listing().entries
        ):
            told = f"rows without their vectors, which are lost, were left out: {lost:,}"
            warn_at_caller(told, SkippedRowsWarning)
        return ids

    def _lost_vectors_error(self, row: int, rows: int = 1) -> StoreDamagedError:
        return StoreDamagedError(
            f"{self._catalog.path} is damaged: the vectors of row {row}"
            f"{f' and {rows - 1:,} more' if rows > 1 else ''} are lost. Restore it from a copy, "
            "encode the keys again where they are no vectors, D.encode(), or open the store with "
            "skip_damaged=True to use the other rows"
        )

    def _unknown_row_error(self, row: int) -> RowNotFoundError:
        return RowNotFoundError(
            f"row {row} is not in version {self.version}: find() and ids() give rows"
        )

    def _read_layout(self) -> Layout:
        if self._cached_layout is None:
            found = catalog_queries.read_layout(self._catalog, self._version_entry.generation)
            self._cached_layout = found or Layout()
        return self._cached_layout

    def _read_listing(self, fresh: bool = False) -> _Listing:
        """Where everything is, read at one moment."""
        with self._catalog.lock:
            if self._cached_listing is None or fresh:
                layout = self._read_layout()
                edition = self._version_entry
                with self._catalog.read_transaction():
                    entries = catalog_queries.list_segments(self._catalog, edition.generation)
                    resting = self._catalog.fetch_all(
                        "SELECT id, tensors, crc FROM resting WHERE generation = ? AND id <= ?"
                        " ORDER BY id",
                        edition.generation,
                        edition.last,
                    )
                    dead = self._record_store.dead_ids(edition.number)
                sound = build_buffered_segment(self._catalog, layout, resting, self._skip_damaged)
                damaged = {row for row, _, _ in resting} if len(sound.ids) < len(resting) else set()
                damaged -= {*sound.ids.tolist(), *dead.tolist()} if damaged else set()
                found = [entry for entry in entries if entry.first <= edition.last]
                self._cached_listing = _Listing(found, sound, dead, len(damaged))
            return self._cached_listing

    def _iterate_segments(
        self, wanted: Callable[[SegmentEntry], bool] = lambda entry: True, strict: bool = False
    ) -> Iterator[tuple[Segment, int, np.ndarray]]:
        """The segments that are wanted by id, and then what rests; each with the id behind which
        its rows are new, and those that are dead."""
        after = self._first_id - 1
        while True:
            listing = self._read_listing()
            for entry in listing.entries:
                if entry.last <= after or not wanted(entry):
                    continue
                try:
                    segment = self._open_segment(entry, strict)
                except _SegmentMovedError:
                    break  # go on with the segments that took its place
                if segment is not None:
                    yield segment, after, listing.dead_ids
                    after = entry.last
            else:
                yield listing.buffered_rows, after, listing.dead_ids
                return

    def _open_segment(self, entry: SegmentEntry, strict: bool = False) -> Segment | None:
        """An open segment; None if it is damaged and to be skipped."""
        segment = self._open_segments.get(entry.file)
        if segment is None or segment.is_truncated:
            try:
                segment = self._blob_storage.read_segment(entry, self._read_layout())
            except (StoreDamagedError, KeyError) as fault:
                if entry not in self._read_listing(fresh=True).entries:
                    raise _SegmentMovedError from None
                if strict or not self._skip_damaged:
                    raise
                rows = f"{entry.rows:,} rows were left out"
                warn_at_caller(f"{rows}: {fault}", SkippedRowsWarning)
                return None
            self._open_segments[entry.file] = segment
        return segment

    def _split_windows(
        self, segment: Segment, dead: np.ndarray, after: int, window: int | None
    ) -> Iterator[Segment]:
        begin = int(np.searchsorted(segment.ids, after, side="right"))
        end = int(np.searchsorted(segment.ids, self._version_entry.last, side="right"))
        step = window or max(1, end - begin)
        for start in range(begin, end, step):
            part = segment[start : min(start + step, end)]
            part.live = live_mask(part.ids, dead)
            yield part

    def _segment_bytes(self) -> tuple[int, int]:
        """Bytes of all segments, and of one row."""
        width = self._read_layout().row_bytes + 8
        held = (entry for entry in self._read_listing().entries if entry.last >= self._first_id)
        return sum(entry.size for entry in held), width

    def _ids_from_segments(self) -> np.ndarray | None:
        """The live ids from the segments, which is fast; None where they do not tell them all."""
        found: list[Segment] = []
        try:
            listing = self._read_listing()
            for entry in listing.entries:
                segment = self._blob_storage.read_segment(entry, self._read_layout())
                found.extend(self._split_windows(segment, listing.dead_ids, -1, None))
            found.extend(self._split_windows(listing.buffered_rows, listing.dead_ids, -1, None))
        except (StoreDamagedError, KeyError):
            return None
        live = [part.ids if part.live is None else part.ids[part.live] for part in found]
        ids = np.concatenate(live) if live else np.zeros(0, np.int64)
        return ids if len(ids) == len(self) else None


def build_buffered_segment(
    catalogue: Catalog,
    layout: Layout,
    rows: Sequence[tuple[int, bytes, int]],
    skip_damaged: bool = False,
) -> Segment:
    """Resting rows (id, tensors, crc) as a segment in memory."""
    fine = [catalog_queries.is_intact(*line) and layout.is_row_size(line[1]) for line in rows]
    sound = [line for line, whole in zip(rows, fine, strict=True) if whole]
    if len(sound) < len(rows):
        row = rows[fine.index(False)][0]
        fault = catalogue.damaged_error(f"the tensors of row {row} are not what was written")
        if not skip_damaged:
            raise fault
        left = len(rows) - len(sound)
        warn_at_caller(f"{left:,} rows were left out: {fault}", SkippedRowsWarning)
    ids = np.fromiter((row for row, _, _ in sound), np.int64, len(sound))
    return Segment(ids, layout.unpack_rows([packed for _, packed, _ in sound]))


def live_mask(ids: np.ndarray, dead: np.ndarray) -> np.ndarray | None:
    """Which ids are not among the dead; None where none is. Both ascend.

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
    some = dead[begin:end]
    at = np.minimum(np.searchsorted(some, ids), len(some) - 1)
    live: np.ndarray = some[at] != ids
    return None if live.all() else live
