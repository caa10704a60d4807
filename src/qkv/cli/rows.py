"""`qkv rows`, `export`: look at the rows of a table, and take them elsewhere."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from qkv.cli import options, screen, values
from qkv.cli.command import NOTHING, OK, Result
from qkv.cli.source import is_store, opened
from qkv.errors import ArgumentError, counted

if TYPE_CHECKING:
    from qkv.database import Database
    from qkv.serve.remote import Remote


def rows(
    source: options.Source,
    start: Annotated[
        int, options.option("--from ROW", "The first one; 0 is the oldest.", min=0)
    ] = 0,
    count: Annotated[int, options.option("--count -n ROWS", "How many to show.", min=1)] = 20,
    where: options.Where = None,
    skip: options.Skip = False,
    read: options.Read = options.READ,
) -> Result:
    """Show rows of SOURCE with all their columns, the oldest first."""
    with _looked_at(source, read, skip) as database:
        wish = values.where(where, database.columns) if where else None
        total = database.count(wish)
        found = list(database.rows(where=wish, start=start, count=count))
        columns = database.columns
        nothing = "" if total else _why_nothing(database, wish)
    end = start + len(found)

    def show() -> None:
        lines = [
            (str(at), *(screen.cell(row.get(name)) for name in columns))
            for at, row in enumerate(found, start)
        ]
        hidden = 0
        if lines:
            names = ("", *(screen.cell(name) for name in columns))
            fit = max(screen.fitting([names, *lines]), 2)
            hidden = len(names) - fit
            screen.table(names[:fit], [line[:fit] for line in lines], right=[""], whole=[""])
        if hidden:
            told = f"{counted(hidden, 'column')} of {len(columns)} have no room here"
            screen.note(f"{told}: --json shows them, and so does a pipe, such as | less -S")
        more = f"; the next: --from {end}" if end < total else ""
        if found:
            screen.note(f"rows {start} to {end - 1} of {total:,}{more}")
        elif total:
            screen.note(f"No rows from {start} on: there are {total:,}")
        else:
            screen.note(nothing)

    data = {"from": start, "total": total, "rows": found}
    return Result(data, show, OK if found else NOTHING)


def export(
    source: options.Source,
    output: Annotated[
        Path,
        options.argument("FILE", "Ends in .csv, .tsv, .jsonl or .parquet; - writes CSV on stdout."),
    ],
    overwrite: Annotated[
        bool, options.option("--overwrite", "Take the place of a FILE that is there.")
    ] = False,
    where: options.Where = None,
    skip: options.Skip = False,
    read: options.Read = options.READ,
) -> Iterator[Result]:
    """Write the rows of SOURCE into FILE.

    All columns are written, a missing cell as missing; it is there whole or not at all.
    """
    from qkv.database import export as out

    if output.is_file() and not overwrite:
        step = "replace it with --overwrite, or choose another name"
        raise ArgumentError(f"{output} exists: {step}")
    with _looked_at(source, read, skip) as database:
        wish = values.where(where, database.columns) if where else None
        found = database.rows(where=wish)
        if str(output) == "-":
            stdout = sys.stdout.buffer
            draw = functools.partial(out.write_csv, stdout, database.columns, found)
            yield Result({"rows": database.count(wish)}, draw)
            return
        count = out.write(output, database.columns, found)
        if not count:
            screen.note(_why_nothing(database, wish))
        told = f"{output}: {counted(count, 'row')}"
        yield Result({"written": str(output), "rows": count}, lambda: screen.line(told))


def _why_nothing(database: Database | Remote, wish: str | None) -> str:
    """Why there are no rows: none passes the condition, or the table has none."""
    if wish is None:
        return "There are no rows"
    return database.why_no_rows(wish) or "No rows match"


def _looked_at(
    source: str, read: options.Read, skip: bool
) -> contextlib.AbstractContextManager[Database | Remote]:
    """SOURCE with keys that nobody asks softly, so that a table need not be encoded for it."""
    from qkv.database.encoders import Exact

    encoder = None if is_store(source) else Exact(64)
    return opened(source, read, encoder=encoder, skip=skip)
