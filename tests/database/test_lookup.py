"""Looking up exactly: what is remembered must be what is there."""

from __future__ import annotations

import datetime
import multiprocessing
import threading

import numpy as np
import pytest

import qkv
from qkv.database import Database, KeyNotFoundError
from qkv.database.errors import DuplicateKeyError, StoreClosedError
from qkv.database.storage import limits
from qkv.errors import DtypeError


@pytest.fixture(params=["memory", "disk"])
def names(request, tmp_path):
    D = qkv.Database(unique=True) if request.param == "memory" else None
    D = D or qkv.open(tmp_path / "names.qkv", unique=True)
    D.add(["Li", "Zhang"], ["Mu", "Aston"])
    yield D
    D.close()


def test_a_change_is_seen_at_once(names):
    assert names["Li"] == "Mu"
    names["Li"] = "Mu 2"
    assert names["Li"] == names.get("Li") == "Mu 2"
    past = names.at(1)
    assert past["Li"] == past["Li"] == "Mu"
    names.remove("Li")
    assert names.get("Li", "gone") == "gone" and past["Li"] == "Mu"
    with pytest.raises(KeyNotFoundError):
        names["Li"]
    names.add("Li", "Mu 3")
    assert names["Li"] == "Mu 3"
    names.encode("characters")
    assert names["Li"] == "Mu 3"
    names.compact()
    assert names["Li"] == "Mu 3"


def test_a_change_that_failed_is_not_seen(names):
    assert names["Li"] == "Mu"
    with pytest.raises(DuplicateKeyError):
        names.add(["Hu", "Li"], ["Rachel", "another"])
    assert names["Li"] == "Mu" and "Hu" not in names and names.version == 1


def test_a_closed_one_says_so(names):
    past = names.at(1)
    assert names["Li"] == past["Li"] == "Mu"
    names.close()
    for D in (names, past):
        with pytest.raises(StoreClosedError):
            D["Li"]
        assert repr(D).endswith(": closed>") and ": closed<" in D._repr_html_()


@pytest.mark.parametrize("value", [["a"], {"b": [1]}])
def test_what_was_given_can_be_changed(value):
    D = qkv.Database({"k": value})
    result = D["k"]
    result.clear()
    assert D["k"] == value
    for _ in range(2):
        row = D.ask("k").rows[0]
        assert row.value == value and row.record == {"key": "k", "value": value}
        row.value.clear()
        row.record["key"] = "changed"


def test_rows_are_remembered_by_version(names, monkeypatch):
    monkeypatch.setattr(limits, "MAX_CACHED_ROWS", 2)
    for _ in range(2):
        assert {row.key: row.value for row in names.ask("Li").rows} == {
            "Li": "Mu",
            "Zhang": "Aston",
        }
    names["Li"] = "Mu 2"
    names.add(["Smola", "Lipton"], ["Alex", "Zachary"])
    past = names.at(1)
    for _ in range(2):
        result = {row.key: row.value for row in names.ask("Li").rows}
        assert result == {"Li": "Mu 2", "Zhang": "Aston", "Smola": "Alex", "Lipton": "Zachary"}
        assert {row.value for row in past.ask("Li").rows} == {"Mu", "Aston"}
        assert {key: names[key] for key in names} == result


def test_equal_keys_of_several_types():
    D = qkv.Database([(1, "one"), (2.5, "more"), (0, "none")])
    for _ in range(2):
        assert [D[key] for key in (1, 1.0, True, np.float32(1), 2.5, -0.0)] == [
            *["one"] * 4,
            "more",
            "none",
        ]
        assert [D.get(key) for key in ("1", float("nan"), None, b"1")] == [None] * 4


def test_the_newest_of_equal_keys(monkeypatch):
    monkeypatch.setattr(limits, "MAX_CACHED_ROWS", 2)
    D = qkv.Database(["a", "b", "a", "c"], [1, 2, 3, 4])
    for _ in range(3):
        assert [D[key] for key in "abcba"] == [3, 2, 4, 2, 3]


def test_vectors_are_looked_up(tmp_path):
    with qkv.open(tmp_path / "v.qkv") as D:
        D.add(np.eye(3), np.arange(6.0).reshape(3, 2))
        for _ in range(2):
            assert D[np.array([0, 1, 0])].tolist() == [2.0, 3.0]
            assert D[[0, 0, 1]].tolist() == [4.0, 5.0]


def _write(path, count):
    with qkv.open(path) as D:
        for i in range(count):
            D["Li"] = i


