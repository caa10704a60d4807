"""`qkv learn`, `calibrate` and `index`."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from qkv.database import Database
from qkv.database.learn.descent import GradientDescent
from qkv.util.types import ProgressCallback
from tests.cli.run import BOOKS, data, qkv


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
        real = GradientDescent.run_epoch

        def interrupted(self: GradientDescent, report: ProgressCallback) -> bool:
            if self.epoch == epochs:
                raise KeyboardInterrupt
            return real(self, report)

        monkeypatch.setattr(GradientDescent, "run_epoch", interrupted)
        reply = data("learn", store, pairs, code=130)
        if epochs:
            assert reply["interrupted"] and reply["version"] == 2 and reply["best"] > 0
        else:
            assert reply["error"] == "stopped"
        assert len(data("versions", store)["versions"]) == (2 if epochs else 1)

    def test_one_column_is_too_few(self, store: Path) -> None:
        pairs = store.with_name("pairs.csv")
        pairs.write_text("query\nemma\n")
        assert "expected two columns" in data("learn", store, pairs, code=2)["error"]


class TestCalibrate:
    def test_ask_prints_the_coverage(self, store: Path) -> None:
        pairs = store.with_name("pairs.csv")
        lines = (f'"{book[0][:-1]}","{book[0]}"\n' for book in BOOKS for _ in range(5))
        pairs.write_text("query,key\n" + "".join(lines))
        report = data("calibrate", store, pairs, "--coverage", "0.8")
        assert (report["version"], report["coverage"]) == (2, 0.8)
        assert data("versions", store)["versions"][-1]["what"] == "calibrate"
        answer = data("ask", store, BOOKS[0][0])
        assert answer["coverage"] == 0.8 and not answer["abstains"]
        assert answer["set"][0]["key"] == BOOKS[0][0] and answer["set_rows"] == len(answer["set"])
        foreign = data("ask", store, "zzz qqq")
        assert foreign["abstains"] and foreign["set"] == []
        assert "The answer abstains" in qkv("ask", store, "zzz qqq").stdout
        assert "with 80 % probability" in qkv("ask", store, BOOKS[0][0]).stdout

    def test_too_few_pairs_are_reported(self, store: Path) -> None:
        pairs = store.with_name("pairs.csv")
        pairs.write_text(f'query,key\nx,"{BOOKS[0][0]}"\n')
        assert "needs at least 12 pairs" in data("calibrate", store, pairs, code=2)["error"]


class TestIndex:
    def test_ask_reads_few_rows(self, tmp_path: Path) -> None:
        pytest.importorskip("faiss")
        store = tmp_path / "numbers.qkv"
        numbers = np.arange(20_000.0)
        Database.from_columns({"x": numbers, "y": numbers}, key="x", path=store).close()
        exact = data("ask", store, "12.25")
        assert "recall" not in exact
        report = data("index", store, "--recall", "0.9")
        assert report["indexed"] == report["rows"] == 20_000 and report["version"] == 2
        assert data("versions", store)["versions"][-1]["what"] == "index"
        answer = data("ask", store, "12.25", "--approximate", "0.1")
        assert answer["rows_read"] < 10_000 and answer["missing_weight"][0] <= 0.1
        assert abs(answer["value"] - exact["value"]) < 30
        assert "Rows that were not read" in qkv("ask", store, "12.25", "--approximate=0.1").stdout
        assert "of the ten best rows are found" in qkv("index", store).stdout
        other = qkv("ask", store, "12.25", "--approximate=0.1", "--score", "cosine:0.1").stdout
        command = f"`qkv index {store} --score cosine:0.1` replaces it by one for cosine."
        assert " ".join(other.split()).endswith(
            "All rows were read, because the index was built for the metric distance: " + command
        )
        assert "between 0 and 1" in data("ask", store, "1", "--approximate=2", code=2)["error"]
        assert "recall" in data("index", store, "--recall=1.5", code=2)["error"]
        assert data("index", store, "--drop")["removed"] == 1
        assert data("index", store, "--drop")["removed"] == 0
        assert data("ask", store, "12.25", "--approximate=0.1")["value"] == exact["value"]
        bare = " ".join(qkv("ask", store, "12.25", "--approximate=0.1").stdout.split())
        assert bare.endswith(f"there is no index: `qkv index {store}` builds it.")
        assert "All rows were read" not in qkv("ask", store, "12.25").stdout

    def test_few_rows(self, store: Path) -> None:
        pytest.importorskip("faiss")
        before = data("ask", store, BOOKS[0][0])
        answer = data("ask", store, BOOKS[0][0], "--approximate", "0.05")
        assert answer["value"] == before["value"] and answer["recall"] == 1


def test_pairs_of_text_keys_are_text(tmp_path: Path) -> None:
    """Keys of any form: codes, numbers with trailing zeros, dates."""
    table, store, pairs = tmp_path / "a.csv", tmp_path / "a.qkv", tmp_path / "pairs.csv"
    keys = ["1.50", "2024-01-01 12:00", "x7"]
    table.write_text("code,v\n" + "".join(f"{key},{i}\n" for i, key in enumerate(keys)))
    data("import", table, store, "--key", "code", "--value", "v")
    for right in (keys[:1], keys[1:2]):
        pairs.write_text("asked,right,weight\n" + "".join(f"{x},{x},2\n" for x in right * 3))
        assert data("learn", store, pairs, "--epochs", "1")["epochs"] == 1
