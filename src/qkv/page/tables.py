"""Tables that a page brings or looks at: what they are, uploaded ones, other columns as the key."""

from __future__ import annotations

import base64
import binascii
import io
import shutil
import sqlite3
import tarfile
import tempfile
import weakref
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qkv.answer import Answer
from qkv.database import Database, parsing
from qkv.database import open as open_database
from qkv.database.errors import SkippedRowsWarning, collect_skipped_rows
from qkv.database.sources.table import SourceLimits, limit_sources
from qkv.database.storage.folder import is_store_file
from qkv.errors import ArgumentError, QkvError, unknown_name_error
from qkv.page import limits as bounds
from qkv.util.deadline import DeadlineError, limit_time
from qkv.util.formatting import to_jsonable

Args = Mapping[str, Any]
Databases = MutableMapping[str, Database]

FORMATS = ("csv", "tsv", "jsonl", "parquet", "arrow", "qkv")
"""What may be uploaded, by its ending: a file, or the folder of a database as one tar."""

MAX_REKEYED_ROWS = 200_000
"""Rows that are encoded anew because a page asks by other columns."""

PREVIEW_ROWS = 10
"""Rows that a page shows before anything is asked."""

MAX_NAMED_SKIPPED_ROWS = 1000
"""Skipped rows that are named by their numbers."""

SUMMARY_FIELDS = ("rows", "version", "columns", "key", "value", "key_kind", "value_kind")


def list_databases(args: Args, known: Databases) -> list[dict[str, Any]]:
    """Every database that may be asked by name."""
    return [summarize_database(name, database) for name, database in known.items()]


def summarize_database(name: str, database: Database) -> dict[str, Any]:
    """What a database holds, as far as one must know to ask it.

    >>> from qkv import Database
    >>> summarize_database("names", Database({"Li": "Mu"}))["columns"]
    ['key', 'value']
    """
    told: Mapping[str, Any] = database.info()
    return {"name": name, **{field: told[field] for field in SUMMARY_FIELDS}}


def ask_database(args: Args, known: Databases) -> dict[str, Any]:
    """The answer of `database` as of version `at`, and one paragraph that explains it.

    >>> from qkv import Database
    >>> ask_database({"database": "ages", "query": "3"}, {"ages": Database({3: "Li", 40: "Mu"})})[
    ...     "value"
    ... ]
    'Li'
    """
    found = find_answer(args, known)
    return {**found.to_dict(), "explained": found.explain()}


def find_answer(args: Args, known: Databases) -> Answer:
    """The same, as Python has it."""
    database = find_database(args, known)
    query = parsing.cell_from_json(args["query"], next(iter(database), None))
    if isinstance(query, list):
        raise ArgumentError("query: a page asks one at a time")
    if isinstance(query, str):
        bounds.check_count("characters of a query", len(query), bounds.QUERY)
    how = {name: args[name] for name in ("top", "score", "weighting") if args.get(name)}
    if where := condition(args):
        how["where"] = where
    found: Answer = _at_version(database, args).ask(query, **parsing.parse_options(how))
    return found


def list_rows(args: Args, known: Databases) -> list[dict[str, Any]]:
    """The first rows of `database` as of version `at`, of those that pass `where`.

    >>> from qkv import Database
    >>> list_rows({"database": "ages", "where": "key > 3"}, {"ages": Database({3: "Li", 40: "Mu"})})
    [{'key': 40, 'value': 'Mu'}]
    """
    past = _at_version(find_database(args, known), args)
    return [to_jsonable(row) for row in past.rows(where=condition(args), count=PREVIEW_ROWS)]


def condition(args: Args) -> Any:
    """The `where` of a call, if it has one that is not too long."""
    where = args.get("where") or None
    if isinstance(where, str):
        bounds.check_count("characters of where", len(where), bounds.WHERE)
    return where


def _at_version(database: Database, args: Args) -> Database:
    """The database as of version `at`."""
    at = args.get("at")
    if at is None:
        return database
    if type(at) is not int or not 0 <= at <= 2**53:
        raise ArgumentError("at must be the number of a version")
    return database.at(at)


def list_versions(args: Args, known: Databases) -> list[dict[str, Any]]:
    """The versions of a database, the oldest first."""
    return [asdict(version) for version in find_database(args, known).versions()]


