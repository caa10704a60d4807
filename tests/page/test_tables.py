"""Tables that a page brings."""

from __future__ import annotations

import base64
import contextlib
import gc
import io
import sqlite3
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv import QkvError
from qkv.errors import ArgumentError
from qkv.page import limits
from qkv.page.calls import run_call

CSV = b"name,major,year\nAnn,art,1\nBo,law,2\n"


@pytest.fixture
def known() -> dict[str, Any]:
    args = {"name": "students", "format": "csv", "base64": base64.b64encode(CSV).decode()}
    known: dict[str, Any] = {}
    reply = run_call("upload", args, known)
    assert reply["columns"] == ["name", "major", "year"] and reply["rows"] == 2
    return known


def test_an_upload_is_asked_as_the_database_it_is(known: dict[str, Any]) -> None:
    options = {"top": 1, "where": "year > 1", "score": "cosine:0.2", "weighting": "topk:1"}
    result = run_call("ask", {"database": "students", "query": "Ann", **options}, known)
    assert result["value"] == {"major": "law", "year": 2} and result["total"] == 1
    assert result["explained"].startswith("Of 1 row, Bo counts 100 %")


def test_an_upload_says_which_rows_it_skipped(known: dict[str, Any]) -> None:
    data = base64.b64encode(b"name,age\nAnn,1\n,2\nBo,\n,4\n").decode()
    reply = run_call("upload", {"name": "ages", "format": "csv", "base64": data}, known)
    why = "2 of 4 rows have no key (column name): skipped"
    assert (reply["rows"], reply["skipped"]) == (2, [{"why": why, "rows": [2, 4]}])
    reply = run_call("columns", {"database": "ages", "key": ["age"], "name": "by"}, known)
    assert [one["rows"] for one in reply["skipped"]] == [[2]]
    reply = run_call("columns", {"database": "ages", "key": ["name"], "name": "whole"}, known)
    assert reply["skipped"] == []


def test_an_upload_says_which_columns_stay_text(known: dict[str, Any]) -> None:
    data = base64.b64encode("name,price\nAnn,3 €\nBo,4.50 €\nCy,7 €\n".encode()).decode()
    reply = run_call("upload", {"name": "prices", "format": "csv", "base64": data}, known)
    assert [one["rows"] for one in reply["skipped"]] == [[]]
    assert reply["skipped"][0]["why"].startswith("column 'price' is read as text: 3 of its first")


def test_other_columns(known: dict[str, Any]) -> None:
    reply = run_call("columns", {"database": "students", "name": "by", "key": ["year"]}, known)
    assert reply["key"] == ["year"] and set(known) == {"students", "by"}
    assert run_call("ask", {"database": "by", "query": "2"}, known)["rows"][0]["key"] == 2
    assert [one["name"] for one in run_call("databases", {}, known)] == ["students", "by"]


def test_the_first_rows(known: dict[str, Any]) -> None:
    bo = {"name": "Bo", "major": "law", "year": 2}
    assert run_call("rows", {"database": "students", "where": "year > 1"}, known) == [bo]
    known["students"].remove("Ann")
    assert run_call("rows", {"database": "students"}, known) == [bo]
    past = run_call("rows", {"database": "students", "at": 1, "where": ""}, known)
    assert [row["name"] for row in past] == ["Ann", "Bo"]
    known["many"] = qkv.Database({i: [i, 0.5] for i in range(50)})
    assert [row["key"] for row in run_call("rows", {"database": "many"}, known)] == list(range(10))


def test_versions(known: dict[str, Any]) -> None:
    known["students"].remove("Ann")
    assert [v["rows"] for v in run_call("versions", {"database": "students"}, known)] == [2, 1]
    past = run_call("ask", {"database": "students", "query": "Ann", "at": 1}, known)
    assert past["rows"][0]["key"] == "Ann" and past["total"] == 2


def tar(files: dict[str, bytes]) -> str:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in files.items():
            part = tarfile.TarInfo(name)
            part.size = len(content)
            archive.addfile(part, io.BytesIO(content))
    return base64.b64encode(made.getvalue()).decode()


