"""What nobody needs: files of a commit or compaction that did not finish, folders of an import."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from qkv.database.faults import Damaged, reason
from qkv.database.store import ledger, plain
from qkv.database.store.catalogue import FILE, Catalogue
from qkv.database.store.lock import seized
from qkv.database.store.mark import Mark
from qkv.database.store.segments import TEMPORARY, number
from qkv.database.store.shelf import Shelf
from qkv.errors import QkvError
from qkv.log import warn_log

MAKING = "making.qkv"
"""A file beside a store that is being made, locked by its maker as long as he lives."""


def tidy(folder: Path) -> None:
    """Remove what makers of stores in this folder left there when they were killed."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    for found in filter(None, (re.fullmatch(r"\.(.+)\.\w{8}", name) for name in names)):
        path = folder / found[0]
        with contextlib.suppress(OSError, Damaged):
            file = plain.opened(path / MAKING, os.O_RDWR)
            try:
                if seized(file) and set(os.listdir(path)) <= {MAKING, found[1]}:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(file)


def refuse_older(catalogue: Catalogue, known: Mark | None) -> None:
    """Refuse a catalogue that has lost its newest versions, for what it does not know of is not
    left over: it is what was lost."""
    newest = catalogue.newest().number
    if known is not None and newest < known.version:
        raise catalogue.damaged(
            f"it ends with version {newest}, and version {known.version} was acknowledged; its "
            f"log, {FILE}-wal, is missing or was not copied with it"
        )


def leftovers(catalogue: Catalogue, files: Sequence[str], known: Mark | None) -> dict[str, str]:
    """The files that no version needs, and why that is certain.

    Numbers are given out in the transaction that makes a file part of the store, so a higher one
    was never part of it, if what is `known` proves that no transaction is missing. A file that no
    rule is about is left alone.
    """
    with catalogue.view():
        following = catalogue.value("SELECT files FROM counters")
        discarded = {file for (file,) in catalogue.all("SELECT file FROM discarded")}
        used = ledger.files(catalogue)
    highest = max((number(file) or 0 for file in used), default=0)
    if not isinstance(following, int) or following <= highest:
        raise catalogue.damaged("its count of files is not what was written")
    found = {}
    for file in files:
        plain = file.removesuffix(TEMPORARY)
        given = number(plain)
        if given is None or file in used:
            continue
        if plain != file:
            found[file] = "a file that was never finished"
        elif file in discarded:
            found[file] = "left by a compaction"
        elif known is not None and known.files <= following <= given:
            found[file] = "left by a commit that did not finish"
    return found


def clear(catalogue: Catalogue, shelf: Shelf, files: Sequence[str]) -> str:
    """Remove files that no version uses. Needs the lock for writing.

    Their commit is done, so that a failure is not its own: the next writer tries again. It is
    logged and returned as a sentence; empty where all went well.
    """
    faults: list[QkvError | OSError] = []
    try:
        faults += [fault for file in files if (fault := shelf.discard(file)) is not None]
        _forget_discarded(catalogue, shelf)
    except (QkvError, OSError) as error:
        faults.append(error)
    if not faults:
        return ""
    told = f"cleaning up files that no version uses failed ({reason(faults[0])})"
    warn_log("%s: the next writer tries again", told)
    return f"{told}: the next writer tries again"


def _forget_discarded(catalogue: Catalogue, shelf: Shelf) -> None:
    """Take the files that are gone off the list of those to be removed."""
    listed = catalogue.all("SELECT file FROM discarded")
    if listed:
        there = set(shelf.files())
        # A file that a loss of power brings back must still be known as discarded.
        shelf.settle()
        with catalogue.transaction():
            gone = [line for line in listed if line[0] not in there]
            catalogue.many("DELETE FROM discarded WHERE file = ?", gone)
