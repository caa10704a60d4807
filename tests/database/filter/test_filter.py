"""Conditions on columns."""

from __future__ import annotations

import datetime
import pickle
import re
import warnings
from decimal import Decimal

import numpy as np
import pytest

import qkv
from qkv.database.errors import NoRowsMatchWarning
from qkv.database.filter.expressions import compile_condition
from qkv.database.storage import limits
from qkv.database.table import columns
from qkv.database.table.column_chunk import read_distinct_texts
from qkv.errors import ArgumentError, DtypeError

ROW = {"title": "The Alchemist", "year": 1988, "genre": "fiction", "stock": None, "first name": "P"}


class Table:
    """Rows as conditions look at them."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def read_cells(self, name, at):
        return [self.rows[i][name] for i in at]

    def read_column(self, name):
        return columns.encode_column([row[name] for row in self.rows])

    def read_texts(self, name):
        return read_distinct_texts(self, name)

    def cell_kind_counts(self, name):
        return np.bincount(self.read_column(name).kinds, minlength=len(columns.KIND_NAMES))


def filter_rows(where, rows):
    result = compile_condition(where, list(rows[0]))
    assert result is not None
    return result(Table(rows)).passes.tolist()


@pytest.mark.parametrize(
    ("where", "passes"),
    [
        ({}, True),
        ({"genre": "fiction"}, True),
        ({"genre": "fiction", "year": 1987}, False),
        ({"genre": ["poetry", "fiction"]}, True),
        ({"stock": None}, True),
        ("year == 1988", True),
        ("1988.0 == year", True),
        ("1980 <= year < 1988", False),
        ("1980 <= year <= 1988", True),
        ("year > -5 and not genre == 'poetry'", True),
        ("genre in ['poetry', 'fiction']", True),
        ("year in (1988, '1988')", True),
        ("genre not in ('poetry',)", True),
        ("'chem' in title", True),
        ("'chem' not in title", False),
        ("'fiction' in [genre, title]", True),
        ("title > genre", False),
        ("genre < 'g' and genre >= 'fic'", True),
        ("stock > 3", False),
        ("not stock > 3", False),
        ("not (stock > 3 and year == 1988)", False),
        ("not (stock > 3 and year == 1)", True),
        ("stock > 3 or year == 1988", True),
        ("not stock < title", False),
        ("stock is None", True),
        ("stock == None", True),
        ("stock != 3", True),
        ("stock is not None or year != 1988", False),
        ("year and not stock", False),
        ("year\n== 1988", True),
        ("(year == 1) or (year == 1988)\n  and genre == 'poetry'", False),
        ("year == 1988 # of the first edition\n and genre == 'poetry'", False),
        ("year == +1988 and year > -1", True),
        ("True", True),
        ("year = 1988 and genre='fiction'", True),
        ("year <> 1988 OR genre = 'fiction'", True),
        ("NOT year IN (1, 2) AND stock IS NULL", True),
        ("stock IS NOT NULL", False),
        ("title = 'it''s' or title = \"The Alchemist\"", True),
        ("true and not FALSE", True),
        ("`first name` == 'P'", True),
        ("title == '`' or `first name` == 'P'", True),
        ("title == 'It\\'s `' or `first name` == 'P'", True),
    ],
)
def test_conditions(where, passes):
    assert filter_rows(where, [ROW]) == [passes]


def test_none_lets_all_pass():
    made = qkv.Database({"a": 1, "b": 2})
    assert made._view.filter_rows(None) is None
    assert made.count(None) == made.ask("a", where=None).total == 2


def test_a_column_named_as_a_word_of_sql_is_a_column():
    row = {"Null": 1, "AND": 2, "true": 3}
    assert filter_rows("Null = 1 and AND = 2 and true = 3", [row]) == [True]


def test_a_quote_written_twice_is_one():
    rows = [{"a": "it's"}, {"a": "its"}, {"a": 'say "x"'}]
    assert filter_rows("'''' in a or a = ''", rows) == [True, False, False]
    assert filter_rows("a = 'it''s'", rows) == [True, False, False]
    assert filter_rows('a = "say ""x"""', rows) == [False, False, True]


