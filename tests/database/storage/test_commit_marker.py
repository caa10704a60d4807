"""Acknowledged commits are recorded outside the catalog, so that an older catalog is detected."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from qkv.database.errors import StoreDamagedError, StoreUnwritableError
from qkv.database.storage import Store, blob_storage, check_store, commit_marker, limits


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 4)


def add(store, count=5):
    first = store._reader_catalog.newest_version().last + 1
    ids = range(first, first + count)
    return store.commit(
        records=[f"record {i}" for i in ids],
        digests=[b"%d" % i for i in ids],
        tensors={"key": np.array(ids, np.float64)[:, None]},
    )


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def copy_store(source, target, *without):
    target.mkdir()
    for file in source.iterdir():
        if file.name not in without:
            shutil.copyfile(file, target / file.name)
    return target


LOG = ("catalogue.sqlite-wal", "catalogue.sqlite-shm")


def test_a_mark_is_read_as_it_was_written(tmp_path):
    assert commit_marker.read_marker(tmp_path) is None
    file = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    for commit in (
        None,
        commit_marker.CommitMarker(0, 1),
        commit_marker.CommitMarker(10**12, 10**9),
        commit_marker.new_marker(3, 4),
    ):
        commit_marker.write_marker(file, commit)
        assert (
            commit_marker.read_lock_file(file) == (str(os.getpid()), commit)
            and commit_marker.read_marker(tmp_path) == commit
        )
    os.close(file)
    for text in (b"", b"12\n", b"12\n3 4 00000000\n", b"\xff" * 90, b"x\n1 2 3\n"):
        (tmp_path / "lock").write_bytes(text)
        assert commit_marker.read_marker(tmp_path) is None


def test_a_copy_without_its_log_is_refused_and_loses_nothing(tmp_path, small):
    with Store(tmp_path / "s") as store:
        add(store)
        add(store)
        copy = copy_store(tmp_path / "s", tmp_path / "copy", *LOG)
        full = copy_store(tmp_path / "s", tmp_path / "whole")
    before = content(copy)
    for _ in range(2):
        with pytest.raises(
            StoreDamagedError, match=r"version 2 was committed.*catalogue.sqlite-wal"
        ):
            Store(copy)
    [problem] = check_store(copy)
    assert "version 2 was committed" in problem.what
    assert {name: content(copy)[name] for name in before if name != "lock"} == {
        name: text for name, text in before.items() if name != "lock"
    }
    for name in LOG[:1]:
        shutil.copyfile(full / name, copy / name)
    with Store(copy) as store:
        assert len(store.open_snapshot()) == 10 and store.version == 2
    assert check_store(copy) == []


def test_without_a_mark_unknown_files_stay_and_keep_their_names(tmp_path, small):
    with Store(tmp_path / "s") as store:
        add(store)
        add(store)
        copy = copy_store(tmp_path / "s", tmp_path / "copy", "lock", *LOG)
    segments = {name: text for name, text in content(copy).items() if name.endswith("safetensors")}
    assert len(segments) == 2
    assert ["move it elsewhere" in problem.what for problem in check_store(copy)] == [True, True]
    with Store(copy) as store:
        assert len(store.open_snapshot()) == 0
        add(store)
        assert len(store.open_snapshot()) == 5
    assert len(content(copy)) > len(segments)
    assert segments == {name: content(copy)[name] for name in segments}


def test_a_repair_takes_up_what_an_older_catalogue_does_not_know(tmp_path, small):
    with Store(tmp_path / "s") as store:
        add(store)
        add(store)
    old = (tmp_path / "s" / "catalogue.sqlite").read_bytes()
    with Store(tmp_path / "s") as store:
        store.compact()
        assert len(list(tmp_path.glob("s/segment-*"))) == 1
    # As if the log of the compaction were lost.
    (tmp_path / "s" / "catalogue.sqlite").write_bytes(old)
    (tmp_path / "s" / "lock").unlink()
    problems = [problem.what for problem in check_store(tmp_path / "s")]
    assert any("which contains missing rows" in what for what in problems)
    assert any(problem.repaired for problem in check_store(tmp_path / "s", repair=True))
    assert check_store(tmp_path / "s") == []
    with Store(tmp_path / "s") as store:
        snapshot = store.open_snapshot()
        assert dict(snapshot.iterate_rows()) == {i: f"record {i}" for i in range(10)}
        np.testing.assert_array_equal(snapshot.read_tensor("key", range(10))[:, 0], np.arange(10.0))
        add(store)


def test_a_repair_of_a_lost_log_goes_on_above_what_was_acknowledged(tmp_path, small):
    with Store(tmp_path / "s") as store:
        add(store)
    with Store(tmp_path / "s") as store:
        add(store)
        add(store, 2)
        copy = copy_store(tmp_path / "s", tmp_path / "copy", *LOG)
    problems = check_store(copy, repair=True)
    assert any("the versions from 2 to 3 are lost" in problem.what for problem in problems)
    with Store(copy) as store:
        assert store.version == 4 and len(store.open_snapshot()) == 5
        add(store)
    assert check_store(copy) == []


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("change", ["removed", "replaced", "moved", "catalogue"])
def test_nothing_is_written_into_a_folder_that_is_gone(tmp_path, change, written):
    path = tmp_path / "s"
    with Store(path) as store:
        add(store)
    with Store(path) as store:
        if written:
            add(store)
        if change == "moved":
            path.rename(tmp_path / "t")
        elif change == "catalogue":
            (path / "catalogue.sqlite").unlink()
        else:
            shutil.rmtree(path)
        if change == "replaced":
            with Store(path) as other:
                add(other, 1)
        for write in (add, Store.compact):
            with pytest.raises(StoreUnwritableError, match=r"removed or replaced|cannot be opened"):
                write(store)
    if change == "replaced":
        with Store(path) as store:
            assert len(store.open_snapshot()) == 1
    elif change != "catalogue":
        assert not path.exists()


def test_a_folder_that_goes_in_the_middle_of_a_commit(tmp_path, small):
    class Gone(blob_storage.FileSystem):
        def fsync_folder(self, folder):
            (folder / "lock").unlink()

    with (
        Store(tmp_path / "s", files=Gone()) as store,
        pytest.raises(StoreUnwritableError, match="removed"),
    ):
        add(store)


def test_a_mark_that_cannot_be_written_is_none(tmp_path, monkeypatch):
    with Store(tmp_path) as store:
        add(store)

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        add(store)
        monkeypatch.undo()
    assert commit_marker.read_marker(tmp_path) is None
    with Store(tmp_path) as store:
        assert len(store.open_snapshot()) == 10
        add(store)
    assert commit_marker.read_marker(tmp_path)[:2] == (3, 1)


@pytest.fixture
def pair(tmp_path):
    """A writer and a reader of one store, and what the reader finds without the catalogue."""
    with Store(tmp_path / "s") as writer, Store(tmp_path / "s") as reader:
        add(writer)
        reader.open_snapshot()
        yield (
            writer,
            reader,
            lambda: reader._reader_catalog._marker_watch.is_unchanged(
                *reader._reader_catalog._seen_entry[1:]
            ),
        )


def test_a_reader_trusts_a_seal_and_sees_every_commit(pair, monkeypatch):
    monkeypatch.setattr(commit_marker, "TRUST_SECONDS", 60.0)
    writer, reader, trusts = pair
    snap = reader.open_snapshot()
    for i in range(5, 30):
        assert reader.version and trusts() and snap.find_latest_record(b"%d" % i) is None
        writer.commit(records=["new"], digests=[b"%d" % i], tensors={"key": np.zeros((1, 1))})
        assert not trusts() and snap.find_latest_record(b"%d" % i) == (i, "new")
    writer.commit(remove=[7])
    assert snap.find_latest_record(b"7") is None
    writer.compact()  # which makes no version
    assert snap.find_latest_record(b"7") is None and trusts()
    writer.commit()  # nor does this
    assert snap.find_latest_record(b"8") == (8, "new") and trusts()


def test_a_writer_that_dies_between_a_commit_and_its_mark_leaves_no_seal(pair, monkeypatch):
    writer, reader, trusts = pair
    monkeypatch.setattr(type(writer._write_lock), "acknowledge_commit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        add(writer)
    assert reader.open_snapshot().find_latest_record(b"9") == (9, "record 9") and not trusts()


def test_a_seal_is_not_trusted_when_its_file_was_removed(pair, monkeypatch):
    monkeypatch.setattr(commit_marker, "TRUST_SECONDS", 0.0)
    writer, reader, _ = pair
    reader._reader_catalog._seen_entry = None
    assert reader.version == 1
    writer.close()
    (reader.path / "lock").unlink()
    with Store(reader.path) as other:
        add(other)
        assert (
            reader.open_snapshot().find_latest_record(b"9") == (9, "record 9")
            and reader.version == 2
        )


def test_what_is_read_inside_a_transaction_is_not_taken_for_the_newest(pair, monkeypatch):
    monkeypatch.setattr(commit_marker, "TRUST_SECONDS", 60.0)
    writer, reader, _ = pair
    assert reader.version == 1
    with reader._reader_catalog.read_transaction():
        assert reader.version == 1
        add(writer)
        assert reader.version == 1 and reader._reader_catalog._seen_entry is None
    assert reader.version == 2
