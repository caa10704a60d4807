"""The store: what goes in comes out, at every version, in memory and on disk."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import random
import sqlite3
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from safetensors.numpy import load_file

from qkv.database.errors import (
    DuplicateKeyError,
    NotAStoreError,
    RowNotFoundError,
    SkippedRowsWarning,
    StoreClosedError,
    StoreDamagedError,
    StoreLockedError,
    StoreNotFoundError,
    StoreUnwritableError,
    VersionNotFoundError,
)
from qkv.database.storage import Commit, Store, blob_storage, check_store, lock, segments
from qkv.database.storage import limits as sizes
from qkv.database.storage import store as store_module
from qkv.database.storage.snapshot import build_buffered_segment
from qkv.errors import ArgumentError, CombinationError, DtypeError, QkvError, ShapeError
from tests.sampling import FULL


@pytest.fixture(params=["memory", "disk"])
def make(request, tmp_path):
    """A function that opens the same store again; in memory there is but one."""
    opened = []

    def open_store(**options):
        if request.param == "memory":
            if not opened:
                opened.append(Store())
            return opened[0]
        for one in opened:
            one.close()
        opened.append(Store(tmp_path / "books.qkv", **options))
        return opened[-1]

    yield open_store
    for one in opened:
        one.close()


@pytest.fixture
def small(monkeypatch):
    """Limits so low that a few rows reach them."""
    monkeypatch.setattr(sizes, "MAX_BUFFERED_ROWS", 8)
    monkeypatch.setattr(sizes, "MAX_SEGMENT_BYTES", 20 * 24)
    monkeypatch.setattr(sizes, "SEGMENTS_PER_MERGE", 4)
    monkeypatch.setattr(sizes, "ROWS_PER_PAGE", 7)


def keys(ids):
    """A tensor that tells its row: (m, 2) float32."""
    ids = np.asarray(ids, np.float32).reshape(-1, 1)
    return np.concatenate([ids, -ids], axis=1)


def add(target, count, **options):
    start = target.open_snapshot().version and target._reader_catalog.newest_version().last + 1
    ids = range(start, start + count)
    made = target.commit(
        records=[f"record {i}" for i in ids],
        digests=[b"digest %d" % i for i in ids],
        tensors={"key": keys(ids), "value": np.asarray(ids, np.int64)},
        **options,
    )
    assert made.ids == ids
    return made


def read_rows(snap):
    """Everything that a snapshot holds, read in every way there is: {id: (record, key)}."""
    ids = snap.live_ids()
    assert len(ids) == len(snap) and (np.diff(ids) > 0).all()
    rows = dict(snap.iterate_rows())
    assert list(rows) == ids.tolist()
    assert snap.read_records(ids) == list(rows.values())
    seen, tensors = [], []
    for part in snap.iterate_segments():
        live = slice(None) if part.live is None else part.live
        assert part.live is None or not part.live.all()
        seen.append(part.ids[live])
        if "key" in part.tensors:
            tensors.append(part.tensors["key"][live])
            assert not part.tensors["key"].flags.writeable
    assert np.concatenate(seen).tolist() == ids.tolist() if seen else not len(ids)
    key = np.concatenate(tensors) if tensors else np.zeros((0, 2))
    if len(ids):
        np.testing.assert_array_equal(snap.read_tensor("key", ids[::-1]), key[::-1])
    return {int(i): (rows[int(i)], tuple(k)) for i, k in zip(ids, key.tolist(), strict=True)}


def expected_rows(ids):
    return {int(i): (f"record {i}", (float(i), -float(i))) for i in ids}


def test_what_goes_in_comes_out(make):
    with make() as s:
        assert (
            s.version == 0
            and len(s.open_snapshot()) == 0
            and s.open_snapshot().settings == {}
            and s.versions() == []
        )
        add(s, 3, settings={"key": "title"})
        snap = s.open_snapshot()
        assert read_rows(snap) == expected_rows(range(3))
        assert snap.find_ids(b"digest 1") == [1] and snap.find_ids(b"none") == []
        assert (
            snap.find_newest(b"digest 2") == (2, "record 2") and snap.find_newest(b"none") is None
        )
        assert snap.settings == s.open_snapshot().settings == {"key": "title"}
        assert snap.tensor_names == ("value", "key")
        np.testing.assert_array_equal(snap.read_tensor("value", [2, 0, 2]), [2, 0, 2])
        [version] = s.versions()
        assert (version.number, version.what, version.added, version.rows) == (1, "add", 3, 3)
        assert version.time.endswith("+00:00")


def test_it_is_there_after_reopening(make):
    add(make(), 5)
    make().commit(remove=[1, 3])
    assert read_rows(make().open_snapshot()) == expected_rows([0, 2, 4])
    assert read_rows(make().open_snapshot(1)) == expected_rows(range(5))


def test_a_repeated_digest_is_found_oldest_first(make):
    s = make()
    one = {"key": keys([0]), "value": np.zeros(1, np.int64)}
    for _ in range(3):
        s.commit(records=["same"], digests=[b"d"], tensors=one)
    assert s.open_snapshot().find_ids(b"d") == [0, 1, 2]
    s.commit(remove=[1])
    assert s.open_snapshot().find_ids(b"d") == [0, 2] and s.open_snapshot(3).find_ids(b"d") == [
        0,
        1,
        2,
    ]


def test_many_single_rows_make_few_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "MAX_BUFFERED_ROWS", 1024)
    with Store(tmp_path / "s") as s:
        for i in range(1500):
            s.commit(records=[str(i)], digests=[b"%d" % i], tensors={"key": keys([i])})
        snap = s.open_snapshot()
        assert len(snap) == 1500 and snap.find_ids(b"1499") == [1499]
        np.testing.assert_array_equal(snap.read_tensor("key", range(1500)), keys(range(1500)))
        counts = [len(part.ids) for part in snap.iterate_segments()]
        assert counts == [1024, 476]
        assert len(list((tmp_path / "s").glob("*.safetensors"))) == 1
    assert check_store(tmp_path / "s") == []


def test_small_segments_become_one(make, small, monkeypatch):
    monkeypatch.setattr(sizes, "MAX_SEGMENT_BYTES", 4 * 1024)
    s = make()
    for _ in range(60):
        add(s, 3)
    assert read_rows(s.open_snapshot()) == expected_rows(range(180))
    for version in (1, 7, 31, 60):
        assert read_rows(s.open_snapshot(version)) == expected_rows(range(3 * version))
    assert len(s._blob_storage.list_files()) < 180 / 9
    assert read_rows(make().open_snapshot()) == expected_rows(range(180))


def test_a_large_commit_is_cut(make, small):
    s = make()
    add(s, 2)
    add(s, 100)
    add(s, 1)
    assert [len(part.ids) for part in s.open_snapshot().iterate_segments()] == [20] * 5 + [2, 1]
    assert read_rows(s.open_snapshot()) == expected_rows(range(103))
    assert read_rows(s.open_snapshot(1)) == expected_rows(range(2))


def test_windows(make, small):
    s = make()
    add(s, 50)
    s.commit(remove=[4, 5, 49])
    parts = list(s.open_snapshot().iterate_segments(window=6, resident=0))
    assert max(len(part.ids) for part in parts) == 6
    assert np.concatenate([part.ids for part in parts]).tolist() == list(range(50))
    dead = [int(i) for p in parts if p.live is not None for i in p.ids[~p.live]]
    assert dead == [4, 5, 49]
    # Pages that were given back are read again.
    for part in parts:
        part.release_pages()
        np.testing.assert_array_equal(part.tensors["key"], keys(part.ids))


def test_one_commit_removes_and_adds(make):
    s = make()
    add(s, 2)
    made = s.commit(
        records=["new"],
        digests=[b"digest 1"],
        tensors={"key": keys([2]), "value": np.array([2])},
        remove=[1],
        unique=True,
        what="update",
    )
    assert s.open_snapshot().find_ids(b"digest 1") == [2] == list(made.ids)
    last = s.versions()[-1]
    assert (last.what, last.added, last.removed, last.rows) == ("update", 1, 1, 2)


def test_nothing_changed_makes_no_version(make):
    s = make()
    assert s.commit() == Commit(0, range(0))
    add(s, 1, settings={"a": 1})
    assert s.commit(settings={"a": 1}).version == 1 == s.version
    assert s.commit(settings={"a": 2}).version == 2
    assert (s.open_snapshot(1).settings, s.open_snapshot(2).settings) == ({"a": 1}, {"a": 2})


def test_unique_names_the_position(make):
    s = make()
    add(s, 2)
    tensors = {"key": keys([2, 3]), "value": np.array([2, 3])}
    with pytest.raises(DuplicateKeyError, match="position 1 exists already, in row 1") as caught:
        s.commit(records=["a", "b"], digests=[b"x", b"digest 1"], tensors=tensors, unique=True)
    assert caught.value.position == 1
    with pytest.raises(DuplicateKeyError, match="position 1 repeats the key at position 0"):
        s.commit(records=["a", "b"], digests=[b"x", b"x"], tensors=tensors, unique=True)
    assert s.version == 1 and read_rows(s.open_snapshot()) == expected_rows(range(2))


def test_files_of_rows_that_are_refused_go(tmp_path):
    digests = [b"%d" % i for i in range(sizes.MAX_BUFFERED_ROWS)] + [b"7"]
    tensors = {"key": np.zeros((len(digests), 2))}
    with Store(tmp_path) as s:
        with pytest.raises(DuplicateKeyError):
            s.commit(records=["r"] * len(digests), digests=digests, tensors=tensors, unique=True)
        assert not list(tmp_path.glob("*.safetensors*"))
        assert s.version == 0 and len(s.open_snapshot()) == 0
        digests[-1] = b"new"
        s.commit(records=["r"] * len(digests), digests=digests, tensors=tensors, unique=True)
        assert len(s.open_snapshot()) == len(digests)


def test_bad_input_changes_nothing(make):
    s = make()
    add(s, 2)
    good = {"key": keys([2]), "value": np.array([2])}

    def bad(error, match, **changes):
        call = {"records": ["r"], "digests": [b"d"], "tensors": good} | changes
        with pytest.raises(error, match=match):
            s.commit(**call)

    bad(ArgumentError, "2 records, 1 digests", records=["r", "r"])
    bad(ArgumentError, "'key', 'value'.*not 'key'", tensors={"key": keys([2])})
    bad(ShapeError, r"\(1, 2\), not \(2, 2\)", tensors=good | {"key": keys([2, 3])})
    bad(ShapeError, r"\(1, 2\), not \(1, 1\)", tensors=good | {"key": keys([2])[:, :1]})
    bad(DtypeError, "float32.*not float64", tensors=good | {"key": keys([2]).astype(float)})
    bad(DtypeError, r"records\[0\] must be str", records=[3])
    bad(DtypeError, r"digest bytes", digests=["d"])
    bad(ArgumentError, "not valid Unicode", records=["\ud800"])
    bad(RowNotFoundError, "row 7 cannot be removed", remove=[0, 7])
    bad(DtypeError, "row ids, which are integers, not 'x'", remove=["x"])
    bad(ArgumentError, "settings must consist of JSON values", settings={"a": object()})
    s.commit(remove=[0])
    bad(RowNotFoundError, "row 0 cannot be removed", remove=[0])
    assert s.version == 2 and read_rows(s.open_snapshot()) == expected_rows([1])
    with pytest.raises(RowNotFoundError, match="row 0 is not in version 2"):
        s.open_snapshot().read_records([1, 0])
    with pytest.raises(RowNotFoundError, match="row 0 is not in version 2"):
        s.open_snapshot().read_tensor("key", [0])
    with pytest.raises(RowNotFoundError, match="row 5 is not in version 2"):
        s.open_snapshot().read_tensor("key", [5, 1])
    with pytest.raises(ArgumentError, match="no tensor 'keys'"):
        s.open_snapshot().read_tensor("keys", [1])


def test_names_and_types_that_cannot_be_stored():
    with Store() as s:
        for name in ("ids", "__metadata__", ""):
            with pytest.raises(ArgumentError, match="cannot be named"):
                s.commit(records=["r"], digests=[b"d"], tensors={name: np.zeros(1)})
        with pytest.raises(DtypeError, match="complex128, which cannot be stored"):
            s.commit(records=["r"], digests=[b"d"], tensors={"key": np.zeros(1, complex)})
        with pytest.raises(ShapeError, match="one entry per row"):
            s.commit(records=["r"], digests=[b"d"], tensors={"key": np.float32(1)})


@pytest.mark.parametrize(
    "dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u1", "?", ">f4"]
)
@pytest.mark.parametrize("dims", [(), (3,), (2, 0), (2, 3)])
def test_every_type_and_shape(make, small, dtype, dims):
    s = make()
    rng = np.random.default_rng(1)
    tensor = rng.integers(0, 2, (30, *dims)).astype(dtype)
    for start, stop in ((0, 3), (3, 28), (28, 30)):
        block = tensor[start:stop]
        texts = [str(i) for i in range(start, stop)]
        s.commit(
            records=texts, digests=[t.encode() for t in texts], tensors={"t": block, "u": block}
        )
    result = make().open_snapshot().read_tensor("t", range(30))
    np.testing.assert_array_equal(result, tensor)
    assert result.dtype == np.dtype(dtype).newbyteorder("<")


def test_rows_without_tensors(make, small):
    s = make()
    for count in (3, 30):
        s.commit(records=["r"] * count, digests=[b"d"] * count)
    s.commit(remove=[5])
    assert (
        s.open_snapshot().live_ids().tolist() == [i for i in range(33) if i != 5]
        and s.open_snapshot().tensor_names == ()
    )


@pytest.mark.parametrize("text", ["", "a\0b", "ünï", "𝕏" * 5000, '{"a": 1}'])
def test_any_text_is_kept(make, text):
    s = make()
    s.commit(records=[text, text], digests=[b"", b"\0\xff"])
    assert make().open_snapshot().read_records([1, 0]) == [
        text,
        text,
    ] and make().open_snapshot().find_ids(b"\0\xff") == [1]


def test_a_segment_is_a_plain_safetensors_file(tmp_path, small):
    with Store(tmp_path) as s:
        add(s, 20)
        [file] = tmp_path.glob("*.safetensors")
        result = load_file(file)
        np.testing.assert_array_equal(result["ids"], range(20))
        np.testing.assert_array_equal(result["key"], keys(range(20)))
        assert struct.unpack("<Q", file.read_bytes()[:8])[0] % 64 == 56


def test_recode_is_a_new_generation(make, small):
    s = make()
    add(s, 30, settings={"encoder": "first"}, arrays={"w": np.eye(2)})
    s.commit(remove=[3, 29])
    ids = s.open_snapshot().live_ids()
    before = s.open_snapshot()

    def blocks():
        for block in np.array_split(ids, 5):
            yield block, {"key": keys(block) * 10}

    made = s.rewrite_tensors(
        blocks(), settings={"encoder": "second"}, arrays={"w": np.zeros((0, 3)), "b": np.array(3.0)}
    )
    assert made.version == 3 and s.versions()[-1].what == "learn"
    s = make()
    np.testing.assert_array_equal(s.open_snapshot().read_tensor("key", ids), keys(ids) * 10)
    assert s.open_snapshot().tensor_names == ("key",) and s.open_snapshot().settings == {
        "encoder": "second"
    }
    assert (
        s.open_snapshot().read_arrays()["w"].shape == (0, 3)
        and s.open_snapshot().read_arrays()["b"] == 3.0
    )
    np.testing.assert_array_equal(s.open_snapshot(2).read_arrays()["w"], np.eye(2))
    assert read_rows(s.open_snapshot(2)) == expected_rows(ids) and read_rows(
        s.open_snapshot(1)
    ) == expected_rows(range(30))
    assert before.version == 2
    s.commit(records=["r"], digests=[b"d"], tensors={"key": keys([30])})
    np.testing.assert_array_equal(
        s.open_snapshot().read_tensor("key", [30, 0]), [[30, -30], [0, 0]]
    )
    with pytest.raises(CombinationError, match="use rewrite_tensors"):
        s.commit(arrays={"w": np.eye(2)})


def test_recode_wants_every_row_in_order(make):
    s = make()
    add(s, 6)
    s.commit(remove=[2])

    def bad(*blocks, match):
        with pytest.raises(ArgumentError, match=match):
            s.rewrite_tensors([(ids, {"key": keys(ids)}) for ids in blocks])
        assert s.version == 2

    bad([0, 1, 3], match="2 live rows have no new tensors; the first is row 4")
    bad([0, 1], [4, 3, 5], match="expected row 3, not row 4")
    bad([0, 1, 2], match="expected row 3, not row 2")
    bad([0, 1, 3, 4, 5], [6], match="expected the end, not row 6")
    with pytest.raises(CombinationError, match="commit cannot run inside rewrite_tensors"):
        s.rewrite_tensors((s.commit(remove=[0]), {}) for _ in range(1))
    assert s.version == 2 and read_rows(s.open_snapshot()) == expected_rows([0, 1, 3, 4, 5])


def test_recode_of_nothing(make):
    s = make()
    assert s.rewrite_tensors([], settings={"a": 1}).version == 1
    add(s, 2)
    assert read_rows(make().open_snapshot()) == expected_rows(range(2))


def test_compaction_drops_the_dead_and_the_past(make, small):
    s = make()
    for _ in range(5):
        add(s, 30)
    gone = list(range(10, 70)) + list(range(100, 150, 2))
    s.commit(remove=gone)
    left = sorted(set(range(150)) - set(gone))
    seen = []
    report = s.compact(lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert (report.rows, report.dropped_rows, report.dropped_versions) == (65, 85, 5)
    assert report.held == () and report.files_after < report.files_before
    assert "dropped 85 deleted rows" in str(report)
    assert read_rows(s.open_snapshot()) == expected_rows(left) and s.version == 6
    with pytest.raises(VersionNotFoundError, match=r"version 3 was dropped.*oldest is 6"):
        s.open_snapshot(3)
    with pytest.raises(VersionNotFoundError, match="version 9 does not exist: the newest is 6"):
        s.open_snapshot(9)
    assert len(s._blob_storage.list_files()) == report.files_after
    # Ids go on where they were, even if the last rows are gone.
    assert add(s, 1).ids == range(150, 151)
    s.commit(remove=[150])
    s.compact()
    assert add(make(), 1).ids == range(151, 152)
    again = s.compact() if s.path is None else make().compact()
    assert again.dropped_rows == 0


def test_compaction_leaves_alone_what_is_good(tmp_path, small):
    with Store(tmp_path) as s:
        add(s, 60)
        before = sorted(tmp_path.glob("*.safetensors"))
        s.compact()
        assert sorted(tmp_path.glob("*.safetensors")) == before
        s.commit(remove=range(20, 40))
        s.compact()
        assert sorted(tmp_path.glob("*.safetensors")) == [before[0], before[2]]
        assert read_rows(s.open_snapshot()) == expected_rows([*range(20), *range(40, 60)])


def test_compaction_keeps_what_is_read_here(make, small):
    s = make()
    add(s, 40)
    old = s.open_snapshot()
    unread = s.open_snapshot()
    half = old.iterate_segments()
    first = next(half)
    s.commit(remove=range(0, 40, 2))
    add(s, 30)
    report = s.compact()
    assert report.held == (1,) and "kept version 1, which readers still use" in str(report)
    merged_ids = np.concatenate([first.ids, *(part.ids for part in half)])
    assert merged_ids.tolist() == list(range(40))
    assert (
        read_rows(old)
        == read_rows(unread)
        == read_rows(s.open_snapshot(1))
        == expected_rows(range(40))
    )
    ids = s.open_snapshot().live_ids()
    s.rewrite_tensors([(ids, {"key": keys(ids) + 1})])
    s.compact()
    assert read_rows(old) == expected_rows(range(40))
    old.close()
    del unread
    assert s.compact().held == ()
    np.testing.assert_array_equal(s.open_snapshot().read_tensor("key", ids), keys(ids) + 1)
    with pytest.raises(VersionNotFoundError):
        s.open_snapshot(1)


def test_compaction_drops_a_generation(make, small):
    s = make()
    add(s, 30, arrays={"w": np.eye(2)})
    ids = s.open_snapshot().live_ids()
    s.rewrite_tensors([(ids, {"key": keys(ids) + 1})], arrays={"w": np.ones(1)})
    s.compact()
    assert s.open_snapshot().read_arrays()["w"].tolist() == [1.0]
    assert len(s._blob_storage.list_files()) == 2
    np.testing.assert_array_equal(make().open_snapshot().read_tensor("key", ids), keys(ids) + 1)


READER = """
import sys
from qkv.database.storage import Store
with Store(sys.argv[1], create=False) as s:
    old = s.open_snapshot(1)
    print("ready", flush=True)
    sys.stdin.readline()
    key, record = old.read_tensor("key", [0, 39]).tolist(), old.read_records([0])[0]
    print(old.live_ids().tolist(), key, record, flush=True)
    old.close()
    print("closed", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("system", ["ranges", "whole file"])
def test_compaction_keeps_what_another_process_reads(tmp_path, small, system, monkeypatch):
    program = textwrap.dedent(READER)
    if system == "whole file":
        monkeypatch.delattr(lock.fcntl, "F_OFD_SETLK")
        program = "import fcntl\ndel fcntl.F_OFD_SETLK\n" + program
    with Store(tmp_path) as s:
        add(s, 40)
        with subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout.readline() == "ready\n"
            s.commit(remove=range(0, 30))
            add(s, 10)
            assert 1 in s.compact().held
            child.stdin.write("\n")
            child.stdin.flush()
            line = child.stdout.readline()
            assert line == f"{list(range(40))} {keys([0, 39]).tolist()} record 0\n"
            assert child.stdout.readline() == "closed\n"
            report = s.compact()
            assert report.held == () and report.dropped_rows == 30
            child.stdin.write("\n")
    assert check_store(tmp_path) == []


def test_one_writer(tmp_path):
    one, two = Store(tmp_path / "books.qkv"), Store(tmp_path / "books.qkv")
    with one, two:
        add(one, 1)
        with pytest.raises(
            StoreLockedError, match=r"books.qkv is locked by this process \(\d+\).*twice.*close"
        ):
            add(two, 1)
        assert read_rows(two.open_snapshot()) == expected_rows([0])  # reading needs no lock
        one.close()
        add(two, 1)
        assert read_rows(two.open_snapshot()) == expected_rows([0, 1])


HOLDER = """
import sys
from qkv.database.storage import Store
s = Store(sys.argv[1])
s.commit(records=["held"], digests=[b"d"])
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_dead_writer_holds_nothing(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"held\n"
        with Store(tmp_path) as s:
            with pytest.raises(
                StoreLockedError,
                match=f"is locked by process {child.pid}: close the database there",
            ):
                s.commit(remove=[0])
            with pytest.raises(StoreLockedError):
                check_store(tmp_path, repair=True)
            assert check_store(tmp_path) == []
            assert s.open_snapshot().read_records([0]) == ["held"]
            child.kill()
            child.wait()
            s.commit(remove=[0])
            assert len(s.open_snapshot()) == 0


def test_readers_see_what_another_process_commits(tmp_path):
    with Store(tmp_path) as reader, Store(tmp_path) as writer:
        for count in range(1, 4):
            add(writer, 1, settings={"count": count})
            assert reader.version == count and len(reader.open_snapshot()) == count
            assert reader.open_snapshot().settings == {"count": count}


def test_threads(tmp_path, small):
    failures = []
    with Store(tmp_path) as s:
        add(s, 1)
        done = threading.Event()

        def write():
            try:
                for count in range(1, 60):
                    add(s, 3)
                    if count % 7 == 0:
                        s.commit(remove=s.open_snapshot().live_ids()[-1:])
                    if count % 20 == 0:
                        s.compact()
            except BaseException as error:
                failures.append(error)
            finally:
                done.set()

        def read():
            try:
                while not done.is_set():
                    snap = s.open_snapshot()
                    assert read_rows(snap) == expected_rows(snap.live_ids())
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for work in (write, read, read)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_store_is_not_closed_between_its_lock_and_a_commit(tmp_path, monkeypatch):
    s = Store(tmp_path)
    alone, closing = s.exclusive_lock, threading.Thread(target=s.close)

    def looked():
        lock = alone()
        closing.start()
        closing.join(0.2)
        return lock

    monkeypatch.setattr(s, "exclusive_lock", looked)
    add(s, 3)
    closing.join()
    with Store(tmp_path) as s:
        assert len(s.open_snapshot()) == 3


def test_closed_and_forked(tmp_path):
    s = Store(tmp_path)
    add(s, 1)
    snap = s.open_snapshot()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def child():
        try:
            s.open_snapshot()
            there.send("read")
        except StoreClosedError as error:
            there.send(str(error))
        os._exit(0)

    process = context.Process(target=child)
    process.start()
    assert here.poll(300) and "open it again here" in here.recv()
    process.join()
    here.close()
    there.close()
    add(s, 1)
    s.close()
    s.close()
    for use in (lambda: add(s, 1), s.open_snapshot, s.versions, lambda: snap.find_ids(b"d")):
        with pytest.raises(StoreClosedError, match="closed: open it again"):
            use()


def test_a_fork_in_the_middle_of_writing_has_a_copy_of_its_own(small):
    s = Store()
    add(s, 3)
    done = threading.Event()

    def write():
        while not done.is_set():
            add(s, 1)

    def slow():
        """Holds the lock for writing for as long as the children live."""
        rows = s.open_snapshot().live_ids()
        yield rows, {"key": keys(rows)}
        done.wait(600)

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def child():
        before = len(s.open_snapshot())
        add(s, 5)
        there.send(
            (
                before,
                len(s.open_snapshot()) - before,
                len(list(s.open_snapshot().iterate_rows())) == len(s.open_snapshot()),
            )
        )
        os._exit(0)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(5):
        process = context.Process(target=child)
        process.start()
        assert here.poll(300)
        before, more, same = here.recv()
        process.join()
        assert before >= 3 and more == 5 and same
    done.set()
    writer.join()
    done.clear()
    recoder = threading.Thread(target=lambda: s.rewrite_tensors(slow()))
    recoder.start()
    while s._running_operation != "rewrite_tensors":
        time.sleep(0.001)
    process = context.Process(target=child)
    process.start()
    assert here.poll(300) and here.recv()[1:] == (5, True)
    process.join()
    done.set()
    recoder.join()
    assert read_rows(s.open_snapshot())
    s.close()
    here.close()
    there.close()


def test_a_store_that_is_made_while_another_thread_forks_waits_for_it():
    made = []
    maker = threading.Thread(target=lambda: made.append(Store()))
    lock._before_fork()
    try:
        maker.start()
        maker.join(0.05)
        assert not made
    finally:
        lock._after_fork()
    maker.join()
    assert made[0] in lock._FORK_HANDLERS
    made[0].close()


def test_what_is_not_a_store(tmp_path):
    with pytest.raises(StoreNotFoundError, match="does not exist"):
        Store(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()
    with pytest.raises(StoreNotFoundError):
        check_store(tmp_path / "none")
    file = tmp_path / "file.csv"
    file.write_text("a,b\n")
    with pytest.raises(NotAStoreError, match=r"file.csv is a file"):
        Store(file)
    with pytest.raises(NotAStoreError, match="folder with other files"):
        Store(tmp_path)
    with pytest.raises(NotAStoreError):
        check_store(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreNotFoundError, match="empty"):
        Store(tmp_path / "empty", create=False)
    Store(tmp_path / "empty").close()
    Store(tmp_path / "empty", create=False).close()
    other = tmp_path / "other"
    other.mkdir()
    with sqlite3.connect(other / "catalogue.sqlite") as connection:
        connection.execute("CREATE TABLE t (a)")
    connection.close()
    with pytest.raises(NotAStoreError, match="not a qkv catalog"):
        Store(other)


@pytest.mark.parametrize(
    ("number", "next_step"),
    [(99, "install a newer"), (4, "export the rows with the qkv that wrote it")],
)
def test_another_format(tmp_path, number, next_step):
    Store(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "catalogue.sqlite")
    connection.execute(f"PRAGMA user_version = {number}")
    connection.close()
    with pytest.raises(
        NotAStoreError, match=f"format {number}, but this qkv reads format 5: {next_step}"
    ):
        Store(tmp_path)


def test_creation_that_was_cut_short_goes_on(tmp_path):
    (tmp_path / "catalogue.sqlite").touch()
    with pytest.raises(StoreNotFoundError):
        Store(tmp_path, create=False)
    with Store(tmp_path) as s:
        add(s, 1)


def fill_store(path):
    """Three segments of 20 rows, 3 resting rows; gives the segments' paths."""
    with Store(path) as s:
        add(s, 60, settings={"key": "title"}, arrays={"w": np.eye(2)})
        add(s, 3)
        s.commit(remove=[5, 61])
    return sorted(path.glob("segment*"))


def flip(path, offset, mask=1):
    content = bytearray(path.read_bytes())
    content[offset] ^= mask
    path.write_bytes(content)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_damage(tmp_path, small, bad):
    scale = np.arange(60, dtype="<f4") + 0.5
    with Store(tmp_path) as s:
        s.commit(
            records=["record"] * 60,
            digests=[b"digest %d" % i for i in range(60)],
            tensors={"code": np.ones((60, 2), np.int8), "scale": scale},
        )
    path = sorted(tmp_path.glob("segment*"))[0]
    content = path.read_bytes()
    at = content.index(scale[7:9].tobytes())
    path.write_bytes(content[:at] + np.array(bad, "<f4").tobytes() + content[at + 4 :])
    with (
        Store(tmp_path) as s,
        s.open_snapshot() as snapshot,
        pytest.raises(StoreDamagedError, match="not finite"),
    ):
        list(snapshot.iterate_segments())


LEFT = sorted(set(range(63)) - {5, 61})


@pytest.mark.parametrize("harm", ["missing", "short", "long", "header", "empty", "length"])
def test_a_damaged_segment(tmp_path, small, harm):
    path = fill_store(tmp_path)[1]
    content = path.read_bytes()
    match harm:
        case "missing":
            path.unlink()
        case "short":
            path.write_bytes(content[:-9])
        case "long":
            path.write_bytes(content + b"\0")
        case "header":
            flip(path, content.index(b'"key"') + 2)
        case "empty":
            path.write_bytes(b"")
        case "length":
            flip(path, 7, 0x80)
    before = sorted(os.listdir(tmp_path))
    [problem] = check_store(tmp_path)
    assert problem.file == path.name and "20 rows" in problem.what and not problem.repaired
    [problem] = check_store(tmp_path, repair=True)
    assert not problem.repaired
    with Store(tmp_path) as s:
        snap = s.open_snapshot()
        with pytest.raises(
            StoreDamagedError, match=rf"{path.name} is damaged.*skip_damaged"
        ) as caught:
            list(snap.iterate_segments())
        assert isinstance(caught.value, OSError) and isinstance(caught.value, QkvError)
        # What does not need the segment is there.
        assert snap.find_ids(b"digest 25") == [25] and snap.read_records([25]) == ["record 25"]
        assert snap.live_ids().tolist() == LEFT and len(dict(snap.iterate_rows())) == 61
        np.testing.assert_array_equal(snap.read_tensor("key", [1, 45, 62]), keys([1, 45, 62]))
        with pytest.raises(StoreDamagedError, match=path.name):
            snap.read_tensor("key", [1, 25])
        snap.close()
        s.commit(remove=[21])
        with pytest.raises(StoreDamagedError, match=path.name):
            s.compact()
    with Store(tmp_path, skip_damaged=True) as s:
        snap = s.open_snapshot()
        with pytest.warns(SkippedRowsWarning, match=f"20 rows were skipped.*{path.name}"):
            seen = np.concatenate([part.ids for part in snap.iterate_segments()])
        assert seen.tolist() == [*range(20), *range(40, 63)]
        add(s, 10)
        ids = s.open_snapshot().live_ids()
        # Other tensors for every row: the damaged file is not needed any more.
        s.rewrite_tensors([(ids, {"key": keys(ids)})])
        assert read_rows(s.open_snapshot()) == expected_rows(ids)
    assert set(before) <= set(os.listdir(tmp_path))  # nothing was deleted


def test_a_flipped_bit_is_found_by_check_and_not_copied(tmp_path, small):
    path = fill_store(tmp_path)[0]
    flip(path, path.stat().st_size - 3)
    [problem] = check_store(tmp_path)
    assert problem.file == path.name and "checksum" in problem.what
    with Store(tmp_path) as s, pytest.raises(StoreDamagedError, match="checksum"):
        s.compact()
    with Store(tmp_path) as s:
        assert s.version == 3 and len(s.open_snapshot()) == 61
        for _ in range(30):
            add(s, 3)  # small segments are joined, but not with this one
    [problem] = check_store(tmp_path)
    assert problem.file == path.name


def test_arrays_that_are_cut_while_they_are_used(tmp_path):
    with Store(tmp_path) as s:
        s.commit(arrays={"w": np.arange(9000.0)})
        result = s.open_snapshot().read_arrays()["w"]
        os.truncate(next(tmp_path.glob("arrays-*")), 10)
        np.testing.assert_array_equal(result, np.arange(9000.0))
        with pytest.raises(StoreDamagedError, match="10 bytes"):
            s.open_snapshot().read_arrays()


def test_damaged_arrays(tmp_path):
    fill_store(tmp_path)
    [path] = tmp_path.glob("arrays*")
    flip(path, path.stat().st_size - 1)
    [problem] = check_store(tmp_path)
    assert problem.file == path.name
    path.unlink()
    with Store(tmp_path) as s, pytest.raises(StoreDamagedError, match=r"arrays.*missing"):
        s.open_snapshot().read_arrays()


@pytest.mark.parametrize("tensors", ["no bytes", 7])
def test_a_resting_row_of_another_type(tmp_path, small, tensors):
    # As a page of zeros in the catalogue makes them: SQLite reads cells of any type.
    fill_store(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "catalogue.sqlite")) as db, db:
        db.execute("UPDATE resting SET tensors = ? WHERE id = 62", (tensors,))
    [problem] = check_store(tmp_path)
    assert problem.what == "the tensors of row 62 are not what was written"
    with Store(tmp_path) as s, pytest.raises(StoreDamagedError, match="tensors of row 62"):
        list(s.open_snapshot().iterate_segments())


