"""Locks of a store: one writer at a time, readers that pin a version, and safe forks."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

from qkv.database.errors import (
    StoreDamagedError,
    StoreLockedError,
    StoreUnwritableError,
    unwritable_error,
)
from qkv.database.storage import commit_marker, safe_open
from qkv.database.storage.catalog import Catalog
from qkv.database.storage.commit_marker import LOCK_FILE, CommitMarker
from qkv.util.types import interruptible_contextmanager

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

READERS_FILE = "readers"
LOCK_WAIT_SECONDS = 0.2
"""How long to wait for another writer that may be about to finish."""


def _require_fcntl(folder: Path) -> ModuleType:
    """Return the module fcntl; raise if the system has none."""
    if fcntl is None:
        raise StoreUnwritableError(
            f"{folder.name} cannot be locked: a store on disk needs POSIX file locks, which this "
            "system does not have. Keep the database in memory"
        )
    return fcntl


def try_lock_file(file: int) -> bool:
    """Lock an open file until it is closed. Return False if another process has the lock."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class WriteLock:
    """The lock of the only writer of a folder, which works across processes (`flock` on a file).

    The system releases the lock when the process dies, so a crash leaves no lock behind. `marker`
    is the last acknowledged commit; it is valid while the lock is held.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        self.marker: CommitMarker | None = None

    @property
    def is_held(self) -> bool:
        return self._file >= 0

    def acquire(self, wait_seconds: float = LOCK_WAIT_SECONDS) -> None:
        """Take the lock; wait up to `wait_seconds` if another process holds it."""
        if self.is_held:
            return
        locks = _require_fcntl(self._folder)
        try:
            file = safe_open.open_regular_file(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        except StoreDamagedError:
            raise
        except OSError as error:
            too_many_files = error.errno in (errno.EMFILE, errno.ENFILE)
            next_step = (
                "close other files"
                if too_many_files
                else "make the folder writable, or open it only for reading"
            )
            raise StoreUnwritableError(
                f"{self._folder / LOCK_FILE} cannot be opened for writing ({error.strerror}): "
                f"{next_step}"
            ) from error
        try:
            self._wait_for_lock(file, locks, time.monotonic() + wait_seconds)
            _, self.marker = commit_marker.read_lock_file(file)
            self._file = file
        except BaseException:  # after Ctrl-C too, because an open file would keep the lock
            os.close(file)
            raise
        # On a full disk, the id of this process cannot be written.
        with contextlib.suppress(OSError):
            commit_marker.write_marker(file, self.marker)

    def _wait_for_lock(self, file: int, locks: ModuleType, until: float) -> None:
        while True:
            try:
                locks.flock(file, locks.LOCK_EX | locks.LOCK_NB)
                return
            except OSError as error:
                if time.monotonic() < until:
                    time.sleep(0.005)
                    continue
                holder, _ = commit_marker.read_lock_file(file)
                owner = f"process {holder or 'unknown'}"
                if holder == str(os.getpid()):
                    owner = f"this process ({holder}), which has it open twice"
                raise StoreLockedError(
                    f"{self._folder.name} is locked by {owner}: close the database there, or wait "
                    "until it is closed, and try again. Reading needs no lock"
                ) from error

    @interruptible_contextmanager
    def mark_changing(self) -> Iterator[None]:
        """Remove the marker's seal while the body runs: readers must then query the catalog."""
        if self.marker is not None and not self._write_marker(self.marker._replace(seal="")):
            raise StoreUnwritableError(
                f"{self._folder / LOCK_FILE} cannot be written: nothing was changed"
            )
        yield
        if self.marker is not None and not self.marker.seal:
            self.acknowledge_commit(self.marker.version, self.marker.next_file_number)

    def acknowledge_commit(self, version: int, next_file_number: int) -> None:
        """Write the marker of a commit, before the call that made the commit returns."""
        self._write_marker(commit_marker.new_marker(version, next_file_number))

    def _write_marker(self, marker: CommitMarker) -> bool:
        """Write the marker. If that fails, remove the old one; return False if that fails too."""
        self.marker = marker
        try:
            commit_marker.write_marker(self._file, marker)
        except OSError:  # having no marker is better than having an old one
            self.marker = None
            try:
                os.ftruncate(self._file, 0)
            except OSError:
                return False
        return True

    def check_folder(self, catalog: Catalog) -> None:
        """Raise `StoreUnwritableError` if the folder or its catalog was removed or replaced."""
        try:
            lock_file = os.stat(self._folder / LOCK_FILE, follow_symlinks=False)
            same = os.path.samestat(lock_file, os.fstat(self._file)) and catalog.is_same_file()
        except OSError:
            same = False
        if not same:
            raise StoreUnwritableError(
                f"{self._folder} was removed or replaced while it was open, so new rows would be "
                "lost: close it, and open it again"
            )

    def release(self) -> None:
        """Release the lock if it is held."""
        if self.is_held:
            # Do not use LOCK_UN: a forked child that closes its copy would unlock the parent's
            # lock. Reset the attribute first: after Ctrl-C between the two steps, the same number
            # could belong to another file.
            file, self._file = self._file, -1
            os.close(file)


