from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import io
import json
import lzma
import math
import os
import sqlite3
import sys
import threading
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.database import Database, sources
from qkv.database.errors import MixedColumnWarning, NoHeaderWarning, SkippedRowsWarning
from qkv.database.sources import SourceError, Table, from_frame, read
from qkv.database.sources.table import to_plain_cell
from qkv.database.sources.type_inference import MISSING_WORDS, parse_numbers
from qkv.errors import CombinationError, DtypeError, MissingExtraError, QkvError


def write(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def catch_source_error(source: Any, **options: Any) -> SourceError:
    with pytest.raises(SourceError) as caught:
        read(source, **options)
    assert isinstance(caught.value, QkvError) and isinstance(caught.value, ValueError)
    return caught.value


def columns(folder: Path, name: str, data: str | bytes, **options: Any) -> dict[str, list[Any]]:
    return read(write(folder, name, data), **options).columns


# CSV


def test_csv_has_types_by_column(tmp_path):
    text = "name,year,price,flag\nEmma,1815,2.5,true\nUlysses,1922,,false\n"
    table = read(write(tmp_path, "books.csv", text))
    assert table == Table(
        "books",
        {
            "name": ["Emma", "Ulysses"],
            "year": [1815, 1922],
            "price": [2.5, None],
            "flag": ["true", "false"],
        },
    )
    assert len(table) == 2
    assert [type(x) for x in table.columns["year"]] == [int, int]


def test_decimal_commas_do_not_part_cells_where_semicolons_do(tmp_path):
    path = tmp_path / "cities.csv"
    path.write_text("Berlin;3,6;1,5\nParis;2,1;0,5\n")
    result = sources.read(path, names=["city", "people", "rank"]).columns
    assert result == {"city": ["Berlin", "Paris"], "people": [3.6, 2.1], "rank": [1.5, 0.5]}


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("ending", ["csv", "txt"])
def test_delimiter_is_sniffed(tmp_path, delimiter, ending):
    text = f'a{delimiter}b\n1{delimiter}"x, y; z | w"\n'
    assert columns(tmp_path, f"t.{ending}", text) == {"a": [1], "b": ["x, y; z | w"]}


def test_delimiter_survives_a_record_that_the_sample_cuts(tmp_path):
    text = "a;b\n" + "1;x\n" * 20_000 + '2;"' + "y,\n" * 50 + '"\n'
    table = columns(tmp_path, "t.csv", text)
    assert len(table["a"]) == 20_001 and table["b"][-1] == "y,\n" * 50


def test_decimal_commas_do_not_win_over_semicolons(tmp_path):
    text = "a;b\n1,5;2,5\n3,5;4,5\n"
    assert columns(tmp_path, "t.csv", text) == {"a": [1.5, 3.5], "b": [2.5, 4.5]}


def test_commas_are_points_between_semicolons(tmp_path):
    text = """Ort;Umsatz;Leute;Anteil;Wort
    Köln;1.234,56;1.086;-0,5;a,b
    Bonn;999,5;336;NA;1,5
    Unna;12;59;1,5E+03;2,5
    """
    assert columns(tmp_path, "t.csv", text.replace("    ", "")) == {
        "Ort": ["Köln", "Bonn", "Unna"],
        "Umsatz": [1234.56, 999.5, 12.0],
        "Leute": [1086, 336, 59],
        "Anteil": [-0.5, None, 1500.0],
        "Wort": ["a,b", "1,5", "2,5"],
    }
    prices = "a;price;n\nx;1.234,50 €;1.000\ny;EUR 0,99;12\n"
    assert columns(tmp_path, "t.csv", prices)["n"] == [1000, 12]
    assert columns(tmp_path, "t.csv", prices.replace(",50", "").replace(",", ""))["n"] == [1.0, 12]
    # Where nothing tells that a comma is a point, points stay what they were.
    assert columns(tmp_path, "t.csv", "a;b\nx;1.086\ny;1.5\n")["b"] == [1.086, 1.5]
    assert columns(tmp_path, "t.csv", 'a,b\nx,"1,5"\ny,"2,5"\n')["b"] == ["1,5", "2,5"]


def test_a_comma_that_may_part_thousands_is_reported(tmp_path):
    with pytest.warns(
        MixedColumnWarning, match="'b' is read as text: '1,234' may be 1.234 or 1234"
    ):
        assert columns(tmp_path, "t.csv", "a;b\nx;1,234\ny;20,345\n")["b"] == ["1,234", "20,345"]
    assert columns(tmp_path, "t.csv", "a;b\n0,5;1,234\n1,5;20,345\n")["b"] == [1.234, 20.345]


def test_commas_separate_thousands_if_a_decimal_point_follows(tmp_path):
    text = """city,sales,people,code,list
    A,"1,234.50","1,086",007,"1,2"
    B,99.5,336,"1,000","100,200"
    C,NA,"-12,000,000",8,3
    """
    assert columns(tmp_path, "t.csv", text.replace("    ", "")) == {
        "city": ["A", "B", "C"],
        "sales": [1234.5, 99.5, None],
        "people": [1086, 336, -12000000],
        "code": ["007", "1,000", "8"],
        "list": ["1,2", "100,200", "3"],
    }
    with pytest.warns(
        MixedColumnWarning, match="'b' is read as text: '12,000' may be 12000 or a list"
    ):
        result = columns(tmp_path, "t.csv", 'a,b\nx,"12,000"\ny,7\n')
    assert result["b"] == ["12,000", "7"]


@pytest.mark.parametrize("text", ["a;b\n0,5;1.086\n", 'a,b\n"1,234.5","1,086"\n'])
def test_a_column_that_stays_text_keeps_its_marks(tmp_path, text):
    (tmp_path / "t.csv").write_text(text)
    result = sources.read(tmp_path / "t.csv", text=["b"]).columns
    assert result["b"] == [text.splitlines()[1].replace('"', "")[-5:]]
    assert result["a"] in ([0.5], [1234.5])


def test_decimal_commas_of_many_files(tmp_path):
    write(tmp_path, "1.csv", "a;b\n1,5;x\n")
    write(tmp_path, "2.csv", "a;b\n2,25;y\n")
    assert read(str(tmp_path / "*.csv")).columns == {"a": [1.5, 2.25], "b": ["x", "y"]}
    write(tmp_path, "3.csv", "a,b\n1.5,z\n")
    assert read(str(tmp_path / "*.csv")).columns["a"] == [1.5, 2.25, 1.5]


@pytest.mark.parametrize(
    "text, names",
    [
        ("Berlin,3.6,1237\nParis,2.1,250\n", "abc"),
        ("Ann,34\nBo,27\n", "ab"),
        ("3,6;x\n4,7;y\n", "ab"),
        ("7,3\n1,2\n", "ab"),
        ("1\t5\n3\t4\n", "ab"),
    ],
)
def test_a_first_line_of_numbers_above_numbers_is_reported(tmp_path, text, names):
    path = write(tmp_path, "t.csv", text)
    message = "line 1 looks like a row, not like column names: .* names="
    with pytest.warns(NoHeaderWarning, match=message) as result:
        assert len(read(path)) == 1
    assert [x.filename for x in result] == [__file__]  # the line that called
    assert len(read(path, names=list(names))) == 2


@pytest.mark.parametrize(
    "text",
    [
        "land,2019,2020\nDE,2,3\n",  # years
        "land,2021,2020\nDE,2,3\n",
        "id,0,1\nx,2,3\n",  # places
        "id,400.5,401.7,404.1,410\nx,1,2,3,4\n",  # wavelengths
        "a,7\nx,y\n",
        "7\nx\n",
        "name,7\n3,4\n",
    ],
)
def test_names_that_are_numbers_are_names(tmp_path, text):
    assert len(read(write(tmp_path, "t.csv", text))) == 1


def test_names_for_a_table_without_any(tmp_path):
    path = write(tmp_path, "t.csv", "Berlin,3.6\nParis,2.1\n")
    assert read(path, names=["city", "people"]).columns == {
        "city": ["Berlin", "Paris"],
        "people": [3.6, 2.1],
    }
    write(tmp_path, "u.csv", "Rome,2\n")
    both = read(str(tmp_path / "*.csv"), names=("city", "people"))
    assert both.columns["people"] == [3.6, 2.1, 2.0]
    says = catch_source_error(path, names=["city"])
    assert "line 1: this line has 2 cells, but names= has 1" in str(says)
    assert "are all named 'a'" in str(catch_source_error(path, names=["a", "a"]))
    headed = write(tmp_path, "v.csv", "city,people\nRome,2\n")
    assert "line 1: this line contains the same names already" in str(
        catch_source_error(headed, names=["city", "people"])
    )
    with pytest.raises(DtypeError, match="names must be a list of names"):
        read(path, names="city,people")  # type: ignore[arg-type]
    lines = write(tmp_path, "t.jsonl", '{"a": 1}\n')
    with pytest.raises(CombinationError, match="has column names: leave names= out"):
        read(lines, names=["a"])
    twice = write(tmp_path, "iris.csv", "5.1,3.5,3.5,setosa\n4.9,3.0,1.4,setosa\n")
    assert "if this is a row, give names=" in str(catch_source_error(twice))


def test_one_column_needs_no_delimiter(tmp_path):
    assert columns(tmp_path, "t.csv", "n\n1\n2\n") == {"n": [1, 2]}
    assert columns(tmp_path, "t.txt", "line\nHello, world\n") == {"line": ["Hello, world"]}


def test_csv_marks_line_ends_and_quotes(tmp_path):
    data = b'\xef\xbb\xbfa,b\r\n"x\r\ny","say ""hi"""\r\n\r\n"z, w",q\r'
    assert columns(tmp_path, "t.csv", data) == {
        "a": ["x\r\ny", "z, w"],
        "b": ['say "hi"', "q"],
    }


def test_other_separators_of_lines_are_text(tmp_path):
    text = "a,b\nx\x0by,1\nz\u2028w,2\n"
    assert columns(tmp_path, "t.csv", text) == {"a": ["x\x0by", "z\u2028w"], "b": [1, 2]}


def test_columns_without_a_name_that_say_nothing_are_left_out(tmp_path):
    by_pandas = ",a,b\n0,x,1\n1,y,2\n"
    assert columns(tmp_path, "t.csv", by_pandas) == {"a": ["x", "y"], "b": [1, 2]}
    assert columns(tmp_path, "t.csv", "a, ,b,\nx,,1,\ny, ,2,\n") == {"a": ["x", "y"], "b": [1, 2]}
    assert "column 1 of 2 has no name" in str(
        catch_source_error(write(tmp_path, "t.csv", ",a\n0,x\n2,y\n"))
    )
    assert "column 2 of 2 has no name" in str(
        catch_source_error(write(tmp_path, "t.csv", "a,\nx,0\ny,1\n"))
    )
    assert "no columns" in str(catch_source_error(write(tmp_path, "t.csv", ",\n,\n")))
    assert "no rows" in str(catch_source_error(write(tmp_path, "t.csv", "a,\n")))


def test_tsv_keeps_commas(tmp_path):
    assert columns(tmp_path, "t.tsv", "a,x\tb\n1,2\t3\n") == {"a,x": ["1,2"], "b": [3]}


def test_csv_on_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a;b\n1;2\n")))
    assert read("-") == Table("stdin", {"a": [1], "b": [2]})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\x1f\x8b\x08")))
    assert "gzip" in str(catch_source_error("-"))


@pytest.mark.parametrize(
    ("text", "line", "column", "says"),
    [
        ("a,b\n1,x\n2,y,z\n", 3, 5, "3 cells, but the header has 2"),
        ("a,b\n1,x\n2\n", 3, 2, "1 cell, but the header has 2"),
        ('a,b\n"x\ny","1\n2",3\n', 4, 4, "3 cells, but"),
        ('a,b\r\n1,x\r\n2,"y\r\n', 3, 3, "never closes"),
        ('a,b\n1,x\n2,"y" z\n', 3, 6, "' ' follows a closing quote"),
        ('a,b\n"foo,1\n"bar",2\n', 3, 2, "opens at line 2, column 1"),
        ("a,b\n1,x\0\n", 2, 4, "NUL"),
        ("\n\na,a\n1,2\n", 3, None, "columns 1, 2 are all named 'a'"),
        ("a,,c\n1,2,3\n", 1, None, "column 2 of 3 has no name"),
        ("a, \n1,2\n", 1, None, "column 2 of 2 has no name"),
        ("a,b\n", None, None, "no rows"),
        ("", None, None, "empty"),
        ("\ufeff\r\n\n", None, None, "empty"),
    ],
)
def test_broken_csv_is_placed(tmp_path, text, line, column, says):
    error = catch_source_error(write(tmp_path, "t.csv", text))
    assert (error.line, error.column) == (line, column)
    assert says in str(error)
    assert str(error).startswith(str(tmp_path / "t.csv"))
    if line is not None:
        assert f"line {line}" in str(error)


def test_ragged_rows_are_found_in_a_later_batch(tmp_path):
    error = catch_source_error(
        write(tmp_path, "t.csv", "a,b\n" + "1,2\n" * 40_000 + "1,2,3\n" + "1,2\n" * 9)
    )
    assert (error.line, error.column) == (40_002, 5)


@pytest.mark.parametrize("before", ["café\n", ""])
def test_wrong_encoding_names_byte_and_place(tmp_path, before):
    data = b"a,b\n" + before.encode() + b"1,caf\xe9\n"
    error = catch_source_error(write(tmp_path, "t.csv", data))
    assert (error.line, error.column) == (3 if before else 2, 6)
    assert all(x in str(error) for x in ("0xe9", "iconv", "'CSV UTF-8' in the spreadsheet"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_other_unicode_is_named(tmp_path, encoding):
    error = catch_source_error(write(tmp_path, "t.csv", "a,b\n1,2\n".encode(encoding)))
    assert f"iconv -f {encoding.upper()}" in str(error)


def test_utf16_without_mark_is_suspected(tmp_path):
    error = catch_source_error(write(tmp_path, "t.csv", "a,b\n1,2\n".encode("utf-16-le")))
    assert (error.line, error.column) == (1, 2) and "UTF-16LE" in str(error)
    error = catch_source_error(write(tmp_path, "t.csv", "a,b\n1,é\n".encode("utf-16-le")))
    assert (error.line, error.column) == (1, 2) and "UTF-16LE" in str(error)


@pytest.mark.parametrize("quote", ["", '"'])
def test_huge_fields(tmp_path, quote):
    text = f"a,b\n1,{quote}{'x' * (16 * 2**20)}{quote}\n"
    assert len(columns(tmp_path, "t.csv", text)["b"][0]) == 16 * 2**20
    error = catch_source_error(
        write(tmp_path, "t.csv", f"a,b\n1,{quote}{'x' * (16 * 2**20 + 1)}{quote}\n")
    )
    assert (error.line, error.column) == (2, 3) and "16,777,216" in str(error)


def test_the_limit_of_csv_is_put_back(tmp_path):
    before = csv.field_size_limit()
    write(tmp_path, "t.csv", "a,b\n" + f"{'x' * 200_000},1\n" * 20)
    result: list[int] = []

    def work() -> None:
        result.extend(len(read(tmp_path / "t.csv")) for _ in range(3))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == [20] * 12
    assert csv.field_size_limit() == before


# Numbers


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1", "-2", "0"], [1, -2, 0]),
        (["1", "", "3"], [1, None, 3]),
        (["9223372036854775807", "-9223372036854775808"], [2**63 - 1, -(2**63)]),
        (["1.5", "2", "-3.25"], [1.5, 2.0, -3.25]),
        (["1.0", "2.5"], [1.0, 2.5]),
        (["3.5", "4", "4.0", "3.85"], [3.5, 4.0, 4.0, 3.85]),
        (["3", "nan"], [3, None]),
        (["1.5", "NA", "NULL", "#N/A", "n/a", "None", "<NA>", " "], [1.5] + [None] * 7),
        ([" 1", "2 "], [1, 2]),
        ([" 1.5", "2 ", " NA"], [1.5, 2.0, None]),
        (["2.50", "10.00", "-0.25"], [2.5, 10.0, -0.25]),
        (["0.1", "1e-05", "1e+16"], [0.1, 1e-05, 1e16]),
        (["0.1", "1e-5"], [0.1, 1e-05]),
        (["0.00001", "3", "0.5"], [1e-05, 3.0, 0.5]),
        (["1.000000000000000056e-01", "2.000000000000000000e+00"], [0.1, 2.0]),
        (["0.10000000000000001", "2.5"], [0.1, 2.5]),
        (["1.5", "inf", "-inf"], [1.5, math.inf, -math.inf]),
        (["1", "Infinity", "-Infinity", "+inf"], [1.0, math.inf, -math.inf, math.inf]),
        (["1.5", "infinity", " -INF", "+Infinity"], [1.5, math.inf, -math.inf, math.inf]),
    ],
)
def test_numbers(cells, expected):
    actual = parse_numbers(cells)
    np.testing.assert_equal(actual, expected)
    assert [type(x) for x in actual] == [type(x) for x in expected]


@pytest.mark.parametrize(
    "cells",
    [
        ["007", "8"],
        ["9223372036854775808"],
        ["100000000000000000000"],
        ["9" * 5000],
        ["0." + "1" * 5000],
        ["0.12345678901234567890123"],
        ["9007199254740993", "0.5"],
        ["1e400", "1.5"],
        ["-0", "0"],
        ["+1"],
        ["1_000"],
        ["１２"],
        ["1,5"],
        ["true", "false"],
        ["inf"],
        ["Infinity", "-inf"],
        ["1.5", "infinite"],
        ["1.5", "--inf"],
        ["+1", "inf"],
        [" x", "1 "],
        ["1", "x"],
    ],
)
def test_what_would_lose_digits_stays_text(cells):
    assert parse_numbers(cells) == cells


@pytest.mark.parametrize("word", [*MISSING_WORDS, "", " "])
def test_missing_cells_are_known_by_their_words(word):
    assert parse_numbers(["1.50", word, "", "2.25"]) == [1.5, None, None, 2.25]
    assert parse_numbers(["x", word]) == ["x", None]
    assert parse_numbers([word, word]) == [None, None]


def test_a_word_that_is_no_missing_cell_has_a_way_out(tmp_path):
    path = tmp_path / "countries.csv"
    path.write_text("code,name,people\nNA,Namibia,3\nDE,,84\n,Null,-\n")
    columns = read(path).columns
    assert columns == {"code": [None, "DE", None], "name": ["Namibia", None, "Null"]} | {
        "people": ["3", "84", "-"]
    }
    columns = read(path, missing=()).columns
    assert columns["code"] == ["NA", "DE", None]
    columns = read(path, missing=["-"]).columns
    assert columns["code"] == ["NA", "DE", None] and columns["people"] == [3, 84, None]
    with pytest.raises(DtypeError, match="missing must be a list of words"):
        read(path, missing="NA")


@pytest.mark.parametrize("nan", ["nan", "NaN"])
def test_nan_that_is_not_missing_is_a_number_among_numbers(nan):
    result = parse_numbers(["1.50", nan, "", "2.25"], missing=())
    assert result[0] == 1.5 and math.isnan(result[1]) and result[2:] == [None, 2.25]
    assert parse_numbers([nan, nan], missing=()) == [nan, nan]
    assert parse_numbers([nan, "x"], missing=()) == [nan, "x"]


# JSON


def test_json_lines(tmp_path):
    text = '\ufeff{"a": 1, "b": "x"}\r\n\n{"b": [1, {"c": null}], "d": true}\n'
    assert columns(tmp_path, "t.jsonl", text) == {
        "a": [1, None],
        "b": ["x", [1, {"c": None}]],
        "d": [None, True],
    }
    assert columns(tmp_path, "t.ndjson", '{"a": 12345678901234567890}') == {
        "a": [12345678901234567890]
    }


def test_json_array(tmp_path):
    assert columns(tmp_path, "t.json", ' [{"a": 1},\n {"a": 0.5}\n]\n') == {"a": [1, 0.5]}


def test_json_not_a_number(tmp_path):
    result = columns(tmp_path, "t.jsonl", '{"a": NaN}\n{"a": -Infinity}')["a"]
    assert math.isnan(result[0]) and result[1] == -math.inf


@pytest.mark.parametrize(
    ("text", "line", "column", "says"),
    [
        ('{"a": 1}\n{"a": 2,,}\n', 2, 9, "invalid JSON"),
        ('{"a": 1}\n  {"a": 1} x\n', 2, 12, "text after the object"),
        ('{"a": 1}\n[1]\n', 2, 1, "for each row, not a list"),
        ('{"a": "x\n', 1, 7, "invalid JSON"),
        ('[{"a": 1},\n {"a": 2}', 2, 10, "expecting ',' or ']'"),
        ('[{"a": 1},\n 5]', 2, 2, "for each row, not a number"),
        ('[{"a": 1}]\nx', 2, 1, "there is text after the list"),
        ('{\n"a": 1\n}', 1, 1, "one object over several lines"),
        ('{"a": 1, "a": 2}', 1, 1, "'a' twice"),
        ('{"a": 1}\n{"a": "\\ud800"}', 2, 1, "lone surrogate"),
        ('{"a": 1e999}', 1, 1, "too large for a float"),
        ('{"a": ' + "9" * 5000 + "}", 1, 1, "5,000 digits"),
        ('{"a": 1}\n{"a": ' + "9" * 401 + "}", 2, 1, "401 digits"),
        ('{"a": ' + "[" * 100_000, 1, 1, "nested too deeply"),
        ('{"": 1}', None, None, "no name"),
        ("\n []", 2, 2, "no objects"),
        ("[{}]", None, None, "no columns"),
        ('{"a": "\0"}', 1, 8, "NUL"),
    ],
)
def test_broken_json_is_placed(tmp_path, text, line, column, says):
    error = catch_source_error(write(tmp_path, "t.jsonl", text))
    assert (error.line, error.column) == (line, column)
    assert says in str(error)


def test_names_that_are_data_do_not_fill_the_memory(tmp_path):
    text = "\n".join(json.dumps({f"id{i}": i}) for i in range(5000))
    error = catch_source_error(write(tmp_path, "t.jsonl", text))
    assert error.line == 4097 and "4,096" in str(error)


def test_huge_json_field(tmp_path):
    error = catch_source_error(
        write(tmp_path, "t.jsonl", json.dumps({"a": "x" * (16 * 2**20 + 1)}))
    )
    assert "row 1 of column 'a'" in str(error)


# Parquet and Arrow


def arrow_table() -> Any:
    pa = pytest.importorskip("pyarrow")
    moment = datetime.datetime(2020, 1, 2, 3, 4, 5)
    return pa.table(
        {
            "text": ["x", None],
            "int": [1, 2],
            "missing": pa.array([1, None], pa.int32()),
            "float": [0.5, math.nan],
            "bool": [True, None],
            "bytes": [b"\0", b""],
            "list": [[1.5, 2.0], [0.5]],
            "struct": [{"a": moment}, {"a": None}],
            "date": [moment.date(), None],
            "moment": pa.array([moment, None], pa.timestamp("ns")),
            "fine": pa.array([1, 1_000_000_000], pa.timestamp("ns")),
            "utc": pa.array([moment, None], pa.timestamp("us", "UTC")),
            "price": [Decimal("2.50"), None],
            "exact": [Decimal("0.1234567890123456789012"), Decimal("1.5")],
            "whole": pa.array([Decimal("12345678901234567890"), None], pa.decimal128(30, 0)),
            "category": pa.array(["p", "q"]).dictionary_encode(),
        }
    )


ARROW = {
    "text": ["x", None],
    "int": [1, 2],
    "missing": [1, None],
    "bool": [True, None],
    "bytes": [b"\0", b""],
    "list": [[1.5, 2.0], [0.5]],
    "struct": [{"a": "2020-01-02T03:04:05"}, {"a": None}],
    "date": [datetime.date(2020, 1, 2), None],
    "moment": [datetime.datetime(2020, 1, 2, 3, 4, 5), None],
    "fine": ["1970-01-01T00:00:00.000000001", "1970-01-01T00:00:01.000000000"],
    "utc": [datetime.datetime(2020, 1, 2, 3, 4, 5, tzinfo=datetime.UTC), None],
    "price": [2.5, None],
    "exact": ["0.1234567890123456789012", "1.5000000000000000000000"],
    "whole": [12345678901234567890, None],
    "category": ["p", "q"],
}


def write_arrow(path: Path, table: Any) -> Path:
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet

    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, str(path))
    else:
        new = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("ending", ["parquet", "feather", "arrow", "arrows"])
