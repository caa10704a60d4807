"""The view of one version: rows and their vectors, found by key, by id or by position."""

from __future__ import annotations

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
from qkv.database.query.inputs import as_key, is_number_key
from qkv.database.storage import Snapshot, limits
from qkv.database.table import cells, columns, quantization
from qkv.database.table.column_chunk import ColumnChunk, TextCache
from qkv.database.table.row_selection import RowSelection
from qkv.database.table.schema import SETTINGS_LOST_MESSAGE, Schema
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks import get_framework
from qkv.frameworks.ragged import DenseAndSparse, EncodedQuery, sparse_width
from qkv.frameworks.stored_rows import KeyTermsCache, RowChunk, StoredRows, select_from_chunks
from qkv.util.caches import insert_bounded
from qkv.util.deadline import check_deadline
from qkv.util.formatting import quote_cell

if TYPE_CHECKING:  # loaded when keys are encoded
    from qkv.database.encoders import Encoder
    from qkv.scores import Score, ScoreLike

ROWS_PER_CHUNK = 8192
"""Rows that are read at a time."""

HINT_SAMPLE_ROWS, MAX_HINT_ITEMS = 256, 5
"""Rows that a hint samples for values, and the number of columns and values that it names."""

MAX_CACHED_SELECTIONS, MAX_SELECTION_BYTES = 64, 2**26
"""The number of conditions whose rows a view caches, and the bytes of all of them."""

MAX_CACHED_QUERIES = 64
"""The number of query texts whose vectors are cached."""

TENSORS_BY_FIELD = {
    "key": ("code", "scale", "sparse"),
    "value": ("value",),
    "near": ("near", "near.bounds", "near.block"),
}
"""The tensors that each field of a `RowChunk` needs."""