def test_another_writer_is_seen(tmp_path):
    """Another connection here, another thread, and another process."""
    path = tmp_path / "names.qkv"
    _write(path, 1)
    with qkv.open(path) as reader:
        assert reader["Li"] == 0
        _write(path, 3)
        assert reader["Li"] == 2
        thread = threading.Thread(target=_write, args=(path, 5))
        thread.start()
        seen = [reader["Li"]]
        while thread.is_alive():
            seen.append(reader["Li"])
        thread.join()
        assert reader["Li"] == 4 and set(seen) <= set(range(5))
        process = multiprocessing.get_context("spawn").Process(target=_write, args=(path, 7))
        process.start()
        process.join()
        assert reader["Li"] == 6


UTC, TOKYO = datetime.UTC, datetime.timezone(datetime.timedelta(hours=9))
INSTANT = datetime.datetime(2024, 1, 1, 23, 30, tzinfo=UTC)


@pytest.mark.parametrize("path", [None, "moments.qkv"])
@pytest.mark.parametrize("zone", [UTC, TOKYO])
def test_a_moment_is_found_in_every_zone(path, zone, tmp_path):
    D = Database(unique=True) if path is None else qkv.open(tmp_path / path, unique=True)
    D.add([INSTANT.astimezone(zone), INSTANT.astimezone(zone).replace(hour=1)], [1.0, 2.0])
    for same in (INSTANT, INSTANT.astimezone(TOKYO), "2024-01-02T08:30+09:00"):
        assert D[same] == 1.0 and same in D and D.get_all(same) == [1.0]
        answer = D.ask(same, score="exact", weighting="normalized")
        assert [(row.key, row.weight) for row in answer.rows if row.weight] == [(INSTANT, 1.0)]
        assert answer.rows[0].key.tzinfo == zone
    assert INSTANT.replace(tzinfo=None) not in D and INSTANT.replace(tzinfo=TOKYO) not in D
    with pytest.raises(DuplicateKeyError):
        D.add([INSTANT.astimezone(TOKYO)], [3.0])
    D.update(INSTANT.astimezone(TOKYO), 4.0)
    assert D[INSTANT] == 4.0 and len(D) == 2
    D.remove([INSTANT])
    assert INSTANT.astimezone(TOKYO) not in D and len(D) == 1
    D.close()


def test_a_moment_at_the_end_of_time_is_a_key():
    last = datetime.datetime.max.replace(tzinfo=datetime.timezone(-datetime.timedelta(hours=9)))
    D = Database([(last, 1.0), (INSTANT, 2.0)])
    assert D[last] == 1.0 and D[INSTANT] == 2.0


DAY, NOON = datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 2, 12)


@pytest.mark.parametrize("first", [DAY, datetime.datetime(2024, 1, 1)])
def test_a_day_and_its_midnight_are_one_key(first):
    D = Database([(first, 1.0), (NOON, 2.0)])
    for same in (DAY, datetime.datetime(2024, 1, 1), "2024-01-01", "2024-01-01 00:00"):
        assert D[same] == 1.0 and same in D and D.get(same) == 1.0 and D.get_all(same) == [1.0]
        assert D.ask(same).rows[0].key == first
    assert D["2024-01-02T12:00"] == 2.0
    assert [x.query for x in D.ask(["2024-01-01", "2024-01-02T12"])] == [DAY, NOON]
    for other in (
        NOON.date(),
        "2024-01-02",
        "2024",
        "2024-01",
        "soon",
        NOON.replace(tzinfo=datetime.UTC),
        3,
    ):
        assert other not in D
    assert D.learn([("2024-01-01 01:00", "2024-01-01"), (NOON, NOON)], epochs=1).epochs == 1
    assert D.update("2024-01-01", 5.0) == 0 and list(D.items())[-1] == (first, 5.0)
    assert D.remove("2024-01-01 00:00") == 1 and list(D) == [NOON]


def test_parts_of_a_key_are_read_of_text():
    rows = {"who": ["Li", "Hu", "Li"], "n": [3, 4, 2024], "day": [DAY, DAY, NOON.date()]}
    D = Database.from_columns({**rows, "v": [1.0, 2.0, 3.0]}, key=["who", "n", "day"], value="v")
    right = D.ask(("Li", 3, DAY)).value
    assert D.ask(("Li", "3", "2024-01-01")).value == right
    assert D.ask({"who": "Li", "n": "3", "day": "2024-01-01"}).value == right
    assert D.ask([("Li", "3", None), ("Hu", None, "2024-01-01 10:00")])[1].rows[0].value == 2.0
    with pytest.raises(DtypeError, match="query 1, column 'n', must be a number, not 'x'"):
        D.ask([("Li", 3, DAY), ("Li", "x", DAY)])
    with pytest.raises(DtypeError, match="query 0, column 'day', must be a date or ISO text"):
        D.ask({"day": "soon"})
