"""Writing from several threads, and writing that fails half-way: what is said is what is true."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import pytest

import qkv
from qkv.database import Database
from qkv.database.encoders import Characters
from qkv.database.errors import StaleFitWarning, StoreDamagedError, StoreUnwritableError
from qkv.database.storage import Store, blob_storage, limits
from qkv.database.table.view import TableView
from qkv.errors import DtypeError, ShapeError


@pytest.fixture
def hurried():
    """Threads that change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_in_threads(*works):
    """Run these in a thread each; what they raised."""
    faults = []

    def run(work):
        try:
            work()
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return faults


@pytest.fixture(params=["memory", "disk"])
def names(request, tmp_path):
    with Database() if request.param == "memory" else qkv.open(tmp_path / "n.qkv") as D:
        yield D


def test_updates_from_threads_leave_one_row_for_a_key(names, hurried):
    names.add(["Li", "Hu"], [0, 0])

    def update():
        for i in range(6):
            names.update("Li", i)

    assert run_in_threads(*[update] * 8) == []
    assert names.get_all("Li") == [5] and len(names) == 2
    assert names.version == 1 + 8 * 6


def test_first_rows_from_threads_fix_one_schema(names, hurried):
    works = [lambda i=i: names.add([f"key {i}", f"other {i}"], [i, i]) for i in range(8)]
    assert run_in_threads(*works) == []
    assert len(names) == 16 and names["key 3"] == 3
    assert names.ask("key 3", weighting="hard").value == 3


def test_removing_from_threads_takes_each_row_once(names, hurried):
    names.add(["Li"] * 3 + ["Hu"], [1, 2, 3, 4])
    faults = run_in_threads(*[lambda: names.remove("Li")] * 4)
    assert [type(fault) for fault in faults] == [qkv.database.KeyNotFoundError] * 3
    assert list(names) == ["Hu"] and names.version == 2


def test_asking_while_others_write_and_compact(names, hurried):
    names.add([f"key {i}" for i in range(40)], [float(i) for i in range(40)])
    done = threading.Event()

    def read():
        while not done.is_set():
            assert names["key 7"] == 7.0
            answer = names.ask("key 7", weighting="hard")
            assert answer.value == 7.0 and len(answer.weights) == answer.total

    def write():
        try:
            for i in range(10):
                names.update(f"key {i + 10}", -1.0)
                names.add(f"new {i}", 1.0)
                names.compact()
        finally:
            done.set()

    assert run_in_threads(read, read, write) == []


def test_a_compaction_in_the_middle_of_a_look(names, monkeypatch):
    names.add("Li", "Mu")
    assert names["Li"] == "Mu"
    names.add("Hu", "Rachel")
    monkeypatch.setattr(TableView, "inherit_encoder", lambda self, old: names.compact())
    assert names["Hu"] == "Rachel"


def test_rows_are_in_though_the_disk_was_full_when_their_encoder_was_fitted(tmp_path, monkeypatch):
    class Full(blob_storage.FileSystem):
        def write(self, path, chunks):
            raise OSError(28, "No space left on device")

    path = tmp_path / "d.qkv"
    with qkv.open(path, encoder=Characters(64, idf=True)) as D:
        D.add([f"key {i}" for i in range(10)], list(range(10)))
    D = Database._from_store(Store(path, files=Full()))
    with D:
        with pytest.warns(StaleFitWarning, match=r"rows were added.*No space left") as caught:
            D.add([f"key {i}" for i in range(10, 30)], [0] * 20)
        assert caught[0].filename == __file__
        assert len(D) == 30 and D["key 29"] == 0 and D.version == 2
        monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 8)
        with pytest.raises(StoreUnwritableError, match="nothing was changed"):
            D.add("new", 0)
        assert len(D) == 30 and D.version == 2
    with qkv.open(path) as D:
        D.add("new", 0)
        assert [version.what for version in D.versions()][-2:] == ["add", "encode"]


@pytest.mark.parametrize("harm", ["missing", "cut"])
@pytest.mark.parametrize(
    "values", [[f"value {i}" for i in range(30)], [0.5 * i for i in range(30)]]
)
def test_rows_whose_segment_is_lost_are_encoded_again(tmp_path, monkeypatch, values, harm):
    monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 16)
    keys, path = [f"key {i}" for i in range(30)], tmp_path / "d.qkv"
    with qkv.open(path) as D:
        D.add(keys[:20], values[:20])
        D.add(keys[20:], values[20:])
        D.remove("key 4")
        before = [answer.weights for answer in D.ask(["key 3", "key 25"])]
    [segment] = path.glob("segment-*")
    if harm == "missing":
        segment.unlink()
    else:
        segment.write_bytes(segment.read_bytes()[:-100])
    assert [problem.file for problem in qkv.database.check_store(path)] == [segment.name]
    with qkv.open(path) as D:
        with pytest.raises(StoreDamagedError, match=segment.name):
            D.ask("key 3")
        D.encode()
        assert [answer.value for answer in D.ask(["key 3", "key 25"], weighting="hard")] == [
            values[3],
            values[25],
        ]
        after = [answer.weights for answer in D.ask(["key 3", "key 25"])]
        np.testing.assert_allclose(after, before, rtol=1e-5)
        assert D.ask("key 3", where="key == 'key 3'").value == values[3]
        assert list(D) == [key for key in keys if key != "key 4"]
    with qkv.open(path) as D:
        D.compact()
    assert qkv.database.check_store(path) == []


