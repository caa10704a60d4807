"""The command line: what is printed, where, and with which exit code."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from datetime import date
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from qkv.cli import COMMANDS, app, command, screen, sentence, values
from qkv.errors import ArgumentError, MissingExtra, QkvError

ROOT = Path(__file__).resolve().parent.parent
HERE = {
    **{name: x for name, x in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")},
    "PYTHONPATH": str(ROOT / "src"),
}
"""The environment of a process that runs this very package, from any folder."""

BOOKS = [
    ("The Alchemist", "Paulo Coelho", 1988, "fiction"),
    ("Emma", "Jane Austen", 1815, "romance"),
    ("Dune", "Frank Herbert", 1965, "science fiction"),
    ("Dracula", "Bram Stoker", 1897, "horror"),
    ("Ulysses", "James Joyce", 1922, "fiction"),
    ("The Odyssey", "Homer", -700, "poetry"),
    ("Persuasion", "Jane Austen", 1817, "romance"),
    ("The Trial", "Franz Kafka", 1925, "fiction"),
]
NAMES = ("title", "author", "year", "genre")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "books.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([NAMES, *BOOKS])
    return path


@pytest.fixture
def store(table: Path) -> Path:
    path = table.with_suffix(".qkv")
    assert qkv("import", table, path, "--key", "title", "--value", "author").exit_code == 0
    return path


def qkv(*arguments: object, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def data(*arguments: object, code: int = 0, stdin: str | None = None) -> Any:
    """The one JSON object that the command prints."""
    result = qkv(*arguments, "--json", stdin=stdin)
    assert result.exit_code == code, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def process(*arguments: object, env: dict[str, str] | None = None, **how: Any) -> Any:
    return subprocess.Popen(
        [sys.executable, "-m", "qkv.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=HERE | (env or {}),
        **how,
    )


def run(*arguments: object, **how: Any) -> tuple[int, str, str]:
    with process(*arguments, **how) as started:
        out, err = started.communicate(timeout=120)
    return started.returncode, out, err


class TestAsk:
    def test_a_slip_of_the_hand_finds_its_book(self, table: Path) -> None:
        answer = data("ask", table, "the alchmist", "--key", "title", "--value", "author")
        assert list(answer) == ["query", "value", "rows", "entropy", "effective_rows", "engine"]
        assert answer["query"] == "the alchmist"
        assert answer["value"] == "Paulo Coelho"
        first = answer["rows"][0]
        assert (first["key"], first["value"], first["index"]) == (
            "The Alchemist",
            "Paulo Coelho",
            0,
        )
        assert first["weight"] > 0.5
        weights = [row["weight"] for row in answer["rows"]]
        assert weights == sorted(weights, reverse=True)
        assert len(weights) == 5
        assert answer["effective_rows"] == pytest.approx(np.exp(answer["entropy"]))

    def test_words_need_no_quotes(self, table: Path) -> None:
        assert (
            data("ask", table, "the", "odyssey", "-k", "title", "-v", "author")["value"] == "Homer"
        )

    def test_for_people(self, table: Path) -> None:
        result = qkv("ask", table, "Dune", "--key", "title", "--value", "author", "--top", 3)
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        assert lines[0] == "Frank Herbert"
        assert lines[1] == ""
        assert lines[2].split() == ["weight", "key", "value"]
        assert re.fullmatch(r"█+\S* +\d+ % +Dune +Frank Herbert", lines[3])
        assert lines[6] == ""
        assert re.fullmatch(r"effective rows [\d.]+ of 8 · .*sure.* · .+", lines[7])
        assert len(lines) == 8
        assert "\x1b" not in result.output

    def test_all_other_columns_are_the_value(self, table: Path) -> None:
        answer = data("ask", table, "Emma", "--weighting", "hard")
        assert answer["value"] == {"author": "Jane Austen", "year": 1815, "genre": "romance"}
        shown = qkv("ask", table, "Emma", "--weighting", "hard").stdout
        assert shown.startswith("author: Jane Austen\nyear: 1815\ngenre: romance\n")

    def test_a_number_is_asked_as_a_number_and_pooled(self, tmp_path: Path) -> None:
        path = tmp_path / "gpa.csv"
        path.write_text("gpa,salary\n3.0,70\n3.5,80\n4.0,100\n")
        asked = ["ask", path, "3.5", "-k", "gpa", "-v", "salary"]
        assert data(*asked, "--weighting", "average")["value"] == pytest.approx(250 / 3)
        hard = data(*asked, "--weighting", "hard")
        assert (hard["query"], hard["value"]) == (3.5, 80.0)
        shown = qkv(*asked, "--weighting", "average").stdout.splitlines()[0]
        assert np.std([70, 80, 100]) == pytest.approx(12.47, abs=0.01)
        assert shown == "83 ± 12"

    def test_a_negative_number_comes_after_two_dashes(self, table: Path) -> None:
        asked = ["-k", "year", "-v", "title", "-w", "hard", "--", "-700"]
        result = qkv("ask", "--json", *asked[:-2], table, *asked[-2:])
        assert json.loads(result.stdout)["value"] == "The Odyssey"

    def test_a_number_is_demanded_where_keys_are_numbers(self, table: Path) -> None:
        result = qkv("ask", table, "Emma", "-k", "year")
        assert result.exit_code == 2
        assert result.stderr == "qkv: the query must be a number, as the column is, not 'Emma'\n"

    def test_a_key_of_two_columns(self, table: Path) -> None:
        asked = ["ask", table, "-k", "author", "-k", "year", "-v", "title", "-w", "hard"]
        for text in ("Jane Austen, 1817", '["Jane Austen", 1817]'):
            answer = data(*asked, text)
            assert answer["query"] == ["Jane Austen", 1817]
            assert answer["value"] == "Persuasion"
        assert "must have 2 parts, not 1" in qkv(*asked, "Jane Austen").stderr

    def test_score_and_weighting_by_name_and_number(self, table: Path) -> None:
        asked = ["ask", table, "1900", "-k", "year", "-v", "title", "--top", 8]
        near = data(*asked, "--score", "gaussian:0.01", "--weighting", "softmax")
        assert near["rows"][0]["key"] == 1897
        assert near["rows"][0]["weight"] > 0.9
        two = data(*asked, "--weighting", "topk:2")
        assert len(two["rows"]) == 2
        even = data(*asked, "--score", "constant")
        assert [row["weight"] for row in even["rows"]] == pytest.approx([1 / 8] * 8)

    @pytest.mark.parametrize(
        ("condition", "titles"),
        [
            (["genre=romance"], {"Emma", "Persuasion"}),
            (["year=1965"], {"Dune"}),
            (["year > 1900"], {"Dune", "Ulysses", "The Trial", "The Alchemist"}),
            (["year > 1900", "genre=fiction"], {"Ulysses", "The Trial", "The Alchemist"}),
            (["genre = science fiction"], {"Dune"}),
        ],
    )
    def test_where(self, table: Path, condition: list[str], titles: set[str]) -> None:
        options = [x for text in condition for x in ("--where", text)]
        answer = data("ask", table, "a book", "--top", 8, *options)
        assert {row["key"] for row in answer["rows"]} == titles

    def test_where_nothing_is(self, table: Path) -> None:
        answer = data("ask", table, "a book", "--where", "year > 3000", code=1)
        assert answer["rows"] == []
        assert answer["value"] is None
        result = qkv("ask", table, "a book", "--where", "year > 3000")
        assert result.exit_code == 1
        assert result.stdout.startswith("nothing")

    def test_each_line_of_stdin(self, table: Path) -> None:
        result = qkv("ask", table, "-", "-v", "author", "--json", stdin="emma\n\ndune\n")
        found = [json.loads(line)["value"] for line in result.stdout.splitlines()]
        assert found == ["Jane Austen", "Frank Herbert"]

    def test_a_query_that_is_no_text(self, table: Path, store: Path) -> None:
        for arguments in (["ask", table], ["ask", store], ["get", store], ["add", store, "Emma"]):
            result = qkv(*arguments, b"\xff".decode(errors="surrogateescape"), "--json")
            assert result.exit_code == 2
            assert json.loads(result.stdout)["error"] in result.stderr
            assert "is not valid UTF-8" in result.stderr

    def test_control_characters_do_not_reach_the_terminal(self, tmp_path: Path) -> None:
        path = tmp_path / "evil.csv"
        path.write_text("key,value\na,\x1b]0;owned\x07\nb,fine\n")
        result = qkv("ask", path, "a", "--weighting", "hard")
        assert "\x1b" not in result.output
        assert "\x07" not in result.output
        assert r"\x1b]0;owned\x07" in result.stdout
        assert data("ask", path, "a", "--weighting", "hard")["value"] == "\x1b]0;owned\x07"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--key", "titel"], "did you mean 'title'?"),
            (["--score", "gausian"], "did you mean 'gaussian'?"),
            (["--score", "dot:3"], "score dot takes no number"),
            (["--score", "gaussian:wide"], "takes a number, not 'wide'"),
            (["--score", "gaussian:-1"], "bandwidth must be above 0"),
            (["--weighting", "topk"], "topk needs a number: topk:3"),
            (["--weighting", "softmaxx"], "did you mean 'softmax'?"),
            (["--where", "yeer > 3"], "did you mean 'year'?"),
            (["--where", "year >"], "cannot read 'year >'"),
            (["--encoder", "word"], "did you mean 'words'?"),
            (["--at", "3"], "is a table and has no versions"),
        ],
    )
    def test_bad_input_is_one_line_and_code_2(
        self, table: Path, arguments: list[str], message: str
    ) -> None:
        result = qkv("ask", table, "emma", *arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("qkv: ")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1

    @pytest.mark.parametrize("arguments", [["--top", "0"], ["--tpo", "3"], ["--top"]])
    def test_bad_usage(self, table: Path, arguments: list[str]) -> None:
        result = qkv("ask", table, "emma", *arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "Error: " in result.stderr

    def test_sources_that_are_not_there_or_not_tables(self, tmp_path: Path) -> None:
        picture = tmp_path / "picture.csv"
        picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
        for source in (tmp_path / "none.csv", tmp_path / "none.qkv", picture, tmp_path):
            fault = data("ask", source, "x", code=2)
            assert Path(source).name in fault["error"]

    def test_sqlite(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        path = tmp_path / "people.sqlite"
        connection = sqlite3.connect(path)
        with connection:
            connection.execute("CREATE TABLE names (last TEXT, first TEXT)")
            connection.execute("CREATE TABLE other (a TEXT, b TEXT)")
            connection.executemany("INSERT INTO names VALUES (?, ?)", [("Li", "Mu"), ("Hu", "Ra")])
        connection.close()
        assert data("ask", path, "Li", "--table", "names")["value"] == "Mu"
        assert data("ask", "sqlite:///people.sqlite?table=names", "Li")["value"] == "Mu"
        assert data("ask", path, "Li", code=2)["error"].count("names")

    def test_csv_on_stdin(self) -> None:
        assert data("ask", "-", "Li", stdin="last,first\nLi,Mu\nHu,Rachel\n")["value"] == "Mu"


class TestGet:
    def test_exactly(self, table: Path, store: Path) -> None:
        for source in (table, store):
            options = ["--key", "title", "--value", "author"] if source == table else []
            assert qkv("get", source, "Dune", *options).stdout == "Frank Herbert\n"
            assert data("get", source, "Dune", *options) == {
                "key": "Dune",
                "value": "Frank Herbert",
            }

    def test_an_absent_key_names_the_nearest(self, store: Path) -> None:
        result = qkv("get", store, "The Alchmist")
        assert result.exit_code == 1
        assert result.stdout == ""
        assert "no row has the key 'The Alchmist'" in result.stderr
        assert "'The Alchemist'" in result.stderr
        fault = data("get", store, "The Alchmist", code=1)
        assert fault["code"] == 1
        assert fault["nearest"][0] == "The Alchemist"

    def test_every_value_of_a_key_that_repeats(self, table: Path) -> None:
        columns = ["--key", "author", "--value", "title"]
        assert qkv("get", table, "Jane Austen", *columns).stdout == "Persuasion\n"
        assert qkv("get", table, "Jane Austen", "--all", *columns).stdout == "Emma\nPersuasion\n"
        found = data("get", table, "Jane Austen", "--all", *columns)
        assert found == {"key": "Jane Austen", "values": ["Emma", "Persuasion"]}
        assert qkv("get", table, "Jane", "--all", *columns).exit_code == 1


class TestKeep:
    def test_import_then_ask_by_other_columns(self, store: Path) -> None:
        assert data("ask", store, "emma")["value"] == "Jane Austen"
        swapped = data("ask", store, "kafka", "--key", "author", "--value", "title")
        assert swapped["value"] == "The Trial"
        assert data("ask", store, "dune", "--value", "year", "-w", "hard")["value"] == 1965

    def test_import_says_what_it_kept(self, table: Path) -> None:
        path = table.with_name("b.qkv")
        assert data("import", table, path) == {"path": str(path), "rows": 8, "version": 1}
        fault = data("import", table, path, code=2)
        assert "exists" in fault["error"]

    def test_import_whole_or_not_at_all(self, table: Path) -> None:
        path = table.with_name("b.qkv")
        fault = data("import", table, path, "--key", "author", "--unique", code=2)
        assert "unique" in fault["error"]
        assert not path.exists()
        with table.open("a") as file:
            file.write('"never closed\n')
        assert qkv("import", table, path).exit_code == 2
        assert list(table.parent.iterdir()) == [table]
        assert "there is no folder" in qkv("import", table, table.parent / "no" / "b.qkv").stderr

    def test_append(self, table: Path, store: Path) -> None:
        more = table.with_name("more.csv")
        more.write_text("title,author,year,genre\nBeowulf,unknown,1000,poetry\n")
        assert data("import", more, store, "--append")["rows"] == 9
        assert data("get", store, "Beowulf")["value"] == "unknown"
        assert data("import", more, store, "--append", "--key", "title", code=2)
        assert data("import", more, table.with_name("none.qkv"), "--append", code=2)

    def test_add_makes_a_database_and_keeps_types(self, tmp_path: Path) -> None:
        path = tmp_path / "names.qkv"
        assert data("add", path, "Li", "Mu") == {"path": str(path), "rows": 1, "version": 1}
        assert data("add", path, "42", "Deep Thought")["rows"] == 2
        assert data("get", path, "42") == {"key": "42", "value": "Deep Thought"}

        path = tmp_path / "numbers.qkv"
        qkv("add", path, "3.5", "80")
        qkv("add", path, "4", "100")
        assert data("get", path, "4.0")["value"] == 100
        result = qkv("add", path, "four", "100")
        assert result.exit_code == 2
        assert "the key must be a number" in result.stderr
        assert "the value must be a number" in qkv("add", path, "3", "many").stderr

    def test_add_with_several_columns(self, table: Path) -> None:
        path = table.with_name("b.qkv")
        qkv("import", table, path)
        sets = ["--set", "author=Mary Shelley", "--set", "year=1818"]
        assert data("add", path, "Frankenstein", *sets)["rows"] == 9
        assert data("get", path, "Frankenstein")["value"] == {
            "author": "Mary Shelley",
            "year": 1818,
            "genre": None,
        }
        assert data("add", path, "Frankenstein", "--update", "--set", "genre=horror")["rows"] == 9
        assert data("get", path, "Frankenstein")["value"] == {
            "author": "Mary Shelley",
            "year": 1818,
            "genre": "horror",
        }
        assert "use --set for each" in qkv("add", path, "Utopia", "More").stderr
        assert "did you mean 'author'?" in qkv("add", path, "Utopia", "--set", "autor=x").stderr
        assert "COLUMN=TEXT" in qkv("add", path, "Utopia", "--set", "author").stderr
        assert qkv("add", path, "Utopia").exit_code == 2

    def test_update(self, store: Path) -> None:
        assert data("add", store, "Dune", "F. Herbert", "--update")["rows"] == 8
        assert data("get", store, "Dune", "--all")["values"] == ["F. Herbert"]
        assert data("add", store, "Dune", "again")["rows"] == 9

    def test_remove(self, store: Path) -> None:
        result = qkv("remove", store, "Dune", "Duna")
        assert result.exit_code == 1
        assert "'Dune'" in result.stderr
        assert data("info", store)["rows"] == 8
        removed = data("remove", store, "Dune", "Emma")
        assert (removed["removed"], removed["rows"]) == (2, 6)
        assert qkv("get", store, "Dune").exit_code == 1

    def test_info(self, table: Path, store: Path) -> None:
        about = data("info", store)
        assert about["rows"] == 8
        assert about["key"] == ["title"]
        assert about["value"] == ["author"]
        assert about["columns"] == list(NAMES)
        shown = qkv("info", store).stdout.splitlines()
        assert ["rows", "8"] in [line.split() for line in shown]
        assert data("info", table)["rows"] == 8

    def test_versions_and_at(self, store: Path) -> None:
        qkv("remove", store, "Dune")
        found = data("versions", store)["versions"]
        assert [(v["number"], v["added"], v["removed"], v["rows"]) for v in found] == [
            (1, 8, 0, 8),
            (2, 0, 1, 7),
        ]
        assert data("get", store, "Dune", "--at", 1)["value"] == "Frank Herbert"
        assert data("ask", store, "dune", "--at", 1)["value"] == "Frank Herbert"
        assert data("info", store, "--at", 1)["rows"] == 8
        assert qkv("get", store, "Dune", "--at", 2).exit_code == 1
        assert qkv("get", store, "Dune", "--at", 9).exit_code == 2
        shown = qkv("versions", store).stdout.splitlines()
        assert shown[0].split() == ["number", "time", "what", "added", "removed", "rows"]
        assert shown[2].split()[-3:] == ["0", "1", "7"]

    def test_compact(self, store: Path) -> None:
        qkv("remove", store, "Dune")
        report = data("compact", store)
        assert (report["rows"], report["dropped_rows"]) == (7, 1)
        assert len(data("versions", store)["versions"]) == 1
        qkv("remove", store, "Emma")
        result = qkv("compact", store)
        assert result.stdout == f"{store}: 6 rows; dropped 1 removed row, 1 older version\n"

    def test_check(self, store: Path) -> None:
        assert data("check", store) == {"path": str(store), "clean": True, "problems": []}
        assert qkv("check", store).stdout == f"{store}: clean\n"

    def test_a_damaged_file_is_named_and_code_3(self, store: Path) -> None:
        catalogue = next(store.glob("*.sqlite"))
        content = bytearray(catalogue.read_bytes())
        content[:100] = bytes(100)
        catalogue.write_bytes(content)
        for arguments in (["check", store], ["ask", store, "emma"], ["get", store, "Emma"]):
            result = qkv(*arguments)
            assert result.exit_code == 3, (arguments, result.output)
            assert catalogue.name in result.output
        assert data("check", store, code=3)["clean"] is False

    @pytest.mark.filterwarnings("default::qkv.database.faults.SkippedRows")
    def test_other_rows_answer_where_a_segment_is_damaged(self, tmp_path: Path) -> None:
        table, path = tmp_path / "many.csv", tmp_path / "many.qkv"
        table.write_text("key,value\n" + "".join(f"row {i},{i}\n" for i in range(5000)))
        assert qkv("import", table, path, "--encoder", "characters").exit_code == 0
        assert qkv("add", path, "Beowulf", "1000").exit_code == 0
        segment = next(path.rglob("*.safetensors"))
        segment.write_bytes(segment.read_bytes()[:1000])
        fault = data("ask", path, "beowulf", code=3)
        assert segment.name in fault["error"]
        # Exact look-ups need no vectors.
        assert data("get", path, "row 7")["value"] == 7
        result = qkv("ask", path, "beowulf", "--skip-damaged", "--json", "-w", "hard")
        assert result.exit_code == 0
        assert json.loads(result.stdout)["rows"][0]["key"] == "Beowulf"
        assert result.stderr.startswith("qkv: ")
        assert "5,000" in result.stderr

    def test_locked(self, store: Path) -> None:
        from qkv.database import open as open_database

        with open_database(store) as writer:
            writer.extend([{"title": "Beowulf", "author": "unknown"}])
            code, out, err = run("add", store, "Utopia", "More")
            assert code == 4
            assert out == ""
            assert f"locked by process {os.getpid()}" in err
            assert run("get", store, "Beowulf")[:2] == (0, "unknown\n")


class TestLearn:
    def test_what_was_learned_is_a_new_version(self, store: Path) -> None:
        pairs = store.with_name("pairs.csv")
        with pairs.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["query", "key"])
            writer.writerows(
                (f"{word} {author}", title) for title, author, *_ in BOOKS for word in ("by", "of")
            )
        report = data("learn", store, pairs)
        assert report["version"] == 2
        assert set(report["before"]) == set(report["after"]) == {"1", "10", "100"}
        assert data("versions", store)["versions"][-1]["what"] == "learn"

    def test_one_column_is_too_few(self, store: Path) -> None:
        pairs = store.with_name("pairs.csv")
        pairs.write_text("query\nemma\n")
        assert "expected two columns" in data("learn", store, pairs, code=2)["error"]


class TestPlot:
    @pytest.mark.parametrize(
        ("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.html", b"<!doctype")]
    )
    def test_writes_the_picture(self, table: Path, name: str, magic: bytes) -> None:
        pytest.importorskip("matplotlib")
        path = table.with_name(name)
        found = data("plot", table, "emma", "-o", path, "-v", "author")
        assert found["written"] == str(path)
        assert found["value"] == "Jane Austen"
        assert path.read_bytes()[: len(magic)] == magic
        assert qkv("plot", table, "emma", "-o", path).stdout == f"{path}\n"
        assert sorted(p.name for p in table.parent.iterdir()) == sorted([name, "books.csv"])

    def test_bad_names(self, table: Path) -> None:
        assert "must end in" in qkv("plot", table, "emma", "-o", "a.txt").stderr
        assert qkv("plot", table, "emma", "-o", table.parent / "no" / "a.png").exit_code == 2
        assert qkv("plot", table, "-", stdin="emma\n").exit_code == 2


class TestWeights:
    SENTENCE = "The king and the queen."

    def test_rows_are_softmax_of_cosines(self) -> None:
        pytest.importorskip("wordllama")
        from qkv.database.encoders import Words

        found = data("weights", self.SENTENCE)
        assert found["words"] == ["The", "king", "and", "the", "queen", "."]
        vectors = Words().encode(found["words"]).astype(float)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        scores = np.exp(vectors @ vectors.T / 0.3)
        expected = scores / scores.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(found["weights"], expected, rtol=1e-5)

    def test_masks(self) -> None:
        pytest.importorskip("wordllama")
        others = np.array(data("weights", self.SENTENCE, "--others")["weights"])
        assert not others.diagonal().any()
        np.testing.assert_allclose(others.sum(axis=1), 1, rtol=1e-6)
        assert others[1].argmax() == 4  # king → queen
        causal = np.array(data("weights", self.SENTENCE, "--causal")["weights"])
        assert not np.triu(causal, 1).any()
        assert causal[0, 0] == pytest.approx(1)

    def test_picture_and_page(self, tmp_path: Path) -> None:
        pytest.importorskip("wordllama")
        pytest.importorskip("matplotlib")
        png, page = tmp_path / "a.png", tmp_path / "a.html"
        result = qkv("weights", "<b> & 'the' king", "--png", png, "--html", page)
        assert result.exit_code == 0
        assert result.stderr == f"wrote {png}\nwrote {page}\n"
        assert png.read_bytes().startswith(b"\x89PNG")
        cells = Cells()
        cells.feed(page.read_text(encoding="utf-8"))
        words = sentence.WORD.findall("<b> & 'the' king")
        assert cells.heads[: len(words)] == words
        assert len(cells.titles) == len(words) ** 2
        assert "http" not in page.read_text(encoding="utf-8").replace("<!doctype html>", "")

    def test_bad_input(self, tmp_path: Path) -> None:
        assert "has no words" in qkv("weights", "  ").stderr
        assert "at most 200" in qkv("weights", "word " * 201).stderr
        assert "above 0" in qkv("weights", "a b", "--temperature", "0").stderr
        assert "must end in" in qkv("weights", "a b", "--png", tmp_path / "a.txt").stderr

    @pytest.mark.parametrize("width", [12, 20, 40, 80, 200])
    @pytest.mark.parametrize("coloured", [False, True])
    def test_every_weight_is_drawn_within_the_width(self, width: int, coloured: bool) -> None:
        words = sentence.WORD.findall("It was the best of times, it was the worst of 时间")
        alpha = np.full((len(words), len(words)), 1 / len(words))
        lines = sentence.heatmap(words, alpha, width, coloured, ascii_only=False)
        assert max(line.cell_len for line in lines) <= width
        if coloured:
            spans = sum(span.style != "" for line in lines for span in line.spans)
            assert spans == len(words) ** 2

    def test_numbers_and_headings(self) -> None:
        alpha = np.array([[0.75, 0.25], [0.0, 1.0]])
        lines = sentence.heatmap(["to", "be"], alpha, 80, False, ascii_only=False)
        assert [line.plain for line in lines] == ["    to  be ", "to  75  25 ", "be   0 100 "]
        tall = sentence.heatmap(["ab", "longer"], alpha, 17, False, ascii_only=False)
        assert [line.plain.rstrip() for line in tall][:4] == [
            "            l",
            "            o",
            "            n",
            "            g",
        ]

    def test_shades_where_numbers_do_not_fit(self) -> None:
        alpha = np.array([[1.0, 0.0], [0.5, 0.5]])
        lines = sentence.heatmap(["a", "b"], alpha, 6, False, ascii_only=False)
        assert [line.plain for line in lines][1:] == ["a ██  ", "b ▒▒▒▒"]
        lines = sentence.heatmap(["a", "b"], alpha, 6, False, ascii_only=True)
        assert [line.plain for line in lines][1:] == ["a ##  ", "b ::::"]


class Cells(HTMLParser):
    """The headings and the titles of cells in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[str] = []
        self.titles: list[str] = []
        self._head = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._head = tag == "th"
        self.titles += [value or "" for name, value in attrs if name == "title"]

    def handle_data(self, data: str) -> None:
        if self._head and data.strip():
            self.heads.append(data)
            self._head = False


