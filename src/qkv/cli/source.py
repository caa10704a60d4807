"""A SOURCE as an open database: a folder or a server's as it is, a table read into memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from qkv.cli import options, screen, values
from qkv.cli.command import Nothing
from qkv.database import spelled
from qkv.errors import ArgumentError

if TYPE_CHECKING:
    from qkv.database import Database
    from qkv.serve.remote import Remote

    Held = TypeVar("Held", Database, Remote)


@contextlib.contextmanager
def opened(
    source: str | Path,
    read: options.Read,
    *,
    key: Sequence[str] | None = None,
    value: Sequence[str] | None = None,
    encoder: Any = None,
    skip: bool = False,
) -> Iterator[Database | Remote]:
    """The database that SOURCE and the options of its columns name, closed at the end."""
    from qkv.database import Database

    if is_store(source):
        for option, given in (read.of_tables() | {"encoder": encoder}).items():
            if given is not None:
                raise ArgumentError(f"--{option}: {source} is a database and has its own already")
        with held(source, read.token, skip=skip) as database:
            chosen = database if read.at is None else database.at(read.at)
            if not key and not value:
                yield chosen
                return
            with screen.progress("encoding") as progress:
                other = chosen.by(
                    picked(key or chosen.info()["key"]), picked(value), progress=progress
                )
            with closing(other):
                yield other
        return
    if read.at is not None:
        raise ArgumentError(
            f"--at: {named(source)} is a table and has no versions; `qkv import` it first"
        )
    with screen.progress("reading") as progress:
        database = Database.from_source(
            source,
            key=picked(key),
            value=picked(value),
            encoder=encoder,
            progress=progress,
            **read.of_tables(),
        )
    with closing(database):
        yield database


def named(source: str | Path) -> str:
    """SOURCE to be shown, without the password of a URL.

    >>> named("postgresql://li:secret@host/books")
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
def held(
    place: str | Path, token: str | None, *, create: bool = False, skip: bool = False
) -> Iterator[Database | Remote]:
    """The database in a folder, or of a server; closed at the end."""
    if not is_url(place):
        with stored(place, create=create, skip=skip) as database:
            yield database
        return
    if skip:
        raise ArgumentError(f"--skip-damaged: {named(place)} is read by its server")
    with closing(served(str(place), token)) as remote:
        yield remote


def served(url: str, token: str | None) -> Remote:
    """The database of a URL such as http://127.0.0.1:8000/books."""
    from qkv.serve.client import Client

    server, _, name = url.rstrip("/").rpartition("/")
    if server.endswith("/"):  # as of http://
        with Client(url, token) as client:
            known = ", ".join(client.databases()) or "none"
        raise ArgumentError(f"{named(url)}: name a database behind a slash; there are: {known}")
    return Client(server, token)[unquote(name)]


@contextlib.contextmanager
def stored(path: str | Path, *, create: bool = False, skip: bool = False) -> Iterator[Database]:
    """The database in a folder, closed at the end."""
    from qkv.database import open as open_database

    # A new one takes all columns beside its key as the value.
    opening = open_database(path, create=create, value=None, skip_damaged=skip)
    with closing(opening) as database:
        yield database


@contextlib.contextmanager
def closing(database: Held) -> Iterator[Held]:
    """Close it at the end; before that, let an absent key look for its nearest."""
    from qkv.database import AbsentKey

    with database:
        try:
            yield database
        except AbsentKey as error:
            raise Nothing(str(error), key=error.key, nearest=error.nearest) from error


def picked(names: Sequence[str] | None) -> Any:
    """One column by its name, several as a tuple, none as None."""
    if not names:
        return None
    return names[0] if len(names) == 1 else tuple(names)


def cell(database: Database | Remote, text: str, what: str = "the query") -> Any:
    """The text as the kind of key that the database has."""
    values.check_text(text, what)
    if database.info()["key_kind"] in (None, "text"):
        return text
    return spelled.like(text, next(iter(database), text), what)
