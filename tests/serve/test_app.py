"""What a request may ask for, and how it is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import qkv
from qkv.cluster import LostShardError
from qkv.database.errors import (
    StoreDamagedError,
    StoreLockedError,
    StoreUnreadableError,
    StoreUnwritableError,
)
from qkv.errors import ArgumentError
from qkv.serve import api, encoding, limits, schemas, validation
from qkv.serve.app import create_app
from qkv.serve.databases import DatabaseRegistry, open_sources
from qkv.serve.responses import to_request_error
from qkv.serve.route import RequestData
from tests.serve.conftest import LOCAL

ASK = "/v1/databases/books/ask"
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "must have 'query'"),
        ([], 400, "must be an object"),
        ({"query": "x", "tap": 1}, 400, "did you mean 'top'"),
        ({"query": "x", "top": limits.MAX_TOP_ROWS + 1}, 400, "top must be at most 1,000"),
        ({"query": "x", "top": 1.5}, 400, "top must be an integer"),
        ({"query": "x", "top": True}, 400, "top must be an integer"),
        ({"query": "x", "where": 3}, 400, "where must be"),
        ({"query": "x", "where": "1" * 10_001}, 400, "at most 10,000 characters"),
        ({"query": "x", "where": "import os"}, 422, "where"),
        ({"query": "x", "where": "nix == 1"}, 422, "nix"),
        ({"query": "x", "score": "gausian"}, 422, "gaussian"),
        ({"query": "x", "weighting": "topk"}, 422, "topk:3"),
        ({"query": "x", "weighting": "topk:10001"}, 413, "the limit is 10,000"),
        ({"query": "x", "at": 99}, 404, "version 99"),
        ({"query": 3}, 422, "must be text"),
        ({"query": "\ud800"}, 422, "lone surrogate"),
        ({"query": ["x"] * (limits.MAX_QUERIES + 1)}, 413, "at most 1,024"),
        ({"query": "x" * (limits.MAX_TEXT_CHARACTERS + 1)}, 413, "65,536 characters"),
    ],
)
def test_a_body_that_does_not_fit(client: TestClient, body: Any, status: int, message: str) -> None:
    answer = client.post(ASK, content=json.dumps(body), headers=JSON)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"query": NaN}', "NaN is not a number"),
        (b'{"query": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"query": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_a_body_that_is_no_json(client: TestClient, content: bytes, message: str) -> None:
    answer = client.post(ASK, content=content, headers=JSON)
    assert answer.status_code == 400 and message in answer.json()["error"]


def test_a_long_integer_is_not_rounded() -> None:
    for number in (2**63 - 1, 2**64 + 1, -(2**70) - 1):
        raw = json.dumps({"query": number}).encode()
        assert validation.parse_validated_json(raw, schemas.ASK_BODY) == {"query": number}


def test_lists_within_lists(client: TestClient) -> None:
    where = '{"genre": ' + "[" * 900 + "]" * 900 + "}"
    answer = client.post(ASK, content='{"query": "x", "where": ' + where + "}", headers=JSON)
    assert answer.status_code == 400 and "nested too deeply" in answer.json()["error"]


def test_a_whole_number_may_have_a_point(client: TestClient) -> None:
    assert len(client.post(ASK, json={"query": "x", "top": 2.0}).json()["rows"]) == 2


def test_bytes_that_are_none(client: TestClient) -> None:
    content = b'{"query": {"$bytes": "%%"}}'
    answer = client.post(ASK, content=content, headers={"content-type": encoding.CELLS_MEDIA_TYPE})
    assert answer.status_code == 422 and "an invalid cell" in answer.json()["error"]


def test_all_bodies_together_are_limited(
    client: TestClient, served: DatabaseRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_TOTAL_BODY_BYTES", 100)
    answer = client.post(ASK, json={"query": "x" * 101})
    assert answer.status_code == 503 and "100 bytes" in answer.json()["error"]
    assert served.held_body_bytes == 0 and client.post(ASK, json={"query": "x"}).status_code == 200


def test_health_needs_no_thread(
    client: TestClient, served: DatabaseRegistry, monkeypatch: Any
) -> None:
    monkeypatch.setattr(served, "run_in_thread", None)
    for path in ("/healthz", "/v2/health/live", "/v2/health/ready"):
        assert client.get(path).status_code == 200


def test_a_large_body_is_read_in_a_thread(client: TestClient) -> None:
    content = json.dumps({"query": "Emma"}).encode() + b" " * 100_000
    assert client.post(ASK, content=content, headers=JSON).json()["value"] == "novel"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StoreLockedError("books is locked by process 4711"), 409),
        (StoreUnwritableError("/secret/my place/lock cannot be opened (denied)"), 503),
        (StoreUnreadableError("/secret/place/catalogue.sqlite: too many files"), 503),
        (LostShardError("shard 1 is lost: /secret/place/catalogue.sqlite: too many files", 1), 503),
    ],
)
def test_an_error_names_no_place(error: Exception, status: int) -> None:
    refused = to_request_error(error)
    assert refused is not None and refused.status == status
    assert "4711" not in refused.message and "secret" not in refused.message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"parameters": {"query": "x"}}, "unknown"),
        ({"parameters": {"weights": True, "spread": True}}, "unknown"),
        ({"parameters": {"top": 0}}, "at least 1"),
        ({"inputs": [{"name": "query", "datatype": "BYTES", "shape": [10**4000] * 500}]}, "shape"),
        ({"inputs": [{"name": "query", "datatype": "BYTES", "shape": [10**4000]}]}, "shape"),
    ],
)
def test_an_inference_that_has_no_meaning(client: TestClient, more: Any, message: str) -> None:
    query = {"name": "query", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    answer = client.post("/v2/models/books/infer", json={"inputs": [query], **more})
    assert answer.status_code in (400, 422) and message in answer.json()["error"]


def test_a_length_of_many_digits(client: TestClient) -> None:
    head = {"content-type": "application/octet-stream"}
    head["inference-header-content-length"] = "9" * 5000
    answer = client.post("/v2/models/books/infer", content=b"{}", headers=head)
    assert answer.status_code == 422 and "the length of the body" in answer.json()["error"]


@pytest.mark.parametrize("media", ["application/json", "application/octet-stream"])
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_tensor_in_json_has_numbers_of_json(client: TestClient, media: str, number: str) -> None:
    query = f'{{"name": "query", "datatype": "FP64", "shape": [1], "data": [{number}]}}'
    content = f'{{"inputs": [{query}]}}'
    answer = client.post(
        "/v2/models/grades/infer", content=content, headers={"content-type": media}
    )
    assert answer.status_code in (400, 422) and "not JSON" in answer.json()["error"]


def test_a_body_of_another_type(client: TestClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = client.post(ASK, content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 415 and "application/json" in answer.json()["error"]


@pytest.mark.parametrize("sends_length", [True, False])
def test_a_body_that_is_too_large(client: TestClient, sends_length: bool) -> None:
    """With and without a Content-Length header."""
    content: Any = b" " * (limits.MAX_BODY_BYTES + 1)
    answer = client.post(ASK, content=content if sends_length else iter([content]), headers=JSON)
    assert answer.status_code == 413 and "16,777,216 bytes" in answer.json()["error"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("count=x", "count must be an integer"),
        ("count=10001", "at most 10,000"),
        ("from=-1", "at least 0"),
        ("from=1&from=2", "appears twice"),
        ("form=1", "did you mean 'from'"),
    ],
)
def test_a_parameter_that_does_not_fit(client: TestClient, query: str, message: str) -> None:
    answer = client.get(f"/v1/databases/books/rows?{query}")
    assert answer.status_code == 400 and message in answer.json()["error"]


def test_rows_and_weights_are_limited(client: TestClient) -> None:
    rows = [{"title": "x", "genre": "y"}] * (limits.MAX_ROWS + 1)
    answer = client.post("/v1/databases/books/rows", json={"rows": rows})
    assert answer.status_code == 400 and "10,000" in answer.json()["error"]
    body = {"query": [[1.0]] * 1025, "key": [[1.0]] * 1024}
    answer = client.post("/v1/weights", json=body)
    assert answer.status_code == 413 and "1,048,576" in answer.json()["error"]


def test_a_row_without_a_key_is_refused(client: TestClient, served: DatabaseRegistry) -> None:
    before = served.databases["books"].database.version
    for row in ({}, {"genre": "novel"}, {"title": None, "genre": "novel"}):
        for update in (False, True):
            body = {"rows": [{"title": "Walden", "genre": "essay"}, row], "update": update}
            answer = client.post("/v1/databases/books/rows", json=body)
            assert answer.status_code == 422 and "rows[1] has no key" in answer.json()["error"]
    assert served.databases["books"].database.version == before


@pytest.mark.parametrize(
    "name", ["nix", "..", "books.qkv", "%2e%2e%2fbooks", "..%2F..%2Fetc", "books%00", "%ff"]
)
def test_a_name_is_never_a_path(client: TestClient, name: str) -> None:
    answer = client.get(f"/v1/databases/{name}/info")
    assert answer.status_code == 404 and "error" in answer.json()


def test_other_paths_and_methods(client: TestClient) -> None:
    assert client.get("/nix").json() == {
        "error": "this path does not exist: /reference lists all paths"
    }
    answer = client.put("/v1/databases/books/rows", json={})
    assert answer.status_code == 405 and "PUT" in answer.json()["error"]
    assert {"GET", "POST"} <= set(answer.headers["allow"].split(", "))


def test_what_takes_too_long(
    client: TestClient, served: DatabaseRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REQUEST_TIMEOUT_SECONDS", 0.05)
    database, late = served.databases["grades"], threading.Event()
    monkeypatch.setattr(database.database, "ask", lambda *_, **__: late.wait(60), raising=False)
    answer = client.post("/v1/databases/grades/ask", json={"query": 3.1})
    late.set()
    message = answer.json()["error"]
    assert answer.status_code == 503 and "0.05 seconds" in message and "qkv.open" in message


def test_what_is_kept_is_finished(
    client: TestClient, served: DatabaseRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread goes on, so that a refusal would be of what is there a moment later."""
    timed: list[Any] = []

    async def unhurried(_: Any, call: Any) -> Any:
        timed.append(await call)
        return timed[-1]

    monkeypatch.setattr("qkv.serve.app._with_timeout", unhurried)
    options: dict[str, Any] = {
        "params": {"name": "slow", "format": "csv"},
        "headers": {"content-type": "text/csv"},
    }
    answer = client.post("/v1/databases", content=b"name,age\nAnn,3\nBo,4\n", **options)
    assert answer.status_code == 200 and answer.json()["rows"] == 2
    assert [type(result) for result in timed] == [RequestData]  # the body alone
    del served["slow"]


