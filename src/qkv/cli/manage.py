"""`qkv import`, `add`, `remove`, `info`, `versions`, `check`, `compact`: manage a database."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from qkv.cli import arguments, options, terminal
from qkv.cli.command import EXIT_DAMAGED, EXIT_OK, Result
from qkv.cli.source import (
    is_url,
    open_source,
    open_store,
    open_store_or_remote,
    parse_key,
    pick_columns,
)
from qkv.database import parsing
from qkv.errors import (
    ArgumentError,
    escape_control_characters,
    format_plural,
    require_parent_folder,
)

if TYPE_CHECKING:
    from qkv.database import Database
    from qkv.serve.remote_database import RemoteDatabase
    from qkv.util.types import ProgressCallback


def import_(
    source: options.Source,
    path: options.Folder,
    key: options.Key = None,
    value: options.Value = None,
    encoder: options.Encoder = None,
    unique: Annotated[
        bool, options.make_option("--unique", "Reject duplicate keys, now and later.")
    ] = False,
    append: Annotated[
        bool, options.make_option("--append", "Append the rows to an existing database.")
    ] = False,
    table: options.TableName = None,
    missing: options.Missing = None,
    text: options.TextColumns = None,
    names: options.Names = None,
    token: options.Token = None,
) -> Result:
    """Import SOURCE into the new database PATH.

    Either all rows are imported or none.
    """
    from qkv.database import Database

    read_options = options.ReadOptions(
        table=table, missing=missing, text=text, names=names, token=token
    )
    if append:
        if key or value or encoder or unique:
            raise ArgumentError(
                "--append uses the key, value and encoder of the database: leave out --key, "
                "--value, --encoder and --unique"
            )
        with open_store(path) as database:
            with terminal.show_progress("importing") as progress:
                first = next(database.rows(), {})
                stored_text = [name for name, cell in first.items() if isinstance(cell, str)]
                if not is_url(source):
                    read_options = replace(read_options, text=[*(text or ()), *stored_text])
                cells, _ = _read_columns(source, read_options, progress)
                rows = (
                    dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)
                )
                database.extend(rows, progress=progress)
            return _state_result(database)
    if path.exists():
        raise ArgumentError(f"{path} exists: append to it with --append, or choose another name")
    require_parent_folder(path)
    with terminal.show_progress("importing") as progress:
        cells, defaults = _read_columns(source, read_options, progress)
        database = Database.from_columns(
            cells,
            key=pick_columns(key or defaults["key"]),
            value=pick_columns(value or defaults["value"]),
            path=path,
            encoder=encoder,  # type: ignore[arg-type]  # checked at run time
            unique=unique,
            progress=progress,
        )
    with database:
        return _state_result(database)


def _read_columns(
    source: str,
    read_options: options.ReadOptions,
    progress: ProgressCallback | None,
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the columns of SOURCE by name, and which columns are its key and value.

    Only a served database says which; for other sources these lists are empty.
    """
    from qkv.database import sources
    from qkv.database.table.schema import rows_to_columns

    if not is_url(source):
        table = sources.read(source, **read_options.table_options(), progress=progress)
        return dict(table.columns), {"key": [], "value": []}
    with open_source(source, read_options) as database:
        about = database.info()
        defaults = {"key": about["key"], "value": about["value"]}
        return dict(rows_to_columns(database.rows())), defaults


def add(
    path: options.FolderOrUrl,
    key: Annotated[str, options.make_argument("KEY", "The key of the row.")],
    value: Annotated[
        str | None, options.make_argument("[VALUE]", "The value, if it is one column.")
    ] = None,
    cells: Annotated[
        list[str] | None,
        options.make_option("--set COLUMN=TEXT", "Set a column. Repeat for several."),
    ] = None,
    update: Annotated[
        bool, options.make_option("--update", "Replace the newest row with this key.")
    ] = False,
    token: options.Token = None,
) -> Result:
    """Add one row to the database PATH.

    Create PATH if it does not exist. The first row of a database fixes the types of its columns.
    """
    if (value is None) == (not cells):
        raise ArgumentError("add: give a VALUE, or --set for each column")
    for text in (key, value or "", *(cells or ())):
        arguments.check_text(text, "an argument")
    with open_store_or_remote(path, token, create=True) as database:
        about, example = database.info(), next(database.rows(count=1), {})
        keys, columns = about["key"] or ["key"], about["value"] or ["value"]
        new_key = parse_key(database, key, "the key") if example else parsing.guess_cell(key)
        if value is None:
            new_cells = dict(arguments.parse_assignment(text, example) for text in cells or ())
        elif len(columns) > 1:
            raise ArgumentError(
                f"add: the value has the columns {', '.join(columns)}: use --set for each"
            )
        else:
            new_cells = {
                columns[0]: parsing.parse_cell_like(value, example.get(columns[0]), "the value")
            }
        if update and new_key in database:
            if not new_cells.keys() <= set(columns):
                raise ArgumentError(
                    f"--update can set only the columns of the value: {', '.join(columns)}"
                )
            if len(columns) > 1:
                new_value: Any = {**database[new_key], **new_cells}
            else:
                new_value = new_cells[columns[0]]
            inserted = database.update(new_key, new_value)
        else:
            parts = new_key if len(keys) > 1 else (new_key,)
            empty = dict.fromkeys(about["value"])
            database.extend([empty | dict(zip(keys, parts, strict=True)) | new_cells])
            inserted = 1
        return _state_result(database, bool(inserted) if update else None)


