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

from qkv.database.faults import Damaged, Locked, Unwritable, unwritable
from qkv.database.store import mark, plain
from qkv.database.store.catalogue import Catalogue
from qkv.database.store.mark import WRITER, Mark
from qkv.types import releasing

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

READERS = "readers"
PATIENCE = 0.2
"""Seconds to wait for a writer that is only tidying up."""


def _module(folder: Path) -> ModuleType:
    if fcntl is None:
        raise Unwritable(
            f"{folder.name} cannot be locked: a store on disk needs POSIX file locks, which this "
            "system has not; keep the database in memory"
        )
    return fcntl


def seized(file: int) -> bool:
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

    The system drops the lock when its holder dies, so nothing is ever left locked. `mark` is what
    the last writer has acknowledged, known while the lock is held.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        self.mark: Mark | None = None

    @property
    def held(self) -> bool:
        return self._file >= 0

    def take(self, patience: float = PATIENCE) -> None:
        if self.held:
            return
        locks = _module(self._folder)
        try:
            file = plain.opened(self._folder / WRITER, os.O_RDWR | os.O_CREAT)
        except Damaged:
            raise
        except OSError as error:
            many = error.errno in (errno.EMFILE, errno.ENFILE)
            step = "close other files" if many else "make the folder writable, or only read"
            raise Unwritable(
                f"{self._folder / WRITER} cannot be opened for writing ({error.strerror}): {step}"
            ) from error
        try:
            self._wait(file, locks, time.monotonic() + patience)
            _, self.mark = mark.read(file)
            self._file = file
        except BaseException:  # Ctrl-C too: an open file would keep the lock
            os.close(file)
            raise
        with contextlib.suppress(OSError):  # a full disk: the holder is not named, that is all
            mark.write(file, self.mark)

    def _wait(self, file: int, locks: ModuleType, until: float) -> None:
        while True:
            try:
                locks.flock(file, locks.LOCK_EX | locks.LOCK_NB)
                return
            except OSError as error:
                if time.monotonic() < until:
                    time.sleep(0.005)
                    continue
                holder, _ = mark.read(file)
                who = f"process {holder or 'unknown'}"
                if holder == str(os.getpid()):
                    who = f"this process ({holder}), which has it open twice"
                raise Locked(
                    f"{self._folder.name} is locked by {who}: close it there, or wait until it is "
                    "closed, and try again; reading needs no lock"
                ) from error

    @releasing
    def changing(self) -> Iterator[None]:
        """Until this has ended well, every reader looks into the catalogue itself."""
        if self.mark is not None and not self._leave(self.mark._replace(seal="")):
            raise Unwritable(f"{self._folder / WRITER} cannot be written: nothing was changed")
        yield
        if self.mark is not None and not self.mark.seal:
            self.acknowledge(self.mark.version, self.mark.files)

    def acknowledge(self, version: int, files: int) -> None:
        """Leave a mark of a commit, before it is told to anybody."""
        self._leave(mark.sealed(version, files))

    def _leave(self, left: Mark) -> bool:
        """Whether the mark is this one, or none."""
        self.mark = left
        try:
            mark.write(self._file, left)
        except OSError:  # no mark is better than an old one
            self.mark = None
            try:
                os.ftruncate(self._file, 0)
            except OSError:
                return False
        return True

    def valid(self, catalogue: Catalogue) -> None:
        """Refuse to write where the folder or its catalogue is gone, or is another one by now."""
        try:
            there = os.stat(self._folder / WRITER, follow_symlinks=False)
            same = os.path.samestat(there, os.fstat(self._file)) and catalogue.there()
        except OSError:
            same = False
        if not same:
            raise Unwritable(
                f"{self._folder} was removed or replaced while it was open, and what is written "
                "now would be lost: close it, and open it again"
            )

    def drop(self) -> None:
        if self.held:
            # No LOCK_UN: a forked child that closes its copy must not unlock its parent's. It is
            # forgotten first: after Ctrl-C in between, the number would be another file's.
            file, self._file = self._file, -1
            os.close(file)