def test_arrow_formats_keep_values(tmp_path, ending):
    with pytest.warns(
        MixedColumnWarning, match="'exact' is read as text: 1 of its 2 cells have more digits"
    ):
        result = read(write_arrow(tmp_path / f"t.{ending}", arrow_table()))
    assert result.name == "t"
    numbers = result.columns.pop("float")
    assert numbers[0] == 0.5 and math.isnan(numbers[1])
    assert result.columns == ARROW


def test_parquet_takes_no_columns_from_its_folder(tmp_path):
    pa = pytest.importorskip("pyarrow")
    (tmp_path / "year=1988").mkdir()
    path = write_arrow(tmp_path / "year=1988" / "t.parquet", pa.table({"a": [1]}))
    assert read(path).columns == {"a": [1]}


@pytest.mark.parametrize("ending", ["parquet", "feather", "arrow", "arrows"])
def test_truncated_arrow_formats(tmp_path, ending):
    pa = pytest.importorskip("pyarrow")
    path = write_arrow(tmp_path / f"t.{ending}", pa.table({"a": list(range(1000))}))
    path.write_bytes(path.read_bytes()[:700])
    error = catch_source_error(path)
    assert "again" in str(error) and error.file == str(path)


@pytest.mark.parametrize("kind", ["date32", "timestamp"])
def test_a_date_that_python_has_not_is_reported_with_its_column(tmp_path, kind):
    pa = pytest.importorskip("pyarrow")
    made = {"date32": pa.array([0, 2**31 - 1], pa.date32())}
    made["timestamp"] = pa.array([0, -(2**62)], pa.timestamp("us"))
    table = pa.table({"day": made[kind]})
    path = write_arrow(tmp_path / "t.parquet", table)
    for call in (lambda: from_frame(table), lambda: read(path)):
        with pytest.raises(
            SourceError, match=r"column .day. has a date .*convert the column to text"
        ):
            call()


