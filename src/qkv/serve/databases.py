"""The databases of a server, by name."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from qkv.database import Database, parsing
from qkv.database import open as open_database
from qkv.database.query.arguments import PARSER_BY_KIND
from qkv.database.query.inputs import Batch, as_cells, as_floats, as_tuples, is_flat, is_number_key
from qkv.database.table import cells
from qkv.errors import ArgumentError, DtypeError, QkvError
from qkv.serve import encoding, limits
from qkv.serve.batch import QueryBatcher
from qkv.serve.errors import RequestError
from qkv.serve.metrics import Metrics
from qkv.util.deadline import DeadlineError, current_deadline, limit_time
from qkv.weightings import Weighting

if TYPE_CHECKING:
    from qkv.answer import Answer
    from qkv.database.interface import DatabaseInfo

NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"
"""The pattern of valid database names. No path matches it."""

WORKER_THREADS = 8
"""The number of threads for work that is not a batch or a write of one database."""


class DatabaseProfile(NamedTuple):
    """What the server needs to parse queries and cells of one version of a database."""

    version: int
    info: DatabaseInfo
    first_key: Any
    first_row: dict[str, Any]

    @property
    def key_kind(self) -> str | None:
        """The type of the keys: "text", "number", "vector" and so on."""
        return self.info["key_kind"]


class ServedDatabase:
    """One database with the batcher of its queries and the thread that writes to it."""

    def __init__(self, name: str, database: Database, metrics: Metrics, uploaded: bool = False):
        self.name, self.database, self.uploaded = name, database, uploaded
        self.batcher = QueryBatcher(self._answer_batch, metrics.batch_observer(name))
        self.write_executor = ThreadPoolExecutor(1, "qkv-write")
        self._profile: DatabaseProfile | None = None
        self._opened_stat = _stat_or_none(database.path) if self.is_durable else None
        self.get_profile()

    @property
    def is_durable(self) -> bool:
        """Whether the database is in a folder on disk, and not an upload."""
        return self.database.path is not None and not self.uploaded

    def is_same_folder(self) -> bool:
        """Return whether the path still names the folder that was opened.

        The server can still read the open files of a folder that was removed, so reading does not
        show the removal.
        """
        if self._opened_stat is None:
            return True
        now = _stat_or_none(self.database.path)
        return now is not None and os.path.samestat(now, self._opened_stat)

    def at_version(self, version: int | None) -> Database:
        """Return the database at a version; None means the newest version."""
        return self.database if version is None else self.database.at(version)

    def get_profile(self) -> DatabaseProfile:
        """Return the profile of the newest version; it is cached."""
        profile, version = self._profile, self.database.version
        if profile is None or profile.version != version:
            key, row = next(iter(self.database), None), next(self.database.rows(), {})
            profile = self._profile = DatabaseProfile(version, self.database.info(), key, row)
        return profile

    def example_cells(self, names: Collection[str]) -> dict[str, Any]:
        """Return an example cell of each of these columns whose cells must be parsed from text.

        A column of text has no example, and neither has a column of mixed types: its text stays
        text.
        """
        row = self.get_profile().first_row
        examples = {x: row[x] for x in names if not isinstance(row.get(x), str | None)}
        types = self.database.describe() if examples else {}
        return {x: cell for x, cell in examples.items() if ", " not in types[x]["type"]}

    def parse_key(self, text: str, what: str = "the query") -> Any:
        """Parse the text of a path as a key of this database. `what` names it in messages."""
        return parsing.parse_cell_like(text, self.get_profile().first_key, what)

    def parse_queries(self, query: Any) -> tuple[Any, bool]:
        """Return the queries as a list or array, and whether the request had a single query.

        A list means several queries, as in `Database.ask`, with two exceptions. A list of numbers
        is one query if the keys are vectors or JSON. A list of single cells is one query if the
        keys have several columns.
        """
        profile = self.get_profile()
        query = as_cells(query, profile.key_kind)
        if isinstance(query, np.ndarray) and query.dtype.kind not in "biuf":
            raise DtypeError(f"query must hold real numbers, not {query.dtype}")
        shaped = isinstance(query, np.ndarray)
        if shaped and profile.key_kind == "number":
            query = query.tolist()
        elif shaped and is_number_key(profile.first_key):
            rows, single = as_tuples(query, "a tuple of numbers")
            return Batch(rows), single
        elif shaped and profile.key_kind == "date":
            raise DtypeError("query must be a date or ISO text, like the keys")
        elif shaped or profile.key_kind == "vector":
            try:
                array = as_floats(query)
            except DtypeError:
                raise
            except (TypeError, ValueError, OverflowError):
                raise DtypeError(
                    "query must be a vector of numbers, like the keys, or a list of vectors"
                ) from None
            if array.ndim not in (1, 2):
                raise DtypeError(
                    f"query must be a vector or a list of vectors, not {array.ndim} levels deep"
                )
            return (array[None], True) if array.ndim == 1 else (array, False)
        many = isinstance(query, list) and not (
            profile.key_kind == "json" and cells.is_number_list(query)
        )
        if profile.key_kind == "tuple":
            many = many and not is_flat(query)
        each = Batch(check_text_length(cell, "query") for cell in (query if many else [query]))
        if profile.key_kind in PARSER_BY_KIND:
            return each, not many
        read = (
            parsing.cell_from_json(cell, profile.first_key, f"query {i}")
            for i, cell in enumerate(each)
        )
        return Batch(read), not many

    def count_queries(self, query: Any) -> int:
        """Return the number of queries in a request, without reading the database."""
        if isinstance(query, np.ndarray) and query.ndim == 2:
            return len(query)
        if not isinstance(query, list):
            return 1
        list_is_query = self._profile is not None and self._profile.key_kind in ("vector", "tuple")
        many = not list_is_query or not is_flat(query)
        return len(query) if many else 1

    def _answer_batch(self, options_json: str, requests: list[Any]) -> list[Any]:
        """Return for each request (answers, whether it had a single query), or its exception."""
        try:
            options = encoding.loads(options_json)
            database, built = self.at_version(options.pop("at", None)), build_options(options)
            each = [self.parse_queries(query) for query in requests]
            many: Any = Batch(query for queries, _ in each for query in queries)
            if isinstance(each[0][0], np.ndarray):
                many = np.stack(many) if many else many
            answers: list[Answer] = database.ask(many, **built) if len(many) else []
        except Exception as error:
            if len(requests) == 1 or isinstance(error, DeadlineError):
                return [error] * len(requests)
            return [self._answer_batch(options_json, [request])[0] for request in requests]
        results, start = [], 0
        for queries, single in each:
            results.append((answers[start : start + len(queries)], single))
            start += len(queries)
        return results

    def close(self) -> None:
        self.batcher.close()
        self.write_executor.shutdown(wait=True)
        self.database.close()


def _stat_or_none(path: Path | None) -> os.stat_result | None:
    """Return the status of a file; None if there is no path or no file."""
    try:
        return None if path is None else os.stat(path)
    except OSError:
        return None


def _call_with_deadline(
    deadline: float | None, call: Callable[..., Any], args: Sequence[Any]
) -> Any:
    """Call a function that must stop at this deadline (`time.monotonic` seconds, None for none)."""
    with limit_time(deadline):
        return call(*args)


def count_characters(query: Any) -> int:
    """Return the number of characters of a query, or of all queries in a list.

    Raise `RequestError` if there are too many.

    >>> count_characters(["Li", ["Mu", 1], {"name": "Bo"}])
    6
    """
    count, stack = 0, [query]
    while stack:
        x = stack.pop()
        if isinstance(x, str | bytes):
            check_text_length(x, "query")
            count += len(x)
        elif isinstance(x, list | tuple):
            stack += x
        elif isinstance(x, dict):
            stack += x.values()
    if count > limits.MAX_BATCH_CHARACTERS:
        raise RequestError(
            413,
            f"query: at most {limits.MAX_BATCH_CHARACTERS:,} characters in one request, "
            f"not {count:,}: send fewer queries at a time",
        )
    return count


def check_query_count(queries: int) -> int:
    """Return the number of queries; raise `RequestError` if there are too many."""
    if queries > limits.MAX_QUERIES:
        raise RequestError(
            413,
            f"query: at most {limits.MAX_QUERIES:,} queries in one request, not {queries:,}: send "
            "several requests",
        )
    return queries


def check_text_length(query: Any, what: str) -> Any:
    """Return a query or key; raise `RequestError` if its text is too long. `what` names it."""
    if isinstance(query, str | bytes) and len(query) > limits.MAX_TEXT_CHARACTERS:
        raise RequestError(
            413,
            f"{what}: at most {limits.MAX_TEXT_CHARACTERS:,} characters, not {len(query):,}: "
            "shorten it, or use qkv.open(PATH) in Python, which has no such limit",
        )
    return query


def build_options(json_options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `ask`, `attend` or `weights`, with score and weighting as objects."""
    options = parsing.parse_options(json_options)
    if "weighting" in options:
        check_weighting(options["weighting"])
    return options


