"""With DuckDB or without it: the same cells, and the same words for what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qkv.database.sources import SourceError, duck, read

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")


def outcome(path: Path, **how: Any) -> str:
    try:
        return repr(read(path, **how).columns)
    except SourceError as error:
        return str(error)


def both(path: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> bool:
    """Read the table both ways and compare; whether DuckDB has split it."""
    split: list[bool] = []
    cells = duck.cells

    def watched(*given: Any) -> Any:
        found = cells(*given)
        split.append(found is not None)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(duck, "LARGE", 2**60)
        plain = outcome(path, **how)
        patch.setattr(duck, "LARGE", 0)
        patch.setattr(duck, "cells", watched)
        assert outcome(path, **how) == plain
    return split == [True]


# Each: what is messy, the table, and whether DuckDB is sure of it.

TABLES = {
    "plain": ("a,b\n1,x\n2,y\n", True),
    "missing": ("a,b,c\n1,,NA\n2,null,-\n,x,3\n", True),
    "quotes": ('a,b\n"1, 2","say ""hi"""\n"",""""\n', True),
    "lines in cells": ('a,b\n"x\ny",1\nz,2\n', True),
    "returns": ("a;b\r\n1;x\r\n2;y\r\n", True),
    "text that is no number": ("a,b\n007,1.50\n+1,2\n", True),
    "text that DuckDB would type": ("a,b,c\n2020-01-02,true,1e5\n2021-01-02,false,2\n", True),
    "blanks are kept": ("a,b\n x ,y\t\n", True),
    "comments are text": ("a,b\n#1,2\n//,3\n", True),
    "escapes are text": ("a,b\n\\n,\\\n", True),
    "other letters": ("é,b\n☃,1\n", True),
    "no last line end": ("a,b\n1,2", True),
    "tabs": ("a\tb\n1\t2\n", True),
    "byte order mark": ("\ufeffa,b\n1,2\n", False),
    "blank lines": ("\n\na,b\n1,2\n\n3,4\n", False),
    "old returns": ("a,b\r1,2\r", False),
    "mixed line ends": ("a,b\r\n1,2\n3,4\n", False),
    "one column": ("a\n1\n\n2\n", False),
    "quotes within": ('a,b\n1,5" pipe\n2, "x"\n', False),
    "more after a quote": ('a,b\n1,"x" y\n', False),
    "open quote": ('a,b\n1,"x\n', False),
    "ragged": ("a,b\n1,2\n3\n", False),
    "a delimiter too many": ("a,b,c\n1,2,3,\n4,5,6\n", False),
    "an empty last cell": ('a,b,c\n1,"2,\n",\n4,5,\n', True),
    "doubled names": ("a,a\n1,2\n", True),
    "nameless": ("a,\n1,2\n", True),
    "header alone": ("a,b\n", True),
    "NUL": ("a,b\n1,\0\n", False),
}


@pytest.mark.parametrize("what", TABLES)
def test_csv_is_read_alike(tmp_path, monkeypatch, what):
    text, sure = TABLES[what]
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode())
    assert both(path, monkeypatch) == sure


def test_csv_with_other_words_for_missing(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_text("a,b\nNA,1\n-,\n")
    assert both(path, monkeypatch, missing=["-"])
    path.write_bytes(b"a,b\n1,caf\xe9\n")
    both(path, monkeypatch)


def test_a_name_with_wildcards_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "t1.csv").write_text("a,b\n1,2\n")
    (tmp_path / "t[1].csv").write_text("a,b\n3,4\n")
    assert not both(tmp_path / "t[1].csv", monkeypatch)
    (tmp_path / "it's year=1988").mkdir()
    (tmp_path / "it's year=1988" / "t.csv").write_text("a,b\n3,4\n")
    assert both(tmp_path / "it's year=1988" / "t.csv", monkeypatch)


def test_ctrl_c_is_ctrl_c(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n3,4\n")
    monkeypatch.setattr(duck, "LARGE", 0)

    class Interrupted:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def sql(self, _: str) -> Any:
            raise RuntimeError("Query interrupted")

    monkeypatch.setattr(duckdb, "connect", lambda **_: Interrupted())
    with pytest.raises(KeyboardInterrupt):
        read(path)
