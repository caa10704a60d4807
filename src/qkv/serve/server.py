"""The server process: its socket, its connection limits, and its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import socket
import warnings
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from qkv.errors import ArgumentError
from qkv.serve import limits
from qkv.serve.security import Access, is_loopback

SHUTDOWN_TIMEOUT_SECONDS = 30
"""How long the server waits for requests in progress after Ctrl-C or SIGTERM."""


def check_address(host: str, access: Access) -> None:
    """Raise `ArgumentError` if other machines can reach this address but no token is set."""
    if access.is_open and not is_loopback(host):
        raise ArgumentError(
            f"--host: other machines can reach {host}: set a --token or a --read-token"
        )


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address. Port 0 means any free port.

    >>> with bind_socket("127.0.0.1", 0) as listener:
    ...     listener.getsockname()[0]
    '127.0.0.1'
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=limits.MAX_CONNECTIONS)
    except OSError as error:
        raise ArgumentError(
            f"cannot listen at {host} port {port}: {error.strerror or error}; --port 0 chooses a "
            "free port"
        ) from None


TOO_MANY_REQUESTS_RESPONSE = (
    b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


class LimitedHTTPProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """uvicorn's HTTP protocol with three more limits:

    - the number of connections per address
    - the time until the head of a request is complete
    - the time until a client reads the next part of a response
    """

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _head_bytes: int | None = None
    """The number of bytes received of an incomplete head; None if no head is being received."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # asyncio then calls `pause_writing` whenever the client has not read everything.
        transport.set_write_buffer_limits(0)
        self._start_head_timer()
        network = client_network(self.client)
        if (
            sum(client_network(other.client) == network for other in self.connections)
            > limits.MAX_CONNECTIONS_PER_ADDRESS
        ):
            transport.write(TOO_MANY_REQUESTS_RESPONSE)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > limits.MAX_HEAD_BYTES:
                self.transport.close()
                return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_head_timer()  # the head is complete
        elif self._head_timer is None:
            self._start_head_timer()

    def on_message_begin(self) -> None:
        """Start counting the bytes of a head.

        httptools calls this method. The other parser, h11, has its own limit.
        """
        super().on_message_begin()
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_write_progress(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(limits.HEAD_TIMEOUT_SECONDS, self.transport.close)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _check_write_progress(self, before: int) -> None:
        """Close the connection unless the client has read something since the last check.

        `before` is the number of unread bytes at the last check.
        """
        unread = self.transport.get_write_buffer_size()
        if unread < before:
            self._write_timer = self.loop.call_later(
                limits.WRITE_TIMEOUT_SECONDS, self._check_write_progress, unread
            )
        else:
            self.transport.abort()

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def client_network(client: tuple[str, int] | None) -> str:
    """Return the address of a client, or the /64 network of an IPv6 client.

    One customer of a provider usually has a whole /64 network.

    >>> client_network(("192.168.0.7", 50000)), client_network(("2001:db8::1:2:3:4", 50000))
    ('192.168.0.7', '2001:db8::')
    """
    name = (client or ("", 0))[0].partition("%")[0]
    if ":" not in name:
        return name
    network = ipaddress.ip_network((name, 64), strict=False)
    return str(network.network_address)


def build_config(app: Starlette) -> uvicorn.Config:
    """Return uvicorn's configuration for the app."""
    return uvicorn.Config(
        app,
        http=LimitedHTTPProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limits.MAX_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_SECONDS,
        ws="none",
    )


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self.force_exit:  # a second Ctrl-C aborts requests: log no tracebacks for them
            logging.getLogger("uvicorn.error").disabled = True


def run_server(app: Starlette, listener: socket.socket) -> None:
    """Serve the app at this socket until Ctrl-C or SIGTERM.

    The server first finishes the requests in progress. A second Ctrl-C aborts them.
    """
    _raise_file_limit()
    gc.freeze()  # the garbage collector then skips all objects that exist now
    _Server(build_config(app)).run(sockets=[listener])


def _raise_file_limit() -> None:
    """Raise this process's limit of open files, which connections and databases share."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = 2 * limits.MAX_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != resource.RLIM_INFINITY and soft < least:
        warnings.warn(
            f"this process may open {soft} files, but the server needs {least}: raise the limit "
            "with ulimit -n",
            stacklevel=2,
        )
