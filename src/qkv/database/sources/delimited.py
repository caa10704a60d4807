"""CSV and TSV: a header, then one record a line, cells in quotes where they need them."""

from __future__ import annotations

import csv
import io
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from qkv.database.errors import NoHeaderWarning
from qkv.database.sources import files
from qkv.database.sources.table import (
    SourceError,
    Table,
    check_column_names,
    check_columns,
    current_limits,
    no_rows_error,
)
from qkv.database.sources.type_inference import (
    MISSING_WORDS,
    header_looks_like_row,
    infer_types,
    parse_numbers,
    remove_thousands_commas,
    replace_decimal_commas,
)
from qkv.errors import warn_at_caller
from qkv.util.deadline import check_deadline
from qkv.util.types import ProgressCallback

DELIMITERS = (",", ";", "\t", "|")

_NAMES_HINT = "give names=[…], which is --names on the command line"
# So few records that they stay in the processor's cache until they are columns.
_RECORDS_PER_BATCH = 1024
_SAMPLE_CHARACTERS = 64 * 1024
_NOT_DECIMAL_COMMA = re.compile(r"(?<!\d),|,(?!\d)")  # a comma that is not between digits
_FIELD_LIMIT_LOCK = threading.Lock()


@dataclass(frozen=True)
class TextOptions:
    """How lines of text are read: which words are missing cells; the columns' names, where no line
    gives them; which columns stay text; whether every cell stays as it is."""

    missing: Sequence[str] = MISSING_WORDS
    names: Sequence[str] = ()
    text: Sequence[str] | bool = ()
    raw: bool = False


DEFAULT_TEXT_OPTIONS = TextOptions()


def read_delimited(
    data: bytes,
    name: str,
    file: str,
    delimiter: str | None,
    progress: ProgressCallback | None = None,
    lines: TextOptions = DEFAULT_TEXT_OPTIONS,
) -> Table:
    """The table in these bytes; `delimiter` None: the one of , ; tab | that fits the first lines.

    UTF-8 with or without byte order mark. Blank lines are passed over, and columns without a name
    that hold nothing or, the first, count the rows from 0 as pandas writes its index. Which columns
    become numbers, and which cells are missing: see `parse_numbers`; between semicolons, numbers
    may have decimal commas, and else commas that part thousands. Words such as true stay text.

    >>> read_delimited(b"name;age\\nLi;34\\n", "people", "people.csv", None).columns
    {'name': ['Li'], 'age': [34]}
    """
    text = files.decode_text(data, file)
    if delimiter is None:
        delimiter, _ = sniff_delimiter(text)
    parsed = zip(*_parse_columns(text, delimiter, file, progress, lines.names), strict=True)
    columns = [pair for place, pair in enumerate(parsed) if _has_content(place, *pair)]
    names, line = (
        [name for name, _ in columns],
        files.line_and_column(text[: _skip_blank_lines(text, 0)])[0],
    )
    if not lines.names and (wide := _width_below_title(names, text)):
        raise SourceError(
            f"one name where the lines below have {wide} cells: if this is a title, remove it; if "
            "the lines are one column, put quotes around each",
            file=file,
            line=line,
        )
    found, cells = dict(columns), [cells for _, cells in columns]
    if len(found) == len(columns):
        plain = replace_decimal_commas if delimiter == ";" else remove_thousands_commas
        stay = found if lines.text is True else lines.text or ()
        others = {name: cells for name, cells in found.items() if name not in stay}
        found |= plain(others, lines.missing)
        cells = [*found.values()]
    row = not lines.names and header_looks_like_row(names, cells, lines.missing)
    check_column_names(names, file, line, f"; if this is a row, {_NAMES_HINT}" if row else "")
    if progress is not None:
        progress(len(text), len(text))
    if not columns[0][1]:
        raise no_rows_error(file)
    if row:
        told = f"{file}, line {line} looks like a row, not like names: if it is one, {_NAMES_HINT}"
        warn_at_caller(told, NoHeaderWarning)
    return Table(name, found if lines.raw else infer_types(found, lines.missing, lines.text))


