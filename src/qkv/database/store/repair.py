"""Checking a store: every file against its checksum, every count against the rows."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qkv.database.faults import (
    Damaged,
    Locked,
    NoStore,
    NotAStore,
    SkippedRows,
    Unreadable,
    Unwritable,
)
from qkv.database.store import ledger, mark, rebuild, sizes
from qkv.database.store.bundles import GENERATION, LAYOUT
from qkv.database.store.catalogue import APPLICATION, FILE, Catalogue, row_crc
from qkv.database.store.desk import Desk
from qkv.database.store.folder import listed
from qkv.database.store.layout import Layout
from qkv.database.store.lines import ALWAYS, Lines
from qkv.database.store.lock import READERS, WriteLock
from qkv.database.store.mark import WRITER, Mark
from qkv.database.store.segments import SUFFIX, Entry, number, read_notes
from qkv.database.store.shelf import Disk
from qkv.database.store.sweep import clear, leftovers, refuse_older, tidy
from qkv.types import Progress

SHOWN = 5
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
    progress: Progress | None = None,
) -> list[Problem]:
    """What is wrong with a store; an empty list where nothing is.

    Without `repair` nothing is changed. With it, what a crash left behind is removed, and a damaged
    catalogue is made anew from all that can be read; the damaged one is kept in a folder beside it.
    So is the index of a bundle, where its rows are what was written. A damaged segment cannot be
    mended here: restore it, or encode the rows again.
    `progress(done, total)` counts bytes.

    >>> import tempfile
    >>> from qkv.database.store import Store
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Store(folder) as store:
    ...         _ = store.commit(records=["one"], digests=[b"1"])
    ...     check(folder)
    []
    """
    folder = Path(path)
    if not folder.exists():
        raise NoStore(f"{folder} does not exist: give the path of a store")
    names = listed(folder) if folder.is_dir() else set()
    if not names & {FILE, READERS, WRITER} and not any(name.endswith(SUFFIX) for name in names):
        raise NotAStore(f"{folder} is not a store: give the path of a store")
    lock = WriteLock(folder)
    try:
        if repair:
            lock.take()
            tidy(folder.absolute().parent)
        return list(_problems(folder, lock, repair, progress))
    finally:
        lock.drop()


def _problems(
    folder: Path, lock: WriteLock, repair: bool, progress: Progress | None
) -> Iterator[Problem]:
    known = mark.of(folder)
    faults = _catalogue_faults(folder, known)
    if faults and repair:
        told = rebuild.rebuild(folder, known)
        known = None
        for fault in faults:
            yield Problem(FILE, fault, repaired=told is not None)
        if told is None:
            yield Problem(FILE, "nothing in it could be read: restore it from a copy")
            return
        for what in told:
            yield Problem(FILE, what)
    elif faults:
        for fault in faults:
            yield Problem(FILE, fault)
        return
    disk = Disk(folder)
    with Catalogue(folder / FILE, write=repair) as catalogue:
        if repair and known is None:
            desk = Desk.at(catalogue, disk)
            lock.acknowledge(desk.edition.number, desk.files)
        yield from _leftovers(folder, catalogue, disk, lock, repair)
        yield from _files(catalogue, disk, folder if repair else None, progress)
        for what in _counts(catalogue, Disk(folder)):
            yield Problem(FILE, what)


def _catalogue_faults(folder: Path, known: Mark | None) -> list[str]:
    """What is wrong with the catalogue itself."""
    if not (folder / FILE).exists():
        return ["it is missing"]
    try:
        with Catalogue(folder / FILE, write=False) as catalogue:
            tables = "SELECT count(*) FROM sqlite_master WHERE name IN ('rows', 'resting')"
            ours = catalogue.value("PRAGMA application_id") == APPLICATION
            if not ours and catalogue.value(tables) == 2:
                return ["its header is not what was written"]
            if not catalogue.identify():
                return ["it is empty"]
            told = [str(line) for (line,) in catalogue.all("PRAGMA integrity_check(20)")]
            if told != ["ok"]:
                return [f"SQLite says: {line}" for line in told]
            leftovers(catalogue, [], None)
            refuse_older(catalogue, known)
            ledger.segments(catalogue)
            ledger.arrays(catalogue)
            return [*_torn(catalogue), *_missed(catalogue, folder)]
    except Damaged as fault:
        return [_reason(fault)]


def _reason(fault: Exception) -> str:
    if isinstance(fault, Unreadable):
        return "it cannot" + str(fault).split(" cannot", 1)[-1]
    return str(fault).split(" is damaged: ")[-1].split(". Restore")[0]


def _torn(catalogue: Catalogue) -> Iterator[str]:
    """Lines whose checksums differ."""
    yield from _few(
        [
            row
            for row, digest, record, crc in _rows(catalogue)
            if row_crc(row, digest, record) != crc
        ],
        "row {} is not what was written",
    )
    bad = []
    for (generation,) in catalogue.all("SELECT number FROM generations"):
        ledger.layout(catalogue, generation)
        for row, packed, crc in catalogue.all(
            "SELECT id, tensors, crc FROM resting WHERE generation = ?", generation
        ):
            if not ledger.intact(row, packed, crc):
                bad.append(row)
    yield from _few(bad, "the tensors of row {} are not what was written")
    catalogue.versions()
    for (some,) in catalogue.all("SELECT number FROM settings"):
        try:
            catalogue.read_settings(some)
        except Damaged:
            yield f"settings {some} are not what was written"


def _few(rows: list[int], text: str) -> Iterator[str]:
    for row in rows[:SHOWN]:
        yield text.format(row)
    if len(rows) > SHOWN:
        yield f"and {len(rows) - SHOWN:,} rows more"


def _rows(catalogue: Catalogue) -> Iterator[tuple[int, bytes, str, int]]:
    after = -1
    while page := catalogue.all(
        "SELECT id, digest, record, crc FROM rows WHERE id > ? ORDER BY id LIMIT ?",
        after,
        sizes.PAGE,
    ):
        yield from page
        after = page[-1][0]


def _missed(catalogue: Catalogue, folder: Path) -> Iterator[str]:
    """Files that a catalogue does not know, with rows whose own file is gone."""
    disk = Disk(folder)
    there = set(disk.files())
    entries = ledger.segments(catalogue)
    lost = [entry for entry in entries if entry.file not in there]
    for file in sorted(there - {entry.file for entry in entries}) if lost else ():
        if number(file) is None:
            continue
        with contextlib.suppress(Damaged, Unreadable, ValueError, KeyError):
            _, found = read_notes(folder / file)
            if any(found.covers(entry) for entry in lost):
                yield f"it does not know {file}, which has rows that it misses"


def _leftovers(
    folder: Path, catalogue: Catalogue, disk: Disk, lock: WriteLock, repair: bool
) -> Iterator[Problem]:
    held = lock.held
    try:
        if not held:
            lock.take(patience=0)
        found = leftovers(catalogue, disk.files(), lock.mark)
        if repair:
            clear(catalogue, disk, list(found))
            disk.settle()
        there = disk.files()
        for file, what in found.items():
            yield Problem(file, what, repaired=file not in there)
    except (Locked, Unwritable):
        # Its writer is at work, and they may be his.
        found = dict.fromkeys(leftovers(catalogue, disk.files(), mark.of(folder)), "")
    finally:
        if not held:
            lock.drop()
    used = ledger.files(catalogue)
    for file in disk.files():
        if file not in used and file not in found:
            yield Problem(file, "no version uses it, and it may be yours: move it elsewhere")


def _files(
    catalogue: Catalogue, disk: Disk, repaired: Path | None, progress: Progress | None
) -> Iterator[Problem]:
    """Every file, read in full; one that can be made anew is, in the folder that is repaired."""
    done: set[str] = set()
    size = 0
    while True:
        with catalogue.view():
            lines = ledger.segments(catalogue)
            layouts = dict(catalogue.all("SELECT number, layout FROM generations"))
            layouts[GENERATION] = LAYOUT.text()
            arrays = ledger.arrays(catalogue)
        files: list[tuple[str, int, bytes, Entry | None]] = [
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
                disk.verify(file, length, checksum)
                if entry is not None:
                    disk.get(entry, Layout.parse(layouts[entry.generation]))
            except (Damaged, Unreadable) as fault:
                if file in ledger.files(catalogue):  # and no compaction has replaced it meanwhile
                    rows = f" ({entry.rows:,} rows)" if entry is not None else ""
                    anew = (
                        repaired is not None
                        and entry is not None
                        and rebuild.index(repaired, entry)
                    )
                    yield Problem(file, f"{_reason(fault)}{rows}", repaired=anew)
            size += length
            if progress is not None:
                progress(size, total)


def _counts(catalogue: Catalogue, disk: Disk) -> Iterator[str]:
    """Whether the newest version has the rows it says, and each of them its tensors."""
    with catalogue.view():
        try:
            edition = catalogue.newest()
        except Damaged as fault:
            yield _reason(fault)
            return
        version, last, rows, generation, settings = edition
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SkippedRows)  # those of files that are told of already
            live = Lines(catalogue, disk, skip_damaged=True).ids(ALWAYS)
        entries = ledger.segments(catalogue, generation)
        layout = ledger.layout(catalogue, generation) or Layout()
        resting = catalogue.all("SELECT id FROM resting WHERE generation = ?", generation)
    if len(live) != rows:
        yield f"version {version} should have {rows:,} rows, and {len(live):,} are there"
    if len(live) and live.max() > last:
        yield f"row {live.max()} is newer than the newest version"
    ids = [np.fromiter((row for (row,) in resting), np.int64, len(resting))]
    for entry in entries:
        try:
            ids.append(disk.get(entry, layout).ids)
        except (Damaged, Unreadable):
            # The file is told of already; its rows count as there.
            ids.append(live[(live >= entry.first) & (live <= entry.last)])
    missing = np.setdiff1d(live, np.concatenate(ids))
    if len(missing):
        yield (
            f"{len(missing):,} rows have lost their tensors, the first is row {missing[0]}: "
            "encode the rows again; of keys or values that are vectors, only skip_damaged=True "
            "gives the other rows"
        )
    if not catalogue.value("SELECT count(*) FROM settings WHERE number = ?", settings):
        yield f"the settings of version {version} are missing"
