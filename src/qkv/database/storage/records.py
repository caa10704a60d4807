"""Records and digests of rows, in the catalog or in the bundle files of large commits.

A bundle is a segment without a generation, with a sorted index of digests. Its rows are in no table
of the catalog until they are deleted. If both have a row, the entry in the catalog counts.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from qkv.database.errors import SkippedRowsWarning, StoreDamagedError
from qkv.database.storage import limits
from qkv.database.storage.blob_storage import BlobStorage
from qkv.database.storage.catalog import Catalog, VersionEntry, row_crc
from qkv.database.storage.segments import RAGGED_DIMS, Layout, Segment, SegmentEntry
from qkv.errors import warn_at_caller
from qkv.frameworks.ragged import Ragged, concat_ragged

BUNDLE_GENERATION = -1
"""The number of a generation with which the catalog lists bundles."""

BUNDLE_LAYOUT = Layout(
    (
        ("prefix", np.dtype("<u8"), ()),
        ("crc", np.dtype("<u4"), ()),
        ("place", np.dtype("<u4"), ()),
        ("line", np.dtype("u1"), RAGGED_DIMS),
        ("size", np.dtype("u1"), ()),
    )
)
"""`line` is the digest (`size` bytes) followed by the record, for each row.

The index is `prefix`, the first 8 bytes of all digests in ascending order, and `place`, the row of
each of these digests.
"""

MAX_DIGEST_BYTES = 255
"""The length of the longest digest that a bundle can store."""

ROWS_PER_BLOCK = 2**16
"""The number of rows whose lines are in memory twice while a bundle is built."""

MAX_IDS_PER_LOOP = 256
"""More rows of a bundle are found by one call of NumPy."""

FULL_DIGEST_BYTES = 16
"""The length of a key's complete digest.

