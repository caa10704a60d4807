"""One version of a database as it is read: rows with their vectors, found by key or by place."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.database import parsing
from qkv.database.errors import StoreDamagedError
from qkv.database.filter.column_chunk import ColumnChunk
from qkv.database.filter.comparisons import DistinctTexts
from qkv.database.filter.expressions import (
    PartialTableCondition,
    as_text,
    columns_in,
    compile_condition,
)
from qkv.database.query.inputs import as_key, is_number_key
from qkv.database.storage import Snapshot, limits
from qkv.database.table import cells, columns
from qkv.database.table import quantization as codes
from qkv.database.table.schema import SETTINGS_LOST_MESSAGE, Schema
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks import get_framework
from qkv.frameworks.ragged import DenseAndSparse, EncodedQuery, sparse_width
from qkv.frameworks.stored_rows import RowChunk, StoredRows
from qkv.util.deadline import check_deadline
from qkv.util.formatting import quote_cell

if TYPE_CHECKING:  # loaded when keys are encoded
    from qkv.database.encoders import Encoder
    from qkv.database.table.encoding import VectorPrecision
    from qkv.scores import Score, ScoreLike

ROWS_PER_CHUNK = 8192
"""Rows that are read together."""

SAMPLED, NAMED = 256, 5
"""Rows in which a hint looks for values of a column, and how many columns and values it names."""

MAX_FILTER_CACHE_BYTES = 2**26
"""Bytes, one for each row, of the conditions that are remembered."""

MAX_PICKED_SHARE = 0.25
"""The share of rows up to which those that may answer are picked out, not masked."""

MAX_CACHED_QUERIES = 64
"""Texts whose vectors are kept."""

TENSORS_BY_FIELD = {
    "key": ("code", "scale", "sparse"),
    "value": ("value",),
    "near": ("near", "near.bounds", "near.block"),
}
"""The tensors of what is `RowChunk`."""

IMMUTABLE_TYPES = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of cells that nobody can change after they were remembered."""


