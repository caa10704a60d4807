"""Attention in SQL, with a real DuckDB."""

from __future__ import annotations

import datetime
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.database.errors import SkippedRowsWarning
from qkv.errors import DtypeError
from tests.formulas import softmax

duckdb = pytest.importorskip("duckdb")

TITLES = ["Moby-Dick", "Emma", "Dracula"]


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sql") / "books.qkv"
    columns = {
        "about": ["a white whale", "a matchmaker", "a count who drinks blood"],
        "title": TITLES,
        "year": [1851, 1815, None],
        "price": [2.5, 3.0, 1.25],
        "vector": np.array([[1.0, 0.5], [0.25, 0.0], [0.0, -1.0]]),
        "seen": [True, None, False],
        "tags": [["sea", 1], {"a": 2.5}, b"\x00\xff"],
    }
    qkv.Database.from_columns(
        columns, key="about", value="vector", encoder="characters", path=path
    ).close()
    return path


@pytest.fixture(scope="module")
def con() -> Any:
    with duckdb.connect() as made:
        yield qkv.duckdb.register(made)


def refused(con: Any, sql: str, *values: Any) -> str:
    with pytest.raises(duckdb.Error) as caught:
        con.execute(sql, values).fetchall()
    return str(caught.value)


# qkv_ask


def test_ask_reads_the_rows_that_an_index_finds(con, tmp_path):
    pytest.importorskip("faiss")
    numbers, path = np.arange(20_000.0), tmp_path / "numbers.qkv"
    with qkv.Database.from_columns({"x": numbers, "y": -numbers}, key="x", path=path) as D:
        D.index()
        rows = D.ask(12.25, approximate=0.1, top=3).rows
        assert D.ask(12.25, approximate=0.1).rows_read < 10_000
    sql = f"SELECT y, weight FROM qkv_ask('{path}', 12.25, top := 3, approximate := 0.1)"
    expected = [(row.value, pytest.approx(row.weight)) for row in rows]
    assert con.execute(sql).fetchall() == expected
    assert "between 0 and 1" in refused(con, sql.replace("0.1", "7"))


def test_ask_gives_the_rows_of_the_answer_as_columns(con, books):
    result = con.sql(f"SELECT * FROM qkv_ask('{books}', 'a whale', top := 2)")
    types = dict(zip(result.columns, map(str, result.types), strict=True))
    assert types == {
        "about": "VARCHAR",
        "title": "VARCHAR",
        "year": "BIGINT",
        "price": "DOUBLE",
        "vector": "DOUBLE[]",
        "seen": "BOOLEAN",
        "tags": "JSON",
        "weight": "DOUBLE",
        "rank": "BIGINT",
        "confidence": "DOUBLE",
    }
    with qkv.open(books) as database:
        answer = database.ask("a whale", top=2)
    rows = [dict(zip(result.columns, row, strict=True)) for row in result.fetchall()]
    assert [row["title"] for row in rows] == [row.record["title"] for row in answer.rows]
    np.testing.assert_allclose([row["weight"] for row in rows], [r.weight for r in answer.rows])
    assert [row["rank"] for row in rows] == [1, 2]
    assert [row["confidence"] for row in rows] == pytest.approx([answer.confidence] * 2)
    assert {name: rows[0][name] for name in ("year", "price", "vector", "seen", "tags")} == {
        "year": 1851,
        "price": 2.5,
        "vector": [1.0, 0.5],
        "seen": True,
        "tags": '["sea", 1]',
    }


def test_a_missing_cell_is_null(con, books):
    sql = "SELECT year, seen, tags FROM qkv_ask(?, 'blood', top := 1)"
    assert con.execute(sql, [str(books)]).fetchone() == (None, False, '"00ff"')


