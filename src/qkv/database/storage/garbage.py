"""Removal of files and folders that failed commits, compactions and imports have left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from qkv.database.errors import StoreDamagedError, reason
from qkv.database.storage import safe_open
from qkv.database.storage.blob_storage import BlobStorage
from qkv.database.storage.catalog import CATALOG_FILE, Catalog
from qkv.database.storage.commit_marker import CommitMarker
from qkv.database.storage.lock import try_lock_file
from qkv.database.storage.segments import (
    TEMPORARY_SUFFIX,
    file_number,
    index_file,
    is_index_file,
)
from qkv.errors import QkvError
from qkv.util.logging import log_warning

MAKER_LOCK_FILE = "making.qkv"
"""The name of a file next to a store that is being created.

The process that creates it locks it.
"""


def remove_abandoned_folders(folder: Path) -> None:
    """Remove the temporary folders of processes that were killed while creating a store here."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    for match in filter(None, (re.fullmatch(r"\.(.+)\.\w{8}", name) for name in names)):
        path = folder / match[0]
        with contextlib.suppress(OSError, StoreDamagedError):
            file = safe_open.open_regular_file(path / MAKER_LOCK_FILE, os.O_RDWR)
            try:
                if try_lock_file(file) and set(os.listdir(path)) <= {MAKER_LOCK_FILE, match[1]}:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(file)


def check_not_older(catalog: Catalog, marker: CommitMarker | None) -> None:
    """Raise `StoreDamagedError` if the catalog has lost its newest versions.

    Files that such a catalog does not list may belong to these versions, so they must be kept.
    """
    newest = catalog.newest_version().number
    if marker is not None and newest < marker.version:
        raise catalog.damaged_error(
            f"its newest version is {newest}, but version {marker.version} was committed; its "
            f"log, {CATALOG_FILE}-wal, is missing or was not copied with it"
        )


def find_leftovers(
    catalog: Catalog, files: Sequence[str], marker: CommitMarker | None
) -> dict[str, str]:
    """Return the files that certainly no version needs, each with the reason.

    The transaction that adds a file to the store also advances the file counter. So a file with a
    higher number is not part of the store, if the marker proves that no transaction is missing. All
    other files are kept, except indexes without a segment: they contain no rows.
    """
    with catalog.read_transaction():
        next_number = catalog.fetch_value("SELECT files FROM counters")
        discarded = {file for (file,) in catalog.fetch_all("SELECT file FROM discarded")}
        used = catalog.list_files()
    highest = max((file_number(file) or 0 for file in used), default=0)
    if not isinstance(next_number, int) or next_number <= highest:
        raise catalog.damaged_error("its file counter is not what was written")
    leftovers = {}
    used_indexes = set(map(index_file, used))
    for file in files:
        final_name = file.removesuffix(TEMPORARY_SUFFIX)
        if is_index_file(file) and file not in used_indexes:
            unfinished = final_name != file
            leftovers[file] = (
                "a temporary file that was not finished"
                if unfinished
                else "the index of a segment that no version uses"
            )
        number = file_number(final_name)
        if number is None or file in used:
            continue
        if final_name != file:
            leftovers[file] = "a temporary file that was not finished"
        elif file in discarded:
            leftovers[file] = "left by a compaction"
        elif marker is not None and marker.next_file_number <= next_number <= number:
            leftovers[file] = "left by a commit that did not finish"
    return leftovers


def remove_files(catalog: Catalog, blob_storage: BlobStorage, files: Sequence[str]) -> str:
    """Remove files that no version uses; return "", or a sentence on what failed.

    The caller holds the write lock. The commit is complete, so a failure is only logged, and the
    next writer tries again.
    """
    errors: list[QkvError | OSError] = []
    try:
        errors += [
            error for file in files if (error := blob_storage.discard_file(file)) is not None
        ]
        _forget_discarded(catalog, blob_storage)
    except (QkvError, OSError) as error:
        errors.append(error)
    if not errors:
        return ""
    message = f"removing files that no version uses failed ({reason(errors[0])})"
    log_warning("%s: the next writer tries again", message)
    return f"{message}: the next writer tries again"


def _forget_discarded(catalog: Catalog, blob_storage: BlobStorage) -> None:
    """Delete the entries of files that no longer exist from the list of discarded files."""
    entries = catalog.fetch_all("SELECT file FROM discarded")
    if entries:
        existing = set(blob_storage.list_files())
        # Sync first: if a file reappears after a power loss, the list must still contain it.
        blob_storage.sync_storage()
        with catalog.write_transaction():
            gone = [line for line in entries if line[0] not in existing]
            catalog.execute_many("DELETE FROM discarded WHERE file = ?", gone)