def test_parquet_without_rows_or_with_double_names(tmp_path):
    pa = pytest.importorskip("pyarrow")
    empty = pa.table({"a": pa.array([], pa.int64())})
    assert "no rows" in str(catch_source_error(write_arrow(tmp_path / "t.arrow", empty)))
    double = pa.table([[1], [2]], names=["a", "a"])
    assert "all named 'a'" in str(catch_source_error(write_arrow(tmp_path / "t.arrow", double)))


def test_missing_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"qkv\[tables\]"):
        read(write(tmp_path, "t.parquet", b"PAR1....PAR1"))


# SQLite


def write_sqlite(path: Path, script: str) -> Path:
    with closing(sqlite3.connect(path)) as database:
        database.executescript(script)
    return path


BOOKS = """
create table books (title text, year int, price real, cover blob);
insert into books values ('Emma', 1815, 2.5, x'00ff'), (null, 1922, null, null);
"""
COLUMNS = {
    "title": ["Emma", None],
    "year": [1815, 1922],
    "price": [2.5, None],
    "cover": [b"\0\xff", None],
}


@pytest.mark.parametrize("name", ["t.db", "t.sqlite", "t.sqlite3", "t.csv", "t", "a?b#c%20.db"])
def test_sqlite(tmp_path, name):
    assert read(write_sqlite(tmp_path / name, BOOKS)) == Table("books", COLUMNS)