class TableView:
    """The rows of one snapshot under their schema; a row's place is its position among the live.

    `encoder` is one that may be the stored one already, so that it need not be built again.
    """

    def __init__(self, snapshot: Snapshot, encoder: Encoder | None = None):
        self.snapshot, self._candidate_encoder = snapshot, encoder
        self._query_cache: dict[str, EncodedQuery] = {}
        self.version = snapshot.version
        self._row_cache: dict[int, dict[str, Any]] = {}
        self._filter_cache: dict[str, np.ndarray] = {}
        self._kind_counts_cache: dict[str, np.ndarray] = {}
        self._key_terms_cache: dict[bool, dict[Any, np.ndarray]] = {False: {}, True: {}}
        self._bounds_cache: dict[Any, Any] = {}
        self.text_cache: dict[tuple[str, int, int], DistinctTexts] = {}

    def __len__(self) -> int:
        return len(self.snapshot)

    @cached_property
    def settings(self) -> dict[str, Any]:
        return self.snapshot.settings

    def setting_number(self, name: str) -> int:
        """A number of the settings; 0 where it is none."""
        told = self.settings.get(name)
        return told if isinstance(told, int) else 0

    @property
    def is_initialized(self) -> bool:
        """Whether there were ever rows, which fixed the schema: it may be lost, not made anew."""
        return "schema" in self.settings or len(self.snapshot) > 0

    @cached_property
    def schema(self) -> Schema:
        found = Schema.from_dict(self.settings.get("schema", {}))
        needed = {f"kinds/{x}" for x in found.columns if found.vector_columns.get(x) != "key"} | {
            "code"
        }
        if len(self.snapshot) and not needed <= {*self.snapshot.tensor_names}:
            raise StoreDamagedError(SETTINGS_LOST_MESSAGE)
        return found

    @cached_property
    def encoder(self) -> Encoder:
        from qkv.database import encoders

        told, given, learned = (
            self.settings.get("encoder", {}),
            self._candidate_encoder,
            self.snapshot.read_arrays(),
        )
        if given is not None and given.settings() == told and not (given.arrays() or learned):
            return given
        return encoders.load(told, learned, given)

    def encode_queries(self, queries: Any) -> EncodedQuery:
        """The vectors of queries; those of the last single texts are remembered, as an answer asks
        for its own again."""
        single = len(queries) == 1 and type(queries[0]) is str
        if single and (known := self._query_cache.get(queries[0])) is not None:
            return known
        try:
            found = self.encoder.encode_full_query(queries)
        except (ArgumentError, DtypeError, ShapeError) as fault:  # which tells of keys in rows
            told = re.sub(r"(^|where )key(?= \d)", r"\1query", str(fault))
            raise type(fault)(told.removesuffix(": leave that row out")) from None
        self.check_query(found)
        wide = np.result_type(found.code, np.float32)
        found = found._replace(code=np.ascontiguousarray(found.code, dtype=wide))
        if single:
            if len(self._query_cache) >= MAX_CACHED_QUERIES:
                self._query_cache = {}
            self._query_cache[queries[0]] = found
        return found

    def resolve_score(self, wish: ScoreLike | None) -> Score:
        """The score that is wished for; without a wish, as the encoder says."""
        if wish is None:
            return self._default_score
        from qkv import scores

        return scores.resolve(wish)

    @cached_property
    def _default_score(self) -> Score:
        return self.encoder.default_score(len(self))

    @cached_property
    def has_sparse_vectors(self) -> bool:
        """Whether sparse vectors lie beside the keys' vectors."""
        return "sparse" in self.snapshot.tensor_names

    @property
    def ids(self) -> np.ndarray:
        """The id of each place, (m,): the rows whose vectors can be read."""
        return self._ids_and_chunk_count[0]

    @property
    def chunk_count(self) -> int:
        """How many times a scan goes on elsewhere."""
        return self._ids_and_chunk_count[1]

    @cached_property
    def _ids_and_chunk_count(self) -> tuple[np.ndarray, int]:
        parts = self.snapshot.iterate_segments()
        live = [part.ids if part.live is None else part.ids[part.live] for part in parts]
        return self.snapshot.check_complete(np.concatenate([np.zeros(0, np.int64), *live])), len(
            live
        )

    def inherit_encoder(self, old: TableView) -> None:
        """Take over what an older view of the same vectors has built."""
        same = {**old.settings, "promise": 0} == {**self.settings, "promise": 0}
        if same and "encoder" in vars(old):  # a promise changes no vector
            vars(self)["encoder"] = old.encoder

    def find_ids(self, key: Any) -> list[int]:
        """The ids of the rows with exactly this key, oldest first."""
        digest = self._key_digest(key)
        return [] if digest is None else self.snapshot.find_ids(digest)

    def find_value(self, key: Any, default: Any) -> Any:
        """The value of the last row with exactly this key, or the default where there is none."""
        digest = self._key_digest(key)
        found = None if digest is None else self.snapshot.find_newest(digest)
        if found is None:
            return default
        row = cells.load_row(found[1])
        if self.has_vector_values:
            self._fill_vectors(found[:1], [row])
        return self.schema.row_value(row)

    def find_newest_value(self, key: Any, default: Any) -> Any:
        """The same in the newest version, where nothing of a value lies apart: rows are of one
        schema in all versions."""
        digest = self._key_digest(key)
        found = None if digest is None else self.snapshot.find_latest_record(digest)
        return default if found is None else self.schema.row_value(cells.load_row(found[1]))

    @cached_property
    def has_vector_values(self) -> bool:
        """Whether values are vectors, which lie beside the keys' and not in the records."""
        return not self.schema.vector_columns.keys().isdisjoint(self.schema.value)

    def _key_digest(self, key: Any) -> bytes | None:
        if not self.is_initialized:
            return None
        try:
            if type(key) is not str:
                key = as_key(key, self.schema.key_kind)
            found = self.schema.key_digest(key)
        except (TypeError, ValueError):
            return None  # what cannot be kept is nobody's key
        if self.schema.key_kind == "date" and not self.snapshot.find_ids(found):
            others = map(
                self.schema.key_digest, parsing.equivalent_dates(parsing.parse_moment(key))
            )
            return next(filter(self.snapshot.find_ids, others), found)
        return found

    @cached_property
    def key_kinds(self) -> dict[str, str]:
        """What the first row has in each column of the key."""
        row = next((row for _, row in self.iterate_rows()), {})
        return {name: cells.cell_kind(row[name]) for name in self.schema.key if name in row}

    @cached_property
    def has_number_keys(self) -> bool:
        """Whether keys are tuples of numbers or dates, so that an array of numbers may be one."""
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
        """Every id and row, oldest first."""
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
        """Every key: a list, or an array of vectors."""
        if self.schema.key_kind == "vector":
            return self._read_vector_keys(self.ids)
        return [
            self.schema.row_key(cells.load_row(text)) for _, text in self.snapshot.iterate_rows()
        ]

    def _read_vector_keys(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The vectors that were given as keys."""
        given = "key" in self.snapshot.tensor_names
        return (
            np.asarray(self.snapshot.read_tensor("key", ids))
            if given
            else self.read_key_vectors(ids)
        )

    def _fill_vectors(
        self, ids: Sequence[int] | np.ndarray, rows: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Rows with the vectors that are kept beside them."""
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

    def filter_rows(self, wish: Any) -> np.ndarray | None:
        """Which rows pass a condition, (m,); None where all do."""
        census = None
        if isinstance(wish, PartialTableCondition):
            wish, census = wish.where, wish.cell_kind_counts.__getitem__
        if wish is None:
            return None
        if callable(wish):
            passed = [id_ for id_, row in self.iterate_rows() if wish(row)]
            return np.isin(self.ids, np.array(passed, np.int64), assume_unique=True)
        known = self._filter_cache.get(wish) if isinstance(wish, str) else None
        if known is not None:
            return known
        passes = compile_condition(wish, self.schema.columns if self.is_initialized else ())
        parts = [passes(ColumnChunk(self, part, census)).passes for part in self._read_segments()]
        found = np.concatenate(parts) if parts else np.zeros(0, bool)
        if isinstance(wish, str):
            if (len(self._filter_cache) + 1) * len(found) > MAX_FILTER_CACHE_BYTES:
                self._filter_cache = {}
            self._filter_cache[wish] = found
        return found

    def why_none_pass(self, where: Any) -> str:
        """That no row passes a condition, with values that its columns have among the first rows;
        empty where some row passes, or there is no condition."""
        passed = self.filter_rows(where)
        if passed is None or passed.any():
            return ""
        told = f"No rows match {as_text(where)}"
        names = [
            x for x in columns_in(where, self.schema.columns) if x not in self.schema.vector_columns
        ]
        rows = self.read_rows(self.ids[:SAMPLED].tolist()) if names else []
        for name in names[:NAMED]:
            values = {
                quote_cell(row[name]): None for row in rows if not cells.is_missing(row[name])
            }
            some = list(values)[:NAMED]
            whole = len(rows) == len(self) and len(some) == len(values)
            such = ("is" if len(some) < 2 else "has the values") if whole else "has values such as"
            told += f"; column {name!r} {such} {', '.join(some)}" if some else ""
        return told

    @cached_property
    def value_mask(self) -> np.ndarray | None:
        """Which rows have a value, (m,); None where all do. Of several columns all must be missing,
        or one that is to be pooled."""
        parts = [piece.compute_value_mask() for piece in self._column_chunks()]
        found = np.concatenate(parts) if parts else np.zeros(0, bool)
        return None if found.all() else found

    def mask_missing_values(self, allowed: np.ndarray | None) -> tuple[np.ndarray | None, int]:
        """The rows that are allowed and have a value, and how many of the allowed have none."""
        present = self.value_mask
        if present is None:
            return allowed, 0
        both = present if allowed is None else present & allowed
        asked = len(present) if allowed is None else int(np.count_nonzero(allowed))
        return both, asked - int(np.count_nonzero(both))

    @property
    def is_int8(self) -> bool:
        """Whether the keys' vectors are kept in 8 bits."""
        return "scale" in self.snapshot.tensor_names

    @property
    def vector_precision(self) -> VectorPrecision:
        """How the keys' vectors are kept."""
        from qkv.database.table.encoding import VectorPrecision

        told = self.settings.get("precision")
        return VectorPrecision(
            self.is_int8, told, has_codes="near.bounds" in self.snapshot.tensor_names
        )

    @property
    def precision_text(self) -> str | None:
        """The numbers of a key's vector, and their type; None before the first row."""
        found = self.snapshot.tensor_type("code")
        return None if found is None else f"{' × '.join(map(str, found[1]))} {found[0].name}"

    def cell_kind_counts(self, name: str) -> np.ndarray:
        """How many cells of a column are of each kind of `columns`, (6,)."""
        if name not in self._kind_counts_cache:
            total = np.zeros(len(columns.KIND_NAMES), np.int64)
            for piece in self._column_chunks():
                total += np.bincount(piece.cell_kinds(name), minlength=len(total))
            self._kind_counts_cache[name] = total
        return self._kind_counts_cache[name]

    def is_date_column(self, name: str) -> bool:
        """Whether what a column holds of text and dates is dates: the first of them tells."""
        for piece in self._column_chunks():
            at = np.flatnonzero(piece.cell_kinds(name) == columns.TEXT)[:1]
            if len(at):
                return not isinstance(piece.read_cells(name, at)[0], str)
        return False

    def is_integer_column(self, name: str, bits: int = 64) -> bool:
        """Whether each number of a column is an int of so many bits, or equal to one."""
        codes = (piece.read_column(name).numbers for piece in self._column_chunks())
        most = 2.0 ** (bits - 1)
        return all(bool(np.all((np.abs(x) < most) & (x == np.trunc(x)))) for x in codes)

    def _column_chunks(self) -> Iterator[ColumnChunk]:
        return (ColumnChunk(self, part) for part in self._read_segments())

    def open_vectors(
        self, allowed: np.ndarray | None = None, *, value: bool = False, asked: Any = None
    ) -> StoredRows:
        """The keys' vectors, and the values if they are numbers, to be attended over.

        `allowed` (m,) rules some of them out. Sparse vectors come beside, for the places that a
        `EncodedQuery` has `asked`. Where memory is scarce, pages are let go as the next part is
        read.
        """
        kept, (picked, count) = self._key_terms_cache[asked is not None], self.pick_rows(allowed)
        if picked is not None:
            allowed, kept = None, {kind: x[picked] for kind, x in kept.items()}

        def read_segments(fields: Collection[str] = ()) -> Iterable[RowChunk]:
            parts = self._read_segments(
                [name for field in fields for name in TENSORS_BY_FIELD[field]]
            )
            return map(to_stored, parts) if picked is None else pick_segments(parts, picked)

        def pick_segments(parts: Iterable[Any], picked: np.ndarray) -> Iterator[RowChunk]:
            at = 0
            for part in parts:
                live = np.ones(len(part.ids), bool) if part.live is None else part.live.copy()
                size = int(np.count_nonzero(live))
                live[live], at = picked[at : at + size], at + size
                yield to_stored(part)._replace(live=live)

        def to_stored(part: Any) -> RowChunk:
            tensors, scale = part.tensors, part.tensors.get("scale")
            key, near = tensors["code"], None
            if asked is not None:
                key, scale = DenseAndSparse(key, tensors["sparse"], asked, scale), None
            else:
                near = codes.read_codes(tensors)
            return RowChunk(
                key, tensors.get(named), part.live, scale, near, part.check_not_truncated
            )

        named, (width, wide) = "value" if value else "", self._vector_widths
        shape, wide = (count, width + sparse_width(asked)), wide if value else 0
        bounds = self._bounds_cache if picked is None else None
        return StoredRows(
            read_segments,
            shape,
            wide,
            allowed,
            self._is_memory_scarce,
            kept,
            bounds,
            ahead=read_segments,
        )

    def pick_rows(self, allowed: np.ndarray | None) -> tuple[np.ndarray | None, int]:
        """The rows that are allowed where they are so few that they are read alone, else None; and
        how many are read."""
        count = 0 if allowed is None else int(np.count_nonzero(allowed))
        few = 0 < count <= MAX_PICKED_SHARE * len(self.ids)
        return (allowed, count) if few else (None, len(self.ids))

    def read_key_vectors(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The vectors of some rows' keys, (len(ids), width)."""
        read = self.snapshot.read_tensor
        scale = read("scale", ids) if self.is_int8 else None
        return RowChunk(read("code", ids), scale=scale).live_vectors()

    def _read_segments(self, ahead: Collection[str] = ()) -> Iterable[Any]:
        if self._cached_segments is None:
            return self.snapshot.iterate_segments(ahead=ahead)
        for part in self._cached_segments:
            part.check_not_truncated()
        return self._cached_segments

    @cached_property
    def _cached_segments(self) -> list[Any] | None:
        """The parts of few rows, which are read in less time than they are listed."""
        return list(self.snapshot.iterate_segments()) if len(self) <= ROWS_PER_CHUNK else None

    @cached_property
    def _is_memory_scarce(self) -> bool:
        return self.snapshot.exceeds_memory()

    @cached_property
    def _vector_widths(self) -> tuple[int, int]:
        """Numbers in the vector of a key, and of a value."""
        tensors = next(self.snapshot.iterate_segments()).tensors
        return tensors["code"].shape[1], tensors["value"].shape[1] if "value" in tensors else 0

    def check_query(self, asked: EncodedQuery) -> None:
        """Refuse vectors that cannot be compared with the keys'."""
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
