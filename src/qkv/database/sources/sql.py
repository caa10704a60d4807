"""Read a table, a view or a query of a SQLite file or a PostgreSQL server. Nothing is written."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from qkv.database.sources.table import (
    SourceError,
    Table,
    TableSelector,
    build_table,
    check_column_names,
    no_rows_error,
)
from qkv.database.sources.type_inference import parse_dates
from qkv.errors import CombinationError, require_extra
from qkv.util.types import ProgressCallback

SQLITE_MAGIC = b"SQLite format 3\0"
"""The first bytes of a SQLite file."""
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


def parse_selector(url: str, table: str | None) -> tuple[str, TableSelector]:
    """Return a URL without its options ?table= and ?query=, and these as a selector.

    `table` is the argument of the caller.

    >>> parse_selector("postgresql://host/shop?table=books&sslmode=require", None)
    ('postgresql://host/shop?sslmode=require', TableSelector(table='books', query=None))
    """
    base, _, query_string = url.partition("?")
    options = [option.partition("=") for option in query_string.split("&")]
    ours = {name: unquote(value) for name, _, value in options if name in ("table", "query")}
    if table is not None and ours.get("table", table) != table:
        raise CombinationError(
            f"table={table!r} and ?table={ours['table']} name different tables: name the table once"
        )
    selector = TableSelector(table if table is not None else ours.get("table"), ours.get("query"))
    if selector.table is not None and selector.query is not None:
        raise CombinationError("both a table and a query are selected: pass only one of them")
    query_string = "&".join("".join(option) for option in options if option[0] not in ours)
    return f"{base}?{query_string}" if query_string else base, selector


def quote_identifier(*names: str) -> str:
    """Return an SQL identifier. Each name, such as schema and table, gets double quotes.

    >>> print(quote_identifier("public", 'my "own" books'))
    "public"."my ""own"" books"
    """
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def quote_literal(text: str) -> str:
    """Return a text as an SQL string literal.

    >>> print(quote_literal("it's"))
    'it''s'
    """
    return "'" + text.replace("'", "''") + "'"


def read_sqlite(
    path: Path, selector: TableSelector, progress: ProgressCallback | None = None
) -> Table:
    """Read the selected table of a SQLite file.

    Cells are int, float, text, bytes or None. `parse_dates` converts text in columns that are
    declared as a date or a timestamp.
    """
    file = str(path)
    try:
        # Quote the path: a "?" or "#" in a file name would end the path of the URI.
        uri = f"file:{quote(str(path.absolute()))}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            # The file may be untrusted, so its views must not call functions with side effects.
            database.execute("pragma trusted_schema = off")
            tables = {name: (name,) for (name,) in database.execute(_LIST_SQLITE_TABLES)}
            execute = database.execute
            table = _read_table(execute, execute, tables, path.stem, selector, file, progress)
            if selector.query is None:
                for _, name, declared_type, *_ in execute(
                    f"pragma table_info({quote_identifier(table.name)})"
                ):
                    is_date = re.match("date|timestamp", declared_type, re.IGNORECASE)
                    if is_date and name in table.columns:
                        table.columns[name] = parse_dates(table.columns[name])
            return table
    except SourceError:
        raise
    except (sqlite3.Error, ValueError, OverflowError, MemoryError) as error:
        raise SourceError(
            f"SQLite cannot read the file ({error or type(error).__name__}): check the query, if "
            "any; check the file with PRAGMA integrity_check",
            file=file,
        ) from None


def read_postgres(
    url: str, selector: TableSelector, progress: ProgressCallback | None = None
) -> Table:
    """Read the selected table of a PostgreSQL server.

    The name of a table outside the current schema is schema.table. Ranges and network addresses
    become text. A numeric column becomes numbers if all cells stay exact, otherwise text.
    """
    with require_extra("postgres", "reading PostgreSQL needs psycopg"):
        import psycopg
    file = mask_password(url)
    # By default, libpq waits forever for a server that does not answer.
    timeout: dict[str, Any] = {} if "connect_timeout=" in url else {"connect_timeout": 10}
    try:
        with psycopg.connect(url, **timeout) as connection:
            connection.read_only = True
            tables: dict[str, tuple[str, ...]] = {}
            for schema, table, current in connection.execute(_LIST_POSTGRES_TABLES):
                tables.setdefault(table if current else f"{schema}.{table}", (schema, table))
                if current and selector.table == f"{schema}.{table}":
                    tables[selector.table] = (schema, table)
            # A named cursor stays on the server, so only the fetched rows take memory here.
            with connection.cursor(name="qkv") as cursor:
                return _read_table(
                    connection.execute, cursor.execute, tables, "query", selector, file, progress
                )
    except (psycopg.Error, UnicodeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        step = "check the URL, the permissions and the query"
        # Without a code, psycopg has raised the error, not the server.
        if isinstance(error, psycopg.DataError) and error.sqlstate is None:
            step = "convert that column to text with ?query=select day::text from …"
        raise SourceError(f"PostgreSQL reports: {reason}: {step}", file=file) from None


def _read_table(
    count: Callable[[Any], Any],
    execute: Callable[[Any], Any],
    tables: Mapping[str, tuple[str, ...]],
    name: str,
    selector: TableSelector,
    file: str,
    progress: ProgressCallback | None,
) -> Table:
    """Read the selected table or query into columns, batch by batch.

    `count` and `execute` run a statement and return a cursor. `name` is the table's name if a query
    is selected.
    """
    query, total = selector.query, None
    if query is None:
        name = selector.choose_table(list(tables), file)
        query = f"select * from {quote_identifier(*tables[name])}"
        if progress is not None:
            (total,) = count(f"select count(*) from ({query}) t").fetchone()
    cursor = execute(query)
    if cursor.description is None:
        raise SourceError(
            "the query returns no table: write a query that begins with select", file=file
        )
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
    """Return a URL for messages, in which … replaces the passwords.

    >>> mask_password("postgresql://li:secret@host/shop?password=secret")
    'postgresql://li:…@host/shop?password=…'
    """
    before, separator, after = url.rpartition("@")
    url = re.sub(r"(://[^:/@]*):.*", r"\1:…", before, flags=re.DOTALL) + separator + after
    return re.sub(r"(?i)\b((?:ssl)?password)=[^&]*", r"\1=…", url)
