"""Bundles: the digests and records of many rows in one file, found by digest in a sorted array.

A bundle is a segment of no generation. Its rows are in no table of the catalogue but for those that
have died since: what the catalogue says of a row counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from qkv.database.storage.catalog import row_crc
from qkv.database.storage.layout import RAGGED_DIMS, Layout
from qkv.database.storage.segments import Segment
from qkv.frameworks.ragged import Ragged, concat_ragged

BUNDLE_GENERATION = -1
"""What the catalogue lists bundles under."""

BUNDLE_LAYOUT = Layout(
    (
        ("prefix", np.dtype("<u8"), ()),
        ("crc", np.dtype("<u4"), ()),
        ("place", np.dtype("<u4"), ()),
        ("line", np.dtype("u1"), RAGGED_DIMS),
        ("size", np.dtype("u1"), ()),
    )
)
"""`line` is the digest, of so many bytes, and the record; `prefix` are the first 8 bytes of the
digests, ascending, and `place` is where each of them is."""

MAX_DIGEST_BYTES = 255
"""Bytes of a digest that a bundle has."""

FULL_DIGEST_BYTES = 16
"""Bytes of a digest with which no longer one begins: then one of the two has lost its size."""

RowRecord = tuple[int, bytes, str, int]
"""A row: its id, digest, record, and the checksum of these."""


class Bundle:
    """The rows of a file, by id and by digest.

    >>> bundle = Bundle(build_bundle(np.array([4, 7]), [b"Li", b"Hu"], ["Li, Mu", "Hu, Rachel"]))
    >>> bundle.find_ids(b"Hu"), list(bundle.read_rows(np.array([4])))[0][:3]
    ([7], (4, b'Li', 'Li, Mu'))
    """

    def __init__(self, segment: Segment):
        self.ids, self._segment = segment.ids, segment
        tensors: dict[str, Any] = dict(segment.tensors)
        line: Ragged = tensors["line"]
        self._row_ids, self._line_bytes, self._starts = map(
            _as_memoryview, (self.ids, line.flat, line.starts)
        )
        self._digest_prefixes, self._row_positions, self._digest_sizes, self._checksums = (
            _as_memoryview(tensors[name]) for name in ("prefix", "place", "size", "crc")
        )

    def find_ids(self, digest: bytes) -> list[int]:
        """The ids of the rows with this digest, ascending."""
        found, last = list[int](), 2**63
        while (line := self.find_newest(digest, 0, last - 1)) is not None:
            last = line[0]
            found.append(last)
        return found[::-1]

    def find_newest(self, digest: bytes, first: int, last: int) -> RowRecord | None:
        """The youngest row with this digest of those between two ids.

        A search ends between two entries that it has compared. Where both are those of their rows,
        a digest that they enclose is not elsewhere.
        """
        self._segment.check_not_truncated()
        wanted, prefix = int.from_bytes(digest[:8], "little"), self._digest_prefixes
        at = bisect_right(prefix, wanted)
        sound = at == len(prefix) or self._is_indexed(at)
        while sound and (at := at - 1) >= 0 and prefix[at] == wanted:
            line = self._read_row(self._row_positions[at])
            if line[1] == digest and first <= line[0] <= last:
                return line
            # Digests of two keys hardly ever begin alike, and a long one is as long as the other.
            sound = self._is_indexed(at) and row_crc(*line[:3]) == line[3]
            sound &= len(digest) < FULL_DIGEST_BYTES or len(digest) == len(line[1])
        if not sound or (at >= 0 and not self._is_indexed(at)):
            told = "its index is not what was written, so that a key may be there and not be found"
            raise self._segment.damaged_error(told)
        return None

    def _is_indexed(self, at: int) -> bool:
        """Whether an entry of the index is that of its row."""
        place = self._row_positions[at]
        if place >= len(self._row_ids):
            return False
        start, size = self._starts[place], self._digest_sizes[place]
        begin = self._line_bytes[start : start + (size if size < 8 else 8)]
        return int.from_bytes(begin, "little") == self._digest_prefixes[at]

    def read_rows(self, ids: np.ndarray) -> Iterator[RowRecord]:
        """The rows of these ids, as far as they are here."""
        self._segment.check_not_truncated()
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return map(self._read_row, at[self.ids[at] == ids].tolist())

    def _read_row(self, place: int) -> RowRecord:
        """A row; its record is "" where it is not UTF-8, which no checksum is that of."""
        if place >= len(self._row_ids):
            return -1, b"", "", -1
        starts, size = self._starts, self._digest_sizes[place]
        line = bytes(self._line_bytes[starts[place] : starts[place + 1]])
        try:
            record = str(line[size:], "utf-8")
        except UnicodeDecodeError:
            record = ""
        return self._row_ids[place], line[:size], record, self._checksums[place]


def build_bundle(ids: np.ndarray, digests: Sequence[bytes], records: Sequence[str]) -> Segment:
    """Rows as a bundle."""
    lines = [digest + record.encode() for digest, record in zip(digests, records, strict=True)]
    begin = (ids & 0xFFFFFFFF).tolist()
    crc = np.fromiter(map(crc32, lines, begin), np.uint32, len(lines))
    size = np.fromiter(map(len, digests), np.uint8, len(lines))
    starts = np.zeros(len(lines) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, lines), np.int64, len(lines)), out=starts[1:])
    line = Ragged(np.frombuffer(b"".join(lines), np.uint8), starts)
    return _sort_by_digest(ids, {"line": line, "crc": crc, "size": size})


def merge_bundles(parts: Sequence[Segment]) -> Segment:
    """The rows of several bundles, or some of theirs, as one."""
    whole: dict[str, Any] = {
        name: (concat_ragged if name == "line" else np.concatenate)(
            [x.tensors[name] for x in parts]
        )
        for name in ("line", "crc", "size")
    }
    return _sort_by_digest(np.concatenate([x.ids for x in parts]), whole)


def _sort_by_digest(ids: np.ndarray, tensors: dict[str, Any]) -> Segment:
    line, size, eight = tensors["line"], tensors["size"], np.arange(8)
    text = np.append(line.flat, np.zeros(8, np.uint8))[line.starts[:-1, None] + eight]
    if size.min(initial=8) < 8:
        text[eight >= size[:, None]] = 0
    prefix = text.reshape(-1).view("<u8")
    order = np.argsort(prefix, kind="stable")  # so that rows of one digest stay in their order
    return Segment(ids, {**tensors, "prefix": prefix[order], "place": order.astype(np.uint32)})


def _as_memoryview(array: np.ndarray) -> memoryview:
    """An array as numbers that cost no NumPy scalar each."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("=")).data
