"""Rows that a thread writes during the transaction."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from qkv.database.errors import DuplicateKeyError
from qkv.database.storage import Store, check_store, limits, writer
from tests.database.storage.test_store import add, expected_rows, keys, read_rows


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Limits so low that every commit has its thread and its bundle."""
    monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 4)
    monkeypatch.setattr(writer, "MIN_THREAD_BYTES", 1)
    monkeypatch.setattr(limits, "MIN_BUNDLE_ROWS", 2)
    return tmp_path / "books.qkv"


def files(path):
    return sorted(file.name for file in path.iterdir() if file.name.startswith("segment"))


def test_what_a_thread_writes_is_there(path, monkeypatch):
    seen, put = [], writer.StagedFiles.write_segments

    def watched(self, layout, rows):
        seen.append(threading.current_thread() is threading.main_thread())
        put(self, layout, rows)

    monkeypatch.setattr(writer.StagedFiles, "write_segments", watched)
    with Store(path) as store:
        add(store, 20)
        add(store, 3)
        add(store, 20)
        assert seen == [False, False]
        assert read_rows(store.open_snapshot()) == expected_rows(range(43))
        assert store.open_snapshot().find_ids(b"digest 7") == [7]
    with Store(path) as store:
        assert read_rows(store.open_snapshot()) == expected_rows(range(43))
    assert not check_store(path)


def test_a_file_that_cannot_be_written_takes_all_back(path, monkeypatch):
    with Store(path) as store:
        add(store, 6)
        before = files(path)
        with monkeypatch.context() as patched:
            patched.setattr(store._blob_storage, "write_segment", full)
            with pytest.raises(OSError, match="no room"):
                add(store, 20)
        assert read_rows(store.open_snapshot()) == expected_rows(range(6)) and files(path) == before
        add(store, 20)
        assert read_rows(store.open_snapshot()) == expected_rows(range(26))
    assert not check_store(path)


def test_a_key_that_is_there_takes_the_thread_s_files_back(path):
    with Store(path) as store:
        with pytest.raises(DuplicateKeyError):
            store.commit(
                records=["a"] * 6,
                digests=[b"same"] * 6,
                tensors={"key": keys(range(6)), "value": np.arange(6)},
                unique=True,
            )
        assert len(store.open_snapshot()) == 0
        add(store, 6, unique=True)
        assert read_rows(store.open_snapshot()) == expected_rows(range(6))
        assert len(files(path)) == 1
    assert not check_store(path)


def full(*_):
    raise OSError(28, "no room")