def test_no_rows_match_is_said():
    made = qkv.Database.from_columns(
        {"name": ["Li", "Mu", "Hu"], "n": [1, 2, None], "v": [1.0, 2.0, 3.0]}, key="name", value="v"
    )
    text = "No rows match where='n > 5'; column 'n' has the values 1, 2"
    answer = made.ask("Li", where="n > 5")
    assert (answer.hint, answer.total, answer.value, answer.rows) == (text, 0, None, [])
    assert answer.explain() == f"{text}."
    assert str(answer) == f"Li → nothing: {text}"
    assert pickle.loads(pickle.dumps(answer)).hint == text
    assert answer.to_dict()["hint"] == text
    assert made.ask("Li", where={"name": "Xi"}).hint.startswith(
        "No rows match where={'name': 'Xi'}"
    )
    assert made.ask("Li", where=lambda row: False).hint == "No rows match where=<lambda>"
    assert made.ask("Hu", where="n is None").hint == ""
    # The filter leaves out the row of Li, so another word matches best.
    hint = "the best key, Hu, has no word like 'Li': check that it is what you mean"
    assert made.ask("Li", where="n is None").hint == hint
    with pytest.warns(NoRowsMatchWarning, match=re.escape(f"{text}. The output is 0")):
        assert made.attend("Li", where="n > 5").tolist() == [0.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.attend("Li", where="n > 1")


def test_rows_that_match_without_a_value_are_said():
    made = qkv.Database.from_columns(
        {"name": ["Li", "Mu"], "n": [1, 2], "v": [1.0, None]}, key="name", value="v"
    )
    message = "1 row match where='n == 2', but none of them has a value"
    assert made.ask("Li", where="n == 2").hint == message.replace("1 row match", "1 row matches")


def test_a_column_may_have_any_name():
    row = {"_column_0_0": 1, "first name": 2, "_column_0": 3}
    assert filter_rows("_column_0_0 == 1 and `first name` == 2 and _column_0 == 3", [row]) == [True]


def test_a_backtick_of_a_name_is_written_twice():
    row = {"a`tick`b": 1, "`": 2}
    assert filter_rows("`a``tick``b` == 1 and ```` == 2", [row]) == [True]
    for where in ("`a`tick`b` == 1", "`a` == 1", "`a``tick``b` + 1 == 2"):
        with pytest.raises(ArgumentError) as caught:
            compile_condition(where, list(row))
        assert "_column_" not in str(caught.value)


def test_an_error_names_columns_without_their_control_characters():
    with pytest.raises(ArgumentError, match=r"Known: '\\x1b\[31mred', year\.$"):
        compile_condition("yaer == 1", ["year", "\x1b[31mred"])


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ("year > 1) or (year < 2", ArgumentError, "cannot parse"),
        ("year\n> > 3", ArgumentError, "cannot parse"),
        ({"yaer": 1}, ArgumentError, "did you mean 'year'"),
        ("yaer > 3", ArgumentError, "did you mean 'year'"),
        ("year > > 3", ArgumentError, "cannot parse 'year > > 3' at character 8"),
        ("", ArgumentError, "cannot parse"),
        ("year > \0", ArgumentError, "cannot parse"),
        ("__import__('os')", ArgumentError, "not supported"),
        ("title.lower() == 'a'", ArgumentError, "not supported"),
        ("year + 1 > 3", ArgumentError, "not supported"),
        ("(lambda: 1)()", ArgumentError, "not supported"),
        ("year > 3j", ArgumentError, "not supported"),
        ("`year > 3", ArgumentError, "not closed"),
        ("year in 5", ArgumentError, "is not supported: write column in"),
        ("5 in title", ArgumentError, r"write title in \[5\]"),
        ("'a' < 3", DtypeError, "cannot be compared"),
        ("year between 1 and 5", ArgumentError, "for between, write 1900 <= year <= 1950"),
        ("title LIKE 'a%'", ArgumentError, "for like, write 'part of a text' in column"),
        ("year == 1 & stock == 2", ArgumentError, "write and for &"),
        ("year == 1 && stock == 2", ArgumentError, "write and for &"),
        ("(year == 1) | (stock == 2)", ArgumentError, "or for |"),
        ("year == 1, stock == 2", ArgumentError, "combine conditions with and / or"),
        ("year => 5", ArgumentError, "write <= and >="),
        ("year > 2024-02-01", ArgumentError, "write a date in quotes, as '2024-01-31'"),
        ("year > 2024-12-11", ArgumentError, "write a date in quotes, as '2024-01-31'"),
        ("year > 01.02.2024", ArgumentError, "write a date in quotes, as '2024-01-31'"),
        ("year > 1,5", ArgumentError, "write 1.5, with a decimal point"),
        ("\"genre\" = 'fiction'", ArgumentError, "write the column as genre"),
        ("'first name' == 'P'", ArgumentError, "write the column as `first name`"),
        (3, DtypeError, "must be a mapping"),
    ],
)
def test_what_is_not_understood_is_said(where, error, says):
    with pytest.raises(error, match=says):
        compile_condition(where, list(ROW))


