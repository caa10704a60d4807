"""JSON lines (one object a line) and a JSON array of objects: an object is a row."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from qkv.database.sources import files
from qkv.database.sources.table import SourceError, Table, bounded, check_names
from qkv.types import Progress

_SPACE = re.compile(r"[ \t\r\n]*")
_LINE = re.compile(r"[^\r\n]+")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
# A colon after a text's closing quote, before which stand backslashes in pairs or none.
_NAME = re.compile(rb'(?<!\\)(?:\\\\)*"[ \t\r\n]*:')
_BATCH = 16_384
# Beyond it, names are data: a table of them would be columns² of None.
_MOST_COLUMNS = 4096


def read(data: bytes, name: str, file: str, progress: Progress | None = None) -> Table:
    """The table whose columns are the names in the objects, in the order they first appear.

    A name that an object lacks is None in its row. NaN and Infinity, which JSON does not have but
    many write, are floats. A column of lists of floats, all of one length, is one of vectors.

    >>> read(b'{"name": "Li", "age": 34}\\n{"name": "Mu"}', "people", "people.jsonl").columns
    {'name': ['Li', 'Mu'], 'age': [34, None]}
    """
    text = files.text(data, file)
    columns = _quick(data, text.startswith("[", _past_space(text, 0)), progress)
    columns = columns or _parsed(text, file, progress)
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


def _quick(data: bytes, listed: bool, progress: Progress | None) -> dict[str, list[Any]] | None:
    """The columns by orjson, where it is installed; None where it may not read them as we do.

    What it refuses may be NaN, or is told by `_parsed`. It keeps the last of two equal names, and
    makes floats of ints beyond 64 bits and infinities of what is more.
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
    lines = [] if listed else [*filter(None, data.split(b"\n"))]
    columns: dict[str, list[Any]] = {}
    count = names = 0
    try:
        for at in range(0, len(lines) or 1, _BATCH):
            rows = loads(data) if listed else [*map(loads, lines[at : at + _BATCH])]
            if set(map(type, rows)) != {dict}:
                return None
            shapes = dict.fromkeys(map(tuple, rows))
            for title in chain.from_iterable(shapes):
                columns.setdefault(title, [None] * count)
            if len(columns) > _MOST_COLUMNS:
                return None
            alike = len(shapes) == 1 and len(columns) == len(rows[0])
            for title, cells in columns.items():
                cells += map(itemgetter(title), rows) if alike else [x.get(title) for x in rows]
            count += len(rows)
            names += sum(map(len, rows))
            if progress is not None:
                progress(len(data) * count // max(len(lines), count), len(data))
        names += sum(map(_names, columns.values()))
    except (ValueError, RecursionError):
        return None
    # Text may hold colons too; then those after a name are counted, one by one.
    return columns if names in _colons(data) else None


def _colons(data: bytes) -> Iterator[int]:
    """How many names there are at most, each time with more care; the last is how many."""
    marks = np.frombuffer(data, np.uint8)
    at = np.flatnonzero(marks == ord(":"))
    yield len(at)
    yield int(np.isin(marks[at - 1], [*b'" \t\n']).sum())
    yield len(_NAME.findall(data))


def _names(cells: Collection[Any]) -> int:
    """How many names the objects within these cells have; an error where a float is none."""
    kinds = set(map(type, cells))
    if float in kinds:
        floats = cells if kinds == {float} else [cell for cell in cells if type(cell) is float]
        if max(max(floats), -min(floats)) >= 2**63:
            raise _Refused("an int that was too long")
    if not kinds & {dict, list}:
        return 0
    dicts = [cell for cell in cells if type(cell) is dict]
    lists = (cell for cell in cells if type(cell) is list)
    within = [*chain.from_iterable(map(dict.values, dicts)), *chain.from_iterable(lists)]
    return sum(map(len, dicts)) + _names(within)


def _vectors(column: list[Any]) -> list[Any]:
    """The column, with vectors for cells that are lists of as many floats each."""
    if type(column[0]) not in (list, type(None)):
        return column
    lists = [cell for cell in column if cell is not None]
    if not all(type(cell) is list and cell and set(map(type, cell)) == {float} for cell in lists):
        return column
    if len(set(map(len, lists))) != 1:
        return column
    vectors = iter(np.array(lists))
    return [None if cell is None else next(vectors) for cell in column]


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
