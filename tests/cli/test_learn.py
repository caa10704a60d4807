"""`qkv learn`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from qkv.database.learn.descent import Descent
from qkv.types import Progress
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

    @pytest.mark.parametrize("epochs", [0, 2])
    def test_ctrl_c_keeps_what_was_learned_and_nothing_else(
        self, store: Path, monkeypatch: pytest.MonkeyPatch, epochs: int
    ) -> None:
        pairs = store.with_name("pairs.csv")
        pairs.write_text("query,key\n" + "".join(f'by {i},"{b[0]}"\n' for i, b in enumerate(BOOKS)))
        real = Descent.one_epoch

        def interrupted(self: Descent, report: Progress) -> bool:
            if self.epoch == epochs:
                raise KeyboardInterrupt
            return real(self, report)

        monkeypatch.setattr(Descent, "one_epoch", interrupted)
        told = data("learn", store, pairs, code=130)
        if epochs:
            assert told["interrupted"] and told["version"] == 2 and told["best"] > 0
        else:
            assert told["error"] == "stopped"
        assert len(data("versions", store)["versions"]) == (2 if epochs else 1)

    def test_one_column_is_too_few(self, store: Path) -> None:
        pairs = store.with_name("pairs.csv")
        pairs.write_text("query\nemma\n")
        assert "expected two columns" in data("learn", store, pairs, code=2)["error"]
