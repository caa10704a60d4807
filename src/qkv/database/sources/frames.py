"""Data frames through narwhals, what DuckDB reads, data sets, and files of Parquet and Arrow."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from qkv.database.sources.table import (
    SourceError,
    Table,
    build_table,
    check_column_names,
    no_rows_error,
)
from qkv.database.table.schema import extract_cells
from qkv.errors import DtypeError, require_extra
from qkv.util.types import ProgressCallback

PARQUET_MAGIC, ARROW_FILE_MAGIC, ARROW_STREAM_MAGIC = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_FRAME_NAME = "frame"


def from_frame(frame: Any) -> Table:
    """The table of a data frame, or of a query of DuckDB's; an index of pandas that has a name is
    a column, as Parquet has it.

    None, NA and NaT are None; so is NaN outside columns of floats, where pandas means a missing
    cell by it. Lists of floats that have one length are vectors. Dates and times finer than
    Python's become ISO text, decimals numbers where all are exact and else text.

    >>> import polars
    >>> from_frame(polars.DataFrame({"name": ["Li", None], "age": [34, 35]})).columns
    {'name': ['Li', None], 'age': [34, 35]}
    """
    with require_extra("tables", "reading a frame needs narwhals"):
        import narwhals
    if hasattr(frame, "to_arrow_table"):  # a query of DuckDB's is one when it is asked for
        frame = frame.to_arrow_table()
    try:
        native = narwhals.from_native(frame, eager_only=True)
    except narwhals.exceptions.DuplicateError as error:
        raise SourceError(f"{str(error).strip()}: rename all but one", file=_FRAME_NAME) from None
    except TypeError:
        step = "a lazy frame is collected first (.collect())"
        if hasattr(frame, "to_frame"):
            step = "a column alone is its to_frame()"
        raise DtypeError(
            "frame must be a data frame of pandas, polars or pyarrow, or a query of DuckDB, not a "
            f"{type(frame).__name__}: {step}"
        ) from None
    if native.implementation.is_pandas_like():
        levels = [x for x in frame.index.names if x is not None and x not in native.columns]
        if levels:
            native = narwhals.from_native(frame.reset_index(level=levels), eager_only=True)
    if native.implementation.is_pyarrow():
        table = native.to_native()
        named = zip(table.columns, table.column_names, strict=True)
        columns = [_convert_column(column, name, _FRAME_NAME) for column, name in named]
    else:
        columns = [_series_to_cells(native[:, place]) for place in range(len(native.columns))]
    for name, cells in zip(native.columns, columns, strict=True):
        _check_text(cells, name)
    return build_table(_FRAME_NAME, native.columns, columns, _FRAME_NAME)


def _series_to_cells(series: Any) -> list[Any]:
    """A column of pandas or polars as cells."""
    import narwhals

    fine = isinstance(series.dtype, narwhals.Datetime) and series.dtype.time_unit == "ns"
    if fine and series.implementation.is_polars():
        with require_extra(
            "tables", "reading nanoseconds needs pyarrow"
        ):  # polars gives them as Python's
            return arrow_to_cells(series.to_arrow())
    cells: list[Any] = extract_cells(series)
    if series.dtype.is_float():
        return cells
    return [None if isinstance(x, float) and math.isnan(x) else x for x in cells]


def from_dataset(dataset: Any) -> Table:
    """The table of a Hugging Face data set, whole or streamed."""
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
    return from_frame(table)


def _check_text(cells: list[Any], name: str) -> None:
    """Refuse half characters (lone surrogates), which Python's text may have and no file can."""
    try:
        "".join(cell for cell in cells if isinstance(cell, str)).encode()
    except UnicodeEncodeError:
        raise SourceError(
            f"column {name!r} holds text with a lone surrogate, which no file can keep: decode "
            "it with the right encoding first",
            file=_FRAME_NAME,
        ) from None


def from_file(path: Path, kind: str, progress: ProgressCallback | None = None) -> Table:
    """The table of a file of Parquet or of Arrow (of Feather version 2 too); types as in
    `arrow_to_cells`."""
    with require_extra("tables", f"reading {kind} needs pyarrow"):
        import pyarrow.ipc
        import pyarrow.parquet
    file = str(path)
    try:
        read = _read_parquet(path) if kind == "Parquet" else _read_arrow(path)
        check_column_names(read.column_names, file)
        # Damaged offsets would be followed out of the file.
        read.validate(full=True)
        columns = []
        for column, name in zip(read.columns, read.column_names, strict=True):
            columns.append(_convert_column(column, name, file))
            if progress is not None:
                progress(len(columns), read.num_columns)
    except SourceError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
        told = f"damaged or not {kind} ({reason}): copy or write it again"
        raise SourceError(told, file=file) from None
    if not len(read):
        raise no_rows_error(file)
    return build_table(path.stem, read.column_names, columns, file)


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet

    # Not read_table: it would take a folder named "year=1988" for a column.
    with pyarrow.parquet.ParquetFile(path) as opened:
        return opened.read()


def _read_arrow(path: Path) -> Any:
    import pyarrow.ipc

    # Not memory-mapped: whoever shortens the file meanwhile would end this process.
    with pyarrow.OSFile(str(path)) as opened:
        is_file = opened.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
        opened.seek(0)
        with (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(opened) as reader:
            return reader.read_all()


def arrow_to_cells(column: Any) -> list[Any]:
    """An Arrow column as cells: numbers as they are, NaN kept, null as None.

    Lists of floats that have one length are vectors. Times finer than Python's become ISO text.

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
        # Python's times end at microseconds: finer ones that matter are written out.
        moment = types.is_timestamp(kind)
        other = pyarrow.time64 if types.is_time64(kind) else pyarrow.duration
        try:
            column = column.cast(pyarrow.timestamp("us", kind.tz) if moment else other("us"))
        except pyarrow.ArrowInvalid:
            return [
                each and _to_iso_text(each) for each in column.cast(pyarrow.string()).to_pylist()
            ]
    return column.to_pylist()  # type: ignore[no-any-return]


def _convert_column(column: Any, name: str, file: str) -> list[Any]:
    """A column as cells, refused where it has a day that Python's calendar has not."""
    from pyarrow import types

    try:
        return arrow_to_cells(column)
    except (OverflowError, ValueError):
        if not types.is_temporal(column.type):
            raise
        raise SourceError(
            f"column {name!r} has a date outside of the years 1 to 9999, or an infinite one, which "
            "Python has not: make text of the column, or leave these cells empty",
            file=file,
        ) from None


def _has_equal_lengths(column: Any) -> bool:
    """Whether lists have one length, and nothing in them is missing."""
    from pyarrow import compute

    sizes = compute.unique(compute.list_value_length(column.drop_null())).to_pylist()
    return len(sizes) == 1 and sizes[0] > 0 and not compute.list_flatten(column).null_count


def _to_iso_text(text: str) -> str:
    """A time as Arrow writes it, in the form of Python's.

    >>> (
    ...     _to_iso_text("1969-12-31 19:00:00.000000001-0500"),
    ...     _to_iso_text("1970-01-01 00:00:00.000000001Z"),
    ... )
    ('1969-12-31T19:00:00.000000001-05:00', '1970-01-01T00:00:00.000000001+00:00')
    """
    text = text.replace(" ", "T", 1).replace("Z", "+0000")
    return re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", text)
