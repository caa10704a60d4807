"""Tables that a page brings."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from qkv import QkvError
from qkv.page.calls import call

CSV = b"name,major,year\nAnn,art,1\nBo,law,2\n"


@pytest.fixture
def known() -> dict[str, Any]:
    args = {"name": "students", "format": "csv", "base64": base64.b64encode(CSV).decode()}
    known: dict[str, Any] = {}
    told = call("upload", args, known)
    assert told["columns"] == ["name", "major", "year"] and told["rows"] == 2
    return known


def test_an_upload_is_asked_as_the_database_it_is(known: dict[str, Any]) -> None:
    how = {"top": 1, "where": "year > 1", "score": "cosine:0.2", "weighting": "topk:1"}
    found = call("ask", {"database": "students", "query": "Ann", **how}, known)
    assert found["value"] == {"major": "law", "year": 2} and found["total"] == 1
    assert found["explained"].startswith("Of 1 rows, Bo counts 100 %")


def test_other_columns(known: dict[str, Any]) -> None:
    told = call("columns", {"database": "students", "name": "by", "key": ["year"]}, known)
    assert told["key"] == ["year"] and set(known) == {"students", "by"}
    assert call("ask", {"database": "by", "query": "2"}, known)["rows"][0]["key"] == 2
    assert [one["name"] for one in call("databases", {}, known)] == ["students", "by"]


def test_versions(known: dict[str, Any]) -> None:
    known["students"].remove("Ann")
    assert [v["rows"] for v in call("versions", {"database": "students"}, known)] == [2, 1]
    past = call("ask", {"database": "students", "query": "Ann", "at": 1}, known)
    assert past["rows"][0]["key"] == "Ann" and past["total"] == 2


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("upload", {"name": "x", "format": "exe", "base64": ""}),
        ("upload", {"name": "x", "format": "csv", "base64": "!"}),
        ("upload", {"name": "x", "format": "csv"}),
        ("upload", {"name": "x", "format": "parquet", "base64": "AAAA"}),
        ("ask", {"database": "nix", "query": "x"}),
        ("columns", {"database": "students", "key": ["nix"]}),
        ("versions", {"database": None}),
    ],
)
def test_what_makes_no_sense(known: dict[str, Any], name: str, args: dict[str, Any]) -> None:
    with pytest.raises(QkvError):
        call(name, args, known)
    assert set(known) == {"students"}


def test_a_page_names_an_encoder_and_imports_nothing() -> None:
    rows = [{"key": "Li", "value": "Mu"}]
    for encoder in ("os:system", "qkv.page:show"):
        with pytest.raises(QkvError, match="unknown encoder"):
            call("ask", {"rows": rows, "query": "Li", "encoder": encoder}, {})
