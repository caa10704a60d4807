"""Read JSON lines (one object per line) or a JSON list of objects. Each object is a row."""

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
# Finds a colon after the closing quote of a string. The quote itself is not escaped.
_NAME_PATTERN = re.compile(rb'(?<!\\)(?:\\\\)*"[ \t\r\n]*:')
_ROWS_PER_BATCH = 1024
"""The number of rows in a batch. It fits the processor's cache until it is split into columns."""
_MAX_COLUMNS = 4096
"""With more names, the names are probably data: a table with these columns would be mostly None."""


def read_json(data: bytes, name: str, file: str, progress: ProgressCallback | None = None) -> Table:
    """Parse JSON. The columns are the names in the objects, in the order in which they first occur.

    If an object lacks a name, its row has None there. NaN and Infinity are read as floats, although
    they are not standard JSON. Lists of floats of equal length become vectors.

    >>> read_json(b'{"name": "Li", "age": 34}\\n{"name": "Mu"}', "people", "people.jsonl").columns
    {'name': ['Li', 'Mu'], 'age': [34, None]}
    """
    text = files.decode_utf8(data, file)
    is_array = text.startswith("[", _skip_space(text, 0))
    columns = _read_with_orjson(data, is_array, progress)
    try:
        columns = columns or _rows_to_columns(_read_rows(text, is_array), progress, len(text))[0]
    except _JsonError as error:
        raise files.error_at(error.message, text, error.position, file) from None
    if progress is not None:
        progress(len(data), len(data))
    check_column_names(list(columns), file)
    _warn_nested_rows(columns, file)
    # JSON values are plain cells already, so `build_table` is not needed.
    columns = {title: lists_to_vectors(cells) for title, cells in columns.items()}
    if len(data) > current_limits().cell_characters:
        columns = {
            title: check_cell_lengths(cells, title, file) for title, cells in columns.items()
        }
    return Table(name, columns)


def _warn_nested_rows(columns: dict[str, list[Any]], file: str) -> None:
    """Warn if the only row contains a list of rows, as the responses of many APIs do."""
    for title, cells in columns.items():
        inner = cells[0] if len(cells) == 1 and isinstance(cells[0], list) else []
        if len(inner) > 1 and all(isinstance(x, dict) for x in inner):
            warn_at_caller(
                f"{file}: there is only one row, and its {title!r} is a list of {len(inner):,} "
                "objects: if these objects are the rows, write only the list to the file"
            )


def _rows_to_columns(
    batches: Iterable[tuple[list[dict[str, Any]], int]],
    progress: ProgressCallback | None,
    total: int,
) -> tuple[dict[str, list[Any]], int]:
    """Convert batches of rows to columns. Also return the number of cells.

    A batch is (rows, position after them); the position is for `progress`.
    """
    columns: dict[str, list[Any]] = {}
    count = cells = 0
    for rows, done in batches:
        check_deadline()
        for title in dict.fromkeys(chain.from_iterable(rows)):
            if title not in columns:
                columns[title] = [None] * count
        if len(columns) > min(current_limits().columns or _MAX_COLUMNS, _MAX_COLUMNS):
            raise ValueError("too many different names")
        for title, column in columns.items():
            column += [*map(dict.get, rows, repeat(title))]
        count += len(rows)
        cells += sum(map(len, rows))
        if progress is not None:
            progress(done, total)
    return columns, cells


def _read_with_orjson(
    data: bytes, is_array: bool, progress: ProgressCallback | None
) -> dict[str, list[Any]] | None:
    """Parse with orjson if it is installed. Return None if the result might be wrong.

    orjson rejects NaN, keeps the last of two equal names, and converts ints beyond 64 bits to
    floats or infinity. In these cases, `_read_rows` parses the text again and reports errors.
    """
    try:
        from orjson import loads
    except ImportError:
        return None
    data = data.removeprefix(codecs.BOM_UTF8)
    if b"\r" in data:
        if data.count(b"\r") > data.count(b"\r\n"):  # a carriage return alone also ends a line
            return None
        data = data.replace(b"\r", b"")

    def parse_batches() -> Iterator[tuple[list[Any], int]]:
        lines = [*filter(None, data.split(b"\n"))]
        for start in range(0, len(lines), _ROWS_PER_BATCH):
            done = len(data) * min(start + _ROWS_PER_BATCH, len(lines)) // len(lines)
            yield [*map(loads, lines[start : start + _ROWS_PER_BATCH])], done

    try:
        batches = [(loads(data), len(data))] if is_array else parse_batches()
        columns, name_count = _rows_to_columns(batches, progress, len(data))
        name_count += sum(map(_count_names, columns.values()))
    except (ValueError, TypeError, RecursionError):
        return None
    # If there are fewer names than colons, orjson dropped a duplicate, or strings contain colons.
    return columns if columns and name_count in _count_colons(data) else None


def _count_colons(data: bytes) -> Iterator[int]:
    """Yield upper bounds on the number of names, the fastest first. The last one is exact."""
    yield data.count(b":")
    yield sum(data.count(before + b":") for before in (b'"', b" ", b"\t", b"\n"))
    yield len(_NAME_PATTERN.findall(data))