@pytest.mark.parametrize("where", ["Höhe (cm) > 30", "first name == 'Li'", "q-1 > 3 and x == 1"])
def test_a_name_that_is_not_read_as_one_is_shown_in_backticks(where):
    names = ["Höhe (cm)", "first name", "q-1", "q", "x"]
    column = next(name for name in names if name in where)
    with pytest.raises(ArgumentError, match=re.escape(f"in backticks: `{column}`")):
        compile_condition(where, names)
    compile_condition(where.replace(column, f"`{column}`"), names)


@pytest.mark.parametrize(
    "where",
    ["year == 'x{}", "{} > 3", "`{}` > 3", "year + '{}'", "'{}' > 3", "((((({}"],
)
def test_an_error_quotes_little(where):
    with pytest.raises((ArgumentError, DtypeError)) as caught:
        compile_condition(where.format("y" * 400_000), list(ROW))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "where",
    [
        "title < 5",
        "title == 5",
        "title in [5, 6]",
        "year == '1988'",
        "year >= 'a'",
        "title < year",
        "'8' in year",
        {"year": "1988"},
        {"title": [1, 2]},
    ],
)
def test_text_is_not_compared_with_numbers(where):
    with pytest.raises(DtypeError, match="text cannot be compared with numbers"):
        filter_rows(where, [ROW])


def test_a_column_of_text_and_numbers_is_compared_with_either_where_it_is_equal():
    rows = [{"age": 50}, {"age": "unknown"}, {"age": None}]
    assert filter_rows("age == 50", rows) == [True, False, False]
    assert filter_rows("age != 'unknown'", rows) == [True, False, True]
    with pytest.raises(DtypeError, match="holds number, text"):
        filter_rows("age > 30", rows)


def test_cells_that_have_no_order_are_said():
    with pytest.raises(ArgumentError, match="1 cells that have no order"):
        filter_rows("tags > 3", [{"tags": [1, 2]}])
    assert filter_rows({"tags": [[1, 2]]}, [{"tags": [1, 2]}, {"tags": [1]}]) == [True, False]


def test_dates_are_compared_with_their_iso_text():
    day = datetime.date(2020, 3, 1)
    rows = [{"day": day}, {"day": datetime.date(2021, 1, 1)}, {"day": None}]
    assert filter_rows("day < '2020-12-31'", rows) == [True, False, False]
    assert filter_rows({"day": day}, rows) == [True, False, False]
    assert filter_rows("day == '2021-01-01'", rows) == [False, True, False]


def hours(zone=None):
    days = [(2024, 1, 1, 9), (2024, 1, 1, 12), (2024, 1, 2), (2024, 2, 3, 8, 30, 15, 500000)]
    return [{"at": datetime.datetime(*day, tzinfo=zone)} for day in days] + [{"at": None}]


