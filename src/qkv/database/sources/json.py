"""Read JSON lines (one object per line) or a JSON array of objects; each object is a row."""

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
# A colon after the closing quote of a string; the quote itself is not escaped.
_NAME_PATTERN = re.compile(rb'(?<!\\)(?:\\\\)*"[ \t\r\n]*:')
_ROWS_PER_BATCH = 1024
"""Small enough that a batch stays in the processor's cache until it is split into columns."""
_MAX_COLUMNS = 4096
"""With more names, the names are data: a table of them would be mostly None."""


def read_json(data: bytes, name: str, file: str, progress: ProgressCallback | None = None) -> Table:
    """Parse JSON; the columns are the names in the objects, in the order of their first use.

    A name that an object does not have is None in its row. NaN and Infinity are floats, although
    the JSON standard does not have them. Lists of floats of equal length become vectors.

    >>> read_json(b'{"name": "Li", "age": 34}\\n{"name": "Mu"}', "people", "people.jsonl").columns
    {'name': ['Li', 'Mu'], 'age': [34, None]}
    """
    text = files.decode_text(data, file)
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
    # JSON values are plain cells already.
    columns = {title: lists_to_vectors(cells) for title, cells in columns.items()}
    if len(data) > current_limits().cell_characters:
        columns = {
            title: check_cell_lengths(cells, title, file) for title, cells in columns.items()
        }
    return Table(name, columns)


def _warn_nested_rows(columns: dict[str, list[Any]], file: str) -> None:
    """Warn if the only row contains a list of rows, as in the responses of many APIs."""
    for title, cells in columns.items():
        inner = cells[0] if len(cells) == 1 and isinstance(cells[0], list) else []
        if len(inner) > 1 and all(isinstance(x, dict) for x in inner):
            warn_at_caller(
                f"{file}: only one row, and its {title!r} is a list of {len(inner):,} objects: if "
                "those are the rows, write only that list to the file"
            )


def _rows_to_columns(
    batches: Iterable[tuple[list[dict[str, Any]], int]],
    progress: ProgressCallback | None,
    total: int,
) -> tuple[dict[str, list[Any]], int]:
    """Convert batches of rows to columns; also return the number of cells.

    Each batch comes with the position of its end, for `progress`.
    """
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
    data: bytes, is_array: bool, progress: ProgressCallback | None
) -> dict[str, list[Any]] | None:
    """Parse with orjson if it is installed; return None if its result may differ from ours.

    orjson rejects NaN, keeps the last of two equal names, and converts ints beyond 64 bits to
    floats or infinity. `_read_rows` then parses the text again and reports errors.
    """
    try:
        from orjson import loads
    except ImportError:
        return None
    data = data.removeprefix(codecs.BOM_UTF8)
    if b"\r" in data:
        if data.count(b"\r") > data.count(b"\r\n"):  # a lone CR ends a line too
            return None
        data = data.replace(b"\r", b"")

    def parse_batches() -> Iterator[tuple[list[Any], int]]:
        lines = [*filter(None, data.split(b"\n"))]
        for at in range(0, len(lines), _ROWS_PER_BATCH):
            done = len(data) * min(at + _ROWS_PER_BATCH, len(lines)) // len(lines)
            yield [*map(loads, lines[at : at + _ROWS_PER_BATCH])], done

    try:
        batches = [(loads(data), len(data))] if is_array else parse_batches()
        columns, name_count = _rows_to_columns(batches, progress, len(data))
        name_count += sum(map(_count_names, columns.values()))
    except (ValueError, TypeError, RecursionError):
        return None
    # Fewer names than colons: orjson dropped a duplicate name, or strings contain colons.
    return columns if columns and name_count in _count_colons(data) else None


def _count_colons(data: bytes) -> Iterator[int]:
    """Yield upper bounds of the number of names, cheapest first; the last one is exact."""
    yield data.count(b":")
    yield sum(data.count(before + b":") for before in (b'"', b" ", b"\t", b"\n"))
    yield len(_NAME_PATTERN.findall(data))


