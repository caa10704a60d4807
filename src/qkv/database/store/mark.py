"""The mark: which commit was acknowledged last, kept in the writer's lock, outside the catalogue.

A catalogue that is copied without its log is a sound one of an earlier day. The mark tells.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from qkv.database.store import plain

WRITER = "lock"
"""The file: the holder's process id on one line, the mark on the next."""

LENGTH = 96
_LINES = re.compile(rb"([0-9]{1,10})\n(?:([0-9]{1,18}) ([0-9]{1,16}) ([0-9a-f]{8})\n)?")


class Mark(NamedTuple):
    """The newest version that was acknowledged, and the number of the next file."""

    version: int
    files: int


def write(file: int, mark: Mark | None) -> None:
    """Write who holds the lock, and the mark."""
    text = f"{os.getpid()}\n".encode()
    if mark is not None:
        told = f"{mark.version} {mark.files}"
        text += f"{told} {crc32(told.encode()):08x}\n".encode()
    # In one step, so that no reader finds half of it.
    os.pwrite(file, text.ljust(LENGTH), 0)


def read(file: int) -> tuple[str, Mark | None]:
    """Who holds the lock, and the mark; "" and None where it does not tell."""
    found = _LINES.match(os.pread(file, LENGTH, 0))
    if found is None:
        return "", None
    holder, version, files, crc = found.groups()
    if version is None or crc32(b"%b %b" % (version, files)) != int(crc, 16):
        return holder.decode(), None
    return holder.decode(), Mark(int(version), int(files))


def of(folder: Path) -> Mark | None:
    """The mark of a store; None where it has none."""
    try:
        file = plain.opened(folder / WRITER, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return None
    except OSError as error:
        raise plain.unreadable(folder / WRITER, error) or error from None
    try:
        return read(file)[1]
    finally:
        os.close(file)
