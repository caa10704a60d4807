"""Columns as a data frame: of the library that another one came from, or of whichever is there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from qkv.errors import DtypeError, MissingExtraError

INT64_LIMIT, FLOAT_EXACT_INT_LIMIT = 2**63, 2**53
"""The first int that 64 bits do not hold; below the second every int is a float."""


def frame_library(frame: Any) -> str | None:
    """The library that a data frame is of; None for one that `build_frame` cannot make."""
    root = type(frame).__module__.partition(".")[0]
    return root if root in ("pandas", "polars", "pyarrow") else None


def build_frame(columns: Mapping[str, list[Any]], of: str | None = None) -> Any:
    """Columns as a frame of a library; of none, of pandas or polars if one is loaded, else of what
    is installed of polars, pandas and pyarrow.

    A missing cell costs no digit of its column's ints: pandas has Int64 for that.
    """
    order = [name for name in ("pandas", "polars") if name in sys.modules]
    for name in (of,) if of else (*order, "polars", "pandas", "pyarrow"):
        try:
            library = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if name == "pyarrow":
            return library.table(
                {name: build_arrow_column(name, column) for name, column in columns.items()}
            )
        make = _pandas_column if name == "pandas" else _polars_column
        return library.DataFrame({name: make(library, column) for name, column in columns.items()})
    raise MissingExtraError('to_frame needs polars, pandas or pyarrow: pip install "qkv[tables]"')


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
    """A column of Arrow; vectors are lists of one fixed length."""
    import pyarrow

    vector, kind = _first_vector(column), None
    if vector is not None:
        kind = pyarrow.list_(pyarrow.from_numpy_dtype(vector.dtype), len(vector))
    try:
        return pyarrow.array(_unify_types(column), kind)
    except (TypeError, OverflowError, pyarrow.ArrowException):
        raise DtypeError(
            f"column {name!r} holds cells of several types, or numbers of more than 64 bits, and "
            "Arrow and Parquet have one type for each column: write .jsonl or .csv"
        ) from None


def _first_vector(column: list[Any]) -> np.ndarray | None:
    """The first vector of a column that has some."""
    found = next((x for x in column if x is not None), None)
    return found if isinstance(found, np.ndarray) and found.ndim == 1 else None


def _unify_types(column: list[Any]) -> list[Any]:
    """A column whose cells have one type; the ints among floats as floats, if they lose no digit.

    Libraries make text of bytes, days of times and empty names of absent ones rather than refuse.
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
