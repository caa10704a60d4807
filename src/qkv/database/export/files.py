"""Write rows to data frames, and atomically to CSV, TSV, JSON lines and Parquet files."""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from itertools import islice
from math import isfinite
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

import numpy as np

from qkv.database.errors import ChangedCellsWarning, unwritable_error
from qkv.database.sources.table import to_plain_cell
from qkv.database.sources.type_inference import (
    MISSING_WORDS,
    date_form,
    parse_numbers,
    strip_thousands_commas,
)
from qkv.database.table.cells import is_missing
from qkv.database.table.schema import rows_to_columns
from qkv.errors import (
    ArgumentError,
    require_extra,
    require_parent_folder,
    validate_file_path,
    warn_at_caller,
)
from qkv.util.data_frames import build_arrow_column, build_frame
from qkv.util.formatting import to_jsonable
from qkv.util.types import interruptible_contextmanager

RowIterable = Iterable[Mapping[str, Any]]

ROWS_PER_BATCH = 8192
"""The number of rows that are written at a time."""


def to_frame(columns: Sequence[str], rows: RowIterable, library: str | None = None) -> Any:
    """Return the rows as a data frame of `library`, or of an installed library if it is None."""
    cells = rows_to_columns(map(_replace_missing, rows))
    return build_frame({name: cells.get(name, []) for name in columns}, library)


def write_file(
    path: str | os.PathLike[str], columns: Sequence[str], rows: RowIterable, *suffixes: str
) -> int:
    """Write rows to a file and return the number of rows.

    The suffix of the name decides the format. If `suffixes` are listed but the suffix is not among
    them, the first of them decides.
    """
    path = validate_file_path(path)
    suffix = path.suffix.lower()
    write = WRITER_BY_SUFFIX.get(suffix if not suffixes or suffix in suffixes else suffixes[0])
    if write is None:
        raise ArgumentError(f"{path}: the name must end in {', '.join(WRITER_BY_SUFFIX)}")
    with open_atomically(path) as file:
        return write(file, columns, rows)


def write_csv(
    file: BinaryIO, columns: Sequence[str], rows: RowIterable, delimiter: str = ","
) -> int:
    """Write a header line, then a line for each row; return the number of rows.

    Missing cells are empty. CSV has no types, so a warning names the columns that would be read
    with other types.
    """
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    dialect: dict[str, Any] = {"delimiter": delimiter, "lineterminator": "\n"}
    bare, quoted = csv.writer(text, **dialect), csv.writer(text, quoting=csv.QUOTE_ALL, **dialect)
    bare.writerow(columns)
    statistics, count = [_ColumnStatistics() for _ in columns], 0
    for batch in _batch_rows(map(_replace_missing, rows)):
        count += len(batch)
        for column, name in zip(statistics, columns, strict=True):
            column.add_cells(row.get(name) for row in batch)
        for row in batch:
            line = [_cell_to_text(row.get(name)) for name in columns]
            # Python 3.11 does not quote a carriage return, but readers would end the line there.
            (quoted if "\r" in "".join(line) else bare).writerow(line)
    text.detach()
    changed = [name for column, name in zip(statistics, columns, strict=True) if column.is_lossy]
    if changed:
        warn_at_caller(
            f"column{'s' * (len(changed) > 1)} {', '.join(changed)}: CSV has no types, so some "
            "cells will be read as another type: write .jsonl or .parquet instead",
            ChangedCellsWarning,
        )
    return count


def _write_json_lines(file: BinaryIO, columns: Sequence[str], rows: RowIterable) -> int:
    """Write one JSON object per line; return the number of rows."""
    count = 0
    for row in map(_replace_missing, rows):
        cells = {name: row.get(name) for name in columns}
        line = json.dumps(cells, ensure_ascii=False, default=_to_json_value)
        file.write(line.encode() + b"\n")
        count += 1
    return count


def _to_json_value(cell: Any) -> Any:
    """Return a cell as a JSON value. A decimal becomes a number if the number is exact."""
    return to_plain_cell(cell) if isinstance(cell, Decimal) else to_jsonable(cell)