def test_sqlite_addresses(tmp_path, monkeypatch):
    write_sqlite(tmp_path / "my shop.db", BOOKS + "create table other (a); create view v as "
                 "select title from books where year < 1900;")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert read("sqlite:///my%20shop.db?table=books").columns == COLUMNS
    assert read("sqlite:///my shop.db", table="books").columns == COLUMNS
    assert read(f"sqlite:///{tmp_path}/my shop.db?table=v") == Table("v", {"title": ["Emma"]})
    query = "sqlite:///my shop.db?query=select year*2 as twice from books where year > 1900"
    assert read(query) == Table("my shop", {"twice": [3844]})
    assert read("sqlite:///my shop.db?query=select 1+1 as two").columns == {"two": [2]}
    with pytest.raises(CombinationError, match="differ"):
        read("sqlite:///my shop.db?table=books", table="other")
    with pytest.raises(CombinationError, match="pass only one of them"):
        read(query, table="books")
    assert "three slashes" in str(catch_source_error("sqlite://shop.db"))
    assert "no such file: did you mean 'my shop.db'?" in str(
        catch_source_error("sqlite:///my shp.db")
    )


def test_sqlite_tables_are_listed(tmp_path):
    path = write_sqlite(tmp_path / "t.db", BOOKS + "create table magazines (a);")
    assert "2 tables (books, magazines): choose one" in str(catch_source_error(path))
    assert "did you mean 'books'?" in str(catch_source_error(path, table="boks"))
    assert "no rows" in str(catch_source_error(path, table="magazines"))
    empty = write_sqlite(tmp_path / "e.db", "create table a (b); drop table a;")
    assert "no tables" in str(catch_source_error(empty))


