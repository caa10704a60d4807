"""What the writer knows without looking, and what it does with rows inside its transaction: they
are born, rest until there are enough for a segment, and die."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qkv.database.faults import Damaged, DuplicateKey, UnknownRow
from qkv.database.store import bundles, ledger, sizes
from qkv.database.store.bundles import GENERATION, LAYOUT
from qkv.database.store.catalogue import Catalogue, Edition, row_crc
from qkv.database.store.compaction import copied
from qkv.database.store.draft import Draft
from qkv.database.store.layout import Layout
from qkv.database.store.lines import ALWAYS, Lines
from qkv.database.store.segments import Entry, Segment, number
from qkv.database.store.shelf import Shelf
from qkv.database.store.snapshot import rested
from qkv.errors import ArgumentError, DtypeError


@dataclass(frozen=True)
class Desk:
    """What the writer knows without looking: the newest version, and what rests."""

    edition: Edition
    layout: Layout | None
    files: int
    resting: int

    @classmethod
    def at(cls, catalogue: Catalogue, shelf: Shelf) -> Desk:
        """As the catalogue says. A file that it does not know keeps its name, too."""
        edition = catalogue.newest()
        resting = "SELECT count(*) FROM resting WHERE generation = ?"
        there = [1 + (number(file) or 0) for file in shelf.files()]
        return cls(
            edition,
            ledger.layout(catalogue, edition.generation),
            max([catalogue.value("SELECT files FROM counters"), *there]),
            catalogue.value(resting, edition.generation),
        )


def rests(layout: Layout | None, rows: int) -> bool:
    """Whether so many rows are too few for a segment."""
    if layout is None:
        return True
    return rows < sizes.RESTING_ROWS and rows * layout.row_bytes < sizes.RESTING_BYTES


def gather(
    catalogue: Catalogue, shelf: Shelf, generation: int, layout: Layout
) -> tuple[list[Entry], list[Segment]]:
    """What goes into a segment before new rows: small segments, if many, and resting rows."""
    entries = ledger.segments(catalogue, generation)
    small: list[Entry] = []
    while entries and entries[-1].size < sizes.SEGMENT_BYTES // sizes.FEW:
        small.insert(0, entries.pop())
    if len(small) < sizes.FEW:
        small = []
    try:
        found = [copied(shelf, entry, layout) for entry in small]
    except Damaged:  # it stays where it is, for whoever can mend it
        small, found = [], []
    rows = catalogue.all(
        "SELECT id, tensors, crc FROM resting WHERE generation = ? ORDER BY id", generation
    )
    return small, [*found, rested(catalogue, layout, rows)]


def bury(lines: Lines, gone: Sequence[int], version: int) -> None:
    """Rows die in a version."""
    if not gone:
        return
    lines.lift(gone)
    catalogue = lines.catalogue
    statement = "UPDATE rows SET died = ? WHERE id = ? AND died IS NULL"
    if catalogue.many(statement, [(version, row) for row in gone]) == len(gone):
        return
    for row in gone:
        if not catalogue.one("SELECT 1 FROM rows WHERE id = ? AND died = ?", row, version):
            raise UnknownRow(f"row {row} cannot be removed: it is not in the newest version")


def distinct(lines: Lines, digests: Sequence[bytes], look: bool) -> None:
    """Refuse a digest that comes twice or, if there is anything to `look` at, lives already."""
    seen: dict[bytes, int] = {}
    for position, digest in enumerate(digests):
        if digest in seen:
            raise DuplicateKey(
                f"the key at position {position} is the one at position {seen[digest]} again, "
                "and keys are unique here: give it once",
                position,
            )
        seen[digest] = position
        found = lines.newest(digest, ALWAYS) if look else None
        if found is not None:
            raise DuplicateKey(
                f"the key at position {position} is there already, as row {found[0]}, and keys "
                "are unique here: remove or update it",
                position,
            )


def bear(
    lines: Lines, draft: Draft, ids: range, digests: Sequence[bytes], records: Sequence[str]
) -> list[Entry]:
    """New rows, many of them as a bundle; gives the bundles whose rows it has taken in."""
    made = None
    if len(ids) >= sizes.BUNDLE_ROWS:
        # What is no row is refused below, where it is told which.
        with contextlib.suppress(TypeError, AttributeError, ValueError, OverflowError):
            made = bundles.bound(np.arange(ids.start, ids.stop), digests, records)
    if made is not None:
        absorbed, parts = _smaller(lines, len(ids))
        draft.bundle(bundles.merged([*parts, made]) if parts else made)
        return absorbed

    def loose() -> Iterator[tuple[int, bytes, str, int]]:
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
    lines.catalogue.many(statement, loose())
    return []


def _smaller(lines: Lines, rows: int) -> tuple[list[Entry], list[Segment]]:
    """The last bundles that have no more rows than come after them, so that bundles stay few."""
    entries = ledger.segments(lines.catalogue, GENERATION)
    small: list[Entry] = []
    while entries and entries[-1].rows <= rows and entries[-1].size <= sizes.BUNDLE_BYTES:
        small.insert(0, entries.pop())
        rows += small[0].rows
    try:
        return small, [copied(lines.shelf, entry, LAYOUT) for entry in small]
    except Damaged:  # it stays where it is, for whoever can mend it
        return [], []
