"""Errors and warnings of a database. Each message names the file or the key and the next step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qkv.errors import QkvError, warn_at_caller
from qkv.frameworks import is_array
from qkv.util.formatting import quote_cell


class StoreDamagedError(QkvError, OSError):
    """A file of the store is missing, truncated or changed."""


class StoreLockedError(QkvError, OSError):
    """Another process holds the write lock of the store."""


class NotAStoreError(QkvError, OSError):
    """The path is not a store, or it is a store of a newer format."""


class StoreNotFoundError(NotAStoreError, FileNotFoundError):
    """Nothing exists at the path."""


class StoreUnreadableError(QkvError, OSError):
    """An intact file of the store cannot be read at the moment."""


class StoreUnwritableError(QkvError, OSError):
    """The store cannot be written: for example, the disk is full or the folder is read-only."""


class StoreClosedError(QkvError, ValueError):
    """The store is closed, or this process was forked from the one that opened it."""


class LostShardError(StoreUnreadableError, RuntimeError):
    """A shard did not answer before the timeout; `shard` is its number."""

    def __init__(self, message: str, shard: int):
        super().__init__(message)
        self.shard = shard

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.shard)


class VersionNotFoundError(QkvError, LookupError):
    """The version never existed, or compaction deleted it."""


class RowNotFoundError(QkvError, LookupError):
    """This version has no such row."""


class KeyNotFoundError(QkvError, KeyError):
    """No row has the key. The message names the nearest keys, which it looks up when it is read."""

    def __init__(self, key: Any, find_nearest: Callable[[], Sequence[Any]]):
        super().__init__(key)
        self.key, self._find_nearest = key, find_nearest

    @property
    def nearest_keys(self) -> list[Any]:
        try:
            return list(self._find_nearest())
        except QkvError:
            return []

    def __reduce__(self) -> Any:
        return KeyNotFoundError, (self.key, partial(list, self.nearest_keys))

    def __str__(self) -> str:
        nearest, message = self.nearest_keys, f"no row has the key {quote_cell(self.key)}"
        if is_array(self.key) and any(np.array_equal(self.key, other) for other in nearest):
            return (
                f"{message}: a stored key was rounded to these numbers: look it up by the numbers "
                "that were added"
            )
        hint = f": the nearest are {', '.join(map(quote_cell, nearest))}" if nearest else ""
        return f"{message}{hint}"


class DuplicateKeyError(QkvError, ValueError):
    """A unique key exists already; `position` is its position among the rows of the call."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.position)


def unwritable_error(path: Path, error: OSError) -> StoreUnwritableError:
    """Return the error for a file that could not be written and was left unchanged."""
    return StoreUnwritableError(
        f"{path} cannot be written ({error.strerror or error}): nothing was changed; free disk "
        "space or make the folder writable, and try again"
    )


def reason(error: BaseException) -> str:
    """Return the message of the system or of SQLite, also from an error that wraps it."""
    cause = error.__cause__ or error
    return str(getattr(cause, "strerror", None) or cause)


class StaleFitWarning(UserWarning):
    """Rows were added, but the encoder could not be refitted to them and stays as it was."""


class SkippedRowsWarning(UserWarning):
    """Rows were skipped.

    A scan skips the rows of a damaged file, an answer the rows that lack a number, and an import
    the rows without a key. For an import, `rows` are their numbers in the input, from 1.
    """

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = rows


class NoRowsMatchWarning(UserWarning):
    """No row passes the condition `where`, so the output is 0."""


class MixedColumnWarning(UserWarning):
    """A column was read as text because a few of its cells are not numbers."""


class NoHeaderWarning(UserWarning):
    """The first line of a table should name the columns, but it looks like a row."""


class ChangedCellsWarning(UserWarning):
    """The format of a written file cannot represent some cells exactly."""


_skipped_warnings: ContextVar[list[SkippedRowsWarning] | None] = ContextVar(
    "_skipped_warnings", default=None
)


@contextlib.contextmanager
def collect_skipped_rows() -> Iterator[list[SkippedRowsWarning]]:
    """Collect the warnings about skipped rows in a list, for the current thread.

    >>> from qkv import Database
    >>> with collect_skipped_rows() as skipped:
    ...     _ = Database.from_columns({"name": ["Li", None], "age": [1, 2]})
    >>> skipped[0].rows
    [2]
    """
    skipped: list[SkippedRowsWarning] = []
    token = _skipped_warnings.set(skipped)
    try:
        yield skipped
    finally:
        _skipped_warnings.reset(token)


def report_skipped_rows(warning: SkippedRowsWarning) -> None:
    """Append to the list of `collect_skipped_rows` if it is active, else warn."""
    skipped = _skipped_warnings.get()
    if skipped is None:
        warn_at_caller(warning)
    else:
        skipped.append(warning)


def warn_no_rows(cause: str) -> None:
    """Warn that no rows were pooled; do nothing if `cause` is empty."""
    if cause:
        warn_at_caller(f"{cause}. The output is 0", NoRowsMatchWarning)
