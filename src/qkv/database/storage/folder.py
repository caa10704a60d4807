"""Whether a folder is a store, or may become one; a new one made beside its place."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

from qkv.database.errors import (
    NotAStoreError,
    StoreDamagedError,
    StoreNotFoundError,
    StoreUnwritableError,
    reason,
)
from qkv.database.storage import safe_open
from qkv.database.storage.blob_storage import FileSystem
from qkv.database.storage.catalog import CATALOG_FILE, Catalog
from qkv.database.storage.commit_marker import LOCK_FILE
from qkv.database.storage.garbage import MAKER_LOCK_FILE, remove_abandoned_folders
from qkv.database.storage.lock import READERS_FILE, try_lock_file
from qkv.database.storage.segments import SEGMENT_SUFFIX, TEMPORARY_SUFFIX, file_number
from qkv.errors import ArgumentError, DtypeError, QkvError
from qkv.util.logging import warn_log
from qkv.util.types import interruptible_contextmanager

NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)
"""What a system says that cannot sync folders, or not this one for this user."""


def check_path(path: str | os.PathLike[str]) -> Path:
    """A path as any system may have it."""
    try:
        found = Path(path)
        os.fsencode(found)
    except TypeError:
        kind = type(path).__name__
        raise DtypeError(f"path must be the name of a folder, not a {kind}") from None
    except UnicodeEncodeError:
        raise ArgumentError(f"path holds half a character, which no name has: {path!r}") from None
    if "\0" in str(found):
        raise ArgumentError(f"path holds a NUL character, which no name has: {str(found)[:80]!r}")
    return found


def prepare_folder(folder: Path, create: bool) -> None:
    """Make sure that the folder is a store, or say what it is."""
    try:
        there = folder.exists()
    except OSError as error:
        told = f"{str(folder)[:80]} cannot be looked at ({error.strerror})"
        raise StoreUnwritableError(f"{told}: choose another path") from error
    if not there:
        if not create:
            raise StoreNotFoundError(
                f"{folder} does not exist: check the path, or make one: qkv import, create=True"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnwritableError(f"{folder} cannot be made ({error.strerror})") from error
    if not folder.is_dir():
        raise NotAStoreError(
            f"{folder} is a file: a store is a folder. Make one of a table: "
            "qkv import, Database.from_source(file, path=…)"
        )
    path = folder / CATALOG_FILE
    names = list_store_files(folder)
    # A store that was ever finished has one of these.
    old = names & {READERS_FILE, LOCK_FILE} or any(name.endswith(SEGMENT_SUFFIX) for name in names)
    there = CATALOG_FILE in names
    if there:
        with Catalog(path, write=False) as catalogue:
            if catalogue.check_is_store():
                return
    if old:
        raise StoreDamagedError(
            f"{path} is {'empty' if there else 'missing'}: restore it from a copy, or save what "
            "can be read with qkv check --repair"
        )
    if names and not there:
        raise NotAStoreError(f"{folder} is a folder with other files: give the path of a store")
    if not create:
        raise StoreNotFoundError(
            f"{folder} is empty: check the path, or make one: qkv import, create=True"
        )
    Catalog(path, create=True).close()
    with open(folder / READERS_FILE, "ab"):
        pass
    for place in (folder, folder.absolute().parent):
        _sync(place)


def _sync(folder: Path) -> None:
    """Make the names in a folder durable, where the system can; a failure is logged: what was made
    is there, and a loss of power may take it."""
    try:
        FileSystem().fsync_folder(folder)
    except OSError as error:
        if error.errno not in NO_SYNC:
            warn_log("%s cannot be made durable (%s)", folder, reason(error))


def list_store_files(folder: Path) -> set[str]:
    """The names of all that is in a folder; an error where a store's file is a link."""
    names = set(safe_open.list_names(folder))
    own = (
        CATALOG_FILE,
        SEGMENT_SUFFIX,
        SEGMENT_SUFFIX + TEMPORARY_SUFFIX,
        "-wal",
        "-shm",
        READERS_FILE,
        LOCK_FILE,
    )
    safe_open.refuse_links(*(folder / name for name in names if name.endswith(own)))
    return names


def is_store_file(name: str) -> bool:
    """Whether a file of this name belongs to a store: nothing else is taken from elsewhere.

    >>> [
    ...     is_store_file(name)
    ...     for name in ("segment-00000001.safetensors", "lock", "../lock", "x.py")
    ... ]
    [True, True, False, False]
    """
    return (
        name in (CATALOG_FILE, f"{CATALOG_FILE}-wal", READERS_FILE, LOCK_FILE)
        or file_number(name) is not None
    )


@interruptible_contextmanager
def build_store_folder(path: Path) -> Iterator[Path]:
    """A folder to make a store in, which becomes `path` at the end; an error leaves neither.

    Nobody sees it before it is whole, and what another process has put at `path` meanwhile stays.
    """
    # Its name is known before it is there, so that Ctrl-C cannot fall between the two.
    aside = path.parent / f".{path.name}.{token_hex(4)}"
    held = contextlib.ExitStack()
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned_folders(path.parent)
            aside.mkdir(0o700)
            new = held.enter_context(open(aside / "new", "xb"))  # noqa: SIM115
            try_lock_file(new.fileno())
            os.rename(aside / "new", aside / MAKER_LOCK_FILE)  # nobody sees it before it is locked
        except OSError as error:
            raise StoreUnwritableError(f"{path} cannot be made ({error.strerror})") from error
        yield aside / path.name
        try:
            os.rename(aside / path.name, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise StoreUnwritableError(f"{path} cannot be made ({error.strerror})") from error
            raise ArgumentError(
                f"{path} was made by somebody else meanwhile, and stays as it is: open it and use "
                "extend, or choose another path"
            ) from error
        _sync(path.parent)
    except QkvError as error:
        hidden, told = str(aside / path.name), str(error)
        if hidden in told:  # which is gone when somebody reads it
            error.args = (told.replace(hidden, str(path)), *error.args[1:])
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        held.close()
        # Where no descriptors were left, there is one now, which is enough for this.
        for folder, _, names in os.walk(aside, topdown=False):
            with contextlib.suppress(OSError):
                for name in names:
                    os.unlink(os.path.join(folder, name))
                os.rmdir(folder)


def folder_size(path: Path) -> int:
    """The bytes of every file in it, of those that do not go meanwhile."""
    found = 0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if file.is_file():
                found += file.lstat().st_size
    return found
