"""Missing is missing: of values, keys and columns."""

from __future__ import annotations

import datetime
import warnings

import numpy as np
import pandas
import pytest

import qkv
from qkv import Database
from qkv.database.errors import SkippedRowsWarning
from qkv.errors import ArgumentError, DtypeError

NAN = float("nan")


@pytest.mark.parametrize("weighting", ["softmax", "hard", "normalized", "sparsemax", "raw"])
@pytest.mark.parametrize(
    ("hole", "rows"), [(None, 6), (NAN, 6), (np.float32("nan"), 6), (None, 9000)]
)
def test_a_row_without_a_value_is_left_out(hole, weighting, rows):
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(rows, 3)), rng.normal(size=rows).tolist()
    absent = np.arange(rows) % 3 == 1
    query = keys[absent][0]  # the best row is one of those
    made = qkv.Database(keys, [hole if x else v for x, v in zip(absent, values, strict=True)])
    alone = qkv.Database(keys[~absent], np.array(values)[~absent])
    options = {"score": "epanechnikov", "weighting": weighting}
    answer, expected = made.ask(query, **options), alone.ask(query, **options)
    assert answer.missing == absent.sum() and answer.total == rows - absent.sum()
    assert answer.value == pytest.approx(expected.value, rel=1e-9)
    assert answer.spread == pytest.approx(expected.spread, rel=1e-6)
    np.testing.assert_allclose(answer.weights[~absent], expected.weights, rtol=1e-6)
    assert not answer.weights[absent].any()
    np.testing.assert_allclose(
        made.attend(query, **options), alone.attend(query, **options), rtol=1e-9
    )
    assert f"{answer.missing:,} rows without a value" in answer.explain()
    assert "without a value left out" in str(answer)
    assert answer.to_dict()["missing"] == answer.missing


def test_one_empty_cell_leaves_the_column_what_it_is():
    made = qkv.Database({"a": None, "b": "law", "c": "art"})
    assert made.info()["value_kind"] == "text"
    answer = made.ask("a")
    assert answer.value in ("law", "art") and answer.missing == 1
    assert answer.hint == "a is a key, but its row lacks value and is left out"
    assert made["a"] is None
    made.add("d", None)
    assert made.ask("d").missing == 2
    with pytest.raises(DtypeError, match=r"a value is 3 \(number\)"):
        made.add(["e", "f"], [None, 3])
    assert qkv.Database({"a": None}).ask("a").explain().startswith("No row answers")


