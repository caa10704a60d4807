"""Check every file and count of a store, and rebuild a damaged catalog.

The rebuilt catalog has one new version. It contains all rows that can be read from the damaged
catalog and the segments. The damaged catalog and all unused files are moved to a folder `damaged-N`
in the store; nothing is deleted.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sqlite3
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from qkv.database.errors import (
    NotAStoreError,
    SkippedRowsWarning,
    StoreDamagedError,
    StoreLockedError,
    StoreNotFoundError,
    StoreUnreadableError,
    StoreUnwritableError,
)
from qkv.database.storage import commit_marker, limits
from qkv.database.storage.blob_storage import DiskBlobStorage, FileSystem
from qkv.database.storage.catalog import (
    APPLICATION_ID,
    ARRAY_FILE_TYPES,
    CATALOG_FILE,
    SCHEMA_QUERY,
    SCHEMA_STATEMENTS,
    SEGMENT_COLUMNS,
    SEGMENT_TYPES,
    Catalog,
    VersionEntry,
    is_buffered_row_intact,
    line_crc,
    row_crc,
)
from qkv.database.storage.commit_marker import LOCK_FILE, CommitMarker
from qkv.database.storage.folder import list_store_files
from qkv.database.storage.garbage import (
    check_not_older,
    find_leftovers,
    remove_abandoned_folders,
    remove_files,
)
from qkv.database.storage.lock import READERS_FILE, WriteLock
from qkv.database.storage.records import (
    BUNDLE_GENERATION,
    BUNDLE_LAYOUT,
    NEWEST_SPAN,
    RecordStore,
    merge_bundles,
)
from qkv.database.storage.segments import (
    SEGMENT_SUFFIX,
    Layout,
    SegmentEntry,
    file_number,
    index_file,
    read_file_metadata,
)
from qkv.database.storage.writer import WriterState
from qkv.util.types import ProgressCallback

DAMAGED_FOLDER_PREFIX = "damaged"
"""The name of the folder for replaced files begins with this; a number follows."""
_SQLITE_MAGIC = b"SQLite format 3\0"
_READ_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Errors while reading. SQLite's messages may quote text that is not valid UTF-8."""


def repair_catalog(folder: Path, marker: CommitMarker | None) -> list[str] | None:
    """Rebuild the catalog; return what was lost as sentences, or None if nothing could be read.

    The numbers of the new version and of new files are higher than those of the marker.
    """
    with tempfile.TemporaryDirectory(prefix="repair-", dir=folder) as name:
        temporary = Path(name)
        data = _recover_data(folder, temporary, marker)
        if data is None:
            return None
        fresh = temporary / "fresh.sqlite"
        losses, used_files = _write_catalog(data, folder, fresh, marker)
        damaged_folder = _create_damaged_folder(folder)
        # SQLite would apply the old log to the new catalog, so move the log first. After a crash
        # at this point, the store has no intact catalog, as before.
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(
                    f"{folder / CATALOG_FILE}{suffix}", damaged_folder / f"{CATALOG_FILE}{suffix}"
                )
        with contextlib.suppress(FileNotFoundError):
            os.link(folder / CATALOG_FILE, damaged_folder / CATALOG_FILE)
        os.replace(fresh, folder / CATALOG_FILE)
        for file in DiskBlobStorage(folder).list_files():
            if file_number(file) is not None and file not in used_files:
                os.replace(folder / file, damaged_folder / file)
        for path in (damaged_folder, folder):
            FileSystem().fsync_folder(path)
    return losses


