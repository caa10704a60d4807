"""What the writer knows without looking, and when resting rows become a segment."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.database.faults import Damaged
from qkv.database.store import compaction, ledger, sizes
from qkv.database.store.catalogue import Catalogue, Edition
from qkv.database.store.layout import Layout
from qkv.database.store.segments import Entry, Segment, number
from qkv.database.store.shelf import Shelf
from qkv.database.store.snapshot import rested


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
        found = [compaction.copied(shelf, entry, layout) for entry in small]
    except Damaged:  # it stays where it is, for whoever can mend it
        small, found = [], []
    rows = catalogue.all(
        "SELECT id, tensors, crc FROM resting WHERE generation = ? ORDER BY id", generation
    )
    return small, [*found, rested(catalogue, layout, rows)]
