"""What nobody needs: files of a commit or compaction that did not finish, folders of an import."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from qkv.database.errors import StoreDamagedError, reason
from qkv.database.storage import catalog_queries
from qkv.database.storage import safe_open as plain
from qkv.database.storage.blob_storage import BlobStorage
from qkv.database.storage.catalog import CATALOG_FILE, Catalog
from qkv.database.storage.commit_marker import CommitMarker
from qkv.database.storage.lock import try_lock_file
from qkv.database.storage.segments import TEMPORARY_SUFFIX, file_number
from qkv.errors import QkvError
from qkv.util.logging import warn_log

MAKER_LOCK_FILE = "making.qkv"
"""A file beside a store that is being made, locked by its maker as long as he lives."""


def remove_abandoned_folders(folder: Path) -> None:
    """Remove what makers of stores in this folder left there when they were killed."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    for found in filter(None, (re.fullmatch(r"\.(.+)\.\w{8}", name) for name in names)):
        path = folder / found[0]
        with contextlib.suppress(OSError, StoreDamagedError):
            file = plain.open_regular_file(path / MAKER_LOCK_FILE, os.O_RDWR)
            try:
                if try_lock_file(file) and set(os.listdir(path)) <= {MAKER_LOCK_FILE, found[1]}:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(file)


def check_not_older(catalogue: Catalog, known: CommitMarker | None) -> None:
    """Refuse a catalogue that has lost its newest versions, for what it does not know of is not
    left over: it is what was lost."""
    newest = catalogue.newest_version().number
    if known is not None and newest < known.version:
        raise catalogue.damaged_error(
            f"it ends with version {newest}, and version {known.version} was acknowledged; its "
            f"log, {CATALOG_FILE}-wal, is missing or was not copied with it"
        )


def find_leftovers(
    catalogue: Catalog, files: Sequence[str], known: CommitMarker | None
) -> dict[str, str]:
    """The files that no version needs, and why that is certain.

    Numbers are given out in the transaction that makes a file part of the store, so a higher one
    was never part of it, if what is `known` proves that no transaction is missing. A file that no
    rule is about is left alone.
    """
    with catalogue.read_transaction():
        following = catalogue.fetch_value("SELECT files FROM counters")
        discarded = {file for (file,) in catalogue.fetch_all("SELECT file FROM discarded")}
        used = catalog_queries.list_files(catalogue)
    highest = max((file_number(file) or 0 for file in used), default=0)
    if not isinstance(following, int) or following <= highest:
        raise catalogue.damaged_error("its count of files is not what was written")
    found = {}
    for file in files:
        plain = file.removesuffix(TEMPORARY_SUFFIX)
        given = file_number(plain)
        if given is None or file in used:
            continue
        if plain != file:
            found[file] = "a file that was never finished"
        elif file in discarded:
            found[file] = "left by a compaction"
        elif known is not None and known.next_file_number <= following <= given:
            found[file] = "left by a commit that did not finish"
    return found


def remove_files(catalogue: Catalog, shelf: BlobStorage, files: Sequence[str]) -> str:
    """Remove files that no version uses. Needs the lock for writing.

    Their commit is done, so that a failure is not its own: the next writer tries again. It is
    logged and returned as a sentence; empty where all went well.
    """
    faults: list[QkvError | OSError] = []
    try:
        faults += [fault for file in files if (fault := shelf.discard_file(file)) is not None]
        _forget_discarded(catalogue, shelf)
    except (QkvError, OSError) as error:
        faults.append(error)
    if not faults:
        return ""
    told = f"cleaning up files that no version uses failed ({reason(faults[0])})"
    warn_log("%s: the next writer tries again", told)
    return f"{told}: the next writer tries again"


def _forget_discarded(catalogue: Catalog, shelf: BlobStorage) -> None:
    """Take the files that are gone off the list of those to be removed."""
    listed = catalogue.fetch_all("SELECT file FROM discarded")
    if listed:
        there = set(shelf.list_files())
        # A file that a loss of power brings back must still be known as discarded.
        shelf.sync_storage()
        with catalogue.write_transaction():
            gone = [line for line in listed if line[0] not in there]
            catalogue.execute_many("DELETE FROM discarded WHERE file = ?", gone)