def repair_bundle_index(folder: Path, entry: SegmentEntry) -> bool:
    """Rebuild the index of a bundle from its rows. Return False if the rows are damaged too."""
    if entry.generation != BUNDLE_GENERATION:
        return False
    with tempfile.TemporaryDirectory(prefix="repair-", dir=folder) as name:
        try:
            metadata, _ = read_file_metadata(folder / entry.file)
            rows = DiskBlobStorage(folder).read_segment(entry, BUNDLE_LAYOUT)
            fresh = DiskBlobStorage(Path(name))
            fresh.write_segment(entry.file, BUNDLE_LAYOUT, [merge_bundles([rows])], metadata)
            fresh.verify_file(entry.file, entry.size, entry.checksum)
        except (StoreDamagedError, KeyError, ValueError):
            return False
        damaged_folder = _create_damaged_folder(folder)
        os.link(folder / entry.file, damaged_folder / entry.file)
        os.replace(Path(name) / entry.file, folder / entry.file)
        for path in (damaged_folder, folder):
            FileSystem().fsync_folder(path)
    return True


@dataclass
class _RecoveredData:
    """The data that could be read from a damaged store."""

    newest_version: VersionEntry | None = None
    rows: dict[int, tuple[bytes, str, int | None]] = field(default_factory=dict)
    buffered_rows: dict[tuple[int, int], bytes] = field(default_factory=dict)
    settings: dict[int, str] = field(default_factory=dict)
    newest_settings: str | None = None
    """The settings (JSON text) in the newest segment of the newest generation."""
    older_settings: str | None = None
    """The settings in the newest file, which may belong to another generation."""
    layouts: dict[int, str] = field(default_factory=dict)
    arrays: dict[int, tuple[str, int, bytes]] = field(default_factory=dict)
    entries: list[SegmentEntry] = field(default_factory=list)
    next_file_number: int = 0
    is_complete: bool = True
    """Whether every table is intact and was read completely."""

    @property
    def recovered_amount(self) -> tuple[bool, int, int]:
        """How much was read: a tuple that is larger if more was read."""
        tables = len(self.settings) + len(self.layouts) + len(self.arrays) + len(self.entries)
        return self.newest_version is not None, len(self.rows), len(self.buffered_rows) + tables

    @property
    def generation(self) -> int:
        """The generation of the newest version, or the highest that was found."""
        if self.newest_version is not None:
            return self.newest_version.generation
        generations = [entry.generation for entry in self.entries]
        return max([0, *generations, *(generation for generation, _ in self.buffered_rows)])

    @property
    def bundle_entries(self) -> list[SegmentEntry]:
        return [entry for entry in self.entries if entry.generation == BUNDLE_GENERATION]