def test_a_resting_row_that_stands_twice(tmp_path, small):
    fill_store(tmp_path)
    with Store(tmp_path) as s:
        shot, good = s.open_snapshot(), keys([1]).tobytes()
        lines = [(1, good, crc32(good)), (1, good, 0)]
        with pytest.raises(StoreDamagedError, match="tensors of row 1 "):
            build_buffered_segment(shot._catalog, shot._read_layout(), lines)


def test_a_damaged_resting_row(tmp_path, small):
    fill_store(tmp_path)
    path = tmp_path / "catalogue.sqlite"
    flip(path, path.read_bytes().index(np.array([62.0, -62.0], np.float32).tobytes()))
    [problem] = check_store(tmp_path)
    assert problem.what == "the tensors of row 62 are not what was written"
    with Store(tmp_path) as s, pytest.raises(StoreDamagedError, match="tensors of row 62"):
        list(s.open_snapshot().iterate_segments())
    skipped = pytest.warns(SkippedRowsWarning, match=r"1 rows were skipped.*row 62")
    with Store(tmp_path, skip_damaged=True) as s, skipped:
        assert s.open_snapshot().read_tensor("key", [60]).tolist() == keys([60]).tolist()
    problems = check_store(tmp_path, repair=True)
    assert problems[0].repaired and "1 rows have lost their tensors" in problems[-1].what
    with Store(tmp_path) as s:
        assert s.open_snapshot().live_ids().tolist() == LEFT and s.open_snapshot().read_records(
            [62]
        ) == ["record 62"]
        with pytest.raises(StoreDamagedError, match="the vectors of row 62 are lost"):
            s.open_snapshot().read_tensor("key", [62])
        ids = s.open_snapshot().live_ids()
        s.rewrite_tensors([(ids, {"key": keys(ids)})])
        assert read_rows(s.open_snapshot()) == expected_rows(LEFT)
    assert check_store(tmp_path) == []