def test_numbers_keep_their_digits_and_nan_is_missing(con, tmp_path):
    ints = [2**53 + 1, -(2**63), 5]
    rows = [
        {"key": x, "value": 1.0, "wide": ints[i], "few": [1, float("nan"), Decimal("NaN")][i]}
        for i, x in enumerate("abc")
    ]
    with qkv.open(tmp_path / "wide.qkv") as D:
        D.extend(rows)
    result = con.execute(f"SELECT wide, few FROM qkv_ask('{D.path}', 'a') ORDER BY key")
    assert [str(column[1]) for column in result.description] == ["HUGEINT", "BIGINT"]
    assert result.fetchall() == [(ints[0], 1), (ints[1], None), (ints[2], None)]


def test_a_struct_names_columns_of_the_key(con, tmp_path):
    with qkv.open(tmp_path / "two.qkv", key=("a", "b")) as D:
        D.add([("x", 1), ("y", 2)], [1.0, 2.0])
    says = refused(con, f"SELECT * FROM qkv_ask('{D.path}', {{'zz': 'x', 'b': 1}})")
    assert "unknown column 'zz'" in says


def test_questions_may_be_a_column(con, books):
    queries = "(VALUES (1, 'whale'), (2, 'matchmaker'), (3, NULL), (4, 'count')) AS asked(id, q)"
    result = con.execute(
        f"SELECT id, title FROM {queries}, qkv_ask(?, asked.q, top := 1) ORDER BY id", [str(books)]
    )
    assert result.fetchall() == [(1, "Moby-Dick"), (2, "Emma"), (4, "Dracula")]


def test_ask_takes_the_options_of_ask(con, books):
    sql = "SELECT title FROM qkv_ask(?, 'whale', \"where\" := 'year < 1850', weighting := 'hard')"
    assert con.execute(sql, [str(books)]).fetchall() == [("Emma",)]
    sql = "SELECT title FROM qkv_ask(?, 'a matchmaker', score := 'exact', top := 1)"
    assert con.execute(sql, [str(books)]).fetchall() == [("Emma",)]


def test_keys_may_be_numbers_vectors_and_several(con, tmp_path):
    with qkv.open(tmp_path / "gpa.qkv") as database:
        database.add([3.1, 3.9], ["low", "high"])
    with qkv.open(tmp_path / "points.qkv") as database:
        database.add(np.array([[0.0, 1.0], [1.0, 0.0]]), ["up", "right"])
    with qkv.open(tmp_path / "pairs.qkv", key=["town", "year"]) as database:
        database.extend([{"town": "Ulm", "year": 1879, "value": "Albert"}])
        database.extend([{"town": "Bonn", "year": 1770, "value": "Ludwig"}])
    for name, query, value in (
        ("gpa", "3.85", "high"),
        ("points", "[0.9, 0.1]", "right"),
        ("pairs", "{'year': 1770, 'town': 'Bonn'}", "Ludwig"),
    ):
        sql = f"SELECT value FROM qkv_ask(?, {query}, top := 1)"
        assert con.execute(sql, [str(tmp_path / f"{name}.qkv")]).fetchall() == [(value,)]


def test_what_ask_refuses_says_the_next_step(con, books):
    sql = "FROM qkv_ask(?, ?, top := ?)"
    assert "does not exist" in refused(con, sql, "nowhere.qkv", "a", 1)
    assert "must be text" in refused(con, sql, str(books), 3, 1)
    assert "at least 1" in refused(con, sql, str(books), "a", 0)
    assert "path is NULL" in refused(con, sql, None, "a", 1)
    message = refused(con, "FROM qkv_ask(?, 'a', score := 'gausian')", str(books))
    assert "did you mean 'gaussian'" in message
    assert con.execute(sql, [str(books), None, 1]).fetchall() == []