def test_sqlite_names_are_quoted(tmp_path):
    path = write_sqlite(tmp_path / "t.db", 'create table "a ""b; drop" (c); '
                        'insert into "a ""b; drop" values (1);')  # fmt: skip
    assert read(path) == Table('a "b; drop', {"c": [1]})


def test_sqlite_is_only_read(tmp_path):
    path = write_sqlite(tmp_path / "t.db", BOOKS)
    before = path.read_bytes()
    assert "readonly" in str(catch_source_error(f"sqlite:///{path}?query=delete from books"))
    assert "syntax error" in str(catch_source_error(f"sqlite:///{path}?query=selekt"))
    assert "all named 'year'" in str(
        catch_source_error(f"sqlite:///{path}?query=select year, year from books")
    )
    assert path.read_bytes() == before


def test_damaged_sqlite(tmp_path):
    path = write_sqlite(tmp_path / "t.db", BOOKS)
    path.write_bytes(path.read_bytes()[:100])
    assert "SQLite cannot read the file" in str(catch_source_error(path))
    path = write_sqlite(tmp_path / "u.db", "create table a (b); insert into a values "
                        "(cast(x'ff41' as text));")  # fmt: skip
    assert "UTF-8" in str(catch_source_error(path))
    assert "not SQLite" in str(catch_source_error(write(tmp_path, "v.db", "a,b\n1,2\n")))


# Frames


def test_pandas_frame():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {
            "text": ["x", None],
            "object": pd.Series(["x", math.nan], dtype=object),
            "int": pd.Series([1, None], dtype="Int64"),
            "float": [0.5, math.nan],
            "bool": [True, False],
            "moment": [pd.Timestamp("2020-01-02"), pd.NaT],
            "list": [[1, 2], np.array([0.5])],
            "category": pd.Categorical(["p", "q"]),
        }
    )
    frame.index = [7, 9]
    table = from_frame(frame)
    numbers = table.columns.pop("float")
    assert numbers[0] == 0.5 and math.isnan(numbers[1])
    assert table.columns == {
        "text": ["x", None],
        "object": ["x", None],
        "int": [1, None],
        "bool": [True, False],
        "moment": [datetime.datetime(2020, 1, 2), None],
        "list": [[1, 2], [0.5]],
        "category": ["p", "q"],
    }
    assert [type(x) for x in table.columns["int"]] == [int, type(None)]


def test_polars_and_pyarrow_frames():
    pl, pa = pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    data = {"a": [1, None], "b": ["x", "y"], "c": [[0.5], [1.5]], "d": [{"e": 1}, {"e": 2}],
            "f": [datetime.date(2020, 1, 2), None], "g": [Decimal("2.5"), None]}  # fmt: skip
    expected = data | {"g": [2.5, None]}
    assert from_frame(pl.DataFrame(data)).columns == expected
    assert from_frame(pa.table(data)).columns == expected
    assert from_frame(pl.DataFrame({"a": []})) == Table("frame", {"a": []})


def test_a_table_of_arrow_has_the_cells_of_its_file():
    with pytest.warns(MixedColumnWarning, match="such as 0.1234567890123456789012. Round them"):
        assert from_frame(arrow_table().drop(["float"])).columns == ARROW


def test_days_of_a_frame_are_compared_as_days(tmp_path):
    pd = pytest.importorskip("pandas")
    days = [datetime.datetime(2023, 12, 31), datetime.datetime(2024, 2, 10), None]
    frame = pd.DataFrame({"day": pd.to_datetime(days), "price": [1.0, 3.0, 4.0]})
    frame.to_parquet(tmp_path / "t.parquet")
    query, options = datetime.date(2024, 1, 1), {"key": "day", "value": "price"}
    with pytest.warns(SkippedRowsWarning):
        made = [
            Database.from_frame(frame, **options),
            Database.from_columns(frame.to_dict("list"), **options),
        ]
        made.append(Database.from_source(tmp_path / "t.parquet", **options))
    for D in made:
        assert list(D) == days[:2] and D[days[0]] == 1.0
        # One day off, not the year that no letter has in common.
        assert D.ask(query).rows[0].key == days[0]
        assert D.ask(query).weights.tolist() == D.ask("2024-01-01").weights.tolist()
        assert D.ask(query).weights.tolist() == made[0].ask(query).weights.tolist()
    assert made[0].to_frame().equals(frame[:2])


@pytest.mark.parametrize("finer", [0, 1])
def test_nanoseconds_of_pandas_make_a_column_text(finer):
    pd = pytest.importorskip("pandas")
    times = [pd.Timestamp(10**9 + finer), pd.NaT, pd.Timestamp(2 * 10**9)]
    result = from_frame(pd.DataFrame({"when": times})).columns["when"]
    text = ["1970-01-01T00:00:01.000000001", None, "1970-01-01T00:00:02"]
    assert result == (
        text
        if finer
        else [datetime.datetime(1970, 1, 1, 0, 0, n) if n else None for n in (1, 0, 2)]
    )


