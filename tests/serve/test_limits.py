"""Long texts and long requests are refused; a request whose client has left is stopped."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

from qkv import Database
from qkv.database.encoders import characters
from qkv.serve import limits
from qkv.serve.app import create_app
from qkv.serve.batch import QueryBatcher
from qkv.serve.databases import DatabaseRegistry
from qkv.serve.security import Access
from qkv.util.deadline import DeadlineError, check_deadline, current_deadline, limit_time
from tests.serve.conftest import LOCAL

LONG = "x" * (limits.MAX_TEXT_CHARACTERS + 1)
MANY = ["y" * 2_000] * (limits.MAX_BATCH_CHARACTERS // 2_000 + 1)


@pytest.mark.parametrize("route", ["ask", "attend"])
@pytest.mark.parametrize(
    ("query", "message"),
    [
        (LONG, "at most 65,536 characters, not 65,537: shorten it"),
        (["Emma", LONG], "at most 65,536 characters"),
        ([["Emma", LONG]], "at most 65,536 characters"),
        ({"title": [LONG]}, "at most 65,536 characters"),
        (MANY, "at most 1,048,576 characters in one request, not 1,050,000: send fewer queries"),
    ],
)
def test_long_queries_are_refused(client: TestClient, route: str, query: Any, message: str) -> None:
    answer = client.post(f"/v1/databases/books/{route}", json={"query": query})
    assert answer.status_code == 413 and message in answer.json()["error"]


def test_long_queries_of_the_inference_protocol_are_refused(client: TestClient) -> None:
    for texts, message in (([LONG], "65,536 characters"), (MANY, "1,048,576 characters")):
        tensor = {"name": "query", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        answer = client.post("/v2/models/books/infer", json={"inputs": [tensor]})
        assert answer.status_code == 413 and message in answer.json()["error"]


@pytest.mark.parametrize(
    ("call", "args", "message"),
    [
        ("ask", {"database": "books", "query": LONG}, "65,536 characters of a query"),
        ("answer", {"database": "books", "query": LONG}, "65,536 characters of a query"),
        ("encode", {"encoder": "characters", "keys": ["a"], "query": LONG}, "65,536 characters"),
        ("rows", {"database": "books", "where": "x" * 10_001}, "10,000 characters of where"),
        ("ask", {"database": "books", "query": "a", "where": "x" * 10_001}, "10,000 characters"),
        ("sentence", {"text": "x" * 10_001}, "at most 10,000 are allowed"),
    ],
)
def test_long_texts_of_the_page_are_refused(
    client: TestClient, call: str, args: dict[str, Any], message: str
) -> None:
    answer = client.post(f"/page/call/{call}", json=args)
    assert answer.status_code == 422 and message in answer.json()["error"]


def test_long_cells_are_refused(client: TestClient) -> None:
    for row, message in (
        ({"title": LONG, "genre": "a", "year": 1}, "rows[0].title: at most 65,536 characters"),
        (
            {"title": "a", "genre": "x" * (limits.MAX_CELL_CHARACTERS + 1), "year": 1},
            "at most 1,048,576",
        ),
    ):
        answer = client.post("/v1/databases/books/rows", json={"rows": [row]})
        assert answer.status_code == 413 and message in answer.json()["error"]


def upload(client: TestClient, content: bytes, form: str = "csv") -> Any:
    head = {"content-type": "application/octet-stream"}
    path = f"/v1/databases?name=hostile&format={form}"
    return client.post(path, content=content, headers=head)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n" + b'"",' * 3_000_000, "more than 1002 cells, but the header has 2"),
        (b'"a\n"' + b',""' * 3_000_000 + b"\n1", "more than 1,000 columns"),
        (b'"a\n"' + b"," * 9_000_000 + b"\n", "at most 1,000 are allowed"),
        (b"a,b\n1," + b'"' * 10_000_000, "a cell of more than 1,048,576 characters"),
        (b'"' * 10_000_000, "a cell of more than 1,048,576 characters"),
        (b"a,b\n" + b"1,2\n" * 900_000 + b"1", "1 cell, but the header has 2"),
    ],
    ids=["cells", "quoted columns", "columns", "quotes in a cell", "quotes", "last row"],
)
def test_a_hostile_csv_is_refused_where_it_is_met(
    client: TestClient, content: bytes, message: str
) -> None:
    """Each takes less than a second."""
    start = time.process_time()
    answer = upload(client, content)
    assert answer.status_code == 422 and message in answer.json()["error"]
    assert time.process_time() - start < 8


def test_a_long_cell_of_json_is_refused(client: TestClient) -> None:
    answer = upload(
        client, b'{"a": 1, "b": "' + b"x" * (limits.MAX_CELL_CHARACTERS + 1) + b'"}\n', "jsonl"
    )
    assert answer.status_code == 422 and "at most 1,048,576" in answer.json()["error"]


def test_an_upload_is_stopped_at_its_deadline(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UPLOAD_TIMEOUT_SECONDS", -1.0)
    for form, content in (("csv", b"a,b\n1,2\n"), ("jsonl", b'{"a": "b", "b": 1}\n')):
        answer = upload(client, content, form)
        assert answer.status_code == 503 and "qkv import FILE" in answer.json()["error"]
    assert client.get("/v1/databases/hostile/info").status_code == 404


class Counted:
    """Counts the blocks of text that are encoded, each of which takes a moment."""

    def __init__(self) -> None:
        self.blocks = 0
        self._grams = characters.Characters._weigh_ngrams

    def __call__(self, encoder: characters.Characters, block: list[str]) -> Any:
        self.blocks += 1
        time.sleep(0.02)
        return self._grams(encoder, block)


def test_work_stops_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 blocks of text would take 40 seconds, of which the limit is a fifth of one."""
    counted = Counted()
    served = DatabaseRegistry()
    served.add_database("names", Database({"Li": 1.0, "Bo": 2.0}, encoder="characters"))
    monkeypatch.setattr(characters.Characters, "_weigh_ngrams", lambda *args: counted(*args))
    monkeypatch.setattr(characters, "MAX_CHARACTERS", 1)
    monkeypatch.setattr(limits, "REQUEST_TIMEOUT_SECONDS", 0.2)
    with TestClient(create_app(served, Access()), base_url=LOCAL) as client:
        for route in ("ask", "attend"):
            answer = client.post(
                f"/v1/databases/names/{route}", json={"query": ["abc", "bcd"] * 500}
            )
            assert answer.status_code == 503, answer.text
            assert "longer than 0.2 seconds" in answer.json()["error"]
    # The app waits at its end for all that goes on.
    assert counted.blocks < 1_000


