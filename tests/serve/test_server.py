"""The server as a process: how it begins, how it ends, and what outlives it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn

import qkv
from qkv.serve import limits
from qkv.serve.app import create_app
from qkv.serve.databases import DatabaseRegistry
from qkv.serve.server import LimitedHTTPProtocol, bind_socket, build_config
from tests.cli.run import HERE, run
from tests.serve.process import serving


def sent(url: str, path: str, **body: Any) -> Any:
    """The status and the answer of one POST, on a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
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


def test_the_address_is_printed_before_the_server_waits(names: Path) -> None:
    with serving(names, "--json") as (url, server):
        ready, _, _ = select.select([server.stdout], [], [], 60)
        assert ready, "nothing on stdout while it serves"
        address = json.loads(server.stdout.readline())
        port = urlsplit(url).port
        assert address == {"url": url, "host": "127.0.0.1", "port": port, "databases": ["names"]}


WHOLE = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


@contextlib.contextmanager
def start_server(served: Any) -> Iterator[tuple[uvicorn.Server, Any]]:
    """A server of an app in a thread, and where it listens."""
    with bind_socket("127.0.0.1", 0) as place:
        server = uvicorn.Server(build_config(served))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
        thread.start()
        try:
            yield server, place.getsockname()
        finally:
            server.should_exit = True
            thread.join(300)


def comes(condition: Callable[[], bool]) -> bool:
    """Whether it holds in the end; a busy machine may take its time."""
    until = time.monotonic() + 300
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def heard(connection: socket.socket) -> bytes:
    """All that comes until it is closed."""
    result = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(4096):
            result += piece
    return bytes(result)


