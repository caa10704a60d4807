"""Readers that cannot write to the folder parse the log; the result equals that of SQLite."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from qkv.database.storage import Store
from qkv.database.storage.catalog import _read_with_log, open_connection

RNG = np.random.default_rng(11)


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that another user may enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def create_logged_file(folder: Path) -> Path:
    """A file with a log: commits, one that shrinks the file, and one that did not finish."""
    path, copy = folder / "a.sqlite", folder / "copy.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA auto_vacuum = FULL")
        file.execute("VACUUM")
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        file.execute("CREATE TABLE t (i INTEGER PRIMARY KEY, x BLOB)")
        for i in range(12):
            file.execute("INSERT INTO t VALUES (?, ?)", (i, RNG.bytes(3000 * (i % 4))))
            if i == 5:
                file.execute("PRAGMA wal_checkpoint(PASSIVE)")
        file.execute("DELETE FROM t WHERE i > 8")
        file.execute("PRAGMA cache_size = 1")
        file.execute("BEGIN")
        for i in range(20, 30):
            file.execute("INSERT INTO t VALUES (?, ?)", (i, RNG.bytes(5000)))
        shutil.copyfile(path, copy)
        shutil.copyfile(f"{path}-wal", f"{copy}-wal")
        file.execute("ROLLBACK")
    return copy


def rows(content: bytes) -> list[tuple[int, bytes]] | None:
    with closing(sqlite3.connect(":memory:")) as file:
        file.deserialize(content)
        try:
            return file.execute("SELECT * FROM t ORDER BY i").fetchall()
        except sqlite3.Error:  # before its first commit there is no table
            return None


def by_sqlite(path: Path, folder: Path) -> list[tuple[int, bytes]] | None:
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{path}{suffix}", folder / f"read{suffix}")
    (folder / "read-shm").unlink(missing_ok=True)
    with closing(sqlite3.connect(folder / "read")) as file:
        try:
            return file.execute("SELECT * FROM t ORDER BY i").fetchall()
        except sqlite3.Error:
            return None


def test_the_log_by_hand_is_the_log_by_sqlite(tmp_path):
    """Whole, cut anywhere, and with any byte of it changed."""
    path = create_logged_file(tmp_path)
    log = Path(f"{path}-wal")
    full = log.read_bytes()
    assert [i for i, _ in rows(_read_with_log(path)) or []] == list(range(9))
    result = set()
    for _ in range(60):
        broken = bytearray(full[: RNG.integers(len(full))])
        if RNG.random() < 0.5:
            broken = bytearray(full)
            broken[RNG.integers(len(full)) if RNG.random() < 0.7 else RNG.integers(32)] ^= 1
        log.write_bytes(broken)
        own = rows(_read_with_log(path))
        assert own == by_sqlite(path, tmp_path)
        result.add(-1 if own is None else len(own))
    assert len(result) > 4


def test_a_log_that_says_anything_takes_no_more_memory_than_it_has(tmp_path):
    path = create_logged_file(tmp_path)
    log = Path(f"{path}-wal")
    full = log.read_bytes()
    for size in (0, 1, 7, 2**32 - 1):
        log.write_bytes(full[:8] + size.to_bytes(4, "big") + full[12:])
        assert len(_read_with_log(path)) == path.stat().st_size


KILLED = """
import os, sys
from qkv.database.storage import Store
store = Store(sys.argv[1])
for i in range(20):
    store.commit(records=[f"row {i}"], digests=[bytes([i])])
print("written", flush=True)
os._exit(9)
"""

READER = """
import os, resource, sys
import qkv.database.database
from qkv.database.storage import Store

if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
elif os.getuid() == 0:  # who may write everywhere
    os.setgid(65534)
    os.setuid(65534)
store = Store(sys.argv[1])
for _ in sys.stdin:
    rows = store.open_snapshot().iterate_rows()
    print(store.version, *(record for _, record in rows), flush=True)
"""


def reader(path: Path, mode: str, stderr: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", READER, str(path), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def ask_child(child: subprocess.Popen[str]) -> str:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    return child.stdout.readline().rstrip("\n")


def readable(path: Path, may: bool) -> None:
    for file in path.iterdir():
        file.chmod(0o644 if may else 0o444)
    path.chmod(0o755 if may else 0o555)


@pytest.mark.skipif(os.name != "posix", reason="users and limits of POSIX")
@pytest.mark.parametrize("mode", ["full", "denied"])
@pytest.mark.parametrize("index", [True, False])
def test_a_killed_writers_log_is_read_where_nothing_can_be_written(open_to_all, mode, index):
    """On a full disk, or without permission, with its index and without; and what comes next."""
    path = open_to_all / "s.qkv"
    subprocess.run([sys.executable, "-c", KILLED, str(path)], capture_output=True)
    if not index:
        (path / "catalogue.sqlite-shm").unlink()
    readable(path, False)
    before = {file.name: file.read_bytes() for file in path.iterdir() if "shm" not in file.name}
    written = [f"row {i}" for i in range(20)]
    with reader(path, mode) as child:
        assert ask_child(child) == " ".join(["20", *written])
        after = {file.name: file.read_bytes() for file in path.iterdir() if "shm" not in file.name}
        assert after == before
        readable(path, True)
        with Store(path) as store:
            store.commit(records=["more"], digests=[b"more"])
            assert ask_child(child) == " ".join(["21", *written, "more"])
        assert ask_child(child) == " ".join(["21", *written, "more"])
        child.communicate()


@pytest.mark.skipif(os.name != "posix", reason="users of POSIX")
def test_a_log_of_a_file_that_may_not_be_read_is_reported(open_to_all):
    path = open_to_all / "s.qkv"
    subprocess.run([sys.executable, "-c", KILLED, str(path)], capture_output=True)
    (path / "catalogue.sqlite").chmod(0o200)
    with reader(path, "denied", stderr=subprocess.PIPE) as child:
        last_line = child.communicate()[1].splitlines()[-1]
    assert "Unreadable" in last_line and "catalogue.sqlite cannot be read now" in last_line


@pytest.mark.skipif(os.name != "posix", reason="users of POSIX")
def test_a_reader_without_permission_waits_for_an_index_that_is_half_made(open_to_all):
    path = open_to_all / "s.qkv"
    with Store(path) as store:
        store.commit(records=["one"], digests=[b"1"])
        with open(path / "catalogue.sqlite-shm", "r+b", buffering=0) as index:
            readable(path, False)
            with reader(path, "denied") as child:
                assert ask_child(child) == "1 one"
                store.commit(records=["two"], digests=[b"2"])
                index.write(bytes(48))  # as who is making it leaves it: its two heads differ
                assert ask_child(child) == "2 one two"
                child.communicate()
        readable(path, True)


def test_who_may_write_gets_no_copy(tmp_path):
    with Store(tmp_path / "s.qkv") as store:
        store.commit(records=["one"], digests=[b"1"])
        connection, still = open_connection(tmp_path / "s.qkv" / "catalogue.sqlite", False, False)
        assert still is None
        connection.close()


def test_a_writer_waits_until_a_commit_is_on_the_disk(tmp_path: Path) -> None:
    """2 is FULL: with less, a power cut takes the last commits, which SQLite did not sync."""
    Store(tmp_path / "a", create=True).close()
    connection, _ = open_connection(tmp_path / "a" / "catalogue.sqlite", write=True, create=False)
    with closing(connection):
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