def _write_catalog(
    data: _RecoveredData, folder: Path, path: Path, marker: CommitMarker | None
) -> tuple[list[str], set[str]]:
    """Write the new catalog to `path`; return what was lost as sentences, and the files in use."""
    generation = data.generation
    layout = data.layouts.get(generation)
    entries = [entry for entry in data.entries if entry.generation == generation]
    buffered = {
        row: packed
        for (its_generation, row), packed in data.buffered_rows.items()
        if its_generation == generation and layout is not None
    }
    with_tensors = set(buffered)
    disk = DiskBlobStorage(folder)
    for entry in entries:
        with contextlib.suppress(StoreDamagedError):
            with_tensors.update(
                disk.read_segment(entry, Layout.from_text(layout or "[]")).ids.tolist()
            )
    bundled: set[int] = set()
    for entry in data.bundle_entries:
        with contextlib.suppress(StoreDamagedError):
            disk.verify_file(entry.file, entry.size, entry.checksum)
            bundled.update(disk.read_segment(entry, BUNDLE_LAYOUT).ids.tolist())
            entries.append(entry)
    for row in bundled - set(data.rows):
        if (
            BUNDLE_GENERATION,
            row,
        ) in data.buffered_rows:  # the row was deleted, but the entry that says when is lost
            data.rows[row] = b"", "", 0
    live = sum(died is None for _, _, died in data.rows.values())
    live += len(bundled - set(data.rows))
    last = max([-1, *data.rows, *with_tensors, *(entry.last for entry in data.entries)])
    # The version must be above every version in which a row was deleted.
    version = 1 + max((died or 0 for _, _, died in data.rows.values()), default=0)
    losses = []
    text = data.newest_settings
    if data.newest_version is None:
        losses.append(f"the versions before the repair are lost; {live:,} rows could be read")
    else:
        version = max(version, data.newest_version.number + 1)
        last = max(last, data.newest_version.last)
        text = data.settings.get(data.newest_version.settings, text)
        extra = "removed rows are back, because the entries of their removal are lost"
        if marker is not None and marker.version > data.newest_version.number:
            losses.append(
                f"the versions from {data.newest_version.number + 1} to {marker.version} are lost"
            )
            version = max(version, marker.version + 1)
            extra = "rows of these versions were found in files; some may have been removed later"
        if live > data.newest_version.rows:
            losses.append(f"{live - data.newest_version.rows:,} {extra}")
        if live < data.newest_version.rows:
            losses.append(f"{live:,} of {data.newest_version.rows:,} rows could be read")
    if text is None:
        older = "; the settings of an older file replace them: encode the rows again"
        losses.append(f"the settings are lost{older if data.older_settings else ''}")
    text = text or data.older_settings or "{}"

    with Catalog(path, create=True) as catalog:
        with catalog.write_transaction():
            for table in ("versions", "settings", "generations"):
                catalog.execute(f"DELETE FROM {table}")
            rows = dict(data.rows)
            # A row with tensors but without a record counts as deleted from the beginning.
            rows.update((row, (b"", "", 0)) for row in with_tensors - bundled - set(rows))
            catalog.execute_many(
                "INSERT INTO rows VALUES (?, ?, ?, ?, ?)",
                (
                    (row, *cells[:2], row_crc(row, *cells[:2]), cells[2])
                    for row, cells in rows.items()
                ),
            )
            catalog.buffer_rows(generation, buffered, buffered.values())
            catalog.execute("INSERT INTO settings VALUES (0, ?, ?)", text, crc32(text.encode()))
            arrays = data.arrays.get(generation, (None, None, None))
            catalog.execute(
                "INSERT INTO generations VALUES (?, ?, ?, ?, ?)", generation, layout, *arrays
            )
            catalog.execute_many(
                f"INSERT INTO segments ({SEGMENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", entries
            )
            catalog.execute("UPDATE counters SET files = ?", data.next_file_number)
            catalog.insert_version(VersionEntry(version, last, live, generation, 0), "repair", 0, 0)
        catalog.fetch_all("PRAGMA wal_checkpoint(TRUNCATE)")
    FileSystem().sync_file(path)
    return losses, {entry.file for entry in entries} | {str(arrays[0])}


def _recover_data(
    folder: Path, temporary: Path, marker: CommitMarker | None
) -> _RecoveredData | None:
    """Read all intact data from the catalog and the files; return None if there is not one row.

    Each remedy repairs a copy of the catalog in another way. The copy with the most data is used.
    """
    best = _RecoveredData()
    for remedy, make in enumerate(_REMEDIES):
        copy = temporary / f"copy-{remedy}.sqlite"
        if not (folder / CATALOG_FILE).exists():
            break
        shutil.copyfile(folder / CATALOG_FILE, copy)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(f"{folder / CATALOG_FILE}-wal", f"{copy}-wal")
        try:
            make(copy)
        except (sqlite3.Error, OSError):
            continue
        data = _read_catalog(copy)
        if data.recovered_amount > best.recovered_amount:
            best = data
        rows = len(best.rows) + sum(entry.rows for entry in best.bundle_entries)
        if (
            best.newest_version is not None
            and rows >= best.newest_version.rows
            and best.is_complete
        ):
            break
    _add_from_files(best, folder, marker)
    return best if best.rows or best.bundle_entries or best.newest_version is not None else None


