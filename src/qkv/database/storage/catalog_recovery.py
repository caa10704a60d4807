"""A new catalogue from all that can be read of a damaged one and from the segments.

Only the newest version comes back, as a new version. The damaged catalogue and every file that the
new one does not use are moved into a folder beside it: nothing is deleted.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from qkv.database.errors import StoreDamagedError
from qkv.database.storage import catalog_queries
from qkv.database.storage.blob_storage import DiskBlobStorage, FileSystem
from qkv.database.storage.bundles import BUNDLE_GENERATION, BUNDLE_LAYOUT, merge_bundles
from qkv.database.storage.catalog import (
    CATALOG_FILE,
    SCHEMA_QUERY,
    SCHEMA_STATEMENTS,
    SEGMENT_COLUMNS,
    Catalog,
    VersionEntry,
    line_crc,
    row_crc,
)
from qkv.database.storage.commit_marker import CommitMarker
from qkv.database.storage.layout import Layout
from qkv.database.storage.segments import SegmentEntry, file_number, read_file_metadata

DAMAGED_FOLDER_PREFIX = "damaged"
"""The folder, with a number, for what was replaced."""
_SQLITE_MAGIC = b"SQLite format 3\0"
_READ_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What reading raises; the second where SQLite's own message quotes damaged text."""


def rebuild_catalog(folder: Path, known: CommitMarker | None) -> list[str] | None:
    """Make the catalogue anew; give what was lost, or None where nothing could be read.

    What is `known` of the last commit is above every version and file that may be missing.
    """
    with tempfile.TemporaryDirectory(prefix="repair-", dir=folder) as name:
        place = Path(name)
        found = _recover_data(folder, place, known)
        if found is None:
            return None
        fresh = place / "fresh.sqlite"
        told, used = _write_catalog(found, folder, fresh, known)
        kept = _create_damaged_folder(folder)
        # A log would be read into the new catalogue, so it goes first. From here on a crash leaves
        # a store without a sound catalogue, which is what it was.
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{folder / CATALOG_FILE}{suffix}", kept / f"{CATALOG_FILE}{suffix}")
        with contextlib.suppress(FileNotFoundError):
            os.link(folder / CATALOG_FILE, kept / CATALOG_FILE)
        os.replace(fresh, folder / CATALOG_FILE)
        for file in DiskBlobStorage(folder).list_files():
            if file_number(file) is not None and file not in used:
                os.replace(folder / file, kept / file)
        for some in (kept, folder):
            FileSystem().fsync_folder(some)
    return told


def rebuild_bundle_index(folder: Path, entry: SegmentEntry) -> bool:
    """Make the index of a bundle anew from its rows; False where that is not what was written."""
    if entry.generation != BUNDLE_GENERATION:
        return False
    with tempfile.TemporaryDirectory(prefix="repair-", dir=folder) as name:
        try:
            notes, _ = read_file_metadata(folder / entry.file)
            rows = DiskBlobStorage(folder).read_segment(entry, BUNDLE_LAYOUT)
            fresh = DiskBlobStorage(Path(name))
            fresh.write_segment(entry.file, BUNDLE_LAYOUT, [merge_bundles([rows])], notes)
            fresh.verify_file(entry.file, entry.size, entry.checksum)
        except (StoreDamagedError, KeyError, ValueError):
            return False
        kept = _create_damaged_folder(folder)
        os.link(folder / entry.file, kept / entry.file)
        os.replace(Path(name) / entry.file, folder / entry.file)
        for some in (kept, folder):
            FileSystem().fsync_folder(some)
    return True


@dataclass
class _RecoveredData:
    """What could be read."""

    newest_version: VersionEntry | None = None
    rows: dict[int, tuple[bytes, str, int | None]] = field(default_factory=dict)
    buffered_rows: dict[tuple[int, int], bytes] = field(default_factory=dict)
    settings: dict[int, str] = field(default_factory=dict)
    newest_settings: str | None = None
    """The settings that the newest segment was written under."""
    older_settings: str | None = None
    """Those of the newest file of all, which may be of other vectors."""
    layouts: dict[int, str] = field(default_factory=dict)
    arrays: dict[int, tuple[str, int, bytes]] = field(default_factory=dict)
    entries: list[SegmentEntry] = field(default_factory=list)
    next_file_number: int = 0
    is_complete: bool = True
    """Whether every table is what was made and could be read to its end."""

    @property
    def recovered_amount(self) -> tuple[bool, int, int]:
        """How much was read, the larger the better."""
        tables = len(self.settings) + len(self.layouts) + len(self.arrays) + len(self.entries)
        return self.newest_version is not None, len(self.rows), len(self.buffered_rows) + tables

    @property
    def generation(self) -> int:
        if self.newest_version is not None:
            return self.newest_version.generation
        known = [entry.generation for entry in self.entries] + [
            some for some, _ in self.buffered_rows
        ]
        return max([0, *known])

    @property
    def bundle_entries(self) -> list[SegmentEntry]:
        return [entry for entry in self.entries if entry.generation == BUNDLE_GENERATION]


