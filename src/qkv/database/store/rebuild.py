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

from qkv.database.faults import Damaged
from qkv.database.store import ledger
from qkv.database.store.bundles import GENERATION, LAYOUT, merged
from qkv.database.store.catalogue import (
    FILE,
    SEGMENT,
    STATEMENTS,
    WRITTEN,
    Catalogue,
    Edition,
    line_crc,
    row_crc,
)
from qkv.database.store.layout import Layout
from qkv.database.store.mark import Mark
from qkv.database.store.segments import Entry, number, read_notes
from qkv.database.store.shelf import Disk, Files

KEPT = "damaged"
"""The folder, with a number, for what was replaced."""
_MAGIC = b"SQLite format 3\0"
_FAULTS = (sqlite3.Error, UnicodeDecodeError)
"""What reading raises; the second where SQLite's own message quotes damaged text."""


def rebuild(folder: Path, known: Mark | None) -> list[str] | None:
    """Make the catalogue anew; give what was lost, or None where nothing could be read.

    What is `known` of the last commit is above every version and file that may be missing.
    """
    with tempfile.TemporaryDirectory(prefix="repair-", dir=folder) as name:
        place = Path(name)
        found = _salvaged(folder, place, known)
        if found is None:
            return None
        fresh = place / "fresh.sqlite"
        told, used = _write(found, folder, fresh, known)
        kept = _new_folder(folder)
        # A log would be read into the new catalogue, so it goes first. From here on a crash leaves
        # a store without a sound catalogue, which is what it was.
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{folder / FILE}{suffix}", kept / f"{FILE}{suffix}")
        with contextlib.suppress(FileNotFoundError):
            os.link(folder / FILE, kept / FILE)
        os.replace(fresh, folder / FILE)
        for file in Disk(folder).files():
            if number(file) is not None and file not in used:
                os.replace(folder / file, kept / file)
        for some in (kept, folder):
            Files().fsync_folder(some)
    return told


def index(folder: Path, entry: Entry) -> bool:
    """Make the index of a bundle anew from its rows; False where that is not what was written."""
    if entry.generation != GENERATION:
        return False
    with tempfile.TemporaryDirectory(prefix="repair-", dir=folder) as name:
        try:
            notes, _ = read_notes(folder / entry.file)
            rows = Disk(folder).get(entry, LAYOUT)
            fresh = Disk(Path(name))
            fresh.put(entry.file, LAYOUT, [merged([rows])], notes)
            fresh.verify(entry.file, entry.size, entry.checksum)
        except (Damaged, KeyError, ValueError):
            return False
        kept = _new_folder(folder)
        os.link(folder / entry.file, kept / entry.file)
        os.replace(Path(name) / entry.file, folder / entry.file)
        for some in (kept, folder):
            Files().fsync_folder(some)
    return True


