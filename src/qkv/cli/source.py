"""A SOURCE as an open database: a folder or a server's as it is, a table read into memory."""

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
    """The database that SOURCE and the options of its columns name, closed at the end."""
    from qkv.database import Database

    if is_store(source):
        for option, given in (read.table_options() | {"encoder": encoder}).items():
            if given is not None:
                raise ArgumentError(f"--{option}: {source} is a database and has its own already")
        with open_store_or_remote(source, read.token, skip=skip) as database:
            chosen = database if read.at is None else database.at(read.at)
            if not key and not value:
                yield chosen
                return
            with terminal.show_progress("encoding") as progress:
                other = chosen.reindex(
                    pick_columns(key or chosen.info()["key"]),
                    pick_columns(value),
                    progress=progress,
                )
            with close_after(other):
                yield other
        return
    if read.at is not None:
        raise ArgumentError(
            f"--at: {redact_source(source)} is a table and has no versions; `qkv import` it first"
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
    """SOURCE to be shown, without the password of a URL.

    >>> redact_source("postgresql://li:secret@host/books")
    'postgresql://li@host/books'
    """
    return re.sub(r"(?<=://)([^:/@]*):[^/@]*@", r"\1@", str(source))


def is_url(source: str | Path) -> bool:
    """Whether SOURCE is a database of a server."""
    return re.match("https?://", str(source)) is not None


def is_store(source: str | Path) -> bool:
    """Whether SOURCE is a database: a server's, a folder, or named like one that is missing."""
    return (
        is_url(source)
        or os.path.isdir(source)
        or (str(source).rstrip("/").endswith(".qkv") and not os.path.isfile(source))
    )


@contextlib.contextmanager
def open_store_or_remote(
    place: str | Path, token: str | None, *, create: bool = False, skip: bool = False
) -> Iterator[Database | RemoteDatabase]:
    """The database in a folder, or of a server; closed at the end."""
    if not is_url(place):
        with open_store(place, create=create, skip=skip) as database:
            yield database
        return
    if skip:
        raise ArgumentError(f"--skip-damaged: {redact_source(place)} is read by its server")
    with close_after(connect_remote(str(place), token)) as remote:
        yield remote


def connect_remote(url: str, token: str | None) -> RemoteDatabase:
    """The database of a URL such as http://127.0.0.1:8000/books."""
    from qkv.serve.client import Client

    server, _, name = url.rstrip("/").rpartition("/")
    if server.endswith("/"):  # as of http://
        with Client(url, token) as client:
            known = ", ".join(client.databases()) or "none"
        raise ArgumentError(
            f"{redact_source(url)}: name a database behind a slash; there are: {known}"
        )
    return Client(server, token)[unquote(name)]


@contextlib.contextmanager
def open_store(path: str | Path, *, create: bool = False, skip: bool = False) -> Iterator[Database]:
    """The database in a folder, closed at the end."""
    from qkv.database import open as open_database

    # A new one takes all columns beside its key as the value.
    opening = open_database(path, create=create, value=None, skip_damaged=skip)
    with close_after(opening) as database:
        yield database


@contextlib.contextmanager
def close_after(database: OpenDatabase) -> Iterator[OpenDatabase]:
    """Close it at the end; before that, let an absent key look for its nearest."""
    from qkv.database import KeyNotFoundError

    with database:
        try:
            yield database
        except KeyNotFoundError as error:
            raise NothingFoundError(
                str(error), key=error.key, nearest=error.nearest_keys
            ) from error


def pick_columns(names: Sequence[str] | None) -> Any:
    """One column by its name, several as a tuple, none as None."""
    if not names:
        return None
    return names[0] if len(names) == 1 else tuple(names)


def parse_key(database: Database | RemoteDatabase, text: str, what: str = "the query") -> Any:
    """The text as the kind of key that the database has."""
    arguments.check_text(text, what)
    if database.info()["key_kind"] in (None, "text"):
        return text
    return parsing.parse_cell_like(text, next(iter(database), text), what)
