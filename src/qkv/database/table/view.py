"""The view of one version of the table: rows and vectors, found by key, id or position."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.database import parsing
from qkv.database.errors import StoreDamagedError
from qkv.database.filter.expressions import (
    PartialTableCondition,
    as_text,
    columns_in,
    compile_condition,
)
from qkv.database.filter.results import results_of_store
from qkv.database.query.inputs import (
    as_key,
    as_named_tuple,
    find_named_cells,
    is_number_key,
)
from qkv.database.storage import Snapshot, limits
from qkv.database.storage.segments import Segment, count_random_reads
from qkv.database.table import cells, columns, quantization
from qkv.database.table.column_chunk import ColumnChunk, TextCache
from qkv.database.table.row_selection import CandidateRows, RowSelection
from qkv.database.table.schema import SETTINGS_LOST_MESSAGE, Schema
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks import get_framework
from qkv.frameworks.ragged import DenseAndSparse, EncodedQuery, sparse_width
from qkv.frameworks.stored_rows import KeyTermsCache, RowChunk, StoredRows, select_from_chunks
from qkv.util.caches import insert_bounded
from qkv.util.deadline import check_deadline
from qkv.util.formatting import quote_cell

if TYPE_CHECKING:  # these modules are loaded when keys are encoded
    from qkv.database.encoders import Encoder
    from qkv.database.table.left_out_error import LeftOutError
    from qkv.scores import Score, ScoreLike

ROWS_PER_CHUNK = 8192
"""The number of rows that are read at a time."""

READS_PER_RECORD = 3
"""The number of places of a file where the cells of one row are read."""

MAX_GATHERED_ROWS = 2**14
"""Up to this number of candidates are copied into one array."""

HINT_SAMPLE_ROWS, MAX_HINT_ITEMS = 256, 5
"""The number of rows in which a hint looks for values, and how many columns and values it names."""

MAX_CACHED_SELECTIONS, MAX_SELECTION_BYTES = 64, 2**26
"""A view caches the selected rows of at most this number of conditions, in this number of bytes."""

MAX_CACHED_QUERIES = 64
"""The number of query texts whose vectors are cached."""

MEASURED_SETTINGS = ("left_out_error", "one_edit")
"""What is measured on the rows and kept in the settings: the errors where a row is left out, and
the shares of the keys that differ from another one by one letter or digit."""

TENSORS_BY_FIELD = {
    "key": ("code", "scale", "sparse"),
    "value": ("value",),
    "near": ("near", "near.bounds", "near.block"),
}
"""The tensors from which each field of a `RowChunk` is built."""

IMMUTABLE_TYPES = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of cells that may be cached, because callers cannot change such cells."""


