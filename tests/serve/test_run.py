"""The server as a process: how it begins, how it ends, and what outlives it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn

import qkv
from qkv.serve import limits
from qkv.serve.app import app
from qkv.serve.run import bound, config
from qkv.serve.served import Served
from tests.cli.run import HERE, run
from tests.serve.process import serving


def sent(url: str, path: str, **body: Any) -> Any:
    """The status and the answer of one POST, on a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    head = {"content-type": "application/json"}
    with contextlib.closing(connection):  # a server that is killed leaves it open else
        connection.request("POST", path, json.dumps(body), head)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@pytest.fixture
def names(tmp_path: Path) -> Path:
    with qkv.open(tmp_path / "names.qkv", encoder="characters") as database:
        database.add(["Li", "Hu"], ["Mu", "Rachel"])
    return tmp_path / "names.qkv"


WHOLE = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


@contextlib.contextmanager
def beside(served: Any) -> Iterator[tuple[uvicorn.Server, Any]]:
    """A server of an app in a thread, and where it listens."""
    with bound("127.0.0.1", 0) as place:
        server = uvicorn.Server(config(served))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
        thread.start()
        try:
            yield server, place.getsockname()
        finally:
            server.should_exit = True
            thread.join(30)


def heard(connection: socket.socket) -> bytes:
    """All that comes until it is closed."""
    with contextlib.suppress(ConnectionError):
        return b"".join(iter(lambda: connection.recv(4096), b""))
    return b""


def test_half_a_head_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER", 0.05)
    with beside(app(Served())) as (_, place):
        for head in (b"", b"GET /healthz HTTP/1.1\r\nhost: lo", WHOLE + WHOLE[:9]):
            with socket.create_connection(place, timeout=30) as connection:
                connection.sendall(head)
                found = heard(connection)
            assert (b"200 OK" in found) == (WHOLE in head)


def test_a_head_is_finite() -> None:
    with (
        beside(app(Served())) as (server, place),
        socket.create_connection(place, timeout=30) as connection,
    ):
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: ")
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"x" * limits.HEAD)
        until = time.monotonic() + 30
        while server.server_state.connections and time.monotonic() < until:
            time.sleep(0.01)
        assert not server.server_state.connections


def test_who_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others who read slowly get all of it."""
    monkeypatch.setattr(limits, "UNREAD", 0.2)
    size = 2**24

    async def large(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            head = [(b"content-length", str(size).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": bytes(size)})

    with beside(large) as (server, place):
        with socket.create_connection(place, timeout=30) as slow:
            slow.sendall(WHOLE)
            got = 0
            while got < size:
                got += len(slow.recv(2**20))
                time.sleep(0.02)
        with socket.create_connection(place, timeout=30) as deaf:
            deaf.sendall(WHOLE)
            until = time.monotonic() + 30
            while not server.server_state.total_requests > 1 and time.monotonic() < until:
                time.sleep(0.01)
            while server.server_state.connections and time.monotonic() < until:
                time.sleep(0.01)
            assert not server.server_state.connections


def test_one_address_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EACH", 2)
    with beside(app(Served())) as (_, place):
        first, second = (http.client.HTTPConnection(*place, timeout=30) for _ in range(2))

        def status(connection: http.client.HTTPConnection) -> int:
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            answer.read()
            return answer.status

        assert [status(first), status(second)] == [200, 200]
        with socket.create_connection(place, timeout=30) as third:
            assert heard(third).startswith(b"HTTP/1.1 429")
        assert [status(first), status(second)] == [200, 200]
        first.close()
        second.close()


def test_kill_9_loses_no_acknowledged_write(names: Path) -> None:
    """Four writers and two readers; the server is killed after a while, amid writes."""
    acknowledged: list[str] = []
    unanswered: list[str] = []

    def write(who: int, url: str) -> None:
        for i in range(10_000):
            key = f"{who}-{i}"
            try:
                status, _ = sent(url, path, rows=[{"key": key, "value": str(i)}])
            except (OSError, http.client.HTTPException, ValueError):
                unanswered.append(key)
                return
            assert status == 200
            acknowledged.append(key)

    def read(url: str) -> None:
        while not unanswered:
            try:
                sent(url, "/v1/databases/names/ask", query="Li")
            except (OSError, http.client.HTTPException, ValueError):
                return

    path = "/v1/databases/names/rows"
    with serving(names, "--write") as (url, server):
        threads = [threading.Thread(target=write, args=(i, url)) for i in range(4)]
        threads += [threading.Thread(target=read, args=(url,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 60
        while len(acknowledged) < 40 and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(server.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(60)
    assert len(acknowledged) >= 40
    with qkv.open(names, create=False) as database:
        kept = set(database)
        assert set(acknowledged) <= kept
        assert kept <= {"Li", "Hu", *acknowledged, *unanswered}
        assert database["0-0"] == "0" and database.ask("0-0").value == "0"


def test_who_goes_away_is_no_bug(names: Path) -> None:
    """A body that is never finished is dropped without a word in the log."""
    with serving(names) as (url, server):
        place = urlsplit(url)
        head = b"POST /v1/weights HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        for _ in range(20):
            with socket.create_connection((place.hostname, place.port or 80)) as connection:
                connection.sendall(head + b"Content-Type: application/json\r\n\r\n{")
        assert sent(url, "/v1/databases/names/ask", query="Li")[0] == 200
        server.terminate()
        assert server.communicate(timeout=30)[1] == ""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_what_was_taken_is_finished(names: Path, how: signal.Signals) -> None:
    """A request whose body is still coming when the signal comes is answered, and kept."""
    with serving(names, "--write") as (url, server):
        place = urlsplit(url)
        body = json.dumps({"rows": [{"key": "Smola", "value": "Alex"}]}).encode()
        connection = http.client.HTTPConnection(place.netloc, timeout=30)
        connection.putrequest("POST", "/v1/databases/names/rows")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(len(body)))
        connection.endheaders(body[:10])
        sent(url, "/v1/databases/names/ask", query="Li")  # by now the other has been taken
        server.send_signal(how)
        time.sleep(0.3)
        connection.send(body[10:])
        answer = connection.getresponse()
        assert answer.status == 200 and json.loads(answer.read())["rows"] == 3
        connection.close()
        assert server.wait(30) in (-how, 130)
    with qkv.open(names, create=False) as database:
        assert database["Smola"] == "Alex"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--host", "0.0.0.0"], "give a --token"),
        (["--token", "short"], "at least 16 visible characters"),
        (["nix.qkv"], "nix.qkv does not exist"),
    ],
)
def test_it_does_not_begin(tmp_path: Path, arguments: list[str], told: str) -> None:
    code, out, err = run("serve", *arguments, cwd=tmp_path)
    assert (code, out) == (2, "") and told in err and len(err.splitlines()) == 1


def test_a_port_that_is_taken_is_one_line(names: Path) -> None:
    with serving(names) as (url, _):
        code, _, err = run("serve", "--port", str(urlsplit(url).port))
    assert code == 2 and "in use" in err and len(err.splitlines()) == 1


def test_without_its_packages_it_is_one_line() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from qkv.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve"], capture_output=True, text=True, env=HERE, check=False
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == "qkv: serve needs uvicorn: pip install 'qkv[serve]'\n"
