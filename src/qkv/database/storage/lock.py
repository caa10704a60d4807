"""Who may write and what is being read: one writer, and readers that pin the version they read."""

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
"""Seconds to wait for a writer that is only tidying up."""


def _require_fcntl(folder: Path) -> ModuleType:
    if fcntl is None:
        raise StoreUnwritableError(
            f"{folder.name} cannot be locked: a store on disk needs POSIX file locks, which this "
            "system has not; keep the database in memory"
        )
    return fcntl


def try_lock_file(file: int) -> bool:
    """Whether nobody else has the open file locked: then it is, until it is closed."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class WriteLock:
    """The one writer of a folder, across processes: `flock` on a file with the holder's id inside.

    The system drops the lock when its holder dies, so nothing is ever left locked. `marker` is what
    the last writer has acknowledged, known while the lock is held.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        self.marker: CommitMarker | None = None

    @property
    def is_held(self) -> bool:
        return self._file >= 0

    def acquire(self, patience: float = LOCK_WAIT_SECONDS) -> None:
        if self.is_held:
            return
        locks = _require_fcntl(self._folder)
        try:
            file = safe_open.open_regular_file(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        except StoreDamagedError:
            raise
        except OSError as error:
            many = error.errno in (errno.EMFILE, errno.ENFILE)
            step = "close other files" if many else "make the folder writable, or only read"
            raise StoreUnwritableError(
                f"{self._folder / LOCK_FILE} cannot be opened for writing ({error.strerror}): "
                f"{step}"
            ) from error
        try:
            self._wait_for_lock(file, locks, time.monotonic() + patience)
            _, self.marker = commit_marker.read_lock_file(file)
            self._file = file
        except BaseException:  # Ctrl-C too: an open file would keep the lock
            os.close(file)
            raise
        with contextlib.suppress(OSError):  # a full disk: the holder is not named, that is all
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
                who = f"process {holder or 'unknown'}"
                if holder == str(os.getpid()):
                    who = f"this process ({holder}), which has it open twice"
                raise StoreLockedError(
                    f"{self._folder.name} is locked by {who}: close it there, or wait until it is "
                    "closed, and try again; reading needs no lock"
                ) from error

    @interruptible_contextmanager
    def mark_changing(self) -> Iterator[None]:
        """Until this has ended well, every reader looks into the catalogue itself."""
        if self.marker is not None and not self._write_marker(self.marker._replace(seal="")):
            raise StoreUnwritableError(
                f"{self._folder / LOCK_FILE} cannot be written: nothing was changed"
            )
        yield
        if self.marker is not None and not self.marker.seal:
            self.acknowledge_commit(self.marker.version, self.marker.next_file_number)

    def acknowledge_commit(self, version: int, files: int) -> None:
        """Leave a mark of a commit, before it is told to anybody."""
        self._write_marker(commit_marker.new_marker(version, files))

    def _write_marker(self, left: CommitMarker) -> bool:
        """Whether the mark is this one, or none."""
        self.marker = left
        try:
            commit_marker.write_marker(self._file, left)
        except OSError:  # no mark is better than an old one
            self.marker = None
            try:
                os.ftruncate(self._file, 0)
            except OSError:
                return False
        return True

    def check_folder(self, catalogue: Catalog) -> None:
        """Refuse to write where the folder or its catalogue is gone, or is another one by now."""
        try:
            there = os.stat(self._folder / LOCK_FILE, follow_symlinks=False)
            same = os.path.samestat(there, os.fstat(self._file)) and catalogue.is_same_file()
        except OSError:
            same = False
        if not same:
            raise StoreUnwritableError(
                f"{self._folder} was removed or replaced while it was open, and what is written "
                "now would be lost: close it, and open it again"
            )

    def release(self) -> None:
        if self.is_held:
            # No LOCK_UN: a forked child that closes its copy must not unlock its parent's. It is
            # forgotten first: after Ctrl-C in between, the number would be another file's.
            file, self._file = self._file, -1
            os.close(file)


class VersionPins:
    """The versions that are being read, so that compaction keeps what they need.

    A reader of version v holds a shared lock on byte v of one file; a compaction drops a version
    only while it holds that byte alone. Where the system has no locks that belong to an open file
    (`F_OFD_SETLK`), a reader locks the whole file, and holds every version.

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
        """With a lock that is free.

        It is taken by `with` alone: after any call an interrupt may come before the `try`.
        """
        self._lock: Any = threading.RLock()

    def pin_version(self, version: int, holder: object = None) -> bool:
        """Pin a version; False while a compaction is dropping it."""
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
        """Let go of a hold, if there is one. A finaliser may call this at any moment, even inside
        `pin_version`."""
        self._pending_releases.append((version, holder))
        self._apply_releases()

    def claim_version(self, version: int) -> bool:
        """Claim a version for dropping; False where somebody reads it."""
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
        """Give up all claims."""
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
        # Inside of a hold it waits for the end of that.
        while self._pending_releases and not self._lock._is_owned():
            with self._lock:
                while self._pending_releases:
                    # The last to go: what an interrupt leaves is done again by the next.
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
                return True  # a read-only folder without the file: nobody compacts it either
            except OSError as error:
                raise (
                    safe_open.unreadable_error(self._folder / READERS_FILE, error) or error
                ) from None
        return _lock_byte(self._reader_file, version, exclusive=False)

    def _unlock_shared(self, version: int) -> None:
        # The locks of a forked child are its parent's.
        if self._reader_file < 0 or os.getpid() != self._process_id:
            return
        assert fcntl is not None
        if hasattr(fcntl, "F_OFD_SETLK"):
            fcntl.fcntl(self._reader_file, fcntl.F_OFD_SETLK, _flock_struct(fcntl.F_UNLCK, version))
        elif not any(self._holders.values()):
            fcntl.flock(self._reader_file, fcntl.LOCK_UN)

    def _lock_exclusive(self, version: int) -> bool:
        # Another open file than the reader's, so that our own pins are in the way too.
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
    """C's `struct flock` for the one byte of a version."""
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
