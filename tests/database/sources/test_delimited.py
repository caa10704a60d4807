"""CSV that is broken, or more than a reader's limits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from qkv.database.sources import SourceError, delimited, json
from qkv.database.sources.table import SourceLimits, limit_sources
from qkv.util.deadline import DeadlineError, limit_time


class TestBrokenCsv:
    """What is wrong is found without reading on, or again from the start."""

    def test_cells_are_counted_no_further_than_needed(self) -> None:
        for extra, message in (
            (3, "5 cells"),
            (1_000, "1002 cells"),
            (1_001, "more than 1002 cells"),
        ):
            with pytest.raises(
                SourceError, match=f": this row has {message}, but the header has 2"
            ) as caught:
                delimited.read_delimited(b"a,b\n1,2" + b",3" * extra + b"\n", "x", "x.csv", None)
            assert (caught.value.line, caught.value.column) == (2, 5)

    def test_only_the_records_of_one_batch_are_looked_at_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked: list[int] = []
        find_next = delimited._skip_blank_lines

        def counted(text: str, at: int) -> int:
            looked.append(at)
            return find_next(text, at)

        monkeypatch.setattr(delimited, "_skip_blank_lines", counted)
        for end in ("\n", "\r\n", "\r"):
            looked.clear()
            text = end.join(["a,b", *(f'{i},"x{end}y"' for i in range(50_000)), "1", "2,3"])
            with pytest.raises(SourceError, match="1 cell, but the header has 2") as caught:
                delimited.read_delimited(text.encode(), "x", "x.csv", None)
            assert caught.value.line == 100_002
            assert len(looked) < 2_000

    def test_limits_hold_within(self) -> None:
        with limit_sources(SourceLimits(cell_characters=10, columns=3)):
            for data, message in (
                (b"a,b\n1,xxxxxxxxxxx\n", "a cell of more than 10 characters"),
                (b"a,b,c,d\n1,2,3,4\n", "4 columns, but at most 3 are allowed"),
                (b"a,b,c,d,e\n1,2\n", "more than 3 columns"),
            ):
                with pytest.raises(SourceError, match=message):
                    delimited.read_delimited(data, "x", "x.csv", None)
            with pytest.raises(SourceError, match="a cell may have at most 10"):
                json.read_json(b'{"a": "xxxxxxxxxxx"}', "x", "x.jsonl")
            with pytest.raises(SourceError, match="more than 3 different names"):
                json.read_json(b'{"a":1,"b":1,"c":1,"d":1}', "x", "x.jsonl")
        assert len(json.read_json(b'{"a": "xxxxxxxxxxx"}', "x", "x.jsonl")) == 1

    def test_reading_stops_at_the_deadline(self) -> None:
        cases: list[tuple[Any, bytes]] = [
            (delimited.read_delimited, b"a,b\n1,2\n"),
            (json.read_json, b'{"a":1}'),
            (json.read_json, b'{"a":NaN}'),
        ]
        for read, data in cases:
            with limit_time(time.monotonic() - 1), pytest.raises(DeadlineError):
                read(data, "x", "x", *([None] if read is delimited.read_delimited else []))
