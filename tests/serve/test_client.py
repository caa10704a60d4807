"""`qkv.Client`: over HTTP as in-process, to the last cell; its errors are those of the server."""

from __future__ import annotations

import datetime
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pytest

import qkv
from qkv import Client, Database, scores, weightings
from qkv.database import KeyNotFoundError
from qkv.database.errors import (
    DuplicateKeyError,
    NoRowsMatchWarning,
    StoreNotFoundError,
    VersionNotFoundError,
)
from qkv.errors import ArgumentError, CombinationError, DtypeError
from qkv.retrievers import documents as retrieved
from qkv.serve import transport
from qkv.serve.transport import NotAllowedError, ServerUnreachableError
from tests.cli.run import BOOKS, NAMES
from tests.serve.process import serving

TOKEN = "0123456789abcdef-write"
READ = "0123456789abcdef-read"
RNG = np.random.default_rng(0)
DAY = datetime.date(1988, 4, 1)

MADE: dict[str, tuple[Any, dict[str, Any]]] = {
    "vectors": (
        dict(zip(range(9), RNG.standard_normal((9, 3)).astype(np.float32), strict=True)),
        {},
    ),
    "keyed": ((RNG.standard_normal((30, 4)).astype(np.float32), RNG.standard_normal(30)), {}),
    "wide": ((RNG.standard_normal((5, 2)), list("abcde")), {}),
    "gpa": ([(3.1, 70.0), (3.5, 82.0), (3.6, 86.0), (4.0, float("inf"))], {}),
    "places": ({("Li", 1): DAY, ("Hu", 2): datetime.date(2000, 1, 2)}, {"key": ("name", "number")}),
    "odd": ({"a": b"\xff\x00", "b": (1, "x"), "c": {"$d": [None, 1]}}, {}),
    "unique": ({"a": 1}, {"unique": True}),
    "raw": ({b"a": 1.0, b"\x00\xff": 2.0, b'{"$bytes": "YQ=="}': 3.0, b"": 4.0}, {}),
    "truth": ([(True, "yes"), (False, "no")], {}),
    "json": ([([1, 2], "list"), ({"a": [None]}, "mapping"), ([0.5], "other")], {}),
    "tuples": ({("a", 1): 1.0, ("3", 3): 2.0, (3, "3"): 3.0, ((1,), "x"): 4.0, (DAY,): 5.0}, {}),
    "pairs": ({(100.0, 1.0): 1.0, (120.0, 3.0): 2.0, (160.0, 2.0): 4.0}, {}),
    "days": ({DAY: 1.0, datetime.date(2024, 1, 2): 2.0}, {}),
    "lines": ({"a\nb/\n": 1.0, "\n": 2.0, "3.5": 3.0, "null": 4.0}, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for name, (data, options) in MADE.items():
        with qkv.open(folder / f"{name}.qkv", **options) as database:
            database.add(*data) if isinstance(data, tuple) else database.add(data)
    columns = dict(zip(NAMES, zip(*BOOKS, strict=True), strict=True))
    Database.from_columns(columns, key="title", value="author", path=folder / "books.qkv").close()
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    tokens = ("--token", TOKEN, "--read-token", READ)
    with serving(*sorted(folder.glob("*.qkv")), *tokens) as (url, _):
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, TOKEN) as client:
        yield client


def test_a_server_that_knows_less_is_understood(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer without what a newer server says of it."""
    read = transport.Transport.send_read

    def less(self: Any, *request: Any) -> Any:
        return {name: x for name, x in read(self, *request).items() if name != "shares"}

    monkeypatch.setattr(transport.Transport, "send_read", less)
    answer = client.ask("books", "Emma")
    assert answer.is_normalized and answer.rows


@pytest.fixture
def stored(folder: Path, request: pytest.FixtureRequest) -> Iterator[Database]:
    with qkv.open(folder / f"{request.param}.qkv") as database:
        yield database


def assert_same(actual: qkv.Answer, expected: qkv.Answer, alone: bool = True) -> None:
    """Every field, and what is looked at later: of a query that was not `alone`, the weights are
    found by it alone and differ in the last digit."""
    for name in ("query", "value", "spread", "weights"):
        here, there = getattr(expected, name), getattr(actual, name)
        assert type(here) is type(there)
        if alone or name in ("query", "value"):
            np.testing.assert_equal(there, here)
        elif here is not None:
            np.testing.assert_allclose(there, here, rtol=1e-5)
    for name in ("entropy", "lse", "total", "missing", "version", "engine", "score", "weighting"):
        assert getattr(actual, name) == getattr(expected, name), name
    for name in ("rows", "values"):
        np.testing.assert_equal(
            [vars(x) if hasattr(x, "__dict__") else x for x in getattr(actual, name)],
            [vars(x) if hasattr(x, "__dict__") else x for x in getattr(expected, name)],
        )
    assert str(actual) == str(expected)
    assert actual.explain() == expected.explain()
    least = expected.rows[-1].weight * (1 - 1e-5)
    if least > 0:
        assert [row.index for row in actual.above(least)] == [
            row.index for row in expected.above(least)
        ]


ASKED: list[tuple[str, Any, dict[str, Any]]] = [
    ("books", "the alchmist", {}),
    ("books", "war", {"where": {"genre": "fiction"}, "top": 2, "weighting": "hard"}),
    ("books", "Emma", {"score": "exact", "weighting": "normalized"}),
    ("keyed", RNG.standard_normal(4), {"weighting": weightings.TopK(3)}),
    ("keyed", RNG.standard_normal(4).tolist(), {"score": scores.Gaussian(0.5)}),
    ("vectors", 3.5, {"score": scores.Gaussian(0.7), "weighting": weightings.Softmax(2.0)}),
    ("gpa", 3.4, {"where": "value < 90"}),
    ("gpa", 9.0, {"score": scores.Boxcar(0.5), "weighting": weightings.Normalized("nearest")}),
    ("gpa", 4.0, {}),
    ("gpa", 4.0, {"score": "constant", "weighting": "raw", "top": 1}),
    ("places", ("Hu", 2), {}),
    ("odd", "a", {}),
    ("odd", "c", {"top": 1}),
    ("json", [1, 2], {}),
]


@pytest.mark.parametrize(("stored", "query", "options"), ASKED, indirect=["stored"])
def test_an_answer_is_the_same_as_in_process(
    client: Client, stored: Database, query: Any, options: dict[str, Any]
) -> None:
    assert stored.path is not None
    assert_same(client.ask(stored.path.stem, query, **options), stored.ask(query, **options))


def test_an_error_for_a_foreign_argument_is_as_in_process(client: Client) -> None:
    for method in (client["keyed"].ask, client["keyed"].attend):
        with pytest.raises(TypeError, match=r"'temperature': pass weighting="):
            method(np.zeros(4), **{"temperature": 2})


@pytest.mark.parametrize("stored", ["books"], indirect=True)
def test_a_list_gives_a_list(client: Client, stored: Database) -> None:
    queries = ["dune", "maus", "emma"]
    for actual, expected in zip(client.ask("books", queries), stored.ask(queries), strict=True):
        assert_same(actual, expected, alone=False)
    assert client.ask("books", []) == []


@pytest.mark.parametrize("stored", ["keyed"], indirect=True)
def test_arrays_are_many_queries(client: Client, stored: Database) -> None:
    queries = RNG.standard_normal((3, 4))
    for actual, expected in zip(client.ask("keyed", queries), stored.ask(queries), strict=True):
        assert_same(actual, expected, alone=False)
    np.testing.assert_array_equal(client.attend("keyed", queries), stored.attend(queries))
    np.testing.assert_array_equal(
        client.attend("keyed", queries[0], score=scores.Gaussian(2.0)),
        stored.attend(queries[0], score=scores.Gaussian(2.0)),
    )


@pytest.mark.parametrize("stored", MADE, indirect=True)
def test_rows_and_values_are_the_same_cells(client: Client, stored: Database) -> None:
    assert stored.path is not None
    remote = client[stored.path.stem]
    np.testing.assert_equal(list(remote.rows()), list(stored.rows()))
    assert [list(row) for row in remote.rows()] == [list(row) for row in stored.rows()]
    np.testing.assert_equal(list(remote), list(stored))
    assert len(remote) == len(stored) == remote.count()
    assert remote.columns == stored.columns
    assert remote.describe() == stored.describe()
    here, there = dict(stored.info()), dict(remote.info())
    assert str(there.pop("path")).startswith("http://") and here.pop("path")
    assert there == here
    assert remote.versions() == stored.versions()
    for key in stored:
        np.testing.assert_equal(remote[key], stored[key])
        np.testing.assert_equal(remote.get_all(key), stored.get_all(key))
        assert key in remote


def test_an_array_of_numbers_is_many_queries(client: Client) -> None:
    result = client.ask("gpa", np.array([3.1, 3.5]), where="value < 90", weighting="hard")
    assert [answer.value for answer in result] == [70.0, 82.0]


def test_queries_are_taken_as_in_process(client: Client) -> None:
    labelled = pandas.Series([3.2, 3.9], index=["x", "y"])
    values = [answer.value for answer in client.ask("gpa", [3.2, 3.9], weighting="hard")]
    for query in (labelled, polars.Series([3.2, 3.9]), np.ma.array([3.2, 3.9])):
        result = client.ask("gpa", query, weighting="hard")
        assert [answer.value for answer in result] == values
    assert client.ask("gpa", np.array(3.2), weighting="hard").value == values[0]
    vector = np.ones((1, 4), np.float32)
    for query in (vector + 1j, vector.astype(str)):
        with pytest.raises(DtypeError, match="numbers"):
            client.ask("keyed", query)
    with pytest.raises(DtypeError, match="query is a masked array"):
        client.attend("keyed", np.ma.array(vector, mask=vector > 0))


def test_rows_come_in_pages_and_pass_a_condition(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qkv.serve import remote_database as remote

    monkeypatch.setattr(remote, "FIRST_PAGE_ROWS", 2)
    monkeypatch.setattr(remote, "MAX_PAGE_ROWS", 3)
    titles = [book[0] for book in BOOKS]
    assert [row["title"] for row in client.rows("books")] == titles
    assert [row["title"] for row in client.rows("books", start=1, count=5)] == titles[1:6]
    result = client.rows("books", where={"genre": "romance", "author": "Jane Austen"})
    assert [row["title"] for row in result] == ["Emma", "Persuasion"]
    assert client["books"].count("year < 1900") == 4
    assert list(client.rows("books", count=0)) == []


def test_no_rows_match_is_said_as_in_process(client: Client, folder: Path) -> None:
    with qkv.open(folder / "gpa.qkv") as database:
        hint = database.ask(3.4, where="value < 9").hint
    assert hint.startswith("No rows match where='value < 9'; column 'value' has")
    answer = client.ask("gpa", 3.4, where="value < 9")
    assert (answer.hint, answer.total) == (hint, 0)
    assert str(answer).endswith(hint)
    assert client["gpa"].why_no_rows("value < 9") == hint
    assert client["gpa"].why_no_rows("value < 90") == ""
    with pytest.warns(NoRowsMatchWarning, match="No rows match"):
        assert not client["gpa"].attend([3.4], where="value < 9").any()


@pytest.mark.parametrize(
    "where",
    [
        {"day": datetime.date(2024, 1, 5)},
        {"day": [datetime.date(2024, 1, 5), None], "n": 1},
        {"n": None},
        {"n": {1, 3}},
        {"n": np.float64(2.5)},
        {"t": ["y'`", "z"]},
        {"n": []},
        {},
    ],
)
def test_a_mapping_of_columns_is_sent_as_the_condition_that_it_is(where: Any) -> None:
    from qkv.serve.remote_database import _format_condition

    days = [datetime.date(2024, 1, 5), datetime.date(2024, 2, 5), None, datetime.date(2024, 3, 1)]
    columns = {"k": list("abcd"), "day": days, "n": [1, 2.5, None, 3], "t": ["x", "y'`", None, "z"]}
    D = qkv.Database.from_columns(columns, key="k")
    assert list(D.rows(where=_format_condition(where))) == list(D.rows(where=where))


def test_what_is_written_is_there(tmp_path: Path) -> None:
    with qkv.open(tmp_path / "names.qkv", key="last", value="first") as database:
        database.add("Li", "Mu")
    with (
        serving(tmp_path / "names.qkv", "--write") as (url, _),
        Client(url) as client,
    ):
        assert client.databases() == ["names"]
        names = client["names"]
        client.add("names", "Hu", "Rachel")
        client.add("names", ["Smola", "a/b?c#d%"], ["Alex", "odd"])
        client.extend("names", [{"last": "Zhang", "first": "Aston"}])
        names.add({"Lipton": "Zachary"})
        assert names["a/b?c#d%"] == "odd"
        assert (names.update("Li", "Wei"), names.update("Werness", "Brent")) == (0, 1)
        assert names["Li"] == "Wei" and names.at(1)["Li"] == "Mu"
        assert client.remove("names", "a/b?c#d%") == 1
        with pytest.raises(KeyNotFoundError):
            names.remove(["Hu", "absent"])
        assert "Hu" in names
        assert names.remove(["Hu", "Zhang"]) == 2
        assert len(names) == 4
        assert [version.what for version in client.versions("names")][-2:] == ["remove", "remove"]
        with pytest.raises(ArgumentError, match="read-only"):
            names.at(1).add("a", "b")
    with qkv.open(tmp_path / "names.qkv", create=False) as database:
        assert dict(database.items()) == {
            "Smola": "Alex",
            "Lipton": "Zachary",
            "Li": "Wei",
            "Werness": "Brent",
        }


MIXED = [b"raw", "\u00c4", "2024-01-01", 3, "3", DAY, "007", (1, "x"), [1, "x"], None, True, "true"]


def test_cells_of_several_kinds_stay_what_they_are(tmp_path: Path) -> None:
    # Text was read as bytes, a number or a date where the first row has one.
    first = {"raw": b"raw", "number": 3, "day": DAY, "parts": (1, "x"), "truth": True}
    for name, cell in first.items():
        with qkv.open(tmp_path / f"{name}.qkv") as database:
            database.extend([{"key": "a", "value": x, "other": x} for x in (cell, "text")])
    with serving(*tmp_path.glob("*.qkv"), "--write") as (url, _), Client(url) as client:
        for name, cell in first.items():
            client.extend(name, [{"key": "b", "value": x, "other": x} for x in MIXED])
            client[name].update("c", "5")
            here = [*map(repr, [cell, "text", *MIXED])]
            assert [repr(row["other"]) for row in client.rows(name)] == [*here, "None"]
            assert [*map(repr, client[name].values())] == [*here, repr("5")]


def test_a_key_that_is_named_twice_is_removed_once(tmp_path: Path) -> None:
    with qkv.open(tmp_path / "twice.qkv") as database:
        database.add([1, 2, 3], [10.0, 20.0, 30.0])
    with serving(tmp_path / "twice.qkv", "--write") as (url, _), Client(url) as client:
        assert client.remove("twice", [1, 1.0, True, 2]) == 2
        assert list(client["twice"]) == [3]


def test_keys_that_python_cannot_hash_are_updated(tmp_path: Path) -> None:
    keys = {"vectors": np.ones(2), "parts": ([1], "a"), "json": {"a": [1]}}
    for name, key in keys.items():
        with qkv.open(tmp_path / f"{name}.qkv") as database:
            database.update(key, 1.0)
    with serving(*tmp_path.glob("*.qkv"), "--write") as (url, _), Client(url) as client:
        for name, key in keys.items():
            assert client[name].update(key, 2.0) == 0
            assert list(client[name].values()) == [2.0] and client[name][key] == 2.0


def test_many_keys_are_distinguished_from_one_as_in_process(tmp_path: Path) -> None:
    """A matrix is many vectors, an array of text many texts, and a key given twice goes once."""
    here = {"vectors": Database(np.eye(3), [1.0, 2.0, 3.0]), "texts": Database({"a": 1.0})}
    with qkv.open(tmp_path / "vectors.qkv") as vectors, qkv.open(tmp_path / "texts.qkv") as texts:
        vectors.add(np.eye(3), [1.0, 2.0, 3.0])
        texts.add("a", 1.0)
    arrays = np.array([[1.0, 1, 0], [0, 1, 1]]), np.array(["b", "c"])
    folders = [str(tmp_path / f"{name}.qkv") for name in here]
    with serving(*folders, "--write") as (url, _), Client(url) as client:
        for (name, mirror), keys in zip(here.items(), arrays, strict=True):
            for D in (client[name], mirror):
                D.add(keys, np.array([4.0, 5.0]))
                D.add(keys[0], 6.0)
            assert list(client[name].values()) == list(mirror.values())
            one = keys[0]
            assert client[name].remove([one, one]) == mirror.remove([one, one]) == 2
            assert client[name].remove(keys[1:]) == mirror.remove(keys[1:]) == 1
            assert list(client[name].values()) == list(mirror.values())


def test_errors_are_those_of_the_server(client: Client) -> None:
    with pytest.raises(KeyNotFoundError, match="nearest are 'Emma'") as absent:
        client["books"]["Ema"]
    assert absent.value.key == "Ema" and absent.value.nearest_keys[0] == "Emma"
    assert client.get("books", "Ema") is None
    assert client.get("books", "Ema", 3) == 3
    with pytest.raises(ArgumentError, match="did you mean 'gaussian'"):
        client.ask("books", "Emma", score="gausian")  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="top must be at least 1"):
        client.ask("books", "Emma", top=0)
    with pytest.raises(DtypeError, match="must be text"):
        client.ask("books", [3])
    with pytest.raises(CombinationError, match="only numbers can be pooled"):
        client.attend("books", "Emma")
    with pytest.raises(VersionNotFoundError):
        client["books"].at(99).ask("Emma")
    with pytest.raises(DuplicateKeyError, match="unique"):
        client.add("unique", "a", 2)
    with pytest.raises(StoreNotFoundError, match="no database is named 'absent'"):
        client.ask("absent", "Emma")
    with pytest.raises(ArgumentError, match="function cannot be sent"):
        client.ask("books", "Emma", where=lambda row: True)
    with pytest.raises(ArgumentError, match="cannot be written as text"):
        client.ask("keyed", np.ones(4), score=scores.Gaussian(np.ones(4)))


def test_what_works_at_the_store_alone_says_so(client: Client) -> None:
    for name in ("calibrate", "learn", "value_of_rows", "compact"):
        with pytest.raises(AttributeError, match=rf"use qkv.open\(path\)\.{name}"):
            getattr(client["books"], name)
    with pytest.raises(AttributeError, match=r"has no attribute 'pages'$"):
        client["books"].pages  # noqa: B018
    assert not hasattr(client["books"], "_pages")
    with pytest.raises(ArgumentError, match="query 0 is empty"):
        client["books"].ask(" ")


def test_a_token_is_wanted(url: str) -> None:
    with Client(url) as nobody, pytest.raises(NotAllowedError, match="token"):
        nobody.databases()
    with Client(url, READ) as reader:
        assert reader["books"]["Emma"] == "Jane Austen"
        with pytest.raises(NotAllowedError, match="only read"):
            reader.add("books", "a", "b")
    with Client(url, "wrong") as stranger, pytest.raises(PermissionError):
        stranger.databases()


def test_threads_share_a_client(client: Client) -> None:
    titles = [book[0] for book in BOOKS] * 4
    with ThreadPoolExecutor(8) as pool:
        result = list(pool.map(lambda title: client.ask("books", title).rows[0].key, titles))
    assert result == titles


@pytest.mark.parametrize(
    "url",
    ["books.qkv", "ftp://host", "http://", "http://host:x", "http://a:b@host", "http://h?a=b"],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ArgumentError, match="url"):
        Client(url)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # no other process can bind it, and none listens
        client = Client(f"http://127.0.0.1:{port}")
        with pytest.raises(ServerUnreachableError, match=f"127.0.0.1:{port} does not answer"):
            client.databases()
        with pytest.raises(
            ServerUnreachableError, match=r"check that the server is running and that url is right$"
        ):
            client["books"].extend([{"key": "a", "value": 1}])


class Stub:
    """A server that answers each connection by the next of some bytes, and keeps what it heard."""

    END = b"no more"

    def __init__(self, *answers: bytes | None):
        self.answers, self.heard = list(answers), list[bytes]()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.place = self.socket.getsockname()
        self.url = f"http://127.0.0.1:{self.place[1]}"
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Stub:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """When all who came before have been heard."""
        with socket.create_connection(self.place, timeout=300) as last:
            last.sendall(self.END)
        self.thread.join(300)

    def _serve(self) -> None:
        with self.socket:
            while True:
                connection, _ = self.socket.accept()
                with connection:
                    if (heard := connection.recv(65536)) == self.END:
                        return
                    self.heard.append(heard)
                    answer = self.answers.pop(0) if self.answers else b""
                    if answer is None:
                        connection.recv(1)  # until the client gives up
                    else:
                        connection.sendall(answer)


def http(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


FINE = http("200 OK", b'{"databases": [{"name": "books"}]}', "Connection: close")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "RETRY_PAUSE_SECONDS", 0.001)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 20", http("503 Busy", b'{"error": "busy"}')])
def test_what_reads_is_sent_again(first: bytes) -> None:
    with Stub(first, FINE) as stub, Client(stub.url) as client:
        assert client.databases() == ["books"]
    assert len(stub.heard) == 2


CUT = [b"", b"HTTP/1.1 20", FINE[:-9], FINE.replace(b"Content-Length", b"X")[:-9], None]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("answer", CUT)
def test_what_writes_is_sent_once(answer: bytes | None) -> None:
    """Whether it was done, the error does not say that it was not."""
    with (
        Stub(answer, FINE) as stub,
        Client(stub.url, timeout=0.5) as client,
        pytest.raises(
            ServerUnreachableError,
            match=r"(?s)127\.0\.0\.1.*may have written the rows: check whether",
        ),
    ):
        client["books"].extend([{"key": "a", "value": 1}])
    assert len(stub.heard) == 1


@pytest.mark.usefixtures("hasty")
def test_a_server_that_is_slow_is_given_up() -> None:
    with (
        Stub(None, None, None) as stub,
        Client(stub.url, timeout=0.05) as client,
        pytest.raises(ServerUnreachableError, match=r"within 0\.05 s"),
    ):
        client.databases()
    assert len(stub.heard) == 3


@pytest.mark.usefixtures("hasty")
def test_another_server_is_known_by_what_it_says() -> None:
    page = http("200 OK", b"<html>", "Connection: close")
    with (
        Stub(page, page, page) as stub,
        Client(stub.url) as client,
        pytest.raises(ServerUnreachableError, match="not seem to be a qkv server"),
    ):
        client.databases()


def test_a_connection_that_the_server_closed_is_not_used() -> None:
    first = FINE.replace(b"Connection: close\r\n", b"")
    with Stub(first, FINE) as stub, Client(stub.url) as client:
        assert client.databases() == client.databases() == ["books"]
    assert len(stub.heard) == 2


def test_a_retriever_asks_a_server_too(client: Client) -> None:
    one = retrieved.retrieve_documents(client["books"], "Emma", 1)[0]
    assert (one.text, one.metadata["key"], one.metadata["year"]) == ("Jane Austen", "Emma", 1815)


def test_a_set_travels_with_its_answer(client: Client, folder: Path) -> None:
    assert client["books"].ask("Emma").coverage is None
    with pytest.raises(CombinationError, match="no prediction set"):
        client["books"].ask("Emma").prediction_set  # noqa: B018
    with qkv.open(folder / "places.qkv") as D:
        D.calibrate([(key, key) for key in D] * 10)
        want = [(row.key, row.weight) for row in D.ask(("Li", 1)).prediction_set]
    theirs = client["places"].ask(("Li", 1))
    assert theirs.coverage == 0.9 and not theirs.abstains
    assert [(row.key, row.weight) for row in theirs.prediction_set] == want
    with pytest.raises(CombinationError, match="ask the database itself"):
        theirs.influence()


def test_rows_are_taken_elsewhere_as_those_that_are_here(
    client: Client, folder: Path, tmp_path: Path
) -> None:
    there = client["books"]
    with qkv.open(folder / "books.qkv", create=False) as here:
        assert list(there.items()) == list(here.items()) and list(there.keys()) == list(here)
        assert list(there.values()) == list(here.values())
        assert there.to_frame().equals(here.to_frame())
        assert there.to_csv(tmp_path / "there.csv") == here.to_csv(tmp_path / "here.csv") > 0
        assert (tmp_path / "there.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()
        assert list(there.swap().items()) == list(here.swap().items())
        assert list(Database(there, key="title", value="author")) == list(here)
        drawn = [D.plot("dune").axes[0].images[0].get_array() for D in (there, here)]
        np.testing.assert_allclose(*drawn, atol=1e-6)
        assert there._repr_html_().split("<table>")[1] == here._repr_html_().split("<table>")[1]
    assert (
        there.to_html().startswith("<!doctype html>") and "<title>books</title>" in there.to_html()
    )


@pytest.mark.parametrize(
    "stored",
    ["lines", "raw", "truth", "json", "gpa", "keyed", "wide", "places", "tuples", "days"],
    indirect=True,
)
def test_every_key_is_found_and_no_other_is(client: Client, stored: Database) -> None:
    assert stored.path is not None
    there = client[stored.path.stem]
    wide = MADE["wide"][0][0]
    others = ("1988-04-01", datetime.datetime(1988, 4, 1), (3, 3), ([1], "x"), "\ud800", object())
    for key in [
        *stored,
        *wide,
        3.5,
        "3.5",
        None,
        "null",
        True,
        "a",
        ("Li", "1"),
        np.ones(4),
        *others,
    ]:
        assert there.get(key) == stored.get(key), key
        assert (key in there) == (key in stored) and there.get_all(key) == stored.get_all(key), key
        if key not in stored:
            with pytest.raises(KeyNotFoundError):
                there.remove([key])
    assert len(there) == len(stored)


@pytest.mark.parametrize("stored", ["pairs"], indirect=True)
def test_arrays_are_keys_of_several_numbers(client: Client, stored: Database) -> None:
    remote, want = client["pairs"], stored.ask((100.0, 1.0))
    series = pandas.Series([100.0, 1.0], index=[7, 3])
    for query in (np.array([100.0, 1.0]), [100.0, 1.0], (100.0, 1.0), series):
        assert_same(remote.ask(query), want)
        assert remote[query] == 1.0
        np.testing.assert_allclose(remote.attend(query), [want.value], rtol=1e-6)
    rows = np.array([[100.0, 1.0], [130.0, 2.0]])
    assert [a.value for a in remote.ask(rows)] == [a.value for a in stored.ask(rows)]
    assert remote.ask(rows)[1].above(0.01)[0].key == (160.0, 2.0)
    np.testing.assert_allclose(remote.attend(rows), stored.attend(rows), rtol=1e-6)


def test_arrays_of_texts_and_dates_are_lists_of_queries(client: Client) -> None:
    texts = ["emma", "the alchmist"]
    for query in (np.array(texts), pandas.Series(texts, index=[4, 2]), np.array(texts, object)):
        assert [a.value for a in client.ask("books", query)] == [
            a.value for a in client.ask("books", texts)
        ]
    assert client.ask("books", np.array("emma")).value == client.ask("books", "emma").value
    days = np.array(["1988-04-01", "2024-01-01"], "M8[D]")
    assert [a.rows[0].key for a in client.ask("days", days)] == [DAY, datetime.date(2024, 1, 2)]


def test_approximate_answers(tmp_path: Path) -> None:
    """Over HTTP as in-process, with the estimate and its interval."""
    pytest.importorskip("faiss")
    keys = np.random.default_rng(0).normal(size=(20_000, 3)).astype(np.float32)
    score = scores.Gaussian(0.1)
    path = tmp_path / "points.qkv"
    with Database.from_columns({"key": keys, "value": np.arange(20_000.0)}, path=path) as D:
        D.index(score=score)
    options: dict[str, Any] = {"score": score, "approximate": 0.1}
    with (
        serving(path) as (url, _),
        Client(url) as client,
        qkv.open(path) as D,
    ):
        served = client["points"]
        for query in keys[:3]:
            mine, theirs = D.ask(query, **options), served.ask(query, **options)
            assert theirs.missing_weight == pytest.approx(mine.missing_weight)
            assert (theirs.recall, theirs.rows_read) == (mine.recall, mine.rows_read)
            assert theirs.rows_read < 10_000 and theirs.error_bound == 1
            assert theirs.value == pytest.approx(mine.value)
            np.testing.assert_allclose(theirs.weights, mine.weights)
        batch = served.ask(keys[:5], weighting="hard", score=score, approximate=True)
        assert [answer.value for answer in batch] == list(range(5))
        np.testing.assert_allclose(
            served.attend(keys[:2], **options), D.attend(keys[:2], **options), rtol=1e-5
        )
        assert served.ask(keys[0]).recall is None
        with pytest.raises(ValueError, match="approximate"):
            served.ask(keys[0], approximate="yes")
        with pytest.raises(ValueError, match="approximate"):
            served.ask(keys[0], approximate=2)
