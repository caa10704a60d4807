"""A route: one row of the table that the app, its checks and its description are made from."""

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


class RequestError(Exception):
    """What the server does not do: a status, a sentence, and what else joins it in the answer."""

    def __init__(self, status: int, message: str, **data: Any):
        super().__init__(message)
        self.status, self.message, self.data = status, message, data
        self.headers: dict[str, str] = {}


@dataclass(frozen=True)
class RequestData:
    """What came with a request, as its route says: `path_params` and `query_params` are its
    parameters, those of the path and those behind the question mark."""

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
        """Whether the answer may have cells that JSON has no word for."""
        return CELLS_MEDIA_TYPE in self.headers.get("accept", "")

    @property
    def has_tagged_cells(self) -> bool:
        """Whether the body, or a key in the path, says what cells are that JSON has no word for."""
        return self.headers.get("content-type", "").strip().lower().startswith(CELLS_MEDIA_TYPE)

    @property
    def served_database(self) -> ServedDatabase:
        """The database that the path names."""
        assert self.database is not None, "the route has no {name}"
        return self.database


@dataclass(frozen=True)
class Route:
    """`call(served, given)` answers what `response_schema` describes, or is an async function that
    does.

    What it returns is sent as JSON, unless it is a `Response`. A function that is not async runs in
    a thread. `body` is the schema of a JSON body; `raw_media_types` names the media types of one
    that is passed
    on as bytes, or as JSON beside them where both are given. `error_statuses` are the statuses of
    its own
    refusals, beside those that every route has; `binary_media_types` the media types of an answer
    in bytes.
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
    """A table into which functions enter themselves, each as a route that its docstring tells of.

    >>> routes = Routes()
    >>> @routes("GET", "/healthz", {}, right=None)
    ... def health(served, given):
    ...     '''Whether the server answers.'''
    >>> routes[0].path, routes[0].summary
    ('/healthz', 'Whether the server answers.')
    """

    def __call__(
        self, method: Method, path: str, answer: Schema, tells: str = "", **more: Any
    ) -> Callable[[Handler], Handler]:
        def add_route(call: Handler) -> Handler:
            self.append(Route(method, path, call, tells or str(call.__doc__), answer, **more))
            return call

        return add_route
