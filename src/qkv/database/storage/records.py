"""The digests and records of rows: in the catalogue those of few, in bundles those of many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qkv.database.errors import SkippedRowsWarning, StoreDamagedError
from qkv.database.storage import catalog_queries, limits
from qkv.database.storage.blob_storage import BlobStorage
from qkv.database.storage.bundles import BUNDLE_GENERATION, BUNDLE_LAYOUT, Bundle, RowRecord
from qkv.database.storage.catalog import Catalog, VersionEntry, row_crc
from qkv.database.storage.segments import SegmentEntry
from qkv.errors import warn_at_caller

SELECT_ROW = "SELECT id, digest, record, crc FROM rows"
LIVE_CONDITION = "id >= ? AND id <= ? AND (died IS NULL OR died > ?)"
"""Rows of a version: between its first id and its last, and not dead by then."""

FIND_IDS_QUERY = f"SELECT id FROM rows WHERE digest = ? AND {LIVE_CONDITION}"
FIND_YOUNGEST_QUERY = f"{SELECT_ROW} WHERE digest = ? AND {LIVE_CONDITION} ORDER BY id DESC LIMIT 1"
FIND_LATEST_QUERY = f"{SELECT_ROW} WHERE digest = ? AND died IS NULL ORDER BY id DESC LIMIT 1"
ID_IN_LIST = "id IN (SELECT value FROM json_each(?))"

RowSpan = tuple[int, int, int]
"""The first and the last id of some rows, and the version in which they live."""

NEWEST_SPAN = 0, 2**63 - 1, 2**63 - 1
"""The rows that live in the newest version, whichever that is."""


class _RecordState(NamedTuple):
    """Where rows are, as long as the newest version is read from the same `version_entry`."""

    version_entry: VersionEntry | None
    bundles: tuple[Bundle, ...]
    lost_bundles: tuple[SegmentEntry, ...]
    has_catalog_rows: bool
    """Whether the catalogue has rows of its own, or tells which have died."""
    row_cache: dict[bytes, tuple[int, str]]
    """Short rows that were looked up, by their digest."""


_EMPTY_STATE = _RecordState(None, (), (), True, {})


class RecordStore:
    """The rows of all versions, dead ones too, as far as a compaction has not dropped them.

    >>> from qkv.database.storage import Store
    >>> store = Store()
    >>> _ = store.commit(records=["Li, Mu"], digests=[b"Li"])
    >>> store.open_snapshot().read_records(store.open_snapshot().find_ids(b"Li"))
    ['Li, Mu']
    """

    def __init__(self, catalogue: Catalog, shelf: BlobStorage, skip_damaged: bool = False) -> None:
        self.catalog, self.blob_storage = catalogue, shelf
        self._skip_damaged = skip_damaged
        self._state = _EMPTY_STATE
        self._deleted_cache = 0, np.zeros(0, np.int64)

    def find_ids(self, digest: bytes, span: RowSpan) -> list[int]:
        """The ids of the rows with this digest that live, oldest first."""
        while True:
            state = self._current_state()
            found = []
            if state.has_catalog_rows:
                found = [row for (row,) in self.catalog.fetch_all(FIND_IDS_QUERY, digest, *span)]
            among = range(span[0], span[1] + 1)
            more = [row for x in state.bundles for row in x.find_ids(digest) if row in among]
            loose = self._fetch_catalog_rows(more) if more and state.has_catalog_rows else {}
            found += [row for row in more if row not in loose]
            if self._is_current(state):
                return sorted(found)

    def find_newest(self, digest: bytes, span: RowSpan) -> RowRecord | None:
        """The last row with this digest that lives; None where there is none."""
        while True:
            state = self._current_state()
            line = None
            if state.has_catalog_rows:
                one = self.catalog.fetch_one
                line = (
                    one(FIND_LATEST_QUERY, digest)
                    if span is NEWEST_SPAN
                    else one(FIND_YOUNGEST_QUERY, digest, *span)
                )
            if state.bundles:
                line = self._find_younger(state, digest, span, line)
            if self._is_current(state):
                return line

    def find_latest_record(self, digest: bytes) -> tuple[int, str] | None:
        """The id and the record of the last row with this digest in the newest version."""
        known = self._current_state().row_cache
        found = known.get(digest)
        if found is None and (line := self.find_newest(digest, NEWEST_SPAN)) is not None:
            found = self.check_row(line)
            if len(found[1]) <= limits.MAX_CACHED_ROW_CHARACTERS:
                if len(known) >= limits.MAX_CACHED_ROWS:
                    known.clear()
                known[digest] = found
        return found

    def _find_younger(
        self, state: _RecordState, digest: bytes, span: RowSpan, line: RowRecord | None
    ) -> RowRecord | None:
        """The last row of a bundle of which the catalogue says nothing, or else this one."""
        first = span[0] if line is None else line[0] + 1
        for bundle in reversed(state.bundles):
            last = span[1]
            while (found := bundle.find_newest(digest, first, last)) is not None:
                if not (state.has_catalog_rows and self._fetch_catalog_rows([found[0]])):
                    return found
                last = found[0] - 1
        return line

    def read_rows(self, ids: Sequence[int] | np.ndarray, span: RowSpan) -> dict[int, RowRecord]:
        """The rows of these ids that live."""
        first, last, version = span
        wanted = [row for row in map(int, ids) if first <= row <= last]
        while True:
            state, found = self._current_state(), dict[int, RowRecord]()
            known = self._fetch_catalog_rows(wanted) if state.has_catalog_rows else {}
            for row, (died, line) in known.items():
                if died is None or died > version:
                    found[row] = line
            if state.bundles:
                rest = np.array([row for row in wanted if row not in known], np.int64)
                for bundle in state.bundles:
                    found.update((line[0], line) for line in bundle.read_rows(rest))
            if self._is_current(state):
                return found

    def live_ids(self, span: RowSpan) -> np.ndarray:
        """The ids of the rows that live, ascending."""
        while True:
            state = self._current_state()
            parts = [self._fetch_ids(f"SELECT id FROM rows WHERE {LIVE_CONDITION}", *span)]
            if state.bundles:
                loose = self._fetch_ids("SELECT id FROM rows")
                parts += [np.setdiff1d(x.ids, loose, assume_unique=True) for x in state.bundles]
            if self._is_current(state):
                ids = np.sort(np.concatenate(parts))
                return np.asarray(ids[(ids >= span[0]) & (ids <= span[1])])

    def _fetch_ids(self, statement: str, *values: int) -> np.ndarray:
        found = self.catalog.fetch_all(statement, *values)
        return np.fromiter((row for (row,) in found), np.int64, len(found))

    def dead_ids(self, version: int) -> np.ndarray:
        """The ids that are dead in a version, or lost in bundles that are skipped; ascending."""
        dead = self._deleted_ids(version)
        if not self._skip_damaged:
            return dead
        lost = [
            np.arange(entry.first, entry.last + 1) for entry in self._current_state().lost_bundles
        ]
        return np.unique(np.concatenate([dead, *lost]))

    def _deleted_ids(self, version: int) -> np.ndarray:
        """Those that are dead, remembered from one version to the next."""
        with self.catalog.lock:
            newer = version >= self._deleted_cache[0]
            since, dead = self._deleted_cache if newer else (0, self._deleted_cache[1][:0])
            # Lost rows that a repair listed have died in version 0.
            statement = "SELECT id FROM rows WHERE died > ? AND died <= ?"
            more = self._fetch_ids(statement, since or -1, version)
            if len(more):
                dead = np.sort(np.concatenate([dead, more]))
            if newer:
                self._deleted_cache = version, dead
            return dead

    def check_row(self, line: RowRecord) -> tuple[int, str]:
        """The id and the record of a row, refused where it is not what was written."""
        row, digest, record, crc = line
        if row_crc(row, digest, record) != crc:
            raise self.catalog.damaged_error(f"row {row} is not what was written")
        return row, record

    def copy_to_catalog(self, ids: Sequence[int]) -> None:
        """Copy rows that are to die from their bundles into the catalogue."""
        if not self._current_state().bundles:
            return
        for start in range(0, len(ids), limits.ROWS_PER_PAGE):
            some = ids[start : start + limits.ROWS_PER_PAGE]
            known = self._fetch_catalog_rows(some)
            found = self.read_rows([row for row in some if row not in known], (0, 2**63 - 1, 0))
            for line in found.values():
                self.check_row(line)
            statement = "INSERT INTO rows (id, digest, record, crc) VALUES (?, ?, ?, ?)"
            self.catalog.execute_many(statement, found.values())
            # Elsewhere, too: where that line is lost, a repair must not bring the row back.
            catalog_queries.buffer_rows(self.catalog, BUNDLE_GENERATION, found, [b""] * len(found))
        self._state = _EMPTY_STATE

    def _fetch_catalog_rows(self, ids: Sequence[int]) -> dict[int, tuple[int | None, RowRecord]]:
        """What the catalogue itself has of these rows, and when they died."""
        found: dict[int, tuple[int | None, RowRecord]] = {}
        statement = f"SELECT died, id, digest, record, crc FROM rows WHERE {ID_IN_LIST}"
        for start in range(0, len(ids), limits.ROWS_PER_PAGE):
            some = json.dumps(ids[start : start + limits.ROWS_PER_PAGE])
            for died, *line in self.catalog.fetch_all(statement, some):
                found[line[0]] = died, tuple(line)
        return found

    def _current_state(self) -> _RecordState:
        """Where rows are now."""
        state = self._state  # another thread may put another one in its place
        while (newest := self.catalog.newest_version()) is not state.version_entry:
            state = self._state = self._read_state(newest)
        return state

    def _read_state(self, newest: VersionEntry) -> _RecordState:
        entries = catalog_queries.list_segments(self.catalog, BUNDLE_GENERATION)
        loose = self.catalog.fetch_one("SELECT 1 FROM rows LIMIT 1") is not None
        bundles, lost = [], []
        for entry in entries:
            try:
                bundles.append(Bundle(self.blob_storage.read_segment(entry, BUNDLE_LAYOUT)))
            except (StoreDamagedError, KeyError) as fault:
                if self.catalog.newest_version() is not newest:
                    return _EMPTY_STATE  # others took its place
                if not self._skip_damaged:
                    raise
                lost.append(entry)
                rows = f"{entry.rows:,} rows were left out"
                warn_at_caller(f"{rows}: {fault}", SkippedRowsWarning)
        return _RecordState(newest, tuple(bundles), tuple(lost), loose, {})

    def _is_current(self, state: _RecordState) -> bool:
        """Whether what was read of the catalogue since is of this state, too."""
        return (
            not (state.has_catalog_rows and state.bundles)
            or self.catalog.newest_version() is state.version_entry
        )
