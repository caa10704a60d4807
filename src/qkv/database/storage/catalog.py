"""The catalog: one SQLite file with rows, versions, settings, and the list of segments.

The second half of the module opens connections. SQLite needs a shared index of its write-ahead log,
the -shm file. A reader that cannot create this file (read-only folder, full disk) parses the log
itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import numpy as np

from qkv.database.errors import (
    NotAStoreError,
    StoreClosedError,
    StoreDamagedError,
    StoreLockedError,
    StoreUnwritableError,
)
from qkv.database.storage import commit_marker, safe_open
from qkv.database.storage.commit_marker import MarkerWatch
from qkv.database.storage.segments import Layout, SegmentEntry
from qkv.util.types import Closable, interruptible_contextmanager

CATALOG_FILE = "catalogue.sqlite"
FORMAT_VERSION = 5
APPLICATION_ID = 0x716B7601  # the bytes "qkv" and 1

SCHEMA_SQL = """
CREATE TABLE rows (id INTEGER PRIMARY KEY, digest BLOB NOT NULL, record TEXT NOT NULL,
    crc INTEGER NOT NULL, died INTEGER);
CREATE INDEX rows_digest ON rows (digest);
CREATE INDEX rows_died ON rows (died) WHERE died IS NOT NULL;
CREATE TABLE settings (number INTEGER PRIMARY KEY, text TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE generations (number INTEGER PRIMARY KEY, layout TEXT, arrays TEXT, bytes INTEGER,
    checksum BLOB);
CREATE TABLE versions (number INTEGER PRIMARY KEY, time TEXT NOT NULL, what TEXT NOT NULL,
    added INTEGER NOT NULL, removed INTEGER NOT NULL, rows INTEGER NOT NULL,
    last INTEGER NOT NULL, generation INTEGER NOT NULL, settings INTEGER NOT NULL,
    crc INTEGER NOT NULL);
CREATE TABLE segments (file TEXT PRIMARY KEY, generation INTEGER NOT NULL, first INTEGER NOT NULL,
    last INTEGER NOT NULL, rows INTEGER NOT NULL, bytes INTEGER NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE resting (generation INTEGER NOT NULL, id INTEGER NOT NULL, tensors BLOB NOT NULL,
    crc INTEGER NOT NULL, PRIMARY KEY (generation, id)) WITHOUT ROWID;
CREATE TABLE discarded (file TEXT PRIMARY KEY);
CREATE TABLE counters (files INTEGER NOT NULL);
"""

SCHEMA_STATEMENTS = {statement.strip() for statement in SCHEMA_SQL.split(";")[:-1]}
SCHEMA_QUERY = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"
"""Returns the CREATE statements that SQLite has stored."""

T = TypeVar("T")

_DAMAGE_MESSAGES = ("no such table", "no such column", "unsupported file format")
"""Messages of SQLite for a damaged file that come with a generic error code."""

SEGMENT_COLUMNS = "file, generation, first, last, rows, bytes, checksum"

SEGMENT_TYPES, ARRAY_FILE_TYPES = [str, int, int, int, int, int, bytes], [str, int, bytes]
"""The types of the columns that describe a segment, and of those that describe a file of arrays."""


class VersionEntry(NamedTuple):
    """One version in the catalog.

    `last` is the largest row id used so far, `rows` the number of live rows, and `settings` the
    number of the version's settings.
    """

    number: int
    last: int
    rows: int
    generation: int
    settings: int

    @classmethod
    def from_line(cls, line: Sequence[Any]) -> VersionEntry:
        number, _, _, _, _, rows, last, generation, settings = line
        return cls(number, last, rows, generation, settings)


class Catalog(Closable):
    """A connection to the catalog, which threads may share.

    Its errors contain the path of the file.

    >>> catalog = Catalog(None)
    >>> catalog.newest_version()
    VersionEntry(number=0, last=-1, rows=0, generation=0, settings=0)
    >>> catalog.close()
    """

    def __init__(self, path: Path | None, *, write: bool = True, create: bool = False) -> None:
        self.path = path
        self.lock = threading.RLock()
        self._process_id = os.getpid()
        self._newest_entry: VersionEntry | None = None
        self._data_version: Any = None
        self._marker_watch = None if path is None or write else MarkerWatch(path.parent)
        self._seen_entry: tuple[VersionEntry, bytes, float] | None = None
        try:
            self._connection, self._file_state = open_connection(path, write, create)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._translate_error(error) from error
        try:
            self._file_stat = None if path is None else os.stat(path)
            if path is None or create:
                self._create_tables()
        except BaseException:
            self.close()
            raise

    def _create_tables(self) -> None:
        """Create the tables, unless another process has created them."""
        if self.path is not None:
            self.execute("PRAGMA journal_mode = WAL")
        with self.write_transaction():
            if self.fetch_one("PRAGMA application_id") != (0,):
                return
            for statement in SCHEMA_SQL.split(";")[:-1]:
                self.execute(statement)
            self.execute("INSERT INTO counters VALUES (1)")
            self.execute("INSERT INTO generations (number) VALUES (0)")
            self.execute("INSERT INTO settings VALUES (0, '{}', ?)", crc32(b"{}"))
            self.insert_version(VersionEntry(0, -1, 0, 0, 0), "create", 0, 0)
            self.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self.execute(f"PRAGMA user_version = {FORMAT_VERSION}")

    def dump_content(self) -> bytes:
        """Return the complete SQLite database as bytes."""
        return self._connection.serialize()

    def load_content(self, content: bytes) -> None:
        """Replace the content of this catalog in memory by the bytes of `dump_content`."""
        with contextlib.closing(sqlite3.connect(":memory:")) as source:
            source.deserialize(content)
            source.backup(self._connection)
        self._newest_entry = None

    @property
    def changes(self) -> int:
        """The number of rows that this connection has inserted, changed or deleted so far."""
        return self._connection.total_changes

    def is_same_file(self) -> bool:
        """Return whether the path still leads to the file that was opened."""
        if self.path is None or self._file_stat is None:
            return True
        return os.path.samestat(os.stat(self.path, follow_symlinks=False), self._file_stat)

    def check_is_store(self) -> bool:
        """Return True for the catalog of a store and False for an empty file.

        Raise for any other file.
        """
        assert self.path is not None
        application = self.fetch_value("PRAGMA application_id")
        number = self.fetch_value("PRAGMA user_version")
        if application == APPLICATION_ID and number == FORMAT_VERSION:
            if self.fetch_value(
                "SELECT count(*) FROM sqlite_master WHERE type IN ('trigger', 'view')"
            ):
                raise self.damaged_error("it contains triggers or views, which no store has")
            if {sql for (sql,) in self.fetch_all(SCHEMA_QUERY)} != SCHEMA_STATEMENTS:
                raise self.damaged_error("its tables differ from those of a store")
            return True
        if application == APPLICATION_ID and number:
            next_step = "install a newer qkv"
            if 0 < number < FORMAT_VERSION:
                next_step = "export the rows with the qkv that wrote it, and import them"
            raise NotAStoreError(
                f"{self.path.parent} has format {number}, but this qkv reads format "
                f"{FORMAT_VERSION}: {next_step}"
            )
        if application == 0 and self.fetch_value("SELECT count(*) FROM sqlite_master") == 0:
            return False
        raise NotAStoreError(
            f"{self.path} is an SQLite file, but not a qkv catalog: pass the path of a store"
        )

    def fetch_all(self, statement: str, *values: Any) -> list[Any]:
        return self._run_statement(sqlite3.Cursor.fetchall, statement, values)

    def fetch_one(self, statement: str, *values: Any) -> Any:
        return self._run_statement(sqlite3.Cursor.fetchone, statement, values)

    def fetch_value(self, statement: str, *values: Any) -> Any:
        row = self.fetch_one(statement, *values)
        return None if row is None else row[0]

    def execute(self, statement: str, *values: Any) -> int:
        """Execute a statement and return the number of changed rows."""
        return self._run_statement(_get_row_count, statement, values)

    def execute_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> int:
        return self._run_statement(_get_row_count, statement, rows, many=True)

    def _run_statement(
        self, read: Callable[[sqlite3.Cursor], T], statement: str, values: Any, many: bool = False
    ) -> T:
        """Run a statement, and return what `read` returns for its cursor.

        If the file has changed in a way that the connection does not notice, reopen it and repeat.
        """
        self._check_process()
        with self.lock:
            while True:
                connection = self._connection
                run = connection.executemany if many else connection.execute
                try:
                    result = read(run(statement, values))
                except (sqlite3.Error, UnicodeDecodeError) as error:
                    if not self._reopen_if_changed() and not self._reopen_if_half_made(error):
                        raise self._translate_error(error) from error
                else:
                    if not self._reopen_if_changed():
                        return result

    def _reopen_if_changed(self) -> bool:
        """Reopen the file if it has changed although the connection assumes that it does not.

        Return True if it was reopened; then the statement must run again.
        """
        if (
            self._file_state is None
            or self.path is None
            or self._file_state == read_file_state(self.path)
        ):
            return False
        if self._connection.in_transaction:
            raise StoreLockedError(f"another process is writing to {self.path}: try again")
        self._reopen_connection()
        return True

    def _reopen_if_half_made(self, error: sqlite3.Error | UnicodeDecodeError) -> bool:
        """Reopen the file if `error` says that the index of the log is incomplete.

        Return True if it was reopened; then the statement must run again. Only a reader without
        write permission gets this error, and only at the first read of a transaction. So the
        transaction can start again.
        """
        if (
            self._marker_watch is None
            or getattr(error, "sqlite_errorcode", 0) not in WAL_INDEX_CODES
        ):
            return False
        was_in_transaction = self._connection.in_transaction
        self._reopen_connection()
        if was_in_transaction:
            self._connection.execute("BEGIN")
        return True

    def _reopen_connection(self) -> None:
        try:
            connection, file_state = open_connection(self.path, write=False, create=False)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._translate_error(error) from error
        self._connection.close()
        self._connection, self._file_state = connection, file_state
        self._newest_entry = self._seen_entry = None

    def _check_process(self) -> None:
        # A child process has its own copy of a catalog in memory, but shares file locks with its
        # parent.
        if self.path is not None and os.getpid() != self._process_id:
            raise StoreClosedError(
                f"{self._store_name()} was opened before this process was forked: open it again "
                "here"
            )

    def write_transaction(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that runs its body in a write transaction.

        The changes are durable at its end.
        """
        return self._run_transaction("BEGIN IMMEDIATE")

    def read_transaction(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all reads see the same state of the catalog."""
        return self._run_transaction("BEGIN")

    @interruptible_contextmanager
    def _run_transaction(self, begin: str) -> Iterator[None]:
        with self.lock:
            try:
                # After two interrupts, an earlier transaction may still be open.
                self._rollback_transaction()
                self._seen_entry = None  # inside a transaction, all reads see one state
                self.execute(begin)
                yield
                self.execute("COMMIT")
            except BaseException:
                self._rollback_transaction()
                raise
            finally:
                self._newest_entry = self._seen_entry = None

    def _rollback_transaction(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def insert_version(
        self, version_entry: VersionEntry, what: str, added: int, removed: int
    ) -> None:
        """Add a version; `what` is its label, `added` and `removed` are numbers of rows."""
        number, last, rows, generation, settings = version_entry
        line = (number, current_time_text(), what, added, removed, rows, last, generation, settings)
        self.execute(
            "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", *line, line_crc(line)
        )

    def read_versions(self, where: str = "", *values: Any) -> list[tuple[Any, ...]]:
        """Return the versions that match the SQL clause `where`, ascending.

        Each is (number, time, what, added, removed, rows, last, generation, settings).
        """
        versions = []
        for *line, crc in self.fetch_all(
            f"SELECT * FROM versions {where} ORDER BY number", *values
        ):
            if line_crc(line) != crc or not _is_possible_version(line):
                raise self.damaged_error(f"version {line[0]} is not what was written")
            versions.append(tuple(line))
        return versions

    def find_version(self, version: int) -> VersionEntry | None:
        """Return the entry of a version, or None if it does not exist."""
        lines = self.read_versions("WHERE number = ?", version) if abs(version) < 2**63 else []
        return VersionEntry.from_line(lines[0]) if lines else None

    def newest_version(self) -> VersionEntry:
        """Return the entry of the newest version.

        It is the same object until the catalog changes, so that callers can compare with `is`.
        """
        if self.path is None and (newest := self._newest_entry) is not None:
            return newest
        self._check_process()
        watch, seen = self._marker_watch, self._seen_entry
        if watch is not None and seen is not None and watch.is_unchanged(seen[1], seen[2]):
            return seen[0]
        with self.lock:
            marker_state = (b"", 0.0) if watch is None else watch.read_state()
            # SQLite changes data_version when another connection writes, not when this one does.
            changes = None
            self._reopen_if_changed()
            if self.path is not None:
                try:  # `fetch_one` would be slower, and every lookup runs this
                    changes = self._connection.execute("PRAGMA data_version").fetchone()
                except sqlite3.Error:
                    changes = self.fetch_one("PRAGMA data_version")
            if self._newest_entry is None or changes != self._data_version:
                lines = self.read_versions("WHERE number = (SELECT max(number) FROM versions)")
                if not lines:
                    raise self.damaged_error("it has no version")
                self._newest_entry, self._data_version = VersionEntry.from_line(lines[0]), changes
            if not self._connection.in_transaction:  # a transaction sees the state at its start
                self._seen_entry = (self._newest_entry, *marker_state)
            return self._newest_entry

    def read_settings(self, number: int) -> dict[str, Any]:
        """Return the settings with this number."""
        try:
            return dict(json.loads(self.read_settings_text(number)))
        except (TypeError, ValueError, RecursionError) as error:
            raise self.damaged_error("its settings cannot be read") from error

    def read_settings_text(self, number: int) -> str:
        """Return the settings with this number as JSON text, after checking their checksum."""
        row = self.fetch_one("SELECT text, crc FROM settings WHERE number = ?", number)
        if row is None or not isinstance(row[0], str) or crc32(row[0].encode()) != row[1]:
            raise self.damaged_error("the checksum of its settings differs")
        return str(row[0])

    def read_layout(self, generation: int) -> Layout | None:
        """Return the layout of a generation, or None if it has no rows yet."""
        text = self.fetch_value("SELECT layout FROM generations WHERE number = ?", generation)
        try:
            return None if text is None else Layout.from_text(text)
        except (KeyError, TypeError, ValueError) as error:
            raise self.damaged_error("a layout in it cannot be read") from error

    def list_segments(self, generation: int | None = None) -> list[SegmentEntry]:
        """Return the segments sorted by generation and first row id.

        With a generation, return only its segments.
        """
        where = "" if generation is None else "WHERE generation = ?"
        values = () if generation is None else (generation,)
        lines = self.fetch_all(
            f"SELECT {SEGMENT_COLUMNS} FROM segments {where} ORDER BY generation, first", *values
        )
        return [SegmentEntry(*line) for line in self._check_types(lines, SEGMENT_TYPES)]

    def list_array_files(self, generation: int | None = None) -> list[tuple[str, int, bytes]]:
        """Return (file, size in bytes, checksum) of array files.

        With a generation, return only its file.
        """
        where = "" if generation is None else "AND number = ?"
        values = () if generation is None else (generation,)
        lines = self.fetch_all(
            f"SELECT arrays, bytes, checksum FROM generations WHERE arrays IS NOT NULL {where}",
            *values,
        )
        return [*self._check_types(lines, ARRAY_FILE_TYPES)]

    def _check_types(self, lines: Iterable[Any], types: Sequence[type]) -> Iterator[Any]:
        """Yield the lines if their cells have these types, else raise.

        The check is necessary because SQLite stores any type in any column.
        """
        for line in lines:
            if list(map(type, line)) != types:
                raise self.damaged_error("an entry for a file has wrong types")
            yield line

    def list_files(self) -> set[str]:
        """Return the names of all files that belong to the store."""
        statement = "SELECT file FROM segments UNION SELECT arrays FROM generations"
        return {str(file) for (file,) in self.fetch_all(statement) if file is not None}

    def buffer_rows(self, generation: int, ids: Iterable[int], packed: Iterable[bytes]) -> None:
        """Store rows in the catalog that are too few for a segment.

        `packed` has each row's tensors as bytes.
        """
        lines = (
            (generation, row, tensors, crc32(tensors))
            for row, tensors in zip(ids, packed, strict=True)
        )
        self.execute_many("INSERT INTO resting VALUES (?, ?, ?, ?)", lines)

    def set_layout(self, generation: int, layout: Layout) -> None:
        """Set the layout of a generation."""
        statement = "UPDATE generations SET layout = ? WHERE number = ?"
        self.execute(statement, layout.to_text(), generation)

    def insert_settings(self, text: str | None, old: int) -> int:
        """Store settings (JSON text) and return their number; if `text` is None, return `old`."""
        if text is None:
            return old
        new = 1 + int(self.fetch_value("SELECT max(number) FROM settings"))
        self.execute("INSERT INTO settings VALUES (?, ?, ?)", new, text, crc32(text.encode()))
        return new

    def discard_segments(self, entries: Sequence[SegmentEntry]) -> None:
        """Move segments to the list of discarded files.

        The files are removed after the transaction.
        """
        if entries:
            files = [(entry.file,) for entry in entries]
            self.execute_many("DELETE FROM segments WHERE file = ?", files)
            self.execute_many("INSERT OR IGNORE INTO discarded VALUES (?)", files)

    def damaged_error(self, what: str) -> StoreDamagedError:
        """Return the error for a damaged catalog; `what` says what is wrong."""
        return StoreDamagedError(
            f"{self.path} is damaged: {what}. Restore it from a backup, or recover what can be "
            "read with qkv check --repair, which keeps the damaged file"
        )

    def close(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None:
            with self.lock:
                self._newest_entry = self._seen_entry = self._file_state = None
                connection.close()
                if self._marker_watch is not None:
                    self._marker_watch.close()

    def _store_name(self) -> str:
        """The name of the store for messages."""
        return "the store" if self.path is None else self.path.parent.name

    def _translate_error(self, error: sqlite3.Error | UnicodeDecodeError) -> Exception:
        """Return the error of this package for an error of SQLite, or the error itself."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        text = str(error)
        if "closed database" in text:
            return StoreClosedError(f"{self._store_name()} is closed: open it again")
        # SQLite's messages quote text of the file, which may not be valid UTF-8.
        if isinstance(error, UnicodeDecodeError) or "UTF-8" in text:
            return self.damaged_error("its text is not UTF-8")
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or any(
            message in text for message in _DAMAGE_MESSAGES
        ):
            return self.damaged_error(text)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreLockedError(
                f"{self.path} is busy ({text}): try again when its writer has finished"
            )
        if code in UNWRITABLE_CODES:
            return StoreUnwritableError(
                f"{self.path}: {text}; nothing was changed. Check the free disk space, the "
                "folder's permissions and the number of open files, and try again"
            )
        return error


def _get_row_count(cursor: sqlite3.Cursor) -> int:
    return cursor.rowcount


def current_time_text() -> str:
    """Return the current UTC time as ISO text with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def line_crc(line: Iterable[Any]) -> int:
    """Return the checksum of a version's entry, computed from its cells joined by "|"."""
    return crc32("|".join(map(str, line)).encode(errors="replace"))


def _is_possible_version(line: Sequence[Any]) -> bool:
    """Return whether the numbers of a version are plausible.

    An untrusted store may contain impossible numbers with a valid checksum.
    """
    number, _, _, added, removed, rows, last, generation, settings = line
    counts = (number, added, removed, rows, generation, settings)
    are_integers = all(type(x) is int for x in (*counts, last))
    return are_integers and min(counts) >= 0 and rows <= last + 1


def row_crc(row: int, digest: bytes, record: str) -> int:
    """Return the checksum of a row's id, digest and record; −1 if they have wrong types."""
    try:
        return crc32(digest + record.encode(), row & 0xFFFFFFFF)
    except (TypeError, AttributeError):
        return -1


def is_buffered_row_intact(row: Any, packed: Any, crc: Any) -> bool:
    """Return whether a buffered row matches its checksum.

    The arguments may have any type, because a damaged catalog may contain any type.
    """
    return isinstance(row, int) and isinstance(packed, bytes) and crc32(packed) == crc


WRITER_WAIT_SECONDS = 0.2
"""How long to wait for a writer that is starting and is about to create the log index."""
UNWRITABLE_CODES = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
)
WAL_INDEX_CODES = (sqlite3.SQLITE_READONLY_RECOVERY, sqlite3.SQLITE_READONLY_CANTINIT)
"""Errors that a reader without write permission gets if the log index is missing or incomplete."""
PAGE_SIZES = tuple(1 << i for i in range(9, 17))
"""The page sizes that SQLite allows, in bytes."""
_READER_STATEMENTS = (
    "PRAGMA query_only = 1",
    "PRAGMA trusted_schema = OFF",
    "SELECT count(*) FROM sqlite_master",
)
_WRITER_STATEMENTS = (
    "PRAGMA synchronous = FULL",
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cache_size = -65536",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA journal_size_limit = 67108864",
)


def open_connection(
    path: Path | None, write: bool, create: bool
) -> tuple[sqlite3.Connection, tuple[Any, ...] | None]:
    """Open a connection to the catalog.

    Also return the state of the file if the connection assumes that the file does not change, or
    None if it does not.
    """
    if path is None:
        return _open_sqlite(":memory:"), None
    safe_open.refuse_links(*(f"{path}{suffix}" for suffix in ("", "-wal", "-shm", "-journal")))
    name = path.absolute().as_uri()
    if write:
        return _open_sqlite(f"{name}?mode={'rwc' if create else 'rw'}", *_WRITER_STATEMENTS), None
    # Readers need write permission too, because SQLite updates the log index.
    mode = "rw" if os.access(path.parent, os.W_OK) else "ro"
    until = time.monotonic() + WRITER_WAIT_SECONDS
    while True:
        try:
            return _open_sqlite(f"{name}?mode={mode}", *_READER_STATEMENTS), None
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in UNWRITABLE_CODES:
                raise
            file_state = read_file_state(path)
        # On a full disk or in a read-only folder, SQLite cannot create the log index. Without a
        # log it needs none. If there is a log, its writer may be creating the index right now.
        try:
            if not file_state[0]:
                return _open_sqlite(f"{name}?immutable=1", *_READER_STATEMENTS), file_state
            if time.monotonic() > until:
                return _open_sqlite(
                    ":memory:", *_READER_STATEMENTS, content=_read_with_log(path)
                ), file_state
        except sqlite3.Error:
            if read_file_state(path) == file_state:
                raise
        except OSError as error:
            if read_file_state(path) == file_state:
                raise safe_open.unreadable_error(path, error) or error from None
        time.sleep(0.005)


def read_file_state(path: Path) -> tuple[Any, ...]:
    """Return the length of the log, and everything else that changes when a writer commits."""
    try:
        log = os.stat(f"{path}-wal")
    except FileNotFoundError:
        log_state = 0, 0
    else:
        log_state = log.st_size, log.st_mtime_ns
    file = os.stat(path)
    return (
        *log_state,
        file.st_ino,
        file.st_size,
        file.st_mtime_ns,
        commit_marker.read_marker(path.parent),
    )


def _open_sqlite(name: str, *statements: str, content: bytes | None = None) -> sqlite3.Connection:
    """Open a SQLite connection and run the statements.

    With `content`, the connection gets this database in memory.
    """
    connection = sqlite3.connect(
        name, timeout=10.0, isolation_level=None, check_same_thread=False, uri=True
    )
    try:
        if content is not None:
            connection.deserialize(content)
        for statement in statements:
            connection.execute(statement).fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _read_with_log(path: Path) -> bytes:
    """Return the content of the catalog with the committed pages of its write-ahead log.

    SQLite itself would need a writable copy of both files, for which a full disk has no space. So
    the log is parsed here.
    """
    with open(path, "rb", opener=safe_open.open_regular_file) as file:
        content = bytearray(file.read())
    with open(f"{path}-wal", "rb", opener=safe_open.open_regular_file) as file:
        size, count, pages = read_log_pages(file.read())
    if pages:
        # An untrusted log may state any length.
        count = min(count, len(content) // size + len(pages))
        content[count * size :] = bytes(max(0, count * size - len(content)))
    for number, page in pages.items():
        if 0 < number <= count:
            content[(number - 1) * size : number * size] = page
    content[18:20] = b"\1\1"  # set the flags in the header that mean: no log
    return bytes(content)


def read_log_pages(log: bytes) -> tuple[int, int, dict[int, bytes]]:
    """Return the page size, the number of pages of the file, and the committed pages by number.

    A log is a header of 32 bytes, then frames of 24 bytes plus one page. A frame is valid if it has
    the salt of the header, and the right checksum of everything before it. Frames after the last
    commit are ignored. See https://sqlite.org/fileformat2.html#the_write_ahead_log
    """
    head = np.frombuffer(log[:32], ">u4")
    if len(head) < 8 or head[0] | 1 != 0x377F0683 or head[2] not in PAGE_SIZES:
        return 0, 0, {}
    size, order = int(head[2]), ">u4" if head[0] & 1 else "<u4"
    frames = np.frombuffer(log, np.uint8, offset=32)
    frames = frames[: len(frames) // (24 + size) * (24 + size)].reshape(-1, 24 + size)
    heads = np.ascontiguousarray(frames[:, :24]).view(">u4")
    body = np.concatenate([frames[:, :8], frames[:, 24:]], axis=1)
    step, sums = _log_checksums(body.view(order).astype(np.uint32))
    _, start = _log_checksums(np.frombuffer(log[:24], order).astype(np.uint32)[None])
    checksum, count = start[0], 0
    uncommitted: dict[int, bytes] = {}
    pages: dict[int, bytes] = {}
    if (checksum != head[6:]).any():
        return size, 0, {}
    for frame, frame_head, frame_sum in zip(frames, heads, sums, strict=True):
        checksum = step @ checksum + frame_sum
        if (frame_head[2:4] != head[4:6]).any() or (frame_head[4:] != checksum).any():
            break
        uncommitted[int(frame_head[0])] = frame[24:].tobytes()
        if frame_head[1]:  # the number of pages; only the last frame of a commit has it
            count = int(frame_head[1])
            pages |= uncommitted
            uncommitted = {}
    return size, count, pages


def _log_checksums(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return SQLite's checksum of each row of words (m, 2n) as A, b: s ← A s + b, modulo 2³².

    For each pair of words x, y: s₀ ← s₀ + s₁ + x, then s₁ ← s₁ + s₀ + y.
    """
    step, power = np.array([[1, 1], [1, 2]], np.uint32), np.eye(2, dtype=np.uint32)
    pair = np.array([[1, 1], [0, 1]], np.uint32)  # x is added to both sums, y only to the second
    weights = np.empty((words.shape[1], 2), np.uint32)
    for i in range(words.shape[1] - 2, -1, -2):
        weights[i : i + 2] = pair @ power.T
        power = power @ step
    return power, words @ weights
