"""Read data frames, DuckDB queries, Hugging Face data sets, and files in Parquet or Arrow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from qkv.database.sources.table import (
    SourceError,
    Table,
    build_table,
    check_column_names,
    no_rows_error,
)
from qkv.database.table.schema import extract_cells
from qkv.errors import DtypeError, require_extra
from qkv.util.data_frames import arrow_to_cells
from qkv.util.types import ProgressCallback

PARQUET_MAGIC, ARROW_FILE_MAGIC, ARROW_STREAM_MAGIC = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_FRAME_NAME = "frame"


def from_frame(frame: Any) -> Table:
    """Read a data frame of pandas, polars or pyarrow, or a DuckDB query.

    A named index of pandas becomes a column, as in Parquet. None, NA and NaT become None. NaN
    becomes None too, except in columns of floats: elsewhere, pandas uses NaN for a missing value.
    Lists of floats of equal length become vectors. Times with nanoseconds become ISO text. Decimals
    become numbers if all of them stay exact, otherwise text.

    >>> import polars
    >>> from_frame(polars.DataFrame({"name": ["Li", None], "age": [34, 35]})).columns
    {'name': ['Li', None], 'age': [34, 35]}
    """
    with require_extra("tables", "reading a frame needs narwhals"):
        import narwhals
    if hasattr(frame, "to_arrow_table"):  # the frame is a DuckDB query
        frame = frame.to_arrow_table()
    try:
        native = narwhals.from_native(frame, eager_only=True)
    except narwhals.exceptions.DuplicateError as error:
        raise SourceError(f"{str(error).strip()}: rename all but one", file=_FRAME_NAME) from None
    except TypeError:
        step = "collect a lazy frame first with .collect()"
        if hasattr(frame, "to_frame"):
            step = "convert a single column with .to_frame()"
        raise DtypeError(
            "frame must be a data frame of pandas, polars or pyarrow, or a DuckDB query, not a "
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
        columns = [_series_to_cells(native[:, position]) for position in range(len(native.columns))]
    for name, cells in zip(native.columns, columns, strict=True):
        _check_text(cells, name)
    return build_table(_FRAME_NAME, native.columns, columns, _FRAME_NAME)


def _series_to_cells(series: Any) -> list[Any]:
    """Return a pandas or polars column as cells."""
    import narwhals

    is_ns = isinstance(series.dtype, narwhals.Datetime) and series.dtype.time_unit == "ns"
    if is_ns and series.implementation.is_polars():
        # polars would truncate the times to Python's microseconds.
        with require_extra("tables", "reading nanoseconds needs pyarrow"):
            return arrow_to_cells(series.to_arrow())
    cells: list[Any] = extract_cells(series)
    if series.dtype.is_float():
        return cells
    return [None if isinstance(x, float) and math.isnan(x) else x for x in cells]


def from_dataset(dataset: Any) -> Table:
    """Read a Hugging Face data set. A streamed data set is read completely."""
    if type(dataset).__module__.partition(".")[0] != "datasets":
        raise DtypeError(
            "dataset must be a Hugging Face data set, not a "
            f"{type(dataset).__name__}: load one with datasets.load_dataset(name, split=…)"
        )
    if isinstance(dataset, dict):
        raise DtypeError(
            f"dataset has the splits {', '.join(map(repr, dataset))}: pass one of them, "
            f"dataset[{next(iter(dataset), 'train')!r}]"
        )
    import pyarrow

    if hasattr(dataset, "with_format") and hasattr(dataset, "__len__"):
        table = dataset.with_format("arrow")[:]
    else:
        table = pyarrow.Table.from_pylist(list(dataset))
    return from_frame(table)


def _check_text(cells: list[Any], name: str) -> None:
    """Raise `SourceError` for lone surrogates, which Python's text may contain but UTF-8 cannot."""
    try:
        "".join(cell for cell in cells if isinstance(cell, str)).encode()
    except UnicodeEncodeError:
        raise SourceError(
            f"column {name!r} contains text with a lone surrogate, which UTF-8 cannot encode: "
            "decode it with the right encoding first",
            file=_FRAME_NAME,
        ) from None


def from_file(path: Path, format_name: str, progress: ProgressCallback | None = None) -> Table:
    """Read a file. `format_name` is "Parquet" or "Arrow"; Arrow includes Feather version 2."""
    with require_extra("tables", f"reading {format_name} needs pyarrow"):
        import pyarrow.ipc
        import pyarrow.parquet
    file = str(path)
    try:
        table = _read_parquet(path) if format_name == "Parquet" else _read_arrow(path)
        check_column_names(table.column_names, file)
        # Without this check, Arrow would follow damaged offsets to memory outside the file.
        table.validate(full=True)
        columns = []
        for column, name in zip(table.columns, table.column_names, strict=True):
            columns.append(_convert_column(column, name, file))
            if progress is not None:
                progress(len(columns), table.num_columns)
    except SourceError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
        raise SourceError(
            f"this file is damaged or not {format_name} ({reason}): copy or write it again",
            file=file,
        ) from None
    if not len(table):
        raise no_rows_error(file)
    return build_table(path.stem, table.column_names, columns, file)


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet

    # Do not use read_table, which would add a column for a folder named "year=1988".
    with pyarrow.parquet.ParquetFile(path) as opened:
        return opened.read()


def _read_arrow(path: Path) -> Any:
    import pyarrow.ipc

    # Do not map the file: if another process truncated it, this process would get SIGBUS.
    with pyarrow.OSFile(str(path)) as opened:
        is_file = opened.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
        opened.seek(0)
        with (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(opened) as reader:
            return reader.read_all()


def _convert_column(column: Any, name: str, file: str) -> list[Any]:
    """Return an Arrow column as cells; raise `SourceError` for dates outside Python's range."""
    from pyarrow import types

    try:
        return arrow_to_cells(column)
    except (OverflowError, ValueError):
        if not types.is_temporal(column.type):
            raise
        raise SourceError(
            f"column {name!r} has a date outside the years 1 to 9999, or an infinite one, which "
            "Python does not support: convert the column to text, or leave these cells empty",
            file=file,
        ) from None
