"""A client of a qkv server: `Client(url).ask("books", "the alchmist")`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Unpack, overload

from qkv.serve.remote_database import RemoteDatabase
from qkv.serve.transport import Transport
from qkv.util.types import UNSET, Closable, Shaped

if TYPE_CHECKING:
    import numpy as np

    from qkv.answer import Answer
    from qkv.database.interface import DatabaseInfo
    from qkv.database.query.arguments import AskOptions, DatabaseAttendOptions


class Client(Closable):
    """A client of the `qkv serve` server at `url`. Threads may share a client.

    `client["books"]` is one database of the server, with the methods of a local database.
    `client.ask("books", query)` is short for `client["books"].ask(query)`, and likewise for the
    other methods. `timeout` is in seconds.

        client = qkv.Client("http://127.0.0.1:8000")
        client.ask("books", "the alchmist").value
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 60.0):
        self._transport = Transport(url, token, timeout)
        self._remotes: dict[str, RemoteDatabase] = {}

    @property
    def url(self) -> str:
        return self._transport.url

    def databases(self) -> list[str]:
        """Return the names of the server's databases."""
        response = self._transport.send_read("GET", "/v1/databases")
        return [str(database["name"]) for database in response["databases"]]

    def __getitem__(self, name: str) -> RemoteDatabase:
        return self._remotes.setdefault(name, RemoteDatabase(self._transport, name))

    # `RemoteDatabase` documents these methods.

    @overload
    def ask(self, name: str, query: Shaped, **options: Unpack[AskOptions]) -> Any: ...
    @overload
    def ask(self, name: str, query: list[Any], **options: Unpack[AskOptions]) -> list[Answer]: ...
    @overload
    def ask(self, name: str, query: Any, **options: Unpack[AskOptions]) -> Answer: ...
    def ask(self, name: str, query: Any, **options: Any) -> Any:
        return self[name].ask(query, **options)

    def attend(self, name: str, query: Any, **options: Unpack[DatabaseAttendOptions]) -> np.ndarray:
        return self[name].attend(query, **options)

    def rows(
        self, name: str, *, where: Any = None, start: int = 0, count: int | None = None
    ) -> Iterator[dict[str, Any]]:
        return self[name].rows(where=where, start=start, count=count)

    def get(self, name: str, key: Any, default: Any = None) -> Any:
        return self[name].get(key, default)

    def add(self, name: str, keys: Any, values: Any = UNSET) -> None:
        self[name].add(keys, values)

    def extend(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        self[name].extend(rows)

    def remove(self, name: str, keys: Any) -> int:
        return self[name].remove(keys)

    def versions(self, name: str) -> list[Any]:
        return self[name].versions()

    def info(self, name: str) -> DatabaseInfo:
        return self[name].info()

    def close(self) -> None:
        self._transport.close()

    def __repr__(self) -> str:
        return f"<Client {self.url}>"
