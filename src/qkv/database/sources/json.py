"""JSON lines (one object a line) and a JSON array of objects: an object is a row."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qkv.database.sources import duck, files
from qkv.database.sources.table import SourceError, Table, bounded, check_names
from qkv.types import Progress

_SPACE = re.compile(r"[ \t\r\n]*")
_LINE = re.compile(r"[^\r\n]+")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_BATCH = 16_384
# Beyond it, names are data: a table of them would be columns² of None.
_MOST_COLUMNS = 4096


def read(
    data: bytes,
    name: str,
    file: str,
    progress: Progress | None = None,
    path: Path | None = None,
) -> Table:
    """The table whose columns are the names in the objects, in the order they first appear.

    `path` is where the bytes lie, if in a file. A name that an object lacks is None in its row. NaN
    and Infinity, which JSON does not have but many write, are floats. A column of lists of floats,
    all of one length, is one of vectors.

    >>> read(b'{"name": "Li", "age": 34}\\n{"name": "Mu"}', "people", "people.jsonl").columns
    {'name': ['Li', 'Mu'], 'age': [34, None]}
    """
    text = files.text(data, file)
    listed = text.startswith("[", _past_space(text, 0))
    split = None if path is None or listed else _split(path, data)
    columns = split or _parsed(text, file, progress)
    if progress is not None:
        progress(len(text), len(text))
    check_names(list(columns), file)
    # What JSON has are plain cells as they stand.
    return Table(name, {n: bounded(_vectors(cells), n, file) for n, cells in columns.items()})


def _parsed(text: str, file: str, progress: Progress | None) -> dict[str, list[Any]]:
    """The columns, object by object, or the error of the first that cannot be read."""
    columns: dict[str, list[Any]] = {}
    count = 0
    for start, end, row in _rows(text, file):
        for title in row:
            if title not in columns:
                columns[title] = [None] * count
        if len(columns) > _MOST_COLUMNS:
            raise files.fault(
                f"the objects so far have more than {_MOST_COLUMNS:,} different names: rows of a "
                "table share their names, so put what differs into a value",
                text,
                start,
                file,
            )
        for title, cells in columns.items():
            cells.append(row.get(title))
        count += 1
        if progress is not None and count % _BATCH == 0:
            progress(end, len(text))
    if not count:
        raise SourceError("a list of no objects: add at least one", file=file)
    return columns


def _split(path: Path, data: bytes) -> dict[str, list[Any]] | None:
    """The columns of a file of many lines that DuckDB has split; None where it has not."""
    found = duck.lines(path, data)
    if not found or len(found) > _MOST_COLUMNS:
        return None
    try:
        return {title: _decode(f"[{','.join(cells)}]", 0)[0] for title, cells in found.items()}
    except ValueError:
        return None


def _vectors(column: list[Any]) -> list[Any]:
    """The column, with vectors for cells that are lists of as many floats each."""
    lists = [cell for cell in column if cell is not None]
    if not all(type(cell) is list and cell and set(map(type, cell)) == {float} for cell in lists):
        return column
    if len(set(map(len, lists))) != 1:
        return column
    return [None if cell is None else np.array(cell) for cell in column]


def _rows(text: str, file: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Where each object begins and ends in the text, and the object."""
    start = _past_space(text, 0)
    if text.startswith("[", start):
        spans = _elements(text, start, file)
    else:
        spans = _lines(text, start, file)
    for start, end, row in spans:
        if not isinstance(row, dict):
            raise files.fault(
                f"a {_name(row)} where an object was expected: each row must be "
                '{"column": cell, …}',
                text,
                start,
                file,
            )
        yield start, end, row


def _lines(text: str, start: int, file: str) -> Iterator[tuple[int, int, Any]]:
    for found in _LINE.finditer(text, start):
        line = found.group()
        at = _past_space(line, 0)
        if at == len(line):
            continue
        try:
            value, end = _decode(line, at)
            if _past_space(line, end) < len(line):
                raise json.JSONDecodeError("more after the object", line, _past_space(line, end))
        except json.JSONDecodeError as error:
            if found.start() == start and _is_one(text, start):
                raise files.fault(
                    "one object over many lines, which is one row or none: write a list of objects "
                    "[{…}, {…}], or one object a line",
                    text,
                    start,
                    file,
                ) from None
            raise _broken(error, text, found.start(), file) from None
        except _Refused as error:
            raise files.fault(str(error), text, found.start() + at, file) from None
        yield found.start() + at, found.end(), value


def _elements(text: str, start: int, file: str) -> Iterator[tuple[int, int, Any]]:
    at = _past_space(text, start + 1)
    closed = text.startswith("]", at)
    while not closed:
        try:
            value, end = _decode(text, at)
            after = _past_space(text, end)
            closed = text.startswith("]", after)
            if not closed and not text.startswith(",", after):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, after)
        except json.JSONDecodeError as error:
            raise _broken(error, text, 0, file) from None
        except _Refused as error:
            raise files.fault(str(error), text, at, file) from None
        yield at, end, value
        at = after if closed else _past_space(text, after + 1)
    rest = _past_space(text, at + 1)
    if rest < len(text):
        raise files.fault("more after the list's end: a file holds one list", text, rest, file)


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


class _Refused(ValueError):
    """Valid JSON that would lose something when read."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        ((double, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise _Refused(f"this object has the name {double!r} twice: rename one")
    return names


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _Refused(f"{digits[:40]} is more than a float can hold: write it as text")
    return number


def _int(digits: str) -> int:
    try:
        number = int(digits)
        float(number)
    except (ValueError, OverflowError):
        raise _Refused(f"an int of {len(digits):,} digits: write it as text") from None
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_int=_int)


def _decode(text: str, at: int) -> tuple[Any, int]:
    """The value that begins here and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise _Refused("lists or objects are nested too deeply: flatten them") from None
    if _HALF.search(text, at, end):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _Refused(
                "text with half a character (a lone \\ud800 … \\udfff), which no UTF-8 file can "
                "keep: write the whole pair"
            ) from None
    return value, end


def _is_one(text: str, start: int) -> bool:
    """Whether the whole text is one JSON value."""
    try:
        _, end = _decode(text, start)
    except ValueError:
        return False
    return _past_space(text, end) == len(text)


def _name(value: Any) -> str:
    names = {list: "list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "number")


def _broken(error: json.JSONDecodeError, text: str, start: int, file: str) -> SourceError:
    what = error.msg[:1].lower() + error.msg[1:]
    return files.fault(f"broken JSON, {what}: mend or remove it", text, start + error.pos, file)