def test_a_column_of_any_name_is_a_column(con, tmp_path):
    with qkv.open(tmp_path / "odd.qkv", key="a", value='x"; DROP TABLE t; --') as database:
        database.extend([{"a": "k", 'x"; DROP TABLE t; --': 1, "weight": 7}])
    result = con.execute("FROM qkv_ask(?, 'k')", [str(tmp_path / "odd.qkv")]).fetchdf()
    assert list(result) == ["a", 'x"; DROP TABLE t; --', "weight", "weight_1", "rank", "confidence"]
    assert result.values.tolist() == [["k", 1, 7, 1.0, 1, 0.99]]


# qkv_join


@pytest.fixture
def shop(con: Any) -> Any:
    con.execute(
        """
        CREATE OR REPLACE TABLE "my orders" (item VARCHAR, n INTEGER);
        INSERT INTO "my orders" VALUES ('chese', 1), (NULL, 2), ('bred', 3);
        CREATE SCHEMA IF NOT EXISTS shop;
        CREATE OR REPLACE TABLE shop.goods ("the name" VARCHAR, price DOUBLE);
        INSERT INTO shop.goods VALUES ('bread', 1.5), (NULL, 0), ('cheese', 2.5), ('milk', 1);
        """
    )
    return con


JOIN = """
    SELECT * FROM qkv_join('my orders', 'shop.goods', on_left := 'item', on_right := 'the name',
                           encoder := 'characters', top := {})
"""


def test_join_adds_the_nearest_rows_to_each_row(shop):
    result = shop.sql(JOIN.format(1))
    assert result.columns == ["item", "n", "the name", "price", "weight", "rank"]
    rows = result.fetchall()
    assert [row[:4] for row in rows] == [("chese", 1, "cheese", 2.5), ("bred", 3, "bread", 1.5)]
    goods = qkv.Database(["bread", "cheese", "milk"], range(3), encoder="characters")
    weights = [goods.ask(item).rows[0].weight for item in ("chese", "bred")]
    np.testing.assert_allclose([row[4] for row in rows], weights)
    assert [row[5] for row in shop.sql(JOIN.format(2)).fetchall()] == [1, 2, 1, 2]


@pytest.mark.parametrize("encoder", ["os:system", "builtins:print", "/etc"])
def test_join_calls_no_function_that_sql_names(shop, capfd, encoder):
    message = refused(shop, JOIN.format(1).replace("characters", encoder))
    assert "unknown encoder" in message
    assert "bread" not in "".join(capfd.readouterr())


def test_join_takes_numbers_and_frames(con):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1.1, 2.9]})
    known = pandas.DataFrame({"y": [1, 2, 3], "name": ["one", "two", "three"]})
    sql = "SELECT name FROM qkv_join('frame', 'known', on_left := 'x', on_right := 'y')"
    assert con.execute(sql).fetchall() == [("one",), ("three",)]
    assert len(frame) < len(known)


def test_join_leaves_out_a_key_of_blanks_that_the_other_side_has_not(con):
    con.execute("CREATE TABLE l AS FROM (VALUES ('chese'), (''), (NULL), ('  ')) t(a)")
    con.execute("CREATE TABLE r AS FROM (VALUES ('cheese'), ('bread')) t(b)")
    sql = "SELECT a, b FROM qkv_join('l', 'r', on_left := 'a', on_right := 'b')"
    assert con.sql(sql).fetchall() == [("chese", "cheese")]
    con.execute("INSERT INTO r VALUES ('')")
    assert con.sql(sql).fetchall() == [("chese", "cheese"), ("", "")]
    con.execute("DELETE FROM r WHERE b = ''; DELETE FROM l WHERE a = 'chese'")
    assert con.sql(sql).fetchall() == []


def test_join_of_no_rows_is_empty(con):
    con.execute("CREATE OR REPLACE TEMP TABLE nothing (x VARCHAR)")
    sql = "FROM qkv_join('nothing', 'nothing', on_left := 'x', on_right := 'x')"
    assert con.execute(sql).fetchall() == []


