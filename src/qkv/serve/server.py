"""A server as one process, until a signal ends it."""

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
"""Seconds that requests have to be finished once the server was told to end."""


def check_address(host: str, access: Access) -> None:
    """Refuse an address that others reach, unless they need a token."""
    if access.is_open and not is_loopback(host):
        raise ArgumentError(
            f"--host: {host} is reached from other machines: give a --token, or a --read-token"
        )


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket at the address; port 0 takes a free one.

    >>> with bind_socket("127.0.0.1", 0) as place:
    ...     place.getsockname()[0]
    '127.0.0.1'
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=limits.MAX_CONNECTIONS)
    except OSError as error:
        raise ArgumentError(
            f"nobody can listen at {host} port {port}: {error.strerror or error}; --port 0 takes a "
            "free one"
        ) from None


TOO_MANY_REQUESTS_RESPONSE = (
    b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


class LimitedHTTPProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """HTTP of uvicorn, which would take any number of connections from one address, and wait for
    ever: for the rest of a request's head, and until an answer is read."""

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _head_bytes: int | None = None
    """Bytes of a head that has begun in an earlier piece."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `pause_writing` where anything is left unread
        self._start_head_timer()
        own = client_network(self.client)
        if (
            sum(client_network(one.client) == own for one in self.connections)
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
            self._cancel_head_timer()  # there is a request
        elif self._head_timer is None:
            self._start_head_timer()

    def on_message_begin(self) -> None:
        """Called by httptools; h11 has a limit of its own."""
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
        """Whether less is unread than before; where it is not, nobody reads."""
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._write_timer = self.loop.call_later(
                limits.WRITE_TIMEOUT_SECONDS, self._check_write_progress, left
            )
        else:
            self.transport.abort()

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def client_network(client: tuple[str, int] | None) -> str:
    """An address, of IPv6 the half that one household has.

    >>> client_network(("192.168.0.7", 50000)), client_network(("2001:db8::1:2:3:4", 50000))
    ('192.168.0.7', '2001:db8::')
    """
    name = (client or ("", 0))[0].partition("%")[0]
    if ":" not in name:
        return name
    network = ipaddress.ip_network((name, 64), strict=False)
    return str(network.network_address)


def build_config(app: Starlette) -> uvicorn.Config:
    """How uvicorn serves the app."""
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
        if self.force_exit:  # what is cut off by a second Ctrl-C is no bug, whose trace is told
            logging.getLogger("uvicorn.error").disabled = True


def run_server(app: Starlette, place: socket.socket) -> None:
    """Serve at the socket until Ctrl-C or SIGTERM, which let finish what was taken; a second Ctrl-C
    does not."""
    _raise_file_limit()
    gc.freeze()  # what is loaded by now stays: no collection need look at it again
    _Server(build_config(app)).run(sockets=[place])


def _raise_file_limit() -> None:
    """As many files as this process may have: connections and databases share them."""
    try:
        import resource
    except ImportError:  # Windows has no such number
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = 2 * limits.MAX_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != resource.RLIM_INFINITY and soft < least:
        warnings.warn(
            f"this process may have {soft} files open, and {least} are wanted: see ulimit -n",
            stacklevel=2,
        )