IMMUTABLE_TYPES = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of cells that can be cached, since a caller cannot change them."""


class TableView:
    """The rows of one snapshot; a row's position counts the rows that are not deleted.

    `encoder` is used instead of the stored one if both have the same settings, to avoid a rebuild.
    """

    def __init__(self, snapshot: Snapshot, encoder: Encoder | None = None):
        self.snapshot, self._candidate_encoder = snapshot, encoder
        self._query_cache: dict[str, EncodedQuery] = {}
        self.version = snapshot.version
        self._row_cache: dict[int, dict[str, Any]] = {}
        self._selection_cache: dict[str | None, RowSelection] = {}
        self._kind_counts_cache: dict[str, np.ndarray] = {}
        self._key_terms_cache: dict[bool, dict[Any, np.ndarray]] = {False: {}, True: {}}
        self._bounds_cache: dict[Any, Any] = {}
        self._text_cache: TextCache = {}

    def __len__(self) -> int:
        return len(self.snapshot)

    @cached_property
    def settings(self) -> dict[str, Any]:
        return self.snapshot.settings

    def setting_number(self, name: str) -> int:
        """Return a number of the settings, or 0."""
        value = self.settings.get(name)
        return value if isinstance(value, int) else 0

    @property
    def is_initialized(self) -> bool:
        """Whether rows have fixed the schema, even if the settings with it were lost."""
        return "schema" in self.settings or len(self.snapshot) > 0

    @cached_property
    def schema(self) -> Schema:
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

    def encode_queries(self, queries: Any) -> EncodedQuery:
        """Return the vectors of queries; cache that of a single text, which may be needed again."""
        single = len(queries) == 1 and type(queries[0]) is str
        if single and (known := self._query_cache.get(queries[0])) is not None:
            return known
        try:
            encoded = self.encoder.encode_full_query(queries)
        except (ArgumentError, DtypeError, ShapeError) as error:  # its message is about keys
            message = re.sub(r"(^|where )key(?= \d)", r"\1query", str(error))
            raise type(error)(message.removesuffix(": leave that row out")) from None
        self.check_query(encoded)
        dtype = np.result_type(encoded.code, np.float32)
        encoded = encoded._replace(code=np.ascontiguousarray(encoded.code, dtype=dtype))
        if single:
            if len(self._query_cache) >= MAX_CACHED_QUERIES:
                self._query_cache = {}
            self._query_cache[queries[0]] = encoded
        return encoded

    def resolve_score(self, score: ScoreLike | None) -> Score:
        """Return the score, by default the encoder's."""
        if score is None:
            return self._default_score
        from qkv import scores

        return scores.resolve(score)

    @cached_property
    def _default_score(self) -> Score:
        return self.encoder.default_score(len(self))

    @cached_property
    def has_sparse_vectors(self) -> bool:
        """Whether the keys have sparse vectors in addition to the dense ones."""
        return "sparse" in self.snapshot.tensor_names

    @property
    def ids(self) -> np.ndarray:
        """The row id at each position, (m,), for rows whose vectors can be read."""
        return self._ids_and_chunk_count[0]

    @property
    def chunk_count(self) -> int:
        """The number of segments that a scan reads."""
        return self._ids_and_chunk_count[1]

    @cached_property
    def _ids_and_chunk_count(self) -> tuple[np.ndarray, int]:
        segments = self.snapshot.iterate_segments()
        live = [each.ids if each.live is None else each.ids[each.live] for each in segments]
        ids = np.concatenate([np.zeros(0, np.int64), *live])
        return self.snapshot.check_complete(ids), len(live)

    def inherit_encoder(self, old: TableView) -> None:
        """Reuse the encoder of an older view if the settings are the same."""
        # "promise" is the calibration, which does not change the vectors.
        same = {**old.settings, "promise": 0} == {**self.settings, "promise": 0}
        if same and "encoder" in vars(old):
            vars(self)["encoder"] = old.encoder

    def find_ids(self, key: Any) -> list[int]:
        """Return the ids of the rows with exactly this key, oldest first."""
        digest = self._key_digest(key)
        return [] if digest is None else self.snapshot.find_ids(digest)

    def find_value(self, key: Any, default: Any) -> Any:
        """Return the value of the newest row with exactly this key, or the default."""
        digest = self._key_digest(key)
        found = None if digest is None else self.snapshot.find_newest(digest)
        if found is None:
            return default
        row = cells.load_row(found[1])
        if self.has_vector_values:
            self._fill_vectors(found[:1], [row])
        return self.schema.row_value(row)

    def find_newest_value(self, key: Any, default: Any) -> Any:
        """Return the value in the store's newest version, if values are not vectors.

        This view may be older, since the schema is the same in all versions.
        """
        digest = self._key_digest(key)
        found = None if digest is None else self.snapshot.find_latest_record(digest)
        return default if found is None else self.schema.row_value(cells.load_row(found[1]))

    @cached_property
    def has_vector_values(self) -> bool:
        """Whether values are vectors, which are stored as tensors and not in the records."""
        return not self.schema.vector_columns.keys().isdisjoint(self.schema.value)

    def _key_digest(self, key: Any) -> bytes | None:
        if not self.is_initialized:
            return None
        try:
            if type(key) is not str:
                key = as_key(key, self.schema.key_kind)
            found = self.schema.key_digest(key)
        except (TypeError, ValueError):
            return None  # no row has a key that cannot be stored
        if self.schema.key_kind == "date" and not self.snapshot.find_ids(found):
            others = map(
                self.schema.key_digest, parsing.equivalent_dates(parsing.parse_moment(key))
            )
            return next(filter(self.snapshot.find_ids, others), found)
        return found

    @cached_property
    def key_kinds(self) -> dict[str, str]:
        """The kind of the first row's cell in each key column."""
        row = next((row for _, row in self.iterate_rows()), {})
        return {name: cells.cell_kind(row[name]) for name in self.schema.key if name in row}

    @cached_property
    def has_number_keys(self) -> bool:
        """Whether keys are tuples of numbers or dates, so that an array of numbers is a key."""
        if self.schema.key_kind != "tuple":
            return False
        encoder: Any = getattr(self.encoder, "base", self.encoder)
        if encoder.kind == "columns" and any(head.kind != "numbers" for head in encoder.heads):
            return False
        row = next((row for _, row in self.iterate_rows()), None)
        return row is not None and is_number_key(self.schema.row_key(row))

    def read_rows(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        short, fresh = self._row_cache, {}
        new = [id_ for id_ in ids if id_ not in short]
        if new:
            if len(short) + len(new) > limits.MAX_CACHED_ROWS:
                self._row_cache = {}
            for id_, text in zip(new, self.snapshot.read_records(new), strict=True):
                fresh[id_] = row = cells.load_row(text)
                if len(text) <= limits.MAX_CACHED_ROW_CHARACTERS and IMMUTABLE_TYPES.issuperset(
                    map(type, row.values())
                ):
                    self._row_cache[id_] = row
        return self._fill_vectors(ids, [(fresh if i in fresh else short)[i].copy() for i in ids])

    def read_values(self, ids: Sequence[int]) -> list[Any]:
        return self.schema.values_from_rows(self.read_rows(ids)) if len(ids) else []

    def iterate_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield every row with its id, oldest first."""
        ids: list[int] = []
        rows: list[dict[str, Any]] = []
        some = self.ids if self.is_initialized and self.schema.vector_columns else None
        for id_, text in self.snapshot.iterate_rows(some):
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
        """Return the keys of a database whose keys are vectors."""
        given = "key" in self.snapshot.tensor_names
        return (
            np.asarray(self.snapshot.read_tensor("key", ids))
            if given
            else self.read_key_vectors(ids)
        )

    def _fill_vectors(
        self, ids: Sequence[int] | np.ndarray, rows: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Add the cells that are vectors, which are stored as tensors, to the rows."""
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
        """Return which rows pass a condition, (m,), or None if there is no condition."""
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
        identity = None if condition.text is None else (condition.text, *kinds)
        results = results_of_store(self.snapshot.store_identity)

        def evaluate_chunk(chunk: ColumnChunk) -> np.ndarray:
            if identity is None:
                return condition(chunk).passes
            return results.find_or_evaluate(identity, chunk.ids, lambda: condition(chunk).passes)

        parts = list(map(evaluate_chunk, self._column_chunks(counts)))
        return np.concatenate(parts) if parts else np.zeros(0, bool)

    def select_rows(self, where: Any = None) -> RowSelection:
        """Return the rows that pass a condition and have a value."""
        is_cacheable = where is None or type(where) is str
        selection = self._selection_cache.get(where) if is_cacheable else None
        if selection is None:
            selection = self.select_mask(self.filter_rows(where))
            if is_cacheable:
                # A mask takes one byte per row, and the positions of a quarter of the rows two.
                most = MAX_SELECTION_BYTES // (3 * len(self.ids) + 1)
                most = max(min(most, MAX_CACHED_SELECTIONS), 1)
                insert_bounded(self._selection_cache, where, selection, most)
        return selection

    def why_none_pass(self, where: Any) -> str:
        """Say that no row passes, with example values of the columns; "" if some row passes."""
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
        """Which rows have a value, (m,), or None if all do.

        With several value columns, a pooled value needs all of them, other values at least one.
        """
        parts = [chunk.compute_value_mask() for chunk in self._column_chunks()]
        mask = np.concatenate(parts) if parts else np.zeros(0, bool)
        return None if mask.all() else mask

    def select_mask(self, passed: np.ndarray | None) -> RowSelection:
        """Return the rows that are marked and have a value; None marks all."""
        present = self.value_mask
        if present is None:
            return RowSelection(len(self.ids), passed)
        mask = present if passed is None else present & passed
        marked = len(present) if passed is None else int(np.count_nonzero(passed))
        return RowSelection(len(self.ids), mask, marked - int(np.count_nonzero(mask)))

    @property
    def is_int8(self) -> bool:
        """Whether the keys' vectors are stored as int8."""
        return "scale" in self.snapshot.tensor_names

    @property
    def vector_precision(self) -> quantization.VectorPrecision:
        """How the keys' vectors are stored."""

        dtype = self.settings.get("precision")
        return quantization.VectorPrecision(
            self.is_int8, dtype, has_codes="near.bounds" in self.snapshot.tensor_names
        )

    @property
    def precision_text(self) -> str | None:
        """Width and dtype of a key's vector, such as "64 int8"; None before the first row."""
        found = self.snapshot.tensor_type("code")
        return None if found is None else f"{' × '.join(map(str, found[1]))} {found[0].name}"

    def cell_kind_counts(self, name: str) -> np.ndarray:
        """Return the number of cells of each kind in a column, (6,)."""
        if name not in self._kind_counts_cache:
            total = np.zeros(len(columns.KIND_NAMES), np.int64)
            for chunk in self._column_chunks():
                total += np.bincount(chunk.cell_kinds(name), minlength=len(total))
            self._kind_counts_cache[name] = total
        return self._kind_counts_cache[name]

    def is_date_column(self, name: str) -> bool:
        """Return whether the first cell of kind TEXT in a column is a date."""
        for chunk in self._column_chunks():
            at = np.flatnonzero(chunk.cell_kinds(name) == columns.TEXT)[:1]
            if len(at):
                return not isinstance(chunk.read_cells(name, at)[0], str)
        return False

    def is_integer_column(self, name: str, bits: int = 64) -> bool:
        """Return whether every number of a column is an integer of at most this many bits."""
        codes = (chunk.read_column(name).numbers for chunk in self._column_chunks())
        most = 2.0 ** (bits - 1)
        return all(bool(np.all((np.abs(x) < most) & (x == np.trunc(x)))) for x in codes)

    def _column_chunks(
        self, cell_kind_counts: Callable[[str], np.ndarray] | None = None
    ) -> Iterator[ColumnChunk]:
        counts = cell_kind_counts or self.cell_kind_counts
        for segment in self._read_segments():
            yield ColumnChunk(self.snapshot, self.schema, segment, counts, self._text_cache)

    def open_vectors(
        self, selection: RowSelection | None = None, *, value: bool = False, asked: Any = None
    ) -> StoredRows:
        """Return the keys' vectors, and with `value` the values, as rows to attend over.

        `selection` None selects all rows. `asked` are the positions of an `EncodedQuery` in the
        sparse vectors, which become columns of the keys. If memory is scarce, pages are released
        after use.
        """
        selection = selection or RowSelection(len(self.ids))
        positions = selection.positions

        def read_segments(fields: Collection[str] = ()) -> Iterable[RowChunk]:
            parts = self._read_segments(
                [name for field in fields for name in TENSORS_BY_FIELD[field]]
            )
            chunks = map(to_stored, parts)
            return chunks if positions is None else select_from_chunks(chunks, positions)

        def to_stored(part: Any) -> RowChunk:
            tensors, scale = part.tensors, part.tensors.get("scale")
            key, near = tensors["code"], None
            if asked is not None:
                key, scale = DenseAndSparse(key, tensors["sparse"], asked, scale), None
            else:
                near = quantization.read_codes(tensors)
            return RowChunk(
                key, tensors.get(named), part.live, scale, near, part.check_not_truncated
            )

        named, (width, wide) = "value" if value else "", self._vector_widths
        shape, wide = (selection.read_count, width + sparse_width(asked)), wide if value else 0
        return StoredRows(
            read_segments,
            shape,
            wide,
            selection.read_mask,
            self._is_memory_scarce,
            KeyTermsCache(self._key_terms_cache[asked is not None], len(self.ids), positions),
            self._bounds_cache if positions is None else None,
            prefetch_chunks=read_segments,
        )

    def read_key_vectors(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the vectors of these rows' keys, (len(ids), width)."""
        read = self.snapshot.read_tensor
        scale = read("scale", ids) if self.is_int8 else None
        return RowChunk(read("code", ids), scale=scale).live_vectors()

    def _read_segments(self, ahead: Collection[str] = ()) -> Iterable[Any]:
        if self._cached_segments is None:
            return self.snapshot.iterate_segments(prefetch_fields=ahead)
        for part in self._cached_segments:
            part.check_not_truncated()
        return self._cached_segments

    @cached_property
    def _cached_segments(self) -> list[Any] | None:
        """The segments of a small table, which are faster to keep than to list again."""
        return list(self.snapshot.iterate_segments()) if len(self) <= ROWS_PER_CHUNK else None

    @cached_property
    def _is_memory_scarce(self) -> bool:
        return self.snapshot.exceeds_memory()

    @cached_property
    def _vector_widths(self) -> tuple[int, int]:
        """The widths of a key's and of a value's vector."""
        tensors = next(self.snapshot.iterate_segments()).tensors
        return tensors["code"].shape[1], tensors["value"].shape[1] if "value" in tensors else 0

    def check_query(self, asked: EncodedQuery) -> None:
        """Check that the query vectors have the width of the keys' and a float dtype."""
        query, width = asked.code, self._vector_widths[0] + sparse_width(asked.sparse_positions)
        if len(query.shape) != 2 or query.shape[-1] != width:
            raise ShapeError(
                f"query has shape {tuple(query.shape)}, but the keys are vectors of {width} "
                f"numbers ({self.encoder.kind}): expected (queries, {width})"
            )
        if not get_framework(query).dtype_name(query).endswith(("float16", "float32", "float64")):
            raise DtypeError(
                f"query is an array of {get_framework(query).dtype_name(query)}: cast it to floats"
            )
