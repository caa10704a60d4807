"""What SQL databases share: which table of many, its quoted name, its rows as columns."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from qkv.database.sources.table import SourceError, Table, build, check_names, no_rows
from qkv.errors import CombinationError, unknown
from qkv.types import Progress

_BATCH = 16_384


@dataclass(frozen=True)
class Wish:
    """What to read from a database: a table's name, a query, or (both None) its only table."""

    table: str | None = None
    query: str | None = None

    def choose(self, tables: Sequence[str], file: str) -> str:
        """The table that is meant, of those there are."""
        if self.table is not None:
            if self.table not in tables:
                raise SourceError(str(unknown("table", self.table, tables)), file=file)
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


def wish(url: str, table: str | None) -> tuple[str, Wish]:
    """The URL without ?table= and ?query=, and what they say; `table` is the caller's argument.

    >>> wish("postgresql://host/shop?table=books&sslmode=require", None)
    ('postgresql://host/shop?sslmode=require', Wish(table='books', query=None))
    """
    address, _, rest = url.partition("?")
    options = [option.partition("=") for option in rest.split("&")]
    found = {name: unquote(value) for name, _, value in options if name in ("table", "query")}
    if table is not None and found.get("table", table) != table:
        raise CombinationError(
            f"table={table!r} and ?table={found['table']} differ: name the table once"
        )
    chosen = Wish(table if table is not None else found.get("table"), found.get("query"))
    if chosen.table is not None and chosen.query is not None:
        raise CombinationError("a table and a query were given: give one of them")
    rest = "&".join("".join(option) for option in options if option[0] not in found)
    return f"{address}?{rest}" if rest else address, chosen


def quoted(*names: str) -> str:
    """An SQL identifier: schema and table, each in double quotes.

    >>> print(quoted("public", 'my "own" books'))
    "public"."my ""own"" books"
    """
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def literal(text: str) -> str:
    """A text as SQL writes it.

    >>> print(literal("it's"))
    'it''s'
    """
    return "'" + text.replace("'", "''") + "'"


def fetch(
    cursor: Any,
    name: str,
    names: list[str],
    file: str,
    total: int | None,
    progress: Progress | None,
) -> Table:
    """All rows of a cursor, turned into columns batch by batch."""
    check_names(names, file)
    columns: list[list[Any]] = [[] for _ in names]
    while batch := cursor.fetchmany(_BATCH):
        for column, cells in zip(columns, zip(*batch, strict=True), strict=True):
            column.extend(cells)
        if progress is not None:
            progress(len(columns[0]), total)
    if not columns[0]:
        raise no_rows(file)
    return build(name, names, columns, file)