class TestDemo:
    def test_the_stories(self) -> None:
        pytest.importorskip("wordllama")  # by letters alone, proofs are far from mathematics
        result = qkv("demo", "--json")
        assert result.exit_code == 0, result.output
        *stories, last = map(json.loads, result.stdout.splitlines())
        exact, near, major, salary = stories
        assert (exact["value"], exact["rows"][0]["weight"]) == ("Mu", 1.0)
        assert near["value"] == "Mu"
        assert near["rows"][0]["weight"] < 1
        assert major["value"] == "Jane Roe"
        assert 70 < salary["value"] < 80
        assert last["next"]
        assert "Try next" in qkv("demo").stdout


PLUGIN = """
from dataclasses import dataclass

import numpy as np
from qkv import scores, weightings
from qkv.database import encoders

@scores.register("far")
@dataclass(frozen=True)
class Far(scores.Score):
    factor: float = 1.0

    def __call__(self, query, key):
        return -self.factor * scores.Laplace()(query, key)

@weightings.register("second")
@dataclass(frozen=True)
class Second(weightings.Weighting):
    def weights(self, scores, live, k):
        return self.weight(scores, live, k, ())

    def weight(self, scores, live, k, found):
        return 0.0 * scores + (k == 1)

@encoders.register("lengths")
@dataclass(frozen=True)
class Lengths(encoders.Encoder):
    kind = "lengths"
    width = 1

    def encode(self, keys):
        return np.array([[len(key)] for key in keys], np.float32).reshape(-1, 1)

    def score(self, rows):
        return scores.Gaussian(0.1)

    def settings(self):
        return {"kind": self.kind}

    @classmethod
    def build(cls, settings, arrays):
        return cls()
"""


