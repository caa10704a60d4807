"""The mark: which commit was acknowledged last, kept in the writer's lock, outside the catalogue.

A catalogue that is copied without its log is a sound one of an earlier day. The mark tells. It also
tells readers, in less time than the catalogue does, that nothing was written since they looked.
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
"""The file: the holder's process id on one line, the mark on the next, then its seal."""

LOCK_FILE_BYTES = 96
TRUST_SECONDS = 0.1
"""Seconds after which a reader looks whether the file is still there."""
_LOCK_FILE_PATTERN = re.compile(
    rb"([0-9]{1,10})\n(?:([0-9]{1,18}) ([0-9]{1,16}) ([0-9a-f]{8})\n(?:([0-9a-f]{16})\n)?)?"
)


class CommitMarker(NamedTuple):
    """The newest version that was acknowledged, and the number of the next file."""

    version: int
    next_file_number: int
    seal: str = ""
    """Drawn anew for each state of the catalogue, and not there while it may change."""


def new_marker(version: int, files: int) -> CommitMarker:
    """The mark of a catalogue that nobody is changing."""
    return CommitMarker(version, files, os.urandom(8).hex())


def write_marker(file: int, mark: CommitMarker | None) -> None:
    """Write who holds the lock, and the mark."""
    text = f"{os.getpid()}\n".encode()
    if mark is not None:
        told = f"{mark.version} {mark.next_file_number}"
        text += f"{told} {crc32(told.encode()):08x}\n".encode()
        text += f"{mark.seal}\n".encode() if mark.seal else b""
    # In one step, so that no reader finds half of it.
    os.pwrite(file, text.ljust(LOCK_FILE_BYTES), 0)


def read_lock_file(file: int) -> tuple[str, CommitMarker | None]:
    """Who holds the lock, and the mark; "" and None where it does not tell."""
    found = _LOCK_FILE_PATTERN.match(os.pread(file, LOCK_FILE_BYTES, 0))
    if found is None:
        return "", None
    holder, version, files, crc, seal = found.groups()
    if version is None or crc32(b"%b %b" % (version, files)) != int(crc, 16):
        return holder.decode(), None
    return holder.decode(), CommitMarker(int(version), int(files), (seal or b"").decode())


def read_marker(folder: Path) -> CommitMarker | None:
    """The mark of a store; None where it has none."""
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
    """A reader's eye on the mark of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, -1

    def read_state(self) -> tuple[bytes, float]:
        """What the mark is before the catalogue is read, and until when to trust that; b"" where a
        writer is at work, or never was."""
        try:
            if self._file >= 0 and not os.fstat(self._file).st_nlink:
                self.close()  # a writer would make another one
            if self._file < 0:
                self._file = safe_open.open_regular_file(self._folder / LOCK_FILE, os.O_RDONLY)
            seen = os.pread(self._file, LOCK_FILE_BYTES, 0)
        except (OSError, AttributeError):  # which is no file, or a system without `pread`
            return b"", 0.0
        found = _LOCK_FILE_PATTERN.match(seen)
        return (seen, time.monotonic() + TRUST_SECONDS) if found and found[5] else (b"", 0.0)

    def is_unchanged(self, seen: bytes, until: float) -> bool:
        """Whether the catalogue is certain to be what it was when the mark was looked at."""
        if not seen or time.monotonic() > until:
            return False
        try:
            return os.pread(self._file, LOCK_FILE_BYTES, 0) == seen
        except OSError:  # it was closed meanwhile
            return False

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