def _write_catalog(
    found: _RecoveredData, folder: Path, path: Path, known: CommitMarker | None
) -> tuple[list[str], set[str]]:
    """Write the new catalogue; give what was lost, and the files in use."""
    generation = found.generation
    layout = found.layouts.get(generation)
    entries = [entry for entry in found.entries if entry.generation == generation]
    resting = {
        row: packed
        for (some, row), packed in found.buffered_rows.items()
        if some == generation and layout is not None
    }
    with_tensors = set(resting)
    disk = DiskBlobStorage(folder)
    for entry in entries:
        with contextlib.suppress(StoreDamagedError):
            with_tensors.update(
                disk.read_segment(entry, Layout.from_text(layout or "[]")).ids.tolist()
            )
    bundled: set[int] = set()
    for entry in found.bundle_entries:
        with contextlib.suppress(StoreDamagedError):
            disk.verify_file(entry.file, entry.size, entry.checksum)
            bundled.update(disk.read_segment(entry, BUNDLE_LAYOUT).ids.tolist())
            entries.append(entry)
    for row in bundled - set(found.rows):
        if (
            BUNDLE_GENERATION,
            row,
        ) in found.buffered_rows:  # where the line that tells when is lost
            found.rows[row] = b"", "", 0
    live = sum(died is None for _, _, died in found.rows.values())
    live += len(bundled - set(found.rows))
    last = max([-1, *found.rows, *with_tensors, *(entry.last for entry in found.entries)])
    # Above any version in which a row died.
    version = 1 + max((died or 0 for _, _, died in found.rows.values()), default=0)
    told = []
    text = found.newest_settings
    if found.newest_version is None:
        told.append(f"the list of versions is lost; {live:,} rows could be read")
    else:
        version = max(version, found.newest_version.number + 1)
        last = max(last, found.newest_version.last)
        text = found.settings.get(found.newest_version.settings, text)
        back = "rows that were removed are back"
        if known is not None and known.version > found.newest_version.number:
            told.append(
                f"the versions from {found.newest_version.number + 1} to {known.version} are lost"
            )
            version = max(version, known.version + 1)
            back = "rows of theirs were found in files; some of them may have been removed since"
        if live > found.newest_version.rows:
            told.append(f"{live - found.newest_version.rows:,} {back}")
        if live < found.newest_version.rows:
            told.append(f"of {found.newest_version.rows:,} rows {live:,} could be read")
    if text is None:
        older = "; those of an older file took their place: encode the rows again"
        told.append(f"the settings are lost{older if found.older_settings else ''}")
    text = text or found.older_settings or "{}"

    with Catalog(path, create=True) as catalogue:
        with catalogue.write_transaction():
            for table in ("versions", "settings", "generations"):
                catalogue.execute(f"DELETE FROM {table}")
            rows = dict(found.rows)
            # Rows that have tensors and no record are dead from the beginning.
            rows.update((row, (b"", "", 0)) for row in with_tensors - bundled - set(rows))
            catalogue.execute_many(
                "INSERT INTO rows VALUES (?, ?, ?, ?, ?)",
                (
                    (row, *cells[:2], row_crc(row, *cells[:2]), cells[2])
                    for row, cells in rows.items()
                ),
            )
            catalog_queries.buffer_rows(catalogue, generation, resting, resting.values())
            catalogue.execute("INSERT INTO settings VALUES (0, ?, ?)", text, crc32(text.encode()))
            arrays = found.arrays.get(generation, (None, None, None))
            catalogue.execute(
                "INSERT INTO generations VALUES (?, ?, ?, ?, ?)", generation, layout, *arrays
            )
            catalogue.execute_many(
                f"INSERT INTO segments ({SEGMENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", entries
            )
            catalogue.execute("UPDATE counters SET files = ?", found.next_file_number)
            catalogue.insert_version(
                VersionEntry(version, last, live, generation, 0), "repair", 0, 0
            )
        catalogue.fetch_all("PRAGMA wal_checkpoint(TRUNCATE)")
    FileSystem().sync_file(path)
    return told, {entry.file for entry in entries} | {str(arrays[0])}


