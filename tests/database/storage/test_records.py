"""Records of many rows in a file of their own, found by digest."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest

import qkv
from qkv.database.errors import (
    DuplicateKeyError,
    RowNotFoundError,
    SkippedRowsWarning,
    StoreDamagedError,
)
from qkv.database.storage import Store, check_store, limits, records
from qkv.database.storage.catalog import CATALOG_FILE
from qkv.database.storage.segments import IDS_TENSOR
from qkv.errors import ArgumentError, DtypeError
from tests.database.storage.test_store import add, expected_rows, flip, read_rows


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Limits that let ten rows be many."""
    monkeypatch.setattr(limits, "MIN_BUNDLE_ROWS", 10)
    monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 10)


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    with Store(None if request.param == "memory" else tmp_path / "books.qkv") as made:
        yield made


def files(path):
    return sorted(path.glob("rows-*"))


def loose(store):
    return store._reader_catalog.fetch_value("SELECT count(*) FROM rows")


def test_rows_of_a_bundle_live_and_die_as_others_do(store):
    add(store, 20)
    assert loose(store) == 0
    add(store, 2)  # too few for a bundle
    add(store, 12)
    before = store.open_snapshot()
    store.commit(remove=[3, 21, 25])
    left = [i for i in range(34) if i not in (3, 21, 25)]
    for snap, ids in (
        (before, range(34)),
        (store.open_snapshot(), left),
        (store.open_snapshot(3), range(34)),
    ):
        assert read_rows(snap) == expected_rows(ids)
        for i in (3, 7, 20, 21, 25, 33):
            assert snap.find_ids(b"digest %d" % i) == ([i] if i in ids else [])
            assert snap.find_newest(b"digest %d" % i) == ((i, f"record {i}") if i in ids else None)
    assert (
        before.find_latest_record(b"digest 3") is None
    )  # in the newest version, whichever this one is
    assert before.find_latest_record(b"digest 4") == (4, "record 4")
    assert (
        store.open_snapshot(1).find_ids(b"digest 30") == []
        and store.open_snapshot(1).find_newest(b"digest 30") is None
    )


def test_a_compaction_forgets_the_dead_of_a_bundle(store):
    add(store, 20)
    store.commit(remove=[0, 5])
    # One that was read before the compaction does not bring them back.
    with store.open_snapshot() as old:
        store.compact()
        assert loose(store) == 0
        with store.open_snapshot() as new:
            for snapshot in (old, new):
                assert (
                    snapshot.find_ids(b"digest 5") == []
                    and snapshot.find_newest(b"digest 5") is None
                )
                assert read_rows(snapshot) == expected_rows(
                    [i for i in range(20) if i not in (0, 5)]
                )
    store.commit(remove=[i for i in range(20) if i not in (0, 5)])
    store.compact()
    assert len(store.open_snapshot()) == 0 and not [
        f for f in store._blob_storage.list_files() if f.startswith("rows")
    ]


def test_bundles_stay_few(tmp_path):
    with Store(tmp_path) as store:
        for _ in range(8):
            add(store, 10)
        assert len(files(tmp_path)) == 1
        add(store, 10)
        assert len(files(tmp_path)) == 2
        assert read_rows(store.open_snapshot()) == expected_rows(
            range(90)
        ) and store.open_snapshot().find_ids(b"digest 4") == [4]
        assert read_rows(store.open_snapshot(3)) == expected_rows(range(30))
    assert check_store(tmp_path) == []


def test_keys_that_repeat_and_keys_that_must_not(store):
    digests = [b"%d" % (i % 4) for i in range(12)]
    tensors = {"key": np.zeros((12, 2), np.float32)}
    store.commit(records=list("abcdefghijkl"), digests=digests, tensors=tensors)
    assert store.open_snapshot().find_ids(b"1") == [1, 5, 9] and store.open_snapshot().find_newest(
        b"1"
    ) == (9, "j")
    store.commit(remove=[9])
    assert store.open_snapshot().find_ids(b"1") == [1, 5] and store.open_snapshot().find_newest(
        b"1"
    ) == (5, "f")
    with pytest.raises(DuplicateKeyError, match="position 0 exists already, in row 10"):
        store.commit(
            records=["m"], digests=[b"2"], tensors={"key": tensors["key"][:1]}, unique=True
        )


