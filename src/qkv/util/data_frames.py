"""Build data frames of pandas, polars or pyarrow from columns."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from qkv.errors import DtypeError, missing_extra_error

INT64_LIMIT, FLOAT_EXACT_INT_LIMIT = 2**63, 2**53
"""Ints from the first on do not fit int64. Ints up to the second are exact as floats."""


def frame_library(frame: Any) -> str | None:
    """Return the library of a data frame; None for one that `build_frame` does not support."""
    root = type(frame).__module__.partition(".")[0]
    return root if root in ("pandas", "polars", "pyarrow") else None


def build_frame(columns: Mapping[str, list[Any]], library_name: str | None = None) -> Any:
    """Build a data frame of the given library.

    By default use pandas or polars if one is imported, otherwise the first of polars, pandas and
    pyarrow that is installed. A pandas column of ints with missing values gets the type Int64, so
    that no int is rounded.
    """
    imported = [name for name in ("pandas", "polars") if name in sys.modules]
    candidates = (library_name,) if library_name else (*imported, "polars", "pandas", "pyarrow")
    for candidate in candidates:
        try:
            library = importlib.import_module(candidate)
        except ModuleNotFoundError:
            continue
        if candidate == "pyarrow":
            return library.table(
                {name: build_arrow_column(name, column) for name, column in columns.items()}
            )
        build_column = _pandas_column if candidate == "pandas" else _polars_column
        return library.DataFrame(
            {name: build_column(library, column) for name, column in columns.items()}
        )
    raise missing_extra_error("to_frame needs polars, pandas or pyarrow", "tables")


def _pandas_column(pandas: Any, column: list[Any]) -> Any:
    if set(map(type, column)) == {int, type(None)} and all(
        -INT64_LIMIT <= (x or 0) < INT64_LIMIT for x in column
    ):
        return pandas.array(column, dtype="Int64")
    try:
        return pandas.Series(_unify_types(column), dtype=None if column else object)
    except TypeError:
        return pandas.Series(column, dtype=object)


def _polars_column(polars: Any, column: list[Any]) -> Any:
    vector, kind = _first_vector(column), None
    if vector is not None:
        kind = polars.Array(polars.Series(vector).dtype, len(vector))
    try:
        return polars.Series(values=_unify_types(column), dtype=kind)
    except (TypeError, OverflowError, polars.exceptions.PolarsError):
        return polars.Series(values=column, dtype=polars.Object)


def build_arrow_column(name: str, column: list[Any]) -> Any:
    """Build an Arrow column; vectors become fixed-size lists."""
    import pyarrow

    vector, kind = _first_vector(column), None
    if vector is not None:
        kind = pyarrow.list_(pyarrow.from_numpy_dtype(vector.dtype), len(vector))
    try:
        return pyarrow.array(_unify_types(column), kind)
    except (TypeError, OverflowError, pyarrow.ArrowException):
        raise DtypeError(
            f"column {name!r} has cells of several types, or numbers of more than 64 bits. Arrow "
            "and Parquet have one type per column: write .jsonl or .csv"
        ) from None


def _first_vector(column: list[Any]) -> np.ndarray | None:
    """Return the first cell that is not missing if it is a vector, otherwise None."""
    first = next((x for x in column if x is not None), None)
    return first if isinstance(first, np.ndarray) and first.ndim == 1 else None


def _unify_types(column: list[Any]) -> list[Any]:
    """Return a column with cells of one type; raise `TypeError` if that is impossible.

    Ints among floats become floats if they stay exact. Without this check, the libraries would
    silently convert bytes to text, times to dates, and add empty fields to structs.
    """
    kinds = set(map(type, column)) - {type(None)}
    if kinds == {int, float} and all(
        type(x) is not int or abs(x) < FLOAT_EXACT_INT_LIMIT for x in column
    ):
        return [None if x is None else float(x) for x in column]
    named = {tuple(x) for x in column if isinstance(x, Mapping)}
    if len(kinds) > 1 or len(named) > 1:
        raise TypeError("cells of several types")
    return column


def arrow_to_cells(column: Any) -> list[Any]:
    """Return an Arrow column as cells: NaN stays NaN, null becomes None.

    Lists of floats of equal length become vectors. Times with nanoseconds become ISO text.

    >>> import pyarrow
    >>> arrow_to_cells(pyarrow.chunked_array([[1.5, None]]))
    [1.5, None]
    """
    import pyarrow
    from pyarrow import types

    kind = column.type
    if types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    numbers = types.is_integer(kind) or types.is_floating(kind)
    if types.is_string(kind) or types.is_large_string(kind) or (numbers and not column.null_count):
        return column.to_numpy().tolist()  # type: ignore[no-any-return]
    lists = types.is_list(kind) or types.is_large_list(kind)
    if types.is_fixed_size_list(kind) or (lists and _has_equal_lengths(column)):
        if not types.is_floating(kind.value_type):
            return column.to_pylist()  # type: ignore[no-any-return]
        dtype = kind.value_type.to_pandas_dtype()
        return [None if x is None else np.asarray(x, dtype) for x in column.to_pylist()]
    if getattr(kind, "unit", None) == "ns":
        # Python's times have a resolution of 1 µs: a column with finer times becomes text.
        target = pyarrow.time64("us") if types.is_time64(kind) else pyarrow.duration("us")
        if types.is_timestamp(kind):
            target = pyarrow.timestamp("us", kind.tz)
        try:
            column = column.cast(target)
        except pyarrow.ArrowInvalid:
            return [
                each and _to_iso_text(each) for each in column.cast(pyarrow.string()).to_pylist()
            ]
    return column.to_pylist()  # type: ignore[no-any-return]


def _has_equal_lengths(column: Any) -> bool:
    """Return whether all lists have the same length and contain no nulls."""
    from pyarrow import compute

    sizes = compute.unique(compute.list_value_length(column.drop_null())).to_pylist()
    return len(sizes) == 1 and sizes[0] > 0 and not compute.list_flatten(column).null_count


def _to_iso_text(text: str) -> str:
    """Convert a time from Arrow's text form to Python's ISO form.

    >>> (
    ...     _to_iso_text("1969-12-31 19:00:00.000000001-0500"),
    ...     _to_iso_text("1970-01-01 00:00:00.000000001Z"),
    ... )
    ('1969-12-31T19:00:00.000000001-05:00', '1970-01-01T00:00:00.000000001+00:00')
    """
    text = text.replace(" ", "T", 1).replace("Z", "+0000")
    return re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", text)
