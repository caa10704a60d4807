"""The commit marker: the version of the last acknowledged commit, stored in the lock file.

A catalog that was copied without its write-ahead log is valid but outdated. The marker, which is
not part of the catalog, reveals that. It also tells readers, faster than a query to the catalog,
that nothing was written since they last looked.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from qkv.database.storage import safe_open

LOCK_FILE = "lock"
"""The file contains the process id of the lock's holder, the marker, and its seal, one per line."""

LOCK_FILE_BYTES = 96
TRUST_SECONDS = 0.1
"""Seconds after which a reader checks again that the file still exists."""
_LOCK_FILE_PATTERN = re.compile(
    rb"([0-9]{1,10})\n(?:([0-9]{1,18}) ([0-9]{1,16}) ([0-9a-f]{8})\n(?:([0-9a-f]{16})\n)?)?"
)


class CommitMarker(NamedTuple):
    """The newest acknowledged version, and the number of the next file."""

    version: int
    next_file_number: int
    seal: str = ""
    """A random token for each state of the catalog; empty while the catalog may change."""


def new_marker(version: int, next_file_number: int) -> CommitMarker:
    """Return a sealed marker, for a catalog that is not being changed."""
    return CommitMarker(version, next_file_number, os.urandom(8).hex())


def write_marker(file: int, marker: CommitMarker | None) -> None:
    """Write this process's id and the marker to the lock file."""
    text = f"{os.getpid()}\n".encode()
    if marker is not None:
        numbers = f"{marker.version} {marker.next_file_number}"
        text += f"{numbers} {crc32(numbers.encode()):08x}\n".encode()
        text += f"{marker.seal}\n".encode() if marker.seal else b""
    # One system call, so that no reader sees a partial marker.
    os.pwrite(file, text.ljust(LOCK_FILE_BYTES), 0)


def read_lock_file(file: int) -> tuple[str, CommitMarker | None]:
    """Return the holder's process id ("" if unknown) and the marker (None if absent or damaged)."""
    match = _LOCK_FILE_PATTERN.match(os.pread(file, LOCK_FILE_BYTES, 0))
    if match is None:
        return "", None
    holder, version, files, crc, seal = match.groups()
    if version is None or crc32(b"%b %b" % (version, files)) != int(crc, 16):
        return holder.decode(), None
    return holder.decode(), CommitMarker(int(version), int(files), (seal or b"").decode())


def read_marker(folder: Path) -> CommitMarker | None:
    """Return the marker of the store in a folder, or None."""
    try:
        file = safe_open.open_regular_file(folder / LOCK_FILE, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return None
    except OSError as error:
        raise safe_open.unreadable_error(folder / LOCK_FILE, error) or error from None
    try:
        return read_lock_file(file)[1]
    finally:
        os.close(file)


class MarkerWatch:
    """Watch the marker of a folder, for a reader."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, -1

    def read_state(self) -> tuple[bytes, float]:
        """Return the lock file's content, and the `time.monotonic` until which it is valid.

        Call it before reading the catalog. The content is b"" while a writer is active and when
        there is no marker.
        """
        try:
            if self._file >= 0 and not os.fstat(self._file).st_nlink:
                self.close()  # a writer would create another file
            if self._file < 0:
                self._file = safe_open.open_regular_file(self._folder / LOCK_FILE, os.O_RDONLY)
            content = os.pread(self._file, LOCK_FILE_BYTES, 0)
        except (OSError, AttributeError):  # no such file, or a system without `pread`
            return b"", 0.0
        match = _LOCK_FILE_PATTERN.match(content)
        if match is None or not match[5]:
            return b"", 0.0
        return content, time.monotonic() + TRUST_SECONDS

    def is_unchanged(self, content: bytes, until: float) -> bool:
        """Return True if the catalog cannot have changed since `read_state` returned this."""
        if not content or time.monotonic() > until:
            return False
        try:
            return os.pread(self._file, LOCK_FILE_BYTES, 0) == content
        except OSError:  # closed by another thread
            return False

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