def check_weighting(weighting: Weighting) -> None:
    """Raise `RequestError` for a weighting that keeps too many rows per query.

    An example is topk with a very large k.
    """
    if (weighting.max_support or 0) > limits.MAX_ROWS:
        raise RequestError(
            413,
            f"weighting: it keeps {weighting.max_support:,} rows per query; the limit is "
            f"{limits.MAX_ROWS:,}",
        )


class DatabaseRegistry(MutableMapping[str, "Database"]):
    """The databases of a server by name, and the threads that work on them.

    `registry[name] = database` adds an upload. Only uploads can be deleted or replaced.

    >>> from qkv import Database
    >>> served = DatabaseRegistry()
    >>> served.add_database("names", Database({"Li": "Mu"})).database["Li"]
    'Mu'
    >>> served.close()
    """

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.databases: dict[str, ServedDatabase] = {}
        self._pool = ThreadPoolExecutor(WORKER_THREADS, "qkv-serve")
        self._lock = threading.RLock()
        self.held_body_bytes = 0
        """The size of all request bodies in memory."""

    def add_database(
        self, name: str, database: Database, *, uploaded: bool = False
    ) -> ServedDatabase:
        """Serve a database under a name that is not in use."""
        if not re.fullmatch(NAME_PATTERN, name):
            raise ArgumentError(
                f"{name!r} is not a valid name for a database: use at most 64 letters, digits, "
                "'_', '.' and '-'"
            )
        if name in self.databases:
            raise ArgumentError(f"the name {name!r} is taken: choose another")
        if len(self.databases) >= limits.MAX_DATABASES:
            raise ArgumentError(f"a server can have at most {limits.MAX_DATABASES} databases")
        served = self.databases[name] = ServedDatabase(name, database, self.metrics, uploaded)
        return served

    def __getitem__(self, name: str) -> Database:
        return self.databases[name].database

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.databases))

    def __len__(self) -> int:
        return len(self.databases)

    def __setitem__(self, name: str, database: Database) -> None:
        """Serve an upload. It replaces an earlier upload with the same name."""
        with self._lock:
            existing = self.databases.get(name)
            if existing is not None and not existing.uploaded:
                raise RequestError(409, f"the name {name!r} is taken: choose another")
            served = [each for each in self.databases.values() if each.uploaded]
            if existing is None and len(served) >= limits.MAX_UPLOADS:
                names = ", ".join(each.name for each in served)
                raise RequestError(
                    409,
                    f"the server already has {limits.MAX_UPLOADS} uploads, which is the limit: "
                    f"delete one of {names}",
                )
            if existing is not None:
                del self[name]
            self.add_database(name, database, uploaded=True)

    def __delitem__(self, name: str) -> None:
        """Delete an upload, after the server has answered the queries to it."""
        with self._lock:
            if not self.find_database(name).uploaded:
                raise RequestError(409, f"{name} cannot be deleted: it was not uploaded")
            self._pool.submit(self.databases.pop(name).close)

    def find_database(self, name: str) -> ServedDatabase:
        """Return the database with this name; raise `RequestError` if there is none.

        It also raises if the folder on disk was removed or replaced.
        """
        served = self.databases.get(name)
        if served is None:
            names = ", ".join(self.databases) or "none"
            raise RequestError(404, f"no database is named {name[:64]!r}; available: {names}")
        if not served.is_same_folder():
            raise RequestError(
                503, f"{name} was removed or replaced on disk: restart the server to open it again"
            )
        return served

    async def run_in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a thread with the current deadline; return its result."""
        return await asyncio.wrap_future(
            self._pool.submit(_call_with_deadline, current_deadline(), call, args)
        )

    def close(self) -> None:
        """Wait for the work in progress, then close every database."""
        self._pool.shutdown(wait=True)
        for served in self.databases.values():
            served.close()


def open_sources(sources: Sequence[str | Path], shards: int | None = None) -> DatabaseRegistry:
    """Open folders and tables. The name of each database is its file name without the suffix.

    With `shards`, a folder or a store at a URL is opened as a cluster of that many shards.
    """
    registry = DatabaseRegistry()
    try:
        for source in sources:
            path = Path(source)
            database: Database[Any, Any]
            if shards is not None and (path.is_dir() or path.suffix == ".qkv"):
                from qkv.cluster import Cluster

                database = cast(Database, Cluster(source, shards=shards))
            elif path.is_dir() or path.suffix == ".qkv":
                database = open_database(path, create=False)
            else:
                database = Database.from_source(source)
            try:
                registry.add_database(path.name.removesuffix(path.suffix), database)
            except QkvError as error:
                database.close()
                raise ArgumentError(f"{source}: {error}") from None
    except BaseException:
        registry.close()
        raise
    return registry
