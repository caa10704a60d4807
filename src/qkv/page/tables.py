"""The page's calls on databases: list, query, upload, and choose other key columns."""

from __future__ import annotations

import base64
import binascii
import io
import shutil
import sqlite3
import tarfile
import tempfile
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qkv import scores, weightings
from qkv.answer import Answer
from qkv.database import Database, parsing
from qkv.database import open as open_database
from qkv.database.errors import SkippedRowsWarning, collect_skipped_rows
from qkv.database.sources.table import SourceLimits, limit_sources
from qkv.database.storage.folder import is_store_file
from qkv.errors import ArgumentError, QkvError, collect_warnings, unknown_name_error
from qkv.page import limits
from qkv.page.components import build_component
from qkv.util.deadline import DeadlineError, limit_time
from qkv.util.formatting import to_jsonable

Args = Mapping[str, Any]
Databases = MutableMapping[str, Database]

FORMATS = ("csv", "tsv", "jsonl", "parquet", "arrow", "qkv")
"""Formats of uploads, by file suffix; `qkv` is a tar of the folder of a database."""

MAX_REKEYED_ROWS = 200_000
"""Largest database that the page may re-encode with other key columns."""

PREVIEW_ROWS = 10
"""Rows that the page shows before the first query."""

MAX_NAMED_SKIPPED_ROWS = 1000
"""Skipped rows of an upload that are listed."""

MAX_SHOWN_WARNINGS = 5
"""Warnings about an upload that the page shows."""

SUMMARY_FIELDS = ("rows", "version", "columns", "key", "value", "key_kind", "value_kind")


def list_databases(args: Args, databases: Databases) -> list[dict[str, Any]]:
    """List the databases."""
    return [summarize_database(name, database) for name, database in databases.items()]


def summarize_database(name: str, database: Database) -> dict[str, Any]:
    """Return the size, columns, key and value of a database.

    >>> from qkv import Database
    >>> summarize_database("names", Database({"Li": "Mu"}))["columns"]
    ['key', 'value']
    """
    message: Mapping[str, Any] = database.info()
    return {"name": name, **{field: message[field] for field in SUMMARY_FIELDS}}


def ask_database(args: Args, databases: Databases) -> dict[str, Any]:
    """Answer a query from `database` at version `at`; `explained` describes the answer in words.

    >>> from qkv import Database
    >>> ask_database({"database": "ages", "query": "3"}, {"ages": Database({3: "Li", 40: "Mu"})})[
    ...     "value"
    ... ]
    'Li'
    """
    found = find_answer(args, databases)
    return {**found.to_dict(), "explained": found.explain()}


def find_answer(args: Args, databases: Databases) -> Answer:
    """Return the `Answer` of a call."""
    database = find_database(args, databases)
    query = parsing.cell_from_json(args["query"], next(iter(database), None))
    if isinstance(query, list):
        raise ArgumentError("query: a page asks one query at a time, not a list")
    if isinstance(query, str):
        limits.check_count("characters of a query", len(query), limits.MAX_QUERY_CHARACTERS)
    options = {"top": args.get("top"), "where": condition(args)}
    for name, registry in (("score", scores.NAMES), ("weighting", weightings.NAMES)):
        if args.get(name):
            options[name] = build_component(registry, args[name])
    options = {name: option for name, option in options.items() if option}
    answer: Answer = _at_version(database, args).ask(query, **options)
    return answer


def list_rows(args: Args, databases: Databases) -> list[dict[str, Any]]:
    """Return the first rows of `database` at version `at` that pass `where`.

    >>> from qkv import Database
    >>> list_rows({"database": "ages", "where": "key > 3"}, {"ages": Database({3: "Li", 40: "Mu"})})
    [{'key': 40, 'value': 'Mu'}]
    """
    past = _at_version(find_database(args, databases), args)
    return [to_jsonable(row) for row in past.rows(where=condition(args), count=PREVIEW_ROWS)]


def condition(args: Args) -> Any:
    """Return the condition `where` of a call, or None; refuse one that is too long."""
    where = args.get("where") or None
    if isinstance(where, str):
        limits.check_count("characters of where", len(where), limits.MAX_WHERE_CHARACTERS)
    return where


def _at_version(database: Database, args: Args) -> Database:
    """Return the database at version `at`, or the current one."""
    at = args.get("at")
    if at is None:
        return database
    if type(at) is not int or not 0 <= at <= 2**53:
        raise ArgumentError(f"at must be the number of a version, not {at!r}")
    return database.at(at)