@pytest.mark.parametrize("width", [1, 7, 8, 9, 255, 300])
def test_digests_of_any_length(tmp_path, width):
    digests = [bytes([i]) * width for i in range(12)]
    with Store(tmp_path) as store:
        for _ in range(2):  # one after the other, so that they are merged
            store.commit(records=["é"] * 12, digests=digests)
        result = [store.open_snapshot().find_ids(digest) for digest in digests]
    assert result == [[i, i + 12] for i in range(12)]
    assert check_store(tmp_path) == [] and len(files(tmp_path)) == (
        width <= records.MAX_DIGEST_BYTES
    )


def test_an_invalid_row_is_an_error(store):
    with pytest.raises(DtypeError, match=r"records\[7\] must be str"):
        store.commit(records=["a"] * 7 + [5] + ["a"] * 9, digests=[b"d"] * 17)
    with pytest.raises(ArgumentError, match=r"records\[7\] is not valid Unicode"):
        store.commit(records=["a"] * 7 + ["\ud800"] + ["a"] * 9, digests=[b"d"] * 17)
    assert store.version == 0


def test_a_damaged_bundle(tmp_path):
    with Store(tmp_path) as store:
        add(store, 20)
        add(store, 10)
    file = files(tmp_path)[0]
    sound = file.read_bytes()
    flip(file, sound.index(b"record 17") + 2)
    [problem] = check_store(tmp_path)
    assert problem.file == file.name and "checksum differs" in problem.what
    with Store(tmp_path) as store:
        assert store.open_snapshot().find_newest(b"digest 4") == (4, "record 4")
        with pytest.raises(StoreDamagedError, match="row 17 is not what was written"):
            store.open_snapshot().find_newest(b"digest 17")
    file.write_bytes(sound[:-9])
    assert any("bytes, but" in problem.what for problem in check_store(tmp_path))
    with Store(tmp_path) as store, pytest.raises(StoreDamagedError, match=r"rows-.*bytes, but"):
        store.open_snapshot().find_newest(b"digest 25")
    with (
        Store(tmp_path, skip_damaged=True) as store,
        pytest.warns(SkippedRowsWarning, match="20 rows"),
    ):
        snap = store.open_snapshot()
        assert dict(snap.iterate_rows()) == {i: f"record {i}" for i in range(20, 30)}
        assert [
            part.ids[part.live].tolist()
            for part in snap.iterate_segments()
            if part.live is not None
        ]
    file.write_bytes(sound)
    assert check_store(tmp_path) == []


@pytest.mark.parametrize("name", ["prefix", "place", "size", IDS_TENSOR])
@pytest.mark.parametrize("bit", [1, 7])
def test_a_key_that_a_damaged_index_hides_is_not_reported_missing(tmp_path, name, bit):
    """Whichever entry is damaged: each look-up is right, or names what lists the damage."""
    keys = [f"key {i}" for i in range(12)]
    with qkv.open(tmp_path / "d.qkv") as D:
        D.add(keys, list(range(12)))
    [file] = files(tmp_path / "d.qkv")
    sound = file.read_bytes()
    width = int.from_bytes(sound[:8], "little")
    first, last = json.loads(sound[8 : 8 + width])[name]["data_offsets"]
    step = (last - first) // 12
    raised = 0
    for entry in range(12):
        file.write_bytes(sound)
        flip(file, 8 + width + first + entry * step, 1 << bit)
        with qkv.open(tmp_path / "d.qkv") as D:
            for i in range(-1, 12):
                try:
                    assert D.get(f"key {i}") == (i if i >= 0 else None)
                except StoreDamagedError as error:
                    assert "qkv check lists all damage" in str(error)
                    raised += 1
    assert raised >= 12 * (name != IDS_TENSOR)


def test_a_repair_makes_a_damaged_index_anew_from_the_rows(tmp_path):
    with Store(tmp_path) as store:
        add(store, 20)
    [file] = files(tmp_path)
    sound = file.read_bytes()
    width = int.from_bytes(sound[:8], "little")
    header = json.loads(sound[8 : 8 + width])
    for name in ("prefix", "place"):
        first, last = header[name]["data_offsets"]
        for offset in range(8 + width + first, 8 + width + last, 7):
            flip(file, offset, 1 << offset % 8)
    harmed = file.read_bytes()
    [problem] = check_store(tmp_path)
    assert "not what was written" in problem.what and file.read_bytes() == harmed
    [problem] = check_store(tmp_path, repair=True)
    assert problem.file == file.name and problem.repaired
    assert check_store(tmp_path) == [] and file.read_bytes() == sound
    assert (tmp_path / "damaged-1" / file.name).read_bytes() == harmed
    with Store(tmp_path) as store:
        assert [store.open_snapshot().find_ids(b"digest %d" % i) for i in range(20)] == [
            [i] for i in range(20)
        ]


