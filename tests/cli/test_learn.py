"""`qkv learn`."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.cli.run import BOOKS, data


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
