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

from qkv.database.faults import Closed, Damaged, Locked, NotAStore, Unwritable
from qkv.database.store.connect import HALF_MADE, NO_PLACE, connect, state
from qkv.database.store.mark import Watch
from qkv.types import Closing, releasing

FILE = "catalogue.sqlite"
FORMAT = 5
APPLICATION = 0x716B7601  # "qkv" and 1

TABLES = """
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

STATEMENTS = {statement.strip() for statement in TABLES.split(";")[:-1]}
WRITTEN = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"
"""What SQLite keeps of them."""

T = TypeVar("T")

_DAMAGE = ("no such table", "no such column", "unsupported file format")
"""What SQLite says of damage under the code of a plain error."""

SEGMENT = "file, generation, first, last, rows, bytes, checksum"


class Edition(NamedTuple):
    """One version: its number, the last id given out, how many rows live, and what they use."""

    number: int
    last: int
    rows: int
    generation: int
    settings: int

    @classmethod
    def of(cls, line: Sequence[Any]) -> Edition:
        number, _, _, _, _, rows, last, generation, settings = line
        return cls(number, last, rows, generation, settings)


class Catalogue(Closing):
    """A connection that threads share, whose errors name the file.

    >>> catalogue = Catalogue(None)
    >>> catalogue.newest()
    Edition(number=0, last=-1, rows=0, generation=0, settings=0)
    >>> catalogue.close()
    """

    def __init__(self, path: Path | None, *, write: bool = True, create: bool = False) -> None:
        self.path = path
        self.lock = threading.RLock()
        self._process = os.getpid()
        self._edition: Edition | None = None
        self._changes: Any = None
        self._watch = None if path is None or write else Watch(path.parent)
        self._seen: tuple[Edition, bytes, float] | None = None
        try:
            self._connection, self._still = connect(path, write, create)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._named(error) from error
        try:
            self._opened = None if path is None else os.stat(path)
            if path is None or create:
                self._create()
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        """Make the tables, unless another process was faster."""
        if self.path is not None:
            self.run("PRAGMA journal_mode = WAL")
        with self.transaction():
            if self.one("PRAGMA application_id") != (0,):
                return
            for statement in TABLES.split(";")[:-1]:
                self.run(statement)
            self.run("INSERT INTO counters VALUES (1)")
            self.run("INSERT INTO generations (number) VALUES (0)")
            self.run("INSERT INTO settings VALUES (0, '{}', ?)", crc32(b"{}"))
            self.enter(Edition(0, -1, 0, 0, 0), "create", 0, 0)
            self.run(f"PRAGMA application_id = {APPLICATION}")
            self.run(f"PRAGMA user_version = {FORMAT}")

    def content(self) -> bytes:
        """All that it holds."""
        return self._connection.serialize()

    def fill(self, content: bytes) -> None:
        """Hold that, in memory."""
        with contextlib.closing(sqlite3.connect(":memory:")) as given:
            given.deserialize(content)
            given.backup(self._connection)
        self._edition = None

    @property
    def changes(self) -> int:
        """How many rows this connection has changed."""
        return self._connection.total_changes

    def there(self) -> bool:
        """Whether the file that was opened is still the one at its path."""
        if self.path is None or self._opened is None:
            return True
        return os.path.samestat(os.stat(self.path, follow_symlinks=False), self._opened)

    def identify(self) -> bool:
        """True for a store, False for an empty file; an error for anything else."""
        assert self.path is not None
        application = self.value("PRAGMA application_id")
        number = self.value("PRAGMA user_version")
        if application == APPLICATION and number == FORMAT:
            if self.value("SELECT count(*) FROM sqlite_master WHERE type IN ('trigger', 'view')"):
                raise self.damaged("it holds statements of its own, which a store never does")
            if {sql for (sql,) in self.all(WRITTEN)} != STATEMENTS:
                raise self.damaged("its tables are not those that were written")
            return True
        if application == APPLICATION and number:
            mend = "install a newer qkv"
            if 0 < number < FORMAT:
                mend = "export the rows with the qkv that wrote it, and import them"
            raise NotAStore(
                f"{self.path.parent} has format {number}, and this qkv reads {FORMAT}: {mend}"
            )
        if application == 0 and self.value("SELECT count(*) FROM sqlite_master") == 0:
            return False
        raise NotAStore(
            f"{self.path} is an SQLite file, but not a qkv catalogue: give the path of a store"
        )

    def all(self, statement: str, *values: Any) -> list[Any]:
        return self._execute(sqlite3.Cursor.fetchall, statement, values)

    def one(self, statement: str, *values: Any) -> Any:
        return self._execute(sqlite3.Cursor.fetchone, statement, values)

    def value(self, statement: str, *values: Any) -> Any:
        found = self.one(statement, *values)
        return None if found is None else found[0]

    def run(self, statement: str, *values: Any) -> int:
        """Execute and give the number of rows that changed."""
        return self._execute(_rowcount, statement, values)

    def many(self, statement: str, rows: Iterable[Sequence[Any]]) -> int:
        return self._execute(_rowcount, statement, rows, many=True)

    def _execute(
        self, give: Callable[[sqlite3.Cursor], T], statement: str, values: Any, many: bool = False
    ) -> T:
        self._owned()
        with self.lock:
            while True:
                connection = self._connection
                run = connection.executemany if many else connection.execute
                try:
                    found = give(run(statement, values))
                except (sqlite3.Error, UnicodeDecodeError) as error:
                    if not self._moved() and not self._anew(error):
                        raise self._named(error) from error
                else:
                    if not self._moved():
                        return found

    def _moved(self) -> bool:
        """Whether somebody has written what was read as a file that nobody writes: it is opened
        again, and must be read again."""
        if self._still is None or self.path is None or self._still == state(self.path):
            return False
        if self._connection.in_transaction:
            raise Locked(f"{self.path} is being written: try again")
        self._reopen()
        return True

    def _anew(self, error: sqlite3.Error | UnicodeDecodeError) -> bool:
        """Whether a reader met a log's index that is half made, which he may not make himself: the
        file is opened again. It is met where a state of the file is taken, so that a transaction
        has read nothing yet."""
        if self._watch is None or getattr(error, "sqlite_errorcode", 0) not in HALF_MADE:
            return False
        begun = self._connection.in_transaction
        self._reopen()
        if begun:
            self._connection.execute("BEGIN")
        return True

    def _reopen(self) -> None:
        try:
            connection, still = connect(self.path, write=False, create=False)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._named(error) from error
        self._connection.close()
        self._connection, self._still = connection, still
        self._edition = self._seen = None

    def _owned(self) -> None:
        # One in memory is the child's own copy; that of a file shares its locks with the parent.
        if self.path is not None and os.getpid() != self._process:
            raise Closed(
                f"{self._name()} was opened before this process was forked: open it again here"
            )

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        """All of it or nothing, durable at the end."""
        return self._bracket("BEGIN IMMEDIATE")

    def view(self) -> contextlib.AbstractContextManager[None]:
        """Several reads of one state."""
        return self._bracket("BEGIN")

    @releasing
    def _bracket(self, begin: str) -> Iterator[None]:
        with self.lock:
            try:
                # One that was interrupted twice may not have come to its end.
                self._rollback()
                self._seen = None  # inside, all is read from the catalogue at one moment
                self.run(begin)
                yield
                self.run("COMMIT")
            except BaseException:
                self._rollback()
                raise
            finally:
                self._edition = self._seen = None

    def _rollback(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def enter(self, edition: Edition, what: str, added: int, removed: int) -> None:
        """A new version."""
        number, last, rows, generation, settings = edition
        line = (number, now(), what, added, removed, rows, last, generation, settings)
        self.run(
            "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", *line, line_crc(line)
        )

    def versions(self, where: str = "", *values: Any) -> list[tuple[Any, ...]]:
        """(number, time, what, added, removed, rows, last, generation, settings), ascending."""
        found = []
        for *line, crc in self.all(f"SELECT * FROM versions {where} ORDER BY number", *values):
            if line_crc(line) != crc or not _possible(line):
                raise self.damaged(f"version {line[0]} is not what was written")
            found.append(tuple(line))
        return found

    def edition(self, version: int) -> Edition | None:
        """A version, where there is one."""
        found = self.versions("WHERE number = ?", version) if abs(version) < 2**63 else []
        return Edition.of(found[0]) if found else None

    def newest(self) -> Edition:
        """The newest version, read again only where it can be another one: then it is another
        object, too."""
        if self.path is None and (known := self._edition) is not None:
            return known
        self._owned()
        watch, seen = self._watch, self._seen
        if watch is not None and seen is not None and watch.same(seen[1], seen[2]):
            return seen[0]
        with self.lock:
            found = (b"", 0.0) if watch is None else watch.look()
            # SQLite counts what other connections change; what this one changes it forgets.
            changes = None
            self._moved()
            if self.path is not None:
                try:  # as `one` does, in less time: each look-up comes here
                    changes = self._connection.execute("PRAGMA data_version").fetchone()
                except sqlite3.Error:
                    changes = self.one("PRAGMA data_version")
            if self._edition is None or changes != self._changes:
                lines = self.versions("WHERE number = (SELECT max(number) FROM versions)")
                if not lines:
                    raise self.damaged("it has no version")
                self._edition, self._changes = Edition.of(lines[0]), changes
            if not self._connection.in_transaction:  # which sees what was there when it began
                self._seen = (self._edition, *found)
            return self._edition

    def read_settings(self, number: int) -> dict[str, Any]:
        """Settings as they were given."""
        try:
            return dict(json.loads(self.settings(number)))
        except (TypeError, ValueError, RecursionError) as error:
            raise self.damaged("its settings cannot be read") from error

    def settings(self, number: int) -> str:
        found = self.one("SELECT text, crc FROM settings WHERE number = ?", number)
        if found is None or not isinstance(found[0], str) or crc32(found[0].encode()) != found[1]:
            raise self.damaged("its settings are not what was written")
        return str(found[0])

    def damaged(self, what: str) -> Damaged:
        return Damaged(
            f"{self.path} is damaged: {what}. Restore it from a copy, or save what can be read "
            "with qkv check --repair, which keeps the damaged file"
        )

    def close(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None:
            with self.lock:
                self._edition = self._seen = self._still = None
                connection.close()
                if self._watch is not None:
                    self._watch.close()

    def _name(self) -> str:
        return "the store" if self.path is None else self.path.parent.name

    def _named(self, error: sqlite3.Error | UnicodeDecodeError) -> Exception:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        text = str(error)
        if "closed database" in text:
            return Closed(f"{self._name()} is closed: open it again")
        # The first of SQLite's own message, which quotes the file; the second quotes it too.
        if isinstance(error, UnicodeDecodeError) or "UTF-8" in text:
            return self.damaged("its text is not UTF-8")
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or any(
            sign in text for sign in _DAMAGE
        ):
            return self.damaged(text)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return Locked(f"{self.path} is busy ({text}): try again when its writer is done")
        if code in NO_PLACE:
            return Unwritable(
                f"{self.path}: {text}; nothing was changed. Look at the disk's room, the folder's "
                "permissions and the number of open files, and try again"
            )
        return error


def _rowcount(cursor: sqlite3.Cursor) -> int:
    return cursor.rowcount


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def line_crc(line: Iterable[Any]) -> int:
    """The checksum of a line: of its cells as text, with "|" between them."""
    return crc32("|".join(map(str, line)).encode(errors="replace"))


def _possible(line: Sequence[Any]) -> bool:
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
