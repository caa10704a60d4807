"""A table of books as a file, and as a database."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.cli.run import BOOKS, NAMES, qkv


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
