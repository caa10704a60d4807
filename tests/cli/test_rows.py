"""`qkv rows` and `qkv export`."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from qkv.cli import terminal
from tests.cli.run import BOOKS, NAMES, data, qkv, run


def test_a_page_of_rows(store: Path) -> None:
    page = data("rows", store, "--from", 2, "--count", 3)
    assert (page["from"], page["total"]) == (2, 8)
    assert page["rows"] == [dict(zip(NAMES, row, strict=True)) for row in BOOKS[2:5]]
    rows = data("rows", store, "--where", "year < 1900", "--count", 2)
    assert [row["title"] for row in rows["rows"]] == ["Emma", "Dracula"]
    assert rows["total"] == 4
    assert data("rows", store, "--from", 99, code=1)["rows"] == []


def test_rows_for_people_and_for_pipes(table: Path) -> None:
    shown = qkv("rows", table, "--count", 2)
    heading, first, _ = shown.stdout.splitlines()
    assert heading.split() == list(NAMES)
    assert first.split(maxsplit=1) == ["0", "The Alchemist  Paulo Coelho  1988  fiction"]
    assert "rows 0 to 1 of 8; the next: --from 2" in shown.stderr
    assert "the next" not in qkv("rows", table).stderr
    assert "No rows from 9 on: there are 8" in qkv("rows", table, "--from", 9).stderr
    none = qkv("rows", table, "--where", "genre=tea")
    assert none.exit_code == 1
    assert none.stderr.startswith("No rows match where=\"`genre` == 'tea'\"; column 'genre' has")


def test_columns_that_do_not_fit_a_terminal_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"column_{i:02}" for i in range(40)]
    (tmp_path / "wide.csv").write_text(",".join(names) + "\n" + ",".join(["3.14159"] * 40) + "\n")
    full = qkv("rows", tmp_path / "wide.csv")
    assert names[-1] in full.stdout and "no room" not in full.output
    monkeypatch.setattr(terminal, "is_terminal", lambda stream=None: stream is None)
    monkeypatch.setattr(terminal, "terminal_width", lambda: 60)
    result = qkv("rows", tmp_path / "wide.csv")
    _, line = result.stdout.splitlines()
    assert len(line) <= 60 and line.split() == ["0", *["3.14159"] * 5]
    assert "35 of 40 columns do not fit" in result.stderr


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_export_is_imported_again(store: Path, ending: str) -> None:
    out = store.with_name(f"out{ending}")
    assert data("export", store, out) == {"written": str(out), "rows": 8}
    assert data("rows", out) == data("rows", store)
    message = data("export", store, out, code=2)["error"]
    assert message == f"{out} exists: overwrite it with --overwrite, or choose another name"
    again = data("export", store, out, "--overwrite", "--where", "genre=romance")
    assert again["rows"] == 2
    assert [row["title"] for row in data("rows", out)["rows"]] == ["Emma", "Persuasion"]


def test_export_into_a_pipe(store: Path) -> None:
    code, out, err = run("export", store, "-")
    assert (code, err) == (0, "")
    heading, *rows = csv.reader(io.StringIO(out, newline=""))
    assert tuple(heading) == NAMES
    assert rows == [[str(cell) for cell in row] for row in BOOKS]


def test_export_says_what_is_wrong(store: Path) -> None:
    assert "must end in .csv, .tsv" in data("export", store, "out.xlsx", code=2)["error"]
    assert "no folder" in data("export", store, store / "no" / "a.csv", code=2)["error"]
    wrong = data("export", store, "out.csv", "--where", "years < 3", code=2)
    assert "did you mean 'year'" in wrong["error"]
