"""How much an Arrow file holds once it is unpacked, from its heads alone.

Each buffer of a batch that is compressed begins with its length, which a reader asks the system
for before it looks at anything else. Where the buffers lie is told by flatbuffers: tables whose
fields are found by a list of offsets before them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from qkv.errors import ArgumentError

CONTINUED = 0xFFFFFFFF
"""Before the length of a message."""

BATCHES = (2, 3)
"""Kinds of messages that hold rows: those of a dictionary, and those of a table."""


def length(data: bytes) -> int:
    """Bytes of all buffers that are compressed, unpacked; refused where that cannot be told.

    >>> length(b"")
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
