"""A table, view or query of an SQLite file or a PostgreSQL server, of which nothing is written."""

from __future__ import annotations

import re
import shlex
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from qkv.database.sources.table import (
    SourceError,
    Table,
    build_table,
    check_column_names,
    no_rows_error,
)
from qkv.database.sources.type_inference import parse_dates
from qkv.errors import CombinationError, require_extra, unknown_name_error
from qkv.util.types import ProgressCallback

SQLITE_MAGIC = b"SQLite format 3\0"
"""What a file of SQLite begins with."""
_ROWS_PER_FETCH = 16_384
_LIST_SQLITE_TABLES = r"""
select name from sqlite_master
where type in ('table', 'view') and name not like 'sqlite\_%' escape '\' order by name
"""
_LIST_POSTGRES_TABLES = """
select table_schema, table_name, table_schema = current_schema()
from information_schema.tables
where table_schema not in ('pg_catalog', 'information_schema')
order by table_schema <> current_schema(), table_schema, table_name
"""


@dataclass(frozen=True)
class TableSelector:
    """What to read from a database: a table's name, a query, or (both None) its only table."""

    table: str | None = None
    query: str | None = None

    def choose_table(self, tables: Sequence[str], file: str) -> str:
        """The table that is meant, of those there are."""
        if self.table is not None:
            if self.table not in tables:
                raise SourceError(str(unknown_name_error("table", self.table, tables)), file=file)
            return self.table
        if not tables:
            raise SourceError("no tables: there is nothing to read", file=file)
        if len(tables) > 1:
            raise SourceError(
                f"{len(tables)} tables ({', '.join(tables[:20])}{', …' * (len(tables) > 20)}): "
                f"choose one with table={tables[0]!r} or ?table={quote(tables[0])}, on the command "
                f"line with --table {shlex.quote(tables[0])}",
                file=file,
            )
        return tables[0]


def parse_selector(url: str, table: str | None) -> tuple[str, TableSelector]:
    """The URL without ?table= and ?query=, and what they say; `table` is the caller's argument.

    >>> parse_selector("postgresql://host/shop?table=books&sslmode=require", None)
    ('postgresql://host/shop?sslmode=require', TableSelector(table='books', query=None))
    """
    address, _, rest = url.partition("?")
    options = [option.partition("=") for option in rest.split("&")]
    found = {name: unquote(value) for name, _, value in options if name in ("table", "query")}
    if table is not None and found.get("table", table) != table:
        raise CombinationError(
            f"table={table!r} and ?table={found['table']} differ: name the table once"
        )
    chosen = TableSelector(table if table is not None else found.get("table"), found.get("query"))
    if chosen.table is not None and chosen.query is not None:
        raise CombinationError("a table and a query were given: give one of them")
    rest = "&".join("".join(option) for option in options if option[0] not in found)
    return f"{address}?{rest}" if rest else address, chosen


def quote_identifier(*names: str) -> str:
    """An SQL identifier: schema and table, each in double quotes.

    >>> print(quote_identifier("public", 'my "own" books'))
    "public"."my ""own"" books"
    """
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def quote_literal(text: str) -> str:
    """A text as SQL writes it.

    >>> print(quote_literal("it's"))
    'it''s'
    """
    return "'" + text.replace("'", "''") + "'"


def read_sqlite(path: Path, wish: TableSelector, progress: ProgressCallback | None = None) -> Table:
    """The table that is wished for; cells are what SQLite has: int, float, text, bytes, None; text
    of a column that is declared as one of dates as `parse_dates` has it."""
    file = str(path)
    try:
        # By its address: "?" or "#" in a name would else end it.
        address = f"file:{quote(str(path.absolute()))}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as database:
            # The file may be a stranger's: its views shall call nothing that acts.
            database.execute("pragma trusted_schema = off")
            tables = {name: (name,) for (name,) in database.execute(_LIST_SQLITE_TABLES)}
            execute = database.execute
            found = _read_table(execute, execute, tables, path.stem, wish, file, progress)
            if wish.query is None:
                for _, name, kind, *_ in execute(
                    f"pragma table_info({quote_identifier(found.name)})"
                ):
                    if re.match("date|timestamp", kind, re.IGNORECASE) and name in found.columns:
                        found.columns[name] = parse_dates(found.columns[name])
            return found
    except SourceError:
        raise
    except (sqlite3.Error, ValueError, OverflowError, MemoryError) as error:
        raise SourceError(
            f"SQLite cannot read it ({error or type(error).__name__}): check the query if you gave "
            "one, else the file with PRAGMA integrity_check",
            file=file,
        ) from None