def _read_catalog(path: Path) -> _RecoveredData:
    """Return all data that can be read from a copy of the catalog."""
    data = _RecoveredData()
    try:
        opened = sqlite3.connect(path, isolation_level=None)
    except sqlite3.Error:
        return data
    with contextlib.closing(opened) as connection:
        connection.text_factory = lambda text: text.decode("utf-8", "strict")
        try:
            data.is_complete = {
                sql for (sql,) in connection.execute(SCHEMA_QUERY)
            } == SCHEMA_STATEMENTS
        except _READ_ERRORS:
            data.is_complete = False
        _read_tables(connection, data)
    return data


def _read_tables(connection: sqlite3.Connection, data: _RecoveredData) -> None:
    """Read the intact lines of all tables of a catalog into `data`."""

    def read_lines(statement: str) -> Iterator[Any]:
        """Yield the lines before the damage, then those after it, from the end backwards."""
        for order in ("", " DESC"):
            try:
                yield from connection.execute(statement + order)
                return
            except _READ_ERRORS:
                data.is_complete = False

    for *line, crc in read_lines("SELECT * FROM versions ORDER BY number"):
        if len(line) == 9 and line_crc(line) == crc:
            version_entry = VersionEntry.from_line(line)
            data.newest_version = max(data.newest_version or version_entry, version_entry)
    for number, text, crc in read_lines("SELECT number, text, crc FROM settings ORDER BY number"):
        if isinstance(text, str) and crc32(text.encode()) == crc:
            data.settings[number] = text
    for number, layout, *arrays in read_lines(
        "SELECT number, layout, arrays, bytes, checksum FROM generations ORDER BY number"
    ):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if layout is not None:
                Layout.from_text(layout)
                data.layouts[number] = layout
            if file_number(arrays[0]) is not None and list(map(type, arrays)) == ARRAY_FILE_TYPES:
                data.arrays[number] = tuple(arrays)
    for line in read_lines(f"SELECT {SEGMENT_COLUMNS} FROM segments ORDER BY file"):
        if list(map(type, line)) == SEGMENT_TYPES and file_number(line[0]) is not None:
            entry = SegmentEntry(*line)
            data.entries += [] if entry in data.entries else [entry]
    for (files,) in read_lines("SELECT files FROM counters ORDER BY files"):
        data.next_file_number = files if isinstance(files, int) else 0
    bound = max([-1, *(entry.last for entry in data.entries)])
    if data.newest_version is not None:
        bound = max(bound, data.newest_version.last)
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
            data.rows[row] = (digest, record, died)

    rows = "SELECT id, digest, record, crc, died FROM rows WHERE id"
    data.is_complete &= _read_by_halving(connection, rows, bound, keep_row)
    generations = set(data.layouts) | {data.generation, BUNDLE_GENERATION}
    for generation in generations:

        def keep_buffered_row(line: Any, generation: int = generation) -> None:
            row, packed, crc = line
            if is_buffered_row_intact(row, packed, crc):
                data.buffered_rows[generation, row] = packed

        tensors = f"SELECT id, tensors, crc FROM resting WHERE generation = {generation} AND id"
        data.is_complete &= _read_by_halving(connection, tensors, bound, keep_buffered_row)


def _read_by_halving(
    connection: sqlite3.Connection, statement: str, bound: int, handle_line: Callable[[Any], None]
) -> bool:
    """Read a table by ranges of row ids, and halve each range that cannot be read.

    `handle_line` is called with every line. Return whether no line was lost.
    """
    spans, is_complete = [(0, bound)] if bound >= 0 else [], True
    while spans:
        begin, end = spans.pop()
        try:
            for line in connection.execute(f"{statement} BETWEEN ? AND ?", (begin, end)):
                handle_line(line)
        except _READ_ERRORS:
            is_complete = False
            if begin < end:
                middle = (begin + end) // 2
                spans += [(middle + 1, end), (begin, middle)]
    return is_complete


