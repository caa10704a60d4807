"""A server's databases from elsewhere: `Client(url).ask("books", "the alchmist")`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Unpack, overload

from qkv.serve.remote import Remote
from qkv.serve.transport import Transport
from qkv.types import NOTHING, Closing, Shaped

if TYPE_CHECKING:
    import numpy as np

    from qkv.answer import Answer
    from qkv.database.queries import Asking, How
    from qkv.database.reading import Info


class Client(Closing):
    """The databases that `qkv serve` serves at `url`; threads may share it.

    `client["books"]` is one of them, with the methods that it has in-process; `client.ask("books",
    query)` is short for `client["books"].ask(query)`, and so for the others. `timeout` is in
    seconds.

        client = qkv.Client("http://127.0.0.1:8000")
        client.ask("books", "the alchmist").value
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 60.0):
        self._transport = Transport(url, token, timeout)
        self._remotes: dict[str, Remote] = {}

    @property
    def url(self) -> str:
        return self._transport.url

    def databases(self) -> list[str]:
        """The names of those that are served."""
        found = self._transport.read("GET", "/v1/databases")
        return [str(about["name"]) for about in found["databases"]]

    def __getitem__(self, name: str) -> Remote:
        return self._remotes.setdefault(name, Remote(self._transport, name))

    # Each is a method of `Remote`, and of `Database`, which say more.

    @overload
    def ask(self, name: str, query: Shaped, **options: Unpack[Asking]) -> Any: ...
    @overload
    def ask(self, name: str, query: list[Any], **options: Unpack[Asking]) -> list[Answer]: ...
    @overload
    def ask(self, name: str, query: Any, **options: Unpack[Asking]) -> Answer: ...
    def ask(self, name: str, query: Any, **options: Any) -> Any:
        return self[name].ask(query, **options)

    def attend(self, name: str, query: Any, **options: Unpack[How]) -> np.ndarray:
        return self[name].attend(query, **options)

    def rows(
        self, name: str, *, where: Any = None, start: int = 0, count: int | None = None
    ) -> Iterator[dict[str, Any]]:
        return self[name].rows(where=where, start=start, count=count)

    def get(self, name: str, key: Any, default: Any = None) -> Any:
        return self[name].get(key, default)

    def add(self, name: str, keys: Any, values: Any = NOTHING) -> None:
        self[name].add(keys, values)

    def extend(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        self[name].extend(rows)

    def remove(self, name: str, keys: Any) -> int:
        return self[name].remove(keys)

    def versions(self, name: str) -> list[Any]:
        return self[name].versions()

    def info(self, name: str) -> Info:
        return self[name].info()

    def close(self) -> None:
        self._transport.close()

    def __repr__(self) -> str:
        return f"<Client {self.url}>"
