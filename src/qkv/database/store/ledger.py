"""What a writer reads from and writes into the catalogue, inside its transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from zlib import crc32

from qkv.database.store.catalogue import SEGMENT, Catalogue
from qkv.database.store.layout import Layout
from qkv.database.store.segments import Entry

ENTRY, ARRAYS = [str, int, int, int, int, int, bytes], [str, int, bytes]
"""The kinds of what is said of a segment, and of a file of arrays."""


def layout(catalogue: Catalogue, generation: int) -> Layout | None:
    """The tensors of a generation; None before its first row."""
    text = catalogue.value("SELECT layout FROM generations WHERE number = ?", generation)
    try:
        return None if text is None else Layout.parse(text)
    except (KeyError, TypeError, ValueError) as error:
        raise catalogue.damaged("a layout in it cannot be read") from error


def segments(catalogue: Catalogue, generation: int | None = None) -> list[Entry]:
    """The segments of one generation or of all, by generation and ids."""
    where = "" if generation is None else "WHERE generation = ?"
    values = () if generation is None else (generation,)
    found = catalogue.all(
        f"SELECT {SEGMENT} FROM segments {where} ORDER BY generation, first", *values
    )
    return [Entry(*line) for line in _typed(catalogue, found, ENTRY)]


def arrays(catalogue: Catalogue, generation: int | None = None) -> list[tuple[str, int, bytes]]:
    """The files of arrays of one generation or of all, their bytes and checksums."""
    where = "" if generation is None else "AND number = ?"
    values = () if generation is None else (generation,)
    found = catalogue.all(
        f"SELECT arrays, bytes, checksum FROM generations WHERE arrays IS NOT NULL {where}", *values
    )
    return [*_typed(catalogue, found, ARRAYS)]


def _typed(catalogue: Catalogue, lines: Iterable[Any], kinds: Sequence[type]) -> Iterator[Any]:
    """The lines; SQLite keeps any kind of cell in any column."""
    for line in lines:
        if list(map(type, line)) != kinds:
            raise catalogue.damaged("what it says of a file is not what was written")
        yield line


def files(catalogue: Catalogue) -> set[str]:
    """The files that are part of the store."""
    every = "SELECT file FROM segments UNION SELECT arrays FROM generations"
    return {str(file) for (file,) in catalogue.all(every) if file is not None}


def rest(
    catalogue: Catalogue, generation: int, ids: Iterable[int], packed: Iterable[bytes]
) -> None:
    """Tensors of rows that are too few for a segment."""
    lines = ((generation, row, some, crc32(some)) for row, some in zip(ids, packed, strict=True))
    catalogue.many("INSERT INTO resting VALUES (?, ?, ?, ?)", lines)


def shape(catalogue: Catalogue, generation: int, layout: Layout) -> None:
    """Fix the tensors of a generation."""
    statement = "UPDATE generations SET layout = ? WHERE number = ?"
    catalogue.run(statement, layout.text(), generation)


def settle(catalogue: Catalogue, text: str | None, old: int) -> int:
    """The number of these settings, or of the old ones."""
    if text is None:
        return old
    new = 1 + int(catalogue.value("SELECT max(number) FROM settings"))
    catalogue.run("INSERT INTO settings VALUES (?, ?, ?)", new, text, crc32(text.encode()))
    return new


def discard(catalogue: Catalogue, entries: Sequence[Entry]) -> None:
    """Segments that no version uses any more; their files go after the transaction."""
    if entries:
        files = [(entry.file,) for entry in entries]
        catalogue.many("DELETE FROM segments WHERE file = ?", files)
        catalogue.many("INSERT OR IGNORE INTO discarded VALUES (?)", files)


def intact(row: Any, packed: Any, crc: Any) -> bool:
    """Whether a line of resting rows is what was written: where the catalogue is damaged, anything
    may stand in it."""
    return isinstance(row, int) and isinstance(packed, bytes) and crc32(packed) == crc