def _add_from_files(data: _RecoveredData, folder: Path, marker: CommitMarker | None) -> None:
    """Add rows that are in files but not in the catalog, from the newest file to the oldest."""
    bound = max(data.next_file_number, marker.next_file_number) if marker is not None else None
    names = DiskBlobStorage(folder).list_files()
    files = {number: name for name in names if (number := file_number(name)) is not None}
    listed = {entry.file for entry in data.entries} | {line[0] for line in data.arrays.values()}
    for number, file in sorted(files.items(), reverse=True):
        # The file counter is lower than this number, so the commit of the file did not finish.
        if bound is not None and number >= bound:
            continue
        with contextlib.suppress(StoreDamagedError, ValueError, KeyError):
            metadata, entry = read_file_metadata(folder / file)
            if entry.rows < 0:
                arrays = (file, entry.size, entry.checksum)
                data.arrays.setdefault(entry.generation, arrays)
                continue
            data.older_settings = data.older_settings or metadata["settings"]
            if data.newest_version is None or entry.generation == data.newest_version.generation:
                data.newest_settings = data.newest_settings or metadata["settings"]
            overlapping = [other for other in data.entries if entry.may_overlap(other)]
            data.layouts.setdefault(entry.generation, metadata["layout"])
            # The file may replace listed files that are missing, but none that exists.
            if file not in listed and not any(other.file in names for other in overlapping):
                data.entries = [other for other in data.entries if other not in overlapping] + [
                    entry
                ]
    data.next_file_number = max(
        [data.next_file_number, bound or 0, *(number + 1 for number in files)]
    )
    data.entries.sort(key=lambda entry: (entry.generation, entry.first))


def _restore_header(path: Path) -> None:
    """Restore the constant fields in the header of a SQLite file, and extend a truncated file."""
    with open(path, "r+b") as file:
        actual_pages = file.seek(0, os.SEEK_END) // 4096
        file.seek(28)
        stated_pages = int.from_bytes(file.read(4), "big")
        # A damaged header may state any number. Every table begins within the first 16 pages.
        pages = max(stated_pages if stated_pages <= 8 * actual_pages else 0, actual_pages, 16)
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
    """Return a remedy that replaces the first page by that of a new catalog.

    It works because the tables of every catalog start on the same pages. `vacuumed` says whether
    the damaged catalog was vacuumed.
    """

    def apply_remedy(path: Path) -> None:
        model = path.with_suffix(".model")
        with Catalog(model, create=True) as catalog:
            if vacuumed:
                catalog.execute("VACUUM")
            catalog.fetch_all("PRAGMA wal_checkpoint(TRUNCATE)")
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
    """Create the next folder `damaged-N` for replaced files, and return its path."""
    for count in itertools.count(1):
        damaged_folder = folder / f"{DAMAGED_FOLDER_PREFIX}-{count}"
        with contextlib.suppress(FileExistsError):
            damaged_folder.mkdir()
            return damaged_folder
    raise AssertionError


MAX_NAMED_ROWS = 5
"""The number of damaged rows that messages name. The others are only counted."""


@dataclass(frozen=True)
class Problem:
    """A problem with a file of a store, and whether it was repaired."""

    file: str
    what: str
    repaired: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {self.what}{' (repaired)' if self.repaired else ''}"


def check_store(
    path: str | os.PathLike[str],
    *,
    repair: bool = False,
    progress: ProgressCallback | None = None,
) -> list[Problem]:
    """Return the problems of a store; an empty list if there are none.

    Without `repair`, nothing is changed. With `repair`, the files that a crash left are removed,
    and a damaged catalog is rebuilt from all intact data. The index of a bundle is rebuilt too, if
    its rows are intact. The damaged files are moved to a folder `damaged-N` in the store. A damaged
    segment cannot be repaired: restore it from a backup, or encode the rows again.

    `progress(done, total)` is called with numbers of bytes.

    >>> import tempfile
    >>> from qkv.database.storage import Store
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Store(folder) as store:
    ...         _ = store.commit(records=["one"], digests=[b"1"])
    ...     check_store(folder)
    []
    """
    folder = Path(path)
    if not folder.exists():
        raise StoreNotFoundError(f"{folder} does not exist: pass the path of a store")
    names = list_store_files(folder) if folder.is_dir() else set()
    if not names & {CATALOG_FILE, READERS_FILE, LOCK_FILE} and not any(
        name.endswith(SEGMENT_SUFFIX) for name in names
    ):
        raise NotAStoreError(f"{folder} is not a store: pass the path of a store")
    lock = WriteLock(folder)
    try:
        if repair:
            lock.acquire()
            remove_abandoned_folders(folder.absolute().parent)
        return list(_find_problems(folder, lock, repair, progress))
    finally:
        lock.release()


