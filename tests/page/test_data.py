"""Tables that a page reads itself, cell by cell, against Python's reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv.database import sources
from qkv.page import to_html
from qkv.page.packing import pack_arrays
from qkv.serve.databases import DatabaseRegistry
from qkv.serve.security import Access
from tests.browser import fill_query
from tests.serve.test_page import at_work

LARGE = 2**53 + 1
TABLES = {
    "thousands": 'city,sum,people\nUlm,"1,234.5","12,000"\nBern,7,NA\n',
    "lists": 'city,codes\nUlm,"12,000"\nBern,"7,111"\n',
    "commas": "city;price, net;people\nUlm;1.234,5;1.086\nBern;7;336\n",
    "prices": "city;price;people\nUlm;1.234,50 €;1.086\nBern;EUR 0,99;336\n",
    "either": "city;sum\nUlm;1,234\nBern;7,500\n",
    "bars": "city|share\nUlm|.25\nBern|-.5\n",
    "whole": "city,people,code\nUlm,1234567,007\nBern,-123456,8\n",
    "cents": "city,price\nUlm,1299.99\nBern,0.05\n",
    "lines": '\ufeffcity,note\r\nUlm,"a ""b"";\tc|d"\r\nBern,"two\nlines"\r\n',
}


def open_page(page: Any, tmp_path: Path) -> None:
    to_html([{"view": "data"}], tmp_path / "page.html")
    page.goto((tmp_path / "page.html").as_uri())


def open_file(page: Any, name: str, data: bytes) -> None:
    file = {"name": name, "mimeType": "text/csv", "buffer": data}
    page.get_by_test_id("data-file").set_input_files(file)


@pytest.mark.filterwarnings("ignore::qkv.MixedColumnWarning")
def test_cells_are_what_python_reads(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path)
    for name, text in TABLES.items():
        path = tmp_path / f"{name}.csv"
        path.write_text(text, encoding="utf-8", newline="")
        open_file(page, path.name, path.read_bytes())
        page.get_by_text(f"{name}: 2 rows").wait_for()
        for column, cells in sources.read(path).columns.items():
            for i, cell in enumerate(cells):
                shown = page.get_by_test_id(f"data-first-{i}-{column}").text_content()
                message = f"{cell:g}" if isinstance(cell, float) else str(cell or "")
                assert shown.replace("−", "-") == message, (name, column, i)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_text_that_is_not_utf8_is_refused(page: Any, tmp_path: Path, encoding: str) -> None:
    open_page(page, tmp_path)
    open_file(page, "cities.csv", "city,people\nMünchen,3\n".encode(encoding))
    message = "cities.csv is not UTF-8 text: save it as CSV UTF-8"
    page.get_by_test_id("data-error").filter(has_text=message).wait_for()


def test_an_error_for_a_workbook_names_the_next_step(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path)
    open_file(page, "cities.xlsx", b"PK\3\4")
    message = "save a spreadsheet as CSV"
    page.get_by_test_id("data-error").filter(has_text=message).wait_for()


def test_integers_that_no_float_holds_keep_their_digits(page: Any) -> None:
    assert pack_arrays([LARGE, -LARGE, 2**53])[0] == [str(LARGE), str(-LARGE), 2**53]
    D: Any = qkv.Database.from_columns({"name": ["a", "b"], "id": [LARGE, LARGE + 1], "n": [1, 2]})
    served = DatabaseRegistry()
    served.add_database("ids", D)
    with at_work(served, Access()) as url:
        page.goto(url)
        page.get_by_test_id("tab-data").click()
        page.get_by_test_id("data-first-1-id").wait_for()
        shown = [page.get_by_test_id(f"data-first-{i}-id").inner_text() for i in range(2)]
        assert shown == [str(LARGE), str(LARGE + 1)]
        page.get_by_test_id("data-where").fill(f"id == {LARGE}")
        page.get_by_test_id("data-first-1-id").wait_for(state="detached")
        assert page.get_by_test_id("data-first-0-id").inner_text() == str(LARGE)
        page.get_by_test_id("data-value").select_option("id")
        fill_query(page, "a")
        page.get_by_test_id("data-row-0-value").filter(has_text=str(LARGE)).wait_for()
        page.goto("about:blank")
