"""`qkv rows`, `export`: look at the rows of a table, and take them elsewhere."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from qkv.cli import arguments, options, terminal
from qkv.cli.command import EXIT_NOTHING_FOUND, EXIT_OK, Result
from qkv.cli.source import is_store, open_source
from qkv.errors import ArgumentError, format_plural

if TYPE_CHECKING:
    from qkv.database import Database
    from qkv.serve.remote_database import RemoteDatabase


def rows(
    source: options.Source,
    start: Annotated[
        int, options.make_option("--from ROW", "The first one; 0 is the oldest.", min=0)
    ] = 0,
    count: Annotated[int, options.make_option("--count -n ROWS", "How many to show.", min=1)] = 20,
    where: options.Where = None,
    skip: options.Skip = False,
    read: options.ReadOptions = options.DEFAULT_READ_OPTIONS,
) -> Result:
    """Show rows of SOURCE with all their columns, the oldest first."""
    with _open_for_reading(source, read, skip) as database:
        wish = arguments.join_conditions(where, database.columns) if where else None
        total = database.count(wish)
        found = list(database.rows(where=wish, start=start, count=count))
        columns = database.columns
        nothing = "" if total else _why_nothing(database, wish)
    end = start + len(found)

    def print_rows() -> None:
        lines = [
            (str(at), *(terminal.format_cell(row.get(name)) for name in columns))
            for at, row in enumerate(found, start)
        ]
        hidden = 0
        if lines:
            names = ("", *(terminal.format_cell(name) for name in columns))
            fit = max(terminal.count_fitting_columns([names, *lines]), 2)
            hidden = len(names) - fit
            terminal.print_table(
                names[:fit], [line[:fit] for line in lines], right=[""], whole=[""]
            )
        if hidden:
            told = f"{format_plural(hidden, 'column')} of {len(columns)} have no room here"
            terminal.print_note(f"{told}: --json shows them, and so does a pipe, such as | less -S")
        more = f"; the next: --from {end}" if end < total else ""
        if found:
            terminal.print_note(f"rows {start} to {end - 1} of {total:,}{more}")
        elif total:
            terminal.print_note(f"No rows from {start} on: there are {total:,}")
        else:
            terminal.print_note(nothing)

    data = {"from": start, "total": total, "rows": found}
    return Result(data, print_rows, EXIT_OK if found else EXIT_NOTHING_FOUND)


def export(
    source: options.Source,
    output: Annotated[
        Path,
        options.make_argument(
            "FILE", "Ends in .csv, .tsv, .jsonl or .parquet; - writes CSV on stdout."
        ),
    ],
    overwrite: Annotated[
        bool, options.make_option("--overwrite", "Take the place of a FILE that is there.")
    ] = False,
    where: options.Where = None,
    skip: options.Skip = False,
    read: options.ReadOptions = options.DEFAULT_READ_OPTIONS,
) -> Iterator[Result]:
    """Write the rows of SOURCE into FILE.

    All columns are written, a missing cell as missing; it is there whole or not at all.
    """
    from qkv.database.export import files as out

    if output.is_file() and not overwrite:
        step = "replace it with --overwrite, or choose another name"
        raise ArgumentError(f"{output} exists: {step}")
    with _open_for_reading(source, read, skip) as database:
        wish = arguments.join_conditions(where, database.columns) if where else None
        found = database.rows(where=wish)
        if str(output) == "-":
            stdout = sys.stdout.buffer
            draw = functools.partial(out.write_csv, stdout, database.columns, found)
            yield Result({"rows": database.count(wish)}, draw)
            return
        count = out.write_file(output, database.columns, found)
        if not count:
            terminal.print_note(_why_nothing(database, wish))
        told = f"{output}: {format_plural(count, 'row')}"
        yield Result({"written": str(output), "rows": count}, lambda: terminal.print_line(told))


def _why_nothing(database: Database | RemoteDatabase, wish: str | None) -> str:
    """Why there are no rows: none passes the condition, or the table has none."""
    if wish is None:
        return "There are no rows"
    return database.why_no_rows(wish) or "No rows match"


def _open_for_reading(
    source: str, read: options.ReadOptions, skip: bool
) -> contextlib.AbstractContextManager[Database | RemoteDatabase]:
    """SOURCE with keys that nobody asks softly, so that a table need not be encoded for it."""
    from qkv.database.encoders import Exact

    encoder = None if is_store(source) else Exact(64)
    return open_source(source, read, encoder=encoder, skip=skip)