def _write_parquet(file: BinaryIO, columns: Sequence[str], rows: RowIterable) -> int:
    """Write a Parquet file; return the number of rows."""
    with require_extra("tables", "writing Parquet needs pyarrow"):
        import pyarrow.parquet
    cells = rows_to_columns(map(_replace_missing, rows))
    table = pyarrow.table({name: build_arrow_column(name, cells.get(name, [])) for name in columns})
    pyarrow.parquet.write_table(table, file)
    return len(table)


WRITER_BY_SUFFIX: dict[str, Callable[[BinaryIO, Sequence[str], RowIterable], int]] = {
    ".csv": write_csv,
    ".tsv": partial(write_csv, delimiter="\t"),
    ".jsonl": _write_json_lines,
    ".parquet": _write_parquet,
}
"""The function that writes the format of each suffix."""


@interruptible_contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing. It replaces `path` at the end of the `with`."""
    if path.is_dir():
        raise ArgumentError(f"{path} is a folder: name a file in it")
    # Choose the name before the file exists, so that Ctrl-C never leaves an unknown file.
    temporary = require_parent_folder(path).with_name(f".{path.name}.{token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        # A connection error comes from reading the rows of a server, not from writing the file.
        if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
            raise unwritable_error(path, error) from error
        raise


def _replace_missing(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in which missing cells, and vectors that contain NaN, are None."""
    return {name: None if _is_missing(cell) else cell for name, cell in row.items()}


def _is_missing(cell: Any) -> bool:
    if isinstance(cell, np.ndarray):
        return cell.dtype.kind == "f" and bool(np.isnan(cell).any())
    return is_missing(cell)


def _batch_rows(rows: RowIterable) -> Iterator[list[Mapping[str, Any]]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, ROWS_PER_BATCH)):
        yield batch


def _cell_to_text(cell: Any) -> str:
    """Return a cell as text.

    A missing cell becomes "", and a list, tuple or vector becomes JSON.
    """
    if isinstance(cell, str):
        return cell
    if cell is None:
        return ""
    if isinstance(cell, float):
        return repr(cell)
    plain = to_jsonable(cell)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


_DATE_TYPES = {datetime.date, datetime.datetime, datetime.time}


class _ColumnStatistics:
    """Facts about the cells of a column that decide whether CSV preserves them."""

    def __init__(self) -> None:
        self._kinds: set[type] = set()
        self._has_unsafe_text = self._has_words = self._has_finite = False
        self._date_kinds: set[str | None] = set()
        self._largest_int = 0

    def add_cells(self, cells: Iterable[Any]) -> None:
        """Add some cells of the column."""
        present = [x for x in cells if x is not None]
        kinds = set(map(type, present))
        self._kinds |= kinds
        if str in kinds:
            texts = {x for x in present if type(x) is str}
            self._has_unsafe_text |= any(
                text.strip() in MISSING_TEXTS or "\0" in text for text in texts
            )
            self._has_words = self._has_words or any(
                type(parse_numbers([strip_thousands_commas(text)])[0]) is str for text in texts
            )
            self._date_kinds |= {date_form(text.strip()) for text in texts}
        elif kinds & _DATE_TYPES:
            self._date_kinds |= {date_form(_cell_to_text(x)) for x in present}
        if int in kinds:
            self._largest_int = max(self._largest_int, *(abs(x) for x in present if type(x) is int))
        self._has_finite = self._has_finite or any(
            type(x) is float and isfinite(x) for x in present
        )

    @property
    def is_lossy(self) -> bool:
        """Whether a reader of the CSV file would get different cells."""
        kinds, dates = self._kinds, len(self._date_kinds) == 1 and None not in self._date_kinds
        if kinds <= {str}:
            return self._has_unsafe_text or (bool(kinds) and (dates or not self._has_words))
        if len(kinds) == 1 and kinds <= _DATE_TYPES:
            return not dates
        if kinds == {int}:
            return self._largest_int >= 2**63
        exact = self._largest_int < 2**53
        return not (kinds <= {int, float} and exact and (self._has_finite or int in kinds))


MISSING_TEXTS = {*MISSING_WORDS, ""}
