"""`qkv rows` and `export`: show the rows of a table, or write them to a file."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from qkv.cli import arguments, files, options, terminal
from qkv.cli.command import EXIT_NOTHING_FOUND, EXIT_OK, Result
from qkv.cli.source import is_store, open_source
from qkv.errors import format_plural

if TYPE_CHECKING:
    from qkv.database import Database
    from qkv.serve.remote_database import RemoteDatabase


def rows(
    source: options.Source,
    start: Annotated[
        int, options.make_option("--from ROW", "Start at this row; 0 is the oldest.", min=0)
    ] = 0,
    count: Annotated[
        int, options.make_option("--count -n ROWS", "Show this many rows.", min=1)
    ] = 20,
    where: options.Where = None,
    skip: options.Skip = False,
    read: options.ReadOptions = options.DEFAULT_READ_OPTIONS,
) -> Result:
    """Show rows of SOURCE with all columns, oldest first."""
    with _open_for_reading(source, read, skip) as database:
        condition = arguments.join_conditions(where, database.columns) if where else None
        total = database.count(condition)
        page = list(database.rows(where=condition, start=start, count=count))
        columns = database.columns
        why_nothing = "" if total else _why_nothing(database, condition)
    end = start + len(page)

    def print_rows() -> None:
        lines = [
            (str(at), *(terminal.format_cell(row.get(name)) for name in columns))
            for at, row in enumerate(page, start)
        ]
        hidden = 0
        if lines:
            names = ("", *(terminal.format_cell(name) for name in columns))
            fit = max(terminal.count_fitting_columns([names, *lines]), 2)
            hidden = len(names) - fit
            terminal.print_table(
                names[:fit], [line[:fit] for line in lines], right=[""], uncut=[""]
            )
        if hidden:
            terminal.print_note(
                f"{hidden} of {format_plural(len(columns), 'column')} do not fit the terminal: add "
                "--json, or pipe the output into less -S"
            )
        more = f"; the next: --from {end}" if end < total else ""
        if page:
            terminal.print_note(f"rows {start} to {end - 1} of {total:,}{more}")
        elif total:
            terminal.print_note(f"No rows from {start} on: there are {total:,}")
        else:
            terminal.print_note(why_nothing)

    data = {"from": start, "total": total, "rows": page}
    return Result(data, print_rows, EXIT_OK if page else EXIT_NOTHING_FOUND)


def export(
    source: options.Source,
    output: Annotated[
        Path,
        options.make_argument(
            "FILE", "A .csv, .tsv, .jsonl or .parquet file, or - for CSV on stdout."
        ),
    ],
    overwrite: Annotated[bool, options.make_option("--overwrite", "Overwrite FILE.")] = False,
    where: options.Where = None,
    skip: options.Skip = False,
    read: options.ReadOptions = options.DEFAULT_READ_OPTIONS,
) -> Iterator[Result]:
    """Export the rows of SOURCE to FILE.

    Write all columns. FILE is complete or not written.
    """
    from qkv.database.export import files as out

    files.check_overwrite(output, overwrite)
    with _open_for_reading(source, read, skip) as database:
        condition = arguments.join_conditions(where, database.columns) if where else None
        rows = database.rows(where=condition)
        if str(output) == "-":
            stdout = sys.stdout.buffer
            render = functools.partial(out.write_csv, stdout, database.columns, rows)
            yield Result({"rows": database.count(condition)}, render)
            return
        count = out.write_file(output, database.columns, rows)
        if not count:
            terminal.print_note(_why_nothing(database, condition))
        line = f"{output}: {format_plural(count, 'row')}"
        yield Result({"written": str(output), "rows": count}, lambda: terminal.print_line(line))


def _why_nothing(database: Database | RemoteDatabase, condition: str | None) -> str:
    """Return a sentence on why there are no rows: no row matches, or the table is empty."""
    if condition is None:
        return "There are no rows"
    return database.why_no_rows(condition) or "No rows match"


def _open_for_reading(
    source: str, read: options.ReadOptions, skip: bool
) -> contextlib.AbstractContextManager[Database | RemoteDatabase]:
    """Open SOURCE to read its rows. Its keys are not queried, so a table is not encoded."""
    from qkv.database.encoders import Exact

    encoder = None if is_store(source) else Exact(64)
    return open_source(source, read, encoder=encoder, skip=skip)
