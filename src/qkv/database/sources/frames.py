"""Data frames of pandas, polars and pyarrow, through narwhals; what DuckDB reads; data sets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from qkv.database.sources.table import SourceError, Table, build
from qkv.errors import DtypeError, MissingExtra

_FILE = "frame"


def from_frame(frame: Any) -> Table:
    """The table of a data frame, or of a query of DuckDB's; an index of pandas is not a column
    (reset_index makes it one).

    None, NA and NaT are None; so is NaN outside columns of floats, where pandas means a missing
    cell by it. Lists of floats of one fixed length are vectors. Dates and times become ISO text,
    decimals numbers where all are exact and else text.

    >>> import polars
    >>> from_frame(polars.DataFrame({"name": ["Li", None], "age": [34, 35]})).columns
    {'name': ['Li', None], 'age': [34, 35]}
    """
    try:
        import narwhals
    except ImportError:
        raise MissingExtra('reading a frame needs narwhals: pip install "qkv[tables]"') from None
    if hasattr(frame, "to_arrow_table"):  # a query of DuckDB's is one when it is asked for
        frame = frame.to_arrow_table()
    try:
        native = narwhals.from_native(frame, eager_only=True)
    except narwhals.exceptions.DuplicateError as error:
        raise SourceError(f"{str(error).strip()}: rename all but one", file=_FILE) from None
    except TypeError:
        raise DtypeError(
            "frame must be a data frame of pandas, polars or pyarrow, or a query of DuckDB, not a "
            f"{type(frame).__name__}: a lazy frame is collected first (.collect())"
        ) from None
    names = native.columns
    columns = []
    for place in range(len(names)):
        series = native[:, place]
        cells = series.to_list()
        if isinstance(series.dtype, narwhals.Array) and series.dtype.inner.is_float():
            kind = "f4" if series.dtype.inner == narwhals.Float32 else "f8"
            cells = [None if x is None else np.asarray(x, kind) for x in cells]
        elif not series.dtype.is_float():
            cells = [None if isinstance(x, float) and math.isnan(x) else x for x in cells]
        _check_text(cells, names[place])
        columns.append(cells)
    return build(_FILE, names, columns, _FILE)


def from_dataset(dataset: Any) -> Table:
    """The table of a Hugging Face data set, whole or streamed; its lists of floats that have one
    length are vectors."""
    if type(dataset).__module__.partition(".")[0] != "datasets":
        raise DtypeError(
            "dataset must be a data set of Hugging Face's datasets, not a "
            f"{type(dataset).__name__}: load one with datasets.load_dataset(name, split=…)"
        )
    if isinstance(dataset, dict):
        raise DtypeError(
            f"dataset holds the splits {', '.join(map(repr, dataset))}: pass one of them, "
            f"dataset[{next(iter(dataset), 'train')!r}]"
        )
    import pyarrow

    if hasattr(dataset, "with_format") and hasattr(dataset, "__len__"):
        table = dataset.with_format("arrow")[:]
    else:
        table = pyarrow.Table.from_pylist(list(dataset))
    for place, name in enumerate(table.column_names):
        table = table.set_column(place, name, _vectors(table.column(name)))
    return from_frame(table)


def _vectors(column: Any) -> Any:
    """A column of lists of floats as one of vectors, if they have one length."""
    import pyarrow
    from pyarrow import compute

    kind = column.type
    if not pyarrow.types.is_list(kind) or not pyarrow.types.is_floating(kind.value_type):
        return column
    sizes = compute.unique(compute.list_value_length(column)).to_pylist()
    if len(sizes) != 1 or not sizes[0]:
        return column
    return column.cast(pyarrow.list_(kind.value_type, sizes[0]))


def _check_text(cells: list[Any], name: str) -> None:
    """Refuse half characters (lone surrogates), which Python's text may have and no file can."""
    try:
        "".join(cell for cell in cells if isinstance(cell, str)).encode()
    except UnicodeEncodeError:
        raise SourceError(
            f"column {name!r} holds text with a lone surrogate, which no file can keep: decode "
            "it with the right encoding first",
            file=_FILE,
        ) from None