class TestPlugin:
    """In processes of their own, so that no name outlives its test."""

    @pytest.fixture
    def mine(self, tmp_path: Path) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(PLUGIN)
        return path

    def test_a_score_a_weighting_and_an_encoder(self, mine: Path, table: Path) -> None:
        columns = ("--key", "title", "--value", "author", "--json")

        def answer(*options: str) -> Any:
            code, out, err = run("--plugin", mine, "ask", table, "Five!", *columns, *options)
            assert (code, err) == (0, "")
            return json.loads(out)

        assert answer("-w", "second")["value"] == "Jane Austen"
        near = answer("-e", "lengths")  # Emma and Dune have one letter less, each other more
        assert {row["key"] for row in near["rows"][:2]} == {"Emma", "Dune"}
        assert answer("-e", "lengths", "-s", "far", "-w", "hard")["value"] == "Paulo Coelho"
        one, two = (answer("-e", "lengths", "-s", f"far:{x}")["rows"][0] for x in (0.1, 1))
        assert one["key"] == two["key"] == "The Alchemist"
        assert one["weight"] < two["weight"]

    def test_a_database_with_such_an_encoder(self, mine: Path, table: Path) -> None:
        store = table.with_suffix(".qkv")
        made = run("--plugin", mine, "import", table, store, "-k", "title", "-e", "lengths")
        assert made[0] == 0
        assert run("--plugin", mine, "ask", store, "Five!")[0] == 0
        code, out, err = run("ask", store, "Five!")
        assert (code, out) == (2, "")
        assert "unknown encoder 'lengths'" in err and "encoders.register" in err

    def test_a_module_on_the_path_and_several(self, mine: Path, table: Path) -> None:
        other = mine.with_name("other.py")
        other.write_text("import mine\n")
        env = {"PYTHONPATH": os.pathsep.join([HERE["PYTHONPATH"], str(mine.parent)])}
        asked = ("ask", table, "Emma", "-s", "far", "--json")
        assert run("--plugin", "json", "--plugin", "mine", *asked, env=env)[0] == 0
        assert run("--plugin", other, *asked, env=env)[0] == 0

    @pytest.mark.parametrize(
        ("name", "text", "says"),
        [
            ("absent.py", None, "there is no such file"),
            ("no_such_module", None, "ModuleNotFoundError: No module named 'no_such_module'"),
            ("wrong.py", "1 / 0", "ZeroDivisionError: division by zero"),
            ("wrong.py", "def", "SyntaxError: invalid syntax"),
            ("wrong.py", "from qkv import scores; scores.register('dot', scores.Exact)", "choose"),
        ],
    )
    def test_one_that_fails_is_one_line(
        self, name: str, text: str | None, says: str, tmp_path: Path, table: Path
    ) -> None:
        path = tmp_path / name if name.endswith(".py") else name
        if text is not None:
            Path(path).write_text(text)
        fault = data("--plugin", path, "ask", table, "Emma", code=2)
        assert fault["error"].startswith(f"--plugin {path} cannot be imported: ")
        assert says in fault["error"]
        shown = qkv("--plugin", path, "ask", table, "Emma").stderr
        assert shown == f"qkv: {fault['error']}\n"


