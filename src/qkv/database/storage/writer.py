"""The steps of a commit: write files, insert rows, mark rows deleted, merge small segments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

import numpy as np

from qkv.database.errors import DuplicateKeyError, RowNotFoundError, StoreDamagedError
from qkv.database.storage import limits
from qkv.database.storage.blob_storage import BlobStorage, read_verified_segment
from qkv.database.storage.catalog import SEGMENT_COLUMNS, Catalog, VersionEntry, row_crc
from qkv.database.storage.records import (
    BUNDLE_GENERATION,
    BUNDLE_LAYOUT,
    NEWEST_SPAN,
    RecordStore,
    build_bundle,
    merge_bundles,
)
from qkv.database.storage.segments import (
    SEGMENT_SUFFIX,
    Layout,
    Segment,
    SegmentEntry,
    Tensors,
    file_number,
    split_segments,
)
from qkv.database.storage.snapshot import build_buffered_segment
from qkv.errors import ArgumentError, DtypeError
from qkv.frameworks import threads
from qkv.util.types import interruptible_contextmanager

MIN_THREAD_BYTES = 32 << 20
"""Rows of at least this size are written in a background thread."""


class StagedFiles:
    """New files of a generation that the catalog does not list yet.

    Their numbers start at `next_file_number`. Each file contains the `settings` with which it was
    written, so that a lost catalog can be rebuilt.
    """

    def __init__(
        self,
        blob_storage: BlobStorage,
        generation: int,
        next_file_number: int,
        settings: str,
    ) -> None:
        self.generation = generation
        self.next_file_number = next_file_number
        self._blob_storage = blob_storage
        self._settings = settings
        self._entries: list[SegmentEntry] = []
        self._array_file: tuple[str, int, bytes] | None = None
        self._is_cancelled = False
        self._name_lock = Lock()

    def write_segments(self, layout: Layout, rows: Iterable[Segment]) -> None:
        """Write rows as segments of up to MAX_SEGMENT_BYTES."""
        max_rows = max(1, limits.MAX_SEGMENT_BYTES // (layout.row_bytes + 8))
        for group in split_segments(rows, max_rows):
            if self._is_cancelled:
                return
            self._write_file("segment", self.generation, layout, group)

    def write_bundle(self, rows: Segment) -> None:
        """Write digests and records to a bundle file."""
        self._write_file("rows", BUNDLE_GENERATION, BUNDLE_LAYOUT, [rows])

    def _write_file(self, kind: str, generation: int, layout: Layout, parts: list[Segment]) -> None:
        file = self._next_file_name(kind)
        size, checksum = self._blob_storage.write_segment(
            file, layout, parts, self._file_metadata(generation)
        )
        first, last = int(parts[0].ids[0]), int(parts[-1].ids[-1])
        count = sum(len(part.ids) for part in parts)
        self._entries.append(SegmentEntry(file, generation, first, last, count, size, checksum))

    @interruptible_contextmanager
    def write_in_background(
        self, layout: Layout | None, rows: list[Segment]
    ) -> Iterator[Callable[[], None]]:
        """Write rows as segments while the body of the `with` runs.

        Yields a function that waits until the rows are written. A small number of rows is written
        before the body runs.
        """
        if (
            layout is None
            or sum(len(part.ids) for part in rows) * layout.row_bytes < MIN_THREAD_BYTES
        ):
            if layout is not None and rows:
                self.write_segments(layout, rows)
            yield lambda: None
            return
        wait = threads.submit_job(self.write_segments, layout, rows)
        try:
            yield wait
        except BaseException:
            self._is_cancelled = True
            with suppress(Exception):  # raise only the first error
                wait()
            raise

    def write_arrays(self, arrays: Tensors) -> None:
        """Write the encoder's arrays of the generation to a file."""
        file = self._next_file_name("arrays")
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self._array_file = (
            file,
            *self._blob_storage.write_arrays(file, arrays, self._file_metadata(self.generation)),
        )

    def sync_files(self) -> None:
        """Sync the files to disk. The catalog may list them only after that."""
        if self._entries or self._array_file:
            self._blob_storage.sync_storage()

    def register_files(self, catalog: Catalog) -> None:
        """Add the files to the catalog. The caller runs this in a transaction."""
        if self._entries or self._array_file:
            catalog.execute("UPDATE counters SET files = ?", self.next_file_number)
            placeholders = "?, ?, ?, ?, ?, ?, ?"
            catalog.execute_many(
                f"INSERT INTO segments ({SEGMENT_COLUMNS}) VALUES ({placeholders})", self._entries
            )
        if self._array_file:
            catalog.execute(
                "UPDATE generations SET arrays = ?, bytes = ?, checksum = ? WHERE number = ?",
                *self._array_file,
                self.generation,
            )

    def _file_metadata(self, generation: int) -> dict[str, str]:
        return {"generation": str(generation), "settings": self._settings}

    def _next_file_name(self, kind: str) -> str:
        """Return the name of the next file; `kind` is "segment", "arrays" or "rows"."""
        with self._name_lock:
            self.next_file_number += 1
            return f"{kind}-{self.next_file_number - 1:08d}{SEGMENT_SUFFIX}"


@dataclass(frozen=True)
class WriterState:
    """What the writer caches: the newest version, its layout, and the number of buffered rows."""

    newest_version: VersionEntry
    layout: Layout | None
    next_file_number: int
    buffered_rows: int

    @classmethod
    def read_from_catalog(cls, catalog: Catalog, blob_storage: BlobStorage) -> WriterState:
        """Read the state from the catalog.

        Numbers of files that exist but are not listed are not used again.
        """
        version_entry = catalog.newest_version()
        count_buffered = "SELECT count(*) FROM resting WHERE generation = ?"
        used = [1 + (file_number(file) or 0) for file in blob_storage.list_files()]
        return cls(
            version_entry,
            catalog.read_layout(version_entry.generation),
            max([catalog.fetch_value("SELECT files FROM counters"), *used]),
            catalog.fetch_value(count_buffered, version_entry.generation),
        )