def test_a_batch_has_the_last_deadline_of_its_asks() -> None:
    seen: list[float | None] = []
    go, begun = threading.Event(), threading.Event()

    def answer(options: Any, asked: list[Any]) -> list[Any]:
        begun.set()
        go.wait(60)
        seen.append(current_deadline())
        check_deadline()
        return asked

    batches = QueryBatcher(answer)
    now = time.monotonic()
    first = batches.submit_queries("x", "a")
    begun.wait(60)
    with limit_time(now + 500):
        futures = [batches.submit_queries("x", "b")]
    with limit_time(now + 600):
        futures.append(batches.submit_queries("x", "c"))
    with limit_time(now - 1):
        late = batches.submit_queries("y", "d")
    go.set()
    assert first.result(60) == "a" and [one.result(60) for one in futures] == ["b", "c"]
    with pytest.raises(DeadlineError):
        late.result(60)
    assert seen == [None, now + 600, now - 1]
    batches.close()


def test_a_batch_has_no_more_characters_than_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BATCH_CHARACTERS", 10)
    sizes: list[int] = []
    go, begun = threading.Event(), threading.Event()

    def answer(options: Any, asked: list[Any]) -> list[Any]:
        begun.set()
        go.wait(60)
        sizes.append(len(asked))
        return asked

    batches = QueryBatcher(answer)
    first = batches.submit_queries("x", "a")
    begun.wait(60)
    futures = [
        batches.submit_queries("x", i, characters=count) for i, count in enumerate((4, 6, 1, 20, 1))
    ]
    go.set()
    assert [one.result(60) for one in (first, *futures)] == ["a", 0, 1, 2, 3, 4]
    assert sizes == [1, 2, 1, 1, 1]
    batches.close()
