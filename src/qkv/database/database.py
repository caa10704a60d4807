"""The class `Database`: rows with a key and a value, queried by attention.

Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ over the rows D = {(k₁, v₁), …}. `ReadableDatabase` holds the
methods that only read, which `qkv.cluster.Cluster` shares. `Database` adds the constructors and
the methods that write.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from operator import is_
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, Self, TypedDict, Unpack, overload

import numpy as np

from qkv.database.errors import (
    DuplicateKeyError,
    KeyNotFoundError,
    StaleFitWarning,
    StaleIndexWarning,
    StoreClosedError,
    warn_no_rows,
)
from qkv.database.interface import DatabaseInfo, RowSource
from qkv.database.query.arguments import (
    PARSER_BY_KIND,
    AskOptions,
    DatabaseAttendOptions,
    check_database_keywords,
    check_tolerance,
    check_top,
    encode_numbers,
    list_pairs,
    parse_queries,
    resolve_score_like,
)
from qkv.database.query.inputs import Batch, as_cells, find_named_cells
from qkv.database.storage import CompactReport, Store, Version, folder
from qkv.database.table import cells, encoding, quantization
from qkv.database.table import columns as typed_columns
from qkv.database.table.column_chunk import has_any_value
from qkv.database.table.schema import (
    ColumnData,
    Schema,
    as_column_names,
    as_pairs,
    count_rows,
    drop_missing_keys,
    extract_cells,
    has_several_keys,
    match_keys_and_values,
    normalize_columns,
    rows_to_columns,
    stack_vectors,
    warn_partial_values,
)
from qkv.database.table.view import MEASURED_SETTINGS, ROWS_PER_CHUNK, TableView
from qkv.errors import (
    ArgumentError,
    CombinationError,
    DtypeError,
    QkvError,
    escape_control_characters,
    format_plural,
    validate_callables,
    validate_keywords,
    warn_at_caller,
)
from qkv.frameworks import get_framework, is_array, to_numpy
from qkv.frameworks.lazy import LazySequence
from qkv.frameworks.ragged import EncodedQuery
from qkv.util.data_frames import frame_library
from qkv.util.display import Displayable
from qkv.util.formatting import quote_cell
from qkv.util.logging import debug_logger
from qkv.util.registry import REGISTRY_VERSION
from qkv.util.types import UNSET, A, Array, Closable, K, ProgressCallback, Shaped, T, V

# The first query imports these modules: an exact lookup needs none of them.
if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from qkv.answer import Answer
    from qkv.database.encoders import Encoder, EncoderLike
    from qkv.database.index.background import IndexBuild
    from qkv.database.index.calibration import IndexReport
    from qkv.database.index.metric import IndexMetric
    from qkv.database.learn import LearnReport
    from qkv.database.query.calibration import Calibration
    from qkv.database.query.executor import QueryExecutor
    from qkv.database.query.influence import Valuation
    from qkv.scores import Score, ScoreLike
    from qkv.weightings import WeightingLike

MAX_REFIT_ROWS = 2**17
"""The encoder is refitted when the number of rows has doubled, up to this number."""

FOREIGN_METHODS = {
    **dict.fromkeys(
        ("search", "query", "nearest", "retrieve", "lookup", "kneighbors"), "ask(query)"
    ),
    **dict.fromkeys(("similarity_search", "predict", "find"), "ask(query)"),
    **dict.fromkeys(("insert", "append", "upsert"), "add(key, value) or update(key, value)"),
    **dict.fromkeys(("delete", "drop", "pop"), "remove(key)"),
    **dict.fromkeys(("to_pandas", "to_polars", "to_arrow", "head"), "to_frame()"),
    **dict.fromkeys(("merge",), "join(other)"),
}
"""Methods of other libraries, and what to use here."""

OPEN_ARGUMENT_HINTS = dict.fromkeys(
    ("mode", "readonly", "read_only"),
    "create=False to open only an existing database; any number of processes may read it while one "
    "process writes",
)
ON_DISK_HINT = (
    " Database.from_columns(…, path=…) writes a database to disk, and qkv.open(path) opens it."
)


class DatabaseOptions(TypedDict, total=False):
    """The keyword arguments of `Database`."""

    key: str | Sequence[str]
    value: str | Sequence[str]
    encoder: EncoderLike | None
    unique: bool
    precision: str | None


class ReadableDatabase(Closable, Displayable, Generic[K, V]):
    """The methods that look up, query and export rows. `Database` and `Cluster` share them.

    They read the newest version of the store, or the version that `at` selected.
    """

    def __init__(
        self,
        store: Store,
        key: str | Sequence[str] = "key",
        value: str | Sequence[str] | None = "value",
        encoder: EncoderLike | None = None,
        unique: bool = False,
        precision: str | None = None,
        pinned_version: int | None = None,
    ):
        self._store, self._pinned_version = store, pinned_version
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
        self._index_build: IndexBuild | None = None

    @classmethod
    def _from_store(cls, store: Store, **options: Any) -> Self:
        database = cls.__new__(cls)
        ReadableDatabase.__init__(database, store, **options)
        return database

    # Metadata

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
        """The encoder that turns keys into vectors; None before the first row."""
        view = self._view
        return view.encoder if view.is_initialized else self._requested_encoder

    @property
    def _view(self) -> TableView:
        """The view of the newest version, or of the version that `at` selected."""
        newest = self._store.version  # this raises if the store is closed
        version = newest if self._pinned_version is None else self._pinned_version
        view = self._cached_view  # read the attribute once: another thread may replace it
        if view is None or view.version != version:
            snapshot = self._store.open_snapshot(self._pinned_version)
            previous, view = view, TableView(snapshot, self._requested_encoder)
            if previous is not None:
                view.inherit_encoder(previous)
            self._cached_view, self._cached_executor = view, None
            if log := debug_logger():
                place = self.path or "a database in memory"
                log.debug("read %s, version %d: %d rows", place, version, len(view))
        return view

    @property
    def _schema(self) -> Schema | None:
        view = self._view
        return view.schema if view.is_initialized else None

    def _nonempty_view(self) -> TableView:
        """Return the view; raise `CombinationError` if the database has no rows."""
        view = self._view
        if not len(view):
            if self.path is not None and not self.path.exists():
                raise folder.not_found_error(self.path, "add rows to create a database there")
            name = "the database" if self.path is None else f"the database {self.path}"
            raise CombinationError(f"{name} is empty, so it has no answer: add rows first")
        return view

    def info(self) -> DatabaseInfo:
        """Return the path, the number of rows, the version, the columns, the encoder and the size.

        >>> from qkv import Database
        >>> info = Database({"Li": 34, "Mu": 29}).info()
        >>> info["rows"], info["key"], info["key_kind"]
        (2, ['key'], 'text')
        """
        schema = self._schema
        encoder = self._view.settings.get("encoder")
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
            "encoder": encoder if isinstance(encoder, dict) else None,
            "vectors": self._view.precision_text,
            "bytes": None if self.path is None else folder.folder_size(self.path),
        }

    if not TYPE_CHECKING:  # type checkers report unknown attributes without this method

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in FOREIGN_METHODS:
                message += f": use {FOREIGN_METHODS[name]}"
            raise AttributeError(message, name=name, obj=self)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the type of each column and the number of its missing cells.

        For keys that are vectors, also return how they are compared by default.

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": None}).describe()["value"]
        {'type': 'number', 'missing': 1}
        """
        view, description = self._view, {}
        for name in self.columns:
            role = view.schema.vector_columns.get(name)
            if role == "key":
                description[name] = {"type": "vector", "missing": 0, **view.describe_metric()}
                continue
            counts = view.cell_kind_counts(name)
            kind = "vector" if role else typed_columns.describe_kinds(counts)
            if counts[typed_columns.TEXT] and view.is_date_column(name):
                kind = kind.replace(typed_columns.KIND_NAMES[typed_columns.TEXT], "date")
            description[name] = {"type": kind, "missing": int(counts[typed_columns.MISSING])}
        return description

    def at(self, version: int) -> Self:
        """Return the database as of an earlier version, read-only."""
        if isinstance(version, bool) or not isinstance(version, int | np.integer):
            raise DtypeError(f"at: version must be an int, as in versions(), not {version!r}")
        past = type(self)._from_store(self._store, pinned_version=int(version))
        assert past._view.snapshot.version == version
        past._frame_library = self._frame_library
        return past

    def versions(self) -> list[Version]:
        """Return every version that was not dropped by `compact`, oldest first."""
        return self._store.versions()

    def close(self) -> None:
        if self._index_build is not None:
            self._index_build.cancel()
        if self._pinned_version is None:
            self._store.close()

    def __repr__(self) -> str:
        place = "in memory" if self.path is None else str(self.path)
        try:
            schema, rows = self._schema, len(self)
        except StoreClosedError:
            return f"<Database {place}: closed>"
        if schema is None:
            return f"<Database {place}: empty>"
        names = escape_control_characters(f"{', '.join(schema.key)} → {', '.join(schema.value)}")
        past = "" if self._pinned_version is None else f", version {self._pinned_version}"
        return f"<Database {place}: {format_plural(rows, 'row')}, {names}{past}>"

    # Rows

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
        """Yield every (key, value), oldest first."""
        view = self._view
        for _, row in view.iterate_rows():
            yield view.schema.row_key(row), view.schema.row_value(row)

    def rows(
        self, *, where: Any = None, start: int = 0, count: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows that pass `where` with all their columns, oldest first.

        The first `start` of these rows are skipped, and at most `count` are yielded.

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
        return (row for chunk in chunks for row in view.read_rows(chunk))

    def count(self, where: Any = None) -> int:
        """Return the number of rows that pass the condition `where`.

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": 29, "Hu": 41}).count("value > 30")
        2
        """
        passed = self._view.filter_rows(where)
        return len(self) if passed is None else int(passed.sum())

    def why_no_rows(self, where: Any) -> str:
        """Return a sentence with values of the columns in `where` if no row passes it, else "".

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": 29}).why_no_rows("value > 40")
        "No rows match where='value > 40'; column 'value' has the values 34, 29"
        """
        return self._view.why_none_pass(where)

    def _is_integer_column(self, name: str, bits: int = 64) -> bool:
        """Return whether every number in a column is an integer of at most `bits` bits.

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": None})._is_integer_column("value")
        True
        """
        return self._view.is_integer_column(name, bits)

    # Exact lookup

    def __getitem__(self, key: K) -> V:
        """Return the value of the newest row with exactly this key."""
        value: V = self._find_value(key, UNSET)
        if value is UNSET:
            raise KeyNotFoundError(key, partial(self._nearest_keys, key))
        return value

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: T) -> V | T: ...
    def get(self, key: K, default: Any = None) -> Any:
        """Return the value of the newest row with this key, or the default if no row has it."""
        return self._find_value(key, default)

    def get_all(self, key: K) -> list[V]:
        """Return the values of all rows with this key, oldest first."""
        view = self._view
        return view.read_values(view.find_ids(key))

    def _find_value(self, key: Any, default: Any) -> Any:
        view = self._cached_view
        if (
            view is None
            or self._pinned_version is not None
            or not view.is_initialized
            or view.has_vector_values
        ):
            return self._view.find_value(key, default)
        # This lookup reads the newest version itself, without the check that `_view` makes.
        return view.find_newest_value(key, default)

    def _nearest_keys(self, key: Any) -> list[Any]:
        """Return the keys most similar to a key that no row has, for the error message."""
        answer = self._match_keys(key, top=3) if len(self) else []
        rows = [] if isinstance(answer, list) else answer.rows
        return list({quote_cell(row.key): row.key for row in rows}.values())

    # Queries

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
        approximate: bool | float | None = None,
        **other: Any,
    ) -> Any:
        """Return an `Answer`: the value, the heaviest rows and their weights α(q, kᵢ).

        For keys of numbers and vectors, the value is Σᵢ α(q, kᵢ) vᵢ. For other keys, numbers come
        from the best-matching key, and `mean` is Σᵢ α(q, kᵢ) vᵢ. See `Answer`.

        For a list of queries, or an array with one query per row, return a list of answers. If a
        key consists of several numbers, a list or array of that length is one key.

        `score` compares the vectors of query and key. The encoder chooses the default, and "exact"
        compares the keys themselves. For vectors of your own the keys decide: embeddings are
        compared by direction ("cosine"), measurements by distance ("gaussian"). `describe()` shows
        which.

        `top` is the number of rows in `answer.rows`. `where` selects rows:
        {"genre": "poetry"}, "year > 1950 and genre != 'poetry'", or a function of a row. A function
        is slower, since Python reads every row for it.

        With a `tolerance` ε the weights are guaranteed to be close to the exact ones,
        ½ Σ |αᵢ − exact αᵢ| ≤ ε. Few keys are then read in full; see `error_bound` and `rows_read`.
        With a `confidence` such as 0.999, the bound may come from sampled rows and holds with that
        probability; then `bound_is_probabilistic` is True.

        With `approximate=True`, only rows that the index finds are read; see `index`. Their scores
        are exact. `missing_weight` estimates the weight of all other rows. `approximate=0.01` reads
        more rows until this estimate is at most 0.01. Without an index the answer is exact.

        >>> from qkv import Database
        >>> D = Database([(3.1, 70.0), (3.5, 82.0), (3.6, 86.0), (4.0, 95.0)])
        >>> D.ask(3.55, score="gaussian", weighting="hard").value
        82.0
        """
        if other:
            check_database_keywords("ask()", other, AskOptions.__optional_keys__)
        view = self._nonempty_view()
        queries, is_single = parse_queries(view, query)
        executor = self._get_executor(view, score, weighting, where, top, tolerance, confidence)
        if approximate is None or approximate is False:
            answers = executor.answer_queries(queries)
        else:
            from qkv.database.index.approximate import answer_approximately, check_approximate

            missing_weight = check_approximate(approximate, tolerance)
            answers = answer_approximately(executor, queries, missing_weight)
        return answers[0] if is_single else answers

    def _match_keys(self, queries: Any, **options: Any) -> Any:
        """Answer queries as `ask` does, but from all rows: also from those without a value."""
        view = self._nonempty_view()
        if view.value_mask is None or options.get("approximate"):
            return self.ask(queries, **options)
        arguments = {"weighting": "softmax", "top": 5} | options
        names = ("score", "weighting", "where", "top", "tolerance", "confidence")
        values = map(arguments.get, names)
        executor = self._build_executor(view, *values, rows="all_rows")
        parsed, is_single = parse_queries(view, queries)
        answers = executor.answer_queries(parsed)
        return answers[0] if is_single else answers

    def _get_executor(
        self, view: TableView, score: Any, weighting: Any, where: Any, *options: Any
    ) -> QueryExecutor:
        """Return the executor for these arguments. The executor of the last call is cached."""
        arguments = (view, score, weighting, where, *options, REGISTRY_VERSION[0])
        cached = self._cached_executor
        if cached is not None and all(map(is_, arguments, cached[0])):
            return cached[1]
        executor = self._build_executor(view, score, weighting, where, *options)
        # A function or a mutable condition may have changed at the next call.
        is_cacheable = where is None or type(where) is str
        self._cached_executor = (arguments, executor) if is_cacheable else None
        return executor

    def _build_executor(
        self,
        view: TableView,
        score: Any,
        weighting: Any,
        where: Any,
        *options: Any,
        rows: str = "rows",
    ) -> QueryExecutor:
        """Return a new executor. `rows` is "rows" for those with a value, or "all_rows"."""
        from qkv.database.query.executor import QueryExecutor

        checked = self._check_ask_options(view, score, weighting, *options)
        selection = getattr(view, f"select_{rows}")(where)
        executor = QueryExecutor(view, view.resolve_score(score), weighting, selection, *checked)
        executor.where = where
        return executor

    def _check_ask_options(
        self, view: TableView, score: Any, weighting: Any, top: Any, tolerance: Any, confidence: Any
    ) -> tuple[Any, ...]:
        """Check the options of `ask`; return the further arguments of `QueryExecutor`."""
        from qkv import partial_attention
        from qkv.database.query.calibration import load_calibration

        check_top(top)
        partial_attention.require_one_framework(
            {"query": view.ids}, score=score, weighting=weighting
        )
        tolerance, confidence = check_tolerance(tolerance, confidence)
        calibration = load_calibration(view, score, weighting)
        return top, tolerance, calibration, self._frame_library, confidence

    @overload
    def attend(self, query: A, **options: Unpack[DatabaseAttendOptions]) -> A: ...
    @overload
    def attend(self, query: Any, **options: Unpack[DatabaseAttendOptions]) -> np.ndarray: ...
    def attend(
        self,
        query: Array,
        *,
        score: ScoreLike | None = None,
        weighting: WeightingLike = "softmax",
        where: Any = None,
        tolerance: float | None = None,
        confidence: float | None = None,
        approximate: bool | float | None = None,
        **other: Any,
    ) -> Array:
        """Return Σᵢ α(q, kᵢ) vᵢ in the query's framework, with gradients: (n, d) → (n, d_v).

        A query (d,) gives (d_v,). Queries have the same meaning as in `ask`. Numbers are scaled
        like the keys, and gradients pass through the scaling. Text is encoded first and has no
        gradient; an array of floats is an encoded vector. `tolerance` and `confidence` are those of
        `ask`, for a query that needs no gradient. `approximate` is that of `ask`: the sum and its
        gradient are over the rows that the index finds.

        >>> from qkv import Database
        >>> import numpy as np
        >>> D = Database(np.eye(2), np.array([[10.0], [20.0]]))
        >>> D.attend(np.array([[1.0, 1.0]]))
        array([[15.]])
        """
        from qkv import weightings
        from qkv.database.query.far_queries import move_far_vectors
        from qkv.database.query.scan import MAX_SPARSE_QUERIES_PER_BATCH

        check_database_keywords("attend()", other, DatabaseAttendOptions.__optional_keys__)
        view = self._nonempty_view()
        kind = view.schema.key_kind
        if not view.schema.can_pool_values:
            raise CombinationError(
                f"the values are {view.schema.value_kind}, and only numbers can be pooled: "
                "use ask, which returns the value with the largest weight"
            )
        original = query = find_named_cells(query, view.schema.key, kind)
        if not isinstance(query, Batch):
            query = as_cells(query, kind)
        is_number_array = is_array(query) and (kind == "number" or view.has_number_keys)
        if is_number_array:
            vectors, is_single = encode_numbers(view, query)
            code = EncodedQuery(vectors)
        elif is_array(query) and kind != "date":  # the query is an encoded vector
            is_single, fw = len(query.shape) == 1, get_framework(query)
            if kind == "vector" and fw.dtype_name(query).startswith(("int", "uint", "bool")):
                query = fw.astype(query, "float64" if fw.supports_float64(query) else "float32")
            code = EncodedQuery(query[None] if is_single else query)
        else:
            queries, is_single = parse_queries(view, query)
            if view.has_sparse_vectors and len(queries) > MAX_SPARSE_QUERIES_PER_BATCH:
                batches = (
                    Batch(queries[at : at + MAX_SPARSE_QUERIES_PER_BATCH])
                    for at in range(0, len(queries), MAX_SPARSE_QUERIES_PER_BATCH)
                )
                options = DatabaseAttendOptions(
                    score=score,
                    weighting=weighting,
                    where=where,
                    tolerance=tolerance,
                    confidence=confidence,
                    approximate=approximate,
                )
                return np.concatenate([self.attend(batch, **options) for batch in batches])
            code = view.encode_queries(queries)
        view.check_query(code)
        resolved_score = resolve_score_like(view, score, code.code)
        if resolved_score.compares_keys:
            raise ArgumentError("attend compares vectors: score='exact' is only for ask")
        code = move_far_vectors(view, code, resolved_score, weightings.resolve(weighting))
        bound_options = dict(
            zip(("tolerance", "confidence"), check_tolerance(tolerance, confidence), strict=True)
        )
        out = self._attend_encoded(
            view, code, resolved_score, weighting, where, bound_options, approximate
        )
        if is_number_array:
            dtype = get_framework(original).dtype_name(original)
            if dtype.startswith(("float", "bfloat")):
                out = get_framework(out).astype(out, dtype)
        return out[0] if is_single else out

    def _attend_encoded(
        self,
        view: TableView,
        code: EncodedQuery,
        score: Score,
        weighting: WeightingLike,
        where: Any,
        bound_options: dict[str, float | None],
        approximate: bool | float | None = None,
    ) -> Array:
        """Return the output (n, d_v) for queries that are already encoded."""
        from qkv.attention import attend_rows

        selection = view.select_rows(where)
        if where is not None and not selection.row_count:
            warn_no_rows(view.why_none_pass(where))
        if approximate is not None and approximate is not False:
            from qkv.database.index import approximate as index

            missing_weight = index.check_approximate(approximate, bound_options["tolerance"])

            def make_plan(score: Score, weighting: Any) -> index.SearchPlan | str:
                return index.plan_search(view, score, weighting, selection, missing_weight)

            out = index.attend_approximately(view, code, score, weighting, make_plan)
            if out is not None:
                return out
        rows = view.open_vectors(selection, value=True, sparse_positions=code.sparse_positions)
        return attend_rows(rows, code.code, score=score, weighting=weighting, **bound_options)

    def join(
        self,
        other: RowSource,
        *,
        top: int = 1,
        min_weight: float = 0.0,
        progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Iterator[dict[str, Any]]:
        """Yield each row with its `top` best rows of `other`, whose keys are similar.

        Each key of this database is a query to `other`, and `options` are those of `other.ask`.
        A row contains the columns of both databases and the weight of the match; a name that both
        have gets the suffix `_right`. If the key of a row is missing or blank, or if no key of
        `other` has the weight `min_weight`, the columns of `other` are None. Rows with the same
        key count together.

        >>> from qkv import Database
        >>> orders = Database({"chese": 3, "bred": 1})
        >>> prices = Database({"bread": 1.5, "cheese": 2.5, "apples": 2.0})
        >>> [(row["key"], row["key_right"]) for row in orders.join(prices)]
        [('chese', 'cheese'), ('bred', 'bread')]
        """
        from qkv.database.join import JoinInput, join_rows

        left = JoinInput(self.rows(), self.columns, self.info()["key"], len(self))
        return join_rows(left, other, top=top, min_weight=min_weight, progress=progress, **options)

    # Export

    def reindex(
        self, key: str | Sequence[str], value: str | Sequence[str] | None = None, **options: Any
    ) -> Database:
        """Return a database of the same rows with other columns as key and value.

        `options` are those of `Database.from_columns`. `by` is a short name for this method.

        >>> from qkv import Database
        >>> D = Database.from_columns(
        ...     {"name": ["Ann", "Bo"], "major": ["art", "law"]}, value="major"
        ... )
        >>> D.reindex(key="major", value="name")["law"]
        'Bo'
        """
        database = copy_rows(self, key, value, **options)
        database._frame_library = self._frame_library
        return database

    by = reindex

    def swap(self, **options: Any) -> Database:
        """Return a database of the same rows with key and value exchanged.

        >>> from qkv import Database
        >>> Database({"Li": "physics", "Hu": "history"}).swap()["history"]
        'Hu'
        """
        key, value = swapped_columns(self)
        return self.reindex(key, value, **options)

    def to_frame(self, where: Any = None) -> Any:
        """Return the rows as a data frame of pandas, polars or pyarrow.

        `Database.from_frame` reads such a frame. The library is that of the frame from which the
        database was built. Otherwise it is an imported one (pandas or polars), else an installed
        one.

        >>> import pandas
        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": None}).to_frame()["value"].tolist()
        [34, <NA>]
        """
        from qkv.database.export import files

        return files.to_frame(self.columns, self.rows(where=where), self._frame_library)

    def to_csv(self, path: str | PathLike[str], where: Any = None) -> int:
        """Write the rows as CSV, or as TSV if the name ends in .tsv; return the number of rows.

        Missing cells are empty. CSV has no types, so a warning names the columns that `from_source`
        would read with other types.
        """
        from qkv.database.export import files

        return files.write_file(path, self.columns, self.rows(where=where), ".csv", ".tsv")

    def to_parquet(self, path: str | PathLike[str], where: Any = None) -> int:
        """Write the rows as Parquet, with their types; return the number of rows."""
        from qkv.database.export import files

        return files.write_file(path, self.columns, self.rows(where=where), ".parquet")

    def plot(
        self, query: Any, path: str | PathLike[str] | None = None, **options: Unpack[AskOptions]
    ) -> Figure:
        """Draw the weights of all keys as a heatmap with one row per query; save it to `path`.

        `options` are those of `ask`.

        >>> from qkv import Database
        >>> students = Database({"John Doe": "psychology", "Ada Byron": "mathematics"})
        >>> figure = students.plot("John Doe", score="exact", weighting="raw")  # one-hot
        >>> figure.axes[0].images[0].get_array().tolist()
        [[1.0, 0.0]]
        """
        from qkv.database.export.heatmap import plot_weights

        answers: Any = self.ask(query, **options)
        return plot_weights(answers if isinstance(answers, list) else [answers], self, path)

    def _repr_html_(self) -> str:
        from qkv.database.export.html import render_html

        return render_html(self)


class Database(ReadableDatabase[K, V]):
    """Keys and values. `D[key]` looks up a key exactly, and `D.ask(query)` queries all rows.

    `data` is a mapping, pairs (key, value), or the keys if `values` are the second argument. An
    array (m, d) is m vectors. Keys may repeat unless `unique` is true. The database is in memory;
    `qkv.open` opens a database on disk.

    `key` and `value` name the columns. `encoder` turns keys into vectors: it is a name or an object
    of `qkv.database.encoders`. By default, the type of the keys decides.

    `precision` is the type of the stored vectors: "float32", "float16" or "int8". "int8" takes a
    quarter of the memory and has an error bound. By default, vectors of text are stored as int8,
    and other vectors as they are.

    >>> D = Database({"Zhang": "Aston", "Lipton": "Zachary", "Li": "Mu"})
    >>> D["Li"]
    'Mu'
    >>> D.ask("Lipten").value
    'Zachary'
    >>> "Smola" in D, len(D)
    (False, 3)
    """

    @overload
    def __init__(self, data: Shaped, values: Any, **options: Unpack[DatabaseOptions]) -> None: ...
    @overload
    def __init__(self, data: Mapping[K, V], **options: Unpack[DatabaseOptions]) -> None: ...
    @overload
    def __init__(self, data: Iterable[tuple[K, V]], **options: Unpack[DatabaseOptions]) -> None: ...
    @overload
    def __init__(
        self, data: Iterable[K], values: Iterable[V], **options: Unpack[DatabaseOptions]
    ) -> None: ...
    @overload
    def __init__(
        self, data: Any = None, values: Any = ..., **options: Unpack[DatabaseOptions]
    ) -> None: ...
    def __init__(
        self,
        data: Any = None,
        values: Any = UNSET,
        *,
        key: str | Sequence[str] = "key",
        value: str | Sequence[str] = "value",
        encoder: EncoderLike | None = None,
        unique: bool = False,
        precision: str | None = None,
        **other: Any,
    ):
        validate_keywords("Database()", other, DatabaseOptions.__optional_keys__, ON_DISK_HINT)
        super().__init__(Store(None), key, value, encoder, unique, precision)
        if data is not None:
            self.add(data, values)

    def __getstate__(self) -> dict[str, Any]:
        # A pickle contains the rows of a database in memory, else the path. It has no view.
        cached = {"_cached_view": None, "_cached_executor": None, "_index_build": None}
        return vars(self) | cached

    # Constructors

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Any],
        *,
        key: str | Sequence[str] | None = None,
        value: str | Sequence[str] | None = None,
        encoder: EncoderLike | None = None,
        unique: bool = False,
        precision: str | None = None,
        path: str | Path | None = None,
        progress: ProgressCallback | None = None,
        **other: Never,
    ) -> Database:
        """Create a database from named columns of equal length, on disk if `path` is set.

        Without `key`, the key is the first column of text, or the first column if none is text.
        Without `value`, the value of a row consists of all other columns. Rows without a key are
        skipped, and a warning says how many.

        >>> D = Database.from_columns(
        ...     {"name": ["Ann", "Bo"], "major": ["art", "law"]}, value="major"
        ... )
        >>> D["Bo"]
        'law'
        """
        validate_keywords("from_columns()", other, cls.from_columns.__kwdefaults__)
        validate_callables(progress=progress)
        columns = _check_columns(columns)
        keys = as_column_names(key) if key is not None else (first_text_column(columns),)
        values = (
            as_column_names(value, "value") if value is not None else _other_columns(columns, keys)
        )
        options = {"key": keys, "value": values, "unique": unique, "precision": precision}
        path = None if path is None else folder.check_path(path)
        if path is None or os.path.lexists(path):
            database = cls._from_store(Store(path), encoder=encoder, **options)
            return database._import_columns(columns, progress)
        with folder.build_store_folder(path) as temporary_path:
            database = cls._from_store(Store(temporary_path), encoder=encoder, **options)
            database._import_columns(columns, progress).close()
        return cls._from_store(Store(path), encoder=database._requested_encoder, **options)

    def _import_columns(self, columns: ColumnData, progress: ProgressCallback | None) -> Self:
        """Write the first rows of a new database; close the store if this fails."""
        try:
            with self._exclusive_lock():
                if self._schema is not None:
                    raise ArgumentError(
                        f"{self.path} contains a database already: open it and use extend, or "
                        "choose another path"
                    )
                columns = drop_missing_keys(normalize_columns(columns), self._requested_columns[0])
                self._write_rows(columns, progress=progress, what="import")
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def from_frame(cls, frame: Any, **options: Any) -> Database:
        """Create a database from a data frame of pandas, polars or pyarrow.

        A DuckDB query is accepted too, such as duckdb.sql("FROM 'sales/**/*.parquet'"). `to_frame`
        of the database and of its answers returns frames of the same library. `options` are those
        of `from_columns`.

        >>> import pandas
        >>> students = pandas.DataFrame({"gpa": [3.1, 3.9], "salary": [70.0, 95.0]})
        >>> Database.from_frame(students, key="gpa", value="salary")[3.9]
        95.0
        """
        from qkv.database import sources

        database = cls.from_columns(sources.from_frame(frame).columns, **options)
        database._frame_library = frame_library(frame)
        return database

    @classmethod
    def from_dataset(cls, dataset: Any, **options: Any) -> Database:
        """Create a database from one split of a Hugging Face data set.

        Lists of floats of equal length become vectors. A streamed data set is read completely; to
        read less, pass `dataset.take(1000)`. `options` are those of `from_columns`.

        >>> from datasets import Dataset
        >>> names = Dataset.from_dict({"name": ["Li", "Hu"], "label": [0, 1]})
        >>> D = Database.from_dataset(names, key="name", value="label")
        >>> D.ask("Lii").rows[0].key
        'Li'
        """
        from qkv.database import sources

        return cls.from_columns(sources.from_dataset(dataset).columns, **options)

    @classmethod
    def from_source(
        cls,
        source: str | Path,
        *,
        table: str | None = None,
        missing: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        text: Sequence[str] | bool | None = None,
        **options: Any,
    ) -> Database:
        """Create a database from a file or a PostgreSQL URL.

        The file is CSV, TSV, JSON, Parquet, Arrow, Excel or SQLite. A pattern such as "logs/*.csv"
        reads several files. `table` selects one of several tables.

        In CSV and TSV, empty cells are missing, and so are words such as NA, NaN and null
        (`sources.MISSING_WORDS`). `missing` replaces these words: with `missing=()`, NA is text.
        `names` are the names of the columns if the file has no header line. `text` lists columns
        that stay text, such as versions and codes; True means all columns. `options` are those of
        `from_columns`.
        """
        from qkv.database import sources

        validate_keywords("from_source()", options, cls.from_columns.__kwdefaults__)
        read = sources.read(
            source,
            table=table,
            missing=missing,
            names=names,
            text=text,
            progress=options.get("progress"),
        )
        return cls.from_columns(read.columns, **options)

    # Writing

    def add(self, keys: Any, values: Any = UNSET) -> None:
        """Add one row, or several rows if `keys` is a list or an array.

        `values` then has one value for each key. A mapping, or a list of pairs (key, value), may be
        passed instead of both.

        >>> from qkv import Database
        >>> D = Database()
        >>> D.add("Li", "Mu")
        >>> D.add(["Hu", "Smola"], ["Rachel", "Alex"])
        >>> list(D)
        ['Li', 'Hu', 'Smola']
        """
        if values is UNSET:
            self._add_pairs(keys)
            return
        if has_several_keys(keys, getattr(self._schema, "key_kind", None)):
            keys, values = match_keys_and_values(keys, values)
        else:
            keys, values = [keys], [values]
        self._write_rows(self._build_columns(keys, values))

    def _add_pairs(self, data: Any) -> None:
        """Add the rows of a mapping or of pairs (key, value)."""
        if isinstance(data, RowSource):
            self.extend(data.rows())
            return
        pairs = as_pairs(data, UNSET, False)
        if pairs:
            keys, values = map(list, zip(*pairs, strict=True))
            self._write_rows(self._build_columns(keys, values))

    def extend(
        self, rows: Iterable[Mapping[str, Any]], *, progress: ProgressCallback | None = None
    ) -> None:
        """Add rows, given as mappings of columns.

        Rows without a key are skipped, and a warning says how many.

        >>> from qkv import Database
        >>> D = Database(key="name", value="major")
        >>> D.extend([{"name": "John Doe", "major": "psychology", "year": 4}])
        >>> D["John Doe"]
        'psychology'
        """
        validate_callables(progress=progress)
        columns = rows_to_columns(rows)
        if columns:
            key = self._requested_columns[0] if self._schema is None else self._schema.key
            self._write_rows(drop_missing_keys(columns, key), progress=progress)

    def update(self, key: Any, value: Any = UNSET) -> int:
        """Set the value of a key, or add the key; return the number of added keys.

        If several rows have the key, the newest row changes. A mapping or a list of pairs updates
        several keys in one version. If a key is in several pairs, the last pair counts.

        >>> from qkv import Database
        >>> D = Database({"Li": "Mu"})
        >>> D.update("Li", "Wei"), D.update("Hu", "Rachel")
        (0, 1)
        """
        if value is UNSET and not isinstance(key, Mapping | list):
            raise DtypeError("update takes a key and its value, or a mapping of keys to values")
        pairs = as_pairs(key, value, False)
        with self._exclusive_lock():
            view = self._view
            if not view.is_initialized:
                self._add_pairs(list({cells.key_digest(k): (k, v) for k, v in pairs}.values()))
                return len(self)
            new_rows: dict[bytes, dict[str, Any]] = {}
            old_ids: dict[bytes, int] = {}
            for k, v in pairs:
                ids, old_row = view.find_ids(k), None
                if ids:
                    old_row = view.read_rows(ids[-1:])[0]
                    # Keep the stored form of the key, as a dict does; a vector may be rounded.
                    k = k if view.schema.key_kind == "vector" else view.schema.row_key(old_row)
                digest = view.schema.key_digest(k)
                row = {name: column[0] for name, column in self._build_columns([k], [v]).items()}
                if old_row is not None:
                    old_ids[digest] = ids[-1]
                    row = {**old_row, **row}
                new_rows[digest] = row
            self._write_rows(
                rows_to_columns(new_rows.values()), remove=list(old_ids.values()), what="update"
            )
        return len(new_rows) - len(old_ids)

    def __setitem__(self, key: K, value: V) -> None:
        self.update(key, value)

    def remove(self, keys: Any) -> int:
        """Delete every row with this key, or with one of a list of keys; return the number of rows.

        If a key does not exist, nothing is deleted and `KeyNotFoundError` is raised.

        >>> from qkv import Database
        >>> D = Database({"Li": "Mu", "Hu": "Rachel", "Wu": "Yi"})
        >>> D.remove(["Li", "Wu"]), list(D)
        (2, ['Hu'])
        """
        kind = getattr(self._schema, "key_kind", None)
        keys = list(keys) if has_several_keys(keys, kind) else [keys]
        with self._exclusive_lock():
            view = self._view
            deleted: dict[int, None] = {}
            for key in keys:
                ids = view.find_ids(key)
                if not ids:
                    raise KeyNotFoundError(key, partial(self._nearest_keys, key))
                deleted.update(dict.fromkeys(ids))
            self._store.commit(remove=list(deleted), what="remove")
        return len(deleted)

    def __delitem__(self, key: K) -> None:
        self.remove([key])

    def compact(self, progress: ProgressCallback | None = None) -> CompactReport:
        """Merge small files, and delete removed rows and earlier versions for good."""
        validate_callables(progress=progress)
        self._check_writable()
        self._cached_view = self._cached_executor = None  # both would keep an old version pinned
        report = self._store.compact(progress)
        self._rebuild_index(progress)
        return report

    def _rebuild_index(self, progress: ProgressCallback | None) -> None:
        """Index the segments that a compaction has written, if the database has an index.

        The rows are compacted already, so a failure only gives a warning.
        """
        view = self._view
        if "index" not in view.settings:
            return
        from qkv.database.index.calibration import IndexReport

        stored = IndexReport.read_from_view(view)
        if stored is None or stored.encoded != view.setting_number("encoded") or not len(view):
            return
        try:
            metric = stored.as_metric()
            self._build_index(metric, stored.recall, None, progress)
        except (QkvError, OSError, MemoryError) as error:
            warn_at_caller(
                f"the rows were compacted, but their index could not be built: {error}",
                StaleIndexWarning,
            )

    def _build_columns(self, keys: Any, values: Any) -> ColumnData:
        """Return keys and values as columns by name."""
        key_names, value_names, _ = self._requested_columns
        schema = self._schema
        if schema is not None:
            key_names, value_names = schema.key, schema.value
        columns: ColumnData = {}
        if len(key_names) == 1:
            columns[key_names[0]] = keys
        else:
            for k in keys:
                if not isinstance(k, tuple) or len(k) != len(key_names):
                    raise ArgumentError(
                        f"a key must be a tuple of the columns {', '.join(key_names)}, not "
                        f"{quote_cell(k)}"
                    )
            columns |= {name: [k[i] for k in keys] for i, name in enumerate(key_names)}
        value_names = value_names or ("value",)
        if len(value_names) == 1:
            return columns | {value_names[0]: values}
        for v in values:
            if not isinstance(v, Mapping) or not set(v) <= set(value_names):
                raise ArgumentError(
                    f"a value must be a mapping of the columns {', '.join(value_names)}, not "
                    f"{quote_cell(v)}"
                )
        return columns | {name: [v.get(name) for v in values] for name in value_names}

    def _check_writable(self) -> None:
        if self._pinned_version is not None:
            raise CombinationError(
                f"version {self._pinned_version} is read-only, because at() selected it: write to "
                "the database itself"
            )

    def _exclusive_lock(self) -> AbstractContextManager[object]:
        """Return a context in which no other thread or process can change the rows."""
        self._check_writable()
        return self._store.exclusive_lock()

    def _write_rows(
        self,
        columns: ColumnData,
        *,
        remove: Sequence[int] = (),
        what: str = "add",
        progress: ProgressCallback | None = None,
    ) -> None:
        """Add rows and delete those with the ids `remove`, as one version with the label `what`."""
        with self._exclusive_lock():
            columns = normalize_columns(columns)
            if count_rows(columns):
                self._encode_and_commit(columns, remove, what, progress)
                self._refit_encoder()

    def _encode_and_commit(
        self,
        columns: ColumnData,
        remove: Sequence[int],
        what: str,
        progress: ProgressCallback | None,
    ) -> None:
        """Encode the keys of normalized columns, and commit the rows as a new version."""
        view = self._view
        if view.is_initialized:
            schema = view.schema
        else:
            key, value, unique = self._requested_columns
            value = value or _other_columns(columns, key)
            schema = Schema.from_columns(columns, key, value, unique)
        columns = schema.fill_columns(columns)
        schema.check_types(columns)
        if view.is_initialized and schema.with_inferred_value_kind(columns) != schema:
            wider = schema.with_inferred_value_kind(columns)
            view, schema = self._add_number_values(view, wider, progress)
        keys = schema.keys_from_columns(columns)
        record_columns = {
            name: _as_list(column)
            for name, column in columns.items()
            if name not in schema.vector_columns
        }
        digests: Collection[bytes] = LazySequence(
            len(keys), partial(_compute_digests, keys, schema)
        )
        records: Collection[str] = LazySequence(len(keys), partial(_dump_records, record_columns))
        if not record_columns:
            records = ["{}"] * len(keys)
        if schema.key_kind != "vector" or len(keys) <= encoding.KEYS_PER_BLOCK:
            # For many vectors, digests and records stay lazy: the writing threads compute them.
            digests, records = list(digests), list(records)
        if schema.key_kind == "vector":
            keys = stack_vectors(keys, "key")
        settings: dict[str, Any] | None = None
        arrays = None
        if view.is_initialized:
            encoder, precision = view.encoder, view.vector_precision
        else:
            encoder, settings = self._fit_first_encoder(schema, keys)
            precision = encoding.choose_precision(encoder, self._precision)
            arrays = encoder.arrays()
        first_id = view.snapshot.last_id + 1
        tensors = encoding.encode_keys(encoder, keys, precision, first_id, progress)
        if settings is None:
            settings = encoding.refit_metric(view, keys, columns, remove)
        else:
            settings |= encoding.measure_rows(schema, encoder, keys, columns)
        value_array = schema.build_value_array(columns)
        if value_array is not None:
            tensors["value"] = value_array
            if len(schema.value) > 1:
                warn_partial_values(value_array, schema.value)
        if encoding.stores_raw_keys(encoder, schema):
            tensors["key"] = keys
        vector_values = {
            name: value_array for name, role in schema.vector_columns.items() if role == "value"
        }
        tensors |= typed_columns.build_column_tensors({**record_columns, **vector_values})
        try:
            self._store.commit(
                records=records,
                digests=digests,
                tensors=tensors,
                remove=remove,
                settings=settings,
                arrays=arrays,
                unique=schema.unique,
                what=what,
            )
        except DuplicateKeyError as error:
            position = error.position
            raise DuplicateKeyError(
                f"the key {quote_cell(keys[position])} (row {position}) exists already or is added "
                "twice, but keys are unique here: use update, or leave the row out",
                position,
            ) from None

    def _add_number_values(
        self, view: TableView, schema: Schema, progress: ProgressCallback | None
    ) -> tuple[TableView, Schema]:
        """Change the schema to values that are numbers, if no row has a value yet.

        Return the new view and schema, or the old ones.
        """
        if has_any_value(view.snapshot, view.schema):
            return view, view.schema
        self._store.rewrite_tensors(
            encoding.add_value_tensor(view, len(schema.value), progress),
            settings=view.settings | {"schema": schema.to_dict()},
            arrays=view.snapshot.read_arrays(),
            what="numbers",
        )
        return self._view, schema

    def _fit_first_encoder(self, schema: Schema, keys: Any) -> tuple[Encoder, dict[str, Any]]:
        """Return the encoder, fitted to the first keys, and the first settings of the store."""
        from qkv.database import encoders

        names = schema.key if len(schema.key) > 1 else ()
        unfitted = self._requested_encoder or encoders.default(keys, names)
        encoder, description = encoding.fit_encoder(unfitted, keys)
        settings = {"schema": schema.to_dict(), "encoded": 1} | description
        if self._precision is not None:
            settings["precision"] = self._precision
        self._requested_encoder = encoder
        return encoder, settings

    # Encoding and learning

    def _refit_encoder(self) -> None:
        """Fit the encoder again if the number of keys has doubled since the last fit.

        The new rows are committed already, so a failure only gives a warning. The next write tries
        again.
        """
        try:
            fitted_keys = self._view.setting_number("fitted")
            if fitted_keys and 2 * fitted_keys <= len(self) <= MAX_REFIT_ROWS:
                self.encode()
        except (QkvError, OSError, MemoryError) as error:
            warn_at_caller(
                f"the rows were added, but the encoder could not be refitted to them: {error}",
                StaleFitWarning,
            )

    def encode(
        self,
        encoder: EncoderLike | None = None,
        *,
        fit: bool = True,
        what: str = "encode",
        progress: ProgressCallback | None = None,
    ) -> None:
        """Encode all keys again, as a new version.

        `encoder` replaces the current encoder. With `fit`, the encoder is fitted to the current
        keys. `what` is the label of the version in `versions()`.
        """
        from qkv.database import encoders

        if not isinstance(what, str):
            raise DtypeError(f"what must be text, the label of the version, not {what!r}")
        validate_callables(progress=progress)
        with self._exclusive_lock():
            view = self._view
            if not len(view):
                raise CombinationError("there are no rows to encode: add rows first")
            new_encoder = view.encoder if encoder is None else encoders.resolve(encoder)
            keys = view.read_all_keys()
            if fit:
                new_encoder, description = encoding.fit_encoder(new_encoder, keys)
            else:
                description = encoding.describe_encoder(new_encoder, 0)
            # The counter tells apart encoders with equal settings but different arrays.
            old = {x: y for x, y in view.settings.items() if x not in MEASURED_SETTINGS}
            measured = encoding.measure_rows(view.schema, new_encoder, keys, {}, view)
            settings = {**old, **description, **measured}
            settings["encoded"] = view.setting_number("encoded") + 1
            blocks = encoding.reencode_rows(view, new_encoder, keys, progress)
            self._store.rewrite_tensors(
                blocks, settings=settings, arrays=new_encoder.arrays(), what=what
            )
            self._requested_encoder = new_encoder

    def learn(
        self, pairs: Iterable[Any], *, progress: ProgressCallback | None = None, **options: Any
    ) -> LearnReport:
        """Train the encoder on (query, right key) pairs; return the report.

        `options` are those of `qkv.database.learn`. The new vectors are a new version;
        `at(version)` reads the old vectors.
        """
        from qkv.database.learn import learn

        validate_keywords("learn()", options, learn.__kwdefaults__)
        validate_callables(progress=progress)
        self._check_writable()
        view = self._nonempty_view()
        keys, pairs = view.read_all_keys(), list_pairs(pairs, "learn", "right key")
        if view.schema.key_kind in ("vector", *PARSER_BY_KIND):
            pairs = [_normalize_pair(view, keys, pair, i) for i, pair in enumerate(pairs)]
        learned, report = learn(view.encoder, keys, pairs, progress=progress, **options)
        self.encode(learned, fit=False, what="learn", progress=progress)
        return report

    def calibrate(
        self,
        pairs: Iterable[Any],
        coverage: float = 0.9,
        *,
        score: ScoreLike | None = None,
        weighting: WeightingLike = "softmax",
        **other: Never,
    ) -> Calibration:
        """Calibrate prediction sets on (query, right key) pairs.

        The `prediction_set` of each later answer contains the right row with the probability
        `coverage`. If no row fits the query, the set is empty and the answer `abstains`. The
        `confidence` of later answers is corrected so that it agrees with the pairs.

        The guarantee holds for queries like those of the pairs, with this score and weighting. The
        calibration is stored as a new version. It becomes invalid when the keys are encoded again,
        or when a tenth of the rows has changed.

        >>> from qkv import Database
        >>> D = Database({"Zhang": "Aston", "Lipton": "Zachary", "Li": "Mu"})
        >>> typos = [("Zang", "Zhang"), ("Lee", "Li"), ("Liptn", "Lipton"), ("Zhnag", "Zhang")]
        >>> calibration = D.calibrate(typos, coverage=0.7)
        >>> [row.key for row in D.ask("Lpton").prediction_set], D.ask("qwy").abstains
        (['Lipton'], True)
        """
        from dataclasses import replace

        from qkv.database.query.arguments import list_pairs
        from qkv.database.query.calibration import calibrate
        from qkv.database.query.confidence import fit_confidence

        validate_keywords("calibrate()", other, Database.calibrate.__kwdefaults__)
        with self._exclusive_lock():
            view = self._nonempty_view()
            pairs = list_pairs(pairs, "calibrate", "right key")
            calibration = calibrate(view, pairs, coverage, score, weighting)
            executor = self._get_executor(view, score, weighting, None, 1, None, None)
            bias, slope = fit_confidence(executor, pairs)
            calibration = replace(calibration, confidence_bias=bias, confidence_slope=slope)
            settings = view.settings | {"promise": calibration.to_dict()}
            self._store.commit(settings=settings, what="calibrate")
        return calibration

    @overload
    def index(
        self,
        kind: str = "auto",
        recall: float = 0.95,
        *,
        score: ScoreLike | None = None,
        queries: Any = None,
        progress: ProgressCallback | None = None,
        background: Literal[False] = False,
    ) -> IndexReport: ...
    @overload
    def index(
        self,
        kind: str = "auto",
        recall: float = 0.95,
        *,
        score: ScoreLike | None = None,
        queries: Any = None,
        progress: ProgressCallback | None = None,
        background: Literal[True],
    ) -> IndexBuild: ...
    def index(
        self,
        kind: str = "auto",
        recall: float = 0.95,
        *,
        score: ScoreLike | None = None,
        queries: Any = None,
        progress: ProgressCallback | None = None,
        background: bool = False,
        **other: Any,
    ) -> Any:
        """Build the index that answers with `approximate` use; return what it achieves.

        The index finds at least the share `recall` of the ten best rows. This is measured on keys
        of the database, or on `queries`. It works for scores that compare vectors as `score` does:
        "cosine", "dot" or "gaussian". None is the default score.

        Each segment has its own index, in a file beside it. Rows that are added later are scanned
        until `index` is called again, which only adds what is missing. Ctrl-C keeps the finished
        segments. Needs the extra `index`.

        With `background=True`, a thread builds the index, and the result is an `IndexBuild` with
        `wait()`, `cancel()` and `is_done`. Until it is finished, answers are exact or use the index
        that exists already.

        >>> import numpy as np
        >>> D = Database(np.random.default_rng(0).normal(size=(20000, 8)), np.arange(20000.0))
        >>> D.index().indexed
        20000
        >>> D.ask(np.zeros(8), weighting="hard", approximate=True).rows_read
        32
        """
        from qkv.database.index import build

        validate_keywords("index()", other, Database.index.__kwdefaults__)
        validate_callables(progress=progress)
        build.check_arguments(kind, recall)
        self._check_writable()
        if self._index_build is not None and not self._index_build.is_done:
            raise CombinationError(
                "index: an index is being built in the background: wait() for it or cancel() it"
            )
        view = self._nonempty_view()
        metric = build.choose_metric(view, score)
        build.load_faiss()
        arguments = metric, recall, build.encode_held_out(view, queries)
        if not background:
            return self._build_index(*arguments, progress)
        from qkv.database.index.background import IndexBuild

        self._index_build = IndexBuild(partial(self._build_index, *arguments), progress)
        return self._index_build

    def _build_index(
        self,
        metric: IndexMetric,
        recall: float,
        queries: np.ndarray | None,
        progress: ProgressCallback | None,
    ) -> IndexReport:
        """Build what is missing of the index, and measure it."""
        from qkv.database.index import build

        # Other threads may write meanwhile: the index belongs to segments, which never change.
        build.build_segments(self._store, self._nonempty_view(), metric, progress)
        view = self._nonempty_view()
        view.index_cache.clear()
        report = build.measure_view(view, metric, recall, queries, progress)
        with self._exclusive_lock():
            settings = self._view.settings | {"index": report.to_dict()}
            self._store.commit(settings=settings, what="index")
        return report

    def drop_index(self) -> int:
        """Remove the index; return the number of its files.

        >>> Database({"Li": "Mu"}).drop_index()
        0
        """
        with self._exclusive_lock():
            settings = self._view.settings
            if settings.pop("index", None) is not None:
                self._store.commit(settings=settings, what="drop index")
            count = self._store.discard_indexes()
            self._view.index_cache.clear()
        return count

    def value_of_rows(
        self,
        pairs: Iterable[Any],
        *,
        score: ScoreLike | None = None,
        weighting: WeightingLike = "softmax",
        where: Any = None,
        tolerance: float | None = None,
        confidence: float | None = None,
    ) -> Valuation:
        """Return how much each row improves the answers to (query, right value) pairs.

        The value of a row says by how much the loss would increase without the row. A row with a
        negative value may have a wrong label. The other arguments are those of `ask`.

        >>> D = Database([(1.0, "low"), (1.1, "low"), (1.2, "high"), (5.0, "high"), (5.2, "high")])
        >>> D.value_of_rows([(1.05, "low"), (1.15, "low"), (5.1, "high")]).worst(1)[0].key
        1.2
        """
        from qkv.database.query.influence import compute_row_values

        options = (score, weighting, where, 1, tolerance, confidence)
        return compute_row_values(self._get_executor(self._nonempty_view(), *options), pairs)


def open(
    path: str | Path,
    *,
    create: bool | None = None,
    key: str | Sequence[str] = "key",
    value: str | Sequence[str] | None = "value",
    encoder: EncoderLike | None = None,
    unique: bool = False,
    precision: str | None = None,
    skip_damaged: bool = False,
    **other: Never,
) -> Database:
    """Open the database in the folder `path`.

    A folder that does not exist is created by the first rows that you add. Until then nothing is
    written, and a query raises an error. With `create=True`, an empty database is created at once.
    With `create=False`, a missing folder is an error.

    `key`, `value`, `encoder`, `unique` and `precision` are for a new database. Its first rows fix
    them, and other values are an error from then on. `skip_damaged` answers from the intact rows of
    a damaged store.

    Close the database when it is no longer needed, or use it in a `with` statement.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open(f"{folder}/names.qkv") as D:
    ...         D.add("Li", "Mu")
    ...     with open(f"{folder}/names.qkv") as D:
    ...         D["Li"]
    'Mu'
    """
    validate_keywords("open()", other, open.__kwdefaults__, elsewhere=OPEN_ARGUMENT_HINTS)
    if isinstance(path, str) and "://" in path:
        raise ArgumentError(
            f"path: {path} is a URL, but qkv.open needs a folder: use qkv.Client(url) for a "
            "server, or first copy the folder of the database to this machine"
        )
    store = Store(path, create=create, skip_damaged=skip_damaged)
    options = {"key": key, "value": value, "unique": unique, "precision": precision}
    database = Database._from_store(store, encoder=encoder, **options)
    if (key, value, unique, encoder, precision) != ("key", "value", False, None, None):
        try:
            _check_same_columns(database, key, value, unique)
            _check_same_vectors(database, precision)
        except BaseException:
            database.close()
            raise
    return database


def copy_rows(
    source: RowSource,
    key: str | Sequence[str],
    value: str | Sequence[str] | None = None,
    **options: Any,
) -> Database:
    """Create a database from the rows of another database, with other columns as key and value."""
    return Database.from_columns(rows_to_columns(source.rows()), key=key, value=value, **options)


def swapped_columns(source: RowSource) -> tuple[list[str], list[str]]:
    """Return the names of the value columns, then those of the key columns."""
    info = source.info()
    if not info["key"]:
        raise CombinationError("there are no rows to swap: add rows first")
    return info["value"], info["key"]


def _check_columns(columns: Any) -> ColumnData:
    """Return the columns by name, each as a list or array of cells; raise if they are invalid."""
    if not isinstance(columns, Mapping):
        raise DtypeError(
            f"columns must be a mapping of names to cells, not {type(columns).__name__}"
        )
    if not columns:
        raise ArgumentError("columns is empty: a database needs a key and a value")
    names = [str(name) for name in columns]
    if len(set(names)) < len(names):
        raise ArgumentError(f"columns: two columns have the same name: {', '.join(names)}")
    checked = dict(zip(names, map(extract_cells, columns.values()), strict=True))
    for name, cells_ in checked.items():
        if isinstance(cells_, str | bytes) or not hasattr(cells_, "__len__"):
            raise DtypeError(f"column {name!r} must be a list of cells, not {cells_!r:.40}")
    return checked


MAX_SAMPLED_CELLS = 100
"""So many cells show whether a column of text has codes or words."""

_WORD = re.compile(r"[^\W\d_]{3}")
"""Three letters in a row, which a date or a price rarely has."""


def first_text_column(columns: ColumnData) -> str:
    """Return the name of the first column of text; the first non-missing cell decides.

    Columns of codes, such as 00037-B, come after columns of words: users ask for words. If there is
    no text, return the name of the first column.

    >>> first_text_column({"sku": ["A-1", "A-2"], "price": [3, 4], "item": ["hex bolt", "nail"]})
    'item'
    """
    texts = {}
    for name, column in columns.items():
        if is_array(column):
            continue
        cells_ = islice((cell for cell in column if cell is not None), MAX_SAMPLED_CELLS)
        sample = list(cells_)
        if sample and isinstance(sample[0], str):
            texts[name] = [cell for cell in sample if isinstance(cell, str)]
    first = next(iter(texts), next(iter(columns)))
    if first in texts and all(map(_is_code, texts[first])):
        words = (name for name, sample in texts.items() if all(map(_WORD.search, sample)))
        return next((name for name in words if not any(map(_is_code, texts[name]))), first)
    return first


def _is_code(cell: str) -> bool:
    """Return whether a cell is one word with a digit, such as 00037-B or INV-2023."""
    return " " not in cell.strip() and any(map(str.isdigit, cell))


