"""Parquet and Arrow files (Feather version 2 is one), through pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from qkv.database.sources import files
from qkv.database.sources.table import SourceError, Table, build, check_names, no_rows
from qkv.errors import MissingExtra
from qkv.types import Progress

PARQUET, FILE, STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"


def parquet(path: Path, progress: Progress | None = None) -> Table:
    """The table of a Parquet file; types as in `convert`."""
    with _reading("Parquet", path):
        import pyarrow.parquet

        if files.ending(path, 4) != PARQUET:
            raise SourceError(
                "a Parquet file without its end: it was cut short, so copy or write it again",
                file=str(path),
            )
        # Not read_table: it would take a folder named "year=1988" for a column.
        with pyarrow.parquet.ParquetFile(path) as opened:
            return _table(opened.read(), path, progress)


def arrow(path: Path, progress: Progress | None = None) -> Table:
    """The table of an Arrow file or stream; types as in `convert`."""
    with _reading("Arrow", path):
        import pyarrow.ipc

        # Not memory-mapped: whoever shortens the file meanwhile would end this process.
        with pyarrow.OSFile(str(path)) as opened:
            is_file = opened.read(len(FILE)) == FILE
            opened.seek(0)
            start = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
            with start(opened) as reader:
                return _table(reader.read_all(), path, progress)


@contextmanager
def _reading(kind: str, path: Path) -> Iterator[None]:
    """Turn what pyarrow raises on a damaged file into one clear error."""
    try:
        import pyarrow
    except ImportError:
        raise MissingExtra(f'reading {kind} needs pyarrow: pip install "qkv[tables]"') from None
    try:
        yield
    except SourceError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
        raise SourceError(
            f"damaged or not {kind} ({reason}): copy or write it again", file=str(path)
        ) from None


def _table(read: Any, path: Path, progress: Progress | None) -> Table:
    file = str(path)
    check_names(read.column_names, file)
    # Damaged offsets would be followed out of the file.
    read.validate(full=True)
    if not len(read):
        raise no_rows(file)
    columns = []
    for name in read.column_names:
        columns.append(convert(read.column(name)))
        if progress is not None:
            progress(len(columns), len(read.column_names))
    return build(path.stem, read.column_names, columns, file)


def convert(column: Any) -> list[Any]:
    """An Arrow column as cells: numbers as they are, NaN kept, null as None.

    Lists of floats of one fixed length are vectors. Dates and times become ISO text, decimals
    numbers where all of them are exact and else text.

    >>> import pyarrow
    >>> convert(pyarrow.chunked_array([[1.5, None]]))
    [1.5, None]
    """
    import pyarrow
    from pyarrow import types

    kind = column.type
    if types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if (types.is_integer(kind) or types.is_floating(kind)) and not column.null_count:
        return column.to_numpy().tolist()  # type: ignore[no-any-return]
    if types.is_fixed_size_list(kind) and types.is_floating(kind.value_type):
        dtype = kind.value_type.to_pandas_dtype()
        return [None if x is None else np.asarray(x, dtype) for x in column.to_pylist()]
    if getattr(kind, "unit", None) == "ns":
        # Python's times end at microseconds: finer ones that matter are written out.
        if types.is_timestamp(kind):
            coarse = pyarrow.timestamp("us", kind.tz)
        elif types.is_time64(kind):
            coarse = pyarrow.time64("us")
        else:
            coarse = pyarrow.duration("us")
        try:
            column = column.cast(coarse)
        except pyarrow.ArrowInvalid:
            text = column.cast(pyarrow.string()).to_pylist()
            return [moment and moment.replace(" ", "T", 1) for moment in text]
    return column.to_pylist()  # type: ignore[no-any-return]
