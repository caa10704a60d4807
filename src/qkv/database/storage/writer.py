"""What the writer knows without looking, and what it does with rows inside its transaction: they
are born, rest until there are enough for a segment, and die."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qkv.database.errors import DuplicateKeyError, RowNotFoundError, StoreDamagedError
from qkv.database.storage import bundles, catalog_queries, limits
from qkv.database.storage.blob_storage import BlobStorage
from qkv.database.storage.bundles import BUNDLE_GENERATION, BUNDLE_LAYOUT
from qkv.database.storage.catalog import Catalog, VersionEntry, row_crc
from qkv.database.storage.compaction import read_verified_segment
from qkv.database.storage.layout import Layout
from qkv.database.storage.records import NEWEST_SPAN, RecordStore
from qkv.database.storage.segments import Segment, SegmentEntry, file_number
from qkv.database.storage.snapshot import build_buffered_segment
from qkv.database.storage.staged_files import StagedFiles
from qkv.errors import ArgumentError, DtypeError


@dataclass(frozen=True)
class WriterState:
    """What the writer knows without looking: the newest version, and what rests."""

    newest_version: VersionEntry
    layout: Layout | None
    next_file_number: int
    buffered_rows: int

    @classmethod
    def read_from_catalog(cls, catalogue: Catalog, shelf: BlobStorage) -> WriterState:
        """As the catalogue says. A file that it does not know keeps its name, too."""
        edition = catalogue.newest_version()
        resting = "SELECT count(*) FROM resting WHERE generation = ?"
        there = [1 + (file_number(file) or 0) for file in shelf.list_files()]
        return cls(
            edition,
            catalog_queries.read_layout(catalogue, edition.generation),
            max([catalogue.fetch_value("SELECT files FROM counters"), *there]),
            catalogue.fetch_value(resting, edition.generation),
        )


def fits_in_buffer(layout: Layout | None, rows: int) -> bool:
    """Whether so many rows are too few for a segment."""
    if layout is None:
        return True
    return rows < limits.MAX_BUFFERED_ROWS and rows * layout.row_bytes < limits.MAX_BUFFERED_BYTES


def collect_small_segments(
    catalogue: Catalog, shelf: BlobStorage, generation: int, layout: Layout
) -> tuple[list[SegmentEntry], list[Segment]]:
    """What goes into a segment before new rows: small segments, if many, and resting rows."""
    entries = catalog_queries.list_segments(catalogue, generation)
    small: list[SegmentEntry] = []
    while entries and entries[-1].size < limits.MAX_SEGMENT_BYTES // limits.SEGMENTS_PER_MERGE:
        small.insert(0, entries.pop())
    if len(small) < limits.SEGMENTS_PER_MERGE:
        small = []
    try:
        found = [read_verified_segment(shelf, entry, layout) for entry in small]
    except StoreDamagedError:  # it stays where it is, for whoever can mend it
        small, found = [], []
    rows = catalogue.fetch_all(
        "SELECT id, tensors, crc FROM resting WHERE generation = ? ORDER BY id", generation
    )
    return small, [*found, build_buffered_segment(catalogue, layout, rows)]


def mark_deleted(lines: RecordStore, gone: Sequence[int], version: int) -> None:
    """Rows die in a version."""
    if not gone:
        return
    lines.copy_to_catalog(gone)
    catalogue = lines.catalog
    statement = "UPDATE rows SET died = ? WHERE id = ? AND died IS NULL"
    if catalogue.execute_many(statement, [(version, row) for row in gone]) == len(gone):
        return
    for row in gone:
        if not catalogue.fetch_one("SELECT 1 FROM rows WHERE id = ? AND died = ?", row, version):
            raise RowNotFoundError(f"row {row} cannot be removed: it is not in the newest version")


def check_unique_digests(lines: RecordStore, digests: Sequence[bytes], look: bool) -> None:
    """Refuse a digest that comes twice or, if there is anything to `look` at, lives already."""
    seen: dict[bytes, int] = {}
    for position, digest in enumerate(digests):
        if digest in seen:
            raise DuplicateKeyError(
                f"the key at position {position} is the one at position {seen[digest]} again, "
                "and keys are unique here: give it once",
                position,
            )
        seen[digest] = position
        found = lines.find_newest(digest, NEWEST_SPAN) if look else None
        if found is not None:
            raise DuplicateKeyError(
                f"the key at position {position} is there already, as row {found[0]}, and keys "
                "are unique here: remove or update it",
                position,
            )


def insert_rows(
    lines: RecordStore,
    draft: StagedFiles,
    ids: range,
    digests: Sequence[bytes],
    records: Sequence[str],
) -> list[SegmentEntry]:
    """New rows, many of them as a bundle; gives the bundles whose rows it has taken in."""
    made = None
    if len(ids) >= limits.MIN_BUNDLE_ROWS:
        # What is no row is refused below, where it is told which.
        with contextlib.suppress(TypeError, AttributeError, ValueError, OverflowError):
            made = bundles.build_bundle(np.arange(ids.start, ids.stop), digests, records)
    if made is not None:
        absorbed, parts = _collect_small_bundles(lines, len(ids))
        draft.write_bundle(bundles.merge_bundles([*parts, made]) if parts else made)
        return absorbed

    def iterate_lines() -> Iterator[tuple[int, bytes, str, int]]:
        for row, digest, record in zip(ids, digests, records, strict=True):
            if not isinstance(record, str) or not isinstance(digest, bytes):
                raise DtypeError(
                    f"records[{row - ids.start}] must be text and its digest bytes, not "
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
    lines.catalog.execute_many(statement, iterate_lines())
    return []


def _collect_small_bundles(
    lines: RecordStore, rows: int
) -> tuple[list[SegmentEntry], list[Segment]]:
    """The last bundles that have no more rows than come after them, so that bundles stay few."""
    entries = catalog_queries.list_segments(lines.catalog, BUNDLE_GENERATION)
    small: list[SegmentEntry] = []
    while entries and entries[-1].rows <= rows and entries[-1].size <= limits.MAX_BUNDLE_BYTES:
        small.insert(0, entries.pop())
        rows += small[0].rows
    try:
        return small, [
            read_verified_segment(lines.blob_storage, entry, BUNDLE_LAYOUT) for entry in small
        ]
    except StoreDamagedError:  # it stays where it is, for whoever can mend it
        return [], []
