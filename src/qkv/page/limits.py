"""Limits of what a page may upload or request. A small file can unpack to a large table."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from qkv.errors import ArgumentError, QkvError

MAX_ROWS = 1_000_000
MAX_COLUMNS = 1_000
MAX_CELLS = 10_000_000
MAX_UNPACKED_BYTES = 2**27
"""Size of all cells after decompression."""
MAX_NUMBERS = 2**20
"""Numbers in the vectors of one call."""
MAX_QUERY_CHARACTERS = 2**16
"""Characters of a query or of an added key."""
MAX_TEXT_CHARACTERS = 2**20
"""Characters of the keys that one call encodes."""
MAX_CELL_CHARACTERS = 2**20
"""Characters of a cell."""
MAX_WHERE_CHARACTERS = 10_000
"""Characters of a condition."""

_FORMAT_BY_MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
_JSON_STRING = re.compile(rb'"([^"\\\r\n]*+(?:\\.[^"\\\r\n]*+)*+)(?:"(\s*+:)?)?+')
"""A JSON string, up to the end of the line if it is not closed, and the colon if it is a name.

The quantifiers are possessive, so that the time is linear in the length.
"""


def check_file(path: Path, form: str) -> None:
    """Raise `ArgumentError` if a file exceeds the limits; the check runs before it is parsed."""
    data = path.read_bytes()
    if data.startswith(b"SQLite format 3"):
        raise ArgumentError(f"this file is SQLite, not {form}: export one of its tables as CSV")
    form = next((kind for magic, kind in _FORMAT_BY_MAGIC.items() if data.startswith(magic)), form)
    match form:
        case "parquet" | "arrow":
            _check_unpacked_size(path, form)
        case "jsonl":
            names: set[bytes] = set()
            for match in _JSON_STRING.finditer(data):
                if match[2]:
                    names.add(match[1])
                    check_count("different names", len(names), MAX_COLUMNS)
            rows = data.count(b"\n") + 1 if data.lstrip()[:1] == b"{" else data.count(b"{")
            check_count("rows", rows, MAX_ROWS)
            check_count("cells", rows * len(names), MAX_CELLS)
        case _:
            lines = data.count(b"\n") or data.count(b"\r")
            check_count("lines", lines, MAX_ROWS)
            first = re.match(rb"[^\r\n]*", data)
            assert first is not None
            check_count(
                "columns", max(map(first[0].count, (b",", b";", b"\t", b"|"))) + 1, MAX_COLUMNS
            )
            check_count("cells", lines + max(map(data.count, (b",", b";", b"\t", b"|"))), MAX_CELLS)


def check_count(what: str, count: int, most: int) -> None:
    """Raise `ArgumentError` if `count` exceeds `most`; `what` names what is counted."""
    if count > most:
        raise ArgumentError(f"the page allows at most {most:,} {what}: use Python for more")


def _check_unpacked_size(path: Path, form: str) -> None:
    try:
        import pyarrow
    except ImportError:
        return  # reading the file reports the missing package
    try:
        (_check_parquet if form == "parquet" else _check_arrow)(path)
    except QkvError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError):
        return  # reading the file reports what is wrong with it


def _check_parquet(path: Path) -> None:
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(path)
    _check_shape(metadata.num_rows, metadata.num_columns)
    columns = [metadata.schema.column(i) for i in range(metadata.num_columns)]
    # The dictionary encoding is kept, so that repeated texts are counted before they are expanded.
    text_columns = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    row_bytes = sum(max(column.length or 0, 0) for column in columns)
    check_count("bytes, unpacked", row_bytes * metadata.num_rows, MAX_UNPACKED_BYTES)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    check_count(
        "bytes, unpacked", sum(group.total_byte_size for group in groups), MAX_UNPACKED_BYTES
    )
    with pyarrow.parquet.ParquetFile(path, read_dictionary=text_columns) as opened:
        _check_batches(opened.iter_batches(batch_size=4096))


def _check_arrow(path: Path) -> None:
    import pyarrow.ipc

    check_count("bytes, unpacked", unpacked_arrow_bytes(path.read_bytes()), MAX_UNPACKED_BYTES)
    with pyarrow.OSFile(str(path)) as opened:
        is_file = opened.read(6) == b"ARROW1"
        opened.seek(0)
        if not is_file:
            _check_batches(pyarrow.ipc.open_stream(opened))
            return
        reader = pyarrow.ipc.open_file(opened)
        _check_batches(reader.get_batch(i) for i in range(reader.num_record_batches))


def _check_shape(rows: int, columns: int) -> None:
    check_count("rows", rows, MAX_ROWS)
    check_count("columns", columns, MAX_COLUMNS)
    check_count("cells", rows * columns, MAX_CELLS)


def _check_batches(batches: Any) -> None:
    """Raise `ArgumentError` if batches have too many rows or bytes."""
    rows = size = 0
    for batch in batches:
        rows += batch.num_rows
        _check_shape(rows, batch.num_columns)
        batch.validate(full=True)
        size += sum(map(_column_bytes, batch.columns))
        check_count("bytes, unpacked", size, MAX_UNPACKED_BYTES)


def _column_bytes(column: Any) -> int:
    """Return the size of a column with every cell written out, without dictionary encoding."""
    from pyarrow import compute, types

    kind, rows = column.type, len(column)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return 8 * rows + _column_bytes(column.flatten())
    if types.is_struct(kind):
        return rows + sum(map(_column_bytes, column.flatten()))
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
        f"the page cannot read a column of type {kind}, because its size is unknown before it is "
        "read: use qkv import"
    )


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kinds = types.is_string, types.is_large_string, types.is_binary, types.is_large_binary
    return any(known(kind) for known in kinds)


CONTINUATION_MARKER = 0xFFFFFFFF
"""The four bytes before the length of a message."""

BATCH_MESSAGE_TYPES = (2, 3)
"""Types of messages that hold rows: dictionary batches and record batches."""


def unpacked_arrow_bytes(data: bytes) -> int:
    """Return the size of all compressed buffers of an Arrow file after decompression.

    Each buffer begins with that size, and a reader allocates it first. The positions of the buffers
    are in flatbuffers: tables that find their fields by a list of offsets.

    >>> unpacked_arrow_bytes(b"")
    0
    """
    try:
        return sum(
            _batch_bytes(message, body) for message, body in _iterate_messages(memoryview(data))
        )
    except (struct.error, ValueError):
        raise ArgumentError("this is not a complete Arrow file") from None


class _FlatbufferTable(NamedTuple):
    """A table of a flatbuffer, which begins at `position`."""

    data: memoryview
    position: int

    def field_position(self, field: int) -> int | None:
        """Return the position of a field; None if the table lacks it."""
        start = self.position - _read_integer("<i", self.data, self.position)
        if 4 + 2 * field >= _read_integer("<H", self.data, start):
            return None
        offset = _read_integer("<H", self.data, start + 4 + 2 * field)
        return self.position + offset if offset else None

    def read_number(self, field: int, form: str) -> int:
        place = self.field_position(field)
        return 0 if place is None else _read_integer(form, self.data, place)

    def read_table(self, field: int) -> _FlatbufferTable | None:
        place = self.field_position(field)
        return (
            None
            if place is None
            else _FlatbufferTable(self.data, place + _read_integer("<I", self.data, place))
        )

    def read_structs(self, field: int, form: str) -> Iterator[tuple[int, ...]]:
        """Yield the structs of a vector."""
        place = self.field_position(field)
        if place is None:
            return
        place += _read_integer("<I", self.data, place)
        size = struct.calcsize(form)
        for i in range(_read_integer("<I", self.data, place)):
            yield struct.unpack_from(form, self.data, place + 4 + i * size)


def _read_integer(form: str, data: memoryview, at: int) -> int:
    if at < 0:
        raise ValueError(at)
    return int(struct.unpack_from(form, data, at)[0])


def _root_table(data: memoryview) -> _FlatbufferTable:
    return _FlatbufferTable(data, _read_integer("<I", data, 0))


def _iterate_messages(data: memoryview) -> Iterator[tuple[_FlatbufferTable | None, memoryview]]:
    """Yield each message and the bytes after it."""
    if bytes(data[:6]) == b"ARROW1":
        end = len(data) - 10
        footer = _root_table(data[end - _read_integer("<I", data, end) : end])
        for field in BATCH_MESSAGE_TYPES:
            for at, size, _ in footer.read_structs(field, "<qi4xq"):
                yield _read_message(data, at)[0], data[at + size :]
        return
    at = 0
    while at < len(data):
        message, after = _read_message(data, at)
        if message is None:
            return
        yield message, data[after:]
        at = after + message.read_number(3, "<q")


def _read_message(data: memoryview, at: int) -> tuple[_FlatbufferTable | None, int]:
    """Return the message at a position, None at the end of the stream, and where it ends."""
    size = _read_integer("<I", data, at)
    if size == CONTINUATION_MARKER:
        at += 4
        size = _read_integer("<I", data, at)
    at += 4
    return (_root_table(data[at : at + size]) if size else None), at + size


def _batch_bytes(message: _FlatbufferTable | None, body: memoryview) -> int:
    if message is None or (kind := message.read_number(1, "<B")) not in BATCH_MESSAGE_TYPES:
        return 0
    batch = message.read_table(2)
    if batch is not None and kind == BATCH_MESSAGE_TYPES[0]:
        batch = batch.read_table(1)
    if batch is None or batch.field_position(3) is None:  # nothing is compressed
        return 0
    return sum(
        max(_read_integer("<q", body, at), 0) for at, size in batch.read_structs(2, "<qq") if size
    )