def test_half_a_head_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first request of a connection, after a complete one, and in one piece with it."""
    half = WHOLE[:30]
    with start_server(create_app(DatabaseRegistry())) as (server, place):
        for full, rest, idle in (
            (b"", b"", 300),
            (b"", half, 300),
            (WHOLE, half, 300),
            (WHOLE + half, b"", 0.05),
        ):
            server.config.timeout_keep_alive = idle  # type: ignore[assignment]
            # Whoever sends a whole one may be slow here, and is not cut off for it.
            monkeypatch.setattr(limits, "HEAD_TIMEOUT_SECONDS", 300 if full else 0.05)
            with socket.create_connection(place, timeout=300) as connection:
                connection.sendall(full)
                result = connection.recv(4096) if full else b""
                assert (b"200 OK" in result) == bool(full)
                monkeypatch.setattr(limits, "HEAD_TIMEOUT_SECONDS", 0.05)
                with contextlib.suppress(ConnectionError):
                    connection.sendall(rest)
                assert b"HTTP/1.1" not in heard(connection)


def test_a_head_is_finite() -> None:
    with (
        start_server(create_app(DatabaseRegistry())) as (server, place),
        socket.create_connection(place, timeout=300) as connection,
    ):
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: ")
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"x" * limits.MAX_HEAD_BYTES)
        assert comes(lambda: not server.server_state.connections)


def test_who_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others who read slowly get all of it."""
    monkeypatch.setattr(limits, "WRITE_TIMEOUT_SECONDS", 300)
    size = 2**24

    async def large(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            head = [(b"content-length", str(size).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": bytes(size)})

    with start_server(large) as (server, place):
        with socket.create_connection(place, timeout=300) as slow:
            slow.sendall(WHOLE)
            got = 0
            while got < size and (piece := slow.recv(2**20)):
                got += len(piece)
                time.sleep(0.01)
            assert got > size
        assert comes(lambda: not server.server_state.connections)
        monkeypatch.setattr(limits, "WRITE_TIMEOUT_SECONDS", 0.2)
        with socket.create_connection(place, timeout=300) as deaf:
            deaf.sendall(WHOLE)
            assert comes(lambda: server.server_state.total_requests > 1)
            assert comes(lambda: not server.server_state.connections)


def test_a_connection_is_cut_off_that_takes_nothing_between_two_looks() -> None:
    unread, later, cut = [9, 5, 1, 1], list[Any](), list[int]()
    one = object.__new__(LimitedHTTPProtocol)
    one.transport = SimpleNamespace(
        get_write_buffer_size=lambda: unread[0], abort=lambda: cut.append(len(later))
    )
    one.loop = SimpleNamespace(call_later=lambda *call: later.append(call))
    one._check_write_progress(10)
    while not cut:
        seconds, look, before = later[-1]
        assert (seconds, before) == (limits.WRITE_TIMEOUT_SECONDS, unread.pop(0))
        look(before)
    assert cut == [3] and unread == [1]


def test_one_address_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS_PER_ADDRESS", 2)
    with start_server(create_app(DatabaseRegistry())) as (server, place):
        server.config.timeout_keep_alive = 300
        first, second = (http.client.HTTPConnection(*place, timeout=300) for _ in range(2))

        def status(connection: http.client.HTTPConnection) -> int:
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            answer.read()
            return answer.status

        with contextlib.closing(first), contextlib.closing(second):
            assert [status(first), status(second)] == [200, 200]
            with socket.create_connection(place, timeout=300) as third:
                assert heard(third).startswith(b"HTTP/1.1 429")
            assert [status(first), status(second)] == [200, 200]


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
        enough = comes(lambda: len(acknowledged) >= 40)
        os.kill(server.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(300)
    assert enough
    with qkv.open(names, create=False) as database:
        keys = set(database)
        assert set(acknowledged) <= keys
        assert keys <= {"Li", "Hu", *acknowledged, *unanswered}
        key = acknowledged[0]
        assert database[key] == database.ask(key).value == key.partition("-")[2]


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
        assert server.communicate(timeout=300)[1] == ""


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_taken_is_finished(names: Path, signal_number: signal.Signals) -> None:
    """A request whose body is still coming when the signal comes is answered, and kept."""
    with serving(names, "--write") as (url, server):
        place = urlsplit(url)
        body = json.dumps({"rows": [{"key": "Smola", "value": "Alex"}]}).encode()
        connection = http.client.HTTPConnection(place.netloc, timeout=300)
        with contextlib.closing(connection):
            connection.putrequest("POST", "/v1/databases/names/rows")
            connection.putheader("content-type", "application/json")
            connection.putheader("content-length", str(len(body)))
            connection.endheaders(body[:10])
            sent(url, "/v1/databases/names/ask", query="Li")  # by now the other has been taken
            server.send_signal(signal_number)
            time.sleep(0.3)
            connection.send(body[10:])
            answer = connection.getresponse()
            assert answer.status == 200 and json.loads(answer.read())["rows"] == 3
        assert server.wait(300) in (-signal_number, 130)
    with qkv.open(names, create=False) as database:
        assert database["Smola"] == "Alex"


def test_a_second_ctrl_c_ends_it_in_one_line(names: Path) -> None:
    """An interrupted request is not a bug: no traceback is printed."""
    with serving(names, "--write") as (url, server):
        place = urlsplit(url)
        connection = http.client.HTTPConnection(place.netloc, timeout=300)
        with contextlib.closing(connection):
            connection.putrequest("POST", "/v1/databases/names/rows")
            connection.putheader("content-type", "application/json")
            connection.putheader("content-length", "100")
            connection.endheaders(b'{"rows"')
            sent(url, "/v1/databases/names/ask", query="Li")  # by now the other has been taken
            server.send_signal(signal.SIGINT)
            with pytest.raises(OSError):  # it listens until it has heard that
                while True:
                    socket.create_connection((place.hostname, place.port or 80)).close()
                    time.sleep(0.01)
            server.send_signal(signal.SIGINT)
            stderr = server.communicate(timeout=300)[1]
        assert server.returncode in (-signal.SIGINT, 130) and stderr == "qkv: stopped\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "set a --token"),
        (["--token", "short"], "at least 16 visible ASCII characters"),
        (["nix.qkv"], "nix.qkv does not exist"),
    ],
)
def test_it_does_not_begin(tmp_path: Path, arguments: list[str], message: str) -> None:
    code, out, err = run("serve", *arguments, cwd=tmp_path)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


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
    assert done.stderr == 'qkv: serve needs uvicorn: pip install "qkv[serve]"\n'
