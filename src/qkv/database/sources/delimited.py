"""Read CSV and TSV: a header line, then one record per line. Cells may be in quotes."""

from __future__ import annotations

import csv
import io
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from qkv.database.errors import NoHeaderWarning
from qkv.database.sources import files
from qkv.database.sources.formats import DEFAULT_TEXT_OPTIONS, TextOptions
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

_NAMES_HINT = "give names=[…] (--names on the command line)"
_RECORDS_PER_BATCH = 1024
"""The number of records in a batch.

It fits the processor's cache until it is split into columns.
"""
_SAMPLE_CHARACTERS = 64 * 1024
_NOT_DECIMAL_COMMA = re.compile(r"(?<!\d),|,(?!\d)")  # finds a comma that is not between digits
_FIELD_LIMIT_LOCK = threading.Lock()


def read_delimited(
    data: bytes,
    name: str,
    file: str,
    delimiter: str | None,
    progress: ProgressCallback | None = None,
    options: TextOptions = DEFAULT_TEXT_OPTIONS,
) -> Table:
    """Parse CSV or TSV. If `delimiter` is None, the one of , ; tab | that fits the text is used.

    The text is UTF-8, with or without a byte order mark. Blank lines are skipped, and so are empty
    columns without a name. If the first column has no name and counts the rows from 0, it is an
    index that pandas has written, and is skipped too.

    `parse_numbers` decides which columns become numbers and which cells are missing. If semicolons
    separate the cells, numbers may have decimal commas. Otherwise, commas may separate thousands.
    Words such as true stay text.

    >>> read_delimited(b"name;age\\nLi;34\\n", "people", "people.csv", None).columns
    {'name': ['Li'], 'age': [34]}
    """
    text = files.decode_utf8(data, file)
    if delimiter is None:
        delimiter, _ = sniff_delimiter(text)
    parsed = zip(*_parse_columns(text, delimiter, file, progress, options.names), strict=True)
    pairs = [pair for position, pair in enumerate(parsed) if _has_content(position, *pair)]
    names = [name for name, _ in pairs]
    line = files.line_and_column(text[: _skip_blank_lines(text, 0)])[0]
    if not options.names and (width := _width_below_title(names, text)):
        raise SourceError(
            f"this line has one name, but the lines below have {width} cells: if this line is a "
            "title, remove it; if each line is one cell, put quotes around it",
            file=file,
            line=line,
        )
    columns, cells = dict(pairs), [cells for _, cells in pairs]
    if len(columns) == len(pairs):
        normalize = replace_decimal_commas if delimiter == ";" else remove_thousands_commas
        as_text = columns if options.text is True else options.text or ()
        others = {name: cells for name, cells in columns.items() if name not in as_text}
        columns |= normalize(others, options.missing)
        cells = [*columns.values()]
    is_row = not options.names and header_looks_like_row(names, cells, options.missing)
    check_column_names(names, file, line, f"; if this is a row, {_NAMES_HINT}" if is_row else "")
    if progress is not None:
        progress(len(text), len(text))
    if not pairs[0][1]:
        raise no_rows_error(file)
    if is_row:
        warn_at_caller(
            f"{file}, line {line} looks like a row, not like column names: if it is a row, "
            f"{_NAMES_HINT}",
            NoHeaderWarning,
        )
    return Table(
        name, columns if options.raw else infer_types(columns, options.missing, options.text)
    )


def _has_content(position: int, name: str, cells: list[str]) -> bool:
    """Return whether a column has a name, or cells other than an index that pandas has written."""
    if name.strip():
        return True
    return any(map(str.strip, cells)) and (position > 0 or cells != [*map(str, range(len(cells)))])


def _width_below_title(names: list[str], text: str) -> int:
    """Return the number of cells per line if the first line is a title; 0 if it is the header.

    Lines of two cells without numbers do not prove a title: they may be one text, as in "Last,
    First".
    """
    if len(names) > 2 and names[0].strip() and not any(map(str.strip, names[1:])):
        return len(names)
    if len(names) != 1:
        return 0
    for delimiter in DELIMITERS:
        rows = _sample_records(text, delimiter)[1:]
        width = len(rows[0]) if rows else 1
        if width > 1 and len(rows) > 1 and {*map(len, rows)} == {width}:
            cells = (
                x
                for c in zip(*rows[1:], strict=True)
                for x in parse_numbers(list(c), MISSING_WORDS)
            )
            if min(width, len(rows)) > 2 or any(isinstance(x, int | float) for x in cells):
                return width
    return 0


def _parse_columns(
    text: str,
    delimiter: str,
    file: str,
    progress: ProgressCallback | None,
    column_names: Sequence[str],
) -> tuple[list[str], list[list[str]]]:
    """Return the names and the cells of all columns; raise `SourceError` for a malformed record."""
    names: list[str] = []
    columns: list[list[str]] = []
    batch_start = 0
    for batch, done in _read_batches(text, delimiter):
        check_deadline()
        if batch is None or len(set(map(len, batch)) | {len(names or batch[0])}) > 1:
            raise _find_error(text, delimiter, file, batch_start, len(names))
        batch_start = done
        if not names:
            check_columns(len(batch[0]), file, 1)
            if column_names:
                names = _check_names_option(batch[0], column_names, file)
            else:
                names = batch.pop(0)
            columns = [[] for _ in names]
        for column, cells in zip(columns, zip(*batch, strict=True), strict=False):
            column.extend(cells)
        if progress is not None:
            progress(done, len(text))
    return names, columns


