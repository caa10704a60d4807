"""A disk that fails in the middle of a compaction: it is done, or an error says that it is not."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3

import numpy as np
import pytest

from qkv.database.errors import StoreUnwritableError
from qkv.database.storage import Store, check_store, commit_marker, limits
from qkv.database.storage.blob_storage import FileSystem
from qkv.database.storage.catalog import CATALOG_FILE
from qkv.errors import QkvError
from tests.database.storage import crash

CODES = {errno.EIO: sqlite3.SQLITE_IOERR, errno.ENOSPC: sqlite3.SQLITE_FULL}
full = pytest.mark.full
WRITES = ("BEGIN IMMEDIATE", "COMMIT", "INSERT", "UPDATE", "DELETE", "VACUUM", "PRAGMA wal_check")


@pytest.fixture(autouse=True)
def tight(monkeypatch):
    for name in (
        "MAX_BUFFERED_ROWS",
        "MIN_BUNDLE_ROWS",
        "MAX_SEGMENT_BYTES",
        "SEGMENTS_PER_MERGE",
    ):
        monkeypatch.setattr(limits, name, getattr(limits, name))
    crash.tighten()


class Faults:
    """Fails the step of this number, and all after it where it is `lasting`."""

    def __init__(self, at, code, lasting=False):
        self.at, self.code, self.lasting = at, code, lasting
        self.steps, self.failed = 0, ""

    def fails(self, what):
        self.steps += 1
        if self.steps != self.at and not (self.lasting and self.steps > self.at):
            return False
        self.failed = self.failed or what
        return True

    def step(self, what):
        if self.fails(what):
            raise OSError(self.code, os.strerror(self.code))


class FaultyFiles(FileSystem):
    def __init__(self, faults):
        self.faults = faults

    def write(self, path, chunks):
        self.faults.step("write")
        super().write(path, chunks)

    def fsync(self, file, path):
        self.faults.step("fsync")
        super().fsync(file, path)

    def rename(self, source, target):
        self.faults.step("rename")
        super().rename(source, target)

    def unlink(self, path):
        self.faults.step("unlink")
        super().unlink(path)


class FaultyConnection:
    """SQLite, which says of its writes that the disk fails."""

    def __init__(self, real, faults):
        self.real, self.faults = real, faults

    def __getattr__(self, name):
        return getattr(self.real, name)

    def _checked(self, run, statement, values):
        if statement.startswith(WRITES) and self.faults.fails(f"sqlite {statement.split()[0]}"):
            error = sqlite3.OperationalError(f"disk: {os.strerror(self.faults.code)}")
            error.sqlite_errorcode = CODES[self.faults.code]
            raise error
        return run(statement, values)

    def execute(self, statement, values=()):
        return self._checked(self.real.execute, statement, values)

    def executemany(self, statement, values):
        return self._checked(self.real.executemany, statement, values)


def add(store, start, count):
    ids = range(start, start + count)
    store.commit(
        records=[f"row {i} " + "x" * 2000 for i in ids],
        digests=[b"%d" % i for i in ids],
        tensors={"key": np.arange(start, start + count, dtype=np.float32)[:, None]},
    )


@pytest.fixture
def base(tmp_path):
    """A store of several segments and versions, with removed rows in its catalogue too."""
    path = tmp_path / "base.qkv"
    with Store(path) as store:
        for start in range(0, 60, 12):
            add(store, start, 12)
        add(store, 60, 40)
        store.commit(remove=[*range(59), *range(60, 90, 2)])
        add(store, 100, 1)
    return path


def content(store):
    with store.open_snapshot() as snapshot:
        ids = snapshot.live_ids().tolist()
        return ids, snapshot.read_records(ids)


def versions(store):
    return [version.number for version in store.versions()]


def files(path):
    return sorted(name for name in os.listdir(path) if "safetensors" in name)


def open_faulty_store(path, faults, monkeypatch):
    """A store whose every write goes through the faults."""
    store = Store(path, files=FaultyFiles(faults))
    with store._write_session("look") as (catalogue, _):
        catalogue._connection = FaultyConnection(catalogue._connection, faults)
    full = commit_marker.write_marker

    def write(file, left):
        faults.step("mark")
        full(file, left)

    monkeypatch.setattr(commit_marker, "write_marker", write)
    faults.steps = 0
    return store


@pytest.mark.parametrize(
    ("code", "lasting"),
    [
        (errno.EIO, False),
        (errno.ENOSPC, True),
        pytest.param(errno.EIO, True, marks=full),
        pytest.param(errno.ENOSPC, False, marks=full),
    ],
)
def test_a_compaction_is_done_or_says_that_it_is_not(base, tmp_path, caplog, code, lasting):
    with Store(base) as store:
        before, known = content(store), versions(store)
    there, seen = files(base), set()
    for at in range(1, 200):
        path = tmp_path / f"{at}.qkv"
        shutil.copytree(base, path)
        faults = Faults(at, code, lasting)
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch, open_faulty_store(path, faults, patch) as store:
            error = report = None
            try:
                report = store.compact()
            except QkvError as fault:
                error = fault
            assert content(store) == before
            left, kept = files(path), versions(store)
        if not faults.failed:
            assert report is not None and not report.unfinished and len(kept) == 1
            break
        seen.add(faults.failed)
        if error is not None:
            assert isinstance(error, StoreUnwritableError) and kept == known
            assert "nothing was changed" in str(error) and "try again" in str(error)
            assert left == there or (lasting and set(left) > set(there))
        else:
            assert report is not None and len(kept) == 1
            unfinished = faults.failed in ("unlink", "sqlite VACUUM", "sqlite PRAGMA")
            assert bool(report.unfinished) or not unfinished
            assert bool(report.unfinished) == bool(caplog.records)
            assert len(left) == report.files_after or "removing files" in report.unfinished
        with Store(path) as store:
            assert content(store) == before
            add(store, 200, 1)  # the next writer removes what was left
        assert check_store(path) == []
        shutil.rmtree(path)
    expected = {"write", "fsync", "rename", "unlink", "mark", "sqlite BEGIN", "sqlite COMMIT"}
    assert seen >= expected | {"sqlite DELETE", "sqlite INSERT", "sqlite VACUUM", "sqlite PRAGMA"}


def test_a_catalogue_that_alone_would_shrink_and_cannot_is_an_error(base, monkeypatch):
    """It was said to be compacted, and was what it had been."""
    faults = Faults(0, errno.EIO)
    with open_faulty_store(base, faults, monkeypatch) as store:
        monkeypatch.setattr(faults, "fails", lambda what: what == "sqlite VACUUM")
        report = store.compact()
        message = "the catalog could not be shrunk (disk: Input/output error)"
        assert report.dropped_rows and report.unfinished.startswith(message)
        assert message in repr(report)
        before, there, size = content(store), files(base), os.path.getsize(base / CATALOG_FILE)
        with pytest.raises(StoreUnwritableError, match=r"nothing was changed.*try again"):
            store.compact()
        assert content(store) == before and files(base) == there
        monkeypatch.setattr(faults, "fails", lambda what: False)
        assert not store.compact().unfinished
        assert content(store) == before and os.path.getsize(base / CATALOG_FILE) < size
    assert check_store(base) == []


def test_a_file_that_cannot_be_removed_does_not_fail_the_commit_that_merged_it(
    tmp_path, monkeypatch, caplog
):
    """Small segments become one as rows are added: that is no part of what was asked for."""
    faults = Faults(0, errno.EIO)
    with Store(tmp_path / "s", files=FaultyFiles(faults)) as store:
        monkeypatch.setattr(FaultyFiles, "unlink", lambda self, path: self.faults.step("unlink"))
        faults.at, faults.lasting = 1, True
        monkeypatch.setattr(FaultyFiles, "write", FileSystem.write)
        monkeypatch.setattr(FaultyFiles, "rename", FileSystem.rename)
        monkeypatch.setattr(FaultyFiles, "fsync", FileSystem.fsync)
        with caplog.at_level(logging.WARNING, "qkv"):
            for start in range(0, 400, 20):
                add(store, start, 20)
        assert faults.failed == "unlink"
        assert content(store)[0] == list(range(400))
    assert "removing files" in caplog.text
    with Store(tmp_path / "s") as store:
        add(store, 400, 1)
    assert check_store(tmp_path / "s") == []


@pytest.mark.parametrize(("code", "logged"), [(errno.EIO, True), (errno.EINVAL, False)])
def test_a_new_store_whose_folder_cannot_be_synced_is_logged(
    tmp_path, monkeypatch, caplog, code, logged
):
    def fails(self, folder):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "fsync_folder", fails)
        Store(tmp_path / "s", create=True).close()
    assert ("cannot be synced to disk" in caplog.text) == logged
    with Store(tmp_path / "s") as store:
        add(store, 0, 1)
    assert check_store(tmp_path / "s") == []
