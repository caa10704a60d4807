"""Every acknowledged row survives, and no half of another: killed writers, forgetful disks."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qkv.database.storage import Store, check_store, folder, garbage, limits, lock
from qkv.database.storage.blob_storage import FileSystem
from tests.database.storage import crash
from tests.interrupt import moments
from tests.sampling import FULL


@pytest.fixture
def tight(monkeypatch):
    for name in (
        "MAX_BUFFERED_ROWS",
        "MIN_BUNDLE_ROWS",
        "MAX_SEGMENT_BYTES",
        "SEGMENTS_PER_MERGE",
    ):
        monkeypatch.setattr(limits, name, getattr(limits, name))
    crash.tighten()


def test_killed_writers():
    crash.battery(200 if FULL else 10, seed=1)


KILLED = """
import os, sys
from pathlib import Path
from qkv.database.storage import Store, folder
from tests.sampling import FULL
making = [folder.build_store_folder(Path(name)) for name in sys.argv[1:]]
for one in making:
    Store(one.__enter__()).commit(records=["one"], digests=[b"1"])
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_import_left_is_swept(tmp_path):
    """By any process that creates, writes or repairs a store; never those of a running process."""
    places = [tmp_path / name for name in ("make", "write", "repair")]
    for place in places:
        with Store(place / "old.qkv") as store:
            store.commit(records=["one"], digests=[b"1"])
    subprocess.run([sys.executable, "-c", KILLED, *(place / "new.qkv" for place in places)])
    left = [*tmp_path.glob("*/.new.qkv.*/new.qkv/catalogue*")]
    assert len({path.parent for path in left}) == 3
    theirs = places[0] / ".new.qkv.abcdefgh"
    theirs.mkdir()
    with folder.build_store_folder(places[0] / "live.qkv") as part, Store(part, create=True):
        with folder.build_store_folder(places[0] / "new.qkv") as made, Store(made) as store:
            store.commit(records=["one"], digests=[b"1"])
        assert part.parent.is_dir()
    with Store(places[1] / "old.qkv") as store:
        store.commit(records=["two"], digests=[b"2"])
    assert check_store(places[2] / "old.qkv", repair=True) == []
    assert {path.name for path in tmp_path.glob("*/*")} == {
        "live.qkv",
        "new.qkv",
        "old.qkv",
        theirs.name,
    }


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals need the main thread"
)
# An interrupt may fall between opening a file and the `with` that closes it.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_interrupts(tmp_path, tight, place):
    """Ctrl-C at any moment: the step is done or not done, and the same store goes on."""

    def stop(*_):
        raise KeyboardInterrupt

    rng = random.Random(3)
    model, interrupted = crash.Model(), 0
    old = signal.signal(signal.SIGALRM, stop)
    try:
        with Store(tmp_path / "s" if place == "disk" else None) as s:
            while interrupted < (300 if FULL else 20):
                step = crash.plan(rng, model)
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.random() * 0.004 + 1e-5)
                    crash.perform(s, step, model)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                    signal.setitimer(signal.ITIMER_REAL, 0)
                [model] = [m for m in (model.after(step), model) if m.matches(s)][:1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        gc.collect()  # what an interrupt left open warns here, not in a later test
    if place == "disk":
        assert check_store(tmp_path / "s") == []


class PowerCut(BaseException):
    """The machine stops here."""


class Forgetful(FileSystem):
    """A disk that keeps only what was synced, and by chance some of the rest.

    It works on a real folder and remembers what a power cut would leave: the content of each file
    as last synced, the folder as last synced, and the changes since.
    """

    def __init__(self, budget: int, skip: tuple[str, ...] = ()) -> None:
        self.budget = budget
        self.skip = skip
        self.content: dict[str, object] = {}  # an inode for each name, as programs see it
        self.synced: set[int] = set()
        self.folder: dict[str, object] = {}  # the same, as the disk has it
        self.changes: list[tuple[str, str, object]] = []

    def tick(self) -> None:
        self.budget -= 1
        if self.budget < 0:
            raise PowerCut

    def write(self, path, chunks):
        self.tick()
        inode = self.content[path.name] = bytearray()
        self.changes.append(("link", path.name, inode))
        super().write(path, (self.noted(inode, chunk) for chunk in chunks))

    def noted(self, inode, chunk):
        inode += bytes(chunk)
        return chunk

    def fsync(self, file, path):
        self.tick()
        if "fsync" not in self.skip and path.name in self.content:
            self.synced.add(id(self.content[path.name]))

    def rename(self, source, target):
        self.tick()
        inode = self.content.pop(source.name)
        self.content[target.name] = inode
        self.changes.append(("unlink", source.name, inode))
        self.changes.append(("link", target.name, inode))
        super().rename(source, target)

    def unlink(self, path):
        self.tick()
        if path.name in self.content:
            self.changes.append(("unlink", path.name, self.content.pop(path.name)))
        super().unlink(path)

    def fsync_folder(self, folder):
        self.tick()
        if "fsync_folder" not in self.skip:
            for change in self.changes:
                self.apply(change)
            self.changes = []

    def apply(self, change):
        kind, name, inode = change
        if kind == "link":
            self.folder[name] = inode
        else:
            self.folder.pop(name, None)

    def cut(self, folder: Path, target: Path, rng: random.Random) -> None:
        """The files after a power cut. SQLite gives its own guarantee."""
        target.mkdir()
        for file in folder.iterdir():
            if not file.name.endswith((".safetensors", ".tmp")):
                shutil.copyfile(file, target / file.name)
        keep = rng.choice([0.0, 0.5, 1.0])
        for change in self.changes:
            if rng.random() < keep:
                self.apply(change)
        for name, inode in self.folder.items():
            content = bytes(inode)
            if id(inode) not in self.synced:
                content = content[: rng.randrange(len(content) + 1)]
            (target / name).write_bytes(content)


def power_cuts(folder: Path, seed: int, skip: tuple[str, ...] = ()) -> None:
    """Work until the power is cut, look at what is left, and go on with that."""
    rng = random.Random(seed)
    model, place = crash.Model(), folder / "0"
    disk = Forgetful(0)
    for turn in range(1, 6):
        before = disk
        disk = Forgetful(rng.randrange(1, 60), skip)
        # What is there after a cut is all on the disk.
        for name, inode in before.folder.items():
            if place.exists() and (place / name).exists():
                inode = bytearray((place / name).read_bytes())
                disk.content[name] = disk.folder[name] = inode
                disk.synced.add(id(inode))
        pending = None
        with pytest.raises(PowerCut), Store(place, files=disk) as s:
            while True:
                pending = crash.plan(rng, model)
                crash.perform(s, pending, model)
                model, pending = model.after(pending), None
        after = folder / str(turn)
        disk.cut(place, after, rng)
        with Store(after) as s:
            possible = [model] + ([model.after(pending)] if pending else [])
            matching = [one for one in possible if one.matches(s)]
            assert matching, f"version {s.version} is neither before nor after {pending}"
            model = matching[-1]
        assert [problem for problem in check_store(after) if not crash.left(problem)] == []
        place = after


@pytest.mark.parametrize("seed", range(200 if FULL else 8))
def test_power_cuts(tmp_path, tight, seed):
    power_cuts(tmp_path, seed)


@pytest.mark.parametrize("forgotten", ["fsync", "fsync_folder"])
def test_a_sync_that_is_left_out_is_noticed(tmp_path, tight, forgotten):
    """The battery can tell: without either sync it finds a store that lost rows."""

    def broken(seed):
        (tmp_path / str(seed)).mkdir()
        try:
            power_cuts(tmp_path / str(seed), seed, skip=(forgotten,))
        except (AssertionError, OSError):
            return True
        return False

    assert any(broken(seed) for seed in range(20))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a file without an open reference
def test_a_maker_that_is_interrupted_leaves_nothing(tmp_path):
    def make():
        with folder.build_store_folder(tmp_path / "new.qkv") as part:
            part.mkdir()

    gc.collect()  # which would close files of tests before
    files = len(os.listdir("/dev/fd"))
    for _ in moments(make, (folder.__file__, lock.__file__, garbage.__file__)):
        assert set(os.listdir(tmp_path)) <= {"new.qkv"}
    gc.collect()
    assert len(os.listdir("/dev/fd")) == files
    assert os.listdir(tmp_path) == ["new.qkv"]


def test_a_repair_that_is_interrupted_leaves_no_lock(tmp_path):
    with Store(tmp_path / "s") as store:
        store.commit(records=["one"], digests=[b"1"])
    taken = lock.__file__, garbage.__file__
    for _ in moments(lambda: check_store(tmp_path / "s", repair=True), taken):
        other = lock.WriteLock(tmp_path / "s")
        other.acquire(wait_seconds=0)
        other.release()
