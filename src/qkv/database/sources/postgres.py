"""A table, view or query of a PostgreSQL server, read in a transaction that cannot write."""

from __future__ import annotations

import re
from typing import Any

from qkv.database.sources.sql import Wish, fetch, quoted
from qkv.database.sources.table import SourceError, Table
from qkv.errors import MissingExtra
from qkv.types import Progress

_TABLES = """
select table_schema, table_name, table_schema = current_schema()
from information_schema.tables
where table_schema not in ('pg_catalog', 'information_schema')
order by table_schema <> current_schema(), table_schema, table_name
"""


def read(url: str, wish: Wish, progress: Progress | None = None) -> Table:
    """The table that is wished for; one outside the current schema is named schema.table.

    What Python has no plain type for is text: dates in ISO form, ranges and addresses as
    PostgreSQL writes them; numeric becomes a number where all cells are exact and else text.
    """
    try:
        import psycopg
    except ImportError:
        raise MissingExtra(
            'reading PostgreSQL needs psycopg: pip install "qkv[postgres]"'
        ) from None
    file = without_password(url)
    try:
        with psycopg.connect(url, **_patience(url)) as connection:
            connection.read_only = True
            return _read(connection, wish, file, progress)
    except (psycopg.Error, UnicodeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SourceError(
            f"PostgreSQL says: {reason}: check the address, the rights and the query", file=file
        ) from None


def without_password(url: str) -> str:
    """The address as it may be shown.

    >>> without_password("postgresql://li:secret@host/shop?password=secret")
    'postgresql://li:…@host/shop?password=…'
    """
    url = re.sub(r"(://[^:/@]*):.*@", r"\1:…@", url)
    return re.sub(r"(?i)\b((?:ssl)?password)=[^&]*", r"\1=…", url)


def _patience(url: str) -> dict[str, Any]:
    """Seconds to wait for a server that does not answer, unless the address says."""
    return {} if "connect_timeout=" in url else {"connect_timeout": 10}


def _read(connection: Any, wish: Wish, file: str, progress: Progress | None) -> Table:
    query, name = wish.query, "query"
    if query is None:
        tables: dict[str, tuple[str, str]] = {}
        for schema, table, current in connection.execute(_TABLES):
            tables.setdefault(table if current else f"{schema}.{table}", (schema, table))
            if current and wish.table == f"{schema}.{table}":
                tables[wish.table] = (schema, table)
        name = wish.choose(list(tables), file)
        query = f"select * from {quoted(*tables[name])}"
    total: int | None = None
    if progress is not None and wish.query is None:
        (total,) = connection.execute(f"select count(*) from ({query}) t".encode()).fetchone()
    # A named cursor stays on the server: what is not fetched yet is not held here.
    with connection.cursor(name="qkv") as cursor:
        cursor.execute(query.encode())
        names = [column.name for column in cursor.description]
        return fetch(_Plain(cursor), name, names, file, total, progress)


class _Plain:
    """A cursor whose ranges are text."""

    def __init__(self, cursor: Any) -> None:
        self.cursor = cursor

    def fetchmany(self, size: int) -> list[tuple[Any, ...]]:
        from psycopg.types.multirange import Multirange
        from psycopg.types.range import Range

        def text(cell: Any) -> Any:
            return str(cell) if isinstance(cell, Range | Multirange) else cell

        return [tuple(map(text, row)) for row in self.cursor.fetchmany(size)]
