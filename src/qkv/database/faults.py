"""What a store raises: each fault names the file and the next step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from qkv.errors import QkvError, warn


class Damaged(QkvError, OSError):
    """A file of the store is missing, cut short or changed."""


class Locked(QkvError, OSError):
    """Another writer holds the store."""


class NotAStore(QkvError, OSError):
    """The path holds something else, or a store of a newer format."""


class NoStore(NotAStore, FileNotFoundError):
    """There is nothing at the path."""


class Unreadable(QkvError, OSError):
    """A file of the store cannot be read now, though nothing is wrong with it."""


class Unwritable(QkvError, OSError):
    """The store cannot be written: a full disk, a read-only folder."""


def unwritable(path: Path, error: OSError) -> Unwritable:
    """The fault of a file that was not written, and left as it was."""
    return Unwritable(
        f"{path} cannot be written ({error.strerror or error}): nothing was changed; make room or "
        "make the folder writable, and try again"
    )


def reason(error: BaseException) -> str:
    """What the system or SQLite said, of an error that may wrap it."""
    cause = error.__cause__ or error
    return str(getattr(cause, "strerror", None) or cause)


class Closed(QkvError, ValueError):
    """The store was closed, or belongs to the process that this one was forked from."""


class DuplicateKey(QkvError, ValueError):
    """A key that must be unique is there already; `position` is its place in the call."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.position)


class UnknownVersion(QkvError, LookupError):
    """No such version, or a compaction dropped it."""


class UnknownRow(QkvError, LookupError):
    """No such row in this version."""


class StaleFit(UserWarning):
    """Rows were added, but their encoder could not be fitted anew to them; it goes on as it was."""


class SkippedRows(UserWarning):
    """Rows were left out: of a scan by a damaged file, of answers for want of a number among those
    pooled together, of an import for want of a key; `rows` are then their numbers in what was
    imported, the first is 1."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = rows


_told: ContextVar[list[SkippedRows] | None] = ContextVar("told", default=None)


@contextlib.contextmanager
def skipping() -> Iterator[list[SkippedRows]]:
    """What is skipped by an import within, instead of a warning; only of this thread.

    >>> from qkv import Database
    >>> with skipping() as told:
    ...     _ = Database.from_columns({"name": ["Li", None], "age": [1, 2]})
    >>> told[0].rows
    [2]
    """
    told: list[SkippedRows] = []
    token = _told.set(told)
    try:
        yield told
    finally:
        _told.reset(token)


def skip(fault: SkippedRows) -> None:
    """Tell who listens that rows were skipped, or warn."""
    told = _told.get()
    if told is None:
        warn(fault)
    else:
        told.append(fault)


class NoRowsMatchWarning(UserWarning):
    """No row passes the condition `where`, so that what is pooled is 0."""


def warn_no_rows(told: str) -> None:
    """Warn that a sum is of no rows; `told` is why, or empty where rows pass."""
    if told:
        warn(f"{told}. The output is 0", NoRowsMatchWarning)


class MixedColumn(UserWarning):
    """A column of a table is text because of a few words among its numbers."""


class NoHeader(UserWarning):
    """The first line of a table, which names the columns, looks like a row."""


class ChangedCells(UserWarning):
    """A file was written that cannot hold some cells as they are."""


class LostShard(Unreadable, RuntimeError):
    """A shard does not answer, and was not back in time.

    `shard` is its number.
    """

    def __init__(self, told: str, shard: int):
        super().__init__(told)
        self.shard = shard

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.shard)
