"""Rows out and in again: frames, CSV, TSV, JSON lines and Parquet."""

from __future__ import annotations

import datetime
import errno
import gc
import math
import os
import sys
import warnings
from decimal import Decimal

import numpy as np
import pandas
import polars
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv import Database
from qkv.database import sources
from qkv.database.errors import ChangedCellsWarning, StoreUnwritableError
from qkv.database.export import files
from qkv.errors import ArgumentError, DtypeError, MissingExtraError
from tests.interrupt import moments

MESSY = {
    "name": ["Li", "a,b", 'say "x"', "two\nlines", "cr\rhere", " pad "],
    "age": [34, None, 29, 2**60, -1, 0],
    "height": [1.5, 2.0, None, math.inf, 1e-300, -0.0],
    "city": ["Łódź", None, "x", "007", "9", None],
}


def rows_of(D):
    return [{n: None if x != x else x for n, x in row.items()} for row in D.rows()]


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_files_come_back_equal_missing_cells_included(tmp_path, ending):
    D = Database.from_columns(MESSY, key="name", value="age")
    path = tmp_path / f"a{ending}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert files.write_file(path, D.columns, D.rows()) == 6
    back = Database.from_source(path, key="name", value="age")
    assert back.columns == D.columns
    assert rows_of(back) == rows_of(D)
    assert back.describe() == D.describe()


@pytest.mark.parametrize("library", [pandas, polars, pyarrow])
def test_frames_come_back_equal(monkeypatch, library):
    vectors = np.arange(12, dtype=np.float32).reshape(6, 2)
    D = Database.from_columns(MESSY | {"vector": vectors}, key="name", value="vector")
    for other in ("pandas", "polars"):
        if other != library.__name__:
            monkeypatch.setitem(sys.modules, other, None)
    frame = D.to_frame()
    assert isinstance(frame, library.Table if library is pyarrow else library.DataFrame)
    back = Database.from_frame(frame, key="name", value="vector")
    for ours, theirs in zip(rows_of_all(D), rows_of_all(back), strict=True):
        assert ours == theirs
    assert next(back.rows())["vector"].dtype == np.float32
    assert back.describe() == D.describe()
    filtered = D.to_frame(where="age >= 0 and height < 2")
    assert len(filtered) == D.count("age >= 0 and height < 2") == 2


def rows_of_all(D):
    for row in D.rows():
        yield {
            n: x.tolist() if isinstance(x, np.ndarray) else None if x != x else x
            for n, x in row.items()
        }


@pytest.mark.parametrize(("name", "mark"), [("a.tsv", "\t"), ("A.TSV", "\t"), ("a.txt", ",")])
def test_csv_has_the_delimiter_of_its_ending(tmp_path, name, mark):
    D = Database({"Li, Mu": 34})
    assert D.to_csv(tmp_path / name) == 1
    key = '"Li, Mu"' if mark == "," else "Li, Mu"
    assert (tmp_path / name).read_text() == f"key{mark}value\n{key}{mark}34\n"


