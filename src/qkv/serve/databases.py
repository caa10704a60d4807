"""The databases that are served, by name."""

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
from qkv.serve.metrics import Metrics
from qkv.serve.route import RequestError
from qkv.util.deadline import DeadlineError, current_deadline, limit_time

if TYPE_CHECKING:
    from qkv.answer import Answer
    from qkv.database.interface import DatabaseInfo

NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"
"""What a database may be called: nothing that could be a path."""

WORKER_THREADS = 8
"""Of what is not asked of one database."""


class DatabaseProfile(NamedTuple):
    """What keys and cells are like at a version."""

    version: int
    info: DatabaseInfo
    first_key: Any
    first_row: dict[str, Any]

    @property
    def key_kind(self) -> str | None:
        """The kind of the keys."""
        return self.info["key_kind"]


class ServedDatabase:
    """One database, the batches that it is asked by, and the thread that writes to it."""

    def __init__(self, name: str, database: Database, metrics: Metrics, uploaded: bool = False):
        self.name, self.database, self.uploaded = name, database, uploaded
        self.batcher = QueryBatcher(self._answer_batch, metrics.batch_observer(name))
        self.write_executor = ThreadPoolExecutor(1, "qkv-write")
        self._profile: DatabaseProfile | None = None
        self._opened_stat = _stat_or_none(database.path) if self.is_durable else None
        self.get_profile()

    @property
    def is_durable(self) -> bool:
        return self.database.path is not None and not self.uploaded

    def is_same_folder(self) -> bool:
        """Whether its folder is the one that was opened: a file that was removed is read on."""
        if self._opened_stat is None:
            return True
        now = _stat_or_none(self.database.path)
        return now is not None and os.path.samestat(now, self._opened_stat)

    def at_version(self, version: int | None) -> Database:
        return self.database if version is None else self.database.at(version)

    def get_profile(self) -> DatabaseProfile:
        """What keys and cells look like, found once for each version."""
        held, version = self._profile, self.database.version
        if held is None or held.version != version:
            key, row = next(iter(self.database), None), next(self.database.rows(), {})
            held = self._profile = DatabaseProfile(version, self.database.info(), key, row)
        return held

    def example_cells(self, names: Collection[str]) -> dict[str, Any]:
        """A cell of those of these columns where text is read as another kind, which all cells
        have: where a few are text, it stays text."""
        row = self.get_profile().first_row
        found = {x: row[x] for x in names if not isinstance(row.get(x), str | None)}
        types = self.database.describe() if found else {}
        return {x: cell for x, cell in found.items() if ", " not in types[x]["type"]}

    def parse_key(self, text: str, what: str = "the query") -> Any:
        """Text of a path as the kind of key that the database has."""
        return parsing.parse_cell_like(text, self.get_profile().first_key, what)

    def parse_queries(self, given: Any) -> tuple[Any, bool]:
        """What was asked as a list or an array of queries, and whether it is a single one.

        A list is many, as for `Database.ask`; but a list of numbers is one where keys are vectors
        or JSON, and a list of single cells is one where keys have several columns. An array of
        numbers is read as `query_input` says.
        """
        about = self.get_profile()
        given = as_cells(given, about.key_kind)
        if isinstance(given, np.ndarray) and given.dtype.kind not in "biuf":
            raise DtypeError(f"query must hold real numbers, not {given.dtype}")
        shaped = isinstance(given, np.ndarray)
        if shaped and about.key_kind == "number":
            given = given.tolist()
        elif shaped and is_number_key(about.first_key):
            rows, single = as_tuples(given, "a tuple of numbers")
            return Batch(rows), single
        elif shaped and about.key_kind == "date":
            raise DtypeError("query must be a date or its ISO text, as the keys are")
        elif shaped or about.key_kind == "vector":
            try:
                array = as_floats(given)
            except DtypeError:
                raise
            except (TypeError, ValueError, OverflowError):
                raise DtypeError(
                    "query must be a vector of numbers, as the keys are, or a list of such"
                ) from None
            if array.ndim not in (1, 2):
                raise DtypeError(f"query must be a vector or a list of such, not {array.ndim} deep")
            return (array[None], True) if array.ndim == 1 else (array, False)
        many = isinstance(given, list) and not (
            about.key_kind == "json" and cells.is_number_list(given)
        )
        if about.key_kind == "tuple":
            many = many and not is_flat(given)
        each = Batch(check_text_length(one, "query") for one in (given if many else [given]))
        if about.key_kind in PARSER_BY_KIND:
            return each, not many
        read = (
            parsing.cell_from_json(one, about.first_key, f"query {i}") for i, one in enumerate(each)
        )
        return Batch(read), not many

    def count_queries(self, given: Any) -> int:
        """How many queries these are, by what is known of the keys without a look."""
        if isinstance(given, np.ndarray) and given.ndim == 2:
            return len(given)
        if not isinstance(given, list):
            return 1
        one = self._profile is not None and self._profile.key_kind in ("vector", "tuple")
        many = not one or not is_flat(given)
        return len(given) if many else 1

    def _answer_batch(self, how: str, asked: list[Any]) -> list[Any]:
        """For each ask its answers and whether it is a single one, or the error that is its own."""
        try:
            told = encoding.loads(how)
            database, built = self.at_version(told.pop("at", None)), build_options(told)
            each = [self.parse_queries(given) for given in asked]
            many: Any = Batch(query for queries, _ in each for query in queries)
            if isinstance(each[0][0], np.ndarray):
                many = np.stack(many) if many else many
            answers: list[Answer] = database.ask(many, **built) if len(many) else []
        except Exception as error:
            if len(asked) == 1 or isinstance(error, DeadlineError):
                return [error] * len(asked)
            return [self._answer_batch(how, [one])[0] for one in asked]
        found, start = [], 0
        for queries, single in each:
            found.append((answers[start : start + len(queries)], single))
            start += len(queries)
        return found

    def close(self) -> None:
        self.batcher.close()
        self.write_executor.shutdown(wait=True)
        self.database.close()


