"""`qkv import`, `add`, `remove`, `info`, `versions`, `check`, `compact`: keep a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from qkv.cli import options, screen, values
from qkv.cli.command import DAMAGED, OK, Result
from qkv.cli.source import cell, held, is_url, opened, picked, stored
from qkv.database import spelled
from qkv.errors import ArgumentError, counted, in_folder, printable

if TYPE_CHECKING:
    from qkv.database import Database
    from qkv.serve.remote import Remote
    from qkv.types import Progress


def import_(
    source: options.Source,
    path: options.Folder,
    key: options.Key = None,
    value: options.Value = None,
    encoder: options.Encoder = None,
    unique: Annotated[
        bool, options.option("--unique", "Refuse a key that is there already.")
    ] = False,
    append: Annotated[
        bool, options.option("--append", "Add the rows to a database that is there.")
    ] = False,
    table: options.TableName = None,
    missing: options.Missing = None,
    names: options.Names = None,
    token: options.Token = None,
) -> Result:
    """Read SOURCE into the new database PATH, all of it or nothing."""
    from qkv.database import Database

    how = options.Read(table=table, missing=missing, names=names, token=token)
    if append:
        if key or value or encoder or unique:
            raise ArgumentError("--append takes columns and encoder as the database has them")
        with stored(path) as database:
            with screen.progress("importing") as progress:
                first = next(database.rows(), {})
                text = [name for name, cell in first.items() if isinstance(cell, str)]
                read, _ = _read(source, how, progress, text)
                rows = (
                    dict(zip(read, row, strict=True)) for row in zip(*read.values(), strict=True)
                )
                database.extend(rows, progress=progress)
            return _kept(database)
    if path.exists():
        raise ArgumentError(f"{path} exists: add to it with --append, or choose another name")
    in_folder(path)
    with screen.progress("importing") as progress:
        read, own = _read(source, how, progress)
        columns = {"key": picked(key or own["key"]), "value": picked(value or own["value"])}
        kept: dict[str, Any] = {"path": path, "encoder": encoder, "unique": unique}
        made = Database.from_columns(read, **columns, **kept, progress=progress)
    with made:
        return _kept(made)


def _read(
    source: str, how: options.Read, progress: Progress | None, text: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The columns of SOURCE, of CSV some as text, and which are key and value where it says so."""
    from qkv.database import sources
    from qkv.database.schema import transposed

    if not is_url(source):
        found = sources.read(source, **how.of_tables(), text=text, progress=progress)
        return dict(found.columns), {"key": [], "value": []}
    with opened(source, how) as database:
        about = database.info()
        own = {"key": about["key"], "value": about["value"]}
        return dict(transposed(database.rows())), own


def add(
    path: options.Place,
    key: Annotated[str, options.argument("KEY", "The key.")],
    value: Annotated[
        str | None, options.argument("[VALUE]", "The value, where it is one column.")
    ] = None,
    cells: Annotated[
        list[str] | None,
        options.option("--set COLUMN=TEXT", "A column's cell; give it again for more."),
    ] = None,
    update: Annotated[
        bool, options.option("--update", "Replace the newest row that has this key.")
    ] = False,
    token: options.Token = None,
) -> Result:
    """Add one row to the database PATH.

    A PATH that is not there is made. The first row fixes the types; later ones are read as the
    columns are.
    """
    if (value is None) == (not cells):
        raise ArgumentError("add: give a VALUE, or --set for each column")
    for text in (key, value or "", *(cells or ())):
        values.check_text(text, "what was given")
    with held(path, token, create=True) as database:
        about, example = database.info(), next(database.rows(count=1), {})
        keys, columns = about["key"] or ["key"], about["value"] or ["value"]
        wanted = cell(database, key, "the key") if example else spelled.guess(key)
        if value is None:
            given = dict(values.assignment(text, example) for text in cells or ())
        elif len(columns) > 1:
            raise ArgumentError(f"add: a value is {', '.join(columns)}: use --set for each")
        else:
            given = {columns[0]: spelled.like(value, example.get(columns[0]), "the value")}
        if update and wanted in database:
            if not given.keys() <= set(columns):
                raise ArgumentError(f"--update changes the value's columns: {', '.join(columns)}")
            many = len(columns) > 1
            now = {**database[wanted], **given} if many else given[columns[0]]
            inserted = database.update(wanted, now)
        else:
            parts = wanted if len(keys) > 1 else (wanted,)
            # A value's columns that nobody set are empty.
            empty = dict.fromkeys(about["value"])
            database.extend([empty | dict(zip(keys, parts, strict=True)) | given])
            inserted = 1
        return _kept(database, bool(inserted) if update else None)