def test_no_library_is_a_line_of_what_to_install(monkeypatch, tmp_path):
    for name in ("pandas", "polars", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    D = Database({"Li": 1})
    with pytest.raises(MissingExtraError, match=r"qkv\[tables\]"):
        D.to_frame()
    with pytest.raises(MissingExtraError, match=r"qkv\[tables\]"):
        D.to_parquet(tmp_path / "a.parquet")
    assert list(tmp_path.iterdir()) == []
    assert D.to_csv(tmp_path / "a.csv") == 1


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_vectors_come_back_from_files(tmp_path, ending):
    keys = np.array([[0.0, 1.0], [0.1, -0.0], [np.float32(1 / 3), 1e-300]])
    D = Database(keys, [1.0, 2.0, 3.0])
    files.write_file(tmp_path / f"a{ending}", D.columns, D.rows())
    back = Database.from_source(tmp_path / f"a{ending}", key="key", value="value")
    np.testing.assert_array_equal(back._view.read_all_keys(), D._view.read_all_keys())
    assert back.info()["key_kind"] == "vector"
    assert back[keys[0]] == 1.0
    query = np.array([[0.3, 0.1]])
    np.testing.assert_array_equal(back.attend(query), D.attend(query))


def test_a_missing_vector_is_missing_everywhere(tmp_path):
    D = Database.from_columns({"k": ["a", "b"], "v": [np.ones(2), None]}, key="k", value="v")
    assert pandas.DataFrame(D.to_frame())["v"].isna().tolist() == [False, True]
    D.to_parquet(tmp_path / "a.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet")["v"].to_pylist() == [[1, 1], None]
    back = Database.from_source(tmp_path / "a.parquet", key="k", value="v")
    assert back.describe() == D.describe()
    files.write_file(tmp_path / "a.jsonl", D.columns, D.rows())
    back = Database.from_source(tmp_path / "a.jsonl", key="k", value="v")
    assert back.describe() == D.describe() and back["a"].tolist() == [1.0, 1.0]
    with pytest.warns(ChangedCellsWarning, match="column v"):
        D.to_csv(tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == 'k,v\na,"[1.0, 1.0]"\nb,\n'


@pytest.mark.parametrize(
    ("column", "changes"),
    [
        (["a", "NA"], True),
        (["a", ""], True),
        (["1", "2"], True),
        (["1", "b"], False),
        (["1,234.5", "12,000"], True),
        (["1", "1,2"], False),
        ([1, "b"], True),
        ([1, 2.5], False),
        ([2**53 + 1, 2.5], True),
        ([2**63, 1], True),
        ([math.inf, math.inf], True),
        ([True, False], True),
        ([b"a", b"b"], True),
        ([[1], [2]], True),
        ([datetime.date(1988, 4, 14)] * 2, False),
        ([datetime.datetime(1988, 4, 14, 1, 2, 3, 4), None], False),
        ([datetime.datetime(1988, 4, 14, tzinfo=datetime.UTC), None], False),
        (
            [datetime.datetime(1988, 4, 14), datetime.datetime(1988, 4, 14, tzinfo=datetime.UTC)],
            True,
        ),
        ([datetime.time(12)] * 2, False),
        (["12:30", "9:05"], True),
        (["1988-04-14", "1988-04-15"], True),
        (["1988-04-14", "1988-04-14 12:00"], False),
        (["a", None], False),
        ([None, math.nan], False),
    ],
)
def test_csv_tells_what_it_cannot_keep(tmp_path, column, changes):
    D = Database.from_columns({"key": ["x", "y"], "odd": column}, key="key", value="odd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        D.to_csv(tmp_path / "a.csv")
    assert [w.category for w in caught] == [ChangedCellsWarning] * changes
    back = Database.from_source(tmp_path / "a.csv", key="key", value="odd")
    same = [x == y or x != x for x, y in zip(column, back.values(), strict=True)]
    assert all(same) != changes


cell = st.none() | st.text(st.characters(codec="utf-8"), max_size=4) | st.integers() | st.floats()
cell |= st.dates() | st.datetimes() | st.dates().map(str) | st.datetimes().map(str)


@settings(max_examples=60, deadline=None)
@given(st.lists(cell, min_size=1, max_size=6))
def test_csv_is_read_again_or_a_warning_was_given(tmp_path_factory, column):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    rows = [{"key": f"k{i}", "odd": x} for i, x in enumerate(column)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        files.write_file(path, ["key", "odd"], rows)
    if not caught:
        assert [None if x != x else x for x in column] == sources.read(path).columns["odd"]


@pytest.mark.parametrize(
    "column",
    [[1, "b"], ["a", b"b"], [{"a": 1}, {"b": 2}], [True, 1], [2**70, 1], [2**53 + 1, 0.5]],
    ids=str,
)
def test_parquet_refuses_a_column_of_several_types(tmp_path, column):
    D = Database.from_columns({"key": ["x", "y"], "odd": column}, key="key", value="odd")
    with pytest.raises(DtypeError, match="column 'odd' has cells of several types"):
        D.to_parquet(tmp_path / "a.parquet")
    assert list(tmp_path.iterdir()) == []
    assert list(D.to_frame()["odd"]) == column


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("old")

    def broken():
        yield {"key": "a"}
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        files.write_file(path, ["key"], broken())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    D = Database({"Li": "Mu"})
    with pytest.raises(ArgumentError, match="is a folder"):
        D.to_csv(tmp_path)
    with pytest.raises(ArgumentError, match="no folder"):
        D.to_csv(tmp_path / "none" / "a.csv")
    with pytest.raises(ArgumentError, match="must end in"):
        files.write_file(tmp_path / "a.xls", D.columns, D.rows())
    with pytest.raises(DtypeError, match="name of a file"):
        D.to_csv(3)


def test_pages_of_rows():
    D = Database({f"k{i}": i for i in range(10)})
    D.remove("k3")
    assert [row["value"] for row in D.rows(start=2, count=3)] == [2, 4, 5]
    assert [row["value"] for row in D.rows(where="value > 5", start=1)] == [7, 8, 9]
    assert [row["value"] for row in D.rows(where=lambda row: row["value"] % 2)] == [1, 5, 7, 9]
    assert list(D.rows(start=99)) == [] == list(D.rows(count=0))
    assert (D.count(), D.count("value > 5"), D.at(1).count()) == (9, 4, 10)
    with pytest.raises(ArgumentError, match="start must be a number of rows, not -1"):
        D.rows(start=-1)


def test_a_notebook_sees_the_columns_and_the_first_rows():
    D = Database.from_columns(
        {"<key>": [f"<b>{i}</b>" for i in range(1234)], "age": [None, *range(1233)]}, value="age"
    )
    page = D._repr_html_()
    assert "in memory</b>: 1,234 rows, version 1" in page
    assert "&lt;key&gt;" in page and "&lt;b&gt;4&lt;/b&gt;" in page
    assert "<b>0" not in page and "<key>" not in page
    assert "number, 1 missing · value" in page and "text · key" in page
    assert "and 1,229 more rows<" in page and "&lt;b&gt;5" not in page
    assert len(page) < 2500
    wide = Database.from_columns({f"c{i}": ["x", "y"] for i in range(40)}, key="c0", value="c1")
    six = Database({i: i for i in range(6)})
    assert "and 1 more row<" in six._repr_html_()
    assert "and 28 more columns<" in wide._repr_html_() and ">c12<" not in wide._repr_html_()
    assert "empty" in Database()._repr_html_()


def test_a_picture_of_every_key(tmp_path):
    D = Database({"John Doe": "psychology", "Ada Byron": "mathematics", "Wang Wei": "literature"})
    figure = D.plot("John Doe", tmp_path / "a.png", score="exact", weighting="raw")
    panel = figure.axes[0]
    assert panel.images[0].get_array().tolist() == [[1.0, 0.0, 0.0]]
    assert [label.get_text() for label in panel.get_xticklabels()] == list(D)
    assert [label.get_text() for label in panel.get_yticklabels()] == ["John Doe"]
    assert (tmp_path / "a.png").stat().st_size > 1000
    soft = D.plot(["Jon Doe", "Ada"]).axes[0].images[0].get_array()
    expected = [answer.weights for answer in D.ask(["Jon Doe", "Ada"])]
    np.testing.assert_allclose(soft, expected, rtol=1e-6)


def test_decimals_in_json_lines_are_the_numbers_that_a_reader_finds(tmp_path):
    cells = [Decimal("1.50"), Decimal("2"), Decimal("0.10000000000000000000001")]
    files.write_file(
        tmp_path / "a.jsonl", ("k", "v"), [{"k": i, "v": v} for i, v in enumerate(cells)]
    )
    back = Database.from_source(tmp_path / "a.jsonl", key="k", value="v")
    assert (
        back.get_all(0) == [1.5] and back.get_all(1) == [2] and back.get_all(2) == [str(cells[2])]
    )


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
@pytest.mark.parametrize("zone", [None, datetime.UTC])
def test_a_time_is_its_iso_text_in_every_file_and_answer(tmp_path, ending, zone):
    noon = datetime.datetime(2024, 1, 1, 12, tzinfo=zone)
    D = Database([("a", noon), ("b", noon)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ChangedCellsWarning)
        files.write_file(tmp_path / f"a{ending}", D.columns, D.rows())
    back = Database.from_source(tmp_path / f"a{ending}", key="key", value="value")
    text = noon.isoformat()
    assert back["a"] == (noon if ending == ".csv" else text)  # JSON says of text that it is text
    assert D.ask("a").to_dict()["value"] == text
    where = f"value == '{text}'"
    assert D.count(where) == back.count(where) == 2


@pytest.mark.parametrize("named", [(), (".names.csv.0a1b2c3d",)])
def test_an_error_for_a_full_disk_names_the_file_and_leaves_none(tmp_path, named):
    path = tmp_path / "names.csv"
    message = (
        r"/names\.csv cannot be written \(No space left on device\): nothing was changed; free"
    )
    with pytest.raises(StoreUnwritableError, match=message), files.open_atomically(path):
        raise OSError(errno.ENOSPC, "No space left on device", *named)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a file without an open reference
def test_an_interrupt_leaves_no_temporary_file_and_the_umask_unchanged(tmp_path):
    def write():
        with files.open_atomically(tmp_path / "names.csv") as file:
            file.write(b"key,value\n")

    before = os.umask(0o027)
    try:
        for _ in moments(write):
            assert os.umask(0o027) == 0o027
            assert {path.name for path in tmp_path.iterdir()} <= {"names.csv"}
        assert (tmp_path / "names.csv").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)
        gc.collect()
