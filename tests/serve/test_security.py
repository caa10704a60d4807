"""Who may ask, and from where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from qkv.errors import ArgumentError
from qkv.serve import limits
from qkv.serve.app import create_app
from qkv.serve.databases import DatabaseRegistry
from qkv.serve.metrics import Metrics
from qkv.serve.security import Access, SecurityMiddleware
from qkv.serve.server import check_address
from tests.serve.conftest import LOCAL, serving

ALL, READ = "a-token-that-writes", "a-token-that-reads"
ROW = {"rows": [{"title": "Silas Marner", "genre": "novel"}]}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    served = serving(tmp_path_factory.mktemp("locked"))
    with TestClient(create_app(served, Access(ALL, READ)), base_url=LOCAL) as client:
        yield client


@pytest.mark.parametrize(
    ("header", "read", "write"),
    [
        (None, 401, 401),
        ("", 401, 401),
        ("Bearer", 401, 401),
        ("Bearer wrong", 401, 401),
        (f"Bearer {ALL}x", 401, 401),
        (f"Basic {ALL}", 401, 401),
        (f"Bearer {READ}", 200, 403),
        (f"Bearer {ALL}", 200, 200),
        (f"bearer {ALL}", 200, 200),
    ],
)
def test_tokens(locked: TestClient, header: str | None, read: int, write: int) -> None:
    head = {} if header is None else {"authorization": header}
    for path in ("/v1/databases", "/v1/databases/books/rows/Emma", "/metrics"):
        assert locked.get(path, headers=head).status_code == read
    answer = locked.post("/v1/databases/books/ask", json={"query": "Emma"}, headers=head)
    assert answer.status_code == read
    answer = locked.post("/v1/databases/books/rows", json=ROW, headers=head)
    assert answer.status_code == write
    assert ("www-authenticate" in answer.headers) == (write == 401)
    csv = head | {"content-type": "text/csv"}
    path = "/v1/databases?name=t&format=csv"
    assert locked.post(path, content=b"a,b\n1,2\n", headers=csv).status_code == write
    columns = {"database": "books", "name": "c", "key": ["genre"]}
    assert locked.post("/page/call/columns", json=columns, headers=head).status_code == write


def test_what_needs_no_token(locked: TestClient) -> None:
    for path in ("/healthz", "/openapi.json", "/", "/page/boot.js", "/page/qkv.js"):
        assert locked.get(path).status_code == 200, path
    assert "security" in locked.get("/openapi.json").json()["paths"]["/v1/databases"]["get"]


def test_without_a_token_the_databases_are_not_listed(locked: TestClient) -> None:
    head = {"authorization": f"Bearer {READ}"}
    for path in ("/openapi.json", "/reference"):
        assert "books" not in locked.get(path).text, path
        assert "books" in locked.get(path, headers=head).text, path


def test_without_tokens_it_reads_and_uploads(tmp_path: Path) -> None:
    served = serving(tmp_path)
    with TestClient(create_app(served), base_url=LOCAL) as client:
        assert client.get("/v1/databases").status_code == 200
        for answer in (
            client.post("/v1/databases/books/rows", json=ROW),
            client.delete("/v1/databases/books/rows/Emma"),
        ):
            assert answer.status_code == 403 and "--write" in answer.json()["error"]
        path = "/v1/databases?name=t&format=csv"
        head = {"content-type": "text/csv"}
        assert client.post(path, content=b"a,b\n1,2\n", headers=head).status_code == 200
        assert "Emma" in served.databases["books"].database


@pytest.mark.parametrize("token", ["", "short", "with a space in it", "ünsichtbar-und-lang-genug"])
def test_a_token_that_is_none(token: str) -> None:
    with pytest.raises(ArgumentError, match="at least 16 visible"):
        Access(token)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org", ""])
def test_others_need_a_token(host: str) -> None:
    with pytest.raises(ArgumentError, match="--token"):
        check_address(host, Access())
    check_address(host, Access(read_token=READ))
    check_address("127.0.0.1", Access())


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("192.168.0.7", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:80", False),
        ("localhost@evil.example", False),
        ("", False),
    ],
)
def test_the_host_is_checked(client: TestClient, host: str, ours: bool) -> None:
    answer = client.get("/healthz", headers={"host": host})
    assert answer.status_code == (200 if ours else 421)
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


def test_its_own_name_is_a_host(tmp_path: Path) -> None:
    served = DatabaseRegistry()
    with TestClient(
        create_app(served, hosts=["Books.example"]), base_url="http://books.example"
    ) as client:
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://localhost", "http://localhost:81"]
)
def test_pages_of_others_may_not_ask(client: TestClient, origin: str) -> None:
    head = {"origin": origin}
    answer = client.post("/v1/databases/books/ask", json={"query": "Emma"}, headers=head)
    assert answer.status_code == 403
    before = client.options(
        "/v1/databases/books/ask", headers=head | {"access-control-request-method": "POST"}
    )
    for one in (answer, before):
        assert not [name for name in one.headers if name.startswith("access-control-")]
    own = client.post("/v1/databases/books/ask", json={"query": "Emma"}, headers={"origin": LOCAL})
    assert own.status_code == 200


def test_headers_of_every_answer(client: TestClient) -> None:
    for path in ("/", "/page/boot.js", "/v1/databases", "/nix"):
        head = client.get(path).headers
        policy = head["content-security-policy"]
        assert "'unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert head["x-content-type-options"] == "nosniff"
        assert head["x-frame-options"] == "DENY"
        assert head["referrer-policy"] == "no-referrer"
        assert head["cross-origin-resource-policy"] == "same-origin"
    page = client.get("/").text
    assert page.count("<script") == 1 and '<script type="module" src=' in page
    assert "<style" not in page and " on" not in page.replace(" one", "")


def test_as_many_requests_as_may_be(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REQUESTS", 0)
    answer = client.get("/healthz")
    assert answer.status_code == 503 and "busy with 0 requests" in answer.json()["error"]
    assert answer.headers["retry-after"] == "1"


def test_a_refused_request_is_no_longer_inside() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError

    guard = SecurityMiddleware(failing, Metrics())
    client = TestClient(guard, base_url=LOCAL, raise_server_exceptions=False)
    assert client.get("/").status_code == 500
    assert guard.open_requests == 0


def test_a_wrong_token_is_distinguished_from_none() -> None:
    access = Access(token="0123456789abcdef")
    none, wrong = (access.find_denial(header, "read") for header in (None, "Bearer wrong"))
    assert none is not None and "a token is required" in str(none)
    assert wrong is not None and "this token is not valid" in str(wrong)


def test_two_hosts_are_refused(locked: TestClient) -> None:
    head = [("host", "localhost"), ("host", "evil.example")]
    assert locked.get("/healthz", headers=head).status_code == 421
