"""Open a SOURCE as a database: a folder, a served database, or a table read into memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from qkv.cli import arguments, options, terminal
from qkv.cli.command import NothingFoundError
from qkv.database import parsing
from qkv.errors import ArgumentError

if TYPE_CHECKING:
    from qkv.database import Database
    from qkv.serve.remote_database import RemoteDatabase

    OpenDatabase = TypeVar("OpenDatabase", Database, RemoteDatabase)


@contextlib.contextmanager
def open_source(
    source: str | Path,
    read: options.ReadOptions,
    *,
    key: Sequence[str] | None = None,
    value: Sequence[str] | None = None,
    encoder: Any = None,
    skip: bool = False,
) -> Iterator[Database | RemoteDatabase]:
    """Open SOURCE as a database, and close it at the end of the `with`.

    `key` and `value` choose other columns as key and value.
    """
    from qkv.database import Database

    if is_store(source):
        for option, argument in (read.table_options() | {"encoder": encoder}).items():
            if argument is not None:
                raise ArgumentError(
                    f"--{option} is for tables, but {source} is a database: leave it out"
                )
        with open_store_or_remote(source, read.token, skip=skip) as database:
            version = database if read.at is None else database.at(read.at)
            if not key and not value:
                yield version
                return
            with terminal.show_progress("encoding") as progress:
                reindexed = version.reindex(
                    pick_columns(key or version.info()["key"]),
                    pick_columns(value),
                    progress=progress,
                )
            with close_after(reindexed):
                yield reindexed
        return
    if read.at is not None:
        raise ArgumentError(
            f"--at: {redact_source(source)} is a table without versions: `qkv import` it first"
        )
    with terminal.show_progress("reading") as progress:
        database = Database.from_source(
            source,
            key=pick_columns(key),
            value=pick_columns(value),
            encoder=encoder,
            progress=progress,
            **read.table_options(),
        )
    with close_after(database):
        yield database


def redact_source(source: str | Path) -> str:
    """Return SOURCE for messages: without the password, if it is a URL.

    >>> redact_source("postgresql://li:secret@host/books")
    'postgresql://li@host/books'
    """
    return re.sub(r"(?<=://)([^:/@]*):[^/@]*@", r"\1@", str(source))


def is_url(source: str | Path) -> bool:
    """Return whether SOURCE is the URL of a served database."""
    return re.match("https?://", str(source)) is not None


def is_store(source: str | Path) -> bool:
    """Return whether SOURCE names a database: a URL, a folder, or a name that ends in .qkv."""
    return (
        is_url(source)
        or os.path.isdir(source)
        or (str(source).rstrip("/").endswith(".qkv") and not os.path.isfile(source))
    )


@contextlib.contextmanager
def open_store_or_remote(
    path_or_url: str | Path, token: str | None, *, create: bool = False, skip: bool = False
) -> Iterator[Database | RemoteDatabase]:
    """Open the database in a folder or at a URL; close it at the end of the `with`."""
    if not is_url(path_or_url):
        with open_store(path_or_url, create=create, skip=skip) as database:
            yield database
        return
    if skip:
        raise ArgumentError(
            f"--skip-damaged needs a local folder, not {redact_source(path_or_url)}"
        )
    with close_after(connect_remote(str(path_or_url), token)) as remote:
        yield remote


def connect_remote(url: str, token: str | None) -> RemoteDatabase:
    """Connect to a served database, such as http://127.0.0.1:8000/books."""
    from qkv.serve.client import Client

    server, _, name = url.rstrip("/").rpartition("/")
    if server.endswith("/"):  # the URL has no path
        with Client(url, token) as client:
            names = ", ".join(client.databases()) or "none"
        raise ArgumentError(
            f"{redact_source(url)}: add a slash and the name of a database. The server has: {names}"
        )
    return Client(server, token)[unquote(name)]


@contextlib.contextmanager
def open_store(path: str | Path, *, create: bool = False, skip: bool = False) -> Iterator[Database]:
    """Open the database in a folder; close it at the end of the `with`."""
    from qkv.database import open as open_database

    # In a new database, all columns except the key are the value.
    opening = open_database(path, create=None if create else False, value=None, skip_damaged=skip)
    with close_after(opening) as database:
        yield database


@contextlib.contextmanager
def close_after(database: OpenDatabase) -> Iterator[OpenDatabase]:
    """Close a database at the end of the `with`.

    A missing key inside the `with` becomes a `NothingFoundError` that names the nearest keys.
    """
    from qkv.database import KeyNotFoundError

    with database:
        try:
            yield database
        except KeyNotFoundError as error:
            raise NothingFoundError(
                str(error), key=error.key, nearest=error.nearest_keys
            ) from error


def pick_columns(names: Sequence[str] | None) -> Any:
    """Return one name as it is, several names as a tuple, and no names as None."""
    if not names:
        return None
    return names[0] if len(names) == 1 else tuple(names)


def parse_key(database: Database | RemoteDatabase, text: str, what: str = "the query") -> Any:
    """Parse a text as a key of the type of the database's keys. `what` names it in messages."""
    arguments.check_text(text, what)
    if database.info()["key_kind"] in (None, "text"):
        return text
    return parsing.parse_cell_like(text, next(iter(database), text), what)
