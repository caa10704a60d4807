"""A server as one process, until a signal ends it."""

from __future__ import annotations

import contextlib
import socket
import warnings

import uvicorn
from starlette.applications import Starlette

from qkv.errors import ArgumentError
from qkv.serve import limits
from qkv.serve.guard import Access, is_loopback

LAST = 30
"""Seconds that requests have to be finished once the server was told to end."""


def check_address(host: str, access: Access) -> None:
    """Refuse an address that others reach, unless they need a token."""
    if access.open and not is_loopback(host):
        raise ArgumentError(
            f"--host: {host} is reached from other machines: give a --token, or a --read-token"
        )


def bound(host: str, port: int) -> socket.socket:
    """A socket at the address; port 0 takes a free one.

    >>> with bound("127.0.0.1", 0) as place:
    ...     place.getsockname()[0]
    '127.0.0.1'
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=limits.CONNECTIONS)
    except OSError as error:
        raise ArgumentError(
            f"nobody can listen at {host} port {port}: {error.strerror or error}; --port 0 takes a "
            "free one"
        ) from None


def run(app: Starlette, place: socket.socket) -> None:
    """Serve at the socket until Ctrl-C or SIGTERM, which let finish what was taken."""
    _open_files()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limits.CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=LAST,
        ws="none",
    )
    uvicorn.Server(config).run(sockets=[place])


def _open_files() -> None:
    """As many files as this process may have: connections and databases share them."""
    try:
        import resource
    except ImportError:  # Windows has no such number
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = 2 * limits.CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != resource.RLIM_INFINITY and soft < least:
        warnings.warn(
            f"this process may have {soft} files open, and {least} are wanted: see ulimit -n",
            stacklevel=2,
        )