class TableView:
    """The rows of one snapshot. The position of a row counts only live rows.

    If `encoder` has the same settings as the stored encoder, it is used instead, which saves a
    rebuild.
    """

    def __init__(self, snapshot: Snapshot, encoder: Encoder | None = None):
        self.snapshot, self._candidate_encoder = snapshot, encoder
        self._query_cache: dict[str, EncodedQuery] = {}
        self.version = snapshot.version
        self._row_cache: dict[int, dict[str, Any]] = {}
        self._selection_cache: dict[str | None, RowSelection] = {}
        self._kind_counts_cache: dict[str, np.ndarray] = {}
        self._number_bounds_cache: dict[Any, tuple[float, float] | None] = {}
        self._key_terms_cache: dict[bool, dict[Any, np.ndarray]] = {False: {}, True: {}}
        self._adapted_scores: dict[str, tuple[Any, Any]] = {}
        self._bounds_cache: dict[Any, Any] = {}
        self.index_cache: dict[str, Any] = {}
        self._text_cache: TextCache = {}

    def __len__(self) -> int:
        return len(self.snapshot)

    @cached_property
    def settings(self) -> dict[str, Any]:
        return self.snapshot.settings

    def setting_number(self, name: str) -> int:
        """Return a setting that is an int; 0 if there is none."""
        value = self.settings.get(name)
        return value if isinstance(value, int) else 0

    @property
    def is_initialized(self) -> bool:
        """Whether there are rows that have fixed the schema.

        The settings with the schema may be lost.
        """
        return "schema" in self.settings or len(self.snapshot) > 0

    @cached_property
    def schema(self) -> Schema:
        """The schema; raises `StoreDamagedError` if the settings are lost."""
        schema = Schema.from_dict(self.settings.get("schema", {}))
        columns_with_kinds = (x for x in schema.columns if schema.vector_columns.get(x) != "key")
        needed = {"code", *(f"kinds/{name}" for name in columns_with_kinds)}
        if len(self.snapshot) and not needed <= {*self.snapshot.tensor_names}:
            raise StoreDamagedError(SETTINGS_LOST_MESSAGE)
        return schema

    @cached_property
    def encoder(self) -> Encoder:
        from qkv.database import encoders

        settings, arrays = self.settings.get("encoder", {}), self.snapshot.read_arrays()
        candidate = self._candidate_encoder
        is_same = candidate is not None and candidate.settings() == settings
        if candidate is not None and is_same and not (candidate.arrays() or arrays):
            return candidate
        return encoders.load(settings, arrays, candidate)

    @cached_property
    def left_out_error(self) -> LeftOutError | None:
        """How wrong answers are for keys that are left out; None without an estimate."""
        from qkv.database.table.left_out_error import LeftOutError

        stored = self.settings.get("left_out_error")
        return LeftOutError.from_settings(stored) if stored else None

    def one_edit_share(self, kind: str) -> float:
        """Return the share of the keys that differ from another one by one "letter" or "digit".

        It is 0 if it was not measured.
        """
        shares = self.settings.get("one_edit")
        share = shares.get(kind) if isinstance(shares, dict) else None
        return min(max(share, 0.0), 1.0) if isinstance(share, float) else 0.0

    def encode_queries(self, queries: Any) -> EncodedQuery:
        """Return the vectors of queries. The vectors of a single text are cached."""
        single = len(queries) == 1 and type(queries[0]) is str
        if single and (cached := self._query_cache.get(queries[0])) is not None:
            return cached
        if self.are_encoded_vectors(queries) and bool(np.isfinite(queries).all()):
            return EncodedQuery(queries)
        try:
            encoded = self.encoder.encode_full_query(queries)
        except (
            ArgumentError,
            DtypeError,
            ShapeError,
        ) as error:  # the message speaks of keys: change it to queries
            message = re.sub(r"(^|where )key(?= \d)", r"\1query", str(error))
            raise type(error)(message.removesuffix(": leave that row out")) from None
        self.check_query(encoded)
        if encoded.code.dtype != np.float32 or not encoded.code.flags.c_contiguous:
            dtype = np.result_type(encoded.code, np.float32)
            encoded = encoded._replace(code=np.ascontiguousarray(encoded.code, dtype=dtype))
        if single:
            if len(self._query_cache) >= MAX_CACHED_QUERIES:
                self._query_cache = {}
            self._query_cache[queries[0]] = encoded
        return encoded

    def are_encoded_vectors(self, queries: Any) -> bool:
        """Return whether the encoder of vectors returns these queries as they are, if finite."""
        return (
            type(queries) is np.ndarray
            and queries.dtype == np.float32
            and queries.ndim == 2
            and self.encoder.is_identity
            and queries.shape[1] == self._vector_widths[0]
            and queries.flags.c_contiguous
        )

    def resolve_score(self, score: ScoreLike | None) -> Score:
        """Return the score object; None means the default score of the encoder."""
        if score is None:
            return self._default_score
        from qkv import scores

        return scores.resolve(score)

    @cached_property
    def _default_score(self) -> Score:
        return self.encoder.default_score(len(self))

    def describe_metric(self) -> dict[str, Any]:
        """Return the name and the numbers of the default score, as JSON values."""
        from qkv import scores

        score = self._default_score
        numbers = {name: getattr(score, name) for name in type(score).number_fields}
        return {"score": scores.NAMES.name_of(type(score))} | {
            name: np.asarray(x).tolist() for name, x in numbers.items() if x is not None
        }

    @cached_property
    def has_sparse_vectors(self) -> bool:
        """Whether the keys have sparse vectors in addition to dense vectors."""
        return "sparse" in self.snapshot.tensor_names

    @property
    def ids(self) -> np.ndarray:
        """The row ids by position, (m,). Rows whose vectors cannot be read are left out."""
        return self._ids_and_chunk_count[0]

    @property
    def chunk_count(self) -> int:
        """The number of segments that a scan reads."""
        return self._ids_and_chunk_count[1]

    @cached_property
    def _ids_and_chunk_count(self) -> tuple[np.ndarray, int]:
        segments = self.snapshot.iterate_segments()
        live_ids = [each.ids if each.live is None else each.ids[each.live] for each in segments]
        ids = np.concatenate([np.zeros(0, np.int64), *live_ids])
        return self.snapshot.check_complete(ids), len(live_ids)

    def inherit_encoder(self, old: TableView) -> None:
        """Use the encoder object of an older view if the settings are the same."""
        # "promise" is the calibration and "index" the index. None of these changes the vectors.
        ignored = {"promise": 0, "index": 0} | dict.fromkeys(MEASURED_SETTINGS, 0)
        same = {**old.settings, **ignored} == {**self.settings, **ignored}
        if same and "encoder" in vars(old):
            vars(self)["encoder"] = old.encoder

    def find_ids(self, key: Any) -> list[int]:
        """Return the ids of the rows with exactly this key, oldest first."""
        digest = self._key_digest(key)
        return [] if digest is None else self.snapshot.find_ids(digest)

    def find_positions(self, ids: Sequence[int]) -> np.ndarray:
        """Return the positions of the rows with these ids, ascending. Unknown ids are left out."""
        wanted = np.sort(np.asarray(ids, np.int64))
        at = np.searchsorted(self.ids, wanted)
        found = at < len(self.ids)
        found[found] = self.ids[at[found]] == wanted[found]
        return np.asarray(at[found])

    def find_value(self, key: Any, default: Any) -> Any:
        """Return the value of the newest row with exactly this key, or the default."""
        digest = self._key_digest(key)
        row_record = None if digest is None else self.snapshot.find_newest(digest)
        if row_record is None:
            return default
        row = cells.load_row(row_record[1])
        if self.has_vector_values:
            self._fill_vectors(row_record[:1], [row])
        return self.schema.row_value(row)

    def find_newest_value(self, key: Any, default: Any) -> Any:
        """Return the value of a key in the newest version of the store, or the default.

        The newest version may be newer than this view. That is allowed because all versions have
        the same schema. Values must not be vectors.
        """
        digest = self._key_digest(key)
        row_record = None if digest is None else self.snapshot.find_latest_record(digest)
        return (
            default if row_record is None else self.schema.row_value(cells.load_row(row_record[1]))
        )

    @cached_property
    def has_vector_values(self) -> bool:
        """Whether values are vectors. These are stored as tensors, not in the records."""
        return not self.schema.vector_columns.keys().isdisjoint(self.schema.value)

    def _key_digest(self, key: Any) -> bytes | None:
        """Return the digest of a key; None if no row can have such a key."""
        if not self.is_initialized:
            return None
        try:
            if type(key) is not str:
                key = as_named_tuple(find_named_cells(key, self.schema.key, None), self.schema.key)
                key = as_key(key, self.schema.key_kind)
            digest = self.schema.key_digest(key)
        except (TypeError, ValueError):
            return None  # such a key cannot be stored, so no row has it
        if self.schema.key_kind == "date" and not self.snapshot.find_ids(digest):
            others = map(
                self.schema.key_digest, parsing.equivalent_dates(parsing.parse_moment(key))
            )
            return next(filter(self.snapshot.find_ids, others), digest)
        return digest

    @cached_property
    def key_kinds(self) -> dict[str, str]:
        """The kind of each column of the key, in the first row."""
        row = next((row for _, row in self.iterate_rows()), {})
        return {name: cells.cell_kind(row[name]) for name in self.schema.key if name in row}

    @cached_property
    def has_only_number_keys(self) -> bool:
        """Whether keys are numbers or vectors, or tuples or lists of numbers only."""
        if self.schema.key_kind not in ("tuple", "json"):
            return self.schema.key_kind in ("number", "vector")
        row = next((row for _, row in self.iterate_rows()), None)
        key = None if row is None else self.schema.row_key(row)
        if not isinstance(key, tuple):
            return cells.is_number_list(key)
        return all(cells.cell_kind(cell) == "number" for cell in key)

    @cached_property
    def has_number_keys(self) -> bool:
        """Whether keys are tuples of numbers or dates. An array of numbers is then one key."""
        if self.schema.key_kind != "tuple":
            return False
        encoder: Any = getattr(self.encoder, "base", self.encoder)
        if encoder.kind == "columns" and any(head.kind != "numbers" for head in encoder.heads):
            return False
        row = next((row for _, row in self.iterate_rows()), None)
        return row is not None and is_number_key(self.schema.row_key(row))

    def read_rows(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the cells of the rows with these ids, by column."""
        return self._fill_vectors(ids, self._read_cells(ids))

    def read_rows_at(
        self, positions: np.ndarray, key_vectors: np.ndarray | None = None
    ) -> list[dict[str, Any]]:
        """Return the cells of the rows at these positions, without a search for their ids.

        `key_vectors` are the vectors of their keys, if they were read before.
        """
        rows = self._read_cells(self.ids[positions].tolist())
        for column, role in self.schema.vector_columns.items():
            if role == "key" and "key" not in self.snapshot.tensor_names:
                vectors = key_vectors
                if vectors is None:
                    vectors = self.read_key_vectors_at(positions)
            else:
                vectors = self.read_tensor_at(role, positions)
            for row, vector in zip(rows, vectors, strict=True):
                row[column] = vector
        return rows

    def _read_cells(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the cells of the rows with these ids, without those that are vectors."""
        short, fresh = self._row_cache, {}
        new = [id_ for id_ in ids if id_ not in short]
        if new:
            count_random_reads(READS_PER_RECORD * len(new))
            if len(short) + len(new) > limits.MAX_CACHED_ROWS:
                self._row_cache = {}
            for id_, text in zip(new, self.snapshot.read_records(new), strict=True):
                fresh[id_] = row = cells.load_row(text)
                if len(text) <= limits.MAX_CACHED_ROW_CHARACTERS and IMMUTABLE_TYPES.issuperset(
                    map(type, row.values())
                ):
                    self._row_cache[id_] = row
        return [(fresh if i in fresh else short)[i].copy() for i in ids]

    def read_values(self, ids: Sequence[int]) -> list[Any]:
        """Return the values of the rows with these ids."""
        return self.schema.values_from_rows(self.read_rows(ids)) if len(ids) else []

    def iterate_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (id, cells) of every row, oldest first."""
        ids: list[int] = []
        rows: list[dict[str, Any]] = []
        readable_ids = self.ids if self.is_initialized and self.schema.vector_columns else None
        for id_, text in self.snapshot.iterate_rows(readable_ids):
            ids.append(id_)
            rows.append(cells.load_row(text))
            if len(ids) == ROWS_PER_CHUNK:
                check_deadline()
                yield from zip(ids, self._fill_vectors(ids, rows), strict=True)
                ids, rows = [], []
        yield from zip(ids, self._fill_vectors(ids, rows), strict=True)

    def read_all_keys(self) -> Any:
        """Return all keys as a list, or as an array of vectors."""
        if self.schema.key_kind == "vector":
            return self._read_vector_keys(self.ids)
        return [
            self.schema.row_key(cells.load_row(text)) for _, text in self.snapshot.iterate_rows()
        ]

    def _read_vector_keys(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the keys of these rows, in a database whose keys are vectors."""
        stores_raw_keys = "key" in self.snapshot.tensor_names
        return (
            np.asarray(self.snapshot.read_tensor("key", ids))
            if stores_raw_keys
            else self.read_key_vectors(ids)
        )

    def _fill_vectors(
        self, ids: Sequence[int] | np.ndarray, rows: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Add the cells that are vectors to rows. They are stored as tensors."""
        if not rows:
            return rows
        for column, role in self.schema.vector_columns.items():
            of_key = role == "key"
            vectors = (
                self._read_vector_keys(ids) if of_key else self.snapshot.read_tensor(role, ids)
            )
            for row, vector in zip(rows, vectors, strict=True):
                row[column] = vector
        return rows

    def filter_rows(self, where: Any) -> np.ndarray | None:
        """Return a mask (m,) of the rows that pass a condition; None if there is no condition."""
        counts = self.cell_kind_counts
        if isinstance(where, PartialTableCondition):
            where, counts = where.where, where.cell_kind_counts.__getitem__
        if where is None:
            return None
        if callable(where):
            ids = [id_ for id_, row in self.iterate_rows() if where(row)]
            return np.isin(self.ids, np.array(ids, np.int64), assume_unique=True)
        condition = compile_condition(where, self.schema.columns if self.is_initialized else ())
        kinds = (
            (name, tuple(np.flatnonzero(counts(name)).tolist()))
            for name in condition.columns
            if name not in self.schema.vector_columns
        )
        identity = None if condition.identity is None else (condition.identity, *kinds)
        results = results_of_store(self.snapshot.store_identity)

        def evaluate_chunk(chunk: ColumnChunk) -> np.ndarray:
            if identity is None:
                return condition(chunk).passes
            return results.find_or_evaluate(identity, chunk.ids, lambda: condition(chunk).passes)

        parts = list(map(evaluate_chunk, self._column_chunks(counts)))
        return np.concatenate(parts) if parts else np.zeros(0, bool)

    def select_rows(self, where: Any = None) -> RowSelection:
        """Return the rows that pass the condition `where` and have a value."""
        is_cacheable = where is None or type(where) is str
        selection = self._selection_cache.get(where) if is_cacheable else None
        if selection is None:
            selection = self.select_mask(self.filter_rows(where))
            if is_cacheable:
                # A mask takes one byte per row. Positions of a quarter of the rows take two bytes
                # per row.
                max_count = MAX_SELECTION_BYTES // (3 * len(self.ids) + 1)
                max_count = max(min(max_count, MAX_CACHED_SELECTIONS), 1)
                insert_bounded(self._selection_cache, where, selection, max_count)
        return selection

    def select_all_rows(self, where: Any = None) -> RowSelection:
        """Return the rows that pass the condition `where`, also those without a value."""
        return RowSelection(len(self.ids), self.filter_rows(where))

    def select_rows_without_value(self, where: Any = None) -> RowSelection:
        """Return the rows that pass the condition `where` but have no value."""
        present, passed = self.value_mask, self.filter_rows(where)
        if present is None:
            return RowSelection(len(self.ids), np.zeros(len(self.ids), bool))
        return RowSelection(len(self.ids), ~present if passed is None else passed & ~present)

    def why_none_pass(self, where: Any) -> str:
        """Return a sentence with values of the columns in `where` if no row passes it, else ""."""
        passed = self.filter_rows(where)
        if passed is None or passed.any():
            return ""
        message = f"No rows match {as_text(where)}"
        names = [
            x for x in columns_in(where, self.schema.columns) if x not in self.schema.vector_columns
        ]
        rows = self.read_rows(self.ids[:HINT_SAMPLE_ROWS].tolist()) if names else []
        for name in names[:MAX_HINT_ITEMS]:
            values = {
                quote_cell(row[name]): None for row in rows if not cells.is_missing(row[name])
            }
            examples = list(values)[:MAX_HINT_ITEMS]
            if not examples:
                continue
            verb = "has values such as"
            if len(rows) == len(self) and len(examples) == len(values):
                verb = "is" if len(examples) < 2 else "has the values"
            message += f"; column {name!r} {verb} {', '.join(examples)}"
        return message

    @cached_property
    def value_mask(self) -> np.ndarray | None:
        """A mask (m,) of the rows that have a value; None if all rows have one.

        With several value columns, a pooled value needs all of them. Other values need at least
        one.
        """
        parts = [chunk.compute_value_mask() for chunk in self._column_chunks()]
        mask = np.concatenate(parts) if parts else np.zeros(0, bool)
        return None if mask.all() else mask

    def select_mask(self, passed: np.ndarray | None) -> RowSelection:
        """Return the rows in the mask `passed` (m,) that have a value; None means all rows."""
        present = self.value_mask
        if present is None:
            return RowSelection(len(self.ids), passed)
        mask = present if passed is None else present & passed
        passed_count = len(present) if passed is None else int(np.count_nonzero(passed))
        return RowSelection(len(self.ids), mask, passed_count - int(np.count_nonzero(mask)))

    def number_bounds(self, name: str, part: int | None = None) -> tuple[float, float] | None:
        """Return the smallest and the largest number in a column; None if there is no number.

        `part` is the position in the tuples of a column of tuples.
        """
        if (name, part) not in self._number_bounds_cache:
            if part is None:
                read = [chunk.read_column(name) for chunk in self._column_chunks()]
                parts = [x.numbers[np.isin(x.kinds, columns.NUMERIC_KINDS)] for x in read]
            else:
                cells_of_part = (key[part] for key in self.read_all_keys())
                parts = [np.array([x for x in cells_of_part if isinstance(x, int | float)], float)]
            values = np.concatenate([np.zeros(0), *parts])
            ends = (float(values.min()), float(values.max())) if len(values) else None
            self._number_bounds_cache[name, part] = ends
        return self._number_bounds_cache[name, part]

    @cached_property
    def key_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The smallest and the largest number of the keys' vectors in each column, both (d,).

        None if they are unknown.
        """
        low, high = (
            np.full(self._vector_widths[0], np.inf),
            np.full(self._vector_widths[0], -np.inf),
        )
        for group in self.open_vectors().iter_spans(ROWS_PER_CHUNK, prefetch_fields=("key",)):
            for span in group:
                span.check_readable()
                keys = span.read_keys()
                low, high = np.minimum(low, keys.min(axis=0)), np.maximum(high, keys.max(axis=0))
        return low, high

    @property
    def is_int8(self) -> bool:
        """Whether the vectors of the keys are stored as int8."""
        return "scale" in self.snapshot.tensor_names

    @property
    def vector_precision(self) -> quantization.VectorPrecision:
        """How the vectors of the keys are stored."""

        dtype = self.settings.get("precision")
        return quantization.VectorPrecision(
            self.is_int8, dtype, has_codes="near.bounds" in self.snapshot.tensor_names
        )

    @property
    def precision_text(self) -> str | None:
        """The width and dtype of a key's vector, such as "64 int8"; None before the first row."""
        tensor_type = self.snapshot.tensor_type("code")
        return (
            None
            if tensor_type is None
            else f"{' × '.join(map(str, tensor_type[1]))} {tensor_type[0].name}"
        )

    def cell_kind_counts(self, name: str) -> np.ndarray:
        """Return the numbers of cells of each kind in a column, (6,)."""
        if name not in self._kind_counts_cache:
            total = np.zeros(len(columns.KIND_NAMES), np.int64)
            for chunk in self._column_chunks():
                total += np.bincount(chunk.cell_kinds(name), minlength=len(total))
            self._kind_counts_cache[name] = total
        return self._kind_counts_cache[name]

    def is_date_column(self, name: str) -> bool:
        """Return whether the first cell of the kind TEXT in a column is a date."""
        for chunk in self._column_chunks():
            position = np.flatnonzero(chunk.cell_kinds(name) == columns.TEXT)[:1]
            if len(position):
                return not isinstance(chunk.read_cells(name, position)[0], str)
        return False

    def is_integer_column(self, name: str, bits: int = 64) -> bool:
        """Return whether every number in a column is an integer of at most `bits` bits."""
        codes = (chunk.read_column(name).numbers for chunk in self._column_chunks())
        most = 2.0 ** (bits - 1)
        return all(bool(np.all((np.abs(x) < most) & (x == np.trunc(x)))) for x in codes)

    def _column_chunks(
        self, cell_kind_counts: Callable[[str], np.ndarray] | None = None
    ) -> Iterator[ColumnChunk]:
        """Yield the rows segment by segment, for conditions."""
        counts = cell_kind_counts or self.cell_kind_counts
        for segment in self._read_segments():
            yield ColumnChunk(self.snapshot, self.schema, segment, counts, self._text_cache)

    def open_vectors(
        self,
        selection: RowSelection | None = None,
        *,
        value: bool = False,
        sparse_positions: Any = None,
    ) -> StoredRows:
        """Return the vectors of the keys as rows to attend over; with `value`, also the values.

        If `selection` is None, all rows are selected. `sparse_positions` are those of an
        `EncodedQuery`; they become columns of the keys. If memory is scarce, memory is released
        after a segment was read.
        """
        selection = selection or RowSelection(len(self.ids))
        positions, gathered = selection.positions, list[RowChunk]()

        def read_segments(fields: Collection[str] = ()) -> Iterable[RowChunk]:
            if isinstance(selection, CandidateRows):
                if len(selection.positions) > MAX_GATHERED_ROWS:
                    return self._read_rows_at(selection.positions, named)
                if not gathered:  # scores and values are read one after the other
                    gathered.append(self._gather_rows(selection.positions, named))
                return gathered
            parts = self._read_segments(
                [name for field in fields for name in TENSORS_BY_FIELD[field]]
            )
            chunks = map(to_stored, parts)
            return chunks if positions is None else select_from_chunks(chunks, positions)

        def to_stored(part: Any) -> RowChunk:
            tensors, scale = part.tensors, part.tensors.get("scale")
            key, near = tensors["code"], None
            if sparse_positions is not None:
                key, scale = DenseAndSparse(key, tensors["sparse"], sparse_positions, scale), None
            else:
                near = quantization.read_codes(tensors)
            return RowChunk(
                key, tensors.get(named), part.live, scale, near, part.check_not_truncated
            )

        named, (width, wide) = "value" if value else "", self._vector_widths
        shape = (selection.read_count, width + sparse_width(sparse_positions))
        wide = wide if value else 0
        terms_by_identity = self._key_terms_cache[sparse_positions is not None]
        return StoredRows(
            read_segments,
            shape,
            wide,
            selection.read_mask,
            self._is_memory_scarce,
            KeyTermsCache(
                terms_by_identity,
                len(self.ids),
                positions,
                (lambda: self._key_sample) if sparse_positions is None else None,
                self._adapted_scores,
            ),
            self._bounds_cache if positions is None else None,
            prefetch_chunks=read_segments,
            caches_spans=positions is None and self._cached_segments is not None,
        )

    def _read_rows_at(self, positions: np.ndarray, value_name: str) -> Iterator[RowChunk]:
        """Yield the rows at ascending positions, without a pass over the other rows."""
        starts, parts, live_rows = self._located_parts
        cuts = np.searchsorted(positions, starts).tolist()
        for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
            if begin == end:
                continue
            at, live = positions[begin:end] - starts[i], live_rows[i]
            parts[i].check_not_truncated()
            rows, tensors = at if live is None else live[at], parts[i].tensors
            value, scale = (
                tensors[name][rows] if name in tensors else None for name in (value_name, "scale")
            )
            yield RowChunk(tensors["code"][rows], value, scale=scale)

    def _gather_rows(self, positions: np.ndarray, value_name: str) -> RowChunk:
        """Return the rows at ascending positions in one chunk."""
        chunks = list(self._read_rows_at(positions, value_name))
        if len(chunks) == 1:
            return chunks[0]
        keys, values, scales = (
            [np.asarray(x) for x in parts if x is not None]
            for parts in zip(*((x.key, x.value, x.scale) for x in chunks), strict=True)
        )
        return RowChunk(
            np.concatenate(keys),
            np.concatenate(values) if values else None,
            scale=np.concatenate(scales) if scales else None,
        )

    def read_tensor_at(self, name: str, positions: np.ndarray) -> np.ndarray:
        """Return a tensor of the rows at some positions in any order, (…, width) or (…)."""
        starts, parts, live_rows = self._located_parts
        count_random_reads(positions.size)
        if len(parts) == 1:
            parts[0].check_not_truncated()
            at = positions if live_rows[0] is None else live_rows[0][positions]
            return np.asarray(parts[0].tensors[name].take(at, 0))
        flat, first = positions.reshape(-1), parts[0].tensors[name]
        order = None if (flat[1:] >= flat[:-1]).all() else flat.argsort(kind="stable")
        ascending = flat if order is None else flat[order]
        rows = np.empty((len(flat), *first.shape[1:]), first.dtype)
        cuts = ascending.searchsorted(starts).tolist()
        for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
            if begin == end:
                continue
            part, live = parts[i], live_rows[i]
            part.check_not_truncated()
            at = ascending[begin:end] - starts[i]
            # All positions exist; with "clip", the rows are written without a buffer.
            part.tensors[name].take(at if live is None else live[at], 0, rows[begin:end], "clip")
        if order is not None:
            rows, in_order = np.empty_like(rows), rows
            rows[order] = in_order
        return rows.reshape(*positions.shape, *first.shape[1:])

    def read_key_vectors_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the vectors of the keys at some positions in any order, (…, width)."""
        key = self.read_tensor_at("code", positions)
        if not self.is_int8:
            return key
        scale = self.read_tensor_at("scale", positions)
        return np.asarray(key.astype(scale.dtype) * scale[..., None])

    def read_values_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the values at some positions in any order, (…, d_v)."""
        return self.read_tensor_at("value", positions)

    def key_terms_cache(self) -> KeyTermsCache:
        """Return the cached key terms of all rows."""
        return KeyTermsCache(self._key_terms_cache[False], len(self.ids))

    @cached_property
    def _key_sample(self) -> np.ndarray:
        """The vectors of the first keys, from which a score adapts to the keys."""
        first = next(iter(self._read_segments()))
        first.check_not_truncated()
        scale = first.tensors.get("scale")
        # A copy: the file may be truncated later.
        return np.array(RowChunk(first.tensors["code"], live=first.live, scale=scale).sample_keys())

    @cached_property
    def _located_parts(self) -> tuple[np.ndarray, list[Segment], list[np.ndarray | None]]:
        """The start position of each segment, the segments, and the live rows in each."""
        parts = [part.segment for part in self.snapshot.list_parts()]
        live = [None if part.live is None else np.flatnonzero(part.live) for part in parts]
        sizes = [len(p.ids) if x is None else len(x) for p, x in zip(parts, live, strict=True)]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), parts, live

    def read_key_vectors(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the vectors of the keys of these rows, (len(ids), width)."""
        read = self.snapshot.read_tensor
        scale = read("scale", ids) if self.is_int8 else None
        return RowChunk(read("code", ids), scale=scale).live_vectors()

    def _read_segments(self, ahead: Collection[str] = ()) -> Iterable[Any]:
        """Return the segments; `ahead` lists the tensors to prefetch."""
        segments = self._cached_segments
        if segments is None:
            return self.snapshot.iterate_segments(prefetch_fields=ahead)
        for part in segments:
            if part.is_truncated:
                # The snapshot opens the file again, or raises.
                for name in ("_cached_segments", "_located_parts"):
                    vars(self).pop(name, None)
                return self.snapshot.iterate_segments(prefetch_fields=ahead)
        return segments

    @cached_property
    def _cached_segments(self) -> list[Any] | None:
        """The list of segments; None if memory is scarce.

        Building the list again for each query would be slow.
        """
        if len(self) > ROWS_PER_CHUNK and self._is_memory_scarce:
            return None
        return list(self.snapshot.iterate_segments())

    @cached_property
    def _is_memory_scarce(self) -> bool:
        return self.snapshot.exceeds_memory()

    @cached_property
    def _vector_widths(self) -> tuple[int, int]:
        """The width of a key's vector, and that of a value (0 if values are not numbers)."""
        tensors = next(self.snapshot.iterate_segments()).tensors
        return tensors["code"].shape[1], tensors["value"].shape[1] if "value" in tensors else 0

    def check_query(self, encoded: EncodedQuery) -> None:
        """Raise unless the query's vectors are floats with the width of the keys' vectors."""
        query, width = encoded.code, self._vector_widths[0] + sparse_width(encoded.sparse_positions)
        if len(query.shape) != 2 or query.shape[-1] != width:
            raise ShapeError(
                f"query has shape {tuple(query.shape)}, but the keys are vectors of {width} "
                f"numbers ({self.encoder.kind}): expected (queries, {width})"
            )
        if not get_framework(query).dtype_name(query).endswith(("float16", "float32", "float64")):
            raise DtypeError(
                f"query is an array of {get_framework(query).dtype_name(query)}: cast it to floats"
            )
