"""`qkv ask`, `get` and `plot`."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tests.cli.run import data, qkv


class TestAsk:
    def test_a_slip_of_the_hand_finds_its_book(self, table: Path) -> None:
        answer = data("ask", table, "the alchmist", "--key", "title", "--value", "author")
        fields = ["query", "value", "mean", "value_is_mean", "rows", "entropy", "effective_rows"]
        fields += ["total", "missing", "exact", "error_bound", "rows_read", "statistical"]
        fields += ["engine", "hint", "confidence", "confidence_text", "expected_error"]
        assert answer["mean"] is None and answer["value_is_mean"] is False
        assert list(answer) == fields and answer["missing"] == 0 and answer["hint"] == ""
        assert not answer["exact"]
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

    def test_a_number_among_values_of_other_types_has_no_spread(self, tmp_path: Path) -> None:
        path = tmp_path / "mix.jsonl"
        path.write_text('{"k":"x","v":1.5}\n{"k":"z","v":"t"}\n')
        assert qkv("ask", path, "x").stdout.splitlines()[0] == "1.5"

    def test_infinite_values_have_no_spread(self, tmp_path: Path) -> None:
        path = tmp_path / "ends.jsonl"
        path.write_text('{"k": 1.0, "v": Infinity}\n{"k": 2.0, "v": Infinity}\n')
        assert qkv("ask", path, "1.5", "-k", "k", "-v", "v").stdout.splitlines()[0] == "inf"
        assert data("ask", path, "1.5", "-k", "k", "-v", "v")["value"] == "inf"

    def test_a_vector_finds_its_row_and_a_hint_says_where_none_is_near(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "vectors.jsonl"
        path.write_text('{"k": [0.6, 0.7], "v": "short"}\n{"k": [3.0, 4.0], "v": "long"}\n')
        command = ["ask", path, "0.6,0.7", "-k", "k", "-v", "v"]
        assert qkv(*command).stdout.startswith("short\n") and not data(*command)["hint"]
        assert qkv(*command, "--score", "dot").stdout.startswith("long\n")
        path.write_text('{"k": [1.0, 0.0, 0.0], "v": "x"}\n{"k": [0.0, 1.0, 0.0], "v": "y"}\n')
        command = ["ask", path, "0.0,0.0,1.0", "-k", "k", "-v", "v"]
        advice = "score='gaussian' to compare distances"
        assert advice in qkv(*command).stdout.splitlines()[-1] and advice in data(*command)["hint"]
        assert advice not in qkv(*command, "--score", "cosine").stdout

    def test_a_number_of_the_best_key_has_the_mean_beside_it(self, table: Path) -> None:
        command = ["ask", table, "the alchmist", "-k", "title", "-v", "year"]
        answer, shown = data(*command), qkv(*command).stdout
        assert answer["value"] == 1988 and not answer["value_is_mean"]
        assert abs(answer["mean"] - 1988) > 1 and answer["spread"] > 10
        first = shown.splitlines()[0]
        match = re.fullmatch(r"1988  \(mean of all rows (\S+) ± (\S+)\)", first)
        assert match and float(match[1]) == pytest.approx(answer["mean"], abs=0.5)
        assert float(match[2]) == pytest.approx(answer["spread"], rel=0.05)

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
        command = ["ask", path, "3.5", "-k", "gpa", "-v", "salary"]
        assert data(*command, "--weighting", "average")["value"] == pytest.approx(250 / 3)
        hard = data(*command, "--weighting", "hard")
        assert (hard["query"], hard["value"]) == (3.5, 80.0)
        shown = qkv(*command, "--weighting", "average").stdout.splitlines()[0]
        assert np.std([70, 80, 100]) == pytest.approx(12.47, abs=0.01)
        assert shown == "83 ± 12"

    def test_a_negative_number_comes_after_two_dashes(self, table: Path) -> None:
        command = ["-k", "year", "-v", "title", "-w", "hard", "--", "-700"]
        result = qkv("ask", "--json", *command[:-2], table, *command[-2:])
        assert json.loads(result.stdout)["value"] == "The Odyssey"

    def test_a_number_is_demanded_where_keys_are_numbers(self, table: Path) -> None:
        result = qkv("ask", table, "Emma", "-k", "year")
        assert result.exit_code == 2
        assert result.stderr == "qkv: the query must be a number, as the column is, not 'Emma'\n"
        comma = qkv("ask", table, "1815,5", "-k", "year")
        assert comma.stderr.endswith("as the column is, not '1815,5': write 1815.5\n")

    def test_a_key_of_two_columns(self, table: Path) -> None:
        command = ["ask", table, "-k", "author", "-k", "year", "-v", "title", "-w", "hard"]
        for text in ("Jane Austen, 1817", '["Jane Austen", 1817]'):
            answer = data(*command, text)
            assert answer["query"] == ["Jane Austen", 1817]
            assert answer["value"] == "Persuasion"
        assert "must have 2 parts, not 1" in qkv(*command, "Jane Austen").stderr

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
            (["genre = 'science fiction'"], {"Dune"}),
            (["genre = 'romance' and year < 1816"], {"Emma"}),
            (["genre=romance and year<1816"], {"Emma"}),
            (["genre=romance AND year=1815"], {"Emma"}),
            (["genre=romance or year=1965"], {"Emma", "Persuasion", "Dune"}),
            (["not genre=fiction and year > 1900"], {"Dune"}),
            (["(genre=romance or genre=science fiction) and year > 1816"], {"Persuasion", "Dune"}),
            (['genre="romance" and year IS NOT NULL and year<>1815'], {"Persuasion"}),
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
        assert result.stdout.startswith("nothing: No rows match where='year > 3000'; column 'year'")
        assert "No rows match" in answer["hint"]

    @pytest.mark.parametrize(
        ("condition", "says"),
        [
            ("genre=romance, year=1815", "Write \"genre='romance' and year=…\""),
            ("genre=romance & year=1815", "Write \"genre='romance' and year=…\""),
            ("genre=romance | year=1815", "Write \"genre='romance' or year=…\""),
            ("genre=romance year=1815", "or put the text in quotes: genre='romance year=1815'"),
            ("genre=romance and yeer=1815", "did you mean 'year'?"),
            ("genre=romance and year between 1 and 2", "for between, write 1900 <= year <= 1950"),
            ("genre=romance and title like 'E%'", "for like, write 'part of a text' in column"),
        ],
    )
    def test_a_condition_that_is_not_read_says_how_to_write_it(
        self, table: Path, condition: str, says: str
    ) -> None:
        result = qkv("ask", table, "a book", "--where", condition)
        assert result.exit_code == 2
        assert says in result.stderr

    def test_each_line_of_stdin(self, table: Path) -> None:
        result = qkv("ask", table, "-", "-v", "author", "--json", stdin="emma\n\ndune\n")
        actual = [json.loads(line)["value"] for line in result.stdout.splitlines()]
        assert actual == ["Jane Austen", "Frank Herbert"]

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
            (["--where", "year >"], "cannot parse 'year >'"),
            (["--encoder", "word"], "did you mean 'words'?"),
            (["--at", "3"], "is a table without versions"),
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
        assert "--table names" in data("ask", path, "Li", code=2)["error"]

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
        newest = qkv("get", table, "Jane Austen", *columns)
        assert newest.stdout == "Persuasion\n"
        assert newest.stderr == "2 rows have this key; this is the newest. --all prints them all.\n"
        assert data("get", table, "Jane Austen", *columns) == {
            "key": "Jane Austen",
            "value": "Persuasion",
            "rows": 2,
        }
        assert qkv("get", table, "Homer", *columns).stderr == ""
        assert qkv("get", table, "Jane Austen", "--all", *columns).stdout == "Emma\nPersuasion\n"
        result = data("get", table, "Jane Austen", "--all", *columns)
        assert result == {"key": "Jane Austen", "values": ["Emma", "Persuasion"]}
        assert qkv("get", table, "Jane", "--all", *columns).exit_code == 1


class TestPlot:
    @pytest.mark.parametrize(
        ("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.html", b"<!doctype")]
    )
    def test_writes_the_picture(self, table: Path, name: str, magic: bytes) -> None:
        pytest.importorskip("matplotlib")
        path = table.with_name(name)
        result = data("plot", table, "emma", "-o", path, "-v", "author")
        assert result["written"] == str(path)
        assert result["value"] == "Jane Austen"
        assert path.read_bytes()[: len(magic)] == magic
        assert qkv("plot", table, "emma", "-o", path).stdout == f"{path}\n"
        assert sorted(p.name for p in table.parent.iterdir()) == sorted([name, "books.csv"])

    def test_bad_names(self, table: Path) -> None:
        assert "must end in" in qkv("plot", table, "emma", "-o", "a.txt").stderr
        assert qkv("plot", table, "emma", "-o", table.parent / "no" / "a.png").exit_code == 2
        assert qkv("plot", table, "-", stdin="emma\n").exit_code == 2
        assert "name the output file with --output" in qkv("plot", table, "emma", "a.png").stderr


def test_a_negative_number_is_no_option(tmp_path: Path) -> None:
    path = tmp_path / "temperatures.csv"
    path.write_text("celsius,what\n-5,ice\n3,cold\n20,warm\n")
    for query in (["-5"], ["-n", "2", "-4.9"]):
        assert data("ask", path, "-k", "celsius", *query)["value"] == "ice"
    assert data("ask", "-k", "celsius", path, "-1.7e12")["query"] == -1.7e12
    assert data("get", path, "-5", "-k", "celsius")["value"] == "ice"
    ended = qkv("ask", path, "--tpo", "3")
    assert ended.exit_code == 2 and "No such option: --tpo" in ended.stderr
