"""Locks: one writer per store, readers that pin the version they read, and locks across forks."""

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
"""Seconds to wait for a writer that is about to finish."""


def _require_fcntl(folder: Path) -> ModuleType:
    if fcntl is None:
        raise StoreUnwritableError(
            f"{folder.name} cannot be locked: a store on disk needs POSIX file locks, which this "
            "system does not have. Keep the database in memory"
        )
    return fcntl


def try_lock_file(file: int) -> bool:
    """Try to lock an open file until it is closed; return False if another process has the lock."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class WriteLock:
    """The lock of a folder's only writer, across processes: `flock` on a file.

    The system releases the lock when its holder dies, so no stale lock remains. `marker` is the
    last acknowledged commit, and valid while the lock is held.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        self.marker: CommitMarker | None = None

    @property
    def is_held(self) -> bool:
        return self._file >= 0

    def acquire(self, wait_seconds: float = LOCK_WAIT_SECONDS) -> None:
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
        except BaseException:  # also after Ctrl-C: an open file would keep the lock
            os.close(file)
            raise
        with contextlib.suppress(OSError):  # on a full disk the file lacks the holder's id
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
                    f"{self._folder.name} is locked by {owner}: close it there, or wait until it "
                    "is closed, and try again. Reading needs no lock"
                ) from error

    @interruptible_contextmanager
    def mark_changing(self) -> Iterator[None]:
        """Remove the marker's seal while the body runs, so that readers query the catalog."""
        if self.marker is not None and not self._write_marker(self.marker._replace(seal="")):
            raise StoreUnwritableError(
                f"{self._folder / LOCK_FILE} cannot be written: nothing was changed"
            )
        yield
        if self.marker is not None and not self.marker.seal:
            self.acknowledge_commit(self.marker.version, self.marker.next_file_number)

    def acknowledge_commit(self, version: int, next_file_number: int) -> None:
        """Write the marker of a commit, before its caller learns of it."""
        self._write_marker(commit_marker.new_marker(version, next_file_number))

    def _write_marker(self, marker: CommitMarker) -> bool:
        """Write the marker, or remove it if that fails; return False if both fail."""
        self.marker = marker
        try:
            commit_marker.write_marker(self._file, marker)
        except OSError:  # no marker is better than an old one
            self.marker = None
            try:
                os.ftruncate(self._file, 0)
            except OSError:
                return False
        return True

    def check_folder(self, catalog: Catalog) -> None:
        """Raise if the folder or its catalog was removed or replaced."""
        try:
            lock_file = os.stat(self._folder / LOCK_FILE, follow_symlinks=False)
            same = os.path.samestat(lock_file, os.fstat(self._file)) and catalog.is_same_file()
        except OSError:
            same = False
        if not same:
            raise StoreUnwritableError(
                f"{self._folder} was removed or replaced while it was open, so that new rows would "
                "be lost: close it, and open it again"
            )

    def release(self) -> None:
        if self.is_held:
            # No LOCK_UN: a forked child that closes its copy must not unlock its parent's. Reset
            # the attribute first: after Ctrl-C in between, the number could be another file's.
            file, self._file = self._file, -1
            os.close(file)


