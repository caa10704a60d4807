"""A stranger's store: its links are not followed, and its statements do not run."""

from __future__ import annotations

import errno
import gc
import os
import sqlite3

import numpy as np
import pytest

from qkv.database.errors import StoreDamagedError, StoreUnreadableError
from qkv.database.storage import Store, check_store, limits, safe_open
from tests.interrupt import stopped


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 2)
    with Store(tmp_path / "s") as made:
        made.commit(
            records=["one", "two"],
            digests=[b"1", b"2"],
            tensors={"key": np.eye(2)},
            arrays={"w": np.eye(2)},
        )
    return tmp_path / "s"


NAMES = (
    "lock",
    "readers",
    "catalogue.sqlite",
    "catalogue.sqlite-wal",
    "catalogue.sqlite-shm",
    "segment-00000001.safetensors",
    "arrays-00000002.safetensors",
    "segment-00000003.safetensors.tmp",
)


def use(path):
    with Store(path) as result:
        snapshot = result.open_snapshot()
        list(snapshot.iterate_segments())
        snapshot.read_arrays()
        result.commit(remove=[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_no_link_is_followed(store, tmp_path, name, kind):
    victim = tmp_path / "precious"
    file = store / name
    if kind == "link":
        victim.write_bytes(file.read_bytes() if file.exists() else b"precious")
    file.unlink(missing_ok=True)
    if kind in ("link", "dangling"):
        file.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    before = victim.read_bytes() if victim.exists() else None
    for look in (use, check_store, lambda path: check_store(path, repair=True)):
        with pytest.raises(StoreDamagedError, match=rf"{name} is (a link|not a regular file)"):
            look(store)
    assert (victim.read_bytes() if victim.exists() else None) == before


@pytest.mark.parametrize("name", ["lock", "readers", "segment-00000001.safetensors"])
def test_a_link_that_comes_after_opening(store, tmp_path, name):
    victim = tmp_path / "precious"
    victim.write_bytes(b"precious")
    with Store(store) as result:
        (store / name).unlink()
        (store / name).symlink_to(victim)
        with pytest.raises(StoreDamagedError, match=f"{name} is a link"):
            list(result.open_snapshot().iterate_segments())
            result.commit(remove=[0])
    assert victim.read_bytes() == b"precious"


def test_the_folder_itself_may_be_a_link(store, tmp_path):
    (tmp_path / "t").symlink_to(store)
    use(tmp_path / "t")
    assert check_store(tmp_path / "t") == []


def test_what_is_not_there_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        safe_open.open_regular_file(tmp_path / "nothing", os.O_RDONLY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["lock", "readers", "segment-00000001.safetensors", "s"])
def test_a_file_that_cannot_be_opened_now_is_not_damaged(store, monkeypatch, name):
    def out(real):
        def call(path, *rest, **named):
            if os.path.basename(path) == name:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return real(path, *rest, **named)

        return call

    monkeypatch.setattr(os, "open", out(os.open))
    monkeypatch.setattr(os, "listdir", out(os.listdir))

    def read(**options):
        with Store(store, **options) as result:
            list(result.open_snapshot().iterate_segments())

    for skip in (False, True):
        with pytest.raises(
            StoreUnreadableError, match=rf"{name} cannot be read now \(Too many open files"
        ):
            read(skip_damaged=skip)
    if name.startswith("segment"):
        [problem] = check_store(store)
        assert problem.file == name and "it cannot be read now" in problem.what
    monkeypatch.undo()
    use(store)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM versions; END",
        "CREATE VIEW v AS SELECT * FROM rows",
    ],
)
def test_a_catalogue_with_statements_of_its_own(store, statement):
    connection = sqlite3.connect(store / "catalogue.sqlite")
    connection.execute(statement)
    connection.close()
    with pytest.raises(StoreDamagedError, match="triggers or views"):
        use(store)
    assert "triggers or views" in check_store(store)[0].what


def test_an_interrupt_while_a_file_is_looked_at_closes_it(tmp_path):
    def look():
        safe_open.open_regular_file(tmp_path / "lock", os.O_CREAT)

    gc.collect()  # which would close files of tests before
    files = len(os.listdir("/dev/fd"))
    for after in (2, 3):  # fstat and S_ISREG
        assert stopped(look, after, safe_open.__file__)
    assert len(os.listdir("/dev/fd")) == files
