"""JSON lines (one object a line) and a JSON array of objects: an object is a row."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, repeat
from typing import Any

from qkv.database.sources import files
from qkv.database.sources.table import (
    Table,
    check_cell_lengths,
    check_column_names,
    current_limits,
    lists_to_vectors,
)
from qkv.errors import warn_at_caller
from qkv.util.deadline import check_deadline
from qkv.util.types import ProgressCallback

_WHITESPACE = re.compile(r"[ \t\r\n]*")
_LINE_PATTERN = re.compile(r"[^\r\n]+")
_SURROGATE_PATTERN = re.compile(r"\\u[dD][89a-fA-F]")
# A colon after a text's closing quote, before which stand backslashes in pairs or none.
_NAME_PATTERN = re.compile(rb'(?<!\\)(?:\\\\)*"[ \t\r\n]*:')
# So few rows that they stay in the processor's cache until they are columns.
_ROWS_PER_BATCH = 1024
# Beyond it, names are data: a table of them would be columns² of None.
_MAX_COLUMNS = 4096


def read_json(data: bytes, name: str, file: str, progress: ProgressCallback | None = None) -> Table:
    """The table whose columns are the names in the objects, in the order they first appear.

    A name that an object lacks is None in its row. NaN and Infinity, which JSON does not have but
    many write, are floats. A column of lists of floats, all of one length, is one of vectors.

    >>> read_json(b'{"name": "Li", "age": 34}\\n{"name": "Mu"}', "people", "people.jsonl").columns
    {'name': ['Li', 'Mu'], 'age': [34, None]}
    """
    text = files.decode_text(data, file)
    listed = text.startswith("[", _skip_space(text, 0))
    columns = _read_with_orjson(data, listed, progress)
    try:
        columns = columns or _rows_to_columns(_read_rows(text, listed), progress, len(text))[0]
    except _JsonError as fault:
        raise files.error_at(fault.message, text, fault.position, file) from None
    if progress is not None:
        progress(len(data), len(data))
    check_column_names(list(columns), file)
    _warn_nested_rows(columns, file)
    # What JSON has are plain cells as they stand.
    columns = {title: lists_to_vectors(cells) for title, cells in columns.items()}
    if len(data) > current_limits().cell_characters:
        columns = {
            title: check_cell_lengths(cells, title, file) for title, cells in columns.items()
        }
    return Table(name, columns)


def _warn_nested_rows(columns: dict[str, list[Any]], file: str) -> None:
    """Tell of a table that is one row with the rows in it, as many an API sends them."""
    for title, cells in columns.items():
        inner = cells[0] if len(cells) == 1 and isinstance(cells[0], list) else []
        if len(inner) > 1 and all(isinstance(x, dict) for x in inner):
            warn_at_caller(
                f"{file}: one row, whose {title!r} is a list of {len(inner):,} objects: if those "
                "are the rows, write that list alone into a file"
            )


def _rows_to_columns(
    batches: Iterable[tuple[list[dict[str, Any]], int]],
    progress: ProgressCallback | None,
    total: int,
) -> tuple[dict[str, list[Any]], int]:
    """Rows as columns, and how many cells they had; each batch comes with how far it reaches."""
    columns: dict[str, list[Any]] = {}
    count = cells = 0
    for rows, done in batches:
        check_deadline()
        for title in dict.fromkeys(chain.from_iterable(rows)):
            if title not in columns:
                columns[title] = [None] * count
        if len(columns) > min(current_limits().columns or _MAX_COLUMNS, _MAX_COLUMNS):
            raise ValueError("too many names")
        for title, column in columns.items():
            column += [*map(dict.get, rows, repeat(title))]
        count += len(rows)
        cells += sum(map(len, rows))
        if progress is not None:
            progress(done, total)
    return columns, cells


def _read_with_orjson(
    data: bytes, listed: bool, progress: ProgressCallback | None
) -> dict[str, list[Any]] | None:
    """The columns by orjson, where it is installed; None where it may not read them as we do.

    What it refuses may be NaN, or is told by `_read_rows`. It keeps the last of two equal names,
    and makes floats of ints beyond 64 bits and infinities of what is more.
    """
    try:
        from orjson import loads
    except ImportError:
        return None
    data = data.removeprefix(codecs.BOM_UTF8)
    if b"\r" in data:
        if data.count(b"\r") > data.count(b"\r\n"):  # lines end there too
            return None
        data = data.replace(b"\r", b"")

    def parse_batches() -> Iterator[tuple[list[Any], int]]:
        lines = [*filter(None, data.split(b"\n"))]
        for at in range(0, len(lines), _ROWS_PER_BATCH):
            done = len(data) * min(at + _ROWS_PER_BATCH, len(lines)) // len(lines)
            yield [*map(loads, lines[at : at + _ROWS_PER_BATCH])], done

    try:
        whole = [(loads(data), len(data))] if listed else parse_batches()
        columns, names = _rows_to_columns(whole, progress, len(data))
        names += sum(map(_count_names, columns.values()))
    except (ValueError, TypeError, RecursionError):
        return None
    # Text may hold colons too; then those after a name are counted, one by one.
    return columns if columns and names in _count_colons(data) else None


def _count_colons(data: bytes) -> Iterator[int]:
    """How many names there are at most, each time with more care; the last is how many."""
    yield data.count(b":")
    yield sum(data.count(before + b":") for before in (b'"', b" ", b"\t", b"\n"))
    yield len(_NAME_PATTERN.findall(data))


def _count_names(cells: Collection[Any]) -> int:
    """How many names the objects within these cells have; an error where a float is none."""
    kinds = set(map(type, cells))
    if float in kinds:
        floats = cells if kinds == {float} else [cell for cell in cells if type(cell) is float]
        if max(max(floats), -min(floats)) >= 2**63:
            raise ValueError("an int that was too long")
    if not kinds & {dict, list}:
        return 0
    dicts = [cell for cell in cells if type(cell) is dict]
    lists = (cell for cell in cells if type(cell) is list)
    within = [*chain.from_iterable(map(dict.values, dicts)), *chain.from_iterable(lists)]
    return sum(map(len, dicts)) + _count_names(within)


class _JsonError(ValueError):
    """What is wrong, and at which character of the text."""

    def __init__(self, what: str, at: int = -1) -> None:
        super().__init__(what)
        self.message, self.position = what, at


def _read_rows(text: str, listed: bool) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """The objects, many at a time, and where they end; else what is wrong with the first."""
    rows: list[dict[str, Any]] = []
    names: set[str] = set()
    most = min(current_limits().columns or _MAX_COLUMNS, _MAX_COLUMNS)
    end = 0
    for start, end, row in (_read_elements if listed else _read_lines)(text):
        if not isinstance(row, dict):
            raise _JsonError(
                f"a {_type_name(row)} where an object was expected: each row must be "
                '{"column": cell, …}',
                start,
            )
        names.update(row)
        if len(names) > most:
            raise _JsonError(
                f"the objects so far have more than {most:,} different names: rows of a "
                "table share their names, so put what differs into a value",
                start,
            )
        rows.append(row)
        if len(rows) == _ROWS_PER_BATCH:
            yield rows, end
            rows = []
    if not end:
        raise _JsonError("a list of no objects: add at least one", _skip_space(text, 0))
    if rows:
        yield rows, end


def _read_lines(text: str) -> Iterator[tuple[int, int, Any]]:
    """Where each line's value begins and ends in the text, and the value."""
    first = True
    for found in _LINE_PATTERN.finditer(text):
        line = found.group()
        at = _skip_space(line, 0)
        if at == len(line):
            continue
        try:
            value, end = _decode_value(line, at)
            if end < len(line):
                raise _syntax_error("more after the object", end)
        except _JsonError as fault:
            if first and _is_single_value(text, found.start() + at):
                raise _JsonError(
                    "one object over many lines, which is one row or none: write a list of objects "
                    "[{…}, {…}], or one object a line",
                    found.start() + at,
                ) from None
            raise _JsonError(fault.message, found.start() + fault.position) from None
        first = False
        yield found.start() + at, found.end(), value