def test_values_of_several_columns():
    table = {"name": ["a", "b", "c"], "x": [1.0, None, 3.0], "y": [1, 2, None]}
    message = (
        r"2 of 3 rows lack a number in x \(1\) or y \(1\), so no answer counts them: fill it in"
    )
    with pytest.warns(SkippedRowsWarning, match=message):
        made = qkv.Database.from_columns(table, key="name")
    numbers = made.ask("b")
    assert (numbers.value, numbers.missing) == ({"x": 1.0, "y": 1.0}, 2)
    assert numbers.hint == "b is a key, but its row lacks x and is left out"
    for shown in (str(numbers), numbers.explain()):
        assert "2 rows that lack x or y" in shown and "its row lacks x" in shown
    assert made.ask("a").hint == "" and made["b"] == {"x": None, "y": 2}
    with pytest.warns(SkippedRowsWarning, match=r"1 of 1 row lacks a number in y \(1\)"):
        made.extend([{"name": "d", "x": 4.0, "y": None}])
    with pytest.warns(SkippedRowsWarning, match="such as y$"):  # not the one that lacks it
        made.extend([{"name": "g", "x": None, "y": 5.0}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is there to be left out
        made.extend([{"name": "e", "x": None, "y": None}, {"name": "f", "x": 1.0, "y": 1.0}])
    wide = {"name": ["a", "b"]} | {f"x{i}": [i, None if i else 1] for i in range(9)}
    with pytest.warns(
        SkippedRowsWarning, match=r"in x1 \(1\), x2 \(1\), x3 \(1\) or 5 others, so no"
    ):
        message = str(qkv.Database.from_columns(wide, key="name").ask("b"))
    assert "1 row that lacks x0, x1, x2 or 6 others" in message
    assert "b is a key, but its row lacks x1, x2, x3 or 5 others and" in message
    table["y"] = ["p", None, None]
    mixed = qkv.Database.from_columns(table, key="name")
    assert mixed.ask("c").value == {"x": 3.0, "y": None} and mixed.ask("c").missing == 1


def test_vectors_among_which_some_are_missing():
    values = [np.ones(2), None, np.array([3.0, 3.0]), np.array([NAN, 1.0])]
    made = qkv.Database(["a", "b", "c", "d"], values)
    answer = made.ask("d")
    assert answer.missing == 2 and np.isfinite(answer.value).all()
    assert made.describe()["value"] == {"type": "vector", "missing": 2}


def test_rows_without_a_key_are_skipped_and_counted(tmp_path):
    table = {"name": ["Li", None, "Mu", None], "age": [1, 2, 3, 4]}
    with pytest.warns(
        SkippedRowsWarning, match=r"2 of 4 rows have no key \(column name\): skipped"
    ):
        made = qkv.Database.from_columns(table, key="name", path=tmp_path / "d.qkv")
    assert dict(made.items()) == {"Li": 1, "Mu": 3}
    with pytest.warns(SkippedRowsWarning, match="1 of 2 rows has no key"):
        made.extend([{"name": None, "age": 5}, {"name": "Hu", "age": 6}])
    assert len(made) == 3
    with pytest.raises(ArgumentError, match="no row has a key"):
        qkv.Database.from_columns({"name": [None], "age": [1]}, key="name")
    with pytest.raises(ArgumentError, match="None"):
        made.add(None, 3)
    made.close()
    keys = np.array([[1.0, NAN], [2.0, 3.0]])
    with pytest.warns(SkippedRowsWarning, match="1 of 2"):
        made = qkv.Database.from_columns({"key": keys, "value": ["a", "b"]}, key="key")
    assert made[[2.0, 3.0]] == "b" and len(made) == 1
    with pytest.warns(SkippedRowsWarning, match="columns first, last"):
        made = qkv.Database.from_columns(
            {"first": ["a", "b"], "last": ["x", None], "age": [1, 2]}, key=("first", "last")
        )
    assert made["a", "x"] == 1


def test_a_messy_table(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text(
        "\ufeffname;age;city;born\r\n"
        '"Li ""the first""";34;"Ber\nlin";1990-01-31\r\n'
        "Mu;NA;null;\r\n"
        "\r\n"
        ";50;Rome;1970-12-01\r\n"
        "Al; 61;;1960-05-05\r\n"
        "Li;70;N/A;1955-06-07\r\n",
        encoding="utf-8",
        newline="",
    )
    with pytest.warns(SkippedRowsWarning, match="1 of 5") as caught:
        made = qkv.Database.from_source(path, value="age", path=tmp_path / "d.qkv")
    assert caught[0].filename == __file__
    assert made['Li "the first"'] == 34 and made["Mu"] is None
    assert made.describe() == {
        "name": {"type": "text", "missing": 0},
        "age": {"type": "number", "missing": 1},
        "city": {"type": "text", "missing": 3},
        "born": {"type": "date", "missing": 1},
    }
    answer = made.ask("Mu")
    assert answer.missing == 1 and 34 <= answer.value <= 70
    assert made.ask("Mu", where="age > 50").total == 2
    assert made.ask("Li", where="born >= '1960-01-01' and born < '1991'").total == 2
    assert made.ask("Li", where="city is None and age is not None").total == 2
    with pytest.raises(DtypeError, match="column 'city', which holds text"):
        made.ask("Li", where="city > 50")
    made.close()
    with qkv.open(tmp_path / "d.qkv") as again, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert again.ask("Mu", where="not age > 50").total == 1


@pytest.mark.parametrize("hole", [None, NAN])
@pytest.mark.parametrize("rows", [1, 9000])
def test_the_first_values_that_are_there_decide_what_values_are(tmp_path, hole, rows):
    keys = np.random.default_rng(0).normal(size=(rows + 3, 3))
    full = qkv.Database(keys, [hole] * rows + [5.0, 7.0, 6.0])
    with qkv.open(tmp_path / "d.qkv") as D:
        D.add(keys[:rows], [hole] * rows)
        past = D.at(1)
        D.add(keys[rows:-1], [5.0, 7.0])
        D.update(keys[-1], 6.0)
        for database in (D, qkv.open(D.path)):
            answer, expected = database.ask(keys[0]), full.ask(keys[0])
            assert answer.value == pytest.approx(expected.value, rel=1e-6)
            assert answer.missing == rows and database[keys[-2]] == 7.0
        assert len(past) == rows and past.ask(keys[0]).missing == rows
        with pytest.raises(DtypeError, match="type of values: number"):
            D.add(keys[:1] + 1, ["text"])


def test_values_of_several_kinds_stay_so():
    D = qkv.Database()
    for key, value in (("a", None), ("b", "text"), ("c", 3)):
        D.add(key, value)
    assert D["b"] == "text" and D["c"] == 3 and D.ask("c").value == 3
    D = qkv.Database({"a": None})
    D.add("b", np.ones(2))
    assert D["b"].tolist() == [1, 1] and D["a"] is None


@pytest.mark.parametrize(
    "cells",
    [
        np.ma.array([1.0, 99.0, 3.0], mask=[0, 1, 0]),
        np.ma.array([1, 99, 3], mask=[0, 1, 0]),
        pandas.Series([1, None, 3], dtype="Int64", index=["x", "y", "z"]),
        pandas.Series([1.0, None, 3.0], dtype="Float64", index=[2, 0, 1]),
        [1.0, pandas.NA, 3.0],
        [1.0, np.ma.masked, 3.0],
    ],
)
def test_whatever_stands_for_a_missing_number_is_missing(cells):
    made = Database(["a", "b", "c"], cells)
    columns = {"name": ["a", "b", "c"], "n": cells, "other": [0, 1, 2]}
    read = Database.from_columns(columns, key="name", value="n")
    for D in (made, read):
        assert [*D.items()] == [("a", 1), ("b", None), ("c", 3)]
        answer = D.ask("b", weighting="average")
        assert (answer.mean, answer.missing) == (2.0, 1)
    with pytest.warns(SkippedRowsWarning, match="1 of 3"):
        keyed = Database.from_columns(columns, key="n", value="other")
    assert [*keyed.items()] == [(1, 0), (3, 2)]


def test_a_masked_number_makes_its_vector_missing():
    cells = np.ma.array([[1, 2], [3, 99], [5, 6]], np.float32, mask=[[0, 0], [0, 1], [0, 0]])
    for column in (cells, list(cells), cells.astype(int)):
        D = Database(["a", "b", "c"], column)
        np.testing.assert_array_equal(D.attend("a", weighting="average"), [3, 4])
    assert Database(["a", "b", "c"], cells)["a"].dtype == np.float32
    with pytest.raises(ArgumentError, match=r"key 1 .* NaN"):
        Database(cells, [1, 2, 3])


@pytest.mark.parametrize(
    "cells",
    [
        pandas.Series(pandas.to_datetime(["2024-01-01", None])),
        [datetime.datetime(2024, 1, 1), pandas.NaT],
        [np.datetime64("2024-01-01T00:00"), np.datetime64("NaT")],
    ],
)
def test_no_time_is_a_missing_time(cells):
    D = Database(["a", "b"], cells)
    assert [*D.items()] == [("a", datetime.datetime(2024, 1, 1)), ("b", None)]


def test_rows_of_columns_with_labels_stay_together():
    names = pandas.Series(["a", None, "c", "d"], index=[0, 1, 3, 2])
    with pytest.warns(SkippedRowsWarning):
        D = Database.from_columns({"name": names, "n": [10, 20, 30, 40]}, value="n")
    assert [*D.items()] == [("a", 10), ("c", 30), ("d", 40)]


def test_a_query_is_taken_as_attend_takes_it():
    rng = np.random.default_rng(0)
    keys, query = rng.normal(size=(5, 3)), rng.normal(size=(2, 3))
    for D, q in ((Database(keys, keys), query), (Database(keys[:, 0], keys[:, 1]), query[:, 0])):
        want = D.attend(q)
        for kind in (np.ma.masked_array, lambda x: x.astype(">f8"), lambda x: x.view(Own)):
            np.testing.assert_array_equal(D.attend(kind(q)), want)
            for answer, row in zip(D.ask(kind(q)), want, strict=True):
                np.testing.assert_allclose(answer.value, row if row.size > 1 else row[0], rtol=1e-6)
        hidden = np.ma.masked_array(q, mask=q > 0)
        for ask in (D.ask, D.attend):
            with pytest.raises(DtypeError, match="query is a masked array"):
                ask(hidden)


class Own(np.ndarray):
    """An array of one's own class."""


@pytest.mark.parametrize("path", [None, "days.qkv"])
def test_a_column_of_dates_is_reported_as_dates_everywhere(path, tmp_path):
    day = datetime.date(2024, 1, 1)
    rows = {"name": ["a", "b"], "day": [None, day], "at": [day, day], "word": ["2024", "x"]}
    where = None if path is None else tmp_path / path
    D = Database.from_columns(rows | {"mixed": [day, 3]}, key="name", path=where)
    types = {name: column["type"] for name, column in D.describe().items()}
    assert types == {"name": "text", "day": "date", "at": "date", "word": "text",
                    "mixed": "number, date"}  # fmt: skip
    alone = Database.from_columns({"day": [day], "at": [day]}, key="day")
    assert [column["type"] for column in alone.describe().values()] == ["date", "date"]


def test_a_key_that_is_a_vector_may_be_part_of_the_value():
    table = {"v": np.eye(3), "n": [1, 2, None]}
    made = Database.from_columns(table, key="v", value=["v", "n"])
    answer = made.ask(np.array([0.0, 9.0, 0.0]))
    assert answer.value["n"] == 2 and answer.missing == 0
    np.testing.assert_array_equal(answer.value["v"], [0, 1, 0])
    described = made.describe()
    assert described["v"].pop("score") == "cosine"
    assert described["v"].pop("temperature") == pytest.approx(1 / np.log(6), rel=0.01)
    assert described == {
        "v": {"type": "vector", "missing": 0},
        "n": {"type": "number", "missing": 1},
    }
    with pytest.raises(ArgumentError, match="column 'v' holds vectors"):
        made.count("v == 3")
