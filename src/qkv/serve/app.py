"""The app: the table of routes as Starlette has them, each request read, checked and answered."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send

from qkv.deadline import DeadlineError, limit_time
from qkv.errors import unknown
from qkv.serve import api, fit, inference, limits, page, wire
from qkv.serve.answers import refusal, refused_by, written
from qkv.serve.bodies import TEXT
from qkv.serve.guard import Access, Guard
from qkv.serve.openapi import described
from qkv.serve.reference import page as read
from qkv.serve.route import Given, Refused, Route
from qkv.serve.served import Served

SMALL = 2**16
"""Bytes of JSON that are read at once; more are read in a thread, while others are answered."""
ANYTHING: fit.Schema = {"type": "object"}


class Cell(PathConvertor):
    """A key in a path, with whatever stands in it: slashes, and line breaks too."""

    regex = "(?s:.*)"


register_url_convertor("cell", Cell())


def app(served: Served, access: Access | None = None, hosts: Iterable[str] = ()) -> Starlette:
    """The databases that are served as an ASGI app, which closes them when it ends.

    >>> from qkv import Database
    >>> from starlette.testclient import TestClient
    >>> served = Served()
    >>> _ = served.put("names", Database({"Li": "Mu", "Smola": "Alex"}))
    >>> with TestClient(app(served), base_url="http://localhost") as client:
    ...     client.post("/v1/databases/names/ask", json={"query": "Li"}).json()["value"]
    'Mu'
    """
    access = access or Access()
    routes = table(access)
    paths: dict[str, list[Route]] = {}
    for route in routes:
        paths.setdefault(route.path, []).append(route)

    @contextlib.asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(served.close)

    return Starlette(
        routes=[
            Path(
                path.replace("{key}", "{key:cell}"),
                Endpoint(served, access, same),
                methods=[route.method for route in same],
            )
            for path, same in paths.items()
        ],
        middleware=[Middleware(Guard, metrics=served.metrics, hosts=hosts)],
        exception_handlers={HTTPException: _unrouted},
        lifespan=life,
    )


def table(access: Access) -> list[Route]:
    """Every route of the server, this description's own among them."""

    def names(served: Served, given: Given) -> Iterable[str]:
        # Whoever may not read is told of every route, and of no database.
        reads = access.refuses(given.headers.get("authorization"), "read") is None
        return served.databases if reads else ()

    def openapi(served: Served, given: Given) -> Any:
        return described(routes, names(served, given), not access.open)

    def reference(served: Served, given: Given) -> Any:
        url = f"http://{given.headers['host']}"
        text = read(routes, names(served, given), not access.open, url)
        return Response(text, media_type="text/html")

    own = [
        Route("GET", "/openapi.json", openapi, "This description.", ANYTHING, right=None),
        Route(
            "GET", "/reference", reference, "The same to be read.", TEXT, None, media="text/html"
        ),
    ]
    routes = [*api.ROUTES, *inference.ROUTES, *page.ROUTES, *own]
    return routes