class VersionPins:
    """The versions that readers use, and that compaction must therefore keep.

    A reader of version v holds a shared lock on byte v of one file. A compaction first claims each
    version that it drops: it takes an exclusive lock on the byte. Some systems have no locks per
    open file (`F_OFD_SETLK`). There, a reader locks the whole file and so pins every version.

    >>> pins = VersionPins(None)
    >>> pins.pin_version(3), pins.claim_version(3), pins.claim_version(2), pins.pin_version(2)
    (True, False, True, False)
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._process_id = os.getpid()
        self._holders: dict[int, set[object]] = {}
        self._claimed: set[int] = set()
        self._reader_file = self._claim_file = -1
        self._pending_releases: deque[tuple[int, object]] = deque()
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Replace the lock by a new one that is free.

        Acquire this lock only with `with`: Ctrl-C could come between `acquire()` and `try`.
        """
        self._lock: Any = threading.RLock()

    def pin_version(self, version: int, holder: object = None) -> bool:
        """Pin a version for `holder`. Return False if a compaction is dropping the version."""
        with self._lock:
            is_pinned = version not in self._claimed
            if is_pinned and not self._holders.get(version):
                self._holders[version] = set()
                is_pinned = self._lock_shared(version)
            if is_pinned:
                self._holders[version].add(holder)
        self._apply_releases()
        return is_pinned

    def release_version(self, version: int, holder: object = None) -> None:
        """Release the pin of `holder`, if there is one.

        A finalizer may call this at any time, even while `pin_version` runs.
        """
        self._pending_releases.append((version, holder))
        self._apply_releases()

    def claim_version(self, version: int) -> bool:
        """Claim a version in order to drop it. Return False if a reader has pinned it."""
        self._apply_releases()
        with self._lock:
            is_claimed = not self._holders.get(version) and (
                self._folder is None or self._lock_exclusive(version)
            )
            if is_claimed:
                self._claimed.add(version)
        self._apply_releases()
        return is_claimed

    def release_claims(self) -> None:
        """Release all claims."""
        with self._lock:
            self._claimed.clear()
            if self._claim_file >= 0:
                file, self._claim_file = self._claim_file, -1
                os.close(file)

    def close(self) -> None:
        self.release_claims()
        with self._lock:
            self._holders.clear()
            if self._reader_file >= 0:
                file, self._reader_file = self._reader_file, -1
                os.close(file)

    def _apply_releases(self) -> None:
        """Release the pins in the queue, unless a call of this thread holds the lock."""
        # The call that holds the lock applies the releases at its end.
        while self._pending_releases and not self._lock._is_owned():
            with self._lock:
                while self._pending_releases:
                    # Remove the entry last: after an interrupt, the next call repeats its release.
                    version, holder = self._pending_releases[0]
                    holders = self._holders.get(version, set())
                    holders.discard(holder)
                    if not holders:
                        self._unlock_shared(version)
                        self._holders.pop(version, None)
                    self._pending_releases.popleft()

    def _open_file(self) -> int:
        """Open the file of the readers' locks, for writing if possible."""
        assert self._folder is not None
        try:
            return safe_open.open_regular_file(self._folder / READERS_FILE, os.O_RDWR | os.O_CREAT)
        except StoreDamagedError:
            raise
        except OSError:
            return safe_open.open_regular_file(self._folder / READERS_FILE, os.O_RDONLY)

    def _lock_shared(self, version: int) -> bool:
        """Lock the byte of a version for reading; return False if a compaction has claimed it."""
        if self._folder is None or fcntl is None:
            return True
        if self._reader_file < 0:
            try:
                self._reader_file = self._open_file()
            except (FileNotFoundError, PermissionError):
                return True  # no process can compact a read-only folder without this file
            except OSError as error:
                raise (
                    safe_open.unreadable_error(self._folder / READERS_FILE, error) or error
                ) from None
        return _lock_byte(self._reader_file, version, exclusive=False)

    def _unlock_shared(self, version: int) -> None:
        # A forked child shares its parent's locks and must not release them.
        if self._reader_file < 0 or os.getpid() != self._process_id:
            return
        assert fcntl is not None
        if hasattr(fcntl, "F_OFD_SETLK"):
            fcntl.fcntl(self._reader_file, fcntl.F_OFD_SETLK, _flock_struct(fcntl.F_UNLCK, version))
        elif not any(self._holders.values()):
            fcntl.flock(self._reader_file, fcntl.LOCK_UN)

    def _lock_exclusive(self, version: int) -> bool:
        """Lock the byte of a version for compaction; return False if it has readers."""
        # Use another descriptor than for reading, so that pins of this process conflict too.
        if self._claim_file < 0:
            assert self._folder is not None
            try:
                self._claim_file = self._open_file()
            except StoreDamagedError:
                raise
            except OSError as error:
                raise unwritable_error(self._folder / READERS_FILE, error) from error
        return _lock_byte(self._claim_file, version, exclusive=True)