def test_the_folder_of_a_database(tmp_path: Path, known: dict[str, Any]) -> None:
    with qkv.open(tmp_path / "names.qkv") as database:
        database.add("Li", "Mu")
        database.add("Hu", "Rachel")
    files = {file.name: file.read_bytes() for file in (tmp_path / "names.qkv").iterdir()}
    reply = run_call("upload", {"name": "names", "format": "qkv", "base64": tar(files)}, known)
    assert (reply["rows"], reply["version"]) == (2, 2)
    assert run_call("ask", {"database": "names", "query": "Hu"}, known)["value"] == "Rachel"
    place = known["names"].path
    assert place.is_dir()
    known.pop("names").close()
    gc.collect()
    assert not place.exists()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/catalogue.sqlite", "x.py", "lock/"])
def test_a_folder_holds_nothing_else(known: dict[str, Any], name: str) -> None:
    args = {"name": "x", "format": "qkv", "base64": tar({"readers": b"", name: b""})}
    with pytest.raises(QkvError, match="not a file of a database"):
        run_call("upload", args, known)


def test_a_link_in_a_folder_is_refused(known: dict[str, Any]) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        part = tarfile.TarInfo("catalogue.sqlite")
        part.type, part.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(part)
    args = {"name": "x", "format": "qkv", "base64": base64.b64encode(made.getvalue()).decode()}
    with pytest.raises(QkvError, match="not a file of a database"):
        run_call("upload", args, known)


def test_a_sparse_file_is_refused(known: dict[str, Any]) -> None:
    """It would be as long as it says, of zeros."""
    part = tarfile.TarInfo("catalogue.sqlite")
    part.type, part.size = tarfile.GNUTYPE_SPARSE, 0
    head = bytearray(part.tobuf(tarfile.GNU_FORMAT))
    head[483:495] = b"%011o\0" % (3 * 2**30)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    data = bytes(head) + bytes(1024)
    with pytest.raises(QkvError, match="not a file of a database"):
        run_call("upload", {"name": "x", "format": "qkv", "data": data}, known)


@pytest.mark.parametrize("damage", ["settings", "layout"])
def test_a_damaged_folder_names_no_place(
    tmp_path: Path, known: dict[str, Any], damage: str
) -> None:
    with qkv.open(tmp_path / "names.qkv") as database:
        database.add("Li", "Mu")
    place = tmp_path / "names.qkv" / "catalogue.sqlite"
    with contextlib.closing(sqlite3.connect(place)) as catalogue, catalogue:
        if damage == "layout":
            catalogue.execute("ALTER TABLE versions ADD COLUMN strange")
        else:
            catalogue.execute("UPDATE settings SET text = '{'")
    files = {file.name: file.read_bytes() for file in (tmp_path / "names.qkv").iterdir()}
    with pytest.raises(ArgumentError) as refused:
        run_call("upload", {"name": "mine", "format": "qkv", "base64": tar(files)}, known)
    assert "mine" in str(refused.value) and tempfile.gettempdir() not in str(refused.value)


