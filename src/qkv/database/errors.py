"""Errors and warnings of a database. Each message names the file or the key, and the next step."""

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
    """A file of the store is missing, truncated, or not as it was written."""


class IndexDamagedError(StoreDamagedError):
    """The index of a segment is not as it was written. All rows are intact.

    `index_file` is the name of its file.
    """

    index_file = ""


class StoreLockedError(QkvError, OSError):
    """Another process holds the write lock of the store."""


class NotAStoreError(QkvError, OSError):
    """The path is not a store, or it is a store of a newer format."""


class StoreNotFoundError(NotAStoreError, FileNotFoundError):
    """Nothing exists at the path."""


class StoreUnreadableError(QkvError, OSError):
    """A file of the store may be intact but cannot be read now."""


class StoreUnwritableError(QkvError, OSError):
    """The store cannot be written. For example, the disk is full or the folder is read-only."""


class StoreClosedError(QkvError, ValueError):
    """The store is closed, or it was opened before this process was forked."""


class LostShardError(StoreUnreadableError, RuntimeError):
    """A shard did not answer before the timeout; `shard` is its number."""

    def __init__(self, message: str, shard: int):
        super().__init__(message)
        self.shard = shard

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.shard)


class VersionNotFoundError(QkvError, LookupError):
    """The version never existed, or a compaction dropped it."""


class RowNotFoundError(QkvError, LookupError):
    """The version has no row with this id."""


class KeyNotFoundError(QkvError, KeyError):
    """No row has the key.

    The message names the nearest keys, which are looked up only if it is read.
    """

    def __init__(self, key: Any, find_nearest: Callable[[], Sequence[Any]]):
        super().__init__(key)
        self.key, self._find_nearest = key, find_nearest

    @property
    def nearest_keys(self) -> list[Any]:
        """The keys most similar to the missing key."""
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
                f"{message}. The nearest key was stored with these numbers after rounding: look it "
                "up with the numbers that were added"
            )
        hint = f": the nearest are {', '.join(map(quote_cell, nearest))}" if nearest else ""
        return f"{message}{hint}"


class DuplicateKeyError(QkvError, ValueError):
    """A key exists already or is added twice, but keys are unique.

    `position` is the position of its row in the call.
    """

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
    """Return the message of the operating system or of SQLite behind an error.

    `error` may be their error, or one that was raised from it.
    """
    cause = error.__cause__ or error
    return str(getattr(cause, "strerror", None) or cause)


class StaleFitWarning(UserWarning):
    """Rows were added, but the encoder could not be refitted, so it still fits the earlier rows."""


class StaleIndexWarning(UserWarning):
    """Rows were compacted, but their index could not be built, so they are scanned."""


class SkippedRowsWarning(UserWarning):
    """Rows were skipped.

    A scan skips the rows of a damaged file. An answer skips rows that lack a number. An import
    skips rows without a key; `rows` are then their numbers in the input, and the first row has
    number 1.
    """

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = rows


class NoRowsMatchWarning(UserWarning):
    """No row passes the condition `where`, so the output is 0."""


class MixedColumnWarning(UserWarning):
    """A column was read as text because a few of its cells are not numbers."""


class NoHeaderWarning(UserWarning):
    """The first line of a table looks like a row, but should contain the names of the columns."""


class ChangedCellsWarning(UserWarning):
    """A file was written in a format that cannot represent some of its cells exactly."""


_skipped_warnings: ContextVar[list[SkippedRowsWarning] | None] = ContextVar(
    "_skipped_warnings", default=None
)


@contextlib.contextmanager
def collect_skipped_rows() -> Iterator[list[SkippedRowsWarning]]:
    """Yield a list that collects this thread's warnings about skipped rows inside the `with`.

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
    """Append the warning to the list of `collect_skipped_rows`, or issue it if there is no list."""
    skipped = _skipped_warnings.get()
    if skipped is None:
        warn_at_caller(warning)
    else:
        skipped.append(warning)


def warn_no_rows(cause: str) -> None:
    """Warn that no row was pooled, with this cause; do nothing if `cause` is empty."""
    if cause:
        warn_at_caller(f"{cause}. The output is 0", NoRowsMatchWarning)