def _find_problems(
    folder: Path, lock: WriteLock, repair: bool, progress: ProgressCallback | None
) -> Iterator[Problem]:
    """Yield the problems of a store, and repair what can be repaired if `repair` is true."""
    marker = commit_marker.read_marker(folder)
    messages = _find_catalog_problems(folder, marker)
    if messages and repair:
        losses = repair_catalog(folder, marker)
        marker = None
        for message in messages:
            yield Problem(CATALOG_FILE, message, repaired=losses is not None)
        if losses is None:
            yield Problem(CATALOG_FILE, "nothing in it could be read: restore it from a backup")
            return
        for loss in losses:
            yield Problem(CATALOG_FILE, loss)
    elif messages:
        for message in messages:
            yield Problem(CATALOG_FILE, message)
        return
    disk = DiskBlobStorage(folder)
    with Catalog(folder / CATALOG_FILE, write=repair) as catalog:
        if repair and marker is None:
            writer_state = WriterState.read_from_catalog(catalog, disk)
            lock.acknowledge_commit(
                writer_state.newest_version.number, writer_state.next_file_number
            )
        yield from _check_leftovers(folder, catalog, disk, lock, repair)
        yield from _check_files(catalog, disk, folder if repair else None, progress)
        yield from _check_indexes(catalog, disk, repair)
        for message in _check_counts(catalog, DiskBlobStorage(folder)):
            yield Problem(CATALOG_FILE, message)


def _find_catalog_problems(folder: Path, marker: CommitMarker | None) -> list[str]:
    """Return the problems of the catalog file as sentences."""
    if not (folder / CATALOG_FILE).exists():
        return ["it is missing"]
    try:
        with Catalog(folder / CATALOG_FILE, write=False) as catalog:
            tables = "SELECT count(*) FROM sqlite_master WHERE name IN ('rows', 'resting')"
            ours = catalog.fetch_value("PRAGMA application_id") == APPLICATION_ID
            if not ours and catalog.fetch_value(tables) == 2:
                return ["its header is not what was written"]
            if not catalog.check_is_store():
                return ["it is empty"]
            report = [str(line) for (line,) in catalog.fetch_all("PRAGMA integrity_check(20)")]
            if report != ["ok"]:
                return [f"SQLite reports: {line}" for line in report]
            find_leftovers(catalog, [], None)
            check_not_older(catalog, marker)
            catalog.list_segments()
            catalog.list_array_files()
            return [*_find_bad_checksums(catalog), *_find_unknown_files(catalog, folder)]
    except StoreDamagedError as error:
        return [_format_reason(error)]


def _format_reason(error: Exception) -> str:
    """Return the part of a message that says what is wrong with the file."""
    if isinstance(error, StoreUnreadableError):
        return "it cannot" + str(error).split(" cannot", 1)[-1]
    return str(error).split(" is damaged: ")[-1].split(". Restore")[0]


