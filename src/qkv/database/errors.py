"""What a store raises: each fault names the file and the next step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from qkv.errors import QkvError, warn_at_caller


class StoreDamagedError(QkvError, OSError):
    """A file of the store is missing, cut short or changed."""


class StoreLockedError(QkvError, OSError):
    """Another writer holds the store."""


class NotAStoreError(QkvError, OSError):
    """The path holds something else, or a store of a newer format."""


class StoreNotFoundError(NotAStoreError, FileNotFoundError):
    """There is nothing at the path."""


class StoreUnreadableError(QkvError, OSError):
    """A file of the store cannot be read now, though nothing is wrong with it."""


class StoreUnwritableError(QkvError, OSError):
    """The store cannot be written: a full disk, a read-only folder."""


def unwritable_error(path: Path, error: OSError) -> StoreUnwritableError:
    """The fault of a file that was not written, and left as it was."""
    return StoreUnwritableError(
        f"{path} cannot be written ({error.strerror or error}): nothing was changed; make room or "
        "make the folder writable, and try again"
    )


def reason(error: BaseException) -> str:
    """What the system or SQLite said, of an error that may wrap it."""
    cause = error.__cause__ or error
    return str(getattr(cause, "strerror", None) or cause)


class StoreClosedError(QkvError, ValueError):
    """The store was closed, or belongs to the process that this one was forked from."""


class DuplicateKeyError(QkvError, ValueError):
    """A key that must be unique is there already; `position` is its place in the call."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.position)


class VersionNotFoundError(QkvError, LookupError):
    """No such version, or a compaction dropped it."""


class RowNotFoundError(QkvError, LookupError):
    """No such row in this version."""


class StaleFitWarning(UserWarning):
    """Rows were added, but their encoder could not be fitted anew to them; it goes on as it was."""


class SkippedRowsWarning(UserWarning):
    """Rows were left out: of a scan by a damaged file, of answers for want of a number among those
    pooled together, of an import for want of a key; `rows` are then their numbers in what was
    imported, the first is 1."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = rows


_skipped_warnings: ContextVar[list[SkippedRowsWarning] | None] = ContextVar(
    "_skipped_warnings", default=None
)


@contextlib.contextmanager
def collect_skipped_rows() -> Iterator[list[SkippedRowsWarning]]:
    """What is skipped by an import within, instead of a warning; only of this thread.

    >>> from qkv import Database
    >>> with collect_skipped_rows() as told:
    ...     _ = Database.from_columns({"name": ["Li", None], "age": [1, 2]})
    >>> told[0].rows
    [2]
    """
    told: list[SkippedRowsWarning] = []
    token = _skipped_warnings.set(told)
    try:
        yield told
    finally:
        _skipped_warnings.reset(token)


def report_skipped_rows(fault: SkippedRowsWarning) -> None:
    """Tell who listens that rows were skipped, or warn."""
    told = _skipped_warnings.get()
    if told is None:
        warn_at_caller(fault)
    else:
        told.append(fault)


class NoRowsMatchWarning(UserWarning):
    """No row passes the condition `where`, so that what is pooled is 0."""


def warn_no_rows(told: str) -> None:
    """Warn that a sum is of no rows; `told` is why, or empty where rows pass."""
    if told:
        warn_at_caller(f"{told}. The output is 0", NoRowsMatchWarning)


class MixedColumnWarning(UserWarning):
    """A column of a table is text because of a few words among its numbers."""


class NoHeaderWarning(UserWarning):
    """The first line of a table, which names the columns, looks like a row."""


class ChangedCellsWarning(UserWarning):
    """A file was written that cannot hold some cells as they are."""


class LostShardError(StoreUnreadableError, RuntimeError):
    """A shard does not answer, and was not back in time.

    `shard` is its number.
    """

    def __init__(self, told: str, shard: int):
        super().__init__(told)
        self.shard = shard

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.shard)
