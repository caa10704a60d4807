"""JSON over HTTP to one server: connections that stay open, and faults as qkv's own errors."""

from __future__ import annotations

import http.client
import json
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from qkv import errors
from qkv.database import faults
from qkv.database.absent import AbsentKey
from qkv.errors import ArgumentError, CombinationError, DtypeError, QkvError
from qkv.serve import wire
from qkv.serve.wire import CELLS

TRIES = 3
PAUSE = 0.2
"""Seconds before a request that may be repeated is sent again; then twice as many."""

BUSY = (429, 503)
DOUBT = "it may have been written: look before you send it again"


class Unreachable(QkvError, ConnectionError):
    """No server answers at the address, or not in time, or not as qkv does."""


class NotAllowed(QkvError, PermissionError):
    """The server wants a token, or another one."""


class Transport:
    """Requests to the server at `url`; threads may share it, each with a connection of its own.

    What only reads is sent again where the connection breaks or the server is busy. What writes is
    sent once: whether it was done before a connection broke, nobody can say.
    """

    def __init__(self, url: str, token: str | None, timeout: float):
        if not isinstance(url, str) or not isinstance(token, str | None):
            name, got = ("url", url) if not isinstance(url, str) else ("token", token)
            raise DtypeError(f"{name} must be text, not {type(got).__name__}")
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ArgumentError(f"url must be that of a server, as http://host:8000, not {url!r}")
        if parts.username or parts.query or parts.fragment:
            raise ArgumentError("url is an address alone: give the token as token=…")
        if not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise ArgumentError(f"timeout must be a number of seconds above 0, not {timeout!r}")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ArgumentError("token must be printable ASCII")
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._connect = partial(kind, parts.hostname, port, timeout=timeout)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._path, self._timeout = parts.path.rstrip("/"), timeout
        self._headers = {"Accept": CELLS, "Content-Type": CELLS}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def read(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request that changes nothing."""
        pause = PAUSE
        for left in reversed(range(TRIES)):
            try:
                status, found = self._once(method, path, body)
            except Unreachable:
                if not left:
                    raise
            else:
                if status not in BUSY or not left:
                    return self._answer(status, found)
            time.sleep(pause)
            pause *= 2
        raise AssertionError

    def write(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request that changes rows."""
        return self._answer(*self._once(method, path, body, DOUBT))

    def close(self) -> None:
        """Close the connections that are open and not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_idle"):
            self.close()

    def _once(self, method: str, path: str, body: Any, doubt: str = "") -> tuple[int, Any]:
        """The status and the answer; where it does not come, `doubt` is told of what was sent."""
        text = None if body is None else wire.dumps(body).encode()
        connection, sent = self._taken(), ""
        try:
            if connection.sock is None:
                connection.connect()
            sent = doubt
            connection.request(method, self._path + path, text, self._headers)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError:
            connection.close()
            told = f"{self.url} did not answer within {self._timeout:g} s"
            step = sent or "ask for less, or give a longer timeout"
            raise Unreachable(f"{told}: {step}") from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            told = str(error) or type(error).__name__
            step = sent or "is it running?"
            raise Unreachable(f"{self.url} does not answer ({told}): {step}") from error
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        try:
            return response.status, wire.restored(json.loads(content))
        except ValueError:
            told = f"{response.status} {response.reason}".strip()
            told += f"; {sent}" if sent else ""
            raise Unreachable(f"{self.url} does not answer as qkv serve does: {told}") from None

    def _taken(self) -> http.client.HTTPConnection:
        """A connection that the server has not closed meanwhile."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect()
            if connection.sock and _is_quiet(connection.sock):
                return connection
            connection.close()

    def _answer(self, status: int, found: Any) -> Any:
        if 200 <= status < 300:
            return found
        raise _fault(status, found if isinstance(found, dict) else {}, self.url)


def _is_quiet(idle: socket.socket) -> bool:
    """Whether there is nothing to read, which from an idle connection could only be its end."""
    with selectors.DefaultSelector() as watched:
        watched.register(idle, selectors.EVENT_READ)
        return not watched.select(0)


def _fault(status: int, told: Mapping[str, Any], url: str) -> QkvError:
    """The error that the server raised, with its sentence."""
    sentence, kind = str(told.get("error") or f"{url} answers {status}"), str(told.get("kind"))
    if kind == "AbsentKey":
        return AbsentKey(told.get("key"), lambda: told.get("nearest") or [])
    if kind == "DuplicateKey":
        return faults.DuplicateKey(sentence, int(told.get("position") or 0))
    found = getattr(errors, kind, None) or getattr(faults, kind, None)
    if isinstance(found, type) and issubclass(found, QkvError):
        return found(sentence)
    own: dict[int, type[QkvError]] = {
        401: NotAllowed,
        403: NotAllowed,
        404: faults.NoStore,
        409: CombinationError,
        503: Unreachable,
    }
    return own.get(status, ArgumentError if status < 500 else QkvError)(sentence)