def test_frames_that_cannot_be_kept():
    pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")
    with pytest.raises(DtypeError, match=r"path or a URL.* from_frame\(frame\)$"):
        read(pd.DataFrame({"a": [1]}))
    with pytest.raises(DtypeError, match="collect"):
        from_frame(pl.LazyFrame({"a": [1]}))
    with pytest.raises(DtypeError, match="dict"):
        from_frame({"a": [1]})
    with pytest.raises(SourceError, match="rename"):
        from_frame(pd.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(SourceError, match="named 0, of type int"):
        from_frame(pd.DataFrame([[1, 2]]))
    with pytest.raises(SourceError, match="row 2 of column 'a' holds a complex"):
        from_frame(pd.DataFrame({"a": pd.Series([1, 1j], dtype=object)}))
    with pytest.raises(SourceError, match="surrogate"):
        from_frame(pd.DataFrame({"a": pd.Series(["x\ud800"], dtype=object)}))


def test_missing_narwhals_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "narwhals", None)
    with pytest.raises(MissingExtraError, match=r"qkv\[tables\]"):
        from_frame(object())


def test_cells_are_plain():
    values = [np.int64(3), np.float32(0.5), np.bool_(True), np.str_("x"), np.datetime64("2020-01"),
              np.datetime64("NaT"), bytearray(b"x"), datetime.time(1, 2), (1, (2,)),
              {"a": np.arange(2)}, Decimal("NaN"), Decimal("1e400")]  # fmt: skip
    result = [to_plain_cell(value) for value in values]
    assert math.isnan(result.pop(-2))
    assert result == [3, 0.5, True, "x", "2020-01", None, b"x", "01:02:00", [1, [2]],
                     {"a": [0, 1]}, "1E+400"]  # fmt: skip
    assert {type(x) for x in result} <= {int, float, bool, str, type(None), bytes, list, dict}
    for bad in (object(), {1: 2}, {1, 2}, 1j, np.longdouble(1)):
        with pytest.raises(TypeError):
            to_plain_cell(bad)


# Which kind of source


@pytest.mark.parametrize(
    ("magic", "says"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0", "a PNG image"),
        (b"\xff\xd8\xff\xe0", "a JPEG image"),
        (b"PK\x03\x04\x14", "Excel"),
        (b"\x1f\x8b\x08", "gunzip"),
        (b"%PDF-1.7", "a PDF"),
        (b"FEA1\0\0", "Feather version 1"),
    ],
)
@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet", "t.db", "t"])
def test_strangers_are_known_by_their_first_bytes(tmp_path, magic, says, name):
    assert says in str(catch_source_error(write(tmp_path, name, magic)))


@pytest.mark.parametrize(
    ("ending", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)]
)
def test_text_may_be_packed(tmp_path, ending, pack):
    result = read(write(tmp_path, f"t.csv.{ending}", pack(b"a,b\n1,x\n2,y\n")))
    assert (result.name, result.columns) == ("t", {"a": [1, 2], "b": ["x", "y"]})
    path = write(tmp_path, f"t.jsonl.{ending}", pack(b'{"a": 1}\n{"a": 2}\n'))
    assert read(path).columns == {"a": [1, 2]}
    bad = write(tmp_path, f"cut.csv.{ending}", path.read_bytes()[:-5])
    assert "cannot be decompressed" in str(catch_source_error(bad))
    assert "is empty" in str(catch_source_error(write(tmp_path, f"none.csv.{ending}", pack(b""))))
    packed = write(tmp_path, f"t.parquet.{ending}", pack(b"PAR1 PAR1"))
    assert "Parquet in a compressed file: decompress it first" in str(catch_source_error(packed))
    assert f"rename it to .{ending}" in str(catch_source_error(path.rename(tmp_path / "t.csv")))


def test_first_bytes_win_over_the_ending(tmp_path):
    pa = pytest.importorskip("pyarrow")
    path = write_arrow(tmp_path / "t.parquet", pa.table({"a": [1]})).rename(tmp_path / "t.csv")
    assert read(path).columns == {"a": [1]}


def test_unknown_ending_is_sniffed(tmp_path):
    assert columns(tmp_path, "t.data", "a;b\n1;2\n") == {"a": [1], "b": [2]}
    assert columns(tmp_path, "t", ' [{"a": 1}]') == {"a": [1]}
    assert columns(tmp_path, "t.log", '{"a": 1}\n{"a": 2}') == {"a": [1, 2]}
    for data in (b"just words", bytes(range(1, 256)), b"a,b\n1\n"):
        assert ".ndjson" in str(catch_source_error(write(tmp_path, "t.data", data)))


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.json", "t.parquet", "t.arrow", "t.db", "t"])
def test_empty_files(tmp_path, name):
    assert "empty" in str(catch_source_error(write(tmp_path, name, b"")))


def test_a_pattern_is_all_files_that_fit(tmp_path):
    write(tmp_path, "b.csv", "id,x\n1,2.5\n007,\n")
    write(tmp_path, "a.csv", "id\n1\n2\n")
    write(tmp_path, "c.tsv", "y\tid\nNA\t3\n")
    write(tmp_path, "d.jsonl", '{"id": 4}\n')
    (tmp_path / "e.csv").mkdir()
    seen: list[tuple[int, int | None]] = []
    result = read(f"{tmp_path}/*.csv", progress=lambda *at: seen.append(at))
    assert result.columns == {"id": ["1", "2", "1", "007"], "x": [None, None, 2.5, None]}
    assert seen == [(1, 2), (2, 2)]
    assert read(f"{tmp_path}/[ac].?sv").columns == {"id": [1, 2, 3], "y": [None] * 3}
    assert read(f"{tmp_path}/[ad].*").columns == {"id": [1, 2, 4]}
    assert "no file matches" in str(catch_source_error(f"{tmp_path}/*.parquet"))
    for name in "ab":
        write(tmp_path, f"{name}.csv.gz", gzip.compress((tmp_path / f"{name}.csv").read_bytes()))
    assert read(f"{tmp_path}/*.gz").columns == result.columns
    write(tmp_path, "f.csv", "id,x\n1\n")
    assert str(catch_source_error(f"{tmp_path}/*.csv")).startswith(f"{tmp_path}/f.csv, line 2")
    assert read(write(tmp_path, "[a].csv", "id\n9\n")).columns == {"id": [9]}