class VersionPins:
    """The versions that are being read, which compaction must keep.

    A reader of version v holds a shared lock on byte v of one file. A compaction drops a version
    only while it holds an exclusive lock on its byte. On systems without locks per open file
    (`F_OFD_SETLK`), a reader locks the whole file and pins every version.

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
        """Replace the lock by a free one.

        Acquire it only with `with`: an interrupt could fall between `acquire()` and `try`.
        """
        self._lock: Any = threading.RLock()

    def pin_version(self, version: int, holder: object = None) -> bool:
        """Pin a version; return False while a compaction is dropping it."""
        with self._lock:
            got = version not in self._claimed
            if got and not self._holders.get(version):
                self._holders[version] = set()
                got = self._lock_shared(version)
            if got:
                self._holders[version].add(holder)
        self._apply_releases()
        return got

    def release_version(self, version: int, holder: object = None) -> None:
        """Release a pin, if there is one. A finalizer may call this at any time, even inside
        `pin_version`."""
        self._pending_releases.append((version, holder))
        self._apply_releases()

    def claim_version(self, version: int) -> bool:
        """Claim a version in order to drop it; return False if it has readers."""
        self._apply_releases()
        with self._lock:
            got = not self._holders.get(version) and (
                self._folder is None or self._lock_exclusive(version)
            )
            if got:
                self._claimed.add(version)
        self._apply_releases()
        return got

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
        # A thread that holds the lock applies the releases later.
        while self._pending_releases and not self._lock._is_owned():
            with self._lock:
                while self._pending_releases:
                    # Removed from the queue last: after an interrupt, the next call repeats it.
                    version, holder = self._pending_releases[0]
                    holders = self._holders.get(version, set())
                    holders.discard(holder)
                    if not holders:
                        self._unlock_shared(version)
                        self._holders.pop(version, None)
                    self._pending_releases.popleft()

    def _open_file(self) -> int:
        assert self._folder is not None
        try:
            return safe_open.open_regular_file(self._folder / READERS_FILE, os.O_RDWR | os.O_CREAT)
        except StoreDamagedError:
            raise
        except OSError:
            return safe_open.open_regular_file(self._folder / READERS_FILE, os.O_RDONLY)

    def _lock_shared(self, version: int) -> bool:
        if self._folder is None or fcntl is None:
            return True
        if self._reader_file < 0:
            try:
                self._reader_file = self._open_file()
            except (FileNotFoundError, PermissionError):
                return True  # a read-only folder without the file: no process compacts it
            except OSError as error:
                raise (
                    safe_open.unreadable_error(self._folder / READERS_FILE, error) or error
                ) from None
        return _lock_byte(self._reader_file, version, exclusive=False)

    def _unlock_shared(self, version: int) -> None:
        # A forked child shares the locks of its parent.
        if self._reader_file < 0 or os.getpid() != self._process_id:
            return
        assert fcntl is not None
        if hasattr(fcntl, "F_OFD_SETLK"):
            fcntl.fcntl(self._reader_file, fcntl.F_OFD_SETLK, _flock_struct(fcntl.F_UNLCK, version))
        elif not any(self._holders.values()):
            fcntl.flock(self._reader_file, fcntl.LOCK_UN)

    def _lock_exclusive(self, version: int) -> bool:
        # Not the reader's descriptor: the pins of this process must conflict too.
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
    """Return C's `struct flock` for the byte of a version."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, version, 1, 0)


def _lock_byte(file: int, version: int, *, exclusive: bool) -> bool:
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


# Forks: a child gets a consistent copy of every store in memory, with free locks.


def register_fork_handler(thing: Any) -> None:
    """Keep an object consistent across forks.

    A fork first acquires the lock that `thing.fork_lock()` returns, so that no operation is in
    progress. In the child, `thing.reset_after_fork()` replaces locks that other threads held.
    """
    with _REGISTRY_LOCK:  # adding while `_before_fork` iterates would raise
        _FORK_HANDLERS.add(thing)


# Python reports an error in a fork handler and continues, so after a Ctrl-C in one handler the
# other still runs. An interrupt is raised only between calls.
def _before_fork() -> None:
    global _held_locks
    _REGISTRY_LOCK.acquire()
    for thing in list(_FORK_HANDLERS):
        lock = thing.fork_lock()
        _held_locks += [lock]
        lock.acquire()


def _after_fork() -> None:
    try:
        _release_locks()
    finally:
        _release_locks()


def _release_locks() -> None:
    if _REGISTRY_LOCK._is_owned():  # type: ignore[attr-defined]
        while _held_locks:
            lock = _held_locks[-1]
            ours = lock._is_owned()
            del _held_locks[-1]
            if ours:
                lock.release()
        _REGISTRY_LOCK.release()


def _after_fork_in_child() -> None:
    _after_fork()
    for thing in list(_FORK_HANDLERS):
        thing.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )
