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

from qkv.database.cells import is_missing
from qkv.database.faults import ChangedCells, unwritable
from qkv.database.schema import transposed
from qkv.database.sources.numbers import MISSING, date_form, numbers, unparted
from qkv.database.sources.table import cell as exact
from qkv.errors import ArgumentError, extra, file_name, in_folder, warn
from qkv.frames import arrow, frame
from qkv.told import jsonable
from qkv.types import releasing

Rows = Iterable[Mapping[str, Any]]

BATCH = 8192
"""Rows that are written together."""


def to_frame(columns: Sequence[str], rows: Rows, of: str | None = None) -> Any:
    """The rows as a frame of a library, or of whichever of pandas, polars and pyarrow is there."""
    found = transposed(map(_present, rows))
    return frame({name: found.get(name, []) for name in columns}, of)


def write(path: str | os.PathLike[str], columns: Sequence[str], rows: Rows, *endings: str) -> int:
    """The rows in a file, in the form of its ending, or of the first where it is none of those
    given; how many there were."""
    place = file_name(path)
    own = place.suffix.lower()
    form = FORMS.get(own if not endings or own in endings else endings[0])
    if form is None:
        raise ArgumentError(f"{place}: the name must end in {', '.join(FORMS)}")
    with whole(place) as file:
        return form(file, columns, rows)


def write_csv(file: BinaryIO, columns: Sequence[str], rows: Rows, delimiter: str = ",") -> int:
    """A line of names, then one for each row; a missing cell is empty.

    What is read again otherwise than it was is told in a warning: CSV has no types.
    """
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    how: dict[str, Any] = {"delimiter": delimiter, "lineterminator": "\n"}
    bare, quoted = csv.writer(text, **how), csv.writer(text, quoting=csv.QUOTE_ALL, **how)
    bare.writerow(columns)
    seen, count = [_Seen() for _ in columns], 0
    for batch in _batches(map(_present, rows)):
        count += len(batch)
        for about, name in zip(seen, columns, strict=True):
            about.look(row.get(name) for row in batch)
        for row in batch:
            line = [_text(row.get(name)) for name in columns]
            # Python 3.11 leaves a carriage return bare, and readers end the line there.
            (quoted if "\r" in "".join(line) else bare).writerow(line)
    text.detach()
    changed = [name for about, name in zip(seen, columns, strict=True) if about.changes]
    if changed:
        warn(
            f"column{'s' * (len(changed) > 1)} {', '.join(changed)}: some cells are read again as "
            "something else, since CSV has no types: .jsonl and .parquet keep more of them",
            ChangedCells,
        )
    return count


def _json_lines(file: BinaryIO, columns: Sequence[str], rows: Rows) -> int:
    count = 0
    for row in map(_present, rows):
        cells = {name: row.get(name) for name in columns}
        line = json.dumps(cells, ensure_ascii=False, default=_plain)
        file.write(line.encode() + b"\n")
        count += 1
    return count


def _plain(cell: Any) -> Any:
    """What JSON has for a cell: of a decimal the number, where a reader finds the same one."""
    return exact(cell) if isinstance(cell, Decimal) else jsonable(cell)


def _parquet(file: BinaryIO, columns: Sequence[str], rows: Rows) -> int:
    with extra("tables", "writing Parquet needs pyarrow"):
        import pyarrow.parquet
    found = transposed(map(_present, rows))
    made = {name: arrow(name, found.get(name, [])) for name in columns}
    table = pyarrow.table(made)
    pyarrow.parquet.write_table(table, file)
    return len(table)


FORMS: dict[str, Callable[[BinaryIO, Sequence[str], Rows], int]] = {
    ".csv": write_csv,
    ".tsv": partial(write_csv, delimiter="\t"),
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}
"""How a file is written, by the ending of its name."""


@releasing
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of whatever `path` held when it is finished, by a rename."""
    if path.is_dir():
        raise ArgumentError(f"{path} is a folder: name a file in it")
    # Its name is known before it is there, so that Ctrl-C cannot fall between the two.
    aside = in_folder(path).with_name(f".{path.name}.{token_hex(4)}")
    try:
        with open(aside, "xb") as file:
            yield file
        os.replace(aside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        # What a connection says is of the rows, not of the file.
        if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
            raise unwritable(path, error) from error
        raise


def _present(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with None for every cell that is missing: a NaN, or a vector that holds one."""
    return {name: None if _is_missing(cell) else cell for name, cell in row.items()}


def _is_missing(cell: Any) -> bool:
    if isinstance(cell, np.ndarray):
        return cell.dtype.kind == "f" and bool(np.isnan(cell).any())
    return is_missing(cell)


def _batches(rows: Rows) -> Iterator[list[Mapping[str, Any]]]:
    rest = iter(rows)
    while batch := list(islice(rest, BATCH)):
        yield batch


def _text(cell: Any) -> str:
    """A cell as text: missing ones empty, lists, tuples and vectors as JSON."""
    if isinstance(cell, str):
        return cell
    if cell is None:
        return ""
    if isinstance(cell, float):
        return repr(cell)
    plain = jsonable(cell)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


_DATES = {datetime.date, datetime.datetime}


class _Seen:
    """What stood in a column, as far as it matters to whoever reads it as text again."""

    def __init__(self) -> None:
        self._kinds: set[type] = set()
        self._odd = self._words = self._finite = False
        self._dates: set[str | None] = set()
        self._largest = 0

    def look(self, cells: Iterable[Any]) -> None:
        present = [x for x in cells if x is not None]
        kinds = set(map(type, present))
        self._kinds |= kinds
        if str in kinds:
            texts = {x for x in present if type(x) is str}
            self._odd |= any(text.strip() in ABSENT or "\0" in text for text in texts)
            self._words = self._words or any(
                type(numbers([unparted(text)])[0]) is str for text in texts
            )
            self._dates |= {date_form(text.strip()) for text in texts}
        elif kinds & _DATES:
            self._dates |= {date_form(_text(x)) for x in present}
        if int in kinds:
            self._largest = max(self._largest, *(abs(x) for x in present if type(x) is int))
        self._finite = self._finite or any(type(x) is float and isfinite(x) for x in present)

    @property
    def changes(self) -> bool:
        """Whether a reader makes other cells of it."""
        kinds, dates = self._kinds, len(self._dates) == 1 and None not in self._dates
        if kinds <= {str}:
            return self._odd or (bool(kinds) and (dates or not self._words))
        if len(kinds) == 1 and kinds <= _DATES:
            return not dates
        if kinds == {int}:
            return self._largest >= 2**63
        exact = self._largest < 2**53
        return not (kinds <= {int, float} and exact and (self._finite or int in kinds))


ABSENT = {*MISSING, ""}