def _recover_data(folder: Path, place: Path, known: CommitMarker | None) -> _RecoveredData | None:
    """All that the catalogue and the files tell; None where that is not one row."""
    best = _RecoveredData()
    for remedy, make in enumerate(_REMEDIES):
        copy = place / f"copy-{remedy}.sqlite"
        if not (folder / CATALOG_FILE).exists():
            break
        shutil.copyfile(folder / CATALOG_FILE, copy)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(f"{folder / CATALOG_FILE}-wal", f"{copy}-wal")
        try:
            make(copy)
        except (sqlite3.Error, OSError):
            continue
        found = _read_catalog(copy)
        if found.recovered_amount > best.recovered_amount:
            best = found
        rows = len(best.rows) + sum(entry.rows for entry in best.bundle_entries)
        if (
            best.newest_version is not None
            and rows >= best.newest_version.rows
            and best.is_complete
        ):
            break
    _add_from_files(best, folder, known)
    return best if best.rows or best.bundle_entries or best.newest_version is not None else None


def _read_catalog(path: Path) -> _RecoveredData:
    found = _RecoveredData()
    try:
        opened = sqlite3.connect(path, isolation_level=None)
    except sqlite3.Error:
        return found
    with contextlib.closing(opened) as connection:
        connection.text_factory = lambda text: text.decode("utf-8", "strict")
        try:
            found.is_complete = {
                sql for (sql,) in connection.execute(SCHEMA_QUERY)
            } == SCHEMA_STATEMENTS
        except _READ_ERRORS:
            found.is_complete = False
        _read_tables(connection, found)
    return found


def _read_tables(connection: sqlite3.Connection, found: _RecoveredData) -> None:
    def read_lines(statement: str) -> Iterator[Any]:
        """What can be read before the damage, and from behind it."""
        for order in ("", " DESC"):
            try:
                yield from connection.execute(statement + order)
                return
            except _READ_ERRORS:
                found.is_complete = False

    for *line, crc in read_lines("SELECT * FROM versions ORDER BY number"):
        if len(line) == 9 and line_crc(line) == crc:
            edition = VersionEntry.from_line(line)
            found.newest_version = max(found.newest_version or edition, edition)
    for some, text, crc in read_lines("SELECT number, text, crc FROM settings ORDER BY number"):
        if isinstance(text, str) and crc32(text.encode()) == crc:
            found.settings[some] = text
    for some, layout, *arrays in read_lines(
        "SELECT number, layout, arrays, bytes, checksum FROM generations ORDER BY number"
    ):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if layout is not None:
                Layout.from_text(layout)
                found.layouts[some] = layout
            if (
                file_number(arrays[0]) is not None
                and list(map(type, arrays)) == catalog_queries.ARRAY_FILE_TYPES
            ):
                found.arrays[some] = tuple(arrays)
    for line in read_lines(f"SELECT {SEGMENT_COLUMNS} FROM segments ORDER BY file"):
        if (
            list(map(type, line)) == catalog_queries.SEGMENT_TYPES
            and file_number(line[0]) is not None
        ):
            entry = SegmentEntry(*line)
            found.entries += [] if entry in found.entries else [entry]
    for (files,) in read_lines("SELECT files FROM counters ORDER BY files"):
        found.next_file_number = files if isinstance(files, int) else 0
    bound = max([-1, *(entry.last for entry in found.entries)])
    if found.newest_version is not None:
        bound = max(bound, found.newest_version.last)
    else:
        with contextlib.suppress(*_READ_ERRORS):
            bound = max(bound, connection.execute("SELECT max(id) FROM rows").fetchone()[0] or -1)

    def keep_row(line: Any) -> None:
        row, digest, record, crc, died = line
        if (
            isinstance(digest, bytes)
            and isinstance(record, str)
            and (died is None or isinstance(died, int))
            and row_crc(row, digest, record) == crc
        ):
            found.rows[row] = (digest, record, died)

    rows = "SELECT id, digest, record, crc, died FROM rows WHERE id"
    found.is_complete &= _read_by_halving(connection, rows, bound, keep_row)
    generations = set(found.layouts) | {found.generation, BUNDLE_GENERATION}
    for generation in generations:

        def keep_buffered_row(line: Any, generation: int = generation) -> None:
            row, packed, crc = line
            if catalog_queries.is_intact(row, packed, crc):
                found.buffered_rows[generation, row] = packed

        tensors = f"SELECT id, tensors, crc FROM resting WHERE generation = {generation} AND id"
        found.is_complete &= _read_by_halving(connection, tensors, bound, keep_buffered_row)