class Pins:
    """The versions that are being read, so that compaction keeps what they need.

    A reader of version v holds a shared lock on byte v of one file; a compaction drops a version
    only while it holds that byte alone. Where the system has no locks that belong to an open file
    (`F_OFD_SETLK`), a reader locks the whole file, and holds every version.

    >>> pins = Pins(None)
    >>> pins.hold(3), pins.seize(3), pins.seize(2), pins.hold(2)
    (True, False, True, False)
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._process = os.getpid()
        self._held: dict[int, set[object]] = {}
        self._seized: set[int] = set()
        self._reader = self._seizer = -1
        self._dropped: deque[tuple[int, object]] = deque()
        self.begin_anew()

    def begin_anew(self) -> None:
        """With a lock that is free.

        It is taken by `with` alone: after any call an interrupt may come before the `try`.
        """
        self._lock: Any = threading.RLock()

    def hold(self, version: int, holder: object = None) -> bool:
        """Pin a version; False while a compaction is dropping it."""
        with self._lock:
            got = version not in self._seized
            if got and not self._held.get(version):
                self._held[version] = set()
                got = self._share(version)
            if got:
                self._held[version].add(holder)
        self._settle()
        return got

    def release(self, version: int, holder: object = None) -> None:
        """Let go of a hold, if there is one. A finaliser may call this at any moment, even inside
        `hold`."""
        self._dropped.append((version, holder))
        self._settle()

    def seize(self, version: int) -> bool:
        """Claim a version for dropping; False where somebody reads it."""
        self._settle()
        with self._lock:
            got = not self._held.get(version) and (self._folder is None or self._claim(version))
            if got:
                self._seized.add(version)
        self._settle()
        return got

    def unseize(self) -> None:
        """Give up all claims."""
        with self._lock:
            self._seized.clear()
            if self._seizer >= 0:
                file, self._seizer = self._seizer, -1
                os.close(file)

    def close(self) -> None:
        self.unseize()
        with self._lock:
            self._held.clear()
            if self._reader >= 0:
                file, self._reader = self._reader, -1
                os.close(file)

    def _settle(self) -> None:
        # Inside of a hold it waits for the end of that.
        while self._dropped and not self._lock._is_owned():
            with self._lock:
                while self._dropped:
                    # The last to go: what an interrupt leaves is done again by the next.
                    version, holder = self._dropped[0]
                    holders = self._held.get(version, set())
                    holders.discard(holder)
                    if not holders:
                        self._unshare(version)
                        self._held.pop(version, None)
                    self._dropped.popleft()

    def _open(self) -> int:
        assert self._folder is not None
        try:
            return plain.opened(self._folder / READERS, os.O_RDWR | os.O_CREAT)
        except Damaged:
            raise
        except OSError:
            return plain.opened(self._folder / READERS, os.O_RDONLY)

    def _share(self, version: int) -> bool:
        if self._folder is None or fcntl is None:
            return True
        if self._reader < 0:
            try:
                self._reader = self._open()
            except (FileNotFoundError, PermissionError):
                return True  # a read-only folder without the file: nobody compacts it either
            except OSError as error:
                raise plain.unreadable(self._folder / READERS, error) or error from None
        return _lock(self._reader, version, exclusive=False)

    def _unshare(self, version: int) -> None:
        # The locks of a forked child are its parent's.
        if self._reader < 0 or os.getpid() != self._process:
            return
        assert fcntl is not None
        if hasattr(fcntl, "F_OFD_SETLK"):
            fcntl.fcntl(self._reader, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, version))
        elif not any(self._held.values()):
            fcntl.flock(self._reader, fcntl.LOCK_UN)

    def _claim(self, version: int) -> bool:
        # Another open file than the reader's, so that our own pins are in the way too.
        if self._seizer < 0:
            assert self._folder is not None
            try:
                self._seizer = self._open()
            except Damaged:
                raise
            except OSError as error:
                raise unwritable(self._folder / READERS, error) from error
        return _lock(self._seizer, version, exclusive=True)


def _range(kind: int, version: int) -> bytes:
    """C's `struct flock` for the one byte of a version."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, version, 1, 0)


def _lock(file: int, version: int, *, exclusive: bool) -> bool:
    assert fcntl is not None
    try:
        if hasattr(fcntl, "F_OFD_SETLK"):
            kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _range(kind, version))
        else:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