A longer digest never starts with such a digest. If one seems to, a `size` is damaged.
"""

RowRecord = tuple[int, bytes, str, int]
"""A row: id, digest, record, and the checksum of these."""


class Bundle:
    """Finds the rows of a bundle file by id or by digest.

    >>> bundle = Bundle(build_bundle(np.array([4, 7]), [b"Li", b"Hu"], ["Li, Mu", "Hu, Rachel"]))
    >>> bundle.find_ids(b"Hu"), list(bundle.read_rows([4]))[0][:3]
    ([7], (4, b'Li', 'Li, Mu'))
    """

    def __init__(self, segment: Segment):
        self.ids, self._segment = segment.ids, segment
        tensors: dict[str, Any] = dict(segment.tensors)
        line: Ragged = tensors["line"]
        self._row_ids, self._line_bytes, self._starts = map(
            _as_memoryview, (self.ids, line.flat, line.starts)
        )
        self._digest_prefixes, self._row_positions, self._digest_sizes, self._checksums = (
            _as_memoryview(tensors[name]) for name in ("prefix", "place", "size", "crc")
        )

    def find_ids(self, digest: bytes) -> list[int]:
        """Return the ids of the rows with this digest, ascending."""
        ids, last = list[int](), 2**63
        while (line := self.find_newest(digest, 0, last - 1)) is not None:
            last = line[0]
            ids.append(last)
        return ids[::-1]

    def find_newest(self, digest: bytes, first: int, last: int) -> RowRecord | None:
        """Return the newest row with this digest and an id in [first, last]; None if there is none.

        The search ends between two neighbouring entries of the index. If both entries match their
        rows, the digest is nowhere else in the file. If one does not match, the index is damaged.
        """
        self._segment.check_not_truncated()
        wanted, prefix = int.from_bytes(digest[:8], "little"), self._digest_prefixes
        entry = bisect_right(prefix, wanted)
        is_sound = entry == len(prefix) or self._is_indexed(entry)
        while is_sound and (entry := entry - 1) >= 0 and prefix[entry] == wanted:
            line = self._read_row(self._row_positions[entry])
            if line[1] == digest and first <= line[0] <= last:
                return line
            # Digests of different keys hardly ever share a prefix, and complete digests have one
            # length.
            is_sound = self._is_indexed(entry) and row_crc(*line[:3]) == line[3]
            is_sound &= len(digest) < FULL_DIGEST_BYTES or len(digest) == len(line[1])
        if not is_sound or (entry >= 0 and not self._is_indexed(entry)):
            raise self._segment.damaged_error(
                "its index is not what was written, so existing keys may not be found"
            )
        return None

    def _is_indexed(self, entry: int) -> bool:
        """Return whether entry `entry` of the index matches the digest of its row."""
        position = self._row_positions[entry]
        if position >= len(self._row_ids):
            return False
        start, size = self._starts[position], self._digest_sizes[position]
        begin = self._line_bytes[start : start + (size if size < 8 else 8)]
        return int.from_bytes(begin, "little") == self._digest_prefixes[entry]

    def read_rows(self, ids: Sequence[int]) -> Iterator[RowRecord]:
        """Yield the rows with these ids that the bundle has."""
        self._segment.check_not_truncated()
        row_ids, last = self._row_ids, len(self._row_ids) - 1
        if len(ids) <= MAX_IDS_PER_LOOP and row_ids[last] - row_ids[0] == last:
            # There are no gaps: no search is needed.
            near = [(id_, id_ - row_ids[0]) for id_ in ids]
            positions = [at for id_, at in near if 0 <= at <= last and row_ids[at] == id_]
        else:
            array = np.asarray(ids, np.int64)
            places = np.minimum(np.searchsorted(self.ids, array), last)
            positions = places[self.ids[places] == array].tolist()
        return map(self._read_row, positions)

    def read_all_records(self, ids: Sequence[int]) -> list[str] | None:
        """Return the checked records of these rows, or None if `read_rows` must find them."""
        self._segment.check_not_truncated()
        row_ids, starts, sizes = self._row_ids, self._starts, self._digest_sizes
        first, count, records = row_ids[0], len(row_ids), list[str]()
        for row in ids:
            at = row - first
            if not 0 <= at < count or row_ids[at] != row:
                return None
            line = bytes(self._line_bytes[starts[at] : starts[at + 1]])
            if crc32(line, row & 0xFFFFFFFF) != self._checksums[at]:
                return None
            records.append(str(line[sizes[at] :], "utf-8"))
        return records

    def _read_row(self, position: int) -> RowRecord:
        """Return the row at a position.

        A record that is not valid UTF-8 becomes "", which does not match the checksum.
        """
        if position >= len(self._row_ids):
            return -1, b"", "", -1
        starts, size = self._starts, self._digest_sizes[position]
        line = bytes(self._line_bytes[starts[position] : starts[position + 1]])
        try:
            record = str(line[size:], "utf-8")
        except UnicodeDecodeError:
            record = ""
        return self._row_ids[position], line[:size], record, self._checksums[position]


def build_bundle(ids: np.ndarray, digests: Sequence[bytes], records: Sequence[str]) -> Segment:
    """Return these rows as a bundle segment."""
    crc, size = np.empty(len(ids), np.uint32), np.empty(len(ids), np.uint8)
    starts, text = np.zeros(len(ids) + 1, np.int64), bytearray()
    pairs = zip(digests, records, strict=True)
    for start in range(0, len(ids), ROWS_PER_BLOCK):
        page = list(itertools.islice(pairs, ROWS_PER_BLOCK))
        lines = [digest + record.encode() for digest, record in page]
        at = slice(start, start + len(lines))
        crc[at] = np.fromiter(map(crc32, lines, (ids[at] & 0xFFFFFFFF).tolist()), np.uint32)
        # `fromiter` raises for a digest that is too long.
        size[at] = np.fromiter((len(digest) for digest, _ in page), np.uint8, len(page))
        starts[start + 1 : start + 1 + len(lines)] = np.fromiter(map(len, lines), np.int64)
        text += b"".join(lines)
    next(pairs, None)  # this raises if there are more digests or records than ids
    np.cumsum(starts, out=starts)
    line = Ragged(np.frombuffer(text, np.uint8), starts)
    return _build_digest_segment(ids, {"line": line, "crc": crc, "size": size})


def merge_bundles(parts: Sequence[Segment]) -> Segment:
    """Return one bundle with the rows of several bundles."""
    tensors: dict[str, Any] = {
        name: (concat_ragged if name == "line" else np.concatenate)(
            [x.tensors[name] for x in parts]
        )
        for name in ("line", "crc", "size")
    }
    return _build_digest_segment(np.concatenate([x.ids for x in parts]), tensors)


def _build_digest_segment(ids: np.ndarray, tensors: dict[str, Any]) -> Segment:
    """Return a bundle segment of these rows, with the index of their digests."""
    line, size, eight = tensors["line"], tensors["size"], np.arange(8)
    prefix, flat = np.empty(len(size), "<u8"), line.flat if len(line.flat) else np.zeros(1, "u1")
    for start in range(0, len(size), ROWS_PER_BLOCK):
        at = slice(start, start + ROWS_PER_BLOCK)
        # What follows a short digest does not count.
        text = flat[np.minimum(line.starts[:-1][at, None] + eight, len(flat) - 1)]
        text[eight >= size[at, None]] = 0
        prefix[at] = text.reshape(-1).view("<u8")
    order = np.argsort(prefix, kind="stable")  # rows with equal digests stay in order
    return Segment(ids, {**tensors, "prefix": prefix[order], "place": order.astype(np.uint32)})


def _as_memoryview(array: np.ndarray) -> memoryview:
    """Return a memoryview, which is faster to index than an array."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("=")).data