def upload_table(args: Args, known: Databases, deadline: float | None = None) -> dict[str, Any]:
    """A file's rows as a database of that `name`; its bytes are `data`, or `base64` of them. Where
    reading it takes until the `deadline`, it is stopped, and nothing is kept."""
    data = args.get("data")
    if data is None:
        try:
            data = base64.b64decode(args["base64"], validate=True)
        except (KeyError, TypeError, binascii.Error):
            raise ArgumentError("upload wants the file as base64") from None
    name = str(args["name"])
    with collect_skipped_rows() as skipped, limit_time(deadline):
        made = load_table(data, name, str(args["format"]), args.get("key"), args.get("value"))
    return _register_database(name, made, known, skipped)


def rekey_database(args: Args, known: Databases, deadline: float | None = None) -> dict[str, Any]:
    """The rows of `database` by another `key` and `value`, as the database called `name`. Where
    that takes until the `deadline`, it is stopped, and nothing is kept."""
    source = find_database(args, known)
    if len(source) > MAX_REKEYED_ROWS:
        raise ArgumentError(
            f"{args['database']} has {len(source):,} rows, and at most {MAX_REKEYED_ROWS:,} are "
            "encoded anew: "
            "import it with this key"
        )
    with collect_skipped_rows() as skipped, limit_time(deadline):
        made = source.reindex(args["key"], args.get("value"))
    return _register_database(str(args.get("name") or args["database"]), made, known, skipped)


def _register_database(
    name: str, made: Database, known: Databases, skipped: list[SkippedRowsWarning]
) -> dict[str, Any]:
    try:
        known[name] = made
    except BaseException:
        made.close()
        raise
    told = [{"why": str(one), "rows": one.rows[:MAX_NAMED_SKIPPED_ROWS]} for one in skipped]
    return {**summarize_database(name, made), "skipped": told}


def load_table(data: bytes, name: str, form: str, key: Any = None, value: Any = None) -> Database:
    """A file's bytes as a database in memory, its columns chosen as `Database.from_columns` does.

    >>> load_table(b"name,major\\nAnn,art\\nBo,law\\n", "students", "csv")["Bo"]
    'law'
    """
    if form not in FORMATS:
        raise unknown_name_error("format", form, FORMATS)
    if form == "qkv":
        return _open_tar(data, name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"upload.{form}"
        path.write_bytes(data)
        limits = SourceLimits(bounds.CELL, bounds.MAX_COLUMNS)
        try:
            bounds.check_file(path, form)
            with limit_sources(limits):
                return Database.from_source(path, key=key or None, value=value or None)
        except DeadlineError:
            raise
        except QkvError as error:
            # Where the file lay for a moment is nobody's business.
            raise ArgumentError(str(error).replace(str(path), name)) from None


def _open_tar(data: bytes, name: str) -> Database:
    """The database whose folder is in a tar; its files are there for as long as it is."""
    folder = Path(tempfile.mkdtemp(prefix="qkv-"))
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for part in tar:
                # A sparse one is as long as it says, whatever it holds.
                whole = part.isreg() and not part.issparse() and part.size <= len(data)
                inside = tar.extractfile(part) if whole else None
                if inside is None or not is_store_file(part.name):
                    raise ArgumentError(f"{name}: {part.name[:60]!r} is no file of a database")
                (folder / part.name).write_bytes(inside.read())
        made = open_database(folder, create=False)
        try:
            made.info(), next(made.rows(), None)
        except BaseException:
            made.close()
            raise
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, DeadlineError):
            raise
        if isinstance(error, tarfile.TarError):
            raise ArgumentError(f"{name}: expected a tar of a database's folder: {error}") from None
        if isinstance(error, QkvError | LookupError | TypeError | ValueError | sqlite3.Error):
            told = str(error).replace(str(folder), name).replace(folder.name, name)
            raise ArgumentError(f"{name}: the folder of no database: {told}") from None
        raise
    weakref.finalize(made, shutil.rmtree, folder, ignore_errors=True)
    return made


def find_database(args: Args, known: Databases) -> Database:
    name = args.get("database")
    if name not in known:
        raise unknown_name_error("database", name, known)
    return known[str(name)]
