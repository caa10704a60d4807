"""A server as one process, until a signal ends it."""

from __future__ import annotations

from collections.abc import Callable

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


def run(app: Starlette, host: str, port: int, started: Callable[[int], object]) -> None:
    """Serve until Ctrl-C or SIGTERM, which let finish what was taken; tell `started` the port."""
    config = uvicorn.Config(
        app,
        host,
        port,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limits.CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=LAST,
        ws="none",
    )
    _Server(config, started).run()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[int], object]):
        super().__init__(config)
        self._told = started

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            self._told(port)
