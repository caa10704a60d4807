"""One database of a server, with the methods that it has in-process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack, overload
from urllib.parse import quote, urlencode

from qkv.arrays import is_array, to_numpy
from qkv.database import cells, spelled
from qkv.database.absent import AbsentKey
from qkv.database.columns import normal
from qkv.database.faults import warn_no_rows
from qkv.database.leaving import Leaving
from qkv.database.queries import Asking, How, known
from qkv.database.query_input import as_cells
from qkv.database.schema import pairs_of, several
from qkv.errors import ArgumentError, DtypeError
from qkv.serve import wire
from qkv.serve.transport import Transport
from qkv.types import NOTHING, Closing, Shaped

if TYPE_CHECKING:
    import numpy as np

    from qkv.answer import Answer
    from qkv.database.reading import Info

FIRST, PAGE = 16, 1000
"""Rows that are fetched together: at first, and at most."""


class Remote(Closing, Leaving):
    """The database `name` of a server; `at(version)` is what it was."""

    def __init__(self, transport: Transport, name: str, version: int | None = None):
        self._transport, self.name, self._pin = transport, name, version
        self._base = f"/v1/databases/{quote(name, safe='')}"
        self._named: tuple[list[str], list[str]] | None = None

    if not TYPE_CHECKING:  # where a type checker says so itself

        def __getattr__(self, name: str) -> Any:
            from qkv.database import Database

            told = f"a database of a server has no {name!r}"
            if not name.startswith("_") and hasattr(Database, name):
                told += f": it works where the store lies, qkv.open(path).{name}"
            raise AttributeError(told)

    def _at(self, **more: Any) -> str:
        """The query string: the version that is pinned, and what else is given."""
        given = {**more, "at": self._pin}
        told = {name: value for name, value in given.items() if value is not None}
        return f"?{urlencode(told)}" if told else ""

    # Asking

    @overload
    def ask(self, query: Shaped, **options: Unpack[Asking]) -> Any: ...
    @overload
    def ask(self, query: list[Any], **options: Unpack[Asking]) -> list[Answer]: ...
    @overload
    def ask(self, query: Any, **options: Unpack[Asking]) -> Answer: ...
    def ask(self, query: Any, **options: Any) -> Any:
        """Σᵢ α(q, kᵢ) vᵢ as an `Answer`; a list of queries gives a list.

        Its weights, its spread and `above` are asked for when they are looked at.
        """
        known("ask()", options, Asking.__optional_keys__)
        body = self._body(query, options)
        found = self._transport.read("POST", f"{self._base}/ask", body)
        if isinstance(found, dict):
            return self._answer(found, body)
        each = zip(found, body["query"], strict=True)
        return [self._answer(told, {**body, "query": one}) for told, one in each]

    def _answer(self, told: Mapping[str, Any], body: Mapping[str, Any]) -> Answer:
        # Of the version that answered, whatever was written since.
        return wire.answered(told, partial(self._again, {**body, "at": told["version"]}))

    def _again(self, body: Mapping[str, Any], **more: Any) -> Any:
        return self._transport.read("POST", f"{self._base}/ask", {**body, **more})

    def attend(self, query: Any, **options: Unpack[How]) -> np.ndarray:
        """Σᵢ α(q, kᵢ) vᵢ: (n, d) → (n, d_v), (d) → (d_v)."""
        known("attend()", options, How.__optional_keys__)
        body = self._body(query, dict(options))
        found = self._transport.read("POST", f"{self._base}/attend", body)
        warn_no_rows(found.get("hint", ""))
        value: np.ndarray = found["value"]
        return value

    def _body(self, query: Any, options: dict[str, Any]) -> dict[str, Any]:
        if callable(options.get("where")):
            raise ArgumentError("where: a function cannot be sent: write the condition as text")
        query = as_cells(query)
        if is_array(query):
            query = to_numpy(query) if query.shape else to_numpy(query).item()
        return {"query": query, **spelled.plain({"at": self._pin, **options})}

    # Looking up

    def __getitem__(self, key: Any) -> Any:
        """The value of the newest row with exactly this key."""
        return self._found(key)["value"]

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except AbsentKey:
            return default

    def all(self, key: Any) -> list[Any]:
        """The value of every row with this key, oldest first; an empty list where there is none."""
        try:
            return list(self._found(key, all="true")["values"])
        except AbsentKey:
            return []

    def __contains__(self, key: Any) -> bool:
        return self.get(key, NOTHING) is not NOTHING

    def _found(self, key: Any, **more: Any) -> Any:
        """What the server has of a key."""
        return self._transport.read("GET", f"{self._row(key)}{self._at(**more)}")

    def _row(self, key: Any) -> str:
        """The path of a key, which says what it is: 3.5 is not '3.5'."""
        try:
            return f"{self._base}/rows/{quote(wire.dumps(as_cells(key)), safe='')}"
        except (ArgumentError, DtypeError, RecursionError):  # what cannot be kept is nobody's key
            raise AbsentKey(key, list) from None

    def rows(
        self, *, where: Any = None, start: int = 0, count: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Rows with all their columns, oldest first; of those that pass `where`, `count` from the
        one numbered `start`."""
        size, then = FIRST, self
        while count is None or count > 0:
            some = size if count is None else min(count, size)
            if some == size and then._pin is None:  # there may be more pages, of one version
                then = self.at(self.version)
            found = then._page(where, start, some)["rows"]
            yield from found
            if len(found) < some:
                return
            start, size = start + some, min(4 * size, PAGE)
            count = None if count is None else count - some

    def count(self, where: Any = None) -> int:
        """How many rows pass a condition."""
        return int(self._page(where, 0, 0)["total"])

    def why_no_rows(self, where: Any) -> str:
        """That no row passes a condition, with values of its columns; empty where some do."""
        return str(self._page(where, 0, 0).get("hint", ""))

    def _page(self, where: Any, start: int, count: int) -> Any:
        query = self._at(where=_condition(where), count=count, **{"from": start})
        return self._transport.read("GET", f"{self._base}/rows{query}")

    def __len__(self) -> int:
        return self.info()["rows"]

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self.items())

    keys = __iter__

    def values(self) -> Iterator[Any]:
        return (value for _, value in self.items())

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Every (key, value), oldest first."""
        keys, values = self._columns()
        for row in self.rows():
            key = row[keys[0]] if len(keys) == 1 else tuple(row[name] for name in keys)
            told = row[values[0]] if len(values) == 1 else {name: row[name] for name in values}
            yield key, told

    # Changing

    def add(self, keys: Any, values: Any = NOTHING) -> None:
        """One row, or many: lists and arrays are many keys with as many values."""
        pairs = pairs_of(keys, values, values is not NOTHING and self._several(keys))
        self.extend([self._cells(key, value) for key, value in pairs])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows with named columns, all or none."""
        self._write({"rows": list(rows)})

    def update(self, key: Any, value: Any) -> int:
        """Give a key another value; 1 where no row had the key, and it was inserted."""
        return int(self._write({"rows": [self._cells(key, value)], "update": True})["inserted"])

    def remove(self, keys: Any) -> int:
        """Take out every row of these keys (one, or a list), one after the other; how many rows
        went. Where one is absent, none is taken out."""
        keys = list(keys) if self._several(keys) else [keys]
        for key in keys:
            self[key]
        rows = {_mark(key): self._row(key) for key in keys}  # 1 and 1.0 are one key
        told = (self._transport.write("DELETE", row) for row in rows.values())
        return sum(int(one["removed"]) for one in told)

    def _several(self, keys: Any) -> bool:
        return several(keys, self.info()["key_kind"] if is_array(keys) else None)

    def _write(self, body: dict[str, Any]) -> Any:
        if self._pin is not None:
            raise ArgumentError(f"version {self._pin} is past and cannot change")
        return self._transport.write("POST", f"{self._base}/rows", body)

    def _cells(self, key: Any, value: Any) -> dict[str, Any]:
        """A row of these columns."""
        keys, values = self._columns()
        parts = key if len(keys) > 1 else (key,)
        if not isinstance(parts, tuple) or len(parts) != len(keys):
            raise ArgumentError(f"a key is {', '.join(keys)}: a tuple of {len(keys)}, not {key!r}")
        told = {values[0]: value} if len(values) == 1 else value
        if not isinstance(told, Mapping):
            raise DtypeError(f"a value is a mapping of {', '.join(values)}, not {value!r}")
        return {**dict.fromkeys(values), **dict(zip(keys, parts, strict=True)), **told}

    # What it is

    @property
    def path(self) -> str:
        return f"{self._transport.url}/{self.name}"

    @property
    def version(self) -> int:
        return self.info()["version"] if self._pin is None else self._pin

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.info()["columns"])

    def _columns(self) -> tuple[list[str], list[str]]:
        """The names of the key's columns and of the value's, which the first rows fix."""
        if self._named is None:
            about = self.info()
            found = about["key"] or ["key"], about["value"] or ["value"]
            if not about["key"]:
                return found
            self._named = found
        return self._named

    def info(self) -> Info:
        """What it is: rows, columns, types, encoder, versions, size."""
        told = self._told()
        about = {name: told[name] for name in told if name not in _SERVED}
        return {"path": self.path, **about}  # type: ignore[typeddict-item]

    def describe(self) -> dict[str, dict[str, Any]]:
        """The type of each column, and how many of its cells are missing."""
        told = self._told()
        return {
            name: {"type": kind, "missing": told["missing"][name]}
            for name, kind in told["types"].items()
        }

    def _told(self) -> Any:
        return self._transport.read("GET", f"{self._base}/info{self._at()}")

    def versions(self) -> list[Any]:
        """Every version that is kept, oldest first."""
        from qkv.database.store.store import Version

        found = self._transport.read("GET", f"{self._base}/versions")
        return [Version(**told) for told in found["versions"]]

    def at(self, version: int) -> Self:
        """The database as it was at a version, to be read."""
        return type(self)(self._transport, self.name, version)

    def close(self) -> None:
        self._transport.close()

    def __repr__(self) -> str:
        past = "" if self._pin is None else f", version {self._pin}"
        return f"<Database {self.path}{past}>"


_SERVED = ("name", "types", "missing", "uploaded")
"""What a server tells beside `Database.info`."""


def _condition(where: Any) -> str | None:
    """A condition as text; of a mapping, that each column equals its cell, or one of a list."""
    if where is None or isinstance(where, str):
        return where
    if not isinstance(where, Mapping):
        raise ArgumentError("where: a function cannot be sent: write the condition as text")
    parts = []
    for name, wish in where.items():
        many = isinstance(wish, list | set | frozenset)
        told = [repr(normal(cell)) for cell in (wish if many else [wish])]
        parts.append(f"`{str(name).replace('`', '``')}` in [{', '.join(told)}]")
    return " and ".join(parts) or None


def _mark(key: Any) -> bytes:
    """What a key is found by."""
    vector = is_array(key) and len(key.shape) == 1
    return (cells.vector_digest if vector else cells.digest)(key)