def _count_names(cells: Collection[Any]) -> int:
    """Return the number of names in nested objects.

    Raise `ValueError` for a float of 2⁶³ or more: it may be an int that orjson converted.
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
    """A problem at a position of the text."""

    def __init__(self, message: str, position: int = -1) -> None:
        super().__init__(message)
        self.message, self.position = message, position


def _read_rows(text: str, is_array: bool) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Yield batches of objects and the position of their end; raise `_JsonError` for a bad one."""
    rows: list[dict[str, Any]] = []
    names: set[str] = set()
    limit = min(current_limits().columns or _MAX_COLUMNS, _MAX_COLUMNS)
    end = 0
    for start, end, row in (_read_elements if is_array else _read_lines)(text):
        if not isinstance(row, dict):
            raise _JsonError(
                f"a {_type_name(row)} where an object was expected: each row must be "
                '{"column": cell, …}',
                start,
            )
        names.update(row)
        if len(names) > limit:
            raise _JsonError(
                f"the objects up to here have more than {limit:,} different names: the rows of a "
                "table share their names, so put names that differ into values",
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
    """Yield the start, the end and the value of each line."""
    first = True
    for match in _LINE_PATTERN.finditer(text):
        line = match.group()
        at = _skip_space(line, 0)
        if at == len(line):
            continue
        try:
            value, end = _decode_value(line, at)
            if end < len(line):
                raise _syntax_error("text after the object", end)
        except _JsonError as error:
            if first and _is_single_value(text, match.start() + at):
                raise _JsonError(
                    "one object over many lines is not a table: write a list of objects "
                    "[{…}, {…}], or one object per line",
                    match.start() + at,
                ) from None
            raise _JsonError(error.message, match.start() + error.position) from None
        first = False
        yield match.start() + at, match.end(), value


def _read_elements(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield the start, the end and the value of each element of the list."""
    at = _skip_space(text, _skip_space(text, 0) + 1)
    closed = text.startswith("]", at)
    while not closed:
        value, end = _decode_value(text, at)
        closed = text.startswith("]", end)
        if not closed and not text.startswith(",", end):
            raise _syntax_error("expecting ',' or ']'", end)
        yield at, end, value
        at = end if closed else _skip_space(text, end + 1)
    after = _skip_space(text, at + 1)
    if after < len(text):
        raise _JsonError("text after the end of the list: expected one list per file", after)


def _skip_space(text: str, at: int) -> int:
    match = _WHITESPACE.match(text, at)
    return match.end() if match else at


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        ((duplicate, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise _JsonError(f"this object has the name {duplicate!r} twice: rename one")
    return names


def _parse_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _JsonError(f"{digits[:40]} is too large for a float: write it as text")
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
    """Return the value at this position and the position after it; raise `_JsonError`."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        if _SURROGATE_PATTERN.search(text, at, end):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _syntax_error(error.msg[:1].lower() + error.msg[1:], error.pos) from None
    except _JsonError as error:
        raise _JsonError(error.message, at) from None
    except RecursionError:
        raise _JsonError("lists or objects are nested too deeply: flatten them", at) from None
    except UnicodeEncodeError:
        raise _JsonError(
            "text with a lone surrogate (\\ud800 … \\udfff), which UTF-8 cannot encode: write the "
            "complete pair",
            at,
        ) from None
    return value, _skip_space(text, end)


def _syntax_error(what: str, at: int) -> _JsonError:
    return _JsonError(f"invalid JSON, {what}: fix or remove it", at)


def _is_single_value(text: str, start: int) -> bool:
    """Return whether the text from `start` on is one JSON value."""
    try:
        return _decode_value(text, start)[1] == len(text)
    except _JsonError:
        return False


def _type_name(value: Any) -> str:
    names = {list: "list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "number")