def _stat_or_none(path: Path | None) -> os.stat_result | None:
    try:
        return None if path is None else os.stat(path)
    except OSError:
        return None


def _limited(deadline: float | None, call: Callable[..., Any], given: Sequence[Any]) -> Any:
    with limit_time(deadline):
        return call(*given)


def count_characters(given: Any) -> int:
    """Characters of all texts in a query, or in a list of them; refused where one request may not
    have so many.

    >>> count_characters(["Li", ["Mu", 1], {"name": "Bo"}])
    6
    """
    found, rest = 0, [given]
    while rest:
        x = rest.pop()
        if isinstance(x, str | bytes):
            check_text_length(x, "query")
            found += len(x)
        elif isinstance(x, list | tuple):
            rest += x
        elif isinstance(x, dict):
            rest += x.values()
    if found > limits.TEXTS:
        raise RequestError(
            413,
            f"query: at most {limits.TEXTS:,} characters in one request, not {found:,}: ask fewer "
            "queries at a time",
        )
    return found


def check_query_count(queries: int) -> int:
    """So many queries, where one request may ask them."""
    if queries > limits.MAX_QUERIES:
        raise RequestError(413, f"query: at most {limits.MAX_QUERIES:,} at a time, not {queries:,}")
    return queries


def check_text_length(query: Any, what: str) -> Any:
    """A text, or anything else, where it is as long as one may be."""
    if isinstance(query, str | bytes) and len(query) > limits.MAX_TEXT_CHARACTERS:
        raise RequestError(
            413,
            f"{what}: at most {limits.MAX_TEXT_CHARACTERS:,} characters, not {len(query):,}: "
            "shorten it, or use "
            "qkv.open(PATH) in Python, which has no such limit",
        )
    return query


