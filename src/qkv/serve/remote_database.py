"""A database on a server, with the methods of a local database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, Unpack, overload
from urllib.parse import quote, urlencode

from qkv.database import parsing
from qkv.database.errors import KeyNotFoundError, warn_no_rows
from qkv.database.query.arguments import AskOptions, DatabaseAttendOptions, check_database_keywords
from qkv.database.query.inputs import as_cells, find_named_cells, has_named_cells
from qkv.database.table import cells
from qkv.database.table.columns import normalize_cell
from qkv.database.table.schema import as_pairs, has_several_keys
from qkv.errors import ArgumentError, DtypeError
from qkv.frameworks import is_array, to_numpy
from qkv.serve import encoding
from qkv.serve.transport import Transport
from qkv.util.display import Displayable
from qkv.util.types import UNSET, Closable, Shaped

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from qkv.answer import Answer
    from qkv.database import Database
    from qkv.database.interface import DatabaseInfo

FIRST_PAGE_ROWS, MAX_PAGE_ROWS = 16, 1000
"""The number of rows that the first request of `rows` reads, and the maximum for later requests."""


class RemoteDatabase(Closable, Displayable):
    """The database `name` on a server. `at(version)` reads an earlier version."""

    def __init__(self, transport: Transport, name: str, version: int | None = None):
        self._transport, self.name, self._pinned_version = transport, name, version
        self._base = f"/v1/databases/{quote(name, safe='')}"
        self._known_columns: tuple[list[str], list[str]] | None = None

    if not TYPE_CHECKING:  # type checkers report unknown attributes without this method

        def __getattr__(self, name: str) -> Any:
            from qkv.database import Database

            message = f"a database on a server has no attribute {name!r}"
            if not name.startswith("_") and hasattr(Database, name):
                message += f": use qkv.open(path).{name} on the server's machine"
            raise AttributeError(message)

    def _query_string(self, **params: Any) -> str:
        """Return the URL's query string with these parameters and the pinned version."""
        params |= {"at": self._pinned_version}
        present = {name: value for name, value in params.items() if value is not None}
        return f"?{urlencode(present)}" if present else ""

    # Asking

    @overload
    def ask(self, query: Shaped, **options: Unpack[AskOptions]) -> Any: ...
    @overload
    def ask(self, query: list[Any], **options: Unpack[AskOptions]) -> list[Answer]: ...
    @overload
    def ask(self, query: Any, **options: Unpack[AskOptions]) -> Answer: ...
    def ask(self, query: Any, **options: Any) -> Any:
        """Return Σᵢ α(q, kᵢ) vᵢ as an `Answer`; for a list of queries, return a list of answers.

        The options are those of `Database.ask`. The weights of all rows, `spread` and `above` are
        requested from the server when they are read.
        """
        check_database_keywords("ask()", options, AskOptions.__optional_keys__)
        body = self._build_body(query, options)
        response = self._transport.send_read("POST", f"{self._base}/ask", body)
        if isinstance(response, dict):
            return self._build_answer(response, body)
        pairs = zip(response, body["query"], strict=True)
        return [self._build_answer(fields, {**body, "query": cell}) for fields, cell in pairs]

    def _build_answer(self, fields: Mapping[str, Any], body: Mapping[str, Any]) -> Answer:
        # Later requests of this answer read the same version.
        return encoding.answer_from_dict(
            fields, partial(self._ask_again, {**body, "at": fields["version"]})
        )

    def _ask_again(self, body: Mapping[str, Any], **more: Any) -> Any:
        """Send a query again with more options; return the fields of the answer."""
        return self._transport.send_read("POST", f"{self._base}/ask", {**body, **more})

    def attend(self, query: Any, **options: Unpack[DatabaseAttendOptions]) -> np.ndarray:
        """Return Σᵢ α(q, kᵢ) vᵢ as an array: (n, d) → (n, d_v), and (d,) → (d_v,)."""
        check_database_keywords("attend()", options, DatabaseAttendOptions.__optional_keys__)
        body = self._build_body(query, dict(options))
        response = self._transport.send_read("POST", f"{self._base}/attend", body)
        warn_no_rows(response.get("hint", ""))
        value: np.ndarray = response["value"]
        return value

    def _build_body(self, query: Any, options: dict[str, Any]) -> dict[str, Any]:
        if callable(options.get("where")):
            raise ArgumentError(
                "where: a function cannot be sent to a server: write the condition as text"
            )
        if has_named_cells(query):
            info = self.info()
            query = find_named_cells(query, info["key"], info["key_kind"])
        query = as_cells(query)
        if is_array(query):
            query = to_numpy(query) if query.shape else to_numpy(query).item()
        return {"query": query, **parsing.format_options({"at": self._pinned_version, **options})}

    # Looking up

    def __getitem__(self, key: Any) -> Any:
        """Return the value of the newest row with exactly this key."""
        return self._look_up(key)["value"]

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of the newest row with this key, or the default if no row has it."""
        try:
            return self[key]
        except KeyNotFoundError:
            return default

    def get_all(self, key: Any) -> list[Any]:
        """Return the values of all rows with this key, oldest first; [] if there is none."""
        try:
            return list(self._look_up(key, all="true")["values"])
        except KeyNotFoundError:
            return []

    def __contains__(self, key: Any) -> bool:
        return self.get(key, UNSET) is not UNSET

    def _look_up(self, key: Any, **more: Any) -> Any:
        """Return the server's response to a lookup of a key."""
        return self._transport.send_read(
            "GET", f"{self._row_path(key)}{self._query_string(**more)}"
        )

    def _row_path(self, key: Any) -> str:
        """Return the URL path of a key. The path keeps the key's type: 3.5 differs from '3.5'."""
        try:
            return f"{self._base}/rows/{quote(encoding.dumps(as_cells(key)), safe='')}"
        except (ArgumentError, DtypeError, RecursionError):  # such a key cannot be stored
            raise KeyNotFoundError(key, list) from None

    def rows(
        self, *, where: Any = None, start: int = 0, count: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows that pass `where`, with all their columns, oldest first.

        `start` rows are skipped, and at most `count` are returned.
        """
        size, database = FIRST_PAGE_ROWS, self
        while count is None or count > 0:
            page_rows = size if count is None else min(count, size)
            if page_rows == size and database._pinned_version is None:
                database = self.at(self.version)  # read all pages from one version
            page = database._fetch_page(where, start, page_rows)["rows"]
            yield from page
            if len(page) < page_rows:
                return
            start, size = start + page_rows, min(4 * size, MAX_PAGE_ROWS)
            count = None if count is None else count - page_rows

    def count(self, where: Any = None) -> int:
        """Return the number of rows that pass the condition `where`."""
        return int(self._fetch_page(where, 0, 0)["total"])

    def why_no_rows(self, where: Any) -> str:
        """Return a sentence with values of the condition's columns, or "" if some row passes."""
        return str(self._fetch_page(where, 0, 0).get("hint", ""))

    def _fetch_page(self, where: Any, start: int, count: int) -> Any:
        """Return the server's response to a request for `count` rows from `start` on."""
        query = self._query_string(where=_format_condition(where), count=count, **{"from": start})
        return self._transport.send_read("GET", f"{self._base}/rows{query}")

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
        """Yield every (key, value), oldest first."""
        keys, values = self._column_names()
        for row in self.rows():
            key = row[keys[0]] if len(keys) == 1 else tuple(row[name] for name in keys)
            value = row[values[0]] if len(values) == 1 else {name: row[name] for name in values}
            yield key, value

    # Changing

    def add(self, keys: Any, values: Any = UNSET) -> None:
        """Add one row, or several rows if `keys` is a list or an array, like `Database.add`."""
        pairs = as_pairs(keys, values, values is not UNSET and self._is_many(keys))
        self.extend([self._build_row(key, value) for key, value in pairs])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add all rows, given as mappings of columns; add none if one is invalid."""
        self._write_rows({"rows": list(rows)})

    def update(self, key: Any, value: Any) -> int:
        """Set the value of a key. Return 1 if the key is new and was inserted, else 0."""
        return int(
            self._write_rows({"rows": [self._build_row(key, value)], "update": True})["inserted"]
        )

    def remove(self, keys: Any) -> int:
        """Delete every row with this key, or with one of a list of keys; return their number.

        If a key does not exist, nothing is deleted and `KeyNotFoundError` is raised.
        """
        keys = list(keys) if self._is_many(keys) else [keys]
        for key in keys:
            self[key]
        rows = {
            _key_digest(key): self._row_path(key) for key in keys
        }  # 1 and 1.0 are the same key: delete it once
        responses = (self._transport.send_write("DELETE", row) for row in rows.values())
        return sum(int(response["removed"]) for response in responses)

    def _is_many(self, keys: Any) -> bool:
        return has_several_keys(keys, self.info()["key_kind"] if is_array(keys) else None)

    def _write_rows(self, body: dict[str, Any]) -> Any:
        if self._pinned_version is not None:
            raise ArgumentError(
                f"version {self._pinned_version} is read-only, because at() selected it: write to "
                "the database itself"
            )
        return self._transport.send_write("POST", f"{self._base}/rows", body)

    def _build_row(self, key: Any, value: Any) -> dict[str, Any]:
        """Return a key and its value as a mapping of columns."""
        keys, values = self._column_names()
        parts = key if len(keys) > 1 else (key,)
        if not isinstance(parts, tuple) or len(parts) != len(keys):
            raise ArgumentError(
                f"the key must be a tuple of the columns {', '.join(keys)}, not {key!r}"
            )
        columns = {values[0]: value} if len(values) == 1 else value
        if not isinstance(columns, Mapping):
            raise DtypeError(
                f"the value must be a mapping of the columns {', '.join(values)}, not {value!r}"
            )
        return {**dict.fromkeys(values), **dict(zip(keys, parts, strict=True)), **columns}

    # Export

    def reindex(
        self, key: str | Sequence[str], value: str | Sequence[str] | None = None, **options: Any
    ) -> Database:
        """Copy the rows into a local `Database` with other columns as key and value."""
        from qkv.database.database import copy_rows

        return copy_rows(self, key, value, **options)

    by = reindex

    def swap(self, **options: Any) -> Database:
        """Copy the rows into a local `Database` with key and value exchanged."""
        from qkv.database.database import swapped_columns

        return self.reindex(*swapped_columns(self), **options)

    def to_frame(self, where: Any = None) -> Any:
        """Return the rows that pass `where` as a data frame of polars, pandas or pyarrow."""
        from qkv.database.export import files

        return files.to_frame(self.columns, self.rows(where=where))

    def to_csv(self, path: str | PathLike[str], where: Any = None) -> int:
        """Write the rows as CSV, or as TSV if the name ends in .tsv; return the number of rows."""
        from qkv.database.export import files

        return files.write_file(path, self.columns, self.rows(where=where), ".csv", ".tsv")

    def to_parquet(self, path: str | PathLike[str], where: Any = None) -> int:
        """Write the rows as Parquet, with their types; return the number of rows."""
        from qkv.database.export import files

        return files.write_file(path, self.columns, self.rows(where=where), ".parquet")

    def plot(
        self, query: Any, path: str | PathLike[str] | None = None, **options: Unpack[AskOptions]
    ) -> Figure:
        """Draw the weights of all keys as a heatmap with one row per query; save it to `path`."""
        from qkv.database.export.heatmap import plot_weights

        answers: Any = self.ask(query, **options)
        return plot_weights(answers if isinstance(answers, list) else [answers], self, path)

    def _repr_html_(self) -> str:
        from qkv.database.export.html import render_html

        return render_html(self)

    # Metadata

    @property
    def path(self) -> str:
        return f"{self._transport.url}/{self.name}"

    @property
    def version(self) -> int:
        return self.info()["version"] if self._pinned_version is None else self._pinned_version

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.info()["columns"])

    def _column_names(self) -> tuple[list[str], list[str]]:
        """Return the names of the key's columns and of the value's columns.

        The first rows of a database fix these names, so they are cached from then on.
        """
        if self._known_columns is None:
            info = self.info()
            columns = info["key"] or ["key"], info["value"] or ["value"]
            if not info["key"]:
                return columns
            self._known_columns = columns
        return self._known_columns

    def info(self) -> DatabaseInfo:
        """Return the number of rows, the columns, types, encoder, version and size."""
        response = self._fetch_info()
        fields = {name: response[name] for name in response if name not in _SERVER_ONLY_FIELDS}
        return {"path": self.path, **fields}  # type: ignore[typeddict-item]

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the type of each column and the number of its missing cells."""
        response = self._fetch_info()
        return {
            name: {
                "type": kind,
                "missing": response["missing"][name],
                **response.get("scores", {}).get(name, {}),
            }
            for name, kind in response["types"].items()
        }

    def _fetch_info(self) -> Any:
        return self._transport.send_read("GET", f"{self._base}/info{self._query_string()}")

    def versions(self) -> list[Any]:
        """Return every version that the server has, oldest first."""
        from qkv.database.storage.store import Version

        response = self._transport.send_read("GET", f"{self._base}/versions")
        return [Version(**fields) for fields in response["versions"]]

    def at(self, version: int) -> Self:
        """Return the database as of an earlier version, read-only."""
        return type(self)(self._transport, self.name, version)

    def close(self) -> None:
        self._transport.close()

    def __repr__(self) -> str:
        past = "" if self._pinned_version is None else f", version {self._pinned_version}"
        return f"<Database {self.path}{past}>"


_SERVER_ONLY_FIELDS = ("name", "types", "missing", "scores", "uploaded")
"""Fields of the server's response that `Database.info` does not have."""


def _format_condition(where: Any) -> str | None:
    """Return a condition as text for the server.

    A mapping gives for each column the cell that it must equal, or a list of such cells.
    """
    if where is None or isinstance(where, str):
        return where
    if not isinstance(where, Mapping):
        raise ArgumentError(
            "where: a function cannot be sent to a server: write the condition as text"
        )
    parts = []
    for name, expected in where.items():
        many = isinstance(expected, list | set | frozenset)
        literals = [repr(normalize_cell(cell)) for cell in (expected if many else [expected])]
        parts.append(f"`{str(name).replace('`', '``')}` in [{', '.join(literals)}]")
    return " and ".join(parts) or None


def _key_digest(key: Any) -> bytes:
    """Return the digest with which a store looks up a key."""
    vector = is_array(key) and len(key.shape) == 1
    return (cells.vector_digest if vector else cells.key_digest)(key)
