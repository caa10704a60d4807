"""`qkv import`, `add`, `remove`, `info`, `versions`, `check` and `compact`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from qkv import open as qkv_open
from tests.cli.run import NAMES, data, qkv, run


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

    def test_append_keeps_text_that_looks_like_numbers_or_dates(self, tmp_path: Path) -> None:
        first, store = tmp_path / "a.csv", tmp_path / "a.qkv"
        first.write_text("code,since\na1,long ago\n")
        data("import", first, store, "--key", "code", "--value", "since")
        for more in ("1.50,2024-01-01", "2024-01-02,3", "b2,NA"):
            first.write_text(f"code,since\n{more}\n")
            assert qkv("import", first, store, "--append").exit_code == 0
        with qkv_open(store) as database:
            result = [*database.items()]
        assert result[1:] == [("1.50", "2024-01-01"), ("2024-01-02", "3"), ("b2", None)]

    def test_append(self, table: Path, store: Path) -> None:
        more = table.with_name("more.csv")
        more.write_text("title,author,year,genre\nBeowulf,unknown,1000,poetry\n")
        assert data("import", more, store, "--append")["rows"] == 9
        assert data("get", store, "Beowulf")["value"] == "unknown"
        assert data("import", more, store, "--append", "--key", "title", code=2)
        assert data("import", more, table.with_name("none.qkv"), "--append", code=2)

    def test_an_update_says_whether_it_inserted(self, store: Path) -> None:
        assert data("add", store, "Emma", "J. Austen", "--update")["inserted"] is False
        assert data("add", store, "Emma 2", "nobody", "--update")["inserted"] is True
        assert "inserted" not in data("add", store, "Emma", "again")
        output = qkv("add", store, "Emma 3", "nobody", "--update").stdout
        assert "inserted, because no row had the key; 11 rows" in output

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

    @pytest.mark.filterwarnings("always::qkv.NoHeaderWarning")
    def test_a_table_without_a_line_of_names(self, tmp_path: Path) -> None:
        path, store = tmp_path / "t.csv", tmp_path / "t.qkv"
        path.write_text("Berlin,3.6\nParis,2.1\n", encoding="utf-8")
        result = qkv("get", path, "Paris")
        assert result.exit_code == 0 and "--names" in result.stderr
        named = ("--names", "city, people")
        assert data("get", path, "Paris", *named) == {"key": "Paris", "value": 2.1}
        assert data("rows", path, *named)["total"] == 2
        shown = qkv("import", path, store, *named)
        assert shown.exit_code == 0 and shown.stderr == ""
        assert data("info", store)["columns"] == ["city", "people"]
        assert qkv("import", path, store, "--append", *named).exit_code == 0
        assert data("ask", path, "Berlin", *named, "-w", "hard")["value"] == 3.6
        assert qkv("info", store, *named).exit_code == 2

    @pytest.mark.filterwarnings("always::qkv.database.errors.SkippedRowsWarning")
    def test_info_tells_of_types_and_missing_cells(self, tmp_path: Path) -> None:
        path = tmp_path / "people.csv"
        path.write_text("name,age,code\nLi,34,NA\nMu,NA,DE\n,3,\n")
        about = data("info", path)
        assert about["types"] == {"name": "text", "age": "number", "code": "text"}
        assert about["missing"] == {"name": 0, "age": 1, "code": 1}
        shown = qkv("info", path)
        assert "name (text), age (number, 1 missing), code (text, 1 missing)" in shown.stdout
        assert "1 of 3 rows has no key (column name): skipped" in shown.stderr
        assert data("info", path, "--missing", "")["types"]["age"] == "text"
        store = tmp_path / "people.qkv"
        assert qkv("import", path, store, "--missing", "34").exit_code == 0
        assert data("info", store)["missing"] == {"name": 0, "age": 1, "code": 0}
        assert qkv("info", store, "--missing", "x").exit_code == 2

    @pytest.mark.filterwarnings("always::qkv.MixedColumnWarning")
    def test_versions_stay_text(self, tmp_path: Path) -> None:
        path, store = tmp_path / "t.csv", tmp_path / "t.qkv"
        path.write_text("version,what\n1.9,a\n1.10,b\n1.1,c\n")
        assert "--text version" in qkv("info", path).stderr
        options = ("--text", "version")
        assert data("ask", path, "1.10", "-k", "version", *options)["value"] == "b"
        assert qkv("import", path, store, "-k", "version", *options).stderr == ""
        assert data("get", store, "1.10")["value"] == "b"
        assert qkv("info", store, *options).exit_code == 2

    def test_times_of_day_are_compared_as_times(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_text("start,shift\n8:00,early\n14:30,late\n22:15,night\n")
        for query in ("13:50", "14:30", "14:30:00"):
            assert data("ask", path, query, "-k", "start")["value"] == "late"
        assert data("get", path, "14:30", "-k", "start")["value"] == "late"
        where = ("-k", "shift", "--where", "start > '9:00' and start < '20:00'")
        assert data("ask", path, "night", *where)["rows"][0]["key"] == "late"

    def test_versions_and_at(self, store: Path) -> None:
        qkv("remove", store, "Dune")
        result = data("versions", store)["versions"]
        assert [(v["number"], v["added"], v["removed"], v["rows"]) for v in result] == [
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

    @pytest.mark.filterwarnings("default::qkv.database.errors.SkippedRowsWarning")
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