def _flock_struct(kind: int, version: int) -> bytes:
    """Return C's `struct flock` for the lock of one version's byte, as bytes."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, version, 1, 0)


def _lock_byte(file: int, version: int, *, exclusive: bool) -> bool:
    """Lock the byte of a version; return False if a lock of another file conflicts."""
    assert fcntl is not None
    try:
        if hasattr(fcntl, "F_OFD_SETLK"):
            kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _flock_struct(kind, version))
        else:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


_FORK_HANDLERS: WeakSet[Any] = WeakSet()
_REGISTRY_LOCK = threading.RLock()
_held_locks: list[Any] = []


# Forks: the child gets a consistent copy of every store in memory, with new locks.


def register_fork_handler(thing: Any) -> None:
    """Keep an object consistent when the process forks.

    Before a fork, the lock that `thing.fork_lock()` returns is acquired, so that no operation is in
    progress. In the child, `thing.reset_after_fork()` replaces the locks that other threads held.
    """
    with _REGISTRY_LOCK:  # `_before_fork` iterates over the set
        _FORK_HANDLERS.add(thing)


# If a fork handler raises, for example after Ctrl-C, Python prints the error and runs the other
# handlers. Ctrl-C takes effect only between two calls.
def _before_fork() -> None:
    """Acquire the locks of all registered objects."""
    global _held_locks
    _REGISTRY_LOCK.acquire()
    for thing in list(_FORK_HANDLERS):
        lock = thing.fork_lock()
        _held_locks += [lock]
        lock.acquire()


def _after_fork() -> None:
    """Release these locks; try twice, because Ctrl-C may interrupt the first try."""
    try:
        _release_locks()
    finally:
        _release_locks()


def _release_locks() -> None:
    """Release the locks that `_before_fork` has acquired."""
    if _REGISTRY_LOCK._is_owned():  # type: ignore[attr-defined]
        while _held_locks:
            lock = _held_locks[-1]
            ours = lock._is_owned()
            del _held_locks[-1]
            if ours:
                lock.release()
        _REGISTRY_LOCK.release()


def _after_fork_in_child() -> None:
    """Release the locks, then give every registered object new ones."""
    _after_fork()
    for thing in list(_FORK_HANDLERS):
        thing.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )
