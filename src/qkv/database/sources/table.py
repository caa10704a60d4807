"""`Table`, the result of every reader, and checks of its columns and cells."""

from __future__ import annotations

import contextlib
import datetime
import shlex
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from qkv.database.errors import MixedColumnWarning
from qkv.errors import QkvError, unknown_name_error, warn_at_caller

MAX_CELL_LENGTH = 16 * 2**20
"""The maximum length of the text or bytes in a cell. A longer cell usually means a damaged file."""


class SourceLimits(NamedTuple):
    """What a reader accepts. For more, it raises `SourceError`."""

    cell_characters: int = MAX_CELL_LENGTH
    columns: int | None = None


_LIMITS: ContextVar[SourceLimits | None] = ContextVar("qkv-source-limits", default=None)


def current_limits() -> SourceLimits:
    """Return the limits for readers in this thread or task."""
    return _LIMITS.get() or SourceLimits()


@contextlib.contextmanager
def limit_sources(limits: SourceLimits) -> Iterator[None]:
    """Set the limits for readers inside the `with`. A server uses this."""
    token = _LIMITS.set(limits)
    try:
        yield
    finally:
        _LIMITS.reset(token)


_PLAIN_TYPES = {str, int, float, bool, bytes, type(None)}
_DATE_TYPES = (datetime.date, datetime.datetime, datetime.time)


class SourceError(QkvError, ValueError):
    """A table cannot be read.

    The message names the file, the line and the column, and the next step.

    >>> print(SourceError("a NUL byte", file="books.csv", line=7, column=3))
    books.csv, line 7, column 3: a NUL byte
    """

    def __init__(
        self, problem: str, *, file: str = "", line: int | None = None, column: int | None = None
    ) -> None:
        self.file, self.line, self.column = file, line, column
        location = [file] if file else []
        location += [f"line {line}"] if line is not None else []
        location += [f"column {column}"] if column is not None else []
        super().__init__(f"{', '.join(location)}: {problem}" if location else problem)


@dataclass(frozen=True)
class Table:
    """Named columns of equal length.

    A cell is str, int, float, bool, None, bytes, a date, a vector, a list or a dict.

    >>> len(Table("books", {"title": ["Emma", "Ulysses"], "year": [1815, 1922]}))
    2
    """

    name: str
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self.columns.values()), []))


@dataclass(frozen=True)
class TableSelector:
    """What to read from a database: a table, or a query. If both are None, it is the only table."""

    table: str | None = None
    query: str | None = None

    def choose_table(self, tables: Sequence[str], file: str) -> str:
        """Return the name of the selected table.

        Raise `SourceError` if it does not exist, or if none is selected and there are several.
        """
        if self.table is not None:
            if self.table not in tables:
                raise SourceError(str(unknown_name_error("table", self.table, tables)), file=file)
            return self.table
        if not tables:
            raise SourceError("there are no tables to read", file=file)
        if len(tables) > 1:
            raise SourceError(
                f"there are {len(tables)} tables ({', '.join(tables[:20])}"
                f"{', …' * (len(tables) > 20)}): choose one with table={tables[0]!r} or "
                f"?table={quote(tables[0])}, on the command line with --table "
                f"{shlex.quote(tables[0])}",
                file=file,
            )
        return tables[0]


def build_table(
    name: str, names: Sequence[Any], columns: Iterable[Iterable[Any]], file: str
) -> Table:
    """Return a table of plain cells; raise `SourceError` for a wrong name or cell."""
    check_column_names(names, file)
    pairs = zip(names, columns, strict=True)
    return Table(name, {title: to_plain_column(column, title, file) for title, column in pairs})


def check_column_names(
    names: Sequence[Any], file: str, line: int | None = None, hint: str = ""
) -> None:
    """Raise `SourceError` if there are no columns, or a name is empty, duplicate or not text.

    The message ends with `hint`.
    """
    where: dict[str, Any] = {"file": file, "line": line}
    if not names:
        raise SourceError("there are no columns to read", **where)
    check_columns(len(names), file, line)
    for position, name in enumerate(names, start=1):
        if not isinstance(name, str):
            problem = f"is named {name!r}, of type {type(name).__name__}: rename it"
            raise SourceError(f"column {position} {problem}", **where)
        if not name.strip():
            problem = f"has no name: give it one, or remove it{hint}"
            raise SourceError(f"column {position} of {len(names)} {problem}", **where)
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        positions = [
            str(position) for position, other in enumerate(names, start=1) if other == name
        ]
        problem = f"are all named {name!r}: rename all but one{hint}"
        raise SourceError(f"columns {', '.join(positions)} {problem}", **where)


def check_columns(count: int, file: str, line: int | None = None) -> None:
    """Raise `SourceError` if there are more columns than the current limit."""
    limit = current_limits().columns
    if limit is not None and count > limit:
        raise SourceError(
            f"there are {count:,} columns, but at most {limit:,} are allowed: leave some out",
            file=file,
            line=line,
        )


def no_rows_error(file: str) -> SourceError:
    """Return the error for a table that has column names but no rows."""
    return SourceError("there are only column names but no rows: add at least one row", file=file)


def to_plain_column(column: Iterable[Any], name: str, file: str) -> list[Any]:
    """Return a column with plain cells; raise `SourceError` for a cell that cannot be converted."""
    cells = column if isinstance(column, list) else list(column)
    kinds = set(map(type, cells))
    if Decimal in kinds and kinds <= {Decimal, type(None)}:
        cells = _convert_decimals(cells, name)
    elif (dates := _to_dates(cells, kinds)) is not None:
        cells = dates
    elif not kinds <= _PLAIN_TYPES:
        # Most cells have a plain type already, so convert only the others.
        for row, value in enumerate(cells):
            if type(value) not in _PLAIN_TYPES:
                try:
                    cells[row] = to_plain_cell(value)
                except (TypeError, RecursionError) as error:
                    raise SourceError(
                        f"row {row + 1} of column {name!r} holds {error}: "
                        "turn the column into text or numbers first",
                        file=file,
                    ) from None
        cells = lists_to_vectors(cells)
    return check_cell_lengths(cells, name, file)


def lists_to_vectors(column: list[Any]) -> list[Any]:
    """Return a column in which lists of floats are vectors, if all lists have the same length."""
    if not column or type(column[0]) not in (list, type(None)):
        return column
    lists = [cell for cell in column if cell is not None]
    if not all(type(cell) is list and cell and set(map(type, cell)) == {float} for cell in lists):
        return column
    if len(set(map(len, lists))) != 1:
        return column
    vectors = iter(np.array(lists))
    return [None if cell is None else next(vectors) for cell in column]


def check_cell_lengths(cells: list[Any], name: str, file: str) -> list[Any]:
    """Return the cells; raise `SourceError` if a text is too long."""
    kinds = set(map(type, cells))
    if not kinds & {str, bytes}:
        return cells
    texts = cells if kinds <= {str, bytes} else [x for x in cells if type(x) in (str, bytes)]
    longest, limit = max(texts, key=len), current_limits().cell_characters
    if len(longest) > limit:
        raise SourceError(
            f"row {[x is longest for x in cells].index(True) + 1} of column {name!r} has "
            f"{len(longest):,} characters, but a cell may have at most {limit:,}: store such a "
            "value in a separate file",
            file=file,
        )
    return cells


def _to_dates(cells: list[Any], kinds: set[type]) -> list[Any] | None:
    """Return a column of dates, datetimes or times as Python objects; None for other columns.

    A date among datetimes becomes its midnight. Times with nanoseconds stay as they are.
    """
    # pandas has its own Timestamp, with NaT for None.
    if any(kind.__name__ == "Timestamp" for kind in kinds):
        cells = [
            x and (None if x != x else x if x.nanosecond else x.to_pydatetime()) for x in cells
        ]
        kinds = set(map(type, cells))
    if kinds - {type(None)} == {datetime.date, datetime.datetime}:
        midnight = datetime.time()
        return [
            datetime.datetime.combine(x, midnight) if type(x) is datetime.date else x for x in cells
        ]
    return cells if any(kinds - {type(None)} == {kind} for kind in _DATE_TYPES) else None


def to_plain_cell(value: Any) -> Any:
    """Return a value as a plain cell; raise `TypeError` if that is impossible.

    A date becomes ISO text. A decimal becomes an exact number or text. An array of floats stays a
    vector.

    >>> (
    ...     to_plain_cell(datetime.date(1988, 4, 14)),
    ...     to_plain_cell(Decimal("12.50")),
    ...     to_plain_cell((1, np.float32(0.5))),
    ... )
    ('1988-04-14', 12.5, [1, 0.5])
    """
    if type(value) in _PLAIN_TYPES:
        return value
    if type(value).__name__ in {"NAType", "NaTType"}:  # these are pandas.NA and pandas.NaT
        return None
    match value:
        case str():
            return str.__str__(value)
        case bytes() | bytearray() | memoryview():
            return bytes(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case Decimal():
            return _convert_decimals([value])[0]
        case np.datetime64() | np.timedelta64():
            return None if np.isnat(value) else str(value)
        case datetime.timedelta() | uuid.UUID():
            return str(value)
        case _ if type(value).__module__.startswith(("ipaddress", "psycopg.types.")):
            return str(value)  # the value has one of PostgreSQL's types inet, cidr or range
        case np.generic():
            item = value.item()
            if isinstance(item, np.generic):  # a long double has no Python type
                raise TypeError(f"a {type(value).__name__}, which a cell cannot hold")
            return to_plain_cell(item)
        case np.ndarray() if value.ndim == 1 and value.dtype.kind == "f":
            return value
        case np.ndarray() | list() | tuple():
            return [to_plain_cell(item) for item in value]
        case dict() if all(isinstance(name, str) for name in value):
            return {str(name): to_plain_cell(item) for name, item in value.items()}
        case int():
            return int(value)
        case float():
            return float(value)
        case _:
            raise TypeError(f"a {type(value).__name__}, which a cell cannot hold")


def _convert_decimals(cells: list[Decimal | None], name: str = "") -> list[Any]:
    """Return decimals as ints or floats if all of them keep their value, otherwise as text.

    If the column has a name, warn that it is text.
    """
    numbers = [number for number in cells if number is not None]
    kind: type = float
    if all(number.as_tuple().exponent == 0 for number in numbers):
        kind = int
    elif inexact := [x for x in numbers if x.is_finite() and Decimal(repr(float(x))) != x]:
        kind = str
        if name:
            warn_at_caller(
                f"column {name!r} is read as text: {len(inexact):,} of its {len(cells):,} cells "
                f"have more digits than a float, such as {inexact[0]}. Round them to get numbers",
                MixedColumnWarning,
            )
    return [None if number is None else kind(number) for number in cells]