@pytest.mark.parametrize(
    ("where", "right"),
    [
        ("at < '2024-01-01 12:00'", [0]),
        ("at <= '2024-01-01 12:00'", [0, 1]),
        ("at <= '2024-01-01T12:00'", [0, 1]),
        ("'2024-01-01 12:00' < at", [2, 3]),
        ("at == '2024-01-01 12:00'", [1]),
        ("at != '2024-01-01 12:00'", [0, 2, 3, 4]),
        ("at in ['2024-01-01 12:00', '2024-02-03 08:30:15.5', None]", [1, 3, 4]),
        ("at == '2024-01-02'", [2]),
        ("at > '2024-01-02'", [3]),
        ("at < '2024-02'", [0, 1, 2]),
        ("at >= '2024'", [0, 1, 2, 3]),
        ("'01-01' in at", [0, 1]),
        ({"at": "2024-01-01 12:00"}, [1]),
        ({"at": datetime.datetime(2024, 1, 1, 12)}, [1]),
        ({"at": datetime.date(2024, 1, 2)}, [2]),
    ],
)
def test_moments_are_compared_however_they_are_written(where, right):
    assert np.flatnonzero(filter_rows(where, hours())).tolist() == right


def test_moments_of_other_zones():
    berlin = datetime.timezone(datetime.timedelta(hours=1))
    rows = hours(berlin)
    assert filter_rows("at < '2024-01-01T11:30:00+00:00'", rows) == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert filter_rows("at == '2024-01-01T11:00Z'", rows) == [False, True, False, False, False]
    assert filter_rows("at < '2024-01-01 11:30'", rows) == [True, False, False, False, False]
    for where in ("at == '2024-01-01T12:00'", "at in ['2024-01-01 12:00']"):
        assert filter_rows(where, rows) == [False, True, False, False, False]
    assert filter_rows({"at": datetime.datetime(2024, 1, 1, 12)}, rows)[1]
    assert filter_rows("at == '2024-01-02'", rows) == [False, False, True, False, False]
    assert filter_rows("at != '2024-01-01T12:00'", rows) == [True, False, True, True, True]
    with pytest.raises(
        DtypeError, match=r"without a time zone.*T11:00:00\+00:00: write the time without"
    ):
        filter_rows("at < '2024-01-01T11:00Z'", hours())


def test_a_date_is_not_compared_with_what_is_none():
    for wrong in ("tomorrow", "2024-1-1"):
        with pytest.raises(DtypeError, match=f"'at' holds dates.*'{wrong}'.*2024-01-31"):
            filter_rows(f"at < '{wrong}'", hours())
    rows = [{"at": datetime.date(2024, 1, 1)}, {"at": "soon"}, {"at": "2024-01-01"}]
    assert filter_rows("at < 'tomorrow'", rows) == [True, True, True]
    assert filter_rows("at == '2024-01-01 00:00'", rows) == [True, False, False]
    assert filter_rows("at == 'soon'", rows) == [False, True, False]


def test_columns_of_days_and_moments_are_compared():
    rows = [{**row, "day": datetime.date(2024, 1, 2)} for row in hours()]
    assert filter_rows("at < day", rows) == [True, True, False, False, False]
    assert filter_rows("at <= day", rows) == [True, True, True, False, False]


@pytest.mark.parametrize("text", ["genre == fantasy", "genre in [poetry, 'x']", "fantasy"])
def test_a_word_without_quotes_is_reported(text):
    with pytest.raises(ArgumentError, match=r"unknown column '\w+'.* Write text in quotes\.$"):
        filter_rows(text, [{"genre": "fantasy"}])


def test_letters_that_look_alike_are_distinguished():
    """Python's grammar has one spelling for them, and a table may have both."""
    rows = [{"\u00e9": 1, "e\u0301": 10, "\u00b5m": 2, "\ufb01": 3}]
    assert filter_rows("\u00e9 == 1 and e\u0301 == 10", rows) == [True]
    assert filter_rows("e\u0301 == 1 or not (\u00e9 == 1)", rows) == [False]
    for name in ("\u00b5m", "\u03bcm"):  # the sign for a millionth, and the letter
        assert filter_rows(f"(({name}) > 1) and \ufb01", rows) == [True]
    with pytest.raises(ArgumentError, match="unknown column"):
        filter_rows("\uff45\u0301 == 1", rows)  # wide, and either of two


