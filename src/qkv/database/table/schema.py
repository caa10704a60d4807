"""The schema of a table: its columns, its key and value, and their kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence, Set, ValuesView
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np

from qkv.database.errors import SkippedRowsWarning, StoreDamagedError, report_skipped_rows
from qkv.database.table import cells
from qkv.errors import (
    ArgumentError,
    DtypeError,
    ShapeError,
    format_plural,
    join_alternatives,
    unknown_name_error,
)
from qkv.frameworks import is_array, to_numpy
from qkv.util.data_frames import arrow_to_cells
from qkv.util.formatting import quote_cell
from qkv.util.types import UNSET

ColumnData = dict[str, Any]
"""The cells of each column by name: a list, or an array (m, d) with one vector per row."""


SETTINGS_LOST_MESSAGE = (
    "the settings of the store, which describe its columns, are lost or invalid: restore the file "
    "catalogue.sqlite from a backup"
)


@dataclass(frozen=True)
class Schema:
    """The columns of a database and their types, which the first rows fix.

    A key of several columns is a tuple, and a value of several columns is a mapping. `key_kind` and
    `value_kind` are results of `cells.cell_kind`. `value_kind` may also be "numbers" (several
    columns of numbers) or "any".
    """

    columns: tuple[str, ...]
    key: tuple[str, ...]
    value: tuple[str, ...]
    key_kind: str
    value_kind: str
    unique: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Schema:
        """Return the schema from stored settings, which may be damaged."""
        try:
            fields: dict[str, Any] = {
                name: tuple(x) if isinstance(x, list) else x for name, x in settings.items()
            }
            schema = cls(**fields)
        except (AttributeError, TypeError):
            schema = cls((), (), (), "", "")
        is_valid = all(
            isinstance(names, tuple) and names and all(isinstance(name, str) for name in names)
            for names in (schema.columns, schema.key, schema.value)
        )
        kinds = (schema.key_kind, schema.value_kind)
        is_valid = is_valid and all(isinstance(kind, str) for kind in kinds)
        if not is_valid or not {*schema.key, *schema.value} <= {*schema.columns}:
            raise StoreDamagedError(SETTINGS_LOST_MESSAGE)
        return schema

    @classmethod
    def from_columns(
        cls, columns: ColumnData, key: Sequence[str], value: Sequence[str], unique: bool
    ) -> Schema:
        """Return the schema that the first rows fix."""
        for name in (*key, *value):
            if name not in columns:
                raise unknown_name_error("column", name, columns)
        key_kind = "tuple" if len(key) > 1 else _key_column_kind(columns[key[0]], key[0])
        if key_kind == "any":
            kinds = sorted({cells.cell_kind(x) for x in columns[key[0]]})
            raise DtypeError(
                f"the keys (column {key[0]!r}) are of several types, {', '.join(kinds)}, but the "
                "keys of a database must have one type: convert them, for example with str"
            )
        kinds = [column_kind(columns[name]) for name in value]
        if len(value) == 1:
            value_kind = kinds[0]
        else:
            value_kind = "numbers" if kinds and set(kinds) == {"number"} else "any"
        return cls(tuple(columns), tuple(key), tuple(value), key_kind, value_kind, unique)

    @property
    def can_pool_values(self) -> bool:
        """Whether values are numbers or vectors, so that Σ αᵢ vᵢ is defined."""
        return self.value_kind in ("number", "numbers", "vector")

    @cached_property
    def vector_columns(self) -> dict[str, str]:
        """The role, "key" or "value", of each column of vectors.

        These are not stored in records.
        """
        roles = {"key": (self.key_kind, self.key), "value": (self.value_kind, self.value)}
        return {names[0]: role for role, (kind, names) in roles.items() if kind == "vector"}

    def keys_from_columns(self, columns: ColumnData) -> Any:
        """Return the keys as a list, or as an array of vectors."""
        if len(self.key) == 1:
            return columns[self.key[0]]
        return list(zip(*(columns[name] for name in self.key), strict=True))

    def row_key(self, row: Mapping[str, Any]) -> Any:
        """Return the key of a row."""
        if len(self.key) == 1:
            return row.get(self.key[0])
        return tuple(row.get(name) for name in self.key)

    def keys_from_rows(self, rows: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Return the keys of rows."""
        if len(self.key) == 1:
            (name,) = self.key
            return [row.get(name) for row in rows]
        return list(map(self.row_key, rows))

    def key_digest(self, key: Any) -> bytes:
        """Return the digest with which a key is looked up."""
        if self.key_kind == "vector" and is_array(key) and key.ndim == 1:
            return cells.vector_digest(key)
        return cells.key_digest(key)

    def key_digests(self, keys: Any) -> list[bytes]:
        """Return the digests of several keys, or of the rows of an array (m, d)."""
        if self.key_kind == "vector":
            return cells.vector_digests(stack_vectors(keys, "key"))
        return cells.key_digests(keys)

    def row_value(self, row: Mapping[str, Any]) -> Any:
        """Return the value of a row."""
        if len(self.value) == 1:
            return row.get(self.value[0])
        return {name: row.get(name) for name in self.value}

    def values_from_rows(self, rows: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Return the values of rows."""
        if len(self.value) == 1:
            (name,) = self.value
            return [row.get(name) for row in rows]
        return list(map(self.row_value, rows))

    def check_types(self, columns: ColumnData) -> None:
        """Raise `DtypeError` if keys or values have other types than those of the first rows."""
        keys = self.keys_from_columns(columns)
        if len(self.key) == 1:
            came = _key_column_kind(keys, self.key[0])
            if came != self.key_kind:
                raise DtypeError(
                    f"a key is {_describe_example(keys, self.key_kind)}, but the first rows fixed "
                    f"the type of keys: {self.key_kind}"
                )
        if self.value_kind in ("any", "json"):
            return
        for name in self.value:
            expected = "number" if self.value_kind == "numbers" else self.value_kind
            column = columns[name]
            present = is_array(column) or not all(map(cells.is_missing, column))
            if present and column_kind(column) != expected:
                raise DtypeError(
                    f"a value is {_describe_example(column, expected)}, but the first rows fixed "
                    f"the type of values: {expected}"
                )

    def with_inferred_value_kind(self, columns: ColumnData) -> Schema:
        """Return the schema with values that are numbers, if `columns` has numbers as values.

        Otherwise, or if the type of the values is fixed already, return the schema unchanged.
        """
        kinds = {column_kind(columns[name]) for name in self.value}
        if self.value_kind != "any" or kinds != {"number"}:
            return self
        return replace(self, value_kind="numbers" if len(self.value) > 1 else "number")

    def fill_columns(self, columns: ColumnData) -> ColumnData:
        """Return rows with all columns of the table.

        The cells of columns that were not passed are None.
        """
        schema_columns = set(self.columns)
        for name in columns:
            if name not in schema_columns:
                raise unknown_name_error("column", name, self.columns)
        size = count_rows(columns)
        for name in (*self.key, *self.value):
            if name not in columns:
                raise ArgumentError(
                    f"the rows have no column {name!r}, which is a part of the key or value: add it"
                )
        filled = {name: columns.get(name, [None] * size) for name in self.columns}
        for name in self.vector_columns:  # the caller may pass vectors as lists
            if not is_array(filled[name]):
                filled[name] = [
                    np.array(x, float) if cells.is_number_list(x) else x for x in filled[name]
                ]
        return filled

    def build_value_array(self, columns: ColumnData) -> np.ndarray | None:
        """Return the values as an array (m, d_v); None if they are neither numbers nor vectors."""
        if self.value_kind == "vector":
            return stack_vectors(columns[self.value[0]], "value")
        if not self.can_pool_values:
            return None
        return np.array([_to_floats(columns[name]) for name in self.value]).T


def _to_floats(column: Any) -> np.ndarray:
    """Return a column of numbers as floats; missing cells become NaN."""
    try:
        return np.array(column, dtype=float)
    except ValueError:  # NumPy cannot convert a decimal NaN
        return np.array([None if cells.is_missing(x) else x for x in column], dtype=float)


def column_kind(column: Any) -> str:
    """Return the kind of all cells in a column; "any" if they differ."""
    if is_array(column):
        return "vector" if len(column.shape) == 2 else "number"
    return cells.common_kind(column) if len(column) else "any"


def _key_column_kind(column: Any, name: str) -> str:
    """Return the kind of a key column; raise `ArgumentError` if a key is missing."""
    if not is_array(column) and set(map(type, column)) != {str}:
        absent = next((i for i, key in enumerate(column) if cells.is_missing(key)), None)
        if absent is not None:
            raise ArgumentError(
                f"key {absent} (column {name}) is {column[absent]}: no query could match it; "
                "leave that row out"
            )
    return column_kind(column)


def normalize_columns(columns: ColumnData) -> ColumnData:
    """Return the columns as arrays of numbers, or as lists of cells.

    NaT, NA and masked cells become None.
    """
    normalized = {}
    for name, column in columns.items():
        if isinstance(column, np.ndarray) and hasattr(column, "filled") and column.ndim == 1:
            column = column.tolist()  # tolist() turns masked cells into None
        if is_array(column):
            column = array = to_numpy(column)
            if array.ndim not in (1, 2):
                raise ShapeError(
                    f"column {name!r} has shape {array.shape}: expected one number for each row, "
                    "(m,), or one vector, (m, d)"
                )
            if array.ndim == 1 and array.dtype.kind not in "biuf":
                # Python's times have microseconds. NumPy would convert finer times to ints.
                array = array.astype("M8[us]") if array.dtype.kind == "M" else array
                column = array.tolist()
        elif not hasattr(column, "__len__"):
            raise DtypeError(
                f"column {name!r} must be a list or an array, not {_describe_example([column], '')}"
            )
        if not is_array(column):
            column = extract_cells(column)
            if any(kind.__name__ in cells.MISSING_TYPE_NAMES for kind in set(map(type, column))):
                column = [None if cells.is_missing(cell) else cell for cell in column]
        normalized[name] = column
    return normalized


def extract_cells(column: Any) -> Any:
    """Return a column of pandas, polars or pyarrow as a list of cells.

    Lists of floats of equal length become vectors. Other objects are returned unchanged.
    """
    if hasattr(column, "to_pylist"):
        import pyarrow

        is_array = isinstance(column, pyarrow.Array)
        return arrow_to_cells(pyarrow.chunked_array([column]) if is_array else column)
    if not hasattr(column, "to_list"):
        return column
    column_cells, kind = column.to_list(), getattr(column, "dtype", column)
    if not hasattr(kind, "inner") or not kind.inner.is_float():
        return column_cells  # the column is no Array or List of floats of polars or narwhals
    lists = [] if hasattr(kind, "shape") else [x for x in column_cells if x is not None]
    if {0} == {*map(len, lists)} or len({*map(len, lists)}) > 1 or any(None in x for x in lists):
        return column_cells
    of = "f4" if str(kind.inner) == "Float32" else "f8"
    return [None if x is None else np.asarray(x, of) for x in column_cells]


def drop_missing_keys(columns: ColumnData, key: Sequence[str]) -> ColumnData:
    """Return the rows that have a key. A warning says how many were skipped."""
    size = count_rows(columns)
    masks = [~_missing_mask(columns[name]) for name in key if name in columns]
    present = np.logical_and.reduce(masks) if masks else np.ones(size, bool)
    if present.all():
        return columns
    skipped = size - int(np.count_nonzero(present))
    names = f"column{'s' if len(key) > 1 else ''} {', '.join(key)}"
    if skipped == size:
        raise ArgumentError(f"no row has a key: every cell is missing ({names})")
    verb = "has" if skipped == 1 else "have"
    message = f"{skipped:,} of {size:,} rows {verb} no key ({names}): skipped"
    report_skipped_rows(SkippedRowsWarning(message, (1 + np.flatnonzero(~present)).tolist()))
    positions = np.flatnonzero(present).tolist()
    return {
        name: to_numpy(column)[present] if is_array(column) else [column[i] for i in positions]
        for name, column in columns.items()
    }


def warn_partial_values(values: np.ndarray, names: Sequence[str]) -> None:
    """Warn about rows that have some but not all of the value's numbers.

    `values` (m, d_v) are the numbers, and `names` the columns.
    """
    missing = np.isnan(values)
    is_partial = missing.any(axis=1) & ~missing.all(axis=1)
    if not is_partial.any():
        return
    counts = missing[is_partial].sum(axis=0).tolist()
    by_count = sorted(zip(counts, names, strict=True), key=lambda pair: -pair[0])
    columns = join_alternatives([f"{name} ({n:,})" for n, name in by_count if n])
    rows, total = int(is_partial.sum()), format_plural(len(is_partial), "row")
    lack, them = ("lacks", "it") if rows == 1 else ("lack", "them")
    report_skipped_rows(
        SkippedRowsWarning(
            f"{rows:,} of {total} {lack} a number in {columns}, so no answer counts {them}: fill "
            f"it in, or make one column the value, such as {by_count[-1][1]}"
        )
    )


def _missing_mask(column: Any) -> np.ndarray:
    """Return a mask (m,) of the cells that are missing: None, NaN, or vectors with NaN."""
    if is_array(column):
        array = to_numpy(column)
        if array.dtype.kind != "f":
            return np.zeros(len(array), bool)
        return np.asarray(np.isnan(array.reshape(len(array), -1)).any(axis=1))
    if set(map(type, column)) <= {str, int}:
        return np.zeros(len(column), bool)
    return np.fromiter(map(cells.is_missing, column), bool, len(column))


def stack_vectors(column: Any, what: str) -> np.ndarray:
    """Return a column of vectors as an array (m, d) of float16, float32 or float64.

    `what` is "key" or "value", for messages.
    """
    try:
        rows = column if is_array(column) else np.stack(_fill_missing_vectors(column))
    except ValueError:
        shapes = sorted({tuple(x.shape) for x in column})
        raise ShapeError(f"the {what}s are vectors of different shapes: {shapes}") from None
    rows = to_numpy(rows)
    if rows.ndim != 2:
        raise ShapeError(f"a {what} must be a vector, not an array of shape {rows.shape[1:]}")
    if rows.dtype.kind in "biu":
        rows = rows.astype(float)
    if rows.dtype.kind != "f" or rows.dtype.itemsize > 8:
        raise DtypeError(f"the {what}s are vectors of {rows.dtype}: expected real numbers")
    return rows


def _fill_missing_vectors(column: Sequence[Any]) -> list[np.ndarray]:
    """Return the vectors of a column; missing ones are replaced by vectors of NaN."""
    like = to_numpy(next(x for x in column if not cells.is_missing(x)))
    blank = np.full(like.shape, np.nan, like.dtype if like.dtype.kind == "f" else float)
    return [blank if cells.is_missing(x) else to_numpy(x) for x in column]


def count_rows(columns: ColumnData) -> int:
    """Return the number of rows; raise `ShapeError` if the columns have different lengths."""
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise ShapeError(f"columns must have equal lengths, not {sizes}")
    return next(iter(sizes.values()), 0)


def rows_to_columns(rows: Iterable[Mapping[str, Any]]) -> ColumnData:
    """Return rows as columns. If a row lacks a column, its cell is None."""
    if not isinstance(rows, Iterable):
        raise DtypeError(f"rows must be a list of mappings, not {type(rows).__name__}")
    if isinstance(rows, Mapping):
        raise DtypeError("rows must be a list of mappings, not one mapping: pass [rows]")
    rows = list(rows)
    for row in rows:
        if not isinstance(row, Mapping):
            raise DtypeError(f"a row must be a mapping of columns, not {type(row).__name__}")
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def has_several_keys(keys: Any, kind: str | None) -> bool:
    """Return whether an argument means several keys; `kind` is the kind of the keys."""
    if is_array(keys):
        return len(keys.shape) > (1 if kind in ("vector", "tuple") else 0)
    if kind == "vector" and cells.is_number_list(keys):
        return False
    return isinstance(keys, list | range | set | frozenset | KeysView | ValuesView) or (
        isinstance(keys, Iterator) or hasattr(keys, "to_list")
    )


def as_pairs(keys: Any, values: Any, many: bool) -> list[tuple[Any, Any]]:
    """Return the arguments of `add` as pairs (key, value).

    `many` says that `keys` are several keys.
    """
    if values is not UNSET:
        return (
            list(zip(*match_keys_and_values(keys, values), strict=True))
            if many
            else [(keys, values)]
        )
    not_pair = None
    try:
        pairs = list(keys.items() if isinstance(keys, Mapping) else keys)
        # A text of two letters, or a mapping of two cells, could be unpacked like a pair.
        not_pair = next((x for x in pairs if isinstance(x, str | bytes | Mapping | Set)), None)
        if not_pair is None:
            return [(key, value) for key, value in pairs]
        raise TypeError
    except (TypeError, ValueError):
        hint = "for separate keys and values, use Database(keys, values)"
        if isinstance(not_pair, Mapping) and len(not_pair) > 1:
            key, value = list(not_pair)[:2]
            hint = f"for rows with named cells, use D = Database(key={key!r}, value={value!r}), "
            hint += "then D.extend(rows)"
        if isinstance(keys, str | PathLike):
            hint = "for one row, use add(key, value); for a table in a file, "
            hint += "Database.from_source(path); for a database, qkv.open(path)"
        elif hasattr(keys, "columns"):
            hint = "for a data frame, use Database.from_frame(frame)"
        elif hasattr(keys, "to_dict"):
            hint = "for a Series, use Database(series.to_dict()), or Database(keys, series)"
        raise DtypeError(f"data must be a mapping or pairs (key, value); {hint}") from None


def match_keys_and_values(keys: Any, values: Any) -> tuple[Any, Any]:
    """Return keys and values as lists or arrays; raise if their numbers differ."""
    if isinstance(values, str | bytes) or not getattr(values, "shape", hasattr(values, "__len__")):
        raise DtypeError(
            f"values must be a list with one value per key, not a single {type(values).__name__}"
        )
    keys, values = (x if is_array(x) else list(extract_cells(x)) for x in (keys, values))
    if len(keys) != len(values):
        raise ShapeError(
            f"there are {len(keys)} keys but {len(values)} values: pass one value per key"
        )
    return keys, values


def _describe_example(column: Any, expected: str) -> str:
    """Return the first cell of another kind than `expected`, with its kind, for messages."""
    if is_array(column):
        return column_kind(column)
    present = (x for x in column if not cells.is_missing(x))
    wrong = next((x for x in present if cells.cell_kind(x) != expected), None)
    return f"{quote_cell(wrong)} ({cells.cell_kind(wrong)})"


def as_column_names(names: str | Sequence[str], what: str = "key") -> tuple[str, ...]:
    """Return one or several column names as a tuple. `what` is the argument's name for messages."""
    if isinstance(names, str):
        return (names,)
    result = tuple(names) if isinstance(names, Iterable) else None
    if result is None or not all(isinstance(name, str) for name in result):
        raise DtypeError(f"{what} must be the name of a column or a list of names, not {names!r}")
    if not result:
        raise ArgumentError(f"{what}: name at least one column")
    return result
