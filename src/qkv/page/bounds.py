"""How much a page may bring or ask for: a small file can unpack to a large table."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from qkv.errors import ArgumentError, QkvError

ROWS = 1_000_000
COLUMNS = 1_000
CELLS = 10_000_000
BYTES = 2**27
"""Of all cells, unpacked."""
NUMBERS = 2**20
"""Of the vectors that one call gives."""
QUERY = 2**16
"""Characters of a query, or of a key that is added."""
TEXT = 2**20
"""Characters of the keys that one call encodes."""
CELL = 2**20
"""Characters of a cell."""
WHERE = 10_000
"""Characters of a condition."""

_MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
_TEXT = re.compile(rb'"([^"\\\r\n]*+(?:\\.[^"\\\r\n]*+)*+)(?:"(\s*+:)?)?+')
"""A text of JSON, to the line's end where it never closes, and the colon if it is a name. No
character is tried twice: the time grows with the length alone."""


def check(path: Path, form: str) -> None:
    """Refuse a file that would be more than these, before it is read as a whole."""
    data = path.read_bytes()
    if data.startswith(b"SQLite format 3"):
        raise ArgumentError(f"this is SQLite, not {form}: export a table of it")
    form = next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), form)
    match form:
        case "parquet" | "arrow":
            _unpacked(path, form)
        case "jsonl":
            names: set[bytes] = set()
            for found in _TEXT.finditer(data):
                if found[2]:
                    names.add(found[1])
                    few("different names", len(names), COLUMNS)
            rows = data.count(b"\n") + 1 if data.lstrip()[:1] == b"{" else data.count(b"{")
            few("rows", rows, ROWS)
            few("cells", rows * len(names), CELLS)
        case _:
            lines = data.count(b"\n") or data.count(b"\r")
            few("lines", lines, ROWS)
            first = re.match(rb"[^\r\n]*", data)
            assert first is not None
            few("columns", max(map(first[0].count, (b",", b";", b"\t", b"|"))) + 1, COLUMNS)
            few("cells", lines + max(map(data.count, (b",", b";", b"\t", b"|"))), CELLS)


def few(what: str, count: int, most: int) -> None:
    """Refuse more than so many."""
    if count > most:
        raise ArgumentError(f"at most {most:,} {what} may come from a page: ask in Python for more")


def _unpacked(path: Path, form: str) -> None:
    try:
        import pyarrow
    except ImportError:
        return  # whoever reads it says so
    try:
        (_parquet if form == "parquet" else _arrow)(path)
    except QkvError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError):
        return  # likewise what is wrong with it


def _parquet(path: Path) -> None:
    import pyarrow.parquet

    told = pyarrow.parquet.read_metadata(path)
    _shape(told.num_rows, told.num_columns)
    columns = [told.schema.column(i) for i in range(told.num_columns)]
    # Words that repeat are written once in the file, and are to be counted before they are not.
    words = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    wide = sum(max(column.length or 0, 0) for column in columns)
    few("bytes, unpacked", wide * told.num_rows, BYTES)
    groups = [told.row_group(i) for i in range(told.num_row_groups)]
    few("bytes, unpacked", sum(group.total_byte_size for group in groups), BYTES)
    with pyarrow.parquet.ParquetFile(path, read_dictionary=words) as opened:
        _size(opened.iter_batches(batch_size=4096))


def _arrow(path: Path) -> None:
    import pyarrow.ipc

    few("bytes, unpacked", arrow_length(path.read_bytes()), BYTES)
    with pyarrow.OSFile(str(path)) as opened:
        is_file = opened.read(6) == b"ARROW1"
        opened.seek(0)
        if not is_file:
            _size(pyarrow.ipc.open_stream(opened))
            return
        reader = pyarrow.ipc.open_file(opened)
        _size(reader.get_batch(i) for i in range(reader.num_record_batches))


def _shape(rows: int, columns: int) -> None:
    few("rows", rows, ROWS)
    few("columns", columns, COLUMNS)
    few("cells", rows * columns, CELLS)


def _size(batches: Any) -> None:
    """The rows and bytes of batches, as many as may be."""
    rows = size = 0
    for batch in batches:
        rows += batch.num_rows
        _shape(rows, batch.num_columns)
        batch.validate(full=True)
        size += sum(map(_bytes, batch.columns))
        few("bytes, unpacked", size, BYTES)


def _bytes(column: Any) -> int:
    """What a column has with every cell written out: those of a dictionary may repeat."""
    from pyarrow import compute, types

    kind, rows = column.type, len(column)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return 8 * rows + _bytes(column.flatten())
    if types.is_struct(kind):
        return rows + sum(map(_bytes, column.flatten()))
    if types.is_dictionary(kind):
        words = column.dictionary
        if _is_text(words.type):
            lengths = compute.take(compute.binary_length(words), column.indices)
            return 4 * rows + int(compute.sum(lengths).as_py() or 0)
        if types.is_primitive(words.type):
            return int(rows * (words.type.bit_width // 8 + 1))
    plain = types.is_primitive, types.is_null, types.is_decimal, types.is_fixed_size_binary
    if _is_text(kind) or any(known(kind) for known in plain):
        return int(column.nbytes)
    raise ArgumentError(
        f"a column of type {kind} may not come from a page: nobody knows its size before it is read"
    )


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kinds = types.is_string, types.is_large_string, types.is_binary, types.is_large_binary
    return any(known(kind) for known in kinds)


CONTINUED = 0xFFFFFFFF
"""Before the length of a message."""

BATCHES = (2, 3)
"""Kinds of messages that hold rows: those of a dictionary, and those of a table."""


def arrow_length(data: bytes) -> int:
    """Bytes of all buffers that are compressed, unpacked; refused where that cannot be told.

    Each begins with its length, which a reader asks the system for before it looks at anything
    else. Where they lie is told by flatbuffers: tables whose fields are found by a list of offsets
    before them.

    >>> arrow_length(b"")
    0
    """
    try:
        return sum(_length(message, body) for message, body in _messages(memoryview(data)))
    except (struct.error, ValueError):
        raise ArgumentError("this is no Arrow file: it ends before it says what it holds") from None


class _Table(NamedTuple):
    """A table of a flatbuffer, which begins at a place."""

    data: memoryview
    at: int

    def place(self, field: int) -> int | None:
        """Where a field lies; None where the table has none."""
        start = self.at - _read("<i", self.data, self.at)
        if 4 + 2 * field >= _read("<H", self.data, start):
            return None
        offset = _read("<H", self.data, start + 4 + 2 * field)
        return self.at + offset if offset else None

    def number(self, field: int, form: str) -> int:
        place = self.place(field)
        return 0 if place is None else _read(form, self.data, place)

    def table(self, field: int) -> _Table | None:
        place = self.place(field)
        return None if place is None else _Table(self.data, place + _read("<I", self.data, place))

    def pairs(self, field: int, form: str) -> Iterator[tuple[int, ...]]:
        """The structures of a vector."""
        place = self.place(field)
        if place is None:
            return
        place += _read("<I", self.data, place)
        size = struct.calcsize(form)
        for i in range(_read("<I", self.data, place)):
            yield struct.unpack_from(form, self.data, place + 4 + i * size)


def _read(form: str, data: memoryview, at: int) -> int:
    if at < 0:
        raise ValueError(at)
    return int(struct.unpack_from(form, data, at)[0])


def _root(data: memoryview) -> _Table:
    return _Table(data, _read("<I", data, 0))


def _messages(data: memoryview) -> Iterator[tuple[_Table | None, memoryview]]:
    """Each message that is read, and what follows it."""
    if bytes(data[:6]) == b"ARROW1":
        end = len(data) - 10
        footer = _root(data[end - _read("<I", data, end) : end])
        for field in BATCHES:
            for at, size, _ in footer.pairs(field, "<qi4xq"):
                yield _head(data, at)[0], data[at + size :]
        return
    at = 0
    while at < len(data):
        message, after = _head(data, at)
        if message is None:
            return
        yield message, data[after:]
        at = after + message.number(3, "<q")


def _head(data: memoryview, at: int) -> tuple[_Table | None, int]:
    """The message at a place, None at the end of all, and where it ends."""
    size = _read("<I", data, at)
    if size == CONTINUED:
        at += 4
        size = _read("<I", data, at)
    at += 4
    return (_root(data[at : at + size]) if size else None), at + size


def _length(message: _Table | None, body: memoryview) -> int:
    if message is None or (kind := message.number(1, "<B")) not in BATCHES:
        return 0
    batch = message.table(2)
    if batch is not None and kind == BATCHES[0]:
        batch = batch.table(1)
    if batch is None or batch.place(3) is None:  # nothing is compressed
        return 0
    return sum(max(_read("<q", body, at), 0) for at, size in batch.pairs(2, "<qq") if size)
