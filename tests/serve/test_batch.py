"""Asks that come together are answered together, and each by itself where one is wrong."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from qkv.database.errors import StoreClosedError
from qkv.serve import batch, limits
from qkv.serve.batch import QueryBatcher
from qkv.serve.databases import DatabaseRegistry
from tests.serve.conftest import KEYS


class Slow:
    """Answers by upper case; the first batch waits until it is let go."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.seen: list[tuple[Any, list[Any]]] = []

    def __call__(self, options: Any, asked: list[Any]) -> list[Any]:
        self.seen.append((options, asked))
        self.begun.set()
        self.go.wait(60)
        return [one.upper() if one != "bad" else ValueError(one) for one in asked]


def test_those_that_wait_make_the_next_batch() -> None:
    slow = Slow()
    batches = QueryBatcher(slow)
    first = batches.submit_queries("x", "a")
    slow.begun.wait(60)
    futures = [
        batches.submit_queries(options, one)
        for options, one in (("x", "b"), ("y", "c"), ("x", "bad"), ("x", "d"))
    ]
    slow.go.set()
    assert first.result(60) == "A"
    assert [f.result(60) for f in (futures[0], futures[1], futures[3])] == ["B", "C", "D"]
    with pytest.raises(ValueError, match="bad"):
        futures[2].result(60)
    assert slow.seen == [("x", ["a"]), ("x", ["b", "bad", "d"]), ("y", ["c"])]
    batches.close()


def test_who_asks_again_at_once_is_of_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "WAIT_FRACTION", 1e6)
    monkeypatch.setattr(batch, "MAX_WAIT_SECONDS", 60)
    slow = Slow()
    batches = QueryBatcher(slow)
    again: list[Any] = []
    first = batches.submit_queries("x", "a")
    first.add_done_callback(lambda _: again.append(batches.submit_queries("x", "d")))
    slow.begun.wait(60)
    futures = [batches.submit_queries("x", one) for one in "bc"]
    slow.go.set()
    assert [f.result(60) for f in (first, *futures)] == ["A", "B", "C"]
    assert again[0].result(60) == "D"
    assert [asked for _, asked in slow.seen] == [["a"], ["b", "c", "d"]]
    batches.close()


def test_the_next_batch_waits_a_quarter_of_the_last_but_at_most_50_ms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three are answered; one of them asks again, and the others are waited for that long."""
    for seconds, expected in ((0.12, 0.03), (8.0, 0.05)):
        now, waits = [100.0], []
        slow = Slow()

        def answer(
            options: Any,
            asked: list[Any],
            now: Any = now,
            slow: Slow = slow,
            seconds: float = seconds,
        ) -> list[Any]:
            now[0] += seconds * (len(asked) == 3)
            return slow(options, asked)

        def wait(left: float, waits: list[float] = waits) -> bool:
            waits.append(left)
            return False

        monkeypatch.setattr(batch, "time", SimpleNamespace(monotonic=lambda now=now: now[0]))
        batches = QueryBatcher(answer)
        monkeypatch.setattr(batches._lock, "wait", wait)
        first = batches.submit_queries("x", "z")
        slow.begun.wait(60)
        three = [batches.submit_queries("x", one) for one in "abc"]
        again: list[Any] = []
        three[0].add_done_callback(lambda _: again.append(batches.submit_queries("x", "d")))  # noqa: B023
        slow.go.set()
        assert [f.result(60) for f in (first, *three)] == ["Z", "A", "B", "C"]
        assert again[0].result(60) == "D"
        assert waits == pytest.approx([expected])
        batches.close()


def test_a_batch_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_QUERIES", 3)
    slow = Slow()
    batches = QueryBatcher(slow)
    result = [batches.submit_queries("x", "a")]
    slow.begun.wait(60)
    result += [
        batches.submit_queries("x", one, size) for one, size in (("b", 2), ("c", 2), ("d", 1))
    ]
    slow.go.set()
    assert [f.result(60) for f in result] == ["A", "B", "C", "D"]
    assert [asked for _, asked in slow.seen] == [["a"], ["b"], ["c", "d"]]
    batches.close()


def test_a_failure_is_everyones_and_the_next_goes_on() -> None:
    def broken(options: Any, asked: list[Any]) -> list[Any]:
        raise MemoryError

    batches = QueryBatcher(broken)
    for _ in range(2):
        with pytest.raises(MemoryError):
            batches.submit_queries("x", "a").result(60)
    batches.close()


def test_one_that_was_given_up_is_not_computed() -> None:
    slow = Slow()
    batches = QueryBatcher(slow)
    first = batches.submit_queries("x", "a")
    slow.begun.wait(60)
    given_up, kept = batches.submit_queries("x", "b"), batches.submit_queries("x", "c")
    assert given_up.cancel()
    slow.go.set()
    assert (first.result(60), kept.result(60)) == ("A", "C")
    assert slow.seen[1] == ("x", ["c"])
    batches.close()


def test_a_late_request_gets_an_error() -> None:
    batches = QueryBatcher(Slow())
    batches.close()
    with pytest.raises(StoreClosedError, match="has closed this database"):
        batches.submit_queries("x", "a")


def test_many_at_a_time_get_each_its_own(client: TestClient, served: DatabaseRegistry) -> None:
    """48 asks from 16 threads, one in six of them wrong: the answers are those of one by one."""
    database = served.databases["vectors"].database

    def ask(i: int) -> Any:
        query = KEYS[i % 30].tolist() if i % 6 else [1.0, 2.0]
        return client.post("/v1/databases/vectors/ask", json={"query": query, "top": 1 + i % 2})

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(48)))
    for i, answer in enumerate(answers):
        if i % 6 == 0:
            assert answer.status_code == 422 and "vectors of 5" in answer.json()["error"]
            continue
        expected = database.ask(KEYS[i % 30].astype(float), top=1 + i % 2)
        np.testing.assert_allclose(answer.json()["value"], expected.value, rtol=1e-5)
        assert [row["index"] for row in answer.json()["rows"]] == [r.index for r in expected.rows]
