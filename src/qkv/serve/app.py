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

from qkv.errors import unknown_name_error
from qkv.serve import api, encoding, inference, limits, page, validation
from qkv.serve.databases import DatabaseRegistry
from qkv.serve.openapi import build_openapi
from qkv.serve.reference import render_reference as read
from qkv.serve.responses import error_response, json_response, to_request_error
from qkv.serve.route import RequestData, RequestError, Route
from qkv.serve.schemas import TEXT_SCHEMA
from qkv.serve.security import Access, SecurityMiddleware
from qkv.util.deadline import DeadlineError, limit_time

MAX_INLINE_PARSE_BYTES = 2**16
"""Bytes of JSON that are read at once; more are read in a thread, while others are answered."""
ANY_OBJECT_SCHEMA: validation.Schema = {"type": "object"}


class CellConvertor(PathConvertor):
    """A key in a path, with whatever stands in it: slashes, and line breaks too."""

    regex = "(?s:.*)"


register_url_convertor("cell", CellConvertor())


def create_app(
    served: DatabaseRegistry, access: Access | None = None, hosts: Iterable[str] = ()
) -> Starlette:
    """The databases that are served as an ASGI app, which closes them when it ends.

    >>> from qkv import Database
    >>> from starlette.testclient import TestClient
    >>> served = DatabaseRegistry()
    >>> _ = served.add_database("names", Database({"Li": "Mu", "Smola": "Alex"}))
    >>> with TestClient(create_app(served), base_url="http://localhost") as client:
    ...     client.post("/v1/databases/names/ask", json={"query": "Li"}).json()["value"]
    'Mu'
    """
    access = access or Access()
    routes = build_routes(access)
    paths: dict[str, list[Route]] = {}
    for route in routes:
        paths.setdefault(route.path, []).append(route)

    @contextlib.asynccontextmanager
    async def close_after(_: Starlette) -> AsyncIterator[None]:
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
        middleware=[Middleware(SecurityMiddleware, metrics=served.metrics, hosts=hosts)],
        exception_handlers={HTTPException: _handle_http_exception},
        lifespan=close_after,
    )


def build_routes(access: Access) -> list[Route]:
    """Every route of the server, this description's own among them."""

    def readable_names(served: DatabaseRegistry, given: RequestData) -> Iterable[str]:
        # Whoever may not read is told of every route, and of no database.
        reads = access.find_denial(given.headers.get("authorization"), "read") is None
        return served.databases if reads else ()

    def send_openapi(served: DatabaseRegistry, given: RequestData) -> Any:
        return build_openapi(routes, readable_names(served, given), not access.is_open)

    def send_reference(served: DatabaseRegistry, given: RequestData) -> Any:
        url = f"http://{given.headers['host']}"
        text = read(routes, readable_names(served, given), not access.is_open, url)
        return Response(text, media_type="text/html")

    own = [
        Route(
            "GET", "/openapi.json", send_openapi, "This description.", ANY_OBJECT_SCHEMA, right=None
        ),
        Route(
            "GET",
            "/reference",
            send_reference,
            "The same to be read.",
            TEXT_SCHEMA,
            None,
            media="text/html",
        ),
    ]
    routes = [*api.ROUTES, *inference.ROUTES, *page.ROUTES, *own]
    return routes