class TestHelp:
    def test_every_command_explains_itself(self) -> None:
        result = qkv("--help")
        assert result.exit_code == 0
        for name in COMMANDS:
            assert re.search(rf"^  {name} ", result.stdout, re.MULTILINE)
            one = qkv(name, "--help")
            assert one.exit_code == 0
            assert "--json" in one.stdout
            assert "--debug" in one.stdout
        # A sentence that was cut ends in three dots.
        assert "...\n" not in result.stdout.partition("Commands:")[2]

    def test_exit_codes_are_documented(self) -> None:
        shown = qkv("--help").stdout
        page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
        for code, meaning in command.CODES.items():
            assert f"{code}  {meaning}" in shown
            assert f"| {code} | {meaning} |" in page

    def test_docs_name_every_command_and_shared_option(self) -> None:
        page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
        for name in COMMANDS:
            assert f"`qkv {name}" in page
        for option in re.findall(
            r"^  (?:-\w, )?(--\w+)", qkv("ask", "--help").stdout, re.MULTILINE
        ):
            assert option in page or option == "--help"

    def test_help_loads_neither_numpy_nor_rich(self) -> None:
        code = (
            "import sys\nfrom qkv.cli import app\n"
            "try: app(['--help'], prog_name='qkv')\nexcept SystemExit: pass\n"
            "print(sorted({m.partition('.')[0] for m in sys.modules} & {'numpy', 'rich'}))"
        )
        out = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=HERE
        ).stdout
        assert out.splitlines()[-1] == "[]"

    def test_version(self) -> None:
        import qkv as package

        assert qkv("--version").stdout == f"qkv {package.__version__}\n"

    @pytest.mark.parametrize(
        ("line", "found"),
        [
            ("qkv vers", "versions"),
            ("qkv ask t.csv x --score gau", "gaussian"),
            ("qkv ask t.csv x --weighting top", "topk:"),
            ("qkv import t.csv t.qkv --encoder wo", "words"),
            ("qkv ask book", "books.csv"),
        ],
    )
    def test_completion(self, table: Path, line: str, found: str) -> None:
        words = line.split()
        environment = {
            "_QKV_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
        }
        out = run(env=environment, cwd=table.parent)[1]
        assert found in out.split()