def test_vectors_whose_segment_is_lost_are_not_made_up(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 16)
    path = tmp_path / "d.qkv"
    with qkv.open(path) as D:
        D.add(np.eye(20), np.arange(20.0))
    [segment] = path.glob("segment-*")
    segment.unlink()
    with qkv.open(path) as D, pytest.raises(StoreDamagedError, match=segment.name):
        D.encode("exact")


def test_a_database_in_memory_goes_on_in_a_child(tmp_path):
    D = Database({"Li": "Mu", "Hu": "Rachel"})
    assert D.ask("Lee").value == "Mu"
    output_file = tmp_path / "output"
    child = os.fork()
    if child == 0:
        try:
            D.update("Li", "other")
            D.add("Smola", "Alex")
            output_file.write_text(f"{D['Li']} {D.ask('Smole').value} {len(D)}")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert output_file.read_text() == "other Alex 3"
    assert D["Li"] == "Mu" and len(D) == 2


def test_a_commit_is_done_though_its_old_files_cannot_be_removed(tmp_path, monkeypatch):
    class Sticky(blob_storage.FileSystem):
        def fsync_folder(self, folder):
            self.count = getattr(self, "count", 0) + 1
            if self.count % 2 == 0:
                raise OSError(5, "Input/output error")

    monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 2)
    monkeypatch.setattr(limits, "SEGMENTS_PER_MERGE", 2)
    with Store(tmp_path, files=Sticky()) as store:
        done = 0
        for i in range(12):
            try:
                store.commit(records=[str(i)] * 2, digests=[b"%d" % i] * 2)
            except StoreUnwritableError as error:
                assert "nothing was changed" in str(error)
            else:
                done += 1
            assert (store.version, len(store.open_snapshot())) == (done, 2 * done)
        assert done > 0


def test_lists_of_numbers_are_vectors_where_the_first_rows_were():
    D = Database(np.eye(3), ["a", "b", "c"])
    D.add([0.5, 0.5, 0], "d")
    D.add([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]], ["e", "f"])
    D.extend([{"key": [1, 1, 1], "value": "g"}])
    D.update([0.5, 0.5, 0], "h")
    assert len(D) == 7 and D[[1, 1, 1]] == "g" and D[[0.5, 0.5, 0.0]] == "h"
    assert D.remove([1, 1, 1]) == 1 and D.remove([[1, 1, 0], [0, 1, 1]]) == 2
    assert D.ask([1.0, 0.0, 0.0], weighting="hard").value == "a"
    with pytest.raises(ShapeError, match="key 0 has 2 numbers, but the keys are vectors of 3"):
        D.add([0.5, 0.5], "x")
    with pytest.raises(DtypeError, match="fixed the type of keys: vector"):
        D.add([["x", 1.0, 2.0]], ["x"])
    V = Database({"a": np.ones(2)})
    V.add("b", [0.5, 2.0])
    assert V["b"].tolist() == [0.5, 2.0]


def test_learn_reads_queries_of_text_as_ask_does():
    D = Database([(1.0, "a"), (2.0, "b"), (3.0, "c")])
    assert D.learn([("1.1", 1.0), (2.1, 2), ("2.9", 3.0, 2.0)], epochs=1).epochs == 1
    with pytest.raises(DtypeError, match=r"learn: the query of pairs\[1\] must be a number"):
        D.learn([(1.1, 1.0), ("x", 2.0)])


@pytest.mark.parametrize("first", [[], [([9.0], 0.0)]])
def test_pairs_are_updated_in_one_step(first):
    # A key that Python cannot hash is in no mapping.
    D = qkv.Database()
    D.add([np.array(key) for key, _ in first], [value for _, value in first]) if first else None
    before = D.version
    keys = np.eye(2, 1)
    assert D.update([(keys[0], 1.0), (keys[1], 2.0), (keys[0], 3.0)]) == 2
    assert D.version == before + 1
    assert [D[key] for key in keys] == [3.0, 2.0] and len(D) == 2 + len(first)
    with pytest.raises(DtypeError, match="mapping"):
        D.update(["ab"])