def test_leftovers_are_removed_by_the_next_writer(tmp_path, small):
    fill_store(tmp_path)
    with Store(tmp_path) as s:
        following = s._reader_catalog.fetch_value("SELECT files FROM counters")
    (tmp_path / f"segment-{following:08d}.safetensors").write_bytes(b"half")
    (tmp_path / f"segment-{following + 1:08d}.safetensors.tmp").write_bytes(b"")
    own_file = tmp_path / "mine.safetensors"
    own_file.write_bytes(b"mine")
    unknown = tmp_path / "segment-00000000.safetensors"
    unknown.write_bytes(b"?")
    problems = check_store(tmp_path)
    assert len(problems) == 4 and not any(problem.repaired for problem in problems)
    assert len(os.listdir(tmp_path)) == len(set(os.listdir(tmp_path)))
    problems = check_store(tmp_path, repair=True)
    assert sorted(problem.repaired for problem in problems) == [False, False, True, True]
    assert "move it elsewhere" in str(problems[-1])
    (tmp_path / f"segment-{following:08d}.safetensors").write_bytes(b"half")
    left = tmp_path / f"segment-{following:08d}.safetensors"
    with Store(tmp_path) as s:
        assert (
            read_rows(s.open_snapshot()) == expected_rows(LEFT) and left.exists()
        )  # a reader removes nothing
        add(s, 1)
    assert own_file.exists() and unknown.exists() and not left.exists()


