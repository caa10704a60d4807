"""Checking a store: every file against its checksum, every count against the rows."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
from qkv.database.storage import catalog_queries, catalog_recovery, commit_marker, limits
from qkv.database.storage.blob_storage import DiskBlobStorage
from qkv.database.storage.bundles import BUNDLE_GENERATION, BUNDLE_LAYOUT
from qkv.database.storage.catalog import APPLICATION_ID, CATALOG_FILE, Catalog, row_crc
from qkv.database.storage.commit_marker import LOCK_FILE, CommitMarker
from qkv.database.storage.folder import list_store_files
from qkv.database.storage.garbage import (
    check_not_older,
    find_leftovers,
    remove_abandoned_folders,
    remove_files,
)
from qkv.database.storage.layout import Layout
from qkv.database.storage.lock import READERS_FILE, WriteLock
from qkv.database.storage.records import NEWEST_SPAN, RecordStore
from qkv.database.storage.segments import (
    SEGMENT_SUFFIX,
    SegmentEntry,
    file_number,
    read_file_metadata,
)
from qkv.database.storage.writer import WriterState
from qkv.util.types import ProgressCallback

MAX_NAMED_ROWS = 5
"""Rows that are named one by one; the others are counted."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a file, and whether that was mended."""

    file: str
    what: str
    repaired: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {self.what}{' (repaired)' if self.repaired else ''}"


def check(
    path: str | os.PathLike[str],
    *,
    repair: bool = False,
    progress: ProgressCallback | None = None,
) -> list[Problem]:
    """What is wrong with a store; an empty list where nothing is.

    Without `repair` nothing is changed. With it, what a crash left behind is removed, and a damaged
    catalogue is made anew from all that can be read; the damaged one is kept in a folder beside it.
    So is the index of a bundle, where its rows are what was written. A damaged segment cannot be
    mended here: restore it, or encode the rows again. `progress(done, total)` counts bytes.

    >>> import tempfile
    >>> from qkv.database.storage import Store
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Store(folder) as store:
    ...         _ = store.commit(records=["one"], digests=[b"1"])
    ...     check(folder)
    []
    """
    folder = Path(path)
    if not folder.exists():
        raise StoreNotFoundError(f"{folder} does not exist: give the path of a store")
    names = list_store_files(folder) if folder.is_dir() else set()
    if not names & {CATALOG_FILE, READERS_FILE, LOCK_FILE} and not any(
        name.endswith(SEGMENT_SUFFIX) for name in names
    ):
        raise NotAStoreError(f"{folder} is not a store: give the path of a store")
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
    known = commit_marker.read_marker(folder)
    faults = _find_catalog_faults(folder, known)
    if faults and repair:
        told = catalog_recovery.rebuild_catalog(folder, known)
        known = None
        for fault in faults:
            yield Problem(CATALOG_FILE, fault, repaired=told is not None)
        if told is None:
            yield Problem(CATALOG_FILE, "nothing in it could be read: restore it from a copy")
            return
        for what in told:
            yield Problem(CATALOG_FILE, what)
    elif faults:
        for fault in faults:
            yield Problem(CATALOG_FILE, fault)
        return
    disk = DiskBlobStorage(folder)
    with Catalog(folder / CATALOG_FILE, write=repair) as catalogue:
        if repair and known is None:
            desk = WriterState.read_from_catalog(catalogue, disk)
            lock.acknowledge_commit(desk.newest_version.number, desk.next_file_number)
        yield from _check_leftovers(folder, catalogue, disk, lock, repair)
        yield from _check_files(catalogue, disk, folder if repair else None, progress)
        for what in _check_counts(catalogue, DiskBlobStorage(folder)):
            yield Problem(CATALOG_FILE, what)