SELECT_ROW = "SELECT id, digest, record, crc FROM rows"
LIVE_CONDITION = "id >= ? AND id <= ? AND (died IS NULL OR died > ?)"
"""Selects the live rows of a version: in its range of ids, and not deleted up to then."""

FIND_IDS_QUERY = f"SELECT id FROM rows WHERE digest = ? AND {LIVE_CONDITION}"
FIND_YOUNGEST_QUERY = f"{SELECT_ROW} WHERE digest = ? AND {LIVE_CONDITION} ORDER BY id DESC LIMIT 1"
FIND_LATEST_QUERY = f"{SELECT_ROW} WHERE digest = ? AND died IS NULL ORDER BY id DESC LIMIT 1"
ID_IN_LIST = "id IN (SELECT value FROM json_each(?))"

RowSpan = tuple[int, int, int]
"""The first id, the last id, and the version in which the rows are live."""

NEWEST_SPAN = 0, 2**63 - 1, 2**63 - 1
"""Selects the live rows of the newest version."""


class _RecordState(NamedTuple):
    """Where rows are stored.

    It is valid while the newest version is the same object `version_entry`.
    """

    version_entry: VersionEntry | None
    bundles: tuple[Bundle, ...]
    lost_bundles: tuple[SegmentEntry, ...]
    has_catalog_rows: bool
    """Whether the catalog's table of rows has rows."""
    row_cache: dict[bytes, tuple[int, str]]
    """The ids and records of looked-up rows, by digest. Long records are not cached."""


_EMPTY_STATE = _RecordState(None, (), (), True, {})


