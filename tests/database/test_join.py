"""`Database.join`: rows of two databases with similar keys."""

from __future__ import annotations

import pickle

import pytest

import qkv
from qkv.database import join
from qkv.errors import ArgumentError, DtypeError


def test_joined_rows_are_those_that_ask_finds(monkeypatch):
    monkeypatch.setattr(join, "QUERIES_PER_BATCH", 2)
    left = qkv.Database(["chese", "bred", "appels", " ", "milk"], [1, 2, 3, 4, 5])
    right = qkv.Database(["bread", "cheese", "apples", "milk"], ["B", "C", "A", "M"])
    seen = []
    rows = list(left.join(right, top=2, progress=lambda done, total: seen.append((done, total))))
    assert seen == [(2, 5), (4, 5), (5, 5)]
    for key in ("chese", "bred", "appels", "milk"):
        answer = right.ask(key, top=2)
        found = [row for row in rows if row["key"] == key]
        assert [row["key_right"] for row in found] == [row.key for row in answer.rows]
        assert [row["weight"] for row in found] == pytest.approx([r.weight for r in answer.rows])
        assert [row["rank"] for row in found] == [1, 2]
    [blank] = [row for row in rows if row["key"] == " "]
    assert blank == {
        "key": " ",
        "value": 4,
        "key_right": None,
        "value_right": None,
        "weight": None,
        "rank": None,
    }


def test_keys_of_several_columns_and_options():
    left = qkv.Database([(1.0, 10.0), (2.0, 20.0)], ["a", "b"])
    right = qkv.Database([(1.1, 10.5), (2.2, 19.0), (9.0, 90.0)], ["x", "y", "z"])
    assert [row["value_right"] for row in left.join(right)] == ["x", "y"]
    assert [row["value_right"] for row in left.join(right, weighting="hard")] == ["x", "y"]
    assert [row["value_right"] for row in left.join(right, min_weight=1.0, score="exact")] == [
        None,
        None,
    ]


def test_wrong_arguments_are_named_before_the_first_row():
    D = qkv.Database({"a": 1})
    with pytest.raises(ArgumentError, match="min_weight"):
        D.join(D, min_weight=2)
    with pytest.raises(ArgumentError, match="top"):
        D.join(D, top=0)
    with pytest.raises(TypeError, match="scor"):
        list(D.join(D, scor="exact"))
    with pytest.raises(DtypeError, match="join needs a database, not dict"):
        D.join({"a": 1})


def test_a_blank_key_matches_a_key_that_equals_it():
    left, right = qkv.Database({" ": 1, "  ": 2}), qkv.Database({" ": "blank", "tea": "tea"})
    rows = left.join(right, weighting="hard")
    assert [row["value_right"] for row in rows] == ["blank", None]


def test_rows_with_the_same_key_count_together():
    left = qkv.Database({"Ana Silva": 1, "Bob": 2})
    right = qkv.Database(["Anna Silva", "Anna Silva", "Bob"], ["old", "new", "x"])
    rows = list(left.join(right, min_weight=0.6))
    assert [row["value_right"] for row in rows] == ["old", "x"]
    assert 0.3 < rows[0]["weight"] <= 0.5  # that of the row, as in `ask`
    assert len(list(left.join(right, min_weight=0.6, top=2))) == 3


def test_a_row_without_a_value_is_a_match(tmp_path):
    orders = qkv.Database({"chese": 3, "bred": 1})
    rows = {"bread": 1.5, "cheese": None, "chees board": 22.0}
    for prices in (qkv.Database(rows), qkv.Database({k: v and str(v) for k, v in rows.items()})):
        first, second = orders.join(prices)
        assert (first["key_right"], first["value_right"]) == ("cheese", None)
        assert second["key_right"] == "bread" and second["value_right"] is not None
        first, _ = orders.join(prices, where="key != 'bread'", weighting="hard", top=1)
        assert first["key_right"] == "cheese"
    with pytest.raises(KeyError, match="the nearest are 'cheese'"):
        qkv.Database(rows)["chese"]


def test_a_cluster_joins_rows_without_a_value(tmp_path):
    pytest.importorskip("ray")
    from qkv.cluster import split
    from tests.cluster.local_shards import cluster

    rows = {"bread": 1.5, "cheese": None, "chees board": 22.0, "apples": None}
    with qkv.open(tmp_path / "all.qkv") as D:
        D.add([*rows], [*rows.values()])
        expected = pickle.loads(pickle.dumps(D.ask("chese")))
        joined = list(qkv.Database({"chese": 3, "aples": 1}).join(D))
    assert [row["key_right"] for row in joined] == ["cheese", "apples"]
    parts = [str(tmp_path / f"{i}.qkv") for i in range(2)]
    split(tmp_path / "all.qkv", parts)
    with cluster(parts, 2) as shards:
        answer = shards.ask("chese")
        assert answer.hint == expected.hint == "the best match, cheese, lacks value and is left out"
        assert answer.confidence == pytest.approx(expected.confidence, rel=1e-5)
        assert list(qkv.Database({"chese": 3, "aples": 1}).join(shards)) == [
            row | {"weight": pytest.approx(row["weight"], rel=1e-5)} for row in joined
        ]
