"""Access control: tokens, checks of the headers Host and Origin, and security headers."""

from __future__ import annotations

import hmac
import ipaddress
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qkv.errors import ArgumentError
from qkv.serve import limits
from qkv.serve.errors import RequestError
from qkv.serve.metrics import Metrics
from qkv.serve.responses import error_response
from qkv.serve.route import Right
from qkv.util.caches import memoize

MIN_TOKEN_CHARACTERS = 16
"""The minimum length of a token. A shorter token could be guessed."""

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
RAW_SECURITY_HEADERS = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]


@dataclass(frozen=True)
class Access:
    """The rights of clients, by the token that they send.

    A client with `token` may do everything. A client with `read_token` may read. If neither token
    is set, every client may read and upload, and may write if `write` is true.

    >>> Access(read_token="0123456789abcdef").find_denial("Bearer 0123456789abcdef", "write").status
    403
    """

    token: str | None = None
    read_token: str | None = None
    write: bool = False

    def __post_init__(self) -> None:
        for name, token in (("token", self.token), ("read_token", self.read_token)):
            if token is not None and not re.fullmatch(rf"[!-~]{{{MIN_TOKEN_CHARACTERS},}}", token):
                raise ArgumentError(
                    f"{name} must have at least {MIN_TOKEN_CHARACTERS} visible ASCII characters "
                    "and no spaces: `openssl rand -hex 16` prints such a token"
                )

    @property
    def is_open(self) -> bool:
        """Whether clients need no token."""
        return self.token is None and self.read_token is None

    def find_denial(self, header: str | None, right: Right) -> RequestError | None:
        """Return the error if this Authorization header does not allow `right`; None if it does."""
        if self.is_open:
            if right != "write" or self.write:
                return None
            return RequestError(
                403, "this server is read-only: start it with --write, or with a --token"
            )
        scheme, _, sent = (header or "").partition(" ")
        sent = sent.strip() if scheme.lower() == "bearer" else ""
        # Compare both tokens always, so that the response time does not reveal which one matched.
        is_full, is_reader = (_is_same_token(sent, x) for x in (self.token, self.read_token))
        if is_full or (is_reader and right == "read"):
            return None
        if is_reader:
            return RequestError(
                403,
                f"this token may only read, but the request needs the right to {right}: send the "
                "token with which the server was started (--token)",
            )
        if sent:
            message = "this token is not valid for this server"
        else:
            message = "a token is required: send the header Authorization: Bearer TOKEN"
        error = RequestError(
            401, f"{message} (the qkv command reads the token from --token or QKV_TOKEN)"
        )
        error.headers["www-authenticate"] = "Bearer"
        return error


def _is_same_token(sent: str, token: str | None) -> bool:
    expected = (token or "").encode()
    return hmac.compare_digest(sent.encode("utf-8", "replace"), expected) and bool(expected)


class SecurityMiddleware:
    """Checks the headers Host and Origin, limits concurrent requests, and adds security headers.

    Host may be an IP address, `localhost` or one of `hosts`. A request with another Host is
    refused, which prevents DNS rebinding. The middleware also records each request in the metrics.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, hosts: Iterable[str] = ()):
        self.app, self.metrics = app, metrics
        self.hosts = {"localhost", *(host.lower() for host in hosts)}
        self.open_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                present = {name for name, _ in headers}
                message["headers"] = headers + [
                    pair for pair in RAW_SECURITY_HEADERS if pair[0] not in present
                ]
            await send(message)

        denial = self._find_denial(Headers(scope=scope), scope)
        self.open_requests += 1
        self.metrics.open_requests.set(self.open_requests)
        try:
            if denial is not None:
                await error_response(denial)(scope, receive, send_with_headers)
            else:
                await self.app(scope, receive, send_with_headers)
        finally:
            self.open_requests -= 1
            self.metrics.open_requests.set(self.open_requests)
            route = scope.get("qkv.route", "other")
            method = scope["method"] if route != "other" else "other"
            self.metrics.observe_request(method, route, status, time.perf_counter() - start)

    def _find_denial(self, headers: Headers, scope: Scope) -> RequestError | None:
        """Return the error for a request that must be refused, else None."""
        # If there are two Host headers, the joined text matches no host.
        host = ", ".join(headers.getlist("host"))
        name = re.sub(r":\d+$", "", host).lower()
        if name not in self.hosts and not _is_address(name.removeprefix("[").removesuffix("]")):
            return RequestError(
                421,
                f"this server does not answer requests to the host {host[:80]!r}: use its IP "
                "address",
            )
        origin = headers.get("origin")
        if origin is not None and origin != f"{scope['scheme']}://{host}":
            return RequestError(
                403, f"a page from {origin[:80]!r} may not send requests to this server"
            )
        if self.open_requests >= limits.MAX_REQUESTS:
            busy = RequestError(
                503, f"the server is busy with {limits.MAX_REQUESTS} requests: try again later"
            )
            busy.headers["retry-after"] = "1"
            return busy
        return None


@memoize("serve.ip_addresses", max_entries=256)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