@dataclass
class _Found:
    """What could be read."""

    newest: Edition | None = None
    rows: dict[int, tuple[bytes, str, int | None]] = field(default_factory=dict)
    resting: dict[tuple[int, int], bytes] = field(default_factory=dict)
    settings: dict[int, str] = field(default_factory=dict)
    noted: str | None = None
    """The settings that the newest segment was written under."""
    older: str | None = None
    """Those of the newest file of all, which may be of other vectors."""
    layouts: dict[int, str] = field(default_factory=dict)
    arrays: dict[int, tuple[str, int, bytes]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    files: int = 0
    whole: bool = True
    """Whether every table is what was made and could be read to its end."""

    @property
    def wealth(self) -> tuple[bool, int, int]:
        """How much was read, the larger the better."""
        tables = len(self.settings) + len(self.layouts) + len(self.arrays) + len(self.entries)
        return self.newest is not None, len(self.rows), len(self.resting) + tables

    @property
    def generation(self) -> int:
        if self.newest is not None:
            return self.newest.generation
        known = [entry.generation for entry in self.entries] + [some for some, _ in self.resting]
        return max([0, *known])

    @property
    def bundles(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.generation == GENERATION]


def _write(
    found: _Found, folder: Path, path: Path, known: Mark | None
) -> tuple[list[str], set[str]]:
    """Write the new catalogue; give what was lost, and the files in use."""
    generation = found.generation
    layout = found.layouts.get(generation)
    entries = [entry for entry in found.entries if entry.generation == generation]
    resting = {
        row: packed
        for (some, row), packed in found.resting.items()
        if some == generation and layout is not None
    }
    with_tensors = set(resting)
    disk = Disk(folder)
    for entry in entries:
        with contextlib.suppress(Damaged):
            with_tensors.update(disk.get(entry, Layout.parse(layout or "[]")).ids.tolist())
    bundled: set[int] = set()
    for entry in found.bundles:
        with contextlib.suppress(Damaged):
            disk.verify(entry.file, entry.size, entry.checksum)
            bundled.update(disk.get(entry, LAYOUT).ids.tolist())
            entries.append(entry)
    for row in bundled - set(found.rows):
        if (GENERATION, row) in found.resting:  # where the line that tells when is lost
            found.rows[row] = b"", "", 0
    live = sum(died is None for _, _, died in found.rows.values())
    live += len(bundled - set(found.rows))
    last = max([-1, *found.rows, *with_tensors, *(entry.last for entry in found.entries)])
    # Above any version in which a row died.
    version = 1 + max((died or 0 for _, _, died in found.rows.values()), default=0)
    told = []
    text = found.noted
    if found.newest is None:
        told.append(f"the list of versions is lost; {live:,} rows could be read")
    else:
        version = max(version, found.newest.number + 1)
        last = max(last, found.newest.last)
        text = found.settings.get(found.newest.settings, text)
        back = "rows that were removed are back"
        if known is not None and known.version > found.newest.number:
            told.append(f"the versions from {found.newest.number + 1} to {known.version} are lost")
            version = max(version, known.version + 1)
            back = "rows of theirs were found in files; some of them may have been removed since"
        if live > found.newest.rows:
            told.append(f"{live - found.newest.rows:,} {back}")
        if live < found.newest.rows:
            told.append(f"of {found.newest.rows:,} rows {live:,} could be read")
    if text is None:
        older = "; those of an older file took their place: encode the rows again"
        told.append(f"the settings are lost{older if found.older else ''}")
    text = text or found.older or "{}"

    with Catalogue(path, create=True) as catalogue:
        with catalogue.transaction():
            for table in ("versions", "settings", "generations"):
                catalogue.run(f"DELETE FROM {table}")
            rows = dict(found.rows)
            # Rows that have tensors and no record are dead from the beginning.
            rows.update((row, (b"", "", 0)) for row in with_tensors - bundled - set(rows))
            catalogue.many(
                "INSERT INTO rows VALUES (?, ?, ?, ?, ?)",
                (
                    (row, *cells[:2], row_crc(row, *cells[:2]), cells[2])
                    for row, cells in rows.items()
                ),
            )
            ledger.rest(catalogue, generation, resting, resting.values())
            catalogue.run("INSERT INTO settings VALUES (0, ?, ?)", text, crc32(text.encode()))
            arrays = found.arrays.get(generation, (None, None, None))
            catalogue.run(
                "INSERT INTO generations VALUES (?, ?, ?, ?, ?)", generation, layout, *arrays
            )
            catalogue.many(
                f"INSERT INTO segments ({SEGMENT}) VALUES (?, ?, ?, ?, ?, ?, ?)", entries
            )
            catalogue.run("UPDATE counters SET files = ?", found.files)
            catalogue.enter(Edition(version, last, live, generation, 0), "repair", 0, 0)
        catalogue.all("PRAGMA wal_checkpoint(TRUNCATE)")
    Files().sync(path)
    return told, {entry.file for entry in entries} | {str(arrays[0])}


def _salvaged(folder: Path, place: Path, known: Mark | None) -> _Found | None:
    """All that the catalogue and the files tell; None where that is not one row."""
    best = _Found()
    for remedy, make in enumerate(_REMEDIES):
        copy = place / f"copy-{remedy}.sqlite"
        if not (folder / FILE).exists():
            break
        shutil.copyfile(folder / FILE, copy)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(f"{folder / FILE}-wal", f"{copy}-wal")
        try:
            make(copy)
        except (sqlite3.Error, OSError):
            continue
        found = _read(copy)
        if found.wealth > best.wealth:
            best = found
        rows = len(best.rows) + sum(entry.rows for entry in best.bundles)
        if best.newest is not None and rows >= best.newest.rows and best.whole:
            break
    _add_files(best, folder, known)
    return best if best.rows or best.bundles or best.newest is not None else None


def _read(path: Path) -> _Found:
    found = _Found()
    try:
        opened = sqlite3.connect(path, isolation_level=None)
    except sqlite3.Error:
        return found
    with contextlib.closing(opened) as connection:
        connection.text_factory = lambda text: text.decode("utf-8", "strict")
        try:
            found.whole = {sql for (sql,) in connection.execute(WRITTEN)} == STATEMENTS
        except _FAULTS:
            found.whole = False
        _read_tables(connection, found)
    return found


def _read_tables(connection: sqlite3.Connection, found: _Found) -> None:
    def lines(statement: str) -> Iterator[Any]:
        """What can be read before the damage, and from behind it."""
        for order in ("", " DESC"):
            try:
                yield from connection.execute(statement + order)
                return
            except _FAULTS:
                found.whole = False

    for *line, crc in lines("SELECT * FROM versions ORDER BY number"):
        if len(line) == 9 and line_crc(line) == crc:
            edition = Edition.of(line)
            found.newest = max(found.newest or edition, edition)
    for some, text, crc in lines("SELECT number, text, crc FROM settings ORDER BY number"):
        if isinstance(text, str) and crc32(text.encode()) == crc:
            found.settings[some] = text
    for some, layout, *arrays in lines(
        "SELECT number, layout, arrays, bytes, checksum FROM generations ORDER BY number"
    ):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if layout is not None:
                Layout.parse(layout)
                found.layouts[some] = layout
            if number(arrays[0]) is not None and list(map(type, arrays)) == ledger.ARRAYS:
                found.arrays[some] = tuple(arrays)
    for line in lines(f"SELECT {SEGMENT} FROM segments ORDER BY file"):
        if list(map(type, line)) == ledger.ENTRY and number(line[0]) is not None:
            entry = Entry(*line)
            found.entries += [] if entry in found.entries else [entry]
    for (files,) in lines("SELECT files FROM counters ORDER BY files"):
        found.files = files if isinstance(files, int) else 0
    bound = max([-1, *(entry.last for entry in found.entries)])
    if found.newest is not None:
        bound = max(bound, found.newest.last)
    else:
        with contextlib.suppress(*_FAULTS):
            bound = max(bound, connection.execute("SELECT max(id) FROM rows").fetchone()[0] or -1)

    def keep(line: Any) -> None:
        row, digest, record, crc, died = line
        if (
            isinstance(digest, bytes)
            and isinstance(record, str)
            and (died is None or isinstance(died, int))
            and row_crc(row, digest, record) == crc
        ):
            found.rows[row] = (digest, record, died)

    rows = "SELECT id, digest, record, crc, died FROM rows WHERE id"
    found.whole &= _spans(connection, rows, bound, keep)
    generations = set(found.layouts) | {found.generation, GENERATION}
    for generation in generations:

        def rest(line: Any, generation: int = generation) -> None:
            row, packed, crc = line
            if ledger.intact(row, packed, crc):
                found.resting[generation, row] = packed

        tensors = f"SELECT id, tensors, crc FROM resting WHERE generation = {generation} AND id"
        found.whole &= _spans(connection, tensors, bound, rest)


def _spans(
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
        except _FAULTS:
            whole = False
            if begin < end:
                middle = (begin + end) // 2
                spans += [(middle + 1, end), (begin, middle)]
    return whole


def _add_files(found: _Found, folder: Path, known: Mark | None) -> None:
    """What the files tell that the catalogue does not tell any more, the newest file first."""
    bound = max(found.files, known.files) if known is not None else None
    names = Disk(folder).files()
    files = {given: name for name in names if (given := number(name)) is not None}
    listed = {entry.file for entry in found.entries} | {some[0] for some in found.arrays.values()}
    for given, file in sorted(files.items(), reverse=True):
        # A number that is known not to be given out is of a commit that did not finish.
        if bound is not None and given >= bound:
            continue
        with contextlib.suppress(Damaged, ValueError, KeyError):
            notes, entry = read_notes(folder / file)
            if entry.rows < 0:
                arrays = (file, entry.size, entry.checksum)
                found.arrays.setdefault(entry.generation, arrays)
                continue
            found.older = found.older or notes["settings"]
            if found.newest is None or entry.generation == found.newest.generation:
                found.noted = found.noted or notes["settings"]
            same = [other for other in found.entries if entry.covers(other)]
            found.layouts.setdefault(entry.generation, notes["layout"])
            # It takes the place of files that are gone, never of one that is there.
            if file not in listed and not any(other.file in names for other in same):
                found.entries = [other for other in found.entries if other not in same] + [entry]
    found.files = max([found.files, bound or 0, *(given + 1 for given in files)])
    found.entries.sort(key=lambda entry: (entry.generation, entry.first))


def _with_header(path: Path) -> None:
    """Put right what is the same in the header of every catalogue, and make up for cut pages."""
    with open(path, "r+b") as file:
        there = file.seek(0, os.SEEK_END) // 4096
        file.seek(28)
        said = int.from_bytes(file.read(4), "big")
        # A header that was hit may say anything; every table begins within the first pages.
        pages = max(said if said <= 8 * there else 0, there, 16)
        file.truncate(pages * 4096)
        for offset, content in (
            (0, _MAGIC + (4096).to_bytes(2, "big") + bytes((2, 2, 0, 64, 32, 32))),
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


def _with_first_page(vacuumed: bool) -> Callable[[Path], None]:
    """Put a new catalogue's first page in place: its tables begin on the same pages."""

    def make(path: Path) -> None:
        model = path.with_suffix(".model")
        with Catalogue(model, create=True) as catalogue:
            if vacuumed:
                catalogue.run("VACUUM")
            catalogue.all("PRAGMA wal_checkpoint(TRUNCATE)")
        page = model.read_bytes()[:4096]
        with open(path, "r+b") as file:
            file.write(page)
        _with_header(path)

    return make


_REMEDIES: tuple[Callable[[Path], None], ...] = (
    lambda path: None,
    _with_header,
    _with_first_page(False),
    _with_first_page(True),
)


def _new_folder(folder: Path) -> Path:
    """A new folder for what is replaced."""
    for count in itertools.count(1):
        kept = folder / f"{KEPT}-{count}"
        with contextlib.suppress(FileExistsError):
            kept.mkdir()
            return kept
    raise AssertionError
