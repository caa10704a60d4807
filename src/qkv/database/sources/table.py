"""What every source becomes: named columns of plain cells, checked as a whole."""

from __future__ import annotations

import contextlib
import datetime
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from qkv.database.errors import MixedColumnWarning
from qkv.errors import QkvError, warn_at_caller

# The longest text or bytes in one cell: above it, a file is more often broken than rich.
MAX_CELL_LENGTH = 16 * 2**20


class SourceLimits(NamedTuple):
    """How much a reader accepts; what is more is refused where it is met."""

    cell_characters: int = MAX_CELL_LENGTH
    columns: int | None = None


_LIMITS: ContextVar[SourceLimits | None] = ContextVar("qkv-source-limits", default=None)


def current_limits() -> SourceLimits:
    """The limits of the readers of this thread."""
    return _LIMITS.get() or SourceLimits()


@contextlib.contextmanager
def limit_sources(limits: SourceLimits) -> Iterator[None]:
    """Read with other limits than the usual, as a server does."""
    token = _LIMITS.set(limits)
    try:
        yield
    finally:
        _LIMITS.reset(token)


_PLAIN_TYPES = {str, int, float, bool, bytes, type(None)}
_DATE_TYPES = (datetime.date, datetime.datetime, datetime.time)


class SourceError(QkvError, ValueError):
    """A table cannot be read: which file, where in it (line and column from 1), what to do.

    >>> print(SourceError("a NUL byte", file="books.csv", line=7, column=3))
    books.csv, line 7, column 3: a NUL byte
    """

    def __init__(
        self, what: str, *, file: str = "", line: int | None = None, column: int | None = None
    ) -> None:
        self.file, self.line, self.column = file, line, column
        places = [file] if file else []
        places += [f"line {line}"] if line is not None else []
        places += [f"column {column}"] if column is not None else []
        super().__init__(f"{', '.join(places)}: {what}" if places else what)


@dataclass(frozen=True)
class Table:
    """Named columns of equal length; a cell is str, int, float, bool, None, bytes, a date, a
    vector, a list or a dict.

    >>> len(Table("books", {"title": ["Emma", "Ulysses"], "year": [1815, 1922]}))
    2
    """

    name: str
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()), []))


def build_table(
    name: str, names: Sequence[Any], columns: Iterable[Iterable[Any]], file: str
) -> Table:
    """The table of these columns, or the error that says which name or cell cannot be kept."""
    check_column_names(names, file)
    pairs = zip(names, columns, strict=True)
    return Table(name, {title: to_plain_column(column, title, file) for title, column in pairs})


def check_column_names(
    names: Sequence[Any], file: str, line: int | None = None, otherwise: str = ""
) -> None:
    """Refuse a table without columns, and column names that are empty, double or no text; what else
    may be done is told `otherwise`."""
    where: dict[str, Any] = {"file": file, "line": line}
    if not names:
        raise SourceError("no columns: there is nothing to read", **where)
    check_columns(len(names), file, line)
    for place, name in enumerate(names, start=1):
        if not isinstance(name, str):
            told = f"is named {name!r}, of type {type(name).__name__}: rename it"
            raise SourceError(f"column {place} {told}", **where)
        if not name.strip():
            told = f"has no name: give it one, or remove it{otherwise}"
            raise SourceError(f"column {place} of {len(names)} {told}", **where)
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        places = [str(place) for place, other in enumerate(names, start=1) if other == name]
        told = f"are all named {name!r}: rename all but one{otherwise}"
        raise SourceError(f"columns {', '.join(places)} {told}", **where)


def check_columns(count: int, file: str, line: int | None = None) -> None:
    """Refuse more columns than the reader's limit."""
    most = current_limits().columns
    if most is not None and count > most:
        told = f"{count:,} columns, and {most:,} are the most that are read here"
        raise SourceError(f"{told}: leave some out", file=file, line=line)


def no_rows_error(file: str) -> SourceError:
    """The error for a table that has column names and nothing under them."""
    return SourceError("only column names, no rows: add at least one row", file=file)


def to_plain_column(column: Iterable[Any], name: str, file: str) -> list[Any]:
    """The column with every cell as one of the plain types, and none too long."""
    cells = column if isinstance(column, list) else list(column)
    kinds = set(map(type, cells))
    if Decimal in kinds and kinds <= {Decimal, type(None)}:
        cells = _convert_decimals(cells, name)
    elif (dates := _to_dates(cells, kinds)) is not None:
        cells = dates
    elif not kinds <= _PLAIN_TYPES:
        # Only a cell of another type has to be looked into.
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
    """The column, with vectors for cells that are lists of as many floats each."""
    if not column or type(column[0]) not in (list, type(None)):
        return column
    lists = [cell for cell in column if cell is not None]
    if not all(type(cell) is list and cell and set(map(type, cell)) == {float} for cell in lists):
        return column
    if len(set(map(len, lists))) != 1:
        return column
    made = iter(np.array(lists))
    return [None if cell is None else next(made) for cell in column]


def check_cell_lengths(cells: list[Any], name: str, file: str) -> list[Any]:
    """The column, or the error of a cell that is too long."""
    kinds = set(map(type, cells))
    if not kinds & {str, bytes}:
        return cells
    texts = cells if kinds <= {str, bytes} else [x for x in cells if type(x) in (str, bytes)]
    longest, most = max(texts, key=len), current_limits().cell_characters
    if len(longest) > most:
        raise SourceError(
            f"row {[x is longest for x in cells].index(True) + 1} of column {name!r} is "
            f"{len(longest):,} long, and {most:,} is the most a cell may be: store such a value "
            "in a file of its own",
            file=file,
        )
    return cells


def _to_dates(cells: list[Any], kinds: set[type]) -> list[Any] | None:
    """A column of days, of moments or of times as Python has them, if it holds nothing else and
    nothing finer than microseconds; a day among moments is its midnight."""
    if any(kind.__name__ == "Timestamp" for kind in kinds):  # of pandas, with NaT for None
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
    """The plain cell that says the same: a date as ISO text, decimals as exact numbers or text; an
    array of floats is a vector.

    >>> (
    ...     to_plain_cell(datetime.date(1988, 4, 14)),
    ...     to_plain_cell(Decimal("12.50")),
    ...     to_plain_cell((1, np.float32(0.5))),
    ... )
    ('1988-04-14', 12.5, [1, 0.5])
    """
    if type(value) in _PLAIN_TYPES:
        return value
    if type(value).__name__ in {"NAType", "NaTType"}:  # pandas' two other words for None
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
            return str(value)  # addresses, networks and ranges of PostgreSQL
        case np.generic():
            item = value.item()
            # A long double is its own item.
            if isinstance(item, np.generic):
                raise TypeError(f"a {type(value).__name__}, which is no kind of cell")
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
            raise TypeError(f"a {type(value).__name__}, which is no kind of cell")


def _convert_decimals(cells: list[Decimal | None], name: str = "") -> list[Any]:
    """Decimals as ints or floats where every one of them keeps its value, else as text, which is
    told of a column that has a name."""
    numbers = [number for number in cells if number is not None]
    kind: type = float
    if all(number.as_tuple().exponent == 0 for number in numbers):
        kind = int
    elif odd := [x for x in numbers if x.is_finite() and Decimal(repr(float(x))) != x]:
        kind = str
        if name:
            told = f"column {name!r} is text for {len(odd):,} of {len(cells):,} cells"
            warn_at_caller(
                f"{told} that a float would not keep, such as {odd[0]}: round them",
                MixedColumnWarning,
            )
    return [None if number is None else kind(number) for number in cells]
