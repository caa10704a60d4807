"""Connections to the catalogue's file: of its writer, of readers, of readers that cannot write.

SQLite's readers keep an index of the log beside it. Where there is no place for one, the log is
read here.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np

from qkv.database.storage import commit_marker, safe_open

WRITER_WAIT_SECONDS = 0.2
"""Seconds to wait for a writer that is only beginning."""
UNWRITABLE_CODES = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
)
WAL_INDEX_CODES = (sqlite3.SQLITE_READONLY_RECOVERY, sqlite3.SQLITE_READONLY_CANTINIT)
"""What a reader is told who finds no index, or a broken one, and may make none."""
PAGE_SIZES = tuple(1 << i for i in range(9, 17))
"""Bytes that a page may have."""
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
    """A connection; and where it takes the file for one that nobody writes, the state of that."""
    if path is None:
        return _open_sqlite(":memory:"), None
    safe_open.refuse_links(*(f"{path}{suffix}" for suffix in ("", "-wal", "-shm", "-journal")))
    name = path.absolute().as_uri()
    if write:
        return _open_sqlite(f"{name}?mode={'rwc' if create else 'rw'}", *_WRITER_STATEMENTS), None
    # The log's index is written even by readers.
    mode = "rw" if os.access(path.parent, os.W_OK) else "ro"
    until = time.monotonic() + WRITER_WAIT_SECONDS
    while True:
        try:
            return _open_sqlite(f"{name}?mode={mode}", *_READER_STATEMENTS), None
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in UNWRITABLE_CODES:
                raise
            still = read_file_state(path)
        # A full disk, or a folder that cannot be written, has no place for an index. Without a log
        # none is needed; where there is one, its writer may only just be making the index.
        try:
            if not still[0]:
                return _open_sqlite(f"{name}?immutable=1", *_READER_STATEMENTS), still
            if time.monotonic() > until:
                return _open_sqlite(
                    ":memory:", *_READER_STATEMENTS, content=_read_with_log(path)
                ), still
        except sqlite3.Error:
            if read_file_state(path) == still:
                raise
        except OSError as error:
            if read_file_state(path) == still:
                raise safe_open.unreadable_error(path, error) or error from None
        time.sleep(0.005)


def read_file_state(path: Path) -> tuple[Any, ...]:
    """The length of the log, and what else changes when somebody writes."""
    try:
        log = os.stat(f"{path}-wal")
    except FileNotFoundError:
        kept = 0, 0
    else:
        kept = log.st_size, log.st_mtime_ns
    file = os.stat(path)
    return (
        *kept,
        file.st_ino,
        file.st_size,
        file.st_mtime_ns,
        commit_marker.read_marker(path.parent),
    )


def _open_sqlite(name: str, *statements: str, content: bytes | None = None) -> sqlite3.Connection:
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
    """The file as its log's last commit has it."""
    with open(path, "rb", opener=safe_open.open_regular_file) as file:
        found = bytearray(file.read())
    with open(f"{path}-wal", "rb", opener=safe_open.open_regular_file) as file:
        size, count, pages = read_log_pages(file.read())
    if pages:
        count = min(count, len(found) // size + len(pages))  # a stranger's may say anything
        found[count * size :] = bytes(max(0, count * size - len(found)))
    for number, page in pages.items():
        if 0 < number <= count:
            found[(number - 1) * size : number * size] = page
    found[18:20] = b"\1\1"  # a file without a log, which is what it is by now
    return bytes(found)


def read_log_pages(log: bytes) -> tuple[int, int, dict[int, bytes]]:
    """The size of a page, how many the file has, and those that the log holds, by number.

    A log is a header of 32 bytes and frames: 24 bytes, then the page. A frame counts if it has the
    header's salt and a checksum over all before it, up to the last that ends a commit:
    https://sqlite.org/fileformat2.html#the_write_ahead_log
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
    _, begun = _log_checksums(np.frombuffer(log[:24], order).astype(np.uint32)[None])
    now, count = begun[0], 0
    kept: dict[int, bytes] = {}
    pages: dict[int, bytes] = {}
    if (now != head[6:]).any():
        return size, 0, {}
    for frame, told, own in zip(frames, heads, sums, strict=True):
        now = step @ now + own
        if (told[2:4] != head[4:6]).any() or (told[4:] != now).any():
            break
        kept[int(told[0])] = frame[24:].tobytes()
        if told[1]:  # the file's length, where the frame ends a commit
            count = int(told[1])
            pages |= kept
            kept = {}
    return size, count, pages


def _log_checksums(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """SQLite's checksum of each row of words (m, 2n), as A, b: s becomes A s + b, modulo 2³².

    For each pair of words x, y: s₀ ← s₀ + s₁ + x, then s₁ ← s₁ + s₀ + y.
    """
    step, power = np.array([[1, 1], [1, 2]], np.uint32), np.eye(2, dtype=np.uint32)
    pair = np.array([[1, 1], [0, 1]], np.uint32)  # x reaches both of them, y the second
    weights = np.empty((words.shape[1], 2), np.uint32)
    for i in range(words.shape[1] - 2, -1, -2):
        weights[i : i + 2] = pair @ power.T
        power = power @ step
    return power, words @ weights
