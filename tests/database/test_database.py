"""The database as a person uses it, in memory and on disk."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sqlite3
import threading
import zlib

import numpy as np
import pandas
import polars
import pyarrow
import pytest
import torch

import qkv
from qkv import scores, weightings
from qkv.database import Database, KeyNotFoundError
from qkv.database.errors import SkippedRowsWarning, StoreDamagedError, StoreNotFoundError
from qkv.database.storage import check_store, limits
from qkv.engines import streaming
from qkv.errors import (
    ArgumentError,
    CombinationError,
    DtypeError,
    QkvError,
    ShapeError,
)
from qkv.frameworks import threads

NAMES = {
    "Zhang": "Aston",
    "Lipton": "Zachary",
    "Li": "Mu",
    "Smola": "Alex",
    "Hu": "Rachel",
    "Werness": "Brent",
}
STUDENTS = {
    "name": ["John Doe", "Jane Roe", "Ann Poe", "Bo Coe"],
    "major": ["psychology", "law", "psychology", "physics"],
    "gpa": [3.5, 3.9, 3.5, 2.8],
    "salary": [70.0, 95.0, 72.0, 60.0],
}


@pytest.fixture(params=["memory", "disk"])
def make(request, tmp_path):
    """Database(...), in memory or on disk."""
    made = []

    def build(data=None, values=None, **options):
        if request.param == "memory":
            D = Database(**options)
        else:
            D = qkv.open(tmp_path / f"{len(made)}.qkv", **options)
        made.append(D)
        if values is not None:
            D.add(data, values)
        elif data is not None:
            D.add(data)
        return D

    yield build
    for D in made:
        D.close()


# The mapping


def test_the_seeds_names(make):
    D = make(NAMES)
    assert D["Li"] == "Mu"
    assert len(D) == 6
    assert "Li" in D
    assert "Lee" not in D
    assert list(D) == list(NAMES)
    assert dict(D.items()) == NAMES
    assert D.get("Lee") is None
    assert D.get("Lee", 5) == 5


def test_a_key_that_is_absent_names_the_nearest(make):
    D = make(NAMES)
    with pytest.raises(KeyError, match="no row has the key 'Lee': the nearest are 'Li'") as caught:
        D["Lee"]
    assert isinstance(caught.value, QkvError)
    assert caught.value.nearest_keys[0] == "Li"
    with pytest.raises(KeyNotFoundError, match=r"^no row has the key 'x'$"):
        make()["x"]


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (["a", "b"], ["x", "y"]),
        ([1, 2], [10, 20]),
        ([1.5, -2.5], [True, None]),
        ([b"a", b"\x00\xff"], [b"", b"\xfe"]),
        ([("a", 1), ("a", 2)], [{"n": [1, None]}, {"n": []}]),
        ([{"a": 1}, {"a": [2]}], ["x", 3]),
        (["a", "b"], [np.array([1.0, 2.0]), np.array([3.0, 4.0])]),
        ([np.array([1.0, 2.0]), np.array([3.0, 4.0])], ["x", "y"]),
    ],
    ids=repr,
)
def test_keys_and_values_of_any_type_come_back(make, keys, values):
    D = make(keys, values)
    for key, value in zip(keys, values, strict=True):
        np.testing.assert_equal(D[key], value)
        assert key in D
    for result, key in zip(D, keys, strict=True):
        np.testing.assert_equal(result, key)


def test_keys_may_repeat_and_the_newest_counts(make):
    D = make([(3.5, "Ann"), (3.5, "Bo"), (2.0, "Cy")])
    assert D[3.5] == "Bo"
    assert D.get_all(3.5) == ["Ann", "Bo"]
    assert D.get_all(9.9) == []
    assert len(D) == 3


def test_unique_refuses_repeats_and_keeps_the_old(make):
    D = make({"a": 1}, unique=True)
    with pytest.raises(QkvError, match="the key 'a'"):
        D.add("a", 2)
    with pytest.raises(QkvError, match="the key 'b'"):
        D.add(["b", "b"], [1, 2])
    assert dict(D.items()) == {"a": 1}
    D.update("a", 3)
    assert dict(D.items()) == {"a": 3}


def test_update_and_remove(make):
    D = make(NAMES)
    D.update("Li", "Wei")
    D["Hu"] = "Jin"
    D.update({"New": "One", "Zhang": "Three"})
    assert (D["Li"], D["Hu"], D["New"], D["Zhang"]) == ("Wei", "Jin", "One", "Three")
    assert len(D) == 7
    assert D.remove(["Li", "Hu"]) == 2
    del D["New"]
    assert sorted(D) == ["Lipton", "Smola", "Werness", "Zhang"]
    with pytest.raises(KeyNotFoundError):
        D.remove(["Smola", "Li"])
    assert "Smola" in D  # all or nothing
    D.add("Li", "Again")
    assert D.get_all("Li") == ["Again"]


def test_update_of_a_repeated_key_changes_the_newest(make):
    D = make([("a", 1), ("a", 2)])
    D.update("a", 3)
    assert D.get_all("a") == [1, 3]


def test_None_is_a_value(make):
    D = make({"a": None})
    assert D["a"] is None
    D.add("b", None)
    D.update("b", "x")
    assert D["b"] == "x"


@pytest.mark.parametrize("key", [math.nan, None])
def test_a_key_that_equals_nothing_is_refused(make, key):
    D = make()
    with pytest.raises(ArgumentError, match="key 1"):
        D.add([1.0, key], ["a", "b"]) if key is not None else D.add(["x", key], ["a", "b"])
    assert len(D) == 0


def test_a_vector_with_nan_is_named_by_its_row():
    keys = np.eye(3)
    keys[2, 1] = np.nan
    for batch in keys, list(keys):
        with pytest.raises(
            ArgumentError, match=r"key 2 \(column key\): a key must not contain NaN"
        ):
            qkv.Database(batch, [1.0, 2.0, 3.0])


def test_the_first_rows_fix_the_types(make):
    D = make(NAMES)
    with pytest.raises(DtypeError, match="first rows fixed the type of keys: text"):
        D.add(5, "five")
    with pytest.raises(DtypeError, match="first rows fixed the type of values: text"):
        D.add("five", 5)
    with pytest.raises(DtypeError, match="several types"):
        make([("a", 1), (2, 3)])
    V = make(np.eye(3), np.eye(3))
    with pytest.raises(QkvError):
        V.add(np.eye(2), np.eye(2))


def test_wrong_shapes_and_arguments(make):
    D = make(NAMES)
    with pytest.raises(ShapeError, match="there are 2 keys but 1 values"):
        D.add(["a", "b"], ["x"])
    with pytest.raises(DtypeError, match="mapping or pairs"):
        D.add(5)
    with pytest.raises(DtypeError, match="one value per key"):
        D.add(["a", "b"], "xy")
    with pytest.raises(ArgumentError, match="top must be"):
        D.ask("Li", top=0)
    with pytest.raises(ArgumentError, match="did you mean 'softmax'"):
        D.ask("Li", weighting="sofmax")
    with pytest.raises(ArgumentError, match="did you mean 'cosine'"):
        D.ask("Li", score="cosin")
    with pytest.raises((CombinationError, StoreNotFoundError), match="add rows"):
        make().ask("x")
    with pytest.raises(CombinationError, match="can be negative"):
        D.ask("Li", weighting="normalized")
    with pytest.raises(ShapeError, match="vectors of"):
        D.ask(np.ones(3))


def test_nothing_is_half_added(make):
    D = make(NAMES)
    with pytest.raises(QkvError):
        D.add(["ok", float("nan")], ["a", "b"])
    assert "ok" not in D
    assert len(D) == 6


# Tables


@pytest.mark.parametrize("frame", [pandas.DataFrame, polars.DataFrame])
def test_a_frame(frame):
    D = Database.from_frame(frame(STUDENTS), key="name", value="major")
    assert D["John Doe"] == "psychology"
    assert D.columns == tuple(STUDENTS)


@pytest.mark.parametrize(
    "made",
    [
        lambda x: polars.Series(x, dtype=polars.Array(polars.Float32, 2)),
        lambda x: polars.Series(x, dtype=polars.Array(polars.Float64, 2)),
        lambda x: pyarrow.array(x, pyarrow.list_(pyarrow.float64(), 2)),
        lambda x: pyarrow.chunked_array([x], pyarrow.list_(pyarrow.float32(), 2)),
        lambda x: pandas.Series([np.array(row) for row in x], index=[7, 3]),
    ],
)
def test_a_column_of_vectors_of_any_library_is_one(made):
    rows = [[1.0, 2.0], [3.0, 4.5]]
    D = Database.from_columns({"at": made(rows), "name": pyarrow.array(["a", "b"])}, key="at")
    N = Database.from_columns({"at": made(rows), "name": polars.Series(["a", "b"])}, key="name")
    assert D.info()["key_kind"] == "vector" and D[np.array(rows[1])] == "b"
    np.testing.assert_array_equal(N["b"], rows[1])
    answer, known = D.ask(made(rows)), D.ask(np.array(rows))
    assert [one.rows[0].weight for one in answer] == [one.rows[0].weight for one in known]
    assert N.ask(pyarrow.array(["b"]))[0].rows[0].key == "b"


def test_find_people_by_major():
    D = Database.from_columns(STUDENTS, key="name", value="major")
    M = D.swap()
    assert M.get_all("psychology") == ["John Doe", "Ann Poe"]
    assert M.columns == D.columns
    S = D.reindex("gpa", "salary")
    assert S.get_all(3.5) == [70.0, 72.0]


def test_a_value_of_several_columns():
    D = Database.from_columns(STUDENTS)
    assert D["Jane Roe"] == {"major": "law", "gpa": 3.9, "salary": 95.0}
    N = Database.from_columns(STUDENTS, key="name", value=["gpa", "salary"])
    answer = N.ask("Jane Roe", weighting="average")
    assert answer.mean == pytest.approx({"gpa": 3.425, "salary": 74.25})
    assert answer.value == {"gpa": 3.9, "salary": 95.0}
    N.add("Cy", {"gpa": 1.0, "salary": 2.0})
    assert N["Cy"] == {"gpa": 1.0, "salary": 2.0}
    with pytest.raises(ArgumentError, match="mapping of the columns gpa, salary"):
        N.add("Di", 5)


def test_a_key_of_several_columns():
    D = Database.from_columns(STUDENTS, key=["name", "gpa"], value="salary")
    assert D["Ann Poe", 3.5] == 72.0
    assert D.ask(("Ann Poe", 3.5), weighting="hard").value == 72.0
    assert D.ask({"name": "Jane Roe"}, weighting="hard").value == 95.0
    assert D.ask((None, 2.8), weighting="hard").value == 60.0
    with pytest.raises(ArgumentError, match="a tuple of the columns"):
        D.add("Cy", 1.0)


def test_rows_with_other_columns(tmp_path):
    with qkv.open(tmp_path / "d.qkv", key="name", value="major") as D:
        D.extend([{"name": "Ann", "major": "art", "year": 1}, {"name": "Bo", "major": "law"}])
        assert list(D.rows())[1] == {"name": "Bo", "major": "law", "year": None}
        with pytest.raises(ArgumentError, match="did you mean 'year'"):
            D.extend([{"name": "Cy", "major": "x", "yaer": 2}])
        with pytest.raises(ArgumentError, match="no column 'major'"):
            D.extend([{"name": "Cy"}])
        assert len(D) == 2


def test_a_source(tmp_path):
    file = tmp_path / "books.csv"
    file.write_text("title,author,year\nDune,Herbert,1965\nEmma,Austen,1815\n")
    with Database.from_source(file, path=tmp_path / "b.qkv", value="author") as D:
        assert D["Emma"] == "Austen"
    with qkv.open(tmp_path / "b.qkv") as D:
        assert D.ask("Dune", where="year < 1900").value == "Austen"
    with pytest.raises(ArgumentError, match="contains a database already"):
        Database.from_source(file, path=tmp_path / "b.qkv")


def test_a_failed_import_leaves_nothing(tmp_path):
    with pytest.raises(QkvError):
        Database.from_columns({"k": ["a", "a"], "v": [1, 2]}, unique=True, path=tmp_path / "d.qkv")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("harm", [KeyboardInterrupt, MemoryError, None])
def test_an_import_that_fails_leaves_what_another_has_made_meanwhile(tmp_path, harm):
    path = tmp_path / "d.qkv"

    class Late(list):
        def __iter__(self):
            if not path.exists():
                with qkv.open(path) as D:
                    D.add("Li", "Mu")
                if harm is not None:
                    raise harm
            return super().__iter__()

    with pytest.raises(harm or ArgumentError, match=None if harm else "another process meanwhile"):
        # With `key`, the columns are first read after the path was found to be free.
        Database.from_columns({"k": Late(["a", "b"]), "v": [1, 2]}, key="k", path=path)
    assert os.listdir(tmp_path) == ["d.qkv"]
    with qkv.open(path) as D:
        assert dict(D.items()) == {"Li": "Mu"}


def test_of_two_imports_at_once_one_wins(tmp_path):
    path, faults, made = tmp_path / "d.qkv", [], []
    barrier = threading.Barrier(2, timeout=300)

    class Slow(list):
        def __len__(self):
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(0.3)
            return super().__len__()

    def run(name):
        try:
            made.append(Database.from_columns({"k": Slow([name]), "v": [1]}, path=path))
        except QkvError as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == len(faults) == 1 and "d.qkv" in str(faults[0])
    assert os.listdir(tmp_path) == ["d.qkv"] and len(made[0]) == 1
    made[0].close()


def test_an_import_into_a_folder_that_is_there(tmp_path):
    path = tmp_path / "d.qkv"
    path.mkdir()
    with pytest.raises(QkvError):
        Database.from_columns({"k": ["a", "a"], "v": [1, 2]}, unique=True, path=path)
    with Database.from_columns({"k": ["a"], "v": [1]}, path=path) as D:
        assert D["a"] == 1
    with Database.from_columns({"k": ["a"], "v": [1]}, path=tmp_path / "x" / "y.qkv") as D:
        assert D["a"] == 1


def test_text_that_is_no_text_is_refused(make):
    with pytest.raises(ArgumentError, match="lone surrogate"):
        make(NAMES).ask("\ud800")


@pytest.mark.filterwarnings("default::qkv.database.errors.SkippedRowsWarning")
def test_rows_outside_a_damaged_segment_answer(tmp_path):
    path = tmp_path / "d.qkv"
    with qkv.open(path) as D:
        D.add(np.arange(5000.0), np.arange(5000.0))
        D.add([7000.0, 7001.0], [1.0, 2.0])
    segment = next(path.rglob("*.safetensors"))
    segment.write_bytes(segment.read_bytes()[:1000])
    with qkv.open(path) as D:
        assert D[17.0] == 17.0
        with pytest.raises(QkvError, match=segment.name):
            D.ask(7000.0)
    with qkv.open(path, skip_damaged=True) as D:
        answer = D.ask(7001.0, weighting="hard", where="key > 10")
        assert (answer.value, answer.total, answer.weights.tolist()) == (2.0, 2, [0.0, 1.0])


@pytest.mark.parametrize("rows", [30, 9000])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_segment_that_is_cut_while_it_is_open(tmp_path, monkeypatch, rows, mapped):
    monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 16)
    if mapped:
        monkeypatch.setattr(limits, "MAX_UNMAPPED_BYTES", 0)
    path = tmp_path / "d.qkv"
    with qkv.open(path) as D:
        D.add(np.random.default_rng(0).normal(size=(rows, 8)), np.arange(float(rows)))
        query = np.ones(8)
        answer = D.ask(query, top=2)
        [segment] = path.glob("segment-*")
        content = segment.read_bytes()
        os.truncate(segment, 100)
        if not mapped:
            assert D.ask(query).value == answer.value
            return
        for look in (
            lambda: D.ask(query),
            lambda: D.ask(query, where="value > 3"),
            lambda: D.attend(query),
            lambda: list(D),
            lambda: answer.spread,
            lambda: D.encode("exact"),
        ):
            with pytest.raises(StoreDamagedError, match=segment.name):
                look()
        segment.write_bytes(content)
        assert D.ask(query).value == answer.value


def test_a_segment_that_is_cut_while_it_is_asked(tmp_path, monkeypatch):
    for module, name, few in (
        (limits, "MAX_BUFFERED_ROWS", 16),
        (limits, "MAX_UNMAPPED_BYTES", 0),
        (threads, "CORE_COUNT", 1),
    ):
        monkeypatch.setattr(module, name, few)
    monkeypatch.setattr(streaming, "MAX_KEY_NUMBERS_PER_READ", 1)
    path = tmp_path / "d.qkv"
    with qkv.open(path) as D:
        D.add(np.random.default_rng(0).normal(size=(9000, 8)), np.arange(9000.0))
        [segment] = path.glob("segment-*")
        calls = []

        def score(query, key):
            result = query @ key.T
            calls.append(len(key))
            os.truncate(segment, 100)
            return result

        with pytest.raises(
            StoreDamagedError, match=r"truncated while it was open|is damaged: it has 100 bytes"
        ):
            D.ask(np.ones(8), score=score)
        assert len(calls) == 1


@pytest.mark.parametrize("vectors", [True, False])
def test_rows_whose_vectors_are_lost_are_reported_and_can_be_skipped(tmp_path, vectors):
    keys = (
        np.random.default_rng(0).normal(size=(8, 3)).astype("f4") if vectors else list("abcdefgh")
    )
    with qkv.open(tmp_path / "d.qkv") as D:
        D.add(keys, np.arange(8.0))
    with contextlib.closing(sqlite3.connect(tmp_path / "d.qkv" / "catalogue.sqlite")) as catalogue:
        catalogue.execute("DELETE FROM resting WHERE id IN (2, 5)")
        catalogue.commit()
    [problem] = check_store(tmp_path / "d.qkv")
    assert "2 rows have lost their tensors; the first is row 2" in problem.what
    with qkv.open(tmp_path / "d.qkv") as D:
        lookups = [lambda: D.ask(keys[0]), lambda: D.ask(keys[0], where="value > 1")]
        lookups += (
            [lambda: list(D.values()), lambda: D.get_all(keys[2]), D.encode] if vectors else []
        )
        for look in lookups:
            with pytest.raises(
                StoreDamagedError, match=r"the vectors of row 2.* lost.*skip_damaged=True"
            ):
                look()
        assert D[keys[2]] == 2.0
    with qkv.open(tmp_path / "d.qkv", skip_damaged=True) as D:
        with pytest.warns(SkippedRowsWarning, match="lost vectors were skipped: 2"):
            assert D.ask(keys[0]).total == 6
        assert [*D.values()] == ([0, 1, 3, 4, 6, 7] if vectors else [*range(8)])
    if not vectors:
        with qkv.open(tmp_path / "d.qkv") as D:
            D.encode()
            assert D.ask(keys[2], weighting="hard").value == 2.0
        assert check_store(tmp_path / "d.qkv") == []


def test_a_store_that_lost_its_settings_is_damaged(tmp_path):
    with qkv.open(tmp_path / "d.qkv") as D:
        D.add(list("abc"), np.arange(3.0))
    with contextlib.closing(sqlite3.connect(tmp_path / "d.qkv" / "catalogue.sqlite")) as catalogue:
        catalogue.execute("UPDATE settings SET text = '{}', crc = ?", (zlib.crc32(b"{}"),))
        catalogue.commit()
    with (
        qkv.open(tmp_path / "d.qkv") as D,
        pytest.raises(StoreDamagedError, match="are lost or invalid"),
    ):
        list(D.items())


def test_a_damaged_row_is_reported_once(tmp_path):
    with qkv.open(tmp_path / "d.qkv") as D:
        D.add(list("abcdefgh"), np.arange(8.0))
        D.remove(["b"])
    with contextlib.closing(sqlite3.connect(tmp_path / "d.qkv" / "catalogue.sqlite")) as catalogue:
        catalogue.execute("UPDATE resting SET crc = crc + 1 WHERE id IN (1, 2)")
        catalogue.commit()
    with qkv.open(tmp_path / "d.qkv", skip_damaged=True) as D:
        with pytest.warns(SkippedRowsWarning, match="were skipped") as caught:
            assert D.ask("a").total == 6
        assert [warning.filename for warning in caught] == [__file__]


# Asking


def test_soft_answers_are_the_equation(make):
    gpa, pay = np.array([3.1, 3.5, 3.6, 4.0]), np.array([70.0, 82.0, 86.0, 95.0])
    D = make(gpa, pay)
    encoder = D.encoder
    a = D.ask(3.55)
    code = encoder.encode(gpa.tolist())
    s = encoder.default_score(4)(encoder.encode_query([3.55]), code)[0].astype(float)
    alpha = np.exp(s) / np.exp(s).sum()
    np.testing.assert_allclose(a.weights, alpha, rtol=1e-5)
    assert a.value == pytest.approx(alpha @ pay, rel=1e-5)
    assert a.spread == pytest.approx(np.sqrt(alpha @ (pay - alpha @ pay) ** 2), rel=1e-4)
    assert a.entropy == pytest.approx(-(alpha * np.log(alpha)).sum(), rel=1e-5)
    assert a.effective_rows == pytest.approx(np.exp(a.entropy))
    assert a.lse == pytest.approx(np.log(np.exp(s).sum()), abs=1e-5)
    assert [row.weight for row in a.rows] == pytest.approx(sorted(alpha, reverse=True), rel=1e-5)
    for row in a.rows:
        assert a.weights[row.index] == row.weight
        assert (row.key, row.value) == (gpa[row.index], pay[row.index])


@pytest.mark.parametrize(
    "weighting",
    ["softmax", "hard", "average", "sparsemax", "entmax15", weightings.TopK(2), "sigmoid", "raw"],
)
def test_every_weighting_gives_the_weights_of_qkv_weights(make, weighting):
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(20, 5)), rng.normal(size=(20, 2))
    D = make(keys, values)
    q = rng.normal(size=(3, 5))
    score = D.encoder.default_score(20)
    assert score == scores.Gaussian(D.describe()["key"]["bandwidth"])
    true = qkv.weights(q, keys, score=score, weighting=weighting)
    for i, answer in enumerate(D.ask(q, weighting=weighting, top=20)):
        np.testing.assert_allclose(answer.weights, true[i], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(answer.value, true[i] @ values, rtol=1e-5, atol=1e-6)
        assert len(answer.rows) == np.count_nonzero(answer.weights)


def test_an_exact_question_and_an_absent_one(make):
    D = make(NAMES)
    a = D.ask("Li", score="exact", weighting="normalized")
    assert (a.value, a.effective_rows, a.engine) == ("Mu", 1.0, "exact index")
    assert a.weights.tolist() == [0, 0, 1, 0, 0, 0]
    b = D.ask("Lee", score="exact", weighting="normalized")
    assert (b.value, b.rows, b.effective_rows) == (None, [], 0.0)
    assert "nothing" in str(b)
    assert "No row answers" in b.explain()


def test_equal_values_add_up(make):
    D = make([("cat", "pet"), ("dog", "pet"), ("cow", "farm")])
    a = D.ask("dog", weighting="average")
    assert a.value == "pet"
    assert [(share.value, pytest.approx(share.weight)) for share in a.values] == [
        ("pet", 2 / 3),
        ("farm", 1 / 3),
    ]


def test_a_batch_of_questions(make):
    D = make(NAMES)
    answers = D.ask(["Li", "Hu"])
    assert [a.value for a in answers] == ["Mu", "Rachel"]


def test_ties_go_to_the_lowest_row(make):
    D = make([("a", 1.0), ("a", 2.0), ("b", 3.0)])
    assert D.ask("a", weighting="hard").rows[0].index == 0
    assert [row.index for row in D.ask("a", top=2).rows] == [0, 1]


def test_where_loses_no_rows():
    """The filter comes before the weights: k rows that pass are found however few pass."""
    n = 1000
    columns = {
        "title": [f"book {i}" for i in range(n)],
        "year": list(range(n)),
        "genre": ["poetry" if i % 100 == 0 else "prose" for i in range(n)],
    }
    D = Database.from_columns(columns, key="title", value="year")
    a = D.ask("book 555", where={"genre": "poetry"}, top=50)
    assert len(a.rows) == 10
    assert a.total == 10
    assert {row.value % 100 for row in a.rows} == {0}
    assert a.weights.sum() == pytest.approx(1)
    b = D.ask("book 555", where="year > 990 and genre != 'poetry'", top=50)
    assert sorted(row.value for row in b.rows) == list(range(991, 1000))
    c = D.ask("book 555", where=lambda row: row["year"] == 7)
    assert c.value == 7
    d = D.ask("book 555", where="year < 0")
    assert (d.value, d.rows, d.lse) == (None, [], -math.inf)
    with pytest.raises(ArgumentError, match="did you mean 'year'"):
        D.ask("x", where={"yaer": 3})


def test_rows_above_a_weight(make):
    D = make([(float(i), float(i)) for i in range(10)])
    a = D.ask(4.0, top=1)
    above = a.above(0.05)
    assert above[0].key == 4.0
    assert all(row.weight >= 0.05 for row in above)
    assert len(above) == (a.weights >= 0.05).sum() > 1
    with pytest.raises(ArgumentError, match="between 0 and 1"):
        a.above(0)


def test_removed_rows_have_no_weight(make):
    D = make([(0.0, 1.0), (1.0, 100.0), (2.0, 3.0)])
    D.remove(1.0)
    a = D.ask(1.0, weighting="average")
    assert a.value == 2.0
    assert a.weights.shape == (2,)
    assert [row.index for row in a.rows] == [0, 1]


def test_weights_of_a_large_batch_are_found_again(make, monkeypatch):
    from qkv.database.query import executor, scan

    D = make(NAMES)
    true = [a.weights for a in D.ask(["Li", "Lee"])]
    monkeypatch.setattr(executor, "MAX_CACHED_WEIGHTS_PER_BATCH", 1)
    monkeypatch.setattr(scan, "MAX_SCORES_PER_BATCH", 6)
    for a, weights in zip(D.ask(["Li", "Lee"]), true, strict=True):
        np.testing.assert_allclose(a.weights, weights, rtol=1e-5)


def test_a_score_that_is_a_function(make):
    D = make(np.arange(4.0)[:, None], np.arange(4.0))
    a = D.ask(np.array([2.2]), score=lambda q, k: -10 * abs(q - k.T))
    assert a.rows[0].index == 2


def test_a_tolerance_leaves_a_score_that_is_no_product_exact(make):
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(50, 4)).astype("float32")
    w = [rng.normal(size=s).astype("float32") for s in ((8, 4), (8, 4), (8,))]
    D = make(keys, keys)
    score = scores.Additive(*w)
    exact, near = (D.ask(keys[0], score=score, tolerance=t).weights for t in (None, 1e-3))
    np.testing.assert_allclose(near, exact, rtol=5e-3)


# Attention with gradients


@pytest.mark.parametrize("width", [2, 20])
def test_attend_is_qkv_attend_with_gradients(make, width):
    rng = np.random.default_rng(1)
    keys, values = rng.normal(size=(60, 4)), rng.normal(size=(60, width))
    D = make(keys[:40], values[:40])
    D.add(keys[40:], values[40:])
    D.remove([keys[3], keys[50]])
    keep = np.delete(np.arange(60), [3, 50])
    code = D.ask(keys[0]).engine
    assert "scan" in code
    q = torch.tensor(rng.normal(size=(3, 4)), requires_grad=True)
    out = D.attend(q)
    # The codes are kept in the precision that the encoder gives.
    k, v = (torch.tensor(x[keep]) for x in (keys, values))
    score = scores.Gaussian(D.describe()["key"]["bandwidth"])
    true = qkv.attend(q, k, v, score=score)
    torch.testing.assert_close(out, true, rtol=1e-5, atol=1e-6)
    g = torch.tensor(rng.normal(size=(3, width)))
    (actual,) = torch.autograd.grad(out, q, g)
    (expected,) = torch.autograd.grad(true, q, g)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    one = D.attend(q[0])
    torch.testing.assert_close(one, true[0], rtol=1e-5, atol=1e-6)


def test_attend_of_text_and_numbers(make):
    D = make([(1.0, 10.0), (2.0, 20.0)])
    assert D.attend(1.5)[0] == pytest.approx(15.0)
    assert D.attend([1.0, 2.0]).shape == (2, 1)
    T = make({"a": 1.0, "b": 3.0})
    assert T.attend("a", weighting="average")[0] == pytest.approx(2.0)
    with pytest.raises(CombinationError, match="only numbers can be pooled"):
        make(NAMES).attend("Li")
    with pytest.raises(ArgumentError, match="only for ask"):
        T.attend("a", score="exact")


def test_the_gradient_reaches_a_number_in_its_own_unit(make):
    gpa, pay = [3.0, 3.2, 3.5, 3.9], [60.0, 66.0, 75.0, 99.0]
    D = make(gpa, pay)
    q = torch.tensor([3.3, 3.6], dtype=torch.float64, requires_grad=True)
    D.attend(q).sum().backward()
    step = 1e-4
    ahead, behind = (np.asarray(D.attend(np.array([3.3, 3.6]) + s)) for s in (step, -step))
    np.testing.assert_allclose(q.grad, (ahead - behind)[:, 0] / (2 * step), rtol=1e-5)
    one = torch.tensor(3.3, requires_grad=True)
    assert D.attend(one).shape == (1,)


@pytest.mark.parametrize("score", [scores.Gaussian(0.15), scores.Triangular(0.4), "laplace"])
def test_widths_are_in_the_units_of_the_keys(make, score):
    gpa = np.array([2.41, 2.78, 3.0, 3.2, 3.45, 3.6, 3.98])
    pay = np.array([60.0, 66.0, 61.0, 75.0, 78.0, 81.0, 99.0])
    weighting = "normalized" if isinstance(score, scores.Triangular) else "softmax"
    expected = qkv.attend(
        np.array([[3.5]]), gpa[:, None], pay[:, None], score=score, weighting=weighting
    )
    D = make(gpa.tolist(), pay.tolist())
    assert D.ask(3.5, score=score, weighting=weighting).value == pytest.approx(
        expected.item(), 1e-6
    )
    two = make([(x, 2 * x) for x in gpa.tolist()], pay.tolist())
    keys = np.stack([gpa, 2 * gpa], axis=1)
    expected = qkv.attend(
        np.array([[3.5, 7.0]]), keys, pay[:, None], score=score, weighting=weighting
    )
    answer = two.ask((3.5, 7.0), score=score, weighting=weighting)
    assert answer.value == pytest.approx(expected.item(), 1e-5)


def test_attend_takes_where(make):
    D = Database.from_columns({"k": [1.0, 2.0, 3.0], "v": [1.0, 2.0, 4.0]}, key="k", value="v")
    assert D.attend(2.0, weighting="average", where="k > 1")[0] == pytest.approx(3.0)


# Versions


def test_versions(make):
    D = make({"a": 1})
    first = D.version
    D.add("b", 2)
    second = D.version
    D.remove("a")
    past = D.at(first)
    assert dict(past.items()) == {"a": 1}
    assert dict(D.at(second).items()) == {"a": 1, "b": 2}
    assert dict(D.items()) == {"b": 2}
    assert past.ask("a").value == 1.0
    with pytest.raises(CombinationError, match="is read-only"):
        past.add("c", 3)
    with pytest.raises(CombinationError, match="is read-only"):
        past.remove("a")
    with pytest.raises(QkvError):
        D.at(99)
    assert [v.what for v in D.versions()] == ["add", "add", "remove"]


def test_compaction_keeps_the_rows(make):
    D = make(NAMES)
    D.remove("Li")
    D.compact()
    assert dict(D.items()) == {k: v for k, v in NAMES.items() if k != "Li"}
    assert D.ask("Hu").value == "Rachel"


def test_an_answer_holds_no_old_version(tmp_path):
    gc.disable()  # a ring of references would hold one until the collector comes by
    try:
        with qkv.open(tmp_path / "d.qkv") as D:
            D.add("a", 1)
            D.ask("a")
            D.add("b", 2)
            D.compact()
            assert [version.number for version in D.versions()] == [2]
    finally:
        gc.enable()


def test_an_encoder_is_fitted_anew_when_the_keys_have_doubled(make):
    D = make([(0.0, 0.0)])
    for i in range(1, 9):
        D.add(float(i), float(i))
    assert D.ask(4.0, weighting="hard").value == 4.0
    fitted = D._view.settings["fitted"]
    assert fitted == 8
    np.testing.assert_allclose(
        D._view.snapshot.read_tensor("code", D._view.ids)[:8].mean(), 0, atol=0.2
    )


def test_another_encoder_is_a_new_version(make):
    D = make(NAMES)
    before, kind = D.version, D.encoder.kind
    D.encode("characters")
    assert D.encoder.kind == "characters"
    assert D["Li"] == "Mu"
    assert D.ask("Lipten").value == "Zachary"
    assert D.at(before).encoder.kind == kind
    assert D.at(before).ask("Lipten").value == "Zachary"


def test_an_answer_outlives_later_versions(make):
    D = make([(0.0, 1.0), (1.0, 3.0)])
    a = D.ask(0.0, weighting="average")
    D.remove([0.0])
    D.compact()
    assert a.spread == pytest.approx(1.0)
    assert len(a.above(0.1)) == 2


def test_a_few_clicks_are_learned_and_at_goes_back(make):
    D = make(NAMES)
    before, old = D.version, D.ask("surname of the dragon").rows[0].weight
    report = D.learn([("the dragon", "Li"), ("the wolf", "Werness")], epochs=5)
    assert report.after[1] == 1.0
    assert D.ask("the dragon").value == "Mu"
    assert D.ask("Lipten").value == "Zachary"
    assert D.encoder.kind == "learned"
    assert D.versions()[-1].what == "learn"
    assert D.at(before).ask("surname of the dragon").rows[0].weight == pytest.approx(old)
    D.add("Wolf", "Alice")
    assert D["Wolf"] == "Alice"
    assert len(D.ask("the dragon").weights) == 7


# On disk


def test_it_is_there_when_opened_again(tmp_path):
    path = tmp_path / "d.qkv"
    with qkv.open(path) as D:
        D.add(NAMES)
        before = D.ask("Lee").weights
    with qkv.open(path) as D:
        assert dict(D.items()) == NAMES
        np.testing.assert_array_equal(D.ask("Lee").weights, before)
        assert D.info()["rows"] == 6
        assert D.info()["bytes"] > 0
        assert "6 rows" in repr(D)


def test_a_missing_path_is_made_or_refused(tmp_path):
    with pytest.raises(QkvError, match=r"absent\.qkv"):
        qkv.open(tmp_path / "absent.qkv", create=False)
    with qkv.open(tmp_path / "new.qkv") as D:
        assert len(D) == 0
        assert list(D) == []
        assert D.info()["rows"] == 0
        assert "empty" in repr(D)
        assert "x" not in D


def test_vectors_on_disk_keep_their_dtype(tmp_path):
    for dtype in ("float16", "float32", "float64"):
        with qkv.open(tmp_path / dtype) as D:
            D.add(np.eye(3, dtype=dtype), np.eye(3, dtype=dtype))
            value = D[np.eye(3, dtype=dtype)[1]]
            assert value.dtype == dtype
            np.testing.assert_array_equal(value, [0, 1, 0])


def test_a_custom_encoder_is_asked_for_again(tmp_path):
    from qkv.database.encoders import Custom

    encoder = Custom(lambda keys: np.array([[len(k), 1.0] for k in keys], "float32"), width=2)
    path = tmp_path / "d.qkv"
    with qkv.open(path, encoder=encoder) as D:
        D.add(["a", "bbb"], [1, 2])
        assert D.ask("xxxx", weighting="hard").value == 2
    with qkv.open(path, create=False) as D:
        assert D["a"] == 1
        with pytest.raises(QkvError, match="encoder="):
            D.ask("xxxx")
    with qkv.open(path, encoder=encoder) as D:
        assert D.ask("xxxx", weighting="hard").value == 2


def test_a_vector_is_one_key_in_float64_and_as_it_is_kept(tmp_path):
    keys = np.random.default_rng(0).standard_normal((3, 2))
    with qkv.open(tmp_path / "wide.qkv") as D:
        D.add(keys, ["a", "b", "c"])
        assert [D[key] for key in keys] == [D[key] for key in D] == ["a", "b", "c"]
        assert [D[key.tolist()] for key in keys] == ["a", "b", "c"]
        assert D.update(next(iter(D)), "d") == 0 and D.update(keys[0], "e") == 0 and len(D) == 3
        assert D.update(keys[1] + 1e-12, "f") == 0
        assert D[keys[0]] == "e" and D[keys[1]] == "f"
        assert D.remove(list(D)) == 3 and len(D) == 0


def test_an_empty_version_has_no_row_of_any_key() -> None:
    D = qkv.Database([(3.5, 70.0)])
    assert D.at(0).get_all(3.5) == qkv.Database().get_all("a") == []
    assert D.at(0).get(3.5) is None


@pytest.mark.parametrize(
    ("columns", "key"),
    [
        ({"sku": ["00037-B", "00036-C"], "price": [3, 4], "item": ["hex bolt", "nail"]}, "item"),
        ({"day": ["2024-01-02", "03.01.2024"], "note": ["rain", "sunny"]}, "note"),
        ({"sku": ["00037-B", "00036-C"], "price": ["$3.50", "€4"]}, "sku"),  # no words at all
        ({"name": ["R2D2", "C-3PO", "Leia"], "side": ["rebel", "rebel", "rebel"]}, "name"),
        ({"year": [1, 2], "id": ["a7", "b9"]}, "id"),
        ({"year": [1, 2], "n": [3, 4]}, "year"),
    ],
)
def test_the_key_is_a_column_of_words_and_not_of_codes(columns, key):
    D = Database.from_columns(columns)
    assert D.info()["key"] in (key, [key], (key,))