def test_names_of_tables_and_columns_are_names(shop):
    attack = 'goods; DROP TABLE "my orders"; --'
    message = refused(
        shop, "FROM qkv_join('my orders', ?, on_left := 'item', on_right := 'x')", attack
    )
    assert "Unexpected quote" in message
    assert "does not exist" in refused(
        shop, "FROM qkv_join('my orders', ?, on_left := 'item', on_right := 'x')", "a'; SELECT 1"
    )
    sql = "FROM qkv_join('my orders', 'shop.goods', on_left := ?, on_right := 'price')"
    assert "item" in refused(shop, sql, 'item" IS NULL); DROP TABLE "my orders"; --')
    assert 'Candidate bindings: "item"' in refused(shop, sql, "itm")
    assert shop.execute('SELECT count(*) FROM "my orders"').fetchone() == (3,)
    assert "a column of each" in refused(shop, "FROM qkv_join('my orders', 'shop.goods')")


# attend


def test_attend_is_the_sum_of_the_equation(con):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(5, 3)), rng.normal(size=(5, 7, 3))
    v = rng.normal(size=(5, 7, 2))
    rows = [(i, q[i].tolist(), k[i].tolist(), v[i].tolist()) for i in range(5)]
    con.execute(
        "CREATE OR REPLACE TEMP TABLE vectors (i INT, q DOUBLE[], k DOUBLE[][], v DOUBLE[][])"
    )
    con.executemany("INSERT INTO vectors VALUES (?, ?, ?, ?)", rows)
    result = con.execute("SELECT attend(q, k, v) FROM vectors ORDER BY i").fetchall()
    for i, (out,) in enumerate(result):
        np.testing.assert_allclose(out, softmax((k[i] @ q[i] / np.sqrt(3)).tolist()) @ v[i])


def test_a_score_or_a_weighting_that_is_null_is_the_default(con):
    plain = con.sql("SELECT attend(1.0, [1, 2], [3, 4])").fetchall()
    for name in ("score", "weighting"):
        assert con.sql(f"SELECT attend(1.0, [1, 2], [3, 4], {name} := NULL)").fetchall() == plain


def test_attend_over_groups_of_rows(con):
    result = con.execute(
        """
        SELECT x, attend(x, list(k), list(10 * k), score := 'gaussian:0.5', weighting := 'hard')
        FROM (VALUES (0.2), (2.9)) AS a(x), range(5) AS b(k) GROUP BY x ORDER BY x
        """
    )
    assert [float(row[1]) for row in result.fetchall()] == [0.0, 30.0]
    result = con.execute(
        """
        SELECT attend([1, 0]::FLOAT[2], list(k), list([y]), score := 'dot')[1]
        FROM (VALUES ([1, 0]::FLOAT[2], 3.0), ([0, 1]::FLOAT[2], 5.0)) AS b(k, y)
        """
    )
    assert result.fetchone()[0] == pytest.approx((np.e * 3 + 5) / (np.e + 1))


def test_rows_of_different_lengths_keep_their_places(con):
    sql = "SELECT attend(2, range(n), range(n), weighting := 'average') FROM range(6) AS t(n)"
    assert con.execute(sql).fetchall() == [(None,), (0,), (0.5,), (1,), (1.5,), (2,)]


@pytest.mark.parametrize(
    "arguments",
    ["NULL::DOUBLE, [1], [1]", "1, NULL::DOUBLE[], [1]", "1, [1], NULL::DOUBLE[]", "[1], [], []"],
)
def test_attend_of_nothing_is_null(con, arguments):
    assert con.execute(f"SELECT attend({arguments})").fetchone() == (None,)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("[1, 2], [[1, 2], [3]], [[1], [2]]", "keys has vectors of 1 and of 2 numbers"),
        ("[1, 2], [[1, 2], [3, 4]], [[1], []]", "values has vectors of 0 and of 1 numbers"),
        ("[1, 2], [[1, 2], [3, 4]], [[1]]", "2 keys and 1 values: pass one value for each key"),
        ("[1, 2, 3], [[1, 2]], [[1]]", "query has 3 columns and key 2"),
        ("[1, NULL], [[1, 2]], [[1]]", "query contains a NULL"),
        ("[1, 2], [[1, 2], NULL], [[1], [2]]", "keys contains a NULL"),
        ("1, [1, 2], [1, NULL]", "values contains a NULL: leave it out"),
        ("1, [1], [1], score := 'gaus'", "did you mean 'gaussian'"),
        ("1, [1], [1], weighting := 'topk'", "topk:3"),
        ("'x', [1], [1]", "explicit type casts"),
    ],
)
def test_what_attend_refuses(con, arguments, says):
    assert says in refused(con, f"SELECT attend({arguments})")


