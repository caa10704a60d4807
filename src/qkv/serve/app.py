"""The ASGI app: it checks requests, calls the handlers of routes, and sends the responses."""

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
from qkv.serve.errors import RequestError
from qkv.serve.openapi import build_openapi
from qkv.serve.reference import render_reference
from qkv.serve.responses import error_response, json_response, to_request_error
from qkv.serve.route import RequestData, Route
from qkv.serve.schemas import TEXT_SCHEMA
from qkv.serve.security import Access, SecurityMiddleware
from qkv.util.deadline import DeadlineError, limit_time

MAX_INLINE_PARSE_BYTES = 2**16
"""A larger JSON body is parsed in a thread, so that other requests do not wait."""
ANY_OBJECT_SCHEMA: validation.Schema = {"type": "object"}


class CellConvertor(PathConvertor):
    """Converts a key in a path, which may contain slashes and line breaks."""

    regex = "(?s:.*)"


register_url_convertor("cell", CellConvertor())


def create_app(
    registry: DatabaseRegistry, access: Access | None = None, hosts: Iterable[str] = ()
) -> Starlette:
    """Return the ASGI app that serves these databases. It closes them when the server stops.

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
        await asyncio.to_thread(registry.close)

    return Starlette(
        routes=[
            Path(
                path.replace("{key}", "{key:cell}"),
                Endpoint(registry, access, same),
                methods=[route.method for route in same],
            )
            for path, same in paths.items()
        ],
        middleware=[Middleware(SecurityMiddleware, metrics=registry.metrics, hosts=hosts)],
        exception_handlers={HTTPException: _handle_http_exception},
        lifespan=close_after,
    )


def build_routes(access: Access) -> list[Route]:
    """Return all routes, including those of the OpenAPI document and the API reference page."""

    def readable_names(registry: DatabaseRegistry, data: RequestData) -> Iterable[str]:
        # A client that may not read gets the routes, but not the names of the databases.
        reads = access.find_denial(data.headers.get("authorization"), "read") is None
        return registry.databases if reads else ()

    def send_openapi(registry: DatabaseRegistry, data: RequestData) -> Any:
        return build_openapi(routes, readable_names(registry, data), not access.is_open)

    def send_reference(registry: DatabaseRegistry, data: RequestData) -> Any:
        url = f"http://{data.headers['host']}"
        text = render_reference(routes, readable_names(registry, data), not access.is_open, url)
        return Response(text, media_type="text/html")

    description_routes = [
        Route(
            "GET", "/openapi.json", send_openapi, "The OpenAPI document.", ANY_OBJECT_SCHEMA, None
        ),
        Route(
            "GET",
            "/reference",
            send_reference,
            "The API reference as a web page.",
            TEXT_SCHEMA,
            None,
            media="text/html",
        ),
    ]
    routes = [*api.ROUTES, *inference.ROUTES, *page.ROUTES, *description_routes]
    return routes


class Endpoint:
    """All routes with one path, as an ASGI app.

    Starlette would put slower wrappers around a function.
    """

    def __init__(self, registry: DatabaseRegistry, access: Access, routes: Sequence[Route]):
        self.served, self.access = registry, access
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
                if (denial := self.access.find_denial(header, route.right)) is not None:
                    raise denial
            if route.right in (None, "read"):
                return await _with_timeout(route, _handle_request(self.served, route, request))  # type: ignore[no-any-return]
            # A write is not stopped at the time limit: its thread would continue after the error.
            data = await _with_timeout(route, _read_request(self.served, route, request))
            return await _call_handler(self.served, route, data)
        except RequestError as error:
            return error_response(error, exactly=exactly)
        except DeadlineError:
            return error_response(_timeout_error(route), exactly=exactly)
        except Exception as error:
            denial = await self.served.run_in_thread(to_request_error, error)
            if denial is None:
                logging.getLogger("qkv").exception("unexpected error in %s", route.path)
                denial = RequestError(500, "a bug in qkv: the server's log has the traceback")
            return error_response(denial, exactly=exactly)


async def _handle_request(registry: DatabaseRegistry, route: Route, request: Request) -> Response:
    return await _call_handler(registry, route, await _read_request(registry, route, request))


async def _call_handler(registry: DatabaseRegistry, route: Route, data: RequestData) -> Response:
    """Call the handler of a route, in a thread unless it is async, and return its response."""

    def as_response(result: Any) -> Response:
        if isinstance(result, Response):
            return result
        return json_response(result, exactly=data.accepts_tagged_cells)

    if inspect.iscoroutinefunction(route.handler):
        return as_response(await route.handler(registry, data))
    return await registry.run_in_thread(lambda: as_response(route.handler(registry, data)))  # type: ignore[no-any-return]


async def _with_timeout(route: Route, call: Any) -> Any:
    """Await a call, and cancel it at the time limit.

    A thread that works for the call stops when it next checks the deadline.
    """
    try:
        with limit_time(time.monotonic() + limits.REQUEST_TIMEOUT_SECONDS):
            async with asyncio.timeout(limits.REQUEST_TIMEOUT_SECONDS):
                return await call
    except TimeoutError:
        raise _timeout_error(route) from None


def _timeout_error(route: Route) -> RequestError:
    seconds = (
        limits.UPLOAD_TIMEOUT_SECONDS if route.right == "upload" else limits.REQUEST_TIMEOUT_SECONDS
    )
    return RequestError(
        503, f"the request took longer than {seconds:g} seconds: {_suggest_alternative(route)}"
    )


def _suggest_alternative(route: Route) -> str:
    """Return advice for a request that exceeds a limit."""
    if route.right == "upload":
        return (
            "on the server's machine, import the file with `qkv import FILE NAME.qkv` and serve "
            "the database with `qkv serve NAME.qkv`"
        )
    return "send smaller requests, or use qkv.open(PATH) in Python, which has no such limit"


async def _read_request(registry: DatabaseRegistry, route: Route, request: Request) -> RequestData:
    params = _parse_query_params(route, request)
    served_database = (
        registry.find_database(request.path_params["name"]) if route.names_database else None
    )
    body = (
        await _read_body(registry, route, request)
        if route.body is not None or route.raw_media_types
        else None
    )
    return RequestData(served_database, request.path_params, params, body, request.headers)


def _parse_query_params(route: Route, request: Request) -> dict[str, Any]:
    """Return the query parameters with the types of their schemas; raise for an invalid one."""
    params: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        schema = route.query.get(name)
        if schema is None:
            raise RequestError(400, str(unknown_name_error("parameter", name, route.query)))
        if name in params:
            raise RequestError(400, f"the parameter {name} appears twice: send it once")
        params[name] = validation.parse_parameter(text, schema)
        if fault := validation.find_violation(params[name], schema, name):
            raise RequestError(400, fault)
    for name in route.required_parameters:
        if name not in params:
            raise RequestError(400, f"the parameter {name} is missing: add ?{name}=…")
    return params


async def _read_body(registry: DatabaseRegistry, route: Route, request: Request) -> Any:
    """Read and check the body.

    Return bytes if the route accepts its media type without parsing, else the parsed JSON.
    """
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
        413,
        f"the body has more than {most:,} bytes, which is the limit: {_suggest_alternative(route)}",
    )
    raw = bytearray()
    with contextlib.suppress(ValueError):
        if int(request.headers.get("content-length", "")) > most:
            raise large
    try:
        async for chunk in request.stream():
            raw += chunk
            registry.held_body_bytes += len(chunk)
            request.scope["qkv.held"] = len(raw)
            if registry.held_body_bytes > limits.MAX_TOTAL_BODY_BYTES:
                raise RequestError(
                    503,
                    "the server is busy, and the bodies of all requests exceed "
                    f"{limits.MAX_TOTAL_BODY_BYTES:,} bytes: try again later",
                )
            if len(raw) > most:
                raise large
    except ClientDisconnect:
        raise RequestError(400, "the client disconnected before the end of the body") from None
    if not raw and not media:
        raise RequestError(400, "the request has no body: send one")
    if media in route.raw_media_types or route.body is None:
        return bytes(raw)
    if len(raw) < MAX_INLINE_PARSE_BYTES:
        return _parse_body(raw, route.body, media)
    return await asyncio.to_thread(_parse_body, raw, route.body, media)


def _parse_body(raw: bytearray, schema: validation.Schema, media: str) -> Any:
    """Parse a JSON body and check it against its schema."""
    try:
        body = validation.parse_validated_json(raw, schema)
    except ValueError as error:
        raise RequestError(400, str(error)) from None
    return encoding.restore_cells(body) if media == encoding.CELLS_MEDIA_TYPE else body


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    """Return Starlette's errors 404 and 405 as JSON."""
    assert isinstance(error, HTTPException)
    messages = {
        404: "this path does not exist: /reference lists all paths",
        405: f"{request.method} is not allowed for this path: /reference lists the methods",
    }
    denial = RequestError(error.status_code, messages.get(error.status_code, error.detail))
    denial.headers.update(error.headers or {})
    return error_response(denial)