def test_a_full_disk_changes_nothing(tmp_path, small):
    class Full(blob_storage.FileSystem):
        def fsync(self, file, path):
            raise OSError(28, "No space left on device")

    fill_store(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with Store(tmp_path, files=Full()) as s:
        with pytest.raises(StoreUnwritableError, match=r"No space left.*nothing was changed"):
            add(s, 30)
        assert s.version == 3
        add(s, 1)
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "lock"]) or "lock" in before
    with Store(tmp_path) as s:
        assert read_rows(s.open_snapshot()) == expected_rows([*LEFT, 63])
    assert check_store(tmp_path) == []


def catalogue_of(path):
    return path / "catalogue.sqlite"


def page_of(path, text):
    """Where a text lies in the catalogue."""
    content = catalogue_of(path).read_bytes()
    return content.index(text)


HARMS = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "magic": lambda path: flip(path, 3),
    "header": lambda path: path.write_bytes(bytes(100) + path.read_bytes()[100:]),
    "first page": lambda path: path.write_bytes(b"\xff" * 4096 + path.read_bytes()[4096:]),
    "short": lambda path: path.write_bytes(path.read_bytes()[:-4096]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "noise": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "record": lambda path: flip(path, path.read_bytes().index(b"record 17") + 2),
    "settings": lambda path: flip(path, path.read_bytes().index(b"title") + 2),
    "schema format": lambda path: flip(path, 47, 0x80),
    "schema": lambda path: flip(path, path.read_bytes().index(b"CREATE TABLE rows"), 0x80),
    "schema of settings": lambda path: flip(path, path.read_bytes().index(b"CREATE TABLE set"), 64),
    "schema of an index": lambda path: flip(path, path.read_bytes().index(b"(digest)") + 1, 32),
    "schema of resting": lambda path: flip(path, path.read_bytes().index(b"tensors BLOB"), 0x80),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_catalogue(tmp_path, small, harm):
    fill_store(tmp_path)
    path = tmp_path / "catalogue.sqlite"
    HARMS[harm](path)
    broken = path.read_bytes() if path.exists() else None
    files = sorted(os.listdir(tmp_path))
    problems = check_store(tmp_path)
    assert problems and {problem.file for problem in problems} == {"catalogue.sqlite"}
    if harm not in ("record", "settings", "short", "half"):
        with pytest.raises(StoreDamagedError, match=r"catalogue.sqlite.*qkv check --repair"):
            Store(tmp_path)
    if harm == "record":
        with Store(tmp_path) as s:
            with pytest.raises(StoreDamagedError, match="row 17 is not what was written"):
                s.open_snapshot().read_records([17])
            assert s.open_snapshot().read_records([16]) == ["record 16"]
        with (
            Store(tmp_path, skip_damaged=True) as s,
            pytest.warns(SkippedRowsWarning, match="row 17"),
        ):
            assert len(dict(s.open_snapshot().iterate_rows())) == 60
    if harm == "settings":
        with (
            Store(tmp_path) as s,
            pytest.raises(StoreDamagedError, match="checksum of its settings differs"),
        ):
            _ = s.open_snapshot().settings
    assert path.exists() == (broken is not None)
    found_problems = check_store(tmp_path, repair=True)
    if harm in ("missing", "empty", "noise"):
        assert not any(problem.repaired for problem in found_problems)
        assert sorted(set(os.listdir(tmp_path)) - {"lock"}) == sorted(set(files) - {"lock"})
        return
    assert any(problem.repaired for problem in found_problems)
    assert (tmp_path / "damaged-1" / "catalogue.sqlite").read_bytes() == broken
    again = check_store(tmp_path)
    with Store(tmp_path) as s:
        snap = s.open_snapshot()
        result = dict(snap.iterate_rows())
        assert result == {i: f"record {i}" for i in result}
        assert s.version == 4 or harm == "half"
        if harm in ("magic", "header", "first page", "settings") or "schema" in harm:
            assert read_rows(snap) == expected_rows(LEFT) and again == []
            assert snap.settings == {"key": "title"}
            np.testing.assert_array_equal(snap.read_arrays()["w"], np.eye(2))
        if harm == "record":
            assert read_rows(snap) == expected_rows(set(LEFT) - {17}) and again == []
            assert any("60 of 61 rows could be read" in problem.what for problem in found_problems)
        add(s, 1)


def test_a_damaged_page_loses_only_its_rows(tmp_path):
    with Store(tmp_path) as s:
        texts = [f"{i:05d} " + "x" * 100 for i in range(2000)]
        s.commit(records=texts, digests=[t[:5].encode() for t in texts], settings={"a": 1})
        s.commit(remove=[3])
    path = tmp_path / "catalogue.sqlite"
    content = bytearray(path.read_bytes())
    start = content.index(b"01000 xxx") // 4096 * 4096
    content[start : start + 4096] = b"\xff" * 4096
    path.write_bytes(content)
    assert check_store(tmp_path)
    with Store(tmp_path) as s:
        assert s.open_snapshot().read_records([0]) == texts[:1]
        with pytest.raises(StoreDamagedError, match="malformed"):
            list(s.open_snapshot().iterate_rows())
    assert any(problem.repaired for problem in check_store(tmp_path, repair=True))
    assert check_store(tmp_path) == []
    with Store(tmp_path) as s:
        result = dict(s.open_snapshot().iterate_rows())
        assert 1940 < len(result) < 1999 and 3 not in result
        assert all(texts[i] == text for i, text in result.items())
        assert s.open_snapshot().find_ids(b"01999") == [1999] and s.open_snapshot().settings == {
            "a": 1
        }


def harm_somewhere(path, rng):
    """Flip a bit, fill a page with noise, cut the end off, or write zeros."""
    file = rng.choice([f for f in path.iterdir() if f.stat().st_size > 100])
    if rng.random() < 0.7:
        file = path / "catalogue.sqlite"
    content = bytearray(file.read_bytes())
    at = rng.randrange(len(content))
    kind = rng.choice(["bit", "page", "cut", "zeros"])
    if kind == "bit":
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "page":
        at -= at % 4096
        content[at : at + 4096] = rng.randbytes(len(content[at : at + 4096]))
    elif kind == "cut":
        del content[at:]
    else:
        content[at : at + 600] = bytes(len(content[at : at + 600]))
    file.write_bytes(content)


@pytest.mark.filterwarnings("ignore::qkv.database.errors.SkippedRowsWarning")
@pytest.mark.parametrize("seed", range(1000 if FULL else 15))
def test_damage_anywhere_is_noticed_and_never_makes_rows_up(tmp_path, small, seed):
    fill_store(tmp_path)
    harm_somewhere(tmp_path, random.Random(seed))
    problems = check_store(tmp_path)
    try:
        with Store(tmp_path) as s, s.open_snapshot() as snap:
            same = snap.settings == {"key": "title"} and read_rows(snap) == expected_rows(LEFT)
    except QkvError:
        same = False
    except AssertionError:  # the ways to read do not agree
        same = False
    assert problems or same
    check_store(tmp_path, repair=True)
    try:
        with Store(tmp_path, skip_damaged=True) as s, s.open_snapshot() as snap:
            result = dict(snap.iterate_rows())
            assert set(result) <= set(LEFT) and all(result[i] == f"record {i}" for i in result)
            seen = [p.ids[... if p.live is None else p.live] for p in snap.iterate_segments()]
            assert set(np.concatenate(seen).tolist()) <= set(range(63)) or problems
    except QkvError:
        assert problems


def test_reading_a_folder_that_cannot_be_written(tmp_path, small):
    fill_store(tmp_path)
    tmp_path.chmod(0o555)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write everywhere")
        with Store(tmp_path) as s:
            assert read_rows(s.open_snapshot()) == expected_rows(LEFT)
            with pytest.raises(StoreUnwritableError, match="permissions"):
                add(s, 1)
        assert check_store(tmp_path) == []
        with pytest.raises(StoreUnwritableError):
            Store(tmp_path / "new")
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="a limit on files of this process")
def test_reading_on_a_full_disk(tmp_path, small):
    """What may not grow any file, as on a full disk, reads a store that was closed, and what
    somebody writes to it meanwhile."""
    fill_store(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", _ON_A_FULL_DISK, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdin is not None and child.stdout is not None

        def ask_child() -> list[int]:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            return json.loads(child.stdout.readline())

        first = ask_child()
        with Store(tmp_path) as s:
            assert first == [s.version, len(s.open_snapshot()), 0]
        for more in (1, 2):  # a writer that has left again each time
            with Store(tmp_path) as s:
                add(s, 5)
                if more == 2:
                    s.compact()
            assert ask_child() == [first[0] + more, first[1] + 5 * more, 5 * more]
        with Store(tmp_path) as s:  # one who is still there
            add(s, 5)
            assert ask_child() == [first[0] + 3, first[1] + 15, 15]
            add(s, 5)
            assert ask_child() == [first[0] + 4, first[1] + 20, 20]
        assert ask_child() == [first[0] + 4, first[1] + 20, 20]
        child.stdin.close()
        assert child.wait() == 0


@pytest.mark.skipif(os.name != "posix", reason="a limit on files of this process")
@pytest.mark.parametrize("free", [1, 2, 4, 6, 9])
def test_a_store_that_cannot_be_made_without_descriptors_leaves_nothing(tmp_path, free):
    """However many are left when it begins; and what is named is where it was to be."""
    completed = subprocess.run(
        [sys.executable, "-c", _WITHOUT_DESCRIPTORS, str(tmp_path / "s.qkv"), str(free)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.startswith(f"{tmp_path / 's.qkv'}"), completed
    assert list(tmp_path.iterdir()) == []


_WITHOUT_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from qkv.database.storage import Store
from qkv.database.storage.folder import build_store_folder
from qkv.errors import QkvError

path, held = Path(sys.argv[1]), []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
while True:
    try:
        held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        break
for _ in range(int(sys.argv[2])):
    os.close(held.pop())
try:
    with build_store_folder(path) as place, Store(place) as store:
        store.commit(records=["a"], digests=[b"a"])
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
except QkvError as error:
    print(error)
except OSError:
    print(path)
"""

_ON_A_FULL_DISK = """
import json, resource, sys
from qkv.database.errors import StoreUnwritableError
from qkv.database.storage import Store, check_store

resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
store = Store(sys.argv[1])
first = len(store.open_snapshot())
for _ in sys.stdin:
    found = store.open_snapshot()
    ids = [row for row, _ in found.iterate_rows()]
    assert len(ids) == len(found) and (found.read_tensor("value", ids) == ids).all()
    print(json.dumps([store.version, len(found), len(found) - first]), flush=True)
assert check_store(sys.argv[1]) == []
try:
    store.commit(remove=[ids[0]])
except StoreUnwritableError:
    store.close()
else:
    raise AssertionError
"""


def test_a_catalogue_cannot_name_files_elsewhere(tmp_path, small):
    inside, outside = tmp_path / "s", tmp_path / "segment-00000001.safetensors"
    first = fill_store(inside)[0]
    first.rename(outside)
    connection = sqlite3.connect(inside / "catalogue.sqlite", isolation_level=None)
    connection.execute("UPDATE segments SET file = '../' || file WHERE first = 0")
    connection.close()
    with Store(inside) as s:
        with pytest.raises(
            StoreDamagedError, match=r"names the file '../segment-00000001.safetensors'"
        ):
            list(s.open_snapshot().iterate_segments())
        with pytest.raises(StoreDamagedError):
            s.compact()
    assert outside.exists()


def test_a_layout_that_cannot_be_read(tmp_path, small):
    fill_store(tmp_path)
    connection = sqlite3.connect(tmp_path / "catalogue.sqlite", isolation_level=None)
    connection.execute("UPDATE generations SET layout = '[[1]]'")
    connection.close()
    with Store(tmp_path) as s:
        with pytest.raises(StoreDamagedError, match="layout in it cannot be read"):
            list(s.open_snapshot().iterate_segments())
        assert s.open_snapshot().read_records([0]) == ["record 0"]
    [problem] = check_store(tmp_path)
    assert problem.what == "a layout in it cannot be read"
    check_store(tmp_path, repair=True)
    with Store(tmp_path) as s:
        assert read_rows(s.open_snapshot()) == expected_rows(LEFT)


def test_an_unreferenced_store_releases_its_lock(tmp_path):
    add(Store(tmp_path), 1)
    snap = Store(tmp_path).open_snapshot()
    assert snap.read_records([0]) == ["record 0"]  # a snapshot holds its store
    del snap
    with Store(tmp_path) as s:
        add(s, 1)


def test_many_dead_rows_over_many_versions(make, small):
    s = make()
    add(s, 40)
    rng = np.random.default_rng(0)
    left = [list(range(40))]
    for _ in range(12):
        s.commit(remove=rng.choice(left[-1], 3, replace=False))
        left.append(s.open_snapshot().live_ids().tolist())
        assert read_rows(s.open_snapshot()) == expected_rows(left[-1])
    for version in rng.permutation(13):
        assert read_rows(s.open_snapshot(int(version) + 1)) == expected_rows(left[version])


def test_an_interrupted_compaction_leaves_the_old_state(tmp_path, small):
    fill_store(tmp_path)

    def stop(done, total):
        raise KeyboardInterrupt

    with Store(tmp_path) as s:
        with pytest.raises(KeyboardInterrupt):
            s.compact(stop)
        assert read_rows(s.open_snapshot()) == expected_rows(LEFT) and read_rows(
            s.open_snapshot(1)
        ) == expected_rows(range(60))
    assert check_store(tmp_path) == []


def test_opening_is_cheap(tmp_path):
    fill_store(tmp_path)
    started = time.thread_time()  # others may keep the machine busy
    for _ in range(10):
        Store(tmp_path).close()
    assert time.thread_time() - started < 1.0


def test_notes_are_json(tmp_path, small):
    path = fill_store(tmp_path)[0]
    notes, entry = segments.read_file_metadata(path)
    assert json.loads(notes["settings"]) == {"key": "title"} and entry.rows == 20
    assert Path(entry.file) == Path(path.name)


def test_a_store_that_outlives_python_s_modules_says_nothing(monkeypatch):
    made = Store()
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "os", None)
        made.__del__()
    made.close()


def test_a_missing_folder_is_created_by_the_first_commit(tmp_path):
    path = tmp_path / "deep" / "s"
    with Store(path) as store:
        snapshot = store.open_snapshot()
        assert (store.version, len(snapshot), store.versions()) == (0, 0, [])
        assert not path.exists() and not path.parent.exists()
        with pickle.loads(pickle.dumps(store)) as copy:
            copy.commit(records=["one"], digests=[b"1"])
        assert store.version == 1  # the copy has created the folder
        store_snapshot = store.open_snapshot()
        assert store_snapshot.read_records(store_snapshot.find_ids(b"1")) == ["one"]
    with Store(path) as store:
        assert store.commit(records=["two"], digests=[b"2"]).version == 2


def test_a_store_is_created_at_once_if_asked_for(tmp_path):
    Store(tmp_path / "s", create=True).close()
    assert Store(tmp_path / "s", create=False).version == 0


def test_a_folder_that_cannot_be_created_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnwritableError, match="cannot be created"):
        Store(tmp_path / "file" / "s")
