"""The folder of a store: recognize it, create it, and list its files."""

from __future__ import annotations

import contextlib
import difflib
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
from qkv.util.logging import log_warning
from qkv.util.types import interruptible_contextmanager

NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)
"""Errors of systems that cannot sync folders, or that do not let this user sync this folder."""


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a store as a `Path`; raise if no file system allows it."""
    try:
        folder = Path(path)
        os.fsencode(folder)
    except TypeError:
        kind = type(path).__name__
        raise DtypeError(f"path must be the name of a folder, not a {kind}") from None
    except UnicodeEncodeError:
        raise ArgumentError(
            f"path contains a lone surrogate, which no file name has: {path!r}"
        ) from None
    if "\0" in str(folder):
        raise ArgumentError(
            f"path contains a NUL character, which no file name has: {str(folder)[:80]!r}"
        )
    return folder


def is_creatable(folder: Path) -> bool:
    """Return whether there is no such folder; raise if none can be created there."""
    try:
        if folder.exists():
            return False
        parent = next(parent for parent in folder.absolute().parents if parent.exists())
    except OSError as error:
        raise _inaccessible_error(folder, error) from error
    problem = (
        errno.ENOTDIR
        if not parent.is_dir()
        else 0
        if os.access(parent, os.W_OK | os.X_OK)
        else errno.EACCES
    )
    if problem:
        raise StoreUnwritableError(f"{folder} cannot be created ({os.strerror(problem)})")
    return True


def not_found_error(folder: Path, advice: str) -> StoreNotFoundError:
    """Return the error for a missing folder, which names the store with the most similar name."""
    try:
        stores = [x.name for x in folder.absolute().parent.iterdir() if (x / CATALOG_FILE).exists()]
    except OSError:
        stores = []
    nearest = difflib.get_close_matches(folder.name, stores, 1)
    hint = f"did you mean {folder.with_name(nearest[0])}? Otherwise " if nearest else ""
    return StoreNotFoundError(f"{folder} does not exist: {hint}check the path, or {advice}")


def _inaccessible_error(folder: Path, error: OSError) -> StoreUnwritableError:
    return StoreUnwritableError(
        f"{str(folder)[:80]} cannot be accessed ({error.strerror}): choose another path"
    )


def prepare_folder(folder: Path, create: bool) -> None:
    """Check that the folder is a store, or create a store in it.

    Raise an error that says what is there instead, and the next step.
    """
    try:
        exists = folder.exists()
    except OSError as error:
        raise _inaccessible_error(folder, error) from error
    if not exists:
        if not create:
            raise not_found_error(folder, "create a store with qkv import or create=True")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnwritableError(f"{folder} cannot be created ({error.strerror})") from error
    if not folder.is_dir():
        raise NotAStoreError(
            f"{folder} is a file, but a store is a folder. Import a table: "
            "qkv import, Database.from_source(file, path=…)"
        )
    path = folder / CATALOG_FILE
    names = list_store_files(folder)
    # Every complete store has one of these files.
    is_old_store = names & {READERS_FILE, LOCK_FILE} or any(
        name.endswith(SEGMENT_SUFFIX) for name in names
    )
    has_catalog = CATALOG_FILE in names
    if has_catalog:
        with Catalog(path, write=False) as catalog:
            if catalog.check_is_store():
                return
    if is_old_store:
        raise StoreDamagedError(
            f"{path} is {'empty' if has_catalog else 'missing'}: restore it from a backup, or "
            "recover what can be read with qkv check --repair"
        )
    if names and not has_catalog:
        raise NotAStoreError(f"{folder} is a folder with other files: pass the path of a store")
    if not create:
        raise StoreNotFoundError(
            f"{folder} is empty: check the path, or create a store with qkv import or create=True"
        )
    Catalog(path, create=True).close()
    with open(folder / READERS_FILE, "ab"):
        pass
    for path_to_sync in (folder, folder.absolute().parent):
        _sync_folder(path_to_sync)


def _sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk.

    A failure is only logged: it matters only if the power fails.
    """
    try:
        FileSystem().fsync_folder(folder)
    except OSError as error:
        if error.errno not in NO_SYNC:
            log_warning("%s cannot be synced to disk (%s)", folder, reason(error))


def list_store_files(folder: Path) -> set[str]:
    """Return the names of all entries of a folder; raise if a file of the store is a link."""
    names = set(safe_open.list_names(folder))
    endings = (
        CATALOG_FILE,
        SEGMENT_SUFFIX,
        SEGMENT_SUFFIX + TEMPORARY_SUFFIX,
        "-wal",
        "-shm",
        READERS_FILE,
        LOCK_FILE,
    )
    safe_open.refuse_links(*(folder / name for name in names if name.endswith(endings)))
    return names


def is_store_file(name: str) -> bool:
    """Return whether this is the name of a file of a store.

    Up- and downloads accept no other names.

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
    """Yield the path of a temporary folder for a new store; rename it to `path` at the end.

    So other processes see the store only when it is complete. After an error, the temporary folder
    is removed. If another process has created `path` meanwhile, that folder is left unchanged.
    """
    # Choose the name before creating the folder: Ctrl-C between both leaves nothing to remove.
    temporary = path.parent / f".{path.name}.{token_hex(4)}"
    open_files = contextlib.ExitStack()
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned_folders(path.parent)
            temporary.mkdir(0o700)
            new = open_files.enter_context(open(temporary / "new", "xb"))  # noqa: SIM115
            try_lock_file(new.fileno())
            # Rename the file after locking it, so that no other process finds it unlocked.
            os.rename(temporary / "new", temporary / MAKER_LOCK_FILE)
        except OSError as error:
            raise StoreUnwritableError(f"{path} cannot be created ({error.strerror})") from error
        yield temporary / path.name
        try:
            os.rename(temporary / path.name, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise StoreUnwritableError(
                    f"{path} cannot be created ({error.strerror})"
                ) from error
            raise ArgumentError(
                f"{path} was created by another process meanwhile and is unchanged: open it and "
                "use extend, or choose another path"
            ) from error
        _sync_folder(path.parent)
    except QkvError as error:
        hidden, message = str(temporary / path.name), str(error)
        if hidden in message:  # the temporary folder is gone when the user reads the message
            error.args = (message.replace(hidden, str(path)), *error.args[1:])
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        open_files.close()
        # rmtree fails if no file descriptor is free. Now one is free, and os.walk needs only one.
        for folder, _, names in os.walk(temporary, topdown=False):
            with contextlib.suppress(OSError):
                for name in names:
                    os.unlink(os.path.join(folder, name))
                os.rmdir(folder)


def folder_size(path: Path) -> int:
    """Return the total size in bytes of a folder's files."""
    total = 0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process removed the file
            if file.is_file():
                total += file.lstat().st_size
    return total
