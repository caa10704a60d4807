"""A tensor whose rows are of different lengths, through everything that can happen to it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from qkv.database.errors import StoreDamagedError
from qkv.database.storage import Store, check_store
from qkv.database.storage import limits as sizes
from qkv.database.storage.catalog import FORMAT_VERSION
from qkv.errors import ArgumentError, ShapeError
from qkv.frameworks.ragged import Ragged


@pytest.fixture(params=["resting", "segments"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "segments":
        monkeypatch.setattr(sizes, "MAX_BUFFERED_ROWS", 4)
        monkeypatch.setattr(sizes, "MAX_SEGMENT_BYTES", 20 * 24)
        monkeypatch.setattr(sizes, "SEGMENTS_PER_MERGE", 4)


def row(i: int) -> list[int]:
    return [10 * i + j for j in range(i % 4)]


def ragged(ids: range | list[int]) -> Ragged:
    rows = [row(i) for i in ids]
    flat = np.array([x for one in rows for x in one], np.uint64)
    return Ragged(flat, np.cumsum([0, *map(len, rows)]))


def add(store: Store, count: int) -> None:
    start = len(store.open_snapshot().live_ids()) and int(store.open_snapshot().live_ids()[-1]) + 1
    ids = range(start, start + count)
    store.commit(
        records=[f"{i}" for i in ids],
        digests=[b"%d" % i for i in ids],
        tensors={"key": np.asarray(ids, np.float32)[:, None], "words": ragged(ids)},
    )


def words_by_id(store: Store, version: int | None = None) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    for part in store.open_snapshot(version).iterate_segments():
        words = part.tensors["words"]
        live = np.ones(len(part.ids), bool) if part.live is None else part.live
        rows = [one.tolist() for one in words[live].split_rows()]
        result |= dict(zip(part.ids[live].tolist(), rows, strict=True))
    return result


def expected_rows(ids: range | set[int]) -> dict[int, list[int]]:
    return {i: row(i) for i in ids}


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_rows_come_and_go(tmp_path: Path, place: str) -> None:
    path = tmp_path / "s" if place == "disk" else None
    with Store(path) as store:
        for count in (3, 1, 9, 30):
            add(store, count)
        assert words_by_id(store) == expected_rows(range(43))
        before = store.version
        store.commit(remove=[0, 7, 42])
        left = set(range(43)) - {0, 7, 42}
        assert words_by_id(store) == expected_rows(left) and words_by_id(
            store, before
        ) == expected_rows(range(43))
        store.compact()
        assert words_by_id(store) == expected_rows(left)
        ids = store.open_snapshot().live_ids()
        halves = [(part, {"words": ragged(part.tolist())}) for part in (ids[:5], ids[5:])]
        store.rewrite_tensors(halves)
        assert words_by_id(store) == expected_rows(left)
        assert store.open_snapshot().tensor_names == ("words",)
    if path is not None:
        assert check_store(path) == []
        with Store(path) as store:
            assert words_by_id(store) == expected_rows(left)


@pytest.mark.usefixtures("limits")
def test_a_lost_catalogue_is_made_again(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        add(store, 9)
    path = tmp_path / "catalogue.sqlite"
    content = bytearray(path.read_bytes())
    content[4096 : 4096 + 32] = b"\xff" * 32
    path.write_bytes(content)
    check_store(tmp_path, repair=True)
    with Store(tmp_path) as store:
        assert words_by_id(store).items() <= expected_rows(range(9)).items()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (FORMAT_VERSION,)
    connection.close()


@pytest.fixture
def segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sizes, "MAX_BUFFERED_ROWS", 4)
    with Store(tmp_path) as store:
        add(store, 9)
    (file,) = tmp_path.glob("segment-*")
    return file


def test_a_segment_is_a_plain_file(segment: Path) -> None:
    result = load_file(segment)
    np.testing.assert_array_equal(result["words"], ragged(range(9)).flat)
    np.testing.assert_array_equal(result["words.starts"], ragged(range(9)).starts)


@pytest.mark.parametrize("bad", [[1, 0, 1, 3], [0, 5, 3, 6], [0, 0, 1, 7]])
def test_rows_that_begin_elsewhere_are_damage(segment: Path, bad: list[int]) -> None:
    content = segment.read_bytes()
    good = ragged(range(9)).starts
    wrong = np.concatenate([bad, good[4:]]).astype("<i8")
    assert content.count(good.astype("<i8").tobytes()) == 1
    segment.write_bytes(content.replace(good.astype("<i8").tobytes(), wrong.tobytes()))
    with Store(segment.parent) as store:
        if bad == [0, 0, 1, 7]:
            assert check_store(segment.parent)
            return
        with pytest.raises(StoreDamagedError, match="row boundaries"):
            words_by_id(store)


def test_what_does_not_fit_is_refused() -> None:
    two = {"a": ragged([1]), "b": ragged([1])}
    with pytest.raises(ArgumentError, match="only one tensor may be ragged"):
        Store().commit(records=["x"], digests=[b"x"], tensors=two)
    store = Store()
    add(store, 3)
    with pytest.raises(ShapeError, match="words"):
        words = np.zeros((1, 3), np.uint64)
        tensors = {"key": np.zeros((1, 1), np.float32), "words": words}
        store.commit(records=["x"], digests=[b"x"], tensors=tensors)


@pytest.mark.usefixtures("limits")
def test_some_rows_in_any_order() -> None:
    store = Store()
    for count in (5, 6, 2):
        add(store, count)
    expected = [12, 3, 0, 7, 3]
    actual = store.open_snapshot().read_tensor("words", expected)
    assert [one.tolist() for one in actual.split_rows()] == [row(i) for i in expected]
    assert len(store.open_snapshot().read_tensor("words", [])) == 0