def _find_catalog_faults(folder: Path, known: CommitMarker | None) -> list[str]:
    """What is wrong with the catalogue itself."""
    if not (folder / CATALOG_FILE).exists():
        return ["it is missing"]
    try:
        with Catalog(folder / CATALOG_FILE, write=False) as catalogue:
            tables = "SELECT count(*) FROM sqlite_master WHERE name IN ('rows', 'resting')"
            ours = catalogue.fetch_value("PRAGMA application_id") == APPLICATION_ID
            if not ours and catalogue.fetch_value(tables) == 2:
                return ["its header is not what was written"]
            if not catalogue.check_is_store():
                return ["it is empty"]
            told = [str(line) for (line,) in catalogue.fetch_all("PRAGMA integrity_check(20)")]
            if told != ["ok"]:
                return [f"SQLite says: {line}" for line in told]
            find_leftovers(catalogue, [], None)
            check_not_older(catalogue, known)
            catalog_queries.list_segments(catalogue)
            catalog_queries.list_array_files(catalogue)
            return [*_find_bad_checksums(catalogue), *_find_unknown_files(catalogue, folder)]
    except StoreDamagedError as fault:
        return [_format_reason(fault)]


def _format_reason(fault: Exception) -> str:
    if isinstance(fault, StoreUnreadableError):
        return "it cannot" + str(fault).split(" cannot", 1)[-1]
    return str(fault).split(" is damaged: ")[-1].split(". Restore")[0]


def _find_bad_checksums(catalogue: Catalog) -> Iterator[str]:
    """Lines whose checksums differ."""
    yield from _limit_messages(
        [
            row
            for row, digest, record, crc in _iterate_rows(catalogue)
            if row_crc(row, digest, record) != crc
        ],
        "row {} is not what was written",
    )
    bad = []
    for (generation,) in catalogue.fetch_all("SELECT number FROM generations"):
        catalog_queries.read_layout(catalogue, generation)
        for row, packed, crc in catalogue.fetch_all(
            "SELECT id, tensors, crc FROM resting WHERE generation = ?", generation
        ):
            if not catalog_queries.is_intact(row, packed, crc):
                bad.append(row)
    yield from _limit_messages(bad, "the tensors of row {} are not what was written")
    catalogue.read_versions()
    for (some,) in catalogue.fetch_all("SELECT number FROM settings"):
        try:
            catalogue.read_settings(some)
        except StoreDamagedError:
            yield f"settings {some} are not what was written"


def _limit_messages(rows: list[int], text: str) -> Iterator[str]:
    for row in rows[:MAX_NAMED_ROWS]:
        yield text.format(row)
    if len(rows) > MAX_NAMED_ROWS:
        yield f"and {len(rows) - MAX_NAMED_ROWS:,} rows more"


def _iterate_rows(catalogue: Catalog) -> Iterator[tuple[int, bytes, str, int]]:
    after = -1
    while page := catalogue.fetch_all(
        "SELECT id, digest, record, crc FROM rows WHERE id > ? ORDER BY id LIMIT ?",
        after,
        limits.ROWS_PER_PAGE,
    ):
        yield from page
        after = page[-1][0]


def _find_unknown_files(catalogue: Catalog, folder: Path) -> Iterator[str]:
    """Files that a catalogue does not know, with rows whose own file is gone."""
    disk = DiskBlobStorage(folder)
    there = set(disk.list_files())
    entries = catalog_queries.list_segments(catalogue)
    lost = [entry for entry in entries if entry.file not in there]
    for file in sorted(there - {entry.file for entry in entries}) if lost else ():
        if file_number(file) is None:
            continue
        with contextlib.suppress(StoreDamagedError, StoreUnreadableError, ValueError, KeyError):
            _, found = read_file_metadata(folder / file)
            if any(found.may_overlap(entry) for entry in lost):
                yield f"it does not know {file}, which has rows that it misses"