def _check_names_option(first: list[str], names: Sequence[str], file: str) -> list[str]:
    """Return the names that the caller passed.

    Raise `SourceError` if the first record contradicts them.
    """
    if len(first) != len(names):
        raise SourceError(
            f"this line has {len(first)} cells, but names= has {len(names)}: name every column",
            file=file,
            line=1,
        )
    if first == [*names]:
        raise SourceError(
            "this line contains the same names already: leave names= out", file=file, line=1
        )
    return [*names]


def sniff_delimiter(text: str) -> tuple[str, bool]:
    """Return the delimiter that splits the first records into as many cells as the header.

    Also return whether the choice is certain: there are at least two columns, and all records
    agree. If semicolons are certain and every comma is between two digits, semicolons are chosen.

    >>> sniff_delimiter("name;price, with tax\\nLi;3\\n")
    (';', True)
    >>> sniff_delimiter("1,5;2,5\\n3,0;4,5\\n")
    (';', True)
    """
    agreement = []
    for delimiter in DELIMITERS:
        widths = [*map(len, _sample_records(text, delimiter))]
        width = widths[0] if widths else 1
        agreement.append((width > 1, widths.count(width) / max(1, len(widths)), width))
    best = max(range(len(agreement)), key=agreement.__getitem__)
    semicolon = DELIMITERS.index(";")
    if agreement[semicolon][:2] == (True, 1) and not _NOT_DECIMAL_COMMA.search(
        text[:_SAMPLE_CHARACTERS]
    ):
        best = semicolon
    return DELIMITERS[best], agreement[best][0] and agreement[best][1] == 1


def _sample_records(text: str, delimiter: str) -> list[list[str]]:
    """Return the complete records within the first `_SAMPLE_CHARACTERS`."""
    lines = io.StringIO(text[:_SAMPLE_CHARACTERS], newline="")
    with _allow_long_fields(_SAMPLE_CHARACTERS):
        records = [*filter(None, csv.reader(lines, delimiter=delimiter))]
    is_cut = len(text) > _SAMPLE_CHARACTERS and len(records) > 1
    return records[:-1] if is_cut else records


def _read_batches(text: str, delimiter: str) -> Iterator[tuple[list[list[str]] | None, int]]:
    """Yield (records, position after them) batch by batch.

    The records of a malformed batch are None.
    """
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
    """Raise the limit of the csv module on the length of a cell, inside a `with`.

    The limit is global to the process, so only one thread at a time may parse.
    """
    with _FIELD_LIMIT_LOCK:
        before = csv.field_size_limit(longest)
        try:
            yield
        finally:
            csv.field_size_limit(before)


_MORE_CELLS = 1_000
"""Up to this number of surplus cells are counted, for the error about a record."""


def _find_error(
    text: str, delimiter: str, file: str, begin: int = 0, width: int = 0
) -> SourceError:
    """Return the error for the first malformed record from position `begin` on.

    This second parser is slower than csv, but knows the position of each cell. A record must have
    `width` cells; 0 means the number of cells in the first record. The error names the position of
    the first cell that is too long or surplus.
    """

    def error_here(problem: str, at: int) -> SourceError:
        return files.error_at(problem, text, at, file)

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
                problem = (
                    f"there are more than {columns:,} columns, which is the limit: leave some out"
                )
                return error_here(problem, at)
            match = cell.match(text, at)
            if match is None:
                return error_here(
                    "a quote opens here but never closes: add the closing quote, or double it",
                    at,
                )
            end, quoted = match.end(), match[0].startswith('"')
            if end - at - 2 * quoted > longest:
                return error_here(
                    f"a cell of more than {longest:,} characters begins here: close its quote, or "
                    "store such a value in a separate file",
                    at,
                )
            if text[end : end + 1] not in ("", delimiter, "\r", "\n"):
                line, column = files.line_and_column(text[:at])
                return error_here(
                    f"{text[end]!r} follows a closing quote: double the quotes inside the cell "
                    f"that opens at line {line}, column {column}",
                    end,
                )
        width = width or len(starts)
        if len(starts) > width:
            more = "more than " * (len(starts) > width + _MORE_CELLS)
            return error_here(
                f"this row has {more}{len(starts) - bool(more)} cells, but the header has {width}: "
                f"put quotes around a cell that contains the delimiter ({name})",
                starts[width],
            )
        if len(starts) < width:
            return error_here(
                f"this row has {len(starts)} cell{'s' * (len(starts) > 1)}, but the header has "
                f"{width}: a delimiter ({name}) or a closing quote is missing",
                end,
            )
    raise AssertionError("the csv module rejected text that this parser accepts")


def _skip_blank_lines(text: str, position: int) -> int:
    """Return the position of the next record, after line breaks and blank lines."""
    while text[position : position + 1] in ("\r", "\n"):
        position += 1
    return position