def _has_content(place: int, name: str, cells: list[str]) -> bool:
    """Whether a column has a name, or cells that lack one."""
    if name.strip():
        return True
    return any(map(str.strip, cells)) and (place > 0 or cells != [*map(str, range(len(cells)))])


def _width_below_title(names: list[str], text: str) -> int:
    """How many cells the lines have below a first that names one column and so may be a title; 0
    where it is none. Two cells that are no numbers may well be one: "Last, First"."""
    if len(names) > 2 and names[0].strip() and not any(map(str.strip, names[1:])):
        return len(names)
    if len(names) != 1:
        return 0
    for delimiter in DELIMITERS:
        rows = _sample_records(text, delimiter)[1:]
        wide = len(rows[0]) if rows else 1
        if wide > 1 and len(rows) > 1 and {*map(len, rows)} == {wide}:
            cells = (
                x
                for c in zip(*rows[1:], strict=True)
                for x in parse_numbers(list(c), MISSING_WORDS)
            )
            if min(wide, len(rows)) > 2 or any(isinstance(x, int | float) for x in cells):
                return wide
    return 0


def _parse_columns(
    text: str, delimiter: str, file: str, progress: ProgressCallback | None, given: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Names and columns, record by record, or the error of the first that cannot be read."""
    names: list[str] = []
    columns: list[list[str]] = []
    before = 0
    for batch, done in _read_batches(text, delimiter):
        check_deadline()
        if batch is None or len(set(map(len, batch)) | {len(names or batch[0])}) > 1:
            raise _find_error(text, delimiter, file, before, len(names))
        before = done
        if not names:
            check_columns(len(batch[0]), file, 1)
            names = _check_given_names(batch[0], given, file) if given else batch.pop(0)
            columns = [[] for _ in names]
        for column, cells in zip(columns, zip(*batch, strict=True), strict=False):
            column.extend(cells)
        if progress is not None:
            progress(done, len(text))
    return names, columns


def _check_given_names(first: list[str], given: Sequence[str], file: str) -> list[str]:
    """The names that were given, where they fit the first record."""
    if len(first) != len(given):
        told = f"{len(first)} cells where {len(given)} name{'s were' * (len(given) > 1) or ' was'}"
        raise SourceError(f"{told} given: name every column", file=file, line=1)
    if first == [*given]:
        raise SourceError("these are the names: leave names= out", file=file, line=1)
    return [*given]


def sniff_delimiter(text: str) -> tuple[str, bool]:
    """The delimiter under which the first records have as many cells as the header.

    Also whether that is convincing: two columns or more, and no record that disagrees. Commas that
    all stand between digits are decimal where semicolons are convincing.

    >>> sniff_delimiter("name;price, with tax\\nLi;3\\n")
    (';', True)
    >>> sniff_delimiter("1,5;2,5\\n3,0;4,5\\n")
    (';', True)
    """
    fits = []
    for delimiter in DELIMITERS:
        widths = [*map(len, _sample_records(text, delimiter))]
        width = widths[0] if widths else 1
        fits.append((width > 1, widths.count(width) / max(1, len(widths)), width))
    best = max(range(len(fits)), key=fits.__getitem__)
    semicolon = DELIMITERS.index(";")
    if fits[semicolon][:2] == (True, 1) and not _NOT_DECIMAL_COMMA.search(
        text[:_SAMPLE_CHARACTERS]
    ):
        best = semicolon
    return DELIMITERS[best], fits[best][0] and fits[best][1] == 1


def _sample_records(text: str, delimiter: str) -> list[list[str]]:
    """The first records."""
    lines = io.StringIO(text[:_SAMPLE_CHARACTERS], newline="")
    with _allow_long_fields(_SAMPLE_CHARACTERS):
        records = [*filter(None, csv.reader(lines, delimiter=delimiter))]
    return (
        records[:-1] if len(text) > _SAMPLE_CHARACTERS and len(records) > 1 else records
    )  # one is cut off


def _read_batches(text: str, delimiter: str) -> Iterator[tuple[list[list[str]] | None, int]]:
    """Records, many at a time, and where they end; None where one cannot be parsed."""
    lines = io.StringIO(text, newline="")
    records = filter(None, csv.reader(lines, delimiter=delimiter, strict=True))
    batch: list[list[str]] | None = []
    while batch is not None:
        try:
            with _allow_long_fields(current_limits().cell_characters):
                batch = list(islice(records, _RECORDS_PER_BATCH))
        except csv.Error:
            batch = None
        if batch == []:
            return
        yield batch, lines.tell()


@contextmanager
def _allow_long_fields(longest: int) -> Iterator[None]:
    """Let csv read cells of so many characters; csv has one limit for the whole process, so one
    thread reads at a time."""
    with _FIELD_LIMIT_LOCK:
        before = csv.field_size_limit(longest)
        try:
            yield
        finally:
            csv.field_size_limit(before)


_MORE_CELLS = 1_000
"""Cells beyond the header's that are counted before a record is refused."""


def _find_error(
    text: str, delimiter: str, file: str, begin: int = 0, width: int = 0
) -> SourceError:
    """The error of the first record from `begin` on that cannot be read or has not `width` cells
    (0: as many as the first), found by a second and slower look. A record is refused at the cell
    that is too long, or one too many, not at its end."""

    def error_here(what: str, at: int) -> SourceError:
        return files.error_at(what, text, at, file)

    name = "tab" if delimiter == "\t" else delimiter
    cell = re.compile(rf'"[^"]*+(?:""[^"]*+)*+"|(?!")[^{re.escape(delimiter)}\r\n]*')
    end, longest = begin, current_limits().cell_characters
    columns = current_limits().columns
    while (at := _skip_blank_lines(text, end)) < len(text):
        starts: list[int] = []
        while not starts or text[end : end + 1] == delimiter:
            at = end + 1 if starts else at
            starts.append(at)
            if width and len(starts) > width + _MORE_CELLS:
                break
            if not width and columns is not None and len(starts) > columns:
                what = f"more than {columns:,} columns, the most that are read here: leave some out"
                return error_here(what, at)
            found = cell.match(text, at)
            if found is None:
                return error_here("a quote opens here and never closes: close it, or double it", at)
            end, quoted = found.end(), found[0].startswith('"')
            if end - at - 2 * quoted > longest:
                return error_here(
                    f"a cell of more than {longest:,} characters begins here: is a quote not "
                    "closed? Store a value this long in a file of its own",
                    at,
                )
            if text[end : end + 1] not in ("", delimiter, "\r", "\n"):
                line, column = files.line_and_column(text[:at])
                return error_here(
                    f"{text[end]!r} follows a closing quote: a quote within the cell that opens at "
                    f"line {line}, column {column} must be doubled",
                    end,
                )
        width = width or len(starts)
        if len(starts) > width:
            more = "more than " * (len(starts) > width + _MORE_CELLS)
            return error_here(
                f"{more}{len(starts) - bool(more)} cells where the header has {width}: put quotes "
                f"around a cell that holds the delimiter ({name})",
                starts[width],
            )
        if len(starts) < width:
            return error_here(
                f"{len(starts)} cell{'s' * (len(starts) > 1)} where the header has {width}: a "
                f"delimiter ({name}) or a closing quote is missing",
                end,
            )
    raise AssertionError("csv refused what this parser accepts")


def _skip_blank_lines(text: str, at: int) -> int:
    """Where the next record begins: past line ends and blank lines."""
    while text[at : at + 1] in ("\r", "\n"):
        at += 1
    return at
