"""One served of small databases, and the app over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import qkv
from qkv.serve.app import create_app
from qkv.serve.databases import DatabaseRegistry, open_sources
from qkv.serve.security import Access

BOOKS = {
    "title": ["Emma", "Ulysses", "Dubliners", "Persuasion", "Leaves of Grass"],
    "genre": ["novel", "novel", "stories", "novel", "poetry"],
    "year": [1815, 1922, 1914, 1817, 1855],
}
KEYS = np.random.default_rng(0).standard_normal((30, 5)).astype(np.float32)
VALUES = np.random.default_rng(1).standard_normal((30, 2)).astype(np.float32)
LOCAL = "http://localhost"


def serving(folder: Path) -> DatabaseRegistry:
    """Books and grades on disk; vectors, keys of two columns, and nothing yet in memory."""
    options: dict[str, Any] = {"key": "title", "value": "genre", "encoder": "characters"}
    qkv.Database.from_columns(BOOKS, **options, path=folder / "books.qkv").close()
    grades = {"gpa": [3.1, 3.5, 3.6, 4.0], "salary": [70.0, 82.0, 86.0, 95.0]}
    qkv.Database.from_columns(grades, key="gpa", path=folder / "grades.qkv").close()
    served = open_sources([folder / "books.qkv", folder / "grades.qkv"])
    served.add_database("vectors", qkv.Database(KEYS, VALUES))
    places = {("Li", 1): "Mu", ("Hu", 2): "Rachel"}
    served.add_database("places", qkv.Database(places, key=("name", "number")))
    return served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> DatabaseRegistry:
    return serving(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def client(served: DatabaseRegistry) -> Iterator[TestClient]:
    """Whoever reaches this app may write."""
    with TestClient(create_app(served, Access(write=True)), base_url=LOCAL) as client:
        yield client
