"""Convert queries and keys (arrays, tensors, Series, lists) to cells.

All entry points use the same rules:

| keys | one query | several queries |
|---|---|---|
| a number | a number, an array () | a list, an array (n,) or (n, 1) |
| tuples of w numbers or dates | a tuple, list or array (w,) | a list of these, an array (n, w) |
| vectors of w numbers | a list or array (w,) | a list of these, an array (n, w) |
| other tuples of w cells | a tuple, a mapping, one cell | a list, an array (n, w) or (n,) |
| text, dates, other cells | a cell, an array () of one | a list, an array (n,) or (n, 1) |

Columns of pandas, polars and pyarrow count as lists of cells. Their frames are several queries: the
columns of the key are found by name. So are the cells of a row of a frame, which is a Series, and
the values of a mapping. If keys are not numbers, an array of numbers is an encoded vector (w,), or
several encoded vectors (n, w).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from qkv.database.table import cells
from qkv.database.table.schema import extract_cells
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks import as_plain_array, get_framework, is_array, to_numpy
from qkv.util.data_frames import frame_library

NUMERIC_DTYPE_PREFIXES = ("float", "int", "uint", "bool", "bfloat", "complex")
"""The beginnings of the names of dtypes that hold numbers."""

_PLAIN_TYPES = frozenset({str, int, float, bool, bytes, tuple, list, dict, type(None)})


class Batch(list[Any]):
    """A list of queries. Unlike a plain list, it never means one key of several numbers."""


def as_cells(query: Any, kind: str | None = None) -> Any:
    """Return a query as an array of numbers, a single cell, or a list of cells.

    `kind` is the kind of the keys, or None if it is unknown.

    >>> as_cells(np.array(["aple", "peer"])), as_cells(np.array("aple")), as_cells(np.str_("aple"))
    (['aple', 'peer'], 'aple', 'aple')
    """
    if type(query) in _PLAIN_TYPES:
        return query
    if isinstance(query, np.generic):
        return _unwrap_scalar(query)
    if not is_array(query):
        return _column_to_list(query)
    query = as_plain_array(query, "query")
    if holds_numbers(query):
        return query
    return _array_to_cells(query, kind)


def find_named_cells(query: Any, names: Sequence[str], kind: str | None) -> Any:
    """Return the rows of a data frame, or of a Series with the names of a key, as queries.

    `names` are the columns of the key. Other queries are returned unchanged.

    >>> import polars
    >>> find_named_cells(polars.DataFrame({"b": [1, 2], "a": [3, 4]}), ("a", "b"), "tuple")
    [(3, 1), (4, 2)]
    """
    if not has_named_cells(query):
        return query
    if hasattr(query, "columns"):
        return _frame_to_queries(query, names, kind)
    if len(names) > 1 and set(names) <= set(query.index.tolist()):
        return tuple(as_cells(query[name]) for name in names)
    return query


def has_named_cells(query: Any) -> bool:
    """Return whether a query is a data frame, or a Series with labels."""
    if type(query) in _PLAIN_TYPES or is_array(query) or not frame_library(query):
        return False
    is_frame = hasattr(query, "columns") and hasattr(query, "shape")
    return is_frame or hasattr(getattr(query, "index", None), "tolist")


def as_named_tuple(key: Any, names: Sequence[str]) -> Any:
    """Return a mapping that has all columns of the key as a tuple. Others are unchanged.

    >>> as_named_tuple({"b": 1, "a": 2}, ("a", "b")), as_named_tuple({"b": 1}, ("a", "b"))
    ((2, 1), {'b': 1})
    """
    if isinstance(key, Mapping) and len(names) > 1 and set(names) <= key.keys():
        return tuple(key[name] for name in names)
    return key


def _frame_to_queries(frame: Any, names: Sequence[str], kind: str | None) -> Any:
    """Return the key columns of a data frame as several queries."""
    from qkv.database import sources

    columns = sources.from_frame(frame).columns
    if kind == "vector" and not set(names) <= set(columns):
        return as_floats(list(zip(*columns.values(), strict=True)))
    if kind == "text" and len(columns) == 1:
        names = list(columns)
    if missing := [name for name in names if name not in columns]:
        raise ArgumentError(
            f"query is a frame without the column {missing[0]!r} of the key: its columns are "
            f"{', '.join(map(repr, columns))}"
        )
    if len(names) == 1:
        return Batch(columns[names[0]])
    return Batch(zip(*(columns[name] for name in names), strict=True))


def holds_numbers(array: Any) -> bool:
    """Return whether the elements of an array are numbers, and not text, dates or objects.

    >>> holds_numbers(np.zeros(2)), holds_numbers(np.array(["a"])), holds_numbers(np.array([None]))
    (True, False, False)
    """
    return get_framework(array).dtype_name(array).startswith(NUMERIC_DTYPE_PREFIXES)


def as_key(key: Any, kind: str) -> Any:
    """Return a key in the form in which the database stores it, for a lookup.

    >>> as_key(np.array([100, 1]), "tuple"), as_key([100.0, 1.0], "tuple")
    ((100, 1), (100.0, 1.0))
    """
    if type(key) is str or (type(key) is tuple and kind != "vector"):
        return key
    if kind == "vector":
        key = key if is_array(key) else as_cells(key)
        is_object = isinstance(key, np.ndarray) and key.dtype == object
        return as_floats(key) if isinstance(key, list | tuple) or is_object else key
    key = as_cells(key, kind)
    if kind == "tuple":
        return as_tuple(key)
    return to_numpy(key).item() if is_array(key) and not key.shape else key


def as_tuple(key: Any) -> Any:
    """Return a list, an array (w,) or a Series as a tuple. Other cells are returned unchanged."""
    if is_array(key) and len(key.shape) == 1:
        return tuple(to_numpy(key).tolist())
    if not isinstance(key, Mapping | str | bytes):
        key = as_cells(key)
    if not isinstance(key, list | tuple):
        return key
    if not any(is_array(part) for part in key):
        return tuple(key)
    return tuple(to_numpy(x).item() if is_array(x) and not x.shape else x for x in key)


def as_floats(query: Any) -> np.ndarray:
    """Return one or several vectors as an array of floats; raise `DtypeError` for text."""
    array = np.asarray(query)
    if array.dtype.kind in "US":
        raise DtypeError("query must be a vector of numbers, like the keys, not text")
    return array.astype(float, copy=False)


def as_tuples(array: Any, columns: str) -> tuple[list[Any], bool]:
    """Return the rows of an array of numbers as tuples, and whether it was a single key.

    `columns` are the columns of the key as text, for the error.
    """
    rows = to_numpy(array)
    if rows.ndim > 2:
        raise ShapeError(
            f"query has shape {tuple(rows.shape)}, but a key is {columns}: expected one key, "
            "(columns,), or several, (queries, columns)"
        )
    if rows.ndim == 2:
        return list(map(tuple, rows.tolist())), False
    return [tuple(rows.tolist()) if rows.ndim else rows.item()], True


def is_flat(query: Any) -> bool:
    """Return whether a list contains only scalars. It may then be a key of several columns.

    >>> is_flat([1.0, 2.0]), is_flat([(1.0, 2.0)]), is_flat([])
    (True, False, False)
    """
    return bool(query) and not any(
        isinstance(x, list | tuple | Mapping | Set) or len(getattr(x, "shape", ())) > 0
        for x in query
    )


def is_number_key(key: Any) -> bool:
    """Return whether a key is a tuple of numbers or dates.

    An array of numbers may then be a key.

    >>> is_number_key((100.0, 1)), is_number_key(("Emma", 1815)), is_number_key(3.5)
    (True, False, False)
    """
    if not isinstance(key, tuple) or not key:
        return False
    return all(cells.cell_kind(part) in ("number", "date") for part in key)


def _unwrap_scalar(query: np.generic) -> Any:
    """Return NumPy text or a NumPy time as a Python object.

    Other scalars are returned unchanged.
    """
    if isinstance(query, np.str_):
        return str(query)
    if isinstance(query, np.datetime64):
        return cells.to_python_datetime(query)
    return query


def _column_to_list(query: Any) -> Any:
    """Return a column of pandas, polars or pyarrow as a list of cells."""
    column = extract_cells(query)
    if column is query and hasattr(query, "tolist") and hasattr(query, "dtype"):
        column = query.tolist()  # the query is a pandas array, such as a Categorical
    return column


def _array_to_cells(query: Any, kind: str | None) -> Any:
    """Return an array of text, dates or objects as a list of cells, or as a single cell."""
    array = to_numpy(query)
    if array.dtype.kind == "M":  # Python's times have microseconds
        array = array.astype("M8[us]")
    listed = array.tolist()
    if not isinstance(query, np.ndarray):  # TensorFlow stores text as bytes
        listed = _decode_bytes(listed)
    if array.ndim < 2 or kind in ("vector", "json"):
        return listed
    if array.ndim == 2 and kind in (None, "tuple") and (array.shape[1] > 1 or kind == "tuple"):
        return list(map(tuple, listed))
    if array.ndim == 2 and array.shape[1] == 1:
        return [row[0] for row in listed]
    keys_text = "cells of several columns" if kind == "tuple" else "text" if kind is None else kind
    raise ShapeError(
        f"query has shape {tuple(array.shape)}, but the keys are {keys_text}: expected (queries,)"
    )


def _decode_bytes(value: Any) -> Any:
    """Decode bytes to text, also inside lists."""
    if isinstance(value, list):
        return list(map(_decode_bytes, value))
    return value.decode() if isinstance(value, bytes) else value
