"""What a writer reads from and writes into the catalogue, inside its transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from zlib import crc32

from qkv.database.storage.catalog import SEGMENT_COLUMNS, Catalog
from qkv.database.storage.layout import Layout
from qkv.database.storage.segments import SegmentEntry

SEGMENT_TYPES, ARRAY_FILE_TYPES = [str, int, int, int, int, int, bytes], [str, int, bytes]
"""The kinds of what is said of a segment, and of a file of arrays."""


def read_layout(catalogue: Catalog, generation: int) -> Layout | None:
    """The tensors of a generation; None before its first row."""
    text = catalogue.fetch_value("SELECT layout FROM generations WHERE number = ?", generation)
    try:
        return None if text is None else Layout.from_text(text)
    except (KeyError, TypeError, ValueError) as error:
        raise catalogue.damaged_error("a layout in it cannot be read") from error


def list_segments(catalogue: Catalog, generation: int | None = None) -> list[SegmentEntry]:
    """The segments of one generation or of all, by generation and ids."""
    where = "" if generation is None else "WHERE generation = ?"
    values = () if generation is None else (generation,)
    found = catalogue.fetch_all(
        f"SELECT {SEGMENT_COLUMNS} FROM segments {where} ORDER BY generation, first", *values
    )
    return [SegmentEntry(*line) for line in _check_types(catalogue, found, SEGMENT_TYPES)]


def list_array_files(
    catalogue: Catalog, generation: int | None = None
) -> list[tuple[str, int, bytes]]:
    """The files of arrays of one generation or of all, their bytes and checksums."""
    where = "" if generation is None else "AND number = ?"
    values = () if generation is None else (generation,)
    found = catalogue.fetch_all(
        f"SELECT arrays, bytes, checksum FROM generations WHERE arrays IS NOT NULL {where}", *values
    )
    return [*_check_types(catalogue, found, ARRAY_FILE_TYPES)]


def _check_types(catalogue: Catalog, lines: Iterable[Any], kinds: Sequence[type]) -> Iterator[Any]:
    """The lines; SQLite keeps any kind of cell in any column."""
    for line in lines:
        if list(map(type, line)) != kinds:
            raise catalogue.damaged_error("what it says of a file is not what was written")
        yield line


def list_files(catalogue: Catalog) -> set[str]:
    """The files that are part of the store."""
    every = "SELECT file FROM segments UNION SELECT arrays FROM generations"
    return {str(file) for (file,) in catalogue.fetch_all(every) if file is not None}


def buffer_rows(
    catalogue: Catalog, generation: int, ids: Iterable[int], packed: Iterable[bytes]
) -> None:
    """Tensors of rows that are too few for a segment."""
    lines = ((generation, row, some, crc32(some)) for row, some in zip(ids, packed, strict=True))
    catalogue.execute_many("INSERT INTO resting VALUES (?, ?, ?, ?)", lines)


def set_layout(catalogue: Catalog, generation: int, layout: Layout) -> None:
    """Fix the tensors of a generation."""
    statement = "UPDATE generations SET layout = ? WHERE number = ?"
    catalogue.execute(statement, layout.to_text(), generation)


def insert_settings(catalogue: Catalog, text: str | None, old: int) -> int:
    """The number of these settings, or of the old ones."""
    if text is None:
        return old
    new = 1 + int(catalogue.fetch_value("SELECT max(number) FROM settings"))
    catalogue.execute("INSERT INTO settings VALUES (?, ?, ?)", new, text, crc32(text.encode()))
    return new


def discard_segments(catalogue: Catalog, entries: Sequence[SegmentEntry]) -> None:
    """Segments that no version uses any more; their files go after the transaction."""
    if entries:
        files = [(entry.file,) for entry in entries]
        catalogue.execute_many("DELETE FROM segments WHERE file = ?", files)
        catalogue.execute_many("INSERT OR IGNORE INTO discarded VALUES (?)", files)


def is_intact(row: Any, packed: Any, crc: Any) -> bool:
    """Whether a line of resting rows is what was written: where the catalogue is damaged, anything
    may stand in it."""
    return isinstance(row, int) and isinstance(packed, bytes) and crc32(packed) == crc
