"""Who may ask, from where, and what browsers are told: tokens, Host, Origin, headers."""

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
from qkv.serve.metrics import Metrics
from qkv.serve.responses import error_response
from qkv.serve.route import RequestError, Right
from qkv.util.caches import memoize

MIN_TOKEN_CHARACTERS = 16
"""Characters of a token, so that it cannot be guessed."""

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
    """Who may do what: `token` all, `read_token` read; without either everyone may read and
    upload, and write where `write` says so.

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
                    f"{name}: at least {MIN_TOKEN_CHARACTERS} visible characters without spaces "
                    "are wanted, as "
                    "`openssl rand -hex 16` prints them"
                )

    @property
    def is_open(self) -> bool:
        """Whether no token is asked for."""
        return self.token is None and self.read_token is None

    def find_denial(self, header: str | None, right: Right) -> RequestError | None:
        """Why the bearer of an Authorization header may not do this, if so."""
        if self.is_open:
            if right != "write" or self.write:
                return None
            return RequestError(
                403, "this server only reads: start it with --write, or with a --token"
            )
        scheme, _, given = (header or "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        # Both are compared, however the first ends: the time tells nothing.
        all_, some = (_is_same_token(given, token) for token in (self.token, self.read_token))
        if all_ or (some and right == "read"):
            return None
        if some:
            return RequestError(403, f"this token may read only, not {right}")
        if given:
            told = "this token is not one of this server's"
        else:
            told = "a token is wanted: send it as Authorization: Bearer TOKEN"
        told += " (qkv takes it from --token or QKV_TOKEN)"
        refused = RequestError(401, told)
        refused.headers["www-authenticate"] = "Bearer"
        return refused


def _is_same_token(given: str, token: str | None) -> bool:
    wanted = (token or "").encode()
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted) and bool(wanted)


class SecurityMiddleware:
    """Around the whole app: its Host is checked, as many requests as may be are let in, what they
    took is counted, and every answer has the headers above.

    An IP address in Host is what a browser was given, never a name that was bent to this machine
    (DNS rebinding); of names, `localhost` and those in `hosts` are ours.
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
                own = {name for name, _ in headers}
                message["headers"] = headers + [
                    pair for pair in RAW_SECURITY_HEADERS if pair[0] not in own
                ]
            await send(message)

        refused = self._find_denial(Headers(scope=scope), scope)
        self.open_requests += 1
        self.metrics.open_requests.set(self.open_requests)
        try:
            if refused is not None:
                await error_response(refused)(scope, receive, send_with_headers)
            else:
                await self.app(scope, receive, send_with_headers)
        finally:
            self.open_requests -= 1
            self.metrics.open_requests.set(self.open_requests)
            route = scope.get("qkv.route", "other")
            method = scope["method"] if route != "other" else "other"
            self.metrics.observe_request(method, route, status, time.perf_counter() - start)

    def _find_denial(self, headers: Headers, scope: Scope) -> RequestError | None:
        host = ", ".join(headers.getlist("host"))  # of two, who stands before us may read the other
        name = re.sub(r":\d+$", "", host).lower()
        if name not in self.hosts and not _is_address(name.removeprefix("[").removesuffix("]")):
            return RequestError(421, f"the Host {host[:80]!r} is not this server: use its address")
        origin = headers.get("origin")
        if origin is not None and origin != f"{scope['scheme']}://{host}":
            return RequestError(403, f"a page of {origin[:80]!r} may not use this server")
        if self.open_requests >= limits.MAX_REQUESTS:
            refused = RequestError(
                503, f"{limits.MAX_REQUESTS} requests at a time are the limit: try again"
            )
            refused.headers["retry-after"] = "1"
            return refused
        return None


@memoize("serve.ip_addresses", max_entries=256)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