def _read_elements(text: str) -> Iterator[tuple[int, int, Any]]:
    """Where each element of the list begins and ends in the text, and the element."""
    at = _skip_space(text, _skip_space(text, 0) + 1)
    closed = text.startswith("]", at)
    while not closed:
        value, end = _decode_value(text, at)
        closed = text.startswith("]", end)
        if not closed and not text.startswith(",", end):
            raise _syntax_error("expecting ',' or ']'", end)
        yield at, end, value
        at = end if closed else _skip_space(text, end + 1)
    rest = _skip_space(text, at + 1)
    if rest < len(text):
        raise _JsonError("more after the list's end: a file holds one list", rest)


def _skip_space(text: str, at: int) -> int:
    found = _WHITESPACE.match(text, at)
    return found.end() if found else at


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        ((double, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise _JsonError(f"this object has the name {double!r} twice: rename one")
    return names


def _parse_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _JsonError(f"{digits[:40]} is more than a float can hold: write it as text")
    return number


def _parse_int(digits: str) -> int:
    try:
        number = int(digits)
        float(number)
    except (ValueError, OverflowError):
        raise _JsonError(f"an int of {len(digits):,} digits: write it as text") from None
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_build_object, parse_float=_parse_float, parse_int=_parse_int
)


def _decode_value(text: str, at: int) -> tuple[Any, int]:
    """The value that begins here, and what comes after it begins where; else what is wrong."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        if _SURROGATE_PATTERN.search(text, at, end):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _syntax_error(error.msg[:1].lower() + error.msg[1:], error.pos) from None
    except _JsonError as fault:
        raise _JsonError(fault.message, at) from None
    except RecursionError:
        raise _JsonError("lists or objects are nested too deeply: flatten them", at) from None
    except UnicodeEncodeError:
        raise _JsonError(
            "text with half a character (a lone \\ud800 … \\udfff), which no UTF-8 file can "
            "keep: write the whole pair",
            at,
        ) from None
    return value, _skip_space(text, end)


def _syntax_error(what: str, at: int) -> _JsonError:
    return _JsonError(f"broken JSON, {what}: mend or remove it", at)


def _is_single_value(text: str, start: int) -> bool:
    """Whether the whole text is one JSON value."""
    try:
        return _decode_value(text, start)[1] == len(text)
    except _JsonError:
        return False


def _type_name(value: Any) -> str:
    names = {list: "list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "number")
