"""Rows out again: as a data frame, and as CSV, TSV, JSON lines and Parquet, whole or not at all."""

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
from qkv.database.sources.table import to_plain_cell as exact
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
"""Rows that are written together."""


def to_frame(columns: Sequence[str], rows: RowIterable, of: str | None = None) -> Any:
    """The rows as a frame of a library, or of whichever of pandas, polars and pyarrow is there."""
    found = rows_to_columns(map(_replace_missing, rows))
    return build_frame({name: found.get(name, []) for name in columns}, of)


def write_file(
    path: str | os.PathLike[str], columns: Sequence[str], rows: RowIterable, *endings: str
) -> int:
    """The rows in a file, in the form of its ending, or of the first where it is none of those
    given; how many there were."""
    place = validate_file_path(path)
    own = place.suffix.lower()
    form = WRITER_BY_SUFFIX.get(own if not endings or own in endings else endings[0])
    if form is None:
        raise ArgumentError(f"{place}: the name must end in {', '.join(WRITER_BY_SUFFIX)}")
    with open_atomically(place) as file:
        return form(file, columns, rows)


def write_csv(
    file: BinaryIO, columns: Sequence[str], rows: RowIterable, delimiter: str = ","
) -> int:
    """A line of names, then one for each row; a missing cell is empty.

    What is read again otherwise than it was is told in a warning: CSV has no types.
    """
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    how: dict[str, Any] = {"delimiter": delimiter, "lineterminator": "\n"}
    bare, quoted = csv.writer(text, **how), csv.writer(text, quoting=csv.QUOTE_ALL, **how)
    bare.writerow(columns)
    seen, count = [_ColumnStatistics() for _ in columns], 0
    for batch in _batch_rows(map(_replace_missing, rows)):
        count += len(batch)
        for about, name in zip(seen, columns, strict=True):
            about.add_cells(row.get(name) for row in batch)
        for row in batch:
            line = [_cell_to_text(row.get(name)) for name in columns]
            # Python 3.11 leaves a carriage return bare, and readers end the line there.
            (quoted if "\r" in "".join(line) else bare).writerow(line)
    text.detach()
    changed = [name for about, name in zip(seen, columns, strict=True) if about.is_lossy]
    if changed:
        warn_at_caller(
            f"column{'s' * (len(changed) > 1)} {', '.join(changed)}: some cells are read again as "
            "something else, since CSV has no types: .jsonl and .parquet keep more of them",
            ChangedCellsWarning,
        )
    return count


def _write_json_lines(file: BinaryIO, columns: Sequence[str], rows: RowIterable) -> int:
    count = 0
    for row in map(_replace_missing, rows):
        cells = {name: row.get(name) for name in columns}
        line = json.dumps(cells, ensure_ascii=False, default=_to_json_value)
        file.write(line.encode() + b"\n")
        count += 1
    return count


def _to_json_value(cell: Any) -> Any:
    """What JSON has for a cell: of a decimal the number, where a reader finds the same one."""
    return exact(cell) if isinstance(cell, Decimal) else to_jsonable(cell)


def _write_parquet(file: BinaryIO, columns: Sequence[str], rows: RowIterable) -> int:
    with require_extra("tables", "writing Parquet needs pyarrow"):
        import pyarrow.parquet
    found = rows_to_columns(map(_replace_missing, rows))
    made = {name: build_arrow_column(name, found.get(name, [])) for name in columns}
    table = pyarrow.table(made)
    pyarrow.parquet.write_table(table, file)
    return len(table)


WRITER_BY_SUFFIX: dict[str, Callable[[BinaryIO, Sequence[str], RowIterable], int]] = {
    ".csv": write_csv,
    ".tsv": partial(write_csv, delimiter="\t"),
    ".jsonl": _write_json_lines,
    ".parquet": _write_parquet,
}
"""How a file is written, by the ending of its name."""


@interruptible_contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of whatever `path` held when it is finished, by a rename."""
    if path.is_dir():
        raise ArgumentError(f"{path} is a folder: name a file in it")
    # Its name is known before it is there, so that Ctrl-C cannot fall between the two.
    aside = require_parent_folder(path).with_name(f".{path.name}.{token_hex(4)}")
    try:
        with open(aside, "xb") as file:
            yield file
        os.replace(aside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        # What a connection says is of the rows, not of the file.
        if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
            raise unwritable_error(path, error) from error
        raise


def _replace_missing(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with None for every cell that is missing: a NaN, or a vector that holds one."""
    return {name: None if _is_missing(cell) else cell for name, cell in row.items()}


def _is_missing(cell: Any) -> bool:
    if isinstance(cell, np.ndarray):
        return cell.dtype.kind == "f" and bool(np.isnan(cell).any())
    return is_missing(cell)


def _batch_rows(rows: RowIterable) -> Iterator[list[Mapping[str, Any]]]:
    rest = iter(rows)
    while batch := list(islice(rest, ROWS_PER_BATCH)):
        yield batch


def _cell_to_text(cell: Any) -> str:
    """A cell as text: missing ones empty, lists, tuples and vectors as JSON."""
    if isinstance(cell, str):
        return cell
    if cell is None:
        return ""
    if isinstance(cell, float):
        return repr(cell)
    plain = to_jsonable(cell)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


_DATE_TYPES = {datetime.date, datetime.datetime}


class _ColumnStatistics:
    """What stood in a column, as far as it matters to whoever reads it as text again."""

    def __init__(self) -> None:
        self._kinds: set[type] = set()
        self._has_unsafe_text = self._has_words = self._has_finite = False
        self._date_kinds: set[str | None] = set()
        self._largest_int = 0

    def add_cells(self, cells: Iterable[Any]) -> None:
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
        """Whether a reader makes other cells of it."""
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
