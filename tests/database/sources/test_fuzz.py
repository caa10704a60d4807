"""Whatever the bytes are, the answer is a table or an error that says what is wrong."""

from __future__ import annotations

import csv
import datetime
import io
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkv.database.parsing import parse_time_of_day
from qkv.database.sources import SourceError, Table, read
from qkv.database.sources.type_inference import MISSING_WORDS, parse_numbers

NAMES = ["t.csv", "t.txt", "t.tsv", "t.json", "t.jsonl", "t.parquet", "t.arrow", "t.feather",
         "t.db", "t", "t.xyz"]  # fmt: skip
PLAIN = (str, int, float, bool, bytes, datetime.date, datetime.time, list, dict, type(None))

# Names that are drawn may well look like a row.
pytestmark = pytest.mark.filterwarnings("ignore::qkv.NoHeaderWarning")

# One folder serves all examples of a test.
bounded = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def table_or_error(path: Path) -> Table | None:
    try:
        table = read(path)
    except SourceError as error:
        assert error.file == str(path) and str(error).startswith(str(path))
        assert error.line is None or error.line >= 1
        assert error.column is None or error.column >= 1
        return None
    assert len(table) > 0
    assert {len(column) for column in table.columns.values()} == {len(table)}
    assert all(isinstance(x, PLAIN) for column in table.columns.values() for x in column)
    assert all(name.strip() for name in table.columns)
    return table


@bounded
@given(st.sampled_from(NAMES), st.binary(max_size=200))
def test_random_bytes(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    table_or_error(path)


@bounded
@given(st.sampled_from(NAMES), st.text(alphabet='ab10.-e,;\t|"\r\n\0\ufeff [{}]:é', max_size=60))
def test_random_text_near_csv_and_json(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode())
    table_or_error(path)


words = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=0, max_size=8
)
cells = st.one_of(
    words,
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(repr),
    st.sampled_from(["", "007", "1.50", "nan", "true", "a,b", 'say "hi"', "x\r\ny", ";", "\t|"]),
)


@st.composite
def grids(draw: Any) -> list[list[str]]:
    width = draw(st.integers(1, 5))
    names = draw(
        st.lists(
            words.filter(lambda name: name.strip() and not name.startswith("\ufeff")),
            min_size=width,
            max_size=width,
            unique=True,
        )
    )
    kinds = st.sampled_from([cells, st.integers().map(str), st.floats(allow_nan=False).map(repr)])
    columns = [draw(kinds) for _ in names]
    rows = draw(st.lists(st.tuples(*columns), min_size=1, max_size=8))
    return [names, *map(list, rows)]


def matches_text(text: str, cell: Any) -> bool:
    """Whether a cell is what its text says: the same text, its number, or missing."""
    if cell is None:
        return text.strip() in ("", *MISSING_WORDS)
    if isinstance(cell, str):
        return cell == text
    if isinstance(cell, datetime.time):
        return parse_time_of_day(text.strip()) == cell
    if isinstance(cell, int):
        return str(cell) == text.strip()
    return bool(cell == float(text.strip()))


@pytest.mark.filterwarnings("ignore::qkv.MixedColumnWarning")
@bounded
@given(grids(), st.sampled_from(["\r\n", "\n", "\r"]), st.booleans(), st.booleans())
def test_what_csv_writes_comes_back(tmp_path, grid, end, mark, quote):
    text = io.StringIO(newline="")
    # With another line end, csv.writer may leave a return or line feed within a cell bare.
    quoting = csv.QUOTE_ALL if quote or end != "\r\n" else csv.QUOTE_MINIMAL
    csv.writer(text, delimiter="\t", lineterminator=end, quoting=quoting).writerows(grid)
    path = tmp_path / "t.tsv"
    path.write_bytes(text.getvalue().encode("utf-8-sig" if mark else "utf-8"))
    try:
        table = read(path)
    except SourceError as error:
        # A grid may begin with the bytes of another format.
        assert "looks like" in str(error)
        return
    assert list(table.columns) == grid[0]
    for place, column in enumerate(table.columns.values()):
        assert all(
            matches_text(row[place], cell) for row, cell in zip(grid[1:], column, strict=True)
        )


@bounded
@given(st.lists(cells, min_size=1, max_size=6))
def test_numbers_are_what_their_text_says(column):
    result = parse_numbers(column)
    assert all(matches_text(text, cell) for text, cell in zip(column, result, strict=True))


def seeds(folder: Path) -> dict[str, bytes]:
    """One small valid file of each format."""
    rows = [{"title": "Emma", "year": 1815, "price": 2.5}, {"title": "café", "year": 2, "price": 0}]
    text = "title,year,price\n" + "".join(f'"{r["title"]}",{r["year"]},2.5\n' for r in rows)
    files = {
        "t.csv": text.encode(),
        "t.tsv": text.replace(",", "\t").encode(),
        "t.jsonl": "\n".join(map(json.dumps, rows)).encode(),
        "t.json": json.dumps(rows).encode(),
    }
    path = folder / "seed.db"
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        database.execute("pragma page_size = 512")
        database.execute("create table books (title text, year int, price real)")
        database.executemany("insert into books values (:title, :year, :price)", rows * 20)
        database.commit()
    files["t.db"] = path.read_bytes()
    try:
        import pyarrow as pa
        import pyarrow.feather
        import pyarrow.parquet
    except ImportError:
        return files
    table = pa.table(
        {
            "title": ["Emma", None, "café"],
            "year": [1, 2, None],
            "lists": [[1.5], [], [2.5, 3.5]],
            "word": pa.array(["a", "b", "a"]).dictionary_encode(),
            "moment": pa.array([1, 2, 3], pa.timestamp("us", "UTC")),
        }
    )
    pyarrow.parquet.write_table(table, folder / "seed.parquet")
    pyarrow.feather.write_feather(table, str(folder / "seed.feather"))
    with pa.ipc.new_stream(str(folder / "seed.arrows"), table.schema) as writer:
        writer.write_table(table)
    for ending in ("parquet", "feather", "arrows"):
        files[f"t.{ending}"] = (folder / f"seed.{ending}").read_bytes()
    return files


edits = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 255), st.sampled_from(["set", "cut", "add", "end"])),
    min_size=1,
    max_size=6,
)


def mutate(data: bytes, changes: list[tuple[float, int, str]]) -> bytes:
    for share, byte, operation in changes:
        at = int(share * len(data))
        if operation == "set":
            data = data[:at] + bytes([byte]) + data[at + 1 :]
        elif operation == "cut":
            data = data[:at] + data[at + byte :]
        elif operation == "add":
            data = data[:at] + bytes([byte]) + data[at:]
        elif byte > 200:
            data = data[:at]
    return data


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "name",
    ["t.csv", "t.tsv", "t.jsonl", "t.json", "t.db", "t.parquet", "t.feather", "t.arrows"],
)
def test_mutated_files(tmp_path, name):
    files = seeds(tmp_path)
    if name not in files:
        pytest.skip("needs pyarrow")
    path = tmp_path / name
    path.write_bytes(files[name])
    assert table_or_error(path) is not None

    @bounded
    @given(edits)
    def check(changes):
        path.write_bytes(mutate(files[name], changes))
        table_or_error(path)

    check()
