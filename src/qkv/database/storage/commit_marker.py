"""The commit marker: the version of the last acknowledged commit, stored in the lock file.

A commit is acknowledged when the call that made it returns.

The marker is not part of the catalog. If somebody copies a catalog without its write-ahead log, the
copy is valid but too old, and the marker shows it. Readers also use the marker: it says whether
anything was written since they last read the catalog. That is faster than a query.
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
"""The name of the lock file.

Its lines are the process id of the writer, the marker, and its seal.
"""

LOCK_FILE_BYTES = 96
TRUST_SECONDS = 0.1
"""After this time, a reader checks again that the lock file still exists."""
_LOCK_FILE_PATTERN = re.compile(
    rb"([0-9]{1,10})\n(?:([0-9]{1,18}) ([0-9]{1,16}) ([0-9a-f]{8})\n(?:([0-9a-f]{16})\n)?)?"
)


class CommitMarker(NamedTuple):
    """The newest acknowledged version, and the number that the next new file gets."""

    version: int
    next_file_number: int
    seal: str = ""
    """A random token for the current state of the catalog; empty while a writer may change it."""


def new_marker(version: int, next_file_number: int) -> CommitMarker:
    """Return a marker with a new seal. The catalog must not be changing."""
    return CommitMarker(version, next_file_number, os.urandom(8).hex())


def write_marker(file: int, marker: CommitMarker | None) -> None:
    """Write the id of this process and the marker to the lock file."""
    text = f"{os.getpid()}\n".encode()
    if marker is not None:
        numbers = f"{marker.version} {marker.next_file_number}"
        text += f"{numbers} {crc32(numbers.encode()):08x}\n".encode()
        text += f"{marker.seal}\n".encode() if marker.seal else b""
    # Use one system call, so that no reader sees a part of a marker.
    os.pwrite(file, text.ljust(LOCK_FILE_BYTES), 0)


def read_lock_file(file: int) -> tuple[str, CommitMarker | None]:
    """Return the writer's process id and the marker in an open lock file.

    The process id is "" if it is unknown. The marker is None if it is missing or damaged.
    """
    match = _LOCK_FILE_PATTERN.match(os.pread(file, LOCK_FILE_BYTES, 0))
    if match is None:
        return "", None
    holder, version, files, crc, seal = match.groups()
    if version is None or crc32(b"%b %b" % (version, files)) != int(crc, 16):
        return holder.decode(), None
    return holder.decode(), CommitMarker(int(version), int(files), (seal or b"").decode())


def read_marker(folder: Path) -> CommitMarker | None:
    """Return the marker of the store in a folder; None if there is none."""
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
    """Watches the marker of a store for a reader."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, -1

    def read_state(self) -> tuple[bytes, float]:
        """Return the content of the lock file, and the `time.monotonic` until which it is valid.

        Call this before reading the catalog. The content is b"" while a writer is active, or if
        there is no marker.
        """
        try:
            if self._file >= 0 and not os.fstat(self._file).st_nlink:
                self.close()  # a writer would create a new lock file
            if self._file < 0:
                self._file = safe_open.open_regular_file(self._folder / LOCK_FILE, os.O_RDONLY)
            content = os.pread(self._file, LOCK_FILE_BYTES, 0)
        except (OSError, AttributeError):  # there is no lock file, or the system has no `pread`
            return b"", 0.0
        match = _LOCK_FILE_PATTERN.match(content)
        if match is None or not match[5]:
            return b"", 0.0
        return content, time.monotonic() + TRUST_SECONDS

    def is_unchanged(self, content: bytes, until: float) -> bool:
        """Return whether the catalog is certainly unchanged since `read_state` returned this."""
        if not content or time.monotonic() > until:
            return False
        try:
            return os.pread(self._file, LOCK_FILE_BYTES, 0) == content
        except OSError:  # another thread has closed the file
            return False

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