def test_an_error_for_a_large_file_names_the_next_step(client: TestClient) -> None:
    options: dict[str, Any] = {
        "params": {"name": "large", "format": "csv"},
        "headers": {"content-type": "text/csv"},
    }
    answer = client.post("/v1/databases", content=bytes(limits.MAX_UPLOAD_BYTES + 1), **options)
    message = answer.json()["error"]
    assert answer.status_code == 413 and "qkv import FILE" in message and "qkv serve" in message


def test_a_bug_tells_nothing(
    client: TestClient, served: DatabaseRegistry, monkeypatch: Any
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("/secret/place")

    monkeypatch.setattr(served.databases["grades"].database, "ask", broken, raising=False)
    answer = client.post("/v1/databases/grades/ask", json={"query": 3.1})
    assert answer.status_code == 500 and "secret" not in answer.text


def test_a_damaged_file_is_reported(
    client: TestClient, served: DatabaseRegistry, monkeypatch: Any
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise StoreDamagedError("rows-1.safetensors is cut short")

    monkeypatch.setattr(served.databases["grades"].database, "ask", broken, raising=False)
    answer = client.post("/v1/databases/grades/ask", json={"query": 3.1})
    assert answer.status_code == 500 and "cut short" in answer.json()["error"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_is_gone_is_not_read_on(tmp_path: Path, replaced: bool) -> None:
    """Though the files are open still; the other databases are served as before."""
    for name in ("gone", "here"):
        with qkv.open(tmp_path / f"{name}.qkv", encoder="characters") as database:
            database.add("Li", "Mu")
    served = open_sources([tmp_path / "gone.qkv", tmp_path / "here.qkv"])
    with TestClient(create_app(served), base_url=LOCAL) as client:
        path, ask = "/v1/databases/gone", {"query": "Li"}
        assert client.get(f"{path}/rows/Li").json()["value"] == "Mu"
        (tmp_path / "gone.qkv").rename(tmp_path / "elsewhere.qkv")
        if replaced:
            with qkv.open(tmp_path / "gone.qkv") as database:
                database.add("Li", "another")
        page = {"database": "gone", "query": "Li"}
        for answer in (
            client.get(f"{path}/rows/Li"),
            client.post(f"{path}/ask", json=ask),
            client.post("/page/call/ask", json=page),
            client.get("/v2/models/gone/ready"),
        ):
            assert answer.status_code == 503 and "removed or replaced" in answer.json()["error"]
        assert client.post("/v1/databases/here/ask", json=ask).json()["value"] == "Mu"
        assert client.post("/page/call/views", json={}).status_code == 200


def test_what_cannot_be_served_is_refused_at_the_start(tmp_path: Path) -> None:
    for folder, name in (("a", "names.qkv"), ("b", "names.qkv"), ("c", "my names.qkv")):
        with qkv.open(tmp_path / folder / name) as database:
            database.add("Li", "Mu")
    with pytest.raises(ArgumentError, match="taken"):
        open_sources([tmp_path / "a/names.qkv", tmp_path / "b/names.qkv"])
    with pytest.raises(ArgumentError, match="letters, digits"):
        open_sources([tmp_path / "c/my names.qkv"])
    with pytest.raises(qkv.QkvError, match="does not exist"):
        open_sources([tmp_path / "nix.qkv"])


def test_every_route_is_named_once() -> None:
    assert len({(route.method, route.path) for route in api.ROUTES}) == len(api.ROUTES)
