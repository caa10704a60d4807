"""Sheets of workbooks: cells as they were typed, which sheet, and what is wrong with a file."""

from __future__ import annotations

import datetime

import pytest

import qkv
from qkv.database.sources import SourceError, read
from qkv.errors import MissingExtraError

openpyxl = pytest.importorskip("openpyxl")

BOOKS = [
    ("title", "year", "price", "read", "when", 2024),
    ("Emma", 1815, 3.5, True, datetime.date(2020, 1, 2), "x"),
    (None,) * 6,
    ("Ulysses", 1922, 4, False, datetime.datetime(2020, 1, 2, 3, 4), 7),
    ("NA", None, "#N/A", None, None, " "),
]


def book(path, **sheets):
    made = openpyxl.Workbook()
    made.remove(made.active)
    for name, rows in sheets.items():
        sheet = made.create_sheet(name)
        for row in rows:
            sheet.append(row)
    made.save(path)
    return path


@pytest.fixture
def books(tmp_path):
    return book(tmp_path / "books.xlsx", books=BOOKS, empty=[])


def test_cells_are_what_they_are_in_the_sheet(books):
    result = read(books)
    assert result.name == "books"
    assert result.columns == {
        "title": ["Emma", "Ulysses", None],
        "year": [1815, 1922, None],
        "price": [3.5, 4.0, None],
        "read": [True, False, None],
        "when": [datetime.datetime(2020, 1, 2), datetime.datetime(2020, 1, 2, 3, 4), None],
        "2024": ["x", 7, None],
    }
    assert [type(x) for x in result.columns["year"][:2]] == [int, int]


def test_words_for_missing_are_one_s_own(books):
    assert read(books, missing=["Emma"]).columns["title"] == [None, "Ulysses", "NA"]


def test_a_sheet_of_several_is_named(tmp_path):
    path = book(tmp_path / "two.xlsx", one=[("a",), (1,)], two=[("b",), (2,)])
    with pytest.raises(SourceError, match=r"2 tables \(one, two\): choose one with table='one'"):
        read(path)
    assert read(path, table="two").columns == {"b": [2]}
    with pytest.raises(SourceError, match="tow"):
        read(path, table="tow")


def test_a_sheet_that_is_hidden_is_read_by_name_alone(tmp_path):
    path = book(tmp_path / "hidden.xlsx", seen=[("a",), (1,)], kept=[("b",), (2,)])
    made = openpyxl.load_workbook(path)
    made["kept"].sheet_state = "hidden"
    made.save(path)
    assert read(path).columns == {"a": [1]}
    assert read(path, table="kept").columns == {"b": [2]}


def test_a_table_may_begin_below_and_right_of_the_corner(tmp_path):
    path = book(tmp_path / "far.xlsx", far=[(), (), (None, "a", None, "b"), (None, 1, None, 2)])
    assert read(path).columns == {"a": [1], "b": [2]}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([("a", None), (1, 2)], "line 1: column 2 of 2 has no name"),
        ([("a", "a"), (1, 2)], "columns 1, 2 are all named 'a'"),
        ([("a", "b")], "only column names but no rows"),
        ([], "there are no tables to read"),
    ],
)
def test_what_is_no_table_is_reported(tmp_path, rows, says):
    with pytest.raises(SourceError, match=says):
        read(book(tmp_path / "odd.xlsx", odd=rows))


def test_a_file_that_is_no_workbook(tmp_path, books):
    cut = tmp_path / "cut.xlsx"
    cut.write_bytes(books.read_bytes()[:2000])
    with pytest.raises(SourceError, match=r"the workbook cannot be read \(.*save the sheet as CSV"):
        read(cut)
    text = tmp_path / "text.xlsx"
    text.write_text("a,b\n1,2\n")
    with pytest.raises(SourceError, match="not a workbook: the first bytes do not match"):
        read(text)
    with pytest.raises(SourceError, match=r"rename it to \.xlsx"):
        read(books.rename(tmp_path / "books.csv"))


def test_without_its_package_the_error_names_the_extra(books, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "python_calamine", None)
    with pytest.raises(MissingExtraError, match=r"qkv\[tables\]"):
        read(books)


def test_a_workbook_is_a_database(books):
    with pytest.warns(UserWarning, match="1 of 3 rows has no key"):
        database = qkv.Database.from_source(books, key="title", value="year")
    assert database["Ulysses"] == 1922 and len(database) == 2