# Connections


def test_a_cursor_is_registered_on_its_own(con, books):
    cursor = con.cursor()
    assert "qkv_ask" in refused(cursor, "FROM qkv_ask('x', 'y')")
    qkv.duckdb.register(qkv.duckdb.register(cursor))
    assert qkv.duckdb.register(con) is con  # again, as when a notebook's cell is run twice
    assert cursor.execute("SELECT attend(1, [1], [5])").fetchone() == (5,)


def test_threads_ask_through_cursors_of_their_own(con, books):
    result: list[Any] = []

    def ask(title: str) -> None:
        with con.cursor() as cursor:
            qkv.duckdb.register(cursor)
            sql = "SELECT title, attend(k, [1], [2]) FROM qkv_ask(?, ?, top := 1), range(3000) t(k)"
            result.append(set(cursor.execute(sql, [str(books), title]).fetchall()))

    threads = [threading.Thread(target=ask, args=(q,)) for q in ("whale", "matchmaker", "count")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(sorted, result)) == [[(title, 2.0)] for title in sorted(TITLES)]


def test_nothing_is_left_in_the_file(tmp_path):
    with duckdb.connect(tmp_path / "a.duckdb") as con:
        con.execute("CREATE TABLE t AS SELECT 1 AS x")
    with duckdb.connect(tmp_path / "a.duckdb", read_only=True) as con:
        qkv.duckdb.register(con)
        assert con.execute("SELECT attend(x, [1], [2]) FROM t").fetchall() == [(2,)]


def test_register_takes_a_connection():
    with pytest.raises(DtypeError, match=r"duckdb\.connect"):
        qkv.duckdb.register("books.duckdb")  # type: ignore[arg-type]


def test_what_duckdb_reads_is_a_table(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text(f"item,price,sold\n{name},2.50,2024-01-02\n,1,\n")
    with duckdb.connect() as con:
        read = con.sql(f"FROM '{tmp_path}/*.csv' ORDER BY item")
        with pytest.warns(SkippedRowsWarning, match="2 of 4"):
            D = qkv.Database.from_frame(read, key="item", value="price")
        vectors = con.sql("SELECT i AS k, [i, i + 0.5]::FLOAT[2] AS v FROM range(3) t(i)")
        V = qkv.Database.from_frame(vectors, key="v", value="k")
    assert list(D.rows()) == [
        {"item": name, "price": 2.5, "sold": datetime.date(2024, 1, 2)} for name in ("a", "b")
    ]
    assert V.ask(np.array([2.0, 2.5]), weighting="hard").value == 2


def test_dates_are_their_iso_text_in_sql(tmp_path):
    day = datetime.date(2024, 1, 5)
    columns = {"day": [day, datetime.date(2024, 3, 1)], "price": [1.0, 2.0]}
    path = tmp_path / "t.qkv"
    qkv.Database.from_columns(columns, key="day", value="price", path=path).close()
    with duckdb.connect() as con:
        qkv.duckdb.register(con)
        result = con.sql(f"SELECT day, price FROM qkv_ask('{path}', '2024-01-06', top := 1)")
        assert result.fetchall() == [("2024-01-05", 1.0)]