def test_numbers_that_no_float_holds_are_distinguished():
    big = 2**60
    rows = [{"n": big + i} for i in range(4)] + [{"n": float(big)}, {"n": Decimal("0.1")}]
    assert filter_rows(f"n == {big + 1}", rows) == [False, True, False, False, False, False]
    assert filter_rows(f"n == {big}", rows) == [True, False, False, False, True, False]
    assert filter_rows(f"n > {big + 1}", rows) == [False, False, True, True, False, False]
    assert filter_rows(f"n <= {big}", rows) == [True, False, False, False, True, True]
    assert filter_rows("n < 0.1", rows)[-1] is (Decimal("0.1") < 0.1)
    assert filter_rows("n > 1" + "0" * 400, rows) == [False] * 6
    assert filter_rows("n == m", [{"n": big, "m": big + 1}, {"n": 3, "m": 3.0}]) == [False, True]
    assert filter_rows("n < m", [{"n": big, "m": big + 1}, {"n": 3, "m": None}]) == [True, False]


MIXED = [
    ("year < 1950 or genre == 'drama'", lambda r: _less(r["year"], 1950) or r["genre"] == "drama"),
    ("not year < 1950", lambda r: r["year"] is not None and r["year"] >= 1950),
    ("genre in ['poetry', 'drama', None]", lambda r: r["genre"] in ["poetry", "drama", None]),
    ("'o' in genre", lambda r: r["genre"] is not None and "o" in r["genre"]),
    ("genre > 'drama'", lambda r: r["genre"] is not None and r["genre"] > "drama"),
    ("name >= 'row 5'", lambda r: r["name"] >= "row 5"),
    ("price == year", lambda r: r["price"] == r["year"]),
    (
        "1900 <= year <= 2000 and not genre == 'drama'",
        lambda r: r["year"] is not None and 1900 <= r["year"] <= 2000 and r["genre"] != "drama",
    ),
    (lambda r: r["name"].endswith("7"), lambda r: r["name"].endswith("7")),
]


def _less(x, y):
    return x is not None and x < y


def books(rows, rng):
    genres = ["poetry", "drama", "science fiction", None]
    years = [None, *range(1800, 2020)]
    return {
        "name": [f"row {i}" for i in range(rows)],
        "genre": [genres[i] for i in rng.integers(4, size=rows)],
        "year": [years[i] for i in rng.integers(len(years), size=rows)],
        "price": [float(x) for x in rng.integers(1890, 1910, size=rows)],
    }


@pytest.mark.parametrize("kept", [300, 9000])
def test_a_database_keeps_the_rows_that_python_would(tmp_path, kept):
    made = qkv.Database.from_columns(
        books(kept, np.random.default_rng(0)), key="name", value="price", encoder="characters"
    )
    made.remove([f"row {i}" for i in range(0, kept, 7)])
    made.extend([{"name": "late 7", "genre": "drama", "year": None, "price": 1.0}])
    rows = list(made.rows())
    for where, passes in MIXED:
        expected = np.array([bool(passes(row)) for row in rows])
        for _ in range(2):  # the second time it is remembered
            np.testing.assert_array_equal(made._view.filter_rows(where), expected, str(where))


@pytest.mark.parametrize("share", [0.001, 0.1, 0.9])
@pytest.mark.parametrize("weighting", ["softmax", "hard", "sparsemax", "sigmoid", "average"])
def test_an_answer_is_that_of_a_database_of_the_rows_that_pass(share, weighting):
    rng = np.random.default_rng(1)
    keys, values, u = rng.normal(size=(9000, 4)), rng.normal(size=9000), rng.random(9000)
    columns = {"key": keys, "value": values, "u": u}
    made = qkv.Database.from_columns(columns, key="key", value="value")
    passes = u < share
    alone = qkv.Database(keys[passes], values[passes])
    query = rng.normal(size=4)
    answer = made.ask(query, where=f"u < {share}", weighting=weighting, score="dot")
    expected = alone.ask(query, weighting=weighting, score="dot")
    np.testing.assert_allclose(answer.value, expected.value, rtol=1e-6)
    np.testing.assert_allclose(answer.spread, expected.spread, rtol=1e-6)
    np.testing.assert_allclose(answer.weights[passes], expected.weights, rtol=1e-5, atol=1e-9)
    assert not answer.weights[~passes].any() and answer.total == passes.sum()
    assert [row.weight for row in answer.rows] == [answer.weights[r.index] for r in answer.rows]
    assert [r.value for r in answer.rows] == [r.value for r in expected.rows]
    assert answer.entropy == pytest.approx(expected.entropy, rel=1e-5, abs=1e-9)
    np.testing.assert_allclose(
        made.attend(query[None], where=f"u < {share}", weighting=weighting, score="dot"),
        alone.attend(query[None], weighting=weighting, score="dot"),
        rtol=1e-6,
    )


