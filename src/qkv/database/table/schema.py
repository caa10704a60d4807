"""The schema of a table: its columns, which of them are the key and the value, and their kinds."""

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
from qkv.util.formatting import quote_cell
from qkv.util.types import UNSET

ColumnData = dict[str, Any]
"""A column's name → its cells: a list, or an array (m, d) with a vector for each row."""


SETTINGS_LOST_MESSAGE = (
    "the settings of the store, which say what its columns are, are lost or not qkv's: restore its "
    "catalogue.sqlite from a copy"
)


@dataclass(frozen=True)
class Schema:
    """What the first rows fixed.

    A key of several columns is a tuple, a value of several columns a mapping. `key_kind` and
    `value_kind` are of `cells.cell_kind`; a value may also be "numbers", several columns of them,
    or "any".
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
        try:
            told: dict[str, Any] = {
                name: tuple(x) if isinstance(x, list) else x for name, x in settings.items()
            }
            made = cls(**told)
        except (AttributeError, TypeError):
            made = cls((), (), (), "", "")
        names = (made.columns, made.key, made.value)
        sound = all(
            isinstance(some, tuple) and some and all(isinstance(name, str) for name in some)
            for some in names
        )
        kinds = (made.key_kind, made.value_kind)
        sound = sound and all(isinstance(kind, str) for kind in kinds)
        if not sound or not {*made.key, *made.value} <= {*made.columns}:
            raise StoreDamagedError(SETTINGS_LOST_MESSAGE)
        return made

    @classmethod
    def from_columns(
        cls, columns: ColumnData, key: Sequence[str], value: Sequence[str], unique: bool
    ) -> Schema:
        """The schema that these first rows ask for."""
        for name in (*key, *value):
            if name not in columns:
                raise unknown_name_error("column", name, columns)
        key_kind = "tuple" if len(key) > 1 else _key_column_kind(columns[key[0]], key[0])
        if key_kind == "any":
            raise DtypeError(
                f"the keys (column {key[0]!r}) are of several types: "
                f"{', '.join(sorted({cells.cell_kind(x) for x in columns[key[0]]}))}; a database "
                "has "
                "keys of one type"
            )
        kinds = [column_kind(columns[name]) for name in value]
        if len(value) == 1:
            value_kind = kinds[0]
        else:
            value_kind = "numbers" if kinds and set(kinds) == {"number"} else "any"
        return cls(tuple(columns), tuple(key), tuple(value), key_kind, value_kind, unique)

    @property
    def can_pool_values(self) -> bool:
        """Whether values are numbers, so that Σ αᵢ vᵢ means something."""
        return self.value_kind in ("number", "numbers", "vector")

    @cached_property
    def vector_columns(self) -> dict[str, str]:
        """Cells of vectors, which are tensors and not in the records → "key" or "value"."""
        roles = {"key": (self.key_kind, self.key), "value": (self.value_kind, self.value)}
        return {names[0]: role for role, (kind, names) in roles.items() if kind == "vector"}

    def keys_from_columns(self, columns: ColumnData) -> Any:
        """The keys of some rows: a list, or an array of vectors."""
        if len(self.key) == 1:
            return columns[self.key[0]]
        return list(zip(*(columns[name] for name in self.key), strict=True))

    def row_key(self, row: Mapping[str, Any]) -> Any:
        if len(self.key) == 1:
            return row.get(self.key[0])
        return tuple(row.get(name) for name in self.key)

    def keys_from_rows(self, rows: Iterable[Mapping[str, Any]]) -> list[Any]:
        if len(self.key) == 1:
            (name,) = self.key
            return [row.get(name) for row in rows]
        return list(map(self.row_key, rows))

    def key_digest(self, key: Any) -> bytes:
        """What a key is found by."""
        if self.key_kind == "vector" and is_array(key) and key.ndim == 1:
            return cells.vector_digest(key)
        return cells.key_digest(key)

    def key_digests(self, keys: Any) -> list[bytes]:
        """One for each key of a sequence, or for each row of an array (m, d)."""
        if self.key_kind == "vector":
            return cells.vector_digests(stack_vectors(keys, "key"))
        return cells.key_digests(keys)

    def row_value(self, row: Mapping[str, Any]) -> Any:
        if len(self.value) == 1:
            return row.get(self.value[0])
        return {name: row.get(name) for name in self.value}

    def values_from_rows(self, rows: Iterable[Mapping[str, Any]]) -> list[Any]:
        if len(self.value) == 1:
            (name,) = self.value
            return [row.get(name) for row in rows]
        return list(map(self.row_value, rows))

    def check_types(self, columns: ColumnData) -> None:
        """Refuse rows of other types than the first ones."""
        keys = self.keys_from_columns(columns)
        if len(self.key) == 1:
            came = _key_column_kind(keys, self.key[0])
            if came != self.key_kind:
                raise DtypeError(
                    f"a key is {_describe_example(keys, self.key_kind)}, but the keys of this "
                    "database are "
                    f"of type {self.key_kind}: the first rows fixed that"
                )
        if self.value_kind in ("any", "json"):
            return
        for name in self.value:
            wish = "number" if self.value_kind == "numbers" else self.value_kind
            column = columns[name]
            present = is_array(column) or not all(map(cells.is_missing, column))
            if present and column_kind(column) != wish:
                raise DtypeError(
                    f"a value is {_describe_example(column, wish)}, but the values of this "
                    "database are of "
                    f"type {wish}: the first rows fixed that"
                )

    def with_number_values(self, columns: ColumnData) -> Schema:
        """The same where these values, the first that are there, are numbers."""
        kinds = {column_kind(columns[name]) for name in self.value}
        if self.value_kind != "any" or kinds != {"number"}:
            return self
        return replace(self, value_kind="numbers" if len(self.value) > 1 else "number")

    def fill_columns(self, columns: ColumnData) -> ColumnData:
        """The same rows with every column of the table as that has it, None where a row says
        nothing."""
        known = set(self.columns)
        for name in columns:
            if name not in known:
                raise unknown_name_error("column", name, self.columns)
        size = count_rows(columns)
        for name in (*self.key, *self.value):
            if name not in columns:
                raise ArgumentError(f"the rows have no column {name!r}, which the database needs")
        filled = {name: columns.get(name, [None] * size) for name in self.columns}
        for name in self.vector_columns:  # which may be written as lists, too
            if not is_array(filled[name]):
                filled[name] = [
                    np.array(x, float) if cells.is_number_list(x) else x for x in filled[name]
                ]
        return filled

    def build_value_array(self, columns: ColumnData) -> np.ndarray | None:
        """The values as an array (m, d_v), where they are numbers."""
        if self.value_kind == "vector":
            return stack_vectors(columns[self.value[0]], "value")
        if not self.can_pool_values:
            return None
        return np.array([_to_floats(columns[name]) for name in self.value]).T


def _to_floats(column: Any) -> np.ndarray:
    try:
        return np.array(column, dtype=float)
    except ValueError:  # a decimal NaN that no float takes
        return np.array([None if cells.is_missing(x) else x for x in column], dtype=float)


def column_kind(column: Any) -> str:
    if is_array(column):
        return "vector" if len(column.shape) == 2 else "number"
    return cells.common_kind(column) if len(column) else "any"


def _key_column_kind(column: Any, name: str) -> str:
    if not is_array(column) and set(map(type, column)) != {str}:
        absent = next((i for i, key in enumerate(column) if cells.is_missing(key)), None)
        if absent is not None:
            told = f"key {absent} (column {name}) is {column[absent]}"
            raise ArgumentError(f"{told}: nothing could ask for it")
    return column_kind(column)


def normalize_columns(columns: ColumnData) -> ColumnData:
    """The columns with every array as NumPy's, and of text, dates or objects as the list of its
    cells, with None for those that are missing by another name."""
    made = {}
    for name, column in columns.items():
        if isinstance(column, np.ndarray) and hasattr(column, "filled") and column.ndim == 1:
            column = column.tolist()  # with None for what it masks
        if is_array(column):
            column = array = to_numpy(column)
            if array.ndim not in (1, 2):
                raise ShapeError(
                    f"column {name!r} has the shape {array.shape}: give one number for each row, "
                    "(m,), or one vector, (m, d)"
                )
            if array.ndim == 1 and array.dtype.kind not in "biuf":
                # Python's times end at microseconds; NumPy gives finer ones as mere numbers.
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
        made[name] = column
    return made


def extract_cells(column: Any) -> Any:
    """A column of pandas, which goes by labels, of polars, whose lists are columns, or of pyarrow
    as its cells, lists of floats that have one length as vectors; others as they are."""
    if hasattr(column, "to_pylist"):
        import pyarrow

        from qkv.database.sources.frames import arrow_to_cells

        one = isinstance(column, pyarrow.Array)
        return arrow_to_cells(pyarrow.chunked_array([column]) if one else column)
    if not hasattr(column, "to_list"):
        return column
    found, kind = column.to_list(), getattr(column, "dtype", column)
    if not hasattr(kind, "inner") or not kind.inner.is_float():
        return found  # else it is an Array or a List of polars or of narwhals
    lists = [] if hasattr(kind, "shape") else [x for x in found if x is not None]
    if {0} == {*map(len, lists)} or len({*map(len, lists)}) > 1 or any(None in x for x in lists):
        return found
    of = "f4" if str(kind.inner) == "Float32" else "f8"
    return [None if x is None else np.asarray(x, of) for x in found]


def drop_missing_keys(columns: ColumnData, key: Sequence[str]) -> ColumnData:
    """The rows that have a key; of those that have none, a warning says how many were skipped."""
    size = count_rows(columns)
    found = [~_missing_mask(columns[name]) for name in key if name in columns]
    present = np.logical_and.reduce(found) if found else np.ones(size, bool)
    if present.all():
        return columns
    skipped = size - int(np.count_nonzero(present))
    names = f"column{'s' if len(key) > 1 else ''} {', '.join(key)}"
    if skipped == size:
        raise ArgumentError(f"no row has a key: every cell is missing ({names})")
    told = f"{skipped:,} of {size:,} rows {'has' if skipped == 1 else 'have'} no key ({names})"
    report_skipped_rows(
        SkippedRowsWarning(f"{told}: skipped", (1 + np.flatnonzero(~present)).tolist())
    )
    kept = np.flatnonzero(present).tolist()
    return {
        name: to_numpy(column)[present] if is_array(column) else [column[i] for i in kept]
        for name, column in columns.items()
    }


def warn_partial_values(values: np.ndarray, names: Sequence[str]) -> None:
    """Warn of rows that have some of the numbers (m, d_v) that are pooled together, but not all."""
    missing = np.isnan(values)
    some = missing.any(axis=1) & ~missing.all(axis=1)
    if not some.any():
        return
    counts = missing[some].sum(axis=0).tolist()
    lack = sorted(zip(counts, names, strict=True), key=lambda pair: -pair[0])
    of = join_alternatives([f"{name} ({n:,})" for n, name in lack if n])
    rows, total = int(some.sum()), format_plural(len(some), "row")
    told = f"{rows:,} of {total} lack{'s' * (rows == 1)} a number in {of}, so no answer counts "
    step = f"fill it in, or make one column the value, such as {lack[-1][1]}"
    report_skipped_rows(SkippedRowsWarning(f"{told}{'it' if rows == 1 else 'them'}: {step}"))


def _missing_mask(column: Any) -> np.ndarray:
    """Which cells are missing, (m,): None and NaN, and vectors with NaN in them."""
    if is_array(column):
        array = to_numpy(column)
        if array.dtype.kind != "f":
            return np.zeros(len(array), bool)
        return np.asarray(np.isnan(array.reshape(len(array), -1)).any(axis=1))
    if set(map(type, column)) <= {str, int}:
        return np.zeros(len(column), bool)
    return np.fromiter(map(cells.is_missing, column), bool, len(column))


def stack_vectors(column: Any, what: str) -> np.ndarray:
    """A column of vectors as one array (m, d), float16, float32 or float64."""
    try:
        rows = column if is_array(column) else np.stack(_fill_missing_vectors(column))
    except ValueError:
        shapes = sorted({tuple(x.shape) for x in column})
        raise ShapeError(f"the {what}s have vectors of several shapes: {shapes}") from None
    rows = to_numpy(rows)
    if rows.ndim != 2:
        raise ShapeError(f"a {what} must be a vector, not an array of shape {rows.shape[1:]}")
    if rows.dtype.kind in "biu":
        rows = rows.astype(float)
    if rows.dtype.kind != "f" or rows.dtype.itemsize > 8:
        raise DtypeError(f"the {what}s are vectors of {rows.dtype}: real numbers are needed")
    return rows


def _fill_missing_vectors(column: Sequence[Any]) -> list[np.ndarray]:
    """Vectors with NaN in the place of those that are missing."""
    like = to_numpy(next(x for x in column if not cells.is_missing(x)))
    blank = np.full(like.shape, np.nan, like.dtype if like.dtype.kind == "f" else float)
    return [blank if cells.is_missing(x) else to_numpy(x) for x in column]


def count_rows(columns: ColumnData) -> int:
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise ShapeError(f"columns must have one length, not {sizes}")
    return next(iter(sizes.values()), 0)


def rows_to_columns(rows: Iterable[Mapping[str, Any]]) -> ColumnData:
    """Rows with named cells as columns; a cell that a row does not name is None."""
    if not isinstance(rows, Iterable):
        raise DtypeError(f"rows must be a list of mappings, not {type(rows).__name__}")
    if isinstance(rows, Mapping):
        raise DtypeError("rows must be a list of mappings, not one: pass [rows]")
    rows = list(rows)
    for row in rows:
        if not isinstance(row, Mapping):
            raise DtypeError(f"a row must be a mapping of columns, not {type(row).__name__}")
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def has_several_keys(keys: Any, kind: str | None) -> bool:
    """Whether these are several keys rather than one of a database whose keys are of a kind."""
    if is_array(keys):
        return len(keys.shape) > (1 if kind in ("vector", "tuple") else 0)
    if kind == "vector" and cells.is_number_list(keys):
        return False
    return isinstance(keys, list | range | set | frozenset | KeysView | ValuesView) or (
        isinstance(keys, Iterator) or hasattr(keys, "to_list")
    )


def as_pairs(keys: Any, values: Any, many: bool) -> list[tuple[Any, Any]]:
    """What `add` was given as pairs (key, value)."""
    if values is not UNSET:
        return (
            list(zip(*match_keys_and_values(keys, values), strict=True))
            if many
            else [(keys, values)]
        )
    whole = None
    try:
        pairs = list(keys.items() if isinstance(keys, Mapping) else keys)
        # Two letters, or the names of two cells, would pass for a pair.
        whole = next((x for x in pairs if isinstance(x, str | bytes | Mapping | Set)), None)
        if whole is None:
            return [(key, value) for key, value in pairs]
        raise TypeError
    except (TypeError, ValueError):
        step = "keys and values apart are Database(keys, values)"
        if isinstance(whole, Mapping) and len(whole) > 1:
            key, value = list(whole)[:2]
            step = f"rows with named cells are D = Database(key={key!r}, value={value!r}), then "
            step += "D.extend(rows)"
        if isinstance(keys, str | PathLike):
            step = "one row is add(key, value), a table in a file Database.from_source(path), "
            step += "a database qkv.open(path)"
        elif hasattr(keys, "columns"):
            step = "a data frame is Database.from_frame(frame)"
        raise DtypeError(f"data must be a mapping or pairs (key, value); {step}") from None


def match_keys_and_values(keys: Any, values: Any) -> tuple[Any, Any]:
    """Several keys and as many values, as lists or arrays."""
    if isinstance(values, str | bytes) or not getattr(values, "shape", hasattr(values, "__len__")):
        raise DtypeError(f"values must be as many as the keys, not one {type(values).__name__}")
    keys, values = (x if is_array(x) else list(extract_cells(x)) for x in (keys, values))
    if len(keys) != len(values):
        raise ShapeError(f"{len(keys)} keys came with {len(values)} values")
    return keys, values


def _describe_example(column: Any, wish: str) -> str:
    if is_array(column):
        return column_kind(column)
    present = (x for x in column if not cells.is_missing(x))
    wrong = next((x for x in present if cells.cell_kind(x) != wish), None)
    return f"{quote_cell(wrong)} ({cells.cell_kind(wrong)})"


def as_column_names(wish: str | Sequence[str], what: str = "key") -> tuple[str, ...]:
    """One name of a column or several, as a tuple."""
    found = (
        (wish,) if isinstance(wish, str) else tuple(wish) if isinstance(wish, Iterable) else None
    )
    if found is None or not all(isinstance(name, str) for name in found):
        raise DtypeError(f"{what} must be the name of a column, or several, not {wish!r}")
    if not found:
        raise ArgumentError(f"{what}: name at least one column")
    return found