def test_files_that_cannot_be_opened(tmp_path, monkeypatch):
    write(tmp_path, "books.csv", "a\n1\n")
    assert "did you mean 'books.csv'?" in str(catch_source_error(tmp_path / "book.csv"))
    assert "check the name" in str(catch_source_error(tmp_path / "zzz.parquet"))
    assert "there is no folder" in str(catch_source_error(tmp_path / "no" / "books.csv"))
    assert "there is no folder" in str(catch_source_error(tmp_path / "books.csv" / "x"))
    assert "qkv.open" in str(catch_source_error(tmp_path))
    assert "cannot be opened" in str(catch_source_error(tmp_path / ("x" * 5000)))
    assert "cannot be opened" in str(catch_source_error("a\0b.csv"))
    assert "the name of the source is empty" in str(catch_source_error(" "))

    def deny(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    assert "chmod" in str(catch_source_error(tmp_path / "books.csv"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
@pytest.mark.parametrize("name", ["pipe", "pipe.csv", "pipe.parquet"])
def test_a_pipe_is_read_once(tmp_path, name):
    path = tmp_path / name
    os.mkfifo(path)
    data = b"PAR1" if name.endswith("parquet") else b"a,b\n" + b"1,2\n" * 100_000
    writer = threading.Thread(target=path.write_bytes, args=(data,))
    writer.start()
    if name.endswith("parquet"):
        assert "save it to a file first" in str(catch_source_error(path))
    else:
        assert read(path).columns == {"a": [1] * 100_000, "b": [2] * 100_000}
    writer.join()


def test_sources_that_are_no_source(tmp_path):
    with pytest.raises(DtypeError, match="int"):
        read(5)  # type: ignore[arg-type]
    with pytest.raises(CombinationError, match="table='x'"):
        read(write(tmp_path, "t.csv", "a\n1\n"), table="x")
    assert "download" in str(catch_source_error("https://example.org/books.csv"))
    assert "qkv reads files" in str(catch_source_error("mysql://host/shop"))
    assert read(f"file://{tmp_path}/t.csv").columns == {"a": [1]}


def test_progress_reaches_its_total(tmp_path):
    pytest.importorskip("pyarrow")
    paths = [
        write(tmp_path, "t.csv", "a,b\n" + "1,2\n" * 40_000),
        write(tmp_path, "t.jsonl", '{"a": 1}\n' * 40_000),
        write_sqlite(tmp_path / "t.db", BOOKS),
        write_arrow(tmp_path / "t.parquet", arrow_table().drop(["exact"])),
    ]
    for path in paths:
        seen: list[tuple[int, int | None]] = []
        read(path, progress=lambda done, total, seen=seen: seen.append((done, total)))
        done = [each for each, _ in seen]
        assert done == sorted(done) and seen[-1][0] == seen[-1][1]


def test_an_interrupting_progress_is_heard(tmp_path):
    def stop(done: int, total: int | None) -> None:
        raise ValueError("enough")

    for name, data in (("t.csv", "a,b\n1,2\n"), ("t.jsonl", '{"a": 1}')):
        with pytest.raises(ValueError, match=r"^enough$"):
            read(write(tmp_path, name, data), progress=stop)


def test_public_names():
    names = [
        "read",
        "from_dataset",
        "from_frame",
        "register_source",
        "SourceFormat",
        "SourceRequest",
        "Table",
    ]
    assert sources.__all__ == [*names, "SourceError", "MISSING_WORDS"]


def test_a_few_words_among_numbers_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "ages.csv"

    def read_with(*odd: str) -> Any:
        path.write_text("\n".join(["age", *map(str, range(40)), *odd, ""]), encoding="utf-8")
        return read(path).columns["age"]

    with pytest.warns(MixedColumnWarning, match=r"3 of its 43 cells .* 'two', '-\?'"):
        assert read_with("two", "two", "-?")[0] == "0"
    for quiet in (("NA",), ("007",), ("n/a", "41"), tuple("abcdef")):
        read_with(*quiet)
    with pytest.warns(MixedColumnWarning, match="'two'"):
        read_with("two")
    assert read(path, missing=["two"]).columns["age"] == [*range(40), None]
    for odd in (str(2**63), "1e400", f"1.{'1' * 18}"):
        with pytest.warns(
            MixedColumnWarning, match="1 of its 41 cells have more digits than a float, such as"
        ):
            assert read_with(odd)[-1] == odd


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["€3.50", "$4", "7"], r"2 of its first 3 cells have a currency .* such as '€3.50'"),
        (["3 %", "4%", "5.5%"], r"3 of its first 3 cells have a currency or percent sign"),
        (["USD 1,200.00", "EUR 7", "8"], r"2 of its first 3 cells have a currency"),
        (["1,5", "2,25", "3"], r"2 of its 3 cells have a decimal comma, such as '1,5'. Write 1.5"),
        (["5", "7", "n.v.", "9"], r"1 of its 4 cells are not numbers, such as 'n.v.'"),
        (["2024-01-31", "2024-02-01", "soon", "2024-02-02"], r"1 of its 4 .*not dates like"),
        (["2020-01-02", "03/04/2021", "3 May 2021"], r"2 of its first 3 cells are dates in other"),
        (["$1,299.00", "$49.90", "€12.00", "1,050", "$10"], r"4 of its first 5 cells have a cur"),
        (["12 655 050", "5 384 342", "402"], r"2 of its first 3 cells have separators of th"),
        (["1'000", "3'000'000", "5"], r"2 of its first 3 cells have separators of thousands"),
        (
            ["1.2 kg", "800 g", "-", "1.5kg"],
            r"3 of its first 3 cells have a unit, such as '1.2 kg'",
        ),
        (["20 °C", "-3 °C", "5"], r"2 of its first 3 cells have a unit"),
        (["31.12.2020 23:59", "1.1.2021 0:10", "2.2.2021"], r"3 of its first 3 cells are dates"),
        (["9:30 AM", "12:15 PM", "1:00 pm"], r"3 of its first 3 cells are dates in other forms"),
        (["31.1.2024", "1.2.2024", "Feb. 3rd, 2024"], r"3 of its first 3 cells are dates .*'31.1"),
    ],
)
def test_amounts_and_dates_that_stay_text_are_reported(
    tmp_path: Path, cells: list[str], message: str
) -> None:
    path = tmp_path / "forms.tsv"
    path.write_text("\n".join(["sum", *cells, ""]), encoding="utf-8")
    with pytest.warns(MixedColumnWarning, match=message):
        assert read(path).columns["sum"] == cells