class TestProcess:
    """What only a real process shows."""

    def test_a_terminal_is_coloured_and_nothing_wider_than_it(self, table: Path) -> None:
        pty = pytest.importorskip("pty")

        def shown(width: int, **environment: str) -> str:
            ours, theirs = pty.openpty()
            child = subprocess.Popen(
                [sys.executable, "-m", "qkv.cli", "ask", str(table), "Dune"],
                stdout=theirs,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                env=HERE | {"TERM": "xterm-256color", "COLUMNS": str(width)} | environment,
            )
            os.close(theirs)
            parts = []
            while True:
                try:
                    part = os.read(ours, 65536)
                except OSError:  # Linux's word for the end of a terminal
                    break
                if not part:
                    break
                parts.append(part)
            os.close(ours)
            assert child.communicate(timeout=60)[1] == b""
            assert child.returncode == 0
            return b"".join(parts).decode()

        text = shown(40)
        assert "\x1b[" in text
        assert "…" in text
        plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
        rows = [line for line in plain.splitlines() if "%" in line]
        assert len(rows) == 5
        assert max(map(len, rows)) <= 40
        text = shown(80, NO_COLOR="1")
        assert "\x1b[3" not in text

    def test_a_reader_that_goes_away(self, tmp_path: Path) -> None:
        lines = "\n".join(["Li"] * 2000)
        table = tmp_path / "names.csv"
        table.write_text("last,first\nLi,Mu\nHu,Rachel\n")
        with process("ask", table, "-", "--json", stdin=subprocess.PIPE) as child:
            assert child.stdin and child.stdout and child.stderr
            child.stdin.write(lines)
            child.stdin.close()
            child.stdout.readline()
            child.stdout.close()
            assert child.wait(timeout=60) == command.PIPE
            assert child.stderr.read() == ""

    def test_ctrl_c(self, tmp_path: Path) -> None:
        table = tmp_path / "names.csv"
        table.write_text("last,first\nLi,Mu\nHu,Rachel\n")
        with process("ask", table, "-", "--json", stdin=subprocess.PIPE) as child:
            assert child.stdin and child.stdout and child.stderr
            child.stdin.write("Li\n")
            child.stdin.flush()
            assert json.loads(child.stdout.readline())["value"] == "Mu"  # it waits for more now
            time.sleep(0.1)
            child.send_signal(signal.SIGINT)
            assert child.wait(timeout=60) == 130
            assert child.stderr.read() == "qkv: stopped\n"

    def test_ctrl_c_leaves_nothing_half_imported(self, tmp_path: Path) -> None:
        table, path = tmp_path / "names.csv", tmp_path / "names.qkv"
        table.write_text("key,value\n" + "".join(f"name {i},{i}\n" for i in range(50_000)))
        with process("import", table, path) as child:
            while not list(tmp_path.glob(".names.qkv.*")) and child.poll() is None:
                time.sleep(0.01)
            time.sleep(0.2)
            child.send_signal(signal.SIGINT)
            assert child.wait(timeout=60) == 130
            assert child.stderr.read() == "qkv: stopped\n"
        assert list(tmp_path.iterdir()) == [table]

    def test_an_encoding_without_blocks(self, tmp_path: Path) -> None:
        table = tmp_path / "names.csv"
        table.write_text("last,first\nLi,Mü\nHu,黎\n", encoding="utf-8")
        environment = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        code, out, err = run("ask", table, "Hu", "-w", "hard", env=environment)
        assert (code, err) == (0, "")
        assert out.splitlines()[0] == "?"
        assert "####" in out

    def test_no_progress_outside_a_terminal(self, table: Path) -> None:
        code, out, err = run("import", table, table.with_suffix(".qkv"))
        assert (code, err) == (0, "")
        assert out == f"{table.with_suffix('.qkv')}: 8 rows, version 1\n"