def test_a_small_file_that_unpacks_to_a_large_one(
    known: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.feather
    import pyarrow.parquet

    monkeypatch.setattr(limits, "MAX_UNPACKED_BYTES", 10_000)
    monkeypatch.setattr(limits, "MAX_ROWS", 50)
    monkeypatch.setattr(limits, "MAX_COLUMNS", 5)
    monkeypatch.setattr(limits, "MAX_CELLS", 100)

    def refused(form: str, data: bytes, what: str) -> None:
        with pytest.raises(ArgumentError, match=f"at most .* {what}"):
            run_call("upload", {"name": "x", "format": form, "data": data}, known)

    def packed(**columns: Any) -> tuple[bytes, bytes]:
        table, one, two = pyarrow.table(columns), io.BytesIO(), io.BytesIO()
        pyarrow.parquet.write_table(table, one, compression="zstd")
        pyarrow.feather.write_feather(table, two, compression="zstd")
        return one.getvalue(), two.getvalue()

    words = pyarrow.array(["a" * 1000] * 40)
    for key in (words, words.dictionary_encode()):
        one, two = packed(key=key, value=range(40))
        refused("parquet", one, "bytes")
        refused("csv", one, "bytes")  # it is read as what it is
        refused("arrow", two, "bytes")
    refused("parquet", packed(key=range(51), value=range(51))[0], "rows")
    refused("arrow", packed(key=range(51), value=range(51))[1], "rows")
    refused("csv", b"a,b\n" + b"1,2\n" * 50, "lines")
    refused("csv", b"a,b,c,d,e,f\n1,2,3,4,5,6\n", "columns")
    refused("csv", b"a,b,c\n" + b"1,2,3\n" * 40, "cells")
    refused("jsonl", b'{"a": 1, "b": 2, "c": 3}\n' + b"{}\n" * 40, "cells")
    refused("jsonl", b'{"a": 1}\n' * 51, "rows")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_what_an_arrow_file_unpacks_to_is_known_before(stream: bool, compression: Any) -> None:
    import pyarrow.ipc

    words = pyarrow.array(["a" * 1000] * 40)
    table = pyarrow.table({"one": words, "two": words.dictionary_encode(), "n": range(40)})
    made, kind = io.BytesIO(), pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with kind(made, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=16)
    result = limits.unpacked_arrow_bytes(made.getvalue())
    assert result == 0 if compression is None else 41_000 <= result <= 43_000
    if compression is None:
        return
    with pytest.raises(ArgumentError, match="not a complete Arrow file"):
        limits.unpacked_arrow_bytes(made.getvalue()[: -100 if stream else -20])


def test_words_that_repeat_are_counted_before_they_are_written_out(
    known: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet

    monkeypatch.setattr(limits, "MAX_UNPACKED_BYTES", 100_000)
    words = pyarrow.array(["a" * 1000] * 400)
    fixed = words.cast(pyarrow.binary(1000))
    runs = pyarrow.RunEndEncodedArray.from_arrays([400], words[:1])
    lists = pyarrow.ListArray.from_arrays(range(401), words.dictionary_encode())
    for form, key, what in (
        ("parquet", words, "at most .* bytes"),
        ("parquet", fixed, "at most .* bytes"),
        ("parquet", lists, "at most .* bytes"),
        ("arrow", lists, "at most .* bytes"),
        ("arrow", runs, "run_end_encoded"),
        ("arrow", pyarrow.array(["a"], pyarrow.string_view()), "string_view"),
    ):
        made, table = io.BytesIO(), pyarrow.table({"key": key, "value": range(len(key))})
        if form == "parquet":
            pyarrow.parquet.write_table(table, made)
        else:
            with pyarrow.ipc.new_file(made, table.schema) as writer:
                writer.write_table(table)
        assert len(made.getvalue()) < 50_000
        with pytest.raises(ArgumentError, match=what):
            run_call("upload", {"name": "x", "format": form, "data": made.getvalue()}, known)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("upload", {"name": "x", "format": "exe", "base64": ""}),
        ("upload", {"name": "x", "format": "csv", "base64": "!"}),
        ("upload", {"name": "x", "format": "csv"}),
        ("upload", {"name": "x", "format": "qkv", "base64": "AAAA"}),
        ("upload", {"name": "x", "format": "qkv", "base64": ""}),
        ("upload", {"name": "x", "format": "parquet", "base64": "AAAA"}),
        ("ask", {"database": "nix", "query": "x"}),
        ("columns", {"database": "students", "key": ["nix"]}),
        ("versions", {"database": None}),
    ],
)
def test_what_makes_no_sense(known: dict[str, Any], name: str, args: dict[str, Any]) -> None:
    with pytest.raises(QkvError):
        run_call(name, args, known)
    assert set(known) == {"students"}


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("ask", {"query": "x", "at": 10**30}, "at must be"),
        ("ask", {"query": "x", "at": True}, "at must be"),
        ("rows", {"at": 10**30}, "at must be"),
        ("ask", {"query": ["Ann"] * 3}, "one query at a time"),
        ("ask", {"query": "x" * (limits.MAX_TEXT_CHARACTERS + 1)}, "characters of a query"),
    ],
)
def test_what_a_page_may_not_ask(
    known: dict[str, Any], name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        run_call(name, {"database": "students", **args}, known)


def test_what_is_encoded_is_limited() -> None:
    def refused(keys: Any, message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            run_call("encode", {"keys": keys, "query": "x", "encoder": "text"}, {})

    refused([f"name {i}" for i in range(1500)], "at most 1,048,576 numbers")
    refused([f"word{i} other{i}" for i in range(800)], "at most 1,048,576 numbers")
    refused(["x" * (limits.MAX_TEXT_CHARACTERS + 1)], "characters of keys")
    refused([], "a list")
    refused({"a": 1}, "a list")


def test_a_page_names_an_encoder_and_imports_nothing() -> None:
    for encoder in ("os:system", "qkv.page:show", "nothing"):
        with pytest.raises(QkvError, match="unknown encoder"):
            run_call("encode", {"keys": ["Li"], "query": "Li", "encoder": encoder}, {})
