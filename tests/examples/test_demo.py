"""The demo runs from beginning to end, leaves all or nothing, and its books are in order."""

import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import qkv

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BOOKS = EXAMPLES / "data" / "books.csv"
PICTURES = {
    *("books.png", "names.png", "one_hot.png", "salary.png", "scores.png", "sentence.png"),
}

pytest.importorskip("matplotlib")
pytest.importorskip("wordllama")


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(out), *more]
    pipe = subprocess.PIPE
    settings = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=settings)


def run(out: Path, *more: str) -> str:
    process = start(out, *more)
    output, wrong = process.communicate(timeout=300)
    assert process.returncode == 0, wrong
    assert not wrong
    return output


def test_the_books_are_in_order() -> None:
    raw = BOOKS.read_bytes()
    assert b"\r" not in raw
    rows = list(csv.DictReader(raw.decode().splitlines()))
    assert list(rows[0]) == ["title", "author", "year", "genre", "summary"]
    assert len(rows) == len({row["title"].casefold() for row in rows}) == 300
    assert {row["title"]: (row["author"], row["year"]) for row in rows}["The Alchemist"] == (
        "Paulo Coelho",
        "1988",
    )
    assert len({row["genre"] for row in rows}) == 16
    years = [int(row["year"]) for row in rows]
    assert years == sorted(years)
    for row in rows:
        assert 12 <= len(row["summary"].split()) <= 30, row["title"]
        assert all(cell == cell.strip() and cell for cell in row.values())


def test_every_story_is_printed(tmp_path: Path) -> None:
    output = run(tmp_path / "demo")
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {
        "books.qkv",
        "page.html",
        *PICTURES,
    }
    assert "the alchmist → Paulo Coelho" in output
    weights = re.findall(r"^ +(0\.\d{3}) .*  \S+", output.split('B.ask("war")\n')[1], re.M)[:3]
    assert min(map(float, weights)) > 0.05, "the soft example must share its weight"
    assert "a boy seeks treasure near the pyramids → The Alchemist" in output
    assert "Lee → Mu" in output
    assert "['John Doe', 'Amina Diallo']" in output
    assert "3.5 → 79.08" in output
    assert output.rstrip().endswith("books.qkv --open")
    with qkv.open(tmp_path / "demo" / "books.qkv", create=False) as B:
        assert len(B) == 300
        assert B["The Alchemist"] == "Paulo Coelho"


def test_a_store_that_was_changed_is_kept(tmp_path: Path) -> None:
    run(tmp_path, "--only", "books")
    with qkv.open(tmp_path / "books.qkv", create=False) as B:
        B.add("The Trial", "Franz Kafka")
    assert "books-1.qkv" in run(tmp_path, "--only", "books")
    with qkv.open(tmp_path / "books-1.qkv", create=False) as B:
        assert B["The Trial"] == "Franz Kafka"
    with qkv.open(tmp_path / "books.qkv", create=False) as B:
        assert "The Trial" not in B
    assert "books-2.qkv" not in run(tmp_path, "--only", "books")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_halfway_it_leaves_nothing(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if "effective rows" in line:  # after half of the stories
            break
    process.send_signal(sent)
    _, wrong = process.communicate(timeout=300)
    assert process.returncode == code
    assert not wrong
    assert not list(tmp_path.iterdir())