def _find_bad_checksums(catalog: Catalog) -> Iterator[str]:
    """Yield a message for each entry of the catalog with a wrong checksum."""
    yield from _limit_messages(
        [
            row
            for row, digest, record, crc in _iterate_rows(catalog)
            if row_crc(row, digest, record) != crc
        ],
        "row {} is not what was written",
    )
    bad = []
    for (generation,) in catalog.fetch_all("SELECT number FROM generations"):
        catalog.read_layout(generation)
        for row, packed, crc in catalog.fetch_all(
            "SELECT id, tensors, crc FROM resting WHERE generation = ?", generation
        ):
            if not is_buffered_row_intact(row, packed, crc):
                bad.append(row)
    yield from _limit_messages(bad, "the tensors of row {} are not what was written")
    catalog.read_versions()
    for (number,) in catalog.fetch_all("SELECT number FROM settings"):
        try:
            catalog.read_settings(number)
        except StoreDamagedError:
            yield f"settings {number} are not what was written"


def _limit_messages(rows: list[int], text: str) -> Iterator[str]:
    """Yield `text` for the first rows, and one message with the number of the other rows."""
    for row in rows[:MAX_NAMED_ROWS]:
        yield text.format(row)
    if len(rows) > MAX_NAMED_ROWS:
        yield f"and {len(rows) - MAX_NAMED_ROWS:,} more rows"


def _iterate_rows(catalog: Catalog) -> Iterator[tuple[int, bytes, str, int]]:
    """Yield (id, digest, record, crc) of every row in the catalog."""
    after = -1
    while page := catalog.fetch_all(
        "SELECT id, digest, record, crc FROM rows WHERE id > ? ORDER BY id LIMIT ?",
        after,
        limits.ROWS_PER_PAGE,
    ):
        yield from page
        after = page[-1][0]


def _find_unknown_files(catalog: Catalog, folder: Path) -> Iterator[str]:
    """Yield a message for each file that the catalog does not list but that has missing rows.

    Missing rows are those of listed files that do not exist.
    """
    disk = DiskBlobStorage(folder)
    existing = set(disk.list_files())
    entries = catalog.list_segments()
    lost = [entry for entry in entries if entry.file not in existing]
    for file in sorted(existing - {entry.file for entry in entries}) if lost else ():
        if file_number(file) is None:
            continue
        with contextlib.suppress(StoreDamagedError, StoreUnreadableError, ValueError, KeyError):
            _, unlisted = read_file_metadata(folder / file)
            if any(unlisted.may_overlap(entry) for entry in lost):
                yield f"it does not list {file}, which contains missing rows"


def _check_leftovers(
    folder: Path, catalog: Catalog, disk: DiskBlobStorage, lock: WriteLock, repair: bool
) -> Iterator[Problem]:
    """Yield a problem for each file that no version uses; remove such files if `repair` is true."""
    held = lock.is_held
    try:
        if not held:
            lock.acquire(wait_seconds=0)
        files = [*disk.list_files(), *disk.list_index_files()]
        leftovers = find_leftovers(catalog, files, lock.marker)
        if repair:
            remove_files(catalog, disk, list(leftovers))
            disk.sync_storage()
        existing = [*disk.list_files(), *disk.list_index_files()]
        for file, why_unused in leftovers.items():
            yield Problem(file, why_unused, repaired=file not in existing)
    except (StoreLockedError, StoreUnwritableError):
        # A writer is active, and these files may be in use.
        leftovers = dict.fromkeys(
            find_leftovers(catalog, disk.list_files(), commit_marker.read_marker(folder)), ""
        )
    finally:
        if not held:
            lock.release()
    used = catalog.list_files()
    for file in disk.list_files():
        if file not in used and file not in leftovers:
            yield Problem(file, "no version uses it. It may be your own file: move it elsewhere")