def fits_in_buffer(layout: Layout | None, rows: int) -> bool:
    """Return whether this many rows stay in the catalog, because a segment needs more rows."""
    if layout is None:
        return True
    return rows < limits.MAX_BUFFERED_ROWS and rows * layout.row_bytes < limits.MAX_BUFFERED_BYTES


def collect_small_segments(
    catalog: Catalog, blob_storage: BlobStorage, generation: int, layout: Layout
) -> tuple[list[SegmentEntry], list[Segment]]:
    """Return the small segments to merge, and their rows together with the buffered rows.

    If there are few small segments, none is merged.
    """
    entries = catalog.list_segments(generation)
    small: list[SegmentEntry] = []
    while entries and entries[-1].size < limits.MAX_SEGMENT_BYTES // limits.SEGMENTS_PER_MERGE:
        small.insert(0, entries.pop())
    if len(small) < limits.SEGMENTS_PER_MERGE:
        small = []
    try:
        segments = [read_verified_segment(blob_storage, entry, layout) for entry in small]
    except StoreDamagedError:  # keep a damaged file unchanged, for a repair
        small, segments = [], []
    rows = catalog.fetch_all(
        "SELECT id, tensors, crc FROM resting WHERE generation = ? ORDER BY id", generation
    )
    return small, [*segments, build_buffered_segment(catalog, layout, rows)]


def mark_deleted(record_store: RecordStore, ids: Sequence[int], version: int) -> None:
    """Mark rows as deleted by a version; raise if a row is not live."""
    if not ids:
        return
    record_store.copy_to_catalog(ids)
    catalog = record_store.catalog
    statement = "UPDATE rows SET died = ? WHERE id = ? AND died IS NULL"
    if catalog.execute_many(statement, [(version, row) for row in ids]) == len(ids):
        return
    for row in ids:
        if not catalog.fetch_one("SELECT 1 FROM rows WHERE id = ? AND died = ?", row, version):
            raise RowNotFoundError(f"row {row} cannot be removed: it is not in the newest version")


def check_unique_digests(
    record_store: RecordStore, digests: Sequence[bytes], check_existing: bool
) -> None:
    """Raise `DuplicateKeyError` if two digests are equal.

    With `check_existing`, also raise if a live row has one of the digests.
    """
    seen: dict[bytes, int] = {}
    for position, digest in enumerate(digests):
        if digest in seen:
            raise DuplicateKeyError(
                f"the key at position {position} repeats the key at position {seen[digest]}, but "
                "keys are unique here: pass it once",
                position,
            )
        seen[digest] = position
        existing = record_store.find_newest(digest, NEWEST_SPAN) if check_existing else None
        if existing is not None:
            raise DuplicateKeyError(
                f"the key at position {position} exists already, in row {existing[0]}, but "
                "keys are unique here: remove or update that row",
                position,
            )


def insert_rows(
    record_store: RecordStore,
    staged: StagedFiles,
    ids: range,
    digests: Sequence[bytes],
    records: Sequence[str],
) -> list[SegmentEntry]:
    """Insert rows; return the bundles that were merged.

    Many rows are written as a bundle, which replaces small bundles.
    """
    bundle = None
    if len(ids) >= limits.MIN_BUNDLE_ROWS:
        # The code below raises an error that names the invalid row.
        with contextlib.suppress(TypeError, AttributeError, ValueError, OverflowError):
            bundle = build_bundle(np.arange(ids.start, ids.stop), digests, records)
    if bundle is not None:
        absorbed, parts = _collect_small_bundles(record_store, len(ids))
        staged.write_bundle(merge_bundles([*parts, bundle]) if parts else bundle)
        return absorbed

    def iterate_lines() -> Iterator[tuple[int, bytes, str, int]]:
        for row, digest, record in zip(ids, digests, records, strict=True):
            if not isinstance(record, str) or not isinstance(digest, bytes):
                raise DtypeError(
                    f"records[{row - ids.start}] must be str and its digest bytes, not "
                    f"{type(record).__name__} and {type(digest).__name__}"
                )
            try:
                crc = row_crc(row, digest, record)
            except UnicodeEncodeError as error:
                raise ArgumentError(
                    f"records[{row - ids.start}] is not valid Unicode: {error.reason}"
                ) from error
            yield row, digest, record, crc

    statement = "INSERT INTO rows (id, digest, record, crc) VALUES (?, ?, ?, ?)"
    record_store.catalog.execute_many(statement, iterate_lines())
    return []


def _collect_small_bundles(
    record_store: RecordStore, rows: int
) -> tuple[list[SegmentEntry], list[Segment]]:
    """Return the last bundles to merge with `rows` new rows, and their content.

    A bundle is merged if at least as many rows follow it, so that there are few bundles.
    """
    entries = record_store.catalog.list_segments(BUNDLE_GENERATION)
    small: list[SegmentEntry] = []
    while entries and entries[-1].rows <= rows and entries[-1].size <= limits.MAX_BUNDLE_BYTES:
        small.insert(0, entries.pop())
        rows += small[0].rows
    try:
        return small, [
            read_verified_segment(record_store.blob_storage, entry, BUNDLE_LAYOUT)
            for entry in small
        ]
    except StoreDamagedError:  # keep a damaged file unchanged, for a repair
        return [], []