class Endpoint:
    """One path as an ASGI app; Starlette would wrap a function into three more."""

    def __init__(self, served: Served, access: Access, routes: Sequence[Route]):
        self.served, self.access = served, access
        self.routes: dict[str, Route] = {route.method: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answer = await self._answer(request)
        finally:
            self.served.held -= scope.get("qkv.held", 0)
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        route = self.routes["GET" if request.method == "HEAD" else request.method]
        request.scope["qkv.route"] = route.path
        exactly = wire.CELLS in request.headers.get("accept", "")
        try:
            if route.right is not None:
                header = request.headers.get("authorization")
                if (refused := self.access.refuses(header, route.right)) is not None:
                    raise refused
            if route.right in (None, "read"):
                return await _timed(route, _taken(self.served, route, request))  # type: ignore[no-any-return]
            # What keeps something would do so after a refusal too: its thread goes on.
            given = await _timed(route, _given(self.served, route, request))
            return await _called(self.served, route, given)
        except Refused as error:
            return refusal(error, exactly=exactly)
        except DeadlineError:
            return refusal(_late(route), exactly=exactly)
        except Exception as error:
            refused = await self.served.work(refused_by, error)
            if refused is None:
                logging.getLogger("qkv").exception("a bug, in %s", route.path)
                refused = Refused(500, "a bug in qkv: the server's log has where")
            return refusal(refused, exactly=exactly)


async def _taken(served: Served, route: Route, request: Request) -> Response:
    return await _called(served, route, await _given(served, route, request))


async def _called(served: Served, route: Route, given: Given) -> Response:
    def response(found: Any) -> Response:
        return found if isinstance(found, Response) else written(found, exactly=given.exactly)

    if inspect.iscoroutinefunction(route.call):
        return response(await route.call(served, given))
    return await served.work(lambda: response(route.call(served, given)))  # type: ignore[no-any-return]


async def _timed(route: Route, call: Any) -> Any:
    """The result of a call that is stopped at the limit: at the next block of its work where a
    thread does it."""
    try:
        with limit_time(time.monotonic() + limits.SECONDS):
            async with asyncio.timeout(limits.SECONDS):
                return await call
    except TimeoutError:
        raise _late(route) from None


def _late(route: Route) -> Refused:
    seconds = limits.UPLOAD_SECONDS if route.right == "upload" else limits.SECONDS
    return Refused(503, f"this took longer than {seconds:g} seconds, the limit: {_instead(route)}")


def _instead(route: Route) -> str:
    """What to do where a limit is in the way."""
    if route.right == "upload":
        return (
            "where the server runs, `qkv import FILE NAME.qkv` reads it, and `qkv serve NAME.qkv` "
            "serves it"
        )
    return "ask or send less at a time, or in Python, where qkv.open(PATH) has no such limit"


async def _given(served: Served, route: Route, request: Request) -> Given:
    at = _parameters(route, request)
    kept = served.find(request.path_params["name"]) if route.named else None
    body = await _body(served, route, request) if route.body is not None or route.raw else None
    return Given(kept, request.path_params, at, body, request.headers)


def _parameters(route: Route, request: Request) -> dict[str, Any]:
    at: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        schema = route.query.get(name)
        if schema is None:
            raise Refused(400, str(unknown("parameter", name, route.query)))
        if name in at:
            raise Refused(400, f"{name} came twice")
        at[name] = fit.read(text, schema)
        if fault := fit.fault(at[name], schema, name):
            raise Refused(400, fault)
    for name in route.needs:
        if name not in at:
            raise Refused(400, f"the parameter {name} is wanted")
    return at


async def _body(served: Served, route: Route, request: Request) -> Any:
    """The body as bytes where the route takes them raw, else as JSON that fits its schema."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    takes = [*route.raw, *(["application/json", wire.CELLS] if route.body is not None else [])]
    if media not in takes:
        raise Refused(415, f"the body must be of type {' or '.join(takes)}, not {media[:80]!r}")
    most = route.most or limits.BODY
    large = Refused(413, f"the body may have at most {most:,} bytes: {_instead(route)}")
    raw = bytearray()
    with contextlib.suppress(ValueError):
        if int(request.headers.get("content-length", "")) > most:
            raise large
    try:
        async for chunk in request.stream():
            raw += chunk
            served.held += len(chunk)
            request.scope["qkv.held"] = len(raw)
            if served.held > limits.HELD:
                raise Refused(503, f"{limits.HELD:,} bytes of bodies at a time are the limit")
            if len(raw) > most:
                raise large
    except ClientDisconnect:
        raise Refused(400, "the body was never finished") from None  # nobody reads it
    if not raw and not media:
        raise Refused(400, "a body is wanted")
    if media in route.raw or route.body is None:
        return bytes(raw)
    if len(raw) < SMALL:
        return _parsed(raw, route.body, media)
    return await asyncio.to_thread(_parsed, raw, route.body, media)


def _parsed(raw: bytearray, schema: fit.Schema, media: str) -> Any:
    """The JSON of a body that fits its schema."""
    try:
        body = fit.parsed(raw, schema)
    except ValueError as error:
        raise Refused(400, str(error)) from None
    return wire.restored(body) if media == wire.CELLS else body


async def _unrouted(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, as JSON."""
    assert isinstance(error, HTTPException)
    told = {404: "there is nothing at this path", 405: f"{request.method} is not for this path"}
    refused = Refused(error.status_code, told.get(error.status_code, error.detail))
    refused.headers.update(error.headers or {})
    return refusal(refused)