class TestErrors:
    def test_each_has_its_code(self) -> None:
        from qkv.database.faults import Damaged, Locked

        cases: list[tuple[BaseException, int]] = [
            (command.Nothing("x"), 1),
            (ArgumentError("x"), 2),
            (QkvError("x"), 2),
            (FileNotFoundError(2, "No such file", "a.csv"), 2),
            (Damaged("x"), 3),
            (Locked("x"), 4),
            (MissingExtra("x"), 5),
            (ZeroDivisionError("x"), 70),
            (KeyboardInterrupt(), 130),
            (BrokenPipeError(), 141),
        ]
        for error, code in cases:
            assert command.diagnose(error)[0] == code
        assert command.diagnose(PermissionError(13, "Denied", "a.csv"))[1] == "a.csv: Denied"

    def test_a_bug_is_one_line_unless_debugged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError("by naught")

        monkeypatch.setattr(sentence, "attend", broken)
        result = qkv("weights", "a b")
        assert result.exit_code == 70
        assert result.stderr.startswith("qkv: a bug, ZeroDivisionError: by naught.")
        assert result.stderr.count("\n") == 1
        result = qkv("weights", "a b", "--debug")
        assert result.exit_code == 70
        assert "Traceback" in result.stderr

    def test_json_stays_json(self) -> None:
        assert data("weights", " ", code=2) == {
            "error": "the sentence ' ' has no words",
            "code": 2,
        }


