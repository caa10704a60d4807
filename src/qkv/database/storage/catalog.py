"""The catalogue: one SQLite file with rows, versions, settings, and the list of segments."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from qkv.database.errors import (
    NotAStoreError,
    StoreClosedError,
    StoreDamagedError,
    StoreLockedError,
    StoreUnwritableError,
)
from qkv.database.storage.commit_marker import MarkerWatch
from qkv.database.storage.connection import (
    UNWRITABLE_CODES,
    WAL_INDEX_CODES,
    open_connection,
    read_file_state,
)
from qkv.util.types import Closable, interruptible_contextmanager

CATALOG_FILE = "catalogue.sqlite"
FORMAT_VERSION = 5
APPLICATION_ID = 0x716B7601  # "qkv" and 1

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
"""What SQLite keeps of them."""

T = TypeVar("T")

_DAMAGE_MESSAGES = ("no such table", "no such column", "unsupported file format")
"""What SQLite says of damage under the code of a plain error."""

SEGMENT_COLUMNS = "file, generation, first, last, rows, bytes, checksum"


class VersionEntry(NamedTuple):
    """One version: its number, the last id given out, how many rows live, and what they use."""

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
    """A connection that threads share, whose errors name the file.

    >>> catalogue = Catalog(None)
    >>> catalogue.newest_version()
    VersionEntry(number=0, last=-1, rows=0, generation=0, settings=0)
    >>> catalogue.close()
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
        """Make the tables, unless another process was faster."""
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
        """All that it holds."""
        return self._connection.serialize()

    def load_content(self, content: bytes) -> None:
        """Hold that, in memory."""
        with contextlib.closing(sqlite3.connect(":memory:")) as given:
            given.deserialize(content)
            given.backup(self._connection)
        self._newest_entry = None

    @property
    def changes(self) -> int:
        """How many rows this connection has changed."""
        return self._connection.total_changes

    def is_same_file(self) -> bool:
        """Whether the file that was opened is still the one at its path."""
        if self.path is None or self._file_stat is None:
            return True
        return os.path.samestat(os.stat(self.path, follow_symlinks=False), self._file_stat)

    def check_is_store(self) -> bool:
        """True for a store, False for an empty file; an error for anything else."""
        assert self.path is not None
        application = self.fetch_value("PRAGMA application_id")
        number = self.fetch_value("PRAGMA user_version")
        if application == APPLICATION_ID and number == FORMAT_VERSION:
            if self.fetch_value(
                "SELECT count(*) FROM sqlite_master WHERE type IN ('trigger', 'view')"
            ):
                raise self.damaged_error("it holds statements of its own, which a store never does")
            if {sql for (sql,) in self.fetch_all(SCHEMA_QUERY)} != SCHEMA_STATEMENTS:
                raise self.damaged_error("its tables are not those that were written")
            return True
        if application == APPLICATION_ID and number:
            mend = "install a newer qkv"
            if 0 < number < FORMAT_VERSION:
                mend = "export the rows with the qkv that wrote it, and import them"
            raise NotAStoreError(
                f"{self.path.parent} has format {number}, and this qkv reads {FORMAT_VERSION}: "
                f"{mend}"
            )
        if application == 0 and self.fetch_value("SELECT count(*) FROM sqlite_master") == 0:
            return False
        raise NotAStoreError(
            f"{self.path} is an SQLite file, but not a qkv catalogue: give the path of a store"
        )

    def fetch_all(self, statement: str, *values: Any) -> list[Any]:
        return self._run_statement(sqlite3.Cursor.fetchall, statement, values)

    def fetch_one(self, statement: str, *values: Any) -> Any:
        return self._run_statement(sqlite3.Cursor.fetchone, statement, values)

    def fetch_value(self, statement: str, *values: Any) -> Any:
        found = self.fetch_one(statement, *values)
        return None if found is None else found[0]

    def execute(self, statement: str, *values: Any) -> int:
        """Execute and give the number of rows that changed."""
        return self._run_statement(_get_row_count, statement, values)

    def execute_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> int:
        return self._run_statement(_get_row_count, statement, rows, many=True)

    def _run_statement(
        self, give: Callable[[sqlite3.Cursor], T], statement: str, values: Any, many: bool = False
    ) -> T:
        self._check_process()
        with self.lock:
            while True:
                connection = self._connection
                run = connection.executemany if many else connection.execute
                try:
                    found = give(run(statement, values))
                except (sqlite3.Error, UnicodeDecodeError) as error:
                    if not self._reopen_if_changed() and not self._reopen_if_half_made(error):
                        raise self._translate_error(error) from error
                else:
                    if not self._reopen_if_changed():
                        return found

    def _reopen_if_changed(self) -> bool:
        """Whether somebody has written what was read as a file that nobody writes: it is opened
        again, and must be read again."""
        if (
            self._file_state is None
            or self.path is None
            or self._file_state == read_file_state(self.path)
        ):
            return False
        if self._connection.in_transaction:
            raise StoreLockedError(f"{self.path} is being written: try again")
        self._reopen_connection()
        return True

    def _reopen_if_half_made(self, error: sqlite3.Error | UnicodeDecodeError) -> bool:
        """Whether a reader met a log's index that is half made, which he may not make himself: the
        file is opened again. It is met where a state of the file is taken, so that a transaction
        has read nothing yet."""
        if (
            self._marker_watch is None
            or getattr(error, "sqlite_errorcode", 0) not in WAL_INDEX_CODES
        ):
            return False
        begun = self._connection.in_transaction
        self._reopen_connection()
        if begun:
            self._connection.execute("BEGIN")
        return True

    def _reopen_connection(self) -> None:
        try:
            connection, still = open_connection(self.path, write=False, create=False)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._translate_error(error) from error
        self._connection.close()
        self._connection, self._file_state = connection, still
        self._newest_entry = self._seen_entry = None

    def _check_process(self) -> None:
        # One in memory is the child's own copy; that of a file shares its locks with the parent.
        if self.path is not None and os.getpid() != self._process_id:
            raise StoreClosedError(
                f"{self._store_name()} was opened before this process was forked: open it again "
                "here"
            )

    def write_transaction(self) -> contextlib.AbstractContextManager[None]:
        """All of it or nothing, durable at the end."""
        return self._run_transaction("BEGIN IMMEDIATE")

    def read_transaction(self) -> contextlib.AbstractContextManager[None]:
        """Several reads of one state."""
        return self._run_transaction("BEGIN")

    @interruptible_contextmanager
    def _run_transaction(self, begin: str) -> Iterator[None]:
        with self.lock:
            try:
                # One that was interrupted twice may not have come to its end.
                self._rollback_transaction()
                self._seen_entry = None  # inside, all is read from the catalogue at one moment
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

    def insert_version(self, edition: VersionEntry, what: str, added: int, removed: int) -> None:
        """A new version."""
        number, last, rows, generation, settings = edition
        line = (number, current_time_text(), what, added, removed, rows, last, generation, settings)
        self.execute(
            "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", *line, line_crc(line)
        )

    def read_versions(self, where: str = "", *values: Any) -> list[tuple[Any, ...]]:
        """(number, time, what, added, removed, rows, last, generation, settings), ascending."""
        found = []
        for *line, crc in self.fetch_all(
            f"SELECT * FROM versions {where} ORDER BY number", *values
        ):
            if line_crc(line) != crc or not _is_possible_version(line):
                raise self.damaged_error(f"version {line[0]} is not what was written")
            found.append(tuple(line))
        return found

    def find_version(self, version: int) -> VersionEntry | None:
        """A version, where there is one."""
        found = self.read_versions("WHERE number = ?", version) if abs(version) < 2**63 else []
        return VersionEntry.from_line(found[0]) if found else None

    def newest_version(self) -> VersionEntry:
        """The newest version, read again only where it can be another one: then it is another
        object, too."""
        if self.path is None and (known := self._newest_entry) is not None:
            return known
        self._check_process()
        watch, seen = self._marker_watch, self._seen_entry
        if watch is not None and seen is not None and watch.is_unchanged(seen[1], seen[2]):
            return seen[0]
        with self.lock:
            found = (b"", 0.0) if watch is None else watch.read_state()
            # SQLite counts what other connections change; what this one changes it forgets.
            changes = None
            self._reopen_if_changed()
            if self.path is not None:
                try:  # as `fetch_one` does, in less time: each look-up comes here
                    changes = self._connection.execute("PRAGMA data_version").fetchone()
                except sqlite3.Error:
                    changes = self.fetch_one("PRAGMA data_version")
            if self._newest_entry is None or changes != self._data_version:
                lines = self.read_versions("WHERE number = (SELECT max(number) FROM versions)")
                if not lines:
                    raise self.damaged_error("it has no version")
                self._newest_entry, self._data_version = VersionEntry.from_line(lines[0]), changes
            if not self._connection.in_transaction:  # which sees what was there when it began
                self._seen_entry = (self._newest_entry, *found)
            return self._newest_entry

    def read_settings(self, number: int) -> dict[str, Any]:
        """Settings as they were given."""
        try:
            return dict(json.loads(self.read_settings_text(number)))
        except (TypeError, ValueError, RecursionError) as error:
            raise self.damaged_error("its settings cannot be read") from error

    def read_settings_text(self, number: int) -> str:
        found = self.fetch_one("SELECT text, crc FROM settings WHERE number = ?", number)
        if found is None or not isinstance(found[0], str) or crc32(found[0].encode()) != found[1]:
            raise self.damaged_error("its settings are not what was written")
        return str(found[0])

    def damaged_error(self, what: str) -> StoreDamagedError:
        return StoreDamagedError(
            f"{self.path} is damaged: {what}. Restore it from a copy, or save what can be read "
            "with qkv check --repair, which keeps the damaged file"
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
        return "the store" if self.path is None else self.path.parent.name

    def _translate_error(self, error: sqlite3.Error | UnicodeDecodeError) -> Exception:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        text = str(error)
        if "closed database" in text:
            return StoreClosedError(f"{self._store_name()} is closed: open it again")
        # The first of SQLite's own message, which quotes the file; the second quotes it too.
        if isinstance(error, UnicodeDecodeError) or "UTF-8" in text:
            return self.damaged_error("its text is not UTF-8")
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or any(
            sign in text for sign in _DAMAGE_MESSAGES
        ):
            return self.damaged_error(text)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreLockedError(
                f"{self.path} is busy ({text}): try again when its writer is done"
            )
        if code in UNWRITABLE_CODES:
            return StoreUnwritableError(
                f"{self.path}: {text}; nothing was changed. Look at the disk's room, the folder's "
                "permissions and the number of open files, and try again"
            )
        return error


def _get_row_count(cursor: sqlite3.Cursor) -> int:
    return cursor.rowcount


def current_time_text() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def line_crc(line: Iterable[Any]) -> int:
    """The checksum of a line: of its cells as text, with "|" between them."""
    return crc32("|".join(map(str, line)).encode(errors="replace"))


def _is_possible_version(line: Sequence[Any]) -> bool:
    """Whether a store could have written a version's line: a stranger's checksums fit, too."""
    number, _, _, added, removed, rows, last, generation, settings = line
    counts = (number, added, removed, rows, generation, settings)
    numbers = all(type(x) is int for x in (*counts, last))
    return numbers and min(counts) >= 0 and rows <= last + 1


def row_crc(row: int, digest: bytes, record: str) -> int:
    """The checksum of one row, over everything that never changes; −1 where that is not a row."""
    if not isinstance(digest, bytes) or not isinstance(record, str):
        return -1
    return crc32(record.encode(), crc32(digest, row & 0xFFFFFFFF))