def remove(
    path: options.FolderOrUrl,
    keys: Annotated[list[str], options.make_argument("KEYS...", "The exact keys.")],
    token: options.Token = None,
) -> Result:
    """Remove every row that has one of KEYS.

    If one of KEYS is in no row, remove nothing.
    """
    with open_store_or_remote(path, token) as database:
        removed = database.remove([parse_key(database, key, "the key") for key in keys])
        data = {"path": str(path), "removed": removed, "rows": len(database)}
    return Result(
        data, lambda: terminal.print_line(f"{path}: {format_plural(removed, 'row')} removed")
    )


def info(
    source: options.Source,
    key: options.Key = None,
    value: options.Value = None,
    read: options.ReadOptions = options.DEFAULT_READ_OPTIONS,
) -> Result:
    """Show the rows, columns, encoder and size of SOURCE."""
    from rich.filesize import decimal

    with open_source(source, read, key=key, value=value) as database:
        about, described = database.info(), database.describe()
    types = {name: column["type"] for name, column in described.items()}
    missing_cells = {name: column["missing"] for name, column in described.items()}
    column_texts = [
        f"{name} ({kind}, {count:,} missing)"
        if (count := missing_cells[name])
        else f"{name} ({kind})"
        for name, kind in types.items()
    ]
    data = {**about, "types": types, "missing": missing_cells}
    shown = {
        **about,
        "columns": ", ".join(column_texts),
        "encoder": (about["encoder"] or {}).get("kind"),
        "bytes": None if about["bytes"] is None else decimal(about["bytes"]),
    }
    return Result(data, lambda: terminal.print_pairs(shown))


def versions(path: options.FolderOrUrl, token: options.Token = None) -> Result:
    """List the versions of the database PATH, for --at."""
    with open_store_or_remote(path, token) as database:
        records = [terminal.public_fields(version) for version in database.versions()]

    def print_versions() -> None:
        rows = [
            tuple(terminal.format_cell(version[name]) for name in VERSION_COLUMNS)
            for version in records
        ]
        numbers = ("number", "added", "removed", "rows")
        terminal.print_table(VERSION_COLUMNS, rows, right=numbers, uncut=numbers)

    return Result({"path": str(path), "versions": records}, print_versions)


VERSION_COLUMNS = ("number", "time", "what", "added", "removed", "rows")


def check(
    path: options.Folder,
    repair: Annotated[
        bool,
        options.make_option(
            "--repair", "Repair the damage that a crash caused. No rows are deleted."
        ),
    ] = False,
) -> Result:
    """Verify every file of the database PATH.

    Exit with 3 if a file is damaged.
    """
    from qkv.database import check_store

    with terminal.show_progress("checking") as progress:
        problems = check_store(path, repair=repair, progress=progress)
    unrepaired = [problem for problem in problems if not problem.repaired]
    data = {
        "path": str(path),
        "clean": not unrepaired,
        "problems": [terminal.public_fields(problem) for problem in problems],
    }

    def print_problems() -> None:
        for problem in problems:
            state = "repaired: " if problem.repaired else ""
            terminal.print_line(f"{state}{problem.file}: {escape_control_characters(problem.what)}")
        if not problems:
            terminal.print_line(f"{path}: clean")
        elif not unrepaired:
            terminal.print_line(f"{path}: clean now")

    return Result(data, print_problems, EXIT_DAMAGED if unrepaired else EXIT_OK)


def compact(path: options.Folder) -> Result:
    """Shrink the database PATH.

    Delete removed rows and older versions for good, and merge small files.
    """
    with open_store(path) as database, terminal.show_progress("compacting") as progress:
        report = database.compact(progress=progress)
    data = {"path": str(path), **terminal.public_fields(report)}

    def print_report() -> None:
        dropped = format_plural(report.dropped_rows, "removed row")
        past = format_plural(report.dropped_versions, "older version")
        terminal.print_line(
            f"{path}: {format_plural(report.rows, 'row')}; dropped {dropped}, {past}"
        )
        if report.held:
            held = ", ".join(map(str, report.held))
            terminal.print_note(
                f"qkv: kept version {held}, which a reader still uses: compact again later"
            )
        if report.unfinished:
            terminal.print_note(f"qkv: not finished: {report.unfinished}")

    return Result(data, print_report)


def _state_result(database: Database | RemoteDatabase, inserted: bool | None = None) -> Result:
    """Return the result of a change: the number of rows, and the new version.

    For an update, `inserted` says whether it added a row.
    """
    path, rows, version = str(database.path), len(database), database.version
    data: dict[str, Any] = {"path": path, "rows": rows, "version": version}
    if inserted is not None:
        data["inserted"] = inserted
    note = "inserted, because no row had the key; " if inserted else ""
    line = f"{path}: {note}{format_plural(rows, 'row')}, version {version}"
    return Result(data, lambda: terminal.print_line(line))
