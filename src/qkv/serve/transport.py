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
from qkv.database import errors as faults
from qkv.database.errors import KeyNotFoundError
from qkv.errors import ArgumentError, CombinationError, DtypeError, QkvError
from qkv.serve import encoding
from qkv.serve.encoding import CELLS_MEDIA_TYPE

MAX_TRIES = 3
RETRY_PAUSE_SECONDS = 0.2
"""Seconds before a request that may be repeated is sent again; then twice as many."""

BUSY_STATUSES = (429, 503)
MAYBE_WRITTEN_HINT = "it may have been written: look before you send it again"


class ServerUnreachableError(QkvError, ConnectionError):
    """No server answers at the address, or not in time, or not as qkv does."""


class NotAllowedError(QkvError, PermissionError):
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
        self._headers = {"Accept": CELLS_MEDIA_TYPE, "Content-Type": CELLS_MEDIA_TYPE}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def send_read(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request that changes nothing."""
        pause = RETRY_PAUSE_SECONDS
        for left in reversed(range(MAX_TRIES)):
            try:
                status, found = self._send_once(method, path, body)
            except ServerUnreachableError:
                if not left:
                    raise
            else:
                if status not in BUSY_STATUSES or not left:
                    return self._unwrap_response(status, found)
            time.sleep(pause)
            pause *= 2
        raise AssertionError

    def send_write(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request that changes rows."""
        return self._unwrap_response(*self._send_once(method, path, body, MAYBE_WRITTEN_HINT))

    def close(self) -> None:
        """Close the connections that are open and not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_idle"):
            self.close()

    def _send_once(self, method: str, path: str, body: Any, doubt: str = "") -> tuple[int, Any]:
        """The status and the answer; where it does not come, `doubt` is told of what was sent."""
        text = None if body is None else encoding.dumps(body).encode()
        connection, sent = self._take_connection(), ""
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
            raise ServerUnreachableError(f"{told}: {step}") from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            told = str(error) or type(error).__name__
            step = sent or "is it running?"
            raise ServerUnreachableError(f"{self.url} does not answer ({told}): {step}") from error
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        try:
            return response.status, encoding.restore_cells(json.loads(content))
        except ValueError:
            told = f"{response.status} {response.reason}".strip()
            told += f"; {sent}" if sent else ""
            raise ServerUnreachableError(
                f"{self.url} does not answer as qkv serve does: {told}"
            ) from None

    def _take_connection(self) -> http.client.HTTPConnection:
        """A connection that the server has not closed meanwhile."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect()
            if connection.sock and _is_still_open(connection.sock):
                return connection
            connection.close()

    def _unwrap_response(self, status: int, found: Any) -> Any:
        if 200 <= status < 300:
            return found
        raise _build_error(status, found if isinstance(found, dict) else {}, self.url)


def _is_still_open(idle: socket.socket) -> bool:
    """Whether there is nothing to read, which from an idle connection could only be its end."""
    with selectors.DefaultSelector() as watched:
        watched.register(idle, selectors.EVENT_READ)
        return not watched.select(0)


def _build_error(status: int, told: Mapping[str, Any], url: str) -> QkvError:
    """The error that the server raised, with its sentence."""
    sentence, kind = str(told.get("error") or f"{url} answers {status}"), str(told.get("kind"))
    if kind == "KeyNotFoundError":
        return KeyNotFoundError(told.get("key"), lambda: told.get("nearest") or [])
    if kind == "DuplicateKeyError":
        return faults.DuplicateKeyError(sentence, int(told.get("position") or 0))
    found = getattr(errors, kind, None) or getattr(faults, kind, None)
    if isinstance(found, type) and issubclass(found, QkvError):
        return found(sentence)
    own: dict[int, type[QkvError]] = {
        401: NotAllowedError,
        403: NotAllowedError,
        404: faults.StoreNotFoundError,
        409: CombinationError,
        503: ServerUnreachableError,
    }
    return own.get(status, ArgumentError if status < 500 else QkvError)(sentence)
