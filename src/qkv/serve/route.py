"""A route: one row of the table that the app, its checks and its description are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from qkv.serve.fit import Schema
from qkv.serve.wire import CELLS

if TYPE_CHECKING:
    from qkv.serve.served import Kept, Served

Right = Literal["read", "write", "upload"]
Method = Literal["GET", "POST", "DELETE"]
Call = TypeVar("Call", bound=Callable[..., Any])


class Refused(Exception):
    """What the server does not do: a status, a sentence, and what else joins it in the answer."""

    def __init__(self, status: int, message: str, **data: Any):
        super().__init__(message)
        self.status, self.message, self.data = status, message, data
        self.headers: dict[str, str] = {}


@dataclass(frozen=True)
class Given:
    """What came with a request, as its route says: `path` and `at` are its parameters, those of
    the path and those behind the question mark."""

    database: Kept | None = None
    path: Mapping[str, str] = field(default_factory=dict)
    at: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.path["key"]

    @property
    def exactly(self) -> bool:
        """Whether the answer may have cells that JSON has no word for."""
        return CELLS in self.headers.get("accept", "")

    @property
    def cells(self) -> bool:
        """Whether the body, or a key in the path, says what cells are that JSON has no word for."""
        return self.headers.get("content-type", "").strip().lower().startswith(CELLS)

    @property
    def kept(self) -> Kept:
        """The database that the path names."""
        assert self.database is not None, "the route has no {name}"
        return self.database


@dataclass(frozen=True)
class Route:
    """`call(served, given)` answers what `answer` describes, or is an async function that does.

    What it returns is sent as JSON, unless it is a `Response`. A function that is not async runs in
    a thread. `body` is the schema of a JSON body; `raw` names the media types of one that is passed
    on as bytes, or as JSON beside them where both are given. `refuses` are the statuses of its own
    refusals, beside those that every route has; `also` the media types of an answer in bytes.
    """

    method: Method
    path: str
    call: Callable[[Served, Given], Any]
    tells: str
    answer: Schema
    right: Right | None = "read"
    body: Schema | None = None
    raw: tuple[str, ...] = ()
    most: int | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    media: str = "application/json"
    also: tuple[str, ...] = ()
    refuses: tuple[int, ...] = ()

    @property
    def named(self) -> bool:
        """Whether the path names a database."""
        return "{name}" in self.path


class Routes(list[Route]):
    """A table into which functions enter themselves, each as a route that its docstring tells of.

    >>> routes = Routes()
    >>> @routes("GET", "/healthz", {}, right=None)
    ... def health(served, given):
    ...     '''Whether the server answers.'''
    >>> routes[0].path, routes[0].tells
    ('/healthz', 'Whether the server answers.')
    """

    def __call__(
        self, method: Method, path: str, answer: Schema, tells: str = "", **more: Any
    ) -> Callable[[Call], Call]:
        def enter(call: Call) -> Call:
            self.append(Route(method, path, call, tells or str(call.__doc__), answer, **more))
            return call

        return enter