def test_a_repair_leaves_a_bundle_whose_rows_are_damaged(tmp_path):
    with Store(tmp_path) as store:
        add(store, 20)
    [file] = files(tmp_path)
    flip(file, file.read_bytes().index(b"record 17") + 2)
    harmed = file.read_bytes()
    assert not any(problem.repaired for problem in check_store(tmp_path, repair=True))
    assert file.read_bytes() == harmed
    assert not list(tmp_path.glob("repair-*")) and not list(tmp_path.glob("damaged-*"))


@pytest.mark.parametrize("mask", [1, 2, 16])
def test_where_a_record_begins_is_damaged(tmp_path, mask):
    """The CRC is of digest and record as one, so that it cannot tell where one ends."""
    with qkv.open(tmp_path / "d.qkv") as D:
        D.add([f"key {i}" for i in range(20)], list(range(20)))
    [file] = files(tmp_path / "d.qkv")
    at = file.read_bytes().index(20 * b"\x10")
    flip(file, at + 17, mask)
    with qkv.open(tmp_path / "d.qkv") as D:
        assert D["key 3"] == 3
        for read in (D.items, D.rows, lambda: D, lambda: D.ask("key 17").rows):
            with pytest.raises(
                StoreDamagedError, match=r"not what was written|a record is damaged"
            ):
                list(read())


@pytest.mark.parametrize("harm", ["rows", "catalogue"])
def test_a_repair_brings_bundles_back(tmp_path, harm):
    with Store(tmp_path) as store:
        add(store, 20, settings={"key": "title"})
        store.commit(remove=[5])
    path = tmp_path / CATALOG_FILE
    if harm == "rows":
        with closing(sqlite3.connect(path)) as catalogue:
            catalogue.execute("UPDATE rows SET crc = 0")
            catalogue.commit()
    else:
        path.write_bytes(b"")
    problems = [problem.what for problem in check_store(tmp_path, repair=True)]
    assert check_store(tmp_path) == []
    with Store(tmp_path) as store:
        # Deleted rows are recorded twice, so that one lost line does not restore them.
        left = [i for i in range(20) if i != 5 or harm == "catalogue"]
        assert read_rows(store.open_snapshot()) == expected_rows(
            left
        ) and store.open_snapshot().settings == {"key": "title"}
        add(store, 3)
        assert store.open_snapshot().find_ids(b"digest 7") == [7]
    assert any("versions before the repair are lost" in what for what in problems) == (
        harm == "catalogue"
    )


def test_settings_that_are_lost_with_the_segments_are_those_of_a_bundle(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 100)
    with Store(tmp_path) as store:
        store.commit(settings={"schema": "mine"})
        add(store, 12)
        ids = store.open_snapshot().live_ids()
        store.rewrite_tensors(
            [(ids[:6], {}), (ids[6:], {})], settings={"schema": "mine", "encoder": 2}
        )
    with closing(sqlite3.connect(tmp_path / CATALOG_FILE)) as catalogue:
        catalogue.execute("UPDATE settings SET crc = 0")
        catalogue.commit()
    problems = [problem.what for problem in check_store(tmp_path, repair=True)]
    assert any(
        "the settings are lost; the settings of an older file replace them" in x for x in problems
    )
    with Store(tmp_path) as store:
        assert (
            store.open_snapshot().settings == {"schema": "mine"}
            and len(store.open_snapshot()) == 12
        )


def test_a_damaged_record_of_many_names_its_row(tmp_path):
    """Rows of one bundle are read in a faster way, which must not hide damage."""
    store = Store(tmp_path / "s")
    count = limits.MIN_BUNDLE_ROWS
    store.commit(
        records=[f"record {i:06}" for i in range(count)],
        digests=[b"%016d" % i for i in range(count)],
    )
    store.close()
    (file,) = (tmp_path / "s").glob("rows-*")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"record 000007", b"record 000008", 1))
    with Store(tmp_path / "s") as damaged, damaged.open_snapshot() as snapshot:
        assert snapshot.read_records([9, 3]) == ["record 000009", "record 000003"]
        with pytest.raises(StoreDamagedError, match="row 7 is not what was written"):
            snapshot.read_records([6, 7])
        with pytest.raises(RowNotFoundError, match=f"row {count} is not"):
            snapshot.read_records([6, count])
