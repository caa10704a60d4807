"""Reading a database: exactly by D[key], softly by `ask`, with gradients by `attend`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, Unpack, overload

import numpy as np

from qkv.database.errors import StoreClosedError, warn_no_rows
from qkv.database.key_errors import KeyNotFoundError
from qkv.database.query.arguments import (
    AskOptions,
    AttendOptions,
    check_database_keywords,
    check_tolerance,
    check_top,
    encode_numbers,
    parse_queries,
    score_beside,
)
from qkv.database.query.inputs import Batch, as_cells
from qkv.database.storage import Store, folder
from qkv.database.table import cells, columns, quantization
from qkv.database.table.schema import Schema, as_column_names
from qkv.database.table.view import ROWS_PER_CHUNK, TableView
from qkv.errors import (
    ArgumentError,
    CombinationError,
    DtypeError,
    escape_control_characters,
    format_plural,
)
from qkv.frameworks import get_framework, is_array
from qkv.frameworks.ragged import EncodedQuery
from qkv.util.logging import debug_logger
from qkv.util.registry import REGISTRY_VERSION
from qkv.util.types import UNSET, A, Array, Closable, K, Shaped, T, V

# Loaded when something is asked or encoded: an exact look-up needs none of it.
if TYPE_CHECKING:
    from qkv.answer import Answer
    from qkv.database.encoders import Encoder, EncoderLike
    from qkv.database.query.executor import QueryExecutor
    from qkv.scores import Score, ScoreLike
    from qkv.weightings import WeightingLike


class DatabaseInfo(TypedDict):
    """What a database is."""

    path: str | None
    rows: int
    version: int
    columns: list[str]
    key: list[str]
    value: list[str]
    key_kind: str | None
    value_kind: str | None
    unique: bool
    encoder: Any
    vectors: str | None
    bytes: int | None


class DatabaseReader(Closable, Generic[K, V]):
    """The rows of a store, of its newest version or of the one that is pinned."""

    def __init__(
        self,
        store: Store,
        key: str | Sequence[str] = "key",
        value: str | Sequence[str] | None = "value",
        encoder: EncoderLike | None = None,
        unique: bool = False,
        precision: str | None = None,
        pin: int | None = None,
    ):
        self._store, self._pinned_version = store, pin
        self._precision = quantization.check_precision(precision)
        self._requested_columns = (
            as_column_names(key),
            None if value is None else as_column_names(value, "value"),
            unique,
        )
        self._requested_encoder: Encoder | None = None
        if encoder is not None:
            from qkv.database import encoders

            self._requested_encoder = encoders.resolve(encoder)
        self._cached_view: TableView | None = None
        self._cached_executor: tuple[tuple[Any, ...], QueryExecutor] | None = None
        self._frame_library: str | None = None

    @classmethod
    def _from_store(cls, store: Store, **wish: Any) -> Self:
        made = cls.__new__(cls)
        DatabaseReader.__init__(made, store, **wish)
        return made

    @property
    def path(self) -> Path | None:
        return self._store.path

    @property
    def version(self) -> int:
        return self._store.version if self._pinned_version is None else self._pinned_version

    @property
    def columns(self) -> tuple[str, ...]:
        schema = self._schema
        return () if schema is None else schema.columns

    @property
    def encoder(self) -> Encoder | None:
        """What turns keys into vectors; None before the first row."""
        view = self._view
        return view.encoder if view.is_initialized else self._requested_encoder

    @property
    def _view(self) -> TableView:
        """The newest version, or the one that is pinned."""
        newest = self._store.version  # a store that was closed says so
        version = newest if self._pinned_version is None else self._pinned_version
        held = self._cached_view  # another thread may put another one in its place
        if held is None or held.version != version:
            old, held = (
                held,
                TableView(self._store.open_snapshot(self._pinned_version), self._requested_encoder),
            )
            if old is not None:
                held.inherit_encoder(old)
            self._cached_view, self._cached_executor = held, None
            if log := debug_logger():
                place = self.path or "a database in memory"
                log.debug("read %s, version %d: %d rows", place, version, len(held))
        return held

    @property
    def _schema(self) -> Schema | None:
        view = self._view
        return view.schema if view.is_initialized else None

    def __len__(self) -> int:
        return len(self._view)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, key: Any) -> bool:
        return bool(self._view.find_ids(key))

    def __iter__(self) -> Iterator[K]:
        return self.keys()

    def keys(self) -> Iterator[K]:
        return (key for key, _ in self.items())

    def values(self) -> Iterator[V]:
        return (value for _, value in self.items())

    def items(self) -> Iterator[tuple[K, V]]:
        """Every (key, value), oldest first."""
        view = self._view
        for _, row in view.iterate_rows():
            yield view.schema.row_key(row), view.schema.row_value(row)

    def rows(
        self, *, where: Any = None, start: int = 0, count: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Every row with all its columns, oldest first; of those that pass `where`, `count` from
        the one numbered `start`.

        >>> from qkv import Database
        >>> D = Database({"Li": 34, "Mu": 29, "Hu": 41})
        >>> list(D.rows(where="value > 30", start=1))
        [{'key': 'Hu', 'value': 41}]
        """
        for name, number in (("start", start), ("count", 0 if count is None else count)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ArgumentError(f"{name} must be a number of rows, not {number!r}")
        view = self._view
        if where is None and start == 0 and count is None:
            return (row for _, row in view.iterate_rows())
        passed = view.filter_rows(where)
        ids = (view.ids if passed is None else view.ids[passed])[start:][:count].tolist()
        chunks = (ids[at : at + ROWS_PER_CHUNK] for at in range(0, len(ids), ROWS_PER_CHUNK))
        return (row for some in chunks for row in view.read_rows(some))

    def count(self, where: Any = None) -> int:
        """How many rows pass a condition.

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": 29, "Hu": 41}).count("value > 30")
        2
        """
        passed = self._view.filter_rows(where)
        return len(self) if passed is None else int(passed.sum())

    def why_no_rows(self, where: Any) -> str:
        """That no row passes a condition, with values that its columns have; empty where some do.

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": 29}).why_no_rows("value > 40")
        "No rows match where='value > 40'; column 'value' has the values 34, 29"
        """
        return self._view.why_none_pass(where)

    def _is_integer_column(self, name: str, bits: int = 64) -> bool:
        """Whether a column of numbers has ints alone, of so many bits each.

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": None})._is_integer_column("value")
        True
        """
        return self._view.is_integer_column(name, bits)

    def __getitem__(self, key: K) -> V:
        """The value of the newest row with exactly this key."""
        value: V = self._find_value(key, UNSET)
        if value is UNSET:
            raise KeyNotFoundError(key, partial(self._nearest_keys, key))
        return value

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: T) -> V | T: ...
    def get(self, key: K, default: Any = None) -> Any:
        """The value of the newest row with this key; the default where there is none."""
        return self._find_value(key, default)

    def _find_value(self, key: Any, default: Any) -> Any:
        held = self._cached_view
        if (
            held is None
            or self._pinned_version is not None
            or not held.is_initialized
            or held.has_vector_values
        ):
            return self._view.find_value(key, default)
        return held.find_newest_value(
            key, default
        )  # which need not ask first whether there is a newer one

    def get_all(self, key: K) -> list[V]:
        """The value of every row with this key, oldest first; an empty list where there is none."""
        view = self._view
        return view.read_values(view.find_ids(key))

    def _nearest_keys(self, key: Any) -> list[Any]:
        answer = self.ask(key, top=3) if len(self) else []
        rows = [] if isinstance(answer, list) else answer.rows
        return list({cells.format_cell(row.key): row.key for row in rows}.values())

    @overload
    def ask(self, query: Shaped, **options: Unpack[AskOptions]) -> Any: ...
    @overload
    def ask(self, query: list[Any], **options: Unpack[AskOptions]) -> list[Answer]: ...
    @overload
    def ask(self, query: Any, **options: Unpack[AskOptions]) -> Answer: ...
    def ask(
        self,
        query: Any,
        *,
        score: ScoreLike | None = None,
        weighting: WeightingLike = "softmax",
        top: int = 5,
        where: Any = None,
        tolerance: float | None = None,
        confidence: float | None = None,
        **other: Any,
    ) -> Any:
        """Σᵢ α(q, kᵢ) vᵢ as an `Answer`: its value, its rows and their weights. A list of queries
        (or an array with a query in each row) gives a list of answers. Where keys are several
        numbers, a list or array of that length is one key.

        `score` compares vectors of query and key (by default as the encoder says), "exact" the keys
        themselves. Vectors of your own, embeddings or measurements, are compared by q·k/√d, to
        which length counts, so that a row asked by its own vector may come second: "cosine" goes
        by direction, "gaussian" by distance. The answer's `hint` says where that matters.

        `top` rows are named. `where` leaves some rows out: {"genre": "poetry"}, "year > 1950 and
        genre != 'poetry'", or a function of a row, which makes Python read every row where
        conditions look at columns.

        With a `tolerance` ε the weights are proven to lie that near to the exact ones (½ Σ |αᵢ −
        exact αᵢ| ≤ ε), which needs few of the keys in full: the answer says its `error_bound` and
        the `rows_read`. With a `confidence` such as 0.999 the bound may come from rows that were
        drawn, and holds with that probability; then `bound_is_probabilistic` is True.

        >>> from qkv import Database
        >>> D = Database([(3.1, 70.0), (3.5, 82.0), (3.6, 86.0), (4.0, 95.0)])
        >>> D.ask(3.55, score="gaussian", weighting="hard").value
        82.0
        """
        if other:
            check_database_keywords("ask()", other, AskOptions.__optional_keys__)
        view = self._nonempty_view()
        queries, single = parse_queries(view, query)
        asked = self._get_executor(view, score, weighting, where, top, tolerance, confidence)
        answers = asked.answer_queries(queries)
        return answers[0] if single else answers

    def _get_executor(
        self, view: TableView, score: Any, weighting: Any, where: Any, *how: Any
    ) -> Any:
        """What makes answers of queries; the last is kept, as most questions are put alike."""
        given, last = (
            (view, score, weighting, where, *how, REGISTRY_VERSION[0]),
            self._cached_executor,
        )
        if last is not None and all(map(is_, given, last[0])):
            return last[1]
        from qkv.database.query.executor import QueryExecutor

        meant = self._check_ask_options(view, score, weighting, *how)
        made = QueryExecutor(
            view, view.resolve_score(score), weighting, view.filter_rows(where), *meant
        )
        made.where = where
        # A condition that is no text may mean something else the next time.
        self._cached_executor = (given, made) if where is None or type(where) is str else None
        return made

    def _check_ask_options(
        self, view: TableView, score: Any, weighting: Any, top: Any, tolerance: Any, confidence: Any
    ) -> tuple[Any, ...]:
        """What `QueryExecutor` is told beside score, weighting and rows, where that means
        anything."""
        from qkv import partial_attention as parts
        from qkv.database.query.calibration import load_calibration

        check_top(top)
        parts.require_one_framework({"query": view.ids}, score=score, weighting=weighting)
        near, sure = check_tolerance(tolerance, confidence)
        return top, near, load_calibration(view, score, weighting), self._frame_library, sure

    @overload
    def attend(self, query: A, **options: Unpack[AttendOptions]) -> A: ...
    @overload
    def attend(self, query: Any, **options: Unpack[AttendOptions]) -> np.ndarray: ...
    def attend(
        self,
        query: Array,
        *,
        score: ScoreLike | None = None,
        weighting: WeightingLike = "softmax",
        where: Any = None,
        tolerance: float | None = None,
        confidence: float | None = None,
        **other: Any,
    ) -> Array:
        """Σᵢ α(q, kᵢ) vᵢ in the query's framework, with gradients: (n, d) → (n, d_v), (d) → (d_v).

        A query means what it means to `ask`. A key of one or several numbers is scaled as the keys
        were, and its gradient passes through that. Text is encoded first, and has no gradient; an
        array of floats is its encoded vector. `tolerance` and `confidence` are those of `ask`, for
        a query that needs no gradient.

        >>> from qkv import Database
        >>> import numpy as np
        >>> D = Database(np.eye(2), np.array([[10.0], [20.0]]))
        >>> D.attend(np.array([[0.0, 0.0]]))
        array([[15.]])
        """
        from qkv.database.query.executor import MAX_SPARSE_QUERIES_PER_BATCH

        check_database_keywords("attend()", other, AttendOptions.__optional_keys__)
        view = self._nonempty_view()
        if not view.schema.can_pool_values:
            raise CombinationError(
                f"the values are of type {view.schema.value_kind}, and only numbers can be pooled: "
                "use ask, which names the heaviest value"
            )
        batch, given = isinstance(query, Batch), query
        query = query if batch else as_cells(query, view.schema.key_kind)
        numbers = is_array(query) and (view.schema.key_kind == "number" or view.has_number_keys)
        if numbers:
            query, single = encode_numbers(view, query)
            code = EncodedQuery(query)
        elif is_array(query) and view.schema.key_kind != "date":  # a vector, as the keys' are
            single = len(query.shape) == 1
            code = EncodedQuery(query[None] if single else query)
        else:
            queries, single = parse_queries(view, query)
            if view.has_sparse_vectors and len(queries) > MAX_SPARSE_QUERIES_PER_BATCH:
                parts = (
                    Batch(queries[at : at + MAX_SPARSE_QUERIES_PER_BATCH])
                    for at in range(0, len(queries), MAX_SPARSE_QUERIES_PER_BATCH)
                )
                how = AttendOptions(
                    score=score, weighting=weighting, where=where, tolerance=tolerance
                )
                how["confidence"] = confidence
                return np.concatenate([self.attend(some, **how) for some in parts])
            code = view.encode_queries(queries)
        view.check_query(code)
        chosen = score_beside(view, score, code.code)
        if chosen.compares_keys:
            raise ArgumentError("attend compares vectors: score='exact' is for ask")
        near = dict(
            zip(("tolerance", "confidence"), check_tolerance(tolerance, confidence), strict=True)
        )
        out = self._attend_encoded(view, code, chosen, weighting, where, near)
        if numbers and (kept := get_framework(given).dtype_name(given)).startswith(
            ("float", "bfloat")
        ):
            out = get_framework(out).astype(out, kept)
        return out[0] if single else out

    def _attend_encoded(
        self,
        view: TableView,
        code: EncodedQuery,
        score: Score,
        weighting: WeightingLike,
        where: Any,
        near: dict[str, float | None],
    ) -> Array:
        """The output (n, d_v) of queries that are encoded."""
        from qkv.attention import attend_rows

        allowed = view.mask_missing_values(view.filter_rows(where))[0]
        if where is not None and allowed is not None and not allowed.any():
            warn_no_rows(view.why_none_pass(where))
        rows = view.open_vectors(allowed, value=True, asked=code.sparse_positions)
        return attend_rows(rows, code.code, score=score, weighting=weighting, **near)

    def _nonempty_view(self) -> TableView:
        view = self._view
        if not len(view):
            what = "the database" if self.path is None else f"the database {self.path}"
            raise CombinationError(f"{what} is empty, so it has no answer: add rows first")
        return view

    def at(self, version: int) -> Self:
        """The database as it was at a version, to be read."""
        if isinstance(version, bool) or not isinstance(version, int | np.integer):
            raise DtypeError(
                f"at: version must be a whole number, as in versions(), not {version!r}"
            )
        past = type(self)._from_store(self._store, pin=int(version))
        assert past._view.snapshot.version == version
        past._frame_library = self._frame_library
        return past

    def versions(self) -> list[Any]:
        """Every version that is kept, oldest first."""
        return self._store.versions()

    def info(self) -> DatabaseInfo:
        """What it is: rows, columns, types, encoder, versions, size."""
        schema = self._schema
        told = self._view.settings.get("encoder")
        return {
            "path": None if self.path is None else str(self.path),
            "rows": len(self),
            "version": self.version,
            "columns": list(self.columns),
            "key": [] if schema is None else list(schema.key),
            "value": [] if schema is None else list(schema.value),
            "key_kind": None if schema is None else schema.key_kind,
            "value_kind": None if schema is None else schema.value_kind,
            "unique": self._requested_columns[2] if schema is None else schema.unique,
            "encoder": told if isinstance(told, dict) else None,
            "vectors": self._view.precision_text,
            "bytes": None if self.path is None else folder.folder_size(self.path),
        }

    def describe(self) -> dict[str, dict[str, Any]]:
        """The type of each column, and how many of its cells are missing.

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": None}).describe()["value"]
        {'type': 'number', 'missing': 1}
        """
        view, found = self._view, {}
        for name in self.columns:
            role = view.schema.vector_columns.get(name)
            if role == "key":
                found[name] = {"type": "vector", "missing": 0}
                continue
            census = view.cell_kind_counts(name)
            kind = "vector" if role else columns.describe_kinds(census)
            if census[columns.TEXT] and view.is_date_column(name):
                kind = kind.replace(columns.KIND_NAMES[columns.TEXT], "date")
            found[name] = {"type": kind, "missing": int(census[columns.MISSING])}
        return found

    def close(self) -> None:
        if self._pinned_version is None:
            self._store.close()

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else str(self.path)
        try:
            schema, rows = self._schema, len(self)
        except StoreClosedError:
            return f"<Database {where}: closed>"
        if schema is None:
            return f"<Database {where}: empty>"
        names = escape_control_characters(f"{', '.join(schema.key)} → {', '.join(schema.value)}")
        past = "" if self._pinned_version is None else f", version {self._pinned_version}"
        return f"<Database {where}: {format_plural(rows, 'row')}, {names}{past}>"