def list_versions(args: Args, databases: Databases) -> list[dict[str, Any]]:
    """Return the versions of a database, the oldest first."""
    return [asdict(version) for version in find_database(args, databases).versions()]


def upload_table(args: Args, databases: Databases, deadline: float | None = None) -> dict[str, Any]:
    """Create the database `name` from a file: its bytes are `data` or the text `base64`.

    At the `deadline` reading stops, and the upload is discarded.
    """
    data = args.get("data")
    if data is None:
        try:
            data = base64.b64decode(args["base64"], validate=True)
        except (KeyError, TypeError, binascii.Error):
            raise ArgumentError("upload: expected the file as base64") from None
    name = str(args["name"])
    with collect_skipped_rows() as skipped, collect_warnings() as texts, limit_time(deadline):
        database = load_table(data, name, str(args["format"]), args.get("key"), args.get("value"))
    return _register_database(name, database, databases, skipped, texts)


def rekey_database(
    args: Args, databases: Databases, deadline: float | None = None
) -> dict[str, Any]:
    """Create the database `name` from the rows of `database`, with another `key` and `value`.

    At the `deadline` the work stops, and its result is discarded.
    """
    source = find_database(args, databases)
    if len(source) > MAX_REKEYED_ROWS:
        raise ArgumentError(
            f"{args['database']} has {len(source):,} rows; the page can change the key of at most "
            f"{MAX_REKEYED_ROWS:,}: import the table with this key"
        )
    with collect_skipped_rows() as skipped, limit_time(deadline):
        database = source.reindex(args["key"], args.get("value"))
    return _register_database(
        str(args.get("name") or args["database"]), database, databases, skipped
    )


def _register_database(
    name: str,
    database: Database,
    databases: Databases,
    skipped: list[SkippedRowsWarning],
    warning_texts: Sequence[str] = (),
) -> dict[str, Any]:
    try:
        databases[name] = database
    except BaseException:
        database.close()
        raise
    reasons = [{"why": str(one), "rows": one.rows[:MAX_NAMED_SKIPPED_ROWS]} for one in skipped]
    # The page shows other warnings at the same place.
    reasons += [{"why": text, "rows": []} for text in warning_texts[:MAX_SHOWN_WARNINGS]]
    return {**summarize_database(name, database), "skipped": reasons}


def load_table(data: bytes, name: str, form: str, key: Any = None, value: Any = None) -> Database:
    """Load the bytes of a file as a database in memory.

    Without `key` and `value`, columns are chosen as in `Database.from_columns`.

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
        source_limits = SourceLimits(limits.MAX_CELL_CHARACTERS, limits.MAX_COLUMNS)
        try:
            limits.check_file(path, form)
            with limit_sources(source_limits):
                return Database.from_source(path, key=key or None, value=value or None)
        except DeadlineError:
            raise
        except QkvError as error:
            # The message must not show the path of the temporary file.
            raise ArgumentError(str(error).replace(str(path), name)) from None


def _open_tar(data: bytes, name: str) -> Database:
    """Open the database in a tar; its temporary folder is removed when the object is freed."""
    folder = Path(tempfile.mkdtemp(prefix="qkv-"))
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for part in tar:
                # A sparse file could claim any length.
                is_plain = part.isreg() and not part.issparse() and part.size <= len(data)
                content = tar.extractfile(part) if is_plain else None
                if content is None or not is_store_file(part.name):
                    raise ArgumentError(f"{part.name[:60]!r} is not a file of a database's folder")
                (folder / part.name).write_bytes(content.read())
        database = open_database(folder, create=False)
        try:
            database.info(), next(database.rows(), None)
        except BaseException:
            database.close()
            raise
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, DeadlineError):
            raise
        if isinstance(error, tarfile.TarError):
            raise ArgumentError(f"{name} is not a tar of a database's folder: {error}") from None
        if isinstance(error, QkvError | LookupError | TypeError | ValueError | sqlite3.Error):
            message = str(error).replace(str(folder), name).replace(folder.name, name)
            raise ArgumentError(f"{name} is not a valid database: {message}") from None
        raise
    weakref.finalize(database, shutil.rmtree, folder, ignore_errors=True)
    return database


def find_database(args: Args, databases: Databases) -> Database:
    name = args.get("database")
    if name not in databases:
        raise unknown_name_error("database", name, databases)
    return databases[str(name)]
