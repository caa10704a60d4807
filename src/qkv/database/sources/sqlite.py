"""A table, view or query of an SQLite file, which is opened for reading only."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from qkv.database.sources.sql import Wish, fetch, quoted
from qkv.database.sources.table import SourceError, Table
from qkv.types import Progress

MAGIC = b"SQLite format 3\0"


def read(path: Path, wish: Wish, progress: Progress | None = None) -> Table:
    """The table that is wished for; cells are what SQLite has: int, float, text, bytes, None."""
    file = str(path)
    try:
        # By its address: "?" or "#" in a name would else end it.
        address = f"file:{quote(str(path.absolute()))}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as database:
            # The file may be a stranger's: its views shall call nothing that acts.
            database.execute("pragma trusted_schema = off")
            return _read(database, path.stem, wish, file, progress)
    except SourceError:
        raise
    except (sqlite3.Error, ValueError, OverflowError, MemoryError) as error:
        raise SourceError(
            f"SQLite cannot read it ({error or type(error).__name__}): check the query if you gave "
            "one, else the file with PRAGMA integrity_check",
            file=file,
        ) from None


def _read(
    database: sqlite3.Connection, name: str, wish: Wish, file: str, progress: Progress | None
) -> Table:
    query = wish.query
    if query is None:
        found = database.execute(
            "select name from sqlite_master where type in ('table', 'view') "
            "and name not like 'sqlite\\_%' escape '\\' order by name"
        )
        name = wish.choose([row[0] for row in found], file)
        query = f"select * from {quoted(name)}"
    total: int | None = None
    if progress is not None and wish.query is None:
        (total,) = database.execute(f"select count(*) from {quoted(name)}").fetchone()
    cursor = database.execute(query)
    if cursor.description is None:
        raise SourceError("the query gives no table: begin it with select", file=file)
    names = [column[0] for column in cursor.description]
    return fetch(cursor, name, names, file, total, progress)