def test_a_column_of_vectors_is_said():
    made = qkv.Database(np.eye(3), np.eye(3))
    with pytest.raises(ArgumentError, match="column 'value' holds vectors"):
        made.ask(np.ones(3), where="value > 3")


def test_columns_survive_versions_removals_and_compaction(tmp_path):
    table = books(6000, np.random.default_rng(3))
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    path = tmp_path / "d.qkv"
    with qkv.open(path, key="name", value="price", encoder="exact") as made:
        for start in range(0, len(rows), 2000):
            made.extend(rows[start : start + 2000])
        made.remove([f"row {i}" for i in range(0, 6000, 5)])
        made.update("row 7", 3.0)
        made.add("late 7", None)
        before = made.at(2)
        assert before._view.filter_rows("year < 1900").sum() == sum(
            row["year"] is not None and row["year"] < 1900 for row in rows[:4000]
        )
        del before
        made.compact()
    with qkv.open(path) as made:
        for where, passes in MIXED:
            expected = [bool(passes(row)) for row in made.rows()]
            np.testing.assert_array_equal(made._view.filter_rows(where), expected, str(where))
        assert made.ask("late 7", score="exact", weighting="hard").missing == 1


@pytest.mark.parametrize("others", [[1.5, 2], ["x", None], [2**70, -1], [None, None]])
@pytest.mark.parametrize("absent", [None, float("nan"), -float("nan")])
def test_two_missing_cells_are_equal_whatever_other_rows_hold(others, absent):
    rows = [{"n": absent, "m": None}, *({"n": other, "m": "text"} for other in others)]
    assert filter_rows("n == m", rows) == [True, False, False]
    assert filter_rows("m != n", rows) == [False, True, True]
    assert columns.encode_column([row["n"] for row in rows]).codes[0] == 0


def test_a_vector_equals_the_list_of_its_numbers():
    rows = [{"x": np.array([1.0, 2.0])}, {"x": [1.0, 2.0]}, {"x": np.array([1.0])}, {"x": None}]
    for same in ([1.0, 2.0], [1, 2], np.array([1.0, 2.0], np.float32)):
        assert filter_rows({"x": [same]}, rows) == [True, True, False, False]


def test_texts_of_pieces_of_one_size_are_distinguished(monkeypatch):
    """The texts that are cached of a column belong to one piece of the rows."""
    monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 2)
    made = qkv.Database(key="name", value="city", encoder="exact")
    for piece in (["a", "b", "c"], ["d", "a", "e"], ["c", "f", "a"]):
        made.extend([{"name": f"{len(made) + i}", "city": x} for i, x in enumerate(piece)])
    assert [len(part.ids) for part in made._view.snapshot.iterate_segments()] == [3, 3, 3]
    for _ in range(2):
        assert made._view.filter_rows("city < 'b'").tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 1]
        assert made._view.filter_rows("'e' in city").tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0]


def test_a_missing_number_is_not_zero():
    made = qkv.Database(key="name", value="stock", encoder="exact")
    made.extend([{"name": x, "stock": y} for x, y in (("a", 0.0), ("b", None), ("c", 1.5))])
    assert made._view.filter_rows("stock == 0").tolist() == [True, False, False]
    assert made._view.filter_rows("stock in [0, 1.5]").tolist() == [True, False, True]
