"""What a writer reads from and writes into the catalogue, inside its transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from zlib import crc32

from qkv.database.faults import DuplicateKey, UnknownRow
from qkv.database.store.catalogue import BY_DIGEST, FORMAT, SEGMENT, Catalogue, row_crc
from qkv.database.store.layout import Layout
from qkv.database.store.segments import Entry
from qkv.errors import ArgumentError, DtypeError

MANY = 2**14
"""First rows from which they are indexed when all are there."""


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
    return [Entry(*line) for line in found]


def bury(catalogue: Catalogue, gone: Sequence[int], version: int) -> None:
    """Rows die in a version."""
    if not gone:
        return
    statement = "UPDATE rows SET died = ? WHERE id = ? AND died IS NULL"
    if catalogue.many(statement, [(version, row) for row in gone]) == len(gone):
        return
    for row in gone:
        if not catalogue.one("SELECT 1 FROM rows WHERE id = ? AND died = ?", row, version):
            raise UnknownRow(f"row {row} cannot be removed: it is not in the newest version")


def distinct(catalogue: Catalogue, digests: Sequence[bytes], look: bool) -> None:
    """Refuse a digest that comes twice or, if there is anything to `look` at, lives already."""
    seen: dict[bytes, int] = {}
    statement = "SELECT id FROM rows WHERE digest = ? AND died IS NULL"
    for position, digest in enumerate(digests):
        if digest in seen:
            raise DuplicateKey(
                f"the key at position {position} is the one at position {seen[digest]} again, "
                "and keys are unique here: give it once",
                position,
            )
        seen[digest] = position
        found = catalogue.one(statement, digest) if look else None
        if found is not None:
            raise DuplicateKey(
                f"the key at position {position} is there already, as row {found[0]}, and keys "
                "are unique here: remove or update it",
                position,
            )


def bear(
    catalogue: Catalogue, ids: range, digests: Sequence[bytes], records: Sequence[str]
) -> None:
    """New rows."""

    def lines() -> Iterator[tuple[int, bytes, str, int]]:
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

    # An index is made in less time than it grows.
    first = not ids.start and len(ids) >= MANY
    if first:
        catalogue.run("DROP INDEX rows_digest")
    catalogue.many("INSERT INTO rows (id, digest, record, crc) VALUES (?, ?, ?, ?)", lines())
    if first:
        catalogue.run(BY_DIGEST)


def rest(
    catalogue: Catalogue, generation: int, ids: Iterable[int], packed: Iterable[bytes]
) -> None:
    """Tensors of rows that are too few for a segment."""
    lines = ((generation, row, some, crc32(some)) for row, some in zip(ids, packed, strict=True))
    catalogue.many("INSERT INTO resting VALUES (?, ?, ?, ?)", lines)


def wake(catalogue: Catalogue, generation: int) -> None:
    """Resting rows are in a segment now."""
    catalogue.run("DELETE FROM resting WHERE generation = ?", generation)


def generation(catalogue: Catalogue, number: int) -> None:
    """A new generation."""
    catalogue.run("INSERT INTO generations (number) VALUES (?)", number)


def shape(catalogue: Catalogue, generation: int, layout: Layout) -> None:
    """Fix the tensors of a generation, which a release of an older format may misread."""
    catalogue.run(f"PRAGMA user_version = {FORMAT}")
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