class RecordStore:
    """The records of all versions. Deleted rows are included until a compaction drops them.

    >>> from qkv.database.storage import Store
    >>> store = Store()
    >>> _ = store.commit(records=["Li, Mu"], digests=[b"Li"])
    >>> store.open_snapshot().read_records(store.open_snapshot().find_ids(b"Li"))
    ['Li, Mu']
    """

    def __init__(
        self, catalog: Catalog, blob_storage: BlobStorage, skip_damaged: bool = False
    ) -> None:
        self.catalog, self.blob_storage = catalog, blob_storage
        self._skip_damaged = skip_damaged
        self._state = _EMPTY_STATE
        self._deleted_cache = 0, np.zeros(0, np.int64)

    def find_ids(self, digest: bytes, span: RowSpan) -> list[int]:
        """Return the ids of the live rows of `span` with this digest, oldest first."""
        while True:
            state = self._current_state()
            ids = []
            if state.has_catalog_rows:
                ids = [row for (row,) in self.catalog.fetch_all(FIND_IDS_QUERY, digest, *span)]
            id_range = range(span[0], span[1] + 1)
            bundled = [row for x in state.bundles for row in x.find_ids(digest) if row in id_range]
            overridden = (
                self._fetch_catalog_rows(bundled) if bundled and state.has_catalog_rows else {}
            )
            ids += [row for row in bundled if row not in overridden]
            if self._is_current(state):
                return sorted(ids)

    def find_newest(self, digest: bytes, span: RowSpan) -> RowRecord | None:
        """Return the newest live row of `span` with this digest, or None."""
        while True:
            state = self._current_state()
            line = None
            if state.has_catalog_rows:
                fetch = self.catalog.fetch_one
                line = (
                    fetch(FIND_LATEST_QUERY, digest)
                    if span is NEWEST_SPAN
                    else fetch(FIND_YOUNGEST_QUERY, digest, *span)
                )
            if state.bundles:
                line = self._find_younger(state, digest, span, line)
            if self._is_current(state):
                return line

    def find_latest_record(self, digest: bytes) -> tuple[int, str] | None:
        """Return (id, record) of the newest row with this digest in the newest version, or None."""
        cache = self._current_state().row_cache
        row = cache.get(digest)
        if row is None and (line := self.find_newest(digest, NEWEST_SPAN)) is not None:
            row = self.check_row(line)
            if len(row[1]) <= limits.MAX_CACHED_ROW_CHARACTERS:
                if len(cache) >= limits.MAX_CACHED_ROWS:
                    cache.clear()
                cache[digest] = row
        return row

    def _find_younger(
        self, state: _RecordState, digest: bytes, span: RowSpan, line: RowRecord | None
    ) -> RowRecord | None:
        """Return the newest row that only a bundle has, if it is newer than `line`; else `line`."""
        first = span[0] if line is None else line[0] + 1
        for bundle in reversed(state.bundles):
            last = span[1]
            while (candidate := bundle.find_newest(digest, first, last)) is not None:
                if not (state.has_catalog_rows and self._fetch_catalog_rows([candidate[0]])):
                    return candidate
                last = candidate[0] - 1
        return line

    def read_rows(self, ids: Sequence[int] | np.ndarray, span: RowSpan) -> dict[int, RowRecord]:
        """Return the rows with these ids that are live in `span`, by id."""
        first, last, version = span
        wanted = [row for row in map(int, ids) if first <= row <= last]
        while True:
            state, rows, others = self._current_state(), dict[int, RowRecord](), wanted
            if state.has_catalog_rows:
                in_catalog = self._fetch_catalog_rows(wanted)
                for row, (died, line) in in_catalog.items():
                    if died is None or died > version:
                        rows[row] = line
                others = [row for row in wanted if row not in in_catalog]
            for bundle in state.bundles:
                for line in bundle.read_rows(others):
                    rows[line[0]] = line
            if self._is_current(state):
                return rows

    def read_records(self, ids: Sequence[int], span: RowSpan) -> list[str] | None:
        """Return the checked records of live rows in the order of the ids.

        Return None if not all are in one bundle without gaps, or if one is damaged.
        """
        state = self._current_state()
        if state.has_catalog_rows or len(state.bundles) != 1:
            return None
        if not (span[0] <= min(ids, default=0) and max(ids, default=-1) <= span[1]):
            return None
        try:
            records = state.bundles[0].read_all_records(ids)
        except (UnicodeDecodeError, IndexError):
            return None
        return records if self._is_current(state) else None

    def live_ids(self, span: RowSpan) -> np.ndarray:
        """Return the ids of the rows that are live in `span`, ascending."""
        while True:
            state = self._current_state()
            parts = [self._fetch_ids(f"SELECT id FROM rows WHERE {LIVE_CONDITION}", *span)]
            if state.bundles:
                in_catalog = self._fetch_ids("SELECT id FROM rows")
                parts += [
                    np.setdiff1d(x.ids, in_catalog, assume_unique=True) for x in state.bundles
                ]
            if self._is_current(state):
                ids = np.sort(np.concatenate(parts))
                return np.asarray(ids[(ids >= span[0]) & (ids <= span[1])])

    def _fetch_ids(self, statement: str, *values: int) -> np.ndarray:
        lines = self.catalog.fetch_all(statement, *values)
        return np.fromiter((row for (row,) in lines), np.int64, len(lines))

    def dead_ids(self, version: int) -> np.ndarray:
        """Return the ids of deleted rows of a version, ascending.

        Rows of damaged bundles count as deleted if damaged files are skipped.
        """
        dead = self._deleted_ids(version)
        if not self._skip_damaged:
            return dead
        lost = [
            np.arange(entry.first, entry.last + 1) for entry in self._current_state().lost_bundles
        ]
        return np.unique(np.concatenate([dead, *lost]))

    def _deleted_ids(self, version: int) -> np.ndarray:
        """Return the ids of the rows that are deleted in a version, ascending.

        The result for a newer version extends the cached result.
        """
        with self.catalog.lock:
            newer = version >= self._deleted_cache[0]
            since, dead = self._deleted_cache if newer else (0, self._deleted_cache[1][:0])
            # A repair marks lost rows as deleted in version 0.
            statement = "SELECT id FROM rows WHERE died > ? AND died <= ?"
            more = self._fetch_ids(statement, since or -1, version)
            if len(more):
                dead = np.sort(np.concatenate([dead, more]))
            if newer:
                self._deleted_cache = version, dead
            return dead

    def check_row(self, line: RowRecord) -> tuple[int, str]:
        """Return the id and record of a row; raise if its checksum is wrong."""
        row, digest, record, crc = line
        if row_crc(row, digest, record) != crc:
            raise self.catalog.damaged_error(f"row {row} is not what was written")
        return row, record

    def copy_to_catalog(self, ids: Sequence[int]) -> None:
        """Copy rows that are about to be deleted from their bundles to the catalog."""
        if not self._current_state().bundles:
            return
        for start in range(0, len(ids), limits.ROWS_PER_PAGE):
            page = ids[start : start + limits.ROWS_PER_PAGE]
            in_catalog = self._fetch_catalog_rows(page)
            missing = [row for row in page if row not in in_catalog]
            rows = self.read_rows(missing, (0, 2**63 - 1, 0))
            for line in rows.values():
                self.check_row(line)
            statement = "INSERT INTO rows (id, digest, record, crc) VALUES (?, ?, ?, ?)"
            self.catalog.execute_many(statement, rows.values())
            # Record the deletion twice: if the entry is lost, a repair must not restore the row.
            self.catalog.buffer_rows(BUNDLE_GENERATION, rows, [b""] * len(rows))
        self._state = _EMPTY_STATE

    def _fetch_catalog_rows(self, ids: Sequence[int]) -> dict[int, tuple[int | None, RowRecord]]:
        """Return the rows with these ids that the catalog has, by id.

        Each is (the version that deleted the row or None, the row).
        """
        rows: dict[int, tuple[int | None, RowRecord]] = {}
        statement = f"SELECT died, id, digest, record, crc FROM rows WHERE {ID_IN_LIST}"
        for start in range(0, len(ids), limits.ROWS_PER_PAGE):
            page = json.dumps(ids[start : start + limits.ROWS_PER_PAGE])
            for died, *line in self.catalog.fetch_all(statement, page):
                rows[line[0]] = died, tuple(line)
        return rows

    def _current_state(self) -> _RecordState:
        """Return where the rows of the newest version are stored."""
        state = self._state  # read the attribute once: another thread may replace it
        while (newest := self.catalog.newest_version()) is not state.version_entry:
            state = self._state = self._read_state(newest)
        return state

    def _read_state(self, newest: VersionEntry) -> _RecordState:
        """Read where the rows are stored; `newest` is the newest version."""
        entries = self.catalog.list_segments(BUNDLE_GENERATION)
        has_rows = self.catalog.fetch_one("SELECT 1 FROM rows LIMIT 1") is not None
        bundles, lost = [], []
        for entry in entries:
            try:
                bundles.append(Bundle(self.blob_storage.read_segment(entry, BUNDLE_LAYOUT)))
            except (StoreDamagedError, KeyError) as error:
                if self.catalog.newest_version() is not newest:
                    return _EMPTY_STATE  # a commit has replaced the bundle: read the state again
                if not self._skip_damaged:
                    raise
                lost.append(entry)
                warn_at_caller(f"{entry.rows:,} rows were skipped: {error}", SkippedRowsWarning)
        return _RecordState(newest, tuple(bundles), tuple(lost), has_rows, {})

    def _is_current(self, state: _RecordState) -> bool:
        """Return whether everything that was read since `state` belongs to one version."""
        return (
            not (state.has_catalog_rows and state.bundles)
            or self.catalog.newest_version() is state.version_entry
        )
