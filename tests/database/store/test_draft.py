"""Rows that are written by a thread beside the transaction, and indexed when all are there."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing

import numpy as np
import pytest

from qkv.database.faults import DuplicateKey
from qkv.database.store import Store, check, draft, ledger, sizes
from tests.database.store.test_store import add, expected, keys, whole


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Limits so low that every commit has its thread, and its index late."""
    monkeypatch.setattr(sizes, "RESTING_ROWS", 4)
    monkeypatch.setattr(draft, "LARGE", 1)
    monkeypatch.setattr(ledger, "MANY", 2)
    return tmp_path / "books.qkv"


def files(path):
    return sorted(file.name for file in path.iterdir() if file.name.startswith("segment"))


def is_indexed(path):
    with closing(sqlite3.connect(next(path.glob("*.sqlite")))) as catalogue:
        found = catalogue.execute("SELECT 1 FROM sqlite_master WHERE name = 'rows_digest'")
        return bool(found.fetchall())


def test_what_a_thread_writes_is_there(path, monkeypatch):
    seen, put = [], draft.Draft.segments

    def watched(self, layout, rows):
        seen.append(threading.current_thread() is threading.main_thread())
        put(self, layout, rows)

    monkeypatch.setattr(draft.Draft, "segments", watched)
    with Store(path) as store:
        add(store, 20)
        add(store, 3)
        add(store, 20)
        assert seen == [False, False]
        assert whole(store.at()) == expected(range(43))
        assert store.at().find(b"digest 7") == [7]
    with Store(path) as store:
        assert whole(store.at()) == expected(range(43)) and is_indexed(path)
    assert not check(path)


def test_a_file_that_cannot_be_written_takes_all_back(path, monkeypatch):
    with Store(path) as store:
        add(store, 6)
        before = files(path)
        with monkeypatch.context() as patched:
            patched.setattr(store._shelf, "put", full)
            with pytest.raises(OSError, match="no room"):
                add(store, 20)
        assert whole(store.at()) == expected(range(6)) and files(path) == before
        add(store, 20)
        assert whole(store.at()) == expected(range(26))
    assert not check(path)


def test_a_key_that_is_there_takes_the_thread_s_files_back(path):
    with Store(path) as store:
        with pytest.raises(DuplicateKey):
            store.commit(
                records=["a"] * 6,
                digests=[b"same"] * 6,
                tensors={"key": keys(range(6)), "value": np.arange(6)},
                unique=True,
            )
        assert len(store.at()) == 0 and is_indexed(path)
        add(store, 6, unique=True)
        assert whole(store.at()) == expected(range(6)) and is_indexed(path)
        assert len(files(path)) == 1
    assert not check(path)


def full(*_):
    raise OSError(28, "no room")