def _other_columns(columns: ColumnData, key: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns that are not in the key."""
    others = tuple(name for name in columns if name not in key)
    if not others:
        names = ", ".join(key)
        raise ArgumentError(
            f"there are no columns for the value besides the key, {names}: to use the key as the "
            f"value too, pass value={names!r}"
        )
    return others


def _check_same_columns(database: Database, key: Any, value: Any, unique: bool) -> None:
    """Raise `CombinationError` if the stored rows have another key or value, or may repeat keys."""
    info = database.info()
    requested = {"key": "key" if key == "key" else as_column_names(key)}
    requested["value"] = "value" if value in (None, "value") else as_column_names(value, "value")
    for role, names in requested.items():
        stored = info[role]  # type: ignore[literal-required]
        if stored and names != role and list(names) != stored:
            raise CombinationError(
                f"{role}: {database.path} has {', '.join(stored)}, not {', '.join(names)}: open it "
                f"without {role}=, and use reindex(key=…, value=…) for other columns"
            )
    if unique and info["key"] and not info["unique"]:
        raise CombinationError(
            f"unique: the first rows of {database.path} were added without unique=, so its keys "
            "may repeat: open it without unique=, and copy the rows into a new database"
        )


def _check_same_vectors(database: Database, precision: str | None) -> None:
    """Raise `CombinationError` if the stored vectors have another encoder or precision."""
    view, requested = database._view, database._requested_encoder
    stored = view.settings.get("encoder", {})
    if stored and requested is not None and requested.kind not in _encoder_kinds(stored):
        raise CombinationError(
            f"encoder: the keys of {database.path} were encoded by {stored['kind']}, not "
            f"{requested.kind}: open it without encoder=, then call encode(encoder)"
        )
    dtype = view.snapshot.tensor_type("code")
    if precision is not None and dtype is not None and dtype[0].name != precision:
        raise CombinationError(
            f"precision: the keys of {database.path} are stored as {dtype[0].name}, not "
            f"{precision}: open it without precision=, and copy the rows into a new database"
        )


def _encoder_kinds(settings: Any) -> Iterator[str]:
    """Yield the kind in the settings of an encoder, and the kinds of the encoders inside it."""
    if isinstance(settings, dict):
        yield from [settings["kind"]] if "kind" in settings else []
    if isinstance(settings, dict | list):
        for part in settings.values() if isinstance(settings, dict) else settings:
            yield from _encoder_kinds(part)


def _normalize_pair(view: TableView, keys: Any, pair: Any, position: int) -> Any:
    """Parse the query of a pair, and replace the right key by its stored form.

    The stored form may differ: a vector may be rounded, and a day may be stored as a midnight.
    """
    if not isinstance(pair, tuple | list) or len(pair) not in (2, 3):
        return pair
    query, right, *weight = pair
    if (parse := PARSER_BY_KIND.get(view.schema.key_kind)) is not None:
        query = parse(query, f"learn: the query of pairs[{position}]")
    ids = view.find_ids(right)
    return (query, keys[int(view.ids.searchsorted(ids[-1]))] if ids else right, *weight)


def _dump_records(columns: ColumnData, start: int, stop: int) -> list[str]:
    """Return the records (JSON text) of the rows start … stop − 1."""
    return cells.dump_rows({name: column[start:stop] for name, column in columns.items()})


def _compute_digests(keys: Any, schema: Schema, start: int, stop: int) -> list[bytes]:
    """Return the digests of the keys start … stop − 1; an error names the row."""
    try:
        return schema.key_digests(keys[start:stop])
    except ArgumentError:
        for i, key in enumerate(keys[start:stop], start):
            try:
                cells.key_digest(key)
            except ArgumentError as error:
                raise ArgumentError(f"key {i} (column {', '.join(schema.key)}): {error}") from None
        raise


def _as_list(column: Any) -> list[Any]:
    """Return a column as a list of Python cells."""
    return list(to_numpy(column).tolist() if is_array(column) else column)
