"""Opening the files of a store: plain ones only, for a link in a stranger's store leads away."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from qkv.database.errors import StoreDamagedError, StoreUnreadableError

_NO_LINK_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def open_regular_file(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor of a plain file; an error where it is a link, a pipe, a folder or a device.

    It is made to be the `opener` of Python's `open`, too.
    """
    try:
        file = os.open(path, flags | _NO_LINK_FLAGS | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        # A pipe without a reader and a socket (ENXIO) cannot even be opened.
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
    """The names of all that is in a folder."""
    try:
        return os.listdir(folder)
    except OSError as error:
        raise unreadable_error(folder, error) or error from None


def unreadable_error(path: str | os.PathLike[str], error: OSError) -> StoreUnreadableError | None:
    """The error for a file that is sound, as far as is known, but cannot be opened; else None."""
    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM):
        return None
    return StoreUnreadableError(
        f"{Path(path)} cannot be read now ({error.strerror}): close other files, or see to its "
        "permissions, and try again"
    )


def refuse_links(*paths: str | os.PathLike[str]) -> None:
    """Refuse what is there and is not a plain file, before somebody opens it who follows links."""
    for path in paths:
        try:
            found = os.lstat(path).st_mode
        except OSError:
            continue
        if not stat.S_ISREG(found):
            raise _not_regular_error(path)


def _not_regular_error(path: str | os.PathLike[str]) -> StoreDamagedError:
    what = "a link" if os.path.islink(path) else "no plain file"
    return StoreDamagedError(
        f"{Path(path)} is {what}, and a store holds plain files only: put the file itself in its "
        "place, or, where the store came from somebody else, do not trust it"
    )
