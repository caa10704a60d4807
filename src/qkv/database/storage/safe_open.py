"""Open files of a store, and refuse everything except regular files.

A store may be untrusted: a symbolic link in it could lead to any file of this machine.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from qkv.database.errors import StoreDamagedError, StoreUnreadableError

_NO_LINK_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def open_regular_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file and return its descriptor; refuse links, pipes, folders and devices.

    Python's `open` accepts this function as `opener`.
    """
    try:
        file = os.open(path, flags | _NO_LINK_FLAGS | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        # ENXIO: the file is a pipe without a reader, or a socket.
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise _not_regular_error(path) from None
        raise
    regular = False
    try:
        regular = stat.S_ISREG(os.fstat(file).st_mode)
    finally:
        if not regular:
            os.close(file)
    if not regular:
        raise _not_regular_error(path)
    return file


def list_names(folder: Path) -> list[str]:
    """Return the names of all entries of a folder."""
    try:
        return os.listdir(folder)
    except OSError as error:
        raise unreadable_error(folder, error) or error from None


def unreadable_error(path: str | os.PathLike[str], error: OSError) -> StoreUnreadableError | None:
    """Return the error for a file that may be intact but cannot be opened now.

    Return None if `error` has another reason.
    """
    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM):
        return None
    return StoreUnreadableError(
        f"{Path(path)} cannot be read now ({error.strerror}): close other files, or check its "
        "permissions, and try again"
    )


def refuse_links(*paths: str | os.PathLike[str]) -> None:
    """Raise `StoreDamagedError` for each path that exists and is not a regular file.

    SQLite follows links, so call this before SQLite opens a file.
    """
    for path in paths:
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            continue
        if not stat.S_ISREG(mode):
            raise _not_regular_error(path)


def _not_regular_error(path: str | os.PathLike[str]) -> StoreDamagedError:
    kind = "a link" if os.path.islink(path) else "not a regular file"
    return StoreDamagedError(
        f"{Path(path)} is {kind}, but a store contains only regular files: replace it with the "
        "file itself. Do not trust the store if it came from somebody else"
    )