def remove(
    path: options.Place,
    keys: Annotated[list[str], options.argument("KEYS...", "The keys, exactly.")],
    token: options.Token = None,
) -> Result:
    """Remove every row that has one of KEYS. If a key is absent, nothing is removed."""
    with held(path, token) as database:
        removed = database.remove([cell(database, key, "the key") for key in keys])
        data = {"path": str(path), "removed": removed, "rows": len(database)}
    return Result(data, lambda: screen.line(f"{path}: {counted(removed, 'row')} removed"))


def info(
    source: options.Source,
    key: options.Key = None,
    value: options.Value = None,
    read: options.Read = options.READ,
) -> Result:
    """Say what SOURCE holds: rows, columns, encoder, size."""
    from rich.filesize import decimal

    with opened(source, read, key=key, value=value) as database:
        about, described = database.info(), database.describe()
    types = {name: column["type"] for name, column in described.items()}
    missing_cells = {name: column["missing"] for name, column in described.items()}
    told = [
        f"{name} ({kind}, {count:,} missing)"
        if (count := missing_cells[name])
        else f"{name} ({kind})"
        for name, kind in types.items()
    ]
    data = {**about, "types": types, "missing": missing_cells}
    shown = {
        **about,
        "columns": ", ".join(told),
        "encoder": (about["encoder"] or {}).get("kind"),
        "bytes": None if about["bytes"] is None else decimal(about["bytes"]),
    }
    return Result(data, lambda: screen.pairs(shown))


def versions(path: options.Place, token: options.Token = None) -> Result:
    """List the versions of the database PATH, for --at."""
    with held(path, token) as database:
        found = [screen.fields(version) for version in database.versions()]

    def show() -> None:
        rows = [tuple(screen.cell(version[name]) for name in VERSION) for version in found]
        numbers = ("number", "added", "removed", "rows")
        screen.table(VERSION, rows, right=numbers, whole=numbers)

    return Result({"path": str(path), "versions": found}, show)


VERSION = ("number", "time", "what", "added", "removed", "rows")


def check(
    path: options.Folder,
    repair: Annotated[
        bool, options.option("--repair", "Mend what a crash left behind; delete no rows.")
    ] = False,
) -> Result:
    """Verify every file of the database PATH.

    Ends with 3 while something is damaged.
    """
    from qkv.database import check as check_store

    with screen.progress("checking") as progress:
        problems = check_store(path, repair=repair, progress=progress)
    left = [problem for problem in problems if not problem.repaired]
    data = {
        "path": str(path),
        "clean": not left,
        "problems": [screen.fields(problem) for problem in problems],
    }

    def show() -> None:
        for problem in problems:
            state = "repaired: " if problem.repaired else ""
            screen.line(f"{state}{problem.file}: {printable(problem.what)}")
        if not problems:
            screen.line(f"{path}: clean")
        elif not left:
            screen.line(f"{path}: clean now")

    return Result(data, show, DAMAGED if left else OK)


def compact(path: options.Folder) -> Result:
    """Shrink the database PATH.

    Removed rows and older versions are dropped for good, and small files merged.
    """
    with stored(path) as database, screen.progress("compacting") as progress:
        report = database.compact(progress=progress)
    data = {"path": str(path), **screen.fields(report)}

    def show() -> None:
        dropped = counted(report.dropped_rows, "removed row")
        past = counted(report.dropped_versions, "older version")
        screen.line(f"{path}: {counted(report.rows, 'row')}; dropped {dropped}, {past}")
        if report.held:
            held = ", ".join(map(str, report.held))
            screen.note(f"qkv: kept version {held}, which somebody reads: compact again later")
        if report.unfinished:
            screen.note(f"qkv: not finished: {report.unfinished}")

    return Result(data, show)


def _kept(database: Database | Remote, inserted: bool | None = None) -> Result:
    """What a database holds after a change; of an update, whether it inserted."""
    path, rows, version = str(database.path), len(database), database.version
    data: dict[str, Any] = {"path": path, "rows": rows, "version": version}
    if inserted is not None:
        data["inserted"] = inserted
    told = "inserted, as no row had the key; " if inserted else ""
    line = f"{path}: {told}{counted(rows, 'row')}, version {version}"
    return Result(data, lambda: screen.line(line))