def _read_by_halving(
    connection: sqlite3.Connection, statement: str, bound: int, keep: Callable[[Any], None]
) -> bool:
    """Read a table by ids, halving what cannot be read until single rows are lost; whether
    nothing was."""
    spans, whole = [(0, bound)] if bound >= 0 else [], True
    while spans:
        begin, end = spans.pop()
        try:
            for line in connection.execute(f"{statement} BETWEEN ? AND ?", (begin, end)):
                keep(line)
        except _READ_ERRORS:
            whole = False
            if begin < end:
                middle = (begin + end) // 2
                spans += [(middle + 1, end), (begin, middle)]
    return whole


def _add_from_files(found: _RecoveredData, folder: Path, known: CommitMarker | None) -> None:
    """What the files tell that the catalogue does not tell any more, the newest file first."""
    bound = max(found.next_file_number, known.next_file_number) if known is not None else None
    names = DiskBlobStorage(folder).list_files()
    files = {given: name for name in names if (given := file_number(name)) is not None}
    listed = {entry.file for entry in found.entries} | {some[0] for some in found.arrays.values()}
    for given, file in sorted(files.items(), reverse=True):
        # A number that is known not to be given out is of a commit that did not finish.
        if bound is not None and given >= bound:
            continue
        with contextlib.suppress(StoreDamagedError, ValueError, KeyError):
            notes, entry = read_file_metadata(folder / file)
            if entry.rows < 0:
                arrays = (file, entry.size, entry.checksum)
                found.arrays.setdefault(entry.generation, arrays)
                continue
            found.older_settings = found.older_settings or notes["settings"]
            if found.newest_version is None or entry.generation == found.newest_version.generation:
                found.newest_settings = found.newest_settings or notes["settings"]
            same = [other for other in found.entries if entry.may_overlap(other)]
            found.layouts.setdefault(entry.generation, notes["layout"])
            # It takes the place of files that are gone, never of one that is there.
            if file not in listed and not any(other.file in names for other in same):
                found.entries = [other for other in found.entries if other not in same] + [entry]
    found.next_file_number = max(
        [found.next_file_number, bound or 0, *(given + 1 for given in files)]
    )
    found.entries.sort(key=lambda entry: (entry.generation, entry.first))


def _restore_header(path: Path) -> None:
    """Put right what is the same in the header of every catalogue, and make up for cut pages."""
    with open(path, "r+b") as file:
        there = file.seek(0, os.SEEK_END) // 4096
        file.seek(28)
        said = int.from_bytes(file.read(4), "big")
        # A header that was hit may say anything; every table begins within the first pages.
        pages = max(said if said <= 8 * there else 0, there, 16)
        file.truncate(pages * 4096)
        for offset, content in (
            (0, _SQLITE_MAGIC + (4096).to_bytes(2, "big") + bytes((2, 2, 0, 64, 32, 32))),
            (28, pages.to_bytes(4, "big")),
            (44, (4).to_bytes(4, "big")),
            (56, (1).to_bytes(4, "big")),
        ):
            file.seek(offset)
            file.write(content)
        file.seek(24)
        counter = file.read(4)
        file.seek(92)
        file.write(counter)


def _restore_first_page(vacuumed: bool) -> Callable[[Path], None]:
    """Put a new catalogue's first page in place: its tables begin on the same pages."""

    def apply_remedy(path: Path) -> None:
        model = path.with_suffix(".model")
        with Catalog(model, create=True) as catalogue:
            if vacuumed:
                catalogue.execute("VACUUM")
            catalogue.fetch_all("PRAGMA wal_checkpoint(TRUNCATE)")
        page = model.read_bytes()[:4096]
        with open(path, "r+b") as file:
            file.write(page)
        _restore_header(path)

    return apply_remedy


_REMEDIES: tuple[Callable[[Path], None], ...] = (
    lambda path: None,
    _restore_header,
    _restore_first_page(False),
    _restore_first_page(True),
)


def _create_damaged_folder(folder: Path) -> Path:
    """A new folder for what is replaced."""
    for count in itertools.count(1):
        kept = folder / f"{DAMAGED_FOLDER_PREFIX}-{count}"
        with contextlib.suppress(FileExistsError):
            kept.mkdir()
            return kept
    raise AssertionError