class TestScreen:
    def test_json_is_strict(self) -> None:
        text = screen.json_text({"a": float("nan"), "b": np.float32(0.5), "c": (1, [np.int64(2)])})
        assert json.loads(text) == {"a": None, "b": 0.5, "c": [1, [2]]}

    @pytest.mark.parametrize(
        ("weight", "text"),
        [
            (1, "100 %"),
            (0.996, "100 %"),
            (0.0995, "10 %"),
            (0.05, "5.0 %"),
            (0.0004, "0.04 %"),
            (1e-9, "<0.01 %"),
            (0.0, "0 %"),
            (float("nan"), "NaN"),
            (-0.25, "-25 %"),
        ],
    )
    def test_percent(self, weight: float, text: str) -> None:
        assert screen.percent(weight) == text

    def test_a_bar_stays_in_its_box(self) -> None:
        for share in (-1.0, 0.0, 0.01, 0.5, 1.0, 7.0, float("nan")):
            for plain in (False, True):
                assert len(screen.bar(share, 10, ascii_only=plain)) <= 10
        assert screen.bar(1.0, 10) == "█" * 10
        assert screen.bar(float("nan"), 10) == ""


class TestSource:
    def test_a_password_is_not_shown(self) -> None:
        fault = data("ask", "postgresql://li:secret@localhost/x", "q", "--at", 1, code=2)
        assert "postgresql://li@localhost/x" in fault["error"]
        assert "secret" not in fault["error"]