def read_postgres(url: str, wish: TableSelector, progress: ProgressCallback | None = None) -> Table:
    """The table that is wished for; one outside the current schema is named schema.table.

    What Python has no plain type for is text: ranges and addresses as PostgreSQL writes them;
    numeric becomes a number where all cells are exact and else text.
    """
    with require_extra("postgres", "reading PostgreSQL needs psycopg"):
        import psycopg
    file = mask_password(url)
    # How long to wait for a server that does not answer, unless the address says.
    patience: dict[str, Any] = {} if "connect_timeout=" in url else {"connect_timeout": 10}
    try:
        with psycopg.connect(url, **patience) as connection:
            connection.read_only = True
            tables: dict[str, tuple[str, ...]] = {}
            for schema, table, current in connection.execute(_LIST_POSTGRES_TABLES):
                tables.setdefault(table if current else f"{schema}.{table}", (schema, table))
                if current and wish.table == f"{schema}.{table}":
                    tables[wish.table] = (schema, table)
            # A named cursor stays on the server: what is not fetched yet is not held here.
            with connection.cursor(name="qkv") as cursor:
                count, ask = connection.execute, cursor.execute
                return _read_table(count, ask, tables, "query", wish, file, progress)
    except (psycopg.Error, UnicodeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        step = "check the address, the rights and the query"
        if isinstance(error, psycopg.DataError) and error.sqlstate is None:  # not the server's
            step = "make text of that column by a query of your own, select day::text from …"
        raise SourceError(f"PostgreSQL says: {reason}: {step}", file=file) from None


def _read_table(
    count: Callable[[Any], Any],
    ask: Callable[[Any], Any],
    tables: Mapping[str, tuple[str, ...]],
    name: str,
    wish: TableSelector,
    file: str,
    progress: ProgressCallback | None,
) -> Table:
    """The table or query that is wished for, turned into columns batch by batch.

    `count` and `ask` run a statement and give a cursor; `name` is what a query's table is called.
    """
    query, total = wish.query, None
    if query is None:
        name = wish.choose_table(list(tables), file)
        query = f"select * from {quote_identifier(*tables[name])}"
        if progress is not None:
            (total,) = count(f"select count(*) from ({query}) t").fetchone()
    cursor = ask(query)
    if cursor.description is None:
        raise SourceError("the query gives no table: begin it with select", file=file)
    names = [column[0] for column in cursor.description]
    check_column_names(names, file)
    columns: list[list[Any]] = [[] for _ in names]
    while batch := cursor.fetchmany(_ROWS_PER_FETCH):
        for column, cells in zip(columns, zip(*batch, strict=True), strict=True):
            column.extend(cells)
        if progress is not None:
            progress(len(columns[0]), total)
    if not columns[0]:
        raise no_rows_error(file)
    return build_table(name, names, columns, file)


def mask_password(url: str) -> str:
    """The address as it may be shown.

    >>> mask_password("postgresql://li:secret@host/shop?password=secret")
    'postgresql://li:…@host/shop?password=…'
    """
    before, at, after = url.rpartition("@")
    url = re.sub(r"(://[^:/@]*):.*", r"\1:…", before, flags=re.DOTALL) + at + after
    return re.sub(r"(?i)\b((?:ssl)?password)=[^&]*", r"\1=…", url)
