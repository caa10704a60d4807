"""JSON over HTTP to one server, over reused connections. Error responses become exceptions."""

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
from qkv.database import errors as database_errors
from qkv.database.errors import KeyNotFoundError
from qkv.errors import ArgumentError, CombinationError, DtypeError, QkvError
from qkv.serve import encoding
from qkv.serve.encoding import CELLS_MEDIA_TYPE

MAX_TRIES = 3
RETRY_PAUSE_SECONDS = 0.2
"""The pause before the first retry of a read. Each further pause is twice as long."""

BUSY_STATUSES = (429, 503)
MAYBE_WRITTEN_HINT = (
    "the server may have written the rows: check whether they are there before you send them again"
)


class ServerUnreachableError(QkvError, ConnectionError):
    """The server does not answer, answers too late, or is not a qkv server."""


class NotAllowedError(QkvError, PermissionError):
    """The token is missing or wrong, or it does not allow this request."""


class Transport:
    """Sends requests to the server at `url`.

    Threads may share a transport; each uses its own connection.

    A read is sent again if the connection breaks or the server is busy. A write is sent only once,
    because the server may have executed it before the connection broke.
    """

    def __init__(self, url: str, token: str | None, timeout: float):
        if not isinstance(url, str) or not isinstance(token, str | None):
            name, argument = ("url", url) if not isinstance(url, str) else ("token", token)
            raise DtypeError(f"{name} must be text, not {type(argument).__name__}")
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ArgumentError(f"url must be like http://host:8000, not {url!r}")
        if parts.username or parts.query or parts.fragment:
            raise ArgumentError(
                "url must be only the address of the server, without a user name or query: pass "
                "the token as token=…"
            )
        if not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise ArgumentError(f"timeout must be a number of seconds above 0, not {timeout!r}")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ArgumentError("token must consist of printable ASCII characters")
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
        """Send a request that changes nothing, and retry if necessary; return the response."""
        pause = RETRY_PAUSE_SECONDS
        for tries_left in reversed(range(MAX_TRIES)):
            try:
                status, response = self._send_once(method, path, body)
            except ServerUnreachableError:
                if not tries_left:
                    raise
            else:
                if status not in BUSY_STATUSES or not tries_left:
                    return self._unwrap_response(status, response)
            time.sleep(pause)
            pause *= 2
        raise AssertionError

    def send_write(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request that changes rows, only once; return the response."""
        return self._unwrap_response(*self._send_once(method, path, body, MAYBE_WRITTEN_HINT))

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_idle"):
            self.close()

    def _send_once(self, method: str, path: str, body: Any, hint: str = "") -> tuple[int, Any]:
        """Send a request, and return the status and the parsed response.

        If the request fails after it was sent, the error contains `hint`.
        """
        text = None if body is None else encoding.dumps(body).encode()
        connection, hint_after_send = self._take_connection(), ""
        try:
            if connection.sock is None:
                connection.connect()
            hint_after_send = hint
            connection.request(method, self._path + path, text, self._headers)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError:
            connection.close()
            step = hint_after_send or "send a smaller request, or set a longer timeout"
            raise ServerUnreachableError(
                f"{self.url} did not answer within {self._timeout:g} s: {step}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            reason = str(error) or type(error).__name__
            step = hint_after_send or "check that the server is running and that url is right"
            raise ServerUnreachableError(
                f"{self.url} does not answer ({reason}): {step}"
            ) from error
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
            reason = f"{response.status} {response.reason}".strip()
            reason += f"; {hint_after_send}" if hint_after_send else ""
            raise ServerUnreachableError(
                f"{self.url} does not seem to be a qkv server: {reason}"
            ) from None

    def _take_connection(self) -> http.client.HTTPConnection:
        """Return an idle connection that is still open, else a new connection."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect()
            if connection.sock and _is_still_open(connection.sock):
                return connection
            connection.close()

    def _unwrap_response(self, status: int, response: Any) -> Any:
        """Return the response; raise the exception for an error status."""
        if 200 <= status < 300:
            return response
        raise _build_error(status, response if isinstance(response, dict) else {}, self.url)


def _is_still_open(idle: socket.socket) -> bool:
    """Return whether an idle connection is open.

    If the server has closed the connection, the socket is readable.
    """
    with selectors.DefaultSelector() as watched:
        watched.register(idle, selectors.EVENT_READ)
        return not watched.select(0)


def _build_error(status: int, body: Mapping[str, Any], url: str) -> QkvError:
    """Return the exception that an error response describes, with its message."""
    message, kind = str(body.get("error") or f"{url} answers {status}"), str(body.get("kind"))
    if kind == "KeyNotFoundError":
        return KeyNotFoundError(body.get("key"), lambda: body.get("nearest") or [])
    if kind == "DuplicateKeyError":
        return database_errors.DuplicateKeyError(message, int(body.get("position") or 0))
    error_class = getattr(errors, kind, None) or getattr(database_errors, kind, None)
    if isinstance(error_class, type) and issubclass(error_class, QkvError):
        return error_class(message)
    class_by_status: dict[int, type[QkvError]] = {
        401: NotAllowedError,
        403: NotAllowedError,
        404: database_errors.StoreNotFoundError,
        409: CombinationError,
        503: ServerUnreachableError,
    }
    return class_by_status.get(status, ArgumentError if status < 500 else QkvError)(message)