class TestValues:
    @pytest.mark.parametrize(
        ("text", "example", "expected"),
        [
            ("007", "agent", "007"),
            ("007", 1, 7),
            ("1e3", 1, 1000.0),
            ("2001-02-03", date(1999, 1, 1), date(2001, 2, 3)),
            ('{"a": 1}', {"b": 2}, {"a": 1}),
            ("text", {"b": 2}, "text"),
            ("raw", b"x", b"raw"),
            ('a, "b, c"', ("x", "y"), ("a", "b, c")),
        ],
    )
    def test_like(self, text: str, example: Any, expected: Any) -> None:
        assert values.like(text, example) == expected

    def test_a_vector(self) -> None:
        found = values.like("0.5, -1", np.zeros(2))
        np.testing.assert_array_equal(found, [0.5, -1])
        for text in ("0.5", "a,b", "[1, 2, 3]"):
            with pytest.raises(ArgumentError, match="must be 2 numbers"):
                values.like(text, np.zeros(2))

    def test_where_leaves_comparisons_alone(self) -> None:
        for text in ("a == 1", "a <= 1", "a >= 1", "a != 1", "'x=y' in a"):
            assert values.where([text]) == text
        assert values.where(["a=it's"]) == '`a` == "it\'s"'
        assert values.where(["first name=Li"]) == "`first name` == 'Li'"
        assert values.where(None) is None