def _count_names(cells: Collection[Any]) -> int:
    """Return the number of names in nested objects.

    Raise `ValueError` for a float of 2⁶³ or more: orjson may have converted it from an int.
    """
    kinds = set(map(type, cells))
    if float in kinds:
        floats = cells if kinds == {float} else [cell for cell in cells if type(cell) is float]
        if max(max(floats), -min(floats)) >= 2**63:
            raise ValueError("an int may have lost digits")
    if not kinds & {dict, list}:
        return 0
    dicts = [cell for cell in cells if type(cell) is dict]
    lists = (cell for cell in cells if type(cell) is list)
    nested = [*chain.from_iterable(map(dict.values, dicts)), *chain.from_iterable(lists)]
    return sum(map(len, dicts)) + _count_names(nested)


class _JsonError(ValueError):
    """A problem at a position of the JSON text."""

    def __init__(self, message: str, position: int = -1) -> None:
        super().__init__(message)
        self.message, self.position = message, position


def _read_rows(text: str, is_array: bool) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Yield (objects, position after them) batch by batch; raise `_JsonError` for a wrong row."""
    rows: list[dict[str, Any]] = []
    names: set[str] = set()
    limit = min(current_limits().columns or _MAX_COLUMNS, _MAX_COLUMNS)
    end = 0
    for start, end, row in (_read_elements if is_array else _read_lines)(text):
        if not isinstance(row, dict):
            raise _JsonError(
                f'expected an object {{"column": cell, …}} for each row, not a {_type_name(row)}',
                start,
            )
        names.update(row)
        if len(names) > limit:
            raise _JsonError(
                f"the objects up to here have more than {limit:,} different names. The rows of a "
                "table have the same names: store names that differ as values",
                start,
            )
        rows.append(row)
        if len(rows) == _ROWS_PER_BATCH:
            yield rows, end
            rows = []
    if not end:
        raise _JsonError("the list has no objects: add at least one", _skip_space(text, 0))
    if rows:
        yield rows, end


def _read_lines(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield the start, the end and the value of each line that is not blank."""
    first = True
    for match in _LINE_PATTERN.finditer(text):
        line = match.group()
        indent = _skip_space(line, 0)
        if indent == len(line):
            continue
        try:
            value, end = _decode_value(line, indent)
            if end < len(line):
                raise _syntax_error("there is text after the object", end)
        except _JsonError as error:
            if first and _is_single_value(text, match.start() + indent):
                raise _JsonError(
                    "the file contains one object over several lines, which is not a table: write "
                    "a list of objects [{…}, {…}], or one object per line",
                    match.start() + indent,
                ) from None
            raise _JsonError(error.message, match.start() + error.position) from None
        first = False
        yield match.start() + indent, match.end(), value


def _read_elements(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield the start, the end and the value of each element of the list."""
    position = _skip_space(text, _skip_space(text, 0) + 1)
    closed = text.startswith("]", position)
    while not closed:
        value, end = _decode_value(text, position)
        closed = text.startswith("]", end)
        if not closed and not text.startswith(",", end):
            raise _syntax_error("expecting ',' or ']'", end)
        yield position, end, value
        position = end if closed else _skip_space(text, end + 1)
    after = _skip_space(text, position + 1)
    if after < len(text):
        raise _JsonError("there is text after the list: expected one list per file", after)


def _skip_space(text: str, position: int) -> int:
    """Return the position after the whitespace that begins at `position`."""
    match = _WHITESPACE.match(text, position)
    return match.end() if match else position


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as an object; raise `_JsonError` if a name occurs twice."""
    names = dict(pairs)
    if len(names) < len(pairs):
        ((duplicate, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise _JsonError(f"this object has the name {duplicate!r} twice: rename one")
    return names


def _parse_float(digits: str) -> float:
    """Return a float; raise `_JsonError` if it is too large."""
    number = float(digits)
    if math.isinf(number):
        raise _JsonError(f"{digits[:40]} is too large for a float: write it as text")
    return number


def _parse_int(digits: str) -> int:
    """Return an int; raise `_JsonError` if it is too large for a float."""
    try:
        number = int(digits)
        float(number)
    except (ValueError, OverflowError):
        raise _JsonError(
            f"an int of {len(digits):,} digits is too large for a float: write it as text"
        ) from None
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_build_object, parse_float=_parse_float, parse_int=_parse_int
)


def _decode_value(text: str, position: int) -> tuple[Any, int]:
    """Return the value at a position, and the position after it.

    Raise `_JsonError` if it is invalid.
    """
    try:
        value, end = _DECODER.raw_decode(text, position)
        if _SURROGATE_PATTERN.search(text, position, end):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _syntax_error(error.msg[:1].lower() + error.msg[1:], error.pos) from None
    except _JsonError as error:
        raise _JsonError(error.message, position) from None
    except RecursionError:
        raise _JsonError("lists or objects are nested too deeply: flatten them", position) from None
    except UnicodeEncodeError:
        raise _JsonError(
            "the text contains a lone surrogate (\\ud800 … \\udfff), which UTF-8 cannot encode: "
            "write the complete pair",
            position,
        ) from None
    return value, _skip_space(text, end)


def _syntax_error(problem: str, position: int) -> _JsonError:
    return _JsonError(f"invalid JSON, {problem}: fix or remove this text", position)


def _is_single_value(text: str, start: int) -> bool:
    """Return whether the text from `start` on is one JSON value."""
    try:
        return _decode_value(text, start)[1] == len(text)
    except _JsonError:
        return False


def _type_name(value: Any) -> str:
    """Return the JSON type of a value as text."""
    names = {list: "list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "number")
