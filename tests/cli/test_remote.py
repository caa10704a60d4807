"""The command line on a URL: what it prints is what it prints on the folder that is served."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import data, qkv
from tests.serve.process import serving

TOKEN = "0123456789abcdef"
PLUGIN = """
from qkv import scores, weightings

scores.register("theirs", type("Theirs", (scores.Cosine,), {}))
weightings.register("their_best", type("TheirBest", (weightings.Hard,), {}))
"""


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import csv

    from tests.cli.run import BOOKS, NAMES

    folder = tmp_path_factory.mktemp("served")
    with (folder / "books.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([NAMES, *BOOKS])
    path = folder / "books.qkv"
    arguments = ("--key", "title", "--value", "author")
    assert qkv("import", folder / "books.csv", path, *arguments).exit_code == 0
    return path


@pytest.fixture(scope="module")
def server(books: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("more")
    numbers = folder / "gpa.qkv"
    assert qkv("add", numbers, "3.5", "80").exit_code == 0
    (folder / "mine.py").write_text(PLUGIN)
    (folder / "mine-1.dist-info").mkdir()
    (folder / "mine-1.dist-info" / "entry_points.txt").write_text("[qkv.plugins]\nmine = mine\n")
    there = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with serving(books, numbers, "--token", TOKEN, env={"PYTHONPATH": there}) as (url, _):
        yield url


@pytest.fixture
def url(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("QKV_TOKEN", TOKEN)
    return f"{server}/books"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("ask", ["the alchmist"]),
        ("ask", ["war", "--where", "genre=fiction", "--top", "2", "--weighting", "topk:3"]),
        ("ask", ["Jane Austen", "--key", "author", "--value", "title"]),
        ("get", ["Dune"]),
        ("get", ["Dune", "--all"]),
        ("rows", ["--from", "2", "--count", "3"]),
        ("rows", ["--where", "year < 1900"]),
        ("rows", ["--at", "1"]),
    ],
)
def test_a_url_is_read_as_the_folder_is(
    url: str, books: Path, command: str, arguments: list[str]
) -> None:
    assert data(command, url, *arguments) == data(command, books, *arguments)
    assert qkv(command, url, *arguments).output == qkv(command, books, *arguments).output


def test_info_and_versions_name_the_url(url: str, books: Path) -> None:
    for command in ("info", "versions"):
        there, here = data(command, url), data(command, books)
        assert (there.pop("path"), here.pop("path")) == (url, str(books))
        assert there == here


def test_rows_are_exported_and_imported(url: str, books: Path, tmp_path: Path) -> None:
    for source, name in ((url, "there.csv"), (books, "here.csv")):
        assert qkv("export", source, tmp_path / name).exit_code == 0
    assert (tmp_path / "there.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()
    copy = tmp_path / "copy.qkv"
    assert data("import", url, copy)["rows"] == 8
    assert data("get", copy, "Emma")["value"] == "Jane Austen"
    assert data("import", url, copy, "--append")["rows"] == 16


def test_a_server_is_asked_by_names_of_its_own(url: str) -> None:
    def answer(score: str, weighting: str) -> dict[str, Any]:
        reply = data("ask", url, "the alchmist", "--score", score, "--weighting", weighting)
        return {name: reply[name] for name in ("value", "rows", "entropy")}

    assert answer("theirs:0.1", "softmax") == answer("cosine:0.1", "softmax")
    assert answer("theirs", "their_best") == answer("cosine", "hard")
    assert "unknown score 'thers'" in data("ask", url, "x", "--score", "thers", code=2)["error"]


def test_a_picture_is_drawn_of_an_answer_from_elsewhere(url: str, tmp_path: Path) -> None:
    assert qkv("plot", url, "the alchmist", "-o", tmp_path / "a.svg").exit_code == 0
    assert "Paulo Coelho" in (tmp_path / "a.svg").read_text()


def test_rows_are_added_changed_and_removed(server: str, url: str) -> None:
    gpa = f"{server}/gpa"
    added = data("add", gpa, "3.9", "95")
    assert (added["path"], added["rows"]) == (gpa, 2)
    assert data("add", gpa, "3.9", "96", "--update")["inserted"] is False
    assert data("get", gpa, "3.9")["value"] == 96
    assert data("ask", gpa, "3.9", "--weighting", "hard")["value"] == 96
    assert "± " in qkv("ask", gpa, "3.7").output
    assert data("remove", gpa, "3.9") == {"path": gpa, "removed": 1, "rows": 1}
    absent = data("get", gpa, "3.9", code=1)
    assert absent["key"] == 3.9 and absent["nearest"] == [3.5]


def test_what_is_wrong_is_said(
    server: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "The server has: books, gpa" in data("info", server, code=2)["error"]
    assert "no database is named 'boks'" in data("info", f"{server}/boks", code=2)["error"]
    assert data("get", url, "Ema", code=1)["nearest"][0] == "Emma"
    assert "--encoder" in data("ask", url, "x", "--encoder", "words", code=2)["error"]
    assert "--skip-damaged" in data("ask", url, "x", "--skip-damaged", code=2)["error"]
    for command in (("check", url), ("compact", url), ("import", tmp_path, url)):
        result = qkv(*command)
        assert result.exit_code == 2 and "not a URL" in result.output
    monkeypatch.delenv("QKV_TOKEN")
    assert "token" in data("info", url, code=2)["error"]
    assert data("info", url, "--token", TOKEN)["rows"] == 8
    assert "does not answer" in data("info", "http://127.0.0.1:9/books", code=2)["error"]