class Endpoint:
    """One path as an ASGI app; Starlette would wrap a function into three more."""

    def __init__(self, served: DatabaseRegistry, access: Access, routes: Sequence[Route]):
        self.served, self.access = served, access
        self.routes: dict[str, Route] = {route.method: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answer = await self._respond_to(request)
        finally:
            self.served.held_body_bytes -= scope.get("qkv.held", 0)
        await answer(scope, receive, send)

    async def _respond_to(self, request: Request) -> Response:
        route = self.routes["GET" if request.method == "HEAD" else request.method]
        request.scope["qkv.route"] = route.path
        exactly = encoding.CELLS_MEDIA_TYPE in request.headers.get("accept", "")
        try:
            if route.right is not None:
                header = request.headers.get("authorization")
                if (refused := self.access.find_denial(header, route.right)) is not None:
                    raise refused
            if route.right in (None, "read"):
                return await _with_timeout(route, _handle_request(self.served, route, request))  # type: ignore[no-any-return]
            # What keeps something would do so after a refusal too: its thread goes on.
            given = await _with_timeout(route, _read_request(self.served, route, request))
            return await _call_handler(self.served, route, given)
        except RequestError as error:
            return error_response(error, exactly=exactly)
        except DeadlineError:
            return error_response(_late(route), exactly=exactly)
        except Exception as error:
            refused = await self.served.run_in_thread(to_request_error, error)
            if refused is None:
                logging.getLogger("qkv").exception("a bug, in %s", route.path)
                refused = RequestError(500, "a bug in qkv: the server's log has where")
            return error_response(refused, exactly=exactly)


async def _handle_request(served: DatabaseRegistry, route: Route, request: Request) -> Response:
    return await _call_handler(served, route, await _read_request(served, route, request))


async def _call_handler(served: DatabaseRegistry, route: Route, given: RequestData) -> Response:
    def as_response(found: Any) -> Response:
        return (
            found
            if isinstance(found, Response)
            else json_response(found, exactly=given.accepts_tagged_cells)
        )

    if inspect.iscoroutinefunction(route.handler):
        return as_response(await route.handler(served, given))
    return await served.run_in_thread(lambda: as_response(route.handler(served, given)))  # type: ignore[no-any-return]


async def _with_timeout(route: Route, call: Any) -> Any:
    """The result of a call that is stopped at the limit: at the next block of its work where a
    thread does it."""
    try:
        with limit_time(time.monotonic() + limits.REQUEST_TIMEOUT_SECONDS):
            async with asyncio.timeout(limits.REQUEST_TIMEOUT_SECONDS):
                return await call
    except TimeoutError:
        raise _late(route) from None


def _late(route: Route) -> RequestError:
    seconds = limits.UPLOAD_SECONDS if route.right == "upload" else limits.REQUEST_TIMEOUT_SECONDS
    return RequestError(
        503, f"this took longer than {seconds:g} seconds, the limit: {_suggest_alternative(route)}"
    )


def _suggest_alternative(route: Route) -> str:
    """What to do where a limit is in the way."""
    if route.right == "upload":
        return (
            "where the server runs, `qkv import FILE NAME.qkv` reads it, and `qkv serve NAME.qkv` "
            "serves it"
        )
    return "ask or send less at a time, or in Python, where qkv.open(PATH) has no such limit"


async def _read_request(served: DatabaseRegistry, route: Route, request: Request) -> RequestData:
    at = _parse_query_params(route, request)
    kept = served.find_database(request.path_params["name"]) if route.names_database else None
    body = (
        await _read_body(served, route, request)
        if route.body is not None or route.raw_media_types
        else None
    )
    return RequestData(kept, request.path_params, at, body, request.headers)


def _parse_query_params(route: Route, request: Request) -> dict[str, Any]:
    at: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        schema = route.query.get(name)
        if schema is None:
            raise RequestError(400, str(unknown_name_error("parameter", name, route.query)))
        if name in at:
            raise RequestError(400, f"{name} came twice")
        at[name] = validation.parse_parameter(text, schema)
        if fault := validation.find_violation(at[name], schema, name):
            raise RequestError(400, fault)
    for name in route.required_parameters:
        if name not in at:
            raise RequestError(400, f"the parameter {name} is wanted")
    return at


async def _read_body(served: DatabaseRegistry, route: Route, request: Request) -> Any:
    """The body as bytes where the route takes them raw, else as JSON that fits its schema."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    takes = [
        *route.raw_media_types,
        *(["application/json", encoding.CELLS_MEDIA_TYPE] if route.body is not None else []),
    ]
    if media not in takes:
        raise RequestError(
            415, f"the body must be of type {' or '.join(takes)}, not {media[:80]!r}"
        )
    most = route.max_body_bytes or limits.MAX_BODY_BYTES
    large = RequestError(
        413, f"the body may have at most {most:,} bytes: {_suggest_alternative(route)}"
    )
    raw = bytearray()
    with contextlib.suppress(ValueError):
        if int(request.headers.get("content-length", "")) > most:
            raise large
    try:
        async for chunk in request.stream():
            raw += chunk
            served.held_body_bytes += len(chunk)
            request.scope["qkv.held"] = len(raw)
            if served.held_body_bytes > limits.MAX_TOTAL_BODY_BYTES:
                raise RequestError(
                    503, f"{limits.MAX_TOTAL_BODY_BYTES:,} bytes of bodies at a time are the limit"
                )
            if len(raw) > most:
                raise large
    except ClientDisconnect:
        raise RequestError(400, "the body was never finished") from None  # nobody reads it
    if not raw and not media:
        raise RequestError(400, "a body is wanted")
    if media in route.raw_media_types or route.body is None:
        return bytes(raw)
    if len(raw) < MAX_INLINE_PARSE_BYTES:
        return _parse_body(raw, route.body, media)
    return await asyncio.to_thread(_parse_body, raw, route.body, media)


def _parse_body(raw: bytearray, schema: validation.Schema, media: str) -> Any:
    """The JSON of a body that fits its schema."""
    try:
        body = validation.parse_json(raw, schema)
    except ValueError as error:
        raise RequestError(400, str(error)) from None
    return encoding.restore_cells(body) if media == encoding.CELLS_MEDIA_TYPE else body


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, as JSON."""
    assert isinstance(error, HTTPException)
    told = {404: "there is nothing at this path", 405: f"{request.method} is not for this path"}
    refused = RequestError(error.status_code, told.get(error.status_code, error.detail))
    refused.headers.update(error.headers or {})
    return error_response(refused)