def _check_files(
    catalog: Catalog,
    disk: DiskBlobStorage,
    folder_to_repair: Path | None,
    progress: ProgressCallback | None,
) -> Iterator[Problem]:
    """Verify every file completely, and yield a problem for each damaged one.

    With `folder_to_repair`, the folder of the store, indexes of damaged bundles are rebuilt.
    """
    done: set[str] = set()
    size = 0
    while True:
        with catalog.read_transaction():
            lines = catalog.list_segments()
            layouts = dict(catalog.fetch_all("SELECT number, layout FROM generations"))
            layouts[BUNDLE_GENERATION] = BUNDLE_LAYOUT.to_text()
            arrays = catalog.list_array_files()
        files: list[tuple[str, int, bytes, SegmentEntry | None]] = [
            (e.file, e.size, e.checksum, e) for e in lines
        ]
        files += [(*line, None) for line in arrays]
        remaining = [line for line in files if line[0] not in done]
        if not remaining:
            return
        total = size + sum(line[1] for line in remaining)
        for file, length, checksum, entry in remaining:
            done.add(file)
            try:
                disk.verify_file(file, length, checksum)
                if entry is not None:
                    disk.read_segment(entry, Layout.from_text(layouts[entry.generation]))
            except (StoreDamagedError, StoreUnreadableError) as error:
                # A compaction may have replaced the file meanwhile.
                if file in catalog.list_files():
                    rows = f" ({entry.rows:,} rows)" if entry is not None else ""
                    was_repaired = (
                        folder_to_repair is not None
                        and entry is not None
                        and repair_bundle_index(folder_to_repair, entry)
                    )
                    yield Problem(file, f"{_format_reason(error)}{rows}", repaired=was_repaired)
            size += length
            if progress is not None:
                progress(size, total)


def _check_indexes(catalog: Catalog, disk: DiskBlobStorage, repair: bool) -> Iterator[Problem]:
    """Verify the index of every segment, and yield a problem for each damaged one.

    With `repair`, damaged indexes are removed: they contain no rows.
    """
    files = set(disk.list_index_files())
    for entry in catalog.list_segments():
        if index_file(entry.file) not in files:
            continue
        try:
            disk.read_index(entry, is_mapped=True)
        except (StoreDamagedError, StoreUnreadableError) as error:
            if entry not in catalog.list_segments():  # a compaction has replaced the segment
                continue
            is_removed = repair and disk.discard_index(entry.file) is None
            reason = str(error).split(" is damaged: ")[-1].split(". ")[0]
            yield Problem(index_file(entry.file), reason, repaired=is_removed)


def _check_counts(catalog: Catalog, disk: DiskBlobStorage) -> Iterator[str]:
    """Yield a message if the newest version has fewer rows or tensors than it should."""
    with catalog.read_transaction():
        try:
            version_entry = catalog.newest_version()
        except StoreDamagedError as error:
            yield _format_reason(error)
            return
        version, last, rows, generation, settings = version_entry
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", SkippedRowsWarning
            )  # damaged files were reported before
            live = RecordStore(catalog, disk, skip_damaged=True).live_ids(NEWEST_SPAN)
        entries = catalog.list_segments(generation)
        layout = catalog.read_layout(generation) or Layout()
        buffered = catalog.fetch_all("SELECT id FROM resting WHERE generation = ?", generation)
    if len(live) != rows:
        yield f"version {version} should have {rows:,} rows, but has {len(live):,}"
    if len(live) and live.max() > last:
        yield f"row {live.max()} is newer than the newest version"
    ids = [np.fromiter((row for (row,) in buffered), np.int64, len(buffered))]
    for entry in entries:
        try:
            ids.append(disk.read_segment(entry, layout).ids)
        except (StoreDamagedError, StoreUnreadableError):
            # The damaged file was reported before, so do not report its rows again.
            ids.append(live[(live >= entry.first) & (live <= entry.last)])
    missing = np.setdiff1d(live, np.concatenate(ids))
    if len(missing):
        yield (
            f"{len(missing):,} rows have lost their tensors; the first is row {missing[0]}: "
            "encode the rows again. If keys or values are vectors, open the store with "
            "skip_damaged=True to use the other rows"
        )
    if not catalog.fetch_value("SELECT count(*) FROM settings WHERE number = ?", settings):
        yield f"the settings of version {version} are missing"