@pytest.mark.parametrize(
    "cells",
    [
        ["12B", "13A", "14C"],
        ["10 x 4", "11 x 3", "9 x 9"],
        ["555 0101", "555 0102", "555 0103"],
        ["192.168.1.10", "10.0.0.1", "8.8.8.8"],
        ["8001", "01234", "90210"],
        ["3 kg flour", "2 kg rice", "1 l oil"],
        ["A1", "B2", "C3"],
    ],
)
def test_codes_are_no_amounts(
    tmp_path: Path, cells: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "codes.tsv"
    path.write_text("\n".join(["code", *cells, ""]), encoding="utf-8")
    assert read(path).columns["code"] == cells
    assert not list(recwarn)


def test_numbers_that_may_be_versions_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "versions.csv"
    path.write_text("version,name\n1.9,a\n1.10,b\n2.0,c\n", encoding="utf-8")
    message = (
        r"'version' is read as numbers: 1 of its first 3 cells lose a zero at the end, such as "
        r"'1.10', which becomes 1.1. .* text=\['version'\]"
    )
    with pytest.warns(MixedColumnWarning, match=message):
        assert read(path).columns["version"] == [1.9, 1.1, 2.0]
    assert read(path, text=["version"]).columns["version"] == ["1.9", "1.10", "2.0"]
    for prices in ("2.50,7.99,12", "1.0,2.5,10.00", "0.5,3"):
        path.write_text("price\n" + prices.replace(",", "\n") + "\n", encoding="utf-8")
        assert read(path).columns["price"] == [*map(float, prices.split(","))]


@pytest.mark.parametrize(
    "cells",
    [
        ["€3", "$4"],
        ["1,234", "1,5", "2"],
        ["1", "2", "A"],
        ["1-2-3", "may", "x"],
        ["€1", "a", "b", "c"],
    ],
)
def test_other_text_is_not_reported(tmp_path: Path, cells: list[str]) -> None:
    path = tmp_path / "forms.tsv"
    path.write_text("\n".join(["sum", *cells, ""]), encoding="utf-8")
    assert read(path).columns["sum"] == cells


def test_a_number_may_begin_with_its_point(tmp_path: Path) -> None:
    path = write(tmp_path, "p.csv", b"p,q,r\n.05,-.5e1,.\n1,2,.x\n")
    assert read(path).columns == {"p": [0.05, 1.0], "q": [-5.0, 2.0], "r": [".", ".x"]}


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (
            ["2024-01-31", "", "2024-02-01"],
            [datetime.date(2024, 1, 31), None, datetime.date(2024, 2, 1)],
        ),
        ([" 2024-01-31", "NA"], [datetime.date(2024, 1, 31), None]),
        (["2024-01-31 12:00"], [datetime.datetime(2024, 1, 31, 12)]),
        (["2024-01-31T12:00:01.5"], [datetime.datetime(2024, 1, 31, 12, 0, 1, 500000)]),
        (["2024-01-31T12:00Z"], [datetime.datetime(2024, 1, 31, 12, tzinfo=datetime.UTC)]),
        (["2024-01-31T12:00Z", "2024-01-31T12:00"], None),
        (["2024-01-31", "2024-01-31 12:00"], None),
        (["2024-02-30"], None),
        (["2024-01-31 12:00:00.1234567"], None),
        (["31.01.2024"], None),
        (["20240131x"], None),
        (["2024-W01-1"], None),
        (["2024-01"], None),
        (["12:30", "9:05"], [datetime.time(12, 30), datetime.time(9, 5)]),
        (["12:30:01.5", ""], [datetime.time(12, 30, 1, 500000), None]),
        (["12:30", "25:10"], None),
        (["1:2"], None),
    ],
)
def test_iso_dates_of_csv(tmp_path: Path, cells, expected) -> None:
    """A column of dates is one, as a frame's is; None: it stays text."""
    path = tmp_path / "t.csv"
    path.write_text("day,n\n" + "".join(f"{cell},{i}\n" for i, cell in enumerate(cells)))
    assert sources.read(path).columns["day"] == (expected or cells)
    (tmp_path / "u.csv").write_text(path.read_text())
    both = sources.read(str(tmp_path / "?.csv")).columns["day"]
    assert both == (expected or cells) * 2


def test_a_few_words_among_dates_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("day\n" + "2024-01-31\n" * 30 + "soon\n")
    with pytest.warns(
        MixedColumnWarning, match="'day' is read as text: 1 of its 31 cells are no.*'soon'"
    ):
        assert sources.read(path).columns["day"][0] == "2024-01-31"
    days = sources.read(path, missing=["soon"]).columns["day"]
    assert days == [datetime.date(2024, 1, 31)] * 30 + [None]


def test_dates_of_csv_are_asked_as_those_of_a_frame(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "t.csv"
    path.write_text("at,n\n2024-01-01 09:00,1\n2024-01-01 12:00,2\n2024-02-01 00:00,3\n")
    frame = pandas.read_csv(path, parse_dates=["at"])
    one = Database.from_source(path, key="at", value="n")
    two = Database.from_frame(frame, key="at", value="n")
    for query in ("2024-01-01 10:00", datetime.datetime(2024, 1, 20)):
        assert one.ask(query).value == two.ask(query).value
    where = "at < '2024-01-01 12:00'"
    assert one.count(where) == two.count(where) == 1


LISTS = [[1.0, 0.0], None, [0.0, 1.0]]


def _pandas_lists(lists):
    return pytest.importorskip("pandas").DataFrame({"x": lists})


def _polars_lists(lists):
    return pytest.importorskip("polars").DataFrame({"x": lists})


def _arrow_lists(lists, kind=None):
    pa = pytest.importorskip("pyarrow")
    return pa.table({"x": pa.array(lists, kind and getattr(pa, kind)(pa.float32()))})


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (_pandas_lists, "f8"),
        (_polars_lists, "f8"),
        (_arrow_lists, "f8"),
        (lambda lists: _arrow_lists(lists, "list_"), "f4"),
        (lambda lists: _arrow_lists(lists, "large_list"), "f4"),
    ],
)
def test_lists_of_floats_that_have_one_length_are_vectors(tmp_path: Path, make, dtype) -> None:
    """As JSON lines have them; any other list is a list."""
    tables = [from_frame(make(LISTS))]
    if make is not _pandas_lists and make is not _polars_lists:
        tables.append(read(write_arrow(tmp_path / "t.parquet", make(LISTS))))
    for result in tables:
        cells = result.columns["x"]
        assert cells[1] is None and [x.dtype for x in cells[::2]] == [dtype] * 2
        assert np.array_equal(cells[::2], LISTS[::2])
    for other in ([[1.0], [1.0, 2.0]], [[], []], [[1.0, None], [1.0, 2.0]], [None, None]):
        assert from_frame(make(other)).columns["x"] == other


def test_dates_of_sqlite_are_those_of_columns_that_are_declared_so(tmp_path: Path) -> None:
    """SQLite keeps them as text; what is declared as text is text."""
    path = write_sqlite(
        tmp_path / "t.db",
        """create table "my t" (day date, at DATETIME, stamp TimeStamp, name text, odd date,
            mixed date);
        insert into "my t" values
            ('2024-01-31', '2024-01-31 12:00:00', '2024-01-31T12:00:00.5', '2024-01-31', 'soon',
                '2024-01-31'),
            (null, null, null, null, '2024-01-31', 1706659200);
        create view seen as select day, name from "my t";""",
    )
    day, noon = datetime.date(2024, 1, 31), datetime.datetime(2024, 1, 31, 12)
    result = read(path, table="my t").columns
    assert result["day"] == [day, None] and result["at"] == [noon, None]
    assert result["stamp"] == [noon.replace(microsecond=500000), None]
    assert result["name"] == ["2024-01-31", None] and result["odd"] == ["soon", "2024-01-31"]
    assert result["mixed"] == ["2024-01-31", 1706659200]
    assert read(path, table="seen").columns == {"day": [day, None], "name": ["2024-01-31", None]}