def _check_leftovers(
    folder: Path, catalogue: Catalog, disk: DiskBlobStorage, lock: WriteLock, repair: bool
) -> Iterator[Problem]:
    held = lock.is_held
    try:
        if not held:
            lock.acquire(patience=0)
        found = find_leftovers(catalogue, disk.list_files(), lock.marker)
        if repair:
            remove_files(catalogue, disk, list(found))
            disk.sync_storage()
        there = disk.list_files()
        for file, what in found.items():
            yield Problem(file, what, repaired=file not in there)
    except (StoreLockedError, StoreUnwritableError):
        # Its writer is at work, and they may be his.
        found = dict.fromkeys(
            find_leftovers(catalogue, disk.list_files(), commit_marker.read_marker(folder)), ""
        )
    finally:
        if not held:
            lock.release()
    used = catalog_queries.list_files(catalogue)
    for file in disk.list_files():
        if file not in used and file not in found:
            yield Problem(file, "no version uses it, and it may be yours: move it elsewhere")


def _check_files(
    catalogue: Catalog,
    disk: DiskBlobStorage,
    repaired: Path | None,
    progress: ProgressCallback | None,
) -> Iterator[Problem]:
    """Every file, read in full; one that can be made anew is, in the folder that is repaired."""
    done: set[str] = set()
    size = 0
    while True:
        with catalogue.read_transaction():
            lines = catalog_queries.list_segments(catalogue)
            layouts = dict(catalogue.fetch_all("SELECT number, layout FROM generations"))
            layouts[BUNDLE_GENERATION] = BUNDLE_LAYOUT.to_text()
            arrays = catalog_queries.list_array_files(catalogue)
        files: list[tuple[str, int, bytes, SegmentEntry | None]] = [
            (e.file, e.size, e.checksum, e) for e in lines
        ]
        files += [(*line, None) for line in arrays]
        left = [line for line in files if line[0] not in done]
        if not left:
            return
        total = size + sum(line[1] for line in left)
        for file, length, checksum, entry in left:
            done.add(file)
            try:
                disk.verify_file(file, length, checksum)
                if entry is not None:
                    disk.read_segment(entry, Layout.from_text(layouts[entry.generation]))
            except (StoreDamagedError, StoreUnreadableError) as fault:
                if file in catalog_queries.list_files(
                    catalogue
                ):  # and no compaction has replaced it meanwhile
                    rows = f" ({entry.rows:,} rows)" if entry is not None else ""
                    anew = (
                        repaired is not None
                        and entry is not None
                        and catalog_recovery.rebuild_bundle_index(repaired, entry)
                    )
                    yield Problem(file, f"{_format_reason(fault)}{rows}", repaired=anew)
            size += length
            if progress is not None:
                progress(size, total)


def _check_counts(catalogue: Catalog, disk: DiskBlobStorage) -> Iterator[str]:
    """Whether the newest version has the rows it says, and each of them its tensors."""
    with catalogue.read_transaction():
        try:
            edition = catalogue.newest_version()
        except StoreDamagedError as fault:
            yield _format_reason(fault)
            return
        version, last, rows, generation, settings = edition
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", SkippedRowsWarning
            )  # those of files that are told of already
            live = RecordStore(catalogue, disk, skip_damaged=True).live_ids(NEWEST_SPAN)
        entries = catalog_queries.list_segments(catalogue, generation)
        layout = catalog_queries.read_layout(catalogue, generation) or Layout()
        resting = catalogue.fetch_all("SELECT id FROM resting WHERE generation = ?", generation)
    if len(live) != rows:
        yield f"version {version} should have {rows:,} rows, and {len(live):,} are there"
    if len(live) and live.max() > last:
        yield f"row {live.max()} is newer than the newest version"
    ids = [np.fromiter((row for (row,) in resting), np.int64, len(resting))]
    for entry in entries:
        try:
            ids.append(disk.read_segment(entry, layout).ids)
        except (StoreDamagedError, StoreUnreadableError):
            # The file is told of already; its rows count as there.
            ids.append(live[(live >= entry.first) & (live <= entry.last)])
    missing = np.setdiff1d(live, np.concatenate(ids))
    if len(missing):
        yield (
            f"{len(missing):,} rows have lost their tensors, the first is row {missing[0]}: "
            "encode the rows again; of keys or values that are vectors, only skip_damaged=True "
            "gives the other rows"
        )
    if not catalogue.fetch_value("SELECT count(*) FROM settings WHERE number = ?", settings):
        yield f"the settings of version {version} are missing"