def build_options(how: dict[str, Any]) -> dict[str, Any]:
    """The options of `ask`, `attend` and `weights` with score and weighting built."""
    found = parsing.parse_options(how)
    if "weighting" in found and (found["weighting"].max_support or 0) > limits.MAX_ROWS:
        # So many are held for each query.
        raise RequestError(413, f"weighting: at most the best {limits.MAX_ROWS:,} rows")
    return found


class DatabaseRegistry(MutableMapping[str, "Database"]):
    """All databases by name, and the threads that work on them. What a page puts there is an
    upload, and only those go.

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
        """Bytes of the bodies that are being read or answered."""

    def add_database(
        self, name: str, database: Database, *, uploaded: bool = False
    ) -> ServedDatabase:
        """Serve a database under a name that no other has."""
        if not re.fullmatch(NAME_PATTERN, name):
            raise ArgumentError(
                f"the name {name!r} cannot be served: letters, digits, '_', '.' and '-' can, at "
                "most 64 of them"
            )
        if name in self.databases:
            raise ArgumentError(f"the name {name!r} is taken: choose another")
        if len(self.databases) >= limits.MAX_DATABASES:
            raise ArgumentError(f"at most {limits.MAX_DATABASES} databases are served at a time")
        kept = self.databases[name] = ServedDatabase(name, database, self.metrics, uploaded)
        return kept

    def __getitem__(self, name: str) -> Database:
        return self.databases[name].database

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.databases))

    def __len__(self) -> int:
        return len(self.databases)

    def __setitem__(self, name: str, database: Database) -> None:
        """Serve an upload, in place of one that had its name."""
        with self._lock:
            taken = self.databases.get(name)
            if taken is not None and not taken.uploaded:
                raise RequestError(409, f"the name {name!r} is taken: choose another")
            kept = [one for one in self.databases.values() if one.uploaded]
            if taken is None and len(kept) >= limits.MAX_UPLOADS:
                told = ", ".join(one.name for one in kept)
                raise RequestError(
                    409, f"{limits.MAX_UPLOADS} uploads are kept, the limit; remove one: {told}"
                )
            if taken is not None:
                del self[name]
            self.add_database(name, database, uploaded=True)

    def __delitem__(self, name: str) -> None:
        """Forget an upload; what was asked of it is answered first."""
        with self._lock:
            if not self.find_database(name).uploaded:
                raise RequestError(409, f"{name} was not uploaded, and stays")
            self._pool.submit(self.databases.pop(name).close)

    def find_database(self, name: str) -> ServedDatabase:
        kept = self.databases.get(name)
        if kept is None:
            known = ", ".join(self.databases) or "none"
            raise RequestError(404, f"no database is called {name[:64]!r} here; there are: {known}")
        if not kept.is_same_folder():
            told = f"{name} was removed or replaced since it was opened: start the server anew"
            raise RequestError(503, told)
        return kept

    async def run_in_thread(self, call: Callable[..., Any], *given: Any) -> Any:
        """The call's result, found in a thread, with the deadline of whoever waits for it."""
        return await asyncio.wrap_future(
            self._pool.submit(_limited, current_deadline(), call, given)
        )

    def close(self) -> None:
        """Finish what was taken, and close every database."""
        self._pool.shutdown(wait=True)
        for kept in self.databases.values():
            kept.close()


def open_sources(sources: Sequence[str | Path], shards: int | None = None) -> DatabaseRegistry:
    """A served of folders and tables, each under its name without the ending; folders, and stores
    at URLs, in so many shards of a cluster where a number is given."""
    served = DatabaseRegistry()
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
                served.add_database(path.name.removesuffix(path.suffix), database)
            except QkvError as error:
                database.close()
                raise ArgumentError(f"{source}: {error}") from None
    except BaseException:
        served.close()
        raise
    return served
