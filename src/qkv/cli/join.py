"""`qkv join`: join two tables whose keys are similar but not equal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from qkv.cli import arguments, files, options, terminal
from qkv.cli.ask import build_query_options
from qkv.cli.command import EXIT_NOTHING_FOUND, EXIT_OK, Result
from qkv.cli.source import close_after, is_store, open_source, pick_columns
from qkv.errors import format_plural, unknown_name_error

if TYPE_CHECKING:
    from qkv.database.join import JoinCounts, JoinInput

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
MAX_PRINTED_ROWS = 20


def join(
    left: Annotated[str, options.make_argument("LEFT", "The table whose rows are matched.")],
    right: Annotated[str, options.make_argument("RIGHT", "The table in which LEFT is looked up.")],
    left_key: Annotated[
        list[str] | None,
        options.make_option("--left-key -l COLUMN", "The column of LEFT to match."),
    ] = None,
    right_key: Annotated[
        list[str] | None,
        options.make_option("--right-key -r COLUMN", "The column of RIGHT to match."),
    ] = None,
    output: Annotated[
        Path | None,
        options.make_option(
            "--output -o FILE", "Write all joined rows to this .csv, .tsv, .jsonl or .parquet file."
        ),
    ] = None,
    overwrite: Annotated[bool, options.make_option("--overwrite", "Overwrite FILE.")] = False,
    top: Annotated[
        int, options.make_option("--top -n ROWS", "Join each row with this many rows.", min=1)
    ] = 1,
    min_weight: Annotated[
        float,
        options.make_option(
            "--min-weight WEIGHT",
            "Leave the columns of RIGHT empty where the matched key has a lower weight.",
            min=0.0,
            max=1.0,
        ),
    ] = 0.0,
    where: options.Where = None,
    score: options.Score = None,
    weighting: options.Weighting = None,
    encoder: options.Encoder = None,
) -> Result:
    """Join LEFT with the most similar rows of RIGHT.

    Each row of LEFT is joined with the row of RIGHT whose key is most similar. Typos are tolerated.
    By default the key is the first text column of each table; in RIGHT it is the column with the
    name of LEFT's key, if there is one. A note says which columns were chosen if their names
    differ. --where selects rows of RIGHT.
    Without --output, print the first 20 rows.
    """
    from qkv.database.export.files import write_file
    from qkv.database.join import JoinCounts, join_rows, joined_columns

    if output is not None:
        files.check_suffix(output, TABLE_SUFFIXES)
        files.check_overwrite(output, overwrite)
    with (
        _open_left(left, left_key) as left_input,
        _open_right(right, right_key, left_input.key, encoder) as right_database,
    ):
        if not (left_key and right_key) and not (is_store(left) or is_store(right)):
            _note_different_keys(left_input.key, right_database.info()["key"])
        condition = arguments.join_conditions(where, right_database.columns) if where else None
        query_options = build_query_options(right, score, weighting, top)
        names = joined_columns(left_input.columns, right_database.columns, top)
        counts = JoinCounts()
        with terminal.show_progress("joining") as progress:
            joined = join_rows(
                left_input,
                right_database,
                min_weight=min_weight,
                progress=progress,
                counts=counts,
                where=condition,
                **query_options,
            )
            if output is not None:
                count = write_file(output, names, joined)
                line = f"{output}: {format_plural(count, 'row')}"
                data = {"written": str(output), "rows": count}

                def print_written() -> None:
                    terminal.print_line(line)
                    _print_counts(counts, left_input.row_count)

                return Result(data, print_written)
            rows = list(joined)
        right_names = dict(
            zip(right_database.columns, names[len(left_input.columns) :], strict=False)
        )
        about = right_database.info()
        weight = names[len(left_input.columns) + len(right_database.columns)]
        shown = [*left_input.key, *(right_names[name] for name in about["key"]), weight]
        shown += [right_names[name] for name in about["value"]]
    matched = sum(row[weight] is not None for row in rows)

    def format_cell(row: dict[str, Any], name: str) -> str:
        if name != weight:
            return terminal.format_cell(row[name])
        return "" if row[name] is None else terminal.format_percent(row[name])

    def print_rows() -> None:
        lines = [[format_cell(row, name) for name in shown] for row in rows[:MAX_PRINTED_ROWS]]
        terminal.print_table(shown, lines, right=[weight], uncut=[weight])
        if len(rows) > MAX_PRINTED_ROWS:
            terminal.print_note(
                f"{len(rows) - MAX_PRINTED_ROWS:,} more rows: write all to a file with --output"
            )
        if missing := len(rows) - matched:
            terminal.print_note(f"{missing:,} of {left_input.row_count:,} rows have no match")
        _print_counts(counts, left_input.row_count)

    return Result(
        {"rows": rows, "matched": matched}, print_rows, EXIT_OK if matched else EXIT_NOTHING_FOUND
    )


def _print_counts(counts: JoinCounts, row_count: int) -> None:
    """Say how many matches are unsure, have other words, or leave out rows with the same key."""
    if counts.hint:
        terminal.print_note(counts.hint)
    if counts.unsure:
        terminal.print_note(
            f"{counts.unsure:,} of {row_count:,} rows have a match below 50 %: --min-weight 0.5 "
            "leaves their columns empty"
        )
    if counts.example is not None:
        left, right = (f"'{terminal.format_cell(key)}'" for key in counts.example)
        have = "rows has a match" if counts.unlike == 1 else "rows have matches"
        terminal.print_note(
            f"{counts.unlike:,} of {row_count:,} {have} with other words, such as {left} with "
            f"{right}: check whether RIGHT has these keys"
        )
    if counts.repeated:
        terminal.print_note(
            f"For {counts.repeated:,} of {row_count:,} rows, more rows of RIGHT have the matched "
            "key: a larger --top joins them too"
        )


@contextlib.contextmanager
def _open_left(source: str, key: list[str] | None) -> Iterator[JoinInput]:
    """Yield the rows of LEFT. Unlike those of a database, they may lack a key."""
    from qkv.database.database import first_text_column
    from qkv.database.join import JoinInput
    from qkv.database.sources import read

    if is_store(source):
        with open_source(source, options.DEFAULT_READ_OPTIONS) as database:
            columns, key = list(database.columns), key or list(database.info()["key"])
            _check_columns(key, columns)
            yield JoinInput(database.rows(), columns, key, len(database))
        return
    with terminal.show_progress("reading") as progress:
        table = read(source, progress=progress)
    columns, key = list(table.columns), key or [first_text_column(table.columns)]
    _check_columns(key, columns)
    rows = (
        dict(zip(columns, cells, strict=True))
        for cells in zip(*table.columns.values(), strict=True)
    )
    yield JoinInput(rows, columns, key, len(table))


@contextlib.contextmanager
def _open_right(
    source: str, key: list[str] | None, left_key: Sequence[str], encoder: Any
) -> Iterator[Any]:
    """Yield RIGHT as a database.

    Without `key`, the columns `left_key` are its key, if it has them.
    """
    from qkv.database import Database
    from qkv.database.sources import read

    if key or is_store(source):
        with open_source(
            source, options.DEFAULT_READ_OPTIONS, key=key, encoder=encoder
        ) as database:
            yield database
        return
    with terminal.show_progress("reading") as progress:
        columns = read(source, progress=progress).columns
        same = pick_columns(left_key) if set(left_key) <= columns.keys() else None
        right = Database.from_columns(columns, key=same, encoder=encoder, progress=progress)
    with close_after(right):
        yield right


def _note_different_keys(left_key: Sequence[str], right_key: Sequence[str]) -> None:
    """Say which columns are matched if they were chosen automatically and have other names."""
    if list(left_key) != list(right_key):
        terminal.print_note(
            f"Column {', '.join(left_key)} is matched with {', '.join(right_key)}; "
            "--left-key and --right-key choose others"
        )


def _check_columns(key: list[str], columns: list[str]) -> None:
    for name in key:
        if name not in columns:
            raise unknown_name_error("column", name, columns)
