"""Read data frames, DuckDB queries, Hugging Face data sets, and Parquet and Arrow files."""

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
    """Read a data frame of pandas, polars or pyarrow, or a DuckDB query.

    A named pandas index becomes a column, as in Parquet. None, NA and NaT become None; so does NaN
    outside float columns, where pandas uses it for a missing value. Lists of floats of equal length
    become vectors. Times with nanoseconds become ISO text. Decimals become numbers if all of them
    stay exact, otherwise text.

    >>> import polars
    >>> from_frame(polars.DataFrame({"name": ["Li", None], "age": [34, 35]})).columns
    {'name': ['Li', None], 'age': [34, 35]}
    """
    with require_extra("tables", "reading a frame needs narwhals"):
        import narwhals
    if hasattr(frame, "to_arrow_table"):  # a DuckDB query
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
        columns = [_series_to_cells(native[:, place]) for place in range(len(native.columns))]
    for name, cells in zip(native.columns, columns, strict=True):
        _check_text(cells, name)
    return build_table(_FRAME_NAME, native.columns, columns, _FRAME_NAME)


def _series_to_cells(series: Any) -> list[Any]:
    """Return a pandas or polars column as cells."""
    import narwhals

    is_ns = isinstance(series.dtype, narwhals.Datetime) and series.dtype.time_unit == "ns"
    if is_ns and series.implementation.is_polars():
        # polars itself would truncate to Python's microseconds.
        with require_extra("tables", "reading nanoseconds needs pyarrow"):
            return arrow_to_cells(series.to_arrow())
    cells: list[Any] = extract_cells(series)
    if series.dtype.is_float():
        return cells
    return [None if isinstance(x, float) and math.isnan(x) else x for x in cells]


def from_dataset(dataset: Any) -> Table:
    """Read a Hugging Face data set; a streamed one is read to its end."""
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
    """Raise `SourceError` for lone surrogates: Python text may contain them, UTF-8 may not."""
    try:
        "".join(cell for cell in cells if isinstance(cell, str)).encode()
    except UnicodeEncodeError:
        raise SourceError(
            f"column {name!r} contains text with a lone surrogate, which UTF-8 cannot encode: "
            "decode it with the right encoding first",
            file=_FRAME_NAME,
        ) from None


def from_file(path: Path, format_name: str, progress: ProgressCallback | None = None) -> Table:
    """Read a file of the format "Parquet" or "Arrow", which includes Feather version 2."""
    with require_extra("tables", f"reading {format_name} needs pyarrow"):
        import pyarrow.ipc
        import pyarrow.parquet
    file = str(path)
    try:
        table = _read_parquet(path) if format_name == "Parquet" else _read_arrow(path)
        check_column_names(table.column_names, file)
        # Arrow would follow damaged offsets to memory outside the file.
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
            f"damaged or not {format_name} ({reason}): copy or write it again", file=file
        ) from None
    if not len(table):
        raise no_rows_error(file)
    return build_table(path.stem, table.column_names, columns, file)


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet

    # Not read_table: it would add a column for a folder named "year=1988".
    with pyarrow.parquet.ParquetFile(path) as opened:
        return opened.read()


def _read_arrow(path: Path) -> Any:
    import pyarrow.ipc

    # Not memory-mapped: if another process truncates the file, this one would get SIGBUS.
    with pyarrow.OSFile(str(path)) as opened:
        is_file = opened.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
        opened.seek(0)
        with (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(opened) as reader:
            return reader.read_all()


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
        # Python has microseconds: a column with finer times becomes text.
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


def _convert_column(column: Any, name: str, file: str) -> list[Any]:
    """Return a column as cells; raise `SourceError` for dates outside Python's range."""
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
