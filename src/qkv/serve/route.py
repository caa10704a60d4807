"""The type of a route. The app, its checks and its OpenAPI document are built from all routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from qkv.serve.encoding import CELLS_MEDIA_TYPE
from qkv.serve.validation import Schema

if TYPE_CHECKING:
    from qkv.serve.databases import DatabaseRegistry, ServedDatabase

Right = Literal["read", "write", "upload"]
Method = Literal["GET", "POST", "DELETE"]
Handler = TypeVar("Handler", bound=Callable[..., Any])


@dataclass(frozen=True)
class RequestData:
    """The parts of a request for a handler, parsed and checked."""

    database: ServedDatabase | None = None
    path_params: Mapping[str, str] = field(default_factory=dict)
    query_params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def path_key(self) -> str:
        return self.path_params["key"]

    @property
    def accepts_tagged_cells(self) -> bool:
        """Whether the client accepts cells with tags for the types that JSON lacks."""
        return CELLS_MEDIA_TYPE in self.headers.get("accept", "")

    @property
    def has_tagged_cells(self) -> bool:
        """Whether cells in the body, or the key in the path, may have such tags."""
        return self.headers.get("content-type", "").strip().lower().startswith(CELLS_MEDIA_TYPE)

    @property
    def served_database(self) -> ServedDatabase:
        """The database that the path names. Only for routes with {name} in their path."""
        assert self.database is not None, "the route has no {name}"
        return self.database


@dataclass(frozen=True)
class Route:
    """One method of one path, with its handler and the schemas of its body and response.

    `handler(registry, request)` returns a `Response`, or data that is sent as JSON and matches
    `response_schema`. A handler that is not async runs in a thread.

    A client needs the right `right` to call the route; None means that every client may call
    it. `body` is the schema of a JSON body. A body with one of `raw_media_types` reaches the
    handler as bytes. `binary_media_types` are the media types of responses in bytes.
    `error_statuses` are error statuses that only this route has.
    """

    method: Method
    path: str
    handler: Callable[[DatabaseRegistry, RequestData], Any]
    summary: str
    response_schema: Schema
    right: Right | None = "read"
    body: Schema | None = None
    raw_media_types: tuple[str, ...] = ()
    max_body_bytes: int | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    required_parameters: tuple[str, ...] = ()
    media: str = "application/json"
    binary_media_types: tuple[str, ...] = ()
    error_statuses: tuple[int, ...] = ()

    @property
    def names_database(self) -> bool:
        """Whether the path names a database."""
        return "{name}" in self.path


class Routes(list[Route]):
    """A list of routes. Calling it returns a decorator that adds the route of a handler.

    The summary of the route is the docstring of the handler, unless `summary` is set.

    >>> routes = Routes()
    >>> @routes("GET", "/healthz", {}, right=None)
    ... def health(databases, request):
    ...     '''Check that the server answers.'''
    >>> routes[0].path, routes[0].summary
    ('/healthz', 'Check that the server answers.')
    """

    def __call__(
        self, method: Method, path: str, response: Schema, summary: str = "", **options: Any
    ) -> Callable[[Handler], Handler]:
        def add_route(handler: Handler) -> Handler:
            text = summary or str(handler.__doc__)
            self.append(Route(method, path, handler, text, response, **options))
            return handler

        return add_route
